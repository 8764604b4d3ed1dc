"""What pages are made of: tables of plain text, and templates that escape all of it."""

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


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    stubs: int  # leading columns that name a row; the others hold numbers
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        clean = lambda cells: " | ".join(c.replace("|", "\\|") for c in cells)  # noqa: E731
        rule = ["---"] * self.stubs + ["---:"] * (len(self.header) - self.stubs)
        lines = [self.header, tuple(rule), *self.rows]
        body = "\n".join(f"| {clean(line)} |" for line in lines)
        below = "".join(f"\n{note}\n" for note in self.notes)
        return f"**{self.title}**\n\n{body}\n{below}"


def render(template: str, /, **values: Any) -> str:
    """One of our templates, filled. Text is escaped; a name that is not there is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedgft"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(**values)
