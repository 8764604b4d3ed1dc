"""Trees that all sites grow together, from sums by bin: messages, and the side of a site.

The trees are those of the rows of all sites (`fedgft.engine.trees`). A site keeps nothing between
messages. Each message holds what the site needs: the trees so far, the bins, the prices, and the
splits of the tree that grows. The site recomputes the gradients of its rows, walks the rows to the
nodes that the message lists, and returns the sums of both by (node, bin), as whole numbers.

    stage      in the message                      in the reply
    "count"    cells of each column                rows by cell, and by label
    "sum"      trees, bins, splits, nodes, prices  gradients and hessians by (node, bin)
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedgft.data.schema import Schema
from fedgft.engine.trees import kernels
from fedgft.engine.trees.bins import LARGEST, Bins, merge_rare_levels, place_edges
from fedgft.engine.trees.fit import choose_scale
from fedgft.errors import FedgftError
from fedgft.flower.messages import RECORD, VERSION, Request, check_version, read_price, read_request
from fedgft.forest import BY_NODE, Forest
from fedgft.formatting import one_line
from fedgft.privacy.noise import Budget
from fedgft.privacy.policy import SitePolicy

HISTOGRAMS = "fedgft_histograms"
FOREST = "forest"  # the array of a model, `Forest.to_vector`
CELLS = 4096  # in which sites count the values of a column of numbers
SPREADS = 5.0  # of a column, on each side of its mean: where its cells end
MAX_LEAF = 100.0  # no sensible tree moves a logit so far
MAX_BYTES = 2**29  # of a forest
MAX_CODES = 256  # bins of a column, missing values included


class SiteForest:
    """Trees that all sites grow together, as the model of a `Site`.

    Its rows are arrays (n, columns) of numbers, of indices of categories (0, 1, ...), and of NaN
    where a value is missing.

    Parameters
    ----------
    levels
        The number of categories of each column; 0 for a column of numbers.
    classes
        The number of classes.
    """

    def __init__(self, levels: Sequence[int], classes: int = 2) -> None:
        self.levels = tuple(map(int, levels))
        self.classes = classes
        self.load(empty_forest(levels, classes))

    def load(self, arrays: ArrayRecord) -> None:
        """Take the received trees; raise a `FedgftError` if they do not fit the columns."""
        self.forest = read_forest(arrays, self.levels, self.classes)
        self._arrays = arrays

    def arrays(self) -> ArrayRecord:
        """Return the received trees."""
        return self._arrays

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return the probabilities (n, classes), rounded so that their sums are exact."""
        p = np.rint(self.probabilities(x) * kernels.FINE) / kernels.FINE
        return np.hstack((1.0 - p, p)) if p.shape[1] == 1 else p

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """Return the probability of the second class, (n, 1), or of every class."""
        if x.ndim != 2 or x.shape[1] != len(self.levels):
            text = f"has {x.shape[-1]} columns; the trees ask about {len(self.levels)}"
            raise FedgftError(f"the site's table {text}", kind="data")
        margins = self.forest.margins(x)
        p = np.empty_like(margins)
        kernels.set_probabilities(0, len(p), margins, p)
        return p


def empty_forest(levels: Sequence[int], classes: int = 2) -> ArrayRecord:
    """Return a model without trees, which gives all classes the same probability."""
    shape = dict.fromkeys(BY_NODE, np.zeros((0, 1))) | {"categories": np.zeros((0, 1, 0))}
    base = np.zeros(1 if classes == 2 else classes)
    is_set = np.array(levels) > 0
    return pack_forest(Forest(**shape, categorical=is_set, output=np.zeros(0), base=base))


def pack_forest(forest: Forest) -> ArrayRecord:
    """Return a forest as a message carries it."""
    return ArrayRecord({FOREST: Array(forest.to_vector())})


def read_forest(arrays: Mapping[str, Any], levels: Sequence[int], classes: int) -> Forest:
    """Read and check a forest from a message; raise a `FedgftError` unless it fits the columns."""
    try:
        forest = Forest.parse_vector(arrays[FOREST].numpy())
        if not np.array_equal(forest.categorical, np.array(levels) > 0):
            raise ValueError("its columns are others: the sites' tables or schemas differ")
        if len(forest.base) != (1 if classes == 2 else classes):
            raise ValueError("its classes are others")
        if max(np.abs(each).max(initial=0) for each in (forest.value, forest.base)) > MAX_LEAF:
            raise ValueError(f"a leaf moves the logit by more than {MAX_LEAF:g}")
        return forest
    except Exception as error:  # a decoder may raise any exception for untrusted bytes
        reason = one_line(error) if isinstance(error, ValueError) else type(error).__name__
        problem = f"the trees are none that fedgft can use ({reason})"
        raise FedgftError(problem, kind="data") from None


def compress_forest(forest: Forest) -> np.ndarray:
    """Return as few bytes as a site needs to apply a forest: without gains and covers."""
    nothing = np.zeros_like(forest.gain)
    vector = replace(forest, gain=nothing, cover=nothing).to_vector()
    return np.frombuffer(zlib.compress(vector.tobytes(), 6), np.uint8)


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells in which sites count the values of their columns; bins are unions of cells.

    Numbers have `CELLS` equal cells, the last one open. Categories have a cell per level.

    Parameters
    ----------
    low, width
        (f,): where the cells of each column begin, and their width.
    levels
        (f,): the number of levels of each column; 0 for numbers.
    """

    low: np.ndarray
    width: np.ndarray
    levels: tuple[int, ...]

    @classmethod
    def of(cls, schema: Schema) -> "Cells":
        """Return the cells that follow from the mean and the spread of each column."""
        widths = [len(field.columns) for field in schema.encoder.fields]
        first = np.cumsum([0, *widths[:-1]])
        levels = schema.encoder.level_counts
        is_number = np.array(levels) == 0
        mean, spread = np.zeros(len(levels)), np.ones(len(levels))
        mean[is_number] = schema.mean[first[is_number]]
        spread[is_number] = schema.spread[first[is_number]]
        return cls(mean - SPREADS * spread, 2 * SPREADS * spread / CELLS, levels)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where the cells of each column begin, and the number of all cells."""
        return np.cumsum([0, *(count or CELLS for count in self.levels)])

    def upper(self, f: int) -> np.ndarray:
        """Return the largest number of each cell of a column."""
        edges = self.low[f] + self.width[f] * np.arange(1, CELLS + 1)
        edges[-1] = LARGEST
        return np.minimum(edges, LARGEST)

    def count(self, x: np.ndarray) -> np.ndarray:
        """Return the rows of (n, f) by cell, the cells of all columns after each other."""
        counts = []
        for f, levels in enumerate(self.levels):
            known = x[~np.isnan(x[:, f]), f].astype(np.float64)
            cell = known.astype(np.int64) if levels else np.searchsorted(self.upper(f), known)
            counts.append(np.bincount(cell, minlength=levels or CELLS))
        return np.concatenate(counts).astype(np.int64)

    def place_bins(self, counts: np.ndarray, *, most: int, least_rows: int) -> Bins:
        """Return the bins that follow from the counts of all sites; see `agree_on_bins`."""
        upper = [np.empty(0) for _ in self.levels]
        level_bins = [np.empty(0, np.int64) for _ in self.levels]
        for f, levels in enumerate(self.levels):
            found = counts[self.offsets[f] : self.offsets[f + 1]]
            if levels:
                level_bins[f] = merge_rare_levels(found, most)
            elif found.any():
                held = found > 0
                values = self.upper(f)[held]
                upper[f] = place_edges(values, found[held], most=most, least_rows=least_rows)
                upper[f][-1] = LARGEST  # also for sites that were not counted
        return Bins(tuple(upper), tuple(level_bins))

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the cells as arrays of a message."""
        return {"low": self.low, "width": self.width, "levels": np.array(self.levels)}


def bins_to_arrays(bins: Bins) -> dict[str, np.ndarray]:
    """Return bins as arrays of a message."""
    sizes = np.array([len(each) for each in bins.upper])
    upper = np.concatenate(bins.upper)
    return {"sizes": sizes, "upper": upper, "level-bins": np.concatenate(bins.level_bins)}


def check_exact(budget: Budget, *, secure: bool, source: str = "") -> None:
    """Raise a `FedgftError` if a run or a site wants protection that exact sums do not have.

    `source` is the start of the message: the site that wants it.
    """
    asked = {
        "epsilon": budget.epsilon is not None,
        "min_count": budget.min_count > 0,
        "secure": secure,
    }
    text = "does not protect the histograms of model trees, which are exact sums; use xgboost"
    for name, is_asked in asked.items():
        if is_asked:
            raise FedgftError(f"{source}`{name}` {text}", field=name, kind="unsupported")


class ArrayReader:
    """Reads the arrays of a message or of a reply, whose content is not trusted.

    Parameters
    ----------
    content
        The content of the message.
    source
        The start of error messages.
    """

    def __init__(self, content: RecordDict, source: str) -> None:
        self.source = source
        records = list(content.array_records.values())
        self.arrays = records[0] if len(records) == 1 else ArrayRecord()

    def take(self, name: str, kind: type, shape: tuple[int | None, ...]) -> np.ndarray:
        """Return an array of this type and shape; None: any length."""
        try:
            found = self.arrays[name].numpy()
        except Exception as error:  # a decoder may raise any exception for untrusted bytes
            self.fail(f"no '{name}' that can be read ({type(error).__name__})")
        fits = len(found.shape) == len(shape) and all(
            size in (None, length) for size, length in zip(shape, found.shape, strict=True)
        )
        if found.dtype != np.dtype(kind) or not fits:
            self.fail(f"'{name}' as {found.dtype} of shape {found.shape}")
        if kind is np.float64 and not np.isfinite(found).all():
            self.fail(f"NaN or infinity in '{name}'")
        return found

    def fail(self, problem: str) -> NoReturn:
        """Raise a `FedgftError` about the sender."""
        raise FedgftError(f"{self.source} sends {problem}", kind="data")


def make_arrays(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return arrays as a message carries them."""
    return ArrayRecord({name: Array(np.ascontiguousarray(a)) for name, a in arrays.items()})


# The side of a site


def histogram_reply(message: Message, context: Context, site: Any) -> Message:
    """Count the values of a site's columns, or sum the gradients of its rows by node and bin."""
    request = read_request(message)
    policy = SitePolicy(context, site.name, request)
    check_version(request, f"the server (seen from site '{site.name}')")
    secure = bool("privacy.secure" in request or context.node_config.get("secure"))
    check_exact(policy.agree(), secure=secure, source=f"site '{site.name}': ")
    if not isinstance(site.model, SiteForest) or not site.in_memory:
        text = f"site '{site.name}': model trees needs a SiteForest, and `rows` as arrays"
        raise FedgftError(text, field="model", kind="conflict")
    reader = ArrayReader(message.content, f"the server (seen from site '{site.name}')")
    answer = {"count": _count_rows, "sum": _sum_rows}.get(str(request.get("stage")))
    if answer is None:
        reader.fail("no stage that is known")
    arrays = answer(reader, site, request)
    about = ConfigRecord({"version": VERSION, "site": site.name})
    return Message(RecordDict({RECORD: about, "arrays": make_arrays(arrays)}), reply_to=message)


def _count_rows(reader: ArrayReader, site: Any, request: Request) -> dict[str, np.ndarray]:
    """Return the training rows by cell, and by label."""
    width = len(site.model.levels)
    if reader.take("levels", np.int64, (width,)).tolist() != list(site.model.levels):
        reader.fail("other columns than the site has: the sites' tables or schemas differ")
    low, widths = (reader.take(name, np.float64, (width,)) for name in ("low", "width"))
    cells = Cells(low, np.maximum(widths, 0.0), site.model.levels)
    return {"cells": cells.count(site.rows[0]), "labels": site.counts().sum(-1).astype(np.int64)}


def _sum_rows(reader: ArrayReader, site: Any, request: Request) -> dict[str, np.ndarray]:
    """Return the sums of gradients and hessians of the training rows by node and bin."""
    site.load(_decompress_forest(reader))
    x = site.rows[0]
    bins = _read_bins(reader, site.model.levels)
    codes = np.empty((x.shape[1], len(x)), np.uint8)
    bins.encode(x, np.arange(len(x)), codes, 1)
    nodes, at = _walk(reader, codes)
    g, h = _compute_gradients(reader, site, request)
    slot = np.full(int(at.max(initial=0)) + 1, -1)
    slot[nodes[nodes < len(slot)]] = np.flatnonzero(nodes < len(slot))
    rows = np.flatnonzero(slot[at] >= 0)
    which = slot[at[rows]]
    out = np.zeros((len(nodes), int(bins.offsets[-1]), 2), np.int64)
    for f, size in enumerate(bins.sizes.tolist()):
        place = which * size + codes[f, rows]
        part = slice(bins.offsets[f], bins.offsets[f + 1])
        for k, values in enumerate((g, h)):  # sums below 2^53 are exact in float64
            sums = np.bincount(place, values[rows], minlength=len(nodes) * size)
            out[:, part, k] = sums.reshape(len(nodes), size)
    return {"histograms": out}


def _decompress_forest(reader: ArrayReader) -> ArrayRecord:
    """Return the forest in a message, which is not checked yet."""
    data = reader.take(FOREST, np.uint8, (None,)).tobytes()
    unpacker = zlib.decompressobj()
    try:
        values = np.frombuffer(unpacker.decompress(data, MAX_BYTES), np.float64)
    except (zlib.error, ValueError):
        reader.fail("trees whose bytes are damaged")
    return ArrayRecord({FOREST: Array(values)})


def _read_bins(reader: ArrayReader, levels: Sequence[int]) -> Bins:
    """Read the bins of a message."""
    width = len(levels)
    sizes = reader.take("sizes", np.int64, (width,))
    upper = reader.take("upper", np.float64, (None,))
    level_bins = reader.take("level-bins", np.int64, (sum(levels),))
    fits = ((sizes >= 0) & (sizes < MAX_CODES)).all() and sizes.sum() == len(upper)
    if not fits or ((level_bins < 0) | (level_bins >= MAX_CODES - 1)).any():
        reader.fail("bins that do not fit the columns")
    edges = np.split(upper, np.cumsum(sizes)[:-1])
    return Bins(tuple(edges), tuple(np.split(level_bins, np.cumsum(levels)[:-1])))


def _walk(reader: ArrayReader, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes that the message lists, and the node that each row has reached."""
    feature = reader.take("feature", np.int32, (None,))
    size = len(feature)
    left = reader.take("left", np.int32, (size,))
    packed = reader.take("goes-left", np.uint8, (size, MAX_CODES // 8))
    nodes = reader.take("nodes", np.int64, (None,))
    inner = left > 0
    wrong = inner & ((left <= np.arange(size)) | (left >= size - 1))
    wrong |= inner & ((feature < 0) | (feature >= len(codes)))
    is_new = len(np.unique(nodes)) == len(nodes) <= size
    if wrong.any() or not is_new or ((nodes < 0) | (nodes >= size)).any():
        reader.fail("a tree whose nodes do not fit each other")
    goes_left = np.unpackbits(packed, axis=1).view(np.bool_)
    at = np.zeros(codes.shape[1], np.int64)
    rows = np.flatnonzero(inner[at])
    while len(rows):
        here = at[rows]
        at[rows] = left[here] + ~goes_left[here, codes[feature[here], rows]]
        rows = rows[inner[at[rows]]]
    return nodes, at


def _compute_gradients(
    reader: ArrayReader, site: Any, request: Request
) -> tuple[np.ndarray, np.ndarray]:
    """Return gradient and hessian of each row as whole numbers, as in the simulator."""
    x, y, a = (np.asarray(part) for part in site.rows)
    classes, groups, _ = site.names.shape
    price = read_price(request, site.names, site=site.name).reshape(1, -1, classes)
    p = site.model.probabilities(x)
    output = request.get("output")
    if type(output) is not int or not 0 <= output < p.shape[1] or np.abs(price).max() > 1e6:
        reader.fail("an output that there is not, or prices out of range")
    weight = np.ones(price.shape[:2])
    columns = (y, y * groups + a % groups, np.zeros(len(y), np.int64), np.empty(0))
    scale = np.array(choose_scale(weight, price))
    packed = np.empty(len(y), np.int64)
    kernels.pack_gradients(0, len(y), p, columns, weight, price, output, scale, packed)
    h = packed & 0xFFFFFFFF
    return (packed - h) >> 32, h
