"""What the server knows during a run, and the checkpoint file from which a restart continues.

The file holds the tensors of the model, of the wrapped strategies (such as momentum) and of the
best model so far. Its header holds everything else in `RunState`. The file is written after every
round and replaced in one step, so that a complete checkpoint always exists.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord
from safetensors.numpy import save

from fedgft.algorithms.controller import (
    ControllerState,
    StepDamper,
    arrays_to_lists,
    lists_to_arrays,
)
from fedgft.errors import FedgftError
from fedgft.flower.messages import Names
from fedgft.formatting import one_line
from fedgft.store import atomic_write, parse_json, read_tensors

FORMAT = "fedgft-checkpoint-3"
COUNTERS = ("rounds_done", "idle_rounds", "releases", "starts")
Tensors = dict[str, np.ndarray]


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
    names: Names | None = None
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
            self.names = Names(*(tuple(names) for names in content["names"]))
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

    def load(self, state: RunState, like: ArrayRecord, strategy: Any) -> ArrayRecord:
        """Restore the state and the wrapped `strategy`.

        Returns
        -------
        ArrayRecord
            The model to continue with; its tensors must have the names and shapes of `like`.
        """
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
            best = None if content["best"] is None else self._select(tensors, "best", like)
            state.restore(content, best)
            _restore_arrays(strategy, tensors)
        except FedgftError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise self._error(f"not a checkpoint of fedgft ({one_line(error)})") from None
        return self._select(tensors, "model", like)

    def _error(self, text: str) -> FedgftError:
        return FedgftError(f"{self.path}: {text}", kind="file")

    def _select(self, tensors: Tensors, prefix: str, like: ArrayRecord) -> ArrayRecord:
        """Return one model with its tensors in the order of `like`; the file's order may differ."""
        found = {name: t.shape for name, t in tensors.items() if name.startswith(f"{prefix}/")}
        if found != {f"{prefix}/{name}": tuple(array.shape) for name, array in like.items()}:
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
