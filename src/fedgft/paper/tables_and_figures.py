"""Tables and figures of the paper's experiments, from finished records.

A figure is drawn by a function that returns it; nothing is drawn before it is written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedgft.formatting import Table, format_interval, format_points, group_colors
from fedgft.metrics import get_metric
from fedgft.paper.cells import DASH, DATA_NAMES, LABELS, Experiment, differs_from_published
from fedgft.paper.convergence import Descent, DescentPath, bounds
from fedgft.paper.runner import Record
from fedgft.study.figures import (
    COLLAPSED_MARK,
    DARK,
    GRID,
    STYLES,
    Column,
    Curve,
    clean_axis,
    describe_replicates,
    label_gap,
    make_panels,
    plot_columns,
    set_heading,
    set_title,
    simpson_rates,
)
from fedgft.study.protocol import get_protocol

FAR_MARK = "✗"  # more than 2 published standard deviations away
TABLE_NOTE = "In this protocol the test rows are also among the clients' rows."
IMAGE_NOTE = (
    "In this protocol no test image is a client's, but people of whom a client has others are."
)
# Colors and dashes for the values of a setting: distinct for the color-blind, and in print.
LINE_STYLES = (
    ("#000000", (0, (1, 1))),
    ("#0072b2", (0, (5, 2))),
    ("#d55e00", (0, (5, 2, 1, 2))),
    ("#009e73", (0, ())),
    ("#cc79a7", (0, (3, 1, 1, 1, 1, 1))),
    ("#e69f00", (0, (8, 2))),
)
STEP_NAMES = {"constant": "η constant", "inverse-sqrt": "η ~ 1/√t", "inverse": "η ~ 1/t"}
OURS = "#009e73"
PUBLISHED = "#bdbdbd"
CHANCE = "#808080"


def by_variant(experiment: Experiment, records: Sequence[Record]) -> Iterator[dict[str, Record]]:
    """Yield {metric: record} of each variant; records are in the order of `Experiment.cells`."""
    step = len(experiment.metrics)
    for start in range(0, len(records), step):
        yield {record.cell.metric: record for record in records[start : start + step]}


# Tables of an experiment


def make_tables(experiment: Experiment, records: Sequence[Record]) -> list[Table]:
    """Return the tables of one data set and protocol; the one with the headline gap is first.

    Table 1 is returned for scores and for decisions. Other experiments have one table, for the
    protocol's headline gap: scores on the federation's rows (paper), or decisions on test rows
    (heldout).
    """
    if experiment.name == "trajectory":  # its cells are those of Table 1
        return []
    tables = [score_table(experiment, records), decision_table(experiment, records)]
    if records[0].cell.protocol == "heldout":
        tables.reverse()
    return tables if experiment.name == "table1" else tables[:1]


def score_table(experiment: Experiment, records: Sequence[Record]) -> Table:
    """Return the paper's layout: scores on the federation's rows, beside the published numbers.

    Parameters
    ----------
    experiment
        It says which fields are varied, and which metrics have a column of accuracies.
    records
        All of one data set and protocol, in the order of `Experiment.cells`.
    """
    has_published = any(r.row["published_gap"] is not None for r in records)
    columns = []  # metric, the paper's column, our field
    header = []
    for metric in experiment.metrics:
        if metric in experiment.accuracy_of:
            runs = "" if len(experiment.accuracy_of) == 1 else f", {metric.upper()} runs"
            columns.append((metric, "accuracy", "accuracy"))
            header.append(f"accuracy{runs}")
        columns.append((metric, "gap", "gap_soft"))
        header.append(f"{metric.upper()} gap")
    if has_published:
        header = [name for title in header for name in (title, "published")]

    def format_variant(variant: Mapping[str, Record]) -> Iterator[str]:
        for metric, what, field in columns:
            row = variant[metric].row
            mark = f" {FAR_MARK}" if differs_from_published(row, what, row[field]) else ""
            yield format_mean(row, field) + mark
            if has_published:
                yield _format_published(row, what)

    note = f"{FAR_MARK}: more than 2 published standard deviations away from the published figure."
    title = f"{_describe_runs(records)}: gaps of scores on the federation's own rows"
    notes = (note,) if has_published else ()
    return _table(experiment, records, format_variant, title=title, header=header, notes=notes)


def decision_table(experiment: Experiment, records: Sequence[Record]) -> Table:
    """Return gaps of decisions on test rows, with their interval and the noise floor.

    The parameters are those of `score_table`. Beside each accuracy stand the balanced accuracy and
    the selection rates by group, which show whether a model has collapsed.
    """
    header = []
    for metric in experiment.metrics:
        name = metric.upper()
        header += [f"accuracy, {name} runs", "balanced accuracy", "selected, by group"]
        header += [f"{name} gap", "95% interval", "noise floor"]

    def format_variant(variant: Mapping[str, Record]) -> Iterator[str]:
        for row in (record.row for record in variant.values()):
            yield format_mean(row, "accuracy") + (f" {COLLAPSED_MARK}" if row["collapsed"] else "")
            yield format_mean(row, "balanced_accuracy")
            yield _format_rates(row["selection_rates"])
            yield format_mean(row, "gap_hard_test")
            yield format_interval(row["gap_hard_test_low"], row["gap_hard_test_high"])
            yield format_points(row["floor"])

    where = "held-out rows" if records[0].cell.protocol == "heldout" else "the test rows"
    title = f"{_describe_runs(records)}: gaps of decisions on {where}"
    notes = _decision_notes(records)
    return _table(experiment, records, format_variant, title=title, header=header, notes=notes)


def _table(
    experiment: Experiment,
    records: Sequence[Record],
    format_variant: Callable[[Mapping[str, Record]], Iterator[str]],
    *,
    title: str,
    header: Sequence[str],
    notes: tuple[str, ...],
) -> Table:
    """Make a table with one line per variant, which begins with the fields that are varied.

    Parameters
    ----------
    format_variant
        Yields the other cells of the line, given the records of a variant by metric.
    title, header, notes
        The caption, the names of those other columns, and the sentences below.
    """
    names = experiment.varied
    rows = []
    for variant in by_variant(experiment, records):
        cell = next(iter(variant.values())).cell
        rows.append((*map(cell.text, names), *format_variant(variant)))
    header = (*(LABELS[name] for name in names), *header)
    return Table(title, header, tuple(rows), len(names), notes)


def _decision_notes(records: Sequence[Record]) -> tuple[str, ...]:
    """Sentences below a table of decisions: what its columns and marks mean."""
    rows = [record.row for record in records]
    constant = [row["accuracy_constant"] for row in rows if row["accuracy_constant"] is not None]
    ends = dict.fromkeys(format_points(end(constant, default=None)) for end in (min, max))
    notes = [
        "The interval is that of one replicate's test rows, averaged over the replicates.",
        f"Selected, by group: {', '.join(rows[0]['selection_rates'])}, percent. Always "
        f"predicting the most frequent class has accuracy {' to '.join(ends)}% on the test rows.",
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


def _describe_runs(records: Sequence[Record]) -> str:
    cell = records[0].cell
    return f"{cell.data_name}, protocol {cell.protocol}, {cell.seeds} replicates"


def format_mean(row: dict[str, Any], name: str) -> str:
    """Return mean and standard deviation over the replicates, in percent or points.

    A gap below two points has two decimals; a dash stands for what is not estimable.

    >>> format_mean({"gap_soft": 0.0123, "gap_soft_sd": 0.004}, "gap_soft")
    '1.23 ± 0.40'
    """
    mean = row[name]
    deviation = row[f"{name}_sd"]
    if mean is None:
        return DASH
    digits = 2 if name != "accuracy" and mean < 0.02 else 1
    text = f"{100 * mean:.{digits}f}"
    return text if deviation is None else f"{text} ± {100 * deviation:.{digits}f}"


def _format_published(row: dict[str, Any], what: str) -> str:
    """Use as many decimals as the paper prints: one in its main table, two in the others."""
    if row[f"published_{what}"] is None:
        return DASH
    numbers = [100 * row[f"published_{what}"], 100 * row[f"published_{what}_bracket"]]
    digits = 1 if all(abs(round(10 * x) - 10 * x) < 1e-6 for x in numbers) else 2
    return f"{numbers[0]:.{digits}f} ({numbers[1]:.{digits}f})"


def _format_rates(rates: dict[str, Any]) -> str:
    """Selection rates by group, in percent; with more than two classes, one rate per class."""
    texts = []
    for rate in rates.values():
        values = rate.values() if isinstance(rate, dict) else [rate]
        texts.append("/".join(f"{100 * v:.1f}" for v in values if v is not None) or DASH)
    return ", ".join(texts)


# Over the rounds


def plot_rounds(experiment: Experiment, records: Sequence[Record]) -> dict[str, Callable[[], Any]]:
    """Return {file name: function that draws} of one data set and protocol.

    If alpha is varied, there is one figure per metric, with one column per alpha; otherwise one
    figure, with one column per metric. The parameters are those of `score_table`.
    """
    has_alphas = "alpha" in experiment.varied
    cell = records[0].cell
    stem = f"{experiment.name}-{cell.data}-{cell.protocol}"
    pages = {stem: list(records)}
    if has_alphas:
        pages = {
            f"{stem}-{metric}": [r for r in records if r.cell.metric == metric]
            for metric in experiment.metrics
        }
    figures = {}
    for name, page in pages.items():
        columns: dict[Any, list[Record]] = {}
        for record in page:
            cell = record.cell
            columns.setdefault(cell.alpha if has_alphas else cell.metric, []).append(record)
        figures[name] = partial(
            plot_columns,
            [_column(experiment, column, has_alphas=has_alphas) for column in columns.values()],
            title=f"{cell.data_name}, protocol {cell.protocol}: {describe_replicates(cell.seeds)}",
            gap=label_gap(get_protocol(cell.protocol)),
        )
    return figures


def _column(experiment: Experiment, records: Sequence[Record], *, has_alphas: bool) -> Column:
    """One curve per record; methods have their own colors, values of a setting those of a list."""
    first = records[0].cell
    names = [n for n in experiment.varied if n != "alpha"]
    field = "gap_soft" if first.protocol == "paper" else "gap_hard_test"
    lines = []
    for i, record in enumerate(records):
        style = LINE_STYLES[i % len(LINE_STYLES)]
        if names == ["method"]:
            style = STYLES[record.cell.method]
        accuracy = record.curves["accuracy"]
        gap = record.curves[field]
        lines.append(Curve(record.cell.label(names), *style, record.rounds, accuracy, gap))
    title = get_metric(first.metric).title + (f", alpha {first.alpha:g}" if has_alphas else "")
    floors = [r.row["floor"] for r in records if r.row["floor"] is not None]
    chance = float(np.mean(floors)) if floors and first.protocol == "heldout" else None
    return Column(title, lines, chance)


# One line per variant


def plot_published(experiment: Experiment, records: Sequence[Record]) -> Any:
    """Draw every published number with 2 standard deviations either way, and ours on top of it.

    There is one panel per column of the paper's table, with one line per variant.
    """
    panels = [("accuracy", m) for m in experiment.accuracy_of]
    panels += [("gap", m) for m in experiment.metrics]
    figure, axes = _start_panels(experiment, records, len(panels))
    for axis, (what, metric) in zip(axes, panels, strict=True):
        field = "accuracy" if what == "accuracy" else "gap_soft"
        for y, variant in enumerate(by_variant(experiment, records)):
            row = variant[metric].row
            value = row[f"published_{what}"]
            if value is not None:
                bracket = row[f"published_{what}_bracket"]
                left = 100 * (value - 2 * bracket)
                label = "published, two standard deviations either way"
                axis.barh(y, 400 * bracket, left=left, height=0.7, color=PUBLISHED, label=label)
                axis.plot([100 * value] * 2, [y - 0.35, y + 0.35], color=DARK, lw=1.2)
            deviation = 100 * (row[f"{field}_sd"] or 0)
            style = {"fmt": "o", "ms": 4, "color": OURS, "lw": 1.2}
            label = "ours, one standard deviation"
            axis.errorbar(100 * row[field], y, xerr=deviation, label=label, **style)
        runs = f" ({metric.upper()} runs)" if len(experiment.accuracy_of) > 1 else ""
        title = f"accuracy{runs}, %" if what == "accuracy" else f"{metric.upper()} gap, points"
        set_title(axis, title, size=10)
        if what == "accuracy":  # one published bracket of 19 points would squeeze all the others
            both = [r.row[name] for r in records for name in ("accuracy", "published_accuracy")]
            known = [value for value in both if value is not None]
            axis.set_xlim(100 * min(known) - 4, 100 * max(known) + 4)
        else:
            axis.set_xlim(left=0.0)
    return _finish_panels(figure, axes)


def plot_heldout(experiment: Experiment, records: Sequence[Record]) -> Any:
    """Draw decisions on held-out rows: the gap, its 95% interval, and the noise floor.

    Each metric has a panel for the accuracy of its runs and one for the gap.
    """
    panels = [(what, m) for m in experiment.metrics for what in ("accuracy", "gap_hard_test")]
    figure, axes = _start_panels(experiment, records, len(panels))
    for axis, (field, metric) in zip(axes, panels, strict=True):
        is_gap = field != "accuracy"
        for y, variant in enumerate(by_variant(experiment, records)):
            row = variant[metric].row
            mean = row[field]
            if mean is None:
                continue
            deviation = row[f"{field}_sd"] or 0.0
            ends = (mean - deviation, mean + deviation)
            if is_gap:
                ends = (row[f"{field}_low"], row[f"{field}_high"])
            color = STYLES[variant[metric].cell.method][0]
            axis.plot([100 * end for end in ends], [y, y], color=color, lw=1.6)
            axis.plot(100 * mean, y, "o", color=color, ms=4.5)
            if is_gap:
                chance = [100 * row["floor"]] * 2
                style = {"color": CHANCE, "lw": 1.2, "label": "noise floor"}
                axis.plot(chance, [y - 0.4, y + 0.4], **style)
        label = "95% interval of a gap, one standard deviation of an accuracy"
        axis.plot([], [], "o-", ms=4.5, color=DARK, lw=1.6, label=label)
        name = metric.upper()
        title = f"{name} gap of decisions" if is_gap else f"accuracy, {name} runs"
        set_title(axis, title, size=10)
        axis.set_xlim(left=0.0 if is_gap else None)
    return _finish_panels(figure, axes)


def _start_panels(experiment: Experiment, records: Sequence[Record], panels: int) -> Any:
    """A figure and its panels, with one line per variant, named at the left."""
    firsts = [next(iter(v.values())).cell for v in by_variant(experiment, records)]
    names = [cell.label(experiment.varied) for cell in firsts]
    size = (2.6 + 2.7 * panels, 1.5 + 0.28 * len(names))
    figure, [axes] = make_panels(*size, 1, panels, sharey=True, squeeze=False)
    set_heading(figure, _describe_runs(records))
    axes[0].set_yticks(range(len(names)), names, fontsize=9)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return figure, axes


def _finish_panels(figure: Any, axes: Any) -> Any:
    """Clean all panels and put one legend below them, with every label once."""
    found: dict[str, Any] = {}
    for axis in axes:
        clean_axis(axis)
        axis.grid(axis="x", **GRID)
        found |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found.keys(), loc="outside lower left", ncols=2, frameon=False)
    return figure


# Theory


def plot_simpson() -> Any:
    """Draw Simpson's table: the same rate for both groups in each department, and not overall.

    The rates are those of `fedgft.study.figures.simpson_rates`.
    """
    figure, axis = make_panels(6.4, 3.4)
    rates = 100 * simpson_rates().T
    for g, (name, color) in enumerate(group_colors(["women", "men"]).items()):
        x = np.arange(3) + 0.38 * (g - 0.5)
        bars = axis.bar(x, rates[g], width=0.36, color=color, label=name)
        axis.bar_label(bars, fmt="%.0f%%", fontsize=9)
    axis.set_xticks(range(3), ["department 1", "department 2", "both together"])
    axis.set_ylabel("accepted, %")
    axis.set_ylim(0, 100)
    gap = abs(rates[0, -1] - rates[1, -1])
    set_title(axis, f"Fair in each department, {gap:.0f} points apart overall")
    axis.legend(frameon=False, loc="upper left")
    clean_axis(axis)
    return figure


def plot_convergence(spec: Descent, paths: Sequence[DescentPath]) -> Any:
    """Draw the smallest squared gradient so far over the rounds, and the bounds, by mode.

    Both axes are logarithmic, so that a rate is a slope. `paths` are those of one experiment.
    """
    figure, axes = make_panels(10, 4.4, 1, 2, sharey=True)
    titles = {"full": "gradient descent", "stochastic": f"stochastic, {spec.batch_size} rows each"}
    for axis, (mode, title) in zip(axes, titles.items(), strict=True):
        in_mode = [path for path in paths if path.mode == mode]
        for (color, dashes), path in zip(LINE_STYLES, in_mode, strict=False):
            t = path.rounds[1:]
            so_far = np.minimum.accumulate(path.square)[:-1]  # min over t < T
            axis.loglog(t, so_far, color=color, ls=dashes, lw=1.8, label=STEP_NAMES[path.rule])
            axis.loglog(t, bounds(spec, path)[t - 1], color=color, lw=1, alpha=0.45)
        set_title(axis, title, size=10)
        axis.set_xlabel("rounds T")
        axis.grid(**GRID)
    axes[0].set_ylabel("min ‖∇L‖² over t < T")
    axes[0].set_ylim(bottom=1e-8)
    axes[0].legend(frameon=False, loc="lower left")
    title = f"{DATA_NAMES[spec.data]}, λ = {spec.lam:g}, largest step {spec.rate:g}: thick, "
    title += "measured; thin, the bound with its constants"
    set_heading(figure, title)
    return figure
