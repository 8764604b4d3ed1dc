"""The sequential executor: one client after another, for every module there is.

Convolutions, BatchNorm (its running statistics travel with the parameters; a batch of one row
that torch refuses, for it has no variance, is passed over), dropout (seeded by client, round and
epoch), data-dependent control flow. Threads take whole clients, each with a module of its own; a
module with randomness inside has one thread, for torch's generator is one.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedgft.engine.schedule import batches
from fedgft.engine.task import Task
from fedgft.engine.torch_executor import TorchExecutor, residual
from fedgft.optim import Moments, step


def train(executor: TorchExecutor, task: Task, block: Tensor, moments: Moments) -> Tensor:
    threads = 1 if executor.random else executor.settings.threads

    def client(i: int) -> None:
        module = executor.modules.get()
        try:
            _client(executor, task, block, moments, i, module.train())
        finally:
            executor.modules.put(module)

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
    """All epochs of unit i, written back to its row of the block and of the moments."""
    rows, trained, units = executor.rows, executor.layout.trained, task.units
    # Copies, each with a storage of its own: autograd watches storages for changes, and would
    # take another client's step, or BatchNorm's new running mean, for a change of these.
    params, buffers = block[i, :trained].clone(), block[i, trained:].clone()
    start = (block if task.origin is None else task.origin)[i, :trained].clone()
    mine = Moments(moments.m[i : i + 1], moments.v[i : i + 1], moments.steps[i : i + 1])
    tables = rows.put(task.weights[i]).flatten(), rows.put(task.price[i]).flatten(0, 1)
    own = executor.book.rows[units.low[i] : units.high[i]]
    for seed, noise in zip(task.seeds[i], task.noise[i], strict=True):
        torch.manual_seed(int(noise))
        for batch in batches(own, seed=int(seed), batch_size=task.batch_size, most=task.most):
            index = torch.as_tensor(batch, dtype=torch.long, device=rows.device)
            x = rows.seen(index, int(units.run[i]))
            try:
                grad = _gradient(executor, module, params, buffers, x, rows.cell[index], tables)
            except ValueError:
                if len(batch) > 1:
                    raise
                continue
            if task.drift is not None:
                task.gradients[i] += grad
                grad = grad + task.drift[i]
            if task.mu:
                grad = grad + task.mu * (params - start)
            lr = float(task.lr[i])
            step(executor.settings.optimizer, params[None], grad[None], moments=mine, lr=lr)
    block[i, :trained], block[i, trained:] = params, buffers


def _gradient(
    executor: TorchExecutor, module: Any, params: Tensor, buffers: Tensor, x: Tensor, cell: Tensor,
    tables: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """Of the batch's mean objective; BatchNorm moves its `buffers` on in place."""
    leaf, (weights, price) = params.detach().requires_grad_(), tables
    views = executor.layout.views(leaf)
    views |= executor.layout.views(buffers, first=len(views))
    logits = functional_call(module, views, (x,))
    label, probs = executor.rows.label[cell], logits.detach().softmax(-1)
    pull = residual(probs, label, weights[cell], price[cell]) / len(x)
    return torch.autograd.grad(logits, leaf, pull)[0]
