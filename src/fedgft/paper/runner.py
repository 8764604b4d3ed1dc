"""Train the cells of experiments in batches; finished cells are read from the cache.

Cells that differ only in alpha, strength or learning rate share a batch of runs: all their
replicates are trained side by side. A batch is stored as soon as it is finished.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

import numpy as np

from fedgft.algorithms.registry import WITHOUT_STRENGTH
from fedgft.data.dataset import Dataset
from fedgft.engine.plan import Schedule
from fedgft.metrics import get_metric
from fedgft.paper.cells import Cell
from fedgft.paper.convergence import MODES, Descent, DescentPath, Mode, descend
from fedgft.study.cache import Checkpoints, ResultCache, code_hash, key_of, model_key
from fedgft.study.protocol import Protocol, get_protocol
from fedgft.study.results import CURVES, choices, measure_rounds, number, row
from fedgft.study.study import OnProgress, Point, Result, Study, ignore_progress

MAX_RUNS = 100  # per batch: more would not be faster, and an interrupt loses the current batch
MAX_IMAGE_RUNS = 10
DAMAGED = (KeyError, TypeError, ValueError, OverflowError, AttributeError)  # for damaged records
Cost = Callable[[Cell, Protocol], int]


@dataclass(frozen=True, eq=False)
class Record:
    """A finished cell.

    Attributes
    ----------
    cell
        What was trained.
    row
        What `fedgft compare` prints.
    rounds, curves
        Rounds (e,), and by the names in `CURVES` arrays (e, replicate), NaN if not estimable.
    chosen, notes
        What was chosen on inner splits, and what could not be estimated, in words.
    """

    cell: Cell
    row: dict[str, Any]
    rounds: np.ndarray
    curves: dict[str, np.ndarray]
    chosen: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Runner:
    """Trains cells and keeps their studies: cells share partitions and the choices made on them.

    Parameters
    ----------
    load
        Returns a data set by its name.
    cache
        Cache of finished cells.
    on_progress
        Called with a text and a number of row-rounds.
    network, engine
        For images: the model, and settings of the engine.
    drawn
        For images: rows that each replicate draws to train and to test.
    """

    load: Callable[[str], Dataset]
    cache: ResultCache
    on_progress: OnProgress = ignore_progress
    network: Any = None
    engine: dict[str, Any] = field(default_factory=dict)
    drawn: tuple[int | None, int | None] = (None, None)
    _keys: dict[str, str] = field(default_factory=dict)
    _studies: dict[Any, Study] = field(default_factory=dict)
    _data: dict[str, Dataset] = field(default_factory=dict)
    _records: dict[Cell, Record] = field(default_factory=dict)

    def __post_init__(self) -> None:
        code_hash()  # cached now, because the source files may be edited during the run

    def data(self, name: str) -> Dataset:
        """Return a data set, loaded once."""
        if name not in self._data:
            self._data[name] = self.load(name)
        return self._data[name]

    # Cells

    def records(self, cells: Sequence[Cell]) -> list[Record]:
        """Train what is missing; return the records in the order of the cells.

        A cell that is asked for twice is trained once. Every batch is stored when it is finished,
        so an interrupted run loses the current batch only.
        """
        for batch in make_batches(
            [cell for cell in dict.fromkeys(cells) if not self._is_known(cell)]
        ):
            self._train(batch)
        return [self._records[cell] for cell in cells]

    def work(self, cells: Sequence[Cell], cost: Cost | None = None) -> int:
        """Return the row-rounds that are still to be done: the length of a progress bar.

        The count includes a cell's own runs and the runs that choose a learning rate or a strength;
        runs that several cells share count once. `cost` returns another unit per run: clients, or
        runs.
        """
        runs: dict[tuple[Any, ...], int] = {}
        for cell in dict.fromkeys(cells):
            if self._is_known(cell):
                continue
            protocol = self._protocol(cell)
            rows = self._rows(cell, protocol) * protocol.settings.rounds
            size = cell.seeds * (rows if cost is None else cost(cell, protocol))
            uses_no_metric = cell.method in WITHOUT_STRENGTH
            runs[replace(cell, metric="") if uses_no_metric else cell, "run"] = size
            if cell.lr is None and len(protocol.lr) > 1:
                runs[study_of(cell), cell.alpha] = size * len(protocol.lr)
            grid = protocol.strength(cell.method)
            if cell.strength is None and len(grid) > 1:
                runs[cell, "strength"] = size * len(grid)
        return sum(runs.values())

    def _protocol(self, cell: Cell) -> Protocol:
        """The protocol of a cell, with a fixed grid of rates and a fixed number of rounds."""
        images = self.data(cell.data).images
        base = get_protocol(cell.protocol, images=images, data=cell.data)
        engine = self.engine if images else {}
        train, test = self.drawn if images else (None, None)
        return replace(
            base,
            settings=replace(base.settings, epochs=cell.epochs, **engine),
            fairfed=cell.rule or base.fairfed,
            train_rows=train or base.train_rows,
            test_rows=test or base.test_rows,
            more_lr=(),
            round_factors=(),
        )

    def _rows(self, cell: Cell, protocol: Protocol) -> int:
        """The rows that one round of one run reads, approximately."""
        return (protocol.train_rows or len(self.data(cell.data))) * cell.epochs

    def _key(self, cell: Cell) -> str:
        dataset = self.data(cell.data)
        more = {}
        if dataset.images:  # their results depend on torch
            if cell.data not in self._keys:
                self._keys[cell.data] = model_key(self.network, dataset)
            more = {"network": self._keys[cell.data], "torch": version("torch")}
        return key_of(cell, self._protocol(cell), dataset, **more)

    def _is_known(self, cell: Cell) -> bool:
        if cell not in self._records and (kept := self.cache.get(self._key(cell))) is not None:
            with suppress(*DAMAGED):
                self._records[cell] = _read_record(cell, kept)
        return cell in self._records

    def _study(self, cell: Cell) -> Study:
        key = study_of(cell)
        if key not in self._studies:
            dataset = self.data(cell.data)
            protocol = self._protocol(cell)
            size = self._rows(cell, protocol)
            prefix = f"{cell.data}, {cell.protocol}: "
            rounds = self.cache.folder / "rounds"
            self._studies[key] = Study(
                dataset,
                protocol,
                range(cell.seeds),
                clients=cell.clients,
                kind=cell.partition,
                model=self.network if dataset.images else "logistic",
                checkpoints=Checkpoints(rounds, share=0.1) if dataset.images else None,
                on_progress=lambda what, runs: self.on_progress(prefix + what, runs * size),
            )
        return self._studies[key]

    def _train(self, cells: Sequence[Cell]) -> None:
        """Train one batch and store it."""
        first = cells[0]
        study = self._study(first)
        study = replace(study, protocol=replace(study.protocol, penalty=first.penalty))
        points = [Point(c.alpha, strength=c.strength, lr=c.lr) for c in cells]
        with warnings.catch_warnings(record=True) as caught:  # what could not be chosen
            warnings.simplefilter("always")
            metric = get_metric(first.metric)
            results = study.sweep(first.method, metric, points)
        texts = [str(warning.message) for warning in caught]
        for cell, result in zip(cells, results, strict=True):
            record = _record(study, result)
            record["notes"] += [text for text in texts if f"alpha {cell.alpha:g}:" in text]
            self.cache.put(self._key(cell), record)
            self._records[cell] = _read_record(cell, record)
        if study.checkpoints is not None:
            study.checkpoints.clear()

    # Convergence

    def paths(self, spec: Descent, *, seeds: int) -> list[DescentPath]:
        """Return the path of every step rule in every mode, each stored when it is finished.

        `seeds`: the number of replicates that a path is averaged over.
        """
        dataset = self.data(spec.data)
        paths = []
        for key, mode, rule in self._path_keys(spec, seeds):
            path = None
            with suppress(*DAMAGED):
                path = DescentPath.from_json(self.cache.get(key) or {})
            if path is None:
                report = partial(self._report_round, f"{mode}, {rule}", len(dataset) * seeds)
                path = descend(dataset, spec, mode, rule, seeds=range(seeds), on_round=report)
                self.cache.put(key, path.to_json())
            paths.append(path)
        return paths

    def path_work(self, spec: Descent, *, seeds: int) -> int:
        """Return the row-rounds of the paths that are still to be done."""
        missing = sum(self.cache.get(key) is None for key, _, _ in self._path_keys(spec, seeds))
        return missing * len(self.data(spec.data)) * seeds * spec.rounds

    def _path_keys(self, spec: Descent, seeds: int) -> Iterator[tuple[str, Mode, Schedule]]:
        dataset = self.data(spec.data)
        for mode, rule in product(MODES, spec.rules):
            yield key_of(spec, None, dataset, mode=mode, rule=rule, seeds=seeds), mode, rule

    def _report_round(self, what: str, rows: int, done: int, total: int) -> None:
        """Report a round of all replicates: `rows` are those that it reads."""
        self.on_progress(f"convergence, {what}", rows)


def study_of(cell: Cell) -> tuple[Any, ...]:
    """Return the values that all cells of one study share.

    They differ only in what a `Point` holds, in the method, the metric and the penalty.
    """
    names = ("data", "protocol", "seeds", "clients", "partition", "epochs", "rule")
    return tuple(getattr(cell, name) for name in names)


def make_batches(cells: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Yield cells that can be trained side by side, with few runs if the model is large.

    They differ in alpha, strength and learning rate only. A batch has at most `MAX_RUNS` runs, or
    `MAX_IMAGE_RUNS` of images, and at least one cell.
    """
    alike: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        key = (*study_of(cell), cell.method, cell.metric, cell.penalty)
        alike.setdefault(key, []).append(cell)
    for group in alike.values():
        runs = MAX_IMAGE_RUNS if group[0].data == "celeba" else MAX_RUNS
        step = max(1, runs // group[0].seeds)
        for start in range(0, len(group), step):
            yield group[start : start + step]


def _record(study: Study, result: Result) -> dict[str, Any]:
    """A record as JSON: null if a number is not estimable."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = row(study, result)
    curves = measure_rounds(result).items()
    return {
        "row": line,
        "rounds": result.history.rounds.tolist(),
        "curves": {name: [list(map(number, v)) for v in values] for name, values in curves},
        "chosen": choices(study, [result]),
        "notes": [str(warning.message) for warning in caught],
    }


def _read_record(cell: Cell, kept: dict[str, Any]) -> Record:
    """Read what `_record` returned; a file with other contents raises one of `DAMAGED`."""
    curves = {name: np.array(kept["curves"][name], dtype=np.float64) for name in CURVES}
    rounds = np.array(kept["rounds"], dtype=np.int64)
    if any(c.shape != (len(rounds), cell.seeds) for c in curves.values()):
        raise ValueError("curves of another shape")
    return Record(
        cell=cell,
        row=dict(kept["row"]),
        rounds=rounds,
        curves=curves,
        chosen=tuple(kept["chosen"]),
        notes=tuple(kept["notes"]),
    )
