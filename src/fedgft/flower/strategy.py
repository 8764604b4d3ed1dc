"""`FairStrategy`: any Flower strategy, with fairness over everybody's rows.

It wraps a strategy the way Flower's own DP wrappers do, and must be the outermost wrapper. What is
new stands in two slots, a penalty (FedGFT) and a weighting (FairFed); everything else is passed on.

| channel    | messages a round | the sums describe                        | needs              |
|------------|------------------|------------------------------------------|--------------------|
| "train"    | none more        | the model the round began with: one late | nothing            |
| "query"    | one more         | the model the round begins with          | a query handler    |
| "evaluate" | none more        | the same; nothing in round 1             | evaluate messages  |
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvgM, Result, Strategy

from fedgft.errors import FedgftError
from fedgft.federated.control import StepDamper
from fedgft.flower.checkpoint import Checkpoint
from fedgft.flower.checks import check_metrics, check_update, shorten_update, update_norm
from fedgft.flower.gather import Patient, Replies, log
from fedgft.flower.hearing import Hearing
from fedgft.flower.terms import innermost, innermost_strategy
from fedgft.flower.weights import Weights
from fedgft.flower.wire import RECORD, TRAINED, put_request
from fedgft.metrics.robust import NEAR, norm_limit, size_limit


class FairStrategy(Strategy):
    """See the top of this file; made by `FedGFT`, `FairFed` and `Measured`."""

    def __init__(
        self, strategy: Any, hearing: Hearing, *, weights: Weights | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(strategy, Strategy):
            raise FedgftError(
                f"{type(strategy).__module__}.{type(strategy).__name__} is no strategy of "
                "flwr.serverapp.strategy (those of flwr.server.strategy are the old ones)"
            )
        self.strategy, self.hearing, self.terms = strategy, hearing, hearing.terms
        self.weights = weights
        self.checkpoint = None if checkpoint is None else Checkpoint(Path(checkpoint).expanduser())
        self.sent, self.config, self.timeout = ArrayRecord(), ConfigRecord(), 3600.0
        self.done = self.idle = 0  # rounds; and those in a row without a new model
        self.asked = 0  # nodes, this round
        self.why = ""  # the last round gave no model
        self.measured: dict[str, Any] | None = None  # the row of the model that is handed over

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row for every model that was measured: round, accuracy, gaps, rows, clients."""
        return self.hearing.history

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
            log.warning("fedgft: going on after round %d of %d", self.done, num_rounds)
        self.hearing.rounds, self.timeout, offset = num_rounds, timeout, self.done
        self.config = ConfigRecord() if train_config is None else train_config
        left = max(num_rounds - offset, 0)
        self.hearing.check_budget(left)
        measured = evaluate_fn and (lambda r, a: evaluate_fn(r + offset, a))
        result = Strategy.start(
            self, grid, arrays, left, timeout, train_config, evaluate_config, measured
        )
        if not result.arrays and not offset:
            raise FedgftError(f"no round gave a new model: {self.why}")
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
        self.asked = len(nodes)
        if self.terms.channel == "query":
            self._ask(grid, arrays, nodes)
        self._tell(messages, asked=self.terms.channel == "train")
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found, believer = Replies.of(replies), self.hearing.believer
        records, trained = found.take(), found.take(TRAINED)
        self._refuse_impostors(found)
        found.keep(lambda r: check_update(r, self.sent, weighted_by=self._key), believer)
        believer.remember(found.good)
        if self.terms.channel == "train":
            told = {node: record for node, record in records.items() if node in found.good}
            self.hearing.learn(told, found, arrays=self.sent, of_round=self.done, asked=self.asked)
            self._refuse_impostors(found)
        self._limit_updates(found)
        if self.weights is not None:
            self._weigh(found, trained)
        self._limit_weights(found)
        arrays, metrics = self.strategy.aggregate_train(self.done + 1, found.ready())
        arrays = self._damped(arrays)
        self._count(arrays, found.why())
        if self.terms.channel != "evaluate":  # which has not spoken yet
            self._save(arrays or self.sent)
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
        self._tell(messages, asked=asked)
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        found = Replies.of(replies)
        asked = len(found.good) + len(found.errors)
        records = found.take()
        found.keep(lambda r: check_metrics(r, weighted_by=self._key), self.hearing.believer)
        if self.terms.channel == "evaluate":
            self.hearing.learn(records, found, arrays=self.sent, of_round=self.done, asked=asked)
            self._save(self.sent)
        return self.strategy.aggregate_evaluate(self.done, found.ready())

    def summary(self) -> None:
        constants, terms = self.hearing.constants, self.terms
        log.info("\t├──> fedgft: %s, %s", constants.metric.title, constants.pricing or self.weights)
        log.info("\t│\t└── channel %s, budget %s", terms.channel, terms.budget)
        self.strategy.summary()

    # What is ours

    def _ask(self, grid: Grid, arrays: ArrayRecord, nodes: list[int]) -> None:
        config = ConfigRecord({**self.config, "server-round": self.done + 1})
        self.hearing.ask(
            grid, arrays, nodes, of_round=self.done, config=config, timeout=self.timeout
        )

    def _tell(self, messages: list[Message], *, asked: bool) -> None:
        """Prices and wishes, into every message; strategies give many of them one content."""
        weights = self.weights
        request = self.hearing.request(asked=asked, both=weights is not None and weights.trained)
        if weights is not None and weights.reweigh:
            request["reweigh"] = True
        for content in {id(message.content): message.content for message in messages}.values():
            put_request(content, request)

    def _finish(self, grid: Grid, result: Result) -> None:
        if self.terms.final and self.terms.channel != "evaluate":
            try:
                self._ask(grid, result.arrays, sorted(grid.get_node_ids()))
            except FedgftError as error:
                log.warning("fedgft: the last model was not measured: %s", error)
        last = self.history[-1] if self.history else {}
        self.measured = last if last.get("round") == self.done else None
        best = self.hearing.best
        if best is not None:
            result.arrays, self.measured = best.arrays, best.row

    def _weigh(self, found: Replies, trained: dict[int, Any]) -> None:
        """The engine's strategies weigh by a metric of the reply, so that is where weights go."""
        assert self.weights is not None
        believer = self.hearing.believer
        own = believer.reports(trained, None) if self.weights.trained else None
        weights = self.weights.of(self.hearing.reports, own)
        for node, reply in list(found.good.items()):
            if weights.get(node, 0.0) <= 0:
                found.refuse(node, "FairFed gives it no weight", believer.site(node))
            else:
                next(iter(reply.content.metric_records.values()))[self._key] = weights[node]

    def _refuse_impostors(self, found: Replies) -> None:
        """Nodes that took another one's name do not train either."""
        for node, site in self.hearing.believer.refused.items():
            if node in found.good:
                why = f"it calls itself '{site}', the name of another node"
                found.refuse(node, why, f"node {node}")

    def _limit_updates(self, found: Replies) -> None:
        """No update is much longer than the others'."""
        ratio = self.terms.limits_for(len(found.good)).update_ratio
        if ratio == math.inf:
            return
        norms = {node: update_norm(reply, self.sent) for node, reply in found.good.items()}
        most = norm_limit(list(norms.values()), ratio)
        for node, norm in norms.items():
            if norm > most * (1 + NEAR):
                shorten_update(found.good[node], self.sent, most / norm)
                site = self.hearing.believer.site(node)
                self.hearing.warn_once(
                    f"{site}: its update is much longer than the others' and is shortened",
                    f"{norm:.3g}, of which {most:.3g} are taken",
                )

    def _limit_weights(self, found: Replies) -> None:
        """No weight above the rows that a client declared, nor above its share of all."""
        believer, key = self.hearing.believer, self._key
        records: dict[int, Any] = {
            node: next(iter(reply.content.metric_records.values()))
            for node, reply in found.good.items()
        }
        if key == "num-examples" and self.weights is None:
            for node, record in records.items():
                rows = believer.rows(node)
                if rows is not None and record[key] > rows * (1 + 1e-6) + 0.5:
                    self.hearing.warn_once(
                        f"{believer.site(node)} trains on more rows than it declared",
                        f"{record[key]:.6g}, of which {rows:.6g} count",
                    )
                    record[key] = max(1.0, rows)
        limits = self.terms.limits_for(len(records))
        most = size_limit([float(record[key]) for record in records.values()], limits)
        for node, record in records.items():
            agreed = believer.identity(node) in believer.agreed
            if record[key] > most * (1 + NEAR) and not agreed:
                self.hearing.warn_once(
                    f"{believer.site(node)} has too large a share of the average (max_share)",
                    f"its weight is {record[key]:.6g} and counts as {most:.6g}",
                )
                record[key] = most

    def _count(self, arrays: ArrayRecord | None, why: str) -> None:
        self.done += 1
        self.idle = 0 if arrays else self.idle + 1
        self.why = why
        if self.idle >= self.terms.patience:
            raise FedgftError(f"no new model in {self.idle} rounds in a row: {why}")

    def _damped(self, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """The new model, nearer to the last one towards the end of a run that has a target."""
        pricing = self.hearing.constants.pricing
        if arrays is None or not self.hearing.rounds or not getattr(pricing, "damp", False):
            return arrays
        damper = self.hearing.constants.damper or StepDamper(self.hearing.rounds)
        steps = {k: arrays[k].numpy() - self.sent[k].numpy() for k in arrays if _floats(arrays[k])}
        length = sum(float(np.square(step, dtype=np.float64).sum()) for step in steps.values())
        share = damper.share(length**0.5)
        self.hearing.constants.damper = damper
        if share < 1:
            near = {
                k: self.sent[k].numpy() + step * step.dtype.type(share) for k, step in steps.items()
            }
            arrays = ArrayRecord({k: Array(near[k]) if k in near else arrays[k] for k in arrays})
            core = innermost_strategy(self.strategy)
            if isinstance(core, FedAvgM):  # it remembers the model that it has returned
                core.current_arrays = arrays
        return arrays

    def _save(self, arrays: ArrayRecord) -> None:
        if self.checkpoint is not None:
            self.checkpoint.save(self, arrays)

    def _with_gaps(self, metrics: MetricRecord | None) -> MetricRecord | None:
        if metrics is not None and self.history:
            row = self.history[-1]
            for key in ("accuracy", "gap_soft", "gap_hard"):
                if row[key] is not None:
                    metrics[f"{RECORD}.{key.replace('_', '-')}"] = row[key]
        return metrics

    def _patient(self, grid: Grid) -> Any:
        return Patient(grid, self.terms.node_timeout)

    @property
    def _key(self) -> str:
        return innermost(self.strategy, "weighted_by_key", "num-examples")


def _floats(array: Array) -> bool:
    return np.issubdtype(np.dtype(array.dtype), np.floating)
