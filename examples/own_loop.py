"""FedGFT in your own training loop: three clients, plain PyTorch, three additional lines.

You see accuracy and gap (statistical parity of decisions on held-out rows) of federated averaging,
which is lam = 0, and of FedGFT. FedGFT has a third of the gap or less, and loses some accuracy.
"""

import copy

import torch
from torch.nn.functional import cross_entropy

import fedgft

data = fedgft.data.synthetic(rows=3000, features=4, gap=0.4)
federation = fedgft.partition(data, clients=3, alpha=1.0, seed=1)
torch.set_num_threads(1)  # small tensors


def tensors(rows):
    return [torch.tensor(column[rows]) for column in (data.features, data.labels, data.groups)]


def train(lam):
    torch.manual_seed(0)
    model = torch.nn.Linear(data.features.shape[1], 2)
    clients = [tensors(federation.client(k)) for k in range(3)]
    penalty = fedgft.Penalty("sp", lam)  # 1: once
    for _ in range(20):
        # 2: once per round
        penalty.update(sum(penalty.statistics(model(x), y, a) for x, y, a in clients))
        mean = {name: 0.0 for name in model.state_dict()}
        for x, y, a in clients:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.03)
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
    return model


for lam in (0.0, 20.0):
    x, y, a = tensors(federation.test)
    decisions = train(lam)(x).argmax(1)
    rates = [decisions[a == g].double().mean() for g in (0, 1)]
    accuracy = (decisions == y).double().mean()
    print(f"lam {lam:g}: accuracy {accuracy:.3f}, gap {abs(rates[0] - rates[1]):.3f}")
