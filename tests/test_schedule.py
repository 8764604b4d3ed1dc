"""Random choices are pure functions of their names; cohorts and learning rates."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from fedgft.engine import plan
from fedgft.engine.plan import derive_seeds, draw_batches, full_cohort, learning_rate, sample_cohort
from small_federation import federation

MADE = federation()


def test_batches_hold_every_row_once() -> None:
    rows = np.arange(100, 137, dtype=np.int32)
    cut = draw_batches(rows, seed=5, batch_size=8)
    assert [len(batch) for batch in cut] == [8, 8, 8, 8, 5]
    np.testing.assert_array_equal(np.sort(np.concatenate(cut)), rows)
    np.testing.assert_array_equal(rows, np.arange(100, 137))  # not touched
    assert draw_batches(rows[:0], seed=5, batch_size=8) == []


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_compiled_and_plain_shuffles_are_one(seed: int, monkeypatch) -> None:
    compiled = np.concatenate(draw_batches(np.arange(99, dtype=np.int32), seed=seed, batch_size=10))
    numbers = [derive_seeds(seed % 1000, np.arange(50)), derive_seeds(np.uint64(seed), 3)]
    monkeypatch.setattr(plan, "NUMBA_AVAILABLE", False)
    monkeypatch.setattr(plan, "scramble_bits", plan.scramble_bits.py_func)
    plain = np.concatenate(draw_batches(np.arange(99, dtype=np.int32), seed=seed, batch_size=10))
    np.testing.assert_array_equal(compiled, plain)
    again = [derive_seeds(seed % 1000, np.arange(50)), derive_seeds(np.uint64(seed), 3)]
    for a, b in zip(numbers, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_permutations_are_uniform() -> None:
    """Chi-square over all 24 orders of 4 rows; 49.7 is its 0.999 quantile at 23 degrees."""
    draws = 24_000
    count = dict.fromkeys(permutations(range(4)), 0)
    for seed in derive_seeds(11, np.arange(draws)):
        order = np.concatenate(
            draw_batches(np.arange(4, dtype=np.int32), seed=int(seed), batch_size=4)
        )
        count[tuple(order.tolist())] += 1
    expected = draws / 24
    assert sum((seen - expected) ** 2 / expected for seen in count.values()) < 49.7


def test_every_place_is_as_likely_for_every_row() -> None:
    """Where row i of 40 lands, over 4,000 consecutive seeds: 39 x 39 free counts."""
    draws = 4_000
    rows = 40
    table = np.zeros((rows, rows))
    for seed in range(draws):
        order = np.concatenate(
            draw_batches(np.arange(rows, dtype=np.int32), seed=seed, batch_size=rows)
        )
        table[order, np.arange(rows)] += 1
    free = (rows - 1) ** 2
    expected = draws / rows
    chi = ((table - expected) ** 2 / expected).sum()
    assert abs(chi - free) < 4 * np.sqrt(2 * free)


def test_keys_differ_by_every_part_and_by_order() -> None:
    grid = derive_seeds(np.arange(90)[:, None], 4, np.arange(90)[None, :])
    assert grid.shape == (90, 90) and len(np.unique(grid)) == grid.size
    assert derive_seeds(1, 2) != derive_seeds(2, 1) and derive_seeds(0) != derive_seeds(0, 0)
    np.testing.assert_array_equal(derive_seeds(3, np.arange(5))[2], derive_seeds(3, 2))


def test_learning_rates() -> None:
    lr = np.array([0.1, 0.2])

    def rates(name: str) -> list[float]:
        return [learning_rate(lr, name, round=t, rounds=8)[1] for t in range(8)]  # pyrefly: ignore

    assert rates("constant") == [0.2] * 8
    np.testing.assert_allclose(rates("step"), [0.2] * 4 + [0.02] * 2 + [0.002] * 2)
    expected = [0.2 * (0.05 + 0.475 * (1 + np.cos(np.pi * t / 8))) for t in range(8)]
    np.testing.assert_allclose(rates("cosine"), expected)
    assert rates("cosine")[0] == 0.2
    np.testing.assert_allclose(learning_rate(lr, "cosine", round=8, rounds=8), 0.05 * lr)
    np.testing.assert_array_equal(lr, [0.1, 0.2])


def test_everybody_weighs_by_size() -> None:
    cohort = full_cohort([MADE, MADE])
    np.testing.assert_array_equal(cohort.bounds, [0, 6, 12])
    np.testing.assert_allclose(cohort.weight[:6], MADE.sizes / MADE.sizes.sum())
    np.testing.assert_allclose(cohort.sum(cohort.weight), 1.0)


def weights(rule, size: int, *, seeds: int) -> np.ndarray:
    """(seed, client): what each client weighs in a cohort; zero where it is not in it."""
    out = np.zeros((seeds, MADE.num_clients))
    cohort = sample_cohort(
        [MADE] * seeds, size, rule, seeds=np.arange(seeds, dtype=np.uint64), round=3
    )
    out[cohort.run, cohort.client] = cohort.weight
    return out


def test_sampling_by_size_is_unbiased() -> None:
    """E[weight] = n_k / n: draws with replacement, each weighing 1 / M."""
    seen = weights("size", 3, seeds=10_000)
    share = MADE.sizes / MADE.sizes.sum()
    error = np.sqrt(share * (1 - share) / 3 / len(seen))
    assert (np.abs(seen.mean(0) - share) < 4 * error).all()
    np.testing.assert_allclose(seen.sum(1), 1.0)
    np.testing.assert_allclose(seen * 3, np.round(seen * 3), atol=1e-12)


def test_sampling_uniformly_takes_each_as_often_and_weighs_by_size() -> None:
    seen = weights("uniform", 3, seeds=10_000)
    taken = seen > 0
    assert (taken.sum(1) == 3).all()
    assert (np.abs(taken.mean(0) - 0.5) < 4 * np.sqrt(0.25 / len(seen))).all()
    held = MADE.sizes * taken
    np.testing.assert_allclose(seen, held / held.sum(1, keepdims=True))


def test_cohorts_are_sorted_and_new_each_round() -> None:
    seeds = np.arange(200, dtype=np.uint64)
    for rule in ("size", "uniform"):
        first, second = (sample_cohort([MADE] * 200, 2, rule, seeds=seeds, round=t) for t in (0, 1))
        again = sample_cohort([MADE] * 200, 2, rule, seeds=seeds, round=0)
        np.testing.assert_array_equal(first.client, again.client)
        assert not np.array_equal(first.client, second.client)
        for low, high in zip(first.bounds, first.bounds[1:], strict=False):
            assert (np.diff(first.client[low:high]) > 0).all()


def test_a_client_without_rows_is_never_drawn_by_size_and_never_weighs() -> None:
    offsets = np.array([0, 0, 5, 5, 9])
    made = replace(MADE, rows=MADE.rows[:9], offsets=offsets, keys=np.arange(4, dtype=np.uint64))
    seeds = np.arange(300, dtype=np.uint64)
    by_size = sample_cohort([made] * 300, 3, "size", seeds=seeds, round=0)
    assert set(by_size.client) == {1, 3}
    uniform = sample_cohort([made] * 300, 2, "uniform", seeds=seeds, round=0)
    assert (
        np.isfinite(uniform.weight).all() and (uniform.weight[uniform.client % 2 == 0] == 0).all()
    )
