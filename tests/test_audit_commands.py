"""`fedgft measure` and `fedgft audit` on the command line, with files of sites."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedgft.auditing import audit, measure_file, read_sums
from fedgft.cli import main
from fedgft.cli.console import print_table
from fedgft.errors import FedgftError
from fedgft.formatting import Table


@pytest.fixture
def sites(tmp_path: Path, monkeypatch) -> Path:
    """Three sites' predictions, one of them as Parquet."""
    generator = np.random.default_rng(0)
    for name in ("north", "south", "east"):
        n = 600
        y = generator.integers(0, 2, n)
        race = generator.choice(["White", "Black", "Asian"], n)
        score = np.clip(0.3 * y + 0.15 * (race == "White") + 0.55 * generator.random(n), 0, 1)
        frame = pl.DataFrame(
            {
                "id": range(n),
                "y": y,
                "race": race,
                "sex": generator.choice(["F", "M"], n),
                "p": score,
            }
        )
        if name == "east":
            frame.write_parquet(tmp_path / "east.parquet")
        else:
            frame.write_csv(tmp_path / f"{name}.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        main(list(arguments))
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def measured(capsys, folder: Path, *more: str) -> None:
    for file in ("north.csv", "south.csv", "east.parquet"):
        code, out, _ = run(
            capsys,
            "measure",
            file,
            "--label",
            "y",
            "--group",
            "race",
            "--group",
            "sex",
            "--score",
            "p",
            *more,
        )
        assert code == 0 and out == ""
    assert sorted(p.name for p in folder.glob("*.json")) == [
        "east.json",
        "north.json",
        "south.json",
    ]


@pytest.mark.slow
def test_from_files_to_a_report(sites, capsys):
    measured(capsys, sites)
    code, out, err = run(
        capsys, "audit", "north.json", "south.json", "east.json", "--json", "--out", "report"
    )
    assert code == 0
    found = json.loads(out)
    assert found["rows"]["counted"] == 1800 and set(found["sites"]) == {"north", "south", "east"}
    assert sorted(p.name for p in (sites / "report").iterdir()) == [
        "audit.json",
        "report.html",
        "report.md",
    ]
    assert json.loads((sites / "report/audit.json").read_text()) == found
    assert "wrote report/report.html" in err
    code, out, _ = run(capsys, "audit", *map(str, sorted(sites.glob("*.json"))))
    assert code == 0 and "Statistical parity" in out and "north" in out


@pytest.mark.slow
def test_a_report_on_one_table(sites, capsys):
    """One command; the same as `audit` of the file that it writes."""
    asked = ("measure", "north.csv", "--label", "y", "--group", "race", "--score", "p")
    code, out, err = run(capsys, *asked, "--report", "alone")
    assert code == 0 and "Statistical parity" in out and "wrote alone/report.html" in err
    assert run(capsys, "audit", "north.json", "--out", "audited", "-q")[1] == out
    for name in ("audit.json", "report.html", "report.md"):
        assert Path("alone", name).read_bytes() == Path("audited", name).read_bytes()
    code, out, err = run(capsys, *asked, "--report", "alone", "--json")
    assert (code, out) == (2, "") and "--report and --json exclude each other" in err
    Path("alone/report.md").write_text("my own notes")
    Path("a-file").touch()
    before = sorted(sites.rglob("*"))
    for more, said in (
        (("--report", "alone"), "--report alone: a report.md is there that is not ours"),
        (("--report", "a-file", "--name", "new"), "--report a-file: is a file; name a folder"),
        (("--report", "x", "-o", "x"), "--report x: the sums go to x"),
        (("--report", ".", "--name", "audit"), "--report .: the sums go to audit.json"),
    ):
        code, out, err = run(capsys, *asked, *more)
        assert (code, out) == (2, "") and said in err
    assert sorted(sites.rglob("*")) == before


def test_both_spellings_and_both_formats_count_the_same(sites, capsys):
    frame = pl.read_csv("north.csv")
    frame.with_columns(pl.col("y").cast(pl.Float64)).write_csv("floats.csv")  # "1.0" is "1"
    frame.write_parquet("north.parquet")
    made = [
        measure_file(f, label="y", group=["race", "sex"], score="p", site="n")
        for f in ("north.csv", "floats.csv", "north.parquet")
    ]
    for other in made[1:]:
        assert other.spec == made[0].spec
        for group, table in made[0].sites["n"].tables.items():
            assert np.allclose(table, other.sites["n"].tables[group], rtol=0, atol=1e-9)


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_count_the_same(sites, capsys, separator):
    asked = ("--label", "y", "--group", "race", "--score", "p", "--json", "--name", "n")
    _, out, _ = run(capsys, "measure", "north.csv", *asked)
    pl.read_csv("north.csv").write_csv("other.csv", separator=separator)
    code, again, _ = run(capsys, "measure", "other.csv", *asked)
    assert code == 0 and again == out


def test_a_table_is_measured_before_it_is_audited(sites, capsys):
    (sites / "tables").mkdir()
    (sites / "tables/a.csv").write_text("y,g\n")
    for given, named in (
        ("north.csv", "north.csv"),
        ("east.parquet", "east.parquet"),
        ("tables", "tables/a.csv"),
    ):
        code, out, err = run(capsys, "audit", given)
        assert (code, out) == (2, "") and f"{named}: is a table, not a file of sums" in err
        command = f"fedgft measure {named} --label ... --group ... --score ... --out "
        assert command + f"{Path(named).stem}.json" in err


def test_spellings_are_refused_before_any_number(sites, capsys):
    asked = ("--label", "y", "--group", "race", "--score", "p")
    table = pl.read_csv("north.csv")
    blurred = table.with_columns(pl.col("race").replace({"White": "white ", "Asian": "ASIAN"}))
    blurred.write_csv("south.csv")
    mixed = pl.concat([table, blurred])
    mixed.write_csv("mixed.csv")
    code, out, err = run(capsys, "measure", "mixed.csv", *asked)
    assert (code, out) == (2, "") and not Path("mixed.json").exists()
    assert "mixed.csv: column 'race': " in err and "merge them with --ignore-case" in err
    code, _, err = run(capsys, "measure", "mixed.csv", *asked, "--ignore-case")
    assert code == 0 and err.count(" is counted as ") == 2
    for name in ("north", "south"):
        assert run(capsys, "measure", f"{name}.csv", *asked)[0] == 0
    code, out, err = run(capsys, "audit", "north.json", "south.json")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    for said in ("'Asian' (north.json) and 'ASIAN' (south.json)", "'white ' (south.json)"):
        assert said in err
    code, out, err = run(capsys, "audit", "north.json", "south.json", "--ignore-case", "--json")
    warnings = json.loads(out)["warnings"]
    assert code == 0 and len([text for text in warnings if "is counted as" in text]) == 2
    merged = json.loads(out)["metrics"]
    _, out, _ = run(capsys, "audit", "mixed.json", "--json")
    for name, found in json.loads(out)["metrics"].items():
        assert found["gap"] == merged[name]["gap"]


SPELLINGS = ["race sex", "race,sex", "race --group sex", "race, --group sex"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_groups_in_any_spelling(sites, capsys, spelling):
    asked = ("measure", "north.csv", "--label", "y", "--score", "p", "--json")
    code, out, _ = run(capsys, *asked, "--group", *spelling.split())
    assert code == 0 and json.loads(out)["groups"] == ["race", "sex"]


def test_the_table_may_follow_data(sites, capsys):
    asked = ("--label", "y", "--group", "race", "--score", "p", "--json")
    assert run(capsys, "measure", "north.csv", *asked) == run(
        capsys, "measure", "--data", "north.csv", *asked
    )
    code, _, err = run(capsys, "measure", *asked[:4], "north.csv", *asked[4:])
    assert code == 2 and "'north.csv' is a file, not a column" in err


def test_a_missing_column_is_asked_for_with_all_columns(sites, capsys):
    code, _, err = run(capsys, "measure", "north.csv", "--label", "y", "--score", "p")
    listed = "(columns are: id, y, race, sex, p)"
    assert code == 2 and f"--group is missing: the column with the groups {listed}" in err
    code, _, err = run(capsys, "measure", "north.csv", "--group", "sex", "--score", "p")
    assert code == 2 and f"--label is missing: the column with the true outcome {listed}" in err


@pytest.mark.slow
def test_several_sites_in_one_table(sites, capsys):
    """The files are those of separate tables; notes are printed once; a report is on all."""
    asked = ("--label", "y", "--group", "race", "--score", "p")
    names = ("north", "south")
    for name in names:
        assert run(capsys, "measure", f"{name}.csv", *asked, "--out", f"{name}.json")[0] == 0
    parts = [pl.read_csv(f"{n}.csv").with_columns(bank=pl.lit(n)) for n in names]
    pl.concat(parts).sample(fraction=1, shuffle=True, seed=0).write_csv("all.csv")
    many = ("measure", "all.csv", "--site", "bank", *asked)
    code, out, err = run(capsys, *many, "--out", "deep/sums", "--report", "together")
    assert code == 0 and "Statistical parity" in out
    for name in names:
        assert f"wrote deep/sums/{name}.json" in err
        one, other = (read_sums(path) for path in (f"{name}.json", f"deep/sums/{name}.json"))
        assert one.spec == other.spec and list(other.sites) == [name]
        for group, table in one.sites[name].tables.items():
            assert np.allclose(table, other.sites[name].tables[group])
            assert np.array_equal(one.histogram[group], other.histogram[group])
    said = " ".join(err.split())
    assert "2 sites, 1,200 rows in 3 groups: north 600, south 600" in said
    assert said.count("the positive class is") == said.count("by group, label and decision") == 1
    for more, problem in (
        (("--name", "x"), "--site excludes --name and --json"),
        (("--json",), "--site excludes --name and --json"),
        (("--out", "all.csv"), "--out all.csv: with --site, name a folder"),
        (("--site", "id"), "--site is given more than once"),
    ):
        code, _, err = run(capsys, *many, *more)
        assert code == 2 and problem in err, err
    code, _, err = run(capsys, "measure", "all.csv", *asked, "--site", "branch")
    assert code == 2 and "no column 'branch' (--site)" in err


def test_sites_of_one_table_share_their_labels_and_have_names(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("s,y,g,d\nA,yes,f,yes\nA,yes,m,no\nB/1,no,f,no\nB/1,no,m,no\n")
    asked = ("measure", "t.csv", "--site", "s", "--label", "y", "--group", "g", "--decision", "d")
    assert run(capsys, *asked)[0] == 0
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["A.json", "B-1.json"]
    assert read_sums("A.json").spec == read_sums("B-1.json").spec
    for extra, problem in (
        (",yes,f,no\n", "site column 's' is empty in 1 row"),
        ("B 1,no,f,no\n", "sites 'B 1' and 'B/1' would share the file B-1.json"),
        ("a,no,f,no\n", "t.csv: site: 'A' (2 rows) and 'a' (1 row) differ only in case"),
    ):
        with Path("t.csv").open("a") as file:
            before = Path("t.csv").read_text()
            file.write(extra)
        code, _, err = run(capsys, *asked)
        assert code == 2 and problem in err, err
        if extra.startswith("a"):
            assert run(capsys, *asked, "--ignore-case", "--overwrite")[0] == 0
            assert read_sums("A.json").rows() == 3
        Path("t.csv").write_text(before)


@pytest.mark.slow
def test_nothing_is_overwritten_silently(sites, capsys):
    """Files with the same content stay; others are kept unless --overwrite is given."""
    asked = ("measure", "north.csv", "--label", "y", "--score", "p", "--out", "made/by/us.json")
    assert run(capsys, *asked, "--group", "race")[0] == 0
    before = Path("made/by/us.json").read_bytes()
    assert run(capsys, *asked, "--group", "race")[0] == 0
    code, _, err = run(capsys, *asked, "--group", "sex")
    assert code == 2 and "--out made/by/us.json: exists with other numbers" in err
    assert Path("made/by/us.json").read_bytes() == before and "--overwrite" in err
    assert run(capsys, *asked, "--group", "sex", "--overwrite")[0] == 0
    assert read_sums("made/by/us.json").spec.attributes == ("sex",)
    folder = (
        "measure",
        "north.csv",
        "--label",
        "y",
        "--group",
        "sex",
        "--score",
        "p",
        "-o",
        "made",
    )
    code, _, err = run(capsys, *folder)
    assert code == 0 and "wrote made/north.json" in err
    report = ("audit", "made/north.json", "--out", "report")
    for _ in range(2):
        assert run(capsys, *report)[0] == 0
    pages = [path.read_bytes() for path in sorted(Path("report").iterdir())]
    code, _, err = run(capsys, *report, "--title", "Another")
    assert code == 2 and "--out report: holds another report" in err and "--overwrite" in err
    assert [path.read_bytes() for path in sorted(Path("report").iterdir())] == pages
    code, _, err = run(capsys, *folder[:-2], "--out", "x.json", "--report", "report")
    assert code == 2 and "--report report: holds another report" in err
    assert not Path("x.json").exists()
    assert run(capsys, *report, "--title", "Another", "--overwrite")[0] == 0
    assert b"Another" in Path("report/report.md").read_bytes()


def test_batches_do_not_matter(sites, monkeypatch):
    whole = measure_file("north.csv", label="y", group="race", score="p")
    monkeypatch.setattr("fedgft.auditing.measurement.BATCH_ROWS", 7)
    pieces = measure_file("north.csv", label="y", group="race", score="p")
    for group, table in whole.sites["north"].tables.items():
        assert np.allclose(table, pieces.sites["north"].tables[group], rtol=0, atol=1e-9)
        assert np.array_equal(whole.histogram[group], pieces.histogram[group])


def test_missing_values_are_counted_and_said(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.csv").write_text("y,g,p\n1,a,0.9\n,a,0.2\n0,,0.1\n1,b,\n0,b,NA\n1,b,nan\n0,b,0.3\n")
    code, _, err = run(capsys, "measure", "p.csv", "--label", "y", "--group", "g", "--score", "p")
    assert code == 0
    assert "rows without a label, counted separately: 1" in err
    assert "rows without a prediction, counted separately: 3" in err
    assert "rows without a recorded group: 1" in err
    found = json.loads(Path("p.json").read_text())
    assert found["rows"] == {"counted": 3, "label_missing": 1, "prediction_missing": 3}
    _, out, err = run(capsys, "audit", "p.json", "--json")
    made = json.loads(out)
    assert made["rows"]["not_recorded"] == 1
    assert any(
        "rows without a prediction, which were not counted: 3." in text for text in made["warnings"]
    )


def test_decisions_and_classes_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.csv").write_text("y,g,d\nyes,a,no\nyes,b,yes\n")
    asked = ("measure", "p.csv", "--label", "y", "--group", "g", "--decision", "d")
    assert run(capsys, *asked)[0] == 0
    assert read_sums("p.json").spec.classes == ("no", "yes")
    Path("p.csv").write_text("y,g,d\nyes,a,yes\nyes,b,yes\n")
    code, _, err = run(capsys, *asked)
    assert code == 2 and "'yes' is the only label here" in err and "--classes" in err
    assert run(capsys, *asked, "--classes", "no", "yes", "--overwrite")[0] == 0
    code, _, err = run(capsys, *asked, "--positive", "no")
    assert code == 2 and "--out p.json: exists with other numbers" in err and "--overwrite" in err
    assert run(capsys, *asked, "--positive", "no", "--overwrite")[0] == 0
    assert read_sums("p.json").spec.classes == ("yes", "no")
    code, _, err = run(capsys, *asked, "--positive", "YES")
    assert code == 2 and "'yes' is the only label here" in err
    Path("p.csv").write_text("y,g,d\nYes,a,No\nNo,b,Yes\n")
    again = (*asked, "--positive", "no", "--overwrite")
    assert run(capsys, *again)[0] == 0  # as `train` takes it
    assert read_sums("p.json").spec.classes == ("Yes", "No")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("y,g,p\n1,a,1.7\n", "--score p", "score column 'p' holds 1.7, which is outside [0, 1]"),
        ("y,g,p\n1,a,x\n", "--score p", "column 'p' should hold numbers, not 'x'"),
        ("y,g,p\n1,a,inf\n", "--score p", "outside [0, 1]"),
        ("y,g,p\n1,a,0.5\n", "", "name the model's output"),
        ("y,g,p\n1,a,0.5\n", "--score q", "no column 'q' (--score)"),
        ("y,g,p\n1,a,0.5\n", "--score p --threshold 2", "--threshold 2: must lie in [0, 1]"),
        ("y,g,p\n1,a,0.5\n", "--score p --bins 1", "--bins 1: must lie between"),
        ("y,g,p\n1,a,0.5\n", "--score y", "column 'y' is named more than once"),
        ("y,g,p\n", "--score p", "the file has no rows"),
        ("", "--score p", "the file is empty"),
        ("y,g,g\n1,a,0.5\n", "--score g", "column 'g' is in the header more than once"),
        ("y,g,p\n,a,0.5\n", "--score p", "no row has both a label and a prediction"),
        ("y,g,d\n1,a,2\n0,a,1\n", "--decision d", "decision '2' is none of the classes"),
        (
            "y,g,p\na,a,0.5\nb,a,0.1\nc,a,0.2\n",
            "--score p",
            "3 classes need one --score column each",
        ),
        ("y,g,p,q\n1,a,0.5,0.9\n", "--score p --score q", "must add up to 1"),
        (
            "y,g,p\n1,a,0.5\n",
            "--score p --group g=b,c",
            "column 'g' holds 'a', which --group does not",
        ),
        ("y,g,p\n1,a,0.5\n", "--score p --min-cell 2", "--min-cell 2: must be at least 3"),
        ("y,g,p\n1,a,0.5\n", "--score p --epsilon -1", "--epsilon -1: must lie between"),
        ("y,g,p\n1,a,0.5\n", "--score p --epsilon 1 --min-cell 10", "choose one"),
        ("y,g,p\n1,a,0.5\n", "--score p --delta 0.1", "--delta needs --epsilon"),
        ("y,g,p\n1,a,0.5\n", "--score p --name ''", "must be proper text, and not empty"),
    ],
)
def test_mistakes_are_said_in_one_line(tmp_path, capsys, monkeypatch, text, options, said):
    monkeypatch.chdir(tmp_path)
    Path("p.csv").write_text(text)
    import shlex

    group = [] if "--group" in options else ["--group", "g"]
    code, out, err = run(capsys, "measure", "p.csv", "--label", "y", *group, *shlex.split(options))
    lines = [line for line in err.splitlines() if line.startswith("fedgft:")]
    assert code == 2 and out == "" and len(lines) == 1 and said in lines[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.csv"]


def test_an_identifier_is_no_group(tmp_path):
    frame = pl.DataFrame({"y": [0, 1] * 500, "id": range(1000), "d": [0, 1] * 500})
    frame.write_csv(tmp_path / "p.csv")
    with pytest.raises(FedgftError, match="group column 'id' has more than 200 different values"):
        measure_file(tmp_path / "p.csv", label="y", group="id", decision="d")


def test_foreign_files_are_not_overwritten(sites, capsys):
    asked = ("measure", "north.csv", "--label", "y", "--group", "race", "--score", "p", "-o")
    Path("mine.json").write_text('{"precious": 1}')
    code, _, err = run(capsys, *asked, "mine.json")
    assert code == 2 and "is not a file of sums" in err
    assert Path("mine.json").read_text() == '{"precious": 1}'
    assert run(capsys, *asked, "site.json")[0] == 0
    assert run(capsys, *asked, "site.json")[0] == 0  # its own may be measured again
    code, _, err = run(capsys, *asked, "site.json", "--name", "other")
    assert code == 2 and "holds the sums of site 'north'" in err
    folder = sites / "out"
    folder.mkdir()
    (folder / "report.md").write_text("my own notes")
    code, _, err = run(capsys, "audit", "site.json", "--out", "out")
    assert code == 2 and "a report.md is there that is not ours" in err


@pytest.mark.slow
def test_fail_above_sets_the_exit_code(sites, capsys):
    measured(capsys, sites)
    files = ["north.json", "south.json", "east.json"]
    low = audit([read_sums(f) for f in files]).to_dict()["metrics"]["sp"]["low"]
    assert low > 0.02
    code, out, err = run(capsys, "audit", *files, "--json", "--fail-above", "sp=0.02")
    assert code == 3 and json.loads(out)["metrics"] and "sp by race & sex is at least" in err
    assert run(capsys, "audit", *files, "--fail-above", "sp=0.9", "acc=0.9")[0] == 0
    for bad in ("sp", "sp=x", "sp=2", "other=0.1"):
        assert run(capsys, "audit", *files, "--fail-above", bad)[0] == 2
    Path("p.csv").write_text("y,g,d\n" + "1,a,1\n1,b,0\n" * 20)
    run(capsys, "measure", "p.csv", "--label", "y", "--group", "g", "--decision", "d")
    for twice in ("sp=0.1", "sp=0.9"), ("sp=1",), ("xx=0.1",):
        assert run(capsys, "audit", *files, "--fail-above", *twice)[0] == 2
    code, _, err = run(capsys, "audit", "p.json", "--fail-above", "fpr=0.5")
    assert code == 3 and "fpr by g is not estimable: no pass at 50 points" in " ".join(err.split())


@pytest.mark.slow
def test_comparison_of_two_audits(sites, capsys):
    for name, threshold in (("old", "0.4"), ("new", "0.5")):
        (sites / name).mkdir()
        for file in ("north.csv", "south.csv"):
            out = f"{name}/{file[:-4]}.json"
            run(
                capsys,
                "measure",
                file,
                "--label",
                "y",
                "--group",
                "race",
                "--score",
                "p",
                "--threshold",
                threshold,
                "-o",
                out,
            )
    code, out, _ = run(capsys, "audit", "--compare", "old/", "new/", "--json")
    assert code == 0
    sp = json.loads(out)["views"]["race"]["sp"]
    assert sp["change"] == pytest.approx(sp["new"]["gap"] - sp["old"]["gap"])
    assert sp["low"] < sp["change"] < sp["high"]
    rate = sp["groups"]["White"]
    assert rate["low"] < rate["change"] < rate["high"] < 0  # fewer are selected at 0.5
    for name in ("old", "new"):  # reports say the same as the files they were made from
        assert run(capsys, "audit", name, "--out", f"{name}-report")[0] == 0
    _, again, _ = run(capsys, "audit", "--compare", "old-report", "new-report", "--json")
    assert json.loads(again) == json.loads(out)
    code, out, _ = run(capsys, "audit", "--compare", "old", "new", "--out", "change")
    assert code == 0 and "→" in out
    assert (
        "<title>Fairness audits, old and new</title>" in (sites / "change/report.html").read_text()
    )
    assert run(capsys, "audit", "--compare", "old", "nowhere")[0] == 2
    code, _, err = run(capsys, "audit", "--compare", "old", "new", "--out", "old-report")
    assert code == 2 and "a report.html is there that is not ours" in err
    text = (sites / "old-report/audit.json").read_text().replace("White", "\\u001b[31mWhite")
    (sites / "old-report/audit.json").write_text(text)
    _, out, err = run(capsys, "audit", "--compare", "old-report", "old-report")
    assert "White" in out and "\x1b[31mWhite" not in out + err
    (sites / "old-report/audit.json").write_text('{\n  "format": "fedgft-audit-1"}')
    code, _, err = run(capsys, "audit", "--compare", "old-report", "new")
    assert code == 2 and "old-report/audit.json: an audit that lacks a part" in err


def score_ranges(cell: dict, bins: int) -> list[tuple[float, float, int]]:
    """The ranges of the score in a cell of a file: from, up to, number of people."""
    found = []
    for scores in cell.get("scores", {}).values():
        first = scores["first_bin"]
        for n, width in zip(
            scores["histogram"], scores.get("widths") or [1] * len(scores["histogram"]), strict=True
        ):
            found.append((first / bins, (first + width) / bins, n))
            first += width
    return found


@pytest.mark.parametrize(
    ("more", "min_bin"),
    [((), 5), (("--min-bin", "1"), 1), (("--min-bin", "12"), 12), (("--min-cell", "10"), None)],
)
def test_the_file_holds_what_measure_and_the_docs_promise(sites, capsys, more, min_bin):
    """Every promise about people is checked on the file, against the rows."""
    given = ("measure", "north.csv", "--label", "y", "--group", "race", "--score", "p")
    _, out, err = run(capsys, *given, "--json", *more)
    said = " ".join(err.split())
    found = json.loads(out)
    rows = pl.read_csv("north.csv").with_columns(d=(pl.col("p") >= 0.5).cast(pl.Int64))
    counts, spread = [], []
    for cell in found["cells"]:
        (race,), y, d = cell["group"], int(cell["label"]), int(cell["decision"])
        scores = rows.filter(race=race, y=y, d=d)["p"]
        if cell["count"] is None:
            assert 0 < len(scores) < 10
            continue
        assert cell["count"] == len(scores)
        counts.append(cell["count"])
        ranges = score_ranges(cell, found["bins"])
        for low, high, n in ranges:
            inside = ((scores >= low - 1e-9) & (scores < high - 1e-9)).sum()
            assert n == inside and (n == 0 or n >= min_bin)
            spread += [n] * (n > 0)
        if ranges:
            assert cell["count"] >= min_bin
            (entry,) = cell["scores"].values()
            assert ("sum" in entry) == (cell["count"] >= 10)
    reveals = found["reveals"]
    assert reveals == {
        "cells": len(counts),
        "cells_below_10": sum(n < 10 for n in counts),
        "smallest_cell": min(counts),
        "score_counts": len(spread),
        "score_counts_below_5": sum(n < 5 for n in spread),
        "smallest_score_count": min(spread, default=0),
    }
    assert f"the file holds {len(counts)} counts of people by group, label and decision" in said
    assert f"the smallest is {min(counts)}" in said
    warning = f"warning: {reveals['cells_below_10']} of these counts are of fewer than 10 people"
    assert (warning in said) == (min(counts) < 10)
    if min_bin is None:  # no count of few people, and nothing about scores
        assert min(counts) >= 10 and not spread and found["min_bin"] == 0
        assert "of 1 to 9 people withheld, and all scores" in said
        return
    assert found["min_bin"] == min_bin
    assert f"{len(spread)} counts of people by range of the score" in said
    assert f"the smallest is {min(spread)}" in said
    few = reveals["score_counts_below_5"]
    warning = f"warning: {few} of these ranges hold fewer than 5 people, whose scores can be read"
    assert (warning in said) == (min_bin == 1) == (min(spread) == 1)


def test_min_bin_is_at_least_one(sites, capsys):
    given = ("measure", "north.csv", "--label", "y", "--group", "race", "--score", "p")
    code, _, err = run(capsys, *given, "--min-bin", "0")
    assert code == 2 and "--min-bin 0: must be at least 1" in err


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--epsilon", "1"), ("--min-cell", "10")])
def test_nothing_is_left_when_it_is_killed(sites, more):
    """SIGKILL at random moments: the file is there whole, or not at all."""
    import time

    command = [
        sys.executable,
        "-m",
        "fedgft",
        "measure",
        "north.csv",
        "--label",
        "y",
        "--group",
        "race",
        "--score",
        "p",
        "--overwrite",
        *more,
    ]
    for wait in (0.4, 0.8):
        process = subprocess.Popen(command, cwd=sites, stderr=subprocess.DEVNULL)
        time.sleep(wait)
        process.kill()
        process.wait()
        if (sites / "north.json").exists():
            assert read_sums(sites / "north.json").rows() > 0
    subprocess.run(command, cwd=sites, check=True, stderr=subprocess.DEVNULL)
    assert read_sums(sites / "north.json").rows() > 0


def test_two_score_columns_for_two_classes_follow_the_threshold(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("y,g,p0,p1\n1,a,0.6,0.4\n0,a,0.65,0.35\n1,b,0.7,0.3\n0,b,0.8,0.2\n")
    two = measure_file(path, label="y", group="g", score=["p0", "p1"], threshold=0.3)
    one = measure_file(path, label="y", group="g", score="p1", threshold=0.3)
    assert two.spec == one.spec
    for group, table in one.sites["p"].tables.items():
        assert np.array_equal(table, two.sites["p"].tables[group])


NUMBERS = ("63.2 (60.7 to 65.1)", "-1.1 (-13.5 to 1.3)", "–", "not estimable (n=3)")


@pytest.mark.parametrize("width", [60, 80, 100, 120, 300])
def test_tables_fit_the_terminal(width, capsys):
    """No line is longer than the terminal, and neither words nor intervals are broken."""
    header = ("metric", "farthest apart", *(f"false-positive-rate at site {i}" for i in range(9)))
    names = ("false-positive-rate parity", "White & Female / Asian-Pac-Islander & Male")
    rows = tuple((*names, *(NUMBERS[(i + j) % 4] for i in range(9))) for j in range(3))
    table = Table("[bold]Gaps[/bold] by \x1b[31mrace & sex", header, rows, 2, ("A note. " * 30,))
    print_table(table, width=width)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "[bold]Gaps[/bold] by \ufffd[31mrace & sex" in out  # no markup, no control characters
    for piece in ("(60.7 to 65.1)", "(-13.5 to 1.3)", "Asian-Pac-Islander", "false-positive-rate"):
        assert piece in out
    assert out.count("(-13.5 to 1.3)") == sum("-13.5" in cell for row in rows for cell in row)
    parts = out.count("metric ")
    assert (parts > 1) == (width < 300)  # parts below each other repeat the names of the rows


def test_one_long_word_is_folded_and_no_number(capsys):
    table = Table("Gaps", ("group", "gap"), (("x" * 300, "-1.1 (-13.5 to 1.3)"),), 1)
    print_table(table, width=80)
    out = capsys.readouterr().out
    assert out.count("x") == 300 and "(-13.5 to 1.3)" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_an_audit_fits_the_terminal(sites, capsys, columns):
    measured(capsys, sites)
    command = [sys.executable, "-m", "fedgft", "audit", "north.json", "south.json", "east.json"]
    environment = os.environ | {"COLUMNS": str(columns)}
    short, wide = (
        subprocess.run(
            [*command, *more], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for more in ((), ("--wide",))
    )
    assert max(map(len, short.splitlines())) <= columns
    assert "average within" in short and "TV" not in short and "DH" not in short
    for word in ("TV", "DH", "bound", "ratio"):
        assert word in wide
    assert "how differently the two groups are spread over the" in " ".join(wide.split())


def test_rows_without_a_group_are_no_group(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = {"y": [0, 1] * 3000, "sex": ["M", "F"] * 2995 + [None] * 10, "p": [0.2, 0.8] * 3000}
    pl.DataFrame(rows).write_csv(tmp_path / "n.csv")
    asked = ("--label", "y", "--group", "sex", "--score", "p", "--out", "n.json")
    code, _, err = run(capsys, "measure", "n.csv", *asked)
    said = " ".join(err.split())
    assert code == 0 and "n: 6,000 rows in 2 groups" in said
    assert "rows without a recorded group: 10" in said
    rows = {name: values[:5990] for name, values in rows.items()}
    pl.DataFrame(rows).write_csv(tmp_path / "m.csv")
    code, _, err = run(capsys, "measure", "m.csv", *asked[:-1], "m.json")
    assert code == 0 and "the smallest is 2,995" in " ".join(err.split())


def test_a_long_name_of_a_site_shortens_the_name_of_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [(name, i % 2, "mf"[i % 2], 0.5) for name in ("ü" * 300, "ok") for i in range(40)]
    pl.DataFrame(rows, ["site", "y", "sex", "p"], orient="row").write_csv("t.csv")
    asked = ("measure", "t.csv", "--label", "y", "--group", "sex", "--score", "p")
    code, _, err = run(capsys, *asked, "--site", "site", "--out", "sums")
    assert code == 0, err
    assert sorted(path.name for path in Path("sums").iterdir()) == ["ok.json", "ü" * 50 + ".json"]
    assert run(capsys, *asked, "--name", "x" * 300)[0] == 0
    assert Path("x" * 100 + ".json").exists()
    assert json.loads(Path("x" * 100 + ".json").read_text())["site"] == "x" * 300


def test_a_warning_about_few_people_is_also_printed_with_quiet(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = ["1,M,0.9"] * 20 + ["0,M,0.1"] * 20 + ["0,F,0.1"] * 20 + ["1,F,0.9"] * 3
    Path("t.csv").write_text("\n".join(["y,sex,p", *rows]))
    asked = ("measure", "t.csv", "--label", "y", "--group", "sex", "--score", "p", "--quiet")
    code, out, err = run(capsys, *asked)
    assert (code, out) == (0, "")
    assert err.startswith("warning: 1 of these counts is of fewer than 10 people")
    assert err.count("\n") == 1


def test_a_tolerance_of_zero_is_none_but_zero(sites, capsys):
    """It was once taken for no tolerance, so that the default of 5 points counted."""
    measured(capsys, sites)
    asked = ("audit", "north.json", "south.json", "east.json")
    for text in ("0", "0%", "0.0"):
        code, out, _ = run(capsys, *asked, "--tolerance", text)
        assert code == 0 and "tolerance of 0 points" in out and "default" not in out
    for text, said in (
        ("", "--tolerance needs a value"),
        (",", "--tolerance needs a value"),
        ("0,02", "--tolerance 0,02: give one gap for all metrics, such as 0.02, or METRIC=GAP"),
        ("sp=0.02,0.03", "--tolerance sp=0.02,0.03: give one gap for all metrics"),
    ):
        code, out, err = run(capsys, *asked, "--tolerance", text)
        assert (code, out) == (2, "") and said in err
    assert run(capsys, *asked, "--fail-above", "sp=0.9,eop=0.9")[0] == 0
    code, _, err = run(capsys, *asked, "--fail-above", ",")
    assert code == 2 and "--fail-above needs a value" in err
    code, _, err = run(capsys, *asked, "--adjust", "sp=0.9,sp=0.8")
    assert code == 2 and "--adjust sp=0.8: sp is given twice" in err


def test_what_says_how_to_go_on(sites, capsys):
    measured(capsys, sites)
    asked = ("--label", "y", "--group", "race", "--score", "p")
    code, _, err = run(capsys, "measure", "north.csv", "south.csv", *asked)
    assert code == 2 and "--name is missing: these files are one table of one site" in err
    code, _, err = run(capsys, "audit", "north.json", "north.json")
    assert code == 2 and "measure the other site under another name" in err
    code, _, err = run(capsys, "audit", "north.json", "--out", "north.csv")
    assert code == 2 and "--out north.csv: is a file; name a folder" in err
