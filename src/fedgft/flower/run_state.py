"""What the server knows during a run: it checks clients' sums against it and saves it to a file.

A client can send false sums that look possible, just as it can train on false labels;
`fedgft.metrics.robust_aggregation` limits the effect of such sums.

The checkpoint file, from which a restart continues, holds the tensors of the model, of the wrapped
strategies (such as momentum) and of the best model so far. Its header holds everything else in
`RunState`. The file is written after every round and replaced in one step, so that a complete
checkpoint always exists.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from safetensors.numpy import save

from fedgft.algorithms.controller import (
    ControllerState,
    StepDamper,
    arrays_to_lists,
    lists_to_arrays,
)
from fedgft.errors import FedgftError
from fedgft.flower.messages import log, most_common, unpack_sums, warn
from fedgft.formatting import one_line
from fedgft.privacy.noise import Noise
from fedgft.store import atomic_write, file_error, parse_json, read_tensors
from fedgft.sums import CategoryNames, Sums

FORMAT = "fedgft-checkpoint-3"
COUNTERS = ("rounds_done", "idle_rounds", "releases", "starts")
Tensors = dict[str, np.ndarray]
SIGMAS = 6.0
"Declared noise may move a number by this many standard deviations: one in a billion is beyond."
UNNAMED = "unnamed"
"The default of `Site.name`: several sites may have it."


class BestModel(NamedTuple):
    """The best model of the last rounds: its score, parameters and row of the history."""

    score: float
    arrays: ArrayRecord
    row: dict[str, Any]


@dataclass
class RunState:
    """Everything that changes during a run and that a restarted server needs.

    Attributes
    ----------
    rounds_done
        Rounds that are finished.
    idle_rounds
        Consecutive rounds that gave no new model.
    releases
        How often clients were asked for statistics.
    starts
        How often the server was started in this run. Sites with noise release their counts anew
        after a restart.
    names
        The federation's classes and groups; None until they are agreed on.
    penalty
        State of the penalty: a `ControllerState` if the run has a target, else the last statistics.
    damper
        The step lengths of a run with a target; None until the first step.
    history
        One row for every model that was measured.
    training_rows
        Node -> the largest number of training rows that it reported.
    declared
        Site -> its rows by label and group, as it first declared them.
    client_weights
        Site -> FairFed's moving average of its weight.
    best
        The best model of the last rounds of a run with a target.
    """

    rounds_done: int = 0
    idle_rounds: int = 0
    releases: int = 0
    starts: int = 1
    names: CategoryNames | None = None
    penalty: Any = None
    damper: StepDamper | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    training_rows: dict[int, float] = field(default_factory=dict)
    declared: dict[str, np.ndarray] = field(default_factory=dict)
    client_weights: dict[str, float] = field(default_factory=dict)
    best: BestModel | None = None

    def to_json(self) -> str:
        """Return the state as JSON, without the tensors of the best model."""
        controlled = isinstance(self.penalty, ControllerState)
        penalty = self.penalty._asdict() if controlled else {"v": self.penalty}
        content = {name: getattr(self, name) for name in COUNTERS} | {
            "names": None if self.names is None else [self.names.classes, self.names.groups],
            "penalty": arrays_to_lists(penalty),
            "damper": None if self.damper is None else vars(self.damper),
            "history": self.history,
            "training_rows": list(self.training_rows.items()),
            "declared": arrays_to_lists(self.declared),
            "client_weights": self.client_weights,
            "best": None if self.best is None else [self.best.score, self.best.row],
        }
        return json.dumps(content)

    def restore(self, content: dict[str, Any], best: ArrayRecord | None) -> None:
        """Restore what `to_json` wrote; `best` holds the tensors of the best model, if any."""
        penalty = lists_to_arrays(content["penalty"])
        controlled = isinstance(self.penalty, ControllerState)
        self.penalty = ControllerState(**penalty) if controlled else penalty["v"]
        if content["names"] is not None:
            self.names = CategoryNames(*(tuple(names) for names in content["names"]))
        if content["damper"] is not None:
            self.damper = StepDamper(content["damper"]["rounds"])
            self.damper.lengths = content["damper"]["lengths"]
        for name in COUNTERS:
            setattr(self, name, int(content[name]))
        self.starts += 1
        self.history = content["history"]
        self.training_rows = dict(content["training_rows"])
        tables = content["declared"].items()
        self.declared = {site: np.array(table, np.float64) for site, table in tables}
        self.client_weights = content["client_weights"]
        if best is not None:
            score, row = content["best"]
            self.best = BestModel(score, best, row)


# Validation


def check_sums(
    sums: Sums, *, site: str, examples: float | None, noise: Noise | None = None
) -> None:
    """Check that rows with these sums can exist.

    Parameters
    ----------
    sums
        The sums; their form has been checked.
    site
        The name of the client, for error messages.
    examples
        The number of training rows that the client reported; its statistics cannot have more.
    noise
        The noise on the sums, which widens all bounds.
    """
    source = f"site '{site}'"
    if noise is None:
        slack = 0.0
        sums.check(source)
    else:
        slack = SIGMAS * noise.count
        sum_slack = SIGMAS * (noise.count + noise.value * sums.count.shape[0])
        sums.check(source, kind=noise.kind, count_slack=slack, sum_slack=sum_slack)
    rows = float(sums.rows())
    if examples is not None and rows > examples * (1 + 1e-6) + slack * sums.count.size**0.5:
        claim = f"its statistics claim {rows:.0f} rows, but it trains on {examples:.0f}"
        raise FedgftError(f"{source}: {claim}")


class SumsValidator:
    """Rejects sums that cannot be true or that contradict what the site sent before.

    All sums must have the federation's classes and groups. A name belongs to the first node
    that uses it; another node that takes it is refused. A site's counts must stay the same during a
    run, and be those in `agreed_counts` if the site is listed there.

    Attributes
    ----------
    owners
        Name of a site -> the node that owns the name.
    impostors
        Node -> the name that it uses although another node owns it.
    agreed
        Site -> its rows by label and group, as agreed on before the run.
    rejected
        Reasons why statistics of the last round were rejected.
    """

    def __init__(self, state: RunState, agreed_counts: Mapping[str, Any] | None = None) -> None:
        self.state = state
        self.owners: dict[str, int] = {}
        self.impostors: dict[int, str] = {}
        self.rejected: list[str] = []
        self.agreed = {s: _read_counts(s, c) for s, c in (agreed_counts or {}).items()}
        self._names: dict[int, str] = {}  # node -> site

    def validate(self, records: dict[int, Any], noise: Noise | None) -> dict[int, Sums]:
        """Return the valid sums among the clients' records, and log why others are rejected.

        The sums are sorted by node so that their total is reproducible.
        """
        unpacked: dict[int, tuple[str, CategoryNames, Sums]] = {}
        valid: dict[int, Sums] = {}
        self.rejected = []
        for node in sorted(records):
            try:
                content = unpack_sums(records[node], node=f"node {node}")
                self.bind_name(node, content[0])
                unpacked[node] = content
            except FedgftError as error:
                self._reject(error)
        if self.state.names is None and unpacked:
            self.state.names = most_common(names for _, names, _ in unpacked.values())
            lists = [", ".join(each) for each in vars(self.state.names).values()]
            log.info("fedgft: classes %s, groups %s", *lists)
        for node, (site, names, sums) in unpacked.items():
            try:
                assert self.state.names is not None
                self.state.names.check(names, site=site)
                examples = self.state.training_rows.get(node)
                check_sums(sums, site=site, examples=examples, noise=noise)
                self._check_counts(node, site, sums.count, noise)
                valid[node] = sums
            except FedgftError as error:
                self._reject(error)
        return valid

    def _reject(self, error: FedgftError) -> None:
        self.rejected.append(one_line(error))
        warn(f"statistics left out: {self.rejected[-1]}")

    def _check_counts(self, node: int, site: str, count: np.ndarray, noise: Noise | None) -> None:
        """Raise an error if a site's counts differ from those it declared or agreed on before.

        Rows do not change during a run. A site releases noisy counts once and stores them. After a
        restart, a site may release counts with new noise; they may differ by that noise.
        """
        key = self.identity(node)
        expected = self.state.declared.get(key, count)
        origin = "were declared before"
        if key in self.agreed:
            expected = _add_unrecorded(key, self.agreed[key], count.shape)
            origin = "were agreed on"
        slack = 0.5 if noise is None else 0.5 + SIGMAS * math.sqrt(2) * noise.count
        difference = np.abs(count - expected)
        if difference.max() > slack:
            label, group = np.unravel_index(int(difference.argmax()), count.shape)
            assert self.state.names is not None
            groups = (*self.state.names.groups, "not recorded")
            cell = f"label {self.state.names.classes[label]} and group {groups[group]}"
            raise FedgftError(
                f"site '{site}': its counts changed: {cell} has {count[label, group]:.0f} "
                f"rows, where {expected[label, group]:.0f} {origin}; counts hold for a whole run"
            )
        self.state.declared.setdefault(key, count)

    def bind_name(self, node: int, site: str) -> None:
        """Record that a node uses a site's name; raise an error if the name is another node's."""
        if site == UNNAMED:
            self._names[node] = ""
            return
        owner = self.owners.setdefault(site, node)
        if owner != node:
            self.impostors[node] = site
            self._names.pop(node, None)
            taken = f"node {node} calls itself '{site}', the name of node {owner} in this run"
            raise FedgftError(f"{taken}: node {node} is left out, node {owner} stays")
        if node in self.impostors or self._names.setdefault(node, site) != site:
            changed = f"{self.describe(node)} now calls itself '{site}'"
            raise FedgftError(f"{changed}: a node has one name in a run")

    def identity(self, node: int) -> str:
        """Return the name of a node's site as a key; an unnamed site gets the node's number."""
        unnamed = f"node {node} (unnamed)" if node in self._names else f"node {node}"
        return self._names.get(node) or unnamed

    def describe(self, node: int) -> str:
        """Return the text by which logs name a node's site."""
        return f"site '{self._names[node]}'" if self._names.get(node) else self.identity(node)

    def declared_rows(self, node: int) -> float | None:
        """Return the number of rows that a node's site declared; None if it has not done so yet."""
        count = self.state.declared.get(self.identity(node))
        return None if count is None else float(count.sum())

    def is_agreed(self, node: int) -> bool:
        """Whether the counts of a node's site were agreed on before the run."""
        return self.identity(node) in self.agreed

    def record_training_rows(self, replies: dict[int, Message]) -> None:
        """Record the most rows that each node trained on; its statistics cannot have more.

        A strategy's own `weighted_by_key` is not used: it need not be a number of rows.
        """
        rows_by_node = self.state.training_rows
        for node, reply in replies.items():
            metrics = next(iter(reply.content.metric_records.values()), {})
            rows = metrics.get("num-examples")
            if isinstance(rows, (int, float)):
                rows_by_node[node] = max(float(rows), rows_by_node.get(node, 0.0))


def _read_counts(site: str, counts: Any) -> np.ndarray:
    try:
        table = np.asarray(counts, np.float64)
    except (TypeError, ValueError):
        table = np.empty(0)
    if table.ndim != 2 or not (np.isfinite(table) & (table >= 0)).all():
        form = "give one list per label, with the rows of each group"
        raise FedgftError(f"`counts` of site '{site}': {form}")
    return table


def _add_unrecorded(site: str, table: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return counts whose last column holds the rows without a group.

    The agreed table may lack this column if all rows have a group.
    """
    if table.shape == (shape[0], shape[1] - 1):
        table = np.pad(table, ((0, 0), (0, 1)))
    if table.shape != shape:
        found = f"they are for {table.shape[0]} labels and {table.shape[1]} groups"
        known = f"there are {shape[0]} and {shape[1] - 1}"
        raise FedgftError(f"`counts` of site '{site}': {found}; {known}")
    return table


# Checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint file of one run.

    Parameters
    ----------
    path
        The file; its folder is made if it is missing.
    run
        A text that identifies the run: a checkpoint of another run is refused.
    """

    path: Path
    run: str

    def save(self, state: RunState, arrays: ArrayRecord, strategy: Any) -> None:
        """Write the state, the model and the arrays that the wrapped `strategy` keeps."""
        header = {"format": FORMAT, "about": self.run, "state": state.to_json()}
        tensors = _with_prefix("model", arrays) | _collect_arrays(strategy)
        if state.best is not None:
            tensors |= _with_prefix("best", state.best.arrays)
        header["check"] = _checksum(header, tensors)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path, private=True) as part:
            part.write(save(tensors, metadata=header))

    def load(
        self, state: RunState, like: ArrayRecord, strategy: Any, *, same_shapes: bool = True
    ) -> ArrayRecord:
        """Restore the state and the wrapped `strategy`.

        Parameters
        ----------
        state, strategy
            What to restore.
        like
            A model of the run; the one in the file must have its tensors.
        same_shapes
            Whether the tensors must also have the same shapes. A booster grows in each round.

        Returns
        -------
        ArrayRecord
            The model to continue with.
        """
        shapes = {name: tuple(array.shape) if same_shapes else () for name, array in like.items()}
        try:
            header, tensors = read_tensors(self.path)
        except (OSError, ValueError) as error:
            raise self._error(f"not a whole checkpoint ({error})") from None
        if header.get("format") != FORMAT:
            raise self._error("not a checkpoint of this version; name another file")
        if header.get("about") != self.run:
            other = header.get("about")
            raise self._error(f"the checkpoint is of another run ({other}); name another file")
        if header.get("check") != _checksum(header, tensors):
            raise self._error("not a whole checkpoint (its numbers are damaged)")
        try:
            content = parse_json(header["state"])
            best = None if content["best"] is None else self._select(tensors, "best", shapes)
            state.restore(content, best)
            _restore_arrays(strategy, tensors)
        except FedgftError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise self._error(f"not a checkpoint of fedgft ({one_line(error)})") from None
        return self._select(tensors, "model", shapes)

    def _error(self, problem: str) -> FedgftError:
        return file_error(self.path, problem)

    def _select(
        self, tensors: Tensors, prefix: str, like: Mapping[str, tuple[int, ...]]
    ) -> ArrayRecord:
        """Return one model with its tensors in the order of `like`; the file's order may differ.

        `like` states the shape of each tensor; an empty one is any.
        """
        found = {name: t.shape for name, t in tensors.items() if name.startswith(f"{prefix}/")}
        wanted = {f"{prefix}/{name}": shape for name, shape in like.items()}
        fits = all(shape in ((), found.get(name)) for name, shape in wanted.items())
        if found.keys() != wanted.keys() or not fits:
            raise self._error("the checkpoint is of another model")
        return ArrayRecord({name: Array(tensors[f"{prefix}/{name}"]) for name in like})


def _checksum(header: dict[str, str], tensors: Tensors) -> str:
    texts = sorted((key, text) for key, text in header.items() if key != "check")
    return str(zlib.crc32(save(tensors), zlib.crc32(json.dumps(texts).encode())))


def _with_prefix(prefix: str, arrays: ArrayRecord) -> Tensors:
    return {f"{prefix}/{name}": a.numpy().copy(order="C") for name, a in arrays.items()}


def wrapped_strategies(strategy: Any) -> Iterator[Any]:
    """Yield a strategy, the strategy that it wraps, and so on to the innermost one."""
    while strategy is not None:
        yield strategy
        strategy = getattr(strategy, "strategy", None)


def _collect_arrays(strategy: Any) -> Tensors:
    """Return all arrays that Flower's strategies keep in dictionaries and lists.

    The clipping norm, which adaptive clipping changes, is included. Flower cannot save a strategy.
    """
    tensors: Tensors = {}
    for depth, one in enumerate(wrapped_strategies(strategy)):
        for name, value in vars(one).items():
            items: Any = enumerate(value) if isinstance(value, list) else ()
            if isinstance(value, dict):
                items = value.items()
            elif name == "clipping_norm":
                items = [("", np.array([float(value)]))]
            for key, item in items:
                if isinstance(item, np.ndarray):
                    place = f"inner{depth}/{name}/{type(value).__name__}/{key}"
                    tensors[place] = item.copy(order="C")
    return tensors


def _restore_arrays(strategy: Any, tensors: Tensors) -> None:
    for depth, one in enumerate(wrapped_strategies(strategy)):
        found: dict[tuple[str, str], Tensors] = {}
        for name, tensor in tensors.items():
            if name.startswith(f"inner{depth}/"):
                _, attribute, kind, key = name.split("/", 3)
                found.setdefault((attribute, kind), {})[key] = tensor
        for (attribute, kind), items in found.items():
            value: Any = items
            if attribute == "clipping_norm":
                value = float(items[""][0])
            elif kind == "list":
                value = [items[key] for key in sorted(items, key=int)]
            setattr(one, attribute, value)
