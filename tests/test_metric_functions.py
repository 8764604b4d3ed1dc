"""The public metric functions: equal to Fairlearn, with warnings if a value is not estimable."""

import doctest
from importlib.util import module_from_spec, spec_from_file_location

import numpy as np
import pandas as pd
import pytest
from fairlearn import metrics as fairlearn
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, balanced_accuracy_score, precision_score

from fedgft.errors import FedgftError
from fedgft.metrics import NotEstimableWarning, functions
from fedgft.sums import Sums, stack


def between_groups(score):
    """The largest difference of `score` between groups, as Fairlearn takes it."""

    def difference(y_true, y_pred, *, sensitive_features, sample_weight=None):
        frame = fairlearn.MetricFrame(
            metrics=score,
            y_true=y_true,
            y_pred=y_pred,
            sensitive_features=sensitive_features,
            sample_params=None if sample_weight is None else {"sample_weight": sample_weight},
        )
        return frame.difference(method="between_groups")

    return difference


REFERENCE = {
    functions.statistical_parity_difference: fairlearn.demographic_parity_difference,
    functions.equal_opportunity_difference: fairlearn.equal_opportunity_difference,
    functions.equalized_odds_difference: fairlearn.equalized_odds_difference,
    functions.predictive_parity_difference: between_groups(precision_score),
    functions.accuracy_parity_difference: between_groups(accuracy_score),
    functions.false_positive_rate_difference: between_groups(fairlearn.false_positive_rate),
}

every_function = pytest.mark.parametrize("function", REFERENCE, ids=lambda f: f.__name__)


def random_decisions(seed: int, groups: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every cell of label, decision and group has rows, so that every rate is estimable."""
    rng = np.random.default_rng(seed)
    cells = np.array([(y, z, g) for y in (0, 1) for z in (0, 1) for g in range(len(groups))])
    drawn = cells[rng.choice(len(cells), size=200, p=rng.dirichlet(np.full(len(cells), 2.0)))]
    y_true, y_pred, group = rng.permutation(np.concatenate((cells, drawn))).T
    return y_true, y_pred, np.array(list(groups))[group]


@every_function
@pytest.mark.parametrize("groups", ["ab", "abc"])
@pytest.mark.parametrize("seed", range(5))
def test_equals_fairlearn_on_decisions(function, groups, seed):
    y_true, y_pred, names = random_decisions(seed, groups)
    weight = np.random.default_rng(seed).uniform(0.1, 3, size=len(names))
    for extra in ({}, {"sample_weight": weight}):
        expected = REFERENCE[function](y_true, y_pred, sensitive_features=names, **extra)
        actual = function(y_true, y_pred, sensitive_features=names, **extra)
        assert actual == pytest.approx(expected, abs=1e-12)
        assert actual > 1e-3, "a gap of zero would compare nothing"


@every_function
def test_two_attributes_are_crossed_as_in_fairlearn(function):
    y_true, y_pred, first = random_decisions(0, "abcd")
    both = np.stack((np.isin(first, ["a", "b"]), np.isin(first, ["a", "c"])), axis=1)
    crossed = function(y_true, y_pred, sensitive_features=both)
    assert crossed == function(y_true, y_pred, sensitive_features=first)
    expected = REFERENCE[function](y_true, y_pred, sensitive_features=both)
    assert crossed == pytest.approx(expected, abs=1e-12)


def test_scores_give_the_soft_gap():
    gap = functions.statistical_parity_difference(
        [1, 0, 1, 0], [0.9, 0.5, 0.2, 0.4], sensitive_features=list("aabb")
    )
    assert gap == pytest.approx(0.7 - 0.3)


def test_one_column_a_class_is_read_as_probabilities():
    y_true = [1, 0, 1, 0]
    scores = np.array([0.9, 0.5, 0.2, 0.4])
    group = list("aabb")
    for function in REFERENCE:
        columns = function(y_true, np.stack((1 - scores, scores), 1), sensitive_features=group)
        assert columns == function(y_true, scores, sensitive_features=group)


def test_labels_may_be_words_and_more_than_two():
    y_true = ["no", "maybe", "yes", "no", "maybe", "yes"]
    y_pred = ["no", "maybe", "yes", "no", "yes", "yes"]
    gap = functions.accuracy_parity_difference(y_true, y_pred, sensitive_features=list("aaabbb"))
    assert gap == pytest.approx(1 / 3)


def test_columns_of_words_are_in_the_order_of_the_sorted_words():
    y_true = ["yes", "no", "no", "yes"]
    group = list("aabb")
    scores = np.array([0.9, 0.5, 0.2, 0.4])
    columns = np.stack((1 - scores, scores), 1)  # no, yes
    words = functions.equalized_odds_difference(y_true, columns, sensitive_features=group)
    numbers = functions.equalized_odds_difference([1, 0, 0, 1], scores, sensitive_features=group)
    assert words == pytest.approx(numbers)


def test_columns_of_numbers_need_not_all_occur():
    """Labels 0 and 2 of three classes are columns 0 and 2, not the first and the second."""
    columns = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.6, 0.2, 0.2], [0.3, 0.4, 0.3]])
    gap = functions.accuracy_parity_difference(
        [0, 2, 0, 2], columns, sensitive_features=list("aabb")
    )
    assert gap == pytest.approx((0.5 + 0.8) / 2 - (0.6 + 0.3) / 2)


def test_columns_may_be_rounded():
    """Three decimals, as a file may hold them: three thirds have the sum 0.999."""
    columns = np.full((4, 3), 0.333)
    gap = functions.accuracy_parity_difference(
        [0, 1, 2, 0], columns, sensitive_features=list("aabb")
    )
    assert gap == 0


def test_attributes_whose_names_join_alike_are_crossed_apart():
    both = [("a & b", "c"), ("a", "b & c")]
    gap = functions.statistical_parity_difference([1, 0], [1, 0], sensitive_features=both)
    assert gap == 1


def test_a_hole_in_one_of_two_attributes_is_a_hole():
    y_true = [1, 0, 1, 0, 1]
    y_pred = [1, 1, 1, 0, 0]
    both = np.array([["a", "x"], ["a", "x"], ["b", "x"], ["b", "x"], ["b", None]], dtype=object)
    gap = functions.statistical_parity_difference(y_true, y_pred, sensitive_features=both)
    assert gap == 0.5


def test_the_warning_points_at_the_line_of_the_caller():
    """Seen in a copy of the module without the shape checks of the tests: they are calls too."""
    spec = spec_from_file_location("plain_functions", functions.__file__)
    plain = module_from_spec(spec)
    spec.loader.exec_module(plain)
    with pytest.warns(plain.NotEstimableWarning) as caught:
        plain.statistical_parity_difference([0, 1], [0, 1], sensitive_features=[None, None])
    assert caught[0].filename == __file__


def test_groups_may_be_numbers_and_holes_may_lie_in_a_list():
    y_true = [1, 0, 1, 0, 1]
    y_pred = [1, 1, 1, 0, 0]
    for groups in ([1.0, 1.0, 2.5, 2.5, float("nan")], ["a", "a", "b", "b", float("nan")]):
        gap = functions.statistical_parity_difference(y_true, y_pred, sensitive_features=groups)
        assert gap == 0.5


def test_the_warning_names_the_crossed_groups_that_are_empty():
    both = np.array([["a", "x"], ["a", "y"], ["b", "x"], ["b", "y"]], dtype=object)
    with pytest.warns(NotEstimableWarning) as caught:
        functions.equal_opportunity_difference([1, 0, 1, 0], [1, 1, 1, 1], sensitive_features=both)
    assert str(caught[0].message) == (
        "equal opportunity is not estimable: no row of the event in 'a & y', 'b & y'"
    )


@every_function
def test_a_rate_of_zero_is_a_rate(function):
    """Nobody of group a has the outcome: no reason to warn, and the gap is the rate of b."""
    y_true, y_pred = {
        "accuracy_parity_difference": ([1, 0, 1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 1, 0, 1, 0]),
        "predictive_parity_difference": ([0, 0, 0, 0, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1, 0]),
    }.get(function.__name__, ([1, 0, 1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1, 1, 0]))
    expected = REFERENCE[function](y_true, y_pred, sensitive_features=list("aaaabbbb"))
    assert expected >= 0.5
    actual = function(y_true, y_pred, sensitive_features=list("aaaabbbb"))
    assert actual == pytest.approx(expected, abs=1e-12)


@every_function
def test_rows_without_a_group_count_for_none(function):
    y_true, y_pred, names = random_decisions(0, "abc")
    missing = np.random.default_rng(0).random(len(names)) < 0.2
    for unknown in (None, float("nan"), pd.NA, pd.NaT):
        holes = names.astype(object)
        holes[missing] = unknown
        expected = function(y_true[~missing], y_pred[~missing], sensitive_features=names[~missing])
        assert function(y_true, y_pred, sensitive_features=holes) == expected


@pytest.mark.parametrize(
    ("function", "y_true", "y_pred"),
    [
        (functions.equal_opportunity_difference, [1, 0, 0, 0], [1, 1, 1, 0]),
        (functions.equalized_odds_difference, [1, 0, 0, 0], [1, 1, 1, 0]),
        (functions.predictive_parity_difference, [1, 0, 1, 0], [1, 1, 0, 0]),
        (functions.false_positive_rate_difference, [1, 0, 1, 1], [1, 1, 0, 0]),
    ],
)
def test_a_group_without_the_event_is_named_and_gives_nan(function, y_true, y_pred):
    """Fairlearn gives a number here; a 0 would read as fair."""
    with pytest.warns(NotEstimableWarning, match="'men'") as caught:
        gap = function(y_true, y_pred, sensitive_features=["women", "women", "men", "men"])
    assert np.isnan(gap)
    assert "women" not in str(caught[0].message)


@every_function
def test_a_group_of_weight_zero_is_named_and_gives_nan(function):
    with pytest.warns(NotEstimableWarning, match="'b'"):
        gap = function(
            [1, 0, 1, 0], [1, 1, 1, 1], sensitive_features=list("aabb"), sample_weight=[1, 1, 0, 0]
        )
    assert np.isnan(gap)


@every_function
@pytest.mark.parametrize("groups", [[None, None], []])
def test_no_group_at_all_gives_nan(function, groups):
    y = [0, 1][: len(groups)]
    with pytest.warns(NotEstimableWarning, match="in any group"):
        assert np.isnan(function(y, y, sensitive_features=groups))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y_pred": [1, 1]}, "y_pred has 2 rows, y_true has 4"),
        ({"sensitive_features": list("aab")}, "sensitive_features has 3 rows, y_true has 4"),
        ({"sensitive_features": list("aabbaabb")}, "sensitive_features has 8 rows"),
        ({"sample_weight": [1, 1]}, "sample_weight has 2 rows"),
        ({"y_pred": [1, 0, 2, 0]}, "decisions 0 or 1, or scores"),
        ({"y_pred": [1, 0, -0.5, 0]}, "decisions 0 or 1, or scores"),
        ({"y_true": [0, 1, 2, 0], "y_pred": np.full((4, 2), 0.5)}, "2 columns for 3 classes"),
        ({"y_true": list("xyxy"), "y_pred": np.full((4, 3), 1 / 3)}, "3 columns for 2 classes"),
        ({"y_pred": np.array([[0.4, 0.6]] * 3 + [[-3.0, 4.0]])}, r"each in \[0, 1\]"),  # logits
        ({"y_pred": np.array([[0.4, 0.6]] * 3 + [[np.nan, 0.5]])}, r"each in \[0, 1\]"),
        ({"y_pred": np.array([[0.4, 0.6]] * 3 + [[0.4, 0.7]])}, "every row with the sum 1"),
        ({"y_true": [1, 2, 1, 2], "y_pred": [1, 0.5, 2, 1]}, "holds '0.5', .* predicted labels"),
        ({"y_true": list("xyxy"), "y_pred": [1, 2, 1, 2]}, "holds '1', .* one column per class"),
        ({"y_true": list("xyxy"), "y_pred": ["x", "y", None, "x"]}, "holds 'None', .* no label"),
        ({"sample_weight": [1, 1, np.nan, 1]}, "sample_weight must hold one finite number"),
        ({"sample_weight": [1, 1, np.inf, 1]}, "sample_weight must hold one finite number"),
        ({"sample_weight": [1, 1, -0.5, 1]}, "of at least 0"),
        ({"sample_weight": np.ones((4, 2))}, "one value per row"),
        ({"sample_weight": list("xxxx")}, "sample_weight cannot be read"),
        ({"sample_weight": 1.0}, "one value per row"),
        ({"sensitive_features": None}, "one value per row"),
        ({"y_true": np.eye(2)[[1, 0, 1, 0]]}, r"y_true must hold one value per row, .* \(4, 2\)"),
        ({"y_true": [1, 0, np.nan, 0]}, "lacks a label"),
        ({"y_true": [1, 0, None, 0]}, "lacks a label"),
        ({"y_pred": list("nyyn")}, "y_pred holds text"),
        ({"y_pred": np.ones((4, 2, 2))}, "one value per row"),
        ({"y_pred": np.ma.masked_array([1, 0, 1, 0], [0, 0, 0, 1])}, "y_pred is masked"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changed, message):
    given = {"y_true": [1, 0, 1, 0], "y_pred": [1, 1, 1, 0], "sensitive_features": list("aabb")}
    given |= changed
    with pytest.raises(FedgftError, match=message):
        functions.statistical_parity_difference(given.pop("y_true"), given.pop("y_pred"), **given)


@pytest.mark.parametrize("label", [0, 1])
def test_scores_are_scores_also_where_all_have_one_label(label):
    told = functions.statistical_parity_difference(
        [label] * 4, [0.25, 0.75, 0.5, 1.0], sensitive_features=list("aabb")
    )
    assert told == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["y_true", "y_pred", "sensitive_features", "sample_weight"])
def test_a_table_of_one_column_is_a_list(name):
    given = {
        "y_true": [1, 0, 1, 0, 0],
        "y_pred": [1, 1, 1, 0, 0],
        "sensitive_features": list("aabbb"),
        "sample_weight": [1, 2, 1, 1, 3],
    }
    table = given | {name: pd.DataFrame({"it": given[name]})}
    assert functions.accuracy_parity_difference(**table) == functions.accuracy_parity_difference(
        **given
    )


def test_a_class_may_be_predicted_that_nobody_has():
    """As in scikit-learn; a small table need not hold every class."""
    predicted = np.eye(3)[[0, 1, 2, 0]]
    for named, columns in (("xyyx", [0, 1, 1, 0]), ("xxxx", [0, 0, 0, 0])):
        told = functions.statistical_parity_difference(
            list(named), list("xyzx"), sensitive_features=list("aabb")
        )
        assert told == functions.statistical_parity_difference(
            columns, predicted, sensitive_features=list("aabb")
        )


def test_examples_in_the_docstrings():
    assert doctest.testmod(functions).failed == 0


# Decisions, from sums


def drawn(seed: int, *, rows: int = 500, classes: int = 2, groups: int = 3):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(classes), rows)
    labels = rng.choice(classes, rows, p=rng.dirichlet(np.full(classes, 3.0)))
    group = rng.integers(-1, groups, rows)
    return probs, labels, group


@pytest.mark.parametrize("classes", [2, 4])
def test_decisions_are_those_of_scikit_learn(classes: int) -> None:
    for seed in range(20):
        probs, labels, group = drawn(seed, classes=classes)
        tally = Sums.of(probs, labels, group, num_groups=3)
        chosen = probs.argmax(1)
        expected = balanced_accuracy_score(labels, chosen)
        assert functions.balanced_accuracy(tally) == pytest.approx(expected)
        constant = DummyClassifier(strategy="most_frequent").fit(probs, labels).predict(probs)
        assert functions.constant_accuracy(tally) == pytest.approx(accuracy_score(labels, constant))
        for g in range(3):
            shares = np.bincount(chosen[group == g], minlength=classes) / (group == g).sum()
            assert functions.selection_rates(tally)[g] == pytest.approx(shares)


@pytest.mark.filterwarnings("ignore:y_pred contains classes")
def test_a_class_without_rows_is_left_out_of_balanced_accuracy() -> None:
    probs, labels, group = drawn(0, classes=3)
    tally = Sums.of(probs, np.minimum(labels, 1), group, num_groups=3)
    expected = balanced_accuracy_score(np.minimum(labels, 1), probs.argmax(1))
    assert functions.balanced_accuracy(tally) == pytest.approx(expected)


def table(*cells: tuple[int, int]) -> Sums:
    """Of each group, for label 0 and then for label 1: rows, and how many of them are accepted."""
    decision = np.zeros((2, len(cells) // 2 + 1, 2))
    for at, (rows, accepted) in enumerate(cells):
        group, label = divmod(at, 2)
        decision[label, group] = rows - accepted, accepted
    return Sums(decision.sum(-1), decision, decision)


@pytest.mark.parametrize(
    ("tally", "expected"),
    [
        (table((900, 898), (7_100, 7_099), (778, 776), (13_013, 13_012)), True),
        (table((900, 600), (7_100, 6_900), (778, 700), (13_013, 12_988)), False),
        (table((950, 0), (50, 0)), True),  # refuses all
        (table((500, 20), (500, 20)), True),  # accepts 4% and is no better than a constant
        (table((500, 0), (500, 40)), False),  # accepts 4%, all of them rightly
        (table((99_500, 100), (500, 200)), False),  # fraud is rare, and so are accusations
        (table((99_500, 5), (500, 5)), True),  # one accusation where there are fifty
        (table((400, 80), (600, 500)), False),
    ],
)
def test_what_is_a_collapsed_model(tally: Sums, expected: bool) -> None:
    assert functions.is_collapsed(tally) == expected
    assert functions.is_collapsed(stack([tally, tally])).tolist() == [expected, expected]
    lost = tally.map(lambda array: np.nan * array)
    assert not functions.is_collapsed(lost)  # diverged, which is another thing


def test_the_description_of_decisions() -> None:
    two = functions.describe_decisions(table((3, 1), (1, 1), (4, 0), (2, 1)), ("no", "yes"), "ab")
    assert two == {
        "accuracy_constant": 0.7,
        "balanced_accuracy": pytest.approx((6 / 7 + 2 / 3) / 2),
        "selection_rates": {"a": 0.5, "b": pytest.approx(1 / 6)},
        "collapsed": False,
    }
    probs = np.eye(3)[[0, 1, 2, 2]]
    three = Sums.of(probs, np.array([0, 1, 2, 2]), np.array([0, 0, 0, 0]), num_groups=2)
    rates = functions.describe_decisions(three, "xyz", "ab")["selection_rates"]
    assert rates["a"] == {"x": 0.25, "y": 0.25, "z": 0.5}
    assert rates["b"] == {"x": None, "y": None, "z": None}
