"""Figures of results: accuracy and gap over rounds, the frontier, and what each site sees."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.algorithms.registry import METHOD_LABELS, METHODS, WITHOUT_STRENGTH
from fedgft.formatting import (
    GROUP_COLORS,
    Table,
    format_percent,
    format_points,
    group_colors,
    printable,
)
from fedgft.metrics import Metric, get_metric
from fedgft.metrics.functions import constant_accuracy
from fedgft.metrics.intervals import floor
from fedgft.store import atomic_write
from fedgft.study.protocol import Protocol
from fedgft.study.results import GAP_OF, Row, label_methods, mean_of, row, state_finding
from fedgft.study.study import Result, Study
from fedgft.study.tradeoff import Frontier, TradeoffPoint, best_within, find_knee
from fedgft.theory import simpson

# Colors that color-blind readers can tell apart (Okabe and Ito), and dashes for print.
STYLES = {
    "fedavg": ("#4d4d4d", (0, (1, 0.6))),
    "lrw": ("#0072b2", (0, (5, 2))),
    "lft": ("#cc79a7", (0, (1, 1.5))),
    "fairfed": ("#d55e00", (0, (5, 2, 1, 2))),
    "fedgft": ("#009e73", (0, ())),
    "fedgft-control": ("#332288", (0, ())),
    "thresholds": ("#e69f00", (0, (2, 1))),
    "blind": ("#e69f00", (0, ())),
    "derived": ("#e69f00", (0, (1, 2))),
    "logofair": ("#a0522d", (0, ())),
    "fedfact-post": ("#a0522d", (0, (2, 1))),
    "cost-lp": ("#a0522d", (0, (1, 2))),
    "pooled": ("#000000", (0, (1, 1))),
    "exponentiated-gradient": ("#56b4e9", (0, ())),
    "threshold-optimizer": ("#56b4e9", (0, (1, 1))),
}
NOISE_FLOOR = {"color": "#808080", "lw": 1, "ls": (0, (2, 2)), "label": "noise floor"}
TARGET = {"color": "#b2182b", "lw": 1.4, "ls": (0, (6, 3)), "label": "target"}
DARK = "#4d4d4d"
GRID = {"color": "#e6e6e6", "lw": 0.8}
WHERE = {"federation": "the federation's rows", "test": "held-out rows"}
SVG = {"svg.hashsalt": "fedgft", "svg.fonttype": "none"}  # text stays text: small and searchable
LETTERS_PER_INCH = 13  # of a heading
MAX_LABELS = 10  # lines that are labeled; of more, only the highest and the lowest
MAX_LETTERS = 28  # of the name of a group
MAX_LOSS = 3.0  # points of accuracy below the best that a frontier shows
COLLAPSED_MARK = "†"  # a footnote: the model of at least one replicate has collapsed
FEWEST_FOR_BAND = 3  # replicates that a band needs
WHITE_BOX = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85}
INTERVAL = {"lw": 5, "solid_capstyle": "butt"}  # a bar that ends at the limits
BETTER = {"arrowstyle": "-|>", "color": "#4d4d4d", "lw": 1.2}


def _style(method: str) -> tuple[str, tuple]:
    """Return the color and the dashes of a method; published ones share dashes."""
    if method in STYLES or method not in METHODS:
        return STYLES.get(method, ("#000000", (0, ())))
    at = list(METHODS).index(method)
    return GROUP_COLORS[at % len(GROUP_COLORS)], (0, (3, 1, 1, 1))


@dataclass(frozen=True, eq=False)
class Curve:
    """A line in both panels of a column; accuracy and gap are (round, replicate) fractions."""

    name: str
    color: str
    dashes: Any
    rounds: np.ndarray
    accuracy: np.ndarray
    gap: np.ndarray


@dataclass(frozen=True, eq=False)
class Column:
    """Two panels, accuracy above gap.

    `noise_floor` and `target` of the gap are fractions; None: not shown. `axis` labels the rounds.
    """

    title: str
    curves: Sequence[Curve]
    noise_floor: float | None = None
    target: float | None = None
    axis: str = "round"


# Parts of every figure


def make_panels(width: float, height: float, *shape: int, **options: Any) -> tuple[Any, Any]:
    """A figure of this size in inches and its axes; `options` are those of `Figure.subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(*shape, **options)


def set_title(panel: Any, title: str, *, size: int = 11) -> None:
    """Put a title at the left above a panel. A $ in it does not start a formula."""
    panel.set_title(title, loc="left", fontsize=size, parse_math=False)


def set_heading(figure: Any, title: str) -> None:
    """Put a title at the left above all panels, in lines that fit the width of the figure."""
    width = int(LETTERS_PER_INCH * figure.get_figwidth())
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, width)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10, parse_math=False)


def clean_axis(axis: Any) -> None:
    """Draw a light grid behind the data, and no box around it."""
    axis.grid(axis="y", **GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)


def _add_legend(figure: Any, axis: Any) -> None:
    """Name the lines of an axis below all panels."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)


def _annotate(axis: Any, text: str, place: tuple[float, float], above: int, **style: Any) -> None:
    """Write a text `above` points above a place."""
    axis.annotate(text, place, (0, above), textcoords="offset points", ha="center", **style)


def save_figure(
    figure: Any, folder: Path, name: str, *, endings: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Write a figure as PNG and as SVG, or as one of them; return the paths.

    Text in the SVG file stays text, and equal figures give equal bytes.
    """
    from matplotlib import rc_context

    paths = [folder / f"{name}.{ending}" for ending in endings]
    for path in paths:
        is_svg = path.suffix == ".svg"
        date = {"Date": None} if is_svg else None  # equal figures give equal bytes
        with atomic_write(path) as part, rc_context(SVG):
            drawn = BytesIO()
            figure.savefig(drawn, format=path.suffix[1:], dpi=150, metadata=date)
            content = drawn.getvalue()
            part.write(shorten_svg(content.decode()).encode() if is_svg else content)
    return paths


def shorten_svg(svg: str) -> str:
    """Round coordinates down to a tenth of a point, which makes files smaller by a third."""

    def cut(found: re.Match[str]) -> str:
        return re.sub(r"(\.\d)\d+", r"\1", found[0])

    return re.sub(r' (d|x|y)="[^"]*"', cut, svg)


def mean_band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over the replicates (columns) that have a value, and the ends of its 95% interval.

    `values` are in percent; replicates that lack a value are left out.
    """
    from scipy.special import stdtrit  # the quantile of Student's t; slow to import

    known = np.isfinite(values)
    n = known.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(known, values, 0.0).sum(axis=1) / n
        spread = np.where(known, values - mean[:, None], 0.0)
        error = np.sqrt((spread**2).sum(axis=1) / (n - 1) / n)
        half = np.where(n > 1, stdtrit(n - 1, 0.975) * error, 0.0)
    return mean, np.maximum(mean - half, 0.0), np.minimum(mean + half, 100.0)


# Over the rounds


def plot_rounds(study: Study, results: Sequence[Result]) -> Any:
    """A figure with one column per metric and alpha: accuracy, and the protocol's headline gap.

    `results` may hold several methods per column; they are drawn in their order.
    """
    columns = []
    for metric, alpha in dict.fromkeys((r.metric, r.alpha) for r in results):
        mine = [r for r in results if (r.metric, r.alpha) == (metric, alpha)]
        columns.append(_make_column(study, mine, title=metric.title + study.describe_alpha(alpha)))
    about = f"{study.dataset.name}, {study.describe_federation()}"
    title = f"{about}: {describe_replicates(len(study.seeds))}"
    if [r.method for r in results] == ["fedavg", results[-1].method]:
        title = f"{state_finding(*(row(study, r) for r in results))}\n{title}"
    return plot_columns(columns, title=title, gap=label_gap(study.protocol))


def describe_replicates(n: int) -> str:
    """What a line and its band stand for, given the number of replicates."""
    return f"mean of {n} replicates, 95% band" if n > 1 else "one replicate, no band"


def label_gap(protocol: Protocol) -> str:
    """The label of an axis with the protocol's headline gap."""
    where, kind = protocol.headline
    return f"gap of {GAP_OF[kind]}\non {WHERE[where]}, points"


def _make_column(study: Study, results: Sequence[Result], *, title: str) -> Column:
    """The curves of these results, which have one metric and one alpha."""
    metric = results[0].metric
    where, kind = study.protocol.headline
    curves = []
    names = label_methods([r.method for r in results])
    for r in results:
        name = names[r.method]
        style = _style(r.method)
        gap = getattr(r.history, where).gap(metric, kind)
        curves.append(Curve(name, *style, r.history.rounds, r.history.test.accuracy(), gap))
    noise_floor = target = None
    if (where, kind) == ("test", "hard"):
        noise_floor = mean_of(floor(metric, results[-1].history.count_decisions(metric)))
    if results[-1].has_target and kind == study.protocol.control:
        target = mean_of(results[-1].strength)
    longer = any((r.stretch > 1).any() for r in results)
    axis = "round (longer replicates: scaled to fit)" if longer else "round"
    return Column(title, curves, noise_floor, target, axis)


def plot_columns(columns: Sequence[Column], *, title: str, gap: str) -> Any:
    """A figure of columns, with bands over the replicates; `gap` labels the lower axis."""
    width = 1.2 + 4.2 * len(columns)
    figure, axes = make_panels(width, 6.2, 2, len(columns), sharex=True, squeeze=False)
    for above, below, column in zip(*axes, columns, strict=True):
        _draw_column(above, below, column)
    axes[0, 0].set_ylabel("accuracy, %")
    axes[1, 0].set_ylabel(gap)
    _add_legend(figure, axes[1, 0])
    set_heading(figure, title)
    return figure


def _draw_column(above: Any, below: Any, column: Column) -> None:
    from matplotlib.ticker import MaxNLocator

    _draw_curves(above, column.curves, [curve.accuracy for curve in column.curves])
    _draw_curves(below, column.curves, [curve.gap for curve in column.curves])
    set_title(above, column.title)
    below.set_ylim(bottom=0)
    if column.noise_floor is not None:
        below.axhline(100 * column.noise_floor, **NOISE_FLOOR)
    if column.target is not None:
        below.axhline(100 * column.target, **TARGET | {"label": f"target {100 * column.target:g}"})
    below.set_xlabel(column.axis)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_curves(axis: Any, curves: Sequence[Curve], values: Sequence[np.ndarray]) -> None:
    """Draw the mean of each curve's values with its band; the axis shows all bands."""
    limits: list[np.ndarray] = []  # bands that the axis has to show
    for curve, value in zip(curves, values, strict=True):
        mean, low, high = mean_band(100 * value)
        look = {"color": curve.color, "lw": 1.8, "ls": curve.dashes, "label": curve.name}
        axis.plot(curve.rounds, mean, **look)
        axis.fill_between(curve.rounds, low, high, color=curve.color, alpha=0.15, lw=0)
        # leave out the random start, which would compress the rest of the axis
        later = curve.rounds >= max(1, curve.rounds[-1] // 10)
        limits += [low[later], high[later]]
    shown = np.concatenate(limits)
    shown = shown[np.isfinite(shown)]
    if len(shown):
        margin = 0.05 * float(np.ptp(shown)) + 0.1
        axis.set_ylim(max(0.0, shown.min() - margin), shown.max() + margin)
    else:
        axis.text(0.5, 0.5, "not estimable", transform=axis.transAxes, ha="center")
    clean_axis(axis)


# FedAvg and a method


def plot_before_after(study: Study, fedavg: Result, result: Result) -> Any:
    """Three panels: accuracy, gap, and the selection rate of each group; FedAvg and the method.

    Parameters
    ----------
    study
        The study.
    fedavg, result
        The results of FedAvg and of the method in one cell; all numbers are on test rows.
    """
    rows = [row(study, each) for each in (fedavg, result)]
    target = mean_of(result.strength) if result.has_target else None
    figure, axes = make_panels(10.5, 4.3, 1, 3)
    _draw_accuracies(axes[0], rows)
    _draw_gaps(axes[1], rows, target if study.protocol.control == "hard" else None)
    set_title(axes[1], f"gap in {result.metric.title}, points", size=10)
    _draw_selection_rates(axes[2], rows, study.dataset.classes)
    names = label_methods([result.method])
    for axis in axes:
        axis.set_xticks([0, 1], [METHOD_LABELS["fedavg"], names[result.method]])
        clean_axis(axis)
        axis.set_xlim(-0.45, 1.45)
    set_heading(figure, f"{state_finding(*rows)}\n{_describe_test(study, result)}")
    return figure


def plot_methods(study: Study, results: Sequence[Result]) -> Any:
    """Two panels with a line per method: accuracy, and the gap with its interval, on test rows.

    `results` are those of one cell: FedAvg's first, and last the method that the title is about.
    """
    rows = [row(study, each) for each in results]
    names = label_methods([each.method for each in results])
    figure, axes = make_panels(9.5, 1.9 + 0.36 * len(rows), 1, 2, sharey=True)
    for y, each in enumerate(rows):
        color, _ = _style(each["method"])
        for axis, field in zip(axes, ("accuracy", "gap_hard_test"), strict=True):
            value = each[field]
            if value is None:
                continue
            low, high = (each.get(f"{field}_{end}") for end in ("low", "high"))
            if low is not None and high is not None:
                axis.plot([100 * low, 100 * high], [y, y], color=color, **INTERVAL, alpha=0.3)
            axis.plot(100 * value, y, "o", color=color, ms=8)
            _annotate(axis, f"{100 * value:.1f}", (100 * value, y), 7, fontsize=9, color=color)
    if rows[-1]["floor"] is not None:
        axes[1].axvline(100 * rows[-1]["floor"], **NOISE_FLOOR)
    axes[1].plot([], [], color=DARK, **INTERVAL, alpha=0.3, label="95% interval of the gap")
    axes[0].set_yticks(range(len(rows)), [names[each["method"]] for each in rows])
    axes[0].set_ylim(len(rows) - 0.5, -0.8)
    shown = [100 * each["accuracy"] for each in rows if each["accuracy"] is not None]
    if shown:
        axes[0].set_xlim(min(shown) - 1.5, max(shown) + 1.5)
    axes[1].set_xlim(left=0)
    titles = ("accuracy, %", f"gap in {results[0].metric.title}, points")
    for axis, title in zip(axes, titles, strict=True):
        clean_axis(axis)
        axis.grid(axis="x", **GRID)
        axis.grid(axis="y", visible=False)
        set_title(axis, title, size=10)
    _add_legend(figure, axes[1])
    finding = state_finding(rows[0], rows[-1], methods=list(names))
    set_heading(figure, f"{finding}\n{_describe_test(study, results[-1])}")
    return figure


def _describe_test(study: Study, result: Result) -> str:
    """The data, the clients, and what the numbers of a figure are means of."""
    tested = "held-out rows" if study.protocol.test == "disjoint" else "test rows"
    times = "one replicate" if len(study.seeds) == 1 else f"mean of {len(study.seeds)} replicates"
    about = f"{study.dataset.name}, {study.describe_federation(result.alpha)}"
    return f"{about}; {tested}, {times}"


def _draw_accuracies(axis: Any, rows: Sequence[Row]) -> None:
    """Draw both accuracies, and below them that of always predicting the most frequent class."""
    values = [each["accuracy"] for each in rows]
    constant = rows[-1]["accuracy_constant"]
    known = [100 * value for value in (*values, constant) if value is not None]
    if known:
        margin = max(2.0, 0.15 * (max(known) - min(known)))
        axis.set_ylim(max(0.0, min(known) - margin), min(100.0, max(known) + margin))
    _draw_slopes(axis, {"": values}, {"": DARK})
    set_title(axis, "accuracy, %", size=10)
    if constant is not None:
        axis.axhline(100 * constant, color="#808080", lw=1, ls=(0, (1, 2)))
        _label_line(axis, 100 * constant, "always the most frequent class", DARK)


def _draw_gaps(axis: Any, rows: Sequence[Row], target: float | None) -> None:
    """Draw both gaps with their intervals, the noise floor and the target."""
    values = [each["gap_hard_test"] for each in rows]
    floors = [each["floor"] for each in rows if each["floor"] is not None]
    for x, each in enumerate(rows):
        low, high = each["gap_hard_test_low"], each["gap_hard_test_high"]
        if low is not None and high is not None:
            label = "95% interval" if x == 0 else None
            axis.plot([x, x], [100 * low, 100 * high], color="#a0a0a0", **INTERVAL, label=label)
    lines = [each[f"gap_hard_test{end}"] for each in rows for end in ("", "_high")]
    top = max([100 * v for v in (*lines, *floors, target) if v is not None], default=1.0)
    axis.set_ylim(0.0, 1.12 * top or 1.0)  # all are zero where no row was selected
    _draw_slopes(axis, {"": values}, {"": DARK})
    if floors:
        axis.axhline(100 * floors[-1], **NOISE_FLOOR)
    if target is not None:
        axis.axhline(100 * target, **TARGET | {"label": f"target {format_points(target)}"})
    if axis.get_legend_handles_labels()[1]:  # a gap that is not estimable has nothing to name
        axis.legend(frameon=False, fontsize=8, loc="upper right")


def _draw_selection_rates(axis: Any, rows: Sequence[Row], classes: Sequence[str]) -> None:
    """Draw the share of each group that is given the positive class, or of several the widest."""
    rates = [each["selection_rates"] for each in rows]
    name = classes[-1]
    if len(classes) > 2:
        name = max(classes, key=lambda c: _find_spread([each[c] for each in rates[0].values()]))
        rates = [{group: each[name] for group, each in by.items()} for by in rates]
    groups = list(rates[0])
    values = {group: [by[group] for by in rates] for group in groups}
    known = [100 * v for pair in values.values() for v in pair if v is not None]
    if known:
        margin = max(2.0, 0.2 * (max(known) - min(known)))
        axis.set_ylim(max(0.0, min(known) - margin), min(100.0, max(known) + margin))
    _draw_slopes(axis, values, group_colors(groups))
    set_title(axis, f"predicted {name}, % of each group", size=10)


def _find_spread(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return max(known) - min(known) if known else -1.0


def _draw_slopes(
    axis: Any, values: Mapping[str, Sequence[float | None]], colors: Mapping[str, str]
) -> None:
    """Draw a line per name from its first to its second fraction, each with its number in percent.

    The limits of the axis must be set before: numbers that would cover each other move apart.
    """
    low, high = axis.get_ylim()
    for name, pair in values.items():
        known = [(x, 100 * value) for x, value in enumerate(pair) if value is not None]
        if known:
            look = {"color": colors[name], "lw": 2, "ms": 7, "zorder": 3}
            axis.plot(*zip(*known, strict=True), "o-", **look)
    for x, side in enumerate(("right", "left")):
        known = {n: 100 * v for n, pair in values.items() if (v := pair[x]) is not None}
        if len(known) > MAX_LABELS:
            ends = sorted(known, key=known.__getitem__)[:: len(known) - 1]
            known = {name: known[name] for name in ends}
        places = _spread_labels(known, least=0.07 * (high - low))
        for name, value in known.items():
            text = f"{value:.1f}" if x == 0 else f"{value:.1f} {printable(name)[:MAX_LETTERS]}"
            style: dict[str, Any] = {"ha": side, "va": "center", "color": colors[name]}
            style["parse_math"] = False
            style["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # above lines
            place = (x + (0.08 if x else -0.08), places[name])
            axis.annotate(text, place, annotation_clip=False, **style)


def _spread_labels(values: Mapping[str, float], *, least: float) -> dict[str, float]:
    """Places for labels, in the order of their values and at least `least` apart."""
    names = sorted(values, key=values.__getitem__)
    if not names:
        return {}
    places = [values[name] for name in names]
    for _ in range(100):
        for i, (below, above) in enumerate(pairwise(places)):
            if (lack := least - (above - below)) > 0:
                places[i] -= lack / 2
                places[i + 1] += lack / 2
    return dict(zip(names, places, strict=True))


def _label_line(axis: Any, height: float, text: str, color: str) -> None:
    """Write what a horizontal line is just above it, at the left."""
    axis.annotate(
        text,
        (0.01, height),
        (0, 3),
        xycoords=axis.get_yaxis_transform(),
        textcoords="offset points",
        fontsize=8,
        color=color,
    )


# The frontier


def plot_frontier(found: Frontier, *, title: str, tested: str = "held-out rows") -> Any:
    """The frontier as a figure: gap to the right, accuracy upwards.

    The left panel shows test rows, which its title calls `tested`; the right panel shows the
    clients' own rows. The target and the chosen point are marked.
    """
    figure, axes = make_panels(10.5, 5.4, 1, 2, sharey=True)
    places = {"test": tested, "federation": "the clients' rows"}
    low, high, cut = _find_limits(found)
    for axis, (where, rows) in zip(axes, places.items(), strict=True):
        _draw_frontier(axis, found, where, low)
        set_title(axis, f"{found.metric.title}, {rows}")
        axis.set_xlabel("gap of decisions, points")
        axis.set_xlim(0.0, _find_widest(found, where, low))
    axes[0].set_ylim(low, high)
    axes[0].set_ylabel("accuracy on the same rows, %")
    _add_legend(figure, axes[0])
    about = title + ("; points far below the best accuracy are not shown" if cut else "")
    set_heading(figure, f"{_state_choice(found)}\n{about}".lstrip())
    return figure


def _state_choice(found: Frontier) -> str:
    """The title of a frontier: the chosen point beside FedAvg, on test rows; empty without one."""
    if found.chosen is None:
        return ""
    name = label_methods([point.method for point in found.points])[found.chosen.method]
    pairs = [point.mean(found.metric, "test") for point in (found.chosen, found.points[0])]
    texts = [
        f"{format_points(gap)} points at {format_percent(accuracy)} accuracy"
        for accuracy, gap in pairs
    ]
    return f"{name} has a gap of {texts[0]}, FedAvg {texts[1]}"


def _find_widest(found: Frontier, where: str, low: float) -> float:
    """The right end of a panel: a bit beyond the widest gap of the points that are shown."""
    pairs = [point.mean(found.metric, where) for point in found.points]
    gaps = [100 * gap for accuracy, gap in pairs if np.isfinite(gap) and 100 * accuracy >= low]
    return 1.1 * max(gaps, default=1.0) + 0.2


def _draw_better(axis: Any) -> None:
    """Draw an arrow to the upper left, where accuracy is high and the gap small."""
    frame = {"xycoords": "axes fraction", "textcoords": "axes fraction"}
    style = {"fontsize": 9, "color": DARK, "ha": "left", "va": "top", "bbox": WHITE_BOX}
    axis.annotate("better", (0.42, 0.19), (0.47, 0.11), arrowprops=BETTER, **frame, **style)


def _find_limits(found: Frontier) -> tuple[float, float, bool]:
    """The limits of the accuracy in both panels, and whether points lie below them.

    The best point, the chosen point and methods without a strength are always inside; other points
    are inside if they are at most MAX_LOSS below the best.
    """
    places = ("test", "federation")
    each = [(s, 100 * s.mean(found.metric, where)[0]) for s in found.points for where in places]
    each = [(s, value) for s, value in each if np.isfinite(value)]
    if not each:
        return 0.0, 100.0, False
    best = max(value for _, value in each)
    least = min(
        value
        for s, value in each
        if value >= best - MAX_LOSS or s is found.chosen or s.method in WITHOUT_STRENGTH
    )
    margin = 0.08 * (best - least) + 0.4
    low = max(0.0, least - margin)
    return low, min(100.5, best + margin), any(value < low for _, value in each)


def _draw_frontier(axis: Any, found: Frontier, where: str, low: float) -> None:
    """Draw all methods, the chosen point, the knee, the noise floor and the target.

    `low`: the lowest accuracy that the panel shows, in percent.
    """
    metric = found.metric
    for method, group in groupby(found.points, key=lambda s: s.method):
        _draw_method(axis, method, list(group), metric, where, low=low)
    knee = find_knee([s for s in found.points if s.method == "fedgft-control"], metric)
    for point, sign, size, color, label in (
        (found.chosen, "*", 15, "#000000", "chosen (on the clients' rows)"),
        (knee, "o", 10, STYLES["fedgft-control"][0], "knee of FedGFT control"),
    ):
        if point is not None:
            accuracy, gap = point.mean(metric, where)
            look = {"ms": size, "mfc": "none", "mec": color, "mew": 1.3, "ls": "none", "zorder": 5}
            axis.plot(100 * gap, 100 * accuracy, sign, label=label, **look)
    share = found.study.dataset.effective_share
    chance = share * getattr(found.points[0], where).statistics(metric, "hard")
    chance = mean_of(floor(metric, chance))
    if chance is not None:
        axis.axvline(100 * chance, **NOISE_FLOOR)
    if found.target is not None:
        axis.axvline(100 * found.target, **TARGET)
    _draw_better(axis)
    clean_axis(axis)


def _draw_method(
    axis: Any, method: str, points: list[TradeoffPoint], metric: Metric, where: str, *, low: float
) -> None:
    """Draw a line through the strengths and a band of accuracy; a cross for a single point.

    `low`: the lowest accuracy that the panel shows, in percent. Points below it have no band.
    """
    values = [point.values(metric, where) for point in points]
    accuracy, least, most = mean_band(100 * np.stack([v[0] for v in values]))
    gap = np.array([100 * point.mean(metric, where)[1] for point in points])
    color, dashes = _style(method)
    look = {"color": color, "label": METHOD_LABELS[method]}
    banded = len(values[0][0]) >= FEWEST_FOR_BAND
    if len(points) == 1:
        error = (accuracy - least, most - accuracy) if banded else None
        axis.errorbar(gap, accuracy, yerr=error, fmt="P", ms=7, **look)
        return
    axis.plot(gap, accuracy, ls=dashes, lw=1.8, marker=".", ms=5, **look)
    if banded:
        order = np.argsort(gap)
        order = order[accuracy[order] >= low]
        axis.fill_between(gap[order], least[order], most[order], color=color, alpha=0.1, lw=0)


def frontier_table(found: Frontier, *, title: str, tested: str = "held-out rows") -> Table:
    """The frontier as a table, one line per method.

    A line shows the fairest point of the method, its knee, and its most accurate point within given
    gaps. `tested` names the test rows.
    """
    gaps = (0.01, 0.02, 0.05)
    metric = found.metric
    rows = []
    for method, group in groupby(found.points, key=lambda s: s.method):
        mine = list(group)
        known = [s for s in mine if s.complete(metric)]
        fairest = min(known, key=lambda s: s.mean(metric, "federation")[1], default=None)
        points = (fairest, find_knee(mine, metric), *(best_within(mine, metric, g) for g in gaps))
        rows.append((METHOD_LABELS[method], *(_format_point(point, metric) for point in points)))
    constant = float(np.mean(constant_accuracy(found.points[0].test)))
    notes = [
        f"accuracy on {tested} @ gap of decisions on the clients' rows, points;",
        "within a gap: the most accurate strength; -: none, or not in every replicate",
        f"always predicting the most frequent class: {format_points(constant)}",
    ]
    if any(COLLAPSED_MARK in cell for row in rows for cell in row):
        note = "collapsed in some replicate, nearly everybody gets one decision"
        notes.append(f"{COLLAPSED_MARK}: {note}")
    header = ("method", "fairest", "knee", *(f"gap <= {100 * g:g}" for g in gaps))
    return Table(title, header, tuple(rows), stubs=1, notes=tuple(notes))


def _format_point(point: TradeoffPoint | None, metric: Metric) -> str:
    """A text such as 84.7@1.1: accuracy on test rows at the gap on the clients' rows."""
    if point is None:
        return "-"
    gap = point.mean(metric, "federation")[1]
    accuracy = point.mean(metric, "test")[0]
    mark = COLLAPSED_MARK if point.collapsed().any() else ""
    return f"{format_points(accuracy)}@{format_points(gap)}{mark}"


# What each site sees


def plot_sites() -> Any:
    """The smallest example: two sites that are each fair to women and men, but not together."""
    figure, axis = make_panels(4.8, 3.6)
    _draw_paradox(axis)
    return figure


def simpson_counts() -> np.ndarray:
    """(department, 2, group): accepted applicants and all applicants, women and men.

    There are two departments; the last entry is both departments together.
    """
    sums = simpson().sums_by_client()
    metric = get_metric("sp")
    each = [*sums.statistics(metric, "hard"), sums.sum(0).statistics(metric, "hard")]
    return np.stack(each)[:, :, 0]


def simpson_rates() -> np.ndarray:
    """(department, group): the rates of acceptance for `simpson_counts`."""
    counts = simpson_counts()
    return counts[:, 0] / counts[:, 1]


def _draw_paradox(axis: Any) -> None:
    """Draw two departments that are each fair to women and men, but unfair taken together."""
    women, men = 100 * simpson_rates().T
    colors = group_colors(["women", "men"])
    places = np.arange(3)
    axis.vlines(places, women, men, color="#b0b0b0", lw=6, zorder=1)
    axis.plot(places, women, "o", ms=11, color=colors["women"], mfc="none", mew=2.5, label="women")
    axis.plot(places, men, "o", ms=6, color=colors["men"], label="men")
    for place, a, b in zip(places, women, men, strict=True):
        _annotate(axis, f"gap {abs(a - b):.0f}", (int(place), max(a, b)), 10)
    axis.set_xticks(places, ["site 1", "site 2", "both together"])
    axis.set(xlim=(-0.5, 2.5), ylim=(0, 100))
    axis.set_ylabel("accepted, %")
    set_title(axis, "Fair at every site, unfair over all sites")
    axis.legend(frameon=False, loc="lower right")
    clean_axis(axis)
