"""`FairStrategy`: any Flower strategy, with fairness over everybody's rows.

It wraps a strategy the way Flower's own DP wrappers do, and must be the outermost wrapper. What is
new stands in two slots, a penalty (FedGFT) and a weighting (FairFed); everything else is passed on.

| channel    | messages a round | the sums describe                        | needs              |
|------------|------------------|------------------------------------------|--------------------|
| "train"    | none more        | the model the round began with: one late | nothing            |
| "query"    | one more         | the model the round begins with          | a query handler    |
| "evaluate" | none more        | the same; nothing in round 1             | evaluate messages  |
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedgft.flower.checkpoint import Checkpoint
from fedgft.flower.checks import Noise, capped, check_report
from fedgft.flower.constants import Constants, kind_of
from fedgft.flower.gather import Believer, Patient, Replies, log
from fedgft.flower.secure import SecureSum
from fedgft.flower.terms import Terms, innermost, line, query
from fedgft.flower.weights import Weights
from fedgft.flower.wire import RECORD, Report, Request, prices, put_request
from fedgft.metrics import Tally
from fedgft.types import FedgftError

TRAINED = f"{RECORD}.trained"


class Best(NamedTuple):
    """The best model of the last rounds, and what was measured of it."""

    score: float
    arrays: ArrayRecord
    row: dict[str, Any]


class FairStrategy(Strategy):
    """See the top of this file; made by `FedGFT` and `FairFed`."""

    def __init__(
        self, strategy: Any, constants: Constants, *, terms: Terms,
        weights: Weights | None = None, believer: Believer | None = None,
        checkpoint: str | Path | None = None,
        on_round: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(strategy, Strategy):
            raise FedgftError(
                f"{type(strategy).__module__}.{type(strategy).__name__} is no strategy of "
                "flwr.serverapp.strategy (those of flwr.server.strategy are the old ones)"
            )
        if weights is not None and (terms.secure or terms.budget.epsilon is not None):
            raise FedgftError("FairFed needs every client's own sums: no secure sums, no noise")
        self.strategy, self.constants, self.terms = strategy, constants, terms
        self.weights, self.believer = weights, believer or Believer()
        self.checkpoint = None if checkpoint is None else Checkpoint(Path(checkpoint))
        self.on_round = on_round
        self.noise: Noise | None = terms.budget.noise(kind_of(constants.pricing))
        self.secure = SecureSum() if terms.secure else None
        self.sent, self.config, self.timeout = ArrayRecord(), ConfigRecord(), 3600.0
        self.done = self.idle = self.released = self.rounds = 0
        self.full = True  # everybody takes part
        self.best: Best | None = None
        self.measured: dict[str, Any] | None = None  # the row of the model that is handed over
        self._received: dict[int, Report] = {}

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row for every model that was measured: round, accuracy, gaps, rows, clients."""
        return self.constants.history

    # The engine's verbs, in the order in which it calls them

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:  # fmt: skip
        """As the engine's, but from the checkpoint on where there is one; and the last model is
        measured, or, for a target, the best of the last rounds handed over."""
        arrays = initial_arrays
        if self.checkpoint is not None and self.checkpoint.exists():
            arrays = self.checkpoint.load(self, initial_arrays)
            log.info("fedgft: continuing after round %d", self.done)
        self.rounds, self.timeout, offset = num_rounds, timeout, self.done
        measured = evaluate_fn and (lambda r, a: evaluate_fn(r + offset, a))
        left = max(num_rounds - offset, 0)
        result = Strategy.start(
            self, grid, arrays, left, timeout, train_config, evaluate_config, measured
        )
        if left and self.idle >= left:
            raise FedgftError(f"no round gave a new model: {self._why}")
        result.arrays = result.arrays or arrays
        self._finish(grid, result)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.sent, self.config, number = arrays, config, self.done + 1
        messages = list(self.strategy.configure_train(number, arrays, config, self._patient(grid)))
        nodes = [message.metadata.dst_node_id for message in messages]
        if not messages and self.terms.channel != "evaluate":
            raise FedgftError(f"channel '{self.terms.channel}' carries no statistics: the strategy "
                              "sends no training messages (fraction_train)")  # fmt: skip
        self.full = len(nodes) == len(list(grid.get_node_ids()))
        if self.terms.channel == "query":
            self._ask(grid, arrays, nodes, number)
        self._tell(messages, self.terms.channel == "train")
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found, number = Replies.of(replies), self.done + 1
        records, trained = found.take(), found.take(TRAINED)
        found.keep_updates(self.sent, self._key, self.believer)
        self.believer.remember(found.good, self._key)
        if self.terms.channel == "train":
            told = {node: record for node, record in records.items() if node in found.good}
            self._learn(told, self.sent, number - 1, anybody=bool(found.good))
        if self.weights is not None:
            self._weigh(found, trained)
        ready = [*found.errors, *(found.good[node] for node in sorted(found.good))]
        arrays, metrics = self.strategy.aggregate_train(number, ready)
        self._count(arrays, found.why())
        if self.checkpoint is not None:
            self.checkpoint.save(self, arrays if arrays is not None else self.sent)
        return arrays, self._with_gaps(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.sent = arrays
        messages = list(
            self.strategy.configure_evaluate(self.done, arrays, config, self._patient(grid))
        )
        asked = self.terms.channel == "evaluate"
        if asked and not messages:
            raise FedgftError("channel 'evaluate' carries no statistics: the strategy sends no "
                              "evaluate messages (fraction_evaluate)")  # fmt: skip
        self._tell(messages, asked)
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        found = Replies.of(replies)
        records = found.take()
        if self.terms.channel == "evaluate":
            self._learn(records, self.sent, self.done, anybody=bool(found.good))
        found.keep_alike(self.believer)
        ready = [*found.errors, *(found.good[node] for node in sorted(found.good))]
        return self.strategy.aggregate_evaluate(self.done, ready)

    def summary(self) -> None:
        pricing, terms = self.constants.pricing, self.terms
        log.info("\t├──> fedgft: %s, %s", self.constants.metric.title, pricing or self.weights)
        log.info("\t│\t└── channel %s, budget %s", terms.channel, terms.budget)
        self.strategy.summary()

    # What is ours

    def _ask(self, grid: Grid, arrays: ArrayRecord, nodes: list[int], number: int) -> None:
        """A question of its own: the sums of this model, before the round begins."""
        request = self._prices(True)
        if self.secure is not None:
            self._ask_secretly(grid, arrays, nodes, request, number)
            return
        found = Replies.of(grid.send_and_receive(
            [query(arrays, self._settings(number), request, node) for node in nodes],
            timeout=self.timeout,
        ))  # fmt: skip
        self._learn(found.take(), arrays, number - 1, anybody=bool(found.good), why=found.why())

    def _ask_secretly(
        self, grid: Grid, arrays: ArrayRecord, nodes: list[int], request: Request, number: int
    ) -> None:
        """Only the total is known, so only the total can be checked."""
        assert self.secure is not None
        try:
            total, clients, names = self.secure.ask(
                grid, arrays, nodes, request=request, config=self._settings(number),
                timeout=self.timeout,
            )  # fmt: skip
            self.believer.names = self.believer.names or names
            self.believer.names.check(names, site="all sites")
            check_report(Report("all sites", names, total), examples=None)
        except FedgftError as error:
            if not self.history:
                raise
            log.warning("fedgft: no statistics this round; the constants stay: %s", error)
            return
        self._use(total, clients, arrays, number - 1)

    def _learn(
        self, records: dict[int, Any], arrays: ArrayRecord, of_round: int, *, anybody: bool,
        why: str = "",
    ) -> None:  # fmt: skip
        """New constants from what clients say of the model that `of_round` rounds made."""
        reports = self.believer.reports(records, self.noise)
        self._received = reports
        if not reports:
            if not self.history and (anybody or why):
                raise FedgftError(
                    f"no client sent statistics through channel '{self.terms.channel}': "
                    + (why or "its handler must answer with fedgft.flower (docs/deployment.md)")
                )
            log.warning("fedgft: no statistics this round; the constants stay as they are")
            return
        tallies, cut = capped(reports, self.terms.max_share)
        for text in cut:
            log.warning("fedgft: %s", text)
        total = sum(list(tallies.values())[1:], start=next(iter(tallies.values())))
        self._use(total, len(tallies), arrays, of_round)

    def _use(self, total: Tally, clients: int, arrays: ArrayRecord, of_round: int) -> None:
        self.released += 1
        self.constants.names = self.believer.names
        self.constants.learn(total, round=of_round, clients=clients, noise=self.noise)
        row = self.history[-1]
        spent = self.terms.budget.spent(self.released)
        if spent is not None:
            row |= {"epsilon": spent, "delta": self.terms.budget.delta}
        log.info("fedgft: %s", line(row, self.constants.metric.name))
        if self.on_round is not None:
            self.on_round(row)
        pick = 0.0 if self.constants.pricing is None else self.constants.pricing.pick
        if self.full and self.noise is None and of_round > self.rounds * (1 - pick):
            score = self.constants.score(total)
            if self.best is None or score >= self.best.score:
                self.keep_best(score, arrays, row)

    def keep_best(self, score: float, arrays: ArrayRecord, row: dict[str, Any]) -> None:
        self.best = Best(score, arrays, row)

    def _finish(self, grid: Grid, result: Result) -> None:
        if self.terms.final and self.terms.channel != "evaluate":
            try:
                self._ask(grid, result.arrays, sorted(grid.get_node_ids()), self.done + 1)
            except FedgftError as error:
                log.warning("fedgft: the last model was not measured: %s", error)
        last = self.history[-1] if self.history else {}
        self.measured = last if last.get("round") == self.done else None
        if self.best is not None:
            result.arrays, self.measured = self.best.arrays, self.best.row

    def _weigh(self, found: Replies, trained: dict[int, Any]) -> None:
        """The engine's strategies weigh by a metric of the reply, so that is where weights go."""
        assert self.weights is not None
        own = self.believer.reports(trained, None) if trained else None
        weights = self.weights.of(self._received, own)
        for node, reply in list(found.good.items()):
            if weights.get(node, 0.0) <= 0:
                found.refuse(
                    node,
                    "FairFed gives it no weight",
                    self.believer.sites.get(node, f"node {node}"),
                )
            else:
                next(iter(reply.content.metric_records.values()))[self._key] = weights[node]

    def _count(self, arrays: ArrayRecord | None, why: str) -> None:
        self.done += 1
        self.idle = 0 if arrays else self.idle + 1
        self._why = why
        if self.idle >= self.terms.patience:
            raise FedgftError(f"no new model in {self.idle} rounds in a row: {why}")

    def _with_gaps(self, metrics: MetricRecord | None) -> MetricRecord | None:
        if metrics is not None and self.history:
            row = self.history[-1]
            for key in ("accuracy", "gap_soft", "gap_hard"):
                if row[key] is not None:
                    metrics[f"{RECORD}.{key.replace('_', '-')}"] = row[key]
        return metrics

    def _tell(self, messages: list[Message], asked: bool) -> None:
        """Prices and wishes, into every message; strategies give many of them one content."""
        request = self._prices(asked)
        for content in {id(message.content): message.content for message in messages}.values():
            put_request(content, request)

    def _prices(self, asked: bool) -> Request:
        wanted = "both" if self.weights is not None and self.weights.trained else "received"
        reweigh = {"reweigh": True} if self.weights is not None and self.weights.reweigh else {}
        return reweigh | prices(
            self.constants.price, self.believer.names, statistics=wanted if asked else "none",
            privacy=self.terms.asked(kind_of(self.constants.pricing)),
        )  # fmt: skip

    def _settings(self, number: int) -> ConfigRecord:
        """The strategy's configuration, for questions of our own."""
        return ConfigRecord({**self.config, "server-round": number})

    def _patient(self, grid: Grid) -> Any:
        return Patient(grid, self.terms.node_timeout)

    @property
    def _key(self) -> str:
        return innermost(self.strategy, "weighted_by_key", "num-examples")
