"""The clients that take part in one round, for all runs of a batch at once."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics import Kind, Metric
from fedgft.sums import Sums
from fedgft.types import Statistics
from fedgft.validation import check_number_per_run


@dataclass(frozen=True)
class Cohort:
    """The units of one round; a unit is one client of one run.

    Parameters
    ----------
    run, client
        (u,): unit i is client `client[i]` of run `run[i]`. Units are sorted by run.
    weight
        (u,): sums to one within each run.
    bounds
        (r + 1,): run r owns the units `bounds[r]:bounds[r + 1]`.
    full
        Whether every client of every run takes part.
    """

    run: np.ndarray
    client: np.ndarray
    weight: np.ndarray
    bounds: np.ndarray
    full: bool

    def __len__(self) -> int:
        return len(self.run)

    def part(self, at: slice) -> "Cohort":
        """The units of a slice, in the same order; some runs may have none of them."""
        start, stop, _ = at.indices(len(self))
        bounds = np.clip(self.bounds, start, stop) - start
        return Cohort(self.run[at], self.client[at], self.weight[at], bounds, full=False)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Add up `values` (u, ...) over the units of each run: (r, ...)."""
        return np.add.reduceat(values, self.bounds[:-1], axis=0)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean of `values` (u, ...) in each run, by the weights of the cohort: (r, ...)."""
        return self.sum(values * self.weight.reshape(-1, *[1] * (values.ndim - 1)))

    def normalized(self, values: np.ndarray) -> np.ndarray:
        """Scale `values` (u,) to sum to one within each run.

        A run whose values are all zero gets the weights of the cohort.
        """
        total = self.sum(values)[self.run]
        return np.where(total > 0, values / np.where(total > 0, total, 1.0), self.weight)


def client_means(metric: Metric, tally: Sums, kind: Kind = "soft") -> Statistics:
    """S_k: the statistics of each unit as means over its rows; zero for a unit without rows."""
    return tally.statistics(metric, kind) / np.maximum(tally.rows(), 1)[:, None, None, None]


def check_strength(name: str, value: Any) -> Any:
    """Return a strength, one number or one per run; raise `FedgftError` unless all are >= 0."""
    value = check_number_per_run(name, value)
    if np.any(np.asarray(value) < 0) or not np.all(np.isfinite(value)):
        raise FedgftError(f"`{name}` must be a number >= 0, got {value}")
    return value


def check_runs(name: str, value: Any, runs: int) -> None:
    """Raise `FedgftError` unless `value` is one number, or one for each of `runs` runs."""
    shape = np.shape(check_number_per_run(name, value))
    if shape not in ((), (runs,)):
        raise FedgftError(
            f"`{name}` must be one number, or one for each of {runs} run(s), and its shape is "
            f"{shape}"
        )
