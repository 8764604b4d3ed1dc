"""What the server believes: every client's sums are held against what sums of rows can be.

Sums that cannot be true are left out, with a line in the log that names the site; the others go on.
A client can still lie within its own rows, as it can with its labels: `robust` limits how far
that carries.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message

from fedgft.errors import FedgftError
from fedgft.flower.wire import Report
from fedgft.metrics import Kind, Tally

LARGEST = 1e12  # rows
SIGMAS = 6.0  # of declared noise: one honest number in a billion is beyond


@dataclass(frozen=True)
class Noise:
    """The noise that clients were asked for; only sums of one `kind` are sent then."""

    kind: Kind
    count: float  # standard deviations
    value: float


def check_report(report: Report, *, examples: float | None, noise: Noise | None = None) -> None:
    """Sums that rows can have. `examples`: what the client calls its number of training rows."""
    site, tally = f"site '{report.site}'", report.tally
    tables = _sent(tally, noise)
    if not all(np.isfinite(table).all() for table in (tally.count, *tables.values())):
        raise FedgftError(f"{site}: its statistics are not finite")
    loose = 0.0 if noise is None else SIGMAS * noise.count
    wide = 0.0 if noise is None else SIGMAS * (noise.count + noise.value * tally.count.shape[0])
    rows = float(tally.rows())
    cells = tally.count.size**0.5
    if (tally.count < -loose).any() or rows > LARGEST:
        raise FedgftError(f"{site}: its counts are negative or beyond all reason")
    if noise is None and not _whole(tally.count):
        raise FedgftError(f"{site}: its counts are not numbers of rows")
    if examples is not None and rows > examples * (1 + 1e-6) + loose * cells:
        raise FedgftError(
            f"{site}: its statistics claim {rows:.0f} rows, but it trains on {examples:.0f}"
        )
    for name, table in tables.items():
        _check_table(table, tally.count, wide, f"{site}: its sums of {name}")


def _sent(tally: Tally, noise: Noise | None) -> dict[str, np.ndarray]:
    both = {"scores": tally.score, "decisions": tally.decision}
    if noise is None:
        return both
    kept = {"soft": "scores", "hard": "decisions"}[noise.kind]
    return {kept: both[kept]}


def _check_table(table: np.ndarray, count: np.ndarray, wide: float, what: str) -> None:
    near = 1e-3 + 1e-5 * np.abs(count)  # sums of many small rounded numbers
    if (table < -near[..., None] - wide).any():
        raise FedgftError(f"{what} are negative")
    if (table > (count + near)[..., None] + wide).any():
        raise FedgftError(f"{what} exceed its counts")
    if (np.abs(table.sum(-1) - count) > near + wide).any():
        raise FedgftError(f"{what} do not add up to its counts")


def _whole(count: np.ndarray) -> bool:
    return bool((np.abs(count - count.round()) < 1e-6).all())


def check_update(reply: Message, sent: ArrayRecord, *, weighted_by: str) -> None:
    """A model of the same shapes, without NaN, and a number of examples that can be one."""
    arrays = list(reply.content.array_records.values())
    if len(arrays) != 1:
        raise FedgftError(f"its reply must hold one ArrayRecord, not {len(arrays)}")
    check_metrics(reply, weighted_by=weighted_by)
    if set(arrays[0]) != set(sent):
        odd = sorted(set(arrays[0]) ^ set(sent))[:3]
        raise FedgftError(f"its model has other tensors than the one it received: {', '.join(odd)}")
    for name, array in arrays[0].items():
        try:
            values = array.numpy()
            finite = bool(np.isfinite(values).all())
            kind = np.dtype(sent[name].dtype).kind
        except Exception as error:  # whatever a stranger's bytes may do to a decoder
            raise FedgftError(f"its '{name}' cannot be read ({type(error).__name__})") from None
        if values.dtype.kind != kind:
            raise FedgftError(f"its '{name}' has dtype {values.dtype}, not {sent[name].dtype}")
        asked = tuple(sent[name].shape)
        if tuple(values.shape) != asked:
            raise FedgftError(
                f"its '{name}' has shape {tuple(values.shape)}, not {asked}: the sites have "
                "different columns, classes or models"
            )
        if not finite:
            raise FedgftError(f"its '{name}' is not finite: its training diverged")


def check_metrics(reply: Message, *, weighted_by: str) -> None:
    """One record of metrics, with a number of examples that can be one."""
    metrics = list(reply.content.metric_records.values())
    if len(metrics) != 1:
        raise FedgftError(f"its reply must hold one MetricRecord, not {len(metrics)}")
    rows = metrics[0].get(weighted_by)
    if not _number(rows) or not 0 <= rows <= LARGEST:  # pyrefly: ignore
        raise FedgftError(f"its metric '{weighted_by}' is {rows!r}: no number of rows")


def update_norm(reply: Message, sent: ArrayRecord) -> float:
    """How far a checked update moved the model: the length of the change of all real tensors."""
    (arrays,) = reply.content.array_records.values()
    squares = 0.0
    for name, array in arrays.items():
        before, after = (np.asarray(a.numpy(), np.float64) for a in (sent[name], array))
        with np.errstate(over="ignore"):
            squares += float(np.square(after - before).sum())
    return math.sqrt(squares)


def shorten_update(reply: Message, sent: ArrayRecord, part: float) -> None:
    """Keep this part of the change of every real tensor; counters stay as they are."""
    ((key, arrays),) = reply.content.array_records.items()
    short = {}
    for name, array in arrays.items():
        before, after = sent[name].numpy(), array.numpy()
        if after.dtype.kind != "f":
            short[name] = array
            continue
        moved = before.astype(np.float64) + part * (after.astype(np.float64) - before)
        short[name] = Array(moved.astype(after.dtype))
    reply.content[key] = ArrayRecord(short)


def alike(replies: Mapping[int, Message]) -> dict[int, str]:
    """Whose records or metrics have other names, or lists of another length, than most replies':
    a strategy would stumble over them, and take the server along."""
    forms = {}
    for node, reply in replies.items():
        content = reply.content
        (metrics,) = content.metric_records.values()
        values = sorted((name, _length(value)) for name, value in metrics.items())
        forms[node] = tuple(content.array_records), tuple(content.metric_records), tuple(values)
    common = most_common(forms.values())
    return {
        node: f"it sends {_shown(own)}, the others {_shown(common)}, or in another form"
        for node, own in forms.items()
        if own != common
    }


def most_common(values: Iterable[Any]) -> Any:
    """What most of them are, of several the one that came first; counted in one pass, because
    thousands of sites may answer. Of nothing: an empty form."""
    return next((value for value, _ in Counter(values).most_common(1)), ())


def _shown(form: Any) -> str:
    arrays, metrics, values = form
    records = ", ".join((*arrays, *metrics))
    return f"the metrics {', '.join(name for name, _ in values)} in the records {records}"


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else -1


def _number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and bool(np.isfinite(value))
    )
