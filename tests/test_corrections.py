"""New corrections: FedDyn of `examples/feddyn.py`, compared with the paper's formulas."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgft.algorithms import Algorithm, Correction, fedavg, fedgft
from fedgft.engine.executors import fused, numpy_kernels
from fedgft.engine.plan import derive_seeds, draw_batches
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.optimizers import Optimizer
from small_federation import EXECUTORS, SGD, clients, federation, module, run, several

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "feddyn.py"))
FedDyn = EXAMPLE["FedDyn"]
feddyn = EXAMPLE["feddyn"]
EXACT = {"rtol": 0, "atol": 1e-11}
ALPHA = 0.3


def feddyn_by_hand(made, *, rounds: int, lr: float, batch_size: int) -> np.ndarray:
    """Acar et al., Algorithm 1, clients weighing n_k / n, full participation."""
    every = clients(made)
    model = module(made)
    sizes = torch.tensor([len(c.y) for c in every], dtype=torch.float64)
    share = sizes / sizes.sum()
    x = torch.cat([p.detach().flatten() for p in model.parameters()])
    h = torch.zeros_like(x)
    own = [torch.zeros_like(x) for _ in every]
    for t in range(rounds):
        ends = []
        for k, client in enumerate(every):
            y = x.clone()
            key = derive_seeds(derive_seeds(np.uint64(0), np.uint64(client.key)), 1 + t, 0)
            for batch in draw_batches(
                np.arange(len(client.y)), seed=int(key), batch_size=batch_size
            ):
                torch.nn.utils.vector_to_parameters(y, model.parameters())
                at = torch.tensor(batch)
                loss = torch.nn.functional.cross_entropy(model(client.x[at]), client.y[at])
                gradient = torch.autograd.grad(loss, list(model.parameters()))
                flat = torch.cat([g.flatten() for g in gradient])
                y = y - lr * (flat - own[k] + ALPHA * (y - x))
            own[k] = own[k] - ALPHA * (y - x)
            ends.append(y)
        mean = sum(w * y for w, y in zip(share, ends, strict=True))
        h = h - ALPHA * (mean - x)
        x = mean - h / ALPHA
    return x.numpy()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_users_feddyn_is_that_of_the_paper(executor: str) -> None:
    made = several()
    expected = feddyn_by_hand(made, rounds=4, lr=0.05, batch_size=8)
    method = feddyn(fedavg(), ALPHA)
    found = run(made, method, executor=executor, rounds=4, optimizer=SGD)
    np.testing.assert_allclose(found.params[0], expected, **EXACT)
    plain = run(made, fedavg(), executor=executor, rounds=4, optimizer=SGD)
    assert np.abs(found.params - plain.params).max() > 1e-3


def test_a_users_correction_goes_with_penalties_cohorts_and_every_executor(monkeypatch) -> None:
    made = federation()
    method = feddyn(fedgft(CATALOG["sp"], 5.0), ALPHA)
    options = {"cohort": 4, "epochs": 2, "optimizer": Optimizer("adam"), "state": "shared"}
    found = [run(made, method, executor=name, **options).params for name in EXECUTORS]
    monkeypatch.setattr(fused, "kernels", numpy_kernels)
    found.append(run(made, method, executor="fused", **options).params)
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=1e-9)


def test_a_move_with_weight_decay_is_not_fused() -> None:
    """Decay moves both logits alike, and the one-logit kernel does not see that."""

    class Remembers(FedDyn):
        pass

    method = Algorithm(correction=Remembers(mu=0.0))
    with pytest.raises(FedgftError, match="moves the two logits apart"):
        run(federation(), method, executor="fused", optimizer=Optimizer("adamw", 0.1))


def test_a_correction_without_methods_is_the_proximal_term() -> None:
    made = federation()
    plain = run(made, Algorithm(correction=Correction(0.3))).params
    np.testing.assert_array_equal(run(made, feddyn_like_prox()).params, plain)


def feddyn_like_prox() -> Algorithm:
    class Silent(Correction):
        """It has a memory, and makes nothing of it."""

        learns_from = "gradient"

        def drift(self, state, cohort):
            return 0 * state.clients

        def learn(self, state, cohort, training):
            return state.clients, 0 * state.clients

    return Algorithm(correction=Silent(0.3))
