"""Count the rows of one site: arrays or a table in, sums out.

A table is read once, in batches, so the memory needed does not grow with the table. The rows of
each batch are counted by group, label, decision and bin of the score. The tables of counts, which
are small, are added up. The names of classes and groups are then read from the total.
"""

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from polars.exceptions import PolarsError

from fedgft.auditing.arrays import (
    are_scores,
    build_table,
    holds_text,
    split_attributes,
    split_columns,
    split_scores,
    to_text,
)
from fedgft.auditing.measurement_task import (
    DEFAULT_BINS,
    DEFAULT_NOISY_BINS,
    MAX_SITES,
    Measurement,
    NamesColumns,
    OnRows,
    TablePath,
)
from fedgft.auditing.row_counts import (
    RowCounts,
    check_cardinality,
    count_rows,
    divide_cells,
    split_sites,
)
from fedgft.auditing.sums_from_counts import build_protected
from fedgft.data.encode import data_error
from fedgft.data.table_parts import Part
from fedgft.data.table_scan import BATCH_ROWS, Table, open_table, read_schema
from fedgft.errors import FedgftError
from fedgft.privacy.suppression import Protection
from fedgft.site_sums import SiteSums
from fedgft.site_sums.dates import check_date
from fedgft.validation import (
    check_column_names,
    check_indices,
    check_instance,
    check_integer,
    format_value,
)


def measure(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any = None,
    scores: Any = None,
    sample_weight: Any = None,
    control_features: Any = None,
    randomized_groups: float | None = None,
    group_probabilities: Mapping[str, Mapping[str, Any]] | None = None,
    site: str = "",
    threshold: float = 0.5,
    bins: int | None = None,
    classes: Iterable[Any] = (),
    positive: Any = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
    min_cell: int = 0,
    epsilon: float | None = None,
    delta: float = 0.0,
    ignore_case: bool = False,
    date: str | datetime.date = "",
    model_version: str = "",
) -> SiteSums:
    """Return the sums over one site's rows.

    Only these sums need to leave the site. Inputs may be lists, NumPy arrays, or pandas or polars
    objects. Rows are matched by position;
    pandas indices that contradict the positions are an error.

    Parameters
    ----------
    y_true
        Labels. A row without a label is left out; the sums state the number of such rows.
    y_pred
        Decisions, or scores: P(positive) for two classes, or one column per class. A row whose
        prediction is missing (None) is left out; the sums state the number of such rows. A score of
        NaN or infinity is an error.
    sensitive_features
        One column, or several columns (a frame, a dictionary, or an array with two axes). None or
        NaN means that a value is not recorded. Required, unless there are `group_probabilities`.
    scores
        Scores, if `y_pred` holds decisions and there are scores too. None: there are none.
    sample_weight
        The weight of each row: 0 or more. Rows of weight 0 are left out. None: every row counts
        once.
    control_features
        One or two columns, given like `sensitive_features`, whose values divide the rows into
        strata. The audit then compares groups within strata too. None: there are no strata.
    randomized_groups
        The epsilon of k-ary randomized response, if the values of the sensitive features were
        randomized before they were stored; `values` must list all values. The audit corrects its
        estimates for it. None: the values are the true ones.
    group_probabilities
        The probability that a row belongs to each group, if the group itself is not known, such as
        ``{"sex": {"woman": p_woman, "man": p_man}}``. They take the place of `sensitive_features`.
        None: the groups are known.
    site
        The name of the site.
    threshold
        The smallest score with a positive decision, for two classes without decisions.
    bins
        The number of bins of the score histograms; by default 100, or 20 with noise.
    classes
        All classes, in order; if there are two, the second is the positive class.
    positive
        The positive class, if there are two classes. None: the alphabetically last, or
        the larger number.
    values
        All values of an attribute, by the name of the attribute. Other values are an error. None:
        the values that occur.
    min_cell
        Withhold counts of 1 to `min_cell` - 1 rows.
    epsilon, delta
        Add noise that gives (epsilon, delta) differential privacy. None: no noise.
    ignore_case
        Merge names of groups and classes that differ only in case or spaces, such as "Man" and
        "man", under the most frequent spelling. By default they are an error.
    date
        The date of the rows, or the last day of their period, such as "2026-03-31". "": not
        stated. `fedgft.auditing.monitor` needs it.
    model_version
        The version of the model, such as "2.1"; sites with different versions are not audited
        together. "": not stated.

    Returns
    -------
    SiteSums
        The sums, which add up over sites with ``+`` or `sum`, and are written by `save`.

    Examples
    --------
    >>> import fedgft
    >>> y = [1, 0, 1, 0]
    >>> a = fedgft.measure(y, [1, 1, 1, 0], sensitive_features=list("ffmm"), site="north")
    >>> b = fedgft.measure([1, 1], [0, 1], sensitive_features=["f", "m"], site="south")
    >>> sum([a, b]).rows()
    6.0
    """
    check_instance("site", site, str)
    protection = Protection(min_cell, epsilon, delta)
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise FedgftError(f"classes must be a list of labels, not {format_value(classes)}")
    if positive is not None and not isinstance(positive, str | bool | int | np.generic):
        raise FedgftError(f"positive must be a label, not {format_value(positive)}")
    if values is not None and not isinstance(values, Mapping):
        raise FedgftError(f"values must be like {{'sex': ('f', 'm')}}, not {format_value(values)}")
    attribute, probabilities = _split_probabilities(group_probabilities)
    if sensitive_features is None and not probabilities:
        raise FedgftError("`sensitive_features` is missing: the group of each row", kind="missing")
    features = {} if sensitive_features is None else split_attributes(sensitive_features)
    strata = {} if control_features is None else split_columns(control_features, "stratum")
    check_indices(
        y_true=y_true,
        y_pred=y_pred,
        scores=scores,
        sensitive_features=sensitive_features,
        sample_weight=sample_weight,
        control_features=control_features,
        **{f"sensitive_features {name}": v for name, v in features.items()},
    )
    if scores is None and are_scores(y_pred):
        scores = y_pred
        y_pred = None
    score_columns = split_scores(scores)
    task = Measurement(
        "measure()",
        "y_true",
        tuple(f"sensitive_features {name}" for name in features),
        tuple(score_columns),
        decision=None if y_pred is None else "y_pred",
        threshold=threshold,
        bins=choose_bins(bins, epsilon),
        attributes=(attribute,) if probabilities else tuple(features),
        site=site,
        classes=tuple(map(to_text, classes)),
        positive=to_text(positive),
        values=values or {},
        text_labels=holds_text(y_true),
        ignore_case=ignore_case,
        given=tuple(f"control_features {name}" for name in strata),
        given_names=tuple(strata),
        weight=None if sample_weight is None else "sample_weight",
        randomized_groups=randomized_groups,
        probabilities={name: f"group_probabilities {name}" for name in probabilities},
        date=check_date(date),
        model_version=model_version,
    )
    weights = {} if sample_weight is None else {"": sample_weight}
    table = build_table(
        y_true,
        y_pred,
        features,
        score_columns,
        control_features=strata,
        sample_weight=weights,
        group_probabilities=probabilities,
    )
    (site_sums,) = _count_sites([table], task, protection)
    return site_sums


def _split_probabilities(
    given: Mapping[str, Mapping[str, Any]] | None,
) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the attribute and the probabilities (or their columns) by group."""
    if given is None:
        return "", {}
    form = "must be like {'sex': {'woman': ..., 'man': ...}}, with one attribute"
    if not isinstance(given, Mapping) or len(given) != 1:
        raise FedgftError(f"`group_probabilities` {form}")
    ((attribute, by_group),) = given.items()
    if not isinstance(by_group, Mapping) or not by_group:
        raise FedgftError(f"`group_probabilities` {form}")
    return str(attribute), {str(name): values for name, values in by_group.items()}


def measure_file(
    path: TablePath | Table,
    *,
    label: str,
    group: str | Sequence[str] = (),
    score: str | Sequence[str] = (),
    decision: str | None = None,
    weight: str | None = None,
    given: str | Sequence[str] = (),
    randomized_groups: float | None = None,
    group_probabilities: Mapping[str, Mapping[str, str]] | None = None,
    site: str | None = None,
    threshold: float = 0.5,
    bins: int | None = None,
    classes: Sequence[str] = (),
    positive: str | None = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
    min_cell: int = 0,
    epsilon: float | None = None,
    delta: float = 0.0,
    ignore_case: bool = False,
    date: str | datetime.date = "",
    model_version: str = "",
    join: TablePath | None = None,
    key: str | Sequence[str] = (),
    where: str | None = None,
    on_rows: OnRows | None = None,
) -> SiteSums:
    """Return the sums over the rows of a table in CSV or Parquet files, read in batches.

    Parameters
    ----------
    path
        A CSV or Parquet file, a folder of such files, a glob pattern, or a list of these. A folder
        may state a column of its rows, as in ``bank=north/rows.parquet``.
    label, group, score, decision
        The names of columns; see `measure` for what they hold. `decision` None: the scores decide.
    weight, given
        The column with the weights of the rows, and one or two columns with strata. By default
        there are none.
    randomized_groups
        As in `measure`. None: the groups are the true ones.
    group_probabilities
        As in `measure`, with the names of columns: ``{"sex": {"woman": "p_w", "man": "p_m"}}``.
        None: the groups are known.
    site
        The name of the site; by default, the name of the folder, or of the file without its
        extension. A pattern or a list has no default.
    values
        All values of a group column, by the name of the column. Other values are an error. Under
        noise, declared values also ensure that the names of groups reveal nothing about the data.
        None: the values that occur.
    join, key
        A second table with other columns of the same rows, such as their groups, and the columns
        that match the rows of both tables. The second table is held in memory, its keys must
        differ, and rows without a match have no values in its columns. None: there is none.
    where
        A condition in SQL for the rows to read, such as ``"year = 2025"``; all columns of a CSV
        file are text. None: all rows.
    on_rows
        Called after each batch with the number of rows read. None: nothing is called.
    threshold, bins, classes, positive, min_cell, epsilon, delta, ignore_case
        As in `measure`, with the same defaults.
    date, model_version
        As in `measure`.

    Returns
    -------
    SiteSums
        The sums of the site.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import fedgft
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lines = ["repaid,sex,p", "yes,f,0.8", "no,f,0.6", "yes,m,0.9", "no,m,0.1"]
    ...     path = pathlib.Path(folder, "north.csv")
    ...     _ = path.write_text("\\n".join(lines))
    ...     fedgft.measure_file(path, label="repaid", group="sex", score="p")
    SiteSums(4 rows of 1 site: north; 2 groups by sex: f, m; classes no, yes, with scores)
    """
    (sums,) = _measure_table(
        _open(path, join, key, where),
        Protection(min_cell, epsilon, delta),
        on_rows,
        label=label,
        group=group,
        score=score,
        decision=decision,
        weight=weight,
        given=given,
        randomized_groups=randomized_groups,
        group_probabilities=group_probabilities,
        site=site,
        threshold=threshold,
        bins=choose_bins(bins, epsilon),
        classes=classes,
        positive=positive,
        values=values,
        ignore_case=ignore_case,
        date=check_date(date),
        model_version=model_version,
    )
    return sums


def measure_sites(
    path: TablePath | Table,
    *,
    site_column: str,
    label: str,
    group: str | Sequence[str] = (),
    score: str | Sequence[str] = (),
    decision: str | None = None,
    weight: str | None = None,
    given: str | Sequence[str] = (),
    randomized_groups: float | None = None,
    group_probabilities: Mapping[str, Mapping[str, str]] | None = None,
    threshold: float = 0.5,
    bins: int | None = None,
    classes: Sequence[str] = (),
    positive: str | None = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
    min_cell: int = 0,
    epsilon: float | None = None,
    delta: float = 0.0,
    ignore_case: bool = False,
    date: str | datetime.date = "",
    model_version: str = "",
    join: TablePath | None = None,
    key: str | Sequence[str] = (),
    where: str | None = None,
    on_rows: OnRows | None = None,
) -> list[SiteSums]:
    """Return the sums of each site in a table that holds the rows of several sites.

    The classes are those of all sites together: at one site a class may be missing.

    Parameters
    ----------
    path
        A table, as in `measure_file`.
    site_column
        The column with the name of each row's site. A row without one is an error.
    label, group, score, decision, weight, given, randomized_groups, group_probabilities
        As in `measure_file`.
    threshold, bins, classes, positive, values
        As in `measure_file`.
    min_cell, epsilon, delta, ignore_case, date, model_version, join, key, where, on_rows
        As in `measure_file`.

    Returns
    -------
    list of SiteSums
        The sums of one site each, by name.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from fedgft.auditing.measurement import measure_sites
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lines = ["bank,repaid,sex,p", "north,yes,f,0.8", "south,no,m,0.1", "south,yes,f,0.9"]
    ...     path = pathlib.Path(folder, "all.csv")
    ...     _ = path.write_text("\\n".join(lines))
    ...     for sums in measure_sites(
    ...         path, site_column="bank", label="repaid", group="sex", score="p"
    ...     ):
    ...         print(sums)
    SiteSums(1 row of 1 site: north; 1 group by sex: f; classes no, yes, with scores)
    SiteSums(2 rows of 1 site: south; 2 groups by sex: f, m; classes no, yes, with scores)
    """
    check_instance("site_column", site_column, str, "it is the name of a column")
    return _measure_table(
        _open(path, join, key, where),
        Protection(min_cell, epsilon, delta),
        on_rows,
        site_column=site_column,
        label=label,
        group=group,
        score=score,
        decision=decision,
        weight=weight,
        given=given,
        randomized_groups=randomized_groups,
        group_probabilities=group_probabilities,
        site=None,
        threshold=threshold,
        bins=choose_bins(bins, epsilon),
        classes=classes,
        positive=positive,
        values=values,
        ignore_case=ignore_case,
        date=check_date(date),
        model_version=model_version,
    )


def _open(
    path: TablePath | Table, join: TablePath | None, key: str | Sequence[str], where: str | None
) -> Table:
    """Return the table to measure, which may be open already."""
    return path if isinstance(path, Table) else open_table(path, join=join, key=key, where=where)


def _measure_table(
    table: Table,
    protection: Protection,
    on_rows: OnRows | None,
    *,
    label: str,
    group: str | Sequence[str],
    score: str | Sequence[str],
    site: str | None,
    classes: Sequence[str],
    positive: str | None,
    values: Mapping[str, tuple[str, ...]] | None,
    given: str | Sequence[str],
    group_probabilities: Mapping[str, Mapping[str, str]] | None,
    **more: Any,
) -> list[SiteSums]:
    """Return the sums of each site in a file: see `measure_sites`."""
    check_instance("label", label, str, "it is the name of a column")
    for option in ("decision", "weight"):
        if more[option] is not None:
            check_instance(option, more[option], str, "it is the name of a column")
    attribute, probabilities = _split_probabilities(group_probabilities)
    for name in probabilities.values():
        check_instance("group_probabilities", name, str, "it is the name of a column")
    if site is not None:
        check_instance("site", site, str)
    if positive is not None:
        check_instance("positive", positive, str)
    name = table.files.name if site is None else site
    if name is None and more.get("site_column") is None:
        text = "`site` is missing: these files are one table of one site; name the site"
        raise FedgftError(text, kind="missing")
    task = Measurement(
        table.files.source,
        label,
        check_column_names("group", group),
        check_column_names("score", score),
        site=name or "",
        classes=tuple(map(to_text, classes)),
        positive=positive,
        values=values or {},
        label_name=label,
        attributes=(attribute,) if probabilities else (),
        given=check_column_names("given", given),
        probabilities=probabilities,
        **more,
    )
    batches = read_batches(table, task)
    try:
        return _count_sites(batches, task, protection, on_rows, where=table.where)
    except FedgftError as error:
        if error.kind == "data" and len(table.files.parts) > 1 and table.other is None:
            _find_wrong_file(table, task)
        raise


def _find_wrong_file(table: Table, task: Measurement) -> None:
    """Raise the error about values that cannot be counted once more, with the name of their file.

    Nothing is raised for an error about all files together.
    """
    for part in table.split():
        named = replace(task, source=part.files.source)
        for batch in read_batches(part, named):
            for _, rows in split_sites(batch, named):
                count_rows(rows, named)


def choose_bins(bins: int | None, epsilon: float | None) -> int:
    """Return the requested number of bins, or the default, which is smaller with noise."""
    if bins is None:
        return DEFAULT_BINS if epsilon is None else DEFAULT_NOISY_BINS
    return check_integer("bins", bins)


# Reading


def read_header(path: str | Path) -> list[str]:
    """Return the names of a file's columns."""
    return list(read_schema(Part(Path(path), {})))


def read_batches(source: TablePath | Table, task: NamesColumns) -> Iterator[pl.DataFrame]:
    """Yield the columns that `task` names, `BATCH_ROWS` rows at a time."""
    table = source if isinstance(source, Table) else open_table(source)
    columns = {column.name: column.option for column in task.columns()}
    return table.read_batches(columns, BATCH_ROWS)


def _count_sites(
    batches: Iterable[pl.DataFrame],
    task: Measurement,
    protection: Protection,
    on_rows: OnRows | None = None,
    *,
    where: str = "",
) -> list[SiteSums]:
    """Count all batches, in any order, and return the protected sums of each site, by name.

    `where` is the condition that the rows fulfill, for messages.
    """
    counts: dict[str, RowCounts] = {}
    done = 0
    try:
        for batch in batches:
            for site, rows in split_sites(batch, task):
                found = count_rows(rows, task)
                counts[site] = counts[site] + found if site in counts else found
                check_cardinality(counts[site].cells, task)
            if len(counts) > MAX_SITES:
                problem = f"site column '{task.site_column}' has more than {MAX_SITES} values"
                raise data_error(task.source, f"{problem}; name the column with the sites")
            done += batch.height
            if on_rows:
                on_rows(done)
        if not done:
            problem = "no row fulfills `where`" if where else "the file has no rows"
            raise data_error(task.source, problem)
        return build_protected(counts, task, protection)
    except PolarsError as error:  # a column of a kind that cannot be counted
        reason = (str(error).strip().splitlines() or ["unreadable"])[0][:160]
        raise data_error(task.source, f"cannot be counted: {reason}") from None


def sum_cells(
    tables: Iterable[pl.DataFrame], task: Measurement, protection: Protection
) -> list[SiteSums]:
    """Return the protected sums of each site, by name, from rows that a database has counted.

    Parameters
    ----------
    tables
        Parts of one table with a row per cell: the columns of `RowCounts.cells`, with nulls in y, d
        and bin for rows without a label or a prediction; the column site; and with weights the
        column w_max, the largest of the cell. A cell whose sum of weights is 0 is left out.
    task, protection
        What was counted, and how the sums are protected.
    """
    counts: dict[str, RowCounts] = {}
    for table in tables:
        for (site,), cells in table.partition_by("site", include_key=False, as_dict=True).items():
            found = divide_cells(cells, task)
            name = str(site)
            counts[name] = counts[name] + found if name in counts else found
            check_cardinality(counts[name].cells, task)
        if len(counts) > MAX_SITES:
            problem = f"site column '{task.site_column}' has more than {MAX_SITES} values"
            raise data_error(task.source, f"{problem}; name the column with the sites")
    return build_protected(counts, task, protection)
