"""Federated algorithms: four slots and their fillings."""

from fedgft.federated.algorithm import Algorithm, Averaging, BySize, Objective, Proximal
from fedgft.federated.cohort import Cohort, client_means
from fedgft.federated.fairfed import FairFed
from fedgft.federated.methods import METHODS, fairfed, fedavg, fedgft, get_method, lft, lrw
from fedgft.federated.penalty import SLOPES, Linearised, Penalty
from fedgft.federated.reweighing import reweigh

__all__ = [
    "METHODS",
    "SLOPES",
    "Algorithm",
    "Averaging",
    "BySize",
    "Cohort",
    "FairFed",
    "Linearised",
    "Objective",
    "Penalty",
    "Proximal",
    "client_means",
    "fairfed",
    "fedavg",
    "fedgft",
    "get_method",
    "lft",
    "lrw",
    "reweigh",
]
