"""Turn a user's table (CSV, Parquet or a frame in memory) into a data set; write result tables.

Nothing is guessed that the user can specify: the user names the columns of label, group, client and
split. The other columns are features, except those that `fedgft.data.features` excludes. Decisions
made while reading (a missing group, a filled-in number) are listed in the notes.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from itertools import count, islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.data.dataset import Dataset
from fedgft.data.encode import (
    MISSING,
    Categorical,
    Encoder,
    Names,
    as_text,
    data_error,
    encode_levels,
    get_column,
    holds_numbers_as_text,
    is_numeric,
    parse_numbers,
    put_positive_last,
    read_missing,
    suggest_name,
)
from fedgft.data.features import (
    CLIENT,
    GROUP,
    LABEL,
    LEFT_OUT,
    SPLIT,
    WEIGHT,
    Excluded,
    describe_excluded,
    exclude_columns,
    find_codes,
)
from fedgft.data.join import NAMES_CLIENT, find_client_names, join_tables
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import format_count, printable
from fedgft.metrics.group_axis import MAX_STRATA
from fedgft.store import atomic_write, expand_user, file_error, make_folder, refuse_link
from fedgft.validation import (
    NO_NUMBERS_AS_LABELS,
    check_column_names,
    check_instance,
    check_path,
    format_value,
)

if TYPE_CHECKING:
    import narwhals as nw
    import polars as pl
else:
    nw = LazyModule("narwhals")
    pl = LazyModule("polars")

MAX_VALUES = 200  # limit for a label or a group; a column with more holds numbers or names
MAX_TABLE = 1_000_000  # combinations of groups that a table of all of them may have
MAX_LISTED = 8  # columns in a message
MAX_LISTED_CELLS = 100_000  # intersections of groups that are searched for empty ones
COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"x\x01", b"x\x9c", b"x\xda")  # gzip, zstd, zlib
UTF16 = (b"\xff\xfe", b"\xfe\xff")
FORMULA = r"^[=+\-@\t\r\n＝＋－＠]"  # the start of a text that a spreadsheet would run
SIGNED_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
TABLE_ENDINGS = (".csv", ".parquet")
Codes = tuple[np.ndarray, Names]  # the index of each row, (n,), and the names of the indices
SEPARATORS = (",", ";", "\t")  # of the columns of a CSV; the first if a file has one column
MAX_SAMPLE = 1 << 20  # characters of a CSV that are searched for its separator
SAMPLE_ROWS = 100
NULL_VALUES = ["NA", "N/A"]  # missing values in a CSV, besides empty cells


@dataclass(frozen=True)
class Roles:
    """The columns of a table that have a role beside, or instead of, being a feature.

    Parameters
    ----------
    label
        The column with the classes.
    group
        One column, or several whose combinations are the groups.
    client
        The column that names the client of a row.
    split
        The column that says ``train`` or ``test``.
    positive
        The label value that is class 1 of the two; default: the alphabetically last, or the larger
        number.
    leave_out
        Columns that are not features.
    keep_group
        Whether the group is a feature, too.
    keep
        Columns that are features although they look like identifiers (`fedgft.data.features`).
    categorical
        Columns of numbers that are codes: each code becomes a category.
    missing
        Values that mean missing in any column, such as "?".
    weight
        The column that says how much a row counts.
    given
        Columns within whose values a metric such as "sp|department" compares groups; they are
        features, too, unless they are left out.
    """

    label: str
    group: str | Sequence[str]
    client: str | None = None
    split: str | None = None
    positive: str | int | None = None
    leave_out: Sequence[str] = ()
    keep_group: bool = False
    keep: Sequence[str] = ()
    categorical: Sequence[str] = ()
    missing: Sequence[str] = ()
    weight: str | None = None
    given: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_column_names("group", self.group)
        for name in ("leave_out", "keep", "categorical", "missing", "given"):
            object.__setattr__(self, name, check_column_names(name, getattr(self, name)))
        check_instance("keep_group", self.keep_group, bool)
        for name in ("label", "client", "split", "weight"):
            if name == "label" or getattr(self, name) is not None:
                check_instance(name, getattr(self, name), str, "it is the name of a column")
        if self.positive is not None and not isinstance(self.positive, str | int | np.generic):
            raise FedgftError(f"`positive` must be a label, not {format_value(self.positive)}")


def check_roles(frame: pl.DataFrame, roles: Roles, *, source: str) -> None:
    """Check that every named column exists and has one role; a group may also be the client."""
    groups = split_group_columns(roles.group, frame.columns)
    named = [("label", roles.label), *(("group", name) for name in groups)]
    named += [("client", roles.client), ("split", roles.split), ("weight", roles.weight)]
    taken: dict[str, str] = {}
    for role, name in named:
        if name is None:
            continue
        get_column(frame, name, source=source, option=f"`{role}`")
        if name in taken and {taken[name], role} != {"group", "client"}:
            if taken[name] == role:
                raise FedgftError(f"{source}: `{role}` names the column '{name}' twice")
            raise FedgftError(f"{source}: column '{name}' is both `{taken[name]}` and `{role}`")
        taken[name] = role
    for role in ("leave_out", "keep", "categorical"):
        for name in getattr(roles, role):
            if name not in frame.columns:
                hint = suggest_name(name, frame.columns)
                raise FedgftError(f"{source}: no column '{name}' (`{role}`){hint}")
            other = taken.get(name, "group")
            if name == roles.label or (role != "leave_out" and other != "group"):
                raise FedgftError(f"{source}: column '{name}' is both `{other}` and `{role}`")
    for name in roles.given:
        get_column(frame, name, source=source, option="`given`, or `metric` after |")
        if name == roles.label or name in groups or name in (roles.split, roles.weight):
            text = f"column '{name}' is both `given` and `{taken[name]}`"
            raise FedgftError(f"{source}: {text}: strata need rows of several groups and labels")
    kept = {"keep": roles.keep, "categorical": roles.categorical}
    kept["keep_group"] = groups if roles.keep_group else ()
    for role, names in kept.items():
        if both := [name for name in names if name in roles.leave_out]:
            raise FedgftError(f"{source}: column '{both[0]}' is both `{role}` and `leave_out`")


def split_group_columns(group: str | Sequence[str], columns: Sequence[str]) -> Names:
    """Return the group columns: a sequence, or "race,sex"; a column's own name may have a comma."""
    if not isinstance(group, str):
        names = tuple(group)
    elif group in columns:
        names = (group,)
    else:
        names = tuple(name.strip() for name in group.split(","))
    if not names or not all(names):
        raise FedgftError("`group` needs the name of a column")
    return names


def factorize(series: pl.Series) -> Codes:
    """Return the code of each value and the names of the codes.

    A null has the code -1. Numbers are sorted as numbers, the rest as text.
    """
    if series.dtype.is_integer() and not series.null_count():
        numbers, codes = np.unique(series.to_numpy(), return_inverse=True)
        return codes, tuple(as_text(pl.Series(numbers)))
    values = series.drop_nulls().unique()
    ordered = values if is_numeric(series) else as_text(values)
    names = tuple(as_text(ordered.sort()).unique(maintain_order=True))
    if not names:
        return np.full(len(series), -1, np.int64), ()
    codes = pl.Series(encode_levels(as_text(values), names))
    found = series.replace_strict(values, codes, default=-1, return_dtype=pl.Int64)
    return found.fill_null(-1).to_numpy(), names


def _get_complete(frame: pl.DataFrame, name: str, role: str, *, source: str) -> pl.Series:
    """Return a column without missing or infinite values."""
    if absent := frame[name].null_count():
        raise data_error(source, f"`{role}` column '{name}' lacks {format_count(absent, 'value')}")
    return _check_finite(frame[name], source=source)


def _check_finite(series: pl.Series, *, source: str) -> pl.Series:
    if series.dtype.is_float():
        parse_numbers(series, source=source)
    return series


def read_labels(frame: pl.DataFrame, roles: Roles, *, source: str) -> Codes:
    """Return the class index of each row, (n,), and the names of the classes."""
    series = _get_complete(frame, roles.label, "label", source=source)
    codes, names = factorize(series)
    problem = ""
    if series.dtype.is_float() and (series != series.round()).any():
        problem = f"holds fractions, not classes; {NO_NUMBERS_AS_LABELS}"
    elif len(names) < 2:
        problem = f"has one class only, '{names[0]}': there is nothing to learn"
    elif len(names) > MAX_VALUES:
        limit = f"more than the {MAX_VALUES} that a label may have"
        advice = f"put ranges of values together; {NO_NUMBERS_AS_LABELS}"
        problem = f"has {len(names):,} different values, {limit}: {advice}"
    if problem:
        raise data_error(source, f"`label` column '{roles.label}' {problem}")
    if roles.positive is None:
        return codes, names
    where = f"{source}: column '{roles.label}'"
    ordered = put_positive_last(names, str(roles.positive), where=where)
    return codes if ordered == names else 1 - codes, ordered


def describe_classes(classes: Names, roles: Roles) -> str:
    """Return a note that names the positive class, whose probability is the score.

    Unless the user names the positive class, it is the alphabetically last, or the larger number.
    """
    if len(classes) > 2:
        return f"label column '{roles.label}' has {len(classes)} classes"
    hint = "" if roles.positive is not None else " (`positive` names another)"
    return f"positive class: '{classes[1]}'{hint}"


def read_groups(
    frame: pl.DataFrame, roles: Roles, *, source: str
) -> tuple[np.ndarray, Names, list[str]]:
    """Find the combinations of the group columns that occur.

    Returns
    -------
    groups, names, notes
        The group index of each row, (n,), -1 where a part is missing; the names of the groups;
        notes for the user.
    """
    columns = split_group_columns(roles.group, frame.columns)
    factors = [factorize(_check_finite(frame[column], source=source)) for column in columns]
    for column, (_, names) in zip(columns, factors, strict=True):
        if len(names) > MAX_VALUES:
            found = f"`group` column '{column}' has {len(names):,} different values"
            raise data_error(source, f"{found}, more than {MAX_VALUES}: use ranges of values")
    groups, names, notes = combine_groups(factors, source=source)
    if not names:
        raise FedgftError(f"{source}: group column '{', '.join(columns)}' (`group`) is empty")
    return groups, names, notes


def combine_groups(factors: Sequence[Codes], *, source: str) -> tuple[np.ndarray, Names, list[str]]:
    """Combine the codes of one or several group columns, see `read_groups`."""
    parts = [names for _, names in factors]
    every, inverse = find_cells(factors)
    recorded = (every >= 0).all(axis=1)
    cells = every[recorded]
    names = tuple(_name_cell(cell, parts) for cell in cells.tolist())
    index = np.where(recorded, np.cumsum(recorded) - 1, -1)
    groups = index[inverse]
    recorded = groups >= 0
    notes = _note_empty_cells(cells, parts, source=source)
    if absent := int((~recorded).sum()):
        notes.append(f"{source}: rows whose group is not recorded: {absent}; they are kept")
    if len(names) == 1:
        notes.append(f"{source}: there is one group only, '{names[0]}'")
    return groups, names, notes


def find_cells(factors: Sequence[Codes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the combinations of codes that occur, (cells, columns) in order, and each row's cell.

    A missing value, -1, is a code of its own.
    """
    number = np.zeros(len(factors[0][0]), np.int64)  # of the combination, written in digits
    bases = [len(names) + 1 for _, names in factors]
    for (codes, _), base in zip(factors, bases, strict=True):
        number = number * base + (codes + 1)
    if math.prod(bases) <= MAX_TABLE:
        found = np.flatnonzero(np.bincount(number))
        place = np.zeros(math.prod(bases), np.int64)
        place[found] = np.arange(len(found))
        inverse = place[number]
    else:
        found, inverse = np.unique(number, return_inverse=True)
    cells = np.empty((len(found), len(bases)), np.int64)
    rest = found
    for column in reversed(range(len(bases))):
        rest, digit = np.divmod(rest, bases[column])
        cells[:, column] = digit - 1
    return cells, inverse


def _name_cell(cell: Sequence[int], parts: Sequence[Names]) -> str:
    return " & ".join(names[code] for names, code in zip(parts, cell, strict=True))


def _note_empty_cells(cells: np.ndarray, parts: Sequence[Names], *, source: str) -> list[str]:
    """List intersections without rows: nothing can be measured for them."""
    absent = math.prod(map(len, parts)) - len(cells)
    if not absent:
        return []
    found = set(map(tuple, cells.tolist()))
    every = islice(product(*(range(len(names)) for names in parts)), MAX_LISTED_CELLS)
    empty = [f"'{_name_cell(cell, parts)}'" for cell in every if cell not in found]
    shown = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
    return [f"{source}: {format_count(absent, 'intersection')} without any row: {shown}"]


def read_test_rows(frame: pl.DataFrame, roles: Roles, *, source: str) -> np.ndarray | None:
    """Return the mask of the user's own test rows, (n,), or None without a split column.

    The column holds "train" and "test", both at least once, in any case.
    """
    if roles.split is None:
        return None
    text = as_text(_get_complete(frame, roles.split, "split", source=source))
    codes = encode_levels(text.str.strip_chars().str.to_lowercase(), ("train", "test"))
    column = f"`split` column '{roles.split}'"
    if (codes < 0).any():
        found = text[int(np.flatnonzero(codes < 0)[0])]
        raise data_error(source, f"{column} must hold 'train' or 'test', not '{found}'")
    if len(set(codes.tolist())) < 2:
        raise data_error(source, f"{column} needs both 'train' and 'test' rows")
    return codes == 1


def read_weights(frame: pl.DataFrame, name: str | None, *, source: str) -> np.ndarray | None:
    """Return how much each row counts, (n,); None if no column says so.

    Numbers must be finite and at least 0, and not all 0.
    """
    if name is None:
        return None
    series = _get_complete(frame, name, "weight", source=source)
    column = f"`weight` column '{name}'"
    if not is_numeric(series):
        raise data_error(source, f"{column} must hold numbers, not {as_text(series)[0][:40]!r}")
    values = series.cast(pl.Float64).to_numpy()
    if (values < 0).any():
        at = int(np.argmax(values < 0))
        text = f"{column} must hold numbers of at least 0; row {at + 1:,} has {values[at]:g}"
        raise data_error(source, text)
    if not (values > 0).any():
        raise data_error(source, f"{column} is 0 in all rows: no row counts")
    return values


def read_strata(frame: pl.DataFrame, given: Sequence[str], *, source: str) -> dict[str, Any]:
    """Return the fields of a `Dataset` that divide its rows by these columns; none without.

    A missing value is a value of its own, so that marginal gaps keep all rows.
    """
    if not given:
        return {}
    text = [as_text(_check_finite(frame[name], source=source)).fill_null(MISSING) for name in given]
    codes, names, _ = combine_groups([factorize(column) for column in text], source=source)
    if len(names) > MAX_STRATA:
        found = f"`given` {', '.join(given)} has {len(names):,} different values"
        raise data_error(source, f"{found}, more than {MAX_STRATA}: use ranges of values")
    return {"strata": codes, "strata_names": names, "given": tuple(given)}


def load_table(
    path: str | Path,
    *,
    label: str,
    group: str | Sequence[str],
    client: str | None = None,
    split: str | None = None,
    positive: str | None = None,
    leave_out: Sequence[str] = (),
    keep_group: bool = False,
    keep: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Sequence[str] = (),
    weight: str | None = None,
    given: str | Sequence[str] = (),
) -> Dataset:
    """Read a CSV or Parquet file as a data set.

    Parameters
    ----------
    path
        The file; its ending, .csv or .parquet, determines the format.
    label, group, client, split, positive, leave_out, keep_group, keep, categorical, missing
        The roles of the columns, see `Roles`.
    weight, given
        The columns of weights and of strata, see `Roles`.

    Returns
    -------
    Dataset
        One row per row of the file. Its notes say which class is the positive one, and what was
        filled in.
    """
    check_path("path", path)
    roles = Roles(
        *(label, group, client, split, positive, leave_out, keep_group, keep, categorical),
        *(missing, weight, check_column_names("given", given)),
    )
    return from_frame(read_frame(path), Path(path).stem, roles=roles, source=str(path))


def load_tables(
    paths: Sequence[str | Path],
    *,
    label: str,
    group: str | Sequence[str],
    client: str | None = None,
    split: str | None = None,
    positive: str | int | None = None,
    leave_out: Sequence[str] = (),
    keep_group: bool = False,
    keep: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Sequence[str] = (),
    weight: str | None = None,
    given: str | Sequence[str] = (),
) -> Dataset:
    """Read several CSV or Parquet files as one data set, with one client per file.

    Parameters
    ----------
    paths
        The files, all with the same columns. A client has the name of its file without the ending.
    label, group, split, positive, leave_out, keep_group, keep, categorical, missing
        The roles of the columns, see `Roles`.
    weight, given
        The columns of weights and of strata, see `Roles`.
    client
        The column that names the client of a row, in place of its file.

    Returns
    -------
    Dataset
        The rows of the first file, then those of the second, and so on. A column that holds one
        value per file, such as the name of a bank, is not a feature.

    Raises
    ------
    FedgftError
        The columns of the files differ; the message names file and column.
    """
    files = [Path(check_path("paths", path)) for path in paths]
    names = [file.stem for file in files]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if not files:
        raise FedgftError("must name a file, or several", field="paths")
    if repeated is not None:
        same = ", ".join(str(file) for file in files if file.stem == repeated)
        text = f"`data`: two clients would have the name '{repeated}' ({same}): rename a file"
        raise FedgftError(text, field="data")
    roles = Roles(
        *(label, group, client, split, positive, leave_out, keep_group, keep, categorical),
        *(missing, weight, check_column_names("given", given)),
    )
    tables = {str(file): _replace_missing(read_frame(file), roles) for file in files}
    first = next(iter(tables.values()))
    frame = join_tables(
        tables,
        label=label,
        groups=split_group_columns(group, first.columns),
        as_names={*filter(None, (client, split)), *roles.categorical, *roles.leave_out},
    )
    if client is not None:
        return from_frame(frame, ", ".join(names), roles=roles, source=", ".join(tables))
    owners = np.repeat(np.arange(len(files)), [table.height for table in tables.values()])
    return from_frame(
        frame,
        ", ".join(names),
        roles=roles,
        source=", ".join(tables),
        clients=(owners, tuple(names)),
        client_columns=find_client_names(tables),
    )


def _replace_missing(frame: pl.DataFrame, roles: Roles) -> pl.DataFrame:
    """Return the table with null for each value that means missing."""
    if not roles.missing:
        return frame
    return frame.with_columns(read_missing(column, roles.missing) for column in frame)


def read_frame(path: str | Path) -> pl.DataFrame:
    """Read the raw columns of a CSV or Parquet file; the ending determines the format."""
    file = check_table_file(path)
    with report_read_errors(file):
        if _is_parquet(file):
            frame = pl.read_parquet(file, glob=False)
        else:
            frame = pl.read_csv(
                file,
                glob=False,
                separator=detect_separator(file),
                infer_schema_length=None,
                null_values=NULL_VALUES,
            )
    if frame.height == 0:
        raise data_error(path, "the file has no rows")
    return frame


def read_rows_as_text(path: str | Path) -> list[str]:
    """Return every row of a CSV or Parquet file as one line of JSON, in the order of `read_frame`.

    The text of a row depends on that row alone. Cells of a CSV are taken as they are written,
    because the type that `read_frame` gives a column depends on all rows. In a Parquet file 1.0 is
    written as 1, so that a column of whole numbers stays the same when a missing value turns it
    into floats.
    """
    file = check_table_file(path)
    with report_read_errors(file):
        if _is_parquet(file):
            numbers = pl.selectors.numeric().cast(pl.String).str.strip_suffix(".0")
            frame = pl.read_parquet(file, glob=False).with_columns(numbers)
        else:
            separator = detect_separator(file)
            frame = pl.read_csv(file, glob=False, separator=separator, infer_schema=False)
        return frame.select(pl.struct(pl.all()).struct.json_encode()).to_series().to_list()


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def check_table_file(path: str | Path) -> Path:
    """Return the path of a table that can be read: CSV in UTF-8 with distinct names, or Parquet.

    The checks are needed because Polars would silently decompress a file, accept UTF-16, and rename
    a column whose name is in the header twice, so that a label could pass as a feature.
    """
    file = expand_user(path)
    if file.suffix.lower() not in TABLE_ENDINGS:
        raise file_error(path, "the ending must be .csv or .parquet")
    if not file.is_file():
        raise file_error(path, "no such file")
    if file.stat().st_size == 0:
        raise file_error(path, "the file is empty")
    if _is_parquet(file):
        return file
    with report_read_errors(file):
        with file.open("rb") as stream:
            start = stream.read(4)
        if start.startswith(COMPRESSED):
            raise file_error(path, "is compressed; unpack it first")
        if start.startswith(UTF16):
            raise file_error(path, "is UTF-16 text; save it as UTF-8")
        with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
            rows = csv.reader(lines, delimiter=detect_separator(file))
            header = next((names for names in rows if names), [])
        if repeated := [name for name, times in Counter(header).items() if times > 1]:
            raise data_error(file, f"column '{repeated[0]}' is in the header more than once")
    return file


def detect_separator(path: str | Path) -> str:
    """Return what separates the columns of a CSV file: a comma, a semicolon or a tab.

    The header decides: the separator is the one that occurs in it, outside of quotes. If several
    do, it is the one that divides most of the first rows into as many cells as the header. A file
    with one column has a comma.

    Parameters
    ----------
    path
        A CSV file in UTF-8.
    """
    with expand_user(path).open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        start = stream.read(MAX_SAMPLE)
    if len(start) == MAX_SAMPLE:
        start = start[: start.rfind("\n") + 1]  # without the last line, which is incomplete
    return max(SEPARATORS, key=lambda separator: _count_fitting_rows(start, separator))


def _count_fitting_rows(text: str, separator: str) -> tuple[float, int]:
    """Return the share of rows with as many cells as the header, and this number of cells.

    Both are zero if the header is not divided at all.
    """
    found = csv.reader(StringIO(text, newline=""), delimiter=separator)
    try:
        rows = [row for row in islice(found, SAMPLE_ROWS) if row]
    except csv.Error:
        return 0.0, 0
    widths = [len(row) for row in rows]
    if not widths or widths[0] == 1:
        return 0.0, 0
    return widths.count(widths[0]) / len(widths), widths[0]


@contextmanager
def report_read_errors(file: Path) -> Iterator[None]:
    """Turn the errors of a file reader into a `FedgftError` of one line."""
    try:
        yield
    except FedgftError:
        raise
    except read_errors() as error:
        kind = file.suffix[1:].upper()
        raise file_error(file, f"cannot be read as {kind}: {first_line(error)}") from None


def read_errors() -> tuple[type[BaseException], ...]:
    """Return the errors that readers of files raise.

    Some damaged files make Polars panic; that error is not a subclass of `Exception`.
    """
    polars = pl.exceptions
    return (polars.PolarsError, polars.PanicException, OSError, ValueError, csv.Error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, for a message."""
    line = (str(error).strip().splitlines() or ["unreadable"])[0]
    return printable(line.replace("`", "'"))[:160]  # backquotes would name a setting


def to_polars(frame: Any, name: str = "frame") -> pl.DataFrame:
    """Return a pandas, polars or pyarrow table as a polars frame.

    Missing values of any kind (NaN, NA, None) become null. An index is dropped.

    Parameters
    ----------
    frame
        A table in memory.
    name
        What error messages call it.
    """
    if isinstance(frame, pl.DataFrame):
        return frame
    try:
        table = nw.from_native(frame, eager_only=True)
    except (TypeError, nw.exceptions.NarwhalsError):
        text = f"must be a table of pandas, polars or pyarrow, not {format_value(frame)}"
        raise FedgftError(text, field=name) from None
    try:
        return pl.DataFrame([_to_polars_series(column) for column in table.iter_columns()])
    except (pl.exceptions.PolarsError, nw.exceptions.NarwhalsError, TypeError, ValueError) as error:
        text = f"cannot be read as a table: {first_line(error)}"
        raise FedgftError(text, field=name) from None


def _to_polars_series(column: nw.Series) -> pl.Series:
    missing = column.is_null().to_list()
    if column.dtype in (nw.Categorical, nw.Enum):
        pairs = zip(column.to_list(), missing, strict=True)
        texts = [None if absent else str(value) for value, absent in pairs]
        return pl.Series(str(column.name), texts, dtype=pl.String)
    numeric = column.dtype.is_numeric()
    truth = column.dtype == nw.Boolean
    if (numeric or truth) and not any(missing):
        return pl.Series(str(column.name), column.to_numpy())
    pairs = zip(column.to_list(), missing, strict=True)
    values = [None if absent else float(value) if numeric else value for value, absent in pairs]
    return pl.Series(
        str(column.name), values, pl.Float64 if numeric else pl.Boolean if truth else None
    )


def from_frame(
    frame: Any,
    name: str,
    *,
    roles: Roles,
    source: str | None = None,
    clients: Codes | None = None,
    client_columns: Sequence[str] = (),
) -> Dataset:
    """Make a data set from a table in memory.

    Parameters
    ----------
    frame
        A pandas, polars or pyarrow table.
    name
        The name of the data set.
    roles
        Which column is the label, the group, the client, the split.
    source
        What error messages and notes call the table; default: `name`.
    clients
        The client of each row and the names of the clients, if no column names them.
    client_columns
        Columns that are not features, because they say what `clients` says.
    """
    check_instance("name", name, str)
    check_instance("roles", roles, Roles, "for example Roles('repaid', 'sex')")
    table = to_polars(frame)
    if table.height == 0:
        raise FedgftError("has no rows", field="frame", kind="data")
    source = source or name
    data = build_dataset(table, source, roles=roles, clients=clients, client_columns=client_columns)
    notes = [describe_classes(data.classes, roles), *describe_excluded(data.excluded)]
    notes = [f"{source}: {text}" for text in notes]
    return replace(data, name=name, notes=(*notes, *data.notes))


def build_dataset(
    frame: pl.DataFrame,
    source: str,
    *,
    roles: Roles,
    prepared: bool = False,
    clients: Codes | None = None,
    client_columns: Sequence[str] = (),
) -> Dataset:
    """Make a data set without a note on its classes; public data sets need none.

    With a split column the encoder learns levels and means from the training rows alone.

    Parameters
    ----------
    frame, source, roles, clients, client_columns
        See `from_frame`.
    prepared
        Whether every column without a role is a feature, as in public data sets. Otherwise columns
        that look like identifiers are not.
    """
    frame = _replace_missing(frame, roles)
    known = read_roles(frame, roles, source=source)
    if clients is not None:
        known["clients"], known["client_names"] = clients
    excluded = _exclude_columns(
        frame, roles, source=source, prepared=prepared, client_columns=client_columns
    )
    no_features = dict(excluded)
    names = [name for name in frame.columns if name not in no_features]
    if not names:
        listed = ", ".join(f"'{name}': {why}" for name, why in excluded[:MAX_LISTED])
        listed += ", ..." if len(excluded) > MAX_LISTED else ""
        raise data_error(source, f"no column is left to learn from ({listed})")
    training = None if known["test"] is None else ~known["test"]
    encoder = Encoder.fit(
        frame,
        names,
        rows=training,
        categorical=roles.categorical,
        missing=tuple(roles.missing),
        indicators=not prepared,
        source=source,
    )
    features, notes = encoder.encode(frame, source=source)
    type_notes = [
        f"{source}: text column '{field.name}' holds numbers only: they are taken as "
        f"{len(field.levels)} categories"
        for field in encoder.fields
        if isinstance(field, Categorical) and holds_numbers_as_text(frame[field.name])
    ]
    codes = [] if prepared else find_codes(frame, names, kept=(*roles.categorical, *roles.keep))
    if codes:
        listed = ", ".join(f"'{name}'" for name in codes)
        text = f"columns of few different whole numbers are taken as amounts: {listed}"
        type_notes.append(f"{source}: {text}; if they are codes, name them in categorical")
    known["notes"] = (*known["notes"], *type_notes, *notes)
    return Dataset(
        features=features, columns=encoder.columns, encoder=encoder, excluded=excluded, **known
    )


def _exclude_columns(
    frame: pl.DataFrame, roles: Roles, *, source: str, prepared: bool, client_columns: Sequence[str]
) -> Excluded:
    """Return the columns that are not features, with the reasons."""
    groups = split_group_columns(roles.group, frame.columns)
    seen = groups if roles.keep_group else roles.keep
    given = {*groups, *roles.keep, *roles.categorical}
    reasons = {name: NAMES_CLIENT for name in client_columns if name not in given}
    reasons |= dict.fromkeys((name for name in groups if name not in seen), GROUP)
    reasons |= dict.fromkeys(roles.leave_out, LEFT_OUT)
    named = {roles.label: LABEL, roles.client: CLIENT, roles.split: SPLIT, roles.weight: WEIGHT}
    reasons |= {name: why for name, why in named.items() if name is not None}
    keep = frame.columns if prepared else given
    return exclude_columns(frame, reasons, keep, source=source)


def read_roles(frame: pl.DataFrame, roles: Roles, *, source: str) -> dict[str, Any]:
    """Return the fields of a `Dataset` that the roles decide: all but the features."""
    check_roles(frame, roles, source=source)
    labels, classes = read_labels(frame, roles, source=source)
    groups, group_names, notes = read_groups(frame, roles, source=source)
    known: dict[str, Any] = {"name": source, "labels": labels, "classes": classes}
    known["notes"] = tuple(notes)
    known |= {"groups": groups, "group_names": group_names}
    if roles.client is not None:
        column = _get_complete(frame, roles.client, "client", source=source)
        known["clients"], known["client_names"] = factorize(column)
    known["weights"] = read_weights(frame, roles.weight, source=source)
    if roles.weight is not None:
        text = f"rows count by the weight in '{roles.weight}', in training and in every measurement"
        known["notes"] = (*known["notes"], f"{source}: {text}")
    known |= read_strata(frame, roles.given, source=source)
    return {**known, "test": read_test_rows(frame, roles, source=source)}


def check_table_path(path: Path) -> Path:
    """Check that a table can be written to this path, before any work is done for it."""
    if path.suffix.lower() not in TABLE_ENDINGS:
        raise FedgftError(f"`out` {path}: the ending must be .csv or .parquet")
    if path.is_dir():
        raise FedgftError(f"`out` {path}: is a folder")
    refuse_link(path, "`out`")
    make_folder(path.parent)
    return path


def write_table(frame: pl.DataFrame, path: Path) -> Path:
    """Write CSV or Parquet; the ending decides. CSV formulas are escaped (`escape_formulas`)."""
    with atomic_write(path) as part:
        try:
            if _is_parquet(path):
                frame.write_parquet(part)
            else:
                escape_formulas(frame)[0].write_csv(part)
        except pl.exceptions.PolarsError as error:  # the Parquet writer, if the disk is full
            raise OSError(str(error)) from error
    return path


def escape_formulas(frame: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Put an apostrophe in front of texts that a spreadsheet would run as formulas.

    This affects cells and column names that begin with =, +, -, @, a tab or a line end. Numbers,
    and texts that are numbers (-0.5), stay as they are.

    Returns
    -------
    frame, changed
        The table for a CSV file, and how many of its cells and names were changed.
    """
    names = [n for n, kind in frame.schema.items() if kind in (pl.String, pl.Categorical, pl.Enum)]
    formulas = [_is_formula(pl.col(name).cast(pl.String)) for name in names]
    changed = sum(frame.select(formulas).sum().row(0)) if names else 0
    escaped = [
        pl.when(test).then("'" + pl.col(name).cast(pl.String)).otherwise(pl.col(name)).alias(name)
        for name, test in zip(names, formulas, strict=True)
    ]
    renamed: dict[str, str] = {}
    for name in frame.columns:
        if re.match(FORMULA, name) and not re.fullmatch(SIGNED_NUMBER.strip("^$"), name):
            taken = (*frame.columns, *renamed.values())
            renamed[name] = next(n for i in count(1) if (n := "'" * i + name) not in taken)
    return frame.with_columns(escaped).rename(renamed), changed + len(renamed)


def _is_formula(text: pl.Expr) -> pl.Expr:
    return (text.str.contains(FORMULA) & ~text.str.contains(SIGNED_NUMBER)).fill_null(False)
