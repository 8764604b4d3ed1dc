"""Decision rules found in other ways: by trying all of them, and by dense linear programs.

Nothing here imports fedgft. A federation is a list of rows; a rule is one chance of a positive
decision per row.
"""

from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

NAMED = ("sp", "eop", "fpr", "acc", "eo")


class Rows(NamedTuple):
    """The rows of a federation: `groups` is (row, attribute), None where it is not recorded."""

    site: np.ndarray
    groups: np.ndarray
    y: np.ndarray
    score: np.ndarray


class Limit(NamedTuple):
    """The largest gap of a metric between the groups by one attribute."""

    metric: str
    attribute: int
    limit: float
    is_local: bool = False


def rates_of(metric: str, y: np.ndarray, chance: np.ndarray) -> list[float]:
    """The rates of one group; NaN where no row is in the event."""
    right = np.where(y == 1, chance, 1 - chance)
    events = {
        "sp": [(chance, np.ones(len(y)))],
        "eop": [(chance, y == 1)],
        "fpr": [(chance, y == 0)],
        "eo": [(chance, y == 0), (chance, y == 1)],
        "acc": [(right, np.ones(len(y)))],
        "predictive-parity": [(y, chance)],
    }[metric]
    return [
        float((value * weight).sum() / weight.sum()) if weight.sum() > 0 else np.nan
        for value, weight in events
    ]


def affine_rates(metric: str, y: np.ndarray, mine: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """The rates of one group as base + slope @ chance; NaN where no row is in the event."""
    events = {
        "sp": [mine],
        "eop": [mine & (y == 1)],
        "fpr": [mine & (y == 0)],
        "eo": [mine & (y == 0), mine & (y == 1)],
        "acc": [mine],
    }[metric]
    sign = 2 * y - 1 if metric == "acc" else np.ones(len(y))
    found = []
    for event in events:
        rows = event.sum()
        base = (event & (y == 0)).sum() / rows if metric == "acc" and rows else 0.0
        found.append((base, sign * event / rows) if rows else (np.nan, 0.0 * event))
    return found


def gap_of(rows: Rows, chance: np.ndarray, limit: Limit, site: object = None) -> float:
    """The largest gap between two groups, over all rows or at one site; 0 with fewer than two."""
    here = np.ones(len(rows.y), bool) if site is None else rows.site == site
    column = rows.groups[:, limit.attribute]
    rates = np.array(
        [
            rates_of(limit.metric, rows.y[mine], chance[mine])
            for mine in (here & (column == g) for g in {g for g in column[here] if g is not None})
        ]
    )
    gaps = [np.ptp(r[~np.isnan(r)]) for r in rates.T if (~np.isnan(r)).sum() > 1]
    return float(max(gaps, default=0.0))


def excess_of(rows: Rows, chance: np.ndarray, limits: list[Limit]) -> float:
    """By how much the gaps exceed their limits."""
    worst = -1.0
    for limit in limits:
        for site in np.unique(rows.site) if limit.is_local else [None]:
            worst = max(worst, gap_of(rows, chance, limit, site) - limit.limit)
    return worst


def value_of(rows: Rows, chance: np.ndarray, benefit: float, cost: float) -> float:
    """Benefit times true positives minus cost times false positives, of rows with all groups."""
    known = (rows.groups != None).all(1)  # noqa: E711
    gain = np.where(rows.y == 1, benefit, -cost) * chance
    return float(gain[known].sum())


def least_accepted(rows: Rows, today: np.ndarray) -> float | None:
    """How many rows must be accepted, and rejected, at least; None: no such limit."""
    decided = today if 0 < today.mean() < 1 else rows.y
    share = 0.1 * min(decided.mean(), 1 - decided.mean())
    known = int((rows.groups != None).all(1).sum())  # noqa: E711
    return max(1.0, share * known) if share > 0 else None


def is_estimable(rows: Rows, limits: list[Limit]) -> bool:
    """Whether every group has every rate over all rows."""
    return not any(
        np.isnan(rates_of(limit.metric, rows.y[mine], np.ones(mine.sum()))).any()
        for limit in limits
        if not limit.is_local
        for g in set(rows.groups[:, limit.attribute]) - {None}
        for mine in [rows.groups[:, limit.attribute] == g]
    )


def list_cells(rows: Rows, per_site: bool) -> list[np.ndarray]:
    """The rows (masks) that share a threshold."""
    known = (rows.groups != None).all(1)  # noqa: E711
    keys = [
        (site if per_site else None, *group)
        for site, group in zip(rows.site, rows.groups.tolist(), strict=True)
    ]
    found = {key for key, k in zip(keys, known, strict=True) if k}
    return [
        np.array([k and key == each for key, k in zip(keys, known, strict=True)])
        for each in sorted(found)
    ]


def list_steps(rows: Rows, cell: np.ndarray) -> np.ndarray:
    """All ways to accept the rows of a cell from some score on, (way, row)."""
    ends = np.append(np.unique(rows.score[cell]), np.inf)
    return (rows.score >= ends[:, None]) & cell


def write_constraints(
    rows: Rows, limits: list[Limit], unrecorded: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return A, b with A @ chance <= b for the chances of all rows: one row per pair of groups.

    `unrecorded` holds the decisions of rows that lack a group.
    """
    found, ends = [], []
    size = len(rows.y)
    known = (rows.groups != None).all(1)  # noqa: E711
    for limit in limits:
        column = rows.groups[:, limit.attribute]
        for site in np.unique(rows.site) if limit.is_local else [None]:
            here = np.ones(size, bool) if site is None else rows.site == site
            names = sorted({g for g in column[here] if g is not None})
            parts = [here & (column == g) for g in names]
            each_rate = zip(
                *(affine_rates(limit.metric, rows.y, mine) for mine in parts), strict=True
            )
            for same in each_rate:  # the same rate of all groups
                affine = [
                    (slope * known, base + slope[~known] @ unrecorded[~known])
                    for base, slope in same
                    if not np.isnan(base)
                ]
                for (a, c), (b, d) in combinations(affine, 2):
                    found += [a - b, b - a]
                    ends += [limit.limit + d - c, limit.limit + c - d]
    return np.array(found).reshape(-1, size), np.array(ends)


def try_all(
    rows: Rows,
    limits: list[Limit],
    *,
    per_site: bool,
    benefit: float,
    cost: float,
    unrecorded: np.ndarray,
    least: float | None,
) -> float | None:
    """The best value of any combination of thresholds; None if none is within the limits."""
    cells = list_cells(rows, per_site)
    steps = [list_steps(rows, cell) for cell in cells]
    known = (rows.groups != None).all(1)  # noqa: E711
    if limits[0].metric == "predictive-parity":
        return _try_each(rows, limits, steps, benefit, cost, unrecorded, least)
    matrix, ends = write_constraints(rows, limits, unrecorded)
    gain = np.where(rows.y == 1, benefit, -cost) * known
    features = np.vstack((matrix, known.astype(float), gain)).T  # what a row adds to all sums
    total = np.zeros((1, features.shape[1]))
    for each in steps:
        total = (total[:, None] + each @ features).reshape(-1, features.shape[1])
    ok = (total[:, : len(ends)] <= ends + 1e-9).all(1)
    if least is not None:
        ok &= (total[:, -2] >= least - 1e-9) & (total[:, -2] <= known.sum() - least + 1e-9)
    return float(total[ok, -1].max()) if ok.any() else None


def _try_each(rows, limits, steps, benefit, cost, unrecorded, least):
    best = None
    known = (rows.groups != None).all(1)  # noqa: E711
    sets = np.zeros((1, len(rows.y)), bool)
    for each in steps:
        sets = (sets[:, None] | each).reshape(-1, len(rows.y))
    for accepted in sets:
        chance = np.where(known, accepted, unrecorded).astype(float)
        if least is not None and not least <= accepted.sum() + 1e-9 <= known.sum() - least + 2e-9:
            continue
        named = {g for g in rows.groups[:, 0] if g is not None}
        if any(chance[rows.groups[:, 0] == g].sum() == 0 for g in named):
            continue  # a group without accepted rows has no precision
        if excess_of(rows, chance, limits) <= 1e-9:
            value = value_of(rows, chance, benefit, cost)
            best = value if best is None else max(best, value)
    return best


def mix_all(
    rows: Rows,
    limits: list[Limit],
    *,
    per_site: bool,
    benefit: float,
    cost: float,
    unrecorded: np.ndarray,
    least: float | None,
) -> float | None:
    """The best value of any mixture of thresholds: a variable for every cell and threshold."""
    steps = [list_steps(rows, cell) for cell in list_cells(rows, per_site)]
    known = (rows.groups != None).all(1)  # noqa: E711
    ways = np.vstack(steps).astype(float)  # (variable, row)
    owner = np.repeat(np.arange(len(steps)), [len(each) for each in steps])
    return _solve(rows, limits, ways, owner, known, benefit, cost, unrecorded, least)


def flip_all(
    rows: Rows,
    limits: list[Limit],
    *,
    per_site: bool,
    benefit: float,
    cost: float,
    unrecorded: np.ndarray,
    least: float | None,
    ordered: bool,
) -> float | None:
    """The best value of a derived predictor (Hardt, Price & Srebro 2016): P(1 | decision, cell).

    `ordered`: a positive decision is confirmed at least as often as a negative one is changed.
    `rows.score` holds the decisions.
    """
    known = (rows.groups != None).all(1)  # noqa: E711
    cells = list_cells(rows, per_site)
    ways = np.array([cell & (rows.score == d) for cell in cells for d in (0, 1)], float)
    matrix, ends = write_constraints(rows, limits, unrecorded)
    a, b = matrix @ ways.T, ends
    accepted = ways.sum(1)
    if least is not None:
        a = np.vstack((a, -accepted, accepted))
        b = np.concatenate((b, [-least, known.sum() - least]))
    if ordered:
        order = np.zeros((len(cells), len(ways)))
        order[np.arange(len(cells)), 2 * np.arange(len(cells))] = 1.0
        order[np.arange(len(cells)), 2 * np.arange(len(cells)) + 1] = -1.0
        a, b = np.vstack((a, order)), np.concatenate((b, np.zeros(len(cells))))
    gain = ways @ (np.where(rows.y == 1, benefit, -cost) * known)
    found = linprog(-gain, A_ub=a, b_ub=b, bounds=(0, 1))
    return None if found.status == 2 else -float(found.fun)


def _solve(rows, limits, ways, owner, known, benefit, cost, unrecorded, least):
    matrix, ends = write_constraints(rows, limits, unrecorded)
    a, b = matrix @ ways.T, ends
    accepted = ways.sum(1)
    if least is not None:
        a = np.vstack((a, -accepted, accepted))
        b = np.concatenate((b, [-least, known.sum() - least]))
    one = (owner == np.arange(owner.max() + 1)[:, None]).astype(float)
    gain = ways @ (np.where(rows.y == 1, benefit, -cost) * known)
    found = linprog(
        -gain,
        A_ub=a if len(a) else None,
        b_ub=b if len(a) else None,
        A_eq=one,
        b_eq=np.ones(len(one)),
    )
    return None if found.status == 2 else -float(found.fun)
