"""What every side of a benchmark computes: the same rows, clients, model and optimizer.

W1 is a table of the size of Adult, split over ten clients by a label-skewed Dirichlet(0.5):
nn.Linear + cross-entropy from zero, one epoch of Adam a round in batches of 256, optimizers made
anew each round, 20 rounds of FedAvg weighted by rows, test accuracy after each round. The other
workloads change one thing: W1x20 is 20 replicates of it, each with a split and an order of its
own, W2a has 100 clients, W2b 1,000, and mlp a hidden layer of 64.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from fedgft.data.dataset import Dataset, Federation
from fedgft.models import MODELS, Model

TRAIN = 32_561
TEST = 16_281
FEATURES = 100
ROUNDS = 20
BATCH = 256
LR = 2e-3


@dataclass(frozen=True)
class Workload:
    clients: int
    replicates: int = 1
    model_name: str = "logistic"

    @property
    def model(self) -> Model:
        return MODELS[self.model_name]

    def start(self) -> np.ndarray:
        """The parameters all sides start from, flat."""
        start = self.model.init(0, features=FEATURES, classes=2)
        return np.zeros_like(start) if self.model.linear else start

    def parts(self, replicate: int) -> list[np.ndarray]:
        """Each client's rows."""
        return split(dataset().labels[:TRAIN], self.clients, seed=1000 + replicate)

    def federations(self) -> list[Federation]:
        return [federation(dataset(), self.parts(r), TRAIN) for r in range(self.replicates)]


WORKLOADS = {
    "W1": Workload(clients=10),
    "W1x20": Workload(clients=10, replicates=20),
    "W2a": Workload(clients=100),
    "W2b": Workload(clients=1000),
    "mlp": Workload(clients=10, model_name="mlp"),
}


@cache
def dataset() -> Dataset:
    """Training rows, then test rows; the label leans on all features and on the group."""
    rng = np.random.default_rng(20240611)
    rows = TRAIN + TEST
    group = (rng.random(rows) < 0.15).astype(np.int64)
    features = rng.standard_normal((rows, FEATURES), dtype=np.float32)
    features[:, 0] += group
    truth = (0.25 * rng.standard_normal(FEATURES)).astype(np.float32)
    logit = features @ truth * 1.5 - 1.6 - 0.8 * group
    label = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int64)
    return Dataset("synthetic", features, label, group, _names(FEATURES))


def split(labels: np.ndarray, clients: int, *, seed: int) -> list[np.ndarray]:
    """Each label is dealt out in shares from Dirichlet(0.5); nobody is left without a row."""
    rng = np.random.default_rng(seed)
    dealt = []
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, 0.5))
        dealt.append(np.split(rows, (np.cumsum(shares) * len(rows)).astype(int)[:-1]))
    parts = [np.concatenate(own) for own in zip(*dealt, strict=True)]
    largest_first = sorted(range(clients), key=lambda k: -len(parts[k]))
    for k in range(clients):
        if len(parts[k]) == 0:
            giver = next(g for g in largest_first if len(parts[g]) > 50)
            parts[k], parts[giver] = parts[giver][-1:], parts[giver][:-1]
    return [np.sort(part) for part in parts]


def many_clients(clients: int) -> Federation:
    """Clients of 20 rows and 50 features each, and 1,000 test rows."""
    rng = np.random.default_rng(7)
    held = 20 * clients
    test = 1000
    width = 50
    features = rng.standard_normal((held + test, width), dtype=np.float32)
    label, group = rng.integers(2, size=(2, held + test))
    data = Dataset("growth", features, label, group, _names(width))
    return federation(data, np.arange(held).reshape(clients, 20), held)


def federation(data: Dataset, parts: list[np.ndarray] | np.ndarray, train: int) -> Federation:
    return Federation(
        data,
        rows=np.concatenate(parts).astype(np.int32),
        offsets=np.cumsum([0, *map(len, parts)]),
        test=np.arange(train, len(data), dtype=np.int32),
    )


def _names(features: int) -> tuple[str, ...]:
    return tuple(f"x{i}" for i in range(features))
