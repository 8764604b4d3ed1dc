"""FairFed's weights on a federation that can be computed by hand, and local reweighing."""

from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedgft.algorithms import Cohort, FairFed, LocalResults, reweigh
from fedgft.metrics import CATALOG
from fedgft.sums import Sums, stack

# Scores, labels, groups. Rates 0.7 and 0.3; 0.5 and 0.6; 0.8 and nothing. Together 2/3 and 0.45.
CLIENTS = [
    ((0.8, 0.6, 0.4, 0.2), (1, 0, 0, 0), (0, 0, 1, 1)),  # accuracy 0.75
    ((0.6, 0.4, 0.7, 0.5), (1, 1, 0, 0), (0, 0, 1, 1)),  # accuracy 0.5
    ((0.9, 0.7), (1, 0), (0, 0)),  # accuracy 0.5; together 0.6
]
TRAINED = [((0.7, 0.5, 0.5, 0.3), *CLIENTS[0][1:]), *CLIENTS[1:]]  # rates 0.6 and 0.4
GAP = 2 / 3 - 0.45
DELTA = np.array([0.4 - GAP, GAP + 0.1, 0.1])  # the last by accuracy; their mean is 0.2
SIZES = np.array([[4, 4, 2]])
COHORT = Cohort(
    run=np.zeros(3, int),
    client=np.arange(3),
    weight=np.array([0.4, 0.4, 0.2]),
    bounds=np.array([0, 3]),
    full=True,
)


def tally(clients: list) -> Sums:
    made = []
    for score, labels, groups in clients:
        probs = np.stack((1 - np.array(score), np.array(score)), axis=1)
        made.append(Sums.of(probs, np.array(labels), np.array(groups), num_groups=2))
    return stack(made)


def seen(received, trained=None) -> LocalResults:
    return LocalResults(received, trained, path_length=np.ones(3))


def test_fairfed_rule_subtract() -> None:
    rule = FairFed(CATALOG["sp"], beta=4.0)
    weights, kept = rule.coefficients(rule.init(SIZES), COHORT, seen(tally(CLIENTS), None))
    raw = np.array([0.4, 0.4, 0.2]) - 4 * (DELTA - 0.2)
    assert raw[1] < 0
    np.testing.assert_allclose(kept, [[7 / 15, 0, 0.6]], atol=1e-12)
    np.testing.assert_allclose(weights, [0.4375, 0, 0.5625], atol=1e-12)
    _, again = rule.coefficients(kept, COHORT, seen(tally(CLIENTS), None))
    np.testing.assert_allclose(again, [[8 / 15, 0, 1.0]], atol=1e-12)  # they grow: not normalized


def test_fairfed_rule_authors() -> None:
    rule = FairFed(CATALOG["sp"], beta=4.0, rule="authors")
    first = rule.init(SIZES)
    np.testing.assert_allclose(first, np.full((1, 3), 1 / 3))
    weights, kept = rule.coefficients(first, COHORT, seen(tally(CLIENTS), None))
    np.testing.assert_allclose(weights, [6 / 17, 0, 11 / 17], atol=1e-12)
    np.testing.assert_array_equal(kept[0], weights)


def test_exp_looks_at_the_trained_models() -> None:
    rule = FairFed(CATALOG["sp"], beta=2.0, rule="exp")
    state = rule.init(SIZES)
    assert rule.sees == "trained"
    weights, kept = rule.coefficients(state, COHORT, seen(tally(CLIENTS), tally(TRAINED)))
    delta = [abs(0.2 - GAP), GAP + 0.1, abs(0.5 - 0.6)]
    raw = np.array([0.4 * exp(-2 * delta[0]), 0.4 * exp(-2 * delta[1]), 0.2 * exp(-2 * delta[2])])
    np.testing.assert_allclose(weights, raw / raw.sum(), atol=1e-12)
    np.testing.assert_array_equal(kept, state)


def test_before_the_first_model_weights_are_those_of_the_start() -> None:
    for rule, expected in (("subtract", [0.4, 0.4, 0.2]), ("authors", [1 / 3] * 3)):
        made = FairFed(CATALOG["sp"], rule=rule)
        weights, _ = made.coefficients(made.init(SIZES), COHORT, seen(None, None))
        np.testing.assert_allclose(weights, expected)


def test_fairfed_state_is_returned_and_restored() -> None:
    rule = FairFed(CATALOG["sp"], beta=4.0)
    state = rule.init(SIZES)
    before = state.copy()
    rule.coefficients(state, COHORT, seen(tally(CLIENTS), None))
    np.testing.assert_array_equal(state, before)


def test_if_all_weights_are_clipped_sizes_are_used() -> None:
    """All weights zero is no model: the cohort's own weights are used instead."""
    rule = FairFed(CATALOG["sp"], beta=1.0)
    alone = Cohort(np.zeros(1, int), np.zeros(1, int), np.ones(1), np.array([0, 1]), full=False)
    weights, _ = rule.coefficients(np.zeros((1, 3)), alone, seen(tally(CLIENTS[:1]), None))
    np.testing.assert_array_equal(weights, [1.0])


@given(arrays(np.float64, (3, 2, 3), elements=st.integers(1, 50).map(float)))
def test_reweighing_makes_label_and_group_independent(count: np.ndarray) -> None:
    known = count[..., :-1]
    weights = reweigh(count)
    mass = known * weights[..., :-1]
    by_label = mass.sum(2, keepdims=True)
    by_group = mass.sum(1, keepdims=True)
    total = mass.sum((1, 2), keepdims=True)
    np.testing.assert_allclose(mass * total, by_label * by_group, rtol=1e-12)
    np.testing.assert_allclose(by_label, known.sum(2, keepdims=True), rtol=1e-12)  # nobody lost
    np.testing.assert_allclose(by_group, known.sum(1, keepdims=True), rtol=1e-12)
    np.testing.assert_array_equal(weights[..., -1], 1.0)


@pytest.mark.parametrize("empty", [(0, 0), (1, 1)])
def test_reweighing_an_empty_cell_needs_no_weight(empty: tuple[int, int]) -> None:
    count = np.array([[[3.0, 1.0, 2.0], [2.0, 4.0, 0.0]]])
    count[0][empty] = 0
    assert np.isfinite(reweigh(count)).all()
    np.testing.assert_array_equal(reweigh(np.zeros((1, 2, 3))), 1.0)


def test_reweighing_by_hand() -> None:
    """Kamiran and Calders: 6 rows of group 0, 4 of group 1; 5 of each label."""
    count = np.array([[[2.0, 3.0, 7.0], [4.0, 1.0, 0.0]]])
    expected = [[6 * 5 / 20, 4 * 5 / 30, 1.0], [6 * 5 / 40, 4 * 5 / 10, 1.0]]
    np.testing.assert_allclose(reweigh(count), [expected])
