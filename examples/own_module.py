"""Your own module in the simulator, without and with a target for the gap.

The label depends on the product of two features. You see the executor, the accuracy and the gap
(statistical parity of decisions on held-out rows) of a linear model, of a small residual network,
and of the same network with a target. The two networks are trained side by side in one batch.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

import fedgft
from fedgft.algorithms import fedavg, fedgft_control


class Residual(nn.Module):
    """Any module with one output per class works."""

    def __init__(self, features, width=16):
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, 2)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        return self.leave(self.norm(x + torch.tanh(self.inner(x))))


# Group 1 has larger features, and y = 1 if two features have the same sign.
rng = np.random.default_rng(0)
data = fedgft.data.synthetic(rows=4000, features=2, gap=0.0)
x = rng.standard_normal((len(data), 2)) + 1.0 * data.groups[:, None]
labels = (x.prod(1) > 0.3 * rng.standard_normal(len(x))).astype(np.int64)
features = np.column_stack((x, data.groups)).astype(np.float32)
data = replace(data, features=features, labels=labels)

federation = fedgft.partition(data, clients=4, alpha=5.0)
settings = fedgft.Settings(rounds=20, schedule="cosine", eval_every=0)
sp = fedgft.get_metric("sp")


def show(names, model, method):
    runs = len(names)
    history = fedgft.simulate(
        [federation] * runs, model, method, settings, seeds=[0] * runs, lr=0.02
    )
    last = history.test[-1]
    for name, right, gap in zip(names, last.accuracy(), last.gap(sp, "hard"), strict=True):
        print(f"{name} ({history.executor}): accuracy {right:.3f}, gap {gap:.3f}")


show(["linear"], "logistic", fedavg())
targets = np.array([0.99, 0.02])  # per run; 0.99 has no effect
show(["residual", "residual, fair"], lambda: Residual(3), fedgft_control(sp, targets))
