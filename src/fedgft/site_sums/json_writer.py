"""Write the sums of one site as readable JSON that contains only sums.

docs/audit-reference.md describes every field. Every number about scores covers at least `MIN_BIN`
rows: histogram bins with fewer rows are merged with their neighbors.
"""

import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from fedgft.errors import FedgftError
from fedgft.site_sums.tables import (
    COUNT,
    NOISE,
    ROWS,
    SCORES,
    SLACK,
    SQUARES,
    Group,
    MeasurementSpec,
    Privacy,
    SiteRecord,
    group_sort_key,
    possible_cells,
)
from fedgft.validation import check_integer

FORMAT = "fedgft-sums-2"
FORMAT_3 = "fedgft-sums-3"  # of files with weights, strata or randomized groups
MIN_SUM_ROWS = 10  # a sum of scores is written only if it covers at least this many rows
MIN_BIN = 5  # every other number about scores covers at least this many rows
COARSE_BINS = 20  # number of parts of [0, 1]; bins with few rows are merged within a part first
PRIVACY_UNIT = "one row added or removed changes one count of the finest table by 1"


def write_site(record: SiteRecord, *, min_bin: int) -> str:
    """Return the text of a site's file: one line per field and one per cell that has rows.

    Parameters
    ----------
    record
        The sums of the site, which must have a name.
    min_bin
        The smallest number of rows that a number about scores may cover.
    """
    check_integer("min_bin", min_bin, least=1)
    spec = record.spec
    name = record.name
    site = record.site
    if not name.strip():
        raise FedgftError('the site has no name: measure(..., site="north")')
    if len(site.privacy) > 1:
        raise FedgftError("these sums were protected more than once; measure the site in one go")
    privacy = site.privacy[0] if site.privacy else Privacy()
    groups = sorted(site.tables, key=group_sort_key)
    cells = [cell for group in groups for cell in _write_cells(group, record, privacy, min_bin)]
    more = _write_groups(spec)
    head = {
        "format": FORMAT_3 if more else FORMAT,
        "made_by": f"fedgft {version('fedgft')}",
        "site": name,
        "classes": list(spec.classes),
        "groups": list(spec.attributes),
        **more,
        "threshold": spec.threshold,
        "bins": spec.bins if spec.scored else None,
        "min_bin": min_bin if spec.scored and privacy == Privacy() else 0,
        **({"label": spec.label} if spec.label else {}),
        **({"date": spec.date} if spec.date else {}),
        **({"model_version": spec.model_version} if spec.model_version else {}),
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


def _write_groups(spec: MeasurementSpec) -> dict[str, Any]:
    """Return the fields about strata, weights and uncertain groups; none if there are none."""
    fields: dict[str, Any] = {"given": list(spec.given)} if spec.given else {}
    if spec.is_weighted:
        fields["weight"] = spec.weight or None
    if spec.proxy:
        fields["groups_are_probabilities"] = True
    if spec.randomized is not None:
        values = dict(zip(spec.attributes, map(list, spec.randomized.values), strict=True))
        fields["randomized_groups"] = {"epsilon": spec.randomized.epsilon, "values": values}
    return fields


def _count_small(cells: list[dict[str, Any]]) -> dict[str, int]:
    """Count all counts in these cells, and those that cover only few people.

    See `fedgft.auditing.site_file.combine_revealed` for the keys.
    """
    counts = [cell["count"] for cell in cells if cell["count"] is not None]
    scores = [n for cell in cells for s in cell.get("scores", {}).values() for n in s["histogram"]]
    return {
        "cells": len(counts),
        "cells_below_10": sum(0 < n < MIN_SUM_ROWS for n in counts),
        "smallest_cell": min((n for n in counts if n > 0), default=0),
        "score_counts": sum(n != 0 for n in scores),
        "score_counts_below_5": sum(0 < n < MIN_BIN for n in scores),
        "smallest_score_count": min((n for n in scores if n > 0), default=0),
    }


def _write_privacy(privacy: Privacy) -> dict[str, Any]:
    """Return the object `privacy` of the file: suppression, or the noise and its budget."""
    if privacy.mechanism == "none":
        fields: dict[str, Any] = {"mechanism": "none", "min_cell": privacy.min_cell}
        if privacy.min_cell:
            fields["suppressed_cells"] = privacy.suppressed
        if privacy.max_weight != 1:
            fields["max_weight"] = privacy.max_weight
        return fields
    names = ("mechanism", "epsilon", "delta", "scale", "variance", "names")
    return {name: getattr(privacy, name) for name in names} | {
        "sensitivity": 1,
        "unit": PRIVACY_UNIT,
    }


def _hide_small(count: float, privacy: Privacy) -> int | None:
    """Return a number of rows, or None if it is so small that it must be withheld."""
    return None if 0 < count < privacy.min_cell else int(count)


def _write_cells(
    group: Group, record: SiteRecord, privacy: Privacy, min_bin: int
) -> Iterator[dict[str, Any]]:
    """Yield the cells of one group that have rows.

    For a group without rows, yield one cell with a count of 0, so that the file names the group.
    """
    spec = record.spec
    table = record.site.tables[group]
    noisy = privacy.mechanism != "none"
    if not table[..., [COUNT, NOISE]].any():
        name = spec.classes[0]
        yield {**_name_group(group, spec), "label": name, "decision": name, "count": 0}
        return
    rows = ROWS if spec.is_weighted else COUNT
    for label, decision in np.ndindex(table.shape[:2]):
        values = table[label, decision]
        if not values[COUNT] and not values[NOISE]:
            continue
        cell: dict[str, Any] = {
            **_name_group(group, spec),
            "label": spec.classes[label],
            "decision": spec.classes[decision],
            "count": None if values[SLACK] else int(values[rows]),
        }
        if spec.is_weighted and not values[SLACK]:
            cell |= {"weight": _shorten(values[COUNT]), "squares": _shorten(values[SQUARES])}
        shown = noisy or values[rows] >= min_bin
        if group in record.histogram and not privacy.min_cell and shown and spec.scored:
            cell["scores"] = {}
            possible = possible_cells(spec)[decision]
            for s, c in enumerate(spec.score_classes):
                weights = record.histogram[group][label, decision, s]
                if noisy:
                    entry = _write_noisy_scores(weights, possible)
                else:
                    bin_error = record.bin_error.get(group)
                    if bin_error is not None:
                        bin_error = bin_error[:2, label, decision, s]
                    counts = weights
                    if spec.is_weighted:
                        counts = record.bin_rows[group][label, decision, s]
                    blocks = _histogram_blocks(counts, weights, bin_error, possible, min_bin)
                    total = values[SCORES + s] if values[rows] >= MIN_SUM_ROWS else None
                    entry = _write_scores(total, blocks, weights if spec.is_weighted else None)
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


def _name_group(group: Group, spec: MeasurementSpec) -> dict[str, Any]:
    """Return the fields of a cell that name its group and its stratum."""
    attributes = len(spec.attributes)
    fields = {"group": list(group[:attributes])}
    return fields | ({"given": list(group[attributes:])} if spec.given else {})


def _shorten(number: float) -> float:
    """Return a sum of weights with twelve digits, as an int if it is a whole number.

    Further digits depend on the order of addition.
    """
    short = float(f"{number:.12g}")
    return int(short) if short == int(short) else short


def _write_scores(
    total: float | None, blocks: list[Block], weights: np.ndarray | None
) -> dict[str, Any]:
    """Return the sum of a cell's scores, and its histogram without empty blocks at the ends.

    Parameters
    ----------
    total
        The sum of the scores; None if it is withheld.
    blocks
        The numbers of rows.
    weights
        (bins,): the sums of the weights in the bins. None: the rows have no weights.
    """
    filled = [i for i, block in enumerate(blocks) if block.rows]
    blocks = blocks[filled[0] : filled[-1] + 1]
    entry: dict[str, Any] = {}
    if total is not None:
        entry["sum"] = round(total, 6) if weights is None else _shorten(total)
    entry["first_bin"] = blocks[0].first
    entry["histogram"] = [block.rows for block in blocks]
    if any(block.width > 1 for block in blocks):
        entry["widths"] = [block.width for block in blocks]
    if weights is not None:
        ends = [(block.first, block.first + block.width) for block in blocks]
        entry["weights"] = [_shorten(weights[first:last].sum()) for first, last in ends]
    return entry


def _histogram_blocks(
    counts: np.ndarray,
    weights: np.ndarray,
    bin_error: np.ndarray | None,
    possible: np.ndarray,
    min_bin: int,
) -> list[Block]:
    """Merge bins with few rows. If the sums were read from a file, keep the blocks of that file.

    Parameters
    ----------
    counts, weights
        (bins,): the numbers of rows, and the sums of their weights; the same without weights.
    bin_error
        (2, bins): how wrong `weights` may be; None: they are exact.
    possible, min_bin
        See `merge_small_bins`.
    """
    if bin_error is None or not bin_error.any():
        return merge_small_bins(counts, possible, min_bin)
    first, last = (weights + shift for shift in bin_error)
    tiny = 1e-12 * weights.sum()  # rounding
    starts = np.flatnonzero(first > tiny)
    ends = np.flatnonzero(last > tiny)
    if len(starts) != len(ends) or (np.abs(first[starts] - last[ends]) > tiny).any():
        raise FedgftError("sums that were read from several files cannot be written as one")
    blocks: list[Block] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        here = blocks[-1].first + blocks[-1].width if blocks else start
        blocks += [Block(i, 0, 1) for i in range(here, start)]
        rows = round(float(counts[start : end + 1].sum()))
        blocks.append(Block(start, rows, end - start + 1))
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
