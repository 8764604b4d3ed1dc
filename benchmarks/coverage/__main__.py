"""How often do intervals contain the truth? Simulated federations whose true values are known.

Each module beside this file is a section: it has a docstring whose first line is the heading, and a
function ``run(federations)`` that simulates that many federations and returns one `Row` per kind of
interval. The table is written to ``coverage.md``: one section per module.

    python benchmarks/coverage --federations 2000 --out results
    python benchmarks/coverage --sections next_site --federations 200
"""

import argparse
import importlib
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rows import Row, format_table

FOLDER = Path(__file__).parent
SECTIONS = sorted(f.stem for f in FOLDER.glob("*.py") if f.stem not in ("__main__", "rows"))
HEAD = (
    "# Coverage\n\n"
    "Written by `python benchmarks/coverage --federations {federations}`. Each row simulates "
    "federations whose true value is known, and counts how often the 95% interval contains it. "
    "Monte Carlo error: ± is 1.96 standard errors of the share.\n"
)


def run_section(name: str, federations: int) -> tuple[str, str, list[Row]]:
    """Return the heading, the explanation and the rows of one section."""
    module = importlib.import_module(name)
    heading, _, text = (module.__doc__ or name).partition("\n")
    return heading.strip().rstrip("."), text.strip(), list(module.run(federations))


def write_page(sections: Iterable[tuple[str, str, list[Row]]], federations: int) -> str:
    """Return the page: one table per section."""
    parts = [HEAD.format(federations=federations)]
    for heading, text, rows in sections:
        parts.append(f"## {heading}\n\n" + (f"{text}\n\n" if text else "") + format_table(rows))
    return "\n".join(parts)


def main() -> None:
    """Run the sections in parallel and write or print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--federations", type=int, default=2000)
    parser.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    given = parser.parse_args()
    with ProcessPoolExecutor(given.workers) as pool:
        jobs = [pool.submit(run_section, name, given.federations) for name in given.sections]
        page = write_page((job.result() for job in jobs), given.federations)
    if given.out is None:
        sys.stdout.write(page)
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "coverage.md").write_text(page)


if __name__ == "__main__":
    main()
