"""An algorithm is four slots, and a method is a filling of one of them.

| slot       | what it may change                                    |
|------------|-------------------------------------------------------|
| objective  | row weights, and penalties on the loss; they add up   |
| correction | the client's gradient: mu (params - start)            |
| weighting  | the coefficients of the clients' updates              |
| server     | the step on the mean update                           |

FedAvg is the four defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from fedgft.federated.cohort import Cohort, client_means
from fedgft.federated.penalty import Linearised
from fedgft.metrics import Tally
from fedgft.types import FedgftError, Price, Statistics, Weights

Cotangents = tuple[Statistics | None, ...]


@dataclass(frozen=True)
class Objective:
    """Cross-entropy with row weights by (label, group), plus penalties.

    `penalties` are priced by the server from the sums of all clients, `local_penalties` by
    each client from its own sums, anew each epoch.
    """

    row_weights: Callable[[np.ndarray], Weights] | None = None  # counts (..., c, k) -> weights
    penalties: tuple[Linearised, ...] = ()
    local_penalties: tuple[Linearised, ...] = ()

    def init(self) -> Cotangents:
        return (None,) * len(self.penalties)

    def message(self, last: Cotangents, cohort: Cohort, received: Tally) -> Cotangents:
        """What the server sends: v at the cohort's mean statistics (ConstUpdate, Algorithm 1)."""
        fresh = []
        for penalty, v in zip(self.penalties, last, strict=True):
            mean = cohort.mean(client_means(penalty.metric, received))
            fresh.append(penalty.cotangent(mean, np.zeros_like(mean) if v is None else v))
        return tuple(fresh)

    def price(self, cotangents: Cotangents, *, runs: int, classes: int) -> Price | float:
        """The prices of each run, all penalties together; zero before the first message."""
        pairs = zip(self.penalties, cotangents, strict=True)
        every = np.arange(runs)
        return sum(p.price(v, run=every, classes=classes) for p, v in pairs if v is not None)

    def local_price(self, own: Tally, *, run: np.ndarray, classes: int) -> Price | float:
        """The prices each unit sets itself; none where it lacks a group or the event."""
        total: Price | float = 0.0
        for penalty in self.local_penalties:
            mean = client_means(penalty.metric, own)
            v = penalty.cotangent(mean, np.zeros_like(mean))
            total = total + penalty.price(v, run=run, classes=classes)
        return total


@dataclass(frozen=True)
class Proximal:
    """FedProx (Li et al., 2020): mu (params - start) is added to the client's gradient."""

    mu: float = 0.0

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise FedgftError(f"mu must not be negative, got {self.mu}")


@runtime_checkable
class Weighting(Protocol):
    """Coefficients of the updates; what it wants to see of the clients it says in `sees`."""

    @property
    def sees(self) -> Literal["nothing", "received", "trained"]: ...

    def init(self, sizes: np.ndarray) -> Any: ...

    def coefficients(
        self, state: Any, cohort: Cohort, *, received: Tally | None, trained: Tally | None
    ) -> tuple[np.ndarray, Any]: ...


@dataclass(frozen=True)
class BySize:
    """FedAvg (McMahan et al., 2017): n_k over the cohort's rows, or what the sampling rule says."""

    sees: Literal["nothing"] = "nothing"

    def init(self, sizes: np.ndarray) -> None:
        return None

    def coefficients(
        self, state: None, cohort: Cohort, *, received: Tally | None, trained: Tally | None
    ) -> tuple[np.ndarray, None]:
        return cohort.weight, None


@runtime_checkable
class Server(Protocol):
    """The step on the mean update: state goes in and comes out."""

    def init(self, params: Any) -> Any: ...

    def step(self, state: Any, params: Any, update: Any) -> tuple[Any, Any]: ...


@dataclass(frozen=True)
class Averaging:
    """params + update: with coefficients that sum to one, the mean of the clients' models."""

    def init(self, params: Any) -> None:
        return None

    def step(self, state: None, params: Any, update: Any) -> tuple[Any, None]:
        return params + update, None


@dataclass(frozen=True)
class Algorithm:
    objective: Objective = field(default_factory=Objective)
    correction: Proximal = field(default_factory=Proximal)
    weighting: Weighting = field(default_factory=BySize)
    server: Server = field(default_factory=Averaging)
