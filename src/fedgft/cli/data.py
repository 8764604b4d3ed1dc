"""`fedgft data`: list and fetch the public data sets."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from fedgft.cli.console import bar, note, out, print_json, wrote
from fedgft.cli.options import Flag, Many, Place, Whole, require
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import polars as pl

app = App(
    name="data",
    help="List and fetch the public data sets.",
    help_epilogue="Examples:\n  fedgft data list\n  fedgft data get loans",
)
OTHERS = (  # data sets without a fixed number of rows, or not downloaded; as `Source` has them
    (
        "acs",
        None,
        "income above 50,000 dollars by state, 2014 to 2023: --states; group: sex (SEX) or race "
        "(RAC1P)",
        "public (U.S. Census Bureau)",
    ),
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
    year: Whole | None = None,
    states: Annotated[tuple[str, ...], Many] = (),
    json: Annotated[bool, Flag] = False,
) -> None:
    """Download a data set into the cache; with --out, also write it as a table.

    loans is generated, not downloaded: the command writes loans.csv, and one table per bank.

    acs is downloaded state by state. Run the command again to continue an interrupted download. To
    train on it, write a table, and name its columns: --label income --group SEX --client state.

    Parameters
    ----------
    name
        The name of the data set, from `fedgft data list`.
    out
        A .csv or .parquet file. For loans, a folder [default: the current folder].
    year
        The year of acs, 2014 to 2023 except 2020 [default: 2018].
    states
        The states of acs, by abbreviation or name; all: all of them.
    json
        Print the number of rows and features and the files as JSON, and nothing else.

    Examples
    --------
    fedgft data get loans
    fedgft data get adult --out adult.csv
    fedgft data get acs --year 2018 --states CA NY --out acs.parquet
    """
    from fedgft.data import load, prepared_frame
    from fedgft.data.acs_income import NAME
    from fedgft.data.public import find_source
    from fedgft.data.table import check_table_path, write_table

    if name == NAME:
        _get_acs(out, year, states, json=json)
        return
    for option, value in (("year", year), ("states", states)):
        require(not value, f"`{option}`: only the data set '{NAME}' has it", kind="conflict")
    source = find_source(name)
    tables = {}
    is_generated = not source.files
    if source.client is not None and is_generated:
        tables = _list_tables(source.name, prepared_frame(name), source.client, out or Path())
    elif out is not None:
        check_table_path(out)
    with bar() as progress:
        dataset = load(name, on_progress=progress.fetch)
    for text in dataset.notes:
        note(text)
    if not is_generated and out is not None:
        tables = {out: prepared_frame(name)}
    _check_files(tables)
    paths = [write_table(table, path) for path, table in tables.items()]
    _report(name, len(dataset), len(dataset.columns), paths, json=json)


def _get_acs(out: Path | None, year: int | None, states: tuple[str, ...], *, json: bool) -> None:
    """Download ACSIncome state by state, and write its table if asked to."""
    from fedgft.data.acs_income import CLIENT, GROUP, LABEL, NAME, prepare_acs_income
    from fedgft.data.encode import Encoder
    from fedgft.data.table import check_table_path, write_table

    if out is not None:
        check_table_path(out)
    with bar() as progress:
        table, notes = prepare_acs_income(year, states, on_progress=progress.fetch)
    for text in notes:
        note(text)
    tables = {} if out is None else {out: table}
    _check_files(tables)
    paths = [write_table(part, path) for path, part in tables.items()]
    names = [name for name in table.columns if name not in (CLIENT, GROUP, LABEL)]
    _report(NAME, table.height, len(Encoder.fit(table, names).columns), paths, json=json)


def _report(name: str, rows: int, features: int, paths: list[Path], *, json: bool) -> None:
    wrote(paths)
    if json:
        files = [str(path) for path in paths]
        print_json({"name": name, "rows": rows, "features": features, "files": files})
    else:
        note(f"{name}: {rows:,} rows, {features} features")


def _list_tables(
    name: str, frame: "pl.DataFrame", client: str, folder: Path
) -> dict[Path, "pl.DataFrame"]:
    """Return the tables to write: all rows for training, and the rows of each client for audits.

    Returns paths and tables.
    """
    from fedgft.data.generated import PROBABILITY

    folder.mkdir(parents=True, exist_ok=True)
    tables = {folder / f"{name}.csv": frame.drop(PROBABILITY)}
    for part, rows in frame.partition_by(client, as_dict=True, maintain_order=True).items():
        tables[folder / f"{part[0]}.csv"] = rows
    return tables


def _check_files(tables: "dict[Path, pl.DataFrame]") -> None:
    """Raise a `FedgftError` if a file exists that is not the one to be written."""
    from fedgft.data.table import escape_formulas, read_frame

    for path, table in tables.items():
        if not path.exists():
            continue
        if path.suffix.lower() == ".csv":
            is_same = path.read_bytes() == escape_formulas(table)[0].write_csv().encode()
        else:
            is_same = read_frame(path).equals(table)
        if not is_same:
            text = f"`out` {path}: exists and has other content; name another place"
            raise FedgftError(text, kind="file")
