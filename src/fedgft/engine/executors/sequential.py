"""The sequential executor: it trains any module, one client after another.

It supports convolutions, BatchNorm (whose running statistics are sent with the parameters), dropout
(seeded by client, round and epoch) and data-dependent control flow. Each client in training uses
one `ClientBuffers`. On a CPU, each `ClientBuffers` has a thread. On a GPU, each has a stream, and
several streams keep the GPU busy where the batch of one client is too small for that. If the module
draws random numbers, there is only one `ClientBuffers`, because torch has one random generator.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from fedgft.algorithms import Cohort
from fedgft.engine.executors import torch_common as common
from fedgft.engine.executors.base import Task
from fedgft.engine.executors.numpy_kernels import Array
from fedgft.engine.executors.torch_common import DeviceRows, Layout, TorchExecutor
from fedgft.optimizers import Moments, graph_step, step_rates
from fedgft.settings import Settings

MAX_IN_FLIGHT = 10  # clients that train on one GPU at a time: more would bring little speed
MEMORY_SHARE = 0.6  # share of the GPU's free memory that the buffers of clients may use
CHUNK_BYTES = 2**29  # memory for the models that are in training at a time
MODEL_COPIES = 4  # copies of a model in memory while it is in training
MAX_GRAPHS = 32  # CUDA graphs per `ClientBuffers`, one per batch size; other sizes run without one

Action = Callable[[], object]


@dataclass(frozen=True)
class Workload:
    """The inputs of a task on the device: rows in order of use, tables and learning rates.

    Attributes
    ----------
    task, moments
        The task and the moments of its units; `m` and `v` are None if they start from zero and are
        not kept.
    order
        Rows of each unit, batch after batch, encoded as 2 * position + (1 if mirrored else 0).
    batches
        Sizes of the batches by unit and epoch.
    weights, labels, price
        Row weights, labels and prices of each unit, by cell.
    curve
        Prices of each unit by cell and bin of the score; None: none.
    rates
        Learning rates of the steps of each unit; see `optimizers.step_rates`.
    """

    task: Task
    moments: Moments
    order: Sequence[Tensor]
    batches: Sequence[Sequence[Sequence[int]]]
    weights: Tensor
    labels: Tensor
    price: Tensor
    curve: Tensor | None
    rates: Sequence[Tensor]


class SequentialExecutor(TorchExecutor):
    """Trains clients one by one, a few of them at the same time."""

    name = "sequential"
    on_host = True

    @cached_property
    def client_buffers(self) -> list["ClientBuffers"]:
        """One `ClientBuffers` per thread, or as many as keep a GPU busy and fit into its memory."""
        settings = self.settings
        longest = int(self.index.sizes.max(initial=1))
        rows = min(longest, (settings.steps or 2**31) * settings.batch_size)
        make = partial(ClientBuffers, settings, self.layout, self.module, settings.epochs * rows)
        with self._torch_flags():
            first = make(self.rows)
            if self.traits.random:
                return [first]
            if not first.cuda:
                count = settings.threads
            else:
                clients = (settings.cohort or self.index.num_clients) * self.index.runs
                wanted = settings.lanes or min(MAX_IN_FLIGHT, _count_fitting(first))
                count = min(wanted * len(self.devices), clients)
            places = [self.devices[i % len(self.devices)] for i in range(1, count)]
            return [first, *map(make, places)]

    def mix(
        self, coefficients: Array, block: Tensor, params: Tensor, cohort: Cohort, total: Any = None
    ) -> Tensor:
        """Add sum_k c_k (model_k - params) of each run to `total`, without copying the models."""
        total = torch.zeros_like(params) if total is None else total
        for k, run in enumerate(cohort.run.tolist()):
            weight = float(coefficients[k])
            model = block[k].to(params.device, non_blocking=True)
            total[run].add_(model, alpha=weight).sub_(params[run], alpha=weight)
        return total

    def _chunk(self) -> int:
        """Return how many models fit into `CHUNK_BYTES`, at least one per `ClientBuffers`."""
        each = MODEL_COPIES * self.layout.size * self.rows.dtype.itemsize
        return max(len(self.client_buffers), CHUNK_BYTES // each)

    def _train(self, task: Task, block: Tensor, moments: Moments | None) -> None:
        """Train in place; the state of torch's global random generator is restored afterwards."""
        if moments is None:
            moments = Moments(None, None, np.zeros((len(block), 2), np.int64))
        workload = self._workload(task, moments)
        cuda = self.rows.device.type == "cuda"
        with torch.random.fork_rng(range(torch.cuda.device_count()) if cuda else []):
            if cuda:
                self._train_in_streams(workload, block)
            else:
                self._train_in_threads(workload, block)

    def _workload(self, task: Task, moments: Moments) -> Workload:
        """Draw the batches of all units and upload them at once."""
        rows = self.rows
        no_rows = np.empty(0, np.int64)
        order = [no_rows]
        sizes = []
        rates = []
        for i in range(len(task.units)):
            epochs = task.batches(self.index.rows, i)
            for noise, epoch in zip(task.noise[i], epochs, strict=True):
                marked = 2 * rows.positions(np.concatenate([no_rows, *epoch]))
                if self.settings.augment == "flip":  # mirror half of the images, drawn anew
                    rng = np.random.default_rng([int(noise), 0xF11B])
                    marked += rng.integers(0, 2, len(marked))
                order.append(marked)
            sizes.append([[len(batch) for batch in epoch] for epoch in epochs])
            steps = sum(map(len, epochs))
            lr = float(task.lr[i])
            rates.append(step_rates(self.settings.optimizer, lr, moments.steps[i], steps))
        lengths = [sum(map(sum, epochs)) for epochs in sizes]
        steps = [len(each) for each in rates]
        weights, labels, price = rows.put_tables(task)
        curve = None if task.curve is None else rows.put(task.curve).flatten(1, 2)
        uploaded = rows.put_integers(np.concatenate(order)).split(lengths)
        all_rates = torch.as_tensor(np.concatenate(rates), device=rows.device).split(steps)
        tables = {"weights": weights, "labels": labels, "price": price, "curve": curve}
        return Workload(task, moments, uploaded, sizes, **tables, rates=all_rates)

    def _actions(
        self, buffers: "ClientBuffers", workload: Workload, unit: int, block: Tensor
    ) -> Iterator[Action]:
        """Yield the actions of one unit's round: load, train on each batch, store.

        A unit without steps has no actions.
        """
        if not len(workload.rates[unit]):
            return
        task = workload.task
        yield lambda: buffers.load(workload, unit, block)
        for noise, sizes in zip(task.noise[unit], workload.batches[unit], strict=True):
            if self.traits.random:
                torch.manual_seed(int(noise))
            for size in sizes:
                yield lambda size=size: buffers.step(size, task)
        yield lambda: buffers.store(workload, unit, block)

    def _train_in_threads(self, workload: Workload, block: Tensor) -> None:
        """Train on a CPU, one client per thread."""
        free: SimpleQueue[ClientBuffers] = SimpleQueue()
        for buffers in self.client_buffers:
            free.put(buffers)

        def train_client(unit: int) -> None:
            buffers = free.get()
            try:
                for action in self._actions(buffers, workload, unit, block):
                    action()
            finally:
                free.put(buffers)

        units = range(len(workload.task.units))
        common.run_in_threads(train_client, units, len(self.client_buffers))

    def _train_in_streams(self, workload: Workload, block: Tensor) -> None:
        """Launch one step in each stream in turn, without waiting for the GPU."""
        home = torch.cuda.current_stream(self.rows.device)
        every = self.client_buffers
        for buffers in every:
            buffers.stream.wait_stream(home)

        def queue_of(buffers: ClientBuffers, units: Sequence[int]) -> Iterator[Action]:
            for unit in units:
                yield from self._actions(buffers, workload, unit, block)

        shares = zip(every, _share_units(workload.task.steps, len(every)), strict=True)
        active = [(buffers, queue_of(buffers, units)) for buffers, units in shares]
        try:
            while active:
                for buffers, queue in list(active):
                    action = next(queue, None)
                    if action is None:
                        active.remove((buffers, queue))
                        continue
                    with torch.cuda.stream(buffers.stream):
                        action()
        finally:  # also after Ctrl-C: memory must not be reused while a stream writes to it
            for buffers in every:
                home.wait_stream(buffers.stream)


class ClientBuffers:
    """Static buffers for one client, so that a training step can be captured as a CUDA graph.

    A step reads and writes at fixed addresses, so it is the same program for every client. On a GPU
    it is captured once per batch size and then replayed, because launching its kernels one by one
    would take much longer than running them. A short last batch has its own graph, because padding
    would change the running means of BatchNorm. A batch size that occurs only once is not captured.
    The buffers hold no reference to the executor: a reference cycle would be freed late, and GPU
    memory is scarce.

    Parameters
    ----------
    settings, layout, module
        Settings, layout and module of the executor.
    max_rows
        Largest number of rows that a client reads per round.
    rows
        The data set on the device of the buffers.

    Attributes
    ----------
    params, untrained
        The client's model: trained parameters, and frozen parameters with buffers.
    grad, m, v, count
        Gradient, moments, and the number of steps that v has accumulated.
    start, drift, gradients
        Center of the proximal term, drift, and the sum of uncorrected gradients; empty if not used.
    weights, labels, price, mean, inverse
        Tables by cell, and the scaling of the features.
    curve
        Prices by cell and bin of the score; empty if not used.
    order, at
        Rows of the round, and how many have been read.
    rates, done
        Rates of the steps, and how many have been done.
    leaves, tensors
        Views of the trained tensors for autograd, and all tensors of the module.
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        module: torch.nn.Module,
        max_rows: int,
        rows: DeviceRows,
    ) -> None:
        self.settings = settings
        self.layout = layout
        self.rows = rows
        self.cuda = rows.device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(rows.device) if self.cuda else None
        self.module = _without_counters(copy.deepcopy(module)).to(rows.device).train()
        self._graphs: dict[int, Any] = {}  # by batch size; None: seen once, False: not captured
        self._pool: Any = None

        def new(*shape: int, dtype: torch.dtype = rows.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=rows.device)

        self.params, self.grad, self.m, self.v = (new(layout.trained) for _ in range(4))
        self.untrained = new(layout.size - layout.trained)
        self.start = new(0)
        self.drift = new(0)
        self.gradients = new(0)
        self.weights = new(rows.cells)
        self.labels = new(rows.cells, rows.classes)
        self.price = new(rows.cells, rows.classes)
        self.curve = new(0)
        self.mean, self.inverse = (torch.zeros_like(t[0]) for t in (rows.mean, rows.inverse))
        self.lr = new()
        # torch's Adam on a GPU requires float32 rates
        exact = not (self.cuda and settings.optimizer.adaptive)
        max_steps = settings.epochs + max_rows // settings.batch_size
        self.rates = new(max_steps, dtype=torch.float64 if exact else torch.float32)
        self.count = new(dtype=torch.float32)
        self.order = new(max_rows, dtype=torch.long)
        self.counting = torch.arange(max_rows, device=rows.device)
        self.at = new(dtype=torch.long)  # rows read
        self.done = new(dtype=torch.long)  # steps done
        # Views that autograd treats as parameters. In bfloat16, the views of convolutions refer to
        # a copy that is made in one pass over memory instead of one small kernel per layer.
        self.half = self.params.bfloat16() if settings.precision == "bf16" else None
        views = layout.views(self.params)
        if self.half is not None:
            halves = layout.views(self.half)
            views |= {n: halves[n] for n, view in views.items() if view.ndim == common.FILTER_AXES}
        self.leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
        self.tensors = self.leaves | layout.views(self.untrained, layout.trained)
        self.grad_views = list(layout.views(self.grad).values())

    def load(self, workload: Workload, i: int, block: Tensor) -> None:
        """Copy unit i into the buffers."""
        task = workload.task
        moments = workload.moments
        trained = self.layout.trained
        run = int(task.units.run[i])
        origin = block if task.origin is None else task.origin
        self.params.copy_(block[i, :trained], non_blocking=True)
        self.untrained.copy_(block[i, trained:], non_blocking=True)
        for buffer, stored in ((self.m, moments.m), (self.v, moments.v)):
            buffer.zero_() if stored is None else buffer.copy_(stored[i], non_blocking=True)
        if task.mu:
            self.start = _copy_in_place(self.start, origin[i, :trained])
        if task.drift is not None:
            self.drift = _copy_in_place(self.drift, task.drift[i])
            self.gradients = _copy_in_place(self.gradients, task.gradients[i])
        self.weights.copy_(workload.weights[i], non_blocking=True)
        self.labels.copy_(workload.labels[i], non_blocking=True)
        if workload.curve is not None:
            self.curve = _copy_in_place(self.curve, workload.curve[i])
        self.price.copy_(workload.price[i], non_blocking=True)
        self.mean.copy_(self.rows.mean[run])
        self.inverse.copy_(self.rows.inverse[run])
        self.lr.fill_(float(task.lr[i]))
        self.count.fill_(float(moments.steps[i, 1]))
        for buffer, values in ((self.order, workload.order[i]), (self.rates, workload.rates[i])):
            buffer[: len(values)].copy_(values, non_blocking=True)
        self.at.zero_()
        self.done.zero_()

    def store(self, workload: Workload, i: int, block: Tensor) -> None:
        """Copy the trained unit i out of the buffers."""
        trained = self.layout.trained
        moments = workload.moments
        block[i, :trained].copy_(self.params, non_blocking=True)
        block[i, trained:].copy_(self.untrained, non_blocking=True)
        for buffer, stored in ((self.m, moments.m), (self.v, moments.v)):
            if stored is not None:
                stored[i].copy_(buffer, non_blocking=True)
        moments.steps[i] += len(workload.rates[i])
        if workload.task.gradients is not None:
            workload.task.gradients[i].copy_(self.gradients, non_blocking=True)

    def step(self, size: int, task: Task) -> None:
        """Train on the next batch, which has `size` rows."""
        if self.cuda:  # cuDNN benchmarks convolutions only for full batches, where it pays off
            full = size == task.batch_size
            torch.backends.cudnn.benchmark = full and not self.settings.deterministic
        if graph := self._graph(size, task):
            graph.replay()
        else:
            self._step(size, task)

    def gradient(self, size: int) -> None:
        """Compute the gradient of the next `size` rows; BatchNorm updates its means in place."""
        rows = self.rows
        settings = self.settings
        marked = self.order.index_select(0, self.at + self.counting[:size])
        self.at += size
        positions = marked >> 1
        x = rows.read(positions, self.mean, self.inverse)
        cell = rows.cell[positions]
        if settings.augment == "flip":
            x = torch.where((marked & 1).bool().reshape(-1, 1, 1, 1), x.flip(-1), x)
        if self.half is not None:
            self.half.copy_(self.params)
        with common.autocast(settings, rows.device):
            logits = functional_call(self.module, self.tensors, (x,))
        probs = logits.detach().to(rows.dtype).softmax(-1)
        price = self.price[cell]
        if len(self.curve):
            bins = self.curve.shape[1]
            at = (probs[:, 1] * bins).long().clamp(0, bins - 1)
            price = price + self.curve[cell, at].unsqueeze(1) * price.new_tensor([0.0, 1.0])
        pull = common.residual(probs, self.labels[cell], self.weights[cell], price) / size
        if rows.weight is not None:
            pull *= rows.weight[positions].unsqueeze(-1)
        pull = pull.to(logits.dtype)
        leaves = list(self.leaves.values())
        found = torch.autograd.grad(logits, leaves, pull, materialize_grads=True, allow_unused=True)
        copies = list(zip(self.grad_views, found, strict=True))
        for dtype in {g.dtype for g in found}:
            targets, values = zip(*(pair for pair in copies if pair[1].dtype == dtype), strict=True)
            torch._foreach_copy_(targets, values)

    def _step(self, size: int, task: Task) -> None:
        """Compute and correct the gradient, then make an optimizer step; graphs capture this."""
        self.gradient(size)
        if task.drift is not None:
            self.gradients += self.grad
            self.grad += self.drift
        if task.mu:
            self.grad.add_(self.params - self.start, alpha=task.mu)
        rate = self.rates.index_select(0, self.done.reshape(1)).squeeze(0)
        self.count += 1
        self.done += 1
        rates = {"rate": rate if self.cuda else rate.item(), "lr": self.lr}
        moments = {"m": self.m, "v": self.v, "count": self.count}
        graph_step(self.settings.optimizer, self.params, self.grad, **moments, **rates)

    def _graph(self, size: int, task: Task) -> Any:
        """Return the graph of a batch size, or a false value if the step must run without one.

        The first step of each size is the warm-up; the graph is captured at the second step.
        """
        if not (self.cuda and self.settings.graphs):
            return None
        if size not in self._graphs:
            self._graphs[size] = None if len(self._graphs) < MAX_GRAPHS else False
        elif self._graphs[size] is None:
            self._graphs[size] = self._capture(size, task)
        return self._graphs[size]

    def _capture(self, size: int, task: Task) -> Any:
        """Return a CUDA graph of the step, or False if the module cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        torch.cuda.synchronize(self.rows.device)
        gc.disable()  # freeing memory during a capture would break it
        try:
            graph.capture_begin(*(() if self._pool is None else (self._pool,)))
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
        self._pool = self._pool or graph.pool()
        return graph


def _copy_in_place(buffer: Tensor, value: Tensor) -> Tensor:
    """Copy `value` to the buffer's address, from which graphs read; allocate on first use."""
    if len(buffer) != len(value):
        buffer = torch.empty_like(value, device=buffer.device)
    return buffer.copy_(value, non_blocking=True)


def _without_counters(module: torch.nn.Module) -> torch.nn.Module:
    """Disable `num_batches_tracked`.

    It costs one kernel per layer, and a layer with a momentum does not use it.
    """
    for part in module.modules():
        if isinstance(part, common.NORM_LAYERS) and part.momentum is not None:
            part.num_batches_tracked = None
    return module


def _share_units(steps: np.ndarray, streams: int) -> list[list[int]]:
    """Assign units to streams: in decreasing order of steps, each to the least loaded stream."""
    shares: list[list[int]] = [[] for _ in range(streams)]
    load = np.zeros(streams)
    for unit in np.argsort(-steps, kind="stable").tolist():
        least = int(np.argmin(load))
        shares[least].append(unit)
        load[least] += steps[unit]
    return shares


def _count_fitting(buffers: ClientBuffers) -> int:
    """Return how many clients fit into the GPU's free memory, measured by one trial gradient."""
    device = buffers.rows.device
    max_rows = len(buffers.order)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    if max_rows > 1:
        buffers.gradient(min(buffers.settings.batch_size, max_rows))
    used = torch.cuda.max_memory_allocated(device) - before
    fixed = 8 * buffers.layout.size * buffers.rows.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, int(MEMORY_SHARE * free / (1.5 * used + fixed)))
