"""What came of a run, from the files that it left."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedgft.errors import FedgftError
from fedgft.files import parsed
from fedgft.flower.journal import FILE, HISTORY

GIVEN_UP = "given up"
TOLD = (
    "target",
    "target_of",
    "reached",
    "collapsed",
    "accuracy_constant",
    "balanced_accuracy",
    "selection_rates",
)
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
        out |= {key: row[key] for key in TOLD if key in row}
        out["sites"] = len(held["sites"]) or sites
        return out | _held_out(held["held_out"], metric)
    except (OSError, *OTHER) as error:
        raise FedgftError(f"{path}: not the history of a run ({error})") from None


def closing(made: dict[str, Any], metric: str) -> str:
    """The last line of a run: gap, target and whether it was met, on which rows; what to try if it
    was missed. `made`: as `summary` has it."""
    said = _share(made["gap_hard"], " points")
    text = f"{metric} gap of decisions on the training rows of {made['sites']} site(s): {said}"
    if made.get("target") is not None:
        text += f", target {100 * made['target']:.1f}: {_verdict(made)}"
    text += "."
    if made.get("collapsed"):
        text += " The model has collapsed: it gives nearly everybody the same decision."
    held = made.get("held_out")
    if held is not None and held["gap_hard"] is not None:
        low, high = _share(held["gap_hard_low"]), _share(held["gap_hard_high"])
        right = f"{_share(held['accuracy_low'])} to {_share(held['accuracy_high'])}"
        text += (
            f" On the rows that they held out: {_share(held['gap_hard'], ' points')} (95% "
            f"interval {low} to {high}), accuracy {_share(held['accuracy'], '%')} ({right})."
        )
    elif held is not None:
        text += " On the rows that they held out it is not estimable: too few rows, or noise."
    if made.get("accuracy_constant") is not None:
        text += (
            f" On the training rows always predicting the most frequent class is right in "
            f"{_share(made['accuracy_constant'], '%')}."
        )
    if made.get("target") is not None and made.get("reached") is False:
        text += " What to try: more rounds, another learning rate, or a larger target."
    return f"{text} {made['rounds']} round(s), {made['seconds']:.0f} s."


def _verdict(made: dict[str, Any]) -> str:
    of = "" if made["target_of"] == "decisions" else f" (for {made['target_of']})"
    if made["reached"] is None:
        return f"cannot be judged{of}"
    return f"{'met' if made['reached'] else 'missed'}{of}"


def _share(value: float | None, unit: str = "") -> str:
    return "not estimable" if value is None else f"{100 * value:.1f}{unit}"


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
