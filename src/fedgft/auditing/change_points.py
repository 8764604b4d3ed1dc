r"""Differences between groups over time: a band that may be looked at forever, and change points.

Every period t has the difference d_t of two groups' rates, with variance s_t^2. Periods are
independent (the same people are not measured twice), and d_t is approximately normal. A
*regime* is a run of periods without a change. With the information A = sum of 1/s_t^2 and the mean
m = sum of d_t/s_t^2 over A, the 95% band of the average difference since the regime began is

    m -+ sqrt(2 (A + L) log(sqrt((A + L) / L) / 0.05)) / A,    L = 1 / SCALE^2.

This is the confidence sequence of the normal mixture (Robbins 1970; Waudby-Smith, Arbour, Sinha,
Kennedy & Ramdas 2024, Annals of Statistics, who show that it holds asymptotically without
normality): with 95% probability the band contains the average at *every* look, not only at one.

For a change before period k, the mean m_b of the periods before k is compared with the mean m_a
from k on. The difference D = m_a - m_b has variance v = 1/A_b + 1/A_a, and

    E_k(c) = sqrt(v / (v + SCALE^2)) exp((D - c)^2 / 2 (1/v - 1/(v + SCALE^2)))

is the likelihood ratio of "the differences changed at k, by c plus a normal amount" against "they
changed by c", after the common mean is divided out. It is a martingale over looks if c is the true
change. With prior weights w_k that add up to 1, the sum of w_k E_k(c_k) is one, too. So by Ville's
inequality the probability that any w_k E_k(c_k) ever reaches 1/alpha is at most alpha. The values
of c below that bound are the interval of the change at k. A change is found when the interval of
some k excludes 0: in at most 5% of all histories in which nothing changes, however long.
"""

from dataclasses import dataclass

import numpy as np

from fedgft.auditing.rates import Rates

SCALE = 0.05  # size of gaps and changes for which band and evidence are tuned: 5 points
SOON = 12  # half of the prior weight is on changes in the first SOON periods of a regime
LEVEL = 0.05  # error probability of the band, and of false alarms in a history without changes
PLAUSIBLE = 0.95  # share of the evidence that the range of dates of a change holds
MIN_VARIANCE = 1e-12


@dataclass(frozen=True, eq=False)
class RateSeries:
    """The rates of one metric in every period.

    Parameters
    ----------
    rate, rows
        (period, condition, group): the rates and the numbers of rows in their denominators, which
        are effective numbers if rows have weights; NaN and 0 where the group has too few rows.
    noise
        (period, condition, group): the variance of noise that was added for privacy.
    slack
        (period, condition, group): how far a rate may be off because counts are withheld.
    correlation
        (period, condition, pair): the correlations of the rates of two groups, which are not 0 if
        groups were randomized. None: they are all 0.
    """

    rate: np.ndarray
    rows: np.ndarray
    noise: np.ndarray
    slack: np.ndarray
    correlation: np.ndarray | None = None

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions of the first and second group of every pair."""
        return np.triu_indices(self.rate.shape[-1], 1)

    def differences(self, start: int, stop: int) -> "Differences":
        """Return the differences of all pairs of groups in the periods `start` to `stop` - 1.

        The variance of a rate is r (1 - r) / n with the rate r over all of these periods, so that a
        period with few events does not seem more precise than another one of its size.
        """
        within = slice(start, stop)
        rows = self.rows[within]
        known = rows > 0
        rate = np.where(known, self.rate[within], 0.0)
        total = rows.sum(0)
        pooled = ((rate * rows).sum(0) + 0.5) / (total + 1)
        safe = np.where(known, rows, 1.0)
        sampling = np.maximum(pooled * (1 - pooled) / safe, MIN_VARIANCE)
        i, j = self.pairs
        both = known[..., i] & known[..., j]
        variance = sampling[..., i] + sampling[..., j]
        if self.correlation is not None:
            common = np.sqrt(sampling[..., i] * sampling[..., j])
            variance = variance - 2 * self.correlation[within] * common
        noise = self.noise[within]
        variance = np.maximum(variance, MIN_VARIANCE) + noise[..., i] + noise[..., j]
        shape = (stop - start, -1)
        return Differences(
            (rate[..., i] - rate[..., j]).reshape(shape),
            np.where(both, 1 / variance, 0.0).reshape(shape),
            np.where(both, self.slack[within][..., i] + self.slack[within][..., j], 0.0).reshape(
                shape
            ),
        )


def stack_rates(periods: list[Rates | None], positions: list[list[int]], groups: int) -> RateSeries:
    """Return the rates of all periods as arrays; groups that a period lacks have no rows.

    Parameters
    ----------
    periods
        The rates (condition, group) of each period.
    positions
        For each period, the positions of its groups among all groups.
    groups
        The number of all groups.
    """
    conditions = max(len(rates.rate) for rates in periods if rates is not None)
    shape = (len(periods), conditions, groups)
    rate, rows, noise, slack = (np.zeros(shape) for _ in range(4))
    rate[:] = np.nan
    for t, (rates, places) in enumerate(zip(periods, positions, strict=True)):
        if rates is None:
            continue
        valid = rates.valid & ~np.isnan(rates.rate)
        rate[t][:, places] = np.where(valid, rates.rate, np.nan)
        rows[t][:, places] = np.where(valid, rates.n_min, 0.0)
        noise[t][:, places] = np.where(valid, np.nan_to_num(rates.variance), 0.0)
        slack[t][:, places] = np.where(valid, (rates.rate_max - rates.rate_min) / 2, 0.0)
    return RateSeries(rate, rows, noise, slack, _stack_correlations(periods, positions, shape))


def _stack_correlations(
    periods: list[Rates | None], positions: list[list[int]], shape: tuple[int, int, int]
) -> np.ndarray | None:
    """Return the correlations (period, condition, pair) of the rates; None if they are all 0."""
    if all(rates is None or rates.covariance is None for rates in periods):
        return None
    groups = shape[-1]
    out = np.zeros((*shape, groups))
    for t, (rates, places) in enumerate(zip(periods, positions, strict=True)):
        if rates is not None and rates.covariance is not None:
            i, j = np.triu_indices(len(places), 1)
            at = np.array(places)
            found = rates.correlation(i, j)
            out[t][:, at[i], at[j]] = found
            out[t][:, at[j], at[i]] = found
    return out[..., *np.triu_indices(groups, 1)]


@dataclass(frozen=True, eq=False)
class Differences:
    """The differences of pairs of groups: arrays (period, pair), pairs of all conditions in turn.

    Parameters
    ----------
    value
        The differences of the rates.
    precision
        1 over their variance; 0 where a pair cannot be compared.
    slack
        How far they may be off because counts are withheld.
    """

    value: np.ndarray
    precision: np.ndarray
    slack: np.ndarray

    def weights(self, start: int, stop: int) -> np.ndarray:
        """Return the weights of the periods in their mean, (period, pair); they add up to 1."""
        part = self.precision[start:stop]
        total = part.sum(0)
        return part / np.where(total > 0, total, 1.0)

    def mean(self, start: int, stop: int) -> np.ndarray:
        """Return the mean differences (pair,) of these periods; NaN where there is none."""
        found = (self.weights(start, stop) * self.value[start:stop]).sum(0)
        return np.where(self.precision[start:stop].sum(0) > 0, found, np.nan)

    @np.errstate(divide="ignore", invalid="ignore")
    def band(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the mean of all periods and its limits (pair,), which hold at every look.

        They hold for all pairs at once. NaN where a pair cannot be compared.
        """
        pairs = self.value.shape[1]
        information = self.precision.sum(0)
        prior = 1 / SCALE**2
        reach = 2 * np.log(np.sqrt((information + prior) / prior) * pairs / LEVEL)
        half = np.sqrt((information + prior) * reach) / information
        half = half + (self.weights(0, len(self.value)) * self.slack).sum(0)
        mean = self.mean(0, len(self.value))
        return mean, mean - half, mean + half


@dataclass(frozen=True, eq=False)
class Shift:
    """The change of one difference before period `at`, with its anytime-valid interval.

    Parameters
    ----------
    at
        The position of the first period after the change, among the given periods.
    earliest, latest
        The range of positions that hold 95% of the evidence.
    pair
        The position of the pair of groups (and condition) that moved.
    before, after
        The mean differences before and after.
    low, high
        The limits of `after - before`.
    """

    at: int
    earliest: int
    latest: int
    pair: int
    before: float
    after: float
    low: float
    high: float

    @property
    def is_found(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


def prior_weights(last: int) -> np.ndarray:
    """Return the prior weights of changes before the periods 1 to `last` (of 0, 1, ...).

    They are SOON / ((k + SOON - 1)(k + SOON)), which add up to 1 over all k >= 1.

    >>> round(float(prior_weights(100_000).sum()), 3), round(float(prior_weights(12).sum()), 3)
    (1.0, 0.5)
    """
    k = np.arange(1, last + 1) + SOON
    return SOON / ((k - 1.0) * k)


@np.errstate(divide="ignore", invalid="ignore")
def find_shift(
    found: Differences, *, level: float, at: int | None = None, is_known: bool = False
) -> Shift | None:
    """Return the change for which there is most evidence; None if nothing can be compared.

    Parameters
    ----------
    found
        The differences of a regime, or of a regime and the next one.
    level
        The probability that the interval of any change at any look misses it.
    at
        The period before which the change is. None: that with most evidence.
    is_known
        Whether `at` is known beforehand, as for a new model, and was not searched for.
    """
    periods, pairs = found.value.shape
    if periods < 2 or not pairs:
        return None
    places = np.arange(1, periods)
    weights = np.ones(periods - 1) if is_known else prior_weights(periods - 1)
    total = found.precision.cumsum(0)
    moment = (found.precision * found.value).cumsum(0)
    drift = (found.precision * found.slack).cumsum(0)
    before, after = total[:-1], total[-1] - total[:-1]  # (place, pair)
    mean_before, mean_after = moment[:-1] / before, (moment[-1] - moment[:-1]) / after
    slack = drift[:-1] / before + (drift[-1] - drift[:-1]) / after
    variance = 1 / before + 1 / after
    spread = variance + SCALE**2
    bound = np.log(pairs / (level * weights))[:, None] + np.log(spread / variance) / 2
    half = np.sqrt(2 * variance * spread / SCALE**2 * bound) + slack
    change = mean_after - mean_before
    clear = np.maximum(np.abs(change) - slack, 0.0)
    evidence = clear**2 / 2 * (1 / variance - 1 / spread) - bound  # above 0: the change is found
    evidence = np.where((before > 0) & (after > 1e-9 * total[-1]), evidence, -np.inf)
    eligible = evidence if at is None else np.where((places == at)[:, None], evidence, -np.inf)
    if np.isneginf(eligible).all():
        return None
    row, pair = np.unravel_index(eligible.argmax(), eligible.shape)
    first, last = (row, row) if is_known else _plausible_range(evidence[:, pair])
    value, margin = float(change[row, pair]), float(half[row, pair])
    return Shift(
        int(places[row]),
        int(places[first]),
        int(places[last]),
        int(pair),
        float(mean_before[row, pair]),
        float(mean_after[row, pair]),
        value - margin,
        value + margin,
    )


def _plausible_range(evidence: np.ndarray) -> tuple[int, int]:
    """Return the first and last of the places with the most evidence that hold 95% of it."""
    share = np.exp(evidence - evidence.max())
    share /= share.sum()
    order = np.argsort(-share)
    kept = order[: int(np.searchsorted(share[order].cumsum(), PLAUSIBLE)) + 1]
    return int(kept.min()), int(kept.max())


@dataclass(frozen=True, eq=False)
class Look:
    """What was known after one period: the band, and the regime that it belongs to.

    Parameters
    ----------
    start
        The position of the first period of the regime.
    mean, low, high
        (pair,): the average difference since `start`, with limits.
    """

    start: int
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class ChangePoint:
    """A change that was found: the first period after it, and the period in which it was found."""

    at: int
    found_at: int


def watch(
    series: RateSeries, known: list[int], *, level: float = LEVEL
) -> tuple[list[Look], list[ChangePoint]]:
    """Look after every period, with what was known by then.

    After a change is found, the regime begins at its most likely period, which later periods may
    move until the next change is found.

    Parameters
    ----------
    series
        The rates of all periods.
    known
        The positions at which a regime begins for a known reason, such as a new model.
    level
        The probability that a change is ever found in a regime without one.
    """
    looks: list[Look] = []
    found: list[ChangePoint] = []
    begin = start = 0  # the last period with a known reason, and the first of the regime
    for t in range(len(series.rate)):
        if t in known:
            begin = start = t
        inside = [change for change in found if change.at > begin]
        if inside:  # move the last change to where it now is most likely
            previous = inside[-2].at if len(inside) > 1 else begin
            shift = find_shift(series.differences(previous, t + 1), level=level)
            last = inside[-1].found_at
            if shift is not None and previous + shift.at <= last:
                found[-1] = ChangePoint(previous + shift.at, last)
                start = found[-1].at
        shift = find_shift(series.differences(start, t + 1), level=level)
        if shift is not None and shift.is_found:
            start += shift.at
            found.append(ChangePoint(start, t))
        looks.append(Look(start, *series.differences(start, t + 1).band()))
    return looks, found
