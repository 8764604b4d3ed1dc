"""The one SQL statement that counts a table in a database: its text, for several databases.

The statement has three steps. `fedgft_rows` picks the columns, `fedgft_bins` puts each score into
its bin, and the last step groups and counts. What it returns has one row per group, label, decision
and bin: a number of rows and the sum of their scores.

Bin i has i/bins <= score < (i+1)/bins. ROUND(score * bins) is the number of the bin or one more,
whatever the rounding of the product, and the comparison with that edge decides between the two.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fedgft.auditing.measurement import MISSING_VALUES, Measurement
from fedgft.errors import FedgftError, import_extra
from fedgft.validation import check_choice, check_instance, format_value

MAX_CELLS = 1_000_000  # most rows that the statement may return
MAX_POSTGRES_NAME = 63  # bytes of a column's name that PostgreSQL keeps
OUT_OF_RANGE = "score outside 0 to 1"  # what the column `problem` says of rows that are an error
NO_NUMBER = "score that is no number"
NO_SUM = "scores that do not add up to 1"
REPEATED_KEY = "repeated key"


class Dialect(NamedTuple):
    """How a database writes what this statement needs."""

    title: str
    quote: str
    double: str  # the type of floating-point numbers of 64 bits
    text: str
    nan: str  # whether {x} is NaN; "" if the database has no NaN
    tested: bool = False  # whether the tests run the statement


DIALECTS = {
    "postgres": Dialect(
        "PostgreSQL", '"', "DOUBLE PRECISION", "TEXT", "{x} = 'NaN'::DOUBLE PRECISION", tested=True
    ),
    "duckdb": Dialect("DuckDB", '"', "DOUBLE", "VARCHAR", "isnan({x})", tested=True),
    # SQLite reads "x" as a text if there is no column x, but not `x`.
    "sqlite": Dialect("SQLite", "`", "REAL", "TEXT", "", tested=True),
    "spark": Dialect("Spark", "`", "DOUBLE", "STRING", "isnan({x})", tested=True),
    "databricks": Dialect("Databricks", "`", "DOUBLE", "STRING", "isnan({x})"),
    "snowflake": Dialect("Snowflake", '"', "DOUBLE", "VARCHAR", "{x} = 'NaN'::DOUBLE"),
    "bigquery": Dialect("BigQuery", "`", "FLOAT64", "STRING", "IS_NAN({x})"),
    "trino": Dialect("Trino", '"', "DOUBLE", "VARCHAR", "is_nan({x})"),
}


@dataclass(frozen=True)
class TableRows:
    """The rows that are counted.

    Parameters
    ----------
    table
        The name of the table: NAME or SCHEMA.NAME; a part with a dot is quoted: "my.table".
    where
        A condition in SQL that the rows fulfill. None: all rows.
    join, key
        A second table, which holds the groups, and the column of both tables that says which rows
        belong together. A row without a partner has no recorded groups. None: there is one table.
    """

    table: str
    where: str | None = None
    join: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        for name in ("table", "where", "join", "key"):
            value = getattr(self, name)
            if name == "table" or value is not None:
                check_instance(name, value, str)
                if not value.strip():
                    raise FedgftError(f"`{name}` must not be empty", kind="missing")
        if (self.join is None) != (self.key is None):
            given, other = ("join", "key") if self.key is None else ("key", "join")
            text = f"`{given}` needs `{other}`: the second table, and the column of both tables"
            raise FedgftError(text, kind="missing")
        if self.join is not None and name_alias(self.table) == name_alias(self.join):
            text = f"`join` {self.join}: has the name of `table`; give one of them another name"
            raise FedgftError(text, kind="conflict")


class CountColumn(NamedTuple):
    """A column that the statement returns."""

    name: str
    key: str  # the short name during counting, as in `_Counts`, or bins, threshold or problem


def list_count_columns(task: Measurement) -> list[CountColumn]:
    """Return the columns of the statement's result, in order."""
    columns = []
    if task.site_column is not None:
        columns.append(CountColumn(f"site_{task.site_column}", "site"))
    columns += [CountColumn(f"group_{name}", f"g{i}") for i, name in enumerate(task.attributes)]
    columns.append(CountColumn(f"label_{task.label}", "y"))
    columns.append(CountColumn(f"decision_{task.decision}" if task.decision else "decision", "d"))
    if task.scores:
        columns += [CountColumn("score_column", "score"), CountColumn("bin", "bin")]
        columns.append(CountColumn("bins", "bins"))
    if has_threshold(task):
        columns.append(CountColumn("threshold", "threshold"))
    columns += [CountColumn("problem", "problem"), CountColumn("row_count", "n")]
    return columns + [CountColumn("score_sum", "total")] * bool(task.scores)


def has_threshold(task: Measurement) -> bool:
    """Return whether the decision follows from the score and the threshold."""
    return task.decision is None and len(task.scores) <= 2


def write_statement(task: Measurement, rows: TableRows, dialect: str) -> str:
    """Return the statement that counts the rows.

    Parameters
    ----------
    task
        What to count. `attributes` names the groups, `groups` their columns; TABLE.COLUMN names the
        column of one of two tables.
    rows
        The rows.
    dialect
        A key of `DIALECTS`.
    """
    check_choice("dialect", dialect, tuple(DIALECTS))
    if rows.where is not None:
        check_condition(rows.where, dialect)
    return "\n".join(_Writer(task, rows, DIALECTS[dialect]).list_parts())


class _Writer:
    """Writes the parts of the statement."""

    def __init__(self, task: Measurement, rows: TableRows, dialect: Dialect) -> None:
        self.task = task
        self.rows = rows
        self.dialect = dialect
        self.scores = range(len(task.scores))
        self.is_untyped = dialect is DIALECTS["sqlite"] and bool(task.scores)
        self.keys = [column.key for column in task.columns() if column.option != "score"]

    def quote(self, name: str) -> str:
        """Return the name of a column or table in quotes."""
        mark = self.dialect.quote
        return f"{mark}{name.replace(mark, 2 * mark)}{mark}"

    def quote_table(self, name: str) -> str:
        return ".".join(map(self.quote, split_table_name(name)))

    def quote_column(self, name: str) -> str:
        """Return the name of a column, with that of its table if there are two and it has one."""
        table, dot, column = name.partition(".")
        known = [name_alias(each) for each in (self.rows.table, self.rows.join) if each]
        if dot and self.rows.join and table in known:
            return f"{self.quote(table)}.{self.quote(column)}"
        return self.quote(name)

    def list_parts(self) -> Iterator[str]:
        """Yield the parts of the statement."""
        yield "WITH"
        if self.rows.join:
            yield self.write_repeats(self.rows.join)
        yield self.write_rows()
        if self.is_untyped:
            yield self.write_numbers()
        yield self.write_bins()
        yield self.write_counts()

    def write_repeats(self, join: str) -> str:
        """Return the step that counts the keys which occur more than once in the second table."""
        key = self.quote(self.rows.key or "")
        return (
            "fedgft_repeats AS (\n  SELECT COUNT(*) AS fedgft_repeated FROM (\n"
            f"    SELECT {key} FROM {self.quote_table(join)} WHERE {key} IS NOT NULL\n"
            f"    GROUP BY {key} HAVING COUNT(*) > 1\n  ) AS fedgft_keys\n),"
        )

    def write_rows(self) -> str:
        """Return the step that picks the columns under short names."""
        names = {column.key: self.quote_column(column.name) for column in self.task.columns()}
        items = [f"{names[key]} AS {key}" for key in self.keys]
        items += [f"{self.read_score(names[f's{i}'])} AS s{i}" for i in self.scores]
        if self.rows.join is not None:
            items.append(f"CASE WHEN fedgft_repeated > 0 THEN '{REPEATED_KEY}' END AS problem")
        where = "" if self.rows.where is None else f"\n  WHERE (\n    {self.rows.where}\n  )"
        table = f"{self.quote_table(self.rows.table)} AS {self.quote(name_alias(self.rows.table))}"
        return (
            f"fedgft_rows AS (\n  SELECT\n    {_join(items, 4)}\n  FROM {table}"
            f"{self.write_join()}{where}\n),"
        )

    def write_join(self) -> str:
        """Return the join with the second table.

        If a key is repeated there, no row has a partner: the database need not build all pairs
        before this is reported.
        """
        if self.rows.join is None:
            return ""
        alias = self.quote(name_alias(self.rows.join))
        key = self.quote(self.rows.key or "")
        mine = f"{self.quote(name_alias(self.rows.table))}.{key}"
        return (
            f"\n  CROSS JOIN fedgft_repeats\n  LEFT JOIN {self.quote_table(self.rows.join)} AS "
            f"{alias}\n    ON CASE WHEN fedgft_repeated = 0 THEN {mine} END = {alias}.{key}"
        )

    def read_score(self, column: str) -> str:
        """Return the expression of a score as a number; in SQLite, of the value as it is."""
        return column if self.is_untyped else f"CAST({column} AS {self.dialect.double})"

    def write_numbers(self) -> str:
        """Return the step that reads scores in SQLite, where a column holds values of any type.

        Tables that were imported from a CSV hold texts, and CAST would read "high" as 0.
        """
        items = list(self.keys)
        cases = ["WHEN problem IS NOT NULL THEN problem"] if self.rows.join else []
        for i in self.scores:
            x = f"s{i}"
            kind = f"CASE WHEN json_valid({x}) THEN json_type({x}) ELSE '' END"
            is_number = f"{kind} IN ('integer', 'real')"
            read = [
                f"WHEN typeof({x}) IN ('integer', 'real') THEN {x} * 1.0",
                f"WHEN typeof({x}) = 'text'\n      THEN CASE WHEN {is_number}\n"
                f"        THEN CAST({x} AS REAL) END",
            ]
            items.append(f"{_write_cases(read)} AS {x}")
            texts = ", ".join(f"'{each}'" for each in MISSING_VALUES)
            cases.append(
                f"WHEN typeof({x}) = 'blob' OR typeof({x}) = 'text' AND {x} NOT IN ({texts})\n"
                f"        AND NOT {is_number}\n      THEN '{NO_NUMBER}'"
            )
        items.append(f"{_write_cases(cases)} AS problem")
        return f"fedgft_numbers AS (\n  SELECT\n    {_join(items, 4)}\n  FROM fedgft_rows\n),"

    def write_bins(self) -> str:
        """Return the step with decisions, bins and problems."""
        keys = [key for key in self.keys if key != "d"]
        items = [*keys, *(f"s{i}" for i in self.scores)]
        items += [f"{self.write_bin(f's{i}')} AS b{i}" for i in self.scores]
        items.append("d" if self.task.decision is not None else f"{self.write_decision()} AS d")
        items.append(f"{self.write_problem()} AS problem")
        source = "fedgft_numbers" if self.is_untyped else "fedgft_rows"
        return f"fedgft_bins AS (\n  SELECT\n    {_join(items, 4)}\n  FROM {source}\n)"

    def write_bin(self, score: str) -> str:
        """Return the expression of a score's bin; null if the score is missing or wrong."""
        nearest = f"ROUND({score} * {self.task.bins})"
        is_below = f"{score} < {nearest} / {self.task.bins} OR {score} = 1"
        number = f"{nearest} - CASE WHEN {is_below} THEN 1 ELSE 0 END"
        return _write_cases([f"WHEN {score} BETWEEN 0 AND 1\n      THEN {number}"])

    def write_decision(self) -> str:
        """Return the expression of the decision that follows from the scores."""
        last = self.scores[-1]
        if has_threshold(self.task):
            number = f"CAST({write_number(self.task.threshold)} AS {self.dialect.double})"
            score = f"s{last}"
            return _write_cases(
                [f"WHEN {score} >= {number} THEN 1", f"WHEN {score} < {number} THEN 0"]
            )
        cases = []
        for i in self.scores[:-1]:
            others = " AND ".join(f"s{i} >= s{j}" for j in self.scores[i + 1 :])
            cases.append(f"WHEN {others} THEN {i}")
        return _write_cases([*cases, f"ELSE {last}"])

    def write_problem(self) -> str:
        """Return the expression that names what is wrong with a row; null if nothing is."""
        cases = []
        if self.is_untyped or self.rows.join is not None:
            cases.append("WHEN problem IS NOT NULL THEN problem")
        for i in self.scores:
            nan = self.dialect.nan.format(x=f"s{i}")
            known = f" AND NOT {nan}" if nan else ""
            cases.append(f"WHEN (s{i} < 0 OR s{i} > 1){known} THEN '{OUT_OF_RANGE}'")
        if len(self.scores) > 1:
            known = " AND ".join(f"s{i} BETWEEN 0 AND 1" for i in self.scores)
            total = " + ".join(f"s{i}" for i in self.scores)
            cases.append(f"WHEN {known} AND ABS({total} - 1) > 0.01 THEN '{NO_SUM}'")
        return _write_cases(cases) if cases else f"CAST(NULL AS {self.dialect.text})"

    def write_counts(self) -> str:
        """Return the last step, which groups and counts."""
        parts = len(self.scores) > 1
        columns = list_count_columns(self.task)
        grouped = [c.key for c in columns if c.key not in ("n", "total", "bins", "threshold")]
        source = "fedgft_bins"
        expressions = {
            "n": "COUNT(*)",
            "bins": str(self.task.bins),
            "threshold": write_number(self.task.threshold),
            "score": "0",
            "bin": "b0",
            "total": "SUM(s0)",
        }
        expressions |= {key: f"CAST({key} AS {self.dialect.text})" for key in self.keys}
        if parts:
            source = self.write_parts()
            expressions |= {"score": "score", "bin": "bin", "total": "SUM(s)"}
        else:
            grouped = ["b0" if key == "bin" else key for key in grouped if key != "score"]
        items = [f"{expressions.get(c.key, c.key)} AS {self.quote(c.name)}" for c in columns]
        return (
            f"SELECT\n  {_join(items, 2)}\nFROM {source}\nGROUP BY {', '.join(grouped)}\n"
            f"LIMIT {MAX_CELLS + 1}"
        )

    def write_parts(self) -> str:
        """Return a row per column of scores, for rows that have all scores."""
        names = [key for key in self.keys if key != "d"]
        complete = " AND ".join(f"b{i} IS NOT NULL" for i in self.scores)
        bins = " ".join(f"WHEN {i} THEN b{i}" for i in self.scores)
        scores = " ".join(f"WHEN {i} THEN s{i}" for i in self.scores)
        numbers = " UNION ALL ".join(
            f"SELECT {i} AS score" if i == 0 else f"SELECT {i}" for i in self.scores
        )
        items = [*names, f"CASE WHEN {complete} THEN d END AS d", "problem", "score"]
        items += [f"CASE score {bins} END AS bin", f"CASE score {scores} END AS s"]
        return (
            f"(\n  SELECT\n    {_join(items, 4)}\n  FROM fedgft_bins\n"
            f"  CROSS JOIN ({numbers}) AS fedgft_scores\n) AS fedgft_parts"
        )


def _join(items: Sequence[str], indent: int) -> str:
    return f",\n{' ' * indent}".join(items)


def _write_cases(cases: Sequence[str]) -> str:
    """Return a CASE with a line per case."""
    return "\n      ".join(["CASE", *cases]) + "\n    END"


def write_number(number: float) -> str:
    """Return a number in [0, 1] as every database reads it exactly.

    A number with many digits has an exponent: DuckDB would read it as a decimal and round it.
    """
    text = repr(float(number))
    return text if len(text) <= 17 or "e" in text else f"{float(number):.16e}"


def split_table_name(name: str) -> list[str]:
    """Return the parts of a table's name: a schema, if it has one, and the name.

    >>> split_table_name('clinic."may.2024"')
    ['clinic', 'may.2024']
    """
    parts = re.findall(r'(?:^|\.)(?:"((?:[^"]|"")+)"|([^".]+))', name.strip())
    found = [quoted.replace('""', '"') or plain for quoted, plain in parts]
    written = ".".join(f'"{quoted}"' if quoted else plain for quoted, plain in parts)
    if not 1 <= len(found) <= 3 or written != name.strip():
        text = f"{format_value(name)} is not the name of a table: NAME or SCHEMA.NAME"
        raise FedgftError(text, field="table")
    return found


def name_alias(table: str) -> str:
    """Return the last part of a table's name, which the statement calls it by."""
    return split_table_name(table)[-1]


def check_condition(where: str, dialect: str) -> None:
    """Raise a `FedgftError` unless a text is one condition and nothing else.

    It is put into the statement as it is, so it must not end the parentheses around it: a text that
    someone else wrote could otherwise return rows instead of sums.
    """
    sqlglot = import_extra("sqlglot", "`where`")
    problem = ""
    try:
        tokens = sqlglot.tokenize(where, read=dialect)
        depths = _measure_depths([token.token_type.name for token in tokens])
        if min(depths, default=0) < 0 or (depths and depths[-1]):
            problem = "its parentheses do not match"
        elif any(token.comments for token in tokens):
            problem = "comments are not allowed in it"
        elif any(token.token_type == sqlglot.TokenType.SEMICOLON for token in tokens):
            problem = "it must not hold a semicolon"
        else:
            parsed = sqlglot.parse_one(f"SELECT 1 FROM t WHERE (\n{where}\n)", read=dialect)
            condition = parsed.args.get("where")
            is_one = condition is not None and isinstance(condition.this, sqlglot.exp.Paren)
            clauses = {name for name, value in parsed.args.items() if value}
            if not is_one or not clauses <= {"expressions", "from", "from_", "where", "kind"}:
                problem = "it must be one condition"
    except sqlglot.errors.SqlglotError as error:
        problem = re.sub(r"\x1b\[\d*m", "", str(error).strip().splitlines()[0])[:160]
    if problem:
        text = f"`where` {format_value(where)}: cannot be read as a condition in SQL: {problem}"
        raise FedgftError(text)


def _measure_depths(tokens: Sequence[str]) -> list[int]:
    """Return how many parentheses are open after each kind of token."""
    depths = []
    depth = 0
    for token in tokens:
        depth += {"L_PAREN": 1, "R_PAREN": -1}.get(token, 0)
        depths.append(depth)
    return depths


def check_printable_names(task: Measurement, dialect: str) -> None:
    """Raise a `FedgftError` if the database would cut the name of a column of the result."""
    for column in list_count_columns(task):
        if dialect == "postgres" and len(column.name.encode()) > MAX_POSTGRES_NAME:
            text = f"PostgreSQL would cut the name {format_value(column.name)}; use a view with a "
            raise FedgftError(f"{text}shorter name of that column", kind="unsupported")


def split_qualified(task: Measurement, rows: TableRows) -> Measurement:
    """Return the task with the names of groups without the table in TABLE.COLUMN."""
    if rows.join is None:
        return task
    known = (name_alias(rows.table), name_alias(rows.join))
    names = []
    for name in task.groups:
        table, dot, column = name.partition(".")
        names.append(column if dot and table in known else name)
    if len(set(names)) < len(names):
        raise FedgftError("`group` names a column of both tables; their names must differ")
    return replace(task, attributes=tuple(names))
