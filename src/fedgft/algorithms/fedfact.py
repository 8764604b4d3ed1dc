"""FedFACT, in-processing: multipliers of hard constraints, as costs of decisions.

Zhang et al., "FedFACT: A Provable Framework for Controllable Group-Fairness Calibration in
Federated Learning", NeurIPS 2025 (arXiv:2506.03777), Algorithm 1 with global constraints. For each
condition v and group a of a metric, the gap of decisions to the rate of all rows is to be at most
xi. The server moves a multiplier for each side and projects them onto an L1 ball:

    up_va   <- up_va   + eta (rate_va - rate_v - xi)
    down_va <- down_va + eta (rate_v - rate_va - xi)          Proj {>= 0, sum <= `most`}

With the cost c_aj = sum_v (up_va - down_va) d(rate_va - rate_v)/d(decision j) of a row of group a,
clients minimize the calibrated loss

    -sum_j M_a[y, j] log p_j          M_a[y, j] = 1{j = y} - c_aj[y] + kappa

where kappa is zero, or as large as it must be for all entries to be positive. The clients' own
constraints, and the ensemble of personal models that serves them, are not part of it.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.group_losses import project_to_simplex
from fedgft.algorithms.loss_rules import ClientReports, LossTerms, per_run
from fedgft.algorithms.weightings import Cohort, client_means
from fedgft.errors import FedgftError
from fedgft.metrics import Metric, check_one_threshold, price
from fedgft.metrics.metric import Price, Statistics
from fedgft.validation import check_number, check_number_per_run

SMALLEST = 1e-5
"The smallest entry of a matrix M that had negative ones."


@dataclass(frozen=True)
class DualAscent:
    """Multipliers of constraints on decisions, and the loss of rows that follows from them.

    Parameters
    ----------
    metric
        The metric whose rates are constrained.
    target
        The largest gap between groups to leave: twice xi. One number, or one per run.
    rate
        eta, the step of the multipliers: one number, or one per run.
    most
        The largest sum of the multipliers.
    """

    metric: Metric
    target: float | np.ndarray = 0.0
    rate: float | np.ndarray = 0.5
    most: float = 5.0

    def __post_init__(self) -> None:
        check_one_threshold(self.metric)
        if not check_number("most", self.most, finite=False) > 0:
            raise FedgftError(f"must be positive, not {self.most:g}", field="most")

    reads: tuple[str, ...] = ()

    def init(self, count: np.ndarray) -> tuple[None, None, int, int]:
        """Return the multipliers and the cotangent, which are not known yet, and two numbers.

        These are the numbers of classes and of measured models.
        """
        check_number_per_run("target", self.target, least=0, runs=len(count))
        check_number_per_run("lam", self.rate, least=0, runs=len(count))
        return None, None, count.shape[2], 0

    def update(self, state: tuple, cohort: Cohort, reports: ClientReports) -> tuple:
        """Return the state after the sums of a model; the untrained one changes nothing."""
        multipliers, _, classes, measured = state
        mean = cohort.mean(client_means(self.metric, reports.sums, "hard"))
        known = np.asarray((mean[:, 1] > 0).all((-2, -1)))
        rates = self.metric.rates(np.where(known[:, None, None, None], mean, 1.0))
        pooled = mean.sum(-1, keepdims=True)
        apart = rates - self.metric.rates(np.where(known[:, None, None, None], pooled, 1.0))
        if multipliers is None:
            multipliers = np.zeros((2, *apart.shape))
        if measured:
            slack = per_run(self.target, len(mean), 2) / 2
            push = np.stack((apart - slack, -apart - slack)) * known[:, None, None]
            raised = np.maximum(multipliers + per_run(self.rate, len(mean), 2) * push, 0.0)
            multipliers = project_to_ball(raised, self.most)
        force = multipliers[0] - multipliers[1]
        v = _cotangent(self.metric, force, mean, pooled)
        return multipliers, np.where(known[:, None, None, None], v, 0.0), classes, measured + 1

    def costs(self, state: tuple) -> Price | None:
        """Return what each decision costs a row, (r, label, group, class); None: not known yet."""
        _, v, classes, _ = state
        return None if v is None else price(self.metric, v, classes)

    def terms(self, state: tuple, cohort: Cohort) -> LossTerms:
        """Return the matrices M as weights (their sums) and labels (their shares)."""
        cost = self.costs(state)
        if cost is None:
            return LossTerms()
        matrix = np.eye(cost.shape[-1])[:, None, :] - cost
        low = matrix.min((1, 2, 3), keepdims=True)
        matrix = matrix + np.where(low < 0, SMALLEST - low, 0.0)
        weights = matrix.sum(-1)
        return LossTerms(weights[cohort.run], (matrix / weights[..., None])[cohort.run])


def project_to_ball(multipliers: np.ndarray, most: float) -> np.ndarray:
    """Return the nearest multipliers (2, r, v, g) >= 0 whose sum in each run is at most `most`."""
    if np.isinf(most):
        return multipliers
    runs = multipliers.shape[1]
    flat = np.moveaxis(multipliers, 1, 0).reshape(runs, -1)
    nearest = most * project_to_simplex(flat / most)
    flat = np.where(flat.sum(1, keepdims=True) > most, nearest, flat)
    return np.moveaxis(flat.reshape(runs, 2, *multipliers.shape[2:]), 0, 1)


def _cotangent(
    metric: Metric, force: np.ndarray, mean: np.ndarray, pooled: np.ndarray
) -> Statistics:
    """Return d<force, rates - pooled rates>/dS; `pooled` has one group."""
    of_all = metric.through_rates(-force.sum(-1, keepdims=True), pooled)
    return metric.through_rates(force, mean) + of_all
