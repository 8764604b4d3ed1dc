"""Tables that several forms share: gaps with verdicts, and the rates of every group."""

from typing import Any

from fedgft.auditing.summary import GroupRate, Summary, ViewSummary, estimable_gap, views_of
from fedgft.auditing.verdicts import VERDICT_METRICS, judge_gap, rate_name
from fedgft.formatting import DASH, Table, format_interval, format_points
from fedgft.metrics import CATALOG

NOT_ESTIMABLE = "not estimable"
INTERVAL_NOTE = "In brackets: 95% intervals. Where there are none, a group has too few rows."


def list_gaps(summary: Summary) -> list[Table]:
    """Return a table of gaps for each view: by each column, and by their combinations."""
    return [_gap_table(summary, title) for title in views_of(summary)]


def _gap_table(summary: Summary, title: str) -> Table:
    """Return the gap of every metric of verdicts in one view, in points."""
    rows = []
    for name in VERDICT_METRICS:
        found = views_of(summary)[title]["metrics"][name]
        numbers = estimable_gap(found)
        cells = (NOT_ESTIMABLE, DASH)
        if numbers is not None:
            star = "*" if found["gap"] is None else ""
            limits = format_interval(numbers["low"], numbers["high"])
            cells = (format_points(numbers["gap"]) + star, limits)
        pair = " / ".join(found["pair"] or (DASH,))
        verdict = judge_gap(found, summary["tolerance"][name])
        rows.append((CATALOG[name].title, pair, verdict, *cells))
    notes = ()
    if any("*" in row[3] for row in rows):
        notes = ("*: among the groups that have a rate; over all groups it is not estimable.",)
    header = ("metric", "farthest apart", "verdict", "gap", "95% interval")
    return Table(f"Gaps by {title}, points", header, tuple(rows), 3, notes)


def list_accuracy(summary: Summary) -> list[Table]:
    """Return the accuracy of every group, a table for each view."""
    made = []
    for title, view in views_of(summary).items():
        rows = []
        for group, rate in view["metrics"]["acc"]["groups"].items():
            cells = (format_points(rate["rate"], unknown=NOT_ESTIMABLE), _format_limits(rate))
            rows.append((group, *cells, f"{rate['n']:,.0f}"))
        header = ("group", "accuracy", "95% interval", "rows")
        made.append(Table(f"Accuracy by {title}, percent", header, tuple(rows), 1))
    return made


def list_group_rates(summary: Summary) -> list[Table]:
    """Return the rates of every group with their intervals, a table for each view."""
    return [_rate_table(view, title) for title, view in views_of(summary).items()]


def _rate_table(view: ViewSummary, title: str) -> Table:
    """Return a row per group with its rows and its rate for each metric, in percent.

    With more than two classes, a rate is that under the condition of its gap.
    """
    metrics = {name: view["metrics"][name]["groups"] for name in VERDICT_METRICS}
    rows = []
    for group, accuracy in metrics["acc"].items():
        cells = (_format_rate(groups[group]) for groups in metrics.values())
        rows.append((group, f"{accuracy['n']:,.0f}", *cells))
    header = ("group", "rows", *map(rate_name, metrics))
    return Table(f"Rates by {title}, percent", header, tuple(rows), 1, (INTERVAL_NOTE,))


def _format_rate(rate: GroupRate) -> str:
    """Return ``57.0 (56.1 to 57.9)``, or without limits if there are none."""
    value = format_points(rate["rate"], unknown=NOT_ESTIMABLE)
    limits = _format_limits(rate)
    return value if limits == DASH else f"{value} ({limits})"


def _format_limits(rate: GroupRate) -> str:
    return format_interval(rate["low"], rate["high"])


def list_numbers(summary: Summary) -> dict[str, Any]:
    """Return the numbers of these tables by view, as the summary has them."""
    return {
        "rows": summary["rows"],
        "classes": summary["classes"],
        "accuracy": summary["accuracy"],
        "tolerance": summary["tolerance"],
        "verdicts": summary["verdicts"],
        "metrics": {title: view["metrics"] for title, view in views_of(summary).items()},
        "privacy": summary["privacy"],
        "interval": summary["interval"],
    }
