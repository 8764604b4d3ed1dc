"""The choice of a strength for each replicate, which reads the inner rows and nothing else."""

import numpy as np

from fedgft.bench.scores import Outcome
from fedgft.metrics import Metric


def choose_candidates(outcome: Outcome, metric: Metric, target: float) -> np.ndarray:
    """Return the candidate of each replicate for a target, (seed,).

    It is the most accurate on the inner rows among those whose gap there is at most the target, or
    at most the noise floor of these rows if that is larger. If there is none, it is the one with
    the smallest gap on the inner rows. A candidate that diverged is never chosen if another is
    left.

    Parameters
    ----------
    outcome
        Counts with the leading axes (candidate, seed).
    metric
        The metric whose gap is limited.
    target
        The largest gap.
    """
    accuracy = outcome.accuracy("inner")
    gap = outcome.gap(metric, "inner")
    limit = np.maximum(target, outcome.floor(metric, "inner"))
    known = np.isfinite(gap) & np.isfinite(accuracy)
    within = known & (gap <= limit)
    best = np.argmax(np.where(within, accuracy, -np.inf), axis=0)
    fairest = np.argmin(np.where(known, gap, np.inf), axis=0)
    return np.where(within.any(axis=0), best, fairest)


def take_candidates(outcome: Outcome, chosen: np.ndarray) -> Outcome:
    """Return the counts of one candidate per replicate, with the leading axis (seed,)."""
    return outcome[chosen, np.arange(len(chosen))]
