"""The one SQL statement that counts a table in a database: its text, for several databases.

The statement has three steps. `fedgft_rows` picks the columns, `fedgft_bins` puts each score into
its bin, and the last step groups and counts. What it returns has one row per group, label, decision
and bin: a number of rows and the sum of their scores.

Each step is written inside the next one. PostgreSQL would merge steps that stand side by side, and
then expect as many cells as there are different scores: it would sort all rows instead of counting
them in parallel.

Bin i has i/bins <= score < (i+1)/bins. ROUND(score * bins) is the number of the bin or one more,
whatever the rounding of the product, and the comparison with that edge decides between the two.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import NamedTuple

from fedgft.auditing.measurement_task import Measurement
from fedgft.data.table_scan import MISSING_VALUES
from fedgft.errors import FedgftError, import_extra
from fedgft.validation import check_choice, check_instance, format_value

MAX_CELLS = 1_000_000  # most rows that the statement may return
MAX_POSTGRES_NAME = 63  # bytes of a column's name that PostgreSQL keeps
OUT_OF_RANGE = -1  # stands in the place of a bin, for rows that are an error
NO_SUM = -2
REPEATED_KEY = -3
NO_NUMBER = -4
NO_WEIGHT = -5
WRONG_WEIGHT = -6
ZERO_WEIGHT = -7  # the only one of these that is no error: such rows are left out
PROBLEMS = {  # what the column `problem` says of these rows
    OUT_OF_RANGE: "score outside 0 to 1",
    NO_SUM: "scores that do not add up to 1",
    REPEATED_KEY: "repeated key",
    NO_NUMBER: "value that is no number",
    NO_WEIGHT: "missing weight",
    WRONG_WEIGHT: "weight below 0 or above 1e9",
    ZERO_WEIGHT: "weight of 0",
}


MAX_WEIGHT = "1e9"  # as in files: sums of squared weights must not overflow
CONDITION = "\0condition"  # stands for the condition while the statement is put together


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
    "spark": Dialect("Spark", "`", "DOUBLE", "STRING", "isnan({x})"),
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
        A second table, which holds the groups, and the columns of both tables that say which rows
        belong together. A row without a partner has no recorded groups. None: there is one table.
    """

    table: str
    where: str | None = None
    join: str | None = None
    key: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("table", "where", "join"):
            value = getattr(self, name)
            if name == "table" or value is not None:
                check_instance(name, value, str)
                if not value.strip():
                    raise FedgftError(f"`{name}` must not be empty", kind="missing")
        if (self.join is None) != (not self.key):
            given, other = ("key", "join") if self.key else ("join", "key")
            text = f"`{given}` needs `{other}`: the second table, and the columns of both tables"
            raise FedgftError(text, kind="missing")
        if self.join is not None and name_alias(self.table) == name_alias(self.join):
            text = f"`join` {self.join}: has the name of `table`; give one of them another name"
            raise FedgftError(text, kind="conflict")


class CountColumn(NamedTuple):
    """A column that the statement returns."""

    name: str
    key: str  # the short name during counting, as in `RowCounts`, or bins, threshold or problem


def list_count_columns(task: Measurement) -> list[CountColumn]:
    """Return the columns of the statement's result, in order."""
    columns = []
    if task.site_column is not None:
        columns.append(CountColumn(f"site_{task.site_column}", "site"))
    for key, name in zip(task.keys("group"), task.attributes, strict=True):
        columns.append(CountColumn(f"group_{name}", key))
    for key, name in zip(task.keys("given"), task.given_names, strict=True):
        columns.append(CountColumn(f"given_{name}", key))
    columns.append(CountColumn(f"label_{task.label}", "y"))
    columns.append(CountColumn(f"decision_{task.decision}" if task.decision else "decision", "d"))
    if task.scores:
        columns += [CountColumn("score_column", "score"), CountColumn("bin", "bin")]
        columns.append(CountColumn("bins", "bins"))
    if has_threshold(task):
        columns.append(CountColumn("threshold", "threshold"))
    columns += [CountColumn("problem", "problem"), CountColumn("row_count", "n")]
    if task.weight is not None:
        columns.append(CountColumn(f"weight_{task.weight}", "w"))
        columns += [CountColumn("squares_sum", "w2"), CountColumn("largest_weight", "w_max")]
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
    return _Writer(task, rows, DIALECTS[dialect]).write()


class _Writer:
    """Writes the parts of the statement."""

    def __init__(self, task: Measurement, rows: TableRows, dialect: Dialect) -> None:
        self.task = task
        self.rows = rows
        self.dialect = dialect
        self.scores = range(len(task.scores))
        self.numbers = [*task.keys("score"), *task.keys("weight")]
        self.is_untyped = dialect is DIALECTS["sqlite"] and bool(self.numbers)
        self.keys = [column.key for column in task.columns() if column.key not in self.numbers]

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

    def write(self) -> str:
        """Return the statement."""
        steps = {"fedgft_rows": self.write_rows()}
        if self.is_untyped:
            steps["fedgft_numbers"] = self.write_numbers()
        steps["fedgft_bins"] = self.write_bins()
        if len(self.scores) > 1:
            steps["fedgft_parts"] = self.write_parts()
        text = ""
        for name, step in steps.items():
            text = f"WITH {name} AS (\n{indent(text + step, '  ')}\n)\n"
        # The condition comes last: it may hold a text of several lines, which must not be indented.
        return (text + self.write_counts()).replace(CONDITION, self.rows.where or "")

    def write_rows(self) -> str:
        """Return the step that picks the columns under short names."""
        names = {column.key: self.quote_column(column.name) for column in self.task.columns()}
        items = [f"{names[key]} AS {key}" for key in self.keys]
        items += [f"{self.read_number(names[key])} AS {key}" for key in self.numbers]
        if self.rows.join is not None:
            items.append("fedgft_repeated")
        where = "" if self.rows.where is None else f"\nWHERE (\n  {CONDITION}\n)"
        table = f"{self.quote_table(self.rows.table)} AS {self.quote(name_alias(self.rows.table))}"
        return f"{_select(items)}\nFROM {table}{self.write_join()}{where}"

    def write_join(self) -> str:
        """Return the join with the second table.

        If a key is repeated there, no row has a partner: the database need not build all pairs
        before this is reported.
        """
        if self.rows.join is None:
            return ""
        other = self.quote_table(self.rows.join)
        mine, theirs = (self.quote(name_alias(name)) for name in (self.rows.table, self.rows.join))
        first, *more = map(self.quote, self.rows.key)
        known = " AND ".join(f"{key} IS NOT NULL" for key in (first, *more))
        keys = ", ".join((first, *more))
        same = [f"CASE WHEN fedgft_repeated = 0 THEN {mine}.{first} END = {theirs}.{first}"]
        same += [f"{mine}.{key} = {theirs}.{key}" for key in more]
        return (
            f"\nCROSS JOIN (\n  SELECT COUNT(*) AS fedgft_repeated FROM (\n"
            f"    SELECT {first} FROM {other} WHERE {known}\n"
            f"    GROUP BY {keys} HAVING COUNT(*) > 1\n  ) AS fedgft_keys\n) AS fedgft_repeats\n"
            f"LEFT JOIN {other} AS {theirs}\n  ON {' AND '.join(same)}"
        )

    def read_number(self, column: str) -> str:
        """Return the expression of a column of numbers; in SQLite, of the values as they are."""
        return column if self.is_untyped else f"CAST({column} AS {self.dialect.double})"

    def write_numbers(self) -> str:
        """Return the step that reads numbers in SQLite, where a column holds values of any type.

        Tables that were imported from a CSV hold texts, and CAST would read "high" as 0.
        """
        items = [*self.keys, *self.list_repeated()]
        for x in self.numbers:
            kind = f"CASE WHEN json_valid({x}) THEN json_type({x}) ELSE '' END"
            is_number = f"{kind} IN ('integer', 'real')"
            read = [
                f"WHEN typeof({x}) IN ('integer', 'real') THEN {x} * 1.0",
                f"WHEN typeof({x}) = 'text'\n    THEN CASE WHEN {is_number}\n"
                f"      THEN CAST({x} AS REAL) END",
            ]
            items.append(f"{_write_cases(read)} AS {x}")
            texts = ", ".join(f"'{each}'" for each in MISSING_VALUES)
            items.append(
                f"(typeof({x}) = 'blob' OR typeof({x}) = 'text' AND {x} NOT IN ({texts})\n"
                f"  AND NOT {is_number}) AS wrong_{x}"
            )
        return f"{_select(items)}\nFROM fedgft_rows"

    def list_repeated(self) -> list[str]:
        """Return the column with the number of repeated keys, if there are two tables."""
        return ["fedgft_repeated"] if self.rows.join is not None else []

    def write_bins(self) -> str:
        """Return the step with decisions and bins."""
        items = [key for key in self.keys if key != "d"]
        items += self.numbers
        items.append("d" if self.task.decision is not None else f"{self.write_decision()} AS d")
        items += [f"{self.write_bin(i)} AS b{i}" for i in self.scores or [0]]
        return f"{_select(items)}\nFROM {'fedgft_numbers' if self.is_untyped else 'fedgft_rows'}"

    def write_bin(self, i: int) -> str:
        """Return the expression of a score's bin: null if the score is missing, below 0 if the row
        is an error, 0 if there are no scores."""
        cases = [f"WHEN fedgft_repeated > 0 THEN {REPEATED_KEY}"] * bool(self.rows.join)
        if self.is_untyped:
            wrong = " OR ".join(f"wrong_{x}" for x in self.numbers)
            cases.append(f"WHEN {wrong} THEN {NO_NUMBER}")
        if self.task.weight is not None:
            cases += self.check_weight()
        if self.task.scores:
            cases += self.check_scores()
        if self.task.weight is not None:
            cases.append(f"WHEN w = 0 THEN {ZERO_WEIGHT}")
        if not self.task.scores:
            return _write_cases([*cases, "ELSE 0"]) if cases else "0"
        score = f"s{i}"
        nearest = f"ROUND({score} * {self.task.bins})"
        is_below = f"{score} < {nearest} / {self.task.bins} OR {score} = 1"
        number = f"{nearest} - CASE WHEN {is_below} THEN 1 ELSE 0 END"
        return _write_cases([*cases, f"WHEN {score} BETWEEN 0 AND 1\n    THEN {number}"])

    def check_weight(self) -> list[str]:
        """Return the cases of wrong weights."""
        nan = self.dialect.nan.format(x="w")
        is_nan = f" OR {nan}" if nan else ""
        return [
            f"WHEN w IS NULL{is_nan} THEN {NO_WEIGHT}",
            f"WHEN w < 0 OR w > {MAX_WEIGHT} THEN {WRONG_WEIGHT}",
        ]

    def check_scores(self) -> list[str]:
        """Return the cases of wrong scores."""
        wrong = []
        for i in self.scores:
            nan = self.dialect.nan.format(x=f"s{i}")
            outside = f"(s{i} < 0 OR s{i} > 1)"
            wrong.append(f"{outside} AND NOT {nan}" if nan else outside)
        cases = [f"WHEN {each} THEN {OUT_OF_RANGE}" for each in wrong]
        if len(self.scores) > 1:
            known = " AND ".join(f"s{i} BETWEEN 0 AND 1" for i in self.scores)
            total = " + ".join(f"s{i}" for i in self.scores)
            cases.append(f"WHEN {known}\n    AND ABS({total} - 1) > 0.01 THEN {NO_SUM}")
        return cases

    def list_problems(self) -> list[int]:
        """Return the errors that rows can have, as they stand in the place of a bin."""
        found = [OUT_OF_RANGE] * bool(self.task.scores) + [NO_SUM] * (len(self.scores) > 1)
        found += [REPEATED_KEY] * bool(self.rows.join) + [NO_NUMBER] * self.is_untyped
        weight = [NO_WEIGHT, WRONG_WEIGHT, ZERO_WEIGHT]
        return found + weight * (self.task.weight is not None)

    def write_decision(self) -> str:
        """Return the expression of the decision that follows from the scores."""
        last = self.scores[-1]
        if has_threshold(self.task):
            return f"s{last} >= CAST({write_number(self.task.threshold)} AS {self.dialect.double})"
        cases = []
        for i in self.scores[:-1]:
            others = " AND ".join(f"s{i} >= s{j}" for j in self.scores[i + 1 :])
            cases.append(f"WHEN {others} THEN {i}")
        return _write_cases([*cases, f"ELSE {last}"])

    def write_counts(self) -> str:
        """Return the last step, which groups and counts."""
        columns = list_count_columns(self.task)
        parts = len(self.scores) > 1
        weighted = self.task.weight is not None
        bin_ = "bin" if parts else "b0"
        cases = [f"WHEN {code} THEN '{PROBLEMS[code]}'" for code in self.list_problems()]
        problem = _write_cases(cases, bin_) if cases else f"CAST(NULL AS {self.dialect.text})"
        expressions = {
            "bin": f"CASE WHEN {bin_} >= 0 THEN {bin_} END",
            "problem": problem,
            "n": "COUNT(*)",
            "bins": str(self.task.bins),
            "threshold": write_number(self.task.threshold),
            "score": "score" if parts else "0",
            "total": f"SUM({'s' if parts else 's0'}{' * w' * weighted})",
            "w": "SUM(w)",
            "w2": "SUM(w * w)",
            "w_max": "MAX(w)",
        }
        expressions |= {key: f"CAST({key} AS {self.dialect.text})" for key in self.keys}
        if has_threshold(self.task):
            expressions["d"] = "CASE WHEN d THEN 1 WHEN NOT d THEN 0 END"
        items = [f"{expressions.get(c.key, c.key)} AS {self.quote(c.name)}" for c in columns]
        names = [c.key for c in columns if c.key == "d" or c.key in self.keys]
        grouped = [*names, *(["score"] if parts else []), bin_]
        return (
            f"{_select(items)}\nFROM {'fedgft_parts' if parts else 'fedgft_bins'}\n"
            f"GROUP BY {', '.join(grouped)}\nLIMIT {MAX_CELLS + 1}"
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
        items = [*names, *self.task.keys("weight")]
        items += [f"CASE WHEN {complete} THEN d END AS d", "score"]
        items += [f"CASE score {bins} END AS bin", f"CASE score {scores} END AS s"]
        return f"{_select(items)}\nFROM fedgft_bins\nCROSS JOIN ({numbers}) AS fedgft_scores"


def _select(items: Sequence[str]) -> str:
    """Return the start of a SELECT, with a line per column."""
    return "SELECT\n" + indent(",\n".join(items), "  ")


def _write_cases(cases: Sequence[str], of: str = "") -> str:
    """Return a CASE with a line per case; `of` is what the cases are values of."""
    return "\n  ".join([f"CASE {of}".strip(), *cases]) + "\nEND"


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
    """Return the task with the names of groups and strata without the table in TABLE.COLUMN."""
    if rows.join is None:
        return task
    known = (name_alias(rows.table), name_alias(rows.join))

    def drop_table(name: str) -> str:
        table, dot, column = name.partition(".")
        return column if dot and table in known else name

    groups, given = (tuple(map(drop_table, names)) for names in (task.groups, task.given))
    if len({*groups, *given}) < len(groups) + len(given):
        raise FedgftError("`group` names a column of both tables; their names must differ")
    return replace(task, attributes=groups, given_names=given)
