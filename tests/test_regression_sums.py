"""The sums of a numeric outcome: digits, addition, files, and what small groups reveal."""

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgft.auditing import (
    RegressionSums,
    audit,
    audit_regression,
    measure,
    measure_regression,
    measure_regression_file,
    measure_regression_sites,
    read_regression_sums,
    read_sums,
)
from fedgft.errors import FedgftError
from fedgft.site_sums.moments import QUANTITIES

VALUES = st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda x: round(x, 3))
ROWS = st.lists(
    st.tuples(VALUES, VALUES, st.sampled_from("abc"), st.sampled_from("xy"), st.floats(0.1, 9)),
    min_size=1,
    max_size=60,
)


def measure_rows(rows: list, *, weighted: bool = False, **more: Any) -> RegressionSums:
    y, p, a, b, w = map(list, zip(*rows, strict=True))
    more = {"site": "north", "min_cell": 0, **more}
    if weighted:
        more["sample_weight"] = w
    return measure_regression(y, p, sensitive_features={"a": a, "b": b}, **more)


def sums_by_loop(rows: list, *, weighted: bool) -> dict[Any, list]:
    """Exact sums by group: rows, w, w^2, and of each z: w z, w z^2, w^2 z, w^2 z^2."""
    out: dict[Any, list] = {}
    for y, p, a, b, weight in rows:
        w = Fraction(weight) if weighted else Fraction(1)
        r = Fraction(y) - Fraction(p)
        z = (Fraction(p), Fraction(y), r, abs(r), r * r)
        terms = [Fraction(1), w, w * w]
        terms += [each for x in z for each in (w * x, w * x * x, w * w * x, w * w * x * x)]
        known = out.get((a, b), [Fraction(0)] * len(terms))
        out[a, b] = [one + more for one, more in zip(known, terms, strict=True)]
    return out


def assert_close(value: float, exact: Fraction, scale: Fraction) -> None:
    """Compare with an exact number; `scale` is the size of what was added up."""
    assert abs(value - float(exact)) <= 1e-9 * float(scale) + 1e-12


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, weighted=st.booleans())
def test_sums_equal_those_of_a_loop_in_rational_numbers(rows, weighted):
    site = measure_rows(rows, weighted=weighted).sites["north"]
    exact = sums_by_loop(rows, weighted=weighted)
    assert set(site.cells) == set(exact)
    for group, (n, w, w2, *rest) in exact.items():
        cell = site.cells[group]
        assert cell.rows == n and not site.withheld
        assert_close(cell.weight, w, w)
        assert_close(cell.weight_squares, w2, w2)
        for i in range(len(QUANTITIES)):
            wz, wzz, wwz, wwzz = rest[4 * i : 4 * i + 4]
            mean = wz / w
            assert_close(cell.mean[i], mean, abs(mean) + 1)
            assert_close(cell.squares[i], wzz - w * mean**2, wzz + 1)
            assert_close(cell.tilt[i], wwz - w2 * mean, wwzz + w2 + 1)
            spread = wwzz - 2 * mean * wwz + mean**2 * w2
            assert_close(cell.spread[i], spread, wwzz + w2 + 1)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, cut=st.integers(0, 60), weighted=st.booleans())
def test_sums_of_parts_add_up(rows, cut, weighted):
    whole = measure_rows(rows, weighted=weighted)
    parts = [part for part in (rows[:cut], rows[cut:]) if part]
    first, *others = (measure_rows(part, weighted=weighted) for part in parts)
    for total in (sum(others, start=first), sum([*others[::-1], first])):
        assert total.rows() == whole.rows() == len(rows)
        for group, cell in whole.sites["north"].cells.items():
            other = total.sites["north"].cells[group]
            for name in ("weight", "weight_squares", "mean", "squares", "tilt", "spread"):
                one, two = np.atleast_1d(getattr(cell, name)), np.atleast_1d(getattr(other, name))
                scale = 1 + abs(cell.spread) + cell.weight_squares * cell.mean**2
                assert (abs(one - two) <= 1e-9 * scale).all(), name


@pytest.mark.parametrize("weighted", [False, True])
def test_variances_of_large_values_keep_their_digits(weighted):
    """With a mean of 1e8 and a deviation of 1, sums of squares as such have no digit of it."""
    generator = np.random.default_rng(0)
    y = 1e8 + generator.normal(size=600_000)
    p = y + generator.normal(size=len(y))
    w = generator.uniform(0.5, 2, len(y)) if weighted else np.ones(len(y))
    naive = (y**2).mean() - y.mean() ** 2
    assert abs(naive / y.var() - 1) > 1e-3  # the problem is real
    parts = [
        measure_regression(
            y[i::7], p[i::7], sensitive_features=["f"] * len(y[i::7]),
            sample_weight=w[i::7] if weighted else None, site="north",
        )
        for i in range(7)
    ]  # fmt: skip
    cell = sum(parts).sites["north"].cells[("f",)]
    center = np.average(y - 1e8, weights=w)
    expected = np.average((y - 1e8 - center) ** 2, weights=w)
    assert cell.squares[1] / cell.weight == pytest.approx(expected, rel=1e-9)
    assert cell.mean[1] - 1e8 == pytest.approx(center, abs=3e-8)
    residual = y - p
    assert cell.mean[4] == pytest.approx(np.average(residual**2, weights=w), rel=1e-12)


def test_a_file_of_batches_has_the_sums_of_its_rows(tmp_path, monkeypatch):
    """CSV and Parquet, in several batches, equal the rows in memory."""
    monkeypatch.setattr("fedgft.auditing.measurement.BATCH_ROWS", 64)
    generator = np.random.default_rng(1)
    frame = pl.DataFrame(
        {
            "pay": generator.lognormal(10, 0.5, 500).round(2),
            "p": generator.lognormal(10, 0.4, 500).round(2),
            "sex": generator.choice(["f", "m", None], 500),
            "bank": generator.choice(["a", "b"], 500),
        }
    )
    frame.write_csv(tmp_path / "north.csv", separator=";")
    frame.write_parquet(tmp_path / "north.parquet")
    expected = measure_regression(
        frame["pay"], frame["p"], sensitive_features=frame["sex"], site="north"
    )
    task = {"target": "pay", "prediction": "p", "group": "sex"}
    for name in ("north.csv", "north.parquet"):
        found = measure_regression_file(tmp_path / name, **task)
        for group, cell in expected.sites["north"].cells.items():
            other = found.sites["north"].cells[group]
            assert other.mean == pytest.approx(cell.mean, rel=1e-12)
            assert other.squares == pytest.approx(cell.squares, rel=1e-10)
    sites = measure_regression_sites(tmp_path / "north.csv", site_column="bank", **task)
    assert [list(site.sites) for site in sites] == [["a"], ["b"]]
    assert sum(site.rows() for site in sites) == 500
    assert sites[0].spec.target == "pay" and sites[0].spec.prediction == "p"


# Files


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, weighted=st.booleans(), clipped=st.booleans())
def test_files_round_trip(rows, weighted, clipped):
    clip = (-1000.0, 1e5) if clipped else None
    sums = measure_rows(rows * 5, weighted=weighted, clip=clip, min_cell=5)
    text = sums.to_json()
    again = RegressionSums.from_json(text)
    assert again.to_json() == text and again.spec == sums.spec
    assert again.sites["north"].withheld == sums.sites["north"].withheld
    for group, cell in sums.sites["north"].cells.items():
        for name in ("mean", "squares", "tilt", "spread"):
            assert (getattr(again.sites["north"].cells[group], name) == getattr(cell, name)).all()


def make_record(*, weighted: bool = False, clip: Any = None) -> dict[str, Any]:
    generator = np.random.default_rng(3)
    y = generator.normal(100, 10, 200)
    sums = measure_regression(
        y,
        y + generator.normal(0, 3, 200),
        sensitive_features=["f", "m"] * 100,
        sample_weight=generator.uniform(1, 3, 200) if weighted else None,
        clip=clip,
        site="north",
    )
    return json.loads(sums.to_json())


def set_at(record: Any, path: str, value: Any) -> None:
    *steps, last = path.split(".")
    for step in steps:
        record = record[int(step) if step.isdigit() else step]
    record[int(last) if last.isdigit() else last] = value


MALFORMED = {
    "site": ["", 3, None],
    "groups": [[], "sex", ["sex", "sex"], [1]],
    "target": [3, None],
    "clip": [[1], [2, 1], ["a", "b"], [0, 1e99], [True, 2]],
    "clipped": [None, {"target": -1, "prediction": 0}, {"target": 20, "prediction": 0}],
    "min_cell": [0, 4, None, 2.5, 101],
    "rows.counted": [199, None, 1e300],
    "rows.target_missing": [-1, 3, 2.5],
    "cells": [None, {}, [3]],
    "cells.0.group": [["m"], [], "f", [3], ["f", "g"]],
    "cells.0.rows": [99, 4, -5, 2.5, True, 2**60],
    "cells.0.target": [None, [], {"mean": 1}],
    "cells.0.target.mean": [None, "1", True, math.inf, 1e301, 10**400, 0.0, 1e61],
    "cells.0.target.squares": [-1, None, 1e300, 0.0],
    "cells.0.residual.mean": [5.0],
    "cells.0.residual.squares": [1e9, 0.0],
    "cells.0.absolute_residual.mean": [-1.0, 0.0, 50.0],
    "cells.0.absolute_residual.squares": [1e9, 0.0],
    "cells.0.squared_residual.mean": [-1.0, 0.0, 1e4],
    "cells.0.squared_residual.squares": [-1.0, 1e9],
}
WEIGHTED = {
    "weight": [""],  # then the numbers are those of weights, and the names are not
    "cells.0.weight": [0, -1, None, 1e300, 1.0],
    "cells.0.weight_squares": [0, 1e9, None, 1.0],
    "cells.0.target.tilt": [1e9, None, -1e9],
    "cells.0.target.spread": [-1.0, 1e12, None],
}


@pytest.mark.parametrize("weighted", [False, True])
def test_malformed_files_are_refused_in_one_line(weighted):
    cases = WEIGHTED if weighted else MALFORMED
    for path, values in cases.items():
        for value in values:
            record = make_record(weighted=weighted)
            set_at(record, path, value)
            text = json.dumps(record)
            with pytest.raises(FedgftError) as caught:
                RegressionSums.from_json(text, source="north.json")
                pytest.fail(f"{path} = {value!r} is accepted")
            assert str(caught.value).startswith("north.json: ") and "\n" not in str(caught.value)


def test_clipped_values_lie_within_the_bounds():
    record = make_record(clip=(50.0, 150.0))
    RegressionSums.from_json(json.dumps(record))
    for bounds in ([99.0, 150.0], [50.0, 101.0], [99.9, 100.5]):
        record["clip"] = bounds
        with pytest.raises(FedgftError):
            RegressionSums.from_json(json.dumps(record))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", '{"format": "fedgft-regression-2"}', '{"format": 1}']
)
def test_other_texts_are_refused(text):
    with pytest.raises(FedgftError) as caught:
        RegressionSums.from_json(text, source="x.json")
    assert caught.value.kind == "file" and "\n" not in str(caught.value)


def test_each_reader_says_that_a_file_is_of_the_other_kind(tmp_path):
    classes = measure([1, 0] * 10, [1, 0] * 10, sensitive_features=["f", "m"] * 10, site="a")
    numbers = measure_regression([1.0] * 20, [2.0] * 20, sensitive_features=["f"] * 20, site="b")
    classes.save(tmp_path / "a.json")
    numbers.save(tmp_path / "b.json")
    for read, name in ((read_regression_sums, "a.json"), (read_sums, "b.json")):
        with pytest.raises(FedgftError) as caught:
            read(tmp_path / name)
        assert caught.value.kind == "conflict" and "\n" not in str(caught.value)
    for run, sums in ((audit, numbers), (audit_regression, classes), (audit, [numbers])):
        with pytest.raises(FedgftError):
            run(sums)
    assert (tmp_path / "b.json").stat().st_mode & 0o077 == 0


# Disclosure


def test_small_groups_are_withheld():
    y = [1.0] * 9 + [2.0] * 30
    sums = measure_regression(y, y, sensitive_features=["f"] * 9 + ["m"] * 30, site="a")
    site = sums.sites["a"]
    assert list(site.cells) == [("m",)] and site.withheld == (("f",),) and site.min_cell == 10
    record = json.loads(sums.to_json())
    assert {"group": ["f"], "rows": None} in record["cells"] and record["rows"]["counted"] == 30
    assert "9" not in json.dumps(record["cells"][0])


@pytest.mark.parametrize("missing", [3, 40])
def test_small_numbers_of_missing_values_are_withheld(missing):
    y = [None] * missing + [1.0] * 50
    p = [1.0] * missing + [2.0] * 50
    sums = measure_regression(y, p, sensitive_features=["f"] * len(y), site="a")
    assert sums.sites["a"].target_missing == (None if missing < 10 else missing)
    again = RegressionSums.from_json(sums.to_json())
    assert again.sites["a"].target_missing == sums.sites["a"].target_missing


def test_sums_of_any_group_cannot_be_written():
    sums = measure_regression([1.0, 2], [1.0, 2], sensitive_features=["f", "m"], min_cell=0)
    with pytest.raises(FedgftError) as caught:
        sums.named("a").to_json()
    assert caught.value.field == "min_cell"
    with pytest.raises(FedgftError) as caught:
        measure_regression([1.0, 2], [1.0, 2], sensitive_features=["f", "m"], min_cell=4)
    assert caught.value.field == "min_cell"


@pytest.mark.parametrize("large", [1e5, 1e9])
def test_a_dominating_value_is_told_and_clipping_removes_it(large):
    """The p% rule, written out: all but the two largest values are less than 10% of the largest."""
    y = [30.0 + i for i in range(40)] + [large]
    p = [35.0 + i for i in range(40)] + [36.0]
    dominated = sum(sorted(y)[:-2]) < 0.1 * max(y)
    sums = measure_regression(y, p, sensitive_features=["f"] * 41, site="a")
    assert any("outcome" in note for note in sums.notes) == dominated == (large > 1e4 * 3)
    assert any("squared error" in note for note in sums.notes)
    clipped = measure_regression(y, p, sensitive_features=["f"] * 41, site="a", clip=(0, 100))
    assert not clipped.notes and clipped.sites["a"].clipped == (None, 0)
    kept = measure_regression(y, p, sensitive_features=["f"] * 41, site="a", clip=(0, 45))
    assert kept.sites["a"].clipped == (sum(v > 45 for v in y), sum(v > 45 for v in p))
    assert kept.sites["a"].cells[("f",)].mean[1] == pytest.approx(np.clip(y, 0, 45).mean())


def test_weights_of_zero_leave_rows_out():
    y, w = [1.0, 5.0] * 20, [1.0, 0.0] * 20
    sums = measure_regression(y, y, sensitive_features=["f"] * 40, sample_weight=w, site="a")
    assert sums.rows() == 20 and sums.sites["a"].cells[("f",)].mean[1] == 1


# Bad input


def write(folder, name: str, text: str):
    path = folder / name
    path.write_text(text)
    return path


BAD = {
    "pay,p,sex\n1,2,f\nabc,2,m\n": "row 2 of column 'pay' holds 'abc'",
    "pay,p,sex\n1,2,f\n1,inf,m\n": "row 2 of column 'p' holds 'inf'",
    "pay,p,sex\n1,2,f\n1,1e99,m\n": "row 2 of column 'p' holds '1e99'",
    'pay,p,sex\n"1,5",2,f\n': "row 1 of column 'pay' holds '1,5'",
    "pay,p,sex\n,2,f\n": "no row has both an outcome and a prediction",
    "pay,p,sex\n": "the file has no rows",
    "pay,q,sex\n1,2,f\n": "no column 'p'",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_tables_are_refused_in_one_line(tmp_path, text):
    path = write(tmp_path, "north.csv", text)
    with pytest.raises(FedgftError) as caught:
        measure_regression_file(path, target="pay", prediction="p", group="sex")
    assert BAD[text] in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_rows_are_numbered_across_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("fedgft.auditing.measurement.BATCH_ROWS", 100)
    path = write(tmp_path, "north.csv", "pay,p,sex\n" + "1,2,f\n" * 777 + "x,2,f\n")
    with pytest.raises(FedgftError, match="row 778 of column 'pay'"):
        measure_regression_file(path, target="pay", prediction="p", group="sex")


@pytest.mark.parametrize("weight", ["-1", "", "nan", "inf", "x", "1e30"])
def test_bad_weights_are_refused(tmp_path, weight):
    path = write(tmp_path, "north.csv", f"pay,p,sex,w\n1,2,f,1\n1,2,f,{weight}\n")
    with pytest.raises(FedgftError, match="row 2 of column 'w'"):
        measure_regression_file(path, target="pay", prediction="p", group="sex", weight="w")


@pytest.mark.parametrize("clip", [(2.0, 1.0), (0.0, math.inf), (1.0, 1.0), (math.nan, 1.0)])
def test_bad_bounds_are_refused(clip):
    with pytest.raises(FedgftError) as caught:
        measure_regression([1.0], [1.0], sensitive_features=["f"], clip=clip)
    assert caught.value.field == "clip"


def test_sites_must_measure_the_same():
    def site(name: str, **more: Any) -> RegressionSums:
        features = more.pop("features", ["f", "m"] * 10)
        y = [1.0, 2.0] * 10
        return measure_regression(y, y, sensitive_features=features, site=name, **more)

    a = site("a")
    others = (
        site("b", clip=(0, 5)),
        site("b", sample_weight=[1.0] * 20),
        site("b", features={"race": ["f", "m"] * 10}),
    )
    for other in others:
        with pytest.raises(FedgftError) as caught:
            a + other
        assert caught.value.kind == "conflict"
    with pytest.raises(FedgftError) as caught:
        audit_regression([a, site("b", features=["F", "M"] * 10)])
    assert caught.value.field == "ignore_case"
    merged = audit_regression([a, site("b", features=["F", "M"] * 10)], ignore_case=True)
    assert list(merged.means["mean-error"]) == ["f", "m"]


def test_dates_and_versions_are_stated_and_must_agree(tmp_path):
    def site(name: str, **more: Any) -> RegressionSums:
        y = [1.0, 2.0] * 10
        sums = measure_regression(y, y, sensitive_features=["f", "m"] * 10, site=name, **more)
        return read_regression_sums(sums.save(tmp_path / f"{name}.json"))

    a = site("a", date="2026-03-31", model_version="2.1")
    found = audit_regression([a, site("b", date="2026-01-31")])
    assert found.about["period"] == "2026-01-31 to 2026-03-31" and found.about["version"] == "2.1"
    for other in (site("b", model_version="3"), None):
        with pytest.raises(FedgftError) as caught:
            audit_regression([a, other] if other else a, about={"version": "3"})
        assert caught.value.kind == "conflict"
    record = make_record()
    for name, value in (("date", "31.3.2026"), ("date", 3), ("model_version", 3)):
        with pytest.raises(FedgftError):
            RegressionSums.from_json(json.dumps(record | {name: value}))


def test_a_mean_absolute_error_is_at_least_the_mean_error():
    """Also where the mean squared error agrees with it."""
    y = [float(i) for i in range(40)]
    p = [v - 5 - i % 3 for i, v in enumerate(y)]
    record = json.loads(measure_regression(y, p, sensitive_features=["f"] * 40, site="a").to_json())
    cell = record["cells"][0]
    part = cell["absolute_residual"]
    part["squares"] += 40 * (part["mean"] ** 2 - 1)
    part["mean"] = 1.0
    with pytest.raises(FedgftError, match="below that of the residual"):
        RegressionSums.from_json(json.dumps(record))
