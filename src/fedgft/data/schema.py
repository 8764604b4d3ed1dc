"""Read tables that may not be pooled in the same way: sites describe them and agree on a schema.

A description holds the names of a site's columns; for columns of numbers the count, the sum and the
sum of squares about the site's own mean; for columns of text how often each value occurs; and the
values of label and group. Values that occur in few rows are left out. `agree_on_schema` makes one
schema from all descriptions. Its encoder and its scaling are those of the pooled rows.

`agree_on_schema` checks the description of each site before it can affect other sites. A site that
does not fit is refused, with the reason. With three or more sites, no single site can decide the
schema: a group, a class or a level of a text column that only one site names is left out unless the
user names it; a site whose numbers have another order of magnitude is refused; and
`robust_aggregation` limits the weight of each site's rows in the scaling.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.data.dataset import Moments, compute_spread
from fedgft.data.encode import (
    MAX_INDICATORS,
    MAX_LEVELS,
    MIN_MISSING,
    MISSING,
    Categorical,
    Encoder,
    Field,
    Names,
    Numeric,
    as_text,
    check_text,
    data_error,
    encode_levels,
    get_column,
    is_numeric,
    parse_numbers,
    put_positive_last,
    read_codes,
    read_missing,
    suggest_name,
)
from fedgft.data.features import explain_identifier
from fedgft.data.table import MAX_VALUES, split_group_columns
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import format_count
from fedgft.metrics.robust_aggregation import MIN_SITES, SiteLimits, size_limit
from fedgft.store import file_error, parse_json, require_encodable
from fedgft.validation import check_choice

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

FORMAT = "fedgft-schema-1"
EMPTY = "empty"  # the kind of a column without values
Description = dict[str, Any]
NO_COLUMNS = "the sites' tables have no column in common to learn from"
DAMAGED = "its description of its table is damaged"
IDENTIFIER = "identifier"  # key of a column that looks like an identifier of rows at the site
SUM_KEYS = ("count", "sum", "around")  # keys of a numeric column in a description
MAX_VALUE = float(np.finfo(np.float32).max)
MAX_ROWS = 10**10
OUTLIER_FACTOR = 100.0  # beyond this multiple of the usual scale, a site uses another unit or lies
SCALINGS = ("pooled", "median")
Warn = Callable[[str], None]
Sites = Mapping[str, Description]
Descriptions = Sequence[Description]
Kinds = dict[str, str]  # column name -> "numbers" or "text"
Reasons = dict[str, str]  # site name -> why the site does not fit
Scales = tuple[np.ndarray, np.ndarray]  # mean, and variance or spread, of each column


@dataclass(frozen=True)
class Schema:
    """How every site reads its rows.

    Parameters
    ----------
    label, group
        The label column, and the columns whose combinations are the groups.
    classes, groups
        Names of the classes and groups, in the order of their indices.
    encoder
        How the other columns become features.
    mean, spread
        (d,) a model receives ``(features - mean) / spread``.
    """

    label: str
    group: Names
    classes: Names
    groups: Names
    encoder: Encoder
    mean: np.ndarray
    spread: np.ndarray

    def read(
        self, frame: pl.DataFrame, *, source: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Names]:
        """Read a site's table.

        Returns
        -------
        features, labels, groups, notes
            (n, d) scaled features; (n,) class indices; (n,) group indices, -1 where the group is
            not recorded or unknown; notes on what was filled in.
        """
        for name in (self.label, *self.group):
            get_column(frame, name, source=source)
        features, notes = self.encoder.encode(frame, source=source)
        _check_labels(frame, self.label, source=source)
        labels = encode_levels(as_text(frame[self.label]), self.classes)
        _check_known(frame[self.label], labels, self.classes, source=source)
        cells = _combine_groups(frame, self.group)
        groups = encode_levels(cells, self.groups)
        unknown = int((groups < 0).sum()) - cells.null_count()
        if unknown > len(groups) / 2:
            _check_known(cells.alias(", ".join(self.group)), groups, self.groups, source=source)
        if unknown:
            note = "rows of groups that the federation does not know, counted as not recorded"
            notes = (*notes, f"{source}: {note}: {unknown}")
        return (features - self.mean) / self.spread, labels, groups, notes

    def to_json(self) -> str:
        """Return the schema as one line of JSON."""
        content = {"format": FORMAT, **vars(self), "encoder": json.loads(self.encoder.to_json())}
        return json.dumps(content | {"mean": self.mean.tolist(), "spread": self.spread.tolist()})

    def fingerprint(self) -> str:
        """Return the SHA-256 of the JSON: sites that agreed on a schema can pin it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_file(cls, path: Path) -> Schema:
        """Read a file that holds `to_json`."""
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise file_error(f"schema {path}", f"cannot be read ({reason})") from None
        return cls.from_json(text, source=str(path))

    @classmethod
    def from_json(cls, text: str, *, source: str = "schema") -> Schema:
        """Return what `to_json` wrote; raise FedgftError for any other text."""
        try:
            content = parse_json(text)
            if content["format"] != FORMAT:
                raise file_error(source, f"format is {content['format']!r}, not {FORMAT!r}")
            names = {key: _parse_names(content, key) for key in ("group", "classes", "groups")}
            schema = cls(
                label=require_encodable(content["label"]),
                encoder=Encoder.from_json(json.dumps(content["encoder"])),
                mean=np.array(content["mean"], np.float64),
                spread=np.array(content["spread"], np.float64),
                **names,
            )
        except FedgftError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise file_error(source, f"not a schema that fedgft wrote ({error})") from None
        scaling = (schema.mean, schema.spread)
        width = len(schema.encoder.columns)
        fits = all(part.shape == (width,) and np.isfinite(part).all() for part in scaling)
        if not fits or not (schema.spread > 0).all():
            raise file_error(source, "the scaling does not fit the columns")
        return schema


def _parse_names(content: dict[str, Any], key: str) -> Names:
    if not isinstance(content[key], list) or not content[key]:
        raise ValueError(f"'{key}' lists nothing")
    return tuple(map(require_encodable, content[key]))


def describe_table(
    frame: pl.DataFrame,
    *,
    label: str,
    group: str,
    leave_out: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Sequence[str] = (),
    min_rows: int = 10,
    source: str,
) -> Description:
    """Describe a site's table for the agreement on a schema.

    Parameters
    ----------
    frame
        The rows of the site.
    label, group
        The label column and the group column, or several as "race,sex".
    leave_out
        Columns that are not features.
    categorical
        Columns of numbers that are codes.
    missing
        Values that mean missing.
    min_rows
        Values that occur in fewer rows, and sums of fewer numbers, are left out.
    source
        What error messages call the table.

    Returns
    -------
    Description
        ``{"rows": n, "columns": {name: {"kind": ...}}, "labels": [...], "groups": [...]}``. The
        kind is "numbers" (with ``count``, ``sum``, ``around``), "text" (with ``levels``: rows per
        value) or "empty". A column that looks like an identifier of rows also has ``identifier``:
        True.
    """
    groups = split_group_columns(group, frame.columns)
    for name in (label, *groups):
        get_column(frame, name, source=source)
    frame = frame.with_columns(read_missing(column, missing) for column in frame.iter_columns())
    _check_labels(frame, label, source=source)
    if label in groups:
        raise FedgftError(f"{source}: column '{label}' is both the label and the group")
    if frame.height < min_rows:
        raise data_error(
            source, f"has {format_count(frame.height, 'row')}, too few to be described"
        )
    names = [name for name in frame.columns if name not in (label, *leave_out)]
    if not names:
        raise data_error(source, "no column is left to learn from")
    columns = {}
    for name in names:
        series = get_column(frame, name, source=source)
        if name in categorical and is_numeric(series):
            series = read_codes(series, source=source)
        elif name not in categorical:
            check_text(series, source=source)
        columns[name] = _describe_column(series, min_rows, source=source)
        if name not in categorical and explain_identifier(series, source=source):
            columns[name][IDENTIFIER] = True
    return {
        "rows": frame.height,
        "columns": columns,
        "labels": _find_frequent(as_text(frame[label]), min_rows, source=source),
        "groups": _find_frequent(_combine_groups(frame, groups), min_rows, source=source),
    }


def _check_labels(frame: pl.DataFrame, label: str, *, source: str) -> None:
    if absent := frame[label].null_count():
        problem = (
            f"label column '{label}' lacks {format_count(absent, 'value')}: take those rows out"
        )
        raise data_error(source, problem)


def _find_frequent(series: pl.Series, min_rows: int, *, source: str) -> list[str]:
    """Return the values that occur in at least `min_rows` rows, sorted."""
    counts = dict(series.drop_nulls().value_counts().iter_rows())
    if len(counts) > MAX_VALUES:
        problem = f"column '{series.name}' has {len(counts)} values: it is no label or group"
        raise data_error(source, f"{problem} of people")
    return sorted(value for value, number in counts.items() if number >= min_rows)


def _describe_column(series: pl.Series, min_rows: int, *, source: str) -> dict[str, Any]:
    if series.null_count() == len(series):
        return {"kind": EMPTY}  # at other sites it may be of any kind
    if not is_numeric(series):
        counts = dict(as_text(series).fill_null(MISSING).value_counts().iter_rows())
        return {"kind": "text", "levels": {v: int(n) for v, n in counts.items() if n >= min_rows}}
    known = parse_numbers(series, source=source).drop_nulls().to_numpy()
    if len(known) < min_rows:  # the sum of a few numbers reveals too much about them
        known = known[:0]
    # Sum the float32 values that the encoder passes to a model: they round a time by a minute.
    sums = Moments.of(known.astype(np.float32).astype(np.float64)[:, None])
    moments = {
        "count": len(known),
        "sum": sums.sum.item(),
        "around": sums.squared_deviations.item(),
    }
    return {"kind": "numbers", **moments}


def _combine_groups(frame: pl.DataFrame, columns: Sequence[str]) -> pl.Series:
    """Return the group of each row as text, "White & Female"; null where a part is missing."""
    parts = [as_text(frame[name]).alias(f"part{i}") for i, name in enumerate(columns)]
    return pl.DataFrame(parts).select(pl.concat_str(pl.all(), separator=" & ")).to_series()


def _check_known(series: pl.Series, codes: np.ndarray, names: Names, *, source: str) -> None:
    unknown = series.filter(codes < 0).drop_nulls()
    if len(unknown):
        known = f"the federation knows {', '.join(names)}"
        raise data_error(source, f"column '{series.name}' holds '{unknown[0]}'; {known}")


# Agreement: one schema from the descriptions of all sites


def agree_on_schema(
    sites: Mapping[str, Any],
    *,
    label: str,
    group: str,
    positive: str | None = None,
    classes: Sequence[str] = (),
    groups: Sequence[str] = (),
    keep_group: bool = False,
    keep: Sequence[str] = (),
    missing: Sequence[str] = (),
    scaling: str = "pooled",
    warn: Warn = lambda text: None,
) -> tuple[Schema, dict[str, str]]:
    """Make the schema that most sites fit.

    Parameters
    ----------
    sites
        Site name -> description (`describe_table`), as it was received.
    label, group
        The label column and the group column, or several as "race,sex".
    positive
        The label value that is class 1 of the two.
    classes, groups
        Names that all sites must use; default: the names that the sites have in common.
    keep_group
        Whether the group is a feature.
    keep
        Columns that are features although they look like identifiers at most sites.
    missing
        Values that mean missing at all sites.
    scaling
        "pooled": the mean and spread over all rows. "median": the median of the sites' means, and
        the median of their mean squares about it; no single site can move these medians far.
    warn
        Called with one sentence for each item that is left out because only one site names it, and
        for each column that looks like an identifier.

    Returns
    -------
    schema, refused
        The schema, and for each site that does not fit it the reason.
    """
    check_choice("scaling", scaling, SCALINGS)
    fitting, refused = _check_descriptions(sites)
    described = _find_common_columns(list(fitting.values()))
    group_columns = split_group_columns(group, list(described))
    kept = (*keep, *(group_columns if keep_group else ()))
    columns = _choose_features(fitting, described, group_columns, kept, warn)
    if fitting and not columns:
        raise FedgftError(NO_COLUMNS, kind="data")
    _refuse(_find_column_misfits(fitting, columns), fitting, refused)
    _refuse(_find_outliers(fitting, columns), fitting, refused)
    names: dict[str, Names] = {}
    for kind, given in (("labels", classes), ("groups", groups)):
        if not fitting:
            raise FedgftError(f"no site fits{_list_reasons(refused)}", kind="data")
        names[kind], misfits = _agree_on_names(fitting, kind, tuple(given), warn)
        _refuse(misfits, fitting, refused)
    ordered = names["labels"]
    if positive is not None:
        ordered = put_positive_last(ordered, positive, where=f"the sites' column '{label}'")
    if not fitting or len(ordered) < 2 or len(names["groups"]) < 2:
        found = f"the classes {', '.join(ordered) or '(none)'} and the groups "
        found += f"{', '.join(names['groups']) or '(none)'}: two of each are needed"
        remedy = f"(the settings classes and groups name them){_list_reasons(refused)}"
        raise FedgftError(f"all fitting sites together have {found} {remedy}", kind="data")
    fitting, columns = _drop_unshared_levels(fitting, columns, warn)
    encoder, (mean, spread) = _fit(list(fitting.values()), columns, scaling, tuple(missing))
    schema = Schema(
        label=label,
        group=group_columns,
        classes=ordered,
        groups=names["groups"],
        encoder=encoder,
        mean=mean,
        spread=spread,
    )
    return schema, refused


def _refuse(misfits: Reasons, fitting: dict[str, Description], refused: Reasons) -> None:
    """Move sites from the fitting ones to the refused ones, with the reasons."""
    refused |= misfits
    for site in misfits:
        del fitting[site]


def _list_reasons(refused: Reasons) -> str:
    return "".join(f"; {site}: {reason}" for site, reason in refused.items())


def _check_descriptions(sites: Mapping[str, Any]) -> tuple[dict[str, Description], Reasons]:
    """Return the valid descriptions, and for each other site why its description is invalid."""
    good = {}
    refused = {}
    for site, description in sites.items():
        try:
            _check_description(description)
            good[site] = description
        except FedgftError as error:
            refused[site] = f"{DAMAGED}: {error}"
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            refused[site] = DAMAGED
    return good, refused


def _check_description(description: Description) -> None:
    rows = description["rows"]
    possible = isinstance(rows, int) and 0 < rows < MAX_ROWS
    names = list(description["columns"])
    for kind in ("labels", "groups"):
        possible &= isinstance(description[kind], list)
        _check_count(len(description[kind]), MAX_VALUES, kind)
        names += description[kind]
    for name, column in description["columns"].items():
        if column["kind"] == EMPTY:
            continue
        if column["kind"] == "numbers":
            numbers = [column[key] for key in SUM_KEYS]
            possible &= all(type(number) in (int, float) for number in numbers)
            count, total, around = map(float, numbers)
            possible &= 0 <= count <= rows and abs(total) <= count * MAX_VALUE
            possible &= 0 <= around <= 4 * count * MAX_VALUE**2
        else:
            levels = column["levels"]
            _check_count(len(levels), MAX_LEVELS, f"levels of '{name}'")
            possible &= column["kind"] == "text" and sum(levels.values()) <= rows
            possible &= all(isinstance(n, int) and n > 0 for n in levels.values())
            names += levels
    for name in names:
        require_encodable(name)
    if not possible or len(names) > MAX_INDICATORS:
        raise FedgftError("no table has such numbers", kind="data")


def _check_count(found: int, limit: int, what: str) -> None:
    if found > limit:
        raise FedgftError(f"it names {found:,} {what}, and {limit:,} is the most", kind="data")


def _find_common_columns(sites: Descriptions) -> Kinds:
    """Return the most common set of columns, and the kind that most sites give each column.

    Columns that are empty everywhere are left out.
    """
    if not sites:
        return {}
    sets = [frozenset(description["columns"]) for description in sites]
    common = Counter(sets).most_common(1)[0][0]
    kinds = {}
    for name in sites[sets.index(common)]["columns"]:  # in the order of the first such site
        counts = Counter(d["columns"][name]["kind"] for d in sites if name in d["columns"])
        del counts[EMPTY]
        if counts:
            kinds[name] = counts.most_common(1)[0][0]
    return kinds


def _choose_features(sites: Sites, columns: Kinds, group: Names, kept: Names, warn: Warn) -> Kinds:
    """Return the columns without the group, identifiers of rows and names of the sites.

    A column looks like an identifier if more than half of the sites that have values in it say so:
    no single site decides. It names the sites if each has one value, and no two the same.
    """
    chosen = {name: kind for name, kind in columns.items() if name in kept or name not in group}
    for name in [name for name in chosen if name not in kept]:
        sent = [d["columns"][name] for d in sites.values() if name in d["columns"]]
        sent = [column for column in sent if column["kind"] != EMPTY]
        flagged = sum(column.get(IDENTIFIER) is True for column in sent)
        if 2 * flagged > len(sent):
            where = f"at {flagged} of {len(sent)} sites"
            warn(
                f"column '{name}' is not a feature: it looks like an identifier {where} (the "
                "setting keep makes it one)"
            )
            del chosen[name]
        elif chosen[name] == "text" and _names_sites(sites, name):
            warn(f"column '{name}' is not a feature: it has one value at each site")
            del chosen[name]
    return chosen


def _names_sites(sites: Sites, name: str) -> bool:
    """Whether a column of text has one value at each site, and another one at every other site."""
    seen = set()
    for description in sites.values():
        levels = description["columns"].get(name, {}).get("levels", {})
        if list(levels.values()) != [description["rows"]]:
            return False
        seen |= set(levels)
    return len(seen) == len(sites) > 1


def _find_column_misfits(sites: Sites, columns: Kinds) -> Reasons:
    """Find sites where a column is missing or of another kind; extra columns are ignored."""
    misfits: dict[str, str] = {}
    for site, sent in ((site, description["columns"]) for site, description in sites.items()):
        for name, kind in reversed(list(columns.items())):  # the first column's reason is kept
            if name not in sent:
                misfits[site] = f"it has no column '{name}'{suggest_name(name, list(sent))}"
            elif (found := sent[name]["kind"]) not in (kind, EMPTY):
                misfits[site] = f"its column '{name}' holds {found}, at other sites {kind}"
    return misfits


def _find_outliers(sites: Sites, columns: Kinds) -> Reasons:
    """Find sites where a column of numbers has a mean or spread of another order of magnitude."""
    outliers: dict[str, str] = {}
    for name in (name for name, kind in columns.items() if kind == "numbers"):
        sums = {site: description["columns"][name] for site, description in sites.items()}
        sums = {site: sent for site, sent in sums.items() if sent.get("count", 0) > 0}
        if len(sums) < MIN_SITES:
            continue
        mean = {site: sent["sum"] / sent["count"] for site, sent in sums.items()}
        spread = {site: (sent["around"] / sent["count"]) ** 0.5 for site, sent in sums.items()}
        middle = float(np.median(list(mean.values())))
        usual = float(np.median(list(spread.values()))) + abs(middle)
        for site in sums:
            distance = max(abs(mean[site] - middle), spread[site])
            if usual > 0 and distance > OUTLIER_FACTOR * usual:
                found = f"has mean {mean[site]:.3g} and spread {spread[site]:.3g}"
                reason = f"{found}, where the sites' median is {middle:.3g}: another unit?"
                outliers.setdefault(site, f"its column '{name}' {reason}")
    return outliers


def _find_unshared(named: Mapping[str, set[str]]) -> dict[str, str]:
    """Return {name: site} for names that only one site has; empty for fewer than three sites."""
    if len(named) < MIN_SITES:
        return {}
    times = Counter(name for names in named.values() for name in names)
    return {name: site for site, names in named.items() for name in names if times[name] == 1}


def _drop_unshared_levels(sites: Sites, columns: Kinds, warn: Warn) -> tuple[Sites, Kinds]:
    """Drop levels that only one site names; return the descriptions and the remaining columns."""
    kept = dict(sites)
    left = dict(columns)
    for name in (name for name, kind in columns.items() if kind == "text"):
        named = {site: set(d["columns"][name].get("levels", {})) for site, d in kept.items()}
        unshared = _find_unshared({site: names for site, names in named.items() if names})
        for site in dict.fromkeys(unshared[level] for level in sorted(unshared)):
            levels = sorted(level for level in unshared if unshared[level] == site)
            number = format_count(len(levels), "level")
            warn(
                f"site '{site}' alone names {number} of column '{name}', such as "
                f"'{levels[0]}': left out (a schema that was agreed on may name them)"
            )
            described = kept[site]["columns"]
            shared = {v: n for v, n in described[name]["levels"].items() if v not in unshared}
            column = described[name] | {"levels": shared}
            kept[site] = kept[site] | {"columns": described | {name: column}}
        if unshared and not any(names - set(unshared) for names in named.values()):
            warn(f"column '{name}' is left out: no two sites name the same level of it")
            del left[name]
    if not left:
        raise FedgftError(NO_COLUMNS, kind="data")
    return kept, left


def _agree_on_names(sites: Sites, kind: str, given: Names, warn: Warn) -> tuple[Names, Reasons]:
    """Agree on the names of the classes or groups.

    Names that the user gives apply to all sites. Otherwise, sites that share a name are linked, and
    the names are those of the largest set of linked sites, except names that only one site has.

    Parameters
    ----------
    sites
        Site name -> description.
    kind
        "labels" or "groups". Rows of a group that is left out count as not recorded; a site with a
        label that is left out is refused.
    given
        The names that the user gives; empty if there are none.
    warn
        Called with one sentence for each name that only one site has.

    Returns
    -------
    names, misfits
        The names, numbers first; and for each site that has other names, the reason to refuse it.
    """
    names_by_site = {site: set(map(str, description[kind])) for site, description in sites.items()}
    agreed = set(given) or _unite_linked(list(names_by_site.values()))
    unshared = {}
    if not given:
        unshared = _find_unshared(
            {site: names for site, names in names_by_site.items() if names <= agreed}
        )
    if unshared and len(agreed - set(unshared)) < 2:  # nothing would be left to compare
        for name, site in sorted(unshared.items()):
            warn(f"'{name}' of the {kind} is named by site '{site}' alone")
        unshared = {}
    agreed -= set(unshared)
    for name, site in sorted(unshared.items()) if kind == "groups" else ():
        names_by_site[site] = names_by_site[site] - {name}
        warn(
            f"group '{name}' is named by site '{site}' alone and is left out: its rows count as "
            "not recorded. If it is real, name all groups (the setting groups)"
        )
    known = ", ".join(sorted(agreed))
    misfits = {
        site: f"its {kind} are {', '.join(sorted(names))}; the federation's are {known}"
        for site, names in names_by_site.items()
        if names - agreed
    }
    return given or tuple(sorted(agreed, key=_sort_key)), misfits


def _unite_linked(sets: Sequence[set[str]]) -> set[str]:
    """Link sets that share a name; return the union of the linked component with the most sets."""
    unions: list[tuple[int, set[str]]] = []
    for names in sets:
        linked = [union for union in unions if union[1] & names]
        apart = [union for union in unions if not union[1] & names]
        size = 1 + sum(number for number, _ in linked)
        unions = [*apart, (size, names.union(*(others for _, others in linked)))]
    return max(unions, key=lambda union: (union[0], len(union[1])))[1]


def _sort_key(name: str) -> tuple[int, float, str]:
    """Return a sort key that puts numbers, in numeric order, before text."""
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def _fit(
    sites: Descriptions, columns: Kinds, scaling: str, missing: Names
) -> tuple[Encoder, Scales]:
    """Fit the encoder and the scaling to the sums of the sites.

    Returns
    -------
    encoder, (mean, spread)
        Missing numbers are filled with the mean of their column, and an indicator says that they
        are missing if several rows lack them. An indicator with share p has mean p and variance
        p (1 - p).
    """
    limit = size_limit([description["rows"] for description in sites], SiteLimits())
    weights = np.array([min(1.0, limit / description["rows"]) for description in sites])
    numeric = [name for name, kind in columns.items() if kind == "numbers"]
    compute = _compute_medians if scaling == "median" else _compute_pooled
    scales = dict(zip(numeric, zip(*compute(sites, numeric, weights), strict=True), strict=True))
    fields: list[Field] = []
    moments = []
    for name in columns:
        if name in scales:
            absent = _count_missing(sites, name)
            rows = sum(description["rows"] for description in sites)
            several = (absent > 0).sum() >= min(2, len(sites) - 1)  # no single site decides
            marked = bool(several and MIN_MISSING <= absent.sum() < rows)
            fields.append(Numeric(name, float(scales[name][0]), marked, missing))
            moments.append(scales[name])
            shares = _compute_shares(sites, absent[:, None], weights, scaling)[:marked]
        else:
            levels, shares = _fit_levels(sites, name, weights, scaling)
            fields.append(Categorical(name, levels, shares=tuple(shares.tolist()), missing=missing))
        moments += zip(shares, shares * (1 - shares), strict=True)
    mean, variance = np.array(moments, np.float64).reshape(-1, 2).T.copy()
    return Encoder(tuple(fields)), (mean, compute_spread(mean, variance))


def _get_moments(sites: Descriptions, names: Sequence[str]) -> list[Moments]:
    """Return the sums of these columns at each site; an empty column has the count 0."""
    shape = (len(sites), len(SUM_KEYS), len(names))
    sent = [d["columns"][name].get(key, 0) for d in sites for key in SUM_KEYS for name in names]
    return [Moments(*table) for table in np.array(sent, np.float64).reshape(shape)]


def _compute_pooled(sites: Descriptions, names: list[str], weights: np.ndarray) -> Scales:
    """Return mean and variance over all sites; `weights`: share of each site's rows that counts."""
    weighted = (
        Moments(m.count * weight, m.sum * weight, m.squared_deviations * weight)
        for m, weight in zip(_get_moments(sites, names), weights.tolist(), strict=True)
    )
    total = reduce(add, weighted)
    rows = sum(d["rows"] * weight for d, weight in zip(sites, weights.tolist(), strict=True))
    return total.mean, total.squared_deviations / rows


def _compute_medians(sites: Descriptions, names: list[str], weights: np.ndarray) -> Scales:
    """Return the median of the sites' means, and the median of their mean squares about it."""
    each = _get_moments(sites, names)
    known = np.array([m.count > 0 for m in each])
    means = np.where(known, np.array([m.mean for m in each]), np.nan)
    inside = np.array([m.squared_deviations / np.maximum(m.count, 1) for m in each])
    mean = _median(means)
    return mean, _median(np.where(known, inside + (means - mean) ** 2, np.nan))


def _median(values: np.ndarray) -> np.ndarray:
    """Return the median over the sites that have a value; 0 where none has."""
    known = np.isfinite(values).any(0)
    return np.where(known, np.nanmedian(np.where(known, values, 0.0), axis=0), 0.0)


def _count_missing(sites: Descriptions, name: str) -> np.ndarray:
    """Return how many rows of each site lack a number, as far as its description says so."""
    counts = [d["columns"][name].get("count", 0) for d in sites]
    return np.array([d["rows"] for d in sites], float) - np.array(counts, float)


def _fit_levels(
    sites: Descriptions, name: str, weights: np.ndarray, scaling: str
) -> tuple[Names, np.ndarray]:
    """Return the levels of a text column, and the share of rows at each level except the first."""
    counts_by_site = [d["columns"][name].get("levels", {}) for d in sites]
    levels = sorted({level for counts in counts_by_site for level in counts})
    if not levels:
        problem = f"column '{name}' has no value that is frequent at any site"
        raise FedgftError(f"{problem}: leave it out (`leave_out`)", kind="data")
    counts = np.array([[counts.get(v, 0) for v in levels[1:]] for counts in counts_by_site], float)
    return tuple(levels), _compute_shares(sites, counts, weights, scaling)


def _compute_shares(
    sites: Descriptions, counts: np.ndarray, weights: np.ndarray, scaling: str
) -> np.ndarray:
    """Return the shares of the rows, (m,), that `counts`, (sites, m), are of each site's rows."""
    rows = np.array([d["rows"] for d in sites], float)[:, None]
    if scaling == "median":
        return np.median(counts / rows, axis=0)
    weight = weights[:, None]
    return (counts * weight).sum(0) / (rows * weight).sum()
