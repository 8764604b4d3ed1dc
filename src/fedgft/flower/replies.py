"""Queries and replies: name the sites, wait for nodes, check replies, validate reported sums.

The server leaves out every reply that it cannot use, logs the site and the reason, and continues
with the others. A client can still send false sums that look possible, just as it can train on
false labels; `fedgft.metrics.robust_aggregation` limits the effect of such sums.
"""

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedgft.errors import FedgftError
from fedgft.flower.messages import QUERY, RECORD, Request, log, put_request, unpack_sums, warn
from fedgft.flower.run_state import RunState
from fedgft.formatting import one_line
from fedgft.privacy.noise import Noise
from fedgft.sums import MAX_ROWS, Names, Sums

SIGMAS = 6.0
"Declared noise may move a number by so many standard deviations: one in a billion is beyond."
UNNAMED = "unnamed"
"The default of `Site.name`: several sites may have it."
NODES_VARIABLE = "FEDGFT_NODES"  # environment variable: path of a JSON file {node: site}
FLOWER_NODE = 1  # the node number of replies that Flower itself makes for lost nodes
POLL_SECONDS = 1.0  # seconds between checks for replies; Flower itself waits 3 s
site_names: dict[int, str] = {}  # node -> site, in the run that this process serves


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
                f"only {len(nodes)} node(s) are connected after {self._seconds:g} s, fewer than "
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
        for node, own in forms.items():
            if own != common:
                self.refuse(
                    node, f"it sends {own}; the others use another form: {common}", site_name(node)
                )

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
        odd = sorted(set(models[0]) ^ set(sent))[:3]
        raise FedgftError(f"its model has other tensors than the one it received: {', '.join(odd)}")
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


def check_sums(
    sums: Sums, *, site: str, examples: float | None, noise: Noise | None = None
) -> None:
    """Check that rows with these sums can exist.

    Parameters
    ----------
    sums
        The sums; their form has been checked.
    site
        The name of the client, for error messages.
    examples
        The number of training rows that the client reported; its statistics cannot have more.
    noise
        The noise on the sums, which widens all bounds.
    """
    source = f"site '{site}'"
    if noise is None:
        slack = 0.0
        sums.check(source)
    else:
        slack = SIGMAS * noise.count
        sum_slack = SIGMAS * (noise.count + noise.value * sums.count.shape[0])
        sums.check(source, kind=noise.kind, count_slack=slack, sum_slack=sum_slack)
    rows = float(sums.rows())
    if examples is not None and rows > examples * (1 + 1e-6) + slack * sums.count.size**0.5:
        claim = f"its statistics claim {rows:.0f} rows, but it trains on {examples:.0f}"
        raise FedgftError(f"{source}: {claim}")


class SumsValidator:
    """Rejects sums that cannot be true or that contradict what the site sent before.

    All sums must have the federation's classes and groups. A name belongs to the first node
    that uses it; another node that takes it is refused. A site's counts must stay the same during a
    run, and be those in `agreed_counts` if the site is listed there.

    Attributes
    ----------
    owners
        Name of a site -> the node that owns the name.
    impostors
        Node -> the name that it uses although another node owns it.
    agreed
        Site -> its rows by label and group, as agreed on before the run.
    rejected
        Reasons why statistics of the last round were rejected.
    """

    def __init__(self, state: RunState, agreed_counts: Mapping[str, Any] | None = None) -> None:
        self.state = state
        self.owners: dict[str, int] = {}
        self.impostors: dict[int, str] = {}
        self.rejected: list[str] = []
        self.agreed = {s: _read_counts(s, c) for s, c in (agreed_counts or {}).items()}
        self._names: dict[int, str] = {}  # node -> site

    def validate(self, records: dict[int, Any], noise: Noise | None) -> dict[int, Sums]:
        """Return the valid sums among the clients' records, and log why others are rejected.

        The sums are sorted by node so that their total is reproducible.
        """
        unpacked: dict[int, tuple[str, Names, Sums]] = {}
        valid: dict[int, Sums] = {}
        self.rejected = []
        for node in sorted(records):
            try:
                content = unpack_sums(records[node], node=f"node {node}")
                self.bind_name(node, content[0])
                unpacked[node] = content
            except FedgftError as error:
                self._reject(error)
        if self.state.names is None and unpacked:
            self.state.names = most_common(names for _, names, _ in unpacked.values())
            lists = [", ".join(each) for each in vars(self.state.names).values()]
            log.info("fedgft: classes %s, groups %s", *lists)
        for node, (site, names, sums) in unpacked.items():
            try:
                assert self.state.names is not None
                self.state.names.check(names, site=site)
                examples = self.state.training_rows.get(node)
                check_sums(sums, site=site, examples=examples, noise=noise)
                self._check_counts(node, site, sums.count, noise)
                valid[node] = sums
            except FedgftError as error:
                self._reject(error)
        return valid

    def _reject(self, error: FedgftError) -> None:
        self.rejected.append(one_line(error))
        warn(f"statistics left out: {self.rejected[-1]}")

    def _check_counts(self, node: int, site: str, count: np.ndarray, noise: Noise | None) -> None:
        """Raise an error if a site's counts differ from those it declared or agreed on before.

        Rows do not change during a run. A site releases noisy counts once and stores them. After a
        restart, a site may release counts with new noise; they may differ by that noise.
        """
        key = self.identity(node)
        expected = self.state.declared.get(key, count)
        origin = "were declared before"
        if key in self.agreed:
            expected = _add_unrecorded(key, self.agreed[key], count.shape)
            origin = "were agreed on"
        slack = 0.5 if noise is None else 0.5 + SIGMAS * math.sqrt(2) * noise.count
        difference = np.abs(count - expected)
        if difference.max() > slack:
            label, group = np.unravel_index(int(difference.argmax()), count.shape)
            assert self.state.names is not None
            groups = (*self.state.names.groups, "not recorded")
            cell = f"label {self.state.names.classes[label]} and group {groups[group]}"
            raise FedgftError(
                f"site '{site}': its counts changed: {count[label, group]:.0f} row(s) of "
                f"{cell}, where {expected[label, group]:.0f} {origin}; counts hold for a whole run"
            )
        self.state.declared.setdefault(key, count)

    def bind_name(self, node: int, site: str) -> None:
        """Record that a node uses a site's name; raise an error if the name is another node's."""
        if site == UNNAMED:
            self._names[node] = ""
            return
        owner = self.owners.setdefault(site, node)
        if owner != node:
            self.impostors[node] = site
            self._names.pop(node, None)
            taken = f"node {node} calls itself '{site}', the name of node {owner} in this run"
            raise FedgftError(f"{taken}: node {node} is left out, node {owner} stays")
        if node in self.impostors or self._names.setdefault(node, site) != site:
            changed = f"{self.describe(node)} now calls itself '{site}'"
            raise FedgftError(f"{changed}: a node has one name in a run")

    def identity(self, node: int) -> str:
        """Return the name of a node's site as a key; an unnamed site gets the node's number."""
        unnamed = f"node {node} (unnamed)" if node in self._names else f"node {node}"
        return self._names.get(node) or unnamed

    def describe(self, node: int) -> str:
        """Return the text by which logs name a node's site."""
        return f"site '{self._names[node]}'" if self._names.get(node) else self.identity(node)

    def declared_rows(self, node: int) -> float | None:
        """Return the number of rows that a node's site declared; None if it has not done so yet."""
        count = self.state.declared.get(self.identity(node))
        return None if count is None else float(count.sum())

    def is_agreed(self, node: int) -> bool:
        """Whether the counts of a node's site were agreed on before the run."""
        return self.identity(node) in self.agreed

    def record_training_rows(self, replies: dict[int, Message]) -> None:
        """Record the most rows that each node trained on; its statistics cannot have more.

        A strategy's own `weighted_by_key` is not used: it need not be a number of rows.
        """
        rows_by_node = self.state.training_rows
        for node, reply in replies.items():
            metrics = next(iter(reply.content.metric_records.values()), {})
            rows = metrics.get("num-examples")
            if isinstance(rows, (int, float)):
                rows_by_node[node] = max(float(rows), rows_by_node.get(node, 0.0))


def _read_counts(site: str, counts: Any) -> np.ndarray:
    try:
        table = np.asarray(counts, np.float64)
    except (TypeError, ValueError):
        table = np.empty(0)
    if table.ndim != 2 or not (np.isfinite(table) & (table >= 0)).all():
        form = "give one list per label, with the rows of each group"
        raise FedgftError(f"`counts` of site '{site}': {form}")
    return table


def _add_unrecorded(site: str, table: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return counts whose last column holds the rows without a group.

    The agreed table may lack this column if all rows have a group.
    """
    if table.shape == (shape[0], shape[1] - 1):
        table = np.pad(table, ((0, 0), (0, 1)))
    if table.shape != shape:
        found = f"they are for {table.shape[0]} labels and {table.shape[1]} groups"
        known = f"there are {shape[0]} and {shape[1] - 1}"
        raise FedgftError(f"`counts` of site '{site}': {found}; {known}")
    return table
