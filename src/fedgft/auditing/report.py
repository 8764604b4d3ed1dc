"""`audit` makes a report from the sums of sites, and `compare` makes one from two audits.

A report has tables and can be written as Markdown or as a web page. A comparison treats the two
audits as independent. If both models were measured on the same rows, their errors are correlated,
and the true intervals are narrower than those reported.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from fedgft.auditing.between_sites import check_bootstrap, estimate_metric
from fedgft.auditing.findings import list_verdicts, list_warnings
from fedgft.auditing.rates import (
    Pool,
    View,
    estimate_difference,
    estimate_rates,
    find_reference_group,
    list_views,
    pool_sites,
)
from fedgft.auditing.summary import MetricSummary, Number, Summary, summarize, to_json, views_of
from fedgft.auditing.tables_and_charts import draw_figures, list_tables
from fedgft.auditing.thresholds import (
    COARSE_HISTOGRAM_WARNING,
    GROUP_THRESHOLDS_WARNING,
    adjust_thresholds,
)
from fedgft.errors import FedgftError
from fedgft.formatting import Report, Table, Verdict, format_interval, format_percent, format_points
from fedgft.metrics import CATALOG, get_metric
from fedgft.metrics.intervals import difference
from fedgft.site_sums import SiteSums, merge
from fedgft.validation import check_integer, check_name_list, format_value

OVER_ROWS = "Wilson (rates), Newcombe and Tukey (differences), Donner & Zou (ratios)"
OVER_SITES = "rates, gaps and ratios: bootstrap over sites, {} draws; all else over rows"
COMPARISON_FORMAT = "fedgft-comparison-1"
LEGEND = (
    "no gap beyond chance, which does not prove there is none",
    "a gap beyond chance",
    "cannot be said",
)


@dataclass(frozen=True, eq=False)
class Audit:
    """The result of `audit`: a summary, and the views it was made from.

    Parameters
    ----------
    summary
        All results: see `fedgft.auditing.summary.Summary`.
    pool
        The sums of all sites.
    views
        The views by each attribute and by combinations of attributes; the view by all attributes
        together is last.
    """

    summary: Summary
    pool: Pool
    views: tuple[View, ...]

    @property
    def view(self) -> View:
        """The view by all attributes together."""
        return self.views[-1]

    @property
    def warnings(self) -> list[str]:
        """The warnings that a reader should see before the numbers."""
        return self.summary["warnings"]

    def difference(self, metric: str, first: str, second: str) -> tuple[float, float, float]:
        """Return rate(first) - rate(second) and its limits (value, low, high).

        The interval is a 95% interval. The metric must have a single condition.
        """
        rates = estimate_rates(get_metric(metric), self.view, "hard")
        if len(rates.rate) != 1:
            raise FedgftError(f"{metric} compares several rates; name one with a single one")
        one, other = (rates[0, self.view.index(name)] for name in (first, second))
        value, low, high = (float(x) for x in estimate_difference(one, other))
        return value, low, high

    def lead(self) -> str:
        """Return one sentence that says what was audited."""
        about = "About " if self.summary["privacy"]["approximate"] else ""
        sites = len(self.summary["sites"])
        return (
            f"{about}{self.summary['rows']['counted']:,.0f} rows of {sites:,} "
            f"site{'s' * (sites != 1)}, groups by {self.summary['groups']}; "
            f"{format_percent(self.summary['accuracy']['rate'])} of decisions are right. All gaps "
            "are those of decisions, not of scores."
        )

    def verdict(self) -> list[Verdict]:
        """Return one verdict per metric, which is True if there is no gap beyond chance."""
        return list_verdicts(self.summary)

    def tables(self) -> list[Table]:
        """Return the tables for a terminal; the report has more tables."""
        return list(list_tables(self.summary, short=True))

    def report(self, *, figures: bool = False) -> Report:
        """Return the whole report, with figures if `figures` is True, which takes longer."""
        return Report(
            mark="<!-- fedgft audit -->",  # the first line of report.md
            title="Fairness audit",
            lead=self.lead(),
            verdicts=self.verdict(),
            legend=LEGEND,
            warnings=self.warnings,
            tables=list(list_tables(self.summary)),
            figures=draw_figures(self.summary, self.view) if figures else (),
            foot=f"Intervals: {self.summary['interval']}; 95% throughout.",
        )

    def to_dict(self) -> Summary:
        """All results as values that JSON can hold."""
        return self.summary

    def to_json(self) -> str:
        """The text of audit.json."""
        return to_json(self.summary)

    def to_markdown(self) -> str:
        """The text of report.md."""
        return self.report().to_markdown()

    def to_html(self) -> str:
        """The text of report.html: one page that needs no network and no other file."""
        return self.report(figures=True).to_html()


def audit(
    sums: SiteSums | Iterable[SiteSums],
    *,
    reference_groups: Sequence[str] = (),
    bootstrap: int = 0,
    adjust_to: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Audit:
    """Estimate all metrics over all sites and at each site, from the sums alone.

    Parameters
    ----------
    sums
        The sums of the sites, from `measure` or `read_sums`.
    reference_groups
        Groups to compare all others with: ``["White"]`` or ``["race=White", "sex=Male"]``.
    bootstrap
        The number of bootstrap draws of sites, for intervals over sites instead of rows. With 0,
        the intervals are over rows.
    adjust_to
        The largest gap to allow for each metric, such as ``{"sp": 0.02}``. The audit then searches
        for thresholds by group that keep the gap within it.
    seed
        The seed of the bootstrap.

    >>> from fedgft.auditing import measure
    >>> site = measure([1, 0, 1, 0], [1, 1, 1, 0], sensitive_features=list("ffmm"), site="north")
    >>> audit(site).to_dict()["metrics"]["sp"]["gap"]
    0.5
    """
    merged = _merge_sums(sums)
    if isinstance(reference_groups, Mapping):
        problem = f"reference_groups must be a list of names, not {format_value(reference_groups)}"
        raise FedgftError(problem)
    if adjust_to is not None and not isinstance(adjust_to, Mapping):
        raise FedgftError(f"adjust_to must be like {{'sp': 0.02}}, not {format_value(adjust_to)}")
    references = check_name_list("reference_groups", reference_groups)
    draws = check_integer("bootstrap", bootstrap, least=0)
    seed = check_integer("seed", seed, least=0)
    pool = pool_sites(merged)
    if draws:
        check_bootstrap(pool)
    views = list_views(pool)
    _check_references(references, views)
    estimates = [
        {name: estimate_metric(m, view, draws=draws, seed=seed) for name, m in CATALOG.items()}
        for view in views
    ]
    adjusted = [
        adjust_thresholds(get_metric(name), views[-1], gap)
        for name, gap in (adjust_to or {}).items()
    ]
    warnings = list(list_warnings(pool, views, estimates, draws=draws))
    if adjusted:
        warnings.append(GROUP_THRESHOLDS_WARNING)
        if views[-1].bin_error is not None:
            warnings.append(COARSE_HISTOGRAM_WARNING)
    summary = summarize(
        pool,
        views,
        estimates,
        references=references,
        interval=OVER_SITES.format(draws) if draws else OVER_ROWS,
        adjusted=adjusted,
        warnings=warnings,
    )
    return Audit(summary, pool, views)


def _merge_sums(sums: Any) -> SiteSums:
    """Merge the sums of all sites; raise an error if the argument is not sums (a path, say)."""
    if isinstance(sums, str | Path):
        raise FedgftError(f"audit takes sums, not a path: read_sums({str(sums)!r})")
    if not isinstance(sums, Iterable | SiteSums):
        raise FedgftError(f"sums must be Sums or a list of them, not {format_value(sums)}")
    return sums if isinstance(sums, SiteSums) else merge(sums)


def _check_references(references: Sequence[str], views: Sequence[View]) -> None:
    """Raise an error if a reference is not the name of a group in any view."""
    for name in references:
        if all(find_reference_group(view, [name]) is None for view in views):
            known = ", ".join([group for view in views for group in view.groups][:12])
            raise FedgftError(f"`reference_groups` {name}: no such group; there are: {known}")


# Comparison of two audits


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


@dataclass(frozen=True)
class Comparison:
    """The change from one audit to another: the result of `compare`."""

    summary: ComparisonSummary

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
            legend=("the gap is smaller, beyond chance", "larger, beyond chance", "cannot be said"),
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
    """Return the change from one audit to another; it is negative if a gap has become smaller.

    Parameters
    ----------
    old, new
        The results of `Audit.to_dict` or `read_summary`, with the same classes and attributes. An
        audit from a file may be incomplete, so each audit is first compared with itself. The error
        then says which audit is incomplete.
    """
    pairs = {
        "the old audit": (old, old),
        "the new audit": (new, new),
        "one of the audits": (old, new),
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
    """The rates of one view in per cent, old and new: one row per metric and group.

    Groups that only one audit has, and metrics whose condition differs, have no row.
    """
    header = ("metric", "group", "old, %", "new, %", "change", "95% interval")
    rows = []
    for name, found in changes.items():
        for group, rate in found["groups"].items():
            rates = (format_points(rate["old"]["rate"]), format_points(rate["new"]["rate"]))
            rows.append((CATALOG[name].title, group, *rates, *_change_cells(rate)))
    return Table(f"Rates by {title}, old and new", header, tuple(rows), 2)


def _change_cells(found: Change) -> tuple[str, str]:
    """The change in points with its sign, and its interval."""
    change = format_points(found["change"], sign="+")
    return change, format_interval(found["low"], found["high"])
