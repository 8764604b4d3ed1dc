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
    "Sums": "sums",
    "get_metric": "metrics",
    "FedgftError": "errors",
    "Dataset": "data",
    "Federation": "data",
    "load": "data",
    "load_table": "data",
    "partition": "data.partition",
    "standardize": "data.dataset",
    "synthetic": "data.public",
    "MLP": "models",
    "Logistic": "models",
    "Module": "models",
    "Optimizer": "optimizers",
    "Adaptive": "algorithms",
    "Algorithm": "algorithms",
    "ControlReport": "algorithms.controller",
    "Controller": "algorithms",
    "FairFed": "algorithms",
    "FedNova": "algorithms",
    "Objective": "algorithms",
    "Penalty": "algorithms.own_loop",
    "Proximal": "algorithms",
    "Scaffold": "algorithms",
    "ServerMomentum": "algorithms",
    "TargetMissedWarning": "algorithms.controller",
    "fedgft_control": "algorithms",
    "fairfed": "algorithms",
    "fedavg": "algorithms",
    "fedgft": "algorithms",
    "lft": "algorithms",
    "lrw": "algorithms",
    "with_base": "algorithms",
    "History": "engine",
    "Settings": "settings",
    "simulate": "engine",
    "FairModel": "fair_model",
    "load_model": "fair_model",
    "Study": "study",
    "get_protocol": "study",
    "analyze": "theory",
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
