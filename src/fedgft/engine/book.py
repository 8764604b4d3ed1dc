"""Which rows belong to whom, for all runs in one array of row numbers."""

from dataclasses import dataclass

import numpy as np

from fedgft.data.dataset import Dataset, Federation
from fedgft.errors import FedgftError
from fedgft.federated import Cohort


@dataclass(frozen=True)
class Units:
    """Pieces of work: unit i is rows `low[i]:high[i]` of the book, as run `run[i]` sees them.

    `count` says how many of them have each label and group (the last: not recorded).
    """

    run: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: np.ndarray  # (u, c, k)

    def __len__(self) -> int:
        return len(self.run)

    def __getitem__(self, at: slice) -> "Units":
        return Units(*(part[at] for part in self._all()))

    @property
    def sizes(self) -> np.ndarray:
        return self.high - self.low

    def __add__(self, other: "Units") -> "Units":
        pairs = zip(self._all(), other._all(), strict=True)
        return Units(*(np.concatenate(pair) for pair in pairs))

    def _all(self) -> tuple[np.ndarray, ...]:
        return self.run, self.low, self.high, self.count


@dataclass(frozen=True, eq=False)
class Book:
    """Federations that several runs share are stored once."""

    federations: list[Federation]  # one a run
    rows: np.ndarray  # int32
    starts: np.ndarray  # the offsets of all federations, moved to where their rows begin
    first: np.ndarray  # run -> its first entry in starts
    counts: np.ndarray  # (entries of starts, c, k): of the client that begins there
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
        return Units(cohort.run, self.starts[at], self.starts[at + 1], self.counts[at])

    @property
    def sizes(self) -> np.ndarray:
        """(run, client)."""
        return np.stack([f.sizes for f in self.federations])

    def keys(self, cohort: Cohort) -> np.ndarray:
        """What names each unit's client in the random numbers."""
        edges = cohort.bounds
        own = [
            f.keys[cohort.client[edges[r] : edges[r + 1]]] for r, f in enumerate(self.federations)
        ]
        return np.concatenate(own)

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
    unique = list({id(f): f for f in federations}.values())
    lengths = np.array([[len(f.rows), len(f.test)] for f in unique])
    edges = np.concatenate(([0], np.cumsum(lengths)))  # client rows, test rows, client rows, ...
    number = {id(f): i for i, f in enumerate(unique)}
    which = np.array([number[id(f)] for f in federations])
    tests = [_counts(f.dataset, f.test, np.array([0, len(f.test)])) for f in unique]
    return Book(
        federations=federations,
        rows=np.concatenate([part for f in unique for part in (f.rows, f.test)], dtype=np.int32),
        starts=np.concatenate([f.offsets + edges[2 * i] for i, f in enumerate(unique)]),
        first=which * len(unique[0].offsets),
        counts=np.concatenate([_counts(f.dataset, f.rows, f.offsets) for f in unique]),
        test=Units(
            run=np.arange(len(federations)),
            low=edges[2 * which + 1],
            high=edges[2 * which + 2],
            count=np.stack(tests)[which, 0],
        ),
    )


def _counts(dataset: Dataset, rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """(pieces + 1, c, k): rows by label and group between one offset and the next; then nothing."""
    groups, pieces = len(dataset.group_names) + 1, len(offsets)
    cell = dataset.labels[rows] * groups + dataset.groups[rows] % groups  # -1 becomes the last
    piece = np.repeat(np.arange(pieces - 1), np.diff(offsets))
    cells = len(dataset.classes) * groups
    flat = np.bincount(piece * cells + cell, minlength=pieces * cells)
    return flat.reshape(pieces, len(dataset.classes), groups).astype(np.float64)
