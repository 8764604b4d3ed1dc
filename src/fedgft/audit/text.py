"""The audit as Markdown: the verdict, what to mind, the tables."""

from dataclasses import replace
from typing import Any

from fedgft.audit.alerts import points
from fedgft.audit.tabulated import tables
from fedgft.audit.verdict import verdict
from fedgft.layout import SIGNS, Table

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
        _clean(lead),
        "",
        *(f"- {SIGNS[good]} {_clean(t)}" for good, t in said),
    ]
    if warnings:
        lines += ["", "## Mind this", "", *(f"- {_clean(text)}" for text in warnings)]
    lines += ["", "## Numbers", ""]
    return "\n".join(lines) + "\n" + "\n".join(_cleaned(table).markdown() for table in tables)


def about(summary: dict[str, Any]) -> str:
    """What was audited, in one sentence."""
    rows, sites = summary["rows"]["counted"], len(summary["sites"])
    about = "About " if summary["privacy"]["approximate"] else ""
    return (
        f"{about}{rows:,.0f} rows of {sites:,} site{'s' * (sites != 1)}, groups by "
        f"{summary['groups']}; {points(summary['accuracy']['rate'])}% of decisions are right. All "
        "gaps are those of decisions, not of scores."
    )


def _cleaned(table: Table) -> Table:
    clean = lambda cells: tuple(map(_clean, cells))  # noqa: E731
    return replace(
        table, title=_clean(table.title), header=clean(table.header),
        rows=tuple(map(clean, table.rows)), notes=clean(table.notes),
    )  # fmt: skip


def _clean(text: str) -> str:
    """Names from data stay text in Markdown: no tags, no links, no line breaks."""
    text = " ".join(text.split()).replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\[`*_":
        text = text.replace(sign, f"\\{sign}")
    return text
