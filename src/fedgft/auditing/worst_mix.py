"""The worst mix of today's sites: the largest gap if the sites' shares of the rows change a little.

Site k holds the share s_k of the rows. If its weight becomes w_k, the rate of group g is
R_g(w) = sum_k w_k A_gk / sum_k w_k B_gk, with the sums A and B of the metric at each site. The
weights are those that leave every share within `largest_change` of today's: 1 - c <= w_k <= 1 + c
and sum_k s_k w_k = 1. The result is the largest R_i(w) - R_j(w) over these weights, over all pairs
of groups and all conditions of the metric.

The difference of two such rates may have its largest value inside the set of weights, so that
trying out its corners is not enough (Konno, Yajima & Matsui 1991). Each step of the search
maximizes the linear approximation at the current weights, which a sort of the sites solves exactly,
and then goes to the best point between the two, which a formula gives (Frank & Wolfe 1956). The
search starts from today's weights and from the weights that are best for each rate alone. Pairs
whose largest R_i minus smallest R_j is not above the best gap so far cannot be better. The tests
compare the result with an exact global search.
"""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from fedgft.auditing.rates import View
from fedgft.metrics import Metric

STEPS = 200  # most steps of a search
TINY = 1e-13  # a smaller improvement of a gap ends the search
PAIRS_PER_BLOCK = 256
MAX_NAMED = 40  # sites whose weights the result lists


class WorstMixSummary(TypedDict):
    """The largest gap over mixes of today's sites, and the gap of the same groups today.

    `pair` and `condition` are the two groups (the one with the higher rate first) and the condition
    with the largest gap. They may differ from today's: `today` is the gap of these two groups with
    today's shares of the rows. `weights` holds the factors of the sites' shares, of at most 40
    sites: those that move this gap most. Sites that hold none of the two groups have none.
    """

    gap: float
    today: float
    pair: list[str]
    condition: str
    weights: dict[str, float]


def find_worst_mix(
    metric: Metric, view: View, sites: Sequence[str], *, largest_change: float
) -> WorstMixSummary | None:
    """Return the worst mix of the sites for one metric; None if no two groups have a rate.

    Parameters
    ----------
    metric, view
        The metric and the groups.
    sites
        The names of the sites.
    largest_change
        The largest change of a site's share of the rows, as a fraction of the share.
    """
    statistics = view.sums.statistics(metric, "hard")  # (site, 2, v, g)
    below = np.maximum(statistics[:, 1], 0.0)
    above = np.clip(statistics[:, 0], 0.0, below)
    shares = np.maximum(view.sums.count.sum((1, 2)), 0.0)
    best: tuple[float, int, int, int, np.ndarray] | None = None
    for condition in range(below.shape[1]):
        least = -1.0 if best is None else best[0]
        found = maximize_gap(
            above[:, condition].T,
            below[:, condition].T,
            shares,
            largest_change=largest_change,
            least=least,
        )
        if found is not None:
            gap, i, j, weights = found
            best = (gap, condition, i, j, weights)
    if best is None:
        return None
    gap, condition, i, j, weights = best
    a, b = above[:, condition], below[:, condition]
    rates = a[:, [i, j]].sum(0) / b[:, [i, j]].sum(0)
    effect = _gradient(a[:, [i]].T, b[:, [i]].T, a[:, [j]].T, b[:, [j]].T, weights[None])[0]
    order = np.argsort(-np.abs(effect), kind="stable")[:MAX_NAMED]
    return {
        "gap": gap,
        "today": float(rates[0] - rates[1]),
        "pair": [view.groups[i], view.groups[j]],
        "condition": metric.condition_names(view.spec.classes)[condition],
        "weights": {
            sites[k]: round(float(weights[k]), 6)
            for k in order.tolist()
            if b[k, i] > 0 or b[k, j] > 0
        },
    }


@np.errstate(divide="ignore", invalid="ignore")
def maximize_gap(
    above: np.ndarray,
    below: np.ndarray,
    shares: np.ndarray,
    *,
    largest_change: float,
    least: float = -1.0,
) -> tuple[float, int, int, np.ndarray] | None:
    """Return the largest gap, its two groups and the weights of the sites.

    Parameters
    ----------
    above, below
        (group, site): the sums A and B.
    shares
        (site,): the rows of the sites.
    largest_change
        The largest change of a site's share, as a fraction of the share.
    least
        The result is None if no gap is larger than this.
    """
    known = np.flatnonzero(below.sum(1) > 0)
    if len(known) < 2:
        return None
    a, b = above[known], below[known]
    shares = shares / shares.sum()
    highest = _maximize_rate(a, b, shares, largest_change)
    lowest = _maximize_rate(b - a, b, shares, largest_change)
    top = _rate(a, b, highest)
    bottom = _rate(a, b, lowest)
    i, j = (part.ravel() for part in np.indices((len(known), len(known))))
    bound = top[i] - bottom[j]
    order = np.argsort(-bound, kind="stable")
    order = order[i[order] != j[order]]
    best = None
    for start in range(0, len(order), PAIRS_PER_BLOCK):
        block = order[start : start + PAIRS_PER_BLOCK]
        block = block[bound[block] > least]
        if not len(block):
            break
        p, q = i[block], j[block]
        for first in (np.ones_like(highest[p]), highest[p], lowest[q]):
            weights = _climb(a[p], b[p], a[q], b[q], first, shares, largest_change)
            gaps = _rate(a[p], b[p], weights) - _rate(a[q], b[q], weights)
            at = int(gaps.argmax())
            if gaps[at] > least:
                least = float(gaps[at])
                best = (least, int(known[p[at]]), int(known[q[at]]), weights[at])
    return best


def _rate(a: np.ndarray, b: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return sum_k w_k A_k / sum_k w_k B_k along the last axis."""
    return (a * weights).sum(-1) / (b * weights).sum(-1)


def _best_corner(effects: np.ndarray, shares: np.ndarray, change: float) -> np.ndarray:
    """Return the weights that maximize sum_k effects_k w_k, for each row of `effects`.

    The sites with the largest effect per share get the weight 1 + c, until half of all shares are
    used up; the others get 1 - c.
    """
    size = np.where(shares > 0, shares, 1.0)
    relative = np.where(shares > 0, effects / size, -np.inf)
    order = np.argsort(-relative, axis=-1, kind="stable")
    before = np.cumsum(shares[order], -1) - shares[order]
    raised = np.clip((0.5 - before) / size[order], 0.0, 1.0)
    weights = np.empty_like(relative)
    np.put_along_axis(weights, order, 1 - change + 2 * change * raised, -1)
    return np.where(shares > 0, weights, 1.0)


def _maximize_rate(a: np.ndarray, b: np.ndarray, shares: np.ndarray, change: float) -> np.ndarray:
    """Return the weights (group, site) that maximize the rate of each group (Dinkelbach 1967)."""
    weights = np.ones_like(a)
    for _ in range(STEPS):
        rate = _rate(a, b, weights)
        weights = _best_corner(a - rate[:, None] * b, shares, change)
        if np.all(_rate(a, b, weights) <= rate + TINY):
            break
    return weights


def _gradient(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return the derivative of the gap between the rates a / b and c / d by the weights."""
    rows = [(part * weights).sum(-1, keepdims=True) for part in (b, d)]
    rates = [_rate(x, y, weights)[:, None] for x, y in ((a, b), (c, d))]
    return (a - rates[0] * b) / rows[0] - (c - rates[1] * d) / rows[1]


def _climb(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    d: np.ndarray,
    weights: np.ndarray,
    shares: np.ndarray,
    change: float,
) -> np.ndarray:
    """Improve the weights (pair, site) of the gap between the rates a / b and c / d."""
    gap = _rate(a, b, weights) - _rate(c, d, weights)
    for _ in range(STEPS):
        corner = _best_corner(_gradient(a, b, c, d, weights), shares, change)
        moved = _best_between(a, b, c, d, weights, corner)
        better = _rate(a, b, moved) - _rate(c, d, moved)
        gain = better - gap
        weights = np.where((gain > 0)[:, None], moved, weights)
        gap = np.maximum(gap, better)
        if not (gain > TINY).any():
            break
    return weights


def _best_between(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Return the weights on the line from `start` to `end` with the largest gap, for each pair.

    On the line, the derivative of a rate is p / (q + t q')^2, with a constant p, so that the
    derivative of the gap is 0 at one t at most.
    """
    way = end - start
    a0, b0, c0, d0 = ((part * start).sum(-1) for part in (a, b, c, d))
    a1, b1, c1, d1 = ((part * way).sum(-1) for part in (a, b, c, d))
    root = np.sqrt((c1 * d0 - c0 * d1) / (a1 * b0 - a0 * b1))
    inside = (root * b0 - d0) / (d1 - root * b1)
    inside = np.where(np.isfinite(inside), np.clip(inside, 0.0, 1.0), 1.0)
    times = np.stack((np.ones_like(inside), inside))
    gaps = (a0 + times * a1) / (b0 + times * b1) - (c0 + times * c1) / (d0 + times * d1)
    chosen = np.where(gaps[1] > gaps[0], inside, 1.0)
    return start + chosen[:, None] * way
