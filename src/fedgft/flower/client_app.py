"""The `ClientApp` of a whole run, from the configuration of a Flower app (`examples/flower`).

A site holds a table (`data = "csv"`, a file that the node's own configuration names), or a part of
a public data set, cut as the simulator cuts it, for trials.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedgft.data import load
from fedgft.data.dataset import Federation, standardize
from fedgft.data.encode import get_column
from fedgft.data.partition import hold_out_by_row, partition
from fedgft.data.schema import Schema, describe_table
from fedgft.data.table import Roles, read_frame, read_rows_as_text, read_test_rows
from fedgft.errors import FedgftError
from fedgft.flower.client import Site, client_site, make_model, make_rows, register, settings_of
from fedgft.flower.messages import RECORD, VERSION
from fedgft.flower.replies import log, plain
from fedgft.models import Model, Module, get_model
from fedgft.privacy.ledger import read_salt
from fedgft.privacy.policy import SitePolicy

MakeModule = Callable[[int, int], Any]
"A user's function: features, classes -> `nn.Module`."
DESCRIBE = "fedgft_describe"
MIN_NAMED_ROWS = 10
"A site does not name a value of a text column that has fewer rows."


def client(own: MakeModule | None = None) -> ClientApp:
    """Make the app of a site.

    Parameters
    ----------
    own
        `own(features, classes)` makes the `nn.Module` of a run with `model = "own"`.
    """

    def make_site(message: Message, context: Context) -> Site:
        config = context.run_config
        if config["data"] != "csv":
            return _make_public_site(context, own)
        settings: Any = settings_of(message)
        schema = Schema.from_json(str(settings["schema"]))
        left_out = json.loads(str(settings["left-out"]))
        shape = {"features": len(schema.encoder.columns), "classes": len(schema.classes)}
        model = model_of(config, own, **shape)
        return table_site(context, schema, model, left_out)

    app = register(ClientApp(), make_site)

    @app.query(DESCRIBE)
    def describe_table(message: Message, context: Context) -> Message:
        return description_reply(message, context)

    return app


def model_of(
    config: Mapping[str, Any], own: MakeModule | None, *, features: int, classes: int
) -> Model:
    """The model that a run's configuration names."""
    name = str(config["model"])
    if name == "own" and own is not None:
        return Module(lambda: own(features, classes), name="own")
    return get_model(name)


def description_reply(message: Message, context: Context) -> Message:
    """Describe the columns of the site's training rows, for the sites' agreement on a schema.

    A description is exact, so a site that wants noise or secure sums gives none.
    """
    config = context.run_config
    name = site_name(context)
    _check_site_limits(context, name)
    file = _data_file(context)
    frame = read_frame(file)
    description = describe_table(
        frame.filter(~_held_out(frame, file, context)),
        label=str(config["label"]),
        group=str(config["group"]),
        leave_out=[*filter(None, [str(config["split"]), *split_names(config["leave-out"])])],
        min_rows=_min_named_rows(context),
        source=f"site '{name}': {file.name}",
    )
    text = json.dumps(description)
    record = ConfigRecord({"version": VERSION, "site": name, "description": text})
    return Message(RecordDict({RECORD: record}), reply_to=message)


def _min_named_rows(context: Context) -> int:
    """The site and the run may ask for more than MIN_NAMED_ROWS."""
    node: Any = context.node_config
    least = (
        node.get("rare", MIN_NAMED_ROWS),
        node.get("min-count", 0),
        context.run_config.get("min-count", 0),
    )
    return max(map(int, least))


def _check_site_limits(context: Context, name: str) -> None:
    """A site may refuse exact descriptions, and name the columns that may be label and group."""
    node = context.node_config
    config = context.run_config
    if SitePolicy(context, name).limits()[0] is not None or node.get("secure"):
        raise FedgftError(
            f"site '{name}' does not describe its table (it has max-epsilon or "
            "secure): the server needs a schema file (schema=...)"
        )
    for what in ("label", "group"):
        if node.get(what) is not None and node[what] != config[what]:
            raise FedgftError(
                f"site '{name}' lets '{node[what]}' be the {what}, and the run asks "
                f"for '{config[what]}'"
            )


def split_names(text: Any) -> tuple[str, ...]:
    """The names in a setting such as "age, income"."""
    return tuple(name.strip() for name in str(text).split(",") if name.strip())


def table_site(context: Context, schema: Schema, model: Any, left_out: Sequence[str] = ()) -> Site:
    """Read this node's file by the federation's schema.

    Parameters
    ----------
    context
        Its node configuration names the file and may pin the schema by its fingerprint.
    schema
        How all sites read their tables.
    model
        A model of `fedgft.models`, or the name of one.
    left_out
        Names of sites that cannot take part: an error if this site is one of them.
    """
    name = site_name(context)
    file = _data_file(context)
    if name in left_out:
        raise FedgftError(f"site '{name}' was left out of this run: the server's log says why")
    pinned = context.node_config.get("schema-hash")
    if pinned is not None and str(pinned).lower() != schema.fingerprint():
        raise FedgftError(
            f"site '{name}' takes part with the schema {plain(pinned, 64)} only (its setting "
            f"schema-hash), and the server's is {schema.fingerprint()}"
        )
    frame = read_frame(file)
    x, y, a, notes = schema.read(frame, source=f"site '{name}': {file.name}")
    for text in notes:
        log.info("fedgft: %s", text)
    for index, group in enumerate(schema.groups):
        if not (a == index).any():
            log.warning(
                "fedgft: site '%s' has no row of group '%s': its own gap is not estimable, "
                "but its rows count in the federation's",
                name,
                group,
            )
    held = _held_out(frame, file, context)
    return Site(
        make_model(model, features=x.shape[1], classes=len(schema.classes)),
        rows=make_rows(x[~held], y[~held], a[~held]),
        held_out=make_rows(x[held], y[held], a[held]) if held.any() else None,
        classes=schema.classes,
        groups=schema.groups,
        attribute=" & ".join(schema.group),
        name=name,
        key=zlib.crc32(name.encode()),
    )


def site_name(context: Context) -> str:
    """The name in the node's configuration, else that of its file, else its number."""
    node = context.node_config
    if node.get("site") is not None:
        return str(node["site"])
    if "data" in node:
        return Path(str(node["data"])).stem
    return f"site-{node.get('partition-id', 0)}"


def _data_file(context: Context) -> Path:
    if "data" not in context.node_config:
        raise FedgftError(
            f"site '{site_name(context)}': its node configuration names no table: "
            "`node_config` 'data=\"rows.csv\"'"
        )
    return Path(str(context.node_config["data"]))


def _held_out(frame: Any, file: Path, context: Context) -> np.ndarray:
    """Which rows are held out: those of the user's own split, or a random share.

    The random choice depends on each row's text and on a secret that stays at the site.
    """
    config: Any = context.run_config
    name = site_name(context)
    split = config.get("split")
    if split:
        roles = Roles(str(config["label"]), str(config["group"]), split=str(split))
        get_column(frame, str(split), source=f"site '{name}'", option="split")
        test = read_test_rows(frame, roles, source=f"site '{name}'")
        assert test is not None
        return test
    share = float(config.get("test-share", 0.3))
    held = hold_out_by_row(read_rows_as_text(file), share=share, salt=read_salt(context, name))
    if len(held) != frame.height:
        raise FedgftError(f"site '{name}': {file.name} was changed while it was read")
    return held


def federation(config: Mapping[str, Any], sites: int) -> Federation:
    """A public data set, cut between so many sites as `fedgft train` would cut it."""
    data = load(str(config["data"]), group=str(config["group"]) or None)
    parts = partition(
        data,
        clients=sites,
        alpha=float(config["alpha"]),
        seed=int(config["seed"]),
        test_share=float(config["test-share"]),
    )
    return standardize(parts)


def _make_public_site(context: Context, own: MakeModule | None) -> Site:
    """This node's part of a public data set; every site holds out its share of the test rows."""
    node: Any = context.node_config
    config: Any = context.run_config
    name = site_name(context)
    if "partition-id" not in node:
        raise FedgftError(f"site '{name}': its node configuration needs partition-id (0, 1, ...)")
    count = int(node.get("num-partitions", config["sites"]))
    number = int(node["partition-id"])
    if not 0 <= number < count:
        raise FedgftError(f"site '{name}': partition-id {number} is none of {count} parts")
    parts = federation(config, count)
    data = parts.dataset
    model = model_of(config, own, features=data.features.shape[1], classes=len(data.classes))
    site = client_site(parts, number, model, name=name)
    rows = parts.test[number::count]
    site.held_out = make_rows(parts.scale_rows(rows), data.labels[rows], data.groups[rows])
    return site
