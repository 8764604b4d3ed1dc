"""Without an optional package, a command prints one line with the `pip install` command."""

import subprocess
import sys

import pytest

BLOCKED = """
import sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder)
from fedgft.cli import main
main(sys.argv[2:])
"""


def run_without(package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, package, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "local --sites 2",
        "server federation",
        "gate federation",
        "site north --server localhost:9093",
    ],
)
def test_deploy_names_the_command_that_installs_flower(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_without("flwr", "deploy", *command.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "pip install 'fedgft[flower]'" in done.stderr


def test_keys_need_cryptography(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_without("cryptography", "deploy", "keys", "north")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install 'fedgft[flower]'" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["deploy --help", "deploy local --help", "completion bash"])
def test_help_and_completion_need_no_extra(command):
    done = run_without("flwr", *command.split())
    assert (done.returncode, done.stderr) == (0, "") and "local" in done.stdout


ARRAYS_ONLY = """
import sys
for name in ("polars", "narwhals", "scipy", "matplotlib", "cyclopts", "platformdirs", "jinja2"):
    sys.modules[name] = None  # an import of it fails
import numpy as np
import fedgft
generator = np.random.default_rng(0)
groups = generator.integers(0, 2, 200)
features = generator.normal(size=(200, 2)) + groups[:, None]
labels = (features.sum(1) > 1).astype(np.int64)
data = fedgft.Dataset("arrays", features, labels, groups, ("x", "y"), ("no", "yes"), ("f", "m"))
made = fedgft.standardize(fedgft.partition(data, "iid", clients=2, seed=0))
method = fedgft.algorithms.fedgft("sp", 1.0)
history = fedgft.simulate([made], "logistic", method, fedgft.Settings(rounds=2), seeds=[0], lr=0.1)
assert np.isfinite(history.params).all()
"""


def test_training_on_arrays_needs_no_package_that_reads_tables():
    done = subprocess.run([sys.executable, "-c", ARRAYS_ONLY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
