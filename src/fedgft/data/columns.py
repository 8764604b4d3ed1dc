"""What every reader of a raw column needs: the column itself, its values as text or as numbers.

A column is taken as the file has it, so what a file means but does not say is refused here: a
stray word turns a CSV column of numbers into text, and hundreds of categories would follow.
"""

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import polars as pl

FEW = 10  # a text column with no more different values is a category, whatever they look like
MOSTLY = 0.9  # of the values: beyond it a text column is a damaged column of numbers
NUMBER = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
PLAIN = rf"^-?{NUMBER}$"  # what a CSV reader takes for a number
MEANT = rf"^\s*[+-]?{NUMBER}\s*$"  # what a person does
NOT_FINITE = r"(?i)^\s*[+-]?(nan|inf|infinity)\s*$"
LONGEST = 80  # letters of a name in a message
LARGEST = 2.0**127  # whole numbers below it have an integer type


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
    names = (other if len(other) <= LONGEST else f"{other[:LONGEST]}..." for other in known[:8])
    return f"; there are: {', '.join(names)}{more}"


def positive_last(classes: tuple[str, ...], positive: str, *, where: str) -> tuple[str, ...]:
    """The two classes, the positive one last; its case matters where they differ in nothing else.

    `where` begins the sentence that refuses it: it names the column that holds the classes.
    """
    if len(classes) != 2:
        raise FedgftError(f"{where} has {len(classes)} classes; --positive needs two")
    folded = [name.casefold() for name in classes]
    if positive in classes:
        index = classes.index(positive)
    elif folded.count(positive.casefold()) == 1:
        index = folded.index(positive.casefold())
    else:
        raise FedgftError(
            f"{where} holds '{classes[0]}' and '{classes[1]}', no '{positive}' (--positive)"
        )
    return classes if index == 1 else classes[::-1]


def as_text(series: "pl.Series") -> "pl.Series":
    """One spelling a value, whatever type a reader gave its column: 1.0 is "1", true is "True".

    A file's other rows decide that type, so the rule looks at one value at a time.
    """
    pl = _polars()
    if series.dtype.is_float():
        whole = (series == series.round()) & (series.abs() < LARGEST)
        integers = series.cast(pl.Int128, strict=False).cast(pl.String)
        return integers.zip_with(whole.fill_null(False), series.cast(pl.String))
    text = series.cast(pl.String)
    if series.dtype.is_decimal():
        text = text.str.replace(r"(\.\d*?)0+$", "$1")
    if series.dtype.is_integer():
        return text
    return text.str.replace(r"^([+-]?\d+)\.0*$", "$1").replace({"true": "True", "false": "False"})


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
        raise _not_finite(series.name, wrong, source=source)
    return numbers


def check_text(series: "pl.Series", *, source: str) -> None:
    """Refuse text that is a column of numbers with a few odd values in it."""
    text = series.drop_nulls()
    if series.dtype != _polars().String or not len(text):
        return
    numbers, wrong = text.str.contains(MEANT), text.str.contains(NOT_FINITE)
    count, bad = int(numbers.sum()), int(wrong.sum())
    damaged = count + bad >= MOSTLY * len(text) and text.n_unique() > FEW
    if bad and count and (damaged or count + bad == len(text)):
        raise _not_finite(series.name, bad, source=source)
    odd = text.filter(~text.str.contains(PLAIN))
    if damaged and len(odd):
        found = ", ".join(f"'{value}'" for value in odd.unique(maintain_order=True)[:3])
        raise FedgftError(
            f"{source}: column '{series.name}' holds numbers, but {len(odd)} value(s) are not "
            f"plain ones ({found}): leave the cell empty where a number is missing (codes: put "
            "a letter in front of each)"
        )


def numbers_as_text(series: "pl.Series") -> bool:
    """Many different values, each a plain number, in a column whose type is text."""
    text = series.drop_nulls()
    if series.dtype != _polars().String or text.n_unique() <= FEW:
        return False
    return bool(text.str.contains(PLAIN).all())


def _not_finite(name: str, count: int, *, source: str) -> FedgftError:
    return FedgftError(
        f"{source}: column '{name}' holds {count} value(s) that are NaN or infinite: "
        "leave the cell empty where a number is missing"
    )


def _polars():
    """Polars only when a table is really read: importing this package stays quick."""
    import polars

    return polars
