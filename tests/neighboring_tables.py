"""Neighboring tables (one row more or less), and a lower bound on the epsilon of a release.

The tests use it and, with more tables and draws, hardening/privacy.py.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import polars as pl
from scipy.stats import beta

from fedgft.data.partition import hold_out_by_row

Table = pl.DataFrame
Split = Callable[[Table, int], np.ndarray]


def draw_table(rows: int, seed: int) -> Table:
    """A small table with few distinct values, and therefore with many identical rows."""
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "sex": rng.choice(["f", "m"], rows),
            "income": rng.integers(0, 8, rows),
            "ok": rng.integers(0, 2, rows),
        }
    )


def neighbors(pairs: int, *, rows: int, seed: int) -> Iterator[tuple[Table, Table]]:
    """Pairs of a table and the same table with one row inserted or removed at a random place."""
    rng = np.random.default_rng(seed)
    for number in range(pairs):
        table = draw_table(rows, seed=seed * 100_000 + number)
        place = int(rng.integers(0, rows))
        if number % 2:
            yield table, pl.concat([table[:place], table[place + 1 :]])
        else:
            row = draw_table(1, seed=seed * 100_000 + number + 50_000)
            yield table, pl.concat([table[:place], row, table[place:]])


def by_row(table: Table, seed: int) -> np.ndarray:
    """Split by a hash of each row; `seed` is the salt. Returns a mask of the held-out rows."""
    salt = seed.to_bytes(32, "big")
    return hold_out_by_row(
        table.select(pl.struct(pl.all()).struct.json_encode()).to_series().to_list(),
        share=0.3,
        salt=salt,
    )


def by_shuffle(table: Table, seed: int) -> np.ndarray:
    """Split as version 0.1 did: hold out the first rows of a random order of all rows."""
    held = np.zeros(table.height, bool)
    order = np.random.default_rng(seed).permutation(table.height)
    held[order[: int(0.3 * table.height)]] = True
    return held


def count_rows(table: Table) -> np.ndarray:
    """Number of rows by label and group, (2, 2)."""
    out = np.zeros((2, 2))
    for sex, ok in table.select("sex", pl.col("ok").cast(pl.Int64)).iter_rows():
        out[ok, int(sex == "m")] += 1
    return out


def sensitivity(pairs: int, *, rows: int, seed: int, split: Split = by_row) -> list[float]:
    """L2 distances between the counts of training rows of neighboring tables."""
    found = []
    for number, tables in enumerate(neighbors(pairs, rows=rows, seed=seed)):
        one, other = (count_rows(t.filter(~split(t, number))) for t in tables)
        found.append(float(np.linalg.norm(one - other)))
    return found


def epsilon_lower_bound(
    one: np.ndarray, other: np.ndarray, delta: float, *, sure: float = 0.9999
) -> float:
    """A lower bound on epsilon, from many releases of two neighboring tables.

    (epsilon, delta) bounds P(release of one in S) by exp(epsilon) P(release of other in S) + delta
    for every set S. Half of the draws choose S, all releases beyond a threshold on one side or the
    other; the other half estimates both probabilities, by Clopper and Pearson at level `sure`.
    """
    half = len(one) // 2
    best = -math.inf
    chosen = (one, other, 0.0)
    for sign in (1, -1):
        for first, second in ((one, other), (other, one)):
            a = sign * first
            b = sign * second
            cuts = np.quantile(a[:half], np.linspace(0.02, 0.98, 49))
            bounds = _bounds(a[:half], b[:half], cuts, delta, sure)
            if bounds.max() > best:
                best = bounds.max()
                chosen = (a, b, cuts[bounds.argmax()])
    a, b, cut = chosen
    return float(_bounds(a[half:], b[half:], np.array([cut]), delta, sure)[0])


def _bounds(
    a: np.ndarray, b: np.ndarray, cuts: np.ndarray, delta: float, sure: float
) -> np.ndarray:
    """For each set "at or above the cut", the least epsilon that agrees with both frequencies."""
    n = len(a)
    x, y = ((values >= cuts[:, None]).sum(1) for values in (a, b))
    low = beta.ppf((1 - sure) / 2, np.maximum(x, 1e-9), n - x + 1)
    high = beta.ppf(1 - (1 - sure) / 2, y + 1, np.maximum(n - y, 1e-9))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(low > delta, np.log(np.maximum(low - delta, 1e-300) / high), -np.inf)


def likelihood_ratio(
    released: np.ndarray, difference: np.ndarray, deviation: np.ndarray
) -> np.ndarray:
    """The most powerful statistic, one number per release, to distinguish two tables whose sums
    have this difference, under Gaussian noise with this standard deviation."""
    return (released * difference / deviation**2).sum(-1)
