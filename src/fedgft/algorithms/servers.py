"""The server slot: the server's step from the mean update. Each step takes and returns a state.

Arrays have the axes (run, parameter) and are NumPy or torch arrays, depending on the executor.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from fedgft.errors import FedgftError
from fedgft.validation import check_choice, check_number


@runtime_checkable
class Server(Protocol):
    """`init` returns a state, `step` the new parameters and the next state.

    `inertia`: whether parameters keep moving after the clients' updates have become zero. A server
    whose result is not the last model has a method `result`, which returns it from the state.
    """

    @property
    def inertia(self) -> bool: ...

    def init(self, params: Any) -> Any: ...

    def step(self, state: Any, params: Any, update: Any) -> tuple[Any, Any]: ...


@dataclass(frozen=True)
class Averaging:
    """params + update: with coefficients that sum to one, the mean of the clients' models."""

    inertia: bool = False

    def init(self, params: Any) -> None:
        return None

    def step(self, state: None, params: Any, update: Any) -> tuple[Any, None]:
        return params + update, None


@dataclass(frozen=True)
class IterateAverage:
    """The mean of the models of all rounds is the result; clients train from the last one.

    Parameters
    ----------
    inner
        The step from one round to the next.
    """

    inner: Server = Averaging()

    @property
    def inertia(self) -> bool:
        return self.inner.inertia

    def init(self, params: Any) -> tuple[Any, Any, int]:
        """Return the state of the inner server, the sum of the models, and their number."""
        return self.inner.init(params), 0 * params, 0

    def step(self, state: tuple[Any, Any, int], params: Any, update: Any) -> tuple[Any, Any]:
        """Return the parameters after the step, and the next state."""
        inner, total, count = state
        params, inner = self.inner.step(inner, params, update)
        return params, (inner, total + params, count + 1)

    def result(self, state: tuple[Any, Any, int]) -> Any:
        """Return the mean of the models."""
        _, total, count = state
        return total / count


@dataclass(frozen=True)
class ServerMomentum:
    """FedAvgM (Hsu et al., 2019): m <- momentum m + update, params + lr m."""

    lr: float = 0.3
    momentum: float = 0.9
    inertia: bool = True

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        _check_decay("momentum", self.momentum)

    def init(self, params: Any) -> Any:
        return 0 * params

    def step(self, state: Any, params: Any, update: Any) -> tuple[Any, Any]:
        moved = self.momentum * state + update
        return params + self.lr * moved, moved


@dataclass(frozen=True)
class Adaptive:
    """FedAdam, FedYogi, FedAdagrad (Reddi et al., 2021): params + lr m / (sqrt(v) + tau).

    m and v are running means of the update and its square, without bias correction.

    Parameters
    ----------
    rule
        How v follows the square of the update.
    lr
        Learning rate of the server.
    first, second
        Decay of m and of v.
    tau
        Keeps the step finite.
    convention
        "paper": v starts at tau^2. "flower": v starts at zero, and Adam's rate is corrected for
        bias as if there had been a round before.
    inertia
        As in `Server`.
    """

    rule: Literal["adam", "yogi", "adagrad"] = "adam"
    lr: float = 0.03
    first: float = 0.9
    second: float = 0.99
    tau: float = 1e-3
    convention: Literal["paper", "flower"] = "paper"
    inertia: bool = True

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        check_choice("rule", self.rule, ("adam", "yogi", "adagrad"))
        check_choice("convention", self.convention, ("paper", "flower"))
        _check_decay("first", self.first)
        _check_decay("second", self.second)
        if check_number("tau", self.tau) <= 0:
            raise FedgftError(f"`tau` must be a positive number, not {self.tau:g}")

    def init(self, params: Any) -> tuple[Any, Any, int]:
        """Return m, v and the number of steps."""
        least = self.tau if self.convention == "paper" else 0.0
        return 0 * params, 0 * params + least**2, 1

    def step(self, state: tuple[Any, Any, int], params: Any, update: Any) -> tuple[Any, Any]:
        """Return the parameters after the step, and the next m, v and number of steps."""
        m, v, t = state
        square = update * update
        rest = 1 - self.second
        m = self.first * m + (1 - self.first) * update
        if self.rule == "adam":
            v = self.second * v + rest * square
        elif self.rule == "yogi":  # v moves toward the square by a fixed share of the square
            sign = 1.0 * (v > square) - 1.0 * (v < square)
            v = v - rest * square * sign
        else:
            v = v + square
        return params + self._rate(t + 1) * m / (v**0.5 + self.tau), (m, v, t + 1)

    def _rate(self, t: int) -> float:
        if self.convention == "paper" or self.rule != "adam":
            return self.lr
        return self.lr * (1 - self.second**t) ** 0.5 / (1 - self.first**t)


def _check_lr(lr: float) -> None:
    if not 0 < check_number("lr", lr, finite=False) < float("inf"):
        raise FedgftError(f"`server_lr` must be a positive number, got {lr:g}")


def _check_decay(name: str, value: float) -> None:
    if not 0 <= check_number(name, value) < 1:
        raise FedgftError(f"must be at least 0 and below 1, not {value:g}", field=name)
