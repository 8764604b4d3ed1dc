"""The person files of the American Community Survey, one per state: download, filter, cache.

The Census Bureau publishes the Public Use Microdata Sample of a year as one archive per state,
``YEAR/1-Year/csv_pca.zip`` for the persons of California. A state is downloaded and filtered on its
own, and its rows are kept as a Parquet file in the cache, so that an interrupted download of many
states continues with the first that is missing. A file that is cut off is fetched again from its
start; nothing half-written stays.

The rows are those of ACSIncome (Ding et al., Retiring Adult, NeurIPS 2021): AGEP > 16, PINCP > 100,
WKHP > 0 and PWGTP >= 1.
"""

from __future__ import annotations

import os
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit

from fedgft.data.encode import data_error, suggest_name
from fedgft.data.remote_files import CHUNK_BYTES, Progress, get_cache_folder, ignore_progress
from fedgft.errors import FedgftError, LazyModule
from fedgft.store import atomic_write, file_error, make_folder
from fedgft.validation import check_integer, format_value

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

ADDRESS = "https://www2.census.gov/programs-surveys/acs/data/pums/"
ADDRESS_VARIABLE = "FEDGFT_ACS"  # another address with the same files; file:///folder/ is a folder
YEARS = (*range(2014, 2020), *range(2021, 2024))  # of 2020, the usual files were not published
RELSHIPP_SINCE = 2019  # before, the relationship to the reference person is RELP
STATES = {
    **{"AL": "Alabama", "AK": "Alaska", "AZ": "Arizona", "AR": "Arkansas", "CA": "California"},
    **{"CO": "Colorado", "CT": "Connecticut", "DE": "Delaware", "DC": "District of Columbia"},
    **{"FL": "Florida", "GA": "Georgia", "HI": "Hawaii", "ID": "Idaho", "IL": "Illinois"},
    **{"IN": "Indiana", "IA": "Iowa", "KS": "Kansas", "KY": "Kentucky", "LA": "Louisiana"},
    **{"ME": "Maine", "MD": "Maryland", "MA": "Massachusetts", "MI": "Michigan"},
    **{"MN": "Minnesota", "MS": "Mississippi", "MO": "Missouri", "MT": "Montana"},
    **{"NE": "Nebraska", "NV": "Nevada", "NH": "New Hampshire", "NJ": "New Jersey"},
    **{"NM": "New Mexico", "NY": "New York", "NC": "North Carolina", "ND": "North Dakota"},
    **{"OH": "Ohio", "OK": "Oklahoma", "OR": "Oregon", "PA": "Pennsylvania", "PR": "Puerto Rico"},
    **{"RI": "Rhode Island", "SC": "South Carolina", "SD": "South Dakota", "TN": "Tennessee"},
    **{"TX": "Texas", "UT": "Utah", "VT": "Vermont", "VA": "Virginia", "WA": "Washington"},
    **{"WV": "West Virginia", "WI": "Wisconsin", "WY": "Wyoming"},
}
ALL_STATES = "all"
ATTEMPTS = 3
RETRY_WAIT = 2.0  # seconds before the next attempt
TIMEOUT = 30.0  # seconds that the address may stay silent
MAX_ARCHIVE_BYTES = 1 << 30  # several times the largest archive
MAX_TABLE_BYTES = 1 << 33  # a few bytes may expand to any size


def check_year(year: int) -> int:
    """Return the year; raise a `FedgftError` if there are no files of it."""
    check_integer("year", year)
    if year not in YEARS:
        known = f"{YEARS[0]} to {YEARS[-1]} except 2020"
        raise FedgftError(f"`year`: there are files of {known}, not of {year}", kind="data")
    return year


def check_states(states: Sequence[str] | str) -> tuple[str, ...]:
    """Return the abbreviations of states in alphabetical order, each once.

    Parameters
    ----------
    states
        Abbreviations or names, in upper or lower case; "all" stands for the fifty states, the
        District of Columbia and Puerto Rico.
    """
    given = [states] if isinstance(states, str) else list(states)
    if not given:
        text = "name the states of the data set 'acs', such as CA and NY, or 'all'"
        raise FedgftError(f"`states`: {text}", kind="missing")
    by_name = {name.casefold(): code for code, name in STATES.items()}
    by_name |= {code.casefold(): code for code in STATES}
    found = set()
    for state in given:
        if not isinstance(state, str):
            raise FedgftError(f"`states` must hold names, not {format_value(state)}")
        key = state.strip().casefold()
        if key == ALL_STATES:
            found |= set(STATES)
        elif key in by_name:
            found.add(by_name[key])
        else:
            hint = suggest_name(state, [*STATES.values()] if len(key) > 2 else [*STATES])
            raise FedgftError(f"`states`: there is no state '{state}'{hint}", kind="data")
    return tuple(sorted(found))


def list_columns(year: int) -> tuple[str, ...]:
    """Return the columns of the official table that are kept, the features first."""
    relationship = "RELSHIPP" if year >= RELSHIPP_SINCE else "RELP"
    features = ("AGEP", "COW", "SCHL", "MAR", "OCCP", "POBP", relationship, "WKHP", "SEX", "RAC1P")
    return (*features, "PINCP")


def obtain_states(
    year: int, states: Sequence[str], *, on_progress: Progress = ignore_progress
) -> tuple[dict[str, pl.DataFrame], list[str]]:
    """Return the filtered rows of states, from the cache or downloaded.

    Parameters
    ----------
    year, states
        See `check_year` and `check_states`.
    on_progress
        Called during downloads.

    Returns
    -------
    tables, notes
        The columns of `list_columns` by state, as whole numbers; sentences that say what served
        them.
    """
    columns = list_columns(check_year(year))
    folder = get_cache_folder() / "acs" / str(year)
    tables = {}
    fetched = []
    for state in check_states(states):
        path = folder / f"{state}-income.parquet"
        table = _read_cached(path, columns)
        if table is None:
            make_folder(folder, "the cache folder")
            table = _fetch_state(year, state, on_progress)
            with atomic_write(path) as part:
                table.write_parquet(part)
            fetched.append(state)
        tables[state] = table
    cached = [state for state in tables if state not in fetched]
    host = urlsplit(_get_address()).netloc or "a folder"
    served = {"the cache": cached, host: fetched}
    notes = [f"acs {year}: {', '.join(s)} served by {by}" for by, s in served.items() if s]
    return tables, notes


def _get_address() -> str:
    address = os.environ.get(ADDRESS_VARIABLE) or ADDRESS
    if urlsplit(address).scheme not in ("https", "http", "file"):
        text = f"must begin with https://, http:// or file://, not {address[:60]}"
        raise FedgftError(f"{ADDRESS_VARIABLE} {text}", kind="network")
    return address if address.endswith("/") else f"{address}/"


def _read_cached(path: Path, columns: Sequence[str]) -> pl.DataFrame | None:
    """Return the rows of a finished state; None if it has to be fetched."""
    if not path.is_file():
        return None
    with suppress(pl.exceptions.PolarsError, OSError):
        table = pl.read_parquet(path, glob=False)
        if table.columns == list(columns) and table.height:
            return table
    return None


def _fetch_state(year: int, state: str, on_progress: Progress) -> pl.DataFrame:
    """Download the archive of a state into a temporary file, and return its filtered rows."""
    name = f"csv_p{state.lower()}.zip"
    url = f"{_get_address()}{year}/1-Year/{name}"
    with tempfile.TemporaryDirectory() as place:
        archive = Path(place) / name
        _download(url, archive, description=f"{name} of {year}", on_progress=on_progress)
        table = _read_archive(archive, list_columns(year), source=f"{name} of {year}")
    if not table.height:
        text = "no person is left of age above 16, income above 100 and hours above 0"
        raise data_error(f"{name} of {year}", f"{text}: leave {state} out")
    return table


def _download(url: str, path: Path, *, description: str, on_progress: Progress) -> None:
    """Download a file. A transfer that is cut off starts again, `ATTEMPTS` times in all."""
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(RETRY_WAIT)
        try:
            with path.open("wb") as file:
                _transfer(url, file, description=description, on_progress=on_progress)
            return
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"the server answers {error.code}"
            if error.code < 500:
                break
        except (OSError, ValueError, HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
    remedy = f"run the command again, or let {ADDRESS_VARIABLE} name another address"
    text = f"{url}: cannot be fetched ({' '.join(reason.split())[:120]}); {remedy}"
    raise FedgftError(text, kind="network")


def _transfer(url: str, file: BinaryIO, *, description: str, on_progress: Progress) -> None:
    done = 0
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
        total = int(response.headers.get("Content-Length") or 0) or None
        while chunk := response.read(CHUNK_BYTES):
            file.write(chunk)
            done += len(chunk)
            if done > MAX_ARCHIVE_BYTES:
                raise ValueError("sent far more than an archive")
            on_progress(description, done, total)
    if total is not None and done < total:
        raise ValueError(f"cut off after {done:,} of {total:,} bytes")


def _read_archive(path: Path, columns: Sequence[str], *, source: str) -> pl.DataFrame:
    """Return the filtered rows of the only .csv of an archive."""
    table = path.with_suffix(".csv")
    try:
        with zipfile.ZipFile(path) as archive:
            tables = [m for m in archive.infolist() if m.filename.lower().endswith(".csv")]
            if len(tables) != 1:
                raise ValueError(f"it holds {len(tables)} .csv files instead of one")
            with archive.open(tables[0]) as stream, table.open("wb") as file:
                left = MAX_TABLE_BYTES  # whatever size the archive announces
                while chunk := stream.read(CHUNK_BYTES):
                    left -= len(chunk)
                    if left < 0:
                        raise ValueError("its table is far too large")
                    file.write(chunk)
    except Exception as error:  # zipfile may raise any exception for a damaged archive
        reason = " ".join(str(error).split())[:120]
        raise file_error(source, f"the archive is damaged ({reason}); fetch it again") from None
    return _filter_rows(table, columns, source=source)


def _filter_rows(path: Path, columns: Sequence[str], *, source: str) -> pl.DataFrame:
    """Return the columns of the rows that ACSIncome keeps."""
    try:
        raw = pl.scan_csv(path, glob=False, infer_schema=False)
        known = raw.collect_schema().names()
        needed = (*columns, "PWGTP")
        if absent := [name for name in needed if name not in known]:
            raise data_error(source, f"no column '{absent[0]}'; the file has another form")
        numbers = raw.select(pl.col(needed).cast(pl.Int64))
        is_kept = (pl.col("AGEP") > 16) & (pl.col("PINCP") > 100) & (pl.col("WKHP") > 0)
        return numbers.filter(is_kept & (pl.col("PWGTP") >= 1)).select(columns).collect()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = str(error).strip().splitlines()[0][:120]
        raise data_error(source, f"cannot be read as a table of numbers: {reason}") from None
