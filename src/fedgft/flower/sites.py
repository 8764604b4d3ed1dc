"""From a simulated federation to sites of a deployment: the same rows, model, start and order."""

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from fedgft.data.dataset import Federation
from fedgft.flower.site import Site
from fedgft.models import get_model, named

DTYPE = np.float32


def first_arrays(model: Any, *, features: int, classes: int, seed: int) -> ArrayRecord:
    """The start of a simulated run with this seed, under the names of the model's state."""
    made = get_model(model)
    flat = made.init(seed, features=features, classes=classes).astype(DTYPE)
    shapes = made.shapes(features=features, classes=classes)
    return ArrayRecord({name: Array(tensor) for name, tensor in named(flat, shapes).items()})


def flat(arrays: ArrayRecord) -> np.ndarray:
    """All parameters in one vector, as a simulation's `History.params` has them."""
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])


def client_site(federation: Federation, client: int, model: Any, *, name: str = "") -> Site:
    """Client number `client` of a federation, as a site of its own."""
    data, rows = federation.dataset, federation.client(client)
    module = get_model(model).module(features=data.features.shape[1], classes=len(data.classes))
    return Site(
        module.float(),
        rows=tensors(federation.seen(rows), data.labels[rows], data.groups[rows]),
        classes=data.classes,
        groups=data.group_names,
        name=name or f"site-{client}",
        key=int(federation.keys[client]),
    )


def tensors(x: np.ndarray, y: np.ndarray, a: np.ndarray) -> tuple[Any, Any, Any]:
    import torch

    return torch.tensor(x, dtype=torch.float32), torch.tensor(y), torch.tensor(a)
