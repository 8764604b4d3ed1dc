"""Targets: what servers and clients send to each other, and what a deployment leaves on disk.

A message is written as JSON, since mutations of JSON go deeper than those of the engine's own
encoding; what the engine's records do not hold never reaches us, and is passed over.
"""

import json
import math
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import strategy as engine
from flwr.supercore.task_identity import TaskIdentity

from fedgft.data.schema import Schema, agree_on_schema
from fedgft.deploy.init import read_app_config
from fedgft.deploy.local_run import summarize_run
from fedgft.flower import FairFed, FedGFT, Site
from fedgft.flower.client_app import train_reply
from fedgft.flower.messages import RECORD
from fedgft.flower.secure_sums import SecureCohort, SecureSum, encode_public_key
from fedgft.flower.server_app import read_descriptions as _descriptions
from fedgft.metrics import get_metric
from fedgft.privacy.ledger import open_ledger
from fedgft.privacy.policy import SitePolicy
from fedgft.rules import Acceptance, DecisionRule
from fedgft.sums import CategoryNames
from fuzzing import Target
from fuzzing.temporary_files import each, file, folder
from in_process_grid import InProcessGrid, app_of

TaskIdentity.run_id = 1
TaskIdentity.node_id = 1
TaskIdentity.task_id = 1
REQUESTS = {
    "train": {
        "statistics": "received",
        "classes": ["no", "yes"],
        "groups": ["f", "m"],
        "price": [0.5] * 12,
    },
    "both": {"statistics": "both", "reweigh": True, "privacy.min_count": 2.0},
    "noise": {
        "statistics": "received",
        "privacy.epsilon": 5.0,
        "privacy.delta": 1e-6,
        "privacy.releases": 3.0,
        "privacy.hard": 1.0,
    },
    "scores": {
        "privacy.epsilon": 5.0,
        "privacy.delta": 1e-6,
        "privacy.releases": 3.0,
        "rule.releases": 1,
    },
    "rule": {
        "rule": DecisionRule(
            ("no", "yes"), ("group",), {(None, (name,)): Acceptance() for name in ("f", "m")}
        ).to_json()
    },
    "secure-keys": {"secure.stage": "keys", "privacy.secure": 1.0, "secure.model": "ab12"},
    "secure-masked": {
        "secure.stage": "masked",
        "privacy.secure": 1.0,
        "secure.counts": True,
        "secure.cohort": '[{"site": "north", "rows": 4}]',
    },
}
NAMES = CategoryNames.of(("no", "yes"), ("f", "m"))
KINDS = {"config": ConfigRecord, "metrics": MetricRecord, "arrays": ArrayRecord}


def packed(content: RecordDict) -> bytes:
    """As `unpacked` reads it."""
    out: dict[str, Any] = {}
    for name, record in content.items():
        kind = next(kind for kind, made in KINDS.items() if isinstance(record, made))
        plain = {key: _plain(value) for key, value in record.items()}
        out[name] = {"is": kind, "of": plain}
    return json.dumps(out, indent=1).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, Array):
        return {
            "dtype": value.dtype,
            "shape": list(value.shape),
            "stype": value.stype,
            "hex": value.data.hex(),
        }
    return value


def unpacked(data: bytes) -> RecordDict | None:
    """Through the engine's encoding and back, as a message travels; None where it would not."""
    try:
        content = RecordDict()
        for name, part in json.loads(data).items():
            content[name] = KINDS[part["is"]]({k: _value(v) for k, v in part["of"].items()})
        return recorddict_from_proto(recorddict_to_proto(content))
    except Exception:  # the engine's own business
        return None


def _value(value: Any) -> Any:
    if isinstance(value, dict) and "shape" in value:
        told = value["dtype"], tuple(value["shape"]), value["stype"]
        return Array(*told, data=bytes.fromhex(value["hex"]))
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 2)


@cache
def start() -> ArrayRecord:
    return ArrayRecord(model().state_dict())


def site(**how: Any) -> Site:
    rows = torch.tensor([[0.0, 1], [1, 0], [1, 1], [0, 0]]), torch.tensor([0, 1, 1, 0])
    groups = torch.tensor([0, 1, 0, -1])
    told = {"classes": NAMES.classes, "groups": NAMES.groups, "name": "north"}
    return Site(model(), (*rows, groups), (*rows, groups), **told | how)


def context(**node: Any) -> Context:
    told = {"state": str(folder() / "state"), **node}
    return Context(run_id=1, node_id=100, node_config=told, state=RecordDict(), run_config={})


def question(node: int = 100, kind: str = "train", content: RecordDict | None = None) -> Message:
    return Message(content or RecordDict(), dst_node_id=node, message_type=kind)


@cache
def honest() -> RecordDict:
    return train_reply(_asked({"statistics": "received"}), context(), site(train=_nothing)).content


def answered(node: int) -> Message:
    return Message(copied(honest()), reply_to=question(node))


def _asked(request: dict[str, Any]) -> Message:
    config = {f"fedgft.{k}": v for k, v in {"version": 1, **request}.items()}
    return question(content=RecordDict({"arrays": start(), "config": ConfigRecord(config)}))


def _nothing(model: Any, penalty: Any, config: Any) -> dict[str, float]:
    """Local training that only asks for the penalty."""
    with torch.no_grad():
        loss = penalty(model(torch.zeros(1, 2)), torch.tensor([0]), torch.tensor([1]))
    return {"loss": float(loss)}


def reply(data: bytes) -> None:
    """A client's reply to "train", beside two honest ones: the round goes on with what is left."""
    for make in (fair, fairfed):
        content = unpacked(data)
        if content is None:
            return
        replies = [Message(content, reply_to=question()), answered(101), answered(102)]
        strategy = make()
        arrays, _ = strategy.aggregate_train(1, replies)
        if arrays is None or not all(np.isfinite(a.numpy()).all() for a in arrays.values()):
            raise AssertionError("what was believed makes no model")
        json.dumps(strategy.history, allow_nan=False)


def copied(content: RecordDict) -> RecordDict:
    return recorddict_from_proto(recorddict_to_proto(content))


def fair(**how: Any) -> FedGFT:
    inner = engine.FedAdam(fraction_evaluate=0.0, eta=0.1)
    made = FedGFT(inner, lam=1.0, classes=NAMES.classes, groups=NAMES.groups, **how)
    return _ready(made)


def fairfed() -> FairFed:
    inner = engine.FedAvg(fraction_evaluate=0.0)
    return _ready(FairFed(inner, classes=NAMES.classes, groups=NAMES.groups))


def _ready(strategy: Any) -> Any:
    """As after its first messages."""
    strategy._sent = start()
    strategy._queried = 3
    inner = strategy.strategy
    if isinstance(inner, engine.FedAdam):
        inner.current_arrays = {k: a.numpy() for k, a in start().items()}
    return strategy


def description(data: bytes) -> None:
    """What sites say of their tables, one of them this."""
    good = {
        "rows": 40,
        "labels": ["no", "yes"],
        "groups": ["f", "m"],
        "columns": {
            "x": {"kind": "numbers", "count": 40, "sum": 3.0, "around": 9.0},
            "word": {"kind": "text", "levels": {"a": 20, "b": 20}},
            "g": {"kind": "empty"},
        },
    }
    texts = [data.decode("utf-8", "replace"), json.dumps(good)]
    for chosen in (texts, texts[:1], [*texts, texts[1]]):
        records = {
            100 + k: ConfigRecord({"version": 1, "site": f"s{k}", "description": text})
            for k, text in enumerate(chosen)
        }
        said, _ = _descriptions(records)
        schema, _ = agree_on_schema(said, label="y", group="g")
        Schema.from_json(schema.to_json())


def lies() -> dict[str, Any]:
    """Of every stage something that could be true, or nearly."""
    key = encode_public_key(ec.generate_private_key(ec.SECP384R1()).public_key())
    return {
        "keys": {"mask": key, "classes": list(NAMES.classes), "rows": 4},
        "masked": {"masked": {"hex": "00" * 8 * 30}},
    }


def secure(data: bytes) -> None:
    """One of four clients says something else in one of the two stages; null leaves it out."""
    try:
        found = json.loads(data)
        replaced = {stage: {k: _value(v) for k, v in told.items()} for stage, told in found.items()}
    except Exception:  # not of the form that this target understands
        return
    sites = [app_of(site(name=f"s{k}")) for k in range(4)]

    def liar(message: Message, state: Context) -> Message:
        made = sites[0](message, state)
        stage = message.content["config"]["fedgft.secure.stage"]
        for key, value in replaced.get(stage, {}).items():
            held = made.content[RECORD]
            for name in [n for n in held if n == key or n.startswith(key + ".")] or [key]:
                if value is None:
                    held.pop(name, None)
                    continue
                with suppress(TypeError, ValueError):  # what a record does not hold
                    held[name] = value
        return made

    grid = InProcessGrid([liar, *sites[1:]])
    asked = SecureSum(grid, start(), {"version": 1, "privacy.secure": 1.0}, ConfigRecord(), 1.0)
    total, _ = asked.ask(sorted(grid.apps), SecureCohort())
    total.gap(get_metric("sp"), "soft")


def request(data: bytes) -> None:
    """A server's message, whatever it asks a client for."""
    app = app_of(site(train=_nothing))

    def answer(kind: str) -> None:
        content = unpacked(data)
        if content is not None:
            app(question(kind=kind, content=content), context())

    asked = ("fedgft", "fedgft_report", "fedgft_scores", "fedgft_decisions")
    kinds = ("train", "evaluate", *(f"query.{kind}" for kind in asked))
    each(*(partial(answer, kind) for kind in kinds))


def server_checkpoint(data: bytes) -> None:
    """Loaded, and gone on from for a round."""
    path = file("server.safetensors", data)
    strategy = fair(checkpoint=path)
    strategy._sent = strategy.load_checkpoint(start())
    strategy.aggregate_train(1, [answered(100 + k) for k in range(2)])


def ledger(data: bytes) -> None:
    path = file("ledger.json", data)
    told = context(**{"ledger": str(path), "max-epsilon": 2.0})
    with open_ledger(told, "north") as held:
        SitePolicy(told, "north").charge(held, 0.01)
    if not 0 < json.loads(path.read_text())["rho"] < math.inf:
        raise AssertionError("nothing was entered")


def app(data: bytes) -> None:
    read_app_config(file("app/pyproject.toml", data).parent)


def outcome(data: bytes) -> None:
    """The files that a run left, each with this content."""
    for name in ("history.json", "progress.jsonl", "logs/run.log"):
        place = file(f"run/{name}", data).parent
    place = folder() / "run"
    for status in ("finished:completed", "finished:failed"):
        summarize_run(place, status, seconds=1.0, sites=3, limit=60.0)


TARGETS = [
    Target("client-reply", reply, "json"),
    Target("site-description", description, "json"),
    Target("secure-reply", secure, "json"),
    Target("server-request", request, "json"),
    Target("server-checkpoint", server_checkpoint, "safetensors"),
    Target("ledger", ledger, "json"),
    Target("app-settings", app, "text"),
    Target("run-outcome", outcome, "lines"),
]
