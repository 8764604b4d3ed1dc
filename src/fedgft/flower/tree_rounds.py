"""The server's side of boosting: `FedXgbBagging` and `FedXgbCyclic` inside a `FairStrategy`.

A reply holds the trees that a client grew in this round, and nothing else. The server reads them
into a `Booster` of numbers that it has checked, limits their leaves, and hands them to the wrapped
strategy as it expects them:

    FedXgbBagging     the leaves are multiplied by the client's share of the round's weight (its
                      rows, unless it is limited), and the strategy appends all trees
    FedXgbCyclic      one client per round; the strategy gets the whole booster with its new trees

Flower's own examples leave out the factor, so that K clients move the logits K times as far.
"""

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, Message
from flwr.serverapp import strategy as flower

from fedgft.errors import FedgftError
from fedgft.flower.boosters import (
    ARRAY,
    MAX_NEW_TREES,
    Booster,
    base_rate,
    boosting_rate,
    is_booster,
    largest_leaf,
    left_to_do,
    scale_leaves,
)
from fedgft.flower.messages import Replies, check_metrics
from fedgft.metrics.robust_aggregation import TOLERANCE, norm_limit
from fedgft.settings import SETTINGS, TREE_KEYS, check_run_config
from fedgft.sums import Sums

BOOSTING = (flower.FedXgbBagging, flower.FedXgbCyclic)
BAGGING_CAUTION = 0.6
"""The caution of the controller. It is larger than that of a booster in the simulator, because a
deployed run has tens of rounds with a large learning rate instead of hundreds with a small one."""


class TreeRounds:
    """Checks, limits and weighs the trees of each round.

    Parameters
    ----------
    strategy
        A strategy of `BOOSTING`.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.config: Mapping[str, Any] = {}
        self.sent = Booster(())
        self._new: dict[int, Booster] = {}  # node -> its trees of this round

    @property
    def is_cyclic(self) -> bool:
        """Whether one client trains per round."""
        return isinstance(self.strategy, flower.FedXgbCyclic)

    @property
    def speed(self) -> float:
        """How far a round moves the logits, as a share of what is left to do."""
        return 1.0 - self.repeat

    @property
    def repeat(self) -> float:
        """The share of its last move that a round repeats while prices stay as they are."""
        return left_to_do(self.config)

    def begin(self, arrays: ArrayRecord, config: Mapping[str, Any]) -> None:
        """Check the initial booster and the settings of a run."""
        if not is_booster(arrays) or tuple(arrays[ARRAY].shape) == (0,):
            text = "must be a booster; fedgft.flower.empty_booster makes one without trees"
            raise FedgftError(text, field="initial_arrays")
        self.config = config
        check_run_config(config, TREE_KEYS)
        if boosting_rate(config)[0] > 1:
            raise FedgftError("must be at most 1 in boosting", field="lr")
        Booster.from_arrays(arrays, source="`initial_arrays`")

    def with_base(self, arrays: ArrayRecord, total: Sums | None) -> ArrayRecord:
        """Return a booster without trees with the base that the sums of all clients give."""
        booster = Booster.from_arrays(arrays, source="`initial_arrays`")
        if booster.trees or total is None:
            return arrays
        return Booster(booster.levels, base_rate(total.count)).to_arrays()

    def start_round(self, arrays: ArrayRecord) -> None:
        """Remember the booster that this round sends."""
        self.sent = Booster.from_arrays(arrays, source="the global model")
        self._new = {}

    def check_reply(self, reply: Message, *, weighted_by: str) -> None:
        """Raise a `FedgftError` unless a reply holds a few valid trees and valid metrics."""
        models = list(reply.content.array_records.values())
        if len(models) != 1:
            raise FedgftError(f"its reply must hold one ArrayRecord, not {len(models)}")
        check_metrics(reply, weighted_by=weighted_by)
        depth = self.config.get("max-depth", SETTINGS["max_depth"].default)
        most = int(self.config.get("local-trees", MAX_NEW_TREES))
        terms = {"levels": self.sent.levels, "max_trees": most, "max_depth": int(depth)}
        found = Booster.from_arrays(models[0], source="its model", **terms)
        if not found.trees:
            raise FedgftError("its model has no new trees", kind="data")
        self._new[reply.metadata.src_node_id] = found

    def limit_leaves(self, replies: Replies, ratio: float, warn_once: Any) -> None:
        """Shorten the leaves of trees that move logits much farther than the other clients'."""
        moves = {node: largest_leaf(self._new[node].trees) for node in replies.good}
        limit = norm_limit(list(moves.values()), ratio)
        for node, move in moves.items():
            if move > limit * (1 + TOLERANCE):
                new = self._new[node]
                trees = scale_leaves(new.trees, limit / move)
                self._new[node] = Booster(new.levels, new.base, trees, new.rounds)
                problem = "sends trees with much larger leaves than the others, which are shortened"
                warn_once(node, problem, f"{move:.3g}, of which {limit:.3g} are taken")

    def put_trees(self, replies: Replies, weights: Mapping[int, float]) -> None:
        """Replace the model in each reply by what the strategy expects; see the top of the file.

        `weights` are those of the clients in the average, by node.
        """
        total = sum(weights[node] for node in replies.good)
        for node, reply in replies.good.items():
            trees = self._new[node].trees
            if not self.is_cyclic:
                share = weights[node] / total if total > 0 else 1.0 / len(replies.good)
                trees = scale_leaves(trees, share)
            (key,) = reply.content.array_records
            if self.is_cyclic:
                reply.content[key] = self.sent.grown(trees).to_arrays()
                continue
            new = Booster(self.sent.levels, self.sent.base).grown(trees)
            reply.content[key] = new.to_arrays(parallel=len(trees))

    def repack(self, arrays: ArrayRecord | None) -> ArrayRecord | None:
        """Return the strategy's new model as short as possible; Flower's JSON has spaces."""
        if arrays is None:
            return None
        return Booster.from_arrays(
            arrays, source="the strategy's model", levels=self.sent.levels
        ).to_arrays()
