"""Cells in, records out: what is on the shelf is taken from it, the rest is trained in batches.

Cells that differ in alpha, strength or learning rate alone share a batch of runs: all their
replicates are trained side by side. A batch is put on the shelf as soon as it is done.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import groupby, product
from typing import Any

import numpy as np

from fedgft.data.dataset import Dataset
from fedgft.engine.schedule import Schedule
from fedgft.experiments.checkpoints import Checkpoints, model_key
from fedgft.experiments.convergence import MODES, Descent, Mode, Path, descend
from fedgft.experiments.protocol import Protocol, get_protocol
from fedgft.experiments.rows import choices, row
from fedgft.experiments.shelf import Shelf, code_hash, key_of
from fedgft.experiments.spec import Cell
from fedgft.experiments.study import OnProgress, Point, Result, Study, silent
from fedgft.federated.methods import SINGLE
from fedgft.metrics import get_metric

MOST = 100  # runs in a batch: more would not be faster, and a kill loses the batch at hand
MOST_RUNS = {"celeba": 10}
OTHERS = (KeyError, TypeError, ValueError, OverflowError, AttributeError)  # cells of others
Cost = Callable[[Cell, Protocol], int]
CURVES = ("accuracy", "gap_soft", "gap_hard", "gap_soft_test", "gap_hard_test")


@dataclass(frozen=True, eq=False)
class Record:
    """A finished cell."""

    cell: Cell
    row: dict[str, Any]  # what `fedgft compare` prints
    rounds: np.ndarray  # (e,)
    curves: dict[str, np.ndarray]  # (e, replicate), NaN where not estimable
    chosen: tuple[str, ...]  # on inner splits, in words
    notes: tuple[str, ...]  # what could not be estimated


@dataclass(frozen=True, eq=False)
class Runner:
    """`load` gives a data set by name. Studies are kept, since cells share partitions and what
    was chosen on them. Images take long enough for checkpoints within a cell."""

    load: Callable[[str], Dataset]
    shelf: Shelf
    on_progress: OnProgress = silent
    network: Any = None  # what images are trained with, and how
    engine: dict[str, Any] = field(default_factory=dict)
    drawn: tuple[int | None, int | None] = (None, None)  # of images, to train and to test
    _keys: dict[str, str] = field(default_factory=dict)
    _studies: dict[Any, Study] = field(default_factory=dict)
    _data: dict[str, Dataset] = field(default_factory=dict)
    _records: dict[Cell, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        code_hash()  # of the code as it is now, not as it may be edited to while this runs

    def records(self, cells: Sequence[Cell]) -> list[Record]:
        """In the order of the cells."""
        for batch in batches([cell for cell in dict.fromkeys(cells) if not self._known(cell)]):
            self._train(batch)
        return [self._records[cell] for cell in cells]

    def work(self, cells: Sequence[Cell], cost: Cost | None = None) -> int:
        """Row-rounds that are still to be done: the length of a progress bar.

        A cell's own runs, and once for all cells that share them, the runs that choose a learning
        rate or a strength for it. `cost` counts something else of a run: clients, or itself.
        """
        runs: dict[tuple[Any, ...], int] = {}
        for cell in dict.fromkeys(cells):
            if self._known(cell):
                continue
            protocol = self._protocol(cell)
            rows = self._rows(cell, protocol) * protocol.settings.rounds
            size = cell.seeds * (rows if cost is None else cost(cell, protocol))
            free = cell.method in SINGLE
            runs[replace(cell, metric="") if free else cell, "run"] = size
            if cell.lr is None and len(protocol.lr) > 1:
                runs[study_of(cell), cell.alpha] = size * len(protocol.lr)
            grid = protocol.strength(cell.method)
            if cell.strength is None and len(grid) > 1:
                runs[cell, "strength"] = size * len(grid)
        return sum(runs.values())

    def paths(self, spec: Descent, *, seeds: int) -> list[Path]:
        """Every step rule in every mode, each kept on the shelf as soon as it is done."""
        dataset, out = self.data(spec.data), []
        for key, mode, rule in self._paths(spec, seeds):
            path = None
            with suppress(*OTHERS):  # not there, or not as we write it
                path = Path.from_json(self.shelf.get(key) or {})
            if path is None:
                said, size = f"convergence, {mode}, {rule}", len(dataset) * seeds
                more = partial(self._one_more, said, size)
                path = descend(dataset, spec, mode, rule, seeds=range(seeds), on_round=more)
                self.shelf.put(key, path.to_json())
            out.append(path)
        return out

    def path_work(self, spec: Descent, *, seeds: int) -> int:
        """As `work`, in row-rounds."""
        missing = sum(self.shelf.get(key) is None for key, _, _ in self._paths(spec, seeds))
        return missing * len(self.data(spec.data)) * seeds * spec.rounds

    def _paths(self, spec: Descent, seeds: int) -> Iterator[tuple[str, Mode, Schedule]]:
        for mode, rule in product(MODES, spec.rules):
            dataset = self.data(spec.data)
            yield key_of(spec, None, dataset, mode=mode, rule=rule, seeds=seeds), mode, rule

    def _one_more(self, what: str, size: int, done: int, total: int) -> None:
        self.on_progress(what, size)

    def data(self, name: str) -> Dataset:
        if name not in self._data:
            self._data[name] = self.load(name)
        return self._data[name]

    def _protocol(self, cell: Cell) -> Protocol:
        """The protocol of a cell, with a fixed grid of rates and a fixed number of rounds."""
        images = self.data(cell.data).images
        base = get_protocol(cell.protocol, images=images, data=cell.data)
        engine = self.engine if images else {}
        settings = replace(base.settings, epochs=cell.epochs, **engine)
        train, test = self.drawn if images else (None, None)
        return replace(
            base, settings=settings, fairfed=cell.rule or base.fairfed,
            train_rows=train or base.train_rows, test_rows=test or base.test_rows,
            more_lr=(), round_factors=(),
        )  # fmt: skip

    def _rows(self, cell: Cell, protocol: Protocol) -> int:
        """That a run-round reads, or nearly."""
        return (protocol.train_rows or len(self.data(cell.data))) * cell.epochs

    def _key(self, cell: Cell) -> str:
        dataset = self.data(cell.data)
        more = {}
        if dataset.images:  # torch computes them
            if cell.data not in self._keys:
                self._keys[cell.data] = model_key(self.network, dataset)
            more = {"network": self._keys[cell.data], "torch": version("torch")}
        return key_of(cell, self._protocol(cell), dataset, **more)

    def _known(self, cell: Cell) -> bool:
        if cell not in self._records and (kept := self.shelf.get(self._key(cell))) is not None:
            with suppress(*OTHERS):  # not as we write it
                self._records[cell] = _read(cell, kept)
        return cell in self._records

    def _study(self, cell: Cell) -> Study:
        key = study_of(cell)
        if key not in self._studies:
            dataset, protocol = self.data(cell.data), self._protocol(cell)
            size = self._rows(cell, protocol)  # a run-round, in row-rounds
            said, rounds = f"{cell.data}, {cell.protocol}: ", self.shelf.folder / "rounds"
            self._studies[key] = Study(
                dataset, protocol, range(cell.seeds), clients=cell.clients, kind=cell.partition,
                model=self.network if dataset.images else "logistic",
                checkpoints=Checkpoints(rounds, share=0.1) if dataset.images else None,
                on_progress=lambda what, runs: self.on_progress(said + what, runs * size),
            )  # fmt: skip
        return self._studies[key]

    def _train(self, cells: Sequence[Cell]) -> None:
        """One batch, trained and put on the shelf."""
        first, study = cells[0], self._study(cells[0])
        points = [Point(c.alpha, strength=c.strength, lr=c.lr) for c in cells]
        with warnings.catch_warnings(record=True) as caught:  # what could not be chosen
            warnings.simplefilter("always")
            results = study.sweep(
                first.method, get_metric(first.metric), points, penalty=first.penalty
            )
        for cell, result in zip(cells, results, strict=True):
            made = _record(study, result)
            said = [str(warning.message) for warning in caught]
            made["notes"] += [text for text in said if f"alpha {cell.alpha:g}:" in text]
            self.shelf.put(self._key(cell), made)
            self._records[cell] = _read(cell, made)
        if study.checkpoints is not None:
            study.checkpoints.clear()


def study_of(cell: Cell) -> tuple[Any, ...]:
    """What cells of one study share."""
    return (
        cell.data, cell.protocol, cell.seeds, cell.clients, cell.partition, cell.epochs, cell.rule,
    )  # fmt: skip


def batches(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells that can be trained side by side, of few runs where a model is large."""
    kind = lambda c: (*study_of(c), c.method, c.metric, c.penalty)  # noqa: E731
    order = {key: i for i, key in reversed(list(enumerate(map(kind, cells))))}
    for _, group in groupby(sorted(cells, key=lambda c: order[kind(c)]), key=kind):
        same = list(group)
        step = max(1, MOST_RUNS.get(same[0].data, MOST) // same[0].seeds)
        for at in range(0, len(same), step):
            yield same[at : at + step]


def _record(study: Study, result: Result) -> dict[str, Any]:
    """As JSON: null where a number is not estimable."""
    history, metric = result.history, result.metric
    assert history.federation is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = row(study, result)
    curves = (
        history.test.accuracy(),
        history.federation.gap(metric, "soft"), history.federation.gap(metric, "hard"),
        history.test.gap(metric, "soft"), history.test.gap(metric, "hard"),
    )  # fmt: skip
    nulls = lambda a: [[v if math.isfinite(v) else None for v in r] for r in a.tolist()]  # noqa: E731
    return {
        "row": line,
        "rounds": history.rounds.tolist(),
        "curves": {name: nulls(values) for name, values in zip(CURVES, curves, strict=True)},
        "chosen": choices(study, [result]),
        "notes": [str(warning.message) for warning in caught],
    }


def _read(cell: Cell, kept: dict[str, Any]) -> Record:
    curves = {name: np.array(kept["curves"][name], dtype=np.float64) for name in CURVES}
    rounds = np.array(kept["rounds"], dtype=np.int64)
    if any(c.shape != (len(rounds), cell.seeds) for c in curves.values()):
        raise ValueError("curves of another shape")
    return Record(
        cell, dict(kept["row"]), rounds, curves, tuple(kept["chosen"]), tuple(kept["notes"])
    )
