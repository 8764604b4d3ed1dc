"""Intervals over sites: what if other sites of the same kind had taken part?

Newcombe's intervals take the sites as given and the rows as drawn. Where the audited sites stand
for many others, the sites are what was drawn: they are drawn again here, with all their rows.

A rate gets its percentiles. A largest gap is never negative, so its own percentiles would always
find one; it is made of signed differences d of all pairs instead, with limits d +- q s that hold
for all of them at once: s is the spread of a difference over the draws, q the 95% percentile of
the largest |d* - d| / s. Ratios likewise, by their logarithms.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedgft.audit.rates import Gap, largest, smallest
from fedgft.audit.sums import SLACK
from fedgft.audit.views import Pool, View
from fedgft.errors import FedgftError
from fedgft.metrics import Metric
from fedgft.metrics.intervals import Limits, folded

FEWEST = 5
FEW_SITES = 20  # with fewer, so few different sites give a rough guess
BLOCK = 200  # draws at a time: of each all sites are held, and there may be thousands
RARE = 0.05  # of the draws may lack a rate


@dataclass(frozen=True, eq=False)
class Redrawn:
    """95% limits; None or NaN where one draw in twenty or more has no rate."""

    gap: tuple[float | None, float | None]
    ratio: tuple[float | None, float | None]
    rates: Limits  # (v, g)

    def of(self, gap: Gap) -> Gap:
        (low, high), (ratio_low, ratio_high) = self.gap, self.ratio
        return replace(gap, low=low, high=high, ratio_low=ratio_low, ratio_high=ratio_high)


def check(pooled: Pool) -> None:
    """What cannot be drawn again."""
    if len(pooled.sites) < FEWEST:
        raise FedgftError(
            f"--bootstrap: needs {FEWEST} sites to draw from, not {len(pooled.sites)}"
        )
    if pooled.tables[..., SLACK].any():
        raise FedgftError("--bootstrap: sites that withhold small cells cannot be drawn again")


def redraw(metric: Metric, seen: View, valid: np.ndarray, *, draws: int, seed: int) -> Redrawn:
    """`valid`: of which groups an interval can be claimed at all, (v, g)."""
    statistics = seen.tally.statistics(metric, "hard")
    sites, generator = len(statistics), np.random.default_rng(seed)
    found = []
    for start in range(0, draws, BLOCK):
        size = min(BLOCK, draws - start)
        times = generator.multinomial(sites, np.full(sites, 1 / sites), size=size)
        found.append(metric.rates(np.tensordot(times, statistics, 1)))
    drawn, rates = np.clip(np.concatenate(found), 0, 1), metric.rates(statistics.sum(0))
    rates = np.clip(rates, 0, 1)
    known = valid & (np.isnan(drawn).mean(0) < RARE)  # (v, g)
    drawn = np.where(known, drawn, np.nan)
    low, high = _differences(drawn, rates)
    gap = largest(folded(low, high), complete=not np.isnan(low[:, _compared(rates)]).any())
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(rates)
        low, high = (np.exp(a) for a in folded(*_differences(np.log(drawn), logs)))
        i, j = np.triu_indices(rates.shape[-1], 1)
        ratio = smallest(np.exp(-np.abs(logs[:, i] - logs[:, j])), 1 / high, 1 / low)
    low, high = np.nanquantile(np.where(known, drawn, 0.0), (0.025, 0.975), axis=0)
    known &= high > low
    return Redrawn(gap, ratio, (np.where(known, low, np.nan), np.where(known, high, np.nan)))


def _compared(rates: np.ndarray) -> np.ndarray:
    """Pairs of groups that have a rate under all conditions."""
    i, j = np.triu_indices(rates.shape[-1], 1)
    return np.asarray(~np.isnan(rates[:, i] + rates[:, j]).any(0))


def _differences(drawn: np.ndarray, found: np.ndarray) -> Limits:
    """Limits of all pairs, (v, pairs), that hold at once; NaN where a pair cannot be compared."""
    middles, spreads, farthest = [], [], np.zeros(len(drawn))
    for i in range(found.shape[-1] - 1):  # one group and those behind it: all pairs may be many
        with np.errstate(invalid="ignore"):
            middle = found[..., i, None] - found[..., i + 1 :]
            away = (drawn[..., i, None] - drawn[..., i + 1 :]) - middle
        away = np.where(np.isfinite(away), away, np.nan)
        known = np.isnan(away).mean(0) < RARE
        spread = np.nanstd(np.where(known, away, 0.0), axis=0)
        known &= spread > 0  # all draws alike: nothing is known of what others would be
        away = np.where(known, away, 0.0)
        usual = np.nan_to_num(np.abs(away)) / np.where(spread > 0, spread, np.inf)
        farthest = np.maximum(farthest, usual.max((-2, -1), initial=0.0))
        middles.append(np.where(known, middle, np.nan))
        spreads.append(spread)
    if not middles:
        return found[..., :0], found[..., :0]
    middle = np.concatenate(middles, -1)
    half = np.quantile(farthest, 0.95) * np.concatenate(spreads, -1)
    return middle - half, middle + half
