"""Gaps of decisions at every threshold, from scores."""

import numpy as np

from fedgft.metrics.metric import Index


def largest_gap_over_thresholds(scores: np.ndarray, groups: Index, *, num_groups: int) -> float:
    """Return the largest gap of selection rates between groups over all thresholds of the scores.

    With two groups it is the Kolmogorov-Smirnov distance of their scores. For equal opportunity,
    pass the rows of the positive label only.

    Parameters
    ----------
    scores
        (n,) The probability of the positive class.
    groups
        (n,) The index of each row's group; rows with -1 do not count.
    num_groups
        The number of groups. The gap is NaN if one of them has no row.

    Examples
    --------
    >>> import numpy as np
    >>> scores, groups = np.array([0.1, 0.6, 0.4, 0.9]), np.array([0, 0, 1, 1])
    >>> largest_gap_over_thresholds(scores, groups, num_groups=2)
    0.5
    """
    by_group = [np.sort(scores[groups == g]) for g in range(num_groups)]
    if not all(len(each) for each in by_group):
        return float("nan")
    thresholds = np.unique(scores[groups >= 0])
    shares = [np.searchsorted(each, thresholds, side="right") / len(each) for each in by_group]
    return float(np.ptp(shares, axis=0).max())
