"""The clients' last sums: an estimate of the sums over all clients where only a few take part.

The mean over a sampled cohort differs from that over all clients, most of all where clients differ.
The server therefore remembers the last sums N_kg of each client k over its D_kg rows of label and
group g. A report that is t rounds old counts with the weight KEPT^t. The cohort C of this round
sends N'_kg, and of the other clients R is known:

    N_g = sum_{k in C} N'_kg + sum_{k in R} KEPT^t_k N_kg + r_g sum_{k in C, seen} (N'_kg - N_kg)
    r_g = min(sum_{k in R} KEPT^t_k D_kg / sum_{k in C, seen} D_kg, MOST_REPEATED)

The last term moves the other clients as the cohort has moved since its own last reports (as in
SAGA, Defazio et al., 2014), unless the cohort has too few rows of the group to tell. Because old
reports fade, the estimate is that of the last few cohorts where clients rarely take part twice. The
cost of a round depends on the cohort, not on the number of clients.
"""

from typing import NamedTuple

import numpy as np

from fedgft.algorithms import Cohort
from fedgft.engine.plan import make_cohort
from fedgft.sums import Sums

KEPT = 0.7
"The weight of a report that is one round old."
MOST_REPEATED = 2.5
"The largest factor by which a cohort's change is applied to the other clients."


class ClientMemory(NamedTuple):
    """What the server remembers of all clients; arrays are changed in place.

    `last` (run x client, ...) holds the last sums of each client, `round` (run x client,) the
    number of the report, counted from 1 (0: none), and `total` (run, ...) the sum of `last` over
    the clients of each run, in which old reports count less. `reports` (1,) counts the rounds.
    """

    last: Sums
    round: np.ndarray
    total: Sums
    reports: np.ndarray


def start_memory(received: Sums, *, runs: int, clients: int) -> ClientMemory:
    """Return an empty memory.

    Parameters
    ----------
    received
        Sums of the shape that clients send.
    runs, clients
        The number of runs, and of clients per run.
    """
    last, total = (
        received.map(lambda array, n=n: np.zeros((n, *array.shape[1:])))
        for n in (runs * clients, runs)
    )
    return ClientMemory(last, np.zeros(runs * clients, int), total, np.zeros(1, int))


def estimate_sums(
    memory: ClientMemory, cohort: Cohort, received: Sums, positions: np.ndarray
) -> tuple[Cohort, Sums]:
    """Return the estimated sums over all clients that have reported; remember the new sums.

    Parameters
    ----------
    memory
        What the server remembers; changed in place.
    cohort, received
        The clients that take part, and their sums, (u, ...).
    positions
        The position of each of them in the memory, (u,).

    Returns
    -------
    cohort, sums
        One unit per run that stands for all clients, and its sums, (r, ...).
    """
    memory.reports[:] += 1
    now = int(memory.reports[0])
    seen = memory.round[positions] > 0
    old = memory.last[positions]
    weight = KEPT ** (now - memory.round[positions]) * seen
    for total, last in zip(memory.total.arrays, old.arrays, strict=True):
        total *= KEPT
        total -= cohort.sum(_weigh(weight, last))  # what is left is that of the other clients
    change = received.map(lambda a, b: _weigh(1.0 * seen, a - b), old).map(cohort.sum)
    again = cohort.sum(_weigh(1.0 * seen, received.count))
    rest = np.maximum(memory.total.count, 0.0)
    scale = np.where(again > 0, rest / np.where(again > 0, again, 1.0), 0.0)
    scale = np.minimum(scale, MOST_REPEATED)[..., None]
    sent = received.map(cohort.sum)
    for total, fresh in zip(memory.total.arrays, sent.arrays, strict=True):
        total += fresh
    count = memory.total.count
    score, decision = (
        np.clip(total + scale * moved, 0.0, count[..., None])
        for total, moved in (
            (memory.total.score, change.score),
            (memory.total.decision, change.decision),
        )
    )
    for last, new in zip(memory.last.arrays, received.arrays, strict=True):
        last[positions] = new
    memory.round[positions] = now
    runs = len(count)
    every = make_cohort(runs * [np.zeros(1, int)], runs * [np.ones(1)], full=False)
    return every, Sums(count.copy(), score, decision, axis=received.axis)


def _weigh(weight: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Multiply the values (u, ...) of each unit by its weight (u,)."""
    return weight.reshape(-1, *[1] * (values.ndim - 1)) * values
