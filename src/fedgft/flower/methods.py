"""`FedGFT` and `FairFed` for Flower: what to wrap a strategy in."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import (
    Bulyan,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
)

from fedgft.arguments import real_number
from fedgft.errors import FedgftError
from fedgft.federated.control import Controlled, Loop
from fedgft.federated.fairfed import FairFed as FairFedRule
from fedgft.federated.fairfed import Rule
from fedgft.federated.penalty import Linearised
from fedgft.flower.constants import Constants
from fedgft.flower.gather import Believer
from fedgft.flower.hearing import Hearing, OnRound
from fedgft.flower.strategy import FairStrategy
from fedgft.flower.terms import Terms, innermost, innermost_strategy
from fedgft.flower.weights import Weights
from fedgft.flower.wire import Names
from fedgft.metrics import Metric, get_metric

INERT = (FedAvgM, FedAdam, FedYogi, FedAdagrad)  # they move on where clients no longer pull
WEIGHTLESS = (Bulyan, FedMedian, FedTrimmedAvg, Krum, MultiKrum, QFedAvg)


def FedGFT(
    strategy: Any,  # of flwr.serverapp.strategy
    metric: str | Metric = "sp",
    *,
    lam: float | None = None,
    target: float | None = None,
    penalty: str = "half",
    spread: str = "range",
    pick: float = 0.6,
    damp: bool = True,
    classes: int | Sequence[str] | None = None,
    groups: int | Sequence[str] | None = None,
    checkpoint: str | Path | None = None,
    on_round: OnRound | None = None,
    **terms: Any,
) -> FairStrategy:
    """Any strategy of Flower, fair over everybody's rows.

    Give `lam`, the strength of a penalty on the gap of scores (the paper's form), or `target`, the
    gap of decisions that is to be reached; `pick` and `damp` then are as in `Controlled`.
    `classes` and `groups` (names, or how many) are what sites must agree on; unsaid, most sites
    decide in the first round. `checkpoint` names a file from which a restarted server goes on.
    `on_round` is shown every row of the history. `terms`: as in `Terms`.
    """
    if (lam is None) == (target is None):
        raise FedgftError("FedGFT needs either lam or target")
    for name, value in (("lam", lam), ("target", target)):
        if value is not None:
            real_number(name, value)
    chosen, rules = get_metric(metric), Terms(**terms)
    if lam is not None:
        pricing: Any = Linearised(chosen, lam, penalty, spread)
        state = None
    else:
        pricing = Controlled(chosen, target or 0.0, pick=pick, damp=damp)
        state = pricing.init(_loop(strategy, rules))
    hearing = Hearing(
        Constants(chosen, pricing, state), rules, Believer(_names(classes, groups)), on_round
    )
    return FairStrategy(strategy, hearing, checkpoint=checkpoint)


def Measured(
    strategy: Any,  # of flwr.serverapp.strategy
    metric: str | Metric = "sp",
    *,
    classes: int | Sequence[str] | None = None,
    groups: int | Sequence[str] | None = None,
    checkpoint: str | Path | None = None,
    on_round: OnRound | None = None,
    **terms: Any,
) -> FairStrategy:
    """Any strategy of Flower as it is, with its gap measured every round."""
    constants = Constants(get_metric(metric), None)
    hearing = Hearing(constants, Terms(**terms), Believer(_names(classes, groups)), on_round)
    return FairStrategy(strategy, hearing, checkpoint=checkpoint)


def FairFed(
    strategy: Any,  # of flwr.serverapp.strategy
    metric: str | Metric = "sp",
    *,
    beta: float = 1.0,
    rule: Rule = "subtract",
    reweigh: bool = True,
    classes: int | Sequence[str] | None = None,
    groups: int | Sequence[str] | None = None,
    checkpoint: str | Path | None = None,
    on_round: OnRound | None = None,
    **terms: Any,
) -> FairStrategy:
    """Weights that follow the distance between global and local fairness (Ezzeldin et al.).

    `reweigh`: clients' own training also weighs rows by label and group, its local debiasing.
    Around strategies that weigh clients by a metric of their replies: FedAvg and those built on it.
    In channel "train" the weights are exact, for the statistics arrive with the update.
    """
    real_number("beta", beta)
    chosen, rules = get_metric(metric), Terms(**terms)
    if rules.channel == "evaluate":
        raise FedgftError("FairFed weighs this round's updates: channel 'train' or 'query'")
    if rules.secure or rules.budget.epsilon is not None:
        raise FedgftError("FairFed needs every client's own sums: no secure sums, no noise")
    core = innermost_strategy(strategy)
    if isinstance(core, WEIGHTLESS):
        raise FedgftError(f"FairFed gives clients weights, and {type(core).__name__} uses none")
    hearing = Hearing(Constants(chosen, None), rules, Believer(_names(classes, groups)), on_round)
    weights = Weights(FairFedRule(chosen, beta, rule), reweigh)
    return FairStrategy(strategy, hearing, weights=weights, checkpoint=checkpoint)


def _names(classes: int | Sequence[str] | None, groups: int | Sequence[str] | None) -> Names | None:
    if (classes is None) != (groups is None):
        raise FedgftError("name both classes and groups, or neither")
    return None if classes is None or groups is None else Names.of(classes, groups)


def _loop(strategy: Any, terms: Terms) -> Loop:
    """What the controller should know: when it sees the effect of a price, and how noisily."""
    sampled = innermost(strategy, "fraction_train", 1.0) < 1
    unsure = sampled or terms.budget.epsilon is not None
    inert = isinstance(innermost_strategy(strategy), INERT)
    caution = (0.5 if unsure else 1.0) * (0.5 if inert else 1.0)
    return Loop(delay=2 if terms.channel == "train" else 1, caution=caution)
