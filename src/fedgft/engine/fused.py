"""The fused executor: binary linear models on the CPU, all runs in one call a round.

Threads take contiguous shares of the units and never wait for each other inside a round; a
unit's result does not depend on who computes it, so neither does anything else.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fedgft.data.dataset import Dataset
from fedgft.engine import compiled, plain_kernels
from fedgft.engine.book import Book, Units
from fedgft.engine.task import Task
from fedgft.federated import Cohort
from fedgft.metrics import Tally
from fedgft.optim import Moments, Optimizer

if compiled.AVAILABLE:
    from fedgft.engine import kernels
else:
    kernels = plain_kernels

LANES = 16
PIECE = 8192  # rows measured in one go


@dataclass(frozen=True, eq=False)
class Table:
    """A data set as the kernel reads it: rows padded to whole cache lines, the bias as a column
    of ones, one row of zeros at the end; every row's (label, group) as one small number."""

    x: np.ndarray
    cell: np.ndarray
    label: np.ndarray  # cell -> 0 or 1

    @property
    def cells(self) -> int:
        return len(self.label)


_tables: "WeakKeyDictionary[Dataset, dict[str, Table]]" = WeakKeyDictionary()


def _table(dataset: Dataset, dtype: np.dtype) -> Table:
    """Made once for a data set and a precision."""
    known = _tables.setdefault(dataset, {})
    if dtype.name not in known:
        rows, features = dataset.features.shape
        line = 64 // dtype.itemsize
        width = -(-(features + 1) // line) * line
        x = _aligned((rows + 1, width), dtype)
        x[:rows, :features] = dataset.features
        x[:rows, features] = 1
        groups = len(dataset.group_names) + 1
        cell = np.empty(rows + 1, dtype=np.int32)
        cell[:rows] = dataset.labels * groups + np.where(
            dataset.groups < 0, groups - 1, dataset.groups
        )
        cell[rows] = 2 * groups  # the row of zeros: weight and price zero
        label = np.repeat(np.array([0, 1, 0], dtype), (groups, groups, 1))
        known[dtype.name] = Table(x, cell, label)
    return known[dtype.name]


def _aligned(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    size = shape[0] * shape[1] * dtype.itemsize
    raw = np.zeros(size + 64, dtype=np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size].view(dtype).reshape(shape)


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fedgft")


if hasattr(os, "register_at_fork"):  # a forked process has none of these threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def _pieces(units: Units) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Long units cut at fixed places, so that threads can share them: (owner, low, high)."""
    count = np.maximum(1, -(-units.sizes // PIECE))
    owner = np.repeat(np.arange(len(units)), count)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    low = units.low[owner] + number * PIECE
    return owner, low, np.minimum(low + PIECE, units.high[owner])


class Fused:
    """Parameters are blocks in the order of nn.Linear(features, 2): weights, then biases."""

    name = "fused"

    def __init__(self, book: Book, optimizer: Optimizer, *, dtype: str, threads: int) -> None:
        self.book, self.optimizer, self.threads = book, optimizer, threads
        self.dtype = np.dtype(dtype)
        self.table = _table(book.dataset, self.dtype)
        self.features = book.dataset.features.shape[1]
        self.mean, self.inverse = book.scaling(self.table.x.shape[1], self.dtype)
        self._moments: Moments | None = None

    def place(self, params: np.ndarray) -> np.ndarray:
        return np.array(params, dtype=self.dtype)

    def fetch(self, block: np.ndarray) -> np.ndarray:
        return block

    @property
    def trained(self) -> int:
        return 2 * (self.features + 1)

    @property
    def least(self) -> int:
        return 1

    @property
    def wave(self) -> None:
        return None

    def local(self) -> np.ndarray:
        return np.empty(0, np.int64)

    def stored(self, units: int, width: int) -> np.ndarray:
        return np.zeros((units, width), self.dtype)

    def out(self, stored: np.ndarray, at: np.ndarray) -> np.ndarray:
        return stored[at]

    def back(self, stored: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        stored[at] = values

    def tensor(self, array: np.ndarray, host: bool) -> np.ndarray:
        return array

    def park(self, block: np.ndarray) -> np.ndarray:
        return block

    def zeros(self, units: int) -> np.ndarray:
        return np.zeros((units, self.table.x.shape[1]), self.dtype)

    def column(self, values: np.ndarray) -> np.ndarray:
        return values.astype(self.dtype)[:, None]

    def where(self, chosen: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return np.where(chosen, first, second)

    def moments(self, units: int, *, brief: bool = False) -> Moments:
        """Zeros, in memory that is used again from round to round: new pages are dear."""
        shape = (units, self.table.x.shape[1])
        if self._moments is None or self._moments.m.shape != shape:
            self._moments = self._new_moments(units)
        self._moments.forget("reset")
        return self._moments

    def _new_moments(self, units: int) -> Moments:
        """m and v are apart even where they are short, for the reason given in `kernels._apart`."""
        both = np.zeros((2, units + compiled.GAP // LANES, self.table.x.shape[1]), self.dtype)
        return Moments(both[0, :units], both[1, :units], np.zeros((units, 2), np.int64))

    def recall(self, kept: Moments, at: np.ndarray) -> Moments:
        """A copy of some units' moments."""
        moments = self._new_moments(len(at))
        moments.m[:], moments.v[:], moments.steps[:] = kept.m[at], kept.v[at], kept.steps[at]
        return moments

    def train(self, task: Task, block: np.ndarray, moments: Moments) -> np.ndarray:
        """The clients' epochs, in place: `block` (u, p) starts them and holds where they end."""
        units, optimizer, table = task.units, self.optimizer, self.table
        moved = (float(optimizer.momentum), float(optimizer.second), float(optimizer.epsilon))
        weight = self._cells(task.weights)
        price = self._cells(task.price[..., 1] - task.price[..., 0])
        none = np.empty((0, 0), self.dtype)
        drift, raw = (none if a is None else a for a in (task.drift, task.gradients))
        origin = block if task.origin is None else task.origin
        arguments = (
            table.x, table.cell, table.label, self.book.rows, units.run, units.low, units.high,
            np.array(task.seeds, order="C"), task.batch_size, task.most,
            float(task.mu),  # numbers of one type, so that the kernel is compiled once
            drift, raw, origin, block, moments.m, moments.v, moments.steps, weight, price,
            self.mean, self.inverse, self.features, task.lr, float(optimizer.decoupled),
            optimizer.adaptive, moved,
        )  # fmt: skip
        self._share(units.sizes, lambda begin, end: kernels.train(begin, end, LANES, *arguments))
        return block

    def measure(self, units: Units, block: np.ndarray, which: np.ndarray) -> Tally:
        """Sums over each unit's rows under model `block[which[i]]`."""
        owner, low, high = _pieces(units)
        sums = np.zeros((len(owner), self.table.cells, 2))
        arguments = (
            self.table.x, self.table.cell, self.book.rows, units.run[owner], low, high,
            block, which[owner], self.mean, self.inverse, self.features, sums,
        )  # fmt: skip
        self._share(high - low, lambda begin, end: kernels.measure(begin, end, LANES, *arguments))
        sums = np.add.reduceat(sums, np.searchsorted(owner, np.arange(len(units))), axis=0)
        diverged = ~np.all(np.isfinite(block), axis=1)
        sums[diverged[which]] = np.nan  # the kernel clips NaN to a score
        score, positive = np.moveaxis(sums[:, :-1].reshape(*units.count.shape, 2), -1, 0)
        return Tally(
            units.count,
            np.stack((units.count - score, score), axis=-1),
            np.stack((units.count - positive, positive), axis=-1),
        )

    def mix(
        self, coefficients: np.ndarray, block: np.ndarray, params: np.ndarray, cohort: Cohort,
        total: None = None,
    ) -> np.ndarray:  # fmt: skip
        """sum_k c_k (model_k - params) of each run, in a fixed order and in double precision."""
        assert total is None  # there is one wave
        mixed = np.empty(params.shape)
        kernels.combine(coefficients, block, cohort.bounds, mixed)
        mixed -= cohort.sum(coefficients)[:, None] * params
        return mixed.astype(self.dtype)

    def _cells(self, table: np.ndarray) -> np.ndarray:
        """(u, 2, k) -> (u, cells), and zero for the row of zeros."""
        flat = np.zeros((len(table), self.table.cells), self.dtype)
        flat[:, :-1] = table.reshape(len(table), -1)
        return flat

    def _share(self, sizes: np.ndarray, work: Callable[[int, int], Any]) -> None:
        """Contiguous shares with about equal numbers of rows, one a thread."""
        load = np.cumsum(sizes + 64)  # a unit costs something even when it is small
        cuts = np.searchsorted(load, load[-1] * np.arange(1, self.threads) / self.threads)
        edges = [0, *cuts.tolist(), len(sizes)]
        shares = [(a, b) for a, b in pairwise(edges) if b > a]
        if len(shares) == 1:
            work(*shares[0])
        else:
            list(_pool(self.threads).map(lambda share: work(*share), shares))
