"""Put the tables of several clients together, one table per client.

The tables must have the same columns with values of the same kind. Values of label and group must
be spelled alike: "Man" and "man" would be two groups, and the gap between them means nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from fedgft.data.encode import (
    MAX_NAME_LENGTH,
    as_text,
    data_error,
    is_numeric,
    is_text,
    suggest_name,
)
from fedgft.errors import LazyModule

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

Tables = Mapping[str, "pl.DataFrame"]  # what error messages call a table -> the table
MAX_LISTED = 5  # most values that an error lists
NAMES_CLIENT = "one value in each file"


def join_tables(
    tables: Tables, *, label: str, groups: Sequence[str], as_names: Collection[str]
) -> pl.DataFrame:
    """Return the rows of all tables, in order, with the columns of the first one.

    Parameters
    ----------
    tables
        The tables by the names that error messages call them, such as the paths of their files.
    label, groups
        The columns with the classes and with the groups, whose values must be spelled alike.
    as_names
        Columns whose values are names, so that numbers and text may be in different tables.

    Raises
    ------
    FedgftError
        A column is missing in a table, or holds values of another kind or spelling than elsewhere.
    """
    sources = list(tables)
    first = tables[sources[0]]
    for source in sources[1:]:
        _check_columns(first.columns, tables[source].columns, sources[0], source)
    columns = []
    for name in first.columns:
        parts = {source: table[name] for source, table in tables.items()}
        columns.append(_join_column(parts, as_names={*as_names, label, *groups}))
    if label in first.columns:
        _check_classes({source: table[label] for source, table in tables.items()})
    for name in (label, *groups):
        if name in first.columns:
            _check_spelling({source: table[name] for source, table in tables.items()})
    return pl.DataFrame(columns)


def _check_columns(
    first: Sequence[str], columns: Sequence[str], first_source: str, source: str
) -> None:
    for name in first:
        if name not in columns:
            more = [other for other in columns if other not in first]
            hint = suggest_name(name, more) if more else ""
            raise data_error(source, f"no column '{name}', which {first_source} has{hint}")
    for name in columns:
        if name not in first:
            advice = "take it out, or add it to every file"
            raise data_error(source, f"column '{name}' is not in {first_source}: {advice}")


def _join_column(parts: Mapping[str, pl.Series], *, as_names: Collection[str]) -> pl.Series:
    """Return the values of all parts as one column of a common type."""
    filled = {s: part for s, part in parts.items() if part.null_count() < len(part)}
    kinds = {source: _find_kind(part) for source, part in filled.items()}
    name = next(iter(parts.values())).name
    if len(set(kinds.values())) > 1 and name not in as_names:
        _refuse_kinds(filled, kinds)
    convert = len({part.dtype for part in filled.values()}) > 1 and name in as_names
    dtypes = {source: part.dtype for source, part in filled.items()}
    usual = next(iter(dtypes.values()), None)
    joined = []
    for source, part in parts.items():
        if source not in filled and usual is not None:
            part = pl.Series(name, [None] * len(part), pl.String if convert else usual)
        elif convert:
            part = as_text(part)
        joined.append(part.to_frame())
    return pl.concat(joined, how="vertical_relaxed").to_series()


def _find_kind(series: pl.Series) -> str:
    if is_numeric(series):
        return "numbers"
    return "text" if is_text(series) else str(series.dtype)


def _refuse_kinds(parts: Mapping[str, pl.Series], kinds: Mapping[str, str]) -> None:
    """Raise the error about a column that is of different kinds; name a file with the rarer one."""
    held = list(kinds.values())
    usual = "numbers" if "numbers" in held else max(held, key=held.count)
    source = next(source for source, kind in kinds.items() if kind != usual)
    other = next(source for source, kind in kinds.items() if kind == usual)
    series = parts[source].drop_nulls()
    numbers = series.cast(pl.String).cast(pl.Float64, strict=False)
    odd = series.filter(numbers.is_null())
    shown = str((odd if len(odd) else series)[0])[:MAX_NAME_LENGTH]
    example = f", such as '{shown}'," if kinds[source] == "text" else ""
    problem = f"column '{series.name}' holds {kinds[source]}{example} where {other} holds {usual}"
    remedy = "write the values alike, name those that mean missing in `missing`, or name the column"
    raise data_error(source, f"{problem}: {remedy} in `categorical`")


def _check_classes(parts: Mapping[str, pl.Series]) -> None:
    """Require that each table has a class of the first one."""
    names = {source: _list_values(part) for source, part in parts.items()}
    (first, known), *others = names.items()
    for source, found in others:
        if known and found and not set(found) & set(known):
            column = parts[source].name
            held = f"label column '{column}' holds {_quote(found)}, and {first} {_quote(known)}"
            raise data_error(source, f"{held}: use the same values in all files")


def _check_spelling(parts: Mapping[str, pl.Series]) -> None:
    """Require that no value differs from one of another table in case or spaces only."""
    spelled: dict[str, tuple[str, str]] = {}
    for source, part in parts.items():
        for value in _list_values(part):
            plain = " ".join(value.split()).casefold()
            other, where = spelled.setdefault(plain, (value, source))
            if other != value and where != source:
                problem = f"column '{part.name}' holds '{value}', and {where} '{other}'"
                raise data_error(source, f"{problem}: spell the value alike in all files")


def _list_values(series: pl.Series) -> list[str]:
    return as_text(series.drop_nulls().unique()).unique().sort().to_list()


def _quote(values: Sequence[str]) -> str:
    more = ", ..." if len(values) > MAX_LISTED else ""
    return ", ".join(f"'{value}'" for value in values[:MAX_LISTED]) + more


def find_client_names(tables: Tables) -> list[str]:
    """Return the columns that hold one value in each table, and another one in every other table.

    Such a column says which client a row belongs to, as the table does already.
    """
    frames = list(tables.values())
    found = []
    for name in frames[0].columns:
        values = [frame[name].unique() for frame in frames]
        if not all(len(v) == 1 and not v.null_count() for v in values):
            continue
        if len({as_text(v)[0] for v in values}) == len(frames) > 1:
            found.append(name)
    return found
