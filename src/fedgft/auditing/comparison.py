"""`compare` makes a comparison of two audits: the change of every gap and rate.

A comparison treats the two audits as independent. If both models were measured on the same rows,
their errors are correlated, and the true intervals are narrower than those reported.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from fedgft.auditing.notebook import describe, render_in_notebook
from fedgft.auditing.report_files import save_report
from fedgft.auditing.summary import MetricSummary, Number, Summary, views_of
from fedgft.auditing.verdicts import rate_name
from fedgft.errors import FedgftError
from fedgft.formatting import Report, Table, Verdict, format_interval, format_points
from fedgft.metrics import CATALOG
from fedgft.metrics.intervals import difference
from fedgft.validation import format_value

COMPARISON_FORMAT = "fedgft-comparison-1"


class Change(TypedDict):
    """An old and a new number, each with its limits, and new - old with its 95% interval.

    `old` and `new` have the keys ``low``, ``high`` and either ``gap`` or ``rate``.
    """

    old: dict[str, Number]
    new: dict[str, Number]
    change: Number
    low: Number
    high: Number


class MetricChange(Change):
    """The change of a gap, and the changes of the rates by group.

    `pair` holds, for the old and for the new audit, the two groups that differ most. `groups` is
    empty if the two gaps are under different conditions of the metric.
    """

    pair: dict[str, list[str] | None]
    same_groups: bool
    groups: dict[str, Change]


class ComparisonSummary(TypedDict):
    """All changes. `views` maps the title of each view to the changes by metric."""

    format: str
    groups: str
    accuracy: Change
    views: dict[str, dict[str, MetricChange]]
    warnings: list[str]


@dataclass(frozen=True, repr=False)
class Comparison:
    """The change from one audit to another: the result of `compare`.

    Parameters
    ----------
    summary
        All changes: see `ComparisonSummary`.
    """

    summary: ComparisonSummary

    def __repr__(self) -> str:
        return describe(self.lead(), self.verdict())

    def _repr_html_(self) -> str:
        return render_in_notebook(self.report())

    @property
    def warnings(self) -> list[str]:
        """The warnings that a reader should see before the numbers."""
        return self.summary["warnings"]

    def to_dict(self) -> ComparisonSummary:
        """All changes as values that JSON can hold."""
        return self.summary

    def lead(self) -> str:
        """Return one sentence that says what is compared."""
        return "Two audits side by side. All gaps are those of decisions, not of scores."

    def verdict(self) -> list[Verdict]:
        """Return one verdict per metric, which is True if the gap became smaller beyond chance."""
        changes = self.summary["views"][self.summary["groups"]]
        return [_judge(CATALOG[name].title.capitalize(), c) for name, c in changes.items()]

    def tables(self) -> list[Table]:
        """Return the tables of old and new gaps and rates, for every view."""
        views = self.summary["views"].items()
        return [make(changes, t) for t, changes in views for make in (_gap_table, _rate_table)]

    def report(self) -> Report:
        """The whole report."""
        return Report(
            mark="<!-- fedgft comparison -->",
            title="Fairness audits, old and new",
            lead=self.lead(),
            verdicts=self.verdict(),
            legend=(
                "✓ the gap is smaller, and chance does not explain the change",
                "✗ the gap is larger, and chance does not explain the change",
                "· not known: chance could explain the change",
            ),
            warnings=self.summary["warnings"],
            tables=self.tables(),
            foot="95% intervals throughout.",
        )

    def to_json(self) -> str:
        """The text of comparison.json."""
        return json.dumps(self.summary, indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """The text of report.md."""
        return self.report().to_markdown()

    def to_html(self) -> str:
        """The text of report.html."""
        return self.report().to_html()

    def save(self, folder: str | Path) -> list[Path]:
        """Write comparison.json, report.md and report.html to a folder; return their paths.

        Parameters
        ----------
        folder
            It is created if needed. Only the files of an earlier comparison are replaced.
        """
        return save_report(self, folder, "comparison")


def compare(old: Any, new: Any) -> Comparison:
    """Return the change from one audit to another; it is negative if a gap has become smaller.

    Parameters
    ----------
    old, new
        Two `Audit`, or results of `Audit.to_dict` or `read_summary`, with the same classes and
        attributes. An audit from a file may be incomplete, so each audit is first compared with
        itself. The error then says which audit is incomplete.
    """
    before = _read_summary("old", old)
    after = _read_summary("new", new)
    pairs = {
        "the old audit": (before, before),
        "the new audit": (after, after),
        "one of the audits": (before, after),
    }
    found = None
    for which, pair in pairs.items():
        try:
            found = _compare(*pair)
        except FedgftError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            problem = f"`compare`: {which} lacks a part ({error}); make it again"
            raise FedgftError(problem, kind="file") from None
    assert found is not None
    return Comparison(found)


def _read_summary(name: str, audit: Any) -> Any:
    """Return the summary of an audit, or raise a `FedgftError` about the argument `name`."""
    summary = getattr(audit, "summary", audit)
    if not isinstance(summary, Mapping) or "metrics" not in summary:
        text = f"must be an Audit, or what its to_dict() returns, not {format_value(audit)}"
        raise FedgftError(text, field=name)
    return summary


def _compare(old: Summary, new: Summary) -> ComparisonSummary:
    """Compare two audits of the same classes and attributes, without checks of their parts."""
    for name in ("classes", "groups"):
        if old[name] != new[name]:
            problem = f"`compare`: {name} differ: {old[name]} and {new[name]}"
            raise FedgftError(problem, kind="conflict")
    others = views_of(new)
    views = {
        title: {
            n: _compare_metrics(view["metrics"][n], others[title]["metrics"][n]) for n in CATALOG
        }
        for title, view in views_of(old).items()
    }
    return {
        "format": COMPARISON_FORMAT,
        "groups": old["groups"],
        "accuracy": _change(old["accuracy"], new["accuracy"], "rate"),
        "views": views,
        "warnings": _list_warnings(old, new),
    }


def _compare_metrics(old: MetricSummary, new: MetricSummary) -> MetricChange:
    """Return the change of a metric's gap, and of the rate of every group that both audits have."""
    groups = {
        group: _change(old["groups"][group], new["groups"][group], "rate")
        for group in old["groups"]
        if group in new["groups"] and old["condition"] == new["condition"]
    }
    return {
        **_change(old, new, "gap"),
        "pair": {"old": old["pair"], "new": new["pair"]},
        "same_groups": set(old["groups"]) == set(new["groups"]),
        "groups": groups,
    }


def _change(old: Any, new: Any, key: str) -> Change:
    """Return the change of `key`, which is ``"gap"`` or ``"rate"``, between two summaries.

    `old` and `new` are two `MetricSummary` (for a gap) or two `GroupRate` (for a rate). A number
    that is out of range is an error.
    """
    before, after = ({k: found[k] for k in (key, "low", "high")} for found in (old, new))
    for x in (*before.values(), *after.values()):
        if x is not None and not -2 < x < 2:
            raise ValueError(f"{key} is out of range")
    out: Change = {"old": before, "new": after, "change": None, "low": None, "high": None}
    if before[key] is not None and after[key] is not None:
        out["change"] = after[key] - before[key]
        if None not in before.values() and None not in after.values():
            q, q_low, q_high = map(np.array, before.values())
            p, p_low, p_high = map(np.array, after.values())
            low, high = difference(p, (p_low, p_high), q, (q_low, q_high))
            out["low"] = float(low)
            out["high"] = float(high)
    return out


def _list_warnings(old: Summary, new: Summary) -> list[str]:
    """Return warnings about differences that limit the comparison: groups and thresholds."""
    before, after = (summary["metrics"]["sp"]["groups"] for summary in (old, new))
    warnings = ["The intervals of changes take the two audits as independent."]
    for which, groups, others in (("old", before, after), ("new", after, before)):
        only = [group for group in groups if group not in others]
        if only:
            warnings.append(f"Only in the {which} audit: {', '.join(only)}.")
    thresholds = (old["threshold"], new["threshold"])
    if thresholds[0] != thresholds[1]:
        text = "Thresholds: {} in the old audit, {} in the new."
        warnings.append(text.format(*thresholds))
    return warnings


def _judge(title: str, found: MetricChange) -> Verdict:
    """Return the verdict on the change of one gap; `title` is the title of the metric.

    The verdict is True if the 95% interval of the change is below 0, and False if it is above 0. It
    is None if the interval contains 0, if there is no interval, or if the audits have different
    groups.
    """
    low = found["low"]
    high = found["high"]
    if found["change"] is None:
        return Verdict(None, f"{title}: the change is not estimable.")
    before, after = (format_points(found[side]["gap"]) for side in ("old", "new"))
    change = format_points(found["change"], sign="+")
    text = f"{title}: {before} → {after} points, a change of {change}"
    if low is None or high is None:
        return Verdict(None, f"{text}; too few rows for an interval.")
    text += f" (95% interval {format_interval(low, high, sign='+')})"
    if not found["same_groups"]:
        return Verdict(None, f"{text}: not of the same groups, so no verdict.")
    if high < 0:
        return Verdict(True, f"{text}: the gap is smaller, beyond chance.")
    if low > 0:
        return Verdict(False, f"{text}: the gap is larger, beyond chance.")
    return Verdict(None, f"{text}: chance could explain it.")


def _gap_table(changes: dict[str, MetricChange], title: str) -> Table:
    """The gaps of one view in points, old and new: one row per metric."""
    interval = "95% interval"
    header = ("metric", "old gap", interval, "new gap", interval, "change", interval)
    rows = []
    for name, found in changes.items():
        cells = [CATALOG[name].title]
        for side in (found["old"], found["new"]):
            cells += [format_points(side["gap"]), format_interval(side["low"], side["high"])]
        rows.append((*cells, *_change_cells(found)))
    return Table(f"Gaps by {title}, old and new, points", header, tuple(rows), 1)


def _rate_table(changes: dict[str, MetricChange], title: str) -> Table:
    """The rates of one view in percent, old and new: one row per metric and group.

    Groups that only one audit has, and metrics whose condition differs, have no row.
    """
    header = ("rate", "group", "old, %", "new, %", "change, points", "95% interval")
    rows = []
    for name, found in changes.items():
        for group, rate in found["groups"].items():
            rates = (format_points(rate["old"]["rate"]), format_points(rate["new"]["rate"]))
            rows.append((rate_name(name), group, *rates, *_change_cells(rate)))
    return Table(f"Rates by {title}, old and new", header, tuple(rows), 2)


def _change_cells(found: Change) -> tuple[str, str]:
    """The change in points with its sign, and its interval."""
    change = format_points(found["change"], sign="+")
    return change, format_interval(found["low"], found["high"])
