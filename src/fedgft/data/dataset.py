"""A table in memory, a federation (which client holds which of its rows), and its scaling.

Clients can standardize their rows without pooling them: each client sends a few float64 sums,

    mean = sum_k s_k / n,    spread^2 = sum_k (q_k + n_k (s_k / n_k - mean)^2) / n,    n = sum_k n_k

where s_k is client k's sum of x and q_k is its sum of squares about its own mean s_k / n_k. Squares
about zero could be added too, but they lose precision: for times in seconds since 1970, only
rounding errors would remain after the square of the mean is subtracted.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedgft.data.encode import Encoder
from fedgft.errors import FedgftError
from fedgft.metrics.group_axis import GroupAxis
from fedgft.metrics.randomized_response import check_epsilon
from fedgft.validation import (
    NO_NUMBERS_AS_LABELS,
    as_array,
    check_instance,
    check_name_list,
    format_value,
)

# Mean and spread of red, green and blue over ImageNet, on a scale from 0 to 1: published weights
# expect pixels that are standardized with them.
PIXEL_MEAN = np.array([0.485, 0.456, 0.406])
PIXEL_SPREAD = np.array([0.229, 0.224, 0.225])
CHUNK_BYTES = 16 << 20  # size of the float64 rows that are processed at a time
MAX_SHOWN = 5  # names of classes or groups in a `repr`
CONSTANT = 1e-12  # a spread below this share of the mean is a rounding error; float32 has 1e-7
_set = object.__setattr__  # sets a field of a frozen dataclass in `__post_init__`


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Rows that are ready to train on, with a fixed list of classes and groups.

    `load` makes one of a table. Make one yourself from arrays. With two classes, the second is the
    positive one, whose probability is the score.

    Parameters
    ----------
    name
        A name for reports.
    features
        (n, d) finite numbers; images are (n, channels, height, width) uint8.
    labels
        (n,) whole numbers: indices into `classes`.
    groups
        (n,) whole numbers: indices into `group_names`; -1 where the group is not recorded.
    columns
        Names of the d features; for images, names of the channels.
    classes
        Names of the classes, two or more, all different; default: ("0", "1").
    group_names
        Names of the groups; default: ("0", "1").
    clients
        (n,) indices into `client_names`; None (default): the rows belong to no client yet, and
        `partition` deals them.
    client_names
        Names of the clients; empty by default.
    test
        (n,) True for the test rows; None (default): `partition` holds rows out at random.
    encoder
        How a raw table becomes these features; None (default): they were given as arrays.
    center
        (d,) what `standardized` subtracted; None (default): nothing.
    scale
        (d,) what `standardized` divided by; None (default): nothing.
    notes
        Sentences that say what was done to the data; empty by default.
    excluded
        The columns of the table that are not features, each with the reason: ("sex", "the group");
        empty by default.
    weights
        (n,) finite numbers >= 0, not all 0: how much each row counts in training and in every
        measurement, relative to the others; None (default): all count the same.
    strata
        (n,) indices into `strata_names`: within them a metric such as "sp|department" compares
        groups; None (default): rows are not divided.
    strata_names
        Names of the strata; empty by default.
    given
        The columns whose values are the strata; empty by default.
    randomized
        The epsilon of the randomized response that the groups went through before they were
        recorded (`fedgft.metrics.randomized_response`): gaps, and the prices of training, are then
        corrected for it; 0 (default): groups are recorded as they are.

    Raises
    ------
    FedgftError
        Lengths, indices or names are inconsistent. A wrong index would count a row in the wrong
        group, or read the memory of another row.

    Examples
    --------
    >>> import numpy as np
    >>> import fedgft
    >>> fedgft.Dataset(
    ...     name="loans",
    ...     features=np.array([[31.0, 2.0], [45.5, 7.0], [28.0, 1.0], [52.0, 9.0]]),
    ...     labels=np.array([0, 1, 1, 1]),
    ...     groups=np.array([0, 1, 0, -1]),
    ...     columns=("income", "years"),
    ...     classes=("no", "yes"),
    ...     group_names=("woman", "man"),
    ... )
    Dataset('loans', 4 rows, 2 features, classes no, yes, groups woman, man)
    """

    name: str
    features: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    columns: tuple[str, ...]
    classes: tuple[str, ...] = ("0", "1")
    group_names: tuple[str, ...] = ("0", "1")
    clients: np.ndarray | None = None
    client_names: tuple[str, ...] = ()
    test: np.ndarray | None = None
    encoder: Encoder | None = None
    center: np.ndarray | None = None
    scale: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    excluded: tuple[tuple[str, str], ...] = ()
    weights: np.ndarray | None = None
    strata: np.ndarray | None = None
    strata_names: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    randomized: float = 0.0

    def __post_init__(self) -> None:
        check_instance("name", self.name, str)
        for name in ("columns", "classes", "group_names", "client_names", "strata_names", "given"):
            least = 2 if name == "classes" else 0
            _set(self, name, check_name_list(name, getattr(self, name), least=least))
        if len(set(self.classes)) < len(self.classes):
            raise FedgftError(f"`classes` must all differ, not {format_value(self.classes)}")
        _set(self, "features", _check_features(self.features))
        rows, width, *pixels = self.features.shape
        if not pixels and len(self.columns) != width:
            text = f"`columns` must name the {width} columns of features, not {len(self.columns)}"
            raise FedgftError(text)
        index_names = {"labels": "classes", "groups": "group_names", "clients": "client_names"}
        index_names["strata"] = "strata_names"
        for name, names in index_names.items():
            values = getattr(self, name)
            if name in ("labels", "groups") or values is not None:
                least = -1 if name == "groups" else 0
                known = len(getattr(self, names))
                indices = _check_indices(name, values, names, known, rows=rows, least=least)
                _set(self, name, indices)
        if self.test is not None:
            _set(self, "test", _check_mask("test", self.test, rows))
        if self.weights is not None:
            _set(self, "weights", check_weights("weights", self.weights, rows))
        for name in ("center", "scale"):
            if getattr(self, name) is not None:
                _set(self, name, _check_scaling(name, getattr(self, name), width))
        if self.randomized:
            check_epsilon(self.randomized)
            if len(self.group_names) < 2:
                text = "is for two groups or more: one group cannot be reported as another"
                raise FedgftError(text, field="randomized_groups", kind="data")
        _ = self.axis  # raises if there are too many strata

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        classes = _shorten_names("classes", self.classes)
        groups = _shorten_names("groups", self.group_names)
        shape = f"{len(self):,} rows, {len(self.columns):,} features"
        return f"Dataset({self.name!r}, {shape}, {classes}, {groups})"

    @property
    def images(self) -> bool:
        """Whether the rows are images."""
        return self.features.ndim == 4

    @cached_property
    def row_weights(self) -> np.ndarray | None:
        """The weights in units of the smallest one above 0, (n,); None if all are equal.

        In these units, weights that are all equal are those of no weights, and whole weights of
        which one is 1 stand for so many equal rows.
        """
        if self.weights is None:
            return None
        found = self.weights / self.weights[self.weights > 0].min()
        return None if (found == 1).all() else found

    @cached_property
    def axis(self) -> GroupAxis | None:
        """What the group axis of sums over these rows means; None: the groups as they are."""
        if self.strata is None and not self.randomized:
            return None
        return GroupAxis(len(self.group_names), self.given, self.strata_names, self.randomized)

    @property
    def num_cells(self) -> int:
        """The number of groups, in all strata, on the group axis of sums."""
        return len(self.group_names) if self.axis is None else self.axis.cells

    @cached_property
    def cells(self) -> np.ndarray:
        """The entry of each row on the group axis of sums, (n,); -1: no recorded group."""
        if self.strata is None:
            return self.groups
        place = self.strata * len(self.group_names) + self.groups
        return np.where(self.groups >= 0, place, -1)

    @property
    def effective_share(self) -> float:
        """How many equally weighted rows a unit of `row_weights` is worth, about; 1 without.

        With weights w, n rows say as much as (sum w)^2 / sum w^2 rows that all count the same.
        """
        weights = self.row_weights
        return 1.0 if weights is None else float(weights.sum() / np.square(weights).sum())

    def standardized(self) -> "Dataset":
        """Return the same rows in units of their own spread; images stay as they are.

        This only preserves precision in float32. The input of a model depends on the `mean` and
        `spread` of each federation, which come from its clients' sums alone.
        """
        if self.images:
            return self
        center = self.features.mean(axis=0, dtype=np.float64)
        spread = self.features.std(axis=0, dtype=np.float64)
        scale = np.where(spread > 0, spread, 1.0)
        features = np.empty_like(self.features)
        step = _chunk_rows(self.features)
        for start in range(0, len(features), step):
            rows = slice(start, start + step)
            features[rows] = (self.features[rows] - center) / scale
        return replace(self, features=features, center=center, scale=scale)


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Which client holds which rows, as one array of offsets even for a million clients.

    `partition` makes one of a `Dataset`.

    Parameters
    ----------
    dataset
        The rows.
    rows
        (n_train,) int32: the rows of client 0, then those of client 1, ...
    offsets
        (k + 1,) int64: client k holds ``rows[offsets[k]:offsets[k + 1]]``.
    test
        (n_test,) int32 test rows: held out from all clients, or drawn from all rows (the paper).
    mean
        (d,) or (channels,): a model receives ``(features - mean) / spread``; None (default): the
        features as they are. `standardize` sets both.
    spread
        (d,) or (channels,) positive numbers, see `mean`; None (default): see there.
    keys
        (k,) client identifiers for random numbers: a client draws the same batches at any position
        in the list. Default: 0, 1, 2, ...

    Examples
    --------
    >>> import fedgft
    >>> federation = fedgft.partition(fedgft.load("synthetic"), clients=4, seed=0)
    >>> federation
    Federation('synthetic', 4 clients, 14,000 training rows, 6,000 test rows)
    >>> federation.num_clients, federation.sizes.sum().item()
    (4, 14000)
    >>> federation.client(0).dtype  # row numbers of client 0
    dtype('int32')
    """

    dataset: Dataset
    rows: np.ndarray
    offsets: np.ndarray
    test: np.ndarray
    mean: np.ndarray | None = None
    spread: np.ndarray | None = None
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))

    def __post_init__(self) -> None:
        check_instance("dataset", self.dataset, Dataset)
        for name in ("rows", "test"):
            values = getattr(self, name)
            indices = _check_indices(name, values, "rows of dataset", len(self.dataset))
            _set(self, name, indices.astype(np.int32, copy=False))
        offsets = _check_indices("offsets", self.offsets, "rows", len(self.rows) + 1)
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(self.rows):
            raise FedgftError(f"`offsets` must run from 0 to the number of rows, {len(self.rows)}")
        if (np.diff(offsets) < 0).any():
            raise FedgftError("`offsets` must not fall from one client to the next")
        _set(self, "offsets", offsets)
        if len(self.keys) == 0:
            _set(self, "keys", np.arange(self.num_clients, dtype=np.uint64))
        if len(self.keys) != self.num_clients:
            raise FedgftError(f"`keys`: there are {len(self.keys)} for {self.num_clients} clients")
        features = self.dataset.features
        if (self.mean is None) != (self.spread is None):
            raise FedgftError("`mean` and `spread` must be given together")
        if self.mean is not None:
            for name in ("mean", "spread"):
                _set(self, name, _check_scaling(name, getattr(self, name), features.shape[1]))
        elif self.dataset.images and features.dtype == np.uint8 and features.shape[1] == 3:
            _set(self, "mean", 255 * PIXEL_MEAN)
            _set(self, "spread", 255 * PIXEL_SPREAD)

    def __repr__(self) -> str:
        clients = f"{self.num_clients:,} client{'s' * (self.num_clients != 1)}"
        rows = f"{len(self.rows):,} training rows, {len(self.test):,} test rows"
        scaled = "" if self.mean is None or self.dataset.images else ", standardized"
        return f"Federation({self.dataset.name!r}, {clients}, {rows}{scaled})"

    @property
    def num_clients(self) -> int:
        """Number of clients, including those without rows."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Number of training rows of each client, (k,)."""
        return np.diff(self.offsets)

    @cached_property
    def weighted_sizes(self) -> np.ndarray:
        """What each client's training rows count together, (k,): the sum of `row_weights`."""
        weights = self.dataset.row_weights
        if weights is None:
            return self.sizes
        owner = np.repeat(np.arange(self.num_clients), self.sizes)
        return np.bincount(owner, weights[self.rows], minlength=self.num_clients)

    def client(self, k: int) -> np.ndarray:
        """Return the training rows of client k."""
        return self.rows[self.offsets[k] : self.offsets[k + 1]]

    def scale_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the features of these rows as a model receives them, in float64."""
        x = self.dataset.features[rows].astype(np.float64)
        if self.mean is None or self.spread is None:
            return x
        shape = (-1, *[1] * (x.ndim - 2))
        return (x - self.mean.reshape(shape)) / self.spread.reshape(shape)


def _shorten_names(kind: str, names: tuple[str, ...]) -> str:
    more = f", ... ({len(names):,})" if len(names) > MAX_SHOWN else ""
    return f"{kind} {', '.join(names[:MAX_SHOWN])}{more}"


def _check_features(features: Any) -> np.ndarray:
    """Require rows of finite numbers; checking only minimum and maximum avoids a copy."""
    array = _as_plain_array("features", features)
    if array.ndim < 2:
        raise FedgftError(f"`features` must have two axes or more, (n, d), not {array.ndim}")
    if array.dtype.kind not in "fiub":
        raise FedgftError(f"`features` must hold numbers, not {array.dtype}")
    if array.dtype.kind == "f" and array.size:
        low = float(array.min())  # NaN if any value is NaN
        high = float(array.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise FedgftError("`features` hold NaN or infinity; fill such values or leave rows out")
        if max(-low, high) > np.finfo(np.float32).max:
            raise FedgftError("`features` hold numbers beyond the range of float32; rescale them")
    return array


def _check_indices(
    name: str, values: Any, kind: str, known: int, *, rows: int | None = None, least: int = 0
) -> np.ndarray:
    """Require whole numbers from `least` to ``known - 1``, one per row; return them as int64."""
    array = _as_plain_array(name, values)
    if array.ndim != 1:
        raise FedgftError(f"`{name}` must have one axis, one index per row, not {array.ndim}")
    if rows is not None and len(array) != rows:
        raise FedgftError(f"`{name}` has {len(array):,} rows, features has {rows:,}")
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iuf":
        raise FedgftError(f"`{name}` must hold indices (whole numbers), not {array.dtype}")
    numbers = array[np.isfinite(array)] if array.dtype.kind == "f" else array[:0]
    if (numbers != np.floor(numbers)).any():
        advice = f"; {NO_NUMBERS_AS_LABELS}" if name == "labels" else ""
        raise FedgftError(f"`{name}` holds fractions, not indices{advice}")
    low = array.min().item()
    high = array.max().item()
    if not low >= least or not high < known:  # written so that NaN is refused, too
        wrong = high if low >= least else low
        raise FedgftError(f"`{name}` holds index {wrong}; {kind} has {known:,}, from {least} on")
    return array.astype(np.int64, copy=False)


def _check_mask(name: str, values: Any, rows: int) -> np.ndarray:
    array = _as_plain_array(name, values)
    if array.shape != (rows,) or array.dtype != np.bool_:
        found = f"{array.dtype} of shape {array.shape}"
        raise FedgftError(f"`{name}` must hold {rows:,} truth values, one per row, not {found}")
    return array


def check_weights(name: str, values: Any, rows: int) -> np.ndarray:
    """Require one finite number of at least 0 per row, not all 0; return them as float64."""
    array = _as_plain_array(name, values)
    if array.shape != (rows,):
        raise FedgftError(f"`{name}` must hold {rows:,} numbers, one per row, not {array.shape}")
    if array.dtype.kind not in "fiub":
        raise FedgftError(f"`{name}` must hold numbers, not {array.dtype}")
    array = array.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))  # NaN is refused, too
    if len(wrong):
        found = f"row {wrong[0]:,} has {array[wrong[0]]:g}"
        raise FedgftError(f"must be finite numbers of at least 0, and {found}", field=name)
    if not (array > 0).any():
        raise FedgftError("are all zero: no row counts", field=name, kind="data")
    return array


def _check_scaling(name: str, values: Any, width: int) -> np.ndarray:
    """Require one finite number per column or channel; divisors must be positive."""
    array = _as_plain_array(name, values)
    if array.dtype.kind not in "fiu" or array.shape != (width,) or not np.isfinite(array).all():
        raise FedgftError(f"`{name}` must hold {width} finite numbers, one per column")
    if name in ("scale", "spread") and not (array > 0).all():
        raise FedgftError(f"`{name}` must hold positive numbers")
    return array


def _as_plain_array(name: str, values: Any) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        raise FedgftError(f"`{name}` is a masked array: leave the masked rows out")
    return values if isinstance(values, np.ndarray) else as_array(name, values)


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over some rows, per column. Invariant: ``a + b`` holds the sums over the rows of both.

    Parameters
    ----------
    count
        (d,) Number of values; a site may lack some values of a column.
    sum
        (d,) sum of the values.
    squared_deviations
        (d,) sum of the squared distances to the mean of these rows.
    """

    count: np.ndarray
    sum: np.ndarray
    squared_deviations: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, weights: np.ndarray | None = None) -> "Moments":
        """Return the sums over rows (n, d) in float64; with weights (n,), weighted sums."""
        if weights is not None:
            count = float(weights.sum())
            total = weights @ values
            mean = total / (count if count > 0 else 1.0)
            squared_deviations = weights @ np.square(values - mean)
            return cls(np.full(len(total), count), total, squared_deviations)
        total = values.sum(axis=0)
        squared_deviations = np.square(values - total / max(1, len(values))).sum(axis=0)
        return cls(np.full(len(total), float(len(values))), total, squared_deviations)

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        between = (self.mean - other.mean) ** 2 * self.count * other.count / np.maximum(count, 1)
        return Moments(
            count,
            self.sum + other.sum,
            self.squared_deviations + other.squared_deviations + between,
        )

    @property
    def mean(self) -> np.ndarray:
        """Mean of each column, (d,); 0 where there is no value."""
        return self.sum / np.maximum(self.count, 1)


def compute_spread(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the standard deviations that a model divides by; 1 for constant columns."""
    return np.sqrt(np.where(variance > (CONSTANT * mean) ** 2, variance, 1.0))


def _chunk_rows(features: np.ndarray) -> int:
    """Return how many rows to convert to float64 at a time."""
    return max(1, CHUNK_BYTES // (8 * max(1, features.shape[1])))


def compute_moments(federation: Federation) -> Moments:
    """Return the sums over all training rows, computed in chunks; weighted if the rows are.

    The result does not depend on which client holds which row.
    """
    features = federation.dataset.features
    weights = federation.dataset.row_weights
    step = _chunk_rows(features)
    total = Moments.of(np.empty((0, features.shape[1])))
    for start in range(0, len(federation.rows), step):
        rows = federation.rows[start : start + step]
        chosen = None if weights is None else weights[rows]
        total += Moments.of(features[rows].astype(np.float64), chosen)
    return total


def standardize(federation: Federation) -> Federation:
    """Return the federation, scaled so that its training rows have mean 0 and spread 1.

    Mean and spread come from sums of the clients, as in a real federation. Images keep the
    constants of `Federation`: no pixel statistics are computed.

    Parameters
    ----------
    federation
        The clients and their rows, from `partition`.

    Returns
    -------
    Federation
        The same clients and rows, with `mean` and `spread`; models then see scaled features.

    Examples
    --------
    >>> import fedgft
    >>> federation = fedgft.partition(fedgft.load("synthetic"), clients=4, seed=0)
    >>> scaled = fedgft.standardize(federation)
    >>> scaled
    Federation('synthetic', 4 clients, 14,000 training rows, 6,000 test rows, standardized)
    >>> scaled.mean.shape == scaled.spread.shape == (len(scaled.dataset.columns),)
    True
    """
    check_instance("federation", federation, Federation, "partition() makes one of a Dataset")
    features = federation.dataset.features
    if features.ndim not in (2, 4):
        raise FedgftError(
            f"`federation`: the features have {features.ndim} axes, and standardize scales the "
            "columns of a table (n, d); scale them before you make the Dataset"
        )
    if federation.dataset.images:
        return federation
    if not len(federation.rows):
        raise FedgftError("`federation`: no client has a training row to take a mean from")
    sums = compute_moments(federation)
    spread = compute_spread(sums.mean, sums.squared_deviations / np.maximum(sums.count, 1))
    return replace(federation, mean=sums.mean, spread=spread)


def get_raw_scaling(federation: Federation) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and spread, (d,) each, in the units of the raw table.

    A model receives ``(raw - mean) / spread``, whether or not the data set was `standardized`.
    """
    data = federation.dataset
    width = data.features.shape[1]
    mean = np.zeros(width) if federation.mean is None else federation.mean
    spread = np.ones(width) if federation.spread is None else federation.spread
    center = np.zeros(width) if data.center is None else data.center
    scale = np.ones(width) if data.scale is None else data.scale
    return center + scale * mean, scale * spread
