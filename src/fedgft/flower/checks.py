"""What the server believes: every client's sums are held against what sums of rows can be.

Sums that cannot be true are left out, with a line in the log that names the site; the others go on.
A client can still lie within its own rows, as it can with its labels. How far that carries is
bounded by the share of all rows that it may claim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message

from fedgft.flower.wire import Report
from fedgft.metrics import Kind, Tally
from fedgft.types import FedgftError

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
    if noise is None and not (rows > 0 and _whole(tally.count)):
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


def capped(reports: Mapping[int, Report], most: float) -> tuple[dict[int, Tally], list[str]]:
    """The tallies, none of them with more than this share of all rows, and who was cut down.

    With all others' rows R, a client counts as at most R most / (1 - most) rows.
    """
    rows = {node: float(report.tally.rows()) for node, report in reports.items()}
    kept = {node: report.tally for node, report in reports.items()}
    cut: list[str] = []
    if most >= 1 or len(kept) < 2:
        return kept, cut
    for node, own in rows.items():
        limit = (sum(rows.values()) - own) * most / (1 - most)
        if own > limit:
            kept[node] = kept[node].map(lambda table, part=limit / own: table * part)
            cut.append(f"site '{reports[node].site}' claims {own / sum(rows.values()):.0%} of all "
                       f"rows; it is counted as {most:.0%} of them (max_share)")  # fmt: skip
    return kept, cut


def check_update(reply: Message, sent: ArrayRecord, *, weighted_by: str) -> None:
    """A model of the same shapes, without NaN, and a number of examples that can be one."""
    arrays = list(reply.content.array_records.values())
    metrics = list(reply.content.metric_records.values())
    if len(arrays) != 1 or len(metrics) != 1:
        raise FedgftError(
            f"its reply must hold one ArrayRecord and one MetricRecord, not {len(arrays)} and "
            f"{len(metrics)}"
        )
    if set(arrays[0]) != set(sent):
        odd = sorted(set(arrays[0]) ^ set(sent))[:3]
        raise FedgftError(f"its model has other tensors than the one it received: {', '.join(odd)}")
    for name, array in arrays[0].items():
        asked = tuple(sent[name].shape)
        if tuple(array.shape) != asked:
            raise FedgftError(
                f"its '{name}' has shape {tuple(array.shape)}, not {asked}: the sites have "
                "different columns, classes or models"
            )
        if not np.isfinite(array.numpy()).all():
            raise FedgftError(f"its '{name}' is not finite: its training diverged")
    rows = metrics[0].get(weighted_by)
    if not _number(rows) or not 0 <= rows <= LARGEST:  # pyrefly: ignore
        raise FedgftError(f"its metric '{weighted_by}' is {rows!r}: no number of rows")


def alike(replies: Mapping[int, Message]) -> dict[int, str]:
    """Whose metrics have other names than most replies', which a strategy would stumble over."""
    keys = {
        n: tuple(sorted(next(iter(r.content.metric_records.values())))) for n, r in replies.items()
    }
    common = max(keys.values(), key=list(keys.values()).count, default=())
    return {
        node: f"it sends the metrics {', '.join(own)}, the others {', '.join(common)}"
        for node, own in keys.items()
        if own != common
    }


def _number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and bool(np.isfinite(value))
    )
