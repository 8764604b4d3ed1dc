"""Add noise for differential privacy, with OpenDP, and compute its cost.

Two kinds of releases use this noise; secure sums are a variant of the second.

*A site's file* (``measure(epsilon=...)``) gets integer noise once, on its finest table of counts:
discrete Laplace noise, or discrete Gaussian noise where delta > 0 (`calibrate_noise`).

*A deployed client* (`Budget`) releases the counts by (label, group) once and then one table of
scores (for a penalty) or of decisions (for a target) per round. The table omits the first class,
which follows from the count and the other classes. Adding or removing one row changes one count by
1, and the sums of that cell by a vector of length at most 1. The budget (epsilon, delta) is
converted to zero-concentrated DP (Bun & Steinke 2016), in which the costs of releases add up: a
release with standard deviation sd costs rho = 1 / (2 sd^2). The guarantee protects one row of one
site against all readers of that site's messages, including the server. It covers the statistics,
but not the model updates (for these, use Flower's DP wrappers). The budget is for one run; a site
limits the cost of all its runs with its ledger (`fedgft.privacy.ledger`).

*In secure sums* only totals are visible, so the sites share the noise of a total: each site adds a
discrete Gaussian of variance sd^2 / h, where h = n - (n - 1) // 3 of the n sites are assumed to be
honest. A sum of discrete Gaussians is not exactly a discrete Gaussian, but at these scales (10^5
units and more) the difference is far below exp(-10^9) (Kairouz, Liu & Steinke 2021).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from fedgft.errors import FedgftError, import_extra
from fedgft.metrics import Kind, Metric, price
from fedgft.settings import check_setting
from fedgft.sums import Sums
from fedgft.validation import check_integer, check_number

MAX_COUNT = 1_000_000_000  # largest `releases` and largest `min_count` of a budget
COUNT_SHARE = 0.2  # share of the budget for the counts, which are released once
ROUNDING = 1 + 1e-5  # most that one row can change a cell's rounded sums in a secure sum (length)


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the Gaussian noise on a client's sums.

    Attributes
    ----------
    kind
        Which sums are released: "soft" (of scores) or "hard" (of decisions).
    count, value
        The standard deviation of the noise on each count, and on each sum of scores or decisions.
    """

    kind: Kind
    count: float
    value: float

    def add(self, sums: Sums, counts: np.ndarray | None) -> Sums:
        """Return the sums that may leave the site.

        `counts` are the noisy counts of the run's first release, or None if this is that release.
        """
        if counts is None:
            counts = add_gaussian(sums.count, self.count)
        return self.rebuild(counts, add_gaussian(self.select(sums), self.value))

    def add_to_rows(self, rows: float) -> float:
        """Return `rows` with noise: the number of rows that the site declares in secure sums."""
        return float(add_gaussian(np.array([rows]), self.declared_rows)[0])

    def select(self, sums: Sums) -> np.ndarray:
        """Return the table that one release holds, (c, k, c - 1): all classes but the first."""
        return (sums.score if self.kind == "soft" else sums.decision)[..., 1:]

    def rebuild(self, counts: np.ndarray, values: np.ndarray) -> Sums:
        """Return `Sums` made of released counts and values; `values` has the form of `select`.

        The table that was not released is NaN.
        """
        table = np.concatenate((counts[..., None] - values.sum(-1, keepdims=True), values), -1)
        missing = np.full_like(table, np.nan)
        return Sums(counts, *((table, missing) if self.kind == "soft" else (missing, table)))

    def gap_error(self, metric: Metric, total: Sums, clients: int) -> float:
        """Return the standard error of the gap due to the clients' noise (delta method).

        `total` holds the sums over all clients, each of which added this noise. The result is NaN
        if a group has no rows.
        """
        statistics = total.statistics(metric, self.kind)
        if not (statistics[1] > 0).all():
            return math.nan
        classes = total.count.shape[-2]
        gradient = metric.gradient(statistics)
        per_class = price(metric, gradient, classes)[:, :-1]  # d gap / d table: label, group, class
        _, offset = metric.affine(classes)
        per_count = np.einsum("svy,svg->yg", offset, gradient) + per_class[..., 0]
        per_value = per_class[..., 1:] - per_class[..., :1]
        variance = (per_count**2).sum() * self.count**2 + (per_value**2).sum() * self.value**2
        return math.sqrt(clients * variance)

    def share(self, clients: int) -> "Noise":
        """Return the noise that each of `clients` clients adds to a secure sum.

        Half of the budget for counts is spent on the counts. The other half is spent on the number
        of rows that a site declares (`declared_rows`).
        """
        part = 1 / math.sqrt(honest_clients(clients))
        return Noise(self.kind, self.declared_rows * part, self.value * part * ROUNDING)

    @property
    def declared_rows(self) -> float:
        """The standard deviation of the noise on the row count that a site declares."""
        return self.count * math.sqrt(2)


@dataclass(frozen=True)
class Mechanism:
    """Integer noise with sensitivity 1: `add` takes counts and returns noisy counts.

    `name` is "discrete laplace" or "discrete gaussian", `scale` its parameter, and `variance` the
    variance of the noise on one count (for the Gaussian, an upper bound).
    """

    name: str
    epsilon: float
    delta: float
    scale: float
    variance: float
    add: Callable[[list[int]], list[int]]


@dataclass(frozen=True)
class Budget:
    """What a deployed run may reveal about one row of a site.

    Parameters
    ----------
    epsilon, delta
        The guarantee of differential privacy for the whole run. If `epsilon` is None, there is no
        noise.
    releases
        The number of messages with statistics that the budget must cover.
    min_count
        A site reports nothing about a (label, group) with fewer rows than this.
    """

    epsilon: float | None = None
    delta: float = 1e-6
    releases: int = 1
    min_count: int = 0

    def __post_init__(self) -> None:
        check_integer("min_count", self.min_count, least=0, most=MAX_COUNT)
        check_integer("releases", self.releases, least=1, most=MAX_COUNT)
        check_setting("epsilon", self.epsilon)
        if not 0 < check_number("delta", self.delta) < 1 and self.epsilon is not None:
            raise FedgftError(f"`delta` {self.delta:g} must lie between 0 and 1")

    def noise(self, kind: Kind) -> Noise | None:
        """Return the noise on every release of sums of this kind; None without `epsilon`."""
        if self.epsilon is None:
            return None
        rho = total_rho(self.epsilon, self.delta)
        per_release = rho * (1 - COUNT_SHARE) / self.releases
        return Noise(kind, _deviation(rho * COUNT_SHARE), _deviation(per_release))

    def rho(self, released: int, counts: int = 1) -> float:
        """Return the cost of `released` releases, as rho of zero-concentrated DP.

        `counts` is the number of times that the counts were released, normally once per run.
        """
        if self.epsilon is None:
            return 0.0
        rho = total_rho(self.epsilon, self.delta)
        return rho * (COUNT_SHARE * counts + (1 - COUNT_SHARE) * released / self.releases)

    def spent(self, released: int, counts: int = 1) -> float | None:
        """Return the epsilon spent so far, at the same delta; None without `epsilon`."""
        if self.epsilon is None:
            return None
        return 0.0 if released == 0 else epsilon_of(self.rho(released, counts), self.delta)

    def to_request(self, kind: Kind) -> dict[str, float]:
        """Return the settings that the server sends to its clients."""
        request = {"min_count": float(self.min_count)} if self.min_count else {}
        if self.epsilon is not None:
            request |= {
                "epsilon": self.epsilon,
                "delta": self.delta,
                "releases": float(self.releases),
                "hard": float(kind == "hard"),
            }
        return request


# Calibration and accounting


@lru_cache
def calibrate_noise(epsilon: float, delta: float) -> Mechanism:
    """Return the smallest integer noise that OpenDP certifies for this budget, at sensitivity 1.

    With `delta` 0 it is discrete Laplace noise, otherwise discrete Gaussian noise.
    """
    if not 1e-4 <= epsilon <= 20:  # below, noise hides the counts; above, there is hardly any noise
        raise FedgftError(f"`epsilon` {epsilon:g}: must lie between 0.0001 and 20")
    if not (delta == 0 or 1e-20 <= delta <= 0.1):
        raise FedgftError(f"`delta` {delta:g}: must be 0, or lie between 1e-20 and 0.1")
    dp = _opendp()
    if delta == 0:
        scale = dp.binary_search_param(_laplace, d_in=1, d_out=epsilon)
        variance = _laplace_variance(scale)
        return Mechanism("discrete laplace", epsilon, 0.0, scale, variance, add=_laplace(scale))

    def fix_delta(scale: float) -> Any:
        return dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(_gaussian(scale)), delta)

    scale = dp.binary_search_param(fix_delta, d_in=1.0, d_out=(epsilon, delta))
    # The discrete Gaussian's variance is at most scale^2 (Canonne, Kamath & Steinke 2020).
    return Mechanism("discrete gaussian", epsilon, delta, scale, scale**2, add=_gaussian(scale))


@lru_cache
def total_rho(epsilon: float, delta: float) -> float:
    """Return the largest rho of zero-concentrated DP that OpenDP certifies as (epsilon, delta)."""
    return 1 / (2 * calibrate_noise(epsilon, delta).scale ** 2)


@lru_cache
def epsilon_of(rho: float, delta: float) -> float:
    """Return the epsilon, at this delta, of releases whose total cost is `rho`."""
    dp = _opendp()
    measurement = dp.c.make_zCDP_to_approxDP(_gaussian(_deviation(rho)))
    return float(measurement.map(1.0).epsilon(delta))


def _deviation(rho: float) -> float:
    """The standard deviation of Gaussian noise that costs `rho` at sensitivity 1."""
    return math.sqrt(1 / (2 * rho))


def _laplace_variance(scale: float) -> float:
    """The variance of P(x) proportional to exp(-|x| / scale) on the integers."""
    q = math.exp(-1 / scale)
    return 2 * q / (1 - q) ** 2


def _opendp() -> Any:
    dp: Any = import_extra("opendp.prelude", "noise (epsilon)")
    dp.enable_features("contrib")
    return dp


def _laplace(scale: float) -> Any:
    dp = _opendp()
    space = dp.vector_domain(dp.atom_domain(T="i64"))
    return dp.m.make_laplace(space, dp.l1_distance(T="i64"), scale=scale)


def _gaussian(scale: float, number: Literal["i64", "f64"] = "i64") -> Any:
    """OpenDP's Gaussian noise on vectors of integers, or of floating-point numbers."""
    dp = _opendp()
    space = dp.vector_domain(dp.atom_domain(T=number, nan=False if number == "f64" else None))
    return dp.m.make_gaussian(space, dp.l2_distance(T="f64"), scale=scale)


# Noise on a client's sums


def draw_discrete_gaussian(size: int, deviation: float) -> np.ndarray:
    """Return `size` integers from the discrete Gaussian distribution."""
    return np.array(_gaussian(deviation)([0] * size), dtype=np.int64)


def add_gaussian(values: np.ndarray, deviation: float) -> np.ndarray:
    """Return the values with Gaussian noise.

    OpenDP's sampler leaves no gaps between floating-point numbers that could reveal the values.
    """
    add = _gaussian(deviation, "f64")
    return np.array(add(values.astype(float).ravel().tolist())).reshape(values.shape)


def drop_small_cells(sums: Sums, min_count: int) -> Sums:
    """Set all sums of every (label, group) with fewer than `min_count` rows to 0.

    The counts are those in `sums`, so if these are noisy, the noisy counts decide.
    """
    large = sums.count >= min_count
    return sums.map(lambda t: np.where(large if t.ndim == large.ndim else large[..., None], t, 0.0))


def honest_clients(clients: int) -> int:
    """Return how many clients are assumed to be honest, which means to keep their noise secret."""
    return clients - (clients - 1) // 3
