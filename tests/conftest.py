"""Settings of the test suite."""

import atexit
import gc
import logging
import os
import re
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

# Containers often set this. Every process that the tests start would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Python ignores SIGINT if it is started in the background (nohup, `make test &` in a script). The
# processes that the tests interrupt on purpose would inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Sites store their state in a temporary folder, not in the user's folder.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fedgft-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Hypothesis uses the same examples on every machine, and slow machines do not fail.
settings.register_profile("fedgft", deadline=None, derandomize=True)
settings.load_profile("fedgft")


UNCHECKED = ("fedgft.fair_classifier", "fedgft.classifier_input")


class UncheckedModules:
    """Finds some modules before jaxtyping's import hook does, which would check all arguments.

    These are the modules that hold `@jit` or `@exact_jit` functions, because numba cannot compile
    the wrapper of the hook, and those of `FairClassifier`, because scikit-learn's checks pass any
    arguments.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        if not name.startswith("fedgft."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        decorated = re.compile(rb"\n@(exact_)?jit\b")
        compiled = spec and spec.origin and decorated.search(Path(spec.origin).read_bytes())
        return spec if compiled or name in UNCHECKED else None


sys.meta_path.insert(0, UncheckedModules)


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection.

    Flower collects garbage whenever it converts parameters, which would take 0.25 s each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def flower_may_log():
    """Enable logging again: Flower turns off existing loggers when it sets up its database."""
    logging.disable(logging.NOTSET)
    logging.getLogger("flwr").disabled = False


@pytest.fixture(scope="session")
def compas():
    """The real data set; tests are skipped if it cannot be downloaded."""
    from fedgft.data import load
    from fedgft.errors import FedgftError

    try:
        return load("compas")
    except FedgftError as error:
        pytest.skip(f"COMPAS is not available: {error}")
