"""Compare the tables of two folders of results cell by cell.

python benchmarks/compare_results.py results NEW [table1.md lambda.md ...]

Every Markdown file that both folders hold is read, or only those that are named. The tables of a
file are compared in order, and their columns by name, so that a new column changes no other. Cells
are compared as numbers where both hold equally many numbers, and as text elsewhere. Exits with 1
if a cell differs.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
Column = list[str]


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    old = Path(sys.argv[1])
    new = Path(sys.argv[2])
    shared = sorted(path.name for path in old.glob("*.md") if (new / path.name).exists())
    total = 0
    different = 0
    largest = 0.0
    for name in sys.argv[3:] or shared:
        before = read_tables(old / name)
        after = read_tables(new / name)
        cells, changes = compare_tables(before, after)
        gaps = [gap for _, _, gap in changes if gap is not None]
        print(f"{name}: {cells} cells, {len(changes)} differ, largest {max([0.0, *gaps]):g}")
        for one, other, _ in changes[:5]:
            print(f"    {one!r} -> {other!r}")
        total += cells
        different += len(changes)
        largest = max([largest, *gaps])
    print(f"{total} cells, {different} differ, largest difference of a number {largest:g}")
    sys.exit(different > 0)


def read_tables(path: Path) -> list[dict[tuple[str, int], Column]]:
    """Return the Markdown tables of a file as columns by (name, how often it came before)."""
    tables = []
    rows: list[list[str]] = []
    for line in [*path.read_text("utf-8").splitlines(), ""]:
        if line.startswith("|"):
            if not set(line) <= set("|-: "):
                rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif rows:
            seen: Counter[str] = Counter()
            columns = {}
            for at, name in enumerate(rows[0]):
                columns[name, seen[name]] = [row[at] for row in rows[1:]]
                seen[name] += 1
            tables.append(columns)
            rows = []
    return tables


def compare_tables(before: list[dict], after: list[dict]) -> tuple[int, list[tuple]]:
    """Return the number of cells that were compared, and (before, after, difference) of those
    that differ; the difference is None where they hold no numbers to compare."""
    cells = 0
    changes = []
    if len(before) != len(after):
        changes.append((f"{len(before)} tables", f"{len(after)} tables", None))
    for old, new in zip(before, after, strict=False):
        for name, column in old.items():
            if name not in new:
                changes.append((f"column {name[0]}", "", None))
            elif len(column) != len(new[name]):
                changes.append((f"{name[0]}: {len(column)} rows", f"{len(new[name])} rows", None))
            else:
                cells += len(column)
                changes += find_changes(column, new[name])
    return cells, changes


def find_changes(before: Column, after: Column) -> Iterator[tuple]:
    for one, other in zip(before, after, strict=True):
        if one == other:
            continue
        left = [float(number) for number in NUMBER.findall(one)]
        right = [float(number) for number in NUMBER.findall(other)]
        if len(left) != len(right) or not left:
            yield one, other, None
        else:
            yield one, other, max(abs(a - b) for a, b in zip(left, right, strict=True))


if __name__ == "__main__":
    main()
