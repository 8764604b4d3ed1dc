"""Guarantees of a simulation for any method: settings, seeds, batches of runs, cohorts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedgft.algorithms import fairfed, fedavg, fedgft, fedgft_control, lft, with_base
from fedgft.data.dataset import standardize
from fedgft.engine import Settings, simulate
from fedgft.engine.plan import derive_seeds, sample_cohort
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.optimizers import Optimizer
from fedgft.sums import Sums
from paper_formulas import Method
from reference_training import Plan, federate
from small_federation import (
    CLIENTS,
    EXECUTORS,
    clients,
    federation,
    module,
    reordered,
    run,
    several,
)

PLAIN = {"rtol": 0, "atol": 1e-10}  # Adam divides by the root of a gradient that may be tiny
EXACT = {"rtol": 0, "atol": 1e-12}  # sums in another order
SP = CATALOG["sp"]
FAIR = Method("fedgft", "sp", 5.0)

every_executor = pytest.mark.parametrize("executor", EXECUTORS)


def cosine(rounds: int) -> tuple[float, ...]:
    turn = np.cos(np.pi * np.arange(rounds) / rounds)
    return tuple((0.05 * (0.05 + 0.95 * (1 + turn) / 2)).tolist())


# Settings of ours, and what they mean to the plain loop.
SETTINGS = {
    "keep": ({"state": "keep"}, {"state": "keep"}),
    "reset-first": ({"state": "reset-first"}, {"state": "reset-first"}),
    "shared": ({"state": "shared"}, {"state": "shared"}),
    "epochs": ({"epochs": 2}, {"epochs": 2}),
    "fixed": ({"batches": "fixed", "epochs": 2}, {"fixed": True, "epochs": 2}),
    "cosine": ({"schedule": "cosine", "rounds": 4}, {"rates": cosine(4)}),
    "step": ({"schedule": "step", "rounds": 4}, {"rates": (0.05, 0.05, 0.005, 0.0005)}),
    "inverse-sqrt": ({"schedule": "inverse-sqrt"}, {"rates": (0.05, 0.05 / 2**0.5, 0.05 / 3**0.5)}),
    "inverse": ({"schedule": "inverse"}, {"rates": (0.05, 0.025, 0.05 / 3)}),
    "steps": ({"steps": 2, "epochs": 2}, {"steps": 2, "epochs": 2}),
    "one batch": ({"batch_size": 500}, {"batch_size": 500}),
    "one row": ({"batch_size": 1, "rounds": 1}, {"batch_size": 1, "rates": (0.05,)}),
}


@pytest.mark.slow
@every_executor
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_equal_those_of_the_reference_loop(name: str, executor: str) -> None:
    ours, theirs = SETTINGS[name]
    made = federation()
    expected = federate(clients(made), module(made), FAIR, Plan(**theirs))
    found = run(made, fedgft(SP, 5.0), executor=executor, **ours)
    np.testing.assert_allclose(found.params[0], expected, **PLAIN)


@every_executor
@pytest.mark.parametrize("state", ["keep", "reset"])
def test_local_prices_are_refreshed_every_epoch(state: str, executor: str) -> None:
    made = federation()
    plan = Plan(epochs=2, state=state)
    expected = federate(clients(made), module(made), Method("lft", "sp", 4.0), plan)
    found = run(made, lft(SP, 4.0), executor=executor, epochs=2, state=state)
    np.testing.assert_allclose(found.params[0], expected, **PLAIN)


@every_executor
@pytest.mark.parametrize("method", [FAIR, Method("fairfed", "sp", 0.7)])
def test_each_client_may_have_its_own_start(method: Method, executor: str) -> None:
    """Every client its own random start; the first round has no penalty and no distances."""
    made = federation()
    starts = tuple(module(made, seed=int(derive_seeds(0, int(k), 0x57A7))) for k in made.keys)
    expected = federate(clients(made), module(made), method, Plan(starts=starts))
    chosen = fedgft(SP, 5.0) if method is FAIR else fairfed(SP, 0.7)
    found = run(made, chosen, executor=executor, start="own")
    np.testing.assert_allclose(found.params[0], expected, **PLAIN)


def cohorts(made, rule, *, size: int, rounds: int) -> tuple:
    out = []
    for t in range(rounds):
        drawn = sample_cohort([made], size, rule, seeds=np.array([0], np.uint64), round=t)
        out.append(list(zip(drawn.client.tolist(), drawn.weight.tolist(), strict=True)))
    return tuple(out)


@pytest.mark.slow
@every_executor
@pytest.mark.parametrize("rule", ["size", "uniform"])
@pytest.mark.parametrize("state", ["reset", "keep", "shared"])
def test_cohorts_equal_the_plain_loop(rule: str, state: str, executor: str) -> None:
    """Two of six clients a round: some cohorts lack a group, and the last constants stay."""
    made = federation()
    drawn = cohorts(federation(), rule, size=2, rounds=8)
    groups = [
        {g for k, _ in c for g in made.dataset.groups[made.client(k)] if g >= 0} for c in drawn
    ]
    assert any(len(seen) < 2 for seen in groups[1:])
    plan = Plan(cohorts=drawn, rates=(0.05,) * 8, state=state)
    expected = federate(clients(made), module(made), FAIR, plan)
    options = {"cohort": 2, "sampling": rule, "rounds": 8, "state": state}
    found = run(made, fedgft(SP, 5.0), executor=executor, **options)
    np.testing.assert_allclose(found.params[0], expected, **PLAIN)


def test_constants_are_zero_before_any_cohort_has_both_groups() -> None:
    made = reordered(federation(), [1, 1, 1])
    found, expected = (run(made, m, cohort=2) for m in (fedgft(SP, 50.0), fedavg()))
    np.testing.assert_array_equal(found.params, expected.params)


@every_executor
def test_a_cohort_of_all_is_full_participation(executor: str) -> None:
    made = federation()
    method = fedgft(SP, 5.0)
    found = run(made, method, executor=executor, cohort=len(CLIENTS))
    expected = run(made, method, executor=executor)
    np.testing.assert_allclose(found.params, expected.params, **EXACT)


@every_executor
def test_equal_seeds_give_equal_results(executor: str) -> None:
    made = federation()
    method = fedgft(SP, 5.0)
    first, second = (run(made, method, executor=executor, cohort=4) for _ in range(2))
    np.testing.assert_array_equal(first.params, second.params)
    other = run(made, method, executor=executor, cohort=4, seed=1)
    assert np.abs(other.params - first.params).max() > 1e-3


BASE = federation()
TWO = [BASE, reordered(BASE, [5, 4, 3, 2, 0, 0])]


@pytest.mark.slow
@every_executor
def test_runs_side_by_side_are_the_runs_alone(executor: str) -> None:
    """Other data, other seed, other learning rate, other lam: every run keeps to its own."""
    lr = np.array([0.05, 0.01, 0.05, 0.02])
    lam = np.array([0.0, 5.0, 5.0, 9.0])
    seeds = [3, 3, 4, 5]
    made = [TWO[0], standardize(TWO[1]), standardize(TWO[0]), TWO[1]]
    settings = Settings(
        schedule="constant",
        rounds=3,
        batch_size=8,
        precision="fp64",
        executor=executor,
        cohort=5,
        state="keep",
    )
    found = simulate(made, "logistic", fedgft(SP, lam), settings, seeds=seeds, lr=lr)
    for i, one in enumerate(made):
        method = fedgft(SP, float(lam[i]))
        alone = simulate([one], "logistic", method, settings, seeds=[seeds[i]], lr=lr[i : i + 1])
        bits = {"rtol": 0, "atol": 0.0 if executor == "fused" else 1e-12}
        np.testing.assert_allclose(found.params[i], alone.params[0], **bits)
        np.testing.assert_allclose(found.test.score[:, i], alone.test.score[:, 0], **bits)


@pytest.mark.parametrize("rule", ["subtract", "authors", "exp"])
def test_beta_may_differ_from_run_to_run(rule) -> None:
    beta = np.array([0.1, 2.0])
    settings = Settings(
        schedule="constant", state="reset", rounds=3, batch_size=8, precision="fp64"
    )
    found = simulate(TWO, "logistic", fairfed(SP, beta, rule=rule), settings, seeds=[0, 0])
    for i, made in enumerate(TWO):
        method = fairfed(SP, float(beta[i]), rule=rule)
        alone = simulate([made], "logistic", method, settings, seeds=[0])
        np.testing.assert_array_equal(found.params[i], alone.params[0])


@every_executor
def test_evaluation_does_not_change_training(executor: str) -> None:
    made = federation()
    method = fedgft(SP, 5.0)
    base = run(made, method, executor=executor, eval_every=1)
    for options in ({"eval_every": 0}, {"eval_every": 2}, {"eval_on": "test"}):
        found = run(made, method, executor=executor, **options)
        np.testing.assert_array_equal(found.params, base.params)


def test_history_equals_the_evaluation_of_the_model() -> None:
    """The sums of the start and of the end, recomputed from the parameters."""
    made = standardize(federation())
    found = run(made, fedgft(SP, 5.0), eval_every=2)
    assert found.rounds.tolist() == [0, 2, 3]
    start = torch.nn.utils.parameters_to_vector(module(made).parameters()).detach().numpy()
    for params, at, by_client in ((start, 0, found.before), (found.params[0], -1, found.after)):
        tallies = [_tally(made, params, rows) for rows in (made.rows, made.test)]
        for seen, expected in zip((found.federation, found.test), tallies, strict=True):
            np.testing.assert_allclose(seen.score[at, 0], expected.score, rtol=1e-12)
            np.testing.assert_array_equal(seen.decision[at, 0], expected.decision)
            np.testing.assert_array_equal(seen.count[at, 0], expected.count)
        np.testing.assert_allclose(by_client.score[0].sum(0), tallies[0].score, rtol=1e-12)


def _tally(made, params: np.ndarray, rows: np.ndarray) -> Sums:
    data = made.dataset
    x = torch.tensor((data.features[rows] - made.mean) / made.spread)
    weight = torch.tensor(params[:8]).view(2, 4)
    bias = torch.tensor(params[8:])
    probs = (x @ weight.T + bias).softmax(-1).numpy()
    return Sums.of(probs, data.labels[rows], data.groups[rows], num_groups=2)


@pytest.mark.parametrize("optimizer", [Optimizer("adam"), Optimizer("sgd")], ids=lambda o: o.rule)
@every_executor
def test_standardized_federations(optimizer: Optimizer, executor: str) -> None:
    """The same as training on features that were standardized before."""
    made = standardize(several())
    x = (made.dataset.features - made.mean) / made.spread
    explicit = replace(made, dataset=replace(made.dataset, features=x), mean=None, spread=None)
    method = fedgft(SP, 5.0)
    found = run(made, method, executor=executor, optimizer=optimizer)
    expected = run(explicit, method, executor=executor, optimizer=optimizer)
    np.testing.assert_allclose(found.params, expected.params, **PLAIN)
    np.testing.assert_allclose(found.test.score, expected.test.score, **PLAIN)


@every_executor
def test_float32_is_close_to_float64(executor: str) -> None:
    made = federation()
    method = fedgft(SP, 5.0)
    found = run(made, method, executor=executor, precision="fp32", optimizer=Optimizer("momentum"))
    expected = run(made, method, executor=executor, optimizer=Optimizer("momentum"))
    assert found.params.dtype == np.float32
    np.testing.assert_allclose(found.params, expected.params, atol=2e-5)  # 50 steps of float32


@every_executor
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_large_scores_saturate(executor: str, precision: str) -> None:
    """Logits of 1e4: probabilities are 0 or 1, and nothing overflows."""
    init = np.array([1e4, 0, 0, 0, -1e4, 0, 0, 0, 0, 0])
    found = run(federation(), fedgft(SP, 5.0), executor=executor, precision=precision, init=init)
    score = found.federation.score[0, 0]
    np.testing.assert_allclose(score, found.federation.decision[0, 0], atol=0.01)
    assert np.isfinite(found.params).all()


@every_executor
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_run_that_diverged_says_so(executor: str, precision: str) -> None:
    rate = {"fp32": 1e38, "fp64": 1e308}[precision]
    with np.errstate(all="ignore"):
        found = run(federation(), fedgft(SP, 5.0), executor=executor, precision=precision, lr=rate)
    assert not np.isfinite(found.params).all()
    last = found.test[-1]
    assert np.isnan(last.accuracy()).all() and np.isnan(last.gap(SP, "soft")).all()


MISFITS = {
    "no runs": ({"seeds": []}, "federations"),
    "rates": ({"lr": np.full(3, 0.1)}, "lr"),
    "a negative rate": ({"lr": -1.0}, "lr"),
    "no rate": ({"lr": np.array([0.1, np.nan])}, "lr"),
    "strengths": ({"algorithm": fedgft(SP, np.ones(3))}, "lam"),
    "local strengths": ({"algorithm": lft(SP, np.ones(1))}, "lam"),
    "targets": ({"algorithm": fedgft_control(SP, np.zeros(3))}, "target"),
    "weights": ({"algorithm": fairfed(SP, np.ones(3))}, "beta"),
    "wrapped": ({"algorithm": with_base(fairfed(SP, np.ones(3)), "fednova")}, "beta"),
    "norms": (
        {"settings": Settings(schedule="constant", state="reset", rounds=20, norms="local")},
        "fedbn",
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_numbers_that_do_not_fit_the_runs_are_refused(what: str) -> None:
    change, field = MISFITS[what]
    given = {
        "algorithm": fedavg(),
        "settings": Settings(schedule="constant", state="reset", rounds=1),
        "seeds": [0, 1],
        **change,
    }
    with pytest.raises(FedgftError) as caught:
        simulate([federation()] * len(given["seeds"]), "logistic", **given)
    assert caught.value.field == field


def test_invalid_numbers_and_choices_are_refused() -> None:
    for beta in (np.nan, np.inf, -1.0):
        with pytest.raises(FedgftError, match="must be a number >= 0") as caught:
            fairfed(SP, beta)
        assert caught.value.field == "beta"
    odd = Settings(schedule="constant", state="reset", rounds=20)
    object.__setattr__(odd, "eval_on", "train")  # the tests' own check of types would be first
    with pytest.raises(FedgftError, match="eval_on 'train' is not known; choose from both, test"):
        odd.__post_init__()


def test_out_of_memory_on_a_cpu_does_not_suggest_gpu_settings(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("fedgft.engine.executors.fused.FusedExecutor.measure", full)
    with pytest.raises(FedgftError, match=r"try batch_size 128 \(it is 256\)$"):
        simulate(
            [federation()],
            "logistic",
            fedavg(),
            Settings(schedule="constant", state="reset", rounds=20),
            seeds=[0],
        )
