"""`simulate` as a user calls it, and what `History` makes of a simulation."""

import pickle
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from fairlearn.metrics import (
    demographic_parity_difference,
    equal_opportunity_difference,
    equalized_odds_difference,
)

import fedgft
from fedgft import FedgftError, History, Settings, simulate
from fedgft.algorithms import METHODS, fedavg, get_method, with_base
from fedgft.data.generated import synthetic
from fedgft.engine import predict_proba
from fedgft.models import MLP
from fedgft.study import Study, get_protocol
from fedgft.study.results import describe_training

DATA = synthetic(rows=3000, features=3, seed=0)
RAW = fedgft.partition(DATA, clients=4, seed=0)
MADE = fedgft.standardize(RAW)
QUICK = Settings(rounds=3)
SP = fedgft.get_metric("sp")


@pytest.mark.parametrize("method", METHODS)
def test_the_name_of_a_method_stands_for_its_algorithm(method):
    """One federation, one seed and names give the bits that lists and objects give."""
    strength = {"lft": 3.0, "fedgft": 5.0, "fairfed": 0.5, "fedgft-control": 0.05}.get(method, 0.0)
    given = {} if METHODS[method].strength is None else {METHODS[method].strength: strength}
    for base in (None, "scaffold", "fednova"):
        eop = fedgft.get_metric("eop")
        algorithm = with_base(get_method(method, eop, strength), base or "fedavg")
        expected = simulate([MADE], "logistic", algorithm, QUICK, seeds=[7], lr=0.02)
        found = simulate(
            MADE, "logistic", method, metric="eop", seeds=7, rounds=3, base=base, **given
        )
        np.testing.assert_array_equal(found.params, expected.params)
    assert found.record.method == method and found.record.metric == "eop"


def test_defaults_are_those_of_the_protocol_that_reaches_targets():
    heldout = get_protocol("heldout")
    assert Settings() == heldout.settings
    found = simulate(MADE)
    expected = simulate(
        [MADE],
        "logistic",
        heldout.algorithm("fedgft-control", SP, 0.0),
        Settings(),
        seeds=[0],
        lr=0.02,
    )
    np.testing.assert_array_equal(found.params, expected.params)
    assert 0.02 in heldout.lr


@pytest.mark.parametrize(
    ("method", "name", "default"),
    [("lft", "lam", 20), ("fedgft", "lam", 20), ("fairfed", "beta", 1)],
)
def test_default_strengths_are_those_of_the_paper(method, name, default):
    found = simulate(MADE, algorithm=method, rounds=2)
    expected = simulate(MADE, algorithm=method, rounds=2, **{name: default})
    np.testing.assert_array_equal(found.params, expected.params)
    assert getattr(get_protocol("paper"), name) == (default,)


def test_several_seeds_share_one_federation():
    found = simulate(MADE, algorithm="fedgft", seeds=range(3), rounds=2)
    alone = [
        simulate(MADE, algorithm="fedgft", seeds=seed, rounds=2).params[0] for seed in range(3)
    ]
    np.testing.assert_array_equal(found.params, alone)
    assert found.record.seeds.tolist() == [0, 1, 2]
    with pytest.raises(FedgftError, match="one seed per federation"):
        simulate([MADE, MADE])
    assert len(simulate([MADE, MADE], algorithm="fedavg", seeds=[0, 1], rounds=1).params) == 2


def test_a_target_per_run():
    found = simulate(MADE, metric="sp", target=np.array([0.0, 0.9]), seeds=[0, 0], rounds=2)
    assert found.control.target.tolist() == [0.0, 0.9] and found.control.reached[1]


# -- scales of features ---------------------------------------------------------------------------


def scaled(factor: float) -> fedgft.Federation:
    features = DATA.features.copy()
    features[:, 1] *= factor
    return fedgft.partition(replace(DATA, features=features), clients=4, seed=0)


@pytest.mark.parametrize("factor", [1000.0, 1e-4])
def test_unscaled_features_with_the_default_rate_are_warned_of(factor):
    made = scaled(factor)
    with pytest.warns(UserWarning, match=r"'x1' holds values of about .*fedgft\.standardize"):
        simulate(made, algorithm="fedavg", rounds=1)
    simulate(made, algorithm="fedavg", rounds=1, lr=0.02)  # a rate that was chosen
    simulate(fedgft.standardize(made), algorithm="fedavg", rounds=1)
    simulate(RAW, algorithm="fedavg", rounds=1)  # on a usual scale as they are


def test_a_module_of_the_user_may_want_raw_columns():
    model = lambda: torch.nn.Linear(4, 2)  # noqa: E731
    simulate(scaled(1000.0), model, "fedavg", rounds=1)


def test_the_warning_matters():
    """What it warns of is worth it: accuracy suffers on the scale of incomes."""
    made = scaled(10_000.0)
    raw = simulate(made, algorithm="fedavg", lr=0.02, rounds=10)
    good = simulate(fedgft.standardize(made), algorithm="fedavg", rounds=10)
    assert good.test[-1].accuracy()[0] > raw.test[-1].accuracy()[0] + 0.02


# -- missed targets -------------------------------------------------------------------------------


def test_a_missed_target_names_the_arguments_to_change():
    with pytest.warns(fedgft.TargetMissedWarning) as caught:
        simulate(MADE, metric="sp", target=0.01, rounds=2, lr=0.1)
    (text,) = [str(each.message) for each in caught]
    assert "rounds (now 2)" in text and "--" not in text
    history = simulate(MADE, metric="sp", target=0.05)
    assert history.control.reached.all() and history.control.warning() is None


@pytest.mark.parametrize(
    ("gaps", "changes"),
    [
        ([0.3, 0.1, 0.3, 0.1, 0.3, 0.2], "rounds (now 50), lr (now 0.02)."),
        ([0.3, 0.25, 0.22, 0.21, 0.2, 0.19], "rounds (now 50)."),
        ([0.3, 0.2, 0.2, 0.2, 0.2, 0.2], "target (now 0.05), rounds (now 50), model."),
        ([0.3, 0.2, 0.2, 0.2, 0.2, np.nan], "metric."),
    ],
    ids=["unsettled", "falling", "settled", "not estimable"],
)
def test_what_to_change_depends_on_how_the_target_was_missed(gaps, changes):
    from fedgft.algorithms import ControlReport

    every = np.array([gaps])
    report = ControlReport(np.array([0.05]), every[:, -1], every)
    text = report.warning(rounds=50, lr=0.02)
    assert text.endswith(f"Arguments to change: {changes}")
    assert report.reason() in text


# -- History --------------------------------------------------------------------------------------

REFERENCES = {
    "sp": demographic_parity_difference,
    "eop": equal_opportunity_difference,
    "eo": equalized_odds_difference,
}


@pytest.fixture(scope="module")
def history() -> History:
    return simulate(MADE, "logistic", "fedgft", metric="sp", lam=5, seeds=[3, 4], rounds=4)


@pytest.mark.parametrize("metric", REFERENCES)
@pytest.mark.parametrize("rows", ["clients", "test"])
def test_the_table_agrees_with_fairlearn_on_the_models_own_decisions(history, metric, rows):
    frame = history.to_frame("sp", "eop", "eo")
    at = MADE.rows if rows == "clients" else MADE.test
    for run in (0, 1):
        decisions = history.model(run).predict(DATA.features[at]).astype(int)
        last = frame.filter(run=run, rows=rows, round=4)
        gap = REFERENCES[metric](DATA.labels[at], decisions, sensitive_features=DATA.groups[at])
        assert last[f"gap_hard_{metric}"].item() == pytest.approx(gap, abs=1e-12)
        assert last["accuracy"].item() == pytest.approx((decisions == DATA.labels[at]).mean())
        score = history.model(run).predict_proba(DATA.features[at])[:, 1]
        means = [score[DATA.groups[at] == g].mean() for g in (0, 1)]
        assert last["gap_soft_sp"].item() == pytest.approx(np.ptp(means), abs=1e-5)


def test_the_table_has_one_row_per_run_round_and_kind_of_rows(history):
    frame = history.to_frame("sp")
    assert frame.columns == [
        "run",
        "seed",
        "round",
        "rows",
        "accuracy",
        "gap_hard_sp",
        "gap_soft_sp",
    ]
    assert (
        frame.height == 2 * 5 * 2 and not frame.select("run", "round", "rows").is_duplicated().any()
    )
    assert frame.filter(rows="test", run=1)["seed"].to_list() == [4] * 5
    for run in (0, 1):
        found = frame.filter(rows="clients", run=run).sort("round")["gap_soft_sp"]
        np.testing.assert_array_equal(found, history.federation.gap("sp", "soft")[:, run])
    assert history.to_frame().columns == ["run", "seed", "round", "rows", "accuracy"]
    again = history.to_frame("sp", library="pandas")
    assert isinstance(again, pd.DataFrame)
    pd.testing.assert_frame_equal(
        again, pd.DataFrame(frame.to_dict(as_series=False)), check_dtype=False
    )


def test_what_is_not_estimable_is_null_and_rows_that_were_not_measured_are_left_out():
    one_group = replace(MADE, test=MADE.test[DATA.groups[MADE.test] == 0])
    found = simulate(one_group, algorithm="fedavg", settings=Settings(rounds=1, eval_on="test"))
    frame = found.to_frame("sp")
    assert set(frame["rows"]) == {"test"} and frame["gap_hard_sp"].null_count() == frame.height
    assert frame["accuracy"].null_count() == 0
    assert found.to_frame("sp", library="pandas")["gap_soft_sp"].isna().all()
    assert found.model().about["trained"]["gap"] is None


@pytest.mark.parametrize("model", ["logistic", "mlp", MLP((5, 4))])
def test_a_model_of_a_run_predicts_what_the_simulation_predicts(model, tmp_path):
    made = fedgft.standardize(fedgft.partition(DATA.standardized(), clients=4, seed=0))
    found = simulate(made, model, "fedavg", rounds=2, seeds=[0, 1])
    expected = predict_proba(made, model, found.params[1], np.arange(50))
    fair = found.model(1)
    np.testing.assert_allclose(fair.predict_proba(DATA.features[:50]), expected, atol=1e-5)
    again = fedgft.load_model(fair.save(tmp_path / "model.safetensors"))
    np.testing.assert_array_equal(
        again.predict_proba(DATA.features[:50]), fair.predict_proba(DATA.features[:50])
    )


def test_each_run_has_the_scaling_of_its_federation():
    made = [fedgft.standardize(fedgft.partition(DATA, clients=4, seed=s)) for s in (0, 1)]
    found = simulate(made, algorithm="fedavg", rounds=2, seeds=[0, 1])
    for run, each in enumerate(made):
        expected = predict_proba(each, "logistic", found.params[run], np.arange(50))
        scores = found.model(run).predict_proba(DATA.features[:50])
        np.testing.assert_allclose(scores, expected, atol=1e-7)


def test_a_model_reads_raw_tables():
    rng = np.random.default_rng(0)
    table = pl.DataFrame(
        {
            "income": rng.normal(40_000, 9000, 500),
            "city": rng.choice(["Bonn", "Lyon"], 500),
            "sex": rng.choice(["f", "m"], 500),
            "repaid": rng.choice(["no", "yes"], 500),
        }
    )
    data = fedgft.load(table, label="repaid", group="sex")
    made = fedgft.standardize(fedgft.partition(data, clients=2))
    found = simulate(made, algorithm="fedavg", rounds=2).model()
    decided = found.predict(table)
    np.testing.assert_array_equal(decided, found.predict(data.features))
    assert set(decided) <= {"no", "yes"}


def test_the_header_of_a_model_is_that_of_a_study(history):
    study = Study(DATA, replace(get_protocol("heldout"), lr=(0.02,), settings=QUICK), [0])
    result = study.run(0.5, "fedgft-control", SP)
    about = simulate(MADE, metric="sp", target=0.0, rounds=3).model().about
    assert list(about["trained"]) == list(describe_training(study, result, 0))
    assert (about["method"], about["metric"], about["data"]) == (
        "fedgft-control",
        "sp",
        "synthetic",
    )
    trained = history.model(1).about["trained"]
    last = history.to_frame("sp").filter(run=1, round=4)
    for rows, gap, accuracy in (
        ("clients", "gap", "accuracy"),
        ("test", "gap_test", "accuracy_test"),
    ):
        assert trained[gap] == last.filter(rows=rows)["gap_hard_sp"].item()
        assert trained[accuracy] == last.filter(rows=rows)["accuracy"].item()
    assert trained["seed"] == 4 and trained["target"] is None


def test_models_that_cannot_be_made_say_why():
    found = simulate(MADE, lambda: torch.nn.Linear(4, 2), "fedavg", rounds=1)
    assert found.model().predict(DATA.features[:5]).shape == (5,)
    found = pickle.loads(pickle.dumps(found))
    with pytest.raises(FedgftError, match="predict_proba") as caught:
        found.model()
    assert caught.value.kind == "unsupported"
    found = simulate(MADE, algorithm="fedavg", rounds=1)
    for run in (-1, 1):
        with pytest.raises(FedgftError) as caught:
            found.model(run)
        assert caught.value.field == "run"
    with np.errstate(all="ignore"):
        lost = simulate(MADE, algorithm="fedavg", rounds=2, lr=1e38)
    with pytest.raises(FedgftError, match="diverged"):
        lost.model()


def test_a_history_is_pickled_with_its_models_and_without_the_users_functions(history):
    again = pickle.loads(pickle.dumps(history))
    np.testing.assert_array_equal(again.model(1).mean, history.model(1).mean)
    own = simulate(MADE, lambda: torch.nn.Linear(4, 2), "fedavg", rounds=1)
    assert pickle.loads(pickle.dumps(own)).record.model is None


def test_parts_and_replaced_runs_keep_seeds_gaps_and_models(history):
    last = history.part(np.array([1]))
    assert last.to_frame("sp")["seed"].unique().to_list() == [4]
    np.testing.assert_array_equal(
        last.model().tensors["weight"], history.model(1).tensors["weight"]
    )
    other = simulate(MADE, "logistic", "fedavg", seeds=[4], rounds=4)
    mixed = history.with_runs(np.array([1]), other)
    assert mixed.model(1).about["trained"]["gap"] == other.model().about["trained"]["gap"]
    assert mixed.model(0).about == history.model(0).about


def test_a_short_text_for_notebooks(history):
    assert repr(history).startswith("History(2 runs, 4 rounds, test accuracy 0.")
    assert "\n" not in repr(history) and len(repr(history)) < 120
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedgft.TargetMissedWarning)
        text = repr(simulate(MADE, rounds=1))
    assert text.startswith("History(1 run, 1 rounds") and "target reached in 0 of 1" in text
    assert (
        repr(MADE)
        == "Federation('synthetic', 4 clients, 2,100 training rows, 900 test rows, standardized)"
    )
    assert len(repr(DATA)) < 120


def test_a_metric_that_sums_cannot_carry_is_refused_before_training():
    squared = fedgft.Metric("sq", "squares", lambda p, y: p[:, 1:] ** 2)
    with pytest.raises(FedgftError, match="not affine"):
        simulate(MADE, algorithm=fedavg(), metric=None).to_frame(squared)
    started = []
    with pytest.raises(FedgftError, match="not affine"):
        simulate(MADE, algorithm="fedavg", metric=squared, on_round=lambda *at: started.append(at))
    assert not started
