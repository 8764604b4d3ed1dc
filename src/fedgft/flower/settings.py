"""What a run can be told, checked before anybody begins: by the command line and by the server;
and what a site is told of its training, by the site."""

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from fedgft.data.agreement import SCALINGS
from fedgft.engine.schedule import Schedule
from fedgft.errors import FedgftError
from fedgft.federated.penalty import SLOPES
from fedgft.models import MODELS
from fedgft.optim import RULES

MOST = 2**31 - 1  # of any number of things
Rule = tuple[Callable[[Any], bool], str]  # whether a value will do, and what would


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _one_of(*names: str) -> Rule:
    return lambda value: value in names, f"choose from {', '.join(names)}"


WHOLE: Rule = (
    lambda value: _number(value) and 1 <= value <= MOST and value == int(value),
    "must be a whole number from 1 on",
)
POSITIVE: Rule = (lambda value: _number(value) and value > 0, "must be a number above 0")
LEAST: Rule = (lambda value: _number(value) and value >= 0, "must be a number from 0 on")
SHARE: Rule = (lambda value: _number(value) and 0 <= value < 1, "must be at least 0 and below 1")

TRAINING: dict[str, Rule] = {
    "lr": POSITIVE, "epochs": WHOLE, "batch-size": WHOLE, "weight-decay": LEAST,
    "optimizer": _one_of(*RULES), "schedule": _one_of(*get_args(Schedule)),
}  # fmt: skip
RUN: dict[str, Rule] = TRAINING | {
    "rounds": WHOLE, "sites": WHOLE, "test-share": SHARE, "alpha": POSITIVE, "server-lr": POSITIVE,
    "proximal-mu": LEAST, "beta": LEAST, "penalty": _one_of(*SLOPES), "min-count": LEAST,
    "timeout": POSITIVE, "node-timeout": POSITIVE, "model": _one_of(*MODELS, "own"),
    "scaling": _one_of(*SCALINGS), "max-influence": POSITIVE,
}  # fmt: skip


def check_run(config: Mapping[str, Any]) -> None:
    """All that a run was told; what it was not told has its usual value."""
    _check(config, RUN)


def check_training(config: Mapping[str, Any]) -> None:
    _check(config, TRAINING)


def _check(config: Mapping[str, Any], rules: dict[str, Rule]) -> None:
    for name, (right, words) in rules.items():
        if name in config and not right(config[name]):
            raise FedgftError(f"{name} is {str(config[name])[:40]!r}: {words}")
