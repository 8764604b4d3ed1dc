"""`fedgft data`: list and fetch the public data sets."""

from typing import Annotated

from cyclopts import App, Parameter

from fedgft.cli.console import bar, note, out, print_json, wrote
from fedgft.cli.options import Flag, Place

app = App(
    name="data",
    help="List and fetch the public data sets.",
    help_epilogue="Examples:\n  fedgft data list\n  fedgft data get adult --out adult.csv",
)
OTHERS = (  # data sets that are not downloaded: name, rows, description, license
    (
        "celeba",
        202_599,
        "faces with 40 attributes, from a folder on your disk: --images",
        "for research, not redistributed",
    ),
    ("synthetic", None, "generated, with known gaps", ""),
)


@app.command(name="list")
def list_(*, json: Annotated[bool, Flag] = False) -> None:
    """List the data sets.

    Parameters
    ----------
    json
        Print the list to stdout as JSON, and nothing else.
    """
    from fedgft.data import SOURCES

    names = ("name", "rows", "description", "license")
    sets = [{name: getattr(source, name) for name in names} for source in SOURCES.values()]
    sets += [dict(zip(names, each, strict=True)) for each in OTHERS]
    if json:
        print_json(sets)
        return
    from rich.table import Table

    table = Table(header_style="bold")
    for name in ("name", "rows", "description", "license"):
        table.add_column(name, justify="right" if name == "rows" else "left")
    for each in sets:
        rows = "any" if each["rows"] is None else f"{each['rows']:,}"
        table.add_row(each["name"], rows, each["description"], each["license"])
    out.print(table)


@app.command
def get(
    name: str,
    /,
    *,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Download a data set into the cache; with --out, also write it as a table.

    Parameters
    ----------
    name
        A name that `fedgft data list` shows.
    out
        A .csv or .parquet file.
    json
        Print a description to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft data get adult --out adult.csv
    """
    from fedgft.data import load, prepared_frame
    from fedgft.data.public import find_source
    from fedgft.data.table import check_table_path, write_table

    find_source(name)
    if out is not None:
        check_table_path(out)
    with bar() as progress:
        dataset = load(name, on_progress=progress.fetch)
    for text in dataset.notes:
        note(text)
    if out is not None:
        wrote([write_table(prepared_frame(name), out)])
    if json:
        print_json({"name": name, "rows": len(dataset), "features": len(dataset.columns)})
    else:
        note(f"{name}: {len(dataset):,} rows, {len(dataset.columns)} features")
