"""What to expect of a decision rule: accuracy and gaps on new people, with 95% intervals.

A rule gives each row a probability q of a positive decision, so a rate is A / B with sums of
q-weighted counts. The variance of A - r B over rows gives an effective number of rows n, for which
r (1 - r) / n is that variance, and Wilson's limits use this n. For fixed thresholds n is the number
of rows; for randomized rules it is larger, because q varies less than a coin.

The rule was chosen on the same rows. For thresholds by group this does not matter to first order:
the distance of a gap from its estimate at the chosen threshold has the distribution that it has at
the best threshold, which does not depend on the rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedgft.auditing.rates import MIN_SIGNAL, Rates, find_largest_gap
from fedgft.metrics.intervals import FEW, wilson
from fedgft.metrics.metric import Metric
from fedgft.rules.counts import RuleCounts, effective_rows
from fedgft.rules.decision_rule import Acceptance


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
        shift = self.counts.shifts if site is None else None
        found = _estimate(
            metric,
            member,
            self.counts.counts[sites],
            self.chance[sites],
            None if self.counts.noise is None else self.counts.noise[sites],
            shift,
        )
        return [" & ".join(map(str, name)) for name in names], found

    def value(self, benefit: float, cost: float) -> float:
        """Return benefit times true positives minus cost times false positives, per person."""
        gained = (self.counts.counts * self.chance[:, :, None]).sum((0, 1, 3))
        return float(benefit * gained[1] - cost * gained[0]) / self.counts.rows

    def selected(self) -> float:
        """Return the share of positive decisions."""
        return float((self.counts.counts.sum(2) * self.chance).sum() / self.counts.rows)

    def accuracy(self) -> tuple[float, float | None, float | None]:
        """Return the accuracy and its limits, which are None with too few rows."""
        counts = self.counts.counts
        right = np.stack((1 - self.chance, self.chance), 2)  # (site, group, label, bin)
        rows = counts.sum()
        mean = float((counts * right).sum() / rows)
        spread = (counts * (right - mean) ** 2).sum() / rows**2
        if self.counts.noise is not None:
            spread += (self.counts.noise * (right - mean) ** 2).sum() / rows**2
        if rows < FEW:
            return mean, None, None
        low, high = wilson(mean, effective_rows(mean, spread))
        if self.counts.shifts is not None:  # rows of uncertain bin
            pooled = self.counts.shifts
            chance = self.chance if len(self.chance) == 1 else self.chance[:1]
            moved = (pooled * np.stack((1 - chance[0], chance[0]), 1)).sum((1, 2, 3)) / rows
            if len(self.chance) == 1:
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
        (2, group, label, bin): changes of the counts, summed over sites, if rows of uncertain bin
        are in the first or in the last bin of their range; None if there are none.
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
    if shifts is not None and len(counts) == 1:
        moved = np.einsum("kg,gybv,egyb->evk", member, each[0][0], shifts) / below
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


def describe_gap(rates: Rates) -> dict[str, Any]:
    """Return the largest gap with its limits; None where it is not estimable."""
    found = find_largest_gap(rates)
    return {"gap": found.gap, "low": found.low, "high": found.high}
