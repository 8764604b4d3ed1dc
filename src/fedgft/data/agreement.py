"""One schema from what many sites say of their tables; see `schema`.

A site's word is checked before it binds the others, and a site that does not fit is named.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedgft.data.columns import positive_last, suggestion
from fedgft.data.encoding import MOST_INDICATORS, Categorical, Encoder, Numeric
from fedgft.data.roles import group_columns
from fedgft.data.scaling import CONSTANT
from fedgft.data.schema import EMPTY, Description, Schema
from fedgft.errors import FedgftError
from fedgft.files import proper

LARGEST = 1e100  # sum of squares: more than any number of rows of float32 have


def agree(
    sites: Mapping[str, Any], *, label: str, group: str, positive: str | None = None,
    classes: Sequence[str] = (), groups: Sequence[str] = (),
) -> tuple[Schema, dict[str, str]]:  # fmt: skip
    """The schema that most sites fit, and of each other site what is wrong with it."""
    good, wrong = _believable(sites)
    columns = _columns(list(good.values()))
    if good and not columns:
        raise FedgftError("the sites' tables have no column in common to learn from")
    wrong |= {site: odd for site, d in good.items() if (odd := _odd_columns(columns, _kinds(d)))}
    named = {}
    for what, given in (("labels", classes), ("groups", groups)):
        good = {site: d for site, d in good.items() if site not in wrong}
        if not good:
            raise FedgftError("no site fits: " + "; ".join(f"{s}: {w}" for s, w in wrong.items()))
        named[what], odd = _names(good, what, tuple(given))
        wrong |= odd
    good = {site: d for site, d in good.items() if site not in wrong}
    ordered = named["labels"]
    if positive is not None:
        ordered = positive_last(ordered, positive, where=f"the sites' column '{label}'")
    if not good or len(ordered) < 2 or len(named["groups"]) < 2:
        raise FedgftError(
            f"all fitting sites together have the classes {', '.join(ordered) or '(none)'} and the "
            f"groups {', '.join(named['groups']) or '(none)'}: two of each are needed"
            " (the settings classes and groups name them)"
            + "".join(f"; {site}: {why}" for site, why in wrong.items())
        )
    encoder, mean, spread = _fitted(list(good.values()), columns)
    parts = tuple(group_columns(group, list(columns)))
    return Schema(label, parts, ordered, named["groups"], encoder, mean, spread), wrong


def _believable(sites: Mapping[str, Any]) -> tuple[dict[str, Description], dict[str, str]]:
    """Descriptions that tables can have; a site's word is checked before it binds the others."""
    good, wrong = {}, {}
    for site, said in sites.items():
        try:
            _check(said)
            good[site] = said
        except (FedgftError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
            wrong[site] = "its description of its table is damaged"
    return good, wrong


def _check(said: Description) -> None:
    rows = said["rows"]
    sane = isinstance(rows, int) and 0 < rows < 10**12
    sane &= all(isinstance(said[what], list) for what in ("labels", "groups"))
    names = [*said["labels"], *said["groups"], *said["columns"]]
    for column in said["columns"].values():
        if column["kind"] == EMPTY:
            continue
        if column["kind"] == "numbers":
            numbers = [column[key] for key in ("count", "sum", "square")]
            sane &= all(type(number) in (int, float) for number in numbers)
            count, total, square = map(float, numbers)
            sane &= 0 <= count <= rows and np.isfinite(total) and 0 <= square <= LARGEST
            sane &= total**2 <= count * square * (1 + 1e-9) + 1e-9  # Cauchy and Schwarz
        else:
            levels = column["levels"]
            sane &= column["kind"] == "text" and sum(levels.values()) <= rows
            sane &= all(isinstance(n, int) and n > 0 for n in levels.values())
            names += levels
    list(map(proper, names))
    sane &= len(names) <= MOST_INDICATORS
    if not sane:
        raise FedgftError("damaged")


def _kinds(description: Description) -> dict[str, str]:
    return {name: column["kind"] for name, column in description["columns"].items()}


def _columns(sites: list[Description]) -> dict[str, str]:
    """The columns that most sites have, and of each the kind that it has at most of them."""
    sets = [frozenset(_kinds(d)) for d in sites]
    if not sets:
        return {}
    common = max(sets, key=sets.count)
    first = next(d for d, own in zip(sites, sets, strict=True) if own == common)
    out = {}
    for name in first["columns"]:
        kinds = [k[name] for k in map(_kinds, sites) if k.get(name, EMPTY) != EMPTY]
        if kinds:  # empty everywhere, it teaches nothing
            out[name] = max(kinds, key=kinds.count)
    return out


def _odd_columns(common: dict[str, str], own: dict[str, str]) -> str | None:
    for name, kind in common.items():
        if name not in own:
            return f"it has no column '{name}'{suggestion(name, list(own))}"
        if own[name] not in (kind, EMPTY):
            return f"its column '{name}' holds {own[name]}, at other sites {kind}"
    return None  # what it has besides is not read


def _names(
    sites: Mapping[str, Description], what: str, given: tuple[str, ...]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names that were given bind everybody. Otherwise: those of the sites that hang together, each
    having a name in common with another; a class or group may live at one site only."""
    held = {site: set(map(str, description[what])) for site, description in sites.items()}
    base = set(given) or _together(list(held.values()))
    odd = {}
    for site, own in held.items():
        if own - base:
            odd[site] = (f"its {what} are {', '.join(sorted(own))}; the federation's are "
                         f"{', '.join(sorted(base))}")  # fmt: skip
    return given or tuple(sorted(base, key=_order)), odd


def _together(sets: list[set[str]]) -> set[str]:
    """The union of the largest number of sets that are linked by names they share."""
    parts: list[tuple[int, set[str]]] = []
    for own in sets:
        linked = [part for part in parts if part[1] & own]
        apart = [part for part in parts if not part[1] & own]
        size = 1 + sum(number for number, _ in linked)
        parts = [*apart, (size, own.union(*(names for _, names in linked)))]
    return max(parts, key=lambda part: (part[0], len(part[1])))[1]


def _order(name: str) -> tuple[int, float, str]:
    """Numbers as numbers, before text."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def _fitted(
    sites: list[Description], columns: dict[str, str]
) -> tuple[Encoder, np.ndarray, np.ndarray]:
    """Encoder, mean and spread of all rows, a missing number being the mean of its column."""
    rows = sum(d["rows"] for d in sites)
    fields: list[Numeric | Categorical] = []
    means, squares = [], []
    for name, kind in columns.items():
        own = [d["columns"][name] for d in sites if d["columns"][name]["kind"] != EMPTY]
        if kind == "numbers":
            count, total, square = (sum(c[k] for c in own) for k in ("count", "sum", "square"))
            mean = total / count if count else 0.0
            fields.append(Numeric(name, mean))
            means.append(mean)
            squares.append((square + (rows - count) * mean**2) / rows)
        else:
            levels = sorted({level for c in own for level in c["levels"]})
            if not levels:
                raise FedgftError(f"column '{name}' has no value that is frequent at any site: "
                                  "leave it out (the setting leave-out)")  # fmt: skip
            fields.append(Categorical(name, tuple(levels)))
            share = [sum(c["levels"].get(level, 0) for c in own) / rows for level in levels[1:]]
            means += share
            squares += share
    mean, raw = np.array(means), np.array(squares)
    variance = raw - mean**2
    varies = variance > CONSTANT * raw
    return Encoder(tuple(fields)), mean, np.sqrt(np.where(varies, variance, 1.0))
