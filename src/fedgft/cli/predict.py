"""`fedgft predict`: a saved model on a raw table."""

import sys
from typing import Annotated

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
    from fedgft.experiments.store import check_table, load_model, write_frame

    if out is not None:
        check_table(out)
    saved = load_model(model)
    table, notes = saved.predict(read_frame(file), source=str(file))
    for text in notes:
        note(text)
    if out is not None:
        wrote([write_frame(table, out)])
    if json:
        print_json(table.to_dicts())
    elif out is None:
        sys.stdout.write(table.write_csv())
