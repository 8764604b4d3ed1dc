"""The gap of one metric in every period, its changes, and what moved it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedgft.auditing.change_points import (
    ChangePoint,
    Look,
    RateSeries,
    Shift,
    find_shift,
    stack_rates,
    watch,
)
from fedgft.auditing.gap_changes import SiteCounts, SiteShift, split_change
from fedgft.auditing.rates import Rates, View, bound_largest, estimate_rates, find_largest_gap
from fedgft.errors import FedgftError
from fedgft.metrics import Metric
from fedgft.metrics.intervals import folded

MAX_GROUPS = 60  # groups of which all pairs are followed
ChangeKind = Literal["found", "model version"]
Direction = Literal["larger", "smaller", "not clear"]


@dataclass(frozen=True)
class PeriodGap:
    """The largest gap of one metric in one period, as fractions. None: not estimable.

    Parameters
    ----------
    gap, low, high
        The gap over the rows of this period alone, with its 95% interval.
    pair, condition
        The groups that are farthest apart, the one with the higher rate first, and the condition.
    average, band_low, band_high
        The largest average difference since `since`, with the band that holds at every look.
    since
        The first period of the regime: the one after the last change that was known by then.
    rates, rows
        The rate of each group under `condition`, and the rows that it is taken of.
    """

    gap: float | None = None
    low: float | None = None
    high: float | None = None
    pair: tuple[str, str] | None = None
    condition: str = ""
    average: float | None = None
    band_low: float | None = None
    band_high: float | None = None
    since: str = ""
    rates: dict[str, float | None] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GapChange:
    """A change of the difference between two groups, in fractions.

    Parameters
    ----------
    metric
        The short name of the metric.
    kind
        ``"found"``: the data show it. ``"model version"``: a new version of the model began.
    period
        The first period after the change.
    earliest, latest
        The range of periods that hold 95% of the evidence about when it was.
    found_in
        The period after which the interval excluded no change; None if it never did.
    pair, condition
        The two groups and the condition of the metric. The difference is that of the first minus
        the second group; before or after, whichever is larger, it is positive.
    before, after, change, low, high
        The average differences before and after, and `change` = after - before with its
        anytime-valid 95% interval.
    direction
        Whether the gap between the two became ``"larger"`` or ``"smaller"``; ``"not clear"`` if
        the interval contains 0.
    groups
        What the rate of each group added to `change`.
    sites
        What each site added to `change`: by its own rates, and by the mix of sites.
    """

    metric: str
    kind: ChangeKind
    period: str
    earliest: str
    latest: str
    found_in: str | None
    pair: tuple[str, str]
    condition: str
    before: float
    after: float
    change: float
    low: float
    high: float
    direction: Direction
    groups: dict[str, float]
    sites: dict[str, SiteShift]


@dataclass(frozen=True, eq=False)
class MetricHistory:
    """One metric over all periods: its gaps, and the changes in the order of their periods."""

    gaps: list[PeriodGap]
    changes: list[GapChange]


def trace_metric(
    metric: Metric,
    views: Sequence[View | None],
    sites: Sequence[tuple[str, ...]],
    labels: Sequence[str],
    new_versions: Sequence[int],
    *,
    level: float,
) -> MetricHistory:
    """Return the gaps of a metric over time, with bands and changes.

    Parameters
    ----------
    metric
        The metric.
    views, sites, labels
        For each period, the groups that are compared (None: no row has the attributes), the names
        of the sites and the name of the period.
    new_versions
        The positions of the periods in which a new version of the model began.
    level
        The probability that any change is found in a history without changes.
    """
    tracer = _Tracer(metric, views, sites, labels, level)
    looks, points = watch(tracer.series, list(new_versions), level=level)
    gaps = [tracer.gap(t, look) for t, look in enumerate(looks)]
    return MetricHistory(gaps, tracer.changes(list(new_versions), points))


class _Tracer:
    """Holds the rates of a metric in all periods."""

    def __init__(
        self,
        metric: Metric,
        views: Sequence[View | None],
        sites: Sequence[tuple[str, ...]],
        labels: Sequence[str],
        level: float,
    ) -> None:
        self.metric = metric
        self.views = views
        self.sites = sites
        self.labels = labels
        self.level = level
        self.groups = list(dict.fromkeys(g for view in views if view for g in view.groups))
        if len(self.groups) > MAX_GROUPS:
            text = f"{len(self.groups)} groups are too many to follow all pairs (at most "
            text += f"{MAX_GROUPS}); choose the groups of one column"
            raise FedgftError(f"`by`: {text}")
        first = next(view for view in views if view is not None)
        self.conditions = metric.condition_names(first.spec.classes)
        self.rates: list[Rates | None] = [
            None if view is None else estimate_rates(metric, view, "hard") for view in views
        ]
        positions = [[self.groups.index(g) for g in view.groups] if view else [] for view in views]
        self.series: RateSeries = stack_rates(self.rates, positions, len(self.groups))

    def gap(self, t: int, look: Look) -> PeriodGap:
        """Return the gap of period `t`, and the band that was known after it."""
        low, high = folded(look.low, look.high)
        band_low, band_high = bound_largest((low, high), complete=self._is_complete(t, look))
        average = None if np.isnan(look.mean).all() else float(np.nanmax(np.abs(look.mean)))
        band = {"average": average, "band_low": band_low, "band_high": band_high}
        since = self.labels[look.start]
        view, rates = self.views[t], self.rates[t]
        if view is None or rates is None:
            return PeriodGap(**band, since=since)
        found = find_largest_gap(rates)
        v = found.condition or 0
        value = [None if np.isnan(x) else float(x) for x in rates.rate[v]]
        return PeriodGap(
            found.gap,
            found.low,
            found.high,
            None
            if found.pair is None
            else (view.groups[found.pair[0]], view.groups[found.pair[1]]),
            self.conditions[v],
            **band,
            since=since,
            rates=dict(zip(view.groups, value, strict=True)),
            rows=dict(zip(view.groups, map(float, rates.n[v]), strict=True)),
        )

    def _is_complete(self, t: int, look: Look) -> bool:
        """Return whether every pair of groups that the regime has can be compared."""
        present = {g for view in self.views[look.start : t + 1] if view for g in view.groups}
        here = np.array([group in present for group in self.groups])
        i, j = self.series.pairs
        wanted = np.tile(here[i] & here[j], len(self.conditions))
        return not np.isnan(look.low[wanted]).any()

    def changes(self, versions: list[int], points: list[ChangePoint]) -> list[GapChange]:
        """Return the changes that were found, and those with a new version of the model."""
        found_at = {point.at: point.found_at for point in points}
        places = sorted({*versions, *found_at})
        bounds = [0, *places, len(self.labels)]
        made = [
            self._change(bounds[i], at, bounds[i + 2], found_at.get(at))
            for i, at in enumerate(places)
        ]
        return [change for change in made if change is not None]

    def _change(self, start: int, at: int, end: int, found_at: int | None) -> GapChange | None:
        """Return the change before period `at` of the periods `start` to `end` - 1.

        `found_at` None: it is the beginning of a new version of the model.
        """
        is_known = found_at is None
        differences = self.series.differences(start, end)
        shift = find_shift(differences, level=self.level, at=at - start, is_known=is_known)
        if shift is None:
            return None
        if is_known:
            found_at = self._find_time(start, at, end)
        pairs = len(self.series.pairs[0])
        v, pair = divmod(shift.pair, pairs)
        i, j = (int(each[pair]) for each in self.series.pairs)
        sign = 1.0 if shift.before + shift.after >= 0 else -1.0
        if sign < 0:
            i, j = j, i
        low, high = sorted((sign * shift.low, sign * shift.high))
        parts = split_change(
            [self._counts(t, v, i, j) for t in range(start, at)],
            [self._counts(t, v, i, j) for t in range(at, end)],
            differences.weights(0, at - start)[:, shift.pair],
            differences.weights(at - start, end - start)[:, shift.pair],
        )
        return GapChange(
            metric=self.metric.name,
            kind="model version" if is_known else "found",
            period=self.labels[at],
            earliest=self.labels[start + shift.earliest],
            latest=self.labels[start + shift.latest],
            found_in=None if found_at is None else self.labels[found_at],
            pair=(self.groups[i], self.groups[j]),
            condition=self.conditions[v],
            before=sign * shift.before,
            after=sign * shift.after,
            change=sign * (shift.after - shift.before),
            low=low,
            high=high,
            direction=_find_direction(shift),
            groups=dict(zip((self.groups[i], self.groups[j]), parts.groups, strict=True)),
            sites=parts.sites,
        )

    def _find_time(self, start: int, at: int, end: int) -> int | None:
        """Return the first period after which the interval of a new version's change excludes 0."""
        for stop in range(at + 1, end + 1):
            differences = self.series.differences(start, stop)
            shift = find_shift(differences, level=self.level, at=at - start, is_known=True)
            if shift is not None and shift.is_found:
                return stop - 1
        return None

    def _counts(self, t: int, v: int, i: int, j: int) -> SiteCounts:
        """Return hits and rows of two groups at each site in period `t`, under condition `v`."""
        view = self.views[t]
        counts = np.zeros((len(self.sites[t]), 2, 2))  # (site, numerator or denominator, group)
        if view is not None:
            statistics = view.sums.statistics(self.metric, "hard")
            for column, group in enumerate((self.groups[i], self.groups[j])):
                if group in view.groups:
                    counts[..., column] = statistics[:, :, v, view.groups.index(group)]
        return SiteCounts(self.sites[t], counts[:, 0], counts[:, 1])


def _find_direction(shift: Shift) -> Direction:
    """Return whether the size of the difference grew; not clear if the interval contains 0."""
    if not shift.is_found:
        return "not clear"
    return "larger" if abs(shift.after) > abs(shift.before) else "smaller"
