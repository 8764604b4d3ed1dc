"""The correction slot: the term that is added to a client's gradient in every local step.

    mu (params - start) + drift

`mu` pulls a client back to the model that it received. `drift` is a vector per client that stays
the same for all local steps of a round. A correction whose `learns_from` is not "nothing" has a
memory, which the engine stores: one vector per client and one per run for the server. Each round
the engine calls `drift` before and `learn` after the local training of the clients that take part.

Vectors are rows of NumPy or torch arrays, as long as a gradient; a correction needs `+`, `-` and
`*` and works in every executor. `examples/feddyn.py` adds FedDyn.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedgft.algorithms.weightings import Cohort
from fedgft.errors import FedgftError
from fedgft.validation import check_number

LearnsFrom = Literal["nothing", "gradient", "move"]


@dataclass(frozen=True)
class CorrectionState:
    """The memory of a correction: the server's vector of each run, and vectors of clients.

    All vectors are zero before the first round. `drift` and `learn` get the vectors of the clients
    of their cohort, in its order.
    """

    server: Any  # (run, w)
    clients: Any  # (u, w)


@dataclass(frozen=True)
class LocalTraining:
    """What the clients of a cohort did in one round, one row per client.

    `gradient` is the mean gradient over the local steps, before any correction. `move` is the
    trained model minus the model that the client started from; it is None unless the correction
    sets ``learns_from = "move"``.
    """

    gradient: Any  # (u, w)
    move: Any = None  # (u, w)


@dataclass(frozen=True)
class Correction:
    """Base class of corrections; on its own it only applies the proximal term.

    Parameters
    ----------
    mu
        Weight of the proximal term, >= 0.
    """

    mu: float = 0.0
    learns_from: ClassVar[LearnsFrom] = "nothing"

    def __post_init__(self) -> None:
        if not 0 <= check_number("mu", self.mu, finite=False) < float("inf"):
            raise FedgftError(f"`mu` must be a number >= 0, got {self.mu:g}")

    def drift(self, state: CorrectionState, cohort: Cohort) -> Any:
        """Return the vector (u, w) that is added to every local gradient of each client."""
        raise NotImplementedError

    def learn(
        self, state: CorrectionState, cohort: Cohort, training: LocalTraining
    ) -> tuple[Any, Any]:
        """Return the clients' new vectors (u, w) and what they add to the server's vector (u, w).

        The server's vector of each run grows by the sum of n_k/n times the second result, where
        n_k/n is the client's share of the rows of all clients, whether they take part or not.
        """
        raise NotImplementedError


class Proximal(Correction):
    """FedProx (Li et al., 2020): mu (params - start). With mu = 0 nothing is added."""


class Scaffold(Correction):
    """SCAFFOLD (Karimireddy et al., 2020): adding c - c_k removes the client-specific drift.

    c_k is the mean raw gradient of the client's last round. For plain SGD that is option II of the
    paper, and it is defined for every local optimizer. c = sum_k n_k/n c_k holds after every round,
    also with sampled cohorts: clients that do not take part keep their c_k.
    """

    learns_from = "gradient"

    def drift(self, state: CorrectionState, cohort: Cohort) -> Any:
        return state.server[cohort.run] - state.clients

    def learn(
        self, state: CorrectionState, cohort: Cohort, training: LocalTraining
    ) -> tuple[Any, Any]:
        return training.gradient, training.gradient - state.clients
