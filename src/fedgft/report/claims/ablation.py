"""The penalty, pure clients, and what happens when a knob is turned."""

from collections.abc import Iterator, Sequence

import numpy as np

from fedgft.experiments.run import Record
from fedgft.report.claims.finding import (
    Finding,
    agreement,
    falling,
    groups,
    of,
    percent,
    points,
    span,
)
from fedgft.report.tables import DATA


def penalty(records: Sequence[Record]) -> Iterator[Finding]:
    paper = [r for r in of(records, protocol="paper") if r.row["published_gap"] is not None]
    for (kind, lam), mine in groups(paper, "penalty", "lam"):
        yield agreement(mine, f"{kind} with λ = {lam:g}")
    for protocol, mine in groups(records, "protocol"):
        less, moves = [], {}
        for _, cell in groups(mine, "data", "alpha", "metric"):
            moved = {(r.cell.penalty, r.cell.lam): restless(r) for r in cell}
            less.append(moved["l2", 20.0] < min(moved["l1", 1.0], moved["l1", 20.0]))
            for kind, change in moved.items():
                moves.setdefault(kind, []).append(change)
        l2, l1, strong = (np.mean(moves[k]) for k in (("l2", 20.0), ("l1", 1.0), ("l1", 20.0)))
        yield Finding(
            f"From one round to the next, in the second half of training, the gap of scores moves "
            f"by {100 * l2:.2f} points with l2, by {100 * l1:.2f} with l1 and λ = 1 and by "
            f"{100 * strong:.2f} with l1 and λ = 20; l2 moves least in {sum(less)} of {len(less)} "
            f"cells (protocol {protocol}).", all(less),
        )  # fmt: skip


def restless(record: Record) -> float:
    """Mean change of the gap of scores between rounds, over the second half of training."""
    gap = record.curves["gap_soft"]
    return float(np.nanmean(np.abs(np.diff(gap[len(gap) // 2 :], axis=0))))


def pure(records: Sequence[Record]) -> Iterator[Finding]:
    if paper := [r for r in of(records, protocol="paper") if r.row["published_gap"] is not None]:
        yield agreement(paper, "pure and mixed clients")
    for (data, protocol, metric), mine in groups(records, "data", "protocol", "metric"):
        alone = of(mine, partition="pure")
        plain = of(alone, method="fedavg")[0].row
        fair = sorted(of(alone, method="fedgft"), key=lambda r: r.cell.lam or 0)
        gaps = [r.row["gap_soft"] for r in fair]
        each = ", ".join(f"{points(r.row['gap_soft'])} (λ = {r.cell.lam:g})" for r in fair)
        from_, to = percent(plain["accuracy"]), percent(fair[-1].row["accuracy"])
        yield Finding(
            f"{DATA.get(data, data)}, {metric.upper()}, protocol {protocol}, pure clients: the gap "
            f"of scores is {points(plain['gap_soft'])} with FedAvg and {each} with FedGFT; "
            f"accuracy goes from {from_} to {to}.",
            falling([plain["gap_soft"], *gaps]),
        )  # fmt: skip


def ablation(records: Sequence[Record]) -> Iterator[Finding]:
    """Lowest and highest over the values that were tried."""
    for (data, protocol), mine in groups(records, "data", "protocol"):
        gap = "gap_soft" if protocol == "paper" else "gap_hard_test"
        parts = []
        for metric, runs in groups(mine, "metric"):
            accuracy = span([r.row["accuracy"] for r in runs], percent)
            gaps = span([r.row[gap] for r in runs], points)
            parts.append(f"{metric.upper()} runs: accuracy {accuracy}, gap {gaps} points")
        kind = "of scores" if protocol == "paper" else "of decisions, held out"
        yield Finding(
            f"{DATA.get(data, data)}, protocol {protocol} (gap {kind}): {'; '.join(parts)}."
        )


def strength(records: Sequence[Record]) -> Iterator[Finding]:
    for protocol, mine in groups(records, "protocol"):
        falls, drops = [], []
        for _, runs in groups(mine, "data", "metric"):
            order = sorted(runs, key=lambda r: r.cell.lam or 0)
            gaps = [r.row["gap_soft"] for r in order]
            falls.append(falling(gaps))
            drops.append(order[0].row["accuracy"] - order[-1].row["accuracy"])
        yield Finding(
            f"The gap of scores falls with every step of λ in {sum(falls)} of {len(falls)} cells, "
            f"and from λ = 1 to λ = 50 the accuracy changes by {100 * -max(drops):+.1f} to "
            f"{100 * -min(drops):+.1f} points (protocol {protocol}).", all(falls),
        )  # fmt: skip
    yield from ablation(records)
