"""Rates by sex and by race, and their impact ratios: rate divided by the highest rate.

The definitions are those of New York City's rules: see `fedgft.auditing.form_ll144`. Where sums of
sites leave a range for a rate, all results are limits: `rate_low` and `rate_high`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.auditing.median_score import count_above_median
from fedgft.auditing.rates import Rates, View, estimate_rates, estimate_ratio
from fedgft.auditing.summary import as_count
from fedgft.errors import FedgftError
from fedgft.metrics import get_metric
from fedgft.metrics.intervals import FEW

if TYPE_CHECKING:
    from fedgft.auditing.report import Audit

SMALL = 0.02  # share of the data below which a category may be left out of the impact ratios


@dataclass(frozen=True, eq=False)
class Categories:
    """One of the three tables: its categories, and their positions in the view of its columns.

    `names` has a tuple of values per category. `places` holds positions in the groups of `view`; -1
    for a category without people.
    """

    title: str
    by: str
    columns: tuple[str, ...]
    names: Sequence[tuple[str, ...]]
    places: np.ndarray
    view: View | None

    def take(self, values: np.ndarray, missing: float = 0.0) -> np.ndarray:
        """Return values by group of the view, in the order of the categories."""
        return np.append(values, missing)[self.places]


def list_categories(audit: "Audit", found: Mapping[str, str]) -> list[Categories]:
    """Return the categories by sex, by race, and by both."""
    single = {
        role: _read_categories(audit, [column], f"By {title}", by)
        for (role, column), (title, by) in zip(
            found.items(), (("sex", "sex"), ("race/ethnicity", "race")), strict=True
        )
    }
    both = _read_categories(audit, list(found.values()), "By sex and race/ethnicity", "sex & race")
    known = dict(zip(both.names, both.places, strict=True))
    pairs = [(*a, *b) for a, b in product(single["sex"].names, single["race"].names)]
    places = np.array([known.get(pair, -1) for pair in pairs], int)
    both = Categories(both.title, both.by, both.columns, pairs, places, both.view)
    return [*single.values(), both]


def _read_categories(audit: "Audit", columns: Sequence[str], title: str, by: str) -> Categories:
    """Return the categories that the sites recorded in these columns, in the order given."""
    pool = audit.pool
    chosen = [i for i, name in enumerate(pool.spec.attributes) if name in columns]
    # the order of `_view_by`, which has one group for each of these cells
    cells = dict.fromkeys(tuple(group[i] for i in chosen) for group in pool.groups)
    known = [cell for cell in cells if None not in cell]
    attributes = tuple(pool.spec.attributes[i] for i in chosen)
    view = next((each for each in audit.views if each.attributes == attributes), None)
    if view is None and len(columns) == 1:
        raise FedgftError(f"no row has `form_columns` {columns[0]} recorded", kind="data")
    order = [attributes.index(name) for name in columns]
    names = [tuple(str(cell[i]) for i in order) for cell in known]
    return Categories(title, by, tuple(columns), names, np.arange(len(names)), view)


def count_selected(
    audit: "Audit", tables: Sequence[Categories], *, exclude: bool
) -> list[dict[str, Any]]:
    """Return the three tables of selection rates for the positive class, or for each class."""
    classes = audit.pool.spec.classes
    places = [(0, 1)] if len(classes) == 2 else [(i, i) for i in range(len(classes))]
    found = []
    for condition, position in places:
        made = []
        for each in tables:
            people, selected, rates = _rate_categories(each, condition, position)
            rows = _rate_rows(each, people, rates, exclude=exclude)
            for row, number in zip(rows, selected, strict=True):
                row["selected"] = as_count(number)
            made.append({"by": each.by, "columns": each.columns, "rows": rows})
        found.append({"class": classes[position], "tables": made})
    return found


def _rate_categories(
    table: Categories, condition: int, position: int
) -> tuple[np.ndarray, np.ndarray, Rates]:
    """Return the number of people, of those selected, and the selection rate by category."""
    view = table.view
    if view is None:  # nobody has both columns recorded
        nothing = np.zeros(len(table.names))
        return nothing, nothing, _make_rates(nothing, nothing, nothing)
    people = view.sums.count[..., :-1].sum((0, 1))
    selected = view.sums.decision[..., :-1, position].sum((0, 1))
    rates = estimate_rates(get_metric("sp"), view, "hard")[condition]
    padded = _make_rates(np.zeros(1), np.zeros(1), np.zeros(1))
    names = ("rate", "n", "rate_min", "rate_max", "n_min", "variance", "valid")
    stacked = Rates(
        *(np.append(getattr(rates, x), getattr(padded, x))[table.places] for x in names),
        is_proportion=True,
    )
    return table.take(people), table.take(selected), stacked


def _make_rates(people: np.ndarray, low: np.ndarray, high: np.ndarray) -> Rates:
    """Return rates of which the limits of the numerator are known; NaN where nobody is."""
    size = np.where(people > 0, people, np.nan)
    first, last = low / size, high / size
    return Rates(
        rate=(first + last) / 2,
        n=people,
        rate_min=first,
        rate_max=last,
        n_min=people,
        variance=np.zeros(len(people)),
        valid=people >= FEW,
        is_proportion=True,
    )


def score_table(table: Categories, step: float | None, *, exclude: bool) -> dict[str, Any]:
    """Return one of the three tables of scoring rates."""
    people = low = high = np.zeros(len(table.names))
    if table.view is not None:
        above = count_above_median(table.view, step=step)
        people, low, high = (table.take(x) for x in (above.people, above.low, above.high))
    rows = _rate_rows(table, people, _make_rates(people, low, high), exclude=exclude)
    return {"by": table.by, "columns": table.columns, "rows": rows}


def _rate_rows(
    table: Categories, people: np.ndarray, rates: Rates, *, exclude: bool
) -> list[dict[str, Any]]:
    """Return a row per category: rate, impact ratio, and their limits.

    `rate_low` and `rate_high` are the possible rates, where the sites' sums leave a range; `rate`
    is None if they differ. `low` and `high` are the limits of the 95% interval of the rate.
    """
    shares = people / max(people.sum(), 1.0)
    counts = ~np.isnan(rates.rate) & ~((shares < SMALL) & exclude)
    top = int(np.argmax(np.where(counts, rates.rate, -1.0))) if counts.any() else None
    low, high = rates.interval()
    rows = []
    for g, names in enumerate(table.names):
        exact = rates.rate_min[g] == rates.rate_max[g]
        rows.append(
            {
                "category": names,
                "applicants": as_count(people[g]),
                "share": shares[g],
                "rate": rates.rate[g] if exact else math.nan,
                "rate_low": rates.rate_min[g],
                "rate_high": rates.rate_max[g],
                "low": low[g],
                "high": high[g],
                **_impact_ratio(rates, counts, g, top),
                "is_highest": g == top,
                "is_excluded": bool(exclude and shares[g] < SMALL),
            }
        )
    return rows


@np.errstate(divide="ignore", invalid="ignore")
def _impact_ratio(rates: Rates, counts: np.ndarray, g: int, top: int | None) -> dict[str, float]:
    """Return the impact ratio of category g: its limits, and those of its 95% interval."""
    empty = dict.fromkeys(("ratio", "ratio_low", "ratio_high", "ratio_from", "ratio_to"), math.nan)
    if top is None or not counts[g] or rates.rate[top] <= 0:
        return empty
    others = counts & (np.arange(len(counts)) != g)
    first = rates.rate_min[g] / max([rates.rate_min[g], *rates.rate_max[others]])
    last = rates.rate_max[g] / max([rates.rate_max[g], *rates.rate_min[others]])
    found = empty | {"ratio_from": float(first), "ratio_to": float(last)}
    if first == last:
        found["ratio"] = float(first)
    if g != top:
        _, low, high = estimate_ratio(rates[g], rates[top])
        found |= {"ratio_low": float(low), "ratio_high": float(high)}
    return found
