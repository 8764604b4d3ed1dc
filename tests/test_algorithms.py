"""Laws of every algorithm, and a comparison of every method with the plain loop."""

from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
import torch

from fedgft.algorithms import METHODS as METHOD_TABLE
from fedgft.algorithms import (
    Algorithm,
    LinearizedPenalty,
    Objective,
    Proximal,
    fairfed,
    fedavg,
    fedgft,
    fedgft_control,
    get_method,
    lft,
    lrw,
    with_base,
)
from fedgft.algorithms.registry import methods_by_setting
from fedgft.cli.options import METHODS_BY_OPTION, ComparedName, MethodName
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, Metric, get_metric
from fedgft.study import get_protocol
from paper_formulas import Method
from reference_training import federate
from small_federation import (
    CLIENTS,
    EXECUTORS,
    SGD,
    clients,
    federation,
    module,
    reordered,
    run,
    several,
)

PLAIN = {"rtol": 0, "atol": 1e-10}  # Adam divides by the root of a gradient that may be tiny
EXACT = {"rtol": 0, "atol": 1e-12}  # sums in another order

every_executor = pytest.mark.parametrize("executor", EXECUTORS)

METHODS = [
    Method("fedavg"),
    Method("lrw"),
    *(Method("lft", metric, 3.0) for metric in ("sp", "eop")),
    *(Method("fairfed", "sp", 0.7, rule=rule) for rule in ("subtract", "authors", "exp")),
    Method("fairfed", "eop", 0.7),
    *(Method("fedgft", "sp", 5.0, penalty=penalty) for penalty in ("l1", "l2", "half")),
    Method("fedgft", "eop", 5.0, penalty="l2"),
]
names = [f"{m.name}-{m.metric}-{m.penalty}-{m.rule}" for m in METHODS]


def algorithm(method: Method) -> Algorithm:
    metric = get_metric(method.metric)
    made = get_method(
        method.name, metric, method.strength, penalty=method.penalty, rule=method.rule
    )
    return replace(made, correction=Proximal(method.mu))


@pytest.mark.slow
@every_executor
@pytest.mark.parametrize("method", METHODS, ids=names)
def test_equals_the_plain_loop(method: Method, executor: str) -> None:
    made = federation()
    expected = federate(clients(made), module(made), method)
    found = run(made, algorithm(method), executor=executor)
    np.testing.assert_allclose(found.params[0], expected, **PLAIN)


@pytest.mark.slow
@every_executor
@pytest.mark.parametrize("method", [Method("fedavg", mu=0.4), Method("fedgft", "sp", 5.0, mu=0.4)])
def test_fedprox_equals_the_plain_loop(method: Method, executor: str) -> None:
    made = federation()
    expected = federate(clients(made), module(made), method)
    found = run(made, algorithm(method), executor=executor)
    np.testing.assert_allclose(found.params[0], expected, **PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=names)
def test_methods_differ(method: Method) -> None:
    """So that the tests above cannot pass by computing FedAvg throughout."""
    made = federation()
    others = [m for m in METHODS if m != method]
    mine = run(made, algorithm(method)).params
    assert all(np.abs(run(made, algorithm(m)).params - mine).max() > 1e-4 for m in others)


@pytest.mark.slow
@every_executor
@pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG)
def test_lam_zero_is_bit_equal_to_fedavg(metric, executor: str) -> None:
    made = federation()
    expected = run(made, fedavg(), executor=executor).params
    for method in (fedgft(metric, 0.0), lft(metric, 0.0)):
        np.testing.assert_array_equal(run(made, method, executor=executor).params, expected)


@every_executor
def test_mu_zero_is_bit_equal_to_fedavg(executor: str) -> None:
    made = federation()
    prox = run(made, Algorithm(correction=Proximal(0.0)), executor=executor)
    np.testing.assert_array_equal(prox.params, run(made, fedavg(), executor=executor).params)


def test_beta_zero_is_local_reweighing() -> None:
    made = federation()
    expected = run(made, lrw()).params
    for rule in ("subtract", "exp"):
        found = run(made, fairfed(CATALOG["sp"], 0.0, rule=rule)).params
        np.testing.assert_allclose(found, expected, **EXACT)


def rates(name: str, probs: torch.Tensor, y: torch.Tensor, a: torch.Tensor) -> list:
    """[condition][group], by the definition of each metric on pooled rows."""
    groups = range(int(a.max()) + 1)
    every = range(probs.shape[1])
    classes = every[1:] if len(every) == 2 else every  # the positive one, or each against the rest

    def mean(values: torch.Tensor, where: torch.Tensor) -> list[torch.Tensor]:
        return [values[where & (a == g)].mean() for g in groups]

    everywhere = torch.ones_like(y, dtype=torch.bool)
    right = probs.gather(1, y[:, None])[:, 0]
    ratio = [
        [(probs[:, c] * (y == c))[a == g].sum() / probs[a == g, c].sum() for g in groups]
        for c in classes
    ]
    return {
        "sp": [mean(probs[:, c], everywhere) for c in classes],
        "eop": [mean(probs[:, c], y == c) for c in classes],
        "eo": [mean(probs[:, c], y == label) for label in every for c in classes],
        "predictive-parity": ratio,
        "acc": [mean(right, everywhere)],
        "fpr": [mean(probs[:, c], y != c) for c in classes],
    }[name]


def central_step(made, model: torch.nn.Module, name: str, *, lam: float, lr: float) -> np.ndarray:
    """One gradient step on L + lam F^2 over everybody's rows at once."""
    x, y, a = (torch.cat(parts) for parts in list(zip(*clients(made), strict=True))[:3])
    logits = model(x)
    table = torch.stack([torch.stack(row) for row in rates(name, logits.softmax(-1), y, a)])
    gap = (table.amax(1) - table.amin(1)).amax()
    loss = torch.nn.functional.cross_entropy(logits, y) + lam * gap**2
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    stepped = [p.detach() - lr * g for p, g in zip(model.parameters(), gradients, strict=True)]
    return torch.cat([t.flatten() for t in stepped]).numpy()


@pytest.mark.slow
@every_executor
@pytest.mark.parametrize("lam", [0.0, 4.0])
@pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG)
def test_one_full_batch_step_is_the_central_step(metric, lam: float, executor: str) -> None:
    """Theorem 5.1, for every metric of the catalog, proper or not."""
    made = several()
    method = fedgft(metric, lam, penalty="l2")
    found = run(made, method, executor=executor, rounds=1, batch_size=64, optimizer=SGD)
    expected = central_step(made, module(made), metric.name, lam=lam, lr=0.05)
    np.testing.assert_allclose(found.params[0], expected, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "classes"), [(3, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG)
def test_central_step_with_more_groups_and_classes(metric, groups: int, classes: int) -> None:
    made = several(groups, classes)
    method = fedgft(metric, 4.0, penalty="l2")
    found = run(made, method, model="mlp", rounds=1, batch_size=64, optimizer=SGD)
    expected = central_step(made, module(made, "mlp"), metric.name, lam=4.0, lr=0.05)
    np.testing.assert_allclose(found.params[0], expected, **EXACT)


@pytest.mark.slow
@every_executor
@pytest.mark.parametrize("method", METHODS, ids=names)
def test_client_order_does_not_matter(method: Method, executor: str) -> None:
    made = federation()
    turned = reordered(made, [3, 0, 5, 4, 1, 2])
    found = run(turned, algorithm(method), executor=executor)
    expected = run(made, algorithm(method), executor=executor)
    np.testing.assert_allclose(found.params, expected.params, **EXACT)


@pytest.mark.slow
@every_executor
@pytest.mark.parametrize("method", METHODS, ids=names)
def test_a_client_without_rows_does_not_matter(method: Method, executor: str) -> None:
    made = federation()
    nobody = np.insert(made.offsets, [0, 3, 6], made.offsets[[0, 3, 6]])
    keys = np.insert(made.keys, [0, 3, 6], np.array([70, 71, 72], np.uint64))
    more = replace(made, offsets=nobody, keys=keys)
    assert sorted(more.sizes) == [0, 0, 0, *sorted(made.sizes)]
    found = run(more, algorithm(method), executor=executor)
    expected = run(made, algorithm(method), executor=executor)
    np.testing.assert_allclose(found.params, expected.params, **EXACT)


@pytest.mark.parametrize("make", [lft, fairfed, fedgft, fedgft_control])
def test_a_metric_may_be_named(make) -> None:
    assert make("sp", 0.5) == make(CATALOG["sp"], 0.5)
    with pytest.raises(FedgftError, match="'fairness' is not known"):
        make("fairness", 0.5)


def test_methods_by_name() -> None:
    with pytest.raises(FedgftError, match=r"fedavgg.*fedavg, lrw, lft, fairfed, fedgft"):
        get_method("fedavgg", CATALOG["sp"], 1.0)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(FedgftError, match="lam must be"):
            fedgft(CATALOG["sp"], wrong)
    with pytest.raises(FedgftError, match="beta must be"):
        fairfed(CATALOG["sp"], -0.5)
    with pytest.raises(FedgftError, match=r"penalty 'l3'.*l1, l2, half"):
        fedgft(CATALOG["sp"], 1.0, penalty="l3")
    with pytest.raises(FedgftError, match="mu"):
        Proximal(-1.0)


def test_data_have_every_kind_of_client() -> None:
    made = federation()
    assert made.num_clients == len(CLIENTS) and 1 in made.sizes
    groups = [set(made.dataset.groups[made.client(k)]) for k in range(made.num_clients)]
    assert {0} in groups and {1} in groups and {-1, 0, 1} in groups
    assert not made.dataset.labels[made.client(3)].any()


@dataclass(frozen=True)
class OnlyPrices:
    """A penalty that has what `Pricing` asks for and nothing else."""

    inner: LinearizedPenalty
    metric: Metric = CATALOG["sp"]

    def init(self, runs):
        return self.inner.init(runs)

    def update(self, state, cohort, received):
        return self.inner.update(state, cohort, received)

    def price(self, state, *, run, classes):
        return self.inner.price(state, run=run, classes=classes)


def test_a_penalty_needs_no_more_than_prices() -> None:
    rule = LinearizedPenalty(CATALOG["sp"], 2.0)
    first, second = (
        run(federation(), Algorithm(objective=Objective(penalties=(penalty,))))
        for penalty in (rule, OnlyPrices(rule))
    )
    np.testing.assert_array_equal(first.params, second.params)


def test_a_strength_is_one_number_or_one_per_run() -> None:
    two = np.ones(2)
    methods = (fedgft("sp", two), lft("sp", two), fairfed("sp", two), fedgft_control("sp", 0 * two))
    for method in methods:
        for given in (method, with_base(method, "fednova")):
            with pytest.raises(FedgftError, match=r"or one per run \(1\)"):
                run(federation(), given)


def test_one_table_of_methods() -> None:
    """The command line's names and the settings of methods are those of the registry."""
    assert get_args(MethodName) == tuple(METHOD_TABLE)
    readers = methods_by_setting()
    assert readers["penalty"] == ("lft", "fedgft")
    assert {"lft", "fedgft", "fedfb"} <= set(readers["lam"])
    assert readers["beta"] == ("fairfed", "fade")
    asked = {name: set(users) for name, users in METHODS_BY_OPTION.items()}
    assert asked == {name: set(users) for name, users in readers.items()}
    assert set(METHOD_TABLE) < set(get_args(ComparedName))


def test_strengths_have_defaults_and_candidates() -> None:
    for name, method in METHOD_TABLE.items():
        made = get_method(name, CATALOG["sp"], method.default)
        assert isinstance(made, Algorithm)
        if method.grid:
            assert method.strength is not None and min(method.grid) >= 0
        assert method.aim in ("the metric", "losses of groups", "losses of clients")


def test_given_strengths_replace_the_candidates_of_a_method() -> None:
    heldout = get_protocol("heldout")
    for name, method in METHOD_TABLE.items():
        if method.strength is None:
            assert heldout.strength(name) == (0.0,)
            continue
        own = method.grid or getattr(heldout, method.strength)
        assert heldout.strength(name) == own
        given = replace(heldout, fixed=(method.strength,), **{method.strength: (0.125,)})
        assert given.strength(name) == (0.125,)
