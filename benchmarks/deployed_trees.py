"""Seconds and bytes per round of deployed trees, beside the logistic model.

python benchmarks/deployed_trees.py [--only NAME] [--rounds 10] [--sites 3] [--out FILE]

The seconds are those of `fedgft deploy local` on Adult, with real processes. Messages and bytes are
those of the same run in one process, without Flower's own parts: models, sums, histograms and
prices, to one site and back. `--only trees` measures the trees that all sites grow together.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower

import fedgft
from fedgft.data.dataset import get_raw_scaling
from fedgft.data.schema import Schema
from fedgft.flower import FedGFT
from fedgft.flower.client import first_arrays, list_levels
from fedgft.flower.histogram_strategy import GrowingFedGFT
from fedgft.flower.histogram_trees import Cells

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from in_process_grid import InProcessGrid, grid_of, options

RUNS = {
    "logistic": ["--model", "logistic"],
    "xgboost, bagging": ["--model", "xgboost"],
    "xgboost, cyclic": ["--model", "xgboost", "--base", "fedxgbcyclic"],
    "trees, depth 3": ["--model", "trees", "--set", "max-depth=3"],
    "trees, depth 6": ["--model", "trees", "--set", "max-depth=6"],
}


def measure_run(arguments: list[str]) -> tuple[list[float], dict[str, Any]]:
    """Run a federation on this host; return the seconds of each round, and the summary."""
    seen: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedgft", "deploy", "local", *arguments]
        command += ["--out", f"{folder}/run", "--json"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as run:
            for line in run.stderr:
                if line.startswith("round "):
                    seen.append(time.monotonic())
            text = run.stdout.read()
    assert run.returncode == 0, arguments
    return [after - before for before, after in pairwise(seen)], json.loads(text)


class CountingGrid(InProcessGrid):
    """A grid that adds up the sizes of messages, per round: to sites, and from sites."""

    def start(self) -> "CountingGrid":
        self.sizes: Counter[tuple[int, str]] = Counter()
        self.began = time.monotonic()
        self.seconds = 0.0
        return self

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        sent = list(messages)
        number = max(map(number_of, sent), default=0)
        replies = super().send_and_receive(sent, timeout=timeout)
        self.sizes[number, "sent"] += sum(map(size_of, sent))
        self.sizes[number, "received"] += sum(map(size_of, replies))
        self.sizes[number, "messages"] += len(sent)
        self.seconds = time.monotonic() - self.began
        return replies


def number_of(message: Any) -> int:
    configs = message.content.config_records.values()
    return int(next(iter(configs)).get("server-round", 0))


def size_of(message: Any) -> int:
    content = message.content
    arrays = [a for record in content.array_records.values() for a in record.values()]
    others = [*content.config_records.values(), *content.metric_records.values()]
    return sum(len(a.data) for a in arrays) + sum(len(json.dumps(dict(o))) for o in others)


def run_in_process(arguments: list[str], rounds: int, sites: int) -> CountingGrid:
    """Return the grid of a run in one process, which has counted messages and bytes by round."""
    model = arguments[1]
    made = fedgft.partition(fedgft.load("adult", group="race"), clients=sites, alpha=0.5)
    made = fedgft.standardize(made) if model == "logistic" else made
    grid = grid_of(made, model)
    grid.__class__ = CountingGrid
    grid.start()
    data = made.dataset
    shape = {"features": data.features.shape[1], "classes": 2, "levels": list_levels(data)}
    inner: Any = flower.FedAvg(**options())
    rates = {"logistic": 0.01, "xgboost": 0.3, "trees": 0.1}
    settings = {"lr": rates[model], "seed": 0, "rounds": rounds}
    if model == "trees":
        settings["max-depth"] = int(arguments[-1].removeprefix("max-depth="))
        scaling = get_raw_scaling(fedgft.standardize(made))
        schema = Schema("", (), data.classes, data.group_names, data.encoder, *scaling)
        terms = {"channel": "query", "cells": Cells.of(schema)}
        strategy = GrowingFedGFT(inner, "sp", target=0.0, **terms)
    else:
        cyclic = "fedxgbcyclic" in arguments
        if model == "xgboost":
            one = flower.FedXgbCyclic(fraction_evaluate=1.0)
            inner = one if cyclic else flower.FedXgbBagging(**options())
        strategy = FedGFT(inner, "sp", target=0.0, channel="query" if cyclic else "train")
    first = first_arrays(model, seed=0, **shape)
    strategy.start(grid, first, rounds, train_config=ConfigRecord(settings))
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="the beginning of the names of the runs")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    lines = []
    for name, arguments in RUNS.items():
        if not name.startswith(args.only):
            continue
        grid = run_in_process(arguments, args.rounds, args.sites)
        sizes = grid.sizes
        messages = [sizes[number, "messages"] // args.sites for number in (1, 2)]
        both = {
            way: [sizes[number, way] / args.sites / 1000 for number in (1, 2, args.rounds)]
            for way in ("sent", "received")
        }
        shown = {way: ", ".join(f"{kb:.1f}" for kb in kilobytes) for way, kilobytes in both.items()}
        every = ["--sites", str(args.sites), "--rounds", str(args.rounds)]
        seconds, result = measure_run([*arguments, *every])
        held_out = result["held_out"]
        lines += [
            f"{name}: {sum(seconds) / len(seconds):.1f} s per round "
            f"({min(seconds):.1f} to {max(seconds):.1f}), {result['seconds']:.0f} s in all; "
            f"held out: accuracy {100 * held_out['accuracy']:.1f}%, "
            f"sp gap {100 * held_out['gap_hard']:.1f} points",
            f"  messages per site in rounds 1 and 2: {messages[0]}, {messages[1]}; in one process "
            f"{grid.seconds / args.rounds:.2f} s per round",
            f"  kB per site in rounds 1, 2 and {args.rounds}: to it {shown['sent']}; from it "
            f"{shown['received']}",
        ]
        print("\n".join(lines[-3:]), flush=True)
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
