"""Secure sums (experimental): the server learns the total of the clients' sums, and no summand.

Pairwise masks cancel in the sum (the first half of Bonawitz et al. 2017). There are two stages:

    keys     every client draws a key for this sum and signs it with its own key, together with
             the run, the model's digest, its names and the number of its rows
    masked   every client checks all signatures and sends  sums + sum_j (+-) mask_ij  modulo 2^64

**The cohort is fixed.** Without the masked sums of every client the masks do not cancel, so there
is no total over fewer sites, and no difference of two totals is one site's sums. A client takes
part with the sites whose public keys it was given (`peers`), or with those of its first sum, and
with no others. A round in which a site is missing has no statistics; the constants stay as they
are. If a site is gone for good, the others must agree on a new cohort (docs/threat-model.md).

**One sum per model.** Counts are requested once per run. For one model a client sends the same
numbers however often it is asked, and all clients must have signed for the same model.

**Noise** (`Budget(epsilon)`): every client adds a share, so that the total has the noise of the
account even if a third of the others gave theirs away (`fedgft.privacy.noise.share_noise`).

**What one client can do to the total.** Inside a masked sum no summand can be checked. The server
compares the total with the numbers of rows that clients declared, signed and cannot change: counts
must add up to them, and sums must fit the counts. A client that claims more makes the sum fail; one
that lies within these limits is not detected.

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
from fedgft.flower.messages import VERSION, Names, Report, Request
from fedgft.flower.replies import SIGMAS, Replies, check_report, log, make_query, plain
from fedgft.flower.secure_sum_client import MIN_CLIENTS, Member, load_public_key, read_member
from fedgft.privacy.ledger import model_digest
from fedgft.privacy.noise import Noise, declared_rows_deviation, honest_clients, rebuild_tally
from fedgft.privacy.policy import UNIT
from fedgft.sums import Sums

MAX_SHARE = 0.9  # of all rows, what one client may declare unless `max_share` is set


@dataclass
class Cohort:
    """The clients of all secure sums of a run, as of the first one that succeeded.

    Attributes
    ----------
    rows
        Number of rows that each node declared.
    names
        Classes and groups of all members.
    counts
        Counts of all members together, by label and group; they are summed once.
    """

    rows: dict[int, int] = field(default_factory=dict)
    names: Names | None = None
    counts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class SecureSum:
    """One sum: run both stages, add up, and check the total.

    Parameters
    ----------
    grid, arrays, config, timeout
        Where messages go, the model, the strategy's settings, and seconds to wait for replies.
    request
        The request of the round; its privacy settings are handed on.
    noise
        The noise of the account that the clients share; None for exact sums.
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

    def ask(self, nodes: list[int], cohort: Cohort) -> tuple[Sums, Cohort]:
        """Return the total over the cohort, and the cohort with what is new about it.

        Before there is a cohort, the total is over all of `nodes` that answer.
        """
        members = self._collect_keys(sorted(cohort.rows) or nodes, cohort)
        first = members[min(members)]
        names = Names.of(first.classes, first.groups)
        labels, groups, classes = names.shape
        cells = labels * groups
        counted = 0 if cohort.counts is not None else cells
        size = counted + (cells * (classes - 1) if self.noise else 2 * cells * classes)
        listed = [asdict(members[node]) for node in sorted(members)]
        settings = {"secure.cohort": json.dumps(listed), "secure.counts": counted > 0}
        records, why = self._run_stage("masked", sorted(members), settings)
        if set(records) != set(members):
            lost = ", ".join(members[n].site for n in sorted(set(members) - set(records)))
            raise FedgftError(f"secure sums: no sum without {plain(lost, 200)}: {why}")
        vectors = [_read_vector(records[n], size, members[n].site) for n in sorted(records)]
        total = np.asarray(np.sum(vectors, axis=0, dtype=np.uint64)).view(np.int64) / UNIT
        counts = cohort.counts
        if counts is None:
            counts = total[:cells].reshape(labels, groups)
        tally = self._build_tally(counts, total[counted:], names)
        rows = {node: member.rows for node, member in members.items()}
        self._check_total(tally, names, rows)
        return tally, replace(cohort, rows=rows, names=names, counts=counts)

    def _collect_keys(self, nodes: list[int], cohort: Cohort) -> dict[int, Member]:
        """The first stage: all members, who declare what they declared before."""
        settings = {"secure.model": model_digest(self.arrays)}
        records, why = self._run_stage("keys", nodes, settings)
        members: dict[int, Member] = {}
        for node, record in records.items():
            try:
                member = read_member(dict(record))
                load_public_key(bytes.fromhex(member.mask), "mask")
                members[node] = member
            except (FedgftError, ValueError, TypeError) as error:
                why = f"node {node}: {plain(error)}"
                log.warning("fedgft: secure sums: %s", why)
        if cohort.rows and set(members) != set(cohort.rows):
            lost = sorted(set(cohort.rows) - set(members))
            raise FedgftError(f"secure sums: no sum without node {lost[0]}: {why}")
        members = self._with_common_names(members, cohort.names)
        if len(members) < MIN_CLIENTS:
            raise FedgftError(
                f"secure sums: {len(members)} client(s) answered, and {MIN_CLIENTS} are needed: "
                f"{why}"
            )
        self._check_declared_rows(members, cohort)
        return members

    def _check_declared_rows(self, members: dict[int, Member], cohort: Cohort) -> None:
        max_share = MAX_SHARE if self.max_share is None else self.max_share
        all_rows = sum(member.rows for member in members.values())
        for node, member in members.items():
            site = plain(member.site, 100)
            before = cohort.rows.get(node, member.rows)
            if before != member.rows:
                raise FedgftError(
                    f"secure sums: site '{site}' declares {member.rows:,} rows, and declared "
                    f"{before:,} before"
                )
            share = member.rows / all_rows
            if share > max_share:
                raise FedgftError(
                    f"secure sums: site '{site}' declares {share:.0%} of all rows, more than "
                    f"max_share, {max_share:.0%}"
                )

    def _with_common_names(
        self, members: dict[int, Member], names: Names | None
    ) -> dict[int, Member]:
        """The members with the cohort's names; before the first sum, with the most common ones."""
        found = {node: (member.classes, member.groups) for node, member in members.items()}
        if not found:
            return {}
        common = Counter(found.values()).most_common(1)[0][0]
        if names is not None:
            common = (names.classes, names.groups)
        for node, own in found.items():
            if own != common:
                log.warning(
                    "fedgft: secure sums: node %d is left out: its classes are %s, its groups %s",
                    node,
                    *map(plain, own),
                )
        return {node: member for node, member in members.items() if found[node] == common}

    def _run_stage(
        self, stage: str, nodes: list[int], settings: Request
    ) -> tuple[dict[int, ConfigRecord], str]:
        """The records that came back, and why others did not."""
        privacy = {k: v for k, v in self.request.items() if k.startswith("privacy.")}
        request = {"version": VERSION, "secure.stage": stage, **privacy, **settings}
        arrays = self.arrays if stage == "masked" else None  # the other stage needs no model
        messages = [make_query(arrays, self.config, request, node) for node in nodes]
        replies = Replies.of(self.grid.send_and_receive(messages, timeout=self.timeout))
        records = {n: r for n, r in replies.take().items() if isinstance(r, ConfigRecord)}
        return records, replies.explain() if replies.errors else "no reply came in time"

    def _build_tally(self, counts: np.ndarray, values: np.ndarray, names: Names) -> Sums:
        if self.noise is not None:
            shape = (*names.shape[:2], names.shape[2] - 1)
            return rebuild_tally(counts, values.reshape(shape), self.noise.kind)
        score, decision = (part.reshape(names.shape) for part in np.split(values, 2))
        return Sums(counts, score, decision)

    def _check_total(self, total: Sums, names: Names, rows: dict[int, int]) -> None:
        """Raise unless the declared rows can have this total."""
        clients = len(rows)
        slack = 0.5
        noise = None
        if self.noise is not None:
            deviation = declared_rows_deviation(self.noise)
            all_shares = np.sqrt(clients / honest_clients(clients))  # relative to the account
            noise = Noise(self.noise.kind, deviation * all_shares, self.noise.value * all_shares)
            variance = noise.count**2 * total.count.size + deviation**2 * clients
            slack += SIGMAS * float(np.sqrt(variance))
        declared = sum(rows.values())
        found = float(total.rows())
        if found - declared > slack or (declared - found > slack and not self.withheld):
            raise FedgftError(
                f"secure sums: the total has {found:,.0f} rows, and the clients declared "
                f"{declared:,}: one of them sends something else than its sums"
            )
        check_report(Report("all sites", names, total), examples=None, noise=noise)


def _read_vector(record: ConfigRecord, size: int, site: str) -> np.ndarray:
    found = record.get("masked")
    if not isinstance(found, bytes) or len(found) != 8 * size:
        raise FedgftError(f"secure sums: site '{plain(site, 100)}' sent sums of another length")
    return np.frombuffer(found, np.uint64)
