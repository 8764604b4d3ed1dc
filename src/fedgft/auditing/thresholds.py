"""Compute ROC and calibration curves, and other thresholds, from histograms of scores.

Counts are exact at the edges of the bins, so only these edges are considered as thresholds. The
order of the rows within a bin is unknown, so the area under a ROC curve is known only up to a
range.

Thresholds by group are found by a search over windows. For a metric with one condition, the gap is
at most the tolerance t if all rates lie in a window [w, w + t]. For each w that is a possible rate,
every group takes its most accurate threshold whose rate lies in the window. The w with the highest
accuracy over all groups is chosen. With two conditions (equalized odds) the window is a square.

Accepting all rows, or rejecting all rows, also makes all rates equal, but is not a solution. So a
limit applies: with m the smaller of the shares of rows that are accepted and rejected now, the new
thresholds must accept at least the share m / 10 of all rows and reject at least the share m / 10.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from fedgft.auditing.rates import View
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, Metric
from fedgft.metrics.intervals import FEW, wilson
from fedgft.metrics.metric import Value
from fedgft.sums import Sums
from fedgft.validation import check_number

GROUP_THRESHOLDS_WARNING = (
    "Thresholds by group need the group of every person at decision time, which the law may "
    "forbid (treating people differently by group). They were chosen and judged on the same rows, "
    "so new people will see a somewhat larger gap; rows without a recorded group keep the old one."
)
COARSE_HISTOGRAM_WARNING = (
    "The sites' files show few people's scores together, so the gap and the accuracy of thresholds "
    "by group are estimates here; files with every bin (min_bin=1) make them exact."
)
ABOVE_ALL = math.nextafter(1.0, 2.0)  # a threshold that no score reaches
MIN_SHARE = 0.1  # times the smaller share now: smallest share to accept, and to reject
MAX_WINDOWS = 60_000  # if there are more windows, only a grid of them is tried: not always optimal


class CalibrationPoint(TypedDict):
    """The mean score (+- half_bin) of rows with similar scores, and their share of positives."""

    score: float
    half_bin: float
    rate: float
    low: float | None
    high: float | None
    n: float


@dataclass(frozen=True, eq=False)
class Curves:
    """The ROC and calibration curves of one group, for one class against the rest.

    `thresholds` are the edges of the bins from 0 to 1. For each threshold, `tpr` and `fpr` are the
    shares of positives and of negatives whose score is at least the threshold; these are `exact`
    (a truth value per threshold) unless a site merged ranges with few people there. The area under
    the curve, `auc`, is off by at most `bin_error`, because the order within a bin is unknown. It
    is NaN if there are no positives or no negatives.
    """

    group: str
    positives: float
    negatives: float
    thresholds: np.ndarray
    exact: np.ndarray
    tpr: np.ndarray
    fpr: np.ndarray
    auc: float
    bin_error: float
    calibration: list[CalibrationPoint]


def compute_curves(view: View, score: int = 0, *, points: int = 10) -> list[Curves]:
    """Return the curves of every group.

    Parameters
    ----------
    view
        The groups, with histograms.
    score
        The position of the class among the classes with scores (0 if there are two classes, of
        which only the positive one has scores).
    points
        The number of points of a calibration curve.
    """
    positive = 1 if len(view.spec.classes) == 2 else score
    exact = not view.noise.any() and view.products is None
    found = []
    for g, group in enumerate(view.groups):
        weight = 1.0  # of a row, on average; see `estimate_rates`
        if view.squares is not None and (total := view.sums.count[:, :, g].sum()) > 0:
            weight = float(view.squares[:, :, g].sum() / total)
        sides = []
        for table in (view.histogram, view.shifted_histogram(0), view.shifted_histogram(1)):
            counts = np.maximum(table[:, g, score], 0.0)  # (y, bin); noise can make counts negative
            sides.append((counts[positive], counts.sum(0) - counts[positive]))
        found.append(_group_curves(group, sides, points, exact=exact, weight=weight))
    return found


@np.errstate(divide="ignore", invalid="ignore")
def _group_curves(
    group: str,
    sides: list[tuple[np.ndarray, np.ndarray]],
    points: int,
    *,
    exact: bool,
    weight: float,
) -> Curves:
    """Return the curves of one group, whose rows have this weight on average.

    `sides` holds positives and negatives by bin three times: as estimated, with rows of uncertain
    bin in the first possible bin, and with such rows in the last possible bin.
    """
    (yes, no), (yes_first, no_first), (yes_last, no_last) = sides
    bins = len(yes)
    positives = yes.sum()
    negatives = no.sum()
    pairs = positives * negatives
    tpr = count_above(yes) / positives
    fpr = count_above(no) / negatives
    # A positive and a negative in the same bin may be in either order, so such a pair counts 1/2.
    least = float((count_above(yes_first)[1:] * no_last).sum() / pairs)
    most = float((count_above(yes_last)[:-1] * no_first).sum() / pairs)
    ties = float((yes * no).sum() / pairs)
    auc = float((count_above(yes)[1:] * no).sum() / pairs) + ties / 2
    parts = np.array_split(np.arange(bins), min(points, bins))
    calibration = [_calibration_point(part, yes, no, exact, weight) for part in parts]
    return Curves(
        group=group,
        positives=float(positives),
        negatives=float(negatives),
        thresholds=np.arange(bins + 1) / bins,
        exact=_same_above(yes_first, yes_last) & _same_above(no_first, no_last),
        tpr=tpr,
        fpr=fpr,
        auc=auc,
        bin_error=max(most - auc, auc - least),
        calibration=[point for point in calibration if point is not None],
    )


def count_above(counts: np.ndarray) -> np.ndarray:
    """Return how many rows reach each edge, (..., bin + 1); no score reaches the last one."""
    rest = np.cumsum(counts[..., ::-1], -1)[..., ::-1]
    return np.concatenate((rest, np.zeros_like(rest[..., :1])), -1)


def _same_above(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return for every edge whether two placements of uncertain rows agree there, (bin + 1,)."""
    same = np.isclose(count_above(first), count_above(last), rtol=0, atol=1e-6)
    return np.asarray(same.reshape(-1, same.shape[-1]).all(0))


def find_exact_edges(view: View) -> np.ndarray:
    """Return for every edge of the bins whether all counts are exact there, (bin + 1,)."""
    return _same_above(view.shifted_histogram(0), view.shifted_histogram(1))


def _calibration_point(
    part: np.ndarray, yes: np.ndarray, no: np.ndarray, exact: bool, weight: float
) -> CalibrationPoint | None:
    """Return the share of positives among the rows with a score in the bins `part`.

    There is no interval if the counts are not `exact`. The result is None if there are no rows.
    `weight` is the average weight of a row.
    """
    hits = yes[part].sum()
    rows = yes[part].sum() + no[part].sum()
    if rows <= 0:
        return None
    middles = (part + 0.5) / len(yes)
    effective = rows / weight
    known = exact and effective >= FEW
    low, high = map(float, wilson(hits / rows, effective)) if known else (None, None)
    return {
        "score": float(((yes + no)[part] * middles).sum() / rows),
        "half_bin": 0.5 / len(yes),
        "rate": float(hits / rows),
        "low": low,
        "high": high,
        "n": float(rows),
    }


@dataclass(frozen=True, eq=False)
class Sweep:
    """Accuracy and gaps for each of `thresholds`, if all groups have the same threshold.

    `gaps` is by metric, with NaN where a group has no rate. `selected` is the share of positive
    decisions, by group. All arrays are (threshold,).
    """

    thresholds: np.ndarray
    accuracy: np.ndarray
    gaps: dict[str, np.ndarray]
    selected: dict[str, np.ndarray]


@np.errstate(divide="ignore", invalid="ignore")
def sweep_thresholds(view: View) -> Sweep | None:
    """Try every edge as the threshold; None without histograms, or with more than two classes."""
    if not view.has_histograms or len(view.spec.classes) != 2:
        return None
    sums = _sums_by_threshold(view.histogram[:, :, 0])[:-1]  # the last threshold accepts no row
    selected = (sums.decision[..., 1].sum(1) / sums.count.sum(1))[:, :-1]
    gaps = {name: np.clip(sums.gap(metric, "hard"), 0, 1) for name, metric in CATALOG.items()}
    if len(view.groups) < 2:
        gaps = {name: np.full_like(gap, np.nan) for name, gap in gaps.items()}
    return Sweep(
        thresholds=np.arange(len(selected)) / len(selected),
        accuracy=np.clip(sums.accuracy(), 0.0, 1.0),  # noise may leave [0, 1]
        gaps=gaps,
        selected=dict(zip(view.groups, np.clip(selected, 0, 1).T, strict=True)),
    )


def _sums_by_threshold(counts: np.ndarray) -> Sums:
    """Return the sums of the decisions for each edge as the threshold, from counts (y, g, bin).

    The thresholds are the leading axis. The last threshold is above 1, because a score of 1, which
    is in the last bin, would reach a threshold of 1.
    """
    yes = np.moveaxis(count_above(counts), -1, 0)
    decision = np.stack((yes[:1] - yes, yes), -1)
    return Sums(decision.sum(-1), decision, decision)


class GroupThresholds(TypedDict):
    """Thresholds by group that reduce the gap of a metric, and the resulting gap and accuracy.

    `feasible` says whether the gap is at most `tolerance`. If not, these are the thresholds of the
    smallest gap that can be reached. `reason` then explains the failure if only thresholds that
    accept all rows or none would meet the tolerance; otherwise it is "".
    """

    metric: str
    tolerance: float
    thresholds: dict[str, float]
    gap: float | None
    accuracy: float | None
    gap_before: float | None
    accuracy_before: float | None
    feasible: bool
    reason: str


def adjust_thresholds(metric: Metric, view: View, tolerance: float) -> GroupThresholds:
    """Return the most accurate thresholds by group for which the gap is at most `tolerance`.

    Parameters
    ----------
    metric
        The metric whose gap is limited.
    view
        The groups, with histograms of the scores of two classes.
    tolerance
        The largest gap to allow, at least 0 and below 1.
    """
    if not view.has_histograms or len(view.spec.classes) != 2:
        raise FedgftError(
            "`adjust` needs histograms of the scores of two classes: measure with `score` and "
            "without `min_cell`",
            kind="data",
        )
    if len(view.groups) < 2:
        raise FedgftError(f"`adjust` {metric.name}: there is one group only, {view.groups[0]}")
    check_number(f"adjust_to[{metric.name!r}]", tolerance)
    if not 0 <= tolerance < 1:
        raise FedgftError(f"`adjust` {metric.name}={tolerance:g}: must be at least 0 and below 1")
    counts = np.maximum(view.histogram[:, :, 0], 0.0)
    before = view.sums.sum()
    accepted = before.decision[:, :-1, 1].sum() / max(1.0, before.count[:, :-1].sum())
    share = MIN_SHARE * float(np.clip(min(accepted, 1 - accepted), 0.0, 0.5))
    best, feasible = search_group_thresholds(
        metric, counts, tolerance, groups=view.groups, min_share=share
    )
    reason = ""
    if not feasible and search_group_thresholds(metric, counts, tolerance, groups=view.groups)[1]:
        reason = (
            f"only thresholds that accept every row, or none, bring the gap of {metric.name} to "
            f"{tolerance:g}; ask for a larger gap"
        )
    after = _apply_thresholds(counts, best, before)
    thresholds = candidate_thresholds(counts.shape[-1])[best].tolist()
    return {
        "metric": metric.name,
        "tolerance": tolerance,
        "thresholds": dict(zip(view.groups, thresholds, strict=True)),
        "gap": _clip_share(after.gap(metric, "hard")),
        "accuracy": _clip_share(after.accuracy()),
        "gap_before": _clip_share(before.gap(metric, "hard")),
        "accuracy_before": _clip_share(before.accuracy()),
        "feasible": feasible,
        "reason": reason,
    }


def _clip_share(value: Value) -> float | None:
    """Clip a gap or an accuracy to [0, 1], because noise may leave it; None for NaN."""
    return None if np.isnan(value) else float(np.clip(value, 0.0, 1.0))


def _apply_thresholds(counts: np.ndarray, best: np.ndarray, before: Sums) -> Sums:
    """Return the sums of the decisions with the thresholds at the positions `best`.

    Rows without a group keep the decisions that they have in `before`.
    """
    yes = np.stack([counts[:, g, t:].sum(-1) for g, t in enumerate(best)], 1)
    total = counts.sum(-1)[:, :-1]
    decision = np.concatenate((np.stack((total - yes, yes), -1), before.decision[:, -1:]), 1)
    return Sums(decision.sum(-1), decision, decision)


def candidate_thresholds(bins: int) -> np.ndarray:
    """Return the edges of the bins, (bins + 1,); the last one is a threshold above every score."""
    return np.append(np.arange(bins) / bins, ABOVE_ALL)


def search_group_thresholds(
    metric: Metric,
    counts: np.ndarray,
    tolerance: float,
    *,
    groups: Sequence[str],
    max_windows: int = MAX_WINDOWS,
    min_share: float | None = None,
) -> tuple[np.ndarray, bool]:
    """Find the most accurate thresholds by group for which the gap is at most `tolerance`.

    Parameters
    ----------
    metric
        The metric whose gap is limited.
    counts
        Histograms (label, group, bin); the last group holds the rows that belong to no group.
    tolerance
        The largest gap to allow.
    groups
        The names of the groups, for messages.
    max_windows
        The largest number of windows to try.
    min_share
        The smallest share of all rows that must be accepted, and that must be rejected; at least
        one row each. None means no limit.

    Returns
    -------
    best
        For each group, the position of its threshold in `candidate_thresholds`.
    feasible
        Whether the gap is at most `tolerance`. If not, `best` gives the smallest gap, to within 0.1
        points.
    """
    sums = _sums_by_threshold(counts)
    rates = np.moveaxis(metric.rates(sums.statistics(metric, "hard")), 0, -1)  # (v, g, t)
    right = np.einsum("tygy->gt", sums.decision[:, :, :-1])
    empty = np.isnan(rates).all(-1).any(0)
    if empty.any():
        names = ", ".join(np.array(groups)[empty][:3])
        raise FedgftError(
            f"thresholds by group for {metric.name}: no row of the event in {names}", kind="data"
        )
    rows = counts[:, :-1].sum(0)  # (g, bin)
    total = float(rows.sum())
    search = _WindowSearch(
        rates=rates,
        right=right,
        corners=_window_corners(rates, max_windows),
        accepted=count_above(rows),
        total=total,
        min_rows=-math.inf if min_share is None else max(1.0, min_share * total),
    )
    best = search.find_most_accurate(tolerance)
    if best is not None:
        return best, True
    best = search.find_smallest_gap(tolerance)
    if best is None:  # no choice of thresholds accepts and rejects enough rows
        best = replace(search, min_rows=-math.inf).find_smallest_gap(tolerance)
    assert best is not None  # a window of width 1 contains all rates
    return best, False


@dataclass(frozen=True, eq=False)
class _WindowSearch:
    """A search over windows of rates.

    `rates` (v, g, t) holds the rates of each group at each threshold, `right` (g, t) the numbers of
    right decisions, and `accepted` (g, t) the numbers of accepted rows. `corners` (window, v) holds
    the lower edges of the windows. Of the `total` rows, at least `min_rows` must be accepted, and
    at least `min_rows` must be rejected.
    """

    rates: np.ndarray
    right: np.ndarray
    corners: np.ndarray
    accepted: np.ndarray
    total: float
    min_rows: float

    def find_most_accurate(self, tolerance: float) -> np.ndarray | None:
        """Return the thresholds of the best window, (g,); None if no window contains all groups."""
        most_right = -np.inf
        best = None
        for corner in self.corners:
            low = corner[:, None, None] - 1e-12
            high = corner[:, None, None] + tolerance + 1e-12
            inside = ((self.rates >= low) & (self.rates <= high)).all(0)  # (g, t)
            if not inside.any(-1).all():
                continue
            value = np.where(inside, self.right, -np.inf)
            if value.max(-1).sum() <= most_right:
                continue
            found = self._choose(value)
            if found is None:
                continue
            right = np.take_along_axis(value, found[:, None], -1).sum()
            if right > most_right:
                most_right = right
                best = found
        return best

    def find_smallest_gap(self, tolerance: float) -> np.ndarray | None:
        """Return the thresholds of the smallest gap above `tolerance`, (g,), or None.

        The gap is the smallest one to within 0.1 points.
        """
        low = tolerance
        high = 1.0
        best = self.find_most_accurate(high)
        while best is not None and high - low > 0.001:
            middle = (low + high) / 2
            found = self.find_most_accurate(middle)
            if found is None:
                low = middle
            else:
                high = middle
                best = found
        return best

    def _choose(self, value: np.ndarray) -> np.ndarray | None:
        """Return the threshold of each group with the largest `value` (g, t), or None.

        `value` is -inf for a threshold that is not allowed. If the best thresholds accept or reject
        too few rows, the threshold of one group is replaced, at the smallest loss of `value`. The
        result is None if replacing one threshold is not enough.
        """
        best = value.argmax(-1)
        by_group = self.accepted[np.arange(len(best)), best]
        max_rows = self.total - self.min_rows
        if self.min_rows <= by_group.sum() <= max_rows:
            return best
        accepted = (by_group.sum() - by_group)[:, None] + self.accepted
        allowed = (accepted >= self.min_rows) & (accepted <= max_rows)
        value_allowed = np.where(allowed, value, -np.inf)
        loss = value.max(-1) - value_allowed.max(-1)
        if not np.isfinite(loss).any():
            return None
        moved = int(np.argmin(np.where(np.isfinite(loss), loss, np.inf)))
        best[moved] = value_allowed[moved].argmax()
        return best


def _window_corners(rates: np.ndarray, max_windows: int) -> np.ndarray:
    """Return the lower edges of the windows to try, (window, v).

    These are all combinations of rates, or a grid of their quantiles if there are too many.
    """
    sides = [np.unique(side[~np.isnan(side)]) for side in rates]
    if math.prod(map(len, sides)) > max_windows:
        grid = np.linspace(0, 1, int(max_windows ** (1 / len(sides))))
        sides = [np.quantile(side, grid, method="nearest") for side in sides]
    return np.stack(np.meshgrid(*map(np.unique, sides), indexing="ij"), -1).reshape(-1, len(sides))
