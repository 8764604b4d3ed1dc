"""The sums of all sites as arrays, seen by one attribute or by several together."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fedgft.audit.sums import COUNT, NOISE, SCORES, SLACK, Group, Question, Sums
from fedgft.metrics import Tally
from fedgft.types import FedgftError


@dataclass(frozen=True, eq=False)
class Pool:
    """All tables: (site, group, label, decision, column); all histograms, summed over sites."""

    question: Question
    sites: tuple[str, ...]
    groups: tuple[Group, ...]
    tables: np.ndarray
    histogram: np.ndarray  # (group, label, decision, score, bin)


@dataclass(frozen=True, eq=False)
class View:
    """Groups by some of the attributes. A row that lacks one of them is in no group of it."""

    attributes: tuple[str, ...]
    classes: tuple[str, ...]
    names: tuple[str, ...]
    tally: Tally  # leading axis: the site
    noise: np.ndarray  # variance of `tally.decision`
    slack: np.ndarray  # and how far off it may be, at most
    histogram: np.ndarray  # (label, group, score, bin), the last group: not recorded
    scored: bool

    @property
    def complete(self) -> bool:
        """Every row is in a histogram: no site has withheld cells, or has no scores."""
        return self.scored and bool(
            np.isclose(self.histogram[:, :, 0].sum(), self.tally.count.sum())
        )

    @property
    def title(self) -> str:
        return " & ".join(self.attributes)

    def index(self, name: str) -> int:
        if name not in self.names:
            raise FedgftError(
                f"group {name!r} is not among those of {self.title}: {', '.join(self.names)}"
            )
        return self.names.index(name)


def pool(sums: Sums) -> Pool:
    """Sites in the order of their names; a group that a site does not have has no rows there."""
    question, groups = sums.asked, sums.groups
    if not groups or sums.rows() <= 0:
        raise FedgftError("there is nothing to audit: the sites have no rows")
    place = {group: i for i, group in enumerate(groups)}
    shape = question.empty_table().shape
    tables = np.zeros((len(sums.sites), len(groups), *shape))
    for k, site in enumerate(sums.sites.values()):
        for group, table in site.tables.items():
            tables[k, place[group]] = table
    histogram = np.zeros((len(groups), *question.empty_histogram().shape))
    for group, counts in sums.histogram.items():
        histogram[place[group]] = counts
    return Pool(question, tuple(sums.sites), groups, tables, histogram)


def views(pooled: Pool) -> Iterator[View]:
    """Each attribute, then their intersections, all of them together last."""
    attributes = range(len(pooled.question.attributes))
    for size in range(1, len(attributes) + 1):
        for chosen in combinations(attributes, size):
            yield view(pooled, chosen)


def view(pooled: Pool, chosen: tuple[int, ...]) -> View:
    cells = [tuple(group[i] for i in chosen) for group in pooled.groups]
    known = list(dict.fromkeys(cell for cell in cells if None not in cell))
    place = {cell: i for i, cell in enumerate(known)}
    where = np.array([place.get(cell, len(known)) for cell in cells])
    question, classes = pooled.question, len(pooled.question.classes)

    def gathered(values: np.ndarray, axis: int) -> np.ndarray:
        moved = np.moveaxis(values, axis, 0)
        out = np.zeros((len(known) + 1, *moved.shape[1:]))
        np.add.at(out, where, moved)
        return out

    tables = np.moveaxis(gathered(pooled.tables, 1), (0, 1, 2), (2, 0, 1))  # (site, y, g, d, col)
    decision = tables[..., COUNT]
    count = decision.sum(-1)
    score = np.zeros_like(decision)
    if question.scored:
        sums = tables[..., SCORES:].sum(-2)  # (site, y, g, s)
        score = np.stack((count - sums[..., 0], sums[..., 0]), -1) if classes == 2 else sums
    return View(
        attributes=tuple(question.attributes[i] for i in chosen),
        classes=question.classes,
        names=_names(known, [question.attributes[i] for i in chosen]),
        tally=Tally(count, score, decision),
        noise=tables[..., NOISE],
        slack=tables[..., SLACK],
        histogram=np.moveaxis(gathered(pooled.histogram.sum(2), 0), 1, 0),
        scored=question.scored,
    )


def _names(cells: list[tuple], attributes: list[str]) -> tuple[str, ...]:
    """`White & Male`; with the attributes' names where that could mean two groups."""
    names = [" & ".join(map(str, cell)) for cell in cells]
    if len(set(names)) < len(names):
        pairs = [zip(attributes, cell, strict=True) for cell in cells]
        names = ["; ".join(f"{a}={v!r}" for a, v in pair) for pair in pairs]
    return tuple(names)
