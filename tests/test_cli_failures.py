"""Failures during a command: no lost or incomplete files, and no traceback."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from test_cli import QUICK, run, table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning"),
]

FEDGFT = [sys.executable, "-m", "fedgft"]


def tiny(path: Path) -> Path:
    """So few rows that a group has no test row of the event."""
    rng = np.random.default_rng(0)
    rows = 44
    sex = ["f"] * 4 + ["m"] * (rows - 4)
    part = ["train"] * 4 + ["train", "train", "test", "test"] * 10
    x = rng.normal(size=rows)
    frame = pl.DataFrame({"x": x, "sex": sex, "ok": [0, 1] * (rows // 2), "part": part})
    frame.write_csv(path)
    return path


def test_a_gap_that_is_never_estimable_is_null_and_drawn_as_such(capsys, tmp_path):
    where = [
        "--data",
        tiny(tmp_path / "t.csv"),
        "--label",
        "ok",
        "--group",
        "sex",
        "--split",
        "part",
    ]
    more = ["--clients", "2", "--metric", "eop", "--out", tmp_path / "o"]
    code, out, err = run(capsys, "train", *where, *more, "--json", *QUICK)
    assert code == 0, err
    assert json.loads(out)["gap_hard_test"] is None
    assert (tmp_path / "o/rounds.png").exists()
    code, out, _ = run(capsys, "train", *where, *more, *QUICK)
    assert "not estimable" in out


def test_eval_every_zero(capsys, tmp_path):
    code, out, _ = run(
        capsys,
        "train",
        "--data",
        "synthetic",
        "--eval-every",
        "0",
        "--json",
        "--out",
        tmp_path,
        *QUICK,
    )
    assert code == 0
    assert all(c["accuracy_fedavg"] is not None for c in json.loads(out)["clients"])


def test_init_counts_under_the_papers_protocol_too(capsys, tmp_path):
    base = ["train", "--data", "synthetic", *QUICK, "--json", "--protocol", "paper"]
    run(capsys, *base, "--out", tmp_path / "a")
    model = tmp_path / "a/model.safetensors"
    _, plain, _ = run(capsys, *base, "--out", tmp_path / "b")
    _, warm, _ = run(capsys, *base, "--init", model, "--out", tmp_path / "c")
    assert json.loads(plain)["accuracy"] != json.loads(warm)["accuracy"]


@pytest.mark.parametrize("change", ["columns", "model", "classes"])
def test_init_that_does_not_fit_is_named(change, capsys, tmp_path):
    file = table(tmp_path / "t.csv")
    where = ["train", "--data", file, "--label", "ok", "--group", "sex", *QUICK]
    run(capsys, *where, "--out", tmp_path / "a")
    other = {
        "columns": ["--client", "site"],
        "model": ["--model", "mlp"],
        "classes": ["--positive", "0"],
    }
    model = tmp_path / "a/model.safetensors"
    code, _, err = run(capsys, *where, *other[change], "--init", model, "--out", tmp_path / "b")
    assert code == 2
    assert "model.safetensors" in err
    assert not (tmp_path / "b").exists()


def test_several_values_may_not_be_none_and_are_not_done_twice(capsys):
    assert run(capsys, "compare", "--data", "synthetic", "--methods")[0] == 2
    twice = ["--methods", "fedavg", "fedavg", "--alpha", "0.5", "0.5"]
    _, out, _ = run(capsys, "compare", "--data", "synthetic", *twice, "--json", *QUICK)
    assert len(json.loads(out)) == 1


def test_results_of_another_run_are_not_overwritten(capsys, tmp_path):
    file = table(tmp_path / "t.csv")
    out = tmp_path / "o"
    how = ["--label", "ok", "--group", "sex", "--methods", "fedavg", *QUICK, "--out", out]
    first = ["compare", file, *how]
    assert run(capsys, *first)[0] == 0
    written = (out / "rows.parquet").read_bytes()
    assert run(capsys, *first, "--threads", 1)[0] == 0  # the same results
    for command, why in (
        ([*first, "--epochs", 2], "(other --epochs)"),
        (["train", file, *how[:4], *QUICK, "--out", out], "(of `fedgft compare`)"),
        (["frontier", file, *how[:4], "--out", out], "(of `fedgft compare`)"),
        (["demo", "--out", out], "(of `fedgft compare`)"),
    ):
        code, said, err = run(capsys, *command)
        assert (code, said) == (2, "") and why in err and "--overwrite" in err
    table(file, rows=300)
    code, _, err = run(capsys, *first)
    assert code == 2 and "(other content of the tables)" in err
    (out / "run.json").write_text('{"options": 3}')
    code, _, err = run(capsys, *first)
    assert code == 2 and "holds the results of another run;" in err
    code, _, err = run(capsys, *first, "--overwrite")
    assert code == 0, err
    assert (out / "rows.parquet").read_bytes() != written


def test_tables_of_the_user_are_not_overwritten(capsys, tmp_path):
    file = table(tmp_path / "t.csv")
    how = ["--label", "ok", "--group", "sex", *QUICK, "--out", tmp_path / "o"]
    assert run(capsys, "train", file, *how)[0] == 0
    predict = ["predict", tmp_path / "o/model.safetensors", file, "--out"]
    before = file.read_bytes()
    code, _, err = run(capsys, *predict, file)
    assert code == 2 and "holds no predictions" in err and file.read_bytes() == before
    for _ in range(2):  # earlier predictions are replaced
        assert run(capsys, *predict, tmp_path / "new" / "folder" / "scored.csv")[0] == 0
    get = ["data", "get", "loans", "--out", tmp_path / "loans"]
    for _ in range(2):
        assert run(capsys, *get)[0] == 0
    (tmp_path / "loans" / "north.csv").write_text("mine")
    code, _, err = run(capsys, *get)
    assert code == 2 and "north.csv: exists and has other content" in err


def test_odd_names_of_files(capsys, tmp_path):
    file = table(tmp_path / "a$b_{x$.csv")
    where = ["--data", file, "--label", "ok", "--group", "sex", "--out", tmp_path / "o"]
    assert run(capsys, "compare", *where, *QUICK)[0] == 0


def test_predict_keeps_the_users_own_columns(capsys, tmp_path):
    file = table(tmp_path / "t.csv")
    run(
        capsys,
        "train",
        "--data",
        file,
        "--label",
        "ok",
        "--group",
        "sex",
        "--out",
        tmp_path,
        *QUICK,
    )
    pl.read_csv(file).with_columns(score=1).write_csv(tmp_path / "s.csv")
    code, _, err = run(capsys, "predict", tmp_path / "model.safetensors", tmp_path / "s.csv")
    assert code == 2
    assert "'score'" in err
    code, out, _ = run(capsys, "predict", tmp_path / "model.safetensors", file, "--json")
    assert len(json.loads(out)) == 400
    late = datetime(2020, 1, 2, 3, 4)
    odd = pl.read_csv(file).with_columns(
        pl.lit(late).alias("seen"),
        pl.lit(late.date()).alias("day"),
        pl.lit(float("nan")).alias("by"),
        pl.lit(Decimal("1.50")).alias("cost"),
    )
    odd.write_parquet(tmp_path / "odd.parquet")
    code, out, err = run(
        capsys, "predict", tmp_path / "model.safetensors", tmp_path / "odd.parquet", "--json"
    )
    assert code == 0, err
    first = json.loads(out)[0]
    assert first["seen"] == "2020-01-02T03:04:00" and first["day"] == "2020-01-02"
    assert first["by"] is None and first["cost"] == "1.50" and 0 < first["score"] < 1
    assert (
        run(capsys, "predict", tmp_path / "model.safetensors", file, "-o", tmp_path / "x.txt")[0]
        == 2
    )
    (tmp_path / "folder.csv").mkdir()
    assert (
        run(capsys, "predict", tmp_path / "model.safetensors", file, "-o", tmp_path / "folder.csv")[
            0
        ]
        == 2
    )
    assert not list(tmp_path.glob(".*"))


def test_predict_of_three_classes_writes_over_no_column_and_minds_no_other(capsys, tmp_path):
    """`score` is not among those it writes then, `score_b` is."""
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "x": rng.normal(size=300),
            "sex": rng.choice(["f", "m"], 300),
            "ok": rng.choice(["a", "b", "c"], 300),
        }
    )
    frame.write_csv(tmp_path / "t.csv")
    where = ["--data", tmp_path / "t.csv", "--label", "ok", "--group", "sex", "--out", tmp_path]
    assert run(capsys, "train", *where, *QUICK)[0] == 0
    for name, code in (("score", 0), ("score_b", 2), ("decision", 2)):
        frame.with_columns(pl.lit(7).alias(name)).write_csv(tmp_path / "s.csv")
        done, out, err = run(capsys, "predict", tmp_path / "model.safetensors", tmp_path / "s.csv")
        assert done == code and (repr(name) in err or not code)
        if not code:
            found = pl.read_csv(out.encode())
            assert (found[name] == 7).all()
            assert found.columns[-4:] == ["score_a", "score_b", "score_c", "decision"]


NAMELESS = [
    (shutil.Error("no copy"), "no copy"),
    (OSError("torn"), "torn"),
    (OSError(28, "No space left"), "stdout: No space left"),
    (OSError(28, "No space left", "a.csv"), "a.csv: No space left"),
]


@pytest.mark.parametrize(("error", "said"), NAMELESS)
def test_an_error_of_the_system_is_one_line_that_names_what_it_can(
    error, said, capsys, monkeypatch
):
    def meta(*_, **__):
        raise error

    monkeypatch.setattr("fedgft.cli.app.load_command", lambda arguments: None)
    monkeypatch.setattr("fedgft.cli.app.app", SimpleNamespace(meta=meta))
    assert run(capsys, "data", "list") == (2, "", f"fedgft: {said}\n")


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x08\0\0\0\0\0\0\0{}      "])
def test_a_file_that_is_no_model(content, capsys, tmp_path):
    (tmp_path / "m.safetensors").write_bytes(content)
    code, _, err = run(capsys, "predict", tmp_path / "m.safetensors", table(tmp_path / "t.csv"))
    assert code == 2
    assert "m.safetensors" in err


def test_the_results_are_saved_when_the_reader_hangs_up(tmp_path):
    command = [
        *FEDGFT,
        "compare",
        "--data",
        "synthetic",
        "--out",
        str(tmp_path / "o"),
        *QUICK,
        "--json",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        child.stdout.close()
        err = child.stderr.read()
    assert "Traceback" not in err
    assert (tmp_path / "o/rows.parquet").exists()


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    command = [
        *FEDGFT,
        "train",
        "--data",
        "synthetic",
        "--rounds",
        "100000",
        "--out",
        str(tmp_path / "o"),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        until = time.monotonic() + 60
        while not (tmp_path / "o").exists() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1.0)
        os.kill(child.pid, signal.SIGINT)
        err = child.stderr.read()
    assert child.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not (tmp_path / "o").exists()


def results(folder: Path) -> dict[str, object]:
    """Everything a reader sees of it, and the rows without the time they took."""
    found: dict[str, object] = {
        str(p.relative_to(folder)): p.read_bytes()
        for pattern in ("*.md", "*.html", "figures/*.svg")
        for p in sorted(folder.glob(pattern))
    }
    for path in sorted(folder.glob("*.parquet")):
        found[path.name] = pl.read_parquet(path).drop("seconds").rows()
    return found


def test_reproduce_killed_three_times_ends_as_if_it_had_not_been(tmp_path, compas):
    """While cells are trained, later while cells are trained, and while figures are drawn."""
    command = [*FEDGFT, "reproduce", "table1", "penalty", "--data", "compas", "--seeds", "3"]
    calm = tmp_path / "calm"
    killed = tmp_path / "killed"
    done = subprocess.run([*command, "--out", calm], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cells = len(list((calm / "cells").glob("*.json")))
    reached = (
        lambda: len(list((killed / "cells").glob("*.json"))) >= cells // 10,
        lambda: len(list((killed / "cells").glob("*.json"))) >= cells // 2,
        lambda: any((killed / "figures").glob("*.png")),
    )
    rng = np.random.default_rng()
    kept = {}
    for there in reached:
        process = subprocess.Popen(
            [*command, "--out", killed], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        while not there() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        assert process.poll() is None, "it was over before it could be killed"
        process.kill()
        assert process.wait() == -signal.SIGKILL
        now = {p: p.stat().st_mtime_ns for p in (killed / "cells").glob("*.json")}
        assert kept.items() <= now.items()  # what was finished is not done again
        kept = now
    subprocess.run([*command, "--out", killed], capture_output=True, timeout=300, check=True)
    assert results(killed) == results(calm)
    assert not list(killed.rglob("*.part"))


def test_overwrite_removes_the_results_of_the_other_run_and_nothing_else(capsys, tmp_path):
    file = table(tmp_path / "t.csv")
    out = tmp_path / "o"
    how = [file, "--label", "ok", "--group", "sex", *QUICK, "--out", out]
    assert run(capsys, "train", *how, "--all-models")[0] == 0
    mine = (out / "mine.txt", out / "model-mine.safetensors", out / "report" / "notes.txt")
    for path in mine:
        path.write_text("mine")
    before = sorted(out.rglob("*"))
    assert run(capsys, "compare", *how, "--methods", "nope", "--overwrite")[0] == 2
    assert sorted(out.rglob("*")) == before
    assert run(capsys, "compare", *how, "--methods", "fedavg", "--overwrite")[0] == 0
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    written = {"rows.parquet", "rounds.parquet", "rounds.png", "rounds.svg", "run.json"}
    assert found == written | {str(path.relative_to(out)) for path in mine}


def test_a_file_of_the_user_named_like_a_result_is_not_replaced(capsys, tmp_path):
    how = [table(tmp_path / "t.csv"), "--label", "ok", "--group", "sex", *QUICK]
    card = tmp_path / "o" / "MODEL.md"
    card.parent.mkdir()
    card.write_text("mine")
    code, _, err = run(capsys, "train", *how, "--out", card.parent)
    assert code == 2 and "--overwrite" in err and card.read_text() == "mine"
    (tmp_path / "p" / "run.json").mkdir(parents=True)
    code, _, err = run(capsys, "train", *how, "--out", tmp_path / "p", "--overwrite")
    assert code == 2 and "run.json is a folder" in err and len(list(card.parent.iterdir())) == 1


def test_a_train_that_is_killed_may_be_repeated(tmp_path):
    """Killed while it writes the report, after the model is saved."""
    file = table(tmp_path / "t.csv")
    command = ["train", file, "--label", "ok", "--group", "sex", *QUICK, "--out", tmp_path / "o"]
    code = "import os, signal, fedgft.cli.train as t, fedgft.cli.app as a\n"
    code += "t._save_report = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    code += f"a.run({[str(word) for word in command]!r})"
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "o" / "model.safetensors").exists()
    again = subprocess.run([*FEDGFT, *map(str, command)], capture_output=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "o" / "report" / "report.html").exists()


def test_the_next_commands_after_training_on_several_tables(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [table(Path(f"{name}.csv")) for name in ("north", "south", "east", "west")]
    how = ["--label", "ok", "--group", "sex", *QUICK, "--out", "o"]
    code, out, err = run(capsys, "train", *files, *how)
    assert code == 0, err
    said = " ".join(out.replace("\\\n", " ").split())
    for name in ("north", "south"):
        assert f"fedgft predict o/model.safetensors {name}.csv --out {name}-scored.csv" in said
        assert f"fedgft measure {name}-scored.csv --label ok --group sex --score score" in said
    assert "# and so on, for 2 more tables fedgft audit north-scored.json south-scored.json" in said


def test_a_table_with_a_decision_of_its_own_is_not_replaced_by_predictions(capsys, tmp_path):
    file = table(tmp_path / "t.csv")
    how = ["--label", "ok", "--group", "sex", *QUICK, "--out", tmp_path / "o"]
    assert run(capsys, "train", file, *how)[0] == 0
    mine = tmp_path / "mine.csv"
    mine.write_text("person,decision\n1,yes\n")
    code, _, err = run(capsys, "predict", tmp_path / "o/model.safetensors", file, "--out", mine)
    assert code == 2 and "holds no predictions" in err and "person" in mine.read_text()


def test_wrong_options_are_named_before_the_folder_is_looked_at(capsys, tmp_path):
    file = table(tmp_path / "t.csv")
    how = [file, "--label", "ok", "--group", "sex", *QUICK, "--out", tmp_path / "o"]
    assert run(capsys, "compare", *how, "--methods", "fedavg")[0] == 0
    plain = [*how[:5], "--seeds", 1, "--rounds", 2, "--out", tmp_path / "o"]
    for command in ("train", "compare", "frontier"):
        code, _, err = run(capsys, command, *plain, "--target", "200%")
        assert code == 2 and "--target must be below 1" in err
    code, _, err = run(capsys, "train", *how, "--missing", "")
    assert code == 2 and "--missing needs a value" in err
    code, _, err = run(capsys, "train", *how[:3], "--group", "sex,sex", "--out", tmp_path / "n")
    assert code == 2 and "--group names the column 'sex' twice" in err
