"""FFALM: equal losses of two groups at each client, by an augmented Lagrangian.

Dunda & Song, "Fairness-aware Federated Minimax Optimization with Convergence Guarantee",
arXiv:2307.04417. With the mean losses L_0 and L_1 of the two groups on a client's own rows:

    loss = L + lam (L_0 - L_1) + beta/2 (L_0 - L_1)^2
    lam <- lam + eta sum_k w_k (L_0k - L_1k)

where the server averages the clients' multipliers, and after each round beta grows and eta shrinks
by the factor `growth`. A client measures its losses once per round, at the model it receives (the
public code: in every batch), so a row of group 0, which has the share s_0 of the client's rows, has
the weight 1 + (lam + beta (L_0 - L_1)) / s_0, and one of group 1 the weight 1 - (...) / s_1.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.group_losses import own_group_losses, weigh_groups
from fedgft.algorithms.loss_rules import ClientReports, LossTerms, per_run
from fedgft.algorithms.weightings import Cohort
from fedgft.errors import FedgftError
from fedgft.validation import check_number_per_run


@dataclass(frozen=True)
class LossParity:
    """A multiplier of the difference of two groups' losses at each client.

    Parameters
    ----------
    lam
        beta of the first round: one number, or one per run.
    rate
        eta of the first round, relative to beta.
    growth
        The factor per round by which beta grows and eta shrinks.
    """

    lam: float | np.ndarray = 5.0
    rate: float = 0.4
    growth: float = 1.05
    reads: tuple[str, ...] = ("losses",)

    def init(self, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
        """Return the state: multipliers (r,), each client's difference and shares, and more.

        A client has the difference 0 until it is measured. The state ends with the number of
        classes and of measured models.
        """
        check_number_per_run("lam", self.lam, least=0, runs=len(count))
        if count.shape[-1] != 3:
            text = f"compares two groups, and there are {count.shape[-1] - 1}"
            raise FedgftError(f"ffalm {text}", kind="unsupported")
        rows = count.sum(2)
        shares = rows[..., :-1] / np.maximum(rows.sum(2, keepdims=True), 1.0)
        shares = np.where((shares > 0).all(2, keepdims=True), shares, np.inf)
        return np.zeros(len(count)), np.zeros(count.shape[:2]), shares, count.shape[2], 0

    def update(self, state: tuple, cohort: Cohort, reports: ClientReports) -> tuple:
        """Return the state after the clients' losses; the untrained model changes nothing."""
        multiplier, difference, shares, classes, measured = state
        if measured:
            losses = own_group_losses(reports)
            at = (cohort.run, cohort.client)
            known = np.isfinite(shares[at]).all(1)
            own = np.where(known, losses[:, 0] - losses[:, 1], 0.0)
            eta = self.rate * per_run(self.lam, len(multiplier)) / self.growth ** (measured - 1)
            multiplier = multiplier + eta * cohort.mean(own)
            difference = difference.copy()
            difference[at] = own
        return multiplier, difference, shares, classes, measured + 1

    def terms(self, state: tuple, cohort: Cohort) -> LossTerms:
        """Return the row weights of each client; a client without one of the groups has none."""
        multiplier, difference, shares, classes, measured = state
        if measured < 2:
            return LossTerms()
        beta = per_run(self.lam, len(multiplier)) * self.growth ** (measured - 2)
        at = (cohort.run, cohort.client)
        force = multiplier[cohort.run] + beta[cohort.run] * difference[at]
        weights = 1 + force[:, None] * np.array([1.0, -1.0]) / shares[at]
        return LossTerms(weigh_groups(weights, classes))
