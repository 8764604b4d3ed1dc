"""Sum the errors of a model of numbers at one site: arrays or a table in, sums out.

A table is read once, in batches. `fedgft.site_sums.moments` says how sums are kept so that those of
large values lose no digits, and why a file with few rows per group would reveal values.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from polars.exceptions import PolarsError

from fedgft.auditing.arrays import split_attributes, to_series
from fedgft.auditing.measurement import read_batches
from fedgft.auditing.measurement_task import MAX_SITES, MAX_VALUES, OnRows, TablePath
from fedgft.data.encode import as_text, data_error
from fedgft.data.table_scan import Table, open_table
from fedgft.errors import FedgftError
from fedgft.formatting import format_count, join_names
from fedgft.site_sums.dates import check_date, check_version
from fedgft.site_sums.moments import Moments, read_moments, sum_moments
from fedgft.site_sums.regression_json import MAX_MAGNITUDE, MAX_WEIGHT
from fedgft.site_sums.regression_sums import (
    LEAST_ROWS,
    MIN_ROWS,
    Clip,
    Clipped,
    RegressionSite,
    RegressionSpec,
    RegressionSums,
    unify_spellings,
)
from fedgft.site_sums.spelling import Spellings, name_column
from fedgft.site_sums.tables import Group
from fedgft.validation import (
    check_column_names,
    check_indices,
    check_instance,
    check_integer,
    check_number,
    format_value,
)

DOMINANCE = 0.1  # of the largest value: the p% rule of statistical offices, with p = 10
CHECKED = {"target": "outcome", "prediction": "prediction", "squared_residual": "squared error"}
NO_NOISE = (
    "`epsilon` is not implemented for a numeric outcome: to hide a row, noise would have to be as "
    "large as the largest possible error; withhold small groups with `min_cell`, bound values with "
    "`clip`, or measure ranges of the outcome as classes"
)


class _Column(NamedTuple):
    """A column of the table, and the option that names it."""

    option: str
    name: str


@dataclass(frozen=True)
class _Task:
    """What to sum in a table; see `measure_regression_file` for the parameters."""

    source: str
    target: str
    prediction: str
    groups: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    weight: str | None = None
    site: str = ""
    site_column: str | None = None
    clip: Clip | None = None
    min_cell: int = MIN_ROWS
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignore_case: bool = False
    date: str = ""
    model_version: str = ""
    named: bool = True  # whether the names are those of columns of a file

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", self.attributes or self.groups)
        names = [name for _, name in self.columns()]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise FedgftError(f"column '{repeated[0]}' is named more than once")
        if not self.groups:
            raise FedgftError("`group` needs the name of a column")

    def columns(self) -> list[_Column]:
        """Return every column of the table that is needed."""
        found = [_Column("target_column", self.target), _Column("prediction", self.prediction)]
        found += [_Column("group", name) for name in self.groups]
        more = (("weight", self.weight), ("site", self.site_column))
        return found + [_Column(option, name) for option, name in more if name is not None]

    def spec(self) -> RegressionSpec:
        """Return what the file says was measured."""
        target, prediction = (self.target, self.prediction) if self.named else ("", "")
        more = (self.weight or "", self.clip, self.date, self.model_version)
        return RegressionSpec(self.attributes, target, prediction, *more)


def measure_regression(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    sample_weight: Any = None,
    site: str = "",
    clip: tuple[float, float] | None = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
    min_cell: int = MIN_ROWS,
    ignore_case: bool = False,
    date: Any = None,
    model_version: str = "",
) -> RegressionSums:
    """Return the sums over one site's rows, for a model that predicts numbers.

    Only these sums need to leave the site: by group, those of predictions, outcomes, errors
    (outcome minus prediction), absolute and squared errors, and of their squares. Inputs may be
    lists, NumPy arrays, or pandas or polars objects. Rows are matched by position.

    Parameters
    ----------
    y_true, y_pred
        Outcomes and predictions. A row where one of them is missing (None or NaN) is left out; the
        sums state the number of such rows. Infinite values are an error.
    sensitive_features
        One column, or several columns (a frame, a dictionary, or an array with two axes). None or
        NaN means that a value is not recorded.
    sample_weight
        The weight of each row: positive numbers, or 0 to leave a row out. None: all rows count
        once.
    site
        The name of the site.
    clip
        Bounds, as (low, high): outcomes and predictions outside are replaced by the bound, and the
        sums state how many were. So no single row can dominate a sum. None: values are not bounded.
    values
        All values of an attribute, by the name of the attribute. Other values are an error.
    min_cell
        Groups with fewer rows are withheld, because sums over few rows reveal values. At least 5;
        0 withholds nothing, and such sums cannot be written to a file.
    ignore_case
        Merge names of groups that differ only in case or spaces. By default they are an error.
    date
        The date of the rows, or the last day of their period, such as ``"2026-03-31"``.
    model_version
        The version of the model. Sites with different versions are not audited together.

    Returns
    -------
    RegressionSums
        The sums, which add up over sites with ``+`` or `sum`, and are written by `save`.

    Examples
    --------
    >>> from fedgft.auditing import audit_regression, measure_regression
    >>> pay, predicted = [30.0, 50.0] * 20, [32.0, 47.0] * 20
    >>> sums = measure_regression(pay, predicted, sensitive_features=["f", "m"] * 20, site="north")
    >>> audit_regression(sums).gaps["mean-error"].value
    5.0
    """
    check_instance("site", site, str)
    features = split_attributes(sensitive_features)
    columns = {"y_true": y_true, "y_pred": y_pred}
    if sample_weight is not None:
        columns["sample_weight"] = sample_weight
    columns |= {f"sensitive_features {name}": each for name, each in features.items()}
    check_indices(**columns)
    frame = {name: to_series(name, values) for name, values in columns.items()}
    for name, series in frame.items():
        if len(series) != len(frame["y_true"]):
            raise FedgftError(f"{name} has {len(series)} rows, y_true has {len(frame['y_true'])}")
    task = _Task(
        "measure_regression()",
        "y_true",
        "y_pred",
        tuple(f"sensitive_features {name}" for name in features),
        tuple(features),
        weight=None if sample_weight is None else "sample_weight",
        site=site,
        clip=_check_clip(clip),
        min_cell=_check_min_cell(min_cell),
        values=_check_values(values),
        ignore_case=ignore_case,
        date=check_date(date),
        model_version=check_version(model_version),
        named=False,
    )
    (sums,) = _sum_sites([pl.DataFrame(frame)], task)
    return sums


def measure_regression_file(
    path: TablePath | Table,
    *,
    target: str,
    prediction: str,
    group: str | Sequence[str],
    weight: str | None = None,
    site: str | None = None,
    clip: tuple[float, float] | None = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
    min_cell: int = MIN_ROWS,
    ignore_case: bool = False,
    date: Any = None,
    model_version: str = "",
    on_rows: OnRows | None = None,
) -> RegressionSums:
    """Return the sums over the rows of a CSV or Parquet file, read in batches.

    Parameters
    ----------
    path
        A file, a folder of files, a pattern, a list of files, or an open `Table`, as in
        `measure_file`.
    target, prediction, group, weight
        The names of columns; `measure_regression` says what they hold. `weight` None: all rows
        count once.
    site
        The name of the site; by default, the name of the file without its extension.
    on_rows
        Called after each batch with the number of rows read. None: nothing is called.
    clip, values, min_cell, ignore_case, date, model_version
        As in `measure_regression`.

    Returns
    -------
    RegressionSums
        The sums of the site.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from fedgft.auditing import measure_regression_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "north.csv")
    ...     _ = path.write_text("pay,sex,p\\n" + "30,f,32\\n50,m,47\\n" * 20)
    ...     measure_regression_file(path, target="pay", prediction="p", group="sex")
    RegressionSums(40 rows of 1 site: north; 2 groups by sex: f, m)
    """
    if site is not None:
        check_instance("site", site, str)
    table = path if isinstance(path, Table) else open_table(path)
    name = table.files.name if site is None else site
    if name is None:
        text = "`site` is missing: these files are one table of one site; name the site"
        raise FedgftError(text, kind="missing")
    (sums,) = _measure_table(
        table,
        on_rows,
        target=target,
        prediction=prediction,
        group=group,
        weight=weight,
        site=name,
        clip=clip,
        values=values,
        min_cell=min_cell,
        ignore_case=ignore_case,
        date=date,
        model_version=model_version,
    )
    return sums


def measure_regression_sites(
    path: TablePath | Table,
    *,
    site_column: str,
    target: str,
    prediction: str,
    group: str | Sequence[str],
    weight: str | None = None,
    clip: tuple[float, float] | None = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
    min_cell: int = MIN_ROWS,
    ignore_case: bool = False,
    date: Any = None,
    model_version: str = "",
    on_rows: OnRows | None = None,
) -> list[RegressionSums]:
    """Return the sums of each site in a table that holds the rows of several sites, by name.

    Parameters
    ----------
    path
        As in `measure_regression_file`.
    site_column
        The column with the name of each row's site. A row without one is an error.
    target, prediction, group, weight, clip, values, min_cell, ignore_case, date, model_version
        As in `measure_regression_file`.
    on_rows
        As in `measure_regression_file`.
    """
    check_instance("site_column", site_column, str, "it is the name of a column")
    return _measure_table(
        path if isinstance(path, Table) else open_table(path),
        on_rows,
        site_column=site_column,
        target=target,
        prediction=prediction,
        group=group,
        weight=weight,
        clip=clip,
        values=values,
        min_cell=min_cell,
        ignore_case=ignore_case,
        date=date,
        model_version=model_version,
    )


def _measure_table(
    table: Table, on_rows: OnRows | None, *, group: str | Sequence[str], **given: Any
) -> list[RegressionSums]:
    """Return the sums of each site in a file: see `measure_regression_sites`."""
    for name in ("target", "prediction", "weight"):
        if name != "weight" or given[name] is not None:
            check_instance(name, given[name], str, "it is the name of a column")
    given |= {
        "clip": _check_clip(given["clip"]),
        "min_cell": _check_min_cell(given["min_cell"]),
        "values": _check_values(given["values"]),
        "date": check_date(given["date"]),
        "model_version": check_version(given["model_version"]),
    }
    task = _Task(table.files.source, groups=check_column_names("group", group), **given)
    return _sum_sites(read_batches(table, task), task, on_rows)


def _check_clip(clip: Any) -> Clip | None:
    """Return the bounds as numbers, or raise a `FedgftError`."""
    if clip is None:
        return None
    if isinstance(clip, str) or not isinstance(clip, Sequence | np.ndarray) or len(clip) != 2:
        raise FedgftError(f"`clip` must be two numbers, (low, high), not {format_value(clip)}")
    low, high = (check_number("clip", bound) for bound in clip)
    if not -MAX_MAGNITUDE <= low < high <= MAX_MAGNITUDE:
        raise FedgftError(f"`clip` {low:g} {high:g}: the first number must be the smaller one")
    return low, high


def _check_min_cell(min_cell: Any) -> int:
    """Return the smallest number of rows of a group, or raise a `FedgftError`."""
    number = check_integer("min_cell", min_cell, least=0)
    if 0 < number < LEAST_ROWS:
        reason = "the values of fewer rows follow from their sums"
        raise FedgftError(f"`min_cell` {number}: must be at least {LEAST_ROWS}; {reason}")
    return number


def _check_values(values: Any) -> Mapping[str, tuple[str, ...]]:
    """Return the declared values of attributes, or raise a `FedgftError`."""
    if values is not None and not isinstance(values, Mapping):
        raise FedgftError(f"values must be like {{'sex': ('f', 'm')}}, not {format_value(values)}")
    return values or {}


# Sums


@dataclass
class _Tally:
    """What is known about one site so far.

    `largest` holds, by group and quantity, the sum of the sizes of all values and the two largest,
    which stay at the site: they tell whether one row dominates a sum.
    """

    cells: dict[Group, Moments] = field(default_factory=dict)
    target_missing: int = 0
    prediction_missing: int = 0
    clipped: Clipped = field(default_factory=Clipped)
    weightless: int = 0  # rows of weight 0, which are left out
    largest: dict[tuple[Group, str], tuple[float, list[float]]] = field(default_factory=dict)

    def add_largest(self, group: Group, name: str, total: float, top: list[float]) -> None:
        """Add the sum of the sizes of a quantity, and its two largest sizes, in one batch."""
        known, highest = self.largest.get((group, name), (0.0, []))
        self.largest[group, name] = (known + total, sorted([*highest, *top])[-2:])


def _sum_sites(
    batches: Iterable[pl.DataFrame], task: _Task, on_rows: OnRows | None = None
) -> list[RegressionSums]:
    """Sum all batches, in any order, and return the protected sums of each site, by name."""
    tallies: dict[str, _Tally] = {}
    done = 0
    try:
        for batch in batches:
            frame = _select_columns(batch, task, done)
            for site, rows in _split_sites(frame, task):
                _add_batch(tallies.setdefault(site, _Tally()), rows, task)
                _check_cardinality(tallies[site], task)
            if len(tallies) > MAX_SITES:
                problem = f"site column '{task.site_column}' has more than {MAX_SITES} values"
                raise data_error(task.source, f"{problem}; name the column with the sites")
            done += batch.height
            if on_rows:
                on_rows(done)
    except PolarsError as error:
        reason = (str(error).strip().splitlines() or ["unreadable"])[0][:160]
        raise data_error(task.source, f"cannot be summed: {reason}") from None
    if not done:
        raise data_error(task.source, "the file has no rows")
    if not any(tally.cells for tally in tallies.values()):
        raise data_error(task.source, "no row has both an outcome and a prediction")
    return _build_all(tallies, task)


def _select_columns(batch: pl.DataFrame, task: _Task, before: int) -> pl.DataFrame:
    """Return a table with the columns y, p, w, g0, g1, ... and perhaps site.

    Parameters
    ----------
    batch
        The rows as they are in the file.
    task
        What to sum.
    before
        The number of rows of the file before this batch, for messages.
    """
    columns = {
        "y": _read_numbers(batch[task.target], task, before),
        "p": _read_numbers(batch[task.prediction], task, before),
    }
    for i, name in enumerate(task.groups):
        columns[f"g{i}"] = as_text(_replace_nan(batch[name]))
    if task.weight is not None:
        columns["w"] = _read_weights(batch[task.weight], task, before)
    if task.site_column is not None:
        names = as_text(batch[task.site_column])
        if names.null_count():
            rows = format_count(names.null_count(), "row")
            problem = f"site column '{task.site_column}' is empty in {rows}"
            raise data_error(task.source, problem)
        columns["site"] = names
    frame = pl.DataFrame(columns)
    return frame.with_columns(w=pl.lit(1.0)) if task.weight is None else frame


def _replace_nan(series: pl.Series) -> pl.Series:
    """Replace NaN by null, which means missing."""
    return series.fill_nan(None) if series.dtype.is_float() else series


def _read_numbers(series: pl.Series, task: _Task, before: int) -> pl.Series:
    """Return a column as numbers, with null where one is missing."""
    if not (series.dtype.is_numeric() or series.dtype in (pl.String, pl.Boolean, pl.Null)):
        problem = f"column '{series.name}' holds {series.dtype}, not numbers"
        raise data_error(task.source, problem)
    numbers = series.cast(pl.Float64, strict=False)
    text = numbers.is_null() & series.is_not_null()
    if text.any():
        _refuse(series, text, task, before, "not a number; leave a missing value empty")
    numbers = numbers.fill_nan(None)
    infinite = (numbers.abs() > MAX_MAGNITUDE).fill_null(False)
    if infinite.any():
        kind = (
            "infinite" if np.isinf(numbers.filter(infinite)[0]) else "too large; use larger units"
        )
        _refuse(series, infinite, task, before, kind)
    return numbers


def _read_weights(series: pl.Series, task: _Task, before: int) -> pl.Series:
    """Return a column of weights, which may not be missing."""
    numbers = _read_numbers(series, task, before)
    wrong = numbers.is_null() | (numbers < 0) | (numbers > MAX_WEIGHT)
    if wrong.any():
        problem = f"no weight: `weight` must be a number from 0 to {MAX_WEIGHT:g} in every row"
        _refuse(series, wrong, task, before, problem)
    return numbers


def _refuse(series: pl.Series, wrong: pl.Series, task: _Task, before: int, problem: str) -> None:
    """Raise a `FedgftError` about the first wrong value of a column, which it names by its row."""
    first = int(wrong.arg_true()[0])
    text = "nothing" if series[first] is None else f"'{str(series[first])[:40]}'"
    where = f"row {before + first + 1:,} of column '{series.name}' holds {text}"
    raise data_error(task.source, f"{where}, which is {problem}")


def _split_sites(frame: pl.DataFrame, task: _Task) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the rows of each site in a batch, and the site's name."""
    if task.site_column is None:
        yield task.site, frame
        return
    for (name,), rows in frame.partition_by("site", as_dict=True).items():
        yield str(name), rows


def _add_batch(tally: _Tally, frame: pl.DataFrame, task: _Task) -> None:
    """Add the rows of a batch to the sums of a site."""
    weighted = frame.filter(pl.col("w") > 0)
    tally.weightless += frame.height - weighted.height
    frame = weighted
    known = frame.filter(pl.col("y").is_not_null())
    counted = known.filter(pl.col("p").is_not_null())
    tally.target_missing += frame.height - known.height
    tally.prediction_missing += known.height - counted.height
    if task.clip is not None:
        low, high = task.clip
        outside = counted.select(~pl.col("y", "p").is_between(low, high)).sum().row(0)
        tally.clipped = Clipped(*(a + b for a, b in zip(tally.clipped, outside, strict=True)))
        counted = counted.with_columns(pl.col("y", "p").clip(low, high))
    residual = pl.col("y") - pl.col("p")
    keys = [f"g{i}" for i in range(len(task.groups))]
    table = counted.select(
        *keys,
        "w",
        prediction="p",
        target="y",
        residual=residual,
        absolute_residual=residual.abs(),
        squared_residual=residual * residual,
    )
    for record in sum_moments(table, keys).iter_rows(named=True):
        group = tuple(record[key] for key in keys)
        found = read_moments(record, weighted=task.weight is not None)
        tally.cells[group] = tally.cells[group] + found if group in tally.cells else found
    sizes = [(pl.col("w") * pl.col(name).abs()).alias(name) for name in CHECKED]
    for name in CHECKED:
        size = sizes[list(CHECKED).index(name)]
        parts = table.group_by(keys).agg(size.sum().alias("total"), size.top_k(2).alias("top"))
        for record in parts.iter_rows(named=True):
            group = tuple(record[key] for key in keys)
            tally.add_largest(group, name, record["total"], record["top"])


def _check_cardinality(tally: _Tally, task: _Task) -> None:
    """Raise an error if a group column has too many different values; it checks each batch."""
    for i, name in enumerate(task.groups):
        if len({group[i] for group in tally.cells}) > MAX_VALUES:
            problem = f"group column '{name}' has more than {MAX_VALUES} different values"
            advice = "name a column with a few, or put ranges of its values together first"
            raise data_error(task.source, f"{problem}; {advice}")


def _build_all(tallies: Mapping[str, _Tally], task: _Task) -> list[RegressionSums]:
    """Return the sums of all sites, with the same names of groups, small groups withheld."""
    spellings = Spellings(ignore_case=task.ignore_case)
    for attribute in task.attributes:
        declared = task.values.get(attribute, ())
        spellings.unify_names(name_column(attribute), declared, "declared")
    sites: dict[str, RegressionSite] = {}
    notes: list[str] = []
    for name in sorted(tallies, key=lambda each: (-_rows(tallies[each]), each)):
        tally = tallies[name]
        (kept,) = spellings.unify_names("site", [name], format_count(_rows(tally), "row"))
        cells = dict(sorted(tally.cells.items(), key=lambda item: -item[1].rows))
        made = RegressionSite(
            cells,
            target_missing=tally.target_missing,
            prediction_missing=tally.prediction_missing,
            clipped=tally.clipped,
        )
        sums = RegressionSums(task.spec(), {kept: made})
        (made,) = _unify(sums, spellings, task).sites.values()
        sites[kept] = sites[kept] + made if kept in sites else made
        notes += _describe_dominance(tally, task, name)
    weightless = sum(tally.weightless for tally in tallies.values())
    if weightless:
        notes.append(f"rows of weight 0, left out: {weightless:,}")
    notes = [*spellings.notes, *notes]
    out = []
    for name in sorted(sites):
        site = sites[name].withhold(task.min_cell) if task.min_cell else sites[name]
        _check_declared(site, task)
        out.append(RegressionSums(task.spec(), {name: site}, notes=tuple(notes)))
    return out


def _rows(tally: _Tally) -> int:
    return sum(cell.rows for cell in tally.cells.values())


def _unify(sums: RegressionSums, spellings: Spellings, task: _Task) -> RegressionSums:
    """Return the sums of a site with one spelling per group; errors name the table."""
    try:
        return unify_spellings(sums, spellings, "the rows")
    except FedgftError as error:
        text = f"{task.source}: {error.message}"
        raise FedgftError(text, field=error.field, kind=error.kind) from None


def _check_declared(site: RegressionSite, task: _Task) -> None:
    """Raise a `FedgftError` if a value of a group is not among those that the user declared."""
    for group in (*site.cells, *site.withheld):
        for attribute, value in zip(task.attributes, group, strict=True):
            declared = task.values.get(attribute)
            if declared and value is not None and value not in declared:
                problem = f"group column '{attribute}' holds '{value}', which `group` does not list"
                raise data_error(task.source, f"{problem} ({', '.join(declared)})")


def _describe_dominance(tally: _Tally, task: _Task, site: str) -> list[str]:
    """Return a note about the groups in which one row makes up almost all of a sum.

    The p% rule: a sum is sensitive if all values but the two largest add up to less than p% of the
    largest, because the second largest contributor could then compute the largest value up to p%.
    """
    found: dict[str, None] = {}
    for (group, name), (total, top) in tally.largest.items():
        rows = tally.cells[group].rows
        rest = total - sum(top)
        if rows >= max(task.min_cell, 3) and top[-1] > 0 and rest < DOMINANCE * top[-1]:
            words = " & ".join(value or "not recorded" for value in group)
            found[f"the {CHECKED[name]} of group '{words}'"] = None
    if not found:
        return []
    where = f"site '{site}': " if task.site_column is not None else ""
    advice = "bound values with `clip`, or withhold such groups with a larger `min_cell`"
    return [f"{where}one row makes up almost all of {join_names(list(found))}; {advice}"]
