"""Distances between score distributions.

Scores of two or four groups at three to five sites of 200 to 5,000 people, from Beta distributions
that differ by site and label; either the groups have the same scores at every site, or not. The
truth is computed from the mixture over sites. Intervals include the range that the bins allow. The
largest threshold gap has a band for all thresholds at once, so its interval is conservative; that
of the Wasserstein distance is conservative where groups hardly differ.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rows import Row
from scipy.stats import beta

from fedgft.auditing.rates import View, list_views, pool_sites
from fedgft.auditing.score_distributions import summarize_distributions
from fedgft.site_sums import COUNT, SCORES, MeasurementSpec, SiteSums, SiteTables

GRID = np.linspace(0, 1, 2001)
NAMES = "abcd"


@dataclass(frozen=True)
class Population:
    """Shares and Beta parameters by (group, label, site); `size` people."""

    size: int
    share: np.ndarray  # (g, y, k): chances of a person, which add up to 1
    shape: np.ndarray  # (g, y, k, 2)

    def cumulative(self, labels: tuple[int, ...] = (0, 1)) -> np.ndarray:
        """Return the share of each group, among these labels, with a score below GRID, (g, t)."""
        each = beta.cdf(GRID, *np.moveaxis(self.shape[:, labels], -1, 0)[..., None])
        weight = self.share[:, labels]
        mixed = (each * weight[..., None]).sum((1, 2))
        return mixed / weight.sum((1, 2))[:, None]

    def draw(self, generator: np.random.Generator, bins: int) -> View:
        """Return the sums of one federation, as the sites' files would state them."""
        cells = generator.multinomial(self.size, self.share.ravel())
        shapes = np.repeat(self.shape.reshape(-1, 2), cells, 0)
        scores = generator.beta(*shapes.T)
        return build_view(np.repeat(np.arange(len(cells)), cells), scores, self.share.shape, bins)


def build_view(cell: np.ndarray, scores: np.ndarray, shape: tuple[int, ...], bins: int) -> View:
    """Return the view of rows with these scores in the cells (group, label, site)."""
    groups, labels, sites = shape
    where = np.minimum((scores * bins).astype(int), bins - 1)
    hits = (scores >= 0.5).astype(int)
    flat = ((cell * 2 + hits) * bins) + where
    histogram = np.bincount(flat, minlength=groups * labels * sites * 2 * bins)
    histogram = histogram.reshape(groups, labels, sites, 2, bins).astype(float)
    totals = np.bincount(cell * 2 + hits, scores, groups * labels * sites * 2)
    spec = MeasurementSpec(("no", "yes"), ("group",), 0.5, True, bins)
    held = {}
    for k in range(sites):
        tables = {}
        for g in range(groups):
            table = spec.empty_table()
            table[..., COUNT] = histogram[g, :, k].sum(-1)
            table[..., SCORES] = totals.reshape(groups, labels, sites, 2)[g, :, k]
            tables[(NAMES[g],)] = table
        held[f"site {k}"] = SiteTables(tables)
    pooled = {(NAMES[g],): histogram[g].sum(1)[:, :, None] for g in range(groups)}
    (view,) = list_views(pool_sites(SiteSums(spec, held, pooled)))
    return view


def populations(
    federations: int, *, null: bool, groups: int, small: bool, seed: int
) -> Iterator[tuple[Population, np.random.Generator]]:
    """Yield random populations and the generator to draw from.

    Parameters
    ----------
    federations
        The number of populations.
    null
        Whether all groups have the same scores: the same labels and shapes at every site, and the
        same spread over the sites.
    groups
        The number of groups.
    small
        Whether there are 60 to 600 people per group, or 200 to 5,000 per site.
    seed
        Seed of the generator.
    """
    generator = np.random.default_rng(seed)
    for _ in range(federations):
        sites = int(generator.integers(3, 6))
        mix = generator.dirichlet(np.full(groups, 5.0))
        where = generator.dirichlet(np.full(sites, 3.0), 1 if null else groups)
        base = generator.uniform(0.2, 0.7, (1 if null else groups, 1, sites))
        label = np.concatenate((1 - base, base), 1)
        share = mix[:, None, None] * label * where[:, None]
        center = generator.uniform([[[0.2]], [[0.5]]], [[[0.5]], [[0.8]]], (2, 1, sites))[..., 0, :]
        if not null:
            center = center + generator.uniform(-0.15, 0.15, (groups, 1, 1))
        center = np.broadcast_to(np.clip(center, 0.05, 0.95), (groups, 2, sites))
        spread = generator.uniform(3, 15)
        shape = np.stack((center * spread, (1 - center) * spread), -1)
        size = (
            groups * generator.integers(60, 600) if small else sites * generator.integers(200, 5000)
        )
        yield Population(int(size), share / share.sum(), shape), generator


class Setting(NamedTuple):
    """One kind of federation."""

    name: str
    null: bool
    groups: int
    small: bool
    bins: int


SETTINGS = (
    Setting("2 groups, the same scores", True, 2, False, 100),
    Setting("2 groups, different scores", False, 2, False, 100),
    Setting("2 groups, the same scores, 1,000 bins", True, 2, False, 1000),
    Setting("2 groups, different scores, 1,000 bins", False, 2, False, 1000),
    Setting("4 groups, different scores", False, 4, False, 100),
    Setting("2 groups of 60 to 600, the same scores", True, 2, True, 100),
    Setting("2 groups of 60 to 600, different scores", False, 2, True, 100),
)


def count_covered(federations: int, setting: Setting, seed: int) -> tuple[Counter, Counter]:
    """Return how many intervals of each kind there are, and how many contain the truth."""
    known: Counter = Counter()
    covered: Counter = Counter()
    for population, generator in populations(
        federations, null=setting.null, groups=setting.groups, small=setting.small, seed=seed
    ):
        found = summarize_distributions(population.draw(generator, setting.bins))["yes"]
        for among, labels in (("everyone", (0, 1)), ("positives", (1,))):
            below = population.cumulative(labels)
            i, j = np.triu_indices(setting.groups, 1)
            apart = np.abs(below[i] - below[j])
            truth = {
                "threshold_gap": apart.max(),
                "wasserstein": np.trapezoid(apart, GRID, axis=-1).max(),
            }
            for key, value in truth.items():
                distance = found[among][key]
                if distance["low"] is None or distance["high"] is None:
                    continue
                known[key, among] += 1
                covered[key, among] += distance["low"] <= value + 1e-9 <= distance["high"] + 2e-9
    return known, covered


def run(federations: int) -> Iterator[Row]:
    """Simulate this many federations per setting."""
    for seed, setting in enumerate(SETTINGS):
        known, covered = count_covered(federations, setting, seed)
        for (key, among), number in known.items():
            name = {"threshold_gap": "largest threshold gap", "wasserstein": "Wasserstein"}[key]
            note = "conservative: a band" if key == "threshold_gap" else "conservative"
            yield Row(setting.name, f"{name}, {among}", covered[key, among], number, note)
