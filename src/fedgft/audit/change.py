"""Two audits side by side: two models, two dates. The change of every gap, with its interval.

The two are taken as independent. If both models were measured on the same rows their errors go
together, and the true intervals are narrower than these.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedgft.audit.alerts import points
from fedgft.audit.plain import views_of
from fedgft.audit.tabulated import between
from fedgft.audit.text import document
from fedgft.errors import FedgftError
from fedgft.layout import Table
from fedgft.metrics import CATALOG
from fedgft.metrics.intervals import difference

Plain = dict[str, Any]
FORMAT = "fedgft-comparison-1"
MARK = "<!-- fedgft comparison -->"
LEAD = "Two audits side by side. All gaps are those of decisions, not of scores."
LEGEND = ("the gap is smaller, beyond chance", "larger, beyond chance", "cannot be said")


@dataclass(frozen=True)
class Comparison:
    """The change from one audit to another, as plain values and as a page."""

    found: Plain

    def to_dict(self) -> Plain:
        return self.found

    def lead(self) -> str:
        return LEAD

    def verdict(self) -> list[tuple[bool | None, str]]:
        return _verdict(self.found)

    def tables(self) -> list[Table]:
        views = self.found["views"]
        return [make(self.found, title) for title in views for make in (_gap_table, _rate_table)]

    def to_json(self) -> str:
        return json.dumps(self.found, indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        return document(
            MARK, "# Fairness audits, old and new", LEAD, self.verdict(), self.found["warnings"],
            self.tables(),
        )  # fmt: skip

    def to_html(self) -> str:
        from fedgft.audit.page import page

        return page(
            title="Fairness audits, old and new", lead=LEAD, said=self.verdict(), figures=[],
            warnings=self.found["warnings"], tables=self.tables(), foot="95% intervals throughout.",
            legend=LEGEND, mark=MARK,
        )  # fmt: skip


def compare(old: Plain, new: Plain) -> Comparison:
    """The change from one summary to another: negative where a gap has become smaller."""
    _tried(old, old, "the old audit")  # beside itself it shows whether it is all there
    _tried(new, new, "the new audit")
    return Comparison(_tried(old, new, "one of the audits"))


def _tried(old: Plain, new: Plain, which: str) -> Plain:
    try:
        return _compared(old, new)
    except FedgftError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FedgftError(f"--compare: {which} lacks a part ({error}); make it again") from None


def _compared(old: Plain, new: Plain) -> Plain:
    for name in ("classes", "groups"):
        if old[name] != new[name]:
            raise FedgftError(f"--compare: {name} differ: {old[name]} and {new[name]}")
    return {
        "format": FORMAT,
        "groups": old["groups"],
        "accuracy": _changed(old["accuracy"], new["accuracy"], "rate"),
        "views": {
            title: _view(views_of(old)[title], views_of(new)[title]) for title in views_of(old)
        },
        "warnings": _warnings(old, new),
    }


def _view(old: Plain, new: Plain) -> Plain:
    return {name: _metric(old["metrics"][name], new["metrics"][name]) for name in CATALOG}


def _metric(first: Plain, second: Plain) -> Plain:
    groups = {
        group: _changed(first["groups"][group], second["groups"][group], "rate")
        for group in first["groups"]
        if group in second["groups"] and first["condition"] == second["condition"]
    }
    return _changed(first, second, "gap") | {
        "pair": {"old": first["pair"], "new": second["pair"]},
        "same_groups": set(first["groups"]) == set(second["groups"]),
        "groups": groups,
    }


def _changed(old: Plain, new: Plain, key: str) -> Plain:
    """Old, new, and new - old with its 95% interval."""
    change: Plain = {"change": None, "low": None, "high": None}
    for found in (old, new):
        if any(x is not None and not -2 < x < 2 for x in (found[key], found["low"], found["high"])):
            raise ValueError(f"{key} is out of range")
    if old[key] is not None and new[key] is not None:
        change["change"] = new[key] - old[key]
        if None not in (old["low"], old["high"], new["low"], new["high"]):
            (p, p_low, p_high), (q, q_low, q_high) = (
                [np.array(found[name]) for name in (key, "low", "high")] for found in (new, old)
            )
            low, high = difference(p, (p_low, p_high), q, (q_low, q_high))
            change |= {"low": float(low), "high": float(high)}
    pick = lambda found: {k: found[k] for k in (key, "low", "high")}  # noqa: E731
    return {"old": pick(old), "new": pick(new), **change}


def _warnings(old: Plain, new: Plain) -> list[str]:
    gone = [g for g in old["metrics"]["sp"]["groups"] if g not in new["metrics"]["sp"]["groups"]]
    come = [g for g in new["metrics"]["sp"]["groups"] if g not in old["metrics"]["sp"]["groups"]]
    said = ["The intervals of changes take the two audits as independent."]
    said += [f"Only in the old audit: {', '.join(gone)}."] if gone else []
    said += [f"Only in the new audit: {', '.join(come)}."] if come else []
    if old["threshold"] != new["threshold"]:
        said.append(
            f"Thresholds: {old['threshold']} in the old audit, {new['threshold']} in the new."
        )
    return said


def _verdict(found: Plain) -> list[tuple[bool | None, str]]:
    """One sentence a metric: True where the gap has become smaller beyond chance."""
    said: list[tuple[bool | None, str]] = []
    for name, change in found["views"][found["groups"]].items():
        title = CATALOG[name].title.capitalize()
        if change["change"] is None:
            said.append((None, f"{title}: the change is not estimable."))
            continue
        text = (
            f"{title}: {points(change['old']['gap'])} → {points(change['new']['gap'])} points, a "
            f"change of {100 * change['change']:+.1f}"
        )
        if change["low"] is None:
            said.append((None, f"{text}; too few rows for an interval."))
            continue
        text += f" (95% interval {100 * change['low']:+.1f} to {100 * change['high']:+.1f})"
        if not change["same_groups"]:
            said.append((None, f"{text}: not of the same groups, so no verdict."))
            continue
        better, worse = change["high"] < 0, change["low"] > 0
        end = "smaller" if better else "larger" if worse else None
        ending = f"the gap is {end}, beyond chance" if end else "chance could explain it"
        said.append((True if better else False if worse else None, f"{text}: {ending}."))
    return said


def _gap_table(found: Plain, title: str) -> Table:
    """Gaps, old and new."""
    rows = []
    for name, change in found["views"][title].items():
        both = [change["old"], change["new"]]
        cells = [
            c
            for side in both
            for c in (points(side["gap"]), between(side["low"], side["high"], 100, 1))
        ]
        rows.append((CATALOG[name].title, *cells, points(change["change"], sign="+"),
                     between(change["low"], change["high"], 100, 1)))  # fmt: skip
    span = "95% interval"
    header = ("metric", "old gap", span, "new gap", span, "change", span)
    return Table(f"Gaps by {title}, old and new, points", header, tuple(rows), 1)


def _rate_table(found: Plain, title: str) -> Table:
    """Rates of each group, old and new."""
    rows = []
    for name, change in found["views"][title].items():
        for group, rates in change["groups"].items():
            rows.append((
                CATALOG[name].title, group,
                points(rates["old"]["rate"]), points(rates["new"]["rate"]),
                points(rates["change"], sign="+"), between(rates["low"], rates["high"], 100, 1),
            ))  # fmt: skip
    header = ("metric", "group", "old, %", "new, %", "change", "95% interval")
    return Table(f"Rates by {title}, old and new", header, tuple(rows), 2)
