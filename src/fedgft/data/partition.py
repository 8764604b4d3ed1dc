"""Cutting a data set into a federation: test rows first, then the clients.

Test rows are those that the data set defines, or a random share of all rows: the first rows of a
shuffle with its own random stream, so equal seeds give equal test rows whatever the other settings
are. Where a column names the clients, the last row of each client in the shuffle is never a test
row, so that no client loses all its training rows. A deployed site decides row by row instead
(`hold_out_by_row`).

A partition assigns each row to a client. For a cell of rows (one group, one label) the clients'
shares are drawn from Dirichlet(alpha, ..., alpha), and the shuffled rows of the cell are cut at the
running sums of the shares: the counts are those of the shares, without a second layer of sampling
noise. "dirichlet-group" draws the shares for each group instead and rounds the counts by largest
remainders, so that the label is independent of the client given the group; "dirichlet-label" does
so for each label. "hetero" has no alpha: client k draws one number gamma_k ~ U[0.2, 0.8], and the
cell of group i and label j is divided in proportion to

    gamma_k  if i mod m = j mod m,   1 - gamma_k  otherwise,   m = min(groups, classes),

rounded by largest remainders. With two groups and two classes, as in FedFACT, m = 2, and the first
case is i = j: clients differ in how group and label go together. Rows without a recorded group are
divided evenly.

Every row goes to exactly one client, and no client is left empty. With a client column, each name
in the column is a client in every replicate, even if it has no training rows.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from fedgft.data.dataset import Dataset, Federation
from fedgft.errors import FedgftError
from fedgft.formatting import format_count
from fedgft.settings import check_setting
from fedgft.validation import check_choice, check_instance, check_integer, check_number

PartitionKind = Literal[
    "dirichlet", "dirichlet-group", "dirichlet-label", "hetero", "iid", "pure", "column"
]
TestRows = Literal["overlap", "disjoint"]
Rng = np.random.Generator
KINDS: tuple[PartitionKind, ...] = get_args(PartitionKind)
KINDS_WITH_ALPHA: tuple[PartitionKind, ...] = (
    "dirichlet",
    "dirichlet-group",
    "dirichlet-label",
    "pure",
)
# Numbers of the random streams, one per purpose.
TEST_STREAM = 0
PARTITION_STREAM = 1
INNER_STREAM = 2
TRAIN_ROWS_STREAM = 3
TEST_ROWS_STREAM = 4
INJECTED_BIAS_STREAM = 6
GAMMA_BOUNDS = (0.2, 0.8)  # of a client's number in "hetero", as in FedFACT
MIN_ROWS_TO_SPLIT = 4  # a client with fewer rows holds none of them out
MAX_ALPHA = 1e9  # beyond it, all shares are equal in floating point, and the draw would overflow


def make_rng(seed: int, number: int) -> np.random.Generator:
    """Return the random generator of a seed and a stream `number`; each purpose has a stream."""
    check_setting("seed", seed)
    return np.random.default_rng([seed, number])


def hold_out(dataset: Dataset, *, share: float | int, seed: int, keep_clients: bool) -> np.ndarray:
    """Return the test rows in ascending order: the data set's own, or a share at random.

    Parameters
    ----------
    dataset
        All rows.
    share
        Share of test rows, from 0 to below 1.
    seed
        Seed of the random numbers.
    keep_clients
        Leave every client of the client column at least one training row. The test rows
        change only if a client would otherwise be emptied, and their number stays the same as long
        as clients have a second row to give.
    """
    if dataset.test is not None:
        return np.flatnonzero(dataset.test)
    check_setting("test_share", share)
    if not share:
        return np.empty(0, np.int64)
    order = make_rng(seed, TEST_STREAM).permutation(len(dataset))
    count = round(share * len(dataset))
    if keep_clients and dataset.clients is not None:
        _, last = np.unique(dataset.clients[order][::-1], return_index=True)
        order = np.delete(order, len(order) - 1 - last)
    return np.sort(order[:count])


def hold_out_by_row(rows: Iterable[str], *, share: float, salt: bytes) -> np.ndarray:
    """Decide for each row by itself whether it is a test row.

    A row is a test row if a keyed hash of its text is below `share`. The n-th of several identical
    rows is hashed as (n, text). So the result depends on the multiset of rows only: their order
    makes no difference, and one row more or less changes the training rows by that one row or not
    at all.

    Parameters
    ----------
    rows
        The text of each row (`read_rows_as_text`).
    share
        Share of test rows, from 0 to below 1.
    salt
        32 secret bytes: without them, the text of a row does not reveal its side.

    Returns
    -------
    mask
        (n,) True for test rows.
    """
    check_setting("test_share", share)
    keyed = hashlib.blake2b(key=salt, digest_size=8)
    occurrences: Counter[str] = Counter()
    digests = bytearray()
    for text in rows:
        number = occurrences[text]
        occurrences[text] = number + 1
        digest = keyed.copy()
        digest.update(f"{number}:{text}".encode())
        digests += digest.digest()
    return np.frombuffer(bytes(digests), ">u8") < int(share * 2**64)


def partition(
    dataset: Dataset,
    kind: PartitionKind = "dirichlet",
    *,
    clients: int = 10,
    alpha: float | int = 0.5,
    seed: int = 0,
    test_share: float | int = 0.3,
    protocol_test: TestRows = "disjoint",
    train_rows: int | None = None,
    test_rows: int | None = None,
) -> Federation:
    """Cut a data set into test rows and clients.

    Parameters
    ----------
    dataset
        All rows.
    kind
        "dirichlet" (default): Dirichlet shares of every (group, label) cell, rows without a
        recorded group included; "dirichlet-group": Dirichlet shares of every group whatever the
        label, as in FairFed (Ezzeldin et al., AAAI 2023), with rows without a recorded group as one
        more group; "dirichlet-label": Dirichlet shares of every label whatever the group; "hetero":
        clients differ in how group and label go together, as in FedFACT (arXiv 2506.03777);
        "iid": equal random parts; "pure": one group per client; "column": the clients of the data
        set's client column, `keys` index its `client_names`.
    clients
        Number of clients (default: 10); "column" ignores it.
    alpha
        Dirichlet concentration: 0.5 (default) is heterogeneous, 100 nearly even; "hetero", "iid"
        and "column" ignore it.
    seed
        Seed of the draws of test rows and clients (default: 0).
    test_share
        Share of test rows, from 0 to below 1 (default: 0.3), if the data set does not define its
        own.
    protocol_test
        "disjoint" (default): clients get the other rows; "overlap" (the paper): clients get all
        rows.
    train_rows
        Number of training rows to draw at random; None (default): all.
    test_rows
        Number of test rows to draw at random; None (default): all.

    Returns
    -------
    Federation
        Every training row belongs to exactly one client, and no client is empty, except that a
        client of a client column may have test rows only. The features are not scaled, see
        `standardize`.

    Examples
    --------
    >>> import fedgft
    >>> data = fedgft.load("synthetic")
    >>> fedgft.partition(data, "dirichlet", clients=5, alpha=0.5, seed=1)
    Federation('synthetic', 5 clients, 14,000 training rows, 6,000 test rows)
    >>> fedgft.partition(data, "iid", clients=4, test_share=0).sizes
    array([5000, 5000, 5000, 5000])
    """
    check_instance("dataset", dataset, Dataset, "load one, or make a Dataset of arrays")
    check_choice("partition", kind, KINDS)
    check_choice("protocol_test", protocol_test, ("overlap", "disjoint"))
    disjoint = protocol_test == "disjoint"
    keep_clients = kind == "column" and disjoint
    test = hold_out(dataset, share=test_share, seed=seed, keep_clients=keep_clients)
    rows = np.delete(np.arange(len(dataset)), test if disjoint else [])
    rows = _draw("train_rows", rows, train_rows, make_rng(seed, TRAIN_ROWS_STREAM))
    test = _draw("test_rows", test, test_rows, make_rng(seed, TEST_ROWS_STREAM))
    if kind == "column":
        if dataset.clients is None:
            raise FedgftError(f"{dataset.name}: no client column is named (`client`)")
        if len(rows) == 0:
            raise FedgftError(f"{dataset.name}: no row is left to train on", kind="data")
        clients = len(dataset.client_names)  # includes clients whose rows are all test rows
        owner = dataset.clients[rows]
    else:
        check_setting("clients", clients)
        if clients > len(rows):
            raise FedgftError(
                f"`clients`: {clients:,} clients cannot share {format_count(len(rows), 'row')}"
            )
        rng = make_rng(seed, PARTITION_STREAM)
        rows = rng.permutation(rows)
        if kind == "iid":
            owner = np.arange(len(rows)) % clients
        elif kind == "pure":
            owner = _deal_groups(dataset, rows, clients, alpha=alpha, rng=rng)
        elif kind == "hetero":
            owner = _deal_by_agreement(dataset, rows, clients, rng=rng)
        elif kind in ("dirichlet-group", "dirichlet-label"):
            cells = (dataset.groups if kind == "dirichlet-group" else dataset.labels)[rows]
            owner = _deal(cells, clients, alpha=alpha, rng=rng, cut=_cut_by_remainders)
        else:
            cells = (dataset.groups[rows] + 1) * len(dataset.classes) + dataset.labels[rows]
            owner = _deal(cells, clients, alpha=alpha, rng=rng)
    order = np.lexsort((rows, owner))  # ascending within a client, for memory locality
    counts = np.bincount(owner, minlength=clients)
    return Federation(dataset, rows[order], np.concatenate(([0], np.cumsum(counts))), test)


def _deal_groups(
    dataset: Dataset, rows: np.ndarray, clients: int, *, alpha: float | int, rng: Rng
) -> np.ndarray:
    """Give every client one group only, and deal the labels of each group by Dirichlet shares.

    Groups take turns at getting a client, and no group gets more clients than it has rows.
    """
    found, group, counts = np.unique(dataset.groups[rows], return_inverse=True, return_counts=True)
    if clients < len(found):
        raise FedgftError(f"`clients`: {clients} cannot hold {len(found)} groups, one group each")
    group_of = _take_turns(counts, clients)
    owner = np.empty(len(rows), np.int64)
    for index in range(len(found)):
        members = np.flatnonzero(group == index)
        ids = np.flatnonzero(group_of == index)
        labels = dataset.labels[rows[members]]
        owner[members] = ids[_deal(labels, len(ids), alpha=alpha, rng=rng)]
    return owner


def _deal_by_agreement(dataset: Dataset, rows: np.ndarray, clients: int, *, rng: Rng) -> np.ndarray:
    """Divide each cell of group and label by the numbers of the clients, see "hetero" above."""
    gamma = rng.uniform(*GAMMA_BOUNDS, clients)
    groups = dataset.groups[rows]
    labels = dataset.labels[rows]
    period = max(1, min(len(dataset.group_names), len(dataset.classes)))
    agrees = groups % period == labels % period
    cells = np.where(groups < 0, -1, groups * len(dataset.classes) + labels)
    owner = np.empty(len(rows), np.int64)
    for cell in np.unique(cells):
        members = np.flatnonzero(cells == cell)
        weights = gamma if agrees[members[0]] else 1 - gamma
        weights = np.ones(clients) if cell < 0 else weights
        owner[members] = _cut_by_remainders(weights / weights.sum(), len(members))
    return _fill_empty_clients(owner, clients)


def _draw(name: str, rows: np.ndarray, count: int | None, rng: Rng) -> np.ndarray:
    """Return `count` of the rows at random, in their order; all of them for None."""
    if count is None:
        return rows
    check_integer(name, count)
    if not 1 <= count <= len(rows):
        raise FedgftError(f"`{name}` must lie between 1 and {len(rows):,}, all rows, not {count:,}")
    return np.sort(rng.permutation(rows)[:count])


def inner_split(federation: Federation, *, share: float = 0.25, seed: int) -> Federation:
    """Let every client hold out a share of its own rows, which become `test` of the result.

    The split serves to choose settings without looking at the real test rows. Clients and keys stay
    the same; the scaling is dropped, because it has to come from the remaining rows.
    """
    if not 0 < check_number("share", share, finite=False) < 1:
        raise FedgftError(f"the inner `share` must lie between 0 and 1, not {share:g}")
    sizes = federation.sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((make_rng(seed, INNER_STREAM).random(len(owner)), owner))
    held_out = np.where(sizes < MIN_ROWS_TO_SPLIT, 0, np.floor(share * sizes)).astype(np.int64)
    is_test = _rank_within_owner(order, sizes) < held_out[owner]
    offsets = np.concatenate(([0], np.cumsum(sizes - held_out)))
    rows = federation.rows[~is_test]
    test = np.sort(federation.rows[is_test])
    return replace(federation, rows=rows, offsets=offsets, test=test, mean=None, spread=None)


def _cut_by_running_sums(shares: np.ndarray, count: int) -> np.ndarray:
    """Return the owner of each of `count` rows: the rows are cut at the running sums of shares."""
    middle = (np.arange(count) + 0.5) / count
    return np.searchsorted(np.cumsum(shares)[:-1], middle)  # the last bound is 1 by definition


def _cut_by_remainders(shares: np.ndarray, count: int) -> np.ndarray:
    """Return the owner of each of `count` rows: shares rounded down, and largest remainders up."""
    wanted = shares * count
    counts = np.floor(wanted).astype(np.int64)
    counts[np.argsort(counts - wanted, kind="stable")[: count - counts.sum()]] += 1
    return np.repeat(np.arange(len(shares)), counts)


def _deal(
    cells: np.ndarray,
    clients: int,
    *,
    alpha: float | int,
    rng: Rng,
    cut: Callable[[np.ndarray, int], np.ndarray] = _cut_by_running_sums,
) -> np.ndarray:
    """Return the owner of each (already shuffled) row; `cells` numbers the cell of each."""
    check_setting("alpha", alpha)
    owner = np.empty(len(cells), np.int64)
    for cell in np.unique(cells):
        members = np.flatnonzero(cells == cell)
        shares = rng.dirichlet(np.full(clients, float(min(alpha, MAX_ALPHA))))
        owner[members] = cut(shares, len(members))
    return _fill_empty_clients(owner, clients)


def _fill_empty_clients(owner: np.ndarray, clients: int) -> np.ndarray:
    """Give every empty client one row, taken from the clients that hold most.

    The rank of a row is the number of rows that its owner holds before it. The highest ranks belong
    to the largest clients, and rank 0 is never taken, so no client is emptied.
    """
    counts = np.bincount(owner, minlength=clients)
    empty = np.flatnonzero(counts == 0)
    if len(empty) == 0:
        return owner
    rank = _rank_within_owner(np.argsort(owner, kind="stable"), counts)
    filled = owner.copy()
    filled[np.argsort(-rank, kind="stable")[: len(empty)]] = empty
    return filled


def _rank_within_owner(order: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the place of each row among those of its owner; `order` sorts the rows by owner."""
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank


def _take_turns(counts: np.ndarray, clients: int) -> np.ndarray:
    """Assign groups to clients in turn, skipping groups that have no row left to give."""
    places = np.minimum(counts, clients)
    group = np.repeat(np.arange(len(counts)), places)
    turn = _rank_within_owner(np.arange(len(group)), places)
    return group[np.lexsort((group, turn))][:clients]
