"""Robust aggregation: limits on how much the sums of one site can change the result.

Sums that are possible for some rows may still be false. Three limits are applied in this order;
each leaves the sums of a site that is within the limit exactly as they are:

1. size: no site counts as more than 3/n of all rows, or three times the rows of the next largest;
2. rates: in every (label, group) the share of each class lies near the sites' median,

       |rate_k - median| <= max(floor, z sqrt(f^2 tau^2 + se_k^2 + se_median^2)),

   with se the binomial standard error and tau the sites' own spread beyond it, estimated robustly:
   tau^2 = median_k((rate_k - median)^2 / 0.455 - se_k^2), 0.455 being the median of a squared
   normal, and f = 1 + 5/n because few sites give a poor estimate of their spread. A small honest
   site is therefore not changed, but a large dishonest site is;
3. influence: leaving a site out changes no difference between two groups' rates by more than
   max(floor, c times the mean of such changes over the other sites, among themselves).

The sums of a site beyond a limit are moved back to the limit: its rates to the end of the interval
(2), or all of its sums toward those of the other sites, group by group, with its own number of rows
(3). If a site's counts were agreed on beforehand, it cannot falsify them, and its influence is not
limited (3).

These limits do not detect a site that declares false counts before the first round: it looks like
an honest site with an unusual population. A rule that changes no honest site must allow such a site
the influence that the most unusual honest site would have: `LimitedSums.leverage`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics.metric import Kind, Metric
from fedgft.sums import Sums, stack

CHI_MEDIAN = 0.4549364  # the median of the square of a standard normal
MEDIAN_LOSS = np.pi / 2  # variance of a median over that of a mean
MAX_MEDIAN_SHARE = 0.25  # largest share of one site in the weights of a median
MIN_SITES = 3  # smallest number of sites with rows for which a median is used
FEW_SITES = 5.0  # f = 1 + FEW_SITES / n
MAX_PAIR_NUMBERS = 2_000_000  # of all pairs of sites; beyond, influence is computed in one pass
MEDIAN_FACTOR = 1.3  # factor for a dishonest site's own effect on the median that limits it
TOLERANCE = 1e-9
ROUNDED_DIGITS = 9  # of numbers that are equal if they differ by rounding


@dataclass(frozen=True)
class SiteLimits:
    """How far one site may be from the others; the rules are at the top of this file.

    `deviations` is z, and a distance of `floor` is always allowed. A site counts as at most the
    share `shares` / n of all rows, or `size_ratio` times the rows of the next largest site.
    An influence of `influence` on the difference between two groups is always allowed, and up to
    `influence_ratio` times the mean influence of the other sites, but never more than
    `influence_most`. With fewer than `least_sites` sites the influence is not limited, because it
    cannot be determined which site is unusual. An update may be `update_ratio` times as long as the
    sites' median, or three times as long as the next longest update.
    """

    deviations: float = 4.0
    floor: float = 0.02
    shares: float = 3.0
    size_ratio: float = 3.0
    influence: float = 0.02
    influence_ratio: float = 6.0
    influence_most: float = 1.0
    least_sites: int = 5
    update_ratio: float = 5.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise FedgftError(f"SiteLimits: {name} is {value}: it must be a number from 0 on")


NO_LIMITS = SiteLimits(deviations=np.inf, shares=np.inf, influence=np.inf, update_ratio=np.inf)


@dataclass(frozen=True)
class LimitedSums:
    """The sums of n sites within the limits.

    Parameters
    ----------
    sums
        The sums of each site; as it sent them if it is within all limits.
    moved
        (n,): the largest change of a difference between two groups' rates that the limits on a site
        caused; zero if its sums are as it sent them.
    leverage
        (n,): the largest change of such a difference that a site could have caused with any sums of
        the same number of rows; 1 if no other site holds one of its groups.
    why
        The limits that each site was beyond, as sentences.
    """

    sums: list[Sums]
    moved: np.ndarray
    leverage: np.ndarray
    why: list[list[str]]


def limit_sites(
    sums: Sequence[Sums],
    metric: Metric,
    kinds: Sequence[Kind],
    limits: SiteLimits,
    *,
    noise: float = 0.0,
    agreed: Sequence[bool] | None = None,
    leverage: bool = True,
) -> LimitedSums:
    """Bring every site's sums within the limits.

    Parameters
    ----------
    sums
        One per site.
    metric
        The metric whose gap is protected.
    kinds
        The sums that were sent: "soft", "hard" or both.
    limits
        The limits; the rules are at the top of this file.
    noise
        The standard deviation of the noise on a count, plus that of the noise on a sum.
    agreed
        For each site, whether its counts were agreed on beforehand.
    leverage
        Whether to compute `LimitedSums.leverage`; if not, it is what the limit on influence allows.
    """
    sent = stack(list(sums))
    fixed = np.zeros(len(sums), bool) if agreed is None else np.asarray(agreed, bool)
    why: list[list[str]] = [[] for _ in sums]
    limiter = _Limiter(metric, tuple(kinds), limits, noise, fixed=fixed, why=why)
    table = limiter.limit_sizes(sent)
    intervals = {kind: limiter.rate_interval(table, kind) for kind in kinds}
    table = limiter.limit_rates(table, intervals)
    is_only_holder = ~np.isfinite(limiter.influence(table))  # of the rows of some group
    allowed = np.where(fixed | is_only_holder, 1.0, limiter.allowed_influence(table))
    table = limiter.limit_influence(table, allowed)
    limited = [table[i] if limiter.why[i] else original for i, original in enumerate(sums)]
    largest = limiter.compute_leverage(table, intervals) if leverage else allowed
    return LimitedSums(
        limited, limiter.moves(sent, table), np.minimum(largest, allowed), limiter.why
    )


def size_limit(rows: Sequence[float] | np.ndarray, limits: SiteLimits) -> float:
    """Return the most rows that a site counts as: `shares` / n of all, or `size_ratio` times the
    next largest."""
    sizes = np.sort(np.maximum(np.asarray(rows, np.float64), 0.0))[::-1]
    if len(sizes) < 2:
        return float("inf")
    return max(share_limit(sizes, limits.shares / len(sizes)), limits.size_ratio * float(sizes[1]))


def share_limit(rows: Sequence[float] | np.ndarray, most: float) -> float:
    """Return the largest size that is at most this share of all, larger sizes being cut to it."""
    sizes = np.sort(np.asarray(rows, np.float64))[::-1]
    if most >= 1 or len(sizes) < 2:
        return float("inf")
    return float(_share_limits(sizes[:, None], most)[0])


def _share_limits(sizes: np.ndarray, most: float) -> np.ndarray:
    """Return the same for each column of (n, m), sorted from large to small.

    With too few sites for such a share, the limit is the smallest nonzero size, so that all sites
    count equally.
    """
    filled = np.count_nonzero(sizes > 0, axis=0)
    least = np.take_along_axis(sizes, np.maximum(filled - 1, 0)[None], 0)[0]
    rest = sizes.sum(0)
    limit = np.full(sizes.shape[1], np.nan)
    for above in range(len(sizes)):
        if above * most >= 1:
            break
        level = rest * most / (1 - above * most)
        limit = np.where(np.isnan(limit) & (sizes[above] <= level) & (level > 0), level, limit)
        rest = rest - sizes[above]
    return np.where(np.isnan(limit), least, limit)


def norm_limit(norms: Sequence[float] | np.ndarray, multiple: float) -> float:
    """Return the length beyond which an update is shortened.

    It is `multiple` times the sites' median (of an even number the lower one), or three times the
    next longest; infinite for fewer than three sites.
    """
    lengths = np.sort(np.asarray(norms, np.float64))
    if len(lengths) < MIN_SITES or multiple == np.inf:
        return float("inf")
    return float(max(multiple * lengths[(len(lengths) - 1) // 2], 3 * lengths[-2]))


class _Interval(NamedTuple):
    """The sites' median of a rate, and the variance of its limits before a site's own error."""

    middle: np.ndarray  # (label, group, class)
    variance: np.ndarray  # of the sites' spread and of the median itself
    known: np.ndarray  # whether there is a median


class _Push(NamedTuple):
    """The rate of a group under a condition that a dishonest site moves up (1) or down (-1)."""

    condition: int
    group: int
    sign: float


@dataclass(frozen=True)
class _Limiter:
    """The limits of one call; its methods take all sites' sums, (n, label, group + 1, ...)."""

    metric: Metric
    kinds: tuple[Kind, ...]
    limits: SiteLimits
    noise: float
    fixed: np.ndarray  # (n,): whether a site's counts were agreed on beforehand
    why: list[list[str]]  # the reasons found so far, by site

    def statistics(self, sums: Sums) -> list[np.ndarray]:
        """Return the sites' statistics (n, 2, v, g) of each kind."""
        return [sums.statistics(self.metric, kind) for kind in self.kinds]

    def limit_sizes(self, sums: Sums) -> Sums:
        """Scale down the sums of a site that claims too many rows."""
        rows = np.maximum(sums.rows(), 0.0)
        most = size_limit(rows, self.limits)
        large = (rows > most * (1 + TOLERANCE)) & ~self.fixed
        part = np.where(large, most / np.maximum(rows, TOLERANCE), 1.0)
        for i in np.flatnonzero(large):
            self.why[i].append(
                f"it claims {rows[i] / rows.sum():.0%} of all rows, and counts as {most:.0f} rows"
            )
        return sums.map(lambda table: table * part.reshape(-1, *[1] * (table.ndim - 1)))

    def rate_interval(self, sums: Sums, kind: Kind) -> _Interval:
        """Return where the rates of a site may lie, in each cell."""
        rows = np.where(sums.count >= 1, sums.count, 0.0)[..., None]
        rates = _table(sums, kind) / np.maximum(rows, 1.0)
        rows = np.broadcast_to(rows, rates.shape)
        there = rows > 0
        known = there.sum(0) >= MIN_SITES
        weights = np.where(known, _median_weights(rows), 1.0)
        filled = np.where(there, rates, 0.0)
        middle = _median(filled, weights)
        error = self.squared_error(middle, rows)
        excess = np.where(there, (filled - middle) ** 2 / CHI_MEDIAN - error, 0.0)
        tau = np.maximum(_median(excess, weights), 0.0)
        power = weights / weights.sum(0)
        of_median = MEDIAN_LOSS * (power**2 * (tau + error)).sum(0)
        few = 1 + FEW_SITES / np.maximum(there.sum(0), 1)
        return _Interval(middle, few**2 * tau + of_median, known)

    def squared_error(self, middle: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the squared standard error of a rate over `rows` rows with true rate `middle`.

        One row of each outcome is added, because a rate of 0 in ten rows does not mean a true rate
        of 0.
        """
        some = np.maximum(rows, 1.0)
        share = (middle.clip(0.0, 1.0) * some + 1) / (some + 2)
        return share * (1 - share) / some + (self.noise / some) ** 2

    def width(self, interval: _Interval, rows: np.ndarray) -> np.ndarray:
        """Return how far from the median a site with `rows` rows may be; inf without a median."""
        error = self.squared_error(interval.middle, rows)
        wide = self.limits.deviations * np.sqrt(interval.variance + error)
        return np.where(interval.known, np.maximum(self.limits.floor, wide), np.inf)

    def limit_rates(self, sums: Sums, intervals: Mapping[Kind, _Interval]) -> Sums:
        """Move rates into the interval, in cells with at least one row."""
        rows = np.maximum(sums.count, 1.0)[..., None]
        tables: dict[Kind, np.ndarray] = {"soft": sums.score, "hard": sums.decision}
        for kind, interval in intervals.items():
            rates = tables[kind] / rows
            wide = self.width(interval, rows)
            near = np.clip(rates, interval.middle - wide, interval.middle + wide)
            beyond = (np.abs(near - rates) > TOLERANCE) & (sums.count >= 1)[..., None]
            odd: np.ndarray = np.any(beyond, axis=-1)
            total = near.sum(-1, keepdims=True)
            near = near * rates.sum(-1, keepdims=True) / np.where(total > 0, total, 1.0)
            tables[kind] = np.where(odd[..., None], near * rows, tables[kind])
            for i in np.flatnonzero(odd.any((1, 2))):
                points = 100 * float(np.abs(near - rates)[i][odd[i]].max())
                what = "scores" if kind == "soft" else "decisions"
                self.why[i].append(
                    f"its rates of {what} are {points:.1f} points beyond the other sites'"
                )
        return Sums(sums.count, tables["soft"], tables["hard"])

    def influence(self, sums: Sums, sites: slice = slice(None)) -> np.ndarray:
        """Return by how much leaving each of the sites out changes the difference of two groups'
        rates, at most; inf where the others then lack a group."""
        totals = [(each, each.sum(0)) for each in self.statistics(sums)]
        return np.max([_span(self.metric, all, all - each[sites]) for each, all in totals], axis=0)

    def allowed_influence(self, sums: Sums) -> np.ndarray:
        """Return the influence (n,) that each site may have, from that of the others."""
        sites = len(sums.count)
        if sites < self.limits.least_sites or self.limits.influence == np.inf:
            return np.ones(sites)
        means = []
        for each in self.statistics(sums):
            without = each.sum(0) - each  # one row for each site that is left out
            if sites * each.size > MAX_PAIR_NUMBERS:
                effect = _finite(_span(self.metric, each.sum(0), without))
                means.append((effect.sum() - effect) / (sites - 1))
                continue
            effect = _finite(_span(self.metric, without[:, None], without[:, None] - each))
            np.fill_diagonal(effect, 0.0)
            means.append(effect.sum(1) / (sites - 1))
        usual = self.limits.influence_ratio * np.max(means, axis=0)
        most = min(1.0, self.limits.influence_most)
        return np.maximum(self.limits.influence, usual).clip(0.0, most)

    def limit_influence(self, sums: Sums, allowed: np.ndarray) -> Sums:
        """Reduce the site farthest above its allowed influence to that influence, by bisection."""
        effect = self.influence(sums)
        beyond = np.where(np.isfinite(effect), effect - allowed, -1.0)
        site = int(np.argmax(beyond))
        if not beyond[site] > TOLERANCE:
            return sums
        typical = _like_others(sums, site)
        low = 0.0
        high = 1.0
        for _ in range(20):
            part = (low + high) / 2
            moved = _move_toward(sums, site, typical, part)
            still = self.influence(moved, slice(site, site + 1))[0] > allowed[site]
            low, high = (part, high) if still else (low, part)
        self.why[site].append(
            f"without it the gap changes by {100 * effect[site]:.1f} points, and "
            f"{100 * allowed[site]:.1f} are allowed"
        )
        return _move_toward(sums, site, typical, high)

    def moves(self, sent: Sums, limited: Sums) -> np.ndarray:
        """Return by how much the limits on each site moved the difference between two groups (n,).

        `sent` are the sums before the limits, `limited` those after.
        """
        moved = np.zeros(len(self.why))
        for each, original in zip(self.statistics(limited), self.statistics(sent), strict=True):
            total = each.sum(0)
            for i in (i for i, reasons in enumerate(self.why) if reasons):
                change = float(_span(self.metric, total - each[i] + original[i], total))
                moved[i] = max(moved[i], min(change, 1.0))
        return moved

    def compute_leverage(self, sums: Sums, intervals: Mapping[Kind, _Interval]) -> np.ndarray:
        """Return the most (n,) that each site can move the difference between two groups.

        A site may send any sums of as many rows whose rates pass; where its counts are agreed on,
        any rates. The sums tried are the worst for raising one group's rate, for lowering the
        other's, and for both at once, of the two groups that the gap is between, in both
        directions.
        """
        best = np.zeros(len(sums.count))
        rows = np.maximum(sums.rows(), 0.0)
        for kind, each in zip(self.kinds, self.statistics(sums), strict=True):
            total = each.sum(0)
            if not (total[1] > 0).all():
                return np.ones(len(best))
            condition, high, low = map(int, self.metric.worst(total))
            extreme = partial(self.extreme_statistics, sums, kind, intervals[kind])
            for raised, lowered in ((high, low), (low, high)):
                for part in (0.0, 0.5, 1.0):
                    false = extreme(_Push(condition, raised, 1.0), rows * part)
                    false = false + extreme(_Push(condition, lowered, -1.0), rows * (1 - part))
                    best = np.maximum(best, _span(self.metric, total - each + false, total - each))
        return np.minimum(best * MEDIAN_FACTOR, 1.0)

    def extreme_statistics(
        self, sums: Sums, kind: Kind, interval: _Interval, push: _Push, rows: np.ndarray
    ) -> np.ndarray:
        """Return the statistics (n, 2, v, g) with which each site moves a rate as far as it can.

        It claims `rows` (n,) of the group with the label that helps most, or the rows that were
        agreed on, and moves their rates from the median toward the class that helps most, as far
        as the interval allows.
        """
        gain = self.gain(sums, kind, push)
        count = sums.count.sum(0)[:, push.group]
        rates = _table(sums, kind).sum(0)[:, push.group] / np.maximum(count, 1.0)[:, None]
        claimed = np.zeros((len(rows), len(count)))
        # A label that the metric conditions on is worth 0 at the pooled rates, up to rounding. Of
        # labels worth the same, the one whose classes differ most helps most.
        worth = (gain * rates).sum(-1).round(ROUNDED_DIGITS)
        claimed[:, np.lexsort((np.ptp(gain, axis=-1), worth))[-1]] = rows
        count = np.where(self.fixed[:, None], sums.count[:, :, push.group], claimed)
        near = _Interval(*(array[:, push.group] for array in interval))
        width = self.width(near, count[..., None])
        middle = near.middle / np.maximum(near.middle.sum(-1, keepdims=True), TOLERANCE)
        rates = np.broadcast_to(middle, width.shape).copy()
        label = np.arange(len(gain))
        best = gain.argmax(-1)
        worst = gain.argmin(-1)
        step = np.minimum(width[:, label, best], rates[:, label, worst])
        step = np.where(best != worst, step, 0.0)
        rates[:, label, best] += step
        rates[:, label, worst] -= step
        false = sums.map(np.zeros_like)
        false.count[:, :, push.group] = count
        _table(false, kind)[:, :, push.group] = rates * count[..., None]
        return np.asarray(false.statistics(self.metric, kind))

    def gain(self, sums: Sums, kind: Kind, push: _Push) -> np.ndarray:
        """Return how much a row moves the rate as wanted, by its label and class (label, class)."""
        slope, offset = (
            array[:, push.condition] for array in self.metric.affine(sums.count.shape[-2])
        )
        pooled = sums.sum(0).statistics(self.metric, kind)
        rate = self.metric.rates(pooled)[push.condition, push.group]
        level = offset[0] - rate * offset[1]
        return push.sign * (slope[0] - rate * slope[1] + level[:, None])


def _table(sums: Sums, kind: Kind) -> np.ndarray:
    """Return the sums of scores ("soft") or of decisions ("hard")."""
    return sums.score if kind == "soft" else sums.decision


def _like_others(sums: Sums, site: int) -> Sums:
    """Return sums with the site's rows per group, distributed as at the other sites."""
    site_rows = sums.count[site].sum(-2)
    others = np.maximum((sums.count.sum(0) - sums.count[site]).sum(-2), 0.0)
    known = others > 0
    part = np.where(known, site_rows / np.where(known, others, 1.0), 0.0)

    def rescale(table: np.ndarray) -> np.ndarray:
        by_group = (-1, *[1] * (table.ndim - 3))
        rest = (table.sum(0) - table[site]) * part.reshape(by_group)
        return np.where(known.reshape(by_group), rest, table[site])

    return sums.map(rescale)


def _move_toward(sums: Sums, site: int, goal: Sums, part: float) -> Sums:
    """Move one site's sums a part of the way to other sums."""
    return sums.replaced(site, sums[site].map(lambda a, b: a + part * (b - a), goal))


def _median_weights(rows: np.ndarray) -> np.ndarray:
    """Return weights for a median: rows (n, ...), but no more than a quarter of all per site."""
    flat = np.maximum(rows, 0.0).reshape(len(rows), -1)
    limit = _share_limits(-np.sort(-flat, axis=0), MAX_MEDIAN_SHARE)
    return np.minimum(flat, limit).reshape(rows.shape)


def _median(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted median along the first axis: the mean of the lower and upper one."""
    order = np.argsort(values, axis=0, kind="stable")
    ranked = np.take_along_axis(values, order, 0)
    total = np.cumsum(np.take_along_axis(weights, order, 0), axis=0)
    half = total[-1] / 2
    low = np.argmax(total >= half * (1 - 1e-12), axis=0)
    high = np.argmax(total > half * (1 + 1e-12), axis=0)
    ends = [np.take_along_axis(ranked, at[None], 0)[0] for at in (low, high)]
    return (ends[0] + ends[1]) / 2


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, 0.0)


def _span(metric: Metric, total: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return max over conditions of (max - min over groups) of the change in rates from `others`
    to `total`; inf where a group has no rate in either."""
    there = (others[..., 1, :, :] > 0).all((-2, -1)) & (total[..., 1, :, :] > 0).all((-2, -1))
    with np.errstate(invalid="ignore"):
        change = metric.rates(total) - metric.rates(others)
        span = (change.max(-1) - change.min(-1)).max(-1)
    return np.where(there, span, np.inf)
