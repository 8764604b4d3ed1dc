"""Fair at every threshold: a penalty on the groups' distributions of scores.

Statistical parity at one threshold says little about decisions at another one. With the share
F_g(t) of the rows of group g whose score is at most t, and the mean Fbar of the groups' F_g,

    J = 2 sum_g int (F_g(t) - Fbar(t))^2 dt          with two groups: int (F_0(t) - F_1(t))^2 dt

is the squared gap averaged over all thresholds; it is also the squared MMD with the energy kernel
(Cramer's distance) of Rychener et al., "Fair Federated Learning by function tracking", AISTATS
2025. A row of group g with the score p pays, for each unit by which its score rises,

    dJ/dp = -4 (F_g(p) - Fbar(p)) / n_g

so the server needs the groups' histograms of scores, which are sums, and sends back one curve per
group. For equal opportunity only rows of label 1 count. `fedgft --metric sp@all` uses it.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.loss_rules import ClientReports, LossTerms, per_run
from fedgft.algorithms.weightings import Cohort
from fedgft.errors import FedgftError
from fedgft.metrics import Metric
from fedgft.validation import check_number_per_run

EVENTS = {"sp@all": (1.0, 1.0), "eop@all": (0.0, 1.0)}
"Which labels count, by metric."
SMOOTHING = 0.2
"""The share of the new curve in a round. A curve answers the last model; without smoothing, strong
penalties would overshoot and the models of successive rounds would oscillate."""


@dataclass(frozen=True)
class EveryThreshold:
    """The penalty lam J on the distance of the groups' distributions of scores.

    Parameters
    ----------
    metric
        "sp@all" or "eop@all".
    lam
        Strength: one number, or one per run.
    """

    metric: Metric
    lam: float | np.ndarray
    reads: tuple[str, ...] = ("histograms",)

    def __post_init__(self) -> None:
        if self.metric.name not in EVENTS:
            text = f"at every threshold are {' and '.join(EVENTS)}, not {self.metric.name}"
            raise FedgftError(text, field="metric", kind="unsupported")

    def init(self, count: np.ndarray) -> np.ndarray | None:
        """Return the curves, which are not known yet."""
        check_number_per_run("lam", self.lam, least=0, runs=len(count))
        if count.shape[2] != 2:
            text = f"{self.metric.name} is for two classes, and there are {count.shape[2]}"
            raise FedgftError(text, field="metric", kind="unsupported")
        return None

    def update(
        self, state: np.ndarray | None, cohort: Cohort, reports: ClientReports
    ) -> np.ndarray:
        """Return the curve of each cell, (r, label, group, bins), from the groups' histograms."""
        event = np.array(EVENTS[self.metric.name])
        histograms = cohort.sum(reports.read_histograms())
        rows = histograms.sum((1, 2, 3))
        below = np.einsum("y,rygb->rgb", event, histograms[:, :, :-1])
        counted = below.sum(-1, keepdims=True)
        known = (counted > 0).all(1, keepdims=True)
        share = np.cumsum(below, -1) - below / 2  # up to the middle of each bin
        share = share / np.where(counted > 0, counted, 1.0)
        apart = share - share.mean(1, keepdims=True)
        slope = -4 * rows[:, None, None] / np.where(counted > 0, counted, 1.0) * apart
        slope = np.where(known, per_run(self.lam, len(rows), 2) * slope, 0.0)
        curve = np.zeros_like(histograms)
        curve[:, :, :-1] = event[:, None, None] * slope[:, None]
        return SMOOTHING * curve + (1 - SMOOTHING) * (0.0 if state is None else state)

    def terms(self, state: np.ndarray | None, cohort: Cohort) -> LossTerms:
        """Return the curves of the clients."""
        return LossTerms() if state is None else LossTerms(curve=state[cohort.run])
