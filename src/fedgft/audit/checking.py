"""Every field of a site's file, checked as it is read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from fedgft.audit.private import feasible, middles, unsaid, withheld
from fedgft.audit.sums import COUNT, MOST_BINS, NOISE, SCORES, Group, Privacy, Question, Site, Sums
from fedgft.errors import FedgftError

LARGEST = 2**53  # beyond it a float no longer counts exactly
MECHANISMS = ("none", "discrete laplace", "discrete gaussian")
MOST_IN_ALL = 50_000_000  # numbers a file may unfold to


@dataclass
class Reader:
    """The content of one file on its way to being sums."""

    found: dict[str, Any]
    source: str
    least: int = 0  # rows that a number about scores is of, at least
    blur: dict[Group, np.ndarray] = field(default_factory=dict)

    def sums(self) -> Sums:
        question, privacy = self._question(), self._privacy()
        spread = question.scored and not privacy.min_cell  # histograms go with small cells
        site = self._text(self.found, "site", "site")
        cells = self._cells(question)
        size = question.empty_table().size + (question.empty_histogram().size if spread else 0)
        groups = dict.fromkeys(group for group, _, _ in cells)
        if len(groups) * size > MOST_IN_ALL:
            self._fail("cells", "are of too many groups")
        tables = {group: question.empty_table() for group in groups}
        histogram = {group: question.empty_histogram() for group in groups} if spread else {}
        self.least = self._whole(self.found.get("min_bin", 0), "min_bin")
        self.blur = {}
        counted = sum(
            self._fill(
                cell, f"cells[{i}]", question, privacy, tables[group][label, decision],
                histogram[group][label, decision] if spread else None, decision,
                lambda g=group, y=label, d=decision: self._blur_of(g, question)[:, y, d],
            )
            for i, ((group, label, decision), cell) in enumerate(cells.items())
        )  # fmt: skip
        nulls = sum(cell.get("count") is None for cell in cells.values())
        if nulls != privacy.suppressed:
            self._fail("privacy.suppressed_cells", f"is {privacy.suppressed}, {nulls} are withheld")
        notes = () if privacy == Privacy() else (privacy,)
        made = Site(tables, *self._rows(counted, privacy), notes)
        return Sums(question, {site: made}, histogram, self.blur)

    def _blur_of(self, group: Group, question: Question) -> np.ndarray:
        """How far the histograms of a group may be off: made when it is first needed."""
        if group not in self.blur:
            self.blur[group] = np.zeros((3, *question.empty_histogram().shape))
        return self.blur[group]

    def _cells(self, question: Question) -> dict[tuple[Group, int, int], dict[str, Any]]:
        """Each cell by its group, label and decision."""
        index = {name: i for i, name in enumerate(question.classes)}
        out: dict[tuple[Group, int, int], dict[str, Any]] = {}
        for i, cell in enumerate(self._get(self.found, "cells", "cells", list)):
            if not isinstance(cell, dict):
                self._fail(f"cells[{i}]", "must be an object")
            place = self._place(cell, f"cells[{i}]", question, index)
            if place in out:
                self._fail(f"cells[{i}]", "is the second cell of this group, label and decision")
            out[place] = cell
        return out

    def _question(self) -> Question:
        classes = self._names("classes")
        attributes = self._names("groups")
        threshold, bins = self.found.get("threshold"), self.found.get("bins")
        if threshold is not None and not (_number(threshold) and 0 <= threshold <= 1):
            self._fail("threshold", f"is {_brief(threshold)}: must be a number in [0, 1], or null")
        if bins is not None and not (type(bins) is int and 2 <= bins <= MOST_BINS):
            self._fail(
                "bins", f"is {_brief(bins)}: must be a whole number from 2 to {MOST_BINS}, or null"
            )
        threshold = None if threshold is None else float(threshold)
        try:
            return Question(classes, attributes, threshold, bins is not None, bins or 100)
        except FedgftError as error:
            raise FedgftError(f"{self.source}: {error}") from None

    def _privacy(self) -> Privacy:
        found = self._get(self.found, "privacy", "privacy", dict)
        mechanism = found.get("mechanism")
        if mechanism not in MECHANISMS:
            self._fail(
                "privacy.mechanism", f"is {_brief(mechanism)}: must be {', '.join(MECHANISMS)}"
            )
        if mechanism == "none":
            least = self._whole(found.get("min_cell", 0), "privacy.min_cell")
            dropped = self._whole(found.get("suppressed_cells", 0), "privacy.suppressed_cells")
            return Privacy(min_cell=least, suppressed=dropped)
        numbers = []
        for name in ("epsilon", "delta", "scale", "variance"):
            value: Any = found.get(name)
            if not _number(value) or value < 0 or (name != "delta" and value == 0):
                self._fail(f"privacy.{name}", f"is {_brief(value)}: must be a positive number")
            numbers.append(float(value))
        return Privacy(mechanism, *numbers, names=str(found.get("names", "")))

    def _place(
        self, cell: dict[str, Any], where: str, question: Question, index: dict[str, int]
    ) -> tuple[Group, int, int]:
        group = cell.get("group")
        right = isinstance(group, list) and len(group) == len(question.attributes)
        if not right or not all(v is None or _is_text(v) for v in group):
            self._fail(f"{where}.group", f"must list {len(question.attributes)} name(s) or nulls")
        found = []
        for name in ("label", "decision"):
            value = cell.get(name)
            if not isinstance(value, str) or value not in index:
                self._fail(f"{where}.{name}", f"is {_brief(value)}: none of the classes")
            found.append(index[value])
        return tuple(group), found[0], found[1]

    def _fill(
        self, cell: dict[str, Any], where: str, question: Question, privacy: Privacy,
        table: np.ndarray, histogram: np.ndarray | None, decision: int,
        blur: Callable[[], np.ndarray],
    ) -> int:  # fmt: skip
        """Put a cell where it belongs; the rows it shows."""
        noisy, least = privacy.mechanism != "none", privacy.min_cell
        if cell.get("count") is None:
            if least < 3:
                self._fail(f"{where}.count", "is missing, and the file declares no --min-cell")
            table[:] = withheld(least, len(table), len(question.classes))
            return 0
        count = self._whole(cell["count"], f"{where}.count", least=-LARGEST if noisy else 0)
        if 0 < count < least:
            self._fail(f"{where}.count", f"is {count}, and the file declares --min-cell {least}")
        table[COUNT] = count
        if not count and not noisy and "scores" not in cell:  # a group without rows has its name
            return 0
        possible = feasible(question)[decision]
        if noisy:
            table[NOISE] = privacy.variance * possible.sum()
        if histogram is None:  # without scores, or they are withheld; older files have their sums
            table[SCORES:] = unsaid(count, len(question.classes))
            return count
        few = not noisy and 0 < count < self.least and "scores" not in cell
        scores = {} if few else self._get(cell, "scores", f"{where}.scores", dict)
        held = np.flatnonzero(possible)
        for s, c in enumerate(question.score_classes):
            place = f"{where}.scores[{_brief(question.classes[c])}]"
            if few:
                widths = [int(held[-1] - held[0]) + 1]
                entry = {"first_bin": int(held[0]), "histogram": [count], "widths": widths}
            else:
                entry = self._get(scores, question.classes[c], place, dict)
            table[SCORES + s] = self._histogram(
                entry, place, possible, noisy, count, histogram[s], lambda s=s: blur()[:, s]
            )
        if few and len(question.classes) > 2:
            table[SCORES:] = unsaid(count, len(question.classes))
        return count

    def _histogram(
        self,
        entry: dict[str, Any],
        where: str,
        possible: np.ndarray,
        noisy: bool,
        count: int,
        out: np.ndarray,
        blur: Callable[[], np.ndarray],
    ) -> float:
        """Put it in its place; the sum of the cell's scores, by middles of bins if none is said."""
        first = self._whole(entry.get("first_bin"), f"{where}.first_bin")
        numbers = self._get(entry, "histogram", f"{where}.histogram", list)
        bins = len(out)
        if not numbers or set(map(type, numbers)) != {int}:
            self._fail(f"{where}.histogram", "must hold whole numbers")
        widths = self._widths(entry, where, len(numbers), bins, noisy)
        last = first + (len(numbers) if widths is None else sum(widths))
        if last > bins:
            self._fail(f"{where}.histogram", f"has more than {bins} bins")
        if min(numbers) < (-LARGEST if noisy else 0) or max(numbers) > LARGEST:
            self._fail(f"{where}.histogram", "holds a number that is negative or too large")
        if not noisy and sum(numbers) != count:
            self._fail(f"{where}.histogram", f"adds up to {sum(numbers)}, the count is {count}")
        if not noisy and count >= self.least and any(0 < n < self.least for n in numbers):
            self._fail(f"{where}.histogram", f"has a number below {self.least}, the min_bin")
        low = high = out
        if widths is None:
            out[first:last] = numbers
        else:
            out[first:last] = np.repeat(np.array(numbers) / widths, widths)
            ends = first + np.cumsum(widths)
            low, high = np.zeros(bins), np.zeros(bins)
            low[ends - widths] = numbers
            high[ends - 1] = numbers
            blur()[:2] = low - out, high - out
        if not possible[first:last].all() and out[~possible].any():
            self._fail(f"{where}.histogram", "has rows on the other side of the threshold")
        middle = float(out @ middles(bins))
        if noisy or "sum" not in entry:
            if widths is not None:
                blur()[2, 0] = max(float((high - out) @ middles(bins)), 0.0)
            return middle
        half = count / bins / 2
        ends = (float(low @ middles(bins)) - half, float(high @ middles(bins)) + half)
        return self._between(entry, where, *ends)

    def _widths(
        self, entry: dict[str, Any], where: str, numbers: int, bins: int, noisy: bool
    ) -> list[int] | None:
        """How many bins each number is of; None where each is of one."""
        if "widths" not in entry:
            return None
        widths = self._get(entry, "widths", f"{where}.widths", list)
        right = len(widths) == numbers and all(type(w) is int and 1 <= w <= bins for w in widths)
        if noisy or not right:
            self._fail(f"{where}.widths", f"must hold {numbers} whole numbers, 1 to {bins}")
        return widths

    def _between(self, entry: dict[str, Any], where: str, low: float, high: float) -> float:
        total: Any = entry.get("sum")
        if not _number(total) or not low - 1e-5 <= total <= high + 1e-5:
            self._fail(
                f"{where}.sum", f"is {_brief(total)}: the rows add up to {low:.6g} to {high:.6g}"
            )
        return float(total)

    def _rows(self, counted: int, privacy: Privacy) -> tuple[float, float]:
        rows = self._get(self.found, "rows", "rows", dict)
        noisy = privacy.mechanism != "none"
        least = -LARGEST if noisy else 0
        said = self._whole(rows.get("counted"), "rows.counted", least=least)
        if said != counted and not noisy:
            self._fail("rows.counted", f"is {said}, but the cells add up to {counted}")
        out = []
        for name in ("label_missing", "prediction_missing"):
            value = rows.get(name)
            if value is None and name in rows and privacy.min_cell:
                out.append(privacy.min_cell / 2)
            else:
                out.append(float(self._whole(value, f"rows.{name}", least=least)))
        return out[0], out[1]

    def _names(self, name: str) -> tuple[str, ...]:
        found = self._get(self.found, name, name, list)
        if not all(_is_text(v) for v in found) or len(set(found)) != len(found):
            self._fail(name, "must be a list of different names")
        return tuple(found)

    def _text(self, place: dict[str, Any], name: str, where: str) -> str:
        text = self._get(place, name, where, str)
        if not text.strip() or not _is_text(text):
            self._fail(where, "is empty or no proper text")
        return text

    def _get(self, place: dict[str, Any], name: str, where: str, kind: type) -> Any:
        if not isinstance(place.get(name), kind):
            words = {list: "a list", dict: "an object", str: "a text"}
            self._fail(where, f"is missing or is not {words[kind]}")
        return place[name]

    def _whole(self, value: Any, where: str, *, least: int = 0) -> int:
        if type(value) is not int or not least <= value <= LARGEST:
            more = ", 0 or more" if least == 0 else ""
            self._fail(where, f"is {_brief(value)}: must be a whole number{more}")
        return value

    def _fail(self, where: str, what: str) -> NoReturn:
        raise FedgftError(f"{self.source}: {where} {what}")


def _brief(value: Any) -> str:
    """Whoever wrote the file decides how long it is, not how long our line is."""
    return repr(value)[:40]


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _is_text(value: Any) -> bool:
    """Half a character, which JSON can write and a file cannot, is no text."""
    if not isinstance(value, str) or value.isascii():
        return isinstance(value, str)
    return not any("\ud800" <= c <= "\udfff" for c in value)
