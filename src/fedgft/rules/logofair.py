"""LoGoFair: post-processing for local and global fairness in federated learning.

Zhang, Chen, Han, Zhong and Zheng, AAAI 2025 (arXiv 2503.17231). For two groups, a = 0, 1.

Scores are calibrated by Beta calibration at each site c and in each group, giving eta. With
s_0 = 1, s_1 = -1, pi[a, c] = P(A = a, C = c) and p[a] = P(A = a), a person is accepted if

    F[a, c](eta) = 2 eta - 1 - s_a (lam / p[a] + mu_c / pi[a, c]) >= 0,   mu_c = mu1_c - mu2_c,

so for statistical parity the thresholds are 1/2 + s_a lam / (2 p[a]) + s_a mu_c / (2 pi[a, c]).
For equalized odds, lam and mu have a component for each label y, p[a] becomes P(A = a, Y = y), and
eta or 1 - eta multiplies the component. The multipliers minimize the sum over sites of

    H_c(lam, mu) = sum over a: mean over rows of (a, c): r(pi[a, c] F[a, c](eta))
                   + delta_g |lam| / K + delta_l (mu1_c + mu2_c),

where K is the number of sites and r(x) = log(1 + e^(beta x)) / beta. In each round, site c
multiplies mu_c by exp(-rate dH_c/dmu) 20 times, then makes 20 gradient steps in lam with five times
the rate, and the server averages the sites' lam. Then mu_c makes 100 more steps with r(x) =
max(0, x). Constants and starting values are those of the authors' code. Because lam is averaged,
and H_c is the share of one site, lam moves by 1 / K of the gradient of the sum: with many sites,
the rounds end far from the minimum. Where sites differ, each goes its own way for 20 steps, and the
mean of the ends is not the minimum, however many rounds there are.

We depart from the authors' code, not from the paper, where it does not do what the paper says: its
p[a] counts the rows of training and test as well, its inner steps add up the gradients of all
earlier ones, a function of it (unused for statistical parity) divides mu_c by pi[0, c] for both
groups, and for equalized odds it restricts lam to positive numbers, never moves the second mu, and
counts the last site only.
Without limits at the sites, mu is 0. If sites may not have rules of their own, the calibration is
that of the group over all sites.
"""

import numpy as np

from fedgft.data.dataset import Federation
from fedgft.errors import FedgftError
from fedgft.formatting import join_names
from fedgft.rules.counts import RowGroups
from fedgft.rules.decision_rule import DecisionRule
from fedgft.rules.priced_rule import ClientRows, Limits, divide

ROUNDS = 30
STEPS = 20  # of mu, then of lam, in each round
MORE_STEPS = 100  # of mu, with the exact dual
RATE = 0.005  # of mu
GLOBAL_RATE = 5 * RATE  # of lam
SMOOTH = 1000.0  # beta
LAM_START = 0.01
MU_START = 0.5
SIGNS = np.array([1.0, -1.0])  # of the two groups


class LoGoFairDual:
    """H_c of all sites, as a function of the multipliers.

    Parameters
    ----------
    rows
        The clients' rows of two groups.
    eta
        (n,) Their calibrated scores.
    """

    def __init__(self, rows: ClientRows, eta: np.ndarray) -> None:
        self.rows = rows
        groups, self.sites = rows.groups[rows.known], rows.sites[rows.known]
        sizes = np.zeros((rows.num_sites, len(rows.names)))
        np.add.at(sizes, (self.sites, groups), 1.0)
        share = (sizes / len(eta))[self.sites, groups]  # pi
        self.weight = 1 / sizes[self.sites, groups]
        self.base = share * (2 * eta - 1)
        gains = (share * SIGNS[groups])[:, None] * rows.gains(eta)
        self.in_all = gains * divide(np.ones(1), rows.shares.sum(0))[groups]
        self.in_site = gains * divide(np.ones(1), self._shares)[self.sites, groups]
        self.limits = rows.list_limits(rows.target)
        self.local = rows.list_limits(rows.local)
        self.is_limited = np.isfinite(self.local) & (self._shares > 0).all(1)  # (site, v)

    @property
    def _shares(self) -> np.ndarray:
        """(site, group, v): 0 for both groups of a site that lacks one of them."""
        shares = self.rows.shares
        return np.where((shares > 0).all(1, keepdims=True), shares, 0.0)

    def values(self, lam: np.ndarray, mu: np.ndarray, *, smooth: bool = True) -> np.ndarray:
        """Return H_c of each site, for lam (site, v) and mu (2, site, v)."""
        margin = self._margin(lam, mu)
        each = np.maximum(margin, 0.0)
        if smooth:
            each = np.logaddexp(0.0, SMOOTH * margin) / SMOOTH
        found = np.bincount(self.sites, self.weight * each, minlength=self.rows.num_sites)
        is_limited = np.isfinite(self.limits)
        found = found + np.abs(lam[:, is_limited]) @ self.limits[is_limited] / self.rows.num_sites
        return found + (self.is_limited * np.where(self.is_limited, self.local, 0) * mu.sum(0)).sum(
            -1
        )

    def slope_in_lam(self, lam: np.ndarray, mu: np.ndarray) -> np.ndarray:
        """Return dH_c / dlam of each site, (site, v); 0 without a limit."""
        found = -self._sum(self._chance(self._margin(lam, mu), smooth=True), self.in_all)
        is_limited = np.isfinite(self.limits)
        limits = np.where(is_limited, self.limits, 0.0)
        return is_limited * (found + limits * np.sign(lam) / self.rows.num_sites)

    def slope_in_mu(self, lam: np.ndarray, mu: np.ndarray, *, smooth: bool = True) -> np.ndarray:
        """Return dH_c / dmu of each site, (2, site, v)."""
        found = -self._sum(self._chance(self._margin(lam, mu), smooth=smooth), self.in_site)
        return np.where(self.is_limited, np.stack((self.local + found, self.local - found)), 0.0)

    def _margin(self, lam: np.ndarray, mu: np.ndarray) -> np.ndarray:
        """Return pi F of each row."""
        net = self.is_limited * (mu[0] - mu[1])
        spent = (self.in_all * lam[self.sites]).sum(1) + (self.in_site * net[self.sites]).sum(1)
        return self.base - spent

    def _chance(self, margin: np.ndarray, *, smooth: bool) -> np.ndarray:
        """Return r'(margin)."""
        if not smooth:
            return (margin > 0).astype(float)
        return 1 / (1 + np.exp(-np.clip(SMOOTH * margin, -500, 500)))

    def _sum(self, chance: np.ndarray, gains: np.ndarray) -> np.ndarray:
        """Return the sums over the rows of each site, (site, v)."""
        weight = self.weight * chance
        size = self.rows.num_sites
        return np.stack([np.bincount(self.sites, weight * g, minlength=size) for g in gains.T], 1)

    def minimize(self, rounds: int = ROUNDS) -> tuple[np.ndarray, np.ndarray]:
        """Return lam (v,) and mu_c (site, v) of the published iteration."""
        shape = (self.rows.num_sites, len(self.limits))
        lam = np.where(np.isfinite(self.limits), LAM_START, 0.0)
        mu = np.full((2, *shape), MU_START)
        for _ in range(rounds):
            own = np.broadcast_to(lam, shape)
            mu = self._move_mu(own, mu, STEPS, smooth=True)
            for _ in range(STEPS):
                own = own - GLOBAL_RATE * self.slope_in_lam(own, mu)
            lam = own.mean(0)
            mu = self._move_mu(np.broadcast_to(lam, shape), mu, MORE_STEPS, smooth=False)
        return lam, self.is_limited * (mu[0] - mu[1])

    def _move_mu(self, lam: np.ndarray, mu: np.ndarray, steps: int, *, smooth: bool) -> np.ndarray:
        """Make steps of the exponentiated gradient."""
        if self.is_limited.any():
            for _ in range(steps):
                mu = mu * np.exp(-RATE * self.slope_in_mu(lam, mu, smooth=smooth))
        return mu

    def price(self, lam: np.ndarray, mu: np.ndarray) -> np.ndarray:
        """Return what multiplies c_v(eta) in F, (site, group, v)."""
        price = divide(lam, self.rows.shares.sum(0)) + divide(mu[:, None], self._shares)
        return SIGNS[:, None] * price


def fit_logofair(
    federation: Federation,
    scores: np.ndarray,
    *,
    target: Limits,
    local: Limits | None = None,
    per_site: bool = False,
    row_groups: RowGroups | None = None,
) -> DecisionRule:
    """Return the rule of LoGoFair; the parameters are those of `fit_rule`."""
    rows = ClientRows.of(
        federation, scores, target=target, local=local, row_groups=row_groups, method="logofair"
    )
    if len(rows.names) != 2:
        names = join_names([" & ".join(map(str, name)) for name in rows.names])
        text = f"logofair takes two groups, these rows have {len(rows.names)}: {names}"
        raise FedgftError(text, kind="unsupported")
    by_site = per_site or bool(local)
    calibrations = rows.calibrate(by_site=by_site)
    dual = LoGoFairDual(rows, rows.apply(calibrations))
    prices = dual.price(*dual.minimize())
    return rows.make_rule(rows.find_thresholds(prices, calibrations, by_site=by_site))
