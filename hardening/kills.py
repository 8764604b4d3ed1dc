"""Fifty runs killed (SIGKILL, the whole process group) at seeded moments, and finished again.

python hardening/kills.py [--seed 0] [--scale 1] [--out results/hardening]

Two kills in three come by the clock, spread evenly over the time that an undisturbed run takes;
the third comes while outputs are written, a moment after the first sign of one. Every other run
starts in a folder that holds the outputs of an earlier run with other options. After each kill
every visible file must be whole: the earlier run's or the undisturbed run's, or a checkpoint that
passes its checksum. Then the same command again, as a user would do it, with --resume where the
command itself asks for it, must end with what the undisturbed run wrote, and nothing beside it.
Commands that go on from where they were are also killed several times in a row. Writes
OUT/kills.md; exits with 1 unless all runs do so. Needs the `test` extra and COMPAS in the cache
(`fedgft data get compas`). About ten minutes.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from killing import Case, cases, contents, leftovers, sound, visible

from fedgft.formatting import Table
from fedgft.store import atomic_write

IN_A_ROW = 4  # kills of one and the same run
LATE = 0.9  # a run that was over before its moment is killed so much earlier the next time


@dataclass(frozen=True)
class Kill:
    case: str
    moment: str
    state: str  # what was there
    whole: bool
    identical: bool
    times: int = 1


class Range:
    """Runs of one case: an undisturbed one to compare with, an earlier one to write over."""

    def __init__(self, case: Case, place: Path) -> None:
        self.case = case
        self.place = place / case.name.replace(" ", "-")
        self.place.mkdir()
        self.earlier = self._finished("earlier", case.earlier)
        began = time.monotonic()
        self.calm = self._finished("calm", case.usual)
        self.seconds = time.monotonic() - began

    def _finished(self, name: str, more: tuple[str, ...]) -> Path:
        folder = self.place / name
        done = self._start(folder, more)
        said = done.communicate()[1]
        assert done.returncode == 0, said
        return folder

    def _start(self, folder: Path, more: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        (folder / "out").mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "fedgft", *self.case.command(folder), *more]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )

    def killed(self, folder: Path, after: float, *, writing: bool) -> str | None:
        """When, in words, or None if it was over before."""
        more = ("--resume",) if list(folder.rglob("checkpoints/*.safetensors")) else ()
        before = visible(folder / "out")
        began = time.monotonic()
        process = self._start(folder, (*self.case.usual, *more))
        if writing:
            while process.poll() is None and not self._begun(folder / "out", before):
                time.sleep(0.001)
        time.sleep(after)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        said = process.communicate()[1]
        if process.returncode != -signal.SIGKILL:  # it may also end between the look and the kill
            assert process.returncode == 0, said
            return None
        spent = f"{time.monotonic() - began:.2f} s"
        return f"{spent}, {1000 * after:.0f} ms into writing" if writing else spent

    def _begun(self, out: Path, before: dict[str, int]) -> bool:
        parts = [p for p in leftovers(out) if not p.startswith((".fedgft-probe", "checkpoints/"))]
        now = {n: t for n, t in visible(out).items() if not n.startswith("checkpoints/")}
        return bool(parts) or not now.items() <= before.items()

    def state(self, folder: Path) -> str:
        out = folder / "out"
        wanted = contents(self.calm / "out")
        there = contents(out)
        new = sum(there.get(n) == c for n, c in wanted.items() if n not in self.same)
        kept = len(list(out.rglob("checkpoints/*.safetensors")))
        said = [f"{new} of {len(wanted) - len(self.same)} outputs"]
        said += [f"{kept} checkpoint(s)"] if kept else []
        said += [f"hidden {', '.join(sorted(parts))}"] if (parts := leftovers(out)) else []
        return ", ".join(said)

    @property
    def same(self) -> set[str]:
        """Outputs that the earlier run has as well: they say nothing about how far a run got."""
        old = contents(self.earlier / "out")
        new = contents(self.calm / "out")
        return {name for name in new if old.get(name) == new[name]}

    def whole(self, folder: Path, *, over: bool) -> bool:
        """Whether all files are complete; `over`: the outputs of the earlier run were there."""
        old = contents(self.earlier / "out") if over else {}
        return sound(folder / "out", contents(self.calm / "out"), old)

    def resumed(self, folder: Path) -> bool:
        """The same command again, then with --resume if it asks for that; the same results."""
        process = self._start(folder, self.case.usual)
        said = process.communicate()[1]
        if process.returncode == 2 and "--resume goes on from there" in said:
            process = self._start(folder, (*self.case.usual, "--resume"))
            said = process.communicate()[1]
        found = contents(folder / "out")
        calm = contents(self.calm / "out")
        old = contents(self.earlier / "out")
        beside = {n for n in found if n not in calm and not n.startswith("cells/")}
        good = process.returncode == 0 and calm.items() <= found.items() and not beside - set(old)
        if not good or leftovers(folder / "out"):
            print(f"{self.case.name}: {said}{leftovers(folder / 'out')}", file=sys.stderr)
        return good and not leftovers(folder / "out")


def attack(ground: Range, rng: np.random.Generator, number: int) -> list[Kill]:
    """So many kills, each of a run of its own."""
    out = []
    by_clock = number - number // 3
    spread = (np.arange(by_clock) + rng.random(by_clock)) / by_clock * ground.seconds
    moments = [(float(t), False) for t in spread]
    moments += [(float(t), True) for t in rng.uniform(0, 0.2, number - by_clock)]
    for i, (after, writing) in enumerate(moments):
        folder = ground.place / "killed"
        moment = None
        while moment is None:
            shutil.rmtree(folder, ignore_errors=True)
            if i % 2:
                shutil.copytree(ground.earlier / "out", folder / "out")
            moment = ground.killed(folder, after, writing=writing)
            after *= LATE
        state = ground.state(folder)
        good = ground.whole(folder, over=i % 2 == 1)
        out.append(Kill(ground.case.name, moment, state, good, ground.resumed(folder)))
        print(out[-1], flush=True)
    return out


def in_a_row(ground: Range, rng: np.random.Generator) -> Kill:
    """One run: killed, continued, killed, continued, until it has been killed often enough."""
    folder = ground.place / "killed"
    moments = []
    good = True
    shutil.rmtree(folder, ignore_errors=True)
    while len(moments) < IN_A_ROW:
        after = rng.uniform(0.3, 0.6) * ground.seconds
        moment = ground.killed(folder, float(after), writing=False)
        if moment is None:
            break
        moments.append(moment)
        good = good and ground.whole(folder, over=False)
    state = ground.state(folder)
    name = f"{ground.case.name}, in a row"
    done = Kill(name, " + ".join(moments), state, good, ground.resumed(folder), len(moments))
    print(done, flush=True)
    return done


def page(grounds: list[Range], single: list[Kill], rows: list[Kill]) -> str:
    mark = lambda good: "yes" if good else "NO"  # noqa: E731
    count = Counter(k.case for k in single)
    right = Counter(k.case for k in single if k.identical)
    intact = Counter(k.case for k in single if k.whole)
    summary = Table(
        "By command",
        ("command", "undisturbed, s", "kills", "all files whole", "same results"),
        tuple(
            (n, f"{g.seconds:.1f}", str(count[n]), str(intact[n]), str(right[n]))
            for g in grounds
            for n in [g.case.name]
        ),
        1,
    )
    each = Table(
        "Each kill",
        ("command", "killed after", "found then", "whole", "same results"),
        tuple(
            (k.case, k.moment, k.state, mark(k.whole), mark(k.identical)) for k in (*single, *rows)
        ),
        3,
    )
    total = sum(k.whole and k.identical for k in single)
    chains = sum(k.whole and k.identical for k in rows)
    return "\n".join(
        [
            "# Killed, and finished again",
            "",
            "Made by `python hardening/kills.py`, whose first lines say how.",
            "",
            f"- {total} of {len(single)} killed runs left whole files only, and ended with the "
            "results "
            "of an undisturbed run.",
            f"- {chains} of {len(rows)} runs that were killed several times in a row did so too "
            f"({', '.join(str(k.times) for k in rows)} kills).",
            "",
            "Models, figures and pages are compared byte for byte; Parquet and JSON value by "
            "value, "
            "without what is meant to differ: the seconds that a run took (a column of the rows, a "
            "field of the cells) and digests of files that hold them (`digest`, `stamp`, `files`).",
            "",
            summary.markdown(),
            each.markdown(),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the fifty kills")
    parser.add_argument("--out", type=Path, default=Path("results/hardening"))
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    single = []
    rows = []
    grounds = []
    with tempfile.TemporaryDirectory() as place:
        for case in cases(Path(place)):
            grounds.append(Range(case, Path(place)))
            single += attack(grounds[-1], rng, max(1, round(args.scale * case.kills)))
            rows += [in_a_row(grounds[-1], rng)] if case.continues else []
        text = page(grounds, single, rows)
    with atomic_write(args.out / "kills.md") as part:
        part.write(text.encode())
    print(text)
    good = all(k.whole and k.identical for k in (*single, *rows))
    sys.exit(0 if good and all(k.times > 1 for k in rows) else 1)


if __name__ == "__main__":
    main()
