"""Count the rows of a table by group, label, decision and bin of the score.

Columns are read and checked here: scores, weights, and probabilities of groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from polars import selectors

from fedgft.auditing.measurement_task import MAX_VALUES, PROBABILITY_SLACK, SUM_COLUMNS, Measurement
from fedgft.data.encode import as_text, data_error, parse_numbers
from fedgft.formatting import format_count
from fedgft.site_sums.regression_json import MAX_WEIGHT
from fedgft.validation import NO_NUMBERS_AS_LABELS


@dataclass
class RowCounts:
    """Tables of counts, and the numbers of rows that could not be counted.

    `cells` has the columns g0, g1, ..., score (the position of the score column), y, d, bin, n (the
    number of rows) and total (the sum of their scores). If the rows have weights, it also has w and
    w2 (the sums of the weights and of their squares), and `total` is weighted. `groups` holds all
    groups, including those that occur only in rows that could not be counted.

    `weightless` is the number of rows of weight 0, which are left out, and `max_weight` the largest
    weight of a row.
    """

    cells: pl.DataFrame
    groups: pl.DataFrame
    label_missing: int
    prediction_missing: int
    weightless: int = 0
    max_weight: float = 0.0

    def rows(self) -> int:
        """Return the number of rows, counted or not."""
        counted = self.cells.filter(pl.col("score") == 0)["n"].sum()
        return int(counted) + self.label_missing + self.prediction_missing

    def __add__(self, other: "RowCounts") -> "RowCounts":
        cells = pl.concat([self.cells, other.cells])
        return RowCounts(
            add_cells(cells),
            pl.concat([self.groups, other.groups]).unique(),
            self.label_missing + other.label_missing,
            self.prediction_missing + other.prediction_missing,
            self.weightless + other.weightless,
            max(self.max_weight, other.max_weight),
        )


def add_cells(cells: pl.DataFrame) -> pl.DataFrame:
    """Return the table of counts with one row per cell: sums of the rows of the same cell."""
    return cells.group_by(selectors.exclude(SUM_COLUMNS)).agg(
        selectors.by_name(SUM_COLUMNS, require_all=False).sum()
    )


def divide_cells(cells: pl.DataFrame, task: Measurement) -> RowCounts:
    """Divide counted cells into those with a label and a prediction, and the others."""
    weightless = cells.clear()
    if task.weight is not None:
        weightless = cells.filter(pl.col("w") == 0)
        cells = cells.filter(pl.col("w") > 0)
    labeled = cells.filter(pl.col("y").is_not_null())
    counted = labeled.filter(pl.all_horizontal(pl.col("d", "bin").is_not_null()))
    left_out, rows, with_label, with_both = (
        int(part.filter(pl.col("score") == 0)["n"].sum())
        for part in (weightless, cells, labeled, counted)
    )
    heaviest = counted["w_max"].to_list() if task.weight is not None else []
    return RowCounts(
        counted.drop("w_max", strict=False),
        cells.select(task.group_keys()).unique(),
        rows - with_label,
        with_label - with_both,
        left_out,
        max(heaviest, default=0.0),
    )


def split_sites(batch: pl.DataFrame, task: Measurement) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the rows of each site in a batch, and the site's name."""
    if task.site_column is None:
        yield task.site, batch
        return
    names = as_text(batch[task.site_column])
    if names.null_count():
        rows = format_count(names.null_count(), "row")
        problem = f"site column '{task.site_column}' is empty in {rows}"
        raise data_error(task.source, problem)
    key = "\0site"  # no column of a file has this name
    parts = batch.with_columns(names.alias(key)).partition_by(key, as_dict=True)
    for (name,), rows in parts.items():
        yield str(name), rows


def count_rows(batch: pl.DataFrame, task: Measurement) -> RowCounts:
    """Count the rows of one batch by group, score column, label, decision and bin."""
    frame = _select_columns(batch, task)
    groups = task.group_keys()
    scores = task.keys("score")
    weightless = 0
    if task.weight is not None:
        rows = frame.height
        frame = frame.filter(pl.col("w") > 0)
        weightless = rows - frame.height
    labeled = frame.drop_nulls("y")
    counted = labeled.drop_nulls(["d", *scores])
    expanded = _expand_probabilities(counted, task)
    parts = []
    for s in range(max(1, len(scores))):
        bin_ = pl.col(f"b{s}") if scores else pl.lit(0, pl.Int64)
        total = pl.col(f"s{s}") if scores else pl.lit(0.0)
        keys = [*groups, pl.lit(s).alias("score"), "y", "d", bin_.alias("bin")]
        sums = [pl.len().cast(pl.Int64).alias("n")]
        if task.is_weighted:
            weight = pl.col("w")
            sums += [weight.sum(), (weight**2).sum().alias("w2")]
            total = total * weight
        sums.append(total.sum().alias("total"))
        parts.append(expanded.group_by(keys).agg(sums))
    known = [parts[0].select(groups)]
    if counted.height < frame.height and not task.probabilities:
        known.append(frame.select(groups))
    heaviest: Any = expanded["w"].max() if task.is_weighted else None
    return RowCounts(
        pl.concat(parts),
        pl.concat(known).unique(),
        frame.height - labeled.height,
        labeled.height - counted.height,
        weightless,
        0.0 if heaviest is None else float(heaviest),
    )


def _expand_probabilities(frame: pl.DataFrame, task: Measurement) -> pl.DataFrame:
    """Return one row per row and group, whose weight is the probability of the group.

    A row whose probabilities are missing has its group not recorded. Probabilities of 0 are left
    out.
    """
    if not task.probabilities:
        return frame
    weight = pl.col("w") if task.weight is not None else pl.lit(1.0)
    keys = task.keys("group_probabilities")
    parts = [
        frame.with_columns(g0=pl.lit(name), w=weight * pl.col(key)).filter(pl.col("w") > 0)
        for name, key in zip(task.probabilities, keys, strict=True)
    ]
    unknown = frame.filter(pl.col(keys[0]).is_null())
    parts.append(unknown.with_columns(g0=pl.lit(None, pl.String), w=weight))
    return pl.concat(parts)


def _select_columns(batch: pl.DataFrame, task: Measurement) -> pl.DataFrame:
    """Return a table with the columns y, g0, g1, ..., s0, ... (scores), b0, ... (bins) and d.

    The column d holds the decisions of the batch if it has any. Otherwise it holds the index of the
    class that the scores decide for.
    """
    numbers = ("score", "site", "weight", "group_probabilities")
    columns = [column for column in task.columns() if column.option not in numbers]
    values = {column.key: _replace_nan(batch[column.name]) for column in columns}
    frame = pl.DataFrame(values)
    for i, name in enumerate(task.scores):
        score = _read_scores(batch[name], source=task.source)
        frame = frame.with_columns(score.alias(f"s{i}"), find_bins(score, task.bins).alias(f"b{i}"))
    if task.weight is not None:
        frame = frame.with_columns(_read_weights(batch[task.weight], source=task.source).alias("w"))
    if task.probabilities:
        frame = frame.with_columns(_read_probabilities(batch, task))
    if task.decision is not None:
        return frame
    names = task.keys("score")
    if len(names) > 1:
        total = frame.select(pl.sum_horizontal(names, ignore_nulls=False)).to_series()
        if ((total - 1).abs() > 0.01).any():
            problem = f"the scores of a row must add up to 1 over {', '.join(task.scores)}"
            raise data_error(task.source, f"{problem}; there are rows where they do not")
    if len(names) <= 2:  # if there are two columns, the last is that of the positive class
        return frame.with_columns(d=(pl.col(names[-1]) >= task.threshold).cast(pl.Int64))
    return frame.with_columns(d=pl.concat_list(names).list.arg_max().cast(pl.Int64))


def find_bins(scores: pl.Series, bins: int) -> pl.Series:
    """Return the bin of each score; the bin i has i/bins <= score < (i+1)/bins."""
    values = scores.fill_null(0.0).to_numpy()
    edges = np.arange(bins + 1) / bins
    edges[-1] = np.inf  # a score of 1 is in the last bin
    found = np.minimum((values * bins).astype(np.int64), bins - 1)
    found -= values < edges[found]  # rounding in the product may cross an edge
    found += values >= edges[found + 1]
    return pl.Series(found)


def _replace_nan(series: pl.Series) -> pl.Series:
    """Replace NaN by null, which means missing."""
    return series.fill_nan(None) if series.dtype.is_float() else series


def _read_numbers(series: pl.Series, what: str, *, source: str) -> pl.Series:
    """Return a column as numbers, with null where a value is missing."""
    if not (series.dtype.is_numeric() or series.dtype in (pl.String, pl.Boolean, pl.Null)):
        raise data_error(source, f"{what} column '{series.name}' holds {series.dtype}, not numbers")
    numbers = series.cast(pl.Float64, strict=False).fill_nan(None)
    text = numbers.is_null() & series.is_not_null()
    if series.dtype == pl.String and text.any():
        parse_numbers(series.filter(text), source=source)  # raises unless all of them are NaN
    return numbers


def _read_weights(series: pl.Series, *, source: str) -> pl.Series:
    """Return a column of weights as numbers, which are 0 or positive, and finite."""
    weights = _read_numbers(series, "weight", source=source)
    holds = f"weight column '{series.name}'"
    if weights.null_count():
        rows = format_count(weights.null_count(), "row")
        text = f"{holds} is empty in {rows}: give every row a weight, 0 for those to leave out"
        raise data_error(source, text)
    wrong = weights.filter((weights < 0) | (weights > MAX_WEIGHT))
    if len(wrong):
        text = f"weights must be finite, 0 or more, and at most {MAX_WEIGHT:g}"
        raise data_error(source, f"{holds} holds {wrong[0]}: {text}")
    return weights


def _read_probabilities(batch: pl.DataFrame, task: Measurement) -> list[pl.Series]:
    """Return the columns with the probabilities of groups, which add up to 1 in every row."""
    found = []
    for key, option, name in task.columns():
        if option == "group_probabilities":
            numbers = _read_numbers(batch[name], "group probability", source=task.source)
            wrong = numbers.filter((numbers < 0) | (numbers > 1))
            if len(wrong):
                problem = f"group probability column '{name}' holds {wrong[0]}, outside [0, 1]"
                raise data_error(task.source, problem)
            found.append(numbers.alias(key))
    frame = pl.DataFrame(found)
    listed = ", ".join(task.probabilities.values())
    partial = frame.filter(
        pl.any_horizontal(pl.all().is_null()) & ~pl.all_horizontal(pl.all().is_null())
    )
    if partial.height:
        rows = format_count(partial.height, "row")
        text = f"only some of the probabilities {listed} are recorded in {rows}; give all or none"
        raise data_error(task.source, text)
    total = frame.select(pl.sum_horizontal(pl.all(), ignore_nulls=False)).to_series().drop_nulls()
    off = total.filter((total - 1).abs() > PROBABILITY_SLACK)
    if len(off):
        text = f"the probabilities {listed} add up to {off[0]:.4g} in a row, not to 1"
        raise data_error(task.source, text)
    return found


def _read_scores(series: pl.Series, *, source: str) -> pl.Series:
    """A column of scores as numbers in [0, 1], with null where a score is missing."""
    numbers = _read_numbers(series, "score", source=source)
    wrong = numbers.filter((numbers < 0) | (numbers > 1))
    if len(wrong):
        holds = f"score column '{series.name}' holds {wrong[0]}"
        problem = f"{holds}, which is outside [0, 1]: scores must be probabilities"
        raise data_error(source, problem)
    return numbers


def check_cardinality(cells: pl.DataFrame, task: Measurement) -> None:
    """Raise an error if a label, group or decision column has too many different values.

    Such a column is probably an identifier or a measurement. The check runs after every batch, so a
    large file fails early.
    """
    for key, option, name in task.columns():
        if (
            key in cells.columns
            and option not in ("score", "weight")
            and cells[key].n_unique() > MAX_VALUES
        ):
            advice = f"; {NO_NUMBERS_AS_LABELS}" if option == "label" else ""
            raise data_error(
                task.source,
                f"{option} column '{name}' has more than {MAX_VALUES} different values; name a "
                f"column with a few, or put ranges of its values together first{advice}",
            )
