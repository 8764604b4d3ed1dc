"""Finished work, kept: one JSON file a cell, found again by everything that its numbers depend on.

The key is a hash over the cell's own specification with its protocol, the data's rows, the source
of the code that makes the numbers, and the libraries that compute them. A changed specification
changes its own cells' keys and no others; a changed engine changes all. What cannot be read is
computed again, never trusted.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

import fedgft
from fedgft.data.dataset import Dataset
from fedgft.engine import compiled
from fedgft.files import private_folder, whole
from fedgft.seals import sealed, unsealed

HASHED = 4096  # rows at a time
# What a number depends on. Reports are drawn anew each time, so their code is not among it.
NUMBERS = ("types.py", "optim.py", "models.py", "resnet.py", "metrics", "theory", "data",
           "federated", "engine", "experiments/protocol.py", "experiments/study.py",
           "experiments/rows.py", "experiments/run.py", "experiments/convergence.py")  # fmt: skip


@dataclass(frozen=True)
class Shelf:
    """A folder of finished cells."""

    folder: Path

    def get(self, key: str) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            return unsealed(self._path(key).read_text("utf-8"), key)
        return None

    def put(self, key: str, value: dict[str, Any]) -> None:
        private_folder(self.folder)
        with whole(self._path(key), private=True) as part:
            part.write_text(sealed(value, key), "utf-8")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def key_of(spec: Any, protocol: Any, dataset: Dataset, **more: Any) -> str:
    """Of dataclasses; `more` is whatever else decides."""
    parts = {"spec": asdict(spec), "protocol": protocol and asdict(protocol),
             "data": data_hash(dataset), "code": code_hash(), "libraries": libraries(),
             **more}  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


_hashes: "WeakKeyDictionary[Dataset, str]" = WeakKeyDictionary()


def data_hash(dataset: Dataset) -> str:
    """Made once for a data set, which is not kept for it."""
    if dataset not in _hashes:
        _hashes[dataset] = _hashed(dataset)
    return _hashes[dataset]


def _hashed(dataset: Dataset) -> str:
    digest = hashlib.sha256()
    held = (dataset.features, dataset.labels, dataset.groups, dataset.test, dataset.clients)
    for array in (a for a in held if a is not None):
        for at in range(0, len(array), HASHED):  # images are on disk, and may be many
            digest.update(np.ascontiguousarray(array[at : at + HASHED]).data)
    names = (dataset.name, dataset.columns, dataset.classes, dataset.group_names)
    digest.update(json.dumps(names).encode())
    return digest.hexdigest()


@cache
def libraries() -> dict[str, str | None]:
    """They decide the rounding, and with it the digits of models that hang on it."""
    numba = version("numba") if compiled.AVAILABLE else None
    return {"numpy": version("numpy"), "numba": numba}


@cache
def code_hash() -> str:
    """Of the source files, in the order of their names."""
    root, digest = Path(fedgft.__file__).parent, hashlib.sha256()
    for name in NUMBERS:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
