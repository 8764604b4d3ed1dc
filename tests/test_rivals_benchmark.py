"""The benchmark of rivals: how strengths are chosen, results judged, and that no rival is missing.

The scripts of benchmarks/ are no package; they import each other by name.
"""

import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from fedgft.algorithms import METHODS
from fedgft.rules.federation_rule import OWN_KINDS, RULE_KINDS

OWN_METHODS = ("fedavg", "lrw", "lft", "fedgft", "fedgft-control")
FOLDER = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture(scope="module")
def load():
    """Return a function that imports a module of benchmarks/."""
    sys.path.insert(0, FOLDER)
    yield import_module
    sys.path.remove(FOLDER)


def test_every_rival_has_a_row(load):
    named = set(load("rival_pages").RIVALS)
    rivals = {*METHODS, *RULE_KINDS} - {*OWN_METHODS, *OWN_KINDS, "fairfed"}  # results/fairfed.md
    assert named == rivals | {"fcfl"}


@pytest.mark.parametrize(
    ("pick", "expected"),
    [
        ("near best", [3.0, 1.0]),  # 0.805 is within a point of 0.81; nothing is near 0.85
        ("gap 1", [5.0, 3.0]),  # the only fair one; none is fair: the smallest gap
    ],
)
def test_strengths_are_chosen_by_the_rule_that_the_page_states(load, pick, expected):
    accuracy = np.array([[0.81, 0.85], [0.805, 0.80], [0.70, 0.70], [0.79, 0.79]])
    gap = np.array([[0.2, 0.15], [0.1, 0.02], [0.02, 0.03], [0.009, 0.04]])
    found = load("rival_methods").choose(pick, (1.0, 3.0, 4.0, 5.0), accuracy, gap)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("accuracy", "gap", "verdict"),
    [
        (80.9, 6.9, "reproduced"),
        (83.0, 6.0, "more accurate"),
        (79.5, 1.0, "fairer"),
        (83.0, 1.0, "more accurate, fairer"),
        (78.0, 5.5, "less accurate"),
        (80.5, 7.5, "less fair"),
        (83.0, 9.0, "more accurate, less fair"),
    ],
)
def test_verdicts(load, accuracy, gap, verdict):
    methods = load("rival_methods")
    own = methods.Figures(accuracy, gap, 0.0, 0.0, 0.0, 0.0)
    assert methods.judge(own, (80.0, 5.0, None)) == verdict
    assert methods.is_reached(verdict) == (accuracy >= 79 and gap <= 7)


def test_levels_have_their_upper_end(load):
    polars = pytest.importorskip("polars")
    column = polars.Series("age", [str(v) for v in range(1, 11)])
    levels = load("rival_data").cut_at(column, (20, 50))  # at 2.8 and 5.5
    assert levels == ["level 0"] * 2 + ["level 1"] * 3 + ["level 2"] * 5


def test_sections_that_are_not_made_stay(load):
    rules, pages = load("rules"), load("rival_pages")
    first = rules.update("", [("One", "old", [], []), ("Two", "stays", [], [])], head=pages.HEAD)
    again = rules.update(first, [("One", "new", [], [("a claim", True)])], head=pages.HEAD)
    assert again.startswith(pages.HEAD) and "## Two\n\nstays" in again
    assert "old" not in again and "## One\n\nnew\n\n- ✓ a claim." in again
