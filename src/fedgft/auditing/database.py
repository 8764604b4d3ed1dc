"""Measure a table where it lies: a database counts its rows and returns only sums."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgft.auditing.arrays import to_text
from fedgft.auditing.measurement import choose_bins, sum_cells
from fedgft.auditing.measurement_task import Measurement
from fedgft.auditing.sql_counts import check_cells, check_same_names, read_counts, read_parts
from fedgft.auditing.sql_engines import Engine, connect, parse_url
from fedgft.auditing.sql_statement import (
    DIALECTS,
    TableRows,
    check_printable_names,
    name_alias,
    split_qualified,
    split_table_name,
    write_statement,
)
from fedgft.data.encode import data_error, suggest_name
from fedgft.privacy.suppression import Protection
from fedgft.site_sums import SiteSums
from fedgft.site_sums.dates import check_date
from fedgft.validation import check_column_names, check_instance


def measure_database(
    url: str,
    *,
    table: str,
    label: str,
    group: str | Sequence[str],
    score: str | Sequence[str] = (),
    decision: str | None = None,
    weight: str | None = None,
    given: str | Sequence[str] = (),
    randomized_groups: float | None = None,
    where: str | None = None,
    join: str | None = None,
    key: str | Sequence[str] = (),
    site: str | None = None,
    threshold: float = 0.5,
    bins: int | None = None,
    classes: Sequence[str] = (),
    positive: str | None = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
    min_cell: int = 0,
    epsilon: float | None = None,
    delta: float = 0.0,
    ignore_case: bool = False,
    date: str | datetime.date = "",
    model_version: str = "",
) -> SiteSums:
    """Return the sums over the rows of a table in a database, which the database counts.

    One statement is run, read-only; only counts and sums of scores come back. The result equals
    that of `measure_file` for the same rows in a CSV.

    Parameters
    ----------
    url
        The database: ``postgresql://USER@HOST/DATABASE``, ``duckdb:///FILE``, ``sqlite:///FILE``,
        ``spark://MASTER`` or ``sc://HOST`` (Spark Connect). For PostgreSQL, the password is best
        left to PGPASSWORD or ``~/.pgpass``.
    table
        The table or view: NAME or SCHEMA.NAME.
    label, group, score, decision
        The names of columns, spelled as in the database. With `join`, TABLE.COLUMN names a column
        that both tables have.
    weight, given
        The names of the column of weights and of the columns with strata: `sample_weight` and
        `control_features` of `measure`. None: every row counts once.
    randomized_groups
        As in `measure`. None: the groups are the true ones.
    where
        A condition in the SQL of the database; other rows are left out. None: all rows are counted.
    join, key
        A second table, and the columns of both tables that say which rows belong together. A row
        without a partner has no recorded groups. None: there is one table.
    site
        The name of the site; by default, the name of the table.
    values
        All values of a group column, by the name of the column. None: the values that occur.
    threshold, bins, classes, positive, min_cell, epsilon, delta, ignore_case, date, model_version
        As in `measure`, with the same defaults.

    Returns
    -------
    SiteSums
        The sums of the site.

    Examples
    --------
    >>> import pathlib, sqlite3, tempfile
    >>> from fedgft.auditing import measure_database
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "north.db")
    ...     rows = [("yes", "f", 0.8), ("no", "f", 0.6), ("yes", "m", 0.9), ("no", "m", 0.1)]
    ...     connection = sqlite3.connect(path)
    ...     _ = connection.execute("CREATE TABLE north (repaid, sex, p)")
    ...     _ = connection.executemany("INSERT INTO north VALUES (?, ?, ?)", rows)
    ...     connection.commit()
    ...     connection.close()
    ...     measure_database(
    ...         f"sqlite:///{path}", table="north", label="repaid", group="sex", score="p"
    ...     )
    SiteSums(4 rows of 1 site: north; 2 groups by sex: f, m; classes no, yes, with scores)
    """
    (sums,) = measure_tables(
        url,
        TableRows(table, where, join, check_column_names("key", key)),
        Protection(min_cell, epsilon, delta),
        label=label,
        group=group,
        score=score,
        decision=decision,
        weight=weight,
        given=given,
        randomized_groups=randomized_groups,
        site=site,
        threshold=threshold,
        bins=choose_bins(bins, epsilon),
        classes=classes,
        positive=positive,
        values=values,
        ignore_case=ignore_case,
        date=date,
        model_version=model_version,
    )
    return sums


def measure_tables(
    url: str, rows: TableRows, protection: Protection, **options: Any
) -> list[SiteSums]:
    """Return the sums of each site in a table of a database, by name.

    Parameters
    ----------
    url, protection
        The database, and how the sums are protected.
    rows
        The rows to count.
    options
        As in `measure_database`; `site_column` names the column with the site of each row.
    """
    place = parse_url(check_instance("url", url, str))
    task = describe_task(rows, **options)
    statement = write_statement(task, rows, place.dialect)
    with connect(place) as engine:
        parts = _run(engine, statement, task, rows)
        return sum_cells(read_parts(parts, task), task, protection)


def describe_task(
    rows: TableRows,
    *,
    label: str,
    group: str | Sequence[str],
    score: str | Sequence[str] = (),
    given: str | Sequence[str] = (),
    site: str | None = None,
    classes: Sequence[str] = (),
    values: Mapping[str, tuple[str, ...]] | None = None,
    date: str | datetime.date = "",
    **more: Any,
) -> Measurement:
    """Return what to count: see `measure_database` for the arguments."""
    check_instance("label", label, str, "it is the name of a column")
    for name in ("decision", "site_column", "positive", "weight"):
        if more.get(name) is not None:
            check_instance(name, more[name], str)
    if site is not None:
        check_instance("site", site, str)
    task = Measurement(
        rows.table,
        label,
        check_column_names("group", group),
        check_column_names("score", score),
        given=check_column_names("given", given),
        date=check_date(date),
        site=name_alias(rows.table) if site is None else site,
        classes=tuple(map(to_text, classes)),
        values=values or {},
        label_name=label,
        **more,
    )
    return split_qualified(task, rows)


def write_sql(
    rows: TableRows,
    dialect: str,
    *,
    bins: int | None = None,
    epsilon: float | None = None,
    **options: Any,
) -> str:
    """Return the statement that `measure_database` would run, for a site without Python.

    Parameters
    ----------
    rows
        The rows to count.
    dialect
        A key of `DIALECTS`, such as "postgres".
    bins, epsilon, options
        As in `measure_database`.
    """
    task = describe_task(rows, bins=choose_bins(bins, epsilon), **options)
    statement = write_statement(task, rows, dialect)
    check_printable_names(task, dialect)
    return f"{statement};\n"


def measure_counts(
    path: str | Path,
    *,
    group: str | Sequence[str] = (),
    label: str | None = None,
    randomized_groups: float | None = None,
    site: str | None = None,
    classes: Sequence[str] = (),
    positive: str | None = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
    min_cell: int = 0,
    epsilon: float | None = None,
    delta: float = 0.0,
    ignore_case: bool = False,
    date: str | datetime.date = "",
    model_version: str = "",
) -> list[SiteSums]:
    """Return the sums of each site, by name, from a CSV with what the statement returned.

    Parameters
    ----------
    path
        The CSV: see `write_sql`.
    group, label
        The columns that were counted; they must be those of the CSV. By default, those of the CSV.
    site
        The name of the site; by default, that of the file without its extension.
    randomized_groups, classes, positive, values, min_cell, epsilon, delta, ignore_case
        As in `measure_database`.
    date, model_version
        As in `measure_database`.
    """
    table, found = read_counts(path)
    task = Measurement(
        str(path),
        site=Path(path).stem if site is None else site,
        classes=tuple(map(to_text, classes)),
        positive=positive,
        values=values or {},
        ignore_case=ignore_case,
        date=check_date(date),
        model_version=model_version,
        randomized_groups=randomized_groups,
        **found,
    )
    check_same_names(task, check_column_names("group", group), label)
    cells = check_cells(table, task)
    return sum_cells([cells], task, Protection(min_cell, epsilon, delta))


def _run(
    engine: Engine, statement: str, task: Measurement, rows: TableRows
) -> Iterator[Sequence[Any]]:
    """Run the statement and yield the rows of its result in parts."""
    empty = True
    try:
        for part in engine.run(statement):
            empty = False
            yield part
    except Exception as error:  # each driver has its own
        _explain(engine, error, task, rows)
        problem = f"the database answers: {engine.url.hide(_first_line(error))}"
        raise data_error(task.source, problem) from None
    if empty:
        text = "the table has no rows" if rows.where is None else "no row fulfills `where`"
        raise data_error(task.source, text)


def _first_line(error: Exception) -> str:
    """Return what a driver says, without the statement that some repeat."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _explain(engine: Engine, error: Exception, task: Measurement, rows: TableRows) -> None:
    """Raise an error that names the table or column that is not there, and the nearest name."""
    if getattr(error, "sqlstate", None) == "42501":  # no rights in PostgreSQL
        return
    quote = DIALECTS[engine.url.dialect].quote
    known: dict[str, list[str]] = {}
    for option, name in (("table", rows.table), ("join", rows.join)):
        if name is None:
            continue
        parts = split_table_name(name)
        quoted = ".".join(f"{quote}{part.replace(quote, 2 * quote)}{quote}" for part in parts)
        columns = engine.list_columns(quoted)
        if columns is None:
            tables = engine.list_tables()
            if tables and parts[-1] not in tables:
                hint = suggest_name(parts[-1], tables)
                raise data_error(engine.url.shown, f"no table '{name}' (`{option}`){hint}")
            return
        known[parts[-1]] = columns
    named = [(column.option, column.name) for column in task.columns()]
    for option, name in named:
        table, dot, column = name.partition(".")
        places = {table: known[table]} if dot and table in known else known
        wanted = column if dot and table in known else name
        found = [each for columns in places.values() for each in columns]
        if wanted not in found:
            problem = f"no column '{wanted}' (`{option}`){suggest_name(wanted, found)}"
            raise data_error(task.source, problem) from None
        if sum(wanted in columns for columns in places.values()) > 1:
            first = name_alias(rows.table)
            text = f"both tables have a column '{wanted}'; write {first}.{wanted}"
            raise data_error(task.source, f"{text} (`{option}`)")
    for name, columns in known.items():
        for key in rows.key:
            if key not in columns:
                hint = suggest_name(key, columns)
                raise data_error(name, f"no column '{key}' (`key`){hint}")
