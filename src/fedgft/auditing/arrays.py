"""Arrays, lists and frames in memory as the table that `measure` counts."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from fedgft.errors import FedgftError
from fedgft.validation import NO_NUMBERS_AS_LABELS, as_array, format_value


def build_table(
    y_true: Any,
    y_pred: Any,
    features: Mapping[str, Any],
    scores: Mapping[str, Any],
    **more: Mapping[str, Any],
) -> pl.DataFrame:
    """Return the arguments of `measure` as a table with one column per array.

    Parameters
    ----------
    y_true, y_pred
        Labels and decisions. `y_pred` is None if there are only scores.
    features, scores
        The values of each attribute, by its name, and the columns of scores, by their names.
    more
        Further columns by name, for each argument: a column is called like the argument, then its
        name, if it has one.
    """
    frame = {"y_true": to_series("y_true", y_true)}
    named = {f"sensitive_features {name}": values for name, values in features.items()}
    for argument, columns in more.items():
        named |= {f"{argument} {name}".strip(): values for name, values in columns.items()}
    frame |= {name: to_series(name, values) for name, values in named.items()}
    for name, column in scores.items():
        _check_finite(name, column)
        frame[name] = to_series(name, column)
    if y_pred is not None:
        frame["y_pred"] = to_series("y_pred", y_pred)
    _refuse_fractions("y_true", frame["y_true"])
    for name, series in frame.items():
        if len(series) != len(frame["y_true"]):
            raise FedgftError(f"{name} has {len(series)} rows, y_true has {len(frame['y_true'])}")
    return pl.DataFrame(frame)


def _refuse_fractions(name: str, labels: pl.Series) -> None:
    """Raise an error if labels are numbers with fractions, which are no classes."""
    if labels.dtype.is_float():
        known = labels.fill_nan(None).drop_nulls()
        if (known != known.round()).any():
            text = f"holds fractions, which are no classes; {NO_NUMBERS_AS_LABELS}"
            raise FedgftError(text, field=name, kind="unsupported")


def are_scores(y_pred: Any) -> bool:
    """Return whether `y_pred` holds scores, not decisions.

    It does if it has two axes or a number between 0 and 1: a decision is a label, and no label is
    such a fraction.
    """
    array = as_array("y_pred", y_pred)
    if array.dtype == object and array.ndim == 1:  # numbers with None among them
        known = [v for v in array.tolist() if v is not None]
        array = np.array(known if all(isinstance(v, float) for v in known) else [], dtype=float)
    if array.ndim == 2:
        return True
    return array.dtype.kind == "f" and bool(((array > 0) & (array < 1)).any())


def holds_text(values: Any) -> bool:
    """Return whether a column in memory holds texts; "10" comes before "9" among texts."""
    if isinstance(values, pl.Series):
        return values.dtype in (pl.String, pl.Categorical, pl.Enum)
    array = as_array("y_true", values)
    if array.dtype.kind == "O":
        return any(isinstance(value, str) for value in array.ravel().tolist())
    return array.dtype.kind == "U"


def split_attributes(features: Any) -> dict[str, Any]:
    """Return the values of each attribute by its name."""
    found = split_columns(features)
    if not found:
        raise FedgftError("`sensitive_features` holds no column: name at least one attribute")
    return found


def split_columns(features: Any, name: str = "group") -> dict[str, Any]:
    """Return the columns of a mapping, a frame or an array by name; one column has one name.

    A column without a name is called `name`.
    """
    if isinstance(features, Mapping):
        return {str(name): values for name, values in features.items()}
    if hasattr(features, "columns"):
        return {str(name): features[name] for name in features.columns}
    array = np.asarray(features, dtype=object)
    if array.ndim == 2:
        return {f"{name} {i + 1}": array[:, i] for i in range(array.shape[1])}
    return {str(getattr(features, "name", None) or name): features}


def split_scores(scores: Any) -> dict[str, Any]:
    """Return the columns of scores by name.

    An array with one axis is one column; an array with two axes has one column per class.
    """
    if scores is None:
        return {}
    array = as_array("scores", scores)
    if array.ndim == 1:
        return {"scores": scores}
    if array.ndim != 2:
        raise FedgftError(
            "scores must have one value per row, or one column per class, "
            f"not the shape {array.shape}"
        )
    return {f"scores {i}": array[:, i] for i in range(array.shape[1])}


def to_series(name: str, values: Any) -> pl.Series:
    """A column of numbers or of text, with null where a value is missing."""
    if isinstance(values, pl.Series):
        return values.cast(pl.String) if values.dtype == pl.Categorical else values
    if np.ma.isMaskedArray(values):
        known = np.array(values.data, dtype=object)
        known[np.ma.getmaskarray(values)] = None
        values = known
    if isinstance(values, list | tuple):  # NumPy would turn a NaN among texts into the text "nan"
        numeric = all(v is None or type(v) in (int, float) for v in values)
        values = np.array(values, dtype=float if numeric else object)
    array = as_array(name, values)
    if array.ndim != 1:
        raise FedgftError(f"{name} must have one axis, not {array.ndim}")
    if array.dtype.kind in "biuf":
        return pl.Series(name, array)
    if array.dtype.kind in "cmM":
        raise FedgftError(f"{name} must hold numbers or text, not {array.dtype}")
    if array.dtype.kind == "U":
        return pl.Series(name, array)
    try:  # much faster than the loop below, and enough where every value is text or None
        return pl.Series(name, array.tolist(), dtype=pl.String, strict=True)
    except (TypeError, ValueError):
        pass
    nested = [v for v in array.tolist() if isinstance(v, list | tuple | dict | set | np.ndarray)]
    if nested:
        raise FedgftError(f"{name} must hold one value per row, not {format_value(nested[0])}")
    return pl.Series(name, [to_text(v) for v in array.tolist()], dtype=pl.String)


def _check_finite(name: str, values: Any) -> None:
    """Raise an error if a score is NaN or infinite; a missing score (None, null) is allowed."""
    if isinstance(values, pl.Series):
        finite = not values.dtype.is_float() or bool(values.drop_nulls().is_finite().all())
    elif isinstance(values, np.ndarray) and values.dtype.kind == "f":
        finite = bool(np.isfinite(values).all())
    else:
        items = values if isinstance(values, list | tuple) else as_array(name, values).tolist()
        finite = not any(isinstance(v, float) and not math.isfinite(v) for v in items)
    if not finite:
        raise FedgftError(
            f"{name} hold NaN or infinity (of y_pred, if it holds the scores): the model has no "
            "answer for some rows; leave them out, or write None where none was asked for"
        )


def to_text(value: Any) -> Any:
    """Return a value as text, or None if it is missing. 1.0 becomes "1", as in a file."""
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        return None
    text = str(value)
    return text[:-2] if text.endswith(".0") and text[:-2].lstrip("-").isdigit() else text
