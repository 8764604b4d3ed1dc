"""Federated algorithms: four slots and their fillings."""

from fedgft.federated.algorithm import Algorithm, Objective, Pricing
from fedgft.federated.cohort import Cohort, client_means
from fedgft.federated.control import Controlled
from fedgft.federated.correction import Correction, Proximal, Scaffold
from fedgft.federated.fairfed import FairFed
from fedgft.federated.methods import (
    BASES,
    METHODS,
    controlled,
    fairfed,
    fedavg,
    fedgft,
    get_method,
    lft,
    lrw,
    with_base,
)
from fedgft.federated.penalty import SLOPES, Linearised, Penalty
from fedgft.federated.reweighing import reweigh
from fedgft.federated.server import Adaptive, Averaging, Server, ServerMomentum
from fedgft.federated.weighting import BySize, FedNova, Local, Weighting

__all__ = [
    "BASES",
    "METHODS",
    "SLOPES",
    "Adaptive",
    "Algorithm",
    "Averaging",
    "BySize",
    "Cohort",
    "Controlled",
    "Correction",
    "FairFed",
    "FedNova",
    "Linearised",
    "Local",
    "Objective",
    "Penalty",
    "Pricing",
    "Proximal",
    "Scaffold",
    "Server",
    "ServerMomentum",
    "Weighting",
    "client_means",
    "controlled",
    "fairfed",
    "fedavg",
    "fedgft",
    "get_method",
    "lft",
    "lrw",
    "reweigh",
    "with_base",
]
