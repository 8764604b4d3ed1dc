"""AFL: the smallest worst loss of any client.

Mohri, Sivek & Suresh, "Agnostic Federated Learning", ICML 2019. With the mean loss F_k of client k
and weights on the simplex, starting from w_k = 1 / K:

    min_theta max_w sum_k w_k F_k(theta)         w <- Proj_simplex(w + gamma F)

The update of client k counts with the weight w_k, and the result is the mean of the iterates
(`IterateAverage`). AFL makes clients equally well off, not groups.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.group_losses import project_to_simplex
from fedgft.algorithms.loss_rules import per_run
from fedgft.algorithms.weightings import Cohort, LocalResults, Sees
from fedgft.validation import check_number_per_run


@dataclass(frozen=True)
class WorstClient:
    """Weights of clients that rise with their losses.

    Parameters
    ----------
    lam
        gamma, the step of the weights: one number, or one per run.
    """

    lam: float | np.ndarray = 0.1
    sees: Sees = "received"
    reads_losses: bool = True

    def init(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the weights (run, client), which clients have rows, and the rounds."""
        check_number_per_run("lam", self.lam, least=0, runs=len(sizes))
        has_rows = sizes > 0
        return has_rows / has_rows.sum(1, keepdims=True), has_rows, 0

    def coefficients(
        self, state: tuple, cohort: Cohort, local: LocalResults
    ) -> tuple[np.ndarray, tuple]:
        """Return the weights of the cohort and the next state; the untrained model counts not."""
        weights, has_rows, measured = state
        if local.losses is not None and measured:
            raised = weights.copy()
            at = (cohort.run, cohort.client)
            raised[at] += per_run(self.lam, len(weights))[cohort.run] * local.losses
            weights = project_to_simplex(raised, has_rows)
        found = cohort.normalized(weights[cohort.run, cohort.client])
        return found, (weights, has_rows, measured + 1)
