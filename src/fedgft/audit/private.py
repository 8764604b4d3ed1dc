"""What is done to a site's sums before they leave it: small cells withheld, or noise added.

Noise goes once on the finest table of counts (group, label, decision, bin of the score), and all
else is derived from it, so the budget is spent once. Adding or removing one row changes one of
these counts, and the two counts of rows that could not be counted are cells of the same table:
the sensitivity is 1. Every combination of names is a cell, rows or none.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from fedgft.audit.sums import (
    COUNT,
    NOISE,
    SCORES,
    SLACK,
    Group,
    Privacy,
    Question,
    Site,
    Sums,
    order,
)
from fedgft.errors import FedgftError

Noise = Callable[[list[int]], list[int]]


def suppress(sums: Sums, min_cell: int) -> Sums:
    """Withhold counts of 1 to min_cell - 1, and all of scores: the bins of a histogram are small
    cells too, and the sum over a few rows is nearly somebody's score."""
    if min_cell < 3:  # a cell of "1 to 1 rows" would be no secret
        raise FedgftError(f"--min-cell {min_cell}: must be at least 3")
    (name, site), *_ = sums.sites.items()
    tables, suppressed = {}, 0
    for group, table in site.tables.items():
        small = (table[..., COUNT] > 0) & (table[..., COUNT] < min_cell)
        suppressed += int(small.sum())
        tables[group] = table.copy()
        tables[group][..., SCORES:] = unsaid(table[..., COUNT, None], len(table))
        tables[group][small] = withheld(min_cell, table.shape[-1], len(table))
    privacy = Privacy(min_cell=min_cell, suppressed=suppressed)
    shown = lambda n: n if n == 0 or n >= min_cell else min_cell / 2  # noqa: E731
    kept = Site(tables, shown(site.label_missing), shown(site.prediction_missing), (privacy,))
    return replace(sums, sites={name: kept}, histogram={})


def withheld(min_cell: int, columns: int, classes: int) -> np.ndarray:
    """A cell of 1 to min_cell - 1 rows: read as the middle, off by at most `slack`."""
    cell = np.zeros(columns)
    cell[COUNT], cell[SLACK] = min_cell / 2, min_cell / 2 - 1
    cell[SCORES:] = unsaid(cell[COUNT], classes)
    return cell


def unsaid(count: Any, classes: int) -> Any:
    """Stands for the sums of scores that a site withholds: all classes alike."""
    return count / classes


def with_noise(
    sums: Sums,
    epsilon: float,
    delta: float,
    *,
    values: dict[str, tuple[str, ...]],
    declared: bool,
) -> Sums:
    """Discrete Laplace noise, or discrete Gaussian where delta > 0, by OpenDP.

    `declared`: no name of a group or class was read from the data.
    """
    question = sums.asked
    if len(question.classes) > 2:  # one row is in the histograms of all classes; counts suffice
        question = replace(question, scored=False)
    privacy, noise = mechanism(epsilon, delta)
    (name, site), *_ = sums.sites.items()
    groups = list(_domain(site, question, values))
    finest = [_finest(group, sums, site, question) for group in groups]
    exact = np.concatenate([*finest, [site.label_missing, site.prediction_missing]])
    noisy = np.array(noise([int(n) for n in exact]), dtype=float)
    tables, histogram = {}, {}
    for group, counts in zip(groups, np.split(noisy[:-2], len(groups)), strict=True):
        tables[group], histogram[group] = _assembled(counts, question, privacy.variance)
    names = "declared" if declared else "from the data"
    noised = Site(tables, noisy[-2], noisy[-1], (replace(privacy, names=names),))
    return Sums(question, {name: noised}, histogram if question.scored else {})


@lru_cache
def mechanism(epsilon: float, delta: float) -> tuple[Privacy, Noise]:
    """The least noise that OpenDP certifies for this budget, at sensitivity 1."""
    if not 1e-4 <= epsilon <= 20:  # beyond, noise that is nothing but noise, or none at all
        raise FedgftError(f"--epsilon {epsilon:g}: must lie between 0.0001 and 20")
    if not (delta == 0 or 1e-20 <= delta <= 0.1):
        raise FedgftError(f"--delta {delta:g}: must be 0, or lie between 1e-20 and 0.1")
    dp = opendp()
    space = dp.vector_domain(dp.atom_domain(T=int))
    if delta == 0:
        laplace = lambda s: dp.m.make_laplace(space, dp.l1_distance(T=int), scale=s)  # noqa: E731
        scale = dp.binary_search_param(laplace, d_in=1, d_out=epsilon)
        privacy = Privacy("discrete laplace", epsilon, 0.0, scale, _laplace_variance(scale))
        return privacy, laplace(scale)
    gauss = lambda s: dp.m.make_gaussian(space, dp.l2_distance(T=float), scale=s)  # noqa: E731
    approximate = lambda s: dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(gauss(s)), delta)  # noqa: E731
    scale = dp.binary_search_param(approximate, d_in=1.0, d_out=(epsilon, delta))
    # The discrete Gaussian's variance is at most scale^2 (Canonne, Kamath & Steinke 2020).
    return Privacy("discrete gaussian", epsilon, delta, scale, scale**2), gauss(scale)


def opendp() -> Any:
    """The library that makes the noise, if it is installed."""
    try:
        import opendp.prelude as dp
    except ModuleNotFoundError as error:
        raise FedgftError("noise (epsilon) needs OpenDP: pip install 'fedgft[private]'") from error
    dp.enable_features("contrib")
    return dp


@lru_cache
def middles(bins: int) -> np.ndarray:
    return (np.arange(bins) + 0.5) / bins


@lru_cache
def feasible(question: Question) -> np.ndarray:
    """(decision, bin): the pairs a row can have. A threshold settles all but the bin it cuts."""
    classes, bins = len(question.classes), question.bins if question.scored else 1
    possible = np.ones((classes, bins), dtype=bool)
    if question.scored and question.threshold is not None:
        edges = np.arange(bins + 1) / bins
        possible[0] = edges[:-1] < question.threshold
        possible[1] = edges[1:] > question.threshold
        possible[1, -1] = True  # a score of 1 lies in the last bin and reaches any threshold
    return possible


def _domain(site: Site, question: Question, values: dict[str, tuple[str, ...]]) -> Iterator[Group]:
    """Every combination of values, "not recorded" among them."""
    each = []
    for i, attribute in enumerate(question.attributes):
        seen = {group[i] for group in site.tables} - {None}
        listed = sorted(((v,) for v in values.get(attribute) or seen), key=order)
        each.append([*(v for (v,) in listed), None])
    return product(*each)


def _finest(group: Group, sums: Sums, site: Site, question: Question) -> np.ndarray:
    """The counts of one group by label and feasible (decision, bin), flat."""
    if question.scored:
        cells = sums.histogram.get(group, question.empty_histogram())[:, :, 0]
    else:
        cells = site.tables.get(group, question.empty_table())[..., COUNT, None]
    return cells[:, feasible(question)].ravel()


def _assembled(
    counts: np.ndarray, question: Question, variance: float
) -> tuple[np.ndarray, np.ndarray]:
    """A table and a histogram from noisy counts; sums of scores from the middles of the bins."""
    possible = feasible(question)
    classes, bins = possible.shape
    cells = np.zeros((classes, classes, bins))
    cells[:, possible] = counts.reshape(classes, -1)
    table = question.empty_table()
    table[..., COUNT] = cells.sum(-1)
    table[..., NOISE] = variance * possible.sum(-1)
    if question.scored:
        table[..., SCORES] = cells @ middles(bins)
    return table, cells[:, :, None, :]


def _laplace_variance(scale: float) -> float:
    """Of P(x) proportional to exp(-|x|/scale) on the integers."""
    q = math.exp(-1 / scale)
    return 2 * q / (1 - q) ** 2
