"""Protocols, studies and their rows."""

from fedgft.experiments.protocol import PROTOCOLS, Protocol, get_protocol
from fedgft.experiments.rows import choices, client_rows, round_rows, row
from fedgft.experiments.study import Result, Study, check_groups

__all__ = [
    "PROTOCOLS",
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
