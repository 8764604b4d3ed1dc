"""How sure a rate, a gap or a ratio is: 95% intervals, and the gap that chance alone would show.

A rate has limits l <= r <= u. What is made of two rates gets its own from theirs ("method of
variance estimates recovery": Newcombe 1998 for differences, Donner & Zou 2012 for ratios), so
whatever widens the limits of a rate, such as noise added for privacy, reaches everything.

The largest of many gaps is chosen by its size, so its interval is made of intervals that hold for
all pairs at once: Tukey's range for the groups, Sidak's level for the conditions. With two groups
and one condition it is Newcombe's own.
"""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from fedgft.metrics.metric import Metric
from fedgft.types import Statistics, Value

Z95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution
FEW = 10  # rows: with fewer in a group there is a rate, but no interval is claimed for it
Limits = tuple[Value, Value]


def wilson(rate: Value, n: Value, z: float = Z95) -> Limits:
    """Score interval of a proportion (Wilson 1927); valid for small n and rates at 0 or 1."""
    centre = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return centre - half, centre + half


def difference(p: Value, p_limits: Limits, q: Value, q_limits: Limits) -> Limits:
    """Limits of p - q from those of either (Newcombe 1998, method 10, where they are Wilson's)."""
    below = np.sqrt((p - p_limits[0]) ** 2 + (q_limits[1] - q) ** 2)
    above = np.sqrt((p_limits[1] - p) ** 2 + (q - q_limits[0]) ** 2)
    return p - q - below, p - q + above


def ratio(p: Value, p_limits: Limits, q: Value, q_limits: Limits) -> Limits:
    """Limits of p / q from those of either (Donner & Zou 2012); no upper one where q may be 0.

    The lower root is written so that nothing is divided by u_q (2q - u_q), which is 0 or less for
    rare events.
    """
    product = p * q
    root = lambda a, b: np.sqrt(np.maximum(product**2 - a * b, 0.0))  # noqa: E731
    mine, other = p_limits[0] * (2 * p - p_limits[0]), q_limits[1] * (2 * q - q_limits[1])
    below = product + root(mine, other)
    lower = np.where(below > 0, np.maximum(mine, 0.0) / np.where(below > 0, below, 1.0), 0.0)
    mine, other = p_limits[1] * (2 * p - p_limits[1]), q_limits[0] * (2 * q - q_limits[0])
    safe = np.where(other > 0, other, 1.0)
    return lower, np.where(other > 0, (product + root(mine, other)) / safe, np.inf)


def newcombe(first: tuple[Value, Value], second: tuple[Value, Value], z: float = Z95) -> Limits:
    """Interval of a difference of two proportions, each (rate, n)."""
    return difference(first[0], wilson(*first, z), second[0], wilson(*second, z))


@lru_cache
def simultaneous(groups: int, conditions: int = 1) -> float:
    """The z with which the intervals of all pairs of groups hold at once, 19 times in 20.

    Of g independent normal rates the range is at most q with probability
    g * integral of phi(x) (Phi(x) - Phi(x - q))^(g-1) dx (Tukey; with unequal sizes of the groups
    it is on the safe side, Hayter 1984); z = q / sqrt(2). 1.96 with two groups.
    """
    level = 0.95 ** (1 / max(conditions, 1))
    if groups <= 2:
        return NormalDist().inv_cdf((1 + level) / 2)
    x = np.linspace(-8.0, 8.0, 2001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    phi = np.vectorize(NormalDist().cdf)
    at = phi(x)
    low, high = 0.0, 20.0
    for _ in range(50):
        q = (low + high) / 2
        inside = groups * (density * (at - phi(x - q)) ** (groups - 1)).sum()
        low, high = (q, high) if inside < level else (low, q)
    return high / math.sqrt(2)


def folded(low: Value, high: Value) -> Limits:
    """Limits of |d| from those of d."""
    return np.maximum(np.maximum(low, -high), 0.0), np.maximum(high, -low)


def gap_interval(metric: Metric, statistics: Statistics, *, fewest: int = 0) -> Limits:
    """95% interval of the largest hard gap between two groups, under any condition.

    `statistics` are counts, not means, and all rates must be estimable; NaN goes through. NaN, too,
    where a group has fewer than `fewest` rows under some condition.
    """
    statistics = np.asarray(statistics, dtype=float)
    rates, rows = metric.rates(statistics), statistics[..., 1, :, :]
    conditions, groups = rates.shape[-2:]
    i, j = np.triu_indices(groups, 1)
    z = simultaneous(groups, conditions)
    with np.errstate(divide="ignore", invalid="ignore"):
        lower, upper = newcombe((rates[..., i], rows[..., i]), (rates[..., j], rows[..., j]), z)
    low, high = folded(lower, upper)
    enough = (rows >= fewest).all((-2, -1))
    return (
        np.where(enough, low.max((-2, -1)), np.nan),
        np.where(enough, high.max((-2, -1)), np.nan),
    )


def floor(metric: Metric, statistics: Statistics) -> Value:
    """E[gap] of a model that is perfectly fair, on as many rows as these.

    The rate of each group is about normal around the rate r they share, with variance
    r (1 - r) / n_g. Of two groups, the gap is then sqrt(2 / pi) = 0.8 standard errors on
    average; more groups, or several conditions (taken as independent), have more chances to
    differ, and the mean is one over a fixed set of draws, right to about 1%.
    """
    statistics = np.asarray(statistics, dtype=float)
    pooled = metric.rates(statistics.sum(-1, keepdims=True))
    rows = np.where(statistics[..., 1, :, :] > 0, statistics[..., 1, :, :], np.nan)
    error = np.sqrt(pooled * (1 - pooled) / rows)
    *runs, conditions, groups = error.shape
    if (conditions, groups) == (1, 2):
        return np.sqrt(2 / np.pi * (error**2).sum((-2, -1)))
    draws = np.random.default_rng(0).standard_normal((5000, conditions, groups))
    each = [np.ptp(draws * e, axis=-1).max(-1).mean() for e in error.reshape(-1, *draws.shape[1:])]
    return np.reshape(each, runs)
