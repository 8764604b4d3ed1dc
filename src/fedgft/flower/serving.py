"""The server of a whole run, from the configuration of a Flower app: the other half."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedgft.data.schema import Schema
from fedgft.errors import FedgftError
from fedgft.files import parsed, whole
from fedgft.flower.gather import wait_for_nodes
from fedgft.flower.journal import CHECKPOINT, HISTORY, SCHEMA, Journal
from fedgft.flower.methods import FairFed, FedGFT, Measured
from fedgft.flower.private import Budget
from fedgft.flower.reporting import collect, write_results
from fedgft.flower.roster import RosterGrid
from fedgft.flower.running import Config, Own, federation, model_of
from fedgft.flower.settings import check_run
from fedgft.flower.sites import first_arrays
from fedgft.flower.strategy import FairStrategy
from fedgft.flower.tables import agreement, names_listed
from fedgft.metrics.robust import Limits

SETTINGS = (  # what clients are told about their training
    "lr", "schedule", "rounds", "epochs", "batch-size", "optimizer", "weight-decay", "seed",
)  # fmt: skip


def serve(grid: Grid, context: Context, strategy: Strategy, *, own: Own | None = None) -> None:
    """The server's part: agree on columns, train, measure, write everything into `out`."""
    config: Config = dict(context.run_config)
    journal = Journal(Path(str(config["out"])).expanduser())
    with journal, RosterGrid(grid) as grid:
        check_run(config)
        _check_place(journal.folder, resume=bool(config["resume"]))
        nodes = wait_for_nodes(grid, int(config["sites"]), float(config["node-timeout"]))
        schema, rows, left_out, owners = _schema(grid, config, nodes)
        told = {"schema": schema.to_json(), "left-out": json.dumps(left_out)}
        how = ConfigRecord({key: config[key] for key in SETTINGS} | told)
        with whole(journal.folder / SCHEMA, private=True) as part:
            part.write_text(schema.to_json(), "utf-8")
        fair = _strategy(strategy, config, schema, rows, journal)
        fair.hearing.believer.owners |= owners
        shape = {"features": len(schema.encoder.columns), "classes": len(schema.classes)}
        first = first_arrays(model_of(config, own)(**shape), **shape, seed=int(config["seed"]))
        timeout = float(config["timeout"])
        result = fair.start(grid, first, int(config["rounds"]), timeout, how, ConfigRecord({**how}))
        sums = {}
        if not fair.terms.secure:  # a site's own sums are what secure sums hide
            sums = collect(grid, result.arrays, sorted(grid.get_node_ids()), config=how,
                           budget=fair.terms.budget, timeout=timeout,
                           owners=fair.hearing.believer.owners)  # fmt: skip
        said = ("data", "method", "metric", "strategy", "channel", "model", "seed")
        about = {key: config[key] for key in said} | {"measured": fair.measured}
        write_results(
            journal.folder,
            result.arrays,
            schema=schema,
            history=fair.history,
            sums=sums,
            about=about,
        )


def _check_place(folder: Path, *, resume: bool) -> None:
    """One run a folder; an unfinished one is continued on request."""
    if (folder / HISTORY).exists():
        raise FedgftError(f"out {folder}: holds a finished run already; name another folder")
    if (folder / CHECKPOINT).exists() and not resume:
        raise FedgftError(f"out {folder}: holds an unfinished run; resume=true goes on with it, or "
                          "name another folder")  # fmt: skip


def _schema(
    grid: Grid, config: Config, nodes: list[int]
) -> tuple[Schema, np.ndarray, list[str], dict[str, int]]:
    """How rows are read, how many each site has, who cannot take part, and the nodes' names."""
    if config["data"] == "csv" and config["schema"]:
        return Schema.from_file(Path(str(config["schema"])).expanduser()), np.ones(1), [], {}
    if config["data"] == "csv":
        found = agreement(
            grid, nodes, timeout=float(config["timeout"]), label=str(config["label"]),
            group=str(config["group"]), positive=str(config["positive"]) or None,
            classes=names_listed(config["classes"]), groups=names_listed(config["groups"]),
            scaling=str(config.get("scaling", "pooled")),
        )  # fmt: skip
        return found.schema, np.array(list(found.rows.values())), found.left_out, found.owners
    from fedgft.data.scaling import raw_scaling

    made = federation(config, int(config["sites"]))
    data = made.dataset
    assert data.encoder is not None
    names = (data.classes, data.group_names)
    return Schema("label", ("group",), *names, data.encoder, *raw_scaling(made)), made.sizes, [], {}


def _agreed_counts(path: str) -> dict[str, Any] | None:
    """By site, rows by label and group: {"north": [[310, 95], [120, 40]], ...}."""
    if not path:
        return None
    file = Path(path).expanduser()
    try:
        held = parsed(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise FedgftError(f"counts {file}: cannot be read ({error})") from None
    if not isinstance(held, dict):
        raise FedgftError(f"counts {file}: write one table of rows by label and group a site")
    return held


def _strategy(
    strategy: Strategy, config: Config, schema: Schema, rows: np.ndarray, journal: Journal
) -> FairStrategy:
    epsilon, rounds = float(config["epsilon"]), int(config["rounds"])
    budget = Budget(epsilon or None, float(config["delta"]), rounds + 1, int(config["min-count"]))
    common: dict[str, Any] = {
        "metric": str(config["metric"]), "classes": schema.classes, "groups": schema.groups,
        "channel": str(config["channel"]), "budget": budget, "secure": bool(config["secure"]),
        "node_timeout": float(config["node-timeout"]), "on_round": journal.tell,
        "checkpoint": journal.folder / CHECKPOINT,
        "limits": Limits(influence_most=float(config.get("max-influence", 1.0))),
        "counts": _agreed_counts(str(config.get("counts", ""))),
    }  # fmt: skip
    method = str(config["method"])
    if method == "fairfed":
        return FairFed(strategy, beta=float(config["beta"]), **common)
    if method == "measured":
        return Measured(strategy, **common)
    if method != "fedgft":
        raise FedgftError(f"method {method!r} is not known: fedgft, fairfed or measured")
    lam = float(config["lam"])
    if lam >= 0:
        return FedGFT(strategy, lam=lam, penalty=str(config["penalty"]), **common)
    return FedGFT(strategy, target=float(config["target"]), **common)
