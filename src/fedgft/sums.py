"""The data that leaves a client or site: sums over its rows, never the rows themselves.

- `Sums` holds, by label and group, the number of rows and the sums of their scores and decisions.
  Every metric of the catalog follows from these three arrays. The simulator, the penalties and the
  federation compute with them, so a `Sums` holds only arrays, which may have leading axes.
  For a message, `Sums.to_record` and `Sums.from_record` convert them to lists and back.

`fedgft.site_sums` has the sums that sites send as files. `RecordReader` checks the format of
everything that arrives in such a file or in a message. `Sums.check` checks that the numbers can be
sums over rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics.catalog import get_metric
from fedgft.metrics.functions import ROUNDING
from fedgft.metrics.group_axis import GroupAxis, bind_metric
from fedgft.metrics.metric import Index, Kind, Metric, Probs, Statistics, Value
from fedgft.validation import as_array, check_choice, check_integer

MAX_GROUPS = 100_000
MAX_ROWS = 1e12  # largest number of rows in a message
MAX_NAMES = 1000  # largest number of classes, and of groups, in a message
MAX_WIRE_NUMBERS = 10_000  # largest size of an array in a message
MAX_WHOLE_NUMBER = 2**53  # a float represents every whole number up to this one exactly
SUM_NAMES = ("count", "score", "decision")
TYPE_NAMES = {list: "a list", dict: "an object", str: "a text"}


@dataclass(frozen=True)
class Sums:
    """Sums over rows by label (axis `c`) and group (axis `k`).

    The last entry of the group axis holds the rows whose group is not recorded. Every metric of the
    catalog, soft (of scores) and hard (of decisions), is computed from these sums. Where rows have
    weights, all three are sums of weights times values. Law: `Sums.of` of a union of rows is the
    sum of the `Sums.of` of its parts. All arrays may have the same leading axes, such as runs or
    clients.
    """

    count: np.ndarray  # (..., c, k)
    score: np.ndarray  # (..., c, k, c): summed probabilities
    decision: np.ndarray  # (..., c, k, c): how often each class was chosen
    axis: GroupAxis | None = None  # what the entries of the group axis mean; None: groups

    @classmethod
    def of(
        cls,
        probs: Probs,
        labels: Index,
        groups: Index,
        *,
        num_groups: int,
        weights: np.ndarray | None = None,
    ) -> "Sums":
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
        weights
            (n,): how much each row counts; None: 1.
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
            if weights is not None:
                values = values * weights.reshape(-1, *[1] * (values.ndim - 1))
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
            **{name: getattr(self, name).ravel().astype(float).tolist() for name in SUM_NAMES},
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
        arrays = map(function, self.arrays, *(other.arrays for other in others))
        return Sums(*arrays, axis=self.axis)

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
        metric = self.bind(metric)
        check_choice("kind", kind, get_args(Kind))
        slope, offset = metric.affine(self.count.shape[-2])
        mass = {"soft": self.score, "hard": self.decision}[kind][..., :-1, :]
        found = np.einsum("svyc,...ygc->...svg", slope, mass) + np.einsum(
            "svy,...yg->...svg", offset, self.count[..., :-1]
        )
        return metric.arrange(found)

    def gap(self, metric: str | Metric, kind: Kind) -> Value:
        """Return the largest difference between groups; NaN if a group has no row of the event."""
        metric = self.bind(metric)
        return metric.readout(self.statistics(metric, kind))

    def bind(self, metric: str | Metric) -> Metric:
        """Return the metric of the groups behind the axis of these sums."""
        return bind_metric(get_metric(metric), self.axis)

    def by_group(self) -> "Sums":
        """Return the sums by group alone: strata added up, randomized response corrected."""
        axis = self.axis
        if axis is None:
            return self

        def merge(array: np.ndarray) -> np.ndarray:  # groups last
            merged = axis.merge(array)
            known = axis.correct(merged[..., :-1])
            return np.concatenate((known, merged[..., -1:]), axis=-1)

        score, decision = (
            np.moveaxis(merge(np.moveaxis(table, -2, -1)), -1, -2)
            for table in (self.score, self.decision)
        )
        return Sums(merge(self.count), score, decision)

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
    return Sums(*map(np.stack, zip(*(s.arrays for s in sums), strict=True)), axis=sums[0].axis)


def concatenate(sums: list[Sums]) -> Sums:
    """Concatenate sums along their first axis."""
    arrays = map(np.concatenate, zip(*(s.arrays for s in sums), strict=True))
    return Sums(*arrays, axis=sums[0].axis)


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
