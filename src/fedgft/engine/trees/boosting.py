"""Gradient boosting over the rows of all clients: one tree per round, from sums alone.

For a row with label y and group a, the model's probability p and the price c of its score:

    gradient  w (p - y) + c[y, a] p (1 - p)          hessian  w p (1 - p)

The clients send sums of both by (node, column, bin), so the tree is that of the pooled rows. Prices
follow from the sums of decisions, as for every method. With folds, one more model per fold grows
beside the model and shares its prices; a row's decision, for the prices and for what is reported of
the clients' rows, is that of the model that has not seen the row.
"""

import queue
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from fedgft.algorithms import Algorithm, Cohort, LocalResults
from fedgft.algorithms.controller import Loop, boosting_loop
from fedgft.algorithms.corrections import Proximal
from fedgft.algorithms.servers import Averaging
from fedgft.algorithms.weightings import FedNova, reads_more
from fedgft.engine.loop import TrainingLoop
from fedgft.engine.plan import Units
from fedgft.engine.select_best import score_models, split_runs
from fedgft.engine.state import PACKED_TYPES
from fedgft.engine.threads import run_threads, share_work
from fedgft.engine.trees import kernels
from fedgft.engine.trees.fit import TreeFit, log_shares, round_prices
from fedgft.engine.trees.grow import Grower, Grown
from fedgft.engine.trees.rows import BinnedRows
from fedgft.errors import FedgftError
from fedgft.forest import Forest
from fedgft.models import Trees
from fedgft.settings import Settings
from fedgft.sums import Sums

BY_NODE = ("feature", "threshold", "left", "missing_left", "value", "gain", "cover", "categories")


@dataclass(frozen=True)
class BestRound:
    """For each run: the best model so far, and its sums over each client and over test rows."""

    score: np.ndarray  # (r,)
    round: np.ndarray  # (r,)
    clients: Sums  # (run x client, ...)
    test: Sums  # (r, ...)


@dataclass(frozen=True)
class BoostingState:
    """A booster between rounds. Arrays are changed in place.

    Attributes
    ----------
    margins, p
        (places, outputs): the logits of every row under every model that sees it, and the
        probability of the second class or of every class.
    trees
        The trees of all runs, by the names in `BY_NODE`, (r, rounds x outputs, nodes, ...).
    base
        (r, outputs): the logits before the first tree.
    rounds
        (r,): the number of rounds whose trees belong to the model.
    objective, weighting
        States of the slots of the algorithm.
    local
        What the clients remember of their own gaps, changed in place; None without local targets.
    best
        The best model so far, for methods with a target.
    sums
        Sums of the models on every client; None if they have not been measured.
    test
        Sums on test rows, where `finish` has replaced the last model by an earlier one.
    """

    margins: np.ndarray
    p: np.ndarray
    trees: tuple[np.ndarray, ...]
    base: np.ndarray
    rounds: np.ndarray
    objective: Any
    weighting: Any
    local: Any = None
    best: BestRound | None = None
    sums: Sums | None = None
    test: Sums | None = None


PACKED_TYPES.update({kind.__name__: kind for kind in (BestRound, BoostingState)})


@dataclass(frozen=True, eq=False, kw_only=True)
class BoostingLoop(TrainingLoop):
    """The rounds of a simulation that grows trees: one tree per round.

    Parameters
    ----------
    model
        The trees.
    index, algorithm, settings, seeds, lr
        As in `TrainingLoop`. Of the settings, those of local training do not apply.
    """

    model: Trees

    @property
    def name(self) -> str:
        return "trees"

    def __post_init__(self) -> None:
        reason = why_no_trees(self.algorithm, self.settings)
        if reason is not None:
            raise FedgftError(f"trees cannot be trained with {reason}", field="model")

    @cached_property
    def rows(self) -> BinnedRows:
        """The rows as bins."""
        return BinnedRows(self.index, self.model, self.seeds, self.settings.threads)

    @property
    def outputs(self) -> int:
        """Trees per round: one for two classes, else one per class."""
        classes = len(self.index.dataset.classes)
        return 1 if classes == 2 else classes

    @cached_property
    def models(self) -> int:
        """Models per run: the model itself and one per fold."""
        return 1 + self.model.folds

    @cached_property
    def shift(self) -> np.ndarray:
        """What to add to a row number to get its place in `margins`, (run, models)."""
        low, _, high = self.rows.ranges.T
        sizes = np.repeat(high - low, self.models)
        starts = np.cumsum(sizes) - sizes
        return starts.reshape(-1, self.models) - low[:, None]

    @cached_property
    def growers(self) -> list[Grower]:
        """One per thread; if there are fewer trees than threads, one that has all threads."""
        threads = self.settings.threads
        if self.index.runs * self.models * self.outputs < threads:
            return [Grower(self.rows.columns, self.model, threads=threads)]
        return [Grower(self.rows.columns, self.model) for _ in range(threads)]

    def loop(self) -> Loop:
        """Return the delay of the measurements and the caution that their noise requires."""
        found = boosting_loop(self.lr[:, None, None])
        uncertain = self.samples_clients or self.settings.noise > 0
        caution = found.caution * (0.5 if uncertain else 1.0)
        return replace(found, delay=2 if self.settings.lag else 1, caution=caution)

    def init(self, params: np.ndarray | None) -> BoostingState:
        """Return the state before round 0: no tree, and the share of each class as a score."""
        if params is not None:
            text = "trees start from the shares of the classes, not from given parameters"
            raise FedgftError(text, field="init", kind="unsupported")
        base = self._start()
        places = int((self.rows.ranges[:, 2] - self.rows.ranges[:, 0]).sum()) * self.models
        margins = np.empty((places, self.outputs))
        for run, (low, _, high) in enumerate(self.rows.ranges):
            for shift in self.shift[run]:
                margins[shift + low : shift + high] = base[run]
        shape = (self.index.runs, self.settings.rounds * self.outputs, self.model.most_nodes)
        kinds: dict[str, Any] = {"feature": np.int32, "left": np.int32}
        kinds |= {"missing_left": np.bool_, "categories": np.uint32}
        trees = [
            np.zeros((*shape, self.rows.words) if name == "categories" else shape, kinds.get(name))
            for name in BY_NODE
        ]
        trees[0][...] = -1
        return BoostingState(
            margins=margins,
            p=self._set_probabilities(margins, np.empty_like(margins)),
            trees=tuple(trees),
            base=base,
            rounds=np.zeros(self.index.runs, np.int64),
            objective=self.algorithm.objective.init(self.index.runs, self.loop()),
            weighting=self.algorithm.weighting.init(self.index.weighted_sizes),
            local=self.algorithm.objective.init_local(
                self.index.runs, self.index.num_clients, self.loop()
            ),
        )

    def step(self, state: BoostingState, t: int) -> BoostingState:
        """Return the state after round t: one more tree per model and output."""
        algorithm = self.algorithm
        cohort = self.draw_cohort(t)
        units = self.index.clients(cohort)
        own, received = self.collect_sums(state, cohort, t)
        late = self._prices(state, cohort, units) if self.settings.lag else None
        if received is not None:
            state = self._remember(state, t)
            update = algorithm.objective.update
            speed = self.lr[:, None, None]
            objective = update(state.objective, cohort, received, speed=speed)
            state = replace(state, objective=objective)
            if state.local is not None and own is not None:
                local = algorithm.objective.update_local(state.local, cohort, own, speed=speed)
                state = replace(state, local=local)
        price = self._prices(state, cohort, units) if late is None else late
        lengths = np.ones(len(cohort))
        local = LocalResults(received, None, lengths)
        coefficients, weighting = algorithm.weighting.coefficients(state.weighting, cohort, local)
        weight = self._weights(cohort, units, coefficients)
        self._grow(state, t, weight, price)
        return replace(state, weighting=weighting, rounds=state.rounds + 1, sums=None)

    def finish(self, state: BoostingState) -> BoostingState:
        """Return the state with the final model: for methods with a target, the best one."""
        state = self._remember(state, self.settings.rounds)
        if state.best is None:
            return state
        best = state.best
        return replace(state, rounds=best.round, sums=best.clients, test=best.test)

    def measure(self, state: BoostingState, cohort: Cohort) -> Sums:
        """Return the sums over the rows of each client, out of fold."""
        if cohort.full and state.sums is not None:
            return state.sums
        units = self.index.clients(cohort)
        return self._sum(state, units, folds=self.model.folds > 0)

    def evaluate(self, state: BoostingState) -> tuple[BoostingState, Sums]:
        """Measure the test rows and, unless `eval_on` is "test", all clients."""
        test = state.test
        if test is None:
            test = self._sum(state, self.index.test, folds=False)
        if self.settings.eval_on == "test":
            return state, test
        return replace(state, sums=self.measure(state, self.all_clients)), test

    def parameters(self, state: BoostingState) -> np.ndarray:
        """Return the trees of each run as one vector, (run, p); see `Forest.to_vector`."""
        forests = []
        for run, rounds in enumerate(state.rounds):
            used = slice(0, int(rounds) * self.outputs)
            by_node = dict(zip(BY_NODE, (each[run, used] for each in state.trees), strict=True))
            output = np.tile(np.arange(self.outputs, dtype=np.int32), int(rounds))
            categorical = self.rows.is_categorical
            forest = Forest(**by_node, categorical=categorical, output=output, base=state.base[run])
            forests.append(forest.trimmed().to_vector())
        longest = max(map(len, forests))
        return np.stack([np.pad(each, (0, longest - len(each))) for each in forests])

    def scores(self, state: BoostingState) -> tuple[np.ndarray, ...] | None:
        """Return the out-of-fold probabilities of each run's training rows, (rows, classes).

        None without folds, and if an earlier model is the final one.
        """
        if not self.model.folds or state.best is not None:
            return None
        found = []
        for run, (low, test, _) in enumerate(self.rows.ranges.tolist()):
            row = np.arange(low, test)
            fold = self.rows.folds[self.rows.fold_starts[run] + row]
            p = state.p[self.shift[run, 1 + fold.astype(np.int64)] + row]
            found.append(np.hstack((1 - p, p)) if self.outputs == 1 else p)
        return tuple(found)

    def restore(self, array: np.ndarray, on_host: bool) -> np.ndarray:
        """Return an array of a snapshot, which the next round may change."""
        return array if array.flags.writeable else array.copy()

    def _start(self) -> np.ndarray:
        """Return the log-odds or log-shares of the classes among the training rows, (r, o)."""
        count = self.all_clients.sum(self.index.clients(self.all_clients).count).sum(-1)
        return log_shares(count)

    def _remember(self, state: BoostingState, t: int) -> BoostingState:
        """Keep the model after t rounds in runs where it is the best of the last rounds."""
        objective = self.algorithm.objective
        share = objective.pick
        exact = not self.samples_clients and not self.settings.noise
        if not (exact and share > 0 and t > self.settings.rounds * (1 - share)):
            return state
        clients = self.measure(state, self.all_clients)
        score = score_models(
            objective, clients.map(self.all_clients.sum), split_runs(clients, self.index.runs)
        )
        better = np.ones(len(score), bool) if state.best is None else score >= state.best.score
        if not better.any():
            return state
        test = self._sum(state, self.index.test, folds=False)
        if state.best is None:
            best = BestRound(score, np.full(len(score), t), clients, test)
            return replace(state, best=best)
        old = state.best
        units = better[self.all_clients.run]
        best = BestRound(
            np.where(better, score, old.score),
            np.where(better, t, old.round),
            old.clients.replaced(units, clients[units]),
            old.test.replaced(better, test[better]),
        )
        return replace(state, best=best)

    def _prices(self, state: BoostingState, cohort: Cohort, units: Units) -> np.ndarray:
        """Return the price of each score, (run, clients or 1, cell, class)."""
        objective = self.algorithm.objective
        runs = self.index.runs
        data = self.index.dataset
        classes = len(data.classes)
        shape = (runs, classes, data.num_cells + 1, classes)
        price = np.zeros(shape) + objective.price(state.objective, runs=runs, classes=classes)
        price = price.reshape(runs, 1, -1, classes)
        if objective.local_penalties or state.local is not None:
            local = np.zeros((runs, self.index.num_clients, *price.shape[2:]))
            of_units = np.zeros((len(cohort), *shape[1:]))
            of_units += objective.own_price(state.local, cohort, classes=classes)
            if objective.local_penalties:
                sums = self.measure(state, cohort)
                of_units += objective.local_price(sums, run=cohort.run, classes=classes)
            local[cohort.run, cohort.client] = of_units.reshape(len(cohort), -1, classes)
            price = price + local
        return round_prices(price)

    def _weights(self, cohort: Cohort, units: Units, coefficients: np.ndarray) -> np.ndarray:
        """Return the weight of a row, (run, clients or 1, cell).

        It is 0 for clients that do not take part. A client whose update counts twice as much as its
        rows gives its rows the weight two.
        """
        runs = self.index.runs
        row_weights = self.algorithm.objective.row_weights
        total = np.array([f.weighted_sizes.sum() for f in self.index.federations])[cohort.run]
        mine = units.count.sum((1, 2))
        factor = np.maximum(coefficients, 0) * total / np.maximum(mine, 1)
        cells = int(np.prod(units.count.shape[1:]))
        if row_weights is None and np.allclose(factor[mine > 0], 1, rtol=1e-12, atol=0):
            return np.ones((runs, 1, cells))
        of_rows = np.ones_like(units.count) if row_weights is None else row_weights(units.count)
        out = np.zeros((runs, self.index.num_clients, cells))
        out[cohort.run, cohort.client] = factor[:, None] * of_rows.reshape(len(units), -1)
        return out

    def _grow(self, state: BoostingState, t: int, weight: np.ndarray, price: np.ndarray) -> None:
        """Grow the trees of a round, and add them to the margins and to the model."""
        each = (range(self.index.runs), range(self.models), range(self.outputs))
        tasks = queue.SimpleQueue()
        for run, model, output in product(*each):
            tasks.put((run, model, output))

        def work(grower: Grower) -> None:
            with suppress(queue.Empty):
                while True:
                    run, model, output = tasks.get_nowait()
                    fit = TreeFit(self, run, model, output, t)
                    grown = fit.grow(grower, state, weight[run], price[run])
                    if model == 0:
                        self._store(state, grown, run, t * self.outputs + output)

        run_threads(work, self.growers, self.settings.threads)
        self._set_probabilities(state.margins, state.p)

    def _store(self, state: BoostingState, grown: Grown, run: int, number: int) -> None:
        """Write a tree as tree `number` of a run."""
        trees = dict(zip(BY_NODE, state.trees, strict=True))
        nodes = grown.to_nodes(
            self.rows.bins[self.rows.federation[run]],
            self.rows.is_categorical,
            words=self.rows.words,
            lr=self.lr[run],
        )
        for name, array in trees.items():
            array[run, number] = nodes[name]

    def _set_probabilities(self, margins: np.ndarray, p: np.ndarray) -> np.ndarray:
        """Fill `p` with the probabilities behind the margins, both (places, outputs)."""
        threads = self.settings.threads
        pieces = np.linspace(0, len(p), 8 * threads + 1).astype(np.int64)

        def compute(begin: int, end: int) -> None:
            kernels.set_probabilities(pieces[begin], pieces[end], margins, p)

        share_work(compute, np.diff(pieces), threads)
        return p

    def _sum(self, state: BoostingState, units: Units, *, folds: bool) -> Sums:
        """Return the sums over the rows of units, under the model or out of fold."""
        rows = self.rows
        ranges = np.stack((units.low, units.high), axis=1)
        starts = np.stack((rows.fold_starts[units.run], np.full(len(units), int(folds))), axis=1)
        classes, groups = units.count.shape[1:]
        sums = np.zeros((len(units), classes * groups, classes, 2))
        shift = self.shift[units.run]

        def add(begin: int, end: int) -> None:
            kernels.sum_scores(
                *(begin, end, ranges, shift, (starts, rows.folds)),
                *(state.margins, state.p, (rows.cell, rows.weight), sums),
            )

        share_work(add, units.sizes + 1, self.settings.threads)
        score, decision = np.moveaxis(sums.reshape(*units.count.shape, classes, 2), -1, 0)
        return Sums(units.count, score, decision, axis=self.index.dataset.axis)


def why_no_trees(algorithm: Algorithm, settings: Settings) -> str | None:
    """Return what of the algorithm or the settings trees cannot be trained with; None: nothing.

    A tree has no gradient of its own to correct, and no local steps to weigh.
    """
    weighting = algorithm.weighting
    problems = {
        "weights that follow from losses or updates": reads_more(weighting),
        "losses that change from round to round, or prices of decisions": (
            bool(algorithm.objective.loss_rules) or algorithm.objective.price_on != "scores"
        ),
        "a proximal term or a correction of local gradients (`base`, `mu`)": (
            type(algorithm.correction) is not Proximal or algorithm.correction.mu > 0
        ),
        "an optimizer of the server (`base`)": not isinstance(algorithm.server, Averaging),
        "FedNova, which weighs local steps (`base`)": isinstance(weighting, FedNova),
        "weights that follow from locally trained models (`fairfed`)": weighting.sees == "trained",
        f"`device` {settings.device}: they grow on the CPU": settings.device != "cpu",
        f"`executor` {settings.executor}, which trains parameters": settings.executor != "auto",
    }
    return next((text for text, holds in problems.items() if holds), None)
