"""Tables on stdout, progress and notes on stderr."""

import json
import sys
from collections.abc import Iterator, Sequence
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
MISSED = 4  # the exit code of a missed target, with --strict
START = "the start, untrained"
GROUPS = 4  # that have a column each in a table of 80 characters


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


def paragraph(text: str) -> None:
    """A result in words, on stdout; names from data in it are text. Nothing where it is empty."""
    if text:
        out.print(printable(text), markup=False, highlight=False, emoji=False)


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
    for row in _in_sections(table, rows):
        table.add_row(*_cells(row, heldout=heldout))
    few = any(row["gap_hard_test_low"] is None and row["gap_hard_test"] is not None for row in rows)
    return _explained(table, any(row["gap_hard_test"] is None for row in rows), few=few)


def _in_sections(table: Table, rows: Sequence[Row]) -> Iterator[Row]:
    """The rows; a new metric or alpha has its own section of the table, with a heading."""
    last = None
    for row in rows:
        cell = (row["metric"], row["alpha"])
        if cell != last:
            if last is not None:
                table.add_section()
            how = "" if row["alpha"] is None else f"α={row['alpha']:g}"
            table.add_row(f"[bold]{row['metric']}[/bold]", how)  # apart: columns are narrow
        last = cell
        yield row


def decisions(rows: Sequence[Row]) -> Table:
    """The decisions behind the gaps: balanced accuracy, what a constant model reaches, and which
    share of each group is selected."""
    where = "held-out" if rows[0]["protocol"] == "heldout" else "test"
    table = _table(f"decisions on {where} rows, in per cent")
    table.add_column("method", no_wrap=True)
    groups = list(rows[0]["selection_rates"])
    shown = groups if len(groups) <= GROUPS else ["least", "most"]
    lost = any(row["collapsed"] for row in rows)
    names = [
        "balanced\naccuracy",
        "constant\naccuracy",
        *(f"selected\n{escape(printable(g))}" for g in shown),
    ]
    for name in [*names, *(["collapsed\nreplicates"] if lost else [])]:
        table.add_column(name, justify="right")
    for row in _in_sections(table, rows):
        cells = [
            points(row["balanced_accuracy"], row["balanced_accuracy_sd"]),
            points(row["accuracy_constant"]),
            *_selected(row["selection_rates"], few=shown is groups),
        ]
        if lost:
            cells.append(f"{row['collapsed']} of {row['seeds']}" if row["collapsed"] else "")
        table.add_row(_name(row), *cells)
    notes = ["constant: always predicts the most frequent class"]
    if any(isinstance(rate, dict) for rate in rows[0]["selection_rates"].values()):
        notes.append("selected: given the class in which the groups differ most")
    if lost:
        notes.append("collapsed: the model gives nearly everybody the same decision")
    table.caption, table.caption_justify = "\n".join(notes), "left"
    return table


def _selected(rates: dict[str, Any], *, few: bool) -> list[str]:
    """Of every group, or of many groups the lowest and the highest rate with their names."""
    flat = _of_one_class(rates)
    if few:
        return [points(rate) for rate in flat.values()]
    known = {group: rate for group, rate in flat.items() if rate is not None}
    if not known:
        return ["-", "-"]
    ends = (min(known, key=known.__getitem__), max(known, key=known.__getitem__))
    return [f"{points(known[g])} {escape(printable(g))}" for g in ends]


def _of_one_class(rates: dict[str, Any]) -> dict[str, float | None]:
    """By group; of more than two classes the one in which the groups differ most."""
    first = next(iter(rates.values()))
    if not isinstance(first, dict):
        return rates

    def apart(name: str) -> float:
        known = [each[name] for each in rates.values() if each[name] is not None]
        return max(known) - min(known) if known else -1.0

    widest = max(first, key=apart)
    return {group: each[widest] for group, each in rates.items()}


def _explained(table: Table, dashes: bool, *, few: bool = False) -> Table:
    notes = []
    if dashes:
        notes.append(
            "-: not estimable, a group has no row to take a rate from (not: fair), or training "
            "diverged"
        )
    if few:
        notes.append("n<10: not estimable: fewer than ten rows of a group to take a rate from")
    table.caption = "\n".join(notes) or None
    return table


def _name(row: Row) -> str:
    from fedgft.report.figures import NAMES

    return NAMES[row["method"]]


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
    low, high = row["gap_hard_test_low"], row["gap_hard_test_high"]
    unsure = "" if row["gap_hard_test"] is None else "n<10"
    hard = points(row["gap_hard_test"], row["gap_hard_test_sd"])
    soft = points(row["gap_soft"], row["gap_soft_sd"])
    return [
        _name(row),
        points(row["accuracy"], row["accuracy_sd"]),
        f"[bold]{hard}[/bold]" if heldout else hard,
        unsure if low is None else f"{100 * low:.1f}-{100 * high:.1f}",
        points(row["floor"]),
        points(row["gap_hard"], row["gap_hard_sd"]),
        soft if heldout else f"[bold]{soft}[/bold]",
        points(row["gap_soft_test"], row["gap_soft_test_sd"]),
    ]


def clients(rows: Sequence[Row], *, seed: int, before: str, most: int = 20) -> Table:
    """Every client under the model of one replicate and under the one `before` it (its name in the
    table); the largest first where there are many."""
    table = _table(
        f"clients under the model of seed {seed} and under {before}: accuracy and gap of decisions"
    )
    head = "start" if before == START else before
    for name in (
        "client",
        "rows",
        f"accuracy\n{head}",
        "accuracy\nafter",
        f"gap\n{head}",
        "gap\nafter",
        "adds to the\nglobal gap",
    ):
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
