"""What a notebook shows of an audit or of a comparison: text, and HTML without scripts.

The HTML is part of the notebook's own page. Every selector of its style begins with a class that
only it uses, it has no `id`, and it inherits the colors of the notebook. Long tables and texts are
cut, because a notebook stores its outputs; the report of `to_html` holds everything.
"""

from collections.abc import Sequence
from dataclasses import replace

from fedgft.formatting import Report, Table, Verdict, render

MAX_ROWS = 20  # rows of a table
MAX_CELL = 60  # characters of a cell
MAX_SENTENCE = 600  # characters of a sentence
MAX_WARNINGS = 12
MAX_TABLES = 24


def describe(lead: str, verdicts: Sequence[Verdict]) -> str:
    """Return the lead and one line per verdict."""
    return "\n".join([lead, *(f"{each.sign} {each.text}" for each in verdicts)])


def render_in_notebook(report: Report) -> str:
    """Return a part of a page that shows the report: no script, no network, no `id`."""
    warnings = [_cut(text, MAX_SENTENCE) for text in report.warnings[:MAX_WARNINGS]]
    if len(report.warnings) > MAX_WARNINGS:
        warnings.append(f"and {len(report.warnings) - MAX_WARNINGS} more")
    short = replace(
        report,
        lead=_cut(report.lead, MAX_SENTENCE),
        verdicts=[v._replace(text=_cut(v.text, MAX_SENTENCE)) for v in report.verdicts],
        warnings=warnings,
        tables=[_cut_table(table) for table in report.tables[:MAX_TABLES]],
    )
    return render("notebook.html", report=short)


def _cut_table(table: Table) -> Table:
    """Return the first rows of a table, with short cells, and a note if rows are left out."""
    rows = tuple(tuple(_cut(cell, MAX_CELL) for cell in row) for row in table.rows[:MAX_ROWS])
    notes = tuple(_cut(note, MAX_SENTENCE) for note in table.notes)
    if len(table.rows) > MAX_ROWS:
        notes += (f"The first {MAX_ROWS} of {len(table.rows):,} rows.",)
    title = _cut(table.title, MAX_CELL * 2)
    header = tuple(_cut(cell, MAX_CELL) for cell in table.header)
    return replace(table, title=title, header=header, rows=rows, notes=notes)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
