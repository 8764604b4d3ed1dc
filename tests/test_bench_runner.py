"""Runs of the benchmark on a tiny track: cells, shards, choices, ranks and pages."""

import json
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import scipy.stats

from fedgft.algorithms import METHODS
from fedgft.algorithms.registry import Method, fedgft
from fedgft.bench import TRACKS
from fedgft.bench.bench_runner import BenchPlan, merge_folders, read_cells, read_manifest, run_bench
from fedgft.bench.cell_training import SETTINGS, OpenTrack, run_cell, score_rows, train_base
from fedgft.bench.choices import InnerRows
from fedgft.bench.entrants import TARGETS, choose_entrants, list_entrants
from fedgft.bench.page import write_board
from fedgft.bench.scoreboard import (
    Score,
    compare_pairs,
    correct_by_holm,
    dominated_area,
    keeps_target,
    mean_interval,
    rank_scores,
    score_cells,
)
from fedgft.bench.scores import Outcome
from fedgft.data.generated import synthetic
from fedgft.engine import predict_proba
from fedgft.errors import FedgftError
from fedgft.metrics import get_metric
from fedgft.rules.federation_rule import fit_rule
from fedgft.study.post_processing import apply_rule
from test_bench_tracks import make_track
from test_cli import run

SP = get_metric("sp")
QUICK = replace(SETTINGS, rounds=3)
NAMES = ("lrw", "fedgft", "fedgft-control", "thresholds")


def track_of(**changes):
    data = synthetic(rows=600, features=3, gap=0.4)
    kept = [i for i, name in enumerate(data.columns) if not name.startswith("group")]
    names = tuple(data.columns[i] for i in kept)
    data = replace(data, features=data.features[:, kept], columns=names, encoder=None)
    return make_track(read=lambda: data, metrics=("sp", "eo"), **changes)


def plan_of(track, *, names=NAMES, **changes) -> BenchPlan:
    return BenchPlan((track,), choose_entrants(names), **{"settings": QUICK, **changes})


def ignore(what, amount) -> None:
    pass


def results(folder) -> dict:
    """All numbers of a folder's cells that do not depend on the clock."""
    found = {}
    for cell in read_cells(folder, read_manifest(folder)):
        record = cell.to_json()
        del record["seconds"]
        found[cell.metric, cell.method] = record
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run, which tests read only."""
    folder = tmp_path_factory.mktemp("whole")
    run_bench(plan_of(track_of()), folder, ignore)
    return folder


@pytest.mark.slow
def test_every_cell_is_run_once(whole):
    expected = {("all", "fedavg"), ("all", "lrw")}
    expected |= {(metric, name) for metric in ("sp", "eo") for name in NAMES[1:]}
    assert set(results(whole)) == expected
    assert run_bench(plan_of(track_of()), whole, ignore) == []
    for cell in read_cells(whole, read_manifest(whole)):
        assert cell.outcome is not None and cell.unseen is not None
        assert cell.outcome.test.shape[:2] == (len(cell.grid), 2)
        assert cell.unseen.shape[0] == 2 * 3  # each seed without each site
        assert cell.unseen.sum() == pytest.approx(2 * 600)  # all rows of each site


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_between_cells(whole, tmp_path):
    done = []

    def kill(what, amount):
        done.append(what)
        if len(dict.fromkeys(done)) > 4:
            raise KeyboardInterrupt

    plan = plan_of(track_of())
    with pytest.raises(KeyboardInterrupt):
        run_bench(plan, tmp_path, kill)
    finished = len(results(tmp_path))
    assert 0 < finished < len(plan.cells)
    left = [path for path in tmp_path.rglob("*") if path.suffix == ".part"]
    assert not left
    assert len(run_bench(plan, tmp_path, ignore)) == len(plan.cells) - finished
    assert results(tmp_path) == results(whole)


@pytest.mark.slow
def test_shards_together_are_the_whole(whole, tmp_path):
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for i, folder in enumerate(folders):
        run_bench(plan_of(track_of(), shard=(i + 1, 3)), folder, ignore)
    sizes = [len(results(folder)) for folder in folders]
    assert sum(sizes) == len(results(whole)) and min(sizes) > 0
    merge_folders(folders, tmp_path / "all")
    assert results(tmp_path / "all") == results(whole)
    merged, at_once = write_board(tmp_path / "all").scores, write_board(whole).scores
    assert [replace(s, seconds=None) for s in merged] == [replace(s, seconds=None) for s in at_once]


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"settings": replace(QUICK, rounds=2)}, "settings"), ({"seeds": 1}, "number of seeds")],
)
def test_shards_with_different_settings_are_refused(whole, tmp_path, changes, words):
    run_bench(plan_of(track_of(), names=("lrw",), **changes), tmp_path / "other", ignore)
    with pytest.raises(FedgftError, match=f"its {words} differs") as error:
        merge_folders([whole, tmp_path / "other"], tmp_path / "all")
    assert error.value.kind == "conflict"
    assert not (tmp_path / "all").exists()


def test_shards_of_different_versions_of_a_track_are_refused(whole, tmp_path):
    run_bench(plan_of(track_of(version=2), names=("lrw",)), tmp_path / "other", ignore)
    with pytest.raises(FedgftError, match="version 2 of the track tiny"):
        merge_folders([whole, tmp_path / "other"], tmp_path / "all")


def test_a_damaged_cell_is_trained_again_and_never_shown(whole, tmp_path):
    merge_folders([whole], tmp_path)
    (path,) = (tmp_path / "cells").glob("tiny-1.sp.fedgft.*.json")
    path.write_text(path.read_text().replace('"seconds"', '"second"'))
    with pytest.raises(FedgftError, match="is damaged"):
        write_board(tmp_path)
    assert run_bench(plan_of(track_of()), tmp_path, ignore) == ["tiny, sp, fedgft"]
    assert results(tmp_path) == results(whole)


@pytest.mark.slow
def test_choices_do_not_read_test_rows():
    """The labels of test rows are permuted: nothing that is trained or chosen changes."""
    track = track_of(seeds=1)
    data = track.load()
    test = track.split(0).federation.test
    labels = data.labels.copy()
    labels[test] = np.random.default_rng(0).permutation(labels[test])
    other_data = replace(data, labels=labels)
    assert (labels != data.labels).sum() > 20
    found, other = (
        OpenTrack.load(each, 1, QUICK) for each in (track, replace(track, read=lambda: other_data))
    )
    bases = [train_base(each, lambda amount: None) for each in (found, other)]
    for name in ("lr", "inner_accuracy", "params", "unseen_params"):
        np.testing.assert_array_equal(*(getattr(base, name) for base in bases))
    for name in ("fedgft", "fairfed", "fedgft-control", "thresholds", "blind"):
        entrant = list_entrants()[name]
        cells = [
            run_cell(each, base, entrant, "sp", lambda amount: None)
            for each, base in zip((found, other), bases, strict=True)
        ]
        first, second = (cell.outcome for cell in cells)
        assert first is not None and second is not None
        np.testing.assert_array_equal(first.inner, second.inner)
        np.testing.assert_array_equal(first.train, second.train)
        assert not np.array_equal(first.test, second.test)
        inner = [InnerRows.of(each, SP) for each in (first, second)]
        for target in TARGETS:
            np.testing.assert_array_equal(*(each.choose(target) for each in inner))


def test_the_most_accurate_candidate_within_the_target_is_chosen():
    """Four candidates, of which the last diverged, in two replicates."""
    gap = np.array([[0.10, 0.03], [0.019, 0.05], [0.01, 0.04], [np.nan, np.nan]])
    accuracy = np.array([[0.9, 0.9], [0.7, 0.8], [0.8, 0.7], [np.nan, 0.99]])
    inner = InnerRows(accuracy, gap, np.full((4, 2), 0.005))
    assert inner.choose(0.02).tolist() == [2, 0]  # the second: none within, the smallest gap
    assert inner.choose(0.05).tolist() == [2, 0]
    assert inner.choose(0.2).tolist() == [0, 0]
    assert inner.choose(0.0).tolist() == [2, 0]
    assert replace(inner, floor=np.full((4, 2), 0.045)).choose(0.0).tolist() == [2, 0]
    asked = replace(inner, asked=np.array([0.05, 0.02, 0.0, 0.0]))
    assert set(asked.choose(0.0).tolist()) <= {2, 3}  # no candidate that was asked for more
    assert asked.choose(0.2).tolist() == inner.choose(0.2).tolist()


def test_scores_of_linear_models_are_those_of_the_library():
    found = OpenTrack.load(track_of(), 1, QUICK)
    federation = found.federations[0]
    params = np.random.default_rng(0).normal(size=(3, 8))
    every = np.arange(600)
    scores = score_rows(federation, params, every)
    for i in range(3):
        expected = predict_proba(federation, "logistic", params[i], every)[:, 1]
        np.testing.assert_allclose(scores[:, i], expected, atol=1e-12)


def test_a_site_that_is_left_out_is_not_trained_on():
    found = OpenTrack.load(track_of(), 2, QUICK)
    sites = {0: set(), 1: set()}
    for i, federation in found.unseen:
        owner = found.splits[i].owner
        (site,) = set(owner[federation.test].tolist())
        assert site not in owner[federation.rows]
        assert len(federation.test) == (owner == site).sum()
        sites[i].add(site)
    assert sites == {0: {0, 1, 2}, 1: {0, 1, 2}}


def test_a_group_model_that_is_kept_belongs_to_its_scores():
    """A rule for other scores of the same federation is that of a federation made anew."""
    first, second = (OpenTrack.load(track_of(), 1, QUICK).federations[0] for _ in range(2))
    rng = np.random.default_rng(8)
    scores = rng.uniform(0.2, 0.8, (2, 600))
    every = np.arange(600)
    for each in (scores[0], scores[1]):  # the second call must not find the model of the first
        kept = fit_rule(first, each, "blind", target={SP: 0.02})
        again = fit_rule(first, each, "blind", target={SP: 0.02})
        decisions = [apply_rule(first.dataset, every, rule, each) for rule in (kept, again)]
        np.testing.assert_array_equal(*decisions)
    fresh = fit_rule(second, scores[1], "blind", target={SP: 0.02})
    np.testing.assert_array_equal(decisions[0], apply_rule(second.dataset, every, fresh, scores[1]))


# The board


def test_p_values_are_those_of_scipy():
    rng = np.random.default_rng(3)
    for n in (2, 5, 20):
        first, second = rng.normal(0.8, 0.01, (2, n))
        assert compare_pairs(first, second) == pytest.approx(
            scipy.stats.ttest_rel(first, second).pvalue
        )
    assert compare_pairs(first, first) == 1
    assert compare_pairs(np.array([0.5]), np.array([0.9])) == 1  # one pair says nothing
    assert compare_pairs(np.array([0.5, 0.75]), np.array([0.25, 0.5])) == 0


def test_holms_correction_by_hand():
    assert correct_by_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert correct_by_holm([0.005, 0.02, 0.04, 0.9]) == pytest.approx([0.02, 0.06, 0.08, 0.9])
    assert correct_by_holm([0.5, 0.6]) == pytest.approx([1.0, 1.0])
    assert correct_by_holm([]) == []


def test_intervals_of_means_are_those_of_scipy():
    values = np.random.default_rng(1).normal(size=7)
    low, high = scipy.stats.t.interval(0.95, 6, values.mean(), scipy.stats.sem(values))
    assert mean_interval(values) == pytest.approx((values.mean(), low, high))
    assert mean_interval(values[:1]) == (values[0], None, None)
    assert mean_interval(np.array([0.5, np.nan])) == (None, None, None)


def test_keeping_a_target_by_hand():
    """Mean 0.05; sd 0.02, so that four replicates have the standard error 0.01."""
    gap = 0.05 + 0.02 * np.sqrt(3) / 2 * np.array([1.0, 1.0, -1.0, -1.0])
    assert np.std(gap, ddof=1) == pytest.approx(0.02)
    least = 0.05 - 1.959964 * 0.01 - 0.003  # the smallest sqrt(t^2 + f^2) with which it is kept
    assert keeps_target(gap, 0.0, least + 1e-6) and not keeps_target(gap, 0.0, least - 1e-6)
    target = np.sqrt(least**2 - 0.02**2)
    assert keeps_target(gap, 0.02, target + 1e-5) and not keeps_target(gap, 0.02, target - 1e-5)
    assert not keeps_target(np.array([0.0, np.nan]), 0.1, 1.0)


def test_areas_are_those_of_random_points():
    rng = np.random.default_rng(4)
    points = np.stack((rng.uniform(0, 0.25, 12), rng.uniform(0.6, 0.9, 12)), 1)
    widest, least = 0.2, 0.7
    cloud = np.stack((rng.uniform(0, widest, 200_000), rng.uniform(least, 0.9, 200_000)), 1)
    better = (points[:, None, 0] <= cloud[:, 0]) & (points[:, None, 1] >= cloud[:, 1])
    area = better.any(0).mean() * widest * (0.9 - least)
    assert dominated_area(points, widest, least) == pytest.approx(area, rel=0.02)
    assert dominated_area(np.array([[0.1, 0.8], [0.0, 0.75]]), 0.2, 0.7) == pytest.approx(0.015)
    assert dominated_area(np.array([[np.nan, 0.8], [0.3, 0.9]]), 0.2, 0.7) == 0


def test_methods_that_keep_a_target_are_ranked_by_accuracy():
    rng = np.random.default_rng(6)
    base = rng.normal(0.8, 0.02, 10)
    accuracies = {
        "first": base + 0.001,
        "near": base + rng.normal(0, 0.002, 10),
        "far": base - 0.05 + rng.normal(0, 0.002, 10),
        "unfair": base + 0.1,
    }
    scores = {
        name: Score("t", "sp", name, name, "blind", 0.02, values.mean(), gap=0.1, keeps=True)
        for name, values in accuracies.items()
    }
    scores["unfair"] = replace(scores["unfair"], keeps=False)
    scores["absent"] = Score("t", "sp", "absent", "absent", "blind", 0.02, reason="no")
    found = rank_scores(scores, accuracies)
    order = sorted(("first", "near", "far"), key=lambda name: -accuracies[name].mean())
    assert [s.method for s in found] == [*order, "unfair", "absent"]
    assert [s.rank for s in found] == [1, 2, 3, None, None]
    p = [scipy.stats.ttest_rel(accuracies[order[0]], accuracies[name]).pvalue for name in order[1:]]
    assert found[1].p == pytest.approx(p[0]) and found[2].p == pytest.approx(2 * p[1])
    assert [s.is_tied for s in found] == [True, True, False, False, False]


# Methods that are added


@dataclass(frozen=True)
class _Rival(Method):
    grid: tuple[float, ...] = ()
    league: str = "blind"


def refuse_eo(metric, strength):
    if metric.name == "eo":
        raise FedgftError("rival: takes sp, not eo", kind="unsupported")
    return fedgft(metric, strength)


def test_a_new_method_takes_part_and_may_refuse_a_metric(monkeypatch, tmp_path):
    rival = _Rival("Rival <b>", refuse_eo, "lam", grid=(1.0, 20.0), league="aware")
    monkeypatch.setitem(METHODS, "rival", rival)
    run_bench(plan_of(track_of(), names=("rival",)), tmp_path, ignore)
    cells = {(c.metric, c.method): c for c in read_cells(tmp_path, read_manifest(tmp_path))}
    assert cells["sp", "rival"].grid == (1.0, 20.0)
    assert cells["eo", "rival"].outcome is None
    assert "takes sp" in cells["eo", "rival"].reason
    board = write_board(tmp_path)
    assert any("Rival <b>: not offered: rival: takes sp" in note for note in board.notes)
    page = (tmp_path / "index.html").read_text()
    assert "Rival &lt;b&gt;" in page and "Rival <b>" not in page
    assert "Rival <b>" not in (tmp_path / "tiny.md").read_text()
    assert any(score.league == "aware" and score.method == "rival" for score in board.scores)


def test_another_error_of_a_method_ends_the_run(monkeypatch, tmp_path):
    def fail(metric, strength):
        raise FedgftError("broken", kind="file")

    monkeypatch.setitem(METHODS, "rival", _Rival("Rival", fail, "lam"))
    with pytest.raises(FedgftError, match="broken"):
        run_bench(plan_of(track_of(), names=("rival",)), tmp_path, ignore)


def test_a_method_that_diverged_keeps_no_target(whole, tmp_path):
    about = read_manifest(whole)
    cell = next(c for c in read_cells(whole, about) if (c.metric, c.method) == ("sp", "fedgft"))
    assert cell.outcome is not None
    lost = Outcome(*(np.full_like(a, np.nan, dtype=float) for a in vars(cell.outcome).values()))
    found = score_cells([replace(cell, outcome=lost)], {"tiny": ["sp"]})
    assert all(not s.keeps and s.rank is None and s.accuracy is None for s in found)


# Pages and the command


def test_the_page_needs_no_other_file(whole):
    board = write_board(whole)
    page = (whole / "index.html").read_text()
    assert "<script" not in page and not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert page.count("data:image/svg+xml") == 2
    assert all(path.exists() for path in board.paths)
    before = {path: path.read_bytes() for path in board.paths}
    write_board(whole)
    assert {path: path.read_bytes() for path in board.paths} == before
    scores = json.loads((whole / "scores.json").read_text())["scores"]
    assert len(scores) == len(board.scores) == 2 * 4 * 5  # metrics, targets, methods


def test_missing_cells_are_named(tmp_path):
    run_bench(plan_of(track_of(), names=("lrw", "fedgft"), shard=(1, 2)), tmp_path, ignore)
    assert any("cells are not run yet" in note for note in write_board(tmp_path).notes)


@pytest.mark.slow
def test_the_command_runs_and_resumes(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(TRACKS, "tiny", track_of())
    monkeypatch.setattr("fedgft.bench.bench_runner.SETTINGS", QUICK)
    words = ("bench", "--track", "tiny", "--methods", "lrw,thresholds", "--metrics", "sp")
    code, out, err = run(capsys, *words, "--out", str(tmp_path / "b"))
    assert code == 0 and "Group-aware league" in out and "index.html" in err
    code, out, _ = run(capsys, *words, "--out", str(tmp_path / "b"), "--json")
    assert code == 0 and {s["method"] for s in json.loads(out)} == {"fedavg", "lrw", "thresholds"}
    code, _, _ = run(capsys, "bench", "page", str(tmp_path / "b"))
    assert code == 0
    code, out, _ = run(capsys, "bench", "merge", str(tmp_path / "b"), "--out", str(tmp_path / "c"))
    assert code == 0 and (tmp_path / "c" / "index.html").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--track tine", "did you mean 'tiny'"),
        ("--methods fedgtf", "did you mean 'fedgft'"),
        ("--track tiny --metrics eop", "is not scored here"),
        ("--track tiny --seeds 3", "--seeds must lie between 1 and 2"),
        ("--track tiny --shard 0/2", "--shard must be i/n"),
        ("--track tiny --shard two", "--shard must be i/n"),
        ("--methods fedgft --league aware", "in the league 'aware'"),
        ("merge", "folders"),
        ("merge nowhere", "bench.json"),
        ("page nowhere", "bench.json"),
    ],
)
def test_mistakes_are_named_in_one_line(monkeypatch, tmp_path, capsys, words, said):
    monkeypatch.setitem(TRACKS, "tiny", track_of())
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "bench", *words.split())
    assert code == 2 and said in err.replace("\n", " ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_site_that_trains_without_a_group_gets_the_rule_of_all_sites():
    """Rules by site have none for a group that a site has only in its test rows."""
    found = OpenTrack.load(track_of(), 1, QUICK)
    split = found.splits[0]
    groups = split.federation.dataset.groups.copy()
    inside = np.isin(np.arange(len(groups)), split.federation.rows) & (split.owner == 0)
    groups[inside] = 0  # site 0 trains on one group, and has test rows of the other
    data = replace(split.federation.dataset, groups=groups)
    made = replace(split, federation=replace(split.federation, dataset=data))
    lacking = replace(found, splits=(made,), shared={})
    base = train_base(lacking, lambda amount: None)
    cell = run_cell(lacking, base, list_entrants()["cost-lp"], "sp", lambda amount: None)
    assert not cell.reason and cell.outcome is not None
    tested = groups[made.federation.test]
    assert 1 in tested[made.owner[made.federation.test] == 0]
    assert cell.outcome.test[0, 0].sum() == len(made.federation.test)
    assert np.isfinite(cell.outcome.accuracy()).all()
