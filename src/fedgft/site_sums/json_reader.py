"""Read the file of a site, whose content is not trusted.

Every field is checked. A count that is not a whole number, or counts that do not add up, raise an
error that names the file and the field. If the file declares noise, counts may be negative and need
not add up.
"""

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fedgft.errors import FedgftError
from fedgft.site_sums.dates import check_date, check_version
from fedgft.site_sums.json_writer import FORMAT, FORMAT_3
from fedgft.site_sums.tables import (
    COUNT,
    MAX_BINS,
    NOISE,
    ROWS,
    SCORES,
    SQUARES,
    Group,
    MeasurementSpec,
    Privacy,
    RandomizedGroups,
    SiteRecord,
    SiteTables,
    bin_middles,
    placeholder_scores,
    possible_cells,
    suppressed_cell,
)
from fedgft.sums import MAX_WHOLE_NUMBER, RecordReader, is_text

# Files of format 1 hold every bin of a histogram.
READABLE_FORMATS = (FORMAT_3, FORMAT, "fedgft-sums-1")
MAX_SQUARES = 1e30  # largest sum of squared weights
TOLERANCE = 1e-9  # of sums of weights, which are rounded to twelve digits
MAX_NUMBERS = 50_000_000  # largest number of entries in the tables and histograms of a file
MECHANISMS = ("none", "discrete laplace", "discrete gaussian")


def read_site(text: str, *, source: str) -> SiteRecord:
    """Read and check the text of a site's file; errors begin with `source`."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it ends too early or is damaged" if text.lstrip().startswith("{") else "not JSON"
        problem = f"{source}: not a whole file of sums: {reason} ({error})"
        raise FedgftError(problem, kind="file") from None
    form = found.get("format") if isinstance(found, dict) else None
    if isinstance(form, str) and form.startswith("fedgft-regression-"):
        text = "holds sums of a numeric outcome, not counts of classes: audit such files by"
        text += " themselves (in Python: read_regression_sums and audit_regression)"
        raise FedgftError(f"{source}: {text}", kind="conflict")
    if not isinstance(form, str) or not form.startswith("fedgft-sums-"):
        problem = f"{source}: not a file of sums that `fedgft measure` wrote"
        raise FedgftError(problem, kind="file")
    if form not in READABLE_FORMATS:
        raise FedgftError(
            f"{source}: format is {form[:40]!r}, this version of fedgft reads {FORMAT_3!r}; "
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
    bin_rows: dict[Group, np.ndarray] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The column of a table with the number of rows."""
        return ROWS if self.spec.is_weighted else COUNT

    @property
    def noisy(self) -> bool:
        """Whether noise was added to the counts."""
        return self.privacy.mechanism != "none"

    @property
    def least(self) -> int:
        """The smallest valid count, which is negative with noise."""
        return -MAX_WHOLE_NUMBER if self.noisy else 0

    def read(self) -> SiteRecord:
        """Return the sums of the file; raise a `FedgftError` that names the first wrong field."""
        spec = self.spec
        site = self.reader.text("site")
        cells = self._find_cells()
        has_histograms = spec.scored and not self.privacy.min_cell
        copies = has_histograms * (1 + spec.is_weighted)
        size = spec.empty_table().size + copies * spec.empty_histogram().size
        groups = dict.fromkeys(group for group, _, _ in cells)
        if len(groups) * size > MAX_NUMBERS:
            self.reader.fail("cells", "are of too many groups")
        tables = {group: spec.empty_table() for group in groups}
        histogram = {group: spec.empty_histogram() for group in groups if has_histograms}
        if spec.is_weighted:
            self.bin_rows = {group: spec.empty_histogram() for group in histogram}
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
        return SiteRecord(spec, site, made, histogram, self.bin_error, self.bin_rows)

    def _find_cells(self) -> dict[tuple[Group, int, int], RecordReader]:
        """Return each cell by its group, label and decision."""
        index = {name: i for i, name in enumerate(self.spec.classes)}
        sizes = {"group": len(self.spec.attributes), "given": len(self.spec.given)}
        out: dict[tuple[Group, int, int], RecordReader] = {}
        for i, record in enumerate(self.reader.get("cells", list)):
            if not isinstance(record, dict):
                self.reader.fail(f"cells[{i}]", "must be an object")
            cell = RecordReader(record, self.reader.source, f"cells[{i}].")
            group: list[str | None] = []
            for name, size in sizes.items():
                values = record.get(name, [] if name == "given" else None)
                valid = isinstance(values, list) and len(values) == size
                if not valid or not all(value is None or is_text(value) for value in values):
                    cell.fail(name, f"must list names or nulls, {size} in all")
                group += values
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
            weight = self.privacy.max_weight if self.spec.is_weighted else None
            classes = len(self.spec.classes)
            table[:] = suppressed_cell(min_cell, len(table), classes, max_weight=weight)
            return 0
        count = cell.whole_number("count", least=self.least)
        if 0 < count < min_cell:
            cell.fail("count", f"is {count}, and the file declares `min_cell` {min_cell}")
        table[COUNT] = count
        if self.spec.is_weighted:
            table[[COUNT, SQUARES]] = self._read_weights(cell, count)
            table[ROWS] = count
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
        count = int(table[self.rows])
        weight = float(table[COUNT])
        if histogram is None:  # no scores, or they are withheld
            table[SCORES:] = placeholder_scores(weight, len(spec.classes))
            return
        possible = possible_cells(spec)[decision]
        few = not self.noisy and 0 < count < self.min_bin and "scores" not in cell.record
        scores = {} if few else cell.get("scores", dict)
        for s, c in enumerate(spec.score_classes):
            name = spec.classes[c]
            if few:  # the rows may lie anywhere in the possible bins
                bins = np.flatnonzero(possible)
                width = int(bins[-1] - bins[0]) + 1
                scores[name] = {
                    "first_bin": int(bins[0]),
                    "histogram": [count],
                    "widths": [width],
                    "weights": [weight],
                }
            entry = scores.get(name)
            key = f"scores[{repr(name)[:40]}]"
            if not isinstance(entry, dict):
                cell.fail(key, "is missing or is not an object")
            reader = RecordReader(entry, cell.source, f"{cell.path}{key}.")
            found = self._read_histogram(reader, possible, count, weight)
            histogram[label, decision, s] = found.counts
            if spec.is_weighted:
                self.bin_rows[group][label, decision, s] = found.rows
            table[SCORES + s] = found.total
            if found.bin_error is not None:
                if group not in self.bin_error:
                    self.bin_error[group] = np.zeros((3, *histogram.shape))
                self.bin_error[group][:, label, decision, s] = found.bin_error
        if few and len(spec.classes) > 2:
            table[SCORES:] = placeholder_scores(weight, len(spec.classes))

    def _read_histogram(
        self, entry: RecordReader, possible: np.ndarray, count: int, weight: float
    ) -> "_Histogram":
        """Read the scores of one cell for one class.

        Parameters
        ----------
        entry
            ``first_bin``, ``histogram``, and perhaps ``widths``, ``sum`` and ``weights``.
        possible
            (bins,): whether a row with the decision of the cell can be in the bin.
        count
            The rows of the cell, which the histogram must add up to unless there is noise.
        weight
            The sum of the weights of these rows; without weights, their number.
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
        counts, lowest, highest, rows = np.zeros((4, bins))
        ends = first + np.cumsum(widths)
        rows[first:last] = np.repeat(np.array(numbers) / widths, widths)
        weights = self._read_bin_weights(entry, numbers, weight)
        counts[first:last] = np.repeat(np.array(weights) / widths, widths)
        lowest[ends - widths] = weights
        highest[ends - 1] = weights
        if not possible[first:last].all() and counts[~possible].any():
            entry.fail("histogram", "has rows on the other side of the threshold")
        middles = bin_middles(bins)
        bin_error = None
        if "widths" in entry.record:
            bin_error = np.stack((lowest - counts, highest - counts, 0 * counts))
        if self.noisy or "sum" not in entry.record:
            if bin_error is not None:
                bin_error[2, 0] = max(float(bin_error[1] @ middles), 0.0)
            return _Histogram(counts, float(counts @ middles), bin_error, rows)
        half = weight / bins / 2
        low = float(lowest @ middles) - half
        high = float(highest @ middles) + half
        total = entry.record["sum"]
        slack = 1e-5 * max(1.0, weight / max(count, 1))
        if not _is_number(total) or not low - slack <= total <= high + slack:
            entry.reject("sum", f"the rows add up to {low:.6g} to {high:.6g}")
        return _Histogram(counts, float(total), bin_error, rows)

    def _read_weights(self, cell: RecordReader, count: int) -> tuple[float, float]:
        """Return the sums of the weights of a cell's rows, and of their squares."""
        found = []
        for name in ("weight", "squares"):
            value = cell.record.get(name, 0 if count == 0 else None)
            if type(value) not in (int, float) or not 0 <= value <= MAX_SQUARES:
                cell.reject(name, "must be a sum of weights, which are positive")
            found.append(float(value))
        weight, squares = found
        least = weight**2 / max(count, 1) * (1 - TOLERANCE)
        if (weight > 0) != (count > 0) or not least <= squares <= weight**2 * (1 + TOLERANCE):
            text = f"is {squares:.6g}: not possible for {count} rows of total weight {weight:.6g}"
            cell.fail("squares", text)
        return weight, squares

    def _read_bin_weights(
        self, entry: RecordReader, numbers: list[int], weight: float
    ) -> list[float]:
        """Return the sum of the weights for each number of a histogram, which counts rows."""
        if not self.spec.is_weighted:
            return [float(n) for n in numbers]
        weights = entry.get("weights", list)
        if len(weights) != len(numbers) or not all(_is_number(w) and w >= 0 for w in weights):
            entry.fail("weights", f"must hold {len(numbers)} sums of weights")
        if any((w > 0) != (n > 0) for w, n in zip(weights, numbers, strict=True)):
            entry.fail("weights", "must be 0 where there are no rows, and positive elsewhere")
        if abs(sum(weights) - weight) > TOLERANCE * max(weight, 1e-300):
            entry.fail("weights", f"add up to {sum(weights):.9g}, the weight is {weight:.9g}")
        return [float(w) for w in weights]

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
    rows: np.ndarray  # (bins,): the numbers of rows, whatever they weigh


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
    label = reader.text("label") if "label" in reader.record else ""
    given = reader.names("given") if "given" in reader.record else ()
    weighted = "weight" in reader.record
    weight = reader.text("weight") if reader.record.get("weight") is not None else ""
    proxy = bool(reader.record.get("groups_are_probabilities", False))
    if weighted and not weight and not proxy:
        reader.fail("weight", "must name the column of weights")
    date, version = (reader.record.get(name) for name in ("date", "model_version"))
    try:
        return MeasurementSpec(
            classes,
            attributes,
            threshold,
            scored=bins is not None,
            bins=bins or 100,
            given=given,
            weight=weight,
            randomized=_read_randomized(reader, attributes),
            proxy=proxy,
            label=label,
            date=check_date(date, span=True),
            model_version=check_version(version),
        )
    except FedgftError as error:
        raise FedgftError(f"{reader.source}: {error}", kind="data") from None


def _read_randomized(reader: RecordReader, attributes: tuple[str, ...]) -> RandomizedGroups | None:
    """Read how the groups were randomized; None if they were not."""
    if "randomized_groups" not in reader.record:
        return None
    found = reader.child("randomized_groups")
    epsilon = found.record.get("epsilon")
    if not _is_number(epsilon):
        found.reject("epsilon", "must be a positive number")
    values = found.child("values")
    listed = tuple(values.names(name) for name in attributes)
    try:
        return RandomizedGroups(float(epsilon), listed)
    except FedgftError as error:
        raise FedgftError(f"{reader.source}: {error}", kind="data") from None


def _read_privacy(file: RecordReader) -> Privacy:
    """Read how the numbers are protected, from the object `privacy` of the file."""
    reader = file.child("privacy")
    mechanism = reader.record.get("mechanism")
    if mechanism not in MECHANISMS:
        reader.reject("mechanism", f"must be {', '.join(MECHANISMS)}")
    if mechanism == "none":
        weight = reader.record.get("max_weight", 1.0)
        if not _is_number(weight) or weight <= 0:
            reader.reject("max_weight", "must be a positive number")
        return Privacy(
            min_cell=reader.whole_number("min_cell", default=0),
            suppressed=reader.whole_number("suppressed_cells", default=0),
            max_weight=float(weight),
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
