"""The data set on one device, and what a batch of row numbers stands for.

Images stay as they are stored, a byte a channel and channels last; they become numbers on the
device, a batch at a time.
"""

import numpy as np
import torch
from torch import Tensor

from fedgft.engine.book import Book
from fedgft.engine.settings import Settings

IMAGES = 4  # axes of a block of images


class Rows:
    def __init__(self, book: Book, settings: Settings, device: str) -> None:
        data, self.device = book.dataset, torch.device(device)
        self.dtype = getattr(torch, settings.dtype)
        self.groups, self.classes = len(data.group_names) + 1, len(data.classes)
        self.shape = data.features.shape[1:]
        self.stored = self._stored(data.features)
        cell = data.labels * self.groups + data.groups % self.groups
        self.cell = torch.as_tensor(cell, dtype=torch.long, device=self.device)
        self.label = torch.eye(self.classes, dtype=self.dtype, device=self.device)
        self.label = self.label.repeat_interleave(self.groups, 0)  # cell -> one-hot label
        self.scaled = any(f.mean is not None for f in book.federations)
        mean, inverse = book.scaling(data.features.shape[1], np.dtype(settings.dtype))
        self.mean, self.inverse = self.put(mean), self.put(inverse)

    def _stored(self, features: np.ndarray) -> Tensor:
        if features.ndim == IMAGES:
            features = np.moveaxis(features, 1, -1)
        held = np.require(features, requirements=["C", "W"])  # torch warns of read-only memory
        dtype = torch.uint8 if held.dtype == np.uint8 else self.dtype
        return torch.as_tensor(held, dtype=dtype, device=self.device)

    @property
    def row_bytes(self) -> int:
        """Of one row as a model sees it."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def put(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, dtype=self.dtype, device=self.device)

    def numbers(self, rows: np.ndarray) -> Tensor:
        """Row numbers on the device; from there on nobody waits for the copy."""
        held = torch.as_tensor(rows, dtype=torch.long)
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
