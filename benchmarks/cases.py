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

from fedgft.algorithms import Algorithm, fedavg, fedgft
from fedgft.data.dataset import Federation
from fedgft.engine import History, Settings, simulate
from fedgft.metrics import get_metric

PLAIN_REPLICATES = 3  # of 20: the plain loop's time is scaled up
COHORT = 100
GROWTH_ROUNDS = 200
FEW = 1_000
MANY = 100_000


@dataclass(frozen=True)
class Options:
    executor: str = "auto"
    repeats: int = 5
    threads: int = 2

    def arguments(self) -> list[str]:
        return ["--executor", self.executor, "--threads", str(self.threads)]

    def settings(self) -> Settings:
        return Settings(
            schedule="constant",
            state="reset",
            rounds=ROUNDS,
            batch_size=BATCH,
            eval_on="test",
            threads=self.threads,
            executor=self.executor,
        )


Case = Callable[[str, Options], dict[str, Any]]
Run = Callable[[int], Any]  # of a repeat's number, which decides the order of the rows


def ours(work: Workload, algorithm: Algorithm, settings: Settings) -> Run:
    """All replicates in one call."""
    federations = work.federations()
    start = work.start()
    replicates = np.arange(work.replicates)
    return lambda repeat: simulate(
        federations,
        work.model,
        algorithm,
        settings,
        seeds=replicates + 100 * repeat,
        lr=LR,
        init=start,
    )


def plain(work: Workload) -> Run:
    """The mean accuracy of the replicates it runs: all, or the first few of many."""
    import plain as loop  # imports torch

    replicates = range(min(work.replicates, PLAIN_REPLICATES))
    parts = [work.parts(r) for r in replicates]
    return lambda repeat: float(
        np.mean([loop.run(work, parts[r], seed=r + 100 * repeat) for r in replicates])
    )


def against_plain(case: str, options: Options) -> dict[str, Any]:
    """Ours against the plain loop."""
    peak = alone(case, "ours", *options.arguments())["peak_mb"]
    work = WORKLOADS[case]
    shared = min(work.replicates, PLAIN_REPLICATES)  # replicates that both run
    our_run = ours(work, fedavg(), options.settings())
    cold, _ = clock(lambda: our_run(0))
    (our_seconds, plain_seconds), (histories, accuracies) = in_turns(
        our_run, plain(work), repeats=options.repeats
    )
    plain_seconds = plain_seconds * work.replicates / shared
    return {
        "case": case,
        "executor": histories[0].executor,
        **_compared(our_seconds, plain_seconds),
        "ratio": _round(np.median(plain_seconds) / np.median(our_seconds)),
        "accuracy": _round(np.mean([h.test[-1].accuracy()[:shared] for h in histories])),
        "plain_accuracy": _round(np.mean(accuracies)),
        "peak_mb": peak,
        "cold_seconds": _round(cold),
    }


def growth(case: str, options: Options) -> dict[str, Any]:
    """A round of 100 clients out of 100,000 against a round of 100 out of 1,000."""
    peak = alone(case, "ours", *options.arguments())["peak_mb"]
    many = many_clients(MANY)
    few = many_clients(FEW)
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
    simulate(
        [federation],
        "logistic",
        fedavg(),
        settings,
        seeds=[0],
        lr=LR,
        on_round=lambda done, total: stamps.append(time.perf_counter()),
    )
    return float(np.median(np.diff(stamps)[:-1]))  # the last round is followed by the evaluation


def penalty(case: str, options: Options) -> dict[str, Any]:
    """FedGFT against FedAvg, measuring clients and test rows each round (`fedgft compare`) or
    the test rows only."""
    peak = alone(case, "ours", *options.arguments())["peak_mb"]
    table = {
        f"{name} {eval_on}": _fedgft_and_fedavg(WORKLOADS[name], eval_on, options)
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


def _fedgft_and_fedavg(work: Workload, eval_on: str, options: Options) -> np.ndarray:
    settings = replace(options.settings(), eval_on=eval_on)
    pair = [ours(work, method, settings) for method in (fedgft(get_metric("sp")), fedavg())]
    in_turns(*pair, repeats=1)  # warm-up
    repeats = options.repeats * 20 // work.replicates  # the shorter, the more often
    return in_turns(*pair, repeats=repeats)[0]


def startup(case: str, options: Options) -> dict[str, Any]:
    """W1 in a fresh process, from its start to its end; and the help page."""
    arguments = options.arguments()
    with tempfile.TemporaryDirectory() as empty:
        cold = alone("W1", "ours", *arguments, env={"NUMBA_CACHE_DIR": empty})
    alone("W1", "ours", *arguments)  # fills the cache of kernels
    seconds, (mine, plains) = in_turns(
        lambda _: alone("W1", "ours", *arguments),
        lambda _: alone("W1", "plain", *arguments),
        repeats=options.repeats,
    )
    return {
        "case": case,
        "executor": mine[0]["executor"],
        **_compared(*seconds),
        "ratio": _round(np.median(seconds[1]) / np.median(seconds[0])),
        "peak_mb": mine[0]["peak_mb"],
        "plain_peak_mb": plains[0]["peak_mb"],
        "cold_seconds": _round(cold["process_seconds"]),
        **_help_page(options.repeats),
        "note": "whole processes, the making of the data included; cold: kernels compiled anew",
    }


def _help_page(repeats: int) -> dict[str, float]:
    if importlib.util.find_spec("fedgft.__main__") is None:
        return {}
    command = [sys.executable, "-m", "fedgft", "--help"]
    seconds, _ = in_turns(
        lambda _: subprocess.run(command, check=True, capture_output=True), repeats=repeats
    )
    return {"help_seconds": _round(np.median(seconds))}


def once(case: str, side: str, options: Options) -> dict[str, Any]:
    """One run of one side in this process and nothing else: for its memory and its start-up."""
    if case == "growth":
        result = rounds_of(many_clients(MANY), options)
    elif case == "penalty":
        settings = replace(options.settings(), eval_on="both")
        result = ours(WORKLOADS["W1x20"], fedgft(get_metric("sp")), settings)(0)
    elif side == "ours":
        result = ours(WORKLOADS[case], fedavg(), options.settings())(0)
    else:
        result = plain(WORKLOADS[case])(0)
    executor = result.executor if isinstance(result, History) else side
    return {"peak_mb": peak_mb(), "executor": executor}


def _compared(our_seconds: np.ndarray, plain_seconds: np.ndarray) -> dict[str, float]:
    return {
        "seconds": _round(np.median(our_seconds)),
        "fastest": _round(our_seconds.min()),
        "slowest": _round(our_seconds.max()),
        "plain_seconds": _round(np.median(plain_seconds)),
    }


def _round(value: float) -> float:
    return float(f"{value:.5g}")


CASES: dict[str, Case] = {
    **dict.fromkeys(WORKLOADS, against_plain),
    "growth": growth,
    "penalty": penalty,
    "startup": startup,
}
