"""The audit as Markdown: the verdict, what to mind, the tables."""

from typing import Any

from fedgft.audit.alerts import points
from fedgft.audit.tabulated import tables
from fedgft.audit.verdict import verdict
from fedgft.layout import SIGNS, Table, escape_markdown

MARK = "<!-- fedgft audit -->"  # tells our files from others


def markdown(summary: dict[str, Any]) -> str:
    made = list(tables(summary))
    text = document(
        MARK, "# Fairness audit", about(summary), verdict(summary), summary["warnings"], made
    )
    return f"{text}\nIntervals: {summary['interval']}.\n"


def document(
    mark: str,
    title: str,
    lead: str,
    said: list[tuple[bool | None, str]],
    warnings: list[str],
    tables: list[Table],
) -> str:
    lines = [
        mark,
        title,
        "",
        escape_markdown(lead),
        "",
        *(f"- {SIGNS[good]} {escape_markdown(t)}" for good, t in said),
    ]
    if warnings:
        lines += ["", "## Mind this", "", *(f"- {escape_markdown(text)}" for text in warnings)]
    lines += ["", "## Numbers", ""]
    return "\n".join(lines) + "\n" + "\n".join(table.markdown() for table in tables)


def about(summary: dict[str, Any]) -> str:
    """What was audited, in one sentence."""
    rows, sites = summary["rows"]["counted"], len(summary["sites"])
    about = "About " if summary["privacy"]["approximate"] else ""
    return (
        f"{about}{rows:,.0f} rows of {sites:,} site{'s' * (sites != 1)}, groups by "
        f"{summary['groups']}; {points(summary['accuracy']['rate'])}% of decisions are right. All "
        "gaps are those of decisions, not of scores."
    )
