"""`fedgft measure` on folders, patterns and lists of files, and with a second table."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgft.auditing import measure, measure_file, read_sums
from fedgft.auditing.measurement import measure_sites
from fedgft.auditing.row_counts import find_bins
from fedgft.cli import console, main
from fedgft.data.table_scan import open_table
from fedgft.errors import FedgftError
from fedgft.site_sums import COUNT

ASKED = ("--label", "y", "--group", "g", "--score", "p")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        main(list(arguments))
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out, " ".join(said.err.split())


def make_rows(n: int, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    group = rng.choice(["a", "b", "c"], n)
    return pl.DataFrame(
        {
            "id": rng.permutation(n) + 10,
            "y": rng.integers(0, 2, n),
            "g": pl.Series(group).set(pl.Series(rng.random(n) < 0.05), None),
            "p": rng.random(n),
            "bank": rng.choice(["north", "south"], n),
        }
    )


def write(frame: pl.DataFrame, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    frame.write_csv(file) if file.suffix == ".csv" else frame.write_parquet(file)
    return file


def read_all(path, **options):
    return measure_file(path, **{"label": "y", "group": "g", "score": "p", "site": "x"} | options)


def check_same(one, other) -> None:
    """The tables agree to the last digit of a count, and to rounding in sums of scores."""
    (first,) = one.sites.values()
    (second,) = other.sites.values()
    assert first.tables.keys() == second.tables.keys()
    for group, table in first.tables.items():
        assert np.allclose(table, second.tables[group], rtol=0, atol=1e-9)
        assert np.array_equal(one.histogram[group], other.histogram[group])
    for name in ("label_missing", "prediction_missing"):
        assert getattr(first, name) == getattr(second, name)


def refusal(call, *arguments, **options) -> FedgftError:
    with pytest.raises(FedgftError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return caught.value


# The sums are those of the rows


@given(
    cuts=st.lists(st.integers(0, 200), max_size=6),
    ending=st.sampled_from(["csv", "parquet"]),
    folders=st.lists(st.sampled_from(["", "deep/er", "day=1"]), min_size=7, max_size=7),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_a_folder_has_the_sums_of_its_rows(tmp_path_factory, cuts, ending, folders, seed):
    """However the rows are divided into files; the reference counts the arrays in memory."""
    frame = make_rows(200, seed)
    folder = tmp_path_factory.mktemp("table")
    ends = [0, *sorted(cuts), 200]
    for i, (start, stop) in enumerate(pairwise(ends)):
        write(frame[start:stop], folder / folders[i] / f"{i}.{ending}")
    wanted = measure(
        frame["y"], frame["p"], sensitive_features={"g": frame["g"].to_list()}, site="x"
    )
    check_same(wanted, read_all(folder))
    check_same(wanted, read_all(sorted(folder.rglob(f"*.{ending}"), reverse=True)))
    check_same(wanted, read_all(f"{folder}/**/*.{ending}"))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_folders_state_columns(tmp_path, ending):
    """bank=north is a column, for sites, groups and conditions; the file's own column is first."""
    frame = make_rows(300)
    for (bank,), rows in frame.partition_by("bank", as_dict=True).items():
        write(rows.drop("bank"), tmp_path / "scored" / f"bank={bank}" / f"part-0.{ending}")
    whole = write(frame, tmp_path / f"whole.{ending}")
    asked = {"label": "y", "group": "g", "score": "p"}
    sites = {"site_column": "bank"} | asked
    for one, other in zip(
        measure_sites(whole, **sites), measure_sites(tmp_path / "scored", **sites), strict=True
    ):
        assert one.to_json() == other.to_json()
    check_same(
        read_all(whole, group=["g", "bank"]), read_all(tmp_path / "scored", group=["g", "bank"])
    )
    north = measure_file(tmp_path / "scored" / "bank=north", **asked)
    assert list(north.sites) == ["north"]
    found = read_all(tmp_path / "scored", where="bank = 'north'")
    check_same(read_all(tmp_path / "scored" / "bank=north"), found)
    assert found.rows() == (frame["bank"] == "north").sum()
    own = write(frame.with_columns(bank=pl.lit("own")), tmp_path / "bank=west" / f"x.{ending}")
    (site,) = measure_sites(own, **sites)
    assert list(site.sites) == ["own"]


def test_names_of_folders_are_unquoted_and_may_be_missing(tmp_path):
    frame = make_rows(20).drop("g")
    write(frame, tmp_path / "g=a%2Fb%20c" / "0.parquet")
    write(frame, tmp_path / "g=__HIVE_DEFAULT_PARTITION__" / "0.parquet")
    (tables,) = (site.tables for site in read_all(tmp_path).sites.values())
    assert set(tables) == {("a/b c",), (None,)}
    write(frame, tmp_path / "g=x" / "g=y" / "0.parquet")
    assert "two of its folders state the column 'g'" in str(refusal(read_all, tmp_path))


def test_kinds_of_numbers_and_texts_may_differ_between_files(tmp_path):
    frame = make_rows(90)
    types = [(pl.Int8, pl.Enum("cab")), (pl.Float64, pl.Categorical), (pl.Int64, pl.Enum("abc"))]
    for i, (number, text) in enumerate(types):
        part = frame[30 * i : 30 * i + 30]
        write(
            part.with_columns(pl.col("y").cast(number), pl.col("g").cast(text)),
            tmp_path / f"{i}.parquet",
        )
    write(frame.head(0).cast(pl.Null), tmp_path / "3.parquet")
    whole = measure(frame["y"], frame["p"], sensitive_features={"g": frame["g"].to_list()})
    check_same(whole, read_all(tmp_path))


def test_names_without_rows_are_skipped(tmp_path):
    write(make_rows(30), tmp_path / "0.parquet")
    for name in (
        "_SUCCESS",
        "_metadata",
        ".0.parquet.crc",
        "_old/1.parquet",
        ".tmp/2.parquet",
        "README.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"nothing")
    assert read_all(tmp_path).rows() == 30


@pytest.mark.parametrize("bins", [2, 3, 7, 20, 49, 100, 333, 1000])
def test_bins_are_exact_at_their_edges(bins):
    """The smallest score of each bin, its neighbors in floating point, and random scores."""
    edges = np.arange(bins + 1) / bins
    near = [np.nextafter(edges, 0), edges, np.nextafter(edges, 1)]
    scores = np.concatenate([*near, np.random.default_rng(bins).random(2000)])
    wanted = np.searchsorted(edges[1:-1], scores, side="right")
    assert find_bins(pl.Series(scores), bins).to_list() == wanted.tolist()
    assert len(find_bins(pl.Series([None, 0.5]), bins)) == 2


def test_a_group_without_counted_rows_is_a_group(tmp_path):
    table = write(
        pl.DataFrame({"y": [1, 0, None], "g": ["a", "a", "b"], "p": 0.5}), tmp_path / "t.csv"
    )
    assert set(read_all(table).sites["x"].tables) == {("a",), ("b",)}


# The command


def test_a_folder_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = make_rows(400)
    write(frame, Path("whole.parquet"))
    for i in range(4):
        write(frame[100 * i : 100 * i + 100], Path(f"scored/part-{i}.parquet"))
    code, _, err = run(capsys, "measure", "scored", *ASKED, "--report", "report")
    assert code == 0 and "scored: 4 files" in err and "scored: 400 rows" in err
    assert (
        read_sums("scored.json").sites.keys() == {"scored"} and Path("report/report.html").exists()
    )
    run(capsys, "measure", "whole.parquet", *ASKED)
    check_same(read_sums("whole.json"), read_sums("scored.json"))
    named = ("--name", "whole", "--json")
    alone = run(capsys, "measure", "whole.parquet", *ASKED, "--json")[1]
    assert run(capsys, "measure", "scored/part-*.parquet", *ASKED, *named)[1] == alone
    parts = [f"scored/part-{i}.parquet" for i in range(4)]
    assert run(capsys, "measure", *parts, *ASKED, *named)[1] == alone
    code, _, err = run(capsys, "measure", *parts, *ASKED)
    assert code == 2 and "--name is missing" in err
    code, _, err = run(capsys, "measure", "scored/*", "--site", "bank", "-o", "sites", *ASKED)
    assert code == 0 and sorted(os.listdir("sites")) == ["north.json", "south.json"]
    monkeypatch.chdir("scored")
    code, out, _ = run(capsys, "measure", ".", *ASKED, "--json")
    assert code == 0 and '"site": "scored"' in out


@pytest.mark.parametrize(("ending", "error"), [("csv", 0.05), ("parquet", 0)])
def test_the_bar_knows_the_number_of_rows(tmp_path, capsys, monkeypatch, ending, error):
    for i in range(3):
        write(make_rows(1000 + i), tmp_path / "t" / f"{i}.{ending}")
    rows = 3003
    assert abs(open_table(tmp_path / "t").estimate_rows() - rows) <= error * rows
    assert open_table(tmp_path / "t", where="y = '1'").estimate_rows() is None
    seen = []
    monkeypatch.setattr(console.Bar, "rows", lambda bar, done, total: seen.append((done, total)))
    monkeypatch.setattr("fedgft.auditing.measurement.BATCH_ROWS", 500)
    assert run(capsys, "measure", str(tmp_path / "t"), *ASKED, "--json")[0] == 0
    assert len(seen) > 3 and seen[-1][0] == rows
    assert {total for _, total in seen} == {open_table(tmp_path / "t").estimate_rows()}


def test_the_bar_grows_if_there_are_more_rows_than_estimated():
    from rich.progress import Progress

    bar = console.Bar(Progress(disable=True))
    for done, total in ((5, 10), (12, 10)):
        bar.rows(done, total)
        (task,) = bar.progress.tasks
        assert (task.completed, task.total) == (done, max(done, total))


# A second table


@pytest.mark.parametrize(
    "kind", ["csv", "parquet", "text key", "small key", "large key", "folder", "two keys"]
)
def test_groups_of_a_second_table(tmp_path, kind):
    """As if the columns were in one table; keys of other types are the same keys."""
    frame = make_rows(500)
    whole = measure(
        frame["y"],
        frame["p"],
        sensitive_features={
            "g": [g if i < 400 else None for g, i in frame.select("g", "id").rows()]
        },
    )
    other = (
        frame.select("id", "g", unused="p").filter(pl.col("id") < 400).sample(fraction=1, seed=1)
    )
    other = pl.concat(
        [other, pl.DataFrame({"id": [9999], "g": ["z"], "unused": [0.5]}, schema=other.schema)]
    )
    scored = write(frame.drop("g"), tmp_path / f"scored.{'csv' if kind == 'csv' else 'parquet'}")
    key = ["id"]
    if kind == "text key":
        other = other.with_columns(pl.col("id").cast(pl.String))
    elif kind == "small key":
        other = other.with_columns(pl.col("id").cast(pl.Int32))
    elif kind == "large key":  # one of them does not fit the type of the other table
        scored = write(frame.drop("g").cast({"id": pl.Int16}), scored)
        other = other.with_columns(pl.col("id").replace(9999, 2**40 + 10))
    elif kind == "two keys":
        other = other.join(frame.select("id", "bank"), on="id", how="left")
        key = ["id", "bank"]
    join = tmp_path / "groups.parquet"
    if kind == "folder":
        join = tmp_path / "groups"
        write(other[:100], join / "1.csv")
        write(other[100:], join / "2.csv")
    else:
        write(other, join)
    found = read_all(scored, join=join, key=key)
    assert found.rows() == 500
    check_same(whole, found)
    fewer = read_all(scored, join=join, key=key, where="g = 'a' AND bank = 'north'")
    wanted = frame.filter((pl.col("id") < 400) & (pl.col("g") == "a") & (pl.col("bank") == "north"))
    assert fewer.rows() == wanted.height > 0


def test_rows_without_a_key_have_no_group(tmp_path):
    scored = make_rows(100).with_columns(id=pl.when(pl.col("id") > 50).then("id")).drop("g")
    write(scored, tmp_path / "s.parquet")
    write(pl.DataFrame({"id": [None, 60, None], "g": ["n", "m", "n"]}), tmp_path / "g.parquet")
    found = read_all(tmp_path / "s.parquet", join=tmp_path / "g.parquet", key="id")
    tables = found.sites["x"].tables
    assert tables["m",][..., COUNT].sum() == 1 and tables[None,][..., COUNT].sum() == 99


def test_a_second_table_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = make_rows(100)
    write(frame.drop("g"), Path("preds.parquet"))
    write(frame.select("id", "g"), Path("groups.csv"))
    join = ("--join", "groups.csv", "--key", "id")
    write(frame, Path("whole.parquet"))
    named = ("--name", "x", "--json")
    wanted = run(capsys, "measure", "whole.parquet", *ASKED, *named)[1]
    assert run(capsys, "measure", "preds.parquet", *ASKED, *join, *named)[1] == wanted
    code, _, err = run(capsys, "measure", "preds.parquet", *ASKED, "--join", "groups.csv")
    assert code == 2 and "--join needs --key" in err
    code, _, err = run(capsys, "measure", "preds.parquet", *ASKED, "--key", "id")
    assert code == 2 and "--key needs --join" in err
    code, _, err = run(capsys, "measure", "preds.parquet", "--label", "y", "--score", "p", *join)
    assert code == 2 and "(columns are: id, y, p, bank, g)" in err
    code, _, err = run(
        capsys, "measure", "preds.parquet", *ASKED, *join, "--where", "p > 0.5", "--json"
    )
    assert code == 0 and f"{(frame['p'] > 0.5).sum()} rows" in err


@pytest.mark.parametrize(
    ("other", "key", "kind", "said"),
    [
        (
            {"id": [10, 11, 10], "g": list("abc")},
            "id",
            "data",
            "key id '10' is in more than one row",
        ),
        (
            {"id": ["10", "10.0"], "g": list("ab")},
            "id",
            "data",
            "key id '10' is in more than one row",
        ),
        ({"id": [-1], "g": ["a"]}, "id", "data", "has none of the keys of"),
        ({"id": [None], "g": ["a"]}, "id", "data", "has no rows with a key id"),
        ({"nr": [10], "g": ["a"]}, "id", "data", "no column 'id' (key)"),
        ({"id": [10], "h": ["a"]}, "id", "data", "no column 'g' (group), nor in"),
        ({"id": [10], "g": ["a"], "p": [0.5]}, "id", "data", "column 'p' is in"),
        ({"id": [10], "g": ["a"]}, "idd", "data", "no column 'idd' (key)"),
        ({"id": [[10]], "g": ["a"]}, "id", "data", "not single values"),
    ],
)
def test_second_tables_that_do_not_fit(tmp_path, other, key, kind, said):
    scored = write(make_rows(50).drop("g"), tmp_path / "scored.parquet")
    groups = write(pl.DataFrame(other, strict=False), tmp_path / "groups.parquet")
    error = refusal(read_all, scored, join=groups, key=key)
    assert said in str(error) and error.kind == kind
    if kind == "data" and "nor in" not in said:
        assert "groups.parquet" in str(error) or key == "idd"


def test_a_second_table_without_a_measured_column(tmp_path):
    scored = write(make_rows(50), tmp_path / "scored.parquet")
    groups = write(pl.DataFrame({"id": [10], "h": ["a"]}), tmp_path / "groups.parquet")
    error = refusal(read_all, scored, join=groups, key="id")
    assert "holds none of the columns that are measured" in str(error) and error.field == "join"
    error = refusal(read_all, scored, join=tmp_path / "none.parquet", key="id")
    assert "no such file" in str(error) and error.kind == "file"


# Conditions


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("where", "expression"),
    [
        (
            "bank = 'north' AND g IN ('a', 'b')",
            (pl.col("bank") == "north") & pl.col("g").is_in(["a", "b"]),
        ),
        ("g IS NULL OR CAST(p AS DOUBLE) > 0.25", pl.col("g").is_null() | (pl.col("p") > 0.25)),
        ("CAST(p AS DOUBLE) BETWEEN .1 AND 5.0e-1", pl.col("p").is_between(0.1, 0.5)),
    ],
)
def test_a_condition_selects_rows(tmp_path, ending, where, expression):
    frame = make_rows(300)
    chosen = frame.filter(expression)
    found = read_all(write(frame, tmp_path / f"t.{ending}"), where=where)
    check_same(
        measure(chosen["y"], chosen["p"], sensitive_features={"g": chosen["g"].to_list()}), found
    )


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("", "where needs a condition"),
        ("bank = (", "where bank = (: "),
        ("bnak = 'north'", "no column 'bnak' (where); did you mean 'bank'?"),
        ("p > 0.5", "compare string with numeric"),
        ("p > 1", "columns of CSV files are text"),
        ("bank", "of type 'Boolean'"),
        ("bank = 'north'; drop table x", "unexpected token"),
        ("(select 1)", "not allowed"),
        ("nonsense(bank)", "unsupported function 'nonsense'"),
        ("CAST(bank AS DOUBLE) > 1", "the query fails: conversion from 'str' to 'f64' failed"),
        ("bank = 'west'", "no row fulfills"),
    ],
)
def test_conditions_that_cannot_be_used(tmp_path, capsys, where, said):
    table = write(make_rows(50), tmp_path / "t.csv")
    assert said in str(refusal(read_all, table, where=where))
    code, _, err = run(capsys, "measure", str(table), *ASKED, "--where", where, "--json")
    assert code == 2 and err.count("fedgft:") == 1


# Tables that cannot be read


def spoil(file: Path) -> Path:
    """Damage the rows of a Parquet file, not its description."""
    content = bytearray(file.read_bytes())
    content[8:400] = bytes(range(98)) * 4
    file.write_bytes(content)
    return file


def test_damaged_files_are_named(tmp_path):
    for i in range(4):
        write(make_rows(300, i), tmp_path / f"{i}.parquet")
    bad = spoil(tmp_path / "2.parquet")
    error = refusal(read_all, tmp_path, group="bank", label="id")
    assert str(bad) in str(error) and "cannot be read as PARQUET" in str(error)
    bad.write_bytes(bad.read_bytes()[:200])
    assert str(bad) in str(refusal(read_all, tmp_path))
    bad.write_bytes(b"")
    error = refusal(read_all, tmp_path)
    assert f"{bad}: the file is empty" in str(error) and error.kind == "file"


def test_damaged_csv_files_are_named(tmp_path):
    for i in range(3):
        write(make_rows(300, i), tmp_path / f"{i}.csv")
    bad = tmp_path / "1.csv"
    bad.write_bytes(bad.read_bytes() + b"1,1,\xff\xfe\xff,0.5,north\n")
    assert str(bad) in str(refusal(read_all, tmp_path))
    bad.write_bytes(b"\x1f\x8bxxxx")
    assert f"{bad}: is compressed" in str(refusal(read_all, tmp_path))
    bad.write_text("id,y,g,g\n1,1,a,a\n")
    assert f"{bad}: column 'g' is in the header more than once" in str(refusal(read_all, tmp_path))


def test_columns_that_differ_are_named_with_their_file(tmp_path):
    frame = make_rows(60)
    first = write(frame, tmp_path / "0.parquet")
    other = write(frame.with_columns(more=1), tmp_path / "1.parquet")
    assert read_all(tmp_path).rows() == 120  # a column that is not used
    write(frame.rename({"p": "q"}), other)
    assert f"{other}: no column 'p' (score), which {first} has" in str(refusal(read_all, tmp_path))
    assert f"{first}: no column 'q' (score)" in str(refusal(read_all, tmp_path, score="q"))
    write(frame.with_columns(pl.col("y").cast(pl.Boolean)), other)
    error = refusal(read_all, tmp_path)
    assert f"{other}: column 'y' holds Boolean, where {first} holds numbers" in str(error)
    write(frame.with_columns(pl.col("y").cast(pl.String)), other)
    assert "column 'y' holds text, where" in str(refusal(read_all, tmp_path))
    write(frame.with_columns(g=pl.concat_list("g")), other)
    assert f"{other}: column 'g' holds List" in str(refusal(read_all, tmp_path))
    assert "; did you mean 'bank'?" in str(refusal(read_all, tmp_path, group="bnak"))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_wrong_values_are_named_with_their_file(tmp_path, ending):
    for i in range(4):
        frame = make_rows(50, i).with_columns(site=pl.lit("north"))
        write(frame, tmp_path / f"{i}.{ending}")
    bad = tmp_path / f"2.{ending}"
    write(frame.with_columns(p=pl.col("p") + 0.5), bad)
    assert f"{bad}: score column 'p' holds 1." in str(refusal(read_all, tmp_path))
    write(frame.with_columns(site=None), bad)
    asked = {"label": "y", "group": "g", "score": "p", "site_column": "site"}
    assert f"{bad}: site column 'site' is empty in" in str(
        refusal(measure_sites, tmp_path, **asked)
    )
    error = str(refusal(read_all, tmp_path, label="id", classes=["1", "2"]))  # not of one file
    assert error.startswith(f"{tmp_path}: label '")


def test_folders_that_are_no_table(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path / "empty", "a folder without .csv or .parquet files"),
        (tmp_path / "none*.csv", "no file matches"),
        (tmp_path / "none", "no such file or folder"),
        (tmp_path / "none.txt", "the ending must be .csv or .parquet"),
        (tmp_path / "none.csv", "no such file"),
        ([], "path needs a file or a folder"),
    ):
        assert said in str(refusal(read_all, path))
    table = write(make_rows(20), tmp_path / "mixed" / "a.csv")
    write(make_rows(20), tmp_path / "mixed" / "b.parquet")
    error = refusal(read_all, tmp_path / "mixed")
    assert "a.csv: is CSV, and " in str(error) and "b.parquet is Parquet" in str(error)
    assert read_all(tmp_path / "mixed" / "*.csv").rows() == 20
    for name in ("c.tsv", "c.csv.gz", "c.orc"):
        extra = tmp_path / "mixed" / name
        extra.write_text("x")
        assert f"{extra}: cannot be read" in str(refusal(read_all, tmp_path / "mixed"))
        extra.unlink()
    assert "is named twice" in str(refusal(read_all, [table, table]))
    assert "is named twice" in str(refusal(read_all, [table, tmp_path / "m*" / "*.csv"]))
    assert "no column 'zz'" in str(refusal(read_all, table, group="zz"))


def test_a_list_of_several_files_needs_a_name(tmp_path):
    files = [write(make_rows(20), tmp_path / f"{i}.csv") for i in range(2)]
    error = refusal(read_all, files, site=None)
    assert error.kind == "missing" and error.field == "site"
    assert list(read_all(files[:1], site=None).sites) == ["0"]
    assert list(read_all(tmp_path, site=None).sites) == [tmp_path.name]
    folder = tmp_path / "scored.parquet"
    write(make_rows(20), folder / "0.parquet")
    assert list(read_all(folder, site=None).sites) == ["scored"]


def test_a_folder_of_a_table_format_is_refused(tmp_path):
    write(make_rows(20), tmp_path / "t" / "0.parquet")
    for name, called in (
        ("_delta_log/0.json", "Delta Lake"),
        (".hoodie/x", "Hudi"),
        ("metadata/v1.metadata.json", "Iceberg"),
    ):
        log = tmp_path / "t" / name
        log.parent.mkdir()
        log.write_text("{}")
        error = refusal(read_all, tmp_path / "t")
        assert f"is a table of {called}" in str(error) and error.kind == "unsupported"
        log.unlink()
        log.parent.rmdir()


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege")
def test_links_do_not_count_rows_twice(tmp_path):
    write(make_rows(20), tmp_path / "t" / "sub" / "0.parquet")
    (tmp_path / "t" / "again").symlink_to(tmp_path / "t")
    assert "is in the table already" in str(refusal(read_all, tmp_path / "t"))
    (tmp_path / "t" / "again").unlink()
    (tmp_path / "t" / "1.parquet").symlink_to(tmp_path / "t" / "sub" / "0.parquet")
    assert "is named twice" in str(refusal(read_all, tmp_path / "t"))


# Memory

PEAK = """
import sys
from fedgft.auditing import measure_file
measure_file(sys.argv[1], label="y", group="g", score="p")
print(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_memory_does_not_grow_with_rows(tmp_path, ending):
    """Six million more rows: more than 200 MB in three columns, if they were held in memory."""
    part = make_rows(250_000).select("y", "g", "p")

    def peak(parts: int) -> float:
        folder = tmp_path / str(parts)
        for i in range(parts):
            write(part, folder / f"{i}.{ending}")
        run = subprocess.run(
            [sys.executable, "-c", PEAK, folder], capture_output=True, text=True, check=True
        )
        return int(run.stdout) / 1024

    few, many = peak(8), peak(32)
    assert many - few < 80
