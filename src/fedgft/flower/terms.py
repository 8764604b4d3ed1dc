"""How a strategy listens to its clients, and a few small things it needs for that."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedgft.errors import FedgftError
from fedgft.flower.private import Budget
from fedgft.flower.wire import QUERY, Request, put_request
from fedgft.metrics import Kind
from fedgft.metrics.robust import NO_LIMITS, Limits

CHANNELS = ("train", "query", "evaluate")
UNLIMITED_SHARE = 0.9  # of all rows, what one client may be where there are no limits


@dataclass(frozen=True)
class Terms:
    """On which terms clients are heard.

    `limits`: how far one client's sums, weight and update may be from the others' (see
    `metrics.robust`); None switches these limits off, and a client may then be nine tenths of
    all rows. `max_share`: of all rows and of the weight in the average, what one client may be;
    unsaid, it follows from `limits`. `counts`: by a site's name, its training rows by label and
    group as they were agreed on beforehand; a site that declares others is left out. `patience`:
    rounds in a row without a new model after which the run ends with an error. `node_timeout`:
    seconds to wait for nodes. `secure`: the server learns totals only (experimental). `final`: ask
    once more at the end, so that the last model is measured too.
    """

    channel: str = "train"
    max_share: float | None = None
    limits: Limits | None = field(default_factory=Limits)
    counts: Mapping[str, Any] | None = None
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
        if self.max_share is not None and not 0 < self.max_share <= 1:
            raise FedgftError(f"max_share must lie between 0 and 1, got {self.max_share:g}")
        if self.secure and self.channel != "query":
            raise FedgftError("secure sums need messages of their own: channel='query'")
        if self.secure and self.budget.epsilon is not None and self.budget.min_count:
            raise FedgftError("secure sums with noise need no min_count: noise hides small cells")

    def limits_for(self, clients: int) -> Limits:
        """The limits among so many clients."""
        share = self.max_share
        if share is None and self.limits is None:
            share = UNLIMITED_SHARE
        limits = NO_LIMITS if self.limits is None else self.limits
        return limits if share is None else replace(limits, shares=share * clients, size_ratio=0.0)

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
    if row.get("clipped"):
        sites = ", ".join(f"{s} {100 * v:.1f}" for s, v in row["clipped"].items())
        text += f"; held to the limits, by points of gap: {sites}"
    if row.get("target") is not None:
        text += f"; target {row['target']:.4f} for {row['target_of']}: {VERDICT[row['reached']]}"
    if row.get("collapsed"):
        text += "; the model has collapsed: nearly everybody gets the same decision"
    if "epsilon" in row:
        text += f"; epsilon {row['epsilon']:.3g}, noise on the gap ±{shown(row['gap_error'])}"
    return text
