"""The frontier as a picture and as a table: gap to the right, accuracy upwards, left is fairer."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from fedgft.experiments.frontier import Spot, at_gap, knee, pareto
from fedgft.layout import Table
from fedgft.metrics import Metric
from fedgft.metrics.intervals import floor
from fedgft.report.figures import NAMES, STYLES, band, tidy

SHOWN = 6.0  # points of accuracy below the best: who wants to pay more?


def draw(spots: Sequence[Spot], metric: Metric, *, title: str, target: float | None,
         chosen: Spot | None) -> Any:  # fmt: skip
    """Held-out rows on the left, the clients' own on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 5.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, where, said in zip(axes, ("test", "federation"),
                                 ("held-out rows", "the clients' rows"), strict=True):  # fmt: skip
        _panel(axis, spots, metric, where, target=target, chosen=chosen)
        axis.set_title(f"{metric.title}, {said}", loc="left", fontsize=11, parse_math=False)
        axis.set_xlabel("gap of decisions, points")
    axes[0].set_ylabel("accuracy on the same rows, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)
    return figure


def _panel(axis: Any, spots: Sequence[Spot], metric: Metric, where: str, *, target: float | None,
           chosen: Spot | None) -> None:  # fmt: skip
    for method, group in groupby(spots, key=lambda s: s.method):
        _method(axis, method, list(group), metric, where)
    if chosen is not None:
        accuracy, gap = chosen.mean(metric, where)
        axis.plot(100 * gap, 100 * accuracy, "*", ms=15, mfc="none", mec="#000000", mew=1.3,
                  ls="none", label="chosen (on the clients' rows)")  # fmt: skip
    bend = knee([s for s in spots if s.method == "fedgft-control"], metric)
    if bend is not None:
        accuracy, gap = bend.mean(metric, where)
        axis.plot(100 * gap, 100 * accuracy, "o", ms=10, mfc="none", mec="#332288", mew=1.3,
                  ls="none", label="knee of FedGFT control")  # fmt: skip
    if where == "test":
        chance = np.nanmean(floor(metric, spots[0].test.statistics(metric, "hard")))
        axis.axvline(100 * chance, color="#808080", lw=1, ls=(0, (2, 2)), label="by chance alone")
    if target is not None:
        axis.axvline(100 * target, color="#d55e00", lw=1, ls=(0, (6, 3)), label="target")
    axis.set_xlim(left=0)
    best = max(100 * a for s in spots if np.isfinite(a := s.mean(metric, where)[0]))
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, best - SHOWN), high)
    if low < best - SHOWN:
        axis.text(0.99, 0.01, "strengths that cost more than that are not shown", fontsize=8,
                  color="#606060", ha="right", transform=axis.transAxes)  # fmt: skip
    tidy(axis)


def _method(axis: Any, method: str, spots: list[Spot], metric: Metric, where: str) -> None:
    """A line through the strengths with the band of its accuracy; a cross for a single spot."""
    values = [spot.values(metric, where) for spot in spots]
    accuracy, low, high = band(100 * np.stack([v[0] for v in values]))
    gap = np.array([100 * spot.mean(metric, where)[1] for spot in spots])
    colour, dashes = STYLES[method]
    if len(spots) == 1:
        axis.errorbar(gap, accuracy, yerr=(accuracy - low, high - accuracy), fmt="P", ms=7,
                      color=colour, label=NAMES[method])  # fmt: skip
        return
    axis.plot(gap, accuracy, color=colour, ls=dashes, lw=1.8, marker=".", ms=5,
              label=NAMES[method])  # fmt: skip
    order = np.argsort(gap)
    axis.fill_between(gap[order], low[order], high[order], color=colour, alpha=0.12, lw=0)


def table(spots: Sequence[Spot], metric: Metric, *, title: str) -> Table:
    """One line a method: its smallest gap, its knee, and its accuracy at given gaps."""
    gaps = (0.01, 0.02, 0.05)
    rows = []
    for method, group in groupby(spots, key=lambda s: s.method):
        mine = list(group)
        front, bend = pareto(mine, metric), knee(mine, metric)
        if not front:
            rows.append((NAMES[method], *["-"] * 7))
            continue
        each = [at_gap(mine, metric, g) for g in gaps]
        rows.append(
            (NAMES[method], *_pair(front[0], metric), *(_pair(bend, metric) if bend else ("", "")),
             *(_percent(v) for v in each))
        )  # fmt: skip
    header = ("method", "smallest gap", "accuracy there", "gap at the knee", "accuracy there",
              *(f"accuracy at gap {100 * g:g}" for g in gaps))  # fmt: skip
    note = "gaps of decisions on the clients' rows, accuracy on held-out rows; -: not reached"
    return Table(title, header, tuple(rows), stubs=1, notes=(note,))


def _pair(spot: Spot, metric: Metric) -> tuple[str, str]:
    gap, accuracy = spot.mean(metric, "federation")[1], spot.mean(metric, "test")[0]
    return f"{100 * gap:.1f}", f"{100 * accuracy:.1f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}" if np.isfinite(value) else "-"
