"""Metrics of groups that are not seen as they are: within strata, or through randomized response.

Sums have one group axis, and everything that clients do with it (sums, prices, weights of rows) is
the same whatever the entries of the axis mean. `GroupAxis` says what they mean, and a
`MappedMetric` puts one linear map in front of a metric:

    clients  S (cells)  ->  M S (conditions, groups)  ->  rates, gap F        at the server
    clients  M^T v      <-  v = dF/d(M S)                                     prices, by chain rule

Two maps exist, alone or together:

- **Strata.** A cell is a group within a stratum, such as a department. For a metric "sp", M adds
  up the strata; for "sp|department" it keeps them apart, as conditions.
- **Randomized response.** Groups were randomized before anyone saw them, and M is the inverse of
  the response matrix (`fedgft.metrics.randomized_response`). E[M S'] = S for the sums S' of
  reported groups, and M^T v is the price of a reported group.

**The gap within strata** of a condition is

    F = sqrt(sum_s share_s gap_s^2),    share_s ~ n_s - sum_g n_sg^2 / n_s,    sum_s share_s = 1,

where gap_s is the gap in stratum s, n_sg its rows of group g in the event, and n_s those of all its
groups. With two groups, the shares are Mantel and Haenszel's, n_s0 n_s1 / n_s. So a small stratum,
whose rates are uncertain, counts little, and one where a single group occurs does not count. Why
squares: the pooled gap |sum_s share_s d_s| of signed differences d_s is 0 if women are favored in
one department and men in another. F is not, and it lies between the pooled gap and the largest one.
F^2 is smooth at 0, where training ends. With one stratum, F is the gap itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from fedgft.errors import FedgftError
from fedgft.formatting import join_names
from fedgft.metrics.metric import CellStatistics, Metric, Pair, Rates, Statistics, Value
from fedgft.metrics.randomized_response import check_epsilon, correction_matrix

MAX_STRATA = 200


@dataclass(frozen=True)
class GroupAxis:
    """What the entries of a group axis mean, apart from the last one, "not recorded".

    Parameters
    ----------
    groups
        The number of groups g.
    given
        The columns whose values are the strata; empty: there is one stratum.
    strata
        The names of the strata; entry ``s * groups + g`` is group g in stratum s.
    epsilon
        The privacy parameter of the randomized response that the groups went through; 0: none.
    """

    groups: int
    given: tuple[str, ...] = ()
    strata: tuple[str, ...] = ()
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.epsilon:
            check_epsilon(self.epsilon)
        if len(self.strata) > MAX_STRATA:
            text = f"has {len(self.strata):,} values, more than {MAX_STRATA}: use ranges of values"
            raise FedgftError(f"`given` {', '.join(self.given)} {text}", kind="data")

    @property
    def cells(self) -> int:
        """The number of entries without the last one."""
        return self.groups * max(len(self.strata), 1)

    def divide(self, values: np.ndarray) -> np.ndarray:
        """Return values (..., cells) as (..., stratum, group)."""
        return values.reshape(*values.shape[:-1], -1, self.groups)

    def merge(self, values: np.ndarray) -> np.ndarray:
        """Return counts (..., cells + 1) by group alone, (..., groups + 1): strata are added up."""
        known = self.divide(values[..., :-1]).sum(-2)
        return np.concatenate((known, values[..., -1:]), axis=-1)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return values (..., groups + 1) for each cell, (..., cells + 1)."""
        times = self.cells // self.groups
        return np.concatenate((*[values[..., :-1]] * times, values[..., -1:]), axis=-1)

    def correct(self, values: np.ndarray) -> np.ndarray:
        """Return sums (..., groups) over reported groups as estimates of those over true ones."""
        return values @ correction_matrix(self.groups, self.epsilon).T if self.epsilon else values

    def charge(self, prices: np.ndarray) -> np.ndarray:
        """Return prices (..., groups) of true groups as those of reported ones: the adjoint."""
        return prices @ correction_matrix(self.groups, self.epsilon) if self.epsilon else prices


@dataclass(frozen=True)
class MappedMetric(Metric):
    """A metric of groups behind a `GroupAxis`; statistics are those of the true groups.

    Parameters
    ----------
    base
        The metric that is mapped; the other fields are those of `Metric`.
    within
        The columns within whose strata groups are compared, as in "sp|department"; empty: strata
        are added up.
    axis
        The axis; None: it is not known yet, see `bind_metric`.
    """

    base: Metric | None = None
    within: tuple[str, ...] = ()
    axis: GroupAxis | None = None

    @classmethod
    def of(
        cls, base: Metric, within: tuple[str, ...] = (), axis: GroupAxis | None = None
    ) -> "MappedMetric":
        """Return the metric with the name and the functions of its base."""
        known = {each.name: getattr(base, each.name) for each in fields(Metric)}
        if within:
            columns = ",".join(within)
            known |= {"name": f"{base.name}|{columns}", "title": f"{base.title} given {columns}"}
        return cls(**known, base=base, within=within, axis=axis)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.within

    @property
    def has_interval(self) -> bool:
        return not self.within and not self.is_estimate

    @property
    def is_estimate(self) -> bool:
        return self.axis is not None and self.axis.epsilon > 0

    def arrange(self, statistics: CellStatistics) -> Statistics:
        """Return M S: (..., 2, v, cells) as (..., 2, v x strata, groups), or strata added up."""
        axis = self._axis
        found = axis.divide(statistics)
        *lead, conditions, strata, groups = found.shape
        apart = (*lead, conditions * strata, groups)
        return axis.correct(found.reshape(apart) if self.within else found.sum(-2))

    def to_cells(self, cotangent: Statistics, classes: int) -> CellStatistics:
        """Return M^T v: from prices of statistics those of the sums that clients add up."""
        axis = self._axis
        found = axis.charge(cotangent)
        if not self.within:
            return np.concatenate([found] * (axis.cells // axis.groups), axis=-1)
        conditions = len(self.conditions(classes))
        return found.reshape(*found.shape[:-2], conditions, axis.cells)

    def rates(self, statistics: Statistics) -> Rates:
        """Return the rates; NaN where no row is in the event, or an estimate says so."""
        return np.where(statistics[..., 1, :, :] > 0, super().rates(statistics), np.nan)

    def gap(self, rates: Rates, mass: np.ndarray) -> Value:
        """Return the gap; within strata the root of the mean square, see the module."""
        return self._pool(rates, mass)[0].max(-1) if self.within else super().gap(rates, mass)

    def worst(self, statistics: Statistics) -> Pair:
        """Return the condition that adds most to the gap, and its groups."""
        if not self.within:
            return super().worst(statistics)
        rates = self.rates(statistics)
        _, share, gaps = self._pool(rates, statistics[..., 1, :, :])
        condition = np.argmax((share * gaps**2).reshape(*rates.shape[:-1]), axis=-1)
        row = np.take_along_axis(rates, condition[..., None, None], axis=-2)[..., 0, :]
        high = np.argmax(np.where(np.isnan(row), -np.inf, row), axis=-1)
        return Pair(condition, high, np.argmin(np.where(np.isnan(row), np.inf, row), axis=-1))

    def gradient(self, statistics: Statistics) -> Statistics:
        """Return dF/d(M S). The shares change with the denominators of a metric that is not proper.

        dF = sum_s (share_s gap_s d gap_s + (gap_s^2 - F^2) / 2 d share_s) / F
        """
        if not self.within:
            return super().gradient(statistics)
        rates = self.rates(statistics)
        mass = np.where(statistics[..., 1, :, :] > 0, statistics[..., 1, :, :], 0.0)
        value, share, gaps = self._pool(rates, mass)
        top = np.arange(value.shape[-1]) == np.argmax(value, axis=-1)[..., None]
        scale = np.where(top & (value > 0), 1 / np.where(value > 0, value, 1.0), 0.0)[..., None]
        shape = rates.shape[:-1]
        pull = (scale * share * gaps).reshape(shape)[..., None]
        known = np.isfinite(rates)
        high = np.where(known, rates, -np.inf).argmax(-1)[..., None] == np.arange(rates.shape[-1])
        low = np.where(known, rates, np.inf).argmin(-1)[..., None] == np.arange(rates.shape[-1])
        found = self.through_rates(pull * (1.0 * high - low), statistics)
        total = mass.sum(-1, keepdims=True)
        part = mass / np.where(total > 0, total, 1.0)
        slope = 1 - 2 * part + (part**2).sum(-1, keepdims=True)  # of n - sum n_g^2 / n
        all_shares = _count_pairs(mass).reshape(share.shape).sum(-1, keepdims=True)
        push = scale * (gaps**2 - value[..., None] ** 2) / 2
        push = np.where(share > 0, push / np.where(all_shares > 0, all_shares, 1.0), 0.0)
        found[..., 1, :, :] += np.where(known, push.reshape(shape)[..., None] * slope, 0.0)
        return found

    def estimable(self, statistics: Statistics) -> np.ndarray:
        return (
            np.isfinite(self.readout(statistics)) if self.within else super().estimable(statistics)
        )

    def gain_shares(self, conditions: int) -> tuple[np.ndarray, int]:
        """Return the shares of the conditions; strata have different rows, so they share none."""
        if not self.within:
            return super().gain_shares(conditions)
        of_base = conditions // len(self._axis.strata)
        return np.full(conditions, 1 / of_base), of_base

    def weights(self, conditions: int) -> np.ndarray:
        return np.ones(conditions) if self.within else super().weights(conditions)

    def condition_names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the conditions, such as "class yes given department A"."""
        names = super().condition_names(classes)
        if not self.within:
            return names
        column = ",".join(self.within)
        return tuple(
            f"{name} given {column} {each}" for name in names for each in self._axis.strata
        )

    def summarize(self, statistics: Statistics) -> tuple[Value, Value]:
        """Return the pooled gap and the largest gap within strata, (...) each.

        The pooled gap is that of the means of rates over strata, with the shares of the module. A
        stratum that lacks a group counts in neither group's mean, so with more than two groups it
        is that of the pair of groups for which it is largest, over the strata where both occur.
        """
        rates = self.rates(statistics)
        mass = statistics[..., 1, :, :]
        strata = len(self._axis.strata)
        pooled = np.full(rates.shape[:-2], np.nan)
        for i, j in zip(*np.triu_indices(rates.shape[-1], 1), strict=True):
            pair = np.where(np.isfinite(rates[..., [i, j]]), mass[..., [i, j]], 0.0)
            pairs = _count_pairs(pair)
            apart = np.where(pairs > 0, rates[..., i] - rates[..., j], 0.0)
            pairs, apart = (x.reshape(*x.shape[:-1], -1, strata) for x in (pairs, apart))
            total = pairs.sum(-1)
            found = np.abs((pairs * apart).sum(-1)) / np.where(total > 0, total, np.nan)
            pooled = np.fmax(pooled, np.fmax.reduce(found, axis=-1))
        _, share, gaps = self._pool(rates, mass)
        largest = np.where(share > 0, gaps, -np.inf).max((-2, -1))
        return pooled, np.where(np.isfinite(largest), largest, np.nan)

    def _pool(self, rates: Rates, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return F (..., v), and share and gap of each stratum, (..., v, strata)."""
        known = np.isfinite(rates) & (mass > 0)
        each = np.where(known, mass, 0.0)
        pairs = _count_pairs(each)
        high = np.where(known, rates, -np.inf).max(-1)
        gaps = np.where(pairs > 0, high - np.where(known, rates, np.inf).min(-1), 0.0)
        strata = len(self._axis.strata)
        pairs, gaps = (x.reshape(*x.shape[:-1], -1, strata) for x in (pairs, gaps))
        total = pairs.sum(-1, keepdims=True)
        share = pairs / np.where(total > 0, total, 1.0)
        value = np.sqrt((share * gaps**2).sum(-1))
        return np.where(total[..., 0] > 0, value, np.nan), share, gaps

    @property
    def _axis(self) -> GroupAxis:
        if self.axis is None:
            text = f"{self.name} needs rows that are divided by {', '.join(self.within)} (`given`)"
            raise FedgftError(text, field="metric", kind="missing")
        return self.axis


def _count_pairs(mass: np.ndarray) -> np.ndarray:
    """Return n - sum_g n_g^2 / n over the last axis; 0 where at most one group occurs."""
    total = mass.sum(-1)
    squares = (mass**2).sum(-1) / np.where(total > 0, total, 1.0)
    return np.where((mass > 0).sum(-1) > 1, total - squares, 0.0)


def bind_metric(metric: Metric, axis: GroupAxis | None) -> Metric:
    """Return the metric of the groups behind an axis; None: groups are seen as they are.

    Raises a `FedgftError` if the metric is conditional, and rows are not divided by its columns.
    """
    within = metric.columns
    base = metric.base if isinstance(metric, MappedMetric) and metric.base is not None else metric
    if within and (axis is None or set(within) != set(axis.given)):
        found = "not divided into strata"
        if axis is not None and axis.given:
            found = f"divided by {join_names(list(axis.given))}"
        text = f"{metric.name}: the rows are {found}; `given` must be {', '.join(within)}"
        raise FedgftError(text, field="metric", kind="conflict")
    if axis is None:
        return metric
    if isinstance(metric, MappedMetric) and metric.axis == axis:
        return metric
    return MappedMetric.of(base, within, axis)
