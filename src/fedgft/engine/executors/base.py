"""The interface of executors: the task of a round, and where per-client arrays are stored."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fedgft.algorithms import Cohort
from fedgft.engine.plan import Units, draw_batches
from fedgft.metrics.metric import Price, Weights
from fedgft.optimizers import Moments
from fedgft.sums import Sums


@dataclass(frozen=True)
class Task:
    """Local training of some units: the data, the order of rows and the method.

    A method affects training only through `weights`, `labels`, `price`, `curve`, `mu` and `drift`.
    Where the rows of the data set have weights, the executor multiplies a row's gradient by its
    weight, and the tables are divided by the mean weight of each unit.
    `origin`, `drift` and `gradients` are arrays of the executor; all other arrays are NumPy arrays.

    Attributes
    ----------
    units
        The rows of each unit.
    seeds
        Seeds of the order of rows, (u, epochs), uint64.
    noise
        Seeds of randomness inside the module, (u, epochs), uint64.
    batch_size, min_batch
        Rows per batch; a last batch with fewer than `min_batch` rows is dropped.
    max_rows
        Largest number of rows per epoch.
    lr
        Learning rates, (u,).
    weights
        Weight of a row by label and group, (u, c, k).
    price
        Price of each score of a row by label and group, (u, c, k, c).
    labels
        The distribution over the classes that a row is fitted to, by label and group, (u, c, k, c);
        None means the row's own label.
    curve
        A price of the positive one of two scores that depends on the score itself, by label and
        group and by the bin of the score, (u, c, k, bins); None means zero.
    mu
        Weight of the proximal term mu (params - origin).
    origin
        Center of the proximal term, (u, p); None means the model at the start of training.
    drift
        Vector that is added to every gradient, (u, w); None means zero.
    gradients
        Accumulates the sum of the uncorrected gradients, (u, w); used only with a drift.
    """

    units: Units
    seeds: np.ndarray
    noise: np.ndarray
    batch_size: int
    max_rows: int
    min_batch: int
    lr: np.ndarray
    weights: Weights
    price: Price
    labels: np.ndarray | None = None
    curve: np.ndarray | None = None
    mu: float = 0.0
    origin: Any = None
    drift: Any = None
    gradients: Any = None

    def part(self, at: slice) -> "Task":
        """Return the task of the units `at`; the executor's arrays are not sliced."""
        by_unit = ["units", "seeds", "noise", "lr", "weights", "price"]
        by_unit += [name for name in ("labels", "curve") if getattr(self, name) is not None]
        return replace(self, **{name: getattr(self, name)[at] for name in by_unit})

    def soft_labels(self) -> np.ndarray:
        """Return the distribution over the classes that rows are fitted to, (u, c, k, c)."""
        if self.labels is not None:
            return self.labels
        one_hot = np.eye(self.weights.shape[1])[None, :, None, :]
        return np.broadcast_to(one_hot, (*self.weights.shape, self.weights.shape[1]))

    def epoch(self, number: int, price: Price, origin: Any) -> "Task":
        """Return the task of one epoch, with new prices and a new center of the proximal term."""
        at = slice(number, number + 1)
        seeds = self.seeds[:, at]
        return replace(self, seeds=seeds, noise=self.noise[:, at], price=price, origin=origin)

    def batches(self, rows: np.ndarray, unit: int) -> list[list[np.ndarray]]:
        """Return the row numbers of one unit by epoch and batch; `rows` is `RowIndex.rows`."""
        unit_rows = rows[self.units.low[unit] : self.units.high[unit]]
        limits = {"most": self.max_rows, "least": self.min_batch}
        return [
            draw_batches(unit_rows, seed=int(seed), batch_size=self.batch_size, **limits)
            for seed in self.seeds[unit]
        ]

    @property
    def steps(self) -> np.ndarray:
        """Local steps of each unit, (u,)."""
        full, rest = np.divmod(np.minimum(self.units.sizes, self.max_rows), self.batch_size)
        return (full + (rest >= self.min_batch) * (rest > 0)) * self.seeds.shape[1]


@dataclass(frozen=True)
class ModelSpec:
    """The properties of an executor's model that the round loop needs.

    Attributes
    ----------
    trained
        Number of trained parameters, which come first; buffers (running means) follow.
    gradient
        Length w of a gradient.
    norms
        Positions of normalization layers, which clients may keep (FedBN).
    min_batch
        Smallest number of rows that a batch may have.
    chunk
        Number of units that are trained at a time; None means all.
    """

    trained: int
    gradient: int
    norms: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    min_batch: int = 1
    chunk: int | None = None


@dataclass(frozen=True)
class Buffers:
    """Creates and copies arrays with one row per unit or client.

    This base class uses NumPy arrays; executors may store them elsewhere.
    """

    dtype: Any

    def zeros(self, rows: int, width: int) -> Any:
        """Return an array of zeros to compute with."""
        return np.zeros((rows, width), self.dtype)

    def storage(self, rows: int, width: int) -> Any:
        """Return zeros for the clients' state between rounds, which may be in host memory."""
        return self.zeros(rows, width)

    def read(self, stored: Any, at: np.ndarray) -> Any:
        """Return a copy of the rows `at` of a storage array, to compute with."""
        return stored[at]

    def write(self, stored: Any, at: np.ndarray, values: Any) -> None:
        """Replace the rows `at` of a storage array by `values`."""
        stored[at] = values

    def park(self, block: Any) -> Any:
        """Move models to slower memory, if there is one, until their coefficients are known."""
        return block

    def restore(self, array: np.ndarray, on_host: bool) -> Any:
        """Return an array of a snapshot on the device, or in host memory with `on_host`."""
        return array


@runtime_checkable
class Executor(Protocol):
    """Trains and measures models.

    A block is an array of the executor with the axes (unit or run, parameter).
    """

    name: str  # for reports

    buffers: Buffers

    @property
    def spec(self) -> ModelSpec:
        """Sizes of the model."""

    def to_device(self, params: np.ndarray) -> Any:
        """A block from parameters in the order of `models.named_tensors`."""

    def to_host(self, block: Any) -> np.ndarray:
        """Parameters in the order of `models.named_tensors` from a block."""

    def to_gradient(self, difference: Any) -> Any:
        """The difference of two blocks in the coordinates of gradients, (u, w)."""

    def train(self, task: Task, block: Any, moments: Moments | None) -> Any:
        """Train each unit's model, in place or not, and return the block of trained models.

        Parameters
        ----------
        task
            The units and what they do.
        block
            The model that each unit starts from, (u, p); it may be overwritten.
        moments
            Moments of the units' optimizers, changed in place; None means that they start from
            zero and are discarded after training.
        """

    def measure(self, units: Units, block: Any, which: np.ndarray) -> Sums:
        """Count rows and sum scores and decisions of each unit, by label and group.

        Parameters
        ----------
        units
            The rows to measure.
        block, which
            Unit i is measured with the model `block[which[i]]`.

        Returns
        -------
        Sums with a leading axis of units; NaN where a model has diverged.
        """

    def report(
        self, units: Units, block: Any, which: np.ndarray, *, bins: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what `ClientReports` holds besides sums, by label and group of each unit.

        Parameters
        ----------
        units, block, which
            As in `measure`.
        bins
            The number of bins of the histograms; 0: no histograms.

        Returns
        -------
        losses, logits
            The summed cross-entropy, and the summed logit of the second class relative to the
            first, (u, c, k).
        histograms
            The number of rows by bin of the score of the second class, (u, c, k, bins).
        """

    def mix(
        self, coefficients: np.ndarray, block: Any, params: Any, cohort: Cohort, total: Any = None
    ) -> Any:
        """Return the update sum_k c_k (model_k - params) of each run, summed in a fixed order.

        Parameters
        ----------
        coefficients
            c_k, (u,); they need not sum to one.
        block
            The models, (u, p), or other vectors per unit.
        params
            The vectors that are subtracted, (run, p).
        cohort
            The run of each unit.
        total
            The result for earlier chunks, to which this one is added; None for the first.
        """
