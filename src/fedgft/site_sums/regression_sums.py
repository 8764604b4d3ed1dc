"""The sums that sites send about a model of numbers, such as prices, pay or times.

They are sums of predictions, outcomes and errors by group. They are of another kind than
`SiteSums`, which holds counts of classes: a file is one or the other, and each reader says so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedgft.errors import FedgftError
from fedgft.formatting import format_count, join_names, printable
from fedgft.site_sums.dates import combine_dates, combine_versions
from fedgft.site_sums.moments import Moments
from fedgft.site_sums.site_sums import number_sites
from fedgft.site_sums.spelling import GROUP_COLUMN, Spellings, describe_site, name_column
from fedgft.site_sums.tables import Group, group_sort_key
from fedgft.store import atomic_write, expand_user
from fedgft.validation import check_instance

MIN_ROWS = 10  # a group with fewer rows is withheld unless the user names another number
LEAST_ROWS = 5  # smallest such number: with fewer rows, values follow from the sums
Clip = tuple[float, float]
"The smallest and the largest value; values outside were replaced by them."


@dataclass(frozen=True)
class RegressionSpec:
    """What was measured; it must be the same at all sites.

    Parameters
    ----------
    attributes
        The names of the group columns.
    target, prediction
        The names of the columns with the outcome and with the prediction; "" if there is none, or
        if they differ between sites.
    weight
        The name of the column with weights; "" without weights.
    clip
        The bounds to which outcomes and predictions were clipped. None: they were not.
    date, model_version
        The date of the rows, or a span of several, and the version of the model: see
        `fedgft.site_sums.dates`. "": not stated.
    """

    attributes: tuple[str, ...]
    target: str = ""
    prediction: str = ""
    weight: str = ""
    clip: Clip | None = None
    date: str = ""
    model_version: str = ""

    def combine(self, other: "RegressionSpec") -> "RegressionSpec":
        """Return what two sites measured; raise a `FedgftError` if they measured other things."""
        if self.attributes != other.attributes:
            ours, theirs = (", ".join(spec.attributes) for spec in (self, other))
            problem = f"one has the groups {ours}, the other {theirs}"
        elif bool(self.weight) != bool(other.weight):
            problem = "only one has weights"
        elif self.clip != other.clip:
            ours, theirs = map(describe_clip, (self.clip, other.clip))
            problem = f"one is {ours}, the other {theirs}; use the same `clip` at all sites"
        else:
            return replace(
                self,
                target=self.target if self.target == other.target else "",
                prediction=self.prediction if self.prediction == other.prediction else "",
                weight=self.weight if self.weight == other.weight else "weights",
                date=combine_dates(self.date, other.date),
                model_version=combine_versions(self.model_version, other.model_version),
            )
        raise FedgftError(f"these sums do not fit together: {problem}", kind="conflict")


def describe_clip(clip: Clip | None) -> str:
    """Return the bounds of clipped values, in words."""
    return "not clipped" if clip is None else f"clipped to {clip[0]:g} to {clip[1]:g}"


class Clipped(NamedTuple):
    """The numbers of rows whose value was clipped; None: a few, and the number is withheld."""

    target: int | None = 0
    prediction: int | None = 0


@dataclass(frozen=True, eq=False)
class RegressionSite:
    """The sums of one site.

    Parameters
    ----------
    cells
        The sums of each group. A value of a group is None where it is not recorded.
    withheld
        The groups with rows that are too few for sums.
    min_cell
        Groups with fewer rows than this were withheld. 0: none was.
    target_missing, prediction_missing
        The numbers of rows without an outcome, and without a prediction only. None: a few.
    clipped
        How many rows were clipped.
    """

    cells: Mapping[Group, Moments]
    withheld: tuple[Group, ...] = ()
    min_cell: int = 0
    target_missing: int | None = 0
    prediction_missing: int | None = 0
    clipped: Clipped = field(default_factory=Clipped)

    def __add__(self, other: "RegressionSite") -> "RegressionSite":
        cells = dict(self.cells)
        for group, moments in other.cells.items():
            cells[group] = cells[group] + moments if group in cells else moments
        return RegressionSite(
            cells,
            tuple(sorted({*self.withheld, *other.withheld}, key=group_sort_key)),
            max(self.min_cell, other.min_cell),
            _add(self.target_missing, other.target_missing),
            _add(self.prediction_missing, other.prediction_missing),
            Clipped(*map(_add, self.clipped, other.clipped)),
        )

    def withhold(self, min_cell: int) -> "RegressionSite":
        """Return the sums without groups and without counts of fewer than `min_cell` rows."""
        kept = {group: m for group, m in self.cells.items() if m.rows >= min_cell}
        withheld = tuple(group for group in self.cells if group not in kept)

        def hide(count: int | None) -> int | None:
            return None if count is None or 0 < count < min_cell else count

        return RegressionSite(
            kept,
            (*self.withheld, *withheld),
            max(min_cell, self.min_cell),
            hide(self.target_missing),
            hide(self.prediction_missing),
            Clipped(*map(hide, self.clipped)),
        )


def _add(one: int | None, other: int | None) -> int | None:
    """Return the sum of two numbers of rows; None if one of them is withheld."""
    return None if one is None or other is None else one + other


@dataclass(frozen=True, eq=False, repr=False)
class RegressionSums:
    """The sums of any number of sites about a model of numbers.

    `+` is associative and commutative up to rounding, and the sums over a union of rows equal the
    sum of the sums over its parts, unless small groups were withheld. Sites with the same name are
    one site.

    Parameters
    ----------
    spec
        What was measured. None: there is no site.
    sites
        The sums of each site, by its name.
    numbered
        The names that were assigned to sites that were measured without a name.
    notes
        Sentences that a reader of the numbers should see. They are not written to files.

    Examples
    --------
    >>> from fedgft.auditing import measure_regression
    >>> pay = [40.0, 50.0, 60.0] * 8
    >>> site = measure_regression(pay, pay, sensitive_features=list("ffm") * 8, site="north")
    >>> site
    RegressionSums(16 rows of 1 site: north; 1 group by group: f)
    >>> RegressionSums.from_json(site.to_json()).rows()
    16
    """

    spec: RegressionSpec | None = None
    sites: Mapping[str, RegressionSite] = field(default_factory=dict)
    numbered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: "RegressionSums") -> "RegressionSums":
        return (
            merge_regression((self, other)) if isinstance(other, RegressionSums) else NotImplemented
        )

    def __radd__(self, other: Any) -> "RegressionSums":
        """Support `sum(...)`, which starts at 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __repr__(self) -> str:
        if self.spec is None:
            return "RegressionSums(no site)"
        groups = [" & ".join(value or "?" for value in group) for group in self.groups]
        names = f": {join_names(list(self.sites))}" if any(self.sites) else ""
        text = f"{format_count(self.rows(), 'row')} of {format_count(len(self.sites), 'site')}"
        by = f"{format_count(len(groups), 'group')} by {' & '.join(self.spec.attributes)}"
        return printable(f"RegressionSums({text}{names}; {by}: {join_names(groups)})")

    def require_spec(self) -> RegressionSpec:
        """Return what was measured; raise a `FedgftError` if no site is in the sums."""
        if self.spec is None:
            raise FedgftError("these are the sums of nothing: no site is in them", kind="data")
        return self.spec

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of all sites with sums, sorted; values that are not recorded come last."""
        found = {group for site in self.sites.values() for group in site.cells}
        return tuple(sorted(found, key=group_sort_key))

    def rows(self) -> int:
        """Return the number of rows in the sums, without those that are withheld."""
        return sum(cell.rows for site in self.sites.values() for cell in site.cells.values())

    def named(self, name: str) -> "RegressionSums":
        """Return the sums of this single site under another name."""
        _, _, site = self._require_one_site()
        return replace(self, sites={name: site}, numbered=())

    def to_json(self) -> str:
        """Return the text of the site's file, which holds sums only: see docs/regression.md.

        The sums must be those of one site, with a name, measured with a `min_cell`.
        """
        from fedgft.site_sums.regression_json import write_regression

        return write_regression(*self._require_one_site())

    @classmethod
    def from_json(cls, text: str, *, source: str = "text") -> "RegressionSums":
        """Read and check the text of a site's file.

        A wrong field, or numbers that contradict each other, raise a `FedgftError`.

        Parameters
        ----------
        text
            What `to_json` returned.
        source
            Where the text is from, such as the name of a file: error messages begin with it.
        """
        from fedgft.site_sums.regression_json import read_regression

        spec, name, site = read_regression(check_instance("text", text, str), source=source)
        return cls(spec, {name: site})

    def save(self, path: str | Path) -> Path:
        """Write the sums of one site to a file that only its owner can read; return its path.

        Parameters
        ----------
        path
            The path of the file. An existing file is replaced only when the new one is complete.
        """
        file = expand_user(path)
        text = self.to_json()
        with atomic_write(file, private=True) as part:
            part.write(text.encode())
        return file

    def _require_one_site(self) -> tuple[RegressionSpec, str, RegressionSite]:
        """Return the parts of these sums; raise a `FedgftError` unless they are of one site."""
        if len(self.sites) != 1:
            raise FedgftError(f"a file holds the sums of one site, not of {len(self.sites)}")
        ((name, site),) = self.sites.items()
        return self.require_spec(), name, site


def merge_regression(parts: Iterable[RegressionSums]) -> RegressionSums:
    """Return the sum of all parts.

    A `FedgftError` is raised if the parts measured different things (see `RegressionSpec.combine`).
    """
    spec: RegressionSpec | None = None
    named: dict[str, RegressionSite] = {}
    unnamed: list[RegressionSite] = []
    notes: dict[str, None] = {}
    for part in parts:
        check_instance("sums", part, RegressionSums, "measure_regression() makes them")
        if part.spec is None:
            continue
        spec = part.spec if spec is None else spec.combine(part.spec)
        notes |= dict.fromkeys(part.notes)
        for name, site in part.sites.items():
            if name == "" or name in part.numbered:
                unnamed.append(site)
            else:
                named[name] = named[name] + site if name in named else site
    numbered = number_sites(unnamed, named)
    sites = dict(sorted(named.items())) | numbered
    return RegressionSums(spec, sites, tuple(filter(None, numbered)), tuple(notes))


def unify_spellings(sums: RegressionSums, spellings: Spellings, where: str = "") -> RegressionSums:
    """Return the sums with every name of a group in the spelling that was seen first.

    Parameters
    ----------
    sums
        The sums of one or more sites.
    spellings
        The spellings that were seen so far.
    where
        The file that the sums are from, for messages. Empty: the name of each site is used.
    """
    if sums.spec is None:
        return sums
    place = where or describe_site(next(iter(sums.sites), ""))
    columns = spellings.unify_names(GROUP_COLUMN, sums.spec.attributes, place)
    sites = {}
    for name, site in sums.sites.items():
        known = [*site.cells, *site.withheld]
        values: list[dict[str | None, str | None]] = []
        for i, column in enumerate(columns):
            texts = sorted({text for group in known if (text := group[i]) is not None})
            kept = spellings.unify_names(name_column(column), texts, where or describe_site(name))
            values.append({None: None, **dict(zip(texts, kept, strict=True))})
        cells: dict[Group, Moments] = {}
        for group, moments in site.cells.items():
            new = _rename(group, values)
            cells[new] = cells[new] + moments if new in cells else moments
        withheld = dict.fromkeys(_rename(group, values) for group in site.withheld)
        sites[name] = replace(site, cells=cells, withheld=tuple(withheld))
    notes = tuple(dict.fromkeys((*sums.notes, *spellings.notes)))
    return replace(sums, spec=replace(sums.spec, attributes=columns), sites=sites, notes=notes)


def _rename(group: Group, values: list[dict[str | None, str | None]]) -> Group:
    """Return a group with each of its values replaced."""
    return tuple(names[value] for names, value in zip(values, group, strict=True))
