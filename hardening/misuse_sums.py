"""Sums from Python: `Sums` and `Penalty`."""

import math
from collections.abc import Iterator
from typing import Any

import misuse_oracle as oracle
import numpy as np
import torch
from misuse_oracle import ANY, Case
from misuse_values import (
    INDICES,
    PROBS,
    RNG,
    ROWS,
    SCALARS,
    A,
    D,
    P,
    Y,
    one_of,
    optional,
    real,
    scalar_cases,
    swapped,
    whole,
)

import fedgft
from fedgft.sums import Sums

SCORES: tuple[tuple[str, str, Any], ...] = (
    ("unusual", "float32", PROBS.astype(np.float32)),
    ("unusual", "float16", PROBS.astype(np.float16)),
    ("unusual", "a list", PROBS.tolist()),
    ("unusual", "decisions", np.eye(2)[D]),
    ("NaN", "NaN", swapped(PROBS, np.nan)),
    ("NaN", "infinity", swapped(PROBS, np.inf)),
    ("NaN", "minus infinity", swapped(PROBS, -np.inf)),
    ("NaN", "all NaN", np.full((ROWS, 2), np.nan)),
    ("range", "logits", np.stack((-P, P), 1) * 5),
    ("range", "rows that add up to 2", np.ones((ROWS, 2))),
    ("range", "percent", PROBS * 100),
    ("dtype", "text", PROBS.astype(str)),
    ("dtype", "complex", PROBS.astype(complex)),
    ("dtype", "objects", PROBS.astype(object)),
    ("shape", "one axis", P),
    ("shape", "one column", P[:, None]),
    ("shape", "three axes", PROBS[:, None]),
    ("shape", "short", PROBS[:-1]),
    ("shape", "a number", 0.5),
    ("empty", "no row", PROBS[:0]),
    ("empty", "no column", PROBS[:, :0]),
    ("empty", "None", None),
    ("huge", "1e300", swapped(PROBS, 1e300)),
    ("type", "text alone", "0.5"),
)


def tally_gap(probs: Any, labels: Any, groups: Any, num_groups: Any) -> float | None:
    rows = oracle.column(probs)
    if rows is None or any(not isinstance(r, list | tuple) or len(r) != 2 for r in rows):
        return None
    y = oracle.indices(labels, len(rows), 0, 2)
    a = oracle.indices(groups, len(rows), -1, 2)
    if y is None or a is None:
        return None
    recorded = [g if g >= 0 else None for g in a]
    seen = {g for g in recorded if g is not None}
    if len(seen) < num_groups:
        return math.nan
    return oracle.gap("eop", y, probs, recorded)


def tally_cases() -> Iterator[Case]:
    base = {"probs": PROBS, "labels": Y, "groups": A, "num_groups": 2}
    tables = {"probs": SCORES, "labels": INDICES, "groups": INDICES}

    def call(**given: Any) -> float:
        held = base | given
        made = Sums.of(held["probs"], held["labels"], held["groups"], num_groups=held["num_groups"])
        return float(made.gap("eop", "soft"))

    for argument, table in tables.items():
        for kind, given, value in table:
            if argument != "probs" and isinstance(value, np.ndarray) and value.shape == A.shape:
                value = value if argument == "groups" else _as_labels(value)
            yield Case(
                "fedgft.sums.Sums.of",
                argument,
                given,
                kind,
                lambda argument=argument, value=value: call(**{argument: value}),
                tally_gap(*(base | {argument: value}).values()),
                (argument, "probs"),
                strict=kind == "unusual",
            )
    yield from scalar_cases(
        "fedgft.sums.Sums.of",
        call,
        {"num_groups": whole(2, 10_000)},
        says={"num_groups": ("groups",)},
    )
    tally = Sums.of(PROBS, Y, A, num_groups=2)
    for what, method in (("gap", tally.gap), ("statistics", tally.statistics)):
        for kind, given, value in SCALARS:
            yield Case(
                f"fedgft.sums.Sums.{what}",
                "metric",
                given,
                kind,
                lambda method=method, value=value: method(value, "hard"),
                None,
            )
            yield Case(
                f"fedgft.sums.Sums.{what}",
                "kind",
                given,
                kind,
                lambda method=method, value=value: method("sp", value),
                None,
            )
        for metric in oracle.METRICS:
            yield Case(
                f"fedgft.sums.Sums.{what}",
                "metric",
                metric,
                "unusual",
                lambda method=method, metric=metric: method(metric, "hard"),
                ANY,
                strict=True,
            )


def _as_labels(value: np.ndarray) -> np.ndarray:
    return value


LOGITS = torch.as_tensor(RNG.standard_normal((ROWS, 2)))
TENSORS: tuple[tuple[str, str, Any], ...] = (
    ("unusual", "float32", LOGITS.float()),
    ("unusual", "bf16", LOGITS.bfloat16()),
    ("unusual", "fp16", LOGITS.half()),
    ("unusual", "with a gradient", LOGITS.clone().requires_grad_()),
    ("unusual", "not contiguous", LOGITS.T.contiguous().T),
    ("NaN", "NaN", torch.as_tensor(swapped(LOGITS.numpy(), np.nan))),
    ("NaN", "infinity", torch.as_tensor(swapped(LOGITS.numpy(), np.inf))),
    ("NaN", "minus infinity", torch.as_tensor(swapped(LOGITS.numpy(), -np.inf))),
    ("shape", "one axis", LOGITS[:, 0]),
    ("shape", "one column", LOGITS[:, :1]),
    ("shape", "three axes", LOGITS[:, None]),
    ("shape", "short", LOGITS[:-1]),
    ("shape", "a number", torch.tensor(1.0)),
    ("empty", "no row", LOGITS[:0]),
    ("empty", "None", None),
    ("dtype", "whole numbers", LOGITS.long()),
    ("dtype", "complex", LOGITS.to(torch.complex64)),
    ("dtype", "a list", LOGITS.tolist()),
    ("dtype", "text", "logits"),
    ("dtype", "a table of words", np.array([["a", "b"]] * ROWS)),
    ("huge", "1e300", torch.as_tensor(swapped(LOGITS.numpy(), 1e300))),
)


def penalty_cases() -> Iterator[Case]:
    base = {"logits": LOGITS, "y": Y, "a": A}
    tables = {"logits": TENSORS, "y": INDICES, "a": INDICES}
    for how in ({"lam": 1.0}, {"target": 0.02}):
        for metric in ("sp", "eop", "fpr"):
            for argument, table in tables.items():
                for kind, given, value in table:
                    if metric != "sp" and argument == "logits" and kind != "unusual":
                        continue
                    held = base | {argument: value}
                    answer = oracle.message(metric, *held.values(), 2, hard="target" in how)
                    if given == "whole numbers" or (given == "objects" and argument != "logits"):
                        answer = None if given == "whole numbers" else answer
                    if answer is not None and isinstance(value, torch.Tensor):
                        wide = base | {argument: value.double()}
                        answer = oracle.message(metric, *wide.values(), 2, hard="target" in how)
                    yield Case(
                        "fedgft.Penalty.statistics",
                        argument,
                        f"{given} ({metric})",
                        kind,
                        lambda how=how, metric=metric, held=held: fedgft.Penalty(
                            metric, **how
                        ).statistics(*held.values()),
                        answer,
                        (argument, "logits"),
                        strict=kind == "unusual",
                    )

    def loss(**given: Any) -> float:
        penalty = fedgft.Penalty("sp", 3.0)
        penalty.update(penalty.statistics(LOGITS, Y, A))
        held = base | given
        return float(penalty(held["logits"], held["y"], held["a"]))

    message = oracle.message("sp", LOGITS, Y, A, 2, hard=False)
    first, second = message[1:3] / message[3:5]
    for argument, table in tables.items():
        for kind, given, value in table:
            held = base | {argument: value}
            answer = _loss(held, first - second, message)
            if argument == "logits" and kind == "NaN":
                answer = math.nan  # as the cross-entropy beside it
            yield Case(
                "fedgft.Penalty()",
                argument,
                given,
                kind,
                lambda argument=argument, value=value: loss(**{argument: value}),
                answer,
                (argument, "logits"),
                strict=kind == "unusual",
            )
    penalty = lambda **more: fedgft.Penalty(**{"metric": "sp"} | more)  # noqa: E731
    yield from scalar_cases("fedgft.Penalty", penalty, {"lam": real(0, math.inf)})
    yield from scalar_cases("fedgft.Penalty", penalty, {"target": real(0, 1, high_open=True)})
    yield from scalar_cases(
        "fedgft.Penalty",
        lambda **more: fedgft.Penalty(**{"metric": "sp", "lam": 1.0} | more),
        {
            "groups": lambda value: _names_groups(value) or optional(whole(2, 10_000))(value),
            "rounds": optional(whole(1)),
            "metric": one_of("sp"),
            "penalty": one_of("l1"),
        },
    )


def _names_groups(value: Any) -> bool:
    """A list of two distinct names or more."""
    return isinstance(value, list | tuple | np.ndarray) and len({*np.ravel(value).tolist()}) > 1


def _loss(held: dict[str, Any], gap: float, message: np.ndarray) -> float | None:
    """lam J'(F) <dF/dS, mean of the rows' statistics>, written out for two groups and J = F^2/2."""
    logits = held["logits"].double() if isinstance(held["logits"], torch.Tensor) else None
    found = (
        None
        if logits is None
        else oracle.message("sp", logits, held["y"], held["a"], 2, hard=False)
    )
    if found is None or held["logits"].dtype in (torch.int64, torch.complex64):
        return None
    rows = found[0]
    if not rows:
        return 0.0
    total = message[0]
    above = message[1:3]
    below = message[3:5]
    sign = math.copysign(1.0, gap)
    part = 0.0
    for g, way in ((0, sign), (1, -sign)):
        numerator = above[g] / total
        event = below[g] / total
        part += way * (found[1 + g] / rows / event - numerator / event**2 * found[3 + g] / rows)
    return 3.0 * abs(gap) * part
