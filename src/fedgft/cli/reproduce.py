"""`fedgft reproduce`: the tables and figures of the paper."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import Parameter
from rich.markup import escape

from fedgft.cli.console import Bar, bar, note, out, print_json, print_signs, print_table, wrote
from fedgft.cli.options import Flag, Many, Options, Place, Whole, require, require_values
from fedgft.errors import FedgftError, LazyModule
from fedgft.settings import ProtocolName, check_setting
from fedgft.store import exclusive_lock, open_folder

if TYPE_CHECKING:
    from fedgft.data import Dataset
    from fedgft.paper.runner import Runner
    from fedgft.paper.section import Section, SectionResult

# Loaded when a command runs, so that help is printed at once.
session = LazyModule("fedgft.cli.study_session")
paper_cells = LazyModule("fedgft.paper.cells")
paper_runner = LazyModule("fedgft.paper.runner")
section = LazyModule("fedgft.paper.section")
cache = LazyModule("fedgft.study.cache")

Name = Literal[
    "table1",
    "penalty",
    "pure",
    "simpson",
    "trajectory",
    "epochs",
    "lambda",
    "lr",
    "clients",
    "fairfed",
    "convergence",
    "all",
]
Data = Literal["adult", "compas", "celeba"]
ENGINE_OPTIONS = ("device", "precision", "lanes", "deterministic")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CelebaOptions:
    """The options that go with --data celeba.

    Parameters
    ----------
    images
        Folder with CelebA in its official layout. Its validation part counts as test.
    model
        The model [default: resnet18].
    weights
        Start from a .safetensors file or a torch state dict [default: from scratch].
    size
        Pixels per side after resizing, e.g. 64, 128 or 224 [default: 64].
    crop
        Side of the central square to cut out first [default: the largest].
    skip_bad
        Skip and count images that are missing or unreadable.
    train_rows
        Training images per replicate [default: 10,000].
    test_rows
        Test images per replicate [default: 6,000].
    device
        Where to train: cpu, cuda, or several GPUs: cuda:0,cuda:1 [default: cpu].
    precision
        Precision of matrix products; parameters stay float32 [default: fp32].
    lanes
        Clients trained at the same time on a GPU [default: as many as fit and help].
    deterministic
        Make GPU results identical in each run; slower.
    """

    images: Place | None = None
    model: Literal["resnet18"] | None = None
    weights: Place | None = None
    size: Whole | None = None
    crop: Whole | None = None
    skip_bad: Annotated[bool, Flag] = False
    train_rows: Whole | None = None
    test_rows: Whole | None = None
    device: str | None = None
    precision: Literal["fp32", "bf16"] | None = None
    lanes: Whole | None = None
    deterministic: Annotated[bool, Flag] = False

    def complete(self, *, has_celeba: bool) -> Options:
        """Return them as options of a study; a `FedgftError` if they are given without celeba."""
        from fedgft.cli.study_session import check_options

        values: dict[str, Any] = vars(self)
        for name, value in values.items():
            if not has_celeba and value is not None and value is not False:  # 0 is a value
                raise FedgftError("is for --data celeba", field=name, kind="conflict")
        options = Options(data=("celeba",), valid="test", **(values | {"model": "resnet18"}))
        if has_celeba:
            check_options(options)
        return options


def reproduce(
    *names: Name,
    data: Annotated[tuple[Data, ...], Many] = ("adult", "compas"),
    protocol: Annotated[tuple[ProtocolName, ...], Many] = ("paper", "heldout"),
    seeds: Whole = 20,
    out_: Annotated[Place, Parameter(name="--out")] = Path("results"),
    json: Annotated[bool, Flag] = False,
    image_options: CelebaOptions | None = None,
) -> None:
    """Regenerate the paper's tables and figures, beside the published numbers.

    Finished cells are kept in the folder: an interrupted run continues where it stopped, and
    a second run only draws the figures. `index.html` shows all results in the folder.

    Parameters
    ----------
    names
        Tables, figures and theorems of the paper, or all. simpson needs no data; convergence uses
        compas.
    data
        adult, compas, or celeba (needs its images: --images).
    protocol
        paper: as the published numbers were made. heldout: measured on rows held out of training.
    seeds
        Number of replicates.
    out_
        Folder for tables, figures, rows and the results page.
    json
        Print the results to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft reproduce table1 --data compas --out my-results
    fedgft reproduce all
    """
    known = [name for name in get_args(Name) if name != "all"]
    require(names, f"name an experiment: {', '.join(known)}, or all", kind="missing")
    require_values(data=data, protocol=protocol)
    check_setting("seeds", seeds)
    results, paths = _run(
        [name for name in known if name in names or "all" in names],
        list(dict.fromkeys(data)),
        list(dict.fromkeys(protocol)),
        seeds=seeds,
        folder=out_,
        options=(image_options or CelebaOptions()).complete(has_celeba="celeba" in data),
    )
    for text in results[0].section.notes if len(results) == 1 else ():
        note(text)
    if json:
        print_json([row for result in results for row in result.rows])
    else:
        for result in results:
            _print_section(result.section, with_tables=len(results) == 1)
    wrote(paths)


def _run(
    names: Sequence[str],
    data: Sequence[str],
    protocols: Sequence[str],
    *,
    seeds: int,
    folder: Path,
    options: Options,
) -> tuple[list["SectionResult"], list[Path]]:
    """Train the cells that are missing, write each experiment when it is done, then the page.

    Returns the experiments, and the files that a user opens.
    """

    results = []
    paths = []
    section.check_folder(folder)
    with open_folder(folder), bar() as progress:
        runner = _make_runner(options, folder / "cells", progress)
        total = _count_work(runner, names, data, protocols, seeds=seeds)
        with exclusive_lock(folder / "cells"):
            progress.expect(total, images=1 if tuple(data) == ("celeba",) else None)
            try:
                for name in names:
                    result = section.make_section(
                        name, runner, data=data, protocols=protocols, seeds=seeds
                    )
                    paths += section.write_section(result, folder)
                    results.append(result)
            except KeyboardInterrupt:
                note(f"finished cells are kept in {folder}: the same command continues from there")
                raise
            pages = section.write_page(folder)
    return results, [*pages, *(path for path in paths if path.suffix in (".md", ".parquet"))]


def _make_runner(options: Options, cells: Path, progress: Bar) -> "Runner":
    """Return the runner that trains cells and stores them; `options` are those of celeba."""

    def load_data(name: str) -> "Dataset":
        chosen = options if name == "celeba" else Options(data=(name,))
        return session.load_dataset(chosen, progress.fetch)

    return paper_runner.Runner(
        load_data,
        cache.ResultCache(cells),
        on_progress=progress.advance,
        network=session.make_network(options),
        engine=options.given(*ENGINE_OPTIONS),
        drawn=(options.train_rows, options.test_rows),
    )


def _count_work(
    runner: "Runner",
    names: Sequence[str],
    data: Sequence[str],
    protocols: Sequence[str],
    *,
    seeds: int,
) -> int:
    """Return the rows times rounds of all experiments; cells that they share count once."""

    cells = [
        cell
        for name in names
        if name in paper_cells.EXPERIMENTS
        for protocol in protocols
        for table in data
        for cell in paper_cells.EXPERIMENTS[name].cells(table, protocol, seeds=seeds)
    ]
    total = runner.work(cells)
    if "convergence" in names:
        total += sum(runner.path_work(spec, seeds=seeds) for spec in paper_cells.CONVERGENCE)
    return total


def _print_section(section: "Section", *, with_tables: bool) -> None:
    """Print what came out of an experiment, each sentence with its sign, and its tables."""
    out.print(escape(section.title), style="bold")
    print_signs([(holds, text) for text, holds in section.findings], soft_wrap=True)
    for table in section.tables if with_tables else ():
        out.print()
        print_table(table)
    out.print()
