"""A simulation is one batch of runs on one engine: replicates, strengths, whatever varies
without changing shapes, side by side. Leading axes are (run, client)."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedgft.arguments import array_of, instance, numbers_per_run, shown, whole_number
from fedgft.data.dataset import Dataset, Federation
from fedgft.engine.book import open_book
from fedgft.engine.choose import choose_executor
from fedgft.engine.memory import State
from fedgft.engine.rounds import Rounds
from fedgft.engine.schedule import everybody
from fedgft.engine.settings import Settings
from fedgft.engine.snapshot import Snapshot, pack, unpack
from fedgft.errors import FedgftError
from fedgft.federated import Algorithm
from fedgft.federated.control import Controlled, ControlReport, TargetMissedWarning
from fedgft.metrics import Tally, stack
from fedgft.models import get_model

OnRound = Callable[[int, int], None]  # rounds done, rounds in all
OnModel = Callable[[int, np.ndarray], None]  # rounds done, parameters (run, p)
OnState = Callable[[int, Callable[[], Snapshot]], None]  # rounds done, and how to take a snapshot


@dataclass(frozen=True)
class Told:
    """Who is told how far a simulation is."""

    round: OnRound | None
    model: OnModel | None
    state: OnState | None


@dataclass(frozen=True)
class History:
    """What was measured, as sums: every metric, soft and hard, is read from them afterwards."""

    rounds: np.ndarray  # (e,): after how many rounds; 0 is the start
    federation: Tally | None  # (e, run, ...), all clients together
    test: Tally  # (e, run, ...)
    before: Tally | None  # (run, client, ...) at the start,
    after: Tally | None  # and at the end
    params: np.ndarray  # (run, p)
    seconds: float
    executor: str
    control: ControlReport | None = None  # for a method with a target: whether each run reached it

    def part(self, runs: slice | np.ndarray) -> "History":
        """Some of the runs, with their share of the time."""
        share = len(self.params[runs]) / len(self.params)
        return History(
            rounds=self.rounds,
            federation=None if self.federation is None else self.federation[:, runs],
            test=self.test[:, runs],
            before=None if self.before is None else self.before[runs],
            after=None if self.after is None else self.after[runs],
            params=self.params[runs],
            seconds=self.seconds * share,
            executor=self.executor,
            control=None if self.control is None else self.control.part(runs),
        )

    def with_runs(self, at: np.ndarray, other: "History") -> "History":
        """This history with its runs `at` replaced by those of another, measured as often."""

        def at_client(mine: Tally | None, theirs: Tally | None) -> Tally | None:
            return None if mine is None or theirs is None else mine.replaced(at, theirs)

        def at_round(mine: Tally | None, theirs: Tally | None) -> Tally | None:
            if mine is None or theirs is None:
                return None
            return mine.replaced((slice(None), at), theirs)

        params = self.params.copy()
        params[at] = other.params
        test = at_round(self.test, other.test)
        assert test is not None
        return replace(
            self,
            federation=at_round(self.federation, other.federation),
            test=test,
            before=at_client(self.before, other.before),
            after=at_client(self.after, other.after),
            params=params,
            seconds=self.seconds + other.seconds,
            control=None
            if self.control is None or other.control is None
            else self.control.with_runs(at, other.control),
        )


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
    """Train `len(seeds)` runs side by side; run i on `federations[i]`.

    `lr` is one number, or one a run. `init`, (p,) or (run, p), replaces the random start.
    `on_model` is shown every measured global model; `on_state` may take a snapshot after every
    round but the last, and with one of those as `resume` the same call goes on from there, and ends
    with the same bits.
    """
    started = time.perf_counter()
    _check_types(federations, algorithm, settings, seeds)
    init = _checked_init(init)
    if len(federations) != len(seeds):
        raise FedgftError(f"{len(federations)} federations for {len(seeds)} seeds")
    if min(seeds, default=0) < 0:
        raise FedgftError(f"--seed must not be negative, got {min(seeds)}")
    rates = _check(algorithm, lr, len(seeds))
    settings.check_cohort(federations[0].num_clients)
    book, model = open_book(list(federations)), get_model(model)
    try:
        executor = choose_executor(book, model, algorithm, settings)
        rounds = Rounds(
            book, model, algorithm, settings, executor,
            seeds=np.asarray(seeds, np.uint64), lr=rates, all_clients=everybody(book.federations),
        )  # fmt: skip
        return _run(rounds, init, Told(on_round, on_model, on_state), resume, started)
    except IndexError as error:
        if "out of range in self" not in str(error):  # an embedding's words
            raise
        raise FedgftError(
            "model: an embedding is asked for an index that it does not have; a model sees the "
            "features as standardise() scales them: leave that out, or look up raw columns"
        ) from error
    except (RuntimeError, MemoryError) as error:
        if not _memory_ran_out(error):
            raise
        raise _out_of_memory(settings, images=book.dataset.images) from error


def _check_types(federations: Any, algorithm: Any, settings: Any, seeds: Any) -> None:
    """What stands in another argument's place is named, before anything is computed."""
    if isinstance(federations, Federation | Dataset) or not hasattr(federations, "__len__"):
        raise FedgftError(
            f"federations must be a list with one Federation per seed, not {shown(federations)}; "
            "write simulate([federation], ..., seeds=[0])"
        )
    for each in federations:
        instance("federations", each, Federation, "partition() makes one of a Dataset")
    instance("algorithm", algorithm, Algorithm, "for example fedavg() or controlled('sp', 0.02)")
    instance("settings", settings, Settings)
    if isinstance(seeds, str | bytes | dict) or np.ndim(seeds) != 1:
        raise FedgftError(f"seeds must be a list of whole numbers, as in [0], not {shown(seeds)}")
    for seed in seeds:
        whole_number("seeds", seed, most=2**63 - 1)


def _checked_init(init: Any) -> np.ndarray | None:
    """Parameters to start from, (p,) or (run, p); how many there must be the model says."""
    if init is None:
        return None
    array = array_of("init", init)
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2):
        raise FedgftError(f"init must hold numbers (p,) or (runs, p), not {shown(init)}")
    if not np.isfinite(array).all():
        raise FedgftError("init holds NaN or infinity")
    return array


def _check(algorithm: Algorithm, lr: float | np.ndarray, runs: int) -> np.ndarray:
    """The learning rate of each run, where there are runs and every number is one for all of them
    or one each; the slots themselves know what numbers they take."""
    if not runs:
        raise FedgftError("there is no federation to train on")
    objective, weighting = algorithm.objective, algorithm.weighting
    slots = (*objective.penalties, *objective.local_penalties, weighting,
             getattr(weighting, "inner", None))  # fmt: skip
    given = [(name, getattr(slot, name)) for slot in slots for name in ("lam", "target", "beta")
             if hasattr(slot, name)]  # fmt: skip
    for name, value in [("lr", lr), *given]:
        value = numbers_per_run(name, value)
        if np.shape(value) not in ((), (runs,)):
            raise FedgftError(f"--{name} must be one number, or one for each of {runs} run(s), and "
                              f"its shape is {np.shape(value)}")  # fmt: skip
    rates = np.broadcast_to(np.asarray(lr, np.float64), (runs,))
    if not ((rates >= 0) & np.isfinite(rates)).all():
        raise FedgftError(f"--lr must be a number >= 0, got {lr}")
    return rates


def _memory_ran_out(error: Exception) -> bool:
    """Torch may not be imported, and on a CPU it has no class for it."""
    names = (type(error).__name__, str(error))
    return "OutOfMemoryError" in names[0] or "allocate memory" in names[1] or (
        isinstance(error, MemoryError))  # fmt: skip


def _out_of_memory(settings: Settings, *, images: bool) -> FedgftError:
    fewer = max(1, settings.batch_size // 2)
    size = ", or a smaller --size" if images else ""
    gpu = settings.device != "cpu" and settings.lanes != 1
    lanes = ", or --lanes 1 (one client at a time)" if gpu else ""
    return FedgftError(
        f"--device {settings.device}: out of memory; try --batch-size {fewer} "
        f"(it is {settings.batch_size}){size}{lanes}"
    )


def _run(
    rounds: Rounds, init: np.ndarray | None, told: Told, resume: Snapshot | None, started: float
) -> History:
    total, every = rounds.settings.rounds, rounds.settings.eval_every
    state, reports, before = _begun(rounds, init, resume)
    for done in range(0 if resume is None else resume.round + 1, total + 1):
        if done:
            state = rounds.step(state, done - 1)
        if done == total:
            state = rounds.finish(state)
        if done in (0, total) or (every and done % every == 0):
            state, test = _evaluate(rounds, state)
            reports = (*reports, (done, _together(rounds, state), test))
            if told.model:
                told.model(done, rounds.executor.fetch(state.params))
        if done == 0:
            before = state.tally
        elif told.round:
            told.round(done, total)
        if told.state and 0 < done < total:
            told.state(done, partial(pack, done, (state, reports, before)))
    at, federation, test = zip(*reports, strict=True)
    return History(
        rounds=np.array(at),
        federation=None if federation[0] is None else stack(list(federation)),
        test=stack(list(test)),
        before=_by_client(rounds, before),
        after=_by_client(rounds, state.tally),
        params=rounds.executor.fetch(state.params),
        seconds=time.perf_counter() - started,
        executor=rounds.executor.name,
        control=_reported(rounds, state),
    )


def _reported(rounds: Rounds, state: State) -> ControlReport | None:
    """Whether each run reached its target, with a warning where some did not."""
    objective = rounds.algorithm.objective
    if not any(isinstance(penalty, Controlled) for penalty in objective.penalties):
        return None
    together = _together(rounds, state)
    if together is None:
        together = rounds.measure(state, rounds.all_clients).map(rounds.all_clients.sum)
    report = objective.reports(state.objective, together)[0]
    if (text := report.warning()) is not None:
        warnings.warn(text, TargetMissedWarning, stacklevel=4)
    return report


def _begun(rounds: Rounds, init: np.ndarray | None, resume: Snapshot | None) -> Any:
    """State, reports and the start's sums by client: from the beginning, or of a snapshot."""
    if resume is None:
        return rounds.init(init), (), None
    try:
        state, reports, before = unpack(resume, rounds.executor.tensor)
        if not isinstance(state, State) or not isinstance(reports, tuple):
            raise ValueError("not a snapshot of a simulation")
    except ValueError as error:
        raise FedgftError(f"resume: {error}") from error
    return state, reports, before


def _evaluate(rounds: Rounds, state: State) -> tuple[State, Tally]:
    """Sums on the test rows and, if asked for, on every client, which the next round may use."""
    test = rounds.book.test
    if rounds.settings.eval_on == "test":
        return state, rounds.executor.measure(test, state.params, test.run)
    if state.norms is not None:
        own = rounds.measure(state, rounds.all_clients)
        found = rounds.executor.measure(test, state.params, test.run)
        return replace(state, tally=own), found
    units = rounds.book.clients(rounds.all_clients) + test
    tally = rounds.executor.measure(units, state.params, units.run)
    return replace(state, tally=tally[: -len(test)]), tally[-len(test) :]


def _together(rounds: Rounds, state: State) -> Tally | None:
    return None if state.tally is None else state.tally.map(rounds.all_clients.sum)


def _by_client(rounds: Rounds, tally: Tally | None) -> Tally | None:
    if tally is None:
        return None
    shape = (rounds.book.runs, rounds.book.num_clients)
    return tally.map(lambda array: array.reshape(*shape, *array.shape[1:]))
