"""`fedgft frontier`: what fairness costs, for every method over its whole range."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from fedgft.cli.compare import finished, guarded
from fedgft.cli.console import MISSED, note, paragraph, print_json, print_table, say, wrote
from fedgft.cli.names import Flag, Many, MetricName, Place, Whole, check_methods
from fedgft.cli.options import Options
from fedgft.cli.progress import bar
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    from fedgft.cli.progress import Bar
    from fedgft.experiments import Study
    from fedgft.experiments.checkpoints import Checkpoints
    from fedgft.experiments.frontier import Spot
    from fedgft.experiments.shelf import Shelf
    from fedgft.metrics import Metric

SweptName = Literal["fedavg", "lrw", "fairfed", "lft", "fedgft", "fedgft-control", "thresholds"]
USUAL = ("lrw", "fairfed", "lft", "fedgft", "fedgft-control", "thresholds")


def frontier(
    *,
    metric: MetricName = "sp",
    methods: Annotated[tuple[SweptName, ...], Many] = USUAL,
    alpha: float = 0.5,
    points: Whole = 12,
    references: Annotated[bool, Flag] = False,
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-frontier"),
    strict: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    options: Options | None = None,
) -> None:
    """Sweep the strength of every method, draw accuracy against gap, save the chosen model.

    Chosen is the most accurate model within --target, or without one the knee of the frontier; on
    the clients' rows, never on test rows. FedAvg is always among the methods.

    Parameters
    ----------
    metric
        sp, eop, eo, cal, acc or fpr; several at once with weights: sp+0.5*eop.
    methods
        lrw, fairfed, lft, fedgft, fedgft-control; thresholds: FedAvg with one threshold a group.
    alpha
        Dirichlet concentration: small is heterogeneous.
    points
        Strengths of each method.
    references
        Also the same method on pooled rows, and Fairlearn's (slow; needs fedgft[references]). Its
        fits are kept in the folder, so an interrupted run continues.
    out_
        Folder for the rows, the figure and the model.
    strict
        End with exit code 4 where nothing meets --target, or the saved model misses it.
    json
        Print the rows as JSON, and nothing else, to stdout.
    """
    from fedgft.experiments.checks import contradiction
    from fedgft.experiments.frontier import choose, spot_row
    from fedgft.experiments.shelf import Shelf
    from fedgft.federated.control import TargetMissedWarning
    from fedgft.files import open_folder
    from fedgft.metrics import get_metric
    from fedgft.report.figures import replicates
    from fedgft.report.frontier import draw, table

    if strict and (options is None or options.target is None):
        raise FedgftError("--strict is about a target: give --target")
    _check(options or Options(), list(methods), points)
    options = replace(options or Options(), eval_every=0)
    wanted = get_metric(metric)
    with open_folder(out_):
        kept = options.checkpoints(out_)
        with guarded(kept), bar() as progress, warnings.catch_warnings():
            warnings.simplefilter("ignore", TargetMissedWarning)  # some targets are out of reach
            study, spots = _spots(
                options, wanted, list(methods), alpha, progress, points=points, checkpoints=kept,
                shelf=Shelf(out_ / "cells") if references else None,
            )  # fmt: skip
        chosen = choose(spots, wanted, options.target)
        saved = None if chosen is None else chosen.nearest(wanted, options.target)
        shown = study.concentration(alpha)
        rows = [spot_row(study, wanted, shown, spot) for spot in spots]
        where = "" if shown is None else f", alpha {shown:g}"
        title = f"{study.dataset.name}{where}: {replicates(len(study.seeds))}"
        tested = TESTED[study.protocol.test]
        figure = draw(spots, wanted, title=title, target=options.target, chosen=chosen,
                      tested=tested)  # fmt: skip
        paths = _save(study, rows, chosen, saved, figure, out_, target=options.target)
        finished(study)
    clash = contradiction(study.dataset, wanted)
    for text in (*study.dataset.notes, *([clash] if clash else [])):
        note(text)
    pointed = _pointed(study, spots, wanted, options.target, chosen, saved)
    if json:
        print_json({"rows": rows, **pointed, "files": [str(path) for path in paths]})
    else:
        print_table(table(spots, wanted, title=title, tested=tested))
        _say(chosen, saved, wanted, study, tested, options.target)
        wrote(paths)
    found = pointed["chosen"]
    if strict and not (found and found["reached"] and found["saved_reached"]):
        raise SystemExit(MISSED)


def _check(options: Options, methods: list[str], points: int) -> None:
    options.check()
    if not methods:
        raise FedgftError("--methods needs at least one value")
    for text in check_methods(replace(options, target=None, lam=None, beta=None), methods):
        note(text)
    for name in ("lam", "beta"):
        if getattr(options, name) is not None:
            raise FedgftError(f"--{name}: frontier sweeps it; `fedgft compare` takes one value")
    if options.control == "scores":
        raise FedgftError("--control scores: frontier compares decisions")
    if options.eval_every is not None:
        raise FedgftError("--eval-every: frontier measures final models only")
    if not 2 <= points <= 100:
        raise FedgftError(f"--points must lie between 2 and 100, got {points}")


def _spots(
    options: Options, metric: "Metric", methods: list[str], alpha: float, progress: "Bar", *,
    points: int, checkpoints: "Checkpoints | None", shelf: "Shelf | None",
) -> tuple["Study", list["Spot"]]:  # fmt: skip
    from fedgft.experiments.frontier import fairlearn, gap_of, pooled, sweep
    from fedgft.experiments.references import check_fairlearn

    if not 0 < alpha < float("inf"):
        raise FedgftError(f"--alpha must be a positive number, got {alpha:g}")
    study = options.open([metric], [alpha], progress, checkpoints=checkpoints)
    classes = len(study.dataset.classes)
    demands = len(metric.conditions(classes))
    if "thresholds" in methods and (classes != 2 or demands > 2):
        why = f"the label has {classes} classes" if classes != 2 else f"{demands} rates at once"
        note(f"thresholds: left out ({why})")
        methods = [m for m in methods if m != "thresholds"]
    if shelf is not None:
        check_fairlearn(metric, classes)
    progress.expect(_work(study, methods, points, references=shelf is not None))
    spots = sweep(study, metric, alpha, list(dict.fromkeys(methods)), points=points,
                  target=options.target)  # fmt: skip
    if shelf is not None:
        widest = gap_of(spots[0], metric)
        spots += pooled(study, metric, alpha, points=points, widest=widest)
        each = FIT * study.protocol.settings.rounds
        spots += fairlearn(
            study, metric, alpha, shelf, lambda: progress.advance("Fairlearn, pooled rows", each)
        )
    return study, spots


def _work(study: "Study", methods: list[str], points: int, *, references: bool) -> int:
    """In run-rounds, as the simulator counts them; a fit of Fairlearn takes about as long as some
    runs of ours."""
    from fedgft.experiments.frontier import BOUNDS

    rates = len(study.protocol.lr) if len(study.protocol.lr) > 1 else 0
    swept = [m for m in methods if m not in ("lrw", "thresholds")]
    runs = 1 + rates + points * len(swept) + ("lrw" in methods)
    if references:
        runs += rates + points + FIT * (len(BOUNDS) + 1)
    return runs * len(study.seeds) * study.protocol.settings.rounds


FIT = 20  # runs of ours that one fit of Fairlearn takes
TESTED = {"disjoint": "held-out rows", "overlap": "test rows (clients train on them too)"}


def _save(
    study: "Study", rows: list[dict[str, Any]], chosen: "Spot | None", replicate: int | None,
    figure: Any, folder: Path, *, target: float | None,
) -> list[Path]:  # fmt: skip
    from fedgft.experiments.store import save_model, write_rows
    from fedgft.files import staged
    from fedgft.report.figures import save as save_figure

    with staged(folder) as place:
        paths = [write_rows(rows, place / "frontier.parquet")]
        if chosen is not None and chosen.result is not None and replicate is not None:
            name, why = place / "model.safetensors", _why(target)
            paths.append(save_model(study, chosen.result, replicate, name, why=why))
        paths += save_figure(figure, place, "frontier")
    return [folder / path.name for path in paths]


def _pointed(
    study: "Study", spots: list["Spot"], metric: "Metric", target: float | None,
    chosen: "Spot | None", saved: int | None,
) -> dict[str, Any]:  # fmt: skip
    """What the figure points at, and what was saved of it."""
    from fedgft.engine.picking import SLACK
    from fedgft.experiments.frontier import knee

    def named(spot: "Spot | None") -> dict[str, Any] | None:
        return None if spot is None else {"method": spot.method, "strength": spot.strength}

    by = dict.fromkeys(spot.method for spot in spots)
    knees = {m: named(knee([s for s in spots if s.method == m], metric)) for m in by}
    picked = None
    if chosen is not None and saved is not None:
        gap, lost = float(chosen.values(metric, "federation")[1][saved]), chosen.collapsed()
        picked = {
            **(named(chosen) or {}),
            "reached": None if target is None else chosen.meets(metric, target),
            "collapsed": int(lost.sum()),
            "replicate": saved,
            "seed": study.seeds[saved],
            "why": _why(target),
            "saved_gap": gap,
            "saved_reached": None if target is None else gap <= target + SLACK and not lost[saved],
        }
    return {"target": target, "chosen": picked, "knees": knees}


def _why(target: float | None) -> str:
    if target is None:
        return "its gap is nearest to the mean of the replicates"
    return "the most accurate within the target on its clients' rows, or else the nearest to it"


def _say(
    chosen: "Spot | None", saved: int | None, metric: "Metric", study: "Study", tested: str,
    target: float | None,
) -> None:  # fmt: skip
    from fedgft.experiments.frontier import spot_row
    from fedgft.report.figures import NAMES
    from fedgft.report.words import balance, widest

    if chosen is None or saved is None:
        say("nothing was chosen: no method's gap is estimable in every replicate")
        return
    if target is not None and not chosen.meets(metric, target):
        paragraph(
            f"Nothing reached {100 * target:g} points on the clients' rows, on average over the "
            "replicates; this comes nearest. What to try: a larger --target; more rounds "
            "(--rounds); another learning rate (--lr); more --points."
        )
    accuracy, gap = chosen.mean(metric, "test")
    own, there = (100 * float(chosen.values(metric, w)[1][saved]) for w in ("federation", "test"))
    knob = study.protocol.strengths.get(chosen.method)
    with_ = "" if knob is None else f" with {knob} {chosen.strength:.3g}"
    lost = int(chosen.collapsed().sum())
    row = spot_row(study, metric, None, chosen)
    paragraph(
        f"Chosen: {NAMES[chosen.method]}{with_}. On {tested} it is right in {100 * accuracy:.1f}% "
        f"of cases, gap {100 * gap:.1f} points, on average over the replicates. Saved is the model "
        f"of seed {study.seeds[saved]} ({_why(target)}): gap {own:.1f} on its clients' rows, "
        f"{there:.1f} on {tested}. {balance(row)} The gap is widest between "
        f"{widest(row['widest'], row['seeds'])}."
    )
    if lost:
        paragraph(
            f"It has collapsed in {lost} of {len(study.seeds)} replicates: the model gives nearly "
            "everybody the same decision."
        )
