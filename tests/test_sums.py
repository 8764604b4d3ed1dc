"""The sums of sites add up like numbers, survive a file, and refuse invalid values."""

import json

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgft.auditing import SiteSums, measure, merge, read_sums, write_sums
from fedgft.errors import FedgftError

ROW = st.tuples(
    st.integers(0, 1),  # label
    st.integers(0, 100).map(lambda i: i / 100),  # score: binary fractions add up exactly or nearly
    st.sampled_from(["a", "b", None]),
    st.sampled_from(["x", "y"]),
)
ROWS = st.lists(ROW, min_size=1, max_size=30)


def measured(rows, site="north", **more) -> SiteSums:
    label, score, first, second = zip(*rows, strict=True)
    features = {"first": list(first), "second": list(second)}
    scores = np.array(score)
    return measure(label, None, scores=scores, sensitive_features=features, site=site, **more)


def same(one: SiteSums, other: SiteSums) -> bool:
    """Counts exactly; sums of scores up to the order in which floats were added."""
    if one.spec != other.spec or list(one.sites) != list(other.sites):
        return False
    for name in one.sites:
        mine = one.sites[name]
        theirs = other.sites[name]
        if set(mine.tables) != set(theirs.tables):
            return False
        for group, table in mine.tables.items():
            if not np.array_equal(table[..., :3], theirs.tables[group][..., :3]):
                return False
            if not np.allclose(table, theirs.tables[group], rtol=0, atol=1e-12):
                return False
    keys = set(one.histogram) == set(other.histogram)
    return keys and all(np.array_equal(h, other.histogram[g]) for g, h in one.histogram.items())


@pytest.mark.slow
@given(ROWS, ROWS, ROWS, st.booleans())
@settings(max_examples=50, deadline=None)
def test_sums_are_a_commutative_monoid(a, b, c, one_site):
    names = ("n", "n", "n") if one_site else ("n", "s", "e")
    x, y, z = (measured(rows, name) for rows, name in zip((a, b, c), names, strict=True))
    assert same((x + y) + z, x + (y + z))
    assert same(x + y, y + x)
    assert same(x + SiteSums(), x) and same(SiteSums() + x, x)
    assert same(sum([x, y, z]), merge([z, x, y]))


@pytest.mark.slow
@given(ROWS, ROWS)
@settings(max_examples=50, deadline=None)
def test_sums_of_a_union_are_the_sum_of_its_parts(a, b):
    assert same(measured(a + b), measured(a) + measured(b))


@pytest.mark.slow
@given(ROWS)
@settings(max_examples=50, deadline=None)
def test_a_file_gives_back_what_was_written(rows):
    sums = measured(rows)
    again = SiteSums.from_json(sums.to_json(), source="file")
    assert again.to_json() == sums.to_json()
    assert again.rows() == len(rows)


def test_the_file_is_small_and_holds_no_rows(tmp_path):
    generator = np.random.default_rng(0)
    n = 5000
    columns = [
        generator.integers(0, 2, n),
        generator.random(n),
        generator.choice(["a", "b"], n),
        generator.choice(["x", "y"], n),
    ]
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    path = write_sums(measured(rows), tmp_path / "site.json")
    assert path.stat().st_size < 8192
    cells = json.loads(path.read_text())["cells"]
    assert sum(cell["count"] for cell in cells) == n
    assert read_sums(path).rows() == n
    assert not any(f"{score:.9f}"[2:9] in path.read_text() for _, score, _, _ in rows[:100])


def test_a_score_lies_in_the_bin_whose_edges_hold_it():
    """0.29 * 100 is 28.999999999999996; the bin is 29 all the same."""
    edges = np.arange(101) / 100
    just_below = np.nextafter(edges[1:], 0)
    for scores, bins in ((edges, [*range(100), 99]), (just_below, range(100))):
        sums = measure(
            np.zeros(len(scores), int),
            None,
            scores=scores,
            sensitive_features=["g"] * len(scores),
            threshold=0.29,
        )
        counts = sums.histogram[("g",)][0, :, 0]
        assert np.array_equal(counts.sum(0), np.bincount(list(bins), minlength=100))
        assert counts[1, :29].sum() == 0 and counts[0, 29:].sum() == 0  # as the threshold says


def test_inputs_of_all_kinds_are_the_same():
    y = [1, 0, 1, 1]
    d = [1, 0, 0, 1]
    g = ["a", None, "b", "b"]
    features = {
        "numpy": np.array(g, dtype=object),
        "pandas": pd.Series(g, name="group"),
        "polars": pl.Series("group", g),
        "list": g,
        "frame": pd.DataFrame({"group": g}),
        "polars frame": pl.DataFrame({"group": g}),
        "nan": pd.Series(["a", np.nan, "b", "b"]),
        "categories": pd.Series(g, dtype="category", name="group"),
    }
    wanted = measure(y, d, sensitive_features=g)
    for name, feature in features.items():
        assert same(measure(y, d, sensitive_features=feature), wanted), name
    for kind in (np.array, pd.Series, pl.Series, lambda v: np.array(v, float)):
        assert same(measure(kind(y), kind(d), sensitive_features=g), wanted)
    truth = measure([True, False, True, True], [True, False, False, True], sensitive_features=g)
    assert truth.spec.classes == ("False", "True") and truth.rows() == 4


def test_missing_values_as_pandas_has_them():
    g = pd.Series(["a", pd.NA, "b", "b"], dtype="string")
    y = pd.Series([1, 0, pd.NA, 1], dtype="Int64")
    found = measure(y, pd.Series([1, 0, 0, 1]), sensitive_features=g).sites[""]
    assert found.label_missing == 1 and found.tables[(None,)][..., 0].sum() == 1
    floats = measure(pd.Series([1.0, 0.0, np.nan]), [0.9, 0.2, 0.4], sensitive_features=list("aab"))
    assert floats.spec.scored and floats.sites[""].label_missing == 1
    with pytest.raises(FedgftError, match="has no name"):
        floats.to_json()


def test_lengths_must_agree():
    with pytest.raises(FedgftError, match="y_pred has 2 rows, y_true has 3"):
        measure([1, 0, 1], [1, 0], sensitive_features=list("aba"))


def test_histograms_of_different_widths_meet_at_the_coarser():
    rows = [(1, 0.31, "a", "x"), (0, 0.39, "b", "x"), (1, 0.9, "a", "y")]
    fine = measured(rows, "n")
    coarse = measured(rows, "s", bins=20)
    both = fine + coarse
    assert both.spec.bins == 20
    assert np.array_equal(both.histogram[("a", "x")], 2 * coarse.histogram[("a", "x")])
    with pytest.raises(FedgftError, match="histograms differ: 100 and 30 bins"):
        fine + measured(rows, "e", bins=30)


def test_masked_values_are_missing():
    """NumPy would fill masked texts with "?" and masked numbers with 999999."""
    labels = np.ma.masked_array([1, 0, 1, 0], mask=[False, False, False, True])
    groups = np.ma.masked_array(["f", "f", "m", "m"], mask=[False, True, False, False])
    sums = measure(labels, [1, 1, 0, 0], sensitive_features=groups)
    assert sums.groups == (("f",), ("m",), (None,)) and sums.rows() == 3
