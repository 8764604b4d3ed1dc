"""The picture of the whole matter: what each site sees, and what is so over all of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedgft.experiments import Result, Study
from fedgft.metrics import get_metric
from fedgft.report.figures import NAMES, STYLES, tidy
from fedgft.theory import simpson

WHITE = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85}
SHOWN = ("fedavg", "lft", "fedgft")
AIMS = {"fedavg": "to be right", "lft": "to be fair at each site", "fedgft": "to be fair to all"}


def point(study: Study, results: Sequence[Result]) -> Any:
    """Left the paper's smallest example, right what training for each site's fairness does."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.9))
    _paradox(left)
    _methods(right, study, [r for name in SHOWN for r in results if r.method == name])
    return figure


def _paradox(axis: Any) -> None:
    """Two departments that treat women and men alike, and do not together."""
    tally, metric = simpson().tally(), get_metric("sp")
    each, total = tally.statistics(metric, "hard"), tally.sum(0).statistics(metric, "hard")
    sums = np.concatenate((each, total[None]))[:, :, 0]
    women, men = (100 * sums[:, 0] / sums[:, 1]).T
    places = np.arange(3)
    axis.vlines(places, women, men, color="#b0b0b0", lw=6, zorder=1)
    axis.plot(places, women, "o", ms=11, color="#d55e00", mfc="none", mew=2.5, label="women")
    axis.plot(places, men, "o", ms=6, color="#0072b2", label="men")
    for place, a, b in zip(places, women, men, strict=True):
        axis.annotate(f"gap {abs(a - b):.0f}", (place, max(a, b)), (0, 10),
                      textcoords="offset points", ha="center")  # fmt: skip
    axis.set_xticks(places, ["site 1", "site 2", "both together"])
    axis.set(xlim=(-0.5, 2.5), ylim=(0, 100))
    axis.set_ylabel("accepted, %")
    axis.set_title("Fair at every site, unfair to everybody", loc="left", fontsize=11)
    axis.legend(frameon=False, loc="lower right")
    tidy(axis)


def _methods(axis: Any, study: Study, results: Sequence[Result]) -> None:
    rng = np.random.default_rng(0)
    for place, result in enumerate(results):
        assert result.history.after is not None and result.history.federation is not None
        colour = STYLES[result.method][0]
        own = 100 * result.history.after.gap(result.metric, "hard").ravel()
        own = own[np.isfinite(own)]
        everybody = 100 * result.history.federation[-1].gap(result.metric, "hard")
        overall, middle = float(np.mean(everybody)), float(np.median(own))
        jitter = place + rng.uniform(-0.22, 0.22, len(own))
        axis.plot(own, jitter, ".", ms=5, color=colour, alpha=0.35, mew=0)
        axis.plot([middle] * 2, [place - 0.3, place + 0.3], color=colour, lw=2)
        axis.plot(overall, place, "D", ms=11, color=colour, mec="white", mew=1.5, zorder=3)
        axis.annotate(f"{overall:.1f}", (overall, place), (0, 13), textcoords="offset points",
                      ha="center", weight="bold", color=colour, bbox=WHITE)  # fmt: skip
    axis.plot([], [], ".", color="#4d4d4d", label="a site's own")
    axis.plot([], [], "|", ms=12, mew=2, color="#4d4d4d", label="their median")
    axis.plot([], [], "D", ms=8, color="#4d4d4d", label="over everybody (mean)")
    names = [f"{NAMES[r.method]}\n({AIMS[r.method]})" for r in results]
    axis.set_yticks(range(len(results)), names)
    axis.set_ylim(len(results) - 0.4, -0.7)
    axis.set_xlabel("gap of decisions between the groups, points")
    about = f"{study.dataset.name.capitalize()}, {study.clients} sites"
    axis.set_title(about, loc="left", fontsize=11, parse_math=False)
    axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.98), ncols=3, fontsize=9,
                columnspacing=0.8, handletextpad=0.2)  # fmt: skip
    tidy(axis)
    axis.set_xlim(left=-2.5)  # not cut through a diamond or its number
    axis.grid(axis="x", color="#e6e6e6", lw=0.8)
    axis.grid(axis="y", visible=False)
