"""The file a site hands over: JSON that a person can read, with sums and nothing else in it.

docs/audit.md describes every field. No number about scores is of fewer than `MIN_BIN` rows: bins
of a histogram with fewer are put together with their neighbors. What is read is checked field by
field: a count that is not whole, or does not add up, is an error that names the file and the field.
Where the file declares noise, counts may be negative and need not add up.
"""

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedgft.audit.checking import Reader
from fedgft.audit.private import feasible
from fedgft.audit.sums import COUNT, NOISE, SCORES, SLACK, Group, Privacy, Site, Sums
from fedgft.errors import FedgftError
from fedgft.files import expanded, whole

FORMAT = "fedgft-sums-2"
READ = (FORMAT, "fedgft-sums-1")  # the first had every bin of a histogram
FEW = 10  # rows: of fewer, no sum of scores is written
MIN_BIN = 5  # rows: no other number about scores is of fewer
COARSE = 20  # parts of [0, 1]: bins with few rows are put together within them, and beyond
BYTES = 64 * 2**20  # far more than any file of ours
Block = tuple[int, int, int]  # the first of some bins, the rows in them, how many bins
UNIT = "one row added or removed changes one count of the finest table by 1"


def write_sums(sums: Sums, path: str | Path, *, min_bin: int = MIN_BIN) -> Path:
    """Write the sums of one site; `min_bin`: the fewest rows that a number about scores is of."""
    file = expanded(path)
    text = to_json(sums, min_bin=min_bin)
    with whole(file, private=True) as part:
        part.write_text(text, "utf-8")
    return file


def to_json(sums: Sums, *, min_bin: int = MIN_BIN) -> str:
    """One line a field, one line a cell. Cells without rows are left out."""
    if min_bin < 1:
        raise FedgftError(f"min_bin {min_bin}: must be at least 1")
    if len(sums.sites) != 1:
        raise FedgftError(f"a file holds the sums of one site, not of {len(sums.sites)}")
    ((name, site),) = sums.sites.items()
    if not name.strip():
        raise FedgftError('the site has no name: measure(..., site="north")')
    question, privacy = sums.asked, _one(site.privacy)
    cells = [cell for group in sums.groups for cell in _cells(group, sums, site, privacy, min_bin)]
    counted = sum(cell["count"] for cell in cells if cell["count"] is not None)
    head = {
        "format": FORMAT,
        "made_by": f"fedgft {version('fedgft')}",
        "site": name,
        "classes": list(question.classes),
        "groups": list(question.attributes),
        "threshold": question.threshold,
        "bins": question.bins if question.scored else None,
        "min_bin": min_bin if question.scored and privacy == Privacy() else 0,
        "rows": {"counted": counted, "label_missing": _shown(site.label_missing, privacy),
                 "prediction_missing": _shown(site.prediction_missing, privacy)},
        "privacy": _declared(privacy),
        "reveals": _revealed(cells),
    }  # fmt: skip
    lines = [f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in head.items()]
    body = ",\n  ".join(json.dumps(cell, ensure_ascii=False) for cell in cells)
    return "{\n" + ",\n".join(lines) + ',\n"cells": [\n  ' + body + "\n]\n}\n"


def revealed(sums: Sums, *, min_bin: int = MIN_BIN) -> dict[str, int]:
    """What the file says about few people: how many counts it holds, and how many of them are of
    fewer than ten people, or, of scores, of fewer than five."""
    return json.loads(to_json(sums, min_bin=min_bin))["reveals"]


def _revealed(cells: list[dict[str, Any]]) -> dict[str, int]:
    counts = [cell["count"] for cell in cells if cell["count"] is not None]
    spread = [n for cell in cells for s in cell.get("scores", {}).values() for n in s["histogram"]]
    return {
        "cells": len(counts),
        "cells_below_10": sum(0 < n < FEW for n in counts),
        "score_counts": sum(n != 0 for n in spread),
        "score_counts_below_5": sum(0 < n < MIN_BIN for n in spread),
    }


def _one(privacy: tuple[Privacy, ...]) -> Privacy:
    if len(privacy) > 1:
        raise FedgftError("these sums were protected more than once; measure the site in one go")
    return privacy[0] if privacy else Privacy()


def _declared(privacy: Privacy) -> dict[str, Any]:
    if privacy.mechanism == "none":
        out: dict[str, Any] = {"mechanism": "none", "min_cell": privacy.min_cell}
        return out | ({"suppressed_cells": privacy.suppressed} if privacy.min_cell else {})
    kept = ("mechanism", "epsilon", "delta", "scale", "variance", "names")
    return {k: v for k, v in asdict(privacy).items() if k in kept} | {
        "sensitivity": 1,
        "unit": UNIT,
    }


def _shown(count: float, privacy: Privacy) -> int | None:
    return None if 0 < count < privacy.min_cell else int(count)


def _cells(
    group: Group, sums: Sums, site: Site, privacy: Privacy, min_bin: int
) -> list[dict[str, Any]]:
    question, table, out = sums.asked, site.tables[group], []
    for label, decision in np.ndindex(table.shape[:2]):
        values = table[label, decision]
        nobody = not table[..., [COUNT, NOISE]].any() and (label, decision) == (0, 0)
        if not values[COUNT] and not values[NOISE] and not nobody:  # a group may have no row at all
            continue
        cell: dict[str, Any] = {
            "group": list(group), "label": question.classes[label],
            "decision": question.classes[decision],
            "count": None if values[SLACK] else int(values[COUNT]),
        }  # fmt: skip
        if group in sums.histogram and not privacy.min_cell and not nobody:
            counts, possible = sums.histogram[group][label, decision], feasible(question)[decision]
            blur = sums.blur.get(group, np.zeros((3, *sums.histogram[group].shape)))
            cell["scores"] = {
                question.classes[c]: _scores(
                    values[SCORES + s],
                    counts[s],
                    possible,
                    privacy,
                    _blocks(counts[s], blur[:2, label, decision, s], possible, min_bin),
                )
                for s, c in enumerate(question.score_classes)
                if privacy.mechanism != "none" or values[COUNT] >= min_bin
            }
            if not cell["scores"]:
                del cell["scores"]
        out.append(cell)
    return out


def _blocks(
    counts: np.ndarray, blur: np.ndarray, possible: np.ndarray, min_bin: int
) -> list[Block]:
    """The numbers of a histogram; those of a file that was read stay as they were."""
    if not blur.any():
        return merged_bins(counts, possible, min_bin)
    first, last = (np.rint(counts + shift) for shift in blur)
    starts, ends = np.flatnonzero(first), np.flatnonzero(last)
    if len(starts) != len(ends) or (first[starts] != last[ends]).any():
        raise FedgftError("sums that were read from several files cannot be written as one")
    found: list[Block] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        here = found[-1][0] + found[-1][2] if found else start
        found += [(i, 0, 1) for i in range(here, start)]
        found.append((start, int(first[start]), end - start + 1))
    return found


def _scores(
    total: float,
    counts: np.ndarray,
    possible: np.ndarray,
    privacy: Privacy,
    blocks: list[Block],
) -> dict[str, Any]:
    """The sum of a cell's scores, and how they are spread: from its first bin to its last.

    Each number of the histogram is that of a block, whose rows are none or not few; where bins
    were put together, `widths` says how many. Under noise there is no sum, and all bins are there
    that a row can be in: where the lowest score lies would be somebody's.
    """
    if privacy.mechanism != "none":
        held = np.flatnonzero(possible)
        first, last = int(held[0]), int(held[-1])
        return {"first_bin": first, "histogram": [int(n) for n in counts[first : last + 1]]}
    while blocks and not blocks[0][1]:
        blocks.pop(0)
    while blocks and not blocks[-1][1]:
        blocks.pop()
    body: dict[str, Any] = {"first_bin": blocks[0][0]}
    body["histogram"] = [rows for _, rows, _ in blocks]
    if any(width > 1 for _, _, width in blocks):
        body["widths"] = [width for _, _, width in blocks]
    return {"sum": round(total, 6)} | body if counts.sum() >= FEW else body


def merged_bins(counts: np.ndarray, possible: np.ndarray, least: int) -> list[Block]:
    """Bins as (first bin, rows, width), each without rows or with at least `least`; all rows if
    there are fewer.

    [0, 1] has 20 fixed parts. Where every bin of a part has enough rows or none, the bins stay;
    otherwise the part is one; and parts with too few rows are put together with those that follow,
    the last ones with those before. So no edge between two numbers is finer than a part, unless
    enough rows lie on both sides of it.
    """
    bins = len(counts)
    size = bins // COARSE if bins % COARSE == 0 else 1
    held = np.flatnonzero(possible)
    parts: list[list[Block]] = []
    for number in range(int(held[0]) // size, int(held[-1]) // size + 1):
        inside = [i for i in range(number * size, (number + 1) * size) if possible[i]]
        rows = [int(counts[i]) for i in inside]
        if all(n == 0 or n >= least for n in rows):
            parts.append([(i, n, 1) for i, n in zip(inside, rows, strict=True)])
        else:
            parts.append([(inside[0], sum(rows), len(inside))])
    out: list[Block] = []
    for part in parts:
        if out and 0 < out[-1][1] < least:
            part = [_joined([out.pop(), *part])]
        out += part
    while len(out) > 1 and 0 < out[-1][1] < least:
        out[-2:] = [_joined(out[-2:])]
    return out


def _joined(blocks: list[Block]) -> Block:
    return blocks[0][0], sum(rows for _, rows, _ in blocks), sum(width for *_, width in blocks)


def read_sums(path: str | Path) -> Sums:
    """Read and check the file of one site."""
    file = expanded(path)
    try:
        if file.exists() and not file.is_file():
            raise FedgftError(f"{path}: not a file")
        if file.stat().st_size > BYTES:
            raise FedgftError(f"{path}: too large for a file of sums, which has a few kilobytes")
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise FedgftError(f"{path}: no such file") from None
    except OSError as error:
        raise FedgftError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise FedgftError(f"{path}: not a file of sums that fedgft wrote (not text)") from None
    return from_json(text, source=str(path))


def from_json(text: str, *, source: str) -> Sums:
    try:
        found = json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        reason = "it ends too early or is damaged" if text.lstrip().startswith("{") else "not JSON"
        raise FedgftError(f"{source}: not a whole file of sums: {reason} ({error})") from None
    form = found.get("format") if isinstance(found, dict) else None
    if not isinstance(form, str) or not form.startswith("fedgft-sums-"):
        raise FedgftError(f"{source}: not a file of sums that `fedgft measure` wrote")
    if form not in READ:
        raise FedgftError(
            f"{source}: format is {form[:40]!r}, this version of fedgft reads {FORMAT!r}; "
            "measure the site again, or use the version that wrote it"
        )
    return Reader(found, source).sums()


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
