"""`fedgft data`: the public data sets."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from fedgft.cli.console import bar, err, note, out, print_json
from fedgft.cli.options import Flag

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
    table.add_row("synthetic", "any", "made on the spot, with gaps that are known", "")
    out.print(table)


@app.command
def get(
    name: Literal["adult", "compas"],
    /,
    *,
    out: Annotated[Path | None, Parameter(name=("--out", "-o"))] = None,
) -> None:
    """Fetch a data set into the cache; with --out, also write it as a table for `predict`.

    Parameters
    ----------
    name
        adult or compas.
    out
        A .csv or .parquet file.
    """
    from fedgft.data import load, prepared_frame
    from fedgft.experiments.store import write_frame

    with bar() as progress:
        dataset = load(name, on_progress=progress.fetch)
    for text in dataset.notes:
        note(text)
    err.print(f"{name}: {len(dataset):,} rows, {len(dataset.columns)} features", highlight=False)
    if out is not None:
        err.print(f"wrote {write_frame(prepared_frame(name), out)}", highlight=False)
