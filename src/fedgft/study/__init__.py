"""Studies: train methods on replicates of a federation and report the results."""

from fedgft.study.protocol import PROTOCOLS, Protocol, check_groups, get_protocol
from fedgft.study.results import choices, client_rows, round_rows, row
from fedgft.study.study import Point, Result, Study
from fedgft.study.training import Comparison, TrainedModel, compare_methods, train_model
from fedgft.study.unseen_clients import measure_unseen_clients, summarize_unseen_clients

__all__ = [
    "PROTOCOLS",
    "Comparison",
    "Point",
    "Protocol",
    "Result",
    "Study",
    "TrainedModel",
    "check_groups",
    "choices",
    "client_rows",
    "compare_methods",
    "get_protocol",
    "measure_unseen_clients",
    "round_rows",
    "row",
    "summarize_unseen_clients",
    "train_model",
]
