"""Theorems 4.1, 4.3, 4.6 and 5.1 as tests, and the bounds on random federations."""

import math
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linprog

from fedgft import theory
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.sums import Sums, stack

ROUNDING = 1e-12  # of sums of at most a few hundred float64 terms below 1

WEIGHTS = arrays(float, 4, elements=st.floats(0.01, 1)).map(lambda w: w / w.sum())

every_metric = pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG.keys())
every_size = pytest.mark.parametrize("clients", [2, 3, 4, 7, 30])
every_gap = pytest.mark.parametrize("gap", [0.001, 0.25, 0.5, 0.73, 0.9, 0.999])


@st.composite
def federations(draw, num_groups: int = 2) -> Sums:
    """Clients of zero to three rows a cell: single-group and empty ones come up often."""
    clients = draw(st.integers(1, 5))
    cells = (clients, 2, num_groups + 1, 2)  # client, label, group (the last: not recorded), class
    decision = draw(arrays(float, cells, elements=st.integers(0, 3)))
    share = draw(arrays(float, cells[:-1], elements=st.integers(0, 8))) / 8
    count = decision.sum(-1)
    assume(count.sum() > 0)
    return Sums(count, np.stack((count * (1 - share), count * share), axis=-1), decision)


def analyzed(example: theory.Example, name: str) -> theory.Analysis:
    return theory.analyze(CATALOG[name], example.sums_by_client(), "hard")


def shown_by(example: theory.Example) -> list[theory.Analysis]:
    """The example under each metric it speaks of."""
    direct = [analyzed(example, name) for name in ("sp", "eop", "eo", "fpr")]
    return [*direct, analyzed(example.swapped(), "predictive-parity")]


@every_size
@every_gap
def test_locally_fair_models_can_be_globally_unfair(clients, gap):
    for found in shown_by(theory.locally_fair_globally_unfair(clients, gap)):
        assert found.gap > gap
        np.testing.assert_allclose(found.local_gaps, np.zeros(clients), atol=ROUNDING)


@every_size
@every_gap
def test_locally_unfair_models_can_be_globally_fair(clients, gap):
    for found in shown_by(theory.locally_unfair_globally_fair(clients, gap)):
        assert found.gap == pytest.approx(0, abs=ROUNDING)
        assert len(found.local_gaps) == clients and (found.local_gaps >= gap).all()


def test_a_local_gap_of_one_is_possible_and_a_global_one_is_not():
    found = analyzed(theory.locally_unfair_globally_fair(3, 1.0), "sp")
    assert (found.local_gaps == 1).all()
    for gap in (1.0, 0.0, -0.5, math.nan):
        with pytest.raises(FedgftError, match="gap must"):
            theory.locally_fair_globally_unfair(3, gap)
    for gap in (0.0, 1.01, math.nan):
        with pytest.raises(FedgftError, match="gap must"):
            theory.locally_unfair_globally_fair(3, gap)
    for build in (theory.locally_fair_globally_unfair, theory.locally_unfair_globally_fair):
        for unfit, message in (((1, 0.5), "clients must be 2 or more"), ((3, 1.1), "gap must lie")):
            with pytest.raises(FedgftError, match=message):
                build(*unfit)


def cells(example: theory.Example, label: int) -> dict[tuple[int, int, int], int]:
    """The rows of each client, group and decision."""
    mine = example.labels == label
    columns = (example.clients, example.groups, example.decisions)
    keys = np.stack([column[mine] for column in columns], axis=1)
    found, rows = np.unique(keys, axis=0, return_counts=True)
    return {tuple(map(int, cell)): int(n) for cell, n in zip(found, rows, strict=True)}


def test_locally_fair_examples_have_the_rows_that_the_docstring_says():
    """K = 3, C = 0.5: each loss is below 1/4 with m = 8 and h = 2, and F = 1 - 2/10 - 1/5."""
    example = theory.locally_fair_globally_unfair(3, 0.5)
    expected = {(0, 0, 1): 8, (0, 1, 1): 1}
    expected |= {(k, group, 0): rows for k in (1, 2) for group, rows in ((0, 1), (1, 2))}
    assert cells(example, 0) == cells(example, 1) == expected
    assert analyzed(example, "sp").signed_gap == pytest.approx(1 - 2 / 10 - 1 / 5)


@pytest.mark.parametrize(("clients", "kinds"), [(2, (1, 1)), (5, (2, 3)), (6, (3, 3))])
def test_locally_unfair_examples_have_the_rows_that_the_docstring_says(clients, kinds):
    """C = 0.62: R = 13/20, and a client is as large as the other kind has clients."""
    example = theory.locally_unfair_globally_fair(clients, 0.62)
    expected = {}
    for k in range(clients):
        scale = kinds[k % 2]
        favored = k % 2
        expected |= {(k, favored, 1): 13 * scale, (k, favored, 0): 7 * scale}
        expected |= {(k, 1 - favored, 0): 20 * scale}
    assert cells(example, 0) == cells(example, 1) == expected
    np.testing.assert_allclose(analyzed(example, "sp").local_gaps, 13 / 20)


def test_simpson_has_the_numbers_of_the_paper():
    example = theory.simpson()
    assert cells(example, 1) == {
        (0, 0, 1): 18,
        (0, 0, 0): 72,
        (0, 1, 1): 2,
        (0, 1, 0): 8,
        (1, 0, 1): 8,
        (1, 0, 0): 2,
        (1, 1, 1): 72,
        (1, 1, 0): 18,
    }
    assert (example.labels == 1).all()
    assert np.bincount(example.groups).tolist() == [100, 100]
    assert [example.decisions[example.groups == g].mean() for g in (0, 1)] == [0.26, 0.74]
    for name in ("sp", "eop"):
        found = analyzed(example, name)
        assert found.signed_gap == pytest.approx(-0.48)  # women minus men
        np.testing.assert_allclose(found.local_gaps, [0, 0], atol=ROUNDING)
        assert found.heterogeneity == pytest.approx(8)
        assert found.total_variation == pytest.approx(0.8)


def random_statistics(rng: np.random.Generator, rates: np.ndarray) -> np.ndarray:
    """Statistics (k, 2, v, g) with these rates (k, v, g) and any denominators."""
    rows = rng.uniform(0.1, 1, size=rates.shape)
    return np.stack((rates * rows, rows), axis=1)


@given(seed=st.integers(0, 2**32 - 1), weights=WEIGHTS)
def test_one_rate_everywhere_is_fair_for_all_weights(seed, weights):
    rng = np.random.default_rng(seed)
    rates = np.broadcast_to(rng.random((1, 2, 1)), (4, 2, 3))  # each condition has its own
    statistics = random_statistics(rng, rates)
    found = theory.fair_for_all_weights(statistics)
    assert found.fair and found.one_rate < ROUNDING
    assert CATALOG["eo"].readout(np.tensordot(weights, statistics, 1)) < ROUNDING


@given(seed=st.integers(0, 2**32 - 1), weights=WEIGHTS)
def test_one_mix_of_groups_is_fair_for_all_weights_too(seed, weights):
    """The paper's condition is not necessary: local rates may differ if the mix does not."""
    rng = np.random.default_rng(seed)
    rates = np.repeat(rng.random((4, 1, 1)), 3, axis=-1)  # a client treats its groups alike
    rows = rng.uniform(0.1, 1, size=(4, 1, 1)) * rng.uniform(0.1, 1, size=(1, 1, 3))
    statistics = np.stack((rates * rows, rows), axis=1)
    found = theory.fair_for_all_weights(statistics)
    assert found.fair and found.one_rate > 1e-6
    assert CATALOG["sp"].readout(np.tensordot(weights, statistics, 1)) < ROUNDING


@given(seed=st.integers(0, 2**32 - 1), locally_fair=st.booleans())
def test_otherwise_some_weights_are_unfair(seed, locally_fair):
    """One client or two of equal weight are enough to show it."""
    rng = np.random.default_rng(seed)
    clients = 4
    rates = rng.random((clients, 1, 2))
    statistics = random_statistics(rng, rates[..., [0, 0]] if locally_fair else rates)
    found = theory.fair_for_all_weights(statistics)
    unit = np.eye(clients)
    assert not found.fair
    few = [(unit[i] + unit[j]) / 2 for i in range(clients) for j in range(clients)]
    gaps = [CATALOG["sp"].readout(np.tensordot(w, statistics, 1)) for w in few]
    # b d F~ = w^T M w, and b d <= 1: the largest of these gaps is a third of it at least.
    assert max(gaps) >= found.violation / 3


def test_how_far_from_fair_for_all_weights_is_counted_one_by_one():
    """max |M + M^T| / 2 and max |M|, over clients, conditions and pairs of groups."""
    S = random_statistics(np.random.default_rng(3), np.random.default_rng(4).random((3, 2, 3)))
    violation = one_rate = 0.0
    for v, (i, j) in product(range(2), combinations(range(3), 2)):
        a = S[:, 0, v, i]
        b = S[:, 1, v, i]
        c = S[:, 0, v, j]
        d = S[:, 1, v, j]
        for k, m in np.ndindex(3, 3):
            one_rate = max(one_rate, abs(a[k] * d[m] - b[k] * c[m]))
            both = a[k] * d[m] - b[k] * c[m] + a[m] * d[k] - b[m] * c[k]
            violation = max(violation, abs(both) / 2)
    found = theory.fair_for_all_weights(S)
    assert found[1:] == pytest.approx((violation, one_rate)) and not found.fair
    assert theory.fair_for_all_weights(S, tolerance=found.violation).fair  # at most, not below


def test_equal_rates_are_compared_between_two_different_groups():
    for groups in (2, 3):
        labels = np.ones(12 * groups, int)
        group = np.repeat(np.arange(groups), 12)
        tally = Sums.of(np.eye(2)[np.arange(12 * groups) % 2], labels, group, num_groups=groups)
        found = theory.analyze(CATALOG["sp"], stack([tally]), "hard")
        assert 0 <= found.pair.i < found.pair.j < groups and found.gap == 0


@pytest.mark.slow
@every_metric
@pytest.mark.parametrize(("num_groups", "kind"), [(2, "soft"), (2, "hard"), (3, "hard")])
@settings(max_examples=60)
@given(data=st.data())
def test_bounds_hold_on_any_federation(metric, num_groups, kind, data):
    tally = data.draw(federations(num_groups))
    found = theory.analyze(metric, tally, kind)
    expected = tally.sum().gap(metric, kind)
    if math.isnan(expected):
        assert np.isnan([found.gap, found.bound_tv, found.bound_tight]).all()
        assert not found.proper or math.isnan(found.heterogeneity)
        return
    condition, i, j = found.pair
    rates = metric.rates(tally.sum().statistics(metric, kind))[condition]
    assert found.gap == pytest.approx(expected, abs=ROUNDING)
    for each in (found.contributions, found.paper_contributions):
        assert np.isfinite(each).all()
        assert abs(found.weights @ each - (rates[i] - rates[j])) < ROUNDING
    assert found.gap <= found.bound_tight + ROUNDING
    assert found.bound_tight <= 1
    assert found.bound_tight <= found.bound_tv + ROUNDING
    if found.proper:
        assert found.total_variation <= found.heterogeneity / 2 + ROUNDING
        assert found.bound_tv <= found.bound_dh + ROUNDING


@given(seed=st.integers(0, 2**32 - 1), alpha=st.floats(0, 1), clients=st.integers(2, 6))
def test_the_tight_bound_is_reached(seed, alpha, clients):
    rng = np.random.default_rng(seed)
    weights, b, d = rng.dirichlet(np.ones(clients)), *rng.uniform(0.1, 1, size=(2, clients))
    more = b / (weights @ b) > d / (weights @ d)
    r = np.where(more, 1.0, alpha)
    s = np.where(more, 1.0 - alpha, 0.0)
    found = theory.Analysis(theory.Compared(0, 0, 1), True, weights, r * b, b, s * d, d)
    assert found.largest_local_gap == pytest.approx(alpha, abs=ROUNDING)
    assert found.gap == pytest.approx(found.bound_tight, abs=1e-9)


def worst_case(p: np.ndarray, q: np.ndarray, alpha: float) -> tuple[float, np.ndarray, np.ndarray]:
    """The largest p.r - q.s over rates in [0, 1] with |r_k - s_k| <= alpha where a client has both
    groups, by linear programming: nothing of ours is in it."""
    both = np.eye(len(p))[(p > 0) & (q > 0)]
    limits = np.concatenate((np.hstack((both, -both)), np.hstack((-both, both))))
    found = linprog(np.concatenate((-p, q)), limits, np.full(len(limits), alpha), bounds=(0, 1))
    assert found.status == 0
    return -found.fun, found.x[: len(p)], found.x[len(p) :]


@pytest.mark.slow
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32 - 1), alpha=st.floats(0, 1), clients=st.integers(1, 7))
def test_no_rates_exceed_the_tight_bound_and_the_worst_ones_reach_it(seed, alpha, clients):
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(clients))
    b, d = rng.uniform(0.01, 1, size=(2, clients)) * (rng.random((2, clients)) < 0.7)
    assume(b.any() and d.any())
    p = weights * b / (weights @ b)
    q = weights * d / (weights @ d)
    assume(((p > 0) & (q > 0)).any())  # else no client has a local gap, and alpha is none
    most, r, s = worst_case(p, q, alpha)
    found = theory.Analysis(theory.Compared(0, 0, 1), True, weights, r * b, b, s * d, d)
    assert found.signed_gap == pytest.approx(most, abs=1e-6)  # the solver's tolerance is 1e-7
    assert found.bound_tight == pytest.approx(most, abs=1e-6) and found.bound_tight <= 1


@pytest.mark.slow
def test_random_rates_stay_below_the_tight_bound():
    """Two thousand federations, many with clients that lack a group; the nearest comes close."""
    rng = np.random.default_rng(0)
    nearest = math.inf
    for _ in range(2_000):
        clients = rng.integers(1, 5)
        weights = rng.dirichlet(np.ones(clients))
        b, d = rng.random((2, clients)) * (rng.random((2, clients)) < 0.8)
        r, s = rng.beta(0.2, 0.2, size=(2, clients))  # near 0 and 1, as worst cases are
        if not (b.any() and d.any()):
            continue
        found = theory.Analysis(theory.Compared(0, 0, 1), True, weights, r * b, b, s * d, d)
        assert found.gap <= found.bound_tight + ROUNDING and found.bound_tight <= 1
        nearest = min(nearest, found.bound_tight - found.gap)
    assert nearest < 1e-2


def alike_everywhere(
    rng: np.random.Generator, classes: int, num_groups: int, clients: int = 5
) -> Sums:
    """All clients treat all groups alike: labels and decisions have one joint distribution.

    How many rows of a group a client has is drawn; some have none.
    """
    joint = rng.dirichlet(np.ones(classes**2)).reshape(classes, classes)  # label, decision
    rows = rng.integers(1, 900, (clients, num_groups + 1)) * (rng.random((clients, 1)) < 0.9)
    rows[0, 0] = rows[1, -2] = 0
    rows[2:] += 1
    decision = np.einsum("kg,yc->kygc", rows, joint)
    return Sums(decision.sum(-1), decision, decision)


many_shapes = pytest.mark.parametrize(("classes", "num_groups"), [(2, 2), (2, 4), (3, 2), (4, 3)])


@every_metric
@many_shapes
def test_where_all_groups_have_the_overall_rate_no_client_adds_to_the_gap(
    metric, classes, num_groups
):
    tally = alike_everywhere(np.random.default_rng(classes), classes, num_groups)
    for kind in ("soft", "hard"):
        found = theory.analyze(metric, tally, kind)
        np.testing.assert_allclose(found.contributions, 0, atol=ROUNDING)
        assert np.abs(found.paper_contributions).max() > 1e-3, "where the groups live"


@every_metric
@many_shapes
def test_a_client_adds_the_distance_of_its_rates_from_the_overall_rate(metric, classes, num_groups):
    """Row by row, for every pair of groups and condition: p_k (r_k - rho) - q_k (s_k - rho)."""
    rng = np.random.default_rng(1)
    clients = 4
    client, label, decision = (rng.integers(n, size=700) for n in (clients, classes, classes))
    group = rng.integers(num_groups, size=700)
    group[(client == 0) & (group == 1)] = 0  # client 0 lacks group 1
    probs = np.eye(classes)[decision]
    side = np.eye(num_groups)
    rows = metric.statistics(probs, np.eye(classes)[label], side[group])  # (row, 2, v, g)
    held = [client == k for k in range(clients)]
    each = [Sums.of(probs[k], label[k], group[k], num_groups=num_groups) for k in held]
    tally = stack(each)
    statistics, weights = theory.per_client(metric, tally, "hard")
    for v, (i, j) in product(range(rows.shape[2]), combinations(range(num_groups), 2)):
        hits = rows[:, 0, v]
        cases = rows[:, 1, v]
        rho = hits[:, [i, j]].sum() / cases[:, [i, j]].sum()
        residual = (hits - rho * cases) / cases.sum(0)
        expected = [(residual[client == k] @ (side[i] - side[j])).sum() for k in range(clients)]
        found = theory.compare(statistics, weights, theory.Compared(v, i, j), proper=False)
        np.testing.assert_allclose(weights * found.contributions, expected, atol=ROUNDING)
        total = hits[:, i].sum() / cases[:, i].sum() - hits[:, j].sum() / cases[:, j].sum()
        assert sum(expected) == pytest.approx(total, abs=ROUNDING)
        assert found.signed_gap == pytest.approx(total, abs=ROUNDING)


@given(seed=st.integers(0, 2**32 - 1), shift=st.floats(-1, 1))
def test_a_constant_added_to_the_outcome_changes_no_contribution(seed, shift):
    rng = np.random.default_rng(seed)
    weights, (b, d), (r, s) = rng.dirichlet(np.ones(4)), *rng.uniform(0.1, 1, size=(2, 2, 4))
    pair = theory.Compared(0, 0, 1)
    before = theory.Analysis(pair, True, weights, r * b, b, s * d, d)
    after = theory.Analysis(pair, True, weights, (r + shift) * b, b, (s + shift) * d, d)
    np.testing.assert_allclose(after.contributions, before.contributions, atol=1e-12)


def test_a_third_group_does_not_move_what_clients_add_to_the_gap_of_two():
    """Groups 0 and 1 are treated alike; group 2, larger than both, is treated otherwise."""
    tally = alike_everywhere(np.random.default_rng(4), 2, 3)
    decision = tally.decision.copy()
    decision[:, :, 2] = 9 * decision[:, :, 2, ::-1]  # accepted and refused change places
    other = Sums(decision.sum(-1), decision, decision)
    statistics, weights = theory.per_client(CATALOG["sp"], other, "hard")
    found = theory.compare(statistics, weights, theory.Compared(0, 0, 1), proper=True)
    np.testing.assert_allclose(found.contributions, 0, atol=ROUNDING)
    with_third = theory.compare(statistics, weights, theory.Compared(0, 0, 2), proper=True)
    assert with_third.gap > 0.05 and np.abs(with_third.contributions).max() > 1e-3


def test_both_departments_of_simpsons_table_add_half_of_the_gap():
    """Neither has a gap, but both are far from the overall rate, where most of one sex apply."""
    found = analyzed(theory.simpson(), "sp")
    assert found.overall_rate == pytest.approx(0.5)
    np.testing.assert_allclose(found.weights * found.contributions, [-0.24, -0.24])
    np.testing.assert_allclose(found.weights * found.paper_contributions, [0.16, -0.64])


def test_pure_clients_have_no_local_gap_and_bound_nothing():
    """Each client holds one group only, as in the paper's last table."""
    client = np.repeat([0, 1, 2], 10)
    group = np.repeat([0, 1, 1], 10)
    decision = np.arange(30) % 3 % 2
    found = analyzed(theory.Example(decision, np.ones(30, int), group, client), "sp")
    assert np.isnan(found.local_gaps).all() and math.isnan(found.largest_local_gap)
    assert found.heterogeneity == math.inf and found.bound_dh == math.inf
    assert found.total_variation == found.bound_tv == found.bound_tight == 1
    assert found.gap == pytest.approx(7 / 20 - 0.3) and np.isfinite(found.contributions).all()


def test_the_letters_are_those_of_the_widest_gap_which_is_named():
    """Equalized odds, three groups: groups 1 and 2 differ most, given label 1."""
    accepted = {(0, 0): 2, (0, 1): 3, (0, 2): 2, (1, 0): 5, (1, 1): 9, (1, 2): 1}  # of ten
    rows = [(y, g, int(i < n)) for (y, g), n in accepted.items() for i in range(10)]
    labels, groups, decisions = np.array(rows).T
    tally = Sums.of(np.eye(2)[decisions], labels, groups, num_groups=3)
    halves = stack([tally.map(lambda x: x / 2)] * 2)
    found = theory.analyze(CATALOG["eo"], halves, "hard")
    assert found.pair == (1, 1, 2)
    assert found.signed_gap == pytest.approx(0.8)
    np.testing.assert_allclose(found.signed_local_gaps, [0.8, 0.8])
    assert found.heterogeneity == pytest.approx(0, abs=ROUNDING)


def test_heterogeneity_is_for_proper_metrics_only():
    found = analyzed(theory.simpson().swapped(), "predictive-parity")
    for name in ("heterogeneity", "bound_dh"):
        with pytest.raises(FedgftError, match="proper"):
            getattr(found, name)
    assert found.bound_tv == pytest.approx(0.8)


def test_what_cannot_be_analyzed_is_refused():
    tally = theory.simpson().sums_by_client()
    one_group = Sums(tally.count[:, :, 1:], tally.score[:, :, 1:], tally.decision[:, :, 1:])
    for unfit, message in ((tally.map(np.zeros_like), "no rows"), (one_group, "two groups")):
        with pytest.raises(FedgftError, match=message):
            theory.analyze(CATALOG["sp"], unfit, "hard")


PENALTIES = {  # J and its slope
    "l1": (lambda x: x, lambda x: 1.0),
    "l2": (lambda x: x**2, lambda x: 2 * x),
    "half l2": (lambda x: x**2 / 2, lambda x: x),
}


@every_metric
@pytest.mark.parametrize(("classes", "num_groups"), [(2, 2), (2, 3), (3, 2), (3, 3)])
@pytest.mark.parametrize(("penalty", "slope"), PENALTIES.values(), ids=PENALTIES)
def test_gradient_of_the_global_penalty_is_a_sum(metric, classes, num_groups, penalty, slope):
    """Theorem 5.1 for any metric: grad J(F(S)) = sum_k w_k grad <v, S_k>, v = J'(F) dF/dS."""
    rng = np.random.default_rng(0)
    sizes = [70, 30, 101, 9]
    rows = sum(sizes)
    clients = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    groups = np.eye(num_groups)[rng.integers(num_groups, size=rows)]
    groups[clients[3]] = groups[0]  # one client holds one group only
    labels = np.eye(classes)[rng.integers(classes, size=rows)]
    features = np.concatenate((rng.normal(size=(rows, 4)), groups), axis=1)  # a bias to find
    hidden = torch.tensor(rng.normal(size=(features.shape[1], 5)), requires_grad=True)
    output = torch.tensor(rng.normal(size=(5, classes)), requires_grad=True)

    def mean_statistics(of: np.ndarray) -> torch.Tensor:
        x, y, a = (torch.tensor(array[of]) for array in (features, labels, groups))
        return metric.statistics((torch.tanh(x @ hidden) @ output).softmax(-1), y, a).mean(0)

    pooled = mean_statistics(np.arange(rows))
    gap = metric.readout(pooled)
    v = torch.tensor(slope(gap.item()) * metric.gradient(pooled.detach().numpy()))
    local = sum(len(of) / rows * (v * mean_statistics(of)).sum() for of in clients)
    central = torch.autograd.grad(penalty(gap), (hidden, output))
    federated = torch.autograd.grad(local, (hidden, output))
    for expected, actual in zip(central, federated, strict=True):
        assert expected.abs().max() > 1e-4, "a gradient of zero would compare nothing"
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["sp", "eop", "fpr"])
def test_two_groups_and_a_proper_metric_give_the_constant_of_the_paper(name):
    """v on a_k and c_k is C/b and -C/d, C = sign(F~) J'(F): the slopes of C F_k; J = x."""
    metric = CATALOG[name]
    tally = theory.locally_unfair_globally_fair(3, 0.7).sums_by_client()[:2]
    found = theory.analyze(metric, tally, "hard")
    statistics, weights = theory.per_client(metric, tally, "hard")
    v = metric.gradient(np.tensordot(weights, statistics, 1))
    expected = [1 / (weights @ found.b), -1 / (weights @ found.d)]
    np.testing.assert_allclose(v[0, 0], np.sign(found.signed_gap) * np.array(expected))
