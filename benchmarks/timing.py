"""Stopwatches: runs that take turns, and runs in a process of their own."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

SPEED = Path(__file__).with_name("speed.py")


def clock(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the run returned."""
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def in_turns(*runs: Callable[[int], Any], repeats: int) -> tuple[np.ndarray, list[list[Any]]]:
    """Seconds (run, repeat) and results [run][repeat]; a run is told the number of its repeat.

    They take turns, so that a slow minute hits all alike.
    """
    taken = [[clock(partial(run, i)) for run in runs] for i in range(repeats)]
    by_run = list(zip(*taken, strict=True))
    seconds = np.array([[seconds for seconds, _ in turns] for turns in by_run])
    return seconds, [[result for _, result in turns] for turns in by_run]


class Neighbors:
    """How many cores others kept busy between `__enter__` and `__exit__`: the noise."""

    def __enter__(self) -> "Neighbors":
        self.at, self.busy = time.perf_counter(), self._busy()
        return self

    def __exit__(self, *_: object) -> None:
        busy = (self._busy() - self.busy) / (time.perf_counter() - self.at)
        self.cores = max(0.0, round(busy, 2))

    def _busy(self) -> float:
        machine = psutil.cpu_times()
        own = os.times()
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        return sum(machine) - idle - sum(own[:4])  # own children are not others


def peak_mb() -> float:
    """The most memory that this process has held.

    Linux counts in `ru_maxrss` what a process held before it became another program; its status
    file does not.
    """
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        if found:
            return round(int(found[0]) / 2**10, 1)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)


class Done(NamedTuple):
    """What a process took."""

    seconds: float
    processor: float  # seconds of all cores together: they depend far less on what others do
    peak_mb: float  # of the largest of its processes
    said: str


def command(*arguments: str, cwd: Path | None = None) -> Done:
    """Python with these arguments; for the same reason as in `alone`, the caller must be small."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as wrong:
        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, *arguments], stdout=said, stderr=wrong, cwd=cwd)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
        said.seek(0)
        wrong.seek(0)
        if status:
            raise SystemExit(f"{' '.join(arguments)} failed: {wrong.read()[-2000:].decode()}")
        unit = 2**20 if sys.platform == "darwin" else 2**10
        processor = used.ru_utime + used.ru_stime
        return Done(seconds, processor, used.ru_maxrss / unit, said.read().decode())


def alone(case: str, side: str, *options: str, env: Mapping[str, str] | None = None) -> dict:
    """One run of one side of a case in a fresh process.

    `process_seconds` counts from its start to its end. To be called before this process has
    grown: at its birth the system books the parent's memory on the child.
    """
    command = [sys.executable, str(SPEED), "--case", case, "--once", side, *options]
    seconds, done = clock(
        lambda: subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, **(env or {})}
        )
    )
    return {**json.loads(done.stdout), "process_seconds": seconds}
