"""The sequential executor: one client after another, for every module there is.

Convolutions, BatchNorm (its running statistics travel with the parameters; a batch of one row
has no variance and is passed over), dropout (seeded by client, round and epoch), data-dependent
control flow. Threads take whole clients, each with a module of its own; a module with
randomness inside has one thread, for torch's generator is one.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedgft.engine.schedule import batches
from fedgft.engine.task import Task
from fedgft.engine.torch_executor import TorchExecutor, residual
from fedgft.optim import Moments, step


def train(executor: TorchExecutor, task: Task, block: Tensor, moments: Moments) -> Tensor:
    threads = 1 if executor.random else executor.settings.threads
    modules: SimpleQueue[Any] = SimpleQueue()
    for _ in range(threads):
        modules.put(copy.deepcopy(executor.module).train())

    def client(i: int) -> None:
        module = modules.get()
        try:
            _client(executor, task, block, moments, i, module)
        finally:
            modules.put(module)

    with torch.random.fork_rng(devices=[]):
        if threads == 1:
            for i in range(len(task.units)):
                client(i)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(client, range(len(task.units))))
    return block


def _client(
    executor: TorchExecutor, task: Task, block: Tensor, moments: Moments, i: int, module: Any
) -> None:
    """All epochs of unit i, in place on its row of the block and of the moments."""
    rows, layout, units = executor.rows, executor.layout, task.units
    params, buffers = block[i, : layout.trained], block[i, layout.trained :]
    start = params.clone()
    count = len(layout.views(params))
    mine = Moments(moments.m[i : i + 1], moments.v[i : i + 1], moments.steps[i : i + 1])
    weights, price = rows.put(task.weights[i]).flatten(), rows.put(task.price[i]).flatten(0, 1)
    fewest = 1 + any(isinstance(part, _BatchNorm) for part in module.modules())
    own = executor.book.rows[units.low[i] : units.high[i]]
    for seed, noise in zip(task.seeds[i], task.noise[i], strict=True):
        torch.manual_seed(int(noise))
        for batch in batches(own, seed=int(seed), batch_size=task.batch_size):
            if len(batch) < fewest:
                continue
            index = torch.as_tensor(batch, dtype=torch.long, device=rows.device)
            leaf = params.detach().requires_grad_()
            views = layout.views(leaf) | layout.views(buffers, first=count)
            logits = functional_call(module, views, (rows.seen(index, int(units.run[i])),))
            cell = rows.cell[index]
            pull = residual(
                logits.detach().softmax(-1), rows.label[cell], weights[cell], price[cell]
            )
            (grad,) = torch.autograd.grad(logits, leaf, pull / len(batch))
            if task.mu:
                grad = grad + task.mu * (params - start)
            step(
                executor.settings.optimizer,
                params[None],
                grad[None],
                moments=mine,
                lr=float(task.lr[i]),
            )
