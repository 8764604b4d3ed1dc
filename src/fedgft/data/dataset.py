"""A table in memory, and a federation: who holds which of its rows."""

from dataclasses import dataclass, field, replace

import numpy as np

from fedgft.data.encoding import Encoder

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
        if len(self.keys) == 0:
            object.__setattr__(self, "keys", np.arange(self.num_clients, dtype=np.uint64))
        features = self.dataset.features
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
