"""Choose which columns of a user's table are features.

Every column without another role is a feature, except the group, columns that look like identifiers
of rows, and columns that have no value or one text only. A model that learns from an identifier
memorizes training rows. The rule for identifiers is strict, so that amounts, ages and counts stay
features:

- a column of whole numbers whose name says so ("customer_id", "PatientID", "account number") and
  whose values nearly all differ;
- a column of whole numbers without gap or repetition, such as 1, 2, ..., n, in 100 rows or more;
- a column of text that differs in nearly every row, in 100 rows or more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from fedgft.data.encode import Names, check_text, is_numeric, is_text
from fedgft.errors import LazyModule

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

Excluded = tuple[tuple[str, str], ...]  # (column, reason) of the columns that are not features
ID_WORDS = {"id", "ids", "identifier", "uuid", "guid", "ssn"}  # anywhere in a column's name
NUMBER_WORDS = {"number", "num", "no", "nr", "key", "index", "idx"}  # at the end of a name
MAX_CODES = 20  # a column "job_id" with so few different numbers holds categories
MAX_LIKELY_CODES = 10
MIN_ROWS = 100  # with fewer rows, different values may be chance
MIN_NAMED_ROWS = 20  # the same for a name that ends in one of `NUMBER_WORDS`
NEARLY_ALL = 0.95  # share of different values in a text column that identifies rows
LABEL = "the label"
CLIENT = "the client"
SPLIT = "the split"
WEIGHT = "the weight of a row"
GROUP = "the group"
LEFT_OUT = "left out"
NO_VALUE = "has no value"
NOT_FEATURES = "not features: "  # how the note begins that lists them
ONE_VALUE = "has one value only"
ROLE_REASONS = (LABEL, CLIENT, SPLIT, WEIGHT)


def explain_identifier(series: pl.Series, *, source: str = "table") -> str:
    """Return why a column looks like an identifier of rows; empty if it does not.

    The rule is that of this module.

    Parameters
    ----------
    series
        The column.
    source
        What the error about a damaged column of numbers calls the table.
    """
    known = series.drop_nulls()
    if is_text(series):
        if len(known) < MIN_ROWS or known.n_unique() < NEARLY_ALL * len(known):
            return ""
        check_text(series, source=source)
        return "looks like an identifier: nearly every row has another text"
    if series.dtype == pl.Boolean or not is_numeric(series) or not _holds_whole_numbers(known):
        return ""
    distinct = known.n_unique()
    all_differ = distinct == len(known)
    words = split_words(series.name)
    named = distinct > MAX_CODES or (all_differ and distinct > 1)
    numbered = all_differ and distinct >= MIN_NAMED_ROWS
    if (ID_WORDS & set(words) and named) or (NUMBER_WORDS & set(words[-1:]) and numbered):
        return f"looks like an identifier: its name, and {distinct:,} different numbers"
    numbers = known.to_numpy()
    if all_differ and distinct >= MIN_ROWS and int(np.ptp(numbers)) + 1 == distinct:
        return "looks like an identifier: whole numbers without gap or repetition"
    return ""


def _holds_whole_numbers(known: pl.Series) -> bool:
    if known.dtype.is_integer():
        return True
    return bool(len(known) and (known.is_finite() & (known == known.round())).all())


def find_codes(frame: pl.DataFrame, columns: Iterable[str], *, kept: Iterable[str]) -> list[str]:
    """Return the columns of whole numbers that may be codes, not amounts.

    They have 3 to `MAX_LIKELY_CODES` different values in `MIN_ROWS` rows or more.

    Parameters
    ----------
    frame
        The table.
    columns
        The columns to look at.
    kept
        Columns that the user has named: it is known what they hold.
    """
    known = set(kept)
    found = []
    for name in columns:
        series = frame[name].drop_nulls()
        if name in known or len(series) < MIN_ROWS or not is_numeric(series):
            continue
        if series.dtype == pl.Boolean or not 3 <= series.n_unique() <= MAX_LIKELY_CODES:
            continue
        if _holds_whole_numbers(series):
            found.append(name)
    return found


def split_words(name: str) -> list[str]:
    """Return the words of a column's name in lower case: "customerID" is customer and id."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def exclude_columns(
    frame: pl.DataFrame, reasons: dict[str, str], keep: Iterable[str], *, source: str
) -> Excluded:
    """Return the columns that are not features, in the order of the table, with the reasons.

    Parameters
    ----------
    frame
        The table.
    reasons
        Columns that have another role, and the role.
    keep
        Columns that are features although the rules of this module would exclude them.
    source
        What error messages call the table.
    """
    kept = set(keep)
    found = dict(reasons)
    for name in frame.columns:
        if name in reasons or name in kept:
            continue
        series = frame[name]
        if series.null_count() == frame.height:
            found[name] = NO_VALUE
        elif is_text(series) and series.n_unique() == 1:
            found[name] = ONE_VALUE
        elif reason := explain_identifier(series, source=source):
            found[name] = reason
    return tuple((name, found[name]) for name in frame.columns if name in found)


def describe_excluded(excluded: Excluded) -> Names:
    """Return a note on the columns that are not features for another reason than their role."""
    listed = [f"'{name}' ({why})" for name, why in excluded if why not in ROLE_REASONS]
    return (f"{NOT_FEATURES}{', '.join(listed)}",) if listed else ()
