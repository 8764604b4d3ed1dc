"""A decision rule: how scores, or decisions, of a finished model become decisions.

A rule is a table. For each group (and for each site, if sites have rules of their own) it holds a
step function from the score to the probability of a positive decision. A threshold is the step
function from 0 to 1; a randomized rule has steps between. The coin of a randomized rule is a keyed
hash of the person's identifier, so the same person always gets the same decision.

The file is plain JSON, and docs/rules.md describes it so that another language can apply it.
"""

import hashlib
import hmac
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedgft.auditing.arrays import split_attributes, to_series
from fedgft.data.encode import as_text
from fedgft.errors import FedgftError
from fedgft.formatting import format_count, join_names, printable
from fedgft.rules.group_model import GroupModel
from fedgft.site_sums import Group, group_sort_key
from fedgft.store import atomic_write, expand_user, parse_json, read_text_file
from fedgft.sums import RecordReader, is_text
from fedgft.validation import check_choice, check_path

FORMAT = "fedgft-rule-1"
INPUTS = ("score", "decision")
MAX_BYTES = 256 * 2**20  # largest size of a rule's file
MAX_STEPS = 10_000  # thresholds of one cell
KEY_BYTES = 32
COIN_BITS = 53  # a float holds every whole number of so many bits
LARGEST = sys.float_info.max  # JSON may hold larger whole numbers

Cell = tuple[str | None, Group]
"The site (None: every site) and the values of the group columns."


@dataclass(frozen=True)
class Acceptance:
    """The probability of a positive decision, as a step function of the score.

    Parameters
    ----------
    thresholds
        Where the probability changes, increasing. A score that equals a threshold is above it.
    probabilities
        The probability below the first threshold, between the first two, ..., from the last on.
    """

    thresholds: tuple[float, ...] = (0.5,)
    probabilities: tuple[float, ...] = (0.0, 1.0)

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Return the probability for each score."""
        return np.array(self.probabilities)[np.searchsorted(self.thresholds, scores, side="right")]

    @property
    def is_random(self) -> bool:
        """Whether some scores are decided by a coin."""
        return any(0 < p < 1 for p in self.probabilities)

    def describe(self) -> str:
        """Return the step function in words, such as ``from 0.41 on``."""
        if not self.thresholds:
            return {0.0: "never", 1.0: "always"}.get(
                self.probabilities[0], f"{self.probabilities[0]:.1%} of all"
            )
        if self.probabilities == (0.0, 1.0):
            return f"from {self.thresholds[0]:.4g} on"
        ends = [*self.thresholds, None]
        parts = []
        for low, high, p in zip(ends, ends[1:], self.probabilities[1:], strict=False):
            share = "all" if p == 1 else f"{p:.1%}"
            span = "on" if high is None else f"to {high:.4g}"
            parts.append(f"{share} from {low:.4g} {span}")
        if self.probabilities[0] > 0:
            parts.insert(0, f"{self.probabilities[0]:.1%} below {self.thresholds[0]:.4g}")
        return " and ".join(parts)

    def to_record(self) -> dict[str, Any]:
        """Return the step function as lists of numbers."""
        return {"thresholds": list(self.thresholds), "accept": list(self.probabilities)}

    @classmethod
    def from_record(cls, reader: RecordReader) -> "Acceptance":
        """Read what `to_record` wrote."""
        thresholds = reader.get("thresholds", list)
        probabilities = reader.get("accept", list)
        for name, values in (("thresholds", thresholds), ("accept", probabilities)):
            if len(values) > MAX_STEPS or not all(map(_is_number, values)):
                reader.fail(name, "must be a list of finite numbers")
        if any(a >= b for a, b in pairwise(thresholds)):
            reader.fail("thresholds", "must increase")
        if len(probabilities) != len(thresholds) + 1:
            reader.fail("accept", f"must hold {len(thresholds) + 1} probabilities")
        if not all(0 <= p <= 1 for p in probabilities):
            reader.fail("accept", "must hold probabilities from 0 to 1")
        return cls(tuple(map(float, thresholds)), tuple(map(float, probabilities)))


@dataclass(frozen=True, eq=False)
class DecisionRule:
    """A fair decision rule for the scores or the decisions of any model with two classes.

    `fedgft.adjust` finds the best rule from sums. `fedgft.load_rule` reads one from a file.

    Parameters
    ----------
    classes
        The names of the negative and of the positive class.
    attributes
        The names of the group columns that the rule reads; none for a group-blind rule.
    cells
        The step function of each group, or of each group at each site.
    unrecorded
        The step function for people whose group is not recorded.
    reads
        "score" or "decision": what the step functions take. A decision counts as 0 or 1.
    key
        The key of the coins, as hexadecimal text; "" for a rule without coins.
    group_model
        For a group-blind rule: the model of group and label that bends the threshold. None: the
        rule reads the group.
    fitted
        What the rule was fitted on: date, targets, digests of the sums.
    expected
        What to expect: accuracy and gaps, before and after, with 95% intervals.

    Examples
    --------
    >>> import fedgft
    >>> y = [1, 0, 1, 0, 1, 0, 1, 0]
    >>> scores = [0.9, 0.6, 0.7, 0.2, 0.6, 0.3, 0.4, 0.1]
    >>> site = fedgft.measure(y, scores, sensitive_features=list("ffffmmmm"), site="north")
    >>> rule = fedgft.adjust(site, target={"sp": 0.0})
    >>> rule
    DecisionRule(threshold by group: f from 0.65 on, m from 0.35 on; sp 0)
    >>> rule.decide([0.65, 0.65, 0.35], ["f", "m", "m"]).tolist()
    [True, True, True]
    """

    classes: tuple[str, str]
    attributes: tuple[str, ...]
    cells: Mapping[Cell, Acceptance]
    unrecorded: Acceptance = Acceptance()
    reads: str = "score"
    key: str = field(default="", repr=False)
    group_model: GroupModel | None = None
    fitted: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        kind = "group-blind" if self.is_blind else f"{self._name_steps()} by group"
        kind += " and site" if self.per_site else ""
        parts = [f"{self._name_cell(cell)} {a.describe()}" for cell, a in self.cells.items()]
        targets = ", ".join(f"{k} {v:g}" for k, v in self.fitted.get("target", {}).items())
        listed = "" if self.is_blind else f": {join_names(parts)}"
        return printable(f"DecisionRule({kind}{listed}{'; ' * bool(targets)}{targets})")

    def _name_steps(self) -> str:
        if self.reads == "decision":
            return "changed decisions"
        return "randomized thresholds" if self.is_random else "threshold"

    def _name_cell(self, cell: Cell) -> str:
        site, group = cell
        return " at ".join(filter(None, (" & ".join(map(str, group)), site)))

    @property
    def is_blind(self) -> bool:
        """Whether the rule decides without the group."""
        return self.group_model is not None

    @property
    def per_site(self) -> bool:
        """Whether sites have step functions of their own."""
        return any(site is not None for site, _ in self.cells)

    @property
    def is_random(self) -> bool:
        """Whether some decisions are drawn by a coin, which needs identifiers."""
        return any(each.is_random for each in (*self.cells.values(), self.unrecorded))

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that have step functions of their own."""
        return tuple(dict.fromkeys(site for site, _ in self.cells if site is not None))

    # Decisions

    def decide(
        self,
        scores: Any,
        groups: Any = None,
        *,
        sites: Any = None,
        ids: Any = None,
        features: Any = None,
        names: bool = False,
    ) -> np.ndarray:
        """Return whether the decision about each person is positive, (n,) bool.

        Parameters
        ----------
        scores
            The probability of the positive class by the model, one per person. For a rule that
            changes decisions (`reads`), the decisions: names of the classes, or truth values.
        groups
            The group of each person: a column, or a table or dict of the columns `attributes`. A
            missing value is a group that is not recorded. A group-blind rule takes none.
        sites
            The site of each person, or one name for all; only if the rule differs by site.
        ids
            An identifier of each person, such as a customer number; only if the rule is randomized.
            The same identifier always gets the same coin.
        features
            The table of the columns that a group-blind rule reads.
        names
            Whether to return the names of the classes, (n,), instead of truth values.
        """
        decided = self._toss(
            self.probabilities(scores, groups, sites=sites, features=features), ids
        )
        return np.array(self.classes)[decided.astype(int)] if names else decided

    def _toss(self, chance: np.ndarray, ids: Any) -> np.ndarray:
        """Return the decisions with these probabilities, by the coins of these identifiers."""
        if not self.is_random:
            return chance >= 1.0
        if ids is None:
            text = "is missing: the rule is randomized, and its coin is a hash of an identifier"
            raise FedgftError(text, field="ids", kind="missing")
        series = to_series("ids", ids)
        texts = as_text(series.fill_nan(None) if series.dtype.is_float() else series)
        if len(texts) != len(chance):
            text = f"has {len(texts)} values, scores has {len(chance)}"
            raise FedgftError(text, field="ids")
        if texts.null_count():
            text = f"lacks {format_count(texts.null_count(), 'value')}: each person needs one"
            raise FedgftError(text, field="ids", kind="data")
        decided = chance >= 1.0
        drawn = np.flatnonzero((chance > 0) & (chance < 1))
        decided[drawn] = toss_coins(self.key, texts.gather(drawn).to_list()) < chance[drawn]
        return decided

    def probabilities(
        self, scores: Any, groups: Any = None, *, sites: Any = None, features: Any = None
    ) -> np.ndarray:
        """Return the probability of a positive decision, (n,): 0 or 1 without coins.

        The parameters are those of `decide`.
        """
        values = self._read_scores(scores)
        if self.group_model is not None:
            if groups is not None:
                text = "were given, and the rule is group-blind: it must not see them"
                raise FedgftError(text, field="groups", kind="conflict")
            bent = values - self.group_model.bend(values, features)
            (acceptance,) = self.cells.values()
            return acceptance(bent)
        frame = self._read_groups(groups, sites, len(values))
        out = np.empty(len(values))
        for cell, rows in self._split_cells(frame):
            out[rows] = self._find(cell, len(rows))(values[rows])
        return out

    def _read_scores(self, scores: Any) -> np.ndarray:
        """Return scores as numbers in [0, 1], and decisions as 0 and 1."""
        series = to_series("scores", scores)
        if series.dtype.is_float():
            series = series.fill_nan(None)
        if series.null_count():
            text = f"lacks {format_count(series.null_count(), 'value')}: each person needs one"
            raise FedgftError(text, field="scores", kind="data")
        if self.reads == "decision":
            return self._read_decisions(series)
        if not (series.dtype.is_numeric() or series.dtype == pl.Boolean):
            text = f"must be probabilities, not {series.dtype}"
            raise FedgftError(text, field="scores", kind="data")
        values = series.cast(pl.Float64).to_numpy()
        outside = (values < 0) | (values > 1)
        if outside.any():
            wrong = values[outside][0]
            text = f"holds {wrong:g}: the rule takes probabilities, from 0 to 1"
            raise FedgftError(text, field="scores", kind="data")
        return values

    def _read_decisions(self, series: pl.Series) -> np.ndarray:
        negative, positive = self.classes
        if series.dtype == pl.Boolean:
            return series.cast(pl.Float64).to_numpy()
        text = as_text(series)
        if text.is_in(["False", "True"]).all():  # a list of truth values
            text = text.replace({"False": negative, "True": positive})
        unknown = text.filter(~text.is_in([negative, positive]))
        if len(unknown):
            problem = f"holds {unknown[0]!r}: the rule changes decisions {negative} and {positive}"
            raise FedgftError(problem, field="scores", kind="data")
        return (text == positive).cast(pl.Float64).to_numpy()

    def _read_groups(self, groups: Any, sites: Any, rows: int) -> pl.DataFrame:
        """Return a table of texts: the site, if the rule needs it, and the group columns."""
        if groups is None:
            text = f"is missing: the rule needs {' and '.join(self.attributes)} of each person"
            raise FedgftError(text, field="groups", kind="missing")
        found = split_attributes(groups)
        unnamed = "group" in found or self.attributes == ("group",)  # an array has no name
        if len(self.attributes) == 1 and len(found) == 1 and unnamed:
            found = {self.attributes[0]: next(iter(found.values()))}
        missing = [name for name in self.attributes if name not in found]
        if missing:
            known = join_names(list(found))
            text = f"lacks the column {missing[0]!r} that the rule reads, and has {known}"
            raise FedgftError(text, field="groups", kind="data")
        columns = {f"a{i}": to_series(n, found[n]) for i, n in enumerate(self.attributes)}
        if self.per_site:
            if sites is None:
                text = "is missing: the rule differs by site"
                raise FedgftError(text, field="sites", kind="missing")
            same = isinstance(sites, str)
            columns["site"] = to_series("sites", [sites] * rows if same else sites)
        texts = {}
        for name, series in columns.items():
            if len(series) != rows:
                field = "sites" if name == "site" else "groups"
                raise FedgftError(f"has {len(series)} values, scores has {rows}", field=field)
            texts[name] = as_text(series.fill_nan(None) if series.dtype.is_float() else series)
        return pl.DataFrame(texts)

    def _split_cells(self, frame: pl.DataFrame) -> Iterator[tuple[Cell, np.ndarray]]:
        """Yield each combination of values that occurs, and the positions of its rows."""
        names = [f"a{i}" for i in range(len(self.attributes))]
        parts = frame.with_row_index("row").group_by(
            [name for name in ("site", *names) if name in frame.columns], maintain_order=True
        )
        for values in parts.agg("row").iter_rows(named=True):
            group = tuple(values[name] for name in names)
            yield (values.get("site"), group), np.array(values["row"])

    def _find(self, cell: Cell, count: int) -> Acceptance:
        """Return the step function of a cell of `count` rows; a `FedgftError` if there is none."""
        site, group = cell
        rows = format_count(count, "row")
        if self.per_site and site not in self.sites:
            known = join_names(list(self.sites))
            text = f"lacks the site in {rows}" if site is None else f"holds {site!r} in {rows}"
            text += f", and the rule was fitted at {known} only"
            raise FedgftError(text, field="sites", kind="data")
        if None in group:
            return self.unrecorded
        if cell not in self.cells:
            name = " & ".join(map(str, group))
            known = [self._name_cell((None, g)) for s, g in self.cells if s == site]
            text = f"holds {name!r} as {' & '.join(self.attributes)} in {rows}"
            text += f" of site {site!r}" if self.per_site else ""
            text += f", a group that the rule does not know; it knows {join_names(known)}"
            raise FedgftError(text, field="groups", kind="data")
        return self.cells[cell]

    # Files

    def to_json(self) -> str:
        """Return the text of the rule's file; see docs/rules.md."""
        cells = []
        for (site, group), acceptance in self.cells.items():
            named = {} if site is None else {"site": site}
            cells.append({**named, "group": list(group), **acceptance.to_record()})
        record = {
            "negative": self.classes[0],
            "positive": self.classes[1],
            "reads": self.reads,
            "columns": list(self.attributes),
            "cells": cells,
            "unrecorded": self.unrecorded.to_record(),
            "key": self.key,
            "group_model": None if self.group_model is None else self.group_model.to_record(),
            "fitted": dict(self.fitted),
            "expected": dict(self.expected),
        }
        head = {"format": FORMAT, "digest": _digest(record)}
        lines = []
        for name, value in (head | record).items():
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            if name == "cells" and value:
                body = ",\n    ".join(json.dumps(each, ensure_ascii=False) for each in value)
                text = f"[\n    {body}\n  ]"
            lines.append(f"  {json.dumps(name)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "text") -> "DecisionRule":
        """Read and check the text of a rule's file; errors begin with `source`."""
        try:
            found = parse_json(text)
        except ValueError as error:
            problem = f"{source}: not a decision rule: damaged, or not JSON ({error})"
            raise FedgftError(problem, kind="file") from None
        form = found.get("format") if isinstance(found, dict) else None
        if not isinstance(form, str) or not form.startswith("fedgft-rule-"):
            problem = f"{source}: not a decision rule that `fedgft adjust` wrote"
            raise FedgftError(problem, kind="file")
        if form != FORMAT:
            problem = f"{source}: format is {form[:40]!r}, this version of fedgft reads {FORMAT!r}"
            raise FedgftError(problem, kind="file")
        record = {k: v for k, v in found.items() if k not in ("format", "digest")}
        if found.get("digest") != _digest(record):
            problem = "was changed after `fedgft adjust` wrote it: its digest does not match"
            raise FedgftError(f"{source}: {problem}; fit the rule again", kind="file")
        return _read_rule(RecordReader(record, source))

    def save(self, path: str | Path) -> Path:
        """Write the rule to a file that only its owner can read; return its path.

        The file holds the key of the coins: whoever knows it can compute the coin of every
        identifier. An existing file is replaced only when the new one is complete.
        """
        file = expand_user(check_path("path", path))
        text = self.to_json()
        with atomic_write(file, private=True) as part:
            part.write(text.encode())
        return file

    def with_key(self, key: str) -> "DecisionRule":
        """Return the rule with another key of the coins (hexadecimal text of 32 bytes or more)."""
        return replace(self, key=check_key(key))


def load_rule(path: str | Path) -> DecisionRule:
    """Read and check a decision rule that `DecisionRule.save` or `fedgft adjust` wrote.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    DecisionRule
        The rule.

    Examples
    --------
    >>> import tempfile
    >>> import fedgft
    >>> site = fedgft.measure(
    ...     [1, 0, 1, 0], [0.9, 0.4, 0.6, 0.1], sensitive_features=list("ffmm"), site="north"
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = fedgft.adjust(site, target={"sp": 0.1}).save(f"{folder}/rule.json")
    ...     fedgft.load_rule(path).attributes
    ('group',)
    """
    content = read_text_file(check_path("path", path), what="a decision rule", most=MAX_BYTES)
    return DecisionRule.from_json(content.decode("utf-8"), source=str(path))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST  # also False for NaN


def toss_coins(key: str, ids: Sequence[str]) -> np.ndarray:
    """Return a number in [0, 1) for each identifier: the first 53 bits of its HMAC-SHA-256."""
    secret = bytes.fromhex(key)
    digests = b"".join(hmac.digest(secret, each.encode(), "sha256")[:8] for each in ids)
    return (np.frombuffer(digests, ">u8") >> (64 - COIN_BITS)) / 2.0**COIN_BITS


def check_key(key: Any) -> str:
    """Return the key of the coins, or raise a `FedgftError`."""
    try:
        valid = isinstance(key, str) and len(bytes.fromhex(key)) >= KEY_BYTES
    except ValueError:
        valid = False
    if not valid:
        text = f"must be hexadecimal text of at least {KEY_BYTES} bytes"
        raise FedgftError(text, field="key")
    return key


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _read_rule(reader: RecordReader) -> DecisionRule:
    """Read the fields of a rule."""
    attributes = reader.names("columns")
    blind = reader.record.get("group_model") is not None
    cells: dict[Cell, Acceptance] = {}
    for i, record in enumerate(reader.get("cells", list)):
        if not isinstance(record, dict):
            reader.fail(f"cells[{i}]", "must be an object")
        cell = RecordReader(record, reader.source, f"cells[{i}].")
        group = cell.get("group", list)
        if len(group) != len(attributes) or not all(map(is_text, group)):
            cell.fail("group", f"must list {len(attributes)} names")
        site = cell.text("site") if "site" in record else None
        if (site, tuple(group)) in cells:
            reader.fail(f"cells[{i}]", "is the second one of this group")
        cells[site, tuple(group)] = Acceptance.from_record(cell)
    if len({site is None for site, _ in cells}) != 1 or (blind and len(cells) != 1):
        reader.fail("cells", "must name a site everywhere or nowhere, and hold at least one cell")
    key = reader.get("key", str)
    fitted = reader.child("fitted")
    for name in ("target", "local"):
        limits = fitted.record.get(name, {})
        if not isinstance(limits, dict) or not all(map(_is_number, limits.values())):
            fitted.fail(name, "must map metrics to numbers")
    rule = DecisionRule(
        classes=(reader.text("negative"), reader.text("positive")),
        attributes=attributes,
        cells=dict(sorted(cells.items(), key=_sort_key)),
        unrecorded=Acceptance.from_record(reader.child("unrecorded")),
        reads=check_choice(f"{reader.source}: reads", reader.text("reads"), INPUTS),
        key=key,
        group_model=GroupModel.from_record(reader.child("group_model")) if blind else None,
        fitted=fitted.record,
        expected=reader.get("expected", dict),
    )
    if rule.is_random:
        try:
            check_key(key)
        except FedgftError as error:
            reader.fail("key", error.message.removeprefix("`key` "))
    return rule


def _sort_key(item: tuple[Cell, Acceptance]) -> tuple:
    (site, group), _ = item
    return (site or "", group_sort_key(group))
