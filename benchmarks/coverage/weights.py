"""Weighted rates and gaps.

Three sites of unequal size. The truth is the rate of the population, from which rows are drawn
with probabilities in inverse proportion to their weights, so that unweighted rates are biased.
"Lognormal" weights spread by a factor of ten, "two kinds" are 1 and 10. The largest of the gaps of
four groups has a simultaneous interval, which covers 95% or more.
"""

from collections.abc import Iterator

import numpy as np
from rows import Row

from fedgft.auditing.rates import estimate_pair, estimate_rates, find_largest_gap, list_views
from fedgft.auditing.rates import pool_sites as pool
from fedgft.metrics import get_metric
from fedgft.site_sums import COUNT, ROWS, SQUARES, MeasurementSpec, SiteSums, SiteTables

SIZES = (300, 900, 2400)  # rows of a site


def draw_weights(kind: str, rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return weights of the population's rows."""
    if kind == "lognormal":
        return np.exp(rng.normal(0, 0.7, rows))
    return rng.choice([1.0, 10.0], rows, p=[0.7, 0.3])


def inclusion(kind: str, weights: np.ndarray) -> np.ndarray:
    """Return the chance of each row of the population to be drawn."""
    return np.minimum({"lognormal": 0.15, "two kinds": 1.0}[kind] / weights, 1.0)


def simulate(
    kind: str, groups: int, low: float, rng: np.random.Generator
) -> tuple[SiteSums, np.ndarray]:
    """Return the weighted sums of one federation, and the true rates of the groups.

    The chance of a positive decision rises with the weight of a row. Rows are drawn in inverse
    proportion to their weights.
    """
    base = low + 0.3 * np.arange(groups) / groups

    def chances(weights: np.ndarray, group: np.ndarray) -> np.ndarray:
        heavy = weights > np.exp(0.3)
        return np.clip(base[group] + 0.1 * heavy, 0, 1)

    sums: dict[str, SiteTables] = {}
    names = [(f"g{g}",) for g in range(groups)]
    spec = MeasurementSpec(("0", "1"), ("group",), weight="w")
    for k, rows in enumerate(SIZES):
        weights = draw_weights(kind, rng, 40 * rows)
        keep = rng.random(40 * rows) < inclusion(kind, weights)
        weights = weights[keep][:rows]  # enough are kept
        group = rng.integers(0, groups, len(weights))
        hit = (rng.random(len(weights)) < chances(weights, group)).astype(int)
        tables = {}
        for g, name in enumerate(names):
            tables[name] = spec.empty_table()
            for d in (0, 1):
                mine = weights[(group == g) & (hit == d)]
                tables[name][0, d, [COUNT, ROWS, SQUARES]] = mine.sum(), len(mine), (mine**2).sum()
        sums[f"s{k}"] = SiteTables(tables)
    return SiteSums(spec, sums), base


def truth_of(kind: str, base: np.ndarray) -> np.ndarray:
    """Return the rates of the population that the weights stand for."""
    rng = np.random.default_rng(0)
    weights = draw_weights(kind, rng, 2_000_000)
    # rows drawn in inverse proportion to their weights, then weighted: the population itself
    keep = inclusion(kind, weights)
    share = (weights * keep * (weights > np.exp(0.3))).sum() / (weights * keep).sum()
    return base + 0.1 * share


def run(federations: int) -> Iterator[Row]:
    """Yield a row for each kind of weights and of interval."""
    metric = get_metric("sp")
    for kind in ("lognormal", "two kinds"):
        for groups, low in ((2, 0.3), (2, 0.02), (4, 0.3)):
            rng = np.random.default_rng(7)
            found = dict.fromkeys(("a rate", "signed gap", "largest gap"), 0)
            for _ in range(federations):
                sums, base = simulate(kind, groups, low, rng)
                truth = truth_of_cached(kind, tuple(base))
                (view,) = list_views(pool(sums))
                rates = estimate_rates(metric, view, "hard")
                lows, highs = rates.interval()
                found["a rate"] += lows[0, 0] <= truth[0] <= highs[0, 0]
                signed = estimate_pair(rates, 0, 0, 1)
                found["signed gap"] += signed.low <= truth[0] - truth[1] <= signed.high
                gap = find_largest_gap(rates)
                found["largest gap"] += gap.low <= np.ptp(truth) <= gap.high
            for interval, covered in found.items():
                setting = f"{kind} weights, {groups} groups, lowest rate {low:.0%}"
                yield Row(setting, interval, int(covered), federations)


_TRUTHS: dict[tuple[str, tuple[float, ...]], np.ndarray] = {}


def truth_of_cached(kind: str, base: tuple[float, ...]) -> np.ndarray:
    """Return `truth_of`, computed once."""
    if (kind, base) not in _TRUTHS:
        _TRUTHS[kind, base] = truth_of(kind, np.array(base))
    return _TRUTHS[kind, base]
