"""Simulations: batches of runs that differ in seed, data or numbers, but not in shapes.

Leading axes of arrays are (run, client).
"""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np

from fedgft.algorithms import METHODS, Algorithm, get_method, with_base
from fedgft.algorithms.controller import ControlReport, TargetMissedWarning
from fedgft.algorithms.registry import PerRun, bind_algorithm
from fedgft.data.dataset import Federation
from fedgft.engine.executors import choose_executor
from fedgft.engine.history import History, ModelInputs, TrainingRecord
from fedgft.engine.loop import TrainingLoop
from fedgft.engine.plan import RowIndex, index_rows
from fedgft.engine.round import RoundLoop
from fedgft.engine.state import Snapshot, State, pack, unpack
from fedgft.engine.trees.boosting import BoostingLoop, BoostingState
from fedgft.engine.trees.rows import read_fields
from fedgft.errors import FedgftError
from fedgft.fair_model import softmax
from fedgft.forest import Forest
from fedgft.formatting import enumerate_names
from fedgft.metrics import Metric, get_metric
from fedgft.models import MLP, Logistic, Model, Trees, get_model, prepare_logits
from fedgft.settings import MAX_SEED, Settings
from fedgft.sums import Sums, stack
from fedgft.validation import (
    as_array,
    check_choice,
    check_instance,
    check_integer,
    check_number_per_run,
    format_value,
)

MAX_PREDICTED = 2**22  # features that `predict_proba` reads at a time
TREES_LR = 0.1
TREES = 100
DEFAULT_LR = 0.02  # in the middle of the rates that the protocol "heldout" chooses from
SCALE_ROWS = 4096  # rows that decide whether features are on a usual scale
LARGE_FEATURE = 5.0  # root of the mean square of a column; 1 if it is standardized
SMALL_FEATURE = 0.01  # largest value of a column

OnRound = Callable[[int, int], None]  # rounds done, rounds in all
OnModel = Callable[[int, np.ndarray], None]  # rounds done, parameters (run, p)
OnState = Callable[[int, Callable[[], Snapshot]], None]  # rounds done, and how to take a snapshot


def simulate(
    federations: Federation | Sequence[Federation],
    model: Any = "logistic",
    algorithm: Algorithm | str = "fedgft-control",
    settings: Settings | None = None,
    *,
    seeds: int | Sequence[int] | np.ndarray = 0,
    metric: str | Metric | None = None,
    target: PerRun | None = None,
    local_target: PerRun | None = None,
    lam: PerRun | None = None,
    beta: PerRun | None = None,
    base: str | None = None,
    rounds: int | None = None,
    lr: float | np.ndarray | None = None,
    init: np.ndarray | None = None,
    on_round: OnRound | None = None,
    on_model: OnModel | None = None,
    on_state: OnState | None = None,
    resume: Snapshot | None = None,
) -> History:
    """Train a model in a simulated federation; several runs are trained together.

    The first call on a computer compiles the training of linear models, which takes up to half a
    minute; the compiled code is kept on disk.

    Parameters
    ----------
    federations
        One `Federation`, which all runs share, or a list with one per run. The federations of a
        list have the same data set and the same number of clients.
    model
        "logistic" (default), "mlp", "trees", "resnet18", an `nn.Module`, a function that makes one,
        or a model of `fedgft.models`.
    algorithm
        The name of a method, a key of `fedgft.algorithms.METHODS`: "fedavg", "lrw", "lft",
        "fairfed", "fedgft", "fedgft-control" (default), or a published one such as "fedfb"; or an
        `Algorithm`, such as ``fedgft.algorithms.fedgft_control("sp", 0.02)``,
        which already contains `metric`, `target`, `local_target`, `lam`, `beta` and `base`.
    settings
        Rounds, batches, optimizer and so on, the same for all runs; None: the recommended ones,
        which are ``Settings()``.
    seeds
        The seed of the run (default: 0), or a list with one seed per run.
    metric
        The metric whose gap is reduced: a name or a `Metric`; None: "sp". Only for the name of a
        method; "fedavg", "lrw" and methods for losses ignore it. "sp@all" and "eop@all" are for
        "fedgft".
    target
        Only for "fedgft-control", "fedfact" and "puffle": the largest gap to leave, as a fraction;
        for "bounded-group-loss": the largest mean loss of a group. None: 0. One number, or an array
        with one per run.
    local_target
        Only for "fedgft-control": the largest gap to leave on each client's own rows, besides that
        of all rows; None: local gaps are not limited. One number, or one per run.
    lam
        Only for methods with this strength, such as "lft" and "fedgft"; None: the method's
        `default`, such as 20. One number, or one per run.
    beta
        Only for "fairfed" and "fade": the strength; None: 1. One number, or one per run.
    base
        Only for the name of a method: the federated algorithm that it extends, such as "fedprox" or
        "scaffold"; None: "fedavg".
    rounds
        Number of rounds, if there are no `settings`; of trees, one grows per round. None: 50, or
        100 trees.
    lr
        Learning rate of the clients in the first round; one number, or one per run. None: 0.02, for
        features that `standardize` has scaled; a warning says so where they are on other scales. Of
        trees, the share of each step that is taken; None: 0.1.
    init
        Parameters to start from, (p,) or (run, p); None: drawn from the seed of each run.
    on_round
        Called after every round with the number of completed rounds and the total number of
        rounds; None: nothing is called.
    on_model
        Called at every measurement with the number of completed rounds and the global models,
        (run, p); None: nothing is called.
    on_state
        Called after every round except the last, with the number of completed rounds and a function
        that takes a snapshot; None: nothing is called.
    resume
        A snapshot to continue from; the result is bit-identical to that of an uninterrupted call
        with the same arguments. None: start from the beginning.

    Returns
    -------
    History
        The measured sums and the final parameters.

    Raises
    ------
    FedgftError
        An argument is of the wrong type or does not fit the others; `field` is its name.

    Examples
    --------
    >>> import fedgft
    >>> data = fedgft.load("synthetic")
    >>> federation = fedgft.standardize(fedgft.partition(data, clients=5, seed=0))
    >>> history = fedgft.simulate(federation, "logistic", "fedgft", metric="sp", lam=20, rounds=3)
    >>> history.to_frame("sp").filter(rows="test").shape  # rounds 0 to 3
    (4, 7)
    >>> decisions = history.model().predict(data.features[:100])
    """
    started = time.perf_counter()
    federations, run_seeds = _pair_runs(federations, seeds)
    name = algorithm if isinstance(algorithm, str) else "own algorithm"
    strengths = {"target": target, "lam": lam, "beta": beta}
    algorithm = _make_algorithm(algorithm, metric, strengths, base=base, local_target=local_target)
    algorithm = bind_algorithm(algorithm, federations[0].dataset.axis)
    chosen = _find_metric(algorithm, metric)
    chosen.affine(len(federations[0].dataset.classes))  # raises if sums cannot carry the metric
    init = _check_init(init)
    _refuse_model_class(model)
    model = get_model(model)
    settings = _make_settings(settings, rounds, model)
    if lr is None:
        lr = TREES_LR if isinstance(model, Trees) else DEFAULT_LR
        _warn_of_scales(federations[0], model)
    rates = _check_rates(lr, len(run_seeds))
    settings.check_cohort(federations[0].num_clients)
    _check_weights(federations, settings)
    index = index_rows(federations)
    try:
        loop = _make_loop(index, model, algorithm, settings, seeds=run_seeds, lr=rates)
        history = _run(loop, init, resume, callbacks=(on_round, on_model, on_state))
    except (IndexError, RuntimeError, MemoryError) as error:
        explained = _explain(error, settings, images=index.dataset.images)
        if explained is None:
            raise
        raise explained from error
    _warn_of_misses(history.control, settings.rounds, rates)
    inputs = {id(each): ModelInputs.of(each) for each in federations}
    history = replace(history, squares=_sum_squares(federations, model, history.params))
    about = {"model": model, "method": name, "seeds": run_seeds.astype(np.int64), "lr": rates}
    record = _record(history, chosen, inputs=tuple(inputs[id(f)] for f in federations), **about)
    return replace(history, seconds=time.perf_counter() - started, record=record)


def predict_proba(
    federation: Federation, model: Any, params: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Class probabilities of single rows, (rows, classes).

    Parameters
    ----------
    federation
        The federation whose data set holds the rows and whose feature scaling is applied.
    model
        As in `simulate`.
    params
        Parameters of one run, (p,), as in `History.params`.
    rows
        Row numbers of the data set.
    """
    data = federation.dataset
    classes = len(data.classes)
    features = data.features.shape[1]
    model = get_model(model)
    if isinstance(model, Trees):
        return softmax(Forest.from_vector(params).logits(read_fields(data)[rows]))
    logits = prepare_logits(model, params, features=features, classes=classes)
    step = max(1, MAX_PREDICTED // max(1, data.features[:1].size))
    parts = []
    for start in range(0, len(rows), step):
        parts.append(softmax(logits(federation.scale_rows(rows[start : start + step]))))
    return np.concatenate(parts) if parts else np.zeros((0, classes))


def _pair_runs(federations: Any, seeds: Any) -> tuple[list[Federation], np.ndarray]:
    """Return one federation and one seed per run, or refuse what cannot be paired."""
    alone = not isinstance(federations, Sequence) or isinstance(federations, str)
    each: list[Any] = [federations] if alone else list(federations)
    for federation in each:
        hint = "partition() makes one of a Dataset"
        check_instance("federations", federation, Federation, hint)
    is_number = isinstance(seeds, Integral) and not isinstance(seeds, bool)
    values: Any = [seeds] if is_number else seeds
    if isinstance(values, str | bytes | dict) or as_array("seeds", values).ndim != 1:
        text = f"must be a whole number, or a list of them, not {format_value(seeds)}"
        raise FedgftError(text, field="seeds")
    for seed in values:
        check_integer("seeds", seed, least=0, most=MAX_SEED)
    if not (each and len(values)):
        raise FedgftError("`federations` is empty: there is no federation to train on")
    each = each * len(values) if alone else each
    if len(each) != len(values):
        text = f"there are {len(values)} for {len(each)} federations: give one seed per federation"
        raise FedgftError(f"`seeds`: {text}")
    return each, np.asarray(values, np.uint64)


def _check_weights(federations: list[Federation], settings: Settings) -> None:
    """Refuse weights with noise, whose size is that of rows, and clients whose rows have none."""
    if federations[0].dataset.row_weights is None:
        return
    if settings.noise:
        text = "is noise on numbers of rows, and these rows have weights: leave one out"
        raise FedgftError(text, field="noise", kind="conflict")
    if not all(federation.weighted_sizes.any() for federation in federations):
        text = f"{federations[0].dataset.name}: no training row has a weight above 0"
        raise FedgftError(text, kind="data")


def _sum_squares(federations: list[Federation], model: Model, params: np.ndarray) -> Sums | None:
    """Return the sums of squared weights over test rows, (run, ...); None without weights."""
    data = federations[0].dataset
    weights = data.row_weights
    if weights is None:
        return None
    found = []
    for federation, each in zip(federations, params, strict=True):
        rows = federation.test
        probs = predict_proba(federation, model, each, rows)
        known = np.isfinite(probs).all()  # not if the run has diverged
        sums = Sums.of(
            probs if known else np.full(probs.shape, 1 / probs.shape[1]),
            data.labels[rows],
            data.cells[rows],
            num_groups=data.num_cells,
            weights=weights[rows] ** 2,
        )
        sums = replace(sums, axis=data.axis)
        found.append(sums if known else sums.map(lambda array: np.nan * array))
    return stack(found)


def _make_algorithm(
    algorithm: Any,
    metric: Any,
    strengths: dict[str, Any],
    *,
    base: str | None,
    local_target: PerRun | None,
) -> Algorithm:
    """Return the algorithm itself, or the method with this name.

    Parameters
    ----------
    algorithm, metric, base, local_target
        As in `simulate`.
    strengths
        `target`, `lam` and `beta`, None where they are not given.
    """
    given = {"metric": metric, **strengths, "local_target": local_target, "base": base}
    if isinstance(algorithm, Algorithm):
        for name in (name for name, value in given.items() if value is not None):
            text = f"`{name}` is for the name of a method; the Algorithm has its own already"
            raise FedgftError(text, kind="conflict")
        return algorithm
    if not isinstance(algorithm, str):
        call = getattr(algorithm, "__name__", "")
        hint = f"call it: {call}(...)" if call.isidentifier() else "for example fedavg()"
        text = f"must be the name of a method or an Algorithm, not {format_value(algorithm)}"
        raise FedgftError(f"{text}; {hint}", field="algorithm")
    method = METHODS[check_choice("algorithm", algorithm, tuple(METHODS))]
    for name, value in strengths.items():
        if value is not None and name != method.strength:
            readers = enumerate_names([key for key, m in METHODS.items() if m.strength == name])
            text = f"`{name}` is for {readers}, and the algorithm is {algorithm}"
            raise FedgftError(text, kind="conflict")
    if local_target is not None and "local_target" not in method.options:
        text = f"`local_target` is for fedgft-control, and the algorithm is {algorithm}"
        raise FedgftError(text, kind="conflict")
    strength = None if method.strength is None else strengths[method.strength]
    if strength is None:
        strength = method.default
    chosen = get_metric("sp" if metric is None else metric)
    made = get_method(algorithm, chosen, strength, local_target=local_target)
    return with_base(made, "fedavg" if base is None else base)


def _make_loop(
    index: RowIndex, model: Any, algorithm: Algorithm, settings: Settings, **runs: np.ndarray
) -> TrainingLoop:
    """Return the rounds of a booster, or of a model with parameters on the fastest executor."""
    shared: dict[str, Any] = {"index": index, "algorithm": algorithm, "settings": settings, **runs}
    if isinstance(model, Trees):
        return BoostingLoop(model=model, **shared)
    executor = choose_executor(index, model, algorithm, settings)
    return RoundLoop(model=model, executor=executor, **shared)


def _find_metric(algorithm: Algorithm, metric: str | Metric | None) -> Metric:
    """Return the metric of the call or of the algorithm; without any, statistical parity."""
    objective = algorithm.objective
    local = (*objective.local_penalties, *objective.local_controllers)
    slots = (*objective.penalties, *objective.loss_rules, *local, algorithm.weighting)
    found = (getattr(slot, "metric", None) for slot in slots)
    default = get_metric("sp" if metric is None else metric)
    return next((each for each in found if isinstance(each, Metric)), default)


def _record(history: History, metric: Metric, **about: Any) -> TrainingRecord:
    """Return how the runs were trained, with the gaps of the final models."""
    kind = "hard" if history.control is None else history.control.kind
    unknown = np.full(len(history.params), np.nan)
    clients = history.federation
    return TrainingRecord(
        metric=metric.name,
        gap=unknown if clients is None else clients[-1].gap(metric, kind),
        gap_test=history.test[-1].gap(metric, kind),
        **about,
    )


def _make_settings(settings: Any, rounds: int | None, model: Model) -> Settings:
    """Return the settings, or the recommended ones with this number of rounds."""
    if settings is None:
        rounds = TREES if rounds is None and isinstance(model, Trees) else rounds
        return Settings() if rounds is None else Settings(rounds=rounds)
    check_instance("settings", settings, Settings)
    if rounds is not None:
        text = "`rounds` is for calls without settings; write Settings(rounds=...)"
        raise FedgftError(text, kind="conflict")
    return settings


def _refuse_model_class(model: Any) -> None:
    """Refuse a class of `fedgft.models` that was not called; other classes make modules."""
    if isinstance(model, type) and hasattr(model, "shapes"):
        raise FedgftError(
            f"must be a model, not the class {model.__name__}; write {model.__name__}()",
            field="model",
        )


def _warn_of_scales(federation: Federation, model: Model) -> None:
    """Warn where features are far from the scale that the default learning rate is made for.

    The first rows decide. Modules of the user may want raw columns, such as indices to look up.
    """
    if federation.mean is not None or not isinstance(model, Logistic | MLP):
        return
    rows = federation.rows[:SCALE_ROWS]
    features = federation.dataset.features
    if features.ndim != 2 or not len(rows):
        return
    values = features[rows].astype(np.float64)
    largest = np.abs(values).max(axis=0)
    usual = np.sqrt(np.square(values).mean(axis=0))
    odd = np.flatnonzero((usual > LARGE_FEATURE) | ((largest > 0) & (largest < SMALL_FEATURE)))
    if len(odd):
        column = federation.dataset.columns[odd[0]]
        warnings.warn(
            f"the features are not standardized: {column!r} holds values of about "
            f"{usual[odd[0]]:.3g}, for which the default lr={DEFAULT_LR} trains badly; pass "
            "federations=fedgft.standardize(federation), or choose lr",
            UserWarning,
            stacklevel=3,
        )


def _warn_of_misses(report: ControlReport | None, rounds: int, rates: np.ndarray) -> None:
    """Warn if a run did not reach its target, with the arguments of `simulate` to change."""
    if report is None:
        return
    text = report.warning(rounds=rounds, lr=float(rates.max()))
    if text is not None:
        warnings.warn(text, TargetMissedWarning, stacklevel=3)


def _check_init(init: Any) -> np.ndarray | None:
    """Parameters to start from as an array, (p,) or (run, p)."""
    if init is None:
        return None
    array = as_array("init", init)
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2):
        text = f"must hold numbers (p,) or (runs, p), not {format_value(init)}"
        raise FedgftError(text, field="init")
    if not np.isfinite(array).all():
        raise FedgftError("holds NaN or infinity", field="init")
    return array


def _check_rates(lr: float | np.ndarray, runs: int) -> np.ndarray:
    """Return the learning rate of each run, (run,).

    The numbers of the algorithm's slots are checked by the `init` method of each slot.
    """
    check_number_per_run("lr", lr, least=0, runs=runs)
    return np.broadcast_to(np.asarray(lr, np.float64), (runs,))


def _explain(error: Exception, settings: Settings, *, images: bool) -> FedgftError | None:
    """Return an error that says what to change; None if the cause is not known."""
    if isinstance(error, IndexError):
        if "out of range in self" not in str(error):  # the message of an embedding
            return None
        return FedgftError(
            "`model`: an embedding is asked for an index that it does not have; a model sees the "
            "features as standardize() scales them: leave that out, or look up raw columns"
        )
    return _out_of_memory(settings, images=images) if _is_out_of_memory(error) else None


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether the error means that memory ran out.

    The check reads the error's class name and message, because torch may not be imported and has
    no error class for an allocation that fails on the CPU.
    """
    text = f"{type(error).__name__} {error}"
    return isinstance(error, MemoryError) or "OutOfMemory" in text or "allocate memory" in text


def _out_of_memory(settings: Settings, *, images: bool) -> FedgftError:
    smaller = max(1, settings.batch_size // 2)
    size = ", or a smaller `size`" if images else ""
    gpu = settings.device != "cpu" and settings.lanes != 1
    lanes = ", or `lanes` 1 (one client at a time)" if gpu else ""
    return FedgftError(
        f"`device` {settings.device}: out of memory; try `batch_size` {smaller} "
        f"(it is {settings.batch_size}){size}{lanes}"
    )


def _run(
    rounds: TrainingLoop,
    init: np.ndarray | None,
    resume: Snapshot | None,
    *,
    callbacks: tuple[OnRound | None, OnModel | None, OnState | None],
) -> History:
    """Run all rounds, measure, and call the callbacks."""
    on_round, on_model, on_state = callbacks
    total = rounds.settings.rounds
    every = rounds.settings.eval_every
    reports: tuple[Any, ...] = ()
    before = None
    if resume is None:
        state = rounds.init(init)
    else:
        state, reports, before = _restore(rounds, resume)
    for done in range(0 if resume is None else resume.round + 1, total + 1):
        if done:
            state = rounds.step(state, done - 1)
        if done == total:
            state = rounds.finish(state)
        if done in (0, total) or (every and done % every == 0):
            state, test = rounds.evaluate(state)
            reports = (*reports, (done, _sum_clients(rounds, state), test))
            if on_model:
                on_model(done, rounds.parameters(state))
        if done == 0:
            before = state.sums
        elif on_round:
            on_round(done, total)
        if on_state and 0 < done < total:
            on_state(done, partial(pack, done, (state, reports, before)))
    at, federation, test = zip(*reports, strict=True)
    return History(
        rounds=np.array(at),
        federation=None if federation[0] is None else stack(list(federation)),
        test=stack(list(test)),
        before=_by_client(rounds, before),
        after=_by_client(rounds, state.sums),
        params=rounds.parameters(state),
        seconds=0.0,
        executor=rounds.name,
        control=_report_control(rounds, state),
        scores=rounds.scores(state),
    )


def _restore(rounds: TrainingLoop, resume: Snapshot) -> tuple[Any, tuple[Any, ...], Any]:
    """Return the state, the reports and the sums before the first round from a snapshot."""
    try:
        state, reports, before = unpack(resume, rounds.restore)
        if not isinstance(state, State | BoostingState) or not isinstance(reports, tuple):
            raise ValueError("not a snapshot of a simulation")
    except ValueError as error:
        raise FedgftError(f"resume: {error}") from error
    return state, reports, before


def _report_control(rounds: TrainingLoop, state: Any) -> ControlReport | None:
    """Return whether each run reached its target; None without a target."""
    objective = rounds.algorithm.objective
    if not objective.controllers:
        return None
    sums = rounds.measure(state, rounds.all_clients)
    clients = _by_client(rounds, sums)
    assert clients is not None
    federation = sums.map(rounds.all_clients.sum)
    return objective.reports(state.objective, federation, clients)[0]


def _sum_clients(rounds: TrainingLoop, state: Any) -> Sums | None:
    return state.sums and state.sums.map(rounds.all_clients.sum)


def _by_client(rounds: TrainingLoop, sums: Sums | None) -> Sums | None:
    """(units, ...) -> (run, client, ...)."""
    shape = (rounds.index.runs, rounds.index.num_clients)
    return sums and sums.map(lambda array: array.reshape(*shape, *array.shape[1:]))
