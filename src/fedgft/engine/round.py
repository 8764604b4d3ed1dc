"""One round of all runs:

    cohort -> sums of the received model -> prices -> local training -> coefficients -> server step

The slots of the algorithm define the method, the executor depends on the machine, and arrays with
one entry per run hold what differs between runs (seed, data, lam, beta, learning rate).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedgft.algorithms import Cohort, LocalResults
from fedgft.algorithms.controller import Loop, damping
from fedgft.algorithms.loss_rules import SCORE_BINS, ClientReports
from fedgft.engine.client_memory import estimate_sums, start_memory
from fedgft.engine.executors.base import Executor, Task
from fedgft.engine.loop import TrainingLoop
from fedgft.engine.plan import (
    ALL_ROWS,
    REPORT_STREAM,
    Units,
    add_normal,
    derive_seeds,
    learning_rate,
)
from fedgft.engine.select_best import BestModels
from fedgft.engine.state import ClientState, ClientUpdates, State
from fedgft.errors import FedgftError
from fedgft.models import Model
from fedgft.optimizers import Moments, path_length
from fedgft.sums import Sums, concatenate

TrainedModels = Iterable[tuple[slice, Any]]  # positions in the cohort, and the models trained there


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundLoop(TrainingLoop):
    """The rounds of models whose parameters clients train.

    Parameters
    ----------
    model, executor
        The model to train, and the executor that trains it.
    index, algorithm, settings, seeds, lr
        As in `TrainingLoop`.
    """

    model: Model
    executor: Executor

    @cached_property
    def clients(self) -> ClientState:
        """The state that clients keep between rounds."""
        return ClientState(self.index, self.settings, self.executor, self.algorithm.correction)

    @cached_property
    def best_models(self) -> BestModels:
        """The selection of the final model."""
        settings = self.settings
        exact = not self.samples_clients and not settings.noise and settings.norms == "shared"
        return BestModels(self.algorithm.objective, settings.rounds, exact)

    def init(self, params: np.ndarray | None) -> State:
        """Return the state before round 0.

        `params`, (p,) or (run, p), replaces the random initial parameters.
        """
        if params is None:
            params = np.stack([self._random_params(seed) for seed in self.seeds])
        elif params.shape[-1:] != (expected := self._random_params(self.seeds[0]).shape):
            needed = f"a {self.model.name} model here has {expected[0]} parameters"
            raise FedgftError(f"`init` has shape {params.shape}; {needed}")
        every_run = np.broadcast_to(params, (self.index.runs, params.shape[-1]))
        block = self.executor.to_device(every_run)
        algorithm = self.algorithm
        return State(
            params=block,
            objective=algorithm.objective.init(self.index.runs, self.loop()),
            weighting=algorithm.weighting.init(self.index.weighted_sizes),
            local=algorithm.objective.init_local(
                self.index.runs, self.index.num_clients, self.loop()
            ),
            rules=algorithm.objective.init_rules(self._count_rows()),
            server=algorithm.server.init(block[:, : self.executor.spec.trained]),
            **self.clients.init(),
        )

    def step(self, state: State, t: int) -> State:
        """Return the state after round t; rounds are counted from zero.

        With `settings.lag`, clients train with the prices of the previous round, as if their sums
        arrived together with their updates. If the weighting measures trained models, these are
        parked until their coefficients are known.
        """
        algorithm = self.algorithm
        own_start = self.settings.start == "own" and t == 0
        cohort = self.draw_cohort(t)
        units = self.index.clients(cohort)
        nothing = (None, None)
        own_sums, received_sums = nothing if own_start else self.collect_sums(state, cohort, t)
        stale_task = self._task(state, cohort, units, t) if self.settings.lag else None
        if received_sums is not None:
            state = self.best_models.remember(state, cohort, received_sums, t)
            speed = self._speed(t) * self._damping(t)
            state, about, sums = self._estimate(state, cohort, received_sums)
            penalties = algorithm.objective.update(state.objective, about, sums, speed=speed)
            state = replace(state, objective=penalties)
            if state.local is not None and own_sums is not None:
                local = algorithm.objective.update_local(state.local, cohort, own_sums, speed=speed)
                state = replace(state, local=local)
        reports = None if received_sums is None else self._collect(state, cohort, received_sums, t)
        if reports is not None and state.rules:
            rules = algorithm.objective.update_rules(state.rules, cohort, reports)
            state = replace(state, rules=rules)
        task = stale_task or self._task(state, cohort, units, t)
        models = self._train(state, task, cohort, own_start=own_start)
        trained_sums = None
        squared_moves = None
        if algorithm.weighting.sees == "trained":  # models wait for their coefficients
            pending = [
                (at, self._measure_each(units[at], block), self._park(block))
                for at, block in models
            ]
            trained_sums = concatenate([sums for _, sums, _ in pending])
            models = [(at, block) for at, _, block in pending]
        if getattr(algorithm.weighting, "reads_moves", False):
            pending = [
                (at, self._squared_moves(state, block, cohort.part(at)), self._park(block))
                for at, block in models
            ]
            squared_moves = np.concatenate([moves for _, moves, _ in pending])
            models = [(at, block) for at, _, block in pending]
        lengths = path_length(self.settings.optimizer, task.steps, task.lr * task.mu)
        losses = None
        if reports is not None and reports.losses is not None:
            losses = reports.losses.sum((1, 2)) / np.maximum(units.count.sum((1, 2)), 1)
        local = LocalResults(received_sums, trained_sums, lengths, losses, squared_moves)
        coefficients, weighting = algorithm.weighting.coefficients(state.weighting, cohort, local)
        params, server = self._server_step(state, models, coefficients, cohort)
        if (share := self._damping(t)) < 1:
            params = state.params + share * (params - state.params)
        return replace(state, params=params, server=server, weighting=weighting, sums=None)

    def finish(self, state: State) -> State:
        """Return the state with the final model, after the last round.

        For methods with a target, the final model is the best model of the last rounds or a mixture
        of two of them; see `select_best`. Some servers return a mean of models.
        """
        if hasattr(self.algorithm.server, "result"):
            params = 1 * state.params
            params[:, : self.executor.spec.trained] = self.algorithm.server.result(state.server)
            state = replace(state, params=params, sums=None)
        rounds = self.settings.rounds
        if not self.best_models.applies(rounds):
            return state
        sums = self.measure(state, self.all_clients)
        state = self.best_models.remember(state, self.all_clients, sums, rounds)
        state = self.best_models.refine(state, self.all_clients, self._measure_clients)
        assert state.best is not None
        return replace(state, params=state.best.params, sums=None)

    def measure(self, state: State, cohort: Cohort) -> Sums:
        """Return the sums of the global model over the rows of each client.

        With FedBN, each client's own normalization layers are used. Sums of all clients that the
        state already holds are not computed again.
        """
        if cohort.full and state.sums is not None:
            return state.sums
        units = self.index.clients(cohort)
        if state.norms is None:
            return self.executor.measure(units, state.params, units.run)
        parts = []
        for at in self._chunks(len(cohort)):
            part = cohort.part(at)
            block = self.clients.personalize(state.norms, part, state.params[part.run])
            parts.append(self._measure_each(units[at], block))
        return concatenate(parts)

    def evaluate(self, state: State) -> tuple[State, Sums]:
        """Measure the test rows and, unless `eval_on` is "test", all clients.

        The sums of the clients are kept in the returned state, where the next round may use them.
        """
        test = self.index.test
        executor = self.executor
        if self.settings.eval_on == "test":
            return state, executor.measure(test, state.params, test.run)
        if state.norms is not None:
            sums = self.measure(state, self.all_clients)
            return replace(state, sums=sums), executor.measure(test, state.params, test.run)
        units = self.index.clients(self.all_clients) + test
        sums = executor.measure(units, state.params, units.run)
        return replace(state, sums=sums[: -len(test)]), sums[-len(test) :]

    @property
    def name(self) -> str:
        """The name of the executor."""
        return self.executor.name

    def parameters(self, state: State) -> np.ndarray:
        """Return the global models, (run, p), in the order of `models.named_tensors`."""
        return self.executor.to_host(state.params)

    def restore(self, array: np.ndarray, on_host: bool) -> Any:
        """Return an array of a snapshot as the executor keeps it; see `Buffers.restore`."""
        return self.executor.buffers.restore(array, on_host)

    def loop(self) -> Loop:
        """Return the delay of the measurements and the caution that their noise requires."""
        settings = self.settings
        algorithm = self.algorithm
        remembers = algorithm.correction.learns_from != "nothing"
        uncertain = self.samples_clients or settings.noise > 0 or remembers
        caution = (0.5 if uncertain else 1.0) * (0.5 if algorithm.server.inertia else 1.0)
        return Loop(delay=2 if settings.lag else 1, caution=caution)

    def _train(self, state: State, task: Task, cohort: Cohort, *, own_start: bool) -> TrainedModels:
        """Train the cohort, in chunks of as many clients as the executor trains at a time.

        Yields the positions of each chunk in the cohort and its trained models. The clients' state
        is complete in `state`, in place, only after all chunks have been consumed.
        """
        updates = ClientUpdates(self.clients, state)
        epochwise = bool(self.algorithm.objective.local_penalties)
        learns_from_move = self.algorithm.correction.learns_from == "move"
        for at in self._chunks(len(cohort)):
            part = cohort.part(at)
            block = self._own_starts(part) if own_start else state.params[part.run]
            block = self.clients.personalize(state.norms, part, block)
            start = 1 * block if learns_from_move else None
            chunk, moments = updates.begin(task.part(at), part, epochwise=epochwise)
            if epochwise:
                block = self._train_epochwise(chunk, part, block, moments)
            else:
                block = self.executor.train(chunk, block, moments)
            updates.end(chunk, part, moments, block=block, start=start)
            yield at, block
            del block, start, chunk, moments  # free memory before the next chunk
        updates.finish()

    def _train_epochwise(
        self, task: Task, cohort: Cohort, block: Any, moments: Moments | None
    ) -> Any:
        """Train with local penalties: each client sets prices from its own sums before every epoch.

        The center of the proximal term is the model at the start of the round.
        """
        origin = 1 * block
        objective = self.algorithm.objective
        classes = task.price.shape[-1]
        for epoch in range(self.settings.epochs):
            sums = self._measure_each(task.units, block)
            local = objective.local_price(sums, run=cohort.run, classes=classes)
            if self.index.row_weights is not None:
                local = local * _per_weight(task.units)[:, None, None, None]
            priced = task.epoch(epoch, task.price + local, origin)
            block = self.executor.train(priced, block, moments)
        return block

    def _server_step(
        self, state: State, models: TrainedModels, coefficients: np.ndarray, cohort: Cohort
    ) -> tuple[Any, Any]:
        """Apply the server's step to the trained parameters, and average buffers (running means).

        Buffers are averaged with the cohort's weights, because the coefficients of a weighting need
        not sum to one. Models are added chunk by chunk, so that only one chunk is in memory.
        """
        executor = self.executor
        trained = executor.spec.trained
        has_buffers = trained < state.params.shape[1]
        old_buffers = state.params[:, trained:]
        update = None
        change = None  # of the buffers
        for at, block in models:
            part = cohort.part(at)
            update = executor.mix(coefficients[at], block, state.params, part, update)
            if has_buffers:
                buffers = block[:, trained:]
                change = executor.mix(part.weight, buffers, old_buffers, part, change)
            del block
        assert update is not None
        params = state.params + update
        old = state.params[:, :trained]
        step = self.algorithm.server.step
        params[:, :trained], server = step(state.server, old, update[:, :trained])
        if has_buffers:
            params[:, trained:] = old_buffers + change
        return params, server

    def _estimate(self, state: State, cohort: Cohort, sums: Sums) -> tuple[State, Cohort, Sums]:
        """Return the sums that a target is compared with, and the clients that they are of.

        They are those of the cohort; or, where clients are sampled, an estimate of the sums of all
        clients from what each has sent last.
        """
        is_used = self.samples_clients and self.algorithm.objective.controllers
        if not is_used or self.settings.noise:
            return state, cohort, sums
        memory = state.memory
        if memory is None:
            runs, clients = self.index.runs, self.index.num_clients
            memory = start_memory(sums, runs=runs, clients=clients)
        about, estimate = estimate_sums(memory, cohort, sums, self.clients.positions(cohort))
        return replace(state, memory=memory), about, estimate

    def _collect(self, state: State, cohort: Cohort, sums: Sums, t: int) -> ClientReports:
        """Return what the cohort reports: its sums, and losses and histograms if a slot reads them.

        Noise is added to losses and histograms as to sums.
        """
        weighs_losses = getattr(self.algorithm.weighting, "reads_losses", False)
        reads = self.algorithm.objective.reads | ({"losses"} if weighs_losses else set())
        if not reads:
            return ClientReports(sums)
        units = self.index.clients(cohort)
        bins = SCORE_BINS if "histograms" in reads else 0
        found = self.executor.report(units, state.params, units.run, bins=bins)
        if self.settings.noise:
            noise = self.settings.noise
            found = add_normal(
                found, cohort, noise, seeds=self.seeds, round=t, stream=REPORT_STREAM
            )
        losses, logits, histograms = found
        return ClientReports(sums, losses, logits, histograms if bins else None)

    def _count_rows(self) -> np.ndarray:
        """Return the number of rows by run, client, label and group."""
        units = self.index.clients(self.all_clients)
        return units.count.reshape(self.index.runs, self.index.num_clients, *units.count.shape[1:])

    def _squared_moves(self, state: State, block: Any, cohort: Cohort) -> np.ndarray:
        """Return the squared distance of each trained model from the one that it started from."""
        moved = self.executor.to_host(block - state.params[cohort.run])
        with np.errstate(over="ignore", invalid="ignore"):  # of a model that has diverged
            return np.square(moved.astype(np.float64)).sum(1)

    def _park(self, block: Any) -> Any:
        return self.executor.buffers.park(block)

    def _chunks(self, units: int) -> list[slice]:
        """Positions of the units that are trained together."""
        size = self.executor.spec.chunk or max(units, 1)
        return [slice(i, min(i + size, units)) for i in range(0, units, size)]

    def _measure_each(self, units: Units, block: Any) -> Sums:
        """Sums of each unit under its own model."""
        return self.executor.measure(units, block, np.arange(len(units)))

    def _measure_clients(self, params: Any) -> Sums:
        """Sums of each run's model over the rows of each client, (u, ...)."""
        units = self.index.clients(self.all_clients)
        return self.executor.measure(units, params, units.run)

    def _speed(self, t: int) -> float:
        """The learning rate of round t relative to round 0."""
        schedule = self.settings.schedule
        rounds = self.settings.rounds
        return float(learning_rate(np.ones(1), schedule, round=t, rounds=rounds)[0])

    def _damping(self, t: int) -> float:
        """Return the share of the server's step that is taken in round t."""
        if not self.algorithm.objective.damps:
            return 1.0
        return damping(t, self.settings.rounds, self._speed(t))

    def _task(self, state: State, cohort: Cohort, units: Units, t: int) -> Task:
        """The local training of round t, with the prices of `state`.

        Seeds depend on (seed of the run, client, round, epoch); with ``batches="fixed"`` the order
        of rows depends on the run and the client only.
        """
        settings = self.settings
        data = self.index.dataset
        runs = self.index.runs
        classes = len(data.classes)
        cells = (classes, data.num_cells + 1)
        objective = self.algorithm.objective
        price = objective.price(state.objective, runs=runs, classes=classes)
        by_unit = (np.zeros((runs, *cells, classes)) + price)[cohort.run]
        if state.local is not None:
            by_unit += objective.own_price(state.local, cohort, classes=classes)
        terms = objective.terms(state.rules, cohort, units.count, by_unit)
        if self.index.row_weights is not None:
            terms = terms.scaled(_per_weight(units))
        client_keys = derive_seeds(self.seeds[cohort.run], self.index.keys(cohort))[:, None]
        fresh = derive_seeds(client_keys, 1 + t, np.arange(settings.epochs)[None, :])
        fixed = np.broadcast_to(client_keys, fresh.shape)
        lr = learning_rate(self.lr, settings.schedule, round=t, rounds=settings.rounds)
        return Task(
            units=units,
            seeds=fixed if settings.batches == "fixed" else fresh,
            noise=fresh,
            batch_size=settings.batch_size,
            max_rows=min((settings.steps or ALL_ROWS) * settings.batch_size, ALL_ROWS),
            min_batch=self.executor.spec.min_batch,
            lr=lr[cohort.run],
            weights=terms.weights * np.ones_like(units.count),
            price=terms.price + np.zeros_like(by_unit),
            labels=terms.labels,
            curve=terms.curve,
            mu=self.algorithm.correction.mu,
        )

    def _own_starts(self, cohort: Cohort) -> Any:
        """Return a random initial model for each client."""
        seeds = derive_seeds(self.seeds[cohort.run], self.index.keys(cohort), 0x57A7)
        return self.executor.to_device(np.stack([self._random_params(seed) for seed in seeds]))

    def _random_params(self, seed: np.uint64) -> np.ndarray:
        data = self.index.dataset
        features = data.features.shape[1]
        return self.model.init(int(seed), features=features, classes=len(data.classes))


def _per_weight(units: Units) -> np.ndarray:
    """Return 1 / the mean weight of each unit's rows, (u,); 0 if no row of a unit counts.

    Executors multiply a row's gradient by its weight and divide the sum by the number of rows in
    the batch. With this factor, the gradient of all rows is their weighted mean, and that of a
    random batch has this expectation.
    """
    total = units.count.sum((1, 2))
    return np.divide(units.sizes, total, out=np.zeros(len(units)), where=total > 0)
