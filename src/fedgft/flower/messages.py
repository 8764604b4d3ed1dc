"""The messages between the server and its clients: requests, queries, replies and their checks.

A client's reply holds a record named "fedgft": the `Sums` of a model over the client's rows, by
label and group. The server's message holds the price of each score, by label and group, in its
configuration under the prefix "fedgft." (Flower's mods require a single configuration). The server
turns any metric, penalty or target into prices before it sends them. So clients need to know none
of these, and the server can change them without an update of the clients.

The server leaves out every reply that it cannot use, logs the site and the reason, and continues
with the others.
"""

import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedgft.errors import FedgftError
from fedgft.formatting import one_line
from fedgft.metrics.metric import Price
from fedgft.sums import MAX_ROWS, CategoryNames, RecordReader, Sums

RECORD = "fedgft"
PREFIX = "fedgft."
TRAINED = "fedgft.trained"  # sums of the locally trained model, if a weighting needs them
QUERY = "query.fedgft"
REPORT = "fedgft_report"
SCORES = "fedgft_scores"  # sums of the final model's scores on training rows, for a decision rule
DECISIONS = "fedgft_decisions"  # sums of the decisions of that rule on held-out rows
VERSION = 1
MAX_SITE_NAME = 100  # characters
Request = dict[str, Any]
"What the server asks a client for, without the prefix: see `make_request`."
log = logging.getLogger("flwr")  # Flower's logger, so that there is only one log
NODES_VARIABLE = "FEDGFT_NODES"  # environment variable: path of a JSON file {node: site}
FLOWER_NODE = 1  # the node number of replies that Flower itself makes for lost nodes
POLL_SECONDS = 1.0  # seconds between checks for replies; Flower itself waits 3 s
site_names: dict[int, str] = {}  # node -> site, in the run that this process serves


def warn(text: str) -> None:
    """Write a warning into Flower's log."""
    log.warning("fedgft: %s", text)


def pack_sums(sums: Sums, names: CategoryNames, *, site: str) -> ConfigRecord:
    """Return a client's sums as a record of its reply."""
    return ConfigRecord({"version": VERSION, **sums.to_record(names, site=site)})


def unpack_sums(record: Any, *, node: str) -> tuple[str, CategoryNames, Sums]:
    """Read a client's sums from its reply; raise a `FedgftError` if their form is wrong.

    Parameters
    ----------
    record
        The reply's content under the name `RECORD`; its form is not checked yet.
    node
        The name to use for a client whose reply holds no name.

    Returns
    -------
    site, names, sums
        The client's name, the names of its classes and groups, and its sums.
    """
    name = record.get("site", node) if isinstance(record, ConfigRecord) else node
    site = one_line(name, MAX_SITE_NAME)
    if not isinstance(record, ConfigRecord):
        raise FedgftError(f"site '{site}' sent no record of settings under '{RECORD}'", kind="data")
    check_version(record, f"site '{site}'")
    reader = RecordReader(record, f"site '{site}'")
    names = CategoryNames.from_record(reader)
    return site, names, Sums.from_record(reader, names)


def make_request(
    price: Price | None, names: CategoryNames | None, *, statistics: str, privacy: dict[str, float]
) -> Request:
    """Return the server's request.

    Parameters
    ----------
    price
        (c, k, c): the price of each score by label and group; None before there is a price.
    names
        The classes and groups of the federation, if they are known.
    statistics
        The models whose sums the reply must hold: "received", "both" or "none".
    privacy
        The settings of the noise that clients must add, by name.
    """
    request: Request = {"version": VERSION, "statistics": statistics}
    if names is not None:
        request |= {"classes": list(names.classes), "groups": list(names.groups)}
    if price is not None:
        request["price"] = np.asarray(price, np.float64).ravel().tolist()
    return request | {f"privacy.{key}": float(value) for key, value in privacy.items()}


def put_request(content: RecordDict, request: Request) -> None:
    """Add a request to a copy of the message's configuration: the strategy owns the original."""
    configs = content.config_records
    name = next(iter(configs), "config")
    ours = {f"{PREFIX}{key}": value for key, value in request.items()}
    content[name] = ConfigRecord({**configs.get(name, {}), **ours})


def read_request(message: Message) -> Request:
    """Return the request in a message; empty if the server does not use fedgft."""
    return {
        key.removeprefix(PREFIX): value
        for config in message.content.config_records.values()
        for key, value in config.items()
        if key.startswith(PREFIX)
    }


def read_price(request: Request, names: CategoryNames, *, site: str) -> np.ndarray:
    """Return the price (c, k, c) in a request; zeros if it has none."""
    server = f"the server (seen from site '{site}')"
    reader = RecordReader(request, server)
    if request:
        check_version(request, server)
    if "classes" in request:
        CategoryNames.from_record(reader).check(names, site=site)
    if "price" not in request:
        return np.zeros(names.shape)
    price = reader.array("price", names.shape)
    if not np.isfinite(price).all():
        raise FedgftError(f"{server} sent prices that are not finite", kind="data")
    return price


def check_version(record: Any, sender: str) -> None:
    """Raise a `FedgftError` unless the sender uses the same version of the record."""
    found = record.get("version")
    if found != VERSION:
        problem = f"{sender} uses version {found} of the fairness record, not {VERSION}"
        raise FedgftError(f"{problem}: install the same fedgft everywhere", kind="conflict")


# The server's exchange with the nodes


def describe_node(node: int) -> str:
    """Return the name of the site behind a node, or the node's number if it is not known."""
    return f"site '{site_names[node]}'" if node in site_names else f"node {node}"


def registered_names() -> dict[int, str]:
    """Return {node: site} from the server's register of keys; empty if there is no such file."""
    try:
        names = json.loads(Path(os.environ[NODES_VARIABLE]).read_text("utf-8"))
        return {int(node): str(name) for node, name in names.items()}
    except (KeyError, OSError, ValueError, AttributeError):
        return {}


def make_query(
    arrays: ArrayRecord | None, config: ConfigRecord, request: Request, node: int, kind: str = QUERY
) -> Message:
    """Return a message to one client outside of training: a model, settings and our request."""
    content = RecordDict({"arrays": arrays or ArrayRecord(), "config": config})
    put_request(content, request)
    return Message(content, dst_node_id=node, message_type=kind)


def wait_for_nodes(grid: Grid, count: int, seconds: float) -> list[int]:
    """Wait until `count` nodes are connected, for at most this number of seconds.

    Returns the nodes that are connected at the end, and raises an error if there is none.
    """
    deadline = time.monotonic() + seconds
    while len(nodes := sorted(grid.get_node_ids())) < count:
        if time.monotonic() > deadline:
            if not nodes:
                raise FedgftError(f"no node has connected within {seconds:g} s", kind="network")
            found = f"{len(nodes)} of {count} nodes are here after {seconds:g} s"
            warn(f"{found}; continuing without the others")
            break
        time.sleep(1)
    return nodes


@Grid.register
class GridProxy:
    """Wraps a grid and forwards every attribute that a subclass does not define."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


class GridWithTimeout(GridProxy):
    """A grid whose `get_node_ids` raises an error if a strategy waits too long for nodes.

    It is used while a strategy samples nodes: Flower's `sample_nodes` polls `get_node_ids` without
    a limit.
    """

    def __init__(self, grid: Grid, seconds: float) -> None:
        super().__init__(grid)
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are connected."""
        nodes = list(self._grid.get_node_ids())
        if time.monotonic() > self._deadline:
            raise FedgftError(
                f"connected nodes after {self._seconds:g} s: {len(nodes)}, fewer than "
                "the strategy asks for (min_train_nodes, min_evaluate_nodes, min_available_nodes)",
                kind="network",
            )
        return nodes


class RosterGrid(GridProxy):
    """A grid that knows the site of each node, and logs which sites did not answer.

    Names come from the server's register of keys, otherwise from the nodes' own replies. They are
    valid inside the block: ``with RosterGrid(grid) as grid: ...``.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self.names = registered_names()

    def __enter__(self) -> Any:
        site_names.update(self.names)
        return self

    def __exit__(self, *_: object) -> None:
        site_names.clear()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the replies that came in time.

        If Flower replies in place of a lost node, the reply gets that node's number.
        """
        sent = list(messages)
        nodes = [message.metadata.dst_node_id for message in sent]
        waiting = dict(zip(self._grid.push_messages(sent), nodes, strict=True))
        del sent, messages
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting and time.monotonic() < deadline:
            for reply in self._grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, FLOWER_NODE)
                if reply.metadata.src_node_id == FLOWER_NODE:
                    reply.metadata.__dict__["_src_node_id"] = node
                self._learn_name(reply)
                replies.append(reply)
            if waiting:
                time.sleep(POLL_SECONDS)
        for node in waiting.values():
            warn(f"{describe_node(node)} did not answer within {timeout or 0.0:g} s")
        return replies

    def _learn_name(self, reply: Message) -> None:
        """Remember the site's own name if the server registered none for its key."""
        node = reply.metadata.src_node_id
        if node in self.names or not reply.has_content():
            return
        record = reply.content.config_records.get(RECORD)
        name = None if record is None else record.get("site")
        if isinstance(name, str):
            site_names[node] = one_line(name, 100)


@dataclass
class Replies:
    """The replies of one phase.

    Attributes
    ----------
    errors
        Replies that report an error.
    good
        Node -> its usable reply.
    refused
        Node -> the reason why its reply was left out.
    """

    errors: list[Message]
    good: dict[int, Message]
    refused: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: Iterable[Message]) -> "Replies":
        """Separate errors from usable replies, and log the errors."""
        received = list(messages)
        errors = [reply for reply in received if reply.has_error()]
        for reply in errors:
            warn(f"{describe_node(reply.metadata.src_node_id)} failed: {_error_text(reply)}")
        return cls(errors, {r.metadata.src_node_id: r for r in received if not r.has_error()})

    def take(self, record: str = RECORD) -> dict[int, Any]:
        """Remove our record from the replies and return it by node: strategies do not expect it."""
        contents = {node: reply.content for node, reply in self.good.items()}
        return {node: c.pop(record) for node, c in contents.items() if record in c}

    def refuse(self, node: int, reason: str, site: str) -> None:
        """Leave out a node's reply and log why."""
        self.refused[node] = reason = one_line(reason)
        del self.good[node]
        warn(f"{site} is left out of this round: {reason}")

    def filter(self, check: Callable[[Message], None], site_name: Callable[[int], str]) -> None:
        """Refuse replies that fail `check`, then those whose form differs from most others.

        A single reply of another form would make Flower's strategies fail for all replies.
        """
        for node, reply in list(self.good.items()):
            try:
                check(reply)
            except FedgftError as error:
                self.refuse(node, str(error), site_name(node))
        forms = {node: _describe_form(reply) for node, reply in self.good.items()}
        common = most_common(forms.values())
        for node, form in forms.items():
            if form != common:
                reason = f"it sends {form}; the others use another form: {common}"
                self.refuse(node, reason, site_name(node))

    def for_strategy(self) -> list[Message]:
        """Return errors and usable replies, sorted by node so that sums are reproducible."""
        return [*self.errors, *(self.good[node] for node in sorted(self.good))]

    def explain(self) -> str:
        """Return the three most frequent reasons why replies are missing."""
        reasons = Counter([*map(_error_text, self.errors), *self.refused.values()])
        return "; ".join(text for text, _ in reasons.most_common(3)) or (
            "the strategy made no model of the replies" if self.good else "no reply came in time"
        )


def _error_text(reply: Message) -> str:
    """Return a client's error message, without the text that Flower puts around it."""
    text = reply.error.reason or "no reason given"
    found = re.fullmatch(r"<class '.*?'>:<'(.*)'>", text, re.DOTALL)
    return one_line(found[1] if found else text)


def check_update(reply: Message, sent: ArrayRecord, *, weighted_by: str) -> None:
    """Check that a reply holds a finite model like the one that was sent, and valid metrics."""
    models = list(reply.content.array_records.values())
    if len(models) != 1:
        raise FedgftError(f"its reply must hold one ArrayRecord, not {len(models)}")
    check_metrics(reply, weighted_by=weighted_by)
    if set(models[0]) != set(sent):
        names = ", ".join(sorted(set(models[0]) ^ set(sent))[:3])
        raise FedgftError(f"its model has other tensors than the one it received: {names}")
    for name, array in models[0].items():
        try:
            values = array.numpy()
            finite = bool(np.isfinite(values).all())
            kind = np.dtype(sent[name].dtype).kind
        except Exception as error:  # a decoder may raise any exception for untrusted bytes
            raise FedgftError(f"its '{name}' cannot be read ({type(error).__name__})") from None
        if values.dtype.kind != kind:
            raise FedgftError(f"its '{name}' has dtype {values.dtype}, not {sent[name].dtype}")
        if values.shape != tuple(sent[name].shape):
            shapes = f"{values.shape}, not {tuple(sent[name].shape)}"
            reason = "the sites have different columns, classes or models"
            raise FedgftError(f"its '{name}' has shape {shapes}: {reason}")
        if not finite:
            raise FedgftError(f"its '{name}' is not finite: its training diverged")


def check_metrics(reply: Message, *, weighted_by: str) -> None:
    """Check that a reply holds one record of metrics with a number of examples."""
    records = list(reply.content.metric_records.values())
    if len(records) != 1:
        raise FedgftError(f"its reply must hold one MetricRecord, not {len(records)}")
    rows: Any = records[0].get(weighted_by)
    if type(rows) not in (int, float) or not 0 <= rows <= MAX_ROWS:
        raise FedgftError(f"its metric '{weighted_by}' is {rows!r}: no number of rows")


def update_norm(reply: Message, sent: ArrayRecord) -> float:
    """Return the Euclidean length of a checked update: the received minus the sent model."""
    (arrays,) = reply.content.array_records.values()
    total = 0.0
    for name, array in arrays.items():
        before, after = (np.asarray(a.numpy(), np.float64) for a in (sent[name], array))
        with np.errstate(over="ignore"):
            total += float(np.square(after - before).sum())
    return math.sqrt(total)


def scale_update(reply: Message, sent: ArrayRecord, factor: float) -> None:
    """Multiply an update's floating-point tensors by a factor; keep integers, such as counters."""
    ((key, arrays),) = reply.content.array_records.items()
    scaled = dict(arrays)
    for name, array in arrays.items():
        before = sent[name].numpy()
        after = array.numpy()
        if after.dtype.kind == "f":
            moved = before.astype(np.float64) + factor * (after.astype(np.float64) - before)
            scaled[name] = Array(moved.astype(after.dtype))
    reply.content[key] = ArrayRecord(scaled)


def _describe_form(reply: Message) -> str:
    """Return the names of a reply's records and metrics, with the lengths of list metrics."""
    content = reply.content
    (metrics,) = content.metric_records.values()
    names = [f"{n}[{len(v)}]" if isinstance(v, list) else n for n, v in metrics.items()]
    records = [*content.array_records, *content.metric_records]
    return f"the metrics {', '.join(sorted(names))} in the records {', '.join(records)}"


def most_common(values: Iterable[Any]) -> Any:
    """Return the most frequent value (in a tie, the first); an empty tuple if there is none."""
    return next((value for value, _ in Counter(values).most_common(1)), ())
