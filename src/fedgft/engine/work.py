"""What a wave of units reads, in which order and at which rate, uploaded in one go."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedgft.engine.book import Book
from fedgft.engine.rows import Rows
from fedgft.engine.schedule import batches
from fedgft.engine.settings import Settings
from fedgft.engine.task import Task
from fedgft.optim import Moments, rates


@dataclass(frozen=True)
class Work:
    task: Task
    order: Tensor  # all batches of all units one behind the other: 2 place + whether it is mirrored
    begins: np.ndarray  # (u + 1,): where each unit's begin
    batches: Sequence[Sequence[Sequence[int]]]  # unit, epoch: the sizes of its batches
    weights: Tensor
    price: Tensor
    rates: Tensor  # one a step, as `begins` has rows
    starts: np.ndarray


def _marked(places: np.ndarray, seed: int, mirror: bool) -> np.ndarray:
    """2 place + whether it is mirrored, which is drawn anew each epoch."""
    double = 2 * places.astype(np.int64)
    if mirror:
        double += np.random.default_rng([seed, 0xF11B]).integers(0, 2, len(places))
    return double


def work_of(book: Book, rows: Rows, task: Task, moments: Moments, settings: Settings) -> Work:
    """What the units read, in which order and at which rate."""
    optimizer, mirror = settings.optimizer, settings.augment == "flip"
    units, every, sizes, pace = task.units, [], [], []
    for i in range(len(units)):
        own = book.rows[units.low[i] : units.high[i]]
        epochs = [batches(own, seed=int(seed), batch_size=task.batch_size, most=task.most,
                          least=task.least) for seed in task.seeds[i]]  # fmt: skip
        for seed, parts in zip(task.noise[i], epochs, strict=True):
            if parts:
                every.append(_marked(rows.at(np.concatenate(parts)), int(seed), mirror))
        sizes.append([[len(batch) for batch in parts] for parts in epochs])
        steps = sum(map(len, sizes[-1]))
        pace.append(rates(optimizer, float(task.lr[i]), moments.steps[i], steps))
    order = np.concatenate(every) if every else np.empty(0, np.int64)
    lengths = [sum(map(sum, epochs)) for epochs in sizes]
    weights, price = rows.tables(task.weights, task.price)
    return Work(
        task=task, order=rows.numbers(order), begins=np.concatenate(([0], np.cumsum(lengths))),
        batches=sizes, weights=weights, price=price,
        rates=torch.as_tensor(np.concatenate(pace), device=rows.device),
        starts=np.concatenate(([0], np.cumsum([len(p) for p in pace]))),
    )  # fmt: skip
