"""Standardisation without pooling: clients send counts, sums and sums of squares, never rows.

    mean = sum_k s_k / n,    spread^2 = sum_k q_k / n - mean^2,    n = sum_k n_k

with s_k and q_k client k's sums of x and of x^2. Sums add over clients, so any grouping of the
clients gives one answer. Float64 throughout; the subtraction is safe because the data set was
brought to units of its own spread first (`Dataset.standardised`).
"""

from dataclasses import dataclass, replace

import numpy as np

from fedgft.data.dataset import Federation

CHUNK_BYTES = 16 << 20  # of float64 rows at a time
CONSTANT = 1e-11  # a variance below this share of the mean square is rounding, not spread


@dataclass(frozen=True, eq=False)
class Moments:
    """What each client sends, one row a client. Law: sums of clients are clients' sums."""

    count: np.ndarray  # (k,)
    sum: np.ndarray  # (k, d)
    square: np.ndarray  # (k, d)


def moments(federation: Federation) -> Moments:
    """Every client's sums over its own training rows, a chunk of rows at a time."""
    features, rows, offsets = federation.dataset.features, federation.rows, federation.offsets
    width = features.shape[1]
    total = np.zeros((federation.num_clients, width))
    square = np.zeros_like(total)
    step = max(1, CHUNK_BYTES // (8 * max(1, width)))
    for start in range(0, len(rows), step):
        values = features[rows[start : start + step]].astype(np.float64)
        stop = start + len(values)
        begins = np.clip(offsets[:-1], start, stop)
        present = np.flatnonzero(np.clip(offsets[1:], start, stop) > begins)
        cuts = begins[present] - start
        total[present] += np.add.reduceat(values, cuts, axis=0)
        np.square(values, out=values)
        square[present] += np.add.reduceat(values, cuts, axis=0)
    return Moments(federation.sizes.astype(np.float64), total, square)


def pooled(moments: Moments) -> tuple[np.ndarray, np.ndarray]:
    """Mean and spread of all rows together; a constant column has spread one."""
    count = moments.count.sum()
    mean = moments.sum.sum(axis=0) / count
    raw = moments.square.sum(axis=0) / count
    variance = raw - mean**2
    varies = variance > CONSTANT * raw
    return mean, np.sqrt(np.where(varies, variance, 1.0))


def standardise(federation: Federation) -> Federation:
    """The federation whose models see its training rows with mean 0 and spread 1."""
    if federation.dataset.images:  # constants have done it, without a look at anybody's pictures
        return federation
    mean, spread = pooled(moments(federation))
    return replace(federation, mean=mean, spread=spread)


def raw_scaling(federation: Federation) -> tuple[np.ndarray, np.ndarray]:
    """Mean and spread by which the federation's models see the columns as the table has them."""
    data, width = federation.dataset, federation.dataset.features.shape[1]
    mean = np.zeros(width) if federation.mean is None else federation.mean
    spread = np.ones(width) if federation.spread is None else federation.spread
    centre = np.zeros(width) if data.centre is None else data.centre
    scale = np.ones(width) if data.scale is None else data.scale
    return centre + scale * mean, scale * spread
