"""A study: one data set, one protocol, some replicates; cells of it are trained on demand.

Replicate i has its own test rows, its own partition and its own random numbers, all fixed by
seed i. Where a protocol leaves a value open, every replicate chooses its own on an inner split:
each client holds out a quarter of its training rows, and test rows are never looked at. The
learning rate is the one with which FedAvg is most accurate there; a strength is the one with
the smallest decision-level gap within one point of the best accuracy there.

Two things go on where they have not come to an end: a replicate whose best learning rate is at an
edge of the grid tries rates beyond it, and one that misses its target is trained with more rounds
(`Protocol.more_lr` and `Protocol.round_factors`). Neither depends on the other replicates.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from fedgft.data.dataset import Dataset, Federation
from fedgft.data.partition import Kind as PartitionKind
from fedgft.data.partition import inner_split, partition
from fedgft.data.scaling import standardise
from fedgft.engine import History, Settings, simulate
from fedgft.errors import FedgftError
from fedgft.experiments.checkpoints import Checkpoints, run_key
from fedgft.experiments.checks import check_groups
from fedgft.experiments.protocol import Protocol
from fedgft.federated import Algorithm
from fedgft.federated.control import NEAR, TargetMissedWarning
from fedgft.federated.methods import SINGLE
from fedgft.metrics import Kind, Metric, NotEstimableWarning, get_metric
from fedgft.metrics.decisions import collapsed
from fedgft.models import get_model

ONE_POINT = 0.01
UNSETTLED = 1e-9  # counts as a miss, and less than any other
OnProgress = Callable[[str, int], None]  # what is being done, and how many more run-rounds it took


def silent(what: str, amount: int) -> None:
    pass


@dataclass(frozen=True)
class Point:
    """What may differ within a batch of runs; None: the protocol's value, or its choice."""

    alpha: float
    strength: float | None = None
    lr: float | None = None


@dataclass(frozen=True)
class Result:
    """One trained cell: `seeds` runs of one method at one heterogeneity."""

    alpha: float
    method: str
    metric: Metric
    history: History
    federations: Sequence[Federation]
    lr: np.ndarray  # one per replicate
    strength: np.ndarray
    rounds: np.ndarray  # that each replicate was trained for; `history.rounds` is in the shortest
    chosen: tuple[str, ...] = ()  # which of lr and strength were chosen on inner splits

    @property
    def stretch(self) -> np.ndarray:
        """One per replicate: by how much its rounds exceed those of `history.rounds`."""
        return self.rounds // self.history.rounds[-1]


@dataclass(frozen=True)
class Batch:
    """Runs that are trained side by side: of each its federation, seed, rate and strength."""

    federations: Sequence[Federation]
    seeds: Sequence[int]
    lr: np.ndarray
    strength: np.ndarray = field(default_factory=lambda: np.zeros(1))

    def part(self, at: np.ndarray) -> "Batch":
        """Some of the runs."""
        return Batch(
            [self.federations[i] for i in at],
            [self.seeds[i] for i in at],
            self.lr[at],
            self.strength[at],
        )


@dataclass(frozen=True, eq=False)
class Study:
    """One data set, one protocol, some replicates; its cells are trained on demand."""

    dataset: Dataset
    protocol: Protocol
    seeds: Sequence[int]
    clients: int = 10
    kind: PartitionKind = "dirichlet"
    model: Any = "logistic"
    init: Callable[[Federation], np.ndarray] | None = None  # parameters to start from
    on_progress: OnProgress = silent
    checkpoints: Checkpoints | None = None
    _known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.seeds:
            raise FedgftError("--seeds must be at least 1")
        if self.protocol.features == "standardised" and self.dataset.centre is None:
            object.__setattr__(self, "dataset", self.dataset.standardised())
        if not self.protocol.own_test:
            object.__setattr__(self, "dataset", replace(self.dataset, test=None))
        if self.init is not None:  # it is one start for all, whatever the protocol has
            settings = replace(self.protocol.settings, start="common")
            object.__setattr__(self, "protocol", replace(self.protocol, settings=settings))

    def run(self, alpha: float, method: str, metric: Metric) -> Result:
        """Train one cell."""
        return self.sweep(method, metric, [Point(alpha)])[0]

    def sweep(
        self, method: str, metric: Metric, points: Sequence[Point], *, penalty: str | None = None
    ) -> list[Result]:
        """All replicates of all points, as one batch of runs.

        What does not depend on the metric is trained once for all of them.
        """
        penalty = penalty or self.protocol.penalty
        what = (method,) if method in SINGLE else (method, metric.name, penalty)
        cells = {p: self._cell(p, method, metric, penalty) for p in dict.fromkeys(points)}
        new = [p for p in cells if ("run", p, *what) not in self._known]
        if new:
            said = f"{method}, {metric.name}, alpha {', '.join(f'{p.alpha:g}' for p in new)}"
            batch = Batch(
                [f for p in new for f in cells[p][0]],
                list(self.seeds) * len(new),
                lr=np.concatenate([cells[p][1] for p in new]),
                strength=np.concatenate([cells[p][2] for p in new]),
            )
            history, rounds = self._trained(said, batch, method, metric, penalty)
            for i, p in enumerate(new):
                own = slice(i * len(self.seeds), (i + 1) * len(self.seeds))
                self._known[("run", p, *what)] = history.part(own), rounds[own]
        out = []
        for p in points:
            history, rounds = self._known[("run", p, *what)]
            chosen = self._chosen(p, method)
            out.append(Result(p.alpha, method, metric, history, *cells[p], rounds, chosen))
        return out

    def _trained(
        self, what: str, batch: "Batch", method: str, metric: Metric, penalty: str
    ) -> tuple[History, np.ndarray]:
        """All runs of a batch, and for how many rounds each was trained.

        Where a method has a target, runs that miss it are trained again with more rounds. Of a run
        that never meets it the one with the smallest gap counts, of equal ones the shortest.
        """

        def train(part: Batch, factor: int) -> History:
            settings = self.protocol.settings
            longer = replace(
                settings, rounds=factor * settings.rounds, eval_every=factor * settings.eval_every
            )
            said = what if factor == 1 else f"{what}, {longer.rounds} rounds"
            algorithm = self.protocol.algorithm(method, metric, part.strength, penalty=penalty)
            with warnings.catch_warnings():  # of those that still miss it in the end, below
                warnings.simplefilter("ignore", TargetMissedWarning)
                return self._simulate(said, part, algorithm, longer)

        history = train(batch, 1)
        factors = np.ones(len(batch.lr), int)
        if method != "fedgft-control":
            return history, factors * self.protocol.settings.rounds
        off = miss(history, metric, self.protocol.control, batch.strength)
        for factor in self.protocol.round_factors:
            missed = np.flatnonzero(off > 0)
            if not len(missed):
                break
            part = batch.part(missed)
            again = train(part, factor)
            nearer = miss(again, metric, self.protocol.control, part.strength)
            better = np.flatnonzero(nearer < off[missed])
            history = history.with_runs(missed[better], again.part(better))
            off[missed[better]], factors[missed[better]] = nearer[better], factor
        if history.control is not None and (text := history.control.warning()) is not None:
            warnings.warn(f"{what}: {text}", TargetMissedWarning, stacklevel=4)
        return history, factors * self.protocol.settings.rounds

    def _chosen(self, point: Point, method: str) -> tuple[str, ...]:
        grids = {"lr": self.protocol.lr, "strength": self.protocol.strength(method)}
        return tuple(n for n, g in grids.items() if getattr(point, n) is None and len(g) > 1)

    def _cell(
        self, point: Point, method: str, metric: Metric, penalty: str
    ) -> tuple[list[Federation], np.ndarray, np.ndarray]:
        """Each replicate's federation, learning rate and strength."""
        federations, every = self.federations(point.alpha), np.ones(len(self.seeds))
        for federation in federations:
            check_groups(federation, metric)
        lr = self.rate(point.alpha) if point.lr is None else point.lr * every
        if point.strength is not None:
            return federations, lr, point.strength * every
        return federations, lr, self.strength(point.alpha, method, metric, penalty, lr=lr)

    def cell(self, result: Result) -> str:
        """What a note is about."""
        alpha = self.concentration(result.alpha)
        where = "" if alpha is None else f", alpha {alpha:g}"
        return f"{result.method}, {result.metric.name}{where}"

    def concentration(self, alpha: float) -> float | None:
        """Dirichlet's alpha, where the partition has one."""
        return alpha if self.kind in ("dirichlet", "pure") else None

    def work(self, alphas: Sequence[float], methods: Sequence[str], metrics: Sequence[str]) -> int:
        """Run-rounds that these cells take at least: the length of a progress bar. More learning
        rates and more rounds, where they are needed, come on top."""
        runs = 0
        for method in methods:
            times = 1 if method in SINGLE else len(metrics)
            grid = len(self.protocol.strength(method))
            runs += times * (1 + (grid if grid > 1 else 0))
        rates = len(self.protocol.lr)
        runs += rates if rates > 1 else 0
        return runs * len(alphas) * len(self.seeds) * self.protocol.settings.rounds

    def rows(self, alpha: float) -> int:
        """That a run reads in a round."""
        return len(self.federations(alpha)[0].rows) * self.protocol.settings.epochs

    def federations(self, alpha: float) -> list[Federation]:
        """One a replicate."""
        key = ("federations", alpha)
        if key not in self._known:
            cut = [
                partition(self.dataset, self.kind, clients=self.clients, alpha=alpha, seed=seed,
                          protocol_test=self.protocol.test, train_rows=self.protocol.train_rows,
                          test_rows=self.protocol.test_rows)
                for seed in self.seeds
            ]  # fmt: skip
            self._known[key] = [self._scaled(f) for f in cut]
        return self._known[key]

    def rate(self, alpha: float) -> np.ndarray:
        """Each replicate's learning rate."""
        grid, key = np.array(self.protocol.lr), ("rate", alpha)
        if len(grid) > 1 and key not in self._known:
            what = f"learning rate, alpha {alpha:g}"
            accuracy, _ = self._inner(what, alpha, self._plain(), None, lr=grid[:, None])
            chosen = best(grid, -accuracy, what=what)
            self._known[key] = self._beyond_the_edge(alpha, chosen, accuracy)
        return self._known.get(key, np.full(len(self.seeds), grid[0]))

    def _beyond_the_edge(
        self, alpha: float, chosen: np.ndarray, accuracy: np.ndarray
    ) -> np.ndarray:
        """The chosen rates, after those at an edge of the grid have been compared with rates
        beyond it. `accuracy`: (candidate, replicate), on the inner splits."""
        grid, more = self.protocol.lr, sorted(self.protocol.more_lr)
        known = np.isfinite(accuracy).any(axis=0)
        top = np.where(known, np.nanmax(np.where(known, accuracy, 0.0), axis=0), np.inf)
        chosen = chosen.copy()
        below = [rate for rate in reversed(more) if rate < min(grid)]
        above = [rate for rate in more if rate > max(grid)]
        for edge, beyond in ((min(grid), below), (max(grid), above)):
            at = np.flatnonzero(known & (chosen == edge))
            for rate in beyond:
                if not len(at):
                    break
                what = f"learning rate {rate:g}, alpha {alpha:g}"
                found, _ = self._inner(
                    what, alpha, self._plain(), None, lr=np.array([[rate]]), replicates=at
                )
                better = found[0] > top[at]
                at = at[better]
                chosen[at], top[at] = rate, found[0][better]
        return chosen

    def _plain(self) -> Algorithm:
        return self.protocol.algorithm("fedavg", get_metric("sp"), np.zeros(1))

    def strength(
        self, alpha: float, method: str, metric: Metric, penalty: str | None = None,
        *, lr: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Each replicate's lam or beta, at its learning rate."""
        grid, penalty = np.array(self.protocol.strength(method)), penalty or self.protocol.penalty
        lr = self.rate(alpha) if lr is None else lr
        key = ("strength", alpha, method, metric.name, penalty, lr.tobytes())
        if len(grid) > 1 and key not in self._known:
            what = f"strength of {method}, {metric.name}, alpha {alpha:g}"
            each = np.repeat(grid, len(self.seeds))
            accuracy, gap = self._inner(
                what, alpha, self.protocol.algorithm(method, metric, each, penalty=penalty), metric,
                lr=np.tile(lr, (len(grid), 1)),
            )  # fmt: skip
            good = accuracy >= accuracy.max(axis=0) - ONE_POINT
            self._known[key] = best(grid, np.where(good, gap, np.nan), what=what)
        return self._known.get(key, np.full(len(self.seeds), grid[0]))

    def _inner(
        self,
        what: str,
        alpha: float,
        algorithm: Algorithm,
        metric: Metric | None,
        *,
        lr: np.ndarray,
        replicates: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Validation accuracy and hard gap, (candidate, replicate), on the inner splits of these
        replicates (None: of all)."""
        key = ("inner", alpha)
        if key not in self._known:
            pairs = zip(self.federations(alpha), self.seeds, strict=True)
            self._known[key] = [self._scaled(inner_split(f, seed=seed)) for f, seed in pairs]
        at = range(len(self.seeds)) if replicates is None else replicates.tolist()
        copies, settings = len(lr), replace(self.protocol.settings, eval_every=0, eval_on="test")
        shape = (copies, len(at))
        batch = Batch(
            [self._known[key][i] for i in at] * copies,
            [self.seeds[i] for i in at] * copies,
            lr=np.broadcast_to(lr, shape).ravel(),
        )
        last = self._simulate(what, batch, algorithm, settings).test[-1]
        gap = np.full(shape, np.nan) if metric is None else last.gap(metric, "hard").reshape(shape)
        return last.accuracy().reshape(shape), gap

    def _simulate(
        self, what: str, batch: "Batch", algorithm: Algorithm, settings: Settings
    ) -> History:
        federations, seeds, lr = batch.federations, batch.seeds, batch.lr
        runs, kept, key = len(federations), self.checkpoints, ""
        init = None if self.init is None else np.stack([self.init(f) for f in federations])
        if kept is not None:
            model = get_model(self.model)
            key = run_key(federations, model, init, algorithm, settings, list(seeds), lr)
        resume = None if kept is None else kept.get(key)
        self.on_progress(what, 0 if resume is None else runs * resume.round)
        return simulate(
            federations, self.model, algorithm, settings, seeds=seeds, lr=lr, init=init,
            on_round=lambda done, total: self.on_progress(what, runs),
            on_state=None if kept is None else partial(kept.put, key), resume=resume,
        )  # fmt: skip

    def _scaled(self, federation: Federation) -> Federation:
        return standardise(federation) if self.protocol.features == "standardised" else federation


def miss(history: History, metric: Metric, kind: Kind, target: np.ndarray) -> np.ndarray:
    """By how much each run misses its target on the federation's rows; 0 where it is met, and next
    to 0 where it is met although the gap has not settled.

    Infinite where the gap is not estimable, and where the model has collapsed: it meets any target.
    """
    assert history.federation is not None
    last = history.federation[-1]
    over = np.maximum(last.gap(metric, kind) - target - NEAR, 0.0)
    if history.control is not None:
        over = np.maximum(over, np.where(history.control.settled, 0.0, UNSETTLED))
    return np.where(np.isfinite(over) & ~collapsed(last), over, np.inf)


def best(grid: np.ndarray, cost: np.ndarray, *, what: str) -> np.ndarray:
    """Each replicate's cheapest candidate; `cost` is (candidate, replicate), NaN: not known."""
    known = np.isfinite(cost)
    lost = np.asarray(~known.any(axis=0))
    middle = len(grid) // 2
    if lost.any():
        warnings.warn(
            f"{what}: the inner split is too small to choose in {lost.sum()} of {lost.size} "
            f"replicates, which take {grid[middle]:g}",
            NotEstimableWarning, stacklevel=2,
        )  # fmt: skip
    return grid[np.where(lost, middle, np.argmin(np.where(known, cost, np.inf), axis=0))]
