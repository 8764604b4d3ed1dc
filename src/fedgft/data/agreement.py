"""One schema from what many sites say of their tables; see `schema`.

A site's word is checked before it binds the others, and a site that does not fit is named. Of three
sites or more one alone decides nothing: a group, a class or a level of a text column that one site
names is left out, unless the user names it; a site whose numbers are of another magnitude than the
others' is left out too; and no site's rows weigh more in the scaling than `metrics.robust` allows.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from fedgft.data.columns import positive_last, suggestion
from fedgft.data.encoding import MOST_INDICATORS, MOST_LEVELS, Categorical, Encoder, Numeric
from fedgft.data.roles import MOST_VALUES, group_columns
from fedgft.data.scaling import Moments, spread_of
from fedgft.data.schema import EMPTY, Description, Schema
from fedgft.errors import FedgftError
from fedgft.files import proper
from fedgft.metrics.robust import FEWEST, Limits, size_limit

SUMS = ("count", "sum", "around")  # of a column of numbers, as `describe` has them
LARGEST = float(np.finfo(np.float32).max)
MOST_ROWS = 10**10
FAR = 100.0  # times the usual spread and mean of a column: another unit, or a lie
SCALINGS = ("pooled", "median")


def agree(
    sites: Mapping[str, Any],
    *,
    label: str,
    group: str,
    positive: str | None = None,
    classes: Sequence[str] = (),
    groups: Sequence[str] = (),
    scaling: str = "pooled",
    warn: Callable[[str], None] = lambda text: None,
) -> tuple[Schema, dict[str, str]]:
    """The schema that most sites fit, and of each other site what is wrong with it.

    `scaling`: "pooled" is the mean and spread of all rows; "median" the median over the sites of
    their means and of their mean squares about it, which no single site moves far. `warn` is told
    what was left out because one site alone names it.
    """
    if scaling not in SCALINGS:
        raise FedgftError(f"scaling is '{scaling}': choose from {', '.join(SCALINGS)}")
    good, wrong = _believable(sites)
    kinds = {site: _kinds(d) for site, d in good.items()}
    columns = _columns(list(kinds.values()))
    if good and not columns:
        raise FedgftError("the sites' tables have no column in common to learn from")
    wrong |= {site: odd for site, own in kinds.items() if (odd := _odd_columns(columns, own))}
    good = {site: d for site, d in good.items() if site not in wrong}
    wrong |= _odd_numbers(good, columns)
    named = {}
    for what, given in (("labels", classes), ("groups", groups)):
        good = {site: d for site, d in good.items() if site not in wrong}
        if not good:
            raise FedgftError("no site fits: " + "; ".join(f"{s}: {w}" for s, w in wrong.items()))
        named[what], odd = _names(good, what, tuple(given), warn)
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
    good, columns = _shared_levels(good, columns, warn)
    encoder, mean, spread = _fitted(list(good.values()), columns, scaling)
    parts = tuple(group_columns(group, list(columns)))
    return Schema(label, parts, ordered, named["groups"], encoder, mean, spread), wrong


def _believable(sites: Mapping[str, Any]) -> tuple[dict[str, Description], dict[str, str]]:
    """Descriptions that tables can have; a site's word is checked before it binds the others."""
    good, wrong = {}, {}
    for site, said in sites.items():
        try:
            _check(said)
            good[site] = said
        except FedgftError as error:
            wrong[site] = f"its description of its table is damaged: {error}"
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            wrong[site] = "its description of its table is damaged"
    return good, wrong


def _check(said: Description) -> None:
    rows = said["rows"]
    sane = isinstance(rows, int) and 0 < rows < MOST_ROWS
    sane &= all(isinstance(said[what], list) for what in ("labels", "groups"))
    names = [*said["labels"], *said["groups"], *said["columns"]]
    for what in ("labels", "groups"):
        _check_number(len(said[what]), MOST_VALUES, what)
    for name, column in said["columns"].items():
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
            _check_number(len(levels), MOST_LEVELS, f"levels of '{name}'")
            sane &= column["kind"] == "text" and sum(levels.values()) <= rows
            sane &= all(isinstance(n, int) and n > 0 for n in levels.values())
            names += levels
    list(map(proper, names))
    sane &= len(names) <= MOST_INDICATORS
    if not sane:
        raise FedgftError("no table has such numbers")


def _check_number(found: int, most: int, what: str) -> None:
    if found > most:
        raise FedgftError(f"it names {found:,} {what}, and {most:,} is the most")


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


def _odd_numbers(sites: Mapping[str, Description], columns: dict[str, str]) -> dict[str, str]:
    """Sites where a column of numbers has a mean or spread of quite another magnitude."""
    odd: dict[str, str] = {}
    for name, kind in columns.items():
        sums = {site: d["columns"][name] for site, d in sites.items() if kind == "numbers"}
        sums = {site: own for site, own in sums.items() if own.get("count", 0) > 0}
        if len(sums) < FEWEST:
            continue
        mean = {site: own["sum"] / own["count"] for site, own in sums.items()}
        spread = {site: (own["around"] / own["count"]) ** 0.5 for site, own in sums.items()}
        middle = float(np.median(list(mean.values())))
        usual = float(np.median(list(spread.values()))) + abs(middle)
        for site in sums:
            far = max(abs(mean[site] - middle), spread[site])
            if usual > 0 and far > FAR * usual and site not in odd:
                odd[site] = (
                    f"its column '{name}' has mean {mean[site]:.3g} and spread "
                    f"{spread[site]:.3g}, where the sites' median is {middle:.3g}: another unit?"
                )
    return odd


def _lonely(named: Mapping[str, set[str]]) -> dict[str, str]:
    """What one site alone names, among three or more: name -> site."""
    times = Counter(name for own in named.values() for name in own)
    if len(named) < FEWEST:
        return {}
    return {name: site for site, own in named.items() for name in own if times[name] == 1}


def _shared_levels(
    sites: Mapping[str, Description], columns: dict[str, str], warn: Callable[[str], None]
) -> tuple[dict[str, Description], dict[str, str]]:
    """The descriptions without levels that one site alone names, and the columns that are left."""
    kept = dict(sites)
    left = dict(columns)
    for name, kind in columns.items():
        if kind != "text":
            continue
        named = {site: set(d["columns"][name].get("levels", {})) for site, d in kept.items()}
        alone = _lonely({site: own for site, own in named.items() if own})
        by_site: dict[str, list[str]] = {}
        for level, site in sorted(alone.items()):
            by_site.setdefault(site, []).append(level)
        for site, levels in by_site.items():
            warn(
                f"site '{site}' alone names {len(levels)} level(s) of column '{name}', such as "
                f"'{levels[0]}': left out (a schema that was agreed on may name them)"
            )
            kept[site] = _without_levels(kept[site], name, levels)
        if alone and not any(own - set(alone) for own in named.values()):
            warn(f"column '{name}' is left out: no two sites name the same level of it")
            del left[name]
    if not left:
        raise FedgftError("the sites' tables have no column in common to learn from")
    return kept, left


def _without_levels(said: Description, name: str, levels: Sequence[str]) -> Description:
    column = said["columns"][name]
    rest = {level: n for level, n in column["levels"].items() if level not in set(levels)}
    return said | {"columns": said["columns"] | {name: column | {"levels": rest}}}


def _names(
    sites: Mapping[str, Description],
    what: str,
    given: tuple[str, ...],
    warn: Callable[[str], None],
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names that were given bind everybody. Otherwise: those of the sites that hang together, each
    having a name in common with another, without those that one site of several alone names."""
    held = {site: set(map(str, description[what])) for site, description in sites.items()}
    base = set(given) or _together(list(held.values()))
    odd = {}
    lonely = {} if given else _lonely({site: own for site, own in held.items() if own <= base})
    if lonely and len(base - set(lonely)) < 2:  # without them there is nothing to compare
        for name, site in sorted(lonely.items()):
            warn(f"'{name}' of the {what} is named by site '{site}' alone")
        lonely = {}
    for name, site in sorted(lonely.items()):
        base = base - {name}
        if what == "groups":  # its rows count as not recorded
            held[site] = held[site] - {name}
            warn(
                f"group '{name}' is named by site '{site}' alone and is left out: its rows count "
                "as not recorded. If it is real, name all groups (the setting groups)"
            )
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
    sites: list[Description], columns: dict[str, str], scaling: str
) -> tuple[Encoder, np.ndarray, np.ndarray]:
    """Encoder, mean and spread of all rows, a missing number being the mean of its column."""
    most = size_limit([d["rows"] for d in sites], Limits())
    parts = [min(1.0, most / d["rows"]) for d in sites]
    numeric = [name for name, kind in columns.items() if kind == "numbers"]
    mean, variance = (_median_sums if scaling == "median" else _sums)(sites, numeric, parts)
    scales = dict(zip(numeric, zip(mean, variance, strict=True), strict=True))
    fields: list[Numeric | Categorical] = []
    means, variances = [], []
    for name in columns:
        if name in scales:
            fields.append(Numeric(name, float(scales[name][0])))
            means.append(scales[name][0])
            variances.append(scales[name][1])
        else:
            field, share = _shares(sites, name, parts, scaling)
            fields.append(field)
            means += share.tolist()
            variances += (share * (1 - share)).tolist()
    all_means = np.array(means)
    return Encoder(tuple(fields)), all_means, spread_of(all_means, np.array(variances))


def _moments(sites: list[Description], names: list[str]) -> list[Moments]:
    """Of these columns, for each site; a column that is empty there has the count 0."""
    own = ([[d["columns"][name].get(key, 0) for name in names] for key in SUMS] for d in sites)
    return [Moments(*np.array(each, np.float64).reshape(len(SUMS), -1)) for each in own]


def _sums(
    sites: list[Description], names: list[str], parts: list[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance over all sites; `parts`: of its rows, how much each site counts."""
    every = reduce(
        add,
        (
            Moments(m.count * part, m.sum * part, m.around * part)
            for m, part in zip(_moments(sites, names), parts, strict=True)
        ),
    )
    rows = sum(d["rows"] * part for d, part in zip(sites, parts, strict=True))
    return every.mean, every.around / rows


def _median_sums(
    sites: list[Description], names: list[str], parts: list[float]
) -> tuple[np.ndarray, np.ndarray]:
    """The median of the sites' means, and of their mean squares about it."""
    each = _moments(sites, names)
    there = np.array([m.count > 0 for m in each])
    means = np.where(there, np.array([m.mean for m in each]), np.nan)
    inside = np.array([m.around / np.maximum(m.count, 1) for m in each])
    mean = _median_of(means)
    squares = np.where(there, inside + (means - mean) ** 2, np.nan)
    return mean, _median_of(squares)


def _median_of(values: np.ndarray) -> np.ndarray:
    """Over the sites that have some; 0 where none has."""
    known = np.isfinite(values).any(0)
    return np.where(known, np.nanmedian(np.where(known, values, 0.0), axis=0), 0.0)


def _shares(
    sites: list[Description], name: str, parts: list[float], scaling: str
) -> tuple[Categorical, np.ndarray]:
    """The levels of a column of text, and how large a part of the rows has each but the first."""
    own = [d["columns"][name].get("levels", {}) for d in sites]
    levels = sorted({level for held in own for level in held})
    if not levels:
        raise FedgftError(f"column '{name}' has no value that is frequent at any site: "
                          "leave it out (the setting leave-out)")  # fmt: skip
    counts = np.array([[held.get(level, 0) for level in levels[1:]] for held in own], float)
    rows = np.array([d["rows"] for d in sites], float)[:, None]
    if scaling == "median":
        share = np.median(counts / rows, axis=0)
    else:
        weight = np.array(parts)[:, None]
        share = (counts * weight).sum(0) / (rows * weight).sum()
    return Categorical(name, tuple(levels)), share
