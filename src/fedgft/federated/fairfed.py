"""FairFed: aggregation weights that follow the distance between global and local fairness.

Ezzeldin, Yan, He, Ferrara & Avestimehr, "FairFed: Enabling Group Fairness in Federated
Learning". With signed gaps F of the global and F_k of a client's data,

    Delta_k = |F - F_k|,  or |Acc - Acc_k| where the local gap is not estimable.

`subtract` (as published): wbar_k <- max(wbar_k - beta (Delta_k - mean Delta), 0) from
wbar_k = n_k / n, kept as it is and normalised on use; F and F_k of the model received.
`authors` (the code behind the paper's tables): the same from equal weights, and the
normalised weights are what is kept. `exp` (the paper's text): w_k proportional to
n_k exp(-beta Delta_k), with F_k of the locally trained models.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedgft.arguments import numbers_per_run
from fedgft.errors import FedgftError
from fedgft.federated.cohort import Cohort, client_means
from fedgft.federated.weighting import Local
from fedgft.metrics import Metric, Tally
from fedgft.types import Statistics

Rule = Literal["subtract", "authors", "exp"]
RULES: tuple[Rule, ...] = ("subtract", "authors", "exp")


@dataclass(frozen=True)
class FairFed:
    """Weighting slot. `beta` is one number, or one a run."""

    metric: Metric
    beta: float | np.ndarray = 1.0
    rule: Rule = "subtract"

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str) or self.rule not in RULES:
            raise FedgftError(
                f"FairFed rule {self.rule!r} is not known; choose from {', '.join(RULES)}"
            )
        object.__setattr__(self, "beta", numbers_per_run("beta", self.beta))
        if np.any(np.asarray(self.beta) < 0) or not np.all(np.isfinite(self.beta)):
            raise FedgftError(f"--beta must be a number >= 0, got {self.beta}")

    @property
    def sees(self) -> Literal["received", "trained"]:
        return "trained" if self.rule == "exp" else "received"

    def init(self, sizes: np.ndarray) -> np.ndarray:
        """wbar, (runs, clients)."""
        if self.rule == "authors":
            sizes = 1.0 * (sizes > 0)
        return sizes / sizes.sum(1, keepdims=True)

    def coefficients(
        self, state: np.ndarray, cohort: Cohort, local: Local
    ) -> tuple[np.ndarray, np.ndarray]:
        received = local.received
        if received is None:  # before the first global model there is nothing to compare
            return cohort.normalised(state[cohort.run, cohort.client]), state
        own = received if local.trained is None else local.trained
        held = own.rows() > 0  # a client without rows has no distance and no weight
        delta = np.where(held, self._distance(cohort, received, own), 0.0)
        beta = np.broadcast_to(np.asarray(self.beta, np.float64), (len(state),))[cohort.run]
        if self.rule == "exp":
            return cohort.normalised(cohort.weight * np.exp(-beta * delta)), state
        mean = cohort.sum(delta) / np.maximum(cohort.sum(1.0 * held), 1.0)
        raw = state[cohort.run, cohort.client] - beta * (delta - mean[cohort.run])
        raw = np.where(held, np.maximum(raw, 0.0), 0.0)
        weight = cohort.normalised(raw)
        kept = state.copy()
        kept[cohort.run, cohort.client] = weight if self.rule == "authors" else raw
        return weight, kept

    def _distance(self, cohort: Cohort, received: Tally, local: Tally) -> np.ndarray:
        """Delta_k, along the pair of groups that is farthest apart globally."""
        overall = cohort.mean(client_means(self.metric, received))
        own = client_means(self.metric, local)
        gap = np.abs(
            self._signed(own, overall[cohort.run]) - self._signed(overall, overall)[cohort.run]
        )
        accuracy = np.where(received.rows() > 0, received.accuracy(), 0.0)
        fallback = np.abs(local.accuracy() - cohort.mean(accuracy)[cohort.run])
        return np.where(np.isnan(gap), fallback, gap)

    def _signed(self, statistics: Statistics, overall: Statistics) -> np.ndarray:
        condition, high, low = self.metric.worst(overall)
        rates = self.metric.rates(statistics)
        row = np.take_along_axis(rates, condition[:, None, None], axis=-2)[:, 0]
        at = lambda group: np.take_along_axis(row, group[:, None], axis=-1)[:, 0]  # noqa: E731
        return at(high) - at(low)
