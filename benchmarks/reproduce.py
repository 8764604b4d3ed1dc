"""What it takes to reproduce the paper from nothing: time, memory, and how much was trained.

python benchmarks/reproduce.py [table1 ...] [--data adult compas] [--protocol paper heldout]
                               [--seeds 20] [--json]
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from timing import Neighbors, peak_mb

from fedgft.data import load
from fedgft.paper.cells import CONVERGENCE, EXPERIMENTS, NAMES
from fedgft.paper.convergence import MODES
from fedgft.paper.runner import Runner
from fedgft.paper.section import make_section, write_page, write_section
from fedgft.study.cache import ResultCache

COLUMNS = ("experiment", "seconds", "replicates", "seconds_per_replicate", "client_rounds")


def main() -> None:
    args = _parse()
    if not args.json:
        print("".join(f"{name:>22}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder, Neighbors() as others:
        runner = Runner(load, ResultCache(Path(folder) / "cells"))
        spent = 0.0
        upto = [_count(runner, args.names[:n], args) for n in range(len(args.names) + 1)]
        for name, before, after in zip(args.names, upto, upto[1:], strict=False):
            started = time.perf_counter()
            made = make_section(
                name, runner, data=args.data, protocols=args.protocol, seeds=args.seeds
            )
            write_section(made, Path(folder))
            write_page(Path(folder))
            seconds = time.perf_counter() - started
            spent += seconds
            _show(_row(name, seconds, after[0] - before[0], after[1] - before[1]), args.json)
    total = _row("all", spent, *upto[-1])
    _show({**total, "peak_mb": peak_mb(), "others": others.cores}, args.json)


def _count(runner: Runner, names: list[str], args: argparse.Namespace) -> tuple[int, int]:
    """Replicates that these experiments train, those that choose a setting included, and their
    client-rounds; what they share is counted once. For a runner that has nothing yet."""
    cells = [
        c
        for name in names
        if name in EXPERIMENTS
        for p in args.protocol
        for d in args.data
        for c in EXPERIMENTS[name].cells(d, p, seeds=args.seeds)
    ]
    runs = runner.work(cells, lambda cell, protocol: 1)
    rounds = runner.work(cells, lambda cell, protocol: cell.clients * protocol.settings.rounds)
    for spec in CONVERGENCE if "convergence" in names else ():
        paths = len(MODES) * len(spec.rules) * args.seeds
        runs = runs + paths
        rounds = rounds + paths * spec.clients * spec.rounds
    return runs, rounds


def _row(name: str, seconds: float, replicates: int, client_rounds: int) -> dict:
    each = seconds / replicates if replicates else None
    return {
        "experiment": name,
        "seconds": seconds,
        "replicates": replicates,
        "seconds_per_replicate": each,
        "client_rounds": client_rounds,
    }


def _show(row: dict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    shown = (
        f"{v:,.3f}"
        if isinstance(v, float)
        else "-"
        if v is None
        else f"{v:,}"
        if isinstance(v, int)
        else v
        for v in (row[n] for n in COLUMNS)
    )
    rest = f"   peak {row['peak_mb']:.0f} MB, others {row['others']}" if "peak_mb" in row else ""
    print("".join(f"{v:>22}" for v in shown) + rest, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--data", nargs="+", choices=("adult", "compas"), default=["adult", "compas"]
    )
    parser.add_argument(
        "--protocol", nargs="+", choices=("paper", "heldout"), default=["paper", "heldout"]
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in NAMES]:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(NAMES)}")
    args.names = args.names or list(NAMES)
    return args


if __name__ == "__main__":
    sys.exit(main())
