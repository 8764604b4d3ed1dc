"""Local training at a client: the batches, their order and the steps of the simulator.

The server's configuration says how to train: "lr", "epochs", "batch-size", "optimizer" (sgd,
momentum, adam, adamw), "weight-decay", "seed", and with "rounds" a "schedule" of the learning rate.
The optimizer starts afresh in every round. A linear model trains in NumPy; only other models need
PyTorch.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.engine.plan import derive_seeds, draw_batches, learning_rate
from fedgft.errors import import_extra
from fedgft.flower.run_config import check_training
from fedgft.optimizers import Moments, Optimizer, step

if TYPE_CHECKING:
    from fedgft.flower.client import Batch, Site


class LinearModel:
    """Softmax regression in NumPy: logits `x @ weight.T + bias`, in single precision.

    It has the tensors of `nn.Linear(features, classes)` under the same names, so that the server,
    a saved model and a client with PyTorch can exchange them.
    """

    def __init__(self, features: int, classes: int) -> None:
        self.parameters = np.zeros(classes * (features + 1), np.float32)
        self.weight = self.parameters[: classes * features].reshape(classes, features)
        self.bias = self.parameters[classes * features :]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the weights (c, features) and of the biases (c,)."""
        return {"weight": self.weight.copy(), "bias": self.bias.copy()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Overwrite the weights and biases; shapes must be those of `state_dict`."""
        self.weight[:] = state["weight"]
        self.bias[:] = state["bias"]

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Probabilities (n, c), in double precision."""
        return np.exp(_log_softmax((x @ self.weight.T + self.bias).astype(np.float64)))

    def train_batch(self, batch: "Batch", penalty: Any, take_step: Callable) -> float:
        """Take one step along the gradient of the mean loss of a batch.

        With probabilities p, label y, row weight w and price r(y, group) of each class, the
        gradient by the logits of a row is  w (p - onehot(y)) + p (r - <r, p>).

        Returns
        -------
        float
            The batch's mean cross-entropy before the step, without the penalty.
        """
        x, y, a = (np.asarray(part) for part in batch)
        rows = np.arange(len(y))
        log_p = _log_softmax(x @ self.weight.T + self.bias)
        p = np.exp(log_p)
        weights = np.ones(len(y)) if penalty.weights is None else penalty.weights[y, a]
        weights = weights.astype(np.float32)
        price = penalty.price.astype(np.float32)[y, a]
        loss = -weights * log_p[rows, y]
        error = p * weights[:, None]
        error[rows, y] -= weights
        error += p * (price - (price * p).sum(1, keepdims=True))
        error /= max(len(y), 1)
        take_step(np.concatenate(((error.T @ x).ravel(), error.sum(0))))
        return float(loss.mean())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def predict(model: Any, x: Any) -> np.ndarray:
    """Probabilities (n, c) of a `LinearModel` or an `nn.Module`, in double precision."""
    if isinstance(model, LinearModel):
        return model.predict(np.asarray(x))
    torch = import_extra("torch", "this model")
    model.eval()
    with torch.no_grad():
        return model(torch.as_tensor(x)).double().softmax(-1).cpu().numpy()


def train_locally(site: "Site", penalty: Any, config: Mapping[str, Any]) -> dict[str, float]:
    """Train a site's model on its rows for one round.

    Parameters
    ----------
    site
        Its model is trained in place. Rows in memory are shuffled as the simulator shuffles them;
        a loader is read in its own order.
    penalty
        The `ServerPenalty` of the round.
    config
        The server's settings of training; see the top of this file.

    Returns
    -------
    dict
        "train_loss", the mean cross-entropy over all steps.
    """
    check_training(config)
    linear = isinstance(site.model, LinearModel)
    train_batch = (_linear_trainer if linear else _module_trainer)(site.model, penalty, config)
    loss = 0.0
    rows = 0
    for epoch in range(int(config.get("epochs", 1))):
        for batch in _read_epoch(site, config, epoch):
            size = len(batch[1])
            loss += train_batch(batch) * size
            rows += size
    return {"train_loss": loss / max(rows, 1)}


def _read_epoch(site: "Site", config: Mapping[str, Any], epoch: int) -> Iterable["Batch"]:
    if not site.in_memory:
        yield from site.batches(site.rows)
        return
    x, y, a = site.rows
    seed = int(config.get("seed", 0))
    round_number = int(config.get("server-round", 1))  # rounds count from 1
    key = derive_seeds(derive_seeds(seed, site.key), round_number, epoch)
    size = int(config.get("batch-size", 256))
    for rows in draw_batches(np.arange(len(y)), seed=int(key), batch_size=size):
        yield x[rows], y[rows], a[rows]


def _optimizer_of(config: Mapping[str, Any]) -> tuple[Optimizer, float]:
    """The optimizer and this round's learning rate."""
    rule: Any = str(config.get("optimizer", "adam"))
    schedule: Any = str(config.get("schedule", "constant"))
    rate = learning_rate(
        np.asarray(config.get("lr", 0.002), np.float64),
        schedule,
        round=int(config.get("server-round", 1)) - 1,
        rounds=max(int(config.get("rounds", 1)), 1),
    )
    return Optimizer(rule, float(config.get("weight-decay", 0.0))), float(rate)


def _linear_trainer(
    model: LinearModel, penalty: Any, config: Mapping[str, Any]
) -> Callable[["Batch"], float]:
    optimizer, lr = _optimizer_of(config)
    block = model.parameters[None]
    moments = Moments(np.zeros_like(block), np.zeros_like(block), np.zeros((1, 2), np.int64))
    start = model.parameters.copy()
    pull = np.float32(penalty.mu)

    def take_step(gradient: np.ndarray) -> None:
        gradient += pull * (model.parameters - start)
        step(optimizer, block, gradient[None], moments=moments, lr=lr)

    return lambda batch: model.train_batch(batch, penalty, take_step)


def _module_trainer(
    model: Any, penalty: Any, config: Mapping[str, Any]
) -> Callable[["Batch"], float]:
    torch = import_extra("torch", "training this model")
    optimizer = _torch_optimizer(model, config)
    model.train()

    def train_batch(batch: "Batch") -> float:
        x, y, a = (torch.as_tensor(part) for part in batch)
        logits = model(x)
        losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
        if penalty.weights is not None:
            losses = losses * losses.new_tensor(penalty.weights)[y, a]
        loss = losses.mean()
        optimizer.zero_grad()
        (loss + penalty(logits, y, a)).backward()
        optimizer.step()
        return loss.item()

    return train_batch


def _torch_optimizer(model: Any, config: Mapping[str, Any]) -> Any:
    optim = import_extra("torch.optim", "training this model")
    ours, lr = _optimizer_of(config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = ours.weight_decay
    if not ours.adaptive:
        return optim.SGD(parameters, lr, momentum=ours.momentum, weight_decay=decay)
    kind = optim.Adam if ours.rule == "adam" else optim.AdamW
    betas = (ours.first, ours.second)
    return kind(parameters, lr, betas=betas, eps=ours.epsilon, weight_decay=decay)
