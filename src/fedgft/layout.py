"""What pages are made of: tables of plain text, and templates that escape all of it."""

import html
import re
from dataclasses import dataclass
from typing import Any

SIGNS = {True: "✓", False: "✗", None: "·"}  # it is so, it is not, it cannot be said
# Control characters, and those that turn the direction of the text around them.
UNSEEN = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F),
                        *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C], "\ufffd")  # fmt: skip


def printable(text: str) -> str:
    """A name from data as a person can look at it, on a terminal or a page.

    >>> printable("red: \x1b[31m")
    'red: \ufffd[31m'
    """
    return text.translate(UNSEEN)


MARKUP = re.compile(r"[\\`*_\[\]$|]|~(?=\S)|(?<=\S)~")  # emphasis, links, code, tables, formulas
ENTITY = re.compile(r"&(?=#?\w+;)")
ADDRESS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*)(:)(?=//|\S*@)|\b(www)(\.)")  # a link on GitHub
BLOCK = re.compile(r"^(\d*)([.)]|#+|[-+]|[-=]+)(?=\s|$)")  # a heading, a list, a rule


def escape_markdown(text: str) -> str:
    """A text that may hold names from data, as Markdown that shows it and does nothing else.

    No emphasis, link, image, code, HTML, table cell, heading or list comes of it, nor a line break.

    >>> escape_markdown("[north](javascript:alert(1)) <b>")
    '\\\\[north\\\\](javascript:alert(1)) &lt;b&gt;'
    """
    text = ENTITY.sub("&amp;", printable(" ".join(text.split())))
    text = MARKUP.sub(r"\\\g<0>", text).replace("<", "&lt;").replace(">", "&gt;")
    text = ADDRESS.sub(r"\1\3\\\2\4", text)
    return BLOCK.sub(r"\1\\\2", text)


def unescape_markdown(text: str) -> str:
    """What `escape_markdown` was given, of its own result."""
    return html.unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text))


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    stubs: int  # leading columns that name a row; the others hold numbers
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """As Markdown; every text in it is escaped."""
        rule = ["---"] * self.stubs + ["---:"] * (len(self.header) - self.stubs)
        header, *rows = (map(escape_markdown, cells) for cells in (self.header, *self.rows))
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))
        below = "".join(f"\n{escape_markdown(note)}\n" for note in self.notes)
        return f"**{escape_markdown(self.title)}**\n\n{body}\n{below}"


def render(template: str, /, **values: Any) -> str:
    """One of our templates, filled. Text is escaped; a name that is not there is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedgft"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(**values)
