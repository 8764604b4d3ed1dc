"""Federated scaling against numpy, and the synthetic population against its closed forms."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgft.data import Dataset, Federation
from fedgft.data.partition import iid, partition
from fedgft.data.scaling import Moments, moments, pooled, standardise
from fedgft.data.synthetic import known_gaps, synthetic
from fedgft.types import FedgftError


def numbers(n, d, *, seed):
    rng = np.random.default_rng(seed)
    return Dataset(
        name="numbers",
        features=rng.normal(3, 2, (n, d)).astype(np.float32),
        labels=rng.integers(2, size=n),
        groups=rng.integers(2, size=n),
        columns=tuple(f"x{j}" for j in range(d)),
    )


@given(st.integers(2, 60), st.integers(1, 4), st.integers(0, 10), st.data())
def test_moments_are_clients_sums(n, d, seed, data):
    made = iid(numbers(n, d, seed=seed), clients=data.draw(st.integers(1, n)), seed=seed)
    sent = moments(made)
    for k in range(made.num_clients):
        mine = made.dataset.features[made.client(k)].astype(np.float64)
        np.testing.assert_allclose(sent.sum[k], mine.sum(axis=0))
        np.testing.assert_allclose(sent.square[k], (mine**2).sum(axis=0))
    np.testing.assert_array_equal(sent.count, made.sizes)


@pytest.mark.parametrize("step", [8, 100, 1 << 24])
def test_scaling_equals_numpy(monkeypatch, step):
    monkeypatch.setattr("fedgft.data.scaling.CHUNK_BYTES", step)
    data = numbers(500, 3, seed=1).standardised()
    made = standardise(partition(data, clients=17, alpha=0.1, seed=3))
    train = data.features[made.rows].astype(np.float64)
    # sums of 350 numbers of order one, in another order than numpy's
    np.testing.assert_allclose(made.mean, train.mean(axis=0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(made.spread, train.std(axis=0), rtol=1e-12)


def test_empty_clients_and_constant_columns_do_no_harm():
    data = numbers(10, 2, seed=0)
    data.features[:, 1] = 0.1
    offsets = np.array([0, 0, 4, 4, 10, 10])
    made = Federation(data, np.arange(10, dtype=np.int32), offsets, np.empty(0, np.int32))
    sent = moments(made)
    assert (sent.sum[[0, 2, 4]] == 0).all()
    mean, spread = pooled(sent)
    np.testing.assert_allclose(mean, data.features.mean(axis=0, dtype=np.float64))
    assert spread[1] == 1
    merged = Moments(*(np.sum(part, axis=0, keepdims=True) for part in vars(sent).values()))
    np.testing.assert_allclose(pooled(merged), (mean, spread))


@pytest.mark.parametrize(("groups", "gap"), [(2, 0.3), (3, 0.5), (2, 0.0)])
def test_synthetic_gaps_are_the_known_ones(groups, gap):
    data = synthetic(rows=200_000, groups=groups, gap=gap, signal=0.8, seed=4)
    known = known_gaps(groups=groups, gap=gap, signal=0.8)
    rates = np.linspace((1 - gap) / 2, (1 + gap) / 2, groups)[data.groups]
    score = data.features[:, :8].sum(axis=1) / np.sqrt(8) * 1.6 + np.log(rates / (1 - rates))
    probs = 1 / (1 + np.exp(-score))
    yes = data.labels == 1

    def gap_of(values, keep):
        means = [values[keep & (data.groups == g)].mean() for g in range(groups)]
        return max(means) - min(means)

    everyone = np.ones(len(data), bool)
    # four standard errors of a difference of rates over at least 30,000 rows a group
    close = {"abs": 4 * np.sqrt(2 * 0.25 / 30_000)}
    assert gap_of(data.labels, everyone) == pytest.approx(known["label gap"], **close)
    soft, hard = known["soft statistical parity gap"], known["hard statistical parity gap"]
    assert gap_of(probs, everyone) == pytest.approx(soft, **close)
    assert gap_of(probs > 0.5, everyone) == pytest.approx(hard, **close)
    assert gap_of(probs > 0.5, yes) == pytest.approx(known["hard equal opportunity gap"], **close)


def test_synthetic_shape_and_encoder():
    data = synthetic(rows=50, features=3, groups=3, seed=1)
    assert data.columns == ("x0", "x1", "x2", "group=1", "group=2")
    raw = {f"x{j}": data.features[:, j] for j in range(3)}
    frame = pl.DataFrame({**raw, "group": [str(g) for g in data.groups]})
    np.testing.assert_array_equal(data.encoder.transform(frame), data.features)
    assert known_gaps()["hard statistical parity gap"] > 0.3
    for wrong in ({"groups": 1}, {"gap": 1.0}, {"signal": 0.0}, {"rows": 0}):
        with pytest.raises(FedgftError, match="synthetic data"):
            synthetic(**wrong)
