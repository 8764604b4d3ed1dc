"""How fast the simulator is. See README.md beside this file.

python benchmarks/speed.py [--case W1] [--executor stacked] [--repeats 5] [--threads 2] [--json]
"""

import argparse
import json
import subprocess
import sys

# Case and executor, in the order of a full run.
EVERYTHING = [
    ("W1", "auto"),
    ("W1x20", "auto"),
    ("W1x20", "stacked"),
    ("W2a", "auto"),
    ("W2b", "auto"),
    ("mlp", "stacked"),
    ("growth", "auto"),
    ("penalty", "auto"),
    ("startup", "auto"),
]
COLUMNS = (
    "case",
    "executor",
    "seconds",
    "plain_seconds",
    "ratio",
    "accuracy",
    "plain_accuracy",
    "peak_mb",
)


def main() -> None:
    args = _parse()
    if args.case == "all":
        for case, executor in EVERYTHING:
            _show(_in_own_process(case, executor, args), args.json)
        return
    from cases import CASES, Options, once  # heavy
    from timing import Neighbors

    options = Options(executor=args.executor, repeats=args.repeats, threads=args.threads)
    if args.once:
        print(json.dumps(once(args.case, args.once, options)))
    else:
        with Neighbors() as others:
            result = CASES[args.case](args.case, options)
        _show({**result, "others": others.cores}, args.json)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [*dict.fromkeys(case for case, _ in EVERYTHING), "all"]
    parser.add_argument("--case", choices=known, default="all")
    executors = ("auto", "fused", "stacked", "sequential")
    parser.add_argument("--executor", choices=executors, default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="ours; the plain loop has one")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--once", choices=("ours", "plain"), help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_own_process(case: str, executor: str, args: argparse.Namespace) -> dict:
    """So that no case runs in the memory, caches or threads that another one left behind."""
    command = [
        sys.executable,
        __file__,
        "--json",
        "--case",
        case,
        "--executor",
        executor,
        "--repeats",
        str(args.repeats),
        "--threads",
        str(args.threads),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _show(result: dict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    pairs = [f"{name} {result[name]}" for name in COLUMNS[1:] if name in result]
    print(f"{result['case']:8}", "  ".join(pairs), flush=True)
    for name in (name for name in result if name not in COLUMNS):
        print(" " * 8, name, result[name], flush=True)


if __name__ == "__main__":
    main()
