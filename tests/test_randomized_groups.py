"""Randomized response: the matrix, its inverse, and training with corrected prices."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from fedgft import algorithms
from fedgft.algorithms import get_method
from fedgft.data.dataset import Dataset, Federation, standardize
from fedgft.data.partition import partition
from fedgft.engine import Settings, predict_proba, simulate
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, price
from fedgft.metrics.group_axis import GroupAxis, bind_metric
from fedgft.metrics.randomized_response import correction_matrix, response_matrix
from fedgft.models import Trees
from fedgft.sums import Sums
from small_federation import EXECUTORS, SGD, federation, run


@pytest.mark.parametrize("k", [2, 3, 7])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0, 8.0])
def test_the_matrix_is_randomized_response_and_its_inverse_is_exact(k, epsilon):
    matrix = response_matrix(k, epsilon)
    keep = math.exp(epsilon) / (math.exp(epsilon) + k - 1)
    expected = [[keep if h == g else (1 - keep) / (k - 1) for g in range(k)] for h in range(k)]
    np.testing.assert_allclose(matrix, expected, rtol=1e-12)
    np.testing.assert_allclose(matrix.sum(0), 1, rtol=1e-12)
    np.testing.assert_allclose(correction_matrix(k, epsilon), np.linalg.inv(matrix), rtol=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e-6, 51.0, math.inf, math.nan])
def test_an_epsilon_that_is_no_use_is_named(epsilon):
    with pytest.raises(FedgftError) as caught:
        response_matrix(2, epsilon)
    assert caught.value.field == "randomized_groups"


# Training


def randomized(data: Dataset, epsilon: float, *, seed: int) -> Dataset:
    """The data set after its groups went through randomized response."""
    rng = np.random.default_rng(seed)
    k = len(data.group_names)
    keep = rng.random(len(data)) < np.exp(epsilon) / (np.exp(epsilon) + k - 1)
    other = (data.groups + rng.integers(1, k, len(data))) % k
    reported = np.where(data.groups < 0, -1, np.where(keep, data.groups, other))
    return replace(data, groups=reported, randomized=epsilon)


def tiny(groups: np.ndarray, *, epsilon: float = 0.0) -> Federation:
    """Two clients of three rows, in strata, with these groups."""
    rng = np.random.default_rng(0)
    data = Dataset(
        "tiny",
        rng.normal(size=(6, 2)),
        np.array([0, 1, 1, 0, 1, 0]),
        groups,
        ("a", "b"),
        randomized=epsilon,
    )
    return Federation(data, np.arange(6, dtype=np.int32), np.array([0, 3, 6]), np.empty(0, int))


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_corrected_sums_and_gradients_are_unbiased_over_all_reports(epsilon):
    """Exactly: the mean over all 64 reports of six rows, each with its probability.

    At given prices of the true groups, the gradient of a client's rows is linear in its reports.
    """
    true = np.array([0, 0, 1, 1, 1, 0])
    metric = CATALOG["sp"]
    rng = np.random.default_rng(1)
    probs = rng.dirichlet(np.ones(2), 6)
    cotangent = rng.normal(size=(1, 2, 1, 2))
    axis = GroupAxis(2, epsilon=epsilon)
    keep = math.exp(epsilon) / (math.exp(epsilon) + 1)
    labels = tiny(true).dataset.labels
    plain = Sums.of(probs, labels, true, num_groups=2)
    expected = price(metric, cotangent, 2)[0][labels, true]
    found = np.zeros_like(expected)
    statistics = np.zeros((2, 1, 2))
    for reports in itertools.product((0, 1), repeat=6):
        groups = np.array(reports)
        chance = np.prod(np.where(groups == true, keep, 1 - keep))
        sums = replace(Sums.of(probs, labels, groups, num_groups=2), axis=axis)
        statistics += chance * sums.statistics(metric, "soft")
        table = price(bind_metric(metric, axis), cotangent, 2)[0]
        found += chance * table[labels, groups]
        assert sums.accuracy() == plain.accuracy()
    np.testing.assert_allclose(statistics, plain.statistics(metric, "soft"), atol=1e-12)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["sp", "eo", "sp|ward"])
def test_one_step_is_the_gradient_of_the_corrected_objective(name, executor):
    """With the sums of reported groups corrected by hand, by finite differences."""
    made = federation([(260, (0, 1, -1), (0, 1)), (140, (0, 1), (0, 1))])
    data = randomized(made.dataset, 2.0, seed=0)
    ward = np.random.default_rng(5).integers(0, 2, len(data))
    if "|" in name:
        data = replace(data, strata=ward, strata_names=("a", "b"), given=("ward",))
    made = replace(made, dataset=data)
    start = 0.5 * np.random.default_rng(3).normal(size=10)
    options = {"rounds": 1, "batch_size": 1000, "optimizer": SGD, "init": start, "lr": 1.0}
    found = run(made, algorithms.fedgft(name, 7.0), executor=executor, **options)
    rows = made.rows
    y, a, s = data.labels[rows], data.groups[rows], ward[rows]
    inverse = np.linalg.inv(response_matrix(2, 2.0))

    def gap(p: np.ndarray) -> float:
        gaps, pairs = [], []
        for label in (0, 1) if name == "eo" else (None,):
            for stratum in (0, 1) if "|" in name else (None,):
                inside = np.ones(len(rows), bool)
                if label is not None:
                    inside &= y == label
                if stratum is not None:
                    inside &= s == stratum
                up = inverse @ [p[inside & (a == g)].sum() for g in (0, 1)]
                down = inverse @ [(inside & (a == g)).sum() for g in (0, 1)]
                gaps.append(abs(up[0] / down[0] - up[1] / down[1]))
                pairs.append(down[0] * down[1] / down.sum())
        if name == "sp|ward":
            return np.sqrt(np.average(np.square(gaps), weights=pairs))
        return max(gaps)

    def loss(params: np.ndarray) -> float:
        z = data.features[rows] @ (params[4:8] - params[:4]) + params[9] - params[8]
        entropy = np.logaddexp(0, np.where(y == 1, -z, z)).mean()
        return entropy + 3.5 * gap(1 / (1 + np.exp(-z))) ** 2

    step = 1e-5
    expected = [(loss(start + step * e) - loss(start - step * e)) / (2 * step) for e in np.eye(10)]
    np.testing.assert_allclose(start - found.params[0], expected, rtol=1e-5, atol=1e-7)


def test_the_mean_gradient_over_many_reports_is_that_of_the_true_groups():
    """At prices of the true groups, as every client would apply them to its reports."""
    made = federation([(300, (0, 1), (0, 1))])
    data = made.dataset
    scores = np.random.default_rng(0).random(len(data))
    slope = scores * (1 - scores)
    cotangent = np.array([[[[0.7, -0.4]], [[0.0, 0.0]]]])
    true = price(CATALOG["sp"], cotangent, 2)[0][data.labels, data.groups, 1]
    expected = (true * slope) @ data.features / len(data)
    table = price(bind_metric(CATALOG["sp"], GroupAxis(2, epsilon=1.0)), cotangent, 2)[0]
    found = [
        (table[data.labels, randomized(data, 1.0, seed=i).groups, 1] * slope) @ data.features
        for i in range(2000)
    ]
    found = np.array(found) / len(data)
    error = found.std(0) / np.sqrt(len(found))
    assert (np.abs(found.mean(0) - expected) < 4 * error).all()
    assert error.max() < 0.1 * np.abs(expected).max()


def biased(rows: int = 20_000, seed: int = 0) -> Dataset:
    """Rows whose label depends on the group, which a feature tells in part."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 2, rows)
    proxy = groups + rng.normal(size=rows)
    skill = rng.normal(size=rows)
    labels = (skill + 0.9 * groups + 0.7 * rng.normal(size=rows) > 0.5).astype(int)
    return Dataset("biased", np.stack((proxy, skill), 1), labels, groups, ("proxy", "skill"))


def test_the_target_holds_for_the_true_groups_and_not_for_reported_ones_taken_as_true():
    data = biased()
    noisy = randomized(data, 1.0, seed=1)
    naive = replace(noisy, randomized=0.0)
    settings = Settings(rounds=30)
    gaps = {}
    for name, each in {"true": data, "corrected": noisy, "naive": naive}.items():
        made = standardize(partition(each, clients=4, seed=0))
        history = simulate(made, "logistic", "fedgft-control", settings, target=0.02)
        probs = predict_proba(made, "logistic", history.params[0], made.rows)
        sums = Sums.of(probs, data.labels[made.rows], data.groups[made.rows], num_groups=2)
        gaps[name] = float(sums.gap("sp", "hard"))
        assert history.control.reached[0]
    assert gaps["true"] <= 0.023
    assert gaps["corrected"] < 0.05  # the estimate has a standard error of about 0.02
    assert gaps["naive"] == pytest.approx(0.02 * (math.e + 1) / (math.e - 1), abs=0.03)


def test_trees_are_corrected_too():
    data = biased()
    made = partition(randomized(data, 1.5, seed=1), clients=4, seed=0)
    history = simulate(made, Trees(max_depth=3, folds=0), target=0.03, rounds=100)
    assert history.control.reached[0]
    probs = predict_proba(made, Trees(max_depth=3, folds=0), history.params[0], made.rows)
    sums = Sums.of(probs, data.labels[made.rows], data.groups[made.rows], num_groups=2)
    assert sums.gap("sp", "hard") < 0.07


def test_what_randomized_groups_cannot_do_is_refused():
    made = federation()
    noisy = replace(made, dataset=randomized(made.dataset, 1.0, seed=0))
    for name in ("lrw", "fairfed", "fedfb"):
        method = get_method(name, CATALOG["sp"], 0.5)
        with pytest.raises(FedgftError) as caught:
            run(noisy, method)
        assert caught.value.field == "method"
    with pytest.raises(FedgftError) as caught:
        replace(made.dataset, randomized=-1.0)
    assert caught.value.field == "randomized_groups"
    found = run(noisy, algorithms.fedgft("sp", 1.0)).model().about["trained"]
    assert found["gap_test_low"] is None
