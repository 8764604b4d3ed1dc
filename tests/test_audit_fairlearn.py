"""The audit and the metric functions give the numbers that Fairlearn publishes.

The arrays and the printed numbers are those of Fairlearn's user guide, docs/user_guide/assessment
of its repository: "Performing a Fairness Assessment", "Intersecting Groups" and "Common fairness
metrics" (https://fairlearn.org/main/user_guide/assessment/).
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fairlearn import metrics as fairlearn
from sklearn.metrics import accuracy_score, precision_score, recall_score

from fedgft import audit
from fedgft.metrics import functions

Y_TRUE = [0, 1, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1]
Y_PRED = [0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0]
GROUPS = list("bbabbcccaacabccbcc")
SECOND = [8, 6, 8, 8, 8, 8, 6, 6, 6, 8, 6, 6, 6, 6, 8, 6, 6, 6]
DECISION = [int(c) for c in "000110110101010101010110111110"]
PREDICTION = [int(c) for c in "110110101010101110001110011001"]
CONTROL = list("HLHLHLLHHLLHHLLHLLHHLHLLHHLLHL")
SENSITIVE = list("ABBCCBAABACBCACCBBCABBCABABBAA")
PAGE = Path(__file__).parents[1] / "docs" / "audit-reference.md"


@pytest.fixture(scope="module")
def found():
    return audit({"all": (Y_TRUE, Y_PRED, GROUPS)})


# "Performing a Fairness Assessment": by_group, group_min, group_max, difference, ratio
PUBLISHED = {
    # metric: rates of a, b, c; difference; ratio
    "eop": ((0.5, 0.6, 0.4), 0.20, 0.666667),
    "fpr": ((1.0, 0.0, 0.666667), 1.00, 0.0),
    "sp": ((0.75, 0.50, 0.50), 0.25, 0.666667),
}


@pytest.mark.parametrize("metric", PUBLISHED)
def test_rates_and_gaps_of_the_assessment_page(found, metric):
    rates, difference, ratio = PUBLISHED[metric]
    gap = found.gaps[metric]
    assert [found.rates[metric][g].value for g in "abc"] == pytest.approx(rates, abs=1e-6)
    assert gap.value == pytest.approx(difference, abs=1e-6)
    assert gap.ratio == pytest.approx(ratio, abs=1e-6)
    highest, lowest = (found.rates[metric][group].value for group in gap.pair)
    assert (highest, lowest) == pytest.approx((max(rates), min(rates)), abs=1e-6)


def test_counts_of_the_assessment_page(found):
    assert {group: rate.rows for group, rate in found.rates["sp"].items()} == dict(a=4, b=6, c=8)
    assert found.accuracy.rows == 18


def test_functions_of_the_page_on_common_metrics(found):
    rows = (Y_TRUE, Y_PRED)
    features = {"sensitive_features": GROUPS}
    assert functions.demographic_parity_difference(*rows, **features) == pytest.approx(0.25)
    assert found.gaps["sp"].ratio == pytest.approx(0.66666, abs=1e-5)
    assert functions.equalized_odds_difference(*rows, **features) == 1.0
    assert found.gaps["eo"].value == 1.0 and found.gaps["eo"].ratio == 0.0


def test_intersections_of_two_attributes():
    both = audit({"all": (Y_TRUE, Y_PRED, {"SF 0": GROUPS, "SF 1": SECOND})})
    published = {  # precision, recall, count
        "a & 6": (0.0, 0.0, 2),
        "a & 8": (0.5, 1.0, 2),
        "b & 6": (1.0, 0.666667, 3),
        "b & 8": (1.0, 0.5, 3),
        "c & 6": (0.666667, 0.5, 6),
        "c & 8": (0.0, 0.0, 2),
    }
    assert set(both.rates["predictive-parity"]) == set(published)
    for group, (precision, recall, count) in published.items():
        assert both.rates["predictive-parity"][group].value == pytest.approx(precision, abs=1e-6)
        assert both.rates["eop"][group].value == pytest.approx(recall, abs=1e-6)
        assert both.rates["acc"][group].rows == count
    assert list(both.attributes) == ["SF 0", "SF 1", "SF 0 & SF 1"]
    single = [both.attributes["SF 0"].rates["eop"][g].value for g in "abc"]
    assert single == pytest.approx([0.5, 0.6, 0.4])


def by_control():
    """One site for each value of the control feature."""
    columns = [np.array(c) for c in (DECISION, PREDICTION, SENSITIVE)]
    where = np.array(CONTROL)
    return audit({z: tuple(column[where == z] for column in columns) for z in "HL"})


def test_control_features_are_sites():
    """The page prints 0.55 and 0.2142 as differences, and 0.4285 and 0.375 as accuracies."""
    found = by_control()
    differences = [found.sites[z].gaps["acc"].value for z in "HL"]
    assert differences == pytest.approx([0.55, 0.5 - 2 / 7])
    accuracies = [found.sites[z].accuracy.value for z in "HL"]
    assert accuracies == pytest.approx([0.428571, 0.375], abs=1e-6)


def table_of_equivalents() -> list[tuple[str, str]]:
    """The rows of the table in docs/audit-reference.md: an expression of Fairlearn and ours."""
    section = PAGE.read_text().partition("## From Fairlearn to fedgft")[2]
    return re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", section, re.MULTILINE)


def test_the_table_has_its_rows():
    assert len(table_of_equivalents()) == 18


@pytest.mark.parametrize(("theirs", "ours"), table_of_equivalents())
def test_a_row_of_the_table_holds(found, theirs, ours):
    is_controlled = "control_features" in theirs
    rows = {"y_true": Y_TRUE, "y_pred": Y_PRED, "sensitive_features": GROUPS}
    if is_controlled:
        rows = {"y_true": DECISION, "y_pred": PREDICTION, "sensitive_features": SENSITIVE}
    scores = {f.__name__: f for f in (accuracy_score, precision_score, recall_score)}
    names = vars(fairlearn) | scores | {"rows": rows, "z": CONTROL}
    expected = eval(theirs, names)
    mine = {"rows": rows, "found": found, "functions": functions}
    actual = eval(ours, mine | ({"by_control": by_control()} if is_controlled else {}))
    assert actual == pytest.approx(expected, abs=1e-12)


def test_the_arrays_of_a_metric_frame_give_its_numbers():
    """As the page says: pass the arrays that a MetricFrame was made from."""
    rng = np.random.default_rng(0)
    y_true, y_pred = rng.integers(0, 2, (2, 400))
    sex = pd.Series(rng.choice(["f", "m"], 400), name="sex")
    metrics = {
        "sp": fairlearn.selection_rate,
        "acc": accuracy_score,
        "predictive-parity": precision_score,
    }
    frame = fairlearn.MetricFrame(
        metrics=metrics, y_true=y_true, y_pred=y_pred, sensitive_features=sex
    )
    found = audit({"all": (y_true, y_pred, sex)})
    for name in metrics:
        for group in ("f", "m"):
            assert found.rates[name][group].value == pytest.approx(frame.by_group[name][group])
        assert found.gaps[name].value == pytest.approx(frame.difference()[name])
