"""`fedgft frontier`: accuracy against gap, for every method over its whole range."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from fedgft.cli.console import (
    MISSED,
    note,
    out,
    output,
    paragraph,
    print_json,
    print_table,
    say,
    wrote,
)
from fedgft.cli.options import (
    ComparedName,
    Flag,
    Many,
    MetricName,
    Number,
    Options,
    Place,
    Whole,
    require,
)
from fedgft.errors import FedgftError, LazyModule
from fedgft.settings import check_setting
from fedgft.store import stage_files

if TYPE_CHECKING:
    from fedgft.metrics import Metric
    from fedgft.study import Study
    from fedgft.study.tradeoff import Frontier

# Loaded when a command runs, so that help is printed at once.
session = LazyModule("fedgft.cli.study_session")
cache = LazyModule("fedgft.study.cache")
figures = LazyModule("fedgft.study.figures")
post_processing = LazyModule("fedgft.study.post_processing")
tradeoff = LazyModule("fedgft.study.tradeoff")
training = LazyModule("fedgft.study.training")

TESTED = {"disjoint": "held-out rows", "overlap": "test rows (clients train on them too)"}
USUAL = ("lrw", "fairfed", "lft", "fedgft", "fedgft-control", "thresholds")


def frontier(
    options: Options | None = None,
    *,
    metric: MetricName = "sp",
    methods: Annotated[tuple[ComparedName, ...], Many] = USUAL,
    alpha: Number = 0.5,
    points: Whole = 12,
    references: Annotated[bool, Flag] = False,
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-frontier"),
    strict: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
) -> None:
    """Draw accuracy against gap for every method, and save the model that meets a target.

    The command varies the strength of each method. It saves the most accurate model within
    --target. Without a target, it saves the model at the knee of the frontier: larger gaps add
    little accuracy. It chooses on the clients' rows, never on test rows. FedAvg is always included.

    Parameters
    ----------
    metric
        sp, eop, eo, predictive-parity, acc or fpr, or a weighted sum of several: sp+0.5*eop.
    methods
        lrw, fairfed, lft, fedgft, fedgft-control; FedAvg with a decision rule: thresholds (by
        group), blind (without the group), derived (decisions changed by a coin); published rules,
        which use the group: logofair, fedfact-post, cost-lp.
    alpha
        How evenly rows are dealt to simulated clients: 0.5 is very uneven, 100 nearly even.
    points
        Number of strengths per method.
    references
        Also train on pooled rows, and with Fairlearn (slow; needs fedgft[references]). Finished
        fits are kept in the folder, so that an interrupted run continues.
    out_
        Folder for the table of results, the figure and the model.
    strict
        Exit with code 4 if nothing meets --target, or the saved model misses it.
    json
        Print the results to stdout as JSON, and nothing else.

    Examples
    --------
    fedgft frontier --data compas --metric sp --target 0.02
    fedgft frontier loans.csv --label repaid --group sex --client bank
    fedgft frontier --data compas --points 6 --references
    """

    if strict and (options is None or options.target is None):
        raise FedgftError("`strict` needs a target: give `target`", kind="missing")
    options = options or Options()
    _check(options, points)
    (wanted,) = session.check_cells(replace(options, target=None), methods, [metric], [alpha])
    options = replace(options, eval_every=0)
    usable: list[str] = []

    def work(study: "Study") -> int:
        usable.extend(_usable_methods(study, wanted, methods, references=references))
        return tradeoff.frontier_work(study, usable, points, references=references)

    asked = {"methods": methods, "metric": metric, "alpha": alpha, "points": points}
    with session.open_results(out_, "frontier", options, **asked, references=references) as finish:
        with session.open_study(options, [wanted], [alpha], folder=out_, work=work) as study:
            found = tradeoff.trace_frontier(
                study,
                wanted,
                alpha,
                usable,
                points=points,
                target=options.target,
                fits=cache.ResultCache(out_ / "cells") if references else None,
            )
        name = f"{study.dataset.name}, {study.describe_federation(alpha)}"
        title = f"{name}: {figures.describe_replicates(len(study.seeds))}"
        tested = TESTED[study.protocol.test]
        rows = found.rows()
        paths = _save(found, rows, out_, title=title, tested=tested)
        finish(paths)
        session.clear_checkpoints(study)
    summary = found.summary()
    if json:
        print_json({"rows": rows, **summary, "files": [str(path) for path in paths]})
    else:
        _print_choice(found, tested)
        print_table(figures.frontier_table(found, title=title, tested=tested))
        if output.verbose and found.chosen is not None:
            paragraph(training.describe_choice(found))
        figure = next(path for path in paths if path.suffix == ".png")
        paragraph(f"Open:  {figure}", wrap=False)
        note(session.describe_clients(study, options, [alpha]))
        wrote(paths)
    session.print_notes(study, [wanted])
    chosen = summary["chosen"]
    if strict and not (chosen and chosen["reached"] and chosen["saved_reached"]):
        raise SystemExit(MISSED)


def _check(options: Options, points: int) -> None:
    """Raise a `FedgftError` for options that the other commands take and this one does not."""
    options.refuse(["lam", "beta"], ": frontier sweeps it; `fedgft compare` takes one value")
    options.refuse(
        ["local_target"], ": frontier compares the gaps of all rows; use `fedgft compare`"
    )
    options.refuse(["eval_every"], ": frontier measures final models only")
    require(options.control != "scores", "`control` scores: frontier compares decisions")
    require(2 <= points <= 100, f"`points` must lie between 2 and 100, got {points}")
    check_setting("target", options.target)  # for every method here, not for fedgft-control alone


def _usable_methods(
    study: "Study", metric: "Metric", methods: tuple[str, ...], *, references: bool
) -> list[str]:
    """The methods without duplicates, and without decision rules where they are not possible."""

    usable = list(dict.fromkeys(methods))
    why = tradeoff.explain_no_rules(study)
    for name in [name for name in usable if why and name in tradeoff.RULE_METHODS]:
        note(f"{name}: left out ({why})")
        usable.remove(name)
    post_processing.check_rules(study, metric, usable)
    if references:
        is_plain = study.dataset.row_weights is None and study.dataset.axis is None
        text = "`references` know neither weights nor strata nor randomized groups: leave it out"
        require(is_plain, text, kind="conflict")
        tradeoff.check_fairlearn(metric, len(study.dataset.classes))
    return usable


def _save(
    found: "Frontier", rows: list[dict[str, Any]], folder: Path, *, title: str, tested: str
) -> list[Path]:

    figure = figures.plot_frontier(found, title=title, tested=tested)
    with stage_files(folder) as place:
        paths = [training.write_rows(rows, place / "frontier.parquet")]
        result = None if found.chosen is None else found.chosen.result
        if result is not None and found.replicate is not None:
            path = place / training.MODEL_FILE
            paths.append(
                training.save_model(found.study, result, found.replicate, path, why=found.why)
            )
        paths += figures.save_figure(figure, place, "frontier")
    return [folder / path.name for path in paths]


def _print_choice(found: "Frontier", tested: str) -> None:
    """Print what was chosen and which replicate was saved, with accuracy and gap."""

    if found.chosen is None or found.replicate is None:
        say("nothing was chosen: no method's gap is estimable in every replicate")
        return
    if found.target is not None and not found.chosen.meets(found.metric, found.target):
        paragraph(
            f"Nothing reached {100 * found.target:g} points on the clients' rows, on average over "
            "the replicates; this comes nearest. What to try: a larger --target; more rounds "
            "(--rounds); another learning rate (--lr); more --points."
        )
    groups = found.study.dataset.group_names
    for text in training.list_choice(found, groups=groups, tested=tested):
        paragraph(text)
    out.print()
