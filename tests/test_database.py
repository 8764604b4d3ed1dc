"""Tables in databases: every engine gives the file that the same rows as CSV give."""

import csv
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedgft
from fedgft.auditing import measure_counts, measure_database, measure_file
from fedgft.auditing.database import measure_tables, write_sql
from fedgft.auditing.measurement import measure_sites
from fedgft.auditing.sql_statement import DIALECTS, MAX_CELLS, TableRows
from fedgft.privacy.suppression import Protection
from fedgft.site_sums import COUNT
from postgres_server import PASSWORD, READER, PostgresServer, start_postgres

ENGINES = ("sqlite", "duckdb", "postgres")
TYPES = {
    "sqlite": {pl.Float64: "REAL", pl.Int64: "INTEGER", pl.String: "TEXT", pl.Boolean: "INTEGER"},
    "duckdb": {pl.Float64: "DOUBLE", pl.Int64: "BIGINT", pl.String: "TEXT", pl.Boolean: "BOOLEAN"},
    "postgres": {
        pl.Float64: "DOUBLE PRECISION",
        pl.Int64: "BIGINT",
        pl.String: "TEXT",
        pl.Boolean: "BOOLEAN",
    },
}


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg")
    with start_postgres() as started:
        yield started


class Database:
    """A database for tests, whose tables are replaced at will."""

    def __init__(self, engine: str, folder: Path, server: PostgresServer | None) -> None:
        self.engine = engine
        self.server = server
        self.path = folder / "site.db"
        self.url = f"{engine}:///{self.path}" if server is None else server.url()

    def connect(self) -> Any:
        if self.engine == "sqlite":
            return sqlite3.connect(self.path)
        if self.engine == "duckdb":
            return pytest.importorskip("duckdb").connect(str(self.path))
        import psycopg

        assert self.server is not None
        return psycopg.connect(self.server.url())

    def write(self, name: str, frame: pl.DataFrame) -> None:
        """Replace a table."""
        types = TYPES[self.engine]
        columns = ", ".join(f'"{c}" {types[type(t)]}' for c, t in frame.schema.items())
        mark = "%s" if self.engine == "postgres" else "?"
        values = f"({', '.join([mark] * frame.width)})"
        connection = self.connect()
        cursor = connection.cursor()
        cursor.execute(f'DROP TABLE IF EXISTS "{name}"')
        cursor.execute(f'CREATE TABLE "{name}" ({columns})')
        for part in frame.iter_slices(500):  # DuckDB takes long for single rows
            rows = ", ".join([values] * part.height)
            given = [value for row in part.rows() for value in row]
            cursor.execute(f'INSERT INTO "{name}" VALUES {rows}', given)
        connection.commit()
        connection.close()

    def run(self, statement: str) -> None:
        connection = self.connect()
        connection.cursor().execute(statement)
        connection.commit()
        connection.close()

    def save(self, statement: str, path: Path) -> Path:
        """Run a statement as a site without fedgft does, and save what it returns as a CSV."""
        connection = self.connect()
        cursor = connection.cursor()
        cursor.execute(statement)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([column[0] for column in cursor.description])
            writer.writerows(cursor.fetchall())
        connection.close()
        return path


@pytest.fixture(params=ENGINES)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    engine = request.param
    if engine == "duckdb":
        pytest.importorskip("duckdb")
    server = request.getfixturevalue("server") if engine == "postgres" else None
    return Database(engine, tmp_path, server)


def make_rows(rows: int, seed: int = 0) -> pl.DataFrame:
    """Return a table with every kind of value: missing ones, edges of bins, numbers as groups."""
    rng = np.random.default_rng(seed)
    edges = rng.integers(0, 101, rows) / 100
    near = np.clip(np.nextafter(edges, rng.integers(0, 2, rows)), 0, 1)
    score = np.choose(rng.integers(0, 3, rows), [np.round(rng.random(rows), 4), edges, near])
    missing = rng.random((4, rows)) < 0.05
    pick = lambda values, lost: [  # noqa: E731
        None if gone else values[i]
        for i, gone in zip(rng.integers(0, len(values), rows), lost, strict=True)
    ]
    return pl.DataFrame(
        {
            "id": np.arange(rows),
            "repaid": pick(["yes", "no"], missing[0]),
            "sex": pick(["f", "m", "Ünïcode & 'quotes'"], missing[1]),
            "age": pick([20, 30, 40], missing[2]),
            "department": pick(["a", "b"], np.zeros(rows, bool)),
            "bank": pick(["north", "south", "east"], np.zeros(rows, bool)),
            "p": [None if gone else float(x) for x, gone in zip(score, missing[3], strict=True)],
            "approved": pick(["yes", "no"], rng.random(rows) < 0.03),
            "weight": np.round(rng.random(rows) * (rng.random(rows) < 0.9) * 8, 2),
        }
    )


def check_equal(a: fedgft.SiteSums, b: fedgft.SiteSums) -> None:
    """Two sums are the same: counts to the last digit, sums of floats up to rounding."""
    assert a.spec == b.spec and a.groups == b.groups
    assert a.to_json() == b.to_json() and a.to_json(min_bin=1) == b.to_json(min_bin=1)
    for name, site in a.sites.items():
        other = b.sites[name]
        assert site.label_missing == other.label_missing
        assert site.prediction_missing == other.prediction_missing
        for group, table in site.tables.items():
            np.testing.assert_allclose(table, other.tables[group], rtol=1e-12, atol=1e-12)
    for group, table in a.histogram.items():
        np.testing.assert_allclose(table, b.histogram[group], rtol=1e-12, atol=1e-12)


TASKS = {
    "scores": {"group": "sex", "score": "p"},
    "two columns": {"group": ["sex", "age"], "score": "p", "bins": 7, "threshold": 0.3},
    "decisions": {"group": "sex", "decision": "approved"},
    "both": {"group": "age", "score": "p", "decision": "approved", "bins": 1000},
    "strata": {"group": "sex", "score": "p", "given": ["department", "bank"]},
    "weights": {"group": "sex", "score": "p", "weight": "weight"},
    "weighted decisions": {"group": "age", "decision": "approved", "weight": "weight"},
    "small counts": {"group": "sex", "score": "p", "min_cell": 10, "weight": "weight"},
    "declared": {"group": "age", "score": "p", "values": {"age": ("20", "30", "40", "50")}},
    "the smallest threshold": {"group": "age", "score": "p", "threshold": 0.0},
    "the largest threshold": {"group": "age", "score": "p", "threshold": 1.0},
    "many digits": {"group": "age", "score": "p", "threshold": 0.1 + 0.2},
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_engine_gives_the_file_of_the_csv(task, database, tmp_path):
    frame = make_rows(1500)
    frame.write_csv(tmp_path / "preds.csv")
    database.write("preds", frame)
    expected = measure_file(tmp_path / "preds.csv", label="repaid", **task)
    found = measure_database(database.url, table="preds", label="repaid", **task)
    check_equal(found, expected)
    assert found.notes == tuple(
        note.replace(str(tmp_path / "preds.csv"), "preds") for note in expected.notes
    )


SCORES = st.one_of(
    st.none(),
    st.integers(0, 10_000).map(lambda i: i / 10_000),
    st.tuples(st.integers(0, 100), st.sampled_from([0.0, 1.0])).map(
        lambda pair: float(np.clip(np.nextafter(pair[0] / 100, pair[1]), 0, 1))
    ),
)
ROW = st.tuples(
    st.sampled_from(["yes", "no", None]),
    st.sampled_from(["f", "m", None]),
    st.sampled_from([1, 2, None]),
    SCORES,
    st.sampled_from(["yes", "no", None]),
    st.integers(0, 40).map(lambda i: i / 8),
)
NAMES = ["repaid", "sex", "age", "p", "approved", "weight"]
KINDS = [pl.String, pl.String, pl.Int64, pl.Float64, pl.String, pl.Float64]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_every_engine_agrees_with_the_csv_on_any_rows(data, database, tmp_path):
    rows = data.draw(st.lists(ROW, min_size=1, max_size=40))
    frame = pl.DataFrame(rows, schema=dict(zip(NAMES, KINDS, strict=True)), orient="row")
    task: dict[str, Any] = {"label": "repaid", "group": ["sex"], "classes": ("no", "yes")}
    task["bins"] = data.draw(st.sampled_from([2, 3, 7, 10, 64, 100, 1000, 10_000]))
    task["score"] = "p" if data.draw(st.booleans()) else ()
    task["decision"] = "approved" if not task["score"] or data.draw(st.booleans()) else None
    task["weight"] = data.draw(st.sampled_from([None, "weight"]))
    task["given"] = data.draw(st.sampled_from([(), "age"]))
    task["threshold"] = data.draw(st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 0.57, 1.0]))
    frame.write_csv(tmp_path / "preds.csv")
    database.write("preds", frame)
    results = []
    for read in (
        lambda: measure_file(tmp_path / "preds.csv", **task),
        lambda: measure_database(database.url, table="preds", **task),
    ):
        try:
            results.append(read())
        except fedgft.FedgftError as error:  # as where no row has a label and a prediction
            results.append(error.message.replace(str(tmp_path / "preds.csv"), "preds"))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        check_equal(results[1], results[0])


@pytest.mark.parametrize("bins", [2, 3, 7, 20, 49, 100, 333, 1000, 10_000])
def test_scores_beside_the_edges_of_bins_fall_into_the_right_bin(bins, database):
    """The edges are i / bins as a computer divides; the reference is a search among them."""
    edges = np.arange(bins + 1) / bins
    scores = np.unique(
        np.clip([edges, np.nextafter(edges, -1), np.nextafter(edges, 2)], 0, 1).ravel()
    )
    frame = pl.DataFrame({"y": ["a", "b"] * len(scores), "g": "x", "p": np.repeat(scores, 2)})
    database.write("preds", frame)
    sums = measure_database(database.url, table="preds", label="y", group="g", score="p", bins=bins)
    expected = np.bincount(np.searchsorted(edges[1:-1], scores, side="right"), minlength=bins)
    np.testing.assert_array_equal(sums.histogram["x",].sum((0, 1, 2)), 2 * expected)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_a_column_of_scores_per_class(classes, database, tmp_path):
    rng = np.random.default_rng(classes)
    scores = np.round(rng.dirichlet(np.ones(classes), 2000), 4)
    scores[:200] = np.round(1 / classes, 3)  # ties
    columns: dict[str, Any] = {f"p{i}": scores[:, i].copy() for i in range(classes)}
    frame = pl.DataFrame({"y": rng.integers(0, classes, 2000), "g": rng.integers(0, 2, 2000)})
    frame = frame.with_columns(**{k: pl.Series(v) for k, v in columns.items()}).with_columns(
        p0=pl.when(pl.int_range(pl.len()) % 17 > 0).then("p0"), w=pl.Series(rng.random(2000))
    )
    frame.write_csv(tmp_path / "preds.csv")
    database.write("preds", frame)
    for more in ({}, {"weight": "w"}, {"given": "y2"}):
        task: dict[str, Any] = {"label": "y", "group": "g", "score": list(columns), **more}
        if "given" in more:
            frame = frame.with_columns(y2=pl.col("y") % 2)
            frame.write_csv(tmp_path / "preds.csv")
            database.write("preds", frame)
        expected = measure_file(tmp_path / "preds.csv", **task)
        check_equal(measure_database(database.url, table="preds", **task), expected)


def test_sites_in_a_column_and_a_condition(database, tmp_path):
    frame = make_rows(2000, seed=2)
    frame.filter(pl.col("age") > 20).write_csv(tmp_path / "preds.csv")
    database.write("preds", frame)
    task = {"label": "repaid", "group": "sex", "score": "p", "site_column": "bank"}
    expected = measure_sites(tmp_path / "preds.csv", **task)
    rows = TableRows("preds", where="age > 20 -0 and 'a;--b' <> bank")
    found = measure_tables(database.url, rows, Protection(), bins=100, **task)
    assert [list(part.sites) for part in found] == [["east"], ["north"], ["south"]]
    for a, b in zip(found, expected, strict=True):
        check_equal(a, b)


# Joins


def split_table(frame: pl.DataFrame, database: Database) -> pl.DataFrame:
    """Store the groups apart, without some people; return the table as a join would have it."""
    people = frame.select("id", "sex", "age").filter(pl.col("id") % 5 > 0)
    database.write("preds", frame.drop("sex", "age"))
    database.write("people", people)
    return frame.drop("sex", "age").join(people, on="id", how="left")


def test_groups_stored_apart(database, tmp_path):
    joined = split_table(make_rows(2000, seed=3), database)
    joined.write_csv(tmp_path / "preds.csv")
    task = {"label": "repaid", "group": ["sex", "age"], "score": "p"}
    expected = measure_file(tmp_path / "preds.csv", **task)
    found = measure_database(database.url, table="preds", join="people", key="id", **task)
    check_equal(found, expected)
    task["group"] = ["people.sex", "age"]
    task["where"] = "people.age = 20 OR preds.id < 1000"
    found = measure_database(database.url, table="preds", join="people", key="id", **task)
    joined.filter((pl.col("age") == 20) | (pl.col("id") < 1000)).write_csv(tmp_path / "preds.csv")
    task = {"label": "repaid", "group": ["sex", "age"], "score": "p"}
    check_equal(found, measure_file(tmp_path / "preds.csv", **task))


def test_a_joined_gap_equals_fairlearn(database):
    metrics = pytest.importorskip("fairlearn.metrics")
    joined = split_table(
        make_rows(3000, seed=4).with_columns(pl.col("repaid").fill_null("no")), database
    )
    sums = measure_database(
        database.url,
        table="preds",
        join="people",
        key="id",
        label="repaid",
        group="sex",
        decision="approved",
        weight="weight",
    )
    rows = joined.drop_nulls(["sex", "approved"])
    expected = metrics.demographic_parity_difference(
        rows["repaid"] == "yes",
        rows["approved"].to_numpy() == "yes",
        sensitive_features=rows["sex"].to_list(),
        sample_weight=rows["weight"].to_numpy(),
    )
    tables = sums.sites["preds"].tables
    known = [table for group, table in tables.items() if group != (None,)]
    rates = [table[:, 1, COUNT].sum() / table[..., COUNT].sum() for table in known]
    assert max(rates) - min(rates) == pytest.approx(expected, abs=1e-12)


def test_repeated_keys_are_an_error_before_all_pairs_are_built(database):
    """20,000 rows with one key in both tables would be 400 million pairs."""
    frame = make_rows(20_000).with_columns(pl.lit(7, pl.Int64).alias("id"))
    database.write("preds", frame.drop("sex"))
    database.write("people", frame.select("id", "sex"))
    with pytest.raises(fedgft.FedgftError, match="repeats in join") as raised:
        measure_database(
            database.url,
            table="preds",
            join="people",
            key="id",
            label="repaid",
            group="sex",
            score="p",
        )
    assert raised.value.kind == "data"


def test_rows_without_a_key_repeat_nothing(database):
    frame = make_rows(50).with_columns(id=pl.when(pl.col("id") > 9).then("id"))
    database.write("preds", frame.drop("sex"))
    database.write("people", frame.select("id", "sex"))
    sums = measure_database(
        database.url,
        table="preds",
        join="people",
        key="id",
        label="repaid",
        group="sex",
        score="p",
        classes=("no", "yes"),
    )
    assert sums.rows() > 0 and (None,) in sums.groups


# Values


def test_types_are_spelled_as_in_a_csv(database, tmp_path):
    rows = 60
    frame = pl.DataFrame(
        {
            "y": [True, False] * 30,
            "float": [1.0, 2.5, None] * 20,
            "integer": [10, 9] * 30,
            "text": ["NA", "", "x"] * 20,
            "p": np.arange(rows) / rows,
        }
    )
    if database.engine == "sqlite":  # which has no truth values
        frame = frame.with_columns(pl.col("y").cast(pl.Int64))
    frame.write_csv(tmp_path / "preds.csv")
    database.write("preds", frame)
    task = {"label": "y", "group": ["float", "integer", "text"], "score": "p"}
    expected = measure_file(tmp_path / "preds.csv", **task)
    found = measure_database(database.url, table="preds", **task)
    check_equal(found, expected)
    assert {group[2] for group in found.groups} == {None, "x"}


def test_nan_means_missing(database):
    if database.engine == "sqlite":
        pytest.skip("SQLite stores NaN as NULL")
    frame = pl.DataFrame(
        {"y": ["a", "b"] * 8, "g": [1.0, float("nan")] * 8, "p": [0.2, float("nan"), 0.4, 1.0] * 4}
    )
    database.write("preds", frame)
    sums = measure_database(database.url, table="preds", label="y", group="g", score="p")
    assert sums.groups == (("1",), (None,))
    assert sums.sites["preds"].prediction_missing == 4


def test_texts_in_sqlite_are_read_as_numbers_or_refused(tmp_path):
    """`.import` of the sqlite3 program stores every value of a CSV as text."""
    database = Database("sqlite", tmp_path, None)
    texts = ["0.25", "1", "1e-3", "", "NA", "0.75"]
    frame = pl.DataFrame({"y": ["a", "b"] * 3, "g": "x", "p": texts, "w": ["1", "2.5", "0"] * 2})
    frame.write_csv(tmp_path / "preds.csv")
    database.write("preds", frame)
    for more in ({}, {"weight": "w"}):
        task: dict[str, Any] = {"label": "y", "group": "g", "score": "p", **more}
        expected = measure_file(tmp_path / "preds.csv", **task)
        check_equal(measure_database(database.url, table="preds", **task), expected)
    database.run("INSERT INTO preds VALUES ('a', 'x', 'high', 1)")
    with pytest.raises(fedgft.FedgftError, match="no number"):
        measure_database(database.url, table="preds", label="y", group="g", score="p")


def test_a_name_that_is_no_column_is_not_read_as_text_by_sqlite(tmp_path):
    """SQLite takes "sax" as the text 'sax' where there is no column of this name."""
    database = Database("sqlite", tmp_path, None)
    database.write("preds", make_rows(20))
    with pytest.raises(fedgft.FedgftError, match="did you mean 'sex'"):
        measure_database(database.url, table="preds", label="repaid", group="sax", score="p")


def test_names_that_need_quotes(database, tmp_path):
    name = 'my "p" `x` [1]; --'
    frame = make_rows(100).rename({"p": name, "sex": "select"})
    frame.write_parquet(tmp_path / "order.parquet")
    database.write("order", frame.rename({name: "p"}))
    quoted = name.replace('"', '""')
    database.run(f'ALTER TABLE "order" RENAME COLUMN p TO "{quoted}"')
    task = {"label": "repaid", "group": "select", "score": name}
    expected = measure_file(tmp_path / "order.parquet", **task)
    check_equal(measure_database(database.url, table="order", **task), expected)


# Statements and counts


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_counts_that_a_site_saved_give_the_same_file(task, database, tmp_path):
    database.write("preds", make_rows(1500, seed=5))
    expected = measure_database(database.url, table="preds", label="repaid", **task)
    names = ("min_cell", "values")
    options = {name: value for name, value in task.items() if name not in names}
    more = {name: task[name] for name in names if name in task}
    statement = write_sql(TableRows("preds"), database.engine, label="repaid", **options)
    assert statement.count("SELECT COUNT") == 0 and statement.count("GROUP BY") == 1
    path = database.save(statement.rstrip(";\n"), tmp_path / "preds.csv")
    (found,) = measure_counts(path, **more)
    check_equal(found, expected)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_statements_are_sql_in_every_dialect(task, dialect):
    sqlglot = pytest.importorskip("sqlglot")
    rows = TableRows('clinic."may.2024"', "year = 2024", "people", ("id",))
    names = ("min_cell", "values")
    options = {name: value for name, value in task.items() if name not in names}
    statement = write_sql(rows, dialect, label="repaid", **options)
    (parsed,) = sqlglot.parse(statement, read=dialect)
    assert isinstance(parsed, sqlglot.exp.Select)
    assert parsed.args["limit"].expression.name == str(MAX_CELLS + 1)
    kinds = (sqlglot.exp.Insert, sqlglot.exp.Update, sqlglot.exp.Delete, sqlglot.exp.Command)
    assert not list(parsed.find_all(*kinds))
    # Columns of rows appear in the result only inside CAST of a group key, or in a sum.
    aggregates = (sqlglot.exp.Sum, sqlglot.exp.Count, sqlglot.exp.Max)
    grouped = {each.name for each in parsed.args["group"].expressions}
    for item in parsed.selects:
        free = [c for c in item.find_all(sqlglot.exp.Column) if not c.find_ancestor(*aggregates)]
        assert {column.name for column in free} <= grouped
    assert not grouped & {"s0", "w", "id"}


CONDITIONS = {
    "a = 1) OR (1 = 1": "parentheses",
    "a = 1; DROP TABLE preds": "semicolon",
    "a = 1 -- all": "comments",
    "a = 1 /* all */": "comments",
    "a = 1 LIMIT 3": "Expecting",
    "a = 1 UNION SELECT * FROM people": "Expecting",
    "a = 1 GROUP BY id": "Expecting",
    "(a = 1": "parentheses",
    "a =": "expression",
}


@pytest.mark.parametrize("where", CONDITIONS)
@pytest.mark.parametrize("dialect", ["postgres", "sqlite", "duckdb", "spark"])
def test_a_condition_cannot_leave_its_parentheses(where, dialect):
    pytest.importorskip("sqlglot")
    with pytest.raises(fedgft.FedgftError, match=CONDITIONS[where]) as raised:
        write_sql(TableRows("preds", where), dialect, label="y", group="g", score="p")
    assert raised.value.field == "where" and "\n" not in str(raised.value)


def test_a_condition_is_sent_as_it_was_written():
    pytest.importorskip("sqlglot")
    where = "note = 'two\n  lines' AND year::int >= 2024"
    text = write_sql(TableRows("preds", where), "postgres", label="y", group="g", score="p")
    assert where in text


# Errors


def fail(url: str, **changes: Any) -> fedgft.FedgftError:
    """Return the error of a measurement."""
    task = {"table": "preds", "label": "repaid", "group": "sex", "score": "p"} | changes
    with pytest.raises(fedgft.FedgftError) as raised:
        measure_database(url, **task)
    text = str(raised.value)
    assert "\n" not in text and "fedgft_" not in text and len(text) < 400
    return raised.value


WRONG = {
    "table": ({"table": "perds"}, "no table 'perds'.*did you mean 'preds'"),
    "label": ({"label": "repayed"}, "no column 'repayed' .label.; did you mean 'repaid'"),
    "group": ({"group": "six"}, "no column 'six' .group.; did you mean 'sex'"),
    "score": ({"score": "pp"}, "no column 'pp' .score.; did you mean 'p'"),
    "weight": ({"weight": "wait"}, "no column 'wait' .weight."),
    "given": ({"given": "departement"}, "no column 'departement' .given.; did you mean 'depart"),
    "condition": ({"where": "nothing > 3"}, "the database answers: .*nothing"),
    "no row": ({"where": "id < 0"}, "no row fulfills where"),
    "other table": ({"join": "poeple", "key": "id"}, "no table 'poeple' .join.; did you mean"),
    "key": (
        {"group": "people.sex", "join": "people", "key": "idd"},
        "no column 'idd' .key.; did you mean 'id'",
    ),
    "both tables": ({"join": "people", "key": "id"}, "both tables have a column 'sex'"),
    "key without join": ({"key": "id"}, "key needs join"),
    "same table": ({"join": "preds", "key": "id"}, "has the name of table"),
    "range": ({"score": "age"}, "column age: score outside 0 to 1 in .* rows"),
    "too many": ({"group": "id"}, "group column 'id' has more than 200 different values"),
    "negative": ({"weight": "minus"}, "column minus: weight below 0 or above 1e9 in 300 rows"),
    "no weight": ({"weight": "age"}, "column age: missing weight in"),
    "name of a table": ({"table": "a..b"}, "not the name of a table"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(name, database):
    changes, text = WRONG[name]
    frame = make_rows(300).with_columns(minus=-1.0)
    database.write("preds", frame)
    database.write("people", frame.select("id", "sex"))
    with pytest.raises(fedgft.FedgftError, match=text):
        raise fail(database.url, **changes)


def test_an_empty_table(database):
    database.write(
        "preds",
        make_rows(0).cast(
            {
                "repaid": pl.String,
                "sex": pl.String,
                "age": pl.Int64,
                "department": pl.String,
                "bank": pl.String,
                "approved": pl.String,
                "p": pl.Float64,
            }
        ),
    )
    assert "the table has no rows" in str(fail(database.url))


def test_too_many_counts_are_refused_before_they_are_fetched(database, monkeypatch):
    monkeypatch.setattr("fedgft.auditing.sql_statement.MAX_CELLS", 50)
    monkeypatch.setattr("fedgft.auditing.sql_counts.MAX_CELLS", 50)
    database.write("preds", make_rows(2000))
    error = fail(database.url, group=["sex", "age"])
    assert "more than 50 counts" in str(error) and error.kind == "data"


def test_the_database_is_opened_for_reading_only(database):
    database.write("preds", make_rows(20))
    from fedgft.auditing.sql_engines import connect, parse_url

    with (
        connect(parse_url(database.url)) as engine,
        pytest.raises(Exception, match=r"(?i)read.?only"),
    ):
        list(engine.run("CREATE TABLE other (x INTEGER)"))


URLS = {
    "oracle://x/y": "'oracle://' is no database",
    "no url": "this is no URL",
    "sqlite:///missing.db": "there is no such file",
    "duckdb:///missing.db": "there is no such file",
    "sqlite://": "names no file",
    "sqlite://relative.db": "names no file",
    "postgresql://me:{secret}@nowhere.invalid/db": "nowhere.invalid",
    "postgresql://me:{secret}@127.0.0.1:1/db": "refused",
    "postgresql://me:{secret}@127.0.0.1:{secret}/db": "",
    "postgresql://127.0.0.1:1/db?password={secret}": "refused",
    "postgresql://127.0.0.1:1/db?unknown=1&password={secret}": "",
    "postgresql://me:{secret}": "",
    "postgresql://me:{secret}@[::1/db": "",
    "postgres://me:a@b:{secret}@127.0.0.1:1/db": "refused",
    "mysql://me:{secret}@host/db": "'mysql://' is no database",
}


@pytest.mark.parametrize("url", URLS)
def test_wrong_urls_are_one_line_without_secrets(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "postgres" in url:
        pytest.importorskip("psycopg")
    for secret in ("hunter2", "p%40ss%2Fw", "pa:ss/w@rd?#x", "p%ZZq"):
        error = fail(url.format(secret=secret))
        assert URLS[url] in str(error)
        for part in (secret, "hunter2", "p@ss/w", "rd?#x", "ss/w"):
            assert part not in str(error) and part not in repr(error)


def test_a_password_is_in_no_message_of_a_server(server):
    import psycopg

    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {READER}")
        connection.execute(f"CREATE ROLE {READER} LOGIN PASSWORD '{PASSWORD}'")
    from urllib.parse import quote

    place = f"127.0.0.1:{server.port}/postgres"
    right = f"postgresql://{READER}:{quote(PASSWORD, safe='')}@{place}"
    wrong = f"postgresql://{READER}:{quote(PASSWORD, safe='')}x@{place}"
    error = fail(wrong)
    assert "authentication failed" in str(error) and "PGPASSWORD" in str(error)
    assert f"{READER}:***@" in str(error) and error.kind == "network"
    for text in (str(error), str(fail(right, table="nothing"))):
        assert PASSWORD not in text and quote(PASSWORD, safe="") not in text


@pytest.fixture
def reader(server: PostgresServer, monkeypatch) -> Iterator[str]:
    """The URL of a role that may read one table, whose password is in the environment."""
    import psycopg

    frame = make_rows(500)
    Database("postgres", Path(), server).write("preds", frame)
    Database("postgres", Path(), server).write("hidden", frame)
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {READER}")
        connection.execute(f"CREATE ROLE {READER} LOGIN PASSWORD '{PASSWORD}'")
        connection.execute(f"GRANT SELECT ON preds TO {READER}")
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        yield f"postgresql://{READER}@127.0.0.1:{server.port}/postgres"
        connection.execute(f"DROP OWNED BY {READER}; DROP ROLE {READER}")


def test_the_right_to_select_is_enough(reader):
    sums = measure_database(reader, table="preds", label="repaid", group="sex", score="p")
    assert sums.rows() > 400
    error = fail(reader, table="hidden")
    assert "permission denied for table hidden" in str(error)
    assert "no table 'preds2'" in str(fail(reader, table="preds2"))


def test_the_password_is_missing(reader, monkeypatch):
    monkeypatch.delenv("PGPASSWORD")
    monkeypatch.setenv("PGPASSFILE", "/nonexistent")
    assert "set PGPASSWORD, or use ~/.pgpass" in str(fail(reader))


def test_the_log_of_the_server_shows_one_statement(reader, server):
    """Between two marks: the start of a transaction, one SELECT with GROUP BY, and its end."""
    import psycopg

    def mark(name: str) -> None:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"SELECT 'mark {name}'")

    mark("begin")
    measure_database(
        reader, table="preds", label="repaid", group="sex", score="p", where="age > 20"
    )
    mark("end")
    text = server.read_log()
    between = text[text.rindex("mark begin") : text.rindex("SELECT 'mark end'")]
    statements = [part.strip() for part in between.split("statement: ")[1:] if part.strip()]
    firsts = [statement.split()[0] for statement in statements]
    assert firsts[:2] == ["BEGIN", "WITH"] and set(firsts[2:]) <= {"ROLLBACK", "COMMIT", "SELECT"}
    assert len([each for each in firsts if each == "WITH"]) == 1
    assert statements[0].startswith("BEGIN READ ONLY")
    assert statements[1].count("GROUP BY") == 1 and "age > 20" in statements[1]
    assert PASSWORD not in text.replace(f"PASSWORD '{PASSWORD}'", "")
