"""PUFFLE's local controller: each client tunes its own share of a fairness penalty.

Corbucci, Heikkila, Solans Noguero, Monreale & Kourtellis, "PUFFLE: Balancing Privacy, Utility, and
Fairness in Federated Learning", ECAI 2024. With the gap G of scores on the client's own rows:

    loss = (1 - lam) CE + lam G
    velocity <- momentum velocity + (target - G)         lam <- clip(lam - alpha velocity, 0, 1)

A client's first lam is (G - target) / (1 - target), at least 0. A group that a client lacks has the
rate of all clients' rows. The public code updates lam in every batch and begins anew in each round;
here a client updates it once per round, at the model that it receives. The differential privacy of
the published method is not part of it.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.algorithms.loss_rules import SMALLEST_SHARE, ClientReports, LossTerms, per_run
from fedgft.algorithms.weightings import Cohort, client_means
from fedgft.metrics import Metric, check_one_threshold, price
from fedgft.validation import check_number, check_number_per_run


@dataclass(frozen=True)
class LocalMomentum:
    """Each client's share of the penalty, which follows its own gap of scores.

    Parameters
    ----------
    metric
        The metric whose gap is reduced.
    target
        The gap to leave on each client's rows, as a fraction: one number, or one per run.
    alpha
        The step of the share.
    momentum
        The share of the last velocity that is kept.
    """

    metric: Metric
    target: float | np.ndarray = 0.0
    alpha: float = 0.05
    momentum: float = 0.5
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_one_threshold(self.metric)
        check_number("alpha", self.alpha)
        check_number("momentum", self.momentum)

    def init(self, count: np.ndarray) -> tuple:
        """Return the state of every client: lam (NaN: not measured), velocity, last cotangent.

        The state ends with the number of classes and of measured models.
        """
        check_number_per_run("target", self.target, least=0, runs=len(count))
        velocity = np.zeros(count.shape[:2])
        return np.full_like(velocity, np.nan), velocity, None, count.shape[2], 0

    def update(self, state: tuple, cohort: Cohort, reports: ClientReports) -> tuple:
        """Return the state after each client's own gap; the untrained model changes nothing."""
        share, velocity, cotangents, classes, measured = state
        own = client_means(self.metric, reports.sums)
        filled = _fill_missing(own, cohort.mean(own)[cohort.run])
        gap = self.metric.readout(filled)
        known = np.isfinite(gap)
        gradient = np.where(known[:, None, None, None], self.metric.gradient(filled), 0.0)
        v = np.where((own[:, 1:] > 0) & np.isfinite(gradient), gradient, 0.0)
        if cotangents is None:
            cotangents = np.zeros((*share.shape, *v.shape[1:]))
        if measured:
            at = (cohort.run, cohort.client)
            target = per_run(self.target, len(share))[cohort.run]
            over = target - np.where(known, gap, 0.0)
            moved = self.momentum * velocity[at] + np.where(known, over, 0.0)
            first = np.maximum(-over, 0.0) / np.maximum(1 - target, SMALLEST_SHARE)
            next_share = np.clip(share[at] - self.alpha * moved, 0.0, 1.0)
            is_new = np.isnan(share[at])
            share, velocity, cotangents = share.copy(), velocity.copy(), cotangents.copy()
            cotangents[at] = v
            velocity[at] = np.where(is_new, 0.0, moved)
            share[at] = np.where(is_new, np.where(known, first, 0.0), next_share)
        return share, velocity, cotangents, classes, measured + 1

    def terms(self, state: tuple, cohort: Cohort) -> LossTerms:
        """Return the weight 1 - lam of each row and the price lam <dG/dS, d statistics / dp>."""
        share, _, cotangents, classes, measured = state
        if measured < 2:
            return LossTerms()
        lam = np.nan_to_num(share[cohort.run, cohort.client])
        v = cotangents[cohort.run, cohort.client]
        weights = np.broadcast_to((1 - lam)[:, None, None], (len(lam), classes, v.shape[-1] + 1))
        return LossTerms(weights, price=lam[:, None, None, None] * price(self.metric, v, classes))


def _fill_missing(own: np.ndarray, overall: np.ndarray) -> np.ndarray:
    """Return statistics in which groups without a row of the event have those of all clients."""
    missing = own[:, 1:] <= 0
    return np.where(missing, overall, own)
