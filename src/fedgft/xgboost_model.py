"""XGBoost's JSON: read an ensemble of trees from it, and put a header of ours into it.

The file is XGBoost's own, so that ``xgboost.Booster().load_model(path)`` reads it. The header is a
JSON text in the attribute `HEADER` of the learner. Nothing in the file is executed, and XGBoost is
not needed to read it. XGBoost sends a value to the left child if

    number      float32(value) < condition         category    the index is not in the node's list

and a missing value as the node says. A `Forest` has ``value <= threshold``, so its threshold is the
next smaller float32 number, and its sets hold the categories that XGBoost does not list.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fedgft.forest import WORD, Forest
from fedgft.store import parse_json

HEADER = "fedgft"
VERSIONS = (2, 3)  # of XGBoost whose files are read
LINKS = {  # objectives, and whether the base score is a probability
    "binary:logistic": True,
    "reg:logistic": True,
    "binary:logitraw": False,
    "multi:softprob": False,
    "multi:softmax": False,
}
MAX_CELLS = 2**27  # trees x nodes of the largest tree
MAX_LISTED = 8  # most columns that an error lists
NO_PARENT = 2**31 - 1
BY_NODE = {  # array of a tree: kind of its numbers
    "left_children": int,
    "right_children": int,
    "parents": int,
    "split_indices": int,
    "split_type": int,
    "default_left": int,
    "split_conditions": float,
    "loss_changes": float,
    "sum_hessian": float,
}


@dataclass(frozen=True)
class Tree:
    """A checked tree of an XGBoost file, with its nodes in the order of a `Forest`.

    The arrays are those of a `Forest`, (nodes,). `listed` has the categories that go right, by the
    number of the node.
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    missing_left: np.ndarray
    value: np.ndarray
    gain: np.ndarray
    cover: np.ndarray
    listed: dict[int, np.ndarray]


def parse_model(text: str | bytes) -> dict[str, Any]:
    """Return the learner in XGBoost's JSON; raise ValueError if it is no model of XGBoost."""
    model = parse_json(text)
    if not isinstance(model, dict) or not isinstance(model.get("learner"), dict):
        raise ValueError("no model of XGBoost: it has no learner")
    version = model.get("version")
    if not isinstance(version, list) or not version or version[0] not in VERSIONS:
        wanted = " or ".join(map(str, VERSIONS))
        raise ValueError(f"of version {str(version)[:40]} of XGBoost; fedgft reads {wanted}")
    return model["learner"]


def read_header(learner: dict[str, Any]) -> str | None:
    """Return the text of our header; None if the model has none."""
    attributes = learner.get("attributes")
    text = attributes.get(HEADER) if isinstance(attributes, dict) else None
    return text if isinstance(text, str) else None


def write_header(text: str | bytes, header: str) -> bytes:
    """Return the JSON of a model with our header in its attributes."""
    model = json.loads(text)
    model["learner"].setdefault("attributes", {})[HEADER] = header
    return json.dumps(model, allow_nan=False).encode()


def check_fields(
    learner: dict[str, Any], names: Sequence[str], levels: Sequence[Sequence[str]]
) -> None:
    """Raise ValueError if the model says that it was trained on other columns or categories.

    Parameters
    ----------
    learner
        What `parse_model` returned.
    names
        The names of the fields.
    levels
        The levels of each field; none for a field of numbers.
    """
    try:
        found = learner.get("feature_names") or []
        if found and list(found) != list(names):
            more = ", ..." if len(names) > MAX_LISTED else ""
            raise ValueError(f"trained on other columns than {', '.join(names[:MAX_LISTED])}{more}")
        stored = learner["gradient_booster"]["model"].get("cats", {}).get("enc", [])
        for name, expected, content in zip(names, levels, stored, strict=False):
            if content and _read_category_names(content) not in ((), tuple(expected)):
                text = f"with other categories of {name!r} than the encoder's: train on "
                raise ValueError(f"{text}`encoder.to_fields(features)`")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"of another schema ({type(error).__name__}: {error})") from None


def _read_category_names(content: Any) -> tuple[str, ...]:
    """Return the names of a column's categories, which XGBoost stores if it saw a data frame."""
    values = content["values"]
    if "offsets" not in content:  # categories that are numbers
        return tuple(map(str, values))
    text = bytes(value % 256 for value in values)
    ends = content["offsets"]
    return tuple(text[a:b].decode("utf-8") for a, b in pairwise(ends))


def read_forest(learner: dict[str, Any], levels: Sequence[int]) -> Forest:
    """Return the trees of a model of XGBoost; raise ValueError if they are not as they should be.

    Parameters
    ----------
    learner
        What `parse_model` returned.
    levels
        The number of levels of each field; 0 for a field of numbers.
    """
    try:
        booster = learner["gradient_booster"]
        if booster["name"] != "gbtree":
            raise ValueError(f"a booster {str(booster['name'])[:40]!r}; fedgft reads 'gbtree'")
        model = booster["model"]
        base = _read_base(learner)
        trees = [_read_tree(tree, levels) for tree in _get_list(model, "trees")]
        output = _read_numbers(model, "tree_info", int, len(trees))
        if _read_count(model["gbtree_model_param"], "num_trees") != len(trees):
            raise ValueError("another number of trees than it says")
        if _read_count(learner["learner_model_param"], "num_feature") != len(levels):
            raise ValueError(f"trained on another number of columns than {len(levels)}")
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"of another schema ({type(error).__name__}: {error})") from None
    forest = _join(trees, output, base, levels)
    forest.check()
    return forest


def _read_base(learner: Any) -> np.ndarray:
    """Return the logits before the first tree, (outputs,)."""
    name = learner["objective"]["name"]
    if name not in LINKS:
        wanted = "'binary:logistic' or 'multi:softprob'"
        raise ValueError(f"of the objective {str(name)[:40]!r}, which is none of {wanted}")
    params = learner["learner_model_param"]
    if _read_count(params, "num_target", 1) != 1:
        raise ValueError("of several targets")
    outputs = max(_read_count(params, "num_class"), 1)
    if (outputs > 1) != name.startswith("multi:"):
        raise ValueError(f"of the objective {name!r} with {outputs} classes")
    text = params["base_score"]
    values = parse_json(text if text.startswith("[") else f"[{text}]")
    base = np.array(values, np.float64)
    if base.shape == (1,):
        base = np.repeat(base, outputs)
    if base.shape != (outputs,) or not np.isfinite(base).all():
        raise ValueError("a base score that does not fit its classes")
    if not LINKS[name]:
        return base
    if not ((base > 0) & (base < 1)).all():
        raise ValueError("a base score that is no probability")
    return np.log(base / (1 - base))


def _read_tree(tree: Any, levels: Sequence[int]) -> Tree:
    """Return a checked tree with its nodes renumbered: a right child follows its left child."""
    params = tree["tree_param"]
    size = _read_count(params, "num_nodes")
    if not size or _read_count(params, "size_leaf_vector", 1) > 1:
        raise ValueError("a tree without nodes" if not size else "leaves that are vectors")
    if _read_count(params, "num_feature") != len(levels):
        raise ValueError("a tree on another number of columns")
    if len(_get_list(tree, "left_children")) != size:
        raise ValueError("a tree with another number of nodes than it says")
    nodes = {name: _read_numbers(tree, name, kind, size) for name, kind in BY_NODE.items()}
    order = _order_nodes(nodes)
    if len(order) != size - _read_count(params, "num_deleted", 0):
        raise ValueError("nodes that no other node leads to")
    place = np.full(size, -1)
    place[order] = np.arange(len(order))
    nodes = {name: values[order] for name, values in nodes.items()}
    inner = nodes["left_children"] >= 0
    feature = np.where(inner, nodes["split_indices"], -1)
    if (feature >= len(levels)).any() or (nodes["split_indices"][inner] < 0).any():
        raise ValueError("a node that asks about a column that there is not")
    if not np.isin(nodes["split_type"], (0, 1)).all():
        raise ValueError("a node of an unknown type")
    is_set = inner & (nodes["split_type"] == 1)
    if (is_set != (np.array([*levels, 0])[feature] > 0)).any():
        raise ValueError("a node that asks for a number in a column of categories, or the reverse")
    condition = nodes["split_conditions"].astype(np.float32)
    below = np.nextafter(condition, np.float32(-np.inf)).clip(np.finfo(np.float32).min)
    return Tree(
        feature=feature,
        threshold=np.where(inner & ~is_set, below, 0.0),
        left=np.where(inner, place[nodes["left_children"]], 0),
        missing_left=inner & (nodes["default_left"] == 1),
        value=np.where(inner, 0.0, condition),
        gain=np.where(inner, nodes["loss_changes"], 0.0),
        cover=nodes["sum_hessian"],
        listed=_read_categories(tree, {int(order[i]): i for i in np.flatnonzero(is_set).tolist()}),
    )


def _order_nodes(nodes: dict[str, np.ndarray]) -> np.ndarray:
    """Return the nodes of a tree level by level from the root; refuse anything that is no tree."""
    left = nodes["left_children"]
    right = nodes["right_children"]
    size = len(left)
    is_leaf = left == -1
    children = np.concatenate((left[~is_leaf], right[~is_leaf]))
    if ((right == -1) != is_leaf).any() or (children <= 0).any() or (children >= size).any():
        raise ValueError("a node with a child that there is not")
    if len(np.unique(children)) < len(children):
        raise ValueError("a node with two parents")
    parents = np.concatenate(2 * [np.flatnonzero(~is_leaf)])
    if nodes["parents"][0] != NO_PARENT or (nodes["parents"][children] != parents).any():
        raise ValueError("a node with another parent than it says")
    levels = [np.zeros(1, np.int64)]
    while len(levels[-1]):  # each node has one parent, so this ends
        inner = levels[-1][~is_leaf[levels[-1]]]
        levels.append(np.stack((left[inner], right[inner]), 1).ravel())
    return np.concatenate(levels)


def _read_categories(tree: Any, wanted: dict[int, int]) -> dict[int, np.ndarray]:
    """Return the categories that a node lists, by its new number; `wanted` has the old numbers."""
    owners = _read_numbers(tree, "categories_nodes", int, None)
    starts = _read_numbers(tree, "categories_segments", int, len(owners))
    sizes = _read_numbers(tree, "categories_sizes", int, len(owners))
    values = _read_numbers(tree, "categories", int, None)
    ends = starts + sizes
    if (starts < 0).any() or (sizes < 0).any() or (ends > len(values)).any() or (values < 0).any():
        raise ValueError("a list of categories that does not fit its tree")
    found = dict(zip(owners.tolist(), zip(starts, ends, strict=True), strict=True))
    if len(found) < len(owners) or not wanted.keys() <= found.keys():
        raise ValueError("nodes without a list of categories, or with two")
    return {new: values[slice(*found[old])] for old, new in wanted.items()}


def _join(trees: list[Tree], output: np.ndarray, base: np.ndarray, levels: Sequence[int]) -> Forest:
    """Return the trees as one forest."""
    count = len(trees)
    nodes = max((len(tree.feature) for tree in trees), default=1)
    words = math.ceil(max(levels, default=0) / WORD)
    if count * nodes * (1 + words) > MAX_CELLS:
        raise ValueError("more nodes than fit into memory")
    arrays = {
        "feature": np.full((count, nodes), -1, np.int32),
        "threshold": np.zeros((count, nodes)),
        "left": np.zeros((count, nodes), np.int32),
        "missing_left": np.zeros((count, nodes), bool),
        **{name: np.zeros((count, nodes)) for name in ("value", "gain", "cover")},
    }
    categories = np.zeros((count, nodes, words), np.uint32)
    for t, tree in enumerate(trees):
        for name, array in arrays.items():
            values = getattr(tree, name)
            array[t, : len(values)] = values
        for node, listed in tree.listed.items():
            categories[t, node] = _make_set(listed, levels[tree.feature[node]], words)
    return Forest(
        **arrays,
        categories=categories,
        categorical=np.array(levels, np.int64) > 0,
        output=output.astype(np.int32),
        base=base,
    )


def _make_set(listed: np.ndarray, levels: int, words: int) -> np.ndarray:
    """Return the words of the set of the categories that are not listed."""
    if (listed >= levels).any():
        raise ValueError(f"a category {listed.max()} in a column of {levels}")
    is_left = np.zeros(words * WORD, bool)
    is_left[:levels] = True
    is_left[listed] = False
    bits = is_left.reshape(words, WORD).astype(np.uint64) << np.arange(WORD, dtype=np.uint64)
    return bits.sum(1).astype(np.uint32)


def _get_list(parent: Any, name: str) -> list[Any]:
    values = parent[name]
    if not isinstance(values, list):
        raise ValueError(f"{name} that is no list")
    return values


def _read_numbers(parent: Any, name: str, kind: type, size: int | None) -> np.ndarray:
    """Return a list of finite numbers as an array; of whole numbers if `kind` is int."""
    values = _get_list(parent, name)
    if size is not None and len(values) != size:
        raise ValueError(f"{name} of {len(values)} numbers instead of {size}")
    if not all(type(value) in ((int,) if kind is int else (int, float)) for value in values):
        raise ValueError(f"{name} with something that is no number")
    array = np.array(values, np.int64 if kind is int else np.float64)
    limit = np.iinfo(np.int32).max if kind is int else float(np.finfo(np.float32).max)
    if not (np.abs(array) <= limit).all():
        raise ValueError(f"{name} with NaN, infinity or a number that is too large")
    return array


def _read_count(parent: Any, name: str, default: int | None = None) -> int:
    """Return a number that XGBoost writes as a text."""
    text = parent[name] if default is None else parent.get(name, str(default))
    if not isinstance(text, str) or not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} that is no number")
    return int(text)
