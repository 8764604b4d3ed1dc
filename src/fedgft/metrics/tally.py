"""What leaves a client: by label and group, the number of rows, and their scores and decisions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedgft.metrics.metric import Metric
from fedgft.types import Index, Price, Probs, Statistics, Value

Kind = Literal["soft", "hard"]
"soft: of scores. hard: of decisions."


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
        """The sums of these rows; labels and groups are indices, and group -1 is not recorded."""
        rows, classes = probs.shape
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

    def sum(self, axis: int = 0) -> "Tally":
        return self.map(lambda array: array.sum(axis))

    def rows(self) -> Value:
        return self.count.sum((-2, -1))

    def accuracy(self) -> Value:
        """Share of right decisions; rows without a group count too."""
        right = np.einsum("...cgc->...", self.decision)
        with np.errstate(invalid="ignore"):
            return right / self.rows()

    def statistics(self, metric: Metric, kind: Kind) -> Statistics:
        """The metric's sums: (..., 2, v, g), over the rows whose group is recorded."""
        slope, offset = metric.affine(self.count.shape[-2])
        mass = {"soft": self.score, "hard": self.decision}[kind][..., :-1, :]
        return np.einsum("svyc,...ygc->...svg", slope, mass) + np.einsum(
            "svy,...yg->...svg", offset, self.count[..., :-1]
        )

    def gap(self, metric: Metric, kind: Kind) -> Value:
        return metric.readout(self.statistics(metric, kind))


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
