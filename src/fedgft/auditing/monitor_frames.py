"""Frames of a `Monitor`: gaps, rates, changes and sites, one row each."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import polars as pl

from fedgft.auditing.audit_results import LIBRARIES, convert_frame
from fedgft.validation import check_choice

if TYPE_CHECKING:
    from fedgft.auditing.monitoring import Monitor

COLUMNS: dict[str, dict[str, Any]] = {
    "gaps": {
        "period": pl.String,
        "date": pl.Date,
        "version": pl.String,
        "metric": pl.String,
        "gap": pl.Float64,
        "low": pl.Float64,
        "high": pl.Float64,
        "first_group": pl.String,
        "second_group": pl.String,
        "condition": pl.String,
        "since": pl.String,
        "average": pl.Float64,
        "band_low": pl.Float64,
        "band_high": pl.Float64,
    },
    "rates": {
        "period": pl.String,
        "date": pl.Date,
        "metric": pl.String,
        "condition": pl.String,
        "group": pl.String,
        "rate": pl.Float64,
        "rows": pl.Float64,
    },
    "changes": {
        "metric": pl.String,
        "kind": pl.String,
        "period": pl.String,
        "earliest": pl.String,
        "latest": pl.String,
        "found_in": pl.String,
        "first_group": pl.String,
        "second_group": pl.String,
        "condition": pl.String,
        "before": pl.Float64,
        "after": pl.Float64,
        "change": pl.Float64,
        "low": pl.Float64,
        "high": pl.Float64,
        "direction": pl.String,
    },
    "sites": {"period": pl.String, "date": pl.Date, "site": pl.String, "rows": pl.Float64},
}


def _gap_rows(found: "Monitor") -> Iterator[tuple]:
    for period in found.periods:
        for name, gap in period.gaps.items():
            own = (gap.gap, gap.low, gap.high, *(gap.pair or (None, None)), gap.condition)
            band = (gap.since, gap.average, gap.band_low, gap.band_high)
            yield (period.label, period.date, period.version, name, *own, *band)


def _rate_rows(found: "Monitor") -> Iterator[tuple]:
    for period in found.periods:
        for name, gap in period.gaps.items():
            for group, rate in gap.rates.items():
                place = (period.label, period.date, name, gap.condition)
                yield (*place, group, rate, gap.rows[group])


def _change_rows(found: "Monitor") -> Iterator[tuple]:
    for each in found.changes:
        when = (each.period, each.earliest, each.latest, each.found_in)
        numbers = (each.before, each.after, each.change, each.low, each.high)
        yield (each.metric, each.kind, *when, *each.pair, each.condition, *numbers, each.direction)


def _site_rows(found: "Monitor") -> Iterator[tuple]:
    for period in found.periods:
        for site, rows in period.sites.items():
            yield period.label, period.date, site, float(rows)


ROWS = {"gaps": _gap_rows, "rates": _rate_rows, "changes": _change_rows, "sites": _site_rows}


def make_monitor_frame(found: "Monitor", table: str, library: str) -> Any:
    """Return the frame of a monitor.

    Parameters
    ----------
    found
        The monitor.
    table
        ``"gaps"``, ``"rates"``, ``"changes"`` or ``"sites"``.
    library
        ``"polars"`` or ``"pandas"``.
    """
    check_choice("table", table, tuple(COLUMNS))
    check_choice("library", library, LIBRARIES)
    frame = pl.DataFrame(list(ROWS[table](found)), schema=COLUMNS[table], orient="row")
    return convert_frame(frame, library)
