"""The frontier as a picture and as a table: gap to the right, accuracy upwards, left is fairer."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from fedgft.experiments.frontier import Spot, knee, pareto, within
from fedgft.federated.methods import SINGLE
from fedgft.layout import Table
from fedgft.metrics import Metric
from fedgft.metrics.decisions import constant_accuracy
from fedgft.metrics.intervals import floor
from fedgft.report.figures import NAMES, STYLES, band, tidy

SHOWN = 8.0  # points of accuracy below the best: who wants to pay more?
GONE = "†"  # at least one replicate's model has collapsed
FEW = 3  # replicates below which there is no band worth drawing


def draw(
    spots: Sequence[Spot], metric: Metric, *, title: str, target: float | None,
    chosen: Spot | None, tested: str = "held-out rows",
) -> Any:  # fmt: skip
    """Test rows on the left, the clients' own on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 5.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, where, said in zip(axes, ("test", "federation"), (tested, "the clients' rows"),
                                 strict=True):  # fmt: skip
        _panel(axis, spots, metric, where, target=target, chosen=chosen)
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
    """Of the accuracy, for both panels: means, not bands; the best, what was chosen and the plain
    methods always, of the rest what is not far below."""
    places = ("test", "federation")
    each = [(s, 100 * s.mean(metric, where)[0]) for s in spots for where in places]
    each = [(s, value) for s, value in each if np.isfinite(value)]
    if not each:
        return 0.0, 100.0, False
    best = max(value for _, value in each)
    kept = [v for s, v in each if v >= best - SHOWN or s is chosen or s.method in SINGLE]
    margin = 0.08 * (best - min(kept)) + 0.2
    low = max(0.0, min(kept) - margin)
    return low, min(100.5, best + margin), any(value < low for _, value in each)


def _panel(
    axis: Any, spots: Sequence[Spot], metric: Metric, where: str, *, target: float | None,
    chosen: Spot | None,
) -> None:  # fmt: skip
    for method, group in groupby(spots, key=lambda s: s.method):
        _method(axis, method, list(group), metric, where)
    bend = knee([s for s in spots if s.method == "fedgft-control"], metric)
    for spot, sign, colour, said in (
        (chosen, "*", "#000000", "chosen (on the clients' rows)"),
        (bend, "o", STYLES["fedgft-control"][0], "knee of FedGFT control"),
    ):
        if spot is not None:
            accuracy, gap = spot.mean(metric, where)
            axis.plot(100 * gap, 100 * accuracy, sign, ms=15 if sign == "*" else 10, mfc="none",
                      mec=colour, mew=1.3, ls="none", label=said, zorder=5)  # fmt: skip
    chance = np.asarray(floor(metric, getattr(spots[0], where).statistics(metric, "hard")))
    if np.isfinite(chance).any():
        axis.axvline(100 * float(np.nanmean(chance)), color="#808080", lw=1, ls=(0, (2, 2)),
                     label="by chance alone")  # fmt: skip
    if target is not None:
        axis.axvline(100 * target, color="#d55e00", lw=1, ls=(0, (6, 3)), label="target")
    axis.set_xlim(left=0)
    tidy(axis)


def _method(axis: Any, method: str, spots: list[Spot], metric: Metric, where: str) -> None:
    """A line through the strengths with the band of its accuracy; a cross for a single spot."""
    values = [spot.values(metric, where) for spot in spots]
    accuracy, low, high = band(100 * np.stack([v[0] for v in values]))
    gap = np.array([100 * spot.mean(metric, where)[1] for spot in spots])
    colour, dashes = STYLES[method]
    banded = len(values[0][0]) >= FEW
    if len(spots) == 1:
        error = (accuracy - low, high - accuracy) if banded else None
        axis.errorbar(gap, accuracy, yerr=error, fmt="P", ms=7, color=colour, label=NAMES[method])
        return
    axis.plot(gap, accuracy, color=colour, ls=dashes, lw=1.8, marker=".", ms=5,
              label=NAMES[method])  # fmt: skip
    if banded:
        order = np.argsort(gap)
        axis.fill_between(gap[order], low[order], high[order], color=colour, alpha=0.12, lw=0)


def table(
    spots: Sequence[Spot], metric: Metric, *, title: str, tested: str = "held-out rows"
) -> Table:
    """One line a method: where it is fairest, its knee, and the most accurate within given gaps."""
    gaps, rows = (0.01, 0.02, 0.05), []
    for method, group in groupby(spots, key=lambda s: s.method):
        mine = list(group)
        known = [s for s in mine if s.complete(metric)]
        fairest = min(known, key=lambda s: s.mean(metric, "federation")[1], default=None)
        bend = knee(mine, metric) if len(pareto(mine, metric)) > 2 else None
        rows.append(
            (NAMES[method], _pair(fairest, metric), _pair(bend, metric),
             *(_pair(within(mine, metric, g), metric) for g in gaps))
        )  # fmt: skip
    constant = float(np.mean(constant_accuracy(spots[0].test)))
    gone = any(GONE in cell for row in rows for cell in row)
    header = ("method", "fairest", "knee", *(f"gap <= {100 * g:g}" for g in gaps))
    notes = (
        f"accuracy on {tested} @ gap of decisions on the clients' rows, points;",
        "within a gap: the most accurate strength; -: none, or not in every replicate",
        f"always predicting the most frequent class: {100 * constant:.1f}",
        *([f"{GONE}: collapsed in some replicate, nearly everybody gets one decision"] * gone),
    )
    return Table(title, header, tuple(rows), stubs=1, notes=notes)


def _pair(spot: Spot | None, metric: Metric) -> str:
    if spot is None:
        return "-"
    gap, accuracy = spot.mean(metric, "federation")[1], spot.mean(metric, "test")[0]
    mark = GONE if spot.collapsed().any() else ""
    return f"{100 * accuracy:.1f}@{100 * gap:.1f}{mark}"
