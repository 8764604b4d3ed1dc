"""Who holds which rows: cutting a data set into a federation.

A partition is an array `owner` with one client a row; the offsets are its counts. For a cell of
rows (one group, one label) the clients' shares are drawn from Dirichlet(alpha, ..., alpha), and
the shuffled rows of the cell are cut at the shares' running sums, so the counts are the shares'
own, without a second layer of sampling noise. Every row goes to exactly one client, and no client
is left empty. Test rows come first (`fedgft.data.holdout`). With a client column the clients are
given: each of its names is a client in every replicate, if need be one without training rows.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from fedgft.arguments import instance, real_number, whole_number
from fedgft.data.dataset import Dataset, Federation
from fedgft.data.holdout import drawn, held_out, held_out_of_clients, stream
from fedgft.errors import FedgftError

Kind = Literal["dirichlet", "iid", "pure", "column"]
TestRows = Literal["overlap", "disjoint"]
KINDS: tuple[Kind, ...] = ("dirichlet", "iid", "pure", "column")
CUT, INNER = 1, 2  # streams of random numbers; the test rows have 0
SMALLEST = 4  # a client with fewer rows holds none of them out
EQUAL = 1e9  # a larger alpha gives equal shares to all digits, and would overflow the draw


def partition(
    dataset: Dataset,
    kind: Kind = "dirichlet",
    *,
    clients: int = 10,
    alpha: float | int = 0.5,
    seed: int = 0,
    test_share: float | int = 0.3,
    protocol_test: TestRows = "disjoint",
    train_rows: int | None = None,
    test_rows: int | None = None,
) -> Federation:
    """Test rows first, then the clients: from the other rows, or (the paper) from all of them.

    Test rows that the data set brings itself are taken as they are. Random ones are the same for
    one seed whatever else differs, but of a column's clients none gives its last training row.
    `train_rows` and `test_rows`: of either, so many at random and no more.
    """
    instance("dataset", dataset, Dataset, "load one, or make a Dataset of arrays")
    whole_number("clients", clients)
    whole_number("seed", seed)
    alpha = real_number("alpha", alpha, finite=False)
    real_number("test_share", test_share, finite=False)
    for name, rows_wanted in (("train_rows", train_rows), ("test_rows", test_rows)):
        if rows_wanted is not None:
            whole_number(name, rows_wanted)
    if not isinstance(kind, str) or kind not in KINDS:
        raise FedgftError(f"--partition: '{kind}' is none of {', '.join(KINDS)}")
    if not isinstance(protocol_test, str) or protocol_test not in ("overlap", "disjoint"):
        raise FedgftError(f"test rows are 'overlap' or 'disjoint', not '{protocol_test}'")
    disjoint = protocol_test == "disjoint"
    draw = held_out_of_clients if kind == "column" and disjoint else held_out
    test = draw(dataset, share=test_share, seed=seed)
    rows = np.delete(np.arange(len(dataset)), test if disjoint else [])
    rows = drawn(rows, train_rows, seed=seed, what="train")
    test = drawn(test, test_rows, seed=seed, what="test")
    if kind == "column":
        return by_column(dataset, rows=rows, test=test)
    if kind == "iid":
        return iid(dataset, clients=clients, seed=seed, rows=rows, test=test)
    cut = pure if kind == "pure" else dirichlet
    return cut(dataset, clients=clients, alpha=alpha, seed=seed, rows=rows, test=test)


def dirichlet(
    dataset: Dataset,
    *,
    clients: int,
    alpha: float | int,
    seed: int,
    rows: np.ndarray | None = None,
    test: np.ndarray | None = None,
) -> Federation:
    """Dirichlet shares of every (group, label) cell; rows of no recorded group are cells too."""
    rng = stream(seed, CUT)
    rows = rng.permutation(_all(dataset, rows))
    _check(clients, alpha=alpha, rows=len(rows))
    owner = _deal(_cells(dataset, rows), clients, alpha=alpha, rng=rng)
    return _federation(dataset, rows, owner=owner, clients=clients, test=test)


def iid(
    dataset: Dataset,
    *,
    clients: int,
    seed: int,
    rows: np.ndarray | None = None,
    test: np.ndarray | None = None,
) -> Federation:
    """Shuffled rows in equal shares: every client is a small copy of the whole."""
    rows = stream(seed, CUT).permutation(_all(dataset, rows))
    _check(clients, alpha=1.0, rows=len(rows))
    owner = np.arange(len(rows)) % clients
    return _federation(dataset, rows, owner=owner, clients=clients, test=test)


def pure(
    dataset: Dataset,
    *,
    clients: int,
    alpha: float | int,
    seed: int,
    rows: np.ndarray | None = None,
    test: np.ndarray | None = None,
) -> Federation:
    """Every client holds one group only; within a group the labels are dealt by Dirichlet.

    Clients are given to the groups in turn, and a group never gets more clients than it has rows.
    """
    rng = stream(seed, CUT)
    rows = rng.permutation(_all(dataset, rows))
    _check(clients, alpha=alpha, rows=len(rows))
    found, group, counts = np.unique(dataset.groups[rows], return_inverse=True, return_counts=True)
    if clients < len(found):
        raise FedgftError(f"--clients: {clients} cannot hold {len(found)} groups, one group each")
    group_of = _turns(counts, clients)
    owner = np.empty(len(rows), np.int64)
    for index in range(len(found)):
        mine = np.flatnonzero(group == index)
        ids = np.flatnonzero(group_of == index)
        owner[mine] = ids[_deal(dataset.labels[rows[mine]], len(ids), alpha=alpha, rng=rng)]
    return _federation(dataset, rows, owner=owner, clients=clients, test=test)


def by_column(
    dataset: Dataset, *, rows: np.ndarray | None = None, test: np.ndarray | None = None
) -> Federation:
    """The clients of the data set's own client column; `keys` index its client_names.

    A client whose rows are all test rows stays, with no row to train on.
    """
    if dataset.clients is None:
        raise FedgftError(f"{dataset.name}: no client column is named (--client)")
    rows = _all(dataset, rows)
    if len(rows) == 0:
        raise FedgftError(f"{dataset.name}: no row is left to train on")
    owner, clients = dataset.clients[rows], len(dataset.client_names)
    return _federation(dataset, rows, owner=owner, clients=clients, test=test)


def inner_split(federation: Federation, *, share: float = 0.25, seed: int) -> Federation:
    """Every client holds out a share of its own rows: the `test` of the federation returned.

    For choosing settings without a look at the real test rows. Same clients, same keys; the
    scaling is forgotten, because it has to come from the rows that are left.
    """
    if not 0 < real_number("share", share, finite=False) < 1:
        raise FedgftError(f"the inner share must lie between 0 and 1, not {share:g}")
    sizes = federation.sizes
    owner = np.repeat(np.arange(len(sizes)), sizes)
    order = np.lexsort((stream(seed, INNER).random(len(owner)), owner))
    rank = np.empty(len(owner), np.int64)
    rank[order] = np.arange(len(owner)) - np.repeat(federation.offsets[:-1], sizes)
    held = np.where(sizes < SMALLEST, 0, np.floor(share * sizes)).astype(np.int64)
    out = rank < held[owner]
    offsets = np.concatenate(([0], np.cumsum(sizes - held)))
    return replace(
        federation,
        rows=federation.rows[~out],
        offsets=offsets.astype(np.int64),
        test=np.sort(federation.rows[out]),
        mean=None,
        spread=None,
    )


def _all(dataset: Dataset, rows: np.ndarray | None) -> np.ndarray:
    return np.arange(len(dataset)) if rows is None else np.asarray(rows)


def _check(clients: int, *, alpha: float | int, rows: int) -> None:
    if not (np.isfinite(alpha) and alpha > 0):
        raise FedgftError(f"--alpha must be a positive number, not {alpha:g}")
    if clients < 1:
        raise FedgftError(f"--clients must be at least 1, not {clients}")
    if clients > rows:
        raise FedgftError(f"--clients: {clients:,} clients cannot share {rows:,} row(s)")


def _cells(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """One number for (group, label); a group that is not recorded (-1) is one more group."""
    return (dataset.groups[rows] + 1) * len(dataset.classes) + dataset.labels[rows]


def _deal(
    cells: np.ndarray, clients: int, *, alpha: float | int, rng: np.random.Generator
) -> np.ndarray:
    """The owner of each (already shuffled) row."""
    owner = np.empty(len(cells), np.int64)
    for cell in np.unique(cells):
        mine = np.flatnonzero(cells == cell)
        bounds = np.cumsum(rng.dirichlet(np.full(clients, min(alpha, EQUAL))))
        middle = (np.arange(len(mine)) + 0.5) / len(mine)
        owner[mine] = np.searchsorted(bounds[:-1], middle)  # the last bound is one by name
    return _nobody_empty(owner, clients)


def _nobody_empty(owner: np.ndarray, clients: int) -> np.ndarray:
    """Give every empty client one row, taken from those that hold most.

    A row's rank is the number of rows its owner holds before it; the highest ranks belong to the
    largest clients, and rank 0 is never taken, so nobody is emptied to fill another.
    """
    counts = np.bincount(owner, minlength=clients)
    empty = np.flatnonzero(counts == 0)
    if len(empty) == 0:
        return owner
    order = np.argsort(owner, kind="stable")
    rank = np.empty(len(owner), np.int64)
    rank[order] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    given = np.argsort(-rank, kind="stable")[: len(empty)]
    filled = owner.copy()
    filled[given] = empty
    return filled


def _turns(counts: np.ndarray, clients: int) -> np.ndarray:
    """The group of each client: in turn, passing over groups that have no row left to give."""
    places = np.minimum(counts, clients)
    group = np.repeat(np.arange(len(counts)), places)
    turn = np.arange(len(group)) - np.repeat(np.cumsum(places) - places, places)
    return group[np.lexsort((group, turn))][:clients]


def _federation(
    dataset: Dataset,
    rows: np.ndarray,
    *,
    owner: np.ndarray,
    clients: int,
    test: np.ndarray | None,
) -> Federation:
    order = np.lexsort((rows, owner))  # ascending within a client: kinder to the memory
    counts = np.bincount(owner, minlength=clients)
    return Federation(
        dataset=dataset,
        rows=rows[order].astype(np.int32),
        offsets=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        test=(np.empty(0) if test is None else np.asarray(test)).astype(np.int32),
    )
