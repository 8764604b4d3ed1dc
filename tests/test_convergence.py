"""Gradients of the convergence experiment, compared with autograd and with enumeration."""

from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedgft.algorithms import fedgft
from fedgft.data.dataset import standardize
from fedgft.data.generated import synthetic
from fedgft.data.partition import partition
from fedgft.engine import Settings, simulate
from fedgft.metrics import CATALOG
from fedgft.optimizers import Optimizer
from fedgft.paper.convergence import MODES, RATES, Descent, Pooled, bounds, descend, summarize

LAM = 7.0


@pytest.fixture(scope="module")
def federation():
    return standardize(partition(synthetic(rows=300, features=3, seed=2), clients=4, seed=1))


def objective(pooled: Pooled, params: torch.Tensor) -> torch.Tensor:
    """Cross-entropy plus lam F^2, written out once more, for autograd."""
    x, y, a = (torch.as_tensor(v) for v in (pooled.x[:, :-1], pooled.y, pooled.a))
    d = x.shape[1]
    logits = x @ params[: 2 * d].reshape(2, d).T + params[2 * d :]
    score = logits.softmax(1)[:, 1]
    gap = score[a == 0].mean() - score[a == 1].mean()
    return cross_entropy(logits, y) + LAM * gap**2


def as_torch(gradient: np.ndarray) -> np.ndarray:
    """(w0, b0, w1, b1) in the order of nn.Linear: both rows of weights, then both biases."""
    low, high = np.split(gradient, 2)
    return np.concatenate((low[:-1], high[:-1], low[-1:], high[-1:]))


def test_value_and_gradient_are_those_of_autograd(federation):
    pooled = Pooled.of(federation)
    rng = np.random.default_rng(0)
    for _ in range(5):
        params = rng.normal(size=2 * pooled.x.shape[1])
        leaf = torch.tensor(params, requires_grad=True)
        value = objective(pooled, leaf)
        (expected,) = torch.autograd.grad(value, leaf)
        found = pooled.evaluate(params, lam=LAM, batch_size=8)
        assert found.value == pytest.approx(float(value.detach()), abs=1e-12)
        np.testing.assert_allclose(as_torch(found.gradient), expected.numpy(), atol=1e-12)


def test_one_round_of_the_engine_is_one_step_of_gradient_descent(federation):
    """theta - eta grad L: Theorem 5.1 at work, with all rows of all clients in one step."""
    models = []
    settings = Settings(
        schedule="constant",
        state="reset",
        rounds=3,
        batch_size=1000,
        steps=1,
        precision="fp64",
        optimizer=Optimizer("sgd"),
    )
    simulate(
        [federation],
        "logistic",
        fedgft(CATALOG["sp"], LAM, penalty="l2"),
        settings,
        seeds=[0],
        lr=0.1,
        on_model=lambda t, p: models.append(p[0].copy()),
    )
    pooled = Pooled.of(federation)
    for before, after in pairwise(models):
        gradient = as_torch(pooled.evaluate(before, lam=LAM, batch_size=8).gradient)
        np.testing.assert_allclose(after, before - 0.1 * gradient, atol=1e-10)


def test_the_noise_is_that_of_all_batches():
    """sigma^2 by listing every batch of two rows of every client."""
    made = standardize(
        partition(synthetic(rows=24, features=2, seed=0), clients=3, alpha=5, seed=0)
    )
    pooled = Pooled.of(made)
    lam = 2.0
    params = np.arange(2 * pooled.x.shape[1]) / 5
    found = pooled.evaluate(params, lam=lam, batch_size=2)
    each = []
    sizes = []
    for k in range(3):
        rows = np.flatnonzero(pooled.client == k)
        gradients = [_own(pooled, params, lam, list(batch)) for batch in combinations(rows, 2)]
        exact = _own(pooled, params, lam, rows.tolist())
        each.append(np.mean([((g - exact) ** 2).sum() for g in gradients]))
        sizes.append(len(rows))
    assert found.noise == pytest.approx(max(each), rel=1e-9)
    weights = np.array(sizes) / sum(sizes)
    assert found.mean_noise == pytest.approx(weights**2 @ np.array(each), rel=1e-9)


def _own(pooled: Pooled, params: np.ndarray, lam: float, rows: list[int]) -> np.ndarray:
    """grad H_k on these rows by autograd: the server's constants come from all rows."""
    x, y, a = (torch.as_tensor(v) for v in (pooled.x[:, :-1], pooled.y, pooled.a))
    leaf = torch.tensor(params, requires_grad=True)
    d = x.shape[1]
    logits = x @ leaf[: 2 * d].reshape(2, d).T + leaf[2 * d :]
    score = logits.softmax(1)[:, 1]
    constant = 2 * (score[a == 0].mean() - score[a == 1].mean()).detach()
    share = torch.where(a == 0, 1 / (a == 0).double().mean(), -1 / (a == 1).double().mean())
    loss = cross_entropy(logits[rows], y[rows]) + lam * constant * (share * score)[rows].mean()
    return torch.autograd.grad(loss, leaf)[0].numpy()


QUICK = Descent(clients=4, lam=2.0, rate=0.3, rounds=100, points=15)


@pytest.mark.parametrize(("mode", "rule"), [*product(MODES, QUICK.rules)])
def test_the_measured_gradient_stays_below_the_bound(mode, rule):
    data = synthetic(rows=2000, features=3, seed=0)
    path = descend(data, QUICK, mode, rule, seeds=range(4))
    assert path.smoothness * QUICK.rate <= 1
    so_far = np.minimum.accumulate(path.square)[:-1]
    assert (so_far <= bounds(QUICK, path)[path.rounds[1:] - 1]).all()
    rows = summarize(QUICK, path, seeds=4)
    assert [r["rounds"] for r in rows] == [10, 100]
    assert rows[1]["gradient"] < rows[0]["gradient"]
    assert (rows[1]["promised"] is None) == (RATES[mode, rule] is None)


def test_a_step_beyond_the_smoothness_breaks_the_bound():
    """The check can fail: with ten times the step the proof allows, it does."""
    spec = Descent(clients=4, lam=50.0, rate=3.0, rounds=100, points=15)
    path = descend(
        synthetic(rows=2000, features=3, seed=0), spec, "full", "constant", seeds=range(4)
    )
    assert path.smoothness * spec.rate > 1
    assert summarize(spec, path, seeds=4)[-1]["gradient"] > bounds(spec, path)[-1]
