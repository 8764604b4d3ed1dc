"""Feeds broken files and messages to every reader, guided by coverage; the memory is bounded.

pip install 'fedgft[hardening,test]'
python hardening/fuzz.py --list
python hardening/fuzz.py site-file --seconds 120
python hardening/fuzz.py all --seconds 60            # into results/hardening/fuzzing.md

The targets are those of tests/fuzzing, where the seeds are too. Each runs in a process of its own;
one that finds something ends, says what, and leaves the input beside the seeds as found-HASH: a
test then fails until it is mended. More than --megabytes of memory is a finding, and so is an
input that takes longer than 30 seconds.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
LONGEST = 1 << 16  # bytes of an input
PATIENCE = 30  # seconds for one input
COMPILED = (
    "fedgft.engine.executors.numba_kernels",
    "fedgft.engine.plan",
)  # numba cannot compile traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", default="all")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=ROOT / "results/hardening/fuzzing.md")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    from fuzzing import SEEDS

    known = sorted(path.name for path in SEEDS.iterdir())
    if args.list or args.target not in (*known, "all"):
        sys.exit("\n".join(known) if args.list else f"{args.target}: none of {', '.join(known)}")
    if _atheris() is None:
        sys.exit("this needs atheris: pip install 'fedgft[hardening,test]' (on Linux)")
    rows = []
    for name in known if args.target == "all" else [args.target]:
        rows.append(_run(name, args.seconds, args.megabytes))
        print(json.dumps(rows[-1]), flush=True)
    if args.target == "all":
        args.out.write_text(_page(rows, args), "utf-8")
    sys.exit(any(row["found"] or "said" in row for row in rows))


def _atheris() -> Any:
    try:
        import atheris
    except ModuleNotFoundError:
        return None
    return atheris


def _run(name: str, seconds: int, megabytes: int) -> dict[str, Any]:
    """A process of its own: libFuzzer ends it, and its peak memory is the target's."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            name,
            "--child",
            folder,
            f"-max_total_time={seconds}",
            f"-rss_limit_mb={megabytes}",
            f"-timeout={PATIENCE}",
            f"-max_len={LONGEST}",
            f"-artifact_prefix={folder}/found-",
            "-print_final_stats=1",
            "-verbosity=1",
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        found = [_kept(name, path) for path in Path(folder).glob("found-*")]
    said = lambda key: int(re.findall(rf"stat::{key}:\s+(\d+)", done.stderr)[-1])  # noqa: E731
    try:
        runs = said("number_of_executed_units")
        peak = said("peak_rss_mb")
    except IndexError:
        runs = peak = None
    row = {"target": name, "runs": runs, "seconds": seconds, "peak_mb": peak, "found": found}
    if found or done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("#")]
        row["said"] = "\n".join(lines[-60:])
    return row


def _page(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    runs = sum(row["runs"] or 0 for row in rows)
    bad = sum(bool(row["found"] or "said" in row) for row in rows)
    lines = "\n".join(
        f"| `{row['target']}` | {row['runs']:,} | {row['peak_mb']} | {', '.join(row['found'])} |"
        if "said" not in row
        else f"| `{row['target']}` | ended early | | {row['found']} |"
        for row in rows
    )
    return (
        "# Fuzzing\n\nMade by `python hardening/fuzz.py all`: every reader of files and messages "
        f"from outside, {args.seconds} seconds each, on inputs that coverage chooses "
        f"(atheris {version('atheris')}). A finding is whatever comes out but our own error, more "
        f"than {args.megabytes} MB, or more than {PATIENCE} s for one input. {runs:,} inputs in "
        f"all; {bad} of {len(rows)} targets have a finding.\n\n"
        f"| target | inputs | peak MB | found |\n|---|---:|---:|---|\n{lines}\n"
    )


def _kept(name: str, path: Path) -> str:
    data = path.read_bytes()
    kept = ROOT / "tests/fuzzing/seeds" / name / f"found-{hashlib.sha256(data).hexdigest()[:8]}"
    kept.write_bytes(data)
    return kept.name


def child(name: str, corpus: str, options: list[str]) -> None:
    """Instruments the library, and hands over to libFuzzer, which does not return."""
    import logging
    import warnings

    atheris = _atheris()
    os.environ["RUST_BACKTRACE"] = "0"
    warnings.simplefilter("ignore")
    logging.disable()
    with atheris.instrument_imports(include=["fedgft"], exclude=list(COMPILED)):
        from fuzzing import targets

        target = targets()[name]
        for seed in target.seeds():
            (Path(corpus) / f"seed-{seed.name}").write_bytes(seed.read_bytes())
            target.accepts(seed.read_bytes())  # what is loaded late is loaded here

    def one(data: bytes) -> None:
        target.accepts(data)

    atheris.Setup([sys.argv[0], *options, corpus], one)
    atheris.Fuzz()


if __name__ == "__main__":
    if "--child" in sys.argv[2:3]:
        child(sys.argv[1], sys.argv[3], sys.argv[4:])
    else:
        main()
