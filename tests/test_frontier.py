"""The frontier: its points, the choice of one of them, and the references."""

import inspect
import warnings
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from fedgft.algorithms import fedavg
from fedgft.data.dataset import standardize
from fedgft.data.partition import partition
from fedgft.engine import Settings, predict_proba, simulate
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from fedgft.study.cache import ResultCache
from fedgft.study.post_processing import apply_rules
from fedgft.study.tradeoff import (
    TradeoffPoint,
    best_within,
    check_fairlearn,
    choose_point,
    find_knee,
    fit_fairlearn,
    pareto_front,
    point_row,
    strength_grid,
    sweep_methods,
)
from fedgft.sums import Sums
from small_federation import SYNTHETIC, study

SP = CATALOG["sp"]
DATA = SYNTHETIC


def point(method: str, gap: float, right: float, strength: float = 1.0) -> TradeoffPoint:
    """Two groups of 1,000 rows whose decisions have this gap and this accuracy."""
    yes = np.array([500 + 500 * gap, 500 - 500 * gap])
    decision = np.zeros((1, 2, 3, 2))
    for g in range(2):  # labels are such that `right` of the rows agree with the decision
        decision[0, 1, g, 1] = right * yes[g]
        decision[0, 0, g, 1] = (1 - right) * yes[g]
        no = 1000 - yes[g]
        decision[0, 0, g, 0] = right * no
        decision[0, 1, g, 0] = (1 - right) * no
    tally = Sums(decision.sum(-1), decision, decision)
    return TradeoffPoint(method, strength, tally, tally)


FRONT = [
    point("fedgft", 0.0, 0.60),
    point("fedgft", 0.1, 0.79),
    point("fedgft", 0.2, 0.81),
    point("fedgft", 0.4, 0.85),
    point("fedgft", 0.3, 0.70),
]


def test_points_have_the_requested_accuracy_and_gap() -> None:
    for gap, right in product((0.0, 0.2), (0.6, 0.9)):
        assert point("x", gap, right).mean(SP, "test") == pytest.approx((right, gap))


def test_pareto_omits_dominated_points() -> None:
    assert pareto_front(FRONT, SP) == FRONT[:4]
    assert pareto_front([], SP) == []


def test_the_knee_is_farthest_above_the_chord() -> None:
    assert find_knee(FRONT, SP) is FRONT[1]
    assert find_knee(FRONT[:2], SP) is None
    straight = [point("fedgft", g, 0.6 + g) for g in (0.0, 0.1, 0.2)]
    assert find_knee([straight[0], point("fedgft", 0.1, 0.65), straight[2]], SP) is None  # it sags


def test_chosen_within_the_target_or_nearest_to_it() -> None:
    assert choose_point(FRONT, SP, 0.25) is FRONT[2]
    assert choose_point(FRONT, SP, 0.0) is FRONT[0]
    assert choose_point(FRONT[1:], SP, 0.01) is FRONT[1]
    assert choose_point(FRONT, SP, None) is FRONT[1]
    straight = [point("fedgft", g, 0.6 + g) for g in (0.2, 0.1)]
    assert choose_point(straight, SP, None) is straight[1]  # nothing bends: the fairest
    half = point("fedgft", 0.0, 0.9)  # good where it can be judged, and lost in another replicate
    lost = Sums(
        *(
            np.concatenate((a, np.nan * a))
            for a in (half.test.count, half.test.score, half.test.decision)
        )
    )
    half = replace(half, federation=lost, test=lost)
    assert choose_point([*FRONT, half], SP, 0.25) is FRONT[2]
    assert choose_point([half], SP, 0.25) is None
    better = point("thresholds", 0.0, 0.99)
    assert (
        choose_point([*FRONT, better], SP, 0.1) is FRONT[1]
    )  # it needs the group at decision time


def test_the_most_accurate_within_a_gap() -> None:
    assert best_within(FRONT, SP, 0.15) is FRONT[1]
    assert best_within(FRONT, SP, 0.9) is FRONT[3]
    assert best_within(FRONT[1:], SP, 0.05) is None  # fairer than it has ever been


def test_accuracy_is_not_traded_for_gaps_below_the_noise_floor() -> None:
    """On 2,000 rows chance alone shows about 1.8 points."""
    close = [point("fedgft", 0.0, 0.60), point("fedavg", 0.015, 0.90), point("fedgft", 0.3, 0.91)]
    assert pareto_front(close, SP) == close[1:]
    assert choose_point(close, SP, None) is close[1]


def test_a_target_is_among_what_is_swept() -> None:
    grid = strength_grid("fedgft-control", 5, widest=0.3, target=0.05)
    assert len(grid) == 5 and 0.05 in grid and grid == sorted(grid)
    assert max(strength_grid("fedgft-control", 5, widest=1.0)) < 1


def test_the_replicate_that_is_saved_meets_the_target() -> None:
    many = [point("fedgft", g, 0.7 + g) for g in (0.3, 0.1, 0.05)]
    stacked = Sums(
        *(
            np.concatenate([getattr(s.test, f) for s in many])
            for f in ("count", "score", "decision")
        )
    )
    three = replace(many[0], federation=stacked, test=stacked)
    assert three.choose_replicate(SP, 0.12) == 1  # the more accurate of the two within it
    assert three.choose_replicate(SP, 0.01) == 2  # none is: the fairest
    assert three.choose_replicate(SP, None) == 1  # nearest to the mean


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_scores_of_rows_add_up_to_the_tallies_of_the_engine(model: str) -> None:
    made = standardize(partition(DATA, clients=4, alpha=0.5, seed=0))
    settings = Settings(
        schedule="constant", state="reset", rounds=2, precision="fp64", batch_size=64
    )
    history = simulate([made], model, fedavg(), settings, seeds=[0], lr=0.03)
    probs = predict_proba(made, model, history.params[0], made.test)
    tally = Sums.of(probs, DATA.labels[made.test], DATA.groups[made.test], num_groups=2)
    np.testing.assert_allclose(tally.score, history.test.score[-1, 0], atol=1e-9)
    np.testing.assert_array_equal(tally.decision, history.test.decision[-1, 0])
    assert predict_proba(made, model, history.params[0], made.test[:0]).shape == (0, 2)


def test_thresholds_are_the_best_there_are() -> None:
    """Against every pair of thresholds on the histogram's grid."""
    lab = study(seeds=1)
    plain = lab.run(0.5, "fedavg", SP)
    tolerance = 0.03
    [(clients, test)] = apply_rules(lab, plain, "thresholds", SP, [tolerance])
    made = plain.federations[0]
    p = predict_proba(made, "logistic", plain.history.params[0], made.rows)[:, 1]
    y = DATA.labels[made.rows]
    a = DATA.groups[made.rows]
    grid = np.append(np.arange(400) / 400, 2.0)
    accept = [p[a == g][:, None] >= grid for g in (0, 1)]
    rate = [each.mean(0) for each in accept]
    right = [(each == (y[a == g] == 1)[:, None]).sum(0) for g, each in enumerate(accept)]
    allowed = np.abs(rate[0][:, None] - rate[1][None, :]) <= tolerance
    best = np.where(allowed, right[0][:, None] + right[1][None, :], 0).max() / len(y)
    assert clients.accuracy()[0] == pytest.approx(best)
    assert clients.gap(SP, "hard")[0] <= tolerance + 1e-12
    assert test.rows()[0] == len(made.test)


@pytest.mark.slow
def test_fairlearn_on_pooled_rows_is_fairlearn() -> None:
    """Tallies of its randomized decisions are the means of its own probabilities."""
    from fairlearn.reductions import DemographicParity, ExponentiatedGradient

    made = study(seeds=1).federations(0.5)[0]
    train, test = fit_fairlearn(made, SP, 0.02)
    x = (made.dataset.features - made.mean) / made.spread
    y = DATA.labels
    a = DATA.groups
    theirs = ExponentiatedGradient(
        LogisticRegression(max_iter=200),
        DemographicParity(difference_bound=0.02),
        eps=0.02,
        max_iter=20,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.fit(x[made.rows], y[made.rows], sensitive_features=a[made.rows])
    p = theirs._pmf_predict(x[made.test])[:, 1]
    right = np.where(y[made.test] == 1, p, 1 - p).mean()
    gap = abs(p[a[made.test] == 0].mean() - p[a[made.test] == 1].mean())
    assert test.accuracy() == pytest.approx(right, abs=1e-6)
    assert test.gap(SP, "hard") == pytest.approx(gap, abs=1e-6)
    assert train.gap(SP, "hard") < 0.05
    fitted, _ = fit_fairlearn(made, SP, None)
    assert fitted.gap(SP, "hard") < 0.02


def test_fits_are_kept_and_damaged_ones_made_anew(tmp_path, monkeypatch) -> None:
    lab = study(seeds=1)
    shelf = ResultCache(tmp_path)
    first = fit_fairlearn(lab.federations(0.5)[0], SP, None, shelf)
    [file] = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    other = fit_fairlearn(
        lab.federations(5.0)[0], SP, None, shelf
    )  # the same rows, dealt otherwise
    assert file.stat().st_mtime_ns == before
    for a, b in zip(first, other, strict=True):
        np.testing.assert_array_equal(a.decision, b.decision)
    fit_fairlearn(lab.federations(0.5)[0], CATALOG["eop"], None, shelf)
    assert len(list(tmp_path.iterdir())) == 2
    file.write_text(file.read_text().replace("1", "2"))
    again = fit_fairlearn(lab.federations(0.5)[0], SP, None, shelf)
    with monkeypatch.context() as patch:  # fitted by other code, it is another fit
        read = inspect.getsource
        patch.setattr(inspect, "getsource", lambda function: read(function) + "#")
        fit_fairlearn(lab.federations(0.5)[0], SP, None, shelf)
    assert len(list(tmp_path.iterdir())) == 3
    np.testing.assert_array_equal(again[0].decision, first[0].decision)


def test_metrics_and_classes_that_fairlearn_lacks_are_refused() -> None:
    check_fairlearn(SP, 2)
    with pytest.raises(FedgftError, match="no method for predictive-parity"):
        check_fairlearn(CATALOG["predictive-parity"], 2)
    with pytest.raises(FedgftError, match="with 3 classes"):
        check_fairlearn(SP, 3)


@pytest.mark.slow
def test_a_sweep_is_what_each_strength_is_alone() -> None:
    lab = study()
    points = sweep_methods(lab, SP, 0.5, ["fedgft-control", "fedgft", "thresholds"], points=3)
    assert [s.method for s in points] == [
        "fedavg",
        *["fedgft-control"] * 3,
        *["fedgft"] * 3,
        *["thresholds"] * 3,
    ]
    assert points[1].strength == 0
    line = point_row(lab, SP, 0.5, points[1])
    assert line["gap_hard"] == pytest.approx(points[1].mean(SP, "federation")[1])
    again = study().run(0.5, "fedgft-control", SP)  # its target is 0
    np.testing.assert_array_equal(again.history.params, points[1].result.history.params)
    assert point_row(lab, SP, 0.5, points[-1])["gap_soft"] is None
