"""Targets, bases, frontiers and mistakes on the command line, and their messages."""

import json
import warnings
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from fedgft.algorithms import Adaptive, Controller, FairFed, LinearizedPenalty, Proximal
from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.cli import main
from fedgft.cli.options import Options, choose_method
from fedgft.cli.study_session import make_protocol
from fedgft.data.partition import partition
from fedgft.fair_model import load_model
from fedgft.metrics import CATALOG, Metric, get_metric
from fedgft.study import row
from fedgft.study.cache import Checkpoints
from fedgft.study.protocol import contradiction, empty_groups, without_groups
from fedgft.study.training import describe_target
from small_federation import SYNTHETIC, study

pytestmark = pytest.mark.slow

SP = CATALOG["sp"]
DATA = SYNTHETIC


QUICK = ("--seeds", 2, "--rounds", 4, "--lr", 0.03, "--clients", 4, "--data", "synthetic")


def run(capsys, *arguments):
    try:
        main([str(a) for a in arguments])
        code = 0
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_frontier_from_the_command_line(capsys, tmp_path) -> None:
    code, out, err = run(
        capsys,
        "frontier",
        *QUICK,
        "--points",
        3,
        "--target",
        0.05,
        "--json",
        "--out",
        tmp_path / "f",
        "--references",
    )
    assert code == 0, err
    found = json.loads(out)
    methods = {row["method"] for row in found["rows"]}
    assert methods == {
        "fedavg",
        "lrw",
        "fairfed",
        "lft",
        "fedgft",
        "fedgft-control",
        "thresholds",
        "pooled",
        "exponentiated-gradient",
        "threshold-optimizer",
    }
    assert found["target"] == 0.05
    assert found["chosen"]["method"] in methods
    names = {p.name for p in (tmp_path / "f").iterdir()}
    assert names == {
        "frontier.parquet",
        "frontier.png",
        "frontier.svg",
        "model.safetensors",
        "run.json",
        "cells",
    }
    fits = list((tmp_path / "f/cells").iterdir())
    assert len(fits) == 2 * 4  # replicates, three bounds and the thresholds
    assert len(pl.read_parquet(tmp_path / "f/frontier.parquet")) == len(found["rows"])
    saved = load_model(tmp_path / "f/model.safetensors")
    assert saved.about["method"] == found["chosen"]["method"]
    assert saved.about["seed"] == found["chosen"]["replicate"]
    code, out, _ = run(
        capsys,
        "frontier",
        *QUICK,
        "--points",
        3,
        "--methods",
        "fedgft-control",
        "--out",
        tmp_path / "g",
    )
    assert code == 0
    assert "Chosen on the clients' rows: FedGFT, trained to a gap of" in " ".join(out.split())


def test_an_interrupted_frontier_is_resumed_to_the_same_rows(capsys, tmp_path, monkeypatch) -> None:
    command = ("frontier", *QUICK, "--points", 2, "--methods", "fedgft", "--json", "--out")
    put = Checkpoints.put
    calls = []

    def interrupted(self, *given):
        put(self, *given)
        calls.append(given)
        if len(calls) == 5:  # FedAvg has three, so FedGFT is under way
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "put", interrupted)
        code, _, err = run(capsys, *command, tmp_path / "cut", "--checkpoint-every", 1)
    assert code == 130 and "--resume goes on from there" in err
    code, _, err = run(capsys, *command, tmp_path / "cut", "--checkpoint-every", 1)
    assert code == 2 and "holds the checkpoints of an interrupted run" in err
    code, _, err = run(capsys, *command, tmp_path / "cut", "--resume")
    assert code == 0, err
    assert not (tmp_path / "cut/checkpoints").exists()
    assert run(capsys, *command, tmp_path / "whole")[0] == 0
    one, two = (pl.read_parquet(tmp_path / n / "frontier.parquet") for n in ("whole", "cut"))
    assert one.equals(two)
    assert run(capsys, *command, tmp_path / "cut", "--resume")[0] == 2


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("frontier", "--points", 1), "--points"),
        (("frontier", "--lam", 3), "frontier sweeps it"),
        (("frontier", "--methods"), "--methods"),
        (("frontier", "--metric", "spp"), "'spp' is not known"),
        (
            ("frontier", "--metric", "predictive-parity", "--references"),
            "no method for predictive-parity",
        ),
        (("frontier", "--alpha", 0), "--alpha"),
        (("train", "--target", 2), "two points are 0.02"),
        (("train", "--target", -0.1), "--target"),
        (("train", "--target", "nan"), "--target"),
        (("train", "--target", 0.1, "--method", "lft"), "write --method fedgft-control"),
        (("compare", "--target", 0.1, "--methods", "fedavg,fedgft"), "fedavg fedgft-control"),
        (("train", "--lam", 1, "--method", "fedgft-control"), "write --method fedgft, or leave"),
        (("train", "--lam", 1, "--target", 0.1), "--lam is for lft, fedgft, fedfb"),
        (("train", "--pick", 0.5, "--cohort", 2), "--pick needs the exact sums"),
        (("train", "--mu", 1e7), "--mu must be at most"),
        (("frontier", "--eval-every", 1), "final models only"),
        (("frontier", "--control", "scores"), "frontier compares decisions"),
        (("train", "--pick", 2), "--pick"),
        (("train", "--mu", -1), "--mu"),
        (("train", "--base", "fedadam", "--server-lr", 0), "--server-lr"),
        (("train", "--server-lr", 0.1), "--server-lr is for --base"),
        (("train", "--noise", -1), "--noise"),
        (("train", "--metric", "sp+sp"), "twice"),
        (("compare", "--metrics", "0*sp"), "no positive weight"),
    ],
)
def test_mistakes_are_one_line(command, says, capsys, tmp_path) -> None:
    name, *rest = command
    code, out, err = run(capsys, name, *QUICK, *rest, "--out", tmp_path / "o")
    assert code == 2
    assert out == ""
    assert says in err and err.count("\n") == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("method", "given", "chosen"),
    [
        (None, {}, "fedgft-control"),
        (None, {"lam": 1.0}, "fedgft"),
        (None, {"lam": 1.0, "target": 0.0}, "fedgft-control"),
        (None, {"protocol": "paper"}, "fedgft"),
        ("fedgft", {}, "fedgft"),
        ("fedgft", {"target": 0.0}, "fedgft-control"),
        ("fedgft", {"target": 0.02, "lam": 1.0}, "fedgft"),
        ("lft", {"target": 0.02}, "lft"),
    ],
)
def test_the_method_fits_the_options(method, given, chosen) -> None:
    assert choose_method(method, Options(**given)) == chosen


@pytest.mark.parametrize(
    ("option", "value"), [("beta", 1), ("pick", 0.1), ("noise", 1), ("spread", "range")]
)
def test_unused_options_are_reported(option: str, value, capsys) -> None:
    code, _, err = run(capsys, "compare", *QUICK, "--methods", "fedavg", f"--{option}", value)
    assert code == 0
    assert f"--{option} is for" in err


@pytest.mark.filterwarnings("always")
def test_diverged_runs_are_no_traceback_and_no_model(capsys, tmp_path) -> None:
    wild = ("--mu", 1e6, "--optimizer", "sgd", "--epochs", 3, "--batch-size", 32)
    code, _, err = run(capsys, "train", *QUICK, *wild, "--out", tmp_path / "t")
    assert code == 2
    assert "has diverged, so it is not saved" in err
    assert "training diverged in 2 of 2 replicates" in err
    assert not (tmp_path / "t/model.safetensors").exists()
    code, _, err = run(capsys, "frontier", *QUICK, *wild, "--points", 2, "--out", tmp_path / "f")
    assert code == 0, err
    assert "nothing was chosen" in err


def test_a_label_that_fairlearn_cannot_take_is_left_out_with_a_note(capsys, tmp_path) -> None:
    rng = np.random.default_rng(0)
    sex = rng.choice(["f", "m"], 300)
    ok = rng.integers(0, 2, 300)
    ok[sex == "f"] = 0
    pl.DataFrame({"x": rng.standard_normal(300), "sex": sex, "ok": ok}).write_csv(
        tmp_path / "t.csv"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = run(
            capsys,
            "frontier",
            "--data",
            tmp_path / "t.csv",
            "--label",
            "ok",
            "--group",
            "sex",
            "--seeds",
            2,
            "--rounds",
            3,
            "--lr",
            0.03,
            "--clients",
            3,
            "--points",
            2,
            "--references",
            "--json",
            "--out",
            tmp_path / "f",
        )
    assert code == 0, err
    assert "threshold-optimizer: left out" in err
    methods = {row["method"] for row in json.loads(out)["rows"]}
    assert "exponentiated-gradient" in methods and "threshold-optimizer" not in methods


def test_train_is_fair_in_decisions_unless_the_paper_is_asked_for(capsys, tmp_path) -> None:
    out_ = ("--json", "--out", tmp_path / "o", "--overwrite")
    for extra, method in (
        ((), "fedgft-control"),
        (("--lam", 5), "fedgft"),
        (("--protocol", "paper"), "fedgft"),
        (("--protocol", "paper", "--target", 0.1), "fedgft-control"),
        (("--spread", "variance"), "fedgft"),
    ):
        code, out, _ = run(capsys, "train", *QUICK, *extra, *out_)
        found = json.loads(out)
        assert code == 0
        assert found["method"] == method
        assert found["fedavg"]["method"] == "fedavg"
        assert found["accuracy_fedavg"] == found["fedavg"]["accuracy"]
    code, out, _ = run(capsys, "train", *QUICK, "--target", 0.3, "--out", tmp_path / "p")
    said = " ".join(out.split())
    assert "Target 30.0 points for decisions on the clients' own rows: " in said


@pytest.mark.parametrize("base", ["fedprox", "scaffold", "fednova", "fedavgm", "fedyogi"])
def test_bases_from_the_command_line(base: str, capsys) -> None:
    methods = ("lrw", "lft", "fairfed", "fedgft", "fedgft-control")
    code, out, err = run(
        capsys,
        "compare",
        *QUICK,
        "--base",
        base,
        "--methods",
        *methods,
        "--lam",
        5,
        "--beta",
        1,
        "--json",
        "--cohort",
        3,
    )
    assert code == 0, err
    assert {(row["base"], row["method"]) for row in json.loads(out)} == {(base, m) for m in methods}


def test_options_reach_the_slots() -> None:
    options = Options(
        penalty="l1",
        spread="variance",
        control="scores",
        pick=0.3,
        base="fedyogi",
        mu=0.2,
        server_lr=0.5,
        fairfed="exp",
        target=0.07,
        noise=2.0,
    )
    asked = make_protocol(options)
    assert asked.settings.noise == 2.0
    assert asked.strength("fedgft-control") == (0.07,)
    fair = asked.algorithm("fedgft", SP, 3.0)
    assert fair.objective.penalties == (LinearizedPenalty(SP, 3.0, "l1", "variance"),)
    assert fair.correction == Proximal(0.2)
    assert fair.server == Adaptive("yogi", lr=0.5)
    local = asked.algorithm("lft", SP, 3.0).objective.local_penalties
    assert local == (LinearizedPenalty(SP, 3.0, "l1", "variance"),)
    steered = asked.algorithm("fedgft-control", SP, 0.07).objective.penalties
    assert steered == (Controller(SP, 0.07, "soft", pick=0.3),)
    assert asked.algorithm("fairfed", SP, 2.0).weighting == FairFed(SP, 2.0, "exp")


def test_reached_counts_the_replicates_that_meet_the_target() -> None:
    """By the gap that was steered, on the federation's rows, to 0.3 points."""
    for kind in ("hard", "soft"):
        lab = study(seeds=6)
        lab = replace(lab, protocol=replace(lab.protocol, control=kind, target=(0.12,)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TargetMissedWarning)
            result = lab.run(0.5, "fedgft-control", SP)
        found = row(lab, result)
        gap = result.history.federation[-1].gap(SP, kind)
        assert found["reached"] == (gap <= 0.123).sum()
        assert found["target"] == pytest.approx(0.12)
        assert found["target_of"] == {"hard": "decisions", "soft": "scores"}[kind]
    plain = row(lab, lab.run(0.5, "fedavg", SP))
    assert plain["reached"] is None and plain["target"] is None
    strict = replace(lab, protocol=replace(lab.protocol, target=(0.0,)), _known={})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TargetMissedWarning)
        result = strict.run(0.5, "fedgft-control", SP)
    within = result.history.federation[-1].gap(SP, "soft") <= 0.003
    assert row(strict, result)["reached"] == within.sum()


def test_contradictory_metrics_are_explained_and_the_run_ends(capsys) -> None:
    code, out, err = run(
        capsys,
        "compare",
        *QUICK,
        "--methods",
        "fedgft-control",
        "--metrics",
        "sp+eop+predictive-parity",
        "--json",
    )
    assert code == 0
    assert json.loads(out)[0]["metric"] == "sp+eop+predictive-parity"
    assert "cannot meet three demands" in " ".join(err.split())


def test_which_metrics_contradict_each_other(monkeypatch) -> None:
    for name in (
        "sp+eo",
        "eo+predictive-parity",
        "sp+eop+predictive-parity",
        "sp+fpr+predictive-parity",
    ):
        assert contradiction(DATA, get_metric(name)), name
    for name in ("sp", "eo", "sp+eop", "eop+fpr", "eo+eop", "sp+predictive-parity", "eop+fpr+acc"):
        assert contradiction(DATA, get_metric(name)) is None, name
    alike = replace(DATA, groups=np.arange(len(DATA)) % 2, labels=(np.arange(len(DATA)) // 2) % 2)
    assert contradiction(alike, get_metric("sp+eo")) is None
    new = Metric("new", "a metric of one's own", lambda p, y: p[:, 1:])
    monkeypatch.setitem(CATALOG, "new", new)
    assert contradiction(DATA, get_metric("sp+new")) is None
    assert "sp+eo+new" in (contradiction(DATA, get_metric("sp+eo+new")) or "")


def intersections(path, *, lonely: bool):
    """Four intersections; in one of them nobody is positive, in another nobody is at all."""
    rng = np.random.default_rng(0)
    sex = rng.choice(["f", "m"], 400)
    town = rng.choice(["a", "b"], 400)
    keep = ~((sex == "m") & (town == "b"))
    ok = rng.integers(0, 2, 400)
    if lonely:
        ok[(sex == "f") & (town == "b")] = 0
    frame = pl.DataFrame({"x": rng.standard_normal(400), "sex": sex, "town": town, "ok": ok})
    frame.filter(keep).write_csv(path)
    return (
        "--data",
        path,
        "--label",
        "ok",
        "--group",
        "sex,town",
        "--seeds",
        2,
        "--rounds",
        3,
        "--lr",
        0.03,
        "--clients",
        3,
        "--methods",
        "fedgft-control",
        "--metrics",
        "eop",
        "--json",
    )


def test_empty_intersections_are_named_and_left_out_when_asked(capsys, tmp_path) -> None:
    options = intersections(tmp_path / "t.csv", lonely=True)
    code, _, err = run(capsys, "compare", *options)
    assert code == 2
    assert "'f & b'" in err and "--exclude-empty" in err
    code, out, err = run(capsys, "compare", *options, "--exclude-empty")
    assert code == 0
    said = " ".join(err.split())
    assert "left out of the comparison, for want of training rows: 'f & b'" in said
    assert "1 intersection without any row: 'm & b'" in said
    assert json.loads(out)[0]["gap_hard"] is not None


def test_groups_left_out_still_train() -> None:
    three = replace(
        DATA, groups=np.where(np.arange(len(DATA)) < 9, 2, DATA.groups), group_names=("a", "b", "c")
    )
    left = without_groups(three, [0])
    assert left.group_names == ("b", "c")
    assert len(left) == len(three)
    np.testing.assert_array_equal(left.groups, np.array([-1, 0, 1])[three.groups])
    made = partition(three, clients=2, alpha=1.0, seed=0)
    kept = made.rows[three.groups[made.rows] != 2]
    lonely = replace(made, rows=kept, offsets=np.array([0, len(kept)]), keys=made.keys[:1])
    assert empty_groups(lonely, SP) == [2]


def test_message_for_a_target_that_cannot_be_evaluated() -> None:
    line = {"target_of": "decisions", "gap_hard": None, "accuracy": 0.8, "protocol": "heldout"}
    assert "not estimable" in describe_target(line, line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "metric"),
    [(None, "sp@all"), (None, "eop@all"), ("fedfb", "eop"), ("fedfact", "eo"), ("q-ffl", "sp")],
)
def test_published_methods_are_trained_and_drawn(method, metric, tmp_path, capsys) -> None:
    """`train` writes its report and `frontier` its figure, for every kind of method."""
    named = () if method is None else ("--method", method)
    out = tmp_path / "o"
    code, _, err = run(capsys, "train", *QUICK, *named, "--metric", metric, "--out", out)
    assert code == 0, err
    assert (out / "report" / "report.html").exists()
    drawn = ("--methods", method or "fedgft", "--metric", metric, "--points", 2)
    code, _, err = run(capsys, "frontier", *QUICK, *drawn, "--out", tmp_path / "f")
    assert code == 0, err
    assert (tmp_path / "f" / "frontier.svg").exists()
