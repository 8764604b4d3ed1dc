"""Which rows belong to whom, for all runs in one array of row numbers."""

from dataclasses import dataclass

import numpy as np

from fedgft.data.dataset import Dataset, Federation
from fedgft.federated import Cohort
from fedgft.types import FedgftError


@dataclass(frozen=True)
class Units:
    """Pieces of work: unit i is rows `low[i]:high[i]` of the book, as run `run[i]` sees them."""

    run: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def __len__(self) -> int:
        return len(self.run)

    @property
    def sizes(self) -> np.ndarray:
        return self.high - self.low

    def __add__(self, other: "Units") -> "Units":
        return Units(*(np.concatenate(pair) for pair in zip(self._all(), other._all(), strict=True)))

    def _all(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.run, self.low, self.high


@dataclass(frozen=True, eq=False)
class Book:
    """Federations that several runs share are stored once."""

    federations: list[Federation]  # one a run
    rows: np.ndarray  # int32
    starts: np.ndarray  # the offsets of all federations, moved to where their rows begin
    first: np.ndarray  # run -> its first entry in starts
    test: Units

    @property
    def dataset(self) -> Dataset:
        return self.federations[0].dataset

    @property
    def runs(self) -> int:
        return len(self.federations)

    @property
    def num_clients(self) -> int:
        return self.federations[0].num_clients

    def clients(self, cohort: Cohort) -> Units:
        at = self.first[cohort.run] + cohort.client
        return Units(cohort.run, self.starts[at], self.starts[at + 1])

    @property
    def sizes(self) -> np.ndarray:
        """(run, client)."""
        return np.stack([f.sizes for f in self.federations])

    def counts(self) -> np.ndarray:
        """Rows of each client by label and group (the last: not recorded): (run, client, c, k)."""
        data, known = self.dataset, {}
        groups = len(data.group_names) + 1
        cell = data.labels * groups + np.where(data.groups < 0, groups - 1, data.groups)
        cells = len(data.classes) * groups
        for f in self.federations:
            if id(f) not in known:
                client = np.repeat(np.arange(f.num_clients), f.sizes)
                flat = np.bincount(client * cells + cell[f.rows], minlength=f.num_clients * cells)
                known[id(f)] = flat.reshape(f.num_clients, len(data.classes), groups)
        return np.stack([known[id(f)] for f in self.federations])

    def keys(self, cohort: Cohort) -> np.ndarray:
        """What names each unit's client in the random numbers."""
        if all(f is self.federations[0] for f in self.federations):
            return self.federations[0].keys[cohort.client]
        return np.stack([f.keys for f in self.federations])[cohort.run, cohort.client]

    def scaling(self, width: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Each run's mean and 1 / spread, padded to `width` with 0 and 1."""
        mean, inverse = np.zeros((self.runs, width), dtype), np.ones((self.runs, width), dtype)
        for r, federation in enumerate(self.federations):
            if federation.mean is not None and federation.spread is not None:
                mean[r, : len(federation.mean)] = federation.mean
                inverse[r, : len(federation.spread)] = 1.0 / federation.spread
        return mean, inverse


def open_book(federations: list[Federation]) -> Book:
    if len({id(f.dataset) for f in federations}) != 1:
        raise FedgftError("all runs of one simulation must share one data set")
    if len({f.num_clients for f in federations}) != 1:
        raise FedgftError("all runs of one simulation must have the same number of clients")
    rows, starts, first, test, at, entries = [], [], {}, {}, 0, 0
    for federation in federations:
        if id(federation) in first:
            continue
        first[id(federation)] = entries
        starts.append(federation.offsets + at)
        entries += len(federation.offsets)
        at += len(federation.rows)
        test[id(federation)] = (at, at + len(federation.test))
        at += len(federation.test)
        rows += [federation.rows, federation.test]
    bounds = np.array([test[id(f)] for f in federations], dtype=np.int64)
    return Book(
        federations=federations,
        rows=np.concatenate(rows).astype(np.int32, copy=False),
        starts=np.concatenate(starts),
        first=np.array([first[id(f)] for f in federations]),
        test=Units(np.arange(len(federations)), bounds[:, 0], bounds[:, 1]),
    )
