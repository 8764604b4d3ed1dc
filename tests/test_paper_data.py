"""The paper as data: its experiments and its published numbers."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from fedgft.paper.cells import (
    EXPERIMENTS,
    NAMES,
    PAPER_METHODS,
    Cell,
    differs_from_published,
    get_published,
    is_near_published,
)
from fedgft.paper.claims import CLAIMS

TABLES = Path(__file__).parents[1] / "src" / "fedgft" / "paper" / "published"


def test_every_experiment_has_its_cells_its_claims_and_a_place_on_the_page():
    for name, experiment in EXPERIMENTS.items():
        cells = experiment.cells("compas", "paper", seeds=3)
        assert len(set(cells)) == len(cells) == 2 * len(experiment.variants)
        assert name in NAMES and name in CLAIMS
        assert {c.seeds for c in cells} == {3}
        for field in experiment.varied:
            assert len({getattr(c, field) for c in cells}) > 1


def test_table_1_has_72_published_numbers_in_the_two_tables_we_run():
    found = 0
    for data in ("adult", "compas"):
        for cell in EXPERIMENTS["table1"].cells(data, "paper", seeds=20):
            known = get_published("table1", cell)
            found += sum(known[f"published_{what}"] is not None for what in ("accuracy", "gap"))
            assert (known["published_gap"] is None) == (cell.method not in PAPER_METHODS)
            assert (
                get_published("table1", replace(cell, protocol="heldout"))["published_gap"] is None
            )
    assert found == 72


@pytest.mark.parametrize(("name", "numbers"), [("penalty", 36), ("pure", 15)])
def test_the_other_tables_are_compas_alone(name, numbers):
    """Of the penalty's table each l1 number is there twice: for both values of λ."""
    for data, expected in (("compas", numbers), ("adult", 0)):
        known = [get_published(name, c) for c in EXPERIMENTS[name].cells(data, "paper", seeds=20)]
        values = [k[f"published_{what}"] for k in known for what in ("accuracy", "gap")]
        assert sum(v is not None for v in values) == expected


def test_published_numbers_are_those_of_the_file():
    line = next(
        r
        for r in csv.DictReader((TABLES / "table1.csv").read_text().splitlines())
        if (r["dataset"], r["alpha"], r["method"]) == ("adult", "5", "fedgft")
    )
    cell = Cell("adult", "paper", "eop", method="fedgft", alpha=5.0)
    known = get_published("table1", cell)
    assert known["published_gap"] == pytest.approx(float(line["eop"]) / 100)
    assert known["published_gap_bracket"] == pytest.approx(float(line["eop_se"]) / 100)
    assert known["published_accuracy"] is None  # the accuracy column is that of the SP runs
    with_sp = get_published("table1", replace(cell, metric="sp"))
    assert with_sp["published_accuracy"] == pytest.approx(float(line["accuracy"]) / 100)


def test_comparison_with_published_numbers():
    row = {"published_gap": 0.05, "published_gap_bracket": 0.002}
    assert is_near_published(row, "gap", 0.0599) and differs_from_published(
        row, "gap", 0.0599
    )  # one point, five brackets
    assert not is_near_published(row, "gap", 0.0601)
    assert not differs_from_published(row, "gap", 0.0539)
    assert differs_from_published(row, "gap", 0.0541)
    assert not is_near_published(row, "gap", None) and not differs_from_published(row, "gap", None)
