"""One schema from what many sites say of their tables; see `schema`.

A site's word is checked before it binds the others, and a site that does not fit is named.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from fedgft.data.columns import positive_last, suggestion
from fedgft.data.encoding import MOST_INDICATORS, Categorical, Encoder, Numeric
from fedgft.data.roles import group_columns
from fedgft.data.scaling import Moments, spread_of
from fedgft.data.schema import EMPTY, Description, Schema
from fedgft.errors import FedgftError
from fedgft.files import proper

SUMS = ("count", "sum", "around")  # of a column of numbers, as `describe` has them
LARGEST = float(np.finfo(np.float32).max)


def agree(
    sites: Mapping[str, Any], *, label: str, group: str, positive: str | None = None,
    classes: Sequence[str] = (), groups: Sequence[str] = (),
) -> tuple[Schema, dict[str, str]]:  # fmt: skip
    """The schema that most sites fit, and of each other site what is wrong with it."""
    good, wrong = _believable(sites)
    kinds = {site: _kinds(d) for site, d in good.items()}
    columns = _columns(list(kinds.values()))
    if good and not columns:
        raise FedgftError("the sites' tables have no column in common to learn from")
    wrong |= {site: odd for site, own in kinds.items() if (odd := _odd_columns(columns, own))}
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
            numbers = [column[key] for key in SUMS]
            sane &= all(type(number) in (int, float) for number in numbers)
            count, total, around = map(float, numbers)
            sane &= 0 <= count <= rows and abs(total) <= count * LARGEST
            sane &= 0 <= around <= 4 * count * LARGEST**2
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


def _columns(sites: list[dict[str, str]]) -> dict[str, str]:
    """The columns that most sites have, and of each the kind that it has at most of them."""
    if not sites:
        return {}
    sets = [frozenset(kinds) for kinds in sites]
    common = Counter(sets).most_common(1)[0][0]
    out = {}
    for name in sites[sets.index(common)]:  # in the order that the first of them has
        held = Counter(k[name] for k in sites if k.get(name, EMPTY) != EMPTY)
        if held:  # empty everywhere, it teaches nothing
            out[name] = held.most_common(1)[0][0]
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
    numeric = [name for name, kind in columns.items() if kind == "numbers"]
    sums = _sums(sites, numeric)
    scaling = dict(zip(numeric, zip(sums.mean, sums.around / rows, strict=True), strict=True))
    fields: list[Numeric | Categorical] = []
    means, variances = [], []
    for name in columns:
        if name in scaling:
            mean, variance = scaling[name]
            fields.append(Numeric(name, float(mean)))
            means.append(mean)
            variances.append(variance)
        else:
            field, share = _shares(sites, name, rows)
            fields.append(field)
            means += share.tolist()
            variances += (share * (1 - share)).tolist()
    mean = np.array(means)
    return Encoder(tuple(fields)), mean, spread_of(mean, np.array(variances))


def _sums(sites: list[Description], names: list[str]) -> Moments:
    """Of these columns, over all sites; a column that is empty at a site adds nothing."""
    own = ([[d["columns"][name].get(key, 0) for name in names] for key in SUMS] for d in sites)
    return reduce(add, (Moments(*np.array(each, np.float64)) for each in own))


def _shares(sites: list[Description], name: str, rows: int) -> tuple[Categorical, np.ndarray]:
    """The levels of a column of text, and how large a part of the rows has each but the first."""
    own = [d["columns"][name].get("levels", {}) for d in sites]
    levels = sorted({level for held in own for level in held})
    if not levels:
        raise FedgftError(f"column '{name}' has no value that is frequent at any site: "
                          "leave it out (the setting leave-out)")  # fmt: skip
    counts = [sum(held.get(level, 0) for held in own) for level in levels[1:]]
    return Categorical(name, tuple(levels)), np.array(counts) / rows
