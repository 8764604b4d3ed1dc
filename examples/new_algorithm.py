"""Your own federated algorithm in one file: clients with a larger loss get a larger weight.

A variant of q-FedAvg (Li et al., "Fair Resource Allocation in Federated Learning"): the weight of
client k is n_k L_k^q, with L_k the mean score of the wrong class. A larger q favors the worst-off.

You see that the accuracy of that client rises with q. With the objective of FedGFT, which is
another slot, the gap between the groups falls as well.
"""

from dataclasses import dataclass, replace

import numpy as np

import fedgft
from fedgft.algorithms import Algorithm, fedgft_control


@dataclass(frozen=True)
class ByNeed:
    """Weighting slot. `q` is one number, or one number per run."""

    q: float | np.ndarray
    sees: str = "received"  # the clients' sums of the received model

    def init(self, sizes):
        return None  # there is no state

    def coefficients(self, state, cohort, local):
        if local.received is None:
            return cohort.weight, state
        rows = np.maximum(local.received.rows(), 1)  # a client may have no rows
        loss = 1 - np.einsum("...cgc->...", local.received.score) / rows
        q = np.broadcast_to(self.q, len(cohort.bounds) - 1)[cohort.run]
        return cohort.normalized(cohort.weight * loss**q), state


# Client a holds a tenth of the rows; its first two features have the opposite sign.
data = fedgft.data.synthetic(rows=8000, features=4, gap=0.3, signal=1.5)
client = np.random.default_rng(0).choice(5, size=len(data), p=[0.1, 0.225, 0.225, 0.225, 0.225])
features = np.where((client == 0)[:, None] & (np.arange(5) < 2), -data.features, data.features)
data = replace(data, features=features, clients=client, client_names=tuple("abcde"))
federation = fedgft.partition(data, "column", seed=0)
settings = fedgft.Settings(rounds=40, schedule="cosine", eval_every=0)


def show(names, algorithm):
    runs = len(names)  # all runs are one batch
    history = fedgft.simulate(
        [federation] * runs, "logistic", algorithm, settings, seeds=[0] * runs, lr=0.02
    )
    gap = history.test[-1].gap(fedgft.get_metric("sp"), "hard")
    for i, name in enumerate(names):
        print(
            f"{name}: accuracy of all {history.test[-1].accuracy()[i]:.3f}, "
            f"of client a {history.after.accuracy()[i, 0]:.3f}, gap {gap[i]:.3f}"
        )


show(["q = 0", "q = 2", "q = 8"], Algorithm(weighting=ByNeed(np.array([0.0, 2.0, 8.0]))))
show(["q = 8, target 0.02"], replace(fedgft_control("sp", 0.02), weighting=ByNeed(8.0)))
