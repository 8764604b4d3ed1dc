"""Figures of the paper's experiments, from finished records."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedgft.experiments.convergence import Descent, Path, bounds
from fedgft.experiments.protocol import get_protocol
from fedgft.experiments.run import Record
from fedgft.experiments.spec import Experiment
from fedgft.metrics import get_metric
from fedgft.report.figures import STYLES, Column, Curve, gap_label, over_rounds, replicates, tidy
from fedgft.report.tables import DATA, by_variant, label
from fedgft.theory import analyse, simpson

# For values of a knob: apart for the colour-blind, and told apart by dashes in print.
LOOKS = (
    ("#000000", (0, (1, 1))), ("#0072b2", (0, (5, 2))), ("#d55e00", (0, (5, 2, 1, 2))),
    ("#009e73", (0, ())), ("#cc79a7", (0, (3, 1, 1, 1, 1, 1))), ("#e69f00", (0, (8, 2))),
)  # fmt: skip
RULES = {"constant": "η constant", "inverse-sqrt": "η ~ 1/√t", "inverse": "η ~ 1/t"}
OURS, THEIRS, CHANCE = "#009e73", "#bdbdbd", "#808080"


def curves(experiment: Experiment, records: Sequence[Record]) -> dict[str, Callable[[], Any]]:
    """Over the rounds, of one data set and protocol: columns are alphas, or else the metrics."""
    by_alpha = "alpha" in experiment.varied
    if by_alpha:
        pages = {f"-{m}": [r for r in records if r.cell.metric == m] for m in experiment.metrics}
        split = lambda r: r.cell.alpha  # noqa: E731
    else:
        pages, split = {"": list(records)}, lambda r: r.cell.metric
    out, cell = {}, records[0].cell
    for name, page in pages.items():
        columns = [
            _column(experiment, [r for r in page if split(r) == key], by_alpha=by_alpha)
            for key in dict.fromkeys(map(split, page))
        ]
        title = f"{DATA.get(cell.data, cell.data)}, protocol {cell.protocol}"
        out[f"{experiment.name}-{cell.data}-{cell.protocol}{name}"] = partial(
            over_rounds, columns, title=f"{title}: {replicates(cell.seeds)}",
            gap=gap_label(get_protocol(cell.protocol)),
        )  # fmt: skip
    return out


def _column(experiment: Experiment, records: Sequence[Record], *, by_alpha: bool) -> Column:
    first, names = records[0].cell, [n for n in experiment.varied if n != "alpha"]
    field = "gap_soft" if first.protocol == "paper" else "gap_hard_test"
    lines = []
    for i, record in enumerate(records):
        look = STYLES[record.cell.method] if names == ["method"] else LOOKS[i % len(LOOKS)]
        accuracy, gap = record.curves["accuracy"], record.curves[field]
        lines.append(Curve(label(record.cell, names), *look, record.rounds, accuracy, gap))
    title = get_metric(first.metric).title + (f", alpha {first.alpha:g}" if by_alpha else "")
    floors = [r.row["floor"] for r in records if r.row["floor"] is not None]
    chance = 100 * float(np.mean(floors)) if floors and first.protocol == "heldout" else None
    return Column(title, lines, chance)


def against_published(experiment: Experiment, records: Sequence[Record]) -> Any:
    """Every published number with two brackets either way, and ours on top of it."""
    panels = [("accuracy", m) for m in experiment.accuracy_of]
    panels += [("gap", m) for m in experiment.metrics]
    figure, axes, names = _forest(experiment, records, len(panels))
    for axis, (what, metric) in zip(axes, panels, strict=True):
        field = "accuracy" if what == "accuracy" else "gap_soft"
        for y, variant in enumerate(by_variant(experiment, records)):
            row = variant[metric].row
            at, bracket = row[f"published_{what}"], row[f"published_{what}_bracket"]
            if at is not None:
                axis.barh(y, 400 * bracket, left=100 * (at - 2 * bracket), height=0.7,
                          color=THEIRS, label="published, two brackets either way")  # fmt: skip
                axis.plot([100 * at] * 2, [y - 0.35, y + 0.35], color="#4d4d4d", lw=1.2)
            axis.errorbar(100 * row[field], y, xerr=100 * (row[f"{field}_sd"] or 0), fmt="o", ms=4,
                          color=OURS, lw=1.2, label="ours, one standard deviation")  # fmt: skip
        runs = f" ({metric.upper()} runs)" if len(experiment.accuracy_of) > 1 else ""
        title = f"accuracy{runs}, %" if what == "accuracy" else f"{metric.upper()} gap, points"
        axis.set_title(title, loc="left", fontsize=10)
        if what == "accuracy":  # one published bracket of 19 points would squeeze all the rest
            near = [v for r in records for v in (r.row["accuracy"], r.row["published_accuracy"])
                    if v is not None]  # fmt: skip
            axis.set_xlim(100 * min(near) - 4, 100 * max(near) + 4)
        else:
            axis.set_xlim(left=0.0)
    return _finished(figure, axes, names)


def unseen(experiment: Experiment, records: Sequence[Record]) -> Any:
    """Decisions on held-out rows: the gap with its 95% interval, and what chance would show."""
    panels = [(what, m) for m in experiment.metrics for what in ("accuracy", "gap_hard_test")]
    figure, axes, names = _forest(experiment, records, len(panels))
    for axis, (field, metric) in zip(axes, panels, strict=True):
        gap = field != "accuracy"
        for y, variant in enumerate(by_variant(experiment, records)):
            row = variant[metric].row
            if row[field] is None:
                continue
            mean, spread = row[field], row[f"{field}_sd"] or 0.0
            low, high = (row[f"{field}_low"], row[f"{field}_high"]) if gap else (
                mean - spread, mean + spread)  # fmt: skip
            colour = STYLES[variant[metric].cell.method][0]
            axis.plot([100 * low, 100 * high], [y, y], color=colour, lw=1.6)
            axis.plot(100 * mean, y, "o", color=colour, ms=4.5)
            if gap:
                axis.plot([100 * row["floor"]] * 2, [y - 0.4, y + 0.4], color=CHANCE, lw=1.2,
                          label="by chance alone")  # fmt: skip
        axis.plot([], [], "o-", ms=4.5, color="#4d4d4d", lw=1.6,
                  label="95% interval of a gap, one standard deviation of an accuracy")  # fmt: skip
        title = f"{metric.upper()} gap of decisions" if gap else f"accuracy, {metric.upper()} runs"
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlim(left=0.0 if gap else None)
    return _finished(figure, axes, names)


def _forest(experiment: Experiment, records: Sequence[Record], panels: int) -> Any:
    from matplotlib.figure import Figure

    firsts = [next(iter(v.values())).cell for v in by_variant(experiment, records)]
    names = [label(cell, experiment.varied) for cell in firsts]
    size = (2.6 + 2.7 * panels, 1.5 + 0.28 * len(names))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    cell = records[0].cell
    title = f"{DATA.get(cell.data, cell.data)}, protocol {cell.protocol}, {cell.seeds} replicates"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)
    return figure, axes, names


def _finished(figure: Any, axes: Any, names: list[str]) -> Any:
    axes[0].set_yticks(range(len(names)), names, fontsize=9)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    for axis in axes:
        tidy(axis)
        axis.grid(axis="x", color="#e6e6e6", lw=0.8)
    found: dict[str, Any] = {}
    for axis in axes:
        found |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found.keys(), loc="outside lower left", ncols=2, frameon=False)
    return figure


def paradox() -> Any:
    """Simpson's table: the same rate for both groups in each department, and not overall."""
    from matplotlib.figure import Figure

    tally, metric = simpson().tally(), get_metric("sp")
    each = metric.rates(tally.statistics(metric, "hard"))[:, 0]
    overall = metric.rates(tally.sum(0).statistics(metric, "hard"))[0]
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axis = figure.subplots()
    for g, (name, colour) in enumerate((("women", "#0072b2"), ("men", "#d55e00"))):
        heights = 100 * np.array([each[0, g], each[1, g], overall[g]])
        bars = axis.bar(np.arange(3) + 0.38 * (g - 0.5), heights, width=0.36, color=colour,
                        label=name)  # fmt: skip
        axis.bar_label(bars, fmt="%.0f%%", fontsize=9)
    axis.set_xticks(range(3), ["department 1", "department 2", "both together"])
    axis.set_ylabel("accepted, %")
    axis.set_ylim(0, 100)
    gap = 100 * analyse(metric, tally, "hard").gap
    axis.set_title(f"Fair in each department, {gap:.0f} points apart overall", loc="left",
                   fontsize=11)  # fmt: skip
    axis.legend(frameon=False, loc="upper left")
    tidy(axis)
    return figure


def descents(spec: Descent, paths: Sequence[Path]) -> Any:
    """The smallest squared gradient so far over rounds, one panel a mode, with the bounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    titles = {"full": "gradient descent", "stochastic": f"stochastic, {spec.batch_size} rows each"}
    for axis, (mode, title) in zip(axes, titles.items(), strict=True):
        mine = [path for path in paths if path.mode == mode]
        for (colour, dashes), path in zip(LOOKS, mine, strict=False):
            t = path.rounds[1:]
            so_far = np.minimum.accumulate(path.square)[:-1]  # min over t < T
            axis.loglog(t, so_far, color=colour, ls=dashes, lw=1.8, label=RULES[path.rule])
            axis.loglog(t, bounds(spec, path)[t - 1], color=colour, lw=1, alpha=0.45)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("rounds T")
        axis.grid(color="#e6e6e6", lw=0.8)
    axes[0].set_ylabel("min ‖∇L‖² over t < T")
    axes[0].set_ylim(bottom=1e-8)
    axes[0].legend(frameon=False, loc="lower left")
    title = f"{DATA[spec.data]}, λ = {spec.lam:g}, largest step {spec.rate:g}: thick, measured; "
    title += "thin, the bound with its constants"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure
