"""The state of a simulation between rounds, the state of its clients, and snapshots of both."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from fedgft.algorithms import Cohort, Correction
from fedgft.algorithms.controller import ControllerState
from fedgft.algorithms.corrections import CorrectionState, LocalTraining
from fedgft.algorithms.local_control import LocalState
from fedgft.engine.client_memory import ClientMemory
from fedgft.engine.executors.base import Executor, Task
from fedgft.engine.plan import RowIndex
from fedgft.errors import import_extra
from fedgft.metrics import GroupAxis
from fedgft.optimizers import Moments, array_like
from fedgft.settings import Settings
from fedgft.sums import Sums


@dataclass(frozen=True)
class CandidateModel:
    """One global model per run, kept as a candidate for the final model.

    `score` (r,) is the accuracy minus the penalty for a gap above its target, `params` (run, p)
    holds the models, and `sums` (r, ...) their sums over all clients. With local targets, `clients`
    (r, client, ...) holds their sums of each client.
    """

    score: np.ndarray
    params: Any
    sums: Sums
    clients: Sums | None = None


@dataclass(frozen=True)
class ClientNorms:
    """The normalization layers that each client keeps (FedBN); changed in place.

    `layers` (run x client, l) holds the parameters and buffers of these layers, and `known`
    (run x client,) whether the client has trained before.
    """

    layers: Any
    known: np.ndarray


@dataclass(frozen=True)
class State:
    """Everything that a simulation carries from round to round.

    Attributes
    ----------
    params
        The executor's block of global models, (run, p).
    objective, weighting, server
        States of the slots of the algorithm.
    moments
        Moments of the clients' optimizers, changed in place; None if clients do not keep them.
    correction
        Vectors of the correction for all clients, changed in place; None if it has no memory.
    norms
        Normalization layers of the clients; None if clients do not keep their own.
    local
        What the clients remember of their own gaps, changed in place; None without local targets.
    rules
        States of the loss rules.
    memory
        The last sums of each client, where clients are sampled and a gap has a target.
    best, runner_up
        The best model so far, and the model that forms the best mixture with it; see `select_best`.
    sums
        Sums of `params` on every client; None if they have not been measured.
    """

    params: Any
    objective: Any
    weighting: Any
    server: Any
    moments: Moments | None = None
    correction: CorrectionState | None = None
    norms: ClientNorms | None = None
    local: tuple[LocalState, ...] | None = None
    rules: tuple[Any, ...] = ()
    memory: ClientMemory | None = None
    best: CandidateModel | None = None
    runner_up: CandidateModel | None = None
    sums: Sums | None = None


@dataclass(frozen=True, eq=False)
class ClientState:
    """Allocates the state that clients keep between rounds, and locates a cohort's rows in it.

    Clients keep the moments of their optimizers (`settings.state`), the vectors of the correction
    and their normalization layers (`settings.norms`). Arrays of all clients have one row per
    (run, client) and may be in host memory; see `base.Buffers`.
    """

    index: RowIndex
    settings: Settings
    executor: Executor
    correction: Correction

    def init(self) -> dict[str, Any]:
        """Return the fields of `State` that hold the clients' state, before the first round."""
        buffers = self.executor.buffers
        width = self.executor.spec.gradient
        runs = self.index.runs
        clients = runs * self.index.num_clients
        kept: dict[str, Any] = {}
        if self.settings.state == "shared":
            kept["moments"] = Moments.zeros(buffers.zeros, runs, width)
        elif self.settings.state != "reset":
            kept["moments"] = Moments.zeros(buffers.storage, clients, width)
        if self.correction.learns_from != "nothing":
            server = buffers.zeros(runs, width)
            kept["correction"] = CorrectionState(server, buffers.storage(clients, width))
        if self.settings.norms == "local":
            layers = buffers.storage(clients, len(self.executor.spec.norms))
            kept["norms"] = ClientNorms(layers, np.zeros(clients, bool))
        return kept

    def personalize(self, norms: ClientNorms | None, cohort: Cohort, block: Any) -> Any:
        """Put each client's own normalization layers into its model, in place."""
        if norms is None:
            return block
        at = self.positions(cohort)
        known = np.flatnonzero(norms.known[at])
        layers = self.executor.buffers.read(norms.layers, at[known])
        block[known[:, None], self.executor.spec.norms] = layers
        return block

    def positions(self, cohort: Cohort) -> np.ndarray:
        """The row of each client in an array of all clients, (u,)."""
        return cohort.run * self.index.num_clients + cohort.client

    def moment_positions(self, cohort: Cohort) -> np.ndarray:
        """Return the row of each client's moments, (u,): one per client, or one per run."""
        return cohort.run if self.settings.state == "shared" else self.positions(cohort)


@dataclass(eq=False)
class ClientUpdates:
    """The changes that one round makes to the clients' state.

    Clients train in chunks: `begin` and `end` are called for each chunk, and `finish` applies the
    means over all chunks.
    """

    clients: ClientState
    state: State
    server_change: Any = None  # change of the correction's server vector
    moments_change: Any = None  # change of the shared second moment v
    age_change: Any = 0.0  # change of the number of steps behind the shared v

    def begin(self, task: Task, cohort: Cohort, *, epochwise: bool) -> tuple[Task, Moments | None]:
        """Add the drift to the task of a chunk and load its optimizer moments.

        `epochwise` means that the task is trained in several calls, so moments must be kept
        between them.
        """
        buffers = self.clients.executor.buffers
        width = self.clients.executor.spec.gradient
        vectors = self.state.correction
        if vectors is not None:
            of_cohort = self._cohort_vectors(vectors, cohort)
            drift = self.clients.correction.drift(of_cohort, cohort)
            task = replace(task, drift=drift, gradients=buffers.zeros(len(cohort), width))
        stored = self.state.moments
        if stored is not None:
            at = self.clients.moment_positions(cohort)
            m, v = (buffers.read(each, at) for each in (stored.m, stored.v))
            moments = Moments(m, v, stored.steps[at])
            moments.clear(self.clients.settings.state)
            return task, moments
        return task, Moments.zeros(buffers.zeros, len(cohort), width) if epochwise else None

    def end(
        self, task: Task, cohort: Cohort, moments: Moments | None, *, block: Any, start: Any
    ) -> None:
        """Store the state of a chunk's clients after their training.

        Parameters
        ----------
        task, cohort, moments
            Task, cohort and moments of the chunk; `begin` returned the task and the moments.
        block
            The trained models.
        start
            The models before training if the correction learns from moves, else None.
        """
        clients = self.clients
        executor = clients.executor
        norms = self.state.norms
        if norms is not None:
            at = clients.positions(cohort)
            executor.buffers.write(norms.layers, at, block[:, executor.spec.norms])
            norms.known[at] = True
        if self.state.correction is not None:
            move = None if start is None else executor.to_gradient(block - start)
            self._learn(self.state.correction, task, cohort, move)
        stored = self.state.moments
        if stored is None or moments is None:
            return
        at = clients.moment_positions(cohort)
        if clients.settings.state == "shared":
            change = self.moments_change
            self.moments_change = executor.mix(cohort.weight, moments.v, stored.v, cohort, change)
            older = cohort.weight * (moments.steps[:, 1] - stored.steps[at, 1])
            self.age_change = self.age_change + np.bincount(cohort.run, older, len(stored.steps))
        else:
            executor.buffers.write(stored.m, at, moments.m)
            executor.buffers.write(stored.v, at, moments.v)
            stored.steps[at] = moments.steps

    def finish(self) -> None:
        """Apply the means over all chunks."""
        if self.state.correction is not None:
            self.state.correction.server[:] += self.server_change
        stored = self.state.moments
        if stored is not None and self.clients.settings.state == "shared":
            stored.v[:] = (stored.v + self.moments_change).clip(0)  # rounding may go below zero
            stored.steps[:, 1] = np.rint(stored.steps[:, 1] + self.age_change)

    def _cohort_vectors(self, vectors: CorrectionState, cohort: Cohort) -> CorrectionState:
        """The vectors of the clients of a cohort."""
        of_cohort = self.clients.executor.buffers.read(
            vectors.clients, self.clients.positions(cohort)
        )
        return CorrectionState(vectors.server, of_cohort)

    def _learn(self, vectors: CorrectionState, task: Task, cohort: Cohort, move: Any) -> None:
        """Let the correction learn from a chunk."""
        executor = self.clients.executor
        per_step = array_like(1.0 / np.maximum(task.steps, 1), vectors.server)[:, None]
        training = LocalTraining(task.gradients * per_step, move)
        of_cohort = self._cohort_vectors(vectors, cohort)
        learned, change = self.clients.correction.learn(of_cohort, cohort, training)
        total = np.array([f.weighted_sizes.sum() for f in self.clients.index.federations])
        share = task.units.count.sum((1, 2)) / total[cohort.run]
        nothing = 0 * vectors.server
        self.server_change = executor.mix(share, change, nothing, cohort, self.server_change)
        executor.buffers.write(vectors.clients, self.clients.positions(cohort), learned)


PACKED_TYPES: dict[str, Any] = {  # `trees.boosting` adds its own
    kind.__name__: kind
    for kind in (
        CandidateModel,
        ClientMemory,
        ControllerState,
        CorrectionState,
        LocalState,
        Moments,
        ClientNorms,
        GroupAxis,
        State,
        Sums,
    )
}


@dataclass(frozen=True)
class Snapshot:
    """A simulation between two rounds, as arrays and JSON; nothing is pickled.

    `tree` describes how the arrays form the state. The arrays are not copies: the next round of the
    simulation may change them. Vectors are in the order of the executor, so only the version of the
    code that wrote a snapshot can resume it.
    """

    round: int  # rounds done
    tree: Any
    arrays: dict[str, np.ndarray]


def pack(round: int, value: Any) -> Snapshot:
    """Convert a value to a snapshot.

    The value may consist of None, numbers, strings, arrays, tuples and `PACKED_TYPES`.
    """
    arrays: dict[str, np.ndarray] = {}

    def describe(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if type(value) in PACKED_TYPES.values():
            names = [f.name for f in fields(value)] if is_dataclass(value) else value._fields
            parts = {name: describe(getattr(value, name)) for name in names}
            return {"is": type(value).__name__, "of": parts}
        if isinstance(value, (tuple, list)):
            return {"is": "tuple", "of": [describe(item) for item in value]}
        name = f"{len(arrays):04d}"
        if isinstance(value, (np.ndarray, np.generic)):
            arrays[name] = np.asarray(value, order="C")
            return {"is": "array", "of": name}
        if value.is_pinned():  # a GPU may still write to it
            import_extra("torch").cuda.synchronize()
        arrays[name] = value.detach().contiguous().cpu().numpy()
        return {"is": "tensor", "of": name, "host": value.device.type == "cpu"}

    return Snapshot(round, describe(value), arrays)


def unpack(snapshot: Snapshot, restore: Any) -> Any:
    """Rebuild the value of a snapshot; `restore` is the `Buffers.restore` of the executor.

    Raises ValueError if `pack` did not make the snapshot.
    """
    arrays = snapshot.arrays

    def build(tree: Any) -> Any:
        if tree is None or isinstance(tree, (bool, int, float, str)):
            return tree
        kind = tree["is"]
        parts = tree["of"]
        if kind == "tuple":
            return tuple(build(item) for item in parts)
        if kind == "array":
            return arrays[parts]
        if kind == "tensor":
            return restore(arrays[parts], tree["host"])
        return PACKED_TYPES[kind](**{name: build(part) for name, part in parts.items()})

    try:
        return build(snapshot.tree)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a snapshot of fedgft ({error})") from error
