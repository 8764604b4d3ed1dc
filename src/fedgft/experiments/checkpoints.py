"""Simulations that were interrupted: one file each, replaced whole after a round.

The file is named by everything that the numbers depend on, so a run finds its own and no other's.
Its tensors are in safetensors, the rest is JSON in the header.
"""

import hashlib
import json
import math
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.data.dataset import Dataset, Federation
from fedgft.engine.snapshot import Snapshot
from fedgft.errors import FedgftError
from fedgft.experiments.shelf import code_hash, data_hash, libraries
from fedgft.files import PRIVATE, STAGE, alone, parsed, private_folder, read_tensors, staged
from fedgft.models import Model

FORMAT = "fedgft-rounds-2"
ENDING = ".safetensors"


@dataclass
class Checkpoints:
    """A folder of them; `every` so many rounds, and never for more than `share` of the time. With
    `resume` the first one asked for must be there: every run begins with the same simulation, so
    else these are of another run."""

    folder: Path
    every: int = 1
    resume: bool = False
    share: float = math.inf  # every round is every round, however long a checkpoint takes
    _took: tuple[float, float] = (0.0, 0.0)  # when the last one was done, and how long it took
    _asked: list[Path] = field(default_factory=list)  # in the order of the run

    def found(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{ENDING}"))

    def get(self, key: str) -> Snapshot | None:
        """None where there is none; an error where it is damaged: it may be hours of work."""
        path = self._path(key)
        self._asked.append(path)
        if not path.exists():
            if self.resume:
                raise FedgftError(
                    f"--resume: the checkpoints in {self.folder} are of other options, other data "
                    "or another version; give those of the interrupted run, or another --out"
                )
            return None
        self.resume = False
        try:
            header, arrays = read_tensors(path)
            about = parsed(header["fedgft"])
            if (about["format"], about["key"]) != (FORMAT, key):
                raise ValueError("of another run")
            snapshot = Snapshot(about["round"], about["tree"], arrays)
            if about["check"] != _checksum(snapshot):
                raise ValueError("its numbers are damaged")
            return snapshot
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise FedgftError(
                f"{path}: not a whole checkpoint ({error}); delete the folder to begin anew"
            ) from error

    def put(self, key: str, done: int, take: Callable[[], Snapshot]) -> None:
        began, (last, took) = time.monotonic(), self._took
        if done % self.every or took > self.share * (began - last):
            return
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        snapshot = take()
        about = {"format": FORMAT, "key": key, "round": done, "tree": snapshot.tree,
                 "check": _checksum(snapshot)}  # fmt: skip
        private_folder(self.folder)
        # A folder of its own, since safetensors leaves files with names of its own if it is killed.
        with staged(self.folder) as place:
            part = place / self._path(key).name
            try:
                save_file(snapshot.arrays, part, metadata={"fedgft": json.dumps(about)})
                part.chmod(PRIVATE)  # the folder that it is written in is private already
            except SafetensorError as error:  # what a full disk is to it
                raise OSError(str(error)) from error
        now = time.monotonic()
        self._took = now, now - began

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Nobody else writes here meanwhile; a folder that stays empty goes."""
        with alone(self.folder):
            try:
                self._check()
                yield
            finally:
                if not self.found():
                    self.clear()

    def _check(self) -> None:
        if self.resume and not self.found():
            raise FedgftError(
                f"--resume: there are no checkpoints in {self.folder}; leave it out to begin anew"
            )
        if self.found() and not self.resume:
            raise FedgftError(
                f"--out {self.folder.parent}: holds the checkpoints of an interrupted run; "
                f"--resume goes on from there, or delete its folder {self.folder.name}"
            )

    def clear(self) -> None:
        """After the results are written: those of this run. The first one goes last: if we are
        killed on the way, --resume finds it, and makes the others again."""
        order = reversed(self._asked)
        shutil.rmtree(self.folder / STAGE, ignore_errors=True)
        for path in (*order, self.folder / ".lock"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # somebody has put something there
            self.folder.rmdir()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{ENDING}"


def _checksum(snapshot: Snapshot) -> int:
    """Of all of it: numbers are in the tree, too."""
    arrays = snapshot.arrays
    shapes = [(name, arrays[name].dtype.str, arrays[name].shape) for name in sorted(arrays)]
    check = zlib.crc32(json.dumps([snapshot.round, snapshot.tree, shapes]).encode())
    for name in sorted(arrays):
        check = zlib.crc32(np.ascontiguousarray(arrays[name]).data, check)
    return check


def model_key(model: Model, dataset: Dataset) -> str:
    """What a network is: its layers, and where it starts (a file of weights may have changed)."""
    size = {"features": dataset.features.shape[1], "classes": len(dataset.classes)}
    layers = model.name if model.linear else str(model.module(**size))
    start = hashlib.sha256(model.init(0, **size).tobytes()).hexdigest()
    return f"{layers} {model.shapes(**size)} {start}"


def run_key(
    federations: Sequence[Federation], model: Model, init: np.ndarray | None, *rest: Any
) -> str:
    """Of a simulation; `rest` is whatever else decides, in dataclasses, arrays and numbers."""
    digest = hashlib.sha256(model_key(model, federations[0].dataset).encode())
    for federation in {id(f): f for f in federations}.values():
        digest.update(data_hash(federation.dataset).encode())
        for array in (federation.rows, federation.offsets, federation.test, federation.keys,
                      federation.mean, federation.spread):  # fmt: skip
            digest.update(b"-" if array is None else array.tobytes())
    digest.update(b"" if init is None else np.ascontiguousarray(init).tobytes())
    digest.update(_described(rest).encode())
    made_by = (code_hash(), libraries(), version("torch"))
    return hashlib.sha256(digest.digest() + repr(made_by).encode()).hexdigest()[:32]


def _described(value: Any) -> str:
    """The same text in every process: a function's `repr` has its address in it."""
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_described, value))})"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{f.name}={_described(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({','.join(parts)})"
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', value)}"
    return repr(value)
