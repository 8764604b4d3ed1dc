"""Laws of every metric of the catalog, for two and three classes and groups."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG, Metric, get_metric, price
from fedgft.metrics.catalog import LONG_NAMES
from fedgft.sums import Sums, concatenate, stack

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # rounding of a few hundred float64 additions

every_metric = pytest.mark.parametrize("metric", CATALOG.values(), ids=CATALOG.keys())
every_shape = pytest.mark.parametrize(
    ("classes", "num_groups"), [(2, 2), (2, 3), (3, 2), (3, 3)], ids=lambda n: str(n)
)


@dataclass(frozen=True)
class Rows:
    """Labels and groups as indices (-1: not recorded), and the scores of each class."""

    probs: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    num_groups: int

    def __getitem__(self, index) -> "Rows":
        return Rows(self.probs[index], self.labels[index], self.groups[index], self.num_groups)

    def encoded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a metric takes: scores, and one-hot labels and groups."""
        groups = np.eye(self.num_groups + 1)[self.groups][:, :-1]
        return self.probs, np.eye(self.probs.shape[1])[self.labels], groups

    def decided(self) -> "Rows":
        return replace(self, probs=np.eye(self.probs.shape[1])[self.probs.argmax(1)])

    def tally(self) -> Sums:
        return Sums.of(self.probs, self.labels, self.groups, num_groups=self.num_groups)


def random_rows(classes: int, num_groups: int, *, rows: int = 400, seed: int = 0) -> Rows:
    """Enough rows for every cell of label, group and decision to be there."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=rows)
    groups = rng.integers(num_groups, size=rows)
    bias = rng.dirichlet(np.ones(classes), (classes, num_groups))[labels, groups]
    return Rows((rng.dirichlet(np.ones(classes), rows) + bias) / 2, labels, groups, num_groups)


@st.composite
def any_rows(draw, classes: int = 3, num_groups: int = 3) -> Rows:
    n = draw(st.integers(1, 25))
    raw = draw(arrays(float, (n, classes), elements=st.floats(0.01, 1)))
    labels = draw(arrays(np.int64, n, elements=st.integers(0, classes - 1)))
    groups = draw(arrays(np.int64, n, elements=st.integers(-1, num_groups - 1)))
    return Rows(raw / raw.sum(1, keepdims=True), labels, groups, num_groups)


def gap(metric: Metric, rows: Rows):
    return metric.readout(metric.statistics(*rows.encoded()).sum(0))


@pytest.mark.slow
@every_metric
@settings(max_examples=40)
@given(rows=any_rows(), data=st.data())
def test_statistics_and_tallies_add_up_over_any_split(metric, rows, data):
    owner = data.draw(arrays(np.int64, len(rows.labels), elements=st.integers(0, 3)))
    parts = [rows[owner == k] for k in range(4)]  # some may be empty
    whole = metric.statistics(*rows.encoded()).sum(0)
    summed = sum(metric.statistics(*part.encoded()).sum(0) for part in parts)
    np.testing.assert_allclose(summed, whole, **EXACT)
    tally = stack([part.tally() for part in parts]).sum()
    added = parts[0].tally() + parts[1].tally() + parts[2].tally() + parts[3].tally()
    for name in ("count", "score", "decision"):
        np.testing.assert_allclose(getattr(added, name), getattr(rows.tally(), name), **EXACT)
    np.testing.assert_allclose(tally.statistics(metric, "soft"), whole, **EXACT)
    np.testing.assert_allclose(tally.gap(metric, "soft"), gap(metric, rows), rtol=1e-9, atol=1e-9)


@every_metric
@settings(max_examples=40)
@given(rows=any_rows(), data=st.data())
def test_order_of_rows_and_names_of_groups_do_not_matter(metric, rows, data):
    order = data.draw(st.permutations(range(len(rows.labels))))
    names = data.draw(st.permutations(range(rows.num_groups)))
    renamed = rows[list(order)]
    renamed = replace(renamed, groups=np.array([*names, -1])[renamed.groups])
    np.testing.assert_allclose(gap(metric, renamed), gap(metric, rows), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@every_metric
@settings(max_examples=40)
@given(rows=any_rows(), padding=any_rows())
def test_rows_without_a_group_change_nothing(metric, rows, padding):
    nowhere = replace(padding, groups=np.full_like(padding.groups, -1))
    np.testing.assert_array_equal(metric.statistics(*nowhere.encoded()), 0.0)
    padded = rows.tally() + nowhere.tally()
    np.testing.assert_array_equal(padded.gap(metric, "soft"), rows.tally().gap(metric, "soft"))


@every_metric
@settings(max_examples=40)
@given(rows=any_rows())
def test_gap_lies_between_zero_and_one(metric, rows):
    for value in (gap(metric, rows), gap(metric, rows.decided())):
        assert np.isnan(value) or -1e-12 <= value <= 1 + 1e-12


@every_metric
@every_shape
def test_copies_of_one_group_are_treated_alike(metric, classes, num_groups):
    rows = random_rows(classes, 1)
    probs = np.tile(rows.probs, (num_groups, 1))
    labels = np.tile(rows.labels, num_groups)
    groups = np.repeat(np.arange(num_groups), len(rows.labels))
    assert gap(metric, Rows(probs, labels, groups, num_groups)) == pytest.approx(0, abs=1e-13)


def compared(classes):
    """The positive class of two, or every class against the rest."""
    return [1] if classes == 2 else range(classes)


EVENTS = {  # name -> for each condition: outcome, event; y the label, z the decision
    "sp": lambda m: [(lambda y, z, c=c: z == c, lambda y, z: True) for c in compared(m)],
    "eop": lambda m: [(lambda y, z, c=c: z == c, lambda y, z, c=c: y == c) for c in compared(m)],
    "eo": lambda m: [
        (lambda y, z, c=c: z == c, lambda y, z, k=k: y == k) for k in range(m) for c in compared(m)
    ],
    "predictive-parity": lambda m: [
        (lambda y, z, c=c: y == c, lambda y, z, c=c: z == c) for c in compared(m)
    ],
    "acc": lambda m: [(lambda y, z: z == y, lambda y, z: True)],
    "fpr": lambda m: [(lambda y, z, c=c: z == c, lambda y, z, c=c: y != c) for c in compared(m)],
}


@every_metric
@every_shape
def test_hard_gap_equals_counting_rows_one_by_one(metric, classes, num_groups):
    rows = random_rows(classes, num_groups)
    gaps = []
    counts = []
    decisions = rows.probs.argmax(1)
    for outcome, event in EVENTS[metric.name](classes):
        rates = []
        for g in range(num_groups):
            mine = [
                (y, z)
                for y, z, group in zip(rows.labels, decisions, rows.groups, strict=True)
                if group == g and event(y, z)
            ]
            counts.append((sum(outcome(y, z) for y, z in mine), len(mine)))
            rates.append(counts[-1][0] / counts[-1][1])
        gaps.append(max(rates) - min(rates))
    assert len(metric.conditions(classes)) == len(gaps)
    assert rows.tally().gap(metric, "hard") == pytest.approx(max(gaps), abs=1e-13)
    counted = np.reshape(counts, (len(gaps), num_groups, 2))
    found = rows.tally().statistics(metric, "hard")
    np.testing.assert_array_equal(np.moveaxis(found, 0, -1), counted)  # intervals need the rows
    worst = metric.worst(rows.tally().statistics(metric, "hard"))
    assert worst.condition == np.argmax(gaps)


@every_metric
@every_shape
def test_tally_carries_the_statistics_of_the_rows(metric, classes, num_groups):
    rows = random_rows(classes, num_groups)
    unknown = replace(rows, groups=np.where(np.arange(400) % 5 == 0, -1, rows.groups))
    for kind, used in (("soft", unknown), ("hard", unknown.decided())):
        expected = metric.statistics(*used.encoded()).sum(0)
        np.testing.assert_allclose(unknown.tally().statistics(metric, kind), expected, **EXACT)
    right = np.mean(unknown.probs.argmax(1) == unknown.labels)
    assert unknown.tally().accuracy() == pytest.approx(right)
    assert unknown.tally().rows() == 400


@every_metric
@every_shape
def test_numpy_and_torch_give_the_same(metric, classes, num_groups):
    rows = random_rows(classes, num_groups)
    statistics = metric.statistics(*rows.encoded())
    tensors = metric.statistics(*(torch.tensor(x) for x in rows.encoded()))
    np.testing.assert_array_equal(tensors.numpy(), statistics)
    mean = statistics.mean(0)
    assert metric.readout(torch.tensor(mean)).item() == metric.readout(mean)


@every_metric
@every_shape
def test_gradient_of_the_readout(metric, classes, num_groups):
    """`Metric.gradient` = autograd = finite differences."""
    mean = metric.statistics(*random_rows(classes, num_groups).encoded()).mean(0)
    tops = np.sort(np.ptp(metric.rates(mean), axis=-1))[::-1]
    assert len(tops) == 1 or tops[0] - tops[1] > 1e-4, "a tie: no gradient to compare"
    point = torch.tensor(mean, requires_grad=True)
    (slope,) = torch.autograd.grad(metric.readout(point), point)
    np.testing.assert_allclose(metric.gradient(mean), slope.numpy(), **EXACT)
    assert torch.autograd.gradcheck(metric.readout, point)
    runs = np.stack((mean, mean[..., ::-1]))  # leading axes go through
    np.testing.assert_array_equal(metric.gradient(runs)[0], metric.gradient(mean))


@every_metric
def test_gradient_is_zero_where_all_rates_are_equal(metric):
    conditions = len(metric.conditions(2))
    equal = np.stack((np.full((conditions, 3), 0.1), np.full((conditions, 3), 0.4)))
    np.testing.assert_array_equal(metric.gradient(equal), 0.0)


@every_metric
@every_shape
def test_price_is_the_slope_of_a_row_in_its_scores(metric, classes, num_groups):
    rows = random_rows(classes, num_groups, rows=60)
    rows = replace(rows, groups=np.where(np.arange(60) % 4 == 0, -1, rows.groups))
    probs, labels, groups = (torch.tensor(x) for x in rows.encoded())
    cotangent = np.random.default_rng(1).normal(size=metric.statistics(*rows.encoded()).shape[1:])
    probs.requires_grad_()
    total = (metric.statistics(probs, labels, groups) * torch.tensor(cotangent)).sum()
    (expected,) = torch.autograd.grad(total, probs, allow_unused=True, materialize_grads=True)
    table = price(metric, cotangent, classes)
    np.testing.assert_allclose(table[rows.labels, rows.groups], expected.numpy(), **EXACT)


@every_metric
def test_empty_group_has_no_gap(metric):
    """Never 0: that would read as fair."""
    rows = replace(random_rows(2, 2), num_groups=3)
    statistics = metric.statistics(*rows.encoded()).mean(0)
    assert np.isnan(metric.readout(statistics))
    assert metric.readout(torch.tensor(statistics)).isnan()
    assert np.isnan(metric.gradient(statistics)).any()


@every_metric
def test_sums_of_no_rows_are_zero(metric):
    none = random_rows(3, 2)[:0]
    assert metric.statistics(*none.encoded()).shape == (0, 2, len(metric.conditions(3)), 2)
    np.testing.assert_array_equal(none.tally().statistics(metric, "soft"), 0.0)


def test_a_rate_without_rows_makes_no_noise_even_where_noise_made_a_numerator():
    """Private statistics may have a numerator and no denominator."""
    noisy = np.array([[[0.3, 0.2]], [[0.0, 0.4]]])
    assert CATALOG["sp"].rates(noisy).tolist() == [[np.inf, 0.5]]
    slope = CATALOG["sp"].through_rates(np.array([[1.0, 0.0]]), noisy)
    assert np.isinf(slope[:, 0, 0]).all() and (slope[:, 0, 1] == 0).all()


def test_what_metrics_and_their_conditions_are_called():
    assert {name: metric.title for name, metric in CATALOG.items()} == {
        "sp": "statistical parity",
        "eop": "equal opportunity",
        "eo": "equalized odds",
        "predictive-parity": "predictive parity",
        "acc": "accuracy parity",
        "fpr": "false-positive-rate parity",
    }
    assert CATALOG["acc"].conditions(3) == ("all rows",)
    assert CATALOG["sp"].conditions(2) == ("class 1",)
    assert CATALOG["fpr"].conditions(3) == ("class 0", "class 1", "class 2")
    assert CATALOG["eo"].conditions(2) == ("class 1 given label 0", "class 1 given label 1")


def test_tallies_of_several_runs():
    """The first axis is summed unless another is named; joined ones follow each other."""
    each = [random_rows(3, 2, rows=50, seed=seed).tally() for seed in range(4)]
    runs = stack([stack(each[:2]), stack(each[2:])])
    np.testing.assert_array_equal(runs.sum().count[1], (each[1] + each[3]).count)
    np.testing.assert_array_equal(runs.sum(1).score[1], (each[2] + each[3]).score)
    np.testing.assert_array_equal(runs.rows(), np.full((2, 2), 50.0))
    assert runs.accuracy()[1, 0] == each[2].accuracy()
    joined = concatenate([stack(each[:2]), stack(each[2:])])
    for at, tally in enumerate(each):
        for name in ("count", "score", "decision"):
            np.testing.assert_array_equal(getattr(joined, name)[at], getattr(tally, name))
    empty = each[0].map(np.zeros_like)
    assert np.isnan(empty.accuracy())


def test_runs_side_by_side_have_the_gaps_they_have_alone():
    each = [random_rows(3, 3, seed=seed).tally() for seed in range(6)]
    runs = stack([stack(each[:3]), stack(each[3:])])
    for metric in CATALOG.values():
        statistics = runs.statistics(metric, "hard")
        gaps = metric.readout(statistics)
        worst = metric.worst(statistics)
        gradient = metric.gradient(statistics)
        for at, tally in zip(np.ndindex(2, 3), each, strict=True):
            own = tally.statistics(metric, "hard")
            assert gaps[at] == metric.readout(own)
            assert [int(x[at]) for x in worst] == [int(x) for x in metric.worst(own)]
            np.testing.assert_array_equal(gradient[at], metric.gradient(own))


@pytest.mark.parametrize("classes", [2, 3])
def test_only_predictive_parity_is_not_proper(classes):
    assert [name for name, m in CATALOG.items() if not m.proper(classes)] == ["predictive-parity"]
    assert [m.proper() for m in CATALOG.values()] == [m.proper(2) for m in CATALOG.values()]


def test_a_metric_that_is_not_affine_says_so():
    squared = Metric("sq", "squares", lambda p, y: p[:, 1:] ** 2, lambda p, y: y[:, 1:])
    with pytest.raises(FedgftError, match="'sq' is not affine"):
        squared.affine(2)


def test_a_metric_names_as_many_rates_as_it_compares():
    """Two of three classes: what is left out by default is a name for the third."""
    few = Metric("few", "all but the first", lambda p, y: p[:, 1:])
    few.affine(2)
    with pytest.raises(FedgftError, match=r"'few' compares 2 rates .* 3 classes, .* name 3"):
        few.affine(3)


def test_unknown_metric_names_the_known_ones():
    assert get_metric("sp") is CATALOG["sp"]
    assert get_metric(CATALOG["eo"]) is CATALOG["eo"]
    with pytest.raises(FedgftError, match="sp, eop, eo, predictive-parity, acc, fpr"):
        get_metric("fairness")


def test_conditions_have_the_names_of_the_classes() -> None:
    assert get_metric("eo").condition_names(("no", "yes")) == (
        "class yes given label no",
        "class yes given label yes",
    )
    both = get_metric("sp+eop")
    assert both.condition_names(("no", "yes")) == ("sp: class yes", "eop: class yes")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("demographic_parity_difference", "sp"),
        ("Equal opportunity", "eop"),
        ("equalized-odds", "eo"),
        ("SP", "sp"),
        ("cal", "predictive-parity"),
        ("predictive_parity", "predictive-parity"),
    ],
)
def test_names_of_metrics_are_taken_as_people_write_them(written, name):
    assert get_metric(written) is CATALOG[name]


@pytest.mark.parametrize(("long", "short"), LONG_NAMES.items())
def test_long_names_are_the_same_metrics(long, short):
    assert get_metric(long) is CATALOG[short]
    assert get_metric(f"2*{long}").name == get_metric(f"2*{short}").name
