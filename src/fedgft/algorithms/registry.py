"""Algorithms by name. An algorithm has four slots; methods and bases fill them.

| slot       | what it may change                                    |
|------------|-------------------------------------------------------|
| objective  | row weights, and penalties on the loss; they add up   |
| correction | the client's gradient                                 |
| weighting  | the coefficients of the clients' updates              |
| server     | the step on the mean update                           |

FedAvg has the default in all four slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedgft.algorithms.controller import Controller
from fedgft.algorithms.corrections import Correction, Proximal, Scaffold
from fedgft.algorithms.local_control import LocalController
from fedgft.algorithms.objectives import LinearizedPenalty, Objective, reweigh
from fedgft.algorithms.servers import Adaptive, Averaging, Server, ServerMomentum
from fedgft.algorithms.weightings import BySize, FairFed, FairFedRule, FedNova, Weighting
from fedgft.metrics import Kind, Metric, get_metric
from fedgft.settings import Spread
from fedgft.validation import check_choice, check_instance

PerRun = float | np.ndarray  # one number, or one per run


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm: the objects in its four slots. The defaults are those of FedAvg."""

    objective: Objective = field(default_factory=Objective)
    correction: Correction = field(default_factory=Proximal)
    weighting: Weighting = field(default_factory=BySize)
    server: Server = field(default_factory=Averaging)


def fedavg() -> Algorithm:
    """FedAvg (McMahan et al., 2017): the default in all four slots, which ignore groups."""
    return Algorithm()


def lrw() -> Algorithm:
    """Local reweighing: every client weighs its own rows, see `reweigh`."""
    return Algorithm(objective=Objective(row_weights=reweigh))


def lft(
    metric: str | Metric, lam: PerRun = 20.0, *, penalty: str = "half", spread: Spread = "range"
) -> Algorithm:
    """Locally fair training: every client penalizes the gap on its own rows.

    The arguments are those of `LinearizedPenalty`.
    """
    local = LinearizedPenalty(get_metric(metric), lam, penalty, spread)
    return Algorithm(objective=Objective(local_penalties=(local,)))


def fairfed(
    metric: str | Metric, beta: PerRun = 1.0, *, rule: FairFedRule = "subtract"
) -> Algorithm:
    """FairFed's weights, with local reweighing as the local debiasing method.

    The arguments are those of `FairFed`.
    """
    return Algorithm(
        objective=Objective(row_weights=reweigh), weighting=FairFed(get_metric(metric), beta, rule)
    )


def fedgft(
    metric: str | Metric, lam: PerRun = 20.0, *, penalty: str = "half", spread: Spread = "range"
) -> Algorithm:
    """FedGFT as published: a penalty on the gap of scores over the rows of all clients.

    The arguments are those of `LinearizedPenalty`.
    """
    rule = LinearizedPenalty(get_metric(metric), lam, penalty, spread)
    return Algorithm(objective=Objective(penalties=(rule,)))


def fedgft_control(
    metric: str | Metric,
    target: PerRun = 0.0,
    *,
    kind: Kind = "hard",
    pick: float = 0.6,
    damp: bool = True,
    local_target: PerRun | None = None,
) -> Algorithm:
    """FedGFT with a strength that follows the measured gap of decisions.

    The arguments are those of `Controller`. `local_target` is the largest acceptable gap on each
    client's own rows, see `LocalController`; None: local gaps are not limited.
    """
    metric = get_metric(metric)
    rule = Controller(metric, target, kind, pick=pick, damp=damp)
    local = () if local_target is None else (LocalController(metric, local_target, kind),)
    return Algorithm(objective=Objective(penalties=(rule,), local_controllers=local))


@dataclass(frozen=True)
class Method:
    """A row of `METHODS`.

    Parameters
    ----------
    label
        The method's name in tables and figures.
    make
        Returns the algorithm, for a metric and a strength if it has one.
    strength
        The setting that holds the strength; None: the method has neither strength nor metric, and
        one training serves all metrics.
    options
        The keyword arguments of `make`.
    settings
        The other settings that the method reads, by their names in Python and on the command line.
    """

    label: str
    make: Callable[..., Algorithm]
    strength: str | None = None
    options: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


_PENALTY_OPTIONS = ("penalty", "spread")
METHODS: dict[str, Method] = {
    "fedavg": Method("FedAvg", fedavg),
    "lrw": Method("LRW", lrw),
    "lft": Method("LFT", lft, "lam", _PENALTY_OPTIONS, _PENALTY_OPTIONS),
    "fairfed": Method("FairFed", fairfed, "beta", ("rule",), ("fairfed", "noise")),
    "fedgft": Method("FedGFT", fedgft, "lam", _PENALTY_OPTIONS, (*_PENALTY_OPTIONS, "noise")),
    "fedgft-control": Method(
        "FedGFT control",
        fedgft_control,
        "target",
        options=("kind", "pick", "local_target"),
        settings=("local_target", "control", "pick", "noise"),
    ),
}
"The methods by the names that the command line takes; `get_method` makes one."

WITHOUT_STRENGTH = tuple(name for name, method in METHODS.items() if method.strength is None)
"Methods without strength or metric: one training serves all of them."

METHOD_LABELS = {name: method.label for name, method in METHODS.items()} | {
    "thresholds": "thresholds",
    "blind": "blind rule",
    "derived": "derived rule",
    "logofair": "LoGoFair",
    "fedfact-post": "FedFACT Post",
    "cost-lp": "Cost LP",
    "pooled": "pooled: control",
    "exponentiated-gradient": "pooled: Fairlearn EG",
    "threshold-optimizer": "pooled: Fairlearn TO",
}
"Names for tables and figures: of the methods, and of the references in a frontier."


def methods_by_setting() -> dict[str, tuple[str, ...]]:
    """Return the settings that only some methods read, and which methods read them."""
    names = dict.fromkeys(n for m in METHODS.values() for n in (m.strength, *m.settings) if n)
    return {
        name: tuple(key for key, m in METHODS.items() if name in (m.strength, *m.settings))
        for name in names
    }


def get_method(
    name: str,
    metric: Metric,
    strength: PerRun,
    *,
    penalty: str = "half",
    spread: Spread = "range",
    rule: FairFedRule = "subtract",
    kind: Kind = "hard",
    pick: float = 0.6,
    local_target: PerRun | None = None,
) -> Algorithm:
    """Make a method by its name.

    Parameters
    ----------
    name
        A key of `METHODS`.
    metric
        The metric whose gap is reduced; ignored by fedavg and lrw.
    strength
        `lam` of lft and fedgft, `beta` of fairfed, or `target` of fedgft-control.
    penalty, spread
        Options of lft and fedgft; see `LinearizedPenalty`.
    rule
        Option of fairfed; see `FairFed`.
    kind, pick
        Options of fedgft-control; see `Controller`.
    local_target
        Option of fedgft-control: the target of each client's own gap; see `LocalController`.
    """
    method = METHODS[check_choice("method", name, tuple(METHODS))]
    if method.strength is None:
        return method.make()
    options: dict[str, Any] = {"penalty": penalty, "spread": spread, "rule": rule}
    options |= {"kind": kind, "pick": pick, "local_target": local_target}
    return method.make(metric, strength, **{key: options[key] for key in method.options})


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
    """Return the same method on another federated algorithm.

    Parameters
    ----------
    method
        The algorithm whose correction and server are replaced by those of the base. FedNova wraps
        the weighting that the method has.
    base
        A key of `BASES`.
    mu
        Strength of the proximal term [default: 0.1 for fedprox, else 0].
    server_lr
        Learning rate of the server, where the base has one [default: the base's].
    """
    check_instance("method", method, Algorithm, "for example fedavg()")
    check_choice("base", base, tuple(BASES))
    slots = {slot: make(mu, server_lr) for slot, make in BASES[base].items()}
    if base == "fednova":
        slots["weighting"] = FedNova(method.weighting)
    if mu is not None and "correction" not in slots:
        slots["correction"] = Proximal(mu)
    return replace(method, **slots)
