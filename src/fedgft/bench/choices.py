"""The choice of a strength for each replicate, which reads the inner rows and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedgft.bench.scores import Outcome
from fedgft.metrics import Metric
from fedgft.settings import TARGET_TOLERANCE


@dataclass(frozen=True, eq=False)
class InnerRows:
    """What the inner rows say about each candidate and replicate, (candidate, seed) each.

    Parameters
    ----------
    accuracy, gap, floor
        Accuracy, gap and noise floor; NaN where a run diverged or a group is empty.
    asked
        (candidate,) The target that each candidate was asked for; None if strengths are no targets.
    """

    accuracy: np.ndarray
    gap: np.ndarray
    floor: np.ndarray
    asked: np.ndarray | None = None

    @classmethod
    def of(
        cls, outcome: Outcome, metric: Metric, asked: Sequence[float] | None = None
    ) -> "InnerRows":
        """Measure counts with the leading axes (candidate, seed) on their inner rows."""
        floor = np.asarray(outcome.floor(metric, "inner"))
        accuracy = np.asarray(outcome.accuracy("inner"))
        targets = None if asked is None else np.array(asked)
        return cls(accuracy, outcome.gap(metric, "inner"), floor, targets)

    def choose(self, target: float) -> np.ndarray:
        """Return the candidate of each replicate for a target, (seed,).

        It is the most accurate among those whose gap is at most the target, or at most the noise
        floor if that is larger. If there is none, it is the one with the smallest gap. A method
        that takes targets is asked for this target or a smaller one. A candidate that diverged is
        not chosen unless all have.
        """
        known = np.isfinite(self.gap) & np.isfinite(self.accuracy)
        if self.asked is not None:
            known &= (self.asked <= target + TARGET_TOLERANCE)[:, None]
        within = known & (self.gap <= np.fmax(target, self.floor))
        best = np.argmax(np.where(within, self.accuracy, -np.inf), axis=0)
        fairest = np.argmin(np.where(known, self.gap, np.inf), axis=0)
        return np.where(within.any(axis=0), best, fairest)


def take_candidates(outcome: Outcome, chosen: np.ndarray) -> Outcome:
    """Return the counts of one candidate per replicate, with the leading axis (seed,)."""
    return outcome[chosen, np.arange(len(chosen))]
