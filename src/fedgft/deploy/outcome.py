"""What came of a run, from the files that it left."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedgft.errors import FedgftError
from fedgft.files import parsed
from fedgft.flower.journal import FILE, HISTORY

GIVEN_UP = "given up"
OTHER = (ValueError, KeyError, TypeError, AttributeError)  # what another's file leads to


def summary(
    folder: Path, status: str, *, seconds: float, sites: int, limit: float
) -> dict[str, Any]:
    """The result in numbers: of the model that was handed over, on the sites' training rows, and,
    apart, on the rows that they held out."""
    out: dict[str, Any] = {"rounds": 0, "accuracy": None, "gap_soft": None, "gap_hard": None,
           "sites": sites, "status": status, "seconds": round(seconds, 1)}  # fmt: skip
    if status == GIVEN_UP:
        out["why"] = f"it was not done after {limit:g} s (--timeout)"
    elif status != "finished:completed":
        out["why"] = why_failed(folder)
    rounds = [row.get("round") for row in progress(folder)]
    out["rounds"] = max((n for n in rounds if type(n) is int), default=0)
    path = folder / HISTORY
    if not path.exists():
        return out
    try:
        held = parsed(path.read_text("utf-8"))
        row, metric = held["about"]["measured"] or {}, held["about"]["metric"]
        out |= {key: row.get(key) for key in ("accuracy", "gap_soft", "gap_hard")}
        out["sites"] = len(held["sites"]) or sites
        return out | _held_out(held["held_out"], metric)
    except (OSError, *OTHER) as error:
        raise FedgftError(f"{path}: not the history of a run ({error})") from None


def _held_out(found: dict[str, Any], metric: str) -> dict[str, Any]:
    """Estimates with their intervals; one without an interval (too few rows, too much noise) is
    none."""
    if metric not in found.get("metrics", {}):  # no report, or several metrics at once
        return {}
    gap, right = found["metrics"][metric], found["accuracy"]
    sure = lambda of, name: of[name] if None not in (of["low"], of["high"]) else None  # noqa: E731
    held = {"accuracy": sure(right, "rate"), "gap_hard": sure(gap, "gap")}
    for name, of in (("accuracy", right), ("gap_hard", gap)):
        held |= {f"{name}_low": of["low"], f"{name}_high": of["high"]}
    return {"held_out": held}


def why_failed(folder: Path) -> str:
    """In the app's own words, or the engine's where the app said nothing."""
    said = [str(row["error"]) for row in progress(folder) if "error" in row]
    if said:
        return said[-1]
    try:
        text = (folder / "logs" / "run.log").read_text("utf-8", "replace")
    except OSError:
        return "there is no log"
    found = re.findall(r"^\s*(?:[\w.]+\.)?(\w*(?:Error|Exception): .*)", text, re.MULTILINE)
    return (found or ["see the log"])[-1].strip()


def progress(folder: Path) -> list[dict[str, Any]]:
    try:
        text = (folder / FILE).read_text("utf-8", "replace")
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        with suppress(ValueError):  # a line that is still being written
            rows.append(parsed(line))
    return [row for row in rows if isinstance(row, dict)]
