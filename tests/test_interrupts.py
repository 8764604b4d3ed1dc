"""Ctrl-C while a command starts: exit code 130 and one line, as later (test_cli_mishaps.py)."""

import subprocess
import sys

import pytest

INTERRUPTED = """
import signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder)
from fedgft.cli import main
main(["compare", "--data", "synthetic", "--rounds", "1", "--seeds", "1"])
"""


@pytest.mark.parametrize("module", ["cyclopts", "fedgft.cli.train", "numba"])
def test_an_interrupt_while_modules_are_imported(module):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    assert done.returncode == 130
    assert done.stdout == "" and "interrupted" in done.stderr and done.stderr.count("\n") == 1


def test_nothing_is_imported_before_an_interrupt_is_expected():
    code = "import sys; from fedgft.cli import main; print([m for m in sys.modules if '.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fedgft.cli" in done.stdout and "fedgft.cli." not in done.stdout
    assert "cyclopts" not in done.stdout and "rich" not in done.stdout
