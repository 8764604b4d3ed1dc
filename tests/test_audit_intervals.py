"""Coverage of the intervals: 1,000 federations with known true rates, also with noise."""

import tracemalloc
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from fedgft.auditing import audit, measure
from fedgft.auditing import between_sites as bootstrap
from fedgft.auditing.between_sites import estimate_metric, estimate_within_sites
from fedgft.auditing.rates import (
    FEW,
    estimate_difference,
    estimate_rates,
    find_largest_gap,
    list_views,
    pool_sites,
)
from fedgft.metrics import CATALOG
from fedgft.privacy.noise import calibrate_noise
from fedgft.site_sums import COUNT, NOISE, SCORES, MeasurementSpec, SiteSums, SiteTables
from fedgft.sums import Sums
from fedgft.theory import Compared, compare

FEDERATIONS = 1000
METRICS = ("sp", "eop", "predictive-parity", "acc", "fpr")


def federations(*, seed: int, smallest: int, noise: float = 0.0):
    """Sums of a random federation, and the true distribution: (group, label, decision).

    Where a person of a group goes, and what happens there, differs from group to group and from
    site to site. Some groups are small, some sites have none of a group.
    """
    generator = np.random.default_rng(seed)
    mechanism = calibrate_noise(noise, 0.0) if noise else None
    for _ in range(FEDERATIONS):
        groups = generator.integers(2, 6)
        sites = generator.integers(2, 7)
        rows = np.exp(generator.uniform(np.log(smallest), np.log(3000), groups)).astype(int)
        where = generator.dirichlet(np.ones(sites), groups)
        what = generator.dirichlet(4 * generator.dirichlet(np.full(4, 2.0)) + 0.2, (groups, sites))
        chance = (where[..., None] * what).reshape(groups, -1)
        counts = np.stack([generator.multinomial(n, p) for n, p in zip(rows, chance, strict=True)])
        if mechanism is not None:
            counts = np.array(mechanism.add(counts.ravel().tolist())).reshape(counts.shape)
        tables = np.zeros((groups, sites, 2, 2, SCORES))
        tables[..., COUNT] = counts.reshape(groups, sites, 2, 2)
        tables[..., NOISE] = mechanism.variance if mechanism else 0.0
        names = [(str(g),) for g in range(groups)]
        held = {
            str(k): SiteTables(dict(zip(names, tables[:, k], strict=True))) for k in range(sites)
        }
        truth = chance.reshape(groups, sites, 2, 2).sum(1)
        yield SiteSums(MeasurementSpec(("0", "1"), ("g",)), held), truth


def true_rates(metric, truth: np.ndarray) -> np.ndarray:
    decision = np.moveaxis(truth, 0, 1)
    decision = np.concatenate((decision, np.zeros_like(decision[:, :1])), 1)
    tally = Sums(decision.sum(-1), decision, decision)
    return metric.rates(tally.statistics(metric, "hard"))


def coverage(
    *, seed: int, smallest: int, noise: float = 0.0, metrics: tuple[str, ...] = METRICS
) -> tuple[float, float, int]:
    """Of signed gaps of all pairs, and of largest gaps, over all metrics."""
    pairs = []
    largest = []
    for sums, truth in federations(seed=seed, smallest=smallest, noise=noise):
        (view,) = list_views(pool_sites(sums))
        for name in metrics:
            metric = CATALOG[name]
            rates = estimate_rates(metric, view, "hard")
            true = true_rates(metric, truth)
            i, j = np.triu_indices(len(view.groups), 1)
            _, low, high = estimate_difference(rates[0, i], rates[0, j])
            known = ~np.isnan(low)
            apart_truly = true[0, i] - true[0, j]
            pairs += ((low <= apart_truly) & (apart_truly <= high))[known].tolist()
            gap = find_largest_gap(rates)
            wanted = float(np.ptp(true))
            if gap.low is not None and gap.high is not None:
                largest.append(gap.low <= wanted <= gap.high)
            elif gap.low is not None:  # some groups are too small: the lower limit still holds
                assert not rates.valid.all()
                largest.append(gap.low <= wanted)
    return float(np.mean(pairs)), float(np.mean(largest)), len(pairs)


@pytest.mark.slow
def test_signed_gaps_are_covered_19_times_in_20_and_largest_gaps_at_least():
    """Groups of 5 rows and more; no interval is claimed below 10 rows of the event."""
    pairs, largest, number = coverage(seed=0, smallest=5)
    assert number > 15_000
    assert 0.93 <= pairs <= 0.97
    assert largest >= 0.93


@pytest.mark.slow
def test_noise_is_in_the_intervals():
    """Discrete Laplace noise of epsilon 0.5 on every cell of every site."""
    pairs, largest, number = coverage(
        seed=1, smallest=60, noise=0.5, metrics=("eop", "predictive-parity")
    )
    assert number > 7_500
    assert 0.93 <= pairs <= 0.97
    assert largest >= 0.93


@pytest.mark.slow
def test_ignoring_the_noise_would_break_coverage():
    """The check above can fail: the same noise, not declared."""
    missed = []
    for sums, truth in islice(federations(seed=1, smallest=60, noise=0.5), 400):
        (view,) = list_views(pool_sites(sums))
        silent = estimate_rates(CATALOG["eop"], view, "hard")
        blind = replace(silent, variance=0 * silent.variance, valid=silent.n >= FEW)
        _, low, high = estimate_difference(blind[0, 0], blind[0, 1])
        true = true_rates(CATALOG["eop"], truth)
        if not np.isnan(low):
            missed.append(not low <= true[0, 0] - true[0, 1] <= high)
    assert np.mean(missed) > 0.07


def test_the_gap_within_sites_is_covered():
    """Mantel & Haenszel with Sato's variance, where all sites have the same true gap."""
    generator = np.random.default_rng(5)
    hits = []
    for _ in range(2000):
        b, d = generator.integers(3, 60, (2, 12))
        base = generator.uniform(0.1, 0.6, 12)
        a = generator.binomial(b, base + 0.2)
        c = generator.binomial(d, base)
        sums = np.stack([np.stack((a, c), -1), np.stack((b, d), -1)], 1)[:, :, None].astype(float)
        terms = compare(sums, np.ones(12), Compared(0, 0, 1), proper=True)
        _, low, high = estimate_within_sites(terms, np.zeros((12, 4)), False)
        hits.append(low <= 0.2 <= high)
    assert np.mean(hits) == pytest.approx(0.95, abs=0.015)  # noise 0.5%


@pytest.mark.slow
def test_withheld_cells_are_in_the_intervals():
    """Whatever the withheld counts were, the interval reaches what the full counts say."""
    generator = np.random.default_rng(6)
    for _ in range(60):
        n = 300
        rate = generator.uniform(0.02, 0.3)
        g = generator.choice(["a", "b"], n)
        y = generator.integers(0, 2, n)
        d = (generator.random(n) < rate).astype(int)
        parts = [(y[i::6], d[i::6], g[i::6]) for i in range(6)]
        full, kept = (
            audit(
                [
                    measure(y, d, sensitive_features=g, site=str(i), min_cell=k)
                    for i, (y, d, g) in enumerate(parts)
                ]
            ).to_dict()
            for k in (0, 10)
        )
        for name in METRICS:
            exact = full["metrics"][name]
            wide = kept["metrics"][name]
            for group, found in wide["groups"].items():
                if found["low"] is not None and exact["groups"][group]["rate"] is not None:
                    assert found["low"] <= exact["groups"][group]["rate"] <= found["high"]
            if wide["high"] is not None and exact["gap"] is not None:
                assert wide["low"] <= exact["gap"] <= wide["high"]
    assert any("Withheld small cells" in text for text in kept["warnings"])


@pytest.mark.slow
def test_withheld_cells_at_their_worst():
    """Every site withholds one row where it might be nine; the exact numbers stay inside."""
    counts = np.zeros((100, 2, 2, 2))  # site, group, label, decision
    counts[:, 0, 1] = (10, 1)
    counts[:, 1, 1] = (10, 10)
    exact, kept = (audit(federation(counts, k)).to_dict()["metrics"]["sp"] for k in (0, 10))
    assert exact["groups"]["0"]["rate"] == pytest.approx(1 / 11)
    assert kept["groups"]["0"]["low"] <= 1 / 11 <= kept["groups"]["0"]["high"]
    assert kept["low"] <= exact["gap"] <= kept["high"]
    assert kept["ratio_low"] <= exact["ratio"] <= kept["ratio_high"]


def federation(counts: np.ndarray, min_cell: int) -> SiteSums:
    """Sites with these counts, measured row by row."""
    parts = []
    for k, table in enumerate(counts.astype(int)):
        cells = [(g, y, d) for g, y, d in np.ndindex(table.shape) for _ in range(table[g, y, d])]
        g, y, d = (np.array(column) for column in zip(*cells, strict=True))
        parts.append(measure(y, d, sensitive_features=g, site=str(k), min_cell=min_cell))
    return sum(parts)


def test_few_rows_give_no_gap_within_sites():
    """One row of either group in one site: no gap within sites, and no paradox, is claimed."""
    counts = np.zeros((3, 2, 2, 2))
    counts[0, 0, 1] = (40, 60)
    counts[1, 1, 1] = (60, 40)
    counts[2, 0, 1] = (1, 0)
    counts[2, 1, 1] = (0, 1)
    made = audit(federation(counts, 0))
    assert made.to_dict()["within"]["sp"] == {"gap": None, "low": None, "high": None}
    assert not any("Simpson" in text for text in made.warnings)


@pytest.mark.slow
def test_the_gap_within_sites_knows_of_the_noise():
    """Without the noise's own variance the nominal 95% would be little more than half of that."""
    hits = []
    generator = np.random.default_rng(9)
    mechanism = calibrate_noise(0.5, 0.0)
    for _ in range(1000):
        rows = generator.integers(40, 120, (12, 2))
        base = generator.uniform(0.2, 0.5, 12)
        got = generator.binomial(rows, np.stack((base + 0.2, base), -1))
        exact = np.stack((got, rows - got), -1)
        noisy = np.array(mechanism.add(exact.ravel().tolist())).reshape(12, 2, 2)
        sums = np.stack((noisy[..., 0], noisy.sum(-1)), 1)[:, :, None].astype(float)
        terms = compare(sums, np.ones(12), Compared(0, 0, 1), proper=True)
        _, low, high = estimate_within_sites(terms, np.full((12, 4), mechanism.variance), False)
        hits.append(low <= 0.2 <= high)
    assert np.mean(hits) == pytest.approx(0.95, abs=0.025)  # noise 0.7%


@pytest.mark.slow
def test_drawing_sites_of_a_fair_model_finds_no_gap():
    """Percentiles of a largest gap, which is never negative, always would."""
    generator = np.random.default_rng(10)
    found = []
    for _ in range(40):
        parts = []
        for k in range(30):
            g = generator.choice(["a", "b", "c"], 100)
            d = (generator.random(100) < 0.4).astype(int)
            parts.append(measure(np.ones(100, int), d, sensitive_features=g, site=str(k)))
        found.append(audit(parts, bootstrap=300).to_dict()["metrics"]["sp"]["low"] > 0)
    assert np.mean(found) <= 0.15


def test_bootstrap_over_sites():
    """Where sites differ, percentiles over sites are wider than intervals over rows."""
    generator = np.random.default_rng(7)
    parts = []
    for k in range(40):
        g = generator.choice(["a", "b"], 200)
        rate = np.where(g == "a", generator.uniform(0, 1), 0.5)
        d = (generator.random(200) < rate).astype(int)
        parts.append(measure(np.ones(200, int), d, sensitive_features=g, site=str(k)))
    rows, sites = (audit(parts, bootstrap=b).to_dict()["metrics"]["sp"] for b in (0, 1000))
    assert rows["gap"] == sites["gap"]
    wide = sites["groups"]["a"]["high"] - sites["groups"]["a"]["low"]
    assert wide > 3 * (rows["groups"]["a"]["high"] - rows["groups"]["a"]["low"])
    again = audit(parts, bootstrap=1000).to_dict()["metrics"]["sp"]
    assert again == sites  # one seed, one result


def test_identical_bootstrap_draws_give_no_interval():
    parts = [
        measure([1] * 40, [0] * 40, sensitive_features=["a", "b"] * 20, site=str(k))
        for k in range(8)
    ]
    found = audit(parts, bootstrap=200).to_dict()["metrics"]["sp"]
    assert found["gap"] == 0 and found["low"] is None and found["groups"]["a"]["low"] is None


def test_drawing_sites_holds_no_table_of_all_pairs():
    """Of sixty groups there are 1,770 pairs: a number for each in every draw would be large."""
    drawn = np.random.default_rng(0).random((500, 1, 60))
    tracemalloc.start()
    low, high = bootstrap._difference_limits(drawn, drawn.mean(0))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert low.shape == high.shape == (1, 1770) and most < 8 * 500 * 1770


def test_a_ratio_with_a_group_of_few_events_has_no_lower_limit():
    """The smallest ratio is that group's, and nothing is known of it."""
    counts = np.zeros((1, 3, 2, 2))
    counts[0, :, 1] = (100, 100), (100, 90), (12, 1)
    found = audit(federation(counts, 0)).to_dict()["metrics"]["sp"]
    assert found["ratio"] == pytest.approx((1 / 13) / 0.5)
    low = found["ratio_low"]
    assert low is None or low <= found["ratio"]
    assert found["ratio_high"] >= found["ratio"]


def test_a_rate_of_zero_has_a_ratio_of_zero():
    counts = np.zeros((1, 3, 2, 2))
    counts[0, :, 1] = (200, 0), (100, 100), (110, 90)
    found = audit(federation(counts, 0)).to_dict()["metrics"]["sp"]
    assert found["ratio"] == found["ratio_low"] == 0 and found["ratio_high"] < 0.1


def test_one_group_alone_can_be_drawn_again():
    rows = ([1] * 40, [0, 1] * 20)
    parts = [measure(*rows, sensitive_features=["a"] * 40, site=str(k)) for k in range(6)]
    assert audit(parts, bootstrap=100).to_dict()["metrics"]["sp"]["gap"] is None


@pytest.mark.slow
def test_sites_against_the_whole_need_more_than_one_in_forty():
    """Of 300 sites a few are against the gap by chance; that is not worth a warning."""
    generator = np.random.default_rng(8)
    parts = []
    for k in range(300):
        g = generator.choice(["a", "b"], 100)
        d = (generator.random(100) < np.where(g == "a", 0.52, 0.45)).astype(int)
        parts.append(measure(np.ones(100, int), d, sensitive_features=g, site=str(k)))
    made = audit(parts)
    where = estimate_metric(CATALOG["sp"], made.view).sites
    assert (where.local.high < 0).any() and not (where.direction < 0).any()
    assert not any("the other way round" in text for text in made.warnings)
