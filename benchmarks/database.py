"""Fifty million rows in PostgreSQL, in DuckDB and in a Parquet file: seconds of `fedgft measure`.

python benchmarks/database.py [--rows 50000000] [--repeats 3] [--folder DIR] [--no-write]

The rows are made inside PostgreSQL by a formula, so that all three hold the same ones. PostgreSQL
runs with the settings of its Debian package, on a folder of its own. Writes results/database.md.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

import duckdb
import psycopg
from timing import Neighbors, clock

from fedgft.auditing import measure_database, measure_file
from fedgft.auditing.database import describe_task
from fedgft.auditing.sql_statement import TableRows, write_statement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from postgres_server import PostgresServer, start_postgres  # noqa: E402

PAGE = ROOT / "results" / "database.md"
CHUNK = 5_000_000
TASK = {"label": "repaid", "group": ["race", "sex"], "score": "p"}
# The same formula in both dialects: whole numbers mixed by a multiplication modulo a prime.
COLUMNS = """
  i AS id,
  CASE WHEN (i * 7919) % 1009 < 300 + (i * 104729) % 400 THEN 'yes' ELSE 'no' END AS repaid,
  CASE WHEN (i * 611953) % 1013 < 500 THEN 'woman' ELSE 'man' END AS sex,
  CASE (i * 15485863) % 11 WHEN 0 THEN 'a' WHEN 1 THEN 'b' WHEN 2 THEN 'c' WHEN 3 THEN 'd'
    ELSE 'e' END AS race,
  CAST((i * 48271) % 1000003 AS DOUBLE PRECISION) / 1000003 AS p
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, start_postgres() as server:
        page = run(args.rows, args.repeats, Path(folder), server)
    print(page)
    if not args.no_write:
        PAGE.write_text(page)


def run(rows: int, repeats: int, folder: Path, server: PostgresServer) -> str:
    """Fill the tables, measure each several times in turns, and return the page."""
    fill_postgres(server, rows)
    fill_duckdb(folder, rows)
    table = TableRows("preds")
    cases = {
        "PostgreSQL": lambda: measure_database(server.url(), table="preds", **TASK),
        "DuckDB": lambda: measure_database(f"duckdb:///{folder}/site.db", table="preds", **TASK),
        "Parquet": lambda: measure_file(folder / "preds.parquet", **TASK),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    texts = {}
    with Neighbors() as others:
        for _ in range(repeats):
            for name, case in cases.items():
                taken, sums = clock(case)
                seconds[name].append(taken)
                texts[name] = sums.to_json()
                print(f"{name}: {taken:.1f} s", file=sys.stderr)
    assert len(set(texts.values())) == 1, "the files differ"
    statement = write_statement(describe_task(table, bins=100, **TASK), table, "postgres")
    with psycopg.connect(server.url(), autocommit=True) as connection:
        found = connection.execute(statement).fetchall()
        plan = [row[0] for row in connection.execute(f"EXPLAIN {statement}").fetchall()]
        size = connection.execute("SELECT pg_total_relation_size('preds')").fetchone()
        scan, _ = clock(lambda: connection.execute("SELECT COUNT(*) FROM preds").fetchall())
        version = connection.info.parameter_status("server_version")
    sizes = {
        "PostgreSQL": size[0] if size else 0,
        "DuckDB": (folder / "site.db").stat().st_size,
        "Parquet": (folder / "preds.parquet").stat().st_size,
    }
    numbers = {"rows": rows, "repeats": repeats, "cells": len(found), "scan": scan}
    versions = f"PostgreSQL {version}, DuckDB {duckdb.__version__}"
    return write_page(numbers, seconds, sizes, plan, server, versions, others.cores)


def fill_postgres(server: PostgresServer, rows: int) -> None:
    """Make the table in PostgreSQL, in chunks."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(
            "CREATE UNLOGGED TABLE preds"
            " (id BIGINT, repaid TEXT, sex TEXT, race TEXT, p DOUBLE PRECISION)"
        )
        for first in range(0, rows, CHUNK):
            last = min(rows, first + CHUNK) - 1
            numbers = f"generate_series({first}::BIGINT, {last}::BIGINT) AS i"
            connection.execute(f"INSERT INTO preds SELECT {COLUMNS} FROM {numbers}")
            print(f"{last + 1:,} rows in PostgreSQL", file=sys.stderr)
        connection.execute("VACUUM ANALYZE preds")


def fill_duckdb(folder: Path, rows: int) -> None:
    """Make the table in DuckDB, and the Parquet file from it."""
    with duckdb.connect(str(folder / "site.db")) as connection:
        numbers = f"(SELECT CAST(range AS BIGINT) AS i FROM range({rows}))"
        connection.execute(f"CREATE TABLE preds AS SELECT {COLUMNS} FROM {numbers}")
        connection.execute(f"COPY preds TO '{folder}/preds.parquet' (FORMAT parquet)")


def write_page(
    numbers: dict[str, float],
    seconds: dict[str, list[float]],
    sizes: dict[str, int],
    plan: list[str],
    server: PostgresServer,
    versions: str,
    others: float,
) -> str:
    """Return the page, as Markdown."""
    log = server.read_log()
    counted = log.count("GROUP BY g0, g1, y, d, b0") - 2  # without that of this page, and its plan
    lines = [
        "# Fifty million rows in a database" if numbers["rows"] == 50_000_000 else "# Rows",
        "",
        f"`python benchmarks/database.py --rows {numbers['rows']}` wrote this page: `fedgft "
        "measure` by race and sex, with scores in 100 bins, on the same "
        f"{numbers['rows']:,} rows. Median of {numbers['repeats']} runs, which take turns; "
        f"{os.cpu_count()} cores, of which other programs kept {others:.1f} busy. {versions}, "
        "PostgreSQL with the settings of its package.",
        "",
        "| rows are in | seconds | fastest | size |",
        "|---|---|---|---|",
    ]
    for name, taken in seconds.items():
        size = f"{sizes[name] / 1e9:.2f} GB"
        lines.append(f"| {name} | {median(taken):.1f} | {min(taken):.1f} | {size} |")
    gather = next((line for line in plan if "Workers Planned" in line), "no parallel plan").strip()
    lines += [
        "",
        "- The three files of sums are the same, to the last digit.",
        f"- PostgreSQL returned {numbers['cells']:,} rows of counts: what leaves the server.",
        f"- Its log shows {counted:.0f} statements for {numbers['repeats']} measurements, one each "
        f"(plan: {gather.lower()}).",
        f"- `SELECT COUNT(*)` of the table takes PostgreSQL {numbers['scan']:.1f} s.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
