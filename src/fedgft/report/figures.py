"""Figures of results: accuracy and gap over rounds, with a 95% band over the replicates."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.experiments import Result, Study
from fedgft.metrics.intervals import Z95, floor

# Apart for the colour-blind (Okabe and Ito), and told apart by dashes in print.
STYLES = {
    "fedavg": ("#4d4d4d", (0, ())),
    "lrw": ("#0072b2", (0, (5, 2))),
    "lft": ("#cc79a7", (0, (1, 1.5))),
    "fairfed": ("#d55e00", (0, (5, 2, 1, 2))),
    "fedgft": ("#009e73", (0, ())),
}
NAMES = {"fedavg": "FedAvg", "lrw": "LRW", "lft": "LFT", "fairfed": "FairFed", "fedgft": "FedGFT"}
WHERE = {"federation": "the federation's rows", "test": "held-out rows"}
KINDS = {"soft": "scores", "hard": "decisions"}


def t95(n: int) -> float:
    """97.5% quantile of Student's t with n - 1 degrees of freedom (Fisher's expansion about z)."""
    z, v = Z95, n - 1
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)


def trajectories(study: Study, results: Sequence[Result]) -> Any:
    """One column a (metric, alpha): accuracy above, the protocol's headline gap below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    columns = list(dict.fromkeys((r.metric, r.alpha) for r in results))
    figure = Figure(figsize=(1.2 + 4.2 * len(columns), 6.2), layout="constrained")
    axes = figure.subplots(2, len(columns), sharex=True, squeeze=False)
    where, kind = study.protocol.headline
    for j, (metric, alpha) in enumerate(columns):
        mine = [r for r in results if (r.metric, r.alpha) == (metric, alpha)]
        _panel(axes[0, j], mine, [r.history.test.accuracy() for r in mine])
        tallies = [getattr(r.history, where) for r in mine]
        _panel(axes[1, j], mine, [t.gap(metric, kind) for t in tallies])
        if (where, kind) == ("test", "hard"):
            _floor(
                axes[1, j],
                float(np.nanmean(floor(metric, tallies[-1][-1].statistics(metric, "hard")))),
            )
        axes[1, j].set_ylim(bottom=0)
        how = "" if study.concentration(mine[0]) is None else f", alpha {alpha:g}"
        axes[0, j].set_title(metric.title + how, loc="left", fontsize=11)
        axes[1, j].set_xlabel("round")
        axes[1, j].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set_ylabel("accuracy, %")
    axes[1, 0].set_ylabel(f"gap of {KINDS[kind]}\non {_rows(where, study.protocol.name)}, points")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    n = len(study.seeds)
    band = f"mean of {n} replicates and its 95% band" if n > 1 else "one replicate, no band"
    figure.suptitle(
        f"{study.dataset.name}, protocol {study.protocol.name}: {band}",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    return figure


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """PNG and SVG, each written whole or not at all."""
    paths = []
    for ending in ("png", "svg"):
        path, part = folder / f"{name}.{ending}", folder / f".{name}.{ending}.part"
        figure.savefig(
            part, format=ending, dpi=150, metadata={"Date": None} if ending == "svg" else None
        )
        part.replace(path)
        paths.append(path)
    return paths


def _panel(axis: Any, results: Sequence[Result], values: Sequence[np.ndarray]) -> None:
    lows: list[float] = []
    highs: list[float] = []
    for result, value in zip(results, values, strict=True):
        colour, dashes = STYLES.get(result.method, ("#000000", (0, ())))
        mean, n = 100 * np.nanmean(value, axis=1), value.shape[1]
        rounds = result.history.rounds
        axis.plot(
            rounds,
            mean,
            color=colour,
            ls=dashes,
            lw=1.8,
            label=NAMES.get(result.method, result.method),
        )
        half = 100 * t95(n) * np.nanstd(value, axis=1, ddof=1) / math.sqrt(n) if n > 1 else 0 * mean
        low, high = np.maximum(mean - half, 0), np.minimum(mean + half, 100)
        axis.fill_between(rounds, low, high, color=colour, alpha=0.15, lw=0)
        seen = rounds >= max(1, rounds[-1] // 10)  # the random start would squeeze all the rest
        lows, highs = [*lows, np.nanmin(low[seen])], [*highs, np.nanmax(high[seen])]
    margin = 0.05 * (max(highs) - min(lows)) + 0.1
    axis.set_ylim(max(0, min(lows) - margin), max(highs) + margin)
    axis.grid(axis="y", color="#e6e6e6", lw=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.01)


def _floor(axis: Any, height: float) -> None:
    axis.axhline(100 * height, color="#808080", lw=1, ls=(0, (2, 2)))
    axis.annotate(
        "what chance alone would show", (0.01, 100 * height), xycoords=("axes fraction", "data"),
        xytext=(0, 3), textcoords="offset points", fontsize=8, color="#606060",
    )  # fmt: skip


def _rows(where: str, protocol: str) -> str:
    return WHERE[where] if protocol == "heldout" or where == "federation" else "the test rows"
