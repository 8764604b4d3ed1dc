"""Names of groups, and the group of each row in columns of any kind.

The columns may be those of pandas, polars, pyarrow, NumPy or torch, or lists. Values are compared
by their text, as everywhere in the library: 1, 1.0 and "1" are one group, and so are True and
"True". Values of several columns are joined, as in "f & under 40".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.data.encode import Names, as_text, encode_levels
from fedgft.data.table import MAX_VALUES, Roles, read_groups, to_polars
from fedgft.errors import FedgftError, LazyModule
from fedgft.validation import format_value

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

MAX_GROUPS = 100_000
MAX_CODE = 2**53  # whole numbers below it are exact in float64
MISSING_CODE = -1  # a number that means: the group is not recorded
SEPARATOR = " & "
MAX_LISTED = 8  # most groups that an error lists


@dataclass(frozen=True)
class GroupNames:
    """The groups that are compared, in the order of their indices.

    Parameters
    ----------
    names
        The name of each group.
    columns
        The columns whose combinations are the groups, if they are known.
    """

    names: Names
    columns: Names = ()

    @classmethod
    def declare(cls, names: Any) -> GroupNames:
        """Return the groups with these names: a list of texts, whole numbers or truth values."""
        field = "groups"
        if isinstance(names, str | bytes | Mapping | set | frozenset) or not hasattr(
            names, "__iter__"
        ):
            text = f"must be a whole number or a list of names, not {format_value(names)}"
            raise FedgftError(text, field=field)
        series = read_column("", list(names), field=field)
        if series.null_count():
            text = "holds None, NaN or -1, which mean that a group is not recorded, and are no name"
            raise FedgftError(text, field=field)
        texts = as_text(series).to_list()
        if repeated := [name for name, times in Counter(texts).items() if times > 1]:
            raise FedgftError(f"names the group {repeated[0]!r} more than once", field=field)
        return cls(_check_number(tuple(texts), field))

    @classmethod
    def find(cls, sensitive_features: Any, *, field: str = "sensitive_features") -> GroupNames:
        """Return the groups that occur in one column, or the combinations in several.

        They are sorted, numbers as numbers and the rest as text.
        """
        columns = read_columns(sensitive_features, field=field)
        for name, series in columns.items():
            found = series.drop_nulls().n_unique()
            if not found:
                text = f"column {name!r} has no value: all are missing"
                raise FedgftError(text, field=field, kind="data")
            if found > MAX_VALUES:
                text = f"column {name!r} has {found:,} different values, more than {MAX_VALUES}"
                text = f"{text}: use ranges of values as groups"
                raise FedgftError(text, field=field, kind="data")
        frame = pl.DataFrame(columns)
        _, names, _ = read_groups(frame, Roles("y", frame.columns), source=field)
        return cls(_check_number(names, field), tuple(columns))

    @property
    def codes(self) -> np.ndarray | None:
        """The number that stands for each group, (g,), if all names are whole numbers.

        Otherwise None, and the index of a group stands for it.
        """
        if not all(re.fullmatch(r"0|-?[1-9]\d*", name) for name in self.names):
            return None
        codes = [int(name) for name in self.names]
        return np.array(codes, np.int64) if max(map(abs, codes)) < MAX_CODE else None

    def index(self, sensitive_features: Any, *, field: str) -> np.ndarray:
        """Return the index of the group of each row, (n,), -1 where a value is missing.

        Parameters
        ----------
        sensitive_features
            One column of values, or of joined values; or several columns.
        field
            What errors call it. A value that is no group is an error.
        """
        found = self._look_up(sensitive_features)
        if found is not None:
            return found
        columns = read_columns(sensitive_features, field=field)
        if self.columns:
            if len(columns) not in (1, len(self.columns)):
                listed = ", ".join(self.columns)
                text = f"has {len(columns)} columns; the groups were found in {listed}"
                raise FedgftError(text, field=field)
            if set(columns) == set(self.columns):
                columns = {name: columns[name] for name in self.columns}
        parts = [as_text(series) for series in columns.values()]
        text = parts[0]
        if len(parts) > 1:
            frame = pl.DataFrame([part.alias(str(i)) for i, part in enumerate(parts)])
            joined = pl.concat_str(pl.all(), separator=SEPARATOR, ignore_nulls=False)
            text = frame.select(joined).to_series()
        index = encode_levels(text, self.names)
        unknown = (index < 0) & text.is_not_null().to_numpy()
        if unknown.any():
            raise self.unknown(text[int(unknown.argmax())], field=field)
        return index

    @cached_property
    def _indices(self) -> dict[Any, int]:
        return {name: i for i, name in enumerate(self.names)} | {None: -1}

    def _look_up(self, values: Any) -> np.ndarray | None:
        """Return the index of each row if all values are exact names or None: fast for a batch."""
        convert = getattr(values, "tolist", getattr(values, "to_list", None))
        if not isinstance(values, list) and convert is None:
            return None
        try:
            found = [self._indices[v] for v in (convert() if convert else values)]
        except (KeyError, TypeError):
            return None
        return np.array(found, np.int64)

    def unknown(self, value: Any, *, field: str) -> FedgftError:
        """Return the error about a value that is no group."""
        more = ", ..." if len(self.names) > MAX_LISTED else ""
        listed = ", ".join(map(repr, self.names[:MAX_LISTED]))
        return FedgftError(
            f"holds {value!r}, which is none of the groups {listed}{more}", field=field
        )


def _check_number(names: Names, field: str) -> Names:
    if len(names) < 2:
        held = f"one group only, {names[0]!r}" if names else "no group"
        text = f"holds {held}: fairness compares groups"
        raise FedgftError(text, field=field, kind="data")
    if len(names) > MAX_GROUPS:
        text = f"holds {len(names):,} groups, more than the {MAX_GROUPS:,} there may be"
        raise FedgftError(text, field=field, kind="data")
    return names


def read_columns(values: Any, *, field: str) -> dict[str, pl.Series]:
    """Return columns of text, whole numbers or truth values by their names; null: missing.

    Parameters
    ----------
    values
        A column, a table, a mapping from names to columns, or an array with two axes.
    field
        What errors call it.
    """
    if isinstance(values, Mapping):
        columns = {str(name): read_column(str(name), v, field=field) for name, v in values.items()}
    elif any(hasattr(values, name) for name in ("to_frame", "collect", "columns")):
        frame = values.to_frame() if hasattr(values, "to_frame") else values
        named = {s.name or "group": s for s in to_polars(frame, field)}  # a Series may have no name
        columns = {name: read_column(name, series, field=field) for name, series in named.items()}
    else:
        array = _to_array("", values, field)
        names = [f"group {i + 1}" for i in range(array.shape[1] if array.ndim == 2 else 0)]
        if not names or len(names) == 1:
            array = array[:, 0] if names else array
            columns = {"group": read_column("", array, field=field)}
        else:
            columns = {n: read_column(n, array[:, i], field=field) for i, n in enumerate(names)}
    if not columns:
        raise FedgftError("has no column", field=field)
    lengths = {len(series) for series in columns.values()}
    if len(lengths) > 1:
        text = f"has columns of different lengths: {', '.join(map(str, sorted(lengths)))} rows"
        raise FedgftError(text, field=field)
    if len(columns) > 1:
        for name, series in columns.items():
            if as_text(series).str.contains(SEPARATOR, literal=True).any():
                text = f"column {name!r} has {SEPARATOR!r} in a value, which joins the values of "
                raise FedgftError(f"{text}several columns: rename the value", field=field)
    return columns


def read_column(name: str, values: Any, *, field: str) -> pl.Series:
    """Return one column as `read_columns` does; without a name, errors do not mention it."""
    where = f"column {name!r} " if name else ""
    series = values if isinstance(values, pl.Series) else _to_series(where, values, field)
    if series.dtype.is_nested() or series.dtype in (pl.Binary, pl.Object):
        text = f"{where}must hold text, whole numbers or truth values, not {series.dtype}"
        raise FedgftError(text, field=field)
    if series.dtype.is_float():
        series = series.fill_nan(None)
        if not (series.is_finite() & (series == series.round())).all():
            text = f"{where}holds fractions or infinity: use ranges of values as groups"
            raise FedgftError(text, field=field, kind="data")
    if not series.dtype.is_numeric() or series.dtype.is_unsigned_integer():
        return series
    kept = pl.when(pl.all() != MISSING_CODE).then(pl.all())
    return series.to_frame().select(kept).to_series()


def _to_series(where: str, values: Any, field: str) -> pl.Series:
    if hasattr(values, "to_frame"):
        return to_polars(values.to_frame(), field).to_series()
    array = _to_array(where, values, field)
    if array.ndim != 1:
        text = f"{where}must have one value per row, not the shape {array.shape}"
        raise FedgftError(text, field=field)
    if array.dtype.kind in "biuf":
        return pl.Series("", array)
    items = [v.item() if isinstance(v, np.generic) else v for v in array.tolist()]
    items = [None if _is_missing(v) else v for v in items]
    known = [v for v in items if v is not None]
    if wrong := [v for v in known if not isinstance(v, str | bool | int | float)][:1]:
        text = f"{where}must hold text, whole numbers or truth values, not "
        raise FedgftError(text + format_value(wrong[0]), field=field)
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in known):
        return pl.Series("", [None if v is None else float(v) for v in items], pl.Float64)
    return pl.Series("", [None if v is None else str(v) for v in items], pl.String)


def _to_array(where: str, values: Any, field: str) -> np.ndarray:
    """Return the values as an array; of objects where NumPy would turn None or NaN into text."""
    if hasattr(values, "detach"):  # a tensor; bf16 is unknown to NumPy
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    if np.ma.isMaskedArray(values):
        objects = np.array(values, dtype=object)
        objects[np.ma.getmaskarray(values)] = None
        return objects
    try:
        return np.asarray(values, dtype=object if isinstance(values, list | tuple) else None)
    except Exception:  # array-like objects may raise anything
        text = f"{where}cannot be read as columns: {format_value(values)}"
        raise FedgftError(text, field=field) from None


def _is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN or a missing value of pandas.

    The types of pandas are compared by name, because pandas may not be installed.
    """
    nan = isinstance(value, float) and value != value
    return value is None or nan or type(value).__name__ in ("NAType", "NaTType")
