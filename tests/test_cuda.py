"""Tests that need a GPU: captured steps equal the steps that they were captured from."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedgft.algorithms import Algorithm, fedavg, fedgft, get_method, with_base
from fedgft.data.partition import partition
from fedgft.engine import History, Settings, simulate
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.models import ResNet18
from fedgft.optimizers import Optimizer
from synthetic_images import draw_images

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
SP = CATALOG["sp"]
METHODS = (
    "fedavg",
    "lrw",
    "fairfed",
    "fedgft",
    "lft",
    "fedprox",
    "scaffold",
    "kept Adam",
    "fedbn",
    "mirrored",
)
OPTIONS = {
    "kept Adam": {"optimizer": Optimizer("adam"), "state": "keep"},
    "fedbn": {"norms": "local"},
    "mirrored": {"augment": "flip"},
}


def method_of(name: str) -> Algorithm:
    if name in ("fedprox", "scaffold"):
        return with_base(fedgft(SP, 5.0), name, mu=None, server_lr=None)
    if name in OPTIONS:
        return fedavg()
    return get_method(name, SP, 2.0, rule="exp" if name == "fairfed" else "subtract")


def trained(
    method: Algorithm, *, clients: int = 4, rows: int = 240, kind: str = "dirichlet", **options
) -> History:
    extra = {n: options.pop(n) for n in ("on_state", "resume") if n in options}
    made = partition(draw_images(rows), kind, clients=clients, alpha=5.0, test_share=0.2)
    chosen = {
        "rounds": 3,
        "batch_size": 16,
        "device": "cuda",
        "deterministic": True,
        "optimizer": Optimizer("momentum"),
        "eval_every": 0,
    } | options
    return simulate(
        [made],
        ResNet18(),
        method,
        Settings(**{"schedule": "constant", "state": "reset", "rounds": 20, **chosen}),
        seeds=[0],
        lr=0.01,
        **extra,
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_replayed_step_is_the_step(name: str) -> None:
    options = OPTIONS.get(name, {})
    graph, eager = (trained(method_of(name), graphs=g, **options) for g in (True, False))
    np.testing.assert_allclose(graph.params, eager.params, rtol=0, atol=1e-5)
    assert not np.allclose(graph.params, trained(fedavg(), rounds=1).params, atol=1e-4)


def test_the_gpu_computes_what_the_cpu_does() -> None:
    # whole batches: BatchNorm over a few rows blows the last digit up to the first in a round
    one, two = (
        trained(fedgft(SP, 5.0), kind="iid", rounds=2, device=d, precision="fp64")
        for d in ("cuda", "cpu")
    )
    np.testing.assert_allclose(one.params, two.params, rtol=0, atol=1e-5)
    np.testing.assert_allclose(one.test.score, two.test.score, rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{"lanes": 1}, {"lanes": 3}, {"device": "cuda:0,cuda:0"}])
def test_how_many_are_in_flight_changes_nothing(options: dict) -> None:
    expected = trained(fedgft(SP, 5.0))
    np.testing.assert_allclose(
        trained(fedgft(SP, 5.0), **options).params, expected.params, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", ["scaffold", "kept Adam", "fedbn"])
def test_a_resumed_run_ends_with_the_same_bits(name: str) -> None:
    """What waits in the host's memory is all there when a snapshot is taken."""
    kept = []

    def keep(done: int, take) -> None:
        made = take()
        kept.append(replace(made, arrays={n: a.copy() for n, a in made.arrays.items()}))

    options = OPTIONS.get(name, {})
    whole = trained(method_of(name), on_state=keep, **options)
    again = trained(method_of(name), resume=kept[0], **options)
    np.testing.assert_array_equal(whole.params, again.params)


def test_scores_in_one_pass_are_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNorm inside the convolution, as when a model is measured."""
    taken = []
    one = torch.cudnn_convolution_relu
    monkeypatch.setattr(torch, "cudnn_convolution_relu", lambda *a: taken.append(1) or one(*a))
    torch.manual_seed(1)
    module = ResNet18().module(features=3, classes=2).to("cuda", memory_format=torch.channels_last)
    x = torch.randn(96, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    for _ in range(5):
        module.train()(x)
    exact = module.eval()(x).detach()
    with torch.autocast("cuda", torch.bfloat16):
        apart = module(x).detach()
        assert not taken
        with torch.no_grad():
            joined = module(x)
    assert len(taken) == 9
    assert (joined - exact).norm() < 0.1 * exact.norm()
    assert (joined - exact).norm() < 2 * (apart - exact).norm()  # no worse than bfloat16 itself


def test_deterministic_is_bit_by_bit() -> None:
    one, two = (trained(fedgft(SP, 5.0), optimizer=Optimizer("adam")) for _ in range(2))
    np.testing.assert_array_equal(one.params, two.params)


def test_bf16_is_close_and_keeps_parameters_in_full() -> None:
    start = ResNet18().init(0, features=3, classes=2)
    ways = []
    for precision in ("fp32", "bf16"):
        made = trained(fedgft(SP, 5.0), rounds=1, precision=precision, batch_size=64)
        assert made.params.dtype == np.float32
        ways.append(made.params[0, :11_000_000] - start[:11_000_000])
    cosine = ways[0] @ ways[1] / np.linalg.norm(ways[0]) / np.linalg.norm(ways[1])
    assert cosine > 0.9
    assert not np.array_equal(*ways)


def test_memory_does_not_grow_with_the_clients() -> None:
    peaks = []
    for clients in (20, 200):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trained(fedavg(), clients=clients, rows=1200, rounds=2, batch_size=4)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 1.1 * peaks[0], peaks


def test_out_of_memory_says_what_to_try() -> None:
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated() / torch.cuda.get_device_properties(0).total_memory
    assert held < 0.03, held  # what earlier runs took is free again, but for cuBLAS's streams
    torch.cuda.set_per_process_memory_fraction(held + 0.003)
    try:
        with pytest.raises(FedgftError, match="batch_size 8") as wrong:
            trained(fedavg(), lanes=4)
        assert wrong.value.field == "device"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
