"""Features: the encoder, scaling compared with numpy, formulas of the synthetic population."""

import json
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgft.data import Dataset, Encoder, Federation
from fedgft.data.dataset import Moments, standardize
from fedgft.data.encode import Categorical, as_text, read_missing
from fedgft.data.generated import compute_known_gaps, synthetic
from fedgft.data.partition import partition
from fedgft.errors import FedgftError


def numbers(n, d, *, seed):
    rng = np.random.default_rng(seed)
    return Dataset(
        name="numbers",
        features=rng.normal(3, 2, (n, d)).astype(np.float32),
        labels=rng.integers(2, size=n),
        groups=rng.integers(2, size=n),
        columns=tuple(f"x{j}" for j in range(d)),
    )


@given(st.integers(2, 60), st.integers(1, 4), st.integers(0, 10), st.data())
def test_moments_add_over_any_split_of_the_rows(n, d, seed, data):
    rows = numbers(n, d, seed=seed).features.astype(np.float64)
    cuts = data.draw(st.lists(st.integers(0, n), max_size=5).map(sorted))
    parts = [Moments.of(part) for part in np.split(rows, cuts)]
    for together in (reduce(add, parts), reduce(add, parts[::-1]), Moments.of(rows)):
        assert (together.count == n).all()
        np.testing.assert_allclose(together.sum, rows.sum(axis=0))
        np.testing.assert_allclose(together.squared_deviations / n, rows.var(axis=0), atol=1e-14)


@pytest.mark.parametrize("step", [8, 100, 1 << 24])
def test_scaling_equals_numpy(monkeypatch, step):
    monkeypatch.setattr("fedgft.data.dataset.CHUNK_BYTES", step)
    data = numbers(500, 3, seed=1).standardized()
    made = standardize(partition(data, clients=17, alpha=0.1, seed=3))
    train = data.features[made.rows].astype(np.float64)
    # sums of 350 numbers of order one, in another order than numpy's
    np.testing.assert_allclose(made.mean, train.mean(axis=0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(made.spread, train.std(axis=0), rtol=1e-12)


def test_empty_clients_and_constant_columns_do_no_harm():
    data = numbers(10, 2, seed=0)
    data.features[:, 1] = 0.1
    offsets = np.array([0, 0, 4, 4, 10, 10])
    made = Federation(data, np.arange(10, dtype=np.int32), offsets, np.empty(0, np.int32))
    seen = standardize(made)
    np.testing.assert_allclose(seen.mean, data.features.mean(axis=0, dtype=np.float64))
    assert seen.spread[1] == 1


def test_seconds_since_1970_vary_and_one_second_of_them_does_not(monkeypatch):
    """A spread of an hour beside a mean of fifty years, in chunks, in float32 and in float64."""
    data = numbers(400, 3, seed=0)
    rng = np.random.default_rng(0)
    times = 1.7e9 + 3000 * rng.normal(size=400)
    wide = np.stack([times, np.full(400, 1.7e9 + 0.1), np.full(400, 0.1)], axis=1)
    monkeypatch.setattr("fedgft.data.dataset.CHUNK_BYTES", 8 * 3 * 17)
    for features in (wide.astype(np.float32), wide):
        made = standardize(
            partition(replace(data, features=features), "iid", test_share=0, clients=7, seed=0)
        )
        train = features[made.rows].astype(np.float64)
        np.testing.assert_allclose(made.spread[0], train[:, 0].std(), rtol=1e-9)
        np.testing.assert_array_equal(made.spread[1:], 1)
        assert np.abs(made.scale_rows(made.rows)).max() < 5


@pytest.mark.parametrize(("groups", "gap"), [(2, 0.3), (3, 0.5), (2, 0.0)])
def test_synthetic_gaps_are_the_known_ones(groups, gap):
    data = synthetic(rows=200_000, groups=groups, gap=gap, signal=0.8, seed=4)
    known = compute_known_gaps(groups=groups, gap=gap, signal=0.8)
    rates = np.linspace((1 - gap) / 2, (1 + gap) / 2, groups)[data.groups]
    score = data.features[:, :8].sum(axis=1) / np.sqrt(8) * 1.6 + np.log(rates / (1 - rates))
    probs = 1 / (1 + np.exp(-score))
    yes = data.labels == 1

    def gap_of(values, keep):
        means = [values[keep & (data.groups == g)].mean() for g in range(groups)]
        return max(means) - min(means)

    everyone = np.ones(len(data), bool)
    # four standard errors of a difference of rates over at least 30,000 rows a group
    close = {"abs": 4 * np.sqrt(2 * 0.25 / 30_000)}
    assert gap_of(data.labels, everyone) == pytest.approx(known["label gap"], **close)
    soft = known["soft statistical parity gap"]
    hard = known["hard statistical parity gap"]
    assert gap_of(probs, everyone) == pytest.approx(soft, **close)
    assert gap_of(probs > 0.5, everyone) == pytest.approx(hard, **close)
    assert gap_of(probs > 0.5, yes) == pytest.approx(known["hard equal opportunity gap"], **close)


def test_synthetic_shape_and_encoder():
    data = synthetic(rows=50, features=3, groups=3, seed=1)
    assert data.columns == ("x0", "x1", "x2", "group=1", "group=2")
    raw = {f"x{j}": data.features[:, j] for j in range(3)}
    frame = pl.DataFrame({**raw, "group": [str(g) for g in data.groups]})
    np.testing.assert_array_equal(data.encoder.encode(frame)[0], data.features)
    assert compute_known_gaps()["hard statistical parity gap"] > 0.3
    for name, value in (("groups", 1), ("gap", 1.0), ("signal", 0.0), ("rows", 0)):
        with pytest.raises(FedgftError, match=name):
            synthetic(**{name: value})


@pytest.mark.parametrize(
    "values",
    [
        [1.0, 2.0],
        [1.0, 2.5],
        [1, 2],
        [1.0, 1e20],
        [1.0, None],
        ["1.0", "a"],
        ["1", "a"],
        [1.0, 1e300],
    ],
)
def test_a_value_has_one_spelling_whatever_stands_beside_it(values):
    for dtype in (None, pl.Float32) if isinstance(values[0], float) else (None,):
        text = as_text(pl.Series(values, dtype=dtype))
        assert text[0] == "1"
        assert text.null_count() == values.count(None)


def test_spellings_of_values():
    assert as_text(pl.Series([2.5, -0.0, 1e20, -3.0])).to_list() == [
        "2.5",
        "0",
        "100000000000000000000",
        "-3",
    ]
    assert as_text(pl.Series([10**20, 2])).to_list() == ["100000000000000000000", "2"]
    assert as_text(pl.Series([True, None])).to_list() == ["True", None]
    assert as_text(pl.Series(["true", "maybe", "1.50"])).to_list() == ["True", "maybe", "1.50"]
    decimals = pl.Series(["1.00", "2.50", "10.00"]).cast(pl.Decimal(10, 2))
    assert as_text(decimals).to_list() == ["1", "2.5", "10"]


def test_the_word_for_missing_may_be_a_value():
    frame = pl.DataFrame({"job": ["(missing)", None, "smith", "clerk"]})
    encoder = Encoder.fit(frame, ["job"])
    assert encoder.columns == ("job=smith", "job=(missing)")
    assert encoder.encode(frame)[0].tolist() == [[0, 1], [0, 1], [1, 0], [0, 0]]


def test_encoder_survives_json_and_meets_new_rows():
    seen = pl.DataFrame({"age": [1.5, None], "job": ["clerk", "smith"], "old": [True, False]})
    encoder = Encoder.fit(seen, seen.columns)
    again = Encoder.from_json(encoder.to_json())
    assert again == encoder
    new = pl.DataFrame({"old": [1, 0], "age": ["7", None], "job": ["pilot", None]})
    features, notes = again.encode(new, source="new.csv")
    assert features.tolist() == [[7, 0.5, 1], [1.5, 0.5, 0]]
    text = "2 values of 'job' (100%) not among the training rows: 'pilot', '(missing)'"
    assert f"new.csv: {text}; counted as no category" in notes
    with pytest.raises(FedgftError, match=r"new\.csv: no column 'age'; did you mean 'Age'\?"):
        again.encode(new.rename({"age": "Age"}), source="new.csv")
    with pytest.raises(FedgftError, match=r"column 'age' should hold numbers, not 'old'"):
        again.encode(pl.DataFrame({"age": ["old"], "job": ["clerk"], "old": [1]}))


def test_encoder_can_keep_every_level():
    """As a file may ask for it."""
    frame = pl.DataFrame({"job": ["clerk", "smith"]})
    full = Encoder((Categorical("job", ("clerk", "smith"), drop_first=False),))
    assert full.columns == ("job=clerk", "job=smith")
    assert full.encode(frame)[0].tolist() == [[1, 0], [0, 1]]
    assert Encoder.from_json(full.to_json()) == full


def test_a_level_read_as_text_is_met_again_as_a_number():
    encoder = Encoder.fit(pl.DataFrame({"x": ["1.0", "z"], "g": ["a", "b"]}), ["x", "g"])
    features, notes = encoder.encode(pl.DataFrame({"x": [1.0, 2.5], "g": ["a", "b"]}))
    assert features.tolist() == [[0, 0], [0.5, 1]]  # 1 is the reference level of x
    assert "1 value of 'x' (50%) not among" in notes[0]


def test_an_unseen_category_is_no_category():
    """Standardized, its indicators are zero: the row is not taken for one of the first level."""
    frame = pl.DataFrame({"job": ["clerk"] * 60 + ["nurse"] * 30 + ["smith"] * 10})
    encoder = Encoder.fit(frame, ["job"])
    features, _ = encoder.encode(frame)
    odd, notes = encoder.encode(pl.DataFrame({"job": ["pilot", "clerk", "diver", "a", "b"]}))
    np.testing.assert_allclose(odd[[0, 2, 3, 4]], np.tile(features.mean(axis=0), (4, 1)), rtol=1e-6)
    assert odd[1].tolist() == [0, 0]
    assert notes[0].endswith(
        "(80%) not among the training rows: 'pilot', 'diver', 'a', ...; counted as no category"
    )


def test_models_of_version_0_1_read_unseen_categories_as_before():
    fields = '[{"name": "job", "levels": ["clerk", "smith"], "drop_first": true}]'
    old = Encoder.from_json(fields)
    features, notes = old.encode(pl.DataFrame({"job": ["pilot", "smith"]}))
    assert features.tolist() == [[0], [1]]
    assert notes[0].endswith("'pilot'; counted as no category, with all indicators zero")
    assert Encoder.from_json(old.to_json()) == old and old.to_json() == fields


def test_absence_of_a_number_is_a_feature_where_many_rows_lack_it():
    few = pl.DataFrame({"x": [None] * 9 + [1.0, 3.0]})
    many = pl.DataFrame({"x": [None] * 10 + [1.0, 3.0]})
    assert Encoder.fit(few, ["x"], indicators=True).columns == ("x",)
    assert Encoder.fit(many, ["x"]).columns == ("x",)
    encoder = Encoder.fit(many, ["x"], indicators=True)
    assert encoder.columns == ("x", "x=(missing)")
    features, notes = encoder.encode(many)
    assert features[9:].tolist() == [[2, 1], [1, 0], [3, 0]]
    assert "the feature 'x=(missing)' marks them" in notes[0]
    assert Encoder.from_json(encoder.to_json()) == encoder
    empty = pl.DataFrame({"x": pl.Series([None] * 12, dtype=pl.Float64)})
    assert Encoder.fit(empty, ["x"], indicators=True).columns == ("x",)
    mask = np.arange(12) >= 5  # the training rows decide
    assert Encoder.fit(many, ["x"], rows=mask, indicators=True).columns == ("x",)


@pytest.mark.parametrize(
    ("values", "missing", "expected"),
    [
        (["1", " ? ", "3"], ["?"], [1, None, 3]),
        (["1.5", "?", "-999"], ["?", "-999"], [1.5, None, None]),
        ([1, -999, 3], ["-999"], [1, None, 3]),
        ([1.5, -999.0, None], ["-999"], [1.5, None, None]),
        (["a", "unknown", None], ["unknown"], ["a", None, None]),
        (["?", "?", "?"], ["?"], [None, None, None]),
        ([True, False], ["1"], [True, False]),
        (["a", "b"], ["?"], ["a", "b"]),
    ],
)
def test_values_that_mean_missing(values, missing, expected):
    assert read_missing(pl.Series("x", values), missing).to_list() == expected


def test_missing_values_and_codes_are_remembered():
    frame = pl.DataFrame({"pay": ["1", "?", "3"], "job": [10, 2, None], "town": ["a", "?", "b"]})
    how = {"missing": ("?",), "categorical": ["job"]}
    encoder = Encoder.fit(frame, frame.columns, **how)
    assert encoder.columns == ("pay", "job=2", "job=(missing)", "town=b", "town=(missing)")
    again = Encoder.from_json(encoder.to_json())
    assert again == encoder
    features, notes = again.encode(frame)
    assert features.tolist() == [[1, 0, 0, 0, 0], [2, 1, 0, 0, 1], [3, 0, 1, 1, 0]]
    assert not any("not among" in note for note in notes)
    with pytest.raises(FedgftError, match=r"'job' holds fractions, not codes \(categorical\)"):
        Encoder.fit(pl.DataFrame({"job": [1.5]}), ["job"], categorical=["job"])


@pytest.mark.parametrize(
    "change",
    [
        {"shares": [0.5, 0.5]},
        {"shares": [2.0]},
        {"shares": [float("nan")]},
        {"shares": ["x"]},
        {"missing": [1]},
        {"missing": 7},
    ],
)
def test_a_damaged_encoder_is_refused(change):
    field = {"name": "job", "levels": ["clerk", "smith"], "drop_first": True}
    with pytest.raises(ValueError, match=r"."):
        Encoder.from_json(json.dumps([field | change]))
    number = {"name": "x", "fill": 1.0, "indicator": "yes"}
    with pytest.raises(ValueError, match="'x'"):
        Encoder.from_json(json.dumps([number]))
