"""Standardisation without pooling: clients send a few sums, never rows.

    mean = sum_k s_k / n,    spread^2 = sum_k (q_k + n_k (s_k / n_k - mean)^2) / n,    n = sum_k n_k

with s_k client k's sum of x and q_k its sum of squares about its own mean s_k / n_k. Squares about
zero would add too, but of times in seconds since 1970 nothing but rounding is left once the square
of the mean is taken off them again. Float64 throughout.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedgft.arguments import instance
from fedgft.data.dataset import Federation
from fedgft.errors import FedgftError

CHUNK_BYTES = 16 << 20  # of float64 rows at a time
CONSTANT = 1e-12  # a spread below this share of the mean is rounding; float32 can hold 1e-7


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over some rows, by column. Law: `a + b` are those of the rows of both."""

    count: np.ndarray  # (d,): a site may lack some values of a column
    sum: np.ndarray  # (d,)
    around: np.ndarray  # (d,): squares of the distances to these rows' own mean

    @classmethod
    def of(cls, values: np.ndarray) -> "Moments":
        """Of rows (n, d) in float64."""
        total = values.sum(axis=0)
        around = np.square(values - total / max(1, len(values))).sum(axis=0)
        return cls(np.full(len(total), float(len(values))), total, around)

    def __add__(self, other: "Moments") -> "Moments":
        count = self.count + other.count
        between = (self.mean - other.mean) ** 2 * self.count * other.count / np.maximum(count, 1)
        return Moments(count, self.sum + other.sum, self.around + other.around + between)

    @property
    def mean(self) -> np.ndarray:
        return self.sum / np.maximum(self.count, 1)


def spread_of(mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """What a model divides by; a constant column has spread one."""
    return np.sqrt(np.where(variance > (CONSTANT * mean) ** 2, variance, 1.0))


def moments(federation: Federation) -> Moments:
    """Of all training rows, a chunk at a time: which client holds a row makes no difference."""
    features, rows = federation.dataset.features, federation.rows
    step = max(1, CHUNK_BYTES // (8 * max(1, features.shape[1])))
    found = Moments.of(np.empty((0, features.shape[1])))
    for start in range(0, len(rows), step):
        found += Moments.of(features[rows[start : start + step]].astype(np.float64))
    return found


def standardise(federation: Federation) -> Federation:
    """The federation whose models see its training rows with mean 0 and spread 1."""
    instance("federation", federation, Federation, "partition() makes one of a Dataset")
    features = federation.dataset.features
    if features.ndim not in (2, 4):
        raise FedgftError(
            f"federation: standardise scales the columns of a table (n, d), and the features have "
            f"{features.ndim} axes; scale them before you make the Dataset"
        )
    if not len(federation.rows) and not federation.dataset.images:
        raise FedgftError("federation: no client has a training row to take a mean from")
    if federation.dataset.images:  # constants have done it, without a look at anybody's pictures
        return federation
    sums = moments(federation)
    spread = spread_of(sums.mean, sums.around / np.maximum(sums.count, 1))
    return replace(federation, mean=sums.mean, spread=spread)


def raw_scaling(federation: Federation) -> tuple[np.ndarray, np.ndarray]:
    """Mean and spread by which the federation's models see the columns as the table has them."""
    data, width = federation.dataset, federation.dataset.features.shape[1]
    mean = np.zeros(width) if federation.mean is None else federation.mean
    spread = np.ones(width) if federation.spread is None else federation.spread
    centre = np.zeros(width) if data.centre is None else data.centre
    scale = np.ones(width) if data.scale is None else data.scale
    return centre + scale * mean, scale * spread
