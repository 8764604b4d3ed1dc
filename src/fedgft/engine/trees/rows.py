"""The rows of a simulation as bins: what all trees of all runs read.

Row numbers are positions in `RowIndex.rows`: for each federation the clients' rows, then its test
rows. Bins are agreed from the training rows of each federation.
"""

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from fedgft.data.dataset import Dataset
from fedgft.engine.plan import RowIndex, derive_seeds
from fedgft.engine.trees.bins import Bins, agree_on_bins
from fedgft.engine.trees.kernels import Columns
from fedgft.errors import FedgftError
from fedgft.forest import WORD
from fedgft.models import Trees

FOLD_KEY = 0xF01D
DRAW_KEY = 0x5AB5
MAX_PLACES = 2**16  # bins of all columns that 16 bits can tell apart


@dataclass(frozen=True, eq=False)
class BinnedRows:
    """The rows of all federations as bins, and the fold of each training row of each run.

    Parameters
    ----------
    index
        Rows of every client.
    model
        Bins and folds.
    seeds
        (run,) the seeds that divide rows into folds.
    threads
        The number of threads that read the columns.
    """

    index: RowIndex
    model: Trees
    seeds: np.ndarray
    threads: int

    @cached_property
    def federation(self) -> np.ndarray:
        """The number of each run's federation among the different ones, (run,)."""
        return np.unique(self.index.first, return_inverse=True)[1]

    @cached_property
    def ranges(self) -> np.ndarray:
        """First training row, first test row and end of each run's federation, (run, 3)."""
        index = self.index
        low = index.starts[index.first]
        return np.stack((low, index.test.low, index.test.high), axis=1)

    @cached_property
    def label(self) -> np.ndarray:
        """The class of each row."""
        return self.index.dataset.labels[self.index.rows]

    @cached_property
    def cell(self) -> np.ndarray:
        """The cell of each row by label and group; the last group is "not recorded"."""
        data = self.index.dataset
        groups = data.num_cells + 1
        return self.label * groups + data.cells[self.index.rows] % groups

    @cached_property
    def weight(self) -> np.ndarray:
        """The weight of each row; empty if all rows count the same."""
        weights = self.index.row_weights
        return np.empty(0) if weights is None else weights[self.index.rows]

    @cached_property
    def training_weight(self) -> np.ndarray:
        """The same with mean 1 over the training rows of each federation.

        Penalties on leaves then mean the same for weights on any scale.
        """
        weight = self.weight.copy()
        for f in np.unique(self.federation) if len(weight) else ():
            low, test, high = self.ranges[int(np.argmax(self.federation == f))]
            weight[low:high] /= weight[low:test].mean()
        return weight

    @cached_property
    def client(self) -> np.ndarray:
        """The number of each row's client; 0 for test rows."""
        out = np.zeros(len(self.index.rows), np.int64)
        for f in np.unique(self.federation):
            run = int(np.argmax(self.federation == f))
            edges = self.index.starts[self.index.first[run] + np.arange(self.index.num_clients + 1)]
            out[edges[0] : edges[-1]] = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        return out

    @cached_property
    def no_client(self) -> np.ndarray:
        """Zeros in place of `client`, where weights and prices are the same for all clients."""
        return np.zeros(len(self.index.rows), np.int64)

    @cached_property
    def fields(self) -> np.ndarray:
        """The columns that trees ask about, for all rows of the data set."""
        return read_fields(self.index.dataset)

    @cached_property
    def is_categorical(self) -> np.ndarray:
        """Which columns hold categories, (f,) bool."""
        encoder = self.index.dataset.encoder
        if encoder is None:
            return np.zeros(self.fields.shape[1], bool)
        return np.array(encoder.are_categorical)

    @cached_property
    def level_counts(self) -> tuple[int, ...]:
        """The number of levels of each column; 0 for numbers."""
        encoder = self.index.dataset.encoder
        return encoder.level_counts if encoder else (0,) * self.fields.shape[1]

    @property
    def words(self) -> int:
        """Words of a set of categories, see `Forest.categories`."""
        return -(-max(self.level_counts, default=0) // WORD)

    @cached_property
    def bins(self) -> list[Bins]:
        """The bins of each federation."""
        return self._binned[0]

    @cached_property
    def columns(self) -> Columns:
        """The bins of all rows."""
        return self._binned[1]

    @cached_property
    def _binned(self) -> tuple[list[Bins], Columns]:
        index = self.index
        rows = len(index.rows)
        width = self.fields.shape[1]
        codes = np.empty((width, rows), np.uint8)
        found = []
        for f in range(int(self.federation.max()) + 1):
            low, test, high = self.ranges[int(np.argmax(self.federation == f))]
            training = index.rows[low:test]
            model = self.model
            limits = {"most": model.bins, "least_rows": model.min_bin_rows}
            bins = agree_on_bins(
                self.fields, training, self.level_counts, threads=self.threads, **limits
            )
            bins.encode(self.fields, index.rows[low:high], codes[:, low:high], self.threads)
            found.append(bins)
        offsets = np.stack([bins.offsets for bins in found])
        kind = np.uint16 if offsets.max() <= MAX_PLACES else np.uint32
        places = np.empty((rows, width), kind)
        for f, bins in enumerate(found):
            low, _, high = self.ranges[int(np.argmax(self.federation == f))]
            places[low:high] = codes[:, low:high].T + bins.offsets[:-1].astype(kind)
        return found, Columns(places, codes, offsets, self.is_categorical)

    @cached_property
    def folds(self) -> np.ndarray:
        """The fold of each training row, flat: those of run 0, then those of run 1, ..."""
        number = max(self.model.folds, 1)
        parts = [self._hash(run, FOLD_KEY) % np.uint64(number) for run in range(len(self.seeds))]
        return np.concatenate(parts).astype(np.uint8)

    @cached_property
    def fold_starts(self) -> np.ndarray:
        """What to add to a row number to get its place in `folds`, (run,)."""
        sizes = self.ranges[:, 1] - self.ranges[:, 0]
        return np.cumsum(sizes) - sizes - self.ranges[:, 0]

    def draws(self, run: int, tree: int) -> np.ndarray:
        """A number from 0 to 1 for each training row of a run; `subsample` keeps the small ones."""
        if self.model.subsample >= 1:
            return np.empty(0)
        return self._hash(run, DRAW_KEY + tree) / 2.0**64

    def _hash(self, run: int, key: int) -> np.ndarray:
        """A random number per training row, by row of the data set: clients do not matter."""
        low, test, _ = self.ranges[run]
        return derive_seeds(self.seeds[run], key, self.index.rows[low:test])


_fields: "WeakKeyDictionary[Dataset, np.ndarray]" = WeakKeyDictionary()


def read_fields(dataset: Dataset) -> np.ndarray:
    """Return the columns that trees ask about, (n, f): numbers, indices of categories, or NaN."""
    if dataset.images or dataset.features.ndim != 2:
        text = "trees need the columns of a table, not images: use resnet18 or your own network"
        raise FedgftError(text, field="model", kind="unsupported")
    if dataset.center is not None or dataset.scale is not None:
        text = "holds a data set that was `standardized`: trees read its columns as they are"
        raise FedgftError(text, field="federations", kind="conflict")
    if dataset not in _fields:
        encoder = dataset.encoder
        features = dataset.features
        _fields[dataset] = features if encoder is None else encoder.to_fields(features)
    return _fields[dataset]
