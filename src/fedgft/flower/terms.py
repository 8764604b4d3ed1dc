"""How a strategy listens to its clients, and a few small things it needs for that."""

from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedgft.errors import FedgftError
from fedgft.flower.private import Budget
from fedgft.flower.wire import QUERY, Request, put_request
from fedgft.metrics import Kind

CHANNELS = ("train", "query", "evaluate")


@dataclass(frozen=True)
class Terms:
    """On which terms clients are heard.

    `max_share`: of all rows, what one client may claim. `patience`: rounds in a row without a new
    model after which the run ends with an error. `node_timeout`: seconds to wait for nodes.
    `secure`: the server learns totals only (experimental). `final`: ask once more at the end, so
    that the last model is measured too.
    """

    channel: str = "train"
    max_share: float = 0.9
    patience: int = 3
    node_timeout: float = 600.0
    budget: Budget = field(default_factory=Budget)
    secure: bool = False
    final: bool = True

    def __post_init__(self) -> None:
        if self.channel not in CHANNELS:
            raise FedgftError(f"channel {self.channel!r} is not known: {', '.join(CHANNELS)}")
        if self.patience < 1 or not self.node_timeout > 0:
            raise FedgftError(f"patience {self.patience} and node_timeout {self.node_timeout:g} "
                              "must be at least 1 and above 0")  # fmt: skip
        if not 0 < self.max_share <= 1:
            raise FedgftError(f"max_share must lie between 0 and 1, got {self.max_share:g}")
        if self.secure and self.channel != "query":
            raise FedgftError("secure sums need messages of their own: channel='query'")
        if self.secure and self.budget.epsilon is not None:
            raise FedgftError("secure sums or noise on each client's sums: choose one of the two")

    def asked(self, kind: Kind) -> dict[str, float]:
        """What clients are told about privacy."""
        return self.budget.asked(kind) | ({"secure": 1.0} if self.secure else {})


def innermost_strategy(strategy: Any) -> Any:
    """The strategy inside all wrappers."""
    while hasattr(strategy, "strategy"):
        strategy = strategy.strategy
    return strategy


def innermost(strategy: Any, name: str, default: Any) -> Any:
    """An attribute of a strategy, or of one that it wraps."""
    while strategy is not None:
        if hasattr(strategy, name):
            return getattr(strategy, name)
        strategy = getattr(strategy, "strategy", None)
    return default


def query(
    arrays: ArrayRecord | None, config: ConfigRecord, request: Request, node: int,
    kind: str = QUERY,
) -> Message:  # fmt: skip
    """A question of our own to one client."""
    content = RecordDict({"arrays": arrays or ArrayRecord(), "config": config})
    put_request(content, request)
    return Message(content, dst_node_id=node, message_type=kind)


VERDICT = {True: "met", False: "missed", None: "cannot be judged"}


def line(row: dict[str, Any], metric: str) -> str:
    """One row of the history, to be read."""
    shown = lambda v: "not estimable" if v is None else f"{v:.4f}"  # noqa: E731
    text = (f"after round {row['round']}: accuracy {shown(row['accuracy'])}, {metric} gap of "
            f"decisions {shown(row['gap_hard'])}, of scores {shown(row['gap_soft'])}, "
            f"{row['clients']} clients")  # fmt: skip
    if row.get("target") is not None:
        text += f"; target {row['target']:.4f} for {row['target_of']}: {VERDICT[row['reached']]}"
    if row.get("collapsed"):
        text += "; the model has collapsed: nearly everybody gets the same decision"
    if "epsilon" in row:
        text += f"; epsilon {row['epsilon']:.3g}, noise on the gap ±{shown(row['gap_error'])}"
    return text
