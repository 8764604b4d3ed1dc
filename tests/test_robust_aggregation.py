"""Limits on the sums of one site: honest sites lose nothing, and a liar gains little."""

import numpy as np
import pytest

from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.metrics.robust_aggregation import (
    NO_LIMITS,
    SiteLimits,
    limit_sites,
    norm_limit,
    share_limit,
    size_limit,
)
from fedgft.sums import Sums

SP = CATALOG["sp"]
EOP = CATALOG["eop"]
EO = CATALOG["eo"]
BOTH = ("hard", "soft")


def people(alpha=0.5, sites=10, rows=8000, seed=0, classes=2, groups=2):
    """Honest sites: cells divided by a Dirichlet draw, and one model's decisions in each cell."""
    rng = np.random.default_rng(seed)
    shape = (classes, groups + 1)
    total = rows * rng.dirichlet(np.full(classes * (groups + 1), 3.0)).reshape(shape)
    count = np.zeros((sites, *shape))
    for cell in np.ndindex(*shape):
        count[(slice(None), *cell)] = rng.multinomial(
            int(total[cell]), rng.dirichlet(np.full(sites, alpha))
        )
    rates = rng.dirichlet(np.full(classes, 2.0), size=shape)
    out = []
    for k in range(sites):
        decision = np.zeros((*shape, classes))
        for cell in np.ndindex(*shape):
            decision[cell] = rng.multinomial(int(count[k][cell]), rates[cell])
        out.append(Sums(count[k], 0.5 * decision + 0.5 * count[k][..., None] * rates, decision))
    return out


def lie_of(count, accepted=0):
    """Everybody of one group is accepted, all others are refused."""
    table = np.zeros((*count.shape, 2))
    table[..., 0] = count
    table[:, accepted] = table[:, accepted, ::-1]
    return Sums(count.astype(float), table, table)


def rates_of(tallies):
    """P(decision 1 | group), summed by hand."""
    out = []
    for g in range(tallies[0].count.shape[1] - 1):
        rows = sum(t.count[:, g].sum() for t in tallies)
        out.append(sum(t.decision[:, g, 1].sum() for t in tallies) / rows)
    return np.array(out)


def change(tallies, k):
    """What leaving site k out does to the difference of the two groups' rates."""
    now = rates_of(tallies)
    without = rates_of([t for j, t in enumerate(tallies) if j != k])
    return float(np.ptp(now - without))


@pytest.mark.parametrize("alpha", [0.5, 5.0, 100.0])
def test_honest_sites_are_left_exactly_as_they_are(alpha: float) -> None:
    touched = 0
    for seed in range(15):
        sites = people(alpha, seed=seed)
        limited = limit_sites(sites, SP, BOTH, SiteLimits())
        assert all(
            k is t for k, t, why in zip(limited.sums, sites, limited.why, strict=True) if not why
        )
        touched += sum(map(bool, limited.why))
        assert ((limited.moved > 0) <= [bool(why) for why in limited.why]).all()
    assert touched <= {0.5: 6, 5.0: 2, 100.0: 0}[alpha]  # of 150 sites


def test_small_honest_sites_are_not_outliers() -> None:
    """Nine sites of 2,000 rows and one of 12, all of whose people are accepted."""
    sites = people(100.0, sites=9, rows=18_000)
    few = np.zeros((2, 3))
    few[1, 0] = 12.0
    limited = limit_sites([*sites, lie_of(few)], SP, BOTH, SiteLimits())
    assert not any(limited.why)
    many = limit_sites([*sites, lie_of(few * 100)], SP, BOTH, SiteLimits())
    assert "rates of decisions" in many.why[-1][0] and not any(many.why[:-1])


@pytest.mark.parametrize("alpha", [0.5, 100.0])
def test_the_influence_of_a_liar_is_limited(alpha: float) -> None:
    raw = []
    for seed in range(8):
        sites = people(alpha, seed=seed)
        count = np.zeros((2, 3))
        count[1, 0] = sites[3].count.sum()
        lied = [*sites[:3], lie_of(count), *sites[4:]]
        limited = limit_sites(lied, SP, ("hard",), SiteLimits())
        others = [t for j, t in enumerate(limited.sums) if j != 3]
        usual = np.mean([change(others, j) for j in range(9)])
        allowed = max(0.02, 6 * usual)
        raw.append(change(lied, 3))
        assert change(limited.sums, 3) <= allowed + 1e-4
        assert limited.leverage[3] <= allowed + 1e-9
        assert limited.moved[3] == pytest.approx(
            np.ptp(rates_of([*others, lied[3]]) - rates_of(limited.sums)), abs=1e-9
        )
        assert limited.sums[3].count.sum() <= count.sum() + 1e-6
        np.testing.assert_allclose(  # sums are still sums of rows
            limited.sums[3].decision.sum(-1), limited.sums[3].count, atol=1e-6
        )
    assert np.mean(raw) > 0.1  # without limits


@pytest.mark.parametrize("alpha", [0.5, 100.0])
def test_no_lie_goes_beyond_its_leverage(alpha: float) -> None:
    """Leverage is what is told before anybody lies; lies of as many rows stay within it."""
    rng = np.random.default_rng(1)
    sites = people(alpha, seed=2, rows=20_000)
    leverage = limit_sites(sites, SP, ("hard",), SiteLimits()).leverage
    for k in (0, 4, 7):
        for _ in range(12):
            share = rng.dirichlet(np.full(6, 0.3)).reshape(2, 3)
            count = np.round(sites[k].count.sum() * share)
            lied = [
                lie_of(count, int(rng.integers(2))) if j == k else t for j, t in enumerate(sites)
            ]
            limited = limit_sites(lied, SP, ("hard",), SiteLimits())
            assert change(limited.sums, k) <= leverage[k] * 1.05 + 1e-3


@pytest.mark.parametrize("name", ["eop", "eo", "fpr"])
def test_the_leverage_does_not_depend_on_the_order_of_the_sites(name: str) -> None:
    """Labels that help a lie equally tie up to rounding; sums in another order round otherwise."""
    for seed in range(6):
        sites = people(0.5, seed=seed)
        order = np.random.default_rng(seed).permutation(len(sites))
        leverage = limit_sites(sites, CATALOG[name], ("soft",), NO_LIMITS).leverage
        other = limit_sites([sites[k] for k in order], CATALOG[name], ("soft",), NO_LIMITS).leverage
        np.testing.assert_allclose(other, leverage[order], atol=1e-9)


def test_agreed_counts_leave_only_the_rates_to_lie_with() -> None:
    sites = people(2.0, seed=3, rows=40_000)
    lied = [lie_of(sites[0].count), *sites[1:]]
    agreed = [True] * len(sites)
    limited = limit_sites(lied, SP, BOTH, SiteLimits(), agreed=agreed)
    np.testing.assert_array_equal(limited.sums[0].count, sites[0].count)
    honest = limit_sites(sites, SP, BOTH, SiteLimits(), agreed=agreed)
    assert not any(honest.why)  # no influence is too large where counts are known
    far = np.abs(rates_of(limited.sums) - rates_of(sites)).max()
    assert far < np.abs(rates_of(lied) - rates_of(sites)).max() / 2


def test_too_few_sites_to_compare_are_left_alone() -> None:
    sites = [lie_of(np.full((2, 3), 50.0), g) for g in (0, 1)]
    assert not any(limit_sites(sites, SP, BOTH, SiteLimits()).why)
    alone = people(sites=1)
    assert limit_sites(alone, SP, BOTH, SiteLimits()).sums[0] is alone[0]


def test_a_site_that_alone_has_a_group_may_move_all_of_it() -> None:
    sites = people(100.0, sites=6)
    for t in sites[1:]:
        for table in (t.count, t.score, t.decision):
            table[:, 1] = 0.0
    limited = limit_sites(sites, SP, BOTH, SiteLimits())
    assert limited.leverage[0] == 1.0 and not limited.why[0]


def test_noise_widens_what_is_believed() -> None:
    """Under noise one kind of sums is sent, and rates may lie outside [0, 1]."""
    rng = np.random.default_rng(0)
    sites = []
    for t in people(100.0, rows=4000):
        loud = t.decision + rng.normal(0, 20, t.decision.shape)
        sites.append(Sums(t.count, np.full_like(loud, np.nan), loud))
    limited = limit_sites(sites, SP, ("hard",), SiteLimits(), noise=25.0)
    assert not any("rates" in text for why in limited.why for text in why)
    assert np.isfinite(limited.leverage).all()


@pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG)
def test_every_metric_with_several_classes_and_groups(metric) -> None:
    sites = people(5.0, rows=40_000, classes=3, groups=4, seed=5)
    wrong = sites[2].count[..., None] * np.array([0.0, 0.0, 1.0])
    lied = [Sums(t.count, wrong, wrong) if j == 2 else t for j, t in enumerate(sites)]
    limited = limit_sites(lied, metric, BOTH, SiteLimits())
    assert limited.why[2] and np.isfinite(limited.moved).all()
    assert ((limited.leverage >= 0) & (limited.leverage <= 1)).all()


def test_limits_switched_off_change_nothing() -> None:
    sites = people(0.5)
    lied = [lie_of(sites[0].count * 100), *sites[1:]]
    limited = limit_sites(lied, SP, BOTH, NO_LIMITS)
    assert not any(limited.why) and limited.sums[0] is lied[0]
    assert limited.leverage.max() > limit_sites(sites, SP, BOTH, SiteLimits()).leverage.max()


def test_sizes() -> None:
    assert size_limit([100] * 9 + [10**9], SiteLimits()) == pytest.approx(0.3 / 0.7 * 900)
    assert size_limit([500, 400, 1, 1, 1, 1, 1, 1, 1, 1], SiteLimits()) >= 500  # as the next one is
    assert size_limit([7], SiteLimits()) == np.inf
    assert share_limit([1.0, 1.0], 0.3) == 1.0


def test_norms() -> None:
    assert norm_limit([1, 1, 1, 1e30], 5.0) == 5.0
    assert norm_limit([1, 1, 4, 9], 5.0) == 12.0  # a heavy tail is no outlier
    assert norm_limit([1, 1e9], 5.0) == np.inf  # of two, which is right?


def test_limits_are_numbers() -> None:
    for wrong in ({"floor": -0.1}, {"deviations": float("nan")}):
        with pytest.raises(FedgftError, match="SiteLimits"):
            SiteLimits(**wrong)
