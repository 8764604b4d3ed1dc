"""What a call means, worked out from the definitions alone: loops over rows, no code of ours.

Each function returns what the call should answer, or None where the arguments mean nothing, so that
the only right answer is an error. `tests/test_misuse.py` holds these loops against Fairlearn.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

ANY = "any answer"  # the call is meant to work, and what it returns is checked by `holds`


@dataclass(frozen=True)
class Case:
    """`what`: the function; `given`: argument and value in words; `kind`: of misuse."""

    what: str
    argument: str
    given: str
    kind: str
    call: Callable[[], Any]
    answer: Any  # None: must raise
    says: tuple[str, ...] = ()  # an error names one of these; the argument, unless said
    strict: bool = False  # the right answer is demanded: an error is a fault
    holds: Callable[[Any], bool] | None = None  # of what is returned, where `answer` is ANY


METRICS = ("sp", "eop", "eo", "predictive-parity", "acc", "fpr")
NAN = float("nan")


def column(values: Any) -> list[Any] | None:
    """One Python value per row, by position; None where that is not what `values` are."""
    if values is None or isinstance(values, str | bytes | dict | set | int | float | complex):
        return None
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        return None
    if hasattr(values, "detach"):
        values = values.detach().cpu().tolist()
    if hasattr(values, "to_list"):
        values = values.to_list()
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    if isinstance(values, np.ndarray):
        values = values.tolist() if values.ndim else None
    if not isinstance(values, list | tuple):
        return None
    rows = list(values)
    if all(isinstance(row, list | tuple | np.ndarray) and len(row) == 1 for row in rows) and rows:
        rows = [row[0] for row in rows]
    return rows


def missing(value: Any) -> bool:
    unknown = value is None or type(value).__name__ in ("NAType", "NaTType")
    return unknown or (isinstance(value, float) and value != value)


def number(value: Any) -> float | None:
    """The value as a number, if it is one: text is none, nor is a complex number."""
    if isinstance(value, bool | int | float | np.number) and not isinstance(value, complex):
        return float(value)
    return None


def scalars(rows: list[Any] | None) -> bool:
    return rows is not None and not any(
        isinstance(v, list | tuple | np.ndarray | dict) for v in rows
    )


def shares(rows: list[Any], classes: list[Any]) -> list[dict[Any, float]] | None:
    """Predictions as a probability for each class; None where they are none."""
    if rows and all(isinstance(row, list | tuple) for row in rows):
        out = []
        for row in rows:
            values = [number(v) for v in row]
            if len(row) != len(classes) or any(v is None or not 0 <= v <= 1 for v in values):
                return None
            if abs(sum(values) - 1) > 0.01:
                return None
            out.append(dict(zip(classes, values, strict=True)))
        return out
    if not scalars(rows) or any(missing(v) for v in rows):
        return None
    if set(classes) <= {0, 1}:
        scores = [number(v) for v in rows]
        if any(s is None or not 0 <= s <= 1 for s in scores):
            return None
        return [{0: 1 - s, 1: s} for s in scores]
    return [{c: float(v == c) for c in {*classes, v}} for v in rows]


def gap(metric: str, y_true: Any, y_pred: Any, groups: Any, weight: Any = None) -> float | None:
    """The largest difference between groups, NaN where a group has no row of the event."""
    labels = column(y_true)
    predicted = column(y_pred)
    grouped = column(groups)
    if labels is None or predicted is None or grouped is None or not scalars(labels):
        return None
    weights = [1.0] * len(labels) if weight is None else column(weight)
    if weights is None or not len(labels) == len(predicted) == len(grouped) == len(weights):
        return None
    weights = [number(w) for w in weights]
    if any(w is None or not 0 <= w < math.inf for w in weights):
        return None
    if any(missing(v) or isinstance(v, complex) for v in labels):
        return None
    classes = sorted(set(labels), key=str)
    if set(classes) <= {0, 1}:
        classes = [0, 1]
    elif any(isinstance(v, float) and (not math.isfinite(v) or v != int(v)) for v in labels):
        return None  # fractions are no classes
    wide = {len(row) for row in predicted if isinstance(row, list | tuple)}
    if len(wide) == 1 and all(v in range(max(wide)) for v in classes):
        classes = list(range(max(wide)))  # a model may know more classes than occur
    probs = shares(predicted, classes)
    if probs is None:
        return None
    keys = [tuple(g) if isinstance(g, list | tuple) else (g,) for g in grouped]
    known = [not any(missing(v) for v in key) for key in keys]
    names = sorted({tuple(map(str, k)) for k, there in zip(keys, known, strict=True) if there})
    rows = [
        (label, p, tuple(map(str, key)), w)
        for label, p, key, w, there in zip(labels, probs, keys, weights, known, strict=True)
        if there
    ]
    found = set(classes).union(*(p for p in probs)) if probs else set(classes)
    asked = [1] if set(classes) <= {0, 1} else sorted(found, key=str)
    if not names:
        return NAN
    gaps = [
        spread([rate(metric, rows, name, c, y) for name in names])
        for c in (asked if metric != "acc" else [None])
        for y in (sorted(found, key=str) if metric == "eo" else [None])
    ]
    return NAN if any(math.isnan(g) for g in gaps) else max(gaps)


def spread(rates: list[float]) -> float:
    return NAN if any(math.isnan(r) for r in rates) else max(rates) - min(rates)


def rate(metric: str, rows: list[Any], name: tuple[str, ...], c: Any, y: Any) -> float:
    """P(outcome | event) of one group: see docs/metric.md for the table of both."""
    above = below = 0.0
    for label, probs, group, weight in rows:
        if group != name:
            continue
        p = probs.get(c, 0.0)
        own = float(label == c)
        outcome, event = {
            "sp": (p, 1.0),
            "eop": (p, own),
            "fpr": (p, 1.0 - own),
            "predictive-parity": (own, p),
            "acc": (probs.get(label, 0.0), 1.0),
            "eo": (p, float(label == y)),
        }[metric]
        above += weight * outcome * event
        below += weight * event
    return above / below if below > 0 else NAN


def text(value: Any) -> str | None:
    """As a file would have it: 1.0 is "1"."""
    if missing(value):
        return None
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)


def _unmasked(values: Any) -> Any:
    """A masked value is a missing one."""
    if isinstance(values, np.ma.MaskedArray):
        return values.tolist()  # None where a value is masked; `np.ma.filled` would write "?"
    return values


def counts(y_true: Any, y_pred: Any, groups: Any, threshold: float = 0.5) -> Counter | None:
    """Rows by group, label and decision; rows without a label or a prediction are left out."""
    labels, predicted, grouped = (column(_unmasked(v)) for v in (y_true, y_pred, groups))
    if labels is None or predicted is None or grouped is None:
        return None
    if not len(labels) == len(predicted) == len(grouped) or not labels:
        return None
    if not scalars(labels) or not scalars(grouped):
        return None
    if predicted and all(isinstance(row, list | tuple) and len(row) == 2 for row in predicted):
        pairs = [[number(v) for v in row] for row in predicted]
        if any(v is None or not 0 <= v <= 1 for row in pairs for v in row):
            return None
        if any(abs(sum(row) - 1) > 0.01 for row in pairs):
            return None
        predicted = [row[1] for row in pairs]
    if not scalars(predicted) or any(isinstance(v, complex) for v in [*labels, *predicted]):
        return None
    numbers = [number(v) for v in predicted if v is not None]
    scored = any(isinstance(v, float) and 0 < v < 1 for v in predicted if not missing(v))
    if scored:
        if any(n is None or not 0 <= n <= 1 for n in numbers):
            return None
        decided = [None if v is None else str(int(number(v) >= threshold)) for v in predicted]
    else:
        decided = [text(v) for v in predicted]
    known = [(text(y), d) for y, d in zip(labels, decided, strict=True)]
    classes = sorted({y for y, d in known if y is not None and d is not None})
    if not classes:
        return None
    if scored and classes not in (["0"], ["1"], ["0", "1"]):
        if len(classes) != 2:
            return None
        known = [(y, None if d is None else classes[int(d)]) for y, d in known]
    elif scored and len(classes) == 1:
        classes = ["0", "1"]
    if any(d not in classes and {d, *classes} - {"0", "1"} for _, d in known if d is not None):
        return None
    found: Counter = Counter()
    for (y, d), g in zip(known, grouped, strict=True):
        if y is not None and d is not None:
            found[text(g), y, d] += 1
    return found


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    odds = [math.exp(v - top) for v in row]
    return [o / sum(odds) for o in odds]


def indices(
    values: Any, rows: int, least: int, known: int, *, loose: bool = False
) -> list[int] | None:
    """Whole numbers from `least` to `known` - 1, one for each row, whatever their type.

    If `loose`, truth values are 0 and 1; and where `least` is -1, a missing value is -1 and a
    dictionary may hold the column.
    """
    if loose and least == -1 and isinstance(values, dict) and len(values) == 1:
        (values,) = values.values()
    held = column(values)
    if held is None or len(held) != rows or not scalars(held):
        return None
    if loose:
        held = [int(v) if isinstance(v, bool) else v for v in held]
        held = [-1 if least == -1 and missing(v) else v for v in held]
    found = [number(v) for v in held]
    if any(isinstance(v, bool) for v in held):
        return None
    if any(n is None or n != n or n in (math.inf, -math.inf) or n != int(n) for n in found):
        return None
    whole = [int(n) for n in found]
    return whole if all(least <= n < known for n in whole) else None


def message(metric: str, logits: Any, y: Any, a: Any, groups: int, *, hard: bool) -> Any:
    """What `Penalty.statistics` sums up for two classes: rows, then numerators, then events.

    One logit per row is that of class 1, beside a logit of 0.
    """
    held = column(logits)
    if held is None:
        return None
    if hasattr(logits, "detach") and scalars(held):
        held = [[0.0, v] for v in held]
    if held and not all(isinstance(row, list) for row in held):
        return None
    if np.asarray(held, dtype=object).ndim != 2 and held:
        return None
    rows = [[number(v) for v in row] for row in held]
    if any(len(row) != 2 or any(v is None or not math.isfinite(v) for v in row) for row in rows):
        return None
    labels = indices(y, len(rows), 0, 2, loose=True)
    owners = indices(a, len(rows), -1, groups, loose=True)
    if labels is None or owners is None:
        return None
    above = [0.0] * groups
    below = [0.0] * groups
    for row, label, owner in zip(rows, labels, owners, strict=True):
        if owner < 0:
            continue
        p = softmax(row)[1]
        p = float(row[1] > row[0]) if hard else p
        event = {"sp": 1.0, "eop": float(label == 1), "fpr": float(label == 0)}[metric]
        above[owner] += p * event
        below[owner] += event
    return np.array([len(rows), *above, *below])
