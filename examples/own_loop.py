"""FedGFT in your own training loop: three clients, plain PyTorch, four additional lines.

You see accuracy and gap (statistical parity of decisions on held-out rows) of federated averaging
and of the same loop with the penalty. The penalty brings the gap to its target of 2 points on the
clients' rows and to about that on held-out rows, and the model loses some accuracy.
"""

import copy

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import fedgft

ROUNDS = 30
data = fedgft.data.synthetic(rows=6000, features=4, gap=0.4)
federation = fedgft.partition(data, clients=3, alpha=1.0, seed=1)
sex = np.array(["f", "m"])[data.groups]
torch.set_num_threads(1)  # small tensors


def tensors(rows):
    return torch.tensor(data.features[rows]), torch.tensor(data.labels[rows])


def train(penalty):
    torch.manual_seed(0)
    model = torch.nn.Linear(data.features.shape[1], 2)
    rows = [federation.client(k) for k in range(3)]
    clients = [(*tensors(r), penalty.encode(sex[r])) for r in rows]
    penalty.damp(model)
    for _ in range(ROUNDS):
        penalty.update(penalty.statistics(model(x), y, a) for x, y, a in clients)  # 2: per round
        mean = {name: 0.0 for name in model.state_dict()}
        for x, y, a in clients:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
            for batch in torch.randperm(len(y)).split(64):
                logits = local(x[batch])
                loss = cross_entropy(logits, y[batch])
                loss = loss + penalty(logits, y[batch], a[batch])  # 3: per batch
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for name, value in local.state_dict().items():
                mean[name] += value * len(y) / len(federation.rows)
        model.load_state_dict(mean)
        penalty.damp(model)  # 4: at the end of the round
    return model


for name, how in (("FedAvg", {"lam": 0.0}), ("FedGFT", {"target": 0.02})):
    penalty = fedgft.Penalty("sp", groups=["f", "m"], rounds=ROUNDS, **how)  # 1: once
    x, y = tensors(federation.test)
    decisions = train(penalty)(x).argmax(1)
    gap = fedgft.statistical_parity_difference(
        y, decisions, sensitive_features=sex[federation.test]
    )
    print(f"{name}: accuracy {(decisions == y).double().mean():.3f}, gap {gap:.3f}")
