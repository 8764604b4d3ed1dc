"""A federated algorithm of your own in one file: weights that follow need, after q-FedAvg.

Li, Sanjabi, Beirami & Smith, "Fair Resource Allocation in Federated Learning": clients count
n_k L_k^q, with L_k the loss of the model they received; here L_k is the mean score that their rows
give to the wrong class. q = 0 is FedAvg; the larger q, the more the worst-off client counts.

You see the accuracy of that client rise with q, and then the new weights under FedGFT's objective,
where the gap between the groups falls as well: another slot, one argument.
"""

from dataclasses import dataclass, replace

import numpy as np

import fedgft


@dataclass(frozen=True)
class ByNeed:
    """Weighting slot. `q` is one number, or one a run."""

    q: float | np.ndarray
    sees: str = "received"  # the sums that clients have of the model they receive

    def init(self, sizes):
        return None  # nothing is remembered from round to round

    def coefficients(self, state, cohort, local):
        if local.received is None:
            return cohort.weight, state
        rows = np.maximum(local.received.rows(), 1)  # a client may have none
        loss = 1 - np.einsum("...cgc->...", local.received.score) / rows
        q = np.broadcast_to(self.q, len(cohort.bounds) - 1)[cohort.run]
        return cohort.normalized(cohort.weight * loss**q), state


# One client in ten, whose first two features mean the opposite of what they mean elsewhere.
data = fedgft.synthetic(rows=8000, features=4, gap=0.3, signal=1.5)
client = np.random.default_rng(0).choice(5, size=len(data), p=[0.1, 0.225, 0.225, 0.225, 0.225])
features = np.where((client == 0)[:, None] & (np.arange(5) < 2), -data.features, data.features)
data = replace(data, features=features, clients=client, client_names=tuple("abcde"))
federation = fedgft.partition(data, "column", seed=0)
settings = fedgft.Settings(rounds=40, schedule="cosine", eval_every=0)


def show(names, algorithm):
    runs = len(names)  # side by side, as one batch
    history = fedgft.simulate(
        [federation] * runs, "logistic", algorithm, settings, seeds=[0] * runs, lr=0.02
    )
    gap = history.test[-1].gap(fedgft.get_metric("sp"), "hard")
    for i, name in enumerate(names):
        print(
            f"{name}: accuracy of all {history.test[-1].accuracy()[i]:.3f}, "
            f"of client a {history.after.accuracy()[i, 0]:.3f}, gap {gap[i]:.3f}"
        )


show(["q = 0", "q = 2", "q = 8"], fedgft.Algorithm(weighting=ByNeed(np.array([0.0, 2.0, 8.0]))))
show(["q = 8, target 0.02"], replace(fedgft.fedgft_control("sp", 0.02), weighting=ByNeed(8.0)))
