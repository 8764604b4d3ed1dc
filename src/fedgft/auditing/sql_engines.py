"""Connections to databases: one statement is run, read-only, and its rows come back in parts.

A URL names the database. A password in it, or a token, appears in no message: the parts of the URL
go to the driver one by one, and what a driver answers is searched for the secrets.
"""

import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import environ
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qsl, unquote

from fedgft.errors import FedgftError, import_extra
from fedgft.formatting import printable
from fedgft.store import expand_user

FETCHED_ROWS = 50_000  # rows of the result that are fetched at once
CONNECT_SECONDS = 10  # longest wait for a server, unless the URL or PGCONNECT_TIMEOUT says other
MAX_MESSAGE = 240  # characters of a driver's message
MARKS = {  # how files of databases begin: offset, bytes, title
    "sqlite": (0, b"SQLite format 3\0", "SQLite"),
    "duckdb": (8, b"DUCK", "DuckDB"),
}
HIDDEN = "***"
SECRET = re.compile(r"(?i)(password|passwd|pwd|token|secret|key)$")  # parameters of a URL
URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9.-]*)(\+[A-Za-z0-9]+)?://(?P<rest>.*)", re.DOTALL)
ADDRESS = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#]*)(:(?P<port>\d+))?(/(?P<name>[^/?#]*))?"
)
EXAMPLES = (
    "postgresql://USER@HOST/DATABASE",
    "duckdb:///FILE",
    "sqlite:///FILE",
    "spark://MASTER",
    "sc://HOST:15002",
)
TABLES = {  # statements that list the tables, for messages
    "postgres": "SELECT relname FROM pg_catalog.pg_class WHERE relkind IN ('r', 'v', 'm', 'f', 'p')"
    " AND pg_catalog.pg_table_is_visible(oid) AND relnamespace NOT IN"
    " ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)",
    "duckdb": "SELECT table_name FROM information_schema.tables",
    "sqlite": "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')",
    "spark": "SHOW TABLES",
}


@dataclass(frozen=True)
class DatabaseUrl:
    """The parts of a database's URL.

    Parameters
    ----------
    dialect
        How the database writes SQL: a key of `sql_statement.DIALECTS`.
    shown
        The URL without secrets, for messages.
    place
        The address and the name of the database, or the path of its file.
    user, password
        What stands before the address; None if nothing does.
    options
        What follows the address.
    secrets
        Texts that no message may hold.
    """

    dialect: str
    shown: str
    place: str = field(repr=False)
    user: str = field(default="", repr=False)
    password: str | None = field(default=None, repr=False)
    options: str = field(default="", repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def hide(self, text: object) -> str:
        """Return a text in one line, without secrets and not too long."""
        line = printable(" ".join(str(text).split()))
        for secret in sorted(self.secrets, key=len, reverse=True):
            line = line.replace(secret, HIDDEN)
        return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}..."


SCHEMES = {
    "postgresql": "postgres",
    "postgres": "postgres",
    "duckdb": "duckdb",
    "sqlite": "sqlite",
    "spark": "spark",
    "sc": "spark",
}


def is_database(text: object) -> bool:
    """Return whether a text is a URL and not the name of a file."""
    return isinstance(text, str) and URL.fullmatch(text) is not None


def parse_url(url: str) -> DatabaseUrl:
    """Return the parts of a database's URL; raise a `FedgftError` for a URL of anything else."""
    found = URL.fullmatch(url)
    scheme = found["scheme"].lower() if found else ""
    if found is None or scheme not in SCHEMES:
        known = ", ".join(EXAMPLES)
        what = f"'{scheme}://' is no database that fedgft reads" if scheme else "this is no URL"
        raise FedgftError(f"{what}; write one of: {known}", kind="unsupported")
    mark = ";" if scheme == "sc" else "&"
    # A password may hold anything: the last @ ends it, unless options follow the address.
    start = re.search(r";" if scheme == "sc" else r"\?[A-Za-z_]+=", found["rest"])
    rest = found["rest"][: start.start()] if start else found["rest"]
    options = found["rest"][start.start() + 1 :] if start else ""
    before, at, place = rest.rpartition("@")
    user, colon, password = before.partition(":")
    if SCHEMES[scheme] == "postgres" and not ADDRESS.fullmatch(place):  # a password may be in it
        raise FedgftError(f"the address in the URL cannot be read; write it as {EXAMPLES[0]}")
    secrets = {password, unquote(password)} if colon else set()
    shown = []
    for option in filter(None, options.split(mark)):
        key, _, value = option.partition("=")
        if SECRET.search(key):
            secrets |= {value, unquote(value)}
            option = f"{key}={HIDDEN}"
        shown.append(option)
    name = f"{user}:{HIDDEN}@" if colon else f"{user}{at}"
    after = f"{';' if mark == ';' else '?'}{mark.join(shown)}" if start else ""
    return DatabaseUrl(
        SCHEMES[scheme],
        printable(f"{scheme}://{name}{place}{after}"),
        place,
        user,
        password if colon else None,
        options,
        tuple(filter(None, secrets)),
    )


class Engine:
    """A connection to a database.

    Parameters
    ----------
    url
        The parts of its URL.
    execute
        Runs a statement and yields its rows in parts.
    names
        Returns the names of the columns of a statement's result.
    recover
        Makes the connection usable after an error.
    """

    def __init__(
        self,
        url: DatabaseUrl,
        execute: Callable[[str], Iterator[Sequence[Any]]],
        names: Callable[[str], list[str]],
        recover: Callable[[], object] = lambda: None,
    ) -> None:
        self.url = url
        self._execute = execute
        self._names = names
        self._recover = recover

    def run(self, statement: str) -> Iterator[Sequence[Any]]:
        """Run a statement and yield the rows of its result in parts; drivers' errors pass."""
        return self._execute(statement)

    def list_columns(self, table: str) -> list[str] | None:
        """Return the columns of a table, named as in SQL; None if it cannot be read."""
        try:
            self._recover()
            return self._names(f"SELECT * FROM {table} LIMIT 0")
        except Exception:  # each driver has its own errors; the first one is reported
            return None

    def list_tables(self) -> list[str]:
        """Return the names of the tables."""
        try:
            self._recover()
            rows = [row for part in self.run(TABLES[self.url.dialect]) for row in part]
        except Exception:
            return []
        name = 1 if self.url.dialect == "spark" else 0  # after the name of the schema
        return sorted(str(row[name]) for row in rows)


@contextmanager
def connect(url: DatabaseUrl) -> Iterator[Engine]:
    """Open a database for reading, and close it at the end."""
    openers = {"postgres": _open_postgres, "duckdb": _open_duckdb, "sqlite": _open_sqlite}
    opener = openers.get(url.dialect, _open_spark)
    with opener(url) as engine:
        yield engine


def _raise_connect_error(url: DatabaseUrl, error: Exception) -> NoReturn:
    """Raise the error about a database that cannot be opened."""
    text = url.hide(error)
    advice = "; set PGPASSWORD, or use ~/.pgpass" if "password" in text.lower() else ""
    raise FedgftError(f"{url.shown}: {text}{advice}", kind="network") from None


def _open_cursor(url: DatabaseUrl, connection: Any, recover: Callable[[], object]) -> Engine:
    """Return the engine of a connection that follows Python's standard of databases."""

    def execute(statement: str) -> Iterator[Sequence[Any]]:
        cursor = connection.cursor()
        cursor.execute(statement)
        while rows := cursor.fetchmany(FETCHED_ROWS):
            yield rows

    def names(statement: str) -> list[str]:
        cursor = connection.cursor()
        cursor.execute(statement)
        return [column[0] for column in cursor.description]

    return Engine(url, execute, names, recover)


@contextmanager
def _open_postgres(url: DatabaseUrl) -> Iterator[Engine]:
    """Connect to PostgreSQL. What the URL leaves open is taken from the variables of libpq."""
    psycopg = import_extra("psycopg", "a PostgreSQL database")
    options = _read_postgres_options(url)
    try:
        connection = psycopg.connect(**options)
    except psycopg.Error as error:
        _raise_connect_error(url, error)
    try:
        connection.read_only = True
        yield _open_cursor(url, connection, connection.rollback)
    finally:
        connection.close()


def _read_postgres_options(url: DatabaseUrl) -> dict[str, Any]:
    """Return the options of a connection to PostgreSQL."""
    options: dict[str, Any] = {"client_encoding": "UTF8", "application_name": "fedgft"}
    if "PGCONNECT_TIMEOUT" not in environ:
        options["connect_timeout"] = CONNECT_SECONDS
    found = ADDRESS.fullmatch(url.place)
    if found is not None:
        options |= {"host": unquote(found["host"].strip("[]")), "port": found["port"]}
        options["dbname"] = unquote(found["name"] or "")
    options |= {"user": unquote(url.user), "password": unquote(url.password or "")}
    options |= dict(parse_qsl(url.options))
    return {key: value for key, value in options.items() if value}


def _find_file(url: DatabaseUrl) -> Path:
    """Return the file of a database; three slashes are followed by a relative path."""
    path = unquote(url.place)
    if not path.startswith("/") or len(path) == 1:
        scheme = url.shown.partition(":")[0]
        text = f"{url.shown}: names no file; write {scheme}:///FILE, or {scheme}:////PATH"
        raise FedgftError(text, kind="file")
    file = expand_user(path[1:])
    if not file.is_file():
        raise FedgftError(f"{file}: there is no such file", kind="file")
    return file


def _check_mark(url: DatabaseUrl, file: Path) -> None:
    """Raise a `FedgftError` if a file is not empty and no database of this kind."""
    place, mark, title = MARKS[url.dialect]
    with file.open("rb") as content:
        start = content.read(place + len(mark))
    if start and start[place:] != mark:  # DuckDB would fetch an extension for files of other kinds
        raise FedgftError(f"{file}: is not a database of {title}", kind="file")


@contextmanager
def _open_sqlite(url: DatabaseUrl) -> Iterator[Engine]:
    """Open a file of SQLite for reading."""
    file = _find_file(url)
    _check_mark(url, file)
    try:
        connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error as error:
        _raise_connect_error(url, error)
    try:
        yield _open_cursor(url, connection, connection.rollback)
    finally:
        connection.close()


@contextmanager
def _open_duckdb(url: DatabaseUrl) -> Iterator[Engine]:
    """Open a file of DuckDB for reading."""
    file = _find_file(url)
    duckdb = import_extra("duckdb", "a DuckDB database")
    _check_mark(url, file)
    try:
        connection = duckdb.connect(str(file), read_only=True)
    except duckdb.Error as error:
        _raise_connect_error(url, error)
    try:
        yield _open_cursor(url, connection, lambda: None)
    finally:
        connection.close()


@contextmanager
def _open_spark(url: DatabaseUrl) -> Iterator[Engine]:
    """Use the session of Spark that is running, or start one.

    ``spark://HOST:7077`` is a master, ``spark://`` the one that Spark's configuration names, and
    ``sc://HOST:15002`` a server of Spark Connect.
    """
    sql = import_extra("pyspark.sql", "Spark")
    running = sql.SparkSession.getActiveSession()
    try:
        builder = sql.SparkSession.builder.appName("fedgft")
        if url.shown.startswith("sc:"):
            builder = builder.remote(f"sc://{url.place};{url.options}".rstrip(";"))
        elif url.place.strip("/"):
            master = url.place if url.place.startswith("local") else f"spark://{url.place}"
            builder = builder.master(master)
        session = running or builder.getOrCreate()
    except Exception as error:  # Spark raises many kinds
        _raise_connect_error(url, error)

    def execute(statement: str) -> Iterator[Sequence[Any]]:
        rows = [tuple(row) for row in session.sql(statement).collect()]
        if rows:
            yield rows

    try:
        yield Engine(url, execute, lambda statement: session.sql(statement).columns)
    finally:
        if running is None:
            session.stop()
