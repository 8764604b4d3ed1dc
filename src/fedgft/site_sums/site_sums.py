"""The sums of any number of sites, which add up and can be written as text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.errors import FedgftError
from fedgft.formatting import format_count, join_names, printable
from fedgft.site_sums.json_reader import read_site
from fedgft.site_sums.json_writer import MIN_BIN, write_site
from fedgft.site_sums.tables import (
    COUNT,
    ROWS,
    Group,
    MeasurementSpec,
    SiteRecord,
    SiteTables,
    add_arrays,
    group_sort_key,
)
from fedgft.store import atomic_write, expand_user
from fedgft.validation import check_instance

MAX_NAME = 30  # most characters of a name in the representation of sums


@dataclass(frozen=True, eq=False, repr=False)
class SiteSums:
    """The sums of any number of sites.

    Laws: `+` is associative and commutative, `SiteSums()` is its zero, and the sums over a union of
    rows equal the sum of the sums over its parts. Sites with the same name are one site, and their
    rows add up. Sites without a name are different sites. When they are added to other sites, they
    are named "site 1", "site 2", ... in order of addition.

    If few rows share a bin, a file states only a range of bins for them. `histogram` spreads such
    rows evenly over their range, and `bin_error`, (3, label, decision, score, bin), states how
    wrong this may be: `bin_error[0]` is the change of the histogram if all such rows are in the
    first bin of their range; `bin_error[1]` is the change if they are in the last bin; and bin 0 of
    `bin_error[2]` is the largest error of the cell's sum of scores. The histogram of a group
    without an entry in `bin_error` is exact.

    If the rows have weights, the counts, sums of scores and histograms are weighted, and `bin_rows`
    holds the numbers of rows in the bins.

    Parameters
    ----------
    spec
        What was measured. None: there is no site.
    sites
        The tables of each site, by its name.
    histogram
        The histograms of scores by group, of all sites together.
    bin_error
        How wrong the histograms may be, by group: see above.
    bin_rows
        The numbers of rows in the bins of the histograms, by group, if the rows have weights.
    numbered
        The names that were assigned to sites that were measured without a name.
    notes
        Sentences that a reader of the numbers should see. They are not written to files.

    Examples
    --------
    >>> import fedgft
    >>> y = [1, 0, 1, 0]
    >>> site = fedgft.measure(y, [1, 1, 1, 0], sensitive_features=list("ffmm"), site="north")
    >>> site
    SiteSums(4 rows of 1 site: north; 2 groups by group: f, m; classes 0, 1)
    >>> fedgft.SiteSums.from_json(site.to_json()).rows()
    4.0
    """

    spec: MeasurementSpec | None = None
    sites: Mapping[str, SiteTables] = field(default_factory=dict)
    histogram: Mapping[Group, np.ndarray] = field(default_factory=dict)
    bin_error: Mapping[Group, np.ndarray] = field(default_factory=dict)
    bin_rows: Mapping[Group, np.ndarray] = field(default_factory=dict)
    numbered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: "SiteSums") -> "SiteSums":
        return merge((self, other)) if isinstance(other, SiteSums) else NotImplemented

    def __radd__(self, other: Any) -> "SiteSums":
        """Support `sum(...)`, which starts at 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __repr__(self) -> str:
        if self.spec is None:
            return "SiteSums(no site)"
        sites = len(self.sites)
        attributes = len(self.spec.attributes)
        names = dict.fromkeys(group[:attributes] for group in self.groups)
        groups = [" & ".join(value or "?" for value in group) for group in names]
        parts = (
            f"{format_count(round(self.rows()), 'row')} of {format_count(sites, 'site')}"
            + (f": {_list_names(list(self.sites))}" if any(self.sites) else ""),
            f"{format_count(len(groups), 'group')} by {' & '.join(self.spec.attributes)}: "
            f"{_list_names(groups)}",
            f"classes {_list_names(self.spec.classes)}" + ", with scores" * self.spec.scored,
            *([f"given {' & '.join(self.spec.given)}"] if self.spec.given else []),
            *(["weighted"] if self.spec.is_weighted else []),
        )
        return printable(f"SiteSums({'; '.join(parts)})")

    def require_spec(self) -> MeasurementSpec:
        """Return what was measured; raise a `FedgftError` if no site is in the sums."""
        if self.spec is None:
            raise FedgftError("these are the sums of nothing: no site is in them", kind="data")
        return self.spec

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of all sites, sorted; values that are not recorded come last."""
        found = {group for site in self.sites.values() for group in site.tables}
        return tuple(sorted(found, key=group_sort_key))

    def rows(self) -> float:
        """Return the number of rows that were counted; rows count once, whatever they weigh.

        If a row belongs to several groups, with weights, this is the sum of the weights.
        """
        tables = (table for site in self.sites.values() for table in site.tables.values())
        column = ROWS if self.spec is not None and self.spec.counts_rows else COUNT
        return float(sum(table[..., column].sum() for table in tables))

    def named(self, name: str) -> "SiteSums":
        """Return the sums of this single site under another name."""
        record = self._require_one_site()
        return replace(self, sites={name: record.site}, numbered=())

    def without_strata(self) -> "SiteSums":
        """Return the same sums over all strata."""
        if self.spec is None or not self.spec.given:
            return self
        attributes = len(self.spec.attributes)

        def add_strata(arrays: Mapping[Group, np.ndarray]) -> dict[Group, np.ndarray]:
            total: dict[Group, np.ndarray] = {}
            for group, array in arrays.items():
                add_arrays(total, {group[:attributes]: array})
            return total

        return replace(
            self,
            spec=replace(self.spec, given=()),
            sites={n: replace(s, tables=add_strata(s.tables)) for n, s in self.sites.items()},
            histogram=add_strata(self.histogram),
            bin_error=add_strata(self.bin_error),
            bin_rows=add_strata(self.bin_rows),
        )

    def to_json(self, *, min_bin: int = MIN_BIN) -> str:
        """Return the text of the site's file, which holds sums only: see docs/audit-reference.md.

        The sums must be those of one site, with a name.

        Parameters
        ----------
        min_bin
            The smallest number of rows that a number about scores may cover. Bins with fewer rows
            are merged.
        """
        return write_site(self._require_one_site(), min_bin=min_bin)

    @classmethod
    def from_json(cls, text: str, *, source: str = "text") -> "SiteSums":
        """Read and check the text of a site's file.

        A wrong field, or numbers that contradict each other, raise a `FedgftError`.

        Parameters
        ----------
        text
            What `to_json` returned.
        source
            Where the text is from, such as the name of a file: error messages begin with it.
        """
        found = read_site(check_instance("text", text, str), source=source)
        bins = (found.histogram, found.bin_error, found.bin_rows)
        return cls(found.spec, {found.name: found.site}, *bins)

    def save(self, path: str | Path, *, min_bin: int = MIN_BIN) -> Path:
        """Write the sums of one site to a file that only its owner can read; return its path.

        Parameters
        ----------
        path
            The path of the file. An existing file is replaced only when the new one is complete.
        min_bin
            As in `to_json`.
        """
        file = expand_user(path)
        text = self.to_json(min_bin=min_bin)
        with atomic_write(file, private=True) as part:
            part.write(text.encode())
        return file

    def _require_one_site(self) -> SiteRecord:
        """Return the parts of these sums; raise a `FedgftError` unless they are of one site."""
        if len(self.sites) != 1:
            raise FedgftError(f"a file holds the sums of one site, not of {len(self.sites)}")
        ((name, site),) = self.sites.items()
        bins = (self.histogram, self.bin_error, self.bin_rows)
        return SiteRecord(self.require_spec(), name, site, *bins)


def _list_names(names: Sequence[str]) -> str:
    """Return the first names in one short line, and how many more there are."""
    return join_names(
        [name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..." for name in names]
    )


def merge(parts: Iterable[SiteSums]) -> SiteSums:
    """Return the sum of all parts. One pass reads them and holds one part in memory at a time.

    A `FedgftError` is raised if the parts measured different things (see
    `MeasurementSpec.combine`).
    """
    spec: MeasurementSpec | None = None
    named: dict[str, SiteTables] = {}
    unnamed: list[SiteTables] = []
    histogram: dict[Group, np.ndarray] = {}
    bin_error: dict[Group, np.ndarray] = {}
    bin_rows: dict[Group, np.ndarray] = {}
    notes: dict[str, None] = {}
    for part in parts:
        check_instance(
            "sums", part, SiteSums, "measure() makes them, read_sums() reads them from a file"
        )
        if part.spec is None:
            continue
        common = part.spec if spec is None else spec.combine(part.spec)
        notes |= dict.fromkeys(part.notes)
        if spec is not None and spec.bins != common.bins:
            histogram = _coarsen_all(histogram, common.bins)
            bin_error = _coarsen_all(bin_error, common.bins)
            bin_rows = _coarsen_all(bin_rows, common.bins)
        spec = common
        for name, site in part.sites.items():
            if name == "" or name in part.numbered:
                unnamed.append(site)
            else:
                named[name] = named[name] + site if name in named else site
        add_arrays(histogram, _coarsen_all(part.histogram, spec.bins))
        add_arrays(bin_error, _coarsen_all(part.bin_error, spec.bins))
        add_arrays(bin_rows, _coarsen_all(part.bin_rows, spec.bins))
    if spec is None:
        return SiteSums()
    numbered = number_sites(unnamed, named)
    sites = dict(sorted(named.items())) | numbered
    return SiteSums(
        spec,
        sites,
        histogram,
        bin_error,
        bin_rows,
        numbered=tuple(filter(None, numbered)),
        notes=tuple(notes),
    )


def number_sites(unnamed: list[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Name the sites that have no name.

    A single site, without others, keeps the name "". Otherwise the names are "site 1", "site 2",
    ..., without those that other sites have.
    """
    if len(unnamed) == 1 and not named:
        return {"": unnamed[0]}
    free = (name for name in map("site {}".format, count(1)) if name not in named)
    return dict(zip(free, unnamed, strict=False))


def _coarsen_all(histograms: Mapping[Group, np.ndarray], bins: int) -> dict[Group, np.ndarray]:
    """Merge the bins (the last axis) into `bins` bins, which must divide their current number."""
    return {
        group: array.reshape(*array.shape[:-1], bins, -1).sum(-1)
        for group, array in histograms.items()
    }
