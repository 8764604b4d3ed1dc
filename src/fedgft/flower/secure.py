"""Secure sums (experimental): the server learns the total of all clients' statistics, no summand.

Pairwise masks that cancel in the sum (the first half of Bonawitz et al. 2017). Two questions:

    keys     every client draws a key for this sum, and signs it with its own key, together with
             the run, the model's digest, its names and the number of its rows
    masked   every client checks all signatures, and sends  sums + sum_j (+-) mask_ij  modulo 2^64

**The cohort is fixed.** Without the masked sums of every client the masks do not cancel, so there
is no total over fewer sites, and a difference of two totals is never one site. A client adds up
its sums with the sites whose public keys it was given (`peers`), or with those of its first sum,
and with no others. A round in which a site is missing has no statistics; the constants stay as they
are. If a site is gone for good, the others must agree on a new cohort (docs/threat-model.md).

**One sum a model.** Counts are asked for once a run. Of one model a client sends the same numbers
however often it is asked, and all clients must have signed for the same model.

**Noise** (`Budget(epsilon)`): every client adds a share, so that the total has the noise of the
account even if a third of the others gave theirs away (`private.share_of`).

**What one client can do to the total.** Inside a masked sum nobody can check a summand. The server
holds the total against the numbers of rows that clients declared, signed and cannot change: counts
must add up to them, and sums must fit the counts. A client that claims more makes the sum fail; one
that lies within these limits is not found out.

Numbers travel as multiples of 2^-20. Masks come from ChaCha20 under the whole shared key (Flower's
own generator folds its seed into 32 bits, which can be searched). What this does not hide: the
total itself, and the model updates.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedgft.errors import FedgftError
from fedgft.flower.checks import SIGMAS, Noise, check_report
from fedgft.flower.gather import Replies, log, plain
from fedgft.flower.ledger import digest_of
from fedgft.flower.masks import LEAST, Member, member_of, public_key
from fedgft.flower.private import honest, rows_noise, tally_from
from fedgft.flower.shield import UNIT
from fedgft.flower.terms import query
from fedgft.flower.wire import VERSION, Names, Report, Request
from fedgft.metrics import Tally

MOST_SHARE = 0.9  # of all rows, what one client may declare unless `max_share` says otherwise


@dataclass
class Cohort:
    """The clients of all secure sums of a run, as of the first one that came out.

    `rows`: node -> what it declared. `counts`: of all of them, which are summed once.
    """

    rows: dict[int, int] = field(default_factory=dict)
    names: Names | None = None
    counts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class SecureSum:
    """One sum: asks the two questions, adds up, and checks what comes out.

    `noise`: what each client adds on its own account, None for exact sums. `max_share`: of all
    rows, what one client may declare. `withheld`: clients leave small cells out, so that counts may
    be below the declared rows.
    """

    grid: Grid
    arrays: ArrayRecord
    request: Request
    config: ConfigRecord
    timeout: float
    noise: Noise | None = None
    max_share: float | None = None
    withheld: bool = False

    def ask(self, nodes: list[int], cohort: Cohort) -> tuple[Tally, Cohort]:
        """The total over the cohort, or, before there is one, over all nodes that answer; and the
        cohort with what is new about it."""
        asked = sorted(cohort.rows) or nodes
        model = digest_of(self.arrays)
        members = self._keys(asked, model, cohort)
        rows = {node: member.rows for node, member in members.items()}
        first = members[min(members)]
        names = Names.of(first.classes, first.groups)
        with_counts = cohort.counts is None
        told = {
            "secure.cohort": json.dumps([asdict(members[node]) for node in sorted(members)]),
            "secure.counts": with_counts,
        }
        cells = names.shape[0] * names.shape[1]
        table = cells * (names.shape[2] - 1) if self.noise else 2 * cells * names.shape[2]
        size = table + (cells if with_counts else 0)
        records, why = self._stage("masked", sorted(members), told)
        if set(records) != set(members):
            lost = ", ".join(members[n].site for n in sorted(set(members) - set(records)))
            raise FedgftError(f"secure sums: no sum without {plain(lost, 200)}: {why}")
        vectors = [_vector(records[n], size, members[n].site) for n in sorted(records)]
        added = np.asarray(np.sum(vectors, axis=0, dtype=np.uint64))
        total: np.ndarray = added.view(np.int64) / UNIT
        known = total[:cells].reshape(names.shape[:2]) if with_counts else cohort.counts
        assert known is not None
        values = total[cells:] if with_counts else total
        found = self._tally(known, values, names)
        self._check(found, names, rows)
        return found, replace(cohort, rows=rows, names=names, counts=known)

    def _keys(self, nodes: list[int], model: str, cohort: Cohort) -> dict[int, Member]:
        """All members, as they declared themselves the first time."""
        records, why = self._stage("keys", nodes, {"secure.model": model})
        members: dict[int, Member] = {}
        for node, record in records.items():
            try:
                member = member_of(dict(record))
                public_key(bytes.fromhex(member.mask), "mask")
                members[node] = member
            except (FedgftError, ValueError, TypeError) as error:
                why = f"node {node}: {plain(error)}"
                log.warning("fedgft: secure sums: %s", why)
        if cohort.rows and set(members) != set(cohort.rows):
            lost = sorted(set(cohort.rows) - set(members))
            raise FedgftError(f"secure sums: no sum without node {lost[0]}: {why}")
        members = self._agreed(members, cohort.names)
        if len(members) < LEAST:
            raise FedgftError(
                f"secure sums: {len(members)} client(s) answered, and {LEAST} are needed: {why}"
            )
        for node, member in members.items():
            said = cohort.rows.get(node, member.rows)
            if said != member.rows:
                raise FedgftError(
                    f"secure sums: site '{plain(member.site, 100)}' declares {member.rows:,} rows, "
                    f"and declared {said:,} before"
                )
            share = member.rows / sum(m.rows for m in members.values())
            most = MOST_SHARE if self.max_share is None else self.max_share
            if share > most:
                raise FedgftError(
                    f"secure sums: site '{plain(member.site, 100)}' declares {share:.0%} of all "
                    f"rows, more than max_share, {most:.0%}"
                )
        return members

    def _agreed(self, members: dict[int, Member], names: Names | None) -> dict[int, Member]:
        """Those with the names of the cohort; before the first sum, with those that most have."""
        held = {node: (member.classes, member.groups) for node, member in members.items()}
        if not held:
            return {}
        common = Counter(held.values()).most_common(1)[0][0]
        if names is not None:
            common = (names.classes, names.groups)
        for node, own in held.items():
            if own != common:
                log.warning("fedgft: secure sums: node %d is left out: its classes are %s, its "
                            "groups %s", node, *map(plain, own))  # fmt: skip
        return {node: member for node, member in members.items() if held[node] == common}

    def _stage(
        self, stage: str, nodes: list[int], told: Request
    ) -> tuple[dict[int, ConfigRecord], str]:
        """The records that came back, and why others did not."""
        privacy = {k: v for k, v in self.request.items() if k.startswith("privacy.")}
        request = {"version": VERSION, "secure.stage": stage, **privacy, **told}
        arrays = self.arrays if stage == "masked" else None  # the other stage needs no model
        messages = [query(arrays, self.config, request, node) for node in nodes]
        found = Replies.of(self.grid.send_and_receive(messages, timeout=self.timeout))
        records = {n: r for n, r in found.take().items() if isinstance(r, ConfigRecord)}
        return records, found.why() if found.errors else "no reply came in time"

    def _tally(self, counts: np.ndarray, values: np.ndarray, names: Names) -> Tally:
        if self.noise is not None:
            shape = (*names.shape[:2], names.shape[2] - 1)
            return tally_from(counts, values.reshape(shape), self.noise.kind)
        score, decision = (part.reshape(names.shape) for part in np.split(values, 2))
        return Tally(counts, score, decision)

    def _check(self, total: Tally, names: Names, rows: dict[int, int]) -> None:
        """A total that the declared rows can have."""
        clients, declared, found = len(rows), sum(rows.values()), float(total.rows())
        slack, noise = 0.5, None
        if self.noise is not None:
            each = np.sqrt(clients / honest(clients))  # the shares of all, in the account's noise
            noise = Noise(self.noise.kind, rows_noise(self.noise) * each, self.noise.value * each)
            loose = noise.count**2 * total.count.size + rows_noise(self.noise) ** 2 * clients
            slack += SIGMAS * float(np.sqrt(loose))
        over, under = found - declared, declared - found
        if over > slack or (under > slack and not self.withheld):
            raise FedgftError(
                f"secure sums: the total has {found:,.0f} rows, and the clients declared "
                f"{declared:,}: one of them sends something else than its sums"
            )
        check_report(Report("all sites", names, total), examples=None, noise=noise)


def _vector(record: ConfigRecord, size: int, site: str) -> np.ndarray:
    found = record.get("masked")
    if not isinstance(found, bytes) or len(found) != 8 * size:
        raise FedgftError(f"secure sums: site '{plain(site, 100)}' sent sums of another length")
    return np.frombuffer(found, np.uint64)
