"""`fedgft demo`: from nothing to a table, a figure and two sentences."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedgft.cli.console import bar, note, out, paragraph, print_json, wrote
from fedgft.cli.options import Flag, Options, Place, Whole
from fedgft.errors import FedgftError
from fedgft.settings import check_setting
from fedgft.store import open_folder

METHODS = ["fedavg", "lrw", "lft", "fairfed", "fedgft", "fedgft-control"]


def demo(
    *,
    seeds: Whole = 20,
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-demo"),
    json: Annotated[bool, Flag] = False,
) -> None:
    """Compare six methods on Adult, split over ten very different clients.

    Parameters
    ----------
    seeds
        Replicates.
    out_
        Folder for the rows and the figures.
    json
        Print the rows as JSON, and nothing else, to stdout.
    """
    from fedgft.cli.study_session import print_comparison, run_comparison
    from fedgft.metrics import get_metric
    from fedgft.study.figures import plot_sites, save_figure
    from fedgft.study.training import compare_sentences

    check_setting("seeds", seeds)  # before anything is fetched
    with open_folder(out_):
        options = Options(data=_fetch_data(), seeds=seeds)
        found = run_comparison(options, METHODS, ["sp"], [0.5], folder=out_)
        paths = found.save(out_)
        paths += save_figure(plot_sites(found.study, found.results), out_, "sites")
    if json:
        print_json(found.rows)
        return
    print_comparison(found)
    out.print()
    title = get_metric("sp").title
    paragraph(compare_sentences(found.rows, groups=found.study.dataset.group_names, title=title))
    out.print()
    wrote(paths)


def _fetch_data() -> str:
    """Return the name of the data set: adult, or synthetic where Adult cannot be fetched."""
    from fedgft.data import load

    try:
        with bar() as progress:
            load("adult", on_progress=progress.fetch)
    except FedgftError as error:
        note(f"Adult cannot be fetched ({error}); using the synthetic set instead")
        return "synthetic"
    return "adult"
