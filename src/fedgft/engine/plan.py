"""The plan of a simulation: rows of each client, cohorts, batches and learning rates.

Every random choice is a pure function of (seed, round, client). No generator is carried from round
to round, all executors read the same batches, and a run can be resumed after any round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from fedgft.algorithms import Cohort
from fedgft.compiled import NUMBA_AVAILABLE, jit
from fedgft.data.dataset import Dataset, Federation
from fedgft.errors import FedgftError
from fedgft.settings import Sampling, Schedule
from fedgft.sums import Sums

ALL_ROWS = 2**62
SUMS_STREAM = 0xD9  # random streams of the noise on sums, and on losses and histograms
REPORT_STREAM = 0xDA
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Weyl increment of splitmix64


@dataclass(frozen=True)
class Units:
    """Units of work. Unit i consists of rows `low[i]:high[i]` of the index, scaled as in `run[i]`.

    `count` (u, c, k) holds the number of rows of each unit by label and group, or the sum of their
    weights; the last group is "not recorded".
    """

    run: np.ndarray
    low: np.ndarray
    high: np.ndarray
    count: np.ndarray

    def __len__(self) -> int:
        return len(self.run)

    def __getitem__(self, at: slice) -> "Units":
        return Units(*(getattr(self, f.name)[at] for f in fields(self)))

    def __add__(self, other: "Units") -> "Units":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Units(*(np.concatenate(pair) for pair in pairs))

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each unit, (u,)."""
        return self.high - self.low


@dataclass(frozen=True, eq=False)
class RowIndex:
    """The rows of every (run, client), for all runs in one array, as in a CSR matrix.

    A federation that several runs share is stored once. `index_rows` builds the index.

    Attributes
    ----------
    federations
        One federation per run.
    rows
        Row numbers of the data set, int32: for each federation the clients' rows, then the test
        rows.
    starts
        Offsets into `rows` of all clients of all federations.
    first
        The position in `starts` of the first client of each run.
    counts
        Number of rows, or the sum of their weights, by label and group, of the client that begins
        at each offset, (offsets, c, k).
    test
        The test rows of each run.
    """

    federations: list[Federation]
    rows: np.ndarray
    starts: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    test: Units

    @property
    def dataset(self) -> Dataset:
        """The data set of all runs."""
        return self.federations[0].dataset

    @property
    def runs(self) -> int:
        """Number of runs."""
        return len(self.federations)

    @property
    def num_clients(self) -> int:
        """Clients per run."""
        return self.federations[0].num_clients

    @property
    def sizes(self) -> np.ndarray:
        """Rows of every client, (run, client)."""
        return np.stack([f.sizes for f in self.federations])

    @property
    def weighted_sizes(self) -> np.ndarray:
        """What the rows of every client count together, (run, client): `sizes` without weights."""
        return np.stack([f.weighted_sizes for f in self.federations])

    @property
    def row_weights(self) -> np.ndarray | None:
        """The weight of each row of the data set; None if all count the same."""
        return self.dataset.row_weights

    def clients(self, cohort: Cohort) -> Units:
        """The rows of each client of a cohort."""
        at = self.first[cohort.run] + cohort.client
        return Units(cohort.run, self.starts[at], self.starts[at + 1], self.counts[at])

    def keys(self, cohort: Cohort) -> np.ndarray:
        """Return the number that identifies each client in random draws, (u,)."""
        by_run = np.split(cohort.client, cohort.bounds[1:-1])
        pairs = zip(self.federations, by_run, strict=True)
        return np.concatenate([federation.keys[clients] for federation, clients in pairs])

    def scaling(self, width: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and 1 / spread of each run's features, padded to `width` with 0 and 1."""
        mean = np.zeros((self.runs, width), dtype)
        inverse = np.ones((self.runs, width), dtype)
        for r, federation in enumerate(self.federations):
            if federation.mean is not None and federation.spread is not None:
                mean[r, : len(federation.mean)] = federation.mean
                inverse[r, : len(federation.spread)] = 1.0 / federation.spread
        return mean, inverse


def index_rows(federations: list[Federation]) -> RowIndex:
    """Build the index from one federation per run.

    All federations must share one data set and have the same number of clients.
    """
    if len({id(f.dataset) for f in federations}) != 1:
        raise FedgftError("all runs of one simulation must share one data set")
    if len({f.num_clients for f in federations}) != 1:
        raise FedgftError("all runs of one simulation must have the same number of clients")
    unique = list({id(f): f for f in federations}.values())
    lengths = np.array([[len(f.rows), len(f.test)] for f in unique])
    edges = np.concatenate(([0], np.cumsum(lengths)))  # client rows, test rows, client rows, ...
    number = {id(f): i for i, f in enumerate(unique)}
    which = np.array([number[id(f)] for f in federations])
    tests = [_count_cells(f.dataset, f.test, np.array([0, len(f.test)])) for f in unique]
    runs = np.arange(len(federations))
    return RowIndex(
        federations=federations,
        rows=np.concatenate([part for f in unique for part in (f.rows, f.test)], dtype=np.int32),
        starts=np.concatenate([f.offsets + edges[2 * i] for i, f in enumerate(unique)]),
        first=which * len(unique[0].offsets),
        counts=np.concatenate([_count_cells(f.dataset, f.rows, f.offsets) for f in unique]),
        test=Units(runs, edges[2 * which + 1], edges[2 * which + 2], np.stack(tests)[which, 0]),
    )


def _count_cells(dataset: Dataset, rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Count rows, or add up weights, by label and group between offsets, (offsets, c, k).

    The counts at the last offset, after which there are no rows, are zero.
    """
    groups = dataset.num_cells + 1
    pieces = len(offsets)
    cell = dataset.labels[rows] * groups + dataset.cells[rows] % groups  # group -1 becomes last
    piece = np.repeat(np.arange(pieces - 1), np.diff(offsets))
    cells = len(dataset.classes) * groups
    weights = dataset.row_weights
    weights = None if weights is None else weights[rows]
    flat = np.bincount(piece * cells + cell, weights, minlength=pieces * cells)
    return flat.reshape(pieces, len(dataset.classes), groups).astype(np.float64)


@jit
def scramble_bits(x):
    """The splitmix64 finalizer: every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit
def shuffle(rows, seed):
    """Shuffle in place (Fisher-Yates); draw i is a hash of seed + i * golden, so no generator."""
    state = seed
    for i in range(len(rows) - 1, 0, -1):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        j = np.int64(((scramble_bits(state) >> np.uint64(32)) * np.uint64(i + 1)) >> np.uint64(32))
        swapped = rows[i]
        rows[i] = rows[j]
        rows[j] = swapped


def _shuffle_list(rows: list[int], seed: int) -> list[int]:
    """Shuffle like `shuffle`, without numba: make all draws at once, then swap."""
    last = np.arange(len(rows) - 1, 0, -1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = np.uint64(seed) + _GOLDEN * np.arange(1, len(last) + 1, dtype=np.uint64)
        other = ((scramble_bits(state) >> np.uint64(32)) * (last + np.uint64(1))) >> np.uint64(32)
    for i, j in zip(last.tolist(), other.tolist(), strict=True):
        rows[i], rows[j] = rows[j], rows[i]
    return rows


def derive_seeds(*parts: np.ndarray | int) -> np.ndarray:
    """Hash several numbers (or arrays of them, broadcast) to one 64-bit random seed."""
    key = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in parts:
            key = scramble_bits(key * np.uint64(3) + np.asarray(part).astype(np.uint64) + _GOLDEN)
    return np.asarray(key, dtype=np.uint64)


def draw_batches(
    rows: np.ndarray, *, seed: int, batch_size: int, most: int = ALL_ROWS, least: int = 1
) -> list[np.ndarray]:
    """Shuffle rows and cut them into the batches of one epoch.

    Parameters
    ----------
    rows
        Row numbers; they are not changed.
    seed
        Determines the order.
    batch_size
        Rows per batch; the last batch may have fewer.
    most
        Only the first `most` shuffled rows are used.
    least
        A last batch with fewer rows is dropped.
    """
    order = rows.copy()
    if NUMBA_AVAILABLE:
        shuffle(order, np.uint64(seed))
    else:
        order[:] = _shuffle_list(order.tolist(), seed)
    stop = min(len(order), most)
    starts = range(0, stop - least + 1, batch_size)
    return [order[i : min(i + batch_size, stop)] for i in starts]


def learning_rate(lr: np.ndarray, schedule: Schedule, *, round: int, rounds: int) -> np.ndarray:
    """Return the learning rates in round `round` (counted from 0) of `rounds`, starting from `lr`.

    `cosine` falls to 5% of the start; `step` falls to a tenth after half of the rounds and again
    after 3/4; `inverse-sqrt` and `inverse` are the t^(-1/2) and 1/t of Corollary 5.3, with
    t = round + 1.
    """
    done = round / rounds
    if schedule == "cosine":
        return lr * (0.05 + 0.95 * (1 + np.cos(np.pi * done)) / 2)
    if schedule == "step":
        return lr * (0.1 if done >= 0.5 else 1.0) * (0.1 if done >= 0.75 else 1.0)
    power = {"constant": 0.0, "inverse-sqrt": -0.5, "inverse": -1.0}[schedule]
    return lr * (round + 1.0) ** power


def full_cohort(federations: list[Federation]) -> Cohort:
    """The cohort of all clients of all runs, with weights n_k / n (of weighted rows: sums)."""
    clients = [np.arange(f.num_clients) for f in federations]
    sizes = [f.weighted_sizes for f in federations]
    return make_cohort(clients, [each / max(each.sum(), 1) for each in sizes], full=True)


def sample_cohort(
    federations: list[Federation], size: int, rule: Sampling, *, seeds: np.ndarray, round: int
) -> Cohort:
    """Sample one cohort per run; the cost does not grow with the number of clients.

    Parameters
    ----------
    size
        Number of draws per run.
    rule
        `size` draws with replacement, client k with probability n_k / n. Every draw has the weight
        1 / size; a client that is drawn twice trains once and has twice the weight. `uniform` draws
        without replacement; the weight of client k is n_k divided by the rows of the cohort. If
        rows have weights, n_k is the sum of those of the client.
    seeds, round
        The seed of each run and the round; together they determine the draws.
    """
    chosen = []
    weights = []
    for federation, seed in zip(federations, seeds, strict=True):
        rng = np.random.default_rng([int(seed), round, 0xC0])
        if rule == "size":
            if federation.dataset.row_weights is None:
                rows = rng.integers(federation.offsets[-1], size=size)
                drawn = np.searchsorted(federation.offsets, rows, side="right") - 1
            else:
                ends = np.cumsum(federation.weighted_sizes)
                drawn = np.searchsorted(ends[:-1], ends[-1] * rng.random(size), side="right")
            client, times = np.unique(drawn, return_counts=True)
            weight = times / size
        else:
            drawn = rng.choice(federation.num_clients, size, replace=False, shuffle=False)
            client = np.sort(drawn)
            sizes = federation.weighted_sizes[client]
            weight = sizes / max(sizes.sum(), 1)  # all weights are zero if the cohort has no rows
        chosen.append(client)
        weights.append(weight)
    return make_cohort(chosen, weights, full=False)


def make_cohort(clients: list[np.ndarray], weights: list[np.ndarray], *, full: bool) -> Cohort:
    """Return the cohort with the given clients and weights; both lists have one entry per run."""
    counts = [len(c) for c in clients]
    run = np.repeat(np.arange(len(counts)), counts)
    bounds = np.concatenate(([0], np.cumsum(counts)))
    return Cohort(run, np.concatenate(clients), np.concatenate(weights), bounds, full=full)


def add_noise(sums: Sums, cohort: Cohort, spread: float, *, seeds: np.ndarray, round: int) -> Sums:
    """Add normal noise with standard deviation `spread` to every sum that a client sends."""
    arrays = [sums.count, sums.score, sums.decision]
    noisy = add_normal(arrays, cohort, spread, seeds=seeds, round=round, stream=SUMS_STREAM)
    return Sums(*noisy, axis=sums.axis)


def add_normal(
    arrays: Sequence[np.ndarray],
    cohort: Cohort,
    spread: float,
    *,
    seeds: np.ndarray,
    round: int,
    stream: int,
) -> list[np.ndarray]:
    """Add normal noise to arrays with one entry per client of a cohort.

    Parameters
    ----------
    arrays
        What the clients send, each (u, ...).
    cohort
        The clients.
    spread
        Standard deviation of the noise on every number.
    seeds, round, stream
        The seed of each run, the round, and the number of the random stream.
    """
    noisy = []
    for array in arrays:
        parts = []
        for r, seed in enumerate(seeds):
            shape = (cohort.bounds[r + 1] - cohort.bounds[r], *array.shape[1:])
            rng = np.random.default_rng([int(seed), round, stream, len(noisy)])
            parts.append(spread * rng.standard_normal(shape))
        noisy.append(array + np.concatenate(parts))
    return noisy
