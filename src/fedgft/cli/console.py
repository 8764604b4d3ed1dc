"""Tables on stdout, progress and notes on stderr."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedgft.layout import printable

if TYPE_CHECKING:
    from fedgft.layout import Table as ReportTable
    from fedgft.report.section import Section

Row = dict[str, Any]


class Terminal(Console):
    """Rich would end the process where a reader has seen enough; we have our own way (`main`)."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


out = Terminal()
err = Terminal(stderr=True, highlight=False)


@dataclass
class Voice:
    """How much is said on stderr: --quiet leaves errors and verdicts, --verbose adds."""

    quiet: bool = False
    verbose: bool = False


voice = Voice()


def note(text: str) -> None:
    if not voice.quiet:
        say(text)


def say(text: str) -> None:
    """A note that nobody has asked to be spared."""
    err.print(f"[dim]note:[/dim] {escape(printable(text))}", soft_wrap=True, emoji=False)


def wrote(paths: Sequence[Path]) -> None:
    for path in () if voice.quiet else paths:
        err.print(f"wrote {path}", markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Nothing else ever goes to stdout beside it."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def points(value: float | None, spread: float | None = None) -> str:
    """A fraction as percentage points; null is a dash, which the table's caption explains."""
    if value is None:
        return "-"
    text = f"{100 * value:z.1f}"  # z: no minus before 0.0
    return text if spread is None else f"{text}[dim]±{100 * spread:.1f}[/dim]"


def comparison(rows: Sequence[Row]) -> Table:
    """Method by method, the protocol's headline gap in bold. All numbers in percentage points."""
    first, heldout = rows[0], rows[0]["protocol"] == "heldout"
    where = "held out" if heldout else "test"
    table = _table(
        f"{escape(first['data'])}, protocol {first['protocol']}, {first['seeds']} replicates\n"
        "accuracy, and gaps between groups, in percentage points (mean±sd)"
    )
    table.add_column("method", no_wrap=True)
    for name in ("accuracy", f"decisions\n{where}", "95%\ninterval", "by\nchance",
                 "decisions\nclients", "scores\nclients", f"scores\n{where}"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for row in rows:
        cell = (row["metric"], row["alpha"])
        if cell != last:
            if last is not None:
                table.add_section()
            how = "" if row["alpha"] is None else f"α={row['alpha']:g}"
            table.add_row(f"[bold]{row['metric']}[/bold]", how)  # apart: columns are narrow
        last = cell
        table.add_row(*_cells(row, heldout=heldout))
    return _explained(table, any(row["gap_hard_test"] is None for row in rows))


def _explained(table: Table, dashes: bool) -> Table:
    if dashes:
        table.caption = (
            "-: not estimable, a group has no row to take a rate from (not: fair), or training "
            "diverged"
        )
    return table


def _table(title: str) -> Table:
    from rich import box

    return Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,  # eight columns of numbers have to fit into 80
        pad_edge=False,
    )


def _cells(row: Row, *, heldout: bool) -> list[str]:
    from fedgft.report.figures import NAMES

    low, high = row["gap_hard_test_low"], row["gap_hard_test_high"]
    hard = points(row["gap_hard_test"], row["gap_hard_test_sd"])
    soft = points(row["gap_soft"], row["gap_soft_sd"])
    return [
        NAMES[row["method"]],
        points(row["accuracy"], row["accuracy_sd"]),
        f"[bold]{hard}[/bold]" if heldout else hard,
        "" if low is None else f"{100 * low:.1f}-{100 * high:.1f}",
        points(row["floor"]),
        points(row["gap_hard"], row["gap_hard_sd"]),
        soft if heldout else f"[bold]{soft}[/bold]",
        points(row["gap_soft_test"], row["gap_soft_test_sd"]),
    ]


def clients(rows: Sequence[Row], *, most: int = 20) -> Table:
    """Every client before and after; the largest first where there are many."""
    table = _table(
        "the first replicate's clients before and after: accuracy and decision gap, points"
    )
    for name in ("client", "rows", "accuracy\nbefore", "accuracy\nafter", "gap\nbefore",
                 "gap\nafter", "adds to the\nglobal gap"):  # fmt: skip
        table.add_column(name, justify="left" if name == "client" else "right")
    for row in sorted(rows, key=lambda r: -r["rows"])[:most]:
        table.add_row(
            escape(printable(row["client"])), f"{row['rows']:,}",
            points(row["accuracy_before"]), points(row["accuracy_after"]),
            points(row["gap_hard_before"]), points(row["gap_hard_after"]),
            points(row["contribution"]),
        )  # fmt: skip
    if len(rows) > most:
        table.title = f"{table.title} (the {most} largest of {len(rows):,})"
    return _explained(table, any(row["gap_hard_after"] is None for row in rows))


def print_section(section: "Section", *, tables: bool) -> None:
    """What came out of an experiment, each sentence with its sign, and perhaps its tables."""
    from fedgft.report.section import SIGNS

    colours = {True: "green", False: "red", None: "dim"}
    out.print(escape(section.title), style="bold")
    for said, holds in section.findings:
        sign = Text(f" {SIGNS[holds]} ", style=colours[holds])
        out.print(sign.append(said, style="default"), soft_wrap=True)
    for table in section.tables if tables else ():
        out.print()
        print_table(table)
    out.print()


def print_table(table: "ReportTable") -> None:
    # one that is cut or wrapped cannot be read at all
    Terminal(width=500, emoji=False).print(_wide(table))


def _wide(made: "ReportTable") -> Table:
    table = _table(escape(made.title))
    for i, name in enumerate(made.header):
        shown = escape(name).replace(", ", ",\n").replace("95% ", "95%\n")
        table.add_column(shown, justify="left" if i < made.stubs else "right", no_wrap=True)
    for row in made.rows:
        table.add_row(*map(escape, row))
    table.padding = (0, 1)
    table.caption = escape("\n".join(made.notes)) or None
    table.caption_justify = "left"
    return table
