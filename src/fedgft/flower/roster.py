"""Names of the sites behind Flower's nodes, so that the log names a site that does not answer."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedgft.flower.messages import RECORD, describe_node, site_names
from fedgft.flower.replies import log, plain

NODES_VARIABLE = "FEDGFT_NODES"  # environment variable: path of a JSON file {node: site}
FLOWER_NODE = 1  # number with which Flower itself replies for nodes that are lost
POLL_SECONDS = 1.0  # between looks for replies; Flower's own are 3 s apart


def registered_names() -> dict[int, str]:
    """Return {node: site} as the server registered their keys; empty if there is no such file."""
    try:
        names = json.loads(Path(os.environ[NODES_VARIABLE]).read_text("utf-8"))
        return {int(node): str(name) for node, name in names.items()}
    except (KeyError, OSError, ValueError, AttributeError):
        return {}


class RosterGrid(Grid):
    """A grid that knows which site each node is, and logs which of them did not answer.

    Names come from the server's register of keys, otherwise from the nodes' own replies. They are
    valid within the context: ``with RosterGrid(grid) as grid: ...``.
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
        """Return the replies that came in time.

        A reply that Flower makes for a lost node gets that node's number.
        """
        sent = list(messages)
        nodes = [message.metadata.dst_node_id for message in sent]
        waiting = dict(zip(self.grid.push_messages(sent), nodes, strict=True))
        del sent, messages
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting and (deadline is None or time.monotonic() < deadline):
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, FLOWER_NODE)
                if reply.metadata.src_node_id == FLOWER_NODE:
                    reply.metadata.__dict__["_src_node_id"] = node
                self._learn_name(reply)
                replies.append(reply)
            if waiting:
                time.sleep(POLL_SECONDS)
        for node in waiting.values():
            log.warning(
                "fedgft: %s did not answer within %g s", describe_node(node), timeout or 0.0
            )
        return replies

    def _learn_name(self, reply: Message) -> None:
        """Remember the site's own name if the server registered none for its key."""
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
