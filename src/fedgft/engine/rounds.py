"""One round of all runs:

    cohort -> sums of the received model -> prices -> local training -> weights -> server step

What differs between methods stands in the algorithm's slots, what differs between machines
in the executor, and what differs between runs (seed, data, lam, beta, learning rate) in
arrays with one entry a run.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedgft.engine.book import Book, Units
from fedgft.engine.schedule import EVERY_ROW, keys, learning_rate, sample
from fedgft.engine.settings import Settings
from fedgft.engine.task import Executor, Task
from fedgft.federated import Algorithm, Cohort
from fedgft.metrics import Tally
from fedgft.models import Model
from fedgft.optim import Moments
from fedgft.types import FedgftError


@dataclass(frozen=True)
class State:
    """Everything that is carried from round to round."""

    params: Any  # (run, p), the executor's array
    cotangents: Any  # the objective's last message
    weighting: Any
    server: Any
    kept: Moments | None  # all clients' optimisers, where they remember; changed in place
    tally: Tally | None = None  # of params on every client, if that has been measured


@dataclass(frozen=True, eq=False)
class Rounds:
    book: Book
    model: Model
    algorithm: Algorithm
    settings: Settings
    executor: Executor
    seeds: np.ndarray  # (run,), uint64
    lr: np.ndarray  # (run,)
    all_clients: Cohort

    def init(self, params: np.ndarray | None) -> State:
        if params is None:
            params = np.stack([self._random(seed) for seed in self.seeds])
        elif params.shape[-1:] != (expected := self._random(self.seeds[0]).shape):
            raise FedgftError(f"init has shape {params.shape}; a {self.model.name} model here "
                              f"has {expected[0]} parameters")  # fmt: skip
        block = self.executor.place(np.broadcast_to(params, (self.book.runs, params.shape[-1])))
        units = self.book.runs * (1 if self.settings.state == "shared" else self.book.num_clients)
        return State(
            params=block,
            cotangents=self.algorithm.objective.init(),
            weighting=self.algorithm.weighting.init(self.book.sizes),
            server=self.algorithm.server.init(block),
            kept=None if self.settings.state == "reset" else self.executor.moments(units),
        )

    def step(self, state: State, t: int) -> State:
        """Round t, counted from zero."""
        weighting, own_start = self.algorithm.weighting, self.settings.start == "own" and t == 0
        cohort = self._cohort(t)
        units = self.book.clients(cohort)
        received = None if own_start else self._received(state, cohort, units)
        if received is not None:
            message = self.algorithm.objective.message(state.cotangents, cohort, received)
            state = replace(state, cotangents=message)
        begin = self._own_starts(cohort) if own_start else state.params[cohort.run]
        trained = self._train(state, self._task(state, cohort, units, t), cohort, begin)
        seen = None
        if weighting.sees == "trained":
            seen = self.executor.measure(units, trained, np.arange(len(units)))
        coefficients, kept = weighting.coefficients(
            state.weighting, cohort, received=received, trained=seen
        )
        update = self.executor.mix(coefficients, trained, state.params, cohort)
        params, server = self.algorithm.server.step(state.server, state.params, update)
        return replace(state, params=params, server=server, weighting=kept, tally=None)

    def _cohort(self, t: int) -> Cohort:
        if self.settings.cohort is None:
            return self.all_clients
        return sample(self.book.federations, self.settings.cohort, self.settings.sampling,
                      seeds=self.seeds, round=t)  # fmt: skip

    def _received(self, state: State, cohort: Cohort, units: Units) -> Tally | None:
        """The received model's sums on the cohort, if any slot wants to see them."""
        if not self.algorithm.objective.penalties and self.algorithm.weighting.sees == "nothing":
            return None
        if cohort.full and state.tally is not None:
            return state.tally
        return self.executor.measure(units, state.params, units.run)

    def _task(self, state: State, cohort: Cohort, units: Units, t: int) -> Task:
        settings, data = self.settings, self.book.dataset
        classes, cells = len(data.classes), (len(data.classes), len(data.group_names) + 1)
        price = np.zeros((self.book.runs, *cells, classes))
        price += self.algorithm.objective.price(
            state.cotangents, runs=self.book.runs, classes=classes
        )
        weigh = self.algorithm.objective.row_weights
        client = keys(self.seeds[cohort.run], self.book.keys(cohort))[:, None]
        fresh = keys(client, 1 + t, np.arange(settings.epochs)[None, :])
        fixed = np.broadcast_to(client, fresh.shape)
        lr = learning_rate(self.lr, settings.schedule, round=t, rounds=settings.rounds)
        return Task(
            units=units,
            seeds=fixed if settings.batches == "fixed" else fresh,
            noise=fresh,
            batch_size=settings.batch_size,
            most=min((settings.steps or EVERY_ROW) * settings.batch_size, EVERY_ROW),
            lr=lr[cohort.run],
            weights=np.ones((len(units), *cells)) if weigh is None else weigh(units.count),
            price=price[cohort.run],
            mu=self.algorithm.correction.mu,
        )

    def _train(self, state: State, task: Task, cohort: Cohort, block: Any) -> Any:
        objective, at = self.algorithm.objective, self._places(cohort)
        moments = self._recall(state.kept, at)
        if not objective.local_penalties:
            block = self.executor.train(task, block, moments)
        else:  # a client prices its own sums anew each epoch
            own = np.arange(len(cohort))
            for epoch in range(self.settings.epochs):
                tally = self.executor.measure(task.units, block, own)
                local = objective.local_price(tally, run=cohort.run, classes=task.price.shape[-1])
                now = slice(epoch, epoch + 1)
                one = replace(task, seeds=task.seeds[:, now], noise=task.noise[:, now],
                              price=task.price + local)  # fmt: skip
                block = self.executor.train(one, block, moments)
        self._remember(state.kept, moments, cohort)
        return block

    def _places(self, cohort: Cohort) -> np.ndarray:
        """Where the units' optimiser states are kept: each its own, or one a run."""
        if self.settings.state == "shared":
            return cohort.run
        return cohort.run * self.book.num_clients + cohort.client

    def _remember(self, kept: Moments | None, moments: Moments, cohort: Cohort) -> None:
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

    def _recall(self, kept: Moments | None, at: np.ndarray) -> Moments:
        """The optimiser states that these units start the round with."""
        if kept is None:
            return self.executor.moments(len(at))
        moments = self.executor.recall(kept, at)
        moments.forget(self.settings.state)
        return moments

    def _own_starts(self, cohort: Cohort) -> Any:
        seeds = keys(self.seeds[cohort.run], self.book.keys(cohort), 0x57A7)
        return self.executor.place(np.stack([self._random(seed) for seed in seeds]))

    def _random(self, seed: np.uint64) -> np.ndarray:
        data = self.book.dataset
        return self.model.init(
            int(seed), features=data.features.shape[1], classes=len(data.classes)
        )
