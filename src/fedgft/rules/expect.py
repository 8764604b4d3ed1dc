"""What to expect of a decision rule: accuracy and gaps on new people, with 95% intervals.

A rule gives each row a probability q of a positive decision, so a rate is A / B with sums of
q-weighted counts. The variance of A - r B over rows gives an effective number of rows n, for which
r (1 - r) / n is that variance, and Wilson's limits use this n. For fixed thresholds n is the number
of rows; for randomized rules it is larger, because q varies less than a coin.

The rule was chosen on the same rows. For a gap this does not matter to first order: its distance
from the estimate at the chosen threshold has the distribution that it has at the best threshold,
which does not depend on the rows. For the accuracy it does, because the rule is the best of many on
these rows. Cross-validation measures by how much: rows of the same cell and bin are exchangeable,
so counts can be dealt into folds as rows can. The interval of the accuracy is around the accuracy
on the folds that a rule was not fitted on, which is below that on the rows of the rule.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedgft.auditing.rates import MIN_SIGNAL, Rates, find_largest_gap
from fedgft.errors import FedgftError
from fedgft.metrics.intervals import FEW, Z95, wilson
from fedgft.metrics.metric import Metric
from fedgft.rules.counts import RuleCounts, effective_rows
from fedgft.rules.decision_rule import Acceptance
from fedgft.rules.rule_problem import FittedRule, RuleProblem

FOLDS = 10  # of the cross-validation
FEW_FOLDS = 4  # if there are many rules to fit
MANY_CELLS = 500


class Shrinkage(NamedTuple):
    """By how much a rule is more accurate on its own rows than on new people, +- `error`."""

    value: float = 0.0
    error: float = 0.0


NO_SHRINKAGE = Shrinkage()


@dataclass(frozen=True, eq=False)
class RuleOutcome:
    """The expected decisions of a rule on the rows that were counted.

    Parameters
    ----------
    counts
        The counts of scores.
    chance
        (site, group, bin): the probability of a positive decision.
    """

    counts: RuleCounts
    chance: np.ndarray

    @classmethod
    def of(
        cls,
        counts: RuleCounts,
        acceptances: Mapping[tuple[int | None, int], Acceptance],
        unrecorded: Acceptance,
    ) -> "RuleOutcome":
        """Apply the step functions by (position of the site or None, position of the group)."""
        edges = counts.thresholds[:-1]
        chance = np.empty((len(counts.sites), len(counts.groups), len(edges)))
        for g, group in enumerate(counts.groups):
            for s in range(len(counts.sites)):
                found = acceptances.get((s, g), acceptances.get((None, g), unrecorded))
                chance[s, g] = (unrecorded if None in group else found)(edges)
        lacking = np.array([None in group for group in counts.groups])
        if lacking.any():  # a threshold between edges: the accepted rows go to the last bin
            table = counts.counts.copy()
            accepted = counts.accepted()[:, lacking]
            table[:, lacking] = 0.0
            table[..., 0][:, lacking] = counts.counts[:, lacking].sum(-1) - accepted
            table[..., -1][:, lacking] = accepted
            chance[:, lacking] = np.arange(len(edges)) == len(edges) - 1
            shifts = None if counts.shifts is None else counts.shifts * ~lacking[:, None, None]
            counts = replace(counts, counts=table, shifts=shifts)
        return cls(counts, chance)

    @classmethod
    def today(cls, counts: RuleCounts) -> "RuleOutcome":
        """Return the decisions that the sites counted, as they are without a rule."""
        rejected = counts.counts.sum(-1) - counts.decided
        table = np.stack((rejected, counts.decided), -1)
        decisions = replace(counts, reads="decision", counts=table, noise=None, shifts=None)
        return cls(decisions, np.broadcast_to([0.0, 1.0], (*table.shape[:2], 2)))

    def rates(
        self, metric: Metric, attributes: Sequence[int], *, site: int | None = None
    ) -> tuple[list[str], Rates]:
        """Return the names of the groups by some attributes, and their rates.

        Parameters
        ----------
        metric
            The metric.
        attributes
            The positions of the attributes.
        site
            The position of a site. None: over all sites.
        """
        parts = [tuple(group[i] for i in attributes) for group in self.counts.groups]
        names = list(dict.fromkeys(part for part in parts if None not in part))
        member = np.array([[part == name for part in parts] for name in names], float)
        sites = slice(None) if site is None else slice(site, site + 1)
        found = _estimate(
            metric,
            member,
            self.counts.counts[sites],
            self.chance[sites],
            None if self.counts.noise is None else self.counts.noise[sites],
            None if self.counts.shifts is None else self.counts.shifts[:, sites],
        )
        return [" & ".join(map(str, name)) for name in names], found

    def value(self, benefit: float, cost: float) -> float:
        """Return benefit times true positives minus cost times false positives, per person."""
        gained = (self.counts.counts * self.chance[:, :, None]).sum((0, 1, 3))
        return float(benefit * gained[1] - cost * gained[0]) / self.counts.rows

    def selected(self) -> float:
        """Return the share of positive decisions."""
        return float((self.counts.counts.sum(2) * self.chance).sum() / self.counts.rows)

    def accuracy(
        self, shrinkage: Shrinkage = NO_SHRINKAGE
    ) -> tuple[float, float | None, float | None]:
        """Return the accuracy on these rows, and limits of the accuracy on new people.

        The limits are None with too few rows.

        Parameters
        ----------
        shrinkage
            What `estimate_shrinkage` returned, for a rule that was fitted on these rows.
        """
        counts = self.counts.counts
        right = np.stack((1 - self.chance, self.chance), 2)  # (site, group, label, bin)
        rows = counts.sum()
        mean = float((counts * right).sum() / rows)
        spread = (counts * (right - mean) ** 2).sum() / rows**2
        if self.counts.noise is not None:
            spread += (self.counts.noise * (right - mean) ** 2).sum() / rows**2
        if rows < FEW:
            return mean, None, None
        rate = np.array(mean)
        new = np.clip(rate - shrinkage.value, 0.0, 1.0)
        low, high = wilson(new, effective_rows(rate, np.array(spread)))
        low = new - np.hypot(new - low, Z95 * shrinkage.error)
        high = new + np.hypot(high - new, Z95 * shrinkage.error)
        if self.counts.shifts is not None:  # rows of uncertain bin
            moved = (self.counts.shifts * right).sum((1, 2, 3, 4)) / rows
            low, high = low + min(0.0, moved.min()), high + max(0.0, moved.max())
        return mean, float(np.clip(low, 0, 1)), float(np.clip(high, 0, 1))


@np.errstate(divide="ignore", invalid="ignore")
def _estimate(
    metric: Metric,
    member: np.ndarray,
    counts: np.ndarray,
    chance: np.ndarray,
    noise: np.ndarray | None,
    shifts: np.ndarray | None,
) -> Rates:
    """Estimate rates by condition and group.

    Parameters
    ----------
    metric
        The metric.
    member
        (group of the result, group of the counts): which groups to add up.
    counts, noise
        (site, group, label, bin).
    chance
        (site, group, bin): the probability of a positive decision.
    shifts
        (2, site, group, label, bin): changes of the counts if rows of uncertain bin are in the
        first or in the last bin of their range; None if there are none.
    """
    slope, offset = metric.affine(2)
    unit = slope + offset[..., None]  # (2, v, y, decision)
    shape = (2, *counts.shape, unit.shape[1])
    each = np.empty(shape)  # what a row adds to numerator and denominator: (2, s, g, y, bin, v)
    for y in range(2):
        accepted, rejected = unit[:, :, y, 1], unit[:, :, y, 0]
        each[:, :, :, y] = (
            chance[None, ..., None] * accepted[:, None, None, None]
            + (1 - chance)[None, ..., None] * rejected[:, None, None, None]
        )
    sums = np.einsum("kg,ngybv,ngyb->vk", member, each[0], counts)
    below = np.einsum("kg,ngybv,ngyb->vk", member, each[1], counts)
    rate = np.where(below > 0, np.clip(sums / below, 0.0, 1.0), np.nan)
    spread = np.zeros_like(rate)
    noise_variance = np.zeros_like(rate)
    noise_below = np.zeros_like(rate)
    for k in range(len(member)):
        mine = member[k] > 0
        error = each[0][:, mine] - rate[:, k] * each[1][:, mine]
        spread[:, k] = np.einsum("ngybv,ngyb->v", error**2, np.maximum(counts[:, mine], 0.0))
        if noise is not None:
            noise_variance[:, k] = np.einsum("ngybv,ngyb->v", error**2, noise[:, mine])
            weight = each[1][:, mine] ** 2
            noise_below[:, k] = np.einsum("ngybv,ngyb->v", weight, noise[:, mine])
    variance = spread / below**2
    # a rate of 0 or 1 has no spread here, but is as uncertain as Wilson's limits say
    is_sure = (rate <= 0) | (rate >= 1)
    rows = np.where(is_sure, below, effective_rows(rate, variance))
    rows = np.where(_is_constant(each, member, rate), np.inf, np.maximum(rows, below))
    rate_min = rate_max = rate
    if shifts is not None:
        moved = np.einsum("kg,sgybv,esgyb->evk", member, each[0], shifts) / below
        rate_min = np.clip(rate + np.minimum(moved.min(0), 0), 0.0, 1.0)
        rate_max = np.clip(rate + np.maximum(moved.max(0), 0), 0.0, 1.0)
    return Rates(
        rate=rate,
        n=below,
        rate_min=rate_min,
        rate_max=rate_max,
        n_min=rows,
        variance=noise_variance / below**2,
        valid=(below >= FEW) & (below > MIN_SIGNAL * np.sqrt(noise_below)),
        is_proportion=True,
    )


def _is_constant(each: np.ndarray, member: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Return (v, group): whether every possible row of a group has the same chance.

    Then the rate is known exactly, whatever the rows.
    """
    out = np.zeros(rate.shape, bool)
    for k in range(len(member)):
        mine = each[:, :, member[k] > 0]
        error = np.abs(mine[0] - rate[:, k] * mine[1])
        out[:, k] = (error < 1e-12).all((0, 1, 2, 3))
    return out


def estimate_shrinkage(problem: RuleProblem, fitted: FittedRule) -> Shrinkage:
    """Return how much less accurate the problem's best rule is on new people, by cross-validation.

    Rules of the folds are randomized, even if the rule is fixed: they are found faster.

    Parameters
    ----------
    problem
        The problem, with the counts that the rule is fitted on.
    fitted
        Its solution.
    """
    counts = problem.counts
    is_linear = all(target.metric.proper() for target in problem.targets)
    is_known = problem.is_random or not is_linear
    problem = replace(problem, is_random=is_linear)
    named = [g for g, group in enumerate(counts.groups) if None not in group]
    rules = len(named) * (len(counts.sites) if problem.per_site else 1)
    folds = FOLDS if rules <= MANY_CELLS else FEW_FOLDS
    losses = []
    sizes = []
    try:
        chosen = (fitted if is_known else problem.solve()).acceptances
        for fold in _deal(counts, folds):
            rest = replace(
                counts, counts=counts.counts - fold, decided=counts.decided * (1 - 1 / folds)
            )
            found = replace(problem, counts=rest).solve().acceptances
            chances = [
                RuleOutcome.of(counts, each, Acceptance()).chance for each in (chosen, found)
            ]
            gain = (fold[:, :, 1] - fold[:, :, 0]) * (chances[0] - chances[1])
            losses.append(gain[:, named].sum())
            sizes.append(fold.sum())
    except FedgftError:  # too few rows for a rule of each fold
        return NO_SHRINKAGE
    shares = np.array(losses) / np.maximum(sizes, 1.0)
    value = float(np.sum(losses) / max(1.0, counts.rows))
    return Shrinkage(value, float(shares.std(ddof=1) / np.sqrt(folds)))


def _deal(counts: RuleCounts, folds: int) -> Iterator[np.ndarray]:
    """Yield the counts of each fold, (site, group, label, bin); they add up to all counts.

    Noise on the counts is divided so that folds are independent of each other.
    """
    generator = np.random.default_rng(0)
    whole = np.diff(np.rint(np.cumsum(counts.counts, -1)), prepend=0.0, axis=-1)
    left = np.maximum(whole, 0.0).astype(np.int64)
    below = np.minimum(whole, 0.0) / folds
    noise = np.zeros((folds, *left.shape))
    if counts.noise is not None:
        noise = generator.normal(0.0, np.sqrt(counts.noise / folds), noise.shape)
        noise -= noise.mean(0)
    for i in range(folds):
        fold = generator.binomial(left, 1 / (folds - i))
        left = left - fold
        yield fold + below + noise[i]


def describe_gap(rates: Rates) -> dict[str, Any]:
    """Return the largest gap with its limits; None where it is not estimable."""
    found = find_largest_gap(rates)
    return {"gap": found.gap, "low": found.low, "high": found.high}
