"""One tree of a round: the rows that it is fitted to, their gradients, and what it adds to them."""

from typing import TYPE_CHECKING

import numpy as np

from fedgft.engine.threads import share_work
from fedgft.engine.trees import kernels
from fedgft.engine.trees.grow import Grower, Grown

if TYPE_CHECKING:
    from fedgft.engine.trees.boosting import BoostingLoop, BoostingState

FINE_PRICES = 2.0**20


class TreeFit:
    """One tree of a round: its rows and gradients."""

    def __init__(self, loop: "BoostingLoop", run: int, model: int, output: int, t: int) -> None:
        self.loop = loop
        self.run = run
        self.output = output
        rows = loop.rows
        low, test, high = rows.ranges[run].tolist()
        end = high if model == 0 else test  # models of folds do not see the test rows
        self.training = slice(low, test)
        self.shift = int(loop.shift[run, model])
        self.order = np.empty(end - low, np.int32)
        fold = rows.folds[rows.fold_starts[run] + low :]
        draws = rows.draws(run, t)
        share = float(loop.model.subsample)
        self.ends = kernels.list_rows(
            low, test, test, end, fold, model - 1, draws, share, self.order
        )

    def grow(
        self, grower: Grower, state: "BoostingState", weight: np.ndarray, price: np.ndarray
    ) -> Grown:
        """Grow the tree, and add its leaves to the margins."""
        loop = self.loop
        most = loop.rows.training_weight[self.training].max(initial=0.0)
        scale = np.array(choose_scale(weight, price)) * _round_up(most)
        grown = grower.grow(
            int(loop.rows.federation[self.run]),
            shift=-self.training.start,
            packed=self._pack(state.p, weight, price, scale),
            order=self.order,
            ends=self.ends,
            scale=scale,
        )
        leaves = grown.leaves
        values = loop.lr[self.run] * grown.value[leaves]
        flat = state.margins.reshape(-1)
        first = self.shift * loop.outputs + self.output

        def add(begin: int, end: int) -> None:
            kernels.add_leaves(begin, end, grown.tree, leaves, values, flat, first, loop.outputs)

        rows = grown.tree.rows[leaves]
        share_work(add, rows[:, 1] - rows[:, 0] + rows[:, 3] - rows[:, 2], grower.threads)
        return grown

    def _pack(
        self, p: np.ndarray, weight: np.ndarray, price: np.ndarray, scale: np.ndarray
    ) -> np.ndarray:
        """Return the gradients of the training rows, packed."""
        rows = self.loop.rows
        at = self.training
        size = at.stop - at.start
        packed = np.empty(size, np.int64)
        client = rows.client if max(len(weight), len(price)) > 1 else rows.no_client
        columns = (rows.label[at], rows.cell[at], client[at], rows.training_weight[at])
        tables = match_tables(weight, price)
        scores = p[self.shift + at.start : self.shift + at.stop]
        pieces = np.linspace(0, size, 5).astype(np.int64)

        def pack(begin: int, end: int) -> None:
            part = (pieces[begin], pieces[end])
            kernels.pack_gradients(*part, scores, columns, *tables, self.output, scale, packed)

        threads = self.loop.growers[0].threads
        share_work(pack, np.diff(pieces), threads)
        return packed


def log_shares(count: np.ndarray) -> np.ndarray:
    """Return the logits, (r, outputs), that give the shares of the classes in counts (r, c)."""
    share = (count + 0.5) / (count + 0.5).sum(-1, keepdims=True)
    logs = np.log(share)
    return logs[:, 1:] - logs[:, :1] if logs.shape[1] == 2 else logs - logs.mean(-1)[:, None]


def choose_scale(weight: np.ndarray, price: np.ndarray) -> tuple[float, float]:
    """Return powers of two, so that gradients and hessians are whole multiples within `BITS`.

    They follow from weights and prices, which the server knows, not from rows.
    """
    spread = float(np.ptp(price, axis=-1).max())
    most_h = max(float(weight.max()) / 4, 1e-12)
    most_g = float(weight.max()) + spread / 4
    return tuple(2.0 ** (np.ceil(np.log2(most)) - kernels.BITS) for most in (most_g, most_h))


def _round_up(most: float) -> float:
    """Return the power of two that is at least the largest weight of a row; 1 without weights."""
    return 2.0 ** np.ceil(np.log2(most)) if most > 0 else 1.0


def match_tables(weight: np.ndarray, price: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both tables with as many clients as the longer one."""
    clients = max(len(weight), len(price))
    tables = (np.broadcast_to(x, (clients, *x.shape[1:])) for x in (weight, price))
    first, second = map(np.ascontiguousarray, tables)
    return first, second


def round_prices(price: np.ndarray) -> np.ndarray:
    """Return prices as multiples of 1 / FINE_PRICES, so that rounding errors do not reach trees."""
    return np.rint(price * FINE_PRICES) / FINE_PRICES
