"""How sites relate to the whole: which sites cause a gap, and what single sites cannot see.

Also here: intervals over sites (bootstrap). Newcombe's intervals take the sites as given and the
rows as a sample. Where the audited sites stand for many others, the sites are the sample: they are
drawn with replacement, with all their rows. A rate gets percentiles over the draws. A largest gap
is never negative, so its percentiles would always claim a gap; its limits come from the signed
differences d of all pairs instead, d +- q s, which hold for all pairs at once: s is the standard
deviation of a difference over the draws, and q the 95% percentile of the largest |d* - d| / s.
Ratios likewise, by their logarithms.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from fedgft.audit.rates import (
    MIN_SIGNAL,
    Estimate,
    Gap,
    Pool,
    Rates,
    View,
    bound_largest,
    bound_smallest,
    estimate_difference,
    estimate_parity_ratio,
    estimate_rates,
    find_largest_gap,
)
from fedgft.errors import FedgftError
from fedgft.metrics import Metric
from fedgft.metrics.intervals import FEW, Z95, Limits, folded, simultaneous
from fedgft.sums import SLACK
from fedgft.theory import Analysis, Compared, compare

UNKNOWN = Estimate(math.nan, math.nan, math.nan)
PAIRS_PER_BLOCK = 2_000_000  # pairs of groups, over sites, that are compared at a time
MIN_WEIGHT = 5.0  # of the pairs of rows of all sites: with less, no gap within sites is claimed
MIN_SITES = 5  # for a bootstrap
FEW_SITES = 20  # with fewer, a bootstrap is a rough guess
DRAWS_PER_BLOCK = 200  # a draw holds the statistics of all sites
MAX_MISSING = 0.05  # share of the draws that may lack a rate


@dataclass(frozen=True, eq=False)
class SiteGaps:
    """One metric at every site, for the two groups whose rates over all sites differ most.

    Parameters
    ----------
    own, own_ratio
        (site,): the largest gap between any two groups of the site, and its smallest ratio.
    local
        (site,): the signed difference between the two groups at the site.
    direction
        (site,): 1 or -1 where `local` differs from 0 beyond chance (Bonferroni over sites), or 0.
    contribution
        (site,): what the site adds to the signed gap, relative to the overall rate.
    heterogeneity, total_variation
        How differently the two groups are distributed over the sites (DH and TV).
    bound
        alpha (1 - TV) + TV with the largest local gap alpha: the gap is at most this.
    within
        The common gap within sites (Mantel-Haenszel).
    signed
        The difference between the two groups over all sites.
    """

    own: Estimate
    own_ratio: np.ndarray
    local: Estimate
    direction: np.ndarray
    contribution: np.ndarray
    heterogeneity: float = math.nan
    total_variation: float = math.nan
    bound: float = math.nan
    within: Estimate = UNKNOWN
    signed: Estimate = UNKNOWN


@dataclass(frozen=True, eq=False)
class MetricEstimate:
    """Everything that is known about one metric in one view.

    `limits` are those of `rates`, (condition, group); those of `gap` hold for the largest gap.
    """

    metric: Metric
    view: View
    rates: Rates
    limits: Limits
    gap: Gap
    sites: SiteGaps


def estimate_metric(metric: Metric, view: View, *, draws: int = 0, seed: int = 0) -> MetricEstimate:
    """Rates, the largest gap, and the sites behind it; intervals over sites if `draws` > 0."""
    rates = estimate_rates(metric, view, "hard")
    limits = rates.interval()
    gap = find_largest_gap(rates)
    if draws:
        gap, limits = bootstrap_sites(metric, view, rates, gap, draws=draws, seed=seed)
    sites = compare_sites(metric, view, rates, gap)
    return MetricEstimate(metric, view, rates, limits, gap=gap, sites=sites)


def compare_sites(metric: Metric, view: View, rates: Rates, gap: Gap) -> SiteGaps:
    """Every site against all sites together.

    Parameters
    ----------
    metric, view
        The metric and the groups.
    rates, gap
        The rates over all sites, and the gap between two groups to explain. Without such a pair
        only the sites' own gaps are known, and everything else is NaN.
    """
    by_site = estimate_rates(metric, view, "hard", by_site=True)
    own, own_ratio = find_own_gaps(by_site, view.sums.count.sum(1)[:, :-1] > 0)
    if gap.pair is None or gap.condition is None:
        nan = np.full(len(own_ratio), math.nan)
        return SiteGaps(own, own_ratio, Estimate(nan, nan, nan), np.zeros(len(nan)), nan)
    first, second = (by_site[..., gap.condition, group] for group in gap.pair)
    level = NormalDist().inv_cdf(1 - 0.025 / len(own_ratio))
    strict = estimate_difference(first, second, level)
    statistics = view.sums.statistics(metric, "hard")
    proper = metric.proper(len(view.spec.classes))
    pair = Compared(gap.condition, *gap.pair)
    ones = np.ones(len(statistics))
    exact = compare(statistics, ones, pair, proper=proper)
    feasible = compare(_clip_statistics(statistics), ones, pair, proper=proper)
    over_all = estimate_difference(rates[gap.condition, pair.i], rates[gap.condition, pair.j])
    return SiteGaps(
        own=own,
        own_ratio=own_ratio,
        local=estimate_difference(first, second),
        direction=1.0 * (strict.low > 0) - (strict.high < 0),
        contribution=exact.contributions,
        heterogeneity=feasible.heterogeneity if proper else math.nan,
        total_variation=feasible.total_variation,
        bound=feasible.bound_tight,
        within=estimate_within_sites(exact, *_pair_noise(metric, view, pair)),
        signed=Estimate(*map(float, over_all)),
    )


def _clip_statistics(statistics: np.ndarray) -> np.ndarray:
    """Sums (k, 2, v, g) cut off to 0 <= numerator <= denominator, which noise violates."""
    below = np.maximum(statistics[:, 1], 0.0)
    return np.stack((np.clip(statistics[:, 0], 0.0, below), below), 1)


def find_own_gaps(rates: Rates, present: np.ndarray) -> tuple[Estimate, np.ndarray]:
    """What each site sees by itself: its largest gap with an interval, and its smallest ratio.

    Groups without rows at a site do not exist for it. The result is NaN for a site with a single
    group or with a group without a row of the event; it has no interval if a group has too few.

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
    size = max(1, PAIRS_PER_BLOCK // max(1, conditions * len(i)))  # bounds the memory
    parts = []
    for start in range(0, len(present), size):
        block = slice(start, start + size)
        first = rates[block][..., i]
        second = rates[block][..., j]
        absent = ~(present[block][:, i] & present[block][:, j])[:, None]  # (site, 1, pair)
        gaps = estimate_difference(first, second, z)
        ratios = estimate_parity_ratio(first, second, z).value
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
    """Variance of noise on the pair's hits and misses, (site, 4); whether a count is suppressed."""
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
    """The common gap within sites, with its 95% interval.

    The common difference of Mantel & Haenszel: a site has the weight W_k = b_k d_k / (b_k + d_k),
    so a site that lacks a group has none. The variance is that of Sato (1989), valid for few large
    and for many small sites, plus that of noise by the delta method.

    Parameters
    ----------
    terms
        Hits (a, c) and rows (b, d) of the two groups at each site.
    noise
        (site, 4): variance of noise on the hits and misses of the first and second group.
    suppressed
        Whether counts are suppressed. Then, and with few rows, the result is NaN.
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
        return UNKNOWN
    common = float(h.sum()) / weight
    p = ((b**2 * c - d**2 * a + b * d * (d - b) / 2) / n**2).sum()
    q = ((a * (d - c) + c * (b - a)) / (2 * n)).sum()
    sato = max(float(common * p + q), 0.0)
    # derivatives of h and w by the hits and misses of both groups, whose counts have the noise
    of_h = np.stack((d - c, -c, a - b, a), -1) / n[:, None] - (h / n)[:, None]
    of_w = np.stack((d, d, b, b), -1) / n[:, None] - (w / n)[:, None]
    noisy = float(((of_h - common * of_w) ** 2 * noise).sum())
    half = Z95 * math.sqrt(sato + noisy) / weight
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
    metric: Metric, view: View, rates: Rates, gap: Gap, *, draws: int, seed: int
) -> tuple[Gap, Limits]:
    """The gap with limits over sites instead of rows, and such limits of the rates.

    Limits are None (in the gap) or NaN (of rates) where a group has too few rows, and where 5% of
    the draws or more lack a rate.
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
def _difference_limits(drawn: np.ndarray, found: np.ndarray) -> Limits:
    """Limits of the differences of all pairs, (v, pairs), that hold at once.

    NaN where a pair cannot be compared. `drawn` is (draw, v, g) and `found` (v, g). Groups are
    compared with those behind them one at a time: all pairs of all draws may be a large table.
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
        known &= deviation > 0  # if all draws are equal, nothing is known about other sites
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
