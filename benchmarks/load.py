"""What happens when there is a lot of everything: seconds and memory, and how they grow.

python benchmarks/load.py [CASE ...] [--quick] [--out results/hardening/load.md]

Each case runs at two sizes, each run in a fresh process with its start-up; making the files is not
counted. `--quick` takes small sizes, about a minute in all, and writes nothing unless told where.
"""

import argparse
import tempfile
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any

from timing import Neighbors, command

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "hardening" / "load.md"


@dataclass(frozen=True)
class Case:
    what: str  # {}: the size
    sizes: tuple[int, int]
    quick: tuple[int, int]
    command: bool = True  # of fedgft's; else a call of the library


# clients
MANY = (100_000, 1_000_000)
FEW = (2_000, 20_000)
ROWS = (5_000_000, 50_000_000)
FEW_ROWS = (50_000, 500_000)
CUT = (10_000, 100_000)
FEW_CUT = (1_000, 10_000)
CASES = {
    "fedavg": Case("simulator, 1,000 of {} clients, FedAvg", MANY, FEW, command=False),
    "fedgft": Case("simulator, 1,000 of {} clients, FedGFT", MANY, FEW, command=False),
    "train_parquet": Case("`fedgft train`, 1,000 of {} clients, Parquet", MANY, FEW),
    "train_csv": Case("`fedgft train`, 1,000 of {} clients, CSV", MANY, FEW),
    "sites": Case("`fedgft audit --out` of {} sites", (1_000, 10_000), (20, 200)),
    "bins": Case(
        "`fedgft audit --out` of 100 sites of 5 classes, 12 groups and {} bins",
        (100, 1_000),
        (10, 100),
    ),
    "measure_parquet": Case("`fedgft measure` of {} rows, Parquet", ROWS, FEW_ROWS),
    "measure_csv": Case("`fedgft measure` of {} rows, CSV", ROWS, FEW_ROWS),
    "measure_folder": Case("`fedgft measure` of {} rows, 100 Parquet files", ROWS, FEW_ROWS),
    "measure_csv_folder": Case("`fedgft measure` of {} rows, 100 CSV files", ROWS, FEW_ROWS),
    "measure_join": Case(
        "`fedgft measure --join` of {} rows, and a tenth as many with the groups", ROWS, FEW_ROWS
    ),
    "predict": Case("`fedgft predict` of {} rows", (500_000, 5_000_000), (10_000, 100_000)),
    "compare": Case("`fedgft compare`, {} replicates", (20, 200), (2, 20)),
    "dirichlet": Case("Dirichlet partition, {} clients of 10 rows", CUT, FEW_CUT, command=False),
    "pure": Case("pure partition, {} clients of 10 rows", CUT, FEW_CUT, command=False),
    "server": Case(
        "deployment's server, a round with {} replies", (1_000, 10_000), (100, 1_000), command=False
    ),
}


def main() -> None:
    args = _parse()
    lines = []
    with Neighbors() as others:
        for name in args.names:
            case = CASES[name]
            small, large = (_run(name, case, n) for n in (case.quick if args.quick else case.sizes))
            for fresh in _lines(case, small, large):
                print(fresh, flush=True)
                lines.append(fresh)
    text = _page(lines, others.cores)
    if args.out is not None:
        args.out.write_text(text, "utf-8")


def _run(name: str, case: Case, size: int) -> dict[str, Any]:
    """One size of one case, in a folder that goes with it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        script = str(HERE / "loads.py")
        if not case.command:
            done = command(script, "work", name, str(size), cwd=place)
            return {"size": size, "peak": done.peak_mb, "seconds": loads(done.said)}
        asked = loads(command(script, "make", name, str(size), cwd=place).said)
        done = command("-m", "fedgft", *asked, cwd=place)
        page = place / "report" / "report.html"
        more = f"; report.html has {page.stat().st_size / 1e6:.1f} MB" if page.exists() else ""
        seconds = {"": (done.seconds, done.processor)}
        return {"size": size, "peak": done.peak_mb, "seconds": seconds, "more": more}


def _lines(case: Case, small: dict[str, Any], large: dict[str, Any]) -> list[str]:
    """One a size and stopwatch; the larger one says how many times more it took."""
    out = []
    for part, (_, before) in small["seconds"].items():
        for run in (small, large):
            what = case.what.format(f"{run['size']:,}") + (f": {part}" if part else "")
            wall, processor = run["seconds"][part]
            times = (run["size"] / small["size"], processor / before, run["peak"] / small["peak"])
            more = [f"{x:.3g}" for x in times] if run is large else ["", "", ""]
            cells = [
                what + run.get("more", ""),
                _shown(wall),
                _shown(processor),
                f"{run['peak']:,.0f}",
                *more,
            ]
            out.append(f"| {' | '.join(cells)} |")
    return out


def _shown(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2g}"


def _page(lines: list[str], others: float) -> str:
    return "\n".join(
        [
            "# Load",
            "",
            WORDS.format(others=others),
            "",
            "| case | seconds | processor's seconds | peak memory, MB | times larger | times the "
            "processor's seconds | times the memory |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *lines,
            "",
        ]
    )


WORDS = """\
Made by `python benchmarks/load.py` on two virtual cores; every size is a fresh process. Other
processes kept {others:.1f} of the cores busy meanwhile: look at the processor's seconds, which
depend on them far less.

A command is counted from its start to its end, its libraries (about two seconds, 150 to 300 MB)
included, and making its files is not. The simulator, a partition and a server are timed inside
their process. A round is the median of ten. Memory is the most that the process ever held."""


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--quick", action="store_true", help="small sizes, about a minute")
    parser.add_argument(
        "--out", type=Path, help="where to write it [results/hardening, if all cases]"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in CASES]:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(CASES)}")
    if not args.names and not args.quick and args.out is None:
        args.out = RESULT
    args.names = args.names or list(CASES)
    return args


if __name__ == "__main__":
    main()
