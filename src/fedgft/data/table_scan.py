"""Read tables that are larger than memory, in batches of rows.

A table is one file or many (`fedgft.data.table_parts`). Other columns of its rows, such as the
groups, may be stored in a second table: a key matches the rows, and only the second table is held
in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgft.data.encode import MAX_NAME_LENGTH, as_text, data_error, get_column, suggest_name
from fedgft.data.table import (
    NULL_VALUES,
    check_table_file,
    detect_separator,
    first_line,
    read_errors,
    report_read_errors,
)
from fedgft.data.table_parts import Part, choose_name, find_parts
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import one_line, printable
from fedgft.validation import check_column_names, check_instance, check_path

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

MISSING_VALUES = [*NULL_VALUES, "", "nan", "NaN", "null", "NULL"]  # texts that mean missing, in CSV
SAMPLE_BYTES = 1 << 20  # of a CSV, to estimate its number of rows
BATCH_ROWS = 250_000
MATCHED = "\0matched"  # a column that marks rows with a match; no file has one of this name
QUOTED = r"('[^']*'|\"[^\"]*\")"  # a text or a name in SQL
DECIMAL = r"(?<![\w.])(\d+\.\d*|\.\d+)(?![\w.])"
Schema = Mapping[str, Any]  # types of columns, by name
NO_VALUES = "no values"  # the kind of a column without any


@dataclass(frozen=True)
class TableFiles:
    """The files of one table.

    Parameters
    ----------
    source
        What error messages call the table.
    name
        The name of its file or folder; None for a pattern or several paths.
    parts
        The files.
    schemas
        The columns and types that occur, each with the first file that has them.
    """

    source: str
    name: str | None
    parts: tuple[Part, ...]
    schemas: tuple[tuple[Part, Schema], ...]

    @classmethod
    def open(cls, paths: Sequence[str | Path]) -> TableFiles:
        """Find the files of a table and check that each can be read."""
        parts = find_parts(paths)
        schemas: list[tuple[Part, Schema]] = []
        for part in parts:
            schema = read_schema(part)
            if all(schema != known for _, known in schemas):
                schemas.append((part, schema))
        source = str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        return cls(source, choose_name(paths), tuple(parts), tuple(schemas))

    @property
    def columns(self) -> list[str]:
        """The names of the columns of the first file."""
        return list(self.schemas[0][1])

    def estimate_rows(self) -> int:
        """Return the number of rows: that of Parquet files exactly, of CSV files roughly."""
        first = self.parts[0]
        if first.is_parquet:
            scans = [_scan_file(part) for part in self.parts]
            if len(self.schemas) == 1:  # many times faster than one file after the other
                files = [part.file for part in self.parts]
                scans = [pl.scan_parquet(files, glob=False, hive_partitioning=False)]
            with report_read_errors(first.file):
                return sum(scan.select(pl.len()).collect().item() for scan in scans)
        with first.file.open("rb") as file:
            sample = file.read(SAMPLE_BYTES)
        total = sum(part.file.stat().st_size for part in self.parts)
        return round(total * max(sample.count(b"\n"), 1) / len(sample))

    def check_columns(self, columns: Mapping[str, str]) -> None:
        """Raise a `FedgftError` if a file lacks a column, or holds another kind of values in it.

        Parameters
        ----------
        columns
            The names of the columns, each with the setting that named it, for the message.
        """
        first = self.schemas[0][0]
        frames = [(part, pl.DataFrame(schema=schema)) for part, schema in self.schemas]
        for name, option in columns.items():
            kinds: dict[str, Part] = {}
            for part, empty in frames:
                if part is not first and name not in empty.columns:
                    text = f"no column '{name}' (`{option}`), which {first.file} has"
                    raise data_error(part.file, text)
                source = self.source if len(frames) == 1 else str(part.file)
                series = get_column(empty, name, source=source, option=f"`{option}`")
                kinds.setdefault(_find_kind(series.dtype), part)
            kinds.pop(NO_VALUES, None)
            if len(kinds) > 1:
                (kind, part), (other, where) = list(kinds.items())[:2]
                text = f"column '{name}' holds {other}, where {part.file} holds {kind}"
                raise data_error(where.file, f"{text}: write it alike in all files")

    def scan(self, names: Sequence[str]) -> pl.LazyFrame:
        """Return columns of all files, which `check_columns` has checked."""
        types = {name: {schema[name] for _, schema in self.schemas} for name in names}
        as_strings = [name for name, found in types.items() if len(found) > 1 and _is_text(*found)]
        scans = []
        for part in self.parts:
            scan = _scan_file(part).select(_exactly(names))
            scans.append(scan.with_columns(_exactly(as_strings).cast(pl.String)))
        return scans[0] if len(scans) == 1 else pl.concat(scans, how="vertical_relaxed")

    def collect(
        self, scan: pl.LazyFrame, names: Sequence[str], rows: int
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows of a query on this table, at most `rows` rows at a time.

        Parameters
        ----------
        scan
            The query.
        names
            The columns of this table that it reads. If it fails, they are read file by file, so
            that the error names the file.
        rows
            The largest number of rows of a batch.
        """
        try:
            yield from scan.collect_batches(chunk_size=rows)
        except read_errors() as error:
            for part in self.parts:
                with report_read_errors(part.file):
                    for _ in _scan_file(part).select(_exactly(names)).collect_batches():
                        pass
            raise data_error(self.source, f"the query fails: {first_line(error)}") from None


@dataclass(frozen=True)
class Table:
    """The rows to measure: see `open_table`."""

    files: TableFiles
    other: TableFiles | None = None
    key: tuple[str, ...] = ()
    where: str = ""

    @property
    def columns(self) -> list[str]:
        """The names of the columns, also those of the second table."""
        own = self.files.columns
        more = [] if self.other is None else self.other.columns
        return [*own, *(name for name in more if name not in own)]

    def estimate_rows(self) -> int | None:
        """Return about how many rows `read_batches` yields; None if a condition decides it."""
        return None if self.where else self.files.estimate_rows()

    def split(self) -> Iterator[Table]:
        """Yield each file as a table of its own."""
        for part in self.files.parts:
            files = TableFiles(str(part.file), None, (part,), ((part, read_schema(part)),))
            yield replace(self, files=files)

    def read_batches(
        self, columns: Mapping[str, str], rows: int = BATCH_ROWS
    ) -> Iterator[pl.DataFrame]:
        """Return columns of the table, at most `rows` rows at a time, in the order of the files.

        The columns are checked, and the second table is read, before the first batch.

        Parameters
        ----------
        columns
            The names of the columns, each with the setting that named it, for error messages.
        rows
            The largest number of rows of a batch.
        """
        condition = _parse_condition(self.where) if self.where else None
        used = {} if condition is None else dict.fromkeys(condition.meta.root_names(), "where")
        own, others = self._split_columns({**used, **columns})
        scan = self.files.scan(own)
        wanted = list(columns)
        if self.other is not None:
            frame = _load(self.other, self.key, others)
            scan = _match_rows(scan, frame, self.key, source=self.other.source)
            wanted.append(MATCHED)
        if condition is not None:
            _check_condition(scan, condition, self.where)
            scan = scan.filter(condition)
        batches = self.files.collect(scan.select(_exactly(wanted)), own, rows)
        return batches if self.other is None else self._require_match(batches, self.other)

    def _split_columns(self, columns: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Return the names of the columns to read here, and those to read in the second table."""
        other = self.other
        if other is None:
            self.files.check_columns(columns)
            return list(columns), []
        source = self.files.source
        theirs = [name for name in columns if name in other.columns and name not in self.key]
        own = [name for name in columns if name not in theirs]
        for name in theirs:
            if name in self.files.columns:
                text = f"column '{name}' is in {source} as well; rename or remove one of them"
                raise data_error(other.source, text)
        for name in own:
            if name not in self.files.columns:
                hint = suggest_name(name, self.columns)
                text = f"no column '{name}' (`{columns[name]}`), nor in {other.source}{hint}"
                raise data_error(source, text)
        if not theirs:
            text = f"`join` {other.source}: holds none of the columns that are measured"
            raise FedgftError(text, kind="data")
        keys = dict.fromkeys(self.key, "key")
        self.files.check_columns({name: columns[name] for name in own} | keys)
        other.check_columns(keys | {name: columns[name] for name in theirs})
        return list(dict.fromkeys((*own, *self.key))), theirs

    def _require_match(
        self, batches: Iterable[pl.DataFrame], other: TableFiles
    ) -> Iterator[pl.DataFrame]:
        """Yield the batches; raise a `FedgftError` at the end if the second table has no row."""
        rows = matched = 0
        for batch in batches:
            rows += batch.height
            matched += batch.height - batch[MATCHED].null_count()
            yield batch.drop(MATCHED)
        if rows and not matched:
            text = f"has none of the keys of {self.files.source} (`key` {' '.join(self.key)})"
            raise data_error(other.source, f"{text}: write them alike in both tables")


def open_table(
    path: str | Path | Sequence[str | Path],
    *,
    join: str | Path | Sequence[str | Path] | None = None,
    key: str | Sequence[str] = (),
    where: str | None = None,
) -> Table:
    """Open a table that may be larger than memory; its rows are not read yet.

    Parameters
    ----------
    path
        A CSV or Parquet file, a folder of such files, a pattern, or a list of them. All files are
        of one kind. Folders may state a column, as in bank=north/rows.parquet.
    join
        A second table with other columns of the same rows, such as the groups. These columns are
        held in memory. None: there is none.
    key
        The columns that match the rows of both tables. No two rows of the second table may have
        the same key. Rows without a match have no values in the columns of the second table.
    where
        The rows to read: a condition in SQL, such as "year = 2025 AND bank IN ('north', 'south')".
        The columns of a CSV file are text. None: all rows.

    Raises
    ------
    FedgftError
        A file is missing or damaged, or the options do not fit together.
    """
    keys = check_column_names("key", key)
    files = TableFiles.open(_check_paths("path", path))
    if (join is None) != (not keys):
        given, missing = ("key", "join") if join is None else ("join", "key")
        raise FedgftError(f"`{given}` needs `{missing}`", field=missing, kind="missing")
    other = None if join is None else TableFiles.open(_check_paths("join", join))
    if where is not None:
        check_instance("where", where, str)
        if not where.strip():
            raise FedgftError("`where` needs a condition", kind="missing")
    return Table(files, other, keys, where or "")


def _check_paths(name: str, value: Any) -> tuple[str | Path, ...]:
    """Return the paths of a table: one, or several."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise FedgftError(f"`{name}` needs a file or a folder", kind="missing")
        return tuple(check_path(name, each) for each in value)
    return (check_path(name, value),)


# Files


def read_schema(part: Part) -> Schema:
    """Check a file; return its columns and types, with the columns that its folders state."""
    file = check_table_file(part.file)
    with report_read_errors(file):
        if part.is_parquet:
            schema = pl.Schema(pl.read_parquet_schema(file))
        else:
            schema = _scan_csv(file).collect_schema()
    more = {name: pl.String() for name in part.folder_values if name not in schema}
    return pl.Schema({**schema, **more}) if more else schema


def _scan_file(part: Part) -> pl.LazyFrame:
    """Return the rows of a file, with the columns that its folders state.

    A column of the file itself comes before one of the same name that a folder states.
    """
    if part.is_parquet:
        scan = pl.scan_parquet(part.file, glob=False, hive_partitioning=False)
    else:
        scan = _scan_csv(part.file)
    if not part.folder_values:
        return scan
    known = scan.collect_schema()
    values = {name: value for name, value in part.folder_values.items() if name not in known}
    return scan.with_columns(pl.lit(v, pl.String).alias(name) for name, v in values.items())


def _scan_csv(file: Path) -> pl.LazyFrame:
    """Return the rows of a CSV file; columns are separated by commas, semicolons or tabs.

    All columns are read as text, so that the first rows do not determine their types.
    """
    return pl.scan_csv(
        file,
        glob=False,
        separator=detect_separator(file),
        infer_schema=False,
        null_values=MISSING_VALUES,
        low_memory=True,
    )


def _exactly(names: Iterable[str]) -> Any:
    """Return a selector of the columns with these names, which are no patterns."""
    return pl.selectors.by_name(*names)


def _find_kind(dtype: Any) -> str:
    """Return what a column of a type holds; values of different kinds are never the same."""
    if dtype == pl.Null:
        return NO_VALUES
    if dtype.is_numeric():
        return "numbers"
    return "text" if _is_text(dtype) else str(dtype)


def _is_text(*dtypes: Any) -> bool:
    return all(dtype in (pl.String, pl.Categorical, pl.Enum, pl.Null) for dtype in dtypes)


# The second table


def _load(table: TableFiles, key: Sequence[str], names: Sequence[str]) -> pl.DataFrame:
    """Return columns of all rows that have a key."""
    columns = [*key, *names]
    batches = table.collect(table.scan(columns), columns, BATCH_ROWS)
    frame = pl.concat([table.scan(columns).head(0).collect(), *batches])
    frame = frame.with_columns(pl.selectors.float().fill_nan(None)).drop_nulls(list(key))
    if frame.height == 0:
        raise data_error(table.source, f"the file has no rows with a `key` {' '.join(key)}")
    return frame.with_columns(pl.lit(True).alias(MATCHED))


def _match_rows(
    scan: pl.LazyFrame, frame: pl.DataFrame, key: Sequence[str], *, source: str
) -> pl.LazyFrame:
    """Return the rows with the columns of the rows of a frame that have the same key.

    Parameters
    ----------
    scan, frame
        The rows, and the columns to add to them.
    key
        The columns that match the rows; no two rows of the frame may have the same key.
    source
        What error messages call the frame.
    """
    schema = scan.select(_exactly(key)).collect_schema()
    for name in key:
        ours, theirs = schema[name], frame[name].dtype
        if ours.is_integer() and theirs.is_integer():  # what does not fit has no match
            frame = frame.with_columns(pl.col(name).cast(ours, strict=False))
        elif ours != theirs:
            text = pl.col(name).map_batches(as_text, pl.String, is_elementwise=True)
            scan = scan.with_columns(text)
            frame = frame.with_columns(as_text(frame[name]))
    frame = frame.drop_nulls(list(key))
    repeated = frame.filter(frame.select(key).is_duplicated())
    if repeated.height:
        value = ", ".join(str(repeated[name][0]) for name in key)[:MAX_NAME_LENGTH]
        text = f"`key` {' '.join(key)} '{printable(value)}' is in more than one row"
        raise data_error(source, f"{text}; each row needs its own")
    return scan.join(frame.lazy(), on=list(key), how="left", maintain_order="left")


# Conditions


def _parse_condition(text: str) -> pl.Expr:
    """Return a condition in SQL as an expression.

    Polars reads 0.5 as a decimal number, and compares it with text as a text. It reads 0.5e0 as a
    float, and refuses to compare it with text.
    """
    pieces = re.split(QUOTED, text)
    pieces[::2] = [re.sub(DECIMAL, r"\g<0>e0", piece) for piece in pieces[::2]]
    try:
        return pl.sql_expr("".join(pieces))
    except pl.exceptions.PolarsError as error:
        raise _condition_error(text, error) from None


def _check_condition(scan: pl.LazyFrame, condition: pl.Expr, text: str) -> None:
    """Raise a `FedgftError` if the condition cannot be evaluated, or is not true or false."""
    empty = pl.DataFrame(schema=scan.collect_schema())
    try:
        found = empty.select(condition).schema
        empty.filter(condition)
    except pl.exceptions.PolarsError as error:
        raise _condition_error(text, error) from None
    if found.dtypes() != [pl.Boolean]:
        raise FedgftError(f"`where` {text}: must be a condition, such as year = '2025'")


def _condition_error(text: str, error: Exception) -> FedgftError:
    reason = first_line(error)
    hint = ""
    if "string" in reason:
        hint = "; columns of CSV files are text: write '1' in quotes, or CAST(x AS DOUBLE)"
    return FedgftError(f"`where` {one_line(text, 80)}: {reason}{hint}")
