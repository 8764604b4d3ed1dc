"""Distances between the score distributions of groups, from counts by bin.

With F_a(t) the share of group a with a score below t, there are two distances of groups a and b:

- the largest threshold gap, max_t |F_a(t) - F_b(t)| (Kolmogorov-Smirnov): no threshold that is the
  same for everybody gives a larger gap in the share of people accepted;
- the Wasserstein distance, the integral of |F_a - F_b|: the mean gap over all thresholds, and the
  mean amount by which scores must move so that both groups have the same distribution.

The shares are exact at the edges of the bins. Between two edges a share lies between those at the
edges, which gives the least and the largest possible value of each distance. For the Wasserstein
distance, the exact mean scores narrow this range: the integral of F_a - F_b is mean_b - mean_a.

Intervals are over rows. The largest threshold gap has the band of Dvoretzky, Kiefer, Wolfowitz and
Massart for two samples, +- sqrt(log(2 m / 0.05) / 2) sqrt(1/n_a + 1/n_b) for all thresholds and all
m pairs of groups at once. It is exact for many rows and equal distributions, else conservative.
The interval of the Wasserstein distance is that of the delta method where one distribution is
clearly above the other; where they may be equal, |F_a - F_b| is at least 0 by chance alone, and the
lower limit is reduced by what chance adds (Fang & Santos 2019).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypedDict

import numpy as np

from fedgft.auditing.rates import View
from fedgft.auditing.score_samples import ScoreSamples, compares_scores, sample_scores, scored_class

MAX_COMPARED = 12  # groups of a view whose distributions are compared with each other
CLEAR = 3.0  # standard errors by which two distributions differ clearly at a threshold
SHARE_OF_FOLDED = 1 - 2 / math.pi  # variance of |x| for a standard normal x
Number = float | None


class Distance(TypedDict):
    """A distance between two distributions.

    The bins of the histograms allow the values from `least` to `most`. `low` and `high` are the
    limits of the 95% interval, which includes this range.
    """

    value: Number
    least: Number
    most: Number
    low: Number
    high: Number


class PairDistances(TypedDict):
    """The distances between the scores of two groups.

    The intervals hold for all pairs at once. Group `first` has fewer people than `second` below the
    score `threshold`, where they are farthest apart.
    """

    first: str
    second: str
    threshold: Number
    threshold_gap: Distance
    wasserstein: Distance


class LargestDistance(Distance):
    """The largest distance between two groups, and these groups."""

    pair: list[str] | None


class ScoreDistances(TypedDict):
    """The distances between all pairs of groups, among the same people (all, or those of a label).

    `compared` are the groups with the most rows, up to 12. `mean` holds the mean score of each.
    The groups `without_rows` have no distance: the largest distance is that among the others. If
    a group has no rows, or too few for an interval, the largest distance has no upper limit.
    """

    compared: list[str]
    without_rows: list[str]
    n: dict[str, float]
    mean: dict[str, Number]
    threshold_gap: LargestDistance
    wasserstein: LargestDistance
    pairs: list[PairDistances]


class ScoreDistributions(TypedDict):
    """Distances between groups of the scores of one class: of all people, and of its members."""

    everyone: ScoreDistances
    positives: ScoreDistances


def summarize_distributions(view: View) -> dict[str, ScoreDistributions] | None:
    """Return the distances between the score distributions of the groups, by class.

    With two classes there is one score, that of the positive class. With more, every class has a
    score. The result is None if a site left out scores, if groups are uncertain, or if there is
    only one group.
    """
    if not compares_scores(view) or len(view.groups) < 2:
        return None
    found: dict[str, ScoreDistributions] = {}
    for s, name in enumerate(view.scored_classes):
        label = scored_class(view, s)
        found[name] = {
            "everyone": _summarize_distances(sample_scores(view, s)),
            "positives": _summarize_distances(sample_scores(view, s, [label])),
        }
    return found


def _summarize_distances(samples: ScoreSamples) -> ScoreDistances:
    """Return the distances between all pairs of the largest groups."""
    compared = samples.largest(MAX_COMPARED)
    names = [samples.groups[g] for g in compared]
    every = (samples.groups, samples.estimable)
    i, j = np.triu_indices(len(compared), 1)
    apart = PairedSamples(samples, compared[i], compared[j])
    gaps = threshold_gaps(apart)
    moves = wasserstein(apart)
    complete = bool(samples.enough.all())
    return {
        "compared": names,
        "without_rows": [name for name, known in zip(*every, strict=True) if not known],
        "n": {samples.groups[g]: float(samples.rows[g]) for g in compared},
        "mean": {
            samples.groups[g]: float(samples.mean[g]) if samples.estimable[g] else None
            for g in compared
        },
        "threshold_gap": _find_largest(gaps, apart, complete=complete),
        "wasserstein": _find_largest(moves, apart, complete=complete),
        "pairs": list(_list_pairs(gaps, moves, apart)),
    }


@dataclass(frozen=True, eq=False)
class PairedSamples:
    """Pairs of groups: the groups at the positions `first` (pair,) and `second` of the samples."""

    samples: ScoreSamples
    first: np.ndarray
    second: np.ndarray

    @property
    def enough(self) -> np.ndarray:
        """Whether both groups have enough rows for an interval, (pair,)."""
        return self.samples.enough[self.first] & self.samples.enough[self.second]

    @property
    def difference(self) -> np.ndarray:
        """F_first - F_second at every edge, as estimated, (pair, bin + 1)."""
        below = self.samples.below[0]
        return below[self.first] - below[self.second]

    def bounds(self, *, within: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the largest possible F_first - F_second.

        They are given at the edges, (pair, bin + 1), or anywhere `within` the bins, (pair, bin).
        """
        _, most, least = self.samples.below  # rows in the first possible bin: more are below
        if within:
            return (
                least[self.first][:, :-1] - most[self.second][:, 1:],
                most[self.first][:, 1:] - least[self.second][:, :-1],
            )
        return least[self.first] - most[self.second], most[self.first] - least[self.second]

    def variance(self, values: np.ndarray) -> np.ndarray:
        """Return the variance of the difference of the means of a value of the bin, (pair,)."""
        total = np.zeros(len(self.first))
        for at in (self.first, self.second):
            total += self.samples.sampling_variance(at, values)
            total += self.samples.noise_variance(at, values)
        return total

    def edge_variance(self) -> np.ndarray:
        """Return the variance of F_first - F_second at the edges between bins, (pair, bin - 1)."""
        total = 0.0
        for at in (self.first, self.second):
            below = np.clip(self.samples.below[0][at][:, 1:-1], 0.0, 1.0)
            with np.errstate(divide="ignore", invalid="ignore"):
                total = total + below * (1 - below) / self.samples.effective[at][:, None]
        return total + self.edge_noise()[:, 1:-1]

    def edge_noise(self) -> np.ndarray:
        """Return the part of it that is due to noise on the counts, at all edges."""
        total = np.zeros((len(self.first), self.samples.noise.shape[-1] + 1))
        if not self.samples.is_noisy:
            return total
        for at in (self.first, self.second):
            noise = np.pad(np.cumsum(self.samples.noise[at], -1), ((0, 0), (1, 0)))
            below = np.clip(self.samples.below[0][at], 0.0, 1.0)
            rest = noise[:, -1:] - noise
            with np.errstate(divide="ignore", invalid="ignore"):
                rows = self.samples.rows[at][:, None]
                total = total + ((1 - below) ** 2 * noise + below**2 * rest) / rows**2
        return total


@dataclass(frozen=True, eq=False)
class Distances:
    """A distance of many pairs of groups, as arrays (pair,): see `Distance`."""

    value: np.ndarray
    least: np.ndarray
    most: np.ndarray
    low: np.ndarray
    high: np.ndarray


def threshold_gaps(apart: PairedSamples) -> Distances:
    """Return the largest difference at any threshold, with simultaneous 95% bands."""
    difference = apart.difference
    edge_low, edge_high = apart.bounds(within=False)
    least = np.maximum(np.maximum(edge_low, -edge_high).max(-1), 0.0)
    within_low, within_high = apart.bounds(within=True)
    most = np.maximum(within_high, -within_low).max(-1)
    half = _band(apart)
    low = np.maximum(edge_low, -edge_high) - half
    wider = np.maximum(half[:, 1:], half[:, :-1])
    high = np.maximum(within_high, -within_low) + wider
    return _limit(
        apart, np.abs(difference).max(-1), least, np.minimum(most, 1.0), low.max(-1), high.max(-1)
    )


def _band(apart: PairedSamples) -> np.ndarray:
    """Return half the width of the band around F_first - F_second at the edges, (pair, bin + 1).

    With noise on the counts, half of the error probability is for noise, over all edges.
    """
    pairs = len(apart.first)
    level = 0.05 / max(pairs, 1)
    noise = apart.edge_noise()
    margin = np.zeros_like(noise)
    if noise.any():
        level /= 2
        margin = NormalDist().inv_cdf(1 - level / 2 / noise.shape[-1]) * np.sqrt(noise)
    with np.errstate(divide="ignore"):
        rows = sum(1 / apart.samples.effective[at] for at in (apart.first, apart.second))
    return margin + (np.sqrt(math.log(2 / level) / 2) * np.sqrt(rows))[:, None]


def wasserstein(apart: PairedSamples) -> Distances:
    """Return the Wasserstein distances, with simultaneous 95% intervals.

    The value is that of scores at the middles of the bins, if the means of the scores allow it.
    """
    difference = apart.difference[:, 1:-1]
    width = 1 / apart.samples.counts.shape[-1]
    least, most = _wasserstein_range(apart, width)
    value = np.clip(width * np.abs(difference).sum(-1), least, most)
    error = np.sqrt(apart.edge_variance())
    clear = np.abs(difference) > CLEAR * error
    signed = apart.variance(_integrate(np.where(clear, np.sign(difference), 0.0), width))
    unclear = apart.variance(_integrate(np.where(clear, 0.0, 1.0), width))
    both = [
        apart.variance(_integrate(np.where(clear, np.sign(difference), sign), width))
        for sign in (1.0, -1.0)
    ]
    z = NormalDist().inv_cdf(1 - 0.025 / max(len(apart.first), 1))
    chance = width * math.sqrt(2 / math.pi) * np.where(clear, 0.0, error).sum(-1)
    low = least - chance - z * np.sqrt(signed + SHARE_OF_FOLDED * unclear)
    return _limit(apart, value, least, most, low, most + z * np.sqrt(np.maximum(*both)))


def _integrate(signs: np.ndarray, width: float) -> np.ndarray:
    """Return the values of bins whose mean over rows is the integral of signs times F.

    `signs` (pair, bin - 1) are those at the edges between bins: a row counts at every edge above
    its bin.
    """
    above = np.cumsum(signs[:, ::-1], -1)[:, ::-1]
    return width * np.concatenate((above, np.zeros_like(above[:, :1])), -1)


def _wasserstein_range(apart: PairedSamples, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest Wasserstein distance that the counts and means allow.

    With d = F_first - F_second and m = mean_second - mean_first, the integral of d, the distance is
    m plus twice the integral of the part of d below 0, and -m plus twice that of the part above 0.
    """
    low, high = apart.bounds(within=True)
    sides = [np.maximum(part, 0.0) for part in (high, low, -low, -high)]
    up_most, up_least, down_most, down_least = (width * side.sum(-1) for side in sides)
    samples = apart.samples
    mean = samples.mean[apart.second] - samples.mean[apart.first]
    error = samples.mean_error[apart.first] + samples.mean_error[apart.second]
    known = np.isfinite(error)
    mean = np.where(known, mean, 0.0)
    error = np.where(known, error, 2.0)
    total = width * np.maximum(sides[0], sides[2]).sum(-1)
    most = np.minimum(total, error + np.minimum(mean + 2 * down_most, 2 * up_most - mean))
    least = np.maximum(up_least + down_least, np.abs(mean) - error)
    least = np.maximum(least, np.maximum(mean + 2 * down_least, 2 * up_least - mean) - error)
    most = np.minimum(most, 1.0)
    return np.minimum(least, most), most


def _limit(
    apart: PairedSamples,
    value: np.ndarray,
    least: np.ndarray,
    most: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> Distances:
    """Clip the limits to [0, 1]; NaN without enough rows for an interval."""
    ends = (np.where(apart.enough, np.clip(a, 0.0, 1.0), np.nan) for a in (low, high))
    least = np.clip(least, 0.0, 1.0)
    most = np.clip(most, least, 1.0)  # up to rounding, and where noise makes shares fall
    return Distances(np.clip(value, least, most), least, most, *ends)


def _list_pairs(gaps: Distances, moves: Distances, apart: PairedSamples) -> Iterator[PairDistances]:
    """Yield the distances of every pair."""
    difference = apart.difference
    bins = difference.shape[-1] - 1
    names = apart.samples.groups
    for pair, (i, j) in enumerate(zip(apart.first, apart.second, strict=True)):
        ends = [names[i], names[j]]
        threshold = None
        if not np.isnan(difference[pair]).any():
            edge = int(np.abs(difference[pair]).argmax())
            threshold = edge / bins
            ends = ends[::-1] if difference[pair, edge] > 0 else ends
        yield {
            "first": ends[0],
            "second": ends[1],
            "threshold": threshold,
            "threshold_gap": _read_distance(gaps, pair),
            "wasserstein": _read_distance(moves, pair),
        }


def _read_distance(found: Distances, pair: int) -> Distance:
    """Return the distance of one pair in plain values."""
    numbers: dict[str, Any] = {
        key: None if np.isnan(values[pair]) else float(values[pair])
        for key, values in vars(found).items()
    }
    return Distance(**numbers)


def _find_largest(found: Distances, apart: PairedSamples, *, complete: bool) -> LargestDistance:
    """Return the largest distance between two groups.

    The range and the interval are those of the largest distance, whichever pair has it. There is no
    upper limit unless the intervals are `complete`.
    """
    if np.isnan(found.value).all():
        return LargestDistance(value=None, least=None, most=None, low=None, high=None, pair=None)
    at = int(np.nanargmax(found.value))
    names = apart.samples.groups
    known = not np.isnan(found.low).all()
    return {
        "value": float(found.value[at]),
        "least": float(np.nanmax(found.least)),
        "most": float(np.nanmax(found.most)),
        "low": float(np.nanmax(found.low)) if known else None,
        "high": float(np.nanmax(found.high)) if complete else None,
        "pair": [names[apart.first[at]], names[apart.second[at]]],
    }
