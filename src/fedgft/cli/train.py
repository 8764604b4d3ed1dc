"""`fedgft train`: one method, its model saved."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from fedgft.cli import compare as comparing
from fedgft.cli.console import clients, out, print_json, wrote
from fedgft.cli.names import Flag, MethodName, MetricName, Place
from fedgft.cli.options import Options
from fedgft.errors import FedgftError
from fedgft.files import expanded, open_folder

if TYPE_CHECKING:
    from fedgft.experiments import Result, Study


def train(
    *,
    method: MethodName | None = None,
    metric: MetricName = "sp",
    alpha: float = 0.5,
    init: Place | None = None,
    out_: Annotated[Place, Parameter(name="--out")] = Path("fedgft-train"),
    all_models: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    options: Options | None = None,
) -> None:
    """Train one method, save its model, and show every client before and after.

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
        Save every replicate's model, not the first one's alone.
    json
        Print the result as JSON, and nothing else, to stdout.
    """
    from fedgft.experiments import client_rows
    from fedgft.report.words import reached
    from fedgft.saved import load_model

    options, out_ = options or Options(), expanded(out_)
    if init is not None and options.weights is not None:
        raise FedgftError("--init and --weights are two starts; give one")
    start = None if init is None else load_model(init)
    method = method or usual(options)
    asked = method == "fedgft-control"  # what it costs is told beside plain FedAvg
    with open_folder(out_):
        study, results, rows = comparing.run(
            options, ["fedavg", method] if asked else [method], [metric], [alpha], folder=out_,
            start=start,
        )  # fmt: skip
        models = {i: f"model-{seed}.safetensors" for i, seed in enumerate(study.seeds)}
        kept = {**(models if all_models else {}), 0: "model.safetensors"}
        paths = comparing.save(study, results, rows, out_, models=kept)
        comparing.finished(study)
    result, row = results[-1], rows[-1]
    table = client_rows(study, result)
    if json:
        price = {"accuracy_fedavg": rows[0]["accuracy"]} if asked else {}
        print_json({**row, **price, "clients": table, "files": [str(path) for path in paths]})
        return
    comparing.report(study, results, rows)
    if asked:
        out.print(reached(row, rows[0]), _saved(study, result), highlight=False)
    out.print(clients(table))
    wrote(paths)


def usual(options: Options) -> MethodName:
    """Fair decisions without a knob, unless what the published form alone has was asked for."""
    given = lambda *names: any(getattr(options, n) is not None for n in names)  # noqa: E731
    if given("target", "control", "pick"):
        return "fedgft-control"
    published = given("lam", "penalty", "spread") or options.protocol == "paper"
    return "fedgft" if published else "fedgft-control"


def _saved(study: "Study", result: "Result") -> str:
    """Of the model that is on disk, which is one of many replicates."""
    assert result.history.federation is not None
    kind = study.protocol.control
    own, test = (
        100 * float(tally[-1].gap(result.metric, kind)[0])
        for tally in (result.history.federation, result.history.test)
    )
    return (
        f"The saved model, of seed {study.seeds[0]}: gap {own:.1f} on its clients' rows, "
        f"{test:.1f} on test rows."
    )
