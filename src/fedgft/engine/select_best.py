"""Selects the final model among the last rounds, for methods with a target.

Two models per run are kept: the best model so far, and the model that forms the best mixture with
it. If the gap of the best model is above its target after the last round, mixtures of the two
models are tried: if one model favors the first group and the other model the second group, a
mixture of both may favor neither.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedgft.algorithms import Cohort, Objective
from fedgft.engine.plan import make_cohort
from fedgft.engine.state import CandidateModel, State
from fedgft.metrics.metric import namespace
from fedgft.optimizers import array_like
from fedgft.sums import Sums

GAP_TOLERANCE = 0.002  # a gap at most this far above its target counts as having reached it
GAP_WEIGHT = 2.0  # points of accuracy that outweigh one point of gap above the target
MIXTURE_SHARES = np.linspace(0.05, 0.95, 19)  # shares of the second model in a mixture of two
MAX_TRIALS = 8  # largest number of mixtures that are measured after the last round


def score_models(objective: Objective, sums: Sums, clients: Sums | None) -> np.ndarray:
    """Return accuracy - `GAP_WEIGHT` * (gap above the target), (r,); -inf if that is not estimable.

    With local targets, the largest local gap above its target counts as much as the gap of all
    rows, so that a model which meets both targets is preferred.

    Parameters
    ----------
    objective
        The objective, which holds the targets.
    sums
        The sums over all clients of each run, (r, ...).
    clients
        The sums of each client, (r, client, ...); needed only with local targets.
    """
    runs = len(sums.count)
    one_client_each = make_cohort(runs * [np.zeros(1, int)], runs * [np.ones(1)], full=True)
    excess = objective.excess(one_client_each, sums)
    found = sums.accuracy() - GAP_WEIGHT * np.maximum(excess - GAP_TOLERANCE, 0.0)
    if objective.local_controllers and clients is not None:
        found -= GAP_WEIGHT * np.maximum(objective.local_excess(clients) - GAP_TOLERANCE, 0.0)
    return np.where(np.isfinite(found), found, -np.inf)


def split_runs(clients: Sums, runs: int) -> Sums:
    """Return the sums (r, client, ...) from the sums of all clients of all runs, (u, ...)."""
    return clients.map(lambda array: array.reshape(runs, -1, *array.shape[1:]))


def find_mixture(
    objective: Objective, first: CandidateModel, second: CandidateModel
) -> tuple[np.ndarray, np.ndarray]:
    """Return the best share of the second model in a mixture and its expected score, both (r,).

    The sums of a mixture are approximated by linear interpolation between those of the two models.
    """

    def score(share: float) -> np.ndarray:
        sums = _mix(first.sums, second.sums, share)
        if first.clients is None or second.clients is None:
            return score_models(objective, sums, None)
        return score_models(objective, sums, _mix(first.clients, second.clients, share))

    scores = np.stack([score(share) for share in MIXTURE_SHARES])
    return MIXTURE_SHARES[scores.argmax(0)], scores.max(0)


@dataclass(frozen=True, eq=False)
class BestModels:
    """Remembers the two best models of each run.

    Parameters
    ----------
    objective
        The objective, which holds the targets and the share of the last rounds to choose from.
    rounds
        Number of rounds of the simulation.
    exact
        Whether the sums are exact sums of the global model over all clients. Sums over a sampled
        cohort or with noise do not show which model is better, so no model is kept then.
    """

    objective: Objective
    rounds: int
    exact: bool

    def applies(self, t: int) -> bool:
        """Return whether the global model before round t may become the final model."""
        share = self.objective.pick
        return self.exact and share > 0 and t > self.rounds * (1 - share)

    def remember(self, state: State, cohort: Cohort, received: Sums, t: int) -> State:
        """Keep the global model of round t if it is one of the two best; see `applies`."""
        if not self.applies(t):
            return state
        return self._add(state, cohort, received, state.params)

    def refine(self, state: State, cohort: Cohort, measure: Callable[[Any], Sums]) -> State:
        """Try mixtures of the two models in runs whose best model is above its target.

        `measure` returns the sums of each client of the cohort, which is all clients, (u, ...), for
        a block of models.
        """
        for _ in range(MAX_TRIALS):
            best = state.best
            other = state.runner_up
            if best is None or other is None:
                return state
            share, expected = find_mixture(self.objective, best, other)
            missed = (
                score_models(self.objective, best.sums, best.clients) < best.sums.accuracy() - 1e-12
            )
            wanted = missed & (expected > best.score)
            if not wanted.any():
                return state
            share = array_like(np.where(wanted, share, 0.0), best.params)[:, None]
            params = best.params + share * (other.params - best.params)
            state = self._add(state, cohort, measure(params), params)
        return state

    def _add(self, state: State, cohort: Cohort, measured: Sums, params: Any) -> State:
        """Return the state after comparing one more model per run with the two that are kept.

        `measured`: the models' sums of each client of the cohort, (u, ...).
        """
        sums = measured.map(cohort.sum)
        clients = None
        if self.objective.local_controllers:
            clients = split_runs(measured, len(sums.count))
        score = score_models(self.objective, sums, clients)
        new = CandidateModel(score, params, sums, clients)
        if state.best is None:
            return replace(state, best=new)
        better = new.score >= state.best.score  # the later one of two equally good models
        best = _choose(better, new, state.best)
        rest = _choose(~better, new, state.best)
        other = state.runner_up
        if other is None:
            return replace(state, best=best, runner_up=rest)
        first, second = (find_mixture(self.objective, best, m)[1] for m in (rest, other))
        return replace(state, best=best, runner_up=_choose(first >= second, rest, other))


def _choose(mask: np.ndarray, one: CandidateModel, two: CandidateModel) -> CandidateModel:
    """Take `one` in the runs where the mask (r,) holds, and `two` in the others."""
    sums = two.sums.replaced(mask, one.sums[mask])
    clients = one.clients and two.clients and two.clients.replaced(mask, one.clients[mask])
    column = array_like(mask, one.params)[:, None] > 0
    params = namespace(one.params).where(column, one.params, two.params)
    return CandidateModel(np.where(mask, one.score, two.score), params, sums, clients)


def _mix(one: Sums, two: Sums, share: float) -> Sums:
    """Return (1 - share) one + share two."""
    return one.map(lambda a: (1 - share) * a) + two.map(lambda a: share * a)
