"""Row weights in training: the same as repeated rows, in every executor and for every method."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import fedgft
from fedgft.algorithms import METHODS, Algorithm, get_method
from fedgft.algorithms.corrections import Scaffold
from fedgft.data.dataset import Dataset, Federation, standardize
from fedgft.engine import Settings, simulate
from fedgft.engine.executors import fused, numpy_kernels
from fedgft.engine.plan import sample_cohort
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, get_metric
from fedgft.models import MLP, Trees
from fedgft.optimizers import Optimizer
from fedgft.study import Study, get_protocol
from fedgft.study.training import train_model
from fedgft.sums import Sums
from small_federation import EXECUTORS, SGD, dataset, federation, run, several

SP = CATALOG["sp"]
ROUNDING = {"rtol": 1e-9, "atol": 1e-12}
FULL = {"batch_size": 1000, "rounds": 4}  # one step on all rows per round
STRENGTHS = {"target": 0.02, "lam": 0.5, "beta": 0.7}


def weighted(made: Federation, weights: np.ndarray) -> Federation:
    """The same federation, whose rows have these weights."""
    return replace(made, dataset=replace(made.dataset, weights=weights))


def repeated(made: Federation, times: np.ndarray) -> Federation:
    """The federation in which row i occurs `times[i]` times."""
    of_clients = times[made.rows]
    offsets = np.concatenate(([0], np.cumsum(of_clients)))[made.offsets]
    rows = np.repeat(made.rows, of_clients)
    return replace(made, rows=rows, offsets=offsets, test=np.repeat(made.test, times[made.test]))


def draw_times(made: Federation, *, seed: int = 3) -> np.ndarray:
    """Whole weights from 0 to 3, of which some are 1."""
    return np.random.default_rng(seed).integers(0, 4, len(made.dataset))


def compare_histories(found, expected, **tolerance) -> None:
    np.testing.assert_allclose(found.params, expected.params, **tolerance)
    for name in ("federation", "test", "before", "after"):
        pairs = zip(getattr(found, name).arrays, getattr(expected, name).arrays, strict=True)
        for mine, theirs in pairs:
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", METHODS)
def test_whole_weights_are_repeated_rows(name, executor):
    made = federation()
    times = draw_times(made)
    strength = STRENGTHS.get(METHODS[name].strength, 0.0)
    method = get_method(name, SP, strength)
    one = run(standardize(weighted(made, times)), method, executor=executor, **FULL)
    two = run(standardize(repeated(made, times)), method, executor=executor, **FULL)
    assert one.executor == executor
    compare_histories(one, two, **ROUNDING)


OTHERS = {
    "scaffold": (Algorithm(correction=Scaffold()), {"optimizer": SGD}),
    "decisions": (fedgft.algorithms.fedgft_control(SP, 0.02, price_on="decisions"), {}),
    "local targets": (fedgft.algorithms.fedgft_control(SP, 0.02, local_target=0.1), {}),
    "every threshold": (fedgft.algorithms.fedgft(get_metric("sp@all"), 3.0), {}),
    "cohort": (fedgft.algorithms.fedgft(SP, 3.0), {"cohort": 3}),
    "momentum": (fedgft.algorithms.fedgft(SP, 3.0), {"optimizer": Optimizer("momentum")}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whole_weights_are_repeated_rows_in_other_settings(name, monkeypatch):
    method, options = OTHERS[name]
    made = federation()
    times = draw_times(made)
    kernels = [fused.kernels, numpy_kernels]
    for module in kernels:
        monkeypatch.setattr(fused, "kernels", module)
        one = run(weighted(made, times), method, executor="fused", **FULL, **options)
        two = run(repeated(made, times), method, executor="fused", **FULL, **options)
        compare_histories(one, two, **ROUNDING)


@pytest.mark.parametrize("executor", ["stacked", "sequential"])
def test_whole_weights_are_repeated_rows_for_networks_and_classes(executor):
    made = several(groups=3, classes=3)
    times = draw_times(made)
    method = fedgft.algorithms.fedgft(SP, 5.0)
    options = {**FULL, "model": MLP((8,)), "executor": executor}
    compare_histories(
        run(weighted(made, times), method, **options),
        run(repeated(made, times), method, **options),
        **ROUNDING,
    )


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("constant", [1.0, 3.0, 0.1])
def test_equal_weights_change_no_bit(constant, executor):
    made = standardize(federation())
    equal = standardize(weighted(federation(), np.full(len(made.dataset), constant)))
    method = fedgft.algorithms.fedgft_control(SP, 0.02)
    one, two = (run(f, method, executor=executor) for f in (made, equal))
    np.testing.assert_array_equal(one.params, two.params)
    for mine, theirs in zip(one.test.arrays, two.test.arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("batch_size", [8, 1000])
def test_the_scale_of_weights_does_not_matter(batch_size):
    made = federation()
    weights = np.random.default_rng(0).gamma(1.0, size=len(made.dataset)) + 0.01
    method = fedgft.algorithms.fedgft(SP, 3.0)
    one, two = (
        run(weighted(made, c * weights), method, batch_size=batch_size) for c in (1.0, 1000.0)
    )
    np.testing.assert_allclose(one.params, two.params, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "lft", "fedgft-control", "fedfb"])
def test_executors_agree_on_weighted_batches(name, monkeypatch):
    """With small batches, whose order is the same everywhere."""
    made = federation()
    weights = np.random.default_rng(1).gamma(1.0, size=len(made.dataset))
    method = get_method(name, SP, STRENGTHS.get(METHODS[name].strength, 0.0))
    found = [run(weighted(made, weights), method, executor=each) for each in EXECUTORS]
    monkeypatch.setattr(fused, "kernels", numpy_kernels)
    found.append(run(weighted(made, weights), method, executor="fused"))
    for other in found[1:]:
        compare_histories(other, found[0], rtol=1e-6, atol=1e-9)


def test_a_row_of_weight_zero_is_absent():
    made = federation()
    absent = np.random.default_rng(5).random(len(made.dataset)) < 0.3
    weights = np.where(absent, 0.0, 1.0)
    method = fedgft.algorithms.fedgft(SP, 3.0)
    one = run(weighted(made, weights), method, **FULL)
    two = run(repeated(made, weights.astype(int)), method, **FULL)
    compare_histories(one, two, **ROUNDING)


def test_a_client_without_weight_does_not_count():
    made = federation()
    weights = np.ones(len(made.dataset))
    weights[made.client(1)] = 0.0
    found = run(weighted(made, weights), fedgft.algorithms.fedgft(SP, 3.0), **FULL)
    assert np.isfinite(found.params).all()
    assert found.after.rows()[0, 1] == 0


def penalized_loss(params, data: Dataset, weights, lam: float) -> float:
    """Weighted mean cross-entropy + lam F^2 / 2, of a linear model, written out in loops."""
    width = data.features.shape[1]
    w0, w1, b0, b1 = params[:width], params[width : 2 * width], *params[2 * width :]
    total = loss = 0.0
    rates = {0: [0.0, 0.0], 1: [0.0, 0.0]}
    for x, y, a, w in zip(data.features, data.labels, data.groups, weights, strict=True):
        z = x @ (w1 - w0) + b1 - b0
        p = 1 / (1 + np.exp(-z))
        loss -= w * np.log(p if y == 1 else 1 - p)
        total += w
        if a >= 0:
            rates[int(a)][0] += w * p
            rates[int(a)][1] += w
    gap = rates[0][0] / rates[0][1] - rates[1][0] / rates[1][1]
    return loss / total + lam * gap**2 / 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_one_step_is_the_central_gradient_of_the_weighted_objective(executor):
    made = federation()
    rng = np.random.default_rng(2)
    weights = rng.gamma(1.0, size=len(made.dataset))
    start = rng.normal(size=10)
    options = {"rounds": 1, "batch_size": 1000, "optimizer": SGD, "init": start, "lr": 1.0}
    method = fedgft.algorithms.fedgft(SP, 7.0)
    found = run(weighted(made, weights), method, executor=executor, **options)
    used = np.sort(made.rows)
    data = made.dataset
    small = replace(
        data, features=data.features[used], labels=data.labels[used], groups=data.groups[used]
    )
    step = 1e-6
    expected = [
        (
            penalized_loss(start + step * unit, small, weights[used], 7.0)
            - penalized_loss(start - step * unit, small, weights[used], 7.0)
        )
        / (2 * step)
        for unit in np.eye(10)
    ]
    np.testing.assert_allclose(start - found.params[0], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG)
def test_weighted_sums_are_fairlearns_rates(metric):
    """The rates behind every gap, counted row by row with weights."""
    data = dataset([(200, (0, 1), (0, 1))])
    rng = np.random.default_rng(4)
    weights = rng.gamma(1.0, size=len(data))
    scores = rng.random(len(data))
    probs = np.stack((1 - scores, scores), 1)
    sums = Sums.of(probs, data.labels, data.groups, num_groups=2, weights=weights)
    one_hot = np.eye(2)[probs.argmax(1)], np.eye(2)[data.labels], np.eye(2)[data.groups]
    each = metric.statistics(*one_hot)
    expected = (weights[:, None, None, None] * each).sum(0)
    np.testing.assert_allclose(sums.statistics(metric, "hard"), expected, rtol=1e-12)


def test_clients_are_sampled_by_weight():
    made = several()
    weights = np.ones(len(made.dataset))
    weights[made.client(0)] = 100.0
    share = (weights[made.rows][: len(made.client(0))].sum()) / weights[made.rows].sum()
    f = weighted(made, weights)
    drawn = [
        sample_cohort([f], 4, "size", seeds=np.array([s]), round=0).client[0] for s in range(200)
    ]
    assert np.mean(np.array(drawn) == 0) > share - 0.1
    cohort = sample_cohort([f], 5, "uniform", seeds=np.array([0]), round=0)
    np.testing.assert_allclose(cohort.weight, f.weighted_sizes / f.weighted_sizes.sum())


# Trees


def grow(made: Federation, *, folds: int = 0, **options):
    exact = {"l2": 0.0, "min_child_weight": 0.0, "max_depth": 3}
    model = Trees(**{**exact, "folds": folds, **options})
    return simulate(made, model, "fedgft-control", target=0.02, rounds=6, lr=0.3)


@pytest.mark.parametrize("folds", [0, 2])
def test_trees_of_whole_weights_are_those_of_repeated_rows(folds):
    rng = np.random.default_rng(0)
    data = dataset([(400, (0, 1), (0, 1))])
    data = replace(data, features=np.round(2 * data.features))  # few bins
    made = fedgft.partition(data, clients=3, seed=0)
    times = rng.integers(1, 3, len(data))
    one = grow(weighted(made, times.astype(float)), folds=folds)
    two = grow(repeated(made, times), folds=folds)
    np.testing.assert_allclose(one.test.score, two.test.score, rtol=0.01, atol=0.2)
    assert abs(one.test[-1].gap("sp", "hard") - two.test[-1].gap("sp", "hard"))[0] < 0.02
    plain = grow(made, folds=folds)
    assert np.abs(one.test.accuracy() - plain.test.accuracy()).max() > 1e-3


def test_equal_weights_change_no_bit_of_trees():
    made = fedgft.partition(dataset([(400, (0, 1), (0, 1))]), clients=3, seed=0)
    one, two = (grow(f) for f in (made, weighted(made, np.full(len(made.dataset), 7.0))))
    np.testing.assert_array_equal(one.params, two.params)


def test_the_scale_of_weights_does_not_matter_to_trees():
    made = fedgft.partition(dataset([(400, (0, 1), (0, 1))]), clients=3, seed=0)
    weights = np.random.default_rng(0).gamma(2.0, size=len(made.dataset))
    one, two = (grow(weighted(made, c * weights), l2=1.0) for c in (1.0, 8.0))
    np.testing.assert_array_equal(one.params, two.params)


# Tables and studies


def loans(weights: np.ndarray | None = None) -> pl.DataFrame:
    frame = fedgft.data.make_loans(seed=0).sample(600, seed=0).drop("probability")
    return frame if weights is None else frame.with_columns(pl.Series("w", weights))


ROLES = {"label": "repaid", "group": "sex", "client": "bank"}


def test_a_column_of_weights_is_no_feature():
    weights = np.random.default_rng(0).gamma(1.0, size=600)
    data = fedgft.load(loans(weights), **ROLES, weight="w")
    np.testing.assert_array_equal(data.weights, weights)
    assert "w" not in data.columns
    assert ("w", "the weight of a row") in data.excluded


BAD = {
    "negative": ([-1.0], "-1"),
    "missing": ([None], "lacks"),
    "infinite": ([float("inf")], "inf"),
    "nan": ([float("nan")], "NaN"),
    "text": (["much"], "numbers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_weights_are_named_in_one_line(case):
    values, said = BAD[case]
    column = pl.Series("w", values * 600)
    with pytest.raises(FedgftError) as caught:
        fedgft.load(loans().with_columns(column), **ROLES, weight="w")
    text = str(caught.value)
    assert "'w'" in text and "\n" not in text
    assert said.lower() in text.lower()


def test_unknown_and_unsuitable_weights_are_refused():
    with pytest.raises(FedgftError, match=r"no column 'weigth'.*weight"):
        table = loans().with_columns(weight=pl.lit(1.0))
        fedgft.load(table, **ROLES, weight="weigth")
    with pytest.raises(FedgftError, match="both group and weight"):
        fedgft.load(loans(), **ROLES, weight="sex")
    with pytest.raises(FedgftError, match="is 0 in all rows"):
        fedgft.load(loans(np.zeros(600)), **ROLES, weight="w")
    with pytest.raises(FedgftError, match="no column of weights"):
        fedgft.load("synthetic", weight="w")
    made = weighted(federation(), np.arange(len(federation().dataset)) + 1.0)
    with pytest.raises(FedgftError) as caught:
        run(made, fedgft.algorithms.fedgft(SP, 3.0), noise=1.0)
    assert caught.value.field == "noise"
    for wrong in (np.ones(3), np.full(len(made.dataset), np.nan), np.zeros(len(made.dataset))):
        with pytest.raises(FedgftError, match="weights"):
            replace(made.dataset, weights=wrong)


def study_of(weights: np.ndarray | None) -> Study:
    roles = ROLES if weights is None else {**ROLES, "weight": "w"}
    base = get_protocol("heldout")
    settings = Settings(rounds=5, state="shared")
    protocol = replace(base, lr=(0.03,), settings=settings, round_factors=())
    return Study(fedgft.load(loans(weights), **roles), protocol, [0], kind="column")


def test_a_study_measures_with_weights_and_says_less_with_unequal_ones():
    weights = np.where(np.arange(600) % 2 == 0, 1.0, 9.0)
    plain, found = (train_model(study_of(w), "fedgft-control") for w in (None, weights))
    row = found.comparison.rows[-1]
    decisions = found.result.test_sums.statistics("sp", "hard")[0]
    counts = found.result.history.count_decisions(SP)[0]
    np.testing.assert_allclose(SP.rates(counts), SP.rates(decisions))
    test = found.result.federations[0].test
    for g in range(2):  # (sum w)^2 / sum w^2
        each = weights[test][found.study.dataset.groups[test] == g]
        assert counts[1, 0, g] == pytest.approx(each.sum() ** 2 / (each**2).sum())
    assert row["floor"] > plain.comparison.rows[-1]["floor"]
    data = found.study.dataset
    probs = fedgft.engine.predict_proba(
        found.result.federations[0], "logistic", found.result.history.params[0], test
    )
    right = probs.argmax(1) == data.labels[test]
    assert row["accuracy"] == pytest.approx(np.average(right, weights=weights[test]), abs=1e-6)
    assert [each["rows"] for each in found.clients()] == found.result.federations[0].sizes.tolist()


def test_rules_refuse_weights():
    with pytest.raises(FedgftError, match="have weights"):
        fedgft.study.compare_methods(
            study_of(np.arange(600) + 1.0), ["fedavg", "thresholds"], [SP], [0.5]
        )


# FairClassifier


def people() -> tuple[pl.DataFrame, np.ndarray]:
    table = loans()
    return table, np.random.default_rng(7).gamma(1.0, size=len(table)).round(2)


def fit(weights, **options):
    table, _ = people()
    classifier = fedgft.FairClassifier(metric="sp", target=0.03, lr=0.05, rounds=15, **options)
    given = {"sensitive_features": table["sex"], "clients": table["bank"]}
    x = table.drop("sex", "repaid", "bank")
    return classifier.fit(x, table["repaid"], sample_weight=weights, **given), x


@pytest.mark.filterwarnings("ignore:the target was missed", "ignore:the model has collapsed")
def test_the_audit_of_a_classifier_has_its_weights():
    table, weights = people()
    classifier, x = fit(weights)
    decisions = classifier.predict(x)
    measured = fedgft.measure(
        table["repaid"],
        decisions,
        scores=classifier.predict_proba(x)[:, 1],
        sensitive_features={"sex": table["sex"]},
        sample_weight=weights,
    )
    mine, theirs = classifier.audit_, fedgft.audit(measured)
    for name in ("sp", "eo"):
        assert mine.gaps[name].value == pytest.approx(theirs.gaps[name].value, abs=1e-9)
        assert mine.gaps[name].low == pytest.approx(theirs.gaps[name].low, abs=1e-9)


@pytest.mark.filterwarnings("ignore:the target was missed", "ignore:the model has collapsed")
def test_a_classifier_with_equal_weights_is_one_without():
    one, x = fit(None)
    two, _ = fit(np.full(600, 2.5))
    np.testing.assert_array_equal(one.predict_proba(x), two.predict_proba(x))


@pytest.mark.filterwarnings("ignore:the target was missed", "ignore:the model has collapsed")
def test_weights_are_routed_by_scikit_learn():
    from sklearn import config_context
    from sklearn.model_selection import GridSearchCV

    table, weights = people()
    x = table.drop("sex", "repaid", "bank")
    model = fedgft.FairClassifier(method="fedavg", lr=0.05, rounds=5)
    with config_context(enable_metadata_routing=True):
        model.set_fit_request(sample_weight=True, sensitive_features=True, clients=False)
        model.set_score_request(sample_weight=True)
        search = GridSearchCV(model, {"lr": [0.05, 0.1]}, cv=2)
        search.fit(
            x, table["repaid"], sample_weight=weights, sensitive_features=table["sex"].to_numpy()
        )
    assert search.best_estimator_.model_ is not None
