"""`fedgft train`: one method, its model saved."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fedgft.cli import compare as comparing
from fedgft.cli.console import MISSED, START, clients, out, paragraph, print_json, wrote
from fedgft.cli.names import Flag, MethodName, MetricName, Place
from fedgft.cli.options import Options
from fedgft.errors import FedgftError
from fedgft.files import expanded, open_folder


def train(
    *,
    method: MethodName | None = None,
    metric: MetricName = "sp",
    alpha: float = 0.5,
    init: Place | None = None,
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-train"),
    all_models: Annotated[bool, Flag] = False,
    strict: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    options: Options | None = None,
) -> None:
    """Train one method, save its model, and show every client before and after.

    Saved is the most accurate of the replicates that met the target on their clients' rows; if none
    did, the one nearest to it.

    Parameters
    ----------
    method
        fedavg, lrw, lft, fairfed, fedgft (as published) or fedgft-control (a target for decisions)
        [default: fedgft-control; fedgft where --lam, --penalty or --spread is given, or the
        protocol is paper].
    metric
        sp, eop, eo, cal, acc or fpr; several at once with weights: sp+0.5*eop.
    alpha
        Dirichlet concentration: small is heterogeneous.
    init
        Start from a model that `fedgft train` saved.
    out_
        Folder for the model, the rows and the figure.
    all_models
        Save every replicate's model, not that of one alone.
    strict
        End with exit code 4 where the saved model misses the target, or has collapsed.
    json
        Print the result as JSON, and nothing else, to stdout.
    """
    from fedgft.experiments import client_rows
    from fedgft.experiments.rows import pick
    from fedgft.experiments.store import trained
    from fedgft.report.words import WHY, advice, reached, saved
    from fedgft.saved import load_model

    options, out_ = options or Options(), expanded(out_)
    if init is not None and options.weights is not None:
        raise FedgftError("--init and --weights are two starts; give one")
    start = None if init is None else load_model(init)
    method = method or usual(options)
    asked = method == "fedgft-control"  # what it costs is told beside plain FedAvg
    if strict and not asked:
        raise FedgftError(f"--strict is for fedgft-control, which has a target, not for {method}")
    with open_folder(out_):
        study, results, rows = comparing.run(
            options, ["fedavg", method] if asked else [method], [metric], [alpha], folder=out_,
            start=start,
        )  # fmt: skip
        result, row = results[-1], rows[-1]
        chosen = pick(study, result)
        why = WHY[chosen.why].format(met=chosen.met)
        kept = {comparing.MODEL: chosen.replicate}
        if all_models:
            kept |= {f"model-{seed}.safetensors": i for i, seed in enumerate(study.seeds)}
        paths = comparing.save(study, results, rows, out_, models=kept, why=why)
        comparing.finished(study)
    plain = results[0] if asked else None
    table = client_rows(study, result, replicate=chosen.replicate, plain=plain)
    about: dict[str, Any] = {**trained(study, result, chosen.replicate), "why": why}
    if json:
        price = {"accuracy_fedavg": rows[0]["accuracy"]} if asked else {}
        before = {"clients_before": "start" if plain is None else "fedavg"}
        files = {"files": [str(path) for path in paths]}
        print_json({**row, **price, "saved": about, **before, "clients": table, **files})
    else:
        comparing.report(study, results, rows)
        if asked:
            paragraph(reached(row, rows[0]))
            paragraph(advice(row))
        paragraph(saved(about, why))
        before = START if plain is None else "FedAvg"
        out.print(clients(table, seed=about["seed"], before=before))
        wrote(paths)
    if strict and (chosen.why != "met" or chosen.collapsed):
        raise SystemExit(MISSED)


def usual(options: Options) -> MethodName:
    """Fair decisions without a knob, unless what the published form alone has was asked for."""
    given = lambda *names: any(getattr(options, n) is not None for n in names)  # noqa: E731
    if given("target", "control", "pick"):
        return "fedgft-control"
    published = given("lam", "penalty", "spread") or options.protocol == "paper"
    return "fedgft" if published else "fedgft-control"
