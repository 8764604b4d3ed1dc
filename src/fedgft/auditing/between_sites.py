"""Compare each site with all sites together: what each adds to a gap, and what one site cannot see.

This module also computes bootstrap intervals over sites. Newcombe's intervals treat the sites as
fixed and the rows as a sample. If the audited sites represent many other sites, the sites are the
sample: the bootstrap draws sites with replacement and keeps all rows of each drawn site.

The limits of a rate are percentiles over the draws. The largest gap is never negative, so its
percentiles would always indicate a gap. Its limits are computed from the signed differences d of
all pairs of groups instead: d +- q s, where s is the standard deviation of the difference over the
draws, and q is the 95th percentile, over the draws, of the largest |d* - d| / s of any pair, where
d* is the difference in a draw. These limits hold for all pairs simultaneously. The limits of ratios
are computed in the same way from the logarithms of the rates.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from fedgft.auditing.rates import (
    MIN_SIGNAL,
    Estimate,
    LargestGap,
    Pool,
    Rates,
    View,
    bound_largest,
    bound_smallest,
    estimate_difference,
    estimate_pair,
    estimate_parity_ratio,
    estimate_rates,
    find_largest_gap,
)
from fedgft.errors import FedgftError
from fedgft.metrics import Metric
from fedgft.metrics.intervals import FEW, Z95, Interval, floor, folded, simultaneous
from fedgft.site_sums import SLACK
from fedgft.theory import Analysis, Compared, compare

NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan)
PAIRS_PER_BLOCK = 2_000_000  # number of (site, pair of groups) combinations compared at a time
MIN_WEIGHT = 5.0  # smallest total Mantel-Haenszel weight for which a gap within sites is reported
MIN_SITES = 5  # smallest number of sites for a bootstrap
FEW_SITES = 20  # with fewer sites, the bootstrap intervals are only rough
DRAWS_PER_BLOCK = 200  # number of bootstrap draws computed at a time, which bounds the memory
MAX_FLOOR_RATES = 100  # most rates of a metric that have a noise floor, which is simulated
MAX_MISSING = 0.05  # a rate that is missing in this share of the draws or more gets no limits


@dataclass(frozen=True, eq=False)
class SiteGaps:
    """One metric at every site, for the two groups whose rates over all sites differ most.

    Parameters
    ----------
    largest, smallest_ratio
        (site,): the largest gap between any two groups of the site, and its smallest ratio.
    local
        (site,): the signed difference between the two groups at the site.
    direction
        (site,): 1 or -1 where `local` differs from 0 beyond chance (Bonferroni over sites), or 0.
    contribution
        (site,): the amount that the site adds to the signed gap, measured from the overall rate.
    heterogeneity, total_variation
        How differently the two groups are distributed over the sites (DH and TV).
    bound
        The upper bound alpha (1 - TV) + TV of the gap, where alpha is the largest local gap.
    within
        The common gap within sites (Mantel-Haenszel).
    signed
        The difference between the two groups over all sites.
    pair_rates, pair_shares
        (2, site): the rates of the two groups at the site, and the shares of their rows that the
        site holds.
    """

    largest: Estimate
    smallest_ratio: np.ndarray
    local: Estimate
    direction: np.ndarray
    contribution: np.ndarray
    heterogeneity: float = math.nan
    total_variation: float = math.nan
    bound: float = math.nan
    within: Estimate = NO_ESTIMATE
    signed: Estimate = NO_ESTIMATE
    pair_rates: np.ndarray | None = None
    pair_shares: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class MetricEstimate:
    """All estimates of one metric in one view.

    `limits` are the limits of `rates`, (condition, group). The limits in `gap` are those of the
    largest gap. `noise_floor` is the mean gap of a perfectly fair model, see
    `estimate_noise_floor`.
    """

    metric: Metric
    view: View
    rates: Rates
    limits: Interval
    gap: LargestGap
    sites: SiteGaps
    noise_floor: float


def estimate_metric(metric: Metric, view: View, *, draws: int = 0, seed: int = 0) -> MetricEstimate:
    """Estimate the rates, the largest gap, and the gap at each site.

    If `draws` > 0, the intervals are bootstrap intervals over sites.
    """
    rates = estimate_rates(metric, view, "hard")
    limits = rates.interval()
    gap = find_largest_gap(rates)
    if draws:
        gap, limits = bootstrap_sites(metric, view, rates, gap, draws=draws, seed=seed)
    sites = compare_sites(metric, view, rates, gap)
    noise_floor = estimate_noise_floor(metric, view)
    return MetricEstimate(
        metric, view, rates, limits, gap=gap, sites=sites, noise_floor=noise_floor
    )


def estimate_noise_floor(metric: Metric, view: View) -> float:
    """Return the noise floor: the mean gap that a perfectly fair model would show on these rows.

    See `fedgft.metrics.intervals.floor`, whose approximation needs some rows in every group. NaN if
    a group has fewer than 10 rows of the event, if there are fewer than two groups or very many, or
    if counts are noisy or withheld: the floor covers sampling alone.
    """
    statistics = view.sums.statistics(metric, "hard").sum(0)
    if view.squares is not None:
        rates = estimate_rates(metric, view, "hard")
        effective = np.asarray(rates.effective)
        statistics = np.stack((rates.rate * effective, effective))
    conditions, groups = statistics.shape[1:]
    is_exact = not (view.noise.any() or view.slack.any())
    if groups < 2 or conditions * groups > MAX_FLOOR_RATES or not is_exact:
        return math.nan
    if (statistics[1] < FEW).any():
        return math.nan
    return float(floor(metric, statistics))


def compare_sites(metric: Metric, view: View, rates: Rates, gap: LargestGap) -> SiteGaps:
    """Compare every site with all sites together.

    Parameters
    ----------
    metric, view
        The metric and the groups.
    rates, gap
        The rates over all sites, and the gap between two groups that the result explains. If `gap`
        names no pair of groups, the result holds the largest gap of each site, and all else is NaN.
    """
    by_site = estimate_rates(metric, view, "hard", by_site=True)
    largest, smallest_ratio = find_gaps_by_site(by_site, view.sums.count.sum(1)[:, :-1] > 0)
    if gap.pair is None or gap.condition is None:
        nan = np.full(len(smallest_ratio), math.nan)
        return SiteGaps(largest, smallest_ratio, Estimate(nan, nan, nan), np.zeros(len(nan)), nan)
    first, second = (by_site[..., gap.condition, group] for group in gap.pair)
    level = NormalDist().inv_cdf(1 - 0.025 / len(smallest_ratio))
    correlation = by_site.correlation(*gap.pair)
    if by_site.covariance is not None:
        correlation = correlation[..., gap.condition]
    strict = estimate_difference(first, second, level, correlation=correlation)
    statistics = view.sums.statistics(metric, "hard")
    proper = metric.proper(len(view.spec.classes))
    pair = Compared(gap.condition, *gap.pair)
    ones = np.ones(len(statistics))
    exact = compare(statistics, ones, pair, proper=proper)
    feasible = compare(_clip_statistics(statistics), ones, pair, proper=proper)
    if view.squares is None:
        within = estimate_within_sites(exact, *_pair_noise(metric, view, pair))
    else:
        within = average_within_sites(exact, first, second, correlation)
    over_all = estimate_pair(rates, gap.condition, *gap.pair)
    return SiteGaps(
        largest=largest,
        smallest_ratio=smallest_ratio,
        local=estimate_difference(first, second, correlation=correlation),
        direction=1.0 * (strict.low > 0) - (strict.high < 0),
        contribution=exact.contributions,
        heterogeneity=feasible.heterogeneity if proper else math.nan,
        total_variation=feasible.total_variation,
        bound=_bound_of_conditions(metric, _clip_statistics(statistics), rates, feasible),
        within=within,
        signed=Estimate(*map(float, over_all)),
        pair_rates=np.stack((first.rate, second.rate)),
        pair_shares=np.stack([_share(each.n) for each in (first, second)]),
    )


def _bound_of_conditions(
    metric: Metric, statistics: np.ndarray, rates: Rates, shown: Analysis
) -> float:
    """Return the bound of the gap: the largest one of all conditions.

    `shown` is the comparison under the condition of the gap; it holds if another condition has no
    two groups with a rate.
    """
    bounds = [shown.bound_tight]
    for condition, by_group in enumerate(rates.rate):
        known = np.flatnonzero(~np.isnan(by_group))
        if len(known) >= 2 and len(rates.rate) > 1:
            i = int(known[by_group[known].argmax()])
            j = int(known[by_group[known].argmin()])
            if i != j:
                pair = Compared(condition, i, j)
                ones = np.ones(len(statistics))
                bounds.append(compare(statistics, ones, pair, proper=shown.proper).bound_tight)
    return float(np.nanmax(bounds)) if not np.isnan(bounds).all() else math.nan


def _share(rows: np.ndarray) -> np.ndarray:
    """Return the share of each entry in the total; noise can make numbers of rows negative."""
    known = np.maximum(rows, 0.0)
    return known / max(1.0, known.sum())


def _clip_statistics(statistics: np.ndarray) -> np.ndarray:
    """Clip the sums (k, 2, v, g) to 0 <= numerator <= denominator, which noise may violate."""
    below = np.maximum(statistics[:, 1], 0.0)
    return np.stack((np.clip(statistics[:, 0], 0.0, below), below), 1)


def find_gaps_by_site(rates: Rates, present: np.ndarray) -> tuple[Estimate, np.ndarray]:
    """Return the largest gap at each site, with its interval, and the smallest ratio at each site.

    A group without rows at a site is ignored there. The result is NaN for a site that has only one
    group, or that has a group without a row of the event. A site has no interval if one of its
    groups has too few rows.

    Parameters
    ----------
    rates
        (site, condition, group).
    present
        (site, group): whether the site has rows of the group.
    """
    conditions, groups = rates.rate.shape[-2:]
    i, j = np.triu_indices(groups, 1)
    z = simultaneous(groups, conditions)
    unknown = (np.isnan(rates.rate) & present[:, None]).any((-2, -1)) | (present.sum(-1) < 2)
    correlation = rates.correlation(i, j)
    size = max(1, PAIRS_PER_BLOCK // max(1, conditions * len(i)))  # bounds the memory
    parts = []
    for start in range(0, len(present), size):
        block = slice(start, start + size)
        first = rates[block][..., i]
        second = rates[block][..., j]
        absent = ~(present[block][:, i] & present[block][:, j])[:, None]  # (site, 1, pair)
        related = correlation[block] if rates.covariance is not None else 0.0
        gaps = estimate_difference(first, second, z, correlation=related)
        ratios = estimate_parity_ratio(first, second, z, correlation=related).value
        largest = [
            np.where(absent, -np.inf, values).max((-2, -1), initial=-np.inf)
            for values in (np.abs(gaps.value), *folded(gaps.low, gaps.high))
        ]
        smallest = np.where(absent, np.inf, ratios).min((-2, -1), initial=np.inf)
        parts.append((*largest, smallest))
    gap, low, high, ratio = (
        np.where(unknown, np.nan, np.concatenate(column)) for column in zip(*parts, strict=True)
    )
    return Estimate(gap, low, high), ratio


def _pair_noise(metric: Metric, view: View, pair: Compared) -> tuple[np.ndarray, bool]:
    """Return the noise variance of the pair's hits and misses, and whether a count is suppressed.

    The variance is (site, 4): hits and misses of the first group, then of the second group.
    """
    slope, offset = metric.affine(len(view.spec.classes))
    unit = (slope + offset[..., None])[:, pair.condition]  # (2, y, c)
    groups = [pair.i, pair.j]
    parts = [
        np.einsum("yc,kyc->k", u**2, view.noise[:, :, group])
        for group in groups
        for u in (unit[0], unit[1] - unit[0])
    ]
    return np.stack(parts, -1), bool(view.slack[:, :, groups].any())


def estimate_within_sites(terms: Analysis, noise: np.ndarray, suppressed: bool) -> Estimate:
    """Estimate the common gap within sites, with its 95% interval.

    This is the common difference of Mantel & Haenszel: site k has the weight
    W_k = b_k d_k / (b_k + d_k), so a site that lacks one of the groups has the weight 0. The
    variance is that of Sato (1989), which is valid for few large sites and for many small sites,
    plus the variance of the noise, by the delta method.

    Parameters
    ----------
    terms
        Hits (a, c) and rows (b, d) of the two groups at each site.
    noise
        (site, 4): variance of noise on the hits and misses of the first and second group.
    suppressed
        Whether counts are suppressed. If they are, or if there are few rows, the result is NaN.
    """
    clear = terms.b > MIN_SIGNAL * np.sqrt(noise[:, :2].sum(1))
    clear &= terms.d > MIN_SIGNAL * np.sqrt(noise[:, 2:].sum(1))
    a, b, c, d = (values[clear] for values in (terms.a, terms.b, terms.c, terms.d))
    noise = noise[clear]
    n = b + d
    h = (a * d - c * b) / n
    w = b * d / n
    weight = float(w.sum())
    if suppressed or min(b.sum(), d.sum()) < FEW or weight < MIN_WEIGHT:
        return NO_ESTIMATE
    common = float(h.sum()) / weight
    p = ((b**2 * c - d**2 * a + b * d * (d - b) / 2) / n**2).sum()
    q = ((a * (d - c) + c * (b - a)) / (2 * n)).sum()
    sato = max(float(common * p + q), 0.0)
    # derivatives of h and w with respect to the hits and misses of both groups: the noisy counts
    of_h = np.stack((d - c, -c, a - b, a), -1) / n[:, None] - (h / n)[:, None]
    of_w = np.stack((d, d, b, b), -1) / n[:, None] - (w / n)[:, None]
    noisy = float(((of_h - common * of_w) ** 2 * noise).sum())
    half = Z95 * math.sqrt(sato + noisy) / weight
    return Estimate(common, max(common - half, -1.0), min(common + half, 1.0))


@np.errstate(divide="ignore", invalid="ignore")
def average_within_sites(
    terms: Analysis, first: Rates, second: Rates, correlation: np.ndarray | float
) -> Estimate:
    """Estimate the common gap within sites where rows have weights or groups were randomized.

    The weights of the sites are those of Mantel & Haenszel; sites with too few rows for an interval
    are left out. The variance is that of the weighted average of the differences at the sites.

    Parameters
    ----------
    terms
        Hits and rows of the two groups at each site.
    first, second
        (site,): the rates of the two groups at each site.
    correlation
        (site,): the correlations of these rates.
    """
    if first.sampling is None or second.sampling is None:
        raise ValueError("rates without weights and with true groups: see estimate_within_sites")
    known = first.valid & second.valid
    both = np.sqrt(first.sampling * second.sampling)
    variance = first.sampling + second.sampling - 2 * correlation * both
    variance = variance + first.variance + second.variance
    w = np.where(known, terms.b * terms.d / (terms.b + terms.d), 0.0)
    is_uncertain = (first.rate_min < first.rate_max).any()
    if is_uncertain or not known.any():
        return NO_ESTIMATE
    w = w / w.sum()
    common = float((w * np.where(known, first.rate - second.rate, 0.0)).sum())
    half = Z95 * math.sqrt(float((w**2 * np.where(known, variance, 0.0)).sum()))
    return Estimate(common, max(common - half, -1.0), min(common + half, 1.0))


def check_bootstrap(pool: Pool) -> None:
    """Raise an error if there are too few sites to draw from, or sites with suppressed counts."""
    if len(pool.sites) < MIN_SITES:
        raise FedgftError(
            f"`bootstrap`: needs {MIN_SITES} sites to draw from, not {len(pool.sites)}"
        )
    if pool.tables[..., SLACK].any():
        raise FedgftError("`bootstrap`: sites that withhold small cells cannot be drawn again")


@np.errstate(divide="ignore", invalid="ignore")
def bootstrap_sites(
    metric: Metric, view: View, rates: Rates, gap: LargestGap, *, draws: int, seed: int
) -> tuple[LargestGap, Interval]:
    """Return the gap and the limits of the rates, both with bootstrap limits over sites.

    Limits are missing, which is None in the gap and NaN in the limits of the rates, if a group has
    too few rows or if 5% of the draws or more lack a rate.
    """
    statistics = view.sums.statistics(metric, "hard")
    sites = len(statistics)
    generator = np.random.default_rng(seed)
    blocks = []
    for start in range(0, draws, DRAWS_PER_BLOCK):
        size = min(DRAWS_PER_BLOCK, draws - start)
        times = generator.multinomial(sites, np.full(sites, 1 / sites), size=size)
        blocks.append(metric.rates(np.tensordot(times, statistics, 1)))
    drawn = np.clip(np.concatenate(blocks), 0, 1)
    found = np.clip(metric.rates(statistics.sum(0)), 0, 1)
    known = rates.valid & (np.isnan(drawn).mean(0) < MAX_MISSING)  # (v, g)
    drawn = np.where(known, drawn, np.nan)
    i, j = np.triu_indices(found.shape[-1], 1)
    low, high = _difference_limits(drawn, found)
    estimable = ~np.isnan(found[:, i] + found[:, j]).any(0)  # pairs, under all conditions
    complete = not np.isnan(low[:, estimable]).any()
    gap_low, gap_high = bound_largest(folded(low, high), complete=complete)
    logs = np.log(found)
    low, high = (np.exp(a) for a in folded(*_difference_limits(np.log(drawn), logs)))
    ratios = Estimate(np.exp(-np.abs(logs[:, i] - logs[:, j])), 1 / high, 1 / low)
    ratio_low, ratio_high = bound_smallest(ratios)
    low, high = np.nanquantile(np.where(known, drawn, 0.0), (0.025, 0.975), axis=0)
    known &= high > low
    limits = (np.where(known, low, np.nan), np.where(known, high, np.nan))
    gap = replace(gap, low=gap_low, high=gap_high, ratio_low=ratio_low, ratio_high=ratio_high)
    return gap, limits


@np.errstate(divide="ignore", invalid="ignore")
def _difference_limits(drawn: np.ndarray, found: np.ndarray) -> Interval:
    """Return simultaneous limits of the differences of all pairs of groups, (v, pairs).

    The limits are NaN for a pair that cannot be compared. `drawn` is (draw, v, g) and `found` is
    (v, g). The loop compares one group at a time with the groups after it, because a table of all
    pairs in all draws could be too large for memory.
    """
    centers = []
    deviations = []
    farthest = np.zeros(len(drawn))
    for i in range(found.shape[-1] - 1):
        center = found[..., i, None] - found[..., i + 1 :]
        error = (drawn[..., i, None] - drawn[..., i + 1 :]) - center
        error = np.where(np.isfinite(error), error, np.nan)
        known = np.isnan(error).mean(0) < MAX_MISSING
        deviation = np.nanstd(np.where(known, error, 0.0), axis=0)
        known &= deviation > 0  # equal draws say nothing about the spread over sites
        error = np.where(known, error, 0.0)
        relative = np.nan_to_num(np.abs(error)) / np.where(deviation > 0, deviation, np.inf)
        farthest = np.maximum(farthest, relative.max((-2, -1), initial=0.0))
        centers.append(np.where(known, center, np.nan))
        deviations.append(deviation)
    if not centers:
        return found[..., :0], found[..., :0]
    center = np.concatenate(centers, -1)
    half = np.quantile(farthest, 0.95) * np.concatenate(deviations, -1)
    return center - half, center + half
