"""Executors agree with torch.optim and with each other."""

import numpy as np
import pytest
import torch
from torch import nn

from fedgft.algorithms import Algorithm, Proximal, fairfed, fedavg, fedgft, lft, lrw
from fedgft.data.dataset import Federation, standardize
from fedgft.engine import Settings, simulate
from fedgft.engine.executors import fused, numba_kernels, numpy_kernels
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.models import MLP
from fedgft.optimizers import Optimizer
from paper_formulas import Method
from reference_training import Plan, federate
from small_federation import EXECUTORS, clients, federation, module, run, several

PLAIN = {"rtol": 0, "atol": 1e-10}  # Adam divides by the root of a gradient that may be tiny
SP = CATALOG["sp"]
SMALL = MLP((5, 3))
optim = torch.optim

every_executor = pytest.mark.parametrize("executor", EXECUTORS)

# Ours, what it is called in torch.optim, and whether the one-logit kernel is exact for it.
OPTIMIZERS = {
    "sgd": (Optimizer("sgd"), optim.SGD, {}, True),
    "sgd decay": (Optimizer("sgd", 0.1), optim.SGD, {"weight_decay": 0.1}, True),
    "momentum": (Optimizer("momentum"), optim.SGD, {"momentum": 0.9}, True),
    "momentum decay": (
        Optimizer("momentum", 0.1),
        optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1},
        False,
    ),
    "adam": (Optimizer("adam"), optim.Adam, {}, True),
    "adam decay": (Optimizer("adam", 0.1), optim.Adam, {"weight_decay": 0.1}, False),
    "adam betas": (
        Optimizer("adam", first=0.8, second=0.95, epsilon=1e-3),
        optim.Adam,
        {"betas": (0.8, 0.95), "eps": 1e-3},
        True,
    ),
    "adamw": (Optimizer("adamw", 0.1), optim.AdamW, {"weight_decay": 0.1}, True),
}


@pytest.mark.slow
@every_executor
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_those_of_torch(name: str, executor: str) -> None:
    ours, theirs, options, exact = OPTIMIZERS[name]
    if executor == "fused" and not exact:
        with pytest.raises(FedgftError, match="weight decay"):
            run(federation(), fedavg(), executor="fused", optimizer=ours)
        return
    plan = Plan(optimizer=lambda params, lr: theirs(params, lr=lr, **options), state="keep")
    made = federation()
    expected = federate(clients(made), module(made), Method("fedgft", "sp", 5.0), plan)
    found = run(made, fedgft(SP, 5.0), executor=executor, optimizer=ours, state="keep")
    np.testing.assert_allclose(found.params[0], expected, **PLAIN)


@pytest.mark.parametrize(("precision", "error"), [("fp64", 1e-12), ("fp32", 1e-6)])
def test_one_epoch_of_the_kernel_is_torch_adam(precision: str, error: float) -> None:
    made = federation([(400, (0, 1), (0, 1))], features=30)
    expected = federate(clients(made), module(made), Method(), Plan(rates=(0.002,), batch_size=16))
    options = {"rounds": 1, "lr": 0.002, "batch_size": 16, "precision": precision}
    found = run(made, fedavg(), executor="fused", **options)
    np.testing.assert_allclose(found.params[0], expected, rtol=0, atol=error)


METHODS = {
    "fedavg": fedavg(),
    "lrw": lrw(),
    "lft": lft(SP, 3.0),
    "fairfed": fairfed(SP, 0.7, rule="exp"),
    "fedgft": fedgft(CATALOG["eo"], 5.0),
    "calibration": fedgft(CATALOG["predictive-parity"], 5.0),
    "fedprox": Algorithm(correction=Proximal(0.3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["momentum", "adamw"])
@pytest.mark.parametrize("method", METHODS)
def test_numba_is_numpy_is_stacked_is_sequential(method: str, rule, monkeypatch) -> None:
    made = standardize(federation())
    options = {"optimizer": Optimizer(rule), "epochs": 2}
    found = [run(made, METHODS[method], executor=name, **options) for name in EXECUTORS]
    monkeypatch.setattr(fused, "kernels", numpy_kernels)
    found.append(run(made, METHODS[method], executor="fused", **options))
    assert [f.executor for f in found] == [*EXECUTORS, "fused"]
    for other in found[1:]:
        np.testing.assert_allclose(other.params, found[0].params, **PLAIN)
        np.testing.assert_allclose(other.test.score, found[0].test.score, **PLAIN)
        np.testing.assert_array_equal(other.test.decision, found[0].test.decision)
        np.testing.assert_array_equal(other.federation.count, found[0].federation.count)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_mlp_stacked_is_sequential(method: str) -> None:
    made = standardize(federation())
    auto, slow = (
        run(made, METHODS[method], model=SMALL, executor=e) for e in ("auto", "sequential")
    )
    assert auto.executor == "stacked" and slow.executor == "sequential"
    np.testing.assert_allclose(auto.params, slow.params, **PLAIN)


def test_mlp_equals_the_plain_loop() -> None:
    made = federation()
    expected = federate(clients(made), module(made, SMALL), Method("fedgft", "eop", 5.0))
    found = run(made, fedgft(CATALOG["eop"], 5.0), model=SMALL)
    np.testing.assert_allclose(found.params[0], expected, **PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["logistic", SMALL], ids=["logistic", "mlp"])
@pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG)
def test_three_classes_are_stacked(metric, model) -> None:
    made = several(groups=3, classes=3)
    auto, slow = (
        run(made, fedgft(metric, 5.0), model=model, executor=e) for e in ("auto", "sequential")
    )
    assert auto.executor == "stacked" and slow.executor == "sequential"
    np.testing.assert_allclose(auto.params, slow.params, **PLAIN)
    with pytest.raises(FedgftError, match="3 classes, not two"):
        run(made, fedavg(), executor="fused")


@pytest.mark.slow
@every_executor
@pytest.mark.parametrize("clients", [5, 45])
def test_threads_do_not_change_a_bit(executor: str, clients: int) -> None:
    """45 clients are three groups of the stacked executor."""
    made = federation([(4 + k % 13, (0, 1), (0, 1)) for k in range(clients)])
    found = [run(made, fedgft(SP, 5.0), executor=executor, threads=t).params for t in (1, 2, 3)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_the_kernel_is_compiled_once() -> None:
    """Layouts, read-only data, ints for floats: each would be a signature, and seconds, more."""
    run(federation(), fedavg())
    before = len(numba_kernels.train.signatures), len(numba_kernels.measure.signatures)
    made = standardize(federation())
    made.dataset.features.flags.writeable = False
    run(made, Algorithm(correction=Proximal(1)), cohort=3, epochs=2, batches="fixed", state="keep")
    run(
        made, fairfed(SP, 1, rule="exp"), sampling="size", cohort=2, optimizer=Optimizer("adamw", 1)
    )
    run(made, lft(SP, 3), optimizer=Optimizer("momentum", first=0), eval_on="test", start="own")
    assert (len(numba_kernels.train.signatures), len(numba_kernels.measure.signatures)) == before


WRONG = [
    ("fused", {"model": SMALL}, "'mlp' is not one linear layer"),
    ("fused", {"device": "cuda"}, "not on cuda"),
    ("fused", {"optimizer": Optimizer("adam", 0.1)}, "weight decay inside the gradient of adam"),
    ("stacked", {"model": lambda: nn.Sequential(nn.Dropout(), nn.Linear(4, 2))}, "dropout"),
    ("stacked", {"model": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))}, "BatchNorm"),
    ("auto", {"model": lambda: nn.Linear(7, 2)}, "does not take rows of shape"),
    ("auto", {"model": lambda: nn.Linear(4, 1)}, "one score per class"),
    ("auto", {"model": "resnet"}, "'resnet' is not known"),
    ("auto", {"init": np.zeros(11)}, "10 parameters"),
    ("auto", {"cohort": 7}, "between 1 and the 6 clients"),
    ("auto", {"seed": -1}, "seeds must be at least 0"),
    ("auto", {"rounds": 0}, "rounds must be at least 1"),
]


@pytest.mark.parametrize(("executor", "options", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_unsupported_combinations_are_refused(executor: str, options: dict, message: str) -> None:
    with pytest.raises(FedgftError, match=message):
        run(federation(), fedavg(), executor=executor, **options)


def test_weight_decay_with_a_proximal_term_is_not_fused() -> None:
    method = Algorithm(correction=Proximal(0.3))
    options = {"optimizer": Optimizer("adamw", 0.1)}
    auto, slow = (run(federation(), method, executor=e, **options) for e in ("auto", "sequential"))
    assert auto.executor == "stacked"
    np.testing.assert_allclose(auto.params, slow.params, **PLAIN)


def test_runs_share_one_data_set_and_one_number_of_clients() -> None:
    made = federation()
    fewer = Federation(made.dataset, made.rows[:3], np.array([0, 3]), made.test)
    for other, message in ((federation(), "share one data set"), (fewer, "number of clients")):
        with pytest.raises(FedgftError, match=message):
            simulate(
                [made, other],
                "logistic",
                fedavg(),
                Settings(schedule="constant", state="reset", rounds=20),
                seeds=[0, 1],
            )
    with pytest.raises(FedgftError, match="there are 2 for 1 federations"):
        simulate(
            [made],
            "logistic",
            fedavg(),
            Settings(schedule="constant", state="reset", rounds=20),
            seeds=[0, 1],
        )
