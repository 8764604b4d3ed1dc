"""The server's statistics: request sums from clients, add them up, update the penalty.

The penalty is a `Pricing` object, as in the simulator. It receives the total over all clients as if
it were the sums of one client, and returns the price of each score. Every measured model adds a row
to the history.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedgft.algorithms import Cohort
from fedgft.algorithms.controller import Controller, with_speed
from fedgft.algorithms.objectives import Pricing
from fedgft.engine.select_best import GAP_TOLERANCE, GAP_WEIGHT
from fedgft.errors import FedgftError
from fedgft.flower.messages import Replies, Request, log, make_query, make_request, warn
from fedgft.flower.run_state import BestModel, RunState, SumsValidator
from fedgft.flower.secure_sums import SecureCohort, SecureSum
from fedgft.formatting import format_count
from fedgft.metrics import Kind, Metric
from fedgft.metrics.functions import describe_decisions
from fedgft.metrics.robust_aggregation import NO_LIMITS, LimitedSums, SiteLimits, limit_sites
from fedgft.privacy.noise import Budget, Noise
from fedgft.settings import TARGET_TOLERANCE
from fedgft.sums import Sums
from fedgft.validation import check_choice, check_integer

Row = dict[str, Any]
"A row of the history: what was measured of one model."
CHANNELS = ("train", "query", "evaluate")
UNLIMITED_SHARE = 0.9  # the default of `max_share` where `limits` is None


def make_cohort(weights: np.ndarray) -> Cohort:
    """Return a cohort of one simulated run that holds all clients, with these weights."""
    count = len(weights)
    bounds = np.array([0, count])
    return Cohort(np.zeros(count, int), np.arange(count), weights, bounds, full=True)


ALL_CLIENTS = make_cohort(np.ones(1))


@dataclass(kw_only=True, eq=False, repr=False)
class StatisticsOptions:
    """How the server collects statistics: options of every `FairStrategy`.

    Parameters
    ----------
    channel
        The messages that carry statistics: "train", "query" or "evaluate" (see `FairStrategy`).
    max_share
        The largest share of all rows, and of the weight in the average, that one client may have.
        None: it follows from `limits`.
    limits
        How far one client's sums, weight and update may be from the others'. None: the only
        limit is `max_share`, which is then 0.9 unless it is given.
    counts
        Site -> its training rows by label and group, as agreed on before the run. A site that
        declares other counts is left out.
    classes, groups
        Names (or how many) that all sites must use. None: those of most sites in round 1.
    patience
        The number of consecutive rounds without a new model after which an error ends the run.
    node_timeout
        Seconds to wait for nodes.
    budget
        The privacy budget of the statistics, and the smallest cell that sites report.
    secure
        Whether the server learns only totals over all sites (experimental; channel "query").
    final
        Whether to query clients once more at the end, so that the last model is measured too.
    on_round
        Called with every new row of the history.
    """

    channel: str = "train"
    max_share: float | None = None
    limits: SiteLimits | None = field(default_factory=SiteLimits)
    counts: Mapping[str, Any] | None = None
    classes: int | Sequence[str] | None = None
    groups: int | Sequence[str] | None = None
    patience: int = 3
    node_timeout: float = 600.0
    budget: Budget = field(default_factory=Budget)
    secure: bool = False
    final: bool = True
    on_round: Callable[[dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        check_choice("channel", self.channel, CHANNELS)
        check_integer("patience", self.patience, least=1)
        if not self.node_timeout > 0:
            raise FedgftError(f"`node_timeout` must be above 0, got {self.node_timeout:g}")
        if self.max_share is not None and not 0 < self.max_share <= 1:
            raise FedgftError(f"`max_share` must lie between 0 and 1, got {self.max_share:g}")
        if (self.classes is None) != (self.groups is None):
            raise FedgftError("name both `classes` and `groups`, or neither", kind="conflict")
        problem = ""
        if self.secure and self.channel != "query":
            problem = "`secure` sums need messages of their own: channel='query'"
        elif self.secure and self.budget.epsilon is not None and self.budget.min_count:
            problem = "`secure` sums with noise need no min_count: noise hides small cells"
        if problem:
            raise FedgftError(problem, kind="conflict")

    @property
    def queries_at_end(self) -> bool:
        """Whether an extra query at the end measures the last model."""
        return self.final and self.channel != "evaluate"

    def limits_for(self, clients: int) -> SiteLimits:
        """Return the limits for this number of clients."""
        share = self.max_share
        if self.limits is None:
            share = share or UNLIMITED_SHARE
        limits = self.limits or NO_LIMITS
        return limits if share is None else replace(limits, shares=share * clients, size_ratio=0.0)


class StatisticsAggregator:
    """Requests, validates and adds up client statistics; updates the penalty and the history.

    Attributes
    ----------
    state
        All that a checkpoint saves.
    validator
        Rejects sums that cannot be true.
    rounds
        The number of rounds of the whole run.
    client_sums
        Node -> its sums of the last round, after the limits were applied.
    cohort
        The clients that take part in every secure sum.
    speed
        How far a round moves the model, for a controller, while steps are not shortened.
    total
        The last total over all clients, after the limits; None before the first.
    """

    def __init__(
        self, options: StatisticsOptions, metric: Metric, pricing: Pricing | None, state: RunState
    ) -> None:
        self.options = options
        self.metric = metric
        self.pricing = pricing
        self.state = state
        self.validator = SumsValidator(state, options.counts)
        self.rounds = 0
        self.client_sums: dict[int, Sums] = {}
        self.cohort = SecureCohort()
        self.speed = 1.0
        self.total: Sums | None = None
        self._rounds_without_statistics = 0  # consecutive ones
        self._warnings: set[str] = set()  # warnings that were logged already

    @property
    def kind(self) -> Kind:
        """The kind of sums that set the penalty; clients that add noise send only this kind."""
        return getattr(self.pricing, "kind", "soft")

    @property
    def noise(self) -> Noise | None:
        """The noise that each client adds; with secure sums, its share of the total's noise."""
        noise = self.options.budget.noise(self.kind)
        if noise is None or not self.options.secure:
            return noise
        return noise.share(max(len(self.cohort.rows), 1))

    @property
    def price(self) -> np.ndarray | None:
        """The price of each score (c, groups + 1, c), or None before the first sums."""
        state = self.state
        if self.pricing is None or state.penalty is None or not state.history:
            return None
        assert state.names is not None
        classes = len(state.names.classes)
        price = self.pricing.price(state.penalty, run=np.zeros(1, int), classes=classes)
        return None if isinstance(price, float) else price[0]

    def check_budget(self, rounds: int) -> None:
        """Raise an error if the privacy budget would end before `rounds` rounds do."""
        budget = self.options.budget
        needed = rounds + self.options.queries_at_end
        if budget.epsilon is not None and budget.releases < needed:
            remedy = f"{rounds} rounds need {needed}: Budget(epsilon, releases={needed})"
            raise FedgftError(
                f"the `budget` is for {format_count(budget.releases, 'release')}, and {remedy}"
            )

    def make_request(self, statistics: str) -> Request:
        """Return the request to clients: prices, privacy, and the models whose sums they send.

        `statistics` is "none", "received" (the model in the message) or "both" (that one and the
        locally trained one).
        """
        if statistics != "none":
            self.state.releases += 1
        privacy = self.options.budget.to_request(self.kind)
        if self.options.secure:
            privacy["secure"] = 1.0
        request = make_request(self.price, self.state.names, statistics=statistics, privacy=privacy)
        return request | {"rounds-done": self.state.rounds_done}

    def query_clients(
        self,
        grid: Grid,
        arrays: ArrayRecord,
        nodes: list[int],
        *,
        config: ConfigRecord,
        timeout: float,
    ) -> None:
        """Ask clients for the sums of a model in messages of their own, and use the sums.

        Secure sums always cover the whole cohort, whichever clients train in this round. Otherwise
        the difference between two rounds' totals could be the sums of one site.
        """
        request = self.make_request("received")
        if self.options.secure:
            self._query_secure_sum(SecureSum(grid, arrays, request, config, timeout))
            return
        messages = [make_query(arrays, config, request, node) for node in nodes]
        replies = Replies.of(grid.send_and_receive(messages, timeout=timeout))
        self.aggregate(replies.take(), replies, arrays=arrays, queried=len(nodes))

    def _query_secure_sum(self, query: SecureSum) -> None:
        budget = self.options.budget
        query.noise = budget.noise(self.kind)
        query.max_share = self.options.max_share
        query.withheld = budget.min_count > 0
        state = self.state
        try:
            total, cohort = query.ask(sorted(query.grid.get_node_ids()), self.cohort)
            assert cohort.names is not None
            state.names = state.names or cohort.names
            state.names.check(cohort.names, site="all sites")
        except FedgftError as error:
            self._skip_update(str(error))
            return
        self.cohort = cohort
        self._use_total(total, len(cohort.rows), query.arrays, complete=True, influence={})

    def aggregate(
        self, records: dict[int, Any], replies: Replies, *, arrays: ArrayRecord, queried: int
    ) -> None:
        """Validate and add up the clients' sums of a model, and update the penalty.

        Parameters
        ----------
        records
            Node -> the record of statistics in its reply.
        replies
            The replies that the records were taken from.
        arrays
            The model, the result of `state.rounds_done` rounds.
        queried
            The number of clients that were asked.
        """
        self.client_sums = self.validator.validate(records, self.noise)
        if not self.client_sums:
            if replies.good and not records:  # clients reply, but not with our handlers
                raise self._no_statistics_error("its handlers must be those of fedgft.flower")
            self._skip_update("; ".join([*self.validator.rejected, replies.explain()]))
            return
        limited = self._apply_limits()
        total = sum(limited.sums[1:], start=limited.sums[0])
        count = len(limited.sums)
        influence = self._describe_influence(limited)
        self._use_total(total, count, arrays, complete=count == queried, influence=influence)

    def _apply_limits(self) -> LimitedSums:
        """Limit how far each client's sums can move the gap; update `client_sums`."""
        noise = self.noise
        limited = limit_sites(
            list(self.client_sums.values()),
            self.metric,
            ("hard", "soft") if noise is None else (noise.kind,),
            self.options.limits_for(len(self.client_sums)),
            noise=0.0 if noise is None else noise.value + noise.count,
            agreed=[self.validator.is_agreed(node) for node in self.client_sums],
        )
        for node, sums, reasons in zip(
            list(self.client_sums), limited.sums, limited.why, strict=True
        ):
            self.client_sums[node] = sums
            if reasons:
                self.warn_once(node, "is held to the limits", "; ".join(reasons))
        return limited

    def _describe_influence(self, limited: LimitedSums) -> dict[str, Any]:
        """Return, by site, how far it could have moved the gap, and how far its sums were moved."""
        sites = [self.validator.identity(node) for node in self.client_sums]
        rows = list(zip(sites, limited.leverage, limited.moved, limited.why, strict=True))
        return {
            "leverage": {site: round(float(leverage), 6) for site, leverage, _, _ in rows},
            "clipped": {site: round(float(moved), 6) for site, _, moved, why in rows if why},
        }

    def warn_once(self, node: int, problem: str, details: str) -> None:
        """Log a warning about a site only the first time; the history covers every round."""
        text = f"{self.validator.describe(node)} {problem}"
        if text not in self._warnings:
            self._warnings.add(text)
            warn(f"{text}: {details}")

    def _no_statistics_error(self, reason: str) -> FedgftError:
        channel = self.options.channel
        return FedgftError(f"no client sent statistics through channel '{channel}': {reason}")

    def _skip_update(self, reason: str) -> None:
        """Keep the prices; raise an error if there never were statistics for `patience` rounds."""
        self._rounds_without_statistics += 1
        patience = self.options.patience
        if not self.state.history and self._rounds_without_statistics >= patience:
            raise self._no_statistics_error(reason)
        warn(f"no statistics this round, the prices stay as they are: {reason}")

    def _use_total(
        self, total: Sums, clients: int, arrays: ArrayRecord, *, complete: bool, influence: Row
    ) -> None:
        """Update the penalty, add a row to the history, and keep the model if it is the best."""
        self._rounds_without_statistics = 0
        self.total = total
        state = self.state
        noise = self.noise
        self._update_penalty(total, noise)
        row = self._make_row(total, clients, noise) | influence
        budget = self.options.budget
        spent = budget.spent(state.releases, state.starts)
        if spent is not None:
            row |= {"epsilon": spent, "delta": budget.delta}
        state.history.append(row)
        log.info("fedgft: %s", format_row(row, self.metric.name))
        if self.options.on_round is not None:
            self.options.on_round(row)
        pick = self.pricing.pick if isinstance(self.pricing, Controller) else 0.0
        if complete and noise is None and state.rounds_done > self.rounds * (1 - pick):
            score = self._score(total)
            if state.best is None or score >= state.best.score:
                state.best = BestModel(score, arrays, row)

    def _update_penalty(self, total: Sums, noise: Noise | None) -> None:
        """Update the penalty from the total; leave it unchanged if a group has no rate."""
        if self.pricing is None or not (total.statistics(self.metric, self.kind)[1] > 0).all():
            return
        state = self.state
        speed = self.speed if state.damper is None else state.damper.speed
        sums = _as_one_client(total if noise is None else total.map(np.nan_to_num))
        state.penalty = self.pricing.update(with_speed(state.penalty, speed), ALL_CLIENTS, sums)

    def _make_row(self, total: Sums, clients: int, noise: Noise | None) -> dict[str, Any]:
        row = {
            "round": self.state.rounds_done,
            "accuracy": _finite_or_none(total.accuracy()),
            "gap_soft": _finite_or_none(total.gap(self.metric, "soft")),
            "gap_hard": _finite_or_none(total.gap(self.metric, "hard")),
            "rows": float(total.rows()),
            "clients": clients,
        }
        names = self.state.names
        if noise is not None:
            row["gap_error"] = _finite_or_none(noise.gap_error(self.metric, total, clients))
        elif names is not None:
            row |= describe_decisions(total, names.classes, names.groups)
        return row | self._compare_with_target(row)

    def _compare_with_target(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the target, what it applies to, and whether the measured gap meets it.

        "reached" is None if the gap is not known or differs from the target by less than twice the
        noise.
        """
        target = getattr(self.pricing, "target", None)
        if target is None:
            return {}
        limit = float(target) + TARGET_TOLERANCE
        gap = row[f"gap_{self.kind}"]
        error = row.get("gap_error", 0.0)
        unsure = gap is None or error is None or abs(gap - limit) < 2 * error
        return {
            "target": float(target),
            "target_of": {"hard": "decisions", "soft": "scores"}[self.kind],
            "reached": None if unsure else gap <= limit,
        }

    def _score(self, total: Sums) -> float:
        """Return accuracy minus twice the gap above the target: the best model scores highest."""
        if self.pricing is None:
            return -math.inf
        excess = 0.0
        if isinstance(self.pricing, Controller):
            excess = float(self.pricing.excess(ALL_CLIENTS, _as_one_client(total))[0])
        score = float(total.accuracy()) - GAP_WEIGHT * max(excess - GAP_TOLERANCE, 0.0)
        return score if math.isfinite(score) else -math.inf


def _as_one_client(total: Sums) -> Sums:
    return total.map(lambda table: table[None])


def _finite_or_none(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _format_rate(value: float | None) -> str:
    return "not estimable" if value is None else f"{value:.4f}"


def format_row(row: dict[str, Any], metric: str) -> str:
    """Return a row of the history as one line for the log."""
    text = (
        f"after round {row['round']}: accuracy {_format_rate(row['accuracy'])}, {metric} gap of "
        f"decisions {_format_rate(row['gap_hard'])}, of scores {_format_rate(row['gap_soft'])}, "
        f"{row['clients']} clients"
    )
    if row.get("clipped"):
        sites = ", ".join(f"{site} {100 * moved:.1f}" for site, moved in row["clipped"].items())
        text += f"; held to the limits, by points of gap: {sites}"
    if row.get("target") is not None:
        verdict = {True: "met", False: "missed", None: "cannot be judged"}[row["reached"]]
        text += f"; target {row['target']:.4f} for {row['target_of']}: {verdict}"
    if row.get("collapsed"):
        text += "; the model has collapsed: nearly all rows get the same decision"
    if "epsilon" in row:
        error = _format_rate(row["gap_error"])
        text += f"; epsilon {row['epsilon']:.3g}, noise on the gap ±{error}"
    return text
