"""Every example runs, is short, and shows what its docstring announces."""

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
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
    assert gap["FedAvg"] > 0.4 and gap["FedGFT"] < 0.04
    assert right["FedGFT"] > right["FedAvg"] - 0.1


def check_reached(text):
    gap = figures(text, "gap")
    right = figures(text, "accuracy")
    assert gap["without"] > 0.1 and gap["with"] < 0.03
    assert right["with"] > right["without"] - 0.03


def test_lightning_loop(tmp_path):
    """Lightning is not in the extra `test`: it brings 10 packages for this one test."""
    pytest.importorskip("lightning", reason="needs: pip install lightning")
    check_reached(printed("lightning_loop.py", tmp_path))


TRAINER = '''
import types
import torch


class TrainerCallback:
    """Base class of callbacks."""


def TrainingArguments(folder, **options):
    return types.SimpleNamespace(**options)


def set_seed(seed):
    torch.manual_seed(seed)


class Trainer:
    """What the example uses of the Trainer, in a plain loop."""

    def __init__(self, model, args, train_dataset):
        self.model, self.args, self.rows, self.callbacks = model, args, train_dataset, []

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def train(self):
        args = self.args
        size = args.per_device_train_batch_size
        batches = torch.utils.data.DataLoader(self.rows, batch_size=size, shuffle=True)
        optimizer = torch.optim.AdamW(self.model.parameters(), args.learning_rate, weight_decay=0)
        steps = args.num_train_epochs * len(batches)
        assert args.lr_scheduler_type == "cosine"
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(args.num_train_epochs):
            for callback in self.callbacks:
                given = {"model": self.model, "train_dataloader": batches, "optimizer": optimizer}
                callback.on_epoch_begin(args, None, None, **given)
            for inputs in batches:
                optimizer.zero_grad()
                self.compute_loss(self.model, inputs, num_items_in_batch=len(inputs)).backward()
                optimizer.step()
                schedule.step()
'''


def test_transformers_loop(tmp_path, monkeypatch):
    """With a stand-in of `transformers` where it is missing (it is too large for this test)."""
    if not find_spec("transformers") or not find_spec("accelerate"):
        (tmp_path / "transformers.py").write_text(TRAINER)
        path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    check_reached(printed("transformers_loop.py", tmp_path))


def test_xgboost_objective(tmp_path):
    text = printed("xgboost_objective.py", tmp_path)
    gap = figures(text, "gap")
    right = figures(text, "accuracy")
    for library in ("XGBoost", "LightGBM"):
        plain, fair = f"{library}, plain", f"{library}, unseen rows"
        assert gap[plain] > 0.12 > 0.05 > gap[fair] and right[fair] > right[plain] - 0.03
    assert gap["XGBoost, unseen rows"] + 0.03 < gap["XGBoost, own rows"] < gap["XGBoost, plain"]


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


def test_adjust_sklearn(tmp_path):
    text = printed("adjust_sklearn.py", tmp_path)
    gap = figures(text, "gap")
    right = figures(text, "accuracy")
    assert gap["before"] > 0.06 > 0.03 > gap["after"] and right["after"] > right["before"] - 0.01
    assert "threshold by group: man from" in text


def test_adjust_xgboost(tmp_path):
    pytest.importorskip("xgboost", reason="needs: pip install 'fedgft[xgboost]'")
    text = printed("adjust_xgboost.py", tmp_path)
    gap = figures(text, "gap")
    bank = figures(text, "bank")
    right = figures(text, "accuracy")
    assert gap["before"] > 0.06 > 0.03 > gap["overall target"] and gap["both targets"] < 0.04
    assert bank["before"] < 0.03 < 0.06 < bank["overall target"] and bank["both targets"] < 0.04
    assert right["both targets"] > right["before"] - 0.015


def test_adjust_torch(tmp_path):
    pytest.importorskip("torch", reason="needs: pip install 'fedgft[torch]'")
    text = printed("adjust_torch.py", tmp_path)
    gap = figures(text, "gap")
    right = figures(text, "accuracy")
    assert gap["before"] > 0.04 > 0.02 > gap["after"] and right["after"] > right["before"] - 0.01
    assert "randomized thresholds by group" in text


@pytest.mark.parametrize("path", sorted(FOLDER.glob("adjust_*.py")), ids=lambda path: path.name)
def test_a_finished_model_is_adjusted_in_forty_lines(path):
    assert len(path.read_text().splitlines()) <= 40


def test_sklearn_audit(tmp_path):
    text = printed("sklearn_audit.py", tmp_path)
    gap = figures(text, "gap")
    alone = [gap[f"{site} alone"] for site in ("north", "south", "east")]
    assert max(alone) < 0.06 < 0.2 < gap["all sites"] == gap["pooled rows"]
    assert "Local and overall gaps differ by sex" in text


def test_bench_sklearn(tmp_path, compas):
    """The gap of a model that nothing makes fair is large; the score is that of the file."""
    text = printed("bench_sklearn.py", tmp_path)
    gap = figures(text, "gap")
    right = figures(text, "accuracy")
    assert set(gap) == {"sp", "eop", "eo"} and min(gap.values()) > 0.1
    assert 0.62 < right["sp"] < 0.72
    assert (tmp_path / "submission.csv").read_text().startswith("track,version,seed,row,score\n")


def test_bench_flower(tmp_path, compas):
    pytest.importorskip("flwr", reason="needs: pip install 'fedgft[flower]'")
    text = printed("bench_flower.py", tmp_path)
    pooled = printed("bench_sklearn.py", tmp_path)
    for what in ("gap", "accuracy"):
        found, expected = figures(text, what), figures(pooled, what)
        assert found == pytest.approx(expected, abs=0.02)


def test_own_csv(tmp_path):
    text = printed("own_csv.py", tmp_path)
    gap = figures(text, "gap")
    right = figures(text, "accuracy")
    assert gap["before"] > 0.2 and gap["after"] < 0.06 and right["after"] > 0.7
    assert "# Model card" in text and "| target | 2.0 points |" in text
