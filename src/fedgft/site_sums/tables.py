"""The tables of one site: what was measured, and the counts and sums of scores by group."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics.randomized_response import check_epsilon
from fedgft.site_sums.dates import combine_dates, combine_versions

MAX_CLASSES = 50
MAX_ATTRIBUTES = 4
MAX_GIVEN = 2  # largest number of columns with strata
MAX_BINS = 10_000
MAX_HISTOGRAM_NUMBERS = 5_000_000  # largest size of the histograms of one group

Group = tuple[str | None, ...]
"One value for each group column, then one for each column with strata; None: not recorded."

# The table of a group has the axes (label, decision, column). These are its columns.
COUNT = 0  # number of rows; if the rows have weights, the sum of the weights
NOISE = 1  # variance of the noise that was added to the count
SLACK = 2  # largest possible error of the count if it is withheld, else 0
ROWS = 3  # number of rows, if they have weights; else 0
SQUARES = 4  # sum of the squared weights, if the rows have weights; else 0
SCORES = 5  # the first of the columns with sums of scores, which are weighted as the count is


@dataclass(frozen=True)
class RandomizedGroups:
    """How the groups were randomized before they were stored: k-ary randomized response.

    In each column, the true value was kept with probability e^epsilon / (e^epsilon + k - 1), and
    replaced by one of the k - 1 other values otherwise.

    Parameters
    ----------
    epsilon
        The epsilon of each column.
    values
        All values of each group column.
    """

    epsilon: float
    values: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        if any(len(set(each)) < max(2, len(each)) for each in self.values):
            raise FedgftError("`randomized_groups`: every group column needs two different values")


@dataclass(frozen=True)
class MeasurementSpec:
    """What was measured. Only sites that measured the same can be merged.

    Parameters
    ----------
    classes
        The names of the classes; if there are two, the second is the positive class.
    attributes
        The names of the group columns.
    threshold
        The smallest score with a positive decision. None means that the data contain the decisions,
        or that the decision is the class with the highest score.
    scored
        Whether there are scores.
    bins
        The number of bins of the histograms. Bin i is [i/bins, (i+1)/bins); the last includes 1.
    given
        The names of the columns with strata, within which groups are compared.
    weight
        The name of the column of weights; "" if the rows have none. Sites may use other names, but
        all or none have weights.
    randomized
        How the groups were randomized; None if they were not.
    proxy
        Whether a row belongs to several groups, to each with a probability.
    label
        The name of the column of labels, for reports; "" if it is not known. Sites may differ.
    date
        The date of the rows, or the span of several: see `fedgft.site_sums.dates`. Sites may
        differ. "": not stated.
    model_version
        The version of the measured model. Sites with different versions are not merged. "": not
        stated, which agrees with any.
    """

    classes: tuple[str, ...]
    attributes: tuple[str, ...]
    threshold: float | None = None
    scored: bool = False
    bins: int = 100
    given: tuple[str, ...] = ()
    weight: str = field(default="", compare=False)
    randomized: RandomizedGroups | None = None
    proxy: bool = False
    label: str = field(default="", compare=False)
    date: str = field(default="", compare=False)
    model_version: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        classes = len(self.classes)
        scores = len(self.score_classes)
        if not 2 <= classes <= MAX_CLASSES or len(set(self.classes)) < classes:
            raise FedgftError(f"classes: there must be 2 to {MAX_CLASSES} different ones")
        if not 1 <= len(self.attributes) <= MAX_ATTRIBUTES:
            raise FedgftError(f"groups: there must be 1 to {MAX_ATTRIBUTES} group columns")
        if len(self.attributes) > 1 and any(" & " in name for name in self.attributes):
            raise FedgftError("groups: ' & ' in a column's name would read as two; rename it")
        if len(self.given) > MAX_GIVEN:
            raise FedgftError(f"`given`: there must be at most {MAX_GIVEN} columns with strata")
        if self.randomized is not None and len(self.randomized.values) != len(self.attributes):
            raise FedgftError("`randomized_groups`: every group column needs its list of values")
        if self.scored and classes**2 * scores * self.bins > MAX_HISTOGRAM_NUMBERS:
            raise FedgftError(f"bins: {self.bins} are too many for {classes} classes")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a group has one value of each: group columns, then strata."""
        return self.attributes + self.given

    @property
    def is_weighted(self) -> bool:
        """Whether the rows have weights, given by the user or as probabilities of groups."""
        return bool(self.weight) or self.proxy

    @property
    def counts_people(self) -> bool:
        """Whether a count is a number of people by their true group."""
        return not self.is_weighted and self.randomized is None

    @property
    def counts_rows(self) -> bool:
        """Whether the column ROWS counts every row once: not if a row has several groups."""
        return bool(self.weight) and not self.proxy

    @property
    def score_classes(self) -> tuple[int, ...]:
        """The classes whose scores are summed: if there are two, the positive one; else all."""
        if not self.scored:
            return ()
        return (1,) if len(self.classes) == 2 else tuple(range(len(self.classes)))

    def empty_table(self) -> np.ndarray:
        """Return zeros (label, decision, column): the sums of a group without rows."""
        classes = len(self.classes)
        return np.zeros((classes, classes, SCORES + len(self.score_classes)))

    def empty_histogram(self) -> np.ndarray:
        """Return zeros (label, decision, score, bin)."""
        classes = len(self.classes)
        return np.zeros((classes, classes, len(self.score_classes), self.bins))

    def combine(self, other: "MeasurementSpec") -> "MeasurementSpec":
        """Return the spec of merged sums, with the smaller of the two numbers of bins.

        All other fields must be equal, and one number of bins must divide the other; otherwise
        there is a `FedgftError`.
        """
        names = {
            "classes": "label classes",
            "attributes": "group columns",
            "given": "strata columns",
            "scored": "scores",
            "threshold": "thresholds",
            "is_weighted": "weights",
            "proxy": "probabilities of groups",
            "randomized": "randomized groups",
        }
        for name, what in names.items():
            mine = getattr(self, name)
            theirs = getattr(other, name)
            if mine != theirs:
                text = f"{what} differ: {_describe(name, mine)} and {_describe(name, theirs)}"
                raise FedgftError(text, kind="conflict")
        few, many = sorted((self.bins, other.bins))
        if self.scored and many % few:
            raise FedgftError(
                f"histograms differ: {self.bins} and {other.bins} bins, and neither divides the "
                "other; measure again with the same `bins`",
                kind="conflict",
            )
        label = self.label if self.label == other.label else ""
        weight = self.weight if self.weight == other.weight else "weights of several names"
        date = combine_dates(self.date, other.date)
        version = combine_versions(self.model_version, other.model_version)
        return replace(self, bins=few, label=label, weight=weight, date=date, model_version=version)


def _describe(name: str, value: Any) -> str:
    """Return the value of a field of `MeasurementSpec` in words, for a message."""
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    if isinstance(value, bool):
        return "with" if value else "without"
    if isinstance(value, RandomizedGroups):
        lists = "; ".join(", ".join(each) for each in value.values)
        return f"epsilon {value.epsilon:g} over {lists}"
    if value is None:
        return "decisions without a threshold" if name == "threshold" else "none"
    return repr(value)


@dataclass(frozen=True)
class Privacy:
    """How the numbers of a site were protected before they left it."""

    mechanism: str = "none"  # or "discrete laplace", "discrete gaussian"
    epsilon: float = 0.0
    delta: float = 0.0
    scale: float = 0.0
    variance: float = 0.0  # variance of the noise on each count of the finest table
    names: str = ""  # where names of groups and classes are from: "declared" or "from the data"
    min_cell: int = 0
    suppressed: int = 0  # number of withheld cells, which have 1 to min_cell - 1 rows
    max_weight: float = 1.0  # no row of a withheld cell weighs more


@dataclass(frozen=True, eq=False)
class SiteTables:
    """The tables (label, decision, column) of one site, by group.

    `label_missing` and `prediction_missing` are the numbers of rows that the tables leave out.
    """

    tables: Mapping[Group, np.ndarray]
    label_missing: float = 0.0
    prediction_missing: float = 0.0
    privacy: tuple[Privacy, ...] = ()

    def __add__(self, other: "SiteTables") -> "SiteTables":
        tables = dict(self.tables)
        add_arrays(tables, other.tables)
        return SiteTables(
            tables,
            self.label_missing + other.label_missing,
            self.prediction_missing + other.prediction_missing,
            tuple(sorted((*self.privacy, *other.privacy), key=str)),
        )


def add_arrays(total: dict[Group, np.ndarray], more: Mapping[Group, np.ndarray]) -> None:
    """Add each array of `more` to the array of the same group in `total`, in place."""
    for group, array in more.items():
        total[group] = total[group] + array if group in total else array


class SiteRecord(NamedTuple):
    """The sums of a single site: what one file holds. `SiteSums` explains the last three."""

    spec: MeasurementSpec
    name: str
    site: SiteTables
    histogram: Mapping[Group, np.ndarray]
    bin_error: Mapping[Group, np.ndarray]
    bin_rows: Mapping[Group, np.ndarray]


@lru_cache
def bin_middles(bins: int) -> np.ndarray:
    """Return the middles of equal bins of [0, 1]."""
    return (np.arange(bins) + 0.5) / bins


@lru_cache
def possible_cells(spec: MeasurementSpec) -> np.ndarray:
    """Return a mask (decision, bin) of the combinations that a row can have.

    If there is a threshold, the bin determines the decision, except in the bin that contains the
    threshold.
    """
    bins = spec.bins if spec.scored else 1
    possible = np.ones((len(spec.classes), bins), dtype=bool)
    if spec.scored and spec.threshold is not None:
        edges = np.arange(bins + 1) / bins
        possible[0] = edges[:-1] < spec.threshold
        possible[1] = edges[1:] > spec.threshold
        possible[1, -1] = True  # a score of 1 lies in the last bin and reaches any threshold
    return possible


def suppressed_cell(
    min_cell: int, columns: int, classes: int, *, max_weight: float | None = None
) -> np.ndarray:
    """Return a cell for a withheld count of 1 to `min_cell` - 1 rows.

    Its count is the middle of this range, and its slack is the distance from there to either end.
    If the rows have weights of at most `max_weight`, the range is 0 to `min_cell` - 1 times that.
    """
    cell = np.zeros(columns)
    cell[COUNT] = min_cell / 2
    cell[SLACK] = min_cell / 2 - 1
    if max_weight is not None:
        cell[ROWS] = min_cell / 2
        cell[COUNT] = cell[SLACK] = (min_cell - 1) * max_weight / 2
        cell[SQUARES] = cell[COUNT] * max_weight
    cell[SCORES:] = placeholder_scores(cell[COUNT], classes)
    return cell


def placeholder_scores(count: Any, classes: int) -> Any:
    """Return placeholders for withheld sums of scores, the same for every class."""
    return count / classes


def group_sort_key(group: Group) -> tuple:
    """Return a sort key for groups: numbers by value, then words, then "not recorded"."""
    return tuple((value is None, _number_or_inf(value), value or "") for value in group)


def _number_or_inf(value: str | None) -> float:
    """Return the number that a text spells, or infinity."""
    try:
        number = float(value) if value is not None else np.inf
        return number if number == number else np.inf
    except ValueError:
        return np.inf
