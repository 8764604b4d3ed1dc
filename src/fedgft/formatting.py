"""Numbers, names, tables and reports as text: for the terminal, Markdown and HTML.

Names of groups, classes and sites come from data and may hold anything. Every function that puts
them into a document escapes them, so they are shown as text and do nothing else.
"""

import base64
import csv
import hashlib
import html
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from io import StringIO
from typing import Any, NamedTuple
from urllib.parse import quote

SIGNS = {True: "✓", False: "✗", None: "·"}  # passes, fails, cannot be judged
DASH = "–"  # a number that is not known
LIMITS_TITLE = "What this audit can and cannot tell you"
MAX_NAMES = 3  # names listed in a sentence
# The colors of groups, which color-blind readers can tell apart (Okabe and Ito), then four more.
GROUP_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c8c00",
    "#7f7f7f",
    "#a05195",
    "#b04a4a",
)
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a formula in a spreadsheet
NUMBER = re.compile(r"[-+]?[\d.,]+( to [-+]?[\d.,]+)?")
VALUE = r"(-?[\d.,]+|–)"  # a number, or the dash of one that is not known
ONLY_LIMITS = re.compile(f"{VALUE} to {VALUE}")
VALUE_AND_LIMITS = re.compile(rf"{VALUE} \({VALUE} to {VALUE}\)")
# Control characters, and characters that reverse the direction of the text around them.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
MARKUP = re.compile(r"[\\`*_\[\]$|]|~(?=\S)|(?<=\S)~")  # emphasis, links, code, tables, formulas
ENTITY = re.compile(r"&(?=#?\w+;)")
ADDRESS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*)(:)(?=//|\S*@)|\b(www)(\.)")  # a link on GitHub
BLOCK = re.compile(r"^(\d*)([.)]|#+|[-+]|[-=]+)(?=\s|$)")  # a heading, a list, a rule
# Draws every specification in the page. `ast` makes Vega interpret expressions without `eval`.
# A chart whose `usermeta` names a width gets as wide as the page, but not wider than that. On a
# phone, the entries of a legend are below each other.
DRAW_CHARTS = """
for (const holder of document.querySelectorAll("[data-chart]")) {
  const spec = JSON.parse(document.getElementById(holder.dataset.chart).textContent);
  const fit = spec.usermeta;
  if (holder.clientWidth < 500) spec.config.legend.columns = 1;
  if (fit) {
    const room = Math.max(160, Math.min(fit.width, holder.clientWidth - fit.margin));
    for (const part of spec.vconcat ?? [spec]) part.width = room;
    if (fit.square) spec.height = room;
  }
  vegaEmbed(holder, spec, {actions: false, renderer: "svg", ast: true, mode: "vega-lite"})
    .then(() => { holder.dataset.drawn = "yes"; });
}
"""


def format_points(value: float | None, *, unknown: str = DASH, sign: str = "") -> str:
    """A fraction in percentage points, with one decimal and never ``-0.0``.

    Parameters
    ----------
    value
        The fraction; None if it cannot be estimated.
    unknown
        The text for None.
    sign
        ``"+"`` to write the sign of positive values too.

    >>> format_points(0.1234), format_points(-0.00001), format_points(0.02, sign="+")
    ('12.3', '0.0', '+2.0')
    """
    return unknown if value is None else f"{100 * value:{sign}z.1f}"


def format_percent(value: float | None, *, unknown: str = DASH) -> str:
    """A fraction in percent: 0.1234 is ``12.3%``; `unknown` for None."""
    return unknown if value is None else f"{format_points(value)}%"


def format_interval(
    low: float | None, high: float | None, *, scale: float = 100, digits: int = 1, sign: str = ""
) -> str:
    """The limits of an interval, by default in percentage points.

    Parameters
    ----------
    low, high
        The limits; None where no limit is claimed.
    scale, digits
        The factor (1 for ratios), and the number of decimals.
    sign
        ``"+"`` to write the sign of positive limits too.

    >>> format_interval(0.01, 0.125), format_interval(None, 0.125), format_interval(None, None)
    ('1.0 to 12.5', '– to 12.5', '–')
    """
    if low is None and high is None:
        return DASH
    limits = (DASH if x is None else f"{scale * x:{sign}z.{digits}f}" for x in (low, high))
    return " to ".join(limits)


def format_gap(value: float, low: float | None, high: float | None) -> str:
    """A gap in percentage points, with its 95% interval where both limits are known.

    >>> format_gap(0.1, 0.05, 0.15), format_gap(0.1, 0.05, None)
    ('10.0 points (95% interval 5.0 to 15.0)', '10.0 points')
    """
    text = f"{format_points(value)} points"
    if low is None or high is None or low != low or high != high:  # None or NaN
        return text
    return f"{text} (95% interval {format_interval(low, high)})"


def format_count(number: int, noun: str) -> str:
    """A number with its noun, which takes an s unless there is one.

    >>> format_count(1, "value"), format_count(1200, "missing value")
    ('1 value', '1,200 missing values')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def join_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are: ``a, b, c and 2 more``."""
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def enumerate_names(names: Sequence[str]) -> str:
    """All names in a sentence: ``a``, ``a and b``, ``a, b and c``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def group_colors(groups: Iterable[str]) -> dict[str, str]:
    """The color of each group: the same groups have the same colors in every figure and page.

    Parameters
    ----------
    groups
        The names of all groups that are compared, in any order; colors go by sorted name. The
        colors repeat after ten groups.

    Returns
    -------
    dict
        The color of each group, as hexadecimal RGB.

    >>> group_colors(["women", "men"])
    {'women': '#d55e00', 'men': '#0072b2'}
    """
    names = list(groups)
    ranks = {name: rank for rank, name in enumerate(sorted(set(names)))}
    return {name: GROUP_COLORS[ranks[name] % len(GROUP_COLORS)] for name in names}


def printable(text: str) -> str:
    """A name from data, safe to print: control characters become ``\ufffd``.

    >>> printable("red: \x1b[31m")
    'red: \ufffd[31m'
    """
    return UNPRINTABLE.sub("\ufffd", text)


def one_line(value: Any, max_length: int = 400) -> str:
    """Return an untrusted value as one printable line for logs and errors, cut at a length."""
    return printable(" ".join(str(value).split()))[:max_length]


def escape_markdown(text: str) -> str:
    """Escape a text that may hold names from data, so that Markdown shows it literally.

    The result contains no emphasis, link, image, code, HTML, table cell, heading, list or line
    break.

    >>> escape_markdown("[north](javascript:alert(1)) <b>")
    '\\\\[north\\\\](javascript:alert(1)) &lt;b&gt;'
    """
    text = ENTITY.sub("&amp;", printable(" ".join(text.split())))
    text = MARKUP.sub(r"\\\g<0>", text).replace("<", "&lt;").replace(">", "&gt;")
    text = ADDRESS.sub(r"\1\3\\\2\4", text)
    return BLOCK.sub(r"\1\\\2", text)


def unescape_markdown(text: str) -> str:
    """The inverse of `escape_markdown`, up to white space and control characters."""
    return html.unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text))


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Parameters
    ----------
    title, header, rows
        The caption, the names of the columns, and the cells of each row.
    stubs
        The number of leading columns that name a row (left-aligned); the others hold numbers.
    notes
        Sentences below the table.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    stubs: int
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The title as a name of files and of places in a page: ``rates-by-sex``."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:60] or "table"

    def csv(self) -> str:
        """The table as CSV, with a column for each limit of an interval.

        A text that a spreadsheet would run as a formula gets an apostrophe.
        """
        lines = StringIO()
        columns = [
            part
            for i, name in enumerate(self.header)
            for part in _split_limits(name, [row[i] for row in self.rows], split=i >= self.stubs)
        ]
        rows = ([_plain_cell(cell) for cell in row] for row in zip(*columns, strict=True))
        csv.writer(lines, lineterminator="\n").writerows(rows)
        return lines.getvalue()

    @property
    def csv_link(self) -> str:
        """The table as CSV in an address of its own, which a page can offer without a network."""
        return f"data:text/csv;charset=utf-8,{quote(self.csv())}"

    def markdown(self) -> str:
        """The table in Markdown, with every text escaped."""
        rule = ["---"] * self.stubs + ["---:"] * (len(self.header) - self.stubs)
        header, *rows = (map(escape_markdown, cells) for cells in (self.header, *self.rows))
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))
        below = "".join(f"\n{escape_markdown(note)}\n" for note in self.notes)
        return f"**{escape_markdown(self.title)}**\n\n{body}\n{below}"


def _split_limits(name: str, cells: Sequence[str], *, split: bool) -> list[list[str]]:
    """Return a column of a table as columns with one number per cell, each with its name first.

    ``1.2 (0.5 to 1.9)`` becomes a value and two limits, ``0.5 to 1.9`` two limits. Other texts
    stay in the first column. Without `split`, the column holds names and stays as it is.
    """
    values = [VALUE_AND_LIMITS.fullmatch(cell) for cell in cells]
    limits = [ONLY_LIMITS.fullmatch(cell) for cell in cells]
    if split and any(values):
        parts = [m.groups() if m else (cell, "", "") for m, cell in zip(values, cells, strict=True)]
        names = [name, f"{name}, low", f"{name}, high"]
    elif split and any(limits):
        parts = [m.groups() if m else (cell, "") for m, cell in zip(limits, cells, strict=True)]
        names = [f"{name}, low", f"{name}, high"]
    else:
        return [[name, *cells]]
    return [[names[k], *(part[k] for part in parts)] for k in range(len(names))]


def _plain_cell(cell: str) -> str:
    """Return a cell for a spreadsheet, which never runs it as a formula."""
    return f"'{cell}" if cell.startswith(FORMULA) and not NUMBER.fullmatch(cell) else cell


@dataclass(frozen=True)
class Figure:
    """A chart (a Vega-Lite specification), its name in the page, its title and its caption."""

    name: str
    title: str
    caption: str
    spec: dict[str, Any]


class Verdict(NamedTuple):
    """One conclusion: True if it is good news, False if bad, None if nothing can be claimed.

    `state` names the verdict on a gap, such as "within"; it is empty for other conclusions.
    """

    passes: bool | None
    text: str
    state: str = ""

    @property
    def sign(self) -> str:
        """The sign in front of the sentence."""
        return "?" if self.state == "inconclusive" else SIGNS[self.passes]


@dataclass(frozen=True)
class Report:
    """A document with verdicts, warnings, figures and tables.

    Parameters
    ----------
    mark
        An HTML comment that identifies a file as written by this library.
    title, lead
        The heading, and one paragraph below it.
    verdicts, legend
        The conclusions, and what their signs mean.
    warnings
        Sentences to read before the numbers.
    tables, figures
        The numbers. Figures are part of the HTML page only.
    foot
        The last line.
    scope
        One sentence that says what the report covers.
    byline, state
        One line below the title, and the verdict that the lead states.
    answers
        Questions of a reader without statistics, and their answers.
    facts, files
        Names and texts about the report, and the input files with their SHA-256.
    definitions, limits
        Words with their meaning, and what the report cannot say.
    facts_title, limits_title, without_figures
        The headings of the facts and the limits, and where the numbers of the figures are for
        readers without JavaScript.
    """

    mark: str
    title: str
    lead: str
    verdicts: Sequence[Verdict]
    legend: Sequence[str]
    warnings: Sequence[str]
    tables: Sequence[Table]
    foot: str
    figures: Sequence[Figure] = ()
    scope: str = ""
    byline: str = ""
    state: str = ""
    answers: Sequence[tuple[str, str]] = ()
    facts: Sequence[tuple[str, str]] = ()
    files: Sequence[tuple[str, str]] = ()
    definitions: Sequence[tuple[str, str]] = ()
    limits: Sequence[str] = ()
    facts_title: str = "About this audit"
    limits_title: str = LIMITS_TITLE
    without_figures: str = (
        "The tables below hold rates and gaps; curves and other thresholds are in audit.json."
    )

    def to_markdown(self) -> str:
        """The report in Markdown, without figures and with every text escaped."""
        lines = [self.mark, f"# {escape_markdown(self.title)}", ""]
        lines += [f"{escape_markdown(text)}\n" for text in (self.byline, self.lead) if text]
        lines += _list_in_markdown("In short", _join_terms(self.answers))
        lines += ["## Verdicts", ""]
        lines += [f"- {v.sign} {escape_markdown(v.text)}" for v in self.verdicts]
        lines += ["", escape_markdown(f"{'; '.join(self.legend)}."), ""]
        lines += _list_in_markdown("Caveats", map(escape_markdown, self.warnings))
        lines += _list_in_markdown(self.facts_title, _join_terms(self.facts))
        lines += _list_in_markdown("Input files (SHA-256)", _join_terms(self.files))
        lines += [
            "## Numbers",
            "",
            *(f"{escape_markdown(text)}\n" for text in [self.scope] if text),
        ]
        lines += [table.markdown() for table in self.tables]
        lines += _list_in_markdown("Definitions", _join_terms(self.definitions))
        lines += _list_in_markdown(self.limits_title, map(escape_markdown, self.limits))
        return "\n".join([*lines, escape_markdown(self.foot)]) + "\n"

    def to_html(self) -> str:
        """The report as one HTML page that needs no network and no other file.

        The template escapes all text. The page's Content Security Policy allows its own script
        and nothing else, so that even a name that the template did not escape could run no code.
        """
        from importlib.metadata import version  # slow to import, and not needed in a terminal

        script = _chart_script() if self.figures else ""
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        return render(
            "audit.html",
            report=self,
            script=script,
            script_digest=digest,
            version=version("fedgft"),
        )


def _list_in_markdown(title: str, items: Iterable[str]) -> list[str]:
    """Return the lines of a section with a list; none if there are no items."""
    lines = [f"- {item}" for item in items]
    return [f"## {title}", "", *lines, ""] if lines else []


def _join_terms(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a line per pair: the term in bold, then the text, both escaped."""
    for term, text in pairs:
        end = "" if term.endswith("?") else ":"
        yield f"**{escape_markdown(term)}{end}** {escape_markdown(text)}"


@cache  # making the script takes more than a second
def _chart_script() -> str:
    """Vega, Vega-Lite, Vega-Embed and `DRAW_CHARTS` as one script."""
    from vl_convert import javascript_bundle

    return javascript_bundle(DRAW_CHARTS).replace("</script", "<\\/script")


def render(template: str, /, **values: Any) -> str:
    """Fill a template of the package. Text is escaped; a missing name is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedgft"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
