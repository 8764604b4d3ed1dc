"""The band over many looks, the evidence for a change, and what moved a gap.

References: integrals of the mixture by SciPy, likelihood ratios of multivariate normals, and plain
sums over rows.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import multivariate_normal, norm

from dated_sites import SITES, draw_history
from fedgft.auditing import monitor
from fedgft.auditing.change_points import (
    SCALE,
    Differences,
    RateSeries,
    find_shift,
    prior_weights,
    watch,
)
from fedgft.auditing.gap_changes import SiteCounts, split_change

LEVEL = 0.05


def make_differences(values, errors, slack=0.0) -> Differences:
    value = np.asarray(values, float).reshape(len(values), -1)
    precision = 1 / np.broadcast_to(np.asarray(errors, float), (1, len(values))).T ** 2
    precision = np.broadcast_to(precision, value.shape).copy()
    return Differences(value, precision, np.full(value.shape, slack))


def make_series(rates: np.ndarray, rows: float) -> RateSeries:
    """One condition; `rates` are (period, group)."""
    rate = np.asarray(rates, float)[:, None]
    nothing = np.zeros(rate.shape)
    return RateSeries(rate, np.full(rate.shape, rows), nothing, nothing)


# The band


@pytest.mark.parametrize("error", [0.002, 0.01, 0.05])
@pytest.mark.parametrize("periods", [1, 7])
def test_the_band_ends_where_the_mixture_reaches_its_bound(error, periods):
    values = np.linspace(0.01, 0.05, periods)
    mean, low, high = (x[0] for x in make_differences(values, error).band())
    assert mean == pytest.approx(values.mean())
    information = periods / error**2
    for limit in (low, high):
        score = information * (mean - limit)

        def mixture(theta, score=score):
            power = theta * score - theta**2 * information / 2
            return np.exp(power) * norm.pdf(theta, scale=SCALE)

        peak = score / (information + 1 / SCALE**2)
        width = 12 / np.sqrt(information + 1 / SCALE**2)
        value, _ = quad(mixture, peak - width, peak + width, limit=200)
        assert value == pytest.approx(1 / LEVEL, rel=1e-6)


def test_the_band_of_several_pairs_is_wider_and_suppressed_counts_widen_it():
    one = make_differences([[0.01], [0.02]], 0.01).band()
    two = make_differences([[0.01, 0.0], [0.02, 0.0]], 0.01).band()
    wide = make_differences([[0.01], [0.02]], 0.01, slack=0.003).band()
    assert two[1][0] < one[1][0] < one[0][0]
    assert wide[2][0] == pytest.approx(one[2][0] + 0.003)


def test_weights_follow_the_precision_and_periods_without_rows_do_not_count():
    found = make_differences([0.0, 0.1, 0.5], 0.01)
    found.precision[:] = [[1.0], [3.0], [0.0]]
    assert found.mean(0, 3)[0] == pytest.approx(0.075)
    assert np.isnan(found.mean(2, 3)[0])


def test_variances_come_from_the_rates_of_all_periods():
    series = make_series(np.array([[0.0, 0.1], [0.2, 0.1]]), 100)
    found = series.differences(0, 2)
    pooled = [(0.2 * 100 + 0.5) / 201, (0.2 * 100 + 0.5) / 201]
    variance = sum(p * (1 - p) / 100 for p in pooled)
    np.testing.assert_allclose(found.precision, 1 / variance)
    np.testing.assert_allclose(found.value[:, 0], [-0.1, 0.1])


# Evidence


def ratio_by_invariants(values, errors, at: int, shift: float) -> float:
    """The likelihood ratio of the differences to the first period, which know no common mean."""
    errors = np.broadcast_to(errors, len(values)) ** 2
    contrast = np.eye(len(values))[1:] - np.eye(len(values))[0]
    step = contrast @ (np.arange(len(values)) >= at)
    covariance = contrast @ np.diag(errors) @ contrast.T
    data = contrast @ np.asarray(values)
    changed = covariance + SCALE**2 * np.outer(step, step)
    top = multivariate_normal.logpdf(data, shift * step, changed)
    return float(np.exp(top - multivariate_normal.logpdf(data, shift * step, covariance)))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=8), st.floats(0.004, 0.05), st.data())
def test_the_interval_of_a_change_ends_where_its_evidence_reaches_the_bound(values, error, data):
    at = data.draw(st.integers(1, len(values) - 1))
    known = data.draw(st.booleans())
    shift = find_shift(make_differences(values, error), level=LEVEL, at=at, is_known=known)
    assert shift is not None
    assert shift.before == pytest.approx(np.mean(values[:at]))
    assert shift.after == pytest.approx(np.mean(values[at:]))
    weight = 1.0 if known else prior_weights(at)[-1]
    for limit in (shift.low, shift.high):
        ratio = ratio_by_invariants(values, error, at, limit)
        assert weight * ratio == pytest.approx(1 / LEVEL, rel=1e-5)
    found = weight * ratio_by_invariants(values, error, at, 0.0)
    assert shift.is_found == (found > 1 / LEVEL)


def test_a_step_is_placed_where_it_is():
    values = [0.02] * 12 + [0.06] * 6
    shift = find_shift(make_differences(values, 0.005), level=LEVEL)
    assert shift is not None and shift.is_found
    assert (shift.at, shift.earliest, shift.latest) == (12, 12, 12)
    assert shift.low < 0.04 < shift.high


def test_weak_evidence_leaves_a_range_of_dates():
    values = [0.02] * 12 + [0.06] * 6
    shift = find_shift(make_differences(values, 0.03), level=LEVEL)
    assert shift is not None and not shift.is_found
    assert shift.earliest < 12 < shift.latest


def test_one_period_has_no_change():
    assert find_shift(make_differences([0.1], 0.01), level=LEVEL) is None


def test_the_pair_that_moved_is_found_among_many():
    rates = np.full((20, 4), 0.4)
    rates[10:, 2] += 0.1
    looks, found = watch(make_series(rates, 4000), [])
    assert [(each.at, each.found_at) for each in found] == [(10, 10)]
    assert [look.start for look in looks] == [0] * 10 + [10] * 10


def test_two_changes_are_two_changes():
    rates = np.full((30, 2), 0.4)
    rates[10:20, 1] += 0.08
    rates[20:, 1] -= 0.05
    _, found = watch(make_series(rates, 5000), [])
    assert [each.at for each in found] == [10, 20]


def test_a_known_change_is_not_found_again():
    rates = np.full((20, 2), 0.4)
    rates[10:, 1] += 0.1
    looks, found = watch(make_series(rates, 4000), [10])
    assert found == []
    assert looks[9].start == 0 and looks[10].start == 10


def test_a_later_look_moves_the_date_of_a_change_but_not_when_it_was_found():
    generator = np.random.default_rng(5)
    moved = 0
    for _ in range(60):
        rates = 0.4 + 0.011 * generator.standard_normal((24, 2))
        rates[12:, 1] += 0.045
        _, all_found = watch(make_series(rates, 2000), [])
        if not all_found:
            continue
        when = all_found[0].found_at
        _, early = watch(make_series(rates[: when + 1], 2000), [])
        assert early[0].found_at == when
        moved += early[0].at != all_found[0].at
    assert moved


# What moved it


def counts(generator, sites):
    rows = generator.integers(0, 50, (len(sites), 2)).astype(float)
    rows[0] += 1
    return SiteCounts(tuple(sites), np.floor(rows * generator.random(rows.shape)), rows)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_the_parts_add_up_to_the_change_exactly(seed):
    generator = np.random.default_rng(seed)
    names = np.array(["north", "south", "east", "west"])

    def draw(periods):
        return [
            counts(generator, names[generator.random(4) < 0.7].tolist() or ["north"])
            for _ in range(periods)
        ]

    before, after = draw(3), draw(2)
    weights = generator.dirichlet(np.ones(3)), generator.dirichlet(np.ones(2))
    parts = split_change(before, after, *weights)

    def gap(periods, weight):
        rates = [part.hits.sum(0) / part.rows.sum(0) for part in periods]
        return sum(w * (r[0] - r[1]) for w, r in zip(weight, rates, strict=True))

    change = gap(after, weights[1]) - gap(before, weights[0])
    assert parts.change == pytest.approx(change, abs=1e-12)
    assert sum(parts.groups) == pytest.approx(change, abs=1e-12)
    assert sum(part.total for part in parts.sites.values()) == pytest.approx(change, abs=1e-12)


def one_period(**sites) -> SiteCounts:
    """Each site: hits of both groups, then rows of both groups."""
    values = np.array([each for each in sites.values()], float)
    return SiteCounts(tuple(sites), values[:, :2], values[:, 2:])


def test_a_site_whose_rates_change_moves_the_gap_by_its_own_rates():
    before = one_period(north=(40, 40, 100, 100), south=(40, 40, 100, 100))
    after = one_period(north=(60, 40, 100, 100), south=(40, 40, 100, 100))
    parts = split_change([before], [after], np.ones(1), np.ones(1))
    assert parts.sites["north"] == pytest.approx((0.1, 0.0))
    assert parts.sites["south"] == pytest.approx((0.0, 0.0))
    assert parts.groups == pytest.approx((0.1, 0.0))


def test_a_site_that_grows_moves_the_gap_by_the_mix():
    before = one_period(north=(80, 40, 100, 50), south=(20, 30, 100, 150))
    after = one_period(north=(160, 40, 200, 50), south=(20, 30, 100, 150))
    parts = split_change([before], [after], np.ones(1), np.ones(1))
    assert all(part.own == 0 for part in parts.sites.values())
    assert parts.change == pytest.approx(180 / 300 - 100 / 200)


def test_a_new_site_is_all_mix():
    before = one_period(north=(40, 40, 100, 100))
    after = one_period(north=(40, 40, 100, 100), west=(90, 10, 100, 100))
    parts = split_change([before], [after], np.ones(1), np.ones(1))
    assert {name: part.own for name, part in parts.sites.items()} == {"north": 0.0, "west": 0.0}
    assert parts.change == pytest.approx(0.65 - 0.25)


# Simulated histories; benchmarks/coverage/monitor.py simulates more of them


def test_a_planted_change_of_three_points_is_found():
    delays = []
    for seed in range(10):
        found = monitor(list(draw_history(np.random.default_rng(seed), change=0.03)))
        labels = [period.label for period in found.periods]
        first = next(change for change in found.changes if change.metric == "sp")
        delays.append(labels.index(first.found_in or "") - 12)
        assert first.direction == "larger" and first.pair == ("m", "f")
        assert first.low < 0.03 < first.high
        parts = [part.total for part in first.sites.values()]
        assert sum(parts) == pytest.approx(first.change, abs=1e-9)
        assert sum(first.groups.values()) == pytest.approx(first.change, abs=1e-9)
        assert set(first.sites) == set(SITES)
    assert min(delays) >= 0 and np.median(delays) <= 3


def test_the_site_that_moved_is_named_first():
    history = draw_history(np.random.default_rng(1), change=0.09, site="south")
    found = monitor(list(history), metrics=["sp"])
    (change,) = found.changes
    largest = max(change.sites, key=lambda name: abs(change.sites[name].total))
    assert largest == "south"
    assert change.sites["south"].own > 5 * abs(change.sites["south"].mix)
    assert change.groups["m"] > 5 * abs(change.groups["f"])


def test_quiet_histories_stay_quiet():
    quiet = [
        monitor(list(draw_history(np.random.default_rng(100 + seed), rows=500)))
        for seed in range(40)
    ]
    assert sum(bool(found.changes) for found in quiet) <= 2
    assert sum(bool(found.alarms) for found in quiet) <= 2
    for found in quiet[:10]:
        if not found.changes:
            for gap in (period.gaps["sp"] for period in found.periods):
                assert gap.band_low is not None and gap.band_high is not None
                assert gap.band_low <= 0.02 <= gap.band_high
