"""Several metrics at once, and the ways to combine many rates into one number."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedgft.algorithms import LinearizedPenalty
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, get_metric
from fedgft.metrics.metric import SPREADS, spread_gradient
from fedgft.sums import Sums

NAMES = ("sp", "eop", "eo", "predictive-parity", "acc", "fpr")


def torch_spread(statistics: torch.Tensor, spread: str) -> torch.Tensor:
    """The definitions in the table of spread.py, for autograd."""
    rates = statistics[0] / statistics[1]
    overall = statistics[0].sum(-1) / statistics[1].sum(-1)
    if spread == "range":
        return (rates.amax(-1) - rates.amin(-1)).amax()
    if spread == "deviation":
        return (rates - overall[:, None]).abs().amax()
    if spread == "squares":
        return ((rates - overall[:, None]) ** 2).sum().sqrt()
    return (2 * ((rates - rates.mean(-1, keepdim=True)) ** 2).sum()).sqrt()


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("conditions", [1, 2])
def test_gradients_are_those_of_autograd(spread: str, groups: int, conditions: int) -> None:
    rng = np.random.default_rng(groups)
    S = rng.uniform(0.1, 1.0, (2, conditions, groups))
    metric = CATALOG["sp"] if conditions == 1 else CATALOG["eo"]
    value, gradient = spread_gradient(metric, S, spread)
    leaf = torch.tensor(S, requires_grad=True)
    expected = torch_spread(leaf, spread)
    expected.backward()
    assert value == pytest.approx(expected.item())
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), atol=1e-12)


@settings(max_examples=50)
@given(S=arrays(float, (2, 1, 2), elements=st.floats(0.1, 1.0)))
def test_with_two_groups_they_are_one_thing(S) -> None:
    metric = CATALOG["sp"]
    (wide, by_range), (variance, by_variance) = (
        spread_gradient(metric, S, s) for s in ("range", "variance")
    )
    assert variance == pytest.approx(float(wide), abs=1e-12)
    if wide > 1e-6:
        np.testing.assert_allclose(by_variance, by_range, atol=1e-6)
    deviation, _ = spread_gradient(metric, S, "deviation")
    assert wide / 2 - 1e-12 <= deviation <= wide + 1e-12


@pytest.mark.parametrize("spread", SPREADS)
def test_runs_side_by_side_are_as_one_by_one(spread: str) -> None:
    runs = np.random.default_rng(0).uniform(0.1, 1.0, (4, 2, 2, 3))
    values, gradients = spread_gradient(CATALOG["eo"], runs, spread)
    for at, run in enumerate(runs):
        value, gradient = spread_gradient(CATALOG["eo"], run, spread)
        assert values[at] == value
        np.testing.assert_array_equal(gradients[at], gradient)


@pytest.mark.parametrize("spread", SPREADS)
def test_equal_rates_have_no_gradient(spread: str) -> None:
    S = np.stack((np.full((1, 3), 0.1), np.full((1, 3), 0.2)))
    value, gradient = spread_gradient(CATALOG["sp"], S, spread)
    assert value == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(gradient.sum(-1), 0, atol=1e-12)


def test_the_variance_pulls_every_group_and_the_range_two() -> None:
    S = np.stack((np.array([[0.1, 0.2, 0.4]]), np.full((1, 3), 0.5)))
    pulled = {
        s: (np.abs(spread_gradient(CATALOG["sp"], S, s)[1][0]) > 1e-12).sum()
        for s in ("range", "variance")
    }
    assert pulled == {"range": 2, "variance": 3}


@pytest.mark.parametrize("classes", [2, 3])
def test_several_metrics_are_their_conditions_together(classes: int) -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(classes), 90)
    labels = rng.integers(0, classes, 90)
    groups = rng.integers(0, 3, 90)
    tally = Sums.of(probs, labels, groups, num_groups=3)
    both = get_metric("sp+0.5*eop+2*predictive-parity")
    parts = [get_metric(n) for n in ("sp", "eop", "predictive-parity")]
    for kind in ("soft", "hard"):
        each = [tally.statistics(m, kind) for m in parts]
        np.testing.assert_allclose(tally.statistics(both, kind), np.concatenate(each, 1))
        assert tally.gap(both, kind) == pytest.approx(max(tally.gap(m, kind) for m in parts))
    count = len(both.conditions(classes))
    assert count == sum(len(m.conditions(classes)) for m in parts)
    assert both.classes(count) == classes
    own = len(parts[0].conditions(classes))
    np.testing.assert_array_equal(both.weights(count), np.repeat([1.0, 0.5, 2.0], own))
    assert not both.proper(classes)
    assert both.proper_conditions(classes).tolist() == [True] * 2 * own + [False] * own


def test_penalties_of_several_metrics_add_up() -> None:
    """v of the sum is the sum of the weighted v, condition by condition."""
    rng = np.random.default_rng(1)
    tally = Sums.of(
        rng.dirichlet([1, 1], 60), rng.integers(0, 2, 60), rng.integers(0, 2, 60), num_groups=2
    )
    both = get_metric("sp+0.5*eop")
    S = tally.statistics(both, "soft") / 60
    v = LinearizedPenalty(both, 3.0, "l2").cotangent(S, np.zeros_like(S))
    for at, (name, weight) in enumerate((("sp", 1.0), ("eop", 0.5))):
        one = LinearizedPenalty(get_metric(name), 3.0, "l2")
        own = S[:, at : at + 1]
        np.testing.assert_allclose(v[:, at : at + 1], weight * one.cotangent(own, 0 * own))


@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_classes_can_be_told_from_conditions(metric: str, classes: int) -> None:
    found = get_metric(metric)
    told = found.classes(len(found.conditions(classes)))
    assert told == (2 if metric == "acc" else classes)  # accuracy has one rate, whatever the label


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("spp", "'spp' is not known"),
        ("sp+sp", "twice"),
        ("x*sp", "'x' is no positive weight"),
        ("-1*sp", "no positive weight"),
        ("0*sp", "no positive weight"),
        ("sp+", r"'sp\+' is not known"),
        ("inf*sp", "no positive weight"),
        ("nan*sp+eop", "no positive weight"),
        ("9.9e-7*sp", "no positive weight"),
        ("1000000.5*sp", "no positive weight"),
    ],
)
def test_names_that_are_no_metrics(text: str, says: str) -> None:
    with pytest.raises(FedgftError, match=says):
        get_metric(text)


@pytest.mark.parametrize("weight", [1e-6, 1e6])
def test_weights_may_be_as_small_and_as_large_as_the_message_says(weight: float) -> None:
    assert get_metric(f"{weight!r}*sp").parts == ((CATALOG["sp"], weight),)


def test_names() -> None:
    assert get_metric("sp") is CATALOG["sp"]
    assert get_metric("sp + 0.5*eop").name == "sp+0.5*eop"
    assert get_metric("2*sp").parts == ((CATALOG["sp"], 2.0),)
    both = get_metric("sp+2*predictive-parity")
    assert both.title == "statistical parity and predictive parity"
    assert both.conditions(2) == ("sp: class 1", "predictive-parity: class 1")
    with pytest.raises(FedgftError) as caught:
        LinearizedPenalty(CATALOG["sp"], 1.0, spread="median")
    assert caught.value.field == "spread"
