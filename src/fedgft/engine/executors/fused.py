"""The fused executor: binary linear models on the CPU, all runs in one kernel call per round.

Threads take contiguous shares of the units and do not wait for each other inside a round. The
result of a unit does not depend on the thread that computes it, so results do not depend on the
number of threads.
"""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fedgft.algorithms import Algorithm, Cohort
from fedgft.compiled import NUMBA_AVAILABLE
from fedgft.data.dataset import Dataset
from fedgft.engine.executors import numpy_kernels
from fedgft.engine.executors.base import Buffers, ModelSpec, Task
from fedgft.engine.executors.numpy_kernels import (
    BLOCK,
    VECTOR_GAP,
    Array,
    LocalOptimizer,
    Measurement,
    Table,
    Training,
)
from fedgft.engine.plan import RowIndex, Units
from fedgft.engine.threads import share_work
from fedgft.models import Model
from fedgft.optimizers import Moments
from fedgft.settings import Settings
from fedgft.sums import Sums

if NUMBA_AVAILABLE:
    from fedgft.engine.executors import numba_kernels as kernels
else:
    kernels = numpy_kernels

MAX_PIECE = 8192  # largest number of rows that one thread measures at a time
CACHE_LINE = 64  # bytes
UNIT_COST = 64  # the fixed cost of a unit, in rows


class FusedExecutor:
    """Trains binary linear models; blocks have the parameter order of nn.Linear(features, 2).

    Parameters
    ----------
    index
        Rows of every client.
    settings
        The local optimizer, the precision, and the number of threads that share the units of a
        round; results do not depend on the number of threads.
    """

    name = "fused"

    def __init__(self, index: RowIndex, settings: Settings) -> None:
        optimizer = settings.optimizer
        self.threads = settings.threads
        self.dtype = np.dtype(settings.dtype)
        self.table = _build_table(index, self.dtype)
        data = index.dataset
        self.axis = data.axis
        self.cells = len(data.classes) * (data.num_cells + 1) + 1  # and the row of zeros
        rates = (optimizer.decoupled, optimizer.momentum, optimizer.second, optimizer.epsilon)
        self.rule = LocalOptimizer(
            optimizer.adaptive, *map(float, rates)
        )  # compiled for plain floats
        self.buffers = Buffers(self.dtype)
        self.spec = ModelSpec(trained=2 * (self.table.bias + 1), gradient=self.table.x.shape[1])
        self._scratch: Moments | None = None

    def to_device(self, params: np.ndarray) -> np.ndarray:
        """A copy in the executor's precision."""
        return np.array(params, dtype=self.dtype)

    def to_host(self, block: np.ndarray) -> np.ndarray:
        """The block itself."""
        return block

    def to_gradient(self, difference: np.ndarray) -> np.ndarray:
        """Return half of the difference W1 - W0 of the two weight rows, (u, width), bias last.

        Such a vector g represents the gradient g with respect to W1 and -g with respect to W0.
        """
        bias = self.table.bias
        out = self.buffers.zeros(len(difference), self.spec.gradient)
        out[:, :bias] = difference[:, bias : 2 * bias] - difference[:, :bias]
        out[:, bias] = difference[:, 2 * bias + 1] - difference[:, 2 * bias]
        return out / 2

    def train(self, task: Task, block: np.ndarray, moments: Moments | None) -> np.ndarray:
        """Train in place: `block` (u, p) holds the initial models and then the trained models."""
        units = task.units
        empty = np.empty((0, 0), self.dtype)
        scratch = self._copy_moments(moments, len(units))
        work = Training(
            run=units.run,
            low=units.low,
            high=units.high,
            seeds=np.array(task.seeds, order="C"),
            batch_size=task.batch_size,
            max_rows=task.max_rows,
            lr=task.lr,
            weight=self._by_cell(task.weights),
            label=self._by_cell(task.soft_labels()[..., 1]),
            price=self._by_cell(task.price[..., 1] - task.price[..., 0]),
            curve=self._curve_by_cell(task.curve),
            mu=float(task.mu),
            drift=empty if task.drift is None else task.drift,
            gradients=empty if task.gradients is None else task.gradients,
            origin=block if task.origin is None else task.origin,
            block=block,
            m=scratch.m,
            v=scratch.v,
            steps=scratch.steps,
            rule=self.rule,
        )
        self._share(kernels.train, units.sizes, work)
        if moments is not None:
            moments[:] = scratch
        return block

    def measure(self, units: Units, block: np.ndarray, which: np.ndarray) -> Sums:
        """Return sums over the rows of each unit i under model `block[which[i]]`.

        The sums are NaN where the model has diverged.
        """
        owner, low, high = _split_units(units)
        sums = np.zeros((len(owner), self.cells, 2))
        work = Measurement(
            run=units.run[owner], low=low, high=high, block=block, which=which[owner], sums=sums
        )
        self._share(kernels.measure, high - low, work)
        sums = np.add.reduceat(sums, np.searchsorted(owner, np.arange(len(units))), axis=0)
        diverged = ~np.all(np.isfinite(block), axis=1)
        sums[diverged[which]] = np.nan  # the kernel turns NaN parameters into finite scores
        score, positive = np.moveaxis(sums[:, :-1].reshape(*units.count.shape, 2), -1, 0)
        return Sums(
            units.count,
            np.stack((units.count - score, score), axis=-1),
            np.stack((units.count - positive, positive), axis=-1),
            axis=self.axis,
        )

    def report(
        self, units: Units, block: np.ndarray, which: np.ndarray, *, bins: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return summed losses, summed logits and histograms by label and group of each unit."""
        owner, low, high = _split_units(units)
        sums = np.zeros((len(owner), self.cells, 2 + bins))
        work = Measurement(
            run=units.run[owner], low=low, high=high, block=block, which=which[owner], sums=sums
        )
        self._share(kernels.report, high - low, work)
        sums = np.add.reduceat(sums, np.searchsorted(owner, np.arange(len(units))), axis=0)
        diverged = ~np.all(np.isfinite(block), axis=1)
        sums[diverged[which]] = np.nan
        found = sums[:, :-1].reshape(*units.count.shape, 2 + bins)
        return found[..., 0], found[..., 1], found[..., 2:]

    def mix(
        self, coefficients: Array, block: Array, params: Array, cohort: Cohort, total: None = None
    ) -> Array:
        """Return sum_k c_k (model_k - params) of each run, in fixed order and double precision."""
        assert total is None  # all units are one chunk
        mixed = np.empty(params.shape)
        kernels.combine(coefficients, block, cohort.bounds, mixed)
        mixed -= cohort.sum(coefficients)[:, None] * params
        return mixed.astype(self.dtype)

    def _copy_moments(self, moments: Moments | None, units: int) -> Moments:
        """Copy the moments to memory that is reused between rounds, which avoids page faults.

        m and v are kept apart for the reason given in `numba_kernels._allocate_vectors`.
        """
        if self._scratch is None or len(self._scratch.m) != units:
            gap = VECTOR_GAP // BLOCK
            both = np.zeros((2, units + gap, self.spec.gradient), self.dtype)
            steps = np.zeros((units, 2), np.int64)
            self._scratch = Moments(both[0, :units], both[1, :units], steps)
        if moments is None:
            self._scratch.clear("reset")
        else:
            self._scratch[:] = moments
        return self._scratch

    def _by_cell(self, values: np.ndarray) -> np.ndarray:
        """Flatten (u, 2, k) to (u, cells), with the value 0 in the cell of the row of zeros."""
        flat = np.zeros((len(values), self.cells), self.dtype)
        flat[:, :-1] = values.reshape(len(values), -1)
        return flat

    def _curve_by_cell(self, curve: np.ndarray | None) -> np.ndarray:
        """Flatten (u, 2, k, bins) to (u, cells, bins), as `_by_cell`; None: no bins."""
        if curve is None:
            return np.zeros((1, self.cells, 0), self.dtype)
        flat = np.zeros((len(curve), self.cells, curve.shape[-1]), self.dtype)
        flat[:, :-1] = curve.reshape(len(curve), -1, curve.shape[-1])
        return flat

    def _share(self, kernel: Any, sizes: Array, work: Training | Measurement) -> None:
        """Run a kernel in threads, on contiguous units with about equal total sizes."""

        def call(begin: int, end: int) -> None:
            kernel(begin, end, BLOCK, self.table, work)

        share_work(call, sizes + UNIT_COST, self.threads, least=0)


def why_not_fused(
    index: RowIndex, model: Model, algorithm: Algorithm, settings: Settings
) -> str | None:
    """Return why the fused kernel cannot run this simulation exactly, or None if it can.

    The kernel trains W1 - W0. This is exact if W1 + W0 changes only by weight decay outside the
    gradient.
    """
    data = index.dataset
    optimizer = settings.optimizer
    decay = optimizer.weight_decay > 0
    decoupled = optimizer.decoupled > 0
    apart = "moves the two logits apart"
    pulls_back = algorithm.correction.mu > 0 or algorithm.correction.learns_from == "move"
    reasons = {
        f"the model {model.name!r} is not one linear layer": not model.linear,
        "the features are not a table": data.features.ndim != 2,
        f"the label has {len(data.classes)} classes, not two": len(data.classes) != 2,
        f"it runs on the CPU, not on {settings.device}": settings.device != "cpu",
        "it reads rows as they are": settings.augment != "none",
        "the model has no BatchNorm that clients could keep": settings.norms == "local",
        "it computes in fp32 or fp64": settings.precision == "bf16",
        f"weight decay inside the gradient of {optimizer.rule} {apart}": decay and not decoupled,
        f"weight decay together with a proximal term {apart}": decay and pulls_back,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


_stored: WeakKeyDictionary[Dataset, dict[str, tuple[Array, ...]]] = WeakKeyDictionary()


def _build_table(index: RowIndex, dtype: np.dtype) -> Table:
    """Return the data in the kernel's format; rows are stored once per data set and precision.

    Rows are padded with zeros to whole cache lines, so that the kernel reads full vectors.
    """
    dataset = index.dataset
    rows, features = dataset.features.shape
    groups = dataset.num_cells + 1
    known = _stored.setdefault(dataset, {})
    if dtype.name not in known:
        line = CACHE_LINE // dtype.itemsize
        width = -(-(features + 1) // line) * line
        x = _aligned_zeros((rows + 1, width), dtype)
        x[:rows, :features] = dataset.features
        x[:rows, features] = 1
        cell = np.empty(rows + 1, dtype=np.int32)
        cell[:rows] = dataset.labels * groups + dataset.cells % groups  # group -1 becomes the last
        cell[rows] = 2 * groups  # the row of zeros: weight and price zero
        given = index.row_weights
        weight = np.empty(0) if given is None else np.append(given, 0.0)
        known[dtype.name] = (x, cell, weight.astype(dtype))
    x, cell, weight = known[dtype.name]
    mean, inverse = index.scaling(x.shape[1], dtype)
    return Table(x, cell, index.rows, mean=mean, inverse=inverse, bias=features, weight=weight)


def _aligned_zeros(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Zeros that begin at a cache line."""
    size = shape[0] * shape[1] * dtype.itemsize
    raw = np.zeros(size + CACHE_LINE, dtype=np.uint8)
    skip = -raw.ctypes.data % CACHE_LINE
    return raw[skip : skip + size].view(dtype).reshape(shape)


def _split_units(units: Units) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut long units into pieces that threads can share: (unit, low, high) of each piece."""
    count = np.maximum(1, -(-units.sizes // MAX_PIECE))
    owner = np.repeat(np.arange(len(units)), count)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    low = units.low[owner] + number * MAX_PIECE
    return owner, low, np.minimum(low + MAX_PIECE, units.high[owner])
