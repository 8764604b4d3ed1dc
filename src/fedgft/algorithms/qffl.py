"""q-FFL: more weight for clients with larger losses.

Li, Sanjabi, Beirami & Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020,
Algorithm 2 (q-FedAvg). With the mean loss F_k of client k at the received model theta, its trained
model theta_k and L = 1 / lr:

    minimize sum_k w_k F_k^(q+1) / (q+1)
    Delta_k = F_k^q L (theta - theta_k)          h_k = q F_k^(q-1) |L (theta - theta_k)|^2 + L F_k^q
    theta <- theta - sum_k w_k Delta_k / sum_k w_k h_k

With q = 0 this is FedAvg. q-FFL makes clients equally well off, not groups.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.loss_rules import per_run
from fedgft.algorithms.weightings import Cohort, LocalResults, Sees
from fedgft.validation import check_number_per_run

SMALLEST_LOSS = 1e-10


@dataclass(frozen=True)
class PowerOfLosses:
    """Coefficients of clients that grow with a power of their losses.

    Parameters
    ----------
    lam
        q: one number, or one per run.
    lr
        The local learning rate 1 / L, by which the public code measures the length of updates.
    """

    lam: float | np.ndarray = 1.0
    lr: float = 0.1
    sees: Sees = "received"
    reads_losses: bool = True
    reads_moves: bool = True

    def init(self, sizes: np.ndarray) -> None:
        """Check that q fits the number of runs; there is no state."""
        check_number_per_run("lam", self.lam, least=0, runs=len(sizes))

    def coefficients(
        self, state: None, cohort: Cohort, local: LocalResults
    ) -> tuple[np.ndarray, None]:
        """Return w_k L F_k^q / sum_j w_j h_j."""
        if local.losses is None or local.squared_moves is None:
            return cohort.weight, None
        q = per_run(self.lam, len(cohort.bounds) - 1)[cohort.run]
        losses = np.maximum(local.losses, SMALLEST_LOSS)
        smooth = 1.0 / self.lr
        power = losses**q
        h = q * losses ** (q - 1) * smooth**2 * local.squared_moves + smooth * power
        return cohort.weight * smooth * power / cohort.sum(cohort.weight * h)[cohort.run], None
