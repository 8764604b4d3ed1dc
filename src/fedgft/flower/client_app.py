"""The handlers of a Flower `ClientApp`, and the app of a whole run (`examples/flower`).

`register` gives an app the handlers for a `Site`. `make_client_app` makes the app whose sites hold
a table (`data = "csv"`, a file that the node's own configuration names), or, for trials, a part of
a public data set, divided between the sites as the simulator divides it between clients.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedgft.algorithms.objectives import reweigh
from fedgft.data import load
from fedgft.data.dataset import Federation, standardize
from fedgft.data.encode import get_column
from fedgft.data.partition import hold_out_by_row, partition
from fedgft.data.public import SOURCES
from fedgft.data.schema import Schema, describe_table
from fedgft.data.table import Roles, read_frame, read_rows_as_text, read_test_rows
from fedgft.errors import FedgftError
from fedgft.fair_model import TREE_MODELS
from fedgft.flower.boosted_trees import BoostedTrees, grow_trees, tally_unseen
from fedgft.flower.client import (
    Site,
    arrays_of,
    client_site,
    make_model,
    make_rows,
    penalty_of,
    read_rows,
    settings_of,
    train_locally,
)
from fedgft.flower.histogram_trees import HISTOGRAMS, histogram_reply
from fedgft.flower.messages import (
    DECISIONS,
    RECORD,
    REPORT,
    SCORES,
    TRAINED,
    VERSION,
    check_version,
    log,
    pack_sums,
    read_request,
    warn,
)
from fedgft.flower.secure_sums import reply_to_secure_sum
from fedgft.flower.site_scores import decisions_reply, report_reply, scores_reply
from fedgft.formatting import one_line
from fedgft.models import Model, Module, get_model
from fedgft.privacy.ledger import model_digest, read_salt
from fedgft.privacy.policy import SitePolicy
from fedgft.sums import Sums

MakeModule = Callable[[int, int], Any]
"A user's function: features, classes -> `nn.Module`."
DESCRIBE = "fedgft_describe"
MIN_NAMED_ROWS = 10
"A site does not name a value of a text column that has fewer rows."


# Handlers


def register(
    app: ClientApp, site: Callable[[Message, Context], Site], *, mods: Any = None
) -> ClientApp:
    """Register handlers for all messages: training, evaluation, statistics, the report, ...

    Parameters
    ----------
    app
        The app, which is also returned.
    site
        A function that makes the `Site` that answers a message.
    mods
        Flower's mods (such as differential privacy), which are applied to training only. Applied
        to the whole app, they would turn the other replies into errors.
    """
    handlers = (
        (app.train(mods=mods), train_reply),
        (app.evaluate(), evaluate_reply),
        (app.query(RECORD), query_reply),
        (app.query(REPORT), report_reply),
        (app.query(SCORES), scores_reply),
        (app.query(DECISIONS), decisions_reply),
        (app.query(HISTOGRAMS), histogram_reply),
    )
    for add_handler, reply in handlers:
        add_handler(lambda message, context, r=reply: r(message, context, site(message, context)))
    return app


def statistics(message: Message, context: Context, site: Site) -> ConfigRecord:
    """Return the record for a reply: the sums of the site's current model over its training rows.

    The sums have the noise and suppression that the server and the site agreed on.
    """
    policy = _make_policy(message, context, site)
    return _pack_sums(site, _release_sums(policy, site, settings_of(message))[0])


def _make_policy(message: Message, context: Context, site: Site) -> SitePolicy:
    return SitePolicy(context, site.name, read_request(message))


def _release_sums(policy: SitePolicy, site: Site, config: Mapping[str, Any]) -> tuple[Sums, int]:
    """Return the sums that may leave the site, and the exact number of rows, which may not."""
    sums = site.tally(site.rows)
    rows = int(sums.rows())
    if isinstance(site.model, BoostedTrees):
        sums = tally_unseen(site, sums, policy, config)
    return policy.release(sums, model_digest(site.arrays())), rows


def _pack_sums(site: Site, sums: Sums) -> ConfigRecord:
    return pack_sums(sums, site.names, site=site.name)


def train_reply(message: Message, context: Context, site: Site) -> Message:
    """Train the received model for one round; send it with the sums that the server asks for."""
    policy = _make_policy(message, context, site)
    policy.agree()
    config = settings_of(message)
    content = RecordDict()
    released = None
    rows = None
    site.load(arrays_of(message))
    wanted = policy.request.get("statistics", "none")
    if wanted in ("received", "both"):
        released, rows = _release_sums(policy, site, config)
        content[RECORD] = _pack_sums(site, released)
    names = {"classes": site.names.classes, "groups": site.names.groups}
    penalty = penalty_of(message, site.model, site=site.name, **names)
    if policy.request.get("reweigh"):
        penalty.weights = reweigh(site.counts())
    if site.train is not None:
        metrics = site.train(site.model, penalty, config) or {}
    elif isinstance(site.model, BoostedTrees):
        metrics = {"train_loss": grow_trees(site, penalty, policy, config)}
    else:
        metrics = train_locally(site, penalty, config)
    if wanted == "both":
        content[TRAINED] = statistics(message, context, site)
    content["arrays"] = site.arrays()
    rows = site.size() if rows is None else rows  # avoid reading a loader again
    content["metrics"] = _metric_record(policy, policy.report_rows(rows, released), metrics)
    return Message(content, reply_to=message)


def evaluate_reply(message: Message, context: Context, site: Site) -> Message:
    """Evaluate on the held-out rows, or on the training rows if the site holds none out.

    The statistics always describe the training rows.
    """
    policy = _make_policy(message, context, site)
    policy.agree()
    content = RecordDict()
    released = None
    site.load(arrays_of(message))
    if policy.request.get("statistics", "none") != "none":
        released, _ = _release_sums(policy, site, settings_of(message))
        content[RECORD] = _pack_sums(site, released)
    sums = site.tally(site.rows if site.held_out is None else site.held_out)
    rows = policy.report_rows(int(sums.rows()), released)
    content["metrics"] = _metric_record(policy, rows, {"accuracy": float(sums.accuracy())})
    return Message(content, reply_to=message)


def _metric_record(policy: SitePolicy, rows: int, metrics: dict[str, float]) -> MetricRecord:
    """Return the metrics to average; with noise or secure sums, only the number of rows."""
    shown = {} if policy.hides_metrics() else metrics
    return MetricRecord({"num-examples": rows, **{n: float(v) for n, v in shown.items()}})


def query_reply(message: Message, context: Context, site: Site) -> Message:
    """Send the sums of the received model, or this site's part of a secure sum."""
    policy = _make_policy(message, context, site)
    check_version(policy.request, f"the server (seen from site '{site.name}')")
    arrays = arrays_of(message)
    if "secure.stage" in policy.request:
        policy.agree()
        record = reply_to_secure_sum(arrays, policy, context, site)
    else:
        site.load(arrays)
        record = statistics(message, context, site)
    return Message(RecordDict({RECORD: record}), reply_to=message)


# The app of a whole run


def make_client_app(make_module: MakeModule | None = None) -> ClientApp:
    """Make the app of a site.

    Parameters
    ----------
    make_module
        `make_module(features, classes)` makes the `nn.Module` of a run with `model = "own"`.
    """

    def make_site(message: Message, context: Context) -> Site:
        config = context.run_config
        if config["data"] != "csv":
            return _make_public_site(context, make_module)
        settings: Any = settings_of(message)
        schema = Schema.from_json(str(settings["schema"]))
        left_out = json.loads(str(settings["left-out"]))
        model = choose_model(config, make_module, **schema_shape(schema))
        return table_site(context, schema, model, left_out)

    app = register(ClientApp(), make_site)

    @app.query(DESCRIBE)
    def describe_table(message: Message, context: Context) -> Message:
        return description_reply(message, context)

    return app


def choose_model(
    config: Mapping[str, Any], make_module: MakeModule | None, *, features: int, classes: int
) -> Model | str:
    """Return the model that a run's configuration names; the name itself of trees."""
    name = str(config["model"])
    if name in TREE_MODELS:
        return name
    if name == "own" and make_module is not None:
        return Module(lambda: make_module(features, classes), name="own")
    return get_model(name)


def description_reply(message: Message, context: Context) -> Message:
    """Describe the columns of the site's training rows, for the sites' agreement on a schema.

    A description holds exact numbers, so a site that requires noise or secure sums sends none.
    """
    config = context.run_config
    name = site_name(context)
    _check_site_limits(context, name)
    file = _data_file(context)
    frame = read_frame(file)
    description = describe_table(
        frame.filter(~_choose_test_rows(frame, file, context)),
        label=str(config["label"]),
        group=str(config["group"]),
        leave_out=[*filter(None, [str(config["split"]), *split_names(config["leave-out"])])],
        categorical=split_names(config.get("categorical", "")),
        missing=split_names(config.get("missing", "")),
        min_rows=_min_named_rows(context),
        source=f"site '{name}': {file.name}",
    )
    text = json.dumps(description)
    record = ConfigRecord({"version": VERSION, "site": name, "description": text})
    return Message(RecordDict({RECORD: record}), reply_to=message)


def _min_named_rows(context: Context) -> int:
    """Return how many rows a value must have so that the site names it.

    This is the largest of the site's `rare` (default MIN_NAMED_ROWS), the site's `min-count` and
    the run's `min-count`.
    """
    node: Any = context.node_config
    least = (node.get("rare", MIN_NAMED_ROWS), node.get("min-count", 0))
    return max(map(int, (*least, context.run_config.get("min-count", 0))))


def _check_site_limits(context: Context, name: str) -> None:
    """Raise an error if the site's own settings forbid a description of its table.

    They also forbid it if the run asks for another label or group than they allow.
    """
    node = context.node_config
    config = context.run_config
    if SitePolicy(context, name).limits()[0] is not None or node.get("secure"):
        reason = "does not describe its table (it has max-epsilon or secure)"
        raise FedgftError(f"site '{name}' {reason}: the server needs a schema file (schema=...)")
    for what in ("label", "group"):
        if node.get(what) is not None and node[what] != config[what]:
            wanted = f"the run asks for '{config[what]}'"
            raise FedgftError(f"site '{name}' lets '{node[what]}' be the {what}, and {wanted}")


def schema_shape(schema: Schema) -> dict[str, int]:
    """Return the numbers of features and classes of a schema's models."""
    return {"features": len(schema.encoder.columns), "classes": len(schema.classes)}


def split_names(text: Any) -> tuple[str, ...]:
    """Return the names in a setting such as "age, income"."""
    return tuple(name.strip() for name in str(text).split(",") if name.strip())


def table_site(context: Context, schema: Schema, model: Any, left_out: Sequence[str] = ()) -> Site:
    """Make this node's site: read its file according to the federation's schema.

    Parameters
    ----------
    context
        Flower's context. Its node configuration names the file and may pin the schema's
        fingerprint.
    schema
        How all sites read their tables.
    model
        A model of `fedgft.models`, or the name of one, "xgboost" or "trees".
    left_out
        Names of sites that cannot take part. If this site is one of them, an error is raised.
    """
    name = site_name(context)
    file = _data_file(context)
    if name in left_out:
        raise FedgftError(f"site '{name}' was left out of this run: the server's log says why")
    pinned = context.node_config.get("schema-hash")
    if pinned is not None and str(pinned).lower() != schema.fingerprint():
        condition = f"the schema {one_line(pinned, 64)} only (its setting schema-hash)"
        server = f"the server's is {schema.fingerprint()}"
        raise FedgftError(f"site '{name}' takes part with {condition}, and {server}")
    frame = read_frame(file)
    if model in TREE_MODELS:  # they ask about the columns as they are
        nothing = np.zeros_like(schema.mean)
        schema = replace(schema, mean=nothing, spread=nothing + 1.0)
    x, y, a, notes = schema.read(frame, source=f"site '{name}': {file.name}")
    x = schema.encoder.to_fields(x) if model in TREE_MODELS else x
    for text in notes:
        log.info("fedgft: %s", text)
    for index, group in enumerate(schema.groups):
        if not (a == index).any():
            effect = "its own gap is not estimable, but its rows count in the federation's"
            warn(f"site '{name}' has no row of group '{group}': {effect}")
    test = _choose_test_rows(frame, file, context)
    return Site(
        make_model(
            model,
            features=x.shape[1],
            classes=len(schema.classes),
            levels=schema.encoder.level_counts,
        ),
        rows=make_rows(x[~test], y[~test], a[~test]),
        held_out=make_rows(x[test], y[test], a[test]) if test.any() else None,
        classes=schema.classes,
        groups=schema.groups,
        attribute=" & ".join(schema.group),
        name=name,
        key=zlib.crc32(name.encode()),
    )


def site_name(context: Context) -> str:
    """Return the name in the node's configuration, or that of its file, or one with its number."""
    node = context.node_config
    if node.get("site") is not None:
        return str(node["site"])
    if "data" in node:
        return Path(str(node["data"])).stem
    return f"site-{node.get('partition-id', 0)}"


def _data_file(context: Context) -> Path:
    if "data" not in context.node_config:
        problem = "its node configuration names no table: `node_config` 'data=\"rows.csv\"'"
        raise FedgftError(f"site '{site_name(context)}': {problem}")
    return Path(str(context.node_config["data"]))


def _choose_test_rows(frame: Any, file: Path, context: Context) -> np.ndarray:
    """Return which rows are held out: those of the user's own split, or a random share.

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
    test = hold_out_by_row(read_rows_as_text(file), share=share, salt=read_salt(context, name))
    if len(test) != frame.height:
        raise FedgftError(f"site '{name}': {file.name} was changed while it was read")
    return test


def divide_public_data(config: Mapping[str, Any], sites: int) -> Federation:
    """Return a public data set, divided between the sites as `fedgft train` divides it."""
    data = load(str(config["data"]), group=str(config["group"]) or None)
    parts = partition(
        data,
        clients=sites,
        alpha=float(config["alpha"]),
        seed=int(config["seed"]),
        test_share=float(config["test-share"]),
    )
    return standardize(parts)


def name_public_roles(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of the label and of the group in a public data set."""
    source = SOURCES.get(str(config["data"]))
    label = "label" if source is None else source.label
    group = "group" if source is None else source.group
    return label, str(config["group"]) or group


def _make_public_site(context: Context, make_module: MakeModule | None) -> Site:
    """Make a site from this node's part of a public data set and its share of the test rows."""
    node: Any = context.node_config
    config: Any = context.run_config
    name = site_name(context)
    if "partition-id" not in node:
        raise FedgftError(f"site '{name}': its node configuration needs partition-id (0, 1, ...)")
    count = int(node.get("num-partitions", config["sites"]))
    number = int(node["partition-id"])
    if not 0 <= number < count:
        raise FedgftError(f"site '{name}': partition-id {number} is none of {count} parts")
    parts = divide_public_data(config, count)
    data = parts.dataset
    model = choose_model(
        config, make_module, features=data.features.shape[1], classes=len(data.classes)
    )
    site = client_site(parts, number, model, name=name)
    _, site.attribute = name_public_roles(config)
    rows = parts.test[number::count]
    site.held_out = read_rows(parts, rows, model)
    return site
