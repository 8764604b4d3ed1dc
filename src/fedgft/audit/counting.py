"""Rows to sums: one pass over a table, batch after batch, in memory that does not grow with it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedgft.audit.answers import Names, classes_of, groups_of, tables_of
from fedgft.audit.sums import MOST_BINS, Question, Site, Sums
from fedgft.data.columns import column_of, numbers_of
from fedgft.data.table import MISSING, checked_file, readable
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import polars as pl

ROWS = 250_000  # read at a time
MOST = 200  # different values of a group column: beyond it, it is no group
ABSENT = [*MISSING, "", "nan", "NaN", "null", "NULL"]  # in a CSV
OnRows = Callable[[int], None]


@dataclass(frozen=True)
class Columns:
    """Which column plays which part, and how scores become decisions and histograms."""

    label: str
    groups: tuple[str, ...]
    scores: tuple[str, ...] = ()
    decision: str | None = None
    threshold: float = 0.5
    bins: int = 100

    def __post_init__(self) -> None:
        twice = [name for name in self.all if self.all.count(name) > 1]
        if twice:
            raise FedgftError(f"column '{twice[0]}' is given more than one part")
        if not self.groups:
            raise FedgftError("--group needs the name of a column")
        if not self.scores and self.decision is None:
            raise FedgftError("name the model's output: --score P (in [0, 1]) or --decision D")
        if not 0 <= self.threshold <= 1:
            raise FedgftError(f"--threshold {self.threshold:g}: must lie in [0, 1]")
        if not 2 <= self.bins <= MOST_BINS:
            raise FedgftError(f"--bins {self.bins}: must lie between 2 and {MOST_BINS:,}")

    @property
    def all(self) -> list[str]:
        return [self.label, *self.groups, *self.scores, *filter(None, [self.decision])]


@dataclass
class Counted:
    """Small tables of counts, one a score column, and what could not be counted."""

    parts: "list[pl.DataFrame]"
    groups: "list[pl.DataFrame]" = field(default_factory=list)  # all there are, counted or not
    label_missing: int = 0
    prediction_missing: int = 0


def header(path: str | Path) -> list[str]:
    """The columns a file has."""
    file = checked_file(path)
    with readable(file):
        return _scan(file).collect_schema().names()


def batches_of(path: str | Path, columns: Columns) -> "Iterator[pl.DataFrame]":
    """The columns that matter of a CSV or Parquet file, a batch at a time."""
    from polars import selectors

    file = checked_file(path)
    with readable(file):
        scan = _scan(file)
        empty = scan.head(0).collect()
        for name, option in zip(columns.all, _options(columns), strict=True):
            column_of(empty, name, source=str(path), option=option)
        exactly = selectors.by_name(*columns.all)  # not as a pattern
        yield from scan.select(exactly).collect_batches(chunk_size=ROWS)


def _scan(file: Path) -> "pl.LazyFrame":
    """A CSV as text: what its values mean is settled one by one, not by the first hundred."""
    import polars as pl

    if file.suffix.lower() == ".parquet":
        return pl.scan_parquet(file, glob=False)
    return pl.scan_csv(file, glob=False, infer_schema=False, null_values=ABSENT, low_memory=True)


def count(
    batches: "Iterable[pl.DataFrame]", columns: Columns, *, source: str, on_rows: OnRows | None
) -> Counted:
    """Counts by group, label, decision and bin. Batches may come in any order."""
    import polars as pl

    out, done = Counted([]), 0
    for batch in batches:
        frame = _prepared(batch, columns, source=source)
        known = frame.select(f"g{i}" for i in range(len(columns.groups))).unique()
        out.groups = [pl.concat([*out.groups, known]).unique()]
        label_missing = int(frame["y"].null_count())
        frame = frame.filter(pl.col("y").is_not_null())
        known = frame.filter(pl.all_horizontal(pl.col("d", *_named("s", columns)).is_not_null()))
        out.label_missing += label_missing
        out.prediction_missing += frame.height - known.height
        fresh = [_grouped(known, columns, i) for i in range(max(1, len(columns.scores)))]
        out.parts = [
            _summed([old, new], columns)
            for old, new in zip(out.parts or [f.clear() for f in fresh], fresh, strict=True)
        ]
        _check_cardinality(out.parts[0], columns, source=source)
        done += batch.height
        if on_rows:
            on_rows(done)
    if not done:
        raise FedgftError(f"{source}: the file has no rows")
    return out


def sums_of(counted: Counted, columns: Columns, names: Names, *, source: str) -> Sums:
    """The small tables as sums of one site, with the names of groups and classes settled."""
    classes = classes_of(counted.parts[0], columns.scores, columns.decision, names, source=source)
    brought = columns.decision is not None
    threshold = None if brought or len(classes) > 2 else columns.threshold
    try:
        question = Question(
            classes, names.attributes, threshold, bool(columns.scores), columns.bins
        )
    except FedgftError as error:
        raise FedgftError(f"{source}: {error}") from None
    tables, histogram = tables_of(counted.parts, question, names, brought=brought, source=source)
    for group in groups_of(counted.groups[0], names):  # those without a row that counts, too
        if group not in tables:
            tables[group] = question.empty_table()
            histogram |= {group: question.empty_histogram()} if question.scored else {}
    site = Site(tables, float(counted.label_missing), float(counted.prediction_missing))
    return Sums(question, {names.site: site}, histogram)


def _prepared(batch: "pl.DataFrame", columns: Columns, *, source: str) -> "pl.DataFrame":
    """Columns y, g0.., s0.., b0.. (bins) and d: the decision, or the index of the class decided."""
    import polars as pl

    plain = [batch[columns.label].alias("y")]
    plain += [batch[name].alias(f"g{i}") for i, name in enumerate(columns.groups)]
    frame = pl.DataFrame([_without_nan(series) for series in plain])
    for i, name in enumerate(columns.scores):
        score = _scores(batch[name], source=source)
        frame = frame.with_columns(score.alias(f"s{i}"), _bins(score, columns.bins).alias(f"b{i}"))
    if columns.decision is not None:
        return frame.with_columns(_without_nan(batch[columns.decision]).alias("d"))
    if len(columns.scores) > 1:
        _check_total(frame, columns, source=source)
    if len(columns.scores) <= 2:  # of two columns for two classes, the last is the positive one
        score = pl.col(_named("s", columns)[-1])
        return frame.with_columns(d=(score >= columns.threshold).cast(pl.Int64))
    best = pl.concat_list(_named("s", columns)).list.arg_max().cast(pl.Int64)
    return frame.with_columns(d=best)


def _without_nan(series: "pl.Series") -> "pl.Series":
    return series.fill_nan(None) if series.dtype.is_float() else series


def _scores(series: "pl.Series", *, source: str) -> "pl.Series":
    import polars as pl

    plain = series.dtype.is_numeric() or series.dtype in (pl.String, pl.Boolean, pl.Null)
    if not plain:
        raise FedgftError(
            f"{source}: score column '{series.name}' holds {series.dtype}, not numbers"
        )
    numbers = series.cast(pl.Float64, strict=False).fill_nan(None)
    text = numbers.is_null() & series.is_not_null()
    if series.dtype == pl.String and text.any():
        numbers_of(series.filter(text), source=source)  # says which value is no number
    wrong = numbers.filter((numbers < 0) | (numbers > 1))
    if len(wrong):
        raise FedgftError(
            f"{source}: score column '{series.name}' holds {wrong[0]}, which is outside [0, 1]: "
            "scores must be probabilities"
        )
    return numbers


def _bins(score: "pl.Series", bins: int) -> "pl.Series":
    """The i with i/bins <= score < (i+1)/bins, as floats compare; 1 lies in the last bin."""
    import polars as pl

    edges = np.arange(1, bins) / bins  # a product of the score would round across them
    return pl.Series(np.searchsorted(edges, score.to_numpy(), side="right"), dtype=pl.Int64)


def _check_total(frame: "pl.DataFrame", columns: Columns, *, source: str) -> None:
    import polars as pl

    total = frame.select(pl.sum_horizontal(_named("s", columns), ignore_nulls=False)).to_series()
    if ((total - 1).abs() > 0.01).any():
        raise FedgftError(
            f"{source}: the scores of a row must add up to 1 over {', '.join(columns.scores)}; "
            "there are rows where they do not"
        )


def _named(letter: str, columns: Columns) -> list[str]:
    return [f"{letter}{i}" for i in range(len(columns.scores))]


def _keys(columns: Columns) -> list[str]:
    return [*(f"g{i}" for i in range(len(columns.groups))), "y", "d"]


def _grouped(frame: "pl.DataFrame", columns: Columns, score: int) -> "pl.DataFrame":
    import polars as pl

    bin_, total = (
        (pl.col(f"b{score}"), pl.col(f"s{score}")) if columns.scores else (pl.lit(0), pl.lit(0.0))
    )
    keyed = frame.select(*_keys(columns), bin=bin_.cast(pl.Int64), total=total.cast(pl.Float64))
    return keyed.group_by(*_keys(columns), "bin").agg(
        pl.len().cast(pl.Int64).alias("n"), pl.sum("total")
    )


def _summed(parts: "list[pl.DataFrame]", columns: Columns) -> "pl.DataFrame":
    import polars as pl

    return pl.concat(parts).group_by(*_keys(columns), "bin").agg(pl.sum("n"), pl.sum("total"))


def _check_cardinality(frame: "pl.DataFrame", columns: Columns, *, source: str) -> None:
    """Said after the first batch: an identifier is no group, nor a measurement a label."""
    asked = [("y", "label", columns.label)]
    asked += [(f"g{i}", "group", name) for i, name in enumerate(columns.groups)]
    asked += [("d", "decision", columns.decision)] if columns.decision else []
    for key, part, name in asked:
        if frame[key].n_unique() > MOST:
            raise FedgftError(
                f"{source}: {part} column '{name}' has more than {MOST} different values; "
                "name a column with a few, or put ranges of its values together first"
            )


def _options(columns: Columns) -> Sequence[str]:
    return ["--label", *["--group"] * len(columns.groups), *["--score"] * len(columns.scores),
            *["--decision"] * (columns.decision is not None)]  # fmt: skip
