"""What `fedgft measure` counts: files, a table in a database, or what a database returned."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgft.cli.console import Bar, note
from fedgft.cli.options import URL, require
from fedgft.errors import FedgftError, LazyModule
from fedgft.store import expand_user

if TYPE_CHECKING:
    from fedgft.auditing.sql_statement import TableRows
    from fedgft.data.table_scan import Table
    from fedgft.site_sums import SiteSums

database = LazyModule("fedgft.auditing.database")
measurement = LazyModule("fedgft.auditing.measurement")
sql_counts = LazyModule("fedgft.auditing.sql_counts")
sql_engines = LazyModule("fedgft.auditing.sql_engines")
sql_statement = LazyModule("fedgft.auditing.sql_statement")
suppression = LazyModule("fedgft.privacy.suppression")
table_scan = LazyModule("fedgft.data.table_scan")

STATED = {  # options that the counts of a database state, and the values that mean "not given"
    "score": (),
    "given": (),
    "decision": None,
    "weight": None,
    "group_probabilities": None,
    "bins": None,
    "threshold": 0.5,
}


@dataclass(frozen=True)
class FileSource:
    """One table in CSV or Parquet files.

    All sources have the names of the columns (none if they are not known before the rows are
    counted), the default name of the site, the column with the sites if the source itself states
    it, a note for the user, and a method that measures.
    """

    table: "Table"
    site_column: None = None

    @property
    def columns(self) -> Sequence[str]:
        return self.table.columns

    @property
    def name(self) -> str | None:
        return self.table.files.name

    @property
    def note(self) -> str:
        files = self.table.files
        return f"{files.source}: {len(files.parts):,} files" if len(files.parts) > 1 else ""

    def measure(
        self, progress: Bar, *, name: str | None, site: str | None, task: Mapping[str, Any]
    ) -> list["SiteSums"]:
        task = {**task, "on_rows": partial(progress.rows, total=self.table.estimate_rows())}
        if site is None:
            return [measurement.measure_file(self.table, site=name, **task)]
        return measurement.measure_sites(self.table, site_column=site, **task)


@dataclass(frozen=True)
class DatabaseSource:
    """A table in a database."""

    url: str = field(repr=False)
    rows: "TableRows"
    site_column: None = None
    columns: tuple[str, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        return sql_statement.name_alias(self.rows.table)

    def measure(
        self, progress: Bar, *, name: str | None, site: str | None, task: Mapping[str, Any]
    ) -> list["SiteSums"]:
        options = _drop_probabilities(task)
        limits = (options.pop("min_cell"), options.pop("epsilon"), options.pop("delta"))
        options["bins"] = measurement.choose_bins(options["bins"], limits[1])
        progress.fetch("the database counts", 0, None)
        return database.measure_tables(
            self.url,
            self.rows,
            suppression.Protection(*limits),
            site=name,
            site_column=site,
            **options,
        )


@dataclass(frozen=True)
class CountsSource:
    """A CSV with what the statement of `--print-sql` returned."""

    path: Path
    site_column: str | None
    columns: tuple[str, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        return self.path.stem

    def measure(
        self, progress: Bar, *, name: str | None, site: str | None, task: Mapping[str, Any]
    ) -> list["SiteSums"]:
        for option, unset in STATED.items():
            if task[option] != unset:
                raise FedgftError(f"`{option}`: the counts state it; leave it out", kind="conflict")
        options = {key: value for key, value in task.items() if key not in STATED}
        return database.measure_counts(self.path, site=name, **options)


Source = FileSource | DatabaseSource | CountsSource


def open_source(
    data: Sequence[str],
    *,
    table: str | None,
    join: str | None,
    key: Sequence[str],
    where: str | None,
    from_counts: Path | None,
) -> Source:
    """Return what the options of `fedgft measure` name.

    Parameters
    ----------
    data
        Files, folders and patterns, or the URL of a database.
    table, join, key, where
        The table of the database, the second table, and the condition.
    from_counts
        The CSV with counts. None: rows are counted.
    """
    if from_counts is not None:
        given = {"data": data, "table": table, "join": join, "key": key, "where": where}
        for name, value in given.items():
            text = f"`{name}` and `from_counts` exclude each other: the rows are counted already"
            require(not value, text, kind="conflict")
        _, task = sql_counts.read_counts(from_counts)
        return CountsSource(from_counts, task["site_column"])
    if not data:
        text = "a CSV or Parquet file with one row per person, or the URL of a database"
        raise FedgftError(f"`data` is missing: {text}", kind="missing")
    text = "`data`: the name of a file or folder must not be empty"
    require(all(each.strip() for each in data), text)
    urls = [each for each in data if URL.match(each)]
    if not urls:
        text = "`table` names a table of a database: give the URL of the database, not a file"
        require(table is None, text, kind="conflict")
        paths = [expand_user(each) for each in data]
        second = None if join is None else expand_user(join)
        return FileSource(table_scan.open_table(paths, join=second, key=key, where=where))
    require(len(data) == 1, "`data`: give one database, and nothing else", kind="conflict")
    sql_engines.parse_url(urls[0])
    if table is None:
        text = "`table` is missing: the table of the database"
        raise FedgftError(text, kind="missing")
    return DatabaseSource(urls[0], sql_statement.TableRows(table, where, join, tuple(key)))


def print_statement(
    data: Sequence[str],
    dialect: str | None,
    rows: Mapping[str, Any],
    *,
    site: str | None,
    task: Mapping[str, Any],
) -> None:
    """Print the statement that counts a table of a database.

    Parameters
    ----------
    data
        The URL of the database, which names the dialect, or nothing.
    dialect
        The dialect: a key of `DIALECTS`.
    rows
        The arguments of `TableRows`.
    site, task
        The column with the site of each row, and the other options of the measurement.
    """
    require(rows["table"] is not None, "`table` is missing: the table to count", kind="missing")
    known = tuple(sql_statement.DIALECTS)
    if dialect is None:
        require(data, f"`dialect` is missing: one of {', '.join(known)}", kind="missing")
        dialect = sql_engines.parse_url(data[0]).dialect
    options = _drop_probabilities(task)
    for name in ("min_cell", "delta"):  # of what is done with the counts
        options.pop(name)
    text = database.write_sql(sql_statement.TableRows(**rows), dialect, site_column=site, **options)
    sys.stdout.write(text)
    known = sql_statement.DIALECTS[dialect]
    if not known.tested:
        note(f"the tests of fedgft do not run this statement in {known.title}: compare its counts")


def _drop_probabilities(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that databases do not know."""
    if task["group_probabilities"] is not None:
        text = "`group_probabilities` is for files, not for databases"
        raise FedgftError(text, kind="unsupported")
    return {key: value for key, value in task.items() if key != "group_probabilities"}
