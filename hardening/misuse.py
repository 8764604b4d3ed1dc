"""Wrong and odd calls of the public Python interface: the right answer, or one error that says why.

python hardening/misuse.py [--only TEXT] [--out results/hardening/misuse.md]

The calls are made in a process of their own, under a limit of time and of memory. A call falls
short if it returns anything but what the oracle says (`misuse_oracle.py`: loops over rows, no code
of ours), accepts what means nothing, refuses what is right, raises anything but a `FedgftError` (or
Python's own TypeError about a missing or unknown argument), does not name the argument, says more
than one line, does not end, or ends the process.
"""

import argparse
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from misuse_oracle import ANY, Case

from fedgft.errors import FedgftError

SECONDS = 20  # that a call may take
MORE_MEMORY = 4 * 2**30  # bytes, beyond what this process has
LONGEST = 500  # characters of a message
CLOSE = 1e-6  # of a loss that is taken in float32; everything else is float64

FOUND = (
    "\n"
    "## What it found when it was written\n"
    "\n"
    "Of the same calls on the code before it, 2,362 fell short: 1,453 raised raw errors "
    "of numpy, torch, polars or Python, 733 were\n"
    "accepted though they mean nothing, 113 were refused though they are right, 51 errors"
    " named no argument, 6 answers were wrong, 5 calls did not end. Among them:\n"
    "\n"
    "- indices of groups, labels, clients and rows outside their range in `Dataset`, "
    "`Federation`, `Sums` and `Penalty`, counted as other groups or read from other "
    "rows;\n"
    "- NaN and infinite probabilities, logits and scores, counted as decisions for class "
    "0 and so as fair;\n"
    "- sums in half precision, rows of pandas objects in another order, complex numbers "
    "cut to their real part, fractions and infinity as labels, numbers as text as "
    "predictions;\n"
    "- `Budget(epsilon=-1)` and `Budget(epsilon=nan)` of `fedgft.flower`, "
    "`Settings(rounds=2.5)`, momentum of 2, a `first` of 1.5 in `Optimizer` and "
    "`Adaptive`;\n"
    "- `synthetic(rows=10**30)` and `locally_fair_globally_unfair(clients=10**30)`, which"
    " ran out of memory or did not end.\n"
)


@dataclass(frozen=True)
class Outcome:
    """`fault` is empty where the answer is right; `said` is the message of an error, or a value."""

    fault: str
    error: bool
    said: str


def judged(case: Case) -> Outcome:
    """Make the call and hold it against the oracle."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = case.call()
    except Exception as error:
        return Outcome(_fault_of_error(case, error), True, f"{type(error).__name__}: {error}")
    said = " ".join(repr(found).split())[:200]
    if case.answer is None:
        return Outcome("accepted, and means nothing", False, said)
    if case.answer is ANY or isinstance(case.answer, str):
        right = case.holds is None or case.holds(found)
    else:
        right = _same(found, case.answer)
    expected = " ".join(repr(case.answer).split())[:100]
    return Outcome("" if right else f"a wrong answer; the oracle has {expected}", False, said)


def _fault_of_error(case: Case, error: Exception) -> str:
    text = str(error)
    if case.strict:
        return "refused, and is right"
    own = isinstance(error, FedgftError)
    if not own and not (type(error) is TypeError and "argument" in text):
        return f"a raw {type(error).__name__}"
    if len(text.splitlines()) != 1 or len(text) > LONGEST:
        return "not one line"
    plain = text.replace("-", "_")
    if not any(name.replace("-", "_") in plain for name in case.says or (case.argument,)):
        return f"does not name {case.argument}"
    return ""


def _same(found: Any, answer: Any) -> bool:
    if isinstance(answer, dict | tuple):
        return found == answer
    mine = np.asarray(found, float)
    right = np.asarray(answer, float)
    return mine.shape == right.shape and np.allclose(mine, right, CLOSE, CLOSE, equal_nan=True)


def run_all(only: str) -> Iterator[tuple[Case, Outcome]]:
    """In a process of its own, begun anew after a call that ends it (or does not end)."""
    start = 0
    total = 1
    while start < total:
        command = [sys.executable, "-W", "ignore", __file__, "--only", only, "--start", str(start)]
        case = None
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said = json.loads(line)
                if case is None:
                    *about, total = said
                    case = Case(*about, call=list, answer=None)
                else:
                    yield case, Outcome(*said)
                    start = start + 1
                    case = None
        code = process.returncode
        if case is not None:
            hung = code == -signal.SIGALRM
            fault = f"no answer within {SECONDS} seconds" if hung else f"ended the process ({code})"
            yield case, Outcome(fault, False, "")
            start += 1
        elif code:
            raise SystemExit(f"the cases cannot be made (exit code {code})")


def run_from(start: int, only: str) -> None:
    """Calls from number `start` on: a line before each, which says what it is, and one after.

    What a call prints goes nowhere.
    """
    from misuse_cases import cases  # the process above has no use for it

    with tempfile.TemporaryDirectory() as folder:
        wanted = [c for c in cases(Path(folder)) if only in f"{c.what} {c.argument}: {c.given}"]
        writing = os.dup(1)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for case in wanted[start:]:
            about = [case.what, case.argument, case.given, case.kind, len(wanted)]
            os.write(writing, (json.dumps(about) + "\n").encode())
            signal.alarm(SECONDS)
            outcome = judged(case)
            signal.alarm(0)
            told = [outcome.fault, outcome.error, outcome.said]
            os.write(writing, (json.dumps(told) + "\n").encode())


def table(rows: list[tuple[Case, Outcome]], seconds: float) -> str:
    """The page of results: counts by kind and by function, then what falls short."""
    short = [(case, outcome) for case, outcome in rows if outcome.fault]
    errors = sum(outcome.error for _, outcome in rows)
    lines = [
        "# Misuse of the Python interface",
        "",
        f"{len(rows):,} calls with one argument replaced by something wrong, odd or unusual, made "
        f"by `python hardening/misuse.py` in {seconds:.0f} seconds of a processor. "
        f"{len(rows) - len(short):,} are right: {len(rows) - errors:,} gave an answer that an "
        "oracle has as well, which loops over rows (or allows, where a call makes an object), and "
        f"{errors:,} raised one error of one line that names the argument. {len(short)} fall "
        "short.",
        "",
        "| kind of misuse | calls | right answers | errors that say why | fall short |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += _counts(rows, lambda case: case.kind)
    lines += [
        "",
        "| function | calls | right answers | errors that say why | fall short |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += _counts(rows, lambda case: f"`{case.what}`")
    if short:
        lines += [
            "",
            "## What falls short",
            "",
            "| call | given | fault | said |",
            "|---|---|---|---|",
        ]
        for case, outcome in short:
            given = f"{case.argument}: {_cell(case.given)}"
            fault = _cell(outcome.fault)
            said = _cell(outcome.said)
            lines.append(f"| `{case.what}` | {given} | {fault} | {said} |")
    return "\n".join(lines) + "\n" + FOUND


def _counts(rows: list[tuple[Case, Outcome]], key: Any) -> list[str]:
    total = Counter()
    answers = Counter()
    errors = Counter()
    short = Counter()
    for case, outcome in rows:
        name = key(case)
        total[name] += 1
        short[name] += bool(outcome.fault)
        answers[name] += not outcome.fault and not outcome.error
        errors[name] += not outcome.fault and outcome.error
    return [f"| {n} | {total[n]} | {answers[n]} | {errors[n]} | {short[n]} |" for n in total]


def _cell(text: str) -> str:
    plain = "".join(c if c.isprintable() else " " for c in text[:240])
    return plain.replace("\\", "\\\\").replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases that contain this text")
    parser.add_argument("--out", type=Path, default=Path("results/hardening/misuse.md"))
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start is not None:
        run_from(args.start, args.only)
        return
    rows = []
    for case, outcome in run_all(args.only):
        rows.append((case, outcome))
        if outcome.fault:
            print(f"{case.what} {case.argument}: {case.given}: {outcome.fault}", flush=True)
            print(f"    {outcome.said[:300]}", flush=True)
    used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    short = [case for case, outcome in rows if outcome.fault]
    print(f"{len(rows)} calls, {len(short)} fall short, {math.ceil(used)} s of a processor")
    if not args.only:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(table(rows, used), "utf-8")
    sys.exit(bool(short))


if __name__ == "__main__":
    main()
