"""Sums over the rows of one group with a numeric outcome, kept so that nothing cancels.

For each of the five `QUANTITIES` z of a row, a site sends the sums of w z and w z^2, and for the
intervals those of w^2 z and w^2 z^2, where w is the weight of the row (1 without weights). Sums of
squares of large values cancel: with a mean of 1e8 and a standard deviation of 1, a float holds no
digit of the variance. So the same sums are kept around the mean m = sum(w z) / sum(w):

    mean = m                        sum(w z)     = W m
    squares = sum(w (z - m)^2)      sum(w z^2)   = squares + W m^2
    tilt = sum(w^2 (z - m))         sum(w^2 z)   = tilt + W2 m
    spread = sum(w^2 (z - m)^2)     sum(w^2 z^2) = spread + 2 m tilt + W2 m^2

where W = sum(w) and W2 = sum(w^2). Without weights, tilt is 0 and spread equals squares. Two of
them add up by the formulas of Chan, Golub & LeVeque (1983), in any order, up to rounding.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

QUANTITIES = ("prediction", "target", "residual", "absolute_residual", "squared_residual")
PREDICTION, TARGET, RESIDUAL, ABSOLUTE, SQUARED = range(5)  # the positions of the quantities
PARTS = ("mean", "squares", "tilt", "spread")


@dataclass(frozen=True, eq=False)
class Moments:
    """The sums of the five `QUANTITIES` over the rows of a group.

    Parameters
    ----------
    rows
        The number of rows.
    weight, weight_squares
        The sums of the weights and of their squares; without weights, the number of rows.
    mean, squares, tilt, spread
        (5,): see the text of this module.
    """

    rows: int
    weight: float
    weight_squares: float
    mean: np.ndarray
    squares: np.ndarray
    tilt: np.ndarray
    spread: np.ndarray

    def __add__(self, other: "Moments") -> "Moments":
        weight = self.weight + other.weight
        mean = self.mean + (other.mean - self.mean) * (other.weight / weight)
        between = (other.mean - self.mean) ** 2 * (self.weight / weight * other.weight)
        tilt = np.zeros(len(mean))
        spread = np.zeros(len(mean))
        for part in (self, other):
            shift = part.mean - mean
            tilt = tilt + part.tilt + shift * part.weight_squares
            spread = spread + part.spread + 2 * shift * part.tilt
            spread = spread + shift**2 * part.weight_squares
        return Moments(
            self.rows + other.rows,
            weight,
            self.weight_squares + other.weight_squares,
            mean,
            self.squares + other.squares + between,
            tilt,
            np.maximum(spread, 0.0),
        )

    def __radd__(self, other: Any) -> "Moments":
        """Support `sum(...)`, which starts at 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    @property
    def effective_rows(self) -> float:
        """The number of rows of equal weight that know the mean as well: W^2 / W2 (Kish)."""
        return self.weight**2 / self.weight_squares

    @property
    def variance(self) -> np.ndarray:
        """The variance of each quantity between rows, (5,); NaN with fewer than two rows."""
        n = self.effective_rows
        return self.squares / self.weight * (n / (n - 1)) if n > 1 else np.full(5, np.nan)

    @property
    def error(self) -> np.ndarray:
        """The variance of each mean, (5,): by linearization, n / (n - 1) spread / W^2.

        Without weights it is the variance divided by the number of rows. NaN with fewer than two.
        """
        n = self.rows
        return self.spread / self.weight**2 * (n / (n - 1)) if n > 1 else np.full(5, np.nan)


def sum_moments(frame: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Return the moments of each group of a table, as columns: see `read_moments`.

    The mean is taken first, then the sums of deviations from it, which also correct the mean.

    Parameters
    ----------
    frame
        A table with the columns in `QUANTITIES`, ``w`` and `keys`; without missing values.
    keys
        The columns with the groups.
    """
    w = pl.col("w")
    found = [pl.len().alias("rows"), w.sum().alias("W"), (w * w).sum().alias("W2")]
    for name in QUANTITIES:
        z = pl.col(name)
        first = (w * z).sum() / w.sum()
        d = z - first
        found += [
            first.alias(f"{name} first"),
            (w * d).sum().alias(f"{name} wd"),
            (w * d * d).sum().alias(f"{name} wdd"),
            (w * w * d).sum().alias(f"{name} wwd"),
            (w * w * d * d).sum().alias(f"{name} wwdd"),
        ]
    return frame.group_by(keys).agg(found)


def read_moments(record: dict[str, Any], *, weighted: bool) -> Moments:
    """Return the moments in a row of what `sum_moments` returned.

    Parameters
    ----------
    record
        The row, by the names of its columns.
    weighted
        Whether rows have weights.
    """
    weight, squares = record["W"], record["W2"]

    def part(name: str) -> np.ndarray:
        return np.array([record[f"{quantity} {name}"] for quantity in QUANTITIES])

    shift = part("wd") / weight
    around = np.maximum(part("wdd") - weight * shift**2, 0.0)
    tilt = part("wwd") - shift * squares
    spread = part("wwdd") - 2 * shift * part("wwd") + shift**2 * squares
    if not weighted:
        return make_moments(record["rows"], part("first") + shift, around)
    spread = np.maximum(spread, 0.0)
    return Moments(record["rows"], weight, squares, part("first") + shift, around, tilt, spread)


def make_moments(rows: int, mean: np.ndarray, squares: np.ndarray) -> Moments:
    """Return the moments of rows without weights."""
    return Moments(rows, float(rows), float(rows), mean, squares, np.zeros(len(mean)), squares)
