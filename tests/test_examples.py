"""Every example runs, is short, and shows what its docstring announces."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
ELSEWHERE = {"audit_sites.py"}  # test_docs.py compares what it prints with docs/audit.md


def printed(name: str, folder: Path) -> str:
    """What the script prints, run as a reader would run it; files it leaves go to `folder`."""
    command = [sys.executable, str(FOLDER / name)]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout


def figures(text: str, what: str) -> dict[str, float]:
    """{"FedAvg": 0.41, ...} of lines like `FedAvg: accuracy 0.850, gap 0.410`."""
    found = re.findall(rf"^([^:\n]+): .*?\b{what} (\d+\.\d+)", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_it_is_short_and_says_what_one_sees(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    said = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"\byou\s+see\b", said, re.IGNORECASE), "the docstring says what one sees"


def test_all_of_them_are_run_and_listed():
    tests = {name.removeprefix("test_") + ".py" for name in globals() if name.startswith("test_")}
    assert {path.name for path in SCRIPTS} - ELSEWHERE <= tests
    listed = re.findall(r"^\| \[`([^`]+)`\]\(([^)]+)\)", (FOLDER / "README.md").read_text(), re.M)
    assert {name for name, link in listed} == {*(p.name for p in SCRIPTS), "flower/"}
    assert all((FOLDER / link).exists() for _, link in listed)


def test_own_loop(tmp_path):
    text = printed("own_loop.py", tmp_path)
    gap = figures(text, "gap")
    right = figures(text, "accuracy")
    assert gap["lam 0"] > 0.3 and gap["lam 20"] < gap["lam 0"] / 3
    assert right["lam 20"] > right["lam 0"] - 0.1


def test_own_module(tmp_path):
    text = printed("own_module.py", tmp_path)
    gap = figures(text, "gap")
    right = figures(text, "accuracy")
    linear = "linear (fused)"
    own = "residual (stacked)"
    fair = "residual, fair (stacked)"
    assert right[own] > right[linear] + 0.15
    assert gap[own] > 0.15 and gap[fair] < 0.06 and right[fair] > right[own] - 0.05


def test_new_metric(tmp_path):
    text = printed("new_metric.py", tmp_path)
    gap = figures(text, "benefit gap")
    assert gap["an audit of six rows"] == 0.25  # (1 + 1 + 0) / 3 - (0 + 1 + 1/4) / 3
    assert gap["benefit parity"] < 0.03 < 0.05 < gap["statistical parity"] < 0.3 < gap["FedAvg"]
    parity = figures(text, "statistical-parity gap")
    assert parity["statistical parity"] < 0.03 < parity["benefit parity"]  # one is not the other


def test_new_algorithm(tmp_path):
    text = printed("new_algorithm.py", tmp_path)
    worst = figures(text, "of client a")
    gap = figures(text, "gap")
    assert worst["q = 0"] + 0.05 < worst["q = 2"] < worst["q = 8"] - 0.05
    fair = "q = 8, target 0.02"
    assert gap["q = 8"] > 0.2 and gap[fair] < 0.04 and worst[fair] > worst["q = 0"] + 0.05


def test_feddyn(tmp_path):
    gap = figures(printed("feddyn.py", tmp_path), "gap")
    assert gap["FedDyn"] > 0.3 and gap["FedGFT on FedDyn"] < 0.2 < gap["FedAvg"]


def test_sklearn_audit(tmp_path):
    text = printed("sklearn_audit.py", tmp_path)
    gap = figures(text, "gap")
    alone = [gap[f"{site} alone"] for site in ("north", "south", "east")]
    assert max(alone) < 0.06 < 0.2 < gap["all sites"] == gap["pooled rows"]
    assert "Simpson warning: statistical parity by sex" in text


def test_own_csv(tmp_path):
    text = printed("own_csv.py", tmp_path)
    gap = figures(text, "gap")
    right = figures(text, "accuracy")
    assert gap["before"] > 0.2 and gap["after"] < 0.06 and right["after"] > 0.7
    assert "# Model card" in text and "| target | 2.0 points |" in text
