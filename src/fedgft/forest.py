"""Trees that are added up: how an ensemble is stored, checked and applied to rows.

A row is an array of fields: a number, the index of a category (0, 1, ...), or NaN where the value
is missing or the category is not known. An inner node asks about one field:

    number      value <= threshold             goes left
    category    the index is in a set          goes left
    missing     as the node says

The logit of an output is its base plus the values of the leaves that a row reaches. With two
classes there is one output, the logit of the second class; with more there is one per class.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fedgft.compiled import NUMBA_AVAILABLE, exact_jit

WORD = 32  # bits of a word of a set of categories
MAX_NODES = 2**20  # of a tree; a file with more is not ours
MAX_SIZE = 2**31  # of an axis of an array
BY_NODE = ("feature", "threshold", "left", "missing_left", "value", "gain", "cover")


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees as arrays with one row per tree and one column per node.

    Node 0 is the root. The right child of a node follows its left child.

    Parameters
    ----------
    feature
        (t, n) int32: the field that a node asks about; -1 at leaves.
    threshold
        (t, n): the largest number that goes left; unused at other nodes.
    left
        (t, n) int32: the number of the left child, which is larger than that of the node.
    missing_left
        (t, n) bool: whether rows whose value is missing go left.
    value
        (t, n): what a leaf adds to the logit.
    gain, cover
        (t, n): how much a split lowered the loss, and the sum of the hessians of a node's rows.
    categories
        (t, n, w) uint32: the set of categories that go left, 32 per word; all zero at nodes that
        ask about a number.
    categorical
        (f,) bool: which fields hold categories.
    output
        (t,) int32: the output that a tree adds to.
    base
        (o,): the logits before the first tree.
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    missing_left: np.ndarray
    value: np.ndarray
    gain: np.ndarray
    cover: np.ndarray
    categories: np.ndarray
    categorical: np.ndarray
    output: np.ndarray
    base: np.ndarray

    def __len__(self) -> int:
        return len(self.feature)

    def __repr__(self) -> str:
        leaves = int((self.feature < 0).sum()) - self._unused_nodes()
        return f"Forest({len(self)} trees, {leaves} leaves, {len(self.categorical)} fields)"

    def describe(self) -> str:
        """Return a sentence with the number of trees and leaves."""
        leaves = int((self.feature < 0).sum()) - self._unused_nodes()
        return f"{len(self)} trees with {leaves:,} leaves."

    def margins(self, rows: np.ndarray) -> np.ndarray:
        """Return the logits, (n, outputs), of rows (n, fields) of float64; NaN is missing."""
        rows = np.ascontiguousarray(rows, np.float64)
        out = np.tile(self.base.astype(np.float64), (len(rows), 1))
        walk: Any = _add_trees if NUMBA_AVAILABLE else _add_trees_by_level
        walk(rows, *(getattr(self, name) for name in _WALKED), out)
        return out

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Return the logits of the classes, (n, classes); of two classes, the first one's are 0."""
        margins = self.margins(rows)
        return np.hstack((np.zeros_like(margins), margins)) if margins.shape[1] == 1 else margins

    def importances(self) -> np.ndarray:
        """Return the gain of the splits on each field, summed over all trees, (fields,)."""
        inner = self.feature >= 0
        size = len(self.categorical)
        return np.bincount(self.feature[inner], self.gain[inner], minlength=size)[:size]

    def trimmed(self) -> "Forest":
        """Return the same forest without columns that no tree uses, and without empty trees."""
        kept = (self.feature[:, 0] >= 0) | (self.value[:, 0] != 0)
        inner = self.feature[kept] >= 0
        last = np.where(inner, self.left[kept] + 1, 0).max(initial=0) + 1
        parts = {name: getattr(self, name)[kept, :last] for name in (*BY_NODE, "categories")}
        categories = parts["categories"]
        words = int(np.flatnonzero(categories.any((0, 1))).max(initial=-1)) + 1
        return Forest(
            **parts | {"categories": categories[..., :words]},
            categorical=self.categorical,
            output=self.output[kept],
            base=self.base,
        )

    def to_tensors(self) -> dict[str, np.ndarray]:
        """Return all arrays as float64 by name, as a model file holds them."""
        return {f"trees.{f.name}": getattr(self, f.name).astype(np.float64) for f in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, np.ndarray]) -> "Forest":
        """Read what `to_tensors` wrote; raise KeyError or ValueError if it is no forest."""
        arrays = {f.name: tensors[f"trees.{f.name}"] for f in fields(cls)}
        for name, kind in _TYPES.items():
            values = arrays[name]
            limits = (0, 1) if kind is np.bool_ else (np.iinfo(kind).min, np.iinfo(kind).max)
            whole = (values == np.floor(values)) & (values >= limits[0]) & (values <= limits[1])
            if not whole.all():
                raise ValueError(f"{name} of the trees holds other than whole numbers in its range")
            arrays[name] = values.astype(kind)
        forest = cls(**arrays)
        forest.check()
        return forest

    def to_vector(self) -> np.ndarray:
        """Return all arrays in one vector of float64: their shapes, then their values."""
        trees, nodes, words = self.categories.shape
        shape = np.array([trees, nodes, words, len(self.categorical), len(self.base)], np.float64)
        parts = (np.asarray(getattr(self, f.name), np.float64).ravel() for f in fields(self))
        return np.concatenate((shape, *parts))

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> "Forest":
        """Read what `to_vector` wrote; numbers behind it are ignored."""
        shapes, _ = _read_shapes(vector)
        kinds = {name: _TYPES.get(name, np.float64) for name in shapes}
        return cls(**{k: part.astype(kinds[k]) for k, part in _split(vector, shapes)})

    @classmethod
    def parse_vector(cls, vector: np.ndarray) -> "Forest":
        """Read what `to_vector` wrote and a sender changed; raise ValueError if it is no forest."""
        head = vector[:5]
        if vector.dtype != np.float64 or vector.ndim != 1 or len(head) < 5:
            raise ValueError("it is no list of float64 numbers")
        if not ((head >= 0) & (head <= MAX_SIZE) & (head == np.floor(head))).all():
            raise ValueError("the sizes of its arrays are no whole numbers in their range")
        shapes, size = _read_shapes(vector)
        if size != len(vector):
            raise ValueError(f"it holds {len(vector):,} numbers, and its sizes say {size:,}")
        return cls.from_tensors({f"trees.{k}": part for k, part in _split(vector, shapes)})

    def check(self) -> None:
        """Raise ValueError unless walking through the trees ends and stays within the arrays."""
        if self.feature.ndim != 2 or not 0 < self.feature.shape[1] <= MAX_NODES:
            raise ValueError("the trees have no nodes, or too many")
        trees, nodes = self.feature.shape
        shapes = dict.fromkeys(BY_NODE, (trees, nodes)) | {"output": (trees,)}
        if any(getattr(self, name).shape != shape for name, shape in shapes.items()):
            raise ValueError("the arrays of the trees are of different lengths")
        if self.categories.ndim != 3 or self.categories.shape[:2] != (trees, nodes):
            raise ValueError("the sets of categories do not fit the trees")
        if self.categorical.ndim != 1 or self.base.ndim != 1 or not len(self.base):
            raise ValueError("the fields or the outputs of the trees are missing")
        numbers = (self.threshold, self.value, self.gain, self.cover, self.base)
        if not all(np.isfinite(each).all() for each in numbers):
            raise ValueError("the trees hold NaN or infinity")
        inner = self.feature >= 0
        first = np.arange(nodes)
        if (self.feature < -1).any() or (self.feature >= len(self.categorical)).any():
            raise ValueError("a tree asks about a field that there is not")
        if (inner & ((self.left <= first) | (self.left + 1 >= nodes))).any():
            raise ValueError("a node of a tree has a child that there is not")
        if (self.output < 0).any() or (self.output >= len(self.base)).any():
            raise ValueError("a tree adds to an output that there is not")
        asks = self.categorical[np.maximum(self.feature, 0)] & inner
        if self.categories[~asks].any():
            raise ValueError("a node that asks for a number has a set of categories")

    def _unused_nodes(self) -> int:
        """Columns that no node leads to: trees differ in size."""
        inner = self.feature >= 0
        reached = np.zeros(self.feature.shape, bool)
        reached[:, 0] = True
        at = np.nonzero(inner)
        for step in (0, 1):
            reached[at[0], self.left[at] + step] = True
        return int((~reached).sum())


def _read_shapes(vector: np.ndarray) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the shape of each array in `to_vector`, in order, and the length of the vector."""
    trees, nodes, words, width, outputs = vector[:5].astype(np.int64).tolist()
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(BY_NODE, (trees, nodes))
    shapes |= {"categories": (trees, nodes, words), "categorical": (width,), "output": (trees,)}
    shapes |= {"base": (outputs,)}
    return shapes, 5 + sum(math.prod(shape) for shape in shapes.values())


def _split(
    vector: np.ndarray, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    at = 5
    for name, shape in shapes.items():
        size = math.prod(shape)
        yield name, vector[at : at + size].reshape(shape)
        at += size


def make_sets(inside: np.ndarray, words: int) -> np.ndarray:
    """Return sets of categories, (..., words) uint32, from which of them are inside, (..., k)."""
    padded = np.zeros((*inside.shape[:-1], words * WORD), bool)
    padded[..., : inside.shape[-1]] = inside
    bits = padded.reshape(*inside.shape[:-1], words, WORD)
    return (bits * (np.uint64(1) << np.arange(WORD, dtype=np.uint64))).sum(-1).astype(np.uint32)


_WALKED = (
    *("feature", "threshold", "left", "missing_left", "value"),
    *("categories", "categorical", "output"),
)
_TYPES: dict[str, Any] = {
    "feature": np.int32,
    "left": np.int32,
    "missing_left": np.bool_,
    "categories": np.uint32,
    "categorical": np.bool_,
    "output": np.int32,
}


@exact_jit
def _add_trees(
    rows, feature, threshold, left, missing_left, value, categories, categorical, output, out
):
    """Add the leaf of every tree to `out`, (n, outputs), row by row."""
    bits = 32 * categories.shape[2]
    for i in range(len(rows)):
        for t in range(len(feature)):
            node = 0
            while feature[t, node] >= 0:
                field = feature[t, node]
                x = rows[i, field]
                if categorical[field]:
                    if x >= 0 and x < bits:
                        code = np.int64(x)
                        word = np.int64(categories[t, node, code // 32])
                        goes_left = (word >> (code % 32)) & 1 == 1
                    else:
                        goes_left = missing_left[t, node] if not x >= bits else False
                elif x != x:
                    goes_left = missing_left[t, node]
                else:
                    goes_left = x <= threshold[t, node]
                node = left[t, node] + (0 if goes_left else 1)
            out[i, output[t]] += value[t, node]


def _add_trees_by_level(
    rows, feature, threshold, left, missing_left, value, categories, categorical, output, out
):
    """Do the same without numba: all rows go down a tree together."""
    bits = 32 * categories.shape[2]
    every = np.arange(len(rows))
    for t in range(len(feature)):
        node = np.zeros(len(rows), np.int64)
        active = every[feature[t, node] >= 0]
        while len(active):
            at = node[active]
            field = feature[t, at]
            x = rows[active, field]
            missing = np.isnan(x) | (categorical[field] & (x < 0))
            goes_left = np.where(missing, missing_left[t, at], x <= threshold[t, at])
            is_set = categorical[field] & ~missing
            if is_set.any():
                code = np.minimum(np.where(is_set, x, 0), max(bits, 1)).astype(np.int64)
                inside = is_set & (code < bits)
                word = np.zeros(len(at), np.int64)
                word[inside] = categories[t, at[inside], code[inside] // WORD]
                goes_left = np.where(is_set, (word >> (code % WORD)) & 1 == 1, goes_left)
            node[active] = left[t, at] + ~goes_left.astype(bool)
            active = active[feature[t, node[active]] >= 0]
        out[every, output[t]] += value[t, node]
