"""The stacked executor: many clients' models side by side in one batched program.

`vmap(vjp(module))` over a group of models, captured once a shape with make_fx (which takes
functorch's dispatch out of the loop) and replayed for every step. Clients are sorted by
their number of steps, so those still at work are a prefix of the group; a short last batch is
filled up with rows that weigh nothing.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedgft.engine.book import Units
from fedgft.engine.schedule import batches
from fedgft.engine.task import Task
from fedgft.engine.torch_executor import TorchExecutor, layout, residual
from fedgft.models import Model
from fedgft.optim import Moments, step

GROUP = 20  # models that fit the second-level cache together

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
    module = model.module(features=shape.batch[1], classes=shape.classes)
    module = module.to(dtype=shape.dtype, device=shape.device).train()
    where = layout(module)

    def one(flat: Tensor, x: Tensor, y: Tensor, w: Tensor, price: Tensor, share: Tensor) -> Tensor:
        logits, pull = vjp(lambda p: functional_call(module, where.views(p), (x,)), flat)
        objective = residual(logits.softmax(-1), y, w, price) * share.unsqueeze(-1)
        return pull(objective)[0]

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)

    m, b, c = shape.models, shape.batch[0], shape.classes
    examples = (zeros(m, where.trained), zeros(m, *shape.batch), zeros(m, b, c), zeros(m, b),
                zeros(m, b, c), zeros(m, b))  # fmt: skip
    return make_fx(vmap(one))(*examples)


def train(executor: TorchExecutor, task: Task, block: Tensor, moments: Moments) -> Tensor:
    steps = -(-task.units.sizes // task.batch_size) * task.seeds.shape[1]
    order = np.argsort(-steps, kind="stable")
    groups = [order[i : i + GROUP] for i in range(0, len(order), GROUP)]

    def work(group: np.ndarray) -> None:
        _group(executor, task, block, moments, group, steps[group])

    if executor.settings.threads == 1 or len(groups) == 1:
        for group in groups:
            work(group)
    else:
        with ThreadPoolExecutor(executor.settings.threads) as pool:
            list(pool.map(work, groups))
    return block


def _group(
    executor: TorchExecutor,
    task: Task,
    block: Tensor,
    moments: Moments,
    group: np.ndarray,
    steps: np.ndarray,
) -> None:
    """All steps of some units (longest first), written back to their rows at the end."""
    rows, mu, optimizer = executor.rows, task.mu, executor.settings.optimizer
    params, run = block[group], torch.as_tensor(task.units.run[group], device=rows.device)
    start = params.clone() if mu else params
    m, v, count = moments.m[group], moments.v[group], moments.steps[group]
    weights, price = (
        rows.put(task.weights[group]).flatten(1),
        rows.put(task.price[group]).flatten(1, 2),
    )
    lr = rows.put(task.lr[group])[:, None]
    index, share = _schedule(executor, task, group, int(steps[0]) if len(steps) else 0)
    for s in range(len(index)):
        active = int((steps > s).sum())
        size = min(len(group), 1 << (active - 1).bit_length())  # few shapes to capture
        at, part = index[s, :size], slice(0, active)
        x, cell = rows.seen(at, run[:size]), rows.cell[at]
        gradient = captured(executor.model, _shape(executor, x))
        grad = gradient(
            params[:size], x, rows.label[cell], weights[:size].gather(1, cell),
            price[:size].gather(1, cell.unsqueeze(-1).expand(-1, -1, rows.classes)), share[s, :size],
        )[part]  # fmt: skip
        if mu:
            grad = grad + mu * (params[part] - start[part])
        step(
            optimizer,
            params[part],
            grad,
            moments=Moments(m[part], v[part], count[part]),
            lr=lr[part],
        )
    block[group], moments.m[group], moments.v[group], moments.steps[group] = params, m, v, count


def _shape(executor: TorchExecutor, x: Tensor) -> Shape:
    rows = executor.rows
    return Shape(
        len(x), tuple(x.shape[1:]), len(rows.label), rows.classes, rows.dtype, str(rows.device)
    )


def _schedule(
    executor: TorchExecutor, task: Task, group: np.ndarray, steps: int
) -> tuple[Tensor, Tensor]:
    """Row numbers (step, unit, row) and each row's share of its batch; zero where it is filler."""
    units: Units = task.units
    width = min(task.batch_size, int(units.sizes[group].max(initial=1)))
    index = np.zeros((steps, len(group), width), dtype=np.int64)
    share = np.zeros(index.shape)
    for j, i in enumerate(group):
        s, own = 0, executor.book.rows[units.low[i] : units.high[i]]
        for seed in task.seeds[i]:
            for batch in batches(own, seed=int(seed), batch_size=task.batch_size):
                index[s, j, : len(batch)] = batch
                share[s, j, : len(batch)] = 1.0 / len(batch)
                s += 1
    return torch.as_tensor(index, device=executor.rows.device), executor.rows.put(share)
