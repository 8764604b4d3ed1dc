"""FedMinMax: the smallest worst loss of any group.

Papadaki, Martinez, Bertran, Sapiro & Rodrigues, "Minimax Demographic Group Fairness in Federated
Learning", FAccT 2022, Algorithm 1. With the risk r_a of group a over all clients, its share rho_a
of the rows, and weights mu on the simplex:

    min_theta max_mu sum_a mu_a r_a(theta)
    mu <- Proj(mu + eta r),  mu_0 = rho                   weight of a row of group a: mu_a / rho_a

with the projection onto the points of the simplex that give every group at least `FLOOR`.

The result is the mean of the iterates (`IterateAverage`). The published method makes one full
gradient step per round; here clients train as settings say. It makes groups equally well off where
the loss of the worst group can be lowered; it does not ask for equal rates of decisions.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.group_losses import mean_group_losses, project_to_simplex, weigh_groups
from fedgft.algorithms.loss_rules import ClientReports, LossTerms, per_run
from fedgft.algorithms.weightings import Cohort
from fedgft.validation import check_number_per_run

FLOOR = 1e-3
"The smallest weight of a group, so that none is lost."


@dataclass(frozen=True)
class MinimaxGroups:
    """Weights of groups that rise with their losses.

    Parameters
    ----------
    lam
        eta, the step of the weights: one number, or one per run.
    """

    lam: float | np.ndarray = 0.05
    reads: tuple[str, ...] = ("losses",)

    def init(self, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Return mu, rho (r, g), the number of classes, and the number of measured models."""
        check_number_per_run("lam", self.lam, least=0, runs=len(count))
        rows = count.sum((1, 2))[:, :-1]
        rho = rows / rows.sum(1, keepdims=True)
        return rho, rho, count.shape[2], 0

    def update(self, state: tuple, cohort: Cohort, reports: ClientReports) -> tuple:
        """Return the state after the losses of a model; the untrained one changes nothing."""
        mu, rho, classes, measured = state
        if measured:
            losses = mean_group_losses(reports, cohort)
            known = rho > 0
            rest = 1 - FLOOR * known.sum(1, keepdims=True)
            raised = mu + per_run(self.lam, len(mu), 1) * losses - FLOOR
            mu = FLOOR * known + rest * project_to_simplex(raised / rest, known)
        return mu, rho, classes, measured + 1

    def terms(self, state: tuple, cohort: Cohort) -> LossTerms:
        """Return the weights mu_a / rho_a."""
        mu, rho, classes, _ = state
        weights = mu / np.where(rho > 0, rho, 1.0)
        return LossTerms(weigh_groups(weights[cohort.run], classes))
