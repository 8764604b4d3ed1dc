"""Who takes part, in which order rows are read, and with which learning rate.

Every random choice is a pure function of (seed, round, client), so nothing has to be carried
from round to round, all executors read the same batches, and a run can be taken up anywhere.
"""

from typing import Literal

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.engine.compiled import AVAILABLE, jit
from fedgft.federated import Cohort
from fedgft.metrics import Tally

Sampling = Literal["size", "uniform"]
Schedule = Literal["constant", "cosine", "step", "inverse-sqrt", "inverse"]

EVERY_ROW = 2**62
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Weyl increment of splitmix64


@jit
def mix(x):
    """The splitmix64 finaliser: every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit
def shuffle(rows, seed):
    """Fisher-Yates in place; draw i is mix(seed + i * golden), so it needs no generator."""
    state = seed
    for i in range(len(rows) - 1, 0, -1):
        state = state + np.uint64(0x9E3779B97F4A7C15)
        j = np.int64(((mix(state) >> np.uint64(32)) * np.uint64(i + 1)) >> np.uint64(32))
        kept = rows[i]
        rows[i] = rows[j]
        rows[j] = kept


def _shuffled(rows: list[int], seed: int) -> list[int]:
    """`shuffle` without a compiler: all draws at once, and then the swaps."""
    last = np.arange(len(rows) - 1, 0, -1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = np.uint64(seed) + _GOLDEN * np.arange(1, len(last) + 1, dtype=np.uint64)
        other = ((mix(state) >> np.uint64(32)) * (last + np.uint64(1))) >> np.uint64(32)
    for i, j in zip(last.tolist(), other.tolist(), strict=True):
        rows[i], rows[j] = rows[j], rows[i]
    return rows


def keys(*parts: np.ndarray | int) -> np.ndarray:
    """One 64-bit key from several numbers, vectorised: the seed of whatever they name."""
    key = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in parts:
            key = mix(key * np.uint64(3) + np.asarray(part).astype(np.uint64) + _GOLDEN)
    return np.asarray(key, dtype=np.uint64)


def batches(
    rows: np.ndarray, *, seed: int, batch_size: int, most: int = EVERY_ROW, least: int = 1
) -> list[np.ndarray]:
    """One epoch: at most `most` rows in the order that this seed gives, cut into batches; a last
    one of fewer than `least` rows is left out."""
    order = rows.copy()
    if AVAILABLE:
        shuffle(order, np.uint64(seed))
    else:
        order[:] = _shuffled(order.tolist(), seed)
    stop = min(len(order), most)
    starts = range(0, stop - least + 1, batch_size)
    return [order[i : min(i + batch_size, stop)] for i in starts]


def learning_rate(lr: np.ndarray, schedule: Schedule, *, round: int, rounds: int) -> np.ndarray:
    """`cosine` falls to 5% of the start, `step` to a tenth after half and again after 3/4;
    `inverse-sqrt` and `inverse` are the t^(-1/2) and 1/t of Corollary 5.3, with t = round + 1."""
    done = round / rounds
    if schedule == "cosine":
        return lr * (0.05 + 0.95 * (1 + np.cos(np.pi * done)) / 2)
    if schedule == "step":
        return lr * (0.1 if done >= 0.5 else 1.0) * (0.1 if done >= 0.75 else 1.0)
    power = {"constant": 0.0, "inverse-sqrt": -0.5, "inverse": -1.0}[schedule]
    return lr * (round + 1.0) ** power


def everybody(federations: list[Federation]) -> Cohort:
    """Full participation: weights n_k / n."""
    counts = [f.num_clients for f in federations]
    return Cohort(
        run=np.repeat(np.arange(len(federations)), counts),
        client=np.concatenate([np.arange(k) for k in counts]),
        weight=np.concatenate([f.sizes / f.offsets[-1] for f in federations]),
        bounds=np.concatenate(([0], np.cumsum(counts))),
        full=True,
    )


def sample(
    federations: list[Federation], size: int, rule: Sampling, *, seeds: np.ndarray, round: int
) -> Cohort:
    """`size` draws a run. Costs what the cohort costs, however many clients there are.

    `size`: with replacement with probability n_k / n, each draw weighing 1 / M (a client that
    is drawn twice trains once and weighs twice). `uniform`: without replacement, weighing n_k.
    """
    chosen, weights = [], []
    for federation, seed in zip(federations, seeds, strict=True):
        rng = np.random.default_rng([int(seed), round, 0xC0])
        if rule == "size":
            rows = rng.integers(federation.offsets[-1], size=size)
            drawn = np.searchsorted(federation.offsets, rows, side="right") - 1
            client, times = np.unique(drawn, return_counts=True)
            weight = times / size
        else:
            drawn = rng.choice(federation.num_clients, size, replace=False, shuffle=False)
            client = np.sort(drawn)
            held = federation.offsets[client + 1] - federation.offsets[client]
            weight = held / max(held.sum(), 1)  # a cohort without rows moves nothing
        chosen.append(client)
        weights.append(weight)
    counts = [len(c) for c in chosen]
    return Cohort(
        run=np.repeat(np.arange(len(federations)), counts),
        client=np.concatenate(chosen),
        weight=np.concatenate(weights),
        bounds=np.concatenate(([0], np.cumsum(counts))),
        full=False,
    )


def noise(tally: Tally, cohort: Cohort, spread: float, *, seeds: np.ndarray, round: int) -> Tally:
    """Every sum that a client sends, with normal noise of this standard deviation on it."""
    loud = []
    for array in (tally.count, tally.score, tally.decision):
        parts = []
        for r, seed in enumerate(seeds):
            shape = (cohort.bounds[r + 1] - cohort.bounds[r], *array.shape[1:])
            rng = np.random.default_rng([int(seed), round, 0xD9, len(loud)])
            parts.append(spread * rng.standard_normal(shape))
        loud.append(array + np.concatenate(parts))
    return Tally(*loud)
