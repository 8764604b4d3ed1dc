"""Boosters of XGBoost in messages: JSON in one array, checked before anything else reads it.

Flower's `FedXgbBagging` and `FedXgbCyclic` exchange a booster as the bytes of XGBoost's JSON, in an
array named "0". Here these bytes are read into a `Booster`, which holds nothing but what was
checked, and are written anew from it. Nothing is unpickled, and XGBoost reads only what we wrote: a
child that does not exist would make it read beyond its memory.

A client sends its new trees only. The server multiplies their leaves by the client's share of the
round's weight, so that the trees of a round together move the logits as far as one tree would.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord

from fedgft.data.encode import MAX_LEVELS
from fedgft.errors import FedgftError
from fedgft.formatting import one_line
from fedgft.settings import SETTINGS
from fedgft.store import parse_json

ARRAY = "0"  # the name of the array, as Flower has it
LEVELS = "fedgft.levels"  # the attribute with the number of categories of each column
ROOT_PARENT = 2**31 - 1
MAX_DEPTH = 32
MAX_NODES = 2**16 - 1  # per tree
MAX_TREES = 100_000  # of a whole booster
MAX_NEW_TREES = 100  # of a reply, unless the run's settings allow fewer
MAX_BYTES = 2**29
MAX_LEAF = 100.0  # no sensible tree moves a logit so far
TREE_LR = 0.3
"The learning rate of boosting where a run gives none: rounds cost seconds, so it is large."
FLOAT_MAX = float(np.finfo(np.float32).max)
NUMBERS = ("split_conditions", "loss_changes")
NODES = ("left_children", "right_children", "parents", "split_indices", "split_type")
SETS = ("categories_nodes", "categories_segments", "categories_sizes", "categories")
Tree = dict[str, Any]
"A tree as XGBoost's JSON has it: lists with one entry per node."
Table = dict[str, np.ndarray]


@dataclass(frozen=True)
class Booster:
    """An ensemble of trees for two classes.

    Parameters
    ----------
    levels
        The number of categories of each column; 0 for a column of numbers.
    base
        The probability of the second class before the first tree.
    trees
        The trees.
    rounds
        Number of trees after 0, 1, 2, ... iterations.
    """

    levels: tuple[int, ...]
    base: float = 0.5
    trees: list[Tree] = field(default_factory=list)
    rounds: tuple[int, ...] = (0,)

    def to_json(self, attributes: Mapping[str, str] | None = None, *, parallel: int = 1) -> str:
        """Return XGBoost's JSON, which its releases from 2.1 on read.

        Parameters
        ----------
        attributes
            Texts to store in the file, by name.
        parallel
            The number of trees per iteration that the text states; `FedXgbBagging` takes so many.
        """
        model = {
            "gbtree_model_param": {
                "num_parallel_tree": str(parallel),
                "num_trees": str(len(self.trees)),
            },
            "iteration_indptr": list(self.rounds),
            "tree_info": [0] * len(self.trees),
            "trees": [{**tree, "id": number} for number, tree in enumerate(self.trees)],
        }
        learner = {
            "attributes": {LEVELS: json.dumps(self.levels), **(attributes or {})},
            "feature_names": [],
            "feature_types": ["c" if count else "q" for count in self.levels],
            "gradient_booster": {"model": model, "name": "gbtree"},
            "learner_model_param": {
                "base_score": f"{self.base:.9E}",
                "boost_from_average": "0",
                "num_class": "0",
                "num_feature": str(len(self.levels)),
                "num_target": "1",
            },
            "objective": {"name": "binary:logistic", "reg_loss_param": {"scale_pos_weight": "1"}},
        }
        return json.dumps({"learner": learner, "version": [2, 1, 0]}, separators=(",", ":"))

    def to_arrays(self, *, parallel: int = 1) -> ArrayRecord:
        """Return the booster as a message carries it."""
        data = self.to_json(parallel=parallel).encode()
        return ArrayRecord({ARRAY: Array(np.frombuffer(data, np.uint8))})

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Any],
        *,
        source: str,
        levels: Sequence[int] | None = None,
        max_trees: int = MAX_TREES,
        max_depth: int = MAX_DEPTH,
    ) -> "Booster":
        """Read and check a booster from a message.

        Parameters
        ----------
        arrays
            The model in the message.
        source
            The start of error messages, such as "its model".
        levels
            The columns that it must have; None: any.
        max_trees, max_depth
            The most trees, and the most splits above a leaf, that it may have.
        """
        try:
            (name,) = arrays
            array = arrays[name]
            if name != ARRAY or array.dtype != "uint8" or len(array.shape) != 1:
                raise ValueError(f"it is no single array of bytes named '{ARRAY}'")
            if len(array.data) > MAX_BYTES:
                raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
            return read_booster(
                array.numpy().tobytes(), levels=levels, max_trees=max_trees, max_depth=max_depth
            )
        except Exception as error:  # a decoder may raise any exception for untrusted bytes
            known = isinstance(error, ValueError)
            reason = one_line(error) if known else f"{type(error).__name__}, {one_line(error, 60)}"
            problem = f"{source} is not a booster that fedgft can use ({reason})"
            raise FedgftError(problem, kind="data") from None

    def grown(self, trees: Sequence[Tree]) -> "Booster":
        """Return the booster after one more iteration, with these trees."""
        together = [*self.trees, *trees]
        return replace(self, trees=together, rounds=(*self.rounds, len(together)))


def empty_booster(levels: Sequence[int], base: float = 0.5) -> ArrayRecord:
    """Return a booster without trees: the initial model of `FedXgbBagging` or `FedXgbCyclic`.

    Parameters
    ----------
    levels
        The number of categories of each column; 0 for a column of numbers. With an encoder of
        fedgft, `encoder.level_counts`.
    base
        The probability of the second class. The first round replaces 0.5 by the share of that class
        in the sums of all clients.

    Examples
    --------
    >>> from fedgft.flower import empty_booster
    >>> list(empty_booster([0, 5]))
    ['0']
    """
    if not len(levels) or any(count < 0 for count in levels):
        text = "must list the number of categories of each column, and 0 for numbers"
        raise FedgftError(text, field="levels")
    return Booster(tuple(map(int, levels)), float(base)).to_arrays()


def is_booster(arrays: Mapping[str, Any]) -> bool:
    """Whether a model looks like the bytes of a booster rather than like tensors."""
    return list(arrays) == [ARRAY] and arrays[ARRAY].dtype == "uint8"


# Reading


def read_booster(
    data: bytes,
    *,
    levels: Sequence[int] | None = None,
    max_trees: int = MAX_TREES,
    max_depth: int = MAX_DEPTH,
) -> Booster:
    """Read XGBoost's JSON; raise ValueError, KeyError or TypeError if it is not what we exchange.

    The result holds only numbers that were checked, and nothing else of the text.
    """
    learner = parse_json(data.decode("utf-8"))["learner"]
    if learner["objective"]["name"] != "binary:logistic":
        raise ValueError("its objective is not binary:logistic")
    if learner["gradient_booster"]["name"] != "gbtree":
        raise ValueError("it is no ensemble of trees (gbtree)")
    found = _read_levels(learner)
    if levels is not None and found != tuple(levels):
        raise ValueError("its columns are others: the sites' tables or schemas differ")
    model = learner["gradient_booster"]["model"]
    rounds = tuple(model["iteration_indptr"])
    count = len(model["trees"])
    if count > max_trees:
        raise ValueError(f"it has {count:,} trees; at most {max_trees:,} are allowed here")
    steps = np.diff(_integers(rounds, 0, count))
    if not rounds or rounds[0] != 0 or rounds[-1] != count or (steps < 0).any():
        raise ValueError("its iterations do not fit its trees")
    if any(model["tree_info"]) or len(model["tree_info"]) != count:
        raise ValueError("its trees are not those of two classes")
    base = float(str(learner["learner_model_param"]["base_score"]).strip("[]"))
    if not 0 < base < 1:
        raise ValueError("its base score is no probability")
    return Booster(found, base, read_trees(model["trees"], found, max_depth), rounds)


def read_trees(
    trees: Sequence[Any], levels: tuple[int, ...], max_depth: int = MAX_DEPTH
) -> list[Tree]:
    """Check trees of XGBoost's JSON, and return what predictions and importances need of them."""
    return [_read_tree(tree, levels, max_depth) for tree in trees]


def _read_levels(learner: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of categories of each column, from the attribute that we write."""
    if LEVELS not in learner["attributes"]:
        raise ValueError("it does not state its columns: was it made by fedgft?")
    levels = tuple(_integers(parse_json(learner["attributes"][LEVELS]), 0, MAX_LEVELS).tolist())
    if not levels or learner["feature_types"] != ["c" if count else "q" for count in levels]:
        raise ValueError("the types of its columns do not fit its levels")
    return levels


def _read_tree(content: Any, levels: tuple[int, ...], max_depth: int) -> Tree:
    """Check a tree and return it without what predictions do not need."""
    size = len(content["left_children"])
    if not 0 < size <= MAX_NODES:
        raise ValueError(f"a tree has {size:,} nodes, not 1 to {MAX_NODES:,}")
    if content["tree_param"]["num_deleted"] != "0":
        raise ValueError("a tree has deleted nodes")
    table = {name: _integers(content[name], -1, ROOT_PARENT) for name in NODES}
    table["default_left"] = _integers(content["default_left"], 0, 1)
    table |= {name: _numbers(content[name]) for name in NUMBERS}
    if any(len(values) != size for values in table.values()):
        raise ValueError("the lists of a tree are of different lengths")
    inner = _check_structure(table, size, max_depth)
    if np.abs(table["split_conditions"][~inner]).max() > MAX_LEAF:
        raise ValueError(f"a leaf moves the logit by more than {MAX_LEAF:g}")
    sets = {name: _integers(content[name], 0, 2**31 - 1) for name in SETS}
    _check_splits(table, sets, inner, levels)
    return _make_tree(table, sets, inner, len(levels))


def _check_structure(table: Table, size: int, max_depth: int) -> np.ndarray:
    """Check that the nodes form one tree, and return which of them are inner nodes.

    Children have larger numbers than their node, so every walk ends.
    """
    left, right, parents = (table[name] for name in NODES[:3])
    inner = left != -1
    nodes = np.flatnonzero(inner)
    children = np.concatenate((left[nodes], right[nodes]))
    if (right[~inner] != -1).any() or len(children) != size - 1:
        raise ValueError("the nodes of a tree do not form a tree")
    if (children <= np.tile(nodes, 2)).any() or (children >= size).any():
        raise ValueError("a node of a tree has a child that there is not")
    if len(np.unique(children)) < len(children) or parents[0] != ROOT_PARENT:
        raise ValueError("a node of a tree has two parents")
    if (parents[children] != np.tile(nodes, 2)).any():
        raise ValueError("a node of a tree names another parent")
    depth = np.zeros(size, int)
    for node in nodes.tolist():
        depth[left[node]] = depth[right[node]] = depth[node] + 1
    if depth.max() > max_depth:
        raise ValueError(f"a tree is {depth.max()} splits deep; at most {max_depth} are allowed")
    return inner


def _check_splits(table: Table, sets: Table, inner: np.ndarray, levels: tuple[int, ...]) -> None:
    """Check that splits ask about columns and categories that exist."""
    columns = table["split_indices"][inner]
    if (columns < 0).any() or (columns >= len(levels)).any():
        raise ValueError("a tree asks about a column that there is not")
    counts = np.array(levels)
    if (table["split_type"][inner] != (counts[columns] > 0)).any():
        raise ValueError("a tree asks about categories of a column of numbers, or the reverse")
    asking = np.flatnonzero(inner & (table["split_type"] == 1))
    nodes, starts, sizes, categories = (sets[name] for name in SETS)
    if not np.array_equal(nodes, asking) or not len(nodes) == len(starts) == len(sizes):
        raise ValueError("the sets of categories of a tree do not fit its nodes")
    ends = np.cumsum(sizes)
    if not np.array_equal(starts, ends - sizes) or len(categories) != sizes.sum():
        raise ValueError("the sets of categories of a tree do not fit each other")
    known = np.repeat(counts[table["split_indices"][nodes]], sizes)
    if (categories >= known).any():
        raise ValueError("a tree asks about a category that there is not")


def _make_tree(table: Table, sets: Table, inner: np.ndarray, columns: int) -> Tree:
    """Return a tree with the leaves' values, its splits and their gains, and no sums of rows.

    XGBoost also writes the sum of the hessians and the value of every node. They are zero here:
    predictions do not use them, and they state how many rows a node has.
    """
    size = len(inner)
    conditions = table["split_conditions"]
    zeros = [0.0] * size
    return {
        "base_weights": _shortest(np.where(inner, 0.0, conditions)),
        **{name: sets[name].tolist() for name in SETS},
        "default_left": table["default_left"].tolist(),
        "id": 0,
        **{name: np.where(inner, table[name], -1).tolist() for name in NODES[:2]},
        "loss_changes": _shortest(np.where(inner, table["loss_changes"], 0.0), digits=3),
        "parents": table["parents"].tolist(),
        **{name: np.where(inner, table[name], 0).tolist() for name in NODES[3:]},
        "split_conditions": _shortest(conditions),
        "sum_hessian": zeros,
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(columns),
            "num_nodes": str(size),
            "size_leaf_vector": "1",
        },
    }


def _integers(values: Any, least: int, most: int) -> np.ndarray:
    if not all(type(value) is int and least <= value <= most for value in values):
        raise ValueError("a list holds other than whole numbers in their range")
    return np.array(list(values), np.int64)


def _numbers(values: Any) -> np.ndarray:
    if not all(type(v) in (int, float) and abs(v) <= FLOAT_MAX for v in values):
        raise ValueError("a list holds other than finite numbers")
    return np.array(values, np.float64)


def _shortest(values: np.ndarray, digits: int | None = None) -> list[float]:
    """Return numbers whose text is as short as single precision, or `digits`, allows."""
    if digits is not None:
        return [float(f"{value:.{digits}g}") for value in values.tolist()]
    return [float(str(value)) for value in values.astype(np.float32)]


# Leaves


def largest_leaf(trees: Sequence[Tree]) -> float:
    """Return how far the trees together can move a logit."""
    return sum(max(abs(value) for value, left in _leaves(tree) if left == -1) for tree in trees)


def _leaves(tree: Tree) -> zip:
    return zip(tree["split_conditions"], tree["left_children"], strict=True)


def scale_leaves(trees: Sequence[Tree], factor: float) -> list[Tree]:
    """Return the trees with the values of their leaves multiplied by a factor."""
    scaled = []
    for tree in trees:
        leaf = np.array(tree["left_children"]) == -1
        values = np.array(tree["split_conditions"])
        values = _shortest(np.where(leaf, values * factor, values))
        at_leaves = np.where(leaf, values, 0.0).tolist()
        scaled.append({**tree, "split_conditions": values, "base_weights": at_leaves})
    return scaled


# How boosting is set up


def boosting_rate(config: Mapping[str, Any]) -> tuple[float, int]:
    """Return the learning rate, and the number of trees per client and round, of a run."""
    rate = float(config.get("lr", TREE_LR))
    return rate, int(config.get("local-trees", SETTINGS["local_trees"].default))


def left_to_do(config: Mapping[str, Any]) -> float:
    """Return the share of a step that a round leaves undone: (1 - lr)^trees, at least 0."""
    rate, trees = boosting_rate(config)
    return max(1.0 - rate, 0.0) ** trees


def base_rate(counts: np.ndarray) -> float:
    """Return the share of the second class in counts by label and group, within (0, 1)."""
    negative, positive = (max(float(each), 0.0) for each in counts.sum(-1))
    share = (positive + 1.0) / (negative + positive + 2.0)
    return share if math.isfinite(share) else 0.5
