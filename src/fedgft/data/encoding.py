"""From the columns of a raw table to the features of a model, and the same way again later.

A numeric column is one feature. A categorical column with levels l_0, l_1, ... is one indicator
a level, the first of them dropped: it is the reference, and keeping it would make the indicators
of a column sum to one, the intercept once more. The encoder is stored beside a model, so that a
file met years later is read exactly as the training rows were.

This module also owns what every reader of columns needs: text for any value, and the sentence
for a column that is not there.
"""

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedgft.types import FedgftError

if TYPE_CHECKING:
    import polars as pl

MISSING = "(missing)"
MOST_LEVELS = 1000  # beyond it a column is a name or a number plate, not a category


@dataclass(frozen=True)
class Numeric:
    """A column of numbers; `fill` stands in for a missing one."""

    name: str
    fill: float

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,)

    def write(self, series: "pl.Series", out: np.ndarray, *, source: str) -> list[str]:
        """Fill `out` (n, 1) and say what had to be done to the values."""
        numbers = numbers_of(series, source=source)
        absent = numbers.null_count()
        out[:, 0] = numbers.fill_null(self.fill).to_numpy()
        if not absent:
            return []
        return [
            f"{source}: {absent} missing value(s) of '{self.name}' replaced by the mean over "
            f"all clients' rows, {self.fill:.6g}"
        ]


@dataclass(frozen=True)
class Categorical:
    """A column of names; a missing one is a level of its own."""

    name: str
    levels: tuple[str, ...]
    drop_first: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(f"{self.name}={level}" for level in self.levels[int(self.drop_first) :])

    def write(self, series: "pl.Series", out: np.ndarray, *, source: str) -> list[str]:
        """Fill `out` (n, levels kept); a level never met is a row of zeros, and is counted."""
        absent = series.null_count()
        codes = codes_of(as_text(series).fill_null(MISSING), self.levels)
        unknown = int((codes < 0).sum())
        kept = codes - int(self.drop_first)
        rows = np.flatnonzero(kept >= 0)
        out[rows, kept[rows]] = 1.0
        notes = []
        if absent and MISSING in self.levels:
            notes.append(
                f"{source}: {absent} missing value(s) of '{self.name}' are a category of their own"
            )
        if unknown:
            notes.append(
                f"{source}: {unknown} value(s) of '{self.name}' were not among the training "
                "rows: all their indicators are zero"
            )
        return notes


@dataclass(frozen=True)
class Encoder:
    """The fields of a table, in order; `columns` names the features they become."""

    fields: tuple[Numeric | Categorical, ...]

    @classmethod
    def fit(
        cls,
        frame: "pl.DataFrame",
        columns: Iterable[str],
        *,
        drop_first: bool = True,
        source: str = "table",
    ) -> "Encoder":
        """Levels and means of these rows. Numbers and truth values are numeric, text is not."""
        fields: list[Numeric | Categorical] = []
        for name in columns:
            series = column_of(frame, name, source=source)
            if series.dtype.is_numeric() or series.dtype == _polars().Boolean:
                fields.append(Numeric(name, _mean(numbers_of(series, source=source))))
            else:
                levels = _levels(series, source=source)
                fields.append(Categorical(name, levels, drop_first))
        return cls(tuple(fields))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for field in self.fields for name in field.columns)

    def encode(
        self, frame: "pl.DataFrame", *, source: str = "table"
    ) -> tuple[np.ndarray, tuple[str, ...]]:
        """The features, and one sentence for everything that had to be filled in or ignored."""
        features = np.zeros((frame.height, len(self.columns)), np.float32)
        notes: list[str] = []
        start = 0
        for field in self.fields:
            stop = start + len(field.columns)
            series = column_of(frame, field.name, source=source)
            notes += field.write(series, features[:, start:stop], source=source)
            start = stop
        return features, tuple(notes)

    def transform(self, frame: "pl.DataFrame", *, source: str = "table") -> np.ndarray:
        return self.encode(frame, source=source)[0]

    def to_json(self) -> str:
        return json.dumps([asdict(field) for field in self.fields])

    @classmethod
    def from_json(cls, text: str) -> "Encoder":
        return cls(
            tuple(
                Numeric(field["name"], field["fill"])
                if "fill" in field
                else Categorical(field["name"], tuple(field["levels"]), field["drop_first"])
                for field in json.loads(text)
            )
        )


def column_of(
    frame: "pl.DataFrame", name: str, *, source: str, option: str | None = None
) -> "pl.Series":
    """The column, or an error that names the nearest one there is."""
    if name not in frame.columns:
        asked = f" ({option})" if option else ""
        raise FedgftError(f"{source}: no column '{name}'{asked}{suggestion(name, frame.columns)}")
    series = frame[name]
    if series.dtype.is_nested() or series.dtype in (_polars().Binary, _polars().Object):
        raise FedgftError(f"{source}: column '{name}' holds {series.dtype}, not single values")
    return series


def suggestion(name: str, known: Sequence[str]) -> str:
    """The end of a sentence about an unknown name."""
    folded = {other.strip().casefold(): other for other in known}
    near = difflib.get_close_matches(name.strip().casefold(), list(folded), n=1)
    if near:
        return f"; did you mean '{folded[near[0]]}'?"
    more = ", ..." if len(known) > 8 else ""
    return f"; there are: {', '.join(known[:8])}{more}"


def as_text(series: "pl.Series") -> "pl.Series":
    """One spelling a value, whatever type a reader gave it: 1.0 is "1", true is "True"."""
    pl = _polars()
    if series.dtype == pl.Boolean:
        return series.cast(pl.String).str.to_titlecase()
    if series.dtype.is_float():
        whole = (series.drop_nulls() == series.drop_nulls().round()).all()
        return (series.cast(pl.Int64, strict=False) if whole else series).cast(pl.String)
    return series.cast(pl.String)


def codes_of(text: "pl.Series", levels: Sequence[str]) -> np.ndarray:
    """The index of each value among the levels, -1 where it is none of them."""
    pl = _polars()
    table = {level: index for index, level in enumerate(levels)}
    if not table:
        return np.full(len(text), -1, np.int64)
    codes = text.replace_strict(table, default=-1, return_dtype=pl.Int64)
    return codes.fill_null(-1).to_numpy()


def numbers_of(series: "pl.Series", *, source: str) -> "pl.Series":
    """The column as float64, nulls kept; text, NaN and what float32 cannot hold are errors."""
    pl = _polars()
    numbers = series.cast(pl.Float64, strict=False)
    lost = numbers.is_null() & series.is_not_null()
    if lost.any():
        found = series.filter(lost)[0]
        raise FedgftError(f"{source}: column '{series.name}' should hold numbers, not '{found}'")
    wrong = int((~(numbers.abs() <= float(np.finfo(np.float32).max)) | numbers.is_nan()).sum())
    if wrong:
        raise FedgftError(
            f"{source}: column '{series.name}' holds {wrong} value(s) that are NaN or infinite"
        )
    return numbers


def _mean(numbers: "pl.Series") -> float:
    known = numbers.drop_nulls().to_numpy()
    return float(known.mean()) if len(known) else 0.0


def _levels(series: "pl.Series", *, source: str) -> tuple[str, ...]:
    pl = _polars()
    if series.dtype not in (pl.String, pl.Categorical, pl.Enum, pl.Null):
        raise FedgftError(
            f"{source}: column '{series.name}' ({series.dtype}) is neither numbers nor text: "
            "convert it or take it out"
        )
    levels = sorted(as_text(series).drop_nulls().unique().to_list())
    if len(levels) > MOST_LEVELS:
        raise FedgftError(
            f"{source}: text column '{series.name}' has {len(levels):,} different values, more "
            f"than the {MOST_LEVELS:,} a category may have: take it out of the file"
        )
    return (*levels, MISSING) if series.null_count() else tuple(levels)


def _polars():
    """Polars only when a table is really read: importing this package stays quick."""
    import polars

    return polars
