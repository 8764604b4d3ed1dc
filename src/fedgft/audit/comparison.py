"""Two audits side by side, of two models or two dates: the change of every gap and rate.

The intervals take the two audits as independent. If both models were measured on the same rows,
their errors are correlated, and the true intervals are narrower than these.
"""

import json
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from fedgft.audit.summary import MetricSummary, Number, Summary, ViewSummary, views_of
from fedgft.errors import FedgftError
from fedgft.formatting import Report, Table, Verdict, format_interval, format_points
from fedgft.metrics import CATALOG
from fedgft.metrics.intervals import difference

FORMAT = "fedgft-comparison-1"
MARK = "<!-- fedgft comparison -->"
LEAD = "Two audits side by side. All gaps are those of decisions, not of scores."
LEGEND = ("the gap is smaller, beyond chance", "larger, beyond chance", "cannot be said")


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
    """The change of a gap, and of the rates behind it, by group.

    `pair` are the two groups that differ most in either audit. There are no `groups` if the gaps
    are under different conditions of the metric.
    """

    pair: dict[str, list[str] | None]
    same_groups: bool
    groups: dict[str, Change]


class ComparisonSummary(TypedDict):
    """All changes: `views` are by title and metric."""

    format: str
    groups: str
    accuracy: Change
    views: dict[str, dict[str, MetricChange]]
    warnings: list[str]


@dataclass(frozen=True)
class Comparison:
    """The change from one audit to another: the result of `compare`."""

    summary: ComparisonSummary

    def to_dict(self) -> ComparisonSummary:
        """All changes as values that JSON can hold."""
        return self.summary

    def lead(self) -> str:
        """What is compared, in one sentence."""
        return LEAD

    def verdict(self) -> list[Verdict]:
        """One sentence per metric: True if the gap has become smaller beyond chance."""
        changes = self.summary["views"][self.summary["groups"]]
        return [_judge(CATALOG[name].title.capitalize(), c) for name, c in changes.items()]

    def tables(self) -> list[Table]:
        """Gaps and rates of every view, old and new."""
        views = self.summary["views"].items()
        return [make(changes, t) for t, changes in views for make in (_gap_table, _rate_table)]

    def report(self) -> Report:
        """The whole report."""
        return Report(
            mark=MARK,
            title="Fairness audits, old and new",
            lead=LEAD,
            verdicts=self.verdict(),
            legend=LEGEND,
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


def compare(old: Summary, new: Summary) -> Comparison:
    """The change from one audit to another: negative where a gap has become smaller.

    Parameters
    ----------
    old, new
        The results of `Audit.to_dict` or `read_summary`, by the same classes and attributes. An
        audit from a file may lack anything: each is compared with itself first, so that the error
        says which one is incomplete.
    """
    _compare_checked(old, old, "the old audit")
    _compare_checked(new, new, "the new audit")
    return Comparison(_compare_checked(old, new, "one of the audits"))


def _compare_checked(old: Summary, new: Summary, which: str) -> ComparisonSummary:
    """Compare two audits; if a part is missing or has the wrong type, say `which` audit it is."""
    try:
        return _compare(old, new)
    except FedgftError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FedgftError(
            f"`compare`: {which} lacks a part ({error}); make it again", kind="file"
        ) from None


def _compare(old: Summary, new: Summary) -> ComparisonSummary:
    """Compare two audits of the same classes and attributes, without checks of their parts."""
    for name in ("classes", "groups"):
        if old[name] != new[name]:
            raise FedgftError(
                f"`compare`: {name} differ: {old[name]} and {new[name]}", kind="conflict"
            )
    others = views_of(new)
    return {
        "format": FORMAT,
        "groups": old["groups"],
        "accuracy": _change(old["accuracy"], new["accuracy"], "rate"),
        "views": {t: _compare_views(view, others[t]) for t, view in views_of(old).items()},
        "warnings": _list_warnings(old, new),
    }


def _compare_views(old: ViewSummary, new: ViewSummary) -> dict[str, MetricChange]:
    return {n: _compare_metrics(old["metrics"][n], new["metrics"][n]) for n in CATALOG}


def _compare_metrics(old: MetricSummary, new: MetricSummary) -> MetricChange:
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
    """The change of `key`, the gap of two `MetricSummary` or the rate of two `GroupRate`.

    A number out of range is an error.
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
    """What makes the two audits hard to compare: other groups, other thresholds."""
    before, after = (summary["metrics"]["sp"]["groups"] for summary in (old, new))
    warnings = ["The intervals of changes take the two audits as independent."]
    for which, only in (
        ("old", [group for group in before if group not in after]),
        ("new", [group for group in after if group not in before]),
    ):
        if only:
            warnings.append(f"Only in the {which} audit: {', '.join(only)}.")
    if old["threshold"] != new["threshold"]:
        warnings.append(
            f"Thresholds: {old['threshold']} in the old audit, {new['threshold']} in the new."
        )
    return warnings


def _judge(title: str, found: MetricChange) -> Verdict:
    """The verdict on the change of one gap, for the metric of this title.

    True if the 95% interval of the change is below 0, False if it is above 0. None if it contains
    0, if there is no interval, or if the audits have different groups.
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
        cells += [
            format_points(found["change"], sign="+"),
            format_interval(found["low"], found["high"]),
        ]
        rows.append(tuple(cells))
    return Table(f"Gaps by {title}, old and new, points", header, tuple(rows), 1)


def _rate_table(changes: dict[str, MetricChange], title: str) -> Table:
    """The rates of one view in per cent, old and new: one row per metric and group.

    Groups of one audit only, and metrics whose condition differs, have no row.
    """
    header = ("metric", "group", "old, %", "new, %", "change", "95% interval")
    rows = tuple(
        (
            CATALOG[name].title,
            group,
            format_points(rate["old"]["rate"]),
            format_points(rate["new"]["rate"]),
            format_points(rate["change"], sign="+"),
            format_interval(rate["low"], rate["high"]),
        )
        for name, found in changes.items()
        for group, rate in found["groups"].items()
    )
    return Table(f"Rates by {title}, old and new", header, rows, 2)
