"""The scores of each group as counts by bin: what distances and rankings are computed from.

A file states how many rows have a score in each bin, so a share below the edge of a bin is exact.
Where a site merged bins with few rows, the rows of a merged bin may lie anywhere in it. Each sample
therefore holds its counts three times: as estimated, with such rows in the first possible bin, and
with such rows in the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedgft.auditing.rates import MIN_SIGNAL, View
from fedgft.metrics.intervals import FEW
from fedgft.site_sums.tables import possible_cells


@dataclass(frozen=True, eq=False)
class ScoreSamples:
    """The scores of several groups.

    Parameters
    ----------
    groups
        The names of the groups.
    counts
        (3, group, bin): the rows in each bin, as estimated, with rows of uncertain bin in the first
        possible bin, and with such rows in the last one. They may be negative if there is noise.
    noise
        (group, bin): the variance of the noise on each count.
    squares
        (group,): the sum of the squared weights of the rows; the number of rows without weights.
    mean, mean_error
        (group,): the mean score, and how far it may be off; infinite if it is not known.
    """

    groups: tuple[str, ...]
    counts: np.ndarray
    noise: np.ndarray
    squares: np.ndarray
    mean: np.ndarray
    mean_error: np.ndarray

    @cached_property
    def rows(self) -> np.ndarray:
        """The number of rows of each group, or the sum of their weights, (group,)."""
        return self.counts[0].sum(-1)

    @cached_property
    def effective(self) -> np.ndarray:
        """The number of equally weighted rows that say as much, (sum w)^2 / sum w^2, (group,)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.squares > 0, self.rows**2 / self.squares, 0.0)

    @cached_property
    def estimable(self) -> np.ndarray:
        """Whether the group has rows, beyond what noise alone would count, (group,)."""
        return (self.rows > 0) & (self.rows > MIN_SIGNAL * np.sqrt(self.noise.sum(-1)))

    @cached_property
    def enough(self) -> np.ndarray:
        """Whether the group has enough rows for an interval, (group,)."""
        return self.estimable & (self.effective >= FEW)

    @cached_property
    def shares(self) -> np.ndarray:
        """The shares of the rows of each group by bin, (3, group, bin); NaN without rows."""
        return self.counts / np.where(self.estimable, self.rows, np.nan)[:, None]

    @cached_property
    def below(self) -> np.ndarray:
        """The shares of rows below each edge of the bins, (3, group, bin + 1)."""
        rising = np.cumsum(self.shares, -1)
        return np.concatenate((np.zeros_like(rising[..., :1]), rising), -1)

    @property
    def is_noisy(self) -> bool:
        """Whether a site added noise to the counts."""
        return bool(self.noise.any())

    def sampling_variance(self, at: Any, values: np.ndarray) -> np.ndarray:
        """Return the variance, due to sampling, of the mean over the rows of a value of their bin.

        Parameters
        ----------
        at
            The positions of the groups, (...).
        values
            (..., bin): the value of a row in each bin.
        """
        shares = np.clip(self.shares[0][at], 0.0, None)
        one = (shares * values).sum(-1)
        two = (shares * values**2).sum(-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.maximum(two - one**2, 0.0) / np.maximum(self.effective[at] - 1, 1.0)

    def noise_variance(self, at: Any, values: np.ndarray) -> np.ndarray:
        """Return the variance of the same mean that is due to noise on the counts."""
        if not self.is_noisy:
            return np.zeros(values.shape[:-1])
        apart = values - (self.shares[0][at] * values).sum(-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            return (self.noise[at] * apart**2).sum(-1) / self.rows[at] ** 2

    def largest(self, number: int) -> np.ndarray:
        """Return the positions of the groups with the most rows, at most `number`, in order."""
        order = np.argsort(-self.rows, kind="stable")[:number]
        return np.sort(order)


def sample_scores(view: View, score: int = 0, labels: Sequence[int] | None = None) -> ScoreSamples:
    """Return the scores of all groups of a view.

    Parameters
    ----------
    view
        The groups, with histograms.
    score
        The position of the class among the classes with scores.
    labels
        The labels whose rows are meant, by position. None: all rows.
    """
    classes = len(view.spec.classes)
    chosen = list(range(classes) if labels is None else labels)
    tables = (view.histogram, view.shifted_histogram(0), view.shifted_histogram(1))
    counts = np.stack([table[chosen, :-1, score].sum(0) for table in tables])
    rows = view.sums.count[:, chosen, :-1].sum((0, 1))
    scored = scored_class(view, score)
    totals = view.sums.score[:, chosen, :-1, scored].sum((0, 1))
    unknown = np.zeros_like(totals)
    if view.bin_error is not None:
        unknown = view.bin_error[2][chosen, :-1, score].sum((0, -1))
    if view.unsummed is not None:
        unknown = unknown + view.unsummed[chosen, :-1].sum(0) / counts.shape[-1] / 2
    noise = _noise_by_bin(view)[chosen, :-1].sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(noise.any(-1), np.inf, unknown / rows + 1e-6)
        mean = totals / rows
    return ScoreSamples(view.groups, counts, noise, _squares(view, chosen), mean, error)


def compares_scores(view: View) -> bool:
    """Return whether the scores of the groups can be compared.

    The histograms must hold every row, and every row must belong to one group for certain: the
    groups of rows that were randomized, or known by probability, are not independent.
    """
    return view.has_histograms and has_certain_groups(view)


def has_certain_groups(view: View) -> bool:
    """Return whether every row belongs to one group: not randomized, nor by probability."""
    return view.spec.randomized is None and not view.spec.proxy


def scored_class(view: View, score: int) -> int:
    """Return the position among all classes of the class whose scores are meant."""
    return view.spec.score_classes[score]


def _squares(view: View, labels: list[int]) -> np.ndarray:
    """Return the sum of squared weights by group; the number of rows where there are no weights."""
    if view.squares is None:
        return view.sums.count[:, labels, :-1].sum((0, 1))
    return view.squares[:, labels, :-1].sum((0, 1, -1))


def _noise_by_bin(view: View) -> np.ndarray:
    """Return the variance of the noise on each bin, (label, group, bin).

    A site adds noise to every bin that rows of a decision can have; `View.noise` is their sum.
    """
    possible = possible_cells(view.spec)  # (decision, bin)
    if not view.noise.any():
        return np.zeros((*view.noise.shape[1:3], possible.shape[-1]))
    each = view.noise.sum(0) / np.maximum(possible.sum(-1), 1)
    return np.einsum("ygd,db->ygb", each, possible)
