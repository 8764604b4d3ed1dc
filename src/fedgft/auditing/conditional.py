"""Compare groups within strata, such as departments: gaps given a column of the data.

A gap over all rows compares everybody. Where groups are spread differently over strata whose rates
differ, the gap within every stratum may be small, or point the other way (Simpson 1951; Bickel,
Hammel & O'Connell 1975). So the same gap is computed in each stratum, over the rows of all sites,
and averaged over strata with the weights of Mantel & Haenszel: stratum s, with b_s and d_s rows of
the two groups, weighs b_s d_s / (b_s + d_s). A stratum without one of the groups weighs nothing.

The computation is that of the gap within sites: `fedgft.auditing.between_sites` with strata in
place of sites.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np

from fedgft.auditing.between_sites import MetricEstimate, SiteGaps, compare_sites
from fedgft.auditing.rates import Estimate, Pool, View, make_view
from fedgft.errors import FedgftError
from fedgft.formatting import DASH, Table, format_interval, format_points, join_names
from fedgft.metrics import CATALOG

MAX_STRATA = 1000
MAX_SHOWN = 12  # strata in a table, the largest ones
NOTE = (
    "Within strata: the weighted average of the gaps in the strata (Mantel-Haenszel). The other "
    "way round: strata where the first group has the lower rate, beyond chance, if it has the "
    "higher one over all rows."
)
Number = float | None


class StratumGap(TypedDict):
    """One stratum: its rows and, for the two groups of the metric's pair, the rates and the gap.

    `gap` is the rate of the first group minus that of the second, `low` and `high` its 95%
    interval. `largest` is the largest gap between any two groups of the stratum.
    """

    n: float
    rates: list[Number]
    gap: Number
    low: Number
    high: Number
    largest: Number


class ConditionalGap(TypedDict):
    """One metric given the strata. All gaps are signed: first group of `pair` minus second.

    `overall` is the gap over all rows, `pooled` the average within strata (Mantel-Haenszel), both
    with 95% intervals. `reversed` lists the strata whose gap points the other way than `overall`
    beyond chance (95% for all strata at once), and `is_reversed` says whether `pooled` does.
    """

    pair: list[str] | None
    condition: str
    overall: dict[str, Number]
    pooled: dict[str, Number]
    is_reversed: bool
    reversed: list[str]
    not_comparable: list[str]
    strata: dict[str, StratumGap]


class ConditionalSummary(TypedDict):
    """The gaps within strata: by view and metric. `columns` names the columns with the strata."""

    columns: str
    strata: list[str]
    rows_without_stratum: float
    views: dict[str, dict[str, ConditionalGap]]


@dataclass(frozen=True, eq=False)
class Strata:
    """The sums of all sites by stratum.

    Parameters
    ----------
    pool
        The sums, with one "site" for each stratum.
    unknown
        The weight of the rows whose stratum is not recorded.
    """

    pool: Pool
    unknown: float

    @property
    def title(self) -> str:
        """The names of the columns, such as ``department``."""
        return " & ".join(self.pool.spec.given)


def pool_strata(pool: Pool) -> Strata | None:
    """Return the sums by stratum, over all sites; None if no strata were measured."""
    spec = pool.spec
    if not spec.given:
        return None
    attributes = len(spec.attributes)
    strata = [group[attributes:] for group in pool.groups]
    known = list(dict.fromkeys(stratum for stratum in strata if None not in stratum))
    if len(known) > MAX_STRATA:
        raise FedgftError(
            f"{' & '.join(spec.given)} gives {len(known):,} strata, more than {MAX_STRATA:,}: "
            "measure a coarser column"
        )
    groups = list(dict.fromkeys(group[:attributes] for group in pool.groups))
    tables = np.zeros((len(known), len(groups), *pool.tables.shape[2:]))
    unknown = 0.0
    for g, (group, stratum) in enumerate(zip(pool.groups, strata, strict=True)):
        table = pool.tables[:, g].sum(0)
        if None in stratum:
            unknown += float(table[..., 0].sum())
        else:
            tables[known.index(stratum), groups.index(group[:attributes])] += table
    spec = replace(spec, scored=False)
    by_stratum = replace(
        pool,
        spec=spec,
        sites=tuple(" & ".join(map(str, stratum)) for stratum in known),
        groups=tuple(groups),
        tables=tables,
        histogram=np.zeros((len(groups), *spec.empty_histogram().shape)),
        bin_error=None,
    )
    return Strata(by_stratum, unknown)


def summarize_strata(
    strata: Strata, views: Sequence[View], estimates: Sequence[Mapping[str, MetricEstimate]]
) -> ConditionalSummary:
    """Return the gaps within strata of all views and metrics.

    Parameters
    ----------
    strata
        The sums by stratum.
    views, estimates
        The views over all rows, and the estimates of each, by metric.
    """
    found = {}
    for view, by_metric in zip(views, estimates, strict=True):
        inside = make_view(strata.pool, view.attributes)
        found[view.title] = {
            name: _summarize_metric(each, inside, strata.pool.sites)
            for name, each in by_metric.items()
        }
    return {
        "columns": strata.title,
        "strata": list(strata.pool.sites),
        "rows_without_stratum": strata.unknown,
        "views": found,
    }


def _summarize_metric(each: MetricEstimate, inside: View, strata: Sequence[str]) -> ConditionalGap:
    """Return one metric given the strata; `inside` has strata as sites, and the same groups."""
    gaps = compare_sites(each.metric, inside, each.rates, each.gap)
    sign = math.copysign(1.0, gaps.signed.value) if gaps.signed.value else 0.0
    rows = inside.sums.count[..., :-1].sum((1, 2))
    pooled_sign = (gaps.within.low > 0) * 1.0 - (gaps.within.high < 0)
    overall_sign = (gaps.signed.low > 0) * 1.0 - (gaps.signed.high < 0)
    conditions = each.metric.condition_names(inside.spec.classes)
    return {
        "pair": None if each.gap.pair is None else [each.view.groups[g] for g in each.gap.pair],
        "condition": conditions[each.gap.condition or 0],
        "overall": _name_limits(gaps.signed),
        "pooled": _name_limits(gaps.within),
        "is_reversed": bool(pooled_sign * overall_sign < 0),
        "reversed": _choose(strata, gaps.direction * sign < 0),
        "not_comparable": _choose(strata, np.isnan(gaps.local.value)),
        "strata": {name: _summarize_stratum(gaps, k, rows[k]) for k, name in enumerate(strata)},
    }


def _choose(names: Sequence[str], chosen: np.ndarray) -> list[str]:
    return [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]


def _name_limits(estimate: Estimate) -> dict[str, Any]:
    return dict(zip(("gap", "low", "high"), map(float, estimate), strict=True))


def _summarize_stratum(gaps: SiteGaps, k: int, rows: float) -> StratumGap:
    """Return the numbers of the stratum at position k."""
    rates: list[Number] = [math.nan, math.nan]
    if gaps.pair_rates is not None:
        rates = [float(rate) for rate in gaps.pair_rates[:, k]]
    value, low, high = (float(values[k]) for values in gaps.local)
    largest = float(gaps.largest.value[k])
    return {
        "n": float(rows),
        "rates": rates,
        "gap": value,
        "low": low,
        "high": high,
        "largest": largest,
    }


def describe_reversals(summary: ConditionalSummary) -> list[str]:
    """Return a sentence for each gap that points the other way within strata."""
    columns = summary["columns"]
    notes = []
    for title, by_metric in summary["views"].items():
        for name, found in by_metric.items():
            if not found["pair"]:
                continue
            first, second = found["pair"]
            who = f"{CATALOG[name].title} by {title}"
            if found["is_reversed"]:
                notes.append(
                    f"{who}: over all rows, the rate of {first} is higher than that of {second}, "
                    f"by {_points(found['overall'])}. Within {columns} it is lower, by "
                    f"{_points(found['pooled'])} on average (Simpson's paradox)."
                )
            elif found["reversed"]:
                listed = join_names(found["reversed"])
                notes.append(
                    f"{who}: over all rows, the rate of {first} is higher than that of {second}. "
                    f"It is lower in {listed}."
                )
            if len(found["not_comparable"]) == len(found["strata"]):
                notes.append(
                    f"{who}: no stratum of {columns} has rows of both {first} and {second}: the "
                    "gap within strata is not estimable."
                )
    return notes


def _points(found: Mapping[str, Number]) -> str:
    return f"{100 * abs(found['gap'] or 0.0):.1f} points"


def list_strata_tables(summary: ConditionalSummary, *, short: bool = False) -> Iterator[Table]:
    """Yield, for each view, a table of the gaps given the strata, and one of the strata.

    Parameters
    ----------
    summary
        The gaps within strata.
    short
        Whether the tables are for a terminal, which shows no single strata.
    """
    columns = summary["columns"]
    for title, by_metric in summary["views"].items():
        rows = []
        for name, found in by_metric.items():
            each = [_format_gap(found[key]) for key in ("overall", "pooled")]
            opposite = join_names(found["reversed"]) or DASH
            pair = " − ".join(found["pair"] or (DASH,))
            rows.append((CATALOG[name].title, pair, *each[0], *each[1], opposite))
        header = ("metric", "difference", "over all rows", "95% interval", "within strata")
        header += ("95% interval", "the other way round in")
        yield Table(f"Gaps by {title} given {columns}, points", header, tuple(rows), 2, (NOTE,))
        if not short:
            yield _strata_table(summary, title)


def _strata_table(summary: ConditionalSummary, title: str) -> Table:
    """Return the table of the single strata of one view: a row per metric and stratum."""
    rows = []
    for name, found in summary["views"][title].items():
        largest = sorted(found["strata"], key=lambda s: -found["strata"][s]["n"])[:MAX_SHOWN]
        for stratum in (s for s in found["strata"] if s in largest):
            each = found["strata"][stratum]
            rates = (format_points(rate, unknown="no rows") for rate in each["rates"])
            who = " − ".join(found["pair"] or (DASH,))
            cells = (*rates, *_format_gap(each))
            rows.append((CATALOG[name].title, who, stratum, f"{each['n']:,.0f}", *cells))
    header = ("metric", "difference", summary["columns"], "rows", "rate of the first")
    header += ("of the second", "gap", "95% interval")
    notes = ("Rates in percent. Each interval holds for itself.",)
    if len(summary["strata"]) > MAX_SHOWN:
        notes += (f"The {MAX_SHOWN} largest strata of {len(summary['strata'])}.",)
    return Table(
        f"Strata: {title} in each {summary['columns']}, points", header, tuple(rows), 3, notes
    )


def _format_gap(found: Mapping[str, Any]) -> tuple[str, str]:
    """Return a gap and its interval in points."""
    interval = format_interval(found["low"], found["high"])
    return format_points(found["gap"], unknown="not estimable"), interval
