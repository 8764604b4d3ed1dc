"""From the columns of a raw table to the features of a model, and the same way again later.

A numeric column is one feature. A categorical column with levels l_0, l_1, ... is one indicator
a level, the first of them dropped: it is the reference, and keeping it would make the indicators
of a column sum to one, the intercept once more. The encoder is stored beside a model, so that a
file met years later is read exactly as the training rows were.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.data.columns import as_text, check_text, codes_of, column_of, numbers_of
from fedgft.errors import FedgftError
from fedgft.files import parsed, proper

if TYPE_CHECKING:
    import polars as pl

MISSING = "(missing)"
MOST_INDICATORS = 10_000  # of all text columns: a row of a few words would become as many numbers
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
        mean = f"the mean over all clients' rows, {self.fill:.6g}"
        by = mean if self.fill else "0, the mean over all clients' rows, or for want of one"
        return [f"{source}: {absent} missing value(s) of '{self.name}' replaced by {by}"]


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
        rows: np.ndarray | None = None,
        source: str = "table",
    ) -> "Encoder":
        """Levels and means of `rows` (a mask; all where it is not given), types of the whole.

        Numbers and truth values are numeric, text is not.
        """
        import polars as pl

        fields: list[Numeric | Categorical] = []
        for name in columns:
            whole = column_of(frame, name, source=source)
            check_text(whole, source=source)
            series = whole if rows is None else whole.filter(pl.Series(rows))
            if series.dtype.is_numeric() or series.dtype == pl.Boolean:
                fields.append(Numeric(name, _mean(numbers_of(series, source=source))))
            else:
                fields.append(Categorical(name, _levels(series, source=source)))
        _check_width(fields, source=source)
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

    def to_json(self) -> str:
        return json.dumps([asdict(field) for field in self.fields])

    @classmethod
    def from_json(cls, text: str) -> "Encoder":
        """What `to_json` made; ValueError where it is anything else."""
        try:
            made = cls(tuple(map(_field, parsed(text))))
            _check_width(made.fields, source="encoder")
        except (KeyError, TypeError, OverflowError, FedgftError) as error:
            raise ValueError(f"no encoder of ours ({error})") from None
        if len({field.name for field in made.fields}) < len(made.fields):
            raise ValueError("a column is there twice")
        return made


def _check_width(fields: Sequence[Numeric | Categorical], *, source: str) -> None:
    texts = [field for field in fields if isinstance(field, Categorical)]
    total = sum(len(field.levels) for field in texts)
    if total > MOST_INDICATORS:
        most = max(texts, key=lambda field: len(field.levels))
        raise FedgftError(
            f"{source}: its {len(texts)} text columns have {total:,} different values together, a "
            f"feature each, more than the {MOST_INDICATORS:,} there may be: take some out, such as "
            f"'{most.name}', with {len(most.levels):,} of them"
        )


def _field(held: dict[str, Any]) -> Numeric | Categorical:
    name = proper(held["name"])
    if "fill" in held:
        if not np.isfinite(held["fill"]):
            raise ValueError(f"'{name}' is filled in with no number")
        return Numeric(name, float(held["fill"]))
    levels = tuple(map(proper, held["levels"]))
    if len(set(levels)) < len(levels) or not isinstance(held["drop_first"], bool):
        raise ValueError(f"'{name}' has levels twice")
    return Categorical(name, levels, held["drop_first"])


def _mean(numbers: "pl.Series") -> float:
    known = numbers.drop_nulls().to_numpy()
    return float(known.mean()) if len(known) else 0.0


def _levels(series: "pl.Series", *, source: str) -> tuple[str, ...]:
    import polars as pl

    if series.dtype not in (pl.String, pl.Categorical, pl.Enum, pl.Null):
        raise FedgftError(
            f"{source}: column '{series.name}' ({series.dtype}) is neither numbers nor text: "
            "convert it or leave it out (--leave-out)"
        )
    levels = as_text(series).fill_null(MISSING).unique().to_list()
    if len(levels) > MOST_LEVELS:
        raise FedgftError(
            f"{source}: text column '{series.name}' has {len(levels):,} different values, more "
            f"than the {MOST_LEVELS:,} a category may have: leave it out (--leave-out)"
        )
    return tuple(sorted(levels, key=lambda level: (level == MISSING, level)))
