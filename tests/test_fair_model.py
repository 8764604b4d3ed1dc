"""A saved model as an object: equal predictions for every kind of table, without torch."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

import fedgft
from fedgft.errors import FedgftError
from fedgft.fair_model import FairModel, softmax

OLD = Path(__file__).parent / "fixtures" / "v0.1.0"


@pytest.fixture
def model():
    return fedgft.load_model(OLD / "linear.safetensors")


def test_every_kind_of_table_gives_the_same_predictions(model):
    frame = pl.read_csv(OLD / "loans.csv")
    expected = model.predict_proba(frame)
    np.testing.assert_allclose(expected.sum(axis=1), 1.0)
    pandas = pd.read_csv(OLD / "loans.csv", index_col=None).set_index("bank", drop=False)
    np.testing.assert_array_equal(model.predict_proba(pandas), expected)
    features, _ = model.encoder.encode(frame)
    np.testing.assert_array_equal(model.predict_proba(features), expected)
    names = np.array(model.classes)
    np.testing.assert_array_equal(model.predict(pandas), names[expected.argmax(1)])
    table, notes = model.add_predictions(frame, source="loans")
    assert table.columns == [*frame.columns, "score", "decision"] and not notes
    np.testing.assert_array_equal(table["score"].to_numpy(), expected[:, 1])


def test_a_missing_value_means_the_same_in_pandas_and_polars(model):
    gaps = pl.read_csv(OLD / "loans.csv").with_columns(
        pl.when(pl.int_range(pl.len()) % 3 > 0).then("x").alias("x"),
        pl.when(pl.int_range(pl.len()) % 4 > 0).then("city").alias("city"),
    )
    pandas = pd.DataFrame(gaps.to_dict(as_series=False))
    assert pandas["x"].isna().any()
    with pytest.warns(UserWarning, match=r"'city' \(26\.7%\) not among"):
        found = model.predict_proba(pandas), model.predict_proba(gaps)
    np.testing.assert_array_equal(*found)


def test_what_is_saved_is_loaded_again(model, tmp_path):
    path = model.save(tmp_path / "model.safetensors")
    again = FairModel.load(path)
    assert again.about == model.about and again.columns == model.columns
    assert again.groups == ("a", "b") and again.classes == ("no", "yes")
    frame = pl.read_csv(OLD / "loans.csv")
    np.testing.assert_array_equal(again.predict_proba(frame), model.predict_proba(frame))


def loans(**more):
    """A trained model and its federation, in which the label depends on the city alone."""
    rng = np.random.default_rng(0)
    city = rng.choice(["Bonn", "Lyon", "Oslo"], 600)
    frame = pl.DataFrame(
        {
            "city": city,
            "sex": rng.choice(["f", "m"], 600),
            "repaid": np.where((city == "Bonn") ^ (rng.random(600) < 0.1), "no", "yes"),
        }
    )
    data = fedgft.load(frame, label="repaid", group="sex", **more)
    federation = fedgft.standardize(fedgft.partition(data, clients=3))
    history = fedgft.simulate(federation, "logistic", "fedavg", metric="sp", rounds=20, lr=0.1)
    return history.model(), federation


def test_unseen_categories_are_named_and_count_as_no_category():
    """Bonn is the first level: an unknown city is not decided as Bonn is."""
    model, federation = loans()
    assert federation.dataset.excluded == (("sex", "the group"), ("repaid", "the label"))
    new = pl.DataFrame({"city": ["Bonn", "Lyon", "Rome", "Kiel", "Rome"]})
    expected = r"3 values of 'city' \(60%\) .*: 'Rome', 'Kiel'; counted as no category"
    with pytest.warns(UserWarning, match=expected) as caught:
        scores = model.predict_proba(new)[:, 1]
    assert len(caught) == 1
    neutral = softmax(model.layers[0][1][None])[0, 1]  # of the intercept alone
    np.testing.assert_allclose(scores[2:], neutral, atol=0.01)  # shares include test rows
    assert scores[0] < neutral < scores[1]
    table, notes = model.add_predictions(new, source="new")
    np.testing.assert_array_equal(table["score"].to_numpy(), scores)
    assert [note for note in notes if "'city'" in note] == list(notes)


def test_a_start_with_other_columns_is_refused_with_the_difference():
    model, _ = loans(keep_group=True)
    _, federation = loans()
    with pytest.raises(FedgftError, match="only the model has 'sex=m'"):
        model.initial_parameters(federation)


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (np.zeros((2, 3)), "data"),
        (pl.DataFrame({"x": [1.0]}), "data"),
        ([[1, 2]], "invalid"),
        (pd.DataFrame({"x": [object()]}), "data"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_one_line(model, table, kind):
    with pytest.raises(FedgftError) as caught:
        model.predict(table)
    assert caught.value.kind == kind and "\n" not in str(caught.value)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import fedgft, polars
model = fedgft.load_model(sys.argv[1])
print(model.predict(polars.read_csv(sys.argv[2])).tolist()[:3])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_prediction_needs_no_torch(name):
    given = [str(OLD / f"{name}.safetensors"), str(OLD / "loans.csv")]
    command = [sys.executable, "-c", WITHOUT_TORCH, *given]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
