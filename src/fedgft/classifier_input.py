"""What `FairClassifier.fit` takes, read from tables, arrays and columns of any library."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from sklearn.utils import check_random_state

from fedgft.auditing.arrays import split_attributes, to_series
from fedgft.data.encode import OR_NAME_IT, Encoder, Names, Numeric, as_text, describe_lost_digits
from fedgft.data.partition import PartitionKind
from fedgft.data.table import MAX_VALUES, combine_groups, factorize, find_cells
from fedgft.errors import FedgftError
from fedgft.formatting import format_count
from fedgft.site_sums import Group
from fedgft.validation import format_value

if TYPE_CHECKING:  # the types that editors know of scikit-learn lack some of these names
    multiclass: Any
    validation: Any
else:
    from sklearn.utils import multiclass, validation

NO_GROUPS = ("", " ")  # FedAvg ignores groups, but the engine needs two of them


# Classes in a model file, which holds their names only


def name_class_type(classes: list[Any]) -> str:
    """Return the type that `parse_class` needs to restore the classes."""
    for kind in (bool, int, float):
        if all(type(value) is kind for value in classes):
            return kind.__name__
    return "text"


def name_classes(classes: np.ndarray) -> Names:
    """Return the names of classes; texts are their own names, also "true" and "1.0"."""
    values = classes.tolist()
    if all(isinstance(value, str) for value in values):
        return tuple(values)
    return tuple(as_text(to_series("y", classes)))


def parse_class(name: str, kind: str) -> Any:
    """Return a class from its name in a model file."""
    if kind == "bool":
        return name == "True"
    return {"int": int, "float": float}.get(kind, str)(name)


# Arguments of `fit`


def read_classes(y: Any, rows: int, pos_label: Any) -> tuple[np.ndarray, Names, np.ndarray]:
    """Return the classes, their names with the positive one last, and each row's index."""
    if y is None:
        raise FedgftError("requires y to be passed, but the target y is None")
    y = validation.column_or_1d(y, warn=True)
    if len(y) != rows:
        raise FedgftError(f"has {len(y)} rows, X has {rows}", field="y")
    if y.dtype.kind not in "biu":
        series = to_series("y", y)
        if series.null_count() or (series.dtype.is_float() and not series.is_finite().all()):
            text = "has missing values, NaN or infinity among the classes"
            raise FedgftError(text, field="y")
    multiclass.check_classification_targets(y)
    classes, codes = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        text = f"has one class only, {classes[0]!r}: there is nothing to learn"
        raise FedgftError(text, field="y", kind="data")
    if len(classes) > MAX_VALUES:
        text = f"has {len(classes):,} classes, more than the {MAX_VALUES} there may be"
        raise FedgftError(text, field="y", kind="data")
    names = name_classes(classes)
    if pos_label is not None:
        if len(names) != 2 or pos_label not in classes.tolist():
            known = format_value(classes.tolist())
            text = f"{pos_label!r} must be one of two classes; y has {known}"
            raise FedgftError(text, field="pos_label")
        if classes.tolist()[0] == pos_label:
            names = names[::-1]
            codes = 1 - codes
    return classes, names, codes


@contextmanager
def name_argument(name: str) -> Iterator[None]:
    """Let errors about a column name the argument that it is part of."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        reason = (str(error).strip().splitlines() or ["unreadable"])[0][:160]
        text = f"must hold numbers or text, and cannot be read ({reason})"
        raise FedgftError(text, field=name) from None
    except FedgftError as error:
        text = error.message.replace(" (`leave_out`)", "").replace(OR_NAME_IT, "")
        text = text.removeprefix(f"{name}: ").removeprefix(f"{name} ")
        raise FedgftError(text, field=name, kind=error.kind) from None


def fit_encoder(table: pl.DataFrame | np.ndarray) -> Encoder:
    """Return the encoder of a table, or of an array, whose columns are x0, x1, ..."""
    if isinstance(table, pl.DataFrame):
        return Encoder.fit(table, table.columns, indicators=True, source="X")
    columns = (np.ascontiguousarray(column, dtype=np.float64) for column in table.T)
    return Encoder(tuple(Numeric(f"x{i}", float(x.mean())) for i, x in enumerate(columns)))


def encode_features(table: pl.DataFrame | np.ndarray, encoder: Encoder) -> tuple[np.ndarray, Any]:
    """Return the features, (n, d) float32, and notes."""
    if isinstance(table, np.ndarray) and all(isinstance(f, Numeric) for f in encoder.fields):
        limit = np.finfo(np.float32).max
        low, high = table.min(axis=0), table.max(axis=0)
        if not (low.min() >= -limit and high.max() <= limit):
            text = "holds infinity or numbers beyond the range of float32; rescale them"
            raise FedgftError(text, field="X", kind="data")
        names = [field.name for field in encoder.fields]
        notes = describe_lost_digits(
            names, low.astype(np.float64), high.astype(np.float64), source="X"
        )
        return table.astype(np.float32), notes
    if isinstance(table, np.ndarray):
        names = [field.name for field in encoder.fields]
        table = pl.DataFrame({n: table[:, i] for i, n in enumerate(names)})
    return encoder.encode(table, source="X")


def to_numbers(column: np.ndarray) -> np.ndarray:
    """Return a column of objects as numbers where all of them are; refuse what is no value."""
    if column.dtype != object:
        return column
    try:
        return column.astype(float)
    except (TypeError, ValueError):
        if any(isinstance(value, dict | list | set) for value in column):
            text = "X: argument must be a string or a number, or a table with one value per cell"
            raise TypeError(text) from None
        return column


def read_seed(random_state: Any) -> int:
    """Return a seed: the number itself, or one drawn from a generator of NumPy."""
    if isinstance(random_state, int | np.integer) and random_state >= 0:
        return int(random_state)
    try:
        generator = check_random_state(random_state)
    except ValueError as error:
        raise FedgftError(str(error), field="random_state") from None
    return int(generator.randint(2**31 - 1))


def read_weights(weights: Any, rows: int) -> np.ndarray | None:
    """Return one weight per row, (n,); None where all rows weigh the same."""
    if weights is None:
        return None
    array = np.asarray(weights)
    if array.dtype == object:
        with suppress(TypeError, ValueError):
            array = array.astype(float)
    if array.ndim == 0:
        array = np.full(rows, array)
    if array.ndim != 1 or array.dtype.kind not in "fiub":
        text = f"must be one number per row, not {array.dtype} of the shape {array.shape}"
        raise FedgftError(text, field="sample_weight")
    if len(array) != rows:
        raise FedgftError(f"sample_weight.shape == {array.shape}, expected ({rows},)!")
    array = array.astype(float)
    if not np.isfinite(array).all() or (array < 0).any():
        raise FedgftError("must be finite numbers >= 0", field="sample_weight")
    if not array.any():
        raise FedgftError("are all zero: no row counts", field="sample_weight")
    return None if (array == array[0]).all() else array


@dataclass(frozen=True)
class RowGroups:
    """The groups of the rows, for training and for the audit.

    Parameters
    ----------
    codes
        (n,) index into `names`; -1 where a part of the group is not recorded.
    names
        Names of the groups.
    attributes
        Names of the columns.
    cells, cell_codes
        The combinations of values for the audit, where a missing value is a part of its own, and
        (n,) the index of each row's combination.
    notes
        Sentences on missing groups.
    """

    codes: np.ndarray
    names: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    cells: tuple[Group, ...] = ()
    cell_codes: np.ndarray | None = None
    notes: tuple[str, ...] = ()


def read_sensitive_features(given: Any, rows: int) -> RowGroups:
    """Return the groups in one or several columns; without any, with a warning, no groups."""
    field = "sensitive_features"
    if given is None:
        text = "no sensitive_features: the model is trained without fairness"
        warnings.warn(text, UserWarning, stacklevel=3)
        return RowGroups(np.arange(rows) % 2, NO_GROUPS)
    if isinstance(given, str):
        text = f"must hold the group of each row, as in table[{given!r}], not the name of a column"
        raise FedgftError(text, field=field)
    columns = {name: to_series(name, v) for name, v in split_attributes(given).items()}
    for name, series in columns.items():
        if len(series) != rows:
            raise FedgftError(f"has {len(series)} rows, X has {rows}", field=field)
        found = series.drop_nulls().n_unique()
        if found > MAX_VALUES:
            text = f"column {name!r} has {found:,} different values, more than {MAX_VALUES}: use "
            raise FedgftError(f"{text}ranges of values as groups", field=field, kind="data")
    frame = pl.DataFrame(columns).fill_nan(None)
    parts = [factorize(series) for series in frame.iter_columns()]
    codes, names, notes = combine_groups(parts, source=field)
    if len(names) < 2:
        held = f"one group only, {names[0]!r}" if names else "no recorded group"
        raise FedgftError(f"holds {held}: fairness compares groups", field=field, kind="data")
    found, place = find_cells(parts)
    values = [(*known, None) for _, known in parts]  # the code -1 is the last: not recorded
    cells = [tuple(v[i] for v, i in zip(values, cell, strict=True)) for cell in found.tolist()]
    return RowGroups(codes, names, tuple(frame.columns), tuple(cells), place, tuple(notes))


def read_clients(
    given: Any, rows: int
) -> tuple[np.ndarray | None, tuple[str, ...], PartitionKind, int]:
    """Return the client of each row, their names, the kind of partition and the number."""
    if given is None:
        return None, (), "iid", 1
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        return None, (), "dirichlet", int(given)
    if np.ndim(given) == 0:
        text = f"must be a number of clients, or the client of each row, not {format_value(given)}"
        raise FedgftError(text, field="clients")
    series = to_series("clients", given)
    if series.dtype.is_float():
        series = series.fill_nan(None)
    if len(series) != rows:
        raise FedgftError(f"has {len(series)} rows, X has {rows}", field="clients")
    if series.null_count():
        text = f"lacks {format_count(series.null_count(), 'value')}: every row needs a client"
        raise FedgftError(text, field="clients", kind="data")
    text = as_text(series)
    names = tuple(text.unique().sort())
    codes = text.replace_strict(dict(zip(names, range(len(names)), strict=True)))
    return codes.to_numpy().astype(np.int64), names, "column", len(names)
