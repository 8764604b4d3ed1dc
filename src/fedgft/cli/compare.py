"""`fedgft compare`: one row per combination of method, metric and heterogeneity; `fedgft demo`."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

import fedgft
from fedgft.cli.console import MISSED, bar, note, out, output, paragraph, print_json, wrote
from fedgft.cli.options import Alphas, Flag, Methods, Metrics, Options, Place, Whole
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import format_points
from fedgft.settings import check_setting

if TYPE_CHECKING:
    from fedgft.study import Comparison

# Loaded when a command runs, so that help is printed at once.
session = LazyModule("fedgft.cli.study_session")
figures = LazyModule("fedgft.study.figures")
post_processing = LazyModule("fedgft.study.post_processing")
results_module = LazyModule("fedgft.study.results")
training = LazyModule("fedgft.study.training")

DEFINITIONS = (
    "In the figure: LRW, LFT and FairFed are earlier methods: LRW weights the rows of each client, "
    "LFT adds a penalty at each client, FairFed weights clients. FedGFT has a fixed strength; "
    "FedGFT control is trained to a target."
)
DEMO_METHODS = ("fedavg", "lrw", "lft", "fairfed", "fedgft", "fedgft-control")


def compare(
    options: Options | None = None,
    *,
    methods: Methods = ("fedavg", "lrw", "fairfed", "fedgft", "fedgft-control"),
    metrics: Metrics = ("sp",),
    alpha: Alphas = (0.5,),
    leave_one_client_out: Annotated[bool, Flag] = False,
    out_: Annotated[Place | None, Parameter(name="--out")] = None,
    strict: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Train several methods on the same replicates and compare accuracy and gaps.

    Parameters
    ----------
    methods
        fedavg, lrw, lft, fairfed, fedgft (as published), fedgft-control (a target for decisions);
        published: fedfb, fairgrad, fedfact, agnostic-fair, puffle, fairtrade, fade; for the losses
        of groups or clients: ffalm, fedminmax, bounded-group-loss, afl, q-ffl;
        FedAvg with a decision rule for --target: thresholds (by group), blind (without the group),
        derived (decisions changed by a coin); published rules, which use the group: logofair,
        fedfact-post, cost-lp.
    metrics
        sp, eop, eo, predictive-parity, acc, fpr, or weighted sums such as sp+0.5*eop; sp@all or
        eop@all: at every threshold of the scores, for fedgft.
    alpha
        How evenly rows are dealt to clients: 0.5 is very uneven, 100 nearly even; with several
        values, each is compared.
    leave_one_client_out
        Also train without each client in turn, and judge on its rows: what to expect of a client
        that does not take part. Takes as many times longer as there are clients.
    out_
        Folder for rows.parquet, rounds.parquet and the figure.
    strict
        Exit with code 4 if fedgft-control misses its target in more than half of the replicates,
        or meets it with a collapsed model.
    json
        Print the results to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft compare --data compas --alpha 0.5 5 100 --metrics sp eop
    fedgft compare --data compas --protocol paper --methods fedavg fedgft --json
    fedgft compare loans.csv --label repaid --group sex --methods fedavg blind
    """

    options = options or Options()
    asked: dict[str, Any] = {"methods": methods, "metrics": metrics, "alpha": alpha}
    if leave_one_client_out:
        asked["leave_one_client_out"] = True
    results = nullcontext(lambda _: None)
    if out_ is not None:
        results = session.open_results(out_, "compare", options, **asked)
    session.check_options(options)
    with results as finish:
        found = session.run_comparison(
            options, methods, metrics, alpha, folder=out_, leave_one_client_out=leave_one_client_out
        )
        paths = [] if out_ is None else found.save(out_)
        finish(paths)
        session.clear_checkpoints(found.study)
    if json:
        print_json(found.rows)
    else:
        session.print_comparison(found)
        for row in found.rows:
            _print_target(row, found.rows)
        _print_every_threshold(found.rows)
        note(session.describe_clients(found.study, options, list(dict.fromkeys(alpha))))
    session.print_notes(found.study, list(dict.fromkeys(r.metric for r in found.results)))
    wrote(paths)
    if strict and any(training.count_missed(row) > row["seeds"] / 2 for row in found.rows):
        raise SystemExit(MISSED)


def _print_target(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """For a row with a target: print whether it was reached, and if not, what to try."""

    if row["target"] is None:
        return
    cell = ("metric", "alpha")
    same = [r for r in rows if all(r[name] == row[name] for name in cell)]
    plain = next((r for r in same if r["method"] == "fedavg"), None)
    where = "" if row["alpha"] is None else f", alpha {row['alpha']:g}"
    if row["method"] in post_processing.RULE_METHODS:
        text = post_processing.describe_rule_row(row)
        paragraph(f"{row['metric']}{where}. {text}")
        return
    paragraph(f"{row['metric']}{where}. {training.describe_target(row, plain)}")
    paragraph(training.suggest_changes(row))


def _print_every_threshold(rows: list[dict[str, Any]]) -> None:
    """For a metric at every threshold: print the largest gap over all thresholds, by method."""

    cells = dict.fromkeys((row["metric"], row["alpha"]) for row in rows if "gap_all_test" in row)
    for metric, alpha in cells:
        same = [row for row in rows if (row["metric"], row["alpha"]) == (metric, alpha)]
        labels = results_module.label_methods([row["method"] for row in same])
        found = ", ".join(
            f"{labels[row['method']]} {format_points(row['gap_all_test'])}" for row in same
        )
        where = "" if alpha is None else f", alpha {alpha:g}"
        text = "Largest gap over all thresholds of the scores, held-out rows, in points"
        paragraph(f"{metric}{where}. {text}: {found}.")


def demo(
    *,
    seeds: Whole = 20,
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-demo"),
    overwrite: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Run six methods on Adult across ten very different simulated clients, and compare fairness.

    Parameters
    ----------
    seeds
        Number of replicates.
    out_
        Folder for the results and the figures.
    overwrite
        Replace the results of another run in --out.
    json
        Print the results to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft demo
    fedgft demo --seeds 5 --out my-demo
    """

    check_setting("seeds", seeds)  # before anything is fetched
    options = Options(seeds=seeds, overwrite=overwrite)
    with session.open_results(out_, "demo", options) as finish:
        data, notes = _fetch_data()
        options = replace(options, data=(data,))
        found = session.run_comparison(options, DEMO_METHODS, ["sp"], [0.5], folder=out_)
        paths = found.save(out_)
        paths += figures.save_figure(
            figures.plot_methods(found.study, found.results), out_, "methods"
        )
        paths += figures.save_figure(figures.plot_sites(), out_, "sites")
        finish(paths)
    if json:
        print_json(found.rows)
    else:
        _print_demo(found, out_, paths)
    for text in notes:
        note(text)


def _print_demo(found: "Comparison", folder: Path, paths: Sequence[Path]) -> None:
    """Print three result lines, the figure to open and the commands to type next."""
    title = fedgft.get_metric("sp").title
    names = found.study.dataset.group_names
    for line in training.list_results(found.rows, groups=names, title=title):
        paragraph(line)
    paragraph(DEFINITIONS)
    if output.verbose:
        out.print()
        session.print_comparison(found)
        wrote(paths)
    out.print()
    paragraph(f"Open:  {folder / 'methods.png'}", wrap=False)
    paragraph("Next:  fedgft data get loans")
    paragraph("       fedgft train --data loans.csv --label repaid --group sex --client bank")


def _fetch_data() -> tuple[str, Sequence[str]]:
    """Fetch the data set of the demo.

    Returns
    -------
    name, notes
        "adult", or "synthetic" where Adult cannot be fetched; and notes, which say where the data
        came from. When the study reads the data again, they come from the cache.
    """
    try:
        with bar() as progress:
            return "adult", fedgft.load("adult", on_progress=progress.fetch).notes
    except FedgftError as error:
        return "synthetic", [
            f"Adult cannot be fetched ({error}); this is the synthetic set instead"
        ]
