"""What the values in a table are called: classes in their order, groups by their names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedgft.audit.sums import COUNT, SCORES, Group, Question, order
from fedgft.data.columns import as_text, positive_last
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import polars as pl

PAIRS = (("0", "1"), ("False", "True"))  # classes that are known where only one of them occurs


@dataclass(frozen=True)
class Names:
    """What the user says about names; everything else is read from the data."""

    site: str
    attributes: tuple[str, ...]
    classes: tuple[str, ...] = ()  # all of them, in their order
    positive: str | None = None
    values: Mapping[str, tuple[str, ...]] | None = None  # of an attribute, where they are listed


def classes_of(
    part: "pl.DataFrame", scores: Sequence[str], decision: str | None, names: Names, *, source: str
) -> tuple[str, ...]:
    """The classes in their order; of two, the positive one last."""
    labels = _texts(part["y"])
    decisions = _texts(part["d"]) if decision is not None else []
    if not labels:
        raise FedgftError(f"{source}: no row has both a label and a prediction")
    classes = names.classes or _found(labels, decisions, names.positive, source=source)
    for what, seen in (("label", labels), ("decision", decisions)):
        odd = [value for value in seen if value not in classes]
        if odd:
            raise FedgftError(
                f"{source}: {what} '{odd[0]}' is none of the classes {shown(classes)}"
                " (--classes names them all)"
            )
    if names.positive is not None:
        classes = positive_last(classes, names.positive, where=f"{source}: the label")
    if len(scores) == 1 and len(classes) != 2:
        raise FedgftError(
            f"{source}: {len(classes)} classes need one --score column each, in the order "
            f"{', '.join(classes)}; or --decision alone"
        )
    if len(scores) > 1 and len(scores) != len(classes):
        raise FedgftError(f"{source}: {len(scores)} score columns for {len(classes)} classes")
    return classes


def _found(
    labels: list[str], decisions: list[str], positive: str | None, *, source: str
) -> tuple[str, ...]:
    for pair in PAIRS:
        if {*labels, *decisions} <= set(pair):
            return pair
    known = labels if len(labels) > 1 else sorted({*labels, *decisions}, key=_by)
    odd = [value for value in decisions if value not in known]
    if odd:
        raise FedgftError(
            f"{source}: decision '{odd[0]}' is no label; the labels are {shown(labels)} "
            "(--classes names all classes)"
        )
    if len(known) == 1 and positive is not None and positive.casefold() != known[0].casefold():
        known = [*known, positive]
    if len(known) == 1:
        raise FedgftError(
            f"{source}: '{known[0]}' is the only label here; name both classes, the reference "
            f"first: --classes OTHER {known[0]}"
        )
    return tuple(known)


def tables_of(
    parts: "list[pl.DataFrame]", question: Question, names: Names, *, brought: bool, source: str
) -> tuple[dict[Group, np.ndarray], dict[Group, np.ndarray]]:
    """The tables and histograms of a site, from the counts of each score column.

    `brought`: decisions are values of a column; otherwise they are indices of classes.
    """
    tables: dict[Group, np.ndarray] = {}
    histogram: dict[Group, np.ndarray] = {}
    scores = len(question.score_classes)
    for s, part in enumerate(parts[-max(1, scores) :]):  # of two columns for two classes, the last
        for group, label, decision, bin_, n, total in _entries(
            part, question, names, brought=brought
        ):
            if group not in tables:
                _check_listed(group, names, source=source)
                tables[group] = question.empty_table()
                histogram[group] = question.empty_histogram()
            table = tables[group][label, decision]
            if s == 0:
                table[COUNT] += n
            if scores:
                table[SCORES + s] += total
                histogram[group][label, decision, s, bin_] += n
    return tables, histogram if scores else {}


def groups_of(frame: "pl.DataFrame", names: Names) -> set[Group]:
    """All groups that rows have, and of a single attribute all that are listed."""
    columns = (as_text(frame[f"g{i}"]).to_list() for i in range(len(names.attributes)))
    found = set(zip(*columns, strict=True))
    if len(names.attributes) == 1:
        found |= {(value,) for value in (names.values or {}).get(names.attributes[0], ())}
    return found


def _entries(
    part: "pl.DataFrame", question: Question, names: Names, *, brought: bool
) -> Iterator[tuple[Group, int, int, int, int, float]]:
    """(group, label, decision, bin, count, sum of scores), names turned into indices."""
    index = {name: i for i, name in enumerate(question.classes)}
    groups = zip(
        *(as_text(part[f"g{i}"]).to_list() for i in range(len(names.attributes))), strict=True
    )
    labels = [index[text] for text in as_text(part["y"]).to_list()]
    decisions = [index[t] for t in as_text(part["d"]).to_list()] if brought else part["d"].to_list()
    rest = (part[name].to_list() for name in ("bin", "n", "total"))
    return zip(groups, labels, decisions, *rest, strict=True)


def _check_listed(group: Group, names: Names, *, source: str) -> None:
    for attribute, value in zip(names.attributes, group, strict=True):
        listed = (names.values or {}).get(attribute)
        if listed and value is not None and value not in listed:
            raise FedgftError(
                f"{source}: group column '{attribute}' holds '{value}', which --group does not "
                f"list ({', '.join(listed)})"
            )


def shown(names: Sequence[str]) -> str:
    """The first of them, for a message of one line."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _texts(series: "pl.Series") -> list[str]:
    return sorted(as_text(series).drop_nulls().unique().to_list(), key=_by)


def _by(value: str) -> tuple:
    return order((value,))
