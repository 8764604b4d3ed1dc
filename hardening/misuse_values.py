"""Values to put in an argument's place, and what each kind of argument may be."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from misuse_oracle import ANY, Case

ROWS = 24
RNG = np.random.default_rng(0)
Y = np.array([0, 1] * 12)
D = RNG.integers(2, size=ROWS)
P = RNG.random(ROWS).round(3)
G = np.array(["a", "b", "c"])[RNG.permutation(np.arange(ROWS) % 3)]
A = RNG.permutation(np.arange(ROWS) % 2)
SHUFFLED = RNG.permutation(ROWS)
DATES = np.array(["2020-01-01"] * ROWS, "datetime64[D]")


def swapped(values: Any, value: Any, at: int = 5, dtype: Any = None) -> np.ndarray:
    out = np.array(values, dtype=dtype)
    out[at] = value
    return out


def series(values: Any) -> pd.Series:
    return pd.Series(np.asarray(values))


# -- values for arguments of one kind ------------------------------------------------------------

SCALARS: tuple[tuple[str, str, Any], ...] = (
    ("type", "None", None),
    ("type", "text", "x"),
    ("type", "a number as text", "1"),
    ("type", "bytes", b"1"),
    ("type", "a list", [1]),
    ("type", "a dictionary", {"a": 1}),
    ("type", "a function", len),
    ("type", "a complex number", 1 + 1j),
    ("type", "an array", np.array([1.0, 2.0])),
    ("NaN", "NaN", math.nan),
    ("NaN", "infinity", math.inf),
    ("range", "-1", -1),
    ("range", "-0.5", -0.5),
    ("range", "0", 0),
    ("range", "1.5", 1.5),
    ("range", "2", 2),
    ("huge", "10^30", 10**30),
    ("huge", "1e300", 1e300),
    ("unusual", "numpy's 1", np.int32(1)),
    ("unusual", "numpy's 0.25", np.float32(0.25)),
)


def whole(low: float = -math.inf, high: float = math.inf) -> Callable[[Any], bool]:
    def valid(value: Any) -> bool:
        kind = isinstance(value, int | np.integer) and not isinstance(value, bool)
        return kind and low <= int(value) <= high

    return valid


def real(
    low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> Callable[[Any], bool]:
    def valid(value: Any) -> bool:
        kind = isinstance(value, int | float | np.integer | np.floating)
        if not kind or isinstance(value, bool) or not math.isfinite(value):
            return False
        above = value > low if low_open else value >= low
        return bool(above and (value < high if high_open else value <= high))

    return valid


def optional(inner: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or inner(value)


def one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


def scalar_cases(
    what: str,
    call: Callable[..., Any],
    domains: dict[str, Callable[[Any], bool]],
    *,
    says: dict[str, tuple[str, ...]] | None = None,
    unsure: Callable[[str, Any], bool] = lambda name, value: False,
    holds: Callable[[Any], bool] | None = None,
) -> Iterator[Case]:
    """Every argument with every scalar. `unsure`: both an answer and an error would do."""
    for argument, valid in domains.items():
        for kind, given, value in SCALARS:
            good = valid(value)
            yield Case(
                what,
                argument,
                given,
                kind if not good else "unusual",
                lambda argument=argument, value=value: call(**{argument: value}),
                ANY if good or unsure(argument, value) else None,
                (says or {}).get(argument, ()),
                strict=good and not unsure(argument, value),
                holds=holds,
            )


PROBS = np.stack((1 - P, P), 1)
INDICES: tuple[tuple[str, str, Any], ...] = (
    ("unusual", "a list", A.tolist()),
    ("unusual", "int32", A.astype(np.int32)),
    ("unusual", "uint8", A.astype(np.uint8)),
    ("dtype", "whole floats", A.astype(float)),
    ("dtype", "text", A.astype(str)),
    ("dtype", "words", G),
    ("dtype", "bool", A.astype(bool)),
    ("dtype", "complex", A.astype(complex)),
    ("dtype", "objects", A.astype(object)),
    ("dtype", "dates", DATES),
    ("shape", "two axes", A[:, None]),
    ("shape", "short", A[:-1]),
    ("shape", "long", np.append(A, 0)),
    ("shape", "a number", 1),
    ("shape", "ragged", [[1], [1, 2]] * 12),
    ("empty", "no row", A[:0]),
    ("empty", "None", None),
    ("NaN", "NaN", swapped(A, np.nan, dtype=float)),
    ("NaN", "infinity", swapped(A, np.inf, dtype=float)),
    ("range", "one too high", swapped(A, 2)),
    ("range", "far too high", swapped(A, 100_000_000)),
    ("range", "-1", swapped(A, -1)),
    ("range", "-2", swapped(A, -2)),
    ("range", "half", swapped(A, 0.5, dtype=float)),
    ("huge", "2^62", swapped(A, 2**62)),
    ("huge", "2^63", swapped(A, 2**63, dtype=np.uint64)),
    ("huge", "1e300", swapped(A, 1e300, dtype=float)),
    ("type", "text alone", "0101"),
    ("type", "a dictionary", {"a": A}),
)
