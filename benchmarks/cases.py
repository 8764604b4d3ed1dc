"""The cases: what is compared with what. Each gives one dictionary of plain values."""

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from timing import alone, clock, in_turns, peak_mb
from workload import BATCH, LR, ROUNDS, WORKLOADS, Workload, many_clients

from fedgft.data.dataset import Federation
from fedgft.engine import History, Settings, simulate
from fedgft.federated import Algorithm, fedavg, fedgft
from fedgft.metrics import get_metric

PLAIN_REPLICATES = 3  # of 20: the plain loop's time is scaled up
COHORT, GROWTH_ROUNDS = 100, 200
FEW, MANY = 1_000, 100_000


@dataclass(frozen=True)
class Options:
    executor: str = "auto"
    repeats: int = 5
    threads: int = 2

    def arguments(self) -> list[str]:
        return ["--executor", self.executor, "--threads", str(self.threads)]

    def settings(self) -> Settings:
        return Settings(rounds=ROUNDS, batch_size=BATCH, eval_on="test", threads=self.threads,
                        executor=self.executor)  # fmt: skip


Case = Callable[[str, Options], dict[str, Any]]


def ours(work: Workload, options: Options) -> Callable[[], History]:
    federations, start, settings = work.federations(), work.start(), options.settings()
    seeds = range(work.replicates)
    return lambda: simulate(
        federations, work.model, fedavg(), settings, seeds=seeds, lr=LR, init=start
    )


def plain(work: Workload) -> Callable[[], float]:
    """The mean accuracy of the replicates it runs: all, or the first few of many."""
    import plain as loop  # imports torch

    seeds = range(min(work.replicates, PLAIN_REPLICATES))
    parts = [work.parts(seed) for seed in seeds]
    return lambda: float(np.mean([loop.run(work, parts[s], seed=s) for s in seeds]))


def against_plain(case: str, options: Options) -> dict[str, Any]:
    """Ours against the plain loop."""
    peak = alone(case, "ours", *options.arguments())["peak_mb"]
    work = WORKLOADS[case]
    shared = min(work.replicates, PLAIN_REPLICATES)
    our_run, plain_run = ours(work, options), plain(work)
    cold, history = clock(our_run)
    accuracies: list[float] = []
    our_seconds, plain_seconds = in_turns(
        our_run, lambda: accuracies.append(plain_run()), repeats=options.repeats
    )
    plain_seconds *= work.replicates / shared
    return {
        "case": case,
        "executor": history.executor,
        **_compared(our_seconds, plain_seconds),
        "ratio": _round(np.median(plain_seconds) / np.median(our_seconds)),
        "accuracy": _round(history.test[-1].accuracy()[:shared].mean()),
        "plain_accuracy": _round(np.mean(accuracies)),
        "peak_mb": peak,
        "cold_seconds": _round(cold),
    }


def growth(case: str, options: Options) -> dict[str, Any]:
    """A round of 100 clients out of 100,000 against a round of 100 out of 1,000."""
    peak = alone(case, "ours", *options.arguments())["peak_mb"]
    many, few = many_clients(MANY), many_clients(FEW)
    rounds_of(many, options), rounds_of(few, options)  # warm-up
    costs = [(rounds_of(many, options), rounds_of(few, options)) for _ in range(options.repeats)]
    many_seconds, few_seconds = np.array(costs).T
    return {
        "case": case,
        "executor": "fused",
        **_compared(many_seconds, few_seconds),
        "ratio": _round(np.median(many_seconds) / np.median(few_seconds)),
        "peak_mb": peak,
        "note": "seconds are of one round among 100,000 clients, plain_seconds of one among "
        "1,000 (ours too); ratio = seconds / plain_seconds, at most 1.5",
    }


def rounds_of(federation: Federation, options: Options) -> float:
    """Median seconds of a round with a small cohort."""
    stamps: list[float] = []
    settings = replace(options.settings(), rounds=GROWTH_ROUNDS, cohort=COHORT, eval_every=0)
    simulate([federation], "logistic", fedavg(), settings, seeds=[0], lr=LR,
             on_round=lambda done, total: stamps.append(time.perf_counter()))  # fmt: skip
    return float(np.median(np.diff(stamps)[:-1]))  # the last round is followed by the evaluation


def penalty(case: str, options: Options) -> dict[str, Any]:
    """FedGFT against FedAvg, measuring clients and test rows each round (`fedgft compare`) or
    the test rows only."""
    peak = alone(case, "ours", *options.arguments())["peak_mb"]
    table = {
        f"{name} {eval_on}": _penalty(WORKLOADS[name], eval_on, options)
        for name in ("W1x20", "W1")
        for eval_on in ("both", "test")
    }
    fair, bare = table["W1x20 both"]
    return {
        "case": case,
        "executor": "fused",
        **_compared(fair, bare),
        "ratio": _round(np.median(fair) / np.median(bare)),
        "peak_mb": peak,
        "ratios": {name: _round(np.median(f) / np.median(b)) for name, (f, b) in table.items()},
        "note": "seconds are FedGFT's, plain_seconds FedAvg's (ours too), W1x20 as `fedgft "
        "compare` runs it; ratio = seconds / plain_seconds; ratios has it by what is measured",
    }


def _penalty(work: Workload, eval_on: str, options: Options) -> list[np.ndarray]:
    federations, start = work.federations(), work.start()

    def run(algorithm: Algorithm) -> Callable[[], History]:
        settings = replace(options.settings(), eval_on=eval_on)
        return lambda: simulate(federations, work.model, algorithm, settings,
                                seeds=range(len(federations)), lr=LR, init=start)  # fmt: skip

    pair = run(fedgft(get_metric("sp"))), run(fedavg())
    in_turns(*pair, repeats=1)  # warm-up
    return in_turns(*pair, repeats=options.repeats * 20 // work.replicates)


def startup(case: str, options: Options) -> dict[str, Any]:
    """W1 in a fresh process, from its start to its end; and the help page."""
    arguments, sides = options.arguments(), ("ours", "plain")
    with tempfile.TemporaryDirectory() as empty:
        cold = alone("W1", "ours", *arguments, env={"NUMBA_CACHE_DIR": empty})
    alone("W1", "ours", *arguments)  # fills the cache of kernels
    runs = [[alone("W1", side, *arguments) for side in sides] for _ in range(options.repeats)]
    our_seconds, plain_seconds = np.array([[r["process_seconds"] for r in pair] for pair in runs]).T
    result = {
        "case": case,
        "executor": runs[0][0]["executor"],
        **_compared(our_seconds, plain_seconds),
        "ratio": _round(np.median(plain_seconds) / np.median(our_seconds)),
        "peak_mb": runs[0][0]["peak_mb"],
        "plain_peak_mb": runs[0][1]["peak_mb"],
        "cold_seconds": _round(cold["process_seconds"]),
        "note": "whole processes, the making of the data included; cold: kernels compiled anew",
    }
    if importlib.util.find_spec("fedgft.__main__"):
        page = [sys.executable, "-m", "fedgft", "--help"]
        show = lambda: subprocess.run(page, check=True, capture_output=True)  # noqa: E731
        result["help_seconds"] = _round(np.median(in_turns(show, repeats=options.repeats)[0]))
    return result


def once(case: str, side: str, options: Options) -> dict[str, Any]:
    """One run of one side in this process and nothing else: for its memory and its start-up."""
    runs: dict[str, Callable[[], Any]] = {
        "growth": lambda: rounds_of(many_clients(MANY), options),
        "penalty": lambda: _penalty(WORKLOADS["W1x20"], "both", replace(options, repeats=1)),
    }
    work = WORKLOADS.get(case)
    if work:
        runs[case] = ours(work, options) if side == "ours" else plain(work)
    seconds, result = clock(runs[case])
    executor = result.executor if isinstance(result, History) else side
    return {"seconds": seconds, "peak_mb": peak_mb(), "executor": executor}


def _compared(our_seconds: np.ndarray, plain_seconds: np.ndarray) -> dict[str, Any]:
    return {
        "seconds": _round(np.median(our_seconds)),
        "fastest": _round(our_seconds.min()),
        "slowest": _round(our_seconds.max()),
        "plain_seconds": _round(np.median(plain_seconds)),
    }


def _round(value: Any) -> float:
    return float(f"{value:.5g}")


CASES: dict[str, Case] = {
    **dict.fromkeys(WORKLOADS, against_plain),
    "growth": growth,
    "penalty": penalty,
    "startup": startup,
}
