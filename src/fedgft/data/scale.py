"""Standardization without pooling: clients send a few sums, never rows.

    mean = sum_k s_k / n,    spread^2 = sum_k (q_k + n_k (s_k / n_k - mean)^2) / n,    n = sum_k n_k

with s_k client k's sum of x and q_k its sum of squares about its own mean s_k / n_k. Squares about
zero would add as well, but of times in seconds since 1970 only rounding would be left once the
square of the mean is subtracted. All sums are float64.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.errors import FedgftError
from fedgft.validation import check_instance

CHUNK_BYTES = 16 << 20  # of float64 rows at a time
CONSTANT = 1e-12  # a spread below this share of the mean is rounding; float32 can hold 1e-7


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over some rows, per column. Law: ``a + b`` are the sums over the rows of both.

    Parameters
    ----------
    count
        (d,) values; a site may lack some values of a column.
    sum
        (d,) sum of the values.
    around
        (d,) sum of the squared distances to the mean of these rows.
    """

    count: np.ndarray
    sum: np.ndarray
    around: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> "Moments":
        """Return the sums over rows (n, d) in float64."""
        total = values.sum(axis=0)
        around = np.square(values - total / max(1, len(values))).sum(axis=0)
        return cls(np.full(len(total), float(len(values))), total, around)

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        between = (self.mean - other.mean) ** 2 * self.count * other.count / np.maximum(count, 1)
        return Moments(count, self.sum + other.sum, self.around + other.around + between)

    @property
    def mean(self) -> np.ndarray:
        """(d,), 0 where there is no value."""
        return self.sum / np.maximum(self.count, 1)


def compute_spread(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the standard deviations that a model divides by; 1 for constant columns."""
    return np.sqrt(np.where(variance > (CONSTANT * mean) ** 2, variance, 1.0))


def compute_moments(federation: Federation) -> Moments:
    """Return the sums over all training rows, computed in chunks.

    Which client holds a row makes no difference.
    """
    features = federation.dataset.features
    step = max(1, CHUNK_BYTES // (8 * max(1, features.shape[1])))
    total = Moments.of(np.empty((0, features.shape[1])))
    for start in range(0, len(federation.rows), step):
        rows = federation.rows[start : start + step]
        total += Moments.of(features[rows].astype(np.float64))
    return total


def standardize(federation: Federation) -> Federation:
    """Return the federation whose models receive its training rows with mean 0 and spread 1.

    Images keep the constants of `Federation`: no statistics of pictures are computed.
    """
    check_instance("federation", federation, Federation, "partition() makes one of a Dataset")
    features = federation.dataset.features
    if features.ndim not in (2, 4):
        raise FedgftError(
            "`federation`: standardize scales the columns of a table (n, d), and the features have "
            f"{features.ndim} axes; scale them before you make the Dataset"
        )
    if federation.dataset.images:
        return federation
    if not len(federation.rows):
        raise FedgftError("`federation`: no client has a training row to take a mean from")
    sums = compute_moments(federation)
    spread = compute_spread(sums.mean, sums.around / np.maximum(sums.count, 1))
    return replace(federation, mean=sums.mean, spread=spread)


def get_raw_scaling(federation: Federation) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and spread, (d,) each, in the units of the raw table.

    A model receives ``(raw - mean) / spread``, whether or not the data set was `standardized`.
    """
    data = federation.dataset
    width = data.features.shape[1]
    mean = np.zeros(width) if federation.mean is None else federation.mean
    spread = np.ones(width) if federation.spread is None else federation.spread
    center = np.zeros(width) if data.center is None else data.center
    scale = np.ones(width) if data.scale is None else data.scale
    return center + scale * mean, scale * spread
