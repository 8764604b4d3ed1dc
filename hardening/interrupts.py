"""Ctrl-C (SIGINT to the whole process group) at seeded moments of several commands.

python hardening/interrupts.py [--seed 0] [--each 20] [--out results/hardening]

Half of the moments lie in the first tenth of a run, where modules are imported. Each must end with
exit code 130, one line that says so and no traceback, and leave no file that is not whole; or with
the finished work, all of it, if it was over. A Ctrl-C in the first hundredths of a second reaches
Python before any line of ours is read; those are counted apart, and must leave nothing.
Writes OUT/interrupts.md; exits with 1 if anything else was seen.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from killing import Case, cases, contents, leftovers, sound

from fedgft.formatting import Table
from fedgft.store import atomic_write

OUTCOMES = ("one line, exit code 130", "it was over", "before our first line", "anything else")


def start(case: Case, folder: Path) -> subprocess.Popen[str]:
    (folder / "out").mkdir(parents=True)
    command = [sys.executable, "-m", "fedgft", *case.command(folder), *case.usual]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


def outcome(code: int, said: str, out: Path, calm: dict[str, Any]) -> str:
    """`calm`: what an undisturbed run leaves."""
    lines = [line for line in said.splitlines() if not line.startswith("note:")]
    clean = sound(out, calm, {}) and not leftovers(out)
    if code == 0 and "Traceback" not in said and clean and contents(out) == calm:
        return OUTCOMES[1]
    # Python ends itself by the signal where it came inside a class that is made from text
    # (dataclasses): to a shell that is 130 as well.
    ended = code in (130, -signal.SIGINT)
    if ended and len(lines) == 1 and "interrupted" in said and clean:
        return OUTCOMES[0]
    # Nothing said: not even Python's own handler was there. Else its traceback, of its own modules
    # or of the lines that load `main`.
    files = set(re.findall(r'File "([^"<]+)"', said))
    others = {f for f in files if "site-packages" in f or f"{os.sep}fedgft{os.sep}cli" in f}
    silent = code == -signal.SIGINT and not said
    early = "KeyboardInterrupt" in said and code in (1, -signal.SIGINT) and not others
    if (silent or early) and not any(out.iterdir()):
        return OUTCOMES[2]
    print(f"{code}: {said}", file=sys.stderr)
    return OUTCOMES[3]


def attack(case: Case, place: Path, rng: np.random.Generator, each: int) -> Counter[str]:
    began = time.monotonic()
    assert start(case, place / "calm").wait() == 0
    seconds = time.monotonic() - began
    calm = contents(place / "calm" / "out")
    early = rng.uniform(0, 0.1 * seconds, each // 2)
    seen: Counter[str] = Counter()
    for i, after in enumerate((*early, *rng.uniform(0, seconds, each - len(early)))):
        folder = place / str(i)
        process = start(case, folder)
        time.sleep(after)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        said = process.communicate()[1]
        seen[found := outcome(process.returncode, said, folder / "out", calm)] += 1
        print(f"{case.name}, after {after:.2f} s: {found}", flush=True)
    return seen


def page(found: dict[str, Counter[str]]) -> str:
    rows = tuple((n, *(str(seen[o]) for o in OUTCOMES)) for n, seen in found.items())
    table = Table("Ctrl-C at random moments", ("command", *OUTCOMES), rows, 1)
    return "\n".join(
        [
            "# Interrupted",
            "",
            "Made by `python hardening/interrupts.py`, whose first lines say how.",
            "",
            table.markdown(),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/hardening"))
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for case in cases(Path(place)):
            own = Path(place) / case.name.replace(" ", "-")
            found[case.name] = attack(case, own, rng, args.each)
            print(case.name, dict(found[case.name]), flush=True)
    with atomic_write(args.out / "interrupts.md") as part:
        part.write(page(found).encode())
    sys.exit(1 if any(seen[OUTCOMES[3]] for seen in found.values()) else 0)


if __name__ == "__main__":
    main()
