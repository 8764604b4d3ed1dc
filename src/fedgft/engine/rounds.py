"""One round of all runs:

    cohort -> sums of the received model -> prices -> local training -> weights -> server step

What differs between methods stands in the algorithm's slots, what differs between machines
in the executor, and what differs between runs (seed, data, lam, beta, learning rate) in
arrays with one entry a run.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedgft.engine.book import Book, Units
from fedgft.engine.memory import Ledger, Memory, State
from fedgft.engine.picking import Picking
from fedgft.engine.schedule import EVERY_ROW, keys, learning_rate, noise, sample
from fedgft.engine.settings import Settings
from fedgft.engine.task import Executor, Task
from fedgft.errors import FedgftError
from fedgft.federated import Algorithm, Cohort, Local
from fedgft.federated.control import Loop, damping
from fedgft.metrics import Tally, concatenate
from fedgft.models import Model
from fedgft.optim import Moments, reach

Waves = Iterable[tuple[slice, Any]]  # some units, and their trained models


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

    @cached_property
    def memory(self) -> Memory:
        return Memory(self.book, self.settings, self.executor)

    @cached_property
    def picking(self) -> Picking:
        settings = self.settings  # with norms of their own, clients have other models than this one
        exact = not self._sampled and not settings.noise and settings.norms == "shared"
        return Picking(self.algorithm.objective, self.executor, self.settings.rounds, exact)

    def init(self, params: np.ndarray | None) -> State:
        if params is None:
            params = np.stack([self._random(seed) for seed in self.seeds])
        elif params.shape[-1:] != (expected := self._random(self.seeds[0]).shape):
            raise FedgftError(f"init has shape {params.shape}; a {self.model.name} model here "
                              f"has {expected[0]} parameters")  # fmt: skip
        block = self.executor.place(np.broadcast_to(params, (self.book.runs, params.shape[-1])))
        algorithm, trained = self.algorithm, self.executor.trained
        return State(
            params=block,
            objective=algorithm.objective.init(self._loop()),
            weighting=algorithm.weighting.init(self.book.sizes),
            server=algorithm.server.init(block[:, :trained]),
            kept=self.memory.moments(),
            variates=self.memory.variates() if algorithm.correction.variates else None,
            norms=self.memory.norms(),
        )

    def step(self, state: State, t: int) -> State:
        """Round t, counted from zero."""
        algorithm, own_start = self.algorithm, self.settings.start == "own" and t == 0
        cohort = self._cohort(t)
        units = self.book.clients(cohort)
        received = None if own_start else self._received(state, cohort, t)
        late = self._task(state, cohort, units, t) if self.settings.lag else None
        if received is not None:
            state = self.picking.judged(state, cohort, received, t)
            fresh = algorithm.objective.update(
                state.objective, cohort, received, speed=self._speed(t) * self._damping(t)
            )
            state = replace(state, objective=fresh)
        task = late or self._task(state, cohort, units, t)
        waves = self._waves(state, task, cohort, own=own_start)
        far, seen = reach(self.settings.optimizer, task.steps, task.lr * task.mu), None
        if algorithm.weighting.sees == "trained":  # the models have to wait for their weights
            held = [(at, self._seen(units[at], b), self.executor.park(b)) for at, b in waves]
            waves, seen = [(at, b) for at, _, b in held], concatenate([t for _, t, _ in held])
        coefficients, kept = algorithm.weighting.coefficients(
            state.weighting, cohort, Local(received, seen, far)
        )
        params, server = self._server_step(state, waves, coefficients, cohort)
        if (part := self._damping(t)) < 1:
            params = state.params + part * (params - state.params)
        return replace(state, params=params, server=server, weighting=kept, tally=None)

    def measure(self, state: State, cohort: Cohort) -> Tally:
        """Sums of the global model over each unit's rows; of its own model, where clients keep
        layers to themselves."""
        units = self.book.clients(cohort)
        if state.norms is None:
            return self.executor.measure(units, state.params, units.run)
        parts = []
        for at in self._parts(len(cohort)):
            part = cohort.part(at)
            block = self.memory.personal(state.norms, part, state.params[part.run])
            parts.append(self._seen(units[at], block))
        return concatenate(parts)

    def _seen(self, units: Units, block: Any) -> Tally:
        return self.executor.measure(units, block, np.arange(len(units)))

    def finish(self, state: State) -> State:
        """After the last round: the model that is handed over."""
        if not self.picking.at(self.settings.rounds):
            return state
        tally = state.tally
        if tally is None:
            tally = self.measure(state, self.all_clients)
        judged = self.picking.judged(state, self.all_clients, tally, self.settings.rounds)
        judged = self.picking.refined(judged, self._measure_all)
        assert judged.best is not None
        return replace(judged, params=judged.best.params, tally=None)

    def _server_step(
        self, state: State, waves: Waves, coefficients: np.ndarray, cohort: Cohort
    ) -> tuple[Any, Any]:
        """What is trained takes the server's step; buffers (running means) take the mean, by the
        cohort's weights: other coefficients need not sum to one. Finished models are folded in
        wave by wave, so that there are never more of them than a wave."""
        at = self.executor.trained
        update = mean = None
        buffers = at < state.params.shape[1]
        for wave, block in waves:
            part = cohort.part(wave)
            update = self.executor.mix(coefficients[wave], block, state.params, part, update)
            if buffers:
                mean = self.executor.mix(
                    part.weight, block[:, at:], state.params[:, at:], part, mean
                )
            del block
        assert update is not None
        moved = state.params + update
        moved[:, :at], server = self.algorithm.server.step(
            state.server, state.params[:, :at], update[:, :at]
        )
        if buffers:
            moved[:, at:] = state.params[:, at:] + mean
        return moved, server

    def _parts(self, units: int) -> list[slice]:
        size = self.executor.wave or max(units, 1)
        return [slice(i, min(i + size, units)) for i in range(0, units, size)]

    def _loop(self) -> Loop:
        """What a controller should know: when it sees the effect of a price, and how noisily."""
        settings, algorithm = self.settings, self.algorithm
        unsure = self._sampled or settings.noise > 0 or algorithm.correction.variates
        caution = (0.5 if unsure else 1.0) * (0.5 if algorithm.server.inertia else 1.0)
        return Loop(delay=2 if settings.lag else 1, caution=caution)

    def _speed(self, t: int) -> float:
        """The learning rate of round t, relative to the first."""
        schedule, rounds = self.settings.schedule, self.settings.rounds
        return float(learning_rate(np.ones(1), schedule, round=t, rounds=rounds)[0])

    def _damping(self, t: int) -> float:
        """The share of the server's step that is taken in round t."""
        if not self.algorithm.objective.damps:
            return 1.0
        return damping(t, self.settings.rounds, self._speed(t))

    def _measure_all(self, params: Any) -> Tally:
        """Sums of each run's model over all clients, (r, ...)."""
        units = self.book.clients(self.all_clients)
        return self.executor.measure(units, params, units.run).map(self.all_clients.sum)

    @property
    def _sampled(self) -> bool:
        """Whether a cohort is drawn, and not just everybody."""
        settings = self.settings
        every = settings.cohort == self.book.num_clients and settings.sampling == "uniform"
        return settings.cohort is not None and not every

    def _most(self) -> int:
        return min((self.settings.steps or EVERY_ROW) * self.settings.batch_size, EVERY_ROW)

    def _cohort(self, t: int) -> Cohort:
        if self.settings.cohort is None or not self._sampled:
            return self.all_clients
        return sample(self.book.federations, self.settings.cohort, self.settings.sampling,
                      seeds=self.seeds, round=t)  # fmt: skip

    def _received(self, state: State, cohort: Cohort, t: int) -> Tally | None:
        """The received model's sums on the cohort, if any slot wants to see them."""
        if not self.algorithm.objective.penalties and self.algorithm.weighting.sees == "nothing":
            return None
        if cohort.full and state.tally is not None:
            tally = state.tally
        else:
            tally = self.measure(state, cohort)
        if not self.settings.noise:
            return tally
        return noise(tally, cohort, self.settings.noise, seeds=self.seeds, round=t)

    def _task(self, state: State, cohort: Cohort, units: Units, t: int) -> Task:
        settings, data = self.settings, self.book.dataset
        classes, cells = len(data.classes), (len(data.classes), len(data.group_names) + 1)
        price = np.zeros((self.book.runs, *cells, classes))
        price += self.algorithm.objective.price(
            state.objective, runs=self.book.runs, classes=classes
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
            most=self._most(),
            lr=lr[cohort.run],
            weights=np.ones((len(units), *cells)) if weigh is None else weigh(units.count),
            price=price[cohort.run],
            mu=self.algorithm.correction.mu,
            least=self.executor.least,
        )

    def _waves(self, state: State, task: Task, cohort: Cohort, *, own: bool) -> Waves:
        """Trained models, as many at a time as the executor holds, and which units they are of."""
        ledger = Ledger(self.memory, state, cohort)
        for at in self._parts(len(cohort)):
            part = cohort.part(at)
            begin = self._own_starts(part) if own else state.params[part.run]
            block = self.memory.personal(state.norms, part, begin)
            brief = not self.algorithm.objective.local_penalties
            one, moments = ledger.open(task.part(at), part, brief=brief)
            block = self._train(one, part, block, moments)
            ledger.close(one, part, moments, block)
            yield at, block
            del begin, block, one, moments  # before there is another wave of them
        ledger.settle()

    def _train(self, task: Task, cohort: Cohort, block: Any, moments: Moments) -> Any:
        objective = self.algorithm.objective
        if not objective.local_penalties:
            return self.executor.train(task, block, moments)
        # a client prices its own sums anew each epoch; a pull back is to the round's start
        origin = 1 * block
        for epoch in range(self.settings.epochs):
            tally = self._seen(task.units, block)
            local = objective.local_price(tally, run=cohort.run, classes=task.price.shape[-1])
            now = slice(epoch, epoch + 1)
            one = replace(task, seeds=task.seeds[:, now], noise=task.noise[:, now],
                          price=task.price + local, origin=origin)  # fmt: skip
            block = self.executor.train(one, block, moments)
        return block

    def _own_starts(self, cohort: Cohort) -> Any:
        seeds = keys(self.seeds[cohort.run], self.book.keys(cohort), 0x57A7)
        return self.executor.place(np.stack([self._random(seed) for seed in seeds]))

    def _random(self, seed: np.uint64) -> np.ndarray:
        data = self.book.dataset
        return self.model.init(
            int(seed), features=data.features.shape[1], classes=len(data.classes)
        )
