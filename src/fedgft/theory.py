"""Local and global fairness: contributions, heterogeneity and bounds.

Wang, Payani, Lee & Kompella, "Mitigating Group Bias in Federated Learning: Beyond Local
Fairness", Section 4 and Theorem 5.1. Client k holds the share w_k of all rows. Group i has
the rate r_k = a_k / b_k there, group j the rate s_k = c_k / d_k. Over all clients

    F~ = a/b - c/d = sum_k p_k r_k - sum_k q_k s_k,   p_k = w_k b_k / b,   q_k = w_k d_k / d,

with a = sum_k w_k a_k and so on; p and q are the distributions of the groups' rows over clients. A
metric may compare several groups under several conditions; i and j are the pair with the largest
gap.

The examples at the end are Theorem 4.1 and Simpson's paradox as rows of data, for any number of
clients. They also show Corollary 4.2: a gap that is positive while all local gaps are zero is no
linear combination of them.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics import Kind, Metric, get_metric
from fedgft.metrics.metric import Index, Statistics
from fedgft.sums import Sums, stack
from fedgft.validation import check_instance, check_integer, check_number

__all__ = [
    "AllWeights",
    "Analysis",
    "Compared",
    "Example",
    "analyze",
    "compare",
    "fair_for_all_weights",
    "locally_fair_globally_unfair",
    "locally_unfair_globally_fair",
    "per_client",
    "simpson",
]

MAX_CLIENTS = 100_000


class Compared(NamedTuple):
    """A condition of the metric and two groups that are compared in it; gaps are i minus j."""

    condition: int
    i: int
    j: int


@dataclass(frozen=True, eq=False)
class Analysis:
    """a, b (group i) and c, d (group j) of Definition 3.1 on each client, and what follows.

    If a group has no row of the event on any client, the pair contains that group and all results
    are NaN. On a client that lacks one of the groups, only the local gap is NaN.
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

        The total is F~ for every rho, because sum_k w_k (rho b_k / b - rho d_k / d) = rho - rho.
        With the overall rate as rho, a client contributes zero if both of its groups have that
        rate, and adding a constant to the outcome (a_k + t b_k, c_k + t d_k, rho + t) changes no
        contribution. A group that a client lacks has a_k = b_k = 0 and contributes zero there.
        `paper_contributions` are G_k + rho (b_k / b - d_k / d); they also depend on how the groups
        are distributed over clients.

        rho is the rate of the two compared groups, not of all groups. If it included a third group
        with another rate, contributions would again depend on how many rows of i and j a client
        holds. A client whose groups have the same rate contributes to the gap if that rate is not
        the overall rate: this is Simpson's paradox, and the contributions show which clients cause
        it.
        """
        rho = self.overall_rate
        first = _ratio(self.a - rho * self.b, self.weights @ self.b)
        return first - _ratio(self.c - rho * self.d, self.weights @ self.d)

    @cached_property
    def paper_contributions(self) -> np.ndarray:
        """F_k = a_k/b - c_k/d with the global b and d: F~ = sum_k w_k F_k (Theorem 5.1).

        FedGFT needs the gradient of F_k. As a measure of which clients cause the gap, F_k is
        misleading: for a model that accepts every row, F_k = b_k/b - d_k/d, although no client has
        a gap.
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

        It is infinite if a client holds only one of the groups, because that client has no local
        gap. A client that holds neither group is ignored.
        """
        if not self.proper:
            raise FedgftError(
                "data heterogeneity needs a proper metric (one whose event ignores the model); "
                "total variation does not"
            )
        p, q = self.shares
        if ((p > 0) != (q > 0)).any():
            return math.inf if not np.isnan(p + q).any() else math.nan
        nonzero = q != 0
        return float(np.abs(p[nonzero] / q[nonzero] - 1.0).max())

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
        """F <= alpha + TV, which follows from `bound_tight`; a value above 1 is no restriction."""
        return self._alpha + self.total_variation

    @property
    def bound_tight(self) -> float:
        """F <= alpha (1 - TV) + TV <= 1, the least that follows from alpha, p and q.

        Proof. With m_k = min(p_k, q_k), which sum to 1 - TV,

            F~ = sum_k m_k (r_k - s_k) + sum_k (p_k - m_k) r_k - sum_k (q_k - m_k) s_k.

        The last two sums lie in [0, TV], because rates lie in [0, 1] and the factors of each sum
        add up to TV. The first sum lies between -alpha (1 - TV) and alpha (1 - TV). The bound is a
        weighted mean of alpha and 1, so it is never above 1, nor above alpha + TV. A client that
        lacks a group has m_k = 0; its missing rate is multiplied by zero, so the client counts in
        TV and needs no local gap. If no client holds both groups, alpha does not exist, and both TV
        and the bound are 1. The bound is attained by r_k = 1, s_k = 1 - alpha where p_k > q_k, and
        r_k = alpha, s_k = 0 elsewhere.
        """
        apart = min(self.total_variation, 1.0)  # not 1 + 1e-16
        return self._alpha * (1.0 - apart) + apart

    @property
    def _alpha(self) -> float:
        """alpha as used in the bounds: 0 if no client has a local gap."""
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

    The statistics are means with the weights n_k / n, or sums with weights of 1. The results are
    the same; with sums, the contributions themselves add up to the signed gap.
    """
    (a, b), (c, d) = (statistics[:, :, pair.condition, group].T for group in (pair.i, pair.j))
    return Analysis(pair, proper, weights, a=a, b=b, c=c, d=d)


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
    """Theorem 4.3, corrected: F = 0 for every w iff M + M^T = 0, where M_kl = a_k d_l - b_k c_l.

    The reason is that b d F~ = w^T M w, and a quadratic form depends only on the symmetric part of
    M. That part is zero iff all local gaps are zero and any two clients have the same rate or the
    same mix b_k / d_k of groups. The paper requires M = 0, one rate on all clients, which is
    sufficient but not necessary: clients with the same mix may have different rates, as Theorem 4.6
    with DH = 0 also says. `statistics` are (k, 2, v, g); every condition and every pair of groups
    is checked.
    """
    violation = one_rate = 0.0
    conditions, groups = statistics.shape[2:]
    for v in range(conditions):
        for i, j in combinations(range(groups), 2):
            a, b = statistics[:, :, v, i].T
            c, d = statistics[:, :, v, j].T
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


@dataclass(frozen=True, eq=False)
class Example:
    """A small data set with decisions; each array has one entry per row."""

    decisions: Index
    labels: Index
    groups: Index
    clients: Index

    def swapped(self) -> "Example":
        """Return the example with decisions and labels exchanged.

        P(Yhat=1 | Y=1, A) becomes P(Y=1 | Yhat=1, A): what was shown for equal opportunity
        is now shown for predictive parity.
        """
        return Example(self.labels, self.decisions, self.groups, self.clients)

    def sums_by_client(self) -> Sums:
        """Return the sums of each client, along the first axis."""
        of_client = [self.clients == k for k in range(int(self.clients.max()) + 1)]
        probs = np.eye(2)[self.decisions]
        return stack(
            [Sums.of(probs[k], self.labels[k], self.groups[k], num_groups=2) for k in of_client]
        )


def locally_fair_globally_unfair(clients: int, gap: float) -> Example:
    """Return rows for which every local gap is 0 and the global gap is larger than C = `gap` < 1.

    Client 0 accepts all rows and holds m rows of group 0 and one of group 1; each of the K - 1
    others accepts none and holds one row of group 0 and h of group 1. Globally

        F = 1 - (K - 1)/(m + K - 1) - 1/(1 + (K - 1) h),

    and m and h are chosen so that each of the two subtracted terms is smaller than (1 - C)/2. The
    terms are never zero, because a client needs rows of both groups to be fair, so C = 1 is
    impossible. Every row occurs with both labels, so this holds for sp, eop, eo and fpr at once;
    for predictive parity, use `swapped`.
    """
    if not 0 < check_number("gap", gap) < 1:
        raise FedgftError(f"gap must lie between 0 and 1, both excluded; it is {gap}")
    others = _at_least_two(clients) - 1
    m = math.ceil(2 * others / (1 - gap))
    h = math.ceil(2 / (others * (1 - gap)))
    cells = [(0, 0, 1, m), (0, 1, 1, 1)]
    cells += [(k, group, 0, rows) for k in range(1, clients) for group, rows in ((0, 1), (1, h))]
    return _example(cells, labels=(0, 1))


def locally_unfair_globally_fair(clients: int, gap: float) -> Example:
    """Return rows for which every local gap is at least C = `gap` <= 1 and the global gap is 0.

    Even clients accept the share R >= C of group 0 and none of group 1; odd clients do the
    opposite. Both groups are equally large on each client. The size of an even client is
    proportional to the number of odd clients and vice versa, so each kind holds half of all rows
    and both groups have the rate R/2. The metrics are those of `locally_fair_globally_unfair`.
    """
    if not 0 < check_number("gap", gap) <= 1:
        raise FedgftError(f"gap must lie above 0 and not above 1; it is {gap}")
    odd = _at_least_two(clients) // 2
    accepted = math.ceil(20 * gap)  # R in steps of 1/20
    cells = []
    for k in range(clients):
        scale = odd if k % 2 == 0 else clients - odd
        favored = k % 2
        cells += [(k, favored, 1, scale * accepted), (k, favored, 0, scale * (20 - accepted))]
        cells += [(k, 1 - favored, 0, scale * 20)]
    return _example(cells, labels=(0, 1))


def simpson() -> Example:
    """Return the paper's Table 2: two departments (clients), women (group 0) and men (group 1).

    Department 0 accepts 20% of 90 women and 10 men, department 1 accepts 80% of 10 women and
    90 men. The statistical parity gap is 0 in both and 0.48 overall, 26% against 74%. All
    applicants are qualified (label 1), so equal opportunity says the same.
    """
    applicants = ((90, 10), (10, 90))
    percent = (20, 80)
    cells = []
    for k, group in np.ndindex(2, 2):
        accepted = applicants[k][group] * percent[k] // 100
        cells += [(k, group, 1, accepted), (k, group, 0, applicants[k][group] - accepted)]
    return _example(cells, labels=(1,))


def _example(cells: list[tuple[int, int, int, int]], *, labels: tuple[int, ...]) -> Example:
    """Make rows from cells of (client, group, decision, rows), once with each of the labels."""
    table = np.array(cells, dtype=np.int64)
    rows = np.repeat(table[:, :3], table[:, 3], axis=0)
    clients, groups, decisions = np.tile(rows, (len(labels), 1)).T
    return Example(decisions, np.repeat(labels, table[:, 3].sum()), groups, clients)


def _at_least_two(clients: int) -> int:
    check_integer("clients", clients, most=MAX_CLIENTS)
    if clients < 2:
        raise FedgftError(f"clients must be 2 or more, or local is global; it is {clients}")
    return clients
