"""Turn counted cells into the protected sums of sites: names of groups and classes, then tables."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import polars as pl
from polars import selectors

from fedgft.auditing.measurement_task import KNOWN_PAIRS, SUM_COLUMNS, Measurement
from fedgft.auditing.row_counts import RowCounts, add_cells
from fedgft.data.encode import as_text, data_error, put_positive_last
from fedgft.errors import FedgftError
from fedgft.formatting import format_count
from fedgft.privacy.suppression import Protection
from fedgft.site_sums import (
    COUNT,
    ROWS,
    SCORES,
    SQUARES,
    Group,
    MeasurementSpec,
    SiteSums,
    SiteTables,
    Spellings,
    group_sort_key,
)
from fedgft.site_sums.spelling import LABEL, name_column


def build_protected(
    counts: Mapping[str, RowCounts], task: Measurement, protection: Protection
) -> list[SiteSums]:
    """Return the protected sums of each site, by name."""
    declared = bool(task.classes)
    limit = None
    if task.is_weighted:
        limit = round_up(max(each.max_weight for each in counts.values()))
    return [
        replace(
            protection.apply(sums, values=task.values, classes_declared=declared, max_weight=limit),
            notes=sums.notes,
        )
        for sums in _build_all(counts, task)
    ]


def round_up(weight: float) -> float:
    """Return the next power of two: a file states the largest weight no more exactly."""
    return 2.0 ** math.ceil(math.log2(weight)) if weight > 0 else 1.0


def _build_all(counts: Mapping[str, RowCounts], task: Measurement) -> list[SiteSums]:
    """Turn the counts of all sites into their sums, with the same names of groups and classes."""
    spellings = Spellings(ignore_case=task.ignore_case)
    with _name_source(task.source):
        merged: dict[str, RowCounts] = {}
        for name in sorted(counts, key=lambda site: (-counts[site].rows(), site)):
            where = format_count(counts[name].rows(), "row")
            (site,) = spellings.unify_names("site", [name], where)
            merged[site] = merged[site] + counts[name] if site in merged else counts[name]
        together = sum(list(merged.values())[1:], start=next(iter(merged.values())))
        unified = _unify_names(together, task, spellings)
        if len(merged) > 1:
            merged = {name: _unify_names(site, task, spellings) for name, site in merged.items()}
            task = replace(task, classes=_find_classes(unified.cells, task))
        else:
            merged = dict.fromkeys(merged, unified)
    made = [build_sums(merged[name], replace(task, site=name)) for name in sorted(merged)]
    notes = (*spellings.notes, *(note for each in made for note in each.notes))
    return [replace(each, notes=notes) for each in made]


@contextmanager
def _name_source(source: str) -> Iterator[None]:
    """Put the name of the table in front of the errors about spellings."""
    try:
        yield
    except FedgftError as error:
        if error.field != "ignore_case":
            raise
        text = f"{source}: {error.message}"
        raise FedgftError(text, field=error.field, kind=error.kind) from None


# Names of classes and groups


def _unify_names(counts: RowCounts, task: Measurement, spellings: Spellings) -> RowCounts:
    """Return the counts with one spelling per name; the most frequent one, or the declared one.

    Raises a `FedgftError` for names that differ only in case or spaces, unless `task.ignore_case`.
    """
    cells = counts.cells
    groups = counts.groups
    declared = [("y", LABEL, task.classes)]
    columns = (*task.attributes, *task.given_names)
    for key, attribute in zip(task.group_keys(), columns, strict=True):
        declared.append((key, name_column(attribute), task.values.get(attribute, ())))
    for key, role, names in declared:
        spellings.unify_names(role, names, "declared")
        for column in (key, "d") if key == "y" and task.decision is not None else (key,):
            if cells[column].dtype not in (pl.String, pl.Categorical, pl.Enum):
                continue
            kept = _unify_column(cells, column, role, spellings)
            cells = cells.with_columns(pl.col(column).cast(pl.String).replace(kept))
            if column in groups.columns:
                uncounted = groups[column].cast(pl.String).drop_nulls().unique().sort()
                kept = spellings.unify_names(role, uncounted, "rows that are not counted")
                mapping = dict(zip(uncounted, kept, strict=True))
                groups = groups.with_columns(pl.col(column).cast(pl.String).replace(mapping))
    if not spellings.notes:
        return counts
    return replace(counts, cells=add_cells(cells), groups=groups.unique())


def _unify_column(
    cells: pl.DataFrame, column: str, role: str, spellings: Spellings
) -> dict[str, str]:
    """Return the spelling to use for each name in a column, the most frequent name first."""
    sizes = cells.select(pl.col(column).cast(pl.String), "n").drop_nulls()
    sizes = sizes.group_by(column).agg(pl.sum("n")).sort("n", column, descending=[True, False])
    names = dict(sizes.iter_rows())
    return {
        name: spellings.unify_names(role, [name], format_count(n, "row"))[0]
        for name, n in names.items()
    }


def build_sums(counts: RowCounts, task: Measurement) -> SiteSums:
    """Turn the small tables into the sums of one site."""
    classes = _find_classes(counts.cells, task)
    try:
        spec = MeasurementSpec(
            classes,
            task.attributes,
            threshold=task.threshold if task.decision is None and len(classes) == 2 else None,
            scored=bool(task.scores),
            bins=task.bins,
            given=task.given_names,
            weight=task.weight or "",
            randomized=task.randomized(),
            proxy=bool(task.probabilities),
            label=task.label_name,
            date=task.date,
            model_version=task.model_version,
        )
    except FedgftError as error:
        raise FedgftError(f"{task.source}: {error}") from None
    groups = dict.fromkeys(_read_groups(counts.groups, task))
    if len(spec.columns) == 1:  # a declared value is a group even if no row has it
        declared = task.values.get(task.attributes[0], ())
        groups |= dict.fromkeys((value,) for value in declared)
    tables = {group: spec.empty_table() for group in groups}
    histogram = {group: spec.empty_histogram() for group in groups if spec.scored}
    bin_rows = {group: spec.empty_histogram() for group in histogram if spec.is_weighted}
    index = {name: i for i, name in enumerate(classes)}
    # If two classes have two score columns, only the last column is summed.
    first = len(task.scores) - len(spec.score_classes)
    cells = counts.cells.filter(pl.col("score") >= first).sort(selectors.exclude(SUM_COLUMNS))
    labels = [index[text] for text in as_text(cells["y"])]
    decisions = cells["d"].to_list()
    if task.decision is not None:
        decisions = [index[text] for text in as_text(cells["d"])]
    sums = ("w", "w2") if spec.is_weighted else ("n", "n")
    numbers = cells.select(pl.col("score") - first, "bin", "n", "total").iter_rows()
    weights = zip(*(cells[name] for name in sums), strict=True)
    places = zip(_read_groups(cells, task), labels, decisions, numbers, weights, strict=True)
    for group, label, decision, (s, bin_, n, total), (weight, squares) in places:
        _check_declared(group, task)
        table = tables[group][label, decision]
        if s == 0:
            table[COUNT] += weight
            if spec.is_weighted:
                table[[ROWS, SQUARES]] += n, squares
        if spec.scored:
            table[SCORES + s] += total
            histogram[group][label, decision, s, bin_] += weight
            if spec.is_weighted:
                bin_rows[group][label, decision, s, bin_] += n
    site = SiteTables(tables, float(counts.label_missing), float(counts.prediction_missing))
    notes = ()
    if counts.weightless:
        rows = format_count(counts.weightless, "row")
        notes = (f"{task.source}: {rows} of weight 0 left out",)
    return SiteSums(spec, {task.site: site}, histogram, bin_rows=bin_rows, notes=notes)


def _read_groups(frame: pl.DataFrame, task: Measurement) -> Iterator[Group]:
    """Return the group and the stratum of each row of a table of counts."""
    return zip(*(as_text(frame[key]) for key in task.group_keys()), strict=True)


def _check_declared(group: Group, task: Measurement) -> None:
    """Raise a `FedgftError` if a value of the group is not among the values the user declared."""
    for attribute, value in zip((*task.attributes, *task.given_names), group, strict=True):
        declared = task.values.get(attribute)
        if declared and value is not None and value not in declared:
            problem = f"group column '{attribute}' holds '{value}', which `group` does not list"
            raise data_error(task.source, f"{problem} ({', '.join(declared)})")


def _find_classes(cells: pl.DataFrame, task: Measurement) -> tuple[str, ...]:
    """Return the classes in order; if there are two, the positive class is last."""
    labels = _sort_texts(as_text(cells["y"]).drop_nulls().unique(), task)
    decisions: list[str] = []
    if task.decision is not None:
        decisions = _sort_texts(as_text(cells["d"]).drop_nulls().unique(), task)
    if not labels:
        raise data_error(task.source, "no row has both a label and a prediction")
    classes = task.classes or _guess_classes(labels, decisions, task)
    for what, found in (("label", labels), ("decision", decisions)):
        unknown = [value for value in found if value not in classes]
        if unknown:
            listed = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
            problem = f"{what} '{unknown[0]}' is none of the classes {listed}"
            raise FedgftError(f"{task.source}: {problem} (`classes` names them all)")
    if task.positive is not None:
        classes = put_positive_last(classes, task.positive, where=f"{task.source}: the label")
    scores = len(task.scores)
    if scores == 1 and len(classes) != 2:
        raise FedgftError(
            f"{task.source}: {len(classes)} classes need one `score` column each, in the order "
            f"{', '.join(classes)}; or `decision` alone"
        )
    if scores > 1 and scores != len(classes):
        raise FedgftError(f"{task.source}: {scores} score columns for {len(classes)} classes")
    return classes


def _guess_classes(labels: list[str], decisions: list[str], task: Measurement) -> tuple[str, ...]:
    """Return the classes that occur in the data, or the pair of `KNOWN_PAIRS` that holds them."""
    for pair in KNOWN_PAIRS:
        if {*labels, *decisions} <= set(pair):
            return pair
    classes = labels if len(labels) > 1 else _sort_texts({*labels, *decisions}, task)
    positive = task.positive
    if len(classes) == 1 and positive is not None and positive.casefold() != classes[0].casefold():
        classes = [*classes, positive]
    if len(classes) == 1:
        raise FedgftError(
            f"{task.source}: '{classes[0]}' is the only label here; name both with `classes`, the "
            "positive class last"
        )
    return tuple(classes)


def _sort_texts(texts: Iterable[str], task: Measurement) -> list[str]:
    """Sort labels: numbers before words, unless the labels were texts in memory."""
    if task.text_labels:
        return sorted(texts)
    return sorted(texts, key=lambda text: group_sort_key((text,)))
