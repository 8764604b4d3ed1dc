"""Data sets that are generated, so that they need no download: `loans` and `synthetic`.

`make_loans` draws the customers of three banks. A bank approves a loan if its model gives a
probability of repayment of at least 0.5, which rises with income and years in the job. Within each
bank women and men have the same incomes, so each bank approves women and men at the same rate. But
incomes differ between the banks, and most women are customers of the bank with the lowest incomes.
Over all banks women are approved far less often than men. No bank can see this in its own data.

The chance of repayment falls with the rent, which the banks' model ignores: rents are high where
incomes are high. So the customers of all banks repay at similar rates, and a model that uses the
rent can treat women and men alike at a small cost in accuracy.

`synthetic` draws from a population whose unfairness is known in closed form.
Groups are equally likely, P(Y=1 | A=g) = p_g runs evenly from (1 - gap)/2 to (1 + gap)/2, and

    X | Y  ~  N((2Y - 1) * signal * u, I),    u a unit vector,

whatever the group. So the Bayes score is logistic and linear in (X, 1{A=g}),

    P(Y=1 | X=x, A=g) = sigmoid(2 * signal * <u, x> + logit p_g),

which this library can learn. It is accurate and unfair at once: its mean in group g is p_g, and it
decides "yes" where <u, x> > t_g = -logit(p_g) / (2 * signal).
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from fedgft.data.dataset import Dataset
from fedgft.data.encode import Categorical, Encoder, Numeric
from fedgft.errors import FedgftError, LazyModule
from fedgft.validation import check_integer, check_number

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

MAX_GROUPS = 10_000
MAX_NUMBERS = 200_000_000
MAX_SIGNAL = 1e6  # far beyond it, labels are certain and rates are 0 or 1

PROBABILITY = "probability"  # the column of loans with the scores of the banks' model
BANKS = {  # customers, share of women, mean income and mean rent in thousands per year
    "north": (19_200, 0.70, 27.0, 7.0),
    "south": (16_000, 0.45, 32.0, 9.5),
    "east": (12_800, 0.22, 38.0, 12.5),
}


def make_loans(*, seed: int = 0) -> pl.DataFrame:
    """Return the table of the three banks: 48,000 customers, one row each.

    Parameters
    ----------
    seed
        Seed of the random numbers.

    Returns
    -------
    DataFrame
        bank, sex, age, income, rent, years (in the job), repaid (yes or no), and probability: the
        probability of repayment by the bank's model.
    """
    check_integer("seed", seed, least=0)
    rng = np.random.default_rng(seed)
    parts = []
    for bank, (customers, women, mean_income, mean_rent) in BANKS.items():
        sex = np.where(rng.random(customers) < women, "woman", "man")
        income = rng.normal(mean_income, 6.0, customers).clip(8).round(1)
        rent = rng.normal(mean_rent, 1.5, customers).clip(3).round(1)
        years = rng.integers(0, 21, customers)
        age = rng.choice(["under 40", "40 and over"], customers)
        log_odds = 0.2 + 0.24 * (income - 32) - 0.3 * (rent - 9.5) + 0.09 * (years - 10)
        is_repaid = rng.random(customers) < _logistic(log_odds)
        probability = _logistic(0.2 * (income - 32) + 0.09 * (years - 10))
        columns = {"bank": [bank] * customers, "sex": sex, "age": age, "income": income}
        columns |= {"rent": rent, "years": years, "repaid": np.where(is_repaid, "yes", "no")}
        parts.append(pl.DataFrame(columns | {PROBABILITY: probability.round(3)}))
    return pl.concat(parts)


def _logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def synthetic(
    *,
    rows: int = 20_000,
    features: int = 8,
    groups: int = 2,
    gap: float = 0.3,
    signal: float = 1.0,
    seed: int = 0,
) -> Dataset:
    """Draw rows from the population that the docstring of this module defines.

    Parameters
    ----------
    rows, features, groups
        Numbers of rows, numeric features and groups; each group except the first adds an indicator.
    gap
        Difference between the largest and smallest base rate, from 0 to below 1.
    signal
        Distance of the class means from 0, in standard deviations.
    seed
        Seed of the random numbers.

    Returns
    -------
    Dataset
        Its notes state the gaps of the Bayes model (`compute_known_gaps`).
    """
    check_integer("rows", rows, least=1)
    check_integer("features", features, least=1)
    check_integer("groups", groups, most=MAX_GROUPS)
    check_integer("seed", seed, least=0)
    if rows * (features + groups) > MAX_NUMBERS:
        asked = f"{rows:,} rows with {features + groups:,} columns"
        limit = f"more than {MAX_NUMBERS:,} numbers"
        raise FedgftError(f"`rows`, `features` and `groups`: {asked} are {limit}")
    known = compute_known_gaps(groups=groups, gap=gap, signal=signal)
    rng = np.random.default_rng(seed)
    group = rng.integers(groups, size=rows)
    label = (rng.random(rows) < compute_base_rates(groups=groups, gap=gap)[group]).astype(np.int64)
    shift = (2 * label - 1) * signal / np.sqrt(features)
    values = rng.standard_normal((rows, features)) + shift[:, None]
    names = tuple(map(str, range(groups)))
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


def compute_base_rates(*, groups: int, gap: float) -> np.ndarray:
    """Return P(Y=1 | A=g) of every group, evenly spaced."""
    check_integer("groups", groups, least=2)
    if not 0 <= check_number("gap", gap) < 1:
        raise FedgftError(f"the `gap` of synthetic data must lie from 0 to below 1, not {gap:g}")
    return np.linspace((1 - gap) / 2, (1 + gap) / 2, groups)


def compute_known_gaps(
    *, groups: int = 2, gap: float = 0.3, signal: float = 1.0
) -> dict[str, float]:
    """Return the gaps (largest minus smallest rate) of the labels and of the Bayes model.

    With Phi the normal distribution function, P(<u, X> > t | Y=1) = Phi(signal - t) and
    P(<u, X> > t | Y=0) = Phi(-signal - t).
    """
    if not 0 < check_number("signal", signal) <= MAX_SIGNAL:
        bounds = f"positive and at most {MAX_SIGNAL:g}"
        raise FedgftError(f"the `signal` of synthetic data must be {bounds}, not {signal:g}")
    rates = compute_base_rates(groups=groups, gap=gap)
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
