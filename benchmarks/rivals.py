"""Rivals on the protocols of their own papers, beside the numbers that these print.

python benchmarks/rivals.py [--only fedfact features logofair fedfb fedminmax every] [--seeds 20]

Writes rivals.md; sections that are not made stay as they are. With --quick, 2 federations of each
kind are simulated. The texts of the page are in `rival_pages.py`.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import rival_pages as pages
import rules
from rival_data import (
    PUBLISHED_SPLITS,
    by_sex,
    deal_by_workclass,
    deal_evenly,
    load_coded_adult,
    load_logofair_compas,
)
from rules import CLIENTS, SP, Claim, Part, Reached, Split, Trained, mean_sd, report

import fedgft
from fedgft.algorithms import METHODS, Algorithm, fedgft_control, get_method
from fedgft.algorithms.registry import METHOD_LABELS
from fedgft.data.dataset import Dataset, Federation
from fedgft.data.partition import inner_split
from fedgft.formatting import Table
from fedgft.optimizers import Optimizer
from fedgft.settings import Settings
from fedgft.store import atomic_write
from fedgft.study import get_protocol

ONE_POINT = 0.01
ALIKE = (1.0, 2.0)  # points of accuracy and of the gap within which a number is reproduced
Pick = Literal["near best", "gap 1"]
Strengths = np.ndarray  # one per run


class Options(NamedTuple):
    """What the command line asks for."""

    seeds: range


# Methods


@dataclass(frozen=True)
class Contender:
    """A method of the table.

    Parameters
    ----------
    name
        Its name in the table.
    make
        Returns the algorithm for one strength per run.
    grid
        Strengths to choose from on inner rows; a single one is taken as it is.
    pick
        How to choose: "near best" has the smallest gap within a point of the best accuracy, "gap 1"
        the best accuracy at a gap of at most 1 point, or else the smallest gap.
    published
        Its key in the published tables; empty: not in them.
    """

    name: str
    make: Callable[[Strengths], Algorithm]
    grid: tuple[float, ...] = (0.0,)
    pick: Pick = "near best"
    published: str = ""

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("fedgft-control")


def list_grid(name: str) -> tuple[float, ...]:
    """Return the strengths of a method that the recommended protocol tries."""
    return get_protocol("heldout").strength(name)


def list_contenders() -> Iterator[Contender]:
    """List the methods of FedFACT's table, ours last."""
    yield Contender("FedAvg", partial(get_method, "fedavg", SP), published="FedAvg")
    for name in ("fairfed", "fedfb", "fairgrad", "fedgft"):
        label = METHOD_LABELS[name]
        printed = label if name in ("fairfed", "fedfb") else ""
        for pick, suffix in PICKS.items():
            make = partial(get_method, name, SP)
            yield Contender(f"{label}, {suffix}", make, list_grid(name), pick, printed)
    for target in (0.0, 0.02):
        make = partial(get_method, "fedfact", SP)
        name = f"FedFACT In, target {100 * target:g}"
        yield Contender(name, make, (target,), published="FedFACT In")
    for suffix, options in (("", {}), (", price on decisions", {"price_on": "decisions"})):
        for target in (0.0, 0.01):
            make = partial(fedgft_control, SP, **options)
            yield Contender(f"fedgft-control{suffix}, target {100 * target:g}", make, (target,))


PICKS: Mapping[Pick, str] = {"near best": "within a point", "gap 1": "for gap 1"}
CONTENDERS = tuple(list_contenders())


@cache
def try_strengths(way: "Way", name: str, grid: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return accuracy and gap on inner rows, (strength, seed): a quarter of each client's rows."""
    made = [
        fedgft.standardize(inner_split(each.federation, seed=seed))
        for each, seed in zip(way.deal(), way.seeds, strict=True)
    ]
    runs = len(way.seeds)
    history = fedgft.simulate(
        made * len(grid),
        "logistic",
        get_method(name, SP, np.repeat(grid, runs)),
        Settings(eval_every=0),
        seeds=list(way.seeds) * len(grid),
    )
    test = history.test[-1]
    shape = (len(grid), runs)
    return test.accuracy().reshape(shape), test.gap(SP, "hard").reshape(shape)


def choose(pick: Pick, grid: Sequence[float], accuracy: np.ndarray, gap: np.ndarray) -> np.ndarray:
    """Return the strength of each run; `accuracy` and `gap` are (strength, run)."""
    if pick == "near best":
        allowed = accuracy >= accuracy.max(0) - ONE_POINT
        at = np.where(allowed, gap, np.inf).argmin(0)
    else:
        fair = gap <= ONE_POINT
        at = np.where(fair.any(0), np.where(fair, accuracy, -1.0).argmax(0), gap.argmin(0))
    return np.asarray(grid)[at]


# Federations and what is reached on them


@dataclass(frozen=True)
class Way:
    """A data set, how its rows are dealt, and the seeds."""

    data: str
    split: str
    seeds: range
    features: str = "no group"
    held_out: float = rules.HELD_OUT
    alpha: float | None = None  # None: that of the split

    def deal(self) -> list[Split]:
        """Return one federation per seed."""
        return deal(self)


@lru_cache(maxsize=3)
def deal(way: Way) -> list[Split]:
    """Return the federations of a way."""
    kind, alpha = PUBLISHED_SPLITS[way.split]
    data = FEATURES[way.features](way.data)
    options: dict[str, Any] = {"kind": kind, "held_out": way.held_out}
    options["alpha"] = alpha if way.alpha is None else way.alpha
    return [rules.split(data, CLIENTS[way.data], seed, **options) for seed in way.seeds]


FEATURES: Mapping[str, Callable[[str], Dataset]] = {
    "no group": rules.load,
    "with the group": partial(rules.load, keep_group=True),
    "of LoGoFair's code": lambda _: load_logofair_compas(),
    "of LoGoFair's code, with the group": lambda _: load_logofair_compas(keep_group=True),
    "of LoGoFair's code, no COMPAS score": lambda _: load_logofair_compas(with_scores=False),
}


def train(way: Way, contender: Contender) -> list[Trained]:
    """Train a method with the strengths that it chooses."""
    if len(contender.grid) == 1:
        strengths = np.repeat(contender.grid, len(way.seeds))
    else:
        make: Any = contender.make
        tried = try_strengths(way, make.args[0], contender.grid)
        strengths = choose(contender.pick, contender.grid, *tried)
    federations = [each.federation for each in way.deal()]
    kind = {"algorithm": contender.make(strengths)}
    return rules.simulate(federations, "logistic", way.seeds, 50, kind)


def reach(way: Way, contender: Contender) -> np.ndarray:
    """Return what a method reaches per seed, (seed, field of `Reached`)."""
    begun = time.perf_counter()
    found = []
    for made, mine in zip(way.deal(), train(way, contender), strict=True):
        decided = mine.scores >= 0.5
        reached = rules.evaluate(made, decided.astype(float), decided)
        found.append(reached._replace(own_accuracy=mine.own[0], own_gap=mine.own[1]))
    report(f"{way.data}, {way.split}, {way.features}, {contender.name}", begun)
    return np.array(found)


def reach_rules(way: Way) -> Iterator[tuple[str, np.ndarray]]:
    """Apply the published rules that read the group to FedAvg's scores; at global targets only."""
    models = train(way, CONTENDERS[0])
    kinds = [kind for kind in rules.KINDS if kind.is_rival and kind.name.split(", ")[1] in TARGETS]
    for kind in kinds:
        begun = time.perf_counter()
        assert kind.fit is not None
        found: list[Reached] = []
        for made, mine in zip(way.deal(), models, strict=True):
            found.append(rules.apply(made, kind.fit(made, mine.scores), mine.scores))
        report(f"{way.data}, {way.split}, {kind.name}", begun)
        yield kind.name, np.array(found)


TARGETS = ("target 0", "target 2")


class Figures(NamedTuple):
    """Means over seeds, in percent and points."""

    accuracy: float
    gap: float
    local: float
    own_gap: float
    signed: float
    chance: float


def summarize(found: np.ndarray) -> Figures:
    """Return the means of what is reached."""
    a = 100 * found
    means = (a[:, 0], np.abs(a[:, 1]), a[:, 2], np.abs(a[:, 4]), a[:, 1], a[:, 6])
    return Figures(*(float(np.nanmean(each)) for each in means))


def judge(own: Figures, printed: tuple[float, float, float | None]) -> str:
    """Compare with a published row in a few words."""
    right = own.accuracy - printed[0]
    gap = own.gap - printed[1]
    if abs(right) <= ALIKE[0] and abs(gap) <= ALIKE[1]:
        return "reproduced"
    if right >= -ALIKE[0] and gap <= ALIKE[1]:
        return "better"
    if right <= ALIKE[0] and gap >= -ALIKE[1]:
        return "worse"
    return "more accurate, less fair" if right > 0 else "fairer, less accurate"


def format_published(printed: tuple[float, float, float | None] | None) -> str:
    if printed is None:
        return ""
    local = "" if printed[2] is None else f" / {printed[2]:.1f}"
    return f"{printed[0]:.1f} / {printed[1]:.4g}{local}"


HEADER = (
    *("accuracy", "gap", "by chance", "mean signed gap", "largest local gap", "gap, own rows"),
    *("published: accuracy / gap / local", "verdict"),
)


def make_row(found: np.ndarray, printed: tuple[float, float, float | None] | None) -> list[str]:
    """Return the cells of `HEADER`."""
    own = summarize(found)
    cells = [mean_sd(found[:, 0]), mean_sd(np.abs(found[:, 1])), f"{own.chance:.2f}"]
    local = found[:, 2]
    cells += [f"{own.signed:+.2f}", mean_sd(local[~np.isnan(local)]), f"{own.own_gap:.2f}"]
    return [*cells, format_published(printed), judge(own, printed) if printed else ""]


# FedFACT's table


def fedfact(options: Options) -> Part:
    """FedFACT's Table 2, dealt in three ways."""
    tables = []
    claims: list[Claim] = []
    for data in CLIENTS:
        for split in PUBLISHED_SPLITS:
            way = Way(data, split, options.seeds)
            printed = pages.FEDFACT[data]["hetero" if split == "hetero" else "Dirichlet"]
            found = {each.name: reach(way, each) for each in CONTENDERS}
            keys = {each.name: each.published for each in CONTENDERS}
            for name, reached in reach_rules(way):
                found[name] = reached
                keys[name] = name.split(",")[0] if name.endswith("target 2") else ""
            rows = [
                (name, "yes" if name not in names_of_contenders() else "no")
                + tuple(make_row(reached, printed.get(keys[name])))
                for name, reached in found.items()
            ]
            title = f"{rules.TITLES[data]}, {split}"
            header = ("method", "group decides", *HEADER)
            tables.append(Table(title, header, tuple(rows), 2, (pages.note(options.seeds),)))
            claims += judge_table(title, data, found, keys, printed)
    return "FedFACT's Table 2", pages.FEDFACT_TEXT, tables, claims


def names_of_contenders() -> set[str]:
    return {each.name for each in CONTENDERS}


WANTED = (83.0, 0.5)  # percent and points, on Adult


def judge_table(
    title: str,
    data: str,
    found: Mapping[str, np.ndarray],
    keys: Mapping[str, str],
    printed: Mapping[str, tuple[float, float, float | None]],
) -> Iterator[Claim]:
    """Judge our methods by what was wanted, and the rivals by what they print."""
    for name in (each.name for each in CONTENDERS if each.is_ours):
        own = summarize(found[name])
        reached = f"{own.accuracy:.2f}% at {own.gap:.2f} (by chance alone {own.chance:.2f}, "
        reached += f"mean signed gap {own.signed:+.2f})"
        if data == "adult":
            text = f"{title}, {name}: at least {WANTED[0]}% at at most {WANTED[1]} points: "
            yield text + reached, own.accuracy >= WANTED[0] and own.gap <= WANTED[1]
        elif "FedFACT In" in printed:
            right, gap, _ = printed["FedFACT In"]
            text = f"{title}, {name}: at least {right}% at at most {gap} points, as published for "
            text += f"FedFACT In: {reached}"
            yield text, own.accuracy >= right and own.gap <= gap
    for name, key in keys.items():
        if key and key in printed:
            own = summarize(found[name])
            verdict = judge(own, printed[key])
            text = f"{title}, {name}: published {format_published(printed[key])}, here "
            text += f"{own.accuracy:.1f} / {own.gap:.1f} / {own.local:.1f}: {verdict}"
            why = pages.WHY.get((data, key), "")
            yield f"{text}. {why}".rstrip(". "), verdict in ("reproduced", "better")


# Which features


def features(options: Options) -> Part:
    """The same split with other columns."""
    rows = []
    means: dict[tuple[str, str, str], Figures] = {}
    names = ("FedAvg", "FedFACT In, target 0", "FedFACT In, target 2", *OURS)
    for data, kinds in FEATURE_SETS.items():
        printed = pages.FEDFACT[data]["Dirichlet"]
        for kind in kinds:
            way = Way(data, "Dirichlet 0.5", options.seeds, kind)
            for each in (each for each in CONTENDERS if each.name in names):
                found = reach(way, each)
                means[data, kind, each.name] = summarize(found)
                row = make_row(found, printed.get(each.published))
                rows.append((rules.TITLES[data], kind, each.name, *row))
    header = ("data", "features", "method", *HEADER)
    table = Table("Which features", header, tuple(rows), 3, (pages.note(options.seeds),))
    return "Which features", pages.FEATURES_TEXT, [table], list(judge_features(means))


OURS = ("fedgft-control, target 0", "fedgft-control, target 1")
FEATURE_SETS: Mapping[str, tuple[str, ...]] = {
    "adult": ("no group", "with the group"),
    "compas": (
        "no group",
        "with the group",
        "of LoGoFair's code",
        "of LoGoFair's code, with the group",
        "of LoGoFair's code, no COMPAS score",
    ),
}


def judge_features(means: Mapping[tuple[str, str, str], Figures]) -> Iterator[Claim]:
    """Say which columns bring the published numbers."""
    for (data, kind, name), own in means.items():
        key = {"FedAvg": "FedAvg", "FedFACT In, target 0": "FedFACT In"}.get(name)
        if key is not None:
            printed = pages.FEDFACT[data]["Dirichlet"][key]
            verdict = judge(own, printed)
            text = f"{rules.TITLES[data]}, features {kind}, {name}: published "
            text += f"{printed[0]:.1f} / {printed[1]:.4g}, here {own.accuracy:.1f} / {own.gap:.1f}"
            yield f"{text}: {verdict}", verdict in ("reproduced", "better")


# LoGoFair's table


def logofair(options: Options) -> Part:
    """LoGoFair's Table 1: three ways to deal, 30% held out."""
    names = ("FedAvg", "FedFB, within a point", "FedFB, for gap 1", *OURS)
    rows = []
    claims: list[Claim] = []
    for alpha, printed in pages.LOGOFAIR.items():
        way = Way("adult", "Dirichlet 0.5", options.seeds, held_out=0.3, alpha=alpha)
        found = {each.name: reach(way, each) for each in CONTENDERS if each.name in names}
        found |= {name: a for name, a in reach_rules(way) if name.startswith("LoGoFair")}
        for name, a in found.items():
            key = name if name == "LoGoFair, target 0" else name.split(",")[0]
            numbers = printed.get(key)
            rows.append((f"{alpha:g}", name, *make_row(a, numbers)))
            if numbers is not None:
                own = summarize(a)
                verdict = judge(own, numbers)
                text = f"alpha {alpha:g}, {name}: published {format_published(numbers)}, here "
                text += f"{own.accuracy:.1f} / {own.gap:.1f}: {verdict}"
                claims.append((text, verdict in ("reproduced", "better")))
    note = pages.note(options.seeds)
    header = ("alpha", "method", *HEADER)
    table = Table("Adult by sex, 5 clients, 30% held out", header, tuple(rows), 2, (note,))
    return "LoGoFair's Table 1", pages.LOGOFAIR_TEXT, [table], claims


# FedFB's own protocol


FEDFB_GRID = (0.001, 0.05, 0.08, 0.1, 0.2, 0.5, 1.0, 2.0)
THEIR_ROUNDS = Settings(
    rounds=10,
    epochs=30,
    batch_size=128,
    optimizer=Optimizer("adam", weight_decay=1e-4),
    schedule="constant",
    state="reset",
    eval_every=0,
)
SCHEDULES: Mapping[str, dict[str, Any]] = {
    "10 rounds of 30 epochs": {"settings": THEIR_ROUNDS, "lr": 0.005},
    "50 rounds of 1 epoch": {"settings": Settings(eval_every=0)},
}
FEW_SEEDS = 3  # of 300 epochs each


class Tested(NamedTuple):
    """Accuracy and gaps of decisions on test rows, and accuracy and gap on the clients' rows."""

    accuracy: float
    gap: float  # signed
    disparity: float  # largest distance of a group's rate from that of all rows
    accepted: float
    own_accuracy: float
    own_gap: float


def test_model(federation: Federation, mine: Trained, groups: np.ndarray) -> Tested:
    """Return what a model reaches on the test rows; `groups` (n,) holds 0 and 1."""
    rows = federation.test
    accepted = (mine.scores[rows] >= 0.5).astype(float)
    rates = [accepted[groups[rows] == g].mean() for g in range(2)]
    everyone = accepted.mean()
    right = (accepted == federation.dataset.labels[rows]).mean()
    distance = max(abs(rate - everyone) for rate in rates)
    numbers = (right, rates[1] - rates[0], distance, everyone, mine.own[0], mine.own[1])
    return Tested(*map(float, numbers))


def fedfb(options: Options) -> Part:
    """FedFB's protocol: two clients by workclass, the files of Adult, the group as a feature."""
    data = fedgft.load("adult", group="sex")
    rows = []
    claims: list[Claim] = []
    for schedule, kind in SCHEDULES.items():
        seeds = options.seeds[:FEW_SEEDS] if schedule.startswith("10") else options.seeds
        made = [deal_by_workclass(data, seed) for seed in seeds]
        found = dict(run_fedfb(made, seeds, data, kind))
        for name, a in found.items():
            gaps = (a[:, 0], np.abs(a[:, 1]), a[:, 2], a[:, 4], a[:, 5])
            rows.append((schedule, str(len(seeds)), name, *map(mean_sd, gaps)))
        best = 100 * found["FedFB, chosen as published"]
        ours = 100 * found["fedgft-control, target 0"]
        text = f"{schedule}: fedgft-control, target 0, is as accurate as FedFB within a point at a "
        text += f"smaller gap: {ours[:, 0].mean():.2f}% at {np.abs(ours[:, 1]).mean():.2f} points, "
        text += f"FedFB {best[:, 0].mean():.2f}% at {np.abs(best[:, 1]).mean():.2f}"
        is_near = ours[:, 0].mean() >= best[:, 0].mean() - 1
        claims.append(
            (text, bool(is_near and np.abs(ours[:, 1]).mean() < np.abs(best[:, 1]).mean()))
        )
    header = (
        *("schedule", "seeds", "method", "accuracy", "gap between groups", "DP Disp"),
        *("accuracy, own rows", "gap, own rows"),
    )
    table = Table(
        "Adult, two clients by workclass", header, tuple(rows), 3, (pages.FEDFB_NOTE,)
    )
    return "FedFB's own protocol", pages.FEDFB_TEXT, [table], claims


def run_fedfb(
    made: list[Federation], seeds: Sequence[int], data: Dataset, kind: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Train FedAvg, FedFB at each alpha, and fedgft-control."""
    runs = len(seeds)
    algorithms = {
        "FedAvg": (get_method("fedavg", SP, 0.0), 1),
        "FedFB": (get_method("fedfb", SP, np.repeat(FEDFB_GRID, runs)), len(FEDFB_GRID)),
        "fedgft-control": (fedgft_control(SP, np.repeat((0.0, 0.01), runs)), 2),
    }
    for name, (algorithm, times) in algorithms.items():
        begun = time.perf_counter()
        arguments = {"algorithm": algorithm, **kind}
        trained = rules.simulate(made * times, "logistic", list(seeds) * times, None, arguments)
        pairs = zip(made * times, trained, strict=True)
        tested = np.array([test_model(each, mine, data.groups) for each, mine in pairs])
        report(f"FedFB's protocol, {name}", begun)
        cells = tested.reshape(times, runs, -1)
        if name == "FedAvg":
            yield name, cells[0]
        elif name == "FedFB":
            yield from zip((f"FedFB, alpha {alpha:g}" for alpha in FEDFB_GRID), cells, strict=True)
            at = cells[:, :, 5].argmin(0)  # the smallest gap on the clients' rows, whatever else
            yield "FedFB, chosen as published", cells[at, np.arange(runs)]
            at = choose_near_best(cells)
            yield "FedFB, within a point", cells[at, np.arange(runs)]
        else:
            for target, mine in zip((0, 1), cells, strict=True):
                yield f"fedgft-control, target {target}", mine


def choose_near_best(cells: np.ndarray) -> np.ndarray:
    """Return the smallest gap within a point of the best accuracy, both on the clients' rows."""
    allowed = cells[:, :, 4] >= cells[:, :, 4].max(0) - ONE_POINT
    return np.where(allowed, cells[:, :, 5], np.inf).argmin(0)


# FedMinMax


FULL_BATCH = 10**6
TRAINING: Mapping[str, Settings] = {
    "one full-batch SGD step per round": Settings(
        batch_size=FULL_BATCH, optimizer=Optimizer("sgd"), schedule="constant", eval_every=0
    ),
    "an epoch of Adam per round": Settings(
        batch_size=128, schedule="constant", state="reset", eval_every=0
    ),
}
MINIMAX_LR = 0.005


def fedminmax(options: Options) -> Part:
    """The benchmark that prints FedMinMax: adult_iid10, once as there and once trained."""
    cells = load_coded_adult()
    sex = by_sex(cells)
    methods = {
        "FedAvg": (sex, get_method("fedavg", SP, 0.0)),
        "FedMinMax, groups of sex and label": (cells, get_method("fedminmax", SP, 0.05)),
        "FedMinMax, groups of sex": (sex, get_method("fedminmax", SP, 0.05)),
        "fedgft-control, target 0": (sex, fedgft_control(SP, 0.0)),
    }
    rows = []
    means: dict[tuple[str, str], np.ndarray] = {}
    for training, settings in TRAINING.items():
        for name, (data, algorithm) in methods.items():
            begun = time.perf_counter()
            made = [deal_evenly(data, seed) for seed in options.seeds]
            kind = {"algorithm": algorithm, "settings": settings, "lr": MINIMAX_LR}
            trained = rules.simulate(made, "mlp", options.seeds, None, kind)
            pairs = zip(made, trained, strict=True)
            found = np.array([test_model(each, mine, sex.groups) for each, mine in pairs])
            report(f"adult_iid10, {training}, {name}", begun)
            means[training, name] = 100 * found.mean(0)
            columns = (found[:, 0], found[:, 1], found[:, 3])
            printed = pages.MINMAX.get((training, name), "")
            rows.append((training, name, *map(mean_sd, columns), printed))
    header = ("local training", "method", "accuracy", "signed gap", "accepted")
    header += ("published: accuracy / signed gap",)
    note = pages.MINMAX_NOTE.format(seeds=len(options.seeds))
    table = Table("Adult, 10 equal clients", header, tuple(rows), 2, (note,))
    return "FedMinMax's benchmark", pages.MINMAX_TEXT, [table], list(judge_minmax(means))


def judge_minmax(means: Mapping[tuple[str, str], np.ndarray]) -> Iterator[Claim]:
    """Say whether the low accuracy is the method's."""
    full, normal = TRAINING
    name = "FedMinMax, groups of sex and label"
    short, long = means[full, name][0], means[normal, name][0]
    plain = means[full, "FedAvg"]
    text = f"The published 65.7% of FedMinMax are those of its schedule: {short:.1f}% with it, "
    yield f"{text}{long:.1f}% after an epoch per round", bool(short < 72 and long > short + 8)
    text = f"With the same schedule, FedAvg accepts {plain[3]:.1f}% of the people (24% have the "
    yield f"{text}label) and is {plain[0]:.1f}% accurate: hardly trained", bool(plain[3] < 10)
    fair = means[normal, "fedgft-control, target 0"]
    text = "An epoch per round, fedgft-control, target 0: a mean signed gap of at most 1 point "
    yield f"{text}({fair[1]:+.2f} at {fair[0]:.2f}%)", bool(abs(fair[1]) <= 1)


# Every rival


def every(options: Options) -> Part:
    """What each rival's own protocol is, and what it reaches in FedFACT's."""
    way = Way("adult", "Dirichlet 0.5", options.seeds)
    reached: dict[str, str] = {}
    for name in METHODS:
        if name in pages.RIVALS and name not in ("fedfact",):
            make = partial(get_method, name, SP)
            grid = list_grid(name)
            own = [reach(way, Contender(name, make, grid, pick)) for pick in PICKS]
            reached[name] = " or ".join(dict.fromkeys(map(describe, own)))
    both = [each for each in CONTENDERS if each.published == "FedFACT In"]
    reached["fedfact"] = " or ".join(describe(reach(way, each)) for each in both)
    for name, a in reach_rules(way):
        if name.endswith("target 2"):
            reached[RULE_NAMES[name.split(",")[0]]] = describe(a)
    rows = [
        (each.label, each.protocol, each.is_run, each.result, reached.get(name, "left out"))
        for name, each in pages.RIVALS.items()
    ]
    header = (
        *("rival", "protocol of its paper or code", "run here", "result"),
        "FedFACT's protocol, Adult: accuracy / gap",
    )
    note = pages.EVERY_NOTE.format(seeds=len(options.seeds))
    table = Table("Every rival", header, tuple(rows), 1, (note,))
    return "Every rival: its own protocol", pages.EVERY_TEXT, [table], []


RULE_NAMES = {"LoGoFair": "logofair", "FedFACT Post": "fedfact-post", "Cost LP": "cost-lp"}


def describe(found: np.ndarray) -> str:
    own = summarize(found)
    return f"{own.accuracy:.1f} / {own.gap:.1f}"


# The page


PARTS: Mapping[str, Callable[[Options], Part]] = {
    "fedfact": fedfact,
    "features": features,
    "logofair": logofair,
    "fedfb": fedfb,
    "fedminmax": fedminmax,
    "every": every,
}
QUICK_SEEDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    options = Options(range(QUICK_SEEDS if args.quick else args.seeds))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "rivals.md"
    for name in args.only:
        begun = time.perf_counter()
        made = PARTS[name](options)
        report(name, begun)
        page = path.read_text("utf-8") if path.exists() else ""
        with atomic_write(path) as part:
            part.write(rules.update(page, [made], head=pages.HEAD).encode())
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
