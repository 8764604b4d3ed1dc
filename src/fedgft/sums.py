"""What leaves a client or site: sums over its rows, and never a row.

- `Sums`: by label and group, the number of rows and the sums of their scores and decisions. Every
  metric of the catalog follows from these three arrays. The simulator, the penalties and the
  federation compute with them, so they are nothing but arrays, with any leading axes.
- `Report`: the `Sums` of one client with its name and the names of classes and groups; it becomes
  a plain record of lists for a message, and back. The server checks, stores and compares the three
  together, so they are one object and not three arguments.
- `SiteSums`: the sums of any number of sites that send a file. Its tables (`SiteTables`) cannot be
  a `Sums`: groups are named and differ from site to site, sums of scores are kept by decision as
  well (so a threshold can be moved), and each count has its own noise and its own range if it is
  withheld. `fedgft.audit.rates` turns them into one `Sums` for all sites.

`RecordReader` checks the form of everything that arrives, in a file (`fedgft.audit.site_file`) or
in a message; `Sums.check` checks that rows can have such sums.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NoReturn, get_args

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics.catalog import get_metric
from fedgft.metrics.functions import ROUNDING
from fedgft.metrics.metric import Kind, Metric
from fedgft.types import Index, Probs, Statistics, Value
from fedgft.validation import as_array, check_choice, check_instance, check_integer

MAX_GROUPS = 100_000
MAX_ROWS = 1e12  # in a message
MAX_NAMES = 1000  # of classes, and of groups, in a message
MAX_WIRE_NUMBERS = 10_000  # in one array of a message
MAX_WHOLE_NUMBER = 2**53  # beyond it a float no longer counts exactly
MAX_CLASSES = 50
MAX_ATTRIBUTES = 4
MAX_BINS = 10_000
MAX_HISTOGRAM_NUMBERS = 5_000_000  # in the histograms of one group
TYPE_NAMES = {list: "a list", dict: "an object", str: "a text"}


@dataclass(frozen=True)
class Sums:
    """Sums over rows by label (axis `c`) and group (axis `k`; its last entry: not recorded).

    Every metric of the catalog, soft (scores) and hard (decisions), is read from these.
    Law: sums add, and `Sums.of(rows)` of a union is the sum of its parts. All arrays may have the
    same leading axes, such as runs or clients.
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

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The three arrays: count, score, decision."""
        return self.count, self.score, self.decision

    def map(self, function: Callable[..., Any], *others: "Sums") -> "Sums":
        """Apply a function of the leading axes to each array, and the same array of others."""
        return Sums(*map(function, self.arrays, *(other.arrays for other in others)))

    def __add__(self, other: "Sums") -> "Sums":
        return self.map(np.add, other)

    def __getitem__(self, index: Any) -> "Sums":
        return self.map(lambda array: array[index])

    def replaced(self, index: Any, other: "Sums") -> "Sums":
        """Return a copy whose entries at `index`, of the leading axes, are those of `other`."""

        def put(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
            out = mine.copy()
            out[index] = theirs
            return out

        return self.map(put, other)

    def sum(self, axis: int = 0) -> "Sums":
        """Sum over a leading axis."""
        return self.map(lambda array: array.sum(axis))

    def rows(self) -> Value:
        """Return the number of rows (...), those without a group included."""
        return self.count.sum((-2, -1))

    def accuracy(self) -> Value:
        """Return the share of right decisions (...), those without a group included."""
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
        """Raise a `FedgftError` unless some rows can have these sums.

        Counts must be whole and not negative; of each label and group, the sums of scores and of
        decisions must lie between 0 and the count and add up to it, up to rounding.

        Parameters
        ----------
        source
            Who sent the sums: the beginning of the message.
        kind
            The sums that were sent: "soft" (scores) or "hard" (decisions). None: both.
        count_slack, sum_slack
            How far noise may have moved a count, and a sum of scores or decisions. With a
            `count_slack`, counts need not be whole.
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
        rounding = 1e-3 + 1e-5 * np.abs(self.count)  # sums of many rounded numbers
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
    """(rows, classes); a NaN would be counted as a decision for class 0."""
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
    """Whole numbers from `least` to `known` - 1, one per row."""
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
    """Reads a JSON object or a record of a message that may hold anything.

    Each method returns the field `key`, or raises a `FedgftError` that names source and field.
    `path` is where a nested object lies, as in ``"cells[3]."``.
    """

    record: Any
    source: str
    path: str = ""

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise the error."""
        raise FedgftError(f"{self.source}: {self.path}{key} {problem}", kind="data")

    def reject(self, key: str, reason: str) -> NoReturn:
        """Raise an error that shows the beginning of the value: it may be a very long one."""
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
        """Return different texts."""
        found = self.get(key, list)
        valid = len(found) <= most and all(map(is_text, found))
        if not valid or len(set(found)) < len(found):
            self.fail(key, "must be a list of different names")
        return tuple(found)

    def whole_number(self, key: str, *, least: int = 0, default: Any = None) -> int:
        """Return an int (no bool, no float) from `least` to 2^53."""
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
    """Whether it is a text that can be written: JSON may hold half a character (a surrogate)."""
    if not isinstance(value, str) or value.isascii():
        return isinstance(value, str)
    return not any("\ud800" <= c <= "\udfff" for c in value)


@dataclass(frozen=True)
class Names:
    """The names of labels 0, 1, ... and of groups 0, 1, ..., the same at every client."""

    classes: tuple[str, ...]
    groups: tuple[str, ...]

    @classmethod
    def of(cls, classes: int | Sequence[str], groups: int | Sequence[str]) -> "Names":
        """Make names from sequences, or from the number of classes or groups ("0", "1", ...)."""
        return cls(_number_names(classes, "classes"), _number_names(groups, "groups"))

    @classmethod
    def from_record(cls, reader: RecordReader) -> "Names":
        """Read the lists `classes` and `groups` of a record."""
        try:
            return cls.of(reader.names("classes"), reader.names("groups"))
        except FedgftError as error:
            raise FedgftError(f"{reader.source}: {error}", kind="data") from None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of prices and sums: labels, groups (the last: not recorded), classes."""
        return len(self.classes), len(self.groups) + 1, len(self.classes)

    def check(self, other: "Names", *, site: str) -> None:
        """Raise a `FedgftError` unless the names of this site are the same, in the same order."""
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


@dataclass(frozen=True)
class Report:
    """The sums of one client, with its name and the names of classes and groups."""

    site: str
    names: Names
    sums: Sums

    def to_record(self) -> dict[str, Any]:
        """Return the report as texts and flat lists of numbers."""
        arrays = {key: array.ravel().astype(float) for key, array in vars(self.sums).items()}
        return {
            "site": self.site,
            "classes": list(self.names.classes),
            "groups": list(self.names.groups),
            **{key: array.tolist() for key, array in arrays.items()},
        }

    @classmethod
    def from_record(cls, record: Any, *, site: str) -> "Report":
        """Read what `to_record` wrote. Only its form is checked; see `Sums.check`."""
        reader = RecordReader(record, f"site '{site}'")
        names = Names.from_record(reader)
        count = reader.array("count", names.shape[:2])
        sums = (reader.array(key, names.shape) for key in ("score", "decision"))
        return cls(site, names, Sums(count, *sums))


# Files of sites

Group = tuple[str | None, ...]
"One value for each group column; None: not recorded."

# Columns of a table of one group, which has the axes (label, decision, column).
COUNT = 0
NOISE = 1  # variance of the noise that was added to the count
SLACK = 2  # how far off the count may be, at most: it is withheld
SCORES = 3  # from here on, sums of scores


@dataclass(frozen=True)
class MeasurementSpec:
    """What was measured. Sites can be merged only if they measured the same.

    Parameters
    ----------
    classes
        The names of the classes; the second of two is the positive one.
    attributes
        The names of the group columns.
    threshold
        The score from which on the decision is positive. None: decisions were given, or are the
        class with the highest score.
    scored
        Whether there are scores.
    bins
        The number of bins of the histograms: [i/bins, (i+1)/bins); 1 lies in the last.
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
        """The classes whose scores are summed: the positive one of two, or all of more."""
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
        """Return the spec of merged sums: with the fewer bins; all else must be the same."""
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
    variance: float = 0.0  # of the noise on each count of the finest table
    names: str = ""  # of groups and classes: "declared" or "from the data"
    min_cell: int = 0
    suppressed: int = 0  # cells with 1 to min_cell - 1 rows, withheld


@dataclass(frozen=True, eq=False)
class SiteTables:
    """The tables (label, decision, column) of one site by group, and the rows left out of them."""

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
    """Add the arrays of `more` to those of the same group in `total`."""
    for group, array in more.items():
        total[group] = total[group] + array if group in total else array


@dataclass(frozen=True, eq=False)
class SiteSums:
    """The sums of any number of sites.

    Laws: `+` is associative and commutative, `SiteSums()` is its zero, and the sums of a union of
    rows are the sum of those of its parts. Sites of one name are one site: their rows add up.
    Sites without a name are different sites: added to others they are called "site 1", "site 2",
    ... in the order in which they come.

    Files say of few rows only that they lie in several bins. `histogram` has them spread evenly
    over these bins, and `blur` says how far that may be off, (3, label, decision, score, bin): what
    to add to the histogram if all such rows lay in the first of their bins; in the last; and, in
    bin 0, how far off the sum of the cell's scores may be. A group without an entry is exact.
    """

    spec: MeasurementSpec | None = None  # None: no site
    sites: Mapping[str, SiteTables] = field(default_factory=dict)
    histogram: Mapping[Group, np.ndarray] = field(default_factory=dict)  # of all sites together
    blur: Mapping[Group, np.ndarray] = field(default_factory=dict)
    numbered: tuple[str, ...] = ()  # names of sites that were measured without one

    def __add__(self, other: "SiteSums") -> "SiteSums":
        return merge((self, other)) if isinstance(other, SiteSums) else NotImplemented

    def __radd__(self, other: Any) -> "SiteSums":
        """For `sum(...)`, which starts at 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def require_spec(self) -> MeasurementSpec:
        """Return what was measured; raise a `FedgftError` if no site is in the sums."""
        if self.spec is None:
            raise FedgftError("these are the sums of nothing: no site is in them", kind="data")
        return self.spec

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of all sites, sorted, "not recorded" last."""
        found = {group for site in self.sites.values() for group in site.tables}
        return tuple(sorted(found, key=group_sort_key))

    def rows(self) -> float:
        """Return the number of rows that were counted."""
        tables = (table for site in self.sites.values() for table in site.tables.values())
        return float(sum(table[..., COUNT].sum() for table in tables))


def merge(parts: Iterable[SiteSums]) -> SiteSums:
    """Return the sum of all parts, in one pass that holds one part at a time.

    Raises a `FedgftError` where parts measured different things (see `MeasurementSpec.combine`).
    """
    spec: MeasurementSpec | None = None
    named: dict[str, SiteTables] = {}
    unnamed: list[SiteTables] = []
    histogram: dict[Group, np.ndarray] = {}
    blur: dict[Group, np.ndarray] = {}
    for part in parts:
        check_instance(
            "sums", part, SiteSums, "measure() makes them, read_sums() reads them from a file"
        )
        if part.spec is None:
            continue
        common = part.spec if spec is None else spec.combine(part.spec)
        if spec is not None and spec.bins != common.bins:
            histogram = _coarsen_all(histogram, common.bins)
            blur = _coarsen_all(blur, common.bins)
        spec = common
        for name, site in part.sites.items():
            if name == "" or name in part.numbered:
                unnamed.append(site)
            else:
                named[name] = named[name] + site if name in named else site
        _add_arrays(histogram, _coarsen_all(part.histogram, spec.bins))
        _add_arrays(blur, _coarsen_all(part.blur, spec.bins))
    if spec is None:
        return SiteSums()
    numbered = _number_sites(unnamed, named)
    sites = dict(sorted(named.items())) | numbered
    return SiteSums(spec, sites, histogram, blur, numbered=tuple(filter(None, numbered)))


def _number_sites(
    unnamed: list[SiteTables], named: Mapping[str, SiteTables]
) -> dict[str, SiteTables]:
    """Name sites that have no name: "" for a single one, else numbers that no other site has."""
    if len(unnamed) == 1 and not named:
        return {"": unnamed[0]}
    free = (name for name in map("site {}".format, count(1)) if name not in named)
    return dict(zip(free, unnamed, strict=False))


def _coarsen_all(histograms: Mapping[Group, np.ndarray], bins: int) -> dict[Group, np.ndarray]:
    """The same rows in fewer bins (the last axis), whose number divides the old one."""
    return {
        group: array.reshape(*array.shape[:-1], bins, -1).sum(-1)
        for group, array in histograms.items()
    }


def group_sort_key(group: Group) -> tuple:
    """Return the key that sorts groups: numbers as numbers before words, "not recorded" last."""
    return tuple((value is None, _number_or_inf(value), value or "") for value in group)


def _number_or_inf(value: str | None) -> float:
    """Return the number that a text spells, or infinity."""
    try:
        number = float(value) if value is not None else np.inf
        return number if number == number else np.inf
    except ValueError:
        return np.inf
