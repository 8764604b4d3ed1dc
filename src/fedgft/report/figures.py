"""Figures of results: accuracy and gap over rounds, with a 95% band over the replicates."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.experiments import Protocol, Result, Study
from fedgft.files import whole
from fedgft.metrics.intervals import Z95, floor

# Apart for the colour-blind (Okabe and Ito), and told apart by dashes in print.
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
NAMES = {
    "fedavg": "FedAvg", "lrw": "LRW", "lft": "LFT", "fairfed": "FairFed", "fedgft": "FedGFT",
    "fedgft-control": "FedGFT control", "thresholds": "FedAvg + thresholds",
    "pooled": "pooled: control", "exponentiated-gradient": "pooled: Fairlearn EG",
    "threshold-optimizer": "pooled: Fairlearn TO",
}  # fmt: skip
WHERE = {"federation": "the federation's rows", "test": "held-out rows"}
SVG = {"svg.hashsalt": "fedgft", "svg.fonttype": "none"}  # text as text: small, and searchable
KINDS = {"soft": "scores", "hard": "decisions"}


# 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom, where the expansion is poor
SMALL_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def t95(n: int) -> float:
    """97.5% quantile of Student's t with n - 1 degrees of freedom (Fisher's expansion about z)."""
    if n - 1 <= len(SMALL_T):
        return SMALL_T[n - 2]
    z, v = Z95, n - 1
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)


@dataclass(frozen=True, eq=False)
class Curve:
    """One line of each panel; values are fractions, (round, replicate)."""

    name: str
    colour: str
    dashes: Any
    rounds: np.ndarray
    accuracy: np.ndarray
    gap: np.ndarray


@dataclass(frozen=True, eq=False)
class Column:
    title: str
    curves: Sequence[Curve]
    chance: float | None = None  # the gap that a fair model would show, in points


def trajectories(study: Study, results: Sequence[Result]) -> Any:
    """One column a (metric, alpha): accuracy above, the protocol's headline gap below."""
    columns = []
    for metric, alpha in dict.fromkeys((r.metric, r.alpha) for r in results):
        mine = [r for r in results if (r.metric, r.alpha) == (metric, alpha)]
        how = "" if study.concentration(alpha) is None else f", alpha {alpha:g}"
        columns.append(_column(study, mine, title=metric.title + how))
    n = len(study.seeds)
    longer = any((r.stretch > 1).any() for r in results)
    more = "\nreplicates that took more rounds are drawn as wide as the others" if longer else ""
    return over_rounds(
        columns,
        title=f"{study.dataset.name}, protocol {study.protocol.name}: {replicates(n)}{more}",
        gap=gap_label(study.protocol),
    )


def replicates(n: int) -> str:
    return f"mean of {n} replicates and its 95% band" if n > 1 else "one replicate, no band"


def gap_label(protocol: Protocol) -> str:
    where, kind = protocol.headline
    return f"gap of {KINDS[kind]}\non {WHERE[where]}, points"


def _column(study: Study, results: Sequence[Result], *, title: str) -> Column:
    metric, (where, kind) = results[0].metric, study.protocol.headline
    tallies = [getattr(r.history, where) for r in results]
    curves = [
        Curve(NAMES.get(r.method, r.method), *STYLES.get(r.method, ("#000000", (0, ()))),
              r.history.rounds, r.history.test.accuracy(), tally.gap(metric, kind))
        for r, tally in zip(results, tallies, strict=True)
    ]  # fmt: skip
    chance = None
    if (where, kind) == ("test", "hard"):
        known = floor(metric, tallies[-1][-1].statistics(metric, "hard"))
        known = known[np.isfinite(known)]
        chance = 100 * float(np.mean(known)) if len(known) else None
    return Column(title, curves, chance)


def over_rounds(columns: Sequence[Column], *, title: str, gap: str) -> Any:
    """Accuracy above, the gap below, one column beside the other; bands over the replicates."""
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


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """PNG and SVG, each written whole or not at all."""
    from matplotlib import rc_context

    paths = []
    for ending in ("png", "svg"):
        path = folder / f"{name}.{ending}"
        date = {"Date": None} if ending == "svg" else None  # the same picture, the same bytes
        with whole(path) as part, rc_context(SVG):
            drawn = BytesIO()
            figure.savefig(drawn, format=ending, dpi=150, metadata=date)
            content = drawn.getvalue()
            part.write_bytes(shorter(content.decode()).encode() if ending == "svg" else content)
        paths.append(path)
    return paths


def shorter(svg: str) -> str:
    """Coordinates to a tenth of a point: nobody sees more, and files are smaller by a third."""
    cut = lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0])  # noqa: E731
    return re.sub(r' (d|x|y)="[^"]*"', cut, svg)


def _panel(axis: Any, curves: Sequence[Curve], values: Sequence[np.ndarray]) -> None:
    seen: list[np.ndarray] = []  # what the axis has to show
    for curve, value in zip(curves, values, strict=True):
        mean, low, high = band(100 * value)
        look = {"color": curve.colour, "lw": 1.8, "ls": curve.dashes, "label": curve.name}
        axis.plot(curve.rounds, mean, **look)
        axis.fill_between(curve.rounds, low, high, color=curve.colour, alpha=0.15, lw=0)
        # the random start would squeeze all the rest
        later = curve.rounds >= max(1, curve.rounds[-1] // 10)
        seen += [low[later], high[later]]
    shown = np.concatenate(seen)
    shown = shown[np.isfinite(shown)]
    if len(shown):
        margin = 0.05 * float(np.ptp(shown)) + 0.1
        axis.set_ylim(max(0.0, shown.min() - margin), shown.max() + margin)
    else:
        axis.text(0.5, 0.5, "not estimable", transform=axis.transAxes, ha="center")
    tidy(axis)


def tidy(axis: Any) -> None:
    """A light grid behind the data, and no box around it."""
    axis.grid(axis="y", color="#e6e6e6", lw=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over the replicates (columns) that have a value, and its 95% interval."""
    known = np.isfinite(values)
    n = known.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(known, values, 0.0).sum(axis=1) / n
        spread = np.where(known, values - mean[:, None], 0.0)
        error = np.sqrt((spread**2).sum(axis=1) / (n - 1) / n)
    half = np.array([t95(int(m)) * e if m > 1 else 0.0 for m, e in zip(n, error, strict=True)])
    return mean, np.maximum(mean - half, 0.0), np.minimum(mean + half, 100.0)
