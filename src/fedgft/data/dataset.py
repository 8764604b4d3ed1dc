"""A table in memory, and a federation: who holds which of its rows."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedgft.arguments import array_of, instance, names, shown
from fedgft.data.encoding import Encoder
from fedgft.errors import FedgftError

# Of red, green and blue over ImageNet, on a scale from 0 to 1: published weights expect them.
PIXEL_MEAN = np.array([0.485, 0.456, 0.406])
PIXEL_SPREAD = np.array([0.229, 0.224, 0.225])


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows that are ready to train on. Classes and groups are fixed here, never by a batch."""

    name: str
    features: np.ndarray  # (n, d), float32; of images (n, channels, height, width), uint8
    labels: np.ndarray  # (n,), int64: an index into classes
    groups: np.ndarray  # (n,), int64: an index into group_names; -1 where not recorded
    columns: tuple[str, ...]  # d names
    classes: tuple[str, ...] = ("0", "1")
    group_names: tuple[str, ...] = ("0", "1")
    clients: np.ndarray | None = None  # (n,), int64: an index into client_names
    client_names: tuple[str, ...] = ()
    test: np.ndarray | None = None  # (n,), bool: the user's own test rows
    encoder: Encoder | None = None  # how a raw table became these features
    centre: np.ndarray | None = None  # (d,), float64: what standardised() took off,
    scale: np.ndarray | None = None  # (d,), float64: and what it divided by
    notes: tuple[str, ...] = ()  # what was done to the data, one sentence each

    def __post_init__(self) -> None:
        """Lengths, indices and names fit each other; an index that does not would count a row in
        another group, or read another row's memory. Whole numbers of any type become int64."""
        instance("name", self.name, str)
        self._set("columns", names("columns", self.columns))
        self._set("classes", names("classes", self.classes, least=2))
        self._set("group_names", names("group_names", self.group_names))
        self._set("client_names", names("client_names", self.client_names))
        if len(set(self.classes)) < len(self.classes):
            raise FedgftError(f"classes must be different names, not {shown(self.classes)}")
        self._set("features", _features(self.features))
        rows = len(self.features)
        if self.features.ndim == 2 and len(self.columns) != self.features.shape[1]:
            raise FedgftError(
                f"columns must name the {self.features.shape[1]} columns of features, "
                f"and there are {len(self.columns)} names"
            )
        self._set("labels", _indices("labels", self.labels, rows, "classes", len(self.classes)))
        known = len(self.group_names)
        self._set("groups", _indices("groups", self.groups, rows, "group_names", known, least=-1))
        if self.clients is not None:
            known = len(self.client_names)
            self._set("clients", _indices("clients", self.clients, rows, "client_names", known))
        if self.test is not None:
            self._set("test", _mask("test", self.test, rows))
        for name in ("centre", "scale"):
            if getattr(self, name) is not None:
                self._set(name, _scaling(name, getattr(self, name), self.features.shape[1:2]))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> bool:
        return self.features.ndim == 4

    def standardised(self) -> "Dataset":
        """The same rows in units of their own spread.

        Only a change of numbers, for the sake of float32: what a model sees is decided by
        each federation's own `mean` and `spread`, which come from its clients' sums alone.
        Images have constants for that.
        """
        if self.images:
            return self
        centre = self.features.mean(axis=0, dtype=np.float64)
        spread = self.features.std(axis=0, dtype=np.float64)
        scale = np.where(spread > 0, spread, 1.0)
        features = ((self.features - centre) / scale).astype(self.features.dtype)
        return replace(self, features=features, centre=centre, scale=scale)


@dataclass(frozen=True, eq=False)
class Federation:
    """Client k holds `rows[offsets[k]:offsets[k + 1]]`; `test` rows are nobody's or everybody's.

    A million clients are a table of offsets. `keys` name the clients for the random numbers,
    so a client draws the same batches wherever it stands in the list.
    """

    dataset: Dataset
    rows: np.ndarray  # (n_train,), int32
    offsets: np.ndarray  # (k + 1,), int64
    test: np.ndarray  # (n_test,), int32
    mean: np.ndarray | None = None  # (d,) or (channels,): a model sees (features - mean) / spread
    spread: np.ndarray | None = None
    keys: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))

    def __post_init__(self) -> None:
        """Rows lie inside the data set, and clients hold theirs one after another."""
        instance("dataset", self.dataset, Dataset)
        for name in ("rows", "test"):
            checked = _indices(
                name, getattr(self, name), None, "rows of dataset", len(self.dataset)
            )
            object.__setattr__(self, name, checked.astype(np.int32, copy=False))
        offsets = _indices("offsets", self.offsets, None, "rows", len(self.rows) + 1)
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(self.rows):
            raise FedgftError(
                f"offsets must begin with 0 and end with the number of rows, {len(self.rows)}"
            )
        if (np.diff(offsets) < 0).any():
            raise FedgftError("offsets must not fall: client k holds rows[offsets[k]:offsets[k+1]]")
        object.__setattr__(self, "offsets", offsets)
        if len(self.keys) == 0:
            object.__setattr__(self, "keys", np.arange(self.num_clients, dtype=np.uint64))
        if len(self.keys) != self.num_clients:
            raise FedgftError(f"keys: there are {len(self.keys)} for {self.num_clients} clients")
        features = self.dataset.features
        if (self.mean is None) != (self.spread is None):
            raise FedgftError("mean and spread must be given together")
        if self.mean is not None:
            for name in ("mean", "spread"):
                checked = _scaling(name, getattr(self, name), features.shape[1:2])
                object.__setattr__(self, name, checked)
        coloured = features.dtype == np.uint8 and features.shape[1:2] == (3,)
        if self.mean is None and self.dataset.images and coloured:
            object.__setattr__(self, "mean", 255 * PIXEL_MEAN)
            object.__setattr__(self, "spread", 255 * PIXEL_SPREAD)

    @property
    def num_clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    def client(self, k: int) -> np.ndarray:
        return self.rows[self.offsets[k] : self.offsets[k + 1]]

    def seen(self, rows: np.ndarray) -> np.ndarray:
        """Features of these rows as a model sees them, in float64."""
        x = self.dataset.features[rows].astype(np.float64)
        if self.mean is None or self.spread is None:
            return x
        room = (-1, *[1] * (x.ndim - 2))
        return (x - self.mean.reshape(room)) / self.spread.reshape(room)


def _features(features: Any) -> np.ndarray:
    """Rows of finite numbers: one pass for the smallest, one for the largest, no copy of any."""
    array = _array("features", features)
    if array.ndim < 2:
        raise FedgftError(f"features must have two axes or more, (n, d), not {array.ndim}")
    if array.dtype.kind not in "fiub":
        raise FedgftError(f"features must hold numbers, not {array.dtype}")
    if array.dtype.kind == "f" and array.size:
        low, high = float(array.min()), float(array.max())  # NaN, where there is one
        if not (np.isfinite(low) and np.isfinite(high)):
            raise FedgftError("features hold NaN or infinity; fill such values or leave rows out")
        if max(-low, high) > np.finfo(np.float32).max:
            raise FedgftError("features hold numbers beyond the range of float32; rescale them")
    return array


def _indices(
    name: str, values: Any, rows: int | None, kind: str, known: int, *, least: int = 0
) -> np.ndarray:
    """Whole numbers from `least` to `known` - 1, one a row, as int64."""
    array = _array(name, values)
    if array.ndim != 1:
        raise FedgftError(f"{name} must have one axis, one index a row, not {array.ndim}")
    if rows is not None and len(array) != rows:
        raise FedgftError(f"{name} has {len(array):,} rows, features has {rows:,}")
    if array.dtype.kind not in "iuf" and array.size:
        raise FedgftError(f"{name} must hold indices (whole numbers), not {array.dtype}")
    if not array.size:
        return np.empty(0, np.int64)
    low, high = array.min().item(), array.max().item()
    if not low >= least or not high < known:  # written so that NaN is refused, too
        wrong = low if not low >= least else high
        raise FedgftError(f"{name} holds the index {wrong}; {kind} has {known:,}, from {least} on")
    if array.dtype.kind == "f" and (array != np.floor(array)).any():
        raise FedgftError(f"{name} holds fractions, not indices")
    return array.astype(np.int64, copy=False)


def _mask(name: str, values: Any, rows: int) -> np.ndarray:
    array = _array(name, values)
    if array.shape != (rows,) or array.dtype != np.bool_:
        raise FedgftError(
            f"{name} must hold True or False for each of {rows:,} rows, not {array.dtype} of shape "
            f"{array.shape}"
        )
    return array


def _scaling(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """One finite number for each column (or color channel); what is divided by is positive."""
    array = _array(name, values)
    if array.dtype.kind not in "fiu" or array.shape != shape or not np.isfinite(array).all():
        raise FedgftError(f"{name} must hold {shape[0]} finite numbers, one for each column")
    if name in ("scale", "spread") and not (array > 0).all():
        raise FedgftError(f"{name} must hold positive numbers")
    return array


def _array(name: str, values: Any) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        raise FedgftError(f"{name} is a masked array: leave the masked rows out")
    if isinstance(values, np.ndarray):
        return values
    return array_of(name, values)
