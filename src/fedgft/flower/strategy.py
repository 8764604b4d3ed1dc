"""Strategies that add fairness over all clients' rows to a Flower strategy, or measure it.

`FedGFT`, `FairFed` and `MeasuredStrategy` wrap a strategy the way Flower's own DP wrappers do, and
must be the outermost wrapper:

    strategy = FedGFT(FedAdam(fraction_evaluate=0.0), "sp", target=0.02)
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result, Strategy

from fedgft.algorithms import LocalResults
from fedgft.algorithms.controller import (
    BOOSTING_TRUST,
    Controller,
    ControllerState,
    Loop,
    StepDamper,
)
from fedgft.algorithms.objectives import LinearizedPenalty
from fedgft.algorithms.weightings import FairFed as FairFedWeighting
from fedgft.algorithms.weightings import FairFedRule
from fedgft.errors import FedgftError
from fedgft.flower.aggregator import StatisticsAggregator, StatisticsOptions, make_cohort
from fedgft.flower.messages import (
    RECORD,
    TRAINED,
    GridWithTimeout,
    Replies,
    Request,
    check_metrics,
    check_update,
    log,
    put_request,
    scale_update,
    update_norm,
    warn,
)
from fedgft.flower.run_state import Checkpoint, RunState, wrapped_strategies
from fedgft.flower.tree_rounds import BAGGING_CAUTION, BOOSTING, TreeRounds
from fedgft.metrics import Metric, check_over_all_rows, get_metric
from fedgft.metrics.robust_aggregation import TOLERANCE, norm_limit, size_limit
from fedgft.sums import CategoryNames, Sums, stack
from fedgft.validation import check_instance, check_number

WITH_MOMENTUM = (flower.FedAvgM, flower.FedAdam, flower.FedYogi, flower.FedAdagrad)
MEDIANS = (flower.Bulyan, flower.FedMedian, flower.FedTrimmedAvg)
WITHOUT_WEIGHTS = (*MEDIANS, flower.Krum, flower.MultiKrum, flower.QFedAvg)


@dataclass(eq=False, repr=False)
class FairStrategy(StatisticsOptions, Strategy):
    """Wraps a Flower strategy and measures the gap over all clients' rows.

    Subclasses set prices or weights from the gap. The wrapped strategy does everything else.

    | channel    | extra messages     | sums describe                                | needs     |
    |------------|--------------------|----------------------------------------------|-----------|
    | "train"    | none               | the model the round began with, a round late | nothing   |
    | "query"    | one per round      | the model the round begins with              | a handler |
    | "evaluate" | none               | the same model, but nothing in round 1       | evaluate  |

    Parameters
    ----------
    strategy
        Any strategy of `flwr.serverapp.strategy`.
    metric
        The fairness metric, by name or as a `Metric`.
    checkpoint
        A file to which the state is saved after every round; a restarted server continues from it.
    options
        All other keywords: see `StatisticsOptions`.

    Attributes
    ----------
    state
        Everything that a checkpoint saves, including `state.history`.
    aggregator
        Collects the clients' statistics.
    trees
        With `FedXgbBagging` and `FedXgbCyclic`: what handles the trees of each round; else None.
    measured
        After `start`: the row of the history that describes the returned model, or None.
    """

    strategy: Any
    metric: str | Metric = "sp"
    _: KW_ONLY
    checkpoint: str | Path | None = None

    needs_trained_sums = False  # whether clients also send the sums of the model they trained
    sets_weights = False  # whether `_set_weights` replaces the clients' weights
    grows = False  # whether the arrays of the model change their shape

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "use one of flwr.serverapp.strategy; those of flwr.server.strategy are the old ones"
        check_instance("strategy", self.strategy, Strategy, hint)
        self.metric = check_over_all_rows(get_metric(self.metric))
        self.state = RunState()
        self.trees = self._find_trees()
        if self.classes is not None and self.groups is not None:
            self.state.names = CategoryNames.of(self.classes, self.groups)
        pricing = self._make_pricing()
        self.aggregator = StatisticsAggregator(self, self.metric, pricing, self.state)
        self.measured: dict[str, Any] | None = None
        self._sent = ArrayRecord()  # the model that this round sent to clients
        self._config = ConfigRecord()
        self._timeout = 3600.0
        self._queried = 0  # number of nodes that this round asked
        self._failure = ""  # why the last round gave no model
        self._asks_in_training = (
            self.channel == "train"
        )  # whether this round's training messages ask for sums

    def _find_trees(self) -> TreeRounds | None:
        """Return what handles the trees of a strategy that boosts; None for all others."""
        inner = innermost_strategy(self.strategy)
        if not isinstance(inner, BOOSTING):
            return None
        if inner is not self.strategy:
            text = f"{type(inner).__name__} must be wrapped directly: others would average bytes"
            raise FedgftError(text, kind="unsupported")
        if isinstance(inner, flower.FedXgbCyclic) and self.channel != "query":
            text = "one client trains per round, and `channel` 'query' asks all of them for sums"
            raise FedgftError(f"FedXgbCyclic: {text}", field="channel", kind="conflict")
        return TreeRounds(inner)

    def _make_pricing(self) -> Any:
        """Return the penalty, or None; store its first state in `self.state.penalty`."""
        return None

    def _request_extras(self) -> Request:
        """Return what requests to clients hold besides prices."""
        return {}

    def _set_weights(self, replies: Replies, trained: dict[int, Any]) -> None:
        """Change the clients' weights in the average, or refuse clients."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row for every model that was measured: round, accuracy, gaps, rows, clients."""
        return self.state.history

    # Flower's interface, in the order in which Flower calls it

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run all rounds as `Strategy.start` does; continue from the checkpoint if there is one.

        The last model is measured; with a target, the best model of the last rounds is returned.
        """
        arrays = initial_arrays
        if self.checkpoint is not None and Path(self.checkpoint).expanduser().exists():
            arrays = self.load_checkpoint(initial_arrays)
            warn(f"continuing after round {self.state.rounds_done} of {num_rounds}")
        done = self.state.rounds_done
        rounds_left = max(num_rounds - done, 0)
        self.aggregator.rounds = num_rounds
        if self.trees is not None:
            self.trees.begin(arrays, train_config or {})
            self.aggregator.speed = self.trees.speed
            self._describe_boosting(self.trees)
        asks_before = self.trees is not None and self.channel == "evaluate" and not done
        self.aggregator.check_budget(rounds_left + asks_before)
        self._timeout = timeout
        self._config = ConfigRecord() if train_config is None else train_config
        evaluate = evaluate_fn and (lambda number, model: evaluate_fn(number + done, model))
        configs = {"train_config": train_config, "evaluate_config": evaluate_config}
        result = super().start(grid, arrays, rounds_left, timeout, evaluate_fn=evaluate, **configs)
        if not result.arrays and not done:
            raise FedgftError(f"no round gave a new model: {self._failure}")
        result.arrays = result.arrays or arrays
        self._finish(grid, result)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the strategy's training messages with prices; channel "query" gets sums first."""
        self._config = config
        number = self.state.rounds_done + 1
        messages = self._configure("train", number, arrays, config, grid)
        is_first = self.trees is not None and self.state.rounds_done == 0
        if self.channel == "query" or is_first:
            nodes = [message.metadata.dst_node_id for message in messages]
            nodes = nodes if self.trees is None else sorted(grid.get_node_ids())
            self._query(grid, arrays, nodes)
        if self.trees is not None:
            if is_first:
                arrays = self.trees.with_base(arrays, self.aggregator.total)
                messages = self._configure("train", number, arrays, config, grid)
            self.trees.start_round(arrays)
        self._queried = len(messages)
        self._asks_in_training = self.channel == "train" and not is_first
        self._add_request(messages, with_statistics=self._asks_in_training)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check and limit the replies, use their sums, and let the strategy make the new model."""
        found = Replies.of(replies)
        validator = self.aggregator.validator
        records = found.take()
        trained = found.take(TRAINED)
        self._refuse_impostors(found)
        found.filter(self._check_update, validator.describe)
        validator.record_training_rows(found.good)
        if self._asks_in_training:
            usable = {node: record for node, record in records.items() if node in found.good}
            self.aggregator.aggregate(usable, found, arrays=self._sent, queried=self._queried)
            self._refuse_impostors(found)
        self._limit_updates(found)
        self._set_weights(found, trained)
        self._limit_weights(found)
        number = self.state.rounds_done + 1
        if self.trees is not None:
            key = self._weight_key
            weights = {n: float(_metrics_of(reply)[key]) for n, reply in found.good.items()}
            self.trees.put_trees(found, weights)
        arrays, metrics = self.strategy.aggregate_train(number, found.for_strategy())
        arrays = self._damp(arrays) if self.trees is None else self.trees.repack(arrays)
        self._count_round(arrays, found.explain())
        if self.channel != "evaluate":  # there, the statistics come after this
            self._save_checkpoint(arrays or self._sent)
        return arrays, self._add_gaps(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the strategy's evaluation messages; in channel "evaluate", they ask for sums."""
        messages = self._configure("evaluate", self.state.rounds_done, arrays, config, grid)
        self._add_request(messages, with_statistics=self.channel == "evaluate")
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Check the replies, use their sums, and let the strategy average the metrics."""
        found = Replies.of(replies)
        queried = len(found.good) + len(found.errors)
        records = found.take()
        found.filter(
            lambda reply: check_metrics(reply, weighted_by=self._weight_key),
            self.aggregator.validator.describe,
        )
        if self.channel == "evaluate":
            self.aggregator.aggregate(records, found, arrays=self._sent, queried=queried)
            self._save_checkpoint(self._sent)
        return self.strategy.aggregate_evaluate(self.state.rounds_done, found.for_strategy())

    def summary(self) -> None:
        """Log the method, the channel, the budget and the wrapped strategy."""
        method = self._method() or "measured"
        log.info("\t├──> fedgft: %s, %s", self.aggregator.metric.title, method)
        log.info("\t│\t└── channel %s, budget %s", self.channel, self.budget)
        self.strategy.summary()

    # Messages

    def _configure(
        self, phase: str, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the strategy's messages for a phase, "train" or "evaluate".

        Raises an error if statistics should travel in these messages and there are none.
        """
        self._sent = arrays
        grid_with_timeout: Any = GridWithTimeout(grid, self.node_timeout)
        configure = getattr(self.strategy, f"configure_{phase}")
        messages = list(configure(number, arrays, config, grid_with_timeout))
        if not messages and (self.channel == "evaluate") == (phase == "evaluate"):
            reason = f"the strategy sends no messages of this kind (fraction_{phase})"
            raise FedgftError(f"`channel` '{self.channel}' carries no statistics: {reason}")
        return messages

    def _query(self, grid: Grid, arrays: ArrayRecord, nodes: list[int]) -> None:
        config = ConfigRecord({**self._config, "server-round": self.state.rounds_done + 1})
        self.aggregator.query_clients(grid, arrays, nodes, config=config, timeout=self._timeout)

    def _add_request(self, messages: list[Message], *, with_statistics: bool) -> None:
        """Add our request to all messages, once per content, since messages may share one."""
        statistics = "none"
        if with_statistics:
            statistics = "both" if self.needs_trained_sums else "received"
        request = self.aggregator.make_request(statistics) | self._request_extras()
        for content in {id(message.content): message.content for message in messages}.values():
            put_request(content, request)

    def _finish(self, grid: Grid, result: Result) -> None:
        """Measure the last model; if there is a best one, put that into `result` instead."""
        if self.queries_at_end:
            try:
                self._query(grid, result.arrays, sorted(grid.get_node_ids()))
            except FedgftError as error:
                warn(f"the last model was not measured: {error}")
        last = self.history[-1] if self.history else {}
        self.measured = last if last.get("round") == self.state.rounds_done else None
        best = self.state.best
        if best is not None:
            result.arrays = best.arrays
            self.measured = best.row

    # Limits on what one client can do

    def _check_update(self, reply: Message) -> None:
        """Raise a `FedgftError` unless a reply holds a model that can be used, and its weight."""
        if self.trees is not None:
            self.trees.check_reply(reply, weighted_by=self._weight_key)
        else:
            check_update(reply, self._sent, weighted_by=self._weight_key)

    def _describe_boosting(self, trees: TreeRounds) -> None:
        """Adjust the penalty to a booster, once its learning rate is known."""

    def _refuse_impostors(self, replies: Replies) -> None:
        """Refuse the updates of nodes that use another node's name."""
        for node, site in self.aggregator.validator.impostors.items():
            if node in replies.good:
                reason = f"it calls itself '{site}', the name of another node"
                replies.refuse(node, reason, f"node {node}")

    def _limit_updates(self, replies: Replies) -> None:
        """Shorten updates that are much longer than the others'."""
        ratio = self.limits_for(len(replies.good)).update_ratio
        if ratio == math.inf:
            return
        if self.trees is not None:
            self.trees.limit_leaves(replies, ratio, self.aggregator.warn_once)
            return
        norms = {node: update_norm(reply, self._sent) for node, reply in replies.good.items()}
        limit = norm_limit(list(norms.values()), ratio)
        for node, norm in norms.items():
            if norm > limit * (1 + TOLERANCE):
                scale_update(replies.good[node], self._sent, limit / norm)
                problem = "sends a much longer update than the others, which is shortened"
                details = f"{norm:.3g}, of which {limit:.3g} are taken"
                self.aggregator.warn_once(node, problem, details)

    def _limit_weights(self, replies: Replies) -> None:
        """Limit each client's weight to the rows that it declared and to the largest share."""
        validator = self.aggregator.validator
        warn_once = self.aggregator.warn_once
        key = self._weight_key
        records = {node: _metrics_of(reply) for node, reply in replies.good.items()}
        if key == "num-examples" and not self.sets_weights:
            for node, record in records.items():
                rows = validator.declared_rows(node)
                if rows is not None and record[key] > rows * (1 + 1e-6) + 0.5:
                    details = f"{record[key]:.6g}, of which {rows:.6g} count"
                    warn_once(node, "trains on more rows than it declared", details)
                    record[key] = max(1.0, rows)
        weights = [float(record[key]) for record in records.values()]
        limit = size_limit(weights, self.limits_for(len(records)))
        for node, record in records.items():
            if record[key] > limit * (1 + TOLERANCE) and not validator.is_agreed(node):
                details = f"its weight is {record[key]:.6g} and counts as {limit:.6g}"
                warn_once(node, "has too large a share of the average (max_share)", details)
                record[key] = limit

    # After the aggregation

    def _damp(self, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """Shorten the server's step towards the end of a run that has a target."""
        rounds = self.aggregator.rounds
        if arrays is None or not rounds or not getattr(self.aggregator.pricing, "damp", False):
            return arrays
        sent = {name: array.numpy() for name, array in self._sent.items()}
        new = {name: array.numpy() for name, array in arrays.items()}
        steps = {n: new[n] - sent[n] for n in new if np.issubdtype(new[n].dtype, np.floating)}
        length = sum(float(np.square(step, dtype=np.float64).sum()) for step in steps.values())
        self.state.damper = self.state.damper or StepDamper(rounds)
        share = self.state.damper.share(length**0.5)
        if share < 1:
            for name, step in steps.items():
                new[name] = sent[name] + step * step.dtype.type(share)
            arrays = ArrayRecord({name: Array(values) for name, values in new.items()})
            inner = innermost_strategy(self.strategy)
            if isinstance(inner, flower.FedAvgM):  # FedAvgM stores the model that it returned
                inner.current_arrays = arrays
        return arrays

    def _count_round(self, arrays: ArrayRecord | None, failure: str) -> None:
        state = self.state
        state.rounds_done += 1
        state.idle_rounds = 0 if arrays else state.idle_rounds + 1
        self._failure = failure
        if state.idle_rounds >= self.patience:
            raise FedgftError(f"no new model in {state.idle_rounds} rounds in a row: {failure}")

    def _add_gaps(self, metrics: MetricRecord | None) -> MetricRecord | None:
        """Return the strategy's metrics, with the last measured accuracy and gaps added."""
        if metrics is not None and self.history:
            row = self.history[-1]
            for key in ("accuracy", "gap_soft", "gap_hard"):
                if row[key] is not None:
                    metrics[f"{RECORD}.{key.replace('_', '-')}"] = row[key]
        return metrics

    @property
    def _weight_key(self) -> str:
        """The name of the metric in a reply by which the strategy weighs clients."""
        return _inner_attribute(self.strategy, "weighted_by_key", "num-examples")

    # Checkpoints

    def load_checkpoint(self, like: ArrayRecord) -> ArrayRecord:
        """Restore the state from the checkpoint; return the model to continue with."""
        checkpoint = self._open_checkpoint()
        same = self.trees is None and not self.grows
        arrays = checkpoint.load(self.state, like, self.strategy, same_shapes=same)
        if self.aggregator.noise is not None:  # sites release new noisy counts after a restart
            self.state.declared = {}
        return arrays

    def _save_checkpoint(self, arrays: ArrayRecord) -> None:
        if self.checkpoint is not None:
            self._open_checkpoint().save(self.state, arrays, self.strategy)

    def _open_checkpoint(self) -> Checkpoint:
        path = Path(self.checkpoint or "").expanduser()
        return Checkpoint(path, json.dumps(self._describe_run(), sort_keys=True))

    def _method(self) -> Any:
        """Return the object that holds the method's parameters."""
        return self.aggregator.pricing

    def _describe_run(self) -> dict[str, Any]:
        """Return what identifies a run; a checkpoint is used only if all of this agrees."""
        method = self._method()
        about = {
            "metric": self.aggregator.metric.name,
            "channel": self.channel,
            "strategy": [type(one).__name__ for one in wrapped_strategies(self.strategy)],
            "method": type(method).__name__,
            "budget": repr(self.budget),
        }
        values = vars(method) if is_dataclass(method) else {}
        return about | {name: str(value) for name, value in values.items() if name != "metric"}


@dataclass(eq=False, repr=False)
class FedGFT(FairStrategy):
    """Makes any Flower strategy fair over all clients' rows.

    Parameters
    ----------
    lam
        `fedgft`: the strength of the paper's penalty on the gap of scores. Give `lam` or `target`.
    target
        `fedgft-control`: the gap of decisions that the controller aims for.
    penalty, spread
        With `lam`: the form of the penalty and what it is applied to, as in `LinearizedPenalty`.
    pick, damp
        With `target`: as in `Controller`. The run returns the best model of its last rounds, a
        share `pick` of all rounds; `damp` shortens steps towards the end.
    strategy, metric, checkpoint, ...
        As in `FairStrategy` and `StatisticsOptions`.
    """

    _: KW_ONLY
    lam: float | None = None
    target: float | None = None
    penalty: str = "half"
    spread: str = "range"
    pick: float = 0.6
    damp: bool = True

    def __post_init__(self) -> None:
        if (self.lam is None) == (self.target is None):
            raise FedgftError("FedGFT needs either `lam` or `target`", kind="conflict")
        super().__post_init__()

    def _make_pricing(self) -> Any:
        metric = get_metric(self.metric)
        if self.target is None:
            lam = check_number("lam", self.lam)
            return LinearizedPenalty(metric, lam, self.penalty, self.spread)  # pyrefly: ignore
        target = check_number("target", self.target)
        pricing = Controller(metric, target, pick=self.pick, damp=self.damp)
        self.state.penalty = pricing.init(1, self._describe_loop())
        return pricing

    def _describe_loop(self) -> Loop:
        """Return when the controller sees the effect of a price, and how cautious it must be."""
        sampled = _inner_attribute(self.strategy, "fraction_train", 1.0) < 1
        noisy = sampled or self.budget.epsilon is not None
        slow = isinstance(innermost_strategy(self.strategy), WITH_MOMENTUM)
        caution = (0.5 if noisy else 1.0) * (0.5 if slow else 1.0)
        return Loop(delay=2 if self.channel == "train" else 1, caution=caution)

    def _describe_boosting(self, trees: TreeRounds) -> None:
        penalty = self.state.penalty
        if isinstance(penalty, ControllerState) and penalty.gaps is None:
            loop = self._describe_loop()
            caution = loop.caution * BAGGING_CAUTION
            terms = (loop.delay, caution, trees.repeat, BOOSTING_TRUST)
            self.state.penalty = penalty._replace(loop=terms)


@dataclass(eq=False, repr=False)
class MeasuredStrategy(FairStrategy):
    """Leaves a Flower strategy unchanged and measures its gap in every round."""


@dataclass(eq=False, repr=False)
class FairFed(FairStrategy):
    """Weighs clients by the distance of local from global fairness (Ezzeldin et al., 2023).

    It can wrap strategies that weigh clients by a metric in their replies: FedAvg and those
    built on it. In channel "train" the weights are exact, since statistics arrive with the update.

    Parameters
    ----------
    beta
        How strongly the weights react to this distance.
    rule
        The form of the update, as in `fedgft.algorithms.weightings.FairFed`.
    reweigh
        Whether clients also weigh their rows by label and group (FairFed's local debiasing).
    strategy, metric, checkpoint, ...
        As in `FairStrategy` and `StatisticsOptions`.
    """

    _: KW_ONLY
    beta: float = 1.0
    rule: FairFedRule = "subtract"
    reweigh: bool = True

    sets_weights = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta)
        inner = innermost_strategy(self.strategy)
        problem = ""
        if self.channel == "evaluate":
            problem = "weighs this round's updates: `channel` 'train' or 'query'"
        elif self.secure or self.budget.epsilon is not None:
            problem = "needs every client's own sums: no secure sums, no noise"
        elif isinstance(inner, WITHOUT_WEIGHTS):
            problem = f"gives clients weights, and {type(inner).__name__} uses none"
        if problem:
            raise FedgftError(f"FairFed {problem}", kind="unsupported")
        self._weighting = FairFedWeighting(self.aggregator.metric, self.beta, self.rule)
        self.needs_trained_sums = self._weighting.sees == "trained"

    def _method(self) -> Any:
        return self._weighting

    def _describe_run(self) -> dict[str, Any]:
        return super()._describe_run() | {"reweigh": str(self.reweigh)}

    def _request_extras(self) -> Request:
        return {"reweigh": True} if self.reweigh else {}

    def _set_weights(self, replies: Replies, trained: dict[int, Any]) -> None:
        """Write each weight into the metric by which the strategy weighs clients."""
        validator = self.aggregator.validator
        after = validator.validate(trained, None) if self.needs_trained_sums else None
        weights = self._compute_weights(self.aggregator.client_sums, after)
        for node, reply in list(replies.good.items()):
            if weights.get(node, 0.0) <= 0:
                replies.refuse(node, "FairFed gives it no weight", validator.describe(node))
            else:
                _metrics_of(reply)[self._weight_key] = weights[node]

    def _compute_weights(
        self, received: Mapping[int, Sums], trained: Mapping[int, Sums] | None
    ) -> dict[int, float]:
        """Return {node: weight}, computed as in the simulator.

        `received` and `trained` are the sums of the model of this round and of the locally trained
        models; nodes without them get no weight.
        """
        nodes = [node for node in received if trained is None or node in trained]
        if not nodes:
            return {}
        sites = [self.aggregator.validator.identity(node) for node in nodes]
        before = stack([received[node] for node in nodes])
        after = None if trained is None else stack([trained[node] for node in nodes])
        rows = before.rows()
        first = self._weighting.init(rows[None])[0]
        known = self.state.client_weights
        average = np.array([[known.get(s, w) for s, w in zip(sites, first, strict=True)]])
        local = LocalResults(before, after, np.zeros(len(nodes)))
        cohort = make_cohort(rows / rows.sum())
        weights, average = self._weighting.coefficients(average, cohort, local)
        known |= {site: float(w) for site, w in zip(sites, average[0], strict=True)}
        return {node: float(w) for node, w in zip(nodes, weights, strict=True)}


def innermost_strategy(strategy: Any) -> Any:
    """Return the strategy inside all wrappers."""
    return list(wrapped_strategies(strategy))[-1]


def _inner_attribute(strategy: Any, name: str, default: Any) -> Any:
    """Return an attribute of a strategy or of one that it wraps, or else the default."""
    values = [getattr(s, name) for s in wrapped_strategies(strategy) if hasattr(s, name)]
    return values[0] if values else default


def _metrics_of(reply: Message) -> Any:
    return next(iter(reply.content.metric_records.values()))
