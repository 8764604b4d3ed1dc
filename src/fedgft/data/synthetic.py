"""A population whose unfairness is known in closed form.

Groups are equally likely, P(Y=1 | A=g) = p_g runs evenly from (1 - gap)/2 to (1 + gap)/2, and

    X | Y  ~  N((2Y - 1) * signal * u, I),    u a unit vector,

whatever the group. So the Bayes score is logistic and linear in (X, 1{A=g}),

    P(Y=1 | X=x, A=g) = sigmoid(2 * signal * <u, x> + logit p_g),

a model this library can learn, and one that is right and unfair at once: its mean in group g is
p_g, and it decides "yes" where <u, x> > t_g = -logit(p_g) / (2 * signal).
"""

from statistics import NormalDist

import numpy as np

from fedgft.data.dataset import Dataset
from fedgft.data.encode import Categorical, Encoder, Numeric
from fedgft.errors import FedgftError
from fedgft.validation import check_integer, check_number

MAX_GROUPS = 10_000
MAX_NUMBERS = 200_000_000
MAX_SIGNAL = 1e6  # far beyond it, labels are certain and rates are 0 or 1


def synthetic(
    *,
    rows: int = 20_000,
    features: int = 8,
    groups: int = 2,
    gap: float = 0.3,
    signal: float = 1.0,
    seed: int = 0,
) -> Dataset:
    """Draw rows of the population above.

    Parameters
    ----------
    rows, features, groups
        How many; the group adds one indicator per group except the first.
    gap
        Difference between the largest and smallest base rate, from 0 to below 1.
    signal
        Distance of the class means from 0, in standard deviations.
    seed
        Of the random numbers.

    Returns
    -------
    Dataset
        Its notes state the gaps of the Bayes model (`known_gaps`).
    """
    check_integer("rows", rows, least=1)
    check_integer("features", features, least=1)
    check_integer("groups", groups, most=MAX_GROUPS)
    check_integer("seed", seed, least=0)
    if rows * (features + groups) > MAX_NUMBERS:
        raise FedgftError(
            f"`rows`, `features` and `groups`: {rows:,} rows with {features + groups:,} columns "
            f"are more than {MAX_NUMBERS:,} numbers"
        )
    known = known_gaps(groups=groups, gap=gap, signal=signal)
    rng = np.random.default_rng(seed)
    group = rng.integers(groups, size=rows)
    label = (rng.random(rows) < base_rates(groups=groups, gap=gap)[group]).astype(np.int64)
    shift = (2 * label - 1) * signal / np.sqrt(features)
    values = rng.standard_normal((rows, features)) + shift[:, None]
    names = tuple(str(g) for g in range(groups))
    numbers = (Numeric(f"x{index}", 0.0) for index in range(features))
    encoder = Encoder((*numbers, Categorical("group", names)))
    return Dataset(
        name="synthetic",
        features=np.hstack((values, np.eye(groups)[group][:, 1:])).astype(np.float32),
        labels=label,
        groups=group.astype(np.int64),
        columns=encoder.columns,
        group_names=names,
        encoder=encoder,
        notes=tuple(f"known {name}: {value:.4f}" for name, value in known.items()),
    )


def base_rates(*, groups: int, gap: float) -> np.ndarray:
    """Return P(Y=1 | A=g) of every group, evenly spaced."""
    check_integer("groups", groups, least=2)
    if not 0 <= check_number("gap", gap) < 1:
        raise FedgftError(
            f"the `gap` of synthetic data must be at least 0 and below 1, not {gap:g}"
        )
    return np.linspace((1 - gap) / 2, (1 + gap) / 2, groups)


def known_gaps(*, groups: int = 2, gap: float = 0.3, signal: float = 1.0) -> dict[str, float]:
    """Return the gaps (largest minus smallest rate) of the labels and of the Bayes model.

    With Phi the normal distribution function, P(<u, X> > t | Y=1) = Phi(signal - t) and
    P(<u, X> > t | Y=0) = Phi(-signal - t).
    """
    if not 0 < check_number("signal", signal) <= MAX_SIGNAL:
        raise FedgftError(
            f"the `signal` of synthetic data must be positive and at most {MAX_SIGNAL:g}, "
            f"not {signal:g}"
        )
    rates = base_rates(groups=groups, gap=gap)
    thresholds = -np.log(rates / (1 - rates)) / (2 * signal)
    normal = NormalDist()
    hit = np.array([normal.cdf(signal - t) for t in thresholds])
    false_alarm = np.array([normal.cdf(-signal - t) for t in thresholds])
    accepted = rates * hit + (1 - rates) * false_alarm
    return {
        "label gap": float(np.ptp(rates)),
        "soft statistical parity gap": float(np.ptp(rates)),
        "hard statistical parity gap": float(np.ptp(accepted)),
        "hard equal opportunity gap": float(np.ptp(hit)),
    }
