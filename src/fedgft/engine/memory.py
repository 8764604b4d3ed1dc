"""What is carried from round to round, and what clients remember of their last one."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedgft.engine.book import Book
from fedgft.engine.settings import Settings
from fedgft.engine.task import Executor, Task
from fedgft.federated import Cohort
from fedgft.metrics import Tally
from fedgft.optim import Moments


@dataclass(frozen=True)
class Best:
    """The best global model so far: accuracy less what the gap is above its target."""

    score: np.ndarray  # (r,)
    params: Any  # (run, p)


@dataclass(frozen=True)
class Variates:
    """SCAFFOLD's c of each run, and c_k of every client; changed in place."""

    server: Any  # (run, w)
    own: Any  # (run x client, w)


@dataclass(frozen=True)
class State:
    """Everything that is carried from round to round."""

    params: Any  # (run, p), the executor's array
    objective: Any  # what its penalties remember
    weighting: Any
    server: Any
    kept: Moments | None  # all clients' optimisers, where they remember; changed in place
    variates: Variates | None = None
    best: Best | None = None
    tally: Tally | None = None  # of params on every client, if that has been measured


@dataclass(frozen=True, eq=False)
class Memory:
    """Finds each unit's own in the arrays of all clients."""

    book: Book
    settings: Settings
    executor: Executor

    def moments(self) -> Moments | None:
        if self.settings.state == "reset":
            return None
        clients = 1 if self.settings.state == "shared" else self.book.num_clients
        return self.executor.moments(self.book.runs * clients)

    def variates(self) -> Variates:
        runs, clients = self.book.runs, self.book.num_clients
        return Variates(self.executor.zeros(runs), self.executor.zeros(runs * clients))

    def recall(self, kept: Moments | None, cohort: Cohort) -> Moments:
        """The optimiser states that these units start the round with."""
        if kept is None:
            return self.executor.moments(len(cohort))
        moments = self.executor.recall(kept, self._places(cohort))
        moments.forget(self.settings.state)
        return moments

    def remember(self, kept: Moments | None, moments: Moments, cohort: Cohort) -> None:
        """The states as they are after the round; `shared`: the server's mean of v and its age."""
        if kept is None:
            return
        at = self._places(cohort)
        if self.settings.state == "shared":
            moved = self.executor.mix(cohort.weight, moments.v, kept.v, cohort)
            kept.v[:] = (kept.v + moved).clip(0)  # rounding must not make a mean square negative
            older = cohort.mean(moments.steps[:, 1] - kept.steps[at, 1])
            kept.steps[:, 1] = np.rint(kept.steps[:, 1] + older)
        else:
            kept.m[at], kept.v[at], kept.steps[at] = moments.m, moments.v, moments.steps

    def corrected(self, variates: Variates | None, task: Task, cohort: Cohort) -> Task:
        """The task with c - c_k, and room for its gradients."""
        if variates is None:
            return task
        drift = variates.server[cohort.run] - variates.own[self._own(cohort)]
        return replace(task, drift=drift, gradients=self.executor.zeros(len(cohort)))

    def learn(self, variates: Variates | None, task: Task, cohort: Cohort) -> None:
        """c_k becomes the round's mean gradient, and c moves by what that changes in the mean
        over all clients, so it stays their mean whoever took part."""
        if variates is None:
            return
        at, sizes = self._own(cohort), self.book.sizes
        fresh = task.gradients * self.executor.column(1.0 / np.maximum(task.steps, 1))
        weight = sizes[cohort.run, cohort.client] / sizes.sum(1)[cohort.run]
        change = self.executor.mix(weight, fresh - variates.own[at], 0 * variates.server, cohort)
        variates.server[:] = variates.server + change
        variates.own[at] = fresh

    def _own(self, cohort: Cohort) -> np.ndarray:
        return cohort.run * self.book.num_clients + cohort.client

    def _places(self, cohort: Cohort) -> np.ndarray:
        """Where the units' optimiser states are kept: each its own, or one a run."""
        return cohort.run if self.settings.state == "shared" else self._own(cohort)
