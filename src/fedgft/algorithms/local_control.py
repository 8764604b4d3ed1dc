"""Local targets: every client keeps the gap on its own rows within a target of its own.

The rule is that of the controller (`fedgft.algorithms.controller`). Each client k applies it to the
rates of its own rows, which only this client has to know. With the center m_k of its rates:

    above_ki = rate_ki - m_k - local_target/2      below_ki = m_k - local_target/2 - rate_ki
    up_ki    <- clip(up_ki + k (above_ki - PAST_SHARE last above_ki), 0, limit_ki)   and so down_ki
    q_ki     = up_ki - down_ki, less its mean over the client's rows

A client whose gap has never exceeded the local target has the price 0. The client adds q_ki to the
price that the server sends. The server receives the same sums as without local targets.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np

from fedgft.algorithms.controller import Controller, ControllerState, Loop
from fedgft.algorithms.weightings import Cohort, client_means
from fedgft.errors import FedgftError
from fedgft.metrics import Kind, Metric, price
from fedgft.metrics.metric import Price, Value
from fedgft.sums import Sums
from fedgft.validation import check_choice, check_number_per_run

MAX_OWN_PRICE = 64.0
"""The largest price of a row that a client sets. It is higher than that of the server's prices,
because in the mean over clients it counts only as much as the client's rows."""
BY_CLIENT = (  # fields of `ControllerState` whose first axis is the client
    *("gaps", "rates", "up", "down", "above", "below", "prices"),
    *("fall", "moved", "trust", "v", "change"),
)


class LocalState(NamedTuple):
    """What the clients remember of their own gaps; arrays are changed in place.

    `control` has the axis run x client in place of `run`, and the last gap only; its arrays are
    None before the first measurement. `seen` (run x client,) says which clients have measured.
    """

    control: ControllerState
    seen: np.ndarray


@dataclass(frozen=True)
class LocalController:
    """Prices that each client sets for itself, once per round, from its own sums.

    A client has no price in a round where a group has none of its rows of the event: its gap is
    not estimable.

    Parameters
    ----------
    metric
        The metric whose gap is controlled.
    target
        The largest acceptable gap on a client's own rows, as a fraction: one number, or one per
        run.
    kind
        The gap of decisions ("hard") or of scores ("soft").
    """

    metric: Metric
    target: float | np.ndarray
    kind: Kind = "hard"

    def __post_init__(self) -> None:
        check_local_target(self.target)
        check_choice("kind", self.kind, get_args(Kind))

    def init(self, runs: int, clients: int, loop: Loop) -> LocalState:
        """Return the state before the first measurement; `target` must fit the number of runs."""
        check_number_per_run("local_target", self.target, runs=runs)
        control = Controller(self.metric, self.target, self.kind).init(runs, loop)
        return LocalState(control, np.zeros(runs * clients, bool))

    def update(
        self, state: LocalState, cohort: Cohort, own: Sums, *, speed: Any = 1.0
    ) -> LocalState:
        """Return the state after the clients of a cohort have measured the model they received.

        The first model has not been trained, so its gaps set no price.

        Parameters
        ----------
        state
            The state of all clients.
        cohort
            The clients that take part in the round.
        own
            Their sums, (u, ...), without noise: each client reads only its own.
        speed
            How far the coming round moves the model, relative to the first round: one number, or
            (r, 1, 1).
        """
        means = client_means(self.metric, own, self.kind)
        known = np.isfinite(self.metric.readout(means))
        rates = np.where(known[:, None, None], self.metric.rates(means), 0.0).clip(0.0, 1.0)
        rates = np.nan_to_num(rates)
        at = positions(cohort, state)
        is_first = state.control.up is None
        control = _with_zeros(state.control, len(state.seen), rates) if is_first else state.control
        arrays = {name: getattr(control, name) for name in BY_CLIENT}
        new = ~state.seen[at] & known
        arrays["rates"][at[new]] = rates[new]
        arrays["v"][at[~known]] = 0.0
        state.seen[at[known]] = True
        if is_first or not known.any():
            return LocalState(control, state.seen)
        at = at[known]
        run = cohort.run[known]
        loop = tuple(_of_runs(value, run) for value in control.loop)
        part = control._replace(
            loop=loop,
            speed=_of_runs(speed, run),
            pushes=control.pushes[:, at],
            **{name: array[at] for name, array in arrays.items()},
        )
        target = np.broadcast_to(np.asarray(self.target, np.float64), len(cohort.bounds) - 1)
        part = Controller(self.metric, target[run], self.kind).steer(
            part, means[known], max_row_price=MAX_OWN_PRICE
        )
        for name, array in arrays.items():
            array[at] = part.gaps[:, -1:] if name == "gaps" else getattr(part, name)
        control.pushes[:, at] = part.pushes
        return LocalState(control, state.seen)

    def price(self, state: LocalState, cohort: Cohort, *, classes: int) -> Price | float:
        """Return the price of each score for each unit of a cohort; 0 before the first one."""
        if state.control.v is None:
            return 0.0
        return price(self.metric, state.control.v[positions(cohort, state)], classes)

    def gap(self, clients: Sums) -> Value:
        """Return the largest local gap of each run, (r,), from the sums of its clients."""
        return largest_local_gap(self.metric, clients, self.kind)

    def excess(self, clients: Sums) -> Value:
        """Return how far the largest local gap of each run exceeds the target, (r,).

        It is 0 if no client's gap is estimable. `clients`: sums (r, client, ...).
        """
        return np.maximum(np.nan_to_num(self.gap(clients)) - np.asarray(self.target), 0.0)


def check_local_target(target: Any) -> Any:
    """Require a local target of at least 0 and below 1, or one per run; return it."""
    array = np.asarray(check_number_per_run("local_target", target))
    if not np.all((array >= 0) & (array < 1)):
        raise FedgftError(f"must be at least 0 and below 1, got {target}", field="local_target")
    return target


def largest_local_gap(metric: Metric, clients: Sums, kind: Kind) -> Value:
    """Return the largest gap on a client's own rows (...); NaN if no client's gap is estimable.

    Clients where a group has no row of the event have no gap.

    Parameters
    ----------
    metric
        The metric of the gap.
    clients
        The sums of each client, (..., client, label, group).
    kind
        The gap of decisions ("hard") or of scores ("soft").
    """
    gaps = clients.gap(metric, kind)
    largest = np.where(np.isfinite(gaps), gaps, -np.inf).max(-1, initial=-np.inf)
    return np.where(np.isfinite(largest), largest, np.nan)


def positions(cohort: Cohort, state: LocalState) -> np.ndarray:
    """Return the position of each unit of a cohort among all clients of all runs, (u,)."""
    clients = len(state.seen) // (len(cohort.bounds) - 1)
    return cohort.run * clients + cohort.client


def _with_zeros(control: ControllerState, clients: int, rates: np.ndarray) -> ControllerState:
    """Return a state with arrays for all clients, for rates of the shape of `rates` (u, v, g)."""
    shape = (clients, *rates.shape[1:])
    zeros: dict[str, Any] = {name: np.zeros(shape) for name in BY_CLIENT}
    zeros["gaps"] = np.full((clients, 1), np.nan)
    zeros["trust"] += 1.0
    zeros["v"] = np.zeros((clients, 2, *rates.shape[1:]))
    return control._replace(**zeros, pushes=np.zeros((int(control.loop[0]), *shape)))


def _of_runs(value: Any, run: np.ndarray) -> Any:
    """Return the entries of the given runs of an array (r, 1, 1); a number stays as it is."""
    return value[run] if isinstance(value, np.ndarray) and value.ndim else value
