"""The stacked executor: many clients' models side by side in one batched program.

`vmap(vjp(module))` over a group of models, captured once a shape with make_fx (which takes
functorch's dispatch out of the loop) and replayed for every step. Clients are sorted by
their number of steps, so those still at work are a prefix of the group; a short last batch is
filled up with rows that weigh nothing.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedgft.engine.book import Units
from fedgft.engine.flat import layout, residual
from fedgft.engine.schedule import batches
from fedgft.engine.task import Task
from fedgft.engine.torch_executor import TorchExecutor
from fedgft.models import Model, Module
from fedgft.optim import Moments, step

# models side by side: as many as fit the second-level cache together, or as fill a GPU
GROUP = {"cpu": 20, "cuda": 512}

Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """All that a captured program depends on besides the model."""

    models: int
    batch: tuple[int, ...]  # rows, then the shape of one row
    cells: int
    classes: int
    dtype: torch.dtype
    device: str


@lru_cache(maxsize=256)
def captured(model: Model, shape: Shape) -> Gradient:
    """(params, x, labels, weights, price, share) -> gradients, each with a leading model axis."""
    with torch.random.fork_rng(devices=[]):
        module = model.module(features=shape.batch[1], classes=shape.classes)
    module = module.to(dtype=shape.dtype, device=shape.device).train()
    where = layout(module)

    def one(flat: Tensor, x: Tensor, y: Tensor, w: Tensor, price: Tensor, share: Tensor) -> Tensor:
        logits, pull, *_ = vjp(lambda p: functional_call(module, where.views(p), (x,)), flat)
        objective = residual(logits.softmax(-1), y, w, price) * share.unsqueeze(-1)
        return pull(objective)[0]

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)

    m, b, c = shape.models, shape.batch[0], shape.classes
    examples = (zeros(m, where.trained), zeros(m, *shape.batch), zeros(m, b, c), zeros(m, b),
                zeros(m, b, c), zeros(m, b))  # fmt: skip
    return make_fx(vmap(one))(*examples)


def program(executor: TorchExecutor, shape: Shape) -> Gradient:
    """Kept for later simulations, but that of a module which may be another by then."""
    model = executor.model
    if not (isinstance(model, Module) and model.given):
        return captured(model, shape)
    if shape not in executor.programs:
        executor.programs[shape] = captured.__wrapped__(model, shape)
    return executor.programs[shape]


def train(executor: TorchExecutor, task: Task, block: Tensor, moments: Moments) -> Tensor:
    steps = task.steps
    order = np.argsort(-steps, kind="stable")
    most = GROUP[executor.rows.device.type]
    groups = [order[i : i + most] for i in range(0, len(order), most)]
    # capturing patches torch for all threads, so it is done before there are any
    programs = [_programs(executor, task, group, steps[group]) for group in groups]

    def work(group: np.ndarray, program: dict[int, Gradient]) -> None:
        _group(executor, task, block, moments, group, steps[group], program)

    if executor.settings.threads == 1 or len(groups) == 1:
        for group, program in zip(groups, programs, strict=True):
            work(group, program)
    else:
        with ThreadPoolExecutor(executor.settings.threads) as pool:
            list(pool.map(work, groups, programs))
    return block


def _sizes(steps: np.ndarray) -> list[int]:
    """Models computed in each step: those still at work, rounded up to few different numbers."""
    active = (steps > np.arange(steps.max(initial=0))[:, None]).sum(1)
    return [min(len(steps), _round_up(int(count))) for count in active]


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


def width_of(sizes: np.ndarray, batch_size: int) -> int:
    """Rows in a batch of clients that hold this many."""
    return min(batch_size, _round_up(max(1, int(sizes.max(initial=1)))))


def _programs(
    executor: TorchExecutor, task: Task, group: np.ndarray, steps: np.ndarray
) -> dict[int, Gradient]:
    width = width_of(task.units.sizes[group], task.batch_size)
    return {n: program(executor, shape_of(executor, n, width)) for n in set(_sizes(steps))}


def _group(
    executor: TorchExecutor,
    task: Task,
    block: Tensor,
    moments: Moments,
    group: np.ndarray,
    steps: np.ndarray,
    programs: dict[int, Gradient],
) -> None:
    """All steps of some units (longest first), written back to their rows at the end."""
    params, lr = block[group], executor.rows.put(task.lr[group])[:, None]
    start = (block if task.origin is None else task.origin)[group]
    m, v, count = moments.m[group], moments.v[group], moments.steps[group]
    for s, inputs in enumerate(_inputs(executor, task, group, _sizes(steps))):
        size, at = len(inputs[0]), slice(0, int((steps > s).sum()))
        grad = programs[size](params[:size], *inputs)[at]
        if task.drift is not None:
            task.gradients[group[at]] += grad
            grad = grad + task.drift[group[at]]
        if task.mu:
            grad = grad + task.mu * (params[at] - start[at])
        active = Moments(m[at], v[at], count[at])
        step(executor.settings.optimizer, params[at], grad, moments=active, lr=lr[at])
    block[group], moments.m[group], moments.v[group], moments.steps[group] = params, m, v, count


def _inputs(
    executor: TorchExecutor, task: Task, group: np.ndarray, sizes: list[int]
) -> Iterator[tuple[Tensor, ...]]:
    """What a program takes after the parameters, for each step's number of models."""
    rows, run = executor.rows, torch.as_tensor(task.units.run[group], device=executor.rows.device)
    weights, price = rows.tables(task.weights[group], task.price[group])
    index, share = _schedule(executor, task, group, len(sizes))
    for s, size in enumerate(sizes):
        at = index[s, :size]
        cell = rows.cell[at]
        yield (
            rows.seen(at, rows.mean[run[:size]], rows.inverse[run[:size]]),
            rows.label[cell],
            weights[:size].gather(1, cell),
            price[:size].gather(1, cell.unsqueeze(-1).expand(-1, -1, rows.classes)),
            share[s, :size],
        )


def shape_of(executor: TorchExecutor, models: int, width: int) -> Shape:
    rows = executor.rows
    batch = (width, *rows.shape)
    return Shape(models, batch, len(rows.label), rows.classes, rows.dtype, str(rows.device))


def _schedule(
    executor: TorchExecutor, task: Task, group: np.ndarray, steps: int
) -> tuple[Tensor, Tensor]:
    """Row numbers (step, unit, row) and each row's share of its batch; zero where it is filler."""
    units: Units = task.units
    width = width_of(units.sizes[group], task.batch_size)
    index = np.zeros((steps, len(group), width), dtype=np.int64)
    share = np.zeros(index.shape)
    for j, i in enumerate(group):
        s, own = 0, executor.book.rows[units.low[i] : units.high[i]]
        for seed in task.seeds[i]:
            for batch in batches(own, seed=int(seed), batch_size=task.batch_size, most=task.most):
                index[s, j, : len(batch)] = executor.rows.at(batch)
                share[s, j, : len(batch)] = 1.0 / len(batch)
                s += 1
    return torch.as_tensor(index, device=executor.rows.device), executor.rows.put(share)
