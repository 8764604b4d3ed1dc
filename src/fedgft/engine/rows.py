"""The data set on one device, and what a batch of row numbers stands for.

Images stay as they are stored, a byte a channel and channels last; they become numbers on the
device, a batch at a time. On a GPU there are only those that a run reads; a CPU has them mapped.
"""

import numpy as np
import torch
from torch import Tensor

from fedgft.engine.book import Book
from fedgft.engine.settings import Settings

IMAGES = 4  # axes of a block of images
CHUNK = 4096  # rows that are copied to a GPU in one go


class Rows:
    def __init__(self, book: Book, settings: Settings, device: str) -> None:
        data, self.device = book.dataset, torch.device(device)
        self.dtype = getattr(torch, settings.dtype)
        self.groups, self.classes = len(data.group_names) + 1, len(data.classes)
        self.shape = data.features.shape[1:]
        self.used = np.unique(book.rows) if self.device.type == "cuda" else None
        self.stored = self._stored(data.features)
        cell = data.labels * self.groups + data.groups % self.groups
        cell = cell if self.used is None else cell[self.used]
        self.cell = torch.as_tensor(cell, dtype=torch.long, device=self.device)
        self.label = torch.eye(self.classes, dtype=self.dtype, device=self.device)
        self.label = self.label.repeat_interleave(self.groups, 0)  # cell -> one-hot label
        self.scaled = any(f.mean is not None for f in book.federations)
        mean, inverse = book.scaling(data.features.shape[1], np.dtype(settings.dtype))
        self.mean, self.inverse = self.put(mean), self.put(inverse)

    def _stored(self, features: np.ndarray) -> Tensor:
        if features.ndim == IMAGES:
            features = np.moveaxis(features, 1, -1)
        dtype = torch.uint8 if features.dtype == np.uint8 else self.dtype
        if self.used is None:
            held = np.require(features, requirements=["C", "W"])  # torch warns of read-only memory
            return torch.as_tensor(held, dtype=dtype)
        size = (len(self.used), *features.shape[1:])
        stored = torch.empty(size, dtype=dtype, device=self.device)
        for at in range(0, len(self.used), CHUNK):
            part = features[self.used[at : at + CHUNK]]
            stored[at : at + CHUNK] = torch.as_tensor(part, dtype=dtype)
        return stored

    def at(self, rows: np.ndarray) -> np.ndarray:
        """Where rows of the data set are here."""
        return rows if self.used is None else np.searchsorted(self.used, rows)

    @property
    def row_bytes(self) -> int:
        """Of one row as a model sees it."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def put(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, dtype=self.dtype, device=self.device)

    def numbers(self, places: np.ndarray) -> Tensor:
        """On the device; nobody waits for the copy."""
        held = torch.as_tensor(places, dtype=torch.long)
        if self.device.type == "cuda":
            held = held.pin_memory()
        return held.to(self.device, non_blocking=True)

    def seen(self, rows: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
        """Features as a run sees them; `rows` and its mean and 1 / spread share leading axes."""
        x = self.stored.index_select(0, rows.reshape(-1)).to(self.dtype)
        x = x.reshape(*rows.shape, *self.stored.shape[1:])
        if len(self.shape) == IMAGES - 1:
            x = x.movedim(-1, -3)
        if not self.scaled:
            return x
        room = (*mean.shape[:-1], 1, mean.shape[-1], *[1] * (len(self.shape) - 1))
        return (x - mean.reshape(room)) * inverse.reshape(room)

    def tables(self, weights: np.ndarray, price: np.ndarray) -> tuple[Tensor, Tensor]:
        """Units' row weights (u, cells) and prices (u, cells, classes)."""
        return self.put(weights).flatten(1), self.put(price).flatten(1, 2)
