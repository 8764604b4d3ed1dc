"""A module of your own in the simulator: FedAvg, then decisions at most two points apart.

The label hangs on the product of two features. You see a linear model, a small residual network,
and the same network with a target: which executor took it, then accuracy and gap (statistical
parity of decisions) on rows that nobody trained on. Means over two replicates, trained side by
side as one program.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

import fedgft


class Residual(nn.Module):
    """Anything with one output a class will do."""

    def __init__(self, features, width=16):
        super().__init__()
        self.enter, self.inner = nn.Linear(features, width), nn.Linear(width, width)
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        return self.leave(self.norm(x + torch.tanh(self.inner(x))))


# Group 1 is right of centre more often, and y = 1 where two features have the same sign.
rng = np.random.default_rng(0)
data = fedgft.synthetic(rows=4000, features=2, gap=0.0)
x = rng.standard_normal((len(data), 2)) + 1.0 * data.groups[:, None]
labels = (x.prod(1) > 0.3 * rng.standard_normal(len(x))).astype(np.int64)
features = np.column_stack((x, data.groups)).astype(np.float32)
data = replace(data, features=features, labels=labels)

federations = [fedgft.partition(data, clients=4, alpha=1.0, seed=seed) for seed in range(2)]
settings = fedgft.Settings(rounds=20, schedule="cosine", eval_every=0)
sp = fedgft.get_metric("sp")
for name, model, method in (
    ("linear", "logistic", fedgft.fedavg()),
    ("residual", lambda: Residual(3), fedgft.fedavg()),
    ("residual, target 0.02", lambda: Residual(3), fedgft.controlled(sp, target=0.02)),
):
    history = fedgft.simulate(federations, model, method, settings, seeds=range(2), lr=0.02)
    right, gap = history.test[-1].accuracy(), history.test[-1].gap(sp, "hard")
    print(f"{name} ({history.executor}): accuracy {right.mean():.3f}, gap {gap.mean():.3f}")
