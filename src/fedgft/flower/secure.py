"""Secure sums (experimental): the server learns the total of all clients' statistics, no summand.

The protocol is that of Bonawitz et al. (2017), on the building blocks of Flower's SecAgg+ (key
agreement, encryption between clients, Shamir shares), for the statistics alone. Four questions:

    keys     every client sends two public keys
    shares   it shares its mask key and a seed of its own among the others, encrypted
    masked   it sends  sums + own mask + sum_j (+-) mask_ij   modulo 2^64
    unmask   the others' shares: own masks of those who answered, mask keys of those who did not

Masks cancel between those who answered; a client that is lost after "shares" is left out of the
sum, which the shares of the others make possible. Numbers travel as multiples of 2^-20.

Flower's own mask generator folds its seed into 32 bits, which can be searched; masks here come from
ChaCha20 under the whole key. What this does not hide: the total itself (with two clients each
learns the other's sums, so it asks for three), and the model updates. Clients trust the server to
hand on the public keys as they are: one that invents clients of its own can open sums.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedgft.errors import FedgftError
from fedgft.flower.gather import Replies, log
from fedgft.flower.masks import LEAST, UNIT, mask_of, pair_mask, public_key, tally_of
from fedgft.flower.terms import query
from fedgft.flower.wire import VERSION, Names, Request, names_in
from fedgft.metrics import Tally

MAJORITY = 2 / 3  # of the clients must be left at the end
Answers = dict[int, Any]


@dataclass
class SecureSum:
    """One sum: asks the four questions of these nodes, and adds up."""

    grid: Grid
    arrays: ArrayRecord
    request: Request
    config: ConfigRecord
    timeout: float

    def ask(self, nodes: list[int]) -> tuple[Tally, int, Names]:
        """The total, of how many clients it is, and their names of classes and groups."""
        keys = self._stage("keys", nodes, {})
        names, keys = self._agreed(keys)
        listed = sorted(keys)
        threshold = max(LEAST - 1, int(np.ceil(MAJORITY * len(keys))), len(keys) // 2 + 1)
        public = {f"{what}.{n}": r[what] for n, r in keys.items() for what in ("talk", "mask")}
        told = {"nodes": listed, "threshold": threshold, **public}
        shares = self._stage("shares", listed, {n: {**told, "me": n} for n in listed})
        present = sorted(shares)
        handed = {
            n: {"nodes": present, **{f"from.{m}": shares[m][f"to.{n}"] for m in present}}
            for n in present
        }
        size = names.shape[0] * names.shape[1] * (1 + 2 * names.shape[2])
        masked = self._stage("masked", present, handed, least=threshold, size=8 * size)
        alive, lost = sorted(masked), sorted(set(present) - set(masked))
        lists = {"alive": alive, "lost": lost}
        opened = self._stage("unmask", alive, {n: lists for n in alive}, least=threshold)
        return tally_of(_total(masked, lost, opened, keys), names), len(alive), names

    def _stage(
        self, stage: str, nodes: list[int], told: dict[int, Any], *, least: int = LEAST,
        size: int = 0,
    ) -> Answers:  # fmt: skip
        """Usable replies by node; enough of them, or the round has no statistics."""
        privacy = {k: v for k, v in self.request.items() if k.startswith("privacy.")}
        common = {"version": VERSION, "secure.stage": stage, **privacy}
        arrays = self.arrays if stage == "masked" else None  # no other stage needs the model
        messages = [query(arrays, self.config, common | told.get(n, {}), n) for n in nodes]
        found = Replies.of(self.grid.send_and_receive(messages, timeout=self.timeout))
        replies = {}
        for node, record in found.take().items():
            try:
                _check(stage, record, [*nodes, *told.get(node, {}).get("lost", ())], size)
                replies[node] = record
            except FedgftError as error:
                log.warning("fedgft: secure sums: node %d is left out: %s", node, error)
        if len(replies) < len(nodes):
            log.warning("fedgft: secure sums: %d client(s) lost at '%s'",
                        len(nodes) - len(replies), stage)  # fmt: skip
        if len(replies) < least:
            raise FedgftError(f"secure sums: only {len(replies)} client(s) answered '{stage}', and "
                              f"{least} are needed: {found.why()}")  # fmt: skip
        return replies

    def _agreed(self, keys: Answers) -> tuple[Names, Answers]:
        """The names that most clients have, and those clients."""
        held = {node: names_in(reply) for node, reply in keys.items()}
        (common, _), *_ = Counter(held.values()).most_common(1)
        for node, names in held.items():
            if names != common:
                log.warning("fedgft: secure sums: node %d is left out: its classes are %s, its "
                            "groups %s", node, names.classes, names.groups)  # fmt: skip
        kept = {node: reply for node, reply in keys.items() if held[node] == common}
        if len(kept) < LEAST:
            raise FedgftError(
                "secure sums: fewer than three clients have the same classes and groups"
            )
        return common, kept


def _check(stage: str, record: Any, nodes: list[int], size: int) -> None:
    """A reply that the next stage can use."""
    if not isinstance(record, ConfigRecord):
        raise FedgftError("its reply is no record of settings")
    if stage == "keys":
        public_key(record.get("talk"))
        public_key(record.get("mask"))
        names_in(record)
        return
    if stage == "masked":
        found = record.get("masked")
        if not isinstance(found, bytes) or len(found) != size:
            raise FedgftError("its masked sums have another length")
        return
    prefix = {"shares": "to.", "unmask": "share."}[stage]
    mine = [record.get(f"{prefix}{n}") for n in nodes]
    if not all(isinstance(part, bytes) and len(part) < 10_000 for part in mine):
        raise FedgftError("its reply lacks shares")


def _total(masked: Answers, lost: list[int], opened: Answers, keys: Answers) -> np.ndarray:
    """The sum of all that answered, without the masks."""
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares

    vectors = {n: np.frombuffer(r["masked"], np.uint64) for n, r in masked.items()}
    size = len(next(iter(vectors.values())))
    total: Any = np.sum(list(vectors.values()), axis=0, dtype=np.uint64)
    for node in [*vectors, *lost]:
        try:
            secret = combine_shares([reply[f"share.{node}"] for reply in opened.values()])
            if node in vectors:
                total = total - mask_of(secret, size)
                continue
            for other in vectors:  # undo what the others added for a client that is gone
                mask = pair_mask(secret, keys[other]["mask"], size)
                total = total - mask if other < node else total + mask
        except FedgftError:
            raise
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise FedgftError(
                f"secure sums: the shares of node {node} do not fit ({error})"
            ) from None
    return np.asarray(total.view(np.int64) / UNIT)
