"""The paper's own figures, and how far ours are from them. Fractions, as in all rows."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from fedgft.experiments.run import Record
from fedgft.experiments.spec import Cell

ONE_POINT = 0.01
FIELDS = ("published_accuracy", "published_accuracy_bracket",
          "published_gap", "published_gap_bracket")  # fmt: skip
NOTHING: dict[str, float | None] = dict.fromkeys(FIELDS)


def labelled(experiment: str, records: Sequence[Record]) -> list[Record]:
    """The records with complete rows: `compare`'s fields, what was varied, what was published."""
    return [
        replace(
            r,
            row={"experiment": experiment, **r.row, "clients": r.cell.clients,
                 "partition": r.cell.partition, "penalty": r.cell.penalty,
                 "epochs": r.cell.epochs, "rule": r.cell.rule, **published(experiment, r.cell)},
        )
        for r in records
    ]  # fmt: skip


def published(experiment: str, cell: Cell) -> dict[str, float | None]:
    """What the paper prints for this cell; nulls where it prints nothing.

    Only rows of the `paper` protocol have something to be compared with. Table 1 and the table of
    pure clients have one column of accuracies, which belongs to the SP runs.
    """
    table = {"fairfed": "table1"}.get(experiment, experiment)
    if cell.protocol != "paper" or table not in ("table1", "penalty", "pure"):
        return NOTHING
    lines = [line for line in _lines(table) if _is(table, line, cell)]
    if not lines:
        return NOTHING
    (line,) = lines
    accuracy = f"{cell.metric}_run_accuracy" if experiment == "penalty" else "accuracy"
    known = experiment == "penalty" or cell.metric == "sp"
    return dict(
        zip(
            FIELDS,
            (
                *(_fraction(line, n) if known else None for n in (accuracy, f"{accuracy}_se")),
                *(_fraction(line, n) for n in (cell.metric, f"{cell.metric}_se")),
            ),
            strict=True,
        )
    )


def differs(row: dict[str, Any], what: str, ours: float | None) -> bool:
    """More than two published brackets away."""
    at, bracket = row[f"published_{what}"], row[f"published_{what}_bracket"]
    return at is not None and ours is not None and abs(ours - at) > 2 * bracket


def near(row: dict[str, Any], what: str, ours: float | None) -> bool:
    """Within two published brackets or one point, whichever is larger."""
    at, bracket = row[f"published_{what}"], row[f"published_{what}_bracket"]
    return ours is not None and abs(ours - at) <= max(2 * bracket, ONE_POINT)


def _is(experiment: str, line: dict[str, str], cell: Cell) -> bool:
    if experiment == "table1":
        return (line["dataset"], float(line["alpha"]), line["method"]) == (
            cell.data, cell.alpha, cell.method,
        )  # fmt: skip
    if cell.data != "compas":
        return False
    if experiment == "penalty":
        return (float(line["alpha"]), line["penalty"]) == (cell.alpha, cell.penalty)
    kind = "pure" if cell.partition == "pure" else "mixed"
    if (line["method"], line["clients"]) != (cell.method, kind):
        return False
    return not line["lam"] or float(line["lam"]) == cell.lam


def _fraction(line: dict[str, str], name: str) -> float:
    return round(float(line[name]) / 100, 6)


@cache
def _lines(experiment: str) -> list[dict[str, str]]:
    text = files("fedgft.experiments").joinpath("published", f"{experiment}.csv").read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))
