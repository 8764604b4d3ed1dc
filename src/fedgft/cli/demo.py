"""`fedgft demo`: from nothing to a table, a figure and two sentences."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedgft.cli import compare as comparing
from fedgft.cli.console import note, out, paragraph, print_json, wrote
from fedgft.cli.names import Flag, Place, Whole, check_seeds
from fedgft.cli.options import Options
from fedgft.cli.progress import bar
from fedgft.errors import FedgftError
from fedgft.files import open_folder

METHODS = ["fedavg", "lrw", "lft", "fairfed", "fedgft", "fedgft-control"]


def demo(
    *,
    seeds: Whole = 20,
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-demo"),
    json: Annotated[bool, Flag] = False,
) -> None:
    """Adult, ten very different clients, six methods: who is fair to people nobody trained on?

    Parameters
    ----------
    seeds
        Replicates.
    out_
        Folder for the rows and the figures.
    json
        Print the rows as JSON, and nothing else, to stdout.
    """
    from fedgft.metrics import get_metric
    from fedgft.report.figures import save as save_figure
    from fedgft.report.sites import point
    from fedgft.report.words import findings

    check_seeds(seeds)  # before anything is fetched
    with open_folder(out_):
        options = Options(data=_reachable(), seeds=seeds)
        study, results, rows = comparing.run(options, METHODS, ["sp"], [0.5], folder=out_)
        paths = comparing.save(study, results, rows, out_)
        paths += save_figure(point(study, results), out_, "sites")
    if json:
        print_json(rows)
        return
    comparing.report(study, results, rows)
    out.print()
    title = get_metric("sp").title
    paragraph(findings(rows, groups=study.dataset.group_names, title=title))
    out.print()
    wrote(paths)


def _reachable() -> str:
    from fedgft.data import load

    try:
        with bar() as progress:
            load("adult", on_progress=progress.fetch)
    except FedgftError as error:
        note(f"Adult cannot be had ({error}); using the synthetic set instead")
        return "synthetic"
    return "adult"
