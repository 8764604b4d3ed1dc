"""How parameters of commands are read: flags, lists, whole numbers, paths and KEY=VALUE pairs."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token

from fedgft.errors import FedgftError
from fedgft.store import expand_user

Flag = Parameter(negative="", show_default=False)
Some = Parameter(consume_multiple=True, negative="")  # a list that may be empty
Many = Parameter(
    consume_multiple=True, negative="", show_default=lambda values: " ".join(map(str, values))
)


def read_whole_number(_: object, tokens: Sequence[Token]) -> int:
    """Read a whole number as Python does; a fraction is an error and is not truncated."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"must be a whole number, not '{tokens[0].value[:40]}'") from None


def read_path(_: object, tokens: Sequence[Token]) -> Path:
    """Read a path and expand ~. An empty text is an error: it would mean the current folder."""
    if not tokens[0].value.strip():
        raise ValueError("the name of a file or folder must not be empty")
    try:
        return expand_user(tokens[0].value)
    except FedgftError as error:
        raise ValueError(str(error)) from None


Whole = Annotated[int, Parameter(converter=read_whole_number)]  # every option that is a count
Place = Annotated[Path, Parameter(converter=read_path)]  # every file and folder
Pairs = Annotated[
    list[str] | None, Parameter(name="--set", consume_multiple=True, negative="")
]  # KEY=VALUE, see `parse_settings`
MetricName = str  # a name of the catalog, or a weighted sum of names: get_metric reads it


def require_values(**options: object) -> None:
    """Raise a `FedgftError` for an option that is given without values, as an empty variable in a
    shell leaves it."""
    for name, values in options.items():
        if values is not None and not values:
            raise FedgftError("needs a value", field=name)


def parse_settings(pairs: Sequence[str], *, reserved: Mapping[str, Any]) -> dict[str, Any]:
    """Read KEY=VALUE pairs, values as in TOML; text may go without quotes.

    Parameters
    ----------
    pairs
        The values of --set.
    reserved
        Keys that have options of their own and are refused.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        try:
            value = tomllib.loads(f"x = {text}")["x"] if equals and key else None
        except (tomllib.TOMLDecodeError, RecursionError):
            value = text
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if not isinstance(value, str | int | float | bool) or not is_finite:
            raise FedgftError(f"`set` {pair}: write KEY=VALUE, such as lr=0.005")
        if key in reserved:
            raise FedgftError(f"`set` {pair}: there is an option --{key}")
        if not re.fullmatch("[A-Za-z][A-Za-z0-9_-]*", key):
            raise FedgftError(f"`set` {pair}: {key!r} is not the name of a setting")
        found[key] = value
    return found
