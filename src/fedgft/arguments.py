"""Checks of arguments: each returns the value or raises a `FedgftError` that names it."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from numbers import Integral, Real
from os import PathLike
from typing import Any

import numpy as np

from fedgft.errors import FedgftError

LONGEST = 60  # characters of a value that a message shows


def shown(value: Any) -> str:
    """The value as a message can show it: one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def whole_number(
    name: str, value: Any, *, least: int | None = None, most: int | None = None
) -> int:
    """`value` as an int: Python's or numpy's, no bool and no fraction."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise FedgftError(f"{name} must be a whole number, not {shown(value)}")
    number = int(value)
    if least is not None and number < least:
        raise FedgftError(f"{name} must be at least {least}, not {number}")
    if most is not None and number > most:
        raise FedgftError(f"{name} must be at most {most:,}, not {number:,}")
    return number


def real_number(name: str, value: Any, *, finite: bool = True) -> float:
    """`value` as a float: no text, no bool; NaN and infinity only where `finite` is off."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise FedgftError(f"{name} must be a number, not {shown(value)}")
    number = float(value)
    if finite and (number != number or number in (float("inf"), float("-inf"))):
        raise FedgftError(f"{name} must be a finite number, not {number}")
    return number


def numbers_per_run(name: str, value: Any) -> Any:
    """`value`, if it is one number, or an array of one per run."""
    if isinstance(value, Real) and not isinstance(value, bool):
        value = float(value)
    try:
        array = np.asarray(value)
    except Exception:  # lists of different lengths, and whatever else stands for an array
        array = np.empty(0, object)
    if array.dtype.kind not in "fiu" or array.ndim > 1:
        raise FedgftError(f"{name} must be a number, or one per run, not {shown(value)}")
    return value


def one_of(name: str, value: Any, choices: Sequence[str]) -> Any:
    """`value`, if it is one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise FedgftError(f"{name} {shown(value)} is not known; choose from {', '.join(choices)}")
    return value


def names(name: str, values: Any, *, least: int = 0) -> tuple[str, ...]:
    """`values` as a tuple of texts; one text is no sequence of letters."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise FedgftError(f"{name} must be a tuple of names, not {shown(values)}")
    held = tuple(values)
    wrong = [value for value in held if not isinstance(value, str)]
    if wrong:
        raise FedgftError(f"{name} must hold texts, not {shown(wrong[0])}")
    if len(held) < least:
        raise FedgftError(f"{name} must hold at least {least} names, not {len(held)}")
    return held


def column_names(name: str, value: Any) -> tuple[str, ...]:
    """One name of a column, or several, as a tuple."""
    return (value,) if isinstance(value, str) else names(name, value)


def path_of(name: str, value: Any) -> Any:
    """`value`, if it can be the name of a file."""
    if not isinstance(value, str | PathLike):
        raise FedgftError(f"{name} must be the name of a file, not {shown(value)}")
    return value


def array_of(name: str, value: Any) -> np.ndarray:
    """`value` as an array, where it can be one: rows of one length."""
    try:
        return np.asarray(value)
    except Exception as error:  # what stands for an array may raise anything
        raise FedgftError(f"{name} cannot be read as an array ({type(error).__name__})") from None


def instance(name: str, value: Any, kind: type, hint: str = "") -> Any:
    """`value`, if it is of this class."""
    if not isinstance(value, kind):
        more = f"; {hint}" if hint else ""
        raise FedgftError(f"{name} must be a {kind.__name__}, not {shown(value)}{more}")
    return value


def check_indices(**columns: Any) -> None:
    """Refuses pandas objects whose rows are in different orders.

    Nothing is aligned. Arrays and lists have no index, and rows are matched by position; so are
    those of a default index (0, 1, 2, ...) beside an index with other labels, as when predictions
    are put into a new Series. Two indices with the same labels in another order, or two that are
    not default and hold different labels, mean different rows.
    """
    found = [(name, values.index) for name, values in columns.items() if _has_index(values)]
    for (first, reference), (name, index) in combinations(found, 2):
        if len(index) != len(reference) or index.equals(reference):
            continue  # lengths are compared elsewhere
        advice = f"align them ({name}.loc[{first}.index]) or drop the index (.to_numpy())"
        if Counter(index) == Counter(reference):
            raise FedgftError(f"{name} has the pandas index of {first} in another order: {advice}")
        if not _is_default(index) and not _is_default(reference):
            raise FedgftError(f"{name} has another pandas index than {first}: {advice}")


def _has_index(values: Any) -> bool:
    """A Series or a frame of pandas, which need not be installed; a list has a method `index`."""
    return hasattr(getattr(values, "index", None), "equals")


def _is_default(index: Any) -> bool:
    return type(index).__name__ == "RangeIndex" and index.start == 0 and index.step == 1
