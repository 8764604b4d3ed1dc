"""`FairClassifier`: scikit-learn's own checks, equality with `fedgft train`, routing, bad input."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import fedgft
from fedgft import FairClassifier, FedgftError, load_model, statistical_parity_difference
from fedgft.data.table import to_polars

EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": (
        "mini-batches are drawn in another order when rows are repeated, as with any SGD"
    )
}


def people(rows: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Rows with numbers, categories and missing values, whose label depends on the group."""
    rng = np.random.default_rng(seed)
    sex = rng.choice(["f", "m"], rows)
    age = rng.integers(18, 80, rows).astype(float)
    age[rng.random(rows) < 0.05] = np.nan
    income = rng.normal(size=rows) + (sex == "m")
    city = rng.choice(["Bonn", "Lyon", "Oslo"], rows)
    repaid = np.where(income + rng.normal(size=rows) > 0.5, "yes", "no")
    site = rng.choice(["north", "south", "west"], rows)
    columns = {"age": age, "income": income, "city": city, "sex": sex}
    return pd.DataFrame({**columns, "repaid": repaid, "site": site})


FRAME = people()
X = FRAME[["age", "income", "city", "sex"]]
Y = FRAME["repaid"]
QUICK = {"lr": 0.05, "rounds": 15}


def gap(classifier: FairClassifier, table=X) -> float:
    decisions = (classifier.predict(table) == "yes").astype(int)
    return statistical_parity_difference(
        (Y == "yes").astype(int), decisions, sensitive_features=FRAME.sex
    )


@pytest.mark.slow
def test_scikit_learns_checks_pass():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(
            FairClassifier(lr=0.1, rounds=30),
            expected_failed_checks=EXPECTED_FAILURES,
            on_skip=None,
        )


def test_the_gap_meets_the_target_and_the_audit_and_the_history_say_so():
    classifier = FairClassifier(metric="sp", target=0.02)
    classifier.fit(X, Y, sensitive_features=FRAME.sex, clients=FRAME.site)
    plain = FairClassifier(method="fedavg").fit(X, Y, sensitive_features=FRAME.sex)
    assert gap(plain) > 0.15
    assert gap(classifier) <= 0.023
    assert classifier.training_["reached"]
    audit = classifier.audit_.to_dict()
    assert audit["metrics"]["sp"]["gap"] == pytest.approx(gap(classifier))
    assert set(audit["sites"]) == {"north", "south", "west"}
    assert pd.DataFrame(classifier.history_)["round"].iloc[-1] == classifier.training_["rounds"]


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["sp", "eop"])
@pytest.mark.parametrize("target", [0.0, 0.02])
def test_it_equals_fedgft_train(metric, target, tmp_path):
    """The same parameters, bit for bit."""
    FRAME.drop(columns="site").to_csv(tmp_path / "people.csv", index=False)
    command = [sys.executable, "-m", "fedgft", "train", "--data", str(tmp_path / "people.csv")]
    command += ["--label", "repaid", "--group", "sex", "--clients", "10", "--alpha", "0.5"]
    command += ["--metric", metric, "--target", str(target), "--seeds", "1", "--json"]
    command += ["--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    trained = load_model(tmp_path / "out" / "model.safetensors")
    classifier = FairClassifier(
        metric, target, test_share=0.3, random_state=json.loads(done.stdout)["saved"]["seed"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedgft.TargetMissedWarning)
        table = X.drop(columns="sex")  # the group is no feature of `fedgft train`
        classifier.fit(table, Y, sensitive_features=FRAME.sex, clients=10, alpha=0.5)
    assert trained.tensors.keys() == classifier.model_.tensors.keys()
    for name, tensor in trained.tensors.items():
        np.testing.assert_array_equal(tensor, classifier.model_.tensors[name])
    np.testing.assert_array_equal(trained.mean, classifier.model_.mean)
    np.testing.assert_array_equal(trained.predict(X), classifier.predict(table))


def test_pandas_polars_and_numpy_give_the_same_predictions():
    numbers = X[["age", "income"]]
    found = []
    for table, groups in (
        (numbers, FRAME.sex),
        (pl.from_pandas(numbers), pl.Series(FRAME.sex.to_list())),
        (numbers.to_numpy(), FRAME.sex.to_numpy()),
    ):
        classifier = FairClassifier(target=0.1, **QUICK)
        classifier.fit(table, Y.to_numpy(), sensitive_features=groups)
        found.append(classifier.predict_proba(table))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_intersections_and_missing_groups():
    groups = pd.DataFrame({"sex": FRAME.sex, "city": FRAME.city.where(FRAME.age > 25)})
    classifier = FairClassifier(**QUICK).fit(X, Y, sensitive_features=groups)
    assert "f & Oslo" in classifier.model_.groups
    assert any("not recorded" in note for note in classifier.notes_)


def test_positive_class_changes_the_metric_and_not_the_classes():
    fits = [
        FairClassifier("eop", pos_label=label, **QUICK).fit(X, Y, sensitive_features=FRAME.sex)
        for label in ("yes", "no")
    ]
    assert [list(fit.classes_) for fit in fits] == [["no", "yes"]] * 2
    assert fits[1].model_.classes == ("yes", "no")
    assert all(fit.score(X, Y) > 0.6 for fit in fits)
    assert not np.array_equal(fits[0].predict_proba(X), fits[1].predict_proba(X))


def test_multiclass_and_typed_classes_survive_a_file(tmp_path):
    y = pd.qcut(X.income, 3, labels=False).to_numpy()
    classifier = FairClassifier(**QUICK).fit(X, y, sensitive_features=FRAME.sex, clients=4)
    assert classifier.decision_function(X).shape == (len(X), 3)
    loaded = FairClassifier.load(classifier.save(tmp_path / "model.safetensors"))
    assert loaded.predict(X).dtype.kind == "i"
    np.testing.assert_array_equal(loaded.predict_proba(X), classifier.predict_proba(X))
    np.testing.assert_array_equal(
        load_model(tmp_path / "model.safetensors").predict_proba(X), classifier.predict_proba(X)
    )


@pytest.mark.parametrize("high, low", [(3.0, 0.5), (3.3, 0.7)])  # whole multiples, and not
def test_weights_agree_with_weighted_logistic_regression(high, low):
    table = X[["income"]].to_numpy()
    y = (Y == "yes").to_numpy()
    weights = np.where(y == (FRAME.sex == "m"), high, low)
    classifier = FairClassifier(method="fedavg", lr=0.05)
    given = {"sensitive_features": FRAME.sex}
    found = classifier.fit(table, y, sample_weight=weights, **given).predict_proba(table)[:, 1]
    scaled = classifier.fit(table, y, sample_weight=10 * weights, **given).predict_proba(table)
    plain = classifier.fit(table, y, **given).predict_proba(table)[:, 1]
    expected = LogisticRegression(C=1e6).fit(table, y, weights).predict_proba(table)[:, 1]
    assert np.abs(found - expected).max() < 0.02
    assert np.abs(plain - expected).max() > 0.05
    np.testing.assert_allclose(scaled[:, 1], found, atol=1e-3)


def test_routing_pipelines_and_grid_search():
    numbers = ColumnTransformer([("scale", StandardScaler(), ["income"])])
    data = {"sensitive_features": FRAME.sex.to_numpy(), "clients": FRAME.site.to_numpy()}
    with config_context(enable_metadata_routing=True):
        classifier = FairClassifier(**QUICK).set_fit_request(sensitive_features=True, clients=True)
        pipeline = make_pipeline(numbers, clone(classifier))
        scores = cross_validate(pipeline, X, Y, params=data, cv=3)["test_score"]
        assert scores.shape == (3,) and (scores > 0.6).all()
        search = GridSearchCV(classifier, {"target": [0.0, 0.2]}, cv=3)
        search.fit(X, Y, **data)
        fair, loose = search.cv_results_["mean_test_score"]
        assert fair < loose
        cv = GroupKFold(3).set_split_request(groups=True)
        cross_validate(classifier, X, Y, params={**data, "groups": FRAME.site.to_numpy()}, cv=cv)


def test_a_network_of_your_own(tmp_path):
    """It trains, and its file needs the function that makes the module."""

    def make_network():
        layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
        return torch.nn.Sequential(*layers)

    classifier = FairClassifier(model=make_network, target=0.1, **QUICK)
    classifier.fit(X, Y, sensitive_features=FRAME.sex)
    features = classifier.model_.encoder.encode(to_polars(X))[0]
    network = make_network().double()
    values = {name: torch.as_tensor(t) for name, t in classifier.model_.tensors.items()}
    network.load_state_dict(values)
    scaled = (features - classifier.model_.mean) / classifier.model_.spread
    expected = network(torch.as_tensor(scaled)).softmax(1).detach().numpy()
    np.testing.assert_allclose(classifier.predict_proba(X), expected, rtol=1e-6)
    path = classifier.save(tmp_path / "model.safetensors")
    loaded = FairClassifier.load(path, module=make_network)
    np.testing.assert_array_equal(loaded.predict(X), classifier.predict(X))
    for module in (None, lambda: torch.nn.Linear(5, 2)):
        with pytest.raises(FedgftError) as caught:
            load_model(path, module=module).predict(X)
        assert caught.value.field == "module"


def test_features_and_card():
    classifier = FairClassifier(target=0.1, **QUICK).fit(X, Y, sensitive_features=FRAME.sex)
    model = classifier.model_
    assert model.features == {
        "age": "number",
        "income": "number",
        "city": ("Bonn", "Lyon", "Oslo"),
        "sex": ("f", "m"),
    }
    card = model.card()
    assert f"{100 * classifier.training_['gap']:.1f} points" in card
    assert "| city | Bonn, Lyon, Oslo |" in card and "| target | 10.0 points |" in card
    assert repr(model).startswith("FairModel(logistic, 4 columns")


def test_the_audit_is_that_of_measured_decisions():
    """`fit` counts indices; `measure` counts the same decisions from their names."""
    groups = pd.DataFrame({"sex": FRAME.sex, "city": FRAME.city.where(FRAME.age > 25)})
    classifier = FairClassifier(target=0.1, **QUICK)
    classifier.fit(X, Y, sensitive_features=groups, clients=FRAME.site)
    decided = classifier.predict(X)
    scores = classifier.predict_proba(X)[:, 1]
    sums = [
        fedgft.measure(
            Y[at], decided[at], scores=scores[at], sensitive_features=groups[at], site=name
        )
        for name in ("north", "south", "west")
        for at in [FRAME.site == name]
    ]
    found = classifier.audit_.to_dict()
    expected = fedgft.audit(sums).to_dict()
    assert found["sites"].keys() == expected["sites"].keys()
    for name, metric in expected["metrics"].items():
        assert found["metrics"][name]["gap"] == pytest.approx(metric["gap"], abs=1e-12)
        assert found["metrics"][name]["groups"].keys() == metric["groups"].keys()


def test_held_out_rows_are_audited_by_client():
    classifier = FairClassifier(target=0.1, test_share=0.3, **QUICK)
    classifier.fit(X, Y, sensitive_features=FRAME.sex, clients=FRAME.site)
    assert set(classifier.audit_.sites) == {"north", "south", "west"}
    assert classifier.audit_.accuracy.rows == 600
    assert classifier.audit_.accuracy.value == classifier.training_["accuracy_test"]


def test_arrays_are_read_by_position():
    classifier = FairClassifier(target=0.1, **QUICK).fit(X, Y, sensitive_features=FRAME.sex)
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        found = classifier.predict(X.to_numpy())
    np.testing.assert_array_equal(found, classifier.predict(X))


@pytest.mark.parametrize("labels", [("false", "true"), ("0.0", "1.0"), ("10", "9")])
def test_texts_are_their_own_names_and_are_sorted_as_text(labels, tmp_path):
    """As in scikit-learn: "10" comes before "9". Names survive a file."""
    y = np.where(Y == "yes", labels[1], labels[0])
    classifier = FairClassifier("eop", 0.1, **QUICK).fit(X, y, sensitive_features=FRAME.sex)
    assert tuple(classifier.classes_) == labels == classifier.model_.classes
    loaded = FairClassifier.load(classifier.save(tmp_path / "model.safetensors"))
    np.testing.assert_array_equal(loaded.predict(X), classifier.predict(X))
    scores = classifier.predict_proba(X)
    audit = fedgft.audit({"all": (y, scores, FRAME.sex)})
    assert audit.accuracy.value == classifier.score(X, y)
    assert audit.gaps["eop"].value == pytest.approx(classifier.audit_.gaps["eop"].value)


def test_a_failed_fit_leaves_the_fitted_classifier_alone():
    classifier = FairClassifier(target=0.1, **QUICK).fit(X, Y, sensitive_features=FRAME.sex)
    before = classifier.predict(X)
    with pytest.raises(FedgftError):
        classifier.fit(X, Y.replace("yes", "maybe"), sensitive_features=np.zeros(len(X)))
    np.testing.assert_array_equal(classifier.predict(X), before)


def test_a_model_of_an_array_reads_tables_by_position():
    table = X[["age", "income"]]
    classifier = FairClassifier(target=0.1, **QUICK)
    classifier.fit(table.to_numpy(), Y.to_numpy(), sensitive_features=FRAME.sex.to_numpy())
    expected = classifier.predict(table.to_numpy())
    with pytest.warns(UserWarning, match="feature names"):
        np.testing.assert_array_equal(classifier.predict(table), expected)


def test_columns_of_any_library_are_read_alike():
    """NaN of polars is missing, as NaN of pandas; categories that are numbers are categories."""
    polars = pl.DataFrame({name: X[name].to_list() for name in X.columns})
    found = [
        FairClassifier(target=0.1, **QUICK)
        .fit(table, Y.to_numpy(), sensitive_features=FRAME.sex.to_numpy())
        .predict_proba(table)
        for table in (X, polars)
    ]
    np.testing.assert_array_equal(*found)
    coded = X.assign(city=X.city.map({"Bonn": 1, "Lyon": 2, "Oslo": 3}).astype("category"))
    classifier = FairClassifier(target=0.1, **QUICK).fit(coded, Y, sensitive_features=FRAME.sex)
    assert classifier.model_.features["city"] == ("1", "2", "3")


def test_values_that_float32_cannot_tell_apart_are_reported():
    """Seconds since 1970 within five minutes: float32 has one number for two minutes."""
    seconds = X.assign(age=1.7e9 + 5 * X.age)
    for table in (seconds, seconds[["age", "income"]].fillna(1.7e9).to_numpy()):
        with pytest.warns(UserWarning, match="too close together"):
            FairClassifier(target=0.1, **QUICK).fit(table, Y, sensitive_features=FRAME.sex)
    years = X.assign(age=1.7e9 + 1e7 * X.age)  # over years there is no warning
    FairClassifier(target=0.1, **QUICK).fit(years, Y, sensitive_features=FRAME.sex)


def test_unseen_categories_are_reported_with_their_share():
    classifier = FairClassifier(**QUICK).fit(X, Y, sensitive_features=FRAME.sex)
    new = X.assign(city=X.city.replace("Oslo", "Rome"))
    share = f"{100 * (X.city == 'Oslo').mean():.3g}%"
    with pytest.warns(UserWarning, match=f"'city'.*{share}.*'Rome'; counted as no category"):
        classifier.predict(new)


def test_without_groups_it_warns_and_has_no_audit():
    with pytest.warns(UserWarning, match="without fairness"):
        classifier = FairClassifier(**QUICK).fit(X, Y)
    assert classifier.model_.groups == () and classifier.training_["gap"] is None
    with pytest.raises(FedgftError) as caught:
        _ = classifier.audit_
    assert caught.value.field == "sensitive_features"


def duplicated() -> pd.DataFrame:
    table = X.copy()
    table.columns = ["age", "age", "city", "sex"]
    return table


@pytest.mark.parametrize(
    "field, changed",
    [
        ("y", {"y": np.zeros(len(X))}),
        ("y", {"y": Y[:-1]}),
        ("y", {"y": Y.where(FRAME.age > 20)}),
        ("sensitive_features", {"sensitive_features": np.zeros(len(X))}),
        ("sensitive_features", {"sensitive_features": np.arange(len(X)) % 1000}),
        ("sensitive_features", {"sensitive_features": FRAME.sex[:-1]}),
        ("sensitive_features", {"sensitive_features": FRAME.sex[::-1]}),
        ("clients", {"clients": FRAME.site[:-1]}),
        ("clients", {"clients": FRAME.site.where(FRAME.age > 20)}),
        ("clients", {"clients": 0}),
        ("clients", {"clients": pd.Series([None, *[1.0] * (len(X) - 1)])}),
        ("sensitive_features", {"sensitive_features": {"s": FRAME.sex[::-1]}}),
        ("sample_weight", {"sample_weight": np.full(len(X), -1.0)}),
        ("sample_weight", {"sample_weight": np.zeros(len(X))}),
        ("alpha", {"clients": 3, "alpha": -1.0}),
        ("X", {"X": duplicated()}),
        ("X", {"X": pl.LazyFrame({"x": [0.0]})}),
        ("X", {"X": X.assign(income=np.inf)}),
        ("X", {"X": X.assign(when=pd.Timestamp("2026-01-01"))}),
        ("X", {"X": X.assign(city=[f"city {i}" for i in range(len(X))])}),
        ("sensitive_features", {"sensitive_features": np.full(len(X), np.nan)}),
        ("sensitive_features", {"sensitive_features": pd.Series([pd.Timestamp(0)] * len(X))}),
        ("sensitive_features", {"sensitive_features": "sex"}),
        ("clients", {"clients": "site"}),
        ("clients", {"clients": 3.0}),
        ("clients", {"clients": len(X) + 1}),
    ],
)
def test_bad_input_is_one_error_that_names_the_argument(field, changed):
    given = {"X": X, "y": Y, "sensitive_features": FRAME.sex, **changed}
    with pytest.raises(ValueError) as caught:
        FairClassifier(**QUICK).fit(given.pop("X"), given.pop("y"), **given)
    assert "\n" not in str(caught.value)
    assert getattr(caught.value, "field", None) == field


@pytest.mark.parametrize(
    "field, settings",
    [
        ("target", {"target": -1.0}),
        ("metric", {"metric": "parity"}),
        ("protocol", {"protocol": "none"}),
        ("base", {"base": "none"}),
        ("rounds", {"rounds": 0}),
        ("test_share", {"test_share": 1.0}),
        ("pos_label", {"pos_label": "maybe"}),
        ("random_state", {"random_state": "x"}),
        ("method", {"method": "none"}),
        ("model", {"model": "xgboost"}),
        ("model", {"model": 3}),
        ("model", {"model": lambda: torch.nn.Linear(2, 2)}),
        ("lr", {"lr": "fast"}),
        ("lam", {"lam": 5.0}),
        ("target", {"method": "fedgft", "target": 0.02}),
        ("target", {"target": "0.02"}),
    ],
)
def test_bad_settings_name_the_setting(field, settings):
    with pytest.raises(FedgftError) as caught:
        FairClassifier(**settings).fit(X, Y, sensitive_features=FRAME.sex)
    assert caught.value.field == field


def test_other_columns_at_prediction_are_refused():
    classifier = FairClassifier(**QUICK).fit(X, Y, sensitive_features=FRAME.sex)
    for table in (X.rename(columns={"age": "years"}), X.iloc[:, ::-1], X.iloc[:, :2]):
        with pytest.raises(ValueError, match="feature"):
            classifier.predict(table)
    with pytest.raises(FedgftError, match="age"):
        classifier.predict(X.assign(age="old"))


def test_a_group_that_the_metric_cannot_compare_is_named():
    groups = np.where(Y == "yes", "a", FRAME.sex)  # nobody of f and m has repaid
    with pytest.raises(FedgftError, match="None") as caught:
        FairClassifier("eop", **QUICK).fit(X, Y, sensitive_features=groups)
    assert caught.value.field == "sensitive_features"


@pytest.mark.parametrize("part", [{"trained": None}, {"groups": [1]}, {"class_type": ["text"]}])
def test_a_damaged_header_is_refused(part, tmp_path):
    classifier = FairClassifier(target=0.1, **QUICK).fit(X, Y, sensitive_features=FRAME.sex)
    classifier.model_.about.update(part)
    path = classifier.save(tmp_path / "model.safetensors")
    with pytest.raises(FedgftError) as caught:
        FairClassifier.load(path)
    assert caught.value.kind == "file"


def test_arrays_with_nan_are_not_decided():
    classifier = FairClassifier(target=0.1, **QUICK).fit(X, Y, sensitive_features=FRAME.sex)
    with pytest.raises(FedgftError, match="finite"):
        classifier.model_.predict(np.full((1, 6), np.nan))
