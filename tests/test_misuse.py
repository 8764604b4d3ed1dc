"""The misuse suite (`hardening/misuse.py`) finds no fault, and would find a planted one.

The calls run in a separate process, because the type checks of the tests would refuse many of
them before the library does.
"""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fairlearn import metrics as fairlearn
from sklearn.metrics import accuracy_score, precision_score

sys.path.append(str(Path(__file__).parents[1] / "hardening"))

import misuse_oracle as oracle
from misuse import judged
from misuse_oracle import ANY, Case

from fedgft.errors import FedgftError

pytestmark = pytest.mark.slow

HARDENING = Path(__file__).parents[1] / "hardening"


def test_every_call_gives_the_right_answer_or_one_error_that_says_why(tmp_path):
    command = [sys.executable, "-W", "ignore", str(HARDENING / "misuse.py")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "misuse.md")], capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    calls = re.search(r"^(\d+) calls, 0 fall short", done.stdout, re.MULTILINE)
    assert calls and int(calls[1]) > 4000
    assert "0 fall short" in (tmp_path / "misuse.md").read_text("utf-8")


def between_groups(score):
    def difference(y, d, *, sensitive_features, sample_weight):
        frame = fairlearn.MetricFrame(
            metrics=score,
            y_true=y,
            y_pred=d,
            sensitive_features=sensitive_features,
            sample_params={"sample_weight": sample_weight},
        )
        return frame.difference(method="between_groups")

    return difference


REFERENCES = {
    "sp": fairlearn.demographic_parity_difference,
    "eop": fairlearn.equal_opportunity_difference,
    "eo": fairlearn.equalized_odds_difference,
    "fpr": between_groups(fairlearn.false_positive_rate),
    "predictive-parity": between_groups(precision_score),
    "acc": between_groups(accuracy_score),
}


@pytest.mark.parametrize("metric", oracle.METRICS)
@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_agrees_with_fairlearn(metric, seed):
    rng = np.random.default_rng(seed)
    y, d = rng.integers(2, size=(2, 300))
    group = rng.choice(list("abc"), 300)
    weight = rng.uniform(0.1, 2, 300)
    found = oracle.gap(metric, y, d, group, weight)
    expected = REFERENCES[metric](y, d, sensitive_features=group, sample_weight=weight)
    assert found == pytest.approx(expected, abs=1e-12)
    assert found > 1e-3


def raising(error):
    def call():
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "answer", "strict", "fault"),
    [
        (lambda: 0.5, 0.5, True, ""),
        (lambda: 0.4, 0.5, True, "a wrong answer"),
        (lambda: 0.5, None, False, "accepted"),
        (lambda: float("nan"), 0.5, False, "a wrong answer"),
        (raising(FedgftError("y_pred is wrong")), None, False, ""),
        (raising(FedgftError("y_pred is wrong")), 0.5, True, "refused"),
        (raising(FedgftError("something is wrong")), None, False, "does not name y_pred"),
        (raising(FedgftError("y_pred\nis wrong")), None, False, "not one line"),
        (raising(ValueError("y_pred is wrong")), None, False, "a raw ValueError"),
        (raising(RuntimeError("y_pred")), ANY, False, "a raw RuntimeError"),
        (raising(TypeError("unexpected keyword argument 'y_pred'")), None, False, ""),
    ],
)
def test_a_planted_fault_is_found(call, answer, strict, fault):
    outcome = judged(Case("f", "y_pred", "x", "type", call, answer, strict=strict))
    assert outcome.fault.startswith(fault)
    assert bool(outcome.fault) == bool(fault)
