"""A section is what a reader sees of an experiment: what the paper says, what came out, tables
and figures. It is plain data; here it is written to a folder and read from it again."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedgft.experiments.store import write_rows
from fedgft.files import proper, refuse_link, whole
from fedgft.layout import SIGNS, Table, escape_markdown
from fedgft.report.claims import Finding
from fedgft.report.figures import save
from fedgft.seals import sealed, unsealed

FORMAT = "fedgft-section-1"


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    claim: str
    note: str
    how: str  # replicates, data sets, protocols
    findings: tuple[Finding, ...]
    tables: tuple[Table, ...]
    figures: tuple[tuple[str, str], ...]  # file name without its ending, and caption
    chosen: tuple[str, ...] = ()  # on inner splits
    notes: tuple[str, ...] = ()  # what could not be estimated


@dataclass(frozen=True, eq=False)
class Made:
    section: Section
    rows: list[dict[str, Any]]
    figures: dict[str, Callable[[], Any]]  # drawn when they are written


def write(made: Made, folder: Path) -> list[Path]:
    """Rows, figures, the Markdown page, and last the section itself, which the page is made of."""
    section, pictures = made.section, folder / "figures"
    rows, page, kept = (folder / f"{section.name}.{end}" for end in ("parquet", "md", "json"))
    drawn = [pictures / f"{name}.{end}" for name in made.figures for end in ("png", "svg")]
    paths, stamp = [rows, *drawn, page, kept], _stamp(made)
    if _same(kept, stamp, paths[:-1]):
        return paths  # drawing takes longer than all the rest of a second run
    kept.unlink(missing_ok=True)  # from here on it says nothing about the others
    refuse_link(pictures)
    pictures.mkdir(parents=True, exist_ok=True)
    write_rows(made.rows, rows)
    for name, draw in made.figures.items():
        save(draw(), pictures, name)
    _put(page, markdown(section))
    files = [_digest(p) for p in paths[:-1]]
    _put(kept, sealed({"stamp": stamp, "files": files, **asdict(section)}, FORMAT))
    return paths


def _put(path: Path, text: str) -> None:
    with whole(path) as part:
        part.write_text(text, "utf-8")


def _stamp(made: Made) -> str:
    """Of everything the files are made of: results, words, and the code that draws."""
    digest = hashlib.sha256(json.dumps([asdict(made.section), made.rows]).encode())
    here = Path(__file__).parent
    for file in sorted((*here.rglob("*.py"), here.parent / "layout.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _same(kept: Path, stamp: str, paths: Sequence[Path]) -> bool:
    """The files are those that were written for this stamp, byte for byte."""
    try:
        about = unsealed(kept.read_text("utf-8"), FORMAT)
        return about["stamp"] == stamp and about["files"] == [_digest(p) for p in paths]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def read(path: Path) -> Section | None:
    """A section that was written before; None where the file is not one."""
    try:
        kept = unsealed(path.read_text("utf-8"), FORMAT)
        return Section(
            **{n: proper(kept[n]) for n in ("name", "title", "claim", "note", "how")},
            findings=tuple(_finding(*finding) for finding in kept["findings"]),
            tables=tuple(map(_table, kept["tables"])),
            figures=tuple((_file(name), proper(caption)) for name, caption in kept["figures"]),
            chosen=_texts(kept["chosen"]),
            notes=_texts(kept["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _table(kept: dict[str, Any]) -> Table:
    return Table(
        title=proper(kept["title"]), header=_texts(kept["header"]),
        rows=tuple(map(_texts, kept["rows"])), stubs=int(kept["stubs"]),
        notes=_texts(kept["notes"]),
    )  # fmt: skip


def _texts(kept: Any) -> tuple[str, ...]:
    return tuple(map(proper, kept))


def _finding(text: Any, holds: Any) -> Finding:
    if holds not in SIGNS or isinstance(holds, float):
        raise ValueError(f"{holds!r} is no verdict")
    return Finding(proper(text), holds)


def _file(name: Any) -> str:
    """Of a figure, in the folder of the figures and nowhere else."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", proper(name)) or ".." in name:
        raise ValueError(f"{name!r} is no name of a figure")
    return name


def markdown(section: Section) -> str:
    """The section as Markdown; every text in it is escaped."""
    clean = escape_markdown
    lines = [f"# {clean(section.title)}", ""]
    if section.claim:
        lines += [f"The paper: {clean(section.claim)}", ""]
    lines += [clean(section.how)]
    lines += ["", clean(section.note)] if section.note else []
    lines += ["", "## What came out", ""]
    lines += [f"- {SIGNS[holds]} {clean(text)}" for text, holds in section.findings]
    lines += ["", *(f"{table.markdown()}" for table in section.tables)]
    for name, caption in section.figures:
        lines += [f"![{clean(caption)}](figures/{name}.svg)", ""]
    for title, said in (("Chosen on inner splits", section.chosen), ("Notes", section.notes)):
        if said:
            lines += [f"## {title}", "", *(f"- {clean(text)}" for text in said), ""]
    return "\n".join(lines).rstrip() + "\n"
