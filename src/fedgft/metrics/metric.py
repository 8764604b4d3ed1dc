"""Group fairness metrics: sums over rows, from which the gap is computed.

A metric compares, between groups g, the rate of an outcome U given an event V:

    rate[v, g] = E[U_v V_v 1{A=g}] / E[V_v 1{A=g}],   F = max_v (max_g rate - min_g rate)

Numerators (a, c) and denominators (b, d of Definition 3.1) are its statistics. They
are means over rows, so they add up over batches and over clients.

The shapes of arrays are named here, for the whole library. Letters: n rows, c classes, g groups,
v conditions of a metric. An array may be NumPy's or torch's: functions that take arrays of these
names use only operations that both of them have.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from math import prod
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from fedgft.errors import FedgftError

Probs = Float[Any, "n c"]  # f(x): one column per class
Labels = Float[Any, "n c"]  # Y, one-hot
Groups = Float[Any, "n g"]  # A, one-hot; a row of zeros where it is not recorded
Index = Int[np.ndarray, "n"]  # the class or group of each row
PerSample = Float[Any, "n 2 v g"]  # numerators, then denominators
Statistics = Float[Any, "*batch 2 v g"]  # their mean or sum over rows (and over clients)
CellStatistics = Float[Any, "*batch 2 u k"]  # by entry of a `GroupAxis`, in place of groups
Rates = Float[Any, "*batch v g"]
Value = Float[Any, "*batch"]
Price = Float[Any, "*batch c k c"]  # label, group (the last one: not recorded), class
Weights = Float[Any, "*batch c k"]  # label, group

Kind = Literal["soft", "hard"]
"Which sums are read: soft, those of scores; hard, those of decisions."


def namespace(array: Any) -> ModuleType:
    """Return the module, NumPy or torch, whose functions take this array."""
    return np if isinstance(array, np.ndarray) else import_module("torch")


class Pair(NamedTuple):
    """The condition with the largest gap, and its groups with the highest and the lowest rate."""

    condition: np.ndarray
    high: np.ndarray
    low: np.ndarray


def all_rows(probs: Probs, labels: Labels) -> Any:
    """Return the event that holds for every row, (n, 1)."""
    return 1.0 + 0.0 * labels[:, :1]


def compared(classes: int) -> range:
    """Return the classes whose rates are compared: the positive one of two, or each of more."""
    return range(1, 2) if classes == 2 else range(classes)


def each_class(classes: int) -> tuple[str, ...]:
    """Return the names of the conditions of a metric with one condition per class compared."""
    return tuple(f"class {c}" for c in compared(classes))


@dataclass(frozen=True)
class Metric:
    """The gap between groups in the rate of `outcome` given `event`.

    Laws: statistics add up over any split of the rows; rows without a group, and rows of
    weight zero, change nothing; a group without rows has no rate, so the gap is NaN.

    Parameters
    ----------
    name
        The short name, such as "sp".
    title
        The full name, such as "statistical parity".
    outcome
        A function of probabilities (n, c) and one-hot labels (n, c) that returns U, (n, ...): the
        axes after the first are the conditions v.
    event
        A function with the same arguments that returns V, (n, ...); by default every row is in the
        event.
    conditions
        A function of the number of classes that returns the names of the conditions; by default one
        condition per class that is compared.
    parts
        The metrics that this one combines, with their weights; empty by default.
    every_threshold
        Whether training compares the rates at every threshold of the scores, not at one.

    Examples
    --------
    >>> import fedgft
    >>> wrong = fedgft.Metric(  # the share of rejected rows among those with a positive label
    ...     "fnr",
    ...     "false-negative-rate parity",
    ...     outcome=lambda p, y: 1 - p[:, 1:],
    ...     event=lambda p, y: y[:, 1:],
    ... )
    >>> federation = fedgft.partition(fedgft.load("synthetic"), clients=3)
    >>> history = fedgft.simulate(federation, algorithm="fedgft", metric=wrong, rounds=2)
    >>> history.test[-1].gap(wrong, "hard").shape  # per run
    (1,)
    """

    name: str
    title: str
    outcome: Callable[[Probs, Labels], Any]
    event: Callable[[Probs, Labels], Any] = all_rows
    conditions: Callable[[int], tuple[str, ...]] = each_class
    parts: tuple[tuple["Metric", float], ...] = ()
    every_threshold: bool = False

    def condition_names(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return the conditions with the names of the classes, such as "class yes"."""

        def insert_name(found: re.Match[str]) -> str:
            index = int(found[2])
            return f"{found[1]} {classes[index]}" if index < len(classes) else found[0]

        texts = self.conditions(len(classes))
        return tuple(re.sub(r"\b(class|label) (\d+)\b", insert_name, text) for text in texts)

    def statistics(self, probs: Probs, labels: Labels, groups: Groups) -> PerSample:
        """Return numerators and denominators of each row (n, 2, v, g), by NumPy or torch.

        `probs` and `labels` (one-hot) are (n, c), `groups` (one-hot, or zeros) is (n, g).
        """
        xp = namespace(probs)
        if self.parts:
            each = [metric.statistics(probs, labels, groups) for metric, _ in self.parts]
            return xp.concatenate(each, 2)
        event = self.event(probs, labels)
        both = self.outcome(probs, labels) * event
        pair = xp.stack((both, xp.broadcast_to(event, both.shape)), 1)
        flat = pair.reshape(len(probs), 2, prod(both.shape[1:]))  # no -1: there may be no rows
        return xp.einsum("nsv,ng->nsvg", flat, groups)

    def rates(self, statistics: Statistics) -> Rates:
        """Return numerators over denominators (..., v, g); NaN where no row is in the event."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return statistics[..., 0, :, :] / statistics[..., 1, :, :]

    def readout(self, statistics: Statistics) -> Value:
        """Return the gap F (...), or NaN if a group has no rate because it is empty."""
        return self.gap(self.rates(statistics), statistics[..., 1, :, :])

    def gap(self, rates: Rates, mass: Any) -> Value:
        """Return F (...) from rates and their denominators, both (..., v, g)."""
        xp = namespace(rates)
        return xp.amax(xp.amax(rates, -1) - xp.amin(rates, -1), -1)

    def estimable(self, statistics: Statistics) -> Any:
        """Return whether every group has a row of every event, (...): without one, no gap."""
        return (statistics[..., 1, :, :] > 0).all((-2, -1))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns within whose strata groups are compared; see `MappedMetric`."""
        return ()

    @property
    def has_interval(self) -> bool:
        """Whether `gap_interval` holds for the gap: rates are shares of rows in each group."""
        return True

    @property
    def is_estimate(self) -> bool:
        """Whether rates are estimated from groups that were randomized; see `MappedMetric`."""
        return False

    def arrange(self, statistics: CellStatistics) -> Statistics:
        """Return sums by entry of the group axis as those of the groups; here, they are equal."""
        return statistics

    def to_cells(self, cotangent: Statistics, classes: int) -> CellStatistics:
        """Return the adjoint of `arrange`: the price of each entry of the group axis."""
        return cotangent

    def worst(self, statistics: Statistics) -> Pair:
        """Return the condition and the groups with the largest gap; all rates must be estimable."""
        rates = self.rates(statistics)
        condition = np.argmax(rates.max(-1) - rates.min(-1), axis=-1)
        row = np.take_along_axis(rates, condition[..., None, None], axis=-2)[..., 0, :]
        return Pair(condition, np.argmax(row, axis=-1), np.argmin(row, axis=-1))

    def gradient(self, statistics: Statistics) -> Statistics:
        """Return dF/dS: +1 on the highest rate, -1 on the lowest, through `through_rates`.

        The gradient is zero if all rates are equal, like sign(0) in the paper's C.
        """
        rates = self.rates(statistics)
        condition, high, low = self.worst(statistics)
        at = np.arange(rates.shape[-2])[:, None] == condition[..., None, None]
        group = np.arange(rates.shape[-1])
        slope = at * (1.0 * (group == high[..., None, None]) - (group == low[..., None, None]))
        return self.through_rates(slope + 0.0 * rates, statistics)  # NaN where there is no rate

    def through_rates(self, slope: Rates, statistics: Statistics) -> Statistics:
        """Return d<slope, rates>/dS for rate = numerator / denominator; zero where slope is."""
        with np.errstate(divide="ignore", invalid="ignore"):
            numerator = np.where(slope == 0, 0.0, slope / statistics[..., 1, :, :])
            denominator = np.where(slope == 0, 0.0, -numerator * self.rates(statistics))
        return np.stack((numerator, denominator), axis=-3)

    def weights(self, conditions: int) -> np.ndarray:
        """Return the weight of each condition in training (v,): 1, unless metrics were combined."""
        each = [np.full(stop - at, weight) for at, stop, _, weight in self.pieces(conditions)]
        return np.concatenate(each)

    def gain_shares(self, conditions: int) -> tuple[np.ndarray, int]:
        """Return how the controller divides its gain between the conditions: shares, number."""
        weights = self.weights(conditions)
        return weights / weights.sum(), len(weights)

    def pieces(self, conditions: int) -> list[tuple[int, int, "Metric", float]]:
        """Return which conditions belong to which part: (begin, end, metric, weight) for each."""
        if not self.parts:
            return [(0, conditions, self, 1.0)]
        classes = self.classes(conditions)
        out = []
        at = 0
        for metric, weight in self.parts:
            stop = at + len(metric.conditions(classes))
            out.append((at, stop, metric, weight))
            at = stop
        return out

    def classes(self, conditions: int) -> int:
        """Return the number of classes for which statistics have this many conditions."""
        found = (c for c in range(2, 1000) if len(self.conditions(c)) == conditions)
        return next(found, 2)

    def affine(self, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return how the statistics of one row follow from its scores p and label y: slope, offset.

        statistics[s, v] = sum_c slope[s, v, y, c] p[c] + offset[s, v, y], in the row's own
        group. Because of this, sums of scores suffice instead of the rows themselves, and a
        cotangent can be converted into a price table.
        """
        return _probe(self, classes)

    def proper(self, classes: int = 2) -> bool:
        """Return whether the event ignores the prediction (Definition 4.4)."""
        return bool(self.proper_conditions(classes).all())

    def proper_conditions(self, classes: int) -> np.ndarray:
        """Return the same for each condition, (v,)."""
        return ~self.affine(classes)[0][1].any((-2, -1))


@lru_cache
def _probe(metric: Metric, classes: int) -> tuple[np.ndarray, np.ndarray]:
    labels = np.eye(classes)
    group = np.ones((classes, 1))

    def at(probs: np.ndarray) -> np.ndarray:  # (label, 2, v)
        return metric.statistics(np.broadcast_to(probs, labels.shape), labels, group)[..., 0]

    offset = at(np.zeros(classes))
    if offset.shape[-1] != len(metric.conditions(classes)):
        raise FedgftError(
            f"metric {metric.name!r} compares {offset.shape[-1]} rates between groups for "
            f"{classes} classes, and its `conditions` name {len(metric.conditions(classes))}"
        )
    slope = np.stack([at(unit) - offset for unit in np.eye(classes)], axis=-1)
    probe = np.random.default_rng(0).dirichlet(np.ones(classes))
    if not np.allclose(at(probe), slope @ probe + offset, atol=1e-12):
        raise FedgftError(
            f"metric {metric.name!r} is not affine in the scores, so their sums cannot carry it: "
            "it works in fedgft.Penalty, not in the simulator"
        )
    return np.moveaxis(slope, 0, 2), np.moveaxis(offset, 0, -1)


def price(metric: Metric, cotangent: Statistics, classes: int) -> Price:
    """Return d<cotangent, statistics>/dp for a row of each label and group: (..., c, g + 1, c).

    With a `GroupAxis`, there is a price for each entry of the axis in place of each group.

    Rows without a recorded group have the price zero.
    """
    slope, _ = metric.affine(classes)
    table = np.einsum("svyc,...svg->...ygc", slope, metric.to_cells(cotangent, classes))
    return np.concatenate((table, np.zeros_like(table[..., :1, :])), axis=-2)


SPREADS = ("range", "deviation", "variance", "squares")
"How the rates of several groups are summarized in one number to minimize; see `spread_gradient`."


def spread_gradient(
    metric: Metric, statistics: Statistics, spread: str
) -> tuple[Value, Statistics]:
    """Return F and dF/dS for statistics (..., 2, v, g); `spread` is one of `SPREADS`.

    | spread      | F, for each condition                                 | with two groups     |
    |-------------|-------------------------------------------------------|---------------------|
    | `range`     | highest rate minus lowest: what is reported everywhere| the gap             |
    | `deviation` | largest distance of a group from the rate of all rows | 1/2 to 1 of the gap |
    | `variance`  | sqrt(2 sum over groups of (rate - their mean)^2)      | the gap             |
    | `squares`   | sqrt(sum over groups of (rate - rate of all rows)^2)  | 0.7 to 1 of the gap |

    `range` and `deviation` are the largest values over all conditions. Their gradients involve only
    one or two groups at a time, so with many groups they jump from pair to pair. `variance` adds up
    the squares, so its gradient involves every group, and with J = F^2 it is smooth everywhere; so
    does `squares`, the penalty of FairTrade.
    """
    if spread == "range":
        return metric.readout(statistics), metric.gradient(statistics)
    rates = metric.rates(statistics)
    if spread == "variance":
        apart = rates - rates.mean(-1, keepdims=True)
        value = np.sqrt(2 * (apart**2).sum((-2, -1)))
        slope = 2 * apart / np.where(value > 0, value, 1.0)[..., None, None]
        return value, metric.through_rates(slope, statistics)
    pooled = statistics.sum(-1, keepdims=True)
    apart = rates - metric.rates(pooled)
    if spread == "squares":
        value = np.sqrt((apart**2).sum((-2, -1)))
        slope = apart / np.where(value > 0, value, 1.0)[..., None, None]
        of_all = metric.through_rates(-slope.sum(-1, keepdims=True), pooled)
        return value, metric.through_rates(slope, statistics) + of_all
    flat = np.abs(apart).reshape(*apart.shape[:-2], -1)
    widest = np.arange(flat.shape[-1]) == np.argmax(flat, axis=-1)[..., None]
    slope = widest.reshape(apart.shape) * np.sign(apart)
    of_all = metric.through_rates(-slope.sum(-1, keepdims=True), pooled)
    return flat.max(-1), metric.through_rates(slope, statistics) + of_all
