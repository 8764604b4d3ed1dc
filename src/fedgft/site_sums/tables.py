"""The tables of one site: what was measured, and the counts and sums of scores by group."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedgft.errors import FedgftError

MAX_CLASSES = 50
MAX_ATTRIBUTES = 4
MAX_BINS = 10_000
MAX_HISTOGRAM_NUMBERS = 5_000_000  # largest size of the histograms of one group

Group = tuple[str | None, ...]
"One value for each group column; None: not recorded."

# The table of a group has the axes (label, decision, column). These are its columns.
COUNT = 0
NOISE = 1  # variance of the noise that was added to the count
SLACK = 2  # largest possible error of the count if it is withheld, else 0
SCORES = 3  # the first of the columns with sums of scores


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
    label
        The name of the column of labels, for reports; "" if it is not known. Sites may differ.
    """

    classes: tuple[str, ...]
    attributes: tuple[str, ...]
    threshold: float | None = None
    scored: bool = False
    bins: int = 100
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        classes = len(self.classes)
        scores = len(self.score_classes)
        if not 2 <= classes <= MAX_CLASSES or len(set(self.classes)) < classes:
            raise FedgftError(f"classes: there must be 2 to {MAX_CLASSES} different ones")
        if not 1 <= len(self.attributes) <= MAX_ATTRIBUTES:
            raise FedgftError(f"groups: there must be 1 to {MAX_ATTRIBUTES} group columns")
        if len(self.attributes) > 1 and any(" & " in name for name in self.attributes):
            raise FedgftError("groups: ' & ' in a column's name would read as two; rename it")
        if self.scored and classes**2 * scores * self.bins > MAX_HISTOGRAM_NUMBERS:
            raise FedgftError(f"bins: {self.bins} are too many for {classes} classes")

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
        names = {"classes": "label classes", "attributes": "group columns", "scored": "scores"}
        for name, what in (names | {"threshold": "thresholds"}).items():
            mine = getattr(self, name)
            theirs = getattr(other, name)
            if mine != theirs:
                text = f"{what} differ: {_describe(mine)} and {_describe(theirs)}"
                raise FedgftError(text, kind="conflict")
        few, many = sorted((self.bins, other.bins))
        if self.scored and many % few:
            raise FedgftError(
                f"histograms differ: {self.bins} and {other.bins} bins, and neither divides the "
                "other; measure again with the same `bins`",
                kind="conflict",
            )
        label = self.label if self.label == other.label else ""
        return replace(self, bins=few, label=label)


def _describe(value: Any) -> str:
    """Return a field of `MeasurementSpec` in words, for a message."""
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    if isinstance(value, bool):
        return "with" if value else "without"
    return "decisions without a threshold" if value is None else repr(value)


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
    """The sums of a single site: what one file holds. `SiteSums` explains the last two fields."""

    spec: MeasurementSpec
    name: str
    site: SiteTables
    histogram: Mapping[Group, np.ndarray]
    bin_error: Mapping[Group, np.ndarray]


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


def suppressed_cell(min_cell: int, columns: int, classes: int) -> np.ndarray:
    """Return a cell for a withheld count of 1 to `min_cell` - 1 rows.

    Its count is the middle of this range, and its slack is the distance from there to either end.
    """
    cell = np.zeros(columns)
    cell[COUNT] = min_cell / 2
    cell[SLACK] = min_cell / 2 - 1
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
