"""The methods of `rivals.py`: how each is made, tuned, trained and judged."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import rules
from rival_data import PUBLISHED_SPLITS, load_logofair_compas
from rules import CLIENTS, SP, Reached, Split, Trained, mean_sd, report

import fedgft
from fedgft.algorithms import Algorithm, fedgft_control, get_method
from fedgft.algorithms.registry import METHOD_LABELS
from fedgft.data.dataset import Dataset
from fedgft.data.partition import inner_split
from fedgft.settings import Settings
from fedgft.study import get_protocol

ONE_POINT = 0.01
ALIKE = (1.0, 2.0)  # points of accuracy and of the gap within which a number is reproduced
Pick = Literal["near best", "gap 1"]
Strengths = np.ndarray  # one per run


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
    """Compare with a published row: what differs by more than `ALIKE`, or "reproduced"."""
    right = own.accuracy - printed[0]
    gap = own.gap - printed[1]
    parts = {
        "more accurate": right > ALIKE[0],
        "less accurate": right < -ALIKE[0],
        "fairer": gap < -ALIKE[1],
        "less fair": gap > ALIKE[1],
    }
    return ", ".join(text for text, holds in parts.items() if holds) or "reproduced"


def is_reached(verdict: str) -> bool:
    """Return whether a method is as good as published, or better."""
    return "less" not in verdict


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
