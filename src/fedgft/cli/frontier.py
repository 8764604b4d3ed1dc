"""`fedgft frontier`: what fairness costs, for every method over its whole range."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from fedgft.cli.console import bar, note, out, print_json, print_table, wrote
from fedgft.cli.options import Flag, Many, MetricName, Options
from fedgft.types import FedgftError

if TYPE_CHECKING:
    from fedgft.cli.console import Bar
    from fedgft.experiments import Study
    from fedgft.experiments.frontier import Spot
    from fedgft.metrics import Metric

SweptName = Literal["lrw", "fairfed", "lft", "fedgft", "fedgft-control", "thresholds"]
USUAL = ("lrw", "fairfed", "lft", "fedgft", "fedgft-control", "thresholds")


def frontier(
    *,
    metric: MetricName = "sp",
    methods: Annotated[tuple[SweptName, ...], Many] = USUAL,
    alpha: float = 0.5,
    points: int = 12,
    references: Annotated[bool, Flag] = False,
    out_: Annotated[Path, Parameter(name="--out")] = Path("fedgft-frontier"),
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
        Also the same method on pooled rows, and Fairlearn's (slow; needs fedgft[references]).
    out_
        Folder for the rows, the figure and the model.
    json
        Print the rows as JSON, and nothing else, to stdout.
    """
    from fedgft.experiments.frontier import choose, spot_row
    from fedgft.files import open_folder
    from fedgft.metrics import get_metric
    from fedgft.report.figures import save as save_figure
    from fedgft.report.frontier import draw, table

    options = replace(options or Options(), eval_every=0)
    _check(options, list(methods), points)
    wanted = get_metric(metric)
    with open_folder(out_), bar() as progress:
        study, spots = _spots(
            options, wanted, list(methods), alpha, progress, points=points, references=references
        )
    chosen = choose(spots, wanted, options.target)
    shown = study.concentration(alpha)
    rows = [spot_row(study, wanted, shown, spot) for spot in spots]
    where = "" if shown is None else f", alpha {shown:g}"
    title = f"{study.dataset.name}{where}: {len(study.seeds)} replicates"
    paths = _save(study, spots, rows, chosen, out_)
    figure = draw(spots, wanted, title=title, target=options.target, chosen=chosen)
    paths += save_figure(figure, out_, "frontier")
    for text in study.dataset.notes:
        note(text)
    if json:
        print_json({"rows": rows, **_pointed(spots, wanted, options.target, chosen),
                    "files": [str(path) for path in paths]})  # fmt: skip
        return
    print_table(table(spots, wanted, title=title))
    _say(chosen, wanted)
    wrote(paths)


def _check(options: Options, methods: list[str], points: int) -> None:
    options.check()
    if not methods:
        raise FedgftError("--methods needs at least one value")
    for name in ("lam", "beta"):
        if getattr(options, name) is not None:
            raise FedgftError(f"--{name}: frontier sweeps it; `fedgft compare` takes one value")
    if not 2 <= points <= 100:
        raise FedgftError(f"--points must lie between 2 and 100, got {points}")


def _spots(
    options: Options, metric: "Metric", methods: list[str], alpha: float, progress: "Bar", *,
    points: int, references: bool,
) -> tuple["Study", list["Spot"]]:  # fmt: skip
    from fedgft.experiments.frontier import fairlearn, pooled, sweep
    from fedgft.experiments.references import check_fairlearn

    if not 0 < alpha < float("inf"):
        raise FedgftError(f"--alpha must be a positive number, got {alpha:g}")
    study = options.open([metric], [alpha], progress)
    classes = len(study.dataset.classes)
    if classes != 2 and "thresholds" in methods:
        note(f"thresholds: left out, the label has {classes} classes")
        methods = [m for m in methods if m != "thresholds"]
    if references:
        check_fairlearn(metric, classes)
    progress.expect(_work(study, methods, points, references=references))
    spots = sweep(study, metric, alpha, list(dict.fromkeys(methods)), points=points)
    if references:
        widest = spots[0].mean(metric, "federation")[1]
        spots += pooled(study, metric, points=points, widest=widest)
        each = FIT * study.protocol.settings.rounds
        spots += fairlearn(
            study, metric, alpha, lambda: progress.advance("Fairlearn, pooled rows", each)
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


FIT = 20


def _save(
    study: "Study", spots: list["Spot"], rows: list[dict[str, Any]], chosen: "Spot | None",
    folder: Path,
) -> list[Path]:  # fmt: skip
    from fedgft.experiments.store import save_model, write_rows

    paths = [write_rows(rows, folder / "frontier.parquet")]
    if chosen is not None and chosen.result is not None:
        paths.append(save_model(study, chosen.result, 0, folder / "model.safetensors"))
    return paths


def _pointed(
    spots: list["Spot"], metric: "Metric", target: float | None, chosen: "Spot | None"
) -> dict[str, Any]:
    """What the figure points at."""
    from fedgft.experiments.frontier import knee

    def named(spot: "Spot | None") -> dict[str, Any] | None:
        return None if spot is None else {"method": spot.method, "strength": spot.strength}

    by = dict.fromkeys(spot.method for spot in spots)
    knees = {m: named(knee([s for s in spots if s.method == m], metric)) for m in by}
    return {"target": target, "chosen": named(chosen), "knees": knees}


def _say(chosen: "Spot | None", metric: "Metric") -> None:
    from fedgft.report.figures import NAMES

    if chosen is None:
        note("nothing was chosen: the gap is not estimable")
        return
    accuracy, gap = chosen.mean(metric, "test")
    with_ = "" if chosen.strength is None else f" with strength {chosen.strength:.3g}"
    out.print(
        f"Chosen: {NAMES[chosen.method]}{with_}; on held-out rows {100 * accuracy:.1f}% right, gap "
        f"{100 * gap:.1f} points. The first replicate's model is saved.", highlight=False,
    )  # fmt: skip
