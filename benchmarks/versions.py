"""Compare the speed of two checkouts of fedgft, for example of a change and of the commit before.

python benchmarks/versions.py BEFORE AFTER [--repeats 9] [--only W1] [--json]

Each argument is the folder of a checkout. Every checkout has one process, so that both are warm,
and the two take turns: a slow minute of the machine hits both alike. `ratio` is the median over the
repeats of AFTER / BEFORE; above 1 means that AFTER is slower. Commands run in new processes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CASES = (
    ("W1", "auto"),
    ("W1x20", "auto"),
    ("W1x20", "stacked"),
    ("W2a", "auto"),
    ("W2b", "auto"),
    ("mlp", "stacked"),
    ("growth", "auto"),
    ("penalty", "auto"),
)
COMMANDS = {
    "import fedgft": ["-c", "import fedgft"],
    "--help": ["-m", "fedgft", "--help"],
    "train --help": ["-m", "fedgft", "train", "--help"],
    "train": ["-m", "fedgft", "train", "--data", "synthetic", "--seeds", "4", "--out", "{out}"],
    "compare": ["-m", "fedgft", "compare", "--data", "synthetic", "--seeds", "4"],
    "measure": [
        *("-m", "fedgft", "measure", "{table}", "--label", "y", "--group", "g", "--score", "p"),
        *("--out", "{out}.json"),
    ],
    "measure --report": [
        *("-m", "fedgft", "measure", "{table}", "--label", "y", "--group", "g", "--score", "p"),
        *("--report", "{out}"),
    ],
}
ROWS = 1_000_000  # of the table that is measured


def main() -> None:
    args = _parse()
    if args.worker:
        _serve()
        return
    before = Path(args.before).resolve()
    after = Path(args.after).resolve()
    wanted = [case for case in CASES if args.only in " ".join(case)]
    if wanted:
        workers = [_start(folder) for folder in (before, after)]
        for case, executor in wanted:
            for worker in workers:  # compile and warm up
                _ask(worker, case, executor, 0)
            seconds = [
                [_ask(worker, case, executor, repeat) for worker in _turn(workers, repeat)]
                for repeat in range(args.repeats)
            ]
            _show(f"{case} {executor}", _in_order(seconds), args.json)
        for worker in workers:
            worker.stdin.close()
            worker.wait()
    with tempfile.TemporaryDirectory() as folder:
        table = _write_table(Path(folder) / "scores.csv")
        for name, command in COMMANDS.items():
            if args.only not in name:
                continue
            seconds = []
            for repeat in range(-1, args.repeats):
                pair = [
                    _time_command(tree, command, table) for tree in _turn([before, after], repeat)
                ]
                seconds += [pair] if repeat >= 0 else []
            _show(name, _in_order(seconds), args.json)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", help="folder of the checkout before the change")
    parser.add_argument("after", nargs="?", help="folder of the checkout after the change")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", default="", help="cases and commands that contain this text")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.worker and args.after is None:
        parser.error("name two checkouts")
    return args


def _turn(pair: list, repeat: int) -> list:
    """The pair in the order of this repeat: the one that goes first changes every time."""
    return pair if repeat % 2 == 0 else pair[::-1]


def _in_order(seconds: list[list[float]]) -> np.ndarray:
    """Undo `_turn`: seconds (repeat, 2), before and after."""
    return np.array([pair if i % 2 == 0 else pair[::-1] for i, pair in enumerate(seconds)])


def _environment(tree: Path) -> dict[str, str]:
    paths = os.pathsep.join(str(tree / name) for name in ("src", "benchmarks"))
    return {**os.environ, "PYTHONPATH": paths}


def _start(tree: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, __file__, "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(tree),
    )


def _ask(worker: subprocess.Popen, case: str, executor: str, repeat: int) -> float:
    worker.stdin.write(f"{case} {executor} {repeat}\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def _serve() -> None:
    """Run cases of the checkout that PYTHONPATH names, as they are asked for on stdin."""
    sys.path.remove(str(Path(__file__).parent))
    import cases

    runs = {}
    for line in sys.stdin:
        case, executor, repeat = line.split()
        options = cases.Options(executor=executor)
        if (case, executor) not in runs:
            runs[case, executor] = _make_run(cases, case, options)
        began = time.perf_counter()
        found = runs[case, executor](int(repeat))
        taken = time.perf_counter() - began
        print(found if isinstance(found, float) else taken, flush=True)


def _make_run(cases, case: str, options):
    if case == "growth":
        federation = cases.many_clients(cases.MANY)
        return lambda repeat: cases.rounds_of(federation, options)
    method = cases.fedgft(cases.get_metric("sp")) if case == "penalty" else cases.fedavg()
    name = "W1x20" if case == "penalty" else case
    return cases.ours(cases.WORKLOADS[name], method, options.settings())


def _write_table(path: Path) -> Path:
    generator = np.random.default_rng(0)
    label = generator.integers(0, 2, ROWS)
    group = generator.choice(["f", "m"], ROWS)
    score = generator.random(ROWS).round(4)
    lines = (f"{y},{g},{p}\n" for y, g, p in zip(label, group, score, strict=True))
    path.write_text("y,g,p\n" + "".join(lines))
    return path


def _time_command(tree: Path, command: list[str], table: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        parts = [part.format(out=f"{folder}/out", table=table) for part in command]
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, *parts], check=True, capture_output=True, env=_environment(tree)
        )
        return time.perf_counter() - began


def _show(name: str, seconds: np.ndarray, as_json: bool) -> None:
    ratio = float(np.median(seconds[:, 1] / seconds[:, 0]))
    before, after = np.median(seconds, 0)
    if as_json:
        row = {"case": name, "before": before, "after": after, "ratio": ratio}
        print(json.dumps(row), flush=True)
    else:
        print(
            f"{name:20} before {before:8.4f} s  after {after:8.4f} s  ratio {ratio:.3f}", flush=True
        )


if __name__ == "__main__":
    main()
