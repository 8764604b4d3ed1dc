"""What is carried from round to round, and what clients remember of their last one."""

from dataclasses import dataclass, replace
from functools import cached_property
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
    """A global model that is kept because of its accuracy and gap."""

    score: np.ndarray  # (r,): accuracy less what the gap is above its target
    params: Any  # (run, p)
    tally: Tally  # (r, ...): over all clients


@dataclass(frozen=True)
class Variates:
    """SCAFFOLD's c of each run, and c_k of every client; changed in place."""

    server: Any  # (run, w)
    own: Any  # (run x client, w)


@dataclass(frozen=True)
class Norms:
    """Every client's own normalising layers (FedBN), once it has trained; changed in place."""

    own: Any  # (run x client, l)
    known: np.ndarray  # (run x client,)


@dataclass(frozen=True)
class State:
    """Everything that is carried from round to round."""

    params: Any  # (run, p), the executor's array
    objective: Any  # what its penalties remember
    weighting: Any
    server: Any
    kept: Moments | None  # all clients' optimisers, where they remember; changed in place
    variates: Variates | None = None
    norms: Norms | None = None
    best: Best | None = None
    other: Best | None = None  # the one that a mixture with the best would gain most from
    tally: Tally | None = None  # of params on every client, if that has been measured


@dataclass(frozen=True, eq=False)
class Memory:
    """Finds each unit's own in the arrays of all clients."""

    book: Book
    settings: Settings
    executor: Executor

    @cached_property
    def totals(self) -> np.ndarray:
        """(run,): rows of all clients."""
        return self.book.sizes.sum(1)

    def moments(self) -> Moments | None:
        if self.settings.state == "reset":
            return None
        if self.settings.state == "shared":  # one a run, like the model itself
            m, v = (self.executor.zeros(self.book.runs) for _ in range(2))
        else:
            units, width = self.book.runs * self.book.num_clients, self.executor.zeros(0).shape[1]
            m, v = (self.executor.stored(units, width) for _ in range(2))
        return Moments(m, v, np.zeros((len(m), 2), np.int64))

    def variates(self) -> Variates:
        runs, server = self.book.runs, self.executor.zeros(self.book.runs)
        return Variates(server, self.executor.stored(runs * self.book.num_clients, server.shape[1]))

    def norms(self) -> Norms | None:
        if self.settings.norms == "shared":
            return None
        clients = self.book.runs * self.book.num_clients
        own = self.executor.stored(clients, len(self.executor.local()))
        return Norms(own, np.zeros(clients, bool))

    def personal(self, norms: Norms | None, cohort: Cohort, block: Any) -> Any:
        """Each unit's model with the layers that are its own; `block` is changed in place."""
        if norms is None:
            return block
        at, local = self.own(cohort), self.executor.local()
        known = np.flatnonzero(norms.known[at])
        block[known[:, None], local] = self.executor.out(norms.own, at[known])
        return block

    def own(self, cohort: Cohort) -> np.ndarray:
        return cohort.run * self.book.num_clients + cohort.client

    def places(self, cohort: Cohort) -> np.ndarray:
        """Where the units' optimiser states are kept: each its own, or one a run."""
        return cohort.run if self.settings.state == "shared" else self.own(cohort)


@dataclass(eq=False)
class Ledger:
    """One round's changes to what clients remember: units come and go in waves, and whatever is a
    mean over all of them is settled at the end."""

    memory: Memory
    state: State
    cohort: Cohort
    change: Any = None  # of SCAFFOLD's c
    moved: Any = None  # of the shared v
    older: Any = 0.0  # and of its age

    def open(self, task: Task, cohort: Cohort, *, brief: bool) -> tuple[Task, Moments]:
        """The wave's task with c - c_k and room for its gradients, and its optimisers' states;
        `brief`: it is trained in one go."""
        executor, state = self.memory.executor, self.state
        if state.variates is not None:
            own = executor.out(state.variates.own, self.memory.own(cohort))
            drift = state.variates.server[cohort.run] - own
            task = replace(task, drift=drift, gradients=executor.zeros(len(cohort)))
        if state.kept is None:
            return task, executor.moments(len(cohort), brief=brief)
        moments = executor.recall(state.kept, self.memory.places(cohort))
        moments.forget(self.memory.settings.state)
        return task, moments

    def close(self, task: Task, cohort: Cohort, moments: Moments, block: Any) -> None:
        """The wave has trained."""
        executor, state, memory = self.memory.executor, self.state, self.memory
        if state.norms is not None:
            at = memory.own(cohort)
            executor.back(state.norms.own, at, block[:, executor.local()])
            state.norms.known[at] = True
        if state.variates is not None:
            self._learn(state.variates, task, cohort)
        if (kept := state.kept) is None:
            return
        at = memory.places(cohort)
        if memory.settings.state == "shared":  # the server's mean of v, and its age
            self.moved = executor.mix(cohort.weight, moments.v, kept.v, cohort, self.moved)
            self.older = self.older + np.bincount(
                cohort.run,
                cohort.weight * (moments.steps[:, 1] - kept.steps[at, 1]),
                len(kept.steps),
            )
        else:
            executor.back(kept.m, at, moments.m)
            executor.back(kept.v, at, moments.v)
            kept.steps[at] = moments.steps

    def _learn(self, variates: Variates, task: Task, cohort: Cohort) -> None:
        """c_k becomes the round's mean gradient, and c moves by what that changes in the mean
        over all clients, so it stays their mean whoever took part."""
        executor, at = self.memory.executor, self.memory.own(cohort)
        fresh = task.gradients * executor.column(1.0 / np.maximum(task.steps, 1))
        weight = task.units.sizes / self.memory.totals[cohort.run]
        moved = fresh - executor.out(variates.own, at)
        nothing = 0 * variates.server
        self.change = executor.mix(weight, moved, nothing, cohort, self.change)
        executor.back(variates.own, at, fresh)

    def settle(self) -> None:
        """After the last wave."""
        if self.state.variates is not None:
            server = self.state.variates.server
            server[:] = server + self.change
        kept = self.state.kept
        if kept is not None and self.memory.settings.state == "shared":
            kept.v[:] = (kept.v + self.moved).clip(0)  # rounding must not make a mean negative
            kept.steps[:, 1] = np.rint(kept.steps[:, 1] + self.older)
