"""Names that differ only in case or in spaces: "Man" at one site and "man" at another.

Read literally they would be two groups, and every gap between them would be wrong. So they are
refused before any number is computed, or merged if the user says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedgft.errors import FedgftError
from fedgft.formatting import join_names, printable
from fedgft.site_sums.site_sums import SiteSums
from fedgft.site_sums.tables import Group, MeasurementSpec, RandomizedGroups, add_arrays

MAX_LENGTH = 60  # characters of a name in a message
GROUP_COLUMN = "group column"
GIVEN_COLUMN = "strata column"
LABEL = "label"  # also the role of decisions, which are labels


class Spelling(NamedTuple):
    """A name as it is written somewhere."""

    text: str
    where: str

    def quote(self) -> str:
        """Return the name in quotes, and where it is."""
        return f"{quote(self.text)} ({printable(self.where)})"


class Spellings:
    """The spellings of all names that were seen so far; the first spelling of a name is kept.

    Parameters
    ----------
    ignore_case
        Whether spellings that differ only in case or in spaces are merged. Otherwise they raise a
        `FedgftError`.

    Attributes
    ----------
    notes
        A sentence for each spelling that was replaced.
    """

    def __init__(self, *, ignore_case: bool) -> None:
        self.ignore_case = ignore_case
        self.notes: list[str] = []
        self._first: dict[tuple[str, str], Spelling] = {}

    def unify(self, sums: SiteSums, where: str = "") -> SiteSums:
        """Return the sums with every name in the spelling that was seen first, and with notes.

        Parameters
        ----------
        sums
            The sums of one or more sites.
        where
            The file that the sums are from, for messages. Empty: the name of each site is used.
        """
        if sums.spec is None:
            return sums
        spec = sums.spec
        place = where or describe_site(next(iter(sums.sites), ""))
        attributes = self.unify_names(GROUP_COLUMN, spec.attributes, place)
        given = self.unify_names(GIVEN_COLUMN, spec.given, place)
        columns = attributes + given
        classes = self.unify_names(LABEL, spec.classes, place)
        if len(set(classes)) < len(classes):
            problem = "has labels that differ only in case or spaces; measure it again with"
            raise FedgftError(f"{place} {problem} `ignore_case`", kind="conflict")
        values: list[dict[str, str]] = [{} for _ in columns]
        for name, site in sums.sites.items():
            here = where or describe_site(name)
            for i, column in enumerate(columns):
                found = sorted({value for group in site.tables if (value := group[i]) is not None})
                kept = self.unify_names(name_column(column), found, here)
                values[i] |= dict(zip(found, kept, strict=True))
        if columns == spec.columns and classes == spec.classes and not _has_changes(values):
            return sums
        sites = {
            name: replace(site, tables=_rename_groups(site.tables, values))
            for name, site in sums.sites.items()
        }
        return replace(
            sums,
            notes=tuple(dict.fromkeys((*sums.notes, *self.notes))),
            spec=replace(
                spec,
                attributes=attributes,
                given=given,
                classes=classes,
                randomized=self._unify_randomized(spec, attributes, place),
            ),
            sites=sites,
            histogram=_rename_groups(sums.histogram, values),
            bin_error=_rename_groups(sums.bin_error, values),
            bin_rows=_rename_groups(sums.bin_rows, values),
        )

    def _unify_randomized(
        self, spec: MeasurementSpec, attributes: Sequence[str], where: str
    ) -> RandomizedGroups | None:
        """Return how the groups were randomized, with the values in the spelling seen first."""
        if spec.randomized is None:
            return None
        pairs = zip(attributes, spec.randomized.values, strict=True)
        values = (self.unify_names(name_column(name), each, where) for name, each in pairs)
        return replace(spec.randomized, values=tuple(values))

    def unify_names(self, role: str, names: Iterable[str], where: str) -> tuple[str, ...]:
        """Return the names, each in the spelling that was seen first.

        Parameters
        ----------
        role
            What the names are: only names of the same role are compared.
        names
            The names as they are written.
        where
            Where they are written, for messages.
        """
        kept = []
        different = []
        for name in names:
            text = " ".join(name.split()) if self.ignore_case else name
            first = self._first.setdefault((role, fold(name)), Spelling(text, where))
            if first.text != name:
                different.append((first, Spelling(name, where)))
            kept.append(first.text)
        if different and not self.ignore_case:
            text = describe_conflict(role, different)
            raise FedgftError(text, field="ignore_case", kind="conflict")
        for first, other in different:
            text = f"{role}: {quote(other.text)} is counted as {quote(first.text)} (`ignore_case`)"
            if text not in self.notes:
                self.notes.append(text)
        return tuple(kept)


def fold(name: str) -> str:
    """Return what spellings of one name share: the name in lower case, without spaces.

    >>> fold(" Asian  Woman") == fold("asianwoman")
    True
    """
    return "".join(name.split()).casefold()


def describe_conflict(role: str, different: Iterable[tuple[Spelling, Spelling]]) -> str:
    """Return the message about spellings that differ: their names, and where they are."""
    parts = join_names([f"{first.quote()} and {here.quote()}" for first, here in different])
    they = "differ only in case or spaces"
    return f"{role}: {parts} {they}; correct them, or merge them with `ignore_case`"


def name_column(attribute: str) -> str:
    """Return how a message calls a column with groups."""
    return f"column {quote(attribute)}"


def describe_site(name: str) -> str:
    """Return how a message calls a site."""
    return f"site {quote(name)}" if name else "a site without a name"


def quote(name: str) -> str:
    """Return a name from data in quotes, printable and not too long."""
    return f"'{printable(name)[:MAX_LENGTH]}'"


def _has_changes(values: Iterable[Mapping[str, str]]) -> bool:
    return any(old != new for names in values for old, new in names.items())


def _rename_groups(
    tables: Mapping[Group, np.ndarray], values: list[dict[str, str]]
) -> dict[Group, np.ndarray]:
    """Return the tables under the new names of their groups; those of one group are added."""
    renamed: dict[Group, np.ndarray] = {}
    for group, table in tables.items():
        names = zip(values, group, strict=True)
        new = tuple(None if old is None else each[old] for each, old in names)
        add_arrays(renamed, {new: table})
    return renamed
