"""The client's side of secure sums, and the arithmetic both sides share; see `secure`."""

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from fedgft.errors import FedgftError
from fedgft.files import parsed
from fedgft.flower.gather import log, plain
from fedgft.flower.ledger import site_folder, write_once
from fedgft.flower.shield import Summand
from fedgft.flower.wire import MOST_NAMES, VERSION, Names, Request

LEAST = 3  # clients
MOST = 1000
MOST_ROWS = 10**9  # that one client can declare
STATE = "fedgft.secure"
PURPOSE = "fedgft secure sum 2"


@dataclass(frozen=True)
class Member:
    """What a client says of itself for one sum, signed with its own key (hex where bytes)."""

    site: str
    rows: int
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    mask: str  # the public key of its masks, drawn for this sum
    identity: str  # the public key of the site
    signature: str

    def check(self, *, run: int, model: str) -> None:
        """Signed by this identity, for this sum of this run."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            key = public_key(bytes.fromhex(self.identity), "identity")
            public_key(bytes.fromhex(self.mask), "mask")
            text = signed_text(asdict(self), run=run, model=model)
            key.verify(bytes.fromhex(self.signature), text, ec.ECDSA(hashes.SHA384()))
        except (InvalidSignature, ValueError):
            raise FedgftError(
                f"the keys of site '{plain(self.site, 100)}' are not signed by it for this sum"
            ) from None


def member_of(found: Any) -> Member:
    """A member from another process: right in form, whoever signed it."""
    names = tuple(Member.__dataclass_fields__)
    if not isinstance(found, dict) or not set(names) <= set(found):
        raise FedgftError("a client's keys are missing")
    texts = [found[name] for name in ("site", "mask", "identity", "signature")]
    lists = [found[name] for name in ("classes", "groups")]
    right = all(isinstance(text, str) and len(text) < 2000 for text in texts)
    for names_told in lists:
        right &= isinstance(names_told, list | tuple) and len(names_told) <= MOST_NAMES
        right = right and all(isinstance(name, str) for name in names_told)
    if not right or type(found["rows"]) is not int or not 1 <= found["rows"] <= MOST_ROWS:
        raise FedgftError("a client's keys, names or number of rows cannot be")
    made: dict[str, Any] = {name: found[name] for name in names}
    made |= {name: tuple(found[name]) for name in ("classes", "groups")}
    return Member(**made)


def signed_text(member: dict[str, Any], *, run: int, model: str) -> bytes:
    """What a signature is about: who, with which key, in which run, on which model."""
    told = {name: value for name, value in member.items() if name != "signature"}
    return json.dumps([PURPOSE, run, model, told], sort_keys=True).encode()


def cohort_digest(members: list[Member]) -> str:
    """Names the sites of a sum, whatever their order."""
    keys = sorted(member.identity for member in members)
    return hashlib.sha256(json.dumps(keys).encode()).hexdigest()


def mask_of(key: bytes, size: int) -> np.ndarray:
    """`size` numbers of 64 bits from a key of 32 bytes."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), np.uint64)


def masked(numbers: np.ndarray, secret: bytes, own: str, others: list[str]) -> np.ndarray:
    """The numbers modulo 2^64, with a mask for every other client: of the two that share it, the
    one with the lower public key adds it and the other takes it away."""
    total = numbers.astype(np.int64).view(np.uint64)
    for other in others:
        key = base64.urlsafe_b64decode(_shared(secret, bytes.fromhex(other)))
        mask = mask_of(key, numbers.size)
        total = total + mask if own < other else total - mask
    return total


def public_key(data: Any, what: str = "public") -> Any:
    """A key that masks can be made with or signatures checked by, or an error."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    if not isinstance(data, bytes) or len(data) > 1000:
        raise FedgftError(f"the {what} key of a client is missing")
    try:
        key = load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise FedgftError(f"the {what} key of a client is damaged") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise FedgftError(f"the {what} key of a client is of another kind")
    return key


# One function a stage; between the two, the secret of the masks lies in the engine's own state


def answer(
    request: Request,
    context: Context,
    site: str,
    names: Names,
    *,
    rows: Callable[[], int],
    model: Callable[[], str],
    summand: Callable[[str, str, int], Summand],
) -> ConfigRecord:
    """A client's reply to one of the two questions.

    `rows()` is the number of rows that it declares, `model()` the digest of the model that it
    received, `summand(model, cohort, clients)` what it adds.
    """
    stage = str(request["secure.stage"])
    state: Any = context.state.get(STATE) or {}
    context.state[STATE] = ConfigRecord({"stage": "none"})  # keys are used once
    try:
        if stage == "keys":
            reply, secret = _keys(request, context, site, names, rows())
            context.state[STATE] = ConfigRecord(secret)
        elif stage != "masked" or state.get("stage") != "keys":
            raise FedgftError(f"'{plain(stage, 40)}' came out of turn")
        else:
            members = _members(request, context, site, names, state)
            if model() != state["model"]:
                raise FedgftError("the model is not the one that all sites signed for")
            part = summand(str(state["model"]), cohort_digest(members), len(members))
            with_counts = bool(request.get("secure.counts"))
            numbers = np.concatenate([part.counts, part.values] if with_counts else [part.values])
            own = str(state["public"])
            others = [member.mask for member in members if member.mask != own]
            reply = {"masked": masked(numbers, state["secret"], own, others).tobytes()}
    except FedgftError as error:
        raise FedgftError(f"site '{site}': secure sums: {error}") from None
    return ConfigRecord({"version": VERSION, **reply})


def _keys(
    request: Request, context: Context, site: str, names: Names, rows: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the others need of this client, signed; and what it keeps for the next stage."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    model = request.get("secure.model")
    if not isinstance(model, str) or len(model) > 200:
        raise FedgftError("the server does not say which model the sum is about")
    identity = own_identity(context, site)
    mask = ec.generate_private_key(ec.SECP384R1())
    public = _public(mask.public_key())
    member = {
        "site": site, "rows": rows, "classes": list(names.classes), "groups": list(names.groups),
        "mask": public, "identity": _public(identity.public_key()),
    }  # fmt: skip
    text = signed_text(member, run=context.run_id, model=model)
    member["signature"] = identity.sign(text, ec.ECDSA(hashes.SHA384())).hex()
    kept = {"stage": "keys", "model": model, "public": public, "secret": _secret(mask)}
    return member, kept


def _members(
    request: Request, context: Context, site: str, names: Names, state: Any
) -> list[Member]:
    """All clients of the sum, this one among them: each signed for it, and each is one of those
    that this site adds up its sums with."""
    try:
        listed = parsed(str(request.get("secure.cohort", "[]")))
    except ValueError:
        raise FedgftError("the server's list of clients is damaged") from None
    if not isinstance(listed, list) or not LEAST <= len(listed) <= MOST:
        raise FedgftError(f"a sum needs {LEAST} to {MOST} clients")
    members = [member_of(found) for found in listed]
    for member in members:
        member.check(run=context.run_id, model=str(state["model"]))
        Names(member.classes, member.groups).check(names, site=member.site)
    if len({m.identity for m in members} | {m.mask for m in members}) < 2 * len(members):
        raise FedgftError("two clients have the same key")
    own = _public(own_identity(context, site).public_key())
    mine = [m for m in members if m.identity == own]
    if [m.mask for m in mine] != [state["public"]]:
        raise FedgftError("the server hands on another key than ours")
    _check_cohort(members, context, site, own)
    return members


def _check_cohort(members: list[Member], context: Context, site: str, own: str) -> None:
    """The sites whose keys lie in the folder `peers`; or, without one, those of the first sum."""
    found = {member.identity: member.site for member in members}
    if "peers" in context.node_config:
        known = {**read_peers(Path(str(context.node_config["peers"])).expanduser()), own: site}
        where = "its folder of peers"
    else:
        path = site_folder(context, site) / "cohort.json"
        new = not path.exists()
        known = _kept_cohort(path, write_once(path, lambda: json.dumps(found).encode()))
        where = f"its first sum ({path})"
        if new:
            log.warning(
                "fedgft: site '%s' has no public keys of the other sites (peers=...): a server "
                "could put sites of its own into a secure sum", site,
            )  # fmt: skip
    absent = [name for key, name in known.items() if key not in found]
    strange = [name for key, name in found.items() if key not in known]
    if absent or strange:
        odd = [f"without {n}" for n in absent[:3]] + [f"with {plain(n, 40)}" for n in strange[:3]]
        raise FedgftError(f"the sum is over other sites than those of {where}: {', '.join(odd)}")


def _kept_cohort(path: Path, text: bytes) -> dict[str, str]:
    try:
        known = parsed(text)
        if not isinstance(known, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise FedgftError(f"{path}: not a list of sites ({error})") from None
    return known


def read_peers(folder: Path) -> dict[str, str]:
    """Identity -> site, from files SITE.pub as `fedgft deploy init` writes them."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            key: Any = load_ssh_public_key(path.read_bytes())
            found[_public(key)] = path.stem
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise FedgftError(f"peers: {path.name} is no public key ({error})") from None
    if not found:
        raise FedgftError(f"peers: {folder} holds no public key (SITE.pub)")
    return found


def own_identity(context: Context, site: str) -> Any:
    """The site's private key: the node's own (`key`), or one that it made and kept."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        load_der_private_key,
        load_ssh_private_key,
    )

    if "key" in context.node_config:
        path = Path(str(context.node_config["key"])).expanduser()
    else:
        path = site_folder(context, site) / "identity.key"
    try:
        if "key" in context.node_config:
            key: Any = load_ssh_private_key(path.read_bytes(), None)
        else:
            made = lambda: _secret(ec.generate_private_key(ec.SECP384R1()))  # noqa: E731
            key = load_der_private_key(write_once(path, made), None)
    except (OSError, ValueError, TypeError) as error:
        raise FedgftError(f"its key {path.name} cannot be read ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedgftError(f"its key {path.name} is of another kind than the node's own")
    return key


def _shared(secret: bytes, public: bytes) -> bytes:
    """The key that two clients have in common, 32 bytes in base64 (Flower's derivation)."""
    from cryptography.hazmat.primitives.serialization import load_der_private_key
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key

    private: Any = load_der_private_key(secret, None)
    return generate_shared_key(private, public_key(public, "mask"))


def _public(key: Any) -> str:
    from cryptography.hazmat.primitives import serialization as form

    return key.public_bytes(form.Encoding.DER, form.PublicFormat.SubjectPublicKeyInfo).hex()


def _secret(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.DER, form.PrivateFormat.PKCS8, form.NoEncryption())
