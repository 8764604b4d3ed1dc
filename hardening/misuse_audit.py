"""`audit`, files of sums, tables, the theory and Flower's wrappers."""

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import misuse_oracle as oracle
import pandas as pd
import polars as pl
from misuse_data import FEATURES
from misuse_oracle import ANY, Case
from misuse_values import (
    PROBS,
    ROWS,
    SCALARS,
    A,
    D,
    G,
    P,
    Y,
    one_of,
    optional,
    real,
    scalar_cases,
    whole,
)

import fedgft
from fedgft import auditing as audits
from fedgft import data as datasets
from fedgft import theory
from fedgft.sums import stack


@cache
def site() -> Any:
    return audits.measure(Y, P, sensitive_features=G, site="north")


def audit_cases(folder: Path) -> Iterator[Case]:
    def call(**given: Any) -> Any:
        return audits.audit(**{"sums": [site()]} | given).summary["metrics"]["sp"]["gap"]

    yield from scalar_cases(
        "fedgft.auditing.audit",
        call,
        {
            "sums": lambda v: False,
            "bootstrap": lambda v: whole(0, 0)(v),
            "seed": whole(0),
            "reference_groups": lambda v: False,
            "adjust_to": optional(lambda v: False),
        },
        unsure=lambda name, value: name == "bootstrap" and whole(1, 10)(value),
        says={"bootstrap": ("bootstrap", "sites"), "adjust_to": ("adjust_to", "metric")},
    )
    for kind, given, value in (
        ("name", "an unknown metric", {"zz": 0.1}),
        ("range", "above 1", {"sp": 1.5}),
        ("range", "negative", {"sp": -0.1}),
        ("NaN", "NaN", {"sp": math.nan}),
        ("type", "text", {"sp": "0.1"}),
        ("type", "a number as name", {3: 0.1}),
        ("unusual", "sp", {"sp": 0.1}),
    ):
        good = kind == "unusual"
        yield Case(
            "fedgft.auditing.audit",
            "adjust_to",
            given,
            kind,
            lambda value=value: call(adjust_to=value),
            ANY if good else None,
            ("adjust", "metric"),
            strict=good,
        )
    for kind, given, value in (
        ("name", "an unknown group", ["z"]),
        ("type", "numbers", [1]),
        ("type", "one text", "a"),
        ("unusual", "a group", ["a"]),
    ):
        good = kind == "unusual"
        yield Case(
            "fedgft.auditing.audit",
            "reference_groups",
            given,
            kind,
            lambda value=value: call(reference_groups=value),
            ANY if good else None,
            ("reference",),
            strict=good,
        )
    other = audits.measure(Y, P, sensitive_features=G, site="south", threshold=0.4)
    lists: tuple[tuple[str, str, Any, bool], ...] = (
        ("type", "paths", ["a.json"], False),
        ("type", "None in it", [site(), None], False),
        ("empty", "none", [], False),
        ("empty", "sums of nothing", audits.SiteSums(), False),
        ("range", "other thresholds", [site(), other], False),
        ("unusual", "a tuple", (site(),), True),
        ("type", "a path", "north.json", False),
    )
    for kind, given, value, good in lists:
        yield Case(
            "fedgft.auditing.audit",
            "sums",
            given,
            kind,
            lambda value=value: audits.audit(value).summary["rows"]["counted"],
            ROWS if good else None,
            ("sums", "threshold", "nothing"),
            strict=good,
        )
        if given != "sums of nothing":
            yield Case(
                "fedgft.auditing.merge",
                "sums",
                given,
                kind,
                lambda value=value: audits.merge(value).rows(),
                float(ROWS) if good else (0.0 if value == [] else None),
                ("sums", "threshold"),
            )
    result = audits.audit(site())
    for argument, values in (
        ("metric", ("zz", 3, None, "eo")),
        ("first", ("z", 3, None)),
        ("second", ("z", 3, None)),
    ):
        for value in values:
            given = {"metric": "sp", "first": "a", "second": "b"} | {argument: value}
            yield Case(
                "fedgft.auditing.Audit.difference",
                argument,
                repr(value),
                "name",
                lambda given=given: result.difference(**given),
                None,
                ("metric", "group", "several"),
            )
    (folder / "bad.json").write_text("{")
    (folder / "no.csv").write_text("")
    (folder / "rows.csv").write_text(
        "y,g,p,d\n" + "".join(f"{y},{g},{p},{d}\n" for y, g, p, d in zip(Y, G, P, D, strict=True))
    )
    paths = (
        ("name", "no such file", folder / "none.json"),
        ("dtype", "no JSON", folder / "bad.json"),
        ("type", "a folder", folder),
        ("type", "None", None),
        ("type", "a number", 3),
        ("empty", "an empty text", ""),
        ("type", "sums", site()),
    )
    for kind, given, value in paths:
        yield Case(
            "fedgft.auditing.read_sums",
            "path",
            given,
            kind,
            lambda value=value: audits.read_sums(value),
            None,
            ("path", "json", "file", str(folder), "cannot be read"),
        )

    def counts(**given: Any) -> Any:
        call = {"path": folder / "rows.csv", "label": "y", "group": "g", "score": "p"} | given
        return audits.measure_file(**call).rows()

    for argument in ("path", "label", "group", "score", "decision", "positive", "site"):
        for kind, given, value in SCALARS:
            good = argument in ("decision", "positive", "site") and value is None
            good = good or (argument == "site" and isinstance(value, str))
            good = good or (argument == "positive" and one_of("1")(value))
            yield Case(
                "fedgft.auditing.measure_file",
                argument,
                given,
                kind,
                lambda argument=argument, value=value: counts(**{argument: value}),
                ANY if good else None,
                (argument, "column", "class", "no such file"),
                strict=good,
            )
    yield from table_cases(folder)


def table_cases(folder: Path) -> Iterator[Case]:
    def table(**given: Any) -> Any:
        call = {"path": folder / "rows.csv", "label": "y", "group": "g"} | given
        return len(fedgft.data.load_table(**call))

    for argument in ("path", "label", "group", "client", "split", "positive"):
        for kind, given, value in SCALARS:
            good = argument in ("client", "split", "positive") and value is None
            good = good or (argument == "positive" and one_of("1")(value))
            unsure = argument == "positive" and str(value) in ("0", "1")
            yield Case(
                "fedgft.data.load_table",
                argument,
                given,
                kind,
                lambda argument=argument, value=value: table(**{argument: value}),
                ROWS if good or unsure else None,
                (argument, "column", "label", "ending"),
                strict=good,
            )
    frame = pl.read_csv(folder / "rows.csv")
    pandas = pd.read_csv(folder / "rows.csv")
    roles = datasets.Roles("y", "g")
    for given, value in (
        ("a pandas frame", pandas),
        ("a dictionary", {"y": Y}),
        ("None", None),
        ("an array", FEATURES),
        ("text", "frame"),
        ("a Series", frame["y"]),
    ):
        good = given == "a pandas frame"
        yield Case(
            "fedgft.data.from_frame",
            "frame",
            given,
            "type",
            lambda value=value: len(datasets.from_frame(value, "rows", roles=roles)),
            ROWS if good else None,
        )
    for given, value in (("None", None), ("text", "y"), ("a dictionary", {"label": "y"})):
        yield Case(
            "fedgft.data.from_frame",
            "roles",
            given,
            "type",
            lambda value=value: datasets.from_frame(frame, "rows", roles=value),
            None,
        )
    yield Case(
        "fedgft.data.from_frame",
        "frame",
        "no rows",
        "empty",
        lambda: datasets.from_frame(frame[:0], "rows", roles=roles),
        None,
        ("row",),
    )
    for kind, given, value in SCALARS:
        yield Case(
            "fedgft.load",
            "name",
            given,
            kind,
            lambda value=value: fedgft.load(value),
            None,
            ("name", "data set", "neither"),
        )
    yield Case(
        "fedgft.load",
        "name",
        "a frame",
        "type",
        lambda: fedgft.load(pandas),
        None,
        ("name", "data set"),
    )


def theory_cases() -> Iterator[Case]:
    tally = stack(
        [fedgft.sums.Sums.of(PROBS[k::2], Y[k::2], A[k::2], num_groups=2) for k in (0, 1)]
    )
    for argument in ("metric", "sums", "kind"):
        for kind, given, value in SCALARS:
            call = {"metric": fedgft.metrics.CATALOG["sp"], "sums": tally, "kind": "hard"}
            yield Case(
                "fedgft.theory.analyze",
                argument,
                given,
                kind,
                lambda call=call, argument=argument, value=value: (
                    fedgft.theory.analyze(**call | {argument: value}).gap
                ),
                None,
            )
    answer = oracle.gap("sp", [0] * ROWS, PROBS[:, 1], A.tolist())
    yield Case(
        "fedgft.theory.analyze",
        "kind",
        "soft",
        "unusual",
        lambda: fedgft.theory.analyze(fedgft.metrics.CATALOG["sp"], tally, "soft").gap,
        answer,
        strict=True,
    )
    one = fedgft.sums.Sums.of(PROBS, Y, 0 * A, num_groups=1)
    yield Case(
        "fedgft.theory.analyze",
        "sums",
        "one group",
        "range",
        lambda: fedgft.theory.analyze(fedgft.metrics.CATALOG["sp"], stack([one]), "hard"),
        None,
        ("group",),
    )
    for name in ("locally_fair_globally_unfair", "locally_unfair_globally_fair"):
        high = "locally_fair" in name
        yield from scalar_cases(
            f"fedgft.theory.{name}",
            lambda name=name, **g: getattr(theory, name)(**{"clients": 3, "gap": 0.5} | g),
            {"clients": whole(2, 1000), "gap": real(0, 1, low_open=True, high_open=high)},
        )


def flower_cases() -> Iterator[Case]:
    from flwr.serverapp.strategy import FedAvg

    from fedgft import flower

    yield from scalar_cases(
        "fedgft.flower.Budget",
        lambda **g: flower.Budget(**{"epsilon": 1.0} | g),
        {
            "epsilon": optional(real(0, math.inf, low_open=True)),
            "delta": real(0, 1, low_open=True, high_open=True),
            "releases": whole(1, 10**9),
            "min_count": whole(0, 10**9),
        },
    )
    yield from scalar_cases(
        "fedgft.flower.FedGFT",
        lambda **g: flower.FedGFT(FedAvg(), **{"lam": 1.0} | g),
        {
            "lam": real(0, math.inf),
            "metric": one_of("sp"),
            "penalty": one_of("l1"),
            "spread": one_of("range"),
        },
    )
    yield from scalar_cases(
        "fedgft.flower.FedGFT",
        lambda **g: flower.FedGFT(FedAvg(), **g),
        {"target": real(0, 1, high_open=True)},
    )
    yield from scalar_cases(
        "fedgft.flower.FairFed",
        lambda **g: flower.FairFed(FedAvg(), **g),
        {"beta": real(0, math.inf), "rule": one_of("exp")},
    )
    yield from scalar_cases(
        "fedgft.flower.MeasuredStrategy",
        lambda **g: flower.MeasuredStrategy(FedAvg(), **g),
        {"metric": one_of("sp")},
    )
