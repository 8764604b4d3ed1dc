"""What to expect at a site that did not take part: a prediction interval from the sites' sums.

Model: site k has the true gap d_k = mu + e_k, where the e_k vary with standard deviation tau, and
the audit observes y_k = d_k + noise of known variance v_k (sampling, and noise for privacy). Sites
are the sample: a large site says no more about another site than a small one whose gap is as
precisely known. The prediction interval contains the true gap d of one more site of the same kind;
the sampling error of the rows at that site is not part of it.

The usual interval, mu +- t sqrt(tau^2 + se^2) with K - 2 degrees of freedom (Higgins, Thompson &
Spiegelhalter 2009; Partlett & Riley 2017), inserts an estimate of tau and contained as few as 86%
of the sites in our simulations, with 10 or 20 sites of different sizes. As in Nagashima, Noma &
Furukawa (2019), tau therefore has a distribution here. Theirs is drawn by a bootstrap; this one
needs no draws. The generalized Q statistic

    Q(tau^2) = sum_k w_k (y_k - m)^2,    w_k = 1 / (v_k + tau^2),    m = sum w_k y_k / sum w_k

has a chi-squared distribution with K - 1 degrees of freedom at the true tau (Viechtbauer 2007,
whose interval of tau is `spread_low` to `spread_high`), and is independent of m. So each quantile c
of that distribution gives a tau_c with Q(tau_c^2) = c (0 if even Q(0) < c), and the true gap at the
next site is distributed as the mixture, over c, of normal distributions with the mean m(tau_c) and
the variance tau_c^2 + 1 / sum w_k(tau_c). Its quantiles are the limits. If all v_k are 0, they are
those of the t interval with K - 1 degrees of freedom, y +- t s sqrt(1 + 1/K).

From 5 sites on, one degree of freedom is given up, as in the usual interval: c is that of a
chi-squared distribution with K - 2 degrees of freedom, times (K - 1) / (K - 2). This makes the
interval 15% wider for 5 sites and 2% for 10. It then contains about 93% or more of sites whose gaps
have heavy tails (Student's t with 3 degrees of freedom) instead of 92.5%. The interval is
conservative if the sites do not differ at all.

The distribution-free limits assume only that the sites and the next one are exchangeable: with r
the largest integer up to (K + 1) 0.025, the r-th smallest and the r-th largest value of the sites
contain the next value with 95% (Vovk, Gammerman & Shafer 2005; Wilks 1941). They are about the
*observed* gap at a site of a similar size: the values of the sites include sampling error. They
need 39 sites, or 19 for a single limit.

`benchmarks/coverage/next_site.py` measures how often these intervals contain the truth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np

from fedgft.auditing.between_sites import MetricEstimate
from fedgft.auditing.rates import Rates, View, estimate_rates
from fedgft.auditing.worst_mix import WorstMixSummary, find_worst_mix
from fedgft.metrics.intervals import FEW, Z95

MIN_SITES = 3  # with two sites, the spread between sites has one degree of freedom
HEAVY_TAILS_FROM = 5  # sites from which on one degree of freedom is given up
TWO_SIDED = 39  # sites that a distribution-free interval needs
ONE_SIDED = 19  # sites that a single distribution-free limit needs
QUANTILES = (np.arange(400) + 0.5) / 400  # of the distribution of Q, at which tau is computed
STEPS = 60  # of a bisection
MAX_CELLS = 1_000_000  # (quantile, site) combinations at a time, which bounds the memory
DEFAULT_CHANGE = 0.2  # of a site's share of the rows, in the worst mix
Number = float | None


class Prediction(NamedTuple):
    """The distribution of a value over sites, and its 95% limits at one more site.

    `mean` is the mean over sites (each site counts once, up to its precision), with 95% limits;
    `low` and `high` are the limits of the true value at a site that did not take part; `spread` is
    the standard deviation tau of the true values (Paule & Mandel 1982), with 95% limits.
    """

    mean: float
    mean_low: float
    mean_high: float
    low: float
    high: float
    spread: float
    spread_low: float
    spread_high: float


def predict_next_site(
    values: np.ndarray, variances: np.ndarray, *, own_variance: float = 0.0
) -> Prediction:
    """Predict the value at a site that did not take part.

    Parameters
    ----------
    values
        (site,): the values of at least `MIN_SITES` sites, such as signed gaps.
    variances
        (site,): the sampling variances of the values.
    own_variance
        The sampling variance of the value at the next site. With 0, the limits are those of its
        true value; with that of a site of n rows, those of the value that n rows would show.
    """
    from scipy.special import chdtri, ndtr  # here: an audit of one site does not need it

    y = np.asarray(values, dtype=float)
    v = np.maximum(np.asarray(variances, dtype=float), 1e-12)
    free = len(y) - 1
    fewer = free - (len(y) >= HEAVY_TAILS_FROM)
    # `chdtri` takes upper tails: the quantiles of Q, those of its 95% interval, and its mean
    quantiles = chdtri(fewer, QUANTILES) * free / fewer
    targets = np.concatenate((quantiles, chdtri(free, [0.975, 0.025]), [free]))
    squares, means, errors = _solve_spread(y, v, targets)
    *_, spread_high, spread_low, spread = np.sqrt(squares)
    count = len(QUANTILES)

    def quantile(level: float, variance: np.ndarray) -> float:
        deviation = np.sqrt(variance[:count])
        low = float((means[:count] - 12 * deviation).min())
        high = float((means[:count] + 12 * deviation).max())
        for _ in range(STEPS):
            middle = (low + high) / 2
            below = ndtr((middle - means[:count]) / deviation).mean() < level
            low, high = (middle, high) if below else (low, middle)
        return (low + high) / 2

    total = squares + errors + own_variance
    return Prediction(
        mean=float(means[-1]),
        mean_low=quantile(0.025, errors),
        mean_high=quantile(0.975, errors),
        low=quantile(0.025, total),
        high=quantile(0.975, total),
        spread=float(spread),
        spread_low=float(spread_low),
        spread_high=float(spread_high),
    )


def _solve_spread(
    y: np.ndarray, v: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Solve Q(tau^2) = target for each target.

    Newton's method on 1 / Q, which is linear in tau^2 if the variances are equal, and concave
    otherwise: from tau^2 = 0 it never passes the solution.

    Returns
    -------
    (target,) each: tau^2 (0 if Q(0) is below the target), the weighted mean, and its variance.
    """
    parts = []
    size = max(1, MAX_CELLS // len(y))
    for start in range(0, len(targets), size):
        target = targets[start : start + size]
        square = np.zeros(len(target))
        for _ in range(STEPS):
            weight = 1 / (v + square[:, None])
            total = weight.sum(-1)
            mean = weight @ y / total
            part = weight * (y - mean[:, None]) ** 2
            q = part.sum(-1)
            slope = np.maximum((weight * part).sum(-1), 1e-300)
            step = np.maximum((q**2 / target - q) / slope, -square)
            square = square + np.where(q > 0, step, 0.0)
            if np.all(np.abs(step) <= 1e-12 * square + 1e-18):
                break
        weight = 1 / (v + square[:, None])
        total = weight.sum(-1)
        parts.append((square, weight @ y / total, 1 / total))
    square, mean, error = (np.concatenate(column) for column in zip(*parts, strict=True))
    return square, mean, error


def bound_next_value(values: np.ndarray) -> tuple[float, float] | None:
    """Return distribution-free 95% limits of the next of exchangeable values.

    None if there are fewer than `TWO_SIDED` values.
    """
    rank = math.floor((len(values) + 1) * 0.025 + 1e-9)
    if rank < 1:
        return None
    ordered = np.sort(values)
    return float(ordered[rank - 1]), float(ordered[-rank])


def limit_next_value(values: np.ndarray) -> float | None:
    """Return the distribution-free upper 95% limit of the next of exchangeable values.

    None if there are fewer than `ONE_SIDED` values.
    """
    rank = math.floor((len(values) + 1) * 0.05 + 1e-9)
    return float(np.sort(values)[-rank]) if rank >= 1 else None


def estimate_variances(low: Any, high: Any, width: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return variances from 95% limits, and where withheld counts leave too much open.

    The variance (high - low)^2 / 4 z^2 is never 0, and whatever widens the limits is part of it:
    noise for privacy, weights, randomized groups, withheld counts.

    Parameters
    ----------
    low, high
        The limits of values.
    width
        How far withheld counts may move the values: the limits are wider by this. It is too much
        if it is more than a standard error of what remains.
    """
    error = (np.asarray(high) - low) / (2 * Z95)
    return error**2, width > error - np.asarray(width) / (2 * Z95)


class Forecast(TypedDict):
    """What to expect of one value at a site that did not take part: see `Prediction`.

    `sites` is the number of sites that the numbers are based on, and `left_out` the number of
    others, which have fewer than 10 rows of a group, or withhold counts that matter. `reason` says
    why the numbers are None, or is "". `observed_low` and `observed_high` are the distribution-free
    limits of the value that a site of a similar size would observe (None with fewer than 39
    sites). `observed_limit` is a single such limit (None with fewer than 19 sites): the largest gap
    between any two groups is at most this, or the accuracy is at least this.
    """

    sites: int
    left_out: int
    reason: str
    mean: Number
    mean_low: Number
    mean_high: Number
    low: Number
    high: Number
    spread: Number
    spread_low: Number
    spread_high: Number
    observed_low: Number
    observed_high: Number
    observed_limit: Number


class NextSiteSummary(TypedDict):
    """What to expect elsewhere: gaps by metric, accuracy, and the worst mix of today's sites.

    The gaps are those between the two groups of the metric's `pair`, under its `condition`. They
    are signed: the first group minus the second. `largest_change` is the largest change of a site's
    share of the rows in the worst mix, as a fraction of the share.
    """

    gaps: dict[str, Forecast]
    accuracy: Forecast
    worst_mix: dict[str, WorstMixSummary | None]
    largest_change: float


def summarize_next_site(
    view: View,
    estimates: Mapping[str, MetricEstimate],
    accuracy: Rates,
    sites: Sequence[str],
    *,
    largest_change: float = DEFAULT_CHANGE,
) -> NextSiteSummary:
    """Return what to expect at a site that did not take part, and of the worst mix of sites.

    Parameters
    ----------
    view, estimates
        The groups, and the estimates by metric.
    accuracy
        (site,): the rates of right decisions at the sites.
    sites
        The names of the sites.
    largest_change
        The largest change of a site's share of the rows in the worst mix.
    """
    return {
        "gaps": {name: _forecast_gap(each) for name, each in estimates.items()},
        "accuracy": _forecast_accuracy(accuracy),
        "worst_mix": {
            name: find_worst_mix(each.metric, view, sites, largest_change=largest_change)
            for name, each in estimates.items()
        },
        "largest_change": largest_change,
    }


def _forecast_gap(estimate: MetricEstimate) -> Forecast:
    """Return the forecast of the signed gap between the two groups of a metric."""
    gap = estimate.gap
    sites = len(estimate.view.sums.count)
    if gap.pair is None or gap.condition is None:
        nothing = np.empty(0)
        found = _make_forecast(nothing, nothing, sites)
        found["reason"] = "no two groups have a rate"
        return found
    rates = estimate_rates(estimate.metric, estimate.view, "hard", by_site=True)
    pair = rates[:, gap.condition, list(gap.pair)]
    local = estimate.sites.local
    width = (pair.rate_max - pair.rate_min).sum(-1)
    variances, unclear = estimate_variances(local.low, local.high, width)
    known = pair.valid.all(-1) & ~unclear
    found = _make_forecast(np.asarray(local.value)[known], variances[known], sites)
    largest = np.asarray(estimate.sites.largest.value)[known]
    found["observed_limit"] = limit_next_value(largest[~np.isnan(largest)])
    return _clip(found, -1.0)


def _forecast_accuracy(rates: Rates) -> Forecast:
    """Return the forecast of the accuracy."""
    width = rates.rate_max - rates.rate_min
    variances, unclear = estimate_variances(*rates.limits(), width)
    known = rates.valid & ~unclear
    found = _make_forecast(rates.rate[known], variances[known], len(known))
    limit = limit_next_value(-rates.rate[known])
    found["observed_limit"] = None if limit is None else -limit
    return _clip(found, 0.0)


def _make_forecast(values: np.ndarray, variances: np.ndarray, sites: int) -> Forecast:
    """Return the forecast from the values of those of `sites` sites that have one."""
    known = len(values)
    numbers: dict[str, Any] = dict.fromkeys(Prediction._fields)
    reason = ""
    if known >= MIN_SITES:
        numbers = predict_next_site(values, variances)._asdict()
    elif sites < MIN_SITES:
        reason = f"needs {MIN_SITES} sites, there {'is' if sites == 1 else 'are'} {sites}"
    else:
        reason = f"needs {MIN_SITES} sites with at least {FEW} rows of each group and exact enough "
        reason += f"counts, there {'is' if known == 1 else 'are'} {known} of {sites}"
    low, high = bound_next_value(values) or (None, None)
    found = {"sites": known, "left_out": sites - known, "reason": reason, **numbers}
    observed = {"observed_low": low, "observed_high": high, "observed_limit": None}
    return cast("Forecast", found | observed)


def _clip(found: Forecast, least: float) -> Forecast:
    """Return the forecast with the limits of its values clipped to `least` and 1."""
    names = ("mean_low", "mean_high", "low", "high")
    known: dict[str, Any] = {name: found[name] for name in names if found[name] is not None}
    return cast("Forecast", found | {n: min(max(x, least), 1.0) for n, x in known.items()})


@dataclass(frozen=True)
class NextSite:
    """What to expect at a site that did not take part, and of other mixes of today's sites.

    Parameters
    ----------
    gaps
        The forecast of the signed gap by the short name of the metric: see `Forecast`.
    accuracy
        The forecast of the accuracy.
    worst_mix
        The worst mix of today's sites by the short name of the metric; None if no two groups have
        a rate: see `fedgft.auditing.worst_mix.WorstMixSummary`.
    largest_change
        The largest change of a site's share of the rows in the worst mix.
    """

    gaps: Mapping[str, Forecast]
    accuracy: Forecast
    worst_mix: Mapping[str, WorstMixSummary | None]
    largest_change: float
