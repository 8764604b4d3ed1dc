"""The penalty in a training loop of the user, and its table of prices."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedgft import Penalty
from fedgft.algorithms import SLOPES, LinearizedPenalty, fedgft
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, Metric, price
from small_federation import clients, federation, run, several

every_metric = pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG)
POWERS = {"l1": lambda gap: gap, "l2": lambda gap: gap**2, "half": lambda gap: gap**2 / 2}


def rows(made) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Everybody's rows: scores that depend on a leaf, labels, groups."""
    data = made.dataset
    pooled = made.rows
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(pooled), len(data.classes), dtype=torch.float64, generator=generator)
    return (
        logits.requires_grad_(),
        torch.tensor(data.labels[pooled]),
        torch.tensor(data.groups[pooled]),
    )


def send(penalty: Penalty, made, logits, y, a) -> float:
    """Each client's message from its own rows; the server adds them up."""
    cuts = zip(made.offsets, made.offsets[1:], strict=False)
    return penalty.update(sum(penalty.statistics(logits[i:j], y[i:j], a[i:j]) for i, j in cuts))


def gap(metric: Metric, logits, y, a) -> torch.Tensor:
    """F on pooled rows, differentiable."""
    known = a >= 0
    groups = torch.nn.functional.one_hot(a[known]).double()
    labels = torch.nn.functional.one_hot(y[known], logits.shape[1]).double()
    table = metric.statistics(logits[known].softmax(-1), labels, groups).sum(0)
    rates = table[0] / table[1]
    return (rates.amax(-1) - rates.amin(-1)).amax()


@pytest.mark.parametrize("power", POWERS)
@every_metric
def test_its_gradient_is_that_of_the_global_gap(metric: Metric, power: str) -> None:
    """lam J(F) over everybody's rows, although each call sees one client's (Theorem 5.1)."""
    assert POWERS.keys() == SLOPES.keys()
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty(metric, 3.0, penalty=power)
    assert send(penalty, made, logits, y, a) == pytest.approx(gap(metric, logits, y, a).item())
    (expected,) = torch.autograd.grad(3.0 * POWERS[power](gap(metric, logits, y, a)), logits)
    cuts = list(zip(made.offsets, made.offsets[1:], strict=False))
    whole = made.offsets[-1]
    parts = [penalty(logits[i:j], y[i:j], a[i:j]) * (j - i) / whole for i, j in cuts]
    (found,) = torch.autograd.grad(sum(parts), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@every_metric
def test_more_groups_and_classes(metric: Metric) -> None:
    made = several(groups=3, classes=3)
    logits, y, a = rows(made)
    penalty = Penalty(metric, 2.0, groups=3, penalty="l2")
    send(penalty, made, logits, y, a)
    (expected,) = torch.autograd.grad(2.0 * gap(metric, logits, y, a) ** 2, logits)
    (found,) = torch.autograd.grad(penalty(logits, y, a), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@every_metric
def test_the_simulator_minimizes_the_same(metric: Metric) -> None:
    """One full-batch step of the engine against the loop with one line more."""
    from small_federation import SGD, module

    made = several()
    found = run(made, fedgft(metric, 4.0), rounds=1, batch_size=64, optimizer=SGD)
    # both with their default J
    model = module(made)
    penalty = Penalty(metric, 4.0)
    held = clients(made)
    penalty.update(sum(penalty.statistics(model(c.x), c.y, c.a) for c in held))
    for c in held:
        logits = model(c.x)
        loss = cross_entropy(logits, c.y) + penalty(logits, c.y, c.a)
        (loss * len(c.y) / made.offsets[-1]).backward()
    stepped = torch.cat([(p - 0.05 * p.grad).flatten() for p in model.parameters()])
    np.testing.assert_allclose(found.params[0], stepped.detach().numpy(), rtol=0, atol=1e-12)


def test_a_metric_that_is_not_affine_works_here_only() -> None:
    """Squared scores: sums of scores cannot carry them, so the simulator says no."""
    squared = Metric(
        "sq",
        "squared",
        lambda p, y: p[:, 1:] ** 2,
        lambda p, y: 1 + 0 * y[:, :1],
        lambda classes: ("all",),
    )
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty(squared, 3.0, penalty="l2")
    send(penalty, made, logits, y, a)
    (expected,) = torch.autograd.grad(3.0 * gap(squared, logits, y, a) ** 2, logits)
    (found,) = torch.autograd.grad(penalty(logits, y, a), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    with pytest.raises(FedgftError, match="not affine"):
        run(made, fedgft(squared, 1.0))


def test_zero_before_the_first_update_and_without_lam() -> None:
    made = federation()
    logits, y, a = rows(made)
    fresh = Penalty("sp", 3.0)
    off = Penalty("sp", 0.0)
    send(off, made, logits, y, a)
    for penalty in (fresh, off):
        value = penalty(logits, y, a)
        assert value.item() == 0.0
        assert not torch.autograd.grad(value, logits)[0].any()


def test_rows_without_a_group_cost_nothing_and_messages_are_detached() -> None:
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty("eop", 3.0)
    send(penalty, made, logits, y, a)
    (found,) = torch.autograd.grad(penalty(logits, y, a), logits)
    assert (a == -1).any() and not found[a == -1].any() and not found[y == 0].any()
    message = penalty.statistics(logits, y, a)
    assert isinstance(message, np.ndarray) and message[0] == len(y) and message.shape == (5,)


def test_a_round_without_a_group_keeps_the_last_constants() -> None:
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty("sp", 3.0)
    only = a == 0
    assert np.isnan(penalty.update(penalty.statistics(logits[only], y[only], a[only])))
    assert penalty(logits, y, a).item() == 0.0
    send(penalty, made, logits, y, a)
    before = penalty(logits, y, a).item()
    penalty.update(penalty.statistics(logits[only], y[only], a[only]))
    assert penalty(logits, y, a).item() == before != 0.0


def test_float32_logits_stay_float32() -> None:
    made = federation()
    logits, y, a = rows(made)
    penalty = Penalty("sp", 3.0)
    send(penalty, made, logits, y, a)
    assert penalty(logits.float(), y, a).dtype == torch.float32


@every_metric
def test_price_is_the_derivative_of_the_statistics(metric: Metric) -> None:
    """lam <v, d statistics / d score> for a row of each label and group, by autograd."""
    v = np.random.default_rng(0).standard_normal((2, len(metric.conditions(2)), 2))
    table = price(metric, v, 2)
    for y in (0, 1):
        for a in (0, 1):
            probs = torch.tensor([[0.3, 0.7]], dtype=torch.float64, requires_grad=True)
            hot = torch.eye(2, dtype=torch.float64)
            one = metric.statistics(probs, hot[y][None], hot[a][None])[0]
            (slope,) = torch.autograd.grad((one * torch.tensor(v)).sum(), probs)
            np.testing.assert_allclose(table[y, a], slope[0].numpy(), atol=1e-12)
    assert not table[:, 2].any()
    per_run = LinearizedPenalty(metric, np.array([2.0, 0.0])).price(
        np.stack((v, v)), run=np.array([0, 1]), classes=2
    )
    np.testing.assert_allclose(per_run[0], 2 * table)
    assert not per_run[1].any()
