"""FedFB: FairBatch between clients; weights of rows by label and group that follow losses.

Zeng, Chen & Lee, "Improving Fairness via Federated Learning", arXiv:2110.15545, after Roh et al.,
"FairBatch", ICLR 2021. With m_yz rows of label y and group z, n_z rows of group z, n rows, and the
summed losses L_yz of the global model, a row has the weight n w_yz / m_yz (statistical parity: n_z
in place of m_yz), and after round t = 1, 2, ...

    statistical parity   w_yz starts at n_z / n, and for z >= 1
        f_z = (L_10 - L_00 + m_00) / n_0 - (L_1z - L_0z + m_0z) / n_z
        w_0z <- w_0z + alpha / sqrt(t) f_z,   w_00 <- w_00 - alpha / sqrt(t) sum_z f_z,
        w_0z in [0, 2 n_z / n],   w_1z = 2 n_z / n - w_0z
    equal opportunity    w_1z starts at m_1z / n, and for z >= 1
        f_z = L_1z / m_1z - L_10 / m_10
        w_1z <- w_1z + alpha / sqrt(t) f_z,   w_10 <- w_10 - alpha / sqrt(t) sum_z f_z,
        w_1z in [0, sum_z m_1z / n]
    equalized odds       as equal opportunity, for both labels

The public code adds m_00 / n_0 once per client and uses the bound of group 0 for all groups; both
are corrected here. Weights follow losses, so the gap of decisions settles near zero, not at it.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.loss_rules import ClientReports, LossTerms, per_run
from fedgft.algorithms.weightings import Cohort
from fedgft.errors import FedgftError
from fedgft.metrics import Metric
from fedgft.validation import check_number_per_run

LABELS = {"eop": (1,), "eo": (0, 1)}
"The labels whose rows are weighed by group, by metric; statistical parity has a rule of its own."


@dataclass(frozen=True)
class FairBatchWeights:
    """Row weights that make losses, and through them rates, equal.

    Parameters
    ----------
    metric
        "sp", "eop" or "eo" of the catalog.
    lam
        alpha, the step of the weights: one number, or one per run.
    """

    metric: Metric
    lam: float | np.ndarray = 0.3
    reads: tuple[str, ...] = ("losses",)

    def __post_init__(self) -> None:
        if self.metric.name not in ("sp", *LABELS):
            text = f"fedfb takes sp, eop and eo, not {self.metric.name}"
            raise FedgftError(text, field="metric", kind="unsupported")

    def init(self, count: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the weights w and the rows m, (r, label, group), and the number of rounds."""
        check_number_per_run("lam", self.lam, least=0, runs=len(count))
        if count.shape[2] != 2:
            text = f"fedfb decides between two classes, and there are {count.shape[2]}"
            raise FedgftError(text, kind="unsupported")
        rows = count.sum(1)[..., :-1]
        return self._normalizer(rows) / rows.sum((1, 2), keepdims=True), rows, 0

    def update(self, state: tuple, cohort: Cohort, reports: ClientReports) -> tuple:
        """Return the state after the losses of a model; the untrained one changes nothing."""
        weights, rows, measured = state
        if measured:
            losses = cohort.sum(reports.read_losses())[..., :-1]
            seen = cohort.sum(reports.sums.count)[..., :-1]
            step = per_run(self.lam, len(weights), 1) / np.sqrt(measured)
            by_parity = self.metric.name == "sp"
            move = _move_for_parity if by_parity else self._move_by_label
            weights = move(weights, rows, losses, seen, step)
        return weights, rows, measured + 1

    def terms(self, state: tuple, cohort: Cohort) -> LossTerms:
        """Return the weights n w_yz / m_yz, or n w_yz / n_z; 1 for rows without a group."""
        weights, rows, _ = state
        total = rows.sum((1, 2), keepdims=True)
        normalizer = self._normalizer(rows)
        table = np.ones((*rows.shape[:2], rows.shape[2] + 1))
        np.divide(total * weights, normalizer, out=table[..., :-1], where=normalizer > 0)
        return LossTerms(table[cohort.run])

    def _normalizer(self, rows: np.ndarray) -> np.ndarray:
        """Return what the weight of a cell is shared by: the rows of its group, or its own."""
        if self.metric.name != "sp":
            return rows
        return np.broadcast_to(rows.sum(1, keepdims=True), rows.shape).astype(np.float64)

    def _move_by_label(
        self,
        weights: np.ndarray,
        rows: np.ndarray,
        losses: np.ndarray,
        seen: np.ndarray,
        step: np.ndarray,
    ) -> np.ndarray:
        """Return the weights after a step toward equal losses within each label."""
        weights = weights.copy()
        shares = rows / rows.sum((1, 2), keepdims=True)
        for label in LABELS[self.metric.name]:
            means = losses[:, label] / np.maximum(seen[:, label], 1.0)
            known = (seen[:, label] > 0) & (seen[:, label, :1] > 0)
            push = step * np.where(known, means - means[:, :1], 0.0)
            push[:, 0] = -push[:, 1:].sum(1)
            most = shares[:, label].sum(1, keepdims=True)
            weights[:, label] = np.clip(weights[:, label] + push, 0.0, most)
        return weights


def _move_for_parity(
    weights: np.ndarray, rows: np.ndarray, losses: np.ndarray, seen: np.ndarray, step: np.ndarray
) -> np.ndarray:
    """Return the weights after a step toward equal rates of positive decisions."""
    of_group = seen.sum(1)
    proxy = (losses[:, 1] - losses[:, 0] + seen[:, 0]) / np.maximum(of_group, 1.0)
    known = (of_group > 0) & (of_group[:, :1] > 0)
    push = step * np.where(known, proxy[:, :1] - proxy, 0.0)
    push[:, 0] = -push[:, 1:].sum(1)
    most = 2 * rows.sum(1) / rows.sum((1, 2))[:, None]
    negatives = np.clip(weights[:, 0] + push, 0.0, most)
    return np.stack((negatives, most - negatives), axis=1)
