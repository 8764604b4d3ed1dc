"""A section is what a reader sees of an experiment: what the paper says, what came out, tables
and figures. It is plain data; here it is written to a folder and read from it again."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedgft.experiments.store import whole, write_rows
from fedgft.report.claims import Finding
from fedgft.report.figures import save
from fedgft.report.tables import Table

FORMAT = "fedgft-section-1"
SIGNS = {True: "✓", False: "✗", None: "·"}


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
    pictures.mkdir(parents=True, exist_ok=True)
    paths = [write_rows(made.rows, folder / f"{section.name}.parquet")]
    for name, draw in made.figures.items():
        paths += save(draw(), pictures, name)
    for ending, text in (
        ("md", markdown(section)),
        ("json", json.dumps({"format": FORMAT, **asdict(section)}, indent=1, ensure_ascii=False)),
    ):
        path = folder / f"{section.name}.{ending}"
        with whole(path) as part:
            part.write_text(text, "utf-8")
        paths.append(path)
    return paths


def read(path: Path) -> Section | None:
    """A section that was written before; None where the file is not one."""
    try:
        kept = json.loads(path.read_text("utf-8"))
        if kept.pop("format") != FORMAT:
            return None
        kept["findings"] = tuple(Finding(*finding) for finding in kept["findings"])
        kept["tables"] = tuple(Table(**table) for table in kept["tables"])
        return Section(**kept)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def markdown(section: Section) -> str:
    lines = [f"# {section.title}", ""]
    if section.claim:
        lines += [f"The paper: {section.claim}", ""]
    lines += [
        section.how,
        *(["", section.note] if section.note else []),
        "",
        "## What came out",
        "",
    ]
    lines += [f"- {SIGNS[holds]} {text}" for text, holds in section.findings]
    lines += ["", *(f"{table.markdown()}" for table in section.tables)]
    for name, caption in section.figures:
        lines += [f"![{caption}](figures/{name}.svg)", ""]
    for title, said in (("Chosen on inner splits", section.chosen), ("Notes", section.notes)):
        if said:
            lines += [f"## {title}", "", *(f"- {text}" for text in said), ""]
    return "\n".join(lines).rstrip() + "\n"
