"""What leaves a client: by label and group, the number of rows, and their scores and decisions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from fedgft.arguments import array_of, one_of, whole_number
from fedgft.errors import FedgftError
from fedgft.metrics.catalog import get_metric
from fedgft.metrics.metric import Metric
from fedgft.types import Index, Price, Probs, Statistics, Value

Kind = Literal["soft", "hard"]
"soft: of scores. hard: of decisions."

MOST_GROUPS = 100_000
ROUNDED = 0.01  # how far from 1 a row may sum up: half precision, or decimals cut off in a file


@dataclass(frozen=True)
class Tally:
    """Sums over rows by label (axis `c`) and group (axis `k`; its last entry: not recorded).

    Every metric of the catalogue, soft (scores) and hard (decisions), is read from these.
    Law: tallies add, and `Tally.of(rows)` of a union is the sum of its parts.
    """

    count: np.ndarray  # (..., c, k)
    score: np.ndarray  # (..., c, k, c): summed probabilities
    decision: np.ndarray  # (..., c, k, c): how often each class was chosen

    @classmethod
    def of(cls, probs: Probs, labels: Index, groups: Index, *, num_groups: int) -> "Tally":
        """The sums of these rows.

        `probs` (n, classes) holds probabilities, `labels` and `groups` (n,) hold indices, and
        group -1 is not recorded.
        """
        probs = _probabilities(probs)
        rows, classes = probs.shape
        num_groups = whole_number("num_groups", num_groups, least=1, most=MOST_GROUPS)
        labels = _indices("labels", labels, rows, 0, classes)
        groups = _indices("groups", groups, rows, -1, num_groups)
        chosen = np.zeros((rows, classes))
        chosen[np.arange(rows), probs.argmax(1)] = 1.0

        def total(values: np.ndarray) -> np.ndarray:
            out = np.zeros((classes, num_groups + 1, *values.shape[1:]))
            np.add.at(out, (labels, groups), values)  # -1 is the last entry
            return out

        return cls(total(np.ones(rows)), total(probs), total(chosen))

    def map(self, function: Callable[[np.ndarray], Any]) -> "Tally":
        """The same function on each array; leading axes only, please."""
        return Tally(function(self.count), function(self.score), function(self.decision))

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.count + other.count, self.score + other.score, self.decision + other.decision
        )

    def __getitem__(self, index: Any) -> "Tally":
        return self.map(lambda array: array[index])

    def replaced(self, index: Any, other: "Tally") -> "Tally":
        """A copy in which the entries at `index`, of leading axes, are those of another tally."""

        def put(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
            out = mine.copy()
            out[index] = theirs
            return out

        return Tally(
            put(self.count, other.count),
            put(self.score, other.score),
            put(self.decision, other.decision),
        )

    def sum(self, axis: int = 0) -> "Tally":
        return self.map(lambda array: array.sum(axis))

    def rows(self) -> Value:
        return self.count.sum((-2, -1))

    def accuracy(self) -> Value:
        """Share of right decisions; rows without a group count too."""
        right = np.einsum("...cgc->...", self.decision)
        with np.errstate(invalid="ignore"):
            return right / self.rows()

    def statistics(self, metric: str | Metric, kind: Kind) -> Statistics:
        """The metric's sums: (..., 2, v, g), over the rows whose group is recorded."""
        metric = get_metric(metric)
        one_of("kind", kind, get_args(Kind))
        slope, offset = metric.affine(self.count.shape[-2])
        mass = {"soft": self.score, "hard": self.decision}[kind][..., :-1, :]
        return np.einsum("svyc,...ygc->...svg", slope, mass) + np.einsum(
            "svy,...yg->...svg", offset, self.count[..., :-1]
        )

    def gap(self, metric: str | Metric, kind: Kind) -> Value:
        """The largest difference between groups; NaN where a group has no row of the event."""
        return get_metric(metric).readout(self.statistics(metric, kind))


def _probabilities(probs: Any) -> np.ndarray:
    """Finite shares of one; a NaN would be counted as a decision for class 0."""
    array = array_of("probs", probs)
    if array.ndim != 2 or array.dtype.kind not in "fiub" or array.shape[1] < 2:
        raise FedgftError(
            f"probs must be numbers (rows, classes), not {array.dtype} of shape {array.shape}"
        )
    if not np.isfinite(array).all():
        raise FedgftError("probs hold NaN or infinity: the model has no answer for some rows")
    inside = ((array >= 0) & (array <= 1)).all()
    if not inside or (np.abs(array.sum(1, dtype=np.float64) - 1) > ROUNDED).any():
        raise FedgftError("probs must lie in [0, 1] and add up to 1 in every row")
    return array


def _indices(name: str, values: Any, rows: int, least: int, known: int) -> np.ndarray:
    """Whole numbers from `least` to `known` - 1, one a row."""
    array = array_of(name, values)
    if array.shape != (rows,):
        raise FedgftError(f"{name} must have the shape ({rows},), as probs, not {array.shape}")
    if not rows:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise FedgftError(f"{name} must hold indices (whole numbers), not {array.dtype}")
    low, high = array.min().item(), array.max().item()
    if low < least or high >= known:
        wrong = low if low < least else high
        raise FedgftError(f"{name} holds the index {wrong}; they go from {least} to {known - 1}")
    return array


def stack(tallies: list[Tally]) -> Tally:
    """Tallies of one shape, along a new first axis."""
    return Tally(
        np.stack([t.count for t in tallies]),
        np.stack([t.score for t in tallies]),
        np.stack([t.decision for t in tallies]),
    )


def concatenate(tallies: list[Tally]) -> Tally:
    """One after the other, along the first axis they have."""
    return Tally(
        np.concatenate([t.count for t in tallies]),
        np.concatenate([t.score for t in tallies]),
        np.concatenate([t.decision for t in tallies]),
    )


def price(metric: Metric, cotangent: Statistics, classes: int) -> Price:
    """d<cotangent, statistics>/dp for a row of each label and group: (..., c, g + 1, c).

    Rows without a recorded group have the price zero.
    """
    slope, _ = metric.affine(classes)
    table = np.einsum("svyc,...svg->...ygc", slope, cotangent)
    return np.concatenate((table, np.zeros_like(table[..., :1, :])), axis=-2)
