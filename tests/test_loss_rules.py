"""Laws of weights, labels, prices and curves of rows, and of the methods that set them."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch

import fedgft
from fedgft.algorithms import (
    METHODS,
    Algorithm,
    LinearizedPenalty,
    Objective,
    fedavg,
    fedgft_control,
    get_method,
    lrw,
    with_base,
)
from fedgft.algorithms.agnostic_fair import BoundaryCovariance
from fedgft.algorithms.bounded_group_loss import BoundedGroupLoss
from fedgft.algorithms.every_threshold import EveryThreshold
from fedgft.algorithms.ffalm import LossParity
from fedgft.algorithms.loss_rules import SCORE_BINS, LossTerms, check_rule, shift_to_labels
from fedgft.algorithms.puffle import LocalMomentum
from fedgft.algorithms.qffl import PowerOfLosses
from fedgft.engine import Settings, simulate
from fedgft.engine.executors import numpy_kernels
from fedgft.engine.state import Snapshot
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, get_metric
from small_federation import EXECUTORS, SGD, federation, module, reordered, run, several

SP = CATALOG["sp"]
EXACT = {"rtol": 0, "atol": 1e-12}
PLAIN = {"rtol": 0, "atol": 1e-10}
OLDER = ("fedavg", "lrw", "lft", "fairfed", "fedgft", "fedgft-control")
RIVALS = {name: METHODS[name].default for name in METHODS if name not in OLDER}
STRONG = {"fairgrad": 3.0, "agnostic-fair": 8.0, "afl": 1.0, "fedminmax": 0.5, "q-ffl": 2.0}
every_rival = pytest.mark.parametrize("name", [*RIVALS, "sp@all", "eop@all"])
every_executor = pytest.mark.parametrize("executor", EXECUTORS)


def rival(name: str, strength: float | np.ndarray | None = None, metric: str = "sp") -> Algorithm:
    """A published method, or the penalty at every threshold, at a strength that has an effect."""
    if "@" in name:
        return get_method("fedgft", get_metric(name), 5.0 if strength is None else strength)
    chosen = STRONG.get(name, RIVALS[name]) if strength is None else strength
    return get_method(name, get_metric(metric), chosen)


def executors_of(name: str) -> tuple[str, ...]:
    return ("fused", "sequential") if "@" in name else EXECUTORS


@dataclass(frozen=True, eq=False)
class Fixed:
    """A rule whose tables by label and group do not change."""

    weights: np.ndarray | float = 1.0
    labels: np.ndarray | None = None
    price: np.ndarray | float = 0.0
    curve: np.ndarray | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return () if self.curve is None else ("histograms",)

    def init(self, count):
        return None

    def update(self, state, cohort, reports):
        return None

    def terms(self, state, cohort) -> LossTerms:
        def spread(table):
            if table is None or isinstance(table, float):
                return table
            return np.repeat(table[None], len(cohort), axis=0)

        return LossTerms(*map(spread, (self.weights, self.labels, self.price, self.curve)))


def fixed(**tables) -> Algorithm:
    return Algorithm(objective=Objective(loss_rules=(Fixed(**tables),)))


def draw_tables(groups: int = 2, classes: int = 2, *, curve: bool = False) -> dict:
    rng = np.random.default_rng(5)
    shape = (classes, groups + 1)
    tables = {
        "weights": rng.uniform(0.2, 2, shape),
        "labels": rng.dirichlet(np.ones(classes), shape),
        "price": rng.normal(size=(*shape, classes)),
    }
    if curve:
        tables["curve"] = rng.normal(size=(*shape, SCORE_BINS))
    return tables


# The tables in the executors


@every_executor
@pytest.mark.parametrize("with_curve", [False, True])
def test_a_rule_without_effect_is_bit_equal_to_fedavg(executor: str, with_curve: bool) -> None:
    if with_curve and executor == "stacked":
        pytest.skip("curves are not stacked")
    made = federation()
    labels = np.repeat(np.eye(2)[:, None], 3, axis=1)
    tables = {"weights": np.ones((2, 3)), "labels": labels, "price": np.zeros((2, 3, 2))}
    if with_curve:
        tables["curve"] = np.zeros((2, 3, SCORE_BINS))
    found = run(made, fixed(**tables), executor=executor)
    expected = run(made, fedavg(), executor=executor)
    np.testing.assert_array_equal(found.params, expected.params)


def test_executors_agree_on_weights_labels_and_prices(monkeypatch) -> None:
    made = federation()
    method = fixed(**draw_tables())
    expected = run(made, method, executor="fused").params
    for executor in ("stacked", "sequential"):
        found = run(made, method, executor=executor).params
        np.testing.assert_allclose(found, expected, **PLAIN)
    monkeypatch.setattr("fedgft.engine.executors.fused.kernels", numpy_kernels)
    np.testing.assert_allclose(run(made, method, executor="fused").params, expected, **PLAIN)
    assert np.abs(expected - run(made, fedavg()).params).max() > 1e-3


def test_executors_agree_on_curves(monkeypatch) -> None:
    made = federation()
    method = fixed(**draw_tables(curve=True))
    expected = run(made, method, executor="fused").params
    found = run(made, method, executor="sequential").params
    np.testing.assert_allclose(found, expected, **PLAIN)
    monkeypatch.setattr("fedgft.engine.executors.fused.kernels", numpy_kernels)
    np.testing.assert_allclose(run(made, method, executor="fused").params, expected, **PLAIN)
    flat = run(made, fixed(**draw_tables())).params
    assert np.abs(expected - flat).max() > 1e-3


def test_curves_are_not_stacked() -> None:
    made = federation()
    method = fixed(**draw_tables(curve=True))
    with pytest.raises(FedgftError, match=r"stacked .* the price of a score depends on the score"):
        run(made, method, executor="stacked")
    assert run(made, method, model="mlp").executor == "sequential"
    assert run(made, fixed(**draw_tables()), model="mlp").executor == "stacked"


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "classes"), [(2, 2), (3, 3)])
def test_stacked_and_sequential_agree_on_modules(groups: int, classes: int) -> None:
    made = several(groups, classes)
    method = fixed(**draw_tables(groups, classes))
    one, two = (run(made, method, model="mlp", executor=e).params for e in EXECUTORS[1:])
    np.testing.assert_allclose(one, two, **PLAIN)


def test_rules_combine() -> None:
    tables = draw_tables()
    two = replace(
        fixed(),
        objective=Objective(
            loss_rules=(
                Fixed(weights=tables["weights"], price=tables["price"]),
                Fixed(weights=2.0, labels=tables["labels"], price=tables["price"]),
            )
        ),
    )
    one = fixed(weights=2 * tables["weights"], labels=tables["labels"], price=2 * tables["price"])
    made = federation()
    np.testing.assert_array_equal(run(made, one).params, run(made, two).params)
    curve = draw_tables(curve=True)["curve"]
    both = LossTerms(curve=curve) + LossTerms(curve=curve)
    np.testing.assert_array_equal(both.curve, 2 * curve)


def test_rules_multiply_the_weights_of_lrw() -> None:
    made = federation()
    halved = replace(lrw(), objective=replace(lrw().objective, loss_rules=(Fixed(weights=0.5),)))
    plain, half = (
        run(made, each, optimizer=SGD, batch_size=64, rounds=1, lr=lr).params
        for each, lr in ((lrw(), 0.05), (halved, 0.1))
    )
    np.testing.assert_allclose(half, plain, **EXACT)


# One full-batch step of gradient descent is a step on the loss, written out


@dataclass(frozen=True)
class Written:
    """The rows of a federation, and scores of a linear model with given parameters."""

    x: np.ndarray
    y: np.ndarray
    a: np.ndarray
    client: np.ndarray
    start: np.ndarray

    def scores(self, params: np.ndarray) -> np.ndarray:
        features = self.x.shape[1]
        weight, bias = params[: 2 * features].reshape(2, features), params[2 * features :]
        logits = self.x @ weight.T + bias
        expd = np.exp(logits - logits.max(1, keepdims=True))
        return expd / expd.sum(1, keepdims=True)

    def losses(self, params: np.ndarray) -> np.ndarray:
        return -np.log(self.scores(params)[np.arange(len(self.y)), self.y])


def write_out(made) -> Written:
    rows = np.concatenate([made.client(k) for k in range(made.num_clients)])
    client = np.repeat(np.arange(made.num_clients), made.sizes)
    start = torch.nn.utils.parameters_to_vector(module(made).parameters()).detach().numpy()
    data = made.dataset
    return Written(data.features[rows], data.labels[rows], data.groups[rows], client, start)


def slope(function, at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """The gradient by central differences."""
    out = np.zeros_like(at)
    for i in range(len(at)):
        move = np.zeros_like(at)
        move[i] = step
        out[i] = (function(at + move) - function(at - move)) / (2 * step)
    return out


FULL = {"rounds": 1, "batch_size": 1000, "optimizer": SGD, "lr": 0.05}


def first_gradient(made, method: Algorithm, **options) -> np.ndarray:
    """What one step of all clients moves the start by, over the learning rate."""
    found = run(made, method, **(FULL | options)).params[0]
    return (write_out(made).start - found) / 0.05


def second_gradient(made, method: Algorithm) -> tuple[np.ndarray, np.ndarray]:
    """The model of the first round, and the gradient of the second one."""
    one, two = (run(made, method, **(FULL | {"rounds": r})).params[0] for r in (1, 2))
    return one, (one - two) / 0.05


@every_executor
@pytest.mark.parametrize("with_curve", [False, True])
def test_a_step_on_weights_labels_prices_and_curves(executor: str, with_curve: bool) -> None:
    if with_curve and executor == "stacked":
        pytest.skip("curves are not stacked")
    made = federation()
    tables = draw_tables(curve=with_curve)
    rows = write_out(made)

    def loss(params: np.ndarray) -> float:
        total = 0.0
        for p, y, a in zip(rows.scores(params), rows.y, rows.a, strict=True):
            total -= tables["weights"][y, a] * (tables["labels"][y, a] * np.log(p)).sum()
            total += (tables["price"][y, a] * p).sum()
            if with_curve:  # the integral of a step function from 0 to the score
                edges = np.clip(p[1] * SCORE_BINS - np.arange(SCORE_BINS), 0, 1) / SCORE_BINS
                total += (tables["curve"][y, a] * edges).sum()
        return total / len(rows.y)

    found = first_gradient(made, fixed(**tables), executor=executor)
    np.testing.assert_allclose(found, slope(loss, rows.start), rtol=0, atol=1e-8)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("metric", ["sp", "eop"])
def test_a_step_of_prices_on_decisions(metric: str, groups: int) -> None:
    """The expected loss of weighted classification, with prices by finite differences."""
    made = several(groups)
    rows = write_out(made)
    lam = 6.0
    penalty = LinearizedPenalty(CATALOG[metric], lam)
    method = Algorithm(objective=Objective(penalties=(penalty,), price_on="decisions"))
    event = rows.y >= (metric == "eop")

    def gap_penalty(score: np.ndarray) -> float:
        rates = [score[event & (rows.a == g)].mean() for g in range(groups)]
        return lam / 2 * (max(rates) - min(rates)) ** 2

    price = len(rows.y) * slope(gap_penalty, rows.scores(rows.start)[:, 1])
    cost = np.stack((1.0 * (rows.y == 1), (rows.y == 0) + price), axis=1)
    assert (np.diff(cost, axis=1)[:, 0] < 0).sum() != rows.y.sum()  # some labels flip

    def loss(params: np.ndarray) -> float:
        mass = cost.max(1, keepdims=True) - cost
        return -(mass * np.log(rows.scores(params))).sum() / len(rows.y)

    found = first_gradient(made, method)
    np.testing.assert_allclose(found, slope(loss, rows.start), rtol=0, atol=1e-6)


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(("metric", "least"), [("sp", 0), ("eop", 1)])
def test_a_step_of_agnostic_fair(metric: str, least: int, groups: int) -> None:
    made = federation() if groups == 2 else several(groups)
    rows = write_out(made)
    event = (rows.y >= least) & (rows.a >= 0)

    def loss(params: np.ndarray) -> float:
        p = rows.scores(params)
        logit = np.log(p[:, 1] / p[:, 0])[event]
        total = rows.losses(params).mean()
        for g in range(groups):
            mine = 1.0 * (rows.a[event] == g)
            total += 1.5 * ((mine - mine.mean()) * logit).mean() ** 2
        return total

    method = Algorithm(objective=Objective(loss_rules=(BoundaryCovariance(CATALOG[metric], 1.5),)))
    found = first_gradient(made, method)
    np.testing.assert_allclose(found, slope(loss, rows.start), rtol=0, atol=1e-8)


def test_a_step_of_fairtrade() -> None:
    made = several(3)
    rows = write_out(made)

    def loss(params: np.ndarray) -> float:
        score = rows.scores(params)[:, 1]
        total = rows.losses(params).mean()
        for k in range(made.num_clients):
            mine = rows.client == k
            if set(rows.a[mine]) != {0, 1, 2}:  # nothing is reduced where a group is missing
                continue
            for g in range(3):
                apart = score[mine & (rows.a == g)].mean() - score[mine].mean()
                total += mine.mean() * 4.0 * apart**2
        return total

    found = first_gradient(made, rival("fairtrade", 4.0))
    np.testing.assert_allclose(found, slope(loss, rows.start), rtol=0, atol=1e-8)


def test_a_step_of_ffalm() -> None:
    """With rows without a group, and with clients that have one group only."""
    made = federation()
    rows = write_out(made)
    method = Algorithm(objective=Objective(loss_rules=(LossParity(2.0, rate=0.4),)))
    model, found = second_gradient(made, method)

    def apart(params: np.ndarray, k: int) -> float:
        losses, mine = rows.losses(params), rows.client == k
        zero, one = (losses[mine & (rows.a == g)] for g in (0, 1))
        return float(zero.mean() - one.mean()) if len(zero) and len(one) else 0.0

    every = range(made.num_clients)
    share = [float((rows.client == k).mean()) for k in every]
    lam = 0.4 * 2.0 * sum(share[k] * apart(model, k) for k in every)

    def loss(params: np.ndarray) -> float:
        total = rows.losses(params).mean()
        for k in every:
            d = apart(params, k)
            total += share[k] * (lam * d + d**2)
        return total

    np.testing.assert_allclose(found, slope(loss, model), rtol=0, atol=1e-7)


def test_a_step_of_puffle() -> None:
    """Each client has its own share of its own gap, relative to all rows where it lacks a group."""
    made = federation()
    rows = write_out(made)
    method = Algorithm(objective=Objective(loss_rules=(LocalMomentum(SP, 0.02),)))
    model, found = second_gradient(made, method)
    overall = [rows.scores(model)[rows.a == g, 1].mean() for g in (0, 1)]

    def gap(params: np.ndarray, k: int) -> float:
        score, mine = rows.scores(params)[:, 1], rows.client == k
        own = [score[mine & (rows.a == g)] for g in (0, 1)]
        rates = [each.mean() if len(each) else overall[g] for g, each in enumerate(own)]
        return abs(rates[0] - rates[1])

    lam = [max(gap(model, k) - 0.02, 0) / 0.98 for k in range(made.num_clients)]
    assert min(lam) < max(lam)

    def loss(params: np.ndarray) -> float:
        losses = rows.losses(params)
        total = 0.0
        for k in range(made.num_clients):
            mine = rows.client == k
            own = (1 - lam[k]) * losses[mine].mean() + lam[k] * gap(params, k)
            total += mine.mean() * own
        return total

    np.testing.assert_allclose(found, slope(loss, model), rtol=0, atol=1e-7)


def test_a_step_of_bounded_group_loss() -> None:
    made = federation()
    rows = write_out(made)
    method = Algorithm(objective=Objective(loss_rules=(BoundedGroupLoss(0.3, most=2.0),)))
    model, found = second_gradient(made, method)
    theta = [rows.losses(model)[rows.a == g].mean() - 0.3 for g in (0, 1)]
    lam = [2.0 * np.exp(each) / (1 + np.exp(theta).sum()) for each in theta]

    def loss(params: np.ndarray) -> float:
        losses = rows.losses(params)
        return losses.mean() + sum(lam[g] * losses[rows.a == g].mean() for g in (0, 1))

    np.testing.assert_allclose(found, slope(loss, model), rtol=0, atol=1e-7)


@pytest.mark.parametrize("q", [0.0, 1.0, 3.0])
def test_qffl_moves_along_the_gradient_of_its_objective(q: float) -> None:
    made = federation()
    rows = write_out(made)

    def objective(params: np.ndarray) -> float:
        losses = rows.losses(params)
        total = 0.0
        for k in range(made.num_clients):
            mine = rows.client == k
            total += mine.mean() * losses[mine].mean() ** (q + 1) / (q + 1)
        return total

    method = Algorithm(weighting=PowerOfLosses(q, lr=0.05))
    found = first_gradient(made, method)
    expected = slope(objective, rows.start)
    cosine = found @ expected / np.linalg.norm(found) / np.linalg.norm(expected)
    assert cosine == pytest.approx(1, abs=1e-9)


# Prices on decisions


def test_shifted_labels_of_two_classes() -> None:
    """The weight |1 - 2y + v|, for class 1 where 1 - 2y + v is negative, else for class 0."""
    rng = np.random.default_rng(0)
    v = rng.normal(0, 2, (50, 2, 3))
    weights, labels = shift_to_labels(np.stack((np.zeros_like(v), v), axis=-1))
    for i, y, a in product(range(50), range(2), range(3)):
        value = 1 - 2 * y + v[i, y, a]
        assert weights[i, y, a] == pytest.approx(abs(value), abs=1e-12)
        assert labels[i, y, a].tolist() == ([0.0, 1.0] if value < 0 else [1.0, 0.0])


@pytest.mark.parametrize("classes", [2, 3])
def test_weighted_classification_minimizes_errors_plus_prices(classes: int) -> None:
    """Over all decisions of four cells, by trying all of them."""
    rng = np.random.default_rng(classes)
    for _ in range(20):
        price = rng.normal(0, 1, (classes, 2, classes))
        weights, labels = shift_to_labels(price)
        assert (weights >= 0).all()
        np.testing.assert_allclose(labels.sum(-1), 1)
        cells = [(y, a) for y in range(classes) for a in range(2)][:4]
        plain, shifted = [], []
        for decisions in product(range(classes), repeat=len(cells)):
            pairs = list(zip(cells, decisions, strict=True))
            plain.append(sum((d != y) + price[y, a, d] for (y, a), d in pairs))
            mass = sum(weights[y, a] * labels[y, a, d] for (y, a), d in pairs)
            shifted.append(-mass)
        assert np.argmin(plain) == np.argmin(shifted)
        apart = np.array(plain) - np.array(shifted)  # they differ by a constant
        np.testing.assert_allclose(apart, apart[0], atol=1e-12)


def test_rows_that_any_decision_costs_the_same_have_no_weight() -> None:
    price = np.zeros((2, 1, 2))
    price[0, 0, 0] = 1.0  # as much as the error
    weights, labels = shift_to_labels(price)
    assert weights[0, 0] == 0 and labels[0, 0].tolist() == [1.0, 0.0]


def test_prices_of_decisions_are_not_those_of_scores() -> None:
    made = federation()
    by = {
        on: run(made, fedgft_control("sp", 0.5, price_on=on), rounds=4).params
        for on in ("scores", "decisions")
    }
    np.testing.assert_allclose(by["scores"], by["decisions"], **EXACT)  # no price: plain training
    by = {
        on: run(
            made,
            Algorithm(objective=Objective(penalties=(LinearizedPenalty(SP, 9.0),), price_on=on)),
        ).params
        for on in ("scores", "decisions")
    }
    assert np.abs(by["scores"] - by["decisions"]).max() > 1e-3
    rule = EveryThreshold(get_metric("sp@all"), 1.0)
    with pytest.raises(FedgftError, match="a price by the score is paid for scores") as caught:
        Objective(loss_rules=(rule,), price_on="decisions")
    assert caught.value.field == "price_on"


# Laws of every published method


@every_executor
@pytest.mark.parametrize(
    ("name", "nothing"),
    [
        *((n, 0.0) for n in ("fairgrad", "agnostic-fair", "fairtrade", "fade", "ffalm")),
        *((n, 1.0) for n in ("fedfact", "puffle")),
        *((n, 0.0) for n in ("sp@all", "eop@all")),
    ],
)
def test_without_strength_methods_are_bit_equal_to_fedavg(name, nothing, executor) -> None:
    """A target of 1 leaves every gap."""
    if executor not in executors_of(name):
        pytest.skip("curves are not stacked")
    made = federation()
    expected = run(made, fedavg(), executor=executor).params
    found = run(made, rival(name, nothing), executor=executor).params
    np.testing.assert_array_equal(found, expected)


@every_executor
def test_without_strength_fedfb_and_qffl_are_fedavg_up_to_rounding(executor: str) -> None:
    made = federation()
    expected = run(made, fedavg(), executor=executor).params
    for metric in ("sp", "eop", "eo"):
        found = run(made, rival("fedfb", 0.0, metric), executor=executor).params
        np.testing.assert_allclose(found, expected, **PLAIN)
    found = run(made, rival("q-ffl", 0.0), executor=executor).params
    np.testing.assert_allclose(found, expected, **PLAIN)


def test_without_strength_minimax_methods_average_the_iterates_of_fedavg() -> None:
    """FedMinMax weighs clients by size, AFL equally."""
    made = federation()
    models = [run(made, fedavg(), rounds=t).params for t in (1, 2, 3)]
    found = run(made, rival("fedminmax", 0.0)).params
    np.testing.assert_allclose(found, sum(models) / 3, **PLAIN)
    parts = [(20, (0, 1), (0, 1))] * 4  # clients of one size
    made = federation(parts)
    models = [run(made, fedavg(), rounds=t).params for t in (1, 2, 3)]
    found = run(made, rival("afl", 0.0)).params
    np.testing.assert_allclose(found, sum(models) / 3, **PLAIN)


@every_rival
def test_methods_differ_from_fedavg(name: str) -> None:
    made = federation()
    apart = np.abs(run(made, rival(name)).params - run(made, fedavg()).params).max()
    assert apart > 1e-4


@pytest.mark.slow
@every_rival
def test_executors_agree(name: str) -> None:
    made = federation()
    first, *others = (run(made, rival(name), executor=e).params for e in executors_of(name))
    for other in others:
        np.testing.assert_allclose(other, first, rtol=0, atol=1e-8)


@every_rival
def test_the_order_of_clients_does_not_matter(name: str) -> None:
    made = federation()
    turned = reordered(made, [3, 0, 5, 4, 1, 2])
    found, expected = (run(each, rival(name)).params for each in (turned, made))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@every_rival
def test_clients_without_rows_do_not_matter(name: str) -> None:
    made = federation()
    offsets = np.insert(made.offsets, [0, 3, 6], made.offsets[[0, 3, 6]])
    keys = np.insert(made.keys, [0, 3, 6], np.array([70, 71, 72], np.uint64))
    more = replace(made, offsets=offsets, keys=keys)
    assert sorted(more.sizes) == [0, 0, 0, *sorted(made.sizes)]
    found, expected = (run(each, rival(name)).params for each in (more, made))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@every_rival
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cohort": 3, "sampling": "uniform"},
        {"cohort": 3, "sampling": "size", "lag": True},
        {"noise": 3.0},
        {"noise": 300.0, "rounds": 4},
        {"lag": True},
        {"start": "own"},
    ],
    ids=str,
)
def test_training_is_finite_and_a_seed_determines_it(name: str, options: dict) -> None:
    made = federation()
    options = {"rounds": 5} | options
    one, two = (run(made, rival(name), **options).params for _ in range(2))
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one, two)


@every_rival
def test_strengths_of_one_batch_are_those_of_single_runs(name: str) -> None:
    made = federation()
    strengths = np.array([0.0, 0.3, 1.0]) if name != "fedfact" else np.array([0.0, 0.05, 0.4])
    settings = Settings(
        rounds=3, batch_size=8, precision="fp64", state="reset", schedule="constant"
    )

    def train(strength, seeds):
        return simulate(
            [made] * len(seeds), "logistic", rival(name, strength), settings, seeds=seeds, lr=0.05
        ).params

    together = train(strengths, [0, 1, 2])
    for i, strength in enumerate(strengths):
        np.testing.assert_array_equal(train(float(strength), [i])[0], together[i])
    with pytest.raises(FedgftError, match=r"one per run \(1\)"):
        train(np.ones(2), [0])


@every_rival
def test_a_resumed_run_ends_with_the_same_bits(name: str) -> None:
    made = federation()
    kept: list[Snapshot] = []

    def keep(done: int, take) -> None:
        snapshot = take()
        kept.append(replace(snapshot, arrays={n: a.copy() for n, a in snapshot.arrays.items()}))

    options = {"rounds": 5, "cohort": 4, "sampling": "uniform"}
    whole = run(made, rival(name), **options, on_state=keep)
    for snapshot in kept[:4]:
        again = run(made, rival(name), **options, resume=snapshot)
        np.testing.assert_array_equal(whole.params, again.params)


@every_rival
@pytest.mark.parametrize("base", ["fednova", "scaffold", "fedadam", "fedprox"])
def test_methods_take_every_base(name: str, base: str) -> None:
    found = run(federation(), with_base(rival(name), base)).params
    plain = run(federation(), with_base(fedavg(), base)).params
    assert np.isfinite(found).all() and np.abs(found - plain).max() > 1e-6


@every_rival
@pytest.mark.parametrize("executor", ["fused", "sequential"])
def test_a_model_that_diverges_is_no_crash(name: str, executor: str) -> None:
    made = federation()
    found = run(
        made, rival(name), executor=executor, optimizer=SGD, lr=1e308, init=np.full(10, 1e200)
    )
    assert not np.isfinite(found.params).all()


@every_rival
def test_trees_refuse_or_grow(name: str) -> None:
    """FADE sees what FairFed sees, and FairTrade what lft does; others need losses or labels."""
    made = several()
    if name in ("fade", "fairtrade"):
        fedgft.simulate(made, "trees", rival(name), rounds=2)
        return
    with pytest.raises(FedgftError, match=r"losses that change|follow from losses") as caught:
        fedgft.simulate(made, "trees", rival(name), rounds=2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fairgrad", "fedfact", "puffle", "fade", "fairtrade"])
@pytest.mark.parametrize("metric", [*CATALOG, "sp+0.5*eop"])
def test_methods_for_every_metric(name: str, metric: str) -> None:
    found = run(several(), rival(name, metric=metric))
    assert np.isfinite(found.params).all()


@pytest.mark.parametrize("name", ["fedfact", "puffle", "fade", "fairtrade", "fedminmax", "afl"])
@pytest.mark.parametrize("metric", ["sp", "eo", "acc"])
def test_methods_with_more_classes_and_groups(name: str, metric: str) -> None:
    found = run(several(3, 3), rival(name, metric=metric), model="mlp")
    assert np.isfinite(found.params).all()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_torch_and_compiled_reports_are_the_same(executor: str) -> None:
    """The summed losses, logits and histograms that rules read."""
    made = federation()
    seen = []

    @dataclass(frozen=True)
    class Listener(Fixed):
        def update(self, state, cohort, reports):
            seen.append(reports)

        @property
        def reads(self):
            return ("losses", "logits") + (("histograms",) if executor != "stacked" else ())

    run(made, Algorithm(objective=Objective(loss_rules=(Listener(),))), executor=executor, rounds=1)
    rows = write_out(made)
    scores = rows.scores(rows.start)
    losses = rows.losses(rows.start)
    report = seen[0]
    for k, y, a in product(range(made.num_clients), range(2), (0, 1, -1)):
        mine = (rows.client == k) & (rows.y == y) & (rows.a == a)
        assert report.losses[k, y, a] == pytest.approx(losses[mine].sum(), abs=1e-10)
        logits = np.log(scores[mine, 1] / scores[mine, 0]).sum()
        assert report.logits[k, y, a] == pytest.approx(logits, abs=1e-10)
        if executor != "stacked":
            bins = np.floor(scores[mine, 1] * SCORE_BINS).astype(int)
            expected = np.bincount(bins, minlength=SCORE_BINS)
            np.testing.assert_array_equal(report.histograms[k, y, a], expected)


@dataclass(frozen=True)
class Mistaken:
    """A rule with one mistake."""

    terms_of_rows: object = None
    reads: object = ()

    def init(self, count: np.ndarray) -> None:
        return None

    def update(self, state: None, cohort: object, reports: object) -> None:
        return None

    def terms(self, state: None, cohort: object) -> object:
        return self.terms_of_rows


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (3, "must be rules with reads, init, update and terms, not 3"),
        (Mistaken, "must be rules with reads, init, update and terms, not .*Mistaken"),
        (Mistaken(reads=("lossess",)), "must be a tuple of losses, logits, histograms"),
        (Mistaken(reads="losses"), "must be a tuple of losses, logits, histograms, not 'losses'"),
    ],
)
def test_what_is_no_loss_rule_is_refused(rule, text) -> None:
    with pytest.raises(FedgftError, match=text) as raised:
        check_rule(rule)  # which `Objective` calls
    assert raised.value.field == "loss_rules"


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        (None, "terms of Mistaken must be LossTerms, not None"),
        (LossTerms(weights=np.ones((2, 2))), r"weights in the terms of Mistaken .* not \(2, 2\)"),
        (LossTerms(price=np.ones((1, 2, 3))), "price in the terms of Mistaken"),
    ],
)
def test_terms_of_a_wrong_shape_are_refused(terms, text) -> None:
    algorithm = Algorithm(objective=Objective(loss_rules=(Mistaken(terms),)))
    with pytest.raises(FedgftError, match=text):
        run(federation(), algorithm)
