"""Findings, and how records are picked, grouped and put into words for them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from fedgft.experiments.published import near
from fedgft.experiments.run import Record
from fedgft.report.figures import NAMES
from fedgft.report.tables import DATA

PUBLISHED = (("accuracy", "accuracy"), ("gap", "gap_soft"))  # the paper's columns, and our fields


class Finding(NamedTuple):
    """A sentence; `holds` is None where there is no yes or no in it, and the numbers speak."""

    text: str
    holds: bool | None = None


def of(records: Sequence[Record], **wanted: Any) -> list[Record]:
    """Those whose cells have these values."""
    return [r for r in records if all(getattr(r.cell, n) == v for n, v in wanted.items())]


def groups(records: Sequence[Record], *names: str) -> Iterator[tuple[Any, list[Record]]]:
    """Records that share the values of these fields, in the order in which they first come."""
    key = lambda r: tuple(getattr(r.cell, n) for n in names)  # noqa: E731
    order = {k: i for i, k in reversed(list(enumerate(map(key, records))))}
    for shared, group in groupby(sorted(records, key=lambda r: order[key(r)]), key=key):
        yield shared[0] if len(names) == 1 else shared, list(group)


def cells(records: Sequence[Record]) -> list[dict[str, Record]]:
    """By method, of each (data set, alpha, metric) that has FedGFT."""
    every = [{r.cell.method: r for r in g} for _, g in groups(records, "data", "alpha", "metric")]
    return [cell for cell in every if "fedgft" in cell]


def agreement(records: Sequence[Record], name: str) -> Finding:
    """How many published numbers are near ours, and which are not."""
    pairs = [(r, what, r.row[field]) for r in records for what, field in PUBLISHED
             if r.row[f"published_{what}"] is not None]  # fmt: skip
    far = [f"{what}, {place(r)}, {NAMES[r.cell.method]} ({number(what, ours)} against "
           f"{number(what, r.row[f'published_{what}'])})"
           for r, what, ours in pairs if not near(r.row, what, ours)]  # fmt: skip
    rest = f"; not: {'; '.join(far)}" if far else ""
    return Finding(
        f"{len(pairs) - len(far)} of {len(pairs)} published numbers of {name} are within two "
        f"published brackets or one point of ours{rest}.", not far,
    )  # fmt: skip


def wide_brackets(records: Sequence[Record], *, far: float = 0.03) -> Iterator[Finding]:
    """What counts as near only because the published brackets are wide: no reproduction."""
    found = [f"{what} of {NAMES[r.cell.method]}, {place(r)}: {number(what, r.row[field])} against "
             f"{number(what, at)} ± {points(r.row[f'published_{what}_bracket'])}"
             for r in records for what, field in PUBLISHED
             if (at := r.row[f"published_{what}"]) is not None
             and near(r.row, what, r.row[field]) and abs(r.row[field] - at) > far]  # fmt: skip
    if found:
        yield Finding(f"Among these, more than {100 * far:g} points apart, and near only because "
                      f"the published brackets are that wide: {'; '.join(found)}.")  # fmt: skip


def below(first: np.ndarray, second: np.ndarray) -> bool:
    """Lower by more than two standard errors of the paired difference."""
    apart = second - first
    apart = apart[np.isfinite(apart)]
    if len(apart) < 2:
        return False
    return bool(apart.mean() > 2 * apart.std(ddof=1) / np.sqrt(len(apart)))


def apart(first: np.ndarray, second: np.ndarray) -> bool:
    """Lower or higher, by more than that."""
    return below(first, second) or below(second, first)


def place(record: Record) -> str:
    cell = record.cell
    return f"{DATA.get(cell.data, cell.data)}, alpha {cell.alpha:g}, {cell.metric.upper()}"


def points(value: float | None) -> str:
    return "not estimable" if value is None else f"{100 * value:.{2 if value < 0.02 else 1}f}"


def percent(value: float | None) -> str:
    return points(None) if value is None else f"{100 * value:.1f}%"


def number(what: str, value: float | None) -> str:
    return percent(value) if what == "accuracy" and value is not None else points(value)


def span(values: Sequence[float | None], text: Callable[[float | None], str]) -> str:
    """From the smallest to the largest that is known."""
    known = [v for v in values if v is not None]
    return f"{text(min(known))} to {text(max(known))}" if known else points(None)


def falling(values: Sequence[float | None]) -> bool:
    return all(a is not None and b is not None and a > b for a, b in pairwise(values))
