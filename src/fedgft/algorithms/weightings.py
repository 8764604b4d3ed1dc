"""The clients of one round, and the weighting slot: the coefficients of their updates.

Coefficients need not sum to one.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np

from fedgft.metrics import Kind, Metric, check_one_threshold
from fedgft.metrics.metric import Statistics
from fedgft.sums import Sums
from fedgft.validation import check_choice, check_number_per_run

Sees = Literal["nothing", "received", "trained"]
FairFedRule = Literal["subtract", "authors", "exp"]


@dataclass(frozen=True)
class Cohort:
    """The units of one round; a unit is one client of one run.

    Parameters
    ----------
    run, client
        (u,): unit i is client `client[i]` of run `run[i]`. Units are sorted by run.
    weight
        (u,): sums to one within each run.
    bounds
        (r + 1,): run r owns the units `bounds[r]:bounds[r + 1]`.
    full
        Whether every client of every run takes part.
    """

    run: np.ndarray
    client: np.ndarray
    weight: np.ndarray
    bounds: np.ndarray
    full: bool

    def __len__(self) -> int:
        return len(self.run)

    def part(self, at: slice) -> "Cohort":
        """Return the units of a slice, in the same order; some runs may have none of them."""
        start, stop, _ = at.indices(len(self))
        bounds = np.clip(self.bounds, start, stop) - start
        return Cohort(self.run[at], self.client[at], self.weight[at], bounds, full=False)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Add up `values` (u, ...) over the units of each run: (r, ...)."""
        return np.add.reduceat(values, self.bounds[:-1], axis=0)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of `values` (u, ...) in each run, by the cohort's weights: (r, ...)."""
        return self.sum(values * self.weight.reshape(-1, *[1] * (values.ndim - 1)))

    def normalized(self, values: np.ndarray) -> np.ndarray:
        """Scale `values` (u,) to sum to one within each run.

        A run whose values are all zero gets the weights of the cohort.
        """
        total = self.sum(values)[self.run]
        return np.where(total > 0, values / np.where(total > 0, total, 1.0), self.weight)


def client_means(metric: Metric, tally: Sums, kind: Kind = "soft") -> Statistics:
    """Return S_k, the statistics of each unit as means over its rows; zero without rows."""
    return tally.statistics(metric, kind) / np.maximum(tally.rows(), 1)[:, None, None, None]


@dataclass(frozen=True)
class LocalResults:
    """What the server knows about the local work of a cohort.

    Parameters
    ----------
    received, trained
        Each unit's sums of the model it received and of the model it trained; None where the
        weighting does not ask for them (`Weighting.sees`), or before the first global model.
    path_length
        (u,): the length of each unit's local path, see `fedgft.optimizers.path_length`.
    losses
        (u,): the mean cross-entropy of the received model on each unit's rows; None where the
        weighting does not ask for it (`reads_losses`), or before the first global model.
    squared_moves
        (u,): the squared distance from the received to the trained model; None where the weighting
        does not ask for it (`reads_moves`).
    """

    received: Sums | None
    trained: Sums | None
    path_length: np.ndarray
    losses: np.ndarray | None = None
    squared_moves: np.ndarray | None = None


@runtime_checkable
class Weighting(Protocol):
    """A rule for the coefficients of the clients' updates.

    `sees` says which sums of the clients it needs. A rule that needs the clients' losses or the
    lengths of their updates has an attribute `reads_losses` or `reads_moves` that is true. `init`
    takes the number of rows (run, client) and returns a state. `coefficients` returns the
    coefficient of each unit's update and the next state.
    """

    @property
    def sees(self) -> Sees: ...

    def init(self, sizes: np.ndarray) -> Any: ...

    def coefficients(
        self, state: Any, cohort: Cohort, local: LocalResults
    ) -> tuple[np.ndarray, Any]: ...


def reads_more(weighting: Weighting) -> bool:
    """Return whether a weighting needs losses or the lengths of updates; see `Weighting`."""
    return any(getattr(weighting, name, False) for name in ("reads_losses", "reads_moves"))


@dataclass(frozen=True)
class BySize:
    """FedAvg (McMahan et al., 2017): the cohort's weights, n_k / n unless sampling sets others."""

    sees: Sees = "nothing"

    def init(self, sizes: np.ndarray) -> None:
        return None

    def coefficients(
        self, state: None, cohort: Cohort, local: LocalResults
    ) -> tuple[np.ndarray, None]:
        """Return the weights of the cohort."""
        return cohort.weight, None


@dataclass(frozen=True)
class FedNova:
    """FedNova (Wang et al., 2020): a client that makes more local steps does not count for more.

    Each update is divided by the length tau_k of the client's local path and multiplied by the mean
    length: w_k -> w_k sum_j w_j tau_j / tau_k, with the weights w_k of the weighting `inner`.
    """

    inner: Weighting = field(default_factory=BySize)

    @property
    def sees(self) -> Sees:
        return self.inner.sees

    @property
    def reads_losses(self) -> bool:
        return getattr(self.inner, "reads_losses", False)

    @property
    def reads_moves(self) -> bool:
        return getattr(self.inner, "reads_moves", False)

    def init(self, sizes: np.ndarray) -> Any:
        """Return the state of the inner weighting."""
        return self.inner.init(sizes)

    def coefficients(
        self, state: Any, cohort: Cohort, local: LocalResults
    ) -> tuple[np.ndarray, Any]:
        """Return the inner coefficients, corrected for path length; 0 for a client without rows."""
        weight, state = self.inner.coefficients(state, cohort, local)
        mean = cohort.sum(weight * local.path_length)[cohort.run]
        moved = local.path_length != 0
        return np.where(moved, weight * mean / np.where(moved, local.path_length, 1.0), 0.0), state


@dataclass(frozen=True)
class FairFed:
    """FairFed: weights that follow the distance between global and local fairness.

    Ezzeldin, Yan, He, Ferrara & Avestimehr, "FairFed: Enabling Group Fairness in Federated
    Learning". With the signed gaps F of all data and F_k of client k, Delta_k = |F - F_k|, or
    |Acc - Acc_k| where the local gap is not estimable.

    Parameters
    ----------
    metric
        The metric whose gaps are compared.
    beta
        Strength: one number, or one per run.
    rule
        "subtract" is the published rule: wbar_k <- max(wbar_k - beta (Delta_k - mean Delta), 0),
        starting from wbar_k = n_k / n, with gaps of the received model; weights are normalized when
        they are used. "authors" is the rule of the code behind the paper's tables: it starts from
        equal weights and keeps the normalized weights. "exp" is the rule in the paper's text: w_k
        is proportional to n_k exp(-beta Delta_k), with F_k of the locally trained models.
    """

    metric: Metric
    beta: float | np.ndarray = 1.0
    rule: FairFedRule = "subtract"

    def __post_init__(self) -> None:
        check_one_threshold(self.metric)
        check_choice("rule", self.rule, get_args(FairFedRule))
        object.__setattr__(self, "beta", check_number_per_run("beta", self.beta, least=0))

    @property
    def sees(self) -> Literal["received", "trained"]:
        return "trained" if self.rule == "exp" else "received"

    def init(self, sizes: np.ndarray) -> np.ndarray:
        """Return wbar, (run, client)."""
        check_number_per_run("beta", self.beta, runs=len(sizes))
        if self.rule == "authors":
            sizes = 1.0 * (sizes > 0)
        return sizes / sizes.sum(1, keepdims=True)

    def coefficients(
        self, state: np.ndarray, cohort: Cohort, local: LocalResults
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return normalized weights and the next wbar; a client without rows has no weight."""
        received = local.received
        if received is None:
            return cohort.normalized(state[cohort.run, cohort.client]), state
        reported = received if local.trained is None else local.trained
        has_rows = reported.rows() > 0
        delta = np.where(has_rows, self._distance(cohort, received, reported), 0.0)
        beta = np.broadcast_to(np.asarray(self.beta, np.float64), (len(state),))[cohort.run]
        if self.rule == "exp":
            return cohort.normalized(cohort.weight * np.exp(-beta * delta)), state
        mean = cohort.sum(delta) / np.maximum(cohort.sum(1.0 * has_rows), 1.0)
        raw = state[cohort.run, cohort.client] - beta * (delta - mean[cohort.run])
        raw = np.where(has_rows, np.maximum(raw, 0.0), 0.0)
        weight = cohort.normalized(raw)
        state = state.copy()
        state[cohort.run, cohort.client] = weight if self.rule == "authors" else raw
        return weight, state

    def _distance(self, cohort: Cohort, received: Sums, local: Sums) -> np.ndarray:
        """Return Delta_k for the pair of groups with the largest global gap."""
        overall = cohort.mean(client_means(self.metric, received))
        means = client_means(self.metric, local)
        gap = np.abs(
            self._signed_gap(means, overall[cohort.run])
            - self._signed_gap(overall, overall)[cohort.run]
        )
        accuracy = np.where(received.rows() > 0, received.accuracy(), 0.0)
        fallback = np.abs(local.accuracy() - cohort.mean(accuracy)[cohort.run])
        return np.where(np.isnan(gap), fallback, gap)

    def _signed_gap(self, statistics: Statistics, overall: Statistics) -> np.ndarray:
        """Return the rate of the group that is highest overall minus that of the lowest."""
        condition, high, low = self.metric.worst(overall)
        rates = self.metric.rates(statistics)
        row = np.take_along_axis(rates, condition[:, None, None], axis=-2)[:, 0]
        ends = np.take_along_axis(row, np.stack((high, low), axis=-1), axis=-1)
        return ends[:, 0] - ends[:, 1]
