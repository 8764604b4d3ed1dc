"""Sections as files: rows, figures, Markdown, JSON, and all of them on one HTML page.

`index.html` needs no network and no other file. Text is escaped by the template; figures are
embedded as images, so nothing in them can run.
"""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedgft.errors import FedgftError
from fedgft.formatting import SIGNS, Table, escape_markdown, render, unescape_markdown
from fedgft.paper.cells import NAMES
from fedgft.paper.claims import Finding
from fedgft.paper.section import FAR_MARK, Made, Section
from fedgft.store import (
    atomic_write,
    dump_checksummed,
    load_checksummed,
    refuse_link,
    require_encodable,
)
from fedgft.study.figures import save_figure
from fedgft.study.training import write_rows

FORMAT = "fedgft-section-1"
TITLE = "# The paper, reproduced"
HTML = "<!doctype html>\n<!-- fedgft reproduce -->"
PAPER = (
    'Wang, Payani, Lee & Kompella, "Mitigating Group Bias in Federated Learning: '
    'Beyond Local Fairness"'
)


# The files of one section


def write(made: Made, folder: Path) -> list[Path]:
    """Write rows, figures, the Markdown page and last the section; return their paths.

    If the same code wrote the same section before and its files are intact, nothing is written:
    drawing takes longer than everything else in a second run.
    """
    section = made.section
    pictures = folder / "figures"
    rows, page, kept = (folder / f"{section.name}.{end}" for end in ("parquet", "md", "json"))
    drawn = [pictures / f"{name}.{end}" for name in made.figures for end in ("png", "svg")]
    paths = [rows, *drawn, page, kept]
    stamp = _stamp(made)
    if _is_current(kept, stamp, paths[:-1]):
        return paths
    kept.unlink(missing_ok=True)  # from here on it says nothing about the others
    refuse_link(pictures)
    pictures.mkdir(parents=True, exist_ok=True)
    write_rows(made.rows, rows)
    for name, draw in made.figures.items():
        save_figure(draw(), pictures, name)
    _write_text(page, markdown(section))
    digests = [_digest(path) for path in paths[:-1]]
    _write_text(
        kept, dump_checksummed({"stamp": stamp, "files": digests, **asdict(section)}, FORMAT)
    )
    return paths


def _write_text(path: Path, text: str) -> None:
    with atomic_write(path) as part:
        part.write(text.encode())


def _stamp(made: Made) -> str:
    """A digest of everything the files depend on: results, texts, and the code that draws."""
    digest = hashlib.sha256(json.dumps([asdict(made.section), made.rows]).encode())
    here = Path(__file__).parent
    for file in sorted((*here.rglob("*.py"), here.parent / "formatting.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_current(kept: Path, stamp: str, paths: Sequence[Path]) -> bool:
    """Whether the files are those that were written for this stamp, byte for byte."""
    try:
        about = load_checksummed(kept.read_text("utf-8"), FORMAT)
        return about["stamp"] == stamp and about["files"] == [_digest(path) for path in paths]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def read(path: Path) -> Section | None:
    """Return a section that was written before; None if the file is not one."""
    try:
        kept = load_checksummed(path.read_text("utf-8"), FORMAT)
        return Section(
            **{n: require_encodable(kept[n]) for n in ("name", "title", "claim", "note", "how")},
            findings=tuple(_read_finding(*finding) for finding in kept["findings"]),
            tables=tuple(map(_read_table, kept["tables"])),
            figures=tuple(
                (_check_figure_name(name), require_encodable(caption))
                for name, caption in kept["figures"]
            ),
            chosen=_read_texts(kept["chosen"]),
            notes=_read_texts(kept["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _read_table(kept: dict[str, Any]) -> Table:
    return Table(
        title=require_encodable(kept["title"]),
        header=_read_texts(kept["header"]),
        rows=tuple(map(_read_texts, kept["rows"])),
        stubs=int(kept["stubs"]),
        notes=_read_texts(kept["notes"]),
    )


def _read_texts(kept: Any) -> tuple[str, ...]:
    return tuple(map(require_encodable, kept))


def _read_finding(text: Any, holds: Any) -> Finding:
    if holds not in SIGNS or isinstance(holds, float):
        raise ValueError(f"{holds!r} is no verdict")
    return Finding(require_encodable(text), holds)


def _check_figure_name(name: Any) -> str:
    """The name of a file in the folder of the figures and nowhere else."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", require_encodable(name)) or ".." in name:
        raise ValueError(f"{name!r} is no name of a figure")
    return name


def markdown(section: Section) -> str:
    """Return the section as Markdown; every text in it is escaped."""
    clean = escape_markdown
    lines = [f"# {clean(section.title)}", ""]
    if section.claim:
        lines += [f"The paper: {clean(section.claim)}", ""]
    lines += [clean(section.how)]
    lines += ["", clean(section.note)] if section.note else []
    lines += ["", "## What came out", ""]
    lines += [f"- {SIGNS[holds]} {clean(text)}" for text, holds in section.findings]
    lines += ["", *(table.markdown() for table in section.tables)]
    for name, caption in section.figures:
        lines += [f"![{clean(caption)}](figures/{name}.svg)", ""]
    for title, texts in (("Chosen on inner splits", section.chosen), ("Notes", section.notes)):
        if texts:
            lines += [f"## {title}", "", *(f"- {clean(text)}" for text in texts), ""]
    return "\n".join(lines).rstrip() + "\n"


# The page of all sections


def check_place(folder: Path) -> None:
    """Raise if the folder holds a README or a page that this command did not write."""
    for name, start in (("README.md", TITLE), ("index.html", HTML)):
        path = folder / name
        if path.is_file() and not path.read_bytes().startswith(start.encode()):
            raise FedgftError(
                f"`out` {folder}: holds a {name} that is not ours; name another folder",
                kind="conflict",
            )


def write_page(folder: Path) -> list[Path]:
    """Write `index.html` with all sections in the folder, and `README.md`, which lists them.

    A section without all its figures is left out until it is made again.
    """
    pictures = folder / "figures"
    found = [read(folder / f"{name}.json") for name in NAMES]
    sections = [
        section
        for section in found
        if section and all((pictures / f"{name}.svg").exists() for name, _ in section.figures)
    ]
    _write_text(folder / "index.html", html(sections, folder))
    _write_text(folder / "README.md", contents(folder))
    return [folder / "index.html", folder / "README.md"]


def html(sections: Sequence[Section], folder: Path) -> str:
    """Return the page of these sections; their figures are in `folder`."""

    def embed(name: str) -> str:
        content = (folder / "figures" / f"{name}.svg").read_bytes()
        return "data:image/svg+xml;base64," + b64encode(content).decode("ascii")

    return render(
        "reproduction.html",
        sections=sections,
        signs=SIGNS,
        mark=FAR_MARK,
        paper=PAPER,
        version=version("fedgft"),
        picture=embed,
    )


def contents(folder: Path) -> str:
    """Return a list of the Markdown pages that are there, read from the pages themselves."""
    lines = [
        TITLE,
        "",
        f"{PAPER}. Every number in these pages comes out of `fedgft reproduce`.",
        "",
        "| experiment | claims checked | hold | do not |",
        "| --- | ---: | ---: | ---: |",
    ]
    total = [0, 0]
    for name in NAMES:
        page = folder / f"{name}.md"
        if page.is_file():
            title, *text = page.read_text("utf-8", "replace").splitlines() or [name]
            good, bad = (
                sum(line.startswith(f"- {SIGNS[holds]} ") for line in text)
                for holds in (True, False)
            )
            title = escape_markdown(unescape_markdown(title.removeprefix("# ")))
            lines.append(f"| [{title}]({name}.md) | {good + bad} | {good} | {bad} |")
            total = [total[0] + good, total[1] + bad]
    lines.append(f"| all | {sum(total)} | {total[0]} | {total[1]} |")
    return "\n".join(lines) + "\n"
