"""The memory of clients' sums: exact where it can be, and in proportion where it estimates."""

import numpy as np
import pytest

from fedgft.algorithms import fedgft, fedgft_control
from fedgft.engine import Settings, simulate
from fedgft.engine.client_memory import (
    KEPT,
    MOST_REPEATED,
    ClientMemory,
    estimate_sums,
    start_memory,
)
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
        np.testing.assert_allclose(mine[0], theirs, atol=1e-9)


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


def written_out(reports: list[tuple[list[int], Sums]], rows: np.ndarray, name: str) -> np.ndarray:
    """The estimate after the last round, by loops over clients, labels, groups and classes."""
    last: dict[int, tuple[int, Sums]] = {}
    for now, (asked, every) in enumerate(reports[:-1]):
        last |= dict.fromkeys(asked, (now, every))
    now = len(reports) - 1
    asked, every = reports[-1]
    found = np.zeros((2, 3, 2))
    for y, g, c in np.ndindex(2, 3, 2):
        total = sum(getattr(every, name)[k, y, g, c] for k in asked)
        count = sum(rows[k, y, g] for k in asked)
        known = again = change = 0.0
        for k, (when, old) in last.items():
            if k in asked:
                again += rows[k, y, g]
                change += getattr(every, name)[k, y, g, c] - getattr(old, name)[k, y, g, c]
            else:
                known += KEPT ** (now - when) * rows[k, y, g]
                total += KEPT ** (now - when) * getattr(old, name)[k, y, g, c]
        factor = min(known / again, MOST_REPEATED) if again else 0.0
        found[y, g, c] = min(max(total + factor * change, 0.0), count + known)
    return found


def test_estimates_are_those_of_the_formula(rows) -> None:
    rng = np.random.default_rng(4)
    rounds = [([0, 1], make_sums(rng, rows)), ([1, 2], make_sums(rng, rows))]
    rounds += [([3], make_sums(rng, rows)), ([0, 4], make_sums(rng, rows))]
    memory = start_memory(rounds[0][1], runs=1, clients=CLIENTS)
    for number, (asked, every) in enumerate(rounds, start=1):
        found = ask(memory, asked, every)
        for name in ("score", "decision"):
            expected = written_out(rounds[:number], rows, name)
            np.testing.assert_allclose(getattr(found, name)[0], expected)


def test_old_reports_fade(rows) -> None:
    """A client that reported many rounds ago no longer counts."""
    every = make_sums(np.random.default_rng(6), rows)
    memory = start_memory(every, runs=1, clients=CLIENTS)
    ask(memory, [0, 1, 2], every)
    for _ in range(80):
        found = ask(memory, [3], every)
    check(found, every[np.array([3])].sum())


def test_rates_of_a_model_that_stays_are_known(rows) -> None:
    """Clients with equal rates: however they count, the rates are exact."""
    every = Sums(rows, np.stack((0.7 * rows, 0.3 * rows), -1), np.stack((rows, 0 * rows), -1))
    memory = start_memory(every, runs=1, clients=CLIENTS)
    for k in (0, 3, 0, 1):
        found = ask(memory, [k], every)
    np.testing.assert_allclose(found.score[..., 1] / found.count, 0.3)


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
