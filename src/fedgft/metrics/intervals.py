"""How sure a gap is: its 95% interval, and the gap that chance alone would show."""

import numpy as np

from fedgft.metrics.metric import Metric
from fedgft.types import Statistics, Value

Z95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution


def wilson(rate: Value, n: Value) -> tuple[Value, Value]:
    """Score interval of a proportion (Wilson 1927); valid for small n and rates at 0 or 1."""
    centre = (rate + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 * np.sqrt(rate * (1 - rate) / n + Z95**2 / (4 * n**2)) / (1 + Z95**2 / n)
    return centre - half, centre + half


def newcombe(first: tuple[Value, Value], second: tuple[Value, Value]) -> tuple[Value, Value]:
    """Interval of a difference of two proportions, each (rate, n) (Newcombe 1998, method 10)."""
    (p, n), (q, m) = first, second
    (low_p, high_p), (low_q, high_q) = wilson(p, n), wilson(q, m)
    below = np.sqrt((p - low_p) ** 2 + (high_q - q) ** 2)
    above = np.sqrt((high_p - p) ** 2 + (q - low_q) ** 2)
    return p - q - below, p - q + above


def gap_interval(metric: Metric, statistics: Statistics) -> tuple[Value, Value]:
    """95% interval of the hard gap between the two groups farthest apart, folded at zero.

    `statistics` are counts, not means, and all rates must be estimable; NaN goes through.
    """
    rates, (high, low) = metric.rates(statistics), _widest(metric, statistics)
    with np.errstate(divide="ignore", invalid="ignore"):
        lower, upper = newcombe(high, low)
    unknown = np.isnan(rates).any((-2, -1))
    lower, upper = np.where(unknown, np.nan, lower), np.where(unknown, np.nan, upper)
    return np.maximum(lower, 0.0), np.maximum(upper, -lower)


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


def _widest(metric: Metric, statistics: Statistics) -> list[tuple[Value, Value]]:
    """(rate, number of rows) of the two groups whose rates lie farthest apart."""
    statistics = np.asarray(statistics, dtype=float)
    condition, high, low = metric.worst(np.where(np.isnan(statistics), 0.0, statistics))
    rows = np.take_along_axis(statistics, condition[..., None, None, None], axis=-2)[..., 0, :]
    out = []
    for group in (high, low):
        picked = np.take_along_axis(rows, group[..., None, None], axis=-1)[..., 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            out.append((picked[..., 0] / picked[..., 1], picked[..., 1]))
    return out
