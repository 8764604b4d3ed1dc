"""Count the people of each group whose score is above the median score of all people.

Sites send histograms, so scores are known up to a range: a bin, or several bins that a site merged.
The median is in such a range, and so may be people whose place relative to it is unknown. All
results are therefore limits that hold whatever the scores within the ranges are. The two limits are
equal if the median lies between two ranges, or if scores come in steps so large that the range of
the median holds one possible score.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedgft.auditing.rates import View
from fedgft.errors import FedgftError

ROUNDING = 1e-9  # of multiples of a step


@dataclass(frozen=True, eq=False)
class AboveMedian:
    """The median score of all people, and how many people of each group are above it.

    Parameters
    ----------
    median_low, median_high
        The limits of the median; equal if it is known.
    people
        (group,) The number of people.
    low, high
        (group,) The smallest and the largest possible number of people above the median.
    """

    median_low: float
    median_high: float
    people: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def is_exact(self) -> bool:
        """Whether the numbers of people above the median are known."""
        return bool((self.low == self.high).all())


def count_above_median(view: View, *, step: float | None = None) -> AboveMedian:
    """Return the number of people of each group of a view whose score is above the median.

    The median is that of all people with a score, also of those in no group of the view. Of an even
    number of people it is the mean of the two middle scores.

    Parameters
    ----------
    view
        The groups, with histograms of one score (two classes) and without noise.
    step
        The step of the scores, if they are multiples of one: 0.01, for example. None: not known.
    """
    bins = view.histogram.shape[-1]
    # below[end][g, k]: people of group g below k / bins, if the uncertain ones are at an end of
    # their range. At the first end (0), most of them are below.
    below = [_count_below(view.shifted_histogram(end)) for end in (0, 1)]
    sizes = below[0][:, -1]
    total = sizes.sum()
    most, fewest = (each.sum(0) for each in below)
    start = int(np.flatnonzero(most <= math.ceil(total / 2) - 1)[-1])
    stop = int(np.flatnonzero(fewest >= math.floor(total / 2) + 1)[0])
    between = np.flatnonzero((most == total / 2) & (fewest == total / 2))
    values = [] if step is None else _list_multiples(step, start / bins, stop / bins)
    limits = (start / bins, stop / bins)
    if len(between):
        low, high = (sizes - each[:, between[0]] for each in below)
    elif len(values) == 1:
        low, high = (sizes - each[:, stop] for each in below)
        limits = (values[0], values[0])
    else:
        low = sizes - below[0][:, stop]
        others = low.sum() - low
        high = np.minimum(sizes - below[1][:, start], math.floor(total / 2) - others)
    return AboveMedian(*limits, sizes[:-1], low[:-1], np.maximum(low, high)[:-1])


def _count_below(histogram: np.ndarray) -> np.ndarray:
    """Return the number of people (group, edge) below each edge of the bins."""
    counts = histogram[:, :, 0].sum(0)
    return np.concatenate((np.zeros((len(counts), 1)), counts.cumsum(-1)), -1)


def _list_multiples(step: float, low: float, high: float) -> list[float]:
    """Return the multiples of a step in [low, high), or [low, 1] if `high` is 1; at most two."""
    first = math.ceil(low / step - ROUNDING)
    found = [k * step for k in (first, first + 1)]
    found = [x for x in found if x < high - ROUNDING or (high == 1 and x <= 1 + ROUNDING)]
    if not found:
        text = f"no multiple of {step:g} is between {low:g} and {high:g}, where the median score is"
        raise FedgftError(f"`form_facts` score_step: {text}", kind="data")
    return found
