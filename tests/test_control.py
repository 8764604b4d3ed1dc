"""A target for decisions: the rule, what it never does, and what it reaches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fedgft as package
from fedgft.data.partition import partition
from fedgft.data.scaling import standardise
from fedgft.data.synthetic import synthetic
from fedgft.engine import Settings, simulate
from fedgft.errors import FedgftError
from fedgft.federated import Algorithm, Controlled, Objective, Penalty, controlled, fedavg
from fedgft.federated.control import FIRM, GENTLE, Steering
from fedgft.metrics import CATALOG, Metric, get_metric

SP = CATALOG["sp"]


def statistics(rates, events) -> np.ndarray:
    """(run, 2, v, g) of given rates."""
    rates, events = np.array(rates, float), np.array(events, float)
    return np.stack((rates * events, np.broadcast_to(events, rates.shape)), axis=-3)


def by_hand(gaps, *, target: float, pace: float) -> list[float]:
    """C of two groups, the rule written out."""
    plus = minus = 0.0
    out = []
    for g in gaps:
        plus = max(0.0, plus + 8 * pace * (g - target))
        minus = max(0.0, minus + 8 * pace * (-g - target))
        out.append(max(0.0, plus + 2 * (g - target)) - max(0.0, minus + 2 * (-g - target)))
    return out


@settings(max_examples=50)
@given(
    gaps=arrays(float, 12, elements=st.floats(-0.5, 0.5)),
    target=st.sampled_from([0.0, 0.02, 0.3]),
    pace=st.floats(0.01, 0.3),
)
def test_two_groups_are_the_rule_written_out(gaps, target: float, pace: float) -> None:
    rule = Controlled(SP, target, most=1e9)
    state, found = rule.init(np.array([pace])), []
    for g in gaps:
        state = rule.steer(state, statistics([[[0.5 + g / 2, 0.5 - g / 2]]], [0.4, 0.6]))
        found.append(state.v[0, 0, 0] * np.array([0.4, 0.6]))  # C_i = v_i d rate_i / dS_i
    np.testing.assert_allclose(found, [[c, -c] for c in by_hand(gaps, target=target, pace=pace)],
                               atol=1e-9)  # fmt: skip


@pytest.mark.parametrize("name", ["sp", "eo", "cal", "acc", "sp+0.5*eop"])
def test_the_message_is_the_gradient_of_the_priced_rates(name: str) -> None:
    """v = d<C, rates>/dS, by torch's autograd, for three groups."""
    metric, rng = get_metric(name), np.random.default_rng(1)
    conditions = len(metric.conditions(2))
    S = statistics(rng.uniform(0.2, 0.8, (1, conditions, 3)),
                   rng.uniform(0.1, 0.3, (1, conditions, 3)))  # fmt: skip
    rule = Controlled(metric, 0.05)
    state = rule.steer(rule.init(np.array([0.3])), S)
    leaf = torch.tensor(S, requires_grad=True)
    rates = leaf[:, 0] / leaf[:, 1]
    over = rates[..., :, None] - rates[..., None, :] - 0.05
    weight = torch.tensor([1.0, 0.5] if "+" in name else [1.0] * conditions)[:, None, None]
    ki, kp = GENTLE if name == "cal" else FIRM
    push = (ki * 0.3 * weight * over).clamp(0) + kp * weight * over
    push = push.clamp(0).detach()
    price = (2 / 3 * (push - push.transpose(-1, -2)).sum(-1)).double()
    expected = torch.autograd.grad((price * rates).sum(), leaf)[0].numpy()
    np.testing.assert_allclose(state.v, expected, atol=1e-10)


def test_within_the_target_nothing_is_pushed() -> None:
    rule = Controlled(SP, 0.1)
    wide, narrow = statistics([[[0.8, 0.2]]], [0.5, 0.5]), statistics([[[0.55, 0.5]]], [0.5, 0.5])
    state = rule.steer(rule.init(np.array([0.5])), wide)
    assert np.abs(state.v).max() > 0
    for _ in range(200):
        state = rule.steer(state, narrow)
    assert (state.mu == 0).all() and (state.v == 0).all()


def test_a_target_out_of_reach_is_no_divergence() -> None:
    rule = Controlled(SP, 0.0)
    state = rule.init(np.array([1.0]))
    for _ in range(10_000):
        state = rule.steer(state, statistics([[[0.9, 0.1]]], [0.5, 0.5]))
    assert state.mu.max() == rule.most
    assert np.abs(state.v).max() <= (rule.most + FIRM[1]) / 0.5


def test_a_group_that_is_not_there_rests() -> None:
    """Its multipliers stay as they are; the others go on, and nothing becomes NaN."""
    rule = Controlled(SP)
    state = rule.steer(rule.init(np.array([0.5])), statistics([[[0.7, 0.3, 0.2]]], [0.3, 0.3, 0.3]))
    again = rule.steer(state, statistics([[[0.7, 0.3, 0.2]]], [0.3, 0.3, 0.0]))
    np.testing.assert_array_equal(again.mu[0, 0, 2], state.mu[0, 0, 2])
    assert again.mu[0, 0, 0, 1] > state.mu[0, 0, 0, 1]
    assert np.isfinite(again.v).all()
    assert (again.v[..., 2] == 0).all()  # it has no rows to price
    for events in ([0.3, 0.3, -0.1], [0.0, 0.0, 0.0]):  # a count below zero is noise
        assert np.isfinite(rule.steer(again, statistics([[[0.7, 0.3, 0.2]]], events)).v).all()


def test_an_empty_group_has_no_price() -> None:
    rule = Controlled(SP)
    state = rule.steer(rule.init(np.array([0.5])), statistics([[[0.7, 0.3]]], [0.3, 0.0]))
    assert (state.v == 0).all()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"target": -0.1}, "--target"), ({"target": 1.0}, "--target"),
     ({"target": float("nan")}, "--target"), ({"pick": 1.5}, "--pick")],
)  # fmt: skip
def test_wrong_targets(wrong, says) -> None:
    with pytest.raises(FedgftError, match=says):
        Controlled(SP, **wrong)


DATA = synthetic(rows=4000, seed=0)
MADE = [standardise(partition(DATA, clients=6, alpha=0.5, seed=s)) for s in range(4)]


def trained(method: Algorithm, *, rounds: int = 30, on_model=None, **options):
    chosen = Settings(rounds=rounds, state="shared", schedule="cosine", batch_size=64, **options)
    return simulate(MADE, "logistic", method, chosen, seeds=range(4), lr=0.03, on_model=on_model)


# What it may cost here, where one group has twice as many positives as the other.
PRICED = {"sp": 0.08, "eop": 0.03, "eo": 0.06, "fpr": 0.03, "cal": 0.06}


@pytest.mark.parametrize("name", ["sp", "eop", "eo", "fpr", "acc", "cal", "sp+eop"])
def test_the_gap_of_decisions_goes_away(name: str) -> None:
    metric = get_metric(name)
    plain, fair = trained(fedavg()), trained(controlled(metric))
    before = plain.federation[-1].gap(metric, "hard").mean()
    after = fair.federation[-1].gap(metric, "hard").mean()
    assert after < max(0.005, before / 10)
    if name in PRICED:
        assert fair.test[-1].accuracy().mean() > plain.test[-1].accuracy().mean() - PRICED[name]


@pytest.mark.parametrize("target", [0.02, 0.05])
def test_a_target_is_reached_and_used(target: float) -> None:
    plain, fair = trained(fedavg()), trained(controlled(SP, target))
    assert (plain.federation[-1].gap(SP, "hard") > 2 * target).all()
    gap = fair.federation[-1].gap(SP, "hard")
    assert (gap <= target + 0.005).all()
    assert gap.mean() >= target / 2


def test_one_target_a_run() -> None:
    """A batch of runs with their own targets is what each would be alone."""
    each = np.array([0.0, 0.03, 0.06, 0.1])
    together = trained(controlled(SP, each)).params
    for i, target in enumerate(each):
        alone = trained(controlled(SP, float(target))).params
        np.testing.assert_array_equal(together[i], alone[i])


def test_scores_may_be_held_against_the_target() -> None:
    fair = trained(controlled(SP, 0.02, kind="soft"))
    assert (fair.federation[-1].gap(SP, "soft") <= 0.025).all()


def test_the_pick_is_the_best_of_the_last_rounds() -> None:
    """By accuracy less twice what the gap is above its target, looked up model by model."""
    models: list[np.ndarray] = []
    last = trained(controlled(SP, 0.03, pick=0.0), on_model=lambda n, p: models.append(p.copy()))
    picked = trained(controlled(SP, 0.03, pick=0.5))
    score = last.federation.accuracy() - 2 * np.maximum(
        last.federation.gap(SP, "hard") - 0.03 - 0.002, 0
    )
    window = np.flatnonzero(last.rounds > 15)
    best = window[::-1][score[window][::-1].argmax(0)]  # the last of those that are equally good
    for run, at in enumerate(best):
        np.testing.assert_array_equal(picked.params[run], models[at][run])
    np.testing.assert_array_equal(picked.federation.decision[:-1], last.federation.decision[:-1])
    assert (picked.federation[-1].gap(SP, "hard") <= 0.033).all()


def test_measuring_less_often_picks_the_same() -> None:
    often, seldom = (trained(controlled(SP, 0.03), eval_every=e).params for e in (1, 0))
    np.testing.assert_array_equal(often, seldom)


def test_a_gap_that_nobody_can_estimate_hands_over_the_last_model() -> None:
    alone = [standardise(partition(replace(DATA, groups=np.zeros(len(DATA), int)), clients=3,
                                   alpha=1.0, seed=0))]  # fmt: skip
    chosen = Settings(rounds=6, batch_size=64)
    picked, last = (
        simulate(alone, "logistic", controlled(SP, pick=p), chosen, seeds=[0]).params
        for p in (1.0, 0.0)
    )
    np.testing.assert_array_equal(picked, last)


@pytest.mark.parametrize("name", ["eop", "eo", "cal"])
def test_cohorts_without_a_group_do_no_harm(name: str) -> None:
    """One client of ten a round, and each of them lacks something."""
    made = [standardise(partition(DATA, clients=10, alpha=0.1, seed=s)) for s in range(4)]
    chosen = Settings(rounds=20, cohort=1, batch_size=64)
    method = controlled(get_metric(name))
    found = simulate(made, "logistic", method, chosen, seeds=range(4), lr=0.02)
    assert np.isfinite(found.params).all()


def test_everybody_as_a_cohort_is_everybody() -> None:
    plain, asked = trained(controlled(SP)), trained(controlled(SP), cohort=6)
    np.testing.assert_array_equal(plain.params, asked.params)


def test_a_metric_that_is_not_affine_is_steered_gently() -> None:
    squared = Metric("sq", "squared", lambda p, y: p[:, 1:] ** 2, lambda p, y: 1 + 0 * y[:, :1],
                     lambda classes: ("all",))  # fmt: skip
    penalty = Penalty(squared, target=0.0)
    y, a = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    logits = torch.tensor([[0.0, 2.0], [0.0, 2.0], [2.0, 0.0], [2.0, 0.0]])
    assert penalty.update(penalty.statistics(logits, y, a)) == 1.0
    assert np.isfinite(penalty.v).all() and np.abs(penalty.v).max() > 0


def test_a_cohort_and_noise_are_no_ground_for_a_pick() -> None:
    for options in ({"cohort": 3}, {"noise": 5.0}):
        with_, without = (trained(controlled(SP, pick=p), **options).params for p in (0.6, 0.0))
        np.testing.assert_array_equal(with_, without)


def test_noise_is_what_the_seed_says_and_does_harm_by_its_size() -> None:
    quiet, loud = (trained(controlled(SP), noise=s) for s in (1.0, 50.0))
    np.testing.assert_array_equal(quiet.params, trained(controlled(SP), noise=1.0).params)
    gaps = [h.federation[-1].gap(SP, "hard").mean() for h in (quiet, loud)]
    assert gaps[0] < 0.02
    assert gaps[1] > gaps[0]
    plain, noisy = trained(fedavg()), trained(fedavg(), noise=50.0)
    np.testing.assert_array_equal(plain.params, noisy.params)  # who sends nothing is not disturbed
    with pytest.raises(FedgftError, match="--noise"):
        Settings(noise=-1.0)


def test_more_groups_reach_the_target_pair_by_pair() -> None:
    rng = np.random.default_rng(3)
    three = replace(DATA, groups=rng.integers(0, 3, len(DATA)), group_names=("a", "b", "c"))
    x = three.features.copy()
    x[:, 0] += 0.8 * three.groups
    three = replace(three, features=x)
    made = [standardise(partition(three, clients=5, alpha=1.0, seed=s)) for s in range(2)]
    chosen = Settings(rounds=30, state="shared", schedule="cosine", batch_size=64)
    fair = simulate(made, "logistic", controlled(SP, 0.03), chosen, seeds=[0, 1], lr=0.03)
    assert (fair.federation[-1].gap(SP, "hard") <= 0.035).all()


def test_the_own_loop_takes_a_target_too() -> None:
    """The same rule in a loop of one's own: hard gap measured, scores priced."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    a = torch.tensor(rng.integers(0, 2, 3000))
    x = torch.tensor(rng.standard_normal((3000, 2)))
    x = torch.cat((x + torch.stack((a, 0 * a), 1), a[:, None]), 1)  # the group can be seen
    y = (x[:, 0] + 0.5 * torch.tensor(rng.standard_normal(3000)) > 0.5).long()
    model = torch.nn.Linear(3, 2).double()
    penalty = Penalty("sp", target=0.02, pace=0.5)
    optimizer, gap = torch.optim.Adam(model.parameters(), lr=0.05), None
    for t in range(60):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - t / 60) + 0.001
        gap = penalty.update(penalty.statistics(model(x), y, a))
        for _ in range(10):
            optimizer.zero_grad()
            logits = model(x)
            (torch.nn.functional.cross_entropy(logits, y) + penalty(logits, y, a)).backward()
            optimizer.step()
        if t == 5:
            early = gap  # the model has learnt, and the multiplier has not
    assert gap < 0.03 < early
    decided = model(x).argmax(-1).numpy()
    again = package.statistical_parity_difference(y.numpy(), decided, sensitive_features=a.numpy())
    assert again < 0.04
    for wrong in ({}, {"lam": 1.0, "target": 0.1}):
        with pytest.raises(FedgftError, match="either lam or target"):
            Penalty("sp", **wrong)


def test_two_penalties_add_up() -> None:
    """A penalty on scores beside a target for decisions: two fillings of one slot."""
    from fedgft.federated import Linearised

    both = Algorithm(objective=Objective(penalties=(Linearised(SP, 1.0), Controlled(SP, 0.02))))
    assert (trained(both).federation[-1].gap(SP, "hard") <= 0.025).all()


def test_steering_starts_from_nothing() -> None:
    assert Controlled(SP).price(Steering(np.ones(1)), run=np.zeros(1, int), classes=2) == 0.0
