"""FedGFT on Flower, measured: the same parameters everywhere, what it costs, what privacy costs.

python benchmarks/flower.py [--out results] [--only same|cost|private] [--deployed] [--seeds 5]

`same`: the simulator, the in-process engine and (with --deployed, ten minutes) real processes with
TLS, five rounds. `cost`: a round of FedGFT against a bare one, in one run, interleaved. `private`:
Adult between ten clients, epsilon 1 for the statistics of 20 rounds. Writes deployment.md.
"""

import argparse
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the in-process engine

import fedgft  # noqa: E402
from fedgft.algorithms import Adaptive, fedavg  # noqa: E402
from fedgft.algorithms import fedgft as penalized  # noqa: E402
from fedgft.engine import Settings, simulate  # noqa: E402
from fedgft.fair_model import load_model  # noqa: E402
from fedgft.flower import Budget, FedGFT  # noqa: E402
from fedgft.flower.client import first_arrays  # noqa: E402
from fedgft.flower.client import flatten_arrays as flat  # noqa: E402
from fedgft.flower.client_app import divide_public_data  # noqa: E402
from fedgft.metrics import get_metric  # noqa: E402
from in_process_grid import gap_of, grid_of, options  # noqa: E402

SP = get_metric("sp")
LAM = 5.0
LR = 0.01
CUT = {"data": "adult", "group": "", "alpha": 0.5, "seed": 0, "test-share": 0.3}
CASES = {  # name -> Flower's strategy, lam or none, channel, ours for the server
    "FedAvg": ("FedAvg", None, "query", None),
    "FedGFT on FedAvg, query": ("FedAvg", LAM, "query", None),
    "FedGFT on FedAdam, query": ("FedAdam", LAM, "query", Adaptive(lr=0.1, convention="flower")),
    "FedGFT on FedAvg, train (lag)": ("FedAvg", LAM, "train", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", choices=("same", "cost", "private"), default=None)
    parser.add_argument("--deployed", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    lines = ["# FedGFT on Flower", "", "Made by `python benchmarks/flower.py`.", ""]
    for name, part in (
        ("same", lambda: same(args.deployed)),
        ("cost", cost),
        ("private", lambda: private(args.seeds)),
    ):
        if args.only in (None, name):
            made = part()
            print("\n".join(made), flush=True)
            lines += [*made, ""]
    if args.out is not None:
        (args.out / "deployment.md").write_text("\n".join(lines), "utf-8")


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    form = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    return [form(header), form(["---"] * len(header)), *map(form, rows)]


def inner(name: str) -> Any:
    return getattr(flower, name)(**options(**({"eta": 0.1} if name == "FedAdam" else {})))


def start(made: Any, seed: int) -> Any:
    data = made.dataset
    width = data.features.shape[1]
    classes = len(data.classes)
    return first_arrays("logistic", features=width, classes=classes, seed=seed)


def config(seed: int, rounds: int, schedule: str = "constant") -> ConfigRecord:
    return ConfigRecord(
        {"lr": LR, "batch-size": 256, "seed": seed, "rounds": rounds, "schedule": schedule}
    )


def same(deployed: bool) -> list[str]:
    """Adult, three sites, five rounds: the largest difference of any parameter."""
    made = divide_public_data(CUT, 3)
    rows = []
    for title, (name, lam, channel, server) in CASES.items():
        algorithm = fedavg() if lam is None else penalized(SP, lam)
        algorithm = algorithm if server is None else replace(algorithm, server=server)
        settings = Settings(schedule="constant", state="reset", rounds=5, lag=channel == "train")
        expected = simulate([made], "logistic", algorithm, settings, seeds=[0], lr=LR).params[0]
        strategy = inner(name)
        if lam is not None:
            strategy = FedGFT(strategy, "sp", lam=lam, channel=channel)
        found = flat(
            strategy.start(grid_of(made), start(made, 0), 5, train_config=config(0, 5)).arrays
        )
        cells = [title, f"{np.abs(found - expected).max():.1e}"]
        far = np.abs(_deployed(name, lam, channel) - expected).max() if deployed else None
        cells.append("-" if far is None else f"{far:.1e}")
        rows.append(cells)
    header = ["Adult, 3 sites, 5 rounds", "in-process engine", "real processes, TLS"]
    said = "Largest difference of any parameter."
    return ["## The same parameters as the simulator", "", said, "", *table(header, rows)]


def _deployed(name: str, lam: float | None, channel: str) -> np.ndarray:
    method = ["--method", "measured"] if lam is None else ["--lam", str(lam)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "fedgft",
            "deploy",
            "local",
            "--sites",
            "3",
            "--rounds",
            "5",
            *method,
            "--strategy",
            name,
            "--channel",
            channel,
            "--set",
            "schedule=constant",
            f"lr={LR}",
            "--out",
            str(out),
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200)
        print(done.stdout.strip(), file=sys.stderr, flush=True)
        ((weight, bias),) = load_model(out / "model.safetensors").layers
    return np.concatenate([weight.ravel(), bias])


def cost() -> list[str]:
    """Adult, ten clients, ten rounds, interleaved: medians of five."""
    made = divide_public_data(CUT, 10)
    kinds = {
        "FedAvg": lambda: inner("FedAvg"),
        "FedGFT, channel train": lambda: FedGFT(inner("FedAvg"), lam=LAM, final=False),
        "FedGFT, channel query": lambda: FedGFT(
            inner("FedAvg"), lam=LAM, channel="query", final=False
        ),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    server: dict[str, list[float]] = {kind: [] for kind in kinds}
    messages = {}
    for _ in range(5):
        for kind, make in kinds.items():
            grid = grid_of(made)
            strategy = make()
            inside = _clock(grid)
            began = time.perf_counter()
            strategy.start(grid, start(made, 0), 10, train_config=config(0, 10))
            spent = time.perf_counter() - began
            seconds[kind].append(spent / 10)
            server[kind].append((spent - sum(inside)) / 10)
            messages[kind] = sum(grid.messages.values()) / 100
    bare = statistics.median(seconds["FedAvg"])
    idle = statistics.median(server["FedAvg"])
    rows = []
    for kind in kinds:
        whole = statistics.median(seconds[kind])
        own = statistics.median(server[kind])
        rows.append(
            [
                kind,
                f"{messages[kind]:.0f}",
                f"{1e3 * whole:.0f} ms",
                f"{whole / bare:.2f}",
                f"{1e3 * own:.1f} ms",
                f"{(own - idle) / bare:.1%}",
            ]
        )
    header = [
        "Adult, 10 clients, in-process engine",
        "messages a client and round",
        "a round",
        "over FedAvg's",
        "of it on the server",
        "more there, of FedAvg's round",
    ]
    return ["## What it costs", "", *table(header, rows)]


def _clock(grid: Any) -> list[float]:
    """How long the clients and the wire take: all but the server's own work."""
    inside = []
    real = grid.send_and_receive

    def timed(messages: Any, **how: Any) -> Any:
        asked = list(messages)  # configuring the round is the server's work
        began = time.perf_counter()
        replies = real(asked, **how)
        inside.append(time.perf_counter() - began)
        return replies

    grid.send_and_receive = timed
    return inside


def private(seeds: int) -> list[str]:
    """Adult, ten clients, 20 rounds, epsilon 1 and delta 1e-6 for all their statistics."""
    data = fedgft.load("adult")
    rows = []
    for metric in ("sp", "eop"):
        for alpha in (0.5, 100.0):
            found: dict[str, list[tuple[float, float]]] = {}
            errors = []
            for seed in range(seeds):
                cut = fedgft.partition(data, clients=10, alpha=alpha, seed=seed)
                made = fedgft.standardize(cut)
                budget = Budget(1.0, 1e-6, releases=20)
                how = {"channel": "query", "final": False}
                runs = {
                    "FedAvg": inner("FedAvg"),
                    "FedGFT": FedGFT(inner("FedAvg"), metric, lam=LAM, **how),
                    "private": FedGFT(inner("FedAvg"), metric, lam=LAM, budget=budget, **how),
                    "target": FedGFT(inner("FedAvg"), metric, target=0.0, budget=budget, **how),
                }
                for name, strategy in runs.items():
                    told = config(seed, 20, "cosine")
                    result = strategy.start(grid_of(made), start(made, seed), 20, train_config=told)
                    params = flat(result.arrays)
                    gaps = gap_of(made, params, metric), gap_of(made, params, metric, "hard")
                    found.setdefault(name, []).append(gaps)
                errors.append(runs["private"].history[-1]["gap_error"])
                assert abs(runs["private"].history[-1]["epsilon"] - 1.0) < 1e-3
            cells = [metric, f"{alpha:g}"]
            for name in ("FedAvg", "FedGFT", "private", "target"):
                soft, hard = (
                    100 * np.mean(list(values)) for values in zip(*found[name], strict=True)
                )
                cells.append(f"{soft:.1f} / {hard:.1f}")
            rows.append([*cells, f"{100 * np.mean(errors):.1f}"])
    header = [
        "metric",
        "alpha",
        "FedAvg",
        f"FedGFT, lam {LAM:g}, no noise",
        "epsilon 1, lam 5",
        "epsilon 1, target 0",
        "error that the noise puts on one round's gap",
    ]
    said = (
        f"Adult, 10 clients, 20 rounds, {seeds} seeds; epsilon 1, delta 1e-6 for all statistics of "
        "a run; gaps of scores / of decisions on the clients' rows, in points."
    )
    return ["## What privacy costs", "", said, "", *table(header, rows)]


if __name__ == "__main__":
    main()
