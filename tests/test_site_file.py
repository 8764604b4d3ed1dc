"""The file of a site: foreign or damaged files are refused with the name of the field."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgft.auditing import SiteSums, measure, read_sums, write_sums
from fedgft.auditing.site_file import find_site_files, gather
from fedgft.errors import FedgftError
from test_sums import measured


@pytest.fixture
def good(tmp_path):
    rows = [(1, 0.9, "a", "x"), (0, 0.2, "b", "y"), (1, 0.4, "b", "x"), (0, 0.6, None, "x")]
    return write_sums(measured(rows), tmp_path / "good.json", min_bin=1)


def test_foreign_text_is_refused(good, tmp_path):
    text = good.read_text()
    for content, said in (
        ("hello", "not JSON"),
        (text[: len(text) // 2], "ends too early or is damaged"),
        ("[1, 2]", "not a file of sums"),
        ('{"format": "other"}', "not a file of sums"),
        (text.replace("sums-2", "sums-4"), "format is 'fedgft-sums-4'"),
        ("[" * 100_000, "not a whole file"),
        (text.replace('"count": 1', '"count": NaN', 1), "NaN is not a number"),
    ):
        bad = tmp_path / "bad.json"
        bad.write_text(content)
        with pytest.raises(FedgftError, match=said) as caught:
            read_sums(bad)
        assert str(bad) in str(caught.value) and "\n" not in str(caught.value)
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FedgftError, match="not text"):
        read_sums(bad)
    with pytest.raises(FedgftError, match="no such file"):
        read_sums(tmp_path / "none.json")


def change(place, value):
    def apply(found):
        *path, last = place
        for key in path:
            found = found[key]
        found[last] = value

    return apply


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("cells", 0, "count"), -1, r"cells\[0\].count is -1: must be a whole number, 0 or more"),
        (("cells", 0, "count"), 1.5, r"cells\[0\].count is 1.5: must be a whole number"),
        (("cells", 0, "count"), True, r"cells\[0\].count is True"),
        (("cells", 0, "count"), 2, r"histogram adds up to 1, the count is 2"),
        (("cells", 0, "count"), None, "declares no min_cell"),
        (("cells", 0, "label"), "2", r"cells\[0\].label is '2': none of the classes"),
        (("cells", 0, "decision"), 1, r"cells\[0\].decision is 1"),
        (("cells", 0, "group"), ["a"], r"cells\[0\].group must list names or nulls, 2 in"),
        (("cells", 0, "group"), ["a", 3], r"cells\[0\].group must list names or nulls, 2 in"),
        (("cells", 0), 7, r"cells\[0\] must be an object"),
        (("cells", 0, "scores"), None, r"cells\[0\].scores is missing"),
        (("cells", 0, "scores", "1", "sum"), 7, r"sum is 7: the rows add up to 0.9 to 0.91"),
        (("cells", 0, "scores", "1", "sum"), "x", r"sum is 'x'"),
        (("cells", 0, "scores", "1", "histogram"), [0.5, 0.5], "must hold whole numbers"),
        (("cells", 0, "scores", "1", "histogram"), [-1, 2], "negative or too large"),
        (("cells", 0, "scores", "1", "histogram"), [1] * 101, "more than 100 bins"),
        (("cells", 0, "scores", "1", "first_bin"), -1, "first_bin is -1"),
        (("cells",), {}, "cells is missing or is not a list"),
        (("classes",), ["1"], "classes: there must be 2 to 50"),
        (("classes",), ["1", "1"], "must be a list of different names"),
        (("classes",), ["no", 1], "must be a list of different names"),
        (("groups",), [], "groups: there must be 1 to 4"),
        (("site",), "", "site is empty"),
        (("site",), None, "site is missing"),
        (("bins",), 1, "bins is 1"),
        (("bins",), 10**9, "bins is 1000000000"),
        (("threshold",), 2, "threshold is 2"),
        (("rows", "counted"), 9, "rows.counted is 9, but the cells add up to 4"),
        (("rows", "label_missing"), None, "rows.label_missing is None"),
        (("privacy", "mechanism"), "magic", "privacy.mechanism is 'magic'"),
        (("privacy",), None, "privacy is missing"),
    ],
)
def test_a_wrong_field_is_named(good, place, value, said):
    found = json.loads(good.read_text())
    change(place, value)(found)
    good.write_text(json.dumps(found))
    with pytest.raises(FedgftError, match=said) as caught:
        read_sums(good)
    assert str(caught.value).startswith(str(good))


@pytest.mark.parametrize(
    "place",
    [
        ("format",),
        ("threshold",),
        ("bins",),
        ("privacy", "mechanism"),
        ("privacy", "epsilon"),
        ("rows", "counted"),
        ("cells", 0, "label"),
        ("cells", 0, "count"),
        ("cells", 0, "scores", "1", "sum"),
    ],
)
def test_a_long_value_makes_no_long_line(good, place):
    found = json.loads(good.read_text())
    found["privacy"]["mechanism"] = "discrete laplace" if "epsilon" in place else "none"
    change(place, ("fedgft-sums-" if place == ("format",) else "") + "x" * 1_000_000)(found)
    good.write_text(json.dumps(found))
    with pytest.raises(FedgftError, match="xxx") as caught:
        read_sums(good)
    assert len(str(caught.value)) < len(str(good)) + 200


def test_a_name_in_a_place_is_cut_too(good):
    found = json.loads(good.read_text().replace('"1"', f'"{"x" * 100_000}"'))
    found["cells"][0]["scores"] = {}
    good.write_text(json.dumps(found))
    with pytest.raises(FedgftError, match="xxx") as caught:
        read_sums(good)
    assert len(str(caught.value)) < len(str(good)) + 200


def test_a_duplicate_cell_is_refused(good):
    found = json.loads(good.read_text())
    found["cells"].append(found["cells"][0])
    good.write_text(json.dumps(found))
    with pytest.raises(FedgftError, match="second cell of this group, label and decision"):
        read_sums(good)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5),
    lambda deep: (
        st.lists(deep, max_size=4) | st.dictionaries(st.text(max_size=8), deep, max_size=4)
    ),
    max_leaves=10,
)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_the_reader_raises_only_fedgft_errors(data):
    """Any field of a good file replaced by anything."""
    rows = [(1, 0.9, "a", "x"), (0, 0.2, "b", "y"), (1, 0.4, None, "x")]
    found = json.loads(measured(rows).to_json())
    place = found
    inside = list(found)
    while True:
        key = data.draw(st.sampled_from(inside))
        child = place[key]
        deeper = isinstance(child, dict | list) and len(child) and data.draw(st.booleans())
        if not deeper:
            break
        place = child
        inside = list(child) if isinstance(child, dict) else list(range(len(child)))
    place[key] = data.draw(JSON)
    try:
        sums = SiteSums.from_json(json.dumps(found), source="file")
    except FedgftError as error:
        assert str(error).startswith("file")
    else:
        assert sums.rows() >= 0


def test_sites_that_do_not_fit_together(tmp_path):
    rows = [(1, 0.9, "a", "x"), (0, 0.2, "b", "y")]
    one = write_sums(measured(rows, "one"), tmp_path / "one.json")
    again = write_sums(measured(rows, "one"), tmp_path / "again.json")
    with pytest.raises(FedgftError, match=r"again.json.*site 'one' is in .*one.json already"):
        gather([one, again])
    other = tmp_path / "other.json"
    label, score, first, second = zip(*rows, strict=True)
    for made, said in (
        (measured(rows, "other", threshold=0.4), "thresholds differ: 0.5 and 0.4"),
        (measured(rows, "other", classes=("1", "0")), "classes differ: '0', '1' and '1', '0'"),
        (
            measure(
                label, None, scores=np.array(score), sensitive_features=list(first), site="other"
            ),
            "group columns differ: 'first', 'second' and 'group'",
        ),
        (
            measure(
                label, label, sensitive_features={"first": first, "second": second}, site="other"
            ),
            "scores differ: with and without",
        ),
    ):
        write_sums(made, other)
        with pytest.raises(FedgftError, match=said) as caught:
            gather([one, other])
        assert "one.json" in str(caught.value) and "other.json" in str(caught.value)


def test_files_folders_and_patterns(tmp_path):
    rows = [(1, 0.9, "a", "x"), (0, 0.2, "b", "y")]
    for name in ("b", "a"):
        write_sums(measured(rows, name), tmp_path / f"{name}.json")
    wanted = [tmp_path / "a.json", tmp_path / "b.json"]
    assert find_site_files([tmp_path]) == wanted == find_site_files([tmp_path / "*.json"])
    with pytest.raises(FedgftError, match="no file matches"):
        find_site_files([tmp_path / "z*.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedgftError, match=r"without \.json files"):
        find_site_files([tmp_path / "empty"])
    with pytest.raises(FedgftError, match="name the files"):
        find_site_files([])
