"""Private statistics: noise on a client's sums, and a budget that both sides keep count of.

One row more or less changes one count of the table (label, group) by 1, and the scores of that
cell, all classes but the first, by a vector no longer than 1. So counts are noised once and kept;
each round after that releases one table of scores (for a penalty) or of decisions (for a target),
and the first class follows from the count. The budget (epsilon, delta) is converted to
zero-concentrated DP, where rounds simply add up: rho = 1 / (2 sd^2) a release. It holds for one row
of one site against everybody who sees that site's messages, the server included. It covers the
statistics and nothing else: model updates are another matter (Flower's DP wrappers). And it is a
budget for one run; a site remembers what it released, and can limit all its runs (`ledger`).

In secure sums (`secure`) only totals are seen, so the noise of a total is shared between the
sites: each adds a discrete Gaussian of variance sd^2 / h, where h is the least number of sites that
are taken to be honest, n - (n - 1) // 3 of n. A sum of discrete Gaussians is not quite one, but at
these scales (10^5 units and more) the difference is far below exp(-10^9) (Kairouz, Liu & Steinke
2021).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedgft.arguments import real_number, whole_number
from fedgft.errors import FedgftError
from fedgft.flower.checks import Noise
from fedgft.metrics import Kind, Metric, Tally, price

MOST = 1_000_000_000  # releases, and rows of a cell
COUNTS = 0.2  # share of the budget for the counts, which are released once
ROUNDED = 1 + 1e-5  # one row changes a cell's rounded sums by a vector no longer than this


@dataclass(frozen=True)
class Budget:
    """`epsilon` None: no noise. `releases`: how many messages with statistics it must last for.

    `min_count`: of a (label, group) with fewer rows than this a site reports nothing.
    """

    epsilon: float | None = None
    delta: float = 1e-6
    releases: int = 1
    min_count: int = 0

    def __post_init__(self) -> None:
        whole_number("min_count", self.min_count, most=MOST)
        whole_number("releases", self.releases, most=MOST)
        real_number("delta", self.delta)
        if self.epsilon is not None and real_number("epsilon", self.epsilon) <= 0:
            raise FedgftError(f"epsilon must be a positive number, not {self.epsilon:g}")
        if self.min_count < 0 or self.releases < 1:
            raise FedgftError(f"min_count {self.min_count} and releases {self.releases} must be "
                              "at least 0 and 1")  # fmt: skip
        if self.epsilon is not None and not 0 < self.delta < 1:
            raise FedgftError(f"delta {self.delta:g} must lie between 0 and 1")

    def noise(self, kind: Kind) -> Noise | None:
        if self.epsilon is None:
            return None
        whole = total_rho(self.epsilon, self.delta)
        each = whole * (1 - COUNTS) / self.releases
        return Noise(kind, _deviation(whole * COUNTS), _deviation(each))

    def rho(self, released: int, counts: int = 1) -> float:
        """Spent by so many releases, and so many of the counts (one a run)."""
        if self.epsilon is None:
            return 0.0
        whole = total_rho(self.epsilon, self.delta)
        return whole * (COUNTS * counts + (1 - COUNTS) * released / self.releases)

    def spent(self, released: int, counts: int = 1) -> float | None:
        """Epsilon so far, at the same delta; None where there is no noise."""
        if self.epsilon is None:
            return None
        return 0.0 if released == 0 else epsilon_of(self.rho(released, counts), self.delta)

    def asked(self, kind: Kind) -> dict[str, float]:
        """What clients are told."""
        out = {"min_count": float(self.min_count)} if self.min_count else {}
        if self.epsilon is not None:
            out |= {"epsilon": self.epsilon, "delta": self.delta,
                    "releases": float(self.releases), "hard": float(kind == "hard")}  # fmt: skip
        return out


@lru_cache
def total_rho(epsilon: float, delta: float) -> float:
    """The most zero-concentrated DP that OpenDP certifies to be (epsilon, delta)-DP."""
    from fedgft.audit.private import mechanism  # here: a client starts with every message

    return 1 / (2 * mechanism(epsilon, delta)[0].scale ** 2)


@lru_cache
def epsilon_of(rho: float, delta: float) -> float:
    from fedgft.audit.private import opendp

    dp = opendp()
    scale = _deviation(rho)
    space = dp.vector_domain(dp.atom_domain(T=int))
    gauss = dp.m.make_gaussian(space, dp.l2_distance(T=float), scale=scale)
    return float(dp.c.make_zCDP_to_approxDP(gauss).map(1.0).epsilon(delta))


def _deviation(rho: float) -> float:
    """Of Gaussian noise at sensitivity 1."""
    return math.sqrt(1 / (2 * rho))


def honest(clients: int) -> int:
    """How many of so many clients are taken to keep their share of the noise to themselves."""
    return clients - (clients - 1) // 3


def share_of(noise: Noise, clients: int) -> Noise:
    """The noise that each of so many clients adds to a secure sum. The counts have half of their
    budget; the other half is for the number of rows that a site declares (`rows_noise`)."""
    part = 1 / math.sqrt(honest(clients))
    return Noise(noise.kind, rows_noise(noise) * part, noise.value * part * ROUNDED)


def rows_noise(noise: Noise) -> float:
    """The standard deviation on the number of rows that a site of a secure sum declares."""
    return noise.count * math.sqrt(2)


def discrete_gaussian(size: int, deviation: float) -> np.ndarray:
    """So many whole numbers, by OpenDP."""
    from fedgft.audit.private import opendp

    dp = opendp()
    space = dp.vector_domain(dp.atom_domain(T="i64"))
    noise = dp.m.make_gaussian(space, dp.l2_distance(T="f64"), scale=deviation)
    return np.array(noise([0] * size), dtype=np.int64)


def gaussian(values: np.ndarray, deviation: float) -> np.ndarray:
    """Gaussian noise by OpenDP, whose sampler has no floating-point holes."""
    from fedgft.audit.private import opendp

    dp = opendp()
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False))
    noise = dp.m.make_gaussian(space, dp.l2_distance(T=float), scale=deviation)
    return np.array(noise([float(v) for v in values.ravel()])).reshape(values.shape)


def noised(tally: Tally, noise: Noise, counts: np.ndarray | None) -> Tally:
    """The tally that leaves the site; `counts` are those of the first release."""
    if counts is None:
        counts = gaussian(tally.count, noise.count)
    return tally_from(counts, gaussian(values_of(tally, noise.kind), noise.value), noise.kind)


def values_of(tally: Tally, kind: Kind) -> np.ndarray:
    """The table that one release is about, (c, k, c - 1): the first class follows from counts."""
    return {"soft": tally.score, "hard": tally.decision}[kind][..., 1:]


def tally_from(counts: np.ndarray, values: np.ndarray, kind: Kind) -> Tally:
    """What was released, as a tally; NaN for the table that was not."""
    table = np.concatenate((counts[..., None] - values.sum(-1, keepdims=True), values), -1)
    unsaid = np.full_like(table, np.nan)
    score, decision = (table, unsaid) if kind == "soft" else (unsaid, table)
    return Tally(counts, score, decision)


def without_small(tally: Tally, least: int) -> Tally:
    """Nothing of a (label, group) with fewer rows: where counts are noisy, those decide."""
    kept = tally.count >= least
    return Tally(*(np.where(kept if t.ndim == 2 else kept[..., None], t, 0.0)
                   for t in (tally.count, tally.score, tally.decision)))  # fmt: skip


def gap_error(metric: Metric, total: Tally, noise: Noise, clients: int) -> float:
    """The standard error that the noise of so many clients puts on the gap (delta method)."""
    statistics = total.statistics(metric, noise.kind)
    if not (statistics[1] > 0).all():
        return float("nan")
    classes = total.count.shape[-2]
    v = metric.gradient(statistics)
    dear = price(metric, v, classes)[:, :-1]  # d gap / d table, by label, group, class
    _, offset = metric.affine(classes)
    by_count = np.einsum("svy,svg->yg", offset, v) + dear[..., 0]
    by_value = dear[..., 1:] - dear[..., :1]
    variance = (by_count**2).sum() * noise.count**2 + (by_value**2).sum() * noise.value**2
    return math.sqrt(clients * variance)
