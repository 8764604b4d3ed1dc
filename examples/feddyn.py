"""FedDyn (Acar et al., 2021) without changes to the library: a correction and a server.

    python examples/feddyn.py

A client minimizes L_k(w) - <g_k, w> + alpha/2 |w - start|^2 and then sets
g_k <- g_k - alpha (w_k - start). The server sets h <- h - alpha mean(w_k - start) and takes the
mean of the models minus h / alpha. You see that FedGFT reduces the gap on FedDyn as on FedAvg.
"""

from dataclasses import dataclass, replace
from typing import Any

import fedgft
from fedgft.algorithms import Algorithm, Averaging, Correction, fedavg


class FedDyn(Correction):
    """`mu` is alpha, and a client's own vector is g_k."""

    learns_from = "move"

    def drift(self, state, cohort) -> Any:
        return -state.clients

    def learn(self, state, cohort, training) -> tuple[Any, Any]:
        return state.clients - self.mu * training.move, 0 * training.move


@dataclass(frozen=True)
class DynamicServer(Averaging):
    """All clients take part, so the mean update is the mean of their moves."""

    alpha: float = 0.1

    def init(self, params) -> Any:
        return 0 * params

    def step(self, state, params, update) -> tuple[Any, Any]:
        h = state - self.alpha * update
        return params + update - h / self.alpha, h


def feddyn(method: Algorithm, alpha: float = 0.1) -> Algorithm:
    """The same method trained by FedDyn."""
    return replace(method, correction=FedDyn(alpha), server=DynamicServer(alpha=alpha))


if __name__ == "__main__":
    data = fedgft.data.synthetic(rows=4000, seed=0)
    made = [fedgft.standardize(fedgft.partition(data, clients=5, alpha=0.5, seed=0))]
    fair = fedgft.algorithms.fedgft("sp", 20.0)
    methods = {"FedAvg": fedavg(), "FedDyn": feddyn(fedavg()), "FedGFT": fair}
    for name, method in {**methods, "FedGFT on FedDyn": feddyn(fair)}.items():
        history = fedgft.simulate(made, "logistic", method, fedgft.Settings(rounds=30), seeds=[0])
        last = history.test[-1]
        gap = last.gap(fedgft.get_metric("sp"), "hard")[0]
        print(f"{name}: accuracy {last.accuracy()[0]:.3f}, gap {gap:.3f}")
