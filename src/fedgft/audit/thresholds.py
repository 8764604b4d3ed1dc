"""Thresholds of their own for each group, from the histograms alone.

The thresholds that are tried are the edges of the bins, so every count is exact. For a metric with
one condition, a tolerance t is met if all rates lie in a window [w, w + t]. For each w that a rate
can have, every group takes its most accurate threshold with a rate in the window; the best w wins.
With two conditions (equalised odds) the window is a square.

All rates are equal, too, where everybody is accepted, or nobody. Such thresholds tell no two people
apart, so they do not count as meeting a tolerance: of those now accepted, and of those now refused,
a tenth at least must stay on either side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedgft.audit.curves import at_thresholds
from fedgft.audit.views import View
from fedgft.errors import FedgftError
from fedgft.metrics import Metric, Tally

WARNING = (
    "Thresholds by group need the group of every person at decision time, which the law may "
    "forbid (treating people differently by group). They were chosen and judged on the same rows, "
    "so new people will see a somewhat larger gap; rows without a recorded group keep the old one."
)
ESTIMATED = (
    "The sites' files show few people's scores together, so the gap and the accuracy of thresholds "
    "by group are estimates here; files with every bin (min_bin=1) make them exact."
)
NOBODY = math.nextafter(1.0, 2.0)  # a threshold that no score reaches
KEPT = 0.1  # of those accepted and of those refused now: fewer is a decision for all alike
WINDOWS = 60_000  # beyond so many, square windows are tried on a grid, and the best may be missed


@dataclass(frozen=True)
class Adjusted:
    """Group thresholds that meet a metric, and what they cost."""

    metric: str
    tolerance: float
    thresholds: dict[str, float]
    gap: float
    accuracy: float
    gap_before: float
    accuracy_before: float
    feasible: bool  # the tolerance is met; otherwise the smallest gap that thresholds can reach
    reason: str = ""  # why it is not met, where thresholds that decide all alike would meet it


def adjust(metric: Metric, seen: View, tolerance: float) -> Adjusted:
    """The least loss of accuracy at which the gap is at most `tolerance`."""
    if not seen.complete or len(seen.classes) != 2:
        raise FedgftError(
            "--adjust needs histograms of the scores of two classes: measure with --score and "
            "without --min-cell"
        )
    if len(seen.names) < 2:
        raise FedgftError(f"--adjust {metric.name}: there is one group only, {seen.names[0]}")
    if not 0 <= tolerance < 1:
        raise FedgftError(f"--adjust {metric.name}={tolerance:g}: must be at least 0 and below 1")
    counts = np.maximum(seen.histogram[:, :, 0], 0.0)
    before = seen.tally.sum()
    accepted = before.decision[:, :-1, 1].sum() / max(1.0, before.count[:, :-1].sum())
    least = KEPT * float(np.clip(min(accepted, 1 - accepted), 0.0, 0.5))
    best, feasible = by_group(metric, counts, tolerance, names=seen.names, least=least)
    alike, reason = False, ""
    if not feasible:
        _, alike = by_group(metric, counts, tolerance, names=seen.names)
    if alike:
        reason = (
            f"only thresholds that accept everybody, or nobody, bring the gap of {metric.name} to "
            f"{tolerance:g}; ask for a larger gap"
        )
    values = edges(counts.shape[-1])[best].tolist()
    thresholds = dict(zip(seen.names, values, strict=True))
    after = _decided(counts, best, before)
    return Adjusted(
        metric.name, tolerance, thresholds,
        gap=float(after.gap(metric, "hard")), accuracy=float(after.accuracy()),
        gap_before=float(before.gap(metric, "hard")), accuracy_before=float(before.accuracy()),
        feasible=feasible, reason=reason,
    )  # fmt: skip


def by_group(
    metric: Metric,
    counts: np.ndarray,
    tolerance: float,
    *,
    names: Sequence[str],
    windows: int = WINDOWS,
    least: float | None = None,
) -> tuple[np.ndarray, bool]:
    """Each group's threshold, as a number of an edge, and whether the tolerance is met.

    `counts` are histograms (label, group, bin), the last group: not recorded. `least`: the share of
    all rows that must be accepted, and the share that must be refused (0: one row); None: any.
    """
    rates, right = _candidates(metric, counts)
    never = np.isnan(rates).all(-1).any(0)
    if never.any():
        lost = ", ".join(np.array(names)[never][:3])
        raise FedgftError(f"thresholds by group for {metric.name}: no row of the event in {lost}")
    limits = None if least is None else Limits.of(counts, least)
    best = _search(rates, right, tolerance, windows, limits)
    if best is not None:
        return best, True
    nearest = _nearest(rates, right, tolerance, windows, limits)
    if nearest is None:  # every threshold there is decides all alike
        nearest = _nearest(rates, right, tolerance, windows, None)
    assert nearest is not None  # a window of 1 holds all rates
    return nearest, False


@dataclass(frozen=True, eq=False)
class Limits:
    """How many rows may be accepted in all, and how many are at each group's thresholds."""

    accepted: np.ndarray  # (g, t)
    low: float
    high: float

    @classmethod
    def of(cls, counts: np.ndarray, least: float) -> "Limits":
        bins = counts[:, :-1].sum(0)  # (g, bin)
        accepted = np.concatenate((bins[:, ::-1].cumsum(-1)[:, ::-1], np.zeros((len(bins), 1))), 1)
        total = bins.sum()
        few = max(1.0, least * total)
        return cls(accepted, few, total - few)

    def within(self, value: np.ndarray) -> np.ndarray | None:
        """The best thresholds that keep the limits: each group's best by itself, or, where those
        break them, with another threshold for one of the groups. `value`: -inf where not allowed.
        """
        best = value.argmax(-1)
        groups = np.arange(len(best))
        own = self.accepted[groups, best]
        if self.low <= own.sum() <= self.high:
            return best
        others = own.sum() - own
        total = others[:, None] + self.accepted
        allowed = np.where((total >= self.low) & (total <= self.high), value, -np.inf)
        loss = value.max(-1) - allowed.max(-1)
        if not np.isfinite(loss).any():
            return None
        moved = int(np.argmin(np.where(np.isfinite(loss), loss, np.inf)))
        best[moved] = allowed[moved].argmax()
        return best


def edges(bins: int) -> np.ndarray:
    """The thresholds that are tried, the last one above every score."""
    return np.append(np.arange(bins) / bins, NOBODY)


def _candidates(metric: Metric, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(v, g, t): the rate at each threshold; (g, t): how many decisions are right."""
    tally = at_thresholds(counts)
    rates = metric.rates(tally.statistics(metric, "hard"))  # (t, v, g)
    right = np.einsum("tygy->gt", tally.decision[:, :, :-1])
    return np.moveaxis(rates, 0, -1), right


def _search(
    rates: np.ndarray,
    right: np.ndarray,
    tolerance: float,
    windows: int,
    limits: Limits | None,
) -> np.ndarray | None:
    """The threshold of each group, by the best window; None where no window holds all groups."""
    best, chosen = -np.inf, None
    for corner in _corners(rates, windows):
        edge = corner[:, None, None]
        inside = ((rates >= edge - 1e-12) & (rates <= edge + tolerance + 1e-12)).all(0)  # (g, t)
        if not inside.any(-1).all():
            continue
        value = np.where(inside, right, -np.inf)
        if value.max(-1).sum() <= best:
            continue
        found = value.argmax(-1) if limits is None else limits.within(value)
        if found is None:
            continue
        total = np.take_along_axis(value, found[:, None], -1).sum()
        if total > best:
            best, chosen = total, found
    return chosen


def _nearest(
    rates: np.ndarray,
    right: np.ndarray,
    tolerance: float,
    windows: int,
    limits: Limits | None,
) -> np.ndarray | None:
    """The thresholds of the smallest gap there is, to a tenth of a point; None: none is allowed."""
    if _search(rates, right, 1.0, windows, limits) is None:
        return None
    low, high, best = tolerance, 1.0, None
    while best is None or high - low > 0.001:
        middle = (low + high) / 2 if best is not None else high
        found = _search(rates, right, middle, windows, limits)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return best


def _corners(rates: np.ndarray, windows: int) -> np.ndarray:
    """Lower edges of windows: all rates there are, or a grid of them for a square."""
    sides = [np.unique(side[~np.isnan(side)]) for side in rates]
    if math.prod(map(len, sides)) > windows:
        grid = np.linspace(0, 1, int(windows ** (1 / len(sides))))
        sides = [np.quantile(side, grid, method="nearest") for side in sides]
    return np.stack(np.meshgrid(*map(np.unique, sides), indexing="ij"), -1).reshape(-1, len(sides))


def _decided(counts: np.ndarray, best: np.ndarray, before: Tally) -> Tally:
    """The tally under these thresholds; rows without a group keep their decisions."""
    yes = np.stack([counts[:, g, t:].sum(-1) for g, t in enumerate(best)], 1)
    total = counts.sum(-1)[:, :-1]
    decision = np.concatenate((np.stack((total - yes, yes), -1), before.decision[:, -1:]), 1)
    return Tally(decision.sum(-1), decision, decision)
