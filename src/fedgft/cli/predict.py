"""`fedgft predict`: a saved model on a raw table."""

import math
import sys
from datetime import date, time
from typing import Annotated, Any

from cyclopts import Parameter

from fedgft.cli.console import note, print_json, wrote
from fedgft.cli.names import Flag, Place


def predict(
    model: Place,
    file: Place,
    /,
    *,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Apply a saved model: the table again, with the columns score and decision behind its own.

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
    """
    from fedgft.data import read_frame
    from fedgft.saved import check_table, load_model, without_formulas, write_frame

    if out is not None:
        check_table(out)
    saved = load_model(model)
    table, notes = saved.predict(read_frame(file), source=str(file))
    for text in notes:
        note(text)
    as_csv = not json if out is None else out.suffix.lower() == ".csv"
    shown, changed = without_formulas(table) if as_csv else (table, 0)
    if changed:
        note(
            f"{changed:,} text(s) begin as spreadsheet formulas do, and are written to CSV with an "
            "apostrophe in front (not to Parquet or JSON)"
        )
    if out is not None:
        wrote([write_frame(shown, out)])
    if json:
        print_json([{name: _plain(value) for name, value in row.items()}
                    for row in table.iter_rows(named=True)])  # fmt: skip
    elif out is None:
        sys.stdout.write(shown.write_csv())


def _plain(value: Any) -> Any:
    """As JSON has it, which knows neither dates nor what is no number."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, date | time):
        return value.isoformat()
    return value if isinstance(value, str | int | float | None) else str(value)
