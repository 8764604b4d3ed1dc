"""Which node of the engine is which site: lost sites are named, not numbered."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedgft.flower.gather import log, plain
from fedgft.flower.wire import RECORD, name_of, site_names

NODES = "FEDGFT_NODES"  # environment of the server's app: file {node: site}, made from site keys
ENGINE = 1  # node number that the engine itself answers with, for nodes that are lost
POLL = 1.0  # seconds between looks for replies; the engine's own are 3 s apart


def registered_names() -> dict[int, str]:
    """{node: site} as the server registered their keys; empty where it did not say."""
    try:
        held = json.loads(Path(os.environ[NODES]).read_text("utf-8"))
        return {int(node): str(name) for node, name in held.items()}
    except (KeyError, OSError, ValueError, AttributeError):
        return {}


class RosterGrid(Grid):
    """A grid that knows which site each node is, and says which of them did not answer.

    Names come from the server's register of keys, else from what nodes said of themselves before.
    They are forgotten with the run: `with RosterGrid(grid) as grid: ...`.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.names = registered_names()

    def __enter__(self) -> "RosterGrid":
        site_names.update(self.names)
        return self

    def __exit__(self, *_: object) -> None:
        site_names.clear()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Replies to all messages, or to those that were answered in time. A reply that the engine
        makes for a lost node bears that node's number."""
        sent = list(messages)
        nodes = [message.metadata.dst_node_id for message in sent]
        waiting = dict(zip(self.grid.push_messages(sent), nodes, strict=True))
        del sent, messages
        deadline = None if timeout is None else time.monotonic() + timeout
        found: list[Message] = []
        while waiting and (deadline is None or time.monotonic() < deadline):
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, ENGINE)
                if reply.metadata.src_node_id == ENGINE:
                    reply.metadata.__dict__["_src_node_id"] = node
                self._learn(reply)
                found.append(reply)
            if waiting:
                time.sleep(POLL)
        for node in waiting.values():
            log.warning("fedgft: %s did not answer within %g s", name_of(node), timeout or 0.0)
        return found

    def _learn(self, reply: Message) -> None:
        """What the site calls itself, where the server did not register a name for its key."""
        node = reply.metadata.src_node_id
        if node in self.names or not reply.has_content():
            return
        record = reply.content.config_records.get(RECORD)
        name = None if record is None else record.get("site")
        if isinstance(name, str):
            site_names[node] = plain(name, 100)

    def get_node_ids(self) -> Iterable[int]:
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.grid.pull_messages(message_ids)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return self.grid.create_message(*args, **kwargs)

    def set_run(self, run: Any) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        return self.grid.run
