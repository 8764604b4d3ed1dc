"""The types of the public names, for editors and type checkers; `__init__.py` imports lazily."""

from fedgft import algorithms as algorithms
from fedgft import auditing as auditing
from fedgft import data as data
from fedgft import engine as engine
from fedgft import flower as flower
from fedgft import metrics as metrics
from fedgft import models as models
from fedgft import optimizers as optimizers
from fedgft import rules as rules
from fedgft import study as study
from fedgft import theory as theory
from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.algorithms.own_loop import Penalty
from fedgft.algorithms.price_objective import price_objective
from fedgft.auditing.measurement import measure, measure_file
from fedgft.auditing.report import Audit, audit
from fedgft.auditing.site_file import read_sums
from fedgft.data.dataset import Dataset, Federation, standardize
from fedgft.data.partition import partition
from fedgft.data.public import load
from fedgft.engine.history import History
from fedgft.engine.simulate import simulate
from fedgft.errors import FedgftError
from fedgft.fair_classifier import FairClassifier
from fedgft.fair_model import FairModel, load_model
from fedgft.metrics.catalog import get_metric
from fedgft.metrics.functions import (
    NotEstimableWarning,
    accuracy_parity_difference,
    demographic_parity_difference,
    equal_opportunity_difference,
    equalized_odds_difference,
    false_positive_rate_difference,
    predictive_parity_difference,
    statistical_parity_difference,
)
from fedgft.metrics.metric import Metric
from fedgft.rules.adjustment import adjust
from fedgft.rules.decision_rule import DecisionRule, load_rule
from fedgft.settings import Settings
from fedgft.site_sums import SiteSums

__all__ = [
    "Audit",
    "Dataset",
    "DecisionRule",
    "FairClassifier",
    "FairModel",
    "Federation",
    "FedgftError",
    "History",
    "Metric",
    "NotEstimableWarning",
    "Penalty",
    "Settings",
    "SiteSums",
    "TargetMissedWarning",
    "accuracy_parity_difference",
    "adjust",
    "audit",
    "demographic_parity_difference",
    "equal_opportunity_difference",
    "equalized_odds_difference",
    "false_positive_rate_difference",
    "get_metric",
    "load",
    "load_model",
    "load_rule",
    "measure",
    "measure_file",
    "partition",
    "predictive_parity_difference",
    "price_objective",
    "read_sums",
    "simulate",
    "standardize",
    "statistical_parity_difference",
]
