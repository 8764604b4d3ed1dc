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
hand on the public keys as they are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedgft.flower.gather import Replies, log
from fedgft.flower.masks import LEAST, UNIT, mask_of, pair_mask, tally_of
from fedgft.flower.terms import query
from fedgft.flower.wire import VERSION, Names, Request, names_in
from fedgft.metrics import Tally
from fedgft.types import FedgftError


@dataclass
class SecureSum:
    """Asks the four questions and adds up."""

    majority: float = 2 / 3

    def ask(
        self, grid: Grid, arrays: ArrayRecord, nodes: list[int], *, request: Request,
        config: ConfigRecord, timeout: float,
    ) -> tuple[Tally, int, Names]:  # fmt: skip
        """The total, of how many clients it is, and their names of classes and groups."""
        self._grid, self._timeout, self._request, self._config = grid, timeout, request, config
        keys = self._stage("keys", nodes, {})
        names = self._same_names(keys)
        threshold = max(LEAST - 1, int(np.ceil(self.majority * len(keys))), len(keys) // 2 + 1)
        public = {
            f"{what}.{n}": bytes(reply[what])
            for n, reply in keys.items()
            for what in ("talk", "mask")
        }
        listed = {"nodes": sorted(keys), "threshold": threshold, **public}
        shares = self._stage("shares", sorted(keys), {n: {**listed, "me": n} for n in keys})
        present = sorted(shares)
        handed = {
            n: {"nodes": present, **{f"from.{m}": shares[m][f"to.{n}"] for m in present}}
            for n in present
        }
        masked = self._stage("masked", present, handed, arrays, least=threshold)
        alive, lost = sorted(masked), sorted(set(present) - set(masked))
        lists = {"alive": alive, "lost": lost}
        opened = self._stage("unmask", alive, {n: lists for n in alive}, least=threshold)
        return self._total(masked, lost, opened, keys, names), len(alive), names

    def _stage(
        self, stage: str, nodes: list[int], told: dict[int, Any], arrays: ArrayRecord | None = None,
        least: int = LEAST,
    ) -> dict[int, Any]:  # fmt: skip
        """Replies by node; enough of them, or the round has no statistics."""
        messages = []
        privacy = {k: v for k, v in self._request.items() if k.startswith("privacy.")}
        for node in nodes:
            asked = {"version": VERSION, "secure.stage": stage, **privacy, **told.get(node, {})}
            messages.append(query(arrays, self._config, asked, node))
        found = Replies.of(self._grid.send_and_receive(messages, timeout=self._timeout))
        replies = found.take()
        lost = len(nodes) - len(replies)
        if lost:
            log.warning("fedgft: secure sums: %d client(s) lost at '%s'", lost, stage)
        if len(replies) < least:
            raise FedgftError(f"secure sums: only {len(replies)} client(s) answered '{stage}', and "
                              f"{least} are needed: {found.why()}")  # fmt: skip
        return replies

    def _same_names(self, keys: dict[int, Any]) -> Names:
        held = {n: names_in(r) for n, r in keys.items()}
        first = next(iter(held.values()))
        for node, names in held.items():
            first.check(names, site=str(keys[node]["site"]))
        return first

    def _total(
        self, masked: dict[int, Any], lost: list[int], opened: dict[int, Any],
        keys: dict[int, Any], names: Names,
    ) -> Tally:  # fmt: skip
        from flwr.common.secure_aggregation.crypto.shamir import combine_shares

        vectors = {n: np.frombuffer(bytes(r["masked"]), np.uint64) for n, r in masked.items()}
        size = names.shape[0] * names.shape[1] * (1 + 2 * names.shape[2])
        if any(len(v) != size for v in vectors.values()):
            raise FedgftError("secure sums: a client sent a vector of another length")
        total = np.sum(list(vectors.values()), axis=0, dtype=np.uint64)
        for node in [*vectors, *lost]:
            shares = [bytes(reply[f"share.{node}"]) for reply in opened.values()]
            secret = combine_shares(shares)
            if node in vectors:
                total = total - mask_of(secret, size)
                continue
            for other in vectors:  # undo what the others added for a client that is gone
                mask = pair_mask(secret, bytes(keys[other]["mask"]), size)
                total = total - mask if other < node else total + mask
        return tally_of(np.asarray(total.view(np.int64) / UNIT), names)
