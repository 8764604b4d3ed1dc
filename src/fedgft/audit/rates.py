"""Rates by group, and what they say of each other, each with its interval.

A rate is r = A / B, sums over rows by the metric's definition. Rows with label y and decision c
add e = u_A - r u_B to A - r B, so an error in their count moves r by e / B: that carries noise
(its variance adds up) and withheld counts (their slack adds up) into every interval. Sampling is
Wilson's for decisions; for mean scores the delta method with the same e.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgft.audit.views import View
from fedgft.metrics import Kind, Metric
from fedgft.metrics.intervals import Z95, Limits, difference, folded, ratio, simultaneous, wilson
from fedgft.types import Value

FEW = 10  # rows: with fewer in a group there is a rate, but no interval is claimed for it
CLEAR = 5.0  # a count must be so many standard deviations of its noise to divide by


@dataclass(frozen=True, eq=False)
class Rates:
    """By condition and group, perhaps with leading axes. NaN: no row of the event."""

    rate: np.ndarray
    n: np.ndarray
    error: np.ndarray  # variance of noise, and of sampling where it is not Wilson's
    slack: np.ndarray
    valid: np.ndarray  # an interval can be claimed
    proportion: bool

    def limits(self, z: float = Z95) -> Limits:
        """Without slack, which does not shrink when limits are put together."""
        with np.errstate(divide="ignore", invalid="ignore"):
            extra = z**2 * self.error
            if not self.proportion:
                return self.rate - np.sqrt(extra), self.rate + np.sqrt(extra)
            low, high = wilson(self.rate, self.n, z)
            below = np.sqrt((self.rate - low) ** 2 + extra)
            above = np.sqrt((high - self.rate) ** 2 + extra)
        return self.rate - below, self.rate + above

    def interval(self) -> Limits:
        """Of each rate, for itself; NaN where none is claimed."""
        low, high = self.limits()
        low, high = low - self.slack, high + self.slack
        masked = lambda a: np.where(self.valid, np.clip(a, 0.0, 1.0), np.nan)  # noqa: E731
        return masked(low), masked(high)

    def of(self, condition: int, group: int) -> "Rates":
        return self[..., condition, group]

    def __getitem__(self, at: Any) -> "Rates":
        arrays = (self.rate, self.n, self.error, self.slack, self.valid)
        return Rates(*(np.asarray(array[at]) for array in arrays), proportion=self.proportion)


def rates_of(metric: Metric, seen: View, kind: Kind, *, by_site: bool = False) -> Rates:
    """All groups under all conditions, over all sites or site by site."""
    part = (lambda a: a) if by_site else (lambda a: a.sum(0))
    tally = seen.tally.map(part)
    noise, slack = part(seen.noise)[..., :-1, :], part(seen.slack)[..., :-1, :]
    slope, offset = metric.affine(len(seen.classes))
    unit = slope + offset[..., None]  # (2, v, y, c): what a row with decision c adds
    statistics = tally.statistics(metric, kind)
    above, below = statistics[..., 0, :, :], statistics[..., 1, :, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(below > 0, np.clip(above / below, 0.0, 1.0), np.nan)
        e = unit[0][..., None, :, :] - rate[..., None, None] * unit[1][..., None, :, :]  # v g y c
        error = np.einsum("...vgyc,...ygc->...vg", e**2, noise) / below**2
        off = np.einsum("...vgyc,...ygc->...vg", np.abs(e), slack) / below
    blur = np.sqrt(np.einsum("vyc,...ygc->...vg", unit[1] ** 2, noise))
    valid = (below >= FEW) & (below > CLEAR * blur)
    if kind == "hard":
        return Rates(rate, below, error, off, valid, True)
    # A score may lie anywhere in [0, 1], so noise and slack weigh as at its worst.
    worst = np.abs(e).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.einsum("...vgyc,...ygc->...vg", worst**2 + 0 * e, noise) / below**2
        off = 4 * np.einsum("...vgyc,...ygc->...vg", worst + 0 * e, slack) / below
        error = error + _sampling(metric, seen, rate) / below**2
    return Rates(rate, below, error, off, valid, False)


def _sampling(metric: Metric, seen: View, rate: np.ndarray) -> np.ndarray:
    """Sum of e^2 over rows where e is affine in the scores: their second moments are the bins'."""
    tally, (slope, offset) = seen.tally.sum(), metric.affine(len(seen.classes))
    middles = (np.arange(seen.histogram.shape[-1]) + 0.5) / seen.histogram.shape[-1]
    square = seen.histogram[:, :-1] @ middles**2  # (y, g, s)
    count, first = tally.count[:, :-1], tally.score[:, :-1]
    if len(seen.classes) == 2:
        s1, q1 = first[..., 1], square[..., 0]
        square = np.stack((count - 2 * s1 + q1, q1), -1)
    a = slope[0][:, None] - rate[..., None, None] * slope[1][:, None]  # (v, g, y, c)
    b = offset[0][:, None] - rate[..., None] * offset[1][:, None]  # (v, g, y)
    total = np.einsum("vgyc,ygc->vg", a**2, square) + np.einsum("vgy,yg->vg", b**2, count)
    return total + 2 * np.einsum("vgyc,vgy,ygc->vg", a, b, first)


@dataclass(frozen=True)
class Gap:
    """The largest difference between two groups, and the smallest ratio. None: not estimable.

    `low` and `high` hold for the largest gap itself, however many groups there are to choose from.
    Where a group has too few rows for an interval there is no upper limit; the lower one, made of
    the other groups, still holds.
    """

    gap: float | None
    low: float | None
    high: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    condition: int | None  # where the two groups are farthest apart, and which they are
    pair: tuple[int, int] | None  # the higher rate first


NOTHING = Gap(None, None, None, None, None, None, None, None)


def widest(rates: Rates) -> Gap:
    """Over the groups that have a rate; of a condition, where two of them have one."""
    conditions, groups = rates.rate.shape
    i, j = np.triu_indices(groups, 1)
    r = rates.rate
    apart = r[:, i] - r[:, j]
    if np.isnan(apart).all():
        return NOTHING
    condition, at = np.unravel_index(np.nanargmax(np.abs(apart)), apart.shape)
    pair = (int(i[at]), int(j[at]))
    z = simultaneous(int((~np.isnan(r)).any(0).sum()), conditions)
    low, high = _extremes(folded(*_differences(rates, z)), rates, largest=True)
    ratio_low, ratio_high = _extremes(_ratios(rates, z), rates, largest=False)
    top = np.maximum(r[:, i], r[:, j])
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = np.where(top > 0, np.minimum(r[:, i], r[:, j]) / top, np.nan)
    return Gap(
        gap=float(np.abs(apart[condition, at])), low=low, high=high,
        ratio=None if np.isnan(quotients).all() else float(np.nanmin(quotients)),
        ratio_low=ratio_low, ratio_high=ratio_high, condition=int(condition),
        pair=pair if apart[condition, at] >= 0 else pair[::-1],
    )  # fmt: skip


def _differences(rates: Rates, z: float) -> Limits:
    """Limits of r_i - r_j, (v, pairs); NaN where none is claimed."""
    i, j = np.triu_indices(rates.rate.shape[-1], 1)
    (low, high), r, s = rates.limits(z), rates.rate, rates.slack
    lower, upper = difference(r[:, i], (low[:, i], high[:, i]), r[:, j], (low[:, j], high[:, j]))
    both, slack = rates.valid[:, i] & rates.valid[:, j], s[:, i] + s[:, j]
    return np.where(both, lower - slack, np.nan), np.where(both, upper + slack, np.nan)


def _ratios(rates: Rates, z: float) -> Limits:
    """Limits of the smaller rate over the larger, (v, pairs)."""
    i, j = np.triu_indices(rates.rate.shape[-1], 1)
    low, high = (np.clip(a, 0.0, 1.0) for a in rates.limits(z))
    low, high = np.clip(low - rates.slack, 0, 1), np.clip(high + rates.slack, 0, 1)
    both = rates.valid[:, i] & rates.valid[:, j]
    with np.errstate(divide="ignore", invalid="ignore"):
        r = rates.rate
        lower, upper = ratio(r[:, i], (low[:, i], high[:, i]), r[:, j], (low[:, j], high[:, j]))
        least = np.minimum(lower, 1 / upper)
        most = np.where((lower <= 1) & (upper >= 1), 1.0, np.where(upper < 1, upper, 1 / lower))
    return np.where(both, least, np.nan), np.where(both, most, np.nan)


def _extremes(limits: Limits, rates: Rates, *, largest: bool) -> tuple[float | None, float | None]:
    """Limits of the largest (or smallest) of all, from limits that hold for all at once."""
    low, high = limits
    if np.isnan(low).all():
        return None, None
    ends = [float(np.nanmax(a) if largest else np.nanmin(a)) for a in (low, high)]
    ends = [min(max(end, 0.0), 1.0) for end in ends]
    complete = bool(rates.valid[~np.isnan(rates.rate)].all())
    if largest:  # a group without an interval may be farther off than all others
        return ends[0], ends[1] if complete else None
    return ends[0] if complete else None, ends[1]


def apart(first: Rates, second: Rates, z: float = Z95) -> tuple[Value, Value, Value]:
    """first - second with its own interval, 95% unless z says more; NaN where none is claimed."""
    with np.errstate(invalid="ignore"):
        low, high = difference(first.rate, first.limits(z), second.rate, second.limits(z))
    slack, both = first.slack + second.slack, first.valid & second.valid
    clip = lambda a: np.where(both, np.clip(a, -1.0, 1.0), np.nan)  # noqa: E731
    return first.rate - second.rate, clip(low - slack), clip(high + slack)


def quotient(first: Rates, second: Rates) -> tuple[Value, Value, Value]:
    """first / second with its own 95% interval."""
    both = first.valid & second.valid
    ends = []
    for rates in (first, second):
        low, high = rates.limits()
        ends.append((np.clip(low - rates.slack, 0, 1), np.clip(high + rates.slack, 0, 1)))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = ratio(first.rate, ends[0], second.rate, ends[1])
        value = np.where(second.rate > 0, first.rate / second.rate, np.nan)
    return value, np.where(both, low, np.nan), np.where(both, high, np.nan)
