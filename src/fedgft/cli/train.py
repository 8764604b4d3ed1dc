"""`fedgft train`: one method, its model saved."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fedgft.cli import compare as comparing
from fedgft.cli.console import clients, out, print_json, wrote
from fedgft.cli.options import Flag, MethodName, MetricName, Options


def train(
    *,
    method: MethodName = "fedgft",
    metric: MetricName = "sp",
    alpha: float = 0.5,
    init: Path | None = None,
    out_: Annotated[Path, Parameter(name="--out")] = Path("fedgft-train"),
    all_models: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    options: Options | None = None,
) -> None:
    """Train one method, save its model, and show every client before and after.

    Parameters
    ----------
    method
        fedavg, lrw, lft, fairfed or fedgft.
    metric
        sp, eop, eo, cal, acc or fpr.
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
    from fedgft.experiments.store import load_model, save_model

    options = options or Options()
    start = None if init is None else load_model(init)
    study, results, rows = comparing.run(
        options, [method], [metric], [alpha], folder=out_, start=start
    )
    result = results[0]
    paths = []
    for i in range(len(study.seeds) if all_models else 1):
        name = "model.safetensors" if i == 0 else f"model-{study.seeds[i]}.safetensors"
        paths.append(save_model(study, result, i, out_ / name))
    paths += comparing.save(study, results, rows, out_)
    table = client_rows(study, result)
    if json:
        print_json({**rows[0], "clients": table, "files": [str(path) for path in paths]})
        return
    comparing.report(study, results, rows)
    out.print(clients(table))
    wrote(paths)
