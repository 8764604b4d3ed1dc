"""Sites against the whole: who drives the gap, and how far local views are from the global one."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedgft.audit.rates import Gap, Rates, apart, rates_of
from fedgft.audit.views import View
from fedgft.metrics import Metric
from fedgft.metrics.intervals import Z95
from fedgft.theory import Analysis, Compared, compare


@dataclass(frozen=True, eq=False)
class Locality:
    """One metric, the two groups whose rates are globally farthest apart, every site."""

    gap: np.ndarray  # the site's own largest gap, between the groups it has; NaN: not estimable
    local: np.ndarray  # the same two groups as globally, signed
    low: np.ndarray
    high: np.ndarray
    against: np.ndarray  # signed the other way, beyond chance with as many sites to look at
    contribution: np.ndarray  # the site's share of the signed gap: they add up to it
    heterogeneity: float
    total_variation: float
    bound: float  # alpha + TV
    alpha: float  # largest local gap
    within: tuple[float, float, float]  # the gap within sites, and its interval
    pair: Rates  # of all sites together: (2,), the higher rate first


def locality(metric: Metric, seen: View, gap: Gap) -> Locality:
    """NaN throughout, but for the sites' own gaps, where no two groups can be compared."""
    by_site = rates_of(metric, seen, "hard", by_site=True)
    own = own_gaps(by_site.rate, seen.tally.count.sum(1)[:, :-1] > 0)
    if gap.pair is None or gap.condition is None:
        none, nan = np.full(len(own), math.nan), math.nan
        no_site = np.zeros(len(own), dtype=bool)
        return Locality(own, none, none, none, no_site, none, nan, nan, nan, nan,
                        (nan, nan, nan), by_site)  # fmt: skip
    first, second = (by_site.of(gap.condition, group) for group in gap.pair)
    local, low, high = apart(first, second)
    statistics = seen.tally.statistics(metric, "hard")
    proper = metric.proper(len(seen.classes))
    pair, ones = Compared(gap.condition, *gap.pair), np.ones(len(statistics))
    exact = compare(statistics, ones, pair, proper=proper)
    known = compare(np.maximum(statistics, 0.0), ones, pair, proper=proper)  # noise goes below 0
    over_all = rates_of(metric, seen, "hard")
    return Locality(
        gap=own,
        local=local, low=low, high=high,
        against=apart(first, second, NormalDist().inv_cdf(1 - 0.025 / len(own)))[2] < 0,
        contribution=exact.contributions,
        heterogeneity=known.heterogeneity if proper else math.nan,
        total_variation=known.total_variation,
        bound=known.bound_tv,
        alpha=known.largest_local_gap,
        within=within_sites(known),
        pair=over_all[gap.condition, list(gap.pair)],
    )  # fmt: skip


def own_gaps(rates: np.ndarray, present: np.ndarray) -> np.ndarray:
    """What a site sees alone: groups without rows there do not exist for it.

    NaN where it has one group only, or a group without a row of the event.
    """
    there = present[:, None, :]
    unknown = (np.isnan(rates) & there).any((-2, -1)) | (present.sum(-1) < 2)
    top = np.where(there, rates, -np.inf).max(-1)
    bottom = np.where(there, rates, np.inf).min(-1)
    with np.errstate(invalid="ignore"):
        return np.where(unknown, np.nan, (top - bottom).max(-1))


def within_sites(terms: Analysis) -> tuple[float, float, float]:
    """The gap a person sees who stays within sites, with its 95% interval.

    Mantel & Haenszel's common difference: sites weigh b_k d_k / (b_k + d_k), so one that lacks a
    group says nothing. The variance is Sato's (1989), right for few large and many small sites.
    """
    a, b, c, d = terms.a, terms.b, terms.c, terms.d
    held = (b > 0) & (d > 0)
    if not held.any():
        return math.nan, math.nan, math.nan
    a, b, c, d = a[held], b[held], c[held], d[held]
    n = b + d
    weight = float((b * d / n).sum())
    common = float(((a * d - c * b) / n).sum()) / weight
    p = ((b**2 * c - d**2 * a + b * d * (d - b) / 2) / n**2).sum()
    q = ((a * (d - c) + c * (b - a)) / (2 * n)).sum()
    spread = Z95 * math.sqrt(max(float(common * p + q), 0.0)) / weight
    return common, max(common - spread, -1.0), min(common + spread, 1.0)
