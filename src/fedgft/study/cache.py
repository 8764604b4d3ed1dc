"""Files on disk: results of finished cells, and checkpoints to resume interrupted simulations.

Both are named by a hash over everything that the numbers depend on: the specification and its
protocol, the rows of the data, the source of the code that makes the numbers, and the libraries
that compute them. A changed specification changes only its own keys; a changed engine changes all.
"""

import hashlib
import json
import math
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

import fedgft
from fedgft.compiled import NUMBA_AVAILABLE
from fedgft.data.dataset import Dataset, Federation
from fedgft.engine.state import Snapshot
from fedgft.errors import FedgftError
from fedgft.models import Model, Trees
from fedgft.store import (
    PRIVATE_MODE,
    STAGE_NAME,
    atomic_write,
    dump_checksummed,
    exclusive_lock,
    load_checksummed,
    make_private_folder,
    parse_json,
    read_tensors,
    stage_files,
)

CHECKPOINT_FORMAT = "fedgft-rounds-2"
HASH_ROWS = 4096  # rows hashed at a time
HASHED_SOURCES = (  # files and folders of the package whose code changes numbers
    "sums.py",
    "settings.py",
    "optimizers.py",
    "models.py",
    "forest.py",
    "compiled.py",
    "resnet.py",
    "metrics",
    "theory.py",
    "data",
    "algorithms",
    "engine",
    "study/protocol.py",
    "study/study.py",
    "study/results.py",
    "paper/runner.py",
    "paper/convergence.py",
)


@dataclass(frozen=True)
class ResultCache:
    """A folder with one checksummed JSON file per finished cell."""

    folder: Path

    def get(self, key: str) -> dict[str, Any] | None:
        """The cell with this key; None if there is no such cell or its file is damaged."""
        with suppress(OSError, ValueError):
            return load_checksummed(self._path(key).read_text("utf-8"), key)
        return None

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Write a cell; only the owner of the folder can read it."""
        make_private_folder(self.folder)
        with atomic_write(self._path(key), private=True) as part:
            part.write(dump_checksummed(value, key).encode())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


@dataclass
class Checkpoints:
    """A folder with one safetensors file per simulation, which each checkpoint replaces.

    Parameters
    ----------
    folder
        Where the files are.
    every
        Rounds between checkpoints.
    resume
        Whether an interrupted study continues. A study always begins with the same simulation, so
        the first checkpoint that it requests must exist; otherwise the files are of another study.
    share
        The largest share of the run time that may be spent on writing checkpoints.
    """

    folder: Path
    every: int = 1
    resume: bool = False
    share: float = math.inf
    _last: tuple[float, float] = (0.0, 0.0)  # when the last one was written, and how long it took
    _requested: list[Path] = field(default_factory=list)  # in the order of the study

    def found(self) -> list[Path]:
        """The checkpoints in the folder."""
        return sorted(self.folder.glob("*.safetensors"))

    def get(self, key: str) -> Snapshot | None:
        """The checkpoint of a simulation, or None.

        Raises `FedgftError` where the file is damaged, since it may be hours of work, and where
        `resume` is on and the folder holds the checkpoints of another study.
        """
        path = self._path(key)
        self._requested.append(path)
        if not path.exists():
            if self.resume:
                raise FedgftError(
                    f"`resume`: the checkpoints in {self.folder} are of other options, other data "
                    "or another version; give those of the interrupted run, or another `out`",
                    kind="conflict",
                )
            return None
        self.resume = False
        try:
            header, arrays = read_tensors(path)
            about = parse_json(header["fedgft"])
            if (about["format"], about["key"]) != (CHECKPOINT_FORMAT, key):
                raise ValueError("of another run")
            snapshot = Snapshot(about["round"], about["tree"], arrays)
            if about["check"] != _checksum(snapshot):
                raise ValueError("its numbers are damaged")
            return snapshot
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise FedgftError(
                f"{path}: not a complete checkpoint ({error}); delete the folder to begin anew",
                kind="file",
            ) from error

    def put(self, key: str, done: int, take: Callable[[], Snapshot]) -> None:
        """Write the snapshot that `take` returns after `done` rounds, if one is due."""
        began = time.monotonic()
        last, took = self._last
        if done % self.every or took > self.share * (began - last):
            return
        snapshot = take()
        about = {
            "format": CHECKPOINT_FORMAT,
            "key": key,
            "round": done,
            "tree": snapshot.tree,
            "check": _checksum(snapshot),
        }
        make_private_folder(self.folder)
        # Write into a separate folder: safetensors leaves files with other names if it is killed.
        with stage_files(self.folder) as place:
            part = place / self._path(key).name
            try:
                save_file(snapshot.arrays, part, metadata={"fedgft": json.dumps(about)})
                part.chmod(PRIVATE_MODE)
            except SafetensorError as error:  # for example, the disk is full
                raise OSError(str(error)) from error
        now = time.monotonic()
        self._last = (now, now - began)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Lock the folder against other processes; remove it if it stays empty.

        Raises `FedgftError` where `resume` is on and there is nothing to resume, or is off and the
        folder holds the checkpoints of an interrupted run.
        """
        with exclusive_lock(self.folder):
            try:
                if self.resume and not self.found():
                    raise FedgftError(
                        f"`resume`: there are no checkpoints in {self.folder}; leave it out to "
                        "begin anew",
                        kind="missing",
                    )
                if self.found() and not self.resume:
                    raise FedgftError(
                        f"`out` {self.folder.parent}: holds the checkpoints of an interrupted run; "
                        f"`resume` goes on from there, or delete its folder {self.folder.name}",
                        kind="conflict",
                    )
                yield
            finally:
                if not self.found():
                    self.clear()

    def clear(self) -> None:
        """Delete the checkpoints of this study, once its results are written.

        The first checkpoint is deleted last: if the process is killed meanwhile, `resume` finds it
        and trains the others again.
        """
        shutil.rmtree(self.folder / STAGE_NAME, ignore_errors=True)
        for path in (*reversed(self._requested), self.folder / ".lock"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder holds other files
            self.folder.rmdir()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


def _checksum(snapshot: Snapshot) -> int:
    """A checksum over the round, the structure, and the names, types and bytes of all arrays."""
    arrays = snapshot.arrays
    shapes = [(name, arrays[name].dtype.str, arrays[name].shape) for name in sorted(arrays)]
    check = zlib.crc32(json.dumps([snapshot.round, snapshot.tree, shapes]).encode())
    for name in sorted(arrays):
        check = zlib.crc32(np.ascontiguousarray(arrays[name]).data, check)
    return check


def key_of(spec: Any, protocol: Any, dataset: Dataset, **more: Any) -> str:
    """The key of a cell: dataclasses `spec` and `protocol`, the data, and other inputs `more`."""
    parts = {
        "spec": asdict(spec),
        "protocol": protocol and asdict(protocol),
        "data": data_hash(dataset),
        "code": code_hash(),
        "libraries": libraries(),
        **more,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def run_key(
    federations: Sequence[Federation], model: Model, init: np.ndarray | None, *rest: Any
) -> str:
    """The key of a simulation; `rest`: other dataclasses, arrays and numbers that it depends on."""
    digest = hashlib.sha256(model_key(model, federations[0].dataset).encode())
    for federation in {id(f): f for f in federations}.values():
        digest.update(data_hash(federation.dataset).encode())
        for name in ("rows", "offsets", "test", "keys", "mean", "spread"):
            array = getattr(federation, name)
            digest.update(b"-" if array is None else array.tobytes())
    digest.update(b"" if init is None else np.ascontiguousarray(init).tobytes())
    digest.update(_describe(rest).encode())
    made_by = (code_hash(), libraries(), _version("torch"))
    return hashlib.sha256(digest.digest() + repr(made_by).encode()).hexdigest()[:32]


def model_key(model: Model, dataset: Dataset) -> str:
    """A text that identifies a network: its layers and a hash of its initial parameters.

    The hash is included because a file of weights may have changed.
    """
    if isinstance(model, Trees):
        return repr(model)
    size = {"features": dataset.features.shape[1], "classes": len(dataset.classes)}
    layers = model.name if model.linear else str(model.module(**size))
    start = hashlib.sha256(model.init(0, **size).tobytes()).hexdigest()
    return f"{layers} {model.shapes(**size)} {start}"


def _describe(value: Any) -> str:
    """A text that is the same in every process; the `repr` of a function holds its address."""
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_describe, value))})"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{f.name}={_describe(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({','.join(parts)})"
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', value)}"
    return repr(value)


_data_hashes: "WeakKeyDictionary[Dataset, str]" = WeakKeyDictionary()


def data_hash(dataset: Dataset) -> str:
    """A hash over all rows and names of a data set, remembered without keeping it in memory."""
    if dataset in _data_hashes:
        return _data_hashes[dataset]
    digest = hashlib.sha256()
    columns = (dataset.features, dataset.labels, dataset.groups, dataset.test, dataset.clients)
    for array in (a for a in columns if a is not None):
        for at in range(0, len(array), HASH_ROWS):  # images are on disk, and may be many
            digest.update(np.ascontiguousarray(array[at : at + HASH_ROWS]).data)
    names = (dataset.name, dataset.columns, dataset.classes, dataset.group_names)
    digest.update(json.dumps(names).encode())
    if dataset.weights is not None:
        digest.update(b"weights" + dataset.weights.tobytes())
    if dataset.axis is not None:
        digest.update(repr(dataset.axis).encode() + dataset.cells.tobytes())
    _data_hashes[dataset] = digest.hexdigest()
    return _data_hashes[dataset]


@cache
def libraries() -> dict[str, str | None]:
    """Versions of the libraries that decide how numbers are rounded."""
    return {"numpy": version("numpy"), "numba": version("numba") if NUMBA_AVAILABLE else None}


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


@cache
def code_hash(sources: tuple[str, ...] = HASHED_SOURCES) -> str:
    """A hash over the source code in these files and folders of the package, in this order."""
    root = Path(fedgft.__file__).parent
    digest = hashlib.sha256()
    for name in sources:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
