"""Federated algorithms: objective, correction, weighting and server, and their implementations."""

from fedgft.algorithms.controller import Controller, ControlReport
from fedgft.algorithms.corrections import (
    Correction,
    CorrectionState,
    LocalTraining,
    Proximal,
    Scaffold,
)
from fedgft.algorithms.local_control import LocalController
from fedgft.algorithms.loss_rules import ClientReports, LossRule, LossTerms
from fedgft.algorithms.objectives import SLOPES, LinearizedPenalty, Objective, Pricing, reweigh
from fedgft.algorithms.price_objective import PriceObjective
from fedgft.algorithms.registry import (
    BASES,
    METHODS,
    Algorithm,
    fairfed,
    fedavg,
    fedgft,
    fedgft_control,
    get_method,
    lft,
    lrw,
    with_base,
)
from fedgft.algorithms.servers import Adaptive, Averaging, Server, ServerMomentum
from fedgft.algorithms.weightings import (
    BySize,
    Cohort,
    FairFed,
    FedNova,
    LocalResults,
    Weighting,
    client_means,
)

__all__ = [
    "BASES",
    "METHODS",
    "SLOPES",
    "Adaptive",
    "Algorithm",
    "Averaging",
    "BySize",
    "ClientReports",
    "Cohort",
    "ControlReport",
    "Controller",
    "Correction",
    "CorrectionState",
    "FairFed",
    "FedNova",
    "LinearizedPenalty",
    "LocalController",
    "LocalResults",
    "LocalTraining",
    "LossRule",
    "LossTerms",
    "Objective",
    "PriceObjective",
    "Pricing",
    "Proximal",
    "Scaffold",
    "Server",
    "ServerMomentum",
    "Weighting",
    "client_means",
    "fairfed",
    "fedavg",
    "fedgft",
    "fedgft_control",
    "get_method",
    "lft",
    "lrw",
    "reweigh",
    "with_base",
]
