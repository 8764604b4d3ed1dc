"""Read tables that may not be pooled in the same way: sites describe them and agree on a schema.

A description holds the names of a site's columns; for columns of numbers the count, the sum and the
sum of squares about the site's own mean; for columns of text how often each value occurs; and the
values of label and group. Values that occur in few rows are left out. `fedgft.data.agreement` makes
one schema from all descriptions. Its encoder and its scaling are those of the pooled rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.data.dataset import Moments
from fedgft.data.encode import (
    MISSING,
    Encoder,
    Names,
    as_text,
    check_text,
    data_error,
    encode_levels,
    get_column,
    is_numeric,
    parse_numbers,
)
from fedgft.data.table import MAX_VALUES, split_group_columns
from fedgft.errors import FedgftError, LazyModule
from fedgft.store import file_error, parse_json, require_encodable

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

FORMAT = "fedgft-schema-1"
EMPTY = "empty"  # the kind of a column without values
Description = dict[str, Any]


@dataclass(frozen=True)
class Schema:
    """How every site reads its rows.

    Parameters
    ----------
    label, group
        The label column, and the columns whose combinations are the groups.
    classes, groups
        Names of the classes and groups, in the order of their indices.
    encoder
        How the other columns become features.
    mean, spread
        (d,) a model receives ``(features - mean) / spread``.
    """

    label: str
    group: Names
    classes: Names
    groups: Names
    encoder: Encoder
    mean: np.ndarray
    spread: np.ndarray

    def read(
        self, frame: pl.DataFrame, *, source: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Names]:
        """Read a site's table.

        Returns
        -------
        features, labels, groups, notes
            (n, d) scaled features; (n,) class indices; (n,) group indices, -1 where the group is
            not recorded or unknown; notes on what was filled in.
        """
        for name in (self.label, *self.group):
            get_column(frame, name, source=source)
        features, notes = self.encoder.encode(frame, source=source)
        _check_labels(frame, self.label, source=source)
        labels = encode_levels(as_text(frame[self.label]), self.classes)
        _check_known(frame[self.label], labels, self.classes, source=source)
        cells = _combine_groups(frame, self.group)
        groups = encode_levels(cells, self.groups)
        unknown = int((groups < 0).sum()) - cells.null_count()
        if unknown > len(groups) / 2:
            _check_known(cells.alias(", ".join(self.group)), groups, self.groups, source=source)
        if unknown:
            note = f"{unknown} row(s) of groups that the federation does not know"
            notes = (*notes, f"{source}: {note} count as not recorded")
        return (features - self.mean) / self.spread, labels, groups, notes

    def to_json(self) -> str:
        """Return the schema as one line of JSON."""
        content = {"format": FORMAT, **vars(self), "encoder": json.loads(self.encoder.to_json())}
        return json.dumps(content | {"mean": self.mean.tolist(), "spread": self.spread.tolist()})

    def fingerprint(self) -> str:
        """Return the SHA-256 of the JSON: sites that agreed on a schema can pin it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_file(cls, path: Path) -> Schema:
        """Read a file that holds `to_json`."""
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise file_error(f"schema {path}", f"cannot be read ({reason})") from None
        return cls.from_json(text, source=str(path))

    @classmethod
    def from_json(cls, text: str, *, source: str = "schema") -> Schema:
        """Return what `to_json` wrote; raise FedgftError for any other text."""
        try:
            content = parse_json(text)
            if content["format"] != FORMAT:
                raise file_error(source, f"format is {content['format']!r}, not {FORMAT!r}")
            names = {key: _parse_names(content, key) for key in ("group", "classes", "groups")}
            schema = cls(
                label=require_encodable(content["label"]),
                encoder=Encoder.from_json(json.dumps(content["encoder"])),
                mean=np.array(content["mean"], np.float64),
                spread=np.array(content["spread"], np.float64),
                **names,
            )
        except FedgftError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise file_error(source, f"not a schema that fedgft wrote ({error})") from None
        scaling = (schema.mean, schema.spread)
        width = len(schema.encoder.columns)
        fits = all(part.shape == (width,) and np.isfinite(part).all() for part in scaling)
        if not fits or not (schema.spread > 0).all():
            raise file_error(source, "the scaling does not fit the columns")
        return schema


def _parse_names(content: dict[str, Any], key: str) -> Names:
    if not isinstance(content[key], list) or not content[key]:
        raise ValueError(f"'{key}' lists nothing")
    return tuple(map(require_encodable, content[key]))


def describe_table(
    frame: pl.DataFrame,
    *,
    label: str,
    group: str,
    leave_out: Sequence[str] = (),
    min_rows: int = 10,
    source: str,
) -> Description:
    """Describe a site's table for the agreement on a schema.

    Parameters
    ----------
    frame
        The rows of the site.
    label, group
        The label column and the group column, or several as "race,sex".
    leave_out
        Columns that are not features.
    min_rows
        Values that occur in fewer rows, and sums of fewer numbers, are left out.
    source
        What error messages call the table.

    Returns
    -------
    Description
        ``{"rows": n, "columns": {name: {"kind": ...}}, "labels": [...], "groups": [...]}``. The
        kind is "numbers" (with ``count``, ``sum``, ``around``), "text" (with ``levels``: rows per
        value) or "empty".
    """
    groups = split_group_columns(group, frame.columns)
    for name in (label, *groups):
        get_column(frame, name, source=source)
    _check_labels(frame, label, source=source)
    if label in groups:
        raise FedgftError(f"{source}: column '{label}' is both the label and the group")
    if frame.height < min_rows:
        raise data_error(source, f"has {frame.height} row(s), too few to be described")
    names = [name for name in frame.columns if name not in (label, *leave_out)]
    if not names:
        raise data_error(source, "no column is left to learn from")
    return {
        "rows": frame.height,
        "columns": {name: _describe_column(frame, name, min_rows, source=source) for name in names},
        "labels": _find_frequent(as_text(frame[label]), min_rows, source=source),
        "groups": _find_frequent(_combine_groups(frame, groups), min_rows, source=source),
    }


def _check_labels(frame: pl.DataFrame, label: str, *, source: str) -> None:
    if absent := frame[label].null_count():
        problem = f"label column '{label}' lacks {absent} value(s): take those rows out"
        raise data_error(source, problem)


def _find_frequent(series: pl.Series, min_rows: int, *, source: str) -> list[str]:
    """Return the values that occur in at least `min_rows` rows, sorted."""
    counts = dict(series.drop_nulls().value_counts().iter_rows())
    if len(counts) > MAX_VALUES:
        problem = f"column '{series.name}' has {len(counts)} values: it is no label or group"
        raise data_error(source, f"{problem} of people")
    return sorted(value for value, number in counts.items() if number >= min_rows)


def _describe_column(
    frame: pl.DataFrame, name: str, min_rows: int, *, source: str
) -> dict[str, Any]:
    series = get_column(frame, name, source=source)
    check_text(series, source=source)
    if series.null_count() == len(series):
        return {"kind": EMPTY}  # at other sites it may be of any kind
    if not is_numeric(series):
        counts = dict(as_text(series).fill_null(MISSING).value_counts().iter_rows())
        return {"kind": "text", "levels": {v: int(n) for v, n in counts.items() if n >= min_rows}}
    known = parse_numbers(series, source=source).drop_nulls().to_numpy()
    if len(known) < min_rows:  # the sum of a few numbers tells too much about them
        known = known[:0]
    # Sum the float32 values that the encoder passes to a model: they round a time by a minute.
    sums = Moments.of(known.astype(np.float32).astype(np.float64)[:, None])
    moments = {"count": len(known), "sum": sums.sum.item(), "around": sums.around.item()}
    return {"kind": "numbers", **moments}


def _combine_groups(frame: pl.DataFrame, columns: Sequence[str]) -> pl.Series:
    """Return the group of each row as text, "White & Female"; null where a part is missing."""
    parts = [as_text(frame[name]).alias(f"part{i}") for i, name in enumerate(columns)]
    return pl.DataFrame(parts).select(pl.concat_str(pl.all(), separator=" & ")).to_series()


def _check_known(series: pl.Series, codes: np.ndarray, names: Names, *, source: str) -> None:
    unknown = series.filter(codes < 0).drop_nulls()
    if len(unknown):
        known = f"the federation knows {', '.join(names)}"
        raise data_error(source, f"column '{series.name}' holds '{unknown[0]}'; {known}")
