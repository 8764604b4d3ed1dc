"""The memory of clients' sums: exact where it can be, and in proportion where it estimates."""

import numpy as np
import pytest

from fedgft.algorithms import fedgft, fedgft_control
from fedgft.engine import Settings, simulate
from fedgft.engine.client_memory import ClientMemory, estimate_sums, start_memory
from fedgft.engine.plan import make_cohort
from fedgft.metrics import CATALOG
from fedgft.sums import Sums
from small_federation import federation

SP = CATALOG["sp"]
CLIENTS = 5


def make_sums(rng: np.random.Generator, count: np.ndarray) -> Sums:
    """Sums of a model over clients with these rows, (client, c, k)."""
    positive = rng.uniform(0, 1, count.shape) * count
    decided = np.round(rng.uniform(0, 1, count.shape) * count)
    pair = [np.stack((count - each, each), -1) for each in (positive, decided)]
    return Sums(count, *pair)


def ask(memory: ClientMemory, clients: list[int], every: Sums) -> Sums:
    at = np.array(clients)
    cohort = make_cohort([at], [np.ones(len(at)) / len(at)], full=False)
    return estimate_sums(memory, cohort, every[at], at)[1]


def check(found: Sums, expected: Sums) -> None:
    for mine, theirs in zip(found.arrays, expected.arrays, strict=True):
        np.testing.assert_allclose(mine[0], theirs)


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(1).integers(1, 50, (CLIENTS, 2, 3)).astype(float)


def test_the_first_reports_are_added_up(rows) -> None:
    every = make_sums(np.random.default_rng(2), rows)
    memory = start_memory(every, runs=1, clients=CLIENTS)
    check(ask(memory, [0, 3], every), every[np.array([0, 3])].sum())


def test_the_estimate_is_exact_when_all_report(rows) -> None:
    rng = np.random.default_rng(3)
    first, second = make_sums(rng, rows), make_sums(rng, rows)
    memory = start_memory(first, runs=1, clients=CLIENTS)
    ask(memory, list(range(CLIENTS)), first)
    check(ask(memory, list(range(CLIENTS)), second), second.sum())


def test_clients_that_are_not_asked_move_as_the_cohort_has_moved(rows) -> None:
    """Written out for each label, group and class; the counts stay those of all clients."""
    rng = np.random.default_rng(4)
    first, second = make_sums(rng, rows), make_sums(rng, rows)
    memory = start_memory(first, runs=1, clients=CLIENTS)
    ask(memory, list(range(CLIENTS)), first)
    asked = [1, 4]
    found = ask(memory, asked, second)
    np.testing.assert_array_equal(found.count[0], rows.sum(0))
    for y, g, c in np.ndindex(2, 3, 2):
        change = sum(second.score[k, y, g, c] - first.score[k, y, g, c] for k in asked)
        scale = rows[:, y, g].sum() / sum(rows[k, y, g] for k in asked)
        expected = first.score[:, y, g, c].sum() + scale * change
        expected = min(max(expected, 0.0), rows[:, y, g].sum())
        assert found.score[0, y, g, c] == pytest.approx(expected)


def test_equal_changes_are_estimated_exactly(rows) -> None:
    """If the rates of all clients move alike, a cohort of one tells all."""
    base = rows * 0.3
    first, second = (
        Sums(rows, np.stack((rows - p, p), -1), np.stack((rows - p, p), -1))
        for p in (base, base + 0.25 * rows)
    )
    memory = start_memory(first, runs=1, clients=CLIENTS)
    ask(memory, list(range(CLIENTS)), first)
    check(ask(memory, [2], second), second.sum())


def test_a_model_that_stays_is_known_once_every_client_has_reported(rows) -> None:
    every = make_sums(np.random.default_rng(6), rows)
    memory = start_memory(every, runs=1, clients=CLIENTS)
    for k in [*range(CLIENTS), 0]:
        found = ask(memory, [k], every)
    check(found, every.sum())


def test_runs_do_not_mix() -> None:
    rng = np.random.default_rng(5)
    every = make_sums(rng, rng.integers(1, 50, (2 * CLIENTS, 2, 3)).astype(float))
    memory = start_memory(every, runs=2, clients=CLIENTS)
    cohort = make_cohort([np.array([0, 1]), np.array([3])], [np.ones(2), np.ones(1)], full=False)
    at = np.array([0, 1, CLIENTS + 3])
    about, found = estimate_sums(memory, cohort, every[at], at)
    np.testing.assert_array_equal(about.run, [0, 1])
    np.testing.assert_allclose(found.score[0], every[np.array([0, 1])].sum().score)
    np.testing.assert_allclose(found.score[1], every.score[CLIENTS + 3])


@pytest.mark.parametrize(
    ("algorithm", "cohort", "noise", "expected"),
    [
        (fedgft_control(SP), 2, 0.0, True),
        (fedgft_control(SP), None, 0.0, False),
        (fedgft_control(SP), 2, 0.1, False),
        (fedgft(SP, 5.0), 2, 0.0, False),
    ],
)
def test_a_target_with_sampled_clients_has_a_memory(algorithm, cohort, noise, expected) -> None:
    made = federation([(20 + k, (0, 1), (0, 1)) for k in range(6)])
    kept = []
    settings = Settings(rounds=3, cohort=cohort, noise=noise, batch_size=8)
    simulate(
        made,
        "logistic",
        algorithm,
        settings,
        lr=0.01,
        on_state=lambda done, snapshot: kept.append(str(snapshot().tree)),
    )
    assert ["ClientMemory" in tree for tree in kept] == [expected, expected]
