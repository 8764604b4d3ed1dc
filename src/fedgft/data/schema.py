"""Tables that nobody may pool, read alike: sites describe their columns, a schema is agreed on.

A site says which columns it has, of numbers the count, sum and sum of squares about its own mean,
of text how often each value occurs, and the values of label and group; of what concerns few rows it
says nothing. From that follow one encoder and one scaling for everybody: those of the pooled rows,
had anybody seen them.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.data.columns import as_text, check_text, codes_of, column_of, numbers_of
from fedgft.data.encoding import MISSING, Encoder
from fedgft.data.roles import MOST_VALUES, group_columns
from fedgft.data.scaling import Moments
from fedgft.errors import FedgftError
from fedgft.files import parsed, proper

if TYPE_CHECKING:
    import polars as pl

FORMAT = "fedgft-schema-1"
EMPTY = "empty"
Description = dict[str, Any]


@dataclass(frozen=True)
class Schema:
    """How every site reads its rows."""

    label: str
    group: tuple[str, ...]
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    encoder: Encoder
    mean: np.ndarray
    spread: np.ndarray

    def read(
        self, frame: "pl.DataFrame", *, source: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
        """Features, labels, groups (-1: not recorded), and notes on what had to be filled in."""
        for name in (self.label, *self.group):
            column_of(frame, name, source=source)
        features, notes = self.encoder.encode(frame, source=source)
        _complete(frame, self.label, source)
        labels = codes_of(as_text(frame[self.label]), self.classes)
        _known(frame[self.label], labels, self.classes, source=source)
        cells = _cells(frame, self.group)
        groups = codes_of(cells, self.groups)
        unknown = int((groups < 0).sum()) - cells.null_count()
        if unknown > len(groups) / 2:
            _known(cells.alias(", ".join(self.group)), groups, self.groups, source=source)
        if unknown:
            notes = (*notes, f"{source}: {unknown} row(s) of groups that the federation does not "
                     "know count as not recorded")  # fmt: skip
        return (features - self.mean) / self.spread, labels, groups, notes

    def to_json(self) -> str:
        return json.dumps({
            "format": FORMAT, "label": self.label, "group": self.group, "classes": self.classes,
            "groups": self.groups, "encoder": json.loads(self.encoder.to_json()),
            "mean": self.mean.tolist(), "spread": self.spread.tolist(),
        })  # fmt: skip

    def fingerprint(self) -> str:
        """SHA-256 of its JSON: sites that agreed on a schema can pin it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_file(cls, path: Path) -> "Schema":
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise FedgftError(f"schema {path}: cannot be read ({reason})") from None
        return cls.from_json(text, source=str(path))

    @classmethod
    def from_json(cls, text: str, *, source: str = "schema") -> "Schema":
        try:
            held = parsed(text)
            if held["format"] != FORMAT:
                raise FedgftError(f"{source}: format is {held['format']!r}, not {FORMAT!r}")
            group, classes, groups = (_texts(held, w) for w in ("group", "classes", "groups"))
            encoder = Encoder.from_json(json.dumps(held["encoder"]))
            mean, spread = (np.array(held[what], np.float64) for what in ("mean", "spread"))
            made = cls(proper(held["label"]), group, classes, groups, encoder, mean, spread)
        except FedgftError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise FedgftError(f"{source}: not a schema that fedgft wrote ({error})") from None
        width = (len(encoder.columns),)
        fits = mean.shape == spread.shape == width and np.isfinite([mean, spread]).all()
        if not fits or not (spread > 0).all():
            raise FedgftError(f"{source}: the scaling does not fit the columns")
        return made


def _texts(held: dict[str, Any], what: str) -> tuple[str, ...]:
    if not isinstance(held[what], list) or not held[what]:
        raise ValueError(f"'{what}' lists nothing")
    return tuple(map(proper, held[what]))


def describe(
    frame: "pl.DataFrame", *, label: str, group: str, aside: Sequence[str] = (), rare: int = 10,
    source: str,
) -> Description:  # fmt: skip
    """What a site says about its table. Values of fewer than `rare` rows are not named."""
    groups = group_columns(group, frame.columns)
    for name in (label, *groups):
        column_of(frame, name, source=source)
    _complete(frame, label, source)
    if label in groups:
        raise FedgftError(f"{source}: column '{label}' is both the label and the group")
    if frame.height < rare:
        raise FedgftError(f"{source}: has {frame.height} row(s), too few to be described")
    taken = {label, *aside}
    columns = {name: _described(frame, name, rare, source) for name in frame.columns
               if name not in taken}  # fmt: skip
    if not columns:
        raise FedgftError(f"{source}: no column is left to learn from")
    labels = _frequent(as_text(frame[label]), rare, source)
    cells = _frequent(_cells(frame, groups), rare, source)
    return {"rows": frame.height, "columns": columns, "labels": labels, "groups": cells}


def _complete(frame: "pl.DataFrame", label: str, source: str) -> None:
    if absent := frame[label].null_count():
        raise FedgftError(f"{source}: label column '{label}' lacks {absent} value(s): take those "
                          "rows out")  # fmt: skip


def _frequent(series: "pl.Series", rare: int, source: str) -> list[str]:
    """The values that so many rows have."""
    counts = dict(series.drop_nulls().value_counts().iter_rows())
    if len(counts) > MOST_VALUES:
        raise FedgftError(f"{source}: column '{series.name}' has {len(counts)} values: it is no "
                          "label or group of people")  # fmt: skip
    return sorted(value for value, number in counts.items() if number >= rare)


def _described(frame: "pl.DataFrame", name: str, rare: int, source: str) -> dict[str, Any]:
    import polars as pl

    series = column_of(frame, name, source=source)
    check_text(series, source=source)
    if series.null_count() == len(series):
        return {"kind": EMPTY}  # may be anything
    if series.dtype.is_numeric() or series.dtype == pl.Boolean:
        known = numbers_of(series, source=source).drop_nulls().to_numpy()
        if len(known) < rare:  # the sum of a few numbers is somebody's
            known = known[:0]
        # of the numbers as the encoder gives them to a model: float32 rounds a time by a minute
        sums = Moments.of(known.astype(np.float32).astype(np.float64)[:, None])
        return {"kind": "numbers", "count": len(known), "sum": sums.sum.item(),
                "around": sums.around.item()}  # fmt: skip
    text = as_text(series).fill_null(MISSING)
    counts = dict(text.value_counts().iter_rows())
    return {"kind": "text", "levels": {v: int(n) for v, n in counts.items() if n >= rare}}


def _cells(frame: "pl.DataFrame", groups: Sequence[str]) -> "pl.Series":
    """The group of each row as text; null where a part of it is missing."""
    import polars as pl

    parts = [as_text(frame[name]).alias(f"part{i}") for i, name in enumerate(groups)]
    return pl.DataFrame(parts).select(pl.concat_str(pl.all(), separator=" & ")).to_series()


def _known(series: "pl.Series", codes: np.ndarray, names: tuple[str, ...], *, source: str) -> None:
    strange = series.filter(codes < 0).drop_nulls()
    if len(strange):
        raise FedgftError(
            f"{source}: column '{series.name}' holds '{strange[0]}'; the federation knows "
            f"{', '.join(names)}"
        )
