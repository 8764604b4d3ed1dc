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
from fedgft.formatting import Table
from fedgft.metrics import Metric, get_metric
from fedgft.metrics.decisions import constant_accuracy
from fedgft.metrics.intervals import Z95, floor
from fedgft.store import atomic_write
from fedgft.study.protocol import Protocol
from fedgft.study.results import GAP_OF, mean_of
from fedgft.study.study import Result, Study
from fedgft.study.tradeoff import Spot, best_within, find_knee, pareto_front
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
WHERE = {"federation": "the federation's rows", "test": "held-out rows"}
SVG = {"svg.hashsalt": "fedgft", "svg.fonttype": "none"}  # text stays text: small and searchable
MAX_LOSS = 8.0  # points of accuracy below the best that a frontier shows
COLLAPSED = "†"  # marks a spot where some replicate's model has collapsed
FEWEST_FOR_BAND = 3  # replicates
WHITE_BOX = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85}
SITE_METHODS = {
    "fedavg": "to be right",
    "lft": "to be fair at each site",
    "fedgft": "to be fair to all",
}
# 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom, where the expansion is poor
SMALL_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def t95(n: int) -> float:
    """97.5% quantile of Student's t with n - 1 degrees of freedom (Fisher's expansion about z)."""
    if n - 1 <= len(SMALL_T):
        return SMALL_T[n - 2]
    z = Z95
    v = n - 1
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)


@dataclass(frozen=True, eq=False)
class Curve:
    """A line in the panels of a column; accuracy and gap are fractions, (round, replicate)."""

    name: str
    color: str
    dashes: Any
    rounds: np.ndarray
    accuracy: np.ndarray
    gap: np.ndarray


@dataclass(frozen=True, eq=False)
class Column:
    """Two panels, accuracy above gap. `chance`: the noise floor of the gap in points."""

    title: str
    curves: Sequence[Curve]
    chance: float | None = None


def plot_rounds(study: Study, results: Sequence[Result]) -> Any:
    """A figure with one column per metric and alpha: accuracy, and the protocol's headline gap."""
    columns = []
    for metric, alpha in dict.fromkeys((r.metric, r.alpha) for r in results):
        mine = [r for r in results if (r.metric, r.alpha) == (metric, alpha)]
        how = "" if study.concentration(alpha) is None else f", alpha {alpha:g}"
        columns.append(_column(study, mine, title=metric.title + how))
    n = len(study.seeds)
    longer = any((r.stretch > 1).any() for r in results)
    more = "\nreplicates that took more rounds are drawn as wide as the others" if longer else ""
    about = f"{study.dataset.name}, protocol {study.protocol.name}"
    return plot_columns(
        columns, title=f"{about}: {describe_replicates(n)}{more}", gap=label_gap(study.protocol)
    )


def describe_replicates(n: int) -> str:
    """What a line and its band stand for, given the number of replicates."""
    return f"mean of {n} replicates and its 95% band" if n > 1 else "one replicate, no band"


def label_gap(protocol: Protocol) -> str:
    """The label of an axis with the protocol's headline gap."""
    where, kind = protocol.headline
    return f"gap of {GAP_OF[kind]}\non {WHERE[where]}, points"


def _column(study: Study, results: Sequence[Result], *, title: str) -> Column:
    metric = results[0].metric
    (where, kind) = study.protocol.headline
    tallies = [getattr(r.history, where) for r in results]
    curves = [
        Curve(
            METHOD_LABELS.get(r.method, r.method),
            *STYLES.get(r.method, ("#000000", (0, ()))),
            r.history.rounds,
            r.history.test.accuracy(),
            tally.gap(metric, kind),
        )
        for r, tally in zip(results, tallies, strict=True)
    ]
    chance = None
    if (where, kind) == ("test", "hard"):
        floors = floor(metric, tallies[-1][-1].statistics(metric, "hard"))
        mean = mean_of(floors)
        chance = None if mean is None else 100 * mean
    return Column(title, curves, chance)


def plot_columns(columns: Sequence[Column], *, title: str, gap: str) -> Any:
    """A figure of columns, with bands over the replicates; `gap` labels the lower axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 4.2 * len(columns), 6.2), layout="constrained")
    axes = figure.subplots(2, len(columns), sharex=True, squeeze=False)
    for j, column in enumerate(columns):
        _draw(axes[0, j], axes[1, j], column)
    axes[0, 0].set_ylabel("accuracy, %")
    axes[1, 0].set_ylabel(gap)
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)
    return figure


def _draw(above: Any, below: Any, column: Column) -> None:
    from matplotlib.ticker import MaxNLocator

    _panel(above, column.curves, [curve.accuracy for curve in column.curves])
    _panel(below, column.curves, [curve.gap for curve in column.curves])
    above.set_title(column.title, loc="left", fontsize=11, parse_math=False)
    below.set_ylim(bottom=0)
    if column.chance is not None:
        below.axhline(column.chance, color="#808080", lw=1, ls=(0, (2, 2)), label="by chance alone")
    below.set_xlabel("round")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and as SVG; return both paths."""
    from matplotlib import rc_context

    paths = []
    for ending in ("png", "svg"):
        path = folder / f"{name}.{ending}"
        date = {"Date": None} if ending == "svg" else None  # equal figures give equal bytes
        with atomic_write(path) as part, rc_context(SVG):
            drawn = BytesIO()
            figure.savefig(drawn, format=ending, dpi=150, metadata=date)
            content = drawn.getvalue()
            part.write_bytes(shorten_svg(content.decode()).encode() if ending == "svg" else content)
        paths.append(path)
    return paths


def shorten_svg(svg: str) -> str:
    """Round coordinates down to a tenth of a point, which makes files smaller by a third."""

    def cut(found: re.Match[str]) -> str:
        return re.sub(r"(\.\d)\d+", r"\1", found[0])

    return re.sub(r' (d|x|y)="[^"]*"', cut, svg)


def _panel(axis: Any, curves: Sequence[Curve], values: Sequence[np.ndarray]) -> None:
    limits: list[np.ndarray] = []  # bands that the axis has to show
    for curve, value in zip(curves, values, strict=True):
        mean, low, high = mean_band(100 * value)
        look = {"color": curve.color, "lw": 1.8, "ls": curve.dashes, "label": curve.name}
        axis.plot(curve.rounds, mean, **look)
        axis.fill_between(curve.rounds, low, high, color=curve.color, alpha=0.15, lw=0)
        # without the random start, which would compress all the rest
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


def clean_axis(axis: Any) -> None:
    """A light grid behind the data, and no box around it."""
    axis.grid(axis="y", color="#e6e6e6", lw=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)


def mean_band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over the replicates (columns) that have a value, and the ends of its 95% interval.

    `values` are in per cent; replicates that lack a value are left out.
    """
    known = np.isfinite(values)
    n = known.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(known, values, 0.0).sum(axis=1) / n
        spread = np.where(known, values - mean[:, None], 0.0)
        error = np.sqrt((spread**2).sum(axis=1) / (n - 1) / n)
    half = np.array([t95(int(m)) * e if m > 1 else 0.0 for m, e in zip(n, error, strict=True)])
    return mean, np.maximum(mean - half, 0.0), np.minimum(mean + half, 100.0)


def plot_frontier(
    spots: Sequence[Spot],
    metric: Metric,
    *,
    title: str,
    target: float | None,
    chosen: Spot | None,
    tested: str = "held-out rows",
) -> Any:
    """The frontier as a figure: gap to the right, accuracy upwards.

    Test rows, called `tested`, on the left, the clients' own on the right. `target` and the spot
    `chosen` are marked.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 5.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, where, said in zip(
        axes, ("test", "federation"), (tested, "the clients' rows"), strict=True
    ):
        _panel_frontier(axis, spots, metric, where, target=target, chosen=chosen)
        axis.set_title(f"{metric.title}, {said}", loc="left", fontsize=11, parse_math=False)
        axis.set_xlabel("gap of decisions, points")
    low, high, cut = _limits(spots, metric, chosen)
    axes[0].set_ylim(low, high)
    axes[0].set_ylabel("accuracy on the same rows, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    below = "; strengths below the axis are not shown" if cut else ""
    figure.suptitle(title + below, x=0.01, ha="left", fontsize=10, parse_math=False)
    return figure


def _limits(
    spots: Sequence[Spot], metric: Metric, chosen: Spot | None
) -> tuple[float, float, bool]:
    """The limits of the accuracy in both panels, and whether spots lie below them.

    The best spot, the chosen one and methods without a strength are always inside, others if they
    are at most MAX_LOSS below the best.
    """
    places = ("test", "federation")
    each = [(s, 100 * s.mean(metric, where)[0]) for s in spots for where in places]
    each = [(s, value) for s, value in each if np.isfinite(value)]
    if not each:
        return 0.0, 100.0, False
    best = max(value for _, value in each)
    kept = [
        v for s, v in each if v >= best - MAX_LOSS or s is chosen or s.method in WITHOUT_STRENGTH
    ]
    margin = 0.08 * (best - min(kept)) + 0.2
    low = max(0.0, min(kept) - margin)
    return low, min(100.5, best + margin), any(value < low for _, value in each)


def _panel_frontier(
    axis: Any,
    spots: Sequence[Spot],
    metric: Metric,
    where: str,
    *,
    target: float | None,
    chosen: Spot | None,
) -> None:
    for method, group in groupby(spots, key=lambda s: s.method):
        _draw_method(axis, method, list(group), metric, where)
    bend = find_knee([s for s in spots if s.method == "fedgft-control"], metric)
    for spot, sign, color, said in (
        (chosen, "*", "#000000", "chosen (on the clients' rows)"),
        (bend, "o", STYLES["fedgft-control"][0], "knee of FedGFT control"),
    ):
        if spot is not None:
            accuracy, gap = spot.mean(metric, where)
            axis.plot(
                100 * gap,
                100 * accuracy,
                sign,
                ms=15 if sign == "*" else 10,
                mfc="none",
                mec=color,
                mew=1.3,
                ls="none",
                label=said,
                zorder=5,
            )
    chance = np.asarray(floor(metric, getattr(spots[0], where).statistics(metric, "hard")))
    if np.isfinite(chance).any():
        axis.axvline(
            100 * float(np.nanmean(chance)),
            color="#808080",
            lw=1,
            ls=(0, (2, 2)),
            label="by chance alone",
        )
    if target is not None:
        axis.axvline(100 * target, color="#d55e00", lw=1, ls=(0, (6, 3)), label="target")
    axis.set_xlim(left=0)
    clean_axis(axis)


def _draw_method(axis: Any, method: str, spots: list[Spot], metric: Metric, where: str) -> None:
    """A line through the strengths with the band of its accuracy; a cross for a single spot."""
    values = [spot.values(metric, where) for spot in spots]
    accuracy, low, high = mean_band(100 * np.stack([v[0] for v in values]))
    gap = np.array([100 * spot.mean(metric, where)[1] for spot in spots])
    color, dashes = STYLES[method]
    banded = len(values[0][0]) >= FEWEST_FOR_BAND
    if len(spots) == 1:
        error = (accuracy - low, high - accuracy) if banded else None
        axis.errorbar(
            gap, accuracy, yerr=error, fmt="P", ms=7, color=color, label=METHOD_LABELS[method]
        )
        return
    axis.plot(
        gap, accuracy, color=color, ls=dashes, lw=1.8, marker=".", ms=5, label=METHOD_LABELS[method]
    )
    if banded:
        order = np.argsort(gap)
        axis.fill_between(gap[order], low[order], high[order], color=color, alpha=0.12, lw=0)


def frontier_table(
    spots: Sequence[Spot], metric: Metric, *, title: str, tested: str = "held-out rows"
) -> Table:
    """The frontier as a table, one line per method.

    Where the method is fairest, its knee, and its most accurate spot within given gaps.
    """
    gaps = (0.01, 0.02, 0.05)
    rows = []
    for method, group in groupby(spots, key=lambda s: s.method):
        mine = list(group)
        known = [s for s in mine if s.complete(metric)]
        fairest = min(known, key=lambda s: s.mean(metric, "federation")[1], default=None)
        bend = find_knee(mine, metric) if len(pareto_front(mine, metric)) > 2 else None
        rows.append(
            (
                METHOD_LABELS[method],
                _pair(fairest, metric),
                _pair(bend, metric),
                *(_pair(best_within(mine, metric, g), metric) for g in gaps),
            )
        )
    constant = float(np.mean(constant_accuracy(spots[0].test)))
    gone = any(COLLAPSED in cell for row in rows for cell in row)
    header = ("method", "fairest", "knee", *(f"gap <= {100 * g:g}" for g in gaps))
    notes = (
        f"accuracy on {tested} @ gap of decisions on the clients' rows, points;",
        "within a gap: the most accurate strength; -: none, or not in every replicate",
        f"always predicting the most frequent class: {100 * constant:.1f}",
        *([f"{COLLAPSED}: collapsed in some replicate, nearly everybody gets one decision"] * gone),
    )
    return Table(title, header, tuple(rows), stubs=1, notes=notes)


def _pair(spot: Spot | None, metric: Metric) -> str:
    if spot is None:
        return "-"
    gap = spot.mean(metric, "federation")[1]
    accuracy = spot.mean(metric, "test")[0]
    mark = COLLAPSED if spot.collapsed().any() else ""
    return f"{100 * accuracy:.1f}@{100 * gap:.1f}{mark}"


def plot_sites(study: Study, results: Sequence[Result]) -> Any:
    """The paper's smallest example, and gaps at each site and over all of them, by method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.9))
    _paradox(left)
    _gaps_by_site(right, study, [r for name in SITE_METHODS for r in results if r.method == name])
    return figure


def _paradox(axis: Any) -> None:
    """Two departments that each treat women and men alike, while both together do not."""
    tally = simpson().sums_by_client()
    metric = get_metric("sp")
    each = tally.statistics(metric, "hard")
    total = tally.sum(0).statistics(metric, "hard")
    sums = np.concatenate((each, total[None]))[:, :, 0]
    women, men = (100 * sums[:, 0] / sums[:, 1]).T
    places = np.arange(3)
    axis.vlines(places, women, men, color="#b0b0b0", lw=6, zorder=1)
    axis.plot(places, women, "o", ms=11, color="#d55e00", mfc="none", mew=2.5, label="women")
    axis.plot(places, men, "o", ms=6, color="#0072b2", label="men")
    for place, a, b in zip(places, women, men, strict=True):
        axis.annotate(
            f"gap {abs(a - b):.0f}",
            (place, max(a, b)),
            (0, 10),
            textcoords="offset points",
            ha="center",
        )
    axis.set_xticks(places, ["site 1", "site 2", "both together"])
    axis.set(xlim=(-0.5, 2.5), ylim=(0, 100))
    axis.set_ylabel("accepted, %")
    axis.set_title("Fair at every site, unfair to everybody", loc="left", fontsize=11)
    axis.legend(frameon=False, loc="lower right")
    clean_axis(axis)


def _gaps_by_site(axis: Any, study: Study, results: Sequence[Result]) -> None:
    rng = np.random.default_rng(0)
    for place, result in enumerate(results):
        assert result.history.after is not None and result.history.federation is not None
        color = STYLES[result.method][0]
        own = 100 * result.history.after.gap(result.metric, "hard").ravel()
        own = own[np.isfinite(own)]
        everybody = 100 * result.history.federation[-1].gap(result.metric, "hard")
        overall = float(np.mean(everybody))
        middle = float(np.median(own))
        jitter = place + rng.uniform(-0.22, 0.22, len(own))
        axis.plot(own, jitter, ".", ms=5, color=color, alpha=0.35, mew=0)
        axis.plot([middle] * 2, [place - 0.3, place + 0.3], color=color, lw=2)
        axis.plot(overall, place, "D", ms=11, color=color, mec="white", mew=1.5, zorder=3)
        axis.annotate(
            f"{overall:.1f}",
            (overall, place),
            (0, 13),
            textcoords="offset points",
            ha="center",
            weight="bold",
            color=color,
            bbox=WHITE_BOX,
        )
    axis.plot([], [], ".", color="#4d4d4d", label="a site's own")
    axis.plot([], [], "|", ms=12, mew=2, color="#4d4d4d", label="their median")
    axis.plot([], [], "D", ms=8, color="#4d4d4d", label="over everybody (mean)")
    names = [f"{METHOD_LABELS[r.method]}\n({SITE_METHODS[r.method]})" for r in results]
    axis.set_yticks(range(len(results)), names)
    axis.set_ylim(len(results) - 0.4, -0.7)
    axis.set_xlabel("gap of decisions between the groups, points")
    about = f"{study.dataset.name.capitalize()}, {study.clients} sites"
    axis.set_title(about, loc="left", fontsize=11, parse_math=False)
    axis.legend(
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1, 0.98),
        ncols=3,
        fontsize=9,
        columnspacing=0.8,
        handletextpad=0.2,
    )
    clean_axis(axis)
    axis.set_xlim(left=-2.5)  # not cut through a diamond or its number
    axis.grid(axis="x", color="#e6e6e6", lw=0.8)
    axis.grid(axis="y", visible=False)
