"""FairGrad, federated: weights of rows that grow where a group is treated worse.

Maheshwari & Perrot, "FairGrad: Fairness Aware Gradient Descent", TMLR 2023; federated as
Fed-FairGrad in the library declearn. For each condition v and group a, F_va is the rate of
decisions of the group minus that of all rows. The server moves one multiplier for each side:

    lam_va <- max(0, lam_va + eta (F_va - eps))          del_va <- max(0, del_va - eta (F_va + eps))

and a row of label y and group a, which has the share P of all rows, has the weight

    w = 1 + sum (lam - del) dF / d error(y, a) / P

where error(y, a) is the share of wrong decisions among these rows. A weight may become negative;
the row then pushes the model away from its own label. FairGrad takes a step of eta = 0.01 in every
batch; with one step per round, eta must be larger by about the number of batches. For statistical
parity it counts each gap twice, for both decisions, so its eta is half of this one. declearn uses
w n_yak / n as the weight of a row in a mean over client k's batch, which gives rows of small cells
a small weight before fairness begins; here w is the weight itself, so that training starts at
FedAvg.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.fedfact import DualAscent
from fedgft.algorithms.loss_rules import ClientReports, LossTerms
from fedgft.algorithms.weightings import Cohort
from fedgft.errors import FedgftError
from fedgft.metrics import Metric, check_one_threshold


@dataclass(frozen=True)
class ErrorWeights:
    """Row weights that follow the rates of decisions.

    Parameters
    ----------
    metric
        The metric whose rates are made equal.
    lam
        eta, the step of the multipliers: one number, or one per run.
    slack
        eps, by which a group's rate may differ from that of all rows.
    """

    metric: Metric
    lam: float | np.ndarray = 0.01
    slack: float = 1e-6
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_one_threshold(self.metric)

    def init(self, count: np.ndarray) -> tuple:
        """Return the state of the multipliers, and the number of classes."""
        if count.shape[2] != 2:
            text = f"fairgrad decides between two classes, and there are {count.shape[2]}"
            raise FedgftError(text, kind="unsupported")
        return self._ascent.init(count)

    def update(self, state: tuple, cohort: Cohort, reports: ClientReports) -> tuple:
        """Return the state after the sums of a model; the untrained one changes nothing."""
        return self._ascent.update(state, cohort, reports)

    def terms(self, state: tuple, cohort: Cohort) -> LossTerms:
        """Return one plus what a wrong decision costs a row more than the right one."""
        cost = self._ascent.costs(state)
        if cost is None:
            return LossTerms()
        extra = (cost[..., 1] - cost[..., 0])[cohort.run]
        return LossTerms(1 + np.stack((extra[:, 0], -extra[:, 1]), axis=1))

    @property
    def _ascent(self) -> DualAscent:
        return DualAscent(self.metric, 2 * self.slack, rate=self.lam, most=np.inf)
