"""Replies in, believable replies out: whoever is left out is named in the log, with the reason."""

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedgft.errors import FedgftError
from fedgft.flower.checks import SIGMAS, Noise, alike, check_report, most_common
from fedgft.flower.wire import RECORD, Names, Report, node_of, unpack_report
from fedgft.layout import printable

UNNAMED = "unnamed"  # the name of a site that was given none: no name
log = logging.getLogger("flwr")  # the engine's own: one place to look


def wait_for_nodes(grid: Grid, count: int, seconds: float) -> list[int]:
    """So many nodes, or as many as there are when the time is up; nobody at all is an error."""
    began = time.monotonic()
    while len(nodes := sorted(grid.get_node_ids())) < count:
        if time.monotonic() - began > seconds:
            if not nodes:
                raise FedgftError(f"no node has connected within {seconds:g} s")
            log.warning("fedgft: %d of %d nodes are here after %g s; going on without the others",
                        len(nodes), count, seconds)  # fmt: skip
            break
        time.sleep(1)
    return nodes


@dataclass
class Patient:
    """A grid that does not wait for nodes for ever: the engine's `sample_nodes` would.

    It stands in front of the real one while a strategy chooses its nodes.
    """

    grid: Grid
    seconds: float
    began: float = field(default_factory=time.monotonic)

    def get_node_ids(self) -> Iterable[int]:
        nodes = list(self.grid.get_node_ids())
        if time.monotonic() - self.began > self.seconds:
            raise FedgftError(
                f"only {len(nodes)} node(s) are connected after {self.seconds:g} s, fewer than the "
                "strategy asks for (min_train_nodes, min_evaluate_nodes, min_available_nodes)"
            )
        return nodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)


def reason_of(reply: Message) -> str:
    """What a client says went wrong, without the engine's wrapping of the exception."""
    text = (reply.error.reason or "no reason given") if reply.has_error() else ""
    found = re.fullmatch(r"<class '.*?'>:<'(.*)'>", text, re.DOTALL)
    return plain(found[1] if found else text)


def plain(text: Any, most: int = 400) -> str:
    """What a client says, for a log and a terminal: in one line, without control characters."""
    return printable(" ".join(str(text).split()))[:most]


@dataclass
class Replies:
    """The replies of one phase."""

    errors: list[Message]
    good: dict[int, Message]
    refused: dict[int, str] = field(default_factory=dict)  # node -> why

    @classmethod
    def of(cls, replies: Iterable[Message]) -> "Replies":
        every = list(replies)
        errors = [reply for reply in every if reply.has_error()]
        for reply in errors:
            log.warning("fedgft: %s failed: %s", node_of(reply), reason_of(reply))
        return cls(errors, {r.metadata.src_node_id: r for r in every if not r.has_error()})

    def take(self, record: str = RECORD) -> dict[int, Any]:
        """Our record, taken out of every reply that has it: strategies do not know it."""
        held = {n: reply.content for n, reply in self.good.items() if record in reply.content}
        return {node: content.pop(record) for node, content in held.items()}

    def refuse(self, node: int, why: str, site: str) -> None:
        self.refused[node] = why = plain(why)
        del self.good[node]
        log.warning("fedgft: %s is left out of this round: %s", site, why)

    def keep(self, check: Callable[[Message], None], believer: "Believer") -> None:
        """Only those that can be averaged with the others: each by itself, then side by side."""
        for node, reply in list(self.good.items()):
            try:
                check(reply)
            except FedgftError as error:
                self.refuse(node, str(error), believer.site(node))
        for node, why in alike(self.good).items():
            self.refuse(node, why, believer.site(node))

    def ready(self) -> list[Message]:
        """For the wrapped strategy: by node, so that sums are reproducible."""
        return [*self.errors, *(self.good[node] for node in sorted(self.good))]

    def why(self) -> str:
        """Why there are so few, most frequent reason first."""
        said = Counter([*map(reason_of, self.errors), *self.refused.values()])
        return "; ".join(text for text, _ in said.most_common(3)) or (
            "the strategy made no model of the replies" if self.good else "no reply came in time"
        )


@dataclass
class Believer:
    """Checks clients' sums against the federation's names and what each node said before.

    A name belongs to the first node that used it (`owners`), and counts are declared once
    (`declared`): another node that takes the name is refused, and so are other counts.
    """

    names: Names | None = None
    examples: dict[int, float] = field(default_factory=dict)  # node -> rows it trains on
    sites: dict[int, str] = field(default_factory=dict)  # node -> its name
    dropped: list[str] = field(default_factory=list)  # why statistics were not believed, last time
    owners: dict[str, int] = field(default_factory=dict)  # a site's name -> its node
    declared: dict[str, np.ndarray] = field(default_factory=dict)  # its rows by label, group
    agreed: dict[str, np.ndarray] = field(default_factory=dict)  # those that were agreed on before
    refused: dict[int, str] = field(default_factory=dict)  # node -> whose name it took

    def agree_on(self, site: str, counts: Any) -> None:
        """A site's rows by label and group; a last column may be of those without a group."""
        try:
            table = np.asarray(counts, np.float64)
        except (TypeError, ValueError):
            table = np.empty(0)
        if table.ndim != 2 or not (np.isfinite(table) & (table >= 0)).all():
            raise FedgftError(
                f"counts of site '{site}': give one list a label, with the rows of each group"
            )
        self.agreed[site] = table

    def reports(self, records: dict[int, Any], noise: Noise | None) -> dict[int, Report]:
        """Those that can be true, in the order of their nodes, so that sums are reproducible."""
        found: dict[int, Report] = {}
        self.dropped = []
        for node in sorted(records):
            try:
                report = unpack_report(records[node], node=f"node {node}")
                self.bind(node, report.site)
                found[node] = report
            except FedgftError as error:
                self._drop(error)
        self._agree(found)
        for node, report in list(found.items()):
            try:
                self._check(node, report, noise)
            except FedgftError as error:
                self._drop(error)
                del found[node]
        return found

    def _drop(self, error: FedgftError) -> None:
        self.dropped.append(plain(error))
        log.warning("fedgft: statistics left out: %s", self.dropped[-1])

    def _check(self, node: int, report: Report, noise: Noise | None) -> None:
        assert self.names is not None
        self.names.check(report.names, site=report.site)
        check_report(report, examples=self.examples.get(node), noise=noise)
        self._check_declared(node, report, noise)

    def _check_declared(self, node: int, report: Report, noise: Noise | None) -> None:
        """Rows do not change during a run. Noisy counts are released once and kept by the site; one
        that was restarted may release them once more, and those differ by their noise."""
        count, site = report.tally.count, self.identity(node)
        first = self._agreed(site, count.shape) if site in self.agreed else None
        before = "were agreed on" if first is not None else "were declared before"
        first = self.declared.get(site, count) if first is None else first
        wide = 0.5 if noise is None else 0.5 + SIGMAS * math.sqrt(2) * noise.count
        far = np.abs(count - first)
        if far.max() > wide:
            label, group = np.unravel_index(int(far.argmax()), far.shape)
            names = report.names
            which = names.groups[group] if group < len(names.groups) else "not recorded"
            raise FedgftError(
                f"site '{report.site}': its counts changed: {count[label, group]:.0f} row(s) of "
                f"label {names.classes[label]} and group {which}, where "
                f"{first[label, group]:.0f} {before}; counts hold for a whole run"
            )
        self.declared.setdefault(site, count)

    def _agreed(self, site: str, shape: tuple[int, ...]) -> np.ndarray:
        table = self.agreed[site]
        if table.shape == (shape[0], shape[1] - 1):
            table = np.concatenate((table, np.zeros((shape[0], 1))), 1)
        if table.shape != shape:
            raise FedgftError(
                f"counts of site '{site}': they are for {table.shape[0]} labels and "
                f"{table.shape[1]} groups; there are {shape[0]} and {shape[1] - 1}"
            )
        return table

    def bind(self, node: int, site: str) -> None:
        """Gives a name to the node that uses it first; a node that takes it later is refused."""
        if site == UNNAMED:
            self.sites[node] = f"node {node} (unnamed)"
            return
        owner = self.owners.setdefault(site, node)
        if owner != node:
            self.refused[node] = site
            self.sites[node] = f"node {node}"
            raise FedgftError(
                f"node {node} calls itself '{site}', the name of node {owner} in this run: node "
                f"{node} is left out, node {owner} stays"
            )
        if self.sites.setdefault(node, f"site '{site}'") != f"site '{site}'":
            raise FedgftError(
                f"{self.sites[node]} now calls itself '{site}': a node has one name in a run"
            )

    def identity(self, node: int) -> str:
        """The name of a node's site, in the history and as a key."""
        named = self.sites.get(node, f"node {node}")
        return named.removeprefix("site '").removesuffix("'")

    def rows(self, node: int) -> float | None:
        """The number of rows that a node declared, or None before it did."""
        count = self.declared.get(self.identity(node))
        return None if count is None else float(count.sum())

    def _agree(self, found: dict[int, Report]) -> None:
        """Where the user named no classes and groups, most sites decide, once."""
        if self.names is None and found:
            self.names = most_common(report.names for report in found.values())
            log.info("fedgft: classes %s, groups %s", ", ".join(self.names.classes),
                     ", ".join(self.names.groups))  # fmt: skip

    def site(self, node: int) -> str:
        return self.sites.get(node, f"node {node}")

    def remember(self, replies: dict[int, Message]) -> None:
        """How many rows each node trains on; the most it ever said bounds later statistics. Not by
        a strategy's own `weighted_by_key`: such a weight need not be a number of rows."""
        for node, reply in replies.items():
            metrics = next(iter(reply.content.metric_records.values()), {})
            rows = metrics.get("num-examples")
            if isinstance(rows, (int, float)):
                self.examples[node] = max(float(rows), self.examples.get(node, 0.0))
