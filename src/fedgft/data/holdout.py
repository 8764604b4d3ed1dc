"""Which rows are test rows: the data set's own, or a share of all rows at random.

Random ones are the first rows of a shuffle with a stream of random numbers of its own, so two
draws with one seed agree whatever else differs. Where a client column fixes the clients, each
client's last row in the shuffle is passed over: a test row more is not worth a client less.

A deployed site draws row by row instead (`held_out_by_row`): there one row more or less must not
move any other row to the other side.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import numpy as np

from fedgft.data.dataset import Dataset
from fedgft.errors import FedgftError

TEST = 0  # the stream of the test rows


def held_out(dataset: Dataset, *, share: float | int, seed: int) -> np.ndarray:
    """The user's own test rows, or a share of all rows at random."""
    if dataset.test is not None:
        return np.flatnonzero(dataset.test)
    order, count = _shuffled(dataset, share=share, seed=seed)
    return np.sort(order[:count])


def held_out_of_clients(dataset: Dataset, *, share: float | int, seed: int) -> np.ndarray:
    """The same, but at random no client gives all its rows: one with a single row gives none.

    The rows are those of `held_out` unless a client would be emptied, and as many as long as
    the clients have a second row to give.
    """
    if dataset.test is not None or dataset.clients is None:
        return held_out(dataset, share=share, seed=seed)
    order, count = _shuffled(dataset, share=share, seed=seed)
    _, last = np.unique(dataset.clients[order][::-1], return_index=True)
    return np.sort(np.delete(order, len(order) - 1 - last)[:count])


def held_out_by_row(rows: Iterable[str], *, share: float, salt: bytes) -> np.ndarray:
    """Which rows are test rows, each by a coin of its own: True where a keyed hash of the row's
    text is below `share`.

    The n-th of several identical rows has the coin of (text, n). So the sides are those of a
    multiset: neither the order of the rows nor any other row matters, and a row more or less
    changes the training rows by that one row, or not at all. `salt` (32 secret bytes) keeps the
    sides from everybody who knows the text of a row.
    """
    if not 0 <= share < 1:
        raise FedgftError(f"test share {share:g}: must be at least 0 and below 1")
    keyed = hashlib.blake2b(key=salt, digest_size=8)
    seen: Counter[str] = Counter()
    coins = bytearray()
    for text in rows:
        number = seen[text]
        seen[text] = number + 1
        coin = keyed.copy()
        coin.update(f"{number}:{text}".encode())
        coins += coin.digest()
    return np.frombuffer(bytes(coins), ">u8") < int(share * 2**64)


def drawn(
    rows: np.ndarray, count: int | None, *, seed: int, what: Literal["train", "test"]
) -> np.ndarray:
    """So many of the rows, in their order; all of them where no number is given."""
    if count is None:
        return rows
    if not 1 <= count <= len(rows):
        raise FedgftError(
            f"--{what}-rows must lie between 1 and the {len(rows):,} there are, not {count:,}"
        )
    return np.sort(stream(seed, {"train": 3, "test": 4}[what]).permutation(rows)[:count])


def stream(seed: int, number: int) -> np.random.Generator:
    """The random numbers of one seed for one purpose."""
    if seed < 0:
        raise FedgftError(f"--seed must not be negative, not {seed}")
    return np.random.default_rng([seed, number])


def _shuffled(dataset: Dataset, *, share: float | int, seed: int) -> tuple[np.ndarray, int]:
    """All rows in random order, and how many of them are to be test rows."""
    if not 0 <= share < 1:
        raise FedgftError(f"--test-share must be at least 0 and below 1, not {share:g}")
    order = stream(seed, TEST).permutation(len(dataset))
    return order, round(share * len(dataset))
