"""Checks of arguments: each returns the value or raises a `FedgftError` about the argument."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from numbers import Integral, Real
from os import PathLike
from typing import Any

import numpy as np

from fedgft.errors import FedgftError

MAX_LENGTH = 60  # most characters of a value in a message
NO_NUMBERS_AS_LABELS = (
    "regression is not supported here, but its errors can be measured (measure_regression, or a "
    "target column and a prediction): see the page 'What is not supported' of the documentation"
)
"The end of a message about a label that holds numbers instead of classes."


def format_value(value: Any) -> str:
    """Return the value as one short line for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}..."


def _argument_error(name: str, problem: str) -> FedgftError:
    """Return an error about an argument; the text holds a name such as ``adjust_to['sex']``."""
    if re.fullmatch("[a-z][a-z0-9_]*", name):
        return FedgftError(problem, field=name)
    return FedgftError(f"{name} {problem}")


def check_integer(
    name: str, value: Any, *, least: int | None = None, most: int | None = None
) -> int:
    """Require a Python or NumPy integer (not a bool) within the bounds; return an int."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _argument_error(name, f"must be a whole number, not {format_value(value)}")
    number = int(value)
    if least is not None and number < least:
        raise _argument_error(name, f"must be at least {least}, not {number}")
    if most is not None and number > most:
        raise _argument_error(name, f"must be at most {most:,}, not {number:,}")
    return number


def check_number(name: str, value: Any, *, finite: bool = True) -> float:
    """Require a number (not a bool), which must be finite if `finite` is True; return a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _argument_error(name, f"must be a number, not {format_value(value)}")
    number = float(value)
    if finite and not np.isfinite(number):
        raise _argument_error(name, f"must be a finite number, not {number}")
    return number


def check_number_per_run(
    name: str, value: Any, *, least: float | None = None, runs: int | None = None
) -> Any:
    """Require one number (returned as a float), or an array with one number per run.

    Parameters
    ----------
    name, value
        The argument.
    least
        All numbers must be finite and at least this.
    runs
        The number of runs, if it is known.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        value = float(value)
    array = as_array(name, value)
    if array.dtype.kind not in "fiu" or array.ndim > 1:
        raise _argument_error(name, f"must be a number, or one per run, not {format_value(value)}")
    if least is not None and not (np.isfinite(array) & (array >= least)).all():
        raise _argument_error(name, f"must be a number >= {least:g}, got {value}")
    if runs is not None and array.shape not in ((), (runs,)):
        text = f"must be one number, or one per run ({runs}), and its shape is"
        raise _argument_error(name, f"{text} {array.shape}")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """Require one of the choices."""
    if not isinstance(value, str) or value not in choices:
        text = f"{format_value(value)} is not known; choose from {', '.join(choices)}"
        raise _argument_error(name, text)
    return value


def check_name_list(name: str, values: Any, *, least: int = 0) -> tuple[str, ...]:
    """Require at least `least` texts; return a tuple. A single text is refused."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise _argument_error(name, f"must be a tuple of names, not {format_value(values)}")
    names = tuple(values)
    if wrong := [value for value in names if not isinstance(value, str)]:
        raise _argument_error(name, f"must hold texts, not {format_value(wrong[0])}")
    if len(names) < least:
        raise _argument_error(name, f"must hold at least {least} names, not {len(names)}")
    return names


def check_column_names(name: str, value: Any) -> tuple[str, ...]:
    """Require the name of a column, or several; return a tuple."""
    return (value,) if isinstance(value, str) else check_name_list(name, value)


def check_path(name: str, value: Any) -> Any:
    """Require something that can name a file."""
    if not isinstance(value, str | PathLike):
        raise _argument_error(name, f"must be the name of a file, not {format_value(value)}")
    return value


def as_array(name: str, value: Any) -> np.ndarray:
    """Return the value as an array; its rows must have equal lengths."""
    try:
        return np.asarray(value)
    except Exception as error:  # array-like objects may raise anything
        text = f"cannot be read as an array ({type(error).__name__})"
        raise _argument_error(name, text) from None


def check_instance(name: str, value: Any, kind: type, hint: str = "") -> Any:
    """Require an instance of a class; `hint` ends the message."""
    if not isinstance(value, kind):
        text = f"must be a {kind.__name__}, not {format_value(value)}"
        raise _argument_error(name, f"{text}; {hint}" if hint else text)
    return value


def check_indices(**columns: Any) -> None:
    """Refuse pandas objects whose rows are in different orders.

    Rows are matched by position and never aligned. Arrays and lists have no index and always pass.
    A default index (0, 1, 2, ...) passes beside an index with other labels, as when predictions are
    put into a new Series. Two indices are refused if they have the same labels in another order, or
    if their labels differ and neither is a default index.
    """
    indices = [
        (name, values.index)
        for name, values in columns.items()
        if hasattr(getattr(values, "index", None), "equals")  # a list has a method `index`
    ]
    for (first, reference), (name, index) in combinations(indices, 2):
        if len(index) != len(reference) or index.equals(reference):
            continue  # lengths are compared elsewhere
        advice = f"align them ({name}.loc[{first}.index]) or drop the index (.to_numpy())"
        if Counter(index) == Counter(reference):
            problem = f"has the pandas index of {first} in another order: {advice}"
            raise _argument_error(name, problem)
        if not _is_default(index) and not _is_default(reference):
            raise _argument_error(name, f"has another pandas index than {first}: {advice}")


def _is_default(index: Any) -> bool:
    return type(index).__name__ == "RangeIndex" and index.start == 0 and index.step == 1
