"""The loop that a federated simulation in PyTorch usually is: client after client, a DataLoader
each, the global weights loaded into a working model, an optimizer made anew every round."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader, Subset, TensorDataset
from workload import BATCH, FEATURES, LR, ROUNDS, TRAIN, Workload, dataset


def run(work: Workload, parts: list[np.ndarray], *, seed: int) -> float:
    """Test accuracy after the last round of one replicate."""
    torch.set_num_threads(1)  # its best: two threads cost more than they bring at these sizes
    torch.manual_seed(seed)
    train, test = _loaders(parts)
    sizes = [len(part) for part in parts]
    model = _model(work)
    client_model = _model(work)
    accuracy = 0.0
    for _ in range(ROUNDS):
        states = []
        for loader in train:
            client_model.load_state_dict(model.state_dict())
            train_locally(client_model, loader)
            states.append(copy.deepcopy(client_model.state_dict()))
        model.load_state_dict(average(states, sizes))
        accuracy = evaluate(model, test)
    return accuracy


def train_locally(model: nn.Module, loader: DataLoader) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def average(states: list[dict[str, torch.Tensor]], sizes: list[int]) -> dict[str, torch.Tensor]:
    total = sum(sizes)
    return {
        name: sum(n / total * state[name] for n, state in zip(sizes, states, strict=True))
        for name in states[0]
    }


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def _loaders(parts: list[np.ndarray]) -> tuple[list[DataLoader], DataLoader]:
    data = dataset()
    rows = TensorDataset(torch.from_numpy(data.features), torch.from_numpy(data.labels))
    train = [DataLoader(Subset(rows, p.tolist()), batch_size=BATCH, shuffle=True) for p in parts]
    test = TensorDataset(*rows[TRAIN:])
    return train, DataLoader(test, batch_size=BATCH)


def _model(work: Workload) -> nn.Module:
    module = work.model.module(features=FEATURES, classes=2)
    start = torch.from_numpy(work.start()).float()
    vector_to_parameters(start, module.parameters())
    return module
