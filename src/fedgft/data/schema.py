"""Tables that nobody may pool, read alike: sites describe their columns, a schema is agreed on.

A site says which columns it has, of numbers the count, sum and sum of squares, of text how often
each value occurs, and the values of label and group; of what concerns few rows it says nothing.
From that follow one encoder and one scaling for everybody: those of the pooled rows, had anybody
seen them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.data.columns import as_text, check_text, codes_of, column_of, numbers_of, suggestion
from fedgft.data.encoding import MISSING, Categorical, Encoder, Numeric
from fedgft.data.roles import group_columns
from fedgft.data.scaling import CONSTANT
from fedgft.types import FedgftError

if TYPE_CHECKING:
    import polars as pl

FORMAT = "fedgft-schema-1"
EMPTY = "empty"
MOST = 200  # different values of a label or a group: more are names or numbers of people
Description = dict[str, Any]


@dataclass(frozen=True)
class Schema:
    """How every site reads its rows."""

    label: str
    group: tuple[str, ...]
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    encoder: Encoder
    mean: np.ndarray
    spread: np.ndarray

    def read(
        self, frame: "pl.DataFrame", *, source: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[str, ...]]:
        """Features, labels, groups (-1: not recorded), and notes on what had to be filled in."""
        for name in (self.label, *self.group):
            column_of(frame, name, source=source)
        features, notes = self.encoder.encode(frame, source=source)
        _complete(frame, self.label, source)
        labels = codes_of(as_text(frame[self.label]), self.classes)
        _known(frame[self.label], labels, self.classes, source=source)
        cells = _cells(frame, self.group)
        groups = codes_of(cells, self.groups)
        unknown = int((groups < 0).sum()) - cells.null_count()
        if unknown > len(groups) / 2:
            _known(cells.alias(", ".join(self.group)), groups, self.groups, source=source)
        if unknown:
            notes = (*notes, f"{source}: {unknown} row(s) of groups that the federation does not "
                     "know count as not recorded")  # fmt: skip
        return (features - self.mean) / self.spread, labels, groups, notes

    def to_json(self) -> str:
        return json.dumps({
            "format": FORMAT, "label": self.label, "group": self.group, "classes": self.classes,
            "groups": self.groups, "encoder": json.loads(self.encoder.to_json()),
            "mean": self.mean.tolist(), "spread": self.spread.tolist(),
        })  # fmt: skip

    @classmethod
    def from_json(cls, text: str, *, source: str = "schema") -> "Schema":
        try:
            held = json.loads(text)
            if held["format"] != FORMAT:
                raise FedgftError(f"{source}: format is {held['format']!r}, not {FORMAT!r}")
            group, classes, groups = (
                tuple(map(str, held[what])) for what in ("group", "classes", "groups")
            )
            encoder = Encoder.from_json(json.dumps(held["encoder"]))
            mean, spread = (np.array(held[what], np.float64) for what in ("mean", "spread"))
            made = cls(str(held["label"]), group, classes, groups, encoder, mean, spread)
        except (ValueError, KeyError, TypeError) as error:
            raise FedgftError(f"{source}: not a schema that fedgft wrote ({error})") from None
        width = (len(encoder.columns),)
        if mean.shape != width or spread.shape != width or not (spread > 0).all():
            raise FedgftError(f"{source}: the scaling does not fit the columns")
        return made


def describe(
    frame: "pl.DataFrame", *, label: str, group: str, aside: Sequence[str] = (), rare: int = 10,
    source: str,
) -> Description:  # fmt: skip
    """What a site says about its table. Values of fewer than `rare` rows are not named."""
    groups = group_columns(group, frame.columns)
    for name in (label, *groups):
        column_of(frame, name, source=source)
    _complete(frame, label, source)
    if label in groups:
        raise FedgftError(f"{source}: column '{label}' is both the label and the group")
    if frame.height < rare:
        raise FedgftError(f"{source}: has {frame.height} row(s), too few to be described")
    taken = {label, *aside}
    columns = {name: _described(frame, name, rare, source) for name in frame.columns
               if name not in taken}  # fmt: skip
    if not columns:
        raise FedgftError(f"{source}: no column is left to learn from")
    labels = _frequent(as_text(frame[label]), rare, source)
    cells = _frequent(_cells(frame, groups), rare, source)
    return {"rows": frame.height, "columns": columns, "labels": labels, "groups": cells}


def _complete(frame: "pl.DataFrame", label: str, source: str) -> None:
    if absent := frame[label].null_count():
        raise FedgftError(f"{source}: label column '{label}' lacks {absent} value(s): take those "
                          "rows out")  # fmt: skip


def _frequent(series: "pl.Series", rare: int, source: str) -> list[str]:
    """The values that so many rows have."""
    counts = dict(series.drop_nulls().value_counts().iter_rows())
    if len(counts) > MOST:
        raise FedgftError(f"{source}: column '{series.name}' has {len(counts)} values: it is no "
                          "label or group of people")  # fmt: skip
    return sorted(value for value, number in counts.items() if number >= rare)


def _described(frame: "pl.DataFrame", name: str, rare: int, source: str) -> dict[str, Any]:
    import polars as pl

    series = column_of(frame, name, source=source)
    check_text(series, source=source)
    if series.null_count() == len(series):
        return {"kind": EMPTY}  # may be anything
    if series.dtype.is_numeric() or series.dtype == pl.Boolean:
        known = numbers_of(series, source=source).drop_nulls().to_numpy()
        if len(known) < rare:  # the sum of a few numbers is somebody's
            known = known[:0]
        return {"kind": "numbers", "count": len(known), "sum": float(known.sum()),
                "square": float((known.astype(np.float64) ** 2).sum())}  # fmt: skip
    text = as_text(series).fill_null(MISSING)
    counts = dict(text.value_counts().iter_rows())
    return {"kind": "text", "levels": {v: int(n) for v, n in counts.items() if n >= rare}}


def agree(
    sites: Mapping[str, Any], *, label: str, group: str, positive: str | None = None,
    classes: Sequence[str] = (), groups: Sequence[str] = (),
) -> tuple[Schema, dict[str, str]]:  # fmt: skip
    """The schema that most sites fit, and of each other site what is wrong with it."""
    good, wrong = _believable(sites)
    columns = _columns(list(good.values()))
    wrong |= {site: odd for site, d in good.items() if (odd := _odd_columns(columns, _kinds(d)))}
    named = {}
    for what, given in (("labels", classes), ("groups", groups)):
        good = {site: d for site, d in good.items() if site not in wrong}
        if not good:
            raise FedgftError("no site fits: " + "; ".join(f"{s}: {w}" for s, w in wrong.items()))
        named[what], odd = _names(good, what, tuple(given))
        wrong |= odd
    good = {site: d for site, d in good.items() if site not in wrong}
    ordered = _positive_last(named["labels"], positive)
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
    sane &= all(isinstance(v, str) for what in ("labels", "groups") for v in said[what])
    for name, column in said["columns"].items():
        if column["kind"] == EMPTY:
            continue
        if column["kind"] == "numbers":
            count, total, square = (float(column[key]) for key in ("count", "sum", "square"))
            sane &= 0 <= count <= rows and bool(np.isfinite([total, square]).all())
            sane &= total**2 <= count * square * (1 + 1e-9) + 1e-9  # Cauchy and Schwarz
        else:
            levels = column["levels"]
            sane &= column["kind"] == "text" and sum(levels.values()) <= rows
            sane &= all(isinstance(n, int) and n > 0 for n in levels.values())
        sane &= isinstance(name, str)
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


def _positive_last(classes: tuple[str, ...], positive: str | None) -> tuple[str, ...]:
    if positive is None:
        return classes
    if positive not in classes or len(classes) != 2:
        raise FedgftError(f"positive {positive!r} is none of two classes: {', '.join(classes)}")
    return (*(name for name in classes if name != positive), positive)


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


def _cells(frame: "pl.DataFrame", groups: Sequence[str]) -> "pl.Series":
    """The group of each row as text; null where a part of it is missing."""
    import polars as pl

    parts = [as_text(frame[name]).alias(f"part{i}") for i, name in enumerate(groups)]
    return pl.DataFrame(parts).select(pl.concat_str(pl.all(), separator=" & ")).to_series()


def _known(series: "pl.Series", codes: np.ndarray, names: tuple[str, ...], *, source: str) -> None:
    strange = series.filter(codes < 0).drop_nulls()
    if len(strange):
        raise FedgftError(
            f"{source}: column '{series.name}' holds '{strange[0]}'; the federation knows "
            f"{', '.join(names)}"
        )
