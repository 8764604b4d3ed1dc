"""The frontier: what is on it, what is chosen from it, and the references beside it."""

import json
import warnings
from dataclasses import replace
from itertools import product

import numpy as np
import polars as pl
import pytest
from sklearn.linear_model import LogisticRegression

from fedgft.cli import main
from fedgft.data.partition import partition
from fedgft.data.scaling import standardise
from fedgft.data.synthetic import synthetic
from fedgft.engine import Settings, simulate
from fedgft.engine.predict import probabilities
from fedgft.experiments import Study, get_protocol
from fedgft.experiments.checks import contradiction, empty_groups, without_groups
from fedgft.experiments.frontier import (
    Spot,
    choose,
    knee,
    pareto,
    spot_row,
    strengths,
    sweep,
    within,
)
from fedgft.experiments.references import check_fairlearn, fairlearn_fit, thresholds
from fedgft.experiments.shelf import Shelf
from fedgft.experiments.store import load_model
from fedgft.federated import fedavg
from fedgft.metrics import CATALOG, Tally, get_metric
from fedgft.report.words import reached
from fedgft.types import FedgftError

SP = CATALOG["sp"]
DATA = synthetic(rows=1500, seed=0)


def study(seeds: int = 2, **settings) -> Study:
    base = get_protocol("heldout")
    made = replace(base.settings, rounds=8, batch_size=64, eval_every=0, **settings)
    return Study(DATA, replace(base, settings=made, lr=(0.03,)), range(seeds), clients=4)


def spot(method: str, gap: float, right: float, strength: float = 1.0) -> Spot:
    """Two groups of 1,000 rows whose decisions have this gap and this accuracy."""
    yes = np.array([500 + 500 * gap, 500 - 500 * gap])
    decision = np.zeros((1, 2, 3, 2))
    for g in range(2):  # labels are such that `right` of the rows agree with the decision
        decision[0, 1, g, 1], decision[0, 0, g, 1] = right * yes[g], (1 - right) * yes[g]
        no = 1000 - yes[g]
        decision[0, 0, g, 0], decision[0, 1, g, 0] = right * no, (1 - right) * no
    tally = Tally(decision.sum(-1), decision, decision)
    return Spot(method, strength, tally, tally)


FRONT = [spot("fedgft", 0.0, 0.60), spot("fedgft", 0.1, 0.79), spot("fedgft", 0.2, 0.81),
         spot("fedgft", 0.4, 0.85), spot("fedgft", 0.3, 0.70)]  # fmt: skip


def test_spots_are_what_they_say() -> None:
    for gap, right in product((0.0, 0.2), (0.6, 0.9)):
        assert spot("x", gap, right).mean(SP, "test") == pytest.approx((right, gap))


def test_pareto_leaves_out_who_is_beaten_in_both() -> None:
    assert pareto(FRONT, SP) == FRONT[:4]
    assert pareto([], SP) == []


def test_the_knee_is_farthest_above_the_chord() -> None:
    assert knee(FRONT, SP) is FRONT[1]
    assert knee(FRONT[:2], SP) is None
    straight = [spot("fedgft", g, 0.6 + g) for g in (0.0, 0.1, 0.2)]
    assert knee([straight[0], spot("fedgft", 0.1, 0.65), straight[2]], SP) is None  # it sags


def test_chosen_within_the_target_or_nearest_to_it() -> None:
    assert choose(FRONT, SP, 0.25) is FRONT[2]
    assert choose(FRONT, SP, 0.0) is FRONT[0]
    assert choose(FRONT[1:], SP, 0.01) is FRONT[1]
    assert choose(FRONT, SP, None) is FRONT[1]
    straight = [spot("fedgft", g, 0.6 + g) for g in (0.2, 0.1)]
    assert choose(straight, SP, None) is straight[1]  # nothing bends: the fairest
    half = spot("fedgft", 0.0, 0.9)  # good where it can be judged, and lost in another replicate
    lost = Tally(*(np.concatenate((a, np.nan * a)) for a in
                   (half.test.count, half.test.score, half.test.decision)))  # fmt: skip
    half = replace(half, federation=lost, test=lost)
    assert choose([*FRONT, half], SP, 0.25) is FRONT[2]
    assert choose([half], SP, 0.25) is None
    better = spot("thresholds", 0.0, 0.99)
    assert choose([*FRONT, better], SP, 0.1) is FRONT[1]  # it needs the group at decision time


def test_the_most_accurate_within_a_gap() -> None:
    assert within(FRONT, SP, 0.15) is FRONT[1]
    assert within(FRONT, SP, 0.9) is FRONT[3]
    assert within(FRONT[1:], SP, 0.05) is None  # fairer than it has ever been


def test_nobody_pays_for_less_than_chance() -> None:
    """On 2,000 rows chance alone shows about 1.8 points."""
    close = [spot("fedgft", 0.0, 0.60), spot("fedavg", 0.015, 0.90), spot("fedgft", 0.3, 0.91)]
    assert pareto(close, SP) == close[1:]
    assert choose(close, SP, None) is close[1]


def test_a_target_is_among_what_is_swept() -> None:
    grid = strengths(study(), "fedgft-control", 5, widest=0.3, target=0.05)
    assert len(grid) == 5 and 0.05 in grid and grid == sorted(grid)
    assert max(strengths(study(), "fedgft-control", 5, widest=1.0)) < 1


def test_the_replicate_that_is_saved_meets_the_target() -> None:
    many = [spot("fedgft", g, 0.7 + g) for g in (0.3, 0.1, 0.05)]
    stacked = Tally(*(np.concatenate([getattr(s.test, f) for s in many])
                      for f in ("count", "score", "decision")))  # fmt: skip
    three = replace(many[0], federation=stacked, test=stacked)
    assert three.nearest(SP, 0.12) == 1  # the more accurate of the two within it
    assert three.nearest(SP, 0.01) == 2  # none is: the fairest
    assert three.nearest(SP, None) == 1  # nearest to the mean


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_scores_of_rows_add_up_to_the_tallies_of_the_engine(model: str) -> None:
    made = standardise(partition(DATA, clients=4, alpha=0.5, seed=0))
    settings = Settings(rounds=2, dtype="float64", batch_size=64)
    history = simulate([made], model, fedavg(), settings, seeds=[0], lr=0.03)
    probs = probabilities(made, model, history.params[0], made.test)
    tally = Tally.of(probs, DATA.labels[made.test], DATA.groups[made.test], num_groups=2)
    np.testing.assert_allclose(tally.score, history.test.score[-1, 0], atol=1e-9)
    np.testing.assert_array_equal(tally.decision, history.test.decision[-1, 0])
    assert probabilities(made, model, history.params[0], made.test[:0]).shape == (0, 2)


def test_thresholds_are_the_best_there_are() -> None:
    """Against every pair of thresholds on the histogram's grid."""
    lab = study(seeds=1)
    plain = lab.run(0.5, "fedavg", SP)
    tolerance = 0.03
    [(clients, test)] = thresholds(lab, plain, [tolerance])
    made = plain.federations[0]
    p = probabilities(made, "logistic", plain.history.params[0], made.rows)[:, 1]
    y, a = DATA.labels[made.rows], DATA.groups[made.rows]
    grid = np.append(np.arange(400) / 400, 2.0)
    accept = [p[a == g][:, None] >= grid for g in (0, 1)]
    rate = [each.mean(0) for each in accept]
    right = [(each == (y[a == g] == 1)[:, None]).sum(0) for g, each in enumerate(accept)]
    allowed = np.abs(rate[0][:, None] - rate[1][None, :]) <= tolerance
    best = np.where(allowed, right[0][:, None] + right[1][None, :], 0).max() / len(y)
    assert clients.accuracy()[0] == pytest.approx(best)
    assert clients.gap(SP, "hard")[0] <= tolerance + 1e-12
    assert test.rows()[0] == len(made.test)


def test_fairlearn_on_pooled_rows_is_fairlearn() -> None:
    """Tallies of its randomised decisions are the means of its own probabilities."""
    from fairlearn.reductions import DemographicParity, ExponentiatedGradient

    made = study(seeds=1).federations(0.5)[0]
    train, test = fairlearn_fit(made, SP, 0.02)
    x = (made.dataset.features - made.mean) / made.spread
    y, a = DATA.labels, DATA.groups
    theirs = ExponentiatedGradient(
        LogisticRegression(max_iter=200), DemographicParity(difference_bound=0.02), eps=0.02,
        max_iter=20,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.fit(x[made.rows], y[made.rows], sensitive_features=a[made.rows])
    p = theirs._pmf_predict(x[made.test])[:, 1]
    right = np.where(y[made.test] == 1, p, 1 - p).mean()
    gap = abs(p[a[made.test] == 0].mean() - p[a[made.test] == 1].mean())
    assert test.accuracy() == pytest.approx(right, abs=1e-6)
    assert test.gap(SP, "hard") == pytest.approx(gap, abs=1e-6)
    assert train.gap(SP, "hard") < 0.05
    fitted, _ = fairlearn_fit(made, SP, None)
    assert fitted.gap(SP, "hard") < 0.02


def test_fits_are_kept_and_damaged_ones_made_anew(tmp_path) -> None:
    lab, shelf = study(seeds=1), Shelf(tmp_path)
    first = fairlearn_fit(lab.federations(0.5)[0], SP, None, shelf)
    [file] = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    other = fairlearn_fit(
        lab.federations(5.0)[0], SP, None, shelf
    )  # the same rows, dealt otherwise
    assert file.stat().st_mtime_ns == before
    for a, b in zip(first, other, strict=True):
        np.testing.assert_array_equal(a.decision, b.decision)
    fairlearn_fit(lab.federations(0.5)[0], CATALOG["eop"], None, shelf)
    assert len(list(tmp_path.iterdir())) == 2
    file.write_text(file.read_text().replace("1", "2"))
    again = fairlearn_fit(lab.federations(0.5)[0], SP, None, shelf)
    np.testing.assert_array_equal(again[0].decision, first[0].decision)


def test_fairlearn_knows_what_it_knows() -> None:
    check_fairlearn(SP, 2)
    with pytest.raises(FedgftError, match="no method for cal"):
        check_fairlearn(CATALOG["cal"], 2)
    with pytest.raises(FedgftError, match="with 3 classes"):
        check_fairlearn(SP, 3)


def test_a_sweep_is_what_each_strength_is_alone() -> None:
    lab = study()
    spots = sweep(lab, SP, 0.5, ["fedgft-control", "fedgft", "thresholds"], points=3)
    assert [s.method for s in spots] == ["fedavg", *["fedgft-control"] * 3, *["fedgft"] * 3,
                                         *["thresholds"] * 3]  # fmt: skip
    assert spots[1].strength == 0
    row = spot_row(lab, SP, 0.5, spots[1])
    assert row["gap_hard"] == pytest.approx(spots[1].mean(SP, "federation")[1])
    again = study().run(0.5, "fedgft-control", SP)  # its target is 0
    np.testing.assert_array_equal(again.history.params, spots[1].result.history.params)
    assert spot_row(lab, SP, 0.5, spots[-1])["gap_soft"] is None


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
    code, out, err = run(capsys, "frontier", *QUICK, "--points", 3, "--target", 0.05, "--json",
                         "--out", tmp_path / "f", "--references")  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    methods = {row["method"] for row in found["rows"]}
    assert methods == {"fedavg", "lrw", "fairfed", "lft", "fedgft", "fedgft-control", "thresholds",
                       "pooled", "exponentiated-gradient", "threshold-optimizer"}  # fmt: skip
    assert found["target"] == 0.05
    assert found["chosen"]["method"] in methods
    names = {p.name for p in (tmp_path / "f").iterdir()}
    assert names == {"frontier.parquet", "frontier.png", "frontier.svg", "model.safetensors",
                     "cells"}  # fmt: skip
    fits = list((tmp_path / "f/cells").iterdir())
    assert len(fits) == 2 * 4  # replicates, three bounds and the thresholds
    assert len(pl.read_parquet(tmp_path / "f/frontier.parquet")) == len(found["rows"])
    saved = load_model(tmp_path / "f/model.safetensors")
    assert saved.about["method"] == found["chosen"]["method"]
    assert saved.about["seed"] == found["chosen"]["replicate"]
    code, out, _ = run(capsys, "frontier", *QUICK, "--points", 3, "--methods", "fedgft-control",
                       "--out", tmp_path / "g")  # fmt: skip
    assert code == 0
    assert "Chosen: FedGFT control" in out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("frontier", "--points", 1), "--points"),
        (("frontier", "--lam", 3), "frontier sweeps it"),
        (("frontier", "--methods"), "--methods"),
        (("frontier", "--metric", "dp"), "'dp' is not known"),
        (("frontier", "--metric", "cal", "--references"), "no method for cal"),
        (("frontier", "--alpha", 0), "--alpha"),
        (("train", "--target", 2), "two points are 0.02"),
        (("train", "--target", -0.1), "--target"),
        (("train", "--target", "nan"), "--target"),
        (("train", "--target", 0.1, "--method", "fedgft"), "--target is for fedgft-control"),
        (("train", "--lam", 1, "--method", "fedgft-control"), "--lam is for fedgft and lft"),
        (("train", "--spread", "range", "--target", 0.1), "--target is for fedgft-control"),
        (("train", "--pick", 0.5, "--cohort", 2), "--pick needs exact sums"),
        (("train", "--mu", 1e7), "--mu must lie between"),
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
    ("option", "value"), [("beta", 1), ("pick", 0.1), ("noise", 1), ("spread", "range")]
)
def test_options_that_nobody_listens_to_are_noted(option: str, value, capsys) -> None:
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
    sex, ok = rng.choice(["f", "m"], 300), rng.integers(0, 2, 300)
    ok[sex == "f"] = 0
    pl.DataFrame({"x": rng.standard_normal(300), "sex": sex, "ok": ok}).write_csv(
        tmp_path / "t.csv"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = run(capsys, "frontier", "--data", tmp_path / "t.csv", "--label", "ok",
                             "--group", "sex", "--seeds", 2, "--rounds", 3, "--lr", 0.03,
                             "--clients", 3, "--points", 2, "--references", "--json", "--out",
                             tmp_path / "f")  # fmt: skip
    assert code == 0, err
    assert "threshold-optimizer: left out" in err
    methods = {row["method"] for row in json.loads(out)["rows"]}
    assert "exponentiated-gradient" in methods and "threshold-optimizer" not in methods


def test_train_is_fair_in_decisions_unless_the_paper_is_asked_for(capsys, tmp_path) -> None:
    out_ = ("--json", "--out", tmp_path / "o")
    for extra, method in (((), "fedgft-control"), (("--lam", 5), "fedgft"),
                          (("--protocol", "paper"), "fedgft")):  # fmt: skip
        code, out, _ = run(capsys, "train", *QUICK, *extra, *out_)
        found = json.loads(out)
        assert code == 0
        assert found["method"] == method
        assert ("accuracy_fedavg" in found) == (method == "fedgft-control")
    code, out, _ = run(capsys, "train", *QUICK, "--target", 0.3, "--out", tmp_path / "o")
    assert "Asked for a gap of decisions of at most 30.0 points" in out
    assert "The saved model, of seed 0" in out


@pytest.mark.parametrize("base", ["fedprox", "scaffold", "fednova", "fedavgm", "fedyogi"])
def test_bases_from_the_command_line(base: str, capsys) -> None:
    methods = ("lrw", "lft", "fairfed", "fedgft", "fedgft-control")
    code, out, err = run(capsys, "compare", *QUICK, "--base", base, "--methods", *methods,
                         "--lam", 5, "--beta", 1, "--json", "--cohort", 3)  # fmt: skip
    assert code == 0, err
    assert {(row["base"], row["method"]) for row in json.loads(out)} == {(base, m) for m in methods}


def test_contradictory_metrics_are_explained_and_the_run_ends(capsys) -> None:
    code, out, err = run(capsys, "compare", *QUICK, "--methods", "fedgft-control", "--metrics",
                         "sp+eop+cal", "--json")  # fmt: skip
    assert code == 0
    assert json.loads(out)[0]["metric"] == "sp+eop+cal"
    assert "cannot meet three demands" in " ".join(err.split())


def test_what_contradicts_and_what_does_not() -> None:
    for name in ("sp+eo", "eo+cal", "sp+eop+cal", "sp+fpr+cal"):
        assert contradiction(DATA, get_metric(name)), name
    for name in ("sp", "eo", "sp+eop", "eop+fpr", "eo+eop", "sp+cal", "eop+fpr+acc"):
        assert contradiction(DATA, get_metric(name)) is None, name
    alike = replace(DATA, groups=np.arange(len(DATA)) % 2, labels=(np.arange(len(DATA)) // 2) % 2)
    assert contradiction(alike, get_metric("sp+eo")) is None


def intersections(path, *, lonely: bool):
    """Four intersections; in one of them nobody is positive, in another nobody is at all."""
    rng = np.random.default_rng(0)
    sex, town = rng.choice(["f", "m"], 400), rng.choice(["a", "b"], 400)
    keep = ~((sex == "m") & (town == "b"))
    ok = rng.integers(0, 2, 400)
    if lonely:
        ok[(sex == "f") & (town == "b")] = 0
    frame = pl.DataFrame({"x": rng.standard_normal(400), "sex": sex, "town": town, "ok": ok})
    frame.filter(keep).write_csv(path)
    return ("--data", path, "--label", "ok", "--group", "sex,town", "--seeds", 2, "--rounds", 3,
            "--lr", 0.03, "--clients", 3, "--methods", "fedgft-control", "--metrics", "eop",
            "--json")  # fmt: skip


def test_empty_intersections_are_named_and_left_out_when_asked(capsys, tmp_path) -> None:
    options = intersections(tmp_path / "t.csv", lonely=True)
    code, _, err = run(capsys, "compare", *options)
    assert code == 2
    assert "'f & b'" in err and "--exclude-empty" in err
    code, out, err = run(capsys, "compare", *options, "--exclude-empty")
    assert code == 0
    said = " ".join(err.split())
    assert "left out of the comparison, for want of training rows: 'f & b'" in said
    assert "1 intersection(s) have no row at all: 'm & b'" in said
    assert json.loads(out)[0]["gap_hard"] is not None


def test_groups_left_out_still_train() -> None:
    three = replace(DATA, groups=np.where(np.arange(len(DATA)) < 9, 2, DATA.groups),
                    group_names=("a", "b", "c"))  # fmt: skip
    left = without_groups(three, [0])
    assert left.group_names == ("b", "c")
    assert len(left) == len(three)
    np.testing.assert_array_equal(left.groups, np.array([-1, 0, 1])[three.groups])
    made = partition(three, clients=2, alpha=1.0, seed=0)
    lonely = replace(made, rows=made.rows[three.groups[made.rows] != 2],
                     offsets=np.array([0, (three.groups[made.rows] != 2).sum()]))  # fmt: skip
    assert empty_groups(lonely, SP) == [2]


def test_words_about_a_target_that_cannot_be_judged() -> None:
    row = {"target_of": "decisions", "gap_hard": None, "accuracy": 0.8, "protocol": "heldout"}
    assert "not estimable" in reached(row, row)
