"""Output of commands: tables and JSON on stdout; notes, errors and progress on stderr."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedgft.errors import FedgftError
from fedgft.formatting import SIGNS, Verdict, format_points, printable
from fedgft.settings import SETTINGS

if TYPE_CHECKING:
    from cyclopts import App
    from rich.progress import Progress

    from fedgft.formatting import Table as ReportTable

Row = dict[str, Any]
# The password in a URL: also one that was given where a file belongs, or that is no proper URL.
PASSWORD = re.compile(r"([A-Za-z][\w+.-]*:?/{1,2}[^\s/@:]*:)\S+(?=@)|(?<=password=)[^\s&;:]+")
MISSED = 4  # the exit code of a missed target, with --strict
MAX_GROUP_COLUMNS = 4  # more do not fit into a table of 80 characters
MAX_CLIENTS = 20  # rows in the table of clients
CLIENT_NUMBERS = (  # columns of the table of clients
    "accuracy_fedavg",
    "accuracy",
    "gap_hard_fedavg",
    "gap_hard",
    "contribution",
)
WARNING_STYLE = "bold yellow"  # of the word before a warning
MIN_WIDTH = 20  # of a terminal; in a narrower one, the terminal itself divides lines
LOG_LINES = 10  # lines of progress per task, with --verbose
MEASURE_OPTIONS = ("score", "min_cell", "min_bin", "bins", "epsilon")  # that others advise to use
NOT_ESTIMABLE = (
    "-: not estimable (a group has no rows for the rate; that does not mean fair), or diverged"
)
FEW_ROWS = "n<10: not estimable: fewer than ten rows of a group to take a rate from"
UNBROKEN = re.compile(r"\(?[-+–.,\d]+ to [-+–.,\d]+\)?|\S+")  # an interval or a word, in a table
COLUMN_GAP = 2  # blanks between two columns of a table
MIN_STUB = 8  # smallest width of a column that names rows
SIGN_COLORS = {True: "green", False: "red", None: "dim"}


class Terminal(Console):
    """A console that raises where the reader has closed the pipe; rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Raise `BrokenPipeError`, which `run` handles."""
        raise BrokenPipeError


out = Terminal()
err = Terminal(stderr=True, highlight=False)


@dataclass
class Output:
    """What is printed: --quiet leaves results and errors, --verbose adds to the notes.

    `command` is the one that runs: its options are named in messages. `help_all`: its help shows
    all of them. `said`: the notes that have been printed.
    """

    quiet: bool = False
    verbose: bool = False
    help_all: bool = False
    command: "App | None" = None
    said: set[str] = field(default_factory=set)


output = Output()


def option_name(field: str) -> str:
    """Return how the command that runs calls a field of the library.

    The field `batch_size` is --batch-size, and `metric` is --metrics in `fedgft compare`. A field
    that the command lacks is an option of `fedgft train` or `fedgft measure`, or stays as it is.
    """
    if output.command is not None:
        arguments = output.command.assemble_argument_collection()
        options = {each.field_info.name: each.name for each in arguments if not each.children}
        for name in (field, f"{field}_", f"{field}s", field.removesuffix("s")):
            if name in options:
                return options[name]
    known = field in SETTINGS or field in ("out", "resume", *MEASURE_OPTIONS)
    return f"--{field.replace('_', '-')}" if known else field


def render(message: str) -> str:
    """Return a message as a terminal can show it, with options in place of fields in backquotes."""
    return printable(FedgftError(message).render(option_name))


def fail(message: str) -> None:
    """Print an error in one line, which a terminal wraps between words, and exit with code 2."""
    text = PASSWORD.sub(r"\1***", f"fedgft: {' '.join(render(message).split())}")
    sys.stderr.write("\n".join(wrap_words(text, err)) + "\n")
    sys.exit(2)


def wrap_words(text: str, console: Console, *, room: int = 0) -> list[str]:
    """Return the lines of a text in the width of a terminal; no word is divided.

    Parameters
    ----------
    text
        The text. Line breaks in it stay.
    console
        If it is not a terminal but a file, there is nothing to wrap.
    room
        Columns before each line that are taken.
    """
    if not console.is_terminal:
        return text.split("\n")
    width = max(console.width - room, MIN_WIDTH)
    lines = []
    for paragraph_text in text.split("\n"):
        line = ""
        for word in paragraph_text.split(" "):
            longer = f"{line} {word}" if line else word
            if line and cell_len(longer) > width:
                lines.append(line)
                line = word
            else:
                line = longer
        lines.append(line)
    return lines


def discard_stdout() -> None:
    """Send what is left of stdout to nowhere, after the reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Print a note, unless --quiet is given."""
    if not output.quiet:
        say(text)


def say(text: str) -> None:
    """Print a note, also with --quiet; a note that was printed in this run is not repeated."""
    if text not in output.said:
        output.said.add(text)
        print_indented("note: ", text)


def warn(text: str) -> None:
    """Print a warning, also with --quiet: it is about what a file reveals."""
    print_indented("warning: ", text, style=WARNING_STYLE)


def print_indented(start: str, text: str, *, style: str = "dim") -> None:
    """Print a text on stderr after a start in a style; further lines begin below the text."""
    lines = wrap_words(render(text), err, room=len(start))
    body = ("\n" + " " * len(start)).join(lines)
    err.print(Text.assemble((start, style), body), soft_wrap=True, emoji=False)


def wrote(paths: Sequence[Path]) -> None:
    """Name the files that were written, unless --quiet is given."""
    for path in () if output.quiet else paths:
        err.print(f"wrote {path}", markup=False, soft_wrap=True)


def paragraph(text: str, *, wrap: bool = True) -> None:
    """Print a result in words on stdout, as plain text; nothing if it is empty.

    `wrap` is False for a line that somebody will copy: a command or a path.
    """
    if text:
        plain = {"markup": False, "highlight": False, "emoji": False}
        out.print(printable(text), soft_wrap=not wrap, **plain)


def print_json(value: Any) -> None:
    """Print a value as JSON; nothing else may go to stdout then."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def points(value: float | None, spread: float | None = None) -> str:
    """Return a fraction as percentage points; None is a dash, which `_add_notes` explains."""
    text = format_points(value, unknown="-")
    return text if value is None or spread is None else f"{text}[dim]±{100 * spread:.1f}[/dim]"


def comparison(rows: Sequence[Row], *, clients: str) -> Table:
    """Return the table of `fedgft compare`: one line per method, all numbers in points.

    The headline gap of the protocol is bold. With a local target, the largest local gap takes the
    place of the last column, so that the table fits into 80 characters.

    Parameters
    ----------
    rows
        Those of `fedgft.study.row`.
    clients
        The federation in a few words.
    """
    first = rows[0]
    heldout = first["protocol"] == "heldout"
    where = "held out" if heldout else "test"
    title = (
        f"{escape(first['data'])}, {clients}, protocol {first['protocol']}, "
        f"{first['seeds']} replicates\n"
        "accuracy, and gaps between groups, in percentage points (mean±sd)"
    )
    names = f"method|accuracy|decisions\n{where}|95%\ninterval|noise\nfloor|decisions\nclients"
    last = "largest\nlocal gap" if "local_gap" in first else f"scores\n{where}"
    names += f"|scores\nclients|{last}"
    table = _table(title, names.split("|"), no_wrap=True)
    for row in _in_sections(table, rows):
        table.add_row(*_cells(row, heldout=heldout))
    few = any(row["gap_hard_test_low"] is None and row["gap_hard_test"] is not None for row in rows)
    dashes = any(row["gap_hard_test"] is None for row in rows)
    return _add_notes(table, dashes=dashes, few=few)


def _in_sections(table: Table, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows; add a heading to the table where the metric or alpha changes."""
    last = None
    for row in rows:
        cell = (row["metric"], row["alpha"])
        if cell != last:
            if last is not None:
                table.add_section()
            how = "" if row["alpha"] is None else f"α={row['alpha']:g}"
            table.add_row(f"[bold]{row['metric']}[/bold]", how)  # own row: narrow columns
        last = cell
        yield row


def decisions(rows: Sequence[Row]) -> Table:
    """Return the table of the decisions behind the gaps.

    Columns: balanced accuracy, the accuracy of a constant model, the share of each group that is
    selected, and the number of collapsed replicates where there are any.
    """
    where = "held-out" if rows[0]["protocol"] == "heldout" else "test"
    groups = list(rows[0]["selection_rates"])
    shown = groups if len(groups) <= MAX_GROUP_COLUMNS else ["least", "most"]
    lost = any(row["collapsed"] for row in rows)
    names = ["method", "balanced\naccuracy", "constant\naccuracy"]
    names += [f"selected\n{escape(printable(g))}" for g in shown]
    names += ["collapsed\nreplicates"] if lost else []
    table = _table(f"decisions on {where} rows, in percent", names)
    table.columns[0].no_wrap = True
    for row in _in_sections(table, rows):
        balanced = points(row["balanced_accuracy"], row["balanced_accuracy_sd"])
        selected = _selected(row["selection_rates"], few=shown is groups)
        collapsed = [f"{row['collapsed']} of {row['seeds']}" if row["collapsed"] else ""] * lost
        constant = points(row["accuracy_constant"])
        table.add_row(_name(row), balanced, constant, *selected, *collapsed)
    notes = ["constant: always predicts the most frequent class"]
    if any(isinstance(rate, dict) for rate in rows[0]["selection_rates"].values()):
        notes.append("selected: given the class in which the groups differ most")
    if lost:
        notes.append("collapsed: the model gives nearly everybody the same decision")
    table.caption = "\n".join(notes)
    table.caption_justify = "left"
    return table


def _selected(rates: dict[str, Any], *, few: bool) -> list[str]:
    """Return the rate of every group, or the lowest and the highest rate with their names."""
    flat = _rates_of_one_class(rates)
    if few:
        return [points(rate) for rate in flat.values()]
    known = {group: rate for group, rate in flat.items() if rate is not None}
    if not known:
        return ["-", "-"]
    ends = (min(known, key=known.__getitem__), max(known, key=known.__getitem__))
    return [f"{points(known[g])} {escape(printable(g))}" for g in ends]


def _rates_of_one_class(rates: dict[str, Any]) -> dict[str, float | None]:
    """Return rates by group; of more than two classes, those of the class that differs most."""
    first = next(iter(rates.values()))
    if not isinstance(first, dict):
        return rates

    def apart(name: str) -> float:
        known = [each[name] for each in rates.values() if each[name] is not None]
        return max(known) - min(known) if known else -1.0

    widest = max(first, key=apart)
    return {group: each[widest] for group, each in rates.items()}


def _add_notes(table: Table, *, dashes: bool, few: bool = False) -> Table:
    """Add notes below the table that explain the signs in place of numbers."""
    table.caption = "\n".join([NOT_ESTIMABLE] * dashes + [FEW_ROWS] * few) or None
    return table


def _name(row: Row) -> str:
    from fedgft.algorithms.registry import METHOD_LABELS

    return METHOD_LABELS[row["method"]]


def _table(title: str, names: Sequence[str], *, left: int = 1, no_wrap: bool = False) -> Table:
    """Return an empty table; `left` columns are aligned left, the others right."""
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,  # eight columns of numbers have to fit into 80
        pad_edge=False,
    )
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=no_wrap)
    return table


def _cells(row: Row, *, heldout: bool) -> list[str]:
    low = row["gap_hard_test_low"]
    high = row["gap_hard_test_high"]
    unsure = "" if row["gap_hard_test"] is None else "n<10"
    hard = points(row["gap_hard_test"], row["gap_hard_test_sd"])
    soft = points(row["gap_soft"], row["gap_soft_sd"])
    last = "local_gap" if "local_gap" in row else "gap_soft_test"
    return [
        _name(row),
        points(row["accuracy"], row["accuracy_sd"]),
        f"[bold]{hard}[/bold]" if heldout else hard,
        unsure if low is None else f"{100 * low:.1f}-{100 * high:.1f}",
        points(row["floor"]),
        points(row["gap_hard"], row["gap_hard_sd"]),
        soft if heldout else f"[bold]{soft}[/bold]",
        points(row[last], row[f"{last}_sd"]),
    ]


def clients(rows: Sequence[Row], *, seed: int, method: str) -> Table:
    """Return the table of clients, the largest first.

    Parameters
    ----------
    rows
        Those of `fedgft.study.client_rows`; `MAX_CLIENTS` are shown.
    seed
        The replicate.
    method
        The name of the method, which stands beside FedAvg.
    """
    title = f"clients with FedAvg and with {method}: accuracy and gap of decisions (seed {seed})"
    head = method.replace(" ", "\n")
    names = ["client", "rows", "accuracy\nFedAvg", f"accuracy\n{head}", "gap\nFedAvg"]
    table = _table(title, [*names, f"gap\n{head}", "adds to the\noverall gap"])
    for row in sorted(rows, key=lambda r: -r["rows"])[:MAX_CLIENTS]:
        numbers = [points(row[name]) for name in CLIENT_NUMBERS]
        table.add_row(escape(printable(row["client"])), f"{row['rows']:,}", *numbers)
    if len(rows) > MAX_CLIENTS:
        table.title = f"{table.title} (the {MAX_CLIENTS} largest of {len(rows):,})"
    return _add_notes(table, dashes=any(row["gap_hard"] is None for row in rows))


def print_signs(
    findings: Sequence[tuple[bool | None, str] | Verdict], *, soft_wrap: bool = False
) -> None:
    """Print sentences, each after a sign: it holds, it does not hold, or it is not known."""
    for finding in findings:
        holds, text = finding[:2]
        sign = finding.sign if isinstance(finding, Verdict) else SIGNS[holds]
        sign = Text(f" {sign} ", style=SIGN_COLORS[holds])
        out.print(sign.append(text, style="default"), soft_wrap=soft_wrap)


def print_table(report: "ReportTable", *, width: int | None = None) -> None:
    """Print a table of a report within a width; words and numbers are never broken.

    Where the columns do not fit side by side, cells are wrapped between words and before an
    interval. Where that does not suffice, the table is printed in parts, one below the other, that
    repeat the columns that name the rows.

    Parameters
    ----------
    report
        The table.
    width
        The number of characters per line. None (default): the width of the terminal.
    """
    limit = out.width if width is None else width
    console = out if width is None else Terminal(width=width)
    lines = [[printable(cell) for cell in cells] for cells in (report.header, *report.rows)]
    console.print(Text(printable(report.title), style="bold"))
    for columns in _split_columns(lines, report.stubs, limit):
        part = [[cells[i] for i in columns] for cells in lines]
        stubs = min(report.stubs, len(columns))
        widths = _column_widths(part, stubs, limit)
        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            padding=(0, COLUMN_GAP - 1, 0, 0),  # the box adds a blank
            pad_edge=False,
            header_style="bold",
        )
        for i, (name, size) in enumerate(zip(part[0], widths, strict=True)):
            side = "left" if i < stubs else "right"
            heading = _wrap_cell(name, size)
            table.add_column(heading, justify=side, width=size, no_wrap=True)
        for cells in part[1:]:
            table.add_row(*(_wrap_cell(c, w) for c, w in zip(cells, widths, strict=True)))
        console.print(table)
        if columns[-1] < len(report.header) - 1:
            console.print()
    for text in report.notes:
        (console if limit < out.width else out).print(Text(printable(text)))
    console.print()


def _split_columns(lines: Sequence[Sequence[str]], stubs: int, limit: int) -> list[list[int]]:
    """Return the columns of each part of a table, so that every part fits into the limit."""
    names = list(range(min(stubs, len(lines[0]))))
    parts = [list(names)]
    for column in range(len(names), len(lines[0])):
        wanted = [*parts[-1], column]
        least = sum(_smallest_width(lines, i) for i in wanted) + COLUMN_GAP * (len(wanted) - 1)
        if least > limit and len(parts[-1]) > len(names):
            parts.append([*names, column])
        else:
            parts[-1].append(column)
    return parts


def _column_widths(lines: Sequence[Sequence[str]], stubs: int, limit: int) -> list[int]:
    """Return the width of each column.

    If not all fit, columns of numbers get as much as they need first, from left to right; the
    columns that name the rows share the rest.
    """
    count = len(lines[0])
    budget = limit - COLUMN_GAP * (count - 1)
    widths = [_smallest_width(lines, i) for i in range(count)]
    for i in (*range(stubs, count), *range(stubs)):
        heading = cell_len(lines[0][i]) // 2 + 2  # in about two lines
        longest = max(heading, *(cell_len(cells[i]) for cells in lines[1:]), 1)
        spare = budget - sum(widths)
        if i < stubs or longest - widths[i] <= spare:
            widths[i] += max(0, min(longest - widths[i], spare))
    excess = sum(widths) - budget
    if excess > 0:  # a name has a word that is too long: it is the only thing that is broken
        longest = max(range(stubs), key=lambda i: widths[i], default=0)
        widths[longest] = max(MIN_STUB, widths[longest] - excess)
    return widths


def _smallest_width(lines: Sequence[Sequence[str]], column: int) -> int:
    """Return the length of the longest piece of a column that must not be broken."""
    return max((cell_len(p) for cells in lines for p in UNBROKEN.findall(cells[column])), default=1)


def _wrap_cell(text: str, width: int) -> Text:
    """Return a cell, wrapped between its unbroken pieces; a longer piece is folded.

    The second name of a pair, as in "woman / man", begins a new line.
    """
    first, slash, second = text.partition(" / ")
    if slash and cell_len(text) > width:
        return Text("\n").join((_wrap_cell(f"{first} /", width), _wrap_cell(second, width)))
    lines = [""]
    for piece in UNBROKEN.findall(text):
        joined = f"{lines[-1]} {piece}".lstrip()
        if cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines += chop_cells(piece, width)
    return Text("\n".join(lines if lines[0] else lines[1:]))


@dataclass
class Bar:
    """Progress of a command: a bar on a terminal; in a log, with --verbose, a line per tenth."""

    progress: "Progress"
    task: Any = None
    fetches: dict[str, Any] = field(default_factory=dict)  # name of the download -> task
    logged: dict[Any, int] = field(default_factory=dict)  # task -> tenths in the log so far

    def expect(self, total: int, *, images: int | None = None) -> None:
        """Start the bar of the training.

        Parameters
        ----------
        total
            The amount of work, in the unit of `advance`.
        images
            Images that one unit of work reads, if it reads images.
        """
        self.task = self.progress.add_task("training", total=total, images=images)

    def advance(self, what: str, amount: int) -> None:
        """Add to the work that is done; the total grows if that is more than was expected."""
        task = self.progress.tasks[self.task]
        total = None if task.total is None else max(task.total, task.completed + amount)
        self.progress.update(self.task, description=escape(what), advance=amount, total=total)
        self._log(self.task, what)

    def rows(self, done: int, total: int | None = None) -> None:
        """Show how many rows of a table have been read.

        Parameters
        ----------
        done
            The number of rows.
        total
            All rows of the table, roughly. None: their number is not known.
        """
        if self.task is None:
            self.task = self.progress.add_task("", total=total)
        text = f"{done:,} rows read"
        total = None if total is None else max(done, total)
        self.progress.update(self.task, description=text, completed=done, total=total)
        self._log(self.task, text)

    def fetch(self, what: str, done: int, total: int | None) -> None:
        """Show how much of something has been fetched; `total` is None if that is not known."""
        if what not in self.fetches:
            self.fetches[what] = self.progress.add_task(escape(what), total=total)
        self.progress.update(self.fetches[what], completed=done, total=total)
        self._log(self.fetches[what], what)

    def _log(self, task: Any, what: str) -> None:
        found = self.progress.tasks[task]
        if not output.verbose or err.is_terminal or not found.total:
            return
        tenth = int(LOG_LINES * found.completed / found.total)
        if tenth > self.logged.get(task, 0):
            self.logged[task] = tenth
            print_indented("note: ", f"{100 * tenth // LOG_LINES:3d}% {what}")


@contextmanager
def bar() -> Iterator[Bar]:
    """Show progress on stderr while the block runs; hidden in files and with --quiet."""
    from rich import progress as rich_progress  # here: `fedgft --help` shows no progress

    class ImageSpeed(rich_progress.ProgressColumn):
        """Images per second, where the work reads images."""

        def render(self, task: rich_progress.Task) -> Text:
            images = task.fields.get("images")
            speed = task.speed or (task.elapsed and task.completed / task.elapsed)
            return Text(f"{images * speed:,.0f} images/s" if images and speed else "")

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TextColumn("{task.percentage:>3.0f}%"),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("left"),
        rich_progress.TimeRemainingColumn(),
        ImageSpeed(),
    )
    hidden = output.quiet or not err.is_terminal
    made = rich_progress.Progress(*columns, console=err, transient=True, disable=hidden)
    with made as progress:
        yield Bar(progress)
