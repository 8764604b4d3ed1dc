"""Simulations: batches of runs that differ in seed, data or numbers, but not in shapes.

Leading axes of arrays are (run, client).
"""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedgft.algorithms import Algorithm
from fedgft.algorithms.controller import ControlReport, TargetMissedWarning
from fedgft.data.dataset import Dataset, Federation
from fedgft.engine.executors import choose_executor
from fedgft.engine.plan import index_rows
from fedgft.engine.round import RoundLoop
from fedgft.engine.state import Snapshot, State, pack, unpack
from fedgft.errors import FedgftError
from fedgft.models import get_model, prepare_logits
from fedgft.settings import MAX_SEED, Settings
from fedgft.sums import Sums, stack
from fedgft.validation import (
    as_array,
    check_instance,
    check_integer,
    check_number_per_run,
    format_value,
)

MAX_PREDICTED = 2**22  # features that `predict_proba` reads at a time

OnRound = Callable[[int, int], None]  # rounds done, rounds in all
OnModel = Callable[[int, np.ndarray], None]  # rounds done, parameters (run, p)
OnState = Callable[[int, Callable[[], Snapshot]], None]  # rounds done, and how to take a snapshot


@dataclass(frozen=True)
class History:
    """The measurements of a simulation, stored as sums from which every metric is computed.

    Attributes
    ----------
    rounds
        Number of completed rounds at each measurement, (e,); the first entry is 0.
    federation
        Sums over all clients, (e, run, ...); None with ``eval_on="test"``.
    test
        Sums over the test rows, (e, run, ...).
    before, after
        Sums of each client, (run, client, ...), before the first round and after the last round.
    params
        Final parameters, (run, p), in the order of `fedgft.models.named_tensors`.
    seconds
        Duration of the simulation in seconds.
    executor
        "fused", "stacked" or "sequential".
    control
        Whether each run reached its target; None for methods without a target.
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

    def part(self, runs: slice | np.ndarray) -> "History":
        """Return the history of some runs; `seconds` is divided in proportion to their number."""
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
        )

    def with_runs(self, at: np.ndarray, other: "History") -> "History":
        """Return this history with the runs `at` replaced by the runs of `other`.

        Both histories must have the same number of measurements.
        """

        every_round = (slice(None), at)
        places = {"federation": every_round, "test": every_round, "before": at, "after": at}
        changed: dict[str, Any] = {"control": None}
        for name, place in places.items():
            mine = getattr(self, name)
            theirs = getattr(other, name)
            changed[name] = mine and theirs and mine.replaced(place, theirs)
        if self.control is not None and other.control is not None:
            changed["control"] = self.control.with_runs(at, other.control)
        params = self.params.copy()
        params[at] = other.params
        return replace(self, params=params, seconds=self.seconds + other.seconds, **changed)


def simulate(
    federations: Sequence[Federation],
    model: Any,
    algorithm: Algorithm,
    settings: Settings,
    *,
    seeds: Sequence[int],
    lr: float | np.ndarray = 0.02,
    init: np.ndarray | None = None,
    on_round: OnRound | None = None,
    on_model: OnModel | None = None,
    on_state: OnState | None = None,
    resume: Snapshot | None = None,
) -> History:
    """Train `len(seeds)` runs together.

    Parameters
    ----------
    federations
        One federation per run; all share one data set and have the same number of clients.
    model
        A name ("logistic", "mlp", "resnet18"), an `nn.Module`, a function that makes one, or a
        `fedgft.models.Model`.
    algorithm
        The method, for example ``fedgft.algorithms.fedgft_control("sp", target=0.02)``.
    settings
        RoundLoop, batches, optimizer and so on, the same for all runs.
    seeds
        One per run.
    lr
        Learning rate of the clients in the first round; one number, or one per run.
    init
        Initial parameters, (p,) or (run, p); by default they are drawn from the seed of each run.
    on_round
        Called after every round with the number of completed rounds and the total number of rounds.
    on_model
        Called at every measurement with the number of completed rounds and the global models,
        (run, p).
    on_state
        Called after every round except the last, with the number of completed rounds and a function
        that takes a snapshot.
    resume
        A snapshot to continue from. The result is bit-identical to that of an uninterrupted call
        with the same arguments.

    Returns
    -------
    The measured sums and the final parameters.
    """
    started = time.perf_counter()
    _check_types(federations, algorithm, settings, seeds)
    init = _check_init(init)
    rates = _check_rates(lr, len(seeds))
    settings.check_cohort(federations[0].num_clients)
    index = index_rows(list(federations))
    model = get_model(model)
    try:
        executor = choose_executor(index, model, algorithm, settings)
        run_seeds = np.asarray(seeds, np.uint64)
        rounds = RoundLoop(index, model, algorithm, settings, executor, seeds=run_seeds, lr=rates)
        history = _run(rounds, init, resume, callbacks=(on_round, on_model, on_state))
        return replace(history, seconds=time.perf_counter() - started)
    except IndexError as error:
        if "out of range in self" not in str(error):  # the message of an embedding
            raise
        raise FedgftError(
            "model: an embedding is asked for an index that it does not have; a model sees the "
            "features as standardize() scales them: leave that out, or look up raw columns"
        ) from error
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise _out_of_memory(settings, images=index.dataset.images) from error


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
    logits = prepare_logits(get_model(model), params, features=features, classes=classes)
    step = max(1, MAX_PREDICTED // max(1, data.features[:1].size))
    parts = []
    for start in range(0, len(rows), step):
        z = logits(federation.scale_rows(rows[start : start + step]))
        odds = np.exp(z - z.max(-1, keepdims=True))
        parts.append(odds / odds.sum(-1, keepdims=True))
    return np.concatenate(parts) if parts else np.zeros((0, classes))


def _check_types(federations: Any, algorithm: Any, settings: Any, seeds: Any) -> None:
    """Refuse arguments of the wrong type before anything is computed."""
    if isinstance(federations, Federation | Dataset) or not hasattr(federations, "__len__"):
        raise FedgftError(
            f"federations must be a list with one Federation per seed, not "
            f"{format_value(federations)}; write simulate([federation], ..., seeds=[0])"
        )
    for each in federations:
        check_instance("federations", each, Federation, "partition() makes one of a Dataset")
    example = "for example fedavg() or fedgft_control('sp', 0.02)"
    check_instance("algorithm", algorithm, Algorithm, example)
    check_instance("settings", settings, Settings)
    if isinstance(seeds, str | bytes | dict) or np.ndim(seeds) != 1:
        text = f"seeds must be a list of whole numbers, as in [0], not {format_value(seeds)}"
        raise FedgftError(text)
    for seed in seeds:
        check_integer("seeds", seed, most=MAX_SEED)
    if len(federations) != len(seeds):
        raise FedgftError(f"{len(federations)} federations for {len(seeds)} seeds")
    if min(seeds, default=0) < 0:
        raise FedgftError(f"`seed` must not be negative, got {min(seeds)}")


def _check_init(init: Any) -> np.ndarray | None:
    """Parameters to start from as an array, (p,) or (run, p)."""
    if init is None:
        return None
    array = as_array("init", init)
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2):
        raise FedgftError(f"init must hold numbers (p,) or (runs, p), not {format_value(init)}")
    if not np.isfinite(array).all():
        raise FedgftError("init holds NaN or infinity")
    return array


def _check_rates(lr: float | np.ndarray, runs: int) -> np.ndarray:
    """Return the learning rate of each run, (run,).

    The numbers of the algorithm's slots are checked by the `init` method of each slot.
    """
    if not runs:
        raise FedgftError("there is no federation to train on")
    check_number_per_run("lr", lr, least=0, runs=runs)
    return np.broadcast_to(np.asarray(lr, np.float64), (runs,))


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
    rounds: RoundLoop,
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
            state, test = _evaluate(rounds, state)
            reports = (*reports, (done, _sum_clients(rounds, state), test))
            if on_model:
                on_model(done, rounds.executor.to_host(state.params))
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
        params=rounds.executor.to_host(state.params),
        seconds=0.0,
        executor=rounds.executor.name,
        control=_report_control(rounds, state),
    )


def _restore(rounds: RoundLoop, resume: Snapshot) -> tuple[State, tuple[Any, ...], Any]:
    """Return the state, the reports and the sums before the first round from a snapshot."""
    try:
        state, reports, before = unpack(resume, rounds.executor.buffers.restore)
        if not isinstance(state, State) or not isinstance(reports, tuple):
            raise ValueError("not a snapshot of a simulation")
    except ValueError as error:
        raise FedgftError(f"resume: {error}") from error
    return state, reports, before


def _report_control(rounds: RoundLoop, state: State) -> ControlReport | None:
    """Return whether each run reached its target, and warn if a run did not."""
    objective = rounds.algorithm.objective
    if not objective.controllers:
        return None
    sums = rounds.measure(state, rounds.all_clients).map(rounds.all_clients.sum)
    report = objective.reports(state.objective, sums)[0]
    if (text := report.warning()) is not None:
        warnings.warn(text, TargetMissedWarning, stacklevel=4)
    return report


def _evaluate(rounds: RoundLoop, state: State) -> tuple[State, Sums]:
    """Measure the test rows and, unless `eval_on` is "test", all clients.

    The sums of the clients are kept in the returned state, where the next round may use them.
    """
    test = rounds.index.test
    executor = rounds.executor
    if rounds.settings.eval_on == "test":
        return state, executor.measure(test, state.params, test.run)
    if state.norms is not None:
        sums = rounds.measure(state, rounds.all_clients)
        return replace(state, sums=sums), executor.measure(test, state.params, test.run)
    units = rounds.index.clients(rounds.all_clients) + test
    sums = executor.measure(units, state.params, units.run)
    return replace(state, sums=sums[: -len(test)]), sums[-len(test) :]


def _sum_clients(rounds: RoundLoop, state: State) -> Sums | None:
    return state.sums and state.sums.map(rounds.all_clients.sum)


def _by_client(rounds: RoundLoop, sums: Sums | None) -> Sums | None:
    """(units, ...) -> (run, client, ...)."""
    shape = (rounds.index.runs, rounds.index.num_clients)
    return sums and sums.map(lambda array: array.reshape(*shape, *array.shape[1:]))
