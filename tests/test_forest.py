"""Forests: rows reach the same leaves with and without numba, and in any form of storage."""

from dataclasses import fields, replace

import numpy as np
import pytest

from fedgft import forest as forest_module
from fedgft.errors import FedgftError
from fedgft.fair_model import FairModel
from fedgft.forest import BY_NODE, WORD, Forest, make_sets
from tree_tables import draw_table, grow, pooled

LEVELS = 70  # three words


def draw_forest(seed: int, *, outputs: int = 1, trees: int = 12, depth: int = 4) -> Forest:
    """Complete trees with random questions: field 0 and 2 hold numbers, field 1 categories."""
    rng = np.random.default_rng(seed)
    inner = 2**depth - 1
    shape = (trees, 2 ** (depth + 1) - 1)
    is_inner = np.arange(shape[1]) < inner
    feature = np.where(is_inner, rng.integers(0, 3, shape), -1).astype(np.int32)
    inside = rng.random((*shape, LEVELS)) < 0.5
    inside[feature != 1] = False
    left = np.where(is_inner, 2 * np.arange(shape[1]) + 1, 0).astype(np.int32)
    return Forest(
        feature=feature,
        threshold=rng.standard_normal(shape).round(1),
        left=np.broadcast_to(left, shape).copy(),
        missing_left=rng.random(shape) < 0.5,
        value=np.where(is_inner, 0.0, rng.standard_normal(shape)),
        gain=np.where(is_inner, rng.random(shape), 0.0),
        cover=rng.random(shape),
        categories=make_sets(inside, -(-LEVELS // WORD)),
        categorical=np.array([False, True, False]),
        output=rng.integers(0, outputs, trees).astype(np.int32),
        base=rng.standard_normal(outputs),
    )


def draw_rows(seed: int, count: int = 300) -> np.ndarray:
    """Rows with values on thresholds, missing values and categories that there are not."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, 3)).round(1)
    rows[:, 1] = rng.integers(-1, LEVELS + 30, count)
    rows[rng.random((count, 3)) < 0.1] = np.nan
    rows[:2, 0] = (np.inf, -np.inf)
    return rows


def walk(forest: Forest, row: np.ndarray) -> np.ndarray:
    """By the definition in the module: one row, node by node."""
    out = forest.base.astype(np.float64).copy()
    for t in range(len(forest)):
        node = 0
        while forest.feature[t, node] >= 0:
            x = row[forest.feature[t, node]]
            if np.isnan(x) or (forest.categorical[forest.feature[t, node]] and x < 0):
                left = forest.missing_left[t, node]
            elif forest.categorical[forest.feature[t, node]]:
                word, bit = divmod(int(x), WORD)
                words = forest.categories[t, node]
                left = word < len(words) and bool(int(words[word]) >> bit & 1)
            else:
                left = x <= forest.threshold[t, node]
            node = forest.left[t, node] + (not left)
        out[forest.output[t]] += forest.value[t, node]
    return out


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_row_reaches_its_leaf(outputs: int, compiled: bool, monkeypatch) -> None:
    """Compiled, row by row; and without numba, all rows together."""
    monkeypatch.setattr(forest_module, "NUMBA_AVAILABLE", compiled)
    for seed in range(3):
        forest = draw_forest(seed, outputs=outputs)
        rows = draw_rows(seed)
        expected = np.stack([walk(forest, row) for row in rows])
        np.testing.assert_array_equal(forest.margins(rows), expected)
        logits = forest.logits(rows)
        assert logits.shape == (len(rows), max(outputs, 2))
        np.testing.assert_array_equal(logits[:, -outputs:], expected)


def test_without_numba_a_grown_forest_predicts_the_same(monkeypatch) -> None:
    data = draw_table(seed=21)
    model = grow(pooled(data), "fedgft-control", metric="sp", rounds=8).model()
    compiled = model.predict_proba(data.features)
    monkeypatch.setattr(forest_module, "NUMBA_AVAILABLE", False)
    np.testing.assert_array_equal(model.predict_proba(data.features), compiled)


def test_vectors_and_tensors_hold_the_whole_forest() -> None:
    forest = draw_forest(5, outputs=2)
    vector = forest.to_vector()
    for back in (
        Forest.from_vector(vector),
        Forest.from_vector(np.concatenate((vector, np.zeros(9)))),
        Forest.from_tensors(forest.to_tensors()),
    ):
        back.check()
        for f in fields(Forest):
            mine, theirs = getattr(forest, f.name), getattr(back, f.name)
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)


def test_trimming_leaves_predictions_as_they_are() -> None:
    forest = draw_forest(6)
    wide = {name: np.pad(getattr(forest, name), ((0, 2), (0, 5))) for name in BY_NODE}
    wide["feature"] = np.pad(forest.feature, ((0, 2), (0, 5)), constant_values=-1)
    padded = replace(
        forest,
        **wide,
        categories=np.pad(forest.categories, ((0, 2), (0, 5), (0, 1))),
        output=np.pad(forest.output, (0, 2)),
    )
    trimmed = padded.trimmed()
    assert len(padded) == 14 and len(trimmed) == 12
    assert trimmed.feature.shape == forest.feature.shape
    assert trimmed.categories.shape == forest.categories.shape
    rows = draw_rows(6)
    np.testing.assert_array_equal(trimmed.margins(rows), forest.margins(rows))
    assert trimmed.describe() == "12 trees with 192 leaves."
    assert padded.describe() == "14 trees with 194 leaves."


def test_importances_are_the_gains_of_the_splits_on_a_field() -> None:
    forest = draw_forest(7)
    expected = [forest.gain[forest.feature == f].sum() for f in range(3)]
    np.testing.assert_allclose(forest.importances(), expected)


def test_sets_hold_the_categories_that_are_inside() -> None:
    inside = np.zeros((2, LEVELS), bool)
    inside[0, [0, 31, 32, 69]] = True
    sets = make_sets(inside, 3)
    assert sets.dtype == np.uint32 and sets.tolist() == [[1 + 2**31, 1, 2**5], [0, 0, 0]]


def damage(forest: Forest, name: str, at: tuple[int, ...], value: float) -> Forest:
    array = getattr(forest, name).copy()
    array[at] = value
    return replace(forest, **{name: array})


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("value", (0, 20), np.nan),
        ("threshold", (0, 0), np.inf),
        ("base", (0,), np.nan),
        ("feature", (0, 0), 3),
        ("feature", (0, 0), -2),
        ("left", (1, 0), 0),  # a walk without end
        ("left", (1, 3), 2),
        ("left", (1, 3), 30),  # its right child would lie outside
        ("output", (2,), 1),
        ("categories", (0, 30, 0), 1),  # a set at a leaf
    ],
)
def test_forests_that_cannot_be_walked_are_refused(name: str, at: tuple, value: float) -> None:
    draw_forest(8).check()
    with pytest.raises(ValueError):
        damage(draw_forest(8), name, at, value).check()


@pytest.mark.parametrize(
    ("name", "value"), [("feature", 0.5), ("categories", -1.0), ("missing_left", 2.0)]
)
def test_tensors_of_other_than_whole_numbers_are_refused(name: str, value: float) -> None:
    tensors = draw_forest(9).to_tensors()
    tensors[f"trees.{name}"].flat[0] = value
    with pytest.raises(ValueError):
        Forest.from_tensors(tensors)


def test_tensors_of_other_shapes_are_refused() -> None:
    for f in fields(Forest):
        tensors = draw_forest(9, outputs=2).to_tensors()
        tensors[f"trees.{f.name}"] = tensors[f"trees.{f.name}"][:0]
        with pytest.raises(ValueError):
            Forest.from_tensors(tensors)
    with pytest.raises(KeyError):
        Forest.from_tensors({})


def test_a_model_file_holds_the_forest(tmp_path) -> None:
    data = draw_table(seed=22, classes=3)
    model = grow(pooled(data), rounds=5).model()
    path = tmp_path / "model.safetensors"
    model.save(path)
    back = FairModel.load(path)
    np.testing.assert_array_equal(
        back.predict_proba(data.features), model.predict_proba(data.features)
    )
    np.testing.assert_array_equal(back.forest.to_vector(), model.forest.to_vector())
    held = bytearray(path.read_bytes())
    at = held.index(b'"trees.value"')
    held[at + 8] ^= 1
    path.write_bytes(held)
    with pytest.raises(FedgftError):
        FairModel.load(path)
