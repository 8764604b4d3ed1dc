"""Where a submission would stand on a board of methods."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedgft.bench import TRACKS, read_submission, score_submission
from fedgft.bench.bench_runner import BenchPlan, run_bench
from fedgft.bench.entrants import TARGETS, choose_entrants
from fedgft.bench.scoreboard import Score
from fedgft.bench.standings import find_standings, read_board
from fedgft.bench.submissions import TrackScore
from fedgft.data.generated import synthetic
from fedgft.engine import Settings
from fedgft.errors import FedgftError
from test_bench_tracks import make_track


@pytest.fixture(autouse=True)
def track(monkeypatch):
    data = synthetic(rows=1200, features=3, gap=0.3)
    made = make_track(read=lambda: data)
    monkeypatch.setitem(TRACKS, "tiny", made)
    return made


def submit(track, folder, decide) -> TrackScore:
    """The score of decisions that are a function of labels and groups."""
    parts = []
    data = track.load()
    for seed in range(track.seeds):
        rows = track.split(seed).federation.test
        columns = {"track": "tiny", "version": 1, "seed": seed, "row": rows}
        parts.append(pd.DataFrame({**columns, "decision": decide(data, rows)}))
    file = folder / "mine.csv"
    pd.concat(parts).to_csv(file, index=False)
    (score,) = score_submission(read_submission(file))
    return score


def rival(method: str, accuracy: float, *, keeps: bool = True, **changes) -> Score:
    names = {"track": "tiny", "metric": "sp", "method": method, "label": method.title()}
    where = {"league": "blind", "target": 0.02}
    return Score(**{**names, **where, "accuracy": accuracy, "keeps": keeps, **changes})


def constant(data, rows):
    return np.ones(len(rows), int)


def by_group(data, rows):
    return data.groups[rows]


def test_the_rank_counts_more_accurate_methods_that_keep_the_target(tmp_path, track):
    score = submit(track, tmp_path, constant)
    own = score.summarize()["accuracy"]
    board = [
        rival("best", own + 0.2),
        rival("better", own + 0.1),
        rival("worse", own - 0.1),
        rival("unfair", own + 0.3, keeps=False),
        rival("other", own + 0.3, metric="eop"),
        rival("aware", own + 0.3, league="aware"),
        rival("loose", own + 0.3, target=0.05),
        rival("elsewhere", own + 0.3, track="other"),
    ]
    found = {(s.metric, s.target): s for s in find_standings([score], board, "blind")}
    place = found["sp", 0.02]
    assert (place.keeps, place.rank, place.kept_by) == (True, 3, 3)
    assert (place.best, place.best_accuracy) == ("Best", own + 0.2)
    assert set(found) == {("sp", 0.02), ("eop", 0.02), ("sp", 0.05)}  # where there are rivals
    (aware,) = find_standings([score], board, "aware")
    assert aware.rank == 2 and aware.best == "Aware"


def test_a_submission_with_a_gap_has_no_rank(tmp_path, track):
    score = submit(track, tmp_path, by_group)
    assert score.summarize()["metrics"]["sp"]["gap"] == 1.0
    (place,) = find_standings([score], [rival("unfair", 0.9, keeps=False)], "blind")
    assert (place.keeps, place.rank, place.kept_by, place.best) == (False, None, 0, "")


@pytest.mark.slow
def test_a_board_that_was_run_ranks_a_submission(tmp_path, track):
    plan = BenchPlan((track,), choose_entrants(["fedavg"]), settings=Settings(rounds=2))
    run_bench(plan, tmp_path / "board", lambda what, amount: None)
    score = submit(track, tmp_path, constant)
    board = read_board(tmp_path / "board", [score])
    found = find_standings([score], board, "blind")
    assert [(s.metric, s.target) for s in found] == [
        (name, target) for name in track.metrics for target in TARGETS
    ]
    assert all(s.keeps for s in found)  # all decisions are positive: no gap at all
    kept = {(s.metric, s.target) for s in board if s.keeps}
    assert {(s.metric, s.target) for s in found if s.kept_by} == kept


def test_boards_that_do_not_fit_are_refused(tmp_path, track):
    score = submit(track, tmp_path, constant)
    with pytest.raises(FedgftError, match="is not there"):
        read_board(tmp_path, [score])
    plan = BenchPlan((track,), choose_entrants(["fedavg"]))
    about = plan.describe()
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({**about, "tracks": {"tiny": 2}}))
    with pytest.raises(FedgftError, match="has version 2 of tiny, and this is version 1"):
        read_board(tmp_path, [score])
    file.write_text(json.dumps({**about, "tracks": {"adult-sex": 1}}))
    with pytest.raises(FedgftError, match="has no track tiny; its tracks: adult-sex") as error:
        read_board(tmp_path, [replace(score)])
    assert "\n" not in str(error.value)
