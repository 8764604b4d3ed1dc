"""The columns of a table that are more than features: label, group, client and split.

Each reader turns one of them into indices and the names they stand for, and refuses what would
mislead later: a missing label, a single class, a word that is neither train nor test.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np

from fedgft.arguments import column_names, instance, shown
from fedgft.data.columns import (
    as_text,
    codes_of,
    column_of,
    numbers_of,
    positive_last,
    suggestion,
)
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import polars as pl


MOST_VALUES = 200  # of a label, or of a group: more are numbers, or names of people


@dataclass(frozen=True)
class Roles:
    """Which column plays which part; `positive` is the label value that is class 1 of the two."""

    label: str
    group: str | Sequence[str]
    client: str | None = None
    split: str | None = None
    positive: str | None = None
    leave_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        instance("label", self.label, str, "it is the name of a column")
        column_names("group", self.group)
        column_names("leave_out", self.leave_out)
        for name in ("client", "split"):
            if getattr(self, name) is not None:
                instance(name, getattr(self, name), str, "it is the name of a column")
        if self.positive is not None and not isinstance(self.positive, str | int | np.generic):
            raise FedgftError(f"positive must be a label, not {shown(self.positive)}")

    @property
    def aside(self) -> tuple[str | None, ...]:
        """The columns that are no features; the group is one, as in the paper, unless left out."""
        return self.label, self.client, self.split, *self.leave_out


def check_roles(frame: "pl.DataFrame", roles: Roles, *, source: str) -> None:
    """Every named column exists and plays one part (a group may be the client as well)."""
    group = group_columns(roles.group, frame.columns)
    asked = [("--label", roles.label), *(("--group", name) for name in group)]
    asked += [("--client", roles.client), ("--split", roles.split)]
    taken: dict[str, str] = {}
    for option, name in asked:
        if name is None:
            continue
        column_of(frame, name, source=source, option=option)
        if name in taken and {taken[name], option} != {"--group", "--client"}:
            raise FedgftError(f"{source}: column '{name}' is both {taken[name]} and {option}")
        taken[name] = option
    for name in roles.leave_out:
        if name == roles.label:
            raise FedgftError(f"{source}: column '{name}' is both --label and --leave-out")
        if name not in frame.columns:
            near = suggestion(name, frame.columns)
            raise FedgftError(f"{source}: no column '{name}' (--leave-out){near}")


def group_columns(group: str | Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """One name or several ("race,sex"); a name with a comma in it may still be a column."""
    if not isinstance(group, str):
        names = tuple(group)
    elif group in columns:
        names = (group,)
    else:
        names = tuple(name.strip() for name in group.split(","))
    if not names or not all(names):
        raise FedgftError("--group needs the name of a column")
    return names


def _factors(series: "pl.Series") -> tuple[np.ndarray, tuple[str, ...]]:
    """Codes (-1 for null) and names; numbers are sorted as numbers, the rest as text."""
    import polars as pl

    plain = series.dtype.is_numeric() or series.dtype == pl.Boolean
    ordered = (series if plain else as_text(series)).drop_nulls().unique().sort()
    names = tuple(as_text(ordered).unique(maintain_order=True).to_list())
    return codes_of(as_text(series), names), names


def labels_of(
    frame: "pl.DataFrame", roles: Roles, *, source: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The class of each row, none of them missing, and the names of the classes."""
    label, positive = roles.label, roles.positive
    series = _complete(frame[label], "label", source=source)
    codes, names = _factors(series)
    if series.dtype.is_float() and (series != series.round()).any():
        raise FedgftError(f"{source}: label column '{label}' holds fractions, not classes")
    if len(names) < 2:
        raise FedgftError(
            f"{source}: label column '{label}' has one class only, '{names[0]}': "
            "there is nothing to learn"
        )
    if len(names) > MOST_VALUES:
        raise FedgftError(
            f"{source}: label column '{label}' has {len(names):,} different values, more than the "
            f"{MOST_VALUES} that a label may have: put ranges of its values together first"
        )
    if positive is None:
        return codes, names
    ordered = positive_last(names, str(positive), where=f"{source}: column '{label}'")
    return codes if ordered == names else 1 - codes, ordered


def class_note(classes: tuple[str, ...], roles: Roles) -> str:
    """Which value a score is the probability of: an order of the alphabet decides it unasked."""
    if len(classes) > 2:
        return f"label column '{roles.label}' has {len(classes)} classes"
    asked = "" if roles.positive is not None else " (--positive names another)"
    return f"positive class: '{classes[1]}'{asked}"


def groups_of(
    frame: "pl.DataFrame", roles: Roles, *, source: str
) -> tuple[np.ndarray, tuple[str, ...], list[str]]:
    """Every combination of the columns that occurs; a row that lacks one is not recorded."""
    columns = group_columns(roles.group, frame.columns)
    factors = [_factors(_finite(frame[column], source=source)) for column in columns]
    codes = np.stack([code for code, _ in factors], axis=1)
    recorded = (codes >= 0).all(axis=1)
    cells, inverse = np.unique(codes[recorded], axis=0, return_inverse=True)
    names = tuple(
        " & ".join(factors[j][1][code] for j, code in enumerate(cell)) for cell in cells.tolist()
    )
    if not names:
        raise FedgftError(f"{source}: group column '{', '.join(columns)}' (--group) is empty")
    groups = np.full(len(codes), -1, np.int64)
    groups[recorded] = inverse.reshape(-1)
    notes = _absent(cells, [name for _, name in factors], source=source)
    if not recorded.all():
        absent = int((~recorded).sum())
        notes.append(f"{source}: the group of {absent} row(s) is not recorded; the rows are kept")
    if len(names) == 1:
        notes.append(f"{source}: there is one group only, '{names[0]}'")
    return groups, names, notes


def _absent(cells: np.ndarray, names: Sequence[tuple[str, ...]], *, source: str) -> list[str]:
    """Intersections that no row belongs to: nothing can be said about them."""
    found = {tuple(cell) for cell in cells.tolist()}
    most = math.prod(len(each) for each in names)
    if len(names) < 2 or len(found) == most:
        return []
    every = islice(product(*(range(len(each)) for each in names)), 100_000)
    lost = [" & ".join(names[j][c] for j, c in enumerate(cell)) for cell in every
            if cell not in found]  # fmt: skip
    shown = ", ".join(f"'{name}'" for name in lost[:5]) + (", ..." if len(lost) > 5 else "")
    return [f"{source}: {most - len(found)} intersection(s) have no row at all: {shown}"]


def clients_of(
    frame: "pl.DataFrame", roles: Roles, *, source: str
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The client of each row, where a column names it."""
    if roles.client is None:
        return None, ()
    return _factors(_complete(frame[roles.client], "client", source=source))


def test_of(frame: "pl.DataFrame", roles: Roles, *, source: str) -> np.ndarray | None:
    """The user's own test rows, where a column says which they are."""
    split = roles.split
    if split is None:
        return None
    text = as_text(_complete(frame[split], "split", source=source))
    codes = codes_of(text.str.strip_chars().str.to_lowercase(), ("train", "test"))
    where = f"{source}: split column '{split}'"
    if (codes < 0).any():
        found = text[int(np.flatnonzero(codes < 0)[0])]
        raise FedgftError(f"{where} must hold 'train' or 'test', not '{found}'")
    if len(set(codes.tolist())) < 2:
        raise FedgftError(f"{where} needs both 'train' and 'test' rows")
    return codes == 1


def _complete(series: "pl.Series", role: str, *, source: str) -> "pl.Series":
    absent = series.null_count()
    if absent:
        raise FedgftError(f"{source}: {role} column '{series.name}' lacks {absent} value(s)")
    return _finite(series, source=source)


def _finite(series: "pl.Series", *, source: str) -> "pl.Series":
    if series.dtype.is_float():
        numbers_of(series, source=source)
    return series
