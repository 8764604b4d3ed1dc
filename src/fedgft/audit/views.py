"""The sums of all sites as arrays, seen by one attribute or by several together."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from fedgft.audit.sums import COUNT, NOISE, SCORES, SLACK, Group, Question, Sums
from fedgft.errors import FedgftError
from fedgft.layout import printable
from fedgft.metrics import Tally

MOST_GROUPS = 1000  # of one view: all pairs of them are compared


@dataclass(frozen=True, eq=False)
class Pool:
    """All tables: (site, group, label, decision, column); all histograms, summed over sites."""

    question: Question
    sites: tuple[str, ...]
    groups: tuple[Group, ...]
    tables: np.ndarray
    histogram: np.ndarray  # (group, label, decision, score, bin)
    blur: np.ndarray | None = None  # (group, 3, label, decision, score, bin): see `Sums`


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
    blur: np.ndarray | None = None  # (3, label, group, score, bin): see `Sums`

    def placed(self, where: int) -> np.ndarray:
        """The histogram if rows whose bin is not known lay in the first (0) or last (1) they may
        lie in."""
        return self.histogram if self.blur is None else self.histogram + self.blur[where]

    @property
    def complete(self) -> bool:
        """Every row is in a histogram: no site has withheld cells, or has no scores."""
        if not self.scored:
            return False
        return bool(abs(self.histogram[:, :, 0].sum() - self.tally.count.sum()) < 0.5)

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
    blur = np.zeros((len(groups), 3, *question.empty_histogram().shape)) if sums.blur else None
    for group, counts in sums.blur.items():
        assert blur is not None
        blur[place[group]] = counts
    shown = replace(
        question,
        classes=_told_apart(question.classes),
        attributes=_told_apart(question.attributes),
    )
    named = list(zip(*(_values(column) for column in zip(*groups, strict=True)), strict=True))
    return Pool(shown, _told_apart(tuple(sums.sites)), tuple(named), tables, histogram, blur)


def _values(column: tuple[str | None, ...]) -> list[str | None]:
    """Of one attribute, as they can be shown."""
    known = tuple(dict.fromkeys(v for v in column if v is not None))
    shown = dict(zip(known, _told_apart(known), strict=True))
    return [None if v is None else shown[v] for v in column]


def _told_apart(names: tuple[str, ...]) -> tuple[str, ...]:
    """As they can be shown; where two would then look the same, as Python writes them."""
    shown = tuple(map(printable, names))
    return shown if len(set(shown)) == len(names) else tuple(map(ascii, names))


def views(pooled: Pool) -> Iterator[View]:
    """Each attribute, then their intersections, all of them together last.

    One that nobody has recorded is left out.
    """
    attributes = range(len(pooled.question.attributes))
    found = 0
    for size in range(1, len(attributes) + 1):
        for chosen in combinations(attributes, size):
            seen = view(pooled, chosen)
            if len(seen.names) > MOST_GROUPS:
                raise FedgftError(
                    f"{seen.title} gives {len(seen.names):,} groups, more than {MOST_GROUPS:,}: "
                    "measure fewer columns, or put values together first"
                )
            found += len(seen.names) > 0
            if seen.names:
                yield seen
    if not found:
        raise FedgftError(f"no row has {' or '.join(pooled.question.attributes)} recorded")


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
        blur=None
        if pooled.blur is None
        else np.moveaxis(gathered(pooled.blur.sum(3), 0), (1, 2), (0, 1)),
    )


def _names(cells: list[tuple], attributes: list[str]) -> tuple[str, ...]:
    """`White & Male`; with the attributes' names where that could mean two groups."""
    names = [" & ".join(map(str, cell)) for cell in cells]
    if len(set(names)) < len(names):
        pairs = [zip(attributes, cell, strict=True) for cell in cells]
        names = ["; ".join(f"{a}={v!r}" for a, v in pair) for pair in pairs]
    return tuple(names)
