"""The methods by name: each is a filling of one slot, or of two."""

from collections.abc import Callable

import numpy as np

from fedgft.federated.algorithm import Algorithm, Objective
from fedgft.federated.fairfed import FairFed, Rule
from fedgft.federated.penalty import Linearised
from fedgft.federated.reweighing import reweigh
from fedgft.metrics import Metric
from fedgft.types import FedgftError

PerRun = float | np.ndarray


def fedavg() -> Algorithm:
    return Algorithm()


def lrw() -> Algorithm:
    """Local reweighing."""
    return Algorithm(objective=Objective(row_weights=reweigh))


def lft(metric: Metric, lam: PerRun = 20.0, *, penalty: str = "half") -> Algorithm:
    """Locally fair training: every client penalises the gap on its own rows."""
    return Algorithm(objective=Objective(local_penalties=(Linearised(metric, lam, penalty),)))


def fairfed(metric: Metric, beta: PerRun = 1.0, *, rule: Rule = "subtract") -> Algorithm:
    """FairFed on top of local reweighing, its local debiasing."""
    return Algorithm(
        objective=Objective(row_weights=reweigh), weighting=FairFed(metric, beta, rule)
    )


def fedgft(metric: Metric, lam: PerRun = 20.0, *, penalty: str = "half") -> Algorithm:
    """Globally fair training: the gap over everybody's rows is penalised."""
    return Algorithm(objective=Objective(penalties=(Linearised(metric, lam, penalty),)))


METHODS: dict[str, Callable[[Metric, PerRun, str, Rule], Algorithm]] = {
    "fedavg": lambda metric, strength, penalty, rule: fedavg(),
    "lrw": lambda metric, strength, penalty, rule: lrw(),
    "lft": lambda metric, strength, penalty, rule: lft(metric, strength, penalty=penalty),
    "fairfed": lambda metric, strength, penalty, rule: fairfed(metric, strength, rule=rule),
    "fedgft": lambda metric, strength, penalty, rule: fedgft(metric, strength, penalty=penalty),
}


def get_method(
    name: str, metric: Metric, strength: PerRun, *, penalty: str = "half", rule: Rule = "subtract"
) -> Algorithm:
    """`strength` is lam for lft and fedgft, beta for fairfed, and nothing for the rest."""
    if name not in METHODS:
        raise FedgftError(f"--method {name!r} is not known; choose from {', '.join(METHODS)}")
    return METHODS[name](metric, strength, penalty, rule)
