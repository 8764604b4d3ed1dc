"""Local optimizers on blocks of parameters, one row per model, in place.

They follow torch.optim exactly (bias correction, epsilon outside the root, L2 in the gradient for
sgd, momentum and adam, decoupled for adamw), on NumPy and torch arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float

from fedgft.errors import FedgftError, import_extra
from fedgft.validation import check_choice, check_number

Block = Float[Any, "u p"]  # one flat parameter vector per unit (one client of one run)

OptimizerRule = Literal["sgd", "momentum", "adam", "adamw"]
RULES: tuple[OptimizerRule, ...] = get_args(OptimizerRule)


@dataclass(frozen=True)
class Optimizer:
    """A local optimizer.

    Parameters
    ----------
    rule
        "sgd", "momentum", "adam" or "adamw".
    weight_decay
        >= 0; L2 in the gradient for momentum and adam, decoupled for adamw (for sgd both are the
        same).
    first, second
        Decay rates of the two moments, in [0, 1); momentum uses the first.
    epsilon
        Added to the root of the second moment.
    """

    rule: OptimizerRule = "adam"
    weight_decay: float = 0.0
    first: float = 0.9
    second: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_choice("optimizer", self.rule, RULES)
        for name in ("first", "second"):
            if not 0 <= check_number(name, getattr(self, name)) < 1:
                raise FedgftError("must be at least 0 and below 1", field=name)
        if check_number("epsilon", self.epsilon) <= 0:
            raise FedgftError(f"`epsilon` must be a positive number, not {self.epsilon}")
        if not 0 <= check_number("weight_decay", self.weight_decay, finite=False) < float("inf"):
            raise FedgftError(f"`weight_decay` must be a number >= 0, got {self.weight_decay}")

    @property
    def adaptive(self) -> bool:
        """Whether steps are divided by the root of the second moment."""
        return self.rule in ("adam", "adamw")

    @property
    def momentum(self) -> float:
        """Decay rate of the first moment; 0 for sgd."""
        return 0.0 if self.rule == "sgd" else self.first

    @property
    def decoupled(self) -> float:
        """Weight decay outside the gradient."""
        return self.weight_decay if self.rule in ("sgd", "adamw") else 0.0


@dataclass
class Moments:
    """The moments m and v (u, p) of each unit, and the number of steps in each moment, (u, 2)."""

    m: Any
    v: Any
    steps: np.ndarray

    @classmethod
    def zeros(cls, make: Callable[[int, int], Any], units: int, width: int) -> "Moments":
        """Moments before the first step; `make` returns an array (units, width) of zeros."""
        return cls(make(units, width), make(units, width), np.zeros((units, 2), np.int64))

    def clear(self, state: str) -> None:
        """Clear the moments before a round, as `Settings.state` says.

        "keep" clears nothing, "reset" clears m and v, other states clear m only.
        """
        if state != "keep":
            self.m[:] = 0
            self.steps[:, 0] = 0
        if state == "reset":
            self.v[:] = 0
            self.steps[:, 1] = 0

    def __getitem__(self, at: Any) -> "Moments":
        return Moments(self.m[at], self.v[at], self.steps[at])

    def __setitem__(self, at: Any, other: "Moments") -> None:
        self.m[at] = other.m
        self.v[at] = other.v
        self.steps[at] = other.steps


def step(optimizer: Optimizer, params: Block, grad: Block, *, moments: Moments, lr: Any) -> None:
    """Apply one step to each row of `params`, in place; `lr` has one column."""
    moments.steps += 1
    if optimizer.weight_decay and not optimizer.decoupled:
        grad = grad + optimizer.weight_decay * params
    if optimizer.decoupled:
        params *= 1 - lr * optimizer.decoupled
    m = moments.m
    v = moments.v
    m *= optimizer.momentum
    if not optimizer.adaptive:
        m += grad
        params -= lr * m
        return
    m += (1 - optimizer.first) * grad
    v *= optimizer.second
    v += (1 - optimizer.second) * (grad * grad)
    rate = array_like(1 / (1 - optimizer.first ** moments.steps[:, :1]), params) * lr
    root = array_like(1 / np.sqrt(1 - optimizer.second ** moments.steps[:, 1:]), params)
    params -= rate * m / (v**0.5 * root + optimizer.epsilon)


def step_rates(optimizer: Optimizer, lr: float, ages: np.ndarray, steps: int) -> np.ndarray:
    """The rates of the next steps for `graph_step`, (steps,).

    `graph_step` corrects the bias of m with the number of steps behind v. If m has fewer steps, the
    rate contains the rest of the correction. `ages` holds the numbers of steps behind m and v.
    """
    ahead = np.arange(1, steps + 1)
    if not optimizer.adaptive:
        return np.full(steps, lr)
    young, old = (1 - optimizer.first ** (age + ahead) for age in ages)
    return lr * old / young


def graph_step(
    optimizer: Optimizer, params: Any, grad: Any, *, m: Any, v: Any, count: Any, rate: Any, lr: Any
) -> None:
    """Apply one step to one model in torch, in place, in one pass over memory.

    Everything that changes between steps is a tensor, so that a CUDA graph can replay it. `count`
    is the number of steps behind v, including this one; `rate` is one of `step_rates`.
    """
    if optimizer.weight_decay and not optimizer.decoupled:
        grad.add_(params, alpha=optimizer.weight_decay)
    if optimizer.decoupled:
        params.mul_(1 - lr * optimizer.decoupled)
    if not optimizer.adaptive:
        m.mul_(optimizer.momentum).add_(grad)
        params.sub_(rate * m)
        return
    rates = {"lr": rate, "beta1": optimizer.first, "beta2": optimizer.second}
    unused = {"weight_decay": 0.0, "amsgrad": False, "maximize": False}
    tensors = ([params], [grad], [m], [v], [], [count])
    import_extra("torch")._fused_adam_(*tensors, **rates, eps=optimizer.epsilon, **unused)


def path_length(
    optimizer: Optimizer, steps: np.ndarray, pull: np.ndarray | float = 0.0
) -> np.ndarray:
    """Return the distance of `steps` steps along a constant gradient, in units of lr.

    This is FedNova's norm of a. With momentum, later steps are longer; with a proximal term
    (`pull` = lr mu), they are shorter. Adaptive steps all have the same length, so the result is
    their number.
    """
    if optimizer.adaptive:
        return 1.0 * steps
    at = np.zeros(steps.shape)
    speed = np.zeros(steps.shape)
    for step in range(int(steps.max(initial=0))):
        speed = optimizer.momentum * speed + 1.0 - pull * at
        at = np.where(step < steps, at + speed, at)
    return at


def array_like(values: np.ndarray, block: Block) -> Any:
    """`values` as an array of the same library, type and device as `block`."""
    if isinstance(block, np.ndarray):
        return values.astype(block.dtype)
    return block.new_tensor(values)
