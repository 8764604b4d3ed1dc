"""Percentile intervals over sites: what if other sites of the same kind had taken part?

Newcombe's intervals take the sites as given and the rows as drawn. Where the audited sites stand
for many others, the sites are what was drawn: they are drawn again here, with all their rows.
"""

from dataclasses import dataclass, replace

import numpy as np

from fedgft.audit.rates import Gap
from fedgft.audit.views import View
from fedgft.metrics import Metric

FEW_SITES = 20  # with fewer, the percentiles of so few different sites are a rough guess
BLOCK = 200  # draws at a time: memory does not grow with their number


@dataclass(frozen=True, eq=False)
class Redrawn:
    """95% limits; None or NaN where one draw in twenty or more has no rate."""

    gap: tuple[float | None, float | None]
    ratio: tuple[float | None, float | None]
    rates: tuple[np.ndarray, np.ndarray]  # (v, g)

    def of(self, gap: Gap) -> Gap:
        (low, high), (ratio_low, ratio_high) = self.gap, self.ratio
        return replace(gap, low=low, high=high, ratio_low=ratio_low, ratio_high=ratio_high)


def redraw(metric: Metric, seen: View, *, draws: int, seed: int) -> Redrawn:
    statistics = seen.tally.statistics(metric, "hard")
    sites, generator = len(statistics), np.random.default_rng(seed)
    found = []
    for start in range(0, draws, BLOCK):
        size = min(BLOCK, draws - start)
        times = generator.multinomial(sites, np.full(sites, 1 / sites), size=size)
        found.append(metric.rates(np.tensordot(times, statistics, 1)))
    rates = np.concatenate(found)  # (draw, v, g)
    top, bottom = rates.max(-1), rates.min(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(top > 0, bottom / top, np.nan).min(-1)
    low, high = _percentiles(rates)
    return Redrawn(
        _pair(_percentiles((top - bottom).max(-1))), _pair(_percentiles(ratios)), (low, high)
    )


def _percentiles(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    unknown = np.isnan(values).mean(0) >= 0.05
    filled = np.where(np.isnan(values).all(0), 0.0, values)
    low, high = np.nanquantile(filled, (0.025, 0.975), axis=0)
    return np.where(unknown, np.nan, low), np.where(unknown, np.nan, high)


def _pair(limits: tuple[np.ndarray, np.ndarray]) -> tuple[float | None, float | None]:
    low, high = float(limits[0]), float(limits[1])
    return None if np.isnan(low) else low, None if np.isnan(high) else high
