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
class NoiseLevel:
    """The standard deviations of the noise that sites put on their counts and on their sums."""

    count: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class LimitedSums:
    """What is believed of n sites.

    Parameters
    ----------
    sums
        The sites' sums within the limits.
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
    noise: NoiseLevel | None = None,
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
        The noise on the sums.
    agreed
        For each site, whether its counts were agreed on beforehand.
    reach
        Whether to compute `LimitedSums.reach`; if not, it is what the limit on influence allows.
    """
    sent = stack(list(sums))
    why: list[list[str]] = [[] for _ in sums]
    fixed = np.zeros(len(sums), bool) if agreed is None else np.asarray(agreed, bool)
    table = _Table(sent, tuple(kinds), noise or NoiseLevel()).limit_sizes(limits, fixed, why)
    intervals = {kind: table.rate_interval(kind, limits) for kind in kinds}
    table = table.limit_rates(intervals, why)
    has_own_group = ~np.isfinite(table.influence(metric))  # that the others lack
    allowed = np.where(fixed | has_own_group, 1.0, table.allowed(metric, limits))
    table = table.limit_influence(metric, allowed, why)
    limited = [table.sums[i] if why[i] else own for i, own in enumerate(sums)]
    farthest = allowed
    if reach:
        farthest = np.minimum(_compute_reach(table, metric, intervals, fixed), allowed)
    return LimitedSums(limited, _compute_moves(sent, table, metric, why), farthest, why)


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


@dataclass(frozen=True)
class _Interval:
    """The sites' median of some shares, and how far from it a site with n rows may be."""

    middle: np.ndarray  # (label, group, class)
    variance: np.ndarray  # of the sites' spread and of the median itself
    known: np.ndarray  # whether there is a median
    limits: Limits
    noise: float

    def width(self, rows: np.ndarray) -> np.ndarray:
        """Return the width for a site with so many rows in each cell; inf without a median."""
        error = _squared_error(self.middle, rows, self.noise)
        wide = self.limits.deviations * np.sqrt(self.variance + error)
        return np.where(self.known, np.maximum(self.limits.floor, wide), np.inf)


def _squared_error(middle: np.ndarray, rows: np.ndarray, noise: float) -> np.ndarray:
    """Return the squared standard error of a share of so many rows, if the true one is `middle`.

    One row of each kind is added, because none of ten is not none of all.
    """
    some = np.maximum(rows, 1.0)
    share = (middle.clip(0.0, 1.0) * some + 1) / (some + 2)
    return share * (1 - share) / some + (noise / some) ** 2


def _interval(shares: np.ndarray, rows: np.ndarray, limits: Limits, noise: float) -> _Interval:
    """Return the interval for the sites' shares (n, ...) of so many rows (n, ...)."""
    there = rows > 0
    known = there.sum(0) >= MIN_SITES
    weights = np.where(known, _median_weights(rows), 1.0)
    filled = np.where(there, shares, 0.0)
    middle = _median(filled, weights)
    own = _squared_error(middle, rows, noise)
    excess = np.where(there, (filled - middle) ** 2 / CHI_MEDIAN - own, 0.0)
    tau = np.maximum(_median(excess, weights), 0.0)
    power = weights / weights.sum(0)
    of_median = MEDIAN_LOSS * (power**2 * (tau + own)).sum(0)
    few = 1 + FEW_SITES / np.maximum(there.sum(0), 1)
    return _Interval(middle, few**2 * tau + of_median, known, limits, noise)


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


@dataclass(frozen=True)
class _Table:
    """All sites' sums, (n, label, group + 1, ...)."""

    sums: Sums
    kinds: tuple[Kind, ...]
    noise: NoiseLevel

    def of(self, kind: Kind) -> np.ndarray:
        """Return the sums of scores ("soft") or of decisions ("hard")."""
        return self.sums.score if kind == "soft" else self.sums.decision

    def replace(self, count: np.ndarray, tables: Mapping[Kind, np.ndarray]) -> "_Table":
        score = tables.get("soft", self.sums.score)
        decision = tables.get("hard", self.sums.decision)
        return _Table(Sums(count, score, decision), self.kinds, self.noise)

    def limit_sizes(self, limits: Limits, fixed: np.ndarray, why: list[list[str]]) -> "_Table":
        """Scale down the sums of a site that claims too many rows."""
        rows = np.maximum(self.sums.rows(), 0.0)
        most = size_limit(rows, limits)
        large = (rows > most * (1 + TOLERANCE)) & ~fixed
        if not large.any():
            return self
        part = np.where(large, most / np.maximum(rows, TOLERANCE), 1.0)
        for i in np.flatnonzero(large):
            why[i].append(
                f"it claims {rows[i] / rows.sum():.0%} of all rows, and counts as {most:.0f} rows"
            )
        cut = self.sums.map(lambda t: t * part.reshape(-1, *[1] * (t.ndim - 1)))
        return _Table(cut, self.kinds, self.noise)

    def rate_interval(self, kind: Kind, limits: Limits) -> _Interval:
        """Return where the rates of a site may lie, in each cell."""
        rows = np.where(self.sums.count >= 1, self.sums.count, 0.0)[..., None]
        rates = self.of(kind) / np.maximum(rows, 1.0)
        noise = self.noise.value + self.noise.count
        return _interval(rates, np.broadcast_to(rows, rates.shape), limits, noise)

    def limit_rates(self, intervals: Mapping[Kind, _Interval], why: list[list[str]]) -> "_Table":
        """Move rates into the interval, in cells with a row at least."""
        count = self.sums.count
        tables = {}
        rows = np.maximum(count, 1.0)[..., None]
        for kind, interval in intervals.items():
            rates = self.of(kind) / rows
            wide = interval.width(rows)
            near = np.clip(rates, interval.middle - wide, interval.middle + wide)
            beyond = (np.abs(near - rates) > TOLERANCE) & (count >= 1)[..., None]
            odd: np.ndarray = np.any(beyond, axis=-1)
            if not odd.any():
                continue
            total = near.sum(-1, keepdims=True)
            near = near * rates.sum(-1, keepdims=True) / np.where(total > 0, total, 1.0)
            tables[kind] = np.where(odd[..., None], near * rows, self.of(kind))
            for i in np.flatnonzero(np.any(odd, axis=(1, 2))):
                points = 100 * float(np.abs(near - rates)[i][odd[i]].max())
                what = "scores" if kind == "soft" else "decisions"
                why[i].append(
                    f"its rates of {what} are {points:.1f} points beyond the other sites'"
                )
        return self.replace(count, tables)

    def limit_influence(
        self, metric: Metric, allowed: np.ndarray, why: list[list[str]]
    ) -> "_Table":
        """Bring the site that is farthest beyond its influence back to it, by bisection."""
        effect = self.influence(metric)
        beyond = np.where(np.isfinite(effect), effect - allowed, -1.0)
        site = int(np.argmax(beyond))
        if not beyond[site] > TOLERANCE:
            return self
        typical = self.like_others(site)
        low = 0.0
        high = 1.0
        for _ in range(20):
            part = (low + high) / 2
            still = self.toward(site, typical, part).influence(metric, site)[0] > allowed[site]
            low, high = (part, high) if still else (low, part)
        why[site].append(
            f"without it the gap changes by {100 * effect[site]:.1f} points, and "
            f"{100 * allowed[site]:.1f} are allowed"
        )
        return self.toward(site, typical, high)

    def like_others(self, site: int) -> tuple[np.ndarray, dict[Kind, np.ndarray]]:
        """Return sums of as many rows of each group as the site has, divided as at the others."""
        own = self.sums.count[site]
        count = self.sums.count.sum(0) - own
        group = np.maximum(count.sum(-2), 0.0)
        part = np.where(group > 0, own.sum(-2) / np.where(group > 0, group, 1.0), 0.0)
        tables: dict[Kind, np.ndarray] = {}
        for kind in self.kinds:
            others = self.of(kind).sum(0) - self.of(kind)[site]
            like = others * part[:, None]
            tables[kind] = np.where((group > 0)[:, None], like, self.of(kind)[site])
        return np.where(group > 0, count * part, own), tables

    def toward(
        self, site: int, other: tuple[np.ndarray, dict[Kind, np.ndarray]], part: float
    ) -> "_Table":
        """Move one site's sums a part of the way to other sums."""
        count = self.sums.count.copy()
        count[site] += part * (other[0] - count[site])
        tables: dict[Kind, np.ndarray] = {}
        for kind in self.kinds:
            tables[kind] = self.of(kind).copy()
            tables[kind][site] += part * (other[1][kind] - tables[kind][site])
        return self.replace(count, tables)

    def influence(self, metric: Metric, site: int | None = None) -> np.ndarray:
        """Return by how much leaving each site (or this one) out changes the difference of two
        groups' rates, at most; inf where the others then lack a group."""
        found = []
        for kind in self.kinds:
            each = self.sums.statistics(metric, kind)
            total = each.sum(0)
            own = each if site is None else each[site : site + 1]
            found.append(_span(metric, total, total - own))
        return np.max(found, axis=0)

    def allowed(self, metric: Metric, limits: Limits) -> np.ndarray:
        """Return the influence (n,) that each site may have, from that of the others."""
        sites = len(self.sums.count)
        if sites < limits.least_sites or limits.influence == np.inf:
            return np.ones(sites)
        means = []
        for kind in self.kinds:
            each = self.sums.statistics(metric, kind)
            total = each.sum(0)
            if sites * each.size > MAX_PAIR_NUMBERS:
                own = _finite(_span(metric, total, total - each))
                means.append((own.sum() - own) / (sites - 1))
                continue
            without = total - each  # one row for each site that is left out
            pairs = without[:, None] - each[None]
            effect = _finite(_span(metric, without[:, None], pairs))
            np.fill_diagonal(effect, 0.0)
            means.append(effect.sum(1) / (sites - 1))
        usual = limits.influence_ratio * np.max(means, axis=0)
        return np.maximum(limits.influence, usual).clip(0.0, min(1.0, limits.influence_most))


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


def _compute_moves(sent: Sums, table: _Table, metric: Metric, why: list[list[str]]) -> np.ndarray:
    """Return by how much the limits on each site moved the difference between two groups (n,)."""
    moved = np.zeros(len(why))
    for kind in table.kinds:
        each = table.sums.statistics(metric, kind)
        total = each.sum(0)
        original = sent.statistics(metric, kind)
        for i in (i for i, text in enumerate(why) if text):
            change = float(_span(metric, total - each[i] + original[i], total))
            moved[i] = max(moved[i], min(change, 1.0))
    return moved


def _compute_reach(
    table: _Table, metric: Metric, intervals: Mapping[Kind, _Interval], fixed: np.ndarray
) -> np.ndarray:
    """Return the most (n,) that each site can move the difference between two groups.

    A site may send any sums of as many rows whose rates pass; where its counts are agreed on, any
    rates. The sums tried are the worst for raising one group's rate, for lowering the other's, and
    for both at once, of the two groups that the gap is between, in both directions.
    """
    best = np.zeros(len(table.sums.count))
    rows = np.maximum(table.sums.rows(), 0.0)
    for kind in table.kinds:
        each = table.sums.statistics(metric, kind)
        total = each.sum(0)
        if not (total[1] > 0).all():
            return np.ones(len(best))
        others = total - each
        pair = metric.worst(total)
        ends = (int(pair.high), int(pair.low))
        lies = [
            _Lie(table, metric, kind, intervals[kind], int(pair.condition), group, sign)
            for group in ends
            for sign in (1.0, -1.0)
        ]
        raise_high, lower_high, raise_low, lower_low = lies
        for up, down in ((raise_high, lower_low), (raise_low, lower_high)):
            for part in (0.0, 0.5, 1.0):
                lie = up.statistics(rows * part, fixed)
                lie = lie + down.statistics(rows * (1 - part), fixed)
                best = np.maximum(best, _span(metric, others + lie, others))
    return np.minimum(best * MEDIAN_REACH, 1.0)


@dataclass(frozen=True)
class _Lie:
    """The sums with which a site moves the rate of one group as far as it can."""

    table: _Table
    metric: Metric
    kind: Kind
    interval: _Interval
    condition: int
    group: int
    sign: float  # 1: raise the rate, -1: lower it

    def gain(self) -> np.ndarray:
        """Return how much a row with each label and decision moves the rate (label, class)."""
        slope, offset = self.metric.affine(self.table.sums.count.shape[-2])
        at = self.condition
        pooled = self.table.sums.sum(0).statistics(self.metric, self.kind)
        rate = self.metric.rates(pooled)[at, self.group]
        level = offset[0, at] - rate * offset[1, at]
        return self.sign * (slope[0, at] - rate * slope[1, at] + level[:, None])

    def counts(self, rows: np.ndarray, fixed: np.ndarray) -> np.ndarray:
        """Return the rows (n, label) that a site would claim, of the label that helps most;
        agreed ones are what they are."""
        count = self.table.sums.count.sum(0)[:, self.group]
        rates = self.table.of(self.kind).sum(0)[:, self.group] / np.maximum(count, 1.0)[:, None]
        worth = (self.gain() * rates).sum(-1)
        claimed = np.zeros((len(rows), len(worth)))
        claimed[:, int(np.argmax(worth))] = rows
        return np.where(fixed[:, None], self.table.sums.count[:, :, self.group], claimed)

    def statistics(self, rows: np.ndarray, fixed: np.ndarray) -> np.ndarray:
        """Return the statistics (n, 2, v, g) of such rows (n,), with their rates as far toward
        the class that helps most as the interval allows."""
        count = self.counts(rows, fixed)
        gain = self.gain()
        middle = self.interval.middle[:, self.group]
        middle = middle / np.maximum(middle.sum(-1, keepdims=True), TOLERANCE)
        cells = np.zeros((*self.table.sums.count.shape, 1))
        cells[:, :, self.group, 0] = count
        width = self.interval.width(cells)[:, :, self.group]
        rates = np.broadcast_to(middle, width.shape).copy()
        for label in range(count.shape[-1]):
            good = int(np.argmax(gain[label]))
            bad = int(np.argmin(gain[label]))
            if good != bad:
                step = np.minimum(width[:, label, good], rates[:, label, bad])
                rates[:, label, good] += step
                rates[:, label, bad] -= step
        sums = np.zeros((*self.table.sums.count.shape, rates.shape[-1]))
        sums[:, :, self.group] = rates * count[..., None]
        return np.asarray(Sums(cells[..., 0], sums, sums).statistics(self.metric, self.kind))
