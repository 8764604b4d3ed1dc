"""FADE: weights of clients under which their gaps cancel.

Akram et al., "FADE", CIKM 2025, the weight-optimization rule (WO). With the signed gap F_k of
client k's own rows for the model it received, and K clients:

    minimize sum_k (w_k - 1/K)^2   subject to   sum_k w_k F_k = 0,  sum_k w_k = 1,  w >= 0

The weighted mean of local gaps is not the gap over all rows, so a model may satisfy the constraint
and be unfair. If all gaps have one sign, no weights cancel them; the client with the smallest gap
then gets nearly all weight. A client whose gap is not estimable counts as having none.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.group_losses import project_to_simplex
from fedgft.algorithms.loss_rules import per_run
from fedgft.algorithms.weightings import Cohort, LocalResults, Sees, client_means
from fedgft.metrics import Kind, Metric, check_one_threshold
from fedgft.sums import Sums
from fedgft.validation import check_number_per_run

STEPS = 60  # of the bisection for the multiplier
MOST_MULTIPLIER = 1e4


@dataclass(frozen=True)
class CancelingWeights:
    """Weights of clients under which their signed gaps cancel.

    Parameters
    ----------
    metric
        The metric of the gaps.
    beta
        The share of these weights; the rest are weights by size. One number from 0 to 1, or one per
        run; the published method has 1.
    kind
        The gap of decisions ("hard") or of scores ("soft").
    """

    metric: Metric
    beta: float | np.ndarray = 1.0
    kind: Kind = "hard"
    sees: Sees = "received"

    def __post_init__(self) -> None:
        check_one_threshold(self.metric)

    def init(self, sizes: np.ndarray) -> np.ndarray:
        """Return which clients have rows, (run, client)."""
        check_number_per_run("beta", self.beta, least=0, runs=len(sizes))
        return sizes > 0

    def coefficients(
        self, state: np.ndarray, cohort: Cohort, local: LocalResults
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights of the cohort; by size before the first global model."""
        if local.received is None:
            return cohort.weight, state
        gaps = self._signed_gaps(cohort, local.received)
        weights = np.empty(len(cohort))
        has_rows = state[cohort.run, cohort.client]
        for first, last in zip(cohort.bounds[:-1], cohort.bounds[1:], strict=True):
            at = slice(first, last)
            weights[at] = cancel(gaps[at], has_rows[at])
        beta = np.minimum(per_run(self.beta, len(state))[cohort.run], 1.0)
        return beta * weights + (1 - beta) * cohort.weight, state

    def _signed_gaps(self, cohort: Cohort, received: Sums) -> np.ndarray:
        """Return each client's rate of the group that is highest overall minus that of the lowest.

        The condition and the groups are those of the largest gap over all rows of the run.
        """
        means = client_means(self.metric, received, self.kind)
        overall = cohort.mean(means)
        known = np.isfinite(self.metric.readout(overall))
        filled = np.where(known[:, None, None, None], overall, 1.0)
        condition, high, low = (each[cohort.run] for each in self.metric.worst(filled))
        rates = self.metric.rates(means)
        unit = np.arange(len(cohort))
        gaps = rates[unit, condition, high] - rates[unit, condition, low]
        return np.where(np.isfinite(gaps) & known[cohort.run], gaps, 0.0)


def cancel(gaps: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Return the weights (k,) nearest to equal ones under which the gaps cancel.

    The weights are the projection of 1/K - b gaps onto the simplex, and their sum of gaps falls as
    the multiplier b rises: bisection finds it.
    """
    equal = np.full(len(gaps), 1.0 / max(int(allowed.sum()), 1))
    low, high = -MOST_MULTIPLIER, MOST_MULTIPLIER
    for _ in range(STEPS):
        middle = (low + high) / 2
        balance = project_to_simplex(equal - middle * gaps, allowed) @ gaps
        low, high = (middle, high) if balance > 0 else (low, middle)
    return project_to_simplex(equal - high * gaps, allowed)
