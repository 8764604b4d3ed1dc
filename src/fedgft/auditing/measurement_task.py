"""What to count in a table: columns, classes, groups, weights and strata."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fedgft.errors import FedgftError
from fedgft.privacy.suppression import GroupValues
from fedgft.site_sums import MAX_BINS, RandomizedGroups
from fedgft.site_sums.dates import check_date, check_version
from fedgft.validation import check_number

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


class Column(NamedTuple):
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

    def columns(self) -> list[Column]:
        """Return all columns of the table that are needed."""
        out = [Column("y", "label", self.label)]
        out += [Column(f"g{i}", "group", name) for i, name in enumerate(self.groups)]
        first = max(len(self.groups), 1)
        out += [Column(f"g{first + i}", "given", name) for i, name in enumerate(self.given)]
        listed = enumerate(self.probabilities.values())
        out += [Column(f"p{i}", "group_probabilities", name) for i, name in listed]
        if self.weight is not None:
            out.append(Column("w", "weight", self.weight))
        out += [Column(f"s{i}", "score", name) for i, name in enumerate(self.scores)]
        if self.decision is not None:
            out.append(Column("d", "decision", self.decision))
        if self.site_column is not None:
            out.append(Column("site", "site", self.site_column))
        return out

    def keys(self, option: str) -> list[str]:
        """Return the short names of the columns that an option specifies, as in `Column`."""
        return [column.key for column in self.columns() if column.option == option]

    def group_keys(self) -> list[str]:
        """Return the short names of the columns with groups, then of those with strata."""
        return ["g0"] * bool(self.probabilities) + self.keys("group") + self.keys("given")
