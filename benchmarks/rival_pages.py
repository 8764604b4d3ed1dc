"""What the page of `rivals.py` says besides its own figures: published numbers, and reasons."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rules import PUBLISHED

HEAD = "# Rivals on their own protocols\n\nMade by `python benchmarks/rivals.py`."
Printed = tuple[float, float, float | None]  # accuracy, gap and largest local gap


def read_published(data: str) -> dict[str, Printed]:
    """Return FedFACT's Table 2 by the names of methods."""
    names = {
        "FedAvg, by FedFACT": "FedAvg",
        "FairFed, by FedFACT": "FairFed",
        "FedFB, by FedFACT": "FedFB",
        "FedFACT In, global": "FedFACT In",
        "FedFACT Post, global": "FedFACT Post",
        "Cost LP, by FedFACT": "Cost LP",
    }
    return {names[row[0]]: row[2:] for row in PUBLISHED[data] if row[0] in names}


FEDFACT: Mapping[str, Mapping[str, Mapping[str, Printed]]] = {
    "adult": {
        "Dirichlet": read_published("adult"),
        "hetero": {
            "FedAvg": (85.3, 16.0, None),
            "FedFACT In": (82.1, 1.2, None),
            "FedFACT Post": (81.1, 0.47, None),
        },
    },
    "compas": {
        "Dirichlet": read_published("compas"),
        "hetero": {"FedFACT Post": (64.4, 4.0, None)},
    },
}
LOGOFAIR: Mapping[float, Mapping[str, Printed]] = {
    0.5: {
        "FedAvg": (83.8, 17.6, None),
        "FedFB": (81.6, 7.7, None),
        "LoGoFair": (82.18, 1.83, None),
        "LoGoFair, target 0": (81.86, 0.35, None),
    },
    5.0: {
        "FedAvg": (84.2, 17.3, None),
        "FedFB": (82.4, 6.6, None),
        "LoGoFair": (82.64, 1.04, None),
    },
    100.0: {
        "FedAvg": (84.7, 17.6, None),
        "FedFB": (82.0, 7.9, None),
        "LoGoFair": (82.97, 2.82, None),
    },
}
MINMAX = {
    ("one full-batch SGD step per round", "FedMinMax, groups of sex and label"): "65.7 / -4.7",
    ("an epoch of Adam per round", "FedAvg"): "84.6 / 19.2",
}
WHY: Mapping[tuple[str, str], str] = {}
FEDFACT_TEXT = FEATURES_TEXT = LOGOFAIR_TEXT = FEDFB_TEXT = MINMAX_TEXT = EVERY_TEXT = ""
FEDFB_NOTE = MINMAX_NOTE = EVERY_NOTE = ""


def note(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seeds."


class Rival(NamedTuple):
    """A row of the last table."""

    label: str
    protocol: str
    is_run: str
    result: str


RIVALS: Mapping[str, Rival] = {}
