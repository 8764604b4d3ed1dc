"""Experiments as data: a cell is one trained combination, an experiment is a list of variants.

Nothing here runs. `fedgft.experiments.paper` holds the paper's experiments in this form, and
`fedgft.experiments.run` trains whatever cells they name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fedgft.data.partition import Kind as PartitionKind
from fedgft.federated.fairfed import Rule

Variant = tuple[tuple[str, Any], ...]  # fields of a cell and their values


@dataclass(frozen=True)
class Cell:
    """All replicates of one combination. None is the protocol's own value, or what it chooses
    on an inner split."""

    data: str
    protocol: str
    metric: str
    seeds: int = 20
    method: str = "fedgft"
    alpha: float = 5.0
    clients: int = 10
    partition: PartitionKind = "dirichlet"
    penalty: str = "half"
    epochs: int = 1
    lam: float | None = None
    rule: Rule | None = None  # FairFed's
    beta: float | None = None
    lr: float | None = None

    @property
    def strength(self) -> float | None:
        return self.beta if self.method == "fairfed" else self.lam


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    claim: str  # what the paper says
    variants: tuple[Variant, ...]
    metrics: tuple[str, ...] = ("sp", "eop")
    accuracy_of: tuple[str, ...] = ("sp", "eop")  # runs whose accuracy the paper's layout shows
    note: str = ""  # what the paper leaves open, and what was done about it
    left_out: tuple[tuple[str, str], ...] = ()  # methods that a data set goes without

    @property
    def varied(self) -> tuple[str, ...]:
        """The fields that tell the variants apart, in the order in which they were written."""
        names = dict.fromkeys(name for variant in self.variants for name, _ in variant)
        return tuple(n for n in names if len({dict(v).get(n) for v in self.variants}) > 1)

    def cells(self, data: str, protocol: str, *, seeds: int) -> list[Cell]:
        """Variant by variant, metric by metric."""
        return [
            Cell(data=data, protocol=protocol, metric=metric, seeds=seeds, **dict(variant))
            for variant in self.variants for metric in self.metrics
            if (data, dict(variant).get("method", "")) not in self.left_out
        ]  # fmt: skip


def variants(**axes: Sequence[Any]) -> tuple[Variant, ...]:
    """Every combination of the values; a single value is an axis of one."""
    named = [[(name, value) for value in values] for name, values in axes.items()]
    return tuple(product(*named))
