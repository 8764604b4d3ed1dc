"""Figures of results: accuracy and gap over rounds, the frontier, and what each site sees."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.algorithms.registry import METHOD_LABELS, WITHOUT_STRENGTH
from fedgft.formatting import Table, format_points, group_colors
from fedgft.metrics import Metric, get_metric
from fedgft.metrics.functions import constant_accuracy
from fedgft.metrics.intervals import floor
from fedgft.store import atomic_write
from fedgft.study.protocol import Protocol
from fedgft.study.results import GAP_OF, mean_of
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
    "pooled": ("#000000", (0, (1, 1))),
    "exponentiated-gradient": ("#56b4e9", (0, ())),
    "threshold-optimizer": ("#56b4e9", (0, (1, 1))),
}
BY_CHANCE = {"color": "#808080", "lw": 1, "ls": (0, (2, 2)), "label": "by chance alone"}
DARK = "#4d4d4d"
GRID = {"color": "#e6e6e6", "lw": 0.8}
WHERE = {"federation": "the federation's rows", "test": "held-out rows"}
SVG = {"svg.hashsalt": "fedgft", "svg.fonttype": "none"}  # text stays text: small and searchable
MAX_LOSS = 8.0  # points of accuracy below the best that a frontier shows
COLLAPSED_MARK = "†"  # a footnote: the model of at least one replicate has collapsed
FEWEST_FOR_BAND = 3  # replicates that a band needs
WHITE_BOX = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85}
SITE_METHODS = {
    "fedavg": "to be right",
    "lft": "to be fair at each site",
    "fedgft": "to be fair to all",
}


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
    """Two panels, accuracy above gap. `chance`: the noise floor of the gap, a fraction."""

    title: str
    curves: Sequence[Curve]
    chance: float | None = None


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
    """Put a title at the left above all panels."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)


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


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and as SVG; return both paths.

    Text in the SVG file stays text, and equal figures give equal bytes.
    """
    from matplotlib import rc_context

    paths = [folder / f"{name}.{ending}" for ending in ("png", "svg")]
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

    `values` are in per cent; replicates that lack a value are left out.
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
    longer = any((r.stretch > 1).any() for r in results)
    more = "\nreplicates that took more rounds are drawn as wide as the others" if longer else ""
    about = f"{study.dataset.name}, protocol {study.protocol.name}"
    title = f"{about}: {describe_replicates(len(study.seeds))}{more}"
    return plot_columns(columns, title=title, gap=label_gap(study.protocol))


def describe_replicates(n: int) -> str:
    """What a line and its band stand for, given the number of replicates."""
    return f"mean of {n} replicates and its 95% band" if n > 1 else "one replicate, no band"


def label_gap(protocol: Protocol) -> str:
    """The label of an axis with the protocol's headline gap."""
    where, kind = protocol.headline
    return f"gap of {GAP_OF[kind]}\non {WHERE[where]}, points"


def _make_column(study: Study, results: Sequence[Result], *, title: str) -> Column:
    """The curves of these results, which have one metric and one alpha."""
    metric = results[0].metric
    where, kind = study.protocol.headline
    curves = []
    for r in results:
        name = METHOD_LABELS.get(r.method, r.method)
        style = STYLES.get(r.method, ("#000000", (0, ())))
        gap = getattr(r.history, where).gap(metric, kind)
        curves.append(Curve(name, *style, r.history.rounds, r.history.test.accuracy(), gap))
    chance = None
    if (where, kind) == ("test", "hard"):
        chance = mean_of(floor(metric, results[-1].test_sums.statistics(metric, "hard")))
    return Column(title, curves, chance)


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
    if column.chance is not None:
        below.axhline(100 * column.chance, **BY_CHANCE)
    below.set_xlabel("round")
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


# The frontier


def plot_frontier(found: Frontier, *, title: str, tested: str = "held-out rows") -> Any:
    """The frontier as a figure: gap to the right, accuracy upwards.

    The left panel shows test rows, which its title calls `tested`; the right panel shows the
    clients' own rows. The target and the chosen point are marked.
    """
    figure, axes = make_panels(10.5, 5.4, 1, 2, sharey=True)
    places = {"test": tested, "federation": "the clients' rows"}
    for axis, (where, rows) in zip(axes, places.items(), strict=True):
        _draw_frontier(axis, found, where)
        set_title(axis, f"{found.metric.title}, {rows}")
        axis.set_xlabel("gap of decisions, points")
    low, high, cut = _find_limits(found)
    axes[0].set_ylim(low, high)
    axes[0].set_ylabel("accuracy on the same rows, %")
    _add_legend(figure, axes[0])
    set_heading(figure, title + ("; strengths below the axis are not shown" if cut else ""))
    return figure


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
    margin = 0.08 * (best - least) + 0.2
    low = max(0.0, least - margin)
    return low, min(100.5, best + margin), any(value < low for _, value in each)


def _draw_frontier(axis: Any, found: Frontier, where: str) -> None:
    """Draw all methods, the chosen point, the knee, the noise floor and the target."""
    metric = found.metric
    for method, group in groupby(found.points, key=lambda s: s.method):
        _draw_method(axis, method, list(group), metric, where)
    knee = find_knee([s for s in found.points if s.method == "fedgft-control"], metric)
    for point, sign, size, color, label in (
        (found.chosen, "*", 15, "#000000", "chosen (on the clients' rows)"),
        (knee, "o", 10, STYLES["fedgft-control"][0], "knee of FedGFT control"),
    ):
        if point is not None:
            accuracy, gap = point.mean(metric, where)
            look = {"ms": size, "mfc": "none", "mec": color, "mew": 1.3, "ls": "none", "zorder": 5}
            axis.plot(100 * gap, 100 * accuracy, sign, label=label, **look)
    chance = mean_of(floor(metric, getattr(found.points[0], where).statistics(metric, "hard")))
    if chance is not None:
        axis.axvline(100 * chance, **BY_CHANCE)
    if found.target is not None:
        axis.axvline(100 * found.target, color="#d55e00", lw=1, ls=(0, (6, 3)), label="target")
    axis.set_xlim(left=0)
    clean_axis(axis)


def _draw_method(
    axis: Any, method: str, points: list[TradeoffPoint], metric: Metric, where: str
) -> None:
    """Draw a line through the strengths and a band of accuracy; a cross for a single point."""
    values = [point.values(metric, where) for point in points]
    accuracy, low, high = mean_band(100 * np.stack([v[0] for v in values]))
    gap = np.array([100 * point.mean(metric, where)[1] for point in points])
    color, dashes = STYLES[method]
    look = {"color": color, "label": METHOD_LABELS[method]}
    banded = len(values[0][0]) >= FEWEST_FOR_BAND
    if len(points) == 1:
        error = (accuracy - low, high - accuracy) if banded else None
        axis.errorbar(gap, accuracy, yerr=error, fmt="P", ms=7, **look)
        return
    axis.plot(gap, accuracy, ls=dashes, lw=1.8, marker=".", ms=5, **look)
    if banded:
        order = np.argsort(gap)
        axis.fill_between(gap[order], low[order], high[order], color=color, alpha=0.12, lw=0)


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


def plot_sites(study: Study, results: Sequence[Result]) -> Any:
    """The paper's smallest example, and gaps at each site and over all of them, by method."""
    figure, (left, right) = make_panels(11, 3.9, 1, 2, width_ratios=(1, 1.9))
    _draw_paradox(left)
    _draw_sites(right, study, [r for name in SITE_METHODS for r in results if r.method == name])
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


def _draw_sites(axis: Any, study: Study, results: Sequence[Result]) -> None:
    """One line per method: the gap at every site, their median, and the gap over all sites."""
    rng = np.random.default_rng(0)
    for place, result in enumerate(results):
        assert result.history.after is not None
        color = STYLES[result.method][0]
        gaps = 100 * result.history.after.gap(result.metric, "hard").ravel()
        gaps = gaps[np.isfinite(gaps)]
        overall = float(np.mean(100 * result.client_sums.gap(result.metric, "hard")))
        jitter = place + rng.uniform(-0.22, 0.22, len(gaps))
        axis.plot(gaps, jitter, ".", ms=5, color=color, alpha=0.35, mew=0)
        axis.plot([float(np.median(gaps))] * 2, [place - 0.3, place + 0.3], color=color, lw=2)
        axis.plot(overall, place, "D", ms=11, color=color, mec="white", mew=1.5, zorder=3)
        look = {"weight": "bold", "color": color, "bbox": WHITE_BOX}
        _annotate(axis, f"{overall:.1f}", (overall, place), 13, **look)
    axis.plot([], [], ".", color=DARK, label="a site's own")
    axis.plot([], [], "|", ms=12, mew=2, color=DARK, label="their median")
    axis.plot([], [], "D", ms=8, color=DARK, label="over all sites (mean)")
    names = [f"{METHOD_LABELS[r.method]}\n({SITE_METHODS[r.method]})" for r in results]
    axis.set_yticks(range(len(results)), names)
    axis.set_ylim(len(results) - 0.4, -0.7)
    axis.set_xlabel("gap of decisions between the groups, points")
    set_title(axis, f"{study.dataset.name.capitalize()}, {study.clients} sites")
    box = {"loc": "lower right", "bbox_to_anchor": (1, 0.98), "frameon": False}
    axis.legend(ncols=3, fontsize=9, columnspacing=0.8, handletextpad=0.2, **box)
    clean_axis(axis)
    axis.set_xlim(left=-2.5)  # so that no diamond or number is cut off
    axis.grid(axis="x", **GRID)
    axis.grid(axis="y", visible=False)
