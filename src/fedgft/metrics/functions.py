"""The metrics as plain functions, in the convention of scikit-learn and Fairlearn; and decisions.

`y_pred` holds decisions or scores. For labels 0 and 1, a score is P(Y=1) and a decision is a score
of 0 or 1, so both are read in the same way: decisions give the hard gap, scores the soft gap. For
labels of any other kind, `y_pred` holds predicted labels. An (n, classes) array is read as
probabilities in the order of the sorted classes.

The functions at the end describe the decisions behind a gap: selection rates, accuracy compared
with a constant model, and collapse. A model that decides the same for all rows has a gap of zero,
so a gap alone does not say that a model is fair and useful. These functions read `Sums` and keep
its leading axes (...).
"""

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics.catalog import check_one_threshold, check_over_all_rows, get_metric
from fedgft.metrics.metric import Metric, Value
from fedgft.validation import NO_NUMBERS_AS_LABELS, check_indices

if TYPE_CHECKING:
    from fedgft.sums import Sums

ROUNDING = 0.01  # largest difference of a row's sum of probabilities from 1; fits half precision
# A model has collapsed if fewer than this share of rows get a class other than its usual class,
MAX_OTHER_SHARE = 0.005
MAX_OTHER_SHARE_IF_USELESS = 0.05  # (or this share, if it is no better than a constant model)
MAX_OTHER_RATIO = 0.25  # and fewer than this share of the rows whose label is another class


class NotEstimableWarning(UserWarning):
    """A group has no row to take a rate from: the gap is NaN, which is not the same as fair.

    Examples
    --------
    >>> import warnings
    >>> import fedgft
    >>> with warnings.catch_warnings(record=True) as found:
    ...     warnings.simplefilter("always")
    ...     fedgft.equal_opportunity_difference(
    ...         [1, 1, 0, 0], [1, 0, 1, 0], sensitive_features=["a", "a", "b", "b"]
    ...     )
    nan
    >>> issubclass(found[0].category, fedgft.NotEstimableWarning)
    True
    """


def gap(
    metric: str | Metric,
    y_true: Any,
    y_pred: Any,
    sensitive_features: Any,
    sample_weight: Any = None,
) -> float:
    """Return the largest difference between groups in the rate of a metric.

    Parameters
    ----------
    metric
        The metric or its short name.
    y_true
        (n,): labels.
    y_pred
        (n,): decisions, or scores P(Y=1) for labels 0 and 1; or (n, classes): probabilities in the
        order of the sorted classes. If a class does not occur, labels that are whole numbers are
        the indices of the columns.
    sensitive_features
        (n,) or (n, attributes): the group of each row; a row where a value is None or NaN belongs
        to no group.
    sample_weight
        (n,): the weight of each row, 1 by default.

    Returns
    -------
    float
        The gap. NaN, with a `NotEstimableWarning`, if a group has no row of the event.
    """
    check_indices(
        y_true=y_true,
        y_pred=y_pred,
        sensitive_features=sensitive_features,
        sample_weight=sample_weight,
    )
    metric = check_over_all_rows(check_one_threshold(get_metric(metric)))
    labels, probs = _one_hot_classes(_read_labels(y_true), _read_array("y_pred", y_pred, 2))
    groups, names = _one_hot_groups(sensitive_features)
    if sample_weight is None:
        sample_weight = np.ones(len(labels))
    weight = _read_array("sample_weight", sample_weight, 1, dtype=float)
    read = {"y_pred": probs, "sensitive_features": groups, "sample_weight": weight}
    for name, array in read.items():
        if len(array) != len(labels):
            raise FedgftError(f"{name} has {len(array)} rows, y_true has {len(labels)}")
    if not (np.isfinite(weight) & (weight >= 0)).all():
        raise FedgftError("sample_weight must hold one finite number of at least 0 per row")
    statistics = (metric.statistics(probs, labels, groups) * weight[:, None, None, None]).sum(0)
    empty = (statistics[1] == 0).any(axis=0)
    if not names or empty.any():
        which = ", ".join(repr(n) for n, e in zip(names, empty, strict=True) if e)
        text = f"{metric.title} is not estimable: no row of the event in {which or 'any group'}"
        warnings.warn(text, NotEstimableWarning, stacklevel=3)
        return float("nan")
    return float(metric.readout(statistics))


def _read_array(name: str, values: Any, most: int, **kinds: Any) -> np.ndarray:
    """Return an array with one value per row, or with up to `most` axes."""
    try:
        found = np.asarray(values)
        array = np.asarray(values, **kinds) if found.dtype.kind not in "cmM" else found
    except (TypeError, ValueError) as error:
        raise FedgftError(f"{name} cannot be read ({error})") from None
    if array.dtype.kind in "cmM":
        raise FedgftError(f"{name} must not hold {array.dtype}")
    if np.ma.is_masked(values):
        raise FedgftError(f"{name} is masked in places: leave those rows out")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if not 1 <= array.ndim <= most:
        raise FedgftError(f"{name} must hold one value per row, but has the shape {array.shape}")
    return array


def _read_labels(y_true: Any) -> np.ndarray:
    labels = _read_array("y_true", y_true, 1)
    if any(map(_is_missing, labels.tolist())):
        raise FedgftError("y_true lacks a label in some rows: leave them out")
    if labels.dtype.kind == "f" and not (np.isfinite(labels) & (labels == np.floor(labels))).all():
        text = f"holds fractions or infinity, which are no classes; {NO_NUMBERS_AS_LABELS}"
        raise FedgftError(text, field="y_true", kind="unsupported")
    plain = (str, bytes, int, float, np.generic)
    if labels.dtype == object and not all(isinstance(v, plain) for v in labels.tolist()):
        raise FedgftError("y_true must hold labels: numbers or text")
    return labels


def _one_hot_classes(y_true: np.ndarray, y_pred: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one-hot labels and one probability per class, both (n, c)."""
    if y_pred.ndim == 2:
        if y_pred.dtype.kind not in "biuf":
            raise FedgftError(
                f"y_pred with one column per class must hold numbers, not {y_pred.dtype}"
            )
        return _one_hot_columns(y_true, y_pred.astype(float))
    if set(np.unique(y_true).tolist()) <= {0, 1}:
        if y_pred.dtype.kind not in "biuf" and any(isinstance(v, str) for v in y_pred.tolist()):
            raise FedgftError("y_pred holds text, and the labels in y_true are numbers")
        score = _read_array("y_pred", y_pred, 1, dtype=float)
        if not ((score >= 0) & (score <= 1)).all():
            raise FedgftError("y_pred must hold decisions 0 or 1, or scores in [0, 1]")
        return np.eye(2)[y_true.astype(int)], np.stack((1 - score, score), 1)
    labels = set(y_true.tolist())
    strange = [p for p in y_pred.tolist() if p not in labels]
    if strange and (y_pred.dtype.kind not in "iuUT" or y_pred.dtype.kind != y_true.dtype.kind):
        raise FedgftError(
            f"y_pred holds {str(strange[0])[:40]!r}, which is no label of y_true: pass predicted "
            "labels, or probabilities with one column per class"
        )
    try:
        known, index = np.unique([*y_true.tolist(), *y_pred.tolist()], return_inverse=True)
    except TypeError:
        raise FedgftError("y_true and y_pred hold labels of different types") from None
    one_hot = np.eye(len(known))[index]
    return one_hot[: len(y_true)], one_hot[len(y_true) :]


def _one_hot_columns(y_true: np.ndarray, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return one-hot labels and the probabilities, for probabilities with a column per class."""
    known, index = np.unique(y_true, return_inverse=True)
    if set(known.tolist()) <= set(range(probs.shape[1])):
        index = y_true.astype(int)
    elif len(known) != probs.shape[1]:
        raise FedgftError(f"y_pred has {probs.shape[1]} columns for {len(known)} classes")
    inside = ((probs >= 0) & (probs <= 1)).all()
    if not inside or (np.abs(probs.sum(1) - 1) > ROUNDING).any():
        raise FedgftError(
            "y_pred with one column per class must hold probabilities: "
            "each in [0, 1], and every row with the sum 1"
        )
    return np.eye(probs.shape[1])[index], probs


def _one_hot_groups(sensitive_features: Any) -> tuple[np.ndarray, list[str]]:
    """Return one column per group, zeros where the group is None or NaN; and the groups' names."""
    values = _read_array("sensitive_features", sensitive_features, 2, dtype=object)
    values = values[:, None] if values.ndim == 1 else values
    # Keys are tuples, because the joined names of two different groups could be equal.
    keys = [None if any(map(_is_missing, row)) else tuple(map(str, row)) for row in values]
    found = sorted({key for key in keys if key is not None})
    column: dict[Any, int] = {key: i for i, key in enumerate(found)}
    one_hot = np.eye(len(found) + 1, len(found))[[column.get(key, len(found)) for key in keys]]
    return one_hot, [" & ".join(key) for key in found]


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN or a missing value of pandas.

    The types of pandas are compared by name, because pandas may not be installed.
    """
    nan = isinstance(value, float) and value != value
    return value is None or nan or type(value).__name__ in ("NAType", "NaTType")


def statistical_parity_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return max - min over groups of the selection rate P(Yhat=1 | A).

    Fairlearn calls it `demographic_parity_difference`; both names are this function. With more than
    two classes, the largest gap over all classes.

    Parameters
    ----------
    y_true
        (n,): labels.
    y_pred
        (n,): decisions, or scores P(Y=1) for labels 0 and 1; or (n, classes): probabilities in the
        order of the sorted classes. If a class does not occur, labels that are whole numbers are
        the indices of the columns.
    sensitive_features
        (n,) or (n, attributes): the group of each row; a row where a value is None or NaN belongs
        to no group.
    sample_weight
        (n,): the weight of each row; None (default): 1.

    Returns
    -------
    float
        The gap, from 0 to 1. NaN, with a `NotEstimableWarning`, if a group has no row of the event.

    Examples
    --------
    >>> import fedgft
    >>> y_true = [1, 1, 1, 0, 1, 1, 0, 0]
    >>> y_pred = [1, 1, 1, 0, 1, 0, 1, 0]
    >>> fedgft.statistical_parity_difference(y_true, y_pred, sensitive_features=list("aaaabbbb"))
    0.25
    """
    return gap("sp", y_true, y_pred, sensitive_features, sample_weight)


def equal_opportunity_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return max - min over groups of the true-positive rate P(Yhat=1 | Y=1, A).

    Parameters
    ----------
    y_true
        (n,): labels.
    y_pred
        (n,): decisions, or scores P(Y=1) for labels 0 and 1; or (n, classes): probabilities in the
        order of the sorted classes. If a class does not occur, labels that are whole numbers are
        the indices of the columns.
    sensitive_features
        (n,) or (n, attributes): the group of each row; a row where a value is None or NaN belongs
        to no group.
    sample_weight
        (n,): the weight of each row; None (default): 1.

    Returns
    -------
    float
        The gap, from 0 to 1. NaN, with a `NotEstimableWarning`, if a group has no row of the event.

    Examples
    --------
    >>> import fedgft
    >>> y_true = [1, 1, 1, 0, 1, 1, 0, 0]
    >>> y_pred = [1, 1, 1, 0, 1, 0, 1, 0]
    >>> fedgft.equal_opportunity_difference(y_true, y_pred, sensitive_features=list("aaaabbbb"))
    0.5
    """
    return gap("eop", y_true, y_pred, sensitive_features, sample_weight)


def equalized_odds_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return the larger of the gaps in true-positive and in false-positive rate.

    max over y of (max - min over groups of P(Yhat=1 | Y=y, A)).

    Parameters
    ----------
    y_true
        (n,): labels.
    y_pred
        (n,): decisions, or scores P(Y=1) for labels 0 and 1; or (n, classes): probabilities in the
        order of the sorted classes. If a class does not occur, labels that are whole numbers are
        the indices of the columns.
    sensitive_features
        (n,) or (n, attributes): the group of each row; a row where a value is None or NaN belongs
        to no group.
    sample_weight
        (n,): the weight of each row; None (default): 1.

    Returns
    -------
    float
        The gap, from 0 to 1. NaN, with a `NotEstimableWarning`, if a group has no row of the event.

    Examples
    --------
    >>> import fedgft
    >>> y_true = [1, 1, 1, 0, 1, 1, 0, 0]
    >>> y_pred = [1, 1, 1, 0, 1, 0, 1, 0]
    >>> fedgft.equalized_odds_difference(y_true, y_pred, sensitive_features=list("aaaabbbb"))
    0.5
    """
    return gap("eo", y_true, y_pred, sensitive_features, sample_weight)


def predictive_parity_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return max - min over groups of the precision P(Y=1 | Yhat=1, A).

    The paper calls it well-calibration.

    Parameters
    ----------
    y_true
        (n,): labels.
    y_pred
        (n,): decisions, or scores P(Y=1) for labels 0 and 1; or (n, classes): probabilities in the
        order of the sorted classes. If a class does not occur, labels that are whole numbers are
        the indices of the columns.
    sensitive_features
        (n,) or (n, attributes): the group of each row; a row where a value is None or NaN belongs
        to no group.
    sample_weight
        (n,): the weight of each row; None (default): 1.

    Returns
    -------
    float
        The gap, from 0 to 1. NaN, with a `NotEstimableWarning`, if a group has no row of the event.

    Examples
    --------
    >>> import fedgft
    >>> y_true = [1, 1, 1, 0, 1, 1, 0, 0]
    >>> y_pred = [1, 1, 1, 0, 1, 0, 1, 0]
    >>> fedgft.predictive_parity_difference(y_true, y_pred, sensitive_features=list("aaaabbbb"))
    0.5
    """
    return gap("predictive-parity", y_true, y_pred, sensitive_features, sample_weight)


def accuracy_parity_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return max - min over groups of the accuracy P(Yhat=Y | A).

    Parameters
    ----------
    y_true
        (n,): labels.
    y_pred
        (n,): decisions, or scores P(Y=1) for labels 0 and 1; or (n, classes): probabilities in the
        order of the sorted classes. If a class does not occur, labels that are whole numbers are
        the indices of the columns.
    sensitive_features
        (n,) or (n, attributes): the group of each row; a row where a value is None or NaN belongs
        to no group.
    sample_weight
        (n,): the weight of each row; None (default): 1.

    Returns
    -------
    float
        The gap, from 0 to 1. NaN, with a `NotEstimableWarning`, if a group has no row of the event.

    Examples
    --------
    >>> import fedgft
    >>> y_true = [1, 1, 1, 0, 1, 1, 0, 0]
    >>> y_pred = [1, 1, 1, 0, 1, 0, 1, 0]
    >>> fedgft.accuracy_parity_difference(y_true, y_pred, sensitive_features=list("aaaabbbb"))
    0.5
    """
    return gap("acc", y_true, y_pred, sensitive_features, sample_weight)


def false_positive_rate_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return max - min over groups of the false-positive rate P(Yhat=1 | Y=0, A).

    Parameters
    ----------
    y_true
        (n,): labels.
    y_pred
        (n,): decisions, or scores P(Y=1) for labels 0 and 1; or (n, classes): probabilities in the
        order of the sorted classes. If a class does not occur, labels that are whole numbers are
        the indices of the columns.
    sensitive_features
        (n,) or (n, attributes): the group of each row; a row where a value is None or NaN belongs
        to no group.
    sample_weight
        (n,): the weight of each row; None (default): 1.

    Returns
    -------
    float
        The gap, from 0 to 1. NaN, with a `NotEstimableWarning`, if a group has no row of the event.

    Examples
    --------
    >>> import fedgft
    >>> y_true = [1, 1, 1, 0, 1, 1, 0, 0]
    >>> y_pred = [1, 1, 1, 0, 1, 0, 1, 0]
    >>> fedgft.false_positive_rate_difference(y_true, y_pred, sensitive_features=list("aaaabbbb"))
    0.5
    """
    return gap("fpr", y_true, y_pred, sensitive_features, sample_weight)


demographic_parity_difference = statistical_parity_difference  # the name in Fairlearn


# Decisions


def constant_accuracy(sums: "Sums") -> Value:
    """Return the accuracy (...) of always predicting the most frequent class of these rows."""
    labels = sums.count.sum(-1)
    with np.errstate(invalid="ignore"):
        return labels.max(-1) / labels.sum(-1)


def balanced_accuracy(sums: "Sums") -> Value:
    """Return the mean recall (...): the share of correctly decided rows, averaged over classes.

    Classes without a row are left out. A constant model has the value 1 / (number of classes).
    """
    right = np.einsum("...cgc->...c", sums.decision)
    rows = sums.count.sum(-1)
    there = rows > 0
    recall = np.where(there, right / np.where(there, rows, 1.0), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return recall.sum(-1) / there.sum(-1)


def selection_rates(sums: "Sums") -> np.ndarray:
    """Return the share of each group's rows that get each class (..., g, c); NaN without rows."""
    chosen = sums.decision.sum(-3)[..., :-1, :]
    rows = sums.count.sum(-2)[..., :-1, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rows > 0, chosen / rows, np.nan)


def is_collapsed(sums: "Sums") -> np.ndarray:
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


def describe_decisions(
    sums: "Sums", classes: Sequence[str], groups: Sequence[str]
) -> dict[str, Any]:
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
    for group, rates in zip(groups, selection_rates(sums), strict=True):
        each = dict(zip(classes, map(_finite_or_none, rates), strict=True))
        selected[group] = each[classes[1]] if len(classes) == 2 else each
    return {
        "accuracy_constant": _finite_or_none(constant_accuracy(sums)),
        "balanced_accuracy": _finite_or_none(balanced_accuracy(sums)),
        "selection_rates": selected,
        "collapsed": bool(is_collapsed(sums)),
    }


def _finite_or_none(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
