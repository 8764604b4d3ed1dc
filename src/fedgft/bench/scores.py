"""All numbers of the benchmark, from decisions per row.

A run of any method (a trained model, a decision rule, a submission from outside) is an array with
the probability of a positive decision for each row of the track's table: 0 or 1, unless a rule
tosses coins. `count_outcome` counts them by part, label and group; accuracies, gaps, intervals and
noise floors are computed from these counts alone. A row that is decided by a coin counts with its
probability, so the numbers are expectations over the coins.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from fedgft.bench.tracks import TrackSplit
from fedgft.errors import FedgftError
from fedgft.metrics import Metric
from fedgft.metrics.intervals import Interval, floor, gap_interval
from fedgft.metrics.metric import Value
from fedgft.sums import Sums

Part = Literal["train", "inner", "test"]
FEWEST_LOCAL = 20  # test rows that every group of a site needs for a local gap


@dataclass(frozen=True)
class Outcome:
    """Counts of rows by label, group and decision on each part, and per site on the test rows.

    The arrays are (..., label, group, decision) with any leading axes, such as those of candidates
    and seeds, which are the same for all four. The last entry of the group axis is for rows without
    a group. NaN: the run diverged, and has no decisions.

    Parameters
    ----------
    train
        The rows that the sites train on.
    inner
        The rows that the sites hold out for choices.
    test
        The test rows of all sites.
    sites
        (..., site, label, group, decision): the test rows of each site.
    """

    train: np.ndarray
    inner: np.ndarray
    test: np.ndarray
    sites: np.ndarray

    def sums(self, part: Part | Literal["sites"]) -> Sums:
        """Return the counts of one part as sums, which have decisions but no scores."""
        return sums_of_decisions(getattr(self, part))

    def accuracy(self, part: Part = "test") -> Value:
        """Return the share of right decisions on one part (...)."""
        return self.sums(part).accuracy()

    def gap(self, metric: Metric, part: Part = "test") -> Value:
        """Return the largest difference between groups on one part (...)."""
        return self.sums(part).gap(metric, "hard")

    def floor(self, metric: Metric, part: Part = "test") -> Value:
        """Return the noise floor of the gap on one part (...), NaN where a group is empty."""
        statistics = self.sums(part).statistics(metric, "hard")
        return np.where(np.isfinite(metric.readout(statistics)), floor(metric, statistics), np.nan)

    def interval(self, metric: Metric, part: Part = "test") -> Interval:
        """Return the limits of the 95% interval of the gap on one part, each (...)."""
        return gap_interval(metric, self.sums(part).statistics(metric, "hard"))

    def local_gap(self, metric: Metric) -> Value:
        """Return the largest gap on the test rows of one site (...).

        Only sites with at least `FEWEST_LOCAL` test rows in every group count; NaN without any.
        """
        counts = self.sites[..., :-1, :].sum((-3, -1))  # (..., site, group)
        gaps = self.sums("sites").gap(metric, "hard")
        usable = (counts >= FEWEST_LOCAL).all(-1) & np.isfinite(gaps)
        largest = np.where(usable, gaps, -np.inf).max(-1)
        return np.where(np.isfinite(largest), largest, np.nan)

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> "Outcome":
        """Apply a function to each of the four arrays."""
        return Outcome(**{f.name: function(getattr(self, f.name)) for f in fields(self)})

    def __getitem__(self, index: Any) -> "Outcome":
        return self.map(lambda array: array[index])

    def to_json(self) -> dict[str, Any]:
        """Return the counts as nested lists, with None for NaN, and whole numbers as integers."""
        return {f.name: to_lists(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Outcome":
        """Read what `to_json` returned."""
        return cls(**{f.name: np.array(record[f.name], dtype=float) for f in fields(cls)})


def stack_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Stack outcomes of one shape along a new first axis."""
    names = [f.name for f in fields(Outcome)]
    return Outcome(**{name: np.stack([getattr(o, name) for o in outcomes]) for name in names})


@dataclass(frozen=True, eq=False)
class OutcomeCounter:
    """Counts the decisions of many runs on one split.

    Parameters
    ----------
    cells
        (n,) the cell of each row in the table (part or site, label, group), flattened; rows of no
        part have the last cell.
    shape
        (2 + sites, labels, groups + 1): train, inner, then the test rows of each site.
    """

    cells: np.ndarray
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, split: TrackSplit) -> "OutcomeCounter":
        """Number the cells of the rows of one split."""
        federation = split.federation
        data = federation.dataset
        owner = np.asarray(split.owner, np.int64)
        shape = (2 + federation.num_clients, len(data.classes), len(data.group_names) + 1)
        block = np.full(len(data), -1, np.int64)
        block[federation.rows] = 0
        block[split.inner] = 1
        block[federation.test] = 2 + owner[federation.test]
        group = np.where(data.groups < 0, shape[2] - 1, data.groups)
        cells = (block * shape[1] + data.labels) * shape[2] + group
        cells[block < 0] = np.prod(shape)
        return cls(cells.astype(np.int32), shape)

    def count(self, decisions: np.ndarray) -> Outcome:
        """Count the decisions of one run, (n,): the probability of a positive one per row."""
        decisions = np.asarray(decisions, np.float64)
        _check_decisions(decisions, len(self.cells))
        size = int(np.prod(self.shape))
        rows = np.bincount(self.cells, minlength=size + 1)[:size].reshape(self.shape)
        total = np.bincount(self.cells, weights=decisions, minlength=size + 1)
        positive = total[:size].reshape(self.shape)
        table = np.stack((np.maximum(rows - positive, 0.0), positive), -1)
        sites = table[2:]
        return Outcome(train=table[0], inner=table[1], test=sites.sum(0), sites=sites)


def count_outcome(split: TrackSplit, decisions: np.ndarray) -> Outcome:
    """Count the decisions of one run on one split of a track.

    Parameters
    ----------
    split
        The split.
    decisions
        (n,) the probability of a positive decision for each row of the track's table; all NaN for a
        run that diverged.
    """
    return OutcomeCounter.of(split).count(decisions)


def count_decisions(
    labels: np.ndarray, groups: np.ndarray, decisions: np.ndarray, *, num_groups: int
) -> np.ndarray:
    """Count rows by label, group and decision, (2, groups + 1, 2).

    Parameters
    ----------
    labels, groups
        (n,) 0 or 1, and the index of the group or -1.
    decisions
        (n,) the probability of a positive decision.
    num_groups
        The number of groups.
    """
    _check_decisions(np.asarray(decisions, np.float64), len(labels))
    columns = num_groups + 1
    cells = labels * columns + np.where(groups < 0, num_groups, groups)
    rows = np.bincount(cells, minlength=2 * columns).reshape(2, columns)
    positive = np.bincount(cells, weights=decisions, minlength=2 * columns).reshape(2, columns)
    return np.stack((np.maximum(rows - positive, 0.0), positive), -1)


def sums_of_decisions(counts: np.ndarray) -> Sums:
    """Return counts (..., label, group, decision) as sums without scores."""
    return Sums(counts.sum(-1), np.full_like(counts, np.nan, dtype=float), counts)


def _check_decisions(decisions: np.ndarray, rows: int) -> None:
    if decisions.shape != (rows,):
        text = f"`decisions` must have one number per row, ({rows},), not {decisions.shape}"
        raise FedgftError(text, field="decisions")
    missing = np.isnan(decisions)
    if missing.any() and not missing.all():
        raise FedgftError("`decisions` hold NaN in some rows but not in all", field="decisions")
    if (decisions < 0).any() or (decisions > 1).any():
        raise FedgftError("`decisions` must lie between 0 and 1", field="decisions")


def to_lists(array: np.ndarray) -> list[Any]:
    """Return an array as nested lists that JSON can hold; None stands for NaN and infinity."""
    values = [_to_number(value) for value in array.ravel().tolist()]
    for size in reversed(array.shape[1:]):
        values = [values[i : i + size] for i in range(0, len(values), size)]
    return values


def _to_number(value: float) -> int | float | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else value
