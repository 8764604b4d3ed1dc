"""A study: one data set, one protocol, several replicates; its cells are trained on demand.

Replicate i has its own test rows, its own partition and its own random numbers, all fixed by
seed i. Where a protocol leaves a value open, every replicate chooses its own on an inner split:
each client holds out a quarter of its training rows, and test rows are never looked at. The
chosen learning rate makes FedAvg most accurate on the held-out quarter; the chosen strength has the
smallest gap of decisions among those within one point of the best accuracy on that quarter.

Two searches may be extended: a replicate whose best learning rate is at an edge of the grid tries
rates beyond it, and a replicate that misses its target is trained with more rounds
(`Protocol.more_lr` and `Protocol.round_factors`). Neither depends on the other replicates.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from fedgft.algorithms import Algorithm
from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.algorithms.registry import WITHOUT_STRENGTH
from fedgft.data.dataset import Dataset, Federation, standardize
from fedgft.data.partition import KINDS_WITH_ALPHA, PartitionKind, inner_split, partition
from fedgft.engine import History, Settings, simulate
from fedgft.engine.history import join_runs
from fedgft.errors import FedgftError
from fedgft.metrics import Kind, Metric, NotEstimableWarning, bind_metric, get_metric
from fedgft.metrics.functions import is_collapsed
from fedgft.models import Trees, get_model
from fedgft.settings import TARGET_TOLERANCE
from fedgft.study.cache import Checkpoints, run_key
from fedgft.study.protocol import Protocol, check_groups
from fedgft.sums import Sums

ONE_POINT = 0.01
UNSETTLED = 1e-9  # excess of a gap that has not settled: smaller than that of any real miss
OnProgress = Callable[[str, int], None]  # description, run-rounds since the last call
MakeAlgorithm = Callable[[np.ndarray], Algorithm]  # for the runs with these positions in a batch


def ignore_progress(what: str, amount: int) -> None:
    """An `OnProgress` that does nothing."""


@dataclass(frozen=True)
class Point:
    """The values that may differ within a batch of runs; None: the protocol sets or chooses it."""

    alpha: float
    strength: float | None = None
    lr: float | None = None


@dataclass(frozen=True)
class Result:
    """One trained cell: all replicates of one method at one heterogeneity.

    Parameters
    ----------
    alpha, method, metric
        The cell.
    history
        The measurements; its runs are the replicates.
    federations
        One per replicate.
    lr, strength
        (replicate,): the values that were used in training.
    rounds
        (replicate,): rounds of training; `history.rounds` counts those of the shortest replicate.
    chosen
        Which of "lr", "depth" and "strength" were chosen on inner splits.
    depth
        (replicate,): the depth of trees that was used; 0 for other models.
    """

    alpha: float
    method: str
    metric: Metric
    history: History
    federations: Sequence[Federation]
    lr: np.ndarray
    strength: np.ndarray
    rounds: np.ndarray
    chosen: tuple[str, ...] = ()
    depth: np.ndarray = field(default_factory=lambda: np.zeros(1, int))

    @property
    def has_target(self) -> bool:
        """Whether the strength is a target for the gap."""
        return self.method == "fedgft-control"

    @property
    def stretch(self) -> np.ndarray:
        """(replicate,): rounds of training as a multiple of those in `history.rounds`."""
        return self.rounds // self.history.rounds[-1]

    @property
    def client_sums(self) -> Sums:
        """(replicate, ...): sums of the final models over the rows of all clients."""
        return _client_sums(self.history)

    @property
    def test_sums(self) -> Sums:
        """(replicate, ...): sums of the final models over the test rows."""
        return self.history.test[-1]


def _client_sums(history: History) -> Sums:
    assert history.federation is not None  # studies evaluate on both kinds of rows
    return history.federation[-1]


@dataclass(frozen=True)
class Batch:
    """Runs that are trained side by side: federation, seed, rate, depth and strength of each.

    `depth` (r,) is the depth of trees; 0 for other models.
    """

    federations: Sequence[Federation]
    seeds: Sequence[int]
    lr: np.ndarray
    depth: np.ndarray
    strength: np.ndarray = field(default_factory=lambda: np.zeros(1))

    def part(self, at: np.ndarray) -> "Batch":
        """The runs with these indices."""
        federations = [self.federations[i] for i in at]
        seeds = [self.seeds[i] for i in at]
        return Batch(federations, seeds, self.lr[at], self.depth[at], self.strength[at])


@dataclass(frozen=True, eq=False)
class Study:
    """One data set, one protocol, several replicates; its cells are trained on demand.

    Parameters
    ----------
    dataset
        The rows. They are standardized if the protocol says so.
    protocol
        How cells are trained and tested, see `get_protocol`.
    seeds
        One per replicate.
    clients, kind
        How many clients, and how rows are dealt to them.
    model
        A name or a model, as `simulate` takes it.
    init
        Returns the parameters to start from; None: at random.
    on_progress
        Called with a description and the number of run-rounds done since the last call.
    checkpoints
        Where simulations leave checkpoints; None: nowhere.
    """

    dataset: Dataset
    protocol: Protocol
    seeds: Sequence[int]
    clients: int = 10
    kind: PartitionKind = "dirichlet"
    model: Any = "logistic"
    init: Callable[[Federation], np.ndarray] | None = None
    on_progress: OnProgress = ignore_progress
    checkpoints: Checkpoints | None = None
    _known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seeds:
            raise FedgftError("`seeds` must be at least 1")
        if self.protocol.features == "standardized" and self.dataset.center is None:
            object.__setattr__(self, "dataset", self.dataset.standardized())
        if not self.protocol.own_test:
            object.__setattr__(self, "dataset", replace(self.dataset, test=None))
        if self.init is not None:  # all clients start from the given parameters
            settings = replace(self.protocol.settings, start="common")
            object.__setattr__(self, "protocol", replace(self.protocol, settings=settings))

    def bind(self, metric: Metric) -> Metric:
        """Return the metric of the groups behind the group axis of the data set's sums."""
        return bind_metric(metric, self.dataset.axis)

    def run(self, alpha: float, method: str, metric: Metric) -> Result:
        """Train one cell."""
        return self.sweep(method, metric, [Point(alpha)])[0]

    def sweep(self, method: str, metric: Metric, points: Sequence[Point]) -> list[Result]:
        """Train all replicates of all points as one batch of runs; return one result per point.

        Methods that do not depend on the metric are trained once for all metrics.
        """
        metric = self.bind(metric)
        needs = () if method in WITHOUT_STRENGTH else (metric.name, self.protocol.penalty)
        keys = {p: ("run", p, method, *needs) for p in points}
        cells = {p: self._open_cell(p, method, metric) for p in keys}
        new = [p for p in keys if keys[p] not in self._known]
        if new:
            what = f"{method}, {metric.name}, alpha {', '.join(f'{p.alpha:g}' for p in new)}"
            batch = Batch(
                [f for p in new for f in cells[p][0]],
                list(self.seeds) * len(new),
                lr=np.concatenate([cells[p][1] for p in new]),
                depth=np.concatenate([self.choose_depth(p.alpha) for p in new]),
                strength=np.concatenate([cells[p][2] for p in new]),
            )
            history, rounds = self._train(what, batch, method, metric)
            for i, p in enumerate(new):
                replicates = slice(i * len(self.seeds), (i + 1) * len(self.seeds))
                self._known[keys[p]] = (history.part(replicates), rounds[replicates])
        results = []
        for p in points:
            history, rounds = self._known[keys[p]]
            grids = {"lr": self.protocol.lr, "strength": self.protocol.strength(method)}
            chosen = tuple(n for n, g in grids.items() if getattr(p, n) is None and len(g) > 1)
            chosen += ("depth",) if len(self._depths) > 1 else ()
            trained = (history, *cells[p])
            more: dict[str, Any] = {
                "rounds": rounds,
                "chosen": chosen,
                "depth": self.choose_depth(p.alpha),
            }
            results.append(Result(p.alpha, method, metric, *trained, **more))
        return results

    def federations(self, alpha: float) -> list[Federation]:
        """The federation of each replicate."""
        key = ("federations", alpha)
        if key not in self._known:
            self._known[key] = [self._scale(dealt) for dealt in self.deal(alpha)]
        return self._known[key]

    def deal(self, alpha: float) -> list[Federation]:
        """The federation of each replicate, before its features are scaled."""
        return [
            partition(
                self.dataset,
                self.kind,
                clients=self.clients,
                alpha=alpha,
                protocol_test=self.protocol.test,
                train_rows=self.protocol.train_rows,
                test_rows=self.protocol.test_rows,
                seed=seed,
            )
            for seed in self.seeds
        ]

    def choose_lr(self, alpha: float) -> np.ndarray:
        """The learning rate of each replicate, chosen on inner splits where there is a choice."""
        grid = np.array(self.protocol.lr)
        key = ("lr", alpha)
        if len(grid) > 1 and key not in self._known:
            what = f"learning rate, alpha {alpha:g}"
            accuracy, _ = self._try_out(what, alpha, self._fedavg, None, grid[:, None])
            chosen = choose_best(grid, -accuracy, what=what)
            self._known[key] = self._search_beyond_grid(alpha, chosen, accuracy)
        return self._known.get(key, np.full(len(self.seeds), grid[0]))

    @property
    def _depths(self) -> tuple[int, ...]:
        """The candidates for the depth of trees; empty for other models."""
        model = get_model(self.model)
        if not isinstance(model, Trees):
            return ()
        return self.protocol.max_depth or (model.max_depth,)

    def choose_depth(self, alpha: float) -> np.ndarray:
        """The depth of each replicate's trees, chosen on inner splits; 0 for other models.

        Plain trees of this depth are the most accurate ones.
        """
        grid = np.array(self._depths or (0,))
        key = ("depth", alpha)
        if len(grid) > 1 and key not in self._known:
            lr = np.array([[self.protocol.lr[0]]])
            accuracy = [
                self._try_out(f"depth {d}, alpha {alpha:g}", alpha, self._fedavg, None, lr, depth=d)
                for d in grid.tolist()
            ]
            cost = -np.concatenate([found for found, _ in accuracy])
            self._known[key] = choose_best(grid, cost, what=f"depth, alpha {alpha:g}")
        return self._known.get(key, np.full(len(self.seeds), grid[0]))

    def choose_strength(
        self, alpha: float, method: str, metric: Metric, *, lr: np.ndarray | None = None
    ) -> np.ndarray:
        """The strength of each replicate at its learning rate, chosen on inner splits.

        It has the smallest gap of decisions among those within one point of the best accuracy.
        `lr`: the rate of each replicate; None: as `choose_lr` chooses it.
        """
        grid = np.array(self.protocol.strength(method))
        lr = self.choose_lr(alpha) if lr is None else lr
        key = ("strength", alpha, method, metric.name, self.protocol.penalty, lr.tobytes())
        if len(grid) > 1 and key not in self._known:
            what = f"strength of {method}, {metric.name}, alpha {alpha:g}"
            each = np.repeat(grid, len(self.seeds))
            rates = np.tile(lr, (len(grid), 1))
            make = partial(self._make_algorithm, method, metric, each)
            accuracy, gap = self._try_out(what, alpha, make, metric, rates)
            good = accuracy >= accuracy.max(axis=0) - ONE_POINT
            self._known[key] = choose_best(grid, np.where(good, gap, np.nan), what=what)
        return self._known.get(key, np.full(len(self.seeds), grid[0]))

    def describe(self, result: Result) -> str:
        """The name of a cell, for notes."""
        return f"{result.method}, {result.metric.name}{self.describe_alpha(result.alpha)}"

    def describe_alpha(self, alpha: float) -> str:
        """A text such as ", alpha 0.5"; empty where the partition has no alpha."""
        return "" if self.concentration(alpha) is None else f", alpha {alpha:g}"

    def describe_federation(self, alpha: float | None = None) -> str:
        """The clients in a few words, such as "10 simulated clients, alpha 0.5"."""
        if self.kind == "column":
            count = len(self.dataset.client_names)
            return f"{count} client{'s' * (count != 1)}"
        text = f"{self.clients} simulated client{'s' * (self.clients != 1)}"
        return text if alpha is None else f"{text}{self.describe_alpha(alpha)}"

    def concentration(self, alpha: float) -> float | None:
        """Dirichlet's alpha; None where the partition has none."""
        return alpha if self.kind in KINDS_WITH_ALPHA else None

    @property
    def is_out_of_fold(self) -> bool:
        """Whether sums over the clients' rows are those of models that have not seen the row."""
        model = get_model(self.model)
        return isinstance(model, Trees) and model.folds > 0

    def work(self, alphas: Sequence[float], methods: Sequence[str], metrics: Sequence[str]) -> int:
        """Run-rounds that these cells take at least: the length of a progress bar.

        Further learning rates and rounds, where they are needed, are not included.
        """
        runs = count_choices(self.protocol.lr) + count_choices(self._depths)
        for method in methods:
            times = 1 if method in WITHOUT_STRENGTH else len(metrics)
            runs += times * (1 + count_choices(self.protocol.strength(method)))
        return runs * len(alphas) * len(self.seeds) * self.protocol.settings.rounds

    def rows_per_round(self, alpha: float) -> int:
        """Number of rows that a run reads per round."""
        return len(self.federations(alpha)[0].rows) * self.protocol.settings.epochs

    def _open_cell(
        self, point: Point, method: str, metric: Metric
    ) -> tuple[list[Federation], np.ndarray, np.ndarray]:
        """Each replicate's federation, learning rate and strength."""
        federations = self.federations(point.alpha)
        every = np.ones(len(self.seeds))
        for federation in federations:
            check_groups(federation, metric)
        lr = self.choose_lr(point.alpha) if point.lr is None else point.lr * every
        if point.strength is not None:
            return federations, lr, point.strength * every
        return federations, lr, self.choose_strength(point.alpha, method, metric, lr=lr)

    def _train(
        self, what: str, batch: Batch, method: str, metric: Metric
    ) -> tuple[History, np.ndarray]:
        """Train all runs of a batch; also return for how many rounds each was trained.

        Runs that miss their target are trained again with more rounds. If a run never meets it,
        its training with the smallest gap is kept, and among equal gaps the shortest training.
        """
        settings = self.protocol.settings

        def train(part: Batch, factor: int) -> tuple[History, np.ndarray]:
            longer = replace(
                settings, rounds=factor * settings.rounds, eval_every=factor * settings.eval_every
            )
            title = what if factor == 1 else f"{what}, {longer.rounds} rounds"
            make = partial(self._make_algorithm, method, metric, part.strength)
            with warnings.catch_warnings():  # a single warning follows below
                warnings.simplefilter("ignore", TargetMissedWarning)
                history = self._simulate(title, part, make, longer)
            return history, target_excess(history, metric, self.protocol.control, part.strength)

        history, excess = train(batch, 1)
        factors = np.ones(len(batch.lr), int)
        for factor in self.protocol.round_factors if method == "fedgft-control" else ():
            missed = np.flatnonzero(excess > 0)
            if not len(missed):
                break
            again, new = train(batch.part(missed), factor)
            better = np.flatnonzero(new < excess[missed])
            history = history.with_runs(missed[better], again.part(better))
            excess[missed[better]] = new[better]
            factors[missed[better]] = factor
        if history.control is not None and (text := history.control.warning()) is not None:
            warnings.warn(f"{what}: {text}", TargetMissedWarning, stacklevel=4)
        return history, factors * settings.rounds

    def _search_beyond_grid(
        self, alpha: float, chosen: np.ndarray, accuracy: np.ndarray
    ) -> np.ndarray:
        """The chosen rates, where a rate at an edge of the grid gives way to a better one beyond.

        `accuracy`: (candidate, replicate), on the inner splits.
        """
        low = min(self.protocol.lr)
        high = max(self.protocol.lr)
        more = sorted(self.protocol.more_lr)
        known = np.isfinite(accuracy).any(axis=0)
        top = np.where(known, np.nanmax(np.where(known, accuracy, 0.0), axis=0), np.inf)
        chosen = chosen.copy()
        below = [rate for rate in reversed(more) if rate < low]
        above = [rate for rate in more if rate > high]
        for edge, beyond in ((low, below), (high, above)):
            at = np.flatnonzero(known & (chosen == edge))
            for rate in beyond:
                if not len(at):
                    break
                what = f"learning rate {rate:g}, alpha {alpha:g}"
                rates = np.array([[rate]])
                found, _ = self._try_out(what, alpha, self._fedavg, None, rates, replicates=at)
                better = found[0] > top[at]
                at = at[better]
                chosen[at] = rate
                top[at] = found[0][better]
        return chosen

    def _fedavg(self, at: np.ndarray) -> Algorithm:
        return self.protocol.algorithm("fedavg", get_metric("sp"), np.zeros(1))

    def _make_algorithm(
        self, method: str, metric: Metric, strength: np.ndarray, at: np.ndarray
    ) -> Algorithm:
        """The method for the runs `at`, of which each has its own strength."""
        return self.protocol.algorithm(method, metric, strength[at])

    def _try_out(
        self,
        what: str,
        alpha: float,
        make: MakeAlgorithm,
        metric: Metric | None,
        lr: np.ndarray,
        *,
        replicates: np.ndarray | None = None,
        depth: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Validation accuracy and gap of decisions, (candidate, replicate), on inner splits.

        `lr` has one row per candidate; `replicates` None: all of them; `depth` of trees, None: as
        `choose_depth` chooses it.
        """
        key = ("inner", alpha)
        if key not in self._known:
            scaled = self.federations(alpha)
            pairs = zip(scaled, self.seeds, strict=True)
            self._known[key] = [self._scale(inner_split(f, seed=seed)) for f, seed in pairs]
        at = np.arange(len(self.seeds)) if replicates is None else replicates
        copies = len(lr)
        shape = (copies, len(at))
        depths = self.choose_depth(alpha)[at] if depth is None else np.full(len(at), depth)
        batch = Batch(
            [self._known[key][i] for i in at.tolist()] * copies,
            [self.seeds[i] for i in at.tolist()] * copies,
            lr=np.broadcast_to(lr, shape).ravel(),
            depth=np.tile(depths, copies),
        )
        settings = replace(self.protocol.settings, eval_every=0, eval_on="test")
        last = self._simulate(what, batch, make, settings).test[-1]
        gap = np.full(shape, np.nan) if metric is None else last.gap(metric, "hard").reshape(shape)
        return last.accuracy().reshape(shape), gap

    def _simulate(
        self, what: str, batch: Batch, make: MakeAlgorithm, settings: Settings
    ) -> History:
        """Train the runs of a batch, those with trees of the same depth together.

        `make` returns the algorithm of some of the runs.
        """
        parts = [np.flatnonzero(batch.depth == depth) for depth in np.unique(batch.depth)]
        found = []
        for at in parts:
            part = replace(batch, strength=np.zeros(len(batch.lr))).part(at)
            found.append(self._simulate_part(what, part, make(at), settings))
        return found[0] if len(found) == 1 else join_runs(found, np.concatenate(parts))

    def _simulate_part(
        self, what: str, batch: Batch, algorithm: Algorithm, settings: Settings
    ) -> History:
        runs = len(batch.federations)
        model = get_model(self.model)
        if isinstance(model, Trees):
            model = replace(model, max_depth=int(batch.depth[0]))
        init = None if self.init is None else np.stack([self.init(f) for f in batch.federations])
        save = resume = None
        if self.checkpoints is not None:
            rest = (algorithm, settings, list(batch.seeds), batch.lr)
            key = run_key(batch.federations, model, init, *rest)
            resume = self.checkpoints.get(key)
            save = partial(self.checkpoints.put, key)
        self.on_progress(what, 0 if resume is None else runs * resume.round)
        return simulate(
            batch.federations,
            model,
            algorithm,
            settings,
            seeds=batch.seeds,
            lr=batch.lr,
            init=init,
            on_round=lambda done, total: self.on_progress(what, runs),
            on_state=save,
            resume=resume,
        )

    def _scale(self, federation: Federation) -> Federation:
        """Standardize the features if the protocol says so."""
        return standardize(federation) if self.protocol.features == "standardized" else federation


def count_choices(grid: Sequence[float]) -> int:
    """Number of runs needed to choose a value of a grid; 0 if the grid has one value."""
    return len(grid) if len(grid) > 1 else 0


def target_excess(history: History, metric: Metric, kind: Kind, target: np.ndarray) -> np.ndarray:
    """(run,): how far the gap on the federation's rows is above the target.

    0 where the target is met, and `UNSETTLED` where it is met although the gap has not settled.
    With a local target, the excess of the largest local gap is added. Infinite where the gap is not
    estimable, and where the model has collapsed, since a collapsed model meets any target.
    """
    last = _client_sums(history)
    excess = np.maximum(last.gap(metric, kind) - target - TARGET_TOLERANCE, 0.0)
    if history.control is not None:
        excess = excess + history.control.local_excess
        excess = np.maximum(excess, np.where(history.control.settled, 0.0, UNSETTLED))
    return np.where(np.isfinite(excess) & ~is_collapsed(last), excess, np.inf)


def choose_best(grid: np.ndarray, cost: np.ndarray, *, what: str) -> np.ndarray:
    """The candidate of least cost for each replicate.

    Parameters
    ----------
    grid
        The candidates.
    cost
        (candidate, replicate); NaN: not known. A replicate without any known cost takes the middle
        of the grid, with a `NotEstimableWarning`.
    what
        What is chosen, for the warning.
    """
    known = np.isfinite(cost)
    unknown = np.asarray(~known.any(axis=0))
    middle = len(grid) // 2
    if unknown.any():
        warnings.warn(
            f"{what}: the inner split is too small to choose in {unknown.sum()} of {unknown.size} "
            f"replicates, which take {grid[middle]:g}",
            NotEstimableWarning,
            stacklevel=2,
        )
    return grid[np.where(unknown, middle, np.argmin(np.where(known, cost, np.inf), axis=0))]
