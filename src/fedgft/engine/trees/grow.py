"""Grow a tree from histograms, level by level or best leaf first.

    clients     gradients of their rows, summed by (node, column, bin)
    server      the best split of each node, from the sums of all clients
    clients     divide their rows, and so on; the values of leaves follow from the same sums

In the simulator all clients' rows lie in one array, and the sums are made in one pass.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fedgft.engine.threads import SERIAL_WORK, run_threads, share_work
from fedgft.engine.trees import kernels
from fedgft.engine.trees.bins import Bins
from fedgft.engine.trees.kernels import HIGH, LOW, Columns, Rule, Tree
from fedgft.forest import make_sets
from fedgft.models import Trees


@dataclass(frozen=True)
class Grown:
    """A tree: arrays by node, as in `fedgft.forest.Forest`. The next tree overwrites them.

    `value` is that of a full Newton step, and `rows` (n, 4) the ranges of `Tree.order`.
    """

    feature: np.ndarray
    bin: np.ndarray
    goes_left: np.ndarray
    left: np.ndarray
    value: np.ndarray
    gain: np.ndarray
    cover: np.ndarray
    tree: Tree

    @property
    def leaves(self) -> np.ndarray:
        """The nodes that are leaves with rows that the tree was fitted to."""
        return np.flatnonzero((self.feature < 0) & (self.cover > 0))

    def to_nodes(
        self, bins: Bins, is_categorical: np.ndarray, *, words: int, lr: float
    ) -> dict[str, np.ndarray]:
        """Return the tree as arrays by node, by their names in `Forest`.

        Parameters
        ----------
        bins
            The bins that the tree was grown with.
        is_categorical
            (f,) which columns hold categories.
        words
            Words of a set of categories.
        lr
            The share of the step that the leaves take.
        """
        inner = np.flatnonzero(self.feature >= 0)
        feature = self.feature[inner]
        goes_left = self.goes_left[inner]
        nodes = {name: getattr(self, name).copy() for name in ("feature", "left", "gain", "cover")}
        size = len(self.feature)
        nodes |= {"value": lr * self.value, "threshold": np.zeros(size)}
        nodes |= {"missing_left": np.zeros(size, np.bool_)}
        nodes["categories"] = np.zeros((size, words), np.uint32)
        missing = bins.sizes[feature] - 1
        nodes["missing_left"][inner] = goes_left[np.arange(len(inner)), missing]
        is_set = is_categorical[feature]
        at = inner[~is_set]
        nodes["threshold"][at] = bins.upper_table[feature[~is_set], self.bin[at]]
        levels = bins.level_table[feature[is_set]]
        inside = np.take_along_axis(goes_left[is_set], levels, axis=1)
        inside &= bins.level_counts[feature[is_set], None] > np.arange(levels.shape[1])
        nodes["categories"][inner[is_set]] = make_sets(inside, words)
        return nodes


class Grower:
    """Grows one tree at a time; its memory is used again.

    Parameters
    ----------
    columns
        The bins of all rows.
    model
        Depth, leaves and what decides about splits.
    threads
        The number of threads that grow a tree; results do not depend on it.
    """

    def __init__(self, columns: Columns, model: Trees, *, threads: int = 1) -> None:
        self.columns = columns
        self.model = model
        self.threads = threads
        self.rule = make_rule(model)
        nodes = model.most_nodes
        bins = int(columns.offsets[:, -1].max())
        self.carry = np.zeros((threads, bins, 2), np.int64)
        self._arrays: dict[str, Any] = {
            "histograms": np.zeros((model.most_histograms, bins, 2), np.int64),
            "slot": np.zeros(nodes, np.int64),
            "rows": np.zeros((nodes, 4), np.int64),
            "sums": np.zeros((nodes, 2), np.int64),
            "left_sums": np.zeros((nodes, 2), np.int64),
            "gain": np.zeros(nodes),
            "feature": np.zeros(nodes, np.int32),
            "bin": np.zeros(nodes, np.int32),
            "goes_left": np.zeros((nodes, 256), np.bool_),
            "left": np.zeros(nodes, np.int32),
            "depth": np.zeros(nodes, np.int32),
        }

    def grow(
        self,
        federation: int,
        *,
        shift: int,
        packed: np.ndarray,
        order: np.ndarray,
        ends: tuple[int, int],
        scale: np.ndarray,
    ) -> Grown:
        """Grow a tree.

        Parameters
        ----------
        federation
            The number of the federation whose bins are used.
        shift, packed, order, scale
            See `kernels.Tree`.
        ends
            The number of rows in `order` that the tree is fitted to, and of all rows in it.
        """
        tree = Tree(int(shift), packed, order, np.empty_like(order), scale=scale, **self._arrays)
        tree.left[:] = 0
        tree.rows[0] = (0, ends[0], *ends)
        tree.slot[0] = 0
        tree.depth[0] = 0
        return self._finish(tree, self._split(tree, self.columns.offsets[federation]))

    def _split(self, tree: Tree, offsets: np.ndarray) -> int:
        """Split from the root on; return the number of nodes."""
        if self.threads > 1:
            return Growth(self, tree, offsets).run()
        limits = (self.model.max_depth, self.model.max_leaves or 0)
        return kernels.grow_tree(offsets, self.columns, tree, self.rule, *limits)

    def _finish(self, tree: Tree, used: int) -> Grown:
        inner = tree.left > 0
        is_node = np.arange(len(inner)) < used
        g, h = (tree.sums * tree.scale).T
        total = h + self.model.l2
        value = np.divide(-g, total, out=np.zeros_like(g), where=is_node & ~inner & (h > 0))
        return Grown(
            feature=np.where(inner, tree.feature, -1).astype(np.int32),
            bin=tree.bin,
            goes_left=tree.goes_left,
            left=tree.left,
            value=value,
            gain=np.where(inner, tree.gain, 0.0),
            cover=np.where(is_node, h, 0.0),
            tree=tree,
        )


def make_rule(model: Trees) -> Rule:
    """Return what decides about splits."""
    values = (model.l2, model.min_child_weight, model.category_l2, model.category_smoothing)
    return Rule(*map(float, values))


class Growth:
    """A tree while it grows level by level, with the same steps as `kernels.grow_tree`.

    Parameters
    ----------
    grower
        What decides about splits, and the number of threads.
    tree
        The tree, with the rows of its root.
    offsets
        Where the bins of each column begin in a histogram.
    """

    def __init__(self, grower: Grower, tree: Tree, offsets: np.ndarray) -> None:
        self.grower = grower
        self.tree = tree
        self.offsets = offsets
        self.used = 1  # nodes
        self.slots = 1

    def run(self) -> int:
        """Split until no leaf is worth it; return the number of nodes."""
        model = self.grower.model
        most = model.most_nodes if model.max_leaves is None else 2 * model.max_leaves - 1
        pairs = np.array([[0, -1]])
        waiting = np.empty(0, np.int64)  # leaves that are worth a split
        while True:
            if len(pairs):
                self._search(pairs)
            new = np.sort(pairs[pairs >= 0])
            waiting = np.concatenate((waiting, new[self.tree.gain[new] > 0]))
            if not len(waiting) or self.used >= most:
                return self.used
            chosen = np.ones(len(waiting), bool)
            if model.max_leaves is not None:
                best = np.lexsort((waiting, -self.tree.gain[waiting]))[0]
                chosen = np.arange(len(waiting)) == best
            splits = self._split(waiting[chosen])
            waiting = waiting[~chosen]
            grows = self.tree.depth[splits[:, 1]] < model.max_depth
            if model.max_leaves is not None:
                grows &= self.used < most
            pairs = self._pair(splits[grows])

    def _search(self, pairs: np.ndarray) -> None:
        """Sum the histograms of the first node of each pair, and find the splits of both."""
        self._sum(pairs)

        def find(begin: int, end: int) -> None:
            columns, rule = self.grower.columns, self.grower.rule
            kernels.find_splits(begin, end, self.offsets, columns, self.tree, pairs, rule)

        share_work(find, np.full(len(pairs), 2 * int(self.offsets[-1])), self.grower.threads)

    def _sum(self, pairs: np.ndarray) -> None:
        """Sum the histograms of the first node of each pair."""
        columns = self.grower.columns
        threads = self.grower.threads
        tree = self.tree
        nodes = np.ascontiguousarray(pairs[:, 0])
        counts = tree.rows[nodes, HIGH] - tree.rows[nodes, LOW]
        first = np.concatenate(([0], np.cumsum(counts)))
        tree.histograms[tree.slot[nodes[counts == 0]]] = 0
        total = int(first[-1])
        parts = threads if total * columns.places.shape[1] >= SERIAL_WORK else 1
        edges = (total * np.arange(parts + 1) // parts).tolist()
        carry = self.grower.carry

        def add(call: tuple[int, tuple[int, int]]) -> int:
            thread, (begin, end) = call
            return kernels.sum_histograms(
                begin, end, self.offsets, columns, tree, nodes, first, carry[thread]
            )

        calls = [(i, (a, b)) for i, (a, b) in enumerate(pairwise(edges)) if b > a]
        for (thread, _), at in zip(calls, run_threads(add, calls, threads), strict=True):
            if at >= 0:
                tree.histograms[tree.slot[nodes[at]]] += carry[thread]

    def _split(self, nodes: np.ndarray) -> np.ndarray:
        """Divide nodes; return each with its left child."""
        nodes = np.sort(nodes)
        child = self.used + 2 * np.arange(len(nodes))
        self.used += 2 * len(nodes)
        splits = np.stack((nodes, child), axis=1)
        ranges = self.tree.rows[nodes]
        load = ranges[:, 1] - ranges[:, 0] + ranges[:, 3] - ranges[:, 2]
        columns = self.grower.columns

        def split(begin: int, end: int) -> None:
            kernels.split_rows(begin, end, columns, self.tree, splits)

        share_work(split, load, self.grower.threads)
        return splits

    def _pair(self, splits: np.ndarray) -> np.ndarray:
        """Return smaller and larger child of each; the larger one takes its parent's slot."""
        n, child = splits.T
        tree = self.tree
        sizes = self._sizes()
        small = child + (sizes[child + 1] < sizes[child])
        large = 2 * child + 1 - small
        tree.slot[large] = tree.slot[n]
        tree.slot[small] = self.slots + np.arange(len(n))
        self.slots += len(n)
        return np.stack((small, large), axis=1)

    def _sizes(self) -> np.ndarray:
        """Return the size of each node: of two siblings, the smaller one is summed."""
        return self.tree.rows[:, HIGH] - self.tree.rows[:, LOW]
