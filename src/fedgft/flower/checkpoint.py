"""The server's state in one file, written after every round: a restarted server goes on from it.

Tensors of the model, of the wrapped strategy (momentum and the like) and of the best model so far,
and as its header the constants and the history. It is replaced whole, so there is always one.
"""

import json
import zlib
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord

from fedgft.errors import FedgftError
from fedgft.files import parsed, read_tensors, whole
from fedgft.flower.gather import plain
from fedgft.flower.hearing import Best

if TYPE_CHECKING:
    from fedgft.flower.strategy import FairStrategy

FORMAT = "fedgft-checkpoint-2"
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Checkpoint:
    path: Path

    def exists(self) -> bool:
        return self.path.exists()

    def save(self, strategy: "FairStrategy", arrays: ArrayRecord) -> None:
        from safetensors.numpy import save

        hearing, best = strategy.hearing, strategy.hearing.best
        counts = [strategy.done, strategy.idle, hearing.released, hearing.runs]
        header = {
            "format": FORMAT,
            "about": _about(strategy),
            "constants": hearing.constants.to_json(),
            "counts": json.dumps(counts),
            "examples": json.dumps(list(hearing.believer.examples.items())),
            "declared": json.dumps(
                {site: table.tolist() for site, table in hearing.believer.declared.items()}
            ),
            "weights": json.dumps(None if strategy.weights is None else strategy.weights.kept),
            "best": json.dumps(None if best is None else [best.score, best.row]),
        }
        tensors = _named("model", arrays) | _inner(strategy.strategy)
        tensors |= {} if best is None else _named("best", best.arrays)
        header["check"] = _checksum(header, tensors)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with whole(self.path, private=True) as part:
            part.write_bytes(save(tensors, metadata=header))

    def load(self, strategy: "FairStrategy", like: ArrayRecord) -> ArrayRecord:
        """The model to go on with; everything else is put back where it was."""
        try:
            header, tensors = read_tensors(self.path)
        except (OSError, ValueError) as error:
            raise FedgftError(f"{self.path}: not a whole checkpoint ({error})") from None
        if header.get("format") != FORMAT:
            raise FedgftError(f"{self.path}: not a checkpoint of this version; name another file")
        if header.get("about") != _about(strategy):
            raise FedgftError(f"{self.path}: the checkpoint is of another run "
                              f"({header.get('about')}); name another file")  # fmt: skip
        if header.get("check") != _checksum(header, tensors):
            raise FedgftError(f"{self.path}: not a whole checkpoint (its numbers are damaged)")
        try:
            self._restored(strategy, header, tensors, like)
        except FedgftError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise FedgftError(f"{self.path}: no checkpoint of ours ({plain(error)})") from None
        return self._like(tensors, "model", like)

    def _restored(
        self, strategy: "FairStrategy", header: dict[str, str], tensors: Tensors, like: ArrayRecord
    ) -> None:
        hearing = strategy.hearing
        hearing.constants.restore(header["constants"])
        hearing.believer.names = hearing.constants.names
        hearing.believer.examples = dict(parsed(header["examples"]))
        if hearing.noise is None:  # sites that add noise release their counts anew in a new run
            declared = parsed(header.get("declared", "{}"))
            hearing.believer.declared = {
                site: np.array(table, np.float64) for site, table in declared.items()
            }
        strategy.done, strategy.idle, hearing.released, runs = map(int, parsed(header["counts"]))
        hearing.runs = runs + 1
        best = parsed(header["best"])
        if best is not None:
            hearing.best = Best(best[0], self._like(tensors, "best", like), best[1])
        if strategy.weights is not None:
            strategy.weights.kept = parsed(header["weights"]) or {}
        _restore(strategy.strategy, tensors)

    def _like(self, tensors: Tensors, prefix: str, like: ArrayRecord) -> ArrayRecord:
        """A model of the same shapes in the same order: the file has an order of its own."""
        mine = {n.partition("/")[2]: t for n, t in tensors.items() if n.partition("/")[0] == prefix}
        if {n: t.shape for n, t in mine.items()} != {n: tuple(a.shape) for n, a in like.items()}:
            raise FedgftError(f"{self.path}: the checkpoint is of another model")
        return ArrayRecord({name: Array(mine[name]) for name in like})


def _checksum(header: dict[str, str], tensors: Tensors) -> str:
    """Of all of it, so that damage is known for what it is, hours later."""
    told = sorted((key, text) for key, text in header.items() if key != "check")
    shapes = [(name, t.dtype.str, t.shape) for name, t in sorted(tensors.items())]
    check = zlib.crc32(json.dumps([told, shapes]).encode())
    for name in sorted(tensors):
        check = zlib.crc32(np.ascontiguousarray(tensors[name]).data, check)
    return str(check)


def _about(strategy: "FairStrategy") -> str:
    """What a run is: two that differ in it do not go on from one another."""
    constants, inner = (
        strategy.hearing.constants,
        [type(s).__name__ for s in _chain(strategy.strategy)],
    )
    weights = strategy.weights
    how = constants.pricing or (weights and weights.rule)
    told = {"metric": constants.metric.name, "channel": strategy.terms.channel, "strategy": inner,
            "method": type(how).__name__, "budget": repr(strategy.terms.budget)}  # fmt: skip
    if is_dataclass(how):  # all that it was told
        told |= {f.name: str(getattr(how, f.name)) for f in fields(how) if f.name != "metric"}
    if weights is not None:
        told["reweigh"] = str(weights.reweigh)
    return json.dumps(told, sort_keys=True)


def _named(prefix: str, arrays: ArrayRecord) -> dict[str, np.ndarray]:
    return {f"{prefix}/{name}": a.numpy().copy(order="C") for name, a in arrays.items()}


def _chain(strategy: Any) -> list[Any]:
    """A strategy and those it wraps."""
    found = []
    while strategy is not None:
        found.append(strategy)
        strategy = getattr(strategy, "strategy", None)
    return found


def _inner(strategy: Any) -> dict[str, np.ndarray]:
    """Every array that the wrapped strategies keep: dictionaries and lists of them, and floats
    that they change (a clipping norm)."""
    out: dict[str, np.ndarray] = {}
    for depth, one in enumerate(_chain(strategy)):
        for name, value in vars(one).items():
            pairs = value.items() if isinstance(value, dict) else (
                enumerate(value) if isinstance(value, list) else [])  # fmt: skip
            for key, item in pairs:
                if isinstance(item, np.ndarray):
                    kind = "d" if isinstance(value, dict) else "l"
                    out[f"inner{depth}/{name}/{kind}/{key}"] = item.copy(order="C")
        if hasattr(one, "clipping_norm"):
            out[f"inner{depth}/clipping_norm/f/"] = np.array([float(one.clipping_norm)])
    return out


def _restore(strategy: Any, tensors: dict[str, np.ndarray]) -> None:
    for depth, one in enumerate(_chain(strategy)):
        held: dict[tuple[str, str], dict[str, np.ndarray]] = {}
        for name, tensor in tensors.items():
            if name.startswith(f"inner{depth}/"):
                _, attribute, kind, key = name.split("/", 3)
                held.setdefault((attribute, kind), {})[key] = tensor
        for (attribute, kind), items in held.items():
            if kind == "f":
                setattr(one, attribute, float(items[""][0]))
            elif kind == "d":
                setattr(one, attribute, items)
            else:
                setattr(one, attribute, [items[key] for key in sorted(items, key=int)])
