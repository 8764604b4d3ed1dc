"""Scan all subgroups for rates that differ, with a correction for looking many times.

A subgroup is everybody with certain values of one, two or three attributes, such as women under 40.
Its rate is compared with that of everybody else whose attributes are recorded; and any two
subgroups by the same attributes are compared with each other. Each comparison is a look.

The two kinds of comparison are two families. Each gets half of the error probability of 5%, so the
chance that a scan of a fair model names any difference as beyond chance is at most 5%:

- p-values are those of Fisher's exact test (twice the smaller tail), adjusted by Holm's method;
- intervals hold for all looks of a family at once: limits of Clopper & Pearson at Bonferroni's
  level, combined as Newcombe combines Wilson's.

Both are conservative: subgroups overlap, and counts are whole numbers. Where rows have weights, or
sites added noise, the tests use the number of rows that a rate is worth; where sites withheld
counts, they use the rates that are closest to each other.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from fedgft.auditing.rates import Rates, View, estimate_rates
from fedgft.auditing.score_samples import has_certain_groups
from fedgft.metrics import get_metric
from fedgft.metrics.intervals import difference
from fedgft.validation import check_integer

MIN_ROWS = 30  # smallest number of rows in the denominator of a rate that is compared
MAX_ATTRIBUTES = 3  # attributes that a subgroup combines
MAX_TESTED = 1000  # looks of a family with an exact test: those that seem least due to chance
LEVEL = 0.05  # chance of any false alarm, half of it in each family
SHOWN = 10  # subgroups, and pairs, in the summary of an audit
SCANNED = ("sp", "eop", "fpr", "predictive-parity", "acc")  # equalized odds is eop and fpr


class SubgroupGap(TypedDict):
    """The rate of a subgroup and that of another one, or of everybody else (`other` is None).

    `difference` is `rate` - `other_rate`. `low` and `high` are its limits, for all looks at once,
    and `p` is its adjusted p-value. The difference is `beyond_chance` if `p` is at most 5%.
    `condition` is that of the metric, such as "class yes", and `by` names the attributes.
    """

    metric: str
    condition: str
    by: str
    group: str
    other: str | None
    n: float
    other_n: float
    rate: float
    other_rate: float
    difference: float
    low: float
    high: float
    p: float
    beyond_chance: bool


class Scan(TypedDict):
    """What a scan found: the largest differences that are certain come first.

    `subgroups` is the number of subgroups by up to three attributes, and `too_small` the number of
    those with fewer than `min_rows` rows, which are not compared. `looks` are the numbers of
    comparisons with everybody else and between pairs; `beyond_chance` are the numbers of those
    whose adjusted p-value is at most 5%, among the thousand of each kind that differ most clearly.
    """

    min_rows: int
    subgroups: int
    too_small: int
    looks: dict[str, int]
    beyond_chance: dict[str, int]
    against_rest: list[SubgroupGap]
    pairs: list[SubgroupGap]


def scan_subgroups(
    views: Sequence[View], *, min_rows: int = MIN_ROWS, shown: int = SHOWN
) -> Scan | None:
    """Compare all subgroups with everybody else, and all pairs of subgroups by the same attributes.

    Parameters
    ----------
    views
        The views by all combinations of attributes; those of more than three are left out.
    min_rows
        The smallest number of rows in the denominator of a rate that is compared.
    shown
        The largest number of subgroups, and of pairs, to return.

    Returns
    -------
    Scan or None
        None if there is only one attribute: then the gaps of the audit compare its groups. None
        also if groups were randomized or are known by probability: the tests need certain ones.
    """
    min_rows = check_integer("min_rows", min_rows, least=1)
    shown = check_integer("shown", shown, least=0)
    scanned = [view for view in views if len(view.attributes) <= MAX_ATTRIBUTES]
    if not all(map(has_certain_groups, scanned)):
        return None
    if len({name for view in scanned for name in view.attributes}) < 2:
        return None
    rest = _Family(_look_at_rest(scanned, min_rows))
    pairs = _Family(_look_at_pairs(scanned, min_rows))
    sizes = np.concatenate([view.sums.count[..., :-1].sum((0, 1)) for view in scanned])
    return {
        "min_rows": min_rows,
        "subgroups": len(sizes),
        "too_small": int((sizes < min_rows).sum()),
        "looks": {"against_rest": rest.looks, "pairs": pairs.looks},
        "beyond_chance": {"against_rest": rest.alarms, "pairs": pairs.alarms},
        "against_rest": rest.top(shown),
        "pairs": pairs.top(shown),
    }


@dataclass(frozen=True, eq=False)
class _Looks:
    """Comparisons under one condition of one metric in one view, between `first` and `second`.

    `groups` holds the positions of the groups, (look,). So does `others`, which is None if they are
    compared with everybody else.
    """

    view: View
    metric: str
    condition: str
    first: Rates
    second: Rates
    groups: np.ndarray
    others: np.ndarray | None

    def __getitem__(self, index: np.ndarray) -> "_Looks":
        return replace(
            self,
            first=self.first[index],
            second=self.second[index],
            groups=self.groups[index],
            others=None if self.others is None else self.others[index],
        )


def _look_at_rest(views: Sequence[View], min_rows: int) -> Iterator[_Looks]:
    """Yield the comparisons of every subgroup with everybody else."""
    for view in views:
        rest = everybody_else(view)
        kept = np.arange(len(view.groups))
        if len(kept) == 2:  # each is the rest of the other: look once
            kept = kept[[int(view.sums.count.sum((0, 1))[:2].argmin())]]
        for name in SCANNED:
            metric = get_metric(name)
            one, other = (estimate_rates(metric, each, "hard") for each in (view, rest))
            for v, condition in enumerate(metric.condition_names(view.spec.classes)):
                mine, theirs = one[v, kept], other[v, kept]
                known = _large_enough(mine, min_rows) & _large_enough(theirs, min_rows)
                yield _Looks(view, name, condition, mine[known], theirs[known], kept[known], None)


def _look_at_pairs(views: Sequence[View], min_rows: int) -> Iterator[_Looks]:
    """Yield the comparisons of all pairs of subgroups by the same attributes.

    Two groups of one attribute are left out: each is the rest of the other.
    """
    for view in views:
        if len(view.groups) < 3:
            continue
        for name in SCANNED:
            metric = get_metric(name)
            rates = estimate_rates(metric, view, "hard")
            for v, condition in enumerate(metric.condition_names(view.spec.classes)):
                kept = np.flatnonzero(_large_enough(rates[v], min_rows))
                i, j = (kept[at] for at in np.triu_indices(len(kept), 1))
                yield _Looks(view, name, condition, rates[v, i], rates[v, j], i, j)


def _large_enough(rates: Rates, min_rows: int) -> np.ndarray:
    """Return whether each rate is known and is one of at least `min_rows` rows."""
    return rates.valid & ~np.isnan(rates.rate) & (rates.n_min >= min_rows)


def everybody_else(view: View) -> View:
    """Return the view in which each group holds all people but those of this group.

    People whose group is not recorded are in none.
    """

    def rest_of(values: np.ndarray) -> np.ndarray:
        known = values[:, :, :-1]
        rest = known.sum(2, keepdims=True) - known
        return np.concatenate((rest, np.zeros_like(values[:, :, -1:])), 2)

    squares = None if view.squares is None else rest_of(view.squares)
    return replace(
        view,
        sums=view.sums.map(rest_of),
        noise=rest_of(view.noise),
        slack=rest_of(view.slack),
        squares=squares,
    )


class _Family:
    """Comparisons that share half of the error probability.

    Those that seem least due to chance are tested exactly; the p-value of all others is 1.
    """

    def __init__(self, parts: Iterable[_Looks]) -> None:
        self.looks = 0
        self.parts = []
        for part in parts:  # one at a time: of a thousand groups there are half a million pairs
            self.looks += len(part.groups)
            self.parts.append(
                part[_find_likely(_Shares.of([part.first]), _Shares.of([part.second]))]
            )
        sizes = [len(part.groups) for part in self.parts]
        of_part = np.repeat(np.arange(len(sizes)), sizes)
        position = np.concatenate([np.arange(size) for size in sizes] or [np.zeros(0, int)])
        first, second = (
            _Shares.of([getattr(part, side) for part in self.parts]) for side in ("first", "second")
        )
        tested = _find_likely(first, second)
        self.place = list(zip(of_part[tested].tolist(), position[tested].tolist(), strict=True))
        self.first, self.second = first[tested], second[tested]
        adjusted = adjust_by_holm(fisher(self.first, self.second), self.looks)
        self.p = np.minimum(2 * adjusted, 1.0)  # half of the level
        self.low, self.high = _limits(self.first, self.second, self.looks)

    @property
    def alarms(self) -> int:
        """The number of differences beyond chance."""
        return int((self.p <= LEVEL).sum())

    def top(self, number: int) -> list[SubgroupGap]:
        """Return the comparisons with the largest differences that are certain."""
        certain = np.maximum(np.maximum(self.low, -self.high), 0.0)
        order = np.lexsort((self.p, -np.round(certain, 12)))
        return [self._describe(int(at)) for at in order[:number]]

    def _describe(self, at: int) -> SubgroupGap:
        number, look = self.place[at]
        part = self.parts[number]
        names = part.view.groups
        one, other = part.first[look], part.second[look]
        group = names[part.groups[look]]
        against = None if part.others is None else names[part.others[look]]
        low, high = float(self.low[at]), float(self.high[at])
        if against is not None and one.rate < other.rate:  # the higher rate first
            one, other, group, against = other, one, against, group
            low, high = -high, -low
        return {
            "metric": part.metric,
            "condition": part.condition,
            "by": part.view.title,
            "group": group,
            "other": against,
            "n": float(one.n),
            "other_n": float(other.n),
            "rate": float(one.rate),
            "other_rate": float(other.rate),
            "difference": float(one.rate - other.rate),
            "low": low,
            "high": high,
            "p": float(self.p[at]),
            "beyond_chance": bool(self.p[at] <= LEVEL),
        }


@dataclass(frozen=True, eq=False)
class _Shares:
    """Shares of rows as arrays (look,): as estimated, at least, at most, and of how many rows."""

    rate: np.ndarray
    least: np.ndarray
    most: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[Rates]) -> "_Shares":
        """Return the rates of all parts; noise reduces the rows that a rate is worth."""
        rate, least, most, n, noise = (
            np.concatenate([getattr(part, key) for part in parts] or [np.zeros(0)])
            for key in ("rate", "rate_min", "rate_max", "n_min", "variance")
        )
        spread = np.maximum(rate * (1 - rate), 1 / (4 * np.maximum(n, 1)))
        return cls(rate, least, most, spread / (spread / np.maximum(n, 1) + noise))

    def __getitem__(self, index: np.ndarray) -> "_Shares":
        return _Shares(self.rate[index], self.least[index], self.most[index], self.rows[index])


@np.errstate(divide="ignore", invalid="ignore")
def _find_likely(first: _Shares, second: _Shares) -> np.ndarray:
    """Return the positions of the looks whose shares are the most standard errors apart."""
    pooled = (first.rate * first.rows + second.rate * second.rows) / (first.rows + second.rows)
    error = np.sqrt(pooled * (1 - pooled) * (1 / first.rows + 1 / second.rows))
    score = np.nan_to_num(np.abs(first.rate - second.rate) / error)
    return np.argsort(-score, kind="stable")[:MAX_TESTED]


def fisher(first: _Shares, second: _Shares) -> np.ndarray:
    """Return the p-values of Fisher's exact test: twice the smaller tail, at most 1.

    If the shares are known only up to a range, they are those that are closest to each other.
    """
    from scipy.stats import hypergeom  # here: it takes as long to load as all of fedgft

    up = first.rate >= second.rate
    upper, lower = (
        np.where(up, a, b) for a, b in ((first.least, second.least), (second.most, first.most))
    )
    rows = [np.where(up, a, b) for a, b in ((first.rows, second.rows), (second.rows, first.rows))]
    sizes = [np.maximum(np.floor(each + 1e-6), 1.0) for each in rows]
    hits = [np.rint(share * size) for share, size in zip((upper, lower), sizes, strict=True)]
    tail = hypergeom.sf(hits[0] - 1, sizes[0] + sizes[1], hits[0] + hits[1], sizes[0])
    return np.where(upper > lower, np.minimum(2 * np.nan_to_num(tail, nan=1.0), 1.0), 1.0)


def adjust_by_holm(p: np.ndarray, looks: int) -> np.ndarray:
    """Return p-values adjusted by Holm's method, of the smallest ones among `looks` p-values."""
    order = np.argsort(p, kind="stable")
    adjusted = np.maximum.accumulate(p[order] * (looks - np.arange(len(p))))
    out = np.empty_like(p)
    out[order] = np.minimum(adjusted, 1.0)
    return out


def _limits(first: _Shares, second: _Shares, looks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return limits of first - second for all looks at once."""
    tail = LEVEL / 4 / max(looks, 1)  # half of the level, two sides
    ends = [_exact_limits(each, tail) for each in (first, second)]
    low, _ = difference(first.least, ends[0], second.most, ends[1])
    _, high = difference(first.most, ends[0], second.least, ends[1])
    return np.clip(low, -1.0, 1.0), np.clip(high, -1.0, 1.0)


def _exact_limits(shares: _Shares, tail: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the limits of Clopper & Pearson (1934): each is missed with at most this chance."""
    from scipy.special import betaincinv

    n = shares.rows
    with np.errstate(invalid="ignore"):
        few, many = (np.clip(share * n, 0.0, n) for share in (shares.least, shares.most))
        low = np.where(few > 1e-9, betaincinv(np.maximum(few, 1e-9), n - few + 1, tail), 0.0)
        rest = n - many
        high = np.where(rest > 1e-9, betaincinv(many + 1, np.maximum(rest, 1e-9), 1 - tail), 1.0)
    return low, high
