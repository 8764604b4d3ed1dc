"""The report of a training run: collapsed models, missed targets, the groups behind a gap and
the saved model, on synthetic data.
"""

import json
import re
import shlex
import warnings
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from fedgft.cli import main
from fedgft.data.dataset import Dataset
from fedgft.data.generated import synthetic
from fedgft.engine import History
from fedgft.fair_model import load_model
from fedgft.formatting import group_colors
from fedgft.metrics import get_metric
from fedgft.metrics.intervals import gap_interval
from fedgft.study import PROTOCOLS, Result, Study, client_rows, get_protocol, round_rows, row
from fedgft.study.cache import Checkpoints
from fedgft.study.figures import (
    _find_limits,
    _spread_labels,
    plot_before_after,
    plot_frontier,
    plot_rounds,
    save_figure,
)
from fedgft.study.results import choose_replicate, state_finding
from fedgft.study.tradeoff import Frontier, TradeoffPoint, choose_point, point_row
from fedgft.study.training import (
    Comparison,
    TrainedModel,
    count_missed,
    describe_saved_model,
    describe_target,
    describe_widest,
    list_results,
    save_model,
    state_target,
    suggest_changes,
    write_rows,
)
from fedgft.sums import Sums, stack

pytestmark = [
    pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning"),
    pytest.mark.filterwarnings("ignore::fedgft.algorithms.controller.TargetMissedWarning"),
]
SP, EOP, EO = (get_metric(name) for name in ("sp", "eop", "eo"))


def run(capsys, *arguments):
    try:
        main([str(a) for a in arguments])
        code = 0
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), captured.err


def table(*cells: tuple[int, int]) -> Sums:
    """Of each group, for label 0 and then for label 1: rows, and how many of them are accepted."""
    decision = np.zeros((2, len(cells) // 2 + 1, 2))
    for at, (rows, accepted) in enumerate(cells):
        group, label = divmod(at, 2)
        decision[label, group] = rows - accepted, accepted
    return Sums(decision.sum(-1), decision, decision)


# 21,791 people, 92.3% of them positive. The plain model is right in 93.0% of all cases, the other
# one accepts 21,785 of them and is right in 92.3%.
PLAIN = table((900, 600), (7_100, 6_900), (778, 700), (13_013, 12_988))
ACCEPTS_ALL = table((900, 898), (7_100, 7_099), (778, 776), (13_013, 13_012))


def test_no_interval_below_ten_rows() -> None:
    statistics = np.array([[[5.0, 30.0]], [[9.0, 60.0]]])
    assert np.isnan(gap_interval(SP, statistics, fewest=10)).all()
    statistics[1, 0, 0] = 10
    assert np.isfinite(gap_interval(SP, statistics, fewest=10)).all()


# Rows and sentences


def people(groups=("man", "woman"), classes=("no", "yes")) -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset(
        "people",
        rng.standard_normal((60, 2)),
        np.arange(60) % len(classes),
        np.arange(60) // len(classes) % len(groups),
        ("x0", "x1"),
        classes,
        groups,
    )


def history_of(runs: list[Sums], rounds: int = 50) -> History:
    """As if training had led to the models with these sums, on the clients' rows and on others."""
    each = stack(runs)
    both = stack([each, each])
    clients = each.map(lambda array: array[:, None])
    params = np.full((len(runs), 6), float(rounds))
    return History(np.array([0, rounds]), both, both, clients, clients, params, 1.0, "x")


def result(study: Study, method: str, runs: list[Sums], *, metric=SP, target=0.02) -> Result:
    """As if each replicate had been trained into the model with these sums on all its rows."""
    seeds = len(runs)
    made = history_of(runs)
    return Result(
        0.5,
        method,
        metric,
        made,
        study.federations(0.5),
        np.full(seeds, 0.01),
        np.full(seeds, target),
        np.full(seeds, 50),
    )


def lab(seeds: int, **changes) -> Study:
    return Study(people(), replace(get_protocol("heldout"), **changes), range(seeds), clients=2)


def test_a_model_that_accepts_everybody_is_called_collapsed() -> None:
    study = lab(20)
    plain = row(study, result(study, "fedavg", [PLAIN] * 20))
    fair = row(study, result(study, "fedgft-control", [ACCEPTS_ALL] * 19 + [PLAIN]))
    assert (fair["reached"], fair["reached_collapsed"], fair["collapsed"]) == (19, 19, 19)
    assert 100 * (plain["accuracy"] - fair["accuracy"]) == pytest.approx(0.7, abs=0.05)
    assert fair["accuracy_constant"] == pytest.approx(20_113 / 21_791)
    assert fair["balanced_accuracy"] < 0.52 < plain["balanced_accuracy"]
    assert fair["selection_rates_federation"]["man"] > 0.99
    assert plain["collapsed"] == 0 and count_missed(fair) == 20 and count_missed(plain) == 0
    said = describe_target(fair, plain)
    assert "reached in 19 of 20 replicates, but 19 of these models have collapsed" in said
    assert "nearly everybody the same decision" in said
    assert "always predicting the most frequent class has 92.3%" in said
    assert "0.7 points less than FedAvg" in said
    assert "a larger --target" in suggest_changes(fair) and "--lr" in suggest_changes(fair)
    chosen = choose_replicate(study, result(study, "fedgft-control", [ACCEPTS_ALL] * 19 + [PLAIN]))
    assert chosen.replicate == 19 and chosen.why == "nearest" and not chosen.collapsed


def test_nothing_is_called_collapsed_that_is_not() -> None:
    study = lab(3)
    fair = row(study, result(study, "fedgft-control", [PLAIN] * 3, target=0.3))
    assert fair["collapsed"] == 0 and suggest_changes(fair) == ""
    assert "collapsed" not in describe_target(fair, fair)


def gapped(gap: float, right: float) -> Sums:
    """Two groups of 1,000 rows whose decisions have this gap and this accuracy."""
    cells = []
    for accepted in (500 + 500 * gap, 500 - 500 * gap):
        hits = round(right * accepted)
        wrong = round((1 - right) * accepted)
        positives = hits + round((1 - right) * (1000 - accepted))
        cells += [(1000 - positives, wrong), (positives, hits)]
    return table(*cells)


def test_the_saved_replicate_is_the_best_that_met_the_target(tmp_path) -> None:
    gaps = [0.103, 0.02, 0.011, 0.3, 0.019]
    right = [0.9, 0.7, 0.8, 0.95, 0.75]
    study = lab(5)
    made = result(study, "fedgft-control", [gapped(g, r) for g, r in zip(gaps, right, strict=True)])
    fair = row(study, made)
    chosen = choose_replicate(study, made)
    assert fair["reached"] == chosen.met == 3
    assert (chosen.replicate, chosen.why) == (2, "met")  # not seed 0, whose gap is 10.3 points
    path = save_model(study, made, 2, tmp_path / "m.safetensors", why="because")
    about = load_model(path).about["trained"]
    assert about["seed"] == 2 and about["target"] == 0.02 and about["reached"]
    assert about["gap"] == pytest.approx(0.011, abs=1e-3) and about["why"] == "because"
    said = describe_saved_model(about)
    assert "seed 2, because" in said and "(target 2.0: met)" in said
    assert "on the clients' own rows: reached in 3 of 5 replicates (mean" in describe_target(fair)
    strict = result(study, "fedgft-control", made_tallies(made), target=0.0)
    none = choose_replicate(study, strict)
    assert (none.replicate, none.why, none.met) == (2, "nearest", 0)
    assert "rows: missed in all 5 replicates" in describe_target(row(study, strict))
    assert "--rounds 100; 50 were tried" in suggest_changes(row(study, strict))
    first = choose_replicate(study, result(study, "fedgft", made_tallies(made)))
    assert (first.replicate, first.why) == (0, "first")


def made_tallies(made: Result) -> list[Sums]:
    assert made.history.federation is not None
    return [made.history.federation[-1][i] for i in range(len(made.lr))]


def test_the_groups_and_the_class_behind_a_gap_are_named() -> None:
    groups = ("a", "b", "c")
    classes = ("red", "green", "blue")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 3000)
    group = rng.integers(0, 3, 3000)
    chosen = np.where((group == 2) & (rng.random(3000) < 0.5), 1, labels)  # c is often "green"
    tally = Sums.of(np.eye(3)[chosen], labels, group, num_groups=3)
    study = Study(people(groups, classes), get_protocol("heldout"), range(2), clients=2)
    found = row(study, result(study, "fedgft-control", [tally] * 2))
    assert found["widest"]["condition"] == "class green" and found["widest"]["high"] == "c"
    assert found["widest"]["replicates"] == 2
    assert set(found["selection_rates"]["c"]) == set(classes)
    assert f"widest between c (the higher rate) and {found['widest']['low']}, class green" in (
        describe_target(found)
    )
    other = {"high": "a", "low": "b", "condition": "class x", "replicates": 3}
    assert describe_widest(other, 5).endswith("in 3 of 5 replicates")
    assert describe_widest(None, 5) == "not estimable"
    given = row(study, result(study, "fedgft-control", [tally] * 2, metric=EO))
    assert " given label " in given["widest"]["condition"]


def test_intervals_are_withheld_below_ten_rows_in_training() -> None:
    study = lab(2)
    few = table((30, 10), (30, 20), (4, 1), (5, 3))
    made = result(study, "fedgft-control", [few] * 2)
    found = row(study, made)
    assert found["gap_hard_test"] is not None and found["fewest_rows"] == 9
    assert found["gap_hard_test_low"] is None and found["gap_hard_test_high"] is None
    plain = row(study, result(study, "fedavg", [few] * 2))
    said = list_results([plain, found], groups=("man", "woman"), title="sp")
    assert "not estimable: fewer than ten rows" in said[1]
    point = TradeoffPoint("fedgft-control", 0.02, few[None], few[None])
    assert point_row(study, SP, 0.5, point)["gap_hard_test_low"] is None
    enough = row(study, result(study, "fedavg", [table((30, 10), (30, 20), (5, 1), (5, 3))] * 2))
    assert enough["gap_hard_test_low"] is not None


def test_rows_with_tables_in_them_go_to_parquet(tmp_path) -> None:
    study = lab(2)
    rows = [row(study, result(study, m, [PLAIN] * 2)) for m in ("fedavg", "fedgft-control")]
    kept = pl.read_parquet(write_rows(rows, tmp_path / "r.parquet"))
    assert json.loads(kept["selection_rates"][0]) == rows[0]["selection_rates"]
    assert json.loads(kept["rounds"][1]) == {"50": 2}
    assert kept["collapsed"].to_list() == [0, 0]


def test_a_collapsed_point_is_not_chosen_from_a_frontier() -> None:
    gone = TradeoffPoint("fedgft-control", 0.0, ACCEPTS_ALL[None], ACCEPTS_ALL[None])
    plain = TradeoffPoint("fedavg", None, PLAIN[None], PLAIN[None])
    assert choose_point([plain, gone], SP, 0.02) is plain
    assert choose_point([gone], SP, 0.02) is gone
    both = stack([ACCEPTS_ALL, PLAIN])
    assert TradeoffPoint("fedgft-control", 0.0, both, both).choose_replicate(SP, 0.02) == 1
    assert point_row(lab(1), SP, 0.5, gone)["collapsed"] == 1


# The grid of learning rates, and the rounds


def quick(seeds=range(3), *, rounds: int = 4, **changes) -> Study:
    base = get_protocol("heldout")
    settings = replace(base.settings, rounds=rounds, eval_every=0)
    return Study(
        synthetic(rows=1500, seed=3), replace(base, settings=settings, **changes), seeds, clients=4
    )


def inner_accuracy(rates: tuple[float, ...]) -> np.ndarray:
    """(rate, replicate): each rate by itself on the same inner splits."""
    return np.stack(
        [
            quick(lr=(rate, 9.0))._try_out("", 0.5, quick()._fedavg, None, lr=np.array([[rate]]))[
                0
            ][0]
            for rate in rates
        ]
    )


def test_the_grid_of_rates_grows_where_its_edge_is_best() -> None:
    grid = (0.005, 0.01, 0.02, 0.03)
    more = (0.001, 0.002, 0.05, 0.1, 0.2)
    every = (*more[:2], *grid, *more[2:])
    accuracy = inner_accuracy(every)
    expected = []
    for own in accuracy.T:  # uphill from the best of the grid, outwards, one step at a time
        at = 2 + int(np.argmax(own[2:6]))
        step = {2: -1, 5: 1}.get(at, 0)
        while step and 0 <= at + step < len(every) and own[at + step] > own[at]:
            at += step
        expected.append(every[at])
    found = quick().choose_lr(0.5)
    assert found.tolist() == expected
    assert max(expected) > 0.03  # of four rounds, so that the edge is chosen at all
    assert quick([2]).choose_lr(0.5).tolist() == expected[2:]  # whatever the others choose
    assert set(quick(more_lr=()).choose_lr(0.5)) <= set(grid)
    assert quick(lr=(0.01,)).choose_lr(0.5).tolist() == [0.01] * 3


def test_a_rate_inside_the_grid_is_left_alone() -> None:
    """Nothing more is trained for it, so nothing can change."""
    trained = []
    study = replace(quick(), on_progress=lambda *said: trained.append(said))
    chosen = np.array([0.01, 0.02, 0.01])
    accuracy = np.full((4, 3), 0.8)
    assert study._search_beyond_grid(0.5, chosen, accuracy).tolist() == chosen.tolist()
    assert not trained
    lost = np.full((4, 3), np.nan)  # no rate is known, so none is at the edge
    assert study._search_beyond_grid(0.5, np.full(3, 0.03), lost).tolist() == [0.03] * 3
    assert not trained


@pytest.mark.slow
def test_replicates_that_miss_their_target_are_trained_for_more_rounds() -> None:
    fixed = {"lr": (0.03,), "target": (0.06,)}
    long = quick(range(6), rounds=8, **fixed, round_factors=(2, 4))
    found = long.run(0.5, "fedgft-control", SP)
    alone = {n: quick(range(6), rounds=8 * n, **fixed, round_factors=()) for n in (1, 2, 4)}
    each = {n: study.run(0.5, "fedgft-control", SP) for n, study in alone.items()}
    gaps = {n: r.history.federation[-1].gap(SP, "hard") for n, r in each.items()}
    for i in range(6):
        over = {n: max(gaps[n][i] - 0.063, 0.0) for n in gaps}
        steady = {n: bool(r.history.control.settled[i]) for n, r in each.items()}
        met = [n for n in (1, 2, 4) if over[n] == 0 and steady[n]]
        kept = met[0] if met else min((1, 2, 4), key=lambda n: (over[n], not steady[n]))
        assert found.rounds[i] == 8 * kept
        np.testing.assert_array_equal(found.history.params[i], each[kept].history.params[i])
        np.testing.assert_array_equal(
            found.history.after.decision[i], each[kept].history.after.decision[i]
        )
    assert len(set(found.rounds.tolist())) > 1  # or the test says nothing
    line = row(long, found)
    assert line["rounds"] == {str(n): found.rounds.tolist().count(n) for n in set(found.rounds)}
    assert line["reached"] >= row(alone[1], each[1])["reached"]
    gap = found.history.federation[-1].gap(SP, "hard")
    assert found.history.control.gap == pytest.approx(gap)
    if line["reached"] < 6:
        assert "above the target of 6.0" in line["missed_because"]
        assert line["missed_because"] in suggest_changes(line)
        assert re.match("In the replicate of seed [0-9], the gap", line["missed_because"])
        assert ": try" not in line["missed_because"]  # what to try is said once
    last = {r["seed"]: r["round"] for r in round_rows(long, found)}
    assert [last[i] for i in range(6)] == found.rounds.tolist()
    plain = long.run(0.5, "fedavg", SP)
    assert plain.rounds.tolist() == [8] * 6  # which has no target


def test_of_runs_that_never_meet_their_target_the_nearest_counts(monkeypatch) -> None:
    gaps = {50: (0.10, 0.10, 0.01, 0.10), 100: (0.20, 0.05, 0.0, 0.20), 200: (0.15, 0.08, 0.0, 0.0)}
    trained = []

    def simulate(self, what, batch, algorithm, settings) -> History:
        trained.append(list(batch.seeds))
        each = [gapped(gaps[settings.rounds][seed], 0.8) for seed in batch.seeds]
        return history_of(each, settings.rounds)

    monkeypatch.setattr(Study, "_simulate", simulate)
    study = lab(4, target=(0.02,), lr=(0.01,))
    found = study.run(0.5, "fedgft-control", SP)
    assert trained == [[0, 1, 2, 3], [0, 1, 3], [0, 1, 3]]
    assert found.rounds.tolist() == [50, 100, 50, 200]
    assert found.history.params[:, 0].tolist() == [50, 100, 50, 200]
    assert found.history.rounds.tolist() == [0, 50]
    own = found.history.federation[-1].gap(SP, "hard")
    assert own == pytest.approx([0.10, 0.05, 0.01, 0.0], abs=2e-3)


def test_a_given_number_of_rounds_is_kept() -> None:
    from fedgft.cli.options import Options
    from fedgft.cli.study_session import make_protocol

    assert make_protocol(Options()).round_factors == (2, 4)
    assert make_protocol(Options(rounds=50)).round_factors == ()
    assert make_protocol(Options(lr=0.1)).lr == (0.1,)
    assert make_protocol(Options(protocol="paper")).round_factors == ()
    assert get_protocol("heldout", images=True).round_factors == ()


# From the command line


QUICK = "--data synthetic --seeds 3 --lr 0.03 --clients 4"


@pytest.mark.slow
def test_training_for_more_rounds_is_resumed_to_the_same_bits(
    capsys, tmp_path, monkeypatch
) -> None:
    base = get_protocol("heldout")
    short = replace(base, settings=replace(base.settings, rounds=3))
    monkeypatch.setitem(PROTOCOLS, "heldout", short)
    command = ["train", *shlex.split(QUICK), "--target", 0.001, "--json", "--checkpoint-every", 1]
    put = Checkpoints.put
    calls = []

    def interrupted(self, *given):
        put(self, *given)
        calls.append(given)
        if len(calls) == 7:  # two each of FedAvg and the target, then the longer runs
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "put", interrupted)
        assert run(capsys, *command, "--out", tmp_path / "cut")[0] == 130
    code, cut, err = run(capsys, *command, "--resume", "--out", tmp_path / "cut")
    assert code == 0, err
    code, whole, err = run(capsys, *command, "--out", tmp_path / "whole")
    assert code == 0, err
    first = json.loads(cut)
    second = json.loads(whole)
    assert first["saved"] == second["saved"] and first["clients"] == second["clients"]
    assert sum(first["rounds"].values()) == 3 and set(first["rounds"]) - {"3"}


@pytest.mark.slow
def test_train_says_and_saves_which_replicate_and_why(capsys, tmp_path) -> None:
    command = ["train", *shlex.split(QUICK), "--rounds", 8, "--target", 0.12]
    code, out, _ = run(capsys, *command, "--json", "--strict", "--all-models", "--out", tmp_path)
    found = json.loads(out)
    kept = load_model(tmp_path / "model.safetensors").about
    assert code == 0 and found["saved"]["reached"] and not found["saved"]["collapsed"]
    assert kept["seed"] == found["saved"]["seed"] and kept["trained"] == found["saved"]
    each = [load_model(tmp_path / f"model-{seed}.safetensors").about for seed in range(3)]
    met = [a["trained"] for a in each if a["trained"]["reached"]]
    assert found["reached"] == len(met)
    assert kept["seed"] == max(met, key=lambda a: a["accuracy"])["seed"]
    assert f"the most accurate of the {len(met)} that met the target" in found["saved"]["why"]
    code, out, _ = run(capsys, "--verbose", *command, "--out", tmp_path / "t")
    assert code == 0
    assert f"Saved model: the replicate of seed {kept['seed']}, the most accurate of the" in out
    assert "Held-out decisions differ by " in out
    assert "clients with FedAvg and with FedGFT: accuracy and gap of decisions" in out
    assert "balanced constant selected selected" in out and "What to try" not in out
    assert "constant: always predicts the most frequent class" in out


@pytest.mark.slow
def test_a_missed_target_is_told_with_what_to_try_and_has_an_exit_code(capsys, tmp_path) -> None:
    command = ["train", *shlex.split(QUICK), "--rounds", 2, "--target", 0]
    code, out, _ = run(capsys, "--verbose", *command, "--strict", "--out", tmp_path / "t")
    assert code == 4
    assert "on the clients' own rows: missed in all 3 replicates" in out
    assert "What to try: more rounds (--rounds 4; 2 were tried)" in out
    assert "none met the target on its clients' rows, and this one is nearest to it" in out
    assert "(target 0.0: missed)" in out
    about = load_model(tmp_path / "t/model.safetensors").about["trained"]
    assert about["reached"] is False and about["why"].startswith("none met the target")
    code, _, err = run(capsys, *command[:-2], "--strict", "--method", "fedavg")
    assert code == 2 and "--strict is for fedgft-control" in err


@pytest.mark.slow
def test_compare_says_whether_a_target_was_reached(capsys) -> None:
    command = ["compare", *shlex.split(QUICK), "--rounds", 2]
    both = ("--methods", "fedavg", "fedgft-control")
    code, out, _ = run(capsys, *command, *both, "--target", 0, "--strict")
    assert code == 4 and "What to try" in out and ", FedAvg " in out
    assert run(capsys, *command, *both, "--target", 0)[0] == 0  # only where it is asked for
    code, out, _ = run(capsys, *command, *both[:1], *both[2:], "--target", 0.9, "--strict")
    assert code == 0 and "in 3 of 3 replicates" in out and "What to try" not in out


@pytest.mark.slow
def test_frontier_says_whether_a_target_was_reached(capsys, tmp_path) -> None:
    command = [
        "frontier",
        *shlex.split(QUICK),
        "--rounds",
        2,
        "--points",
        2,
        "--methods",
        "fedgft-control",
        "--out",
        tmp_path,
        "--strict",
    ]
    code, out, _ = run(capsys, *command, "--target", 0.0)
    assert code == 4 and "Nothing reached 0 points" in out and "What to try" in out
    assert "whose gap is nearest to the target: none is within it on its clients' rows" in out
    code, out, _ = run(capsys, "--verbose", *command, "--target", 0.9, "--overwrite")
    assert out.startswith("Held-out rows, mean of 3 replicates. Statistical parity between")
    assert "Chosen on the clients' rows: " in out and "Chosen: " not in out
    assert "Saved model: the replicate of seed " in out and " points on held-out rows." in out
    assert "Its balanced accuracy is" in out and "The gap is widest between" in out
    assert "10 simulated" not in out and "4 simulated clients, alpha 0.5: mean of 3" in out
    code, out, _ = run(capsys, *command, "--target", 0.9, "--json", "--overwrite")
    chosen = json.loads(out)["chosen"]
    assert code == 0 and chosen["saved_reached"] and chosen["seed"] == chosen["replicate"]
    about = load_model(tmp_path / "model.safetensors").about["trained"]
    assert about["why"] == chosen["why"] and about["gap"] == pytest.approx(chosen["saved_gap"])
    code, _, err = run(capsys, *command)
    assert code == 2 and "--strict needs a target" in err


@pytest.mark.slow
def test_a_collapsed_model_is_called_that_on_the_terminal(capsys, tmp_path) -> None:
    """94% have the label, and nothing but a copy of the group says anything about it."""
    rng = np.random.default_rng(0)
    sex = rng.choice(["[b]man", "woman"], 1200)
    ok = np.where(rng.random(1200) < np.where(sex == "woman", 0.97, 0.92), "yes", "no")
    title = np.where(sex == "woman", "Mrs", "Mr")
    x = rng.standard_normal(1200)
    frame = pl.DataFrame({"x": x, "title": title, "sex": sex, "ok": ok})
    frame.write_csv(tmp_path / "t.csv")
    command = [
        "compare",
        "--data",
        tmp_path / "t.csv",
        "--label",
        "ok",
        "--group",
        "sex",
        "--alpha",
        100,
        "--seeds",
        2,
        "--rounds",
        20,
        "--lr",
        0.03,
        "--clients",
        3,
        "--target",
        0.5,
        "--methods",
        "fedavg",
        "fedgft-control",
        "--strict",
    ]
    code, out, _ = run(capsys, *command)
    assert code == 4
    assert "in 2 of 2 replicates, but 2 of these models have collapsed" in out
    assert "collapsed: the model gives nearly everybody the same decision" in out
    assert "[b]man" in out and out.count("2 of 2") >= 3
    code, out, _ = run(capsys, *command, "--json")
    assert [r["collapsed"] for r in json.loads(out)] == [2, 2]


@pytest.mark.slow
def test_before_is_fedavg_if_it_was_trained_too(capsys, tmp_path) -> None:
    study = quick(range(2), lr=(0.03,), round_factors=())
    plain, fair = (study.run(0.5, m, SP) for m in ("fedavg", "fedgft-control"))
    rows = client_rows(study, fair, replicate=1, fedavg=plain)
    own = plain.history.after[1]
    assert [r["accuracy_fedavg"] for r in rows] == pytest.approx(own.accuracy().tolist())
    assert rows[0]["accuracy"] == pytest.approx(fair.history.after[1].accuracy()[0])
    command = ["--verbose", "train", *shlex.split(QUICK), "--rounds", 2, "--out", tmp_path]
    _, out, _ = run(capsys, *command, "--method", "fedgft", "--lam", 1)
    assert "clients with FedAvg and with FedGFT" in out and "untrained" not in out
    assert "the first that did not diverge" in out


@pytest.mark.slow
def test_train_prints_the_result_first_and_what_to_do_next(capsys, tmp_path) -> None:
    command = ["train", *shlex.split(QUICK), "--rounds", 2, "--out", tmp_path]
    for method, name in (("fedgft-control", "FedGFT"), ("lft", "LFT")):
        main([*map(str, command), "--method", method, "--overwrite"])
        printed = capsys.readouterr()
        lines = printed.out.splitlines()
        assert lines[0].startswith("Held-out rows, mean of 3 replicates. Statistical parity")
        assert re.match(r"FedAvg +\d+\.\d% accurate, gap \d+\.\d points \(95% int", lines[1])
        assert re.match(rf"{name} +\d+\.\d% accurate, gap \d+\.\d points \(95% inter", lines[2])
        assert lines[3].startswith("Always predicting the most frequent class: ")
        assert lines[4].startswith("Noise floor: ")
        assert "Open:  " in printed.out and "fedgft predict" in printed.out
        assert "balanced" not in printed.out and "inner splits" not in printed.err


def test_the_lines_of_a_result_name_the_best_local_method() -> None:
    study = lab(2)
    methods = {"fedavg": 0.2, "lrw": 0.15, "lft": 0.1, "fedgft": 0.05, "fedgft-control": 0.02}
    rows = [row(study, result(study, m, [gapped(g, 0.8)] * 2)) for m, g in methods.items()]
    said = list_results(rows, groups=("man", "woman"), title="statistical parity")
    names = ["FedAvg", "best local (LFT)", "FedGFT control"]  # as in the figure
    assert [line.split("  ")[0] for line in said[1:4]] == names
    assert "gap 20.0 points (95% interval" in said[1] and "between man and woman:" in said[0]
    few = list_results([rows[0], rows[-1]], groups=("man", "woman"), title="statistical parity")
    assert [line.split("  ")[0] for line in few[1:3]] == ["FedAvg", "FedGFT"]


# Beside the model: its card, and the audit of the rows that were held out


def write_loans(folder, *, rows=1200) -> str:
    """Loans of two banks; the card of a customer is another text in nearly every row."""
    rng = np.random.default_rng(0)
    sex = rng.choice(["man", "wo|man"], rows)
    income = rng.normal(np.where(sex == "man", 0.6, -0.6), 1.0).round(3)
    loans = {
        "bank": rng.choice(["north", "south"], rows),
        "sex": sex,
        "income": income,
        "card": [f"card {i}" for i in range(rows)],
        "repaid": np.where(rng.random(rows) < 1 / (1 + np.exp(-2 * income)), "yes", "no"),
    }
    pl.DataFrame(loans).write_csv(folder / "loans.csv")
    return f"{folder / 'loans.csv'} --label repaid --group sex --seeds 2 --rounds 25 --lr 0.05"


@pytest.mark.slow
def test_train_writes_a_card_and_an_audit_of_the_rows_held_out(capsys, tmp_path) -> None:
    where = shlex.split(write_loans(tmp_path))
    command = ["train", *where, "--client", "bank", "--target", 0.1, "--out", tmp_path / "o"]
    code, out, err = run(capsys, *command)
    assert code == 0, err
    assert "Federation: 2 clients, from the column bank." in out
    assert "Features: income. Not features: bank (the client), sex (the group), card (looks" in out
    assert "not features" not in err  # said once
    assert all(f"{tmp_path}/o/{name}" in out for name in ("MODEL.md", "report/report.html"))
    card = (tmp_path / "o/MODEL.md").read_text()
    about = load_model(tmp_path / "o/model.safetensors").about["trained"]
    assert "| predicted yes, wo\\|man | " in card and "Always predicting the most frequent" in card
    assert "| on held-out rows | FedAvg | FedGFT |" in card and "| man, wo\\|man |" in card
    assert f" {100 * about['accuracy_test']:.1f}% |" in card and "bank (the client)" in card
    audit = json.loads((tmp_path / "o/report/audit.json").read_text())
    assert audit["rows"]["counted"] == 360 and set(audit["sites"]) == {"north", "south"}
    assert audit["tolerance"]["sp"] == 0.1 and audit["about"]["label"] == "repaid"
    assert about["reached"] and audit["verdicts"]["sp"] != "exceeds"
    report = (tmp_path / "o/report/report.md").read_text()
    assert "Audit of a model trained with FedGFT on loans" in report and "by sex" in report
    assert audit["accuracy"]["rate"] == pytest.approx(about["accuracy_test"])
    assert audit["metrics"]["sp"]["gap"] == pytest.approx(about["gap_test"])


@pytest.mark.slow
def test_commands_say_which_federation_they_use(capsys, tmp_path) -> None:
    where = shlex.split(write_loans(tmp_path))
    quick = ["--methods", "fedavg", "--clients", 3]
    hint = "3 simulated clients, alpha 0.5. bank is a feature; if it names your clients, give"
    code, out, err = run(capsys, "compare", *where, *quick)
    assert code == 0 and hint in " ".join(err.split()) and "--client bank." in err
    assert "loans, 3 simulated clients, alpha 0.5, protocol heldout" in out
    _, out, err = run(capsys, "compare", *where, *quick, "--leave-out", "bank")
    assert "--client names the column of your own clients" in " ".join(err.split())
    points = ["frontier", *where, *quick, "--points", 2, "--out", tmp_path / "f"]
    _, out, err = run(capsys, *points)
    assert hint in " ".join(err.split()) and "loans, 3 simulated clients, alpha 0.5: mean" in out
    drawn = (tmp_path / "f/frontier.svg").read_text()
    assert "3 simulated clients, alpha 0.5" in drawn
    _, out, err = run(capsys, *points[:-1], tmp_path / "b", "--client", "bank")
    assert "Federation: 2 clients, from the column bank." in err


def test_a_gap_above_the_target_on_test_rows_is_explained() -> None:
    about = {"seed": 3, "why": "because", "gap": 0.02, "gap_test": 0.06, "target": 0.02}
    about |= {"gap_of": "decisions", "reached": True, "collapsed": False}
    wide = describe_saved_model({**about, "gap_test_low": 0.01, "gap_test_high": 0.1})
    assert "6.0 points (95% interval 1.0 to 10.0) on its test rows" in wide
    assert "exceeds the target" not in wide
    sure = describe_saved_model({**about, "gap_test_low": 0.03, "gap_test_high": 0.09})
    assert "On test rows the gap exceeds the target" in sure and "smaller `target`" in sure


# Figures and their titles


@pytest.mark.parametrize(
    ("gaps", "right", "says"),
    [
        ((0.185, 0.017), (0.806, 0.800), "cuts the gap from 18.5 to 1.7 points for 0.6 points of"),
        ((0.2, 0.1), (0.8, 0.8), "cuts the gap from 20.0 to 10.0 points at the same accuracy"),
        ((0.2, 0.1), (0.8, 0.82), "from 20.0 to 10.0 points and gains 2.0 points of accuracy"),
        ((0.1, 0.2), (0.8, 0.8), "does not cut the gap: from 10.0 to 20.0 points"),
        ((0.1, 0.1), (0.8, 0.8), "leaves the gap at 10.0 points"),
        ((None, 0.1), (0.8, 0.8), "the gap is not estimable"),
        ((0.2, 0.1), (None, 0.8), "cuts the gap from 20.0 to 10.0 points"),
    ],
)
def test_titles_state_the_finding(gaps, right, says) -> None:
    pairs = zip(("fedavg", "fedgft-control"), gaps, right, strict=True)
    rows = [{"method": m, "gap_hard_test": gap, "accuracy": acc} for m, gap, acc in pairs]
    assert says in state_finding(*rows) and state_finding(*rows).startswith("FedGFT")


def draw(figure, folder) -> str:
    """The SVG of a figure, with its text as text."""
    return next(p for p in save_figure(figure, folder, "f") if p.suffix == ".svg").read_text()


def test_the_figures_of_train_show_finding_target_noise_floor_and_group_colors(tmp_path) -> None:
    study = lab(4)
    plain = result(study, "fedavg", [gapped(0.2, 0.8)] * 4)
    fair = result(study, "fedgft-control", [gapped(0.02, 0.8)] * 4)
    drawn = draw(plot_before_after(study, plain, fair), tmp_path)
    words = ("FedGFT cuts the gap from 20.0 to 2.0 points", "target 2.0", "noise floor")
    words += ("95% interval", "predicted yes", "held-out rows", "2 simulated clients, alpha 0.5")
    for word in (*words, " woman", *group_colors(["man", "woman"]).values()):
        assert word in drawn, word
    drawn = draw(plot_rounds(study, [plain, fair]), tmp_path)
    assert all(word in drawn for word in ("cuts the gap", "target 2", "noise floor"))
    lost = [gapped(0.2, 0.8).map(lambda array: np.nan * array)] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = draw(plot_before_after(study, plain, result(study, "fedgft", lost)), tmp_path)
    assert "not estimable" in drawn
    same = [gapped(0.0, 0.8)] * 4
    everybody = result(study, "fedgft-control", same, target=0.0)
    draw(plot_before_after(study, result(study, "fedavg", same), everybody), tmp_path)


def test_labels_of_lines_do_not_cover_each_other() -> None:
    places = _spread_labels({"a": 5.0, "b": 5.1, "c": 9.0}, least=1.0)
    assert places["a"] < places["b"] < places["c"]
    assert places["b"] - places["a"] == pytest.approx(1.0) and places["c"] == 9.0


def test_a_frontier_says_what_was_chosen_and_where_better_is(tmp_path) -> None:
    points = [TradeoffPoint("fedavg", None, *[stack([gapped(0.2, 0.82)] * 3)] * 2)]
    for gap, right in ((0.01, 0.4), (0.02, 0.81), (0.1, 0.815)):
        sums = stack([gapped(gap, right)] * 3)
        points.append(TradeoffPoint("fedgft-control", gap, sums, sums))
    found = Frontier(lab(3), SP, 0.5, 0.02, points)
    drawn = draw(plot_frontier(found, title="people"), tmp_path)
    assert "FedGFT has a gap of 2.0 points at 81.0% accuracy, FedAvg 20.0 points at" in drawn
    assert "better" in drawn and "far below the best accuracy" in drawn
    low, high, cut = _find_limits(found)
    assert 78 < low < 81 < 82 < high < 84 and cut


# Deployed


@pytest.mark.slow
def test_a_flower_history_names_the_target_and_whether_it_was_met() -> None:
    from flwr.serverapp.strategy import FedAvg

    from fedgft.flower import FedGFT
    from fedgft.flower.aggregator import format_row as line
    from in_process_grid import biased, grid_of, options, start_of, train_config

    made = biased()
    for target, met in ((0.001, False), (0.99, True)):
        ours = FedGFT(FedAvg(**options()), target=target, channel="query")
        result = ours.start(grid_of(made), start_of(made), 2, train_config=train_config())
        assert result.arrays and len(ours.history) == 3
        last = ours.history[-1]
        assert (last["target"], last["target_of"]) == (target, "decisions")
        assert last["reached"] is met is (last["gap_hard"] <= target + 0.003)
        assert set(last["selection_rates"]) == {"0", "1"} and not last["collapsed"]
        rates = list(last["selection_rates"].values())
        assert abs(rates[0] - rates[1]) == pytest.approx(last["gap_hard"])
        assert ("met" if met else "missed") in line(last, "sp")
    plain = FedGFT(FedAvg(**options()), lam=1.0, channel="query")
    plain.start(grid_of(made), start_of(made), 1, train_config=train_config())
    assert "target" not in plain.history[-1]


def test_the_last_line_of_a_deployed_run_names_the_target(tmp_path) -> None:
    """18.6 points for a target of 2 must be said."""
    from fedgft.deploy.local_run import list_closing_lines, summarize_run

    def say(summary: dict, metric: str) -> str:
        lines = list_closing_lines(summary, metric)
        assert all(len(line) <= 80 for line in lines)
        return "\n".join(lines)

    row = {
        "round": 5,
        "accuracy": 0.84,
        "gap_soft": 0.1,
        "gap_hard": 0.186,
        "target": 0.02,
        "target_of": "decisions",
        "reached": False,
        "collapsed": False,
        "accuracy_constant": 0.76,
    }
    held = {"about": {"measured": row, "metric": "sp"}, "sites": ["a", "b"], "held_out": {}}
    (tmp_path / "history.json").write_text(json.dumps(held))
    made = summarize_run(tmp_path, "finished:completed", seconds=3.0, sites=2, limit=9.0)
    assert made["target"] == 0.02 and made["reached"] is False
    said = say(made, "sp")
    assert (
        "Training rows of 2 sites: sp gap of decisions 18.6 points.\nTarget 2.0 points: missed."
        in said
    )
    assert "What to try" in said and "right on 76.0%" in said
    met = say({**made, "reached": True, "gap_hard": 0.01, "collapsed": True}, "sp")
    assert "Target 2.0 points: met." in met and "has collapsed" in met and "What to try" not in met
    assert "cannot be judged" in say({**made, "reached": None}, "sp")
    assert "arget" not in say({**made, "target": None}, "sp")


@pytest.mark.slow
def test_the_next_commands_of_train_work_as_they_are(capsys, tmp_path, monkeypatch) -> None:
    """Also where the table has columns score and decision, one of them a feature of the model."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    write_loans(tmp_path)
    frame = pl.read_csv(tmp_path / "loans.csv")
    frame = frame.with_columns(
        score=pl.Series(rng.uniform(size=len(frame))), decision=pl.col("repaid")
    )
    frame.write_csv(tmp_path / "loans of today.csv", separator=";")
    train = ["train", "loans of today.csv", "--label", "repaid", "--group", "sex"]
    train += ["--client", "bank", "--positive", "yes", "--seeds", 2, "--rounds", 3]
    main([str(word) for word in train])
    out, err = capsys.readouterr()
    said = " ".join(err.split())
    assert "score and decision look like scores or decisions of an earlier" in said
    assert "--leave-out score decision leaves them out" in said
    printed = out[out.index("Next:") :].removeprefix("Next:")
    assert "scored.csv will contain the rows that the model was trained on" in printed
    printed = printed[: printed.index("scored.csv will contain")]
    assert "--score-name new_score" in printed and max(map(len, printed.splitlines())) <= 80
    commands = [shlex.split(line) for line in printed.replace("\\\n", " ").strip().splitlines()]
    assert [words[1] for words in commands] == ["predict", "measure", "audit"]
    for words in commands:
        code, _, err = run(capsys, *words[1:])
        assert code == 0, err
    assert {"sums/north.json", "sums/south.json", "audit/report.html"} <= {
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")
    }
    code, _, err = run(capsys, "predict", "fedgft-train/model.safetensors", "loans of today.csv")
    assert code == 2 and "give another --score-name" in err
    same = ["--score-name", "x", "--decision-name", "x"]
    code, _, err = run(capsys, *commands[0][1:4], *same)
    assert code == 2 and "must be two different names" in err


def test_a_model_no_better_than_the_most_frequent_class_is_told_so() -> None:
    study = lab(4)
    for right, says in ((0.5, "is not clearly more accurate"), (0.8, "")):
        made = [
            result(study, method, [gapped(gap, right)] * 4)
            for method, gap in (("fedavg", 0.2), ("fedgft-control", 0.02))
        ]
        rows = [row(study, each) for each in made]
        trained = TrainedModel(Comparison(study, made, rows), choose_replicate(study, made[-1]))
        said = trained.warn_useless()
        assert says in said and bool(says) == bool(said)
        constant = f"{100 * rows[-1]['accuracy_constant']:.1f}%"
        lines = list_results(rows, groups=("man", "woman"), title="statistical parity")
        assert f"Always predicting the most frequent class: {constant} accurate." in lines
    useless = [{**each, "accuracy": each["accuracy_constant"]} for each in rows]
    for shown, says in (
        ([rows[0], useless[1]], "`fedgft frontier` shows what can be reached"),
        (useless, "FedAvg is not either"),
    ):
        trained = TrainedModel(Comparison(study, made, shown), choose_replicate(study, made[-1]))
        assert says in trained.warn_useless()


def test_a_miss_names_its_replicate_and_repeats_no_advice() -> None:
    study = lab(3)
    made = result(study, "fedgft-control", [gapped(gap, 0.8) for gap in (0.01, 0.045, 0.022)])
    line = row(study, made)
    assert "A gap up to 0.3 points above the target counts as reached." in state_target(line)
    assert "counts as reached" not in state_target({**line, "gap_hard": 0.019})
    about = {"seed": 3, "why": "because", "gap": 0.021, "gap_test": None, "gap_test_low": None}
    about |= {"gap_of": "decisions", "reached": True, "collapsed": False, "target": 0.02}
    assert "2.1 points on its clients' rows, within 0.3 points of the target 2.0, and" in (
        describe_saved_model(about)
    )


def test_costs_in_titles_are_the_difference_of_the_numbers_shown() -> None:
    rows = [
        {"method": method, "gap_hard_test": gap, "accuracy": accuracy}
        for method, gap, accuracy in (("fedavg", 0.1, 0.75149), ("fedgft-control", 0.02, 0.74251))
    ]
    assert state_finding(*rows).endswith("for 0.8 points of accuracy")
    both = state_finding(*rows, methods=("fedgft",))
    assert both.startswith("FedGFT control cuts the gap from 10.0 to 2.0 points")
