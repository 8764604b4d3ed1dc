"""Rates by group, and what they say of each other, each with its interval.

A rate is r = A / B, sums over rows by the metric's definition. Three things make it unsure:

- sampling: Wilson's limits for decisions; for mean scores the delta method;
- noise: a row with label y and decision c adds e = u_A - r u_B to A - r B, so noise of variance s^2
  on the count of such rows adds (e s / B)^2 to the variance of r;
- withheld counts, which may be anything between two numbers: A and B - A are taken at their worst,
  and the limits of r are those of the worst r with the fewest rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgft.audit.views import View
from fedgft.metrics import Kind, Metric
from fedgft.metrics.intervals import (
    FEW,
    Z95,
    Limits,
    difference,
    folded,
    ratio,
    simultaneous,
    wilson,
)
from fedgft.types import Value

FEW_EVENTS = 5  # of the larger rate: with fewer, no interval is claimed for a ratio
CLEAR = 5.0  # a count must be so many standard deviations of its noise to divide by


@dataclass(frozen=True, eq=False)
class Rates:
    """By condition and group, perhaps with leading axes. NaN: no row of the event."""

    rate: np.ndarray
    n: np.ndarray
    least: np.ndarray  # of the rate, whatever the withheld counts are
    most: np.ndarray
    fewest: np.ndarray  # rows there are for sure
    error: np.ndarray  # variance of noise, and of sampling where it is not Wilson's
    valid: np.ndarray  # an interval can be claimed
    proportion: bool

    def limits(self, z: float = Z95) -> Limits:
        """Below the least, above the most the rate may be."""
        extra = z**2 * self.error
        with np.errstate(divide="ignore", invalid="ignore"):
            if not self.proportion:
                return self.least - np.sqrt(extra), self.most + np.sqrt(extra)
            low, _ = wilson(self.least, self.fewest, z)
            _, high = wilson(self.most, self.fewest, z)
            below = np.sqrt((self.least - low) ** 2 + extra)
            above = np.sqrt((high - self.most) ** 2 + extra)
        return self.least - below, self.most + above

    def interval(self) -> Limits:
        """Of each rate, for itself; NaN where none is claimed."""
        low, high = (np.where(self.valid, np.clip(a, 0.0, 1.0), np.nan) for a in self.limits())
        return low, high

    def of(self, condition: int, group: int) -> "Rates":
        return self[..., condition, group]

    def __getitem__(self, at: Any) -> "Rates":
        arrays = (self.rate, self.n, self.least, self.most, self.fewest, self.error, self.valid)
        return Rates(*(np.asarray(array[at]) for array in arrays), proportion=self.proportion)


def rates_of(metric: Metric, seen: View, kind: Kind, *, by_site: bool = False) -> Rates:
    """All groups under all conditions, over all sites or site by site."""
    part = (lambda a: a) if by_site else (lambda a: a.sum(0))
    statistics = part(seen.tally.statistics(metric, kind))
    noise, slack = part(seen.noise)[..., :-1, :], part(seen.slack)[..., :-1, :]
    slope, offset = metric.affine(len(seen.classes))
    unit = slope + offset[..., None]  # (2, v, y, c): what a row with decision c adds
    above, below = statistics[..., 0, :, :], statistics[..., 1, :, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(below > 0, np.clip(above / below, 0.0, 1.0), np.nan)
        error = _noise_on(rate, unit, noise, kind) / below**2
    blur = np.sqrt(np.einsum("vyc,...ygc->...vg", unit[1] ** 2, noise))
    if kind == "soft":
        sampling, off = _scores(metric, seen, rate)
        with np.errstate(divide="ignore", invalid="ignore"):
            error, off = error + sampling / below**2, off / below
        valid = (below >= FEW) & (below > CLEAR * blur)
        return Rates(rate, below, rate - off, rate + off, below, error, valid, False)
    hits, rest = (np.einsum("vyc,...ygc->...vg", u, slack) for u in (unit[0], unit[1] - unit[0]))
    least, most, fewest = _extremes_of(above, below, hits, rest, rate)
    valid = (fewest >= FEW) & (fewest > CLEAR * blur)
    return Rates(rate, below, least, most, fewest, error, valid, True)


def _noise_on(rate: np.ndarray, unit: np.ndarray, noise: np.ndarray, kind: Kind) -> np.ndarray:
    """Variance of noise on A - r B: the sum of e^2 times that of each count, e = u0 - r u1."""
    if not noise.any():
        return np.zeros_like(rate)
    if kind == "hard":  # the square, multiplied out: e itself is a table for every group
        parts = (unit[0] ** 2, unit[0] * unit[1], unit[1] ** 2)
        one, both, other = (np.einsum("vyc,...ygc->...vg", part, noise) for part in parts)
        return np.maximum(one - 2 * rate * both + rate**2 * other, 0.0)
    out = np.zeros_like(rate)
    for g, own in enumerate(np.moveaxis(noise, 1, 0).sum(-1)):
        # a score lies anywhere in [0, 1]: noise weighs as at its worst
        worst = np.abs(unit[0] - rate[:, g, None, None] * unit[1]).max(-1)  # (v, y)
        out[:, g] = worst**2 @ own
    return out


def _extremes_of(
    above: np.ndarray, below: np.ndarray, hits: np.ndarray, rest: np.ndarray, rate: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rate at its least and most, if hits and all others may be off by so many; and B."""
    fewest = below - hits - rest
    if not (hits.any() or rest.any()):
        return rate, rate, fewest
    others = below - above
    with np.errstate(divide="ignore", invalid="ignore"):
        least = (above - hits) / (above - hits + others + rest)
        most = (above + hits) / (above + hits + others - rest)
    return np.clip(least, 0.0, 1.0), np.clip(most, 0.0, 1.0), fewest


def _scores(metric: Metric, seen: View, rate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of mean scores: the sum of e^2 over rows, e = a p + b, with every score p in the middle of
    its bin; and how far off A - r B may be where sums of scores are themselves such middles."""
    slope, offset = metric.affine(len(seen.classes))
    width = 1 / seen.histogram.shape[-1]
    middles = (np.arange(seen.histogram.shape[-1]) + 0.5) * width
    counts = np.moveaxis(seen.histogram[:, :-1], 1, 0)  # (g, y, s, bin)
    rows = counts[:, :, 0].sum(-1)
    none, one, two = (np.maximum(counts, 0.0) @ middles**power for power in range(3))  # (g, y, s)
    two = two + none * width**2 / 12  # of a score that lies anywhere in its bin
    unsummed = None if seen.blur is None else np.moveaxis(seen.blur[2, :, :-1], 1, 0).sum(-1)
    total, off = np.zeros_like(rate), np.zeros_like(rate)
    for g in range(len(rows)):  # one at a time: with many classes each is a large table
        a = slope[0] - rate[:, g, None, None] * slope[1]  # (v, y, c)
        b = offset[0] - rate[:, g, None] * offset[1]  # (v, y)
        if len(seen.classes) == 2:  # p0 = 1 - p1
            a, b = a[..., 1:] - a[..., :1], b + a[..., 0]
        each = np.maximum(
            a**2 * two[g] + 2 * a * b[..., None] * one[g] + b[..., None] ** 2 * none[g], 0
        )
        # a row's e depends on one score at most; where on none, it is b
        found = np.where(a != 0, each, 0.0).sum(-1)
        total[:, g] = (found + np.where((a == 0).all(-1), b**2 * rows[g], 0.0)).sum(-1)
        off[:, g] = (np.abs(a).max(-1) * width / 2 * np.abs(rows[g]) * seen.noise.any()).sum(-1)
        if unsummed is not None:  # few rows, of which no sum of scores is told
            off[:, g] += (np.abs(a) * unsummed[g]).sum((-1, -2))
    return total, off


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
    first, second = rates[:, i], rates[:, j]
    distance = first.rate - second.rate
    if np.isnan(distance).all():
        return NOTHING
    condition, at = np.unravel_index(np.nanargmax(np.abs(distance)), distance.shape)
    pair = (int(i[at]), int(j[at]))
    z = simultaneous(int((~np.isnan(rates.rate)).any(0).sum()), conditions)
    complete = bool(rates.valid[~np.isnan(rates.rate)].all())
    low, high = largest(folded(*apart(first, second, z)[1:]), complete=complete)
    quotients, ratio_low, ratio_high = smaller_over_larger(first, second, z)
    ratio_low, ratio_high = smallest(quotients, ratio_low, ratio_high)
    return Gap(
        gap=float(np.abs(distance[condition, at])), low=low, high=high,
        ratio=None if np.isnan(quotients).all() else float(np.nanmin(quotients)),
        ratio_low=ratio_low, ratio_high=ratio_high, condition=int(condition),
        pair=pair if distance[condition, at] >= 0 else pair[::-1],
    )  # fmt: skip


def largest(limits: Limits, *, complete: bool) -> tuple[float | None, float | None]:
    """Of the largest of all, from limits that hold for all at once.

    Not complete: a group without an interval may be farther off than all others.
    """
    low, high = limits
    if np.isnan(low).all():
        return None, None
    return _unit(np.nanmax(low)), _unit(np.nanmax(high)) if complete else None


def smallest(values: Value, low: Value, high: Value) -> tuple[float | None, float | None]:
    """Of the smallest of all; no lower limit where one of them has none."""
    if np.isnan(low).all():
        return None, None
    complete = not np.isnan(low[~np.isnan(values)]).any()
    return _unit(np.nanmin(low)) if complete else None, _unit(np.nanmin(high))


def _unit(value: Any) -> float:
    return min(max(float(value), 0.0), 1.0)


def apart(first: Rates, second: Rates, z: float = Z95) -> tuple[Value, Value, Value]:
    """first - second with its own interval, 95% unless z says more; NaN where none is claimed."""
    p, q, both = first.limits(z), second.limits(z), first.valid & second.valid
    with np.errstate(invalid="ignore"):
        low, _ = difference(first.least, p, second.most, q)
        _, high = difference(first.most, p, second.least, q)
    clip = lambda a: np.where(both, np.clip(a, -1.0, 1.0), np.nan)  # noqa: E731
    return first.rate - second.rate, clip(low), clip(high)


def quotient(first: Rates, second: Rates, z: float = Z95) -> tuple[Value, Value, Value]:
    """first / second likewise; no interval either where the larger rate has very few events."""
    p, q = (tuple(np.clip(a, 0.0, 1.0) for a in rates.limits(z)) for rates in (first, second))
    events = np.maximum(first.least * first.fewest, second.least * second.fewest)
    known = first.valid & second.valid & (events >= FEW_EVENTS)
    with np.errstate(divide="ignore", invalid="ignore"):
        low, _ = ratio(first.least, (p[0], p[1]), second.most, (q[0], q[1]))
        _, high = ratio(first.most, (p[0], p[1]), second.least, (q[0], q[1]))
        value = np.where(second.rate > 0, first.rate / second.rate, np.nan)
    return value, np.where(known, low, np.nan), np.where(known, high, np.nan)


def smaller_over_larger(first: Rates, second: Rates, z: float) -> tuple[Value, Value, Value]:
    """The ratio the four-fifths rule is about; NaN where both rates are 0."""
    value, low, high = quotient(first, second, z)
    with np.errstate(divide="ignore", invalid="ignore"):
        least = np.minimum(low, 1 / high)
        most = np.where((low <= 1) & (high >= 1), 1.0, np.where(high < 1, high, 1 / low))
        top = np.maximum(first.rate, second.rate)
        value = np.where(top > 0, np.minimum(first.rate, second.rate) / top, np.nan)
    return value, np.where(np.isnan(low), np.nan, least), np.where(np.isnan(low), np.nan, most)
