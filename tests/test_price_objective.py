"""The custom objective for XGBoost and LightGBM: its gradient, its sums, and what it reaches."""

import copy
import json

import lightgbm as lgb
import numpy as np
import pandas as pd
import pytest
import xgboost as xgb
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgft
from fedgft.algorithms import price_objective as module
from fedgft.engine import select_best
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, get_metric
from fedgft.metrics.functions import gap

LR = 0.2
XGB = {"objective": "binary:logistic", "eta": LR, "max_depth": 3, "nthread": 1}
LGB = {"learning_rate": LR, "num_leaves": 7, "num_threads": 1, "verbose": -1}


def make_rows(rows=3000, seed=0, classes=2):
    """Features (the last one is the group), labels and groups; the second has higher scores."""
    generator = np.random.default_rng(seed)
    a = generator.integers(0, 2, rows)
    x = generator.normal(size=(rows, 3)) + 0.8 * a[:, None] * [1, 1, 0]
    score = x[:, 0] + 0.5 * x[:, 2] + generator.normal(size=rows)
    y = np.digitize(score, [0.5] if classes == 2 else [0.0, 1.5])
    return np.column_stack((x, a)), y, a


X, Y, A = make_rows()
SEX = np.array(["f", "m"])[A]


def make(metric="sp", **more):
    given = {"target": 0.0} if "lam" not in more else {}
    given |= {"y": Y, "sensitive_features": SEX, "lr": LR} | more
    return fedgft.price_objective(metric, **given)


def with_prices(objective, rows, seed=0):
    """The objective after updates at random margins, so that prices differ from zero."""
    generator = np.random.default_rng(seed)
    shape = (rows,) if objective.classes == 2 else (rows, objective.classes)
    for _ in range(8):  # the first 1 / LR have no prices
        objective.update(objective.statistics(generator.normal(size=shape)))
    return objective


def loss(margins, labels, cost):
    """Cross-entropy plus the price of the scores, by row: an independent formula."""
    if margins.ndim == 1:
        margins = np.stack((0 * margins, margins), 1)
    probs = np.exp(margins) / np.exp(margins).sum(1, keepdims=True)
    return -np.log(probs[np.arange(len(labels)), labels]) + (cost * probs).sum(1)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("metric", ["sp", "eop", "acc"])
@pytest.mark.parametrize("how", [{"target": 0.0}, {"lam": 2.0}], ids=["target", "lam"])
def test_the_gradient_is_that_of_cross_entropy_and_prices(metric, how, classes):
    _, y, a = make_rows(60, classes=classes)
    objective = fedgft.price_objective(metric, y=y, sensitive_features=a, lr=LR, **how)
    with_prices(objective, 60)
    table = objective.prices
    if classes == 2:
        table = np.stack((np.zeros_like(table), table), -1)
    assert np.abs(table).max() > 1e-3
    cost = table[y, a]
    weight = np.random.default_rng(2).uniform(0.5, 2, 60)
    shape = (60,) if classes == 2 else (60, classes)
    margins = np.random.default_rng(1).normal(size=shape)
    gradient, hessian = objective.gradient(margins, sample_weight=weight)
    assert gradient.shape == hessian.shape == shape and (hessian > 0).all()
    step = 1e-6
    for c in range(1 if classes == 2 else classes):
        moved = np.zeros(shape)
        if classes == 2:
            moved += step
        else:
            moved[:, c] = step
        slope = (loss(margins + moved, y, cost) - loss(margins - moved, y, cost)) / (2 * step)
        found = gradient if classes == 2 else gradient[:, c]
        np.testing.assert_allclose(found, weight * slope, atol=1e-8)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(CATALOG)), st.integers(0, 60), st.integers(0, 10**6), st.booleans())
def test_messages_of_clients_add_up_to_that_of_all_rows(metric, cut, seed, weighted):
    generator = np.random.default_rng(seed)
    y, a = generator.integers(0, 2, 60), generator.integers(-1, 2, 60)
    margins = generator.normal(size=60)
    weight = generator.integers(1, 4, 60) if weighted else np.ones(60)
    messages = []
    for part in (slice(None), slice(None, cut), slice(cut, None)):
        client = fedgft.price_objective(
            metric, target=0.1, y=y[part], sensitive_features=a[part], lr=LR, groups=2, classes=2
        )
        messages.append(client.statistics(margins[part], sample_weight=weight[part]))
    np.testing.assert_allclose(messages[0], messages[1] + messages[2], rtol=1e-12)
    repeated = np.repeat(np.arange(60), weight.astype(int))  # a weight is a number of equal rows
    whole = fedgft.price_objective(
        metric,
        target=0.1,
        y=y[repeated],
        sensitive_features=a[repeated],
        lr=LR,
        groups=2,
        classes=2,
    )
    np.testing.assert_allclose(messages[0], whole.statistics(margins[repeated]), rtol=1e-12)
    expected = np.nan
    known = a >= 0
    if np.isfinite(found := whole.update(messages[0])):
        decided = 1 * (margins > 0)
        expected = gap(get_metric(metric), y[known], decided[known], a[known], weight[known])
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_client_without_a_class_or_a_group_takes_part():
    """The prices of two clients that lack a group each are those of the rows together."""
    whole = make()
    clients = [
        make(y=Y[k == A], sensitive_features=SEX[k == A], groups=["f", "m"], classes=2)
        for k in (0, 1)
    ]
    for seed in range(8):
        margins = np.random.default_rng(seed).normal(size=len(Y)) + A
        messages = [c.statistics(margins[k == A]) for k, c in enumerate(clients)]
        whole.update(whole.statistics(margins))
        for client in clients:
            client.update(iter(messages))
    assert np.abs(whole.prices).max() > 0.01
    for client in clients:
        np.testing.assert_allclose(client.prices, whole.prices, rtol=1e-9)
        assert client.counted == "all clients"


def test_after_an_update_only_updates_change_prices():
    """Trees of a round share their prices, whatever the client's own rows say."""
    objective = with_prices(make(), len(Y))
    before = objective.prices
    xgb.train(XGB, xgb.DMatrix(X, Y), 3, obj=objective)
    np.testing.assert_array_equal(objective.prices, before)
    assert len(objective.gaps) == 8 and not len(objective.accuracies)


def test_first_margins_of_lightgbm_are_the_init_score():
    start = np.where(A, 1.0, -1.0)
    data = lgb.Dataset(X, Y, init_score=start)
    objective = make()
    calls = [objective.callback(data)]
    lgb.train(LGB | {"objective": objective}, data, 2, callbacks=calls)
    assert objective.gaps[0] == 1.0 and objective.accuracies[0] == np.mean(Y == A)


def plain(margins, data):
    p = 1 / (1 + np.exp(-margins.astype(np.float64)))
    return p - data.get_label(), np.maximum(p * (1 - p), 1e-6)


@pytest.mark.parametrize("how", [{"lam": 0.0}, {"target": 0.99}], ids=["lam", "target"])
def test_without_prices_the_trees_are_those_of_plain_boosting(how):
    data = xgb.DMatrix(X, Y)
    fair, usual = (xgb.train(XGB, data, 8, obj=obj) for obj in (make(**how), plain))
    assert fair.save_raw("json") == usual.save_raw("json")
    fair, usual = (
        lgb.train(LGB | {"objective": obj}, lgb.Dataset(X, Y), 8) for obj in (make(**how), plain)
    )
    assert fair.model_to_string() == usual.model_to_string()


def grow(library, objective, how, rounds=40):
    """A booster as a function from features to margins."""
    if library == "xgboost":
        data = xgb.DMatrix(X, Y)
        if how == "out-of-fold":
            booster = objective.train_out_of_fold(XGB, data, rounds, folds=3)
        else:
            calls = [objective.callback(data)] if how == "callback" else []
            booster = xgb.train(XGB, data, rounds, obj=objective, callbacks=calls)
        return booster, lambda x: booster.predict(xgb.DMatrix(x), output_margin=True)
    data = lgb.Dataset(X, Y)
    if how == "out-of-fold":
        booster = objective.train_out_of_fold(LGB, data, rounds, folds=3)
    else:
        calls = [objective.callback(data)] if how == "callback" else []
        booster = lgb.train(LGB | {"objective": objective}, data, rounds, callbacks=calls)
    return booster, lambda x: booster.predict(x, raw_score=True)


@pytest.mark.parametrize("how", ["alone", "callback", "out-of-fold"])
@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_both_libraries_reach_a_target(library, how):
    objective = make(target=0.02)
    booster, margins = grow(library, objective, how)
    _, before = grow(library, make(lam=0.0), "alone")
    x, y, a = make_rows(4000, seed=1)
    decided, usual = (1 * (f(x) > 0) for f in (margins, before))
    assert gap("sp", y, usual, a) > 0.15
    assert gap("sp", y, decided, a) < 0.06  # two standard errors are 0.03
    assert np.mean(decided == y) > np.mean(usual == y) - 0.05
    if how == "alone":  # the last tree is not chosen
        assert objective.report.gap[0] < 0.03
        return
    assert objective.report.reached[0] and objective.report.target[0] == 0.02
    assert len(objective.gaps) == len(objective.accuracies) == 41
    trees = booster.num_boosted_rounds() if library == "xgboost" else booster.num_trees()
    assert trees == objective.best > 16
    last = trees - 1 if library == "xgboost" else trees
    assert booster.best_iteration == last
    if how == "callback":  # what was measured is what the final model does
        own = gap("sp", Y, 1 * (margins(X) > 0), A)
        assert own == pytest.approx(objective.report.gap[0], abs=1e-12)
        assert np.mean((margins(X) > 0) == Y) == objective.accuracies[trees]


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_held_out_rows_set_the_prices(library):
    """The gap of the final model on these rows is the one in the report."""
    held = slice(0, 1000)
    kept = slice(1000, None)
    objective = make(y=Y[kept], sensitive_features=SEX[kept])
    if library == "xgboost":
        rows = xgb.DMatrix(X[held], Y[held])
        call = objective.callback(rows, SEX[held], save_best=False)
        train = xgb.DMatrix(X[kept], Y[kept])
        booster = xgb.train(XGB, train, 30, obj=objective, callbacks=[call])
        assert booster.num_boosted_rounds() == 30
        best = (0, booster.best_iteration + 1)
        margins = booster.predict(rows, output_margin=True, iteration_range=best)
    else:
        train = lgb.Dataset(X[kept], Y[kept])
        call = objective.callback(train.create_valid(X[held], Y[held]), SEX[held])
        booster = lgb.train(LGB | {"objective": objective}, train, 30, callbacks=[call])
        margins = booster.predict(X[held], raw_score=True)
    assert objective.counted == "held-out"
    found = gap("sp", Y[held], 1 * (margins > 0), A[held])
    assert found == pytest.approx(objective.report.gap[0], abs=1e-12)
    assert objective.about()["trained"]["gap"] == objective.report.gap[0]


def test_out_of_fold_predictions_come_from_trees_without_these_rows():
    """Labels that are noise cannot be predicted, except by trees that know them."""
    generator = np.random.default_rng(3)
    x, y, a = generator.normal(size=(400, 5)), generator.integers(0, 2, 400), A[:400]
    params = XGB | {"max_depth": 6, "min_child_weight": 0}
    objective = fedgft.price_objective("sp", target=0.5, y=y, sensitive_features=a, lr=LR)
    booster = objective.train_out_of_fold(params, xgb.DMatrix(x, y), 30)
    assert np.mean((booster.predict(xgb.DMatrix(x)) > 0.5) == y) > 0.9
    assert 0.4 < objective.accuracies[-1] < 0.6


def test_boosters_in_step_start_where_a_file_says() -> None:
    """Without `base_score`, XGBoost has another base in memory than in the file it writes."""
    data = xgb.DMatrix(X, Y)
    grown = [
        make().train_out_of_fold(XGB | more, data, 20, folds=2, save_best=False)
        for more in ({}, {"base_score": 0.5})
    ]
    first, second = (xgb.Booster(model_file=bytearray(b.save_raw("json"))) for b in grown)
    for booster in (*grown, second):
        np.testing.assert_array_equal(booster.predict(data), first.predict(data))


def test_weights_of_rows_are_those_of_repeated_rows():
    weight = np.random.default_rng(0).integers(1, 4, len(Y))
    again = np.repeat(np.arange(len(Y)), weight)
    params = XGB | {"tree_method": "exact"}
    gaps = []
    for rows, weights in ((np.arange(len(Y)), weight), (again, None)):
        objective = make(y=Y[rows], sensitive_features=SEX[rows])
        data = xgb.DMatrix(X[rows], Y[rows], weight=weights)
        booster = xgb.train(params, data, 10, obj=objective)
        gaps.append((objective.gaps, booster.predict(xgb.DMatrix(X))))
    np.testing.assert_allclose(gaps[0][0], gaps[1][0], atol=1e-9)
    np.testing.assert_allclose(gaps[0][1], gaps[1][1], atol=1e-4)
    data = lgb.Dataset(X, Y, weight=weight)
    objective = make()
    lgb.train(LGB | {"objective": objective}, data, 1)
    expected = gap("sp", Y, np.zeros_like(Y), A, weight)
    assert objective.gaps[0] == expected == 0.0
    np.testing.assert_allclose(objective.accuracies[0], np.average(Y == 0, weights=weight))


def test_three_classes_and_both_libraries():
    x, y, a = make_rows(classes=3)
    given = {"y": y, "sensitive_features": a, "lr": LR, "target": 0.05}
    one, two = (fedgft.price_objective("sp", **given) for _ in range(2))
    params = XGB | {"objective": "multi:softprob", "num_class": 3, "base_score": 0.5}
    data = xgb.DMatrix(x, y)
    booster = xgb.train(params, data, 40, obj=one, callbacks=[one.callback(data)])
    assert booster.predict(data).shape == (3000, 3) and one.prices.shape == (3, 2, 3)
    lgb.train(LGB | {"objective": two, "num_class": 3}, lgb.Dataset(x, y), 40)
    for objective in (one, two):
        assert objective.gaps[2] > 0.15 and objective.report.gap[0] < 0.07


def test_the_choice_is_that_of_the_simulator():
    assert module.GAP_TOLERANCE == select_best.GAP_TOLERANCE
    assert module.GAP_WEIGHT == select_best.GAP_WEIGHT
    objective = make(target=0.1)
    objective._gaps = [0.0, 0.0, 0.3, 0.1, 0.102, 0.2]
    accuracy = [0.99, 0.99, 0.9, 0.8, 0.8, 0.8]
    sums = objective.rows.sum(np.zeros(len(Y)), None, classes=2, num_groups=2)
    right = [sums.map(lambda each: each.copy()) for _ in accuracy]
    for each, share in zip(right, accuracy, strict=True):
        each.decision[:] = 0
        each.decision[0, 0, 0] = share * len(Y)
    objective._sums = right
    assert objective.choose(5) == 4  # the later one of two that are equally good


def test_balanced_labels_do_not_start_a_swing():
    """At the start all margins are near the threshold, where a small price turns all decisions."""
    objective = make(lr=0.05)
    xgb.train(XGB | {"eta": 0.05}, xgb.DMatrix(X, Y), 100, obj=objective)
    assert (objective.gaps[:21] == make_gaps_without_prices()).all()
    assert objective.accuracies[21:].min() > 0.72 and objective.gaps[21:].max() < 0.5


def make_gaps_without_prices():
    plain = make(target=0.99, lr=0.05)
    xgb.train(XGB | {"eta": 0.05}, xgb.DMatrix(X, Y), 21, obj=plain)
    return plain.gaps


def test_names_codes_and_several_columns():
    frame = pd.DataFrame({"sex": SEX, "old": X[:, 0] > 0})
    assert make(sensitive_features=frame).groups == (
        "f & False",
        "f & True",
        "m & False",
        "m & True",
    )
    codes = np.where(X[:, 2] > 1, -1, A)
    by_code = make(sensitive_features=codes, groups=2)
    by_name = make(sensitive_features=np.where(codes < 0, None, SEX))
    margins = X[:, 0]
    np.testing.assert_array_equal(by_code.statistics(margins), by_name.statistics(margins))
    assert copy.deepcopy(by_code) is by_code and "PriceObjective('sp', target=0" in repr(by_code)
    assert "lam=2" in repr(make(lam=2.0)) and make(lam=2.0).report is None


BAD = {
    "neither": ({"target": None}, "target", "conflict"),
    "both": ({"lam": 1.0, "target": 0.1}, "target", "conflict"),
    "target": ({"target": 2.0}, "target", "invalid"),
    "lr": ({"lr": 0.0}, "lr", "invalid"),
    "length": ({"sensitive_features": SEX[1:]}, "sensitive_features", "conflict"),
    "one class": ({"y": 0 * Y}, "y", "data"),
    "NaN": ({"y": np.where(Y, np.nan, 0.0)}, "y", "data"),
    "negative": ({"y": 2 * Y - 1}, "y", "data"),
    "text": ({"y": np.where(Y, "yes", "no")}, "y", "invalid"),
    "one group": ({"sensitive_features": ["f"] * len(Y)}, "sensitive_features", "data"),
    "unknown group": ({"groups": ["f", "x"]}, "sensitive_features", "invalid"),
    "code": ({"groups": 2, "sensitive_features": A + 1}, "sensitive_features", "invalid"),
    "classes": ({"classes": 1}, "classes", "invalid"),
}


def check_line(caught, field, kind):
    assert (caught.value.field, caught.value.kind) == (field, kind)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_told_in_one_line(name):
    arguments, field, kind = BAD[name]
    with pytest.raises(FedgftError) as caught:
        make(**arguments)
    check_line(caught, field, kind)


DATA = xgb.DMatrix(X, Y)
TRAININGS = {
    "held-out rows": (XGB, xgb.DMatrix(X[:10], Y[:10]), False, "data", "conflict"),
    "other labels": (XGB, xgb.DMatrix(X, 1 - Y), False, "data", "conflict"),
    "no labels": (XGB, xgb.DMatrix(X), False, "data", "missing"),
    "dart": (XGB | {"booster": "dart"}, DATA, True, "params", "unsupported"),
    "linear": (
        {"objective": "binary:logistic", "booster": "gblinear"},
        DATA,
        True,
        "params",
        "unsupported",
    ),
    "no link": ({"eta": LR}, DATA, True, "params", "conflict"),
    "rate": (XGB | {"eta": 0.3}, DATA, True, "lr", "conflict"),
    "classes": (
        XGB | {"objective": "multi:softprob", "num_class": 3},
        DATA,
        True,
        "margins",
        "invalid",
    ),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_that_does_not_fit_is_told_in_one_line(name):
    params, data, has_callback, field, kind = TRAININGS[name]
    objective = make()
    calls = [objective.callback(DATA)] if has_callback else []
    with pytest.raises(FedgftError) as caught:
        xgb.train(params, data, 2, obj=objective, callbacks=calls)
    check_line(caught, field, kind)
    with pytest.raises(FedgftError) as caught:
        objective.train_out_of_fold(params, data, 2)
    check_line(caught, field, kind)


@pytest.mark.parametrize(
    ("more", "field"), [({"boosting": "dart"}, "params"), ({"learning_rate": 0.1}, "lr")]
)
def test_a_training_of_lightgbm_that_does_not_fit(more, field):
    data = lgb.Dataset(X, Y)
    objective = make()
    calls = [objective.callback(data)]
    with pytest.raises(FedgftError) as caught:
        lgb.train(LGB | more | {"objective": objective}, data, 2, callbacks=calls)
    assert caught.value.field == field


def test_misuse_of_calls_is_told_in_one_line():
    objective = make()
    call = objective.callback(DATA)
    xgb.train(XGB, DATA, 2, obj=objective, callbacks=[call])
    wrong = [
        (lambda: xgb.train(XGB, DATA, 2, obj=objective, callbacks=[call]), "callback"),
        (lambda: objective.callback(DATA, SEX[1:]), "sensitive_features"),
        (lambda: objective.callback(DATA, np.array(["x"] * len(Y))), "sensitive_features"),
        (lambda: objective.callback(X), "data"),
        (lambda: objective.gradient(np.full(len(Y), np.nan)), "margins"),
        (lambda: objective.gradient(np.zeros(3)), "margins"),
        (lambda: objective.statistics(X[:, 0], sample_weight=X[:, 0]), "sample_weight"),
        (lambda: objective.update([1.0, 2.0]), "statistics"),
        (lambda: objective.update(np.full(5, np.nan)), "statistics"),
        (lambda: objective.train_out_of_fold(XGB, DATA, 2, folds=1), "folds"),
    ]
    for action, field in wrong:
        with pytest.raises(FedgftError) as caught:
            action()
        assert caught.value.field == field and "\n" not in str(caught.value)


def test_a_group_without_a_rate_never_counts_as_fair():
    objective = make("eop", sensitive_features=np.where((Y == 1) & (A == 0), None, SEX))
    xgb.train(XGB, DATA, 3, obj=objective)
    assert np.isnan(objective.report.gap[0]) and not objective.report.reached[0]
    assert "not estimable" in objective.report.reason()
    assert json.dumps(objective.about(), allow_nan=False)
