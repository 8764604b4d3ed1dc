"""Every way to give a command something wrong, and what it says: one line, and nothing left behind.

python hardening/bad_inputs.py [--only TEXT] [--out results/hardening/bad-inputs.md]

Each case is a command line in a folder of its own. It runs in a fork of this process, which has
imported what is heavy, under a limit of time and of memory. A case falls short if it ends with
another exit code than the one it should, with a traceback or not at all, says more than one line,
does not name what is wrong, prints anything on stdout, or leaves, changes or takes away a file.
"""

import argparse
import ctypes
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from bad_cases import Case, cases, stock

from fedgft.cli import main as fedgft

SECONDS = 60  # that a case may take
MORE_MEMORY = 6 * 2**30  # bytes, beyond what this process has
OVERRIDES = 0b110  # capabilities of root: to read and write whatever the permissions say
AT_ONCE = 4


@dataclass(frozen=True)
class Outcome:
    code: int | None  # None: it had to be ended
    out: str
    err: str
    seconds: float  # of a processor: a busy machine does not change them
    before: dict[str, bytes]
    after: dict[str, bytes]

    def faults(self, case: Case) -> list[str]:
        """What is wrong with the answer; nothing, if all is well."""
        lines = self.err.splitlines()
        found = []
        if self.code is None:
            found.append(f"no answer within {SECONDS} seconds")
        elif self.code != case.code:
            found.append(f"exit code {self.code}")
        if "Traceback" in self.err:
            found.append("a traceback")
        if len(lines) != 1 or not lines[0].startswith("fedgft: "):
            found.append(f"{len(lines)} lines of error")
        if self.out:
            found.append("something on stdout")
        found += [f"does not say {name!r}" for name in case.says if name not in self.err]
        if not self.err.isprintable() and any(not c.isprintable() for c in "".join(lines)):
            found.append("unprintable characters")
        changed = {
            n for n in {*self.before, *self.after} if self.before.get(n) != self.after.get(n)
        }
        return found + [f"{name!r} was left, changed or taken away" for name in sorted(changed)]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, folder, link and pipe in it, plain files with what they hold."""
    return {
        str(path.relative_to(folder)): path.read_bytes()[:10_000_000]
        if path.is_file() and not path.is_symlink()
        else b""
        for path in sorted(folder.rglob("*"))
    }


def prepare(case: Case, folder: Path, pantry: Path) -> None:
    """What the command line names and the pantry has, and the case's own files."""
    folder.mkdir()
    for word in case.arguments:
        name = word.partition("=")[2] if word.startswith("--") else word
        if name in case.files or not 1 < len(name) < 99:
            continue
        if (pantry / name).exists():
            copy = shutil.copytree if (pantry / name).is_dir() else shutil.copy
            copy(pantry / name, folder / name)
    for name, make in case.files.items():
        if isinstance(make, str):
            (folder / name).write_text(make, "utf-8")
        elif isinstance(make, bytes):
            (folder / name).write_bytes(make)
        else:
            make(folder / name, pantry)


@dataclass
class Running:
    """A command in a fork of this process."""

    case: Case
    folder: Path
    before: dict[str, bytes]
    pid: int
    began: float

    @classmethod
    def start(cls, case: Case, folder: Path, pantry: Path) -> "Running":
        prepare(case, folder, pantry)
        before = contents(folder)
        pid = os.fork()
        if pid == 0:  # never back into the loop of the parent
            try:
                os._exit(_child(case, folder))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        return cls(case, folder, before, pid, time.monotonic())

    def ended(self) -> Outcome | None:
        pid, status, used = os.wait4(self.pid, os.WNOHANG)
        late = time.monotonic() - self.began > SECONDS
        if pid == 0 and not late:
            return None
        if pid == 0:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        out, err = (printed(self.folder, end) for end in (".out", ".err"))
        code = None if late else os.waitstatus_to_exitcode(status)
        return Outcome(
            code, out, err, used.ru_utime + used.ru_stime, self.before, contents(self.folder)
        )


def printed(folder: Path, ending: str) -> str:
    """What a case in this folder said; the folder itself is another one every time."""
    text = folder.with_suffix(ending).read_text("utf-8", "replace")
    return text.replace(str(folder), "FOLDER")


def _child(case: Case, folder: Path) -> int:
    for number, end in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(folder.with_suffix(end), os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if case.powerless:
        _give_up_overrides()
    return called(case)


def _give_up_overrides() -> None:
    """Root obeys permissions from here on; everybody else does so anyway."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    if libc.capget(header, held) == 0:
        held[0] &= ~OVERRIDES
        libc.capset(header, held)


def called(case: Case) -> int:
    """The exit code that a process with these arguments would have."""
    try:
        fedgft(list(case.arguments))
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def run_all(wanted: list[Case], place: Path) -> Iterator[tuple[Case, Outcome]]:
    """A few at a time; what they hand back comes in the order of the cases."""
    waiting = list(enumerate(wanted))
    running = {}
    done: dict[int, Outcome] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, case = waiting.pop(0)
            running[number] = Running.start(case, place / f"case-{number}", place / "pantry")
        for number, each in list(running.items()):
            outcome = each.ended()
            if outcome is not None:
                if faults := outcome.faults(each.case):
                    print(f"{each.case.shown} ({each.case.about}): {'; '.join(faults)}", flush=True)
                    print(f"    {outcome.err[-600:]}", flush=True)
                done[number] = outcome
                del running[number]
        time.sleep(0.005)
    for number, case in enumerate(wanted):
        yield case, done[number]


def table(rows: list[tuple[Case, Outcome]]) -> str:
    """The page of results."""
    codes = sorted({case.code for case, _ in rows})
    short = sum(bool(outcome.faults(case)) for case, outcome in rows)
    seconds = [outcome.seconds for _, outcome in rows]
    lines = [
        "# Bad inputs",
        "",
        f"{len(rows)} command lines with something wrong in them, each run in a folder of its own "
        f"(FOLDER) by `python hardening/bad_inputs.py`. {len(rows) - short} of them end with exit "
        f"code {' or '.join(map(str, codes))} and one line that names what is wrong, print nothing "
        f"on stdout, and leave, change or take away no file; {short} fall short. They take "
        f"{sum(seconds):.0f} seconds of a processor once everything is imported, the slowest "
        f"{max(seconds):.1f}.",
    ]
    for command, some in groupby(rows, key=lambda row: row[0].command):
        some = list(some)
        lines += [
            "",
            f"## {command} ({len(some)})",
            "",
            "| given | code | says |",
            "|---|---:|---|",
        ]
        for case, outcome in some:
            said = outcome.err.removeprefix("fedgft: ").strip() or "(nothing)"
            wrong = "; ".join(outcome.faults(case))
            given = f"`{_cell(case.shown)}`" + (f" ({_cell(case.about)})" if case.about else "")
            said = f"**falls short: {_cell(wrong)}**" if wrong else _cell(said)
            lines.append(f"| {given} | {outcome.code} | {said} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = text if len(text) <= 300 else f"{text[:300]} ..."
    plain = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return plain.replace("\\", "\\\\").replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases that contain this text")
    parser.add_argument("--out", type=Path, default=Path("results/hardening/bad-inputs.md"))
    parser.add_argument("--stock", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stock is not None:  # in a process of its own: threads do not survive a fork
        stock(args.stock)
        return
    import flwr.serverapp.strategy  # noqa: F401
    import polars  # noqa: F401
    import torch  # noqa: F401

    wanted = [case for case in cases() if args.only in f"{case.command}: {case.shown}"]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.chmod(place, 0o755)
        os.environ |= {"XDG_CACHE_HOME": str(place / "cache"), "COLUMNS": "80"}
        made = [sys.executable, __file__, "--stock", place / "pantry"]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        gc.freeze()  # or every fork would look through, and so copy, all that was imported
        began = time.monotonic()
        rows = list(run_all(wanted, place))
    short = [(case, faults) for case, outcome in rows if (faults := outcome.faults(case))]
    if not args.only:
        args.out.write_text(table(rows), "utf-8")
    print(f"{len(rows)} cases, {len(short)} fall short, {time.monotonic() - began:.0f} s")
    raise SystemExit(bool(short))


if __name__ == "__main__":
    main()
