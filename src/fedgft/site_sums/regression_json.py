"""Write and read the file of a site about a model of numbers; its content is not trusted.

The file is readable JSON that holds sums only: docs/regression.md describes every field. The reader
checks each field, and that the numbers can be those of rows: counts, bounds, and the inequalities
that sums of the same rows obey (Cauchy-Schwarz and others).
"""

import json
import math
from importlib.metadata import version
from typing import Any

import numpy as np

from fedgft.errors import FedgftError
from fedgft.site_sums.dates import check_date, check_version
from fedgft.site_sums.moments import (
    ABSOLUTE,
    PARTS,
    PREDICTION,
    QUANTITIES,
    RESIDUAL,
    SQUARED,
    TARGET,
    Moments,
    make_moments,
)
from fedgft.site_sums.regression_sums import LEAST_ROWS, Clipped, RegressionSite, RegressionSpec
from fedgft.site_sums.tables import Group, group_sort_key
from fedgft.sums import RecordReader, is_text

FORMAT = "fedgft-regression-1"
PREFIX = "fedgft-regression-"
MAX_CELLS = 100_000  # largest number of groups in a file
MAX_MAGNITUDE = 1e60  # largest size of a value: the squares of its squares can still be added
MAX_WEIGHT = 1e9  # largest weight of a row
LARGEST = np.array([1, 1, 2, 2, 4 * MAX_MAGNITUDE]) * MAX_MAGNITUDE  # size of each quantity
TINY = 1e-280  # below this, squares lose digits
MAX_SUM = 1e300  # largest number in a file
ROUNDING = 1e-6  # relative error of numbers that follow from each other
NAMES = {"weight": "weight", "weight_squares": "weight_squares"}


def write_regression(spec: RegressionSpec, name: str, site: RegressionSite) -> str:
    """Return the text of a site's file: one line per field and one per group.

    Parameters
    ----------
    spec
        What was measured.
    name
        The name of the site, which must not be empty.
    site
        The sums of the site. Small groups must be withheld.
    """
    if not name.strip():
        raise FedgftError('the site has no name: measure_regression(..., site="north")')
    if site.min_cell < LEAST_ROWS:
        problem = "these sums include groups of any size; measure them with `min_cell`"
        raise FedgftError(f"{problem} {LEAST_ROWS} or more", kind="conflict")
    head = {
        "format": FORMAT,
        "made_by": f"fedgft {version('fedgft')}",
        "site": name,
        "groups": list(spec.attributes),
        "target": spec.target,
        "prediction": spec.prediction,
        "weight": spec.weight,
        **({"date": spec.date} if spec.date else {}),
        **({"model_version": spec.model_version} if spec.model_version else {}),
        "clip": None if spec.clip is None else list(spec.clip),
        "clipped": site.clipped._asdict(),
        "min_cell": site.min_cell,
        "rows": {
            "counted": sum(cell.rows for cell in site.cells.values()),
            "target_missing": site.target_missing,
            "prediction_missing": site.prediction_missing,
        },
    }
    lines = [f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in head.items()]
    groups = sorted({*site.cells, *site.withheld}, key=group_sort_key)
    cells = [
        _write_cell(group, site.cells.get(group), weighted=bool(spec.weight)) for group in groups
    ]
    body = ",\n  ".join(json.dumps(cell, ensure_ascii=False) for cell in cells)
    return "{\n" + ",\n".join(lines) + ',\n"cells": [\n  ' + body + "\n]\n}\n"


def _write_cell(group: Group, moments: Moments | None, *, weighted: bool) -> dict[str, Any]:
    """Return the sums of one group; a group that is withheld has no number at all."""
    if moments is None:
        return {"group": list(group), "rows": None}
    cell: dict[str, Any] = {"group": list(group), "rows": moments.rows}
    if weighted:
        cell |= {"weight": moments.weight, "weight_squares": moments.weight_squares}
    parts = PARTS if weighted else PARTS[:2]
    for i, name in enumerate(QUANTITIES):
        cell[name] = {part: float(getattr(moments, part)[i]) for part in parts}
    return cell


def read_regression(text: str, *, source: str) -> tuple[RegressionSpec, str, RegressionSite]:
    """Read and check the text of a site's file; errors begin with `source`.

    Returns
    -------
    spec, name, site
        What was measured, the name of the site, and its sums.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it ends too early or is damaged" if text.lstrip().startswith("{") else "not JSON"
        problem = f"{source}: not a whole file of sums: {reason} ({error})"
        raise FedgftError(problem, kind="file") from None
    form = found.get("format") if isinstance(found, dict) else None
    if isinstance(form, str) and form.startswith("fedgft-sums-"):
        problem = "holds counts of classes, not sums of a numeric outcome: audit it apart"
        raise FedgftError(f"{source}: {problem}", kind="conflict")
    if not isinstance(form, str) or not form.startswith(PREFIX):
        problem = f"{source}: not a file of sums that `fedgft measure` wrote"
        raise FedgftError(problem, kind="file")
    if form != FORMAT:
        raise FedgftError(
            f"{source}: format is {form[:40]!r}, this version of fedgft reads {FORMAT!r}; "
            "measure the site again, or use the version that wrote it",
            kind="file",
        )
    reader = RecordReader(found, source)
    spec = _read_spec(reader)
    return spec, reader.text("site"), _read_site(reader, spec)


def _refuse_constant(constant: str) -> Any:
    """Raise an error for NaN and Infinity, which Python's parser accepts but JSON forbids."""
    raise ValueError(f"{constant} is not a number")


def _read_spec(reader: RecordReader) -> RegressionSpec:
    """Read what was measured."""
    attributes = reader.names("groups")
    if not attributes:
        reader.fail("groups", "is empty")
    texts = {name: reader.record.get(name, "") for name in ("target", "prediction", "weight")}
    for name, value in texts.items():
        if not is_text(value):
            reader.reject(name, "must be the name of a column, or empty")
    clip = reader.record.get("clip")
    if clip is not None:
        valid = isinstance(clip, list) and len(clip) == 2 and all(map(_is_number, clip))
        if not valid or not -MAX_MAGNITUDE <= clip[0] < clip[1] <= MAX_MAGNITUDE:
            reader.reject("clip", "must be two numbers, the smaller one first, or null")
        clip = (float(clip[0]), float(clip[1]))
    try:
        date = check_date(reader.record.get("date"), span=True)
        version = check_version(reader.record.get("model_version"))
    except FedgftError as error:
        raise FedgftError(f"{reader.source}: {error}", field=error.field, kind="data") from None
    return RegressionSpec(attributes, clip=clip, date=date, model_version=version, **texts)


def _read_site(reader: RecordReader, spec: RegressionSpec) -> RegressionSite:
    """Read the groups and the numbers of rows."""
    min_cell = reader.whole_number("min_cell", least=LEAST_ROWS)
    records = reader.get("cells", list)
    if len(records) > MAX_CELLS:
        reader.fail("cells", "are of too many groups")
    cells: dict[Group, Moments] = {}
    withheld: list[Group] = []
    for i, record in enumerate(records):
        if not isinstance(record, dict):
            reader.fail(f"cells[{i}]", "must be an object")
        cell = RecordReader(record, reader.source, f"cells[{i}].")
        group = _read_group(cell, len(spec.attributes))
        if group in cells or group in withheld:
            reader.fail(f"cells[{i}]", "is the second cell of this group")
        if record.get("rows", 0) is None:
            withheld.append(group)
        else:
            rows = cell.whole_number("rows", least=min_cell)
            cells[group] = _CellReader(cell, spec, rows).read()
    rows = reader.child("rows")
    counted = rows.whole_number("counted")
    total = sum(cell.rows for cell in cells.values())
    if counted != total:
        rows.fail("counted", f"is {counted}, but the cells add up to {total}")
    clipped = reader.child("clipped")
    names = ("target", "prediction")
    missing = [_read_hidden(rows, f"{name}_missing", min_cell) for name in names]
    replaced = Clipped(*(_read_hidden(clipped, name, min_cell) for name in names))
    if spec.clip is None and any(number != 0 for number in replaced):
        reader.fail("clipped", "must be 0, because `clip` is null")
    return RegressionSite(cells, tuple(withheld), min_cell, missing[0], missing[1], replaced)


def _read_group(cell: RecordReader, attributes: int) -> Group:
    """Read the values of a group, None where one is not recorded."""
    group = cell.record.get("group")
    valid = isinstance(group, list) and len(group) == attributes
    if not valid or not all(value is None or is_text(value) for value in group):
        cell.fail("group", f"must list names or nulls, {attributes} in all")
    return tuple(group)


def _read_hidden(reader: RecordReader, key: str, min_cell: int) -> int | None:
    """Read a number of rows; None: it is withheld, because it is below `min_cell`."""
    if key in reader.record and reader.record[key] is None:
        return None
    number = reader.whole_number(key)
    if 0 < number < min_cell:
        reader.fail(key, f"is {number}, and the file declares `min_cell` {min_cell}")
    return number


class _CellReader:
    """Reads the sums of one group, and checks that rows can have them.

    Parameters
    ----------
    cell
        The record of the group.
    spec
        What was measured.
    rows
        The number of rows of the group.
    """

    def __init__(self, cell: RecordReader, spec: RegressionSpec, rows: int) -> None:
        self.cell = cell
        self.spec = spec
        self.rows = rows

    def read(self) -> Moments:
        """Return the sums; raise a `FedgftError` that names the first wrong field."""
        parts = PARTS if self.spec.weight else PARTS[:2]
        entries = [self.cell.child(name) for name in QUANTITIES]
        values = {p: np.array([self._number(entry, p) for entry in entries]) for p in parts}
        if not self.spec.weight:
            moments = make_moments(self.rows, values["mean"], values["squares"])
        else:
            weight, squares = (self._number(self.cell, name) for name in NAMES)
            self._check_weights(weight, squares)
            moments = Moments(self.rows, weight, squares, **values)
        self._check_squares(moments)
        self._check_means(moments)
        self._check_residuals(moments)
        return moments

    def _number(self, reader: RecordReader, key: str) -> float:
        """Read a finite number of possible size."""
        value = reader.record.get(key)
        if not _is_number(value) or not abs(value) <= MAX_SUM:
            reader.reject(key, "must be a finite number")
        return float(value)

    def _check_weights(self, weight: float, squares: float) -> None:
        """Check the sum of weights W and the sum of their squares: W^2 / rows <= W2 <= W^2."""
        if not 0 < weight <= self.rows * MAX_WEIGHT:
            self.cell.reject("weight", "must be positive, and not too large")
        least = weight**2 / self.rows
        if not least * (1 - ROUNDING) <= squares <= weight**2 * (1 + ROUNDING):
            self.cell.reject("weight_squares", f"must lie between {least:.6g} and {weight**2:.6g}")

    def _check_squares(self, m: Moments) -> None:
        """Check the sums of squared deviations of each quantity."""
        largest = math.sqrt(m.weight_squares)  # no weight is larger
        for i in range(len(QUANTITIES)):
            if abs(m.mean[i]) > LARGEST[i] or m.squares[i] > m.weight * LARGEST[i] ** 2:
                self._fail(i, f"is of values beyond {MAX_MAGNITUDE:g}")
            if m.squares[i] < 0 or m.spread[i] < 0:
                self._fail(i, "has a negative sum of squares")
            rounding = ROUNDING * (abs(m.mean[i]) + math.sqrt(m.squares[i] / m.weight))
            most = largest * (m.squares[i] * (1 + ROUNDING) + m.weight * rounding**2) + TINY
            if m.spread[i] > most:
                self._fail(i, "has a `spread` that is too large for its `squares`")
            most = math.sqrt(m.spread[i]) * largest * (1 + ROUNDING)
            if abs(m.tilt[i]) > most + rounding * m.weight_squares:
                self._fail(i, "has a `tilt` that is too large for its `spread`")

    def _check_means(self, m: Moments) -> None:
        """Check the means against the largest possible values, or the bounds of `clip`."""
        low, high = self.spec.clip or (-MAX_MAGNITUDE, MAX_MAGNITUDE)
        room = ROUNDING * (high - low)
        for i in (PREDICTION, TARGET):
            if not low - room <= m.mean[i] <= high + room:
                self._fail(i, f"has a mean that is not between {low:g} and {high:g}")
            most = m.weight * (m.mean[i] - low) * (high - m.mean[i])  # Bhatia & Davis
            if m.squares[i] > most * (1 + ROUNDING) + m.weight * room**2:
                self._fail(i, f"has a sum of squares that no values in {low:g} to {high:g} have")
        if m.mean[ABSOLUTE] < 0 or m.mean[SQUARED] < 0:
            self._fail(ABSOLUTE if m.mean[ABSOLUTE] < 0 else SQUARED, "has a negative mean")

    def _check_residuals(self, m: Moments) -> None:
        """Check what follows from residual = target - prediction, and between r, |r| and r^2."""
        deviation = np.sqrt(m.squares / m.weight)
        size = float(np.abs(m.mean[:3]).max() + deviation[:3].max())
        gap = m.mean[TARGET] - m.mean[PREDICTION] - m.mean[RESIDUAL]
        if abs(gap) > ROUNDING * size:
            self._fail(RESIDUAL, "has a mean that is not that of target minus prediction")
        apart = abs(deviation[TARGET] - deviation[PREDICTION])
        together = deviation[TARGET] + deviation[PREDICTION]
        if not apart - ROUNDING * size <= deviation[RESIDUAL] <= together + ROUNDING * size:
            self._fail(RESIDUAL, "has a sum of squares that no such target and prediction give")
        square = m.mean[SQUARED]
        own = deviation[RESIDUAL] ** 2 + m.mean[RESIDUAL] ** 2
        if abs(square - own) > ROUNDING * own + TINY:
            self._fail(SQUARED, "has a mean that does not follow from that of the residual")
        own = deviation[ABSOLUTE] ** 2 + m.mean[ABSOLUTE] ** 2
        if abs(square - own) > ROUNDING * own + TINY:
            self._fail(SQUARED, "has a mean that does not follow from that of |residual|")
        if m.mean[ABSOLUTE] < abs(m.mean[RESIDUAL]) * (1 - ROUNDING):
            self._fail(ABSOLUTE, "has a mean below that of the residual")
        if (
            not self.spec.weight
            and m.squares[SQUARED] > (m.weight * square) ** 2 * (1 + ROUNDING) + TINY
        ):
            self._fail(SQUARED, "has a sum of squares that is too large for its mean")

    def _fail(self, i: int, problem: str) -> None:
        self.cell.fail(QUANTITIES[i], problem)


def _is_number(value: Any) -> bool:
    """Return whether the value is a number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
