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

    if json:
        print_json(
            [{"name": s.name, "rows": s.rows, "licence": s.licence, "description": s.description}
             for s in SOURCES.values()]
        )  # fmt: skip
        return
    from rich.table import Table

    table = Table(header_style="bold")
    for name in ("name", "rows", "what it is", "licence"):
        table.add_column(name, justify="right" if name == "rows" else "left")
    for source in SOURCES.values():
        table.add_row(source.name, f"{source.rows:,}", source.description, source.licence)
    table.add_row(
        "celeba", "202,599", "faces with 40 attributes, from a folder that you have: --images",
        "for research, not redistributed",
    )  # fmt: skip
    table.add_row("synthetic", "any", "made on the spot, with gaps that are known", "")
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
    from fedgft.experiments.store import check_table, write_frame

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
