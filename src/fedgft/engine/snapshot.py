"""A simulation between two rounds, as arrays and JSON: whoever keeps it can go on from there.

Nothing but numbers, names and the few classes listed here: there is nothing to unpickle. Vectors
are in the engine's own order, so a snapshot is for the code that took it.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from fedgft.engine.memory import Best, Norms, State, Variates
from fedgft.federated.control import ControllerState
from fedgft.metrics import Tally
from fedgft.optim import Moments

KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Best, ControllerState, Moments, Norms, State, Tally, Variates)
}


@dataclass(frozen=True)
class Snapshot:
    """`tree` says how the arrays make up what was packed. They are the simulation's own and change
    with its next round."""

    round: int  # rounds done
    tree: Any
    arrays: dict[str, np.ndarray]


def pack(round: int, value: Any) -> Snapshot:
    arrays: dict[str, np.ndarray] = {}
    return Snapshot(round, _packed(value, arrays), arrays)


def _packed(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in KINDS.values():
        names = [f.name for f in fields(value)] if is_dataclass(value) else value._fields
        parts = {name: _packed(getattr(value, name), arrays) for name in names}
        return {"is": type(value).__name__, "of": parts}
    if isinstance(value, (tuple, list)):
        return {"is": "tuple", "of": [_packed(item, arrays) for item in value]}
    name = f"{len(arrays):04d}"
    if isinstance(value, (np.ndarray, np.generic)):
        arrays[name] = np.asarray(value, order="C")
        return {"is": "array", "of": name}
    if value.is_pinned():  # a GPU may still be writing to it
        import torch

        torch.cuda.synchronize()
    arrays[name] = value.detach().contiguous().cpu().numpy()  # a tensor
    return {"is": "tensor", "of": name, "host": value.device.type == "cpu"}


def unpack(snapshot: Snapshot, tensor: Any) -> Any:
    """What was packed; `tensor(array, host)` makes an executor's tensor. ValueError where it is
    nothing that `pack` made."""
    try:
        return _unpacked(snapshot.tree, snapshot.arrays, tensor)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a snapshot of ours ({error})") from error


def _unpacked(tree: Any, arrays: dict[str, np.ndarray], tensor: Any) -> Any:
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    kind, held = tree["is"], tree["of"]
    if kind == "tuple":
        return tuple(_unpacked(item, arrays, tensor) for item in held)
    if kind == "array":
        return arrays[held]
    if kind == "tensor":
        return tensor(arrays[held], tree["host"])
    return KINDS[kind](**{n: _unpacked(part, arrays, tensor) for n, part in held.items()})
