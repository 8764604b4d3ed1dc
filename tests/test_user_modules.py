"""Modules of users train as they would in a plain loop."""

import copy
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedgft.algorithms import fedavg, fedgft
from fedgft.data.dataset import Dataset, Federation
from fedgft.engine import predict_proba
from fedgft.engine.executors import stacked
from fedgft.metrics import CATALOG
from fedgft.models import MLP, Module, get_model
from fedgft.optimizers import Optimizer
from paper_formulas import Method
from reference_training import Plan, federate
from small_federation import clients, federation, reordered, run

EXACT = {"rtol": 0, "atol": 1e-12}  # sums in another order
SP = CATALOG["sp"]
FAIR = Method("fedgft", "sp", 5.0)
# A bias before BatchNorm has the gradient zero; Adam would make steps of its rounding errors.
MOMENTUM = Optimizer("momentum")
PLAN = Plan(batch_size=9, optimizer=lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9))


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 2),
    )


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 2))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Linear(9, 2))


class Hidden(nn.Module):
    """Randomness that no layer shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(nn.functional.dropout(x, 0.3, self.training))


class Branching(Hidden):
    """Control flow that depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


def plain_start(make, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().double()


@pytest.mark.slow
@pytest.mark.parametrize("make", [batch_norm, dropout, convolution, Hidden, Branching])
@pytest.mark.parametrize("options", [{}, {"batches": "fixed", "epochs": 2}], ids=["fresh", "fixed"])
def test_sequential_is_chosen_and_equals_the_plain_loop(make, options: dict) -> None:
    made = reordered(federation(), [0, 2, 3, 5])  # no batch of one row at this batch size
    plan = replace(PLAN, fixed=bool(options), epochs=options.get("epochs", 1))
    torch.manual_seed(77)
    state = torch.get_rng_state()
    found = run(made, fedgft(SP, 5.0), model=make, batch_size=9, optimizer=MOMENTUM, **options)
    assert torch.equal(state, torch.get_rng_state())  # nobody's random numbers are touched
    assert found.executor == "sequential"
    expected = federate(clients(made), plain_start(make), FAIR, plan)
    np.testing.assert_allclose(found.params[0], expected, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("make", [batch_norm, dropout, Hidden])
def test_threads_do_not_change_a_bit(make) -> None:
    found = [run(federation(), fedavg(), model=make, threads=t).params for t in (1, 2, 3)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_runs_of_one_module_have_their_own_dropout() -> None:
    init = Module(dropout).init(0, features=4, classes=2)
    one, two = (
        run(federation(), fedavg(), model=dropout, init=init, batch_size=64, seed=s).params
        for s in (0, 1)
    )
    assert np.abs(one - two).max() > 1e-6  # one batch a client: only dropout differs


def test_a_batch_of_one_row_is_passed_over_by_batch_norm() -> None:
    """Client 4 has one row, client 1 a last batch of one row: torch refuses both."""
    made = federation()
    found = run(made, fedavg(), model=batch_norm)
    assert np.isfinite(found.params).all()
    alone = reordered(made, [4])
    start = Module(batch_norm).init(0, features=4, classes=2)
    np.testing.assert_array_equal(run(alone, fedavg(), model=batch_norm).params[0], start)


def test_frozen_parameters_stay() -> None:
    def make() -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        made[0].requires_grad_(False)
        return made

    model = Module(make)
    assert list(model.shapes(features=4, classes=2)) == ["2.weight", "2.bias", "0.weight", "0.bias"]
    start = model.init(0, features=4, classes=2)
    found = run(federation(), fedavg(), model=make, optimizer=Optimizer("adamw", 0.1))
    assert found.executor == "sequential"
    np.testing.assert_array_equal(found.params[0, 14:], start[14:])
    assert (found.params[0, :14] != start[:14]).all()


def test_the_users_module_is_left_alone() -> None:
    """It starts all runs from its parameters, and stays what it was: type, mode and values."""
    mine = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    before = copy.deepcopy(mine.state_dict())
    found = run(federation(), fedavg(), model=mine)
    assert mine.training and mine[0].weight.dtype == torch.float32
    assert all(torch.equal(before[name], value) for name, value in mine.state_dict().items())
    start = torch.cat([p.flatten() for p in mine.parameters()]).detach().numpy()
    assert np.abs(found.params[0, : len(start)] - start).max() > 1e-3
    assert get_model(Hidden).make is Hidden  # pyrefly: ignore


def test_images_and_channels_last() -> None:
    rng = np.random.default_rng(0)
    labels, groups = rng.integers(2, size=(2, 60))
    x = rng.standard_normal((60, 3, 6, 6)) + 0.5 * labels[:, None, None, None]
    data = Dataset("images", x, labels, groups, ())
    rows = np.arange(60, dtype=np.int32)
    made = Federation(data, rows[:45], np.array([0, 17, 45]), rows[45:])

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
        )

    found = run(made, fedgft(SP, 5.0), model=make, batch_size=9, optimizer=MOMENTUM)
    expected = federate(clients(made), plain_start(make), FAIR, PLAN)
    np.testing.assert_allclose(found.params[0], expected, **EXACT)


SCRIPT = """
import os, signal, sys
if sys.argv[1] == "no-numba":
    sys.modules["numba"] = None
import numpy as np
from fedgft.data.partition import partition
from fedgft.data.generated import synthetic
from fedgft.engine import Settings, simulate
from fedgft.algorithms import fedgft
from fedgft.metrics import CATALOG
made = partition(synthetic(rows=900, features=3), clients=4)
def train():
    settings = Settings(rounds=2, batch_size=32, precision="fp64")
    return simulate([made], "logistic", fedgft(CATALOG["sp"]), settings, seeds=[0])
result = train()
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        result = train()
    else:
        os._exit(os.waitpid(child, 0)[1])
assert "torch" not in sys.modules
print(result.executor, *result.params[0].tolist(), flush=True)
"""


@pytest.mark.slow
def test_without_numba_and_after_a_fork() -> None:
    """The same numbers without numba, without torch, and in a process that was forked."""

    def told(how: str) -> list[str]:
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, how]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    base = told("plain")
    bare = told("no-numba")
    assert base[0] == bare[0] == "fused"
    np.testing.assert_allclose(np.float64(bare[1:]), np.float64(base[1:]), rtol=0, atol=1e-10)
    if hasattr(os, "fork"):
        assert told("fork") == base


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # any import of it fails
if sys.argv[1] == "no-numba":
    sys.modules["numba"] = None
import numpy as np
import fedgft
from fedgft.engine import predict_proba
from fedgft.errors import FedgftError
made = fedgft.standardize(fedgft.partition(fedgft.data.synthetic(rows=900, features=3), clients=4))
settings = fedgft.Settings(rounds=3, batch_size=32)
a = fedgft.algorithms
for method in (a.fedgft_control("sp", 0.05), a.with_base(a.fedavg(), "scaffold")):
    history = fedgft.simulate([made], "logistic", method, settings, seeds=[0])
    assert history.executor == "fused" and np.isfinite(history.test[-1].accuracy()).all()
probs = predict_proba(made, "logistic", history.params[0], made.test)
assert probs.shape == (len(made.test), 2) and np.allclose(probs.sum(1), 1)
for model in ("mlp", "resnet18"):
    try:
        fedgft.simulate([made], model, fedgft.algorithms.fedavg(), settings, seeds=[0])
    except FedgftError as error:
        print(error.kind, str(error).count("\\n"), error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "no-numba"])
def test_linear_models_need_no_torch(how: str) -> None:
    """They are trained, measured and used without it; a network is refused in one line."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_TORCH, how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("extra 0 ") and line.endswith("pip install 'fedgft[torch]'")


@pytest.mark.slow
def test_programs_of_a_callers_module_are_captured_once_and_go_with_the_simulation() -> None:
    """He may change it before the next one, so nothing of it is kept."""
    mine = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    before = stacked.capture_gradient.cache_info().currsize
    seen = []
    capture = stacked.make_fx
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacked, "make_fx", lambda one: seen.append(one) or capture(one))
        for rounds in (1, 5):
            assert run(federation(), fedavg(), model=mine, rounds=rounds).executor == "stacked"
            seen.append(None)
    assert seen.index(None) == (len(seen) - 2) // 2 > 0  # as often in five rounds as in one
    assert stacked.capture_gradient.cache_info().currsize == before


def test_scores_of_rows_build_the_network_once_and_draw_no_numbers(monkeypatch) -> None:
    made = federation()
    built = []

    class Counted(MLP):
        def module(self, **size: int) -> nn.Module:
            built.append(size)
            return super().module(**size)

    params = MLP().init(0, features=4, classes=2)
    whole = predict_proba(made, MLP(), params, made.rows)
    state = torch.get_rng_state()
    monkeypatch.setattr(sys.modules["fedgft.engine.simulate"], "MAX_PREDICTED", 40)
    np.testing.assert_allclose(predict_proba(made, Counted(), params, made.rows), whole, **EXACT)
    assert len(built) == 1 and len(made.rows) > 10
    assert torch.equal(torch.get_rng_state(), state)
