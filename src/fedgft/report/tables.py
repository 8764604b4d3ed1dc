"""Tables as plain text in cells: built once, and rendered as Markdown, HTML or on a terminal."""

from collections.abc import Iterator, Sequence
from typing import Any

from fedgft.experiments.published import differs
from fedgft.experiments.run import Record
from fedgft.experiments.spec import Cell, Experiment
from fedgft.layout import Table
from fedgft.report.figures import NAMES

MARK = "✗"  # more than two published brackets away
COLLAPSED = "†"
DASH = "–"
ROWS = "In this protocol the test rows are also among the clients' rows."
IMAGES = "In this protocol no test image is a client's, but people of whom a client has others are."
DATA = {"adult": "Adult", "compas": "COMPAS", "celeba": "CelebA"}
LABELS = {"alpha": "α", "method": "method", "penalty": "J(x)", "lam": "λ", "partition": "clients",
          "epochs": "E", "lr": "η", "clients": "K", "rule": "rule", "beta": "β"}  # fmt: skip
VALUES = {"penalty": {"l1": "x", "l2": "x²", "half": "x²/2"}, "method": NAMES,
          "partition": {"dirichlet": "mixed", "pure": "pure"}}  # fmt: skip


def by_variant(experiment: Experiment, records: Sequence[Record]) -> Iterator[dict[str, Record]]:
    """The records of each variant by metric; they come in the order of `Experiment.cells`."""
    step = len(experiment.metrics)
    for at in range(0, len(records), step):
        yield {record.cell.metric: record for record in records[at : at + step]}


def value(cell: Cell, name: str) -> str:
    """A field of a cell as it stands in a table; a dash where the method has no use for it."""
    if name in ("lam", "penalty") and cell.method not in ("fedgft", "lft"):
        return DASH
    found = getattr(cell, name)
    if name in VALUES:
        return VALUES[name][found]
    return found if isinstance(found, str) else f"{found:g}"


def label(cell: Cell, names: Sequence[str]) -> str:
    """What tells a cell from its neighbours, for legends and axes."""
    plain = ("method", "partition", "rule")
    shown = ((n, value(cell, n)) for n in names if value(cell, n) != DASH)
    return ", ".join(text if n in plain else f"{LABELS[n]} = {text}" for n, text in shown)


def against_published(experiment: Experiment, records: Sequence[Record]) -> Table:
    """The paper's layout: scores on the federation's rows, with the published figure beside."""
    known = [m for m in experiment.metrics for r in records
             if r.cell.metric == m and r.row["published_gap"] is not None]  # fmt: skip
    header, rows = [LABELS[name] for name in experiment.varied], []
    for metric in experiment.metrics:
        runs = "" if len(experiment.accuracy_of) == 1 else f", {metric.upper()} runs"
        columns = [f"accuracy{runs}"] if metric in experiment.accuracy_of else []
        for column in (*columns, f"{metric.upper()} gap"):
            header += [column, "published"] if known else [column]
    for variant in by_variant(experiment, records):
        cells = [value(next(iter(variant.values())).cell, name) for name in experiment.varied]
        for metric, record in variant.items():
            row = record.row
            if metric in experiment.accuracy_of:
                cells += _pair(row, "accuracy", "accuracy", bool(known))
            cells += _pair(row, "gap", "gap_soft", bool(known))
        rows.append(tuple(cells))
    notes = (f"{MARK}: more than two published brackets away from the published figure.",)
    return Table(
        f"{_where(records)}: gaps of scores on the federation's own rows",
        tuple(header), tuple(rows), len(experiment.varied), notes if known else (),
    )  # fmt: skip


def decisions(experiment: Experiment, records: Sequence[Record]) -> Table:
    """Gaps of decisions on test rows, with their interval and what chance alone would show."""
    header, rows = [LABELS[name] for name in experiment.varied], []
    for metric in experiment.metrics:
        name = metric.upper()
        header += [f"accuracy, {name} runs", "balanced accuracy", "selected, by group"]
        header += [f"{name} gap", "95% interval", "by chance"]
    for variant in by_variant(experiment, records):
        cells = [value(next(iter(variant.values())).cell, name) for name in experiment.varied]
        for record in variant.values():
            row = record.row
            low, high = row["gap_hard_test_low"], row["gap_hard_test_high"]
            cells += [
                ours(row, "accuracy") + (f" {COLLAPSED}" if row["collapsed"] else ""),
                ours(row, "balanced_accuracy"),
                selected(row["selection_rates"]),
                ours(row, "gap_hard_test"),
                DASH if low is None else f"{100 * low:.1f} to {100 * high:.1f}",
                DASH if row["floor"] is None else f"{100 * row['floor']:.1f}",
            ]
        rows.append(tuple(cells))
    rows_of = "held-out rows" if records[0].cell.protocol == "heldout" else "the test rows"
    rows_seen = [record.row for record in records]
    notes = [
        "The interval is that of one replicate's test rows, averaged over the replicates.",
        f"Selected, by group: {', '.join(rows_seen[0]['selection_rates'])}, per cent. Always "
        f"predicting the most frequent class is right in {_constant(rows_seen)}% of the test rows.",
    ]
    if any(row["collapsed"] for row in rows_seen):
        notes.append(
            f"{COLLAPSED}: in some replicate the model has collapsed: it gives nearly everybody "
            "the same decision."
        )
    if any(row["gap_hard_test_low"] is None and row["gap_hard_test"] for row in rows_seen):
        notes.append(f"{DASH} for an interval: not estimable: fewer than ten rows.")
    if records[0].cell.protocol == "paper":
        notes.append(IMAGES if records[0].cell.data == "celeba" else ROWS)
    return Table(
        f"{_where(records)}: gaps of decisions on {rows_of}",
        tuple(header), tuple(rows), len(experiment.varied), tuple(notes),
    )  # fmt: skip


def selected(rates: dict[str, Any]) -> str:
    """Selection rates by group, in per cent; of more than two classes every class of a group."""
    out = []
    for rate in rates.values():
        each = list(rate.values()) if isinstance(rate, dict) else [rate]
        known = [f"{100 * value:.1f}" for value in each if value is not None]
        out.append("/".join(known) or DASH)
    return ", ".join(out)


def _constant(rows: Sequence[dict[str, Any]]) -> str:
    known = [100 * row["accuracy_constant"] for row in rows if row["accuracy_constant"] is not None]
    if not known:
        return DASH
    low, high = f"{min(known):.1f}", f"{max(known):.1f}"
    return low if low == high else f"{low} to {high}"


def ours(row: dict[str, Any], name: str) -> str:
    """Mean and standard deviation over the replicates, in per cent or points."""
    mean, spread = row[name], row[f"{name}_sd"]
    if mean is None:
        return DASH
    text = f"{100 * mean:.{_digits(name, mean)}f}"
    return text if spread is None else f"{text} ± {100 * spread:.{_digits(name, mean)}f}"


def _digits(name: str, mean: float) -> int:
    return 2 if name != "accuracy" and mean < 0.02 else 1


def _pair(row: dict[str, Any], what: str, name: str, published: bool) -> list[str]:
    mark = f" {MARK}" if differs(row, what, row[name]) else ""
    cells = [ours(row, name) + mark]
    if published:
        at, bracket = row[f"published_{what}"], row[f"published_{what}_bracket"]
        cells.append(DASH if at is None else _printed(100 * at, 100 * bracket))
    return cells


def _printed(at: float, bracket: float) -> str:
    """With as many decimals as the paper prints: one in its main table, two in the others."""
    digits = 1 if all(abs(round(10 * x) - 10 * x) < 1e-6 for x in (at, bracket)) else 2
    return f"{at:.{digits}f} ({bracket:.{digits}f})"


def _where(records: Sequence[Record]) -> str:
    cell = records[0].cell
    return f"{DATA.get(cell.data, cell.data)}, protocol {cell.protocol}, {cell.seeds} replicates"
