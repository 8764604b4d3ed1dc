"""`measure`: the sums of one site, from arrays or from a file."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.arguments import (
    array_of,
    check_indices,
    column_names,
    instance,
    path_of,
    real_number,
    shown,
    whole_number,
)
from fedgft.audit.answers import Names
from fedgft.audit.counting import Columns, OnRows, batches_of, count, sums_of
from fedgft.audit.private import suppress, with_noise
from fedgft.audit.sums import Sums
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import polars as pl

LARGEST_CELL = 1_000_000
BINS, NOISY_BINS = 100, 20  # noise goes on every bin, so a noisy histogram has fewer of them


def measure(
    y_true: Any,
    y_pred: Any,
    *,
    sensitive_features: Any,
    scores: Any = None,
    site: str = "",
    threshold: float = 0.5,
    bins: int | None = None,
    classes: Iterable[Any] = (),
    positive: Any = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
    min_cell: int = 0,
    epsilon: float | None = None,
    delta: float = 0.0,
) -> Sums:
    """The sums of one site's rows: all that has to leave it.

    `y_pred` holds decisions, or scores: P(positive) for two classes, or one column a class.
    `scores` may stand beside decisions. `sensitive_features` is one column or several (a frame, a
    dictionary, an array with two axes), None or NaN where a value is not recorded. Inputs may be
    lists or of numpy, pandas or polars; rows are matched by position, and pandas indices that say
    otherwise are an error. A prediction may be missing (None, and then the row is left out and
    counted as such), but a score of NaN or infinity is an error. `site` is the site's name.

    >>> a = measure([1, 0, 1, 0], [1, 1, 1, 0], sensitive_features=list("ffmm"), site="north")
    >>> b = measure([1, 1], [0, 1], sensitive_features=["f", "m"], site="south")
    >>> sum([a, b]).rows()
    6.0
    """
    import polars as pl

    instance("site", site, str)
    _check_numbers(threshold, bins, min_cell, epsilon, delta)
    if isinstance(classes, str) or not isinstance(classes, Iterable):
        raise FedgftError(f"classes must be a list of labels, not {shown(classes)}")
    if positive is not None and not isinstance(positive, str | bool | int | np.generic):
        raise FedgftError(f"positive must be a label, not {shown(positive)}")
    if values is not None and not isinstance(values, Mapping):
        raise FedgftError(f"values must be like {{'sex': ('f', 'm')}}, not {shown(values)}")
    features = _attributes(sensitive_features)
    check_indices(y_true=y_true, y_pred=y_pred, scores=scores,
                  sensitive_features=sensitive_features,
                  **{f"sensitive_features {name}": v for name, v in features.items()})  # fmt: skip
    if scores is None and _are_scores(y_pred):
        y_pred, scores = None, y_pred
    frame = {"y_true": _series("y_true", y_true)}
    frame |= {f"sensitive_features {name}": _series(name, v) for name, v in features.items()}
    groups = tuple(frame)[1:]
    columns = _score_columns(scores)
    frame |= {name: _series(name, _finite(name, values)) for name, values in columns.items()}
    if y_pred is not None:
        frame["y_pred"] = _series("y_pred", y_pred)
    for name, series in frame.items():
        if len(series) != len(frame["y_true"]):
            raise FedgftError(f"{name} has {len(series)} rows, y_true has {len(frame['y_true'])}")
    roles = Columns("y_true", groups, tuple(columns), None if y_pred is None else "y_pred",
                    threshold, _bins(bins, epsilon))  # fmt: skip
    names = Names(site, tuple(features), tuple(map(_text, classes)),
                  None if positive is None else _text(positive), values)  # fmt: skip
    return _measured([pl.DataFrame(frame)], roles, names, "measure()", min_cell, epsilon, delta)


def measure_file(
    path: str | Path,
    *,
    label: str,
    group: str | Sequence[str],
    score: str | Sequence[str] = (),
    decision: str | None = None,
    site: str | None = None,
    threshold: float = 0.5,
    bins: int | None = None,
    classes: Sequence[str] = (),
    positive: str | None = None,
    values: Mapping[str, tuple[str, ...]] | None = None,
    min_cell: int = 0,
    epsilon: float | None = None,
    delta: float = 0.0,
    on_rows: OnRows | None = None,
) -> Sums:
    """The sums of a CSV or Parquet file, read in batches. `site` is the file's name unless said.

    `values` lists the values of group columns: then no others may occur, and under noise the names
    themselves say nothing about the data.
    """
    path_of("path", path)
    instance("label", label, str, "it is the name of a column")
    if decision is not None:
        instance("decision", decision, str, "it is the name of a column")
    if site is not None:
        instance("site", site, str)
    if positive is not None:
        instance("positive", positive, str)
    groups, scores = column_names("group", group), column_names("score", score)
    _check_numbers(threshold, bins, min_cell, epsilon, delta)
    roles = Columns(label, groups, scores, decision, threshold, _bins(bins, epsilon))
    name = Path(path).stem if site is None else site
    names = Names(name, groups, tuple(map(_text, classes)), positive, values)
    batches = batches_of(path, roles)
    return _measured(batches, roles, names, str(path), min_cell, epsilon, delta, on_rows)


def _measured(
    batches: Any,
    columns: Columns,
    names: Names,
    source: str,
    min_cell: int,
    epsilon: float | None,
    delta: float,
    on_rows: OnRows | None = None,
) -> Sums:
    if min_cell and epsilon is not None:
        raise FedgftError("--min-cell and --epsilon: noisy counts need no suppression; choose one")
    if delta and epsilon is None:
        raise FedgftError("--delta needs --epsilon")
    if len(columns.scores) == 2 and names.positive is not None:
        raise FedgftError("--positive with two scores: give one, that of the positive class")
    if min_cell > LARGEST_CELL:
        raise FedgftError(f"--min-cell {min_cell}: must be at most {LARGEST_CELL:,}")
    with _said(source):
        counted = count(batches, columns, source=source, on_rows=on_rows)
        sums = sums_of(counted, columns, names, source=source)
    if min_cell:
        return suppress(sums, min_cell)
    if epsilon is not None:
        values = dict(names.values or {})
        declared = bool(names.classes) and all(a in values for a in names.attributes)
        return with_noise(sums, epsilon, delta, values=values, declared=declared)
    return sums


def _check_numbers(threshold: Any, bins: Any, min_cell: Any, epsilon: Any, delta: Any) -> None:
    real_number("threshold", threshold, finite=False)
    whole_number("min_cell", min_cell, least=0)
    real_number("delta", delta, finite=False)
    if bins is not None:
        whole_number("bins", bins)
    if epsilon is not None:
        real_number("epsilon", epsilon, finite=False)


def _bins(asked: int | None, epsilon: float | None) -> int:
    return asked if asked is not None else BINS if epsilon is None else NOISY_BINS


@contextmanager
def _said(source: str) -> Iterator[None]:
    """A column of a kind that cannot be counted, in one line."""
    from polars.exceptions import PolarsError

    try:
        yield
    except PolarsError as error:
        reason = (str(error).strip().splitlines() or ["unreadable"])[0][:160]
        raise FedgftError(f"{source}: cannot be counted: {reason}") from None


def _are_scores(y_pred: Any) -> bool:
    """Two axes, or fractions: a decision is a label, and no label is a fraction in [0, 1]."""
    array = array_of("y_pred", y_pred)
    if array.dtype == object and array.ndim == 1:  # numbers with None among them
        known = [v for v in array.tolist() if v is not None]
        array = np.array(known if all(isinstance(v, float) for v in known) else [], dtype=float)
    if array.ndim == 2:
        return True
    return array.dtype.kind == "f" and bool(((array > 0) & (array < 1)).any())


def _attributes(features: Any) -> dict[str, Any]:
    """Attribute names and their values."""
    if isinstance(features, Mapping):
        return {str(name): values for name, values in features.items()}
    if hasattr(features, "columns"):
        return {str(name): features[name] for name in features.columns}
    array = np.asarray(features, dtype=object)
    if array.ndim == 2:
        return {f"group {i + 1}": array[:, i] for i in range(array.shape[1])}
    return {str(getattr(features, "name", None) or "group"): features}


def _score_columns(scores: Any) -> dict[str, Any]:
    if scores is None:
        return {}
    array = array_of("scores", scores)
    if array.ndim == 1:
        return {"scores": scores}
    if array.ndim != 2:
        raise FedgftError(
            f"scores must have one value a row, or one column a class, not the shape {array.shape}"
        )
    return {f"scores {i}": array[:, i] for i in range(array.shape[1])}


def _series(name: str, values: Any) -> "pl.Series":
    """A column of numbers or of text, nulls where a value is missing in any of the usual ways."""
    import polars as pl

    if isinstance(values, pl.Series):
        return values.cast(pl.String) if values.dtype == pl.Categorical else values
    if np.ma.isMaskedArray(values):
        values = np.ma.filled(values.astype(object), None)
    if isinstance(values, list | tuple):  # numpy would write NaN among words as a word
        plain = lambda v: v is None or type(v) in (int, float)  # noqa: E731
        values = np.array(values, dtype=float if all(map(plain, values)) else object)
    array = array_of(name, values)
    if array.ndim != 1:
        raise FedgftError(f"{name} must have one axis, not {array.ndim}")
    if array.dtype.kind in "biuf":
        return pl.Series(name, array)
    if array.dtype.kind in "cmM":
        raise FedgftError(f"{name} must hold numbers or text, not {array.dtype}")
    nested = [v for v in array.tolist() if isinstance(v, list | tuple | dict | set | np.ndarray)]
    if nested:
        raise FedgftError(f"{name} must hold one value a row, not {shown(nested[0])}")
    return pl.Series(name, [_text(v) for v in array.tolist()], dtype=pl.String)


def _finite(name: str, values: Any) -> Any:
    """Scores, if none of them is NaN or infinite; a missing one (None, null) is another matter."""
    import polars as pl

    if isinstance(values, pl.Series):
        wrong = values.dtype.is_float() and not values.drop_nulls().is_finite().all()
    elif isinstance(values, np.ndarray) and values.dtype.kind == "f":
        wrong = not np.isfinite(values).all()
    else:
        held = values if isinstance(values, list | tuple) else array_of(name, values).tolist()
        wrong = any(isinstance(v, float) and not math.isfinite(v) for v in held)
    if wrong:
        raise FedgftError(
            f"{name} hold NaN or infinity (of y_pred, if it holds the scores): the model has no "
            "answer for some rows; leave them out, or write None where none was asked for"
        )
    return values


def _text(value: Any) -> Any:
    """As text, None where it is missing; 1.0 is "1", as it is in a file."""
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        return None
    text = str(value)
    return text[:-2] if text.endswith(".0") and text[:-2].lstrip("-").isdigit() else text
