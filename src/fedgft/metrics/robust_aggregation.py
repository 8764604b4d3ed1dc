"""Sums that one site cannot move far: limits on what a federation believes of each of its sites.

Sums that rows can have may still be lies. Three limits hold, in this order, and each leaves the
sums of a site that stays within it exactly as they are:

1. size: no site counts as more than 3/n of all rows, or three times the rows of the next largest;
2. rates: in every (label, group) the share of each class lies near the sites' median,

       |rate_k - median| <= max(floor, z sqrt(f^2 tau^2 + se_k^2 + se_median^2)),

   with se the binomial standard error and tau the sites' own spread beyond it, estimated robustly:
   tau^2 = median_k((rate_k - median)^2 / 0.455 - se_k^2), 0.455 being the median of a squared
   normal, and f = 1 + 5/n because few sites tell little of their spread. So a small honest site is
   not cut, and a large lying one is;
3. influence: leaving a site out changes no difference between two groups' rates by more than
   max(floor, c times the mean of such changes over the other sites, among themselves).

A site beyond a limit is moved back to it: its rates to the interval's end (2), or all of its sums
toward those of the other sites, group by group, at its own number of rows (3). Where a site's
counts were agreed on beforehand it cannot lie about them, and its influence is not limited (3).

What these limits cannot do: a site that declares false counts before the first round looks like an
honest site with unusual people. A rule that costs no honest site anything lets such a lie have the
influence that the most unusual honest site would have: `LimitedSums.reach`.
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
MAX_MEDIAN_SHARE = 0.25  # of the weight in a median that one site has
MIN_SITES = 3  # with rows, for a median that one of them does not decide
FEW_SITES = 5.0  # f = 1 + FEW_SITES / n
MAX_PAIR_NUMBERS = 2_000_000  # of all pairs of sites; beyond, influence is computed in one pass
MEDIAN_REACH = 1.3  # a lying site also moves the median that it is held to
TOLERANCE = 1e-9
ROUNDED_DIGITS = 9  # of numbers that are equal if they differ by rounding


@dataclass(frozen=True)
class Limits:
    """How far one site may be from the others; the rules are at the top of this file.

    `deviations` is z, and `floor` is always allowed. `shares` over the number of sites, or
    `size_ratio` times the next largest, bounds a site's share of the rows. `influence` is always
    allowed on the difference between two groups, and `influence_ratio` times as much as the other
    sites have on average, but never more than `influence_most`. Of fewer than `least_sites` sites
    the influence is not limited: there is no telling which of them is unusual. An update may be
    `update_ratio` times as long as the sites' median, or three times as long as the next longest.
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
                raise FedgftError(f"Limits: {name} is {value}: it must be a number from 0 on")


NO_LIMITS = Limits(deviations=np.inf, shares=np.inf, influence=np.inf, update_ratio=np.inf)


@dataclass(frozen=True)
class LimitedSums:
    """The sums of n sites within the limits.

    Parameters
    ----------
    sums
        The sums of each site; as it sent them if it is within all limits.
    moved
        (n,): by how much the limits on a site moved the difference between two groups' rates, at
        most; zero where its sums are as it sent them.
    reach
        (n,): the most that a site could have moved it with any sums of as many rows; 1 where it
        alone holds a group.
    why
        The limits that each site was beyond, as sentences.
    """

    sums: list[Sums]
    moved: np.ndarray
    reach: np.ndarray
    why: list[list[str]]


def limit_sites(
    sums: Sequence[Sums],
    metric: Metric,
    kinds: Sequence[Kind],
    limits: Limits,
    *,
    noise: float = 0.0,
    agreed: Sequence[bool] | None = None,
    reach: bool = True,
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
    reach
        Whether to compute `LimitedSums.reach`; if not, it is what the limit on influence allows.
    """
    sent = stack(list(sums))
    fixed = np.zeros(len(sums), bool) if agreed is None else np.asarray(agreed, bool)
    why: list[list[str]] = [[] for _ in sums]
    limiter = _Limiter(metric, tuple(kinds), limits, noise, fixed=fixed, why=why)
    table = limiter.limit_sizes(sent)
    intervals = {kind: limiter.rate_interval(table, kind) for kind in kinds}
    table = limiter.limit_rates(table, intervals)
    has_own_group = ~np.isfinite(limiter.influence(table))  # that the others lack
    allowed = np.where(fixed | has_own_group, 1.0, limiter.allowed_influence(table))
    table = limiter.limit_influence(table, allowed)
    limited = [table[i] if limiter.why[i] else own for i, own in enumerate(sums)]
    farthest = np.minimum(limiter.reach(table, intervals), allowed) if reach else allowed
    return LimitedSums(limited, limiter.moves(sent, table), farthest, limiter.why)


def size_limit(rows: Sequence[float] | np.ndarray, limits: Limits) -> float:
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

    Where there are too few sites for such a share, it is the smallest size that is not zero: all
    count alike.
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
    """A rate that a lying site moves: of a group under a condition, up (1) or down (-1)."""

    condition: int
    group: int
    sign: float


@dataclass(frozen=True)
class _Limiter:
    """The limits of one call; its methods take all sites' sums, (n, label, group + 1, ...)."""

    metric: Metric
    kinds: tuple[Kind, ...]
    limits: Limits
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
        own = self.squared_error(middle, rows)
        excess = np.where(there, (filled - middle) ** 2 / CHI_MEDIAN - own, 0.0)
        tau = np.maximum(_median(excess, weights), 0.0)
        power = weights / weights.sum(0)
        of_median = MEDIAN_LOSS * (power**2 * (tau + own)).sum(0)
        few = 1 + FEW_SITES / np.maximum(there.sum(0), 1)
        return _Interval(middle, few**2 * tau + of_median, known)

    def squared_error(self, middle: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the squared standard error of a rate of so many rows, if the true one is `middle`.

        One row of each kind is added, because none of ten is not none of all.
        """
        some = np.maximum(rows, 1.0)
        share = (middle.clip(0.0, 1.0) * some + 1) / (some + 2)
        return share * (1 - share) / some + (self.noise / some) ** 2

    def width(self, interval: _Interval, rows: np.ndarray) -> np.ndarray:
        """Return how far from the median a site with so many rows may be; inf without a median."""
        error = self.squared_error(interval.middle, rows)
        wide = self.limits.deviations * np.sqrt(interval.variance + error)
        return np.where(interval.known, np.maximum(self.limits.floor, wide), np.inf)

    def limit_rates(self, sums: Sums, intervals: Mapping[Kind, _Interval]) -> Sums:
        """Move rates into the interval, in cells with a row at least."""
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
                own = _finite(_span(self.metric, each.sum(0), without))
                means.append((own.sum() - own) / (sites - 1))
                continue
            effect = _finite(_span(self.metric, without[:, None], without[:, None] - each))
            np.fill_diagonal(effect, 0.0)
            means.append(effect.sum(1) / (sites - 1))
        usual = self.limits.influence_ratio * np.max(means, axis=0)
        most = min(1.0, self.limits.influence_most)
        return np.maximum(self.limits.influence, usual).clip(0.0, most)

    def limit_influence(self, sums: Sums, allowed: np.ndarray) -> Sums:
        """Bring the site that is farthest beyond its influence back to it, by bisection."""
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

    def reach(self, sums: Sums, intervals: Mapping[Kind, _Interval]) -> np.ndarray:
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
            lie = partial(self.lie, sums, kind, intervals[kind])
            for raised, lowered in ((high, low), (low, high)):
                for part in (0.0, 0.5, 1.0):
                    lies = lie(_Push(condition, raised, 1.0), rows * part)
                    lies = lies + lie(_Push(condition, lowered, -1.0), rows * (1 - part))
                    best = np.maximum(best, _span(self.metric, total - each + lies, total - each))
        return np.minimum(best * MEDIAN_REACH, 1.0)

    def lie(
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
    """Return sums of as many rows of each group as the site has, divided as at the others."""
    own = sums.count[site].sum(-2)
    others = np.maximum((sums.count.sum(0) - sums.count[site]).sum(-2), 0.0)
    known = others > 0
    part = np.where(known, own / np.where(known, others, 1.0), 0.0)

    def rescale(table: np.ndarray) -> np.ndarray:
        by_group = (-1, *[1] * (table.ndim - 3))
        rest = (table.sum(0) - table[site]) * part.reshape(by_group)
        return np.where(known.reshape(by_group), rest, table[site])

    return sums.map(rescale)


def _move_toward(sums: Sums, site: int, goal: Sums, part: float) -> Sums:
    """Move one site's sums a part of the way to other sums."""
    pairs = zip(vars(sums[site]).values(), vars(goal).values(), strict=True)
    return sums.replaced(site, Sums(*(own + part * (other - own) for own, other in pairs)))


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
