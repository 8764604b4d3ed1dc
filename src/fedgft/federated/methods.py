"""The methods by name: each is a filling of one slot, or of two; and the bases they stand on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from fedgft.arguments import instance, numbers_per_run, one_of, real_number
from fedgft.errors import FedgftError
from fedgft.federated.algorithm import Algorithm, Objective
from fedgft.federated.control import Controlled
from fedgft.federated.correction import Proximal, Scaffold
from fedgft.federated.fairfed import FairFed, Rule
from fedgft.federated.penalty import Linearised
from fedgft.federated.reweighing import reweigh
from fedgft.federated.server import Adaptive, ServerMomentum
from fedgft.federated.weighting import FedNova
from fedgft.metrics import Kind, Metric, get_metric
from fedgft.metrics.spread import Spread

PerRun = float | np.ndarray


def fedavg() -> Algorithm:
    """The four defaults (McMahan et al., 2017): no group is looked at."""
    return Algorithm()


def lrw() -> Algorithm:
    """Local reweighing."""
    return Algorithm(objective=Objective(row_weights=reweigh))


def lft(
    metric: str | Metric, lam: PerRun = 20.0, *, penalty: str = "half", spread: Spread = "range"
) -> Algorithm:
    """Locally fair training: every client penalises the gap on its own rows."""
    lam = numbers_per_run("lam", lam)
    own = Linearised(get_metric(metric), lam, penalty, spread)
    return Algorithm(objective=Objective(local_penalties=(own,)))


def fairfed(metric: str | Metric, beta: PerRun = 1.0, *, rule: Rule = "subtract") -> Algorithm:
    """FairFed on top of local reweighing, its local debiasing."""
    beta = numbers_per_run("beta", beta)
    return Algorithm(
        objective=Objective(row_weights=reweigh), weighting=FairFed(get_metric(metric), beta, rule)
    )


def fedgft(
    metric: str | Metric, lam: PerRun = 20.0, *, penalty: str = "half", spread: Spread = "range"
) -> Algorithm:
    """Globally fair training: the gap of scores over everybody's rows is penalised."""
    lam = numbers_per_run("lam", lam)
    return Algorithm(
        objective=Objective(penalties=(Linearised(get_metric(metric), lam, penalty, spread),))
    )


def controlled(
    metric: str | Metric,
    target: PerRun = 0.0,
    *,
    kind: Kind = "hard",
    pick: float = 0.6,
    damp: bool = True,
) -> Algorithm:
    """FedGFT whose strength follows the measured gap of decisions; arguments as in `Controlled`."""
    target = numbers_per_run("target", target)
    one_of("kind", kind, get_args(Kind))
    real_number("pick", pick, finite=False)
    rule = Controlled(get_metric(metric), target, kind, pick=pick, damp=damp)
    return Algorithm(objective=Objective(penalties=(rule,)))


@dataclass(frozen=True)
class Details:
    """What some of the methods ask for besides their strength."""

    penalty: str = "half"
    spread: Spread = "range"
    rule: Rule = "subtract"
    kind: Kind = "hard"
    pick: float = 0.6


Make = Callable[[Metric, PerRun, Details], Algorithm]
METHODS: dict[str, Make] = {
    "fedavg": lambda metric, strength, d: fedavg(),
    "lrw": lambda metric, strength, d: lrw(),
    "lft": lambda metric, lam, d: lft(metric, lam, penalty=d.penalty, spread=d.spread),
    "fairfed": lambda metric, beta, d: fairfed(metric, beta, rule=d.rule),
    "fedgft": lambda metric, lam, d: fedgft(metric, lam, penalty=d.penalty, spread=d.spread),
    "fedgft-control": lambda metric, target, d: controlled(
        metric, target, kind=d.kind, pick=d.pick
    ),
}
"The methods by the names that `--method` takes; `get_method` makes one."

SINGLE = ("fedavg", "lrw")
"Those without a strength, and so without a metric: one training does for all of them."


def get_method(name: str, metric: Metric, strength: PerRun, **details: Any) -> Algorithm:
    """`strength` is lam for lft and fedgft, beta for fairfed, the target for fedgft-control, and
    nothing for the rest; `details` are those of `Details`."""
    if not isinstance(name, str) or name not in METHODS:
        raise FedgftError(f"--method {name!r} is not known; choose from {', '.join(METHODS)}")
    return METHODS[name](metric, strength, Details(**details))


BASES: dict[str, dict[str, Callable[[float | None, float | None], Any]]] = {
    "fedavg": {},
    "fedprox": {"correction": lambda mu, lr: Proximal(0.1 if mu is None else mu)},
    "scaffold": {"correction": lambda mu, lr: Scaffold(mu or 0.0)},
    "fednova": {},
    "fedavgm": {"server": lambda mu, lr: ServerMomentum(0.3 if lr is None else lr)},
    "fedadam": {"server": lambda mu, lr: Adaptive("adam", 0.03 if lr is None else lr)},
    "fedyogi": {"server": lambda mu, lr: Adaptive("yogi", 0.03 if lr is None else lr)},
    "fedadagrad": {"server": lambda mu, lr: Adaptive("adagrad", 0.1 if lr is None else lr)},
}
"What each base puts into the slots, given mu and the server's learning rate; see `with_base`."


def with_base(
    method: Algorithm, base: str, *, mu: float | None = None, server_lr: float | None = None
) -> Algorithm:
    """The same method on another federated algorithm: its correction and its server, and FedNova
    around whatever weights the method has."""
    instance("method", method, Algorithm, "for example fedavg()")
    if not isinstance(base, str) or base not in BASES:
        raise FedgftError(f"--base {base!r} is not known; choose from {', '.join(BASES)}")
    filled = {slot: make(mu, server_lr) for slot, make in BASES[base].items()}
    if base == "fednova":
        filled["weighting"] = FedNova(method.weighting)
    if mu is not None and "correction" not in filled:
        filled["correction"] = Proximal(mu)
    return replace(method, **filled)
