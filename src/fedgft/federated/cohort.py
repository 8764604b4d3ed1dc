"""The clients that take part in one round, of all runs at once."""

from dataclasses import dataclass

import numpy as np

from fedgft.metrics import Kind, Metric, Tally
from fedgft.types import Statistics


@dataclass(frozen=True)
class Cohort:
    """Unit i is client `client[i]` of run `run[i]`; units are sorted by run.

    `weight` sums to one within a run; run r owns the units `bounds[r]:bounds[r + 1]`.
    """

    run: np.ndarray
    client: np.ndarray
    weight: np.ndarray
    bounds: np.ndarray
    full: bool  # everybody takes part

    def __len__(self) -> int:
        return len(self.run)

    def part(self, at: slice) -> "Cohort":
        """Some of the units, in their order; runs may be left without any."""
        start, stop, _ = at.indices(len(self))
        bounds = np.clip(self.bounds, start, stop) - start
        return Cohort(self.run[at], self.client[at], self.weight[at], bounds, full=False)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Add up over the units of each run, in their fixed order."""
        return np.add.reduceat(values, self.bounds[:-1], axis=0)

    def mean(self, values: np.ndarray) -> np.ndarray:
        return self.sum(values * self.weight.reshape(-1, *[1] * (values.ndim - 1)))

    def normalised(self, values: np.ndarray) -> np.ndarray:
        """Scaled to sum to one within each run; the cohort's own weights where all are zero."""
        total = self.sum(values)[self.run]
        return np.where(total > 0, values / np.where(total > 0, total, 1.0), self.weight)


def client_means(metric: Metric, tally: Tally, kind: Kind = "soft") -> Statistics:
    """S_k: each unit's statistics as means over its rows (zero for a unit without rows)."""
    return tally.statistics(metric, kind) / np.maximum(tally.rows(), 1)[:, None, None, None]
