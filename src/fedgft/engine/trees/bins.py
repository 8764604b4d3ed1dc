"""Bins of columns: the values at which trees may split, agreed from counts by value.

Every client counts how often each value of a column occurs in its training rows. The counts of all
clients add up, and the bins follow from the sums alone, so they are the bins of the pooled rows.

    numbers      bins of about equal size; a value that fills a bin has one of its own
    categories   one bin per level; if there are more levels than bins, the rarest share the last
    missing      a bin of its own behind the others, also for categories that are not known
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedgft.compiled import exact_jit
from fedgft.engine.threads import share_work

MAX_BINS = 255  # of values; with the bin of missing values a code fits one byte
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Bins:
    """The bins of all columns of a federation.

    Parameters
    ----------
    upper
        Per column: the largest value of each bin, ascending; empty for categories.
    level_bins
        Per column: the bin of each level; empty for numbers.
    """

    upper: tuple[np.ndarray, ...]
    level_bins: tuple[np.ndarray, ...]

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of bins of each column, that of missing values included."""
        pairs = zip(self.upper, self.level_bins, strict=True)
        return np.array([len(u) + 1 + (int(b.max()) + 1 if len(b) else 0) for u, b in pairs])

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where the bins of each column begin in a histogram, and the number of all bins."""
        return np.concatenate(([0], np.cumsum(self.sizes)))

    @cached_property
    def upper_table(self) -> np.ndarray:
        """(f, MAX_BINS): `upper`, padded."""
        return _pad(self.upper, MAX_BINS)

    @cached_property
    def level_table(self) -> np.ndarray:
        """(f, most levels): `level_bins`, padded."""
        return _pad(self.level_bins, int(self.level_counts.max(initial=0)))

    @cached_property
    def level_counts(self) -> np.ndarray:
        """Number of levels of each column, (f,)."""
        return np.array([len(levels) for levels in self.level_bins])

    def encode(self, fields: np.ndarray, rows: np.ndarray, out: np.ndarray, threads: int) -> None:
        """Fill `out`, (f, n) uint8, with the bins of `rows` of `fields`, (all rows, f)."""
        missing = self.sizes - 1

        def encode_columns(begin: int, end: int) -> None:
            for f in range(begin, end):
                column = fields[rows, f].astype(np.float64)
                known = self.level_bins[f] if len(self.level_bins[f]) else self.upper[f]
                encode = _encode_levels if len(self.level_bins[f]) else _encode_numbers
                encode(column, known, missing[f], out[f])

        share_work(encode_columns, np.full(len(self.upper), len(rows)), threads)


def _pad(arrays: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Return arrays as the rows of one, with zeros behind each."""
    out = np.zeros((len(arrays), width), arrays[0].dtype if arrays else np.float64)
    for i, array in enumerate(arrays):
        out[i, : len(array)] = array
    return out


def agree_on_bins(
    fields: np.ndarray,
    rows: np.ndarray,
    level_counts: Sequence[int],
    *,
    most: int = MAX_BINS,
    least_rows: int = 1,
    threads: int = 1,
) -> Bins:
    """Return the bins for training rows.

    Parameters
    ----------
    fields, rows
        (all rows, f) numbers, indices of categories, or NaN; and the training rows of all clients.
    level_counts
        Per column: the number of its levels; 0 for numbers.
    most
        The largest number of bins per column.
    least_rows
        The fewest training rows of a bin of numbers; neighbors are merged until they have as many.
    threads
        The number of threads.
    """
    width = len(level_counts)
    upper = [np.empty(0) for _ in range(width)]
    level_bins = [np.empty(0, np.int64) for _ in range(width)]

    def read_columns(begin: int, end: int) -> None:
        for f in range(begin, end):
            column = fields[rows, f]
            known = column[~np.isnan(column)]
            if level_counts[f]:
                counts = np.bincount(known.astype(np.int64), minlength=level_counts[f])
                level_bins[f] = merge_rare_levels(counts, most)
            else:
                values, counts = count_values(known)
                upper[f] = place_edges(values, counts, most=most, least_rows=least_rows)

    share_work(read_columns, np.full(width, len(rows)), threads)
    return Bins(tuple(upper), tuple(level_bins))


def count_values(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the different values of a column in ascending order, and how often each occurs."""
    values = np.sort(column)
    ends = np.flatnonzero(np.append(values[1:] != values[:-1], [True] * (len(values) > 0)))
    return values[ends], np.diff(ends, prepend=-1)


def place_edges(
    values: np.ndarray, counts: np.ndarray, *, most: int = MAX_BINS, least_rows: int = 1
) -> np.ndarray:
    """Return the largest value of each bin, float64, from how often each value occurs.

    Parameters
    ----------
    values, counts
        Different values in ascending order, and the number of rows with each.
    most, least_rows
        The largest number of bins, and the fewest rows of a bin.
    """
    if not len(values):
        return np.empty(0)
    size = 0.0 if len(values) <= most else counts.sum() / most
    is_heavy = counts >= size if size else np.zeros(len(values), bool)
    rest = most - int(is_heavy.sum())
    share = counts[~is_heavy].sum() / max(rest, 1) if size else 0.0
    ends = np.empty(len(values), np.bool_)
    _close_bins(counts.astype(np.float64), is_heavy, max(share, least_rows), ends)
    found = values[ends].astype(np.float64)
    while len(found) > most:  # heavy values cut the others into pieces that are too small
        found = np.concatenate((found[:-1][1::2], found[-1:]))
    return found


def merge_rare_levels(counts: np.ndarray, most: int) -> np.ndarray:
    """Return the bin of each level: one each, or the last one for all but the most frequent."""
    if len(counts) <= most:
        return np.arange(len(counts))
    frequent = np.sort(np.argsort(-counts, kind="stable")[: most - 1])
    bins = np.full(len(counts), most - 1)
    bins[frequent] = np.arange(most - 1)
    return bins


@exact_jit
def _close_bins(counts, is_heavy, size, ends):
    """Mark the last value of each bin: a heavy one alone, others in bins of `size` rows or more."""
    filled = 0.0
    for i in range(len(counts)):
        filled += counts[i]
        before_heavy = i + 1 < len(counts) and is_heavy[i + 1] and not is_heavy[i]
        ends[i] = is_heavy[i] or before_heavy or filled >= size
        if ends[i]:
            filled = 0.0
    ends[len(counts) - 1] = True
    if filled > 0 and filled < size:  # the last bin is too small: join it with the one before
        for i in range(len(counts) - 2, -1, -1):
            if ends[i]:
                ends[i] = is_heavy[i]
                break


@exact_jit
def _encode_numbers(column, upper, missing, out):
    """Set `out` to the first bin whose largest value is at least the number."""
    last = len(upper) - 1
    for i in range(len(column)):
        x = column[i]
        if x != x:
            out[i] = missing
            continue
        low = 0
        size = len(upper)
        while size > 1:
            half = size // 2
            low = low + half if upper[low + half - 1] < x else low
            size -= half
        out[i] = min(low, last) if last >= 0 else missing


@exact_jit
def _encode_levels(column, level_bins, missing, out):
    for i in range(len(column)):
        x = column[i]
        is_known = x >= 0 and x < len(level_bins)
        out[i] = level_bins[np.int64(x)] if is_known else missing
