"""The file a site hands over: JSON that a person can read, with sums and nothing else in it.

docs/audit.md describes every field. What is read is checked field by field: a count that is not
whole, or does not add up, is an error that names the file and the field. Where the file declares
noise, counts may be negative and need not add up.
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

FORMAT = "fedgft-sums-1"
SUMMED = 10  # rows: of fewer, no sum of scores is written
BYTES = 64 * 2**20  # far more than any file of ours
UNIT = "one row added or removed changes one count of the finest table by 1"


def write_sums(sums: Sums, path: str | Path) -> Path:
    """Write the sums of one site."""
    file = expanded(path)
    text = to_json(sums)
    with whole(file, private=True) as part:
        part.write_text(text, "utf-8")
    return file


def to_json(sums: Sums) -> str:
    """One line a field, one line a cell. Cells without rows are left out."""
    if len(sums.sites) != 1:
        raise FedgftError(f"a file holds the sums of one site, not of {len(sums.sites)}")
    ((name, site),) = sums.sites.items()
    if not name.strip():
        raise FedgftError('the site has no name: measure(..., site="north")')
    question, privacy = sums.asked, _one(site.privacy)
    cells = [cell for group in sums.groups for cell in _cells(group, sums, site, privacy)]
    counted = sum(cell["count"] for cell in cells if cell["count"] is not None)
    head = {
        "format": FORMAT,
        "made_by": f"fedgft {version('fedgft')}",
        "site": name,
        "classes": list(question.classes),
        "groups": list(question.attributes),
        "threshold": question.threshold,
        "bins": question.bins if question.scored else None,
        "rows": {"counted": counted, "label_missing": _shown(site.label_missing, privacy),
                 "prediction_missing": _shown(site.prediction_missing, privacy)},
        "privacy": _declared(privacy),
    }  # fmt: skip
    lines = [f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in head.items()]
    body = ",\n  ".join(json.dumps(cell, ensure_ascii=False) for cell in cells)
    return "{\n" + ",\n".join(lines) + ',\n"cells": [\n  ' + body + "\n]\n}\n"


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


def _cells(group: Group, sums: Sums, site: Site, privacy: Privacy) -> list[dict[str, Any]]:
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
            cell["scores"] = {
                question.classes[c]: _scores(values[SCORES + s], counts[s], possible, privacy)
                for s, c in enumerate(question.score_classes)
            }
        out.append(cell)
    return out


def _scores(
    total: float, counts: np.ndarray, possible: np.ndarray, privacy: Privacy
) -> dict[str, Any]:
    """The sum of a cell's scores, and how they are spread: from its first bin to its last.

    Of a few rows the sum would be somebody's score, so it is left out. Under noise there is no
    sum either, and all bins are there that a row can be in: where the lowest score lies would be
    somebody's too.
    """
    noisy = privacy.mechanism != "none"
    held = np.flatnonzero(possible if noisy else counts)
    first, last = int(held[0]), int(held[-1])
    body = {"first_bin": first, "histogram": [int(n) for n in counts[first : last + 1]]}
    shown = not noisy and counts.sum() >= SUMMED
    return {"sum": round(total, 6)} | body if shown else body


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
    if form != FORMAT:
        raise FedgftError(
            f"{source}: format is {form[:40]!r}, this version of fedgft reads {FORMAT!r}; "
            "measure the site again, or use the version that wrote it"
        )
    return Reader(found, source).sums()


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
