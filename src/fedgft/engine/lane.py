"""Room for one client at a time: everything that a local step reads or writes, at fixed places.

So a step is the same program whoever trains. On a GPU it is captured once a batch size as a CUDA
graph and replayed for every client and batch: launching it kernel by kernel would take far longer
than the kernels. A short last batch has a graph of its own, since rows that weigh nothing would
still move BatchNorm's means; a size that comes once only is not worth one.
"""

import copy
import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedgft.engine.flat import CONVOLUTION, Layout, residual
from fedgft.engine.rows import Rows
from fedgft.engine.settings import Settings
from fedgft.engine.task import Task
from fedgft.engine.work import Work
from fedgft.optim import Moments, replayable_step

MOST_GRAPHS = 32  # of different batch sizes in a lane; further sizes are run step by step


@dataclass(frozen=True)
class Plan:
    """What all lanes of an executor have in common. (Not the executor itself: two that know each
    other are freed late, and a GPU's memory does not wait.)"""

    settings: Settings
    layout: Layout
    module: torch.nn.Module
    longest: tuple[int, int]  # rows that a client reads in a round, and steps it makes, at most
    random: bool  # training draws random numbers


class Lane:
    def __init__(self, plan: Plan, rows: Rows) -> None:
        self.plan, self.rows, layout = plan, rows, plan.layout
        self.graphs: dict[int, Any] = {}  # by batch size; None: seen once, False: not to be had
        self.module = _uncounted(copy.deepcopy(plan.module)).to(rows.device).train()
        self.cuda = rows.device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(rows.device) if self.cuda else None
        self.pool: Any = None

        def new(*shape: int, dtype: torch.dtype = rows.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=rows.device)

        most, steps = plan.longest
        self.params, self.grad, self.m, self.v = (new(layout.trained) for _ in range(4))
        self.others = new(layout.size - layout.trained)
        self.start, self.drift, self.total = new(0), new(0), new(0)
        self.weights, self.price = new(len(rows.label)), new(len(rows.label), rows.classes)
        self.mean, self.inverse = (torch.zeros_like(t[0]) for t in (rows.mean, rows.inverse))
        self.lr = new()
        # torch's Adam on a GPU asks for float32 here
        exact = not (self.cuda and plan.settings.optimizer.adaptive)
        self.rates = new(steps, dtype=torch.float64 if exact else torch.float32)
        self.count = new(dtype=torch.float32)
        self.order, self.ramp = new(most, dtype=torch.long), torch.arange(most, device=rows.device)
        self.at, self.done = new(dtype=torch.long), new(dtype=torch.long)
        self._leaves()

    def _leaves(self) -> None:
        """Views that autograd takes for parameters; for bfloat16 those of convolutions are of a
        copy that one pass over memory makes, and not one small kernel a layer."""
        layout, half = self.plan.layout, self.plan.settings.precision == "bf16"
        self.half = self.params.bfloat16() if half else None
        views = layout.views(self.params)
        if self.half is not None:
            small = layout.views(self.half)
            views |= {n: small[n] for n, v in views.items() if v.ndim == CONVOLUTION}
        self.leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
        self.tensors = self.leaves | layout.others(self.others)
        self.pulls = layout.views(self.grad)

    def load(self, work: Work, i: int, block: Tensor, moments: Moments) -> None:
        """Take unit i in."""
        task, trained, rows = work.task, self.plan.layout.trained, self.rows
        run, origin = int(task.units.run[i]), block if task.origin is None else task.origin
        self.params.copy_(block[i, :trained], non_blocking=True)
        self.others.copy_(block[i, trained:], non_blocking=True)
        for own, kept in ((self.m, moments.m), (self.v, moments.v)):
            own.zero_() if kept is None else own.copy_(kept[i], non_blocking=True)
        if task.mu:
            self.start = _put(self.start, origin[i, :trained])
        if task.drift is not None:
            self.drift = _put(self.drift, task.drift[i])
            self.total = _put(self.total, task.gradients[i])
        self.weights.copy_(work.weights[i], non_blocking=True)
        self.price.copy_(work.price[i], non_blocking=True)
        self.mean.copy_(rows.mean[run])
        self.inverse.copy_(rows.inverse[run])
        self.lr.fill_(float(task.lr[i]))
        self.count.fill_(float(moments.steps[i, 1]))
        order = work.order[work.begins[i] : work.begins[i + 1]]
        self.order[: len(order)].copy_(order, non_blocking=True)
        pace = work.rates[work.starts[i] : work.starts[i + 1]]
        self.rates[: len(pace)].copy_(pace, non_blocking=True)
        self.at.zero_()
        self.done.zero_()

    def store(self, work: Work, i: int, block: Tensor, moments: Moments) -> None:
        """Hand unit i back."""
        trained = self.plan.layout.trained
        block[i, :trained].copy_(self.params, non_blocking=True)
        block[i, trained:].copy_(self.others, non_blocking=True)
        for own, kept in ((self.m, moments.m), (self.v, moments.v)):
            if kept is not None:
                kept[i].copy_(own, non_blocking=True)
        moments.steps[i] += work.starts[i + 1] - work.starts[i]
        if work.task.gradients is not None:
            work.task.gradients[i].copy_(self.total, non_blocking=True)

    def step(self, size: int, task: Task) -> None:
        """The next batch, of this many rows."""
        if self.cuda:  # torch tries convolutions out where that pays: for whole batches
            settings = self.plan.settings
            torch.backends.cudnn.benchmark = size == task.batch_size and not settings.deterministic
        if found := self._graph(size, task):
            found.replay()
        else:
            self._step(size, task)

    def _graph(self, size: int, task: Task) -> Any:
        """Captured the second time a size comes: the first is the warming-up that this asks for."""
        if not (self.cuda and self.plan.settings.graphs):
            return None
        if size not in self.graphs:
            self.graphs[size] = None if len(self.graphs) < MOST_GRAPHS else False
        elif self.graphs[size] is None:
            self.graphs[size] = self._captured(size, task)
        return self.graphs[size]

    def _captured(self, size: int, task: Task) -> Any:
        """A graph of the step, or False where the module does what no graph can hold."""
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        torch.cuda.synchronize(self.rows.device)
        gc.disable()  # what it frees in the middle of a capture would spoil that
        try:
            graph.capture_begin(*(() if self.pool is None else (self.pool,)))
            try:
                self._step(size, task)
            finally:
                graph.capture_end()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize(self.rows.device)
            return False
        finally:
            if collecting:
                gc.enable()
        self.pool = self.pool or graph.pool()
        return graph

    def _step(self, size: int, task: Task) -> None:
        optimizer = self.plan.settings.optimizer
        self.gradient(size)
        if task.drift is not None:
            self.total += self.grad
            self.grad += self.drift
        if task.mu:
            self.grad.add_(self.params - self.start, alpha=task.mu)
        pace = self.rates.index_select(0, self.done.reshape(1)).squeeze(0)
        self.count += 1
        self.done += 1
        rate = pace if self.cuda else pace.item()
        replayable_step(optimizer, self.params, self.grad, moments=(self.m, self.v),
                        count=self.count, rate=rate, lr=self.lr)  # fmt: skip

    def gradient(self, size: int) -> None:
        """Of the mean objective over the next rows; BatchNorm moves its means on in place."""
        rows = self.rows
        drawn = self.order.index_select(0, self.at + self.ramp[:size])
        self.at += size
        index = drawn >> 1
        x, cell = rows.seen(index, self.mean, self.inverse), rows.cell[index]
        if self.plan.settings.augment == "flip":
            x = torch.where((drawn & 1).bool().reshape(-1, 1, 1, 1), x.flip(-1), x)
        if self.half is not None:
            self.half.copy_(self.params)
        with autocast(self.plan.settings, rows.device):
            logits = functional_call(self.module, self.tensors, (x,))
        probs = logits.detach().to(rows.dtype).softmax(-1)
        pull = residual(probs, rows.label[cell], self.weights[cell], self.price[cell]) / size
        found = torch.autograd.grad(
            logits, list(self.leaves.values()), pull.to(logits.dtype), materialize_grads=True,
            allow_unused=True,
        )  # fmt: skip
        for dtype in {g.dtype for g in found}:
            pairs = [(p, g) for p, g in zip(self.pulls.values(), found, strict=True)
                     if g.dtype == dtype]  # fmt: skip
            torch._foreach_copy_([p for p, _ in pairs], [g for _, g in pairs])


def _put(room: Tensor, value: Tensor) -> Tensor:
    """The value at the place it has had before, so that a graph finds it there."""
    if len(room) != len(value):
        room = torch.empty_like(value, device=room.device)
    return room.copy_(value, non_blocking=True)


def _uncounted(module: torch.nn.Module) -> torch.nn.Module:
    """BatchNorm counts its batches, a kernel a layer, and nobody asks where it has a momentum."""
    for part in module.modules():
        if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.momentum is not None:
            part.num_batches_tracked = None
    return module


def autocast(settings: Settings, device: torch.device) -> torch.autocast:
    half = settings.precision == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False)
