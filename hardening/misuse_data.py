"""`Dataset`, `Federation`, `partition`, `standardize`, `synthetic`."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import misuse_oracle as oracle
import numpy as np
from misuse_oracle import ANY, Case
from misuse_values import (
    DATES,
    INDICES,
    RNG,
    ROWS,
    SCALARS,
    A,
    G,
    Y,
    one_of,
    real,
    scalar_cases,
    swapped,
    whole,
)

import fedgft
from fedgft.data.partition import KINDS

FEATURES = RNG.standard_normal((ROWS, 3)).astype(np.float32)
FIELDS: dict[str, Any] = {
    "name": "small",
    "features": FEATURES,
    "labels": Y,
    "groups": A,
    "columns": ("u", "v", "w"),
    "classes": ("no", "yes"),
    "group_names": ("f", "m"),
    "clients": (np.arange(ROWS) // 8),
    "client_names": ("x", "y", "z"),
}
TABLES: tuple[tuple[str, str, Any], ...] = (
    ("unusual", "float64", FEATURES.astype(float)),
    ("unusual", "float16", FEATURES.astype(np.float16)),
    ("unusual", "whole numbers", (FEATURES * 10).astype(int)),
    ("unusual", "a list", FEATURES.tolist()),
    ("unusual", "not contiguous", np.asfortranarray(FEATURES)),
    ("NaN", "NaN", swapped(FEATURES, np.nan)),
    ("NaN", "infinity", swapped(FEATURES, np.inf)),
    ("NaN", "minus infinity", swapped(FEATURES, -np.inf)),
    ("dtype", "text", FEATURES.astype(str)),
    ("dtype", "objects", FEATURES.astype(object)),
    ("dtype", "complex", FEATURES.astype(complex)),
    ("dtype", "dates", np.stack((DATES,) * 3, 1)),
    ("shape", "one axis", FEATURES[:, 0]),
    ("shape", "short", FEATURES[:-1]),
    ("shape", "fewer columns", FEATURES[:, :2]),
    ("shape", "a number", 1.0),
    ("shape", "ragged", [[1.0], [1.0, 2.0]] * 12),
    ("empty", "no row", FEATURES[:0]),
    ("empty", "None", None),
    ("huge", "1e300", swapped(FEATURES, 1e300, dtype=float)),
    ("misaligned", "turned around", FEATURES.T),
    ("type", "text alone", "features"),
    ("unusual", "a masked array", np.ma.array(FEATURES, mask=FEATURES > 2)),
)
TEXTS: tuple[tuple[str, str, Any], ...] = (
    ("unusual", "a list", ["f", "m"]),
    ("type", "one text", "fm"),
    ("type", "numbers", (0, 1)),
    ("type", "None", None),
    ("type", "a number", 3),
    ("NaN", "a NaN", ("f", math.nan)),
    ("empty", "none", ()),
    ("range", "one", ("f",)),
    ("range", "one twice", ("f", "f")),
    ("dtype", "bytes", (b"f", b"m")),
    ("unusual", "three", ("f", "m", "o")),
)


def good_features(value: Any) -> bool:
    """Finite numbers (24, 3), in plain Python."""
    if isinstance(value, np.ma.MaskedArray) or value is None or isinstance(value, str | float):
        return False
    rows = value.tolist() if isinstance(value, np.ndarray) else value
    if len(rows) != ROWS or not all(isinstance(r, list) and len(r) == 3 for r in rows):
        return False
    if isinstance(value, np.ndarray) and value.dtype == object:
        return False
    flat = [v for row in rows for v in row]
    return all(isinstance(v, int | float) and math.isfinite(v) and abs(v) < 1e38 for v in flat)


def dataset_cases() -> Iterator[Case]:
    ranges = {"labels": (0, 2), "groups": (-1, 2), "clients": (0, 3)}
    both = {
        "construct": lambda **f: fedgft.Dataset(**FIELDS | f),
        "replace": lambda **f: replace(fedgft.Dataset(**FIELDS), **f),
    }
    for how, make in both.items():
        for argument, (low, high) in ranges.items():
            for kind, given, value in INDICES:
                good = oracle.indices(value, ROWS, low, high)
                if argument == "clients" and value is None:
                    good = []
                yield Case(
                    f"fedgft.Dataset ({how})",
                    argument,
                    given,
                    kind,
                    lambda make=make, argument=argument, value=value: _listed(
                        getattr(make(**{argument: value}), argument)
                    ),
                    good,
                    (argument,),
                    strict=kind == "unusual",
                )
        for kind, given, value in TABLES:
            yield Case(
                f"fedgft.Dataset ({how})",
                "features",
                given,
                kind,
                lambda make=make, value=value: make(features=value).features.shape,
                (ROWS, 3) if good_features(value) else None,
                ("features", "columns", "labels"),
                strict=given in ("float64", "whole numbers"),
            )
    make = both["construct"]
    for argument, least, known in (
        ("classes", 2, 2),
        ("group_names", 0, 2),
        ("columns", 3, 3),
        ("client_names", 0, 3),
    ):
        for kind, given, value in TEXTS:
            texts = isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)
            enough = texts and len(value) >= max(least, known)
            exact = argument != "columns" or (texts and len(value) == 3)
            good = bool(
                enough and exact and (argument != "classes" or len(set(value)) == len(value))
            )
            unsure = texts and argument in ("group_names", "client_names") and enough
            yield Case(
                "fedgft.Dataset",
                argument,
                given,
                kind,
                lambda argument=argument, value=value: make(**{argument: value}),
                ANY if good or unsure else None,
                (
                    argument,
                    {
                        "classes": "labels",
                        "group_names": "groups",
                        "client_names": "clients",
                        "columns": "features",
                    }[argument],
                ),
                strict=good and kind == "unusual",
            )
    masks = (
        ("unusual", "bool", np.arange(ROWS) < 6),
        ("dtype", "row numbers", np.arange(6)),
        ("dtype", "0 and 1", Y),
        ("shape", "short", np.ones(3, bool)),
        ("dtype", "text", G),
        ("type", "a number", 3),
        ("NaN", "NaN", np.full(ROWS, np.nan)),
        ("empty", "no row", np.ones(0, bool)),
    )
    for kind, given, value in masks:
        good = kind == "unusual"
        yield Case(
            "fedgft.Dataset",
            "test",
            given,
            kind,
            lambda value=value: make(test=value),
            ANY if good else None,
            strict=good,
        )
    for argument in ("center", "scale"):
        for kind, given, value in (
            ("shape", "short", np.ones(2)),
            ("NaN", "NaN", np.full(3, np.nan)),
            ("dtype", "text", np.array(list("abc"))),
            ("type", "text", "abc"),
            ("unusual", "ones", np.ones(3)),
        ):
            good = kind == "unusual"
            yield Case(
                "fedgft.Dataset",
                argument,
                given,
                kind,
                lambda argument=argument, value=value: make(**{argument: value}),
                ANY if good else None,
                strict=good,
            )
    for kind, given, value in SCALARS:
        yield Case(
            "fedgft.Dataset",
            "name",
            given,
            kind,
            lambda value=value: make(name=value),
            ANY if isinstance(value, str) else None,
        )


def _listed(values: Any) -> list[int]:
    return [] if values is None else values.tolist()


@cache
def data() -> Any:
    return fedgft.Dataset(**FIELDS)


@cache
def made() -> Any:
    return fedgft.partition(data(), "iid", clients=2, seed=0, test_share=0.25)


def federation_cases() -> Iterator[Case]:
    rows = np.arange(18)
    offsets = np.array([0, 10, 18])
    test = np.arange(18, 24)
    base = {"dataset": data(), "rows": rows, "offsets": offsets, "test": test}
    make = lambda **f: fedgft.Federation(**base | f)  # noqa: E731
    good_rows = np.arange(18)
    for argument in ("rows", "test"):
        for kind, given, value in (
            ("unusual", "int32", good_rows.astype(np.int32)),
            ("unusual", "a list", good_rows.tolist()),
            ("range", "beyond", good_rows + 20),
            ("range", "far beyond", good_rows + 10**8),
            ("range", "negative", good_rows - 1),
            ("dtype", "text", good_rows.astype(str)),
            ("dtype", "fractions", good_rows + 0.5),
            ("dtype", "bool", good_rows > 3),
            ("NaN", "NaN", good_rows * np.nan),
            ("shape", "two axes", good_rows[:, None]),
            ("shape", "a number", 3),
            ("type", "None", None),
            ("type", "text alone", "rows"),
            ("huge", "2^40", good_rows + 2**40),
        ):
            good = kind == "unusual"
            yield Case(
                "fedgft.Federation",
                argument,
                given,
                kind,
                lambda argument=argument, value=value: make(**{argument: value}),
                ANY if good else None,
                strict=good,
            )
    for kind, given, value in (
        ("unusual", "one client", np.array([0, 18])),
        ("unusual", "a client without rows", np.array([0, 0, 18])),
        ("range", "falling", np.array([0, 12, 6, 18])),
        ("range", "beyond", np.array([0, 30])),
        ("range", "not from 0", np.array([1, 18])),
        ("range", "not to the end", np.array([0, 17])),
        ("empty", "none", np.array([], int)),
        ("empty", "one", np.array([0])),
        ("dtype", "text", np.array(["0", "18"])),
        ("shape", "two axes", np.array([[0, 18]])),
        ("NaN", "NaN", np.array([0, np.nan, 18])),
        ("type", "a number", 2),
        ("type", "None", None),
    ):
        good = kind == "unusual"
        yield Case(
            "fedgft.Federation",
            "offsets",
            given,
            kind,
            lambda value=value: make(offsets=value).num_clients,
            len(value) - 1 if good else None,
            strict=good,
        )
    for argument in ("mean", "spread"):
        for kind, given, value in (
            ("shape", "short", np.ones(2)),
            ("NaN", "NaN", np.full(3, np.nan)),
            ("dtype", "text", np.array(list("abc"))),
            ("range", "two axes", np.ones((3, 3))),
        ):
            pair = {"mean": np.zeros(3), "spread": np.ones(3)} | {argument: value}
            yield Case(
                "fedgft.Federation", argument, given, kind, lambda pair=pair: make(**pair), None
            )
    yield Case(
        "fedgft.Federation",
        "spread",
        "zero",
        "range",
        lambda: make(mean=np.zeros(3), spread=np.zeros(3)),
        None,
    )
    for kind, given, value in SCALARS:
        yield Case(
            "fedgft.Federation",
            "dataset",
            given,
            kind,
            lambda value=value: make(dataset=value),
            None,
        )
        yield Case(
            "fedgft.standardize",
            "federation",
            given,
            kind,
            lambda value=value: fedgft.standardize(value),
            None,
        )
        yield Case(
            "fedgft.partition",
            "dataset",
            given,
            kind,
            lambda value=value: fedgft.partition(value),
            None,
        )
    deep = replace(data(), features=np.zeros((ROWS, 4, 3), np.float32), columns=())
    yield Case(
        "fedgft.standardize",
        "federation",
        "sequences (n, T, C)",
        "shape",
        lambda: fedgft.standardize(fedgft.partition(deep, "iid", clients=2)),
        None,
    )
    yield Case(
        "fedgft.standardize",
        "federation",
        "a Dataset",
        "type",
        lambda: fedgft.standardize(data()),
        None,
    )
    yield Case(
        "fedgft.standardize",
        "federation",
        "a federation",
        "unusual",
        lambda: np.round(fedgft.standardize(made()).mean, 9).tolist(),
        np.round(FEATURES[made().rows].astype(float).mean(0), 9).tolist(),
        strict=True,
    )

    def cut(**given: Any) -> Any:
        return fedgft.partition(data(), **{"kind": "iid", "clients": 2} | given)

    def complete(found: Any) -> bool:
        return sorted([*found.rows.tolist(), *found.test.tolist()]) == list(range(ROWS))

    yield from scalar_cases(
        "fedgft.partition",
        cut,
        {
            "clients": whole(1, 17),
            "seed": whole(0, 2**63 - 1),
            "test_share": real(0, 0.95, high_open=True),
            "kind": one_of(*KINDS),
            "protocol_test": one_of("disjoint"),
            "train_rows": lambda v: v is None,
            "test_rows": lambda v: v is None,
        },
        says={
            "kind": ("partition", "kind"),
            "test_share": ("test_share", "clients"),
            "train_rows": ("train_rows", "clients"),
        },
        unsure=lambda name, value: name in ("train_rows", "test_rows") and whole(1, 7)(value),
        holds=lambda found: complete(found) or len(found.rows) + len(found.test) < ROWS,
    )
    yield from scalar_cases(
        "fedgft.partition (dirichlet)",
        lambda **g: cut(kind="dirichlet", **g),
        {"alpha": real(0, math.inf, low_open=True)},
        holds=complete,
    )
    bare = fedgft.Dataset(**FIELDS | {"clients": None, "client_names": ()})
    yield Case(
        "fedgft.partition",
        "kind",
        "column, and there is no client column",
        "range",
        lambda: fedgft.partition(bare, "column"),
        None,
        ("client",),
    )
    empty = fedgft.Dataset("e", FEATURES[:0], Y[:0], A[:0], ("u", "v", "w"))
    for kind in KINDS[:-1]:  # all but the client column
        yield Case(
            "fedgft.partition",
            "dataset",
            f"no rows ({kind})",
            "empty",
            lambda kind=kind: fedgft.partition(empty, kind),
            None,
            ("row", "client"),
        )


def synthetic_cases() -> Iterator[Case]:
    def call(**given: Any) -> Any:
        return len(fedgft.data.synthetic(**{"rows": 20, "features": 2} | given))

    yield from scalar_cases(
        "fedgft.data.synthetic",
        call,
        {
            "rows": whole(1, 10**6),
            "features": whole(1, 10**4),
            "groups": whole(2, 10**3),
            "gap": real(0, 1, high_open=True),
            "signal": real(0, 1e6, low_open=True),
            "seed": whole(0),
        },
        unsure=lambda name, value: (
            name == "signal" and isinstance(value, float | int) and value > 1e6
        ),
    )
