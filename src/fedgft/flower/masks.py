"""The client's side of secure sums, and the arithmetic both sides share; see `secure`."""

import base64
import json
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from fedgft.flower.wire import VERSION, Names, Request
from fedgft.metrics import Tally
from fedgft.types import FedgftError

UNIT = 2.0**20
LARGEST = 2.0**40  # in one number of one client: 2^60 of 2^64
LEAST = 3  # clients
STATE = "fedgft.secure"


def mask_of(key: bytes, size: int) -> np.ndarray:
    """`size` numbers of 64 bits from a key of 32 bytes."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), np.uint64)


def _public(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.public_key().public_bytes(form.Encoding.DER, form.PublicFormat.SubjectPublicKeyInfo)


def _secret(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.DER, form.PrivateFormat.PKCS8, form.NoEncryption())


def _shared(secret: bytes, public: bytes) -> bytes:
    """The key that two clients have in common, 32 bytes in base64 (Flower's derivation)."""
    from cryptography.hazmat.primitives.serialization import (
        load_der_private_key,
        load_der_public_key,
    )
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key

    private, other = load_der_private_key(secret, None), load_der_public_key(public)
    return generate_shared_key(private, other)  # pyrefly: ignore


def pair_mask(secret: bytes, public: bytes, size: int) -> np.ndarray:
    return mask_of(base64.urlsafe_b64decode(_shared(secret, public)), size)


def _vector(tally: Tally) -> np.ndarray:
    return np.concatenate([t.ravel() for t in (tally.count, tally.score, tally.decision)])


def tally_of(vector: np.ndarray, names: Names) -> Tally:
    classes, groups, _ = names.shape
    count, rest = np.split(vector, [classes * groups])
    return Tally(
        count.reshape(classes, groups), *(part.reshape(names.shape) for part in np.split(rest, 2))
    )


# One function a stage; what a client must remember lies in the engine's own state


def answer(
    record: Request, context: Context, site: str, names: Names, tally: Callable[[], Tally]
) -> ConfigRecord:
    """A client's reply to one of the four questions."""
    stage = str(record["secure.stage"])
    state: Any = context.state.get(STATE) or ConfigRecord()
    if stage == "keys":
        state, reply = _keys()
        reply |= {"site": site, "classes": list(names.classes), "groups": list(names.groups)}
    elif state.get("stage") != {"shares": "keys", "masked": "shares", "unmask": "masked"}.get(
        stage
    ):
        raise FedgftError(f"site '{site}': secure sums: '{stage}' came out of turn")
    elif stage == "shares":
        state, reply = _shares(state, record, site)
    elif stage == "masked":
        state, reply = _masked(state, record, tally(), site)
    else:
        state, reply = _unmask(state, record, site)
    context.state[STATE] = ConfigRecord(state | {"stage": stage})
    return ConfigRecord({"version": VERSION, **reply})


def _keys() -> tuple[dict[str, Any], dict[str, Any]]:
    from cryptography.hazmat.primitives.asymmetric import ec

    talk, mask = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    state = {"talk": _secret(talk), "mask": _secret(mask)}
    return state, {"talk": _public(talk), "mask": _public(mask)}


def _shares(state: Any, record: Any, site: str) -> tuple[dict[str, Any], dict[str, Any]]:
    from flwr.common.secure_aggregation.crypto.shamir import create_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt

    nodes, me = [int(n) for n in record["nodes"]], int(record["me"])
    threshold = int(record["threshold"])
    if len(nodes) < LEAST or not len(nodes) // 2 < threshold <= len(nodes) or me not in nodes:
        raise FedgftError(
            f"site '{site}': secure sums need {LEAST} clients and a majority to unmask"
        )
    seed = secrets.token_bytes(32)
    parts = [create_shares(secret, threshold, len(nodes)) for secret in (seed, state["mask"])]
    reply: dict[str, Any] = {}
    for i, node in enumerate(nodes):
        text = json.dumps([part[i].hex() for part in parts]).encode()
        reply[f"to.{node}"] = encrypt(_shared(state["talk"], record[f"talk.{node}"]), text)
    kept = {k: state[k] for k in ("talk", "mask")}
    others = {key: record[key] for key in record if key.startswith(("talk.", "mask."))}
    return {**kept, **others, "seed": seed, "nodes": nodes, "me": me, "threshold": threshold}, reply


def _masked(
    state: Any, record: Any, tally: Tally, site: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    numbers = _vector(tally)
    if not np.isfinite(numbers).all() or np.abs(numbers).max() > LARGEST:
        raise FedgftError(f"site '{site}': its sums are not finite, or too large to be masked")
    hidden = np.rint(numbers * UNIT).astype(np.int64).view(np.uint64) + mask_of(
        state["seed"], numbers.size
    )
    me = int(state["me"])
    present = [int(n) for n in record["nodes"]]
    if len(present) < int(state["threshold"]) or not set(present) <= set(state["nodes"]):
        raise FedgftError(f"site '{site}': secure sums: too few clients are left")
    for node in present:
        if node != me:
            mask = pair_mask(state["mask"], state[f"mask.{node}"], numbers.size)
            hidden = hidden + mask if me < node else hidden - mask
    held = {f"from.{n}": record[f"from.{n}"] for n in present}
    return {**dict(state), **held, "present": present}, {"masked": hidden.tobytes()}


def _unmask(state: Any, record: Any, site: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of every client one share and never both: both would open its sums to the server."""
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt

    alive, lost = ([int(n) for n in record[what]] for what in ("alive", "lost"))
    if set(alive) & set(lost) or sorted(alive + lost) != sorted(state["present"]):
        raise FedgftError(f"site '{site}': secure sums: the lists of clients contradict each other")
    if len(alive) < int(state["threshold"]):
        raise FedgftError(f"site '{site}': secure sums: too few clients are left")
    reply: dict[str, Any] = {}
    for which, nodes in ((0, alive), (1, lost)):
        for node in nodes:
            key = _shared(state["talk"], state[f"talk.{node}"])
            reply[f"share.{node}"] = bytes.fromhex(
                json.loads(decrypt(key, state[f"from.{node}"]))[which]
            )
    return {}, reply
