"""The client's side: a site's model and rows become the handlers of a Flower `ClientApp`.

    app = ClientApp()

    def site(message, context):              # once a message: import torch in here, not above
        from mine import Net, load
        node = context.node_config
        return Site(Net(), rows=load(node["data"]), name=str(node["site"]))

    register(app, site)                      # train, evaluate and query handlers

Who has handlers already adds two lines: `penalty = penalty_of(message, model)`, and in the loop
`loss = loss + penalty(logits, y, a)`; and, before training, `statistics(message, context, site)`,
put into the reply's content under "fedgft".
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedgft.errors import FedgftError
from fedgft.federated.reweighing import reweigh
from fedgft.flower.gather import plain
from fedgft.flower.ledger import digest_of
from fedgft.flower.masks import answer
from fedgft.flower.shield import (
    Summand,
    agreed,
    declared_rows,
    examples,
    protected,
    quiet,
    summand,
)
from fedgft.flower.site import Site
from fedgft.flower.wire import (
    RECORD,
    REPORT,
    TRAINED,
    Names,
    Report,
    Request,
    check_version,
    pack_report,
    price_in,
    request_of,
)
from fedgft.metrics import Tally


class ServerPenalty:
    """What the server adds to a client's loss: the prices of its scores, and FedProx's pull."""

    def __init__(self, price: np.ndarray, mu: float, model: Any = None) -> None:
        self.price, self.mu, self.model = price, mu, model
        self.weights: np.ndarray | None = None  # by label and group, where rows are reweighed
        moved = () if model is None or not mu else model.parameters()
        self.start = [p.detach().clone() for p in moved]
        self._table: Any = None

    def __call__(self, logits: Any, y: Any, a: Any) -> Any:
        """The mean over a batch; `y` holds class indices, `a` group indices (-1: not recorded)."""
        if self._table is None or self._table.device != logits.device:
            self._table = logits.new_tensor(self.price)
        term = (self._table[y, a] * logits.softmax(-1)).sum() / max(len(y), 1)
        if self.start:
            now = [p for p in self.model.parameters()]
            term = term + self.mu / 2 * sum(
                ((p - q) ** 2).sum() for p, q in zip(now, self.start, strict=True)
            )
        return term


def penalty_of(
    message: Message, model: Any = None, *, classes: int | Sequence[str] = 2,
    groups: int | Sequence[str] = 2, site: str = "unnamed",
) -> ServerPenalty:  # fmt: skip
    """The penalty in a training message; zero where there is none. With `model` (as received) it
    also holds FedProx's term, if the server sent "proximal-mu"."""
    names = Names.of(classes, groups)
    price = price_in(request_of(message), names, site=site)
    mu = settings_of(message).get("proximal-mu", 0.0)
    if not isinstance(mu, int | float) or not 0 <= mu < math.inf:
        raise FedgftError(f"the server's proximal-mu is {plain(mu, 40)}: not a number")
    return ServerPenalty(price, float(mu), model)


def statistics(message: Message, context: Context, site: Site) -> ConfigRecord:
    """The record for a reply: sums of the model as it stands, with noise where that was agreed."""
    return _packed(site, _sums(message, context, site)[0])


def _sums(message: Message, context: Context, site: Site) -> tuple[Tally, int]:
    """What may leave the site; and, for itself, how many rows it counted."""
    exact = site.tally(site.rows)
    model = digest_of(ArrayRecord(site.model.state_dict()))
    return protected(exact, request_of(message), context, site.name, model), int(exact.rows())


def _packed(site: Site, tally: Tally) -> ConfigRecord:
    return pack_report(Report(site.name, site.names, tally))


def register(
    app: ClientApp, site: Callable[[Message, Context], Site], *, mods: Any = None
) -> ClientApp:
    """Handlers for training, evaluation, statistics and the report. `mods` (Flower's DP) go on
    training alone: on the whole app they would turn the other replies into errors."""

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
        from fedgft.flower.reporting import report_reply

        return report_reply(message, context, site(message, context))

    return app


def train_reply(message: Message, context: Context, own: Site) -> Message:
    from fedgft.flower.local import fit

    request, content, sent, rows = request_of(message), RecordDict(), None, None
    agreed(request, context, own.name)
    own.load(arrays_of(message))
    wanted = request.get("statistics", "none")
    if wanted in ("received", "both"):
        sent, rows = _sums(message, context, own)
        content[RECORD] = _packed(own, sent)
    penalty = penalty_of(
        message, own.model, classes=own.names.classes, groups=own.names.groups, site=own.name
    )
    if request.get("reweigh"):
        penalty.weights = reweigh(own.counts())
    metrics = (own.train or fit(own))(own.model, penalty, settings_of(message)) or {}
    if wanted == "both":
        content[TRAINED] = statistics(message, context, own)
    content["arrays"] = ArrayRecord(own.model.state_dict())
    rows = own.size() if rows is None else rows  # a loader is not read once more for it
    content["metrics"] = _metrics(rows, request, context, own.name, sent, metrics)
    return Message(content, reply_to=message)


def evaluate_reply(message: Message, context: Context, own: Site) -> Message:
    """On held-out rows, where the site has some; but the statistics are of its training rows."""
    request, content, sent = request_of(message), RecordDict(), None
    agreed(request, context, own.name)
    own.load(arrays_of(message))
    if request.get("statistics", "none") != "none":
        sent, _ = _sums(message, context, own)
        content[RECORD] = _packed(own, sent)
    tally = own.tally(own.rows if own.held_out is None else own.held_out)
    metrics = {"accuracy": float(tally.accuracy())}
    content["metrics"] = _metrics(int(tally.rows()), request, context, own.name, sent, metrics)
    return Message(content, reply_to=message)


def _metrics(
    rows: int,
    request: Request,
    context: Context,
    site: str,
    sent: Tally | None,
    metrics: dict[str, Any],
) -> MetricRecord:
    """What a strategy needs; beside noise or secure sums, nothing else of the rows."""
    more = {} if quiet(request) else {name: float(value) for name, value in metrics.items()}
    return MetricRecord({"num-examples": examples(rows, request, context, site, sent), **more})


def query_reply(message: Message, context: Context, own: Site) -> Message:
    request = request_of(message)
    check_version(request, f"the server (seen from site '{own.name}')")

    if "secure.stage" in request:
        budget = agreed(request, context, own.name)

        def rows() -> int:
            counts = own.counts()
            shown = int(counts[counts >= budget.min_count].sum())
            return declared_rows(shown, request, context, own.name)

        def part(model: str, cohort: str, clients: int) -> Summand:
            own.load(arrays_of(message))
            tally = own.tally(own.rows)
            who = {"model": model, "cohort": cohort, "clients": clients}
            return summand(tally, request, context, own.name, **who)

        reply = answer(
            request, context, own.name, own.names, rows=rows,
            model=lambda: digest_of(arrays_of(message)), summand=part,
        )  # fmt: skip
    else:
        own.load(arrays_of(message))
        reply = _packed(own, _sums(message, context, own)[0])
    return Message(RecordDict({RECORD: reply}), reply_to=message)


def arrays_of(message: Message) -> ArrayRecord:
    found = list(message.content.array_records.values())
    if len(found) != 1:
        raise FedgftError(f"the server's message holds {len(found)} models, not one")
    return found[0]


def settings_of(message: Message) -> ConfigRecord:
    """The strategy's settings; ours are among them, under a prefix."""
    return next(iter(message.content.config_records.values()), ConfigRecord())
