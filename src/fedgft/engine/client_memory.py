"""The clients' last sums: an estimate of the sums over all clients where only a few take part.

The mean over a sampled cohort differs from that over all clients, most of all where clients differ.
The server therefore remembers the last sums of each client. With the rows D_kg of label and group g
at client k, its last sums N_kg, and the cohort C of this round, which sends N'_kg,

    N_g = sum_k N_kg + (sum_k D_kg / sum_{k in C} D_kg) sum_{k in C} (N'_kg - N_kg)

The second term moves the clients that were not asked as the cohort has moved since its own last
reports (as in SAGA, Defazio et al., 2014). What remains of the error is how differently clients
change, not how different they are. Clients that have never reported do not count. The cost of a
round depends on the cohort, not on the number of clients.
"""

from typing import NamedTuple

import numpy as np

from fedgft.algorithms import Cohort
from fedgft.engine.plan import make_cohort
from fedgft.sums import Sums


class ClientMemory(NamedTuple):
    """What the server remembers of all clients; arrays are changed in place.

    `last` (run x client, ...) holds the last sums of each client, `seen` (run x client,) whether it
    has reported, and `total` (run, ...) the sum of `last` over the clients of each run.
    """

    last: Sums
    seen: np.ndarray
    total: Sums


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
    return ClientMemory(last, np.zeros(runs * clients, bool), total)


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
    seen = memory.seen[positions]
    new = received.map(lambda a: _keep(~seen, a))
    change = received.map(lambda a, b: _keep(seen, a - b), memory.last[positions]).map(cohort.sum)
    again = cohort.sum(_keep(seen, received.count))
    rest = memory.total.count - again  # rows of the clients that have reported, but not now
    scale = np.where(again > 0, rest / np.where(again > 0, again, 1.0), 0.0)[..., None]
    arrays = zip(memory.total.arrays, new.map(cohort.sum).arrays, change.arrays, strict=True)
    for total, added, moved in arrays:
        total += added + moved
    count = memory.total.count
    score, decision = (
        np.clip(total + scale * moved, 0.0, count[..., None])
        for total, moved in (
            (memory.total.score, change.score),
            (memory.total.decision, change.decision),
        )
    )
    for last, sent in zip(memory.last.arrays, received.arrays, strict=True):
        last[positions] = sent
    memory.seen[positions] = True
    runs = len(count)
    every = make_cohort(runs * [np.zeros(1, int)], runs * [np.ones(1)], full=False)
    return every, Sums(count.copy(), score, decision)


def _keep(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the values (u, ...) of the units where the mask holds, and zeros elsewhere."""
    return np.where(mask.reshape(-1, *[1] * (values.ndim - 1)), values, 0.0)
