"""A site of a whole run, from the configuration of a Flower app: one half of `examples/flower`.

Sites hold a table each (`data = "csv"`, the file named in the node's own configuration), or a part
of a public data set, cut as the simulator cuts it, to try things out.
"""

import json
from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedgft.data.dataset import Federation
from fedgft.data.schema import Schema
from fedgft.errors import FedgftError
from fedgft.flower.client import register, settings_of
from fedgft.flower.site import Site
from fedgft.flower.sites import client_site, tensors
from fedgft.flower.tables import ModelOf, register_description, site_name, table_site
from fedgft.models import Model, Module, get_model

Config = dict[str, Any]
Own = Callable[[int, int], Any]


def client(own: Own | None = None) -> ClientApp:
    """The app of a site. `own(features, classes)` makes the module of `model = "own"`."""

    def site(message: Message, context: Context) -> Site:
        config, model = context.run_config, model_of(context.run_config, own)
        if config["data"] != "csv":
            return _part(context, model)
        told: Config = dict(settings_of(message))
        schema = Schema.from_json(str(told["schema"]))
        return table_site(context, schema, model, json.loads(str(told["left-out"])))

    app = register(ClientApp(), site)
    register_description(app)
    return app


def model_of(config: Config, own: Own | None) -> ModelOf:
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
