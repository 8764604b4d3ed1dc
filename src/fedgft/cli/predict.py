"""`fedgft predict`: apply a saved model to a raw table."""

import math
import sys
from datetime import date, time
from typing import Annotated, Any

from cyclopts import Parameter

from fedgft.cli.console import note, print_json, wrote
from fedgft.cli.options import Flag, Place


def predict(
    model: Place,
    file: Place,
    /,
    *,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Apply a saved model; the output is the table with the columns score and decision appended.

    Parameters
    ----------
    model
        A model.safetensors that `fedgft train` wrote.
    file
        CSV or Parquet with the columns the model was trained on.
    out
        A .csv or .parquet file; without it CSV goes to stdout.
    json
        Print the rows as JSON, and nothing else, to stdout.

    Examples
    --------
    fedgft predict fedgft-train/model.safetensors people.csv --out scored.csv
    """
    from fedgft.data import read_frame
    from fedgft.data.table import check_table_path, escape_formulas, write_table
    from fedgft.fair_model import load_model

    if out is not None:
        check_table_path(out)
    fair_model = load_model(model)
    table, notes = fair_model.add_predictions(read_frame(file), source=str(file))
    for text in notes:
        note(text)
    as_csv = not json if out is None else out.suffix.lower() == ".csv"
    escaped, changed = escape_formulas(table) if as_csv else (table, 0)
    if changed:
        note(
            f"{changed:,} text(s) begin as spreadsheet formulas do, and are written to CSV with an "
            "apostrophe in front (not to Parquet or JSON)"
        )
    if out is not None:
        wrote([write_table(escaped, out)])
    if json:
        rows = table.iter_rows(named=True)
        print_json([{name: _to_json(value) for name, value in row.items()} for row in rows])
    elif out is None:
        sys.stdout.write(escaped.write_csv())


def _to_json(value: Any) -> Any:
    """Return a value that JSON can represent: JSON has neither dates nor NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, date | time):
        return value.isoformat()
    return value if isinstance(value, str | int | float | None) else str(value)
