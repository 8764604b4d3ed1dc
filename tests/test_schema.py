"""Sites agree on a schema without pooling their tables: it equals that of the pooled rows."""

import json

import numpy as np
import polars as pl
import pytest

from fedgft.data.schema import Schema, agree_on_schema, describe_table
from fedgft.data.table import Roles, from_frame
from fedgft.errors import FedgftError


def table(rows=300, seed=0):
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "age": rng.integers(18, 90, rows),
            "pay": [None if u < 0.1 else round(3 + 2 * u, 3) for u in rng.random(rows).tolist()],
            "job": rng.choice(["clerk", "nurse", "smith"], rows),
            "sex": rng.choice(["f", "m"], rows),
            "ok": rng.integers(0, 2, rows),
        }
    )


def said(frame, **more):
    return describe_table(frame, label="ok", group="sex", source="north", **{"min_rows": 1, **more})


def parts(frame):
    return {"a": frame[:120], "b": frame[120:180], "c": frame[180:]}


def test_the_schema_is_that_of_the_pooled_rows() -> None:
    """Encoder, mean and spread: as if one table had been read and standardized."""
    frame = table()
    schema, wrong = agree_on_schema(
        {s: said(f) for s, f in parts(frame).items()}, label="ok", group="sex"
    )
    pooled = from_frame(frame, "pooled", roles=Roles("ok", "sex"))
    assert wrong == {} and schema.encoder.columns == pooled.columns
    assert schema.classes == pooled.classes and schema.groups == pooled.group_names
    raw = pooled.features.astype(np.float64)
    np.testing.assert_allclose(schema.mean, raw.mean(0), rtol=1e-6)
    np.testing.assert_allclose(schema.spread, raw.std(0), rtol=1e-5)
    x, y, a, notes = schema.read(frame, source="all")
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    np.testing.assert_array_equal(y, pooled.labels)
    np.testing.assert_array_equal(a, pooled.groups)
    assert any("missing value" in text for text in notes)


def test_sites_agree_on_the_columns_that_are_not_features() -> None:
    """By the rule for one table; no single site decides."""
    frame = table().with_columns(pl.int_range(300).alias("row"), clinic_id=7 * pl.int_range(300))
    frames = parts(frame)
    how = {"label": "ok", "group": "sex"}
    notes: list[str] = []
    told = {s: said(f) for s, f in frames.items()}
    schema, _ = agree_on_schema(told, **how, warn=notes.append)
    pooled = from_frame(frame, "pooled", roles=Roles("ok", "sex"))
    assert schema.encoder.columns == pooled.columns
    assert pooled.columns == ("age", "pay", "pay=(missing)", "job=nurse", "job=smith")
    assert any("'clinic_id' is not a feature" in n and "at 3 of 3 sites" in n for n in notes)
    assert schema.group == ("sex",)
    more, _ = agree_on_schema(told, **how, keep_group=True, keep=["clinic_id"])
    assert more.encoder.columns == (*pooled.columns, "sex=m", "clinic_id")

    told = {s: said(f) for s, f in parts(table()).items()}
    told["a"]["columns"]["age"]["identifier"] = True
    assert agree_on_schema(told, **how)[0].encoder.columns == pooled.columns
    # what 0.1.0 wrote has no such key, and "yes" is none
    told = {s: json.loads(json.dumps(said(f)).replace("true", '"yes"')) for s, f in frames.items()}
    assert "row" in agree_on_schema(told, **how)[0].encoder.columns


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_column_that_names_the_site_is_not_a_feature(names) -> None:
    frames = {s: parts(table())[s].with_columns(bank=pl.lit(s)) for s in names}
    notes: list[str] = []
    how = {"label": "ok", "group": "sex"}
    told = {s: said(f) for s, f in frames.items()}
    schema, _ = agree_on_schema(told, **how, warn=notes.append)
    assert not any(column.startswith("bank") for column in schema.encoder.columns)
    assert "column 'bank' is not a feature: it has one value at each site" in notes
    told["a"]["columns"]["bank"]["levels"] = {names[1]: told["a"]["rows"]}
    kept, _ = agree_on_schema(told, **how)
    assert [f.name for f in kept.encoder.fields] == [
        *(f.name for f in schema.encoder.fields),
        "bank",
    ]


def test_sites_agree_on_codes_missing_values_and_indicators() -> None:
    """As for one table (`Roles`); a site's own missing numbers make no feature."""
    frame = table().with_columns(
        zip=pl.Series(np.random.default_rng(3).choice([10, 20, 30], 300)),
        job=pl.when(pl.int_range(300) % 4 == 0).then(pl.lit("?")).otherwise("job"),
        pay=pl.col("pay").cast(pl.String).fill_null("?"),
    )
    more = {"categorical": ["zip"], "missing": ["?"]}
    told = {s: said(f, **more) for s, f in parts(frame).items()}
    schema, wrong = agree_on_schema(told, label="ok", group="sex", missing=["?"])
    roles = Roles("ok", "sex", categorical=("zip",), missing=("?",))
    pooled = from_frame(frame, "pooled", roles=roles)
    assert wrong == {} and set(schema.encoder.columns) >= {"zip=20", "zip=30", "pay=(missing)"}
    x, _, _, notes = schema.read(frame, source="all")
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    at = [schema.encoder.columns.index(n) for n in ("age", "pay", "pay=(missing)", "zip=30")]
    same = [pooled.columns.index(schema.encoder.columns[i]) for i in at]
    found = x[:, at] * schema.spread[at] + schema.mean[at]
    np.testing.assert_allclose(found, pooled.features[:, same], atol=1e-4)
    assert not any("not among" in note for note in notes)
    assert Schema.from_json(schema.to_json()).to_json() == schema.to_json()

    alone = parts(table().with_columns(age=pl.col("age").cast(pl.Float64), pay=1.0))
    alone["b"] = alone["b"].with_columns(age=pl.when(pl.int_range(60) > 30).then(pl.col("age")))
    told = {s: said(f) for s, f in alone.items()}
    assert "age=(missing)" not in agree_on_schema(told, label="ok", group="sex")[0].encoder.columns


def test_seconds_since_1970_vary_at_every_site() -> None:
    """An hour beside fifty years, and a constant beside it; float32 rounds times by a minute."""
    rng = np.random.default_rng(0)
    frame = table().with_columns(
        pl.Series("age", 1.7e9 + 3000 * rng.normal(size=table().height)), pay=pl.lit(1.7e9 + 0.1)
    )
    schema, _ = agree_on_schema(
        {s: said(f) for s, f in parts(frame).items()}, label="ok", group="sex"
    )
    x, *_ = schema.read(frame, source="all")
    at = [schema.encoder.columns.index(name) for name in ("age", "pay")]
    np.testing.assert_allclose(x[:, at[0]].std(), 1, rtol=1e-9)
    assert schema.spread[at[1]] == 1 and (x[:, at[1]] == 0).all()


def test_a_description_survives_serialization() -> None:
    schema, _ = agree_on_schema({"a": said(table())}, label="ok", group="sex")
    again = Schema.from_json(schema.to_json())
    assert again.to_json() == schema.to_json()
    held = json.loads(schema.to_json())
    for change in ({"format": "x"}, {"mean": [1.0]}, {"encoder": 3}, {"spread": [0.0] * 5}):
        with pytest.raises(FedgftError, match="schema"):
            Schema.from_json(json.dumps(held | change))
    for text in ("", "{}", "[]", "null"):
        with pytest.raises(FedgftError, match="schema"):
            Schema.from_json(text)


def test_a_description_holds_sums_and_frequent_names_only() -> None:
    frame = table().with_columns(
        job=pl.when(pl.int_range(pl.len()) < 4).then(pl.lit("spy")).otherwise(pl.col("job"))
    )
    found = said(frame, min_rows=10)
    assert "spy" not in json.dumps(found)
    assert set(found["columns"]["job"]["levels"]) == {"clerk", "nurse", "smith"}
    assert set(found["columns"]["age"]) == {"kind", "count", "sum", "around"}


ODD = {
    "a column less": (lambda f: f.drop("age"), "no column 'age'"),
    "another name": (lambda f: f.rename({"age": "Age"}), "did you mean 'Age'"),
    "text for numbers": (lambda f: f.with_columns(age=pl.lit("old")), "'age' holds text"),
    "other labels": (lambda f: f.with_columns(ok=pl.lit("yes")), "its labels are yes"),
    "other groups": (lambda f: f.with_columns(sex=pl.lit("women")), "its groups are women"),
}


@pytest.mark.parametrize("kind", ODD)
def test_the_odd_site_is_named_and_the_others_go_on(kind: str) -> None:
    change, says = ODD[kind]
    frames = parts(table())
    good, _ = agree_on_schema(
        {s: said(f) for s, f in frames.items() if s != "b"}, label="ok", group="sex"
    )
    frames["b"] = change(frames["b"])
    schema, wrong = agree_on_schema(
        {s: said(f) for s, f in frames.items()}, label="ok", group="sex"
    )
    assert list(wrong) == ["b"] and says in wrong["b"]
    assert schema.to_json() == good.to_json()
    with pytest.raises(FedgftError):
        schema.read(frames["b"], source="b")


def test_a_group_may_live_at_one_site_only() -> None:
    frames = parts(table())
    frames["b"] = frames["b"].with_columns(sex=pl.lit("f"))
    frames["c"] = frames["c"].with_columns(
        sex=pl.when(pl.int_range(pl.len()) < 30).then(pl.lit("x")).otherwise(pl.col("sex"))
    )
    told = {s: said(f) for s, f in frames.items()}
    groups = ("f", "m", "x")
    schema, wrong = agree_on_schema(told, label="ok", group="sex", groups=groups)
    assert wrong == {} and schema.groups == groups
    assert schema.read(frames["c"], source="c")[2][:30].tolist() == [2] * 30


def test_what_one_site_alone_names_is_left_out_and_told() -> None:
    """An invented group has no rows, and no gap could be measured between it and the others."""
    frames = parts(table())
    told = {s: said(f) for s, f in frames.items()}
    good, _ = agree_on_schema(told, label="ok", group="sex")
    told["b"]["groups"] = [*told["b"]["groups"], "martian"]
    levels = told["b"]["columns"]["job"]["levels"]
    levels |= {"spy": 1, "poet": 2, "clerk": levels["clerk"] - 3}
    notes: list[str] = []
    schema, wrong = agree_on_schema(told, label="ok", group="sex", warn=notes.append)
    assert wrong == {} and schema.encoder.columns == good.encoder.columns
    assert schema.groups == good.groups
    assert "group 'martian' is named by site 'b' alone" in notes[0]
    assert "site 'b' alone names 2 levels of column 'job', such as 'poet'" in notes[1]
    told["b"]["labels"] = [*told["b"]["labels"], "maybe"]
    assert "its labels are" in agree_on_schema(told, label="ok", group="sex")[1]["b"]
    two = {s: d for s, d in told.items() if s != "c"}  # of two, neither is the odd one
    assert agree_on_schema(two, label="ok", group="sex")[0].groups == ("f", "m", "martian")


def test_a_column_that_every_site_fills_with_its_own_values() -> None:
    odd = pl.when(pl.int_range(pl.len()) < 20)
    frames = {
        s: f.with_columns(site=odd.then(pl.lit(s)).otherwise(pl.lit(f"{s}2")))
        for s, f in parts(table()).items()
    }
    notes: list[str] = []
    told = {s: said(f) for s, f in frames.items()}
    schema, wrong = agree_on_schema(told, label="ok", group="sex", warn=notes.append)
    assert wrong == {} and not any("site" in name for name in schema.encoder.columns)
    assert "column 'site' is left out: no two sites name the same level" in notes[-1]


def test_numbers_of_another_magnitude_are_left_out() -> None:
    told = {s: said(f) for s, f in parts(table()).items()}
    good, _ = agree_on_schema({s: d for s, d in told.items() if s != "b"}, label="ok", group="sex")
    rows = told["b"]["rows"]
    told["b"]["columns"]["age"] |= {"sum": 50_000.0 * rows}
    schema, wrong = agree_on_schema(told, label="ok", group="sex")
    assert "its column 'age' has mean 5e+04" in wrong["b"] and schema.to_json() == good.to_json()
    told["b"]["columns"]["age"] |= {"sum": 50.0 * rows, "around": 1e9 * rows}
    assert (
        "'age' has mean 50 and spread 3.16e+04"
        in agree_on_schema(told, label="ok", group="sex")[1]["b"]
    )


def boastful(factor: float):
    """Site c claims that it has so many times the rows, aged 20 more than the others'."""
    told = {s: said(f) for s, f in parts(table()).items()}
    age = told["c"]["columns"]["age"]
    rows = told["c"]["rows"]
    told["c"]["rows"] = int(rows * factor)
    mean = age["sum"] / age["count"] + 20
    told["c"]["columns"]["age"] = age | {
        "count": int(rows * factor),
        "sum": mean * int(rows * factor),
        "around": age["around"] * factor,
    }
    return told


@pytest.mark.parametrize("scaling", ["pooled", "median"])
def test_no_site_decides_the_scaling(scaling: str) -> None:
    frame = table()
    honest = frame["age"].mean()
    for clients in (3, 6):
        told = boastful(1e6)
        for k in range(clients - 3):
            told[f"more-{k}"] = said(table(seed=k + 5))
        schema, wrong = agree_on_schema(told, label="ok", group="sex", scaling=scaling)
        assert wrong == {}
        at = schema.encoder.columns.index("age")
        if scaling == "median" or clients == 6:
            assert abs(schema.mean[at] - honest) < 13
    with pytest.raises(FedgftError, match="scaling 'mode' is not known"):
        agree_on_schema(boastful(1.0), label="ok", group="sex", scaling="mode")


def test_the_median_scaling_is_near_the_pooled_one() -> None:
    frame = table(3000)
    told = {f"s{k}": said(frame[300 * k : 300 * k + 300]) for k in range(10)}
    pooled, _ = agree_on_schema(told, label="ok", group="sex")
    median, _ = agree_on_schema(told, label="ok", group="sex", scaling="median")
    np.testing.assert_allclose(median.mean, pooled.mean, atol=0.15 * pooled.spread.max())
    np.testing.assert_allclose(median.spread, pooled.spread, rtol=0.1)


def test_a_schema_has_a_fingerprint() -> None:
    schema, _ = agree_on_schema({"a": said(table())}, label="ok", group="sex")
    other, _ = agree_on_schema({"a": said(table(seed=1))}, label="ok", group="sex")
    again = Schema.from_json(schema.to_json())
    assert schema.fingerprint() == again.fingerprint() != other.fingerprint()
    assert len(schema.fingerprint()) == 64


def test_named_classes_and_groups_bind() -> None:
    frames = parts(table())
    how = {"label": "ok", "group": "sex"}
    said_all = {s: said(f) for s, f in frames.items()}
    schema, wrong = agree_on_schema(said_all, **how, classes=("1", "0"), groups=("m", "f"))
    assert (schema.classes, schema.groups, wrong) == (("1", "0"), ("m", "f"), {})
    assert agree_on_schema(said_all, **how, positive="0")[0].classes == ("1", "0")
    words = {
        s: said(f.with_columns(ok=pl.col("ok").replace_strict({0: "No", 1: "Yes"})))
        for s, f in frames.items()
    }
    assert agree_on_schema(words, **how, positive="no")[0].classes == ("Yes", "No")
    with pytest.raises(FedgftError, match="'ok' holds '0' and '1', no '7'"):
        agree_on_schema(said_all, **how, positive="7")
    with pytest.raises(FedgftError, match="two of each"):
        agree_on_schema({"a": said(frames["a"].with_columns(sex=pl.lit("f")))}, **how)


def test_intersections_and_missing_groups() -> None:
    frame = table().with_columns(
        sex=pl.when(pl.int_range(pl.len()) < 20).then(None).otherwise(pl.col("sex"))
    )
    found = describe_table(frame, label="ok", group="sex,job", min_rows=1, source="north")
    schema, _ = agree_on_schema({"a": found}, label="ok", group="sex,job")
    assert "f & clerk" in schema.groups and len(schema.groups) == 6
    _, _, a, _ = schema.read(frame, source="north")
    assert (a[:20] == -1).all() and (a[20:] >= 0).all()


def test_mistakes_at_a_site_are_named() -> None:
    with pytest.raises(FedgftError, match="no column 'okay'"):
        describe_table(table(), label="okay", group="sex", source="north")
    with pytest.raises(FedgftError, match="no column 'gender'"):
        describe_table(table(), label="ok", group="gender", source="north")
    holes = table().with_columns(ok=pl.when(pl.int_range(pl.len()) < 2).then(None).otherwise("ok"))
    with pytest.raises(FedgftError, match="lacks 2"):
        said(holes)
    with pytest.raises(FedgftError, match="left to learn"):
        describe_table(
            table().select("ok", "sex"), label="ok", group="sex", leave_out=["sex"], source="n"
        )


def test_a_column_more_is_not_read() -> None:
    frames = parts(table())
    good, _ = agree_on_schema({s: said(f) for s, f in frames.items()}, label="ok", group="sex")
    frames["b"] = frames["b"].with_columns(iq=pl.lit(100))
    schema, wrong = agree_on_schema(
        {s: said(f) for s, f in frames.items()}, label="ok", group="sex"
    )
    assert wrong == {} and schema.to_json() == good.to_json()
    assert schema.read(frames["b"], source="b")[0].shape[1] == len(schema.mean)


DAMAGED = [
    None,
    [],
    "text",
    {},
    {"rows": "x"},
    {"rows": -3},
    {"rows": 10**15},
    {"columns": {"age": {"kind": "numbers", "count": 5, "sum": float("nan"), "around": 1.0}}},
    {"columns": {"age": {"kind": "numbers", "count": 5, "sum": 1e300, "around": 1.0}}},
    {"columns": {"age": {"kind": "numbers", "count": 10**6, "sum": 1.0, "around": 1.0}}},
    {"columns": {"job": {"kind": "text", "levels": {"a": -4}}}},
    {"columns": {"job": {"kind": "text", "levels": {"a": 10**9}}}},
    {"columns": {"job": {"kind": "text", "levels": {f"l{i}": 1 for i in range(1001)}}}},
    {"groups": [f"g{i}" for i in range(201)]},
    {"rows": 10**11},
    {"columns": {"job": {"kind": "music"}}},
    {"columns": 3},
    {"labels": [1, 2]},
    {"groups": None},
]


@pytest.mark.parametrize("change", DAMAGED)
def test_a_damaged_description_is_ignored(change) -> None:
    frames = parts(table())
    told = {s: said(f) for s, f in frames.items()}
    good, _ = agree_on_schema({s: d for s, d in told.items() if s != "b"}, label="ok", group="sex")
    told["b"] = told["b"] | change if isinstance(change, dict) and change else change
    schema, wrong = agree_on_schema(told, label="ok", group="sex")
    assert list(wrong) == ["b"] and "damaged" in wrong["b"]
    assert schema.to_json() == good.to_json()


def test_if_no_site_fits_the_error_gives_the_reasons() -> None:
    told = {s: said(f) for s, f in parts(table()).items()}
    for how in ({"classes": ("yes", "no")}, {"groups": ("x", "y")}):
        with pytest.raises(FedgftError, match=r"a: its (labels|groups) are"):
            agree_on_schema(told, label="ok", group="sex", **how)


def test_descriptions_omit_values_with_few_rows() -> None:
    """Neither a rare group, nor a sum of few numbers, nor a table of people's names."""
    frame = table().with_columns(
        sex=pl.when(pl.int_range(pl.len()) < 3).then(pl.lit("x")).otherwise(pl.col("sex")),
        pay=pl.when(pl.int_range(pl.len()) < 2).then(7.0).otherwise(None),
    )
    found = said(frame, min_rows=10)
    assert found["groups"] == ["f", "m"]
    assert found["columns"]["pay"] == {"kind": "numbers", "count": 0, "sum": 0.0, "around": 0.0}
    with pytest.raises(FedgftError, match="no label or group of people"):
        describe_table(
            frame.with_columns(sex=pl.int_range(pl.len())), label="ok", group="sex", source="n"
        )
    with pytest.raises(FedgftError, match="too few"):
        said(frame[:5], min_rows=10)
    schema, _ = agree_on_schema({"a": found}, label="ok", group="sex")
    _, _, groups, notes = schema.read(frame, source="a")
    assert (groups[:3] == -1).all() and any("counted as not recorded" in text for text in notes)


def test_labels_and_groups_are_those_of_sites_that_hang_together() -> None:
    frames = parts(table())
    frames["a"] = frames["a"].filter(pl.col("ok") == 0)
    frames["b"] = frames["b"].filter(pl.col("ok") == 0)
    schema, wrong = agree_on_schema(
        {s: said(f) for s, f in frames.items()}, label="ok", group="sex"
    )
    assert schema.classes == ("0", "1") and wrong == {}


def test_an_empty_column_fits_everywhere() -> None:
    frames = parts(table())
    frames["b"] = frames["b"].with_columns(pay=pl.lit(None), job=pl.lit(None))
    schema, wrong = agree_on_schema(
        {s: said(f) for s, f in frames.items()}, label="ok", group="sex"
    )
    assert wrong == {}
    x, *_ = schema.read(frames["b"], source="b")
    assert np.isfinite(x).all()
    every = {s: said(f.with_columns(pay=pl.lit(None))) for s, f in frames.items()}
    schema, wrong = agree_on_schema(every, label="ok", group="sex")
    assert wrong == {} and "pay" not in schema.encoder.columns


def test_rows_without_a_label_are_not_read() -> None:
    frame = table()
    schema, _ = agree_on_schema({"a": said(frame)}, label="ok", group="sex")
    late = pl.int_range(pl.len()) >= 5
    holes = frame.with_columns(ok=pl.when(late).then(pl.col("ok")))
    with pytest.raises(FedgftError, match=r"lacks 5 values: take those rows out"):
        schema.read(holes, source="a")
    with pytest.raises(FedgftError, match="both the label and the group"):
        describe_table(frame, label="ok", group="sex,ok", source="a")
