"""A whole run, from the configuration of a Flower app: what `examples/flower` is made of.

Sites hold a table each (`data = "csv"`, the file named in the node's own configuration), or a part
of a public data set, cut as the simulator cuts it, to try things out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedgft.data.dataset import Federation
from fedgft.data.schema import Schema
from fedgft.flower.client import Site, register, settings_of
from fedgft.flower.gather import wait_for_nodes
from fedgft.flower.journal import Journal
from fedgft.flower.methods import FairFed, FedGFT, Measured
from fedgft.flower.private import Budget
from fedgft.flower.reporting import collect, write_results
from fedgft.flower.sites import client_site, first_arrays, tensors
from fedgft.flower.strategy import FairStrategy
from fedgft.flower.tables import ModelOf, agreement, register_description, site_name, table_site
from fedgft.models import Model, Module, get_model
from fedgft.types import FedgftError

SETTINGS = ("lr", "schedule", "rounds", "epochs", "batch-size", "optimizer", "weight-decay", "seed")
Config = dict[str, Any]
Own = Callable[[int, int], Any]


def client(own: Own | None = None) -> ClientApp:
    """The app of a site. `own(features, classes)` makes the module of `model = "own"`."""

    def site(message: Message, context: Context) -> Site:
        config, model = context.run_config, _model(context.run_config, own)
        if config["data"] != "csv":
            return _part(context, model)
        return table_site(context, Schema.from_json(str(settings_of(message)["schema"])), model)

    app = register(ClientApp(), site)
    register_description(app)
    return app


def _model(config: Config, own: Own | None) -> ModelOf:
    name = str(config["model"])

    def made(*, features: int, classes: int) -> Model:
        if name == "own" and own is not None:
            return Module(lambda: own(features, classes), name="own")
        return get_model(name)

    return made


def federation(config: Config, sites: int) -> Federation:
    """A public data set between so many sites, as `fedgft train` would cut it."""
    from fedgft.data import load
    from fedgft.data.partition import partition
    from fedgft.data.scaling import standardise

    data = load(str(config["data"]), group=str(config["group"]) or None)
    return standardise(
        partition(data, clients=sites, alpha=float(config["alpha"]), seed=int(config["seed"]),
                  test_share=float(config["test-share"]))
    )  # fmt: skip


def _part(context: Context, model: ModelOf) -> Site:
    node, name = context.node_config, site_name(context)
    if "partition-id" not in node:
        raise FedgftError(f"site '{name}': its node configuration needs partition-id (0, 1, ...)")
    count = int(node.get("num-partitions", context.run_config["sites"]))
    number = int(node["partition-id"])
    if not 0 <= number < count:
        raise FedgftError(f"site '{name}': partition-id {number} is none of {count} parts")
    made = federation(dict(context.run_config), count)
    data, rows = made.dataset, made.test[number::count]
    kind = model(features=data.features.shape[1], classes=len(data.classes))
    site = client_site(made, number, kind, name=name)
    site.held_out = tensors(made.seen(rows), data.labels[rows], data.groups[rows])
    return site


def serve(grid: Grid, context: Context, strategy: Strategy, *, own: Own | None = None) -> None:
    """The server's part: agree on columns, train, measure, write everything into `out`."""
    config: Config = dict(context.run_config)
    journal = Journal(Path(str(config["out"])).expanduser())
    with journal:
        nodes = wait_for_nodes(grid, int(config["sites"]), float(config["node-timeout"]))
        schema, rows = _schema(grid, config, nodes)
        how = ConfigRecord({key: config[key] for key in SETTINGS} | {"schema": schema.to_json()})
        fair = _strategy(strategy, config, schema, rows, journal)
        shape = {"features": len(schema.encoder.columns), "classes": len(schema.classes)}
        first = first_arrays(_model(config, own)(**shape), **shape, seed=int(config["seed"]))
        timeout = float(config["timeout"])
        result = fair.start(grid, first, int(config["rounds"]), timeout, how, ConfigRecord({**how}))
        sums = collect(grid, result.arrays, sorted(grid.get_node_ids()), config=how,
                       budget=fair.terms.budget, timeout=timeout)  # fmt: skip
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


def _schema(grid: Grid, config: Config, nodes: list[int]) -> tuple[Schema, np.ndarray]:
    """How rows are read, and how many each site has."""
    if config["data"] == "csv":
        listed = lambda key: tuple(filter(None, str(config[key]).split(",")))  # noqa: E731
        found, rows = agreement(
            grid, nodes, timeout=float(config["timeout"]), label=str(config["label"]),
            group=str(config["group"]), positive=str(config["positive"]) or None,
            classes=listed("classes"), groups=listed("groups"),
        )  # fmt: skip
        return found, np.array(list(rows.values())) * (1 - float(config["test-share"]))
    from fedgft.data.scaling import raw_scaling

    made = federation(config, int(config["sites"]))
    data = made.dataset
    assert data.encoder is not None
    names = (data.classes, data.group_names)
    return Schema("label", ("group",), *names, data.encoder, *raw_scaling(made)), made.sizes


def _strategy(
    strategy: Strategy, config: Config, schema: Schema, rows: np.ndarray, journal: Journal
) -> FairStrategy:
    epsilon, rounds = float(config["epsilon"]), int(config["rounds"])
    budget = Budget(epsilon or None, float(config["delta"]), rounds + 1, int(config["min-count"]))
    common: dict[str, Any] = {
        "metric": str(config["metric"]), "classes": schema.classes, "groups": schema.groups,
        "channel": str(config["channel"]), "budget": budget, "secure": bool(config["secure"]),
        "node_timeout": float(config["node-timeout"]), "on_round": journal.tell,
        "checkpoint": journal.folder / "checkpoint.safetensors",
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
    steps = (rows * np.ceil(rows / int(config["batch-size"]))).sum() / rows.sum()
    pace = float(config["lr"]) * int(config["epochs"]) * steps
    return FedGFT(strategy, target=float(config["target"]), pace=pace, **common)
