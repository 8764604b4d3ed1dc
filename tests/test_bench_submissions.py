"""Submissions: a good one has Fairlearn's numbers, a broken one is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from fairlearn.metrics import (
    demographic_parity_difference,
    equal_opportunity_difference,
    equalized_odds_difference,
)
from sklearn.metrics import accuracy_score

from fedgft.bench import TRACKS, read_submission, score_submission
from fedgft.bench.tracks import Track
from fedgft.data.generated import synthetic
from fedgft.errors import FedgftError
from test_bench_tracks import make_track

DIFFERENCES = {
    "sp": demographic_parity_difference,
    "eop": equal_opportunity_difference,
    "eo": equalized_odds_difference,
}


@pytest.fixture(autouse=True)
def track(monkeypatch) -> Track:
    """Two small tracks that need no download."""
    data = synthetic(rows=1200, features=3, gap=0.3)
    made = make_track(read=lambda: data)
    monkeypatch.setitem(TRACKS, "tiny", made)
    monkeypatch.setitem(TRACKS, "other", replace(made, name="other", version=3, seeds=1))
    return made


def predict(track: Track) -> pd.DataFrame:
    """A submission with scores that depend on label and group, and on chance."""
    rng = np.random.default_rng(1)
    parts = []
    for seed in range(track.seeds):
        rows = rng.permutation(track.split(seed).federation.test)
        data = track.load()
        center = 0.35 + 0.2 * data.labels[rows] + 0.1 * data.groups[rows]
        scores = np.clip(rng.normal(center, 0.2), 0, 1)
        columns = {"track": track.name, "version": track.version, "seed": seed}
        parts.append(pd.DataFrame({**columns, "row": rows, "score": scores}))
    return pd.concat(parts, ignore_index=True)


def to_polars(made: pd.DataFrame) -> pl.DataFrame:
    return pl.DataFrame({name: made[name].tolist() for name in made.columns})


def refusal(path: Path, **options) -> str:
    with pytest.raises(FedgftError) as error:
        read_submission(path, **options)
    text = str(error.value)
    assert "\n" not in text and str(path) in text
    return text


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_submission_has_the_numbers_of_fairlearn(tmp_path, track, ending):
    made = predict(track)
    file = tmp_path / f"mine.{ending}"
    made.to_csv(file, index=False) if ending == "csv" else to_polars(made).write_parquet(file)
    (score,) = score_submission(read_submission(file))
    data = track.load()
    accuracies, gaps = [], {name: [] for name in DIFFERENCES}
    local = {name: [] for name in DIFFERENCES}
    for seed, mine in made.groupby("seed"):
        rows = mine["row"].to_numpy()
        y, g = data.labels[rows], data.groups[rows]
        d = (mine["score"].to_numpy() >= 0.5).astype(int)
        owner = track.split(seed).owner[rows]
        accuracies.append(accuracy_score(y, d))
        sites = [owner == k for k in range(track.clients)]
        usable = [s for s in sites if np.bincount(g[s], minlength=2).min() >= 20]
        assert usable
        for name, difference in DIFFERENCES.items():
            gaps[name].append(difference(y, d, sensitive_features=g))
            local[name].append(max(difference(y[s], d[s], sensitive_features=g[s]) for s in usable))
    found = score.summarize()
    assert found["accuracy"] == pytest.approx(np.mean(accuracies), abs=1e-12)
    half = 12.706 * np.std(accuracies, ddof=1) / np.sqrt(2)  # Student's t of one degree of freedom
    assert found["accuracy_high"] - found["accuracy"] == pytest.approx(half, rel=1e-4)
    assert found["seeds"] == found["seeds_of_track"] == 2
    for name in DIFFERENCES:
        each = found["metrics"][name]
        assert each["gap"] == pytest.approx(np.mean(gaps[name]), abs=1e-12)
        assert each["local_gap"] == pytest.approx(np.mean(local[name]), abs=1e-12)
        assert each["gap_low"] < each["gap"] < each["gap_high"]
        assert 0 < each["floor"] < 0.2
        np.testing.assert_allclose(score.outcome.gap(_metric(name)), gaps[name], atol=1e-12)
    assert np.isnan(score.outcome.train).all() and np.isnan(score.outcome.inner).all()


def _metric(name: str):
    from fedgft.metrics import get_metric

    return get_metric(name)


def test_decisions_count_as_the_scores_that_make_them(tmp_path, track):
    made = predict(track)
    made.to_csv(tmp_path / "scores.csv", index=False)
    decided = made.assign(decision=(made["score"] >= 0.5).astype(int)).drop(columns="score")
    decided.to_csv(tmp_path / "decisions.csv", index=False)
    truth = decided.assign(decision=decided["decision"].astype(bool))
    to_polars(truth).write_parquet(tmp_path / "truth.parquet")
    found = [
        score_submission(read_submission(tmp_path / name))[0].summarize()
        for name in ("scores.csv", "decisions.csv", "truth.parquet")
    ]
    assert found[0] == found[1] == found[2]


def test_a_score_of_one_half_is_a_positive_decision(tmp_path, track):
    made = predict(track)
    for value, rate in ((0.5, 1.0), (0.4999, 0.0)):
        made.assign(score=value).to_csv(tmp_path / "s.csv", index=False)
        decisions = read_submission(tmp_path / "s.csv").decisions["tiny"]
        assert decisions.shape == (2, 1200) and np.nanmean(decisions) == rate
        tests = np.isfinite(decisions[0])
        np.testing.assert_array_equal(np.flatnonzero(tests), track.split(0).federation.test)


def test_the_order_of_rows_and_other_columns_do_not_matter(tmp_path, track):
    made = predict(track)
    made.to_csv(tmp_path / "a.csv", index=False)
    other = made.sample(frac=1, random_state=0).assign(comment="x")[
        [*made.columns[::-1], "comment"]
    ]
    other.to_csv(tmp_path / "b.csv", index=False, sep=";")
    first, second = (read_submission(tmp_path / f"{n}.csv").decisions["tiny"] for n in "ab")
    np.testing.assert_array_equal(first, second)


def test_several_tracks_are_scored_in_the_order_of_the_file(tmp_path, track):
    both = pd.concat([predict(TRACKS["other"]), predict(track)])
    both.to_csv(tmp_path / "both.csv", index=False)
    scores = score_submission(read_submission(tmp_path / "both.csv"))
    assert [(s.track.name, s.summarize()["version"]) for s in scores] == [("other", 3), ("tiny", 1)]


def test_the_version_may_be_in_the_metadata_of_a_parquet_file(tmp_path, track):
    made = to_polars(predict(track)).drop("version")
    for version in ("1", "2", "one"):
        made.write_parquet(tmp_path / f"{version}.parquet", metadata={"version": version})
    assert set(read_submission(tmp_path / "1.parquet").decisions) == {"tiny"}
    assert "version 2: tiny has version 1 here" in refusal(tmp_path / "2.parquet")
    assert "'one', no whole number" in refusal(tmp_path / "one.parquet")
    made.write_parquet(tmp_path / "none.parquet")
    assert "no column 'version'" in refusal(tmp_path / "none.parquet")


def test_a_preliminary_submission_has_the_first_seeds_only(tmp_path, track):
    made = predict(track)
    first = made[made["seed"] == 0]
    first.to_csv(tmp_path / "first.csv", index=False)
    assert "tiny, seed 1: no rows; the seed is missing" in refusal(tmp_path / "first.csv")
    (score,) = score_submission(read_submission(tmp_path / "first.csv", seeds=1))
    found = score.summarize()
    assert (found["seeds"], found["seeds_of_track"], found["accuracy_low"]) == (1, 2, None)
    made.to_csv(tmp_path / "all.csv", index=False)
    assert "seed 1: the file must hold seeds 0 to 0" in refusal(tmp_path / "all.csv", seeds=1)


def put(column: str, place: int, value: object):
    """A change of one cell."""

    def change(made: pd.DataFrame, track: Track) -> pd.DataFrame:
        return made.astype({column: object}).assign(
            **{column: lambda t: [value if i == place else v for i, v in enumerate(t[column])]}
        )

    return change


def put_row(part: str):
    """A change of the first row to one of another part of the same seed."""

    def change(made: pd.DataFrame, track: Track) -> pd.DataFrame:
        split = track.split(0)
        row = {"train": split.federation.rows, "inner": split.inner}[part][0]
        return put("row", 0, int(row))(made, track)

    return change


BROKEN = {
    "no track": (lambda t, _: t.drop(columns="track"), "no column 'track'"),
    "no version": (lambda t, _: t.drop(columns="version"), "no column 'version'"),
    "no seed": (lambda t, _: t.rename(columns={"seed": "sed"}), "no column 'seed'; did you mean"),
    "no row": (lambda t, _: t.drop(columns="row"), "no column 'row'"),
    "neither": (lambda t, _: t.rename(columns={"score": "p"}), "no column 'score' or 'decision'"),
    "misspelled": (lambda t, _: t.rename(columns={"score": "scores"}), "did you mean 'scores'?"),
    "both": (lambda t, _: t.assign(decision=1), "both columns 'score' and 'decision'"),
    "unknown track": (
        lambda t, _: t.assign(track="tinny"),
        "no track 'tinny'; did you mean 'tiny'",
    ),
    "number as track": (lambda t, _: t.assign(track=7), "column 'track' must hold texts, not 7"),
    "track without value": (put("track", 4, None), "column 'track' has no value"),
    "other version": (lambda t, _: t.assign(version=2), "version 2: tiny has version 1 here"),
    "one other version": (put("version", 3, 2), "line 5: version 2"),
    "text as version": (lambda t, _: t.assign(version="v1"), "'version' holds 'v1', no number"),
    "fraction as version": (lambda t, _: t.assign(version=1.5), "holds 1.5, no whole number"),
    "missing row": (lambda t, _: t.drop(index=5), "tiny, seed 0: 1 test row missing, row"),
    "missing seed": (lambda t, _: t[t["seed"] != 1], "tiny, seed 1: no rows"),
    "unknown seed": (put("seed", 0, 2), "line 2: seed 2: the file must hold seeds 0 to 1"),
    "negative seed": (put("seed", 0, -1), "line 2: seed -1"),
    "fraction as seed": (put("seed", 2, 0.5), "line 4: column 'seed' holds 0.5, no whole number"),
    "text as seed": (put("seed", 2, "a"), "line 4: column 'seed' holds 'a', no number"),
    "double row": (lambda t, _: pd.concat([t, t.iloc[[7]]]), "is there more than once"),
    "foreign row": (put("row", 1, 1200), "line 3: row 1200: tiny has rows 0 to 1199"),
    "negative row": (put("row", 1, -1), "line 3: row -1: tiny has rows 0 to 1199"),
    "huge row": (put("row", 1, 10**17), "line 3: column 'row' holds 1000"),
    "fraction as row": (put("row", 1, 3.25), "holds 3.25, no whole number"),
    "row without value": (put("row", 1, None), "line 3: column 'row' has no value"),
    "training row": (put_row("train"), "is a training row; submit test rows only"),
    "inner row": (put_row("inner"), "is an inner row; submit test rows only"),
    "score above 1": (put("score", 9, 1.01), "line 11: score 1.01 is no probability"),
    "score below 0": (put("score", 9, -0.01), "line 11: score -0.01 is no probability"),
    "score NaN": (put("score", 9, "NaN"), "line 11: column 'score' holds nan, no number"),
    "score infinite": (put("score", 9, "inf"), "line 11: column 'score' holds inf, no number"),
    "score without value": (put("score", 9, None), "line 11: column 'score' has no value"),
    "text as score": (put("score", 9, "high"), "line 11: column 'score' holds 'high', no number"),
    "decision of 2": (
        lambda t, _: t.assign(decision=[2, *[1] * (len(t) - 1)]).drop(columns="score"),
        "line 2: decision 2 is neither 0 nor 1",
    ),
    "decision of 0.5": (
        lambda t, _: t.assign(decision=0.5).drop(columns="score"),
        "line 2: decision 0.5 is neither 0 nor 1",
    ),
    "seeds exchanged": (lambda t, _: t.assign(seed=1 - t["seed"]), "submit test rows only"),
    "no rows": (lambda t, _: t.iloc[:0], "the file has no rows"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_submission_is_refused_in_one_line(tmp_path, track, name):
    change, says = BROKEN[name]
    file = tmp_path / "mine.csv"
    change(predict(track), track).to_csv(file, index=False)
    assert says in refusal(file)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.csv", b"", "the file is empty"),
        ("broken.parquet", b"PAR1 no table", "cannot be read as PARQUET"),
        ("mine.txt", b"track,version\n", "the ending must be .csv or .parquet"),
        ("mine.csv.gz", b"\x1f\x8b", "the ending must be .csv or .parquet"),
        ("packed.csv", b"\x1f\x8b\x08\x00rest", "is compressed; unpack it first"),
        ("wide.csv", "track,version\n".encode("utf-16"), "save it as UTF-8"),
        ("twice.csv", b"track,row,row\na,1,1\n", "column 'row' is in the header more than once"),
        ("one.csv", b"0.5\n0.7\n", "no column 'track'"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    assert says in refusal(tmp_path / name)


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in refusal(tmp_path / "folder.csv")
    assert "is a folder" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "missing.csv")


def test_seeds_must_be_a_positive_number(tmp_path, track):
    predict(track).to_csv(tmp_path / "s.csv", index=False)
    with pytest.raises(FedgftError) as error:
        read_submission(tmp_path / "s.csv", seeds=0)
    assert error.value.field == "seeds"


def test_a_track_that_comes_out_differently_is_not_scored(tmp_path, track, monkeypatch):
    predict(track).to_csv(tmp_path / "s.csv", index=False)
    monkeypatch.setitem(TRACKS, "tiny", replace(track, sha256="0" * 64))
    with pytest.raises(FedgftError, match="tiny: rows or splits are not those of version 1"):
        read_submission(tmp_path / "s.csv")


def test_a_parquet_file_names_rows_and_not_lines(tmp_path, track):
    made = predict(track)
    made.loc[4, "score"] = 7
    to_polars(made).write_parquet(tmp_path / "s.parquet")
    assert "row 5 of the table: score 7 is no probability" in refusal(tmp_path / "s.parquet")


def test_numbers_are_plain_json(tmp_path, track):
    """With a group that has no positive label in the test rows, eop is not estimable: None."""
    data = track.load()
    labels = np.where(data.groups == 1, 0, data.labels)
    changed = replace(track, read=lambda: replace(data, labels=labels))
    TRACKS["tiny"] = changed
    predict(changed).to_csv(tmp_path / "s.csv", index=False)
    found = score_submission(read_submission(tmp_path / "s.csv"))[0].summarize()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["metrics"]["eop"]["gap"] is None and found["metrics"]["sp"]["gap"] > 0
