"""Ctrl-C during the start of a command gives exit code 130 and one line.

The same holds later (test_cli_failures.py); after the end of a command, Ctrl-C has no effect.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fedgft.cli import main

sys.path.append(str(Path(__file__).parents[1] / "hardening"))

from interrupts import OUTCOMES, outcome

INTERRUPTED = """
import signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name != sys.argv[1]:
            return
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if len(sys.argv) > 2:  # as code in C does it
                raise ValueError("Invalid bounding box") from None
            raise

sys.meta_path.insert(0, Finder)
from fedgft.cli import main
main(["compare", "--data", "synthetic", "--rounds", "1", "--seeds", "1"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["cyclopts", "fedgft.cli.study_session", "numba"])
def test_an_interrupt_while_modules_are_imported(module):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 130
    assert done.stdout == "" and "interrupted" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_interrupt_that_a_library_made_another_error_of():
    command = [sys.executable, "-c", INTERRUPTED, "numba", "swallowed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert "interrupted" in done.stderr and done.stderr.count("\n") == 1


LATE = """
import atexit, signal
from fedgft.cli import main
atexit.register(signal.raise_signal, signal.SIGINT)
main(["data", "list", "--json"])
"""


@pytest.mark.slow
def test_an_interrupt_when_all_is_done():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "adult" in done.stdout


def test_a_thread_may_call_it(capsys):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(main, ["data", "list", "--json"]).result()
    assert "adult" in capsys.readouterr().out


def test_nothing_is_imported_before_an_interrupt_is_expected():
    code = "import sys; from fedgft.cli import main; print([m for m in sys.modules if '.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fedgft.cli" in done.stdout and "fedgft.cli." not in done.stdout
    assert "cyclopts" not in done.stdout and "rich" not in done.stdout


ONE_LINE = "fedgft: interrupted; nothing was left half-written\n"


@pytest.mark.parametrize(
    ("code", "said", "left", "found"),
    [
        (0, "", {"a.md": "all"}, "it was over"),
        (0, "", {}, "anything else"),  # it says that all is done, and nothing is
        (0, "", {"a.md": "al"}, "anything else"),
        (130, ONE_LINE, {}, "one line, exit code 130"),
        (130, ONE_LINE, {"a.md": "all"}, "one line, exit code 130"),
        (130, ONE_LINE, {"a.md": "al"}, "anything else"),  # half-written
        (130, ONE_LINE, {".a.md.part": "al"}, "anything else"),
        (130, ONE_LINE * 2, {}, "anything else"),
        (-2, "", {}, "before our first line"),
        (-2, "", {"a.md": "all"}, "anything else"),
        (1, "Traceback: KeyboardInterrupt\n", {}, "before our first line"),
    ],
)
def test_classification_of_exits_by_the_interrupt_script(tmp_path, code, said, left, found):
    """`hardening/interrupts.py`, whose runs take too long for here."""
    for name, text in left.items():
        (tmp_path / name).write_text(text)
    assert found in OUTCOMES and outcome(code, said, tmp_path, {"a.md": b"all"}) == found
