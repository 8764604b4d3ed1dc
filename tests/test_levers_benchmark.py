"""The benchmark of ideas: how differences are judged, and the mixture of rounds."""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedgft.bench.scores import Outcome
from fedgft.metrics import get_metric

FOLDER = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture(scope="module")
def levers():
    sys.path.insert(0, FOLDER)
    yield import_module("levers")
    sys.path.remove(FOLDER)


def test_a_difference_has_the_interval_of_a_paired_test(levers) -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(0.8, 0.01, 12)
    new = old + rng.normal(0.01, 0.005, 12)
    found = levers.Difference.of(new, old)
    expected = stats.ttest_rel(new, old).confidence_interval(0.95)
    assert found.mean == pytest.approx(100 * (new - old).mean())
    assert (found.low, found.high) == pytest.approx((100 * expected.low, 100 * expected.high))


@pytest.mark.parametrize(
    ("accuracy", "gap", "expected"),
    [
        ((0.1, 0.3), (-0.2, 0.2), "wins"),
        ((-0.1, 0.3), (-0.5, -0.2), "wins"),
        ((0.1, 0.3), (0.2, 0.4), "ties"),  # better in one, worse in the other
        ((-0.1, 0.3), (-0.1, 0.4), "ties"),
        ((-0.3, -0.1), (-0.1, 0.4), "loses"),
    ],
)
def test_verdicts(levers, accuracy, gap, expected) -> None:
    pair = [levers.Difference(sum(ends) / 2, *ends) for ends in (accuracy, gap)]
    assert levers.judge(*pair) == expected


def count_models(rates: np.ndarray, right: np.ndarray) -> Outcome:
    """Counts of 100 negatives in each of two groups: with these rates of selection, one seed."""
    counts = np.zeros((len(rates), 1, 2, 3, 2))
    counts[:, 0, 0, :2, 1] = 100 * rates
    counts[:, 0, 0, :2, 0] = 100 - 100 * rates
    counts[:, 0, 1, 2, 1] = 100 * right  # rows without a group make models more or less accurate
    counts[:, 0, 1, 2, 0] = 100 - 100 * right
    return Outcome(counts, counts, counts, counts[:, :, None])


def test_a_mixture_is_the_best_within_the_target(levers) -> None:
    """Two models that favor one group each: all weights on a grid are tried."""
    models = count_models(np.array([[0.3, 0.1], [0.1, 0.2]]), np.array([0.9, 0.5]))
    sp = get_metric("sp")
    mixed, feasible = levers.mix(sp, 0.02, models)
    assert feasible == 1
    best = -1.0
    for weight in np.linspace(0, 1, 10_001):
        gap = abs(weight * 0.2 - (1 - weight) * 0.1)
        if gap <= 0.02 + 1e-12:
            share = weight * models.accuracy("train")[0, 0]
            best = max(best, share + (1 - weight) * models.accuracy("train")[1, 0])
    assert mixed.accuracy("train")[0] == pytest.approx(best, abs=1e-4)
    assert mixed.gap(sp, "train")[0] == pytest.approx(0.02, abs=1e-9)


def test_without_a_mixture_the_last_model_stays(levers) -> None:
    models = count_models(np.array([[0.3, 0.1], [0.4, 0.1]]), np.array([0.9, 0.5]))
    mixed, feasible = levers.mix(get_metric("sp"), 0.0, models)
    assert feasible == 0
    np.testing.assert_allclose(mixed.train, models.train[1])
