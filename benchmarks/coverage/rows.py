"""Rows of the table of coverage."""

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One kind of interval over many simulated federations."""

    setting: str  # what was simulated
    interval: str  # which interval
    covered: int  # federations whose interval contains the truth
    federations: int  # federations that have an interval
    note: str = ""


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| setting | interval | covered | of | note |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        share = row.covered / row.federations if row.federations else float("nan")
        error = 1.96 * (share * (1 - share) / max(row.federations, 1)) ** 0.5
        lines.append(
            f"| {row.setting} | {row.interval} | {100 * share:.1f} ± {100 * error:.1f}% | "
            f"{row.federations:,} | {row.note} |"
        )
    return "\n".join(lines) + "\n"
