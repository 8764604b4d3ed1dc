"""A small federation in float64 with every kind of client that caused an error before."""

from dataclasses import replace

import numpy as np
import torch

from fedgft.algorithms import Algorithm
from fedgft.data.dataset import Dataset, Federation
from fedgft.data.generated import synthetic
from fedgft.engine import History, Settings, simulate
from fedgft.models import get_model
from fedgft.optimizers import Optimizer
from fedgft.study import Study, get_protocol
from paper_formulas import Client

# size, groups and labels to draw from: mixed, one group, the other, no row of the event, one row,
# rows without a recorded group
CLIENTS = [
    (40, (0, 1), (0, 1)),
    (17, (0,), (0, 1)),
    (23, (1,), (0, 1)),
    (12, (0, 1), (0,)),
    (1, (1,), (1,)),
    (31, (0, 1, -1), (0, 1)),
]
TEST = (25, (0, 1, -1), (0, 1))
EXECUTORS = ("fused", "stacked", "sequential")


def dataset(parts: list, *, features: int = 4, seed: int = 0, classes: int = 2, groups: int = 2):
    """Rows in the order of `parts`; the features depend on the label and on the group."""
    rng = np.random.default_rng(seed)
    group = np.concatenate([rng.choice(which, size) for size, which, _ in parts]).astype(np.int64)
    label = np.concatenate([rng.choice(which, size) for size, _, which in parts]).astype(np.int64)
    x = rng.standard_normal((len(label), features))
    x[:, 0] += 0.7 * label
    x[:, 1] += 0.9 * group - 0.3 * label * group
    names = tuple(f"x{i}" for i in range(features))
    return Dataset(
        "small",
        x,
        label,
        group,
        names,
        tuple(map(str, range(classes))),
        tuple(map(str, range(groups))),
    )


def federation(parts: list = CLIENTS, **options) -> Federation:
    data = dataset([*parts, TEST], **options)
    offsets = np.concatenate(([0], np.cumsum([size for size, _, _ in parts]))).astype(np.int64)
    rows = np.arange(len(data), dtype=np.int32)
    return Federation(data, rows[: offsets[-1]], offsets, rows[offsets[-1] :])


def several(groups: int = 2, classes: int = 2) -> Federation:
    """Five clients, each with rows of every group and class."""
    parts = [(size, tuple(range(groups)), tuple(range(classes))) for size in (30, 22, 9, 41, 16)]
    return federation(parts, groups=groups, classes=classes)


def reordered(made: Federation, order: list[int]) -> Federation:
    """The clients with these indices, in this order; each keeps its key."""
    rows = [made.client(k) for k in order]
    offsets = np.concatenate(([0], np.cumsum([len(r) for r in rows]))).astype(np.int64)
    keys = made.keys[order]
    return Federation(
        made.dataset, np.concatenate(rows), offsets, made.test, made.mean, made.spread, keys
    )


def clients(made: Federation) -> list[Client]:
    """The clients as scaled tensors, for the reference training."""
    data = made.dataset
    out = []
    for k in range(made.num_clients):
        rows = made.client(k)
        x = data.features[rows]
        if made.mean is not None and made.spread is not None:
            x = (x - made.mean) / made.spread
        y = torch.tensor(data.labels[rows])
        a = torch.tensor(data.groups[rows])
        out.append(Client(torch.tensor(x), y, a, int(made.keys[k])))
    return out


def module(made: Federation, model="logistic", *, seed: int = 0) -> torch.nn.Module:
    """The module with the initial parameters of a run with this seed."""
    sizes = {"features": made.dataset.features.shape[1], "classes": len(made.dataset.classes)}
    built = get_model(model).module(**sizes).double()
    start = torch.tensor(get_model(model).init(seed, **sizes))
    torch.nn.utils.vector_to_parameters(start, built.parameters())
    return built


SGD = Optimizer("sgd")


def run(
    made: Federation,
    algorithm: Algorithm,
    *,
    executor: str = "auto",
    model="logistic",
    seed: int = 0,
    lr: float = 0.05,
    init=None,
    on_state=None,
    resume=None,
    **options,
) -> History:
    """One run in float64: by default three rounds with small batches."""
    chosen = {"rounds": 3, "batch_size": 8, "precision": "fp64", "executor": executor} | options
    return simulate(
        [made],
        model,
        algorithm,
        Settings(**{"schedule": "constant", "state": "reset", "rounds": 20, **chosen}),
        seeds=[seed],
        lr=lr,
        init=init,
        on_state=on_state,
        resume=resume,
    )


SYNTHETIC = synthetic(rows=1500, seed=0)


def study(seeds: int = 2, **settings) -> Study:
    """A study with four clients and eight rounds, under the held-out protocol."""
    base = get_protocol("heldout")
    made = replace(base.settings, rounds=8, batch_size=64, eval_every=0, **settings)
    fixed = replace(base, settings=made, lr=(0.03,), round_factors=())
    return Study(SYNTHETIC, fixed, range(seeds), clients=4)
