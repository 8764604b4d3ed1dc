"""Sections of the reproduction: what the paper says, what came out, tables and figures.

`make` runs what is missing of an experiment and returns its section. A `Section` is plain data;
`fedgft.paper.page` writes it to a folder and reads it again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedgft.formatting import Table
from fedgft.metrics import get_metric
from fedgft.paper import plots
from fedgft.paper.cells import (
    CONVERGENCE,
    DASH,
    DATA_NAMES,
    EXPERIMENTS,
    LABELS,
    Experiment,
    differs_from_published,
    published,
)
from fedgft.paper.claims import CLAIMS, Finding, accuracy_table
from fedgft.paper.convergence import RESIDUE, SMALL, Descent, Path, summary
from fedgft.paper.runner import Record, Runner
from fedgft.theory import (
    Example,
    analyze,
    locally_fair_globally_unfair,
    locally_unfair_globally_fair,
    simpson,
)

FAR_MARK = "✗"  # more than two published brackets away
COLLAPSED_MARK = "†"
TABLE_NOTE = "In this protocol the test rows are also among the clients' rows."
IMAGE_NOTE = (
    "In this protocol no test image is a client's, but people of whom a client has others are."
)


@dataclass(frozen=True)
class Section:
    """What a reader sees of an experiment.

    Attributes
    ----------
    how
        Replicates, data sets and protocols.
    figures
        Pairs of a file name without its ending, and a caption.
    chosen
        What was chosen on inner splits.
    notes
        What could not be estimated.
    """

    name: str
    title: str
    claim: str
    note: str
    how: str
    findings: tuple[Finding, ...]
    tables: tuple[Table, ...]
    figures: tuple[tuple[str, str], ...]
    chosen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Made:
    """A section, its rows, and the functions that draw its figures when they are written."""

    section: Section
    rows: list[dict[str, Any]]
    figures: dict[str, Callable[[], Any]]


def make(
    name: str, runner: Runner, *, data: Sequence[str], protocols: Sequence[str], seeds: int
) -> Made:
    """Train what is missing of an experiment (a name in `cells.NAMES`) and make its section."""
    if name == "simpson":
        return _make_simpson()
    if name == "convergence":
        paths = {spec: runner.paths(spec, seeds=seeds) for spec in CONVERGENCE}
        return _make_convergence(paths, seeds=seeds)
    experiment = EXPERIMENTS[name]
    parts = [
        label_records(name, runner.records(experiment.cells(each, protocol, seeds=seeds)))
        for protocol in protocols
        for each in data
    ]
    records = [record for part in parts for record in part]
    tables = [table for part in parts for table in _make_tables(experiment, part)]
    if name == "table1" and seeds > 1:
        for protocol in protocols:
            tables.append(accuracy_table([r for r in records if r.cell.protocol == protocol]))
    figures: dict[str, Callable[[], Any]] = {}
    captions: dict[str, str] = {}
    for part in parts:
        for figure, caption, draw in _make_figures(experiment, part):
            figures[figure] = draw
            captions[figure] = caption
    section = Section(
        name=name,
        title=experiment.title,
        claim=experiment.claim,
        note=experiment.note,
        how=f"{seeds} replicates; {' and '.join(DATA_NAMES[n] for n in data)}; "
        f"protocol {' and '.join(protocols)}.",
        findings=tuple(CLAIMS[name](records)),
        tables=tuple(tables),
        figures=tuple(captions.items()),
        chosen=_list_choices(experiment, records),
        notes=_list_notes(records),
    )
    return Made(section, [r.row for r in records], figures)


def label_records(experiment: str, records: Sequence[Record]) -> list[Record]:
    """Return the records with complete rows: with what was varied and what was published."""
    labeled = []
    for record in records:
        cell = record.cell
        names = ("clients", "partition", "penalty", "epochs", "rule")
        varied = {name: getattr(cell, name) for name in names}
        row = {"experiment": experiment, **record.row, **varied, **published(experiment, cell)}
        labeled.append(replace(record, row=row))
    return labeled


def _make_figures(
    experiment: Experiment, records: Sequence[Record]
) -> list[tuple[str, str, Callable[[], Any]]]:
    """File names, captions and functions that draw."""
    cell = records[0].cell
    figures = []
    where = f"{cell.data_name}, protocol {cell.protocol}"
    stem = f"{experiment.name}-{cell.data}-{cell.protocol}"
    if any(r.row["published_gap"] is not None for r in records):
        caption = f"Ours on top of the published numbers: {where}."
        draw = partial(plots.plot_published, experiment, records)
        figures.append((f"{stem}-published", caption, draw))
    if experiment.name not in ("table1", "fairfed"):
        caption = f"Accuracy and gap over the rounds: {where}."
        drawn = plots.plot_rounds(experiment, records)
        figures += [(name, caption, draw) for name, draw in drawn.items()]
    elif cell.protocol == "heldout" and experiment.name == "table1":
        caption = f"Decisions on people nobody trained on: {where}."
        draw = partial(plots.plot_heldout, experiment, records)
        figures.append((f"{stem}-unseen", caption, draw))
    return figures


def _list_choices(experiment: Experiment, records: Sequence[Record]) -> tuple[str, ...]:
    """What was chosen on inner splits; the texts name alpha, method and metric already."""
    names = [n for n in experiment.varied if n not in ("alpha", "method")]
    texts: dict[str, None] = {}
    for record in records:
        label = record.cell.label(names)
        where = f"{record.cell.data_name}, {label}, " if label else f"{record.cell.data_name}, "
        texts |= dict.fromkeys(where + text for text in record.chosen)
    return tuple(texts)


def _list_notes(records: Sequence[Record]) -> tuple[str, ...]:
    """Each note once, with the number of its cells."""
    notes: dict[str, list[str]] = {}
    for record in records:
        for note in record.notes:
            about, _, text = note.partition(": ")
            where = f"{record.cell.data_name}, protocol {record.cell.protocol}"
            notes.setdefault(f"{where}: {text}", []).append(about)
    return tuple(f"{text} ({len(cells)} cells, first {cells[0]})" for text, cells in notes.items())


# Tables of an experiment


def _make_tables(experiment: Experiment, records: Sequence[Record]) -> list[Table]:
    if experiment.name == "trajectory":  # its cells are those of Table 1
        return []
    tables = [score_table(experiment, records), decision_table(experiment, records)]
    if records[0].cell.protocol == "heldout":
        tables.reverse()
    return tables if experiment.name == "table1" else tables[:1]


def score_table(experiment: Experiment, records: Sequence[Record]) -> Table:
    """Return the paper's layout: scores on the federation's rows, beside the published numbers."""
    has_published = any(r.row["published_gap"] is not None for r in records)
    columns = []  # metric, the paper's column, our field
    header = [LABELS[name] for name in experiment.varied]
    for metric in experiment.metrics:
        runs = "" if len(experiment.accuracy_of) == 1 else f", {metric.upper()} runs"
        if metric in experiment.accuracy_of:
            columns.append((metric, "accuracy", "accuracy"))
            header += [f"accuracy{runs}", "published"] if has_published else [f"accuracy{runs}"]
        columns.append((metric, "gap", "gap_soft"))
        gap = f"{metric.upper()} gap"
        header += [gap, "published"] if has_published else [gap]
    rows = []
    for variant in plots.by_variant(experiment, records):
        texts = _stub(experiment, variant)
        for metric, what, field in columns:
            row = variant[metric].row
            mark = f" {FAR_MARK}" if differs_from_published(row, what, row[field]) else ""
            texts.append(format_mean(row, field) + mark)
            if has_published:
                texts.append(_format_published(row, what))
        rows.append(tuple(texts))
    note = f"{FAR_MARK}: more than two published brackets away from the published figure."
    return Table(
        f"{_describe_runs(records)}: gaps of scores on the federation's own rows",
        tuple(header),
        tuple(rows),
        len(experiment.varied),
        (note,) if has_published else (),
    )


def decision_table(experiment: Experiment, records: Sequence[Record]) -> Table:
    """Return gaps of decisions on test rows, with their interval and the gap by chance."""
    header = [LABELS[name] for name in experiment.varied]
    for metric in experiment.metrics:
        name = metric.upper()
        header += [f"accuracy, {name} runs", "balanced accuracy", "selected, by group"]
        header += [f"{name} gap", "95% interval", "by chance"]
    rows = []
    for variant in plots.by_variant(experiment, records):
        texts = _stub(experiment, variant)
        for record in variant.values():
            row = record.row
            low = row["gap_hard_test_low"]
            texts += [
                format_mean(row, "accuracy") + (f" {COLLAPSED_MARK}" if row["collapsed"] else ""),
                format_mean(row, "balanced_accuracy"),
                _format_rates(row["selection_rates"]),
                format_mean(row, "gap_hard_test"),
                DASH
                if low is None
                else f"{100 * low:.1f} to {100 * row['gap_hard_test_high']:.1f}",
                DASH if row["floor"] is None else f"{100 * row['floor']:.1f}",
            ]
        rows.append(tuple(texts))
    where = "held-out rows" if records[0].cell.protocol == "heldout" else "the test rows"
    return Table(
        f"{_describe_runs(records)}: gaps of decisions on {where}",
        tuple(header),
        tuple(rows),
        len(experiment.varied),
        _decision_notes(records),
    )


def _decision_notes(records: Sequence[Record]) -> tuple[str, ...]:
    rows = [record.row for record in records]
    constant = [row["accuracy_constant"] for row in rows if row["accuracy_constant"] is not None]
    ends = [DASH]
    if constant:
        ends = dict.fromkeys([f"{100 * min(constant):.1f}", f"{100 * max(constant):.1f}"])
    notes = [
        "The interval is that of one replicate's test rows, averaged over the replicates.",
        f"Selected, by group: {', '.join(rows[0]['selection_rates'])}, per cent. Always "
        f"predicting the most frequent class is right in {' to '.join(ends)}% of the test rows.",
    ]
    if any(row["collapsed"] for row in rows):
        notes.append(
            f"{COLLAPSED_MARK}: in some replicate the model has collapsed: it gives nearly "
            "everybody the same decision."
        )
    if any(row["gap_hard_test_low"] is None and row["gap_hard_test"] for row in rows):
        notes.append(f"{DASH} for an interval: not estimable: fewer than ten rows.")
    if records[0].cell.protocol == "paper":
        notes.append(IMAGE_NOTE if records[0].cell.data == "celeba" else TABLE_NOTE)
    return tuple(notes)


def _stub(experiment: Experiment, variant: Mapping[str, Record]) -> list[str]:
    cell = next(iter(variant.values())).cell
    return [cell.text(name) for name in experiment.varied]


def _describe_runs(records: Sequence[Record]) -> str:
    cell = records[0].cell
    return f"{cell.data_name}, protocol {cell.protocol}, {cell.seeds} replicates"


def format_mean(row: dict[str, Any], name: str) -> str:
    """Return mean and standard deviation over the replicates, in per cent or points."""
    mean = row[name]
    deviation = row[f"{name}_sd"]
    if mean is None:
        return DASH
    digits = 2 if name != "accuracy" and mean < 0.02 else 1
    text = f"{100 * mean:.{digits}f}"
    return text if deviation is None else f"{text} ± {100 * deviation:.{digits}f}"


def _format_published(row: dict[str, Any], what: str) -> str:
    """With as many decimals as the paper prints: one in its main table, two in the others."""
    if row[f"published_{what}"] is None:
        return DASH
    numbers = [100 * row[f"published_{what}"], 100 * row[f"published_{what}_bracket"]]
    digits = 1 if all(abs(round(10 * x) - 10 * x) < 1e-6 for x in numbers) else 2
    return f"{numbers[0]:.{digits}f} ({numbers[1]:.{digits}f})"


def _format_rates(rates: dict[str, Any]) -> str:
    """Selection rates by group, in per cent; of more than two classes every class of a group."""
    texts = []
    for rate in rates.values():
        values = rate.values() if isinstance(rate, dict) else [rate]
        texts.append("/".join(f"{100 * v:.1f}" for v in values if v is not None) or DASH)
    return ", ".join(texts)


# Theory: Simpson's table


def _make_simpson() -> Made:
    """Table 2 of the paper, and both directions of Theorem 4.1 for several C."""
    tally = simpson().sums_by_client()
    metric = get_metric("sp")
    total = tally.sum(0).statistics(metric, "hard")
    sums = np.concatenate((tally.statistics(metric, "hard"), total[None]))[:, :, 0]
    names = ("department 1", "department 2", "both together")
    lines = []
    for name, (accepted, applied) in zip(names, sums, strict=True):
        rates = accepted / applied
        texts = (
            f"{a:.0f} of {n:.0f} ({100 * r:.0f}%)"
            for a, n, r in zip(accepted, applied, rates, strict=True)
        )
        lines.append((name, *texts, f"{abs(rates[0] - rates[1]):.2f}"))
    rows = [_example_row("simpson", None, simpson())]
    for gap in (0.5, 0.9, 0.99):
        fair = locally_fair_globally_unfair(3, gap)
        unfair = locally_unfair_globally_fair(3, gap)
        rows.append(_example_row("locally fair, globally unfair", gap, fair))
        rows.append(_example_row("locally unfair, globally fair", gap, unfair))
    section = Section(
        name="simpson",
        title="Simpson's table: fair everywhere, unfair together",
        claim="Local fairness does not imply global fairness, nor the other way round.",
        note="",
        how="No training: the rows are constructed.",
        findings=_simpson_findings(rows),
        tables=(
            Table("Accepted applicants", ("", "women", "men", "SP gap"), tuple(lines), 1),
            _example_table(rows),
        ),
        figures=(("simpson", "Acceptance rates by department and overall."),),
    )
    return Made(section, rows, {"simpson": plots.plot_simpson})


def _example_row(name: str, gap: float | None, example: Example) -> dict[str, Any]:
    analysis = analyze(get_metric("sp"), example.sums_by_client(), "hard")
    return {
        "experiment": "simpson",
        "example": name,
        "C": gap,
        "clients": len(analysis.weights),
        "rows": len(example.labels),
        "smallest_local_gap": float(analysis.local_gaps.min()),
        "largest_local_gap": float(analysis.local_gaps.max()),
        "gap": analysis.gap,
        "total_variation": analysis.total_variation,
        "bound": analysis.bound_tight,
    }


def _simpson_findings(rows: Sequence[dict[str, Any]]) -> tuple[Finding, ...]:
    first = rows[0]
    holds = all(r["largest_local_gap"] == 0 and r["gap"] >= r["C"] for r in rows[1::2])
    holds &= all(r["smallest_local_gap"] >= r["C"] and r["gap"] < 1e-12 for r in rows[2::2])
    return (
        Finding(
            f"SP is {first['largest_local_gap']:.2f} in each department and {first['gap']:.2f} "
            "overall.",
            first["largest_local_gap"] == 0 and round(first["gap"], 2) == 0.48,
        ),
        Finding(
            "Theorem 4.1: with all local gaps 0 the global gap exceeds C for C = 0.5, 0.9 and "
            "0.99; with all local gaps at least C it is 0.",
            holds,
        ),
        Finding(
            "The bound α(1 − TV) + TV, sharper than the paper's α + DH, holds in every one of "
            "them.",
            all(r["gap"] <= r["bound"] + 1e-12 for r in rows),
        ),
    )


def _example_table(rows: Sequence[dict[str, Any]]) -> Table:
    lines = []
    for r in rows:
        local = f"{r['smallest_local_gap']:.3f} to {r['largest_local_gap']:.3f}"
        numbers = [f"{r[name]:.3f}" for name in ("gap", "total_variation", "bound")]
        constant = DASH if r["C"] is None else f"{r['C']:g}"
        lines.append((r["example"], constant, str(r["clients"]), str(r["rows"]), local, *numbers))
    header = ("example", "C", "clients", "rows", "local gaps", "global gap", "TV", "bound")
    return Table("Theorem 4.1, both directions, as rows of data (SP)", header, tuple(lines), 1)


# Theory: convergence


def _make_convergence(paths: Mapping[Descent, Sequence[Path]], *, seeds: int) -> Made:
    """Theorem 5.2 and Corollary 5.3."""
    rows = [
        row
        for spec, each in paths.items()
        for path in each
        for row in summary(spec, path, seeds=seeds)
    ]
    steps = max(path.smoothness * spec.rate for spec, each in paths.items() for path in each)
    names = {spec: f"convergence-{spec.data}-{spec.lam:g}" for spec in paths}
    section = Section(
        name="convergence",
        title="Theorem 5.2 and Corollary 5.3: convergence, measured",
        claim="min ‖∇L‖² is O(1/T) for gradient descent with a constant step, O(log T/√T) for "
        "steps t^(-1/2) and O(1/log T) for steps 1/t.",
        note="J = x² and statistical parity, alpha 5, one local step a round, everybody takes "
        "part, features standardized. Gradients are exact, of the pooled objective.",
        how=f"{seeds} replicates; {DATA_NAMES[next(iter(paths)).data]}.",
        findings=_convergence_findings(rows, steps),
        tables=tuple(
            _rate_table(spec, [r for r in rows if r["lam"] == spec.lam]) for spec in paths
        ),
        figures=tuple((names[spec], f"Measured and bound, λ = {spec.lam:g}.") for spec in paths),
    )
    figures = {
        names[spec]: partial(plots.plot_convergence, spec, each) for spec, each in paths.items()
    }
    return Made(section, rows, figures)


def _convergence_findings(rows: Sequence[dict[str, Any]], steps: float) -> tuple[Finding, ...]:
    below = [r["gradient"] <= r["bound"] for r in rows]
    late = [r for r in rows if r["promised"] is not None]
    slow = [
        f"λ = {r['lam']:g}, {r['mode']}, {plots.STEP_NAMES[r['rule']]}, T = {r['rounds']} "
        f"(×{r['decline']:.2f} against ×{r['promised']:.2f})"
        for r in late
        if r["decline"] > r["promised"]
    ]
    still = "and still below the bound" if all(below) else "as far as the bound goes"
    but = f"; slower, {still}: {'; '.join(slow)}" if slow else ""
    return (
        Finding(
            f"The smallest squared gradient is below the bound with its constants in "
            f"{sum(below)} of {len(below)} rows.",
            all(below),
        ),
        Finding(
            f"Over the last tenfold of rounds it fell at least as fast as Corollary 5.3's rate "
            f"in {len(late) - len(slow)} of {len(late)} rows{but}."
        ),
        Finding(
            f"The largest step times the smoothness seen is at most {steps:.2f}; the proof "
            "asks for no more than 1.",
            steps <= 1,
        ),
        Finding(
            "B, the dissimilarity the proof assumes bounded, is "
            f"{max(r['dissimilarity'] for r in rows):.2g} at most where ‖∇L‖² is above "
            f"{SMALL:g}, and grows on: where the gradient of L vanishes those of the clients "
            "do not, unless all clients agree. Full participation does not need it."
        ),
    )


def _rate_table(spec: Descent, rows: Sequence[dict[str, Any]]) -> Table:
    header = "mode|steps|T|min ‖∇L‖²|bound|since T/10|promised|smoothness|σ|B"
    lines = []
    for r in rows:
        square = f"{r['gradient']:.2g}" if r["gradient"] > RESIDUE else f"below {RESIDUE:g}"
        line = [r["mode"], plots.STEP_NAMES[r["rule"]], str(r["rounds"]), square]
        line.append(f"{r['bound']:.2g}")
        for name in ("decline", "promised"):
            line.append(DASH if r[name] is None else f"×{r[name]:.2g}")
        line += [f"{r[name]:.3g}" for name in ("smoothness", "sigma", "dissimilarity")]
        lines.append(tuple(line))
    title = f"λ = {spec.lam:g}, largest step {spec.rate:g}"
    return Table(title, tuple(header.split("|")), tuple(lines), 2)
