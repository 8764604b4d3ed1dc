"""The numbers of the benchmark from decisions per row, against counts by plain loops."""

import math

import numpy as np
import pytest

from fedgft.bench.scores import Outcome, OutcomeCounter, count_outcome, stack_outcomes
from fedgft.bench.tracks import Datasheet, Track
from fedgft.data.dataset import Dataset
from fedgft.errors import FedgftError
from fedgft.metrics import get_metric

SHEET = Datasheet("generated", "none", "a row", "one", "two", "three", ())
SP = get_metric("sp")


def make_track(rows: int = 600, groups: int = 2, clients: int = 3) -> Track:
    rng = np.random.default_rng(1)
    group = rng.integers(-1, groups, rows)
    features = rng.normal(size=(rows, 2)).astype(np.float32)
    labels = (features[:, 0] + 0.6 * group + rng.normal(size=rows) > 0).astype(np.int64)
    names = tuple("abcd"[:groups])
    data = Dataset("tiny", features, labels, group, ("x", "z"), group_names=names)
    return Track("tiny", 1, "Tiny", lambda: data, SHEET, clients=clients, seeds=3)


def rate(decisions, labels, groups, rows, group, label) -> float:
    """The mean decision about the rows of a group, of one label or of all, by a plain loop."""
    total = number = 0.0
    for i in rows:
        if groups[i] == group and label in (None, labels[i]):
            total += decisions[i]
            number += 1
    return total / number if number else math.nan


def gap(metric: str, decisions, labels, groups, rows, num_groups: int) -> float:
    """The largest difference between groups by the definition of the metric."""
    spreads = []
    for label in {"sp": [None], "eop": [1], "eo": [0, 1]}[metric]:
        rates = [rate(decisions, labels, groups, rows, g, label) for g in range(num_groups)]
        spreads.append(max(rates) - min(rates) if not any(map(math.isnan, rates)) else math.nan)
    return math.nan if any(map(math.isnan, spreads)) else max(spreads)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("metric", ["sp", "eop", "eo"])
@pytest.mark.parametrize("kind", ["decisions", "coins"])
def test_accuracy_and_gaps_are_those_of_a_plain_loop(metric, groups, kind):
    track = make_track(groups=groups)
    split = track.split(1)
    data = track.load()
    rng = np.random.default_rng(5)
    decisions = rng.random(len(data))
    decisions = decisions if kind == "coins" else (decisions > 0.4).astype(float)
    found = count_outcome(split, decisions)
    parts = {"train": split.federation.rows, "inner": split.inner, "test": split.federation.test}
    for part, rows in parts.items():
        right = np.where(data.labels == 1, decisions, 1 - decisions)[rows].mean()
        assert found.accuracy(part) == pytest.approx(right)
        wanted = gap(metric, decisions, data.labels, data.groups, rows, groups)
        assert found.gap(get_metric(metric), part) == pytest.approx(wanted)
        assert found.sums(part).rows() == pytest.approx(len(rows))


def test_the_largest_local_gap_counts_sites_with_twenty_test_rows_in_every_group():
    track = make_track(rows=900, clients=4)
    split = track.split(0)
    data = track.load()
    decisions = (np.random.default_rng(2).random(len(data)) > 0.5).astype(float)
    gaps = {}
    for site in range(4):
        rows = [i for i in split.federation.test if split.owner[i] == site]
        if min(sum(data.groups[rows] == g) for g in (0, 1)) >= 20:
            gaps[site] = gap("sp", decisions, data.labels, data.groups, rows, 2)
    assert 0 < len(gaps) < 4  # the case tests both sides of the limit
    assert count_outcome(split, decisions).local_gap(SP) == pytest.approx(max(gaps.values()))


@pytest.mark.parametrize(("rows", "expected"), [(19, 0.1), (20, 1.0)])
def test_a_site_counts_from_twenty_rows_of_each_group_on(rows, expected):
    """Site 0 has 20 rows of each group and a gap of 0.1, site 1 `rows` of one and a gap of 1."""
    sites = np.zeros((2, 2, 3, 2))
    sites[0, 1, :2] = [[10, 10], [12, 8]]
    sites[1, 1, :2] = [[0, 50], [rows, 0]]
    whole = sites.sum(0)
    outcome = Outcome(train=whole, inner=whole, test=whole, sites=sites)
    assert outcome.local_gap(SP) == pytest.approx(expected)


def test_a_local_gap_without_a_large_site_is_not_estimable():
    track = make_track(rows=60)
    found = count_outcome(track.split(0), np.ones(60))
    assert math.isnan(float(found.local_gap(SP)))


def test_intervals_and_noise_floors_are_those_of_the_formulas():
    """Newcombe (1998) for two groups; sqrt(2 / pi) standard errors of a fair model."""
    track = make_track()
    split = track.split(0)
    data = track.load()
    decisions = (data.features[:, 1] > 0.2).astype(float)
    test = split.federation.test
    n = [np.sum(data.groups[test] == g) for g in (0, 1)]
    p = [decisions[test][data.groups[test] == g].mean() for g in (0, 1)]

    def wilson(share, rows):
        z = 1.959963984540054
        root = z * math.sqrt(share * (1 - share) / rows + z**2 / (4 * rows**2))
        middle = share + z**2 / (2 * rows)
        return (middle - root) / (1 + z**2 / rows), (middle + root) / (1 + z**2 / rows)

    high, low = (0, 1) if p[0] > p[1] else (1, 0)
    first, second = wilson(p[high], n[high]), wilson(p[low], n[low])
    difference = p[high] - p[low]
    below = difference - math.hypot(p[high] - first[0], second[1] - p[low])
    above = difference + math.hypot(first[1] - p[high], p[low] - second[0])
    found = count_outcome(split, decisions)
    assert found.interval(SP) == (pytest.approx(max(below, 0)), pytest.approx(above))
    pooled = (n[0] * p[0] + n[1] * p[1]) / sum(n)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n[0] + 1 / n[1]))
    assert found.floor(SP) == pytest.approx(math.sqrt(2 / math.pi) * error)


def test_an_empty_group_is_not_estimable():
    table = np.zeros((2, 3, 2))
    table[:, 0] = 10.0
    outcome = Outcome(train=table, inner=table, test=table, sites=table[None])
    for value in (outcome.gap(SP), outcome.floor(SP), outcome.local_gap(SP)):
        assert math.isnan(float(value))


def test_a_run_that_diverged_has_no_numbers_and_survives_json():
    split = make_track().split(0)
    counter = OutcomeCounter.of(split)
    good = counter.count(np.ones(600))
    lost = counter.count(np.full(600, np.nan))
    both = stack_outcomes([good, lost])
    again = Outcome.from_json(both.to_json())
    for name in ("train", "inner", "test", "sites"):
        np.testing.assert_array_equal(getattr(again, name), getattr(both, name))
    assert np.isnan(again.accuracy()).tolist() == [False, True]
    assert np.isnan(again.gap(SP)).tolist() == [False, True]
    assert isinstance(both.to_json()["train"][0][0][0][0], int)


@pytest.mark.parametrize(
    ("decisions", "word"),
    [
        (np.ones(599), "one number per row"),
        (np.full(600, 1.1), "between 0 and 1"),
        (np.where(np.arange(600) == 3, np.nan, 1.0), "NaN"),
    ],
)
def test_decisions_that_cannot_be_counted_are_refused(decisions, word):
    with pytest.raises(FedgftError, match=word) as found:
        count_outcome(make_track().split(0), decisions)
    assert found.value.field == "decisions"
