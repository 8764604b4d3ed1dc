"""The options of commands: how their values are read, and those that all studies share.

Nothing here imports NumPy or the rest of the library: `fedgft train --help` loads this module.
"""

import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import Group, Parameter, Token, convert

from fedgft.errors import FedgftError, Kind
from fedgft.formatting import enumerate_names
from fedgft.settings import OPTIONS, MethodName, ModelName
from fedgft.store import expand_user

LAM_METHODS = (
    *("lft", "fedgft", "fedfb", "fairgrad", "agnostic-fair", "fairtrade"),
    *("ffalm", "fedminmax", "afl", "q-ffl"),
)
ROUND_SUM_METHODS = (  # their server reads the clients' sums in each round
    *("fairfed", "fedgft", "fedgft-control", "fedfb", "fairgrad", "fedfact", "agnostic-fair"),
    *("puffle", "fade", "ffalm", "fedminmax", "bounded-group-loss", "afl", "q-ffl"),
)
METHODS_BY_OPTION = {  # options that only some of the methods use
    "lam": LAM_METHODS,
    "penalty": ("fedgft", "lft"),
    "spread": ("fedgft", "lft"),
    "beta": ("fairfed", "fade"),
    "fairfed": ("fairfed",),
    "target": ("fedgft-control", "fedfact", "puffle", "bounded-group-loss"),
    "local_target": ("fedgft-control",),
    "control": ("fedgft-control",),
    "pick": ("fedgft-control",),
    "price_on": ("fedgft-control",),
    "noise": ROUND_SUM_METHODS,
}


def read_whole_number(_: object, tokens: Sequence[Token]) -> int:
    """Read a whole number as Python does; a fraction is an error and is not truncated."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"must be a whole number, not '{tokens[0].value[:40]}'") from None


def read_number(_: object, tokens: Sequence[Token]) -> float:
    """Read a number as Python does."""
    try:
        return float(tokens[0].value)
    except ValueError:
        raise ValueError(f"must be a number, not '{tokens[0].value[:40]}'") from None


def parse_fraction(text: str) -> float:
    """Return the number that a text such as "0.02" or "2%" holds; ValueError for any other text."""
    number, percent, rest = text.strip().partition("%")
    try:
        if rest:
            raise ValueError
        return float(number) / 100 if percent else float(number)
    except ValueError:
        raise ValueError(f"must be a fraction such as 0.02, or 2%, not '{text[:40]}'") from None


def read_fraction(_: object, tokens: Sequence[Token]) -> float:
    """Read a fraction, see `parse_fraction`."""
    return parse_fraction(tokens[0].value)


def read_list(kind: Any, tokens: Sequence[Token]) -> Any:
    """Read a list: `a b`, `a,b` and a repeated option mean the same."""
    parts = [token.evolve(value=v) for token in tokens for v in _split_at_commas(token.value)]
    if tokens and not parts:  # as an empty variable in a shell leaves it
        raise ValueError("needs a value")
    return read_choice(kind, parts)


def read_choice(kind: Any, tokens: Sequence[Token]) -> Any:
    """Read one of several names, in any case: FedAdam is fedadam."""
    choices = _list_choices(kind)
    lower = [each.evolve(value=each.value.lower()) for each in tokens]
    pairs = zip(tokens, lower, strict=True)
    return convert(kind, [small if small.value in choices else each for each, small in pairs])


def _list_choices(kind: Any) -> tuple[Any, ...]:
    """Return the values of all literals in a type."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(choice for part in get_args(kind) for choice in _list_choices(part))


def read_columns(kind: Any, tokens: Sequence[Token]) -> Any:
    """Read names of columns. They may have commas: `split_columns` divides them later."""
    for token in tokens:
        if token.value.lower().endswith(TABLE_ENDINGS):
            text = f"'{token.value[:80]}' is a file, not a column; give tables before the options"
            raise ValueError(text)
    return convert(kind, list(tokens))


def split_columns(values: Sequence[str], known: Collection[str] = ()) -> tuple[str, ...]:
    """Return names of columns: a text "a,b" is two, unless a column has this very name.

    Parameters
    ----------
    values
        What the user gave: `a b`, `a,b` and a repeated option mean the same.
    known
        The columns of the table.
    """
    parts = ([value] if value in known else _split_at_commas(value) for value in values)
    return tuple(name for names in parts for name in names)


def _split_at_commas(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def read_path(_: object, tokens: Sequence[Token]) -> Path:
    """Read a path and expand ~. An empty text is an error: it would mean the current folder."""
    if not tokens[0].value.strip():
        raise ValueError("the name of a file or folder must not be empty")
    try:
        return expand_user(tokens[0].value)
    except FedgftError as error:
        raise ValueError(str(error)) from None


def _show_list(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


TABLE_ENDINGS = (".csv", ".parquet")
URL = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")  # the start of the URL of a database
Flag = Parameter(negative="", show_default=False)
Some = Parameter(consume_multiple=True, negative="")  # a list that may be empty
Many = Parameter(
    consume_multiple=True, negative="", show_default=_show_list, converter=read_list
)  # `a b` or `a,b`
Columns = Annotated[tuple[str, ...], Some, Parameter(converter=read_columns)]
Number = Annotated[float, Parameter(converter=read_number)]
Fraction = Annotated[float, Parameter(converter=read_fraction)]  # 0.02 or 2%
Whole = Annotated[int, Parameter(converter=read_whole_number)]  # every option that is a count
Place = Annotated[Path, Parameter(converter=read_path)]  # every file and folder
Pairs = Annotated[list[str] | None, Some, Parameter(name="--set")]  # see `parse_settings`
MetricName = str  # a name of the catalog, or a weighted sum of names: get_metric reads it
Method = Annotated[MethodName, Parameter(converter=read_choice)]
ComparedName = Literal[
    MethodName, "thresholds", "blind", "derived", "logofair", "fedfact-post", "cost-lp"
]
Methods = Annotated[tuple[ComparedName, ...], Many]
Metrics = Annotated[tuple[MetricName, ...], Many]
Alphas = Annotated[tuple[Number, ...], Many]
OneOf: Any = Literal  # of choices that type checkers cannot see
TYPES = {  # of options, by the kind of the setting
    int: Whole,
    float: Number,
    Path: Place,
    bool: Annotated[bool, Flag],
    tuple: Columns,
}


def require(condition: object, message: str, *, kind: Kind = "invalid") -> None:
    """Raise a `FedgftError` with the message and the kind unless the condition holds."""
    if not condition:
        raise FedgftError(message, kind=kind)


def require_values(**options: object) -> None:
    """Raise a `FedgftError` for an option that is given without values, as an empty variable in a
    shell leaves it."""
    for name, values in options.items():
        require(values is None or values, f"`{name}` needs a value", kind="missing")


RENAMED_SETTINGS = {"min-cell": "min-count"}  # names of options -> names of Flower's settings


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
        is_value = isinstance(value, str | int | float | bool) and is_finite
        require(is_value, f"`set` {pair}: write KEY=VALUE, such as lr=0.005")
        require(key not in reserved, f"`set` {pair}: there is an option --{key}")
        is_name = re.fullmatch("[A-Za-z][A-Za-z0-9_-]*", key)
        require(is_name, f"`set` {pair}: {key!r} is not the name of a setting")
        found[RENAMED_SETTINGS.get(key, key)] = value
    return found


def _shared_options() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, annotation and default of every option in the table of settings."""
    for position, (heading, settings) in enumerate(OPTIONS.items()):
        group = Group(heading, sort_key=position)
        for name, setting in settings.items():
            kind: Any = TYPES.get(setting.kind, setting.kind)
            if setting.choices:
                kind = Annotated[OneOf[setting.choices], Parameter(converter=read_choice)]
            elif setting.is_fraction:
                kind = Fraction
            elif name == "missing":  # values, not columns
                kind = Annotated[tuple[str, ...], Some, Parameter(converter=read_list)]
            elif name == "data":
                kind = Annotated[tuple[str, ...], Some, Parameter(show_default=_show_list)]
            default = None if setting.unset and setting.kind is not bool else setting.default
            optional = kind | None if default is None else kind
            parameter = Parameter(group=group, help=setting.help_text())
            is_named = name != "data"  # the tables may follow the command without --data
            yield name, Annotated[optional, parameter], field(default=default, kw_only=is_named)


_SharedOptions: Any = make_dataclass("_SharedOptions", _shared_options(), frozen=True)


@Parameter(name="*")
class Options(_SharedOptions):
    """The values of the options that `train`, `compare` and `frontier` share.

    It is a frozen dataclass with a field for each setting of `fedgft.settings.OPTIONS`, where
    help texts, bounds, choices and defaults are. None and False mean that an option was not given.
    """

    @property
    def source(self) -> str:
        """The data set or the table; the first of several tables."""
        return self.data[0]

    @property
    def replicates(self) -> int:
        """The number of replicates: --seeds, or fewer for images than for tables."""
        if self.seeds is not None:
            return self.seeds
        return 20 if self.images is None else 3

    @property
    def model_name(self) -> ModelName:
        """The model: --model, or the usual one for tables or images."""
        return self.model or ("logistic" if self.images is None else "resnet18")

    def given(self, *names: str) -> dict[str, Any]:
        """Return the values of those of the named options that were given."""
        values = {name: getattr(self, name) for name in names}
        return {name: v for name, v in values.items() if v is not None and v is not False}

    def refuse(self, names: Sequence[str], why: str) -> None:
        """Raise a `FedgftError` for the first of the named options that was given."""
        for name in self.given(*names):
            raise FedgftError(f"`{name}`{why}")

    def unused(self, methods: Sequence[str]) -> list[str]:
        """Return notes about options that were given and that none of the methods uses.

        Raises a `FedgftError` where ignoring the option would mislead: a target without
        fedgft-control, or `lam` with fedgft-control.
        """
        notes = []
        for name in self.given(*METHODS_BY_OPTION):
            users = METHODS_BY_OPTION[name]
            if set(users) & set(methods):
                continue
            text = f"`{name}` is for {enumerate_names(users)}, and the methods here are "
            text += ", ".join(methods)
            remedy = ""
            if name in ("target", "local_target"):
                known = [each for each in methods if each != "fedgft" and len(methods) > 1]
                remedy = f": write `method` {' '.join((*known, 'fedgft-control'))}"
            elif name == "lam" and "fedgft-control" in methods:
                remedy = ": write `method` fedgft, or leave out `lam`"
            require(not remedy, text + remedy, kind="conflict")
            notes.append(text)
        return notes


def choose_method(
    method: MethodName | None, options: Options, metric: MetricName = "sp"
) -> MethodName:
    """Return the method to train: the one that was given, or the one that fits the options.

    A target asks for fedgft-control, also where the method is called fedgft. A metric at every
    threshold asks for fedgft.

    Parameters
    ----------
    method
        The value of --method.
    options
        The other options.
    metric
        The value of --metric.
    """
    if method == "fedgft" and options.given("target", "local_target") and options.lam is None:
        return "fedgft-control"
    if method is not None:
        return method
    if options.given("target", "local_target", "control", "pick", "price_on"):
        return "fedgft-control"
    is_published = options.given("lam", "penalty", "spread") or options.protocol == "paper"
    is_published = is_published or "@" in metric
    return "fedgft" if is_published else "fedgft-control"
