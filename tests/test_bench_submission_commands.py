"""`fedgft bench tracks`, `rows` and `score`."""

import json
import re

import numpy as np
import polars as pl
import pytest

from fedgft.bench import TRACKS
from fedgft.bench.bench_runner import BenchPlan, run_bench
from fedgft.bench.entrants import choose_entrants
from fedgft.data.generated import synthetic
from fedgft.engine import Settings
from fedgft.errors import FedgftError
from test_bench_tracks import make_track
from test_cli import run


@pytest.fixture(autouse=True)
def track(monkeypatch):
    data = synthetic(rows=1200, features=3, gap=0.3)
    made = make_track(read=lambda: data)
    monkeypatch.setitem(TRACKS, "tiny", made)
    return made


def submit(track, file, *, right: bool = True) -> str:
    """A file whose decisions are all right, or all wrong."""
    labels = track.load().labels
    tests = [track.split(seed).federation.test for seed in range(track.seeds)]
    parts = [
        pl.DataFrame({"seed": seed, "row": rows, "decision": labels[rows] == int(right)})
        for seed, rows in enumerate(tests)
    ]
    made = pl.concat(parts).with_columns(pl.lit("tiny").alias("track"), pl.lit(1).alias("version"))
    made.with_columns(pl.col("decision").cast(int)).write_csv(file)
    return str(file)


def test_tracks_are_listed(capsys):
    code, out, _ = run(capsys, "bench", "tracks")
    assert code == 0 and all(re.search(rf"^{name} ", out, re.M) for name in TRACKS)
    code, out, _ = run(capsys, "bench", "tracks", "--json")
    found = {each["track"]: each for each in json.loads(out)}
    assert list(found) == list(TRACKS)
    assert found["compas-race"]["sha256"] == TRACKS["compas-race"].sha256
    assert all(each["source"] and each["license"] and each["seeds"] for each in found.values())


def test_a_datasheet_has_counts(capsys, track):
    code, out, _ = run(capsys, "bench", "tracks", "tiny")
    data = track.load()
    assert code == 0 and "source: generated" in out
    for g, name in enumerate(data.group_names):
        rows = (data.groups == g).sum()
        share = 100 * data.labels[data.groups == g].mean()
        assert re.search(rf"^{name} +{rows:,} +{share:.1f}$", out, re.M)
    code, out, _ = run(capsys, "bench", "tracks", "tiny", "--json")
    assert json.loads(out)["counts"]["rows"] == 1200


def test_a_datasheet_without_rows_has_no_counts(capsys, track, monkeypatch):
    def fail():
        raise FedgftError("the rows are elsewhere")

    monkeypatch.setitem(TRACKS, "tiny", make_track(read=fail, is_fetched=False))
    code, out, err = run(capsys, "bench", "tracks", "tiny")
    assert code == 0 and "source: generated" in out and "Rows by group" not in out
    assert "the rows are elsewhere" in err
    monkeypatch.setitem(TRACKS, "tiny", make_track(read=fail))
    code, out, err = run(capsys, "bench", "tracks", "tiny")
    assert (code, out) == (2, "") and "the rows are elsewhere" in err


def test_rows_are_written(capsys, track, tmp_path):
    code, out, err = run(capsys, "bench", "rows", "--track", "tiny", "--out", tmp_path / "a")
    assert (code, out) == (0, "") and err.count("wrote") == 3
    table = pl.read_parquet(tmp_path / "a" / "tiny-table.parquet")
    np.testing.assert_array_equal(table["label"], track.load().labels)
    code, _, _ = run(capsys, "bench", "rows", "--track", "tiny", "--out", tmp_path / "a", "--csv")
    assert code == 0 and (tmp_path / "a" / "tiny-rows.csv").exists()


def test_a_submission_is_scored(capsys, track, tmp_path):
    file = submit(track, tmp_path / "mine.csv")
    code, out, _ = run(capsys, "bench", "score", file, "--out", tmp_path / "new" / "score.json")
    assert code == 0 and "tiny, version 1: test rows, 2 seeds" in out
    assert re.search(r"^accuracy +100\.0 +100\.0 to 100\.0", out, re.M)
    assert re.search(r"^gap, eo +0\.0 ", out, re.M)
    code, out, _ = run(capsys, "bench", "score", file, "--json")
    assert code == 0 and json.loads(out) == json.loads((tmp_path / "new/score.json").read_text())
    wrong = submit(track, tmp_path / "wrong.csv", right=False)
    assert json.loads(run(capsys, "bench", "score", wrong, "--json")[1])[0]["accuracy"] == 0


@pytest.mark.slow
def test_a_submission_is_placed_on_a_board(capsys, track, tmp_path):
    plan = BenchPlan((track,), choose_entrants(["fedavg"]), settings=Settings(rounds=2))
    run_bench(plan, tmp_path / "board", lambda what, amount: None)
    file = submit(track, tmp_path / "mine.csv")
    code, out, _ = run(capsys, "bench", "score", file, "--board", tmp_path / "board")
    assert code == 0 and "where the submission would stand, league blind" in out
    assert re.search(r"^eo +5\.0 +1 ", out, re.M)  # all labels are right: no gap in either rate
    assert re.search(r"^sp +0\.0 +not kept ", out, re.M)
    command = ("bench", "score", file, "--board", tmp_path / "board", "--json")
    (found,) = json.loads(run(capsys, *command)[1])
    assert len(found["standings"]) == 12 and found["league"] == "blind"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("tracks tinny", "'tinny' is not known; did you mean 'tiny'?"),
        ("rows --track adult", "'adult' is not known"),
        ("rows", "--track is missing"),
        ("score", "SUBMISSION is missing"),
        ("score none.csv", "none.csv: no such file"),
        ("score FILE --seeds 0", "--seeds must be at least 1, not 0"),
        ("score FILE --seeds 1", "seed 1: the file must hold seeds 0 to 0"),
        ("score FILE --board none", "bench.json: is not there"),
        ("score FILE --out FOLDER", "cannot be written (it is a folder)"),
        ("score FOLDER", "is a folder; name a .csv or .parquet file"),
    ],
)
def test_mistakes_are_explained_in_one_line(capsys, track, tmp_path, words, says):
    file = submit(track, tmp_path / "mine.csv")
    words = [{"FILE": file, "FOLDER": tmp_path}.get(word, word) for word in words.split()]
    code, out, err = run(capsys, "bench", *words)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert says in err


def test_a_preliminary_score_says_so(capsys, track, tmp_path):
    file = submit(track, tmp_path / "mine.csv")
    first = pl.read_csv(file).filter(seed=0)
    first.write_csv(tmp_path / "first.csv")
    code, _, err = run(capsys, "bench", "score", tmp_path / "first.csv", "--seeds", "1")
    assert code == 0 and "1 of 2 seeds: a preliminary score" in err
