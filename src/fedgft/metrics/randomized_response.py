"""Groups that were randomized before anyone saw them: k-ary randomized response.

A row's true group g is reported as h with the probability

    Q[h, g] = e^epsilon / (e^epsilon + k - 1)   if h = g,        1 / (e^epsilon + k - 1)   if not,

so that a report multiplies the odds of one group against another by e^epsilon at most (Warner,
1965; Kairouz, Bonawitz & Ramage, 2016). The draw does not depend on anything else, so sums S over
the rows of each true group and sums S' over the rows of each reported group have

    E[S'] = Q S,   and   E[Q^-1 S'] = S.

Every statistic of this library is such a sum. The diagonal of Q is q and the rest is r = (1 - q) /
(k - 1), so Q^-1 = (I - r 1 1^T) / (q - r): its columns add up to one, too, and no row is lost.
"""

import math

import numpy as np

from fedgft.errors import FedgftError
from fedgft.validation import check_integer, check_number

MAX_EPSILON = 50.0
"Above it, the chance of another group is below that of a rounding error."
MIN_EPSILON = 1e-3
"Below it, a report says so little that a thousand times more noise than signal would remain."


def response_matrix(k: int, epsilon: float) -> np.ndarray:
    """Return Q, (k, k): the probability of each reported group (row) for each true one (column).

    Parameters
    ----------
    k
        The number of groups among which the report was drawn, two or more.
    epsilon
        The privacy parameter of the response, from `MIN_EPSILON` to `MAX_EPSILON`.

    Examples
    --------
    >>> import math
    >>> response_matrix(2, math.log(3)).round(12).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    check_integer("k", k, least=2)
    check_epsilon(epsilon)
    other = 1 / (math.exp(epsilon) + k - 1)
    return np.full((k, k), other) + np.eye(k) * math.expm1(epsilon) * other


def correction_matrix(k: int, epsilon: float) -> np.ndarray:
    """Return Q^-1, (k, k), of `response_matrix`: it turns reported sums into unbiased true ones."""
    check_integer("k", k, least=2)
    check_epsilon(epsilon)
    gain = (math.exp(epsilon) + k - 1) / math.expm1(epsilon)
    return gain * np.eye(k) - np.full((k, k), 1 / math.expm1(epsilon))


def check_epsilon(epsilon: float, *, field: str = "randomized_groups") -> float:
    """Return the privacy parameter; raise a `FedgftError` that names `field` if it is no use."""
    value = check_number(field, epsilon, finite=False)
    if not MIN_EPSILON <= value <= MAX_EPSILON:
        text = f"must be an epsilon from {MIN_EPSILON:g} to {MAX_EPSILON:g}, not {value:g}"
        raise FedgftError(text, field=field)
    return value
