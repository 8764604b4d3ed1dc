"""Means by group over all sites, their gaps and intervals, for a model that predicts numbers.

The groups of a view and the sums of their rows come from `RegressionSums`. Everything else follows
from means, their squared standard errors and the variances between rows
(`fedgft.metrics.mean_intervals`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from fedgft.auditing.audit_results import Estimate
from fedgft.auditing.rates import MAX_GROUPS, make_distinct, make_distinct_values, make_group_names
from fedgft.auditing.summary import Number
from fedgft.errors import FedgftError
from fedgft.metrics.intervals import FEW
from fedgft.metrics.mean_intervals import (
    Limits,
    Mean,
    difference_limits,
    fold_limits,
    mean_limits,
    ratio_limits,
    standardized_difference,
    weighted_mean,
)
from fedgft.site_sums.moments import ABSOLUTE, PREDICTION, RESIDUAL, SQUARED, TARGET, Moments
from fedgft.site_sums.regression_sums import RegressionSums
from fedgft.site_sums.tables import Group, group_sort_key


class RegressionMetric(NamedTuple):
    """A quantity whose means are compared between groups.

    `position` is that of the quantity in `QUANTITIES`; `has_ratio` says whether it is a loss, whose
    ratio between groups means something.
    """

    title: str
    position: int
    has_ratio: bool


METRICS = {
    "mean-prediction": RegressionMetric("mean prediction", PREDICTION, False),
    "mean-outcome": RegressionMetric("mean outcome", TARGET, False),
    "mean-error": RegressionMetric("mean error", RESIDUAL, False),
    "mean-absolute-error": RegressionMetric("mean absolute error", ABSOLUTE, True),
    "mean-squared-error": RegressionMetric("mean squared error", SQUARED, True),
}
ROUNDING = 1e-13  # of a float: values that differ by less, relative to their mean, are equal
ALIASES = {"mae": "mean-absolute-error", "mse": "mean-squared-error", "bias": "mean-error"}


@dataclass(frozen=True)
class MeanEstimate:
    """The mean of a group with its 95% interval.

    Parameters
    ----------
    value
        The mean.
    low, high
        The limits of its interval; None with fewer than ten rows.
    rows
        The number of rows of the group.
    """

    value: Number
    low: Number
    high: Number
    rows: int


@dataclass(frozen=True)
class MeanGap:
    """One metric over all sites: the largest difference of means between two groups.

    Parameters
    ----------
    metric, title
        The short name ("mean-prediction") and the full name of the metric.
    value
        The largest difference, in the unit of the outcome (of squared errors: its square). None if
        a group has no sums; `among_estimable` then holds the gap between the other groups.
    low, high
        The limits of its 95% interval, which accounts for the choice of the largest difference.
    pair
        The two groups that differ most; the group with the larger mean is first.
    standardized
        The standardized mean difference of the pair: the difference divided by the standard
        deviation within groups.
    ratio
        The smaller mean of the pair divided by the larger one, for absolute and squared errors.
    within
        The average difference between the two groups inside the sites.
    among_estimable
        The gap between the groups that have sums, if a group has none; otherwise None.
    """

    metric: str
    title: str
    value: Number
    low: Number
    high: Number
    pair: tuple[str, str] | None
    standardized: Estimate
    ratio: Estimate
    within: Estimate
    among_estimable: Estimate | None

    def estimable(self) -> Estimate:
        """Return the gap between all groups, or between those that have sums."""
        return self.among_estimable or Estimate(self.value, self.low, self.high)


@dataclass(frozen=True)
class Fit:
    """How well the predictions of a group fit.

    Parameters
    ----------
    rmse
        The root of the mean squared error.
    r_squared
        1 - sum (y - p)^2 / sum (y - mean y)^2 over the rows of the group. None if the outcome is
        constant. There is no interval.
    deviation
        The standard deviation of the outcome.
    """

    rmse: Estimate
    r_squared: Number
    deviation: Number


@dataclass(frozen=True)
class SiteMean:
    """One metric at one site.

    Parameters
    ----------
    local
        The difference at the site between the two groups of `MeanGap.pair`, with its interval.
    largest
        The largest difference between two groups at the site.
    contribution
        What the site adds to the gap over all sites. The contributions of all sites add up to it.
    own, mix
        The two parts of the contribution: by the difference inside the site, and by its mix of
        groups where its mean is another one than overall.
    """

    local: Estimate
    largest: Number
    contribution: Number
    own: Number
    mix: Number


@dataclass(frozen=True)
class SiteMeans:
    """One site: its name, the number of its rows in the groups, and its metrics by short name."""

    name: str
    rows: int
    gaps: Mapping[str, SiteMean]


@dataclass(frozen=True)
class RegressionResults:
    """The numbers for the groups of one attribute, or of several together.

    Parameters
    ----------
    gaps
        The gap of each metric, by its short name.
    means
        The mean of each group, by the short name of the metric and the name of the group.
    fit
        How well predictions fit, by the name of the group.
    sites
        The sites, by name.
    against_reference
        Each group minus the reference group, by metric and group; empty without a reference.
    reference
        The name of the reference group, or None.
    """

    gaps: Mapping[str, MeanGap]
    means: Mapping[str, Mapping[str, MeanEstimate]]
    fit: Mapping[str, Fit]
    sites: Mapping[str, SiteMeans]
    against_reference: Mapping[str, Mapping[str, Estimate]]
    reference: str | None


# Views


@dataclass(frozen=True, eq=False)
class RegressionView:
    """The sums by the groups of one attribute, or of several together.

    Parameters
    ----------
    attributes, groups
        The names of the attributes and of the groups.
    total
        The sums of each group over all sites; None if it was withheld everywhere.
    sites
        The same by site.
    """

    attributes: tuple[str, ...]
    groups: tuple[str, ...]
    total: tuple[Moments | None, ...]
    sites: Mapping[str, tuple[Moments | None, ...]]

    @property
    def title(self) -> str:
        """The names of the attributes, such as ``race & sex``."""
        return " & ".join(self.attributes)

    def index(self, group: str) -> int:
        """Return the position of a group; raise an error if the view has no group of this name."""
        if group not in self.groups:
            known = ", ".join(self.groups)
            raise FedgftError(f"group {group!r} is not among those of {self.title}: {known}")
        return self.groups.index(group)

    def means(self, name: str, site: str | None = None) -> Mean:
        """Return the means of a metric by group, with NaN where there is none or no interval.

        Parameters
        ----------
        name
            The short name of a metric.
        site
            The name of a site. None: over all sites.
        """
        position = METRICS[name].position
        parts = self.total if site is None else self.sites[site]
        return stack_means(parts, position)


def stack_means(parts: Sequence[Moments | None], position: int) -> Mean:
    """Return the means of a quantity, with NaN where there are no sums or no interval."""
    found = np.full((4, len(parts)), np.nan)
    for i, each in enumerate(parts):
        if each is not None:
            found[0, i] = each.mean[position]
            found[3, i] = each.variance[position]
            if each.rows >= FEW and each.effective_rows > 1:
                found[1:3, i] = each.error[position], _degrees_of_freedom(each, position)
    return Mean(*found)


def _degrees_of_freedom(moments: Moments, position: int) -> float:
    """Return the degrees of freedom of the squared error of a mean: rows - 1.

    Squared errors have long tails, so their variance is known less well than that of normal values.
    If K is the kurtosis of the squared errors, n rows are worth 2 n / (K - 1) degrees of freedom.
    K is 15 for normal errors, and taken to grow like the kurtosis of the errors.
    """
    n = moments.effective_rows
    kurtosis = error_kurtosis(moments)
    if position != SQUARED or kurtosis is None:
        return n - 1
    return max(1.0, min(n - 1, 2 * n / (15 * kurtosis / 3 - 1)))


def is_constant(moments: Moments) -> bool:
    """Return whether all outcomes of a group are equal, up to rounding."""
    deviation = math.sqrt(moments.squares[TARGET] / moments.weight)
    return deviation <= ROUNDING * abs(float(moments.mean[TARGET]))


def error_kurtosis(moments: Moments) -> float | None:
    """Return mean(r^4) / mean(r^2)^2, which is 3 for normal errors; None if all errors are 0."""
    square = float(moments.mean[SQUARED])
    if not square > 0:
        return None
    return 1 + float(moments.squares[SQUARED]) / moments.weight / square / square


def list_regression_views(sums: RegressionSums) -> tuple[RegressionView, ...]:
    """Return the view by each attribute, then those by combinations; the one by all is last."""
    spec = sums.require_spec()
    attributes = make_distinct(spec.attributes)
    sites = dict(zip(make_distinct(tuple(sums.sites)), sums.sites.values(), strict=True))
    raw = sorted(
        {group for site in sites.values() for group in (*site.cells, *site.withheld)},
        key=group_sort_key,
    )
    columns = (make_distinct_values(column) for column in zip(*raw, strict=True))
    safe = dict(zip(raw, zip(*columns, strict=True), strict=True))
    found = []
    for size in range(1, len(attributes) + 1):
        for chosen in combinations(range(len(attributes)), size):
            view = _view_by(chosen, attributes, sites, safe)
            if len(view.groups) > MAX_GROUPS:
                raise FedgftError(
                    f"{view.title} gives {len(view.groups):,} groups, more than {MAX_GROUPS:,}: "
                    "measure fewer columns, or put values together first"
                )
            if view.groups:
                found.append(view)
    if not any(part for view in found for part in view.total):
        names = " or ".join(attributes)
        text = f"there is nothing to audit: no group by {names} has enough rows for sums"
        raise FedgftError(text, kind="data")
    return tuple(found)


def _view_by(
    chosen: tuple[int, ...],
    attributes: tuple[str, ...],
    sites: Mapping,
    safe: Mapping[Group, Group],
) -> RegressionView:
    """Return the view by the attributes at the positions `chosen`.

    `safe` holds the printable values of each group.
    """

    def place(group: Group) -> Group:
        return tuple(safe[group][i] for i in chosen)

    cells = {place(group): None for group in safe if None not in place(group)}
    totals = []
    for site in sites.values():
        known: dict[Group, Moments] = {}
        for group, moments in site.cells.items():
            cell = place(group)
            known[cell] = known[cell] + moments if cell in known else moments
        totals.append(known)
    by_site = {
        name: tuple(known.get(cell) for cell in cells)
        for name, known in zip(sites, totals, strict=True)
    }
    columns = zip(*by_site.values(), strict=True)
    names = tuple(attributes[i] for i in chosen)
    total = tuple(_add_all(column) for column in columns) if cells else ()
    return RegressionView(names, make_group_names(list(cells), names), total, by_site)


def _add_all(parts: Iterable[Moments | None]) -> Moments | None:
    """Return the sum of those that are known; None if there is none."""
    known = [part for part in parts if part is not None]
    return sum(known[1:], start=known[0]) if known else None


# Estimates


def estimate_regression(view: RegressionView, reference: int | None) -> RegressionResults:
    """Return all numbers of one view.

    Parameters
    ----------
    view
        The groups and their sums.
    reference
        The position of the reference group, or None.
    """
    gaps = {name: _find_gap(view, name) for name in METRICS}
    rows = [0 if part is None else part.rows for part in view.total]
    means = {}
    for name in METRICS:
        limits = zip(*mean_limits(view.means(name)), rows, strict=True)
        means[name] = {
            group: MeanEstimate(_known(value), _known(low), _known(high), n)
            for group, (value, low, high, n) in zip(view.groups, limits, strict=True)
        }
    return RegressionResults(
        gaps=gaps,
        means=means,
        fit={g: _fit(part, means, g) for g, part in zip(view.groups, view.total, strict=True)},
        sites=_compare_sites(view, gaps),
        against_reference={} if reference is None else _compare_reference(view, reference),
        reference=None if reference is None else view.groups[reference],
    )


def _find_gap(view: RegressionView, name: str) -> MeanGap:
    """Return the largest gap of a metric between two groups of a view."""
    means = view.means(name)
    title = METRICS[name].title
    unknown = Estimate(None, None, None)
    i, j = np.triu_indices(len(view.groups), 1)
    known = np.isfinite(means.value)
    compared = known[i] & known[j]
    if not compared.any():
        return MeanGap(name, title, None, None, None, None, unknown, unknown, unknown, None)
    groups = int(known.sum())
    pairs = difference_limits(means[i[compared]], means[j[compared]], groups)
    folded = fold_limits(pairs)
    largest = int(np.argmax(folded.value))
    a, b = (int(index[compared][largest]) for index in (i, j))
    first, second = (a, b) if means.value[a] >= means.value[b] else (b, a)
    has_low = np.isfinite(folded.low)
    low = np.max(folded.low[has_low]) if has_low.any() else np.nan
    gap = to_estimate(Limits(folded.value[largest], low, np.max(folded.high)))
    ratio = Limits(np.nan, np.nan, np.nan)
    if METRICS[name].has_ratio:
        ratio = ratio_limits(means[second], means[first], groups)
    complete = bool(known.all())
    numbers = (gap.value, gap.low, gap.high) if complete else (None, None, None)
    return MeanGap(
        name,
        title,
        *numbers,
        pair=(view.groups[first], view.groups[second]),
        standardized=to_estimate(standardized_difference(means[first], means[second], groups)),
        ratio=to_estimate(ratio),
        within=to_estimate(_average_within(view, name, first, second)),
        among_estimable=None if complete else gap,
    )


def _average_within(view: RegressionView, name: str, first: int, second: int) -> Limits:
    """Return the average difference of two groups inside the sites.

    A site with weights W_a and W_b of the groups has the weight W_a W_b / (W_a + W_b), as in the
    method of Mantel and Haenszel.
    """
    values, errors, weights = [], [], []
    for site, parts in view.sites.items():
        a, b = parts[first], parts[second]
        if a is None or b is None:
            continue
        means = view.means(name, site)
        values.append(means.value[first] - means.value[second])
        errors.append(means.error[first] + means.error[second])
        weights.append(a.weight * (b.weight / (a.weight + b.weight)))
    return weighted_mean(*map(np.array, (values, errors, weights)))


def _fit(part: Moments | None, means: Mapping, group: str) -> Fit:
    """Return how well the predictions of a group fit."""
    if part is None:
        return Fit(Estimate(None, None, None), None, None)
    found = means["mean-squared-error"][group]
    roots = (
        None if x is None else math.sqrt(max(x, 0.0)) for x in (found.value, found.low, found.high)
    )
    r_squared = None
    if not is_constant(part):
        r_squared = _known(1 - part.mean[SQUARED] / (part.squares[TARGET] / part.weight))
    deviation = _known(np.sqrt(part.variance[TARGET]))
    return Fit(Estimate(*roots), r_squared, deviation)


def _compare_reference(view: RegressionView, reference: int) -> dict[str, dict[str, Estimate]]:
    """Return each group minus the reference group, each with an interval that holds for itself."""
    found: dict[str, dict[str, Estimate]] = {}
    for name in METRICS:
        means = view.means(name)
        found[name] = {
            group: to_estimate(difference_limits(means[i], means[reference]))
            for i, group in enumerate(view.groups)
            if i != reference
        }
    return found


def _compare_sites(view: RegressionView, gaps: Mapping[str, MeanGap]) -> dict[str, SiteMeans]:
    """Return what each site has and adds, by its name."""
    rows = {site: sum(p.rows for p in parts if p is not None) for site, parts in view.sites.items()}
    found: dict[str, dict[str, SiteMean]] = {site: {} for site in view.sites}
    for name, gap in gaps.items():
        for site in view.sites:
            found[site][name] = _describe_site(view, name, gap, site)
    return {site: SiteMeans(site, rows[site], found[site]) for site in view.sites}


def _describe_site(view: RegressionView, name: str, gap: MeanGap, site: str) -> SiteMean:
    """Return one metric at one site.

    With a_s the part of the first group that is at the site, m_as its mean there, and m the mean of
    both groups over all sites, the site adds a_s (m_as - m) - b_s (m_bs - m). This is the sum of
    (a_s + b_s) / 2 (m_as - m_bs), its own gap, and a mix (a_s - b_s) ((m_as + m_bs) / 2 - m).
    """
    means = view.means(name, site)
    known = means.value[np.isfinite(means.value)]
    largest = _known(np.ptp(known)) if len(known) > 1 else None
    unknown = Estimate(None, None, None)
    if gap.pair is None:
        return SiteMean(unknown, largest, None, None, None)
    first, second = map(view.index, gap.pair)
    position = METRICS[name].position
    totals = [view.total[k] for k in (first, second)]
    here = [view.sites[site][k] for k in (first, second)]
    center = _mean_of_both(totals, position)
    pairs = zip(here, totals, strict=True)
    shares = [0.0 if h is None or t is None else h.weight / t.weight for h, t in pairs]
    distances = [0.0 if h is None else h.mean[position] - center for h in here]
    amount = shares[0] * distances[0] - shares[1] * distances[1]
    own = 0.0
    local = unknown
    if here[0] is not None and here[1] is not None:
        own = (shares[0] + shares[1]) / 2 * (distances[0] - distances[1])
        local = to_estimate(difference_limits(means[first], means[second]))
    return SiteMean(local, largest, float(amount), float(own), float(amount - own))


def _mean_of_both(totals: Sequence[Moments | None], position: int) -> float:
    """Return the mean of a quantity over the rows of both groups."""
    total = _add_all(totals)
    assert total is not None  # the groups of a pair have sums
    return float(total.mean[position])


def to_estimate(found: Limits) -> Estimate:
    """Return limits as plain numbers, None where they are not known."""
    return Estimate(*map(_known, found))


def _known(value: float | np.ndarray) -> Number:
    """Return a plain number; None for NaN and infinity."""
    number = float(value)
    return number if math.isfinite(number) else None
