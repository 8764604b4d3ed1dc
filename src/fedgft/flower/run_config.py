"""Checks of a run's configuration, by the command line, the server and the sites."""

from collections.abc import Mapping
from typing import Any

from fedgft.settings import SETTINGS, check_setting

TRAINING = ("lr", "epochs", "batch-size", "weight-decay", "optimizer", "schedule")
RUN = (
    *TRAINING,
    "rounds",
    "sites",
    "test-share",
    "alpha",
    "server-lr",
    "proximal-mu",
    "beta",
    "penalty",
    "min-count",
    "timeout",
    "node-timeout",
    "model",
    "scaling",
    "max-influence",
)
OWN_MODEL = "own"  # the model that the user's own app builds


def check_run(config: Mapping[str, Any]) -> None:
    """Raise a `FedgftError` for the first key of `RUN` whose value is invalid; keys may lack."""
    _check(config, RUN)


def check_training(config: Mapping[str, Any]) -> None:
    """Raise a `FedgftError` for the first key of `TRAINING` whose value is invalid."""
    _check(config, TRAINING)


def _check(config: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    for key in keys:
        if key not in config or (key == "model" and config[key] == OWN_MODEL):
            continue
        name = key.replace("-", "_")
        value = config[key]
        if SETTINGS[name].kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        check_setting(name, value)
