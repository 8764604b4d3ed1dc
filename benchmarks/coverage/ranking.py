"""Areas under ROC curves, cross-group areas, and who is at the top.

The federations are those of the distances between score distributions. The truth is computed from
the mixture over sites. Intervals include the range that the bins allow: with 100 bins and thousands
of people this range is as wide as what chance does, and the intervals are conservative; with 1,000
bins it hardly counts. The interval of the largest gap of many is conservative, too.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
from rows import Row
from score_distributions import GRID, NAMES, SETTINGS, Population, Setting, populations

from fedgft.auditing.ranking import TOP_SHARES, summarize_ranking


def true_areas(population: Population) -> np.ndarray:
    """Return P(score of a positive of g > score of a negative of h), (g, h)."""
    positives = population.cumulative((1,))
    negatives = population.cumulative((0,))
    middle = (negatives[:, 1:] + negatives[:, :-1]) / 2
    return np.diff(positives, axis=-1) @ middle.T


def true_top(population: Population, top: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of the groups at the top, and the share of each group at the top."""
    below = population.cumulative()
    mix = population.share.sum((1, 2))
    cut = np.interp(1 - top, mix @ below, GRID)
    selected = 1 - np.array([np.interp(cut, GRID, each) for each in below])
    return selected * mix / top, selected


def count_covered(federations: int, setting: Setting, seed: int) -> tuple[Counter, Counter]:
    """Return how many intervals of each kind there are, and how many contain the truth."""
    known: Counter = Counter()
    covered: Counter = Counter()

    def see(kind: str, low: float | None, high: float | None, truth: float) -> None:
        if low is not None and high is not None:
            known[kind] += 1
            covered[kind] += low - 1e-9 <= truth <= high + 1e-9

    for population, generator in populations(
        federations, null=setting.null, groups=setting.groups, small=setting.small, seed=seed
    ):
        found = summarize_ranking(population.draw(generator, setting.bins))["yes"]
        areas = true_areas(population)
        own = np.diag(areas)
        for name, area in found["areas"].items():
            see("area", area["low"], area["high"], own[NAMES.index(name)])
        see("largest gap of areas", found["gap"]["low"], found["gap"]["high"], np.ptp(own))
        for area in found["cross"]:
            at = (NAMES.index(area["positives"]), NAMES.index(area["negatives"]))
            see("cross-group area", area["low"], area["high"], areas[at])
        gap = np.abs(areas - areas.T).max()
        see("largest cross gap", found["cross_gap"]["low"], found["cross_gap"]["high"], gap)
        for top, record in zip(TOP_SHARES, found["tops"], strict=True):
            share, selected = true_top(population, top)
            for name, group in record["groups"].items():
                g = NAMES.index(name)
                see("share of the top 1 to 50%", group["share_low"], group["share_high"], share[g])
                ends = (group["selected_low"], group["selected_high"])
                see("share that is in the top 1 to 50%", *ends, selected[g])
    return known, covered


def run(federations: int) -> Iterator[Row]:
    """Simulate this many federations per setting."""
    for seed, setting in enumerate(SETTINGS):
        known, covered = count_covered(federations, setting, 100 + seed)
        for kind, number in known.items():
            note = "" if setting.bins > 100 else "conservative: with the range of the bins"
            yield Row(setting.name, kind, covered[kind], number, note)
