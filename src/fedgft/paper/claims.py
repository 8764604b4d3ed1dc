"""Our results compared with the paper's claims: sentences made from records.

`CLAIMS` maps an experiment to the function that yields its findings.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from fedgft.algorithms.registry import METHOD_LABELS
from fedgft.formatting import Table
from fedgft.paper.cells import PAPER_METHODS, is_near_published
from fedgft.paper.runner import Record

NOTHING = "nothing estimable"
COLUMNS = (("accuracy", "accuracy"), ("gap", "gap_soft"))  # the paper's columns, and our fields


class Finding(NamedTuple):
    """A sentence; `holds` is None if it is neither right nor wrong and only reports numbers."""

    text: str
    holds: bool | None = None


class AccuracyCost(NamedTuple):
    """How far FedGFT's accuracy is below that of the best of the paper's methods.

    Attributes
    ----------
    record
        FedGFT's record of the cell.
    best, accuracy
        The most accurate method and its accuracy.
    behind
        Mean difference over the same replicates.
    brackets
        Two standard deviations of FedGFT's accuracy.
    errors
        Two standard errors of the paired difference.
    """

    record: Record
    best: str
    accuracy: float
    behind: float
    brackets: float
    errors: float


# Selecting records


def select(records: Sequence[Record], **fields: Any) -> list[Record]:
    """Return the records whose cells have these values.

    `fields`: names of `Cell`'s fields and the values that a record must have in all of them.
    """
    return [r for r in records if all(getattr(r.cell, n) == v for n, v in fields.items())]


def group_by(records: Sequence[Record], *names: str) -> list[tuple[Any, list[Record]]]:
    """Group records by the values of these fields; groups are in order of first appearance."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        key = tuple(getattr(record.cell, name) for name in names)
        groups.setdefault(key[0] if len(key) == 1 else key, []).append(record)
    return list(groups.items())


def by_method(records: Sequence[Record]) -> list[dict[str, Record]]:
    """Return one {method: record} per (data set, alpha, metric) for which FedGFT was trained."""
    groups = group_by(records, "data", "alpha", "metric")
    every = ({r.cell.method: r for r in group} for _, group in groups)
    return [methods for methods in every if "fedgft" in methods]


# Comparing and wording


def is_below(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether the first is lower by more than two standard errors of the paired difference.

    Parameters
    ----------
    first, second
        Values of the same replicates, (replicate,). Pairs with a value that is not estimable are
        left out; fewer than two pairs say nothing.
    """
    difference = (second - first)[np.isfinite(second - first)]
    if len(difference) < 2:
        return False
    return bool(difference.mean() > 2 * difference.std(ddof=1) / np.sqrt(len(difference)))


def is_different(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether the first is lower or higher by more than two standard errors, see `is_below`."""
    return is_below(first, second) or is_below(second, first)


def is_falling(values: Sequence[float | None]) -> bool:
    """Whether every value is known and below the one before."""
    return all(a is not None and b is not None and a > b for a, b in pairwise(values))


def describe_place(record: Record) -> str:
    """Return a text with data set, alpha and metric."""
    cell = record.cell
    return f"{cell.data_name}, alpha {cell.alpha:g}, {cell.metric.upper()}"


def format_points(value: float | None) -> str:
    """Return a gap, a fraction, in points: with two decimals below two points.

    >>> format_points(0.0123), format_points(0.123), format_points(None)
    ('1.23', '12.3', 'not estimable')
    """
    return "not estimable" if value is None else f"{100 * value:.{2 if value < 0.02 else 1}f}"


def format_percent(value: float | None) -> str:
    """Return an accuracy in percent."""
    return format_points(None) if value is None else f"{100 * value:.1f}%"


def _formatter(what: str) -> Callable[[float | None], str]:
    """Return the function that formats "accuracy" (in percent) or "gap" (in points)."""
    return format_percent if what == "accuracy" else format_points


def format_range(values: Sequence[float | None], text: Callable[[float | None], str]) -> str:
    """Return the smallest and the largest known value.

    `text` turns a number into words: `format_points` or `format_percent`.
    """
    known = [v for v in values if v is not None]
    return f"{text(min(known))} to {text(max(known))}" if known else format_points(None)


# Published numbers


class Pair(NamedTuple):
    """A published number, the accuracy or the gap of a cell, and ours."""

    record: Record
    what: str
    ours: float | None
    published: float

    @property
    def is_near(self) -> bool:
        """Whether ours is within 2 published standard deviations or 1 point."""
        return is_near_published(self.record.row, self.what, self.ours)

    @property
    def method(self) -> str:
        """The name of the method in text."""
        return METHOD_LABELS[self.record.cell.method]

    def text(self) -> str:
        """Return both numbers in words."""
        text = _formatter(self.what)
        return f"{text(self.ours)} against {text(self.published)}"


def pair_numbers(records: Sequence[Record]) -> list[Pair]:
    """Return a pair for every published number of these cells."""
    pairs = (
        Pair(record, what, record.row[field], record.row[f"published_{what}"])
        for record in records
        for what, field in COLUMNS
    )
    return [pair for pair in pairs if pair.published is not None]


def _agreement(records: Sequence[Record], name: str) -> Finding:
    """How many published numbers are near ours, and which are not."""
    pairs = pair_numbers(records)
    far = [
        f"{pair.what}, {describe_place(pair.record)}, {pair.method} ({pair.text()})"
        for pair in pairs
        if not pair.is_near
    ]
    rest = f"; not: {'; '.join(far)}" if far else ""
    return Finding(
        f"{len(pairs) - len(far)} of {len(pairs)} published numbers of {name} are within 2 "
        f"published standard deviations or 1 point of ours{rest}.",
        not far,
    )


def _wide_deviations(records: Sequence[Record], *, far: float = 0.03) -> Iterator[Finding]:
    """Numbers that are near only because their published standard deviations are large."""
    found = [
        f"{pair.what} of {pair.method}, {describe_place(pair.record)}: {pair.text()} ± "
        + format_points(pair.record.row[f"published_{pair.what}_bracket"])
        for pair in pair_numbers(records)
        if pair.is_near and pair.ours is not None and abs(pair.ours - pair.published) > far
    ]
    if found:
        yield Finding(
            f"Among these, more than {100 * far:g} points apart, and near only because "
            f"the published standard deviations are that large: {'; '.join(found)}."
        )


# Table 1 and Figure 1


def _table1(records: Sequence[Record]) -> Iterator[Finding]:
    """The paper: FedGFT has the smallest gap, and an accuracy near the best method's."""
    paper = select(records, protocol="paper")
    heldout = select(records, protocol="heldout")
    if paper:
        four = [r for r in paper if r.cell.method in PAPER_METHODS]
        yield _agreement(four, "the four methods")
        yield _agreement(select(paper, method="fedgft"), "FedGFT")
        yield from _wide_deviations(paper)
        yield _smallest_gap(paper, "gap_soft", "paper protocol, scores")
        yield from _accuracy(paper, "paper protocol")
        yield from _scores_and_decisions(paper)
    if heldout:
        yield _smallest_gap(heldout, "gap_hard_test", "held out, decisions")
        yield from _accuracy(heldout, "held out")
        yield from _heldout_accuracy(heldout)


def _smallest_gap(records: Sequence[Record], field: str, where: str) -> Finding:
    """In how many cells FedGFT has the smallest gap: of the paper's methods, and with LFT."""
    every = by_method(records)
    lost = []
    lft = []
    for methods in every:
        gaps = {m: r.row[field] for m, r in methods.items() if r.row[field] is not None}
        here = describe_place(methods["fedgft"])
        best = min((m for m in gaps if m in PAPER_METHODS), key=gaps.__getitem__, default=None)
        if best != "fedgft":
            winner = f"{METHOD_LABELS[best]} {format_points(gaps[best])}" if best else NOTHING
            lost.append(f"{here} ({winner}, FedGFT {format_points(gaps.get('fedgft'))})")
        if gaps.get("lft", np.inf) < gaps.get("fedgft", np.inf):
            lft.append(here)
    text = (
        f"FedGFT has the smallest gap of the four methods in {len(every) - len(lost)} of "
        f"{len(every)} cells ({where})"
    )
    text += f"; not in {'; '.join(lost)}" if lost else ""
    text += f". LFT (not in the paper's table) has a smaller gap in {'; '.join(lft)}" if lft else ""
    return Finding(text + ".", not lost)


def accuracy_costs(records: Sequence[Record]) -> Iterator[AccuracyCost]:
    """Yield the cost of every cell with at least two replicates.

    The best method is the most accurate one of `PAPER_METHODS` on average over the replicates.
    """
    for methods in by_method(records):
        final = {m: methods[m].curves["accuracy"][-1] for m in PAPER_METHODS if m in methods}
        best = max(final, key=lambda m: final[m].mean())
        behind = final[best] - final["fedgft"]
        if len(behind) > 1:
            yield AccuracyCost(
                record=methods["fedgft"],
                best=best,
                accuracy=float(final[best].mean()),
                behind=float(behind.mean()),
                brackets=float(2 * final["fedgft"].std(ddof=1)),
                errors=float(2 * (behind.std(ddof=1) / np.sqrt(len(behind)))),
            )


def _accuracy(records: Sequence[Record], where: str) -> Iterator[Finding]:
    """The paper: FedGFT's accuracy is within two standard errors of the best method's."""
    costs = list(accuracy_costs(records))
    if not costs:
        return
    worst = max(costs, key=lambda cost: cost.behind)
    near = sum(cost.behind <= cost.brackets for cost in costs)
    yield Finding(
        f"FedGFT's accuracy is within 2 standard deviations over the replicates "
        f"of the best method's in {near} of {len(costs)} cells ({where}); the largest distance is "
        f"{format_points(worst.behind)} points ({describe_place(worst.record)}, behind "
        f"{METHOD_LABELS[worst.best]}).",
        near == len(costs),
    )
    near = sum(cost.behind <= cost.errors for cost in costs)
    yield Finding(
        f"FedGFT's accuracy is within two standard errors (of the paired difference) of the "
        f"best method's in {near} of {len(costs)} cells ({where}).",
        near == len(costs),
    )


def accuracy_table(records: Sequence[Record]) -> Table:
    """Return the paper's sentence about accuracy, cell by cell."""
    header = "cell|best method|its accuracy|FedGFT's|distance|2 standard deviations|within|"
    header += "two standard errors|within"
    rows = []
    for cost in accuracy_costs(records):
        row = [describe_place(cost.record), METHOD_LABELS[cost.best], f"{100 * cost.accuracy:.1f}"]
        row += [f"{100 * (cost.accuracy - cost.behind):.1f}", f"{100 * cost.behind:.2f}"]
        for limit in (cost.brackets, cost.errors):
            row += [f"{100 * limit:.2f}", "yes" if cost.behind <= limit else "no"]
        rows.append(tuple(row))
    title = f"Is FedGFT's accuracy near the best method's? Protocol {records[0].cell.protocol}"
    note = "A bracket is FedGFT's standard deviation over the replicates; the standard error is "
    note += "that of the paired difference."
    return Table(title, tuple(header.split("|")), tuple(rows), 2, (note,))


def _scores_and_decisions(records: Sequence[Record]) -> Iterator[Finding]:
    """The gaps of the same models in scores and in decisions."""
    for methods in by_method(records):
        cell = methods["fedgft"].cell
        if (cell.alpha, cell.metric) == (100.0, "sp"):
            texts = (
                f"{METHOD_LABELS[m]} {format_points(methods[m].row['gap_soft'])} in scores and "
                f"{format_points(methods[m].row['gap_hard'])} in decisions"
                for m in ("fedavg", "fedgft")
            )
            yield Finding(
                f"{describe_place(methods['fedgft'])}: on the federation's rows the gap is "
                f"{', '.join(texts)}."
            )


def _heldout_accuracy(records: Sequence[Record]) -> Iterator[Finding]:
    """FedGFT's accuracy on held-out rows at alpha 0.5, where clients differ most."""
    for _, group in group_by(select(records, method="fedgft", alpha=0.5), "data"):
        texts = (
            f"{format_percent(r.row['accuracy'])} in the {r.cell.metric.upper()} runs (decision "
            f"gap {format_points(r.row['gap_hard_test'])}, noise floor "
            f"{format_points(r.row['floor'])})"
            for r in group
        )
        yield Finding(
            f"{group[0].cell.data_name}, alpha 0.5, held out: FedGFT's accuracy is "
            f"{' and '.join(texts)}."
        )


def _trajectory(records: Sequence[Record]) -> Iterator[Finding]:
    """The paper: FedAvg's gap grows over the rounds, and FedGFT's ends far below all others."""
    for protocol, group in group_by(records, "protocol"):
        field = "gap_soft" if protocol == "paper" else "gap_hard_test"
        growing = []
        below = []
        for methods in by_method(group):
            fedavg = np.nanmean(methods["fedavg"].curves[field], axis=1)
            growing.append(bool(fedavg[-1] > fedavg[1]))
            final = {m: record.curves[field][-1] for m, record in methods.items()}
            below.append(all(is_below(final["fedgft"], final[m]) for m in ("lrw", "fairfed")))
        text = "FedAvg's gap is larger after the last round than after the first"
        yield _count_cells(text, growing, protocol)
        if group[0].cell.seeds > 1:
            text = "FedGFT's final gap is below those of LRW and FairFed by more than two standard "
            yield _count_cells(f"{text}errors of the paired difference", below, protocol)


def _count_cells(text: str, holds: Sequence[bool], protocol: str) -> Finding:
    """In how many cells a sentence holds; the finding is right if it holds in all of them."""
    cells = f"{sum(holds)} of {len(holds)} cells"
    return Finding(f"{text} in {cells} (protocol {protocol}).", all(holds))


# The penalty and pure clients


def _penalty(records: Sequence[Record]) -> Iterator[Finding]:
    """The paper: l1 and l2 perform equally well, but training with l2 is much more stable."""
    known = [r for r in select(records, protocol="paper") if r.row["published_gap"] is not None]
    for (kind, lam), group in group_by(known, "penalty", "lam"):
        yield _agreement(group, f"{kind} with λ = {lam:g}")
    kinds = (("l2", 20.0), ("l1", 1.0), ("l1", 20.0))
    for protocol, group in group_by(records, "protocol"):
        cells = []
        for _, cell in group_by(group, "data", "alpha", "metric"):
            moves = {(r.cell.penalty, r.cell.lam): _mean_movement(r) for r in cell}
            cells.append([moves[kind] for kind in kinds])
        least = sum(l2 < min(others) for l2, *others in cells)
        l2, l1, strong = (100 * np.mean(moves) for moves in zip(*cells, strict=True))
        yield Finding(
            f"From one round to the next, in the second half of training, the gap of scores moves "
            f"by {l2:.2f} points with l2, by {l1:.2f} with l1 and λ = 1 and by "
            f"{strong:.2f} with l1 and λ = 20; l2 moves least in {least} of {len(cells)} "
            f"cells (protocol {protocol}).",
            least == len(cells),
        )
        if group[0].cell.seeds > 1:
            yield _penalties_differ(group, protocol)


def _penalties_differ(records: Sequence[Record], protocol: str) -> Finding:
    """The paper: no significant difference between l1, with the λ that fits, and l2."""
    gaps = []
    accuracies = []
    for _, group in group_by(records, "data", "alpha", "metric"):
        (l1,) = select(group, penalty="l1", lam=1.0)
        (l2,) = select(group, penalty="l2")
        gaps.append(is_different(l1.curves["gap_soft"][-1], l2.curves["gap_soft"][-1]))
        accuracies.append(is_different(l1.curves["accuracy"][-1], l2.curves["accuracy"][-1]))
    return Finding(
        f"l1 with λ = 1 and l2 differ by more than two standard errors of the paired difference in "
        f"the gap of scores in {sum(gaps)} of {len(gaps)} cells, and in accuracy in "
        f"{sum(accuracies)} (protocol {protocol}).",
        not any(gaps + accuracies),
    )


def _mean_movement(record: Record) -> float:
    """Mean change of the gap of scores between rounds, over the second half of training."""
    gap = record.curves["gap_soft"]
    return float(np.nanmean(np.abs(np.diff(gap[len(gap) // 2 :], axis=0))))


def _pure(records: Sequence[Record]) -> Iterator[Finding]:
    """The paper: FedGFT lowers the gap also where no client has a gap of its own."""
    known = [r for r in select(records, protocol="paper") if r.row["published_gap"] is not None]
    if known:
        yield _agreement(known, "pure and mixed clients")
    for (_, protocol, metric), group in group_by(records, "data", "protocol", "metric"):
        pure = select(group, partition="pure")
        fedavg = select(pure, method="fedavg")[0].row
        fedgft = sorted(select(pure, method="fedgft"), key=lambda r: r.cell.lam or 0)
        gaps = [r.row["gap_soft"] for r in fedgft]
        texts = (f"{format_points(r.row['gap_soft'])} (λ = {r.cell.lam:g})" for r in fedgft)
        yield Finding(
            f"{group[0].cell.data_name}, {metric.upper()}, protocol {protocol}, pure clients: the "
            f"gap of scores is {format_points(fedavg['gap_soft'])} with FedAvg and "
            f"{', '.join(texts)} with FedGFT; accuracy goes from "
            f"{format_percent(fedavg['accuracy'])} to "
            f"{format_percent(fedgft[-1].row['accuracy'])}.",
            is_falling([fedavg["gap_soft"], *gaps]),
        )
    yield from _pure_trade_off(records)


def _pure_trade_off(records: Sequence[Record]) -> Iterator[Finding]:
    """The paper: on pure clients the trade-off is worse than on mixed ones."""
    for protocol, group in group_by(select(records, method="fedgft"), "protocol"):
        is_worse = []
        for _, cell in group_by(group, "data", "metric"):
            (mixed,) = (r.row for r in select(cell, partition="dirichlet"))
            pure = [r.row for r in select(cell, partition="pure")]
            accurate = [row for row in pure if row["accuracy"] >= mixed["accuracy"]]
            is_worse.append(all(row["gap_soft"] > mixed["gap_soft"] for row in accurate))
        text = "No λ on pure clients is at once as accurate and as fair in scores as FedGFT on "
        yield _count_cells(f"{text}mixed clients", is_worse, protocol)


# Ablations


def _ablation(records: Sequence[Record]) -> Iterator[Finding]:
    """The range of results over the tried values; the finding holds if it is small enough."""
    for (_, protocol), group in group_by(records, "data", "protocol"):
        gap = "gap_soft" if protocol == "paper" else "gap_hard_test"
        parts = []
        is_small = True
        for metric, runs in group_by(group, "metric"):
            accuracy = format_range([r.row["accuracy"] for r in runs], format_percent)
            gaps = format_range([r.row[gap] for r in runs], format_points)
            parts.append(f"{metric.upper()} runs: accuracy {accuracy}, gap {gaps} points")
            is_small &= _has_small_range(runs, "accuracy") and _has_small_range(runs, gap)
        kind = "of scores" if protocol == "paper" else "of decisions, held out"
        text = f"{group[0].cell.data_name}, protocol {protocol} (gap {kind}): {'; '.join(parts)}."
        if group[0].cell.seeds > 1:
            text += f" {'All' if is_small else 'Not all'} of it within two standard deviations."
        yield Finding(text, is_small if group[0].cell.seeds > 1 else None)


def _has_small_range(runs: Sequence[Record], name: str) -> bool:
    """Whether the means lie within two standard deviations.

    The median of the deviations is used, so that one widely scattered value cannot justify itself.
    """
    known = [r.row[name] for r in runs if r.row[name] is not None]
    deviation = float(np.median([r.row[f"{name}_sd"] or 0.0 for r in runs]))
    return bool(known) and max(known) - min(known) <= 2 * deviation


def _strength(records: Sequence[Record]) -> Iterator[Finding]:
    """The paper: a higher penalty enforces a smaller gap and costs a little accuracy."""
    for protocol, group in group_by(records, "protocol"):
        falls = []
        changes = []
        for _, runs in group_by(group, "data", "metric"):
            rows = [r.row for r in sorted(runs, key=lambda r: r.cell.lam or 0)]
            falls.append(is_falling([row["gap_soft"] for row in rows]))
            changes.append(100 * (rows[-1]["accuracy"] - rows[0]["accuracy"]))
        yield Finding(
            f"The gap of scores falls with every step of λ in {sum(falls)} of {len(falls)} cells, "
            f"and from λ = 1 to λ = 50 the accuracy changes by {min(changes):+.1f} to "
            f"{max(changes):+.1f} points (protocol {protocol}).",
            all(falls),
        )
    for finding in _ablation(records):
        yield Finding(finding.text)  # no verdict: λ is meant to make a difference


def _fairfed(records: Sequence[Record]) -> Iterator[Finding]:
    """How far every rule and β stays from the two published numbers."""
    paper = select(records, protocol="paper")
    for data, metric, (what, field) in zip(
        ("adult", "compas"), ("sp", "eop"), COLUMNS, strict=True
    ):
        group = select(paper, data=data, metric=metric)
        value = group[0].row[f"published_{what}"] if group else None
        if value is not None:
            text = _formatter(what)
            ours = [r.row[field] for r in group if r.row[field] is not None]
            yield Finding(
                f"{describe_place(group[0])}: {what} {format_range(ours, text)} "
                f"over three rules and three β; published {text(value)}.",
                bool(ours) and min(ours) <= value <= max(ours),
            )
    for finding in _ablation(select(records, protocol="heldout")):
        yield Finding(finding.text)


# Experiment name -> function that turns the records of the experiment into findings.
CLAIMS: dict[str, Callable[[Sequence[Record]], Iterator[Finding]]] = {
    "table1": _table1,
    "penalty": _penalty,
    "pure": _pure,
    "trajectory": _trajectory,
    "epochs": _ablation,
    "lambda": _strength,
    "lr": _ablation,
    "clients": _ablation,
    "fairfed": _fairfed,
}
