"""An algorithm is four slots, and a method is a filling of one of them.

| slot       | what it may change                                    |
|------------|-------------------------------------------------------|
| objective  | row weights, and penalties on the loss; they add up   |
| correction | the client's gradient: mu (params - start) + c - c_k  |
| weighting  | the coefficients of the clients' updates              |
| server     | the step on the mean update                           |

FedAvg is the four defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fedgft.federated.cohort import Cohort, client_means
from fedgft.federated.control import Controlled, ControlReport, Loop, at_speed
from fedgft.federated.correction import Correction, Proximal
from fedgft.federated.penalty import Linearised
from fedgft.federated.server import Averaging, Server
from fedgft.federated.weighting import BySize, Weighting
from fedgft.metrics import Metric, Tally
from fedgft.types import Price, Weights

States = tuple[Any, ...]  # one a penalty


@runtime_checkable
class Pricing(Protocol):
    """A penalty whose prices the server sets, from sums over everybody's rows."""

    @property
    def metric(self) -> Metric: ...

    def init(self, loop: Loop) -> Any: ...

    def update(self, state: Any, cohort: Cohort, received: Tally) -> Any: ...

    def price(self, state: Any, *, run: np.ndarray, classes: int) -> Price | float: ...

    @property
    def pick(self) -> float: ...  # of the last rounds, those whose best model is kept; 0: none

    def excess(self, cohort: Cohort, received: Tally) -> np.ndarray: ...  # (r,), above a target


@dataclass(frozen=True)
class Objective:
    """Cross-entropy with row weights by (label, group), plus penalties.

    `penalties` are priced by the server from the sums of all clients, `local_penalties` by
    each client from its own sums, anew each epoch.
    """

    row_weights: Callable[[np.ndarray], Weights] | None = None  # counts (..., c, k) -> weights
    penalties: tuple[Pricing, ...] = ()
    local_penalties: tuple[Linearised, ...] = ()

    def init(self, loop: Loop | None = None) -> States:
        """What each penalty remembers before the first round."""
        return tuple(penalty.init(loop or Loop()) for penalty in self.penalties)

    def update(
        self, states: States, cohort: Cohort, received: Tally, *, speed: float = 1.0
    ) -> States:
        """What the server makes of the sums of the received model (ConstUpdate, Algorithm 1).

        speed: how far the coming round moves the model, relative to the first round.
        """
        pairs = zip(self.penalties, states, strict=True)
        return tuple(
            penalty.update(at_speed(state, speed), cohort, received) for penalty, state in pairs
        )

    def reports(self, states: States, federation: Tally) -> tuple[ControlReport, ...]:
        """Of each penalty that has a target, whether it was reached; `federation`: the final
        model's sums, (r, ...)."""
        pairs = zip(self.penalties, states, strict=True)
        return tuple(p.report(state, federation) for p, state in pairs if isinstance(p, Controlled))

    @property
    def damps(self) -> bool:
        """Whether the server's steps shorten towards the end."""
        return any(getattr(penalty, "damp", False) for penalty in self.penalties)

    def excess(self, cohort: Cohort, received: Tally) -> np.ndarray:
        """How far each run is above its targets, all of them together."""
        return np.sum([p.excess(cohort, received) for p in self.penalties], axis=0)

    @property
    def pick(self) -> float:
        """The share of the last rounds among whose models the final one is picked."""
        return max((penalty.pick for penalty in self.penalties), default=0.0)

    def price(self, states: States, *, runs: int, classes: int) -> Price | float:
        """The prices of each run, all penalties together; zero before the first message."""
        pairs = zip(self.penalties, states, strict=True)
        return sum(p.price(state, run=np.arange(runs), classes=classes) for p, state in pairs)

    def local_price(self, own: Tally, *, run: np.ndarray, classes: int) -> Price | float:
        """The prices each unit sets itself; none where it lacks a group or the event."""
        total: Price | float = 0.0
        for penalty in self.local_penalties:
            mean = client_means(penalty.metric, own)
            v = penalty.cotangent(mean, np.zeros_like(mean))
            total = total + penalty.price(v, run=run, classes=classes)
        return total


@dataclass(frozen=True)
class Algorithm:
    """A filling of the four slots; each has FedAvg's as its default."""

    objective: Objective = field(default_factory=Objective)
    correction: Correction = field(default_factory=Proximal)
    weighting: Weighting = field(default_factory=BySize)
    server: Server = field(default_factory=Averaging)
