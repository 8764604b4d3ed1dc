"""What might make fedgft-control better: each idea beside it on the tracks of the benchmark.

python benchmarks/levers.py [--only price rounds mixture thresholds cohorts] [--seeds 20]

Writes levers.md; sections that are not made stay as they are. An idea is judged on inner rows, on
which no model was trained, by paired differences over the replicates.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from rules import Part, describe, report
from scipy import stats
from scipy.optimize import linprog
from sklearn.metrics import roc_auc_score

import fedgft
from fedgft.algorithms import Algorithm, fedavg, fedgft_control
from fedgft.algorithms import fedgft as published_fedgft
from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.bench import get_track
from fedgft.bench.cell_training import SETTINGS, Base, OpenTrack, score_rows, train_base
from fedgft.bench.scores import Outcome, stack_outcomes
from fedgft.engine import History, simulate
from fedgft.engine.round import RoundLoop
from fedgft.formatting import Table
from fedgft.metrics import Metric, get_metric
from fedgft.metrics.score_gaps import largest_gap_over_thresholds
from fedgft.store import atomic_write

TRACKS = ("adult-sex", "adult-race", "adult-race-sex", "compas-race", "law-race")
METRICS = ("sp", "eop", "eo")
TARGETS = (0.0, 0.02)
STRENGTHS = (5.0, 20.0, 50.0, 100.0)  # of the penalty on all thresholds
SHUFFLES = 20  # of the groups, for the gap by chance
COHORT = {10: 3, 200: 10}  # clients per round, by the number of clients
CONFIDENCE = 0.95


class Options(NamedTuple):
    """What the command line asks for."""

    seeds: int


@lru_cache
def open_track(name: str, seeds: int) -> tuple[OpenTrack, Base]:
    """Return a track in memory, and the learning rates that FedAvg chose on it."""
    found = OpenTrack.load(get_track(name), seeds)
    return found, train_base(found, lambda amount: None)


def train(name: str, seeds: int, algorithm: Algorithm, **settings: Any) -> History:
    """Train all replicates of a track, with the settings of the benchmark except these."""
    found, base = open_track(name, seeds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TargetMissedWarning)
        return simulate(
            found.federations,
            "logistic",
            algorithm,
            replace(SETTINGS, **settings),
            seeds=found.seeds,
            lr=base.lr,
        )


def count(name: str, seeds: int, params: np.ndarray) -> Outcome:
    """Return the counts of the decisions of models (seed, p), (seed, ...)."""
    found, _ = open_track(name, seeds)
    counted = []
    for i, (federation, counter) in enumerate(zip(found.federations, found.counters, strict=True)):
        every = np.arange(len(federation.dataset))
        scores = score_rows(federation, params[i : i + 1], every)[:, 0]
        counted.append(counter.count((scores >= 0.5).astype(float)))
    return stack_outcomes(counted)


# Judgment


class Difference(NamedTuple):
    """A mean of paired differences in points, with its 95% interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, new: np.ndarray, old: np.ndarray) -> "Difference":
        """Return the difference of two arrays of fractions, (seed,) each."""
        points = 100 * (new - old)
        error = stats.sem(points) * stats.t.ppf((1 + CONFIDENCE) / 2, len(points) - 1)
        return cls(float(points.mean()), float(points.mean() - error), float(points.mean() + error))

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def judge(accuracy: Difference, gap: Difference) -> str:
    """Return whether an idea wins: one difference is clearly better and the other is not worse."""
    better = accuracy.low > 0 or gap.high < 0
    worse = accuracy.high < 0 or gap.low > 0
    return {(True, False): "wins", (False, True): "loses"}.get((better, worse), "ties")


def compare(metric: Metric, new: Outcome, old: Outcome) -> list[str]:
    """Return the cells of a row: differences on inner rows, the verdict, and test rows."""
    accuracy = Difference.of(new.accuracy("inner"), old.accuracy("inner"))
    gap = Difference.of(new.gap(metric, "inner"), old.gap(metric, "inner"))
    tests = [
        f"{100 * each.accuracy().mean():.2f} / {100 * each.gap(metric).mean():.2f}"
        for each in (old, new)
    ]
    return [str(accuracy), str(gap), judge(accuracy, gap), *tests]


def tally_verdicts(rows: Sequence[Sequence[str]]) -> tuple[str, bool | None]:
    """Return a claim that counts wins, ties and losses; it holds if wins prevail."""
    counts = {name: sum(name in row for row in rows) for name in ("wins", "ties", "loses")}
    text = f"{counts['wins']} wins, {counts['ties']} ties, {counts['loses']} losses"
    return text, counts["wins"] > counts["loses"]


COLUMNS = (
    *("track", "metric", "target", "accuracy, difference", "gap, difference", "verdict"),
    *("test before", "test after"),
)
NOTES = (
    "Differences on inner rows in points, means over replicates with 95% intervals. Test: accuracy "
    "in percent / gap in points.",
)


# The ideas


def price(options: Options) -> Part:
    """Prices that are paid for decisions, as weights and labels of rows."""
    rows = []
    for name in TRACKS:
        for metric in map(get_metric, METRICS):
            for target in TARGETS:
                old, new = (
                    fedgft_control(metric, target),
                    fedgft_control(metric, target, price_on="decisions"),
                )
                pair = [
                    count(name, options.seeds, train(name, options.seeds, each).params)
                    for each in (new, old)
                ]
                rows.append((name, metric.name, f"{100 * target:g}", *compare(metric, *pair)))
    text = (
        "A price v of a positive decision makes weighted classification of error plus price: a row "
        "has the weight |1 - 2y + v|, and the other label where 1 - 2y + v has the other sign "
        "(`--price-on decisions`). The loss of a linear model stays convex. 50 rounds."
    )
    table = Table("Price on decisions beside price on scores", COLUMNS, tuple(rows), 3, NOTES)
    return "Price on decisions", text, [table], [tally_verdicts(rows)]


def rounds(options: Options) -> Part:
    """Fewer rounds, with prices on scores and on decisions."""
    table_rows = []
    claims = []
    for name in TRACKS:
        metric = get_metric("sp")
        full = train(name, options.seeds, fedgft_control(metric, 0.0))
        usual = count(name, options.seeds, full.params)
        for number in (5, 10, 20):
            for on in ("scores", "decisions"):
                algorithm = fedgft_control(metric, 0.0, price_on=on)
                history = train(name, options.seeds, algorithm, rounds=number)
                found = count(name, options.seeds, history.params)
                own = 100 * found.gap(metric, "train")
                cells = compare(metric, found, usual)
                reached = f"{np.mean(own <= 0.3):.0%}"
                table_rows.append((name, str(number), on, reached, f"{own.mean():.2f}", *cells))
    text = (
        "fedgft-control with target 0 for statistical parity, beside its own 50 rounds. Reached: "
        "the share of replicates whose gap on the training rows is at most 0.3 points."
    )
    header = ("track", "rounds", "price on", "reached", "gap, training rows", *COLUMNS[3:])
    for on in ("scores", "decisions"):
        met = [row for row in table_rows if row[1] == "10" and row[2] == on]
        kept = [row[0] for row in met if row[7] != "loses"]
        claim = f"10 rounds with prices on {on} are not worse than 50 on {len(kept)} of {len(met)}"
        claims.append((f"{claim} tracks", len(kept) == len(met)))
    table = Table("Fewer rounds", header, tuple(table_rows), 3, NOTES)
    return "Fewer rounds", text, [table], claims


def mixture(options: Options) -> Part:
    """A mixture of the models of all rounds, by a linear program on their sums."""
    rows = []
    for name in TRACKS:
        for metric in map(get_metric, METRICS):
            for target in TARGETS:
                models: list[np.ndarray] = []
                found, base = open_track(name, options.seeds)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", TargetMissedWarning)
                    history = simulate(
                        found.federations,
                        "logistic",
                        fedgft_control(metric, target),
                        replace(SETTINGS, eval_every=1),
                        seeds=found.seeds,
                        lr=base.lr,
                        on_model=lambda done, params, kept=models: kept.append(params.copy()),
                    )
                old = count(name, options.seeds, history.params)
                each = [count(name, options.seeds, params) for params in models[1:]]
                stacked = stack_outcomes(each)
                mixed, feasible = mix(metric, target, stacked)
                label = f"{feasible} of {options.seeds}"
                rows.append(
                    (name, metric.name, f"{100 * target:g}", *compare(metric, mixed, old), label)
                )
    text = (
        "The server knows the sums of every round's model, so a linear program finds the weights "
        "of these models with the smallest error within the target; each person is decided by one "
        "of them, drawn by a fixed coin. Where no mixture meets the target, the last model stays."
    )
    table = Table("Mixture of rounds", (*COLUMNS, "feasible"), tuple(rows), 3, NOTES)
    return "Mixture of rounds", text, [table], [tally_verdicts(rows)]


def mix(metric: Metric, target: float, models: Outcome) -> tuple[Outcome, int]:
    """Return the counts of the best mixture of models (round, seed, ...), and how many exist."""
    accuracy = models.accuracy("train")
    rates = metric.rates(models.sums("train").statistics(metric, "hard"))
    weights = np.zeros(accuracy.shape)
    feasible = 0
    for i in range(accuracy.shape[1]):
        pairs = permutations(range(rates.shape[-1]), 2)
        limits = np.concatenate([(rates[:, i, :, a] - rates[:, i, :, b]).T for a, b in pairs])
        found = linprog(
            -accuracy[:, i],
            A_ub=limits,
            b_ub=np.full(len(limits), target),
            A_eq=np.ones((1, len(accuracy))),
            b_eq=[1.0],
            bounds=(0, 1),
        )
        feasible += found.success
        weights[:, i] = found.x if found.success else np.eye(len(accuracy))[-1]
    mixed = models.map(
        lambda array: (weights.reshape(*weights.shape, *[1] * (array.ndim - 2)) * array).sum(0)
    )
    return mixed, feasible


def thresholds(options: Options) -> Part:
    """Fair at every threshold."""
    rows = []
    claims = []
    metric = get_metric("sp")
    for name in ("adult-sex", "adult-race", "compas-race"):
        entries = [("FedAvg", fedavg()), ("fedgft-control, target 0", fedgft_control(metric, 0.0))]
        for strength in STRENGTHS:
            entries.append((f"sp@all, lam {strength:g}", published_fedgft("sp@all", strength)))
        largest = {}
        for label, algorithm in entries:
            history = train(name, options.seeds, algorithm)
            found = count(name, options.seeds, history.params)
            scored = measure_scores(name, options.seeds, history.params)
            largest[label] = scored[:, 0].mean()
            cells = [f"{100 * mean:.1f} ± {100 * sd:.1f}" for mean, sd in describe_columns(scored)]
            accuracy = 100 * found.accuracy()
            gap = 100 * found.gap(metric)
            numbers = (f"{accuracy.mean():.1f} ± {accuracy.std(ddof=1):.1f}", f"{gap.mean():.1f}")
            rows.append((name, label, *cells, *numbers))
        best = min(STRENGTHS, key=lambda s: largest[f"sp@all, lam {s:g}"])
        gaps = [largest[k] for k in ("FedAvg", entries[1][0], f"sp@all, lam {best:g}")]
        text = " to ".join(f"{100 * gap:.1f}" for gap in gaps)
        claim = f"{name}: the largest gap over all thresholds falls from {text} points"
        claims.append((f"{claim} (FedAvg, fedgft-control, sp@all)", gaps[2] < gaps[1] < gaps[0]))
    header = (
        *("track", "method", "largest gap over all thresholds", "the same by chance"),
        *("area under the curve", "accuracy", "gap at 0.5"),
    )
    text = (
        "A penalty on the distance of the groups' score distributions (`--metrics sp@all`) beside "
        "a target at the threshold 0.5. Test rows, in percent and points; by chance: with the "
        f"groups of the test rows shuffled, mean of {SHUFFLES}."
    )
    table = Table("Largest gap over all thresholds", header, tuple(rows), 2)
    return "Fair at every threshold", text, [table], claims


def measure_scores(name: str, seeds: int, params: np.ndarray) -> np.ndarray:
    """Return, (seed, 3): largest gap over thresholds, the same by chance, area under the curve."""
    found, _ = open_track(name, seeds)
    out = []
    for i, federation in enumerate(found.federations):
        data = federation.dataset
        test = federation.test
        scores = score_rows(federation, params[i : i + 1], test)[:, 0]
        groups = data.groups[test]
        count = {"num_groups": len(data.group_names)}
        rng = np.random.default_rng(i)
        shuffled = [
            largest_gap_over_thresholds(scores, rng.permutation(groups), **count)
            for _ in range(SHUFFLES)
        ]
        area = roc_auc_score(data.labels[test], scores)
        gap = largest_gap_over_thresholds(scores, groups, **count)
        out.append((gap, float(np.mean(shuffled)), float(area)))
    return np.array(out)


def describe_columns(values: np.ndarray) -> list[tuple[float, float]]:
    return [(float(each.mean()), float(each.std(ddof=1))) for each in values.T]


def cohorts(options: Options) -> Part:
    """The memory of clients' sums, where few of very different clients take part."""
    rows = []
    claims = []
    for data in ("adult", "compas"):
        for alpha, clients in ((0.1, 10), (0.5, 10), (0.3, 200)):
            for metric in map(get_metric, ("sp", "eop")):
                for number in (50, 100):
                    for lr in (0.005, 0.02):
                        made = deal(data, alpha, clients, options.seeds)
                        old, new = (
                            sample(made, metric, number, lr, remember=each)
                            for each in (False, True)
                        )
                        gap = Difference.of(new[1], old[1])
                        accuracy = Difference.of(new[0], old[0])
                        means = [f"{100 * each[1].mean():.2f}" for each in (old, new)]
                        size = f"{COHORT[clients]} of {clients}"
                        cell = (data, size, f"{alpha:g}", metric.name, str(number), f"{lr:g}")
                        verdict = judge(accuracy, gap)
                        rows.append((*cell, *means, str(gap), str(accuracy), verdict))
    for clients, size in COHORT.items():
        mine = [row for row in rows if row[1] == f"{size} of {clients}"]
        mean = [float(np.mean([float(row[i]) for row in mine])) for i in (6, 7)]
        text = f"mean gap {mean[0]:.2f} points without the memory and {mean[1]:.2f} with it"
        verdicts, prevails = tally_verdicts(mine)
        claims.append((f"{size} of {clients} clients: {text}; {verdicts}", prevails))
    text = (
        "Few clients take part per round, drawn with equal probability; target 0. "
        "With the memory, the server estimates the sums of all clients from what each sent last. "
        "Gaps of decisions on all clients' training rows, of the final model."
    )
    header = (
        *("data", "clients", "alpha", "metric", "rounds", "lr", "gap without", "gap with"),
        *("gap, difference", "test accuracy, difference", "verdict"),
    )
    table = Table("Memory of the clients' sums", header, tuple(rows), 4)
    return "Sampled cohorts", text, [table], claims


def sample(
    made: list[fedgft.data.Federation], metric: Metric, number: int, lr: float, *, remember: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Train with sampled cohorts; return test accuracy and the gap on training rows, (seed,)."""

    def forget(loop: RoundLoop, state: Any, cohort: Any, sums: Any) -> tuple[Any, Any, Any]:
        return state, cohort, sums

    estimate = RoundLoop._estimate if remember else forget
    with mock.patch.object(RoundLoop, "_estimate", estimate), warnings.catch_warnings():
        warnings.simplefilter("ignore", TargetMissedWarning)
        history = simulate(
            made,
            "logistic",
            fedgft_control(metric, 0.0),
            replace(SETTINGS, rounds=number, cohort=COHORT[made[0].num_clients], eval_on="both"),
            seeds=range(len(made)),
            lr=lr,
        )
    assert history.federation is not None
    return history.test[-1].accuracy(), history.federation[-1].gap(metric, "hard")


@lru_cache
def deal(data: str, alpha: float, clients: int, seeds: int) -> list[fedgft.data.Federation]:
    """Return a federation per seed."""
    table = fedgft.load(data)
    make = partial(fedgft.partition, table, "dirichlet", clients=clients, alpha=alpha)
    return [fedgft.standardize(make(seed=seed)) for seed in range(seeds)]


PARTS: dict[str, Callable[[Options], Part]] = {
    "price": price,
    "rounds": rounds,
    "mixture": mixture,
    "thresholds": thresholds,
    "cohorts": cohorts,
}
HEAD = """# What might make fedgft-control better

Made by `python benchmarks/levers.py`. Each idea stands beside fedgft-control on the tracks of the
benchmark ([protocol](../docs/bench.md)). It wins where it is clearly more accurate or has a clearly
smaller gap, and is not clearly worse in the other, on inner rows, which no model was trained on.

The memory of sampled clients has two constants (`KEPT`, `MOST_REPEATED`). They were chosen on the
federations of the section "Sampled cohorts", seeds 0 to 13 of them, by the gaps that it lists: its
figures flatter the memory. The smoothing of `sp@all` was tried at two values (0.2 and none) on
replicates 0 to 5 of three tracks."""


def update(page: str, made: Sequence[Part]) -> str:
    """Return the page with some sections made anew; the others stay."""
    _, *old = page.split("\n## ") if page else [""]
    sections = {text.split("\n")[0]: text.strip() for text in old}
    sections |= {part[0]: describe(part) for part in made}
    return "\n\n## ".join((HEAD, *sections.values())) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    made = []
    for name in args.only:
        begun = time.perf_counter()
        made.append(PARTS[name](Options(args.seeds)))
        report(name, begun)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "levers.md"
    text = update(path.read_text() if path.exists() else "", made)
    with atomic_write(path) as part:
        part.write(text.encode())
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
