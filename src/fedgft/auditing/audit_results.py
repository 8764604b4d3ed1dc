"""The numbers of an audit, as objects with documented attributes and as tidy frames.

All numbers are fractions and are read from the summary of the audit
(`fedgft.auditing.summary.Summary`). None means that a number is not estimable, or that there are
too few rows for an interval; it never means that a model is fair.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from fedgft.auditing.summary import (
    GapInterval,
    GapSummary,
    GroupRate,
    MetricSummary,
    Number,
    SiteSummary,
    ViewSummary,
)
from fedgft.errors import FedgftError
from fedgft.formatting import format_gap
from fedgft.metrics import CATALOG
from fedgft.validation import check_choice


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval.

    Parameters
    ----------
    value
        The number.
    low, high
        The limits of its interval.
    """

    value: Number
    low: Number
    high: Number


@dataclass(frozen=True)
class Rate:
    """A share of rows with its 95% interval.

    Parameters
    ----------
    value
        The share, such as the share of a group's rows with a positive decision.
    low, high
        The limits of its interval.
    rows
        The number of rows that the share is taken of, such as the rows of the group with a positive
        label. It need not be a whole number if a site added noise or withheld counts.
    """

    value: Number
    low: Number
    high: Number
    rows: float


@dataclass(frozen=True)
class Gap:
    """One metric over all sites: the largest gap and the smallest ratio between two groups.

    Parameters
    ----------
    metric, title
        The short name ("sp") and the full name ("statistical parity") of the metric.
    value
        The largest difference between the rates of two groups. None if a group has no rate:
        `among_estimable` then holds the gap between the other groups.
    low, high
        The limits of its 95% interval, which accounts for the choice of the largest difference.
        `high` is None if a group has too few rows for an interval.
    noise_floor
        The mean gap that a perfectly fair model would show on as many rows. None if a
        group has fewer than ten rows, if sites added noise or withheld counts, or if there are more
        than a hundred rates.
    ratio
        The smallest ratio of the rates of two groups (for the four-fifths rule).
    ratio_low, ratio_high
        The limits of its 95% interval.
    pair
        The two groups that differ most; the group with the higher rate is first.
    condition
        The condition of the metric under which they differ most: "class yes", for example, or
        "class yes given label no" for equalized odds.
    within
        The average gap between the two groups within sites (Mantel-Haenszel).
    among_estimable
        The gap between the groups that have a rate, if a group has none; otherwise None.
    """

    metric: str
    title: str
    value: Number
    low: Number
    high: Number
    noise_floor: Number
    ratio: Number
    ratio_low: Number
    ratio_high: Number
    pair: tuple[str, str] | None
    condition: str
    within: Estimate
    among_estimable: Estimate | None

    def __str__(self) -> str:
        """Return the title, the gap with its interval and the two groups in one line."""
        if self.value is None:
            return f"{self.title}: not estimable"
        text = f"{self.title}: {format_gap(self.value, self.low, self.high)}"
        return f"{text} between {' and '.join(self.pair)}" if self.pair else text


@dataclass(frozen=True)
class SiteGap:
    """One metric at one site.

    Parameters
    ----------
    value
        The largest gap between two groups that occur at the site.
    low, high
        The limits of its 95% interval.
    ratio
        The smallest ratio of the rates of two groups at the site.
    local
        The difference at the site between the two groups of `Gap.pair`. It is negative if the site
        has the opposite gap.
    contribution
        The amount that the site adds to the gap over all sites, between the groups of `Gap.pair`.
        The contributions of all sites add up to the gap.
    """

    value: Number
    low: Number
    high: Number
    ratio: Number
    local: Estimate
    contribution: Number


@dataclass(frozen=True)
class Site:
    """One site of an audit.

    Parameters
    ----------
    name
        The name of the site.
    rows
        The number of its rows whose group is recorded.
    accuracy
        The share of right decisions over all its rows.
    gaps
        Its gaps, by the short name of the metric.
    """

    name: str
    rows: float
    accuracy: Rate
    gaps: Mapping[str, SiteGap] = field(repr=False)


@dataclass(frozen=True)
class Results:
    """The numbers of an audit for the groups of one attribute, or of several together.

    Parameters
    ----------
    gaps
        The gap of each metric, by the short name of the metric.
    rates
        The rate of each group, by the short name of the metric and the name of the group. If a
        metric has several conditions, these are the rates under `Gap.condition`.
    sites
        The sites, by name. If there are several attributes, only the groups by all attributes
        together have accuracies, intervals, ratios and local gaps of sites.
    """

    gaps: Mapping[str, Gap]
    rates: Mapping[str, Mapping[str, Rate]]
    sites: Mapping[str, Site]


def read_results(view: ViewSummary) -> Results:
    """Return the numbers of one view of a summary as objects."""
    metrics = view["metrics"]
    return Results(
        gaps={name: _read_gap(name, found, view) for name, found in metrics.items()},
        rates={
            name: {group: read_rate(rate) for group, rate in found["groups"].items()}
            for name, found in metrics.items()
        },
        sites={name: _read_site(name, found) for name, found in view["sites"].items()},
    )


def read_rate(found: GroupRate) -> Rate:
    """Return a rate of a summary as an object."""
    return Rate(found["rate"], found["low"], found["high"], found["n"])


def _read_gap(name: str, found: MetricSummary, view: ViewSummary) -> Gap:
    """Return one metric of a view as an object."""
    pair = found["pair"]
    others = found["among_estimable"]
    return Gap(
        metric=name,
        title=CATALOG[name].title if name in CATALOG else name,
        value=found["gap"],
        low=found["low"],
        high=found["high"],
        noise_floor=view.get("noise_floor", {}).get(name),
        ratio=found["ratio"],
        ratio_low=found["ratio_low"],
        ratio_high=found["ratio_high"],
        pair=None if pair is None else (pair[0], pair[1]),
        condition=found["condition"],
        within=_read_estimate(view["within"][name]),
        among_estimable=None if others is None else _read_estimate(others),
    )


def _read_estimate(found: GapInterval | GapSummary) -> Estimate:
    """Return a gap of a summary and its limits."""
    return Estimate(found["gap"], found["low"], found["high"])


def _read_site(name: str, found: SiteSummary) -> Site:
    """Return one site of a view as an object."""
    accuracy = found.get("accuracy") or {"rate": None, "low": None, "high": None, "n": found["n"]}
    unknown: GapInterval = {"gap": None, "low": None, "high": None}
    gaps = {
        metric: SiteGap(
            value=gap,
            low=found.get("low", {}).get(metric),
            high=found.get("high", {}).get(metric),
            ratio=found.get("ratio", {}).get(metric),
            local=_read_estimate(found.get("local", {}).get(metric, unknown)),
            contribution=found["contribution"][metric],
        )
        for metric, gap in found["gap"].items()
    }
    return Site(name, found["n"], read_rate(accuracy), gaps)


# Frames

LIBRARIES = ("polars", "pandas")
INTERVAL = {"value": pl.Float64, "low": pl.Float64, "high": pl.Float64}
RATIO = {"ratio": pl.Float64, "ratio_low": pl.Float64, "ratio_high": pl.Float64}
COLUMNS: dict[str, dict[str, Any]] = {
    "gaps": {
        "metric": pl.String,
        "title": pl.String,
        **INTERVAL,
        "noise_floor": pl.Float64,
        **RATIO,
        "highest_group": pl.String,
        "lowest_group": pl.String,
        "condition": pl.String,
    },
    "rates": {
        "metric": pl.String,
        "condition": pl.String,
        "group": pl.String,
        **INTERVAL,
        "rows": pl.Float64,
    },
    "sites": {
        "metric": pl.String,
        "site": pl.String,
        "rows": pl.Float64,
        **INTERVAL,
        "ratio": pl.Float64,
        "local": pl.Float64,
        "local_low": pl.Float64,
        "local_high": pl.Float64,
        "contribution": pl.Float64,
    },
}
"The columns of each table."


def make_frame(results: Results, table: str, library: str) -> Any:
    """Return a table as a frame.

    Parameters
    ----------
    results
        The numbers.
    table
        ``"gaps"`` (one row per metric), ``"rates"`` (per metric and group) or ``"sites"`` (per
        metric and site).
    library
        ``"polars"`` or ``"pandas"``.
    """
    check_choice("table", table, tuple(COLUMNS))
    check_choice("library", library, LIBRARIES)
    make_rows = {"gaps": _gap_rows, "rates": _rate_rows, "sites": _site_rows}[table]
    frame = pl.DataFrame(list(make_rows(results)), schema=COLUMNS[table], orient="row")
    return convert_frame(frame, library)


def _gap_rows(results: Results) -> Iterator[tuple]:
    for gap in results.gaps.values():
        numbers = (gap.value, gap.low, gap.high, gap.noise_floor)
        ratios = (gap.ratio, gap.ratio_low, gap.ratio_high)
        yield (gap.metric, gap.title, *numbers, *ratios, *(gap.pair or (None, None)), gap.condition)


def _rate_rows(results: Results) -> Iterator[tuple]:
    for metric, groups in results.rates.items():
        condition = results.gaps[metric].condition
        for group, rate in groups.items():
            yield metric, condition, group, rate.value, rate.low, rate.high, rate.rows


def _site_rows(results: Results) -> Iterator[tuple]:
    for metric in results.gaps:
        for site in results.sites.values():
            gap = site.gaps[metric]
            numbers = (gap.value, gap.low, gap.high, gap.ratio)
            local = (gap.local.value, gap.local.low, gap.local.high)
            yield (metric, site.name, site.rows, *numbers, *local, gap.contribution)


def convert_frame(frame: pl.DataFrame, library: str) -> Any:
    """Return the frame, or as one of pandas, without pyarrow, where unknown numbers are NaN."""
    if library == "polars":
        return frame
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        text = "`library` 'pandas' needs pandas: pip install pandas"
        raise FedgftError(text, kind="extra") from None
    columns = {
        column.name: column.to_numpy() if column.dtype.is_numeric() else column.to_list()
        for column in frame
    }
    return pandas.DataFrame(columns)
