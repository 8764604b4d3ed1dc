"""Tables for people: CSV without formulas, or Parquet."""

import re
from itertools import count
from pathlib import Path

import polars as pl
from polars.exceptions import PolarsError

from fedgft.errors import FedgftError
from fedgft.store import atomic_write, make_folder, refuse_link

FORMULA = r"^[=+\-@\t\r\n＝＋－＠]"  # how a text begins that a spreadsheet runs
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


def check_table_path(path: Path) -> Path:
    """Check that a table can be written there, before any work is done for it."""
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise FedgftError(f"`out` {path}: the ending must be .csv or .parquet")
    if path.is_dir():
        raise FedgftError(f"`out` {path}: is a folder")
    refuse_link(path, "`out`")
    make_folder(path.parent)
    return path


def write_table(frame: pl.DataFrame, path: Path) -> Path:
    """Write CSV or Parquet, by the ending; formulas in a CSV are escaped (`escape_formulas`)."""
    with atomic_write(path) as part:
        try:
            if path.suffix.lower() == ".csv":
                escape_formulas(frame)[0].write_csv(part.file)
            else:
                frame.write_parquet(part.file)
        except PolarsError as error:  # its Parquet writer on a full disk
            raise OSError(str(error)) from error
    return path


def escape_formulas(frame: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Put an apostrophe in front of texts that a spreadsheet would run as formulas.

    These are texts and column names, which come from data, that begin with =, +, -, @, a tab or a
    line end. Numbers, and texts that are numbers (-0.5), stay as they are.

    Returns
    -------
    frame, changed
        The table for a CSV file, and how many of its cells and names were changed.
    """
    names = [n for n, kind in frame.schema.items() if kind in (pl.String, pl.Categorical, pl.Enum)]
    formulas = [_is_formula(pl.col(name).cast(pl.String)) for name in names]
    changed = sum(frame.select(formulas).sum().row(0)) if names else 0
    escaped = [
        pl.when(test).then("'" + pl.col(name).cast(pl.String)).otherwise(pl.col(name)).alias(name)
        for name, test in zip(names, formulas, strict=True)
    ]
    renamed: dict[str, str] = {}
    for name in frame.columns:
        if re.match(FORMULA, name) and not re.fullmatch(NUMBER.strip("^$"), name):
            taken = (*frame.columns, *renamed.values())
            renamed[name] = next(n for i in count(1) if (n := "'" * i + name) not in taken)
    return frame.with_columns(escaped).rename(renamed), changed + len(renamed)


def _is_formula(text: pl.Expr) -> pl.Expr:
    return text.str.contains(FORMULA).fill_null(False) & ~text.str.contains(NUMBER).fill_null(False)
