"""The client side: a site's model and rows become the handlers of a Flower `ClientApp`.

    app = ClientApp()

    def site(message, context):              # called for every message: import torch in here
        from mine import Net, load
        node = context.node_config
        return Site(Net(), rows=load(node["data"]), name=str(node["site"]))

    register(app, site)                      # train, evaluate and query handlers

An app that has handlers already adds two lines: `penalty = penalty_of(message, model)`, and in the
loop `loss = loss + penalty(logits, y, a)`; and, before training, `statistics(message, context,
site)`, put into the reply's content under "fedgft".
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedgft.algorithms.objectives import reweigh
from fedgft.data.dataset import Federation
from fedgft.errors import FedgftError, import_extra
from fedgft.flower.local_training import LinearModel, predict, train_locally
from fedgft.flower.messages import (
    RECORD,
    REPORT,
    TRAINED,
    VERSION,
    Names,
    Report,
    check_version,
    pack_report,
    read_price,
    read_request,
)
from fedgft.flower.replies import plain
from fedgft.flower.secure_sum_client import reply_to_secure_sum
from fedgft.models import get_model, unflatten
from fedgft.privacy.ledger import model_digest
from fedgft.privacy.policy import SitePolicy, Summand
from fedgft.sums import Sums

Batch = tuple[Any, Any, Any]
"Inputs, labels and groups (-1: not recorded), as NumPy arrays or torch tensors."
PIECE = 2**14  # rows in memory that are predicted at once


@dataclass
class Site:
    """A client's model, rows and names.

    Parameters
    ----------
    model
        An `nn.Module` with one output per class, or a `LinearModel`, which needs no PyTorch.
    rows
        Training rows: three arrays or tensors (inputs, labels, groups), or an iterable of batches
        that can be read several times. A group of -1 is not recorded.
    held_out
        Rows of the same form for evaluation and for the report; None if the site has none.
    read
        Turns a batch of the iterable into (inputs, labels, groups).
    train
        `train(model, penalty, config)`: your own local training. It adds
        `penalty(logits, labels, groups)` to its loss and may return metrics.
    classes, groups
        Names, or how many there are. All sites of a federation must have the same.
    name
        The site's name in logs and reports.
    attribute
        What the groups are groups of, in a report.
    key
        Identifies the site in the random order of rows.
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
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        self.names = Names.of(self.classes, self.groups)
        for rows in (self.rows, self.held_out):
            if rows is not None and not _is_table(rows) and iter(rows) is rows:
                raise FedgftError(
                    "`rows` are read several times: give arrays or a loader, not an iterator "
                    "that is used up"
                )

    @property
    def in_memory(self) -> bool:
        """Whether the training rows are three arrays rather than a loader."""
        return _is_table(self.rows)

    def load(self, arrays: ArrayRecord) -> None:
        """Put the received parameters into the model."""
        own = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        sent = {name: tuple(array.shape) for name, array in arrays.items()}
        if own != sent:
            odd = next(name for name in sorted(own | sent) if own.get(name) != sent.get(name))
            raise FedgftError(
                f"site '{self.name}': the model it received has '{odd}' {sent.get(odd)}, its "
                f"own {own.get(odd)}: other columns, classes or another model than the server's"
            )
        try:
            if isinstance(self.model, LinearModel):
                self.model.load_state_dict({name: a.numpy() for name, a in arrays.items()})
            else:
                self.model.load_state_dict(arrays.to_torch_state_dict())
        except Exception as error:  # a decoder may raise anything for a stranger's bytes
            raise FedgftError(
                f"site '{self.name}': the model it received cannot be read ({type(error).__name__})"
            ) from None

    def arrays(self) -> ArrayRecord:
        """The model's current parameters, as a message carries them."""
        state = self.model.state_dict()
        if isinstance(self.model, LinearModel):
            return ArrayRecord({name: Array(values) for name, values in state.items()})
        return ArrayRecord(state)

    def tally(self, rows: Any) -> Sums:
        """The sums of the model's scores and decisions over these rows."""
        groups = len(self.names.groups)
        total = None
        for x, y, a in self.batches(rows):
            probs = predict(self.model, x)
            tally = Sums.of(probs, _to_numpy(y), _to_numpy(a), num_groups=groups)
            total = tally if total is None else total + tally
        if total is None:
            raise FedgftError(f"site '{self.name}' has no rows")
        return total

    def counts(self) -> np.ndarray:
        """Training rows by label and group (c, groups + 1); the last column: not recorded."""
        counts = np.zeros(self.names.shape[:2])
        for _, y, a in self.batches(self.rows):
            np.add.at(counts, (_to_numpy(y), _to_numpy(a)), 1.0)
        return counts

    def size(self) -> int:
        """The number of training rows; a loader must be read for it."""
        return len(self.rows[1]) if self.in_memory else int(self.counts().sum())

    def batches(self, rows: Any) -> Iterable[Batch]:
        """The rows, in their own order, in pieces that a model can predict at once."""
        if not _is_table(rows):
            return map(self.read, rows)
        x, y, a = rows
        starts = range(0, len(y), PIECE)
        return ((x[i : i + PIECE], y[i : i + PIECE], a[i : i + PIECE]) for i in starts)


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
        The weight of a row's loss by label and group, or None for 1 (FairFed's reweighing).
    """

    def __init__(self, price: np.ndarray, mu: float, model: Any = None) -> None:
        self.price = price
        self.mu = mu
        self.weights: np.ndarray | None = None
        self._model = model
        pulled = model is not None and mu and not isinstance(model, LinearModel)
        self._start = [p.detach().clone() for p in model.parameters()] if pulled else []
        self._table: Any = None

    def __call__(self, logits: Any, y: Any, a: Any) -> Any:
        """The penalty of a batch in PyTorch: mean price of its scores, and FedProx's term.

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
    price = read_price(read_request(message), Names.of(classes, groups), site=site)
    mu = settings_of(message).get("proximal-mu", 0.0)
    if not isinstance(mu, int | float) or not 0 <= mu < math.inf:
        raise FedgftError(f"the server's proximal-mu is {plain(mu, 40)}: not a number")
    return ServerPenalty(price, float(mu), model)


def statistics(message: Message, context: Context, site: Site) -> ConfigRecord:
    """The record for a reply: sums of the site's current model over its training rows, with the
    noise and suppression that the server and the site agreed on."""
    return _pack_sums(site, _release_sums(message, context, site)[0])


def _release_sums(message: Message, context: Context, site: Site) -> tuple[Sums, int]:
    """The sums that may leave the site, and the number of rows, which may not."""
    exact = site.tally(site.rows)
    model = model_digest(site.arrays())
    released = SitePolicy(context, site.name, read_request(message)).release(exact, model)
    return released, int(exact.rows())


def _pack_sums(site: Site, tally: Sums) -> ConfigRecord:
    return pack_report(Report(site.name, site.names, tally))


def register(
    app: ClientApp, site: Callable[[Message, Context], Site], *, mods: Any = None
) -> ClientApp:
    """Register handlers for training, evaluation, statistics and the report.

    Parameters
    ----------
    app
        The app, which is also returned.
    site
        Makes the `Site` that answers a message.
    mods
        Flower's mods (differential privacy) for training alone: on the whole app they would turn
        the other replies into errors.
    """

    @app.train(mods=mods)
    def train(message: Message, context: Context) -> Message:
        return train_reply(message, context, site(message, context))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return evaluate_reply(message, context, site(message, context))

    @app.query(RECORD)
    def query(message: Message, context: Context) -> Message:
        return query_reply(message, context, site(message, context))

    @app.query(REPORT)
    def report(message: Message, context: Context) -> Message:
        return report_reply(message, context, site(message, context))

    return app


def train_reply(message: Message, context: Context, site: Site) -> Message:
    """Train the received model for one round; send it with the sums that the server asks for."""
    request = read_request(message)
    content = RecordDict()
    released = None
    rows = None
    policy = SitePolicy(context, site.name, request)
    policy.agree()
    site.load(arrays_of(message))
    wanted = request.get("statistics", "none")
    if wanted in ("received", "both"):
        released, rows = _release_sums(message, context, site)
        content[RECORD] = _pack_sums(site, released)
    names = {"classes": site.names.classes, "groups": site.names.groups}
    penalty = penalty_of(message, site.model, site=site.name, **names)
    if request.get("reweigh"):
        penalty.weights = reweigh(site.counts())
    config = settings_of(message)
    if site.train is None:
        metrics = train_locally(site, penalty, config)
    else:
        metrics = site.train(site.model, penalty, config) or {}
    if wanted == "both":
        content[TRAINED] = statistics(message, context, site)
    content["arrays"] = site.arrays()
    rows = site.size() if rows is None else rows  # do not read a loader once more
    shown_rows = policy.report_rows(rows, released)
    content["metrics"] = _metric_record(shown_rows, metrics, hidden=policy.hides_metrics())
    return Message(content, reply_to=message)


def evaluate_reply(message: Message, context: Context, site: Site) -> Message:
    """Evaluate on held-out rows if the site has some; statistics are of its training rows."""
    request = read_request(message)
    content = RecordDict()
    released = None
    policy = SitePolicy(context, site.name, request)
    policy.agree()
    site.load(arrays_of(message))
    if request.get("statistics", "none") != "none":
        released, _ = _release_sums(message, context, site)
        content[RECORD] = _pack_sums(site, released)
    tally = site.tally(site.rows if site.held_out is None else site.held_out)
    shown_rows = policy.report_rows(int(tally.rows()), released)
    metrics = {"accuracy": float(tally.accuracy())}
    content["metrics"] = _metric_record(shown_rows, metrics, hidden=policy.hides_metrics())
    return Message(content, reply_to=message)


def _metric_record(rows: int, metrics: dict[str, float], *, hidden: bool) -> MetricRecord:
    """The metrics that a strategy averages; with noise or secure sums, only the number of rows."""
    shown = {} if hidden else {name: float(value) for name, value in metrics.items()}
    return MetricRecord({"num-examples": rows, **shown})


def query_reply(message: Message, context: Context, site: Site) -> Message:
    """Send the sums of the received model, or this site's part of a secure sum."""
    request = read_request(message)
    check_version(request, f"the server (seen from site '{site.name}')")
    if "secure.stage" in request:
        record = _answer_secure_sum(message, context, site)
    else:
        site.load(arrays_of(message))
        record = statistics(message, context, site)
    return Message(RecordDict({RECORD: record}), reply_to=message)


def _answer_secure_sum(message: Message, context: Context, site: Site) -> ConfigRecord:
    request = read_request(message)
    policy = SitePolicy(context, site.name, request)
    budget = policy.agree()

    def count_rows() -> int:
        counts = site.counts()
        shown = int(counts[counts >= budget.min_count].sum())
        return policy.declare_rows(shown)

    def make_summand(model: str, cohort: str, clients: int) -> Summand:
        site.load(arrays_of(message))
        about = {"model": model, "cohort": cohort, "clients": clients}
        return policy.make_summand(site.tally(site.rows), **about)

    return reply_to_secure_sum(
        request,
        context,
        site.name,
        site.names,
        rows=count_rows,
        model=lambda: model_digest(arrays_of(message)),
        summand=make_summand,
    )


def report_reply(message: Message, context: Context, site: Site) -> Message:
    """Send the site's file of sums (`fedgft measure`) for the received model on held-out rows.

    Held-out rows are other people than the training rows, so noise on their sums draws on another
    budget than the rounds do, once.
    """
    from fedgft.audit import measure  # only for the last message of a run
    from fedgft.audit.site_file import to_json

    request = read_request(message)
    check_version(request, "the server")
    policy = SitePolicy(context, site.name, request)
    budget = policy.agree()
    if site.held_out is None or "privacy.secure" in request:
        raise FedgftError(
            f"site '{site.name}' gives no report: it holds no rows out, or gives its "
            "sums to secure sums only"
        )
    noise: dict[str, Any] = {"min_cell": max(budget.min_count, 3) if budget.min_count else 0}
    if budget.epsilon is not None:
        noise = {"epsilon": budget.epsilon, "delta": budget.delta}
    site.load(arrays_of(message))

    def make_report() -> str:
        labels, scores, groups = _score_held_out(site)
        sums = measure(
            labels,
            scores,
            sensitive_features={site.attribute: groups},
            site=site.name,
            classes=site.names.classes,
            values={site.attribute: site.names.groups},
            **noise,
        )
        return to_json(sums)

    text = policy.release_report(make_report, budget, model_digest(arrays_of(message)))
    reply = ConfigRecord({"version": VERSION, "site": site.name, "sums": text})
    return Message(RecordDict({RECORD: reply}), reply_to=message)


def _score_held_out(site: Site) -> tuple[list[str], np.ndarray, list[str | None]]:
    """Names of labels, scores and names of groups of the held-out rows."""
    scores = []
    labels: list[str] = []
    groups: list[str | None] = []
    for x, y, a in site.batches(site.held_out):
        scores.append(predict(site.model, x))
        labels += [site.names.classes[i] for i in y.tolist()]
        groups += [None if i < 0 else site.names.groups[i] for i in a.tolist()]
    probs = np.concatenate(scores)
    return labels, probs[:, 1] if probs.shape[1] == 2 else probs, groups


def arrays_of(message: Message) -> ArrayRecord:
    """The one model in a message of the server."""
    models = list(message.content.array_records.values())
    if len(models) != 1:
        raise FedgftError(f"the server's message holds {len(models)} models, not one")
    return models[0]


def settings_of(message: Message) -> ConfigRecord:
    """The strategy's settings; ours are among them, under a prefix."""
    return next(iter(message.content.config_records.values()), ConfigRecord())


def make_model(model: Any, *, features: int, classes: int) -> Any:
    """The trainable form of a model of `fedgft.models`: NumPy if it is linear, else PyTorch."""
    model = get_model(model)
    if model.linear:
        return LinearModel(features, classes)
    import_extra("torch", f"`model` {model.name}")
    return model.module(features=features, classes=classes).float()


def make_rows(x: np.ndarray, y: np.ndarray, a: np.ndarray) -> Batch:
    """A table's rows as a `Site` holds them: inputs in single precision, whole numbers else."""
    return np.ascontiguousarray(x, np.float32), np.asarray(y, np.int64), np.asarray(a, np.int64)


def client_site(federation: Federation, client: int, model: Any, *, name: str = "") -> Site:
    """Client number `client` of a simulated federation, as a site with the same rows and order."""
    data = federation.dataset
    rows = federation.client(client)
    return Site(
        make_model(model, features=data.features.shape[1], classes=len(data.classes)),
        rows=make_rows(federation.scale_rows(rows), data.labels[rows], data.groups[rows]),
        classes=data.classes,
        groups=data.group_names,
        name=name or f"site-{client}",
        key=int(federation.keys[client]),
    )


def first_arrays(model: Any, *, features: int, classes: int, seed: int) -> ArrayRecord:
    """The start of a simulated run with this seed, under the names of the model's tensors."""
    model = get_model(model)
    params = model.init(seed, features=features, classes=classes).astype(np.float32)
    shapes = model.shapes(features=features, classes=classes)
    return ArrayRecord({name: Array(tensor) for name, tensor in unflatten(params, shapes).items()})


def flatten_arrays(arrays: ArrayRecord) -> np.ndarray:
    """All parameters in one vector, as a simulation's `History.params` has them."""
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])
