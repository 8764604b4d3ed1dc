"""A client's model, rows and local training, and the penalty that the server adds to its loss.

    app = ClientApp()

    def site(message, context):              # called for every message: import torch in here
        from mine import Net, load
        node = context.node_config
        return Site(Net(), rows=load(node["data"]), name=str(node["site"]))

    register(app, site)                      # train, evaluate and query handlers

An app that already has handlers needs three more lines. Before training, it puts the record
`statistics(message, context, site)` into the reply's content under "fedgft" and calls
`penalty = penalty_of(message, model)`; in the loop, it computes
`loss = loss + penalty(logits, y, a)`.

The server's configuration says how to train: "lr", "epochs", "batch-size", "optimizer" (sgd,
momentum, adam, adamw), "weight-decay", "seed", and with "rounds" a "schedule" of the learning rate.
Every round starts with a new optimizer. A linear model trains in NumPy; only other models need
PyTorch.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from fedgft.data.dataset import Dataset, Federation
from fedgft.engine.plan import derive_seeds, draw_batches, learning_rate
from fedgft.errors import FedgftError, import_extra
from fedgft.fair_model import TREE_MODELS
from fedgft.flower.boosted_trees import BoostedTrees
from fedgft.flower.boosters import empty_booster
from fedgft.flower.histogram_trees import SiteForest, empty_forest
from fedgft.flower.messages import read_price, read_request
from fedgft.formatting import one_line
from fedgft.models import get_model, unflatten
from fedgft.optimizers import Moments, Optimizer, step
from fedgft.settings import TRAINING_KEYS, check_run_config
from fedgft.sums import CategoryNames, Sums

Batch = tuple[Any, Any, Any]
"Inputs, labels and groups (-1: not recorded), as NumPy arrays or torch tensors."
TREES = "xgboost"  # the name of the model of a run whose sites grow trees
FOREST = "trees"  # of a run whose sites grow trees together
ROWS_AT_ONCE = 2**14  # number of in-memory rows to predict at once


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

    def train_batch(self, batch: Batch, penalty: Any, take_step: Callable) -> float:
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
    """Probabilities (n, c) of a `LinearModel`, trees or an `nn.Module`, in double precision."""
    if isinstance(model, LinearModel | BoostedTrees | SiteForest):
        return model.predict(np.asarray(x))
    torch = import_extra("torch", "this model")
    model.eval()
    with torch.no_grad():
        return model(torch.as_tensor(x)).double().softmax(-1).cpu().numpy()


@dataclass
class Site:
    """A client's model, rows and names.

    Parameters
    ----------
    model
        An `nn.Module` with one output per class, or a `LinearModel`, `BoostedTrees` or
        `SiteForest`, which need no PyTorch.
    rows
        Training rows: three arrays or tensors (inputs, labels, groups), or an iterable of batches
        that can be read several times. A group of -1 means that it is not recorded.
    held_out
        Rows of the same form for evaluation and for the report; None if the site has none.
    read
        Turns a batch of the iterable into (inputs, labels, groups).
    train
        `train(model, penalty, config)`: your own local training. It adds
        `penalty(logits, labels, groups)` to its loss and may return metrics.
    classes, groups
        Names, or how many there are. They must be the same at all sites of a federation.
    name
        The site's name in logs and reports.
    attribute
        The name of the attribute that defines the groups, for the report.
    key
        A number that identifies the site when the random order of its rows is drawn.
    """

    model: Any
    rows: Any
    held_out: Any = None
    read: Callable[[Any], Any] = tuple
    train: Callable[[Any, "ServerPenalty", ConfigRecord], dict[str, float] | None] | None = None
    classes: int | Sequence[str] = 2
    groups: int | Sequence[str] = 2
    name: str = "unnamed"
    attribute: str = "group"
    key: int = 0
    names: CategoryNames = field(init=False)

    def __post_init__(self) -> None:
        self.names = CategoryNames.of(self.classes, self.groups)
        for rows in (self.rows, self.held_out):
            if rows is not None and not _is_table(rows) and iter(rows) is rows:
                text = "`rows` are read several times: give arrays or a loader, not an iterator"
                raise FedgftError(text)

    @property
    def in_memory(self) -> bool:
        """Whether the training rows are three arrays rather than a loader."""
        return _is_table(self.rows)

    def load(self, arrays: ArrayRecord) -> None:
        """Put the received parameters into the model."""
        if isinstance(self.model, BoostedTrees | SiteForest):
            try:
                return self.model.load(arrays)
            except FedgftError as error:
                raise FedgftError(f"site '{self.name}': {error}", kind=error.kind) from None
        state = self.model.state_dict()
        expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
        received = {name: tuple(array.shape) for name, array in arrays.items()}
        if expected != received:
            names = sorted(expected | received)
            name = next(name for name in names if expected.get(name) != received.get(name))
            shapes = f"'{name}' {received.get(name)}, its own {expected.get(name)}"
            reason = "other columns, classes or another model than the server's"
            raise self._error(f"has {shapes}: {reason}")
        try:
            if isinstance(self.model, LinearModel):
                self.model.load_state_dict({name: a.numpy() for name, a in arrays.items()})
            else:
                self.model.load_state_dict(arrays.to_torch_state_dict())
        except Exception as error:  # a decoder may raise any exception for untrusted bytes
            raise self._error(f"cannot be read ({type(error).__name__})") from None

    def _error(self, problem: str) -> FedgftError:
        return FedgftError(f"site '{self.name}': the model it received {problem}")

    def arrays(self) -> ArrayRecord:
        """Return the model's current parameters, as a message carries them; of trees, new ones."""
        if isinstance(self.model, BoostedTrees | SiteForest):
            return self.model.arrays()
        state = self.model.state_dict()
        if isinstance(self.model, LinearModel):
            return ArrayRecord({name: Array(values) for name, values in state.items()})
        return ArrayRecord(state)

    def tally(self, rows: Any) -> Sums:
        """Return the sums of the model's scores and decisions over these rows."""
        groups = len(self.names.groups)
        parts = [
            Sums.of(predict(self.model, x), _to_numpy(y), _to_numpy(a), num_groups=groups)
            for x, y, a in self.batches(rows)
        ]
        if not parts:
            raise FedgftError(f"site '{self.name}' has no rows")
        return sum(parts[1:], start=parts[0])

    def counts(self) -> np.ndarray:
        """Training rows by label and group (c, groups + 1); the last column: group not recorded."""
        counts = np.zeros(self.names.shape[:2])
        for _, y, a in self.batches(self.rows):
            np.add.at(counts, (_to_numpy(y), _to_numpy(a)), 1.0)
        return counts

    def size(self) -> int:
        """Return the number of training rows; a loader is read in full to count them."""
        return len(self.rows[1]) if self.in_memory else int(self.counts().sum())

    def batches(self, rows: Any) -> Iterable[Batch]:
        """Return the rows in their stored order, in pieces that a model can predict at once."""
        if not _is_table(rows):
            return map(self.read, rows)
        x, y, a = rows
        slices = (slice(i, i + ROWS_AT_ONCE) for i in range(0, len(y), ROWS_AT_ONCE))
        return ((x[rows], y[rows], a[rows]) for rows in slices)


def _is_table(rows: Any) -> bool:
    return isinstance(rows, tuple) and len(rows) == 3 and hasattr(rows[0], "shape")


def _to_numpy(values: Any) -> np.ndarray:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)


class ServerPenalty:
    """The terms that the server adds to a client's loss.

    Attributes
    ----------
    price
        The price of each score, by label, group and class: (c, groups + 1, c).
    mu
        The strength of FedProx's pull back to the received model, 0 for none.
    weights
        FairFed's reweighing: the weight of a row's loss by label and group. None: all are 1.
    """

    def __init__(self, price: np.ndarray, mu: float, model: Any = None) -> None:
        self.price = price
        self.mu = mu
        self.weights: np.ndarray | None = None
        self._model = model
        in_numpy = isinstance(model, LinearModel | BoostedTrees | SiteForest)
        has_proximal_term = model is not None and mu and not in_numpy
        parameters = model.parameters() if has_proximal_term else ()
        self._start = [p.detach().clone() for p in parameters]
        self._table: Any = None

    def __call__(self, logits: Any, y: Any, a: Any) -> Any:
        """Return the penalty of a batch in PyTorch: mean price of its scores plus FedProx's term.

        Parameters
        ----------
        logits
            The model's outputs (n, c), with gradients.
        y, a
            Class indices and group indices (-1: not recorded), (n,) each.
        """
        if self._table is None or self._table.device != logits.device:
            self._table = logits.new_tensor(self.price)
        penalty = (self._table[y, a] * logits.softmax(-1)).sum() / max(len(y), 1)
        if self._start:
            pairs = zip(self._model.parameters(), self._start, strict=True)
            penalty = penalty + self.mu / 2 * sum(((p - q) ** 2).sum() for p, q in pairs)
        return penalty


def penalty_of(
    message: Message,
    model: Any = None,
    *,
    classes: int | Sequence[str] = 2,
    groups: int | Sequence[str] = 2,
    site: str = "unnamed",
) -> ServerPenalty:
    """Read the penalty from a training message; it is zero if the message has none.

    Parameters
    ----------
    model
        The model as it was received: with it, the penalty includes FedProx's term if the server
        sent "proximal-mu".
    classes, groups
        Names, or how many there are.
    site
        The site's name, for errors.
    """
    price = read_price(read_request(message), CategoryNames.of(classes, groups), site=site)
    mu = settings_of(message).get("proximal-mu", 0.0)
    if not isinstance(mu, int | float) or not 0 <= mu < math.inf:
        raise FedgftError(f"the server's proximal-mu is {one_line(mu, 40)}: not a number")
    return ServerPenalty(price, float(mu), model)


# Messages


def arrays_of(message: Message) -> ArrayRecord:
    """Return the model in a message from the server, which must hold exactly one."""
    models = list(message.content.array_records.values())
    if len(models) != 1:
        raise FedgftError(f"the server's message holds {len(models)} models, not one")
    return models[0]


def settings_of(message: Message) -> ConfigRecord:
    """Return the strategy's settings; they include the request of fedgft, under its prefix."""
    return next(iter(message.content.config_records.values()), ConfigRecord())


# Training


def train_locally(site: Site, penalty: Any, config: Mapping[str, Any]) -> dict[str, float]:
    """Train a site's model on its rows for one round.

    Parameters
    ----------
    site
        Its model is trained in place. Rows in memory are shuffled as the simulator shuffles them;
        a loader is read in its own order.
    penalty
        The `ServerPenalty` of the round.
    config
        The server's settings for training; see the top of this file.

    Returns
    -------
    dict
        "train_loss", the mean cross-entropy over all steps.
    """
    if isinstance(site.model, SiteForest):
        text = "trees grows in queries, not in training: use the strategies for it on the server"
        raise FedgftError(f"site '{site.name}': {text}", field="model", kind="conflict")
    check_run_config(config, TRAINING_KEYS)
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


def _read_epoch(site: Site, config: Mapping[str, Any], epoch: int) -> Iterable[Batch]:
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


def _read_optimizer(config: Mapping[str, Any]) -> tuple[Optimizer, float]:
    """Return the optimizer and this round's learning rate."""
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
) -> Callable[[Batch], float]:
    optimizer, lr = _read_optimizer(config)
    block = model.parameters[None]
    moments = Moments(np.zeros_like(block), np.zeros_like(block), np.zeros((1, 2), np.int64))
    start = model.parameters.copy()
    mu = np.float32(penalty.mu)

    def take_step(gradient: np.ndarray) -> None:
        gradient += mu * (model.parameters - start)
        step(optimizer, block, gradient[None], moments=moments, lr=lr)

    return lambda batch: model.train_batch(batch, penalty, take_step)


def _module_trainer(
    model: Any, penalty: Any, config: Mapping[str, Any]
) -> Callable[[Batch], float]:
    torch = import_extra("torch", "training this model")
    optimizer = _torch_optimizer(model, config)
    model.train()

    def train_batch(batch: Batch) -> float:
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
    settings, lr = _read_optimizer(config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = settings.weight_decay
    if not settings.adaptive:
        return optim.SGD(parameters, lr, momentum=settings.momentum, weight_decay=decay)
    kind = optim.Adam if settings.rule == "adam" else optim.AdamW
    betas = (settings.first, settings.second)
    return kind(parameters, lr, betas=betas, eps=settings.epsilon, weight_decay=decay)


# Models and rows


def make_model(model: Any, *, features: int, classes: int, levels: Sequence[int] = ()) -> Any:
    """Return a model to train: trees, a linear model in NumPy, or another one in PyTorch.

    Parameters
    ----------
    model
        "xgboost" or "trees", or another model of `fedgft.models`.
    features, classes
        The numbers of features and of classes.
    levels
        For trees: the number of categories of each column, 0 for a column of numbers.
    """
    if model == TREES:
        if classes != 2:
            text = f"xgboost is for two classes when deployed; the labels have {classes}"
            raise FedgftError(text, field="model", kind="unsupported")
        return BoostedTrees(levels)
    if model == FOREST:
        return SiteForest(levels, classes)
    model = get_model(model)
    if model.linear:
        return LinearModel(features, classes)
    import_extra("torch", f"`model` {model.name}")
    return model.module(features=features, classes=classes).float()


def make_rows(x: np.ndarray, y: np.ndarray, a: np.ndarray) -> Batch:
    """Return rows as a `Site` holds them: inputs as float32, labels and groups as int64."""
    return np.ascontiguousarray(x, np.float32), np.asarray(y, np.int64), np.asarray(a, np.int64)


def read_rows(federation: Federation, rows: np.ndarray, model: Any) -> Batch:
    """Return rows of a simulation as a `Site` holds them; trees get columns, others features."""
    data = federation.dataset
    if model in TREE_MODELS:
        x = data.features[rows]
        x = x if data.encoder is None else data.encoder.to_fields(x)
    else:
        x = federation.scale_rows(rows)
    return make_rows(x, data.labels[rows], data.groups[rows])


def list_levels(data: Dataset) -> tuple[int, ...]:
    """Return the number of categories of each column that trees ask about; 0 for numbers."""
    return (0,) * data.features.shape[1] if data.encoder is None else data.encoder.level_counts


def client_site(federation: Federation, client: int, model: Any, *, name: str = "") -> Site:
    """Return client number `client` of a simulation as a site with the same rows and order."""
    data = federation.dataset
    rows = federation.client(client)
    shape = {"features": data.features.shape[1], "classes": len(data.classes)}
    return Site(
        make_model(model, **shape, levels=list_levels(data)),
        rows=read_rows(federation, rows, model),
        classes=data.classes,
        groups=data.group_names,
        name=name or f"site-{client}",
        key=int(federation.keys[client]),
    )


def first_arrays(
    model: Any, *, features: int, classes: int, seed: int, levels: Sequence[int] = ()
) -> ArrayRecord:
    """Return the initial parameters of a simulated run with this seed, by tensor name.

    Of trees, it is a booster or a forest without trees; `levels` is as in `make_model`.
    """
    if model == TREES:
        return empty_booster(levels)
    if model == FOREST:
        return empty_forest(levels, classes)
    model = get_model(model)
    params = model.init(seed, features=features, classes=classes).astype(np.float32)
    shapes = model.shapes(features=features, classes=classes)
    return ArrayRecord({name: Array(tensor) for name, tensor in unflatten(params, shapes).items()})


def flatten_arrays(arrays: ArrayRecord) -> np.ndarray:
    """Return all parameters in one vector, laid out as in a simulation's `History.params`."""
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])
