"""A form as a document: sections of facts, texts and tables, as a web page, Markdown and JSON.

`fedgft.auditing.forms` makes forms. A fact that only a person can know, and that nobody has
stated, is written as open (`Fact.is_open`) and listed in the JSON file under "to_complete".
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedgft.auditing.report_files import FormName, save_form, write_starts
from fedgft.auditing.summary import to_plain
from fedgft.formatting import Table, escape_markdown, render

NO_ADVICE = (
    "This page is no legal advice. It states numbers; whether they meet a legal duty is for the "
    "persons responsible and their lawyers to decide."
)
CONTROL = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029, 0xFEFF)}  # ends of a line


class Fact(NamedTuple):
    """A term and its text; `is_open` if somebody has yet to state it."""

    term: str
    text: str
    is_open: bool = False


@dataclass(frozen=True)
class Section:
    """A part of a form: a title, then paragraphs, facts, a list and tables."""

    title: str
    paragraphs: Sequence[str] = ()
    facts: Sequence[Fact] = ()
    items: Sequence[str] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Form:
    """A form that is filled from an audit: a web page, a text in Markdown, and the numbers.

    Parameters
    ----------
    name
        The name of the form and of its files: "ll144", "ai-act" or "model-card".
    title, byline
        The heading, and one line below it.
    date
        The date of the audit.
    sections
        The parts of the document.
    numbers
        All results as values that JSON can hold; fractions, and None where a number is not
        estimable.
    files
        The names of the audited files of sites and their SHA-256.
    warnings
        Sentences to read before the numbers.
    header
        What the header of the Markdown text holds, for forms that have one (in YAML).

    Examples
    --------
    >>> import fedgft
    >>> rows = ([1, 0] * 20, [1, 1, 1, 0] * 10, {"sex": ["f", "m"] * 20, "race": ["A", "B"] * 20})
    >>> form = fedgft.audit({"north": rows}).form("ll144")
    >>> form.name, form.to_dict()["numbers"]["selection"][0]["tables"][0]["rows"][0]["rate"]
    ('ll144', 1.0)
    """

    name: FormName
    title: str
    byline: str
    date: str
    sections: Sequence[Section]
    numbers: Mapping[str, Any]
    files: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()
    header: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        left = len(self.to_complete)
        return f"Form({self.name}: {self.title}; {left} facts to be completed)"

    @property
    def to_complete(self) -> list[str]:
        """The facts that somebody has yet to state."""
        return [fact.term for section in self.sections for fact in section.facts if fact.is_open]

    @cached_property
    def version(self) -> str:
        """The version of fedgft that filled the form."""
        from importlib.metadata import version  # slow to import, and not needed in a terminal

        return version("fedgft")

    @property
    def foot(self) -> str:
        """The last line: date, version and what the numbers come from."""
        source = "from the sums in its input files alone" if self.files else "from sums of rows"
        return f"{self.date}. Filled by fedgft {self.version} {source}. {NO_ADVICE}"

    def to_dict(self) -> dict[str, Any]:
        """All numbers and texts as values that JSON can hold."""
        found = {
            "format": f"fedgft-{self.name}-1",
            "title": self.title,
            "date": self.date,
            "fedgft": self.version,
            "notice": NO_ADVICE,
            "to_complete": self.to_complete,
            "warnings": list(self.warnings),
            "files": dict(self.files),
            "numbers": dict(self.numbers),
            "sections": [_list_section(section) for section in self.sections],
        }
        return to_plain(found)

    def to_json(self) -> str:
        """The text of the JSON file."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """The form in Markdown, with every text escaped."""
        _, start, _ = write_starts(self.name)
        head = [start]
        if self.header is not None:
            head = [start + "\n".join(_write_yaml(self.header)), "---", ""]
        lines = [*head, f"# {escape_markdown(self.title)}", ""]
        lines += [f"{escape_markdown(self.byline)}\n"] if self.byline else []
        lines += [f"**{escape_markdown(NO_ADVICE)}**", ""]
        lines += _list_items(self.warnings)
        for section in self.sections:
            lines += [f"## {escape_markdown(section.title)}", ""]
            lines += [f"{escape_markdown(text)}\n" for text in section.paragraphs]
            lines += _list_facts(section.facts)
            lines += _list_items(section.items)
            lines += [table.markdown() for table in section.tables]
        if self.files:
            lines += ["## Input files (SHA-256)", ""]
            lines += _list_facts([Fact(*pair) for pair in self.files])
        return "\n".join([*lines, escape_markdown(self.foot)]) + "\n"

    def to_html(self) -> str:
        """The form as one web page that needs no network, no script and no other file."""
        mark = write_starts(self.name)[0].partition("\n")[2]
        return render(
            "form.html",
            form=self,
            mark=mark,
            notice=NO_ADVICE,
            sections=self.sections,
            foot=self.foot,
        )

    def save(self, folder: str | Path) -> list[Path]:
        """Write NAME.html, NAME.md and NAME.json to a folder; return their paths.

        The files are written together or not at all.

        Parameters
        ----------
        folder
            It is created if needed. Only the files of an earlier form of this name are replaced.
        """
        return save_form(self, folder)


def _list_section(section: Section) -> dict[str, Any]:
    """Return the texts of a section as plain values."""
    return {
        "title": section.title,
        "paragraphs": list(section.paragraphs),
        "facts": [fact._asdict() for fact in section.facts],
        "items": list(section.items),
        "tables": [
            {"title": table.title, "header": table.header, "rows": table.rows, "notes": table.notes}
            for table in section.tables
        ],
    }


def _list_items(items: Sequence[str]) -> list[str]:
    """Return the lines of a list in Markdown; none if there are no items."""
    return [*(f"- {escape_markdown(text)}" for text in items), ""] if items else []


def _list_facts(facts: Sequence[Fact]) -> list[str]:
    """Return the lines of a list of terms and texts in Markdown."""
    lines = [f"- **{escape_markdown(fact.term)}:** {escape_markdown(fact.text)}" for fact in facts]
    return [*lines, ""] if lines else []


def _write_yaml(value: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of a mapping in YAML.

    Every text is a quoted scalar, as in JSON, so that a name from data can neither end it nor mean
    anything but itself. Keys are ours. Numbers have a fixed number of digits.
    """
    for key, item in value.items():
        if isinstance(item, dict):
            yield f"{indent}{key}:"
            yield from _write_yaml(item, f"{indent}  ")
        elif isinstance(item, list):
            yield f"{indent}{key}:"
            for each in item:
                yield from _write_entry(each, indent)
        else:
            yield f"{indent}{key}: {_quote(item)}"


def _write_entry(item: Any, indent: str) -> Iterator[str]:
    """Yield the lines of an entry of a list."""
    if not isinstance(item, dict):
        yield f"{indent}- {_quote(item)}"
        return
    lines = list(_write_yaml(item, f"{indent}  "))
    yield f"{indent}- {lines[0].lstrip()}"
    yield from lines[1:]


def _quote(item: str | float) -> str:
    """Return a text or a number as a scalar in YAML."""
    if isinstance(item, str):
        return json.dumps(to_plain(item), ensure_ascii=False).translate(CONTROL)
    return f"{item:.6f}".rstrip("0").rstrip(".") if isinstance(item, float) else str(item)
