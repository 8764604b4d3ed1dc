"""Group fairness in federated learning: measure it over data that no one may pool, train for it.

>>> import fedgft
>>> groups = ["a", "a", "b", "b"]
>>> fedgft.statistical_parity_difference([1, 0, 1, 0], [1, 1, 1, 0], sensitive_features=groups)
0.5
"""

from importlib import import_module
from typing import Any

_WHERE = {
    "accuracy_parity_difference": "metrics.functions",
    "demographic_parity_difference": "metrics.functions",
    "equal_opportunity_difference": "metrics.functions",
    "equalized_odds_difference": "metrics.functions",
    "false_positive_rate_difference": "metrics.functions",
    "predictive_parity_difference": "metrics.functions",
    "statistical_parity_difference": "metrics.functions",
    "NotEstimableWarning": "metrics",
    "CATALOG": "metrics",
    "Metric": "metrics",
    "Tally": "metrics",
    "get_metric": "metrics",
    "FedgftError": "errors",
    "Dataset": "data",
    "Federation": "data",
    "load": "data",
    "load_adult": "data",
    "load_compas": "data",
    "load_table": "data",
    "partition": "data.partition",
    "standardise": "data.scaling",
    "synthetic": "data.synthetic",
    "MLP": "models",
    "Logistic": "models",
    "Module": "models",
    "Optimizer": "optim",
    "Adaptive": "federated",
    "Algorithm": "federated",
    "ControlReport": "federated.control",
    "Controlled": "federated",
    "FairFed": "federated",
    "FedNova": "federated",
    "Objective": "federated",
    "Penalty": "federated",
    "Proximal": "federated",
    "Scaffold": "federated",
    "ServerMomentum": "federated",
    "TargetMissedWarning": "federated.control",
    "controlled": "federated",
    "fairfed": "federated",
    "fedavg": "federated",
    "fedgft": "federated",
    "lft": "federated",
    "lrw": "federated",
    "with_base": "federated",
    "History": "engine",
    "Settings": "engine",
    "simulate": "engine",
    "Study": "experiments",
    "get_protocol": "experiments",
    "analyse": "theory",
}
_MODULES = ("audit",)  # `fedgft.audit.measure(...)` after `import fedgft`

__all__ = sorted((*_WHERE, *_MODULES))


def __getattr__(name: str) -> Any:
    """Imported when first asked for: `import fedgft` costs nothing, and torch waits for a model."""
    if name in _MODULES:
        return import_module(f"fedgft.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'fedgft' has no attribute {name!r}")
    return getattr(import_module(f"fedgft.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
