"""What the statement of a database returned: as rows, or as a CSV that a site saved.

Each row is checked, because a CSV may have been edited, cut or put together by hand.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedgft.auditing.measurement_task import Measurement
from fedgft.auditing.sql_statement import (
    MAX_CELLS,
    NO_NUMBER,
    NO_SUM,
    NO_WEIGHT,
    OUT_OF_RANGE,
    PROBLEMS,
    REPEATED_KEY,
    WRONG_WEIGHT,
    ZERO_WEIGHT,
    has_threshold,
    list_count_columns,
)
from fedgft.data.encode import as_text, data_error, suggest_name
from fedgft.data.table import check_table_file, detect_separator, report_read_errors
from fedgft.data.table_scan import MISSING_VALUES
from fedgft.errors import FedgftError
from fedgft.formatting import format_count, printable
from fedgft.validation import MAX_LENGTH, format_value

SLACK = 1e-6  # by how much the sum of a cell's scores may leave its bin, per row
MAX_ROWS = 2**53  # larger numbers of rows are no longer exact
PREFIXES = {
    "group_": "group",
    "given_": "given",
    "label_": "label",
    "decision_": "decision",
    "site_": "site",
    "weight_": "weight",
}
PLAIN = (
    *("decision", "score_column", "bin", "bins", "threshold"),
    *("problem", "row_count", "squares_sum", "largest_weight", "score_sum"),
)
SUM_NAMES = ("n", "w", "w2", "w_max", "total")
NUMBERS = ("score", "bin", "bins", "threshold", "n", "w", "w2", "w_max", "total")
REMEDIES = {
    PROBLEMS[OUT_OF_RANGE]: "scores must be probabilities",
    PROBLEMS[NO_NUMBER]: "scores and weights must be numbers",
    PROBLEMS[NO_WEIGHT]: "give every row a weight, 0 for those to leave out",
    PROBLEMS[WRONG_WEIGHT]: "weights must be finite, 0 or more, and at most 1e+09",
    PROBLEMS[NO_SUM]: "the scores of a row must add up to 1 over all columns",
    PROBLEMS[REPEATED_KEY]: "the second table must have one row per key",
}


def read_parts(
    parts: Iterable[Sequence[Sequence[Any]]], task: Measurement
) -> Iterator[pl.DataFrame]:
    """Yield the rows that the statement returned as tables for `sum_cells`.

    Parameters
    ----------
    parts
        The rows, in parts, with values in the order of `list_count_columns`.
    task
        What was counted.
    """
    keys = [column.key for column in list_count_columns(task)]
    numbers = {*NUMBERS, *(["d"] if task.decision is None else [])}
    seen = 0
    for rows in parts:
        seen += len(rows)
        if seen > MAX_CELLS:
            raise data_error(
                task.source,
                f"the statement returns more than {MAX_CELLS:,} counts; name fewer columns, or "
                "columns with fewer different values, or fewer `bins`",
            )
        columns = {}
        for key, values in zip(keys, zip(*rows, strict=True), strict=True):
            if key not in numbers:
                columns[key] = pl.Series(key, values, dtype=pl.String, strict=False)
            else:
                floats = [None if value is None else float(value) for value in values]
                columns[key] = pl.Series(key, floats, dtype=pl.Float64)
        yield check_cells(pl.DataFrame(columns), task)


def check_cells(table: pl.DataFrame, task: Measurement) -> pl.DataFrame:
    """Check counts and return them with the columns that `sum_cells` needs.

    Parameters
    ----------
    table
        The columns under their short names; names as texts and numbers as numbers.
    task
        What was counted.
    """
    keys = [name for name in table.columns if table[name].dtype == pl.String]
    table = table.with_columns(
        pl.when(~pl.col(key).is_in(MISSING_VALUES)).then(pl.col(key)).alias(key) for key in keys
    )
    sizes = table["n"]
    wrong = ~((sizes >= 1) & (sizes <= MAX_ROWS) & (sizes == sizes.round())).fill_null(False)
    _refuse(table, wrong, "n", "row_count", "a whole number of rows, at least 1", task)
    table = table if task.scores else _fill_scores(table)
    _refuse_problems(table, task)
    table = _check_sites(table, task)
    table = _check_weights(table, task) if task.weight is not None else table
    table = _check_scores(table, task) if task.scores else table
    if task.decision is None:
        table = _check_decisions(table, task)
    weights = ["w", "w2", "w_max"] * (task.weight is not None)
    names = ["site", *task.group_keys(), "score", "y", "d", "bin", "n", *weights, "total"]
    return table.select(names).with_columns(pl.col("n", "score", "bin").cast(pl.Int64))


def _refuse(
    table: pl.DataFrame, wrong: pl.Series, key: str, name: str, expected: str, task: Measurement
) -> None:
    """Raise an error about the first row where `wrong` is true."""
    if wrong.any():
        found = table[key].filter(wrong)[0]
        shown = "empty" if found is None else f"{found:g}"
        raise data_error(task.source, f"column '{name}' must hold {expected}, and is {shown}")


def _refuse_problems(table: pl.DataFrame, task: Measurement) -> None:
    """Raise an error if the statement found rows that cannot be counted."""
    problems = table.filter(pl.col("problem") != PROBLEMS[ZERO_WEIGHT])
    if not problems.height:
        return
    text = str(problems["problem"][0])
    rows = int(problems.filter(pl.col("problem") == text, pl.col("score") == 0)["n"].sum())
    if text == PROBLEMS[REPEATED_KEY]:
        raise data_error(task.source, f"a value of `key` repeats in `join`; {REMEDIES[text]}")
    remedy = REMEDIES.get(text, "see the column 'problem'")
    is_weight = text in (PROBLEMS[NO_WEIGHT], PROBLEMS[WRONG_WEIGHT])
    listed = task.weight if is_weight else ", ".join(task.scores)
    found = f"{printable(text)[:MAX_LENGTH]} in {format_count(rows, 'row')}"
    raise data_error(task.source, f"column {listed}: {found}; {remedy}")


def _check_sites(table: pl.DataFrame, task: Measurement) -> pl.DataFrame:
    """Return the table with the name of the site of each row."""
    if task.site_column is None:
        return table.with_columns(pl.lit(task.site).alias("site"))
    table = table.with_columns(as_text(table["site"]).alias("site"))
    empty = table.filter(pl.col("site").is_null())["n"].sum()
    if empty:
        rows = format_count(int(empty), "row")
        raise data_error(task.source, f"site column '{task.site_column}' is empty in {rows}")
    return table


def _fill_scores(table: pl.DataFrame) -> pl.DataFrame:
    """Return a table without scores with the columns of scores, which are zero."""
    return table.with_columns(
        pl.lit(0.0).alias("score"), pl.lit(0.0).alias("bin"), pl.lit(0.0).alias("total")
    )


def _check_weights(table: pl.DataFrame, task: Measurement) -> pl.DataFrame:
    """Check the sums of weights, of their squares, and the largest weight of each cell."""
    sizes, total, squares, largest = (table[key] for key in ("n", "w", "w2", "w_max"))
    wrong = ~((total >= 0) & total.is_finite()).fill_null(False)
    _refuse(table, wrong, "w", f"weight_{task.weight}", "a sum of weights, 0 or more", task)
    low, high = largest * (1 - SLACK), largest * sizes * (1 + SLACK)
    wrong = ~((total >= low) & (total <= high)).fill_null(False)
    expected = "a weight that fits their sum and number"
    _refuse(table, wrong, "w_max", "largest_weight", expected, task)
    low, high = total**2 / sizes * (1 - SLACK), total * largest * (1 + SLACK)
    wrong = ~((squares >= low) & (squares <= high)).fill_null(False)
    _refuse(table, wrong, "w2", "squares_sum", "a sum of squares that fits the weights", task)
    return table


def _check_scores(table: pl.DataFrame, task: Measurement) -> pl.DataFrame:
    """Check the bins, and that the sum of each cell's scores is possible in its bin."""
    place = table["score"]
    wrong = ~((place >= 0) & (place < len(task.scores)) & (place == place.round()))
    expected = f"a position from 0 to {len(task.scores) - 1}"
    _refuse(table, wrong.fill_null(True), "score", "score_column", expected, task)
    bins = table["bin"]
    wrong = ~((bins >= 0) & (bins < task.bins) & (bins == bins.round())).fill_null(True)
    _refuse(table, wrong, "bin", "bin", f"a number from 0 to {task.bins - 1}", task)
    counted = table.filter(pl.all_horizontal(pl.col("y", "d", "bin").is_not_null()))
    weight = counted["n" if task.weight is None else "w"]
    low = weight * counted["bin"] / task.bins
    high = weight * (counted["bin"] + 1) / task.bins
    slack = weight * SLACK
    total = counted["total"]
    wrong = ~((total >= low - slack) & (total <= high + slack)).fill_null(False)
    _refuse(counted, wrong, "total", "score_sum", "a sum of scores that lie in the bin", task)
    return table.with_columns(pl.col("total").fill_null(0.0))


def _check_decisions(table: pl.DataFrame, task: Measurement) -> pl.DataFrame:
    """Check that decisions are positions of classes, and possible for bin and threshold."""
    most = max(1, len(task.scores) - 1)
    decisions = table["d"]
    wrong = ~((decisions >= 0) & (decisions <= most) & (decisions == decisions.round()))
    expected = f"a whole number from 0 to {most}"
    _refuse(table, wrong.fill_null(False), "d", "decision", expected, task)
    table = table.with_columns(pl.col("d").cast(pl.Int64))
    if not has_threshold(task):
        return table
    last = table.filter((pl.col("score") == len(task.scores) - 1) & pl.col("bin").is_not_null())
    low = last["bin"] / task.bins
    high = (last["bin"] + 1) / task.bins
    above = (low >= task.threshold) & (last["d"] == 0)
    is_top = (last["bin"] == task.bins - 1) & (task.threshold <= 1)
    below = (high <= task.threshold) & (last["d"] == 1) & ~is_top
    wrong = (above | below).fill_null(False)
    _refuse(last, wrong, "d", "decision", f"what the threshold {task.threshold:g} decides", task)
    return table


# Files


def read_counts(path: str | Path) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Read a CSV with what the statement returned.

    Parameters
    ----------
    path
        The file. The first line names the columns as the statement does, in any order.

    Returns
    -------
    table, task
        The columns under their short names, and what was counted: arguments of `Measurement`.
    """
    source = str(path)
    file = check_table_file(path)
    if file.suffix.lower() != ".csv":
        raise data_error(source, "must be a CSV: save what the statement returned as one")
    with report_read_errors(file):
        raw = pl.read_csv(
            file,
            separator=detect_separator(file),
            infer_schema=False,
            null_values=MISSING_VALUES,
            n_rows=MAX_CELLS + 1,
        )
    if raw.height > MAX_CELLS:
        raise data_error(source, f"has more than {MAX_CELLS:,} rows: the result was cut")
    if not raw.height:
        raise data_error(source, "the file has no rows")
    names, short = _name_columns(raw.columns, source)
    table = raw.select(pl.col(name).alias(key) for name, key in short.items())
    scored = "bin" in table.columns
    task: dict[str, Any] = {
        "label": names["label"][0],
        "groups": tuple(names["group"]),
        "given": tuple(names["given"]),
        "weight": names["weight"][0] if names["weight"] else None,
        "decision": names["decision"][0] if names["decision"] else None,
        "site_column": names["site"][0] if names["site"] else None,
        "label_name": names["label"][0],
    }
    numbers = [key for key in NUMBERS if key in table.columns]
    if task["decision"] is None:
        numbers.append("d")
    table = table.with_columns(_read_numbers(table, key, short, source) for key in numbers)
    if scored:
        task["bins"] = int(_read_constant(table, "bins", source))
        columns = int(table["score"].max() or 0) + 1  # type: ignore[arg-type]
        task["scores"] = tuple(f"score {i}" for i in range(columns))
    if "threshold" in table.columns:
        task["threshold"] = _read_constant(table, "threshold", source)
    _refuse_repeated(table, source)
    return table.drop("bins", "threshold", strict=False), task


def _name_columns(
    columns: Sequence[str], source: str
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the names of the original columns by role, and the short name of each column."""
    names: dict[str, list[str]] = {role: [] for role in PREFIXES.values()}
    short = {}
    keys = {"score_column": "score", "row_count": "n", "score_sum": "total", "decision": "d"}
    keys |= {"squares_sum": "w2", "largest_weight": "w_max"}
    letters = {"label": "y", "decision": "d", "site": "site", "weight": "w"}
    first = sum(column.startswith("group_") for column in columns)
    for column in columns:
        if column in PLAIN:
            short[column] = keys.get(column, column)
            continue
        prefix = next((each for each in PREFIXES if column.startswith(each)), None)
        if prefix is None:
            raise data_error(
                source,
                f"column '{column}' is none that the statement returns"
                f"{suggest_name(column, [*PLAIN, *PREFIXES])}",
            )
        role = PREFIXES[prefix]
        places = {"group": 0, "given": first}
        is_group = role in places
        short[column] = f"g{places[role] + len(names[role])}" if is_group else letters[role]
        names[role].append(column.removeprefix(prefix))
    needed = {"y": "label_...", "g0": "group_...", "d": "decision", "n": "row_count"}
    needed["problem"] = "problem"
    if "bin" in columns or "score_sum" in columns:
        needed |= {"bin": "bin", "bins": "bins", "total": "score_sum", "score": "score_column"}
    if names["weight"] or "squares_sum" in columns:
        needed |= {"w": "weight_...", "w2": "squares_sum", "w_max": "largest_weight"}
    found = list(short.values())
    missing = [name for key, name in needed.items() if key not in found]
    if missing:
        text = f"no column '{missing[0]}'; save all columns that the statement returns, and their"
        raise data_error(source, f"{text} names")
    repeated = [key for key in found if found.count(key) > 1]
    if repeated:
        raise data_error(
            source, f"has more than one column for '{needed.get(repeated[0], 'site_...')}'"
        )
    return names, short


def _read_numbers(table: pl.DataFrame, key: str, short: dict[str, str], source: str) -> pl.Series:
    """Return a column of numbers; null where it is empty."""
    numbers = table[key].cast(pl.Float64, strict=False)
    text = table[key].filter(numbers.is_null() & table[key].is_not_null())
    if len(text):
        name = next(name for name, value in short.items() if value == key)
        problem = f"column '{name}' must hold numbers, not {format_value(text[0])}"
        raise data_error(source, problem)
    return numbers.fill_nan(None).alias(key)


def _read_constant(table: pl.DataFrame, key: str, source: str) -> float:
    """Return the number that a column holds in all rows."""
    found = table[key].unique().to_list()
    if len(found) > 1 or found[0] is None or not np.isfinite(found[0]):
        text = f"column '{key}' must hold the same number in all rows: do not mix two results"
        raise data_error(source, text)
    return float(found[0])


def _refuse_repeated(table: pl.DataFrame, source: str) -> None:
    """Raise an error if a cell is there twice, or if columns of scores cover different rows."""
    keys = [name for name in table.columns if name not in SUM_NAMES]
    repeated = table.select(keys).is_duplicated()
    if repeated.any():
        first = int(np.flatnonzero(repeated.to_numpy())[0]) + 2
        raise data_error(source, f"line {first} counts the same cell as another line")
    if "score" not in table.columns:
        return
    cells = [name for name in keys if name not in ("score", "bin")]
    counted = table.filter(pl.col("bin").is_not_null(), pl.col("d").is_not_null())
    sizes = counted.group_by([*cells, "score"]).agg(pl.sum("n"))
    per_cell = sizes.group_by(cells).agg(pl.n_unique("n").alias("sizes"), pl.len().alias("columns"))
    complete = (per_cell["sizes"] == 1) & (per_cell["columns"] == table["score"].n_unique())
    if not complete.all():
        raise data_error(source, "the columns of scores cover different rows: lines are missing")


def check_same_names(task: Measurement, groups: Sequence[str], label: str | None) -> None:
    """Raise a `FedgftError` if options name other columns than the counts."""
    if groups and tuple(groups) != task.attributes:
        text = f"`group` {', '.join(groups)}: the counts are by {', '.join(task.attributes)}"
        raise FedgftError(text, kind="conflict")
    if label is not None and label != task.label:
        raise FedgftError(f"`label` {label}: the counts are of '{task.label}'", kind="conflict")
