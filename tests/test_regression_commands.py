"""`fedgft measure --target-column` and `fedgft audit` of such files, on the command line."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedgft.auditing import audit_regression, measure_regression_file, read_regression_sums
from test_cli import run

NUMBERS = ("--target-column", "pay", "--prediction", "p")


@pytest.fixture
def tables(tmp_path: Path, monkeypatch) -> Path:
    """Two sites' predictions of pay, and both in one table."""
    generator = np.random.default_rng(0)
    frames = []
    for name in ("north", "south"):
        n = 500
        sex = generator.choice(["f", "m"], n)
        pay = (30_000 + 3000 * (sex == "m") + generator.normal(0, 4000, n)).round(2)
        frame = pl.DataFrame(
            {
                "pay": pay,
                "p": (0.6 * pay + 12_500 + generator.normal(0, 900, n)).round(2),
                "sex": sex,
                "age": generator.choice(["old", "young"], n),
                "y": generator.integers(0, 2, n),
                "bank": [name] * n,
            }
        )
        frame.write_csv(tmp_path / f"{name}.csv")
        frames.append(frame)
    pl.concat(frames).write_parquet(tmp_path / "all.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def measured(capsys) -> None:
    for name in ("north", "south"):
        asked = ("measure", f"{name}.csv", *NUMBERS, "--group", "sex", "age")
        code, out, err = run(capsys, *asked, "--out", f"sums/{name}.json")
        assert (code, out) == (0, "") and f"{name}: 500 rows in 4 groups" in err


def test_from_tables_to_a_report(tables, capsys):
    measured(capsys)
    assert Path("sums/north.json").stat().st_mode & 0o077 == 0
    code, out, _ = run(capsys, "audit", "sums", "--json", "--out", "report")
    assert code == 0 and json.loads(out) == json.loads(Path("report/audit.json").read_text())
    expected = audit_regression([read_regression_sums(p) for p in sorted(Path("sums").iterdir())])
    gap = json.loads(out)["views"]["sex"]["gaps"]["mean-error"]["value"]
    assert gap == expected.attributes["sex"].gaps["mean-error"].value
    code, out, err = run(capsys, "audit", "sums", "--wide")
    assert code == 0 and "Fit by sex & age" in out and "Games & Howell" in err
    page = Path("report/report.html").read_text()
    assert "north.json" in page and "Mean absolute error" in page


def test_one_table_of_several_sites_gives_the_files_of_each(tables, capsys):
    measured(capsys)
    task = ("measure", "all.parquet", *NUMBERS, "--group", "sex", "age", "--site", "bank")
    code, out, err = run(capsys, *task, "--out", "split", "--report", "report")
    assert code == 0 and "Gaps by sex" in out and "2 sites, 1,000 rows" in err
    for name in ("north", "south"):
        assert Path(f"split/{name}.json").read_text() == Path(f"sums/{name}.json").read_text()
    assert run(capsys, "audit", "sums", "-q")[1] == out


def test_sums_are_printed_or_kept(tables, capsys):
    asked = ("measure", "north.csv", *NUMBERS, "--group", "sex")
    code, out, _ = run(capsys, *asked, "--json", "--name", "nord")
    assert code == 0 and json.loads(out)["site"] == "nord" and not Path("nord.json").exists()
    assert run(capsys, *asked)[0] == 0
    assert run(capsys, *asked)[0] == 0  # the same numbers
    changed = (*asked, "--clip", "20000", "40000")
    code, _, err = run(capsys, *changed)
    assert code == 2 and "--overwrite" in err
    code, _, err = run(capsys, *changed, "--overwrite")
    assert code == 0 and "clipped to 20000 to 40000" in err
    assert read_regression_sums("north.json").spec.clip == (20000, 40000)
    code, _, err = run(
        capsys, "measure", "south.csv", *NUMBERS, "--group", "sex", "-o", "north.json"
    )
    assert code == 2 and "holds the sums of site 'north'" in err


def test_weights_and_dates_are_options(tables, capsys):
    frame = pl.read_csv("north.csv").with_columns(w=pl.lit(2.5))
    frame.write_csv("west.csv")
    asked = ("measure", "west.csv", *NUMBERS, "--group", "sex", "--weight", "w")
    code, _, _ = run(capsys, *asked, "--date", "2026-03-31", "--model-version", "2")
    sums = read_regression_sums("west.json")
    cell = sums.sites["west"].cells[("f",)]
    assert code == 0 and cell.weight == 2.5 * cell.rows == frame.filter(sex="f")["w"].sum()
    assert (sums.spec.date, sums.spec.model_version) == ("2026-03-31", "2")


def test_small_groups_are_withheld_by_default(tables, capsys):
    frame = pl.read_csv("north.csv")
    groups = (frame.filter(sex="f").head(9), frame.filter(sex="m").head(12))
    pl.concat(groups).write_csv("few.csv")
    code, _, err = run(capsys, "measure", "few.csv", *NUMBERS, "--group", "sex")
    assert code == 0 and "1 group of fewer than 10 people withheld" in err
    sums = measure_regression_file("few.csv", target="pay", prediction="p", group="sex")
    assert sums.to_json() == Path("few.json").read_text()
    code, _, err = run(capsys, "audit", "few.json")
    assert code == 0 and "withheld by 1 site" in err


def test_a_gap_above_its_limit_ends_with_code_3(tables, capsys):
    measured(capsys)
    code, out, err = run(capsys, "audit", "sums", "--fail-above", "mean-prediction=500")
    assert code == 3 and "--fail-above: mean-prediction by sex" in err and "exceeds 500" in out
    code, out, _ = run(capsys, "audit", "sums", "--fail-above", "mae=1e6")
    assert code == 0 and "within" in out
    code, out, _ = run(capsys, "audit", "sums", "--tolerance", "mean-error=1e6,mse=1")
    assert code == 0 and "The gap in mean error is within 1,000,000" in out


WRONG = {
    ("--label", "y"): "--label is for classes",
    ("--score", "p"): "--score is for classes",
    ("--epsilon", "1"): "--epsilon is not implemented for a numeric outcome",
    ("--min-cell", "3"): "--min-cell 3: must be at least 5",
    ("--clip", "5", "1"): "--clip 5 1: the first number must be the smaller one",
    ("--group", "race"): "no column 'race'",
    ("--bins", "5"): "--bins is for classes",
    ("--given", "age"): "--given is for classes",
    ("--randomized-groups", "1"): "--randomized-groups is for classes",
    ("--weight", "wages"): "no column 'wages'",
}


@pytest.mark.parametrize("more", WRONG)
def test_wrong_options_are_named(tables, capsys, more):
    code, out, err = run(capsys, "measure", "north.csv", *NUMBERS, "--group", "sex", *more)
    assert (code, out) == (2, "") and WRONG[more] in err and err.count("\n") == 1
    assert not list(tables.glob("*.json"))


@pytest.mark.parametrize("given", [NUMBERS[:2], NUMBERS[2:], ("--clip", "0", "1")])
def test_both_columns_are_needed(tables, capsys, given):
    code, _, err = run(capsys, "measure", "north.csv", *given, "--group", "sex")
    missing = "--prediction" if given == NUMBERS[:2] else "--target-column"
    assert code == 2 and f"{missing} is missing" in err


def test_files_of_both_kinds_are_not_audited_together(tables, capsys):
    measured(capsys)
    frame = pl.read_csv("north.csv").with_columns(d=pl.col("y"))
    frame.write_csv("west.csv")
    asked = ("measure", "west.csv", "--label", "y", "--group", "sex", "--decision", "d")
    assert run(capsys, *asked, "--out", "sums/west.json")[0] == 0
    code, _, err = run(capsys, "audit", "sums")
    assert code == 2 and "west.json: holds counts of classes" in err and err.count("\n") == 1
    code, _, err = run(capsys, "adjust", "sums/north.json", "--target", "sp=0.02")
    assert code == 2 and "numeric outcome" in err


@pytest.mark.parametrize(
    "more",
    [
        ("--tolerance", "0.05"),
        ("--tolerance", "sp=0.05"),
        ("--fail-above", "mean-error=5%"),
        ("--fail-above", "mae=1", "mae=2"),
        ("--adjust", "sp=0.02"),
        ("--bootstrap", "200"),
        ("--worst-mix", "0.3"),
        ("--reference-groups", "sex=x"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(tables, capsys, more):
    measured(capsys)
    code, out, err = run(capsys, "audit", "sums", *more)
    assert (code, out) == (2, "") and more[0] in err and err.count("\n") == 1


def test_a_folder_is_one_table(tables, capsys):
    """The same sums as those of one file, and a note about the number of files."""
    Path("parts").mkdir()
    frame = pl.read_csv("north.csv")
    for i in range(3):
        frame[i::3].write_csv(f"parts/part-{i}.csv")
    code, _, err = run(capsys, "measure", "parts", *NUMBERS, "--group", "sex", "--name", "north")
    assert code == 0 and "3 files" in err
    found = read_regression_sums("north.json").sites["north"].cells
    whole = measure_regression_file("north.csv", target="pay", prediction="p", group="sex")
    for group, cell in whole.sites["north"].cells.items():
        assert found[group].rows == cell.rows
        assert found[group].squares == pytest.approx(cell.squares, rel=1e-9)


def test_databases_are_refused(tables, capsys):
    asked = ("measure", "sqlite:///x.db", "--table", "t", *NUMBERS, "--group", "sex")
    code, _, err = run(capsys, *asked)
    assert code == 2 and "not in databases" in err and err.count("\n") == 1
