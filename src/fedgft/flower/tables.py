"""Sites that bring a CSV or Parquet file: one agreement on how it is read, then rows."""

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedgft.data.agreement import agree
from fedgft.data.columns import column_of
from fedgft.data.holdout import held_out_by_row
from fedgft.data.roles import Roles, test_of
from fedgft.data.schema import Schema, describe
from fedgft.data.table import read_frame, read_rows_as_text
from fedgft.errors import FedgftError
from fedgft.files import parsed
from fedgft.flower.gather import Replies, log, plain
from fedgft.flower.ledger import salt_of
from fedgft.flower.shield import limits
from fedgft.flower.site import Site
from fedgft.flower.sites import tensors
from fedgft.flower.terms import query
from fedgft.flower.wire import RECORD, VERSION, check_version
from fedgft.models import Model

ModelOf = Callable[..., Model]  # features, classes -> model
DESCRIBE = "fedgft_describe"
RARE = 10  # a value of a text column with fewer rows is not named to anybody


def register_description(app: ClientApp) -> None:
    """The handler that answers `agreement`."""

    @app.query(DESCRIBE)
    def described(message: Message, context: Context) -> Message:
        config, name = context.run_config, site_name(context)
        _check_limits(context, name)
        file = _file(context)
        frame = read_frame(file)
        said = describe(
            frame.filter(~_held_out(frame, file, context)), label=str(config["label"]),
            group=str(config["group"]),
            aside=[*filter(None, [str(config["split"]), *names_listed(config["leave-out"])])],
            rare=_rare(context), source=f"site '{name}': {file.name}",
        )  # fmt: skip
        record = ConfigRecord({"version": VERSION, "site": name, "description": json.dumps(said)})
        return Message(RecordDict({RECORD: record}), reply_to=message)


def _rare(context: Context) -> int:
    """Of fewer rows nothing is said; the site or the run may ask for more than the usual number."""
    node, config = context.node_config, context.run_config
    own = max(int(node.get("rare", RARE)), int(node.get("min-count", 0)))
    return max(own, int(config.get("min-count", 0)))


def _check_limits(context: Context, name: str) -> None:
    """A description is exact: a site that wants noise or secure sums does not give one. And a site
    may name the columns that it lets be label and group."""
    node, config = context.node_config, context.run_config
    if limits(context, name)[0] is not None or node.get("secure"):
        raise FedgftError(f"site '{name}' does not describe its table (it has max-epsilon or "
                          "secure): the server needs a schema file (schema=...)")  # fmt: skip
    for what in ("label", "group"):
        if node.get(what) is not None and node[what] != config[what]:
            raise FedgftError(f"site '{name}' lets '{node[what]}' be the {what}, and the run asks "
                              f"for '{config[what]}'")  # fmt: skip


def names_listed(text: Any) -> tuple[str, ...]:
    """Of a setting: names with commas between them."""
    return tuple(name.strip() for name in str(text).split(",") if name.strip())


class Agreement(NamedTuple):
    """What the sites' descriptions come to."""

    schema: Schema
    rows: dict[str, int]  # of each site that fits
    left_out: list[str]  # sites that cannot take part
    owners: dict[str, int]  # a site's name -> the node that it belongs to


def agreement(grid: Grid, nodes: Sequence[int], *, timeout: float, **how: Any) -> Agreement:
    """Ask all sites for their columns, and agree on how everybody reads them."""
    asked = {"version": VERSION}
    messages = [query(None, ConfigRecord(), asked, node, f"query.{DESCRIBE}") for node in nodes]
    found = Replies.of(grid.send_and_receive(messages, timeout=timeout))
    said, owners = _descriptions(found.take())
    if not said:
        raise FedgftError(f"no site described its table: {found.why()}")
    schema, wrong = agree(said, warn=lambda text: log.warning("fedgft: %s", text), **how)
    for site, why in wrong.items():
        log.warning("fedgft: site '%s' cannot take part: %s", site, why)
    rows = {site: int(d["rows"]) for site, d in said.items() if site not in wrong}
    names = ", ".join(schema.classes), ", ".join(schema.groups)
    log.info("fedgft: %d of %d sites fit: %d features, classes %s, groups %s", len(rows), len(said),
             len(schema.encoder.columns), *names)  # fmt: skip
    log.info("fedgft: the schema's fingerprint is %s", schema.fingerprint())
    return Agreement(schema, rows, sorted(wrong), owners)


def _descriptions(records: dict[int, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """By site, and the node of each; a node that uses the name of another one is left out."""
    said: dict[str, Any] = {}
    owners: dict[str, int] = {}
    for node, record in sorted(records.items()):
        try:
            check_version(record, f"node {node}")
            name, found = plain(record["site"], 100), parsed(str(record["description"]))
        except (FedgftError, KeyError, ValueError, TypeError, AttributeError) as error:
            log.warning("fedgft: node %d is left out: %s", node, plain(error))
            continue
        if name in said:
            log.warning(
                "fedgft: node %d is left out: it calls itself '%s', the name of node %d: set "
                "site=... in each node's configuration", node, name, owners[name],
            )  # fmt: skip
            continue
        said[name], owners[name] = found, node
    return said, owners


def table_site(
    context: Context, schema: Schema, model: ModelOf, left_out: Sequence[str] = ()
) -> Site:
    """This node's file, read as everybody reads theirs."""
    name, file = site_name(context), _file(context)
    if name in left_out:
        raise FedgftError(f"site '{name}' was left out of this run: the server's log says why")
    _check_pinned(context, schema, name)
    frame = read_frame(file)
    x, y, a, notes = schema.read(frame, source=f"site '{name}': {file.name}")
    for text in notes:
        log.info("fedgft: %s", text)
    for index, group in enumerate(schema.groups):
        if not (a == index).any():
            log.warning("fedgft: site '%s' has no row of group '%s': its own gap is not estimable, "
                        "its rows count in everybody's", name, group)  # fmt: skip
    held = _held_out(frame, file, context)
    shape = {"features": x.shape[1], "classes": len(schema.classes)}
    return Site(
        model(**shape).module(**shape).float(), rows=tensors(x[~held], y[~held], a[~held]),
        held_out=tensors(x[held], y[held], a[held]) if held.any() else None,
        classes=schema.classes, groups=schema.groups, attribute=" & ".join(schema.group),
        name=name, key=zlib.crc32(name.encode()),
    )  # fmt: skip


def _check_pinned(context: Context, schema: Schema, name: str) -> None:
    """A site may name the schema that it agreed to, by its fingerprint."""
    pinned = context.node_config.get("schema-hash")
    if pinned is not None and str(pinned).lower() != schema.fingerprint():
        raise FedgftError(
            f"site '{name}' takes part with the schema {plain(pinned, 64)} only (its setting "
            f"schema-hash), and the server's is {schema.fingerprint()}"
        )


def site_name(context: Context) -> str:
    """As the node's configuration has it, or the name of its file."""
    named = context.node_config.get("site")
    if named is None and "data" in context.node_config:
        named = Path(str(context.node_config["data"])).stem
    return str(named if named is not None else f"site-{context.node_config.get('partition-id', 0)}")


def _file(context: Context) -> Path:
    if "data" not in context.node_config:
        raise FedgftError(f"site '{site_name(context)}': its node configuration names no table: "
                          "--node-config 'data=\"rows.csv\"'")  # fmt: skip
    return Path(str(context.node_config["data"]))


def _held_out(frame: Any, file: Path, context: Context) -> np.ndarray:
    """The rows of the user's own test split, or a share of them: each row by a coin of its own,
    whose secret stays at the site."""
    config, name = context.run_config, site_name(context)
    split, share = config.get("split"), float(config.get("test-share", 0.3))
    if split:
        roles = Roles(str(config["label"]), str(config["group"]), split=str(split))
        column_of(frame, str(split), source=f"site '{name}'", option="split")
        test = test_of(frame, roles, source=f"site '{name}'")
        assert test is not None
        return test
    salt = salt_of(context, name)
    held = held_out_by_row(read_rows_as_text(file), share=share, salt=salt)
    if len(held) != frame.height:
        raise FedgftError(f"site '{name}': {file.name} was changed while it was read")
    return held
