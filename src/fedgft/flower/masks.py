"""The client's side of secure sums, and the arithmetic both sides share; see `secure`."""

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from fedgft.errors import FedgftError
from fedgft.files import parsed
from fedgft.flower.wire import VERSION, Names, Request
from fedgft.metrics import Tally

UNIT = 2.0**20
LARGEST = 2.0**40  # in one number of one client: 2^60 of 2^64
LEAST = 3  # clients
MOST = 1000
STATE = "fedgft.secure"
BEFORE = {"shares": "keys", "masked": "shares", "unmask": "masked"}  # each stage comes once
State = dict[str, Any]


def mask_of(key: bytes, size: int) -> np.ndarray:
    """`size` numbers of 64 bits from a key of 32 bytes."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), np.uint64)


def pair_mask(secret: bytes, public: bytes, size: int) -> np.ndarray:
    return mask_of(base64.urlsafe_b64decode(_shared(secret, public)), size)


def public_key(data: Any) -> Any:
    """A key that masks can be made with, or an error."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    if not isinstance(data, bytes) or len(data) > 1000:
        raise FedgftError("a public key is missing")
    try:
        key = load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise FedgftError("a public key is damaged") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise FedgftError("a public key is of another kind")
    return key


def tally_of(vector: np.ndarray, names: Names) -> Tally:
    classes, groups, _ = names.shape
    count, rest = np.split(vector, [classes * groups])
    return Tally(
        count.reshape(classes, groups), *(part.reshape(names.shape) for part in np.split(rest, 2))
    )


# One function a stage; what a client must remember lies in the engine's own state


def answer(
    request: Request, context: Context, site: str, names: Names, tally: Callable[[], Tally]
) -> ConfigRecord:
    """A client's reply to one of the four questions."""
    stage = str(request["secure.stage"])
    state: Any = context.state.get(STATE) or {}
    try:
        if stage == "keys":
            state, reply = _keys()
            reply |= {"site": site, "classes": list(names.classes), "groups": list(names.groups)}
        elif stage not in BEFORE or state.get("stage") != BEFORE[stage]:
            raise FedgftError(f"'{stage}' came out of turn")
        elif stage == "shares":
            state, reply = _shares(state, request)
        elif stage == "masked":
            state, reply = _masked(state, request, tally())
        else:
            state, reply = _unmask(state, request)
    except FedgftError as error:
        context.state[STATE] = ConfigRecord({"stage": "failed"})  # nothing is tried twice
        raise FedgftError(f"site '{site}': secure sums: {error}") from None
    context.state[STATE] = ConfigRecord({**state, "stage": stage})
    return ConfigRecord({"version": VERSION, **reply})


def _keys() -> tuple[State, State]:
    from cryptography.hazmat.primitives.asymmetric import ec

    talk, mask = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    state = {"talk": _secret(talk), "mask": _secret(mask)}
    return state, {"talk": _public(talk), "mask": _public(mask)}


def _shares(state: Any, request: Request) -> tuple[State, State]:
    """A seed of one's own and the mask key, in shares. Each goes to one client, encrypted, and says
    from whom, for whom and in which round it is, so that the server can use it for nothing else."""
    from flwr.common.secure_aggregation.crypto.shamir import create_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt

    nodes, me, threshold = _nodes(request, "nodes"), request.get("me"), request.get("threshold")
    if type(me) is not int or type(threshold) is not int:
        raise FedgftError("the server does not say who is who")
    if len(nodes) < LEAST or not len(nodes) // 2 < threshold <= len(nodes) or me not in nodes:
        raise FedgftError(f"{LEAST} clients are needed, and a majority to unmask")
    keys: dict[str, Any] = {
        f"{what}.{n}": request.get(f"{what}.{n}") for n in nodes for what in ("talk", "mask")
    }
    for key in keys.values():
        public_key(key)
    if len(set(keys.values())) < len(keys):
        raise FedgftError("two clients have the same key")
    if keys[f"mask.{me}"] != _public_of(state["mask"]):
        raise FedgftError("the server hands on another key than ours")
    session = hashlib.sha256(json.dumps([nodes, threshold]).encode() + b"".join(
        keys[name] for name in sorted(keys))).hexdigest()  # fmt: skip
    seed = secrets.token_bytes(32)
    parts = [create_shares(secret, threshold, len(nodes)) for secret in (seed, state["mask"])]
    reply: State = {}
    for i, node in enumerate(nodes):
        text = json.dumps([session, me, node, *(part[i].hex() for part in parts)]).encode()
        reply[f"to.{node}"] = encrypt(_shared(state["talk"], keys[f"talk.{node}"]), text)
    kept = {"talk": state["talk"], "mask": state["mask"], "seed": seed, "session": session,
            "nodes": nodes, "me": me, "threshold": threshold}  # fmt: skip
    return {**keys, **kept}, reply


def _masked(state: Any, request: Request, tally: Tally) -> tuple[State, State]:
    numbers = np.concatenate([t.ravel() for t in (tally.count, tally.score, tally.decision)])
    if not np.isfinite(numbers).all() or np.abs(numbers).max() > LARGEST:
        raise FedgftError("the sums are not finite, or too large to be masked")
    me, present = int(state["me"]), _nodes(request, "nodes")
    enough = len(present) >= int(state["threshold"]) and len(present) >= LEAST
    if not enough or me not in present or not set(present) <= set(state["nodes"]):
        raise FedgftError("too few clients are left")
    held = {}
    for node in present:  # what cannot be opened now could not help later
        held[f"share.{node}"] = _opened(state, node, request.get(f"from.{node}"))
    hidden = np.rint(numbers * UNIT).astype(np.int64).view(np.uint64)
    hidden = hidden + mask_of(state["seed"], numbers.size)
    for node in present:
        if node != me:
            mask = pair_mask(state["mask"], state[f"mask.{node}"], numbers.size)
            hidden = hidden + mask if me < node else hidden - mask
    return {**dict(state), **held, "present": present}, {"masked": hidden.tobytes()}


def _opened(state: Any, sender: int, text: Any) -> str:
    """The shares that another client sent to us, and to nobody else, in this round."""
    from cryptography.fernet import InvalidToken
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt

    key = _shared(state["talk"], state[f"talk.{sender}"])
    try:
        session, source, target, *shares = parsed(decrypt(key, text))
    except (InvalidToken, TypeError, ValueError):
        raise FedgftError("a share cannot be opened") from None
    if (session, source, target) != (state["session"], sender, state["me"]) or len(shares) != 2:
        raise FedgftError("a share was meant for somebody else")
    if not all(isinstance(s, str) and re.fullmatch("([0-9a-f]{2})+", s) for s in shares):
        raise FedgftError("a share is damaged")
    return json.dumps(shares)


def _unmask(state: Any, request: Request) -> tuple[State, State]:
    """Of every client one share and never both: both would open its sums to the server."""
    alive, lost = _nodes(request, "alive"), _nodes(request, "lost")
    if set(alive) & set(lost) or sorted(alive + lost) != sorted(state["present"]):
        raise FedgftError("the lists of clients contradict each other")
    if len(alive) < int(state["threshold"]) or int(state["me"]) not in alive:
        raise FedgftError("too few clients are left")
    reply: State = {}
    for which, nodes in ((0, alive), (1, lost)):
        for node in nodes:
            reply[f"share.{node}"] = bytes.fromhex(json.loads(state[f"share.{node}"])[which])
    return {}, reply


def _nodes(request: Request, name: str) -> list[int]:
    nodes: Any = request.get(name, [])
    if not isinstance(nodes, list) or not all(type(n) is int for n in nodes):
        raise FedgftError("the server lists something else than clients")
    if len(set(nodes)) < len(nodes) or len(nodes) > MOST:
        raise FedgftError("a client is listed twice")
    return nodes


def _shared(secret: bytes, public: bytes) -> bytes:
    """The key that two clients have in common, 32 bytes in base64 (Flower's derivation)."""
    from cryptography.hazmat.primitives.serialization import load_der_private_key
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key

    private: Any = load_der_private_key(secret, None)
    return generate_shared_key(private, public_key(public))


def _public(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.public_key().public_bytes(form.Encoding.DER, form.PublicFormat.SubjectPublicKeyInfo)


def _public_of(secret: bytes) -> bytes:
    from cryptography.hazmat.primitives.serialization import load_der_private_key

    return _public(load_der_private_key(secret, None))


def _secret(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.DER, form.PrivateFormat.PKCS8, form.NoEncryption())
