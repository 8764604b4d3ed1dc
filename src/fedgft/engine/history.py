"""What a simulation returns: sums at each measured round, parameters, tables and models of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedgft.algorithms.controller import REPORT_ARRAYS, ControlReport
from fedgft.data.dataset import Federation, get_raw_scaling
from fedgft.data.encode import Encoder, Names
from fedgft.errors import FedgftError, LazyModule
from fedgft.fair_model import FairModel
from fedgft.forest import Forest
from fedgft.metrics import CATALOG, Metric, get_metric
from fedgft.metrics.functions import is_collapsed
from fedgft.metrics.intervals import FEW, effective_counts, gap_interval
from fedgft.metrics.metric import Statistics
from fedgft.models import MLP, Logistic, Model, Module, ResNet18, Trees, unflatten
from fedgft.sums import Sums
from fedgft.validation import check_choice, check_integer

if TYPE_CHECKING:
    import narwhals as nw
else:
    nw = LazyModule("narwhals")

PER_RUN = ("seeds", "lr", "gap", "gap_test")  # arrays of a `TrainingRecord`
LIBRARIES = ("polars", "pandas")
FrameLibrary = Literal["polars", "pandas"]


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """How raw rows become the input of a model: what parameters need to become a `FairModel`.

    Parameters
    ----------
    data
        Name of the data set.
    columns, classes, groups
        Names of the features, the classes and the groups.
    encoder
        How a raw table becomes the features; None if the features were given as arrays.
    mean, spread
        (d,) the model receives ``(x - mean) / spread``.
    """

    data: str
    columns: Names
    classes: Names
    groups: Names
    encoder: Encoder | None
    mean: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, federation: Federation) -> ModelInputs:
        """Return the inputs of a model that was trained on this federation."""
        data = federation.dataset
        mean, spread = get_raw_scaling(federation)
        names = (data.columns, data.classes, data.group_names)
        return cls(data.name, *names, data.encoder, mean, spread)

    def build(self, model: Model, params: np.ndarray, about: Mapping[str, Any]) -> FairModel:
        """Return the model with these parameters, (p,).

        Parameters
        ----------
        model
            The architecture.
        params
            Parameters in the order of `fedgft.models.named_tensors`.
        about
            What the header of the model says about its training; JSON must be able to hold it.
        """
        header = {
            **about,
            "columns": self.columns,
            "classes": self.classes,
            "groups": self.groups,
            "model": model.name,
            "encoder": None if self.encoder is None else self.encoder.to_json(),
        }
        if isinstance(model, Trees):
            header["trees"] = asdict(model)
            tensors = Forest.from_vector(params).to_tensors()
        else:
            shapes = model.shapes(features=len(self.mean), classes=len(self.classes))
            tensors = unflatten(params, shapes)
        if isinstance(model, ResNet18):
            header["network"] = {"norm": model.norm, "stem": model.stem}
        return FairModel(
            tensors,
            self.mean,
            self.spread,
            json.loads(json.dumps(header)),
            module=model.make if isinstance(model, Module) else None,
        )


@dataclass(frozen=True, eq=False)
class TrainingRecord:
    """How the runs of a history were trained: what `History.model` needs beside the parameters.

    Parameters
    ----------
    model
        The architecture; None for a module of the user after the history was pickled.
    method, metric
        The name of the method, and of the metric whose gap is recorded.
    inputs
        How raw rows become the input of each run's model.
    seeds, lr
        (run,) the seed and the first learning rate of each run.
    gap, gap_test
        (run,) the gap of the final model on the rows of all clients (NaN with ``eval_on="test"``)
        and on the test rows: of decisions, or of scores if the target is for scores.
    """

    model: Model | None
    method: str
    metric: str
    inputs: tuple[ModelInputs, ...]
    seeds: np.ndarray
    lr: np.ndarray
    gap: np.ndarray
    gap_test: np.ndarray

    def __getstate__(self) -> dict[str, Any]:
        """Leave a module of the user out: the function that makes it may not be picklable."""
        kept = self.model if isinstance(self.model, Logistic | MLP | ResNet18 | Trees) else None
        return {**vars(self), "model": kept}

    def part(self, runs: slice | np.ndarray) -> TrainingRecord:
        """Return the record of some runs."""
        inputs = tuple(self.inputs[i] for i in np.arange(len(self.inputs))[runs])
        arrays = {name: getattr(self, name)[runs] for name in PER_RUN}
        return replace(self, inputs=inputs, **arrays)

    def with_runs(self, at: np.ndarray, other: TrainingRecord) -> TrainingRecord:
        """Return this record with the runs `at` replaced by the runs of `other`."""
        arrays = {name: getattr(self, name).copy() for name in PER_RUN}
        for name, array in arrays.items():
            array[at] = getattr(other, name)
        return replace(self, **arrays)


@dataclass(frozen=True, repr=False)
class History:
    """The measurements of a simulation, stored as sums from which every metric is computed.

    `simulate` returns it. Arrays have a leading axis `run`; sums at several rounds have the axes
    (e, run, ...), where e counts the measured rounds.

    Parameters
    ----------
    rounds
        Number of completed rounds at each measurement, (e,); the first entry is 0.
    federation
        Sums over the training rows of all clients, (e, run, ...); None with ``eval_on="test"``. Of
        trees with folds, each row is decided by the model that has not seen it.
    test
        Sums over the test rows, (e, run, ...).
    before, after
        Sums of each client, (run, client, ...), before the first round and after the last round;
        None with ``eval_on="test"``.
    params
        Final parameters, (run, p), in the order of `fedgft.models.named_tensors`.
    seconds
        Duration of the simulation in seconds.
    executor
        "fused", "stacked", "sequential" or "trees".
    control
        Whether each run reached its target; None (the default) for methods without a target.
    record
        How the runs were trained, for `model` and `to_frame`; None (the default): not known.
    scores
        Per run, the probabilities (rows, classes) of the clients' rows in the order of
        `Federation.rows`, where they are not those of the model itself: of trees with folds, each
        row's are those of the model that has not seen it. None (the default): those of the model.
    squares
        Sums of squared weights over the test rows, (run, ...), of the final models; `sums` of
        weighted rows are in units of the smallest weight. None (the default): without weights.

    Examples
    --------
    >>> import fedgft
    >>> federation = fedgft.partition(fedgft.load("synthetic"), clients=3)
    >>> history = fedgft.simulate(federation, algorithm="fedavg", rounds=2)
    >>> history.rounds
    array([0, 1, 2])
    >>> history.test[-1].gap("sp", "hard").shape  # of decisions, on test rows, per run
    (1,)
    >>> history.to_frame("sp").columns
    ['run', 'seed', 'round', 'rows', 'accuracy', 'gap_hard_sp', 'gap_soft_sp']
    >>> history.model(run=0).classes
    ('0', '1')
    """

    rounds: np.ndarray
    federation: Sums | None
    test: Sums
    before: Sums | None
    after: Sums | None
    params: np.ndarray
    seconds: float
    executor: str
    control: ControlReport | None = None
    record: TrainingRecord | None = None
    scores: tuple[np.ndarray, ...] | None = None
    squares: Sums | None = None

    def __repr__(self) -> str:
        runs = len(self.params)
        accuracy = self.test[-1].accuracy()
        known = accuracy[np.isfinite(accuracy)]
        parts = [f"{runs} run{'s' * (runs != 1)}", f"{self.rounds[-1]} rounds"]
        parts.append(f"test accuracy {known.mean():.3f}" if len(known) else "no test accuracy")
        if self.control is not None:
            parts.append(f"target reached in {int(self.control.reached.sum())} of {runs}")
        return f"History({', '.join(parts)}, {self.executor}, {self.seconds:.1f} s)"

    def to_frame(self, *metrics: str | Metric, library: FrameLibrary = "polars") -> Any:
        """Return a table with one row per run, measured round and kind of rows.

        Parameters
        ----------
        *metrics
            The metrics whose gaps become columns, as names or `Metric` objects. None are chosen by
            default; the table then has accuracy only.
        library
            Which kind of table to return: "polars" (default) or "pandas".

        Returns
        -------
        DataFrame
            The columns are ``run`` (from 0), ``seed``, ``round``, ``rows`` ("clients": the training
            rows of all clients, or "test"), ``accuracy``, and for each metric ``gap_hard_sp``, the
            gap of decisions, and ``gap_soft_sp``, the gap of scores (here for the metric sp). Rates
            are fractions. A value that is not estimable is null (polars) or NaN (pandas).
        """
        check_choice("library", library, LIBRARIES)
        chosen = [get_metric(metric) for metric in metrics]
        kinds = {"clients": self.federation, "test": self.test}
        parts = [self._columns(k, sums, chosen) for k, sums in kinds.items() if sums is not None]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return _make_frame(columns, library)

    def _columns(self, rows: str, sums: Sums, metrics: list[Metric]) -> dict[str, np.ndarray]:
        """Return the columns of `to_frame` for one kind of rows, each run after the other."""
        runs = len(self.params)
        measured = len(self.rounds)
        every_run = np.arange(runs)
        seeds = every_run if self.record is None else self.record.seeds
        columns = {
            "run": np.repeat(every_run, measured),
            "seed": np.repeat(seeds, measured),
            "round": np.tile(self.rounds, runs),
            "rows": np.full(runs * measured, rows),
            "accuracy": sums.accuracy().T.ravel(),
        }
        for metric in metrics:
            columns[f"gap_hard_{metric.name}"] = sums.gap(metric, "hard").T.ravel()
            columns[f"gap_soft_{metric.name}"] = sums.gap(metric, "soft").T.ravel()
        return columns

    def count_decisions(self, metric: Metric, run: int | slice = slice(None)) -> Statistics:
        """Return the final model's statistics of decisions on test rows, for intervals.

        They are counts, (run, 2, v, g), or (2, v, g) of one run. If rows have weights, they are
        the numbers of equally weighted rows that say as much.
        """
        found = self.test[-1, run].statistics(metric, "hard")
        if self.squares is None:
            return found
        return effective_counts(found, self.squares[run].statistics(metric, "hard"))

    def model(self, run: int = 0) -> FairModel:
        """Return the trained model of a run, which predicts new rows and can be saved.

        Parameters
        ----------
        run
            The index of the run, from 0 (the default).

        Returns
        -------
        FairModel
            The final model with its scaling and, if the data set came from a table, its encoder.

        Raises
        ------
        FedgftError
            There is no such run, its training diverged, or the history was read from a pickle,
            which excludes your own modules.
        """
        check_integer("run", run, least=0, most=len(self.params) - 1)
        record = self.record
        if record is None or record.model is None:
            text = "is not in this history: a pickle leaves out the function that makes a module; "
            advice = "predict with fedgft.engine.predict_proba and History.params"
            raise FedgftError(text + advice, field="model", kind="unsupported")
        if not np.isfinite(self.params[run]).all():
            text = f"`run` {run} has diverged: its parameters are not finite; try a smaller `lr`"
            raise FedgftError(text, kind="data")
        inputs = record.inputs[run]
        about = {
            "data": inputs.data,
            "method": record.method,
            "metric": record.metric,
            "seed": int(record.seeds[run]),
            "trained": self._describe(run, record),
        }
        return inputs.build(record.model, self.params[run], about)

    def _describe(self, run: int, record: TrainingRecord) -> dict[str, Any]:
        """Return how a run was trained, its accuracy and its gap, for the header of its model.

        The keys are those of `fedgft.study.results.describe_training`. The interval of the gap is
        known for the metrics of the catalog, not for weighted sums or metrics of the user.
        """
        clients = None if self.federation is None else self.federation[-1, run]
        control = self.control
        kind = "hard" if control is None else control.kind
        low = high = None
        metric = self.test.bind(record.metric) if record.metric in CATALOG else None
        if kind == "hard" and metric is not None and metric.has_interval:
            ends = gap_interval(metric, self.count_decisions(metric, run), fewest=FEW)
            low, high = (_finite_or_none(end) for end in ends)
        local: dict[str, float | None] = {}
        if control is not None and control.local_target is not None:
            local_gap = np.nan if control.local_gap is None else control.local_gap[run]
            local["local_target"] = float(control.local_target[run])
            local["local_gap"] = _finite_or_none(local_gap)
        return {
            "seed": int(record.seeds[run]),
            "rounds": int(self.rounds[-1]),
            "lr": float(record.lr[run]),
            "target": None if control is None else float(control.target[run]),
            **local,
            "gap_of": {"hard": "decisions", "soft": "scores"}[kind],
            "gap": _finite_or_none(record.gap[run]),
            "gap_test": _finite_or_none(record.gap_test[run]),
            "gap_test_low": low,
            "gap_test_high": high,
            "reached": None if control is None else bool(control.reached[run]),
            "collapsed": None if clients is None else bool(is_collapsed(clients)),
            "accuracy": None if clients is None else _finite_or_none(clients.accuracy()),
            "accuracy_test": _finite_or_none(self.test[-1, run].accuracy()),
            "out_of_fold": isinstance(record.model, Trees) and record.model.folds > 0,
        }

    def part(self, runs: slice | np.ndarray) -> History:
        """Return the history of some runs; `seconds` is divided in proportion to their number.

        Parameters
        ----------
        runs
            A slice, indices, or a mask of the runs.
        """
        params = self.params[runs]
        return replace(
            self,
            federation=self.federation and self.federation[:, runs],
            test=self.test[:, runs],
            before=self.before and self.before[runs],
            after=self.after and self.after[runs],
            params=params,
            seconds=self.seconds * (len(params) / len(self.params)),
            control=self.control and self.control.part(runs),
            record=self.record and self.record.part(runs),
            scores=self.scores and tuple(self.scores[i] for i in np.arange(len(self.params))[runs]),
            squares=self.squares and self.squares[runs],
        )

    def with_runs(self, at: np.ndarray, other: History) -> History:
        """Return this history with the runs `at` replaced by the runs of `other`.

        Both histories must have the same number of measurements.

        Parameters
        ----------
        at
            Indices of the runs.
        other
            A history with as many runs, on the same federations and seeds.
        """

        every_round = (slice(None), at)
        places: dict[str, Any] = {"federation": every_round, "test": every_round}
        places |= dict.fromkeys(("before", "after", "squares"), at)
        changed: dict[str, Any] = {"control": None, "scores": None}
        for name, place in places.items():
            mine = getattr(self, name)
            theirs = getattr(other, name)
            changed[name] = mine and theirs and mine.replaced(place, theirs)
        if self.control is not None and other.control is not None:
            changed["control"] = self.control.with_runs(at, other.control)
        if self.record is not None and other.record is not None:
            changed["record"] = self.record.with_runs(at, other.record)
        width = max(self.params.shape[1], other.params.shape[1])  # of trees, numbers may differ
        params, theirs = (_pad_columns(each, width) for each in (self.params, other.params))
        params[at] = theirs
        return replace(self, params=params, seconds=self.seconds + other.seconds, **changed)


def join_runs(parts: Sequence[History], order: np.ndarray) -> History:
    """Return one history with the runs of several, which have the same rounds.

    Parameters
    ----------
    parts
        Histories of different runs.
    order
        The position of each run in the result: of those of the first part, then the second, ...
    """
    first = parts[0]
    back = np.argsort(order)

    def join(name: str, axis: int) -> Any:
        each = [getattr(part, name) for part in parts]
        if each[0] is None:
            return None
        arrays = zip(*(sums.arrays for sums in each), strict=True)
        joined = (np.concatenate(group, axis=axis).take(back, axis=axis) for group in arrays)
        return Sums(*joined, axis=each[0].axis)

    width = max(part.params.shape[1] for part in parts)
    scores = None
    if first.scores is not None:
        every = [score for part in parts for score in part.scores or ()]
        scores = tuple(every[i] for i in back)
    return replace(
        first,
        federation=join("federation", 1),
        test=join("test", 1),
        before=join("before", 0),
        after=join("after", 0),
        squares=join("squares", 0),
        params=np.concatenate([_pad_columns(part.params, width) for part in parts])[back],
        seconds=sum(part.seconds for part in parts),
        control=None if first.control is None else _join_reports(parts, back),
        record=None if first.record is None else _join_records(parts, back),
        scores=scores,
    )


def _join_reports(parts: Sequence[History], back: np.ndarray) -> ControlReport:
    reports = [part.control for part in parts if part.control is not None]
    arrays = {
        name: np.concatenate([getattr(report, name) for report in reports])[back]
        for name in REPORT_ARRAYS
        if getattr(reports[0], name) is not None
    }
    return ControlReport(**arrays, kind=reports[0].kind)


def _join_records(parts: Sequence[History], back: np.ndarray) -> TrainingRecord:
    records = [part.record for part in parts if part.record is not None]
    inputs = [each for record in records for each in record.inputs]
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(record, name) for record in records])[back]
        for name in PER_RUN
    }
    return replace(records[0], inputs=tuple(inputs[i] for i in back), **joined)


def _pad_columns(array: np.ndarray, width: int) -> np.ndarray:
    """Return a copy with zeros in further columns."""
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))


def _finite_or_none(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _make_frame(columns: Mapping[str, np.ndarray], library: FrameLibrary) -> Any:
    """Return a table; numbers that are not finite become null in polars, NaN in pandas."""
    try:
        frame = nw.from_dict(columns, backend=library)
    except ModuleNotFoundError as error:
        text = f"{library} is not installed: pip install {library}"
        raise FedgftError(text, field="library", kind="extra") from error
    names = [name for name, values in columns.items() if values.dtype.kind == "f"]
    finite = [nw.when(nw.col(name).is_finite()).then(nw.col(name)).alias(name) for name in names]
    return frame.with_columns(*finite).to_native()
