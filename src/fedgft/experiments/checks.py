"""What can be seen to be wrong with a federation before anything is trained on it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedgft.data.dataset import Dataset, Federation
from fedgft.errors import FedgftError
from fedgft.metrics import Metric

SHOWN = 8  # names in a message
ALIKE = 0.01  # shares of a label that differ by less may be taken as equal


def check_groups(federation: Federation, metric: Metric) -> None:
    """Training needs a row of the event in every group; those without are named."""
    data = federation.dataset
    if len(data.group_names) < 2:
        found = f"only {data.group_names[0]!r}" if data.group_names else "none"
        raise FedgftError(
            f"{data.name}: fairness compares groups, and the column of --group has {found}"
        )
    empty = empty_groups(federation, metric)
    if empty:
        names = ", ".join(repr(data.group_names[g]) for g in empty[:SHOWN])
        more = f" and {len(empty) - SHOWN} more" if len(empty) > SHOWN else ""
        raise FedgftError(
            f"{data.name}: no training row that {metric.title} asks for in group {names}{more}; "
            "--exclude-empty leaves such groups out"
        )


def empty_groups(federation: Federation, metric: Metric) -> list[int]:
    """Groups without a training row of some event of the metric."""
    data, classes = federation.dataset, len(federation.dataset.classes)
    count = _counts(federation)
    empty = count.sum(0) == 0
    proper = metric.proper_conditions(classes)
    events = np.einsum("vy,yg->vg", metric.affine(classes)[1][1], count)
    empty |= (events[proper] == 0).any(0)  # where the event is a decision, nobody knows yet
    return [g for g in range(len(data.group_names)) if empty[g]]


def without_groups(dataset: Dataset, groups: Sequence[int]) -> Dataset:
    """The same rows, those of some groups as "not recorded"."""
    kept = [g for g in range(len(dataset.group_names)) if g not in set(groups)]
    number = np.full(len(dataset.group_names) + 1, -1)  # -1 stays -1
    number[kept] = np.arange(len(kept))
    names = ", ".join(repr(dataset.group_names[g]) for g in groups)
    said = f"{dataset.name}: left out of the comparison, for want of training rows: {names}"
    return replace(
        dataset,
        groups=number[dataset.groups],
        group_names=tuple(dataset.group_names[g] for g in kept),
        notes=(*dataset.notes, said),
    )


def contradiction(dataset: Dataset, metric: Metric) -> str | None:
    """Why metrics that were asked for together cannot all be zero, where that is so.

    A decision between two classes has two rates in each group, those of true and of false
    positives; with the share of positives b they give the selection rate and the precision. Any
    three of these four, equal in groups of different b, leave only decisions that never accept a
    negative, or no positive, or do not look at the label. (Equal accuracy may come for free.)
    """
    if len(dataset.classes) != 2:
        return None
    # of a metric that somebody has added nothing is known here, and nothing is said
    demands = {name for part, _ in metric.parts for name in EQUATIONS.get(part.name, ())}
    if len(demands) <= 2:
        return None
    groups = (dataset.groups == g for g in range(len(dataset.group_names)))
    share = [dataset.labels[own].mean() for own in groups if own.any()]
    if np.ptp(share) < ALIKE:
        return None
    return (
        f"{metric.name} asks for equal {', '.join(sorted(demands))} at once, and the groups differ "
        f"in how many are positive ({100 * min(share):.0f}% to {100 * max(share):.0f}%): two rates "
        "of a decision cannot meet three demands, unless it accepts no negative or ignores the "
        "label. Training will end, with a compromise; a smaller weight (0.5*cal) gives way first"
    )


EQUATIONS = {
    "sp": ("selection rates",),
    "eop": ("true-positive rates",),
    "fpr": ("false-positive rates",),
    "eo": ("true-positive rates", "false-positive rates"),
    "cal": ("precision",),
    "acc": (),
}


def _counts(federation: Federation) -> np.ndarray:
    """Training rows by label and group."""
    data, rows = federation.dataset, federation.rows
    known = data.groups[rows] >= 0
    count = np.zeros((len(data.classes), len(data.group_names)))
    np.add.at(count, (data.labels[rows][known], data.groups[rows][known]), 1)
    return count
