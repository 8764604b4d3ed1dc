"""Estimate rates by group over all sites, and their differences and ratios, with intervals.

A rate is r = A / B, where A and B are sums over rows that the metric defines. Three things make a
rate uncertain:

- sampling: Wilson's limits for decisions, the delta method for mean scores;
- weights: with e = u_A - r u_B for a row of weight w, the variance of r is the sum of (w e)^2 over
  rows, divided by B^2 (linearization, as for survey data); Wilson's limits take the effective
  number n for which r (1 - r) / n is that variance;
- randomized groups: a row reported as group h counts as Q^-1[g, h] rows of group g, so its squared
  coefficients enter like those of a weight, and rates of different groups are correlated;
- noise: a row with label y and decision c adds e = u_A - r u_B to A - r B, so noise of variance s^2
  on the count of such rows adds (e s / B)^2 to the variance of r;
- suppressed counts, of which only a range is known: A and B - A take their extreme values, and the
  limits of r are computed from the extreme values of r and the smallest possible number of rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from fedgft.errors import FedgftError
from fedgft.formatting import printable
from fedgft.metrics import Kind, Metric
from fedgft.metrics.intervals import (
    FEW,
    Z95,
    Interval,
    difference,
    folded,
    ratio,
    simultaneous,
    wilson,
)
from fedgft.metrics.metric import Value
from fedgft.metrics.randomized_response import correction_matrix
from fedgft.site_sums import (
    COUNT,
    MIN_SUM_ROWS,
    NOISE,
    ROWS,
    SCORES,
    SLACK,
    SQUARES,
    Group,
    MeasurementSpec,
    Privacy,
    SiteSums,
)
from fedgft.sums import Sums

MAX_GROUPS = 1000  # largest number of groups of a view, because all pairs of groups are compared
MIN_EVENTS = 5  # a ratio has an interval only if one of its rates has at least this many events
MIN_SIGNAL = 5.0  # a denominator must exceed this many standard deviations of its noise


@dataclass(frozen=True, eq=False)
class Pool:
    """The sums of all sites as arrays, with names that are safe to print.

    Parameters
    ----------
    spec
        What was measured: classes, attributes, threshold, bins.
    sites, groups
        The names of the sites, and one tuple of attribute values per group.
    tables
        (site, group, label, decision, column): see `fedgft.site_sums.tables`.
    histogram
        (group, label, decision, score, bin), summed over sites.
    bin_error
        (group, 3, label, decision, score, bin): the uncertainty of `histogram`; None if exact.
    privacy
        How each site protected its sums before it sent them.
    label_missing, prediction_missing
        The numbers of rows without a label and without a prediction, over all sites.
    numbered
        The names that were assigned to sites without a name.
    """

    spec: MeasurementSpec
    sites: tuple[str, ...]
    groups: tuple[Group, ...]
    tables: np.ndarray
    histogram: np.ndarray
    bin_error: np.ndarray | None
    privacy: tuple[tuple[Privacy, ...], ...]
    label_missing: float
    prediction_missing: float
    numbered: tuple[str, ...]

    @property
    def rows(self) -> float:
        """The number of rows with a label and a prediction, as `SiteSums.rows` counts them."""
        return float(self.tables[..., ROWS if self.spec.counts_rows else COUNT].sum())

    @property
    def weight(self) -> float:
        """The sum of the weights of these rows; their number if they have none."""
        return float(self.tables[..., COUNT].sum())

    @property
    def is_approximate(self) -> bool:
        """Whether a site suppressed counts or added noise to them."""
        return any(self.privacy)


@dataclass(frozen=True, eq=False)
class View:
    """The sums by groups of one attribute or of several together.

    A row in which one of the attributes is not recorded belongs to no group.

    Parameters
    ----------
    spec
        What was measured: classes, attributes, threshold, bins.
    attributes, groups
        The names of the attributes and of the groups.
    sums
        Counts, scores and decisions by (site, label, group).
    noise, slack
        (site, label, group, decision): the variance of the noise on `sums.decision`, and how far
        a suppressed count may be off.
    histogram
        (label, group, score, bin); the last group holds the rows that belong to no group.
    bin_error
        (3, label, group, score, bin): see `fedgft.site_sums.SiteSums`.
    squares
        (site, label, group, decision): the sum over rows of the square of what a row adds to the
        count of the group. None: every row counts once, in one group.
    products
        (site, label, group, group, decision): the same for the product of what a row adds to the
        counts of two groups, if groups were randomized; otherwise None: a row has one group.
    unsummed
        (label, group): the rows in cells of so few rows that files do not state their sum of
        scores, which is then that of the middles of the bins.
    """

    spec: MeasurementSpec
    attributes: tuple[str, ...]
    groups: tuple[str, ...]
    sums: Sums
    noise: np.ndarray
    slack: np.ndarray
    histogram: np.ndarray
    bin_error: np.ndarray | None = None
    squares: np.ndarray | None = None
    products: np.ndarray | None = None
    unsummed: np.ndarray | None = None

    def shifted_histogram(self, end: int) -> np.ndarray:
        """Return the histogram with every row of uncertain bin moved to one end of its range.

        With `end` 0 such rows are in the first possible bin, with `end` 1 in the last.
        """
        return self.histogram if self.bin_error is None else self.histogram + self.bin_error[end]

    @property
    def has_histograms(self) -> bool:
        """Whether the histograms include every row: no site left out scores or suppressed cells."""
        if not self.spec.scored:
            return False
        return bool(abs(self.histogram[:, :, 0].sum() - self.sums.count.sum()) < 0.5)

    @property
    def scored_classes(self) -> tuple[str, ...]:
        """The classes with scores: the positive class if there are two classes, else all."""
        return tuple(self.spec.classes[i] for i in self.spec.score_classes)

    @property
    def title(self) -> str:
        """The names of the attributes, such as ``race & sex``."""
        return " & ".join(self.attributes)

    def index(self, group: str) -> int:
        """Return the position of a group; raise an error if the view has no group of this name."""
        if group not in self.groups:
            raise FedgftError(
                f"group {group!r} is not among those of {self.title}: {', '.join(self.groups)}"
            )
        return self.groups.index(group)


def pool_sites(sums: SiteSums) -> Pool:
    """Return the sums as arrays. If a site lacks a group, its counts for that group are 0."""
    spec = sums.require_spec()
    groups = sums.groups
    sites = tuple(sums.sites.values())
    if not groups or sums.rows() <= 0:
        raise FedgftError("there is nothing to audit: the sites have no rows", kind="data")
    position = {group: i for i, group in enumerate(groups)}

    def stack_groups(by_group: Mapping[Group, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        out = np.zeros((len(groups), *shape))
        for group, counts in by_group.items():
            out[position[group]] = counts
        return out

    table_shape = spec.empty_table().shape
    shape = spec.empty_histogram().shape
    values = [make_distinct_values(column) for column in zip(*groups, strict=True)]
    return Pool(
        spec=replace(
            spec, classes=make_distinct(spec.classes), attributes=make_distinct(spec.attributes)
        ),
        sites=make_distinct(tuple(sums.sites)),
        groups=tuple(zip(*values, strict=True)),
        tables=np.stack([stack_groups(site.tables, table_shape) for site in sites]),
        histogram=stack_groups(sums.histogram, shape),
        bin_error=stack_groups(sums.bin_error, (3, *shape)) if sums.bin_error else None,
        privacy=tuple(site.privacy for site in sites),
        label_missing=sum(site.label_missing for site in sites),
        prediction_missing=sum(site.prediction_missing for site in sites),
        numbered=sums.numbered,
    )


def make_distinct_values(column: tuple[str | None, ...]) -> list[str | None]:
    """The values of one attribute, safe to print; None stays None."""
    known = tuple(dict.fromkeys(value for value in column if value is not None))
    names = dict(zip(known, make_distinct(known), strict=True))
    return [None if value is None else names[value] for value in column]


def make_distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names that are safe to print.

    If two of them would look the same, all names are in the notation of Python's `ascii`.
    """
    safe = tuple(map(printable, names))
    return safe if len(set(safe)) == len(names) else tuple(map(ascii, names))


def list_views(pool: Pool) -> tuple[View, ...]:
    """Return the view by each attribute, then those by combinations of attributes.

    The view by all attributes together is last. A combination is left out if no row has all of its
    attributes recorded.
    """
    attributes = pool.spec.attributes
    found = []
    for size in range(1, len(attributes) + 1):
        for chosen in combinations(range(len(attributes)), size):
            view = _view_by(pool, chosen)
            if len(view.groups) > MAX_GROUPS:
                raise FedgftError(
                    f"{view.title} gives {len(view.groups):,} groups, more than {MAX_GROUPS:,}: "
                    "measure fewer columns, or put values together first"
                )
            if view.groups:
                found.append(view)
    if not found:
        raise FedgftError(f"no row has {' or '.join(attributes)} recorded", kind="data")
    return tuple(found)


def make_view(pool: Pool, attributes: Sequence[str]) -> View:
    """Return the view by these attributes."""
    return _view_by(pool, tuple(pool.spec.attributes.index(name) for name in attributes))


def _view_by(pool: Pool, chosen: tuple[int, ...]) -> View:
    """Return the view by the attributes at the positions `chosen`."""
    spec = pool.spec
    attributes = tuple(spec.attributes[i] for i in chosen)
    cells = [tuple(group[i] for i in chosen) for group in pool.groups]
    known = list(dict.fromkeys(cell for cell in cells if None not in cell))
    if spec.randomized is not None:  # every value may be a true one, also if none was reported
        known = list(product(*(spec.randomized.values[i] for i in chosen)))
    position = {cell: i for i, cell in enumerate(known)}
    where = np.array([position.get(cell, len(known)) for cell in cells])

    def sum_groups(values: np.ndarray, axis: int) -> np.ndarray:
        """Sum the pool's groups into the view's groups, which become the first axis."""
        moved = np.moveaxis(values, axis, 0)
        out = np.zeros((len(known) + 1, *moved.shape[1:]))
        np.add.at(out, where, moved)
        return out

    correct = _correction(spec, chosen, known)  # (k, k), or None if the groups are the true ones
    tables = np.moveaxis(sum_groups(pool.tables, 1), (0, 1, 2), (2, 0, 1))  # (site, y, g, d, col)
    squares = tables[..., SQUARES] if spec.is_weighted else None
    products = None
    if correct is not None:
        each = tables[..., COUNT] if squares is None else squares
        products = np.einsum("ag,bg,kygd->kyabd", correct, correct, each)
        squares = np.einsum("kyaad->kyad", products)
        reported = tables
        tables = np.einsum("ag,kygdc->kyadc", correct, reported)
        for column, factors in ((NOISE, correct**2), (SLACK, np.abs(correct))):
            tables[..., column] = np.einsum("ag,kygd->kyad", factors, reported[..., column])
    decision = tables[..., COUNT]
    count = decision.sum(-1)
    score = np.zeros_like(decision)
    if spec.scored:
        score = tables[..., SCORES:].sum(-2)  # (site, y, g, s)
        if len(spec.classes) == 2:
            score = np.stack((count - score[..., 0], score[..., 0]), -1)
    bin_error = None
    if pool.bin_error is not None:
        bin_error = np.moveaxis(sum_groups(pool.bin_error.sum(3), 0), (1, 2), (0, 1))
    histogram = np.moveaxis(sum_groups(pool.histogram.sum(2), 0), 1, 0)
    if correct is not None:
        histogram = np.einsum("ag,ygsb->yasb", correct, histogram)
        if bin_error is not None:
            bin_error = _correct_bin_error(bin_error, correct)
    few = pool.tables[..., ROWS if spec.counts_rows else COUNT] < MIN_SUM_ROWS
    unsummed = sum_groups(np.where(few, pool.tables[..., COUNT], 0.0).sum((0, 3)), 0).T
    return View(
        spec=spec,
        attributes=attributes,
        groups=make_group_names(known, attributes),
        sums=Sums(count, score, decision),
        noise=tables[..., NOISE],
        slack=tables[..., SLACK],
        histogram=histogram,
        bin_error=bin_error,
        squares=squares,
        products=products,
        unsummed=unsummed,
    )


def _correct_bin_error(bin_error: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Return the errors (3, y, g, s, bin) of histograms whose groups are corrected.

    A true group has its fewest rows above every edge if the rows that count positively for it are
    in the first bin of their range, and those that count negatively in the last one.
    """
    ahead = np.maximum(correct, 0.0)
    behind = np.minimum(correct, 0.0)
    first, last, sums = bin_error
    return np.stack(
        (
            np.einsum("ag,ygsb->yasb", ahead, first) + np.einsum("ag,ygsb->yasb", behind, last),
            np.einsum("ag,ygsb->yasb", ahead, last) + np.einsum("ag,ygsb->yasb", behind, first),
            np.einsum("ag,ygsb->yasb", np.abs(correct), sums),
        )
    )


def _correction(
    spec: MeasurementSpec, chosen: tuple[int, ...], known: Sequence[Group]
) -> np.ndarray | None:
    """Return the matrix (k, k) that turns sums by reported group into those by true group.

    The last row and column are those of the rows that belong to no group. None if the groups were
    not randomized. With several attributes, each was randomized on its own.
    """
    if spec.randomized is None:
        return None
    out = np.eye(len(known) + 1)
    part = np.ones((len(known), len(known)))
    for axis, position in enumerate(chosen):
        values = spec.randomized.values[position]
        matrix = correction_matrix(len(values), spec.randomized.epsilon)
        where = [values.index(cell[axis]) for cell in known]
        part *= matrix[np.ix_(where, where)]
    out[:-1, :-1] = part
    return out


def make_group_names(cells: list[tuple], attributes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of groups, such as ``White & Male``.

    If two groups would have the same name, all names include the attributes.
    """
    names = [" & ".join(map(str, cell)) for cell in cells]
    if len(set(names)) < len(names):
        pairs = [zip(attributes, cell, strict=True) for cell in cells]
        names = ["; ".join(f"{a}={v!r}" for a, v in pair) for pair in pairs]
    return tuple(names)


@runtime_checkable
class NamesGroups(Protocol):
    """Groups of one attribute or of several together, such as a `View`."""

    @property
    def attributes(self) -> tuple[str, ...]:
        """The names of the attributes."""
        ...

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups."""
        ...


def find_reference_group(view: NamesGroups, references: Sequence[str]) -> int | None:
    """Return the position of the reference group, or None if `references` names no group here.

    A reference is the name of a group, or a value written as ``column=value``. ``race=White`` and
    ``sex=Male`` together define the reference group by race, by sex, and by both.
    """
    single = f"{view.attributes[0]}=" if len(view.attributes) == 1 else None
    for name in references:
        plain = name.removeprefix(single) if single else name
        if plain in view.groups:
            return view.groups.index(plain)
    values = dict(name.split("=", 1) for name in references if "=" in name)
    wanted = " & ".join(values.get(a, "") for a in view.attributes)
    if len(view.attributes) > 1 and wanted in view.groups:
        return view.groups.index(wanted)
    return None


class Estimate(NamedTuple):
    """A value with its limits, as numbers or arrays; NaN where there is no value or no interval."""

    value: Any
    low: Any
    high: Any


@dataclass(frozen=True, eq=False)
class Rates:
    """Rates by condition and group. All arrays may have the same leading axes.

    Parameters
    ----------
    rate, n
        The rates, and the numbers of rows in their denominators. A rate is NaN if there is no row
        of the event.
    rate_min, rate_max, n_min
        The smallest and largest possible rate, and the smallest possible `n`, over all possible
        values of the suppressed counts.
    variance
        The variance due to noise, plus, for mean scores, the variance due to sampling. (For
        decisions, Wilson's limits cover sampling.)
    valid
        Whether there are enough rows for an interval.
    is_proportion
        Whether the rate is a share of rows (decisions) or a mean (scores).
    effective
        The effective numbers of rows, from which the limits are computed, if rows have weights or
        their groups were randomized. None: they are `n`.
    sampling
        In the same case, the variance due to sampling of rates of decisions, by linearization.
    covariance
        (..., group, group): the covariances of the rates, which are not independent if the groups
        were randomized. None: they are independent.
    """

    rate: np.ndarray
    n: np.ndarray
    rate_min: np.ndarray
    rate_max: np.ndarray
    n_min: np.ndarray
    variance: np.ndarray
    valid: np.ndarray
    is_proportion: bool
    effective: np.ndarray | None = None
    sampling: np.ndarray | None = None
    covariance: np.ndarray | None = None

    @np.errstate(divide="ignore", invalid="ignore")
    def limits(self, z: float = Z95) -> Interval:
        """Return limits below `rate_min` and above `rate_max`, which may lie outside [0, 1]."""
        extra = z**2 * self.variance
        if not self.is_proportion:
            return self.rate_min - np.sqrt(extra), self.rate_max + np.sqrt(extra)
        low, _ = wilson(self.rate_min, self.n_min, z)
        _, high = wilson(self.rate_max, self.n_min, z)
        below = np.sqrt((self.rate_min - low) ** 2 + extra)
        above = np.sqrt((high - self.rate_max) ** 2 + extra)
        return self.rate_min - below, self.rate_max + above

    def interval(self) -> Interval:
        """Return the 95% interval of each rate; NaN where there are too few rows."""
        low, high = (np.where(self.valid, np.clip(a, 0.0, 1.0), np.nan) for a in self.limits())
        return low, high

    def __getitem__(self, index: Any) -> "Rates":
        """Apply the same index to every array."""
        other = ("is_proportion", "covariance")
        names = [field.name for field in fields(self) if field.name not in other]
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        chosen = {name: np.asarray(value[index]) for name, value in known.items()}
        return replace(self, **chosen, covariance=None)

    @np.errstate(divide="ignore", invalid="ignore")
    def correlation(self, i: Any, j: Any) -> Any:
        """Return the correlations of the rates of groups i and j, which may be arrays."""
        if self.covariance is None or self.sampling is None:
            return 0.0
        both = self.sampling[..., i] * self.sampling[..., j]
        found = np.where(both > 0, self.covariance[..., i, j] / np.sqrt(np.abs(both)), 0.0)
        return np.clip(found, -1.0, 1.0)


@np.errstate(divide="ignore", invalid="ignore")
def estimate_rates(metric: Metric, view: View, kind: Kind, *, by_site: bool = False) -> Rates:
    """Estimate the rates of all groups under all conditions of a metric.

    Parameters
    ----------
    metric, view
        The metric and the groups.
    kind
        ``"hard"`` for rates of decisions, ``"soft"`` for mean scores.
    by_site
        Whether to keep the sites as a leading axis. If not, the rates are over all sites.
    """
    sums = (view.sums.statistics(metric, kind), view.noise, view.slack)
    statistics, noise, slack = sums if by_site else (part.sum(0) for part in sums)
    noise = noise[..., :-1, :]
    slack = slack[..., :-1, :]
    slope, offset = metric.affine(len(view.spec.classes))
    unit = slope + offset[..., None]  # (2, v, y, c): what a row with label y and decision c adds
    above = statistics[..., 0, :, :]
    below = statistics[..., 1, :, :]
    rate = np.where(below > 0, np.clip(above / below, 0.0, 1.0), np.nan)
    variance = _noise_variance(rate, unit, noise, kind) / below**2
    noise_of_n = np.sqrt(np.einsum("vyc,...ygc->...vg", unit[1] ** 2, noise))
    effective = linear = covariance = None
    heaviness: Any = 1.0  # the sum of squared weights over the sum of weights
    if view.squares is not None:
        squares = (view.squares if by_site else view.squares.sum(0))[..., :-1, :]
        effective, linear, heaviness = _count_effective_rows(rate, above, below, unit, squares)
    if view.products is not None:
        products = (view.products if by_site else view.products.sum(0))[..., :-1, :-1, :]
        covariance = _covary(rate, below, unit, products)
    if kind == "soft":
        sampling, max_error = _score_errors(metric, view, rate)
        sampling = sampling * heaviness
        variance = variance + sampling / below**2
        max_error = max_error / below
        rate_min = rate - max_error
        rate_max = rate + max_error
        n_min = below if effective is None else effective
    else:
        hits, rest = (
            np.einsum("vyc,...ygc->...vg", u, slack) for u in (unit[0], unit[1] - unit[0])
        )
        n_min = below - hits - rest
        if effective is not None:
            n_min = effective * np.where(below > 0, n_min / below, 0.0)
        rate_min = rate
        rate_max = rate
        if hits.any() or rest.any():
            others = below - above
            rate_min = np.clip((above - hits) / (above - hits + others + rest), 0.0, 1.0)
            rate_max = np.clip((above + hits) / (above + hits + others - rest), 0.0, 1.0)
    return Rates(
        rate=rate,
        n=below,
        rate_min=rate_min,
        rate_max=rate_max,
        n_min=n_min,
        variance=variance,
        valid=(n_min >= FEW) & (n_min > MIN_SIGNAL * noise_of_n),
        is_proportion=kind == "hard",
        effective=effective,
        sampling=linear,
        covariance=covariance,
    )


@np.errstate(divide="ignore", invalid="ignore")
def _count_effective_rows(
    rate: np.ndarray, above: np.ndarray, below: np.ndarray, unit: np.ndarray, squares: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the effective numbers of rows, the variances of rates, and the mean weights.

    A row of weight w with label y and decision c adds w e to A - r B, where e = u_A - r u_B. The
    sum of (w e)^2 over rows, divided by B^2, is the variance of r, which equals r (1 - r) / n for
    the effective number n. Where there are few events this sum is unstable: so, as in the interval
    of Agresti & Coull, two hits and two misses of mean weight are added for its computation, and
    four rows are taken from n. For rows of equal weight, n is then exactly their number.

    Parameters
    ----------
    rate, above, below
        (..., v, g): r, A and B.
    unit
        (2, v, y, c): u_A and u_B.
    squares
        (..., y, g, c): see `View`.
    """
    parts = (unit[0] ** 2, unit[0] * unit[1], unit[1] ** 2)
    hits, both, rows = (np.einsum("vyc,...ygc->...vg", part, squares) for part in parts)
    mean = np.where(below > 0, rows / below, np.nan)
    smooth = (above + 2 * mean) / (below + 4 * mean)
    total = hits + 2 * mean**2 - 2 * smooth * (both + 2 * mean**2)
    total = total + smooth**2 * (rows + 4 * mean**2)
    effective = smooth * (1 - smooth) * (below + 4 * mean) ** 2 / total - 4
    effective = np.where(below > 0, np.clip(np.nan_to_num(effective), 0.0, None), 0.0)
    variance = np.maximum(hits - 2 * rate * both + rate**2 * rows, 0.0) / below**2
    return effective, variance, np.nan_to_num(mean, nan=1.0)


@np.errstate(divide="ignore", invalid="ignore")
def _covary(
    rate: np.ndarray, below: np.ndarray, unit: np.ndarray, products: np.ndarray
) -> np.ndarray:
    """Return the covariances (..., v, g, g) of rates of groups that were randomized.

    The covariance of the rates of groups a and b is the sum over rows of what the row adds to
    A_a - r_a B_a, times what it adds to A_b - r_b B_b, divided by B_a B_b.
    """
    parts = (unit[0] ** 2, unit[0] * unit[1], unit[1] ** 2)
    hits, both, rows = (np.einsum("vyc,...yabc->...vab", part, products) for part in parts)
    r = np.nan_to_num(rate)
    first = r[..., :, None]
    second = r[..., None, :]
    total = hits - (first + second) * both + first * second * rows
    return total / (below[..., :, None] * below[..., None, :])


def _noise_variance(
    rate: np.ndarray, unit: np.ndarray, noise: np.ndarray, kind: Kind
) -> np.ndarray:
    """Return the variance of the noise on A - r B.

    This is the sum over counts of e^2 times the count's noise variance, where e = u_A - r u_B.
    """
    if not noise.any():
        return np.zeros_like(rate)
    if kind == "hard":  # expand the square, because an array of e for every group could be large
        parts = (unit[0] ** 2, unit[0] * unit[1], unit[1] ** 2)
        one, both, other = (np.einsum("vyc,...ygc->...vg", part, noise) for part in parts)
        return np.maximum(one - 2 * rate * both + rate**2 * other, 0.0)
    out = np.zeros_like(rate)
    for g, noise_by_label in enumerate(np.moveaxis(noise, 1, 0).sum(-1)):
        # A score may be any number in [0, 1], so use the largest |e|.
        worst = np.abs(unit[0] - rate[:, g, None, None] * unit[1]).max(-1)  # (v, y)
        out[:, g] = worst**2 @ noise_by_label
    return out


def _score_errors(metric: Metric, view: View, rate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the uncertainty of A - r B for mean scores, by condition and group.

    Returns
    -------
    variance
        The sum of e^2 over rows, where e = a p + b and p is the score, computed from the bins.
    max_error
        The largest possible error of A - r B where sums of scores are not sent but computed from
        the middles of the bins.
    """
    slope, offset = metric.affine(len(view.spec.classes))
    width = 1 / view.histogram.shape[-1]
    middles = (np.arange(view.histogram.shape[-1]) + 0.5) * width
    counts = np.moveaxis(view.histogram[:, :-1], 1, 0)  # (g, y, s, bin)
    rows = counts[:, :, 0].sum(-1)
    # moments of the scores, (g, y, s)
    none, one, two = (np.maximum(counts, 0.0) @ middles**power for power in range(3))
    two = two + none * width**2 / 12  # a score may be anywhere in its bin
    unsummed = None
    if view.bin_error is not None:
        unsummed = np.moveaxis(view.bin_error[2, :, :-1], 1, 0).sum(-1)
    total = np.zeros_like(rate)
    max_error = np.zeros_like(rate)
    for g in range(len(rows)):  # one group at a time: with many classes, `a` is a large array
        a = slope[0] - rate[:, g, None, None] * slope[1]  # (v, y, c)
        b = offset[0] - rate[:, g, None] * offset[1]  # (v, y)
        if len(view.spec.classes) == 2:  # p0 = 1 - p1
            b = b + a[..., 0]
            a = a[..., 1:] - a[..., :1]
        each = np.maximum(
            a**2 * two[g] + 2 * a * b[..., None] * one[g] + b[..., None] ** 2 * none[g], 0
        )
        # The e of a row depends on at most one score. If it depends on none, e = b.
        found = np.where(a != 0, each, 0.0).sum(-1)
        total[:, g] = (found + np.where((a == 0).all(-1), b**2 * rows[g], 0.0)).sum(-1)
        in_bins = np.abs(a).max(-1) * width / 2 * np.abs(rows[g]) * view.noise.any()
        max_error[:, g] = in_bins.sum(-1)
        if unsummed is not None:  # small cells, whose sums of scores are not sent
            max_error[:, g] += (np.abs(a) * unsummed[g]).sum((-1, -2))
    return total, max_error


@np.errstate(divide="ignore", invalid="ignore")
def estimate_difference(
    first: Rates, second: Rates, z: float = Z95, *, correlation: Any = 0.0
) -> Estimate:
    """Return first - second with its limits, which are NaN if there are too few rows.

    Parameters
    ----------
    first, second
        The rates to compare, of the same shape.
    z
        The quantile of the normal distribution: 1.96 for 95% limits of a single difference.
    correlation
        The correlations of the rates: see `Rates.correlation`.
    """
    p = first.limits(z)
    q = second.limits(z)
    known = first.valid & second.valid
    low, _ = difference(first.rate_min, p, second.rate_max, q, correlation=correlation)
    _, high = difference(first.rate_max, p, second.rate_min, q, correlation=correlation)
    low, high = (np.where(known, np.clip(a, -1.0, 1.0), np.nan) for a in (low, high))
    return Estimate(first.rate - second.rate, low, high)


def estimate_pair(rates: Rates, condition: int, i: int, j: int) -> Estimate:
    """Return the difference between the rates of groups i and j under a condition, with limits."""
    correlation = rates.correlation(i, j)
    if rates.covariance is not None:
        correlation = correlation[condition]
    return estimate_difference(rates[condition, i], rates[condition, j], correlation=correlation)


@np.errstate(divide="ignore", invalid="ignore")
def estimate_ratio(
    first: Rates, second: Rates, z: float = Z95, *, correlation: Any = 0.0
) -> Estimate:
    """Return first / second with its limits, with parameters as in `estimate_difference`.

    The limits are also NaN if both rates have fewer than 5 events.
    """
    p_low, p_high = (np.clip(a, 0.0, 1.0) for a in first.limits(z))
    q_low, q_high = (np.clip(a, 0.0, 1.0) for a in second.limits(z))
    events = np.maximum(first.rate_min * first.n_min, second.rate_min * second.n_min)
    known = first.valid & second.valid & (events >= MIN_EVENTS)
    p = (p_low, p_high)
    q = (q_low, q_high)
    low, _ = ratio(first.rate_min, p, second.rate_max, q, correlation=correlation)
    _, high = ratio(first.rate_max, p, second.rate_min, q, correlation=correlation)
    value = np.where(second.rate > 0, first.rate / second.rate, np.nan)
    return Estimate(value, np.where(known, low, np.nan), np.where(known, high, np.nan))


@np.errstate(divide="ignore", invalid="ignore")
def estimate_parity_ratio(
    first: Rates, second: Rates, z: float, *, correlation: Any = 0.0
) -> Estimate:
    """Return the smaller rate divided by the larger rate (the four-fifths rule), with its limits.

    The ratio is NaN if both rates are 0.
    """
    _, low, high = estimate_ratio(first, second, z, correlation=correlation)
    least = np.minimum(low, 1 / high)
    most = np.where((low <= 1) & (high >= 1), 1.0, np.where(high < 1, high, 1 / low))
    top = np.maximum(first.rate, second.rate)
    value = np.where(top > 0, np.minimum(first.rate, second.rate) / top, np.nan)
    unknown = np.isnan(low)
    return Estimate(value, np.where(unknown, np.nan, least), np.where(unknown, np.nan, most))


@dataclass(frozen=True)
class LargestGap:
    """The largest difference and the smallest ratio between two groups. None means not estimable.

    `low` and `high` are limits of the largest gap: they account for the choice among all pairs of
    groups. If a group has too few rows for an interval, there is no upper limit; the lower limit,
    which comes from the other groups, still holds. The gap is largest under the condition
    `condition` of the metric, between the two groups of `pair`; the group with the higher rate is
    first.
    """

    gap: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    condition: int | None = None
    pair: tuple[int, int] | None = None


def find_largest_gap(rates: Rates) -> LargestGap:
    """Return the largest gap between two groups that have a rate, over all conditions."""
    conditions, groups = rates.rate.shape
    i, j = np.triu_indices(groups, 1)
    first = rates[:, i]
    second = rates[:, j]
    distance = first.rate - second.rate
    if np.isnan(distance).all():
        return LargestGap()
    condition, at = np.unravel_index(np.nanargmax(np.abs(distance)), distance.shape)
    pair = (int(i[at]), int(j[at]))
    z = simultaneous(int((~np.isnan(rates.rate)).any(0).sum()), conditions)
    correlation = rates.correlation(i, j)
    differences = estimate_difference(first, second, z, correlation=correlation)
    complete = bool(rates.valid[~np.isnan(rates.rate)].all())
    low, high = bound_largest(folded(differences.low, differences.high), complete=complete)
    ratios = estimate_parity_ratio(first, second, z, correlation=correlation)
    ratio_low, ratio_high = bound_smallest(ratios)
    return LargestGap(
        gap=float(np.abs(distance[condition, at])),
        low=low,
        high=high,
        ratio=None if np.isnan(ratios.value).all() else float(np.nanmin(ratios.value)),
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        condition=int(condition),
        pair=pair if distance[condition, at] >= 0 else pair[::-1],
    )


def bound_largest(limits: Interval, *, complete: bool) -> tuple[float | None, float | None]:
    """Return limits of the largest value, from limits that hold for all values simultaneously.

    If the limits are not `complete`, a group without an interval may have a larger gap than all
    other groups, so there is no upper limit.
    """
    low, high = limits
    if np.isnan(low).all():
        return None, None
    return _clip_to_unit(np.nanmax(low)), _clip_to_unit(np.nanmax(high)) if complete else None


def bound_smallest(ratios: Estimate) -> tuple[float | None, float | None]:
    """Return limits of the smallest ratio; the lower limit is None if a ratio has no limits."""
    value, low, high = ratios
    if np.isnan(low).all():
        return None, None
    complete = not np.isnan(low[~np.isnan(value)]).any()
    return _clip_to_unit(np.nanmin(low)) if complete else None, _clip_to_unit(np.nanmin(high))


def _clip_to_unit(value: Value) -> float:
    """Clip the value to [0, 1]."""
    return min(max(float(value), 0.0), 1.0)
