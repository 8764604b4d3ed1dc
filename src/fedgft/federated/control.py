"""A target instead of a strength: the measured gap of decisions sets the prices.

Decisions have no gradient, and scores are not what people are judged by; so each does what it can.
The *hard* rates, from sums that clients send anyway, say how hard to push, and the scores say
where. For every condition and every pair of groups the server holds a multiplier mu of the
constraint rate_i - rate_j <= target, and moves it by a projected proportional-integral rule:

    over  = rate_i - rate_j - target              decisions, all clients
    mu   <- clip(mu + ki over, 0, most)           integral: leaves no offset
    push  = max(0, mu + kp over)                  proportional: damps the swing
    C_i   = 2/G sum_j (push_ij - push_ji)         price of group i's rate; G groups

Clients add <v, statistics of the scores>, with v = sum_i C_i d rate_i / dS taken at the statistics
of decisions. With two groups C_0 = -C_1 is the one constant of the paper's Theorem 5.1. Within the
target mu falls back to zero and nothing is pushed; where no model meets it, `most` keeps the push
finite. ki is in units of what a round can move, the `pace`: learning rate times local steps, up to
a limit.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedgft.errors import FedgftError
from fedgft.federated.cohort import Cohort, client_means
from fedgft.metrics import Kind, Metric, Tally, price
from fedgft.types import Price, Rates, Statistics

FIRM = (8.0, 2.0)  # ki / pace and kp
# Where the event is a decision (predictive parity) a price moves the denominator as well, and the
# rates answer more strongly: pushed as firmly as that, some runs end in "nobody" or "everybody".
GENTLE = (1.0, 1.0)


FASTEST = 0.3  # pace: who makes many steps a round hears of the gap no more often for it


def gains(*, unsure: bool, inertia: bool) -> tuple[float, float]:
    """What share of ki and kp to use: half where what is measured is noisy (a cohort, noise) or a
    round old. A server with inertia swings by itself: little of the integral there, and more of
    what damps."""
    part = 0.5 if unsure else 1.0
    return (part / 8, part * 1.25) if inertia else (part, part)


class Steering(NamedTuple):
    """What the server keeps between rounds."""

    pace: np.ndarray  # (r,)
    share: tuple[float, float] = (1.0, 1.0)  # of ki and of kp
    mu: np.ndarray | None = None  # (r, v, g, g)
    v: Statistics | None = None  # the last message


@dataclass(frozen=True)
class Controlled:
    """`target` is one number or one a run; `kind` says which gap is held against it.

    `pick` is a share of the rounds, counted from the end: of their global models the one with the
    best balance of accuracy and gap, on the federation's own sums, is handed over; 0: the last.
    """

    metric: Metric
    target: float | np.ndarray = 0.0
    kind: Kind = "hard"
    gains: tuple[float, float] | None = None  # ki / pace, kp; None: as above
    most: float = 50.0
    pick: float = 0.6

    def __post_init__(self) -> None:
        if not np.all((np.asarray(self.target) >= 0) & (np.asarray(self.target) < 1)):
            raise FedgftError(f"--target must be at least 0 and below 1, got {self.target}")
        if not 0 <= self.pick <= 1:
            raise FedgftError(f"--pick must lie between 0 and 1, got {self.pick:g}")

    def init(self, pace: np.ndarray, *, share: tuple[float, float] = (1.0, 1.0)) -> Steering:
        return Steering(np.minimum(pace, FASTEST), share)

    def update(self, state: Steering, cohort: Cohort, received: Tally) -> Steering:
        return self.steer(state, self._mean(cohort, received))

    def steer(self, state: Steering, statistics: Statistics) -> Steering:
        """The next prices, from mean statistics (r, 2, v, g).

        A pair without a rate rests: its multiplier stays, and nothing is pushed. Noise can give a
        count below zero or a rate outside [0, 1]; the former is no rate, the latter is clipped.
        """
        there = statistics[..., 1, :, :] > 0
        rates = np.where(there, self.metric.rates(statistics).clip(0.0, 1.0), np.nan)
        over = rates[..., :, None] - rates[..., None, :] - self._targets(len(rates))
        known = np.isfinite(over)
        over = self._weights(rates) * np.where(known, over, 0.0)
        ki, kp = (gain * part for gain, part in zip(self._gains(rates), state.share, strict=True))
        mu = np.zeros_like(over) if state.mu is None else state.mu
        mu = np.clip(mu + ki * state.pace[:, None, None, None] * over, 0.0, self.most)
        push = np.where(known, np.maximum(0.0, mu + kp * over), 0.0)
        dear = 2 / rates.shape[-1] * (push - np.swapaxes(push, -1, -2)).sum(-1)
        return state._replace(mu=mu, v=self.metric.through_rates(dear, statistics))

    def price(self, state: Steering, *, run: np.ndarray, classes: int) -> Price | float:
        return 0.0 if state.v is None else price(self.metric, state.v, classes)[run]

    def excess(self, cohort: Cohort, received: Tally) -> np.ndarray:
        """By how much each run's gap exceeds its target; NaN where it has none."""
        gap = self.metric.readout(self._mean(cohort, received))
        return np.maximum(gap - self._targets(len(gap))[:, 0, 0, 0], 0.0)

    def _mean(self, cohort: Cohort, received: Tally) -> Statistics:
        return cohort.mean(client_means(self.metric, received, self.kind))

    def _targets(self, runs: int) -> np.ndarray:
        return np.broadcast_to(np.asarray(self.target, np.float64), (runs,))[:, None, None, None]

    def _weights(self, rates: Rates) -> np.ndarray:
        return self.metric.weights(rates.shape[-2])[:, None, None]

    def _gains(self, rates: Rates) -> np.ndarray:
        """ki / pace and kp of each condition: (2, v, 1, 1)."""
        if self.gains is not None:
            return np.reshape(self.gains, (2, 1, 1, 1))
        try:
            proper = self.metric.proper_conditions(self.metric.classes(rates.shape[-2]))
        except FedgftError:  # not affine in the scores, so nobody can tell
            proper = np.zeros(rates.shape[-2], bool)
        return np.array([FIRM if p else GENTLE for p in proper]).T[:, :, None, None]
