"""Columns of labels, predictions and groups: the metric functions and `measure`."""

from collections.abc import Iterator
from typing import Any

import misuse_oracle as oracle
import numpy as np
import pandas as pd
import polars as pl
import torch
from misuse_oracle import Case
from misuse_values import (
    DATES,
    ROWS,
    SHUFFLED,
    D,
    G,
    P,
    Y,
    one_of,
    optional,
    real,
    scalar_cases,
    series,
    swapped,
    whole,
)

import fedgft
from fedgft import auditing as audits

LABELS: tuple[tuple[str, str, Any], ...] = (
    ("unusual", "a list", Y.tolist()),
    ("unusual", "int8", Y.astype(np.int8)),
    ("unusual", "whole floats", Y.astype(float)),
    ("unusual", "bool", Y.astype(bool)),
    ("unusual", "one column of a table", Y[:, None]),
    ("unusual", "a Series", series(Y)),
    ("unusual", "polars", pl.Series(Y)),
    ("unusual", "a tensor", torch.as_tensor(Y)),
    ("unusual", "a tuple", tuple(Y.tolist())),
    ("dtype", "text", Y.astype(str)),
    ("dtype", "words", np.where(Y, "yes", "no")),
    ("dtype", "objects", np.array([object() for _ in Y])),
    ("dtype", "complex", Y.astype(complex)),
    ("dtype", "dates", DATES),
    ("dtype", "bytes", b"0101"),
    ("dtype", "mixed", [*Y[:-1].tolist(), "1"]),
    ("shape", "two columns", np.stack((Y, Y), 1)),
    ("shape", "three axes", Y[:, None, None] + np.zeros((1, 2, 2))),
    ("shape", "a number", 1),
    ("shape", "short", Y[:-1]),
    ("shape", "long", np.append(Y, 1)),
    ("shape", "ragged", [[1], [1, 2]] * 12),
    ("empty", "no row", Y[:0]),
    ("empty", "None", None),
    ("empty", "an empty text", ""),
    ("NaN", "NaN", swapped(Y, np.nan, dtype=float)),
    ("NaN", "None in it", swapped(Y, None, dtype=object)),
    ("NaN", "pandas NA", series(Y).astype("Int64").mask(np.arange(ROWS) == 3)),
    ("NaN", "infinity", swapped(Y, np.inf, dtype=float)),
    ("range", "half", swapped(Y, 0.5, dtype=float)),
    ("range", "-1 and 1", 2 * Y - 1),
    ("range", "1 and 2", Y + 1),
    ("range", "three classes", swapped(Y, 2)),
    ("range", "one class", np.ones(ROWS, int)),
    ("huge", "10^18", swapped(Y, 10**18)),
    ("huge", "1e300", swapped(Y, 1e300, dtype=float)),
    ("misaligned", "a shuffled Series", series(Y)[SHUFFLED]),
    ("unusual", "a masked array", np.ma.array(Y, mask=np.arange(ROWS) == 3)),
    ("type", "a dictionary", {"y": Y}),
    ("type", "a set", {0, 1}),
    ("type", "a function", len),
)
PREDICTIONS = (
    *LABELS,
    ("unusual", "scores", P),
    ("unusual", "float32 scores", P.astype(np.float32)),
    ("unusual", "two columns of scores", np.stack((1 - P, P), 1)),
    ("NaN", "a NaN score", swapped(P, np.nan)),
    ("NaN", "an infinite score", swapped(P, np.inf)),
    ("NaN", "a NaN in a column", swapped(np.stack((1 - P, P), 1), np.nan)),
    ("range", "a score above 1", swapped(P, 1.2)),
    ("range", "a score below 0", swapped(P, -0.2)),
    ("range", "logits", np.stack((-P, P), 1) * 4),
    ("range", "columns that add up to 2", np.stack((P, P), 1) * 0 + 1.0),
    ("shape", "three columns", np.stack((1 - P, P / 2, P / 2), 1)),
    ("dtype", "scores as text", P.astype(str)),
)
GROUPS = (
    *((k, n, v) for k, n, v in LABELS if n not in ("three axes", "complex", "dates", "1e300")),
    ("unusual", "words", G),
    ("unusual", "words and None", swapped(G, None, dtype=object)),
    ("unusual", "categories", pd.Series(G).astype("category")),
    ("unusual", "two attributes", np.stack((G, Y.astype(str)), 1)),
    ("misaligned", "a shuffled frame", pd.DataFrame({"g": G}).iloc[SHUFFLED]),
    ("empty", "none recorded", np.array([None] * ROWS)),
)
WEIGHTS: tuple[tuple[str, str, Any], ...] = (
    ("unusual", "ones", np.ones(ROWS)),
    ("unusual", "whole numbers", [1, 2] * 12),
    ("unusual", "a Series", series(P)),
    ("range", "negative", swapped(P, -1.0)),
    ("NaN", "NaN", swapped(P, np.nan)),
    ("NaN", "infinity", swapped(P, np.inf)),
    ("dtype", "words", G),
    ("dtype", "complex", P.astype(complex)),
    ("shape", "short", P[:-1]),
    ("shape", "two columns", np.stack((P, P), 1)),
    ("shape", "a number", 2.0),
    ("empty", "no row", P[:0]),
    ("range", "zeros", np.zeros(ROWS)),
    ("misaligned", "a shuffled Series", series(P)[SHUFFLED]),
)
FUNCTIONS = {
    "statistical_parity_difference": "sp",
    "equal_opportunity_difference": "eop",
    "equalized_odds_difference": "eo",
    "predictive_parity_difference": "predictive-parity",
    "accuracy_parity_difference": "acc",
    "false_positive_rate_difference": "fpr",
}
STRICT = (
    "a list",
    "int8",
    "whole floats",
    "bool",
    "a Series",
    "a tensor",
    "polars",
    "scores",
    "words and None",
    "two columns of scores",
    "categories",
    "two attributes",
    "float32 scores",
    "a tuple",
    "ones",
    "whole numbers",
)


def misaligned(kind: str) -> bool:
    """A shuffled Series beside one in order means other rows: only an error will do."""
    return kind == "misaligned"


def function_cases() -> Iterator[Case]:
    tables = {
        "y_true": LABELS,
        "y_pred": PREDICTIONS,
        "sensitive_features": GROUPS,
        "sample_weight": WEIGHTS,
    }
    base = {"y_true": series(Y), "y_pred": series(D), "sensitive_features": series(G)}
    plain = {"y_true": Y, "y_pred": D, "sensitive_features": G}
    for name, metric in FUNCTIONS.items():
        for argument, table in tables.items():
            for kind, given, value in table:
                start = base if misaligned(kind) else plain
                call = start | {argument: value}
                answer = None if misaligned(kind) else oracle.gap(metric, *_values(call))
                other = ("y_pred", "y_true") if argument in ("y_true", "y_pred") else ("rows",)
                yield Case(
                    f"fedgft.{name}",
                    argument,
                    given,
                    kind,
                    lambda name=name, call=call: getattr(fedgft, name)(
                        call["y_true"],
                        call["y_pred"],
                        **{k: v for k, v in call.items() if k not in ("y_true", "y_pred")},
                    ),
                    answer,
                    (argument, *other),
                    strict=answer is not None and kind == "unusual" and given in STRICT,
                )


def _values(call: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(call.get(n) for n in ("y_true", "y_pred", "sensitive_features", "sample_weight"))


def counted(sums: Any) -> Any:
    """The counts of a site's sums, by the names of group, label and decision."""
    (site,) = sums.sites.values()
    classes = tuple(map(oracle.text, map(_number, sums.require_spec().classes)))
    out = {}
    for (group, *more), table in site.tables.items():
        for i, label in enumerate(classes):
            for j, decision in enumerate(classes):
                if table[i, j, 0] and not more:
                    out[group, label, decision] = int(table[i, j, 0])
    return out


def _number(text: str) -> Any:
    """A label that is a number, as that number."""
    try:
        return float(text)
    except ValueError:
        return text


def measure_cases() -> Iterator[Case]:
    tables = {"y_true": LABELS, "y_pred": PREDICTIONS, "sensitive_features": GROUPS}
    base = {"y_true": series(Y), "y_pred": series(D), "sensitive_features": series(G)}
    plain = {"y_true": Y, "y_pred": D, "sensitive_features": G}
    for argument, table in tables.items():
        for kind, given, value in table:
            several = ("two attributes", "a dictionary", "two columns")
            if argument == "sensitive_features" and given in several:
                continue
            call = (base if misaligned(kind) else plain) | {argument: value}
            answer = None if misaligned(kind) else oracle.counts(*_values(call)[:3])
            yield Case(
                "fedgft.auditing.measure",
                argument,
                given,
                kind,
                lambda call=call: counted(
                    audits.measure(
                        call["y_true"],
                        call["y_pred"],
                        sensitive_features=call["sensitive_features"],
                    )
                ),
                None if answer is None else dict(answer),
                (argument, "y_true", "score", "label", "decision", "group", "measure()"),
                strict=answer is not None and kind == "unusual" and given in STRICT,
            )

    def one(**more: Any) -> Any:
        return audits.measure(Y, P, sensitive_features=G, **more)

    yield from scalar_cases(
        "fedgft.auditing.measure",
        one,
        {
            "threshold": real(0, 1),
            "bins": optional(whole(2, 10_000)),
            "min_cell": lambda v: whole(3, 10**6)(v) or whole(0, 0)(v),
            "site": lambda v: isinstance(v, str),
            "delta": lambda v: isinstance(v, int) and v == 0,
            "classes": lambda v: False,
            "values": lambda v: v is None,
            "positive": optional(one_of("1")),
        },
        unsure=lambda name, value: (
            (name == "positive" and str(value) in ("0", "1"))
            or (name in ("classes", "values") and isinstance(value, dict))
            or (name == "delta" and str(value) in ("0.0",))
        ),
        says={
            "classes": ("classes",),
            "values": ("values",),
            "site": ("site",),
            "positive": ("positive", "class", "label"),
        },
    )
