"""Bounded group loss: no group has a mean loss above a bound.

Agarwal, Dudik & Wu, "Fair Regression", ICML 2019, on losses that are summed over clients, as in Hu,
Wu & Smith, "Fair Federated Learning via Bounded Group Loss", SaTML 2024. With the mean loss r_a of
group a over all clients and its bound zeta, multipliers follow exponentiated gradient ascent:

    theta_a <- theta_a + eta (r_a - zeta)        lam_a = B exp(theta_a) / (1 + sum_a exp(theta_a))

Clients minimize the mean loss plus sum_a lam_a r_a, so a row of group a, which has the share rho_a
of the rows, has the weight 1 + lam_a / rho_a. It limits losses, not differences of decisions.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.group_losses import mean_group_losses, weigh_groups
from fedgft.algorithms.loss_rules import ClientReports, LossTerms, per_run
from fedgft.algorithms.weightings import Cohort
from fedgft.validation import check_number, check_number_per_run


@dataclass(frozen=True)
class BoundedGroupLoss:
    """Multipliers of groups whose mean loss exceeds a bound.

    Parameters
    ----------
    target
        zeta, the bound: one number, or one per run.
    most
        B, the largest sum of the multipliers.
    rate
        eta, the step of the exponents.
    """

    target: float | np.ndarray
    most: float = 1.0
    rate: float = 1.0
    reads: tuple[str, ...] = ("losses",)

    def __post_init__(self) -> None:
        check_number("most", self.most)
        check_number("rate", self.rate)

    def init(self, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Return theta, rho (r, g), the number of classes, and the number of measured models."""
        check_number_per_run("target", self.target, least=0, runs=len(count))
        rows = count.sum((1, 2))
        rho = rows[:, :-1] / rows.sum(1, keepdims=True)
        return np.zeros(rho.shape), rho, count.shape[2], 0

    def update(self, state: tuple, cohort: Cohort, reports: ClientReports) -> tuple:
        """Return the state after the losses of a model; the untrained one changes nothing."""
        theta, rho, classes, measured = state
        if measured:
            losses = mean_group_losses(reports, cohort)
            theta = theta + self.rate * (losses - per_run(self.target, len(theta), 1))
        return theta, rho, classes, measured + 1

    def terms(self, state: tuple, cohort: Cohort) -> LossTerms:
        """Return the weights 1 + lam_a / rho_a; 1 before the first measurement."""
        theta, rho, classes, measured = state
        if measured < 2:
            return LossTerms()
        top = np.maximum(theta.max(1, keepdims=True), 0.0)
        odds = np.where(rho > 0, np.exp(theta - top), 0.0)
        lam = self.most * odds / (np.exp(-top) + odds.sum(1, keepdims=True))
        weights = 1 + lam / np.where(rho > 0, rho, 1.0)
        return LossTerms(weigh_groups(weights[cohort.run], classes))
