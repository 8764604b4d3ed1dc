"""Models of XGBoost as files: equal predictions, and damaged files told in one line."""

import copy
import json
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
import xgboost as xgb
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgft
from fedgft.cli import main
from fedgft.errors import FedgftError
from fedgft.fair_model import FairModel

CITIES = [f"city {i}" for i in range(40)]  # more than fit into one word of a set


def make_table(rows=800, seed=0):
    """Numbers and categories, with missing values in both."""
    generator = np.random.default_rng(seed)
    city = generator.integers(0, 40, rows)
    x = generator.normal(size=rows).astype(np.float32)
    label = x + city % 3 + generator.normal(size=rows)
    return pl.DataFrame(
        {
            "city": [None if i % 17 == 0 else CITIES[c] for i, c in enumerate(city)],
            "x": [None if i % 13 == 0 else float(v) for i, v in enumerate(x)],
            "whole": generator.integers(0, 4, rows),
            "sex": generator.choice(["f", "m"], rows),
            "grade": np.array(["a", "b", "c"])[np.digitize(label, [1, 2])],
            "paid": np.where(label > 1, "yes", "no"),
        }
    )


TABLE = make_table()
NEW = TABLE.with_columns(  # unseen categories, more missing numbers
    pl.when(pl.int_range(pl.len()) % 3 == 0).then(pl.lit("Rome")).otherwise("city").alias("city"),
    pl.when(pl.int_range(pl.len()) % 4 > 0).then("x").alias("x"),
)


def load(label):
    return fedgft.load(
        TABLE, label=label, group="sex", leave_out=({"paid", "grade"} - {label}).pop()
    )


DATA = {label: load(label) for label in ("paid", "grade")}


def as_matrix(data, features, **more):
    kinds = ["c" if levels else "q" for levels in data.encoder.level_counts]
    fields = data.encoder.to_fields(features)
    return xgb.DMatrix(fields, feature_types=kinds, enable_categorical=True, **more)


def grow(label="paid", rounds=6, **params):
    data = DATA[label]
    classes = len(data.classes)
    kind = {"objective": "binary:logistic"}
    if classes > 2:
        kind = {"objective": "multi:softprob", "num_class": classes}
    given = {"max_depth": 5, "nthread": 1, "min_child_weight": 0} | kind | params
    return xgb.train(given, as_matrix(data, data.features, label=data.labels), rounds)


BOOSTER = grow()
MODEL = FairModel.from_xgboost(BOOSTER, DATA["paid"])
LEARNER = json.loads(BOOSTER.save_raw("json"))


@pytest.mark.parametrize("label", DATA)
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_cat_to_onehot": 100},
        {"max_cat_to_onehot": 1, "base_score": 0.3},
        {"grow_policy": "lossguide", "max_leaves": 9, "num_parallel_tree": 2, "subsample": 0.5},
    ],
    ids=["default", "one-hot", "sets", "leaves"],
)
def test_predictions_are_those_of_xgboost(label, params, tmp_path):
    data = DATA[label]
    booster = grow(label, **params)
    model = FairModel.from_xgboost(booster, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unseen categories
        for table in (TABLE, NEW):
            features, _ = data.encoder.encode(table)
            expected = booster.predict(as_matrix(data, features))
            found = model.predict_proba(table)
            found = found[:, 1] if label == "paid" else found
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        path = model.save(tmp_path / "model.json")
        np.testing.assert_array_equal(fedgft.load_model(path).predict(NEW), model.predict(NEW))


def test_a_number_on_a_threshold_goes_where_xgboost_sends_it():
    """Also numbers between two float32 numbers, which XGBoost rounds first."""
    x = np.random.default_rng(0).normal(size=(500, 2)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.int64)
    booster = xgb.train({"objective": "binary:logistic", "nthread": 1}, xgb.DMatrix(x, y), 5)
    model = FairModel.from_xgboost(
        booster, fedgft.Dataset("arrays", x, y, y, ("u", "v"), group_names=("f", "m"))
    )
    trees = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"]["trees"]
    edges = [
        c
        for t in trees
        for c, at in zip(t["split_conditions"], t["left_children"], strict=True)
        if at >= 0
    ]
    edges = np.array(edges, np.float32)
    near = [np.nextafter(edges, np.float32(end)) for end in (-9, 9)]
    values = np.concatenate((edges, *near)).astype(np.float64)
    values = np.concatenate((values, edges.astype(np.float64) * (1 - 1e-9)))
    rows = np.stack(np.meshgrid(values[::3], values[::5]), -1).reshape(-1, 2)
    expected = booster.predict(xgb.DMatrix(rows))
    np.testing.assert_allclose(model.predict_proba(rows)[:, 1], expected, rtol=0, atol=1e-6)


def test_both_libraries_read_the_file(tmp_path):
    objective = fedgft.price_objective(
        "sp",
        target=0.05,
        y=DATA["paid"].labels,
        sensitive_features=DATA["paid"].groups,
        groups=DATA["paid"].group_names,
        lr=0.3,
    )
    data = DATA["paid"]
    train = as_matrix(data, data.features, label=data.labels)
    params = {"objective": "binary:logistic", "eta": 0.3, "nthread": 1}
    calls = [objective.callback(train)]
    booster = xgb.train(params, train, 10, obj=objective, callbacks=calls)
    model = FairModel.from_xgboost(booster, data, about=objective.about())
    path = model.save(tmp_path / "model.json")
    again = xgb.Booster()
    again.load_model(path)
    np.testing.assert_array_equal(again.predict(train), booster.predict(train))
    assert again.attr("best_iteration") == str(objective.best - 1)
    loaded = fedgft.load_model(path)
    assert loaded.about == model.about | {"format": "fedgft-model-1"}
    assert loaded.classes == ("no", "yes") and loaded.groups == ("f", "m")
    gap = 100 * objective.report.gap[0]
    assert f"| gap on the training rows | {gap:.1f} points |" in loaded.card()
    assert "An XGBoost model that predicts no or yes, trained with fedgft-control" in loaded.card()
    gains = booster.get_score(importance_type="total_gain")
    shares = loaded.importances()
    names = list(loaded.features)
    total = sum(gains.values())
    for key, gain in gains.items():
        assert shares[names[int(key[1:])]] == pytest.approx(gain / total, rel=1e-5)
    resaved = fedgft.load_model(loaded.save(tmp_path / "again.json"))
    np.testing.assert_array_equal(resaved.predict_proba(TABLE), model.predict_proba(TABLE))
    tensors = fedgft.load_model(model.save(tmp_path / "model.safetensors"))
    np.testing.assert_array_equal(tensors.predict_proba(TABLE), model.predict_proba(TABLE))
    with pytest.raises(FedgftError) as caught:
        tensors.save(tmp_path / "other.json")
    assert caught.value.field == "path" and not (tmp_path / "other.json").exists()


WITHOUT = """
import sys
sys.modules["xgboost"] = sys.modules["torch"] = None
from fedgft.cli import main
main(sys.argv[1:])
"""


def test_the_command_predicts_without_xgboost(tmp_path):
    path = MODEL.save(tmp_path / "model.json")
    TABLE.write_csv(tmp_path / "people.csv")
    given = ["predict", str(path), str(tmp_path / "people.csv"), "--out", str(tmp_path / "s.csv")]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    scored = pl.read_csv(tmp_path / "s.csv")
    assert scored["decision"].to_list() == MODEL.predict(TABLE).tolist()
    np.testing.assert_allclose(scored["score"], MODEL.predict_proba(TABLE)[:, 1])
    path.write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2


def test_an_encoder_suffices():
    about = {"classes": ["no", "yes"], "groups": ["f", "m"]}
    raw = BOOSTER.save_raw("json")
    model = FairModel.from_xgboost(bytes(raw), DATA["paid"].encoder, about=about)
    np.testing.assert_array_equal(model.predict_proba(TABLE), MODEL.predict_proba(TABLE))
    with pytest.raises(FedgftError, match="classes"):
        FairModel.from_xgboost(bytes(raw), DATA["paid"].encoder)


def nodes(**arrays):
    """A change of the first tree."""

    def change(model):
        tree = model["learner"]["gradient_booster"]["model"]["trees"][0]
        for name, (place, value) in arrays.items():
            tree[name][place] = value

    return change


def put(*path):
    """A change of one value: the keys to it, and the value."""

    def change(model):
        for key in path[:-2]:
            model = model[key]
        model[path[-2]] = path[-1]

    return change


TREES = ("learner", "gradient_booster", "model")
PARAMS = (*TREES, "trees", 0, "tree_param")
DAMAGE = {
    "version 1": put("version", [1, 7, 0]),
    "version 9": put("version", [9, 0, 0]),
    "no version": put("version", None),
    "no learner": put("learner", []),
    "dart": put("learner", "gradient_booster", "name", "dart"),
    "regression": put("learner", "objective", "name", "reg:squarederror"),
    "ranking": put("learner", "objective", "name", "rank:ndcg"),
    "classes": put("learner", "learner_model_param", "num_class", "3"),
    "targets": put("learner", "learner_model_param", "num_target", "2"),
    "columns": put("learner", "learner_model_param", "num_feature", "9"),
    "base score 2": put("learner", "learner_model_param", "base_score", "[2E0]"),
    "base score x": put("learner", "learner_model_param", "base_score", "x"),
    "base score NaN": put("learner", "learner_model_param", "base_score", "[NaN]"),
    "two base scores": put("learner", "learner_model_param", "base_score", "[5E-1,5E-1]"),
    "tree count": put(*TREES, "gbtree_model_param", "num_trees", "5"),
    "tree info": put(*TREES, "tree_info", [0]),
    "tree output": put(*TREES, "tree_info", 0, 4),
    "no trees": put(*TREES, "trees", None),
    "a tree that is a text": put(*TREES, "trees", 0, "tree"),
    "node count": put(*PARAMS, "num_nodes", "3"),
    "no nodes": put(*PARAMS, "num_nodes", "0"),
    "negative count": put(*PARAMS, "num_nodes", "-1"),
    "deleted nodes": put(*PARAMS, "num_deleted", "2"),
    "vector leaves": put(*PARAMS, "size_leaf_vector", "3"),
    "cycle": nodes(left_children=(1, 0)),
    "its own child": nodes(left_children=(1, 1)),
    "shared child": nodes(left_children=(1, 2)),
    "one child twice": nodes(right_children=(0, 1)),
    "child out of range": nodes(left_children=(0, 999)),
    "negative child": nodes(right_children=(0, -1)),
    "very negative child": nodes(right_children=(0, -7)),
    "parent": nodes(parents=(1, 2)),
    "root with a parent": nodes(parents=(0, 1)),
    "NaN condition": nodes(split_conditions=(0, float("nan"))),
    "infinite condition": nodes(split_conditions=(0, float("inf"))),
    "huge condition": nodes(split_conditions=(0, 1e300)),
    "text condition": nodes(split_conditions=(0, "1")),
    "truth value": nodes(split_indices=(0, True)),
    "fraction": nodes(split_indices=(0, 0.5)),
    "column": nodes(split_indices=(0, 77)),
    "negative column": nodes(split_indices=(0, -1)),
    "split type": nodes(split_type=(0, 7)),
    "NaN gain": nodes(loss_changes=(0, float("nan"))),
    "huge whole number": nodes(left_children=(0, 10**30)),
    "category": put(*TREES, "trees", 0, "categories", 0, 5000),
    "negative category": put(*TREES, "trees", 0, "categories", 0, -1),
    "categories missing": put(*TREES, "trees", 0, "categories_nodes", []),
    "segment": put(*TREES, "trees", 0, "categories_segments", 0, 10**6),
    "negative size": put(*TREES, "trees", 0, "categories_sizes", 0, -1),
    "other columns": put("learner", "feature_names", ["a", "b", "c"]),
    "columns that are a number": put("learner", "feature_names", 3),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_model_is_refused_in_one_line(name, tmp_path):
    path = MODEL.save(tmp_path / "model.json")
    model = json.loads(path.read_text())
    DAMAGE[name](model)
    path.write_text(json.dumps(model))
    with pytest.raises(FedgftError) as caught:
        fedgft.load_model(path)
    assert caught.value.kind == "file" and "\n" not in str(caught.value)
    with pytest.raises(FedgftError) as caught:
        FairModel.from_xgboost(path.read_bytes(), DATA["paid"])
    assert caught.value.field == "booster" and "\n" not in str(caught.value)


def test_one_child_twice_in_the_smallest_tree_is_refused():
    model = json.loads(grow(max_depth=1).save_raw("json"))
    DAMAGE["one child twice"](model)
    with pytest.raises(FedgftError, match="two parents"):
        FairModel.from_xgboost(json.dumps(model).encode(), DATA["paid"])


@pytest.mark.parametrize(
    "header", [None, "", "{", "[]", "7", '{"format": "fedgft-model-9"}', '{"format": 7}', 5]
)
def test_a_header_that_is_none_of_ours_is_refused(header, tmp_path):
    path = tmp_path / "model.json"
    model = copy.deepcopy(LEARNER)
    model["learner"]["attributes"] = {"fedgft": header}
    path.write_text(json.dumps(model))
    with pytest.raises(FedgftError) as caught:
        fedgft.load_model(path)
    assert caught.value.kind == "file" and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 99, b"\x80\x04K\x01.", b"null"])
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "model.json"
    with pytest.raises(FedgftError, match="no such file"):
        fedgft.load_model(path)
    path.write_bytes(content)
    with pytest.raises(FedgftError) as caught:
        fedgft.load_model(path)
    assert caught.value.kind == "file" and "\n" not in str(caught.value)


def list_paths(value, path=()):
    """The paths to all values in nested lists and objects; of long lists, to the first two."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from list_paths(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(min(2, len(value))):
            yield from list_paths(value[i], (*path, i))


TEXT = MODEL.booster
PATHS = [path for path in list_paths(LEARNER) if path]
JUNK = st.sampled_from(
    [None, True, -1, 0, 1, 2**31, 10**40, 0.5, float("nan"), "", "x", "3", [], {}, [[]], [None]]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATHS), JUNK), min_size=1, max_size=3))
def test_any_damage_is_an_error_of_one_line_or_a_valid_model(changes):
    """A model that is still read predicts finite numbers: walks through trees end."""
    model = copy.deepcopy(LEARNER)
    for path, value in changes:
        parent = model
        try:
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
    try:
        read = FairModel.from_xgboost(json.dumps(model).encode(), DATA["paid"])
    except FedgftError as error:
        assert "\n" not in str(error) and error.kind == "data"
    else:
        assert np.isfinite(read.predict_proba(DATA["paid"].features[:50])).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.binary(min_size=1, max_size=3))
def test_damaged_bytes_are_an_error_of_one_line_or_a_valid_model(place, junk):
    at = place % len(TEXT)
    try:
        read = FairModel.from_xgboost(TEXT[:at] + junk + TEXT[at + 1 :], DATA["paid"])
    except FedgftError as error:
        assert "\n" not in str(error)
    else:
        assert np.isfinite(read.predict_proba(DATA["paid"].features[:50])).all()


def test_a_data_frame_with_other_categories_is_refused():
    """XGBoost numbers the categories of a data frame; the encoder numbers its levels."""
    data = DATA["paid"]
    names = [field.name for field in data.encoder.fields]
    frame = pd.DataFrame(TABLE.select(names).to_dict(as_series=False))
    for categories, fits in ((list(data.encoder.fields[0].levels), True), (CITIES[::-1], False)):
        table = frame.copy()
        filled = table["city"].fillna("(missing)") if fits else table["city"]
        table["city"] = filled.astype("object").astype("category").cat.set_categories(categories)
        matrix = xgb.DMatrix(table, data.labels, enable_categorical=True)
        booster = xgb.train({"objective": "binary:logistic", "nthread": 1}, matrix, 3)
        if fits:
            found = FairModel.from_xgboost(booster, data).predict_proba(TABLE)[:, 1]
            np.testing.assert_allclose(found, booster.predict(matrix), atol=1e-6)
            continue
        with pytest.raises(FedgftError) as caught:
            FairModel.from_xgboost(booster, data)
        assert caught.value.field == "booster" and "'city'" in str(caught.value)


def test_scaled_features_are_refused():
    with pytest.raises(FedgftError) as caught:
        FairModel.from_xgboost(BOOSTER, DATA["paid"].standardized())
    assert caught.value.field == "data" and "\n" not in str(caught.value)
