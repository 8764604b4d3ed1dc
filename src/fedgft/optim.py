"""Local optimisers on flat blocks of parameters, one row a model, in place.

They follow torch.optim to the letter (bias correction, epsilon outside the root, L2 in the
gradient for sgd, momentum and adam, decoupled for adamw), on arrays of numpy or torch alike.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedgft.arguments import real_number
from fedgft.errors import FedgftError
from fedgft.types import Block

Rule = Literal["sgd", "momentum", "adam", "adamw"]
RULES: tuple[Rule, ...] = ("sgd", "momentum", "adam", "adamw")


@dataclass(frozen=True)
class Optimizer:
    """`first` and `second` are the decay rates of the two moments; momentum uses the first."""

    rule: Rule = "adam"
    weight_decay: float = 0.0
    first: float = 0.9
    second: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str) or self.rule not in RULES:
            raise FedgftError(
                f"--optimizer {self.rule!r} is not known; choose from {', '.join(RULES)}"
            )
        for name in ("first", "second"):
            if not 0 <= real_number(name, getattr(self, name)) < 1:
                raise FedgftError(f"{name} must be at least 0 and below 1")
        if real_number("epsilon", self.epsilon) <= 0:
            raise FedgftError(f"epsilon must be a positive number, not {self.epsilon}")
        if not 0 <= real_number("weight_decay", self.weight_decay, finite=False) < float("inf"):
            raise FedgftError(f"--weight-decay must be a number >= 0, got {self.weight_decay}")

    @property
    def adaptive(self) -> bool:
        return self.rule in ("adam", "adamw")

    @property
    def momentum(self) -> float:
        return 0.0 if self.rule == "sgd" else self.first

    @property
    def decoupled(self) -> float:
        """Weight decay beside the gradient; for plain SGD it is the same thing as L2 inside it."""
        return self.weight_decay if self.rule in ("sgd", "adamw") else 0.0


@dataclass
class Moments:
    """m, v and how many steps stand behind each: (u, p), (u, p), (u, 2)."""

    m: Any
    v: Any
    steps: np.ndarray

    def forget(self, state: str) -> None:
        """Start of a round. `keep`: nothing is lost; `reset`: all; otherwise only m."""
        if state != "keep":
            self.m[:] = 0
            self.steps[:, 0] = 0
        if state == "reset":
            self.v[:] = 0
            self.steps[:, 1] = 0


def step(optimizer: Optimizer, params: Block, grad: Block, *, moments: Moments, lr: Any) -> None:
    """One step on each row of `params`; `lr` has one column. Everything is changed in place."""
    moments.steps += 1
    if optimizer.weight_decay and not optimizer.decoupled:
        grad = grad + optimizer.weight_decay * params
    if optimizer.decoupled:
        params *= 1 - lr * optimizer.decoupled
    m, v = moments.m, moments.v
    m *= optimizer.momentum
    if not optimizer.adaptive:
        m += grad
        params -= lr * m
        return
    m += (1 - optimizer.first) * grad
    v *= optimizer.second
    v += (1 - optimizer.second) * (grad * grad)
    rate = _like(1 / (1 - optimizer.first ** moments.steps[:, :1]), params) * lr
    root = _like(1 / np.sqrt(1 - optimizer.second ** moments.steps[:, 1:]), params)
    params -= rate * m / (v**0.5 * root + optimizer.epsilon)


def rates(optimizer: Optimizer, lr: float, ages: np.ndarray, steps: int) -> np.ndarray:
    """The rate of each of the next steps for `replayable_step`, which knows the age of v alone:
    where m is younger (`ages`: steps behind m and v), its bias is corrected here."""
    ahead = np.arange(1, steps + 1)
    if not optimizer.adaptive:
        return np.full(steps, lr)
    young, old = (1 - optimizer.first ** (age + ahead) for age in ages)
    return lr * old / young


def replayable_step(
    optimizer: Optimizer, params: Any, grad: Any, *, moments: tuple[Any, Any], count: Any,
    rate: Any, lr: Any,
) -> None:  # fmt: skip
    """One step of one model in torch, in place, one pass over memory; all that changes from step to
    step is in tensors, so that a graph can replay it. `count`: steps behind v, this one included.
    """
    import torch

    m, v = moments
    if optimizer.weight_decay and not optimizer.decoupled:
        grad.add_(params, alpha=optimizer.weight_decay)
    if optimizer.decoupled:
        params.mul_(1 - lr * optimizer.decoupled)
    if not optimizer.adaptive:
        m.mul_(optimizer.momentum).add_(grad)
        params.sub_(rate * m)
        return
    torch._fused_adam_(
        [params], [grad], [m], [v], [], [count], amsgrad=False, lr=rate, beta1=optimizer.first,
        beta2=optimizer.second, weight_decay=0.0, eps=optimizer.epsilon, maximize=False,
    )  # fmt: skip


def reach(optimizer: Optimizer, steps: np.ndarray, pull: np.ndarray | float = 0.0) -> np.ndarray:
    """How far `steps` steps go along a gradient that stays the same, in units of lr (FedNova's
    norm of a), from rest: with momentum later steps go further, with a pull back (lr mu) less far.
    Adaptive steps are all of one size, so there it is their number."""
    if optimizer.adaptive:
        return 1.0 * steps
    at, speed = np.zeros(steps.shape), np.zeros(steps.shape)
    for step in range(int(steps.max(initial=0))):
        speed = optimizer.momentum * speed + 1.0 - pull * at
        at = np.where(step < steps, at + speed, at)
    return at


def _like(column: np.ndarray, params: Block) -> Any:
    if isinstance(params, np.ndarray):
        return column.astype(params.dtype)
    return params.new_tensor(column)
