"""FedFACT, post-processing: a provable framework for group-fairness calibration.

Zhang, Han, Feng, Zhang, Li and Chen, NeurIPS 2025 (arXiv 2506.03777), Algorithm 2, for two classes
and any number of groups.

The rate of every group b stays within xi of the rate of all rows, and within xi_k of the rate of
all rows of site k for the rows of that site. With eta = (P(Y = 0 | x), P(Y = 1 | x)), the decision
about a person of group a at site k is

    h_k(x, a) = argmax over j: (M_k(a)^T eta)_j,
    M_k(a) = I - (1 / p[a, k]) sum over u: (lam_u D_u[a, k] + mu_(k, u) D_(k, u)[a, k]),

where lam_u = lam1_u - lam2_u. For statistical parity, u = (b, j) and all rows of column j of
D_u[a, k] hold P(C = k | A = b) 1{a = b} - p[a, k], with p[a, k] = P(A = a, C = k); for equal
opportunity the only entry is p[b, k] / P(A = b, Y = 1) 1{a = b} - p[a, k] / P(Y = 1). The
limits for both classes are the same, so we keep j = 1. Divided by p[a, k], the entry is
1{a = b} / P(A = b) - 1, without k, so that the global rule is a threshold by group.

The multipliers minimize, by projected gradients, on lam >= 0 with sum(lam) <= 5,

    H(lam, mu) = E[ T log sum over j: exp((M_k(a)^T eta)_j / T) ]
                 + xi sum(lam) + sum over k: xi_k sum(mu_k),              T = 0.1.

In each of ten rounds, every site moves its mu_k for the given lam, then the server moves lam by
the sum of the sites' gradients. The paper leaves the length of steps open; we halve a step until H
falls as much as its gradient promises. Two rates within xi of their mean are within 2 xi of each
other, so xi is half the target. T smooths the decisions: rates are equal on average over a band of
scores around the threshold, not for the decisions themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.rules.counts import RowGroups
from fedgft.rules.decision_rule import DecisionRule
from fedgft.rules.priced_rule import ClientRows, Limits, divide

ROUNDS = 10
STEPS = 10  # of mu, in each round
TEMPERATURE = 0.1
MOST = 5.0  # largest sum of the multipliers of the global limits, and of those of a site
SMALLEST_STEP = 1e-8


class FedFactDual:
    """H as a function of the multipliers.

    Parameters
    ----------
    rows
        The clients' rows.
    eta
        (n,) The probability of the positive class for each row whose group is recorded.
    temperature
        T.
    """

    def __init__(self, rows: ClientRows, eta: np.ndarray, temperature: float = TEMPERATURE) -> None:
        self.rows = rows
        self.temperature = temperature
        self.eta = eta
        self.gains = rows.gains(eta)
        self.groups, self.sites = rows.groups[rows.known], rows.sites[rows.known]
        self.limits = rows.list_limits(rows.target) / 2  # xi
        self.local = rows.list_limits(rows.local) / 2
        shares = rows.shares
        self.of_group = shares.sum(0)  # (group, v)
        self.of_all = shares.sum((0, 1))
        self.of_site = shares.sum(1, keepdims=True)  # (site, 1, v)
        self.of_cell = shares
        self.by_site = [np.flatnonzero(self.sites == k) for k in range(rows.num_sites)]

    def price(self, lam: np.ndarray, mu: np.ndarray) -> np.ndarray:
        """Return what multiplies c_v(eta), (site, group, v).

        Parameters
        ----------
        lam
            (2, group, v): of rates above and below that of all rows.
        mu
            (2, site, group, v).
        """
        net, own = lam[0] - lam[1], mu[0] - mu[1]
        price = divide(net, self.of_group) - divide(net.sum(0), self.of_all)
        return price + self._price_at_sites(own)

    def _price_at_sites(self, own: np.ndarray) -> np.ndarray:
        own = np.where(self.of_cell > 0, own, 0.0)
        return divide(own, self.of_cell) - divide(own.sum(1, keepdims=True), self.of_site)

    def value(self, lam: np.ndarray, mu: np.ndarray) -> float:
        """Return H."""
        smooth = self._smooth(self.price(lam, mu), np.arange(len(self.eta))).sum()
        charge = _charge(lam, self.limits) + _charge(mu, self.local)
        return float(smooth / len(self.eta) + charge)

    def slope_in_lam(self, lam: np.ndarray, mu: np.ndarray) -> np.ndarray:
        """Return dH / dlam, (2, group, v): from the sums of all sites."""
        accepted = self._accepted(self.price(lam, mu), np.arange(len(self.eta))).sum(0)
        excess = divide(accepted, self.of_group) - divide(accepted.sum(0), self.of_all)
        return np.stack((self.limits - excess, self.limits + excess))

    def slope_in_mu(self, lam: np.ndarray, mu: np.ndarray, site: int) -> np.ndarray:
        """Return dH / dmu_k of one site, (2, group, v)."""
        accepted = self._accepted(self.price(lam, mu), self.by_site[site])[site]
        excess = divide(accepted, self.of_cell[site])
        excess -= divide(accepted.sum(0), self.of_site[site, 0])
        excess = np.where(self.of_cell[site] > 0, excess, 0.0)
        return np.stack((self.local - excess, self.local + excess))

    def _margin(self, price: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Return (M^T eta)_1 - (M^T eta)_0 of some rows."""
        mine = price[self.sites[chosen], self.groups[chosen]]
        return 2 * self.eta[chosen] - 1 - (mine * self.gains[chosen]).sum(1)

    def _smooth(self, price: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Return the smoothed maximum of some rows."""
        margin = self._margin(price, chosen) / self.temperature
        return 1 - self.eta[chosen] + self.temperature * np.logaddexp(0.0, margin)

    def _accepted(self, price: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Return the sums of smoothed decisions about some rows, (site, group, v)."""
        margin = np.clip(self._margin(price, chosen) / self.temperature, -500, 500)
        added = self.gains[chosen] / (1 + np.exp(-margin))[:, None] / len(self.eta)
        found = np.zeros(self.of_cell.shape)
        np.add.at(found, (self.sites[chosen], self.groups[chosen]), added)
        return found

    def minimize(self, rounds: int = ROUNDS) -> tuple[np.ndarray, np.ndarray]:
        """Return lam (2, group, v) and mu (2, site, group, v) of the published iteration."""
        lam = np.zeros((2, *self.of_group.shape))
        mu = np.zeros((2, *self.of_cell.shape))
        sites = range(self.rows.num_sites) if np.isfinite(self.local).any() else ()
        step = 1.0
        steps = np.ones(self.rows.num_sites)
        for _ in range(rounds):
            for k in sites:
                for _ in range(STEPS):
                    moved = self._move_mu(lam, mu, k, steps[k])
                    mu[:, k], steps[k] = moved
            if np.isfinite(self.limits).any():
                lam, step = _descend(
                    lambda x: self.value(x, mu), lam, self.slope_in_lam(lam, mu), step
                )
        return lam, mu

    def _move_mu(self, lam: np.ndarray, mu: np.ndarray, site: int, step: float) -> "_Step":
        """Make one step of mu_k, in the share of H that depends on it."""
        mine = self.by_site[site]

        def value(x: np.ndarray) -> float:
            tried = mu.copy()
            tried[:, site] = x
            smooth = self._smooth(self.price(lam, tried), mine).sum() / len(self.eta)
            return float(smooth + _charge(x, self.local))

        return _descend(value, mu[:, site], self.slope_in_mu(lam, mu, site), step)


class _Step(NamedTuple):
    """Where a step leads, and how long the next one is to be."""

    place: np.ndarray
    step: float


def _descend(
    value: Callable[[np.ndarray], float], x: np.ndarray, slope: np.ndarray, step: float
) -> _Step:
    """Make one projected-gradient step that lowers the value as much as the gradient promises."""
    is_free = np.isfinite(slope)  # without a limit, a multiplier stays 0
    slope = np.where(is_free, slope, 0.0)
    now = value(x)
    step = 2 * step
    while step > SMALLEST_STEP:
        new = np.where(is_free, project(x - step * slope), 0.0)
        moved = new - x
        promised = now + float((slope * moved).sum()) + float((moved**2).sum()) / (2 * step)
        if value(new) <= promised + 1e-15:
            return _Step(new, step)
        step /= 2
    return _Step(x, step)


def project(x: np.ndarray) -> np.ndarray:
    """Return the nearest point with x >= 0 and sum(x) <= `MOST`."""
    positive = np.maximum(x, 0.0)
    if positive.sum() <= MOST:
        return positive
    ordered = np.sort(x.ravel())[::-1]
    shifts = (np.cumsum(ordered) - MOST) / np.arange(1, x.size + 1)
    return np.maximum(x - shifts[np.flatnonzero(ordered > shifts)[-1]], 0.0)


def _charge(multipliers: np.ndarray, limits: np.ndarray) -> float:
    """Return the sum of limits times multipliers; a multiplier without a limit is 0."""
    return float((multipliers * np.where(np.isfinite(limits), limits, 0.0)).sum())


def fit_fedfact_rule(
    federation: Federation,
    scores: np.ndarray,
    *,
    target: Limits,
    local: Limits | None = None,
    per_site: bool = False,
    row_groups: RowGroups | None = None,
) -> DecisionRule:
    """Return the rule of FedFACT; the parameters are those of `fit_rule`."""
    rows = ClientRows.of(
        federation, scores, target=target, local=local, row_groups=row_groups, method="fedfact-post"
    )
    by_site = per_site or bool(local)
    dual = FedFactDual(rows, rows.scores[federation.rows][rows.known])
    prices = dual.price(*dual.minimize())
    return rows.make_rule(rows.find_thresholds(prices, by_site=by_site))
