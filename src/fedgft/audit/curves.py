"""What the histograms show of scores: ROC, calibration, and every threshold that could be chosen.

Counts are exact at the edges of the bins. Between two edges nothing is known, and that is stated:
an area under the curve has the range that the order of rows within bins leaves open.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.audit.rates import FEW
from fedgft.audit.views import View
from fedgft.metrics import CATALOG, Tally
from fedgft.metrics.intervals import wilson

Point = dict[str, float | None]


@dataclass(frozen=True, eq=False)
class Curves:
    """One group, one class against the rest."""

    group: str
    positives: float
    negatives: float
    thresholds: np.ndarray  # the edges, from 0 to 1
    tpr: np.ndarray  # share of positives with a score of at least the threshold
    fpr: np.ndarray
    auc: float
    auc_error: float  # the area lies within auc +- this, by the width of the bins
    calibration: list[Point]  # score (+- half_bin), rate, low, high, n


def curves(seen: View, score: int = 0, *, points: int = 10) -> list[Curves]:
    """Of every group; `score` is the place of the class among those that have scores."""
    positive = 1 if len(seen.classes) == 2 else score
    found = []
    for g, name in enumerate(seen.names):
        placed = []
        for table in (seen.histogram, seen.placed(0), seen.placed(1)):
            counts = np.maximum(table[:, g, score], 0.0)  # (y, bin); noise goes below 0
            placed.append((counts[positive], counts.sum(0) - counts[positive]))
        found.append(_curves(name, placed, points, exact=not seen.noise.any()))
    return found


def _curves(
    name: str, placed: list[tuple[np.ndarray, np.ndarray]], points: int, *, exact: bool
) -> Curves:
    """`placed`: positives and negatives by bin; and if those whose bin is not known lay in the
    first that they may lie in, and in the last."""
    (yes, no), (yes_first, no_first), (yes_last, no_last) = placed
    bins = len(yes)
    above = lambda n: np.append(np.cumsum(n[::-1])[::-1], 0.0)  # noqa: E731
    p, n = yes.sum(), no.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        tpr, fpr = above(yes) / p, above(no) / n
        # A positive and a negative of one bin may stand either way round: half a pair each.
        least = float((above(yes_first)[1:] * no_last).sum() / (p * n))
        most = float((above(yes_last)[:-1] * no_first).sum() / (p * n))
        ties = float((yes * no).sum() / (p * n))
        auc = float((above(yes)[1:] * no).sum() / (p * n)) + ties / 2
        error = max(most - auc, auc - least)
    groups = np.array_split(np.arange(bins), min(points, bins))
    calibration = [point for g in groups if (point := _calibrated(g, yes, no, exact))]
    return Curves(name, float(p), float(n), np.arange(bins + 1) / bins, tpr, fpr, auc, error,
                  calibration)  # fmt: skip


def _calibrated(part: np.ndarray, yes: np.ndarray, no: np.ndarray, exact: bool) -> Point | None:
    """Of the rows with a score in these bins, how many are positive; no interval under noise."""
    hits, rows = yes[part].sum(), yes[part].sum() + no[part].sum()
    if rows <= 0:
        return None
    middles = (part + 0.5) / len(yes)
    score = float(((yes + no)[part] * middles).sum() / rows)
    ends: list[float | None] = [None, None]
    if exact and rows >= FEW:
        ends = [float(x) for x in wilson(hits / rows, rows)]
    return {"score": score, "half_bin": 0.5 / len(yes), "rate": float(hits / rows),
            "low": ends[0], "high": ends[1], "n": float(rows)}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Sweep:
    """Accuracy and gaps if all groups had the one threshold: exact at these thresholds."""

    thresholds: np.ndarray
    accuracy: np.ndarray
    gaps: dict[str, np.ndarray]  # by metric; NaN where a group has no rate
    selected: np.ndarray  # (threshold, group): share of positive decisions


def sweep(seen: View) -> Sweep | None:
    """Two classes only: of more, no single threshold decides."""
    if not seen.complete or len(seen.classes) != 2:
        return None
    tally = at_thresholds(seen.histogram[:, :, 0])[:-1]  # the last is nobody, above any score
    gaps = {name: tally.gap(metric, "hard") for name, metric in CATALOG.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        selected = (tally.decision[..., 1].sum(1) / tally.count.sum(1))[:, :-1]
    thresholds = np.arange(len(selected)) / len(selected)
    alone = np.nan if len(seen.names) < 2 else 0.0
    kept = {name: np.clip(gap, 0, 1) + alone for name, gap in gaps.items()}  # noise has no limits
    return Sweep(thresholds, np.clip(tally.accuracy(), 0.0, 1.0), kept, np.clip(selected, 0, 1))


def at_thresholds(counts: np.ndarray) -> Tally:
    """Decisions if the threshold were each edge in turn (leading axis), from (y, g, bin).

    The last is above 1: a score of 1 lies in the last bin, and would reach a threshold of 1.
    """
    rest = np.cumsum(counts[..., ::-1], -1)[..., ::-1]
    above = np.concatenate((rest, np.zeros_like(rest[..., :1])), -1)
    yes = np.moveaxis(above, -1, 0)
    decision = np.stack((yes[:1] - yes, yes), -1)
    return Tally(decision.sum(-1), decision, decision)
