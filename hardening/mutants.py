"""Measure whether the tests detect faults: mutants of `fedgft.metrics` and `fedgft.theory`.

pip install 'fedgft[hardening,test]'
python hardening/mutants.py                     # all, into results/hardening/mutants.md
python hardening/mutants.py --only sums.py --jobs 1
python hardening/mutants.py --sample 200        # a random sample, for an estimate in minutes

A mutant is a module with one small fault. The tests run on it until one of them fails: the mutant
is killed. The page lists the mutants that survive all tests. The script fails if fewer than 90% of
the mutants are killed. An interrupted run continues where it stopped.

cosmic-ray itself starts a process for each of its three thousand mutants, which takes a night. Here
its operators make the mutants, and one process imports all that the tests need except fedgft, and
forks for each mutant.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points, version
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedgft"
# The most specific tests of a module come first: the first failure ends the run.
TESTS = {
    "metrics/catalog.py": ("metric_functions", "metrics", "combined_metrics"),
    "metrics/functions.py": ("metric_functions",),
    "metrics/intervals.py": ("intervals", "combined_metrics"),
    "metrics/metric.py": ("metrics", "combined_metrics", "metric_functions", "theory"),
    "sums.py": ("metrics", "theory", "sums", "site_file"),
    "theory.py": ("theory",),
}
MAX_CPU_SECONDS = 120  # of one mutant, many times what the tests take
MIN_KILLED_SHARE = 0.9


@dataclass(frozen=True)
class Mutant:
    """A module with one fault: its file, its original source and its changed source."""

    file: str
    original: str
    source: str

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(f"{self.file}\n{self.source}".encode()).hexdigest()[:16]

    @cached_property
    def change(self) -> tuple[int, str, str]:
        """The first line that differs: its number, the original text and the changed text."""
        pairs = zip(self.original.splitlines(), self.source.splitlines(), strict=False)
        return next((n, a.strip(), b.strip()) for n, (a, b) in enumerate(pairs, 1) if a != b)


def make_mutants(file: str) -> Iterator[Mutant]:
    """Yield every mutant that the operators of cosmic-ray make of a module."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    original = (PACKAGE / file).read_text()
    for kind in map(get_operator, operator_names()):
        if kind.arguments():  # it has to be told which variables to change
            continue
        for occurrence in count():
            source = mutate_code(original, kind(), occurrence)
            if source is None:
                break
            yield Mutant(file, original, source)


class FastFailPlugin:
    """A pytest plugin: tests run in the order that finds a fault soonest, without shrinking."""

    @staticmethod
    def pytest_configure() -> None:
        from hypothesis import Phase, settings

        usual = settings.get_profile("fedgft")
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", parent=usual, phases=phases, max_examples=40)
        settings.load_profile("mutants")

    @staticmethod
    def pytest_collection_modifyitems(items: list[Any]) -> None:
        """Put plain tests before Hypothesis, and the first case of every test before any second."""
        seen = Counter[str]()
        order = {}
        for item in items:
            order[item] = getattr(item.obj, "is_hypothesis_test", False), seen[item.originalname]
            seen[item.originalname] += 1
        items.sort(key=lambda item: order[item])


def install_mutant(mutant: Mutant) -> None:
    """Make this process load the mutant where it imports the module."""
    read = SourceFileLoader.get_data
    target = str(PACKAGE / mutant.file)
    compiled = f"{Path(mutant.file).stem}.cpython"

    def get_data(self: SourceFileLoader, path: str) -> bytes:
        if path == target:
            return mutant.source.encode()
        if Path(path).name.startswith(compiled):
            raise OSError("the bytecode of the original must not be loaded")
        return read(self, path)

    SourceFileLoader.get_data = get_data  # the loader of jaxtyping's import hook inherits it
    sys.dont_write_bytecode = True


def run_tests(names: Iterable[str]) -> int:
    """Run the test files of these names until one test fails; return the exit status of pytest."""
    import pytest

    files = [str(ROOT / "tests" / f"test_{name}.py") for name in names]
    imported_early = "ignore::pytest.PytestAssertRewriteWarning"  # by `prepare`
    return pytest.main(
        ["-x", "-W", imported_early, "-p", "no:cacheprovider", *files], [FastFailPlugin]
    )


def start_process(mutant: Mutant) -> int:
    """Fork a process that tests this mutant and exits with the status of pytest; return its id."""
    child = os.fork()
    if child:
        return child
    with open(os.devnull, "w") as nowhere:  # discard the output of pytest
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)  # without a handler it ends the process
    install_mutant(mutant)
    status = 3
    with contextlib.suppress(BaseException):
        status = int(run_tests(TESTS[mutant.file]))
    os._exit(status)


def run_mutants(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, str]]:
    """Yield every mutant with its outcome: "killed", "timeout" or "survived"."""
    waiting = list(reversed(mutants))
    running = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[start_process(mutant)] = mutant
        process, status = os.wait()
        ended = "timeout" if os.WIFSIGNALED(status) else "killed" if status else "survived"
        yield running.pop(process), ended


def collect_outcomes(mutants: list[Mutant], jobs: int, journal: Path) -> dict[str, str]:
    """Return the outcome of each mutant by its key; skip those that the journal has already."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    ended = dict(json.loads(line) for line in lines)
    left = [mutant for mutant in mutants if mutant.key not in ended]
    with journal.open("a") as file:
        for number, (mutant, end) in enumerate(run_mutants(left, jobs), 1):
            ended[mutant.key] = end
            file.write(json.dumps([mutant.key, end]) + "\n")
            file.flush()
            if end == "survived":
                print(f"{mutant.file}:{mutant.change}", flush=True)
            if number % 50 == 0:
                print(f"{number} of {len(left)}", flush=True)
    return ended


def prepare() -> None:
    """Import what every test process needs, except fedgft. Tests set their number of threads."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(PACKAGE.parent))
    os.chdir(ROOT)
    for name in ("beartype", "fairlearn.metrics", "hypothesis.extra.numpy", "scipy.stats", "torch"):
        import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()  # so that the processes do not collect garbage among these modules


def check_originals(files: list[str], jobs: int) -> None:
    """Exit with an error if the tests of a module fail without a fault."""
    texts = {file: (PACKAGE / file).read_text() for file in files}
    for mutant, ended in run_mutants([Mutant(f, t, t) for f, t in texts.items()], jobs):
        if ended != "survived":
            raise SystemExit(f"the tests of {mutant.file} fail without a fault")


def format_report(found: list[tuple[Mutant, str]], n_made: int) -> str:
    """Return the page: the outcomes by module, and the mutants that survived.

    Args:
        found: the tested mutants, each with its outcome.
        n_made: how many mutants the operators made; more than were tested if a sample was drawn.
    """
    files = list(dict.fromkeys(m.file for m, _ in found))
    rows = {file: Counter(ended for m, ended in found if m.file == file) for file in files}
    rows["all"] = sum(rows.values(), Counter())
    lines = [
        "# Do the tests detect faults?",
        "",
        f"Mutants that cosmic-ray {version('cosmic-ray')} makes, each a module with one small "
        "fault, and the outcome of the tests of that module (`hardening/mutants.py`). Tested: "
        + (f"a random sample of {len(found)} of {n_made}." if len(found) < n_made else "all."),
        "",
        "| module | mutants | killed | out of time | survived | killed, share |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for file, n in rows.items():
        lines.append(
            f"| {file} | {n.total()} | {n['killed']} | {n['timeout']} | {n['survived']} "
            f"| {killed_share(n):.1%} |"
        )
    lines += ["", "## Survivors", "", "| where | was | is |", "|---|---|---|"]
    for mutant, ended in found:
        if ended == "survived":
            line, was, now = mutant.change
            was, now = (text.replace("|", "\\|") for text in (was, now))
            lines.append(f"| {mutant.file}:{line} | `{was}` | `{now}` |")
    return "\n".join(lines) + "\n"


def killed_share(n: Counter[str]) -> float:
    """Return the share of mutants that did not survive."""
    return 1 - n["survived"] / n.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="parts of the names of modules")
    parser.add_argument("--sample", type=int, help="how many mutants to draw at random")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=ROOT / "results/hardening")
    given = parser.parse_args()
    files = [f for f in TESTS if not given.only or any(part in f for part in given.only)]
    mutants = [mutant for file in files for mutant in make_mutants(file)]
    n_made = len(mutants)
    if given.sample is not None:
        mutants = random.Random(0).sample(mutants, min(given.sample, len(mutants)))
    prepare()
    check_originals(files, given.jobs)
    outcomes = collect_outcomes(mutants, given.jobs, given.out / "mutants.jsonl")
    found = [(mutant, outcomes[mutant.key]) for mutant in mutants]
    total = killed_share(Counter(ended for _, ended in found))
    print(f"{total:.1%} of {len(found)} mutants killed")
    (given.out / "mutants.md").write_text(format_report(found, n_made))
    (given.out / "mutants.jsonl").unlink()
    if total < MIN_KILLED_SHARE:
        raise SystemExit(f"fewer than {MIN_KILLED_SHARE:.0%}")


if __name__ == "__main__":
    main()
