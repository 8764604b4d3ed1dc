"""Local and global fairness: contributions, heterogeneity and bounds.

Wang, Payani, Lee & Kompella, "Mitigating Group Bias in Federated Learning: Beyond Local
Fairness", Section 4 and Theorem 5.1. Client k holds the share w_k of all rows. Group i has
the rate r_k = a_k / b_k there, group j the rate s_k = c_k / d_k. Over all clients

    F~ = a/b - c/d = sum_k p_k r_k - sum_k q_k s_k,   p_k = w_k b_k / b,   q_k = w_k d_k / d,

with a = sum_k w_k a_k and so on: p and q say on which clients a group's rows are. A metric
may compare several groups under several conditions; the letters are those of the widest gap.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics import Kind, Metric, get_metric
from fedgft.sums import Sums
from fedgft.types import Statistics
from fedgft.validation import check_instance


class Compared(NamedTuple):
    """A condition of the metric and two groups that are compared in it; gaps are i minus j."""

    condition: int
    i: int
    j: int


@dataclass(frozen=True, eq=False)
class Analysis:
    """a, b (group i) and c, d (group j) of Definition 3.1 on each client, and what follows.

    Where a group has no row of the event anywhere, the pair is one with that group and
    everything is NaN. On a client that lacks one of the groups the local gap alone is NaN.
    """

    pair: Compared
    proper: bool  # Definition 4.4
    weights: np.ndarray  # (k,): w
    a: np.ndarray  # (k,): means over the client's rows
    b: np.ndarray
    c: np.ndarray
    d: np.ndarray

    @property
    def signed_gap(self) -> float:
        """F~ = a/b - c/d: group i minus group j."""
        a, b, c, d = (self.weights @ terms for terms in (self.a, self.b, self.c, self.d))
        return float(_ratio(a, b) - _ratio(c, d))

    @property
    def gap(self) -> float:
        """F = |F~|."""
        return abs(self.signed_gap)

    @property
    def overall_rate(self) -> float:
        """rho = (a + c) / (b + d): the rate of the two groups together, over all clients."""
        hits = self.weights @ (self.a + self.c)
        return float(_ratio(hits, self.weights @ (self.b + self.d)))

    @cached_property
    def contributions(self) -> np.ndarray:
        """The contribution of each client to the gap: F~ = sum_k w_k G_k, where

            G_k = (a_k - rho b_k) / b - (c_k - rho d_k) / d,
            w_k G_k = p_k (r_k - rho) - q_k (s_k - rho).

        The total is F~ whatever rho is, for sum_k w_k (rho b_k / b - rho d_k / d) = rho - rho. With
        the overall rate as rho, a client adds zero where both groups have that rate, and a
        constant added to the outcome (a_k + t b_k, c_k + t d_k, rho + t) changes no contribution.
        A group that a client lacks has a_k = b_k = 0 and adds zero there. `paper_contributions`
        are G_k + rho (b_k / b - d_k / d): they also count where the groups live.

        rho is the rate of the two compared groups, not of all groups: a third group with another
        rate would again make clients add or subtract by how many rows of i and j they hold.
        A client whose groups have one rate that is not the overall one does add to the gap: that
        is Simpson's paradox, and the contributions show which clients make it.
        """
        rho = self.overall_rate
        first = _ratio(self.a - rho * self.b, self.weights @ self.b)
        return first - _ratio(self.c - rho * self.d, self.weights @ self.d)

    @cached_property
    def paper_contributions(self) -> np.ndarray:
        """F_k = a_k/b - c_k/d with the global b and d: F~ = sum_k w_k F_k (Theorem 5.1).

        Its gradient is what FedGFT needs. As an account of who makes the gap it misleads: for a
        model that accepts every row, F_k = b_k/b - d_k/d, although no client has a gap.
        """
        return _ratio(self.a, self.weights @ self.b) - _ratio(self.c, self.weights @ self.d)

    @cached_property
    def signed_local_gaps(self) -> np.ndarray:
        """r_k - s_k, or NaN on a client that lacks one of the groups."""
        return _ratio(self.a, self.b) - _ratio(self.c, self.d)

    @property
    def local_gaps(self) -> np.ndarray:
        """F(f, D_k) = |r_k - s_k|, or NaN on a client that lacks one of the groups."""
        return np.abs(self.signed_local_gaps)

    @property
    def largest_local_gap(self) -> float:
        """alpha, over the clients that have a local gap; NaN where none has."""
        known = self.local_gaps[~np.isnan(self.local_gaps)]
        return float(known.max()) if len(known) else math.nan

    @cached_property
    def shares(self) -> tuple[np.ndarray, np.ndarray]:
        """p and q: how the rows of either group are spread over the clients."""
        b = self.weights * self.b
        d = self.weights * self.d
        return _ratio(b, b.sum()), _ratio(d, d.sum())

    @property
    def heterogeneity(self) -> float:
        """DH = max_k |(d/b)(b_k/d_k) - 1|, of a proper metric.

        Infinite where a client holds one of the groups only: it has no local gap to start
        from. A client that holds neither says nothing.
        """
        if not self.proper:
            raise FedgftError(
                "data heterogeneity needs a proper metric (one whose event ignores the model); "
                "total variation does not"
            )
        p, q = self.shares
        if ((p > 0) != (q > 0)).any():
            return math.inf if not np.isnan(p + q).any() else math.nan
        held = q != 0
        return float(np.abs(p[held] / q[held] - 1.0).max())

    @property
    def total_variation(self) -> float:
        """TV = (1/2) sum_k |p_k - q_k|, at most DH/2 and at most 1; any metric, any clients."""
        p, q = self.shares
        return float(np.abs(p - q).sum() / 2)

    @property
    def bound_dh(self) -> float:
        """F <= alpha + DH (Theorem 4.6), of a proper metric."""
        return self._alpha + self.heterogeneity

    @property
    def bound_tv(self) -> float:
        """F <= alpha + TV, which follows from `bound_tight`. Above 1 it says nothing."""
        return self._alpha + self.total_variation

    @property
    def bound_tight(self) -> float:
        """F <= alpha (1 - TV) + TV <= 1, the least that follows from alpha, p and q.

        Proof. With m_k = min(p_k, q_k), which sum to 1 - TV,

            F~ = sum_k m_k (r_k - s_k) + sum_k (p_k - m_k) r_k - sum_k (q_k - m_k) s_k,

        and the last two sums lie in [0, TV], for rates lie in [0, 1] and the factors of either
        sum add up to TV; the first lies between -alpha (1 - TV) and alpha (1 - TV). The bound is
        an average of alpha and 1: never above 1, nor above alpha + TV. A client that lacks a group
        has m_k = 0: its missing rate is multiplied by zero throughout, so it counts in TV and
        needs no local gap. If no client holds both groups there is no alpha, TV is 1, and so is
        the bound.
        It is reached by r_k = 1, s_k = 1 - alpha where p_k > q_k, r_k = alpha, s_k = 0 elsewhere.
        """
        apart = min(self.total_variation, 1.0)  # not 1 + 1e-16
        return self._alpha * (1.0 - apart) + apart

    @property
    def _alpha(self) -> float:
        """Where no client has a local gap, 0 bounds them all: right in a bound, not in a table."""
        return 0.0 if math.isnan(self.largest_local_gap) else self.largest_local_gap


def analyze(metric: str | Metric, sums: Sums, kind: Kind) -> Analysis:
    """Return the terms of the widest gap between two groups.

    Parameters
    ----------
    metric
        A metric or its short name.
    sums
        The sums of each client, along the first axis (see `fedgft.sums.stack`).
    kind
        "soft" (scores) or "hard" (decisions).
    """
    metric = get_metric(metric)
    check_instance("sums", sums, Sums, "Sums.of() makes one; its first axis is the client")
    statistics, weights = per_client(metric, sums, kind)
    groups = statistics.shape[-1]
    if groups < 2:
        raise FedgftError("a gap needs two groups; the data has one")
    condition, high, low = (int(x) for x in metric.worst(np.tensordot(weights, statistics, 1)))
    i, j = sorted((high, low if low != high else (high + 1) % groups))  # all equal: any pair
    proper = metric.proper(sums.count.shape[-2])
    return compare(statistics, weights, Compared(condition, i, j), proper=proper)


def compare(
    statistics: Statistics, weights: np.ndarray, pair: Compared, *, proper: bool
) -> Analysis:
    """Return the terms of one pair of groups, from the clients' statistics (k, 2, v, g).

    Means with the weights n_k / n, or sums with weights of 1: all that follows is the same, and
    contributions then add up to the signed gap.
    """
    (a, b), (c, d) = (statistics[:, :, pair.condition, group].T for group in (pair.i, pair.j))
    return Analysis(pair, proper, weights, a, b, c, d)


def per_client(metric: Metric, sums: Sums, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Return the clients' mean statistics (k, 2, v, g) and weights n_k / n.

    A client without rows has the weight 0 and statistics of 0.
    """
    rows = np.asarray(sums.rows(), dtype=float)
    if rows.sum() == 0:
        raise FedgftError("the clients hold no rows")
    totals = sums.statistics(metric, kind)
    return totals / np.where(rows > 0, rows, 1.0)[:, None, None, None], rows / rows.sum()


class AllWeights(NamedTuple):
    """Whether F = 0 for all weights of the clients, and how far it is from that."""

    fair: bool
    violation: float  # max |M + M^T| / 2
    one_rate: float  # max |M|: zero if all groups have one rate on all clients


def fair_for_all_weights(statistics: Statistics, *, tolerance: float = 1e-12) -> AllWeights:
    """Theorem 4.3, mended: F = 0 for every w iff M + M^T = 0, where M_kl = a_k d_l - b_k c_l.

    For b d F~ = w^T M w, and a quadratic form sees the symmetric part of M only. It is zero
    iff all local gaps are, and any two clients have the same rate or the same mix b_k / d_k of
    groups. The paper asks for M = 0, one rate everywhere: enough, but not necessary. Clients
    of the same mix may differ in their rates, as Theorem 4.6 with DH = 0 says too.
    `statistics` are (k, 2, v, g); every condition and pair of groups is looked at.
    """
    violation = one_rate = 0.0
    conditions, groups = statistics.shape[2:]
    for v in range(conditions):
        for i, j in combinations(range(groups), 2):
            (a, b) = statistics[:, :, v, i].T
            (c, d) = statistics[:, :, v, j].T
            matrix = np.outer(a, d) - np.outer(b, c)
            one_rate = max(one_rate, float(np.abs(matrix).max()))
            violation = max(violation, float(np.abs(matrix + matrix.T).max()) / 2)
    return AllWeights(violation <= tolerance, violation, one_rate)


def _ratio(
    numerator: np.ndarray | np.floating, denominator: np.ndarray | np.floating
) -> np.ndarray:
    """Return the quotient, or NaN where no row is counted."""
    known = np.asarray(denominator) > 0
    return np.asarray(np.where(known, numerator, np.nan) / np.where(known, denominator, 1.0))
