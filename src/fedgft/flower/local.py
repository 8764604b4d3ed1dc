"""Local training in plain PyTorch: the same batches, in the same order, as the simulator's.

The strategy's configuration says how: "lr", "epochs", "batch-size", "optimizer" (sgd, momentum,
adam, adamw), "weight-decay", "seed", and with "rounds" a "schedule" of the learning rate, as in
the simulator. The optimiser starts afresh each round.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord

from fedgft.engine.schedule import batches, keys, learning_rate
from fedgft.flower.settings import check_training
from fedgft.flower.site import is_table
from fedgft.optim import Optimizer

if TYPE_CHECKING:
    from fedgft.flower.client import ServerPenalty
    from fedgft.flower.site import Batch, Site


def fit(site: "Site") -> Callable[[Any, "ServerPenalty", ConfigRecord], dict[str, float]]:
    def train(model: Any, penalty: "ServerPenalty", config: ConfigRecord) -> dict[str, float]:
        from torch.nn.functional import cross_entropy

        check_training(config)
        optimizer = _optimizer(model, config)
        model.train()
        losses, rows = 0.0, 0
        for epoch in range(int(config.get("epochs", 1))):  # pyrefly: ignore
            for x, y, a in _epoch(site, config, epoch):
                logits = model(x)
                each = cross_entropy(logits, y, reduction="none")
                if penalty.weights is not None:
                    each = each * each.new_tensor(penalty.weights)[y, a]
                loss = each.mean()
                losses, rows = losses + loss.item() * len(y), rows + len(y)
                optimizer.zero_grad()
                (loss + penalty(logits, y, a)).backward()
                optimizer.step()
        return {"train_loss": losses / max(rows, 1)}

    return train


def _epoch(site: "Site", config: ConfigRecord, epoch: int) -> Iterable["Batch"]:
    if not is_table(site.rows):
        yield from map(site.read, site.rows)
        return
    import torch

    x, y, a = site.rows
    seed, number = int(config.get("seed", 0)), int(config.get("server-round", 1))  # pyrefly: ignore
    key = keys(keys(seed, site.key), number, epoch)  # rounds count from 1
    size = int(config.get("batch-size", 256))  # pyrefly: ignore
    for rows in batches(np.arange(len(y)), seed=int(key), batch_size=size):
        at = torch.as_tensor(rows)
        yield x[at], y[at], a[at]


def _optimizer(model: Any, config: ConfigRecord) -> Any:
    import torch

    rule, lr = str(config.get("optimizer", "adam")), _rate(config)
    ours = Optimizer(rule, float(config.get("weight-decay", 0.0)))  # pyrefly: ignore
    moved = [p for p in model.parameters() if p.requires_grad]
    if not ours.adaptive:
        return torch.optim.SGD(moved, lr, momentum=ours.momentum, weight_decay=ours.weight_decay)
    kind = torch.optim.Adam if rule == "adam" else torch.optim.AdamW
    betas = (ours.first, ours.second)
    return kind(moved, lr, betas=betas, eps=ours.epsilon, weight_decay=ours.weight_decay)


def _rate(config: ConfigRecord) -> float:
    held: Any = config
    lr, schedule = float(held.get("lr", 0.002)), str(held.get("schedule", "constant"))
    done, rounds = int(held.get("server-round", 1)) - 1, int(held.get("rounds", 1))
    return float(learning_rate(np.float64(lr), schedule, round=done, rounds=max(rounds, 1)))  # pyrefly: ignore
