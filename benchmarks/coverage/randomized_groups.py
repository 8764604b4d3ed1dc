"""Randomized groups, and groups as probabilities.

Groups are randomized before they are stored: k-ary randomized response with epsilon 1. The truth
is the rate of the true groups in the population. The naive gap, which takes the reported groups for
the true ones, is shown for comparison. "Probabilities": two groups, decisions that depend on the
probability alone; the truth is what the probabilities estimate, which is biased toward no gap.
"""

import math
from collections.abc import Iterator

import numpy as np
from rows import Row

from fedgft.auditing.rates import (
    Rates,
    estimate_pair,
    estimate_rates,
    find_largest_gap,
    list_views,
    pool_sites,
)
from fedgft.metrics import get_metric
from fedgft.site_sums import (
    COUNT,
    ROWS,
    SQUARES,
    MeasurementSpec,
    RandomizedGroups,
    SiteSums,
    SiteTables,
)

EPSILON = 1.0


def estimate(spec: MeasurementSpec, counts: np.ndarray) -> Rates:
    """Return the rates of parity, from (group, decision, column) at one site."""
    tables = {}
    for g, name in enumerate("abcd"[: len(counts)]):
        tables[(name,)] = spec.empty_table()
        tables[(name,)][0] = counts[g]
    (view,) = list_views(pool_sites(SiteSums(spec, {"s": SiteTables(tables)})))
    return estimate_rates(get_metric("sp"), view, "hard")


def simulate_randomized(
    groups: int, rows: int, truth: np.ndarray, rng: np.random.Generator, *, corrected: bool
) -> Rates:
    """Return the rates by true group, from reported groups; or, not corrected, by reported one."""
    group = rng.integers(0, groups, rows)
    hit = (rng.random(rows) < truth[group]).astype(int)
    keep = rng.random(rows) < math.exp(EPSILON) / (math.exp(EPSILON) + groups - 1)
    reported = np.where(keep, group, (group + rng.integers(1, groups, rows)) % groups)
    values = (tuple("abcd"[:groups]),)
    randomized = RandomizedGroups(EPSILON, values) if corrected else None
    spec = MeasurementSpec(("0", "1"), ("group",), randomized=randomized)
    counts = np.zeros((groups, 2, spec.empty_table().shape[-1]))
    np.add.at(counts[..., COUNT], (reported, hit), 1.0)
    return estimate(spec, counts)


def simulate_probabilities(rows: int, truth: np.ndarray, rng: np.random.Generator) -> Rates:
    """Return the rates by probable group; the decision depends on the probability alone."""
    p = rng.beta(0.5, 0.5, rows)
    hit = (rng.random(rows) < truth[0] * p + truth[1] * (1 - p)).astype(int)
    spec = MeasurementSpec(("0", "1"), ("group",), proxy=True)
    counts = np.zeros((2, 2, spec.empty_table().shape[-1]))
    for g, w in enumerate((p, 1 - p)):
        for column, values in ((COUNT, w), (ROWS, np.ones(rows)), (SQUARES, w**2)):
            np.add.at(counts[g, :, column], hit, values)
    return estimate(spec, counts)


def count(rates: Rates, truth: np.ndarray, found: dict[str, list[bool]]) -> None:
    """Note which intervals contain the truth."""
    low, high = rates.interval()
    signed = estimate_pair(rates, 0, 0, 1)
    largest = find_largest_gap(rates)
    checks = {
        "a rate": (low[0, 0], truth[0], high[0, 0]),
        "signed gap": (signed.low, truth[0] - truth[1], signed.high),
        "largest gap": (largest.low, np.ptp(truth), largest.high),
    }
    for name, (least, value, most) in checks.items():
        if least is not None and most is not None and least == least:
            found.setdefault(name, []).append(bool(least <= value <= most))


def run(federations: int) -> Iterator[Row]:
    """Yield a row for each setting and kind of interval."""
    for groups, rows, rates in (
        (2, 2_000, (0.3, 0.4)),
        (2, 20_000, (0.05, 0.02)),
        (2, 2_000, (0.3, 0.3)),
        (3, 10_000, (0.3, 0.4, 0.5)),
    ):
        for corrected in (True, False):
            rng = np.random.default_rng(5)
            found: dict[str, list[bool]] = {}
            for _ in range(federations):
                each = simulate_randomized(groups, rows, np.array(rates), rng, corrected=corrected)
                count(each, np.array(rates), found)
            listed = ", ".join(f"{100 * rate:g}%" for rate in rates)
            how = "epsilon 1" if corrected else "epsilon 1, naive"
            setting = f"{how}, {rows:,} rows, rates {listed}"
            if corrected or len(set(rates)) > 1:
                for name, hits in found.items():
                    note = "" if corrected else "not ours: takes reported groups for true ones"
                    yield Row(setting, name, sum(hits), len(hits), note)
    rng = np.random.default_rng(5)
    found = {}
    # of rows weighted by p, the mean of p is E[p^2] / E[p] = 0.75
    truth = np.array([0.3, 0.5])
    weighted = np.array([[0.75, 0.25], [0.25, 0.75]]) @ truth
    for _ in range(federations):
        count(simulate_probabilities(2_000, truth, rng), weighted, found)
    for name, hits in found.items():
        yield Row("probabilities, 2,000 rows", name, sum(hits), len(hits))
