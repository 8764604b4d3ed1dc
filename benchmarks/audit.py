"""What an audit takes: ten million rows counted at a site, ten thousand sites put together.

python benchmarks/audit.py [--rows 10000000] [--sites 10000] [--json]

Each command runs in a process of its own, as a user has it, start-up included.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from timing import Neighbors, command

from fedgft.auditing import measure, write_sums

COLUMNS = ("case", "seconds", "peak_mb", "megabytes", "others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--sites", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print("".join(f"{name:>24}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for file in _elsewhere(_tables, place, args.rows):
            _show(
                _case(
                    f"measure {file.name}, {args.rows:,}",
                    [
                        "measure",
                        str(file),
                        "--label",
                        "y",
                        "--group",
                        "race",
                        "--group",
                        "sex",
                        "--score",
                        "p",
                        "--out",
                        str(place / f"{file.name}.json"),
                        "--name",
                        "big",
                    ],
                    sum(f.stat().st_size for f in (file, *file.glob("*")) if f.is_file()),
                ),
                args.json,
            )
        size = _elsewhere(site_files, place / "sites", args.sites)
        for name, more in (("audit --json", ["--json"]), ("audit --out", ["--out", folder])):
            command = ["audit", str(place / "sites"), *more]
            _show(_case(f"{name}, {args.sites:,}", command, size), args.json)


def _elsewhere(make: Callable[..., Any], *arguments: Any) -> Any:
    """In another process: what this one has ever held would count as its children's memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(make, *arguments).result()


def _tables(place: Path, rows: int) -> list[Path]:
    generator = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "id": np.arange(rows),
            "y": generator.integers(0, 2, rows),
            "race": generator.choice(["White", "Black", "Asian"], rows),
            "sex": generator.choice(["M", "F"], rows),
            "p": generator.random(rows).round(6),
        }
    )
    frame.write_csv(place / "big.csv")
    frame.write_parquet(place / "big.parquet")
    for kind in ("csv", "parquet"):
        folder = place / f"{kind}-files"
        folder.mkdir()
        for number, part in enumerate(frame.iter_slices(max(rows // 100, 1))):
            file = folder / f"{number}.{kind}"
            part.write_csv(file) if kind == "csv" else part.write_parquet(file)
    return [place / name for name in ("big.csv", "big.parquet", "csv-files", "parquet-files")]


def site_files(place: Path, sites: int) -> int:
    """Sites of 50 to 400 people with two attributes; the bytes of their files."""
    place.mkdir()
    generator = np.random.default_rng(0)
    for k in range(sites):
        n = int(generator.integers(50, 400))
        y = generator.integers(0, 2, n)
        groups = {
            "race": generator.choice(["White", "Black"], n),
            "sex": generator.choice(["F", "M"], n),
        }
        score = 0.7 * generator.beta(2, 2, n) + 0.2 * y
        write_sums(
            measure(y, score, sensitive_features=groups, site=f"site {k}"), place / f"{k}.json"
        )
    return sum(path.stat().st_size for path in place.iterdir())


def _case(name: str, arguments: list[str], size: int) -> dict[str, object]:
    """One command; the peak memory is that of its process alone."""
    with Neighbors() as others:
        done = command("-m", "fedgft", *arguments)
    return {
        "case": name,
        "seconds": round(done.seconds, 2),
        "peak_mb": round(done.peak_mb),
        "megabytes": round(size / 1e6, 1),
        "others": others.cores,
    }


def _show(row: dict[str, object], as_json: bool) -> None:
    print(
        json.dumps(row) if as_json else "".join(f"{row[name]!s:>24}" for name in COLUMNS),
        flush=True,
    )


if __name__ == "__main__":
    main()
