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
from functools import partial
from typing import Any

import numpy as np

from fedgft.algorithms.afl import WorstClient
from fedgft.algorithms.agnostic_fair import BoundaryCovariance
from fedgft.algorithms.bounded_group_loss import BoundedGroupLoss
from fedgft.algorithms.controller import Controller
from fedgft.algorithms.corrections import Correction, Proximal, Scaffold
from fedgft.algorithms.every_threshold import EveryThreshold
from fedgft.algorithms.fade import CancelingWeights
from fedgft.algorithms.fairgrad import ErrorWeights
from fedgft.algorithms.fairtrade import squared_deviations
from fedgft.algorithms.fedfact import DualAscent
from fedgft.algorithms.fedfb import FairBatchWeights
from fedgft.algorithms.fedminmax import MinimaxGroups
from fedgft.algorithms.ffalm import LossParity
from fedgft.algorithms.local_control import LocalController
from fedgft.algorithms.objectives import LinearizedPenalty, Objective, reweigh
from fedgft.algorithms.puffle import LocalMomentum
from fedgft.algorithms.qffl import PowerOfLosses
from fedgft.algorithms.servers import Adaptive, Averaging, IterateAverage, Server, ServerMomentum
from fedgft.algorithms.weightings import BySize, FairFed, FairFedRule, FedNova, Weighting
from fedgft.errors import FedgftError
from fedgft.metrics import GroupAxis, Kind, Metric, bind_metric, get_metric
from fedgft.settings import PriceOn, Spread
from fedgft.validation import check_choice, check_instance

PerRun = float | np.ndarray  # one number, or one per run


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm: the objects in its four slots. The defaults are those of FedAvg."""

    objective: Objective = field(default_factory=Objective)
    correction: Correction = field(default_factory=Proximal)
    weighting: Weighting = field(default_factory=BySize)
    server: Server = field(default_factory=Averaging)


@dataclass(frozen=True)
class WeightsByGroup:
    """Row weights by label and group alone, where sums are divided into strata as well.

    Parameters
    ----------
    inner
        A function from counts (..., label, group) to weights of the same shape.
    axis
        What the entries of the group axis mean.
    """

    inner: Callable[[np.ndarray], np.ndarray]
    axis: GroupAxis

    def __call__(self, count: np.ndarray) -> np.ndarray:
        """Return the weight of a row by label and entry of the group axis."""
        return self.axis.spread(self.inner(self.axis.merge(count)))


def bind_algorithm(algorithm: Algorithm, axis: GroupAxis | None) -> Algorithm:
    """Return the algorithm for sums whose group axis has this meaning; None: groups as they are.

    The metrics in its slots become those of the groups behind the axis, see `bind_metric`.

    Raises
    ------
    FedgftError
        A slot reads counts by group itself, or a metric asks for strata that there are not.
    """

    def bind(slot: Any) -> Any:
        metric = getattr(slot, "metric", None)
        if not isinstance(metric, Metric):
            return slot
        found = bind_metric(metric, axis)
        return slot if found is metric else replace(slot, metric=found)

    objective = algorithm.objective
    what = "strata" if axis is None or not axis.epsilon else "randomized groups"
    if axis is not None and objective.loss_rules:
        name = type(objective.loss_rules[0]).__name__
        text = f"{name} weighs losses by group and knows no {what}: use fedgft or fedgft-control"
        raise FedgftError(text, field="method", kind="unsupported")
    row_weights = objective.row_weights
    if axis is not None and row_weights is not None:
        if axis.epsilon:
            text = "row weights by group (lrw, fairfed) need groups that are not randomized"
            raise FedgftError(text, field="method", kind="unsupported")
        row_weights = WeightsByGroup(row_weights, axis)
    changed = replace(
        objective,
        row_weights=row_weights,
        penalties=tuple(map(bind, objective.penalties)),
        local_penalties=tuple(map(bind, objective.local_penalties)),
        local_controllers=tuple(map(bind, objective.local_controllers)),
    )
    return replace(algorithm, objective=changed, weighting=bind(algorithm.weighting))


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

    The arguments are those of `LinearizedPenalty`. With the metric "sp@all" or "eop@all" the
    penalty is that of `EveryThreshold`, which has no other shape and spread.
    """
    metric = get_metric(metric)
    if metric.every_threshold:
        return Algorithm(objective=Objective(loss_rules=(EveryThreshold(metric, lam),)))
    rule = LinearizedPenalty(metric, lam, penalty, spread)
    return Algorithm(objective=Objective(penalties=(rule,)))


def fedgft_control(
    metric: str | Metric,
    target: PerRun = 0.0,
    *,
    kind: Kind = "hard",
    pick: float = 0.6,
    damp: bool = True,
    local_target: PerRun | None = None,
    price_on: PriceOn = "scores",
) -> Algorithm:
    """FedGFT with a strength that follows the measured gap of decisions.

    The arguments are those of `Controller`. `local_target` is the largest acceptable gap on each
    client's own rows, see `LocalController`; None: local gaps are not limited. `price_on` says what
    prices are paid for, see `Objective`.
    """
    metric = get_metric(metric)
    rule = Controller(metric, target, kind, pick=pick, damp=damp)
    local = () if local_target is None else (LocalController(metric, local_target, kind),)
    return Algorithm(
        objective=Objective(penalties=(rule,), local_controllers=local, price_on=price_on)
    )


# Published rivals; each has a file of its own, with citation and formula.


def fedfb(metric: str | Metric, lam: PerRun = 0.3) -> Algorithm:
    """FedFB (Zeng et al., 2021): row weights that follow losses; see `FairBatchWeights`."""
    return Algorithm(objective=Objective(loss_rules=(FairBatchWeights(get_metric(metric), lam),)))


def fairgrad(metric: str | Metric, lam: PerRun = 1.0) -> Algorithm:
    """Fed-FairGrad: row weights that follow the rates of decisions; see `ErrorWeights`."""
    return Algorithm(objective=Objective(loss_rules=(ErrorWeights(get_metric(metric), lam),)))


def fedfact(metric: str | Metric, target: PerRun = 0.0) -> Algorithm:
    """FedFACT in-processing with global constraints (Zhang et al., 2025); see `DualAscent`."""
    return Algorithm(objective=Objective(loss_rules=(DualAscent(get_metric(metric), target),)))


def agnostic_fair(metric: str | Metric, lam: PerRun = 2.0) -> Algorithm:
    """The fairness term of AgnosticFair (Du et al., 2021); see `BoundaryCovariance`."""
    return Algorithm(objective=Objective(loss_rules=(BoundaryCovariance(get_metric(metric), lam),)))


def ffalm(metric: str | Metric, lam: PerRun = 5.0) -> Algorithm:
    """FFALM (Dunda & Song, 2023): equal losses at each client; see `LossParity`."""
    return Algorithm(objective=Objective(loss_rules=(LossParity(lam),)))


def puffle(metric: str | Metric, target: PerRun = 0.0) -> Algorithm:
    """PUFFLE's local controller (Corbucci et al., 2024); see `LocalMomentum`."""
    return Algorithm(objective=Objective(loss_rules=(LocalMomentum(get_metric(metric), target),)))


def fairtrade(metric: str | Metric, lam: PerRun = 20.0) -> Algorithm:
    """FairTrade's local penalty (Badar et al., 2024); see `squared_deviations`."""
    penalty = squared_deviations(get_metric(metric), lam)
    return Algorithm(objective=Objective(local_penalties=(penalty,)))


def fade(metric: str | Metric, beta: PerRun = 1.0) -> Algorithm:
    """FADE's weights of clients (Akram et al., 2025); see `CancelingWeights`."""
    return Algorithm(weighting=CancelingWeights(get_metric(metric), beta))


def fedminmax(metric: str | Metric, lam: PerRun = 0.05) -> Algorithm:
    """FedMinMax (Papadaki et al., 2022): the worst loss of any group; see `MinimaxGroups`."""
    objective = Objective(loss_rules=(MinimaxGroups(lam),))
    return Algorithm(objective=objective, server=IterateAverage())


def bounded_group_loss(metric: str | Metric, target: PerRun = 0.0) -> Algorithm:
    """Bounded group loss (Hu et al., 2024): `target` is the bound; see `BoundedGroupLoss`."""
    return Algorithm(objective=Objective(loss_rules=(BoundedGroupLoss(target),)))


def afl(metric: str | Metric, lam: PerRun = 0.1) -> Algorithm:
    """AFL (Mohri et al., 2019): the worst loss of any client; see `WorstClient`."""
    return Algorithm(weighting=WorstClient(lam), server=IterateAverage())


def qffl(metric: str | Metric, lam: PerRun = 1.0) -> Algorithm:
    """q-FFL (Li et al., 2020): more weight for clients with larger losses; see `PowerOfLosses`."""
    return Algorithm(weighting=PowerOfLosses(lam))


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
    default
        The strength where none is given.
    grid
        The strengths to choose from on inner rows; empty: those of the protocol.
    aim
        What the method makes equal between groups or clients. Only those that aim at "the metric"
        reduce the gap that they are asked to reduce.
    """

    label: str
    make: Callable[..., Algorithm]
    strength: str | None = None
    options: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    default: float = 0.0
    grid: tuple[float, ...] = ()
    aim: str = "the metric"


_PENALTY_OPTIONS = ("penalty", "spread")
_rival = partial(Method, settings=("noise",))  # the noise on the sums that the server reads
METHODS: dict[str, Method] = {
    "fedavg": Method("FedAvg", fedavg),
    "lrw": Method("LRW", lrw),
    "lft": Method("LFT", lft, "lam", _PENALTY_OPTIONS, _PENALTY_OPTIONS, default=20.0),
    "fairfed": Method("FairFed", fairfed, "beta", ("rule",), ("fairfed", "noise"), default=1.0),
    "fedgft": Method(
        "FedGFT", fedgft, "lam", _PENALTY_OPTIONS, (*_PENALTY_OPTIONS, "noise"), default=20.0
    ),
    "fedgft-control": Method(
        "FedGFT control",
        fedgft_control,
        "target",
        options=("kind", "pick", "local_target", "price_on"),
        settings=("local_target", "control", "pick", "price_on", "noise"),
    ),
    "fedfb": _rival("FedFB", fedfb, "lam", default=0.3, grid=(0.05, 0.1, 0.3, 1.0, 2.0)),
    "fairgrad": _rival("FairGrad", fairgrad, "lam", default=1.0, grid=(0.1, 0.3, 1.0, 3.0)),
    "fedfact": _rival("FedFACT", fedfact, "target"),
    "agnostic-fair": _rival(
        "AgnosticFair", agnostic_fair, "lam", default=2.0, grid=(0.5, 2.0, 8.0, 32.0)
    ),
    "puffle": _rival("PUFFLE", puffle, "target", grid=(0.0, 0.02, 0.05, 0.1)),
    "fairtrade": Method("FairTrade", fairtrade, "lam", default=20.0),
    "fade": _rival("FADE", fade, "beta", default=1.0, grid=(0.5, 1.0)),
    "ffalm": _rival(
        *("FFALM", ffalm, "lam"),
        default=5.0,
        grid=(0.02, 0.1, 0.5, 2.0, 5.0),
        aim="losses of groups",
    ),
    "fedminmax": _rival(
        *("FedMinMax", fedminmax, "lam"),
        default=0.05,
        grid=(0.01, 0.05, 0.2, 1.0),
        aim="losses of groups",
    ),
    "bounded-group-loss": _rival(
        *("bounded group loss", bounded_group_loss, "target"),
        grid=(0.0, 0.2, 0.3, 0.4),
        aim="losses of groups",
    ),
    "afl": _rival("AFL", afl, "lam", default=0.1, grid=(0.01, 0.1, 1.0), aim="losses of clients"),
    "q-ffl": _rival(
        "q-FFL", qffl, "lam", default=1.0, grid=(0.1, 1.0, 2.0, 5.0), aim="losses of clients"
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
    price_on: PriceOn = "scores",
) -> Algorithm:
    """Make a method by its name.

    Parameters
    ----------
    name
        A key of `METHODS`.
    metric
        The metric whose gap is reduced; ignored by fedavg, lrw, and the methods that are about
        losses (`Method.aim`).
    strength
        The setting that `Method.strength` names: `lam` of lft, fedgft and most published methods,
        `beta` of fairfed and fade, or `target` of fedgft-control, fedfact, puffle and
        bounded-group-loss.
    penalty, spread
        Options of lft and fedgft; see `LinearizedPenalty`.
    rule
        Option of fairfed; see `FairFed`.
    kind, pick
        Options of fedgft-control; see `Controller`.
    local_target
        Option of fedgft-control: the target of each client's own gap; see `LocalController`.
    price_on
        Option of fedgft-control: what prices are paid for; see `Objective`.
    """
    method = METHODS[check_choice("method", name, tuple(METHODS))]
    if metric.every_threshold and method.make not in (fedgft, fedavg, lrw):
        text = f"{metric.name} is for the method fedgft, and this one is {name}"
        raise FedgftError(text, field="metric", kind="unsupported")
    allowed = ("fedavg", "lrw", "lft", "fairfed", "fedgft", "fedgft-control")
    if metric.columns and name not in allowed:
        text = f"{metric.name} is for {', '.join(allowed)}, and this one is {name}"
        raise FedgftError(text, field="metric", kind="unsupported")
    if method.strength is None:
        return method.make()
    options: dict[str, Any] = {"penalty": penalty, "spread": spread, "rule": rule}
    options |= {"kind": kind, "pick": pick, "local_target": local_target, "price_on": price_on}
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
