"""Local fairness is not global fairness: Theorem 4.1 and Simpson's paradox as rows of data.

Both directions of the theorem, for any number of clients. They also show Corollary 4.2: a
gap that is positive while all local gaps are zero is no linear combination of them.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedgft.errors import FedgftError
from fedgft.sums import Sums, stack
from fedgft.types import Index
from fedgft.validation import check_integer, check_number

MAX_CLIENTS = 100_000


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

    Client 0 accepts everyone and holds m rows of group 0 and one of group 1; each of the K - 1
    others accepts no one and holds one row of group 0 and h of group 1. Globally

        F = 1 - (K - 1)/(m + K - 1) - 1/(1 + (K - 1) h),

    and m and h make each of the two losses smaller than (1 - C)/2. They are never zero, for a
    client needs rows of both groups to be fair: C = 1 is out of reach. Every row is there with
    both labels, so this holds for sp, eop, eo and fpr at once, and `swapped` for cal.
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

    Even clients accept the share R >= C of group 0 and none of group 1, odd clients the other
    way round, and both groups are equally large on a client. Its size is proportional to the
    number of clients of the other kind, so the kinds hold half of all rows each and both
    groups have the rate R/2. Metrics as in `locally_fair_globally_unfair`.
    """
    if not 0 < check_number("gap", gap) <= 1:
        raise FedgftError(f"gap must lie above 0 and not above 1; it is {gap}")
    odd = _at_least_two(clients) // 2
    accepted = math.ceil(20 * gap)  # R in steps of 1/20
    cells = []
    for k in range(clients):
        scale = odd if k % 2 == 0 else clients - odd
        favored = k % 2
        other = 1 - k % 2
        cells += [(k, favored, 1, scale * accepted), (k, favored, 0, scale * (20 - accepted))]
        cells += [(k, other, 0, scale * 20)]
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
    clients, groups, decisions = np.repeat(table[:, :3], table[:, 3], axis=0).T
    repeated = (np.tile(column, len(labels)) for column in (decisions, groups, clients))
    decisions, groups, clients = repeated
    return Example(decisions, np.repeat(labels, table[:, 3].sum()), groups, clients)


def _at_least_two(clients: int) -> int:
    check_integer("clients", clients, most=MAX_CLIENTS)
    if clients < 2:
        raise FedgftError(f"clients must be 2 or more, or local is global; it is {clients}")
    return clients
