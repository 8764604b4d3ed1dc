"""Protocols, studies and their rows."""

from fedgft.experiments.checks import check_groups
from fedgft.experiments.protocol import PROTOCOLS, Protocol, get_protocol
from fedgft.experiments.rows import choices, client_rows, round_rows, row
from fedgft.experiments.study import Point, Result, Study

__all__ = [
    "PROTOCOLS",
    "Point",
    "Protocol",
    "Result",
    "Study",
    "check_groups",
    "choices",
    "client_rows",
    "get_protocol",
    "round_rows",
    "row",
]
