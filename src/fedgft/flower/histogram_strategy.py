"""The server's side of exact boosting: it asks all sites for sums by bin, and grows the trees.

A round asks for the sums of decisions, as for every model, and then once per level of the tree for
histograms. A site whose reply is missing or cannot be true is left out, and the tree is grown again
from its root without that site.
"""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, astuple, dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fedgft.algorithms.controller import ControllerState, boosting_loop
from fedgft.engine.trees import kernels
from fedgft.engine.trees.bins import Bins
from fedgft.engine.trees.fit import choose_scale, log_shares, round_prices
from fedgft.engine.trees.grow import Grower, Growth
from fedgft.engine.trees.kernels import G, H
from fedgft.errors import FedgftError
from fedgft.flower.histogram_trees import (
    FOREST,
    HISTOGRAMS,
    ArrayReader,
    Cells,
    bins_to_arrays,
    check_exact,
    compress_forest,
    make_arrays,
    pack_forest,
    read_forest,
)
from fedgft.flower.messages import Replies, make_query, make_request
from fedgft.flower.strategy import FairStrategy, FedGFT, MeasuredStrategy
from fedgft.forest import BY_NODE, WORD, Forest
from fedgft.models import Trees
from fedgft.settings import HISTOGRAM_KEYS, MAX_COUNT, SETTINGS, check_run_config

FOREST_LR = 0.1
"The learning rate where a run gives none."
MOST_G, MOST_H = 2**kernels.BITS, 2 ** (kernels.BITS + 1)  # of one row


def read_options(config: Mapping[str, Any]) -> Trees:
    """Return the trees that the configuration of a run describes."""
    check_run_config(config, HISTOGRAM_KEYS)
    names = [key.replace("-", "_") for key in HISTOGRAM_KEYS if key != "lr"]
    values = {name: config.get(name.replace("_", "-"), SETTINGS[name].default) for name in names}
    return Trees(**{name: SETTINGS[name].kind(value) for name, value in values.items()}, folds=0)


class SitesLeftOut(Exception):
    """Some sites cannot take part in a tree; `nodes` are those that can."""

    def __init__(self, nodes: list[int], reason: str) -> None:
        super().__init__(reason)
        self.nodes = nodes


@dataclass(eq=False, repr=False)
class GrowsTrees(FairStrategy):
    """Lets a strategy grow trees from the sums of all sites, instead of averaging models.

    Parameters
    ----------
    cells
        The cells in which sites count their values before the bins are agreed on.
    strategy
        `FedAvg`; nothing is averaged.
    metric, checkpoint, ...
        As in `FairStrategy` and `StatisticsOptions`; `channel` must be "query".
    """

    _: KW_ONLY
    cells: Cells

    grows = True

    def __post_init__(self) -> None:
        check_exact(self.budget, secure=self.secure)
        if self.channel != "query":
            text = "must be query for model trees: its sums travel in messages of their own"
            raise FedgftError(text, field="channel", kind="conflict")
        super().__post_init__()
        if type(self.strategy) is not FedAvg:
            text = "does not apply to model trees, which averages nothing: leave it out"
            raise FedgftError(text, field="strategy", kind="conflict")
        self.model = Trees(folds=0)
        self.lr = FOREST_LR
        self._bins: Bins | None = None
        self._grown: ArrayRecord | None = None
        self._refusing: set[int] = set()  # nodes that do not take part in trees

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        *others: Any,
        **more: Any,
    ) -> Result:
        """Grow a tree per round; continue from the checkpoint if there is one."""
        config: Mapping[str, Any] = train_config or {}
        self.model = read_options(config)
        self.lr = float(config.get("lr", FOREST_LR))
        if self.lr > 1:
            raise FedgftError("must be at most 1 in boosting", field="lr")
        self.aggregator.speed = self.lr
        if isinstance(self.state.penalty, ControllerState):
            self.state.penalty = self.state.penalty._replace(loop=astuple(boosting_loop(self.lr)))
        arguments = (initial_arrays, num_rounds, timeout, train_config)
        return super().start(grid, *arguments, *others, **more)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for sums and grow a tree in messages of its own; there are none for training."""
        self._config = config
        nodes = sorted(grid.get_node_ids())
        if self._bins is None:
            self._bins, labels = self._agree_on_bins(grid, nodes)
            arrays = self._with_base(arrays, labels)
        self._sent = arrays
        self._query(grid, arrays, nodes)
        self._grown = None
        self._failure = "no site sent sums"
        nodes = [node for node in self.aggregator.client_sums if node not in self._refusing]
        while nodes and self._grown is None:
            try:
                self._grown = self._grow(grid, arrays, nodes)
            except SitesLeftOut as error:
                nodes, self._failure = error.nodes, str(error)
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model with the new trees."""
        self._count_round(self._grown, self._failure)
        self._save_checkpoint(self._grown or self._sent)
        return self._grown, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: the sums describe the model already."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return nothing."""
        return None

    def ask(
        self,
        grid: Grid,
        arrays: Mapping[str, np.ndarray],
        more: Mapping[str, Any],
        nodes: list[int],
    ) -> Replies:
        """Ask nodes for counts or histograms; `more` is what the request says beside its arrays."""
        number = self.state.rounds_done + 1
        config = ConfigRecord({**self._config, "server-round": number})
        request = make_request(None, self.state.names, statistics="none", privacy={}) | {**more}
        content = make_arrays(arrays)
        kind = f"query.{HISTOGRAMS}"
        messages = [make_query(content, config, request, node, kind) for node in nodes]
        return Replies.of(grid.send_and_receive(messages, timeout=self._timeout))

    def _agree_on_bins(self, grid: Grid, nodes: list[int]) -> tuple[Bins, np.ndarray]:
        """Return the bins, and the rows of all sites by label."""
        replies = self.ask(grid, self.cells.to_arrays(), {"stage": "count"}, nodes)
        self._refusing = {reply.metadata.src_node_id for reply in replies.errors}
        found = []
        for node, reply in sorted(replies.good.items()):
            try:
                found.append(self._read_counts(ArrayReader(reply.content, "it")))
            except FedgftError as error:
                replies.refuse(node, str(error), self.aggregator.validator.describe(node))
        if not found:
            raise FedgftError(f"no site counted its values: {replies.explain()}", kind="data")
        if len({len(labels) for _, labels in found}) > 1:
            raise FedgftError("the sites have different numbers of classes", kind="data")
        cells, labels = (np.sum(each, axis=0) for each in zip(*found, strict=True))
        limits = {"most": self.model.bins, "least_rows": self.model.min_bin_rows}
        return self.cells.place_bins(cells, **limits), labels

    def _read_counts(self, reader: ArrayReader) -> tuple[np.ndarray, np.ndarray]:
        """Return a site's rows by cell and by label; raise unless there can be such rows."""
        offsets = self.cells.offsets
        classes = None if self.state.names is None else len(self.state.names.classes)
        labels = reader.take("labels", np.int64, (classes,))
        cells = reader.take("cells", np.int64, (int(offsets[-1]),))
        most = int(labels.clip(0, MAX_COUNT).sum())
        fits = all(((part >= 0) & (part <= MAX_COUNT)).all() for part in (labels, cells))
        if not fits or (np.add.reduceat(cells, offsets[:-1]) > most).any():
            reader.fail("counts that no rows can have")
        return cells, labels

    def _with_base(self, arrays: ArrayRecord, labels: np.ndarray) -> ArrayRecord:
        """Return a model without trees with the base that the counts give; others unchanged."""
        forest = read_forest(arrays, self.cells.levels, len(labels))
        if self.state.rounds_done or len(forest):
            return arrays
        base = log_shares(labels[None].astype(np.float64))[0]
        return pack_forest(Forest(**{**vars(forest), "base": base}))

    def _grow(self, grid: Grid, arrays: ArrayRecord, nodes: list[int]) -> ArrayRecord:
        """Return the model with the trees of a round, grown from the rows of these nodes."""
        names, bins = self.state.names, self._bins
        assert names is not None and bins is not None
        classes = len(names.classes)
        forest = read_forest(arrays, self.cells.levels, classes)
        words = -(-max(self.cells.levels) // WORD)
        price = np.zeros(names.shape) if self.aggregator.price is None else self.aggregator.price
        price = round_prices(price)
        sent = {FOREST: compress_forest(forest), **bins_to_arrays(bins)}
        trees = []
        for output in range(len(forest.base)):
            more = {"stage": "sum", "output": output, "price": price.ravel().tolist()}
            exchange = Exchange(self, grid, sent, more, nodes, bins)
            grown = RemoteGrower(bins, self.model, exchange).grow_tree(price)
            trees.append(grown.to_nodes(bins, forest.categorical, words=words, lr=self.lr))
        return pack_forest(append_trees(forest, trees))


@dataclass(eq=False, repr=False)
class GrowingFedGFT(GrowsTrees, FedGFT):
    """`FedGFT` for trees that all sites grow together; parameters as in both bases."""


@dataclass(eq=False, repr=False)
class MeasuredTrees(GrowsTrees, MeasuredStrategy):
    """Trees that all sites grow together without prices; their gap is measured."""


def append_trees(forest: Forest, trees: list[dict[str, np.ndarray]]) -> Forest:
    """Return a forest with one more tree per output."""
    names = (*BY_NODE, "categories")
    new = {name: np.stack([tree[name] for tree in trees]) for name in names}
    parts = {}
    for name in names:
        old = getattr(forest, name)
        shape = np.maximum(old.shape[1:], new[name].shape[1:])
        fill = -1 if name == "feature" else 0
        both = [
            np.pad(
                each,
                [
                    (0, 0),
                    *((0, full - own) for full, own in zip(shape, each.shape[1:], strict=True)),
                ],
                constant_values=fill,
            )
            for each in (old, new[name])
        ]
        parts[name] = np.concatenate(both)
    output = np.concatenate((forest.output, np.arange(len(trees), dtype=np.int32)))
    whole = Forest(**parts, categorical=forest.categorical, output=output, base=forest.base)
    return whole.trimmed()


# One tree


class RemoteGrower(Grower):
    """Grows a tree whose rows are at other places; see `Grower`.

    Parameters
    ----------
    bins
        The bins.
    model
        What decides about splits.
    exchange
        Asks the sites for histograms.
    """

    def __init__(self, bins: Bins, model: Trees, exchange: "Exchange") -> None:
        width = len(bins.sizes)
        is_set = np.array([len(levels) > 0 for levels in bins.level_bins])
        nothing = (np.empty((0, width), np.uint16), np.empty((width, 0), np.uint8))
        super().__init__(kernels.Columns(*nothing, bins.offsets[None], is_set), model)
        self.exchange = exchange

    def grow_tree(self, price: np.ndarray) -> Any:
        """Grow a tree with these prices, (classes, groups + 1, classes)."""
        price = price.reshape(1, -1, price.shape[-1])
        scale = np.array(choose_scale(np.ones(price.shape[:2]), price))
        rows = {"packed": np.empty(0, np.int64), "order": np.empty(0, np.int32)}
        return self.grow(0, shift=0, **rows, ends=(0, 0), scale=scale)

    def _split(self, tree: kernels.Tree, offsets: np.ndarray) -> int:
        return _RemoteGrowth(self, tree, offsets).run()


class _RemoteGrowth(Growth):
    """Level by level, with histograms that the sites send."""

    def _sum(self, pairs: np.ndarray) -> None:
        exchange = self.grower.exchange  # pyrefly: ignore
        sums = exchange.ask(self.tree, self.used, pairs)
        self.tree.histograms[self.tree.slot[pairs[:, 0]]] = sums

    def _sizes(self) -> np.ndarray:
        return self.tree.sums[:, H]


class Exchange:
    """The messages of one tree: asks sites for histograms, checks them and adds them up.

    Parameters
    ----------
    strategy, grid
        What asks, and through what.
    arrays, more
        What every message of the tree holds.
    nodes
        The nodes whose rows the tree is grown from.
    bins
        The bins.
    """

    def __init__(
        self,
        strategy: GrowsTrees,
        grid: Grid,
        arrays: Mapping[str, np.ndarray],
        more: Mapping[str, Any],
        nodes: list[int],
        bins: Bins,
    ) -> None:
        self.strategy = strategy
        self.grid = grid
        self.arrays = arrays
        self.more = more
        self.nodes = nodes
        self.starts = bins.offsets[:-1]
        self.bins = int(bins.offsets[-1])
        self.held: dict[int, dict[int, np.ndarray]] = {node: {} for node in nodes}

    def ask(self, tree: kernels.Tree, used: int, pairs: np.ndarray) -> np.ndarray:
        """Return the histograms of the first node of each pair, (pairs, bins, 2).

        Parameters
        ----------
        tree, used
            The tree, and the number of its nodes so far.
        pairs
            A node and its sibling each; -1: no sibling.
        """
        splits = {
            "feature": tree.feature[:used],
            "left": tree.left[:used],
            "goes-left": np.packbits(tree.goes_left[:used], axis=1),
            "nodes": pairs[:, 0],
        }
        replies = self.strategy.ask(self.grid, {**self.arrays, **splits}, self.more, self.nodes)
        total = np.zeros((len(pairs), self.bins, 2), np.int64)
        validator = self.strategy.aggregator.validator
        for node, reply in sorted(replies.good.items()):
            try:
                reader = ArrayReader(reply.content, "it")
                found = reader.take("histograms", np.int64, total.shape)
                self._check(reader, found, int(validator.declared_rows(node) or 0))
                self._compare_with_parents(reader, node, found, tree.slot[pairs], pairs[:, 1] >= 0)
                total += found
            except FedgftError as error:
                replies.refuse(node, str(error), validator.describe(node))
        kept = sorted(set(self.nodes) & set(replies.good))
        if kept != sorted(self.nodes):
            raise SitesLeftOut(kept, replies.explain())
        return total

    def _check(self, reader: ArrayReader, found: np.ndarray, rows: int) -> None:
        """Raise unless a site with so many rows can have these histograms."""
        rows = min(rows, MAX_COUNT)
        if (found[..., H] < 0).any() or (found[..., H] > rows * MOST_H).any():
            reader.fail("sums of hessians that its rows cannot have")
        most = MOST_G * found[..., H].clip(0, rows)
        if ((found[..., G] > most) | (found[..., G] < -most)).any():
            reader.fail("sums of gradients that its rows cannot have")
        by_column = np.add.reduceat(found, self.starts, axis=1)
        weights = by_column[:, 0, H]
        if (weights > rows * MOST_H).any() or weights.sum() > rows * MOST_H:
            reader.fail("sums of hessians that its rows cannot have")
        if (by_column != by_column[:, :1]).any():
            reader.fail("sums that differ between columns")

    def _compare_with_parents(
        self,
        reader: ArrayReader,
        node: int,
        found: np.ndarray,
        slots: np.ndarray,
        has_sibling: np.ndarray,
    ) -> None:
        """Raise unless parent less node, the sums of the sibling, can be those of rows."""
        held = self.held[node]
        for sums, (slot, other), is_pair in zip(found, slots, has_sibling, strict=True):
            held[int(slot)] = sums
            if is_pair:
                rest = held[int(other)] = held[int(other)] - sums
                if (rest[:, H] < 0).any() or (np.abs(rest[:, G]) > MOST_G * rest[:, H]).any():
                    reader.fail("sums of a node that are more than those of its parent")
