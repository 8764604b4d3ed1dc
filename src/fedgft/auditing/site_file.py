"""Write and read the file that a site sends: readable JSON that contains only sums.

docs/audit.md describes every field. Every number about scores covers at least `MIN_BIN` rows:
histogram bins with fewer rows are merged with their neighbors. Every field is checked when a file
is read. A count that is not a whole number, or counts that do not add up, raise an error that names
the file and the field. If the file declares noise, counts may be negative and need not add up.
"""

import glob
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fedgft.errors import FedgftError
from fedgft.privacy.suppression import (
    bin_middles,
    placeholder_scores,
    possible_cells,
    suppressed_cell,
)
from fedgft.store import atomic_write, expand_user
from fedgft.sums import (
    COUNT,
    MAX_BINS,
    MAX_WHOLE_NUMBER,
    NOISE,
    SCORES,
    SLACK,
    Group,
    MeasurementSpec,
    Privacy,
    RecordReader,
    SiteSums,
    SiteTables,
    is_text,
    merge,
)

FORMAT = "fedgft-sums-2"
READABLE_FORMATS = (FORMAT, "fedgft-sums-1")  # files of format 1 hold every bin of a histogram
MIN_SUM_ROWS = 10  # a sum of scores is written only if it covers at least this many rows
MIN_BIN = 5  # every other number about scores covers at least this many rows
COARSE_BINS = 20  # number of parts of [0, 1]; bins with few rows are merged within a part first
MAX_BYTES = 64 * 2**20  # largest size of a file
MAX_NUMBERS = 50_000_000  # largest number of entries in the tables and histograms of a file
MECHANISMS = ("none", "discrete laplace", "discrete gaussian")
PRIVACY_UNIT = "one row added or removed changes one count of the finest table by 1"
REPORT_PREFIXES = (b'{\n  "format": "fedgft-audit', b'{\n  "format": "fedgft-comparison')


def write_sums(sums: SiteSums, path: str | Path, *, min_bin: int = MIN_BIN) -> Path:
    """Write the sums of one site to a file and return its path.

    Parameters
    ----------
    sums
        The sums of one site, with a name.
    path
        The path of the file. An existing file is replaced only when the new one is complete.
    min_bin
        The smallest number of rows that a number about scores may cover.
    """
    file = expand_user(path)
    text = to_json(sums, min_bin=min_bin)
    with atomic_write(file, private=True) as part:
        part.write(text.encode())
    return file


def to_json(sums: SiteSums, *, min_bin: int = MIN_BIN) -> str:
    """Return the text of a site's file: one line per field and one per cell that has rows."""
    if min_bin < 1:
        raise FedgftError(f"min_bin {min_bin}: must be at least 1")
    if len(sums.sites) != 1:
        raise FedgftError(f"a file holds the sums of one site, not of {len(sums.sites)}")
    ((name, site),) = sums.sites.items()
    if not name.strip():
        raise FedgftError('the site has no name: measure(..., site="north")')
    if len(site.privacy) > 1:
        raise FedgftError("these sums were protected more than once; measure the site in one go")
    spec = sums.require_spec()
    privacy = site.privacy[0] if site.privacy else Privacy()
    cells = [cell for group in sums.groups for cell in _write_cells(group, sums, privacy, min_bin)]
    head = {
        "format": FORMAT,
        "made_by": f"fedgft {version('fedgft')}",
        "site": name,
        "classes": list(spec.classes),
        "groups": list(spec.attributes),
        "threshold": spec.threshold,
        "bins": spec.bins if spec.scored else None,
        "min_bin": min_bin if spec.scored and privacy == Privacy() else 0,
        "rows": {
            "counted": sum(cell["count"] for cell in cells if cell["count"] is not None),
            "label_missing": _hide_small(site.label_missing, privacy),
            "prediction_missing": _hide_small(site.prediction_missing, privacy),
        },
        "privacy": _write_privacy(privacy),
        "reveals": _count_small(cells),
    }
    lines = [f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in head.items()]
    body = ",\n  ".join(json.dumps(cell, ensure_ascii=False) for cell in cells)
    return "{\n" + ",\n".join(lines) + ',\n"cells": [\n  ' + body + "\n]\n}\n"


def count_revealed(sums: SiteSums, *, min_bin: int = MIN_BIN) -> dict[str, int]:
    """Return how many counts the file holds, and how many of these cover only few people.

    `cells` and `score_counts` are the numbers of counts of people and of scores. `cells_below_10`
    and `score_counts_below_5` are the numbers of those counts that are below 10 and below 5.
    """
    return json.loads(to_json(sums, min_bin=min_bin))["reveals"]


def _count_small(cells: list[dict[str, Any]]) -> dict[str, int]:
    """Count all counts in these cells, and those that cover only few people.

    See `count_revealed` for the keys.
    """
    counts = [cell["count"] for cell in cells if cell["count"] is not None]
    scores = [n for cell in cells for s in cell.get("scores", {}).values() for n in s["histogram"]]
    return {
        "cells": len(counts),
        "cells_below_10": sum(0 < n < MIN_SUM_ROWS for n in counts),
        "score_counts": sum(n != 0 for n in scores),
        "score_counts_below_5": sum(0 < n < MIN_BIN for n in scores),
    }


def _write_privacy(privacy: Privacy) -> dict[str, Any]:
    """Return the object `privacy` of the file: suppression, or the noise and its budget."""
    if privacy.mechanism == "none":
        fields: dict[str, Any] = {"mechanism": "none", "min_cell": privacy.min_cell}
        return fields | ({"suppressed_cells": privacy.suppressed} if privacy.min_cell else {})
    names = ("mechanism", "epsilon", "delta", "scale", "variance", "names")
    return {name: getattr(privacy, name) for name in names} | {
        "sensitivity": 1,
        "unit": PRIVACY_UNIT,
    }


def _hide_small(count: float, privacy: Privacy) -> int | None:
    """Return a number of rows, or None if it is so small that it must be withheld."""
    return None if 0 < count < privacy.min_cell else int(count)


def _write_cells(
    group: Group, sums: SiteSums, privacy: Privacy, min_bin: int
) -> Iterator[dict[str, Any]]:
    """Yield the cells of one group that have rows.

    For a group without rows, yield one cell with a count of 0, so that the file names the group.
    """
    spec = sums.require_spec()
    (site,) = sums.sites.values()
    table = site.tables[group]
    noisy = privacy.mechanism != "none"
    if not table[..., [COUNT, NOISE]].any():
        name = spec.classes[0]
        yield {"group": list(group), "label": name, "decision": name, "count": 0}
        return
    for label, decision in np.ndindex(table.shape[:2]):
        values = table[label, decision]
        if not values[COUNT] and not values[NOISE]:
            continue
        cell: dict[str, Any] = {
            "group": list(group),
            "label": spec.classes[label],
            "decision": spec.classes[decision],
            "count": None if values[SLACK] else int(values[COUNT]),
        }
        shown = noisy or values[COUNT] >= min_bin
        if group in sums.histogram and not privacy.min_cell and shown and spec.scored:
            cell["scores"] = {}
            possible = possible_cells(spec)[decision]
            for s, c in enumerate(spec.score_classes):
                counts = sums.histogram[group][label, decision, s]
                if noisy:
                    entry = _write_noisy_scores(counts, possible)
                else:
                    bin_error = sums.bin_error.get(group)
                    if bin_error is not None:
                        bin_error = bin_error[:2, label, decision, s]
                    blocks = _histogram_blocks(counts, bin_error, possible, min_bin)
                    total = values[SCORES + s] if counts.sum() >= MIN_SUM_ROWS else None
                    entry = _write_scores(total, blocks)
                cell["scores"][spec.classes[c]] = entry
        yield cell


def _write_noisy_scores(counts: np.ndarray, possible: np.ndarray) -> dict[str, Any]:
    """Return the histogram over all possible bins, without a sum of scores.

    Bins at the ends are kept even if they are empty, because the first bin with rows would reveal
    the lowest score, which belongs to one person.
    """
    bins = np.flatnonzero(possible)
    return {"first_bin": int(bins[0]), "histogram": [int(n) for n in counts[bins]]}


class Block(NamedTuple):
    """Neighboring bins of a histogram that are written as one number."""

    first: int  # position of the first bin
    rows: int
    width: int  # number of bins


def _write_scores(total: float | None, blocks: list[Block]) -> dict[str, Any]:
    """Return the sum of a cell's scores, and its histogram without empty blocks at the ends."""
    filled = [i for i, block in enumerate(blocks) if block.rows]
    blocks = blocks[filled[0] : filled[-1] + 1]
    entry: dict[str, Any] = {} if total is None else {"sum": round(total, 6)}
    entry["first_bin"] = blocks[0].first
    entry["histogram"] = [block.rows for block in blocks]
    if any(block.width > 1 for block in blocks):
        entry["widths"] = [block.width for block in blocks]
    return entry


def _histogram_blocks(
    counts: np.ndarray, bin_error: np.ndarray | None, possible: np.ndarray, min_bin: int
) -> list[Block]:
    """Merge bins with few rows. If the sums were read from a file, keep the blocks of that file."""
    if bin_error is None or not bin_error.any():
        return merge_small_bins(counts, possible, min_bin)
    first, last = (np.rint(counts + shift) for shift in bin_error)
    starts = np.flatnonzero(first)
    ends = np.flatnonzero(last)
    if len(starts) != len(ends) or (first[starts] != last[ends]).any():
        raise FedgftError("sums that were read from several files cannot be written as one")
    blocks: list[Block] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        here = blocks[-1].first + blocks[-1].width if blocks else start
        blocks += [Block(i, 0, 1) for i in range(here, start)]
        blocks.append(Block(start, int(first[start]), end - start + 1))
    return blocks


def merge_small_bins(counts: np.ndarray, possible: np.ndarray, least: int) -> list[Block]:
    """Merge bins into blocks that each have no rows or at least `least` rows.

    If the cell has fewer than `least` rows in all, one block holds all of them. [0, 1] is divided
    into 20 fixed parts. If every bin of a part has enough rows or none, the bins of that part are
    not merged; otherwise the whole part is one block. A block with too few rows is merged with the
    next part, and the last such block with the one before it. So an edge between two blocks is the
    edge of a part, unless the bins on both sides of it have enough rows or none.

    Parameters
    ----------
    counts
        (bins,): the rows in each bin.
    possible
        (bins,): whether a row can be in the bin.
    least
        The smallest number of rows.
    """
    bins = len(counts)
    size = bins // COARSE_BINS if bins % COARSE_BINS == 0 else 1
    inside = np.flatnonzero(possible)
    blocks: list[Block] = []
    for part in range(int(inside[0]) // size, int(inside[-1]) // size + 1):
        within = range(part * size, (part + 1) * size)
        new = [Block(i, int(counts[i]), 1) for i in within if possible[i]]
        if any(0 < block.rows < least for block in new):
            new = [_merge_blocks(new)]
        if blocks and 0 < blocks[-1].rows < least:
            new = [_merge_blocks([blocks.pop(), *new])]
        blocks += new
    while len(blocks) > 1 and 0 < blocks[-1].rows < least:
        blocks[-2:] = [_merge_blocks(blocks[-2:])]
    return blocks


def _merge_blocks(blocks: list[Block]) -> Block:
    """Merge neighboring blocks into one."""
    return Block(blocks[0].first, sum(b.rows for b in blocks), sum(b.width for b in blocks))


def read_sums(path: str | Path) -> SiteSums:
    """Read and check the file of one site."""
    file = expand_user(path)
    try:
        if file.exists() and not file.is_file():
            problem = "not a file"
        elif file.stat().st_size > MAX_BYTES:
            problem = "too large for a file of sums, which has a few kilobytes"
        else:
            return from_json(file.read_bytes().decode("utf-8"), source=str(path))
    except FileNotFoundError:
        problem = "no such file"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        problem = "not a file of sums that fedgft wrote (not text)"
    raise FedgftError(f"{path}: {problem}", kind="file") from None


def from_json(text: str, *, source: str) -> SiteSums:
    """Read and check the text of a site's file; errors begin with `source`."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it ends too early or is damaged" if text.lstrip().startswith("{") else "not JSON"
        problem = f"{source}: not a whole file of sums: {reason} ({error})"
        raise FedgftError(problem, kind="file") from None
    form = found.get("format") if isinstance(found, dict) else None
    if not isinstance(form, str) or not form.startswith("fedgft-sums-"):
        problem = f"{source}: not a file of sums that `fedgft measure` wrote"
        raise FedgftError(problem, kind="file")
    if form not in READABLE_FORMATS:
        raise FedgftError(
            f"{source}: format is {form[:40]!r}, this version of fedgft reads {FORMAT!r}; "
            "measure the site again, or use the version that wrote it",
            kind="file",
        )
    reader = RecordReader(found, source)
    spec = _read_spec(reader)
    privacy = _read_privacy(reader)
    return _FileReader(reader, spec, privacy, reader.whole_number("min_bin", default=0)).read()


def _refuse_constant(constant: str) -> NoReturn:
    """Raise an error for NaN and Infinity, which Python's parser accepts but JSON forbids."""
    raise ValueError(f"{constant} is not a number")


@dataclass
class _FileReader:
    """Turns the JSON of one file into sums, field by field."""

    reader: RecordReader
    spec: MeasurementSpec
    privacy: Privacy
    min_bin: int  # smallest number of rows that a number about scores may cover
    bin_error: dict[Group, np.ndarray] = field(default_factory=dict)

    @property
    def noisy(self) -> bool:
        """Whether noise was added to the counts."""
        return self.privacy.mechanism != "none"

    @property
    def least(self) -> int:
        """The smallest valid count, which is negative with noise."""
        return -MAX_WHOLE_NUMBER if self.noisy else 0

    def read(self) -> SiteSums:
        """Return the sums of the file; raise a `FedgftError` that names the first wrong field."""
        spec = self.spec
        site = self.reader.text("site")
        cells = self._find_cells()
        has_histograms = spec.scored and not self.privacy.min_cell
        size = spec.empty_table().size + has_histograms * spec.empty_histogram().size
        groups = dict.fromkeys(group for group, _, _ in cells)
        if len(groups) * size > MAX_NUMBERS:
            self.reader.fail("cells", "are of too many groups")
        tables = {group: spec.empty_table() for group in groups}
        histogram = {group: spec.empty_histogram() for group in groups if has_histograms}
        counted = 0
        for place, cell in cells.items():
            group, label, decision = place
            table = tables[group][label, decision]
            counted += self._read_count(cell, table)
            if cell.record.get("count") is not None and (table.any() or "scores" in cell.record):
                self._read_scores(cell, place, table, histogram.get(group))
        withheld = sum(cell.record.get("count") is None for cell in cells.values())
        if withheld != self.privacy.suppressed:
            problem = f"is {self.privacy.suppressed}, {withheld} are withheld"
            self.reader.fail("privacy.suppressed_cells", problem)
        made = SiteTables(
            tables,
            *self._read_missing(counted),
            privacy=() if self.privacy == Privacy() else (self.privacy,),
        )
        return SiteSums(spec, {site: made}, histogram, self.bin_error)

    def _find_cells(self) -> dict[tuple[Group, int, int], RecordReader]:
        """Return each cell by its group, label and decision."""
        index = {name: i for i, name in enumerate(self.spec.classes)}
        attributes = len(self.spec.attributes)
        out: dict[tuple[Group, int, int], RecordReader] = {}
        for i, record in enumerate(self.reader.get("cells", list)):
            if not isinstance(record, dict):
                self.reader.fail(f"cells[{i}]", "must be an object")
            cell = RecordReader(record, self.reader.source, f"cells[{i}].")
            group = record.get("group")
            valid = isinstance(group, list) and len(group) == attributes
            if not valid or not all(value is None or is_text(value) for value in group):
                cell.fail("group", f"must list {attributes} name(s) or nulls")
            for name in ("label", "decision"):
                value = record.get(name)
                if not isinstance(value, str) or value not in index:
                    cell.reject(name, "none of the classes")
            place = (tuple(group), index[record["label"]], index[record["decision"]])
            if place in out:
                problem = "is the second cell of this group, label and decision"
                self.reader.fail(f"cells[{i}]", problem)
            out[place] = cell
        return out

    def _read_count(self, cell: RecordReader, table: np.ndarray) -> int:
        """Write a cell's count, noise and slack into `table`; return the count, 0 if withheld."""
        min_cell = self.privacy.min_cell
        if cell.record.get("count") is None:
            if min_cell < 3:
                cell.fail("count", "is missing, and the file declares no `min_cell`")
            table[:] = suppressed_cell(min_cell, len(table), len(self.spec.classes))
            return 0
        count = cell.whole_number("count", least=self.least)
        if 0 < count < min_cell:
            cell.fail("count", f"is {count}, and the file declares `min_cell` {min_cell}")
        table[COUNT] = count
        if self.noisy:
            decision = self.spec.classes.index(cell.record["decision"])
            table[NOISE] = self.privacy.variance * possible_cells(self.spec)[decision].sum()
        return count

    def _read_scores(
        self,
        cell: RecordReader,
        place: tuple[Group, int, int],
        table: np.ndarray,
        histogram: np.ndarray | None,
    ) -> None:
        """Write a cell's sums of scores into `table`, and its histograms into `histogram`.

        `histogram` is None if the file has no histograms.
        """
        group, label, decision = place
        spec = self.spec
        count = int(table[COUNT])
        if histogram is None:  # no scores, or they are withheld
            table[SCORES:] = placeholder_scores(count, len(spec.classes))
            return
        possible = possible_cells(spec)[decision]
        few = not self.noisy and 0 < count < self.min_bin and "scores" not in cell.record
        scores = {} if few else cell.get("scores", dict)
        for s, c in enumerate(spec.score_classes):
            name = spec.classes[c]
            if few:  # the rows may lie anywhere in the possible bins
                bins = np.flatnonzero(possible)
                width = int(bins[-1] - bins[0]) + 1
                scores[name] = {"first_bin": int(bins[0]), "histogram": [count], "widths": [width]}
            entry = scores.get(name)
            key = f"scores[{repr(name)[:40]}]"
            if not isinstance(entry, dict):
                cell.fail(key, "is missing or is not an object")
            reader = RecordReader(entry, cell.source, f"{cell.path}{key}.")
            found = self._read_histogram(reader, possible, count)
            histogram[label, decision, s] = found.counts
            table[SCORES + s] = found.total
            if found.bin_error is not None:
                if group not in self.bin_error:
                    self.bin_error[group] = np.zeros((3, *histogram.shape))
                self.bin_error[group][:, label, decision, s] = found.bin_error
        if few and len(spec.classes) > 2:
            table[SCORES:] = placeholder_scores(count, len(spec.classes))

    def _read_histogram(
        self, entry: RecordReader, possible: np.ndarray, count: int
    ) -> "_Histogram":
        """Read the scores of one cell for one class.

        Parameters
        ----------
        entry
            ``first_bin``, ``histogram``, and perhaps ``widths`` and ``sum``.
        possible
            (bins,): whether a row with the decision of the cell can be in the bin.
        count
            The rows of the cell, which the histogram must add up to unless there is noise.
        """
        bins = len(possible)
        first = entry.whole_number("first_bin")
        numbers = entry.get("histogram", list)
        if not numbers or set(map(type, numbers)) != {int}:
            entry.fail("histogram", "must hold whole numbers")
        widths = self._read_widths(entry, len(numbers), bins)
        last = first + sum(widths)
        if last > bins:
            entry.fail("histogram", f"has more than {bins} bins")
        if min(numbers) < self.least or max(numbers) > MAX_WHOLE_NUMBER:
            entry.fail("histogram", "holds a number that is negative or too large")
        if not self.noisy and sum(numbers) != count:
            entry.fail("histogram", f"adds up to {sum(numbers)}, the count is {count}")
        if not self.noisy and count >= self.min_bin and any(0 < n < self.min_bin for n in numbers):
            entry.fail("histogram", f"has a number below {self.min_bin}, the min_bin")
        # the estimated histogram, and those with all rows in the first or last bin of their block
        counts, lowest, highest = np.zeros((3, bins))
        ends = first + np.cumsum(widths)
        counts[first:last] = np.repeat(np.array(numbers) / widths, widths)
        lowest[ends - widths] = numbers
        highest[ends - 1] = numbers
        if not possible[first:last].all() and counts[~possible].any():
            entry.fail("histogram", "has rows on the other side of the threshold")
        middles = bin_middles(bins)
        bin_error = None
        if "widths" in entry.record:
            bin_error = np.stack((lowest - counts, highest - counts, 0 * counts))
        if self.noisy or "sum" not in entry.record:
            if bin_error is not None:
                bin_error[2, 0] = max(float(bin_error[1] @ middles), 0.0)
            return _Histogram(counts, float(counts @ middles), bin_error)
        half = count / bins / 2
        low = float(lowest @ middles) - half
        high = float(highest @ middles) + half
        total = entry.record["sum"]
        if not _is_number(total) or not low - 1e-5 <= total <= high + 1e-5:
            entry.reject("sum", f"the rows add up to {low:.6g} to {high:.6g}")
        return _Histogram(counts, float(total), bin_error)

    def _read_widths(self, entry: RecordReader, numbers: int, bins: int) -> list[int]:
        """Return how many bins each number of the histogram covers."""
        if "widths" not in entry.record:
            return [1] * numbers
        widths = entry.get("widths", list)
        valid = len(widths) == numbers and all(type(w) is int and 1 <= w <= bins for w in widths)
        if self.noisy or not valid:
            entry.fail("widths", f"must hold {numbers} whole numbers, 1 to {bins}")
        return widths

    def _read_missing(self, counted: int) -> tuple[float, float]:
        """Return the numbers of rows without a label and without a prediction."""
        rows = self.reader.child("rows")
        found = rows.whole_number("counted", least=self.least)
        if found != counted and not self.noisy:
            rows.fail("counted", f"is {found}, but the cells add up to {counted}")
        missing = []
        for name in ("label_missing", "prediction_missing"):
            withheld = self.privacy.min_cell and rows.record.get(name, 0) is None
            number = self.privacy.min_cell / 2
            missing.append(number if withheld else rows.whole_number(name, least=self.least))
        return float(missing[0]), float(missing[1])


class _Histogram(NamedTuple):
    """The scores of one cell for one class."""

    counts: np.ndarray  # (bins,)
    total: float  # the sum of the scores; if the file has none, computed from the bins' middles
    bin_error: np.ndarray | None  # (3, bins): see `SiteSums`


def _read_spec(reader: RecordReader) -> MeasurementSpec:
    """Read what was measured: the classes, groups, threshold and bins of the file."""
    classes = reader.names("classes")
    attributes = reader.names("groups")
    threshold = reader.record.get("threshold")
    bins = reader.record.get("bins")
    if threshold is not None and not (_is_number(threshold) and 0 <= threshold <= 1):
        reader.reject("threshold", "must be a number in [0, 1], or null")
    if bins is not None and not (type(bins) is int and 2 <= bins <= MAX_BINS):
        reader.reject("bins", f"must be a whole number from 2 to {MAX_BINS}, or null")
    threshold = None if threshold is None else float(threshold)
    try:
        return MeasurementSpec(classes, attributes, threshold, bins is not None, bins or 100)
    except FedgftError as error:
        raise FedgftError(f"{reader.source}: {error}", kind="data") from None


def _read_privacy(file: RecordReader) -> Privacy:
    """Read how the numbers are protected, from the object `privacy` of the file."""
    reader = file.child("privacy")
    mechanism = reader.record.get("mechanism")
    if mechanism not in MECHANISMS:
        reader.reject("mechanism", f"must be {', '.join(MECHANISMS)}")
    if mechanism == "none":
        return Privacy(
            min_cell=reader.whole_number("min_cell", default=0),
            suppressed=reader.whole_number("suppressed_cells", default=0),
        )
    numbers: dict[str, Any] = {}
    for name in ("epsilon", "delta", "scale", "variance"):
        value: Any = reader.record.get(name)
        if not _is_number(value) or value < 0 or (name != "delta" and value == 0):
            reader.reject(name, "must be a positive number")
        numbers[name] = float(value)
    return Privacy(mechanism, names=str(reader.record.get("names", "")), **numbers)


def _is_number(value: Any) -> bool:
    """Return whether the value is a finite int or float, and not a bool."""
    return type(value) in (int, float) and abs(value) <= MAX_WHOLE_NUMBER


def find_site_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files of sites, sorted within each path.

    A path is a file, a folder, or a glob pattern that the shell has not expanded. A folder stands
    for its .json files, except the reports of `fedgft audit`.
    """
    found: list[Path] = []
    for path in paths:
        place = expand_user(path)
        inside = [place]
        if place.is_dir():
            inside = [f for f in place.glob("*.json") if f.is_file() and not is_report(f)]
        elif not place.exists() and glob.has_magic(str(place)):
            inside = [Path(name) for name in glob.glob(str(place))]
        if not inside:
            problem = "a folder without .json files" if place.is_dir() else "no file matches"
            raise FedgftError(f"{path}: {problem}", kind="file")
        found += sorted(inside)
    if not found:
        text = "name the files of sums that the sites made with `fedgft measure`"
        raise FedgftError(text, kind="missing")
    return found


def is_report(path: Path) -> bool:
    """Return whether `fedgft audit --out` wrote the file.

    Such a report may lie in the same folder as the files of the sites.
    """
    with path.open("rb") as file:
        return file.read(40).startswith(REPORT_PREFIXES)


def gather(files: Iterable[Path], on_file: Callable[[int], None] | None = None) -> SiteSums:
    """Read files of sites and merge their sums.

    Two files of the same site, or sites that measured different things, are errors. Files are read
    one at a time, because the histograms of ten thousand sites would not fit into memory, but their
    sum does.

    Parameters
    ----------
    files
        One file per site.
    on_file
        Called after each file with the number of files read.
    """
    return merge(_read_each_site(files, on_file))


def _read_each_site(
    files: Iterable[Path], on_file: Callable[[int], None] | None
) -> Iterator[SiteSums]:
    """Yield the sums of each file; raise a `FedgftError` for a second file of a site."""
    file_of: dict[str, Path] = {}
    spec: MeasurementSpec | None = None
    for file in files:
        sums = read_sums(file)
        (site,) = sums.sites
        if site in file_of:
            raise FedgftError(
                f"{file}: site '{site}' is in {file_of[site]} already; a site counts once "
                "(`name` tells sites apart)",
                kind="conflict",
            )
        file_of[site] = file
        try:
            spec = sums.require_spec() if spec is None else spec.combine(sums.require_spec())
        except FedgftError as error:
            first = next(iter(file_of.values()))
            raise FedgftError(f"{first} and {file}: {error}", kind="conflict") from None
        yield sums
        if on_file:
            on_file(len(file_of))
