"""Decisions behind a gap: selection rates, accuracy against a constant model, and collapse.

A model that decides the same for all rows has a gap of zero, so a gap alone does not say that
a model is fair and useful. All functions read `Sums`, whose leading axes are kept (...).
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedgft.metrics.metric import Metric
from fedgft.sums import Sums
from fedgft.types import Value

# A model has collapsed if fewer than this share of rows get a class other than its usual class,
MAX_OTHER_SHARE = 0.005
MAX_OTHER_SHARE_IF_USELESS = 0.05  # (or this share, if it is no better than a constant model)
MAX_OTHER_RATIO = 0.25  # and fewer than this share of the rows whose label is another class


def constant_accuracy(sums: Sums) -> Value:
    """Return the accuracy (...) of always predicting the most frequent class of these rows."""
    labels = sums.count.sum(-1)
    with np.errstate(invalid="ignore"):
        return labels.max(-1) / labels.sum(-1)


def balanced_accuracy(sums: Sums) -> Value:
    """Return the mean recall (...): the share of correctly decided rows, averaged over classes.

    Classes without a row are left out. A constant model has the value 1 / (number of classes).
    """
    right = np.einsum("...cgc->...c", sums.decision)
    rows = sums.count.sum(-1)
    there = rows > 0
    recall = np.where(there, right / np.where(there, rows, 1.0), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return recall.sum(-1) / there.sum(-1)


def selection_rates(sums: Sums) -> np.ndarray:
    """Return the share of each group's rows that get each class (..., g, c); NaN without rows."""
    chosen = sums.decision.sum(-3)[..., :-1, :]
    rows = sums.count.sum(-2)[..., :-1, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rows > 0, chosen / rows, np.nan)


def is_collapsed(sums: Sums) -> np.ndarray:
    """Return whether the model gives nearly all rows the same class (...).

    Let d be the share of rows that get a class other than the model's most frequent class, and m
    the share of rows whose label is another class. A model has collapsed if d < m / 4 and either
    d < 0.5%, or d < 5% and the model is no more accurate than always predicting the most frequent
    label. The result is False where training diverged.
    """
    rows = sums.rows()
    chosen = sums.decision.sum((-3, -2))
    labels = sums.count.sum(-1)
    usual = np.argmax(np.nan_to_num(chosen), axis=-1)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        other = 1 - np.take_along_axis(chosen, usual, -1)[..., 0] / rows
        wanted = 1 - np.take_along_axis(labels, usual, -1)[..., 0] / rows
        useless = sums.accuracy() <= constant_accuracy(sums)
        few = (other < MAX_OTHER_SHARE) | ((other < MAX_OTHER_SHARE_IF_USELESS) & useless)
        return np.asarray(few & (other < MAX_OTHER_RATIO * wanted))


def describe_decisions(sums: Sums, classes: Sequence[str], groups: Sequence[str]) -> dict[str, Any]:
    """Return a description of one model's decisions for JSON; None where a number is not known.

    Parameters
    ----------
    sums
        The sums of the model, without leading axes.
    classes, groups
        The names of the classes and of the groups.

    Returns
    -------
    dict
        `accuracy_constant`, `balanced_accuracy`, `collapsed`, and `selection_rates` by group: the
        rate of the positive class if there are two classes, else the rate of each class.
    """
    selected: dict[str, Any] = {}
    for group, own in zip(groups, selection_rates(sums), strict=True):
        each = dict(zip(classes, map(_finite_or_none, own), strict=True))
        selected[group] = each[classes[1]] if len(classes) == 2 else each
    return {
        "accuracy_constant": _finite_or_none(constant_accuracy(sums)),
        "balanced_accuracy": _finite_or_none(balanced_accuracy(sums)),
        "selection_rates": selected,
        "collapsed": bool(is_collapsed(sums)),
    }


def _finite_or_none(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def condition_names(metric: Metric, classes: Sequence[str]) -> tuple[str, ...]:
    """Return the conditions of the metric with the names of the classes: "class yes"."""

    def insert_name(found: re.Match[str]) -> str:
        at = int(found[2])
        return f"{found[1]} {classes[at]}" if at < len(classes) else found[0]

    known = metric.conditions(len(classes))
    return tuple(re.sub(r"\b(class|label) (\d+)\b", insert_name, text) for text in known)
