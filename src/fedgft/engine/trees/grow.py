"""Grow trees from histograms: one step divides the best leaves of all trees of a batch.

    clients     gradients of their rows, summed by (node, column, bin)
    server      the best split of each node, from the sums of all clients
    clients     divide their rows, and so on; the values of leaves follow from the same sums

In the simulator all clients' rows lie in one array, and the sums are made in one pass.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fedgft.engine.trees import kernels
from fedgft.engine.trees.kernels import Columns, Growers, Rule
from fedgft.engine.trees.threads import SERIAL_WORK, run_threads, share_work
from fedgft.models import Trees


@dataclass(frozen=True)
class Grown:
    """Trees of a batch: arrays by grower and node, as in `fedgft.forest.Forest`."""

    feature: np.ndarray
    bin: np.ndarray
    goes_left: np.ndarray
    left: np.ndarray
    value: np.ndarray
    gain: np.ndarray
    cover: np.ndarray


class Grower:
    """Grows one tree for each of several growers at a time; its memory is used again.

    Parameters
    ----------
    columns
        The bins of all rows.
    model
        Depth, leaves and what decides about splits.
    size
        The number of trees that are grown together.
    threads
        The number of threads; results do not depend on it.
    """

    def __init__(self, columns: Columns, model: Trees, size: int, *, threads: int) -> None:
        self.columns = columns
        self.size = size
        self.model = model
        self.threads = threads
        self.rule = Rule(
            float(model.l2),
            float(model.min_child_weight),
            float(model.category_l2),
            float(model.category_smoothing),
        )
        nodes = model.most_nodes
        bins = int(columns.offsets[:, -1].max())
        shape = (size, nodes)
        self.carry = np.zeros((threads, bins, 2), np.int64)
        self._arrays: dict[str, Any] = {
            "histograms": np.zeros((size, model.most_histograms, bins, 2), np.int64),
            "slot": np.zeros(shape, np.int64),
            "rows": np.zeros((*shape, 4), np.int64),
            "sums": np.zeros((*shape, 2), np.int64),
            "left_sums": np.zeros((*shape, 2), np.int64),
            "gain": np.zeros(shape),
            "feature": np.full(shape, -1, np.int32),
            "bin": np.zeros(shape, np.int32),
            "goes_left": np.zeros((*shape, 256), np.bool_),
        }

    def grow(
        self,
        federation: np.ndarray,
        shift: np.ndarray,
        packed: np.ndarray,
        order: np.ndarray,
        rows: np.ndarray,
        scale: np.ndarray,
    ) -> tuple[Grown, Growers]:
        """Grow one tree per grower, (g,).

        Parameters
        ----------
        federation, shift, packed, order, scale
            See `kernels.Growers`.
        rows
            (g, 4): the ranges of `order` of the root.
        """
        size = len(federation)
        arrays = {name: array[:size] for name, array in self._arrays.items()}
        scratch = np.empty_like(order)
        growers = Growers(federation, shift, packed, order, scratch, scale, **arrays)
        growers.rows[:, 0] = rows
        growers.slot[:, 0] = 0
        state = _Growth(self, growers)
        state.run()
        return state.result(), growers


class _Growth:
    """One batch of trees while they grow."""

    def __init__(self, grower: Grower, growers: Growers) -> None:
        self.grower = grower
        self.growers = growers
        size, nodes = growers.gain.shape
        self.left = np.zeros((size, nodes), np.int32)
        self.depth = np.zeros((size, nodes), np.int8)
        self.used = np.ones(size, np.int64)  # nodes
        self.slots = np.ones(size, np.int64)
        self.leaves = np.ones(size, np.int64)
        self.is_inner = np.zeros((size, nodes), bool)

    def run(self) -> None:
        """Split until no leaf is worth it."""
        size = len(self.used)
        every = np.arange(size)
        pairs = np.stack((every, 0 * every, -1 + 0 * every), axis=1)
        model = self.grower.model
        waiting = np.empty((0, 2), np.int64)  # leaves that may be split: grower, node
        while len(pairs):
            self._search(pairs)
            new = np.concatenate((pairs[:, :2], pairs[pairs[:, 2] >= 0][:, ::2]))
            waiting = np.concatenate((waiting, new[self.growers.gain[new[:, 0], new[:, 1]] > 0]))
            chosen = self._choose(waiting)
            splits = self._split(waiting[chosen])
            waiting = waiting[~chosen]
            is_last = self.depth[splits[:, 0], splits[:, 2]] >= model.max_depth
            if model.max_leaves is not None:
                is_last |= self.leaves[splits[:, 0]] >= model.max_leaves
            pairs = self._pair(splits[~is_last])

    def _choose(self, waiting: np.ndarray) -> np.ndarray:
        """Return a mask of the leaves to split now: all, or the best one of each tree."""
        most = self.grower.model.max_leaves
        if most is None or not len(waiting):
            return np.ones(len(waiting), bool)
        g, n = waiting.T
        gain = self.growers.gain[g, n]
        order = np.lexsort((n, -gain, g))
        first = np.ones(len(order), bool)
        first[1:] = g[order][1:] != g[order][:-1]
        chosen = np.zeros(len(waiting), bool)
        chosen[order[first]] = True
        return chosen & (self.leaves[g] < most)

    def _search(self, pairs: np.ndarray) -> None:
        """Sum the histograms of the first node of each pair, and find the splits of both."""
        growers = self.growers
        columns = self.grower.columns
        work = np.ascontiguousarray(pairs[:, :2])
        ranges = growers.rows[work[:, 0], work[:, 1]]
        counts = ranges[:, 1] - ranges[:, 0]
        first = np.concatenate(([0], np.cumsum(counts)))
        self._clear_empty(work[counts == 0])
        carry = self.grower.carry

        def add_rows(begin: int, end: int, thread: int = 0) -> int:
            return kernels.sum_histograms(begin, end, columns, growers, work, first, carry[thread])

        total = int(first[-1])
        width = columns.places.shape[1]
        threads = 1 if total * width < SERIAL_WORK else self.grower.threads
        edges = total * np.arange(threads + 1) // threads
        calls = [(int(a), int(b), t) for t, (a, b) in enumerate(pairwise(edges)) if b > a]
        carried = run_threads(lambda call: add_rows(*call), calls, self.grower.threads)
        for (_, _, thread), at in zip(calls, carried, strict=True):
            if at >= 0:
                g, n = work[at]
                growers.histograms[g, growers.slot[g, n]] += carry[thread]

        def find(begin: int, end: int) -> None:
            kernels.find_splits(begin, end, columns, growers, pairs, self.grower.rule)

        bins = int(columns.offsets[0, -1])
        share_work(find, np.full(len(pairs), 2 * bins), self.grower.threads)

    def _clear_empty(self, work: np.ndarray) -> None:
        growers = self.growers
        for g, n in work:  # nodes without fitted rows: only roots of clients without rows
            growers.histograms[g, growers.slot[g, n]] = 0

    def _split(self, nodes: np.ndarray) -> np.ndarray:
        """Divide nodes (grower, node); return (grower, node, left child) of each."""
        g, n = nodes.T
        order = np.lexsort((n, g))
        g, n = g[order], n[order]
        number = np.arange(len(g)) - np.searchsorted(g, g)  # among those of its grower
        child = self.used[g] + 2 * number
        splits = np.stack((g, n, child), axis=1)
        count = np.bincount(g, minlength=len(self.used))
        self.used += 2 * count
        self.leaves += count
        self.left[g, n] = child
        self.is_inner[g, n] = True
        for step in (0, 1):
            self.depth[g, child + step] = self.depth[g, n] + 1
        ranges = self.growers.rows[g, n]
        load = ranges[:, 1] - ranges[:, 0] + ranges[:, 3] - ranges[:, 2]
        columns = self.grower.columns

        def split(begin: int, end: int) -> None:
            kernels.split_rows(begin, end, columns, self.growers, splits)

        share_work(split, load, self.grower.threads)
        return splits

    def _pair(self, splits: np.ndarray) -> np.ndarray:
        """Return (grower, smaller child, larger child); the larger one takes its parent's slot."""
        g, n, child = splits.T
        fitted = [
            self.growers.rows[g, child + s, 1] - self.growers.rows[g, child + s, 0] for s in (0, 1)
        ]
        swap = fitted[1] < fitted[0]
        small = child + swap
        large = child + ~swap
        number = np.arange(len(g)) - np.searchsorted(g, g)
        self.growers.slot[g, large] = self.growers.slot[g, n]
        self.growers.slot[g, small] = self.slots[g] + number
        self.slots += np.bincount(g, minlength=len(self.slots))
        return np.stack((g, small, large), axis=1)

    def result(self) -> Grown:
        """Return the trees; values are those of a full Newton step."""
        growers = self.growers
        g_sum, h_sum = np.moveaxis(growers.sums * growers.scale[:, None, :], -1, 0)
        inner = self.is_inner
        nodes = np.arange(inner.shape[1]) < self.used[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            value = -g_sum / (h_sum + self.grower.model.l2)
        value = np.where(nodes & ~inner & (h_sum > 0), value, 0.0)
        return Grown(
            feature=np.where(inner, growers.feature, -1).astype(np.int32),
            bin=growers.bin.copy(),
            goes_left=growers.goes_left,
            left=self.left,
            value=value,
            gain=np.where(inner, growers.gain, 0.0),
            cover=np.where(nodes, h_sum, 0.0),
        )
