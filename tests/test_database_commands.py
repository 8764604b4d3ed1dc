"""`fedgft measure` with the URL of a database, `--print-sql` and `--from-counts`."""

import csv
import json
import sqlite3
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from fedgft import FedgftError
from fedgft.auditing import measure_counts
from fedgft.cli import main
from test_database import make_rows
from test_optional_packages import run_without

OPTIONS = ["--label", "repaid", "--group", "sex", "--score", "p"]
URL = "sqlite:///site.db"


def fill(frame: pl.DataFrame, name: str = "preds", path: str = "site.db") -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE {name} ({', '.join(frame.columns)})")
    marks = ", ".join("?" * frame.width)
    connection.executemany(f"INSERT INTO {name} VALUES ({marks})", frame.rows())
    connection.commit()
    connection.close()


def save_counts(statement: str, path: Path) -> list[list[Any]]:
    """Run a statement with another tool, and save what it returns."""
    connection = sqlite3.connect("site.db")
    found = connection.execute(statement)
    rows = [[column[0] for column in found.description], *map(list, found)]
    connection.close()
    write_csv(rows, path)
    return rows


def write_csv(rows: list[list[Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    fill(make_rows(800))
    make_rows(800).write_csv("preds.csv")
    return tmp_path


def fail(*words: str, capsys: Any) -> str:
    """Return the one line that the command prints."""
    with pytest.raises(SystemExit) as ended:
        main(["measure", *words])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    (line,) = printed.err.splitlines()
    return line


def test_the_file_of_a_database_is_that_of_the_csv(folder):
    main(["measure", "preds.csv", *OPTIONS, "--out", "a.json"])
    main(["measure", URL, "--table", "preds", *OPTIONS, "--out", "b.json"])
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()


def test_all_ways_with_two_tables_sites_weights_and_strata(folder, capsys):
    frame = make_rows(800)
    fill(frame.drop("sex"), "scored")
    fill(frame.select("id", "sex"), "people")
    more = [
        "--given",
        "department",
        "--weight",
        "weight",
        "--site",
        "bank",
        "--bins",
        "20",
        "--where",
    ]
    words = [*OPTIONS, *more, "age > 20"]
    pytest.importorskip("sqlglot")
    second = ["--table", "scored", "--join", "people", "--key", "id"]
    main(["measure", URL, *second, *words, "--out", "joined"])
    frame.filter(pl.col("age") > 20).write_csv("some.csv")
    main(["measure", "some.csv", *words[:-2], "--out", "file"])
    capsys.readouterr()
    main(["measure", URL, *second, *words, "--print-sql"])
    save_counts(capsys.readouterr().out.rstrip().rstrip(";"), Path("counts.csv"))
    main(["measure", "--from-counts", "counts.csv", "--out", "counted"])
    names = sorted(path.name for path in Path("file").iterdir())
    assert names == ["east.json", "north.json", "south.json"]
    for name in names:
        expected = (Path("file") / name).read_bytes()
        assert (Path("joined") / name).read_bytes() == expected
        assert (Path("counted") / name).read_bytes() == expected


def test_a_statement_needs_no_database_and_no_driver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["measure", "--print-sql", "--dialect", "postgres", "--table", "preds", *OPTIONS]
    done = run_without("psycopg", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("WITH") and done.stdout.endswith(";\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("psycopg", ["postgresql://127.0.0.1:1/db", "--table", "preds", *OPTIONS]),
        ("duckdb", ["duckdb:///site.db", "--table", "preds", *OPTIONS]),
        ("sqlglot", [URL, "--table", "preds", *OPTIONS, "--where", "age > 20"]),
        ("pyspark", ["spark://local", "--table", "preds", *OPTIONS]),
    ],
)
def test_the_extra_is_named(package, words, folder):
    done = run_without(package, "measure", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install 'fedgft[sql]'" in done.stderr


WRONG = {
    (URL, "--label", "y"): "--table is missing",
    ("preds.csv", "--table", "preds"): "--table names a table of a database",
    (URL, "preds.csv", "--table", "preds"): "give one database",
    ("--print-sql", *OPTIONS): "--table is missing",
    ("--print-sql", "--table", "preds", *OPTIONS): "--dialect is missing",
    ("--print-sql", "--table", "p", "--dialect", "dbase", *OPTIONS): "--dialect 'dbase'",
    (URL, "--table", "preds"): "--label is missing: the column with the true outcome",
    (URL, "--table", "perds", *OPTIONS): "did you mean 'preds'?",
    (URL, "--table", "preds", *OPTIONS, "--join", "people"): "--join needs --key",
    (URL, "--table", "preds", *OPTIONS, "--where", ""): "--where must not be empty",
    ("oracle://me:hunter2@host/db", "--table", "p", *OPTIONS): "'oracle://' is no database",
    ("--from-counts", "missing.csv"): "missing.csv",
    ("--from-counts", "preds.csv"): "column 'id' is none that the statement returns",
    ("--from-counts", "preds.csv", "--table", "preds"): "--table and --from-counts exclude",
    (URL, "--table", "preds", "--label", "y", "--score", "p", "--group-probabilities", "s=a:b,c:d"):
        "--group-probabilities is for files",
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_wrong_options_are_one_line(words, folder, capsys):
    line = fail(*words, capsys=capsys)
    assert WRONG[words] in line and "hunter2" not in line
    assert not list(folder.glob("*.json"))


# Counts that were edited


def change(rows: list[list[Any]], column: str, value: Any, line: int = 1) -> None:
    rows[line][rows[0].index(column)] = value


EDITS = {
    "not a number": (lambda rows: change(rows, "row_count", "many"), "must hold numbers"),
    "negative count": (lambda rows: change(rows, "row_count", -3), "whole number of rows"),
    "fraction": (lambda rows: change(rows, "row_count", 2.5), "whole number of rows"),
    "no count": (lambda rows: change(rows, "row_count", ""), "and is empty"),
    "bin": (lambda rows: change(rows, "bin", 100), "from 0 to 99, and is 100"),
    "sum": (lambda rows: change(rows, "score_sum", 1e6), "scores that lie in the bin"),
    "no sum": (lambda rows: change(rows, "score_sum", ""), "and is empty"),
    "decision": (lambda rows: change(rows, "decision", 7), "whole number from 0 to 1"),
    "threshold": (lambda rows: [change(rows, "threshold", 0.2, i) for i in range(1, len(rows))],
                  "what the threshold 0.2 decides"),
    "mixed": (lambda rows: change(rows, "threshold", 0.2), "do not mix two results"),
    "twice": (lambda rows: rows.append(rows[5]), "counts the same cell as another line"),
    "no header": (lambda rows: rows.pop(0), "in the header more than once"),
    "cut column": (lambda rows: [row.pop() for row in rows], "no column 'score_sum'"),
    "empty": (lambda rows: rows.__delitem__(slice(1, None)), "has no rows"),
    "problem": (lambda rows: change(rows, "problem", "score outside 0 to 1"), "probabilities"),
    "largest weight": (lambda rows: change(rows, "largest_weight", 1e9), "a weight that fits"),
    "squares": (lambda rows: change(rows, "squares_sum", 1e9), "sum of squares that fits"),
    "other column": (lambda rows: rows[0].__setitem__(0, "gruop_sex"), "did you mean 'group_"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_edited_counts_are_refused(edit, folder, capsys):
    main(["measure", URL, "--table", "preds", *OPTIONS, "--weight", "weight", "--print-sql"])
    path = Path("counts.csv")
    rows = save_counts(capsys.readouterr().out.rstrip().rstrip(";"), path)
    rows[1:] = [row for row in rows[1:] if None not in row[:7] and row[rows[0].index("bin")] > 30]
    write_csv(rows, path)
    measure_counts(path)
    function, text = EDITS[edit]
    function(rows)
    write_csv(rows, path)
    with pytest.raises(FedgftError) as raised:
        measure_counts(path)
    assert text in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).startswith("counts.csv") and raised.value.kind == "data"


def test_lines_of_one_score_column_are_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    frame = pl.DataFrame({"y": [0, 1, 2] * 20, "g": "x", "a": 0.25, "b": 0.5, "c": 0.25})
    fill(frame)
    words = ["--table", "preds", "--label", "y", "--group", "g", "--score", "a", "b", "c"]
    main(["measure", URL, *words, "--out", "a.json"])
    capsys.readouterr()
    main(["measure", URL, *words, "--print-sql"])
    rows = save_counts(capsys.readouterr().out.rstrip().rstrip(";"), Path("counts.csv"))
    main(["measure", "--from-counts", "counts.csv", "--name", "preds", "--out", "b.json"])
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    write_csv(rows[:-1], Path("counts.csv"))
    capsys.readouterr()
    assert "lines are missing" in fail("--from-counts", "counts.csv", capsys=capsys)


def test_counts_keep_the_protection_of_small_cells(folder, capsys):
    main(["measure", URL, "--table", "preds", *OPTIONS, "--print-sql"])
    save_counts(capsys.readouterr().out.rstrip().rstrip(";"), Path("counts.csv"))
    main(["measure", "--from-counts", "counts.csv", "--name", "x", "--min-cell", "150"])
    found = json.loads(Path("x.json").read_text())
    assert found["privacy"]["min_cell"] == 150 and found["privacy"]["suppressed_cells"] > 0


@pytest.mark.parametrize(
    "words",
    [
        ("postgresql:/me:hun@ter2@host/db", *OPTIONS),
        ("preds.csv", *OPTIONS, "--join", "postgresql://me:hun@ter2@host/db", "--key", "id"),
        ("host=db password=hunter2", *OPTIONS),
        ("--from-counts", "postgresql://me:hun@ter2@host/db"),
    ],
)
def test_a_url_in_the_wrong_place_shows_no_password(folder, capsys, words):
    said = fail(*words, capsys=capsys)
    assert "***" in said and "hun" not in said and "ter2" not in said


@pytest.mark.parametrize(("scheme", "title"), [("sqlite", "SQLite"), ("duckdb", "DuckDB")])
def test_a_file_that_is_no_database_is_named(folder, capsys, scheme, title):
    if scheme == "duckdb":
        pytest.importorskip("duckdb")
    said = fail(f"{scheme}:///preds.csv", "--table", "preds", *OPTIONS, capsys=capsys)
    assert f"preds.csv: is not a database of {title}" in said
