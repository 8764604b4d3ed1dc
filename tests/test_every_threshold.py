"""The penalty that is fair at every threshold: its formula, its gradient, and who refuses it."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import fedgft
from fedgft.algorithms import METHODS, get_method, registry
from fedgft.algorithms.every_threshold import SMOOTHING, EveryThreshold
from fedgft.algorithms.loss_rules import SCORE_BINS
from fedgft.cli.options import Options, choose_method
from fedgft.data.dataset import Dataset, Federation
from fedgft.data.generated import synthetic
from fedgft.engine import Settings, simulate
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, get_metric
from fedgft.metrics.functions import gap
from fedgft.rules.adjustment import read_limits
from given_reports import Rows, follow
from small_federation import SGD, federation, run, several

LABELS = {"sp@all": (0, 1), "eop@all": (1,)}


def distance(scores: np.ndarray, y: np.ndarray, a: np.ndarray, labels: tuple) -> float:
    """2 sum_g int (F_g - Fbar)^2 dt, exactly: the shares are constant between two scores."""
    groups = range(int(a.max()) + 1)
    edges = np.concatenate(([0.0], np.sort(scores), [1.0]))
    total = 0.0
    for low, high in pairwise(edges):
        middle = (low + high) / 2
        share = []
        for g in groups:
            mine = [
                p
                for p, label, group in zip(scores, y, a, strict=True)
                if label in labels and group == g
            ]
            share.append(sum(p <= middle for p in mine) / len(mine))
        mean = sum(share) / len(share)
        total += 2 * sum((f - mean) ** 2 for f in share) * (high - low)
    return total


def rows_in_own_bins(groups: int, seed: int = 0) -> tuple[Rows, np.ndarray]:
    """Sixty rows, no two in one bin, so that the curve by bins is exact."""
    rng = np.random.default_rng(seed)
    scores = (rng.permutation(SCORE_BINS)[:60] + rng.uniform(0.2, 0.8, 60)) / SCORE_BINS
    y = rng.integers(0, 2, 60)
    a = rng.integers(0, groups, 60)
    a[:3] = -1
    return Rows(rng.integers(0, 3, 60), y, a, 3, groups), scores


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("name", LABELS)
def test_the_curve_is_the_derivative_of_the_distance(name: str, groups: int) -> None:
    rows, scores = rows_in_own_bins(groups)
    lam = 3.0
    rule = EveryThreshold(get_metric(name), lam)
    probs = np.stack((1 - scores, scores), axis=1)
    (terms,) = follow(rule, rows, [probs])
    for i in range(len(rows)):
        step = np.zeros(60)
        step[i] = 1e-4  # no score passes another one, so the distance is linear in each
        up, down = (distance(scores + s, rows.y, rows.a, LABELS[name]) for s in (step, -step))
        expected = SMOOTHING * lam * 60 * (up - down) / 2e-4
        at = int(scores[i] * SCORE_BINS)
        found = terms.curve[rows.client[i], rows.y[i], rows.a[i], at]
        assert found == pytest.approx(expected, abs=1e-8)
    assert (terms.curve[:, :, -1] == 0).all()


def test_two_groups_and_the_energy_distance() -> None:
    """With two groups: int (F_0 - F_1)^2 = E|p - q| - E|p - p'| / 2 - E|q - q'| / 2."""
    rows, scores = rows_in_own_bins(2)
    p, q = (scores[rows.a == g] for g in (0, 1))

    def apart(one: np.ndarray, two: np.ndarray) -> float:
        return float(np.abs(one[:, None] - two).mean())

    energy = apart(p, q) - apart(p, p) / 2 - apart(q, q) / 2
    assert distance(scores, rows.y, rows.a, (0, 1)) == pytest.approx(energy, abs=1e-12)


def test_curves_are_smoothed() -> None:
    """After t equal models, the curve has the share 1 - (1 - SMOOTHING)^t of its final height."""
    rows, scores = rows_in_own_bins(2)
    probs = np.stack((1 - scores, scores), axis=1)
    curves = [t.curve for t in follow(EveryThreshold(get_metric("sp@all"), 1.0), rows, [probs] * 4)]
    for t, curve in enumerate(curves):
        share = (1 - (1 - SMOOTHING) ** (t + 1)) / SMOOTHING
        np.testing.assert_allclose(curve, share * curves[0], rtol=1e-12)


@pytest.mark.parametrize("executor", ["fused", "sequential"])
@pytest.mark.parametrize("name", LABELS)
def test_a_step_on_the_distance(name: str, executor: str) -> None:
    """One step of all clients is a step on cross-entropy plus SMOOTHING lam J.

    The rows start with scores in bins of their own, where the curve by bins is exact.
    """
    rows, scores = rows_in_own_bins(2)
    order = np.argsort(rows.client, kind="stable")
    y, a = rows.y[order], rows.a[order]
    x = np.stack((np.log(scores / (1 - scores))[order], np.linspace(-1, 1, 60)), axis=1)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(rows.client)))).astype(np.int64)
    data = Dataset("bins", x, y, a, ("x0", "x1"), ("0", "1"), ("0", "1"))
    made = Federation(data, np.arange(60, dtype=np.int32), offsets, np.arange(9, dtype=np.int32))
    start = np.array([-0.5, 0.0, 0.5, 0.0, 0.0, 0.0])
    lam = 4.0

    def loss(params: np.ndarray) -> float:
        weight = params[:4].reshape(2, 2)
        z = x @ (weight[1] - weight[0]) + params[5] - params[4]
        p = 1 / (1 + np.exp(-z))
        entropy = -np.log(np.where(y == 1, p, 1 - p)).mean()
        return entropy + SMOOTHING * lam * distance(p, y, a, LABELS[name])

    expected = np.zeros(6)
    for i in range(6):
        move = np.zeros(6)
        move[i] = 1e-6
        expected[i] = (loss(start + move) - loss(start - move)) / 2e-6
    method = get_method("fedgft", get_metric(name), lam)
    options = {"rounds": 1, "batch_size": 100, "optimizer": SGD, "lr": 0.05}
    found = run(made, method, executor=executor, init=start, **options).params[0]
    np.testing.assert_allclose((start - found) / 0.05, expected, rtol=0, atol=1e-7)


def test_bins_add_little_error() -> None:
    """Between the curve by bins and the exact one lies at most half of the rows of a bin."""
    rng = np.random.default_rng(3)
    n = 2000
    a, y = rng.integers(0, 2, n), rng.integers(0, 2, n)
    scores = 1 / (1 + np.exp(-rng.normal(0.8 * a, 1, n)))
    rows = Rows(np.zeros(n, np.int64), y, a, 1, 2)
    probs = np.stack((1 - scores, scores), axis=1)
    (terms,) = follow(EveryThreshold(get_metric("sp@all"), 1.0), rows, [probs])
    bins = (scores * SCORE_BINS).astype(int)
    largest = 0.0
    for i in range(0, n, 40):
        share = [(scores[a == g] <= scores[i]).mean() for g in (0, 1)]
        exact = -4 * n / (a == a[i]).sum() * (share[a[i]] - np.mean(share))
        found = terms.curve[0, y[i], a[i], bins[i]] / SMOOTHING
        bound = sum((bins[a == g] == bins[i]).mean() for g in (0, 1))
        assert abs(found - exact) <= 4 * n / (a == a[i]).sum() * bound
        largest = max(largest, abs(found - exact))
    assert largest > 0


@pytest.mark.slow
def test_training_lowers_the_distance_at_every_threshold() -> None:
    data = synthetic(rows=4000, seed=0)
    made = fedgft.standardize(fedgft.partition(data, clients=4, seed=0))
    settings = Settings(rounds=40, batch_size=64)
    found = {}
    for lam in (0.0, 20.0):
        method = get_method("fedgft", get_metric("sp@all"), lam)
        history = simulate([made], "logistic", method, settings, seeds=[0], lr=0.02)
        rows = made.rows
        x = (data.features[rows] - made.mean) / made.spread
        weight = history.params[0][:-2].reshape(2, -1)
        z = x @ (weight[1] - weight[0]) + history.params[0][-1] - history.params[0][-2]
        score, group = 1 / (1 + np.exp(-z)), data.groups[rows]
        edges = np.linspace(0.05, 0.95, 19)
        rates = [[(score[group == g] > t).mean() for t in edges] for g in (0, 1)]
        found[lam] = np.abs(np.subtract(*rates)).max()
    assert found[20.0] < 0.5 * found[0.0]


def test_a_group_without_a_row_changes_nothing() -> None:
    rows, scores = rows_in_own_bins(2)
    lacking = replace(rows, a=np.where(rows.a == 1, 0, rows.a))
    probs = np.stack((1 - scores, scores), axis=1)
    (terms,) = follow(EveryThreshold(get_metric("sp@all"), 3.0), lacking, [probs])
    assert (terms.curve == 0).all()


# Names, and who refuses them


def test_names() -> None:
    for name, part in (("sp@all", "sp"), ("eop@all", "eop")):
        metric = get_metric(name)
        assert metric.every_threshold and metric.name == name and metric.title.endswith("threshold")
        assert metric == get_metric(metric) != CATALOG[part]
        assert not CATALOG[part].every_threshold
    assert get_metric("statistical_parity@all") == get_metric("sp@all")
    for wrong in ("eo@all", "acc@all", "sp@0.5", "sp@", "@all", "nothing@all"):
        with pytest.raises(FedgftError, match="sp@all, eop@all") as caught:
            get_metric(wrong)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["sp@all+eop", "eop+0.5*sp@all", "sp@all+eop@all", "2*sp@all"])
def test_it_is_not_combined(text: str) -> None:
    with pytest.raises(FedgftError, match="@all") as caught:
        get_metric(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_only_fedgft_trains_for_it(method: str) -> None:
    made = federation()
    if method in ("fedgft", "fedavg", "lrw"):
        fedgft.simulate(made, "logistic", method, metric="sp@all", rounds=1)
        return
    with pytest.raises(FedgftError, match=f"for the method fedgft, and this one is {method}") as e:
        fedgft.simulate(made, "logistic", method, metric="sp@all", rounds=1)
    assert e.value.field == "metric"


@pytest.mark.parametrize(
    "make",
    [
        registry.lft,
        registry.fairfed,
        registry.fedgft_control,
        registry.fairgrad,
        registry.fedfact,
        registry.puffle,
        registry.fade,
        registry.fairtrade,
        registry.fedfb,
        registry.agnostic_fair,
    ],
)
def test_methods_for_one_threshold_refuse_it(make) -> None:
    with pytest.raises(FedgftError, match="sp@all") as caught:
        make("sp@all")
    assert caught.value.field == "metric" and "\n" not in str(caught.value)


def test_every_reader_of_one_threshold_refuses_it() -> None:
    """Penalties of own loops, boosters, gaps and rules."""
    rng = np.random.default_rng(0)
    y, a, p = rng.integers(0, 2, 60), rng.integers(0, 2, 60), rng.uniform(size=60)
    calls = [
        lambda: fedgft.Penalty("sp@all", 1.0),
        lambda: fedgft.Penalty("sp@all", target=0.1),
        lambda: fedgft.price_objective("sp@all", lam=1.0, y=y, sensitive_features=a, lr=0.1),
        lambda: gap("sp@all", y, p, sensitive_features=a),
        lambda: read_limits("target", {"sp@all": 0.02}),
        lambda: fedgft.FairClassifier("sp@all").fit(p[:, None], y, sensitive_features=a),
    ]
    for call in calls:
        with pytest.raises(FedgftError, match=r"sp@all is (only )?for") as caught:
            call()
        assert caught.value.field == "metric" and "\n" not in str(caught.value)


def test_a_rule_for_every_threshold_needs_such_a_metric() -> None:
    for name in ("sp", "eo", "sp+eop"):
        with pytest.raises(FedgftError, match=r"sp@all and eop@all, not") as caught:
            EveryThreshold(get_metric(name), 1.0)
        assert caught.value.field == "metric"


def test_the_command_chooses_fedgft_for_it() -> None:
    assert choose_method(None, Options(), "sp@all") == "fedgft"
    assert choose_method(None, Options(), "sp") == "fedgft-control"
    assert choose_method(None, Options(target=0.02), "sp@all") == "fedgft-control"  # refused later


def test_more_than_two_classes_are_refused() -> None:
    method = get_method("fedgft", get_metric("sp@all"), 1.0)
    with pytest.raises(FedgftError, match="sp@all is for two classes, and there are 3"):
        run(several(2, 3), method, model="mlp")
