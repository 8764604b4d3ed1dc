"""The objective slot: row weights and penalties on the loss, with FedGFT's penalty.

Wang, Payani, Lee & Kompella, "Mitigating Group Bias in Federated Learning: Beyond Local
Fairness", Algorithm 1. It minimizes L(theta) + lam J(F(S)), where the statistics
S = sum_k w_k S_k(theta) are a mean over clients. By the chain rule,

    grad J(F(S)) = sum_k w_k grad <v, S_k(theta)>,   v = J'(F) dF/dS.

The server sends the cotangent v (the paper's C, Theorem 5.1) once per round, and every client
adds lam <v, statistics> to the loss of each of its rows. Nothing else changes. The statistics
are affine in the scores, so v acts as a price on them: `price[label, group, class]`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np

from fedgft.algorithms.controller import Controller, ControlReport, Loop, with_speed
from fedgft.algorithms.local_control import LocalController, LocalState
from fedgft.algorithms.loss_rules import (
    ClientReports,
    LossRule,
    LossTerms,
    check_rule,
    check_terms,
    shift_to_labels,
)
from fedgft.algorithms.weightings import Cohort, client_means
from fedgft.errors import FedgftError
from fedgft.metrics import Metric, check_one_threshold, price
from fedgft.metrics.metric import SPREADS, Price, Statistics, Weights, spread_gradient
from fedgft.settings import PriceOn
from fedgft.sums import Sums
from fedgft.validation import check_choice, check_number_per_run

States = tuple[Any, ...]  # one per penalty, or one per loss rule

SLOPES: dict[str, Callable[[Any], Any]] = {
    "l1": lambda gap: 1.0 + 0.0 * gap,
    "l2": lambda gap: 2.0 * gap,
    "half": lambda gap: gap,
}
"The derivative of J by name. J(x) is x for l1, x^2 for l2 (the paper), x^2 / 2 for half (Table 1)."


@runtime_checkable
class Pricing(Protocol):
    """A penalty whose prices the server sets from the sums of all clients.

    `init` returns the state before the first round, for `runs` runs that train together.
    `update` returns the next state from the cohort's sums of the model that the server sends.
    `price` returns the price of each score, (len(run), label, group, class), where entry i
    belongs to run `run[i]`; it returns 0.0 before the first update.
    """

    @property
    def metric(self) -> Metric: ...

    def init(self, runs: int) -> Any: ...

    def update(self, state: Any, cohort: Cohort, received: Sums) -> Any: ...

    def price(self, state: Any, *, run: np.ndarray, classes: int) -> Price | float: ...


@dataclass(frozen=True)
class LinearizedPenalty:
    """The penalty lam J(F), linearized at the last measured statistics.

    Parameters
    ----------
    metric
        The metric whose gap is F.
    lam
        Strength: one number, or one per run.
    penalty
        J, a key of `SLOPES`.
    spread
        How F summarizes the rates of the groups, a key of `SPREADS`.
    """

    metric: Metric
    lam: float | np.ndarray
    penalty: str = "half"
    spread: str = "range"

    def __post_init__(self) -> None:
        check_one_threshold(self.metric)
        check_choice("penalty", self.penalty, tuple(SLOPES))
        check_choice("spread", self.spread, SPREADS)
        if self.metric.columns and self.spread != "range":
            text = f"must be range with {self.metric.name}, not {self.spread}"
            raise FedgftError(text, field="spread", kind="unsupported")
        object.__setattr__(self, "lam", check_number_per_run("lam", self.lam, least=0))

    def init(self, runs: int) -> None:
        """Check that `lam` fits the number of runs; there is no state before the first sums."""
        check_number_per_run("lam", self.lam, runs=runs)

    def update(self, state: Statistics | None, cohort: Cohort, received: Sums) -> Statistics:
        """Return the cotangent v of each run, from the mean statistics of the cohort."""
        mean = cohort.mean(client_means(self.metric, received))
        return self.cotangent(mean, np.zeros_like(mean) if state is None else state)

    def cotangent(self, statistics: Statistics, last: Statistics) -> Statistics:
        """Return v at these statistics, or `last` where a group has no row of the event.

        The weighted penalties of a combined metric add up.
        """
        known = self.metric.estimable(statistics)
        v = np.zeros_like(statistics)
        for at, stop, metric, weight in self.metric.pieces(statistics.shape[-2]):
            with np.errstate(divide="ignore", invalid="ignore"):
                gap, gradient = spread_gradient(metric, statistics[..., at:stop, :], self.spread)
            slope = weight * SLOPES[self.penalty](gap)
            v[..., at:stop, :] = slope[..., None, None, None] * gradient
        return np.where(known[..., None, None, None], v, last)

    def price(self, state: Statistics | None, *, run: np.ndarray, classes: int) -> Price | float:
        """Return lam <v, d statistics / d score>; entry i belongs to run `run[i]`."""
        if state is None:
            return 0.0
        lam = np.asarray(self.lam, dtype=np.float64)
        lam = lam[run] if lam.ndim else np.broadcast_to(lam, run.shape)
        return lam[:, None, None, None] * price(self.metric, state, classes)


def reweigh(count: np.ndarray) -> Weights:
    """Return the row weights of LRW, local reweighing (Kamiran & Calders, 2012).

    This is Algorithm 4 of the paper. A row of group a and label y has the weight
    n_a n_y / (n n_ay), with the counts of its own client, so that label and group are independent
    on that client. A cell without rows needs no weight; rows without a recorded group have the
    weight one.

    Parameters
    ----------
    count
        (u, label, group): rows of each unit; the last group is "not recorded".

    Returns
    -------
    (u, label, group): the weight of a row in each cell.
    """
    known = count[..., :-1].astype(np.float64)
    by_label = known.sum(-1, keepdims=True)
    by_group = known.sum(-2, keepdims=True)
    total = by_label.sum(-2, keepdims=True)
    weights = np.ones_like(count, dtype=np.float64)
    np.divide(by_label * by_group, total * known, out=weights[..., :-1], where=known > 0)
    return weights


@dataclass(frozen=True)
class Objective:
    """Cross-entropy with row weights by (label, group), plus penalties.

    Parameters
    ----------
    row_weights
        A function from counts (..., label, group) to weights of the same shape; None means that
        every row has the weight one.
    penalties
        Penalties whose prices the server sets once per round, from the sums of all clients.
    local_penalties
        Penalties whose prices each client sets before every epoch, from its own sums.
    local_controllers
        Prices that each client sets once per round, to keep its own gap within a target.
    loss_rules
        Rules that set row weights, labels and prices once per round; see `LossRule`.
    price_on
        What the prices of penalties and controllers are paid for: "scores" (a term of the loss), or
        "decisions" (weights and labels of rows, see `shift_to_labels`).
    """

    row_weights: Callable[[np.ndarray], np.ndarray] | None = None
    penalties: tuple[Pricing, ...] = ()
    local_penalties: tuple[LinearizedPenalty, ...] = ()
    local_controllers: tuple[LocalController, ...] = ()
    loss_rules: tuple[LossRule, ...] = ()
    price_on: PriceOn = "scores"

    def __post_init__(self) -> None:
        check_choice("price_on", self.price_on, get_args(PriceOn))
        for rule in self.loss_rules:
            check_rule(rule)
        if self.price_on == "decisions" and self.has_curves:
            raise FedgftError("a price by the score is paid for scores", field="price_on")

    def init(self, runs: int, loop: Loop | None = None) -> States:
        """Return the state of each penalty before the first round.

        Raises `FedgftError` where a strength does not fit the number of runs.
        """
        for penalty in self.local_penalties:
            penalty.init(runs)
        return tuple(
            p.init(runs, loop or Loop()) if isinstance(p, Controller) else p.init(runs)
            for p in self.penalties
        )

    def update(self, states: States, cohort: Cohort, received: Sums, *, speed: Any = 1.0) -> States:
        """Return the states after the sums of a model (ConstUpdate in Algorithm 1).

        `speed` is how far the coming round moves the model, relative to the first round: one
        number, or (r, 1, 1).
        """
        pairs = zip(self.penalties, states, strict=True)
        return tuple(p.update(with_speed(state, speed), cohort, received) for p, state in pairs)

    def price(self, states: States, *, runs: int, classes: int) -> Price | float:
        """Return the prices of each run, all penalties together; zero before the first message."""
        pairs = zip(self.penalties, states, strict=True)
        return sum(p.price(state, run=np.arange(runs), classes=classes) for p, state in pairs)

    def local_price(self, sums: Sums, *, run: np.ndarray, classes: int) -> Price | float:
        """Return the prices that each unit sets for itself; 0 where it lacks a group or event."""
        means = [(p, client_means(p.metric, sums)) for p in self.local_penalties]
        cotangents = ((p, p.cotangent(mean, np.zeros_like(mean))) for p, mean in means)
        return sum((p.price(v, run=run, classes=classes) for p, v in cotangents), start=0.0)

    def init_local(self, runs: int, clients: int, loop: Loop) -> tuple[LocalState, ...] | None:
        """Return what all clients remember of their own gaps; None without local targets."""
        states = tuple(each.init(runs, clients, loop) for each in self.local_controllers)
        return states or None

    def update_local(
        self, states: tuple[LocalState, ...], cohort: Cohort, own: Sums, *, speed: Any
    ) -> tuple[LocalState, ...]:
        """Return the clients' states after their own sums, see `LocalController.update`."""
        pairs = zip(self.local_controllers, states, strict=True)
        return tuple(each.update(state, cohort, own, speed=speed) for each, state in pairs)

    def own_price(
        self, states: tuple[LocalState, ...] | None, cohort: Cohort, *, classes: int
    ) -> Price | float:
        """Return the prices that the clients of a cohort add to those of the server."""
        pairs = zip(self.local_controllers, states or (), strict=True)
        return sum(each.price(state, cohort, classes=classes) for each, state in pairs)

    def init_rules(self, count: np.ndarray) -> States:
        """Return the state of each loss rule; `count`: rows (run, client, label, group)."""
        return tuple(rule.init(count) for rule in self.loss_rules)

    def update_rules(self, states: States, cohort: Cohort, reports: ClientReports) -> States:
        """Return the states of the loss rules after the reports about a model."""
        pairs = zip(self.loss_rules, states, strict=True)
        return tuple(rule.update(state, cohort, reports) for rule, state in pairs)

    def terms(self, states: States, cohort: Cohort, count: np.ndarray, price: Price) -> LossTerms:
        """Return the loss of each client of a cohort, with all tables filled in.

        Parameters
        ----------
        states
            The states of the loss rules.
        cohort
            The clients that take part.
        count
            (u, c, k): the rows of each client.
        price
            (u, c, k, c): the prices of penalties and controllers.
        """
        weights = np.ones_like(count) if self.row_weights is None else self.row_weights(count)
        terms = LossTerms(weights, price=price)
        if self.price_on == "decisions":
            shifted, labels = shift_to_labels(price)
            terms = LossTerms(weights * shifted, labels, np.zeros_like(price))
        for rule, state in zip(self.loss_rules, states, strict=True):
            terms = terms + check_terms(rule, rule.terms(state, cohort), price)
        return terms

    @property
    def reads(self) -> frozenset[str]:
        """Which reports the loss rules need besides sums."""
        return frozenset(name for rule in self.loss_rules for name in rule.reads)

    @property
    def has_curves(self) -> bool:
        """Whether prices depend on the score itself."""
        return "histograms" in self.reads

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """The penalties that have a target."""
        return tuple(p for p in self.penalties if isinstance(p, Controller))

    @property
    def damps(self) -> bool:
        """Whether the server's steps shorten toward the end."""
        return any(controller.damp for controller in self.controllers)

    @property
    def pick(self) -> float:
        """The share of the rounds, counted from the end, whose best model becomes the final one."""
        return max((controller.pick for controller in self.controllers), default=0.0)

    def excess(self, cohort: Cohort, received: Sums) -> np.ndarray:
        """Return (r,): how far each run is above its targets, summed over its controllers."""
        return np.sum([c.excess(cohort, received) for c in self.controllers], axis=0)

    def local_excess(self, clients: Sums) -> np.ndarray:
        """Return (r,): how far the largest local gap is above its target, summed over targets.

        `clients`: sums (r, client, ...).
        """
        return np.sum([each.excess(clients) for each in self.local_controllers], axis=0)

    def reports(self, states: States, federation: Sums, clients: Sums) -> tuple[ControlReport, ...]:
        """Report for each penalty with a target whether the final model reached it.

        Parameters
        ----------
        states
            The states of the penalties.
        federation, clients
            The final model's sums over all clients, (r, ...), and of each client, (r, client, ...).
        """
        pairs = zip(self.penalties, states, strict=True)
        found = [p.report(state, federation) for p, state in pairs if isinstance(p, Controller)]
        if not self.local_controllers:
            return tuple(found)
        local = self.local_controllers[0]
        gap = local.gap(clients)
        target = np.broadcast_to(np.asarray(local.target, np.float64), gap.shape)
        return tuple(replace(report, local_target=target, local_gap=gap) for report in found)
