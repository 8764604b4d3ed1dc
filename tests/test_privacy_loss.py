"""Releases reveal no more than the accounted epsilon; the same test finds planted faults.

hardening/privacy.py is the long version, with more tables and draws.
"""

import numpy as np
import pytest

from fedgft.auditing import measure
from fedgft.privacy.noise import Budget, Noise, draw_discrete_gaussian, honest_clients
from fedgft.privacy.suppression import add_noise_to_site
from fedgft.site_sums import COUNT
from fedgft.sums import Sums
from neighboring_tables import epsilon_lower_bound, likelihood_ratio

pytestmark = pytest.mark.slow

DRAWS = 4000
DELTA = 0.01


def releases(rows: float, budget: Budget, *, too_small: float = 1.0) -> np.ndarray:
    """Many releases of one cell: its count, and the sum of scores, by the client's own code."""
    noise = budget.noise("soft")
    loud = Noise(noise.kind, noise.count / too_small, noise.value / too_small)
    count = np.full((DRAWS, 1, 1), rows)
    score = np.stack((0 * count, count), -1)  # every score is 1: the most that a row can add
    sent = loud.add(Sums(count, score, score), None)
    table = np.stack((sent.count, sent.score[..., 1]), -1)[:, 0, 0]
    return likelihood_ratio(table, np.ones(2), np.array([noise.count, noise.value]))


@pytest.mark.parametrize("fault", [1.0, 3.0])
def test_noisy_sums_show_no_more_than_epsilon(fault: float) -> None:
    """One row more or less; noise a third as large as accounted is found out."""
    budget = Budget(1.0, DELTA)
    found = epsilon_lower_bound(
        releases(40.0, budget, too_small=fault), releases(41.0, budget, too_small=fault), DELTA
    )
    assert found > 1.0 if fault > 1 else found <= 1.0, found


@pytest.mark.parametrize("fault", ["none", "shares too small"])
def test_secure_sums_show_no_more_than_epsilon(fault: str) -> None:
    """Of seven sites, two give their shares away, and the noise of the others is as accounted."""
    budget = Budget(1.0, DELTA)
    clients = 7
    noise = budget.noise("soft")
    unit = 2**20
    share = noise.share(clients)
    smaller = 3.0 if fault == "shares too small" else 1.0

    def sums(rows: float) -> np.ndarray:
        """The count, which has half of its budget, and the score, in a total of one cell."""
        total = np.full((DRAWS, 2), rows * unit)
        for _ in range(honest_clients(clients)):
            for column, deviation in enumerate((share.count, share.value)):
                total[:, column] += draw_discrete_gaussian(DRAWS, deviation * unit / smaller)
        deviation = np.array([noise.count * 2**0.5, noise.value])
        return likelihood_ratio(total / unit, np.ones(2), deviation)

    found = epsilon_lower_bound(sums(40.0), sums(41.0), DELTA)
    assert found <= 1.0 if fault == "none" else found > 1.0, found


@pytest.mark.parametrize("fault", [1.0, 2.0])
def test_a_noisy_site_file_shows_no_more_than_epsilon(fault: float) -> None:
    """`measure(epsilon=1)` of two tables with one row more or less; epsilon 2 is found out."""

    def files(rows: int) -> np.ndarray:
        groups = np.repeat(["a", "b"], [rows, 20])
        ones = np.ones(rows + 20, int)
        values = {"group": ("a", "b")}
        exact = measure(
            ones, ones, sensitive_features=groups, site="n", classes=[0, 1], values=values
        )
        draws = (
            add_noise_to_site(exact, fault, 0.0, values=values, declared=True) for _ in range(1000)
        )
        return np.array([d.sites["n"].tables[("a",)][1, 1, COUNT] for d in draws])

    found = epsilon_lower_bound(files(30), files(31), 0.0)
    assert found <= 1.0 if fault == 1 else found > 1.0, found
