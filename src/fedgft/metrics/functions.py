"""The metrics as plain functions, in the convention of scikit-learn and Fairlearn.

`y_pred` holds decisions or scores. For labels 0 and 1, a score is P(Y=1) and a decision is a score
of 0 or 1, so both are read in the same way: decisions give the hard gap, scores the soft gap. For
labels of any other kind, `y_pred` holds predicted labels. An (n, classes) array is read as
probabilities in the order of the sorted classes.
"""

import warnings
from typing import Any

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics.catalog import get_metric
from fedgft.metrics.metric import Metric
from fedgft.validation import check_indices

ROUNDING = 0.01  # largest difference of a row's sum of probabilities from 1; fits half precision


class NotEstimableWarning(UserWarning):
    """A group has no row to take a rate from: the gap is NaN, which is not the same as fair."""


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
        order of the sorted classes.
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
    metric = get_metric(metric)
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
        raise FedgftError("y_true holds fractions or infinity, which are no classes")
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
    held = set(y_true.tolist())
    strange = [p for p in y_pred.tolist() if p not in held]
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
    """Return max - min over groups of P(Yhat=1 | A).

    Also called demographic parity. With more than two classes, the largest gap over all classes.

    Parameters and result are those of `gap`.

    Examples
    --------
    >>> statistical_parity_difference([1, 0, 1, 0], [1, 1, 1, 0], sensitive_features=list("aabb"))
    0.5
    """
    return gap("sp", y_true, y_pred, sensitive_features, sample_weight)


def equal_opportunity_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return max - min over groups of the true-positive rate P(Yhat=1 | Y=1, A).

    Parameters and result are those of `gap`.
    """
    return gap("eop", y_true, y_pred, sensitive_features, sample_weight)


def equalized_odds_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return the larger of the gaps in true-positive and in false-positive rate.

    max over y of (max - min over groups of P(Yhat=1 | Y=y, A)).

    Parameters and result are those of `gap`.
    """
    return gap("eo", y_true, y_pred, sensitive_features, sample_weight)


def predictive_parity_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return max - min over groups of the precision P(Y=1 | Yhat=1, A).

    The paper calls it well-calibration.

    Parameters and result are those of `gap`.
    """
    return gap("cal", y_true, y_pred, sensitive_features, sample_weight)


def accuracy_parity_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return max - min over groups of the accuracy P(Yhat=Y | A).

    Parameters and result are those of `gap`.
    """
    return gap("acc", y_true, y_pred, sensitive_features, sample_weight)


def false_positive_rate_difference(
    y_true: Any, y_pred: Any, *, sensitive_features: Any, sample_weight: Any = None
) -> float:
    """Return max - min over groups of the false-positive rate P(Yhat=1 | Y=0, A).

    Parameters and result are those of `gap`.
    """
    return gap("fpr", y_true, y_pred, sensitive_features, sample_weight)


demographic_parity_difference = statistical_parity_difference  # the name in Fairlearn
