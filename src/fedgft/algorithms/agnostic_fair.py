"""AgnosticFair's fairness term: the covariance of group and logit, as a price of the logit.

Du, Xu, Wu & Tong, "Fairness-aware Agnostic Federated Learning", SDM 2021, with the covariance of
Zafar et al. (2017). For each group g with the indicator a_g, its share s_g of the rows, and the
logit z of the second class, over all rows of all clients:

    cov_g = mean of (a_g - s_g) z            loss = CE + lam sum_g cov_g^2

The server measures cov_g once per round, and clients add 2 lam sum_g cov_g (a_g - s_g) z. A term
that is linear in the logit shifts the label of cross-entropy, so it enters as `LossTerms.labels`.
For equal opportunity, means are over the rows of label 1. The agnostic half of the published method
weighs single rows by kernels of their features; sums by label and group cannot express it.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.loss_rules import ClientReports, LossTerms, per_run
from fedgft.algorithms.weightings import Cohort
from fedgft.errors import FedgftError
from fedgft.metrics import Metric
from fedgft.validation import check_number_per_run

EVENTS = {"sp": (1.0, 1.0), "eop": (0.0, 1.0)}
"Which labels count, by metric."


@dataclass(frozen=True)
class BoundaryCovariance:
    """A penalty on the covariance of group and logit.

    Parameters
    ----------
    metric
        "sp" or "eop" of the catalog.
    lam
        Strength: one number, or one per run.
    """

    metric: Metric
    lam: float | np.ndarray = 2.0
    reads: tuple[str, ...] = ("logits",)

    def __post_init__(self) -> None:
        if self.metric.name not in EVENTS:
            text = f"agnostic-fair takes sp and eop, not {self.metric.name}"
            raise FedgftError(text, field="metric", kind="unsupported")

    def init(self, count: np.ndarray) -> np.ndarray:
        """Return the price of the logit of each row, (r, label, group), which is zero."""
        check_number_per_run("lam", self.lam, least=0, runs=len(count))
        if count.shape[2] != 2:
            text = f"agnostic-fair decides between two classes, and there are {count.shape[2]}"
            raise FedgftError(text, kind="unsupported")
        return np.zeros((len(count), *count.shape[2:]))

    def update(self, state: np.ndarray, cohort: Cohort, reports: ClientReports) -> np.ndarray:
        """Return the price 2 lam sum_g cov_g (a_g - s_g) of the logit of each row."""
        event = np.array(EVENTS[self.metric.name])[:, None]
        rows = cohort.sum(reports.sums.count)
        counted = event * rows[..., :-1]
        total = np.maximum(counted.sum((1, 2)), 1.0)[:, None]
        share = counted.sum(1) / total
        logits = event * cohort.sum(reports.read_logits())[..., :-1]
        covariance = logits.sum(1) / total - share * logits.sum((1, 2))[:, None] / total
        own = 2 * per_run(self.lam, len(state), 1) * covariance
        scale = rows.sum((1, 2))[:, None] / total  # clients take means over all of their rows
        price = scale * (own - (own * share).sum(1, keepdims=True))
        table = np.zeros_like(state)
        table[..., :-1] = event * price[:, None, :]
        return table

    def terms(self, state: np.ndarray, cohort: Cohort) -> LossTerms:
        """Return labels shifted by the price, because cross-entropy pulls z by p - label."""
        shift = state[cohort.run]
        one_hot = np.broadcast_to(np.eye(2)[:, None, :], (*shift.shape, 2))
        return LossTerms(labels=one_hot + np.stack((shift, -shift), axis=-1))
