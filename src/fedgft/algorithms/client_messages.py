"""Messages of clients in a training loop of the user: a number of rows, then summed statistics."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedgft.errors import FedgftError
from fedgft.metrics import Metric
from fedgft.metrics.metric import Statistics


def pack_message(rows: float, statistics: Statistics) -> np.ndarray:
    """Return a client's message: its number of rows, then its statistics (2, v, g), flat."""
    return np.concatenate(([rows], statistics.ravel()))


def add_messages(statistics: Any) -> np.ndarray:
    """Return the sum of messages: one message (a flat array), or any iterable of several."""
    if hasattr(statistics, "detach"):  # a tensor
        statistics = statistics.detach().cpu().numpy()
    if isinstance(statistics, Iterable) and not isinstance(statistics, np.ndarray | str | bytes):
        statistics = list(statistics)
    try:
        messages = np.asarray(statistics, dtype=np.float64)
    except (TypeError, ValueError):
        text = "must be messages of one length, as `statistics(...)` returns them"
        raise FedgftError(text, field="statistics") from None
    if messages.ndim not in (1, 2) or not messages.size:
        text = f"must be a message or several, not an array of the shape {messages.shape}"
        raise FedgftError(text, field="statistics")
    return messages.sum(0) if messages.ndim == 2 else messages


def read_message(
    total: np.ndarray, metric: Metric, groups: int, *, conditions: int | None = None
) -> Statistics:
    """Return mean statistics (2, conditions, groups) from the sum of all messages.

    Parameters
    ----------
    total
        The sum of messages.
    metric, groups
        The metric, and the number of groups.
    conditions
        The number of conditions that is expected. None: any that the metric may have.
    """
    found, rest = divmod(len(total) - 1, 2 * groups)
    if rest or not _fits(metric, found):
        text = f"has {len(total)} numbers; with {groups} groups a message has 1 + 2 x "
        text = f"{text}{groups} numbers for each rate that {metric.name} compares"
        raise FedgftError(text, field="statistics")
    if not np.isfinite(total).all():
        raise FedgftError("holds NaN or infinity", field="statistics")
    if conditions is not None and found != conditions:
        text = "is that of a model with another number of classes than the last one"
        raise FedgftError(text, field="statistics")
    rows = total[0] if total[0] > 0 else np.inf  # no rows: no group has a rate
    return total[1:].reshape(2, found, groups) / rows


def _fits(metric: Metric, conditions: int) -> bool:
    """Return whether the metric has this number of conditions for some number of classes."""
    for classes in range(2, conditions + 3):
        found = len(metric.conditions(classes))
        if found >= conditions:
            return found == conditions
    return False
