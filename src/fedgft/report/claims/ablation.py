"""The penalty, pure clients, and what happens when a knob is turned."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from fedgft.experiments.run import Record
from fedgft.report.claims.finding import (
    Finding,
    agreement,
    apart,
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
        if mine[0].cell.seeds > 1:
            yield _different(mine, protocol)


def _different(records: Sequence[Record], protocol: str) -> Finding:
    """The paper: no significant difference between l1 and l2; l1 with the λ that fits."""
    counts = {"accuracy": 0, "gap_soft": 0}
    cells = [of(cell, penalty="l1", lam=1.0) + of(cell, penalty="l2")
             for _, cell in groups(records, "data", "alpha", "metric")]  # fmt: skip
    for (l1, l2), name in product(cells, counts):
        counts[name] += apart(l1.curves[name][-1], l2.curves[name][-1])
    return Finding(
        f"l1 with λ = 1 and l2 differ by more than two standard errors of the paired difference in "
        f"the gap of scores in {counts['gap_soft']} of {len(cells)} cells, and in accuracy in "
        f"{counts['accuracy']} (protocol {protocol}).", not any(counts.values()),
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
    yield from _trade_off(records)


def _trade_off(records: Sequence[Record]) -> Iterator[Finding]:
    """The paper: on pure clients the trade-off is worse than on mixed ones."""
    for protocol, mine in groups(of(records, method="fedgft"), "protocol"):
        worse, cells = 0, 0
        for _, cell in groups(mine, "data", "metric"):
            (mixed,), alone = of(cell, partition="dirichlet"), of(cell, partition="pure")
            as_good = [r for r in alone if r.row["accuracy"] >= mixed.row["accuracy"]
                       and r.row["gap_soft"] <= mixed.row["gap_soft"]]  # fmt: skip
            worse, cells = worse + (not as_good), cells + 1
        yield Finding(
            f"No λ on pure clients is at once as accurate and as fair in scores as FedGFT on mixed "
            f"clients in {worse} of {cells} cells (protocol {protocol}).", worse == cells,
        )  # fmt: skip


def ablation(records: Sequence[Record]) -> Iterator[Finding]:
    """Lowest and highest over the values that were tried; little: within two brackets."""
    for (data, protocol), mine in groups(records, "data", "protocol"):
        gap = "gap_soft" if protocol == "paper" else "gap_hard_test"
        parts, little = [], True
        for metric, runs in groups(mine, "metric"):
            accuracy = span([r.row["accuracy"] for r in runs], percent)
            gaps = span([r.row[gap] for r in runs], points)
            parts.append(f"{metric.upper()} runs: accuracy {accuracy}, gap {gaps} points")
            little &= _little(runs, "accuracy") and _little(runs, gap)
        kind = "of scores" if protocol == "paper" else "of decisions, held out"
        text = f"{DATA.get(data, data)}, protocol {protocol} (gap {kind}): {'; '.join(parts)}."
        if mine[0].cell.seeds > 1:
            text += f" {'All' if little else 'Not all'} of it within two standard deviations."
        yield Finding(text, little if mine[0].cell.seeds > 1 else None)


def _little(runs: Sequence[Record], name: str) -> bool:
    """From the lowest to the highest mean it is at most two standard deviations: the median of
    them, lest one bad value that scatters widely excuses itself."""
    known = [r.row[name] for r in runs if r.row[name] is not None]
    spread = float(np.median([r.row[f"{name}_sd"] or 0.0 for r in runs]))
    return bool(known) and max(known) - min(known) <= 2 * spread


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
    for finding in ablation(records):
        yield finding._replace(holds=None)  # λ is meant to make a difference
