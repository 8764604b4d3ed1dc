"""Secure sums (experimental): the server learns only the total of the clients' sums.

Pairwise masks cancel in the sum (the first half of Bonawitz et al. 2017). There are two stages:

    keys     every client draws a key for this sum and signs it with its own key, together with
             the run, the model's digest, its names and the number of its rows
    masked   every client checks all signatures and sends  sums + sum_j (+-) mask_ij  modulo 2^64

**The cohort is fixed.** Without the masked sums of every client the masks do not cancel, so there
is no total over fewer sites, and no difference of two totals is one site's sums. A client takes
part only if the members are the sites whose public keys it was given (`peers`) or, without such
keys, the sites of its first sum. A round in which a site is missing has no statistics; the prices
stay as they are. If a site is gone for good, the others must agree on a new cohort
(docs/threat-model.md).

**One sum per model.** Counts are requested once per run. For one model a client sends the same
numbers however often it is asked, and all clients must have signed for the same model.

**Noise** (`Budget(epsilon)`): every client adds a share of the noise. The total has the noise that
the privacy account assumes even if a third of the others reveal their shares (`Noise.share`).

**What one client can do to the total.** Inside a masked sum no summand can be checked. The server
compares the total with the numbers of rows that clients declared, signed and cannot change: counts
must add up to them, and sums must fit the counts. A client that claims more makes the sum fail; one
that lies within these limits is not detected.

Numbers travel as multiples of 2^-20. Masks come from ChaCha20 under the whole shared key (Flower's
own generator folds its seed into 32 bits, which can be searched). Between the two stages of a sum
a client keeps the secret key of its masks in Flower's own state; it is used once. Secure sums do
not hide the total itself, nor the model updates.
"""

import base64
import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.serverapp import Grid

from fedgft.errors import FedgftError
from fedgft.flower.client import Site
from fedgft.flower.messages import VERSION, Replies, Request, make_query, most_common, warn
from fedgft.flower.run_state import SIGMAS, check_sums
from fedgft.formatting import format_count, one_line
from fedgft.privacy.ledger import model_digest, site_folder, write_once
from fedgft.privacy.noise import Noise, honest_clients
from fedgft.privacy.policy import UNIT, SitePolicy
from fedgft.store import parse_json
from fedgft.sums import CategoryNames, RecordReader, Sums

MIN_CLIENTS = 3
MAX_CLIENTS = 1000
MAX_ROWS = 10**9  # the most rows that one client can declare
MAX_SHARE = 0.9  # largest share of all rows that one client may declare, if `max_share` is None
MAX_KEY_BYTES = 1000
MAX_TEXT = 2000  # characters of a key or a name
STATE = "fedgft.secure"
PURPOSE = "fedgft secure sum 2"
SIGNATURE = ec.ECDSA(hashes.SHA384())


# Members of a sum


@dataclass(frozen=True)
class Member:
    """What a client declares for one sum, signed with its own key.

    `mask` is the public key of its masks, which is drawn for this sum. `identity` is the public key
    of the site. Keys and signature are hexadecimal.
    """

    site: str
    rows: int
    classes: tuple[str, ...]
    groups: tuple[str, ...]
    mask: str
    identity: str
    signature: str

    def check(self, *, run: int, model: str) -> None:
        """Raise an error unless this identity signed the declaration for this model and run."""
        try:
            key = load_public_key(bytes.fromhex(self.identity), "identity")
            load_public_key(bytes.fromhex(self.mask), "mask")
            text = signed_text(asdict(self), run=run, model=model)
            key.verify(bytes.fromhex(self.signature), text, SIGNATURE)
        except (InvalidSignature, ValueError):
            site = one_line(self.site, 100)
            problem = "are not signed by it for this sum"
            raise FedgftError(f"the keys of site '{site}' {problem}") from None


def read_member(found: Any) -> Member:
    """Read a member that another process sent; check its form, but not its signature."""
    if not isinstance(found, dict) or not found:
        raise FedgftError("a client's keys are missing")
    reader = RecordReader(found, "a client's declaration")
    texts = {name: reader.get(name, str) for name in ("site", "mask", "identity", "signature")}
    rows = reader.whole_number("rows", least=1)
    if rows > MAX_ROWS or max(map(len, texts.values())) > MAX_TEXT:
        raise FedgftError("a client's keys or number of rows cannot be: they are too large")
    names = {"classes": reader.names("classes"), "groups": reader.names("groups")}
    return Member(rows=rows, **texts, **names)


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


def mask_numbers(numbers: np.ndarray, secret: bytes, own_key: str, others: list[str]) -> np.ndarray:
    """Return the numbers modulo 2^64, with one mask per other client added or subtracted.

    Of two clients that share a mask, the one with the lower public key adds it and the other one
    subtracts it, so that masks cancel in the sum over all clients.

    Parameters
    ----------
    numbers
        Integers.
    secret
        This client's private mask key (DER).
    own_key, others
        Public mask keys of this client and of the others (hexadecimal DER).
    """
    private: Any = serialization.load_der_private_key(secret, None)
    total = numbers.astype(np.int64).view(np.uint64)
    for other in others:
        public = load_public_key(bytes.fromhex(other), "mask")
        key = base64.urlsafe_b64decode(generate_shared_key(private, public))
        mask = expand_mask(key, numbers.size)
        total = total + mask if own_key < other else total - mask
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
    """Return the site's private key: the file `key` of the node, or one that is created once."""
    path = Path(str(context.node_config.get("key", ""))).expanduser()
    try:
        if "key" in context.node_config:
            key: Any = serialization.load_ssh_private_key(path.read_bytes(), None)
        else:
            path = site_folder(context, site) / "identity.key"
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


# The client's side


def reply_to_secure_sum(
    arrays: ArrayRecord, policy: SitePolicy, context: Context, site: Site
) -> ConfigRecord:
    """Return a client's reply to one stage of a secure sum.

    Parameters
    ----------
    arrays
        The model that the site received; only the stage "masked" needs it.
    policy
        The site's policy for the server's request.
    context
        Flower's context, whose state keeps the key of the masks between the stages.
    site
        The site; its classes and groups must be those of all members.
    """
    stage = str(policy.request["secure.stage"])
    state: Any = context.state.get(STATE) or {}
    context.state[STATE] = ConfigRecord({"stage": "none"})  # keys are used once
    try:
        if stage == "keys":
            reply = _declare(policy, context, site)
        elif stage != "masked" or state.get("stage") != "keys":
            raise FedgftError(f"'{one_line(stage, 40)}' came out of turn")
        else:
            members = _check_members(policy.request, context, site, state)
            model = model_digest(arrays)
            if model != state["model"]:
                raise FedgftError("the model is not the one that all sites signed for")
            site.load(arrays)
            cohort = {"cohort": cohort_digest(members), "clients": len(members)}
            counts, values = policy.make_summand(site.tally(site.rows), model=model, **cohort)
            numbers = np.append(counts, values) if policy.request.get("secure.counts") else values
            own_key = str(state["public"])
            other_keys = [member.mask for member in members if member.mask != own_key]
            masked = mask_numbers(numbers, state["secret"], own_key, other_keys)
            reply = {"masked": masked.tobytes()}
    except FedgftError as error:
        raise FedgftError(f"site '{site.name}': secure sums: {error}", kind=error.kind) from None
    return ConfigRecord({"version": VERSION, **reply})


def _declare(policy: SitePolicy, context: Context, site: Site) -> dict[str, Any]:
    """Return this client's signed declaration; keep the key of its masks for the next stage."""
    counts = site.counts()
    rows = policy.declare_rows(int(counts[counts >= policy.agree().min_count].sum()))
    model = policy.request.get("secure.model")
    if not isinstance(model, str) or len(model) > 200:
        raise FedgftError("the server does not say which model the sum is about")
    identity = load_identity(context, site.name)
    mask = _new_key()
    public = encode_public_key(mask.public_key())
    member = {
        "site": site.name,
        "rows": rows,
        "classes": list(site.names.classes),
        "groups": list(site.names.groups),
        "mask": public,
        "identity": encode_public_key(identity.public_key()),
    }
    text = signed_text(member, run=context.run_id, model=model)
    member["signature"] = identity.sign(text, SIGNATURE).hex()
    keys = {"public": public, "secret": encode_private_key(mask)}
    context.state[STATE] = ConfigRecord({"stage": "keys", "model": model, **keys})
    return member


def _check_members(request: Any, context: Context, site: Site, state: Any) -> list[Member]:
    """Return all clients of the sum; check that each signed for it and is a known peer."""
    try:
        listed = parse_json(str(request.get("secure.cohort", "[]")))
    except ValueError:
        raise FedgftError("the server's list of clients is damaged") from None
    if not isinstance(listed, list) or not MIN_CLIENTS <= len(listed) <= MAX_CLIENTS:
        raise FedgftError(f"a sum needs {MIN_CLIENTS} to {MAX_CLIENTS} clients")
    members = [read_member(found) for found in listed]
    for member in members:
        member.check(run=context.run_id, model=str(state["model"]))
        CategoryNames(member.classes, member.groups).check(site.names, site=member.site)
    if len({m.identity for m in members} | {m.mask for m in members}) < 2 * len(members):
        raise FedgftError("two clients have the same key")
    identity = encode_public_key(load_identity(context, site.name).public_key())
    if [m.mask for m in members if m.identity == identity] != [state["public"]]:
        raise FedgftError("the server passed on another key than the one of this site")
    _check_cohort(members, context, site.name, identity)
    return members


def _check_cohort(members: list[Member], context: Context, site: str, identity: str) -> None:
    """Raise an error unless the members are the sites in `peers`, or else of the first sum."""
    found = {member.identity: member.site for member in members}
    if "peers" in context.node_config:
        known = {**read_peers(Path(str(context.node_config["peers"])).expanduser()), identity: site}
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
            lack = f"site '{site}' has no public keys of the other sites (peers=...)"
            warn(f"{lack}: a server could put sites of its own into a secure sum")
    absent = [f"without {name}" for key, name in known.items() if key not in found]
    unknown = [f"with {one_line(name, 40)}" for key, name in found.items() if key not in known]
    if absent or unknown:
        others = ", ".join(absent[:3] + unknown[:3])
        raise FedgftError(f"the sum is over other sites than those of {origin}: {others}")


# The server's side


@dataclass
class SecureCohort:
    """The clients of all secure sums of a run, fixed by the first sum that succeeded.

    Attributes
    ----------
    rows
        Number of rows that each node declared.
    names
        Classes and groups of all members.
    counts
        Counts of all members together, by label and group; they are requested once per run.
    """

    rows: dict[int, int] = field(default_factory=dict)
    names: CategoryNames | None = None
    counts: np.ndarray | None = None


@dataclass
class SecureSum:
    """One sum: run both stages, add up, and check the total.

    Parameters
    ----------
    grid, arrays, config, timeout
        The grid for messages, the model, the strategy's settings, and seconds to wait for replies.
    request
        The request of the round; its privacy settings are sent to the clients.
    noise
        The noise that the privacy account assumes, of which every client adds a share; None for
        exact sums.
    max_share
        Largest part of all rows that one client may declare [0.9].
    withheld
        Whether clients leave small cells out, so that counts may be below the declared rows.
    """

    grid: Grid
    arrays: ArrayRecord
    request: Request
    config: ConfigRecord
    timeout: float
    noise: Noise | None = None
    max_share: float | None = None
    withheld: bool = False

    def ask(self, nodes: list[int], cohort: SecureCohort) -> tuple[Sums, SecureCohort]:
        """Return the total over the cohort, and the updated cohort.

        The first sum has no cohort yet: its total is over all of `nodes` that answer.
        """
        members = self._collect_keys(sorted(cohort.rows) or nodes, cohort)
        first = members[min(members)]
        names = CategoryNames.of(first.classes, first.groups)
        labels, groups, classes = names.shape
        cells = labels * groups
        counted = 0 if cohort.counts is not None else cells
        size = counted + cells * (classes - 1 if self.noise else 2 * classes)
        listed = [asdict(members[node]) for node in sorted(members)]
        settings = {"secure.cohort": json.dumps(listed), "secure.counts": counted > 0}
        records, reason = self._run_stage("masked", sorted(members), settings)
        if set(records) != set(members):
            missing = ", ".join(members[n].site for n in sorted(set(members) - set(records)))
            raise FedgftError(f"secure sums: no sum without {one_line(missing, 200)}: {reason}")
        vectors = [_read_vector(records[n], size, members[n].site) for n in sorted(records)]
        total = np.asarray(np.sum(vectors, axis=0, dtype=np.uint64)).view(np.int64) / UNIT
        counts = cohort.counts
        if counts is None:
            counts = total[:cells].reshape(labels, groups)
        values = total[counted:].reshape(-1, labels, groups, classes - bool(self.noise))
        if self.noise is None:
            score, decision = values
            sums = Sums(counts, score, decision)
        else:
            sums = self.noise.rebuild(counts, values[0])
        rows = {node: member.rows for node, member in members.items()}
        self._check_total(sums, rows)
        return sums, replace(cohort, rows=rows, names=names, counts=counts)

    def _collect_keys(self, nodes: list[int], cohort: SecureCohort) -> dict[int, Member]:
        """Run the first stage and return all members; each must declare the same as before."""
        settings = {"secure.model": model_digest(self.arrays)}
        records, reason = self._run_stage("keys", nodes, settings)
        members: dict[int, Member] = {}
        for node, record in records.items():
            try:
                member = read_member(dict(record))
                load_public_key(bytes.fromhex(member.mask), "mask")
                members[node] = member
            except (FedgftError, ValueError, TypeError) as error:
                reason = f"node {node}: {one_line(error)}"
                warn(f"secure sums: {reason}")
        if cohort.rows and set(members) != set(cohort.rows):
            missing = sorted(set(cohort.rows) - set(members))
            raise FedgftError(f"secure sums: no sum without node {missing[0]}: {reason}")
        members = self._with_common_names(members, cohort.names)
        if len(members) < MIN_CLIENTS:
            found = f"{format_count(len(members), 'client')} answered, and {MIN_CLIENTS} are needed"
            raise FedgftError(f"secure sums: {found}: {reason}")
        self._check_declared_rows(members, cohort)
        return members

    def _check_declared_rows(self, members: dict[int, Member], cohort: SecureCohort) -> None:
        max_share = MAX_SHARE if self.max_share is None else self.max_share
        all_rows = sum(member.rows for member in members.values())
        for node, member in members.items():
            claim = f"secure sums: site '{one_line(member.site, 100)}' declares"
            before = cohort.rows.get(node, member.rows)
            if before != member.rows:
                raise FedgftError(f"{claim} {member.rows:,} rows, and declared {before:,} before")
            share = member.rows / all_rows
            if share > max_share:
                limit = f"more than max_share, {max_share:.0%}"
                raise FedgftError(f"{claim} {share:.0%} of all rows, {limit}")

    def _with_common_names(
        self, members: dict[int, Member], names: CategoryNames | None
    ) -> dict[int, Member]:
        """Return the members with the cohort's names; before a cohort exists, the most common."""
        found = {node: (member.classes, member.groups) for node, member in members.items()}
        common = most_common(found.values()) if names is None else (names.classes, names.groups)
        for node, names_of_node in found.items():
            if names_of_node != common:
                text = "its classes are {}, its groups {}".format(*map(one_line, names_of_node))
                warn(f"secure sums: node {node} is left out: {text}")
        return {node: member for node, member in members.items() if found[node] == common}

    def _run_stage(
        self, stage: str, nodes: list[int], settings: Request
    ) -> tuple[dict[int, ConfigRecord], str]:
        """Run one stage; return the records that came back, and why others are missing."""
        privacy = {k: v for k, v in self.request.items() if k.startswith("privacy.")}
        request = {"version": VERSION, "secure.stage": stage, **privacy, **settings}
        arrays = self.arrays if stage == "masked" else None  # the other stage needs no model
        messages = [make_query(arrays, self.config, request, node) for node in nodes]
        replies = Replies.of(self.grid.send_and_receive(messages, timeout=self.timeout))
        records = {n: r for n, r in replies.take().items() if isinstance(r, ConfigRecord)}
        return records, replies.explain() if replies.errors else "no reply came in time"

    def _check_total(self, total: Sums, rows: dict[int, int]) -> None:
        """Raise an error unless the declared rows can have this total."""
        clients = len(rows)
        slack = 0.5
        noise = None
        if self.noise is not None:
            deviation = self.noise.declared_rows
            all_shares = np.sqrt(clients / honest_clients(clients))  # noise relative to the account
            noise = Noise(self.noise.kind, deviation * all_shares, self.noise.value * all_shares)
            variance = noise.count**2 * total.count.size + deviation**2 * clients
            slack += SIGMAS * float(np.sqrt(variance))
        declared = sum(rows.values())
        found = float(total.rows())
        if found - declared > slack or (declared - found > slack and not self.withheld):
            numbers = f"the total has {found:,.0f} rows, and the clients declared {declared:,}"
            reason = "one of them sends something else than its sums"
            raise FedgftError(f"secure sums: {numbers}: {reason}")
        check_sums(total, site="all sites", examples=None, noise=noise)


def _read_vector(record: ConfigRecord, size: int, site: str) -> np.ndarray:
    found = record.get("masked")
    if not isinstance(found, bytes) or len(found) != 8 * size:
        raise FedgftError(f"secure sums: site '{one_line(site, 100)}' sent sums of another length")
    return np.frombuffer(found, np.uint64)
