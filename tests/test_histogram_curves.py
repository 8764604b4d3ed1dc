"""Curves, sweeps and thresholds from histograms, compared with those from rows."""

import math
from itertools import product

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fairlearn_reference import estimable, fairlearn
from fedgft.auditing import audit, measure
from fedgft.auditing.thresholds import compute_curves, sweep_thresholds


@pytest.fixture(scope="module")
def scored():
    generator = np.random.default_rng(3)
    n = 4000
    g = generator.choice(["a", "b"], n)
    y = generator.integers(0, 2, n)
    p = np.clip(0.25 * y + 0.1 * (g == "a") + 0.6 * generator.random(n), 0, 1)
    parts = [measure(y[i::4], p[i::4], sensitive_features=g[i::4], site=str(i)) for i in range(4)]
    return y, p, g, audit(parts, adjust_to={"sp": 0.02, "eop": 0.02, "eo": 0.05})


def test_curves_are_exact_at_the_edges_and_bounded_between(scored):
    y, p, g, made = scored
    for curve in compute_curves(made.view):
        mine = g == curve.group
        for t in (0.1, 0.29, 0.5, 0.83):
            i = round(100 * t)
            assert curve.tpr[i] == pytest.approx((p[mine & (y == 1)] >= i / 100).mean(), abs=1e-12)
            assert curve.fpr[i] == pytest.approx((p[mine & (y == 0)] >= i / 100).mean(), abs=1e-12)
        assert abs(curve.auc - roc_auc_score(y[mine], p[mine])) <= curve.bin_error < 0.01
        for point in curve.calibration:
            if point["n"] < 10:
                assert point["low"] is None  # nothing is claimed
            else:
                assert point["low"] - 1e-12 <= point["rate"] <= point["high"] + 1e-12
        assert sum(point["n"] for point in curve.calibration) == mine.sum()


@pytest.mark.slow
def test_sweep_is_fairlearn_at_every_threshold(scored):
    y, p, g, made = scored
    found = sweep_thresholds(made.view)
    for i in range(5, 95, 10):
        d = (p >= i / 100).astype(int)
        assert found.accuracy[i] == pytest.approx((d == y).mean(), abs=1e-12)
        for name, (difference, _) in fairlearn(y, d, g).items():
            if estimable(name, y, d, g):
                assert found.gaps[name][i] == pytest.approx(difference, abs=1e-12)


@pytest.mark.slow
def test_group_thresholds_meet_their_metric_on_the_rows_at_least_cost(scored):
    y, p, g, made = scored
    for found in made.to_dict()["adjusted"]:
        d = (p >= np.vectorize(found["thresholds"].get)(g)).astype(int)
        reference = fairlearn(y, d, g)[found["metric"]][0]
        assert found["feasible"] and reference == pytest.approx(found["gap"], abs=1e-12)
        assert found["gap"] <= found["tolerance"] + 1e-12
        assert (d == y).mean() == pytest.approx(found["accuracy"], abs=1e-12)
        # all pairs of thresholds there are: none is better
        assert found["accuracy"] == pytest.approx(best_pair(y, p, g, found), abs=1e-12)
    assert any("need the group of every person" in text for text in made.warnings)


def best_pair(y, p, g, found) -> float:
    wanted = {"sp": [y >= 0], "eop": [y == 1], "eo": [y == 0, y == 1]}[found["metric"]]
    edges = np.append(np.arange(100) / 100, 2.0)
    best = 0.0
    table = {}
    for group in ("a", "b"):
        mine = g == group
        d = p[mine][None, :] >= edges[:, None]
        table[group] = [d[:, rows[mine]].mean(1) for rows in wanted], (d == y[mine]).sum(1)
    for i in range(101):
        apart = [np.abs(a[i] - b) for a, b in zip(table["a"][0], table["b"][0], strict=True)]
        near = np.max(apart, axis=0) <= found["tolerance"] + 1e-12
        if near.any():
            best = max(best, (table["a"][1][i] + table["b"][1][near].max()) / len(y))
    return best


def test_what_no_thresholds_can_do_is_said():
    """Precision of three groups cannot be made equal: the smallest gap there is."""
    generator = np.random.default_rng(5)
    n = 300
    g = generator.choice(["a", "b", "c"], n)
    y = generator.integers(0, 2, n)
    p = np.clip(0.3 * y * (g != "a") + 0.7 * generator.random(n), 0, 1)
    made = audit(
        measure(y, p, sensitive_features=g, site="n", bins=10), adjust_to={"predictive-parity": 0.0}
    )
    (found,) = made.to_dict()["adjusted"]
    best = 1.0
    for edges in product(np.arange(10) / 10, repeat=3):
        d = p >= np.vectorize(dict(zip("abc", edges, strict=True)).get)(g)
        now = (p >= 0.5).mean()
        if not 0.1 * min(now, 1 - now) <= d.mean() <= 1 - 0.1 * min(now, 1 - now):
            continue  # all alike
        rates = [y[d & (g == k)].mean() if (d & (g == k)).any() else np.nan for k in "abc"]
        best = np.nanmin([best, np.ptp(rates)])
    assert not found["feasible"] and found["gap"] == pytest.approx(best, abs=0.0011)
    assert "the smallest gap there is" in made.to_markdown()


def test_a_score_of_one_reaches_a_threshold_of_one():
    groups = ["a", "a", "b", "b"] * 10
    site = measure([1, 0] * 20, None, scores=np.ones(40), threshold=1.0, sensitive_features=groups)
    made = audit(site, adjust_to={"fpr": 0.0})
    assert made.to_dict()["accuracy"]["rate"] == 0.5
    found = sweep_thresholds(made.view)
    assert found.thresholds[-1] == 0.99 and found.accuracy[-1] == 0.5


def test_scores_have_their_own_gaps(scored):
    _, p, g, made = scored
    found = made.to_dict()["scores"]
    means = [p[g == group].mean() for group in "ab"]
    assert found["sp"]["gap"] == pytest.approx(abs(means[0] - means[1]), abs=1e-9)
    spread = [p[g == group].std() / math.sqrt((g == group).sum()) for group in "ab"]
    half = 1.96 * math.hypot(*spread)
    assert found["sp"]["high"] - found["sp"]["gap"] == pytest.approx(half, rel=0.01)  # bins
