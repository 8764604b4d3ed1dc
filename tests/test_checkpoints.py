"""Large models train a few at a time, and an interrupted run continues without a difference."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedgft.algorithms import METHODS as METHOD_TABLE
from fedgft.algorithms import (
    Algorithm,
    fairfed,
    fedavg,
    fedgft,
    fedgft_control,
    get_method,
    lft,
    lrw,
    with_base,
)
from fedgft.data.partition import partition
from fedgft.engine import History, Settings, simulate
from fedgft.engine.executors import sequential
from fedgft.engine.plan import full_cohort
from fedgft.engine.state import Snapshot, pack, unpack
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.models import Module
from fedgft.optimizers import Optimizer
from fedgft.study.cache import Checkpoints, run_key
from fedgft.sums import Sums
from synthetic_images import draw_images

pytestmark = pytest.mark.slow

SP = CATALOG["sp"]


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Conv2d(4, 4, 3, 2),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


MODEL = Module(small)
OLDER = (fedavg, lrw, lft, fairfed, fedgft, fedgft_control)
METHODS: dict[str, tuple[Algorithm, dict]] = {
    "fedavg": (fedavg(), {}),
    "fedgft": (fedgft(SP, 5.0), {"state": "shared", "schedule": "cosine"}),
    "a target": (fedgft_control(SP, 0.02), {"state": "keep"}),
    "fairfed": (get_method("fairfed", SP, 2.0, rule="authors"), {"state": "reset-first"}),
    "fairfed, exp": (get_method("fairfed", SP, 2.0, rule="exp"), {"sampling": "size", "cohort": 3}),
    "lft": (get_method("lft", SP, 2.0), {"epochs": 2, "state": "keep"}),
    "scaffold": (with_base(fedgft(SP, 5.0), "scaffold"), {"cohort": 3}),
    "fedadam": (with_base(fedgft(SP, 5.0), "fedadam"), {"eval_every": 2}),
    "fedbn": (fedgft(SP, 5.0), {"norms": "local"}),
    "mirrored": (fedgft(SP, 5.0), {"augment": "flip", "lag": True}),
    "noisy": (fedgft(SP, 5.0), {"noise": 2.0, "eval_on": "test"}),
    "every threshold": (fedgft("sp@all", 5.0), {"state": "keep"}),
    **{
        name: (get_method(name, SP, row.default), {"noise": 1.0} if name == "q-ffl" else {})
        for name, row in METHOD_TABLE.items()
        if row.make not in OLDER
    },
}


def run(method: Algorithm, *, runs: int = 2, clients: int = 5, **options) -> History:
    extra = {n: options.pop(n) for n in ("on_state", "resume") if n in options}
    data = draw_images(90, 16)
    made = [partition(data, clients=clients, alpha=5.0, seed=seed) for seed in range(runs)]
    chosen = {"rounds": 4, "batch_size": 8, "precision": "fp64"} | options
    return simulate(
        made,
        small,
        method,
        Settings(**{"schedule": "constant", "state": "reset", "rounds": 20, **chosen}),
        seeds=range(runs),
        lr=0.01,
        **extra,
    )


def same(one: History, two: History) -> None:
    np.testing.assert_array_equal(one.params, two.params)
    np.testing.assert_array_equal(one.rounds, two.rounds)
    np.testing.assert_array_equal(one.test.score, two.test.score)
    if one.federation is not None:
        np.testing.assert_array_equal(one.federation.score, two.federation.score)
        np.testing.assert_array_equal(one.before.score, two.before.score)


@pytest.mark.parametrize("name", METHODS)
def test_training_in_batches_of_clients_equals_training_all_at_once(name: str, monkeypatch) -> None:
    method, options = METHODS[name]
    together = run(method, **options)
    monkeypatch.setattr(sequential, "CHUNK_BYTES", 0)
    monkeypatch.setattr(sequential.SequentialExecutor, "threads", 1)
    apart = run(method, threads=1, **options)
    np.testing.assert_allclose(apart.params, together.params, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("after", [1, 3])
def test_a_resumed_run_ends_with_the_same_bits(name: str, after: int) -> None:
    method, options = METHODS[name]
    kept: dict[int, Snapshot] = {}

    def keep(done: int, take) -> None:
        made = take()  # its arrays are the run's own, and go on changing
        kept[done] = replace(made, arrays={n: a.copy() for n, a in made.arrays.items()})

    whole = run(method, **options, on_state=keep)
    assert sorted(kept) == [1, 2, 3]
    same(whole, run(method, **options, resume=kept[after]))


@pytest.mark.parametrize("executor", ["fused", "stacked", "sequential"])
def test_every_executor_can_be_resumed(executor: str) -> None:
    from small_federation import federation
    from small_federation import run as run_small

    made = federation()
    kept = []
    options = {"executor": executor, "state": "keep", "rounds": 3}
    method = with_base(fedgft(SP, 5.0), "fedavgm")

    def keep(done: int, take) -> None:
        snapshot = take()
        kept.append(replace(snapshot, arrays={n: a.copy() for n, a in snapshot.arrays.items()}))

    whole = run_small(made, method, **options, on_state=keep)
    again = run_small(made, method, **options, resume=kept[0])
    np.testing.assert_array_equal(whole.params, again.params)


def test_invalid_snapshots_are_refused() -> None:
    value = (Sums(np.ones((1, 2, 3)), np.ones((1, 2, 3, 2)), np.zeros((1, 2, 3, 2))), None, "x", 3)
    made = pack(2, value)
    back = unpack(made, lambda array, host: array)
    np.testing.assert_array_equal(back[0].score, value[0].score)
    assert back[1:] == (None, "x", 3)
    for tree in (
        {"is": "os.system", "of": {}},
        {"is": "array", "of": "none"},
        {"of": 1},
        [1, 2],
        {"is": "Sums", "of": {"cell": 1}},
    ):
        with pytest.raises(ValueError):
            unpack(replace(made, tree=tree), lambda array, host: array)


def test_checkpoints_are_found_by_their_key(tmp_path) -> None:
    made = [partition(draw_images(40, 16), clients=3, seed=0)]
    method = fedgft(SP, 5.0)
    settings = Settings(schedule="constant", state="reset", rounds=3)
    key = run_key(made, MODEL, None, method, settings, np.array([0.1]))
    assert key == run_key(
        made,
        MODEL,
        None,
        fedgft(SP, 5.0),
        Settings(schedule="constant", state="reset", rounds=3),
        np.array([0.1]),
    )
    other = Module(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 2)))
    others = [
        run_key(made, other, None, method, settings, np.array([0.1])),
        run_key(made, MODEL, None, fedgft(SP, 6.0), settings, np.array([0.1])),
        run_key(
            made,
            MODEL,
            None,
            method,
            Settings(schedule="constant", state="reset", rounds=4),
            np.array([0.1]),
        ),
        run_key(made, MODEL, None, method, settings, np.array([0.2])),
        run_key(made, MODEL, np.zeros(3), method, settings, np.array([0.1])),
        run_key(
            [partition(draw_images(40, 16), clients=3, seed=1)],
            MODEL,
            None,
            method,
            settings,
            np.array([0.1]),
        ),
    ]
    assert len({key, *others}) == 7
    kept = Checkpoints(tmp_path / "c", every=2)
    for done in (1, 2, 3):
        kept.put(key, done, lambda done=done: pack(done, (np.arange(3), np.float64(done))))
    slow = Checkpoints(tmp_path / "s", share=0.0)  # the first one has taken all the time there is
    for folder, last in ((slow, 1), (Checkpoints(tmp_path / "e"), 3)):
        for done in (1, 2, 3):
            folder.put(key, done, lambda done=done: pack(done, (np.arange(3),)))
        assert folder.get(key).round == last
    found = Checkpoints(tmp_path / "c", resume=True).get(key)
    assert found.round == 2 and float(unpack(found, None)[1]) == 2.0
    with pytest.raises(FedgftError, match="of other options"):
        Checkpoints(tmp_path / "c", resume=True).get(others[0])
    (file,) = kept.found()
    held = bytearray(file.read_bytes())
    held[-3] ^= 1
    file.write_bytes(held)
    with pytest.raises(FedgftError, match="damaged"):
        kept.get(key)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(FedgftError, match="not a complete checkpoint"):
        kept.get(key)
    kept.clear()
    assert not kept.folder.exists()


def test_a_key_is_the_same_in_every_process() -> None:
    program = """
import numpy as np
from fedgft.data.partition import partition
from fedgft.data.generated import synthetic
from fedgft.study.cache import run_key
from fedgft.algorithms import get_method
from fedgft.metrics import CATALOG
from fedgft.models import Logistic
made = [partition(synthetic(rows=50), clients=2)]
print(run_key(made, Logistic(), None, get_method("lrw", CATALOG["sp"], 0.0), np.ones(2)))
"""
    keys = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert len(keys) == 1 and len(keys.pop()) == 33


def test_fedbn_keeps_the_clients_norms_apart() -> None:
    """Local layers differ between clients: their gaps are measured with their own, and the global
    model has the mean of them."""
    shared, local = (run(fedavg(), runs=1, norms=n, rounds=3) for n in ("shared", "local"))
    assert not np.allclose(shared.params, local.params)
    assert not np.allclose(shared.after.score, local.after.score)
    with pytest.raises(FedgftError, match="no BatchNorm"):
        made = partition(draw_images(40, 16), clients=2)

        def flat():
            return nn.Sequential(nn.Flatten(), nn.Linear(768, 2))

        simulate(
            [made],
            flat,
            fedavg(),
            Settings(schedule="constant", state="reset", rounds=1, norms="local"),
            seeds=[0],
        )


def test_fedbn_of_one_client_is_plain_training() -> None:
    one, two = (run(fedavg(), runs=1, clients=1, norms=n) for n in ("shared", "local"))
    np.testing.assert_allclose(one.params, two.params, rtol=0, atol=1e-12)


def test_mirroring_mirrors_half_of_the_pictures() -> None:
    """On pictures that are their own mirror image it changes nothing, on others it does."""
    data = draw_images(60, 16)
    even = data.features | data.features[..., ::-1]
    for features, alike in ((even, True), (data.features, False)):
        made = [partition(replace(data, features=features), clients=2)]
        plain, mirrored = (
            simulate(
                made,
                small,
                fedavg(),
                Settings(
                    schedule="constant",
                    state="reset",
                    rounds=2,
                    batch_size=8,
                    augment=a,
                    optimizer=Optimizer("sgd"),
                    precision="fp64",
                ),
                seeds=[0],
                lr=0.01,
            ).params
            for a in ("none", "flip")
        )
        assert np.allclose(plain, mirrored, atol=1e-12) == alike


def test_two_hundred_clients_take_no_more_memory_than_twenty() -> None:
    """With 1 million parameters; all clients at once would take 0.8 GB for the models alone."""
    program = """
import resource, sys
import numpy as np
import torch
from fedgft.data.dataset import Dataset
from fedgft.data.partition import partition
from fedgft.engine import Settings, simulate
from fedgft.algorithms import fedavg
clients = int(sys.argv[1])
rng = np.random.default_rng(0)
data = Dataset(name="rows", features=rng.standard_normal((800, 50)).astype(np.float32),
               labels=rng.integers(0, 2, 800), groups=rng.integers(0, 2, 800), columns=("x",) * 50)
make = lambda: torch.nn.Sequential(torch.nn.Linear(50, 20_000), torch.nn.Linear(20_000, 2))
made = partition(data, "iid", clients=clients)
settings = Settings(state="reset", rounds=1, batch_size=64, executor="sequential")
simulate([made], make, fedavg(), settings, seeds=[0])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    few, many = (
        int(
            subprocess.run(
                [sys.executable, "-c", program, str(clients)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for clients in (20, 200)
    )
    assert many < 1.1 * few, (few, many)


def test_without_a_gpu_the_error_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for device in ("cuda", "cuda:1", "cuda:0,cuda:1"):
        with pytest.raises(FedgftError, match=r"no CUDA device; use device cpu"):
            run(fedavg(), device=device)
    with pytest.raises(FedgftError, match="is not known"):
        run(fedavg(), device="abacus")


def test_a_skipped_batch_does_not_count_as_a_step() -> None:
    """BatchNorm refuses one row where nothing else gives it a variance: then such a rest is not
    read, moves nothing, and SCAFFOLD's mean gradient is over the batches there were."""
    made = [partition(draw_images(17, 16), "iid", clients=1, test_share=0.0)]
    method = with_base(fedavg(), "scaffold")
    kept = []
    for steps in (None, 1):
        settings = Settings(
            schedule="constant",
            state="reset",
            rounds=1,
            batch_size=16,
            steps=steps,
            precision="fp64",
            batches="fixed",
        )
        simulate(
            made,
            refusing,
            method,
            replace(settings, rounds=2),
            seeds=[0],
            lr=0.01,
            on_state=lambda done, take: kept.append(take()),
        )
    for one, two in zip(kept[0].arrays.values(), kept[1].arrays.values(), strict=True):
        np.testing.assert_array_equal(one, two)


def refusing() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(4),
        nn.Linear(4, 2),
    )


def test_counts_of_batches_have_no_mean() -> None:
    def counting():
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(768, momentum=None), nn.Linear(768, 2))

    with pytest.raises(FedgftError, match="momentum=None"):
        made = partition(draw_images(20, 16), clients=2)
        simulate(
            [made],
            counting,
            fedavg(),
            Settings(schedule="constant", state="reset", rounds=1),
            seeds=[0],
        )


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()]
)
def test_out_of_memory_errors_suggest_settings(error, monkeypatch) -> None:
    def train(*_) -> None:
        raise error

    monkeypatch.setattr("fedgft.engine.executors.torch_common.TorchExecutor.train", train)
    with pytest.raises(FedgftError, match=r"out of memory; try batch_size 4 \(it is 8\)"):
        run(fedavg())
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="something else"):
        monkeypatch.setattr("fedgft.engine.executors.torch_common.TorchExecutor.train", other)
        run(fedavg())


def other(*_) -> None:
    raise RuntimeError("something else")


def test_a_part_of_a_cohort_knows_whose_units_it_has() -> None:
    made = [partition(draw_images(40, 16), clients=3, seed=s) for s in range(3)]
    whole = full_cohort(made)
    part = whole.part(slice(2, 7))
    np.testing.assert_array_equal(part.run, [0, 1, 1, 1, 2])
    np.testing.assert_array_equal(part.bounds, [0, 1, 4, 5])
    np.testing.assert_array_equal(whole.part(slice(0, 3)).bounds, [0, 3, 3, 3])
    assert not part.full and part.weight.tolist() == whole.weight[2:7].tolist()
