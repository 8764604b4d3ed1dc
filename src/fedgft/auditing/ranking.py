"""How well scores rank the people of each group, and who is at the top, from counts by bin.

- The area under the ROC curve of a group, P(score of a positive > score of a negative) + ties / 2,
  within the group.
- The cross-group area of groups a and b: the same with the positives of a and the negatives of b
  (xAUC of Kallus & Zhou 2019). If that of (a, b) is larger than that of (b, a), the positives of a
  are ranked above the negatives of b more often than the other way round.
- The share of each group among the people with the highest k percent of all scores, and the share
  of each group that is among them.

Rows in the same bin may be in either order, which gives the least and the largest possible value of
each number. Intervals are over rows. The variance of an area is that of DeLong, DeLong &
Clarke-Pearson (1988); an area A with variance v has the Wilson interval of a share of A (1 - A) / v
rows. This number is limited, because v is 0 if all positives are above all negatives. The variances
at the top account for the cut-off, which is estimated, too.
"""

from statistics import NormalDist
from typing import TypedDict

import numpy as np

from fedgft.auditing.rates import (
    MIN_SIGNAL,
    Rates,
    View,
    bound_largest,
    estimate_difference,
    find_largest_gap,
)
from fedgft.auditing.score_samples import ScoreSamples, compares_scores, sample_scores, scored_class
from fedgft.metrics.intervals import FEW, folded

MAX_CROSSED = 12  # groups of a view for which cross-group areas are computed
TOP_SHARES = (0.01, 0.05, 0.10, 0.20, 0.50)
MARGIN = 0.05  # shares of people on both sides of the cut-off that show who is near it
Number = float | None


class Area(TypedDict):
    """An area under a ROC curve; `least` to `most` are possible given the bins of the scores.

    `low` and `high` are the limits of the 95% interval, which includes this range.
    """

    value: Number
    least: Number
    most: Number
    low: Number
    high: Number


class CrossArea(Area):
    """The chance that a positive of group `positives` scores above a negative of `negatives`."""

    positives: str
    negatives: str


class AreaGap(TypedDict):
    """The largest difference between two areas, with its 95% interval; the higher is first."""

    gap: Number
    low: Number
    high: Number
    pair: list[str] | None


class TopGroup(TypedDict):
    """One group at the top.

    `share` is the group's share of the people at the top, `of_all` its share of all people, and
    `selected` the share of the group that is at the top. `..._least` and `..._most` are possible
    given the bins, and `..._low` and `..._high` are the limits of the 95% intervals.
    """

    of_all: Number
    share: Number
    share_least: Number
    share_most: Number
    share_low: Number
    share_high: Number
    selected: Number
    selected_least: Number
    selected_most: Number
    selected_low: Number
    selected_high: Number


class Top(TypedDict):
    """The people with the highest scores: the share `top` of all people with a recorded group.

    The cut-off lies between the scores `above` and `below`; of the people with the same bin as the
    cut-off, each group has its share at the top.
    """

    top: float
    n: float
    above: float
    below: float
    groups: dict[str, TopGroup]


class Ranking(TypedDict):
    """How the scores of one class rank people.

    A group without positives or without negatives has no area; then `gap` is that among the other
    groups and has no upper limit. `cross` holds all pairs of the 12 largest groups, and `cross_gap`
    is the largest difference between a pair and the same pair the other way round.
    """

    areas: dict[str, Area]
    gap: AreaGap
    cross: list[CrossArea]
    cross_gap: AreaGap
    tops: list[Top]


def summarize_ranking(view: View) -> dict[str, Ranking] | None:
    """Return how the scores of each class rank the groups.

    The result is None if a site left out scores, or if groups are uncertain.

    With two classes there is one score, that of the positive class. With more, every class has a
    score, and its positives are the rows with this label.
    """
    if not compares_scores(view):
        return None
    return {name: _rank_class(view, s) for s, name in enumerate(view.scored_classes)}


def _rank_class(view: View, score: int) -> Ranking:
    """Return the `Ranking` of the class with the score at this position."""
    label = scored_class(view, score)
    others = [c for c in range(len(view.spec.classes)) if c != label]
    positives = sample_scores(view, score, [label])
    negatives = sample_scores(view, score, others)
    everyone = sample_scores(view, score)
    each = np.arange(len(view.groups))
    areas = estimate_areas(positives, negatives, each, each)
    low, high = areas.interval()
    gap = find_largest_gap(areas)
    crossed = everyone.largest(MAX_CROSSED)
    cross, cross_gap = _cross_areas(positives, negatives, crossed)
    return {
        "areas": {name: _read_area(areas, low, high, g) for g, name in enumerate(view.groups)},
        "gap": {
            "gap": gap.gap,
            "low": gap.low,
            "high": gap.high if areas.valid.all() else None,
            "pair": None if gap.pair is None else [view.groups[g] for g in gap.pair],
        },
        "cross": cross,
        "cross_gap": cross_gap,
        "tops": [summarize_top(everyone, top) for top in TOP_SHARES],
    }


@np.errstate(divide="ignore", invalid="ignore")
def estimate_areas(
    positives: ScoreSamples, negatives: ScoreSamples, first: np.ndarray, second: np.ndarray
) -> Rates:
    """Return areas between the positives of some groups and the negatives of others.

    Parameters
    ----------
    positives, negatives
        The scores of the positives and of the negatives of all groups.
    first, second
        The positions of the groups of the positives and of the negatives, (area,).

    Returns
    -------
    Rates
        Arrays (1, area). `n` is the number of rows of a share that would be known as well.
    """
    yes = positives.shares[:, first]
    no = negatives.shares[:, second]
    below = negatives.below[:, second]
    # A positive and a negative in the same bin may be in either order, so such a pair counts 1/2.
    above_no = below[0][:, :-1] + no[0] / 2
    area = (yes[0] * above_no).sum(-1)
    least = (yes[1] * below[2][:, :-1]).sum(-1)
    most = (yes[2] * below[1][:, 1:]).sum(-1)
    below_yes = 1 - positives.below[0][first][:, 1:] + yes[0] / 2
    variance = positives.sampling_variance(first, above_no)
    variance += negatives.sampling_variance(second, below_yes)
    noise = positives.noise_variance(first, above_no)
    noise += negatives.noise_variance(second, below_yes)
    area = np.clip(area, 0.0, 1.0)
    m = positives.effective[first]
    n = negatives.effective[second]
    least_rows = np.minimum(m, n)  # by simulation: few rows make the variance too small by chance
    rows = 6 * least_rows / (least_rows + 10) * m * n / (m + n)
    rows = np.where(variance > 0, np.minimum(area * (1 - area) / variance, rows), rows)
    rows = np.where(np.isnan(area), np.nan, rows)
    ends = (np.clip(least, 0.0, area), np.clip(most, area, 1.0))
    return Rates(
        rate=area[None],
        n=rows[None],
        rate_min=ends[0][None],
        rate_max=ends[1][None],
        n_min=rows[None],
        variance=noise[None],
        valid=(positives.enough[first] & negatives.enough[second])[None],
        is_proportion=True,
    )


def _cross_areas(
    positives: ScoreSamples, negatives: ScoreSamples, crossed: np.ndarray
) -> tuple[list[CrossArea], AreaGap]:
    """Return the areas of all pairs of different groups, and the largest gap of a pair."""
    names = positives.groups
    i, j = np.triu_indices(len(crossed), 1)
    one, other = crossed[i], crossed[j]
    there = estimate_areas(positives, negatives, one, other)
    back = estimate_areas(positives, negatives, other, one)
    found: list[CrossArea] = []
    for areas, ends in ((there, (one, other)), (back, (other, one))):
        low, high = areas.interval()
        for at, (g, h) in enumerate(zip(*ends, strict=True)):
            area = _read_area(areas, low, high, at)
            found.append(CrossArea(positives=names[g], negatives=names[h], **area))
    distance = there.rate[0] - back.rate[0]
    if np.isnan(distance).all():  # also if there is one group only
        return found, {"gap": None, "low": None, "high": None, "pair": None}
    # The two areas of a pair are of different rows, so they are independent.
    z = NormalDist().inv_cdf(1 - 0.025 / len(one))
    limits = estimate_difference(there, back, z)
    complete = bool(positives.enough.all() and negatives.enough.all())
    low, high = bound_largest(folded(limits.low, limits.high), complete=complete)
    at = int(np.nanargmax(np.abs(distance)))
    pair = [names[one[at]], names[other[at]]]
    return found, {
        "gap": float(abs(distance[at])),
        "low": low,
        "high": high,
        "pair": pair if distance[at] >= 0 else pair[::-1],
    }


def _read_area(areas: Rates, low: np.ndarray, high: np.ndarray, at: int) -> Area:
    """Return one area in plain values."""
    numbers = (areas.rate, areas.rate_min, areas.rate_max, low, high)
    value, least, most, lower, upper = (_plain(each[0, at]) for each in numbers)
    return {"value": value, "least": least, "most": most, "low": lower, "high": upper}


def _plain(value: float) -> Number:
    """Return the number, or None for NaN."""
    return None if np.isnan(value) else float(value)


@np.errstate(divide="ignore", invalid="ignore")
def summarize_top(samples: ScoreSamples, top: float) -> Top:
    """Return who is among the people with the highest scores.

    Parameters
    ----------
    samples
        The scores of all groups.
    top
        The share of people to take, such as 0.05.
    """
    taken = cut_top(samples.counts[0], top)
    least, most = _bound_taken(samples, top)
    number = top * samples.rows.sum()
    shares, selected = _estimate_top(samples, top, taken, least, most)
    low, high = shares.interval()
    rate_low, rate_high = selected.interval()
    columns = {
        "of_all": samples.rows / samples.rows.sum(),
        "share": shares.rate,
        "share_least": shares.rate_min,
        "share_most": shares.rate_max,
        "share_low": low,
        "share_high": high,
        "selected": selected.rate,
        "selected_least": selected.rate_min,
        "selected_most": selected.rate_max,
        "selected_low": rate_low,
        "selected_high": rate_high,
    }
    groups = {
        name: TopGroup(**{key: _plain(values[g]) for key, values in columns.items()})
        for g, name in enumerate(samples.groups)
    }
    bins = samples.counts.shape[-1]
    first, last = (int(find_cut(samples.counts[end].sum(0), top)) for end in (1, 2))
    return {
        "top": top,
        "n": float(number),
        "above": first / bins,
        "below": (last + 1) / bins,
        "groups": groups,
    }


def find_cut(rows: np.ndarray, top: float) -> np.ndarray:
    """Return the bin that the top begins in, (...). `rows` (..., bin) are those of all groups."""
    above = np.cumsum(rows[..., ::-1], -1)[..., ::-1]  # rows in the bin or above it
    total = above[..., :1]
    reached = above >= (top - 1e-9) * total
    return np.asarray(rows.shape[-1] - 1 - reached[..., ::-1].argmax(-1))


def cut_top(counts: np.ndarray, top: float) -> np.ndarray:
    """Return the rows of each group at the top, (group,).

    Of the people in the bin that the top begins in, the same share of every group is taken.

    Parameters
    ----------
    counts
        (group, bin): the rows in each bin.
    top
        The share of people to take.
    """
    cut = int(find_cut(counts.sum(0), top))
    above = counts[:, cut + 1 :].sum(-1)
    inside = counts[:, cut]
    wanted = top * counts.sum() - above.sum()
    return above + inside * (wanted / inside.sum() if inside.sum() > 0 else 0.0)


def _bound_taken(samples: ScoreSamples, top: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest possible numbers of rows at the top, (group,)."""
    total = samples.counts.sum(1, keepdims=True)  # (3, 1, bin)
    own = samples.counts[1:]  # the least number at the top: own rows low, the others' high
    others = (total - samples.counts)[:0:-1]
    rows = own + others
    cut = find_cut(rows, top)[..., None]

    def count_from(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rest = np.cumsum(counts[..., ::-1], -1)[..., ::-1]
        inside = np.take_along_axis(counts, cut, -1)
        return (np.take_along_axis(rest, cut, -1) - inside)[..., 0], inside[..., 0]

    above, inside = count_from(own)
    others_above, others_inside = count_from(others)
    wanted = top * rows.sum(-1) - above - others_above
    least = above[0] + np.maximum(wanted[0] - others_inside[0], 0.0)
    return least, above[1] + np.minimum(wanted[1], inside[1])


def _estimate_top(
    samples: ScoreSamples, top: float, taken: np.ndarray, least: np.ndarray, most: np.ndarray
) -> tuple[Rates, Rates]:
    """Return the shares of the groups at the top, and the shares of each group that is there.

    Let a = 1 for a person at the top, else 0, p_g and q_g the shares of group g of all people and
    at the top, k the top, and m_g the share of the group of those near the cut-off. If the cut-off
    rises, people leave the top in the proportions m. So a person of group h adds to the estimates

        q_g: ((1[h = g] - m_g) a - (q_g - m_g) k) / k
        r_g: 1[h = g] (a - r_g) / p_g - m_g (a - k) / p_g.
    """
    rows = samples.rows
    total = rows.sum()
    number = top * total
    weight = np.where(samples.effective > 0, rows / samples.effective, 1.0)  # 1 without weights
    people = total / ((rows / total) @ weight)  # effective number of all people
    share = np.clip(taken / number, 0.0, 1.0)
    of_all = rows / total
    rate = np.clip(taken / rows, 0.0, 1.0)
    near = _shares_near(samples, top)
    # Two more people keep the variance above 0 where all, or none, of those at the top are of one
    # group.
    seen = np.nan_to_num((share * number + 2 * of_all) / (number + 2))
    spread = seen * (1 - near) ** 2 + (1 - seen) * near**2
    variance = np.maximum(spread / top - (seen - near) ** 2, 0.0) / people
    rates = np.nan_to_num(np.minimum(seen * top / of_all, 1.0))
    own = of_all * rates * (1 - rates) * ((1 - near) ** 2 - near**2)
    within = own + near**2 * (of_all * rates * (1 - rates)).sum()
    between = near**2 * (of_all * (rates - top) ** 2).sum()
    rate_variance = (within + between) / of_all**2 / people
    noise = _top_noise(samples, top, near)
    known = samples.estimable & (number > MIN_SIGNAL * np.sqrt(samples.noise.sum()))
    enough = known & samples.enough & (top * people >= FEW)
    return (
        _as_rates(
            np.where(known, share, np.nan),
            (least / number, most / number),
            variance,
            noise / number**2,
            np.full_like(share, top * people),
            enough,
        ),
        _as_rates(
            np.where(known, rate, np.nan),
            (least / rows, most / rows),
            rate_variance,
            noise / rows**2,
            samples.effective,
            enough,
        ),
    )


def _shares_near(samples: ScoreSamples, top: float) -> np.ndarray:
    """Return the shares of the groups of those near the cut-off, (group,)."""
    step = min(top / 2, MARGIN)
    outer, inner = (cut_top(samples.counts[0], top + side * step) for side in (1, -1))
    return np.clip((outer - inner) / (2 * step * samples.rows.sum()), 0.0, 1.0)


def _top_noise(samples: ScoreSamples, top: float, near: np.ndarray) -> np.ndarray:
    """Return the variance, due to noise, of the number of rows of each group at the top."""
    if not samples.is_noisy:
        return np.zeros(len(samples.groups))
    cut = int(find_cut(samples.counts[0].sum(0), top))
    own = samples.noise[:, cut:].sum(-1)
    own_rest = samples.noise[:, :cut].sum(-1)
    above, rest = own.sum(), own_rest.sum()
    # One row more above moves (1 - top) rows to below the cut-off; one more below, `top` rows.
    moved = near**2 * ((1 - top) ** 2 * (above - own) + top**2 * rest)
    return moved + (1 - near * (1 - top)) ** 2 * own


def _as_rates(
    share: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    variance: np.ndarray,
    noise: np.ndarray,
    most_rows: np.ndarray,
    valid: np.ndarray,
) -> Rates:
    """Return shares with these variances as `Rates`, whose intervals are Wilson's.

    A share of 0 or 1 has no variance; its interval is that of a share of `most_rows` rows.
    """
    low, high = (np.where(np.isnan(share), np.nan, np.clip(end, 0.0, 1.0)) for end in ends)
    inside = (variance > 0) & (share > 0) & (share < 1)
    rows = np.where(inside, share * (1 - share) / variance, most_rows)
    return Rates(
        rate=share,
        n=rows,
        rate_min=np.minimum(low, share),
        rate_max=np.maximum(high, share),
        n_min=rows,
        variance=noise,
        valid=valid,
        is_proportion=True,
    )
