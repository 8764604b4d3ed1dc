"""The client's side of secure sums, and the keys and masks that both sides use.

`secure_sum_server` describes the protocol. Between the two stages of a sum the secret key of the
masks is kept in Flower's own state; it is used once.
"""

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from flwr.app import ConfigRecord, Context
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key

from fedgft.errors import FedgftError
from fedgft.flower.messages import VERSION, Names, Request
from fedgft.flower.replies import log, plain
from fedgft.privacy.ledger import site_folder, write_once
from fedgft.privacy.policy import Summand
from fedgft.store import parse_json
from fedgft.sums import MAX_NAMES

MIN_CLIENTS = 3
MAX_CLIENTS = 1000
MAX_ROWS = 10**9  # that one client can declare
MAX_KEY_BYTES = 1000
STATE = "fedgft.secure"
PURPOSE = "fedgft secure sum 2"
SIGNATURE = ec.ECDSA(hashes.SHA384())


# Members of a sum


@dataclass(frozen=True)
class Member:
    """What a client declares for one sum, signed with its own key.

    `mask` is the public key of its masks, drawn for this sum, and `identity` the public key of the
    site; keys and signature are hexadecimal.
    """

    site: str
    rows: int
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    mask: str
    identity: str
    signature: str

    def check(self, *, run: int, model: str) -> None:
        """Raise unless this identity signed it for this model of this run."""
        try:
            key = load_public_key(bytes.fromhex(self.identity), "identity")
            load_public_key(bytes.fromhex(self.mask), "mask")
            text = signed_text(asdict(self), run=run, model=model)
            key.verify(bytes.fromhex(self.signature), text, SIGNATURE)
        except (InvalidSignature, ValueError):
            raise FedgftError(
                f"the keys of site '{plain(self.site, 100)}' are not signed by it for this sum"
            ) from None


def read_member(found: Any) -> Member:
    """Return a member from another process; its form is checked, its signature is not."""
    names = tuple(Member.__dataclass_fields__)
    if not isinstance(found, dict) or not set(names) <= set(found):
        raise FedgftError("a client's keys are missing")
    texts = [found[name] for name in ("site", "mask", "identity", "signature")]
    lists = [found[name] for name in ("classes", "groups")]
    valid = type(found["rows"]) is int and 1 <= found["rows"] <= MAX_ROWS
    valid &= all(isinstance(text, str) and len(text) < 2000 for text in texts)
    valid &= all(isinstance(each, list | tuple) and len(each) <= MAX_NAMES for each in lists)
    if not valid or not all(isinstance(name, str) for each in lists for name in each):
        raise FedgftError("a client's keys, names or number of rows cannot be")
    values: dict[str, Any] = {name: found[name] for name in names}
    return Member(**values | {"classes": tuple(lists[0]), "groups": tuple(lists[1])})


def signed_text(member: dict[str, Any], *, run: int, model: str) -> bytes:
    """Return the text that a member signs: all its fields, the run and the model's digest."""
    fields = {name: value for name, value in member.items() if name != "signature"}
    return json.dumps([PURPOSE, run, model, fields], sort_keys=True).encode()


def cohort_digest(members: list[Member]) -> str:
    """Return a digest that identifies the sites of a sum, in any order."""
    keys = sorted(member.identity for member in members)
    return hashlib.sha256(json.dumps(keys).encode()).hexdigest()


# Masks


def expand_mask(key: bytes, size: int) -> np.ndarray:
    """Return `size` pseudorandom numbers of 64 bits from a key of 32 bytes (ChaCha20)."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), np.uint64)


def mask_numbers(numbers: np.ndarray, secret: bytes, own: str, others: list[str]) -> np.ndarray:
    """Return integers modulo 2^64, with one mask for every other client.

    Of two clients that share a mask, the one with the lower public key adds it and the other one
    subtracts it, so that masks cancel in the sum over all clients.

    Parameters
    ----------
    numbers
        Integers.
    secret
        This client's private mask key (DER).
    own, others
        Public mask keys of this client and of the others (hexadecimal DER).
    """
    private: Any = serialization.load_der_private_key(secret, None)
    total = numbers.astype(np.int64).view(np.uint64)
    for other in others:
        public = load_public_key(bytes.fromhex(other), "mask")
        key = base64.urlsafe_b64decode(generate_shared_key(private, public))
        mask = expand_mask(key, numbers.size)
        total = total + mask if own < other else total - mask
    return total


# Keys


def load_public_key(data: Any, purpose: str = "public") -> Any:
    """Return a P-384 public key from DER bytes; `purpose` names it in errors."""
    if not isinstance(data, bytes) or len(data) > MAX_KEY_BYTES:
        raise FedgftError(f"the {purpose} key of a client is missing")
    try:
        key = serialization.load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise FedgftError(f"the {purpose} key of a client is damaged") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise FedgftError(f"the {purpose} key of a client is of another kind")
    return key


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def encode_public_key(key: Any) -> str:
    """Return a public key as hexadecimal DER."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.DER, form).hex()


def encode_private_key(key: Any) -> bytes:
    """Return a private key as DER, not encrypted."""
    return key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_identity(context: Context, site: str) -> Any:
    """Return the site's private key: the node's own (`key`), or one that is created once."""
    given = context.node_config.get("key")
    if given is None:
        path = site_folder(context, site) / "identity.key"
    else:
        path = Path(str(given)).expanduser()
    try:
        if given is not None:
            key: Any = serialization.load_ssh_private_key(path.read_bytes(), None)
        else:
            content = write_once(path, lambda: encode_private_key(_new_key()))
            key = serialization.load_der_private_key(content, None)
    except (OSError, ValueError, TypeError) as error:
        raise FedgftError(f"its key {path.name} cannot be read ({error})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedgftError(f"its key {path.name} is of another kind than the node's own")
    return key


def read_peers(folder: Path) -> dict[str, str]:
    """Return {identity: site} from files SITE.pub, as `fedgft deploy init` writes them."""
    peers: dict[str, str] = {}
    for path in sorted(folder.glob("*.pub")):
        try:
            key = serialization.load_ssh_public_key(path.read_bytes())
            peers[encode_public_key(key)] = path.stem
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise FedgftError(f"peers: {path.name} is no public key ({error})") from None
    if not peers:
        raise FedgftError(f"peers: {folder} holds no public key (SITE.pub)")
    return peers


# The two stages


def reply_to_secure_sum(
    request: Request,
    context: Context,
    site: str,
    names: Names,
    *,
    rows: Callable[[], int],
    model: Callable[[], str],
    summand: Callable[[str, str, int], Summand],
) -> ConfigRecord:
    """Return a client's reply to one stage of a secure sum.

    Parameters
    ----------
    request, context, site
        The server's request, Flower's context and the name of this site.
    names
        The site's classes and groups, which must be those of all members.
    rows
        Returns the number of rows that the site declares.
    model
        Returns the digest of the model that the site received.
    summand
        Returns what the site adds, from the model's digest, the cohort's digest and the number of
        clients.
    """
    stage = str(request["secure.stage"])
    state: Any = context.state.get(STATE) or {}
    context.state[STATE] = ConfigRecord({"stage": "none"})  # keys are used once
    try:
        if stage == "keys":
            reply, secret = _declare(request, context, site, names, rows())
            context.state[STATE] = ConfigRecord(secret)
        elif stage != "masked" or state.get("stage") != "keys":
            raise FedgftError(f"'{plain(stage, 40)}' came out of turn")
        else:
            members = _check_members(request, context, site, names, state)
            if model() != state["model"]:
                raise FedgftError("the model is not the one that all sites signed for")
            part = summand(str(state["model"]), cohort_digest(members), len(members))
            with_counts = bool(request.get("secure.counts"))
            numbers = np.concatenate([part.counts, part.values] if with_counts else [part.values])
            own = str(state["public"])
            others = [member.mask for member in members if member.mask != own]
            masked = mask_numbers(numbers, state["secret"], own, others)
            reply = {"masked": masked.tobytes()}
    except FedgftError as error:
        raise FedgftError(f"site '{site}': secure sums: {error}", kind=error.kind) from None
    return ConfigRecord({"version": VERSION, **reply})


def _declare(
    request: Request, context: Context, site: str, names: Names, rows: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """This client's signed declaration, and what it keeps for the second stage."""
    model = request.get("secure.model")
    if not isinstance(model, str) or len(model) > 200:
        raise FedgftError("the server does not say which model the sum is about")
    identity = load_identity(context, site)
    mask = _new_key()
    public = encode_public_key(mask.public_key())
    member = {
        "site": site,
        "rows": rows,
        "classes": list(names.classes),
        "groups": list(names.groups),
        "mask": public,
        "identity": encode_public_key(identity.public_key()),
    }
    text = signed_text(member, run=context.run_id, model=model)
    member["signature"] = identity.sign(text, SIGNATURE).hex()
    secret = encode_private_key(mask)
    return member, {"stage": "keys", "model": model, "public": public, "secret": secret}


def _check_members(
    request: Request, context: Context, site: str, names: Names, state: Any
) -> list[Member]:
    """All clients of the sum, this one included: each signed for it and is a known peer."""
    try:
        listed = parse_json(str(request.get("secure.cohort", "[]")))
    except ValueError:
        raise FedgftError("the server's list of clients is damaged") from None
    if not isinstance(listed, list) or not MIN_CLIENTS <= len(listed) <= MAX_CLIENTS:
        raise FedgftError(f"a sum needs {MIN_CLIENTS} to {MAX_CLIENTS} clients")
    members = [read_member(found) for found in listed]
    for member in members:
        member.check(run=context.run_id, model=str(state["model"]))
        Names(member.classes, member.groups).check(names, site=member.site)
    if len({m.identity for m in members} | {m.mask for m in members}) < 2 * len(members):
        raise FedgftError("two clients have the same key")
    own = encode_public_key(load_identity(context, site).public_key())
    if [m.mask for m in members if m.identity == own] != [state["public"]]:
        raise FedgftError("the server hands on another key than ours")
    _check_cohort(members, context, site, own)
    return members


def _check_cohort(members: list[Member], context: Context, site: str, own: str) -> None:
    """The members must be the sites in the folder `peers`, or else those of the first sum."""
    found = {member.identity: member.site for member in members}
    if "peers" in context.node_config:
        known = {**read_peers(Path(str(context.node_config["peers"])).expanduser()), own: site}
        origin = "its folder of peers"
    else:
        path = site_folder(context, site) / "cohort.json"
        is_first = not path.exists()
        text = write_once(path, lambda: json.dumps(found).encode())
        try:
            known = dict(parse_json(text))
        except (ValueError, TypeError) as error:
            raise FedgftError(f"{path}: not a list of sites ({error})") from None
        origin = f"its first sum ({path})"
        if is_first:
            log.warning(
                "fedgft: site '%s' has no public keys of the other sites (peers=...): a server "
                "could put sites of its own into a secure sum",
                site,
            )
    absent = [name for key, name in known.items() if key not in found]
    unknown = [name for key, name in found.items() if key not in known]
    if absent or unknown:
        odd = [f"without {n}" for n in absent[:3]] + [f"with {plain(n, 40)}" for n in unknown[:3]]
        raise FedgftError(f"the sum is over other sites than those of {origin}: {', '.join(odd)}")
