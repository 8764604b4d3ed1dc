"""Beta calibration of scores (Kull, Silva Filho and Flach, AISTATS 2017).

A score p becomes q with logit q = a log p - b log(1 - p) + c. The numbers a >= 0, b >= 0 and c
maximize the likelihood of the labels: a logistic regression on log p and -log(1 - p). So q rises
with p, and a threshold of q is a threshold of p.
"""

from dataclasses import dataclass
from importlib import import_module

import numpy as np

CLIP = 1e-6  # scores nearer to 0 or 1 than this count as this far
MOST = 50.0  # largest coefficient: labels that a threshold separates have none
BISECTIONS = 60


@dataclass(frozen=True)
class BetaCalibration:
    """logit q = a log p - b log(1 - p) + c; by default, q = p."""

    a: float = 1.0
    b: float = 1.0
    c: float = 0.0

    @classmethod
    def fit(cls, scores: np.ndarray, labels: np.ndarray) -> "BetaCalibration":
        """Return the most likely calibration; q = p if all labels are the same.

        Parameters
        ----------
        scores
            (n,) The probability of the positive class.
        labels
            (n,) 0 or 1.
        """
        if len(labels) == 0 or labels.min() == labels.max():
            return cls()
        features = _take_logs(scores)
        sign = 1.0 - 2.0 * labels

        def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
            margin = sign * (features @ x)
            chance = sign * np.exp(-np.logaddexp(0.0, -margin)) / len(labels)
            return float(np.logaddexp(0.0, margin).mean()), features.T @ chance

        optimize = import_module("scipy.optimize")  # slow to import
        found = optimize.minimize(
            loss,
            np.array([1.0, 1.0, 0.0]),
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, MOST), (0.0, MOST), (-MOST, MOST)],
            options={"ftol": 1e-14, "gtol": 1e-9, "maxiter": 1000},
        )
        return cls(*map(float, found.x))

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Return the calibrated scores."""
        return 1 / (1 + np.exp(-self._logit(scores)))

    def _logit(self, scores: np.ndarray) -> np.ndarray:
        return _take_logs(scores) @ np.array([self.a, self.b, self.c])

    def invert(self, value: float) -> float:
        """Return the smallest score whose calibrated score is at least `value`.

        It is 0 if all are, and infinity if none is.
        """
        if not 0 < value < 1:
            return 0.0 if value <= 0 else float("inf")
        wanted = np.log(value / (1 - value))
        low, high = CLIP, 1 - CLIP
        if float(self._logit(np.array([low]))[0]) >= wanted:
            return 0.0
        if float(self._logit(np.array([high]))[0]) < wanted:
            return float("inf")
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if float(self._logit(np.array([middle]))[0]) >= wanted:
                high = middle
            else:
                low = middle
        return high


def _take_logs(scores: np.ndarray) -> np.ndarray:
    """Return log p, -log(1 - p) and 1, (n, 3)."""
    p = np.clip(scores, CLIP, 1 - CLIP).astype(np.float64)
    return np.stack((np.log(p), -np.log1p(-p), np.ones(len(p))), 1)
