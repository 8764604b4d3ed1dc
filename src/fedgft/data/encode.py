"""Turn the columns of a raw table into the features of a model.

A numeric column becomes one feature, and a second one, which is 1 where a value is missing, if many
training rows lack a value. A categorical column with levels l_0, l_1, ... becomes one indicator per
level except the first, the reference level: with an indicator for it, the indicators would sum to
one and duplicate the intercept. A value that is no level counts as no category: its indicators are
the shares of the levels among the rows that the encoder has learned from, about zero once
standardized. The encoder is stored in the model file, so a later table is read exactly as the
training rows were.

Column types are those of the file. A column that would be misread is refused: one stray word turns
a CSV column of numbers into text, which would become hundreds of categories.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import format_count
from fedgft.store import parse_json, require_encodable

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

Names = tuple[str, ...]
ROUNDED = 1e-5  # indicators that were standardized and scaled back differ from 0 and 1 by less
UNSEEN = "not among the training rows"  # in notes on values that are no known level
TOO_CLOSE = "are too close together beside their size"  # in notes on columns that lose digits
COARSE_SHARE = 1e-3  # largest step between float32 numbers, as a share of a column's range
MISSING = "(missing)"  # the level of missing values
MIN_MISSING = 10  # training rows without a number that make its absence a feature
MAX_INDICATORS = 10_000  # limit over all text columns; each level becomes a feature
MANY_ROWS = 1000  # from here on it pays to look for the distinct values of a column
MAX_LEVELS = 1000  # limit for one text column; a column with more holds names or identifiers
MAX_CATEGORY_LIKE = 10  # a text column with so few distinct values is a category, even of numbers
DAMAGED_SHARE = 0.9  # a text column with this share of numbers is a damaged column of numbers
NUMBER = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
PLAIN_NUMBER = rf"^-?{NUMBER}$"  # text that a CSV reader parses as a number
LOOSE_NUMBER = rf"^\s*[+-]?{NUMBER}\s*$"  # text that a person reads as a number
COMMA_NUMBER = (  # 3,5 and 1.234,5 and 1,234.5
    r"^\s*[+-]?(\d+,\d+|\d{1,3}(\.\d{3})+,\d+|\d{1,3}(,\d{3})+(\.\d+)?)\s*$"
)
NOT_FINITE = r"(?i)^\s*[+-]?(nan|inf|infinity)\s*$"
NO_COMMAS = "write them with a decimal point and no thousands separator, as in 1234.5"
LEAVE_EMPTY = "leave the cell empty where a number is missing"
OR_NAME_IT = (  # the end of a message on odd values among numbers
    ", or name the value in `missing`; if these are codes, name the column in `categorical`"
)
MAX_EXAMPLES = 3  # of values in a note
MAX_NAME_LENGTH = 80  # longer names are cut in messages
MAX_INTEGER = 2.0**127  # whole numbers below it fit an integer type


def data_error(source: object, problem: str) -> FedgftError:
    """Return an error about the content of a table or file; its text is ``SOURCE: PROBLEM``."""
    return FedgftError(f"{source}: {problem}", kind="data")


def get_column(frame: pl.DataFrame, name: str, *, source: str, option: str = "") -> pl.Series:
    """Return a column of single values.

    Parameters
    ----------
    frame, name
        The table and the name of the column.
    source
        What error messages call the table.
    option
        The setting that named the column, for the message.
    """
    if name not in frame.columns:
        asked = f" ({option})" if option else ""
        raise data_error(source, f"no column '{name}'{asked}{suggest_name(name, frame.columns)}")
    series = frame[name]
    if series.dtype.is_nested() or series.dtype in (pl.Binary, pl.Object):
        raise data_error(source, f"column '{name}' holds {series.dtype}, not single values")
    return series


def suggest_name(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, or a list."""
    by_lowercase = {other.strip().casefold(): other for other in known}
    near = difflib.get_close_matches(name.strip().casefold(), list(by_lowercase), n=1)
    if near:
        return f"; did you mean '{by_lowercase[near[0]]}'?"
    more = ", ..." if len(known) > 8 else ""
    limit = MAX_NAME_LENGTH
    names = (other if len(other) <= limit else f"{other[:limit]}..." for other in known[:8])
    return f"; there are: {', '.join(names)}{more}"


def put_positive_last(classes: Names, positive: str, *, where: str) -> Names:
    """Return the two classes with the positive one last.

    Parameters
    ----------
    classes
        Two names.
    positive
        One of them; case matters only where the two names differ in nothing else.
    where
        The start of an error message: it names the column that holds the classes.
    """
    if len(classes) != 2:
        raise FedgftError(f"{where} has {len(classes)} classes; `positive` needs two")
    found = [name for name in classes if name == positive]
    found = found or [name for name in classes if name.casefold() == positive.casefold()]
    if len(found) != 1:
        known = f"'{classes[0]}' and '{classes[1]}'"
        raise FedgftError(f"{where} holds {known}, no '{positive}' (`positive`)")
    return classes if found[0] == classes[1] else classes[::-1]


def is_numeric(series: pl.Series) -> bool:
    """Whether a column becomes one numeric feature: numbers and truth values do."""
    return series.dtype.is_numeric() or series.dtype == pl.Boolean


def as_text(series: pl.Series) -> pl.Series:
    """Return the values as text, independent of the column's type: 1.0 is "1", true is "True".

    The type of a column depends on all rows of its file; the spelling of a value depends on that
    value alone, so each distinct value of a long column is converted once. Nulls stay null.
    """
    if len(series) > MANY_ROWS and not series.dtype.is_nested():
        values = series.unique()
        if len(values) < len(series) // 4:
            return series.replace_strict(values, _convert_to_text(values), return_dtype=pl.String)
    return _convert_to_text(series)


def _convert_to_text(series: pl.Series) -> pl.Series:
    if series.dtype.is_float():
        is_integer = (series == series.round()) & (series.abs() < MAX_INTEGER)
        integers = series.cast(pl.Int128, strict=False).cast(pl.String)
        return integers.zip_with(is_integer.fill_null(False), series.cast(pl.String))
    text = series.cast(pl.String)
    if series.dtype.is_decimal():
        text = text.str.replace(r"(\.\d*?)0+$", "$1")
    if series.dtype.is_integer():
        return text
    return text.str.replace(r"^([+-]?\d+)\.0*$", "$1").replace({"true": "True", "false": "False"})


def encode_levels(text: pl.Series, levels: Sequence[str]) -> np.ndarray:
    """Return the index of each value among the levels, (n,) int64; -1 where it is none of them."""
    if not levels:
        return np.full(len(text), -1, np.int64)
    table = {level: index for index, level in enumerate(levels)}
    codes = text.replace_strict(table, default=-1, return_dtype=pl.Int64)
    return codes.fill_null(-1).to_numpy()


def parse_numbers(series: pl.Series, *, source: str) -> pl.Series:
    """Return the column as float64 with nulls; refuse text, NaN and numbers beyond float32."""
    numbers = series.cast(pl.Float64, strict=False)
    lost = numbers.is_null() & series.is_not_null()
    if lost.any():
        found = series.filter(lost)[0]
        problem = f"column '{series.name}' should hold numbers, not '{found}'"
        commas = re.match(COMMA_NUMBER, str(found))
        raise data_error(source, f"{problem}: {NO_COMMAS}" if commas else problem)
    wrong = int((~(numbers.abs() <= float(np.finfo(np.float32).max)) | numbers.is_nan()).sum())
    if wrong:
        raise _not_finite(series.name, wrong, source=source)
    return numbers


def check_text(series: pl.Series, *, source: str) -> None:
    """Refuse a text column that is a column of numbers with a few odd values in it."""
    text = series.drop_nulls()
    if series.dtype != pl.String or not len(text):
        return
    numbers = int(text.str.contains(LOOSE_NUMBER).sum())
    commas = text.filter(text.str.contains(COMMA_NUMBER))
    if len(commas) and numbers + len(commas) >= DAMAGED_SHARE * len(text):
        problem = f"column '{series.name}' has commas in its numbers ('{commas[0]}')"
        raise data_error(source, f"{problem}: {NO_COMMAS}")
    not_finite = int(text.str.contains(NOT_FINITE).sum())
    mostly_numbers = numbers + not_finite >= DAMAGED_SHARE * len(text)
    damaged = mostly_numbers and text.n_unique() > MAX_CATEGORY_LIKE
    if not_finite and numbers and (damaged or numbers + not_finite == len(text)):
        raise _not_finite(series.name, not_finite, source=source)
    odd = text.filter(~text.str.contains(PLAIN_NUMBER))
    many_numbers = 2 * numbers >= len(text) and text.n_unique() > MAX_CATEGORY_LIKE + MAX_EXAMPLES
    if len(odd) and (damaged or (many_numbers and odd.n_unique() <= MAX_EXAMPLES)):
        found = ", ".join(f"'{value}'" for value in odd.unique(maintain_order=True)[:3])
        others = format_count(len(odd), "other value")
        problem = f"column '{series.name}' holds numbers, but also {others}"
        raise data_error(source, f"{problem} ({found}): {LEAVE_EMPTY}{OR_NAME_IT}")


def holds_numbers_as_text(series: pl.Series) -> bool:
    """Whether a text column has many different values, each a plain number."""
    text = series.drop_nulls()
    if series.dtype != pl.String or text.n_unique() <= MAX_CATEGORY_LIKE:
        return False
    return bool(text.str.contains(PLAIN_NUMBER).all())


def describe_lost_digits(
    names: Sequence[str], low: np.ndarray, high: np.ndarray, *, source: str
) -> list[str]:
    """Return a note for each column whose float32 features are too coarse for its differences.

    Parameters
    ----------
    names
        Names of the columns.
    low, high
        (d,) The smallest and the largest value of each.
    source
        What the notes call the table.
    """
    step = np.maximum(np.abs(low), np.abs(high)) * np.finfo(np.float32).eps
    found = np.flatnonzero((high > low) & (step > COARSE_SHARE * (high - low)))
    return [
        f"{source}: the values of '{names[i]}', {low[i]:.9g} to {high[i]:.9g}, {TOO_CLOSE}: "
        "subtract a constant from them, such as the smallest"
        for i in found.tolist()
    ]


def _not_finite(name: str, count: int, *, source: str) -> FedgftError:
    problem = f"column '{name}' holds {format_count(count, 'value')} not finite (NaN or infinite)"
    return data_error(source, f"{problem}: {LEAVE_EMPTY}")


def read_missing(series: pl.Series, values: Sequence[str]) -> pl.Series:
    """Return the column with null for each value that means missing.

    If the other values of a text column are plain numbers, it becomes a column of numbers, as the
    reader of a CSV would have made it without such values.

    Parameters
    ----------
    series
        The column.
    values
        Texts that mean missing, such as "?" or "-999"; spaces around them do not matter.
    """
    if not values or series.dtype.is_nested() or not (is_numeric(series) or is_text(series)):
        return series
    if is_text(series):
        text = series.cast(pl.String)
        is_missing = text.str.strip_chars().is_in([value.strip() for value in values])
    else:
        text = None
        is_missing = as_text(series).is_in(as_text(pl.Series(values, dtype=pl.String)).to_list())
    is_missing = is_missing.fill_null(False)
    if not is_missing.any():
        return series
    kept = series.to_frame().select(pl.when(~is_missing).then(pl.all())).to_series()
    if text is None:
        return kept
    numbers = kept.cast(pl.String)
    if numbers.null_count() == len(numbers) or not numbers.str.contains(PLAIN_NUMBER).all():
        return kept
    integers = numbers.cast(pl.Int64, strict=False)
    is_whole = integers.null_count() == numbers.null_count()
    return integers if is_whole else numbers.cast(pl.Float64)


def is_text(series: pl.Series) -> bool:
    """Whether a column holds text, as names of categories."""
    return series.dtype in (pl.String, pl.Categorical, pl.Enum)


@dataclass(frozen=True)
class Numeric:
    """A column of numbers.

    Parameters
    ----------
    name
        The name of the column.
    fill
        Replaces missing numbers.
    indicator
        Whether a second feature is 1 where the number is missing, and 0 elsewhere.
    missing
        Values that mean missing.
    """

    name: str
    fill: float
    indicator: bool = False
    missing: Names = ()

    @property
    def columns(self) -> Names:
        """The names of its features."""
        return (self.name, f"{self.name}={MISSING}") if self.indicator else (self.name,)

    def write(self, series: pl.Series, out: np.ndarray, *, source: str) -> list[str]:
        """Fill `out`, (n, 1) or (n, 2), and return notes on missing values."""
        numbers = parse_numbers(series, source=source)
        absent = numbers.null_count()
        filled = numbers.fill_null(self.fill).to_numpy()
        out[:, 0] = filled
        if self.indicator:
            out[:, 1] = numbers.is_null().to_numpy()
        notes = []
        if len(filled):
            low, high = (np.array([bound]) for bound in (filled.min(), filled.max()))
            notes = describe_lost_digits([self.name], low, high, source=source)
        if not absent:
            return notes
        mean = f"the mean over all clients' rows, {self.fill:.6g}"
        by = mean if self.fill else "0, the mean over all clients' rows, or no mean is known"
        marked = f"; the feature '{self.columns[1]}' marks them" if self.indicator else ""
        replaced = (
            f"{format_count(absent, 'missing value')} of '{self.name}' replaced by {by}{marked}"
        )
        return [*notes, f"{source}: {replaced}"]

    def read(self, features: np.ndarray, out: np.ndarray) -> None:
        """Fill `out`, (n,), with the numbers behind the features; NaN where they are missing."""
        out[:] = features[:, 0]
        if self.indicator:
            out[features[:, 1] > 0.5] = np.nan


@dataclass(frozen=True)
class Categorical:
    """A column of names; missing values are a level of their own.

    Parameters
    ----------
    name
        The name of the column.
    levels
        Its different values.
    drop_first
        Whether the first level has no indicator.
    shares
        The share of the training rows at each level that has an indicator: the indicators of a
        value that is no level. Empty: they are zero, as in models of version 0.1.
    missing
        Values that mean missing.
    """

    name: str
    levels: Names
    drop_first: bool = True
    shares: tuple[float, ...] = ()
    missing: Names = ()

    @property
    def columns(self) -> Names:
        """The names of its features, ``column=level``."""
        return tuple(f"{self.name}={level}" for level in self.levels[int(self.drop_first) :])

    def write(self, series: pl.Series, out: np.ndarray, *, source: str) -> list[str]:
        """Fill `out`, zeros of shape (n, features), and return notes."""
        text = as_text(series).fill_null(MISSING)
        codes = encode_levels(text, self.levels)
        places = codes - int(self.drop_first)
        rows = np.flatnonzero(places >= 0)
        out[rows, places[rows]] = 1.0
        notes = []
        if (absent := series.null_count()) and MISSING in self.levels:
            found = format_count(absent, "missing value")
            notes.append(f"{source}: {found} of '{self.name}' counted as a category of its own")
        unseen = codes < 0
        if unknown := int(unseen.sum()):
            values = text.filter(pl.Series(unseen)).unique(maintain_order=True).to_list()
            shown = ", ".join(f"'{value[:MAX_NAME_LENGTH]}'" for value in values[:MAX_EXAMPLES])
            shown += ", ..." if len(values) > MAX_EXAMPLES else ""
            share = f"{100 * unknown / len(codes):.3g}%"
            number = f"{format_count(unknown, 'value')} of '{self.name}' ({share})"
            effect = "counted as no category, with all indicators zero"
            if self.shares:
                out[unseen] = self.shares
                effect = "counted as no category"
            notes.append(f"{source}: {number} {UNSEEN}: {shown}; {effect}")
        return notes

    def read(self, features: np.ndarray, out: np.ndarray) -> None:
        """Fill `out`, (n,), with the index of the level; NaN where the value is no level.

        Where no indicator is set, the value is the first level if that has none, or no level.
        """
        if not features.shape[1]:
            out[:] = 0 if self.levels else np.nan
            return
        best = features.argmax(1)
        largest = features[np.arange(len(features)), best]
        out[:] = best + int(self.drop_first)
        out[largest < 1 - ROUNDED] = np.nan  # shares of the levels, or nothing
        if self.drop_first:
            out[largest < ROUNDED] = 0.0


Field = Numeric | Categorical
LATER_KEYS = ("indicator", "missing", "shares")  # of fields; version 0.1 does not know them


@dataclass(frozen=True)
class Encoder:
    """The fields of a table in order. `columns` names the features that they become."""

    fields: tuple[Field, ...]

    @classmethod
    def fit(
        cls,
        frame: pl.DataFrame,
        columns: Iterable[str],
        *,
        rows: np.ndarray | None = None,
        categorical: Sequence[str] = (),
        missing: Names = (),
        indicators: bool = False,
        source: str = "table",
    ) -> Encoder:
        """Learn the levels of text columns and the means of numeric columns.

        Parameters
        ----------
        frame, columns
            The table, and the columns that become features. Numbers and truth values become
            numeric fields, text becomes categorical ones.
        rows
            Mask of the rows to learn from; default: all. Types are those of the whole column.
        categorical
            Columns that become categorical fields, also if they hold numbers.
        missing
            Values that mean missing, see `read_missing`.
        indicators
            Whether a number that `MIN_MISSING` of the rows lack gets a second feature, which says
            that it is missing.
        source
            What error messages call the table.
        """
        fields: list[Field] = []
        for name in columns:
            column = read_missing(get_column(frame, name, source=source), missing)
            series = column if rows is None else column.filter(pl.Series(rows))
            if name in categorical:
                codes = read_codes(series, source=source) if is_numeric(column) else series
                fields.append(_fit_levels(codes, missing, source))
                continue
            check_text(column, source=source)
            if is_numeric(series):
                numbers = parse_numbers(series, source=source)
                known = numbers.drop_nulls().to_numpy()
                mean = float(known.mean()) if len(known) else 0.0
                marked = indicators and len(known) > 0 and numbers.null_count() >= MIN_MISSING
                fields.append(Numeric(name, mean, marked, missing))
            else:
                fields.append(_fit_levels(series, missing, source))
        _check_width(fields, source=source)
        return cls(tuple(fields))

    @property
    def columns(self) -> Names:
        """Names of the features."""
        return tuple(name for field in self.fields for name in field.columns)

    def encode(self, frame: pl.DataFrame, *, source: str = "table") -> tuple[np.ndarray, Names]:
        """Return the features, (n, d) float32, and notes on values that it filled in or ignored."""
        features = np.zeros((frame.height, len(self.columns)), np.float32)
        notes: list[str] = []
        start = 0
        for field in self.fields:
            stop = start + len(field.columns)
            series = get_column(frame, field.name, source=source)
            series = read_missing(series, field.missing)
            notes += field.write(series, features[:, start:stop], source=source)
            start = stop
        return features, tuple(notes)

    @property
    def level_counts(self) -> tuple[int, ...]:
        """The number of levels of each field; 0 for a field of numbers."""
        return tuple(len(f.levels) if isinstance(f, Categorical) else 0 for f in self.fields)

    @property
    def are_categorical(self) -> tuple[bool, ...]:
        """Whether each field holds categories."""
        return tuple(isinstance(field, Categorical) for field in self.fields)

    def to_fields(self, features: np.ndarray) -> np.ndarray:
        """Return one value per field, (n, fields) float32, from what `encode` returned.

        The value is the number, or the index of the level. It is NaN where a number is marked as
        missing and where a category is none of the levels.
        """
        out = np.empty((len(features), len(self.fields)), np.float32)
        start = 0
        for i, field in enumerate(self.fields):
            stop = start + len(field.columns)
            field.read(features[:, start:stop], out[:, i])
            start = stop
        return out

    def to_json(self) -> str:
        """Return the fields as a JSON list.

        What version 0.1 did not know is left out where it is unset, so that the fingerprint of a
        schema stays the same.
        """
        contents = (asdict(field).items() for field in self.fields)
        return json.dumps(
            [{k: v for k, v in content if v or k not in LATER_KEYS} for content in contents]
        )

    @classmethod
    def from_json(cls, text: str) -> Encoder:
        """Return the encoder that `to_json` wrote; raise ValueError for any other text."""
        try:
            encoder = cls(tuple(map(_parse_field, parse_json(text))))
            _check_width(encoder.fields, source="encoder")
        except (KeyError, TypeError, OverflowError, FedgftError) as error:
            raise ValueError(f"not an encoder of fedgft ({error})") from None
        if len({field.name for field in encoder.fields}) < len(encoder.fields):
            raise ValueError("a column is there twice")
        return encoder


def _check_width(fields: Sequence[Field], *, source: str) -> None:
    texts = [field for field in fields if isinstance(field, Categorical)]
    total = sum(len(field.levels) for field in texts)
    if total > MAX_INDICATORS:
        widest = max(texts, key=lambda field: len(field.levels))
        problem = f"its {len(texts)} text columns have {total:,} different values together"
        limit = f"one feature each, more than the {MAX_INDICATORS:,} there may be"
        remedy = f"take some out, such as '{widest.name}', with {len(widest.levels):,} of them"
        raise data_error(source, f"{problem}, {limit}: {remedy}")


def _parse_field(content: dict[str, Any]) -> Field:
    name = require_encodable(content["name"])
    missing = tuple(map(require_encodable, content.get("missing", [])))
    if "fill" in content:
        if not np.isfinite(content["fill"]):
            raise ValueError(f"the value that fills '{name}' is no finite number")
        indicator = content.get("indicator", False)
        if not isinstance(indicator, bool):
            raise ValueError(f"'{name}' does not say whether its absence is a feature")
        return Numeric(name, float(content["fill"]), indicator, missing)
    levels = tuple(map(require_encodable, content["levels"]))
    if len(set(levels)) < len(levels) or not isinstance(content["drop_first"], bool):
        raise ValueError(f"'{name}' has a level twice")
    shares = tuple(map(float, content.get("shares", [])))
    field = Categorical(name, levels, content["drop_first"], shares, missing)
    if shares and len(shares) != len(field.columns):
        raise ValueError(f"'{name}' has a share that is of no level")
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"'{name}' has a share that is none")
    return field


def read_codes(series: pl.Series, *, source: str) -> pl.Series:
    """Return a column of numbers that are codes as text; refuse fractions."""
    if series.dtype.is_float():
        numbers = parse_numbers(series, source=source)
        if (numbers != numbers.round()).any():
            problem = f"column '{series.name}' holds fractions, not codes (`categorical`)"
            raise data_error(source, problem)
    return as_text(series)


def _fit_levels(series: pl.Series, missing: Names, source: str) -> Categorical:
    """Return the levels of a column and their shares."""
    levels = _find_levels(series, source=source)
    codes = encode_levels(as_text(series).fill_null(MISSING), levels)
    counts = np.bincount(codes, minlength=len(levels))[1:]
    shares = tuple((counts / max(1, len(codes))).tolist())
    return Categorical(series.name, levels, shares=shares, missing=missing)


def _find_levels(series: pl.Series, *, source: str) -> Names:
    """Return the sorted levels of a text column, `MISSING` last."""
    if series.dtype not in (pl.String, pl.Categorical, pl.Enum, pl.Null):
        problem = f"column '{series.name}' ({series.dtype}) is neither numbers nor text"
        raise data_error(source, f"{problem}: convert it or leave it out (`leave_out`)")
    levels = as_text(series).fill_null(MISSING).unique().to_list()
    if len(levels) > MAX_LEVELS:
        problem = f"text column '{series.name}' has {len(levels):,} different values"
        limit = f"more than the {MAX_LEVELS:,} a category may have"
        raise data_error(source, f"{problem}, {limit}: leave it out (`leave_out`)")
    return tuple(sorted(levels, key=lambda level: (level == MISSING, level)))
