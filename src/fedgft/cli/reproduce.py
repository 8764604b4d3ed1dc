"""`fedgft reproduce`: every table and figure of the paper, from one command."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from fedgft.cli.console import note, print_json, print_section, wrote
from fedgft.cli.names import Flag, Many, Place, Whole, check_seeds
from fedgft.cli.options import Options
from fedgft.cli.progress import Bar, bar
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    from fedgft.experiments.run import Runner
    from fedgft.experiments.shelf import Shelf
    from fedgft.report.section import Made

Name = Literal["table1", "penalty", "pure", "simpson", "trajectory", "epochs", "lambda", "lr",
               "clients", "fairfed", "convergence", "all"]  # fmt: skip
Data = Literal["adult", "compas", "celeba"]
ProtocolName = Literal["paper", "heldout"]


def reproduce(
    *names: Name,
    data: Annotated[tuple[Data, ...], Many] = ("adult", "compas"),
    protocol: Annotated[tuple[ProtocolName, ...], Many] = ("paper", "heldout"),
    seeds: Whole = 20,
    images: Place | None = None,
    model: Literal["resnet18"] | None = None,
    weights: Place | None = None,
    size: Whole | None = None,
    crop: Whole | None = None,
    skip_bad: Annotated[bool, Flag] = False,
    train_rows: Whole | None = None,
    test_rows: Whole | None = None,
    device: str | None = None,
    precision: Literal["fp32", "bf16"] | None = None,
    lanes: Whole | None = None,
    deterministic: Annotated[bool, Flag] = False,
    out_: Annotated[Place, Parameter(name="--out")] = Path("results"),
    json: Annotated[bool, Flag] = False,
) -> None:
    """Regenerate the paper's tables and figures, beside the published numbers.

    Finished cells are kept in the folder: an interrupted run continues where it stopped, and
    a second run only draws. `index.html` shows everything that the folder holds.

    Parameters
    ----------
    names
        Tables, figures and theorems of the paper, or all of them. simpson needs no data, and
        convergence is run on compas.
    data
        adult, compas, or celeba, whose images you must have (--images).
    protocol
        paper: as the published numbers were made. heldout: on people nobody trained on.
    seeds
        Replicates.
    images
        Folder with CelebA in its official layout. Its validation part counts as test.
    model
        What images are trained with [default: resnet18].
    weights
        Start from a .safetensors file or a state dict that torch saved [default: from scratch].
    size
        Images are resized to so many pixels a side, e.g. 64, 128 or 224 [default: 64].
    crop
        Side of the square in the middle that is kept, before resizing [default: the largest].
    skip_bad
        Leave out images that are missing or cannot be read, and count them.
    train_rows
        Images that each replicate draws to train on [default: 10,000].
    test_rows
        Images that each replicate draws to test on [default: 6,000].
    device
        Where images are trained on: cpu, cuda, or several GPUs: cuda:0,cuda:1 [default: cpu].
    precision
        Of products; what is kept stays float32 [default: fp32].
    lanes
        Clients in flight on a GPU [default: as many as help and fit].
    deterministic
        The same bits each time on a GPU, at some cost.
    out_
        Folder for tables, figures, rows and the page.
    json
        Print the rows as JSON, and nothing else, to stdout.
    """
    wanted = _check(names, data, protocol, seeds=seeds)
    given = {
        "images": images, "model": model, "weights": weights, "size": size, "crop": crop,
        "skip_bad": skip_bad, "train_rows": train_rows, "test_rows": test_rows, "device": device,
        "precision": precision, "lanes": lanes, "deterministic": deterministic,
    }  # fmt: skip
    for name, value in given.items() if "celeba" not in data else ():
        if value is not None and value is not False:  # a nought is a number
            raise FedgftError(f"--{name.replace('_', '-')} is for --data celeba")
    pictures = Options(data="celeba", valid="test", **given)
    if "celeba" in data:
        pictures.check()
    made, paths = run(wanted, list(dict.fromkeys(data)), list(dict.fromkeys(protocol)),
                      seeds=seeds, folder=out_, pictures=pictures)  # fmt: skip
    for text in made[0].section.notes if len(made) == 1 else ():
        note(text)
    if json:
        print_json([row for each in made for row in each.rows])
    else:
        for each in made:
            print_section(each.section, tables=len(made) == 1)
    wrote(paths)


def run(
    names: Sequence[str], data: Sequence[str], protocols: Sequence[str], *, seeds: int,
    folder: Path, pictures: Options | None = None,
) -> tuple[list["Made"], list[Path]]:  # fmt: skip
    """Train what is missing, write each experiment as soon as it is there, then the page."""
    from fedgft.experiments.shelf import Shelf
    from fedgft.files import alone, open_folder
    from fedgft.report.page import check_place, write_page
    from fedgft.report.reproduction import make
    from fedgft.report.section import write

    made, paths = [], []
    check_place(folder)
    with open_folder(folder), bar() as progress:
        runner = _runner(pictures or Options(), Shelf(folder / "cells"), progress)
        total = _work(runner, names, data, protocols, seeds)
        with alone(folder / "cells"):
            progress.expect(total, images=1 if tuple(data) == ("celeba",) else None)
            try:
                for name in names:
                    each = make(name, runner, data=data, protocols=protocols, seeds=seeds)
                    paths += write(each, folder)
                    made.append(each)
            except KeyboardInterrupt:
                note(f"finished cells are kept in {folder}: the same command continues from there")
                raise
            pages = write_page(folder)
    return made, [*pages, *(p for p in paths if p.suffix in (".md", ".parquet"))]


def _runner(pictures: Options, shelf: "Shelf", progress: Bar) -> "Runner":
    from fedgft.data import load
    from fedgft.experiments.run import Runner

    names = ("device", "precision", "lanes", "deterministic")
    return Runner(
        lambda name: pictures.load(progress.fetch, seed=pictures.seed) if name == "celeba"
        else load(name, on_progress=progress.fetch),
        shelf, on_progress=progress.advance, network=pictures.network("resnet18"),
        engine={n: v for n in names if (v := getattr(pictures, n)) is not None},
        drawn=(pictures.train_rows, pictures.test_rows),
    )  # fmt: skip


def _work(
    runner: "Runner", names: Sequence[str], data: Sequence[str], protocols: Sequence[str],
    seeds: int,
) -> int:  # fmt: skip
    """Row-rounds of all experiments together; they share cells."""
    from fedgft.experiments.paper import CONVERGENCE, EXPERIMENTS

    cells = [
        cell for name in names if name in EXPERIMENTS for protocol in protocols for table in data
        for cell in EXPERIMENTS[name].cells(table, protocol, seeds=seeds)
    ]  # fmt: skip
    total = runner.work(cells)
    if "convergence" in names:
        total += sum(runner.path_work(spec, seeds=seeds) for spec in CONVERGENCE)
    return total


def _check(
    names: Sequence[str], data: Sequence[str], protocols: Sequence[str], *, seeds: int
) -> list[str]:
    """The experiments in the paper's order, or what is wrong with what was asked for."""
    from fedgft.experiments.paper import NAMES

    if not names:
        raise FedgftError(f"name an experiment: {', '.join(NAMES)}, or all")
    for option, values in (("--data", data), ("--protocol", protocols)):
        if not values:
            raise FedgftError(f"{option} needs at least one value")
    check_seeds(seeds)
    return [name for name in NAMES if name in names or "all" in names]
