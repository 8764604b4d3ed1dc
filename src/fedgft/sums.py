"""The data that leaves a client or site: sums over its rows, never the rows themselves.

- `Sums` holds, by label and group, the number of rows and the sums of their scores and decisions.
  Every metric of the catalog follows from these three arrays. The simulator, the penalties and the
  federation compute with them, so a `Sums` holds only arrays, which may have leading axes.
  For a message, `Sums.to_record` and `Sums.from_record` convert them to lists and back.
- `SiteSums` holds what any number of sites measured and sent as files, one `SiteTables` per site.
  A `SiteTables` is not a `Sums`: it has one table per named group, and the groups of sites differ.
  Its cells are also finer: sums of scores are kept by decision too, and each count has its own
  noise, or its own range if it is withheld. Both are needed to check a file and to write it again.
  `fedgft.auditing.rates` adds the cells up to one `Sums` of all sites.

`RecordReader` checks the format of everything that arrives in a file
(`fedgft.auditing.site_file`) or in a message. `Sums.check` checks that the numbers can be sums over
rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NoReturn, get_args

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics.catalog import get_metric
from fedgft.metrics.functions import ROUNDING
from fedgft.metrics.metric import Index, Kind, Metric, Probs, Statistics, Value
from fedgft.validation import as_array, check_choice, check_instance, check_integer

MAX_GROUPS = 100_000
MAX_ROWS = 1e12  # largest number of rows in a message
MAX_NAMES = 1000  # largest number of classes, and of groups, in a message
MAX_WIRE_NUMBERS = 10_000  # largest size of an array in a message
MAX_WHOLE_NUMBER = 2**53  # a float represents every whole number up to this one exactly
MAX_CLASSES = 50
MAX_ATTRIBUTES = 4
MAX_BINS = 10_000
MAX_HISTOGRAM_NUMBERS = 5_000_000  # largest size of the histograms of one group
TYPE_NAMES = {list: "a list", dict: "an object", str: "a text"}


@dataclass(frozen=True)
class Sums:
    """Sums over rows by label (axis `c`) and group (axis `k`).

    The last entry of the group axis holds the rows whose group is not recorded. Every metric of the
    catalog, soft (of scores) and hard (of decisions), is computed from these sums. Law: `Sums.of`
    of a union of rows is the sum of the `Sums.of` of its parts. All arrays may have the same
    leading axes, such as runs or clients.
    """

    count: np.ndarray  # (..., c, k)
    score: np.ndarray  # (..., c, k, c): summed probabilities
    decision: np.ndarray  # (..., c, k, c): how often each class was chosen

    @classmethod
    def of(cls, probs: Probs, labels: Index, groups: Index, *, num_groups: int) -> "Sums":
        """Sum over rows.

        Parameters
        ----------
        probs
            (n, c): the probability of each class. The class with the largest one is the decision.
        labels
            (n,): the index of each row's class.
        groups
            (n,): the index of each row's group, or -1 where it is not recorded.
        num_groups
            The number of groups g; the sums have k = g + 1 entries.
        """
        probs = _check_probabilities(probs)
        rows, classes = probs.shape
        num_groups = check_integer("num_groups", num_groups, least=1, most=MAX_GROUPS)
        labels = _check_indices("labels", labels, rows, 0, classes)
        groups = _check_indices("groups", groups, rows, -1, num_groups)
        chosen = np.zeros((rows, classes))
        chosen[np.arange(rows), probs.argmax(1)] = 1.0

        def total(values: np.ndarray) -> np.ndarray:
            out = np.zeros((classes, num_groups + 1, *values.shape[1:]))
            np.add.at(out, (labels, groups), values)  # -1 is the last entry
            return out

        return cls(total(np.ones(rows)), total(probs), total(chosen))

    def to_record(self, names: "CategoryNames", *, site: str) -> dict[str, Any]:
        """Return the sums of one client as flat lists of numbers, with the names that they need.

        Parameters
        ----------
        names
            The names of the classes and groups.
        site
            The name of the client.
        """
        return {
            "site": site,
            "classes": list(names.classes),
            "groups": list(names.groups),
            **{key: array.ravel().astype(float).tolist() for key, array in vars(self).items()},
        }

    @classmethod
    def from_record(cls, reader: "RecordReader", names: "CategoryNames") -> "Sums":
        """Read sums that `to_record` wrote, for these classes and groups.

        Only the format of the record is checked; `check` checks the numbers.
        """
        count = reader.array("count", names.shape[:2])
        score = reader.array("score", names.shape)
        return cls(count, score, reader.array("decision", names.shape))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The three arrays: count, score, decision."""
        return self.count, self.score, self.decision

    def map(self, function: Callable[..., Any], *others: "Sums") -> "Sums":
        """Apply a function to each array, together with the same array of each of `others`."""
        return Sums(*map(function, self.arrays, *(other.arrays for other in others)))

    def __add__(self, other: "Sums") -> "Sums":
        return self.map(np.add, other)

    def __getitem__(self, index: Any) -> "Sums":
        return self.map(lambda array: array[index])

    def replaced(self, index: Any, other: "Sums") -> "Sums":
        """Return a copy with the entries at `index` (leading axes) replaced by `other`."""

        def put(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
            out = mine.copy()
            out[index] = theirs
            return out

        return self.map(put, other)

    def sum(self, axis: int = 0) -> "Sums":
        """Sum over a leading axis."""
        return self.map(lambda array: array.sum(axis))

    def rows(self) -> Value:
        """Return the number of rows (...), including rows without a group."""
        return self.count.sum((-2, -1))

    def accuracy(self) -> Value:
        """Return the share of right decisions (...), including rows without a group."""
        right = np.einsum("...cgc->...", self.decision)
        with np.errstate(invalid="ignore"):
            return right / self.rows()

    def statistics(self, metric: str | Metric, kind: Kind) -> Statistics:
        """Return the metric's sums (..., 2, v, g) over the rows whose group is recorded.

        `kind` is "soft" (of scores) or "hard" (of decisions).
        """
        metric = get_metric(metric)
        check_choice("kind", kind, get_args(Kind))
        slope, offset = metric.affine(self.count.shape[-2])
        mass = {"soft": self.score, "hard": self.decision}[kind][..., :-1, :]
        return np.einsum("svyc,...ygc->...svg", slope, mass) + np.einsum(
            "svy,...yg->...svg", offset, self.count[..., :-1]
        )

    def gap(self, metric: str | Metric, kind: Kind) -> Value:
        """Return the largest difference between groups; NaN if a group has no row of the event."""
        return get_metric(metric).readout(self.statistics(metric, kind))

    def check(
        self,
        source: str,
        *,
        kind: Kind | None = None,
        count_slack: float = 0.0,
        sum_slack: float = 0.0,
    ) -> None:
        """Raise a `FedgftError` unless these numbers can be sums over rows.

        Counts must be whole numbers and not negative. For each label and group, the sums of scores
        and of decisions must lie between 0 and the count and add up to the count, up to rounding.

        Parameters
        ----------
        source
            The sender of the sums; error messages begin with it.
        kind
            Which sums were sent: "soft" (of scores) or "hard" (of decisions). None means both.
        count_slack, sum_slack
            How far noise may have moved a count, and a sum of scores or decisions. If `count_slack`
            is not 0, counts need not be whole numbers.
        """
        tables = {"scores": self.score, "decisions": self.decision}
        if kind is not None:
            tables.pop("decisions" if kind == "soft" else "scores")
        for problem in self._list_problems(tables, count_slack, sum_slack):
            raise FedgftError(f"{source}: its {problem}", kind="data")

    def _list_problems(
        self, tables: Mapping[str, np.ndarray], count_slack: float, sum_slack: float
    ) -> Iterator[str]:
        """Yield what is wrong with the counts and with these sums; see `check`."""
        if not all(np.isfinite(table).all() for table in (self.count, *tables.values())):
            yield "statistics are not finite"
        if (self.count < -count_slack).any() or self.rows() > MAX_ROWS:
            yield f"counts are negative or more than {MAX_ROWS:.0g}"
        if not count_slack and (np.abs(self.count - self.count.round()) >= 1e-6).any():
            yield "counts are not numbers of rows"
        rounding = 1e-3 + 1e-5 * np.abs(self.count)  # error of a sum of many rounded numbers
        for name, table in tables.items():
            if (table < -rounding[..., None] - sum_slack).any():
                yield f"sums of {name} are negative"
            if (table > (self.count + rounding)[..., None] + sum_slack).any():
                yield f"sums of {name} exceed its counts"
            if (np.abs(table.sum(-1) - self.count) > rounding + sum_slack).any():
                yield f"sums of {name} do not add up to its counts"


def stack(sums: list[Sums]) -> Sums:
    """Stack sums of one shape along a new first axis."""
    return Sums(*map(np.stack, zip(*(s.arrays for s in sums), strict=True)))


def concatenate(sums: list[Sums]) -> Sums:
    """Concatenate sums along their first axis."""
    return Sums(*map(np.concatenate, zip(*(s.arrays for s in sums), strict=True)))


def _check_probabilities(probs: Any) -> np.ndarray:
    """Return the probabilities as an array (rows, classes), or raise a `FedgftError`.

    NaN is an error, because it would count as a decision.
    """
    array = as_array("probs", probs)
    if array.ndim != 2 or array.dtype.kind not in "fiub" or array.shape[1] < 2:
        raise FedgftError(
            f"probs must be numbers (rows, classes), not {array.dtype} of shape {array.shape}"
        )
    if not np.isfinite(array).all():
        raise FedgftError("probs hold NaN or infinity: the model has no answer for some rows")
    inside = ((array >= 0) & (array <= 1)).all()
    if not inside or (np.abs(array.sum(1, dtype=np.float64) - 1) > ROUNDING).any():
        raise FedgftError("probs must lie in [0, 1] and add up to 1 in every row")
    return array


def _check_indices(name: str, values: Any, rows: int, least: int, known: int) -> np.ndarray:
    """Return an array of whole numbers from `least` to `known` - 1, one per row, or raise."""
    array = as_array(name, values)
    if array.shape != (rows,):
        raise FedgftError(f"{name} must have the shape ({rows},), as probs, not {array.shape}")
    if not rows:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise FedgftError(f"{name} must hold indices (whole numbers), not {array.dtype}")
    low, high = (int(value) for value in (array.min(), array.max()))
    if low < least or high >= known:
        wrong = low if low < least else high
        raise FedgftError(f"{name} holds the index {wrong}; they go from {least} to {known - 1}")
    return array


# Messages


@dataclass(frozen=True)
class RecordReader:
    """Reads and checks the fields of a JSON object or of a message, whose content is not trusted.

    Each method returns the field `key`, or raises a `FedgftError` that names the source and the
    field. `path` is the location of a nested object, such as ``"cells[3]."``.
    """

    record: Any
    source: str
    path: str = ""

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise a `FedgftError` that names the source, the field and the problem."""
        raise FedgftError(f"{self.source}: {self.path}{key} {problem}", kind="data")

    def reject(self, key: str, reason: str) -> NoReturn:
        """Raise a `FedgftError` that shows the first 40 characters of the value."""
        self.fail(key, f"is {repr(self.record.get(key))[:40]}: {reason}")

    def get(self, key: str, kind: type[list] | type[dict] | type[str]) -> Any:
        """Return a list, an object (dict) or a text."""
        value = self.record.get(key)
        if not isinstance(value, kind):
            self.fail(key, f"is missing or is not {TYPE_NAMES[kind]}")
        return value

    def child(self, key: str) -> "RecordReader":
        """Return a reader of a nested object."""
        return RecordReader(self.get(key, dict), self.source, f"{self.path}{key}.")

    def text(self, key: str) -> str:
        """Return a text that is not empty."""
        text = self.get(key, str)
        if not text.strip() or not is_text(text):
            self.fail(key, "is empty or no proper text")
        return text

    def names(self, key: str, *, most: int = MAX_NAMES) -> tuple[str, ...]:
        """Return a list of at most `most` different texts, as a tuple."""
        found = self.get(key, list)
        valid = len(found) <= most and all(map(is_text, found))
        if not valid or len(set(found)) < len(found):
            self.fail(key, "must be a list of different names")
        return tuple(found)

    def whole_number(self, key: str, *, least: int = 0, default: Any = None) -> int:
        """Return an int (not a bool or float) from `least` to 2^53."""
        value = self.record.get(key, default)
        if type(value) is not int or not least <= value <= MAX_WHOLE_NUMBER:
            more = ", 0 or more" if least == 0 else ""
            self.reject(key, f"must be a whole number{more}")
        return value

    def array(self, key: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a flat list of numbers as an array of this shape."""
        values = self.get(key, list)
        size = int(np.prod(shape))
        if len(values) != size or size > MAX_WIRE_NUMBERS:
            self.fail(key, f"must hold {size} numbers, not {len(values)}")
        if not all(isinstance(value, int | float) for value in values):
            self.fail(key, "must hold numbers")
        return np.array(values, np.float64).reshape(shape)


def is_text(value: Any) -> bool:
    """Return whether the value is a text without surrogates.

    JSON may contain a surrogate, which is half a character and cannot be written to a file.
    """
    if not isinstance(value, str) or value.isascii():
        return isinstance(value, str)
    return not any("\ud800" <= c <= "\udfff" for c in value)


@dataclass(frozen=True)
class CategoryNames:
    """The names of labels 0, 1, ... and of groups 0, 1, ..., the same at every client."""

    classes: tuple[str, ...]
    groups: tuple[str, ...]

    @classmethod
    def of(cls, classes: int | Sequence[str], groups: int | Sequence[str]) -> "CategoryNames":
        """Make names from sequences of names, or from numbers of names ("0", "1", ...)."""
        return cls(_number_names(classes, "classes"), _number_names(groups, "groups"))

    @classmethod
    def from_record(cls, reader: RecordReader) -> "CategoryNames":
        """Read the lists `classes` and `groups` of a record."""
        try:
            return cls.of(reader.names("classes"), reader.names("groups"))
        except FedgftError as error:
            raise FedgftError(f"{reader.source}: {error}", kind="data") from None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of prices and sums: (labels, groups + 1, classes).

        The last entry of the group axis is for rows whose group is not recorded.
        """
        return len(self.classes), len(self.groups) + 1, len(self.classes)

    def check(self, other: "CategoryNames", *, site: str) -> None:
        """Raise a `FedgftError` unless `other`, the names of `site`, equal these names in order."""
        for what in ("classes", "groups"):
            ours = getattr(self, what)
            theirs = getattr(other, what)
            if ours != theirs:
                raise FedgftError(
                    f"site '{site}' has the {what} {', '.join(theirs)}; the federation has "
                    f"{', '.join(ours)}, in this order: rename them at the site",
                    kind="conflict",
                )


def _number_names(names: int | Sequence[str], what: str) -> tuple[str, ...]:
    """Return the names as texts; a number n stands for "0" to "n - 1"."""
    found = tuple(map(str, range(names) if isinstance(names, int) else names))
    if len(found) < 2 or len(set(found)) < len(found):
        raise FedgftError(f"{what} must be at least two different names, got {', '.join(found)}")
    return found


# Files of sites

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
    """

    classes: tuple[str, ...]
    attributes: tuple[str, ...]
    threshold: float | None = None
    scored: bool = False
    bins: int = 100

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
        return replace(self, bins=few)


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
        _add_arrays(tables, other.tables)
        return SiteTables(
            tables,
            self.label_missing + other.label_missing,
            self.prediction_missing + other.prediction_missing,
            tuple(sorted((*self.privacy, *other.privacy), key=str)),
        )


def _add_arrays(total: dict[Group, np.ndarray], more: Mapping[Group, np.ndarray]) -> None:
    """Add each array of `more` to the array of the same group in `total`, in place."""
    for group, array in more.items():
        total[group] = total[group] + array if group in total else array


@dataclass(frozen=True, eq=False)
class SiteSums:
    """The sums of any number of sites.

    Laws: `+` is associative and commutative, `SiteSums()` is its zero, and the sums over a union of
    rows equal the sum of the sums over its parts. Sites with the same name are one site, and their
    rows add up. Sites without a name are different sites. When they are added to other sites, they
    are named "site 1", "site 2", ... in order of addition.

    If few rows share a bin, a file states only a range of bins for them. `histogram` spreads such
    rows evenly over their range, and `bin_error`, (3, label, decision, score, bin), states how
    wrong this may be: `bin_error[0]` is the change of the histogram if all such rows are in the
    first bin of their range; `bin_error[1]` is the change if they are in the last bin; and bin 0 of
    `bin_error[2]` is the largest error of the cell's sum of scores. The histogram of a group
    without an entry in `bin_error` is exact.
    """

    spec: MeasurementSpec | None = None  # None: no site
    sites: Mapping[str, SiteTables] = field(default_factory=dict)
    histogram: Mapping[Group, np.ndarray] = field(default_factory=dict)  # of all sites together
    bin_error: Mapping[Group, np.ndarray] = field(default_factory=dict)
    numbered: tuple[str, ...] = ()  # names assigned to sites that were measured without a name

    def __add__(self, other: "SiteSums") -> "SiteSums":
        return merge((self, other)) if isinstance(other, SiteSums) else NotImplemented

    def __radd__(self, other: Any) -> "SiteSums":
        """Support `sum(...)`, which starts at 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def require_spec(self) -> MeasurementSpec:
        """Return what was measured; raise a `FedgftError` if no site is in the sums."""
        if self.spec is None:
            raise FedgftError("these are the sums of nothing: no site is in them", kind="data")
        return self.spec

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of all sites, sorted; values that are not recorded come last."""
        found = {group for site in self.sites.values() for group in site.tables}
        return tuple(sorted(found, key=group_sort_key))

    def rows(self) -> float:
        """Return the number of rows that were counted."""
        tables = (table for site in self.sites.values() for table in site.tables.values())
        return float(sum(table[..., COUNT].sum() for table in tables))


def merge(parts: Iterable[SiteSums]) -> SiteSums:
    """Return the sum of all parts. One pass reads them and holds one part in memory at a time.

    A `FedgftError` is raised if the parts measured different things (see
    `MeasurementSpec.combine`).
    """
    spec: MeasurementSpec | None = None
    named: dict[str, SiteTables] = {}
    unnamed: list[SiteTables] = []
    histogram: dict[Group, np.ndarray] = {}
    bin_error: dict[Group, np.ndarray] = {}
    for part in parts:
        check_instance(
            "sums", part, SiteSums, "measure() makes them, read_sums() reads them from a file"
        )
        if part.spec is None:
            continue
        common = part.spec if spec is None else spec.combine(part.spec)
        if spec is not None and spec.bins != common.bins:
            histogram = _coarsen_all(histogram, common.bins)
            bin_error = _coarsen_all(bin_error, common.bins)
        spec = common
        for name, site in part.sites.items():
            if name == "" or name in part.numbered:
                unnamed.append(site)
            else:
                named[name] = named[name] + site if name in named else site
        _add_arrays(histogram, _coarsen_all(part.histogram, spec.bins))
        _add_arrays(bin_error, _coarsen_all(part.bin_error, spec.bins))
    if spec is None:
        return SiteSums()
    numbered = _number_sites(unnamed, named)
    sites = dict(sorted(named.items())) | numbered
    return SiteSums(spec, sites, histogram, bin_error, numbered=tuple(filter(None, numbered)))


def _number_sites(
    unnamed: list[SiteTables], named: Mapping[str, SiteTables]
) -> dict[str, SiteTables]:
    """Name the sites that have no name.

    A single site, without others, keeps the name "". Otherwise the names are "site 1", "site 2",
    ..., without those that other sites have.
    """
    if len(unnamed) == 1 and not named:
        return {"": unnamed[0]}
    free = (name for name in map("site {}".format, count(1)) if name not in named)
    return dict(zip(free, unnamed, strict=False))


def _coarsen_all(histograms: Mapping[Group, np.ndarray], bins: int) -> dict[Group, np.ndarray]:
    """Merge the bins (the last axis) into `bins` bins, which must divide their current number."""
    return {
        group: array.reshape(*array.shape[:-1], bins, -1).sum(-1)
        for group, array in histograms.items()
    }


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
