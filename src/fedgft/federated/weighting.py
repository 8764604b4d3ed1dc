"""The weighting slot: the coefficients of the clients' updates; they need not sum to one.

FairFed has a file of its own.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from fedgft.federated.cohort import Cohort
from fedgft.metrics import Tally

Sees = Literal["nothing", "received", "trained"]


@dataclass(frozen=True)
class Local:
    """What is known of the cohort's local work: sums of the received and of the locally trained
    models, where a weighting asks for them, and how far each unit's steps reached."""

    received: Tally | None
    trained: Tally | None
    reach: np.ndarray  # (u,): see `optim.reach`


@runtime_checkable
class Weighting(Protocol):
    """What it wants to see of the clients it says in `sees`."""

    @property
    def sees(self) -> Sees: ...

    def init(self, sizes: np.ndarray) -> Any: ...

    def coefficients(self, state: Any, cohort: Cohort, local: Local) -> tuple[np.ndarray, Any]: ...


@dataclass(frozen=True)
class BySize:
    """FedAvg (McMahan et al., 2017): n_k over the cohort's rows, or what the sampling rule says."""

    sees: Sees = "nothing"

    def init(self, sizes: np.ndarray) -> None:
        return None

    def coefficients(self, state: None, cohort: Cohort, local: Local) -> tuple[np.ndarray, None]:
        return cohort.weight, None


@dataclass(frozen=True)
class FedNova:
    """FedNova (Wang et al., 2020): who makes more local steps does not count for more.

    Updates are divided by their reach and stretched to the mean reach: w_k -> w_k mean / reach_k,
    with the weights w_k of any other weighting.
    """

    inner: Weighting = field(default_factory=BySize)

    @property
    def sees(self) -> Sees:
        return self.inner.sees

    def init(self, sizes: np.ndarray) -> Any:
        return self.inner.init(sizes)

    def coefficients(self, state: Any, cohort: Cohort, local: Local) -> tuple[np.ndarray, Any]:
        weight, state = self.inner.coefficients(state, cohort, local)
        mean = cohort.sum(weight * local.reach)[cohort.run]
        moved = local.reach != 0  # a client without rows stays where it is
        return np.where(moved, weight * mean / np.where(moved, local.reach, 1.0), 0.0), state
