"""A study: one data set, one protocol, some replicates; cells of it are trained on demand.

Replicate i has its own test rows, its own partition and its own random numbers, all fixed by
seed i. Where a protocol leaves a value open, every replicate chooses its own on an inner split:
each client holds out a quarter of its training rows, and test rows are never looked at. The
learning rate is the one with which FedAvg is most accurate there; a strength is the one with
the smallest decision-level gap within one point of the best accuracy there.
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
from fedgft.federated.methods import SINGLE
from fedgft.metrics import Metric, NotEstimableWarning, get_metric
from fedgft.models import get_model

ONE_POINT = 0.01
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
    lr: np.ndarray  # one a replicate
    strength: np.ndarray
    chosen: tuple[str, ...] = ()  # which of the two were chosen on inner splits


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
            federations = [f for p in new for f in cells[p][0]]
            lr = np.concatenate([cells[p][1] for p in new])
            strength = np.concatenate([cells[p][2] for p in new])
            history = self._simulate(
                f"{method}, {metric.name}, alpha {', '.join(f'{p.alpha:g}' for p in new)}",
                federations,
                self.protocol.algorithm(method, metric, strength, penalty=penalty),
                self.protocol.settings, lr=lr,
            )  # fmt: skip
            for i, p in enumerate(new):
                own = slice(i * len(self.seeds), (i + 1) * len(self.seeds))
                self._known[("run", p, *what)] = history.part(own)
        return [
            Result(p.alpha, method, metric, self._known[("run", p, *what)], *cells[p],
                   self._chosen(p, method))
            for p in points
        ]  # fmt: skip

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
        """Run-rounds that these cells take: the length of a progress bar."""
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
            plain = self.protocol.algorithm("fedavg", get_metric("sp"), np.zeros(1))
            accuracy, _ = self._inner(
                f"learning rate, alpha {alpha:g}", alpha, plain, None, lr=grid[:, None]
            )
            self._known[key] = best(grid, -accuracy, what=f"learning rate, alpha {alpha:g}")
        return self._known.get(key, np.full(len(self.seeds), grid[0]))

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
    ) -> tuple[np.ndarray, np.ndarray]:
        """Validation accuracy and hard gap, (candidate, replicate), on every inner split."""
        key = ("inner", alpha)
        if key not in self._known:
            pairs = zip(self.federations(alpha), self.seeds, strict=True)
            self._known[key] = [self._scaled(inner_split(f, seed=seed)) for f, seed in pairs]
        copies, settings = len(lr), replace(self.protocol.settings, eval_every=0, eval_on="test")
        rates = np.broadcast_to(lr, (copies, len(self.seeds))).ravel()
        history = self._simulate(what, self._known[key] * copies, algorithm, settings, lr=rates)
        shape, last = (copies, len(self.seeds)), history.test[-1]
        gap = np.full(shape, np.nan) if metric is None else last.gap(metric, "hard").reshape(shape)
        return last.accuracy().reshape(shape), gap

    def _simulate(
        self, what: str, federations: Sequence[Federation], algorithm: Algorithm,
        settings: Settings, *, lr: np.ndarray,
    ) -> History:  # fmt: skip
        """Replicates follow one another in the order of the seeds, copy after copy."""
        runs, kept = len(federations), self.checkpoints
        init = None if self.init is None else np.stack([self.init(f) for f in federations])
        seeds, key = list(self.seeds) * (runs // len(self.seeds)), ""
        if kept is not None:
            model = get_model(self.model)
            key = run_key(federations, model, init, algorithm, settings, seeds, lr)
        resume = None if kept is None else kept.get(key)
        self.on_progress(what, 0 if resume is None else runs * resume.round)
        return simulate(
            federations, self.model, algorithm, settings, seeds=seeds, lr=lr, init=init,
            on_round=lambda done, total: self.on_progress(what, runs),
            on_state=None if kept is None else partial(kept.put, key), resume=resume,
        )  # fmt: skip

    def _scaled(self, federation: Federation) -> Federation:
        return standardise(federation) if self.protocol.features == "standardised" else federation


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
