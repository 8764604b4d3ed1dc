"""What the two torch executors share: data on the device, sums of a model's scores, blocks.

They differ in how a client's epochs are computed and in nothing else; that is `Trainer`.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from fedgft.engine.book import Book, Units
from fedgft.engine.flat import layout
from fedgft.engine.lane import Lane, Plan, autocast
from fedgft.engine.rows import Rows
from fedgft.engine.sequential import make_lanes
from fedgft.engine.settings import Settings
from fedgft.engine.task import Task
from fedgft.federated import Cohort
from fedgft.metrics import Tally
from fedgft.models import Model
from fedgft.optim import Moments

PIECE = {"cpu": 2**19, "cuda": 2**28}  # bytes of features in one forward pass of a measurement
WAVE = 2**29  # bytes of models that are in training at a time, or more where lanes hold more
COPIES = 4  # of a model, while it is in training


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Work is split by client, not inside an operation: the result cannot depend on how far."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Spread = Callable[[Callable[[Tensor], Tensor], Iterable[Tensor]], Iterable[Tensor]]
Trainer = Callable[["TorchExecutor", Task, Tensor, Moments], Tensor]


class TorchExecutor:
    def __init__(
        self, book: Book, model: Model, settings: Settings, *, name: str, trainer: Trainer,
        random: bool, least: int = 1,
    ) -> None:  # fmt: skip
        self.book, self.model, self.settings, self.name = book, model, settings, name
        self.random, self.least = random, least  # training draws numbers; rows a batch must have
        self.places = [Rows(book, settings, device) for device in settings.devices]
        self.rows, self.trainer = self.places[0], trainer
        self.module = build(model, book, settings)
        self.layout = layout(self.module)
        self.programs: dict[Any, Any] = {}  # captured for this simulation alone
        self.modules: SimpleQueue[torch.nn.Module] = SimpleQueue()  # one a thread
        for _ in range(self.threads):
            self.modules.put(copy.deepcopy(self.module).eval())

    @property
    def threads(self) -> int:
        """A GPU has enough to do with what one thread tells it."""
        return self.settings.threads if self.rows.device.type == "cpu" else 1

    @cached_property
    def lanes(self) -> list[Lane]:
        plan = Plan(self.settings, self.layout, self.module, self.longest, self.random)
        most = self.settings.cohort or self.book.num_clients
        with self._careful():
            return make_lanes(plan, self.places, most=most * self.book.runs)

    @property
    def longest(self) -> tuple[int, int]:
        """Rows that a client reads in a round, and steps it makes, at most."""
        settings, most = self.settings, int(self.book.sizes.max(initial=1))
        if settings.steps is not None:
            most = min(most, settings.steps * settings.batch_size)
        steps = -(-most // settings.batch_size)
        return settings.epochs * most, settings.epochs * steps

    @property
    def wave(self) -> int | None:
        """Units that are trained before their models are folded into the mean."""
        if self.name == "stacked":
            return None
        each = COPIES * self.layout.size * self.rows.dtype.itemsize
        return max(len(self.lanes), WAVE // each)

    def place(self, params: np.ndarray) -> Tensor:
        return self.rows.put(self.layout.inward(np.asarray(params)))

    def fetch(self, block: Tensor) -> np.ndarray:
        return self.layout.outward(block.cpu().numpy())

    @property
    def trained(self) -> int:
        return self.layout.trained

    def local(self) -> np.ndarray:
        return self.layout.local()

    def zeros(self, units: int) -> Tensor:
        return torch.zeros(units, self.trained, dtype=self.rows.dtype, device=self.rows.device)

    def stored(self, units: int, width: int) -> Tensor:
        """Where single clients train, what they remember waits in the host's memory."""
        host = self.name != "stacked"
        return self.tensor(np.zeros((units, width), self.settings.dtype), host=host)

    def tensor(self, array: np.ndarray, host: bool) -> Tensor:
        """On the device, or in the host's memory where a GPU can reach it by itself."""
        held = torch.from_numpy(array)
        if not host:
            return held.to(self.rows.device)
        return held if self.rows.device.type == "cpu" else held.pin_memory()

    def out(self, stored: Tensor, at: np.ndarray) -> Tensor:
        if not stored.is_pinned():
            return stored[at].to(self.rows.device)
        out = torch.empty(len(at), stored.shape[1], dtype=stored.dtype, device=self.rows.device)
        for i, place in enumerate(at.tolist()):
            out[i].copy_(stored[place], non_blocking=True)
        return out

    def back(self, stored: Tensor, at: np.ndarray, values: Tensor) -> None:
        if not stored.is_pinned():
            stored[at] = values.to(stored.device)
        for i, place in enumerate(at.tolist() if stored.is_pinned() else ()):
            stored[place].copy_(values[i], non_blocking=True)

    def park(self, block: Tensor) -> Tensor:
        """Models that wait for their weights."""
        return block if self.name == "stacked" else block.cpu()

    def column(self, values: np.ndarray) -> Tensor:
        return self.rows.put(values)[:, None]

    def where(self, chosen: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.where(chosen, first, second)

    def moments(self, units: int, *, brief: bool = False) -> Moments:
        steps = np.zeros((units, 2), np.int64)
        if brief and self.name != "stacked":  # a lane has its own, and they are large
            return Moments(None, None, steps)
        return Moments(self.zeros(units), self.zeros(units), steps)

    def recall(self, kept: Moments, at: np.ndarray) -> Moments:
        """A copy of some units' moments."""
        return Moments(self.out(kept.m, at), self.out(kept.v, at), kept.steps[at])

    def train(self, task: Task, block: Tensor, moments: Moments) -> Tensor:
        with one_thread_each(), self._careful():
            return self.trainer(self, task, block, moments)

    def measure(self, units: Units, block: Tensor, which: np.ndarray) -> Tally:
        """Sums over each unit's rows under model `block[which[i]]`; units of one model together."""
        shape = (*units.count.shape, self.rows.classes)
        tally = Tally(units.count, np.empty(shape), np.empty(shape))
        with one_thread_each(), self._careful(), ExitStack() as stack:
            spread: Spread = map  # a GPU's libraries remember what they chose thread by thread
            if self.threads > 1:
                spread = stack.enter_context(ThreadPoolExecutor(self.threads)).map
            for model in np.unique(which).tolist():
                mine, params = np.flatnonzero(which == model), block[model].to(self.rows.device)
                self._sum(spread, tally, units, mine, params)
        return tally

    def _sum(
        self, spread: Spread, tally: Tally, units: Units, mine: np.ndarray, params: Tensor
    ) -> None:
        """The entries of units `mine`, which all look at one model."""
        sizes, cells = units.sizes[mine], self.rows.groups * self.rows.classes
        parts = [self.book.rows[units.low[i] : units.high[i]] for i in mine]
        rows = self.rows.numbers(self.rows.at(np.concatenate(parts)))
        scores = self._scores(spread, rows, int(units.run[mine[0]]), params)
        index = np.repeat(np.arange(len(mine)), sizes) * cells + self.rows.cell[rows].cpu().numpy()
        chosen = scores.argmax(1)
        for c in range(self.rows.classes):
            decided = (chosen == c) + 0 * scores[:, c]  # NaN where the run diverged
            for sums, each in ((tally.score, scores[:, c]), (tally.decision, decided)):
                flat = np.bincount(index, weights=each, minlength=len(mine) * cells)
                sums[mine, ..., c] = flat.reshape(len(mine), *tally.count.shape[1:])

    def _scores(self, spread: Spread, rows: Tensor, run: int, params: Tensor) -> np.ndarray:
        """(rows, classes), in pieces that stay in the cache (or fit the GPU)."""
        views = self.layout.views(params)
        mean, inverse = self.rows.mean[run], self.rows.inverse[run]

        def logits(part: Tensor) -> Tensor:
            module = self.modules.get()
            try:
                with torch.no_grad(), autocast(self.settings, self.rows.device):
                    x = self.rows.seen(part, mean, inverse)
                    return functional_call(module, views, (x,)).double()
            finally:
                self.modules.put(module)

        piece = max(1, PIECE[self.rows.device.type] // self.rows.row_bytes)
        if len(rows) == 0:
            return np.zeros((0, self.rows.classes))
        odds = torch.cat(list(spread(logits, rows.split(piece))))
        odds = (odds - odds.amax(-1, keepdim=True)).exp()
        return (odds / odds.sum(-1, keepdim=True)).cpu().numpy()

    def mix(
        self, coefficients: np.ndarray, block: Tensor, params: Tensor, cohort: Cohort,
        total: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """sum_k c_k (model_k - params) of each run, added to `total`."""
        if self.name == "stacked":
            assert total is None  # there is one wave
            weight, moved = self.rows.put(coefficients), block - params[cohort.run]
            pairs = pairwise(cohort.bounds.tolist())
            with one_thread_each():
                return torch.stack([weight[a:b] @ moved[a:b] for a, b in pairs])
        total = torch.zeros_like(params) if total is None else total
        for k, run in enumerate(cohort.run.tolist()):  # without a copy of large models
            weight, model = float(coefficients[k]), block[k].to(params.device, non_blocking=True)
            total[run].add_(model, alpha=weight).sub_(params[run], alpha=weight)
        return total

    @contextmanager
    def _careful(self) -> Iterator[None]:
        """What torch is told about speed, digits and sameness."""
        if self.rows.device.type == "cpu":
            yield
            return
        same, before = self.settings.deterministic, torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(same)
        try:
            with torch.backends.cudnn.flags(
                enabled=True, benchmark=False, allow_tf32=False, deterministic=same
            ), warnings.catch_warnings():  # fmt: skip
                warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # once, and it does
                yield
        finally:
            torch.use_deterministic_algorithms(before)


def build(model: Model, book: Book, settings: Settings) -> torch.nn.Module:
    data = book.dataset
    with torch.random.fork_rng(devices=[]):
        module = model.module(features=data.features.shape[1], classes=len(data.classes))
    return module.to(dtype=getattr(torch, settings.dtype), device=settings.devices[0])
