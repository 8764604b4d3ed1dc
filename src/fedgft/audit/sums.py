"""What leaves a site: counts, and sums of scores, by group, label and decision. No row does.

A group is one value for each attribute, None where it is not recorded. The table of a group has
the axes (label, decision, column) and the columns

    count | noise: variance that was added to it | slack: how far off it may be, at most | scores...

All of them add up over rows and over sites, so one `+` merges anything with anything.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from fedgft.arguments import instance
from fedgft.errors import FedgftError

Group = tuple[str | None, ...]
COUNT, NOISE, SLACK, SCORES = 0, 1, 2, 3  # columns of a table; scores are the last ones
MOST_CLASSES, MOST_ATTRIBUTES, MOST_BINS = 50, 4, 10_000
MOST_NUMBERS = 5_000_000  # in the histograms of one group


@dataclass(frozen=True)
class Question:
    """What was counted. Sites can be summed only where they were asked the same."""

    classes: tuple[str, ...]  # of two, the second is the positive one
    attributes: tuple[str, ...]  # the group columns
    threshold: float | None = None  # None: decisions were brought, or are the likeliest class
    scored: bool = False
    bins: int = 100  # of the histograms: [i/bins, (i+1)/bins), and 1 lies in the last

    def __post_init__(self) -> None:
        """What can be held in memory for every group, and told apart in a title."""
        classes, scores = len(self.classes), len(self.score_classes)
        if not 2 <= classes <= MOST_CLASSES or len(set(self.classes)) < classes:
            raise FedgftError(f"classes: there must be 2 to {MOST_CLASSES} different ones")
        if not 1 <= len(self.attributes) <= MOST_ATTRIBUTES:
            raise FedgftError(f"groups: there must be 1 to {MOST_ATTRIBUTES} group columns")
        if len(self.attributes) > 1 and any(" & " in name for name in self.attributes):
            raise FedgftError("groups: ' & ' in a column's name would read as two; rename it")
        if self.scored and classes**2 * scores * self.bins > MOST_NUMBERS:
            raise FedgftError(f"bins: {self.bins} are too many for {classes} classes")

    @property
    def score_classes(self) -> tuple[int, ...]:
        """The classes whose scores are summed: the positive one of two, or all of more."""
        if not self.scored:
            return ()
        return (1,) if len(self.classes) == 2 else tuple(range(len(self.classes)))

    def empty_table(self) -> np.ndarray:
        classes = len(self.classes)
        return np.zeros((classes, classes, SCORES + len(self.score_classes)))

    def empty_histogram(self) -> np.ndarray:
        classes = len(self.classes)
        return np.zeros((classes, classes, len(self.score_classes), self.bins))

    def meet(self, other: "Question") -> "Question":
        """The question both answer: histograms may be coarsened, all else must be the same."""
        for name, what in (("classes", "label classes"), ("attributes", "group columns"),
                           ("scored", "scores"), ("threshold", "thresholds")):  # fmt: skip
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise FedgftError(f"{what} differ: {_said(mine)} and {_said(theirs)}")
        few, many = sorted((self.bins, other.bins))
        if self.scored and many % few:
            raise FedgftError(
                f"histograms differ: {self.bins} and {other.bins} bins, and neither divides the "
                "other; measure again with the same --bins"
            )
        return replace(self, bins=few)


@dataclass(frozen=True)
class Privacy:
    """What was done to a site's numbers before they left it."""

    mechanism: str = "none"  # or "discrete laplace", "discrete gaussian"
    epsilon: float = 0.0
    delta: float = 0.0
    scale: float = 0.0
    variance: float = 0.0  # of the noise on each count of the finest table
    names: str = ""  # of groups and classes: "declared" or "from the data"
    min_cell: int = 0
    suppressed: int = 0  # cells with 1 to min_cell - 1 rows, withheld


@dataclass(frozen=True, eq=False)
class Site:
    """The tables of one site, and the rows that could not be counted."""

    tables: Mapping[Group, np.ndarray]
    label_missing: float = 0.0
    prediction_missing: float = 0.0
    privacy: tuple[Privacy, ...] = ()

    def __add__(self, other: "Site") -> "Site":
        return Site(
            _added(self.tables, other.tables),
            self.label_missing + other.label_missing,
            self.prediction_missing + other.prediction_missing,
            tuple(sorted((*self.privacy, *other.privacy), key=str)),
        )


@dataclass(frozen=True, eq=False)
class Sums:
    """The sums of any number of sites.

    Laws: `+` is associative and commutative, `Sums()` is its zero, and the sums of a union of
    rows are the sum of those of its parts. Sites of one name are one site: their rows add up.
    Sites without a name are different sites: added to others they are called "site 1", "site 2",
    ... in the order in which they come.

    Files say of few rows only that they lie in several bins. `histogram` has them spread evenly
    over these bins, and `blur` says how far that may be off, (3, label, decision, score, bin): what
    to add to the histogram if all such rows lay in the first of their bins; in the last; and, in
    bin 0, how far off the sum of the cell's scores may be. A group without an entry is exact.
    """

    question: Question | None = None
    sites: Mapping[str, Site] = field(default_factory=dict)
    histogram: Mapping[Group, np.ndarray] = field(default_factory=dict)  # of all sites together
    blur: Mapping[Group, np.ndarray] = field(default_factory=dict)
    numbered: tuple[str, ...] = ()  # names of sites that were measured without one

    def __add__(self, other: "Sums") -> "Sums":
        return merge((self, other)) if isinstance(other, Sums) else NotImplemented

    def __radd__(self, other: Any) -> "Sums":
        """For `sum(...)`, which starts at 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    @property
    def asked(self) -> Question:
        """The question, of sums that answer one."""
        if self.question is None:
            raise FedgftError("these are the sums of nothing: no site is in them")
        return self.question

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups anywhere, sorted, "not recorded" last."""
        found = {group for site in self.sites.values() for group in site.tables}
        return tuple(sorted(found, key=order))

    def rows(self) -> float:
        return float(
            sum(t[..., COUNT].sum() for s in self.sites.values() for t in s.tables.values())
        )


def merge(parts: Iterable[Sums]) -> Sums:
    """The sum of all parts, in one pass; of a part, no more is kept than goes into the sum."""
    question: Question | None = None
    sites: dict[str, Site] = {}
    unnamed: list[Site] = []
    spread: tuple[dict[Group, np.ndarray], ...] = ({}, {})  # histograms, and how far they are off
    for part in parts:
        instance("sums", part, Sums, "measure() makes them, read_sums() reads them from a file")
        if part.question is None:
            continue
        before, question = question, _both(question, part.asked)
        if before is not None and before.bins != question.bins:
            spread = tuple(
                {g: coarsened(counts, question.bins) for g, counts in held.items()}
                for held in spread
            )
        for name, site in part.sites.items():
            if name == "" or name in part.numbered:
                unnamed.append(site)
            else:
                sites[name] = sites[name] + site if name in sites else site
        for held, new in zip(spread, (part.histogram, part.blur), strict=True):
            for group, counts in new.items():
                counts = coarsened(counts, question.bins)
                held[group] = held[group] + counts if group in held else counts
    if question is None:
        return Sums()
    numbered = _numbered(unnamed, sites)
    given = tuple(name for name in numbered if name)
    return Sums(question, dict(sorted(sites.items())) | numbered, *spread, numbered=given)


def _numbered(unnamed: list[Site], named: Mapping[str, Site]) -> dict[str, Site]:
    """Names for sites that have none: "" for one alone, else numbers that no other site has."""
    if len(unnamed) == 1 and not named:
        return {"": unnamed[0]}
    free = (name for name in map("site {}".format, count(1)) if name not in named)
    return dict(zip(free, unnamed, strict=False))


def _both(first: Question | None, second: Question) -> Question:
    return second if first is None else first.meet(second)


def coarsened(histogram: np.ndarray, bins: int) -> np.ndarray:
    """The same rows in fewer bins, whose number divides the old one."""
    *cell, old = histogram.shape
    return histogram if old == bins else histogram.reshape(*cell, bins, old // bins).sum(-1)


def order(group: Group) -> tuple:
    return tuple((value is None, _number(value), value or "") for value in group)


def _number(value: str | None) -> float:
    """Groups that are numbers are sorted as numbers, before all words."""
    try:
        number = float(value) if value is not None else np.inf
        return number if number == number else np.inf
    except ValueError:
        return np.inf


def _added(
    first: Mapping[Group, np.ndarray], second: Mapping[Group, np.ndarray]
) -> dict[Group, np.ndarray]:
    out = dict(first)
    for group, table in second.items():
        out[group] = out[group] + table if group in out else table
    return out


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    if isinstance(value, bool):
        return "with" if value else "without"
    return "decisions without a threshold" if value is None else repr(value)
