"""Federated training in simple, slow PyTorch: the reference for the engine.

It uses one module per client, torch.optim, autograd through the loss, the paper's formulas and
Python lists. It shares one thing with the library: the order in which a client reads its rows.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedgft.engine.plan import derive_seeds, draw_batches
from paper_formulas import (
    Client,
    FairFed,
    Method,
    Parts,
    gap,
    mean_parts,
    measure,
    parts,
    row_weights,
    slope,
)


@dataclass(frozen=True)
class Plan:
    rates: tuple[float, ...] = (0.05, 0.05, 0.05)  # the learning rate of each round
    epochs: int = 1
    batch_size: int = 8
    steps: int = 10**9
    optimizer: Callable = torch.optim.Adam
    state: str = "reset"
    fixed: bool = False
    starts: tuple[nn.Module, ...] | None = None  # of each client in round 1
    cohorts: tuple[list[tuple[int, float]], ...] | None = None  # clients and their weights


FORGETFUL = ("reset-first", "shared")


class ResetFirst:
    """Adam that can reset its first moment and its step count, and keeps the second moment."""

    def __init__(self, parameters, lr: float, **options) -> None:
        self.parameters = list(parameters)
        self.param_groups = [{"lr": lr}]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.v_steps = 0
        self.clear()

    def clear(self) -> None:
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.m_steps = 0

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.m_steps = self.m_steps + 1
        self.v_steps = self.v_steps + 1
        for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).add_(p.grad**2, alpha=0.001)
            first = m / (1 - 0.9**self.m_steps)
            second = v / (1 - 0.999**self.v_steps)
            p -= self.param_groups[0]["lr"] * first / (second.sqrt() + 1e-8)


class Worker:
    """A client with its rows, its module and its optimizer."""

    def __init__(self, client: Client, module: nn.Module, method: Method, plan: Plan, seed: int):
        self.client = client
        self.model = copy.deepcopy(module)
        self.method = method
        self.plan = plan
        self.seed = seed
        reweighs = method.name in ("lrw", "fairfed")
        self.weights = row_weights(client) if reweighs else torch.ones(len(client.y)).double()
        self.optimizer = self.new_optimizer()

    def new_optimizer(self):
        make = ResetFirst if self.plan.state in FORGETFUL else self.plan.optimizer
        return make(self.model.parameters(), lr=self.plan.rates[0])

    def train(self, t: int, start: nn.Module, constants: tuple[float, Parts] | None) -> nn.Module:
        """Train all epochs of round t from `start`, and return the trained module."""
        self.model.load_state_dict(start.state_dict())
        if self.plan.state == "reset":
            self.optimizer = self.new_optimizer()
        if self.plan.state in FORGETFUL:
            self.optimizer.clear()
        self.optimizer.param_groups[0]["lr"] = self.plan.rates[t]
        for epoch in range(self.plan.epochs):
            if self.method.name == "lft":
                own, _ = measure(self.model, self.client, self.method.metric)
                known = gap(own) is not None
                constants = (slope(gap(own), self.method.penalty), own) if known else None
            self.epoch(t, epoch, start, constants)
        return copy.deepcopy(self.model)

    def epoch(self, t: int, epoch: int, start: nn.Module, constants) -> None:
        mine = derive_seeds(self.seed, self.client.key)
        fresh = int(derive_seeds(mine, 1 + t, epoch))
        torch.manual_seed(fresh)
        order = int(mine) if self.plan.fixed else fresh
        rows = np.arange(len(self.client.y), dtype=np.int32)
        every = draw_batches(rows, seed=order, batch_size=self.plan.batch_size)
        for batch in every[: self.plan.steps]:
            self.optimizer.zero_grad()
            self.loss(torch.as_tensor(batch), start, constants).backward()
            self.optimizer.step()

    def loss(self, batch: Tensor, start: nn.Module, constants) -> Tensor:
        y = self.client.y[batch]
        a = self.client.a[batch]
        logits = self.model.train()(self.client.x[batch])
        loss = (self.weights[batch] * cross_entropy(logits, y, reduction="none")).mean()
        if constants is not None:  # lambda C F_k, with the constants' b and d
            c, at = constants
            here = parts(logits.softmax(-1)[:, 1], y, a, self.method.metric)
            loss = loss + self.method.strength * c * (here.a / at.b - here.c / at.d)
        if self.method.mu:
            pairs = zip(self.model.parameters(), start.parameters(), strict=True)
            loss = loss + self.method.mu / 2 * sum(((p - q.detach()) ** 2).sum() for p, q in pairs)
        return loss


def federate(
    clients: list[Client],
    module: nn.Module,
    method: Method = Method(),  # noqa: B008, frozen
    plan: Plan = Plan(),  # noqa: B008
    *,
    seed: int = 0,
) -> np.ndarray:
    """The global model after all rounds, flat: parameters, then floating-point buffers."""
    sizes = [len(c.y) for c in clients]
    model = copy.deepcopy(module)
    constants = None
    workers = [Worker(client, module, method, plan, seed) for client in clients]
    fairfed = FairFed(method, sizes)
    everybody = [(k, n / sum(sizes)) for k, n in enumerate(sizes)]
    for t in range(len(plan.rates)):
        cohort = plan.cohorts[t] if plan.cohorts else everybody
        who = [k for k, _ in cohort]
        weights = [w for _, w in cohort]
        own = plan.starts is not None and t == 0
        received = None if own else [measure(model, clients[k], method.metric) for k in who]
        if method.name == "fedgft" and received is not None:
            constants = const_update(received, weights, method, constants)
        trained = [workers[k].train(t, plan.starts[k] if own else model, constants) for k in who]
        if method.name == "fairfed":
            pairs = zip(trained, who, strict=True)
            after = [measure(m, clients[k], method.metric) for m, k in pairs]
            weights = fairfed.weights(cohort, received, after)
        model.load_state_dict(average(trained, weights))
        if plan.state == "shared":
            share([workers[k].optimizer for k in who], [w for _, w in cohort], workers)
    return flat(model)


def const_update(received: list, weights: list[float], method: Method, last):
    """C with the global b and d; the previous ones if a group has no row of the event."""
    total = mean_parts([p for p, _ in received], weights)
    return last if gap(total) is None else (slope(gap(total), method.penalty), total)


def average(models: list[nn.Module], weights: list[float]) -> dict[str, Tensor]:
    states = [m.state_dict() for m in models]
    return {
        name: sum(w * s[name] for w, s in zip(weights, states, strict=True))
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }


def share(optimizers: list[ResetFirst], weights: list[float], workers: list[Worker]) -> None:
    """Set the second moment and its step count of all workers to the means of the cohort."""
    lists = zip(*(o.v for o in optimizers), strict=True)
    mean = [sum(w * v for w, v in zip(weights, each, strict=True)) for each in lists]
    age = round(sum(w * o.v_steps for w, o in zip(weights, optimizers, strict=True)))
    for worker in workers:
        worker.optimizer.v = [v.clone() for v in mean]
        worker.optimizer.v_steps = age


def flat(model: nn.Module) -> np.ndarray:
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    return torch.cat([t.detach().flatten() for t in (*model.parameters(), *buffers)]).numpy()
