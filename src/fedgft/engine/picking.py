"""Which of the last rounds' global models is handed over, where a method has a target.

Two models are kept: the best so far, and the one that complements it best. If the best one is above
its target in the end, models between the two are tried: where one favors the first group and the
other the second, a model between them favors neither.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedgft.engine.memory import Best, State
from fedgft.engine.task import Executor
from fedgft.federated import Cohort, Objective
from fedgft.metrics import Tally

SLACK = 0.002  # a gap that is this close to its target has reached it
WORTH = 2.0  # points of accuracy that a point of gap above the target is worth
SHARES = np.linspace(0.05, 0.95, 19)  # of the second model, in a mixture of the two
TRIALS = 8  # mixtures that are measured at the end


def score(objective: Objective, together: Tally) -> np.ndarray:
    """(r,): accuracy less twice the gap above the target; -inf where that is not estimable.

    together: sums over all clients of each run, (r, ...).
    """
    runs = len(together.count)
    one_each = Cohort(
        run=np.arange(runs),
        client=np.zeros(runs, int),
        weight=np.ones(runs),
        bounds=np.arange(runs + 1),
        full=True,
    )
    excess = objective.excess(one_each, together)
    found = together.accuracy() - WORTH * np.maximum(excess - SLACK, 0.0)
    return np.where(np.isfinite(found), found, -np.inf)


def mixture(objective: Objective, first: Tally, second: Tally) -> tuple[np.ndarray, np.ndarray]:
    """(r,), (r,): the best share of the second model and the score that it promises.

    Rates of a model between two are taken to lie between theirs in proportion.
    """

    def mixed(share: float) -> Tally:
        return first.map(lambda a: (1 - share) * a) + second.map(lambda a: share * a)

    scores = np.stack([score(objective, mixed(share)) for share in SHARES])
    return SHARES[scores.argmax(0)], scores.max(0)


@dataclass(frozen=True, eq=False)
class Picking:
    """exact: sums are of all clients and of this very model. Sums of a cohort, or noisy ones, are
    no ground to prefer one model to another."""

    objective: Objective
    executor: Executor
    rounds: int
    exact: bool

    def at(self, t: int) -> bool:
        """Whether the model before round t is one of those to pick from."""
        share = self.objective.pick
        return self.exact and share > 0 and t > self.rounds * (1 - share)

    def judged(self, state: State, cohort: Cohort, received: Tally, t: int) -> State:
        """The state that remembers the received model, if it is one of the two to keep."""
        if not self.at(t):
            return state
        return self._with(state, received.map(cohort.sum), state.params)

    def refined(self, state: State, measure: Callable[[Any], Tally]) -> State:
        """The state after trying mixtures of the two models, in runs above their target.

        measure: sums over all clients, (r, ...), of a block of models.
        """
        for _ in range(TRIALS):
            best, other = state.best, state.other
            if best is None or other is None:
                return state
            share, promised = mixture(self.objective, best.tally, other.tally)
            missed = score(self.objective, best.tally) < best.tally.accuracy() - 1e-12
            wanted = missed & (promised > best.score)
            if not wanted.any():
                return state
            share = self.executor.column(np.where(wanted, share, 0.0))
            params = best.params + share * (other.params - best.params)
            state = self._with(state, measure(params), params)
        return state

    def _with(self, state: State, tally: Tally, params: Any) -> State:
        """The state after one more model."""
        new = Best(score(self.objective, tally), params, tally)
        if state.best is None:
            return replace(state, best=new)
        better = new.score >= state.best.score  # the later of two that are equally good
        best, left = self._choose(better, new, state.best), self._choose(~better, new, state.best)
        if state.other is None:
            return replace(state, best=best, other=left)
        promises = [mixture(self.objective, best.tally, m.tally)[1] for m in (left, state.other)]
        other = self._choose(promises[0] >= promises[1], left, state.other)
        return replace(state, best=best, other=other)

    def _choose(self, first: np.ndarray, one: Best, two: Best) -> Best:
        """Run by run, one where `first` holds, else two."""

        def pick(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return np.where(first.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        at = self.executor.column(first) > 0
        tally = Tally(
            pick(one.tally.count, two.tally.count),
            pick(one.tally.score, two.tally.score),
            pick(one.tally.decision, two.tally.decision),
        )
        params = self.executor.where(at, one.params, two.params)
        return Best(pick(one.score, two.score), params, tally)
