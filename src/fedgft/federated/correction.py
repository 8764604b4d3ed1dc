"""The correction slot: what is added to the client's gradient in every local step.

    mu (params - start)  +  c - c_k

The engine adds it whatever the local optimiser, and keeps what a correction remembers.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedgft.arguments import real_number
from fedgft.errors import FedgftError


@runtime_checkable
class Correction(Protocol):
    """What is added to a client's gradient: mu (params - start), and c - c_k with variates."""

    @property
    def mu(self) -> float: ...  # the pull back to where the round began

    @property
    def variates(self) -> bool: ...  # whether clients and server keep control variates


def _check(mu: float) -> None:
    if not 0 <= real_number("mu", mu, finite=False) < float("inf"):
        raise FedgftError(f"--mu must be a number >= 0, got {mu:g}")


@dataclass(frozen=True)
class Proximal:
    """FedProx (Li et al., 2020): mu (params - start); with mu = 0, nothing."""

    mu: float = 0.0
    variates: bool = False

    def __post_init__(self) -> None:
        _check(self.mu)


@dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD (Karimireddy et al., 2020): c - c_k takes out how a client's pull differs.

    c_k is the mean raw gradient of the client's last round, which for plain SGD is the authors'
    option II exactly, and makes sense for any local optimiser. c = sum_k n_k/n c_k always, also
    where a cohort is sampled: who did not take part keeps his c_k.
    """

    mu: float = 0.0
    variates: bool = True

    def __post_init__(self) -> None:
        _check(self.mu)
