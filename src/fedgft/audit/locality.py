"""Sites against the whole: who drives the gap, and how far local views are from the global one."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedgft.audit.rates import CLEAR, FEW, Gap, Rates, apart, rates_of, smaller_over_larger
from fedgft.audit.views import View
from fedgft.metrics import Metric
from fedgft.metrics.intervals import Z95, folded, simultaneous
from fedgft.theory import Analysis, Compared, compare

UNKNOWN = (math.nan, math.nan, math.nan)
PAIRS = 2_000_000  # of groups, over sites, compared at a time
WEIGHT = 5.0  # of all sites' pairs of rows: with less, the gap within sites is anybody's guess


@dataclass(frozen=True, eq=False)
class Locality:
    """One metric, the two groups whose rates are globally farthest apart, every site."""

    own: tuple[np.ndarray, np.ndarray, np.ndarray]  # the site's own largest gap, its interval
    ratio: np.ndarray  # and its own smallest ratio
    local: tuple[np.ndarray, np.ndarray, np.ndarray]  # the global pair there, signed, interval
    beyond: np.ndarray  # 1, -1: a local gap beyond chance, with as many sites to look at; or 0
    contribution: np.ndarray  # what the site adds to the signed gap, around the overall rate
    heterogeneity: float
    total_variation: float
    bound: float  # the gap is at most alpha (1 - TV) + TV
    within: tuple[float, float, float]  # the gap within sites, and its interval
    whole: tuple[float, float, float]  # the pair over all sites, signed, with its own interval


def locality(metric: Metric, seen: View, gap: Gap) -> Locality:
    """NaN throughout, but for the sites' own gaps, where no two groups can be compared."""
    by_site = rates_of(metric, seen, "hard", by_site=True)
    own, ratio = own_gaps(by_site, seen.tally.count.sum(1)[:, :-1] > 0)
    if gap.pair is None or gap.condition is None:
        none = np.full(len(ratio), math.nan)
        return Locality(own, ratio, (none, none, none), np.zeros(len(ratio)), none,
                        math.nan, math.nan, math.nan, UNKNOWN, UNKNOWN)  # fmt: skip
    first, second = (by_site.of(gap.condition, group) for group in gap.pair)
    _, least, most = apart(first, second, NormalDist().inv_cdf(1 - 0.025 / len(ratio)))
    statistics = seen.tally.statistics(metric, "hard")
    proper = metric.proper(len(seen.classes))
    pair, ones = Compared(gap.condition, *gap.pair), np.ones(len(statistics))
    exact = compare(statistics, ones, pair, proper=proper)
    known = compare(_possible(statistics), ones, pair, proper=proper)
    over_all = rates_of(metric, seen, "hard")
    one, other = (over_all.of(gap.condition, group) for group in gap.pair)
    value, low, high = (float(x) for x in apart(one, other))
    return Locality(
        own=own, ratio=ratio,
        local=apart(first, second),
        beyond=1.0 * (least > 0) - (most < 0),
        contribution=exact.contributions,
        heterogeneity=known.heterogeneity if proper else math.nan,
        total_variation=known.total_variation,
        bound=known.bound_tight,
        within=within_sites(exact, *_noise(metric, seen, pair)),
        whole=(value, low, high),
    )  # fmt: skip


def _possible(statistics: np.ndarray) -> np.ndarray:
    """Sums (k, 2, v, g) brought back to 0 <= numerator <= denominator, which noise leaves."""
    below = np.maximum(statistics[:, 1], 0.0)
    return np.stack((np.clip(statistics[:, 0], 0.0, below), below), 1)


def own_gaps(
    rates: Rates, present: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """What a site sees alone: its largest gap with its interval, and its smallest ratio."""
    conditions, groups = rates.rate.shape[-2:]
    pairs = max(1, conditions * groups * (groups - 1) // 2)
    block = max(1, PAIRS // pairs)  # sites at a time: memory does not grow with all pairs
    parts = [_own(rates[at : at + block], present[at : at + block])
             for at in range(0, len(present), block)]  # fmt: skip
    gap, low, high, ratio = (np.concatenate(column) for column in zip(*parts, strict=True))
    return (gap, low, high), ratio


def _own(rates: Rates, present: np.ndarray) -> tuple[np.ndarray, ...]:
    """Groups without rows at a site do not exist for it.

    NaN where it has one group only, or a group without a row of the event; no interval where a
    group has too few.
    """
    conditions, groups = rates.rate.shape[-2:]
    i, j = np.triu_indices(groups, 1)
    there = (present[:, i] & present[:, j])[:, None]  # (site, 1, pair)
    z = simultaneous(groups, conditions)
    value, low, high = apart(rates[..., i], rates[..., j], z)
    quotients, _, _ = smaller_over_larger(rates[..., i], rates[..., j], z)
    unknown = (np.isnan(rates.rate) & present[:, None]).any((-2, -1)) | (present.sum(-1) < 2)

    def over_pairs(values: np.ndarray, empty: float) -> np.ndarray:
        """NaN where a pair of groups that are there is NaN."""
        kept = np.where(there, values, empty)
        best = kept.max((-2, -1), initial=empty) if empty < 0 else kept.min((-2, -1), initial=empty)
        return np.where(unknown, np.nan, best)

    low, high = folded(low, high)
    return (*(over_pairs(a, -np.inf) for a in (np.abs(value), low, high)),
            over_pairs(quotients, np.inf))  # fmt: skip


def _noise(metric: Metric, seen: View, pair: Compared) -> tuple[np.ndarray, bool]:
    """Variance of noise on the pair's hits and others, (site, 4); whether a count is withheld."""
    slope, offset = metric.affine(len(seen.classes))
    unit = (slope + offset[..., None])[:, pair.condition]  # (2, y, c)
    parts = []
    for group in (pair.i, pair.j):
        for u in (unit[0], unit[1] - unit[0]):
            parts.append(np.einsum("yc,kyc->k", u**2, seen.noise[:, :, group]))
    groups = [pair.i, pair.j]
    return np.stack(parts, -1), bool(seen.slack[:, :, groups].any())


def within_sites(terms: Analysis, noise: np.ndarray, withheld: bool) -> tuple[float, float, float]:
    """The gap a person sees who stays within sites, with its 95% interval.

    Mantel & Haenszel's common difference: sites weigh W_k = b_k d_k / (b_k + d_k), so one that
    lacks a group says nothing. The variance is Sato's (1989), right for few large and many small
    sites, plus that of noise by the delta method. Nothing is claimed from a handful of rows, nor
    where counts are withheld.
    """
    a, b, c, d = terms.a, terms.b, terms.c, terms.d
    clear = lambda n, v: (n > 0) & (n > CLEAR * np.sqrt(v))  # noqa: E731
    held = clear(b, noise[:, :2].sum(1)) & clear(d, noise[:, 2:].sum(1))
    a, b, c, d, noise = a[held], b[held], c[held], d[held], noise[held]
    n = b + d
    h, w = (a * d - c * b) / n, b * d / n
    weight = float(w.sum())
    if withheld or min(b.sum(), d.sum()) < FEW or weight < WEIGHT:
        return UNKNOWN
    common = float(h.sum()) / weight
    p = ((b**2 * c - d**2 * a + b * d * (d - b) / 2) / n**2).sum()
    q = ((a * (d - c) + c * (b - a)) / (2 * n)).sum()
    sato = max(float(common * p + q), 0.0)
    # of h and W by hits and others of either group, whose counts carry the noise
    of_h = np.stack((d - c, -c, a - b, a), -1) / n[:, None] - (h / n)[:, None]
    of_w = np.stack((d, d, b, b), -1) / n[:, None] - (w / n)[:, None]
    noisy = float(((of_h - common * of_w) ** 2 * noise).sum())
    spread = Z95 * math.sqrt(sato + noisy) / weight
    return common, max(common - spread, -1.0), min(common + spread, 1.0)
