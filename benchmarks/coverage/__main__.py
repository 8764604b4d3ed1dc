"""How often do intervals contain the truth? Simulated federations whose true values are known.

Each module beside this file is a section: it has a docstring whose first line is the heading, and a
function ``run(federations)`` that simulates that many federations and returns one `Row` per kind of
interval; PARTS, if it has any, are functions that do a part of it each. Each section is a page of
the folder ``coverage``; README.md lists them.

    python benchmarks/coverage --federations 2000 --out results
    python benchmarks/coverage --sections next_site --federations 200
"""

import argparse
import importlib
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rows import Row, format_table

FOLDER = Path(__file__).parent
SECTIONS = sorted(f.stem for f in FOLDER.glob("*.py") if f.stem not in ("__main__", "rows"))
HEAD = (
    "Written by `python benchmarks/coverage --sections {name} --federations {federations}`. Each "
    "row simulates federations whose true value is known, and counts how often the 95% interval "
    "contains it. ± is 1.96 standard errors of the share.\n"
)


def count_parts(name: str) -> int:
    """Return into how many parts a section divides its work; 1 if it does not."""
    return len(getattr(importlib.import_module(name), "PARTS", (None,)))


def run_part(name: str, part: int, federations: int) -> list[Row]:
    """Return the rows of one part of a section."""
    module = importlib.import_module(name)
    return list(getattr(module, "PARTS", (module.run,))[part](federations))


def describe(name: str) -> tuple[str, str]:
    """Return the heading and the explanation of one section."""
    heading, _, text = (importlib.import_module(name).__doc__ or name).partition("\n")
    return heading.strip().rstrip("."), text.strip()


def write_page(name: str, heading: str, text: str, rows: list[Row], federations: int) -> str:
    """Return the page of one section."""
    head = HEAD.format(name=name, federations=federations)
    return "\n".join((f"# {heading}\n", head, f"{text}\n" if text else "", format_table(rows)))


def write_index(folder: Path) -> str:
    """Return the list of the pages in the folder."""
    pages = sorted(page for page in folder.glob("*.md") if page.name != "README.md")
    titles = [
        (page.name, page.read_text("utf-8").splitlines()[0].removeprefix("# ")) for page in pages
    ]
    return "# Coverage of intervals\n\n" + "".join(
        f"- [{title}]({name})\n" for name, title in titles
    )


def main() -> None:
    """Run the sections in parallel and write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--federations", type=int, default=2000)
    parser.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    given = parser.parse_args()
    with ProcessPoolExecutor(given.workers) as pool:
        jobs = {
            name: [
                pool.submit(run_part, name, part, given.federations)
                for part in range(count_parts(name))
            ]
            for name in given.sections
        }
        for name, parts in jobs.items():
            rows = [row for part in parts for row in part.result()]
            page = write_page(name, *describe(name), rows, given.federations)
            if given.out is None:
                sys.stdout.write(page)
                continue
            folder = given.out / "coverage"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.md").write_text(page, "utf-8")
            (folder / "README.md").write_text(write_index(folder), "utf-8")


if __name__ == "__main__":
    main()
