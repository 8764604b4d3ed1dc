"""Protect a site's sums before they leave it: withhold small cells, or add noise.

Noise is added once, to the finest table of counts (group, label, decision, bin of the score).
Everything else is derived from the noisy counts, so the budget is spent only once. The numbers of
rows without a label and without a prediction are two more cells of this table. So adding or
removing one row changes exactly one cell by 1, and the sensitivity is 1. Every combination of names
is a cell, even if it has no rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from fedgft.errors import FedgftError
from fedgft.privacy.noise import calibrate_noise
from fedgft.site_sums import (
    COUNT,
    NOISE,
    ROWS,
    SCORES,
    Group,
    MeasurementSpec,
    Privacy,
    SiteSums,
    SiteTables,
    group_sort_key,
)
from fedgft.site_sums.tables import bin_middles, placeholder_scores, possible_cells, suppressed_cell
from fedgft.validation import check_integer, check_number

MIN_CELL = 3  # with 2, a withheld count would have to be 1, so nothing would be hidden
MAX_MIN_CELL = 1_000_000
GroupValues = Mapping[str, tuple[str, ...]]
"The values of an attribute, by its name."


@dataclass(frozen=True)
class Protection:
    """How the sums are protected: small cells are withheld, or noise is added, or neither."""

    min_cell: int = 0
    epsilon: float | None = None
    delta: float = 0.0

    def __post_init__(self) -> None:
        check_integer("min_cell", self.min_cell, least=0)
        check_number("delta", self.delta, finite=False)
        if self.epsilon is not None:
            check_number("epsilon", self.epsilon, finite=False)
        if self.min_cell and self.epsilon is not None:
            text = "`min_cell` and `epsilon`: noisy counts need no suppression; choose one"
            raise FedgftError(text, kind="conflict")
        if self.delta and self.epsilon is None:
            raise FedgftError("`delta` needs `epsilon`", kind="missing")
        if self.min_cell > MAX_MIN_CELL:
            raise FedgftError(f"`min_cell` {self.min_cell}: must be at most {MAX_MIN_CELL:,}")

    def apply(
        self,
        sums: SiteSums,
        *,
        values: GroupValues,
        classes_declared: bool,
        max_weight: float | None = None,
    ) -> SiteSums:
        """Return the sums that may leave the site.

        Parameters
        ----------
        sums
            The exact sums of one site.
        values
            The values of the attributes for which the user declares all values.
        classes_declared
            Whether the user declares the classes.
        max_weight
            No row weighs more; None if the rows have no weights.
        """
        if self.min_cell:
            return suppress(sums, self.min_cell, max_weight=max_weight)
        if self.epsilon is None:
            return sums
        if sums.require_spec().is_weighted:
            text = (
                "`epsilon`: noise is made for rows that count once, not for weights; leave out one"
            )
            raise FedgftError(text, kind="conflict")
        declared = classes_declared and all(a in values for a in sums.require_spec().columns)
        return add_noise_to_site(sums, self.epsilon, self.delta, values=values, declared=declared)


def suppress(sums: SiteSums, min_cell: int, *, max_weight: float | None = None) -> SiteSums:
    """Withhold counts of 1 to `min_cell` - 1 rows, and everything about scores.

    Scores are withheld because the bins of a histogram are small cells too, and because the sum of
    a few scores nearly reveals a single person's score. `sums` are the sums of one site. A withheld
    count is replaced by the middle of its range. If the rows have weights, of at most `max_weight`,
    cells of few rows are withheld, whatever they weigh.
    """
    if min_cell < MIN_CELL:
        raise FedgftError(f"`min_cell` {min_cell}: must be at least {MIN_CELL}")
    ((name, site),) = sums.sites.items()
    tables = {}
    suppressed = 0
    rows = COUNT if max_weight is None else ROWS
    for group, table in site.tables.items():
        small = (table[..., rows] > 0) & (table[..., rows] < min_cell)
        suppressed += int(small.sum())
        tables[group] = table.copy()
        tables[group][..., SCORES:] = placeholder_scores(table[..., COUNT, None], len(table))
        tables[group][small] = suppressed_cell(
            min_cell, table.shape[-1], len(table), max_weight=max_weight
        )
    missing = [
        count if count == 0 or count >= min_cell else min_cell / 2
        for count in (site.label_missing, site.prediction_missing)
    ]
    privacy = Privacy(min_cell=min_cell, suppressed=suppressed, max_weight=max_weight or 1.0)
    protected = SiteTables(tables, *missing, privacy=(privacy,))
    return replace(sums, sites={name: protected}, histogram={}, bin_rows={})


def add_noise_to_site(
    sums: SiteSums, epsilon: float, delta: float, *, values: GroupValues, declared: bool
) -> SiteSums:
    """Return one site's sums with discrete Laplace noise, or discrete Gaussian where delta > 0.

    Parameters
    ----------
    sums
        The exact sums of one site.
    epsilon, delta
        The budget (see `fedgft.privacy.noise.calibrate_noise`).
    values
        The values of each attribute. For an attribute without an entry, the values in the data are
        used.
    declared
        Whether no name of a group or class was read from the data.
    """
    spec = sums.require_spec()
    if len(spec.classes) > 2:  # one row is in the histograms of all classes; counts suffice
        spec = replace(spec, scored=False)
    mechanism = calibrate_noise(epsilon, delta)
    ((name, site),) = sums.sites.items()
    groups = list(_all_groups(site, spec, values))
    finest = [_finest_counts(group, sums, site, spec) for group in groups]
    exact = np.concatenate([*finest, [site.label_missing, site.prediction_missing]])
    noisy = np.array(mechanism.add([int(n) for n in exact]), dtype=float)
    tables = {}
    histogram = {}
    for group, counts in zip(groups, np.split(noisy[:-2], len(groups)), strict=True):
        tables[group], histogram[group] = _assemble(counts, spec, mechanism.variance)
    privacy = Privacy(
        mechanism=mechanism.name,
        epsilon=mechanism.epsilon,
        delta=mechanism.delta,
        scale=mechanism.scale,
        variance=mechanism.variance,
        names="declared" if declared else "from the data",
    )
    noisy_site = SiteTables(tables, noisy[-2], noisy[-1], (privacy,))
    return SiteSums(spec, {name: noisy_site}, histogram if spec.scored else {})


def _all_groups(site: SiteTables, spec: MeasurementSpec, values: GroupValues) -> Iterator[Group]:
    """Return every combination of attribute values, including None for "not recorded"."""
    axes = []
    for i, attribute in enumerate(spec.columns):
        known = values.get(attribute) or {group[i] for group in site.tables} - {None}
        axes.append([*sorted(known, key=lambda value: group_sort_key((value,))), None])
    return product(*axes)


def _finest_counts(
    group: Group, sums: SiteSums, site: SiteTables, spec: MeasurementSpec
) -> np.ndarray:
    """Return the counts of one group by label and possible (decision, bin), as a flat array."""
    if spec.scored:
        cells = sums.histogram.get(group, spec.empty_histogram())[:, :, 0]
    else:
        cells = site.tables.get(group, spec.empty_table())[..., COUNT, None]
    return cells[:, possible_cells(spec)].ravel()


def _assemble(
    counts: np.ndarray, spec: MeasurementSpec, variance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the table and the histogram of one group, computed from its noisy counts.

    The sums of scores are computed from the middles of the bins.
    """
    possible = possible_cells(spec)
    classes, bins = possible.shape
    cells = np.zeros((classes, classes, bins))
    cells[:, possible] = counts.reshape(classes, -1)
    table = spec.empty_table()
    table[..., COUNT] = cells.sum(-1)
    table[..., NOISE] = variance * possible.sum(-1)
    if spec.scored:
        table[..., SCORES] = cells @ bin_middles(bins)
    return table, cells[:, :, None, :]
