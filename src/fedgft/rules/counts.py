"""Counts of scores by site, group, label and bin: everything that a decision rule is fitted on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fedgft.auditing.thresholds import count_above
from fedgft.data.dataset import Federation
from fedgft.errors import FedgftError
from fedgft.metrics.metric import Value
from fedgft.site_sums import (
    COUNT,
    NOISE,
    SLACK,
    Group,
    MeasurementSpec,
    SiteSums,
    group_sort_key,
    merge,
)
from fedgft.site_sums.tables import possible_cells

ALL_SITES = ""  # the only entry of the site axis where sites are not kept apart
FEDERATION_BINS = 400  # of scores in memory: finer than in files
RowGroups = tuple[Sequence[str], Sequence[Group], np.ndarray]
"The attributes, the groups, and (n,) the index of each row's group."
DECISION_BINS = 2  # a decision counts as the score 0 or 1


@dataclass(frozen=True, eq=False)
class RuleCounts:
    """The counts of scores of two classes, by site, group, label and bin.

    If there are no scores, a decision counts as a score of 0 or 1, in two bins.

    Parameters
    ----------
    spec
        What was measured: classes, attributes, threshold.
    reads
        "score" or "decision".
    sites, groups
        The names of the sites, (`ALL_SITES`,) if they are added up, and the groups. A value of a
        group is None where it is not recorded.
    counts
        (site, group, label, bin). With noise, a count may be negative.
    decided
        (site, group, label): how many are decided positively now.
    noise
        (site, group, label, bin): the variance of the noise on each count; None without noise.
    shifts
        (2, site, group, label, bin): the changes if all rows of uncertain bin are in the first, or
        in the last bin of their range; None if every bin is exact.
    digests
        The SHA-256 of each site's sums, by its name.
    has_withheld
        Whether sites withheld small counts, which are the middles of their ranges here.
    """

    spec: MeasurementSpec
    reads: str
    sites: tuple[str, ...]
    groups: tuple[Group, ...]
    counts: np.ndarray
    decided: np.ndarray
    noise: np.ndarray | None
    shifts: np.ndarray | None
    digests: Mapping[str, str]
    has_withheld: bool = False

    @property
    def thresholds(self) -> np.ndarray:
        """The candidate thresholds, (bin + 1,): the lower edges of the bins, and infinity."""
        bins = self.counts.shape[-1]
        return np.append([0.0, 0.5] if self.reads == "decision" else np.arange(bins) / bins, np.inf)

    @property
    def threshold(self) -> float:
        """The threshold for people whose group is not recorded: today's, or near 0.5.

        If today's decisions do not follow from a threshold, it is an edge of the bins.
        """
        if self.reads == "decision":
            return 0.5  # a decision is 0 or 1
        if self.spec.threshold is None:
            return self._middle / self.counts.shape[-1]
        return self.spec.threshold

    @property
    def _middle(self) -> int:
        return round(self.counts.shape[-1] / 2)

    @property
    def rows(self) -> float:
        """The number of rows."""
        return float(self.counts.sum())

    def accepted(self) -> np.ndarray:
        """Return how many rows `threshold` accepts, (site, group, label)."""
        if self.reads == "score" and self.spec.threshold is None:
            return self.above()[..., self._middle]
        return self.decided

    def above(self) -> np.ndarray:
        """Return how many rows reach each candidate threshold, (site, group, label, bin + 1)."""
        return count_above(self.counts)

    def merged(self) -> "RuleCounts":
        """Return the counts with all sites added up."""
        noise = None if self.noise is None else self.noise.sum(0, keepdims=True)
        shifts = None if self.shifts is None else self.shifts.sum(1, keepdims=True)
        return replace(
            self,
            sites=(ALL_SITES,),
            counts=self.counts.sum(0, keepdims=True),
            decided=self.decided.sum(0, keepdims=True),
            noise=noise,
            shifts=shifts,
        )

    def with_attributes(self, attributes: Sequence[str]) -> "RuleCounts":
        """Return the counts with groups by these attributes only."""
        chosen = [self.spec.attributes.index(name) for name in attributes]
        parts = [tuple(group[i] for i in chosen) for group in self.groups]
        groups = tuple(sorted(set(parts), key=group_sort_key))
        place = {group: i for i, group in enumerate(groups)}
        where = [place[part] for part in parts]

        def add(array: np.ndarray) -> np.ndarray:
            out = np.zeros((array.shape[0], len(groups), *array.shape[2:]))
            for old, new in enumerate(where):
                out[:, new] += array[:, old]
            return out

        shifts = None if self.shifts is None else np.stack([add(end) for end in self.shifts])

        return replace(
            self,
            spec=replace(self.spec, attributes=tuple(attributes)),
            groups=groups,
            counts=add(self.counts),
            decided=add(self.decided),
            noise=None if self.noise is None else add(self.noise),
            shifts=shifts,
        )


def count_scores(
    parts: Iterable[SiteSums],
    *,
    by_site: bool,
    decisions: bool = False,
    digests: Mapping[str, str] | None = None,
) -> RuleCounts:
    """Return the counts that a rule is fitted on.

    Parameters
    ----------
    parts
        The sums of the sites. Histograms of scores are kept per site only if each part is of one
        site.
    by_site
        Whether to keep the sites apart.
    decisions
        Whether to count decisions even if there are scores.
    digests
        The digest of each site's sums; by default they are computed.
    """
    known: dict[str, str] = {}
    parts = _pass_on(parts, known if digests is None else None)
    spec, kept = _read_parts(parts if by_site else [merge(parts)], by_site=by_site)
    if len(spec.classes) != 2:
        text = f"a rule decides between two classes, these sums have {len(spec.classes)}"
        raise FedgftError(text, kind="unsupported")
    rows = sum(part.rows for part in kept)
    if rows <= 0:
        text = "there is nothing to fit: the sites have no rows"
        every = [tables for part in kept for tables in part.tables.values()]
        if any(table[..., NOISE].any() for tables in every for table in tables.values()):
            text = "the noise swallows all rows: measure with a larger `epsilon`, or without noise"
        raise FedgftError(text, kind="data")
    is_scored = spec.scored and abs(sum(part.scored_rows for part in kept) - rows) < 0.5
    reads = "score" if is_scored and not decisions else "decision"
    if by_site and reads == "score" and any(len(part.tables) > 1 for part in kept):
        text = (
            "were added up over sites, and a rule for each site needs their scores apart: give a "
            "list with the sums of each site"
        )
        raise FedgftError(text, field="sums", kind="data")
    found = {group for part in kept for tables in part.tables.values() for group in tables}
    groups = tuple(sorted(found, key=group_sort_key))
    place = {group: i for i, group in enumerate(groups)}
    names = sorted(name for part in kept for name in part.tables)
    sites = tuple(names) if by_site else (ALL_SITES,)
    if by_site and (twice := [a for a, b in pairwise(names) if a == b]):
        raise FedgftError(f"holds two sums of site {twice[0]!r}", field="sums", kind="conflict")
    index = {name: i for i, name in enumerate(sites)}
    bins = spec.bins if reads == "score" else DECISION_BINS
    counts = np.zeros((len(sites), len(groups), 2, bins))
    decided = np.zeros((len(sites), len(groups), 2))
    noise = np.zeros_like(counts)
    has_shifts = reads == "score" and any(part.shifts for part in kept)
    shifts = np.zeros((2, *counts.shape)) if has_shifts else np.zeros((2, 0))
    possible = possible_cells(spec)  # (decision, bin)
    spread = possible / np.maximum(possible.sum(-1, keepdims=True), 1)
    spread = np.eye(2) if reads == "decision" else spread  # of noise over bins
    for part in kept:
        for name, tables in part.tables.items():
            s = index[name] if by_site else 0
            for group, table in tables.items():
                g = place[group]
                decided[s, g] += table[:, 1, COUNT]
                noise[s, g] += table[..., NOISE] @ spread
                if reads == "decision":
                    counts[s, g] += table[..., COUNT]
        if reads == "score":
            s = index[next(iter(part.tables))] if by_site else 0
            for group, histogram in part.histogram.items():
                counts[s, place[group]] += _coarsen(histogram, bins)
            for group, shift in part.shifts.items():
                shifts[:, s, place[group]] += _coarsen(shift, bins)
    return RuleCounts(
        spec=spec,
        reads=reads,
        sites=sites,
        groups=groups,
        counts=counts,
        decided=decided,
        noise=noise if noise.any() else None,
        shifts=shifts if has_shifts else None,
        digests=known if digests is None else digests,
        has_withheld=any(part.has_withheld for part in kept),
    )


class _Part(NamedTuple):
    """What a rule needs of some sums: a small part of them.

    Parameters
    ----------
    tables
        By site and group, (label, decision, column): counts of rows and variances of their noise.
    histogram
        By group, (label, bin): the counts of scores of all sites together.
    shifts
        By group, (2, label, bin): see `RuleCounts`.
    rows, scored_rows
        How many rows the tables and the histogram count.
    has_withheld
        Whether some counts are withheld.
    """

    tables: dict[str, dict[Group, np.ndarray]]
    histogram: dict[Group, np.ndarray]
    shifts: dict[Group, np.ndarray]
    rows: float
    scored_rows: float
    has_withheld: bool

    @classmethod
    def of(cls, sums: SiteSums) -> "_Part":
        tables = {
            name: {group: table[..., : NOISE + 1].copy() for group, table in site.tables.items()}
            for name, site in sums.sites.items()
        }
        histogram = {group: each[:, :, 0].sum(1) for group, each in sums.histogram.items()}
        shifts = {group: each[:2, :, :, 0].sum(2) for group, each in sums.bin_error.items()}
        scored_rows = float(sum(each[:, :, 0].sum() for each in sums.histogram.values()))
        every = (table for site in sums.sites.values() for table in site.tables.values())
        has_withheld = any(table[..., SLACK].any() for table in every)
        return cls(tables, histogram, shifts, sums.rows(), scored_rows, has_withheld)


def _refuse_uncertain_groups(spec: MeasurementSpec) -> None:
    """Raise a `FedgftError` for sums that are not counts of rows by their true group."""
    if not spec.counts_people:
        what = "randomized groups" if spec.randomized is not None else "weights"
        what = "probabilities of groups" if spec.proxy else what
        text = f"a rule needs counts of rows by their true group, and these `sums` have {what}"
        raise FedgftError(f"{text}: measure without them", kind="unsupported")


def _read_parts(parts: Iterable[SiteSums], *, by_site: bool) -> tuple[MeasurementSpec, list[_Part]]:
    """Return what was measured, and the parts.

    One part is in memory at a time: of the others, only what a rule needs.
    """
    spec: MeasurementSpec | None = None
    kept = []
    for part in parts:
        if part.spec is None:
            continue
        _refuse_uncertain_groups(part.spec)
        part = part.without_strata()
        spec = part.require_spec() if spec is None else spec.combine(part.require_spec())
        if not spec.scored:
            part = replace(part, histogram={}, bin_error={})
        kept.append(_Part.of(part))
    if spec is None:
        raise FedgftError("holds no site", field="sums", kind="data")
    if by_site and len(kept) > 1 and any("" in part.tables for part in kept):
        text = "holds sites without a name: give `site` to measure, or a mapping of names to sums"
        raise FedgftError(text, field="sums", kind="data")
    return spec, kept


def _pass_on(parts: Iterable[SiteSums], known: dict[str, str] | None) -> Iterable[SiteSums]:
    """Yield the sums, and put the digest of each into `known` if it is given."""
    for part in parts:
        if known is not None and part.spec is not None:
            known |= {name: digest_site(part, name) for name in part.sites}
        yield part


def digest_site(sums: SiteSums, name: str) -> str:
    """Return the SHA-256 of the counts of one site."""
    digest = sha256(repr((sums.require_spec(), name)).encode("utf-8", "replace"))
    for group, table in sorted(sums.sites[name].tables.items(), key=lambda item: repr(item[0])):
        digest.update(repr(group).encode("utf-8", "replace"))
        digest.update(np.ascontiguousarray(table).tobytes())
    return digest.hexdigest()


def _coarsen(histogram: np.ndarray, bins: int) -> np.ndarray:
    """Merge the bins (the last axis) into `bins` bins."""
    return histogram.reshape(*histogram.shape[:-1], bins, -1).sum(-1)


def count_federation(
    federation: Federation,
    scores: np.ndarray,
    row_groups: RowGroups | None = None,
    *,
    by_site: bool = False,
    decisions: bool = False,
    bins: int = FEDERATION_BINS,
) -> RuleCounts:
    """Return the counts of the clients' rows that a rule is fitted on.

    Parameters
    ----------
    federation
        The rows of all clients.
    scores
        (n,) The probability of the positive class for each row of the data set.
    row_groups
        The groups of the rows. By default, those of the data set, with the attribute "group".
    by_site
        Whether to keep the clients apart.
    decisions
        Whether to count decisions instead of scores.
    bins
        The number of bins of the scores.
    """
    data = federation.dataset
    rows = federation.rows
    if row_groups is None:
        names = [*((name,) for name in data.group_names), (None,)]
        row_groups = (("group",), names, data.groups)  # -1 is the last: not recorded
    attributes, groups, codes = row_groups
    places = np.where(codes[rows] < 0, len(groups) + codes[rows], codes[rows])
    positive = scores[rows] >= 0.5
    if decisions:
        bins = DECISION_BINS
        at = positive.astype(int)
    else:
        at = np.searchsorted(np.arange(1, bins) / bins, scores[rows], side="right")
    site = np.zeros(len(rows), int)
    sites = (ALL_SITES,)
    if by_site:
        site = np.repeat(np.arange(federation.num_clients), federation.sizes)
        sites = name_clients(federation)
    shape = (len(sites), len(groups), 2, bins)
    flat = np.ravel_multi_index((site, places, data.labels[rows], at), shape)
    counts = np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape).astype(float)
    decided = np.zeros(shape[:3])
    np.add.at(decided, (site, places, data.labels[rows]), positive)
    return RuleCounts(
        spec=MeasurementSpec(data.classes, tuple(attributes), scored=not decisions, bins=bins),
        reads="decision" if decisions else "score",
        sites=sites,
        groups=tuple(groups),
        counts=counts,
        decided=decided,
        noise=None,
        shifts=None,
        digests={},
    )


def name_clients(federation: Federation) -> tuple[str, ...]:
    """Return the names of the clients as sites."""
    if names := federation.dataset.client_names:
        return tuple(names[int(k)] for k in federation.keys)
    return tuple(f"client {k}" for k in range(federation.num_clients))


def effective_rows(rate: Value, variance: Value) -> Value:
    """Return the n for which rate (1 - rate) / n is this variance; infinite without variance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(variance > 0, rate * (1 - rate) / variance, np.inf)
