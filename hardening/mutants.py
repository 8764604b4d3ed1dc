"""Do the tests notice a fault? cosmic-ray's mutants of `fedgft.metrics` and `fedgft.theory`.

pip install 'fedgft[hardening,test]'
python hardening/mutants.py                     # all, into results/hardening/mutants.md
python hardening/mutants.py --only sums.py --jobs 1
python hardening/mutants.py --sample 200        # a random sample, for an estimate in minutes

Each mutant is a module with one small fault, and the tests run on it until one fails; the page
lists those that live on. The command fails if fewer than 90% are killed; one that was interrupted
goes on where it was.

cosmic-ray itself starts a process for each of its three thousand mutants, which takes a night. Here
its operators make the mutants, one process imports what the tests need, fedgft excepted, and forks
for each.
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
# The tests that know a module best come first: the first failure ends the run.
TESTS = {
    "metrics/catalog.py": ("metric_functions", "metrics", "combined_metrics"),
    "metrics/functions.py": ("metric_functions",),
    "metrics/intervals.py": ("intervals", "combined_metrics"),
    "metrics/metric.py": ("metrics", "combined_metrics", "metric_functions", "theory"),
    "sums.py": ("metrics", "theory"),
    "theory.py": ("theory",),
}
LIMIT = 120  # seconds of processor time, many times what the tests take
SHARE = 0.9


@dataclass(frozen=True)
class Mutant:
    """A module, and what it becomes."""

    file: str
    original: str
    source: str

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(f"{self.file}\n{self.source}".encode()).hexdigest()[:16]

    @cached_property
    def change(self) -> tuple[int, str, str]:
        """The first line that differs: its number, what was there, what is there now."""
        pairs = zip(self.original.splitlines(), self.source.splitlines(), strict=False)
        return next((n, a.strip(), b.strip()) for n, (a, b) in enumerate(pairs, 1) if a != b)


def mutants_of(file: str) -> Iterator[Mutant]:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    original = (PACKAGE / file).read_text()
    for kind in map(get_operator, operator_names()):
        if kind.arguments():  # to be told which variables
            continue
        for occurrence in count():
            source = mutate_code(original, kind(), occurrence)
            if source is None:
                break
            yield Mutant(file, original, source)


class Quick:
    """The tests in the order that finds a fault soonest; no search for the smallest example."""

    @staticmethod
    def pytest_configure() -> None:
        from hypothesis import Phase, settings

        usual = settings.get_profile("fedgft")
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", parent=usual, phases=phases, max_examples=40)
        settings.load_profile("mutants")

    @staticmethod
    def pytest_collection_modifyitems(items: list[Any]) -> None:
        """Plain before Hypothesis, and one case of every test before the second of any."""
        seen = Counter[str]()
        order = {}
        for item in items:
            order[item] = getattr(item.obj, "is_hypothesis_test", False), seen[item.originalname]
            seen[item.originalname] += 1
        items.sort(key=lambda item: order[item])


def plant(mutant: Mutant) -> None:
    """From now on this process reads the mutant where it imports the module."""
    read = SourceFileLoader.get_data
    target = str(PACKAGE / mutant.file)
    compiled = f"{Path(mutant.file).stem}.cpython"

    def get_data(self: SourceFileLoader, path: str) -> bytes:
        if path == target:
            return mutant.source.encode()
        if Path(path).name.startswith(compiled):
            raise OSError("what was compiled before is not the mutant")
        return read(self, path)

    SourceFileLoader.get_data = get_data  # the loader of jaxtyping's import hook inherits it
    sys.dont_write_bytecode = True


def run_tests(names: Iterable[str]) -> int:
    import pytest

    files = [str(ROOT / "tests" / f"test_{name}.py") for name in names]
    imported = "ignore::pytest.PytestAssertRewriteWarning"  # by `prepare`
    return pytest.main(["-x", "-W", imported, "-p", "no:cacheprovider", *files], [Quick])


def fork(mutant: Mutant) -> int:
    """The id of a process that runs the tests on this mutant and ends with their status."""
    child = os.fork()
    if child:
        return child
    with open(os.devnull, "w") as nowhere:  # nobody reads what pytest says
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)  # without a handler it ends the process
    plant(mutant)
    status = 3
    with contextlib.suppress(BaseException):
        status = int(run_tests(TESTS[mutant.file]))
    os._exit(status)


def outcomes(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, str]]:
    waiting = list(reversed(mutants))
    running = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[fork(mutant)] = mutant
        process, status = os.wait()
        ended = "timeout" if os.WIFSIGNALED(status) else "killed" if status else "survived"
        yield running.pop(process), ended


def tried(mutants: list[Mutant], jobs: int, journal: Path) -> dict[str, str]:
    """What became of each, by its key; those that an interrupted run has tried are not again."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    ended = dict(json.loads(line) for line in lines)
    left = [mutant for mutant in mutants if mutant.key not in ended]
    with journal.open("a") as file:
        for number, (mutant, end) in enumerate(outcomes(left, jobs), 1):
            ended[mutant.key] = end
            file.write(json.dumps([mutant.key, end]) + "\n")
            file.flush()
            if end == "survived":
                print(f"{mutant.file}:{mutant.change}", flush=True)
            if number % 50 == 0:
                print(f"{number} of {len(left)}", flush=True)
    return ended


def prepare() -> None:
    """What every test process would import anew. The tests set their own number of threads."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(PACKAGE.parent))
    os.chdir(ROOT)
    for name in ("beartype", "fairlearn.metrics", "hypothesis.extra.numpy", "scipy.stats", "torch"):
        import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()  # or every process looks through all of this for garbage


def check_faultless(files: list[str], jobs: int) -> None:
    """A mutant without a fault has to live, or the others die of something else."""
    texts = {file: (PACKAGE / file).read_text() for file in files}
    for mutant, ended in outcomes([Mutant(f, t, t) for f, t in texts.items()], jobs):
        if ended != "survived":
            raise SystemExit(f"the tests of {mutant.file} fail without a fault")


def report(found: list[tuple[Mutant, str]]) -> str:
    files = list(dict.fromkeys(m.file for m, _ in found))
    rows = {file: Counter(ended for m, ended in found if m.file == file) for file in files}
    rows["all"] = sum(rows.values(), Counter())
    lines = [
        "# Do the tests notice a fault?",
        "",
        f"The mutants that cosmic-ray {version('cosmic-ray')} makes of `fedgft.metrics` and "
        "`fedgft.theory`, each a module with one small fault, and what the tests of that module "
        "said (`hardening/mutants.py`).",
        "",
        "| module | mutants | killed | out of time | survived | killed, share |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for file, n in rows.items():
        lines.append(
            f"| {file} | {n.total()} | {n['killed']} | {n['timeout']} | {n['survived']} "
            f"| {share(n):.1%} |"
        )
    lines += ["", "## Survivors", "", "| where | was | is |", "|---|---|---|"]
    for mutant, ended in found:
        if ended == "survived":
            line, was, now = mutant.change
            was, now = (text.replace("|", "\\|") for text in (was, now))
            lines.append(f"| {mutant.file}:{line} | `{was}` | `{now}` |")
    return "\n".join(lines) + "\n"


def share(n: Counter[str]) -> float:
    return 1 - n["survived"] / n.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="parts of the names of modules")
    parser.add_argument("--sample", type=int, help="how many mutants to draw at random")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=ROOT / "results/hardening")
    given = parser.parse_args()
    files = [f for f in TESTS if not given.only or any(part in f for part in given.only)]
    mutants = [mutant for file in files for mutant in mutants_of(file)]
    if given.sample is not None:
        mutants = random.Random(0).sample(mutants, min(given.sample, len(mutants)))
    prepare()
    check_faultless(files, given.jobs)
    ended = tried(mutants, given.jobs, given.out / "mutants.jsonl")
    found = [(mutant, ended[mutant.key]) for mutant in mutants]
    total = share(Counter(ended for _, ended in found))
    print(f"{total:.1%} of {len(found)} mutants killed")
    if not given.only and given.sample is None:
        (given.out / "mutants.md").write_text(report(found))
        (given.out / "mutants.jsonl").unlink()
    if total < SHARE:
        raise SystemExit(f"fewer than {SHARE:.0%}")


if __name__ == "__main__":
    main()
