"""Count the rows of one site: arrays or a table in, sums out.

A table is read once, in batches, so the memory needed does not grow with the table. The rows of
each batch are counted by group, label, decision and bin of the score. The tables of counts, which
are small, are added up. The names of classes and groups are then read from the total.
"""

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import polars as pl
from polars import selectors
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
from fedgft.data.encode import as_text, data_error, parse_numbers, put_positive_last
from fedgft.data.table_parts import Part
from fedgft.data.table_scan import BATCH_ROWS, Table, open_table, read_schema
from fedgft.errors import FedgftError
from fedgft.formatting import format_count
from fedgft.privacy.suppression import GroupValues, Protection
from fedgft.site_sums import (
    COUNT,
    MAX_BINS,
    ROWS,
    SCORES,
    SQUARES,
    Group,
    MeasurementSpec,
    RandomizedGroups,
    SiteSums,
    SiteTables,
    Spellings,
    group_sort_key,
)
from fedgft.site_sums.dates import check_date, check_version
from fedgft.site_sums.regression_json import MAX_WEIGHT
from fedgft.site_sums.spelling import LABEL, name_column
from fedgft.validation import (
    NO_NUMBERS_AS_LABELS,
    check_column_names,
    check_indices,
    check_instance,
    check_integer,
    check_number,
    format_value,
)

MAX_SITES = 1_000  # largest number of sites in one table
MAX_VALUES = 200  # largest number of different values of a label, group or decision column
KNOWN_PAIRS = (("0", "1"), ("False", "True"))  # if one of a pair occurs, these are both classes
DEFAULT_BINS = 100
DEFAULT_NOISY_BINS = 20  # every bin gets noise, so a noisy histogram has fewer bins
PROBABILITY_SLACK = 0.001  # how far the probabilities of a row's groups may be from 1 in total
SUM_COLUMNS = ("n", "w", "w2", "total")  # of a table of counts
OnRows = Callable[[int], None]
TablePath = str | Path | Sequence[str | Path]  # a file, a folder, a pattern or a list of them


@runtime_checkable
class NamesColumns(Protocol):
    """A task that names columns of a table."""

    def columns(self) -> Sequence[Any]:
        """Return the columns, each with a `name` and the `option` that specifies it."""
        ...


class _Column(NamedTuple):
    """A column of the table."""

    key: str  # the short name during counting: y, g0, g1, ..., s0, s1, ..., d, w, p0, ... or site
    option: str  # the option that specifies the column, such as label, group or score
    name: str


@dataclass(frozen=True)
class Measurement:
    """What to count in a table.

    Parameters
    ----------
    source
        The name of the table in error messages.
    label, groups, scores, decision
        The names of columns. `scores` names the column with the score of the positive class, or one
        column per class.
    threshold
        The threshold that turns scores into decisions if there is no column of decisions.
    bins
        The number of bins of the histograms.
    attributes
        The names of the group columns in the sums; by default, the names in `groups`.
    site
        The name of the site.
    classes, positive, values
        Names that the user declares: all classes in order, the positive class, and all values of
        an attribute, by the name of the attribute. Names that are not declared are read from the
        data.
    text_labels
        Whether labels are sorted as text. Otherwise labels that are numbers are sorted as numbers.
    ignore_case
        Whether names of sites, groups and classes that differ only in case or spaces are merged.
        Otherwise they are an error.
    label_name
        The name of the column of labels for reports; "" if the labels are no column of a file.
    site_column
        The column with the name of each row's site. None: all rows are those of `site`.
    given
        The names of the columns with strata.
    given_names
        The names of these columns in the sums; by default, the names in `given`.
    weight
        The name of the column of weights. None: every row counts once.
    randomized_groups
        The epsilon of the randomized response that the values of the group columns went through.
    probabilities
        The columns with the probability of each group, by the name of the group, instead of
        `groups`; `attributes` then has the name of the attribute.
    date, model_version
        The date of the rows, and the version of the model; "" if they are not stated.
    """

    source: str
    label: str
    groups: tuple[str, ...]
    scores: tuple[str, ...] = ()
    decision: str | None = None
    threshold: float = 0.5
    bins: int = DEFAULT_BINS
    attributes: tuple[str, ...] = ()
    site: str = ""
    classes: tuple[str, ...] = ()
    positive: str | None = None
    values: GroupValues = field(default_factory=dict)
    text_labels: bool = False
    ignore_case: bool = False
    label_name: str = ""
    site_column: str | None = None
    given: tuple[str, ...] = ()
    given_names: tuple[str, ...] = ()
    weight: str | None = None
    randomized_groups: float | None = None
    probabilities: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    model_version: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", self.attributes or self.groups)
        object.__setattr__(self, "given_names", self.given_names or self.given)
        object.__setattr__(self, "date", check_date(self.date))
        object.__setattr__(self, "model_version", check_version(self.model_version))
        names = [column.name for column in self.columns()]
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise FedgftError(f"column '{repeated[0]}' is named more than once")
        if not self.groups and not self.probabilities:
            raise FedgftError("`group` needs the name of a column")
        self._check_uncertain_groups()
        if not self.scores and self.decision is None:
            raise FedgftError("name the model's output: `score` P (in [0, 1]) or `decision` D")
        if not 0 <= check_number("threshold", self.threshold, finite=False) <= 1:
            raise FedgftError(f"`threshold` {self.threshold:g}: must lie in [0, 1]")
        if not 2 <= self.bins <= MAX_BINS:
            raise FedgftError(f"`bins` {self.bins}: must lie between 2 and {MAX_BINS:,}")
        if len(self.scores) == 2 and self.positive is not None:
            raise FedgftError("`positive` with two scores: give one, that of the positive class")

    def _check_uncertain_groups(self) -> None:
        """Raise a `FedgftError` if the options about randomized or probable groups are wrong."""
        if self.probabilities and (self.groups or self.randomized_groups is not None):
            text = "`group_probabilities` takes the place of `group` and `randomized_groups`"
            raise FedgftError(text, kind="conflict")
        if self.probabilities and len(self.probabilities) < 2:
            text = "`group_probabilities` needs a column for each of two or more groups"
            raise FedgftError(text, kind="missing")
        if self.randomized_groups is None:
            return
        unlisted = [name for name in self.attributes if not self.values.get(name)]
        if unlisted:
            text = f"`randomized_groups` needs all values of '{unlisted[0]}': `group` lists them"
            raise FedgftError(f"{text}, as in {unlisted[0]}=A,B", field="group", kind="missing")
        self.randomized()

    def randomized(self) -> RandomizedGroups | None:
        """Return how the groups were randomized; None if they were not."""
        if self.randomized_groups is None:
            return None
        epsilon = check_number("randomized_groups", self.randomized_groups)
        return RandomizedGroups(epsilon, tuple(self.values[name] for name in self.attributes))

    @property
    def is_weighted(self) -> bool:
        """Whether the counts are sums of weights."""
        return self.weight is not None or bool(self.probabilities)

    def columns(self) -> list[_Column]:
        """Return all columns of the table that are needed."""
        out = [_Column("y", "label", self.label)]
        out += [_Column(f"g{i}", "group", name) for i, name in enumerate(self.groups)]
        first = max(len(self.groups), 1)
        out += [_Column(f"g{first + i}", "given", name) for i, name in enumerate(self.given)]
        listed = enumerate(self.probabilities.values())
        out += [_Column(f"p{i}", "group_probabilities", name) for i, name in listed]
        if self.weight is not None:
            out.append(_Column("w", "weight", self.weight))
        out += [_Column(f"s{i}", "score", name) for i, name in enumerate(self.scores)]
        if self.decision is not None:
            out.append(_Column("d", "decision", self.decision))
        if self.site_column is not None:
            out.append(_Column("site", "site", self.site_column))
        return out

    def keys(self, option: str) -> list[str]:
        """Return the short names of the columns that an option specifies, as in `_Column`."""
        return [column.key for column in self.columns() if column.option == option]

    def group_keys(self) -> list[str]:
        """Return the short names of the columns with groups, then of those with strata."""
        return ["g0"] * bool(self.probabilities) + self.keys("group") + self.keys("given")


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
        return _count_sites(batches, task, protection, on_rows)
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
            for _, rows in _split_sites(batch, named):
                _count_rows(rows, named)


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


# Counting


@dataclass
class _Counts:
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

    def __add__(self, other: "_Counts") -> "_Counts":
        cells = pl.concat([self.cells, other.cells])
        return _Counts(
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


def _count_sites(
    batches: Iterable[pl.DataFrame],
    task: Measurement,
    protection: Protection,
    on_rows: OnRows | None = None,
) -> list[SiteSums]:
    """Count all batches, in any order, and return the protected sums of each site, by name."""
    counts: dict[str, _Counts] = {}
    done = 0
    try:
        for batch in batches:
            for site, rows in _split_sites(batch, task):
                found = _count_rows(rows, task)
                counts[site] = counts[site] + found if site in counts else found
                _check_cardinality(counts[site].cells, task)
            if len(counts) > MAX_SITES:
                problem = f"site column '{task.site_column}' has more than {MAX_SITES} values"
                raise data_error(task.source, f"{problem}; name the column with the sites")
            done += batch.height
            if on_rows:
                on_rows(done)
        if not done:
            raise data_error(task.source, "the file has no rows")
        return _build_protected(counts, task, protection)
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
        Parts of one table with a row per cell: the columns of `_Counts.cells`, with nulls in y, d
        and bin for rows without a label or a prediction; the column site; and with weights the
        column w_max, the largest of the cell. A cell whose sum of weights is 0 is left out.
    task, protection
        What was counted, and how the sums are protected.
    """
    counts: dict[str, _Counts] = {}
    for table in tables:
        for (site,), cells in table.partition_by("site", include_key=False, as_dict=True).items():
            found = _divide_cells(cells, task)
            name = str(site)
            counts[name] = counts[name] + found if name in counts else found
            _check_cardinality(counts[name].cells, task)
        if len(counts) > MAX_SITES:
            problem = f"site column '{task.site_column}' has more than {MAX_SITES} values"
            raise data_error(task.source, f"{problem}; name the column with the sites")
    return _build_protected(counts, task, protection)


def _divide_cells(cells: pl.DataFrame, task: Measurement) -> _Counts:
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
    return _Counts(
        counted.drop("w_max", strict=False),
        cells.select(task.group_keys()).unique(),
        rows - with_label,
        with_label - with_both,
        left_out,
        max(heaviest, default=0.0),
    )


def _build_protected(
    counts: Mapping[str, _Counts], task: Measurement, protection: Protection
) -> list[SiteSums]:
    """Return the protected sums of each site, by name."""
    declared = bool(task.classes)
    limit = None
    if task.is_weighted:
        limit = round_up(max(each.max_weight for each in counts.values()))
    return [
        replace(
            protection.apply(sums, values=task.values, classes_declared=declared, max_weight=limit),
            notes=sums.notes,
        )
        for sums in _build_all(counts, task)
    ]


def round_up(weight: float) -> float:
    """Return the next power of two: a file states the largest weight no more exactly."""
    return 2.0 ** math.ceil(math.log2(weight)) if weight > 0 else 1.0


def _split_sites(batch: pl.DataFrame, task: Measurement) -> Iterator[tuple[str, pl.DataFrame]]:
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


def _build_all(counts: Mapping[str, _Counts], task: Measurement) -> list[SiteSums]:
    """Turn the counts of all sites into their sums, with the same names of groups and classes."""
    spellings = Spellings(ignore_case=task.ignore_case)
    with _name_source(task.source):
        merged: dict[str, _Counts] = {}
        for name in sorted(counts, key=lambda site: (-counts[site].rows(), site)):
            where = format_count(counts[name].rows(), "row")
            (site,) = spellings.unify_names("site", [name], where)
            merged[site] = merged[site] + counts[name] if site in merged else counts[name]
        together = sum(list(merged.values())[1:], start=next(iter(merged.values())))
        unified = _unify_names(together, task, spellings)
        if len(merged) > 1:
            merged = {name: _unify_names(site, task, spellings) for name, site in merged.items()}
            task = replace(task, classes=_find_classes(unified.cells, task))
        else:
            merged = dict.fromkeys(merged, unified)
    made = [_build_sums(merged[name], replace(task, site=name)) for name in sorted(merged)]
    notes = (*spellings.notes, *(note for each in made for note in each.notes))
    return [replace(each, notes=notes) for each in made]


@contextmanager
def _name_source(source: str) -> Iterator[None]:
    """Put the name of the table in front of the errors about spellings."""
    try:
        yield
    except FedgftError as error:
        if error.field != "ignore_case":
            raise
        text = f"{source}: {error.message}"
        raise FedgftError(text, field=error.field, kind=error.kind) from None


def _count_rows(batch: pl.DataFrame, task: Measurement) -> _Counts:
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
    return _Counts(
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


def _check_cardinality(cells: pl.DataFrame, task: Measurement) -> None:
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


# Names of classes and groups


def _unify_names(counts: _Counts, task: Measurement, spellings: Spellings) -> _Counts:
    """Return the counts with one spelling per name; the most frequent one, or the declared one.

    Raises a `FedgftError` for names that differ only in case or spaces, unless `task.ignore_case`.
    """
    cells = counts.cells
    groups = counts.groups
    declared = [("y", LABEL, task.classes)]
    columns = (*task.attributes, *task.given_names)
    for key, attribute in zip(task.group_keys(), columns, strict=True):
        declared.append((key, name_column(attribute), task.values.get(attribute, ())))
    for key, role, names in declared:
        spellings.unify_names(role, names, "declared")
        for column in (key, "d") if key == "y" and task.decision is not None else (key,):
            if cells[column].dtype not in (pl.String, pl.Categorical, pl.Enum):
                continue
            kept = _unify_column(cells, column, role, spellings)
            cells = cells.with_columns(pl.col(column).cast(pl.String).replace(kept))
            if column in groups.columns:
                uncounted = groups[column].cast(pl.String).drop_nulls().unique().sort()
                kept = spellings.unify_names(role, uncounted, "rows that are not counted")
                mapping = dict(zip(uncounted, kept, strict=True))
                groups = groups.with_columns(pl.col(column).cast(pl.String).replace(mapping))
    if not spellings.notes:
        return counts
    return replace(counts, cells=add_cells(cells), groups=groups.unique())


def _unify_column(
    cells: pl.DataFrame, column: str, role: str, spellings: Spellings
) -> dict[str, str]:
    """Return the spelling to use for each name in a column, the most frequent name first."""
    sizes = cells.select(pl.col(column).cast(pl.String), "n").drop_nulls()
    sizes = sizes.group_by(column).agg(pl.sum("n")).sort("n", column, descending=[True, False])
    names = dict(sizes.iter_rows())
    return {
        name: spellings.unify_names(role, [name], format_count(n, "row"))[0]
        for name, n in names.items()
    }


def _build_sums(counts: _Counts, task: Measurement) -> SiteSums:
    """Turn the small tables into the sums of one site."""
    classes = _find_classes(counts.cells, task)
    try:
        spec = MeasurementSpec(
            classes,
            task.attributes,
            threshold=task.threshold if task.decision is None and len(classes) == 2 else None,
            scored=bool(task.scores),
            bins=task.bins,
            given=task.given_names,
            weight=task.weight or "",
            randomized=task.randomized(),
            proxy=bool(task.probabilities),
            label=task.label_name,
            date=task.date,
            model_version=task.model_version,
        )
    except FedgftError as error:
        raise FedgftError(f"{task.source}: {error}") from None
    groups = dict.fromkeys(_read_groups(counts.groups, task))
    if len(spec.columns) == 1:  # a declared value is a group even if no row has it
        declared = task.values.get(task.attributes[0], ())
        groups |= dict.fromkeys((value,) for value in declared)
    tables = {group: spec.empty_table() for group in groups}
    histogram = {group: spec.empty_histogram() for group in groups if spec.scored}
    bin_rows = {group: spec.empty_histogram() for group in histogram if spec.is_weighted}
    index = {name: i for i, name in enumerate(classes)}
    # If two classes have two score columns, only the last column is summed.
    first = len(task.scores) - len(spec.score_classes)
    cells = counts.cells.filter(pl.col("score") >= first).sort(selectors.exclude(SUM_COLUMNS))
    labels = [index[text] for text in as_text(cells["y"])]
    decisions = cells["d"].to_list()
    if task.decision is not None:
        decisions = [index[text] for text in as_text(cells["d"])]
    sums = ("w", "w2") if spec.is_weighted else ("n", "n")
    numbers = cells.select(pl.col("score") - first, "bin", "n", "total").iter_rows()
    weights = zip(*(cells[name] for name in sums), strict=True)
    places = zip(_read_groups(cells, task), labels, decisions, numbers, weights, strict=True)
    for group, label, decision, (s, bin_, n, total), (weight, squares) in places:
        _check_declared(group, task)
        table = tables[group][label, decision]
        if s == 0:
            table[COUNT] += weight
            if spec.is_weighted:
                table[[ROWS, SQUARES]] += n, squares
        if spec.scored:
            table[SCORES + s] += total
            histogram[group][label, decision, s, bin_] += weight
            if spec.is_weighted:
                bin_rows[group][label, decision, s, bin_] += n
    site = SiteTables(tables, float(counts.label_missing), float(counts.prediction_missing))
    notes = ()
    if counts.weightless:
        rows = format_count(counts.weightless, "row")
        notes = (f"{task.source}: {rows} of weight 0 left out",)
    return SiteSums(spec, {task.site: site}, histogram, bin_rows=bin_rows, notes=notes)


def _read_groups(frame: pl.DataFrame, task: Measurement) -> Iterator[Group]:
    """Return the group and the stratum of each row of a table of counts."""
    return zip(*(as_text(frame[key]) for key in task.group_keys()), strict=True)


def _check_declared(group: Group, task: Measurement) -> None:
    """Raise a `FedgftError` if a value of the group is not among the values the user declared."""
    for attribute, value in zip((*task.attributes, *task.given_names), group, strict=True):
        declared = task.values.get(attribute)
        if declared and value is not None and value not in declared:
            problem = f"group column '{attribute}' holds '{value}', which `group` does not list"
            raise data_error(task.source, f"{problem} ({', '.join(declared)})")


def _find_classes(cells: pl.DataFrame, task: Measurement) -> tuple[str, ...]:
    """Return the classes in order; if there are two, the positive class is last."""
    labels = _sort_texts(as_text(cells["y"]).drop_nulls().unique(), task)
    decisions: list[str] = []
    if task.decision is not None:
        decisions = _sort_texts(as_text(cells["d"]).drop_nulls().unique(), task)
    if not labels:
        raise data_error(task.source, "no row has both a label and a prediction")
    classes = task.classes or _guess_classes(labels, decisions, task)
    for what, found in (("label", labels), ("decision", decisions)):
        unknown = [value for value in found if value not in classes]
        if unknown:
            listed = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
            problem = f"{what} '{unknown[0]}' is none of the classes {listed}"
            raise FedgftError(f"{task.source}: {problem} (`classes` names them all)")
    if task.positive is not None:
        classes = put_positive_last(classes, task.positive, where=f"{task.source}: the label")
    scores = len(task.scores)
    if scores == 1 and len(classes) != 2:
        raise FedgftError(
            f"{task.source}: {len(classes)} classes need one `score` column each, in the order "
            f"{', '.join(classes)}; or `decision` alone"
        )
    if scores > 1 and scores != len(classes):
        raise FedgftError(f"{task.source}: {scores} score columns for {len(classes)} classes")
    return classes


def _guess_classes(labels: list[str], decisions: list[str], task: Measurement) -> tuple[str, ...]:
    """Return the classes that occur in the data, or the pair of `KNOWN_PAIRS` that holds them."""
    for pair in KNOWN_PAIRS:
        if {*labels, *decisions} <= set(pair):
            return pair
    classes = labels if len(labels) > 1 else _sort_texts({*labels, *decisions}, task)
    positive = task.positive
    if len(classes) == 1 and positive is not None and positive.casefold() != classes[0].casefold():
        classes = [*classes, positive]
    if len(classes) == 1:
        raise FedgftError(
            f"{task.source}: '{classes[0]}' is the only label here; name both with `classes`, the "
            "positive class last"
        )
    return tuple(classes)


def _sort_texts(texts: Iterable[str], task: Measurement) -> list[str]:
    """Sort labels: numbers before words, unless the labels were texts in memory."""
    if task.text_labels:
        return sorted(texts)
    return sorted(texts, key=lambda text: group_sort_key((text,)))
