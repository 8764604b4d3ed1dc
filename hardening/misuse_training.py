"""`Settings`, the methods by name, models and `simulate`."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from misuse_data import data, made
from misuse_oracle import ANY, Case
from misuse_values import SCALARS, one_of, optional, real, scalar_cases, whole
from torch import nn

import fedgft


def settings_cases() -> Iterator[Case]:
    most = 2**31 - 1
    yes = lambda v: isinstance(v, bool)  # noqa: E731
    yield from scalar_cases(
        "fedgft.Settings",
        lambda **g: fedgft.Settings(**g),
        {
            "rounds": whole(1, most),
            "epochs": whole(1, most),
            "batch_size": whole(1, most),
            "threads": whole(1, most),
            "steps": optional(whole(1, most)),
            "lanes": optional(whole(1, most)),
            "eval_every": whole(0, most),
            "noise": real(0, 1e6),
            "state": one_of("keep"),
            "schedule": one_of("constant"),
            "sampling": one_of("size"),
            "start": one_of("own"),
            "batches": one_of("fixed"),
            "executor": one_of("auto"),
            "precision": one_of("fp32"),
            "norms": one_of("local"),
            "augment": one_of("none"),
            "eval_on": one_of("both"),
            "lag": yes,
            "graphs": yes,
            "deterministic": yes,
            "optimizer": lambda v: False,
            "cohort": optional(whole()),
            "device": lambda v: isinstance(v, str),
        },
        unsure=lambda name, value: name == "cohort",
    )
    yield from scalar_cases(
        "fedgft.optimizers.Optimizer",
        lambda **g: fedgft.optimizers.Optimizer(**g),
        {
            "rule": one_of("sgd"),
            "weight_decay": real(0, math.inf),
            "first": real(0, 1, high_open=True),
            "second": real(0, 1, high_open=True),
            "epsilon": real(0, math.inf, low_open=True),
        },
        says={"rule": ("optimizer", "rule")},
    )


def per_run(valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """One number, or an array of one per run."""

    def good(value: Any) -> bool:
        if isinstance(value, list | np.ndarray):
            return all(valid(v) for v in np.asarray(value).tolist())
        return valid(value)

    return good


def method_cases() -> Iterator[Case]:
    lam = per_run(real(0, math.inf))
    share = per_run(real(0, 1, high_open=True))
    metric = {"metric": one_of("sp")}
    penalty = {"penalty": one_of("l1"), "spread": one_of("range")}
    f = fedgft.algorithms

    def based(function: Any) -> Callable[..., Any]:
        return lambda **g: function(**{"metric": "sp"} | g)

    yield from scalar_cases(
        "fedgft.algorithms.fedgft", based(f.fedgft), {**metric, "lam": lam, **penalty}
    )
    given = {**metric, "lam": lam, **penalty}
    yield from scalar_cases("fedgft.algorithms.lft", based(f.lft), given)
    given = {**metric, "beta": lam, "rule": one_of("exp")}
    yield from scalar_cases("fedgft.algorithms.fairfed", based(f.fairfed), given)
    yield from scalar_cases(
        "fedgft.algorithms.fedgft_control",
        based(f.fedgft_control),
        {**metric, "target": share, "kind": one_of("hard"), "pick": real(0, 1)},
    )
    yield from scalar_cases(
        "fedgft.algorithms.Proximal", lambda **g: f.Proximal(**g), {"mu": real(0, math.inf)}
    )
    yield from scalar_cases(
        "fedgft.algorithms.Scaffold", lambda **g: f.Scaffold(**g), {"mu": real(0, math.inf)}
    )
    yield from scalar_cases(
        "fedgft.algorithms.ServerMomentum",
        lambda **g: f.ServerMomentum(**g),
        {"lr": real(0, math.inf, low_open=True), "momentum": real(0, 1, high_open=True)},
    )
    decay = real(0, 1, high_open=True)
    yield from scalar_cases(
        "fedgft.algorithms.Adaptive",
        lambda **g: f.Adaptive(**g),
        {
            "rule": one_of("adam"),
            "lr": real(0, math.inf, low_open=True),
            "first": decay,
            "second": decay,
            "tau": real(0, math.inf, low_open=True),
            "convention": one_of("paper"),
        },
    )
    yield from scalar_cases(
        "fedgft.algorithms.with_base",
        lambda **g: f.with_base(**{"method": f.fedavg(), "base": "fedprox"} | g),
        {"method": lambda v: False, "base": one_of("fedprox"), "mu": optional(real(0, math.inf))},
    )
    yield from scalar_cases(
        "fedgft.algorithms.with_base (server)",
        lambda **g: f.with_base(**{"method": f.fedavg(), "base": "fedadam"} | g),
        {"server_lr": optional(real(0, math.inf, low_open=True))},
        says={"server_lr": ("server_lr", "lr")},
    )
    yield from scalar_cases("fedgft.get_metric", fedgft.get_metric, {"metric": one_of("sp")})
    for text in (
        "",
        "+",
        "sp+",
        "sp+sp",
        "0*sp",
        "-1*sp",
        "nan*sp",
        "sp*2",
        "SPP",
        "demographic",
        "sp+0.5*",
        "1e9*sp",
        "inf*sp",
        "sp,eop",
    ):
        yield Case(
            "fedgft.get_metric",
            "metric",
            repr(text),
            "name",
            lambda text=text: fedgft.get_metric(text),
            None,
        )
    yield from scalar_cases(
        "fedgft.study.get_protocol",
        fedgft.study.get_protocol,
        {"name": one_of("paper")},
        says={"name": ("protocol", "name")},
    )
    yield from scalar_cases(
        "fedgft.models.MLP",
        lambda **g: fedgft.models.MLP(**g).shapes(features=2, classes=2),
        {"hidden": lambda v: isinstance(v, list)},
    )


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), x


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.table(x[:, 0].long())


def simulate_cases() -> Iterator[Case]:
    base = {
        "federations": [made()],
        "model": "logistic",
        "algorithm": fedgft.algorithms.fedavg(),
        "settings": fedgft.Settings(rounds=1, threads=1),
        "seeds": [0],
    }

    def call(**given: Any) -> Any:
        return fedgft.simulate(**base | given)

    def trained(found: Any) -> bool:
        return bool(found.test.rows()[-1, 0] == len(made().test))

    for argument in ("federations", "model", "algorithm", "settings", "seeds", "lr", "init"):
        for kind, given, value in SCALARS:
            good = (argument == "lr" and (value is None or real(0, math.inf)(value))) or (
                argument in ("init", "settings") and value is None
            )
            good = good or (argument == "seeds" and whole(0, 2**63 - 1)(value))
            unsure = argument in ("seeds", "lr") and isinstance(value, list)
            yield Case(
                "fedgft.simulate",
                argument,
                given,
                kind,
                lambda argument=argument, value=value: call(**{argument: value}),
                ANY if good or unsure else None,
                ("model",) if argument == "model" else (argument,),
                strict=good and value != 1e300,
                holds=trained,
            )
    odd: tuple[tuple[str, str, str, Any, bool], ...] = (
        ("federations", "unusual", "a federation", made(), True),
        ("federations", "type", "a data set", data(), False),
        ("federations", "type", "data sets", [data()], False),
        ("federations", "empty", "none", [], False),
        ("federations", "shape", "two for one seed", [made(), made()], False),
        ("seeds", "shape", "two for one federation", [0, 1], False),
        ("seeds", "range", "negative", [-1], False),
        ("seeds", "type", "a fraction", [0.5], False),
        ("seeds", "type", "text", ["0"], False),
        ("seeds", "huge", "2^70", [2**70], False),
        ("seeds", "unusual", "an array", np.array([3]), True),
        ("seeds", "unusual", "a tuple", (3,), True),
        ("seeds", "NaN", "NaN", [math.nan], False),
        ("algorithm", "unusual", "a name", "fedavg", True),
        ("algorithm", "name", "an unknown name", "fedsgd", False),
        ("algorithm", "type", "the class", fedgft.algorithms.Algorithm, False),
        ("algorithm", "type", "the function", fedgft.algorithms.fedavg, False),
        ("settings", "type", "the class", fedgft.Settings, False),
        ("settings", "type", "a dictionary", {"rounds": 1}, False),
        ("settings", "range", "a cohort too large", fedgft.Settings(rounds=1, cohort=9), False),
        ("settings", "name", "a device", fedgft.Settings(rounds=1, device="tpu"), False),
        ("model", "name", "an unknown name", "forest", False),
        ("model", "type", "a class of the library", fedgft.models.MLP, False),
        ("metric", "type", "beside an Algorithm", "sp", False),
        ("target", "type", "beside an Algorithm", 0.02, False),
        ("base", "type", "beside an Algorithm", "scaffold", False),
        ("rounds", "type", "beside settings", 3, False),
        ("model", "type", "a tuple as output", Pair, False),
        ("model", "type", "no module", lambda: 3, False),
        ("model", "type", "no parameters", lambda: nn.ReLU(), False),
        ("model", "type", "a function with an argument", lambda size: nn.Linear(3, 2), False),
        ("model", "shape", "other columns", lambda: nn.Linear(5, 2), False),
        ("model", "shape", "one output", lambda: nn.Linear(3, 1), False),
        ("model", "shape", "three outputs", lambda: nn.Linear(3, 3), False),
        ("model", "range", "an embedding of fractions", Lookup, False),
        ("model", "unusual", "a module", nn.Linear(3, 2), True),
        ("lr", "shape", "two for one run", np.array([0.1, 0.1]), False),
        ("lr", "range", "negative", -0.1, False),
        ("init", "shape", "short", np.zeros(3), False),
        ("init", "NaN", "NaN", np.full(8, np.nan), False),
        ("init", "dtype", "text", np.array(["a"] * 8), False),
        ("init", "unusual", "zeros", np.zeros(8), True),
    )
    for argument, kind, given, value, good in odd:
        says = {"settings": ("settings", "cohort", "device"), "seeds": ("seed",)}
        yield Case(
            "fedgft.simulate",
            argument,
            given,
            kind,
            lambda argument=argument, value=value: call(**{argument: value}),
            ANY if good else None,
            says.get(argument, (argument,)),
            strict=good,
            holds=trained,
        )
    for given, algorithm in (
        ("lam for two runs", fedgft.algorithms.fedgft("sp", np.ones(2))),
        ("target for two runs", fedgft.algorithms.fedgft_control("sp", np.zeros(2))),
    ):
        yield Case(
            "fedgft.simulate",
            "algorithm",
            given,
            "shape",
            lambda algorithm=algorithm: call(algorithm=algorithm),
            None,
            ("lam", "target"),
        )
    yield Case(
        "fedgft.study.Study",
        "seeds",
        "none",
        "empty",
        lambda: fedgft.study.Study(data(), fedgft.study.get_protocol("heldout"), []),
        None,
        ("seeds",),
    )
