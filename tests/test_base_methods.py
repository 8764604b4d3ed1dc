"""SCAFFOLD, FedNova and servers with state, compared with the formulas of their papers."""

from itertools import product

import numpy as np
import pytest
import torch

from fedgft.algorithms import (
    BASES,
    Adaptive,
    Algorithm,
    Averaging,
    BySize,
    FairFed,
    FedNova,
    LocalResults,
    Proximal,
    Scaffold,
    ServerMomentum,
    fairfed,
    fedavg,
    fedgft,
    fedgft_control,
    lft,
    lrw,
    with_base,
)
from fedgft.algorithms.controller import Loop
from fedgft.engine import Settings
from fedgft.engine.executors import choose_executor, fused, numpy_kernels
from fedgft.engine.plan import derive_seeds, draw_batches, full_cohort, index_rows
from fedgft.engine.round import RoundLoop
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.models import get_model
from fedgft.optimizers import Optimizer, path_length
from small_federation import EXECUTORS, SGD, clients, federation, module, reordered, run, several

SP = CATALOG["sp"]
EXACT = {"rtol": 0, "atol": 1e-11}
every_executor = pytest.mark.parametrize("executor", EXECUTORS)


def scaffold_by_hand(made, *, rounds: int, lr: float, batch_size: int) -> np.ndarray:
    """Karimireddy et al., Algorithm 1 with option II, clients weighing n_k / n."""
    every = clients(made)
    model = module(made)
    sizes = torch.tensor([len(c.y) for c in every], dtype=torch.float64)
    flat = lambda: torch.cat([p.detach().flatten() for p in model.parameters()])  # noqa: E731
    x = flat()
    c = torch.zeros_like(flat())
    own = [torch.zeros_like(x) for _ in every]
    for t in range(rounds):
        ends = []
        fresh = []
        for k, client in enumerate(every):
            y = x.clone()
            key = derive_seeds(derive_seeds(np.uint64(0), np.uint64(client.key)), 1 + t, 0)
            steps = 0
            for batch in draw_batches(
                np.arange(len(client.y)), seed=int(key), batch_size=batch_size
            ):
                torch.nn.utils.vector_to_parameters(y, model.parameters())
                at = torch.tensor(batch)
                loss = torch.nn.functional.cross_entropy(model(client.x[at]), client.y[at])
                gradient = torch.autograd.grad(loss, list(model.parameters()))
                y = y - lr * (torch.cat([g.flatten() for g in gradient]) - own[k] + c)
                steps += 1
            ends.append(y)
            fresh.append(own[k] - c + (x - y) / (steps * lr))
        share = sizes / sizes.sum()
        c = c + sum(w * (new - old) for w, new, old in zip(share, fresh, own, strict=True))
        x = sum(w * y for w, y in zip(share, ends, strict=True))
        own = fresh
    return x.numpy()


@every_executor
def test_scaffold_is_option_two_for_sgd(executor: str) -> None:
    made = several()
    expected = scaffold_by_hand(made, rounds=4, lr=0.05, batch_size=8)
    method = Algorithm(correction=Scaffold())
    found = run(made, method, executor=executor, rounds=4, optimizer=SGD)
    np.testing.assert_allclose(found.params[0], expected, **EXACT)
    assert np.abs(found.params - run(made, fedavg(), rounds=4, optimizer=SGD).params).max() > 1e-3


def rounds_of(made, method: Algorithm, **options) -> RoundLoop:
    settings = Settings(
        precision="fp64",
        batch_size=8,
        **{"schedule": "constant", "state": "reset", "rounds": 20, **options},
    )
    index = index_rows([made, made])
    model = get_model("logistic")
    executor = choose_executor(index, model, method, settings)
    return RoundLoop(
        index=index,
        model=model,
        algorithm=method,
        settings=settings,
        executor=executor,
        seeds=np.array([0, 1], np.uint64),
        lr=np.array([0.05, 0.02]),
    )


@every_executor
@pytest.mark.parametrize("sampling", ["uniform", "size"])
def test_scaffold_keeps_its_mean_whoever_takes_part(executor: str, sampling: str) -> None:
    made = federation()
    last = None
    rounds = rounds_of(
        made,
        Algorithm(correction=Scaffold()),
        cohort=2,
        sampling=sampling,
        rounds=6,
        executor=executor,
    )
    state = rounds.init(None)
    for t in range(6):
        state = rounds.step(state, t)
        own = np.asarray(state.correction.clients).reshape(2, made.num_clients, -1)
        mean = np.einsum("k,rkw->rw", made.sizes / made.sizes.sum(), own)
        np.testing.assert_allclose(np.asarray(state.correction.server), mean, **EXACT)
        if last is not None:  # at most two clients of a run have learnt something
            changed = (np.abs(own - last) > 0).any(-1).sum(1)
            assert (changed <= 2).all() and changed.sum() > 0
        last = own.copy()


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_scaffold_in_all_executors(rule, monkeypatch) -> None:
    made = federation()
    method = with_base(fedgft(SP, 5.0), "scaffold", mu=0.2)
    options = {"optimizer": Optimizer(rule), "epochs": 2}
    found = [run(made, method, executor=name, **options).params for name in EXECUTORS]
    monkeypatch.setattr(fused, "kernels", numpy_kernels)
    found.append(run(made, method, executor="fused", **options).params)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=1e-9)


def test_scaffold_with_equal_clients_is_fedavg_once_it_knows_them() -> None:
    """One client: c = c_k, so nothing is corrected."""
    made = federation([(40, (0, 1), (0, 1))])
    plain = run(made, fedavg(), rounds=4).params
    np.testing.assert_allclose(
        run(made, Algorithm(correction=Scaffold()), rounds=4).params, plain, **EXACT
    )


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_path_length_is_how_far_a_constant_gradient_leads(rule: str, steps: int) -> None:
    if rule == "adam":
        assert path_length(Optimizer("adam"), np.array([steps]))[0] == steps
        return
    value = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    theirs = torch.optim.SGD([value], lr=0.1, momentum=0.9 if rule == "momentum" else 0.0)
    for _ in range(steps):
        value.grad = torch.ones_like(value)
        theirs.step()
    assert path_length(Optimizer(rule), np.array([steps]))[0] == pytest.approx(-value.item() / 0.1)


@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_path_length_with_a_pull_back(rule: str) -> None:
    """Of several clients at once, each with its own number of steps."""
    steps = np.array([1, 5, 30, 0])
    lr = 0.1
    mu = 5.0
    far = []
    for count in steps:
        value = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        theirs = torch.optim.SGD([value], lr=lr, momentum=0.9 if rule == "momentum" else 0.0)
        for _ in range(count):
            value.grad = 1.0 + mu * value.detach()
            theirs.step()
        far.append(-value.item() / lr)
    np.testing.assert_allclose(path_length(Optimizer(rule), steps, lr * mu), far, atol=1e-12)


def test_fednova_knows_the_pull_of_fedprox() -> None:
    made = several()
    pulled = Algorithm(correction=Proximal(4.0), weighting=FedNova())
    found = run(made, pulled, rounds=1, optimizer=SGD).params[0]
    ends = [
        run(
            reordered(made, [k]), Algorithm(correction=Proximal(4.0)), rounds=1, optimizer=SGD
        ).params[0]
        for k in range(made.num_clients)
    ]
    start = np.concatenate([p.detach().flatten().numpy() for p in module(made).parameters()])
    tau = (1 - (1 - 0.05 * 4.0) ** -(-made.sizes // 8)) / (0.05 * 4.0)
    weight = made.sizes / made.sizes.sum()
    moved = sum(w * (end - start) / t for w, end, t in zip(weight, ends, tau, strict=True))
    np.testing.assert_allclose(found, start + (weight * tau).sum() * moved, **EXACT)


@pytest.mark.slow
@every_executor
def test_locally_fair_training_is_pulled_back_to_the_start_of_the_round(executor: str) -> None:
    """It trains epoch by epoch; with lam 0 it is FedProx all the same."""
    made = federation()
    options = {"executor": executor, "epochs": 4}
    plain = run(made, with_base(fedavg(), "fedprox", mu=5.0), **options).params
    local = run(made, with_base(lft(SP, 0.0), "fedprox", mu=5.0), **options).params
    np.testing.assert_allclose(local, plain, **EXACT)


def test_the_controller_knows_when_the_answer_is_late_or_blurred() -> None:
    made = federation()
    plain = fedgft_control(SP)
    assert rounds_of(made, plain).loop() == Loop(delay=1, caution=1.0)
    assert rounds_of(made, with_base(plain, "scaffold")).loop().caution == 0.5
    for base in ("fedadam", "fedavgm"):
        assert rounds_of(made, with_base(plain, base)).loop().caution == 0.5
    for options in ({"cohort": 2}, {"noise": 1.0}):
        assert rounds_of(made, plain, **options).loop().caution == 0.5
    assert rounds_of(made, plain, lag=True).loop().delay == 2


def test_fednova_by_hand() -> None:
    """x + tau_eff sum_k w_k Delta_k / tau_k, from each client trained alone."""
    made = several()
    ends = [
        run(reordered(made, [k]), fedavg(), rounds=1, optimizer=SGD).params[0]
        for k in range(made.num_clients)
    ]
    start = np.concatenate([p.detach().flatten().numpy() for p in module(made).parameters()])
    tau = -(-made.sizes // 8)
    weight = made.sizes / made.sizes.sum()
    moved = sum(w * (end - start) / t for w, end, t in zip(weight, ends, tau, strict=True))
    expected = start + (weight * tau).sum() * moved
    found = run(made, Algorithm(weighting=FedNova()), rounds=1, optimizer=SGD).params[0]
    np.testing.assert_allclose(found, expected, **EXACT)


def test_fednova_changes_nothing_where_all_make_as_many_steps() -> None:
    made = federation([(16, (0, 1), (0, 1)), (16, (0,), (0, 1)), (16, (1,), (0, 1))])
    for inner in (BySize(), FairFed(SP, 0.5)):
        plain = run(made, Algorithm(weighting=inner)).params
        np.testing.assert_allclose(
            run(made, Algorithm(weighting=FedNova(inner))).params, plain, **EXACT
        )


def test_fednova_gives_nothing_to_a_client_without_rows() -> None:
    cohort = full_cohort([several()])
    local = LocalResults(None, None, path_length=np.array([2.0, 0.0, 1.0, 4.0, 1.0]))
    found, _ = FedNova().coefficients(None, cohort, local)
    assert found[1] == 0 and np.isfinite(found).all()


def test_servers_by_their_formulas() -> None:
    params = np.array([[1.0, -2.0]])
    update = np.array([[0.5, -0.01]])
    server = ServerMomentum(lr=0.5, momentum=0.9)
    state = server.init(params)
    once, state = server.step(state, params, update)
    np.testing.assert_allclose(once, params + 0.5 * update)
    twice, _ = server.step(state, once, update)
    np.testing.assert_allclose(twice, once + 0.5 * 1.9 * update)
    v0 = 1e-6
    square = update**2
    second = {
        "adam": 0.99 * v0 + 0.01 * square,
        "yogi": v0 - 0.01 * square * np.sign(v0 - square),
        "adagrad": v0 + square,
    }
    for rule, v in second.items():
        server = Adaptive(rule, lr=0.1)
        found, (m, kept, _) = server.step(server.init(params), params, update)
        np.testing.assert_allclose(kept, v)
        np.testing.assert_allclose(m, 0.1 * update)
        np.testing.assert_allclose(found, params + 0.1 * 0.1 * update / (np.sqrt(v) + 1e-3))


def test_a_server_without_momentum_is_averaging() -> None:
    made = federation()
    plain = run(made, fedavg()).params
    found = run(made, Algorithm(server=ServerMomentum(lr=1.0, momentum=0.0))).params
    np.testing.assert_allclose(found, plain, **EXACT)


@every_executor
def test_servers_in_all_executors(executor: str) -> None:
    made = federation()
    method = with_base(fedgft(SP, 5.0), "fedyogi")
    np.testing.assert_allclose(
        run(made, method, executor=executor).params, run(made, method).params, atol=1e-10, rtol=0
    )


def test_buffers_take_the_mean_and_not_the_server_step() -> None:
    """A running variance under Adam could fall below zero."""
    made = several()

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))

    for base in (with_base(fedavg(), "fedadam", server_lr=1.0), with_base(fedavg(), "fednova")):
        found = run(made, base, model=make, rounds=1, batch_size=8, lr=1e-12)
        plain = run(made, fedavg(), model=make, rounds=1, batch_size=8, lr=1e-12)
        np.testing.assert_allclose(found.params[0, -8:], plain.params[0, -8:], atol=1e-9)


OBJECTIVES = (fedavg(), lrw(), lft(SP, 3.0), fedgft(CATALOG["eo"], 3.0), fedgft_control(SP, 0.1))
CORRECTIONS = (Proximal(), Proximal(0.3), Scaffold())
FAIRFED = (FairFed(SP, 0.5), FairFed(SP, 0.5, "exp"))
WEIGHTINGS = (BySize(), *FAIRFED, FedNova(), FedNova(FAIRFED[0]))
SERVERS = (Averaging(), ServerMomentum(), Adaptive("adam"), Adaptive("yogi"), Adaptive("adagrad"))


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [None, 3])
def test_every_combination_of_slots_trains(cohort) -> None:
    """objective x correction x weighting x server, for a few rounds: each is its own method."""
    made = federation()
    seen = set()
    for objective, *slots in product(OBJECTIVES, CORRECTIONS, WEIGHTINGS, SERVERS):
        method = Algorithm(objective.objective, *slots)
        found = run(made, method, cohort=cohort, rounds=3, eval_every=0, state="shared")
        assert np.isfinite(found.params).all()
        assert np.isfinite(found.test.score).all()
        seen.add(found.params.round(9).tobytes())
    combinations = len(OBJECTIVES) * len(CORRECTIONS) * len(WEIGHTINGS) * len(SERVERS)
    assert len(seen) == combinations  # no slot is ignored


def test_methods_and_bases_by_name() -> None:
    for base in BASES:
        for method in (fedavg(), lrw(), lft(SP), fairfed(SP), fedgft(SP), fedgft_control(SP)):
            found = with_base(method, base)
            assert found.objective == method.objective
            if base != "fednova":
                assert found.weighting == method.weighting
    assert with_base(fairfed(SP), "fednova").weighting == FedNova(FairFed(SP))
    assert with_base(fedavg(), "fednova", mu=0.5).correction == Proximal(0.5)
    with pytest.raises(FedgftError, match="base 'fedmax' is not known"):
        with_base(fedavg(), "fedmax")
    for wrong in (lambda: Scaffold(-1.0), lambda: Proximal(float("nan"))):
        with pytest.raises(FedgftError, match="mu must be"):
            wrong()
    with pytest.raises(FedgftError, match="server_lr must be"):
        with_base(fedavg(), "fedadam", server_lr=0.0)
