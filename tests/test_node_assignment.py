"""The assignment of nodes to sites: lost sites are named."""

import json
import logging

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedgft.flower import messages as roster
from fedgft.flower.messages import RECORD, Replies, describe_node
from in_process_grid import InProcessGrid


@pytest.fixture
def names(tmp_path, monkeypatch):
    """A register of two nodes, as the server writes it."""
    monkeypatch.setattr(roster, "POLL_SECONDS", 0.01)
    (tmp_path / "nodes.json").write_text(json.dumps({"100": "north", "101": "south"}))
    monkeypatch.setenv(roster.NODES_VARIABLE, str(tmp_path / "nodes.json"))


def say(name: str):
    return lambda message, context: Message(
        RecordDict({RECORD: ConfigRecord({"site": name})}), reply_to=message
    )


def fail(message, context):
    raise ValueError("no rows")


def messages(count: int) -> list[Message]:
    return [Message(RecordDict(), 100 + k, MessageType.TRAIN) for k in range(count)]


def test_a_site_that_does_not_answer_is_named(names, caplog) -> None:
    grid = InProcessGrid([say("north"), say("south"), say("east")])
    grid.gone = {101}
    with caplog.at_level(logging.WARNING, "flwr"), roster.RosterGrid(grid) as known:
        found = known.send_and_receive(messages(3), timeout=0.3)
        assert [reply.metadata.src_node_id for reply in found] == [100, 102]
        assert describe_node(102) == "site 'east'"  # by what it said of itself
        assert describe_node(103) == "node 103"
    assert "fedgft: site 'south' did not answer within 0.3 s" in caplog.text
    assert describe_node(102) == "node 102"  # the run is over


def test_errors_of_lost_nodes_name_the_site(names, caplog) -> None:
    """The engine answers with its own number, 1."""
    grid = InProcessGrid([say("north"), fail])
    pull = grid.pull_messages

    def as_the_engine(ids):
        replies = pull(ids)
        for reply in replies:
            if reply.has_error():
                reply.metadata.__dict__["_src_node_id"] = 1
        return replies

    grid.pull_messages = as_the_engine
    with caplog.at_level(logging.WARNING, "flwr"), roster.RosterGrid(grid) as known:
        Replies.of(known.send_and_receive(messages(2), timeout=5))
    assert "fedgft: site 'south' failed: no rows" in caplog.text


def test_a_registered_name_is_not_changed_by_what_a_site_says(names) -> None:
    grid = InProcessGrid([say("south")])
    with roster.RosterGrid(grid) as known:
        known.send_and_receive(messages(1))
        assert describe_node(100) == "site 'north'"


@pytest.mark.parametrize("text", [None, "", "[1]", '{"x": "y"}'])
def test_nodes_without_registered_names(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(roster.NODES_VARIABLE, str(tmp_path / "nodes.json"))
    if text is not None:
        (tmp_path / "nodes.json").write_text(text)
    assert roster.registered_names() == {}
