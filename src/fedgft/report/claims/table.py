"""Table 1 and Figure 1: who is fairest, at which price, and on whose rows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fedgft.experiments.paper import FOUR
from fedgft.experiments.run import Record
from fedgft.layout import Table
from fedgft.report.claims.ablation import ablation
from fedgft.report.claims.finding import (
    Finding,
    agreement,
    below,
    cells,
    groups,
    number,
    of,
    percent,
    place,
    points,
    span,
    wide_brackets,
)
from fedgft.report.figures import NAMES
from fedgft.report.tables import DATA


def table1(records: Sequence[Record]) -> Iterator[Finding]:
    paper, heldout = of(records, protocol="paper"), of(records, protocol="heldout")
    if paper:
        yield agreement([r for r in paper if r.cell.method in FOUR], "the four methods")
        yield agreement(of(paper, method="fedgft"), "FedGFT")
        yield from wide_brackets(paper)
        yield _smallest(paper, "gap_soft", "paper protocol, scores")
        yield from _accuracy(paper, "paper protocol")
        yield from _worth(paper)
    if heldout:
        yield _smallest(heldout, "gap_hard_test", "held out, decisions")
        yield from _accuracy(heldout, "held out")
        yield from _unseen(heldout)


def _smallest(records: Sequence[Record], field: str, where: str) -> Finding:
    """In how many cells FedGFT has the smallest gap: of the paper's four, and with LFT."""
    every, lost, lft = cells(records), [], []
    for cell in every:
        gaps = {m: r.row[field] for m, r in cell.items() if r.row[field] is not None}
        here, fair = place(cell["fedgft"]), gaps.get("fedgft", np.inf)
        best = min((m for m in gaps if m in FOUR), key=gaps.__getitem__, default=None)
        if best != "fedgft":
            won = "nothing estimable" if best is None else f"{NAMES[best]} {points(gaps[best])}"
            lost.append(f"{here} ({won}, FedGFT {points(cell['fedgft'].row[field])})")
        if gaps.get("lft", np.inf) < fair:
            lft.append(here)
    text = (
        f"FedGFT has the smallest gap of the four methods in {len(every) - len(lost)} of "
        f"{len(every)} cells ({where})"
    )
    text += f"; not in {'; '.join(lost)}" if lost else ""
    text += f". LFT, which the table does not have, is below it in {'; '.join(lft)}" if lft else ""
    return Finding(text + ".", not lost)


class Price(NamedTuple):
    """What FedGFT's accuracy is behind the best of the four, over the same replicates."""

    record: Record
    best: str
    accuracy: float  # the best method's
    behind: float
    brackets: float  # two standard deviations of FedGFT's accuracy
    errors: float  # two standard errors of the paired difference


def prices(records: Sequence[Record]) -> Iterator[Price]:
    for cell in cells(records):
        final = {m: cell[m].curves["accuracy"][-1] for m in FOUR if m in cell}
        best = max(final, key=lambda m: final[m].mean())
        behind = final[best] - final["fedgft"]
        if len(behind) > 1:
            spread, error = final["fedgft"].std(ddof=1), behind.std(ddof=1) / np.sqrt(len(behind))
            numbers = (final[best].mean(), behind.mean(), 2 * spread, 2 * error)
            yield Price(cell["fedgft"], best, *map(float, numbers))


def _accuracy(records: Sequence[Record], where: str) -> Iterator[Finding]:
    """The paper: FedGFT's accuracy is within two standard errors of the best method's."""
    if every := list(prices(records)):
        worst, n = max(every, key=lambda p: p.behind), len(every)
        near = sum(p.behind <= p.brackets for p in every)
        yield Finding(
            f"FedGFT's accuracy is within two brackets (standard deviations over the replicates) "
            f"of the best method's in {near} of {n} cells ({where}); the largest distance is "
            f"{points(worst.behind)} points ({place(worst.record)}, behind {NAMES[worst.best]}).",
            near == n,
        )
        near = sum(p.behind <= p.errors for p in every)
        yield Finding(
            f"FedGFT's accuracy is within two standard errors (of the paired difference) of the "
            f"best method's in {near} of {n} cells ({where}).", near == n,
        )  # fmt: skip


def price_table(records: Sequence[Record]) -> Table:
    """The paper's sentence about accuracy, cell by cell."""
    yes = lambda near: "yes" if near else "no"  # noqa: E731
    rows = tuple(
        (place(p.record), NAMES[p.best], f"{100 * p.accuracy:.1f}",
         f"{100 * (p.accuracy - p.behind):.1f}", f"{100 * p.behind:.2f}",
         f"{100 * p.brackets:.2f}", yes(p.behind <= p.brackets),
         f"{100 * p.errors:.2f}", yes(p.behind <= p.errors))
        for p in prices(records)
    )  # fmt: skip
    header = ("cell", "best method", "its accuracy", "FedGFT's", "distance", "two brackets",
              "within", "two standard errors", "within")  # fmt: skip
    title = f"Is FedGFT's accuracy near the best method's? Protocol {records[0].cell.protocol}"
    note = "A bracket is FedGFT's standard deviation over the replicates; the standard error is "
    note += "that of the paired difference."
    return Table(title, header, rows, 2, (note,))


def _worth(records: Sequence[Record]) -> Iterator[Finding]:
    """The same models, read at the level of decisions."""
    for cell in cells(records):
        one = cell["fedgft"].cell
        if (one.alpha, one.metric) == (100.0, "sp"):
            each = (
                f"{NAMES[m]} {points(cell[m].row['gap_soft'])} in scores and "
                f"{points(cell[m].row['gap_hard'])} in decisions" for m in ("fedavg", "fedgft")
            )  # fmt: skip
            yield Finding(f"{place(cell['fedgft'])}: on the federation's rows the gap is "
                          f"{', '.join(each)}.")  # fmt: skip


def _unseen(records: Sequence[Record]) -> Iterator[Finding]:
    """What FedGFT is worth on people nobody trained on, where clients differ most."""
    for data, mine in groups(of(records, method="fedgft", alpha=0.5), "data"):
        each = (
            f"{percent(r.row['accuracy'])} in the {r.cell.metric.upper()} runs (decision gap "
            f"{points(r.row['gap_hard_test'])}, by chance {points(r.row['floor'])})" for r in mine
        )  # fmt: skip
        yield Finding(f"{DATA.get(data, data)}, alpha 0.5, held out: FedGFT's accuracy is "
                      f"{' and '.join(each)}.")  # fmt: skip


def trajectory(records: Sequence[Record]) -> Iterator[Finding]:
    for protocol, mine in groups(records, "protocol"):
        field = "gap_soft" if protocol == "paper" else "gap_hard_test"
        every, grows, apart = cells(mine), 0, 0
        for cell in every:
            plain = np.nanmean(cell["fedavg"].curves[field], axis=1)
            grows += bool(plain[-1] > plain[1])
            fair = cell["fedgft"].curves[field][-1]
            apart += all(below(fair, cell[m].curves[field][-1]) for m in ("lrw", "fairfed"))
        yield Finding(
            f"FedAvg's gap is larger after the last round than after the first in {grows} of "
            f"{len(every)} cells (protocol {protocol}).", grows == len(every))  # fmt: skip
        if mine[0].cell.seeds < 2:
            continue
        yield Finding(
            f"FedGFT's final gap is below those of LRW and FairFed by more than two standard "
            f"errors of the paired difference in {apart} of {len(every)} cells (protocol "
            f"{protocol}).", apart == len(every))  # fmt: skip


def fairfed(records: Sequence[Record]) -> Iterator[Finding]:
    """What was tried, and how far all of it stays from the two published numbers."""
    paper = of(records, protocol="paper")
    for data, metric, field, what in (("adult", "sp", "accuracy", "accuracy"),
                                      ("compas", "eop", "gap_soft", "gap")):  # fmt: skip
        mine = of(paper, data=data, metric=metric)
        if mine and (at := mine[0].row[f"published_{what}"]) is not None:
            ours = [r.row[field] for r in mine if r.row[field] is not None]
            yield Finding(
                f"{place(mine[0])}: {what} {span(ours, percent if what == 'accuracy' else points)} "
                f"over three rules and three β; published {number(what, at)}.",
                bool(ours) and min(ours) <= at <= max(ours),
            )
    for finding in ablation(of(records, protocol="heldout")):
        yield Finding(finding.text)
