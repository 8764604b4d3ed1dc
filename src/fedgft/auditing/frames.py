"""The numbers of an audit as tidy frames of polars or pandas."""

from collections.abc import Iterator
from typing import Any

import polars as pl

from fedgft.auditing.results import Results
from fedgft.errors import FedgftError
from fedgft.validation import check_choice

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
    return frame if library == "polars" else _to_pandas(frame)


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


def _to_pandas(frame: pl.DataFrame) -> Any:
    """Return the frame as one of pandas, without pyarrow; unknown numbers are NaN."""
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
