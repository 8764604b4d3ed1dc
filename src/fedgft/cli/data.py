"""`fedgft data`: the public data sets."""

from typing import Annotated

from cyclopts import App, Parameter

from fedgft.cli.console import note, out, print_json, wrote
from fedgft.cli.names import Flag, Place
from fedgft.cli.progress import bar

app = App(name="data", help="List and fetch the public data sets.")


@app.command(name="list")
def list_(*, json: Annotated[bool, Flag] = False) -> None:
    """The data sets there are.

    Parameters
    ----------
    json
        Print the list as JSON, and nothing else, to stdout.
    """
    from fedgft.data import SOURCES

    sets = [(s.name, s.rows, s.description, s.licence) for s in SOURCES.values()]
    sets += [("celeba", 202_599, "faces with 40 attributes, from a folder that you have: --images",
              "for research, not redistributed"),
             ("synthetic", None, "made on the spot, with gaps that are known", "")]  # fmt: skip
    if json:
        names = ("name", "rows", "description", "licence")
        print_json([dict(zip(names, each, strict=True)) for each in sets])
        return
    from rich.table import Table

    table = Table(header_style="bold")
    for name in ("name", "rows", "what it is", "licence"):
        table.add_column(name, justify="right" if name == "rows" else "left")
    for title, rows, description, licence in sets:
        table.add_row(title, "any" if rows is None else f"{rows:,}", description, licence)
    out.print(table)


@app.command
def get(
    name: str,
    /,
    *,
    out: Annotated[Place | None, Parameter(name=("--out", "-o"))] = None,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Fetch a data set into the cache; with --out, also write it as a table for `predict`.

    Parameters
    ----------
    name
        One of those that `fedgft data list` shows.
    out
        A .csv or .parquet file.
    json
        Print what was fetched as JSON, and nothing else, to stdout.
    """
    from fedgft.data import load, prepared_frame
    from fedgft.data.sources import find_source
    from fedgft.saved import check_table, write_frame

    find_source(name)
    if out is not None:
        check_table(out)
    with bar() as progress:
        dataset = load(name, on_progress=progress.fetch)
    for text in dataset.notes:
        note(text)
    if out is not None:
        wrote([write_frame(prepared_frame(name), out)])
    if json:
        print_json({"name": name, "rows": len(dataset), "features": len(dataset.columns)})
    else:
        note(f"{name}: {len(dataset):,} rows, {len(dataset.columns)} features")
