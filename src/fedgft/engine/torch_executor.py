"""What the two torch executors share: data on the device, sums of a model's scores, blocks.

They differ in how a client's epochs are computed and in nothing else; that is `Trainer`.
"""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from fedgft.engine.book import Book, Units
from fedgft.engine.settings import Settings
from fedgft.engine.task import Task
from fedgft.federated import Cohort
from fedgft.metrics import Tally
from fedgft.models import Model, tensors
from fedgft.optim import Moments

PIECE = {"cpu": 2**19, "cuda": 2**28}  # bytes of features in one forward pass of a measurement


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a module lies in its flat vector, in the order of `models.tensors`."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    trained: int  # the length of the part that is trained

    def views(self, flat: Tensor, *, first: int = 0) -> dict[str, Tensor]:
        """Named views of a flat vector that begins with tensor number `first`."""
        out, at = {}, 0
        for name, shape in zip(self.names[first:], self.shapes[first:], strict=True):
            if at == len(flat):
                break
            out[name] = flat[at : at + shape.numel()].view(shape)
            at += shape.numel()
        return out


def layout(module: torch.nn.Module) -> Layout:
    named = tensors(module)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return Layout(tuple(named), tuple(t.shape for t in named.values()), trained)


def residual(probs: Tensor, labels: Tensor, weights: Tensor, price: Tensor) -> Tensor:
    """d/dlogits of weights * cross-entropy + <price, probs>: the whole objective in one line."""
    dear = price - (price * probs).sum(-1, keepdim=True)
    return weights.unsqueeze(-1) * (probs - labels) + probs * dear


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Work is split by client, not inside an operation: the result cannot depend on how far."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Rows:
    """The data set on the device, and what a batch of row numbers stands for."""

    def __init__(self, book: Book, settings: Settings) -> None:
        data, self.device = book.dataset, torch.device(settings.device)
        self.dtype = getattr(torch, settings.dtype)
        self.groups, self.classes = len(data.group_names) + 1, len(data.classes)
        features = np.require(data.features, requirements="W")  # torch warns of read-only memory
        self.features = torch.as_tensor(features, dtype=self.dtype, device=self.device)
        if self.features.ndim == 4:
            self.features = self.features.contiguous(memory_format=torch.channels_last)
        cell = data.labels * self.groups + data.groups % self.groups
        self.cell = torch.as_tensor(cell, dtype=torch.long, device=self.device)
        self.label = torch.eye(self.classes, dtype=self.dtype, device=self.device)
        self.label = self.label.repeat_interleave(self.groups, 0)  # cell -> one-hot label
        self.scaled = any(f.mean is not None for f in book.federations)
        mean, inverse = book.scaling(data.features.shape[1], np.dtype(settings.dtype))
        self.mean, self.inverse = self.put(mean), self.put(inverse)

    def put(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, dtype=self.dtype, device=self.device)

    def seen(self, rows: Tensor, run: Any) -> Tensor:
        """Features as that run sees them; `rows` and `run` share leading axes."""
        x = self.features.index_select(0, rows.reshape(-1)).reshape(
            *rows.shape, *self.features.shape[1:]
        )
        if not self.scaled:
            return x
        mean, inverse = self.mean[run], self.inverse[run]
        return (x - mean.unsqueeze(-2)) * inverse.unsqueeze(-2)


Trainer = Callable[["TorchExecutor", Task, Tensor, Moments], Tensor]


class TorchExecutor:
    def __init__(
        self, book: Book, model: Model, settings: Settings, *, name: str, trainer: Trainer,
        random: bool,
    ) -> None:  # fmt: skip
        self.book, self.model, self.settings, self.name = book, model, settings, name
        self.random = random  # training draws random numbers
        self.rows, self.trainer = Rows(book, settings), trainer
        self.module = build(model, book, settings)
        self.layout = layout(self.module)
        self.modules: SimpleQueue[torch.nn.Module] = SimpleQueue()  # one a thread
        for _ in range(settings.threads):
            self.modules.put(copy.deepcopy(self.module))

    def place(self, params: np.ndarray) -> Tensor:
        return self.rows.put(np.array(params))

    def fetch(self, block: Tensor) -> np.ndarray:
        return block.cpu().numpy()

    @property
    def trained(self) -> int:
        return self.layout.trained

    def zeros(self, units: int) -> Tensor:
        return torch.zeros(units, self.trained, dtype=self.rows.dtype, device=self.rows.device)

    def column(self, values: np.ndarray) -> Tensor:
        return self.rows.put(values)[:, None]

    def where(self, chosen: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.where(chosen, first, second)

    def moments(self, units: int) -> Moments:
        m = self.zeros(units)
        return Moments(m, m.clone(), np.zeros((units, 2), np.int64))

    def recall(self, kept: Moments, at: np.ndarray) -> Moments:
        """A copy of some units' moments."""
        return Moments(kept.m[at], kept.v[at], kept.steps[at])

    def train(self, task: Task, block: Tensor, moments: Moments) -> Tensor:
        with one_thread_each():
            return self.trainer(self, task, block, moments)

    def measure(self, units: Units, block: Tensor, which: np.ndarray) -> Tally:
        """Sums over each unit's rows under model `block[which[i]]`; units of one model together."""
        shape = (*units.count.shape, self.rows.classes)
        tally = Tally(units.count, np.empty(shape), np.empty(shape))

        def work(model: int) -> None:
            self._sum(tally, units, np.flatnonzero(which == model), block[model])

        with one_thread_each(), torch.no_grad():
            models = np.unique(which).tolist()
            if self.settings.threads == 1 or len(models) == 1:
                for model in models:
                    work(model)
            else:
                with ThreadPoolExecutor(self.settings.threads) as pool:
                    list(pool.map(work, models))
        return tally

    def _sum(self, tally: Tally, units: Units, mine: np.ndarray, params: Tensor) -> None:
        """The entries of units `mine`, which all look at one model."""
        sizes, cells = units.sizes[mine], self.rows.groups * self.rows.classes
        parts = [self.book.rows[units.low[i] : units.high[i]] for i in mine]
        rows = torch.as_tensor(np.concatenate(parts), dtype=torch.long, device=self.rows.device)
        scores = self._scores(rows, int(units.run[mine[0]]), params)
        index = np.repeat(np.arange(len(mine)), sizes) * cells + self.rows.cell[rows].cpu().numpy()
        chosen = scores.argmax(1)
        for c in range(self.rows.classes):
            decided = (chosen == c) + 0 * scores[:, c]  # NaN where the run diverged
            for sums, each in ((tally.score, scores[:, c]), (tally.decision, decided)):
                flat = np.bincount(index, weights=each, minlength=len(mine) * cells)
                sums[mine, ..., c] = flat.reshape(len(mine), *tally.count.shape[1:])

    def _scores(self, rows: Tensor, run: int, params: Tensor) -> np.ndarray:
        """(rows, classes), in pieces that stay in the cache (or fit the GPU)."""
        views, module = self.layout.views(params), self.modules.get()
        piece = max(1, PIECE[self.rows.device.type] // self.rows.features[0].nbytes)
        try:
            logits = [
                functional_call(module.eval(), views, (self.rows.seen(part, run),))
                for part in rows.split(piece)
            ]
        finally:
            self.modules.put(module)
        if not logits:
            return np.zeros((0, self.rows.classes))
        odds = torch.cat(logits).double()
        odds = (odds - odds.amax(-1, keepdim=True)).exp()
        return (odds / odds.sum(-1, keepdim=True)).cpu().numpy()

    def mix(
        self, coefficients: np.ndarray, block: Tensor, params: Tensor, cohort: Cohort
    ) -> Tensor:
        """sum_k c_k (model_k - params) of each run."""
        weight, moved = self.rows.put(coefficients), block - params[cohort.run]
        pairs = pairwise(cohort.bounds.tolist())
        with one_thread_each():
            return torch.stack([weight[a:b] @ moved[a:b] for a, b in pairs])


def build(model: Model, book: Book, settings: Settings) -> torch.nn.Module:
    data = book.dataset
    with torch.random.fork_rng(devices=[]):
        module = model.module(features=data.features.shape[1], classes=len(data.classes))
    return module.to(dtype=getattr(torch, settings.dtype), device=settings.device)
