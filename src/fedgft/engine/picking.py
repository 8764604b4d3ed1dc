"""Which of the last rounds' global models is handed over, where a method has a target."""

from dataclasses import dataclass, replace

import numpy as np

from fedgft.engine.memory import Best, State
from fedgft.engine.task import Executor
from fedgft.federated import Cohort, Objective
from fedgft.metrics import Tally

SLACK = 0.002  # a gap that is this close to its target has reached it
WORTH = 2.0  # points of accuracy that a point of gap above the target is worth, in a pick


@dataclass(frozen=True, eq=False)
class Picking:
    """`exact`: of everybody, of this very model. Sums of a cohort, or noisy ones, are no ground to
    prefer one model to another."""

    objective: Objective
    executor: Executor
    rounds: int
    exact: bool

    def at(self, t: int) -> bool:
        """Whether the model before round t is one of those to pick from."""
        share = self.objective.pick
        return self.exact and share > 0 and t > self.rounds * (1 - share)

    def judged(self, state: State, cohort: Cohort, received: Tally, t: int) -> State:
        """The state that remembers the received model, if it is the best of the last rounds."""
        if not self.at(t):
            return state
        excess = self.objective.excess(cohort, received)
        accuracy = received.map(cohort.sum).accuracy()
        score = accuracy - WORTH * np.maximum(excess - SLACK, 0.0)
        score = np.where(np.isfinite(score), score, -np.inf)
        if state.best is None:
            return replace(state, best=Best(score, state.params))
        better = score >= state.best.score  # the later of two that are equally good, or unknown
        at = self.executor.column(better) > 0
        params = self.executor.where(at, state.params, state.best.params)
        return replace(state, best=Best(np.where(better, score, state.best.score), params))
