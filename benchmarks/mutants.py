"""Do the tests notice a fault? Mutants of `fedgft.metrics` and `fedgft.theory`.

    python benchmarks/mutants.py                          # all of them, into results/mutants.md
    python benchmarks/mutants.py --only tally.py --jobs 1

Each mutant (`mutators.py`) is a module with one small fault, and the tests run on it until one
fails. Those that live on are listed with the reason why no test could tell them from the original
(`mutants.toml`), or as not looked into. The command fails if fewer than 90% are killed.

mutmut, which is fast, changes nothing in properties, cached functions and at module level: half of
what is here. cosmic-ray starts a process for each of its 3,157 mutants, which takes a night. So one
process imports what the tests need, fedgft excepted, and forks for each mutant.
"""

import argparse
import ast
import contextlib
import gc
import os
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mutators import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fedgft"
# The tests that know a module best come first: the first failure ends the run.
TESTS = {
    "metrics/catalog.py": ("functions", "metrics", "combined"),
    "metrics/functions.py": ("functions",),
    "metrics/intervals.py": ("intervals",),
    "metrics/metric.py": ("metrics", "combined", "functions", "theory"),
    "metrics/spread.py": ("combined",),
    "metrics/tally.py": ("metrics", "theory"),
    "theory/analysis.py": ("theory",),
    "theory/examples.py": ("theory",),
}
LIMIT = 120  # seconds of processor time, many times what the tests take
SHARE = 0.9


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
    read, target = SourceFileLoader.get_data, str(PACKAGE / mutant.file)
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
    waiting, running = list(reversed(mutants)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[fork(mutant)] = mutant
        process, status = os.wait()
        ended = "timeout" if os.WIFSIGNALED(status) else "killed" if status else "survived"
        yield running.pop(process), ended


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
    same = [Mutant(f, 0, "", "", "", ast.unparse(ast.parse((PACKAGE / f).read_text())))
            for f in files]  # fmt: skip
    for mutant, ended in outcomes(same, jobs):
        if ended != "survived":
            raise SystemExit(f"the tests of {mutant.file} fail without a fault")


def reasons() -> dict[tuple[str, ...], str]:
    """Why a survivor is no fault, by `Mutant.key`."""
    text = (ROOT / "benchmarks" / "mutants.toml").read_text()
    return {
        (same["file"], same["scope"], same["was"], now): same["reason"]
        for same in tomllib.loads(text)["equivalent"]
        for now in same["now"]
    }


def report(found: list[tuple[Mutant, str]]) -> str:
    known, files = reasons(), list(dict.fromkeys(m.file for m, _ in found))
    rows = {file: Counter(ended for m, ended in found if m.file == file) for file in files}
    rows["all"] = sum(rows.values(), Counter())
    lines = [
        "# Do the tests notice a fault?", "",
        "`make mutants` plants one small fault at a time in `fedgft.metrics` and `fedgft.theory` "
        "and runs the tests of that module (`benchmarks/mutants.py`).", "",
        "| module | mutants | killed | out of time | survived | killed, share |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for file, n in rows.items():
        lines.append(f"| {file} | {n.total()} | {n['killed']} | {n['timeout']} | {n['survived']} "
                     f"| {share(n):.1%} |")  # fmt: skip
    lines += ["", "## Survivors", ""]
    for mutant, ended in found:
        if ended == "survived":
            why = known.get(mutant.key, "NOT LOOKED INTO")
            where = f"{mutant.file}:{mutant.line} {mutant.scope}".strip()
            lines += [f"- {where}: {why}", "", "  ```python", f"  {mutant.was}",
                      f"  {mutant.now}", "  ```", ""]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def share(n: Counter[str]) -> float:
    return 1 - n["survived"] / n.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="parts of the names of modules")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    given = parser.parse_args()
    files = [f for f in TESTS if not given.only or any(part in f for part in given.only)]
    mutants = [m for f in files for m in mutants_of(f, (PACKAGE / f).read_text())]
    prepare()
    check_faultless(files, given.jobs)
    found = []
    for number, (mutant, ended) in enumerate(outcomes(mutants, given.jobs), 1):
        found.append((mutant, ended))
        if ended == "survived":
            print(f"{mutant.file}:{mutant.line} {mutant.was}  ->  {mutant.now}", flush=True)
        if number % 50 == 0:
            print(f"{number} of {len(mutants)}", flush=True)
    order = {mutant.source: number for number, mutant in enumerate(mutants)}
    found.sort(key=lambda pair: order[pair[0].source])
    total = share(Counter(ended for _, ended in found))
    print(f"{total:.1%} of {len(found)} mutants killed")
    if not given.only:
        (given.out / "mutants.md").write_text(report(found))
    if total < SHARE:
        raise SystemExit(f"fewer than {SHARE:.0%}")


if __name__ == "__main__":
    main()
