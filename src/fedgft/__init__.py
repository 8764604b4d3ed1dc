"""Audit and train fair models across organizations that cannot share their data.

>>> import fedgft
>>> groups = ["a", "a", "b", "b"]
>>> fedgft.statistical_parity_difference([1, 0, 1, 0], [1, 1, 1, 0], sensitive_features=groups)
0.5

Everything else is in the packages `algorithms`, `auditing`, `data`, `engine`, `flower`, `metrics`,
`rules`, `study` and `theory`: ``fedgft.algorithms.with_base`` works after ``import fedgft``.
"""

from importlib import import_module
from typing import Any

_MODULES = {  # the module of each public name; `__init__.pyi` lists them with their types
    "Audit": "auditing.report",
    "Dataset": "data.dataset",
    "DecisionRule": "rules.decision_rule",
    "FairClassifier": "fair_classifier",
    "FairModel": "fair_model",
    "Federation": "data.dataset",
    "FedgftError": "errors",
    "History": "engine.history",
    "Metric": "metrics.metric",
    "NotEstimableWarning": "metrics.functions",
    "Penalty": "algorithms.own_loop",
    "Settings": "settings",
    "SiteSums": "site_sums",
    "TargetMissedWarning": "algorithms.controller",
    "accuracy_parity_difference": "metrics.functions",
    "adjust": "rules.adjustment",
    "audit": "auditing.report",
    "demographic_parity_difference": "metrics.functions",
    "equal_opportunity_difference": "metrics.functions",
    "equalized_odds_difference": "metrics.functions",
    "false_positive_rate_difference": "metrics.functions",
    "get_metric": "metrics.catalog",
    "load": "data.public",
    "load_model": "fair_model",
    "load_rule": "rules.decision_rule",
    "measure": "auditing.measurement",
    "measure_file": "auditing.measurement",
    "partition": "data.partition",
    "predictive_parity_difference": "metrics.functions",
    "price_objective": "algorithms.price_objective",
    "read_sums": "auditing.site_file",
    "simulate": "engine.simulate",
    "standardize": "data.dataset",
    "statistical_parity_difference": "metrics.functions",
}
_PACKAGES = (
    "algorithms",
    "auditing",
    "data",
    "engine",
    "flower",
    "metrics",
    "models",
    "optimizers",
    "rules",
    "study",
    "theory",
)

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"fedgft.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedgft' has no attribute {name!r}")
    return getattr(import_module(f"fedgft.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*_MODULES, *_PACKAGES]
