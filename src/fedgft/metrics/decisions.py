"""What the decisions behind a gap look like, from sums: how often each group is selected, how
accurate the model is beside a constant one, and whether it has collapsed into one.

A model that gives everybody the same decision has a gap of zero, so a gap alone does not say that
a model is fair and useful.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedgft.metrics.metric import Metric
from fedgft.metrics.tally import Tally
from fedgft.types import Value

RARE = 0.005  # other decisions in fewer rows than this: the model is constant
SELDOM = 0.05  # and where it is no more accurate than a constant model, in fewer than this
SHARE = 0.25  # other decisions are few where they are below this share of the other labels


def constant_accuracy(tally: Tally) -> Value:
    """(...): accuracy on these rows of always predicting their most frequent class."""
    labels = tally.count.sum(-1)
    with np.errstate(invalid="ignore"):
        return labels.max(-1) / labels.sum(-1)


def balanced_accuracy(tally: Tally) -> Value:
    """(...): mean over the classes of the share of their rows that is decided rightly (recall).

    Classes without a row are left out. A constant model has one over the number of classes.
    """
    right = np.einsum("...cgc->...c", tally.decision)
    rows = tally.count.sum(-1)
    there = rows > 0
    recall = np.where(there, right / np.where(there, rows, 1.0), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return recall.sum(-1) / there.sum(-1)


def selection_rates(tally: Tally) -> np.ndarray:
    """(..., g, c): of each group's rows, the share that is given each class; NaN without rows."""
    chosen = tally.decision.sum(-3)[..., :-1, :]
    rows = tally.count.sum(-2)[..., :-1, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rows > 0, chosen / rows, np.nan)


def collapsed(tally: Tally) -> np.ndarray:
    """(...), bool: the model gives nearly everybody the same class.

    With d the share of rows that are given another class and m the share of rows whose label is
    another class: d < m / 4, and either d < 0.5%, or d < 5% while the model is no more accurate
    than always predicting the most frequent class. False where training diverged.
    """
    rows = tally.rows()
    chosen, labels = tally.decision.sum((-3, -2)), tally.count.sum(-1)
    usual = np.argmax(np.nan_to_num(chosen), axis=-1)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        other = 1 - np.take_along_axis(chosen, usual, -1)[..., 0] / rows
        wanted = 1 - np.take_along_axis(labels, usual, -1)[..., 0] / rows
        useless = tally.accuracy() <= constant_accuracy(tally)
        few = (other < RARE) | ((other < SELDOM) & useless)
        return np.asarray(few & (other < SHARE * wanted))


def described(tally: Tally, classes: Sequence[str], groups: Sequence[str]) -> dict[str, Any]:
    """Of one model, for JSON: `accuracy_constant`, `balanced_accuracy`, `collapsed`, and
    `selection_rates` by group, of the positive one of two classes and else of each class. None
    where something is not known."""
    rates = selection_rates(tally)
    selected: dict[str, Any] = {}
    for group, own in zip(groups, rates, strict=True):
        each = {name: _known(rate) for name, rate in zip(classes, own, strict=True)}
        selected[group] = each[classes[1]] if len(classes) == 2 else each
    return {
        "accuracy_constant": _known(constant_accuracy(tally)),
        "balanced_accuracy": _known(balanced_accuracy(tally)),
        "selection_rates": selected,
        "collapsed": bool(collapsed(tally)),
    }


def _known(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def condition_names(metric: Metric, classes: Sequence[str]) -> tuple[str, ...]:
    """What each condition of the metric is, with the names of the classes: `class yes`."""

    def named(found: re.Match[str]) -> str:
        at = int(found[2])
        return f"{found[1]} {classes[at]}" if at < len(classes) else found[0]

    known = metric.conditions(len(classes))
    return tuple(re.sub(r"\b(class|label) (\d+)\b", named, text) for text in known)
