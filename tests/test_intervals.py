"""Intervals compared with published numbers; coverage and noise floor by simulation."""

import numpy as np
import pytest

from fedgft.metrics import CATALOG
from fedgft.metrics.intervals import (
    Z95,
    floor,
    folded,
    gap_interval,
    newcombe,
    ratio,
    simultaneous,
    wilson,
)

SP = CATALOG["sp"]
EO = CATALOG["eo"]


def one(value: float) -> np.ndarray:
    return np.array(float(value))


def counts(*cells: tuple[float, float]) -> np.ndarray:
    """(successes, rows) of each group, as the counts of statistical parity: (2, 1, g)."""
    return np.array(cells, dtype=float).T[:, None, :]


# Newcombe, Statistics in Medicine 17 (1998) 857-872, Table I, method 3 (score, uncorrected).
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_as_published(successes, n, low, high):
    # Printed to four decimals.
    assert wilson(one(successes / n), one(n)) == pytest.approx((low, high), abs=5e-5)


# Newcombe, Statistics in Medicine 17 (1998) 873-890, Table II, method 10 (score, uncorrected).
@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((0, 10), (0, 10), -0.2775, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1.0000),
        ((10, 10), (0, 10), 0.6075, 1.0000),
    ],
)
def test_newcombe_as_published(first, second, low, high):
    (x, n) = first
    (y, m) = second
    interval = newcombe((one(x / n), one(n)), (one(y / m), one(m)))
    assert interval == pytest.approx((low, high), abs=5e-5)


def test_gap_interval_of_two_groups_is_newcombes():
    statistics = counts((48, 80), (56, 70))
    assert gap_interval(SP, statistics) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_more_groups_or_conditions_to_choose_from_make_it_wider():
    """The largest of many gaps is chosen by its size; its interval has to know."""
    two = counts((48, 80), (56, 70))
    three = counts((48, 80), (30, 43), (56, 70))
    low, high = gap_interval(SP, three)
    assert low < gap_interval(SP, two)[0] < gap_interval(SP, two)[1] < high
    renamed = gap_interval(SP, three[..., [2, 0, 1]])
    np.testing.assert_allclose(renamed, (low, high), atol=1e-15)  # subtracted the other way round
    both = np.concatenate((counts((40, 80), (36, 70)), two), axis=1)  # the second is wider
    low, high = gap_interval(EO, both)
    assert low < gap_interval(SP, two)[0] < gap_interval(SP, two)[1] < high


@pytest.mark.parametrize(("groups", "q"), [(2, 2.772), (3, 3.314), (5, 3.858), (20, 5.012)])
def test_simultaneous_is_tukeys_range(groups, q):
    # Upper 5% points of the studentized range with infinite degrees of freedom, as tables have it.
    assert simultaneous(groups) == pytest.approx(q / np.sqrt(2), abs=5e-4)


@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("conditions", [1, 2, 6])
def test_simultaneous_intervals_hold_for_all_pairs_and_conditions(groups, conditions):
    draws = np.random.default_rng(0).standard_normal((200_000, conditions, groups))
    held = (np.ptp(draws, axis=-1) <= simultaneous(groups, conditions) * np.sqrt(2)).all(-1)
    assert held.mean() == pytest.approx(0.95, abs=0.003)  # six standard errors


def test_one_group_or_no_condition_has_the_usual_z():
    assert simultaneous(1) == simultaneous(2) == simultaneous(2, 0)
    assert simultaneous(2) == pytest.approx(Z95, abs=1e-12)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.1, 0.3, (0.1, 0.3)),
        (-0.3, -0.1, (0.1, 0.3)),
        (-0.1, 0.3, (0.0, 0.3)),
        (-0.3, 0.1, (0.0, 0.3)),
    ],
)
def test_folded_limits_hold_every_absolute_value(low, high, expected):
    assert folded(one(low), one(high)) == expected


@pytest.mark.parametrize("z", [1.0, 1.96, 3.2])
@pytest.mark.parametrize(("p", "n"), [(0.0, 5), (0.2, 17), (0.5, 400), (1.0, 9)])
def test_wilson_solves_the_score_equation(p, n, z):
    for limit in wilson(one(p), one(n), z):
        assert (p - limit) ** 2 == pytest.approx(z**2 * limit * (1 - limit) / n, abs=1e-14)


@pytest.mark.parametrize("p", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("q", [0.3, 0.6, 0.95])
def test_ratio_is_the_formula_of_donner_and_zou(p, q):
    """As they print it, which needs u_q < 2q."""
    (l_p, u_p) = wilson(one(p), one(60))
    (l_q, u_q) = wilson(one(q), one(90))
    under = (p * q) ** 2 - l_p * u_q * (2 * p - l_p) * (2 * q - u_q)
    over = (p * q) ** 2 - u_p * l_q * (2 * p - u_p) * (2 * q - l_q)
    expected = (
        (p * q - np.sqrt(under)) / (u_q * (2 * q - u_q)),
        (p * q + np.sqrt(over)) / (l_q * (2 * q - l_q)),
    )
    assert ratio(one(p), (l_p, u_p), one(q), (l_q, u_q)) == pytest.approx(expected, rel=1e-10)


def test_ratio_of_rates_at_zero():
    some = (one(0.3), (one(0.2), one(0.4)))
    none = (one(0.0), (one(0.0), one(0.1)))
    assert ratio(*none, *some)[0] == 0 and 0 < ratio(*none, *some)[1] < np.inf
    low, high = ratio(*some, *none)
    assert high == np.inf and 0 < low < np.inf
    assert ratio(*none, *none) == (0, np.inf)
    # u_q = 2q: the printed formula divides by zero, its limit is l (2p - l) / (2pq).
    edge = ratio(*some, one(0.1), (one(0.05), one(0.2)))
    assert edge[0] == pytest.approx(0.2 * 0.4 / (2 * 0.3 * 0.1))


@pytest.mark.parametrize(
    ("rates", "rows"), [((0.3,) * 4, (40, 200, 90, 500)), ((0.2, 0.5, 0.5), (30, 60, 15))]
)
def test_interval_of_the_largest_of_many_gaps_covers_it(rates, rows):
    low, high = gap_interval(SP, simulated(*rates, rows=rows))
    true = max(rates) - min(rates)
    assert np.mean((low <= true) & (true <= high)) > 0.94


@pytest.mark.parametrize(
    ("p", "q", "rows"), [(0.3, 0.5, (60, 80)), (0.1, 0.4, (200, 90)), (0.5, 0.5, (25, 300))]
)
def test_interval_of_a_ratio_covers_it_19_times_in_20(p, q, rows):
    statistics = simulated(p, q, rows=rows)
    (a, b), (n, m) = (np.moveaxis(statistics[:, i, 0], -1, 0) for i in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = ratio(a / n, wilson(a / n, n), b / m, wilson(b / m, m))
    # Noise 0.15%; the limits it is made of are off by up to about a point at these sizes.
    assert np.mean((low <= p / q) & (p / q <= high)) == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize(("p", "q", "rows"), [(0.05, 0.05, (40, 40)), (0.02, 0.04, (300, 300))])
def test_interval_of_a_ratio_of_rare_events_covers_it_at_least_as_often(p, q, rows):
    statistics = simulated(p, q, rows=rows)
    (a, b), (n, m) = (np.moveaxis(statistics[:, i, 0], -1, 0) for i in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = ratio(a / n, wilson(a / n, n), b / m, wilson(b / m, m))
    known = (a > 0) & (b > 0)
    found = (a / n)[known] / (b / m)[known]
    assert np.isfinite(low[known]).all() and (low[known] <= found).all()
    assert np.mean(((low <= p / q) & (p / q <= high))[known]) > 0.94


def test_gap_interval_is_folded_at_zero():
    low, high = newcombe((one(0.5), one(50)), (one(0.45), one(500)))
    assert low < 0
    assert gap_interval(SP, counts((25, 50), (225, 500))) == (0.0, max(high, -low))


def test_empty_group_gives_nan_and_leaves_the_other_runs_alone():
    full = counts((48, 80), (56, 70), (9, 10))
    empty = counts((48, 80), (0, 0), (9, 10))
    for read in (lambda s: np.stack(gap_interval(SP, s)), lambda s: floor(SP, s)):
        for groups in (2, 3):
            runs = read(np.stack((full, empty))[..., :groups])
            assert np.isnan(runs[..., 1]).all()
            np.testing.assert_array_equal(runs[..., 0], read(full[..., :groups]))


def simulated(*rates: float, rows: tuple[int, ...], conditions: int = 1) -> np.ndarray:
    """Counts of 20,000 test sets whose groups have these true rates."""
    drawn = np.random.default_rng(0).binomial(rows, rates, size=(20_000, conditions, len(rows)))
    return np.stack((drawn, np.broadcast_to(rows, drawn.shape)), axis=1).astype(float)


@pytest.mark.parametrize(
    ("metric", "rate", "rows"),
    [
        (SP, 0.3, (900, 300)),
        (SP, 0.1, (400, 2000)),
        (SP, 0.5, (150, 100)),
        (SP, 0.3, (900, 300, 500)),
        (EO, 0.3, (900, 300)),
        (EO, 0.3, (900, 300, 500, 800)),
    ],
)
def test_floor_is_the_mean_gap_of_a_fair_model(metric, rate, rows):
    fair = simulated(*[rate] * len(rows), rows=rows, conditions=len(metric.conditions(2)))
    # Noise of 0.5% there and 1% here; a gap on a lattice of counts is not quite normal.
    assert floor(metric, fair[:200]).mean() == pytest.approx(metric.readout(fair).mean(), rel=0.03)


def test_floor_of_two_groups_is_the_mean_of_a_folded_normal():
    """E|X| = s sqrt(2/pi) of a normal X, here the difference of two rates that are equal."""
    error = np.sqrt(0.25 * 0.75 * (1 / 80 + 1 / 120))
    expected = error * np.sqrt(2 / np.pi)
    assert floor(SP, counts((30, 80), (20, 120))) == pytest.approx(expected, rel=1e-12)


def test_a_group_that_never_gets_it_has_a_floor_and_one_without_rows_has_none():
    assert floor(SP, counts((0, 80), (20, 120))) == floor(SP, counts((20, 80), (0, 120)))
    assert floor(SP, counts((1, 1), (20, 120))) > 0  # one row is a row
    assert np.isnan(floor(SP, counts((0, 0), (20, 120))))


@pytest.mark.parametrize(("p", "q"), [(0.45, 0.2), (0.9, 0.5), (0.3, 0.05)])
def test_interval_covers_the_true_gap_19_times_in_20(p, q):
    low, high = gap_interval(SP, simulated(p, q, rows=(200, 90)))
    # Noise 0.15%; the score interval itself is off by up to about a point at this size.
    assert np.mean((low <= p - q) & (p - q <= high)) == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize(("p", "q"), [(0.3, 0.3), (0.06, 0.02), (0.5, 0.48)])
def test_interval_of_a_small_gap_covers_it_at_least_as_often(p, q):
    """Folded at zero it can only grow."""
    low, high = gap_interval(SP, simulated(p, q, rows=(200, 90)))
    assert np.mean((low <= p - q) & (p - q <= high)) > 0.94
