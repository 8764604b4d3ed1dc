"""95% intervals of rates, gaps and ratios, and the gap that chance alone would produce.

A rate r has limits l <= r <= u. The limits of a difference or ratio of two rates are computed from
the limits of the rates ("method of variance estimates recovery": Newcombe 1998 for differences,
Donner & Zou 2012 for ratios). Anything that widens the limits of a rate, such as noise added for
privacy, therefore also widens the limits of the difference or ratio.

The largest of many gaps is selected by its size, so its interval is built from intervals that hold
for all pairs at once: Tukey's range for the groups, Sidak's level for the conditions. With two
groups and one condition it equals Newcombe's interval.
"""

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

from fedgft.metrics.metric import Metric, Statistics, Value

Z95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution
FEW = 10  # a group with fewer rows gets a rate, but no interval
Interval = tuple[Value, Value]
"The lower and the upper limit."


def wilson(rate: Value, n: Value, z: float = Z95) -> Interval:
    """Return the score interval of a proportion (Wilson 1927): `rate` of `n` rows.

    (r + z^2/2n -+ z sqrt(r (1 - r)/n + z^2/4n^2)) / (1 + z^2/n); it is valid for small n and for
    rates at 0 or 1.
    """
    center = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * np.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return center - half, center + half


def difference(
    p: Value, p_limits: Interval, q: Value, q_limits: Interval, *, correlation: Any = 0.0
) -> Interval:
    """Return limits of p - q from those of p and q (with Wilson's: Newcombe 1998, method 10).

    If p and q are correlated, so are their errors (Zou 2008).
    """

    def length(one: Any, other: Any) -> Any:
        squares = one**2 + other**2
        return np.sqrt(np.maximum(squares - 2 * correlation * one * other, 0.0))

    below = length(p - p_limits[0], q_limits[1] - q)
    above = length(p_limits[1] - p, q - q_limits[0])
    return p - q - below, p - q + above


def ratio(
    p: Value, p_limits: Interval, q: Value, q_limits: Interval, *, correlation: Any = 0.0
) -> Interval:
    """Return limits of p / q from those of p and q, which may be correlated (Donner & Zou 2012).

    The upper limit is infinite where q may be 0. The lower root is written so that nothing is
    divided by u_q (2q - u_q), which is 0 or less for rare events.
    """

    def root(a: Any, b: Any) -> Any:
        return np.sqrt(np.maximum(product**2 - a * b, 0.0))

    product = p * q - correlation * (p - p_limits[0]) * (q_limits[1] - q)
    mine = p_limits[0] * (2 * p - p_limits[0])
    other = q_limits[1] * (2 * q - q_limits[1])
    below = product + root(mine, other)
    lower = np.where(below > 0, np.maximum(mine, 0.0) / np.where(below > 0, below, 1.0), 0.0)
    product = p * q - correlation * (p_limits[1] - p) * (q - q_limits[0])
    mine = p_limits[1] * (2 * p - p_limits[1])
    other = q_limits[0] * (2 * q - q_limits[0])
    safe = np.where(other > 0, other, 1.0)
    return lower, np.where(other > 0, (product + root(mine, other)) / safe, np.inf)


def newcombe(first: tuple[Value, Value], second: tuple[Value, Value], z: float = Z95) -> Interval:
    """Return the interval of a difference of two proportions, each given as (rate, n)."""
    return difference(first[0], wilson(*first, z), second[0], wilson(*second, z))


@lru_cache
def simultaneous(groups: int, conditions: int = 1) -> float:
    """Return the z for which the intervals of all pairs of groups hold at once with 95%.

    It is q / sqrt(2), where q is the 95% quantile of the studentized range of g normal rates
    (Tukey); with two groups it is 1.96. For groups of unequal size it is conservative (Hayter
    1984). Several conditions share the error probability (Sidak).
    """
    level = 0.95 ** (1 / max(conditions, 1))
    if groups <= 2:
        return NormalDist().inv_cdf((1 + level) / 2)
    from scipy.stats import studentized_range  # here: it takes as long to load as all of fedgft

    return float(studentized_range.ppf(level, groups, math.inf)) / math.sqrt(2)


def folded(low: Value, high: Value) -> Interval:
    """Return limits of |d| from those of d."""
    return np.maximum(np.maximum(low, -high), 0.0), np.maximum(high, -low)


def effective_counts(statistics: Statistics, squares: Statistics) -> Statistics:
    """Return weighted statistics with the numbers of equally weighted rows that say as much.

    A rate of n rows with weights w has the variance of a rate of (sum w)^2 / sum w^2 rows that all
    count the same (Kish 1965), if weights and outcomes are independent. Rates stay as they are.

    Parameters
    ----------
    statistics, squares
        (..., 2, v, g): the sums of weights, and of their squares.
    """
    mass = statistics[..., 1:, :, :]
    total = squares[..., 1:, :, :]
    return statistics * np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)


def gap_interval(metric: Metric, statistics: Statistics, *, fewest: int = 0) -> Interval:
    """Return the 95% interval of the largest hard gap between two groups, under any condition.

    Parameters
    ----------
    metric
        The metric.
    statistics
        (..., 2, v, g): counts, not means. Where a rate is not estimable, the limits are NaN; so are
        those of a gap within strata, and of groups that were randomized.
    fewest
        The limits are NaN where a group has fewer rows than this under any condition.
    """
    statistics = np.asarray(statistics, dtype=float)
    rates = metric.rates(statistics)
    rows = statistics[..., 1, :, :]
    if not metric.has_interval:
        unknown = np.full(rates.shape[:-2], np.nan)
        return unknown, unknown
    conditions, groups = rates.shape[-2:]
    i, j = np.triu_indices(groups, 1)
    z = simultaneous(groups, conditions)
    with np.errstate(divide="ignore", invalid="ignore"):
        lower, upper = newcombe((rates[..., i], rows[..., i]), (rates[..., j], rows[..., j]), z)
    enough = (rows >= fewest).all((-2, -1))
    low, high = (end.max((-2, -1)) for end in folded(lower, upper))
    return np.where(enough, low, np.nan), np.where(enough, high, np.nan)


def floor(metric: Metric, statistics: Statistics) -> Value:
    """Return the noise floor: E[gap] of a perfectly fair model on the same number of rows.

    `statistics` (..., 2, v, g) are counts.
    The rate of each group is approximately normal around the common rate r, with variance
    r (1 - r) / n_g. With two groups, the mean gap is then sqrt(2 / pi) = 0.8 standard errors. With
    more groups or several conditions (assumed to be independent) the mean gap is larger; it is
    computed over a fixed set of draws, with an error of about 1%.
    """
    statistics = np.asarray(statistics, dtype=float)
    if metric.is_estimate:  # its noise is that of the randomized response, above all
        return np.full(statistics.shape[:-3], np.nan)
    pooled = metric.rates(statistics.sum(-1, keepdims=True))
    rows = np.where(statistics[..., 1, :, :] > 0, statistics[..., 1, :, :], np.nan)
    error = np.sqrt(pooled * (1 - pooled) / rows)
    *runs, conditions, groups = error.shape
    if (conditions, groups) == (1, 2):
        return np.sqrt(2 / np.pi * (error**2).sum((-2, -1)))
    draws = np.random.default_rng(0).standard_normal((5000, conditions, groups))
    errors = error.reshape(-1, *draws.shape[1:])
    if metric.columns:
        mass = np.nan_to_num(rows).reshape(errors.shape)
        each = [metric.gap(draws * e, n).mean() for e, n in zip(errors, mass, strict=True)]
    else:
        each = [np.ptp(draws * e, axis=-1).max(-1).mean() for e in errors]
    return np.reshape(each, runs)
