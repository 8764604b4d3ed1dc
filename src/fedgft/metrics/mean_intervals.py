"""95% intervals of differences, ratios and standardized differences of means.

The groups may have different variances. Each mean m has a squared standard error v and a number of
degrees of freedom; a difference of two means has those of Welch (1947) and Satterthwaite (1946).
The largest of many differences is selected by its size, so its limits are those of all pairs at
once: Games & Howell (1976), Tukey's studentized range with Welch's degrees of freedom. With two
groups these are Welch's limits.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

# Degrees of freedom at which the studentized range is computed, which is slow. Between two of them
# it is interpolated in 1 / df. It is convex, so limits get too wide: less than 0.2% from df 8 on.
NODES = (1, 2, 4, 6, 8, 10, 13, 17, 22, 30, 45, 90, 300, np.inf)


class Mean(NamedTuple):
    """Means of groups, as numbers or arrays.

    Parameters
    ----------
    value
        The mean.
    error
        Its squared standard error; NaN if there are too few rows for one.
    df
        The degrees of freedom of the squared error.
    variance
        The variance between rows.
    """

    value: Any
    error: Any
    df: Any
    variance: Any

    def __getitem__(self, index: Any) -> "Mean":  # type: ignore[override]
        """Apply the same index to every array."""
        return Mean(*(np.asarray(part)[index] for part in tuple(self)))


class Limits(NamedTuple):
    """Numbers or arrays with their 95% intervals; NaN where there is none."""

    value: Any
    low: Any
    high: Any


@np.errstate(divide="ignore", invalid="ignore")
def welch_df(a: Mean, b: Mean) -> Any:
    """Return the degrees of freedom of a difference (Welch-Satterthwaite); infinite if constant."""
    total = np.asarray(a.error + b.error)
    parts = (a.error / total) ** 2 / a.df + (b.error / total) ** 2 / b.df
    return np.where(total > 0, 1 / parts, np.where(total == 0, np.inf, np.nan))


def critical_value(df: Any, groups: int = 2) -> Any:
    """Return the multiple of a standard error in an interval of all differences at once.

    With two groups it is a quantile of Student's t, otherwise one of the studentized range, divided
    by sqrt(2).

    Parameters
    ----------
    df
        The degrees of freedom; NaN where there is no interval.
    groups
        The number of groups whose pairs are compared at once.
    """
    if groups <= 2:
        from scipy.stats import t  # here: slow to load

        return t.ppf(0.975, df)
    with np.errstate(divide="ignore"):
        inverse = 1 / np.asarray(df, dtype=float)
    nodes = 1 / np.array(NODES[::-1])
    return np.where(inverse <= 1, np.interp(inverse, nodes, _range_quantiles(groups)), np.nan)


@lru_cache
def _range_quantiles(groups: int) -> np.ndarray:
    """Return the quantiles of the studentized range, divided by sqrt(2), from df infinite to 1."""
    from scipy.stats import studentized_range

    found = [float(studentized_range.ppf(0.95, groups, df)) for df in NODES[::-1]]
    return np.array(found) / np.sqrt(2)


def mean_limits(a: Mean) -> Limits:
    """Return means with their limits, by Student's t."""
    half = critical_value(a.df) * np.sqrt(a.error)
    return Limits(a.value, a.value - half, a.value + half)


def difference_limits(a: Mean, b: Mean, groups: int = 2) -> Limits:
    """Return a - b with its limits: Welch's, or those of Games and Howell for several groups.

    Parameters
    ----------
    a, b
        The means.
    groups
        The number of groups whose pairs are compared at once.
    """
    half = critical_value(welch_df(a, b), groups) * np.sqrt(a.error + b.error)
    value = a.value - b.value
    return Limits(value, value - half, value + half)


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def ratio_limits(a: Mean, b: Mean, groups: int = 2) -> Limits:
    """Return a / b of positive means, with limits on the logarithmic scale (delta method).

    It is NaN unless both means are positive.
    """
    positive = (np.asarray(a.value) > 0) & (np.asarray(b.value) > 0)

    def log(x: Mean) -> Mean:
        value = np.where(positive, x.value, np.nan)
        return Mean(np.log(value), x.error / value**2, x.df, x.variance)

    return Limits(*(np.exp(part) for part in difference_limits(log(a), log(b), groups)))


@np.errstate(divide="ignore", invalid="ignore")
def standardized_difference(a: Mean, b: Mean, groups: int = 2) -> Limits:
    """Return (a - b) / s with s^2 the mean of the two variances, and its limits.

    Bonett (2008): the variance is (v_a + v_b) / s^2 + d^2 (s_a^4 / df_a + s_b^4 / df_b) / (8 s^4).
    The second term assumes that values are roughly normal.
    """
    square = np.asarray((a.variance + b.variance) / 2)
    square = np.where(square > 0, square, np.nan)
    d = (a.value - b.value) / np.sqrt(square)
    about = (a.variance / square) ** 2 / a.df + (b.variance / square) ** 2 / b.df
    variance = (a.error + b.error) / square + d**2 * about / 8
    half = critical_value(np.inf, groups) * np.sqrt(variance)
    return Limits(d, d - half, d + half)


def weighted_mean(values: np.ndarray, errors: np.ndarray, weights: np.ndarray) -> Limits:
    """Return the weighted mean of independent estimates, with limits by the normal distribution.

    Parameters
    ----------
    values, errors, weights
        The estimates, their squared standard errors and their weights.
    """
    if not weights.sum() > 0:
        return Limits(np.nan, np.nan, np.nan)
    shares = weights / weights.sum()
    value = shares @ values
    half = critical_value(np.inf) * np.sqrt(shares**2 @ errors)
    return Limits(value, value - half, value + half)


def fold_limits(found: Limits) -> Limits:
    """Return |d| and its limits from those of d."""
    low = np.maximum(np.maximum(found.low, -found.high), 0.0)
    return Limits(np.abs(found.value), low, np.maximum(found.high, -found.low))
