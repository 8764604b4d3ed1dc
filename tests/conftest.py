"""Settings of the whole test suite; no test needs to know them."""

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest
from hypothesis import settings

# The workers of pytest-xdist share the cores. Torch reads this when a test first imports it;
# most tests never do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Started in the background (nohup, `make test &` in a script) Python ignores SIGINT, and so would
# every process that the tests interrupt on purpose.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What sites remember goes to a folder of this run of the tests, not to the user's own.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fedgft-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# The same examples on every machine, and no failure because a machine is slow.
settings.register_profile("fedgft", deadline=None, derandomize=True)
settings.load_profile("fedgft")


class CompiledModules:
    """Finds the modules that hold `@jit` functions before jaxtyping's import hook does.

    The hook wraps every function to check its shapes, and numba cannot compile the wrapper.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        if not name.startswith("fedgft."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        compiled = spec and spec.origin and b"\n@jit" in Path(spec.origin).read_bytes()
        return spec if compiled else None


sys.meta_path.insert(0, CompiledModules)


def pytest_collection_finish() -> None:
    """What is imported now stays: nobody need look through it for garbage. Flower looks for some
    whenever it converts parameters, a quarter of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def flower_may_log():
    """Setting up a database of Flower's turns off the loggers that are there already."""
    logging.disable(logging.NOTSET)
    logging.getLogger("flwr").disabled = False


@pytest.fixture(scope="session")
def compas():
    """The real data set; without it a test is skipped, and says so."""
    from fedgft.data import load
    from fedgft.errors import FedgftError

    try:
        return load("compas")
    except FedgftError as error:
        pytest.skip(f"COMPAS cannot be had: {error}")
