"""What `FairClassifier` costs beside the engine and on large tables; it equals `fedgft train`.

python benchmarks/classifier.py [--out results] [--only overhead large equal]

Writes classifier.md. The comparison with `fedgft train` uses Adult, ten clients, alpha 0.5, and
five seeds; the parameters of both models must be the same bit for bit.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
from timing import in_turns
from workload import BATCH, LR, ROUNDS, TRAIN, dataset, split

import fedgft
from fedgft import FairClassifier, load_model
from fedgft.data import prepared_frame
from fedgft.store import atomic_write
from fedgft.study import Point, Study, get_protocol

ROWS = 1_000_000
SEEDS = 5
REPEATS = 7


def measure_overhead() -> list[str]:
    """W1 (see workload.py): ten clients, 20 rounds of FedAvg on 32,561 rows and 100 features."""
    data = dataset()
    x = data.features[:TRAIN].astype(np.float64)
    y = data.labels[:TRAIN]
    groups = data.groups[:TRAIN]
    owner = np.empty(TRAIN, np.int64)
    for k, rows in enumerate(split(y, 10, seed=1000)):
        owner[rows] = k
    table = fedgft.Dataset(
        "W1",
        data.features[:TRAIN],
        y,
        groups,
        data.columns,
        clients=owner,
        client_names=tuple(map(str, range(10))),
        test=np.zeros(TRAIN, bool),
    )
    base = get_protocol("heldout")
    settings = replace(base.settings, rounds=ROUNDS, batch_size=BATCH)
    protocol = replace(base, settings=settings, round_factors=(), lr=(LR,))
    metric = fedgft.get_metric("sp")
    federation = Study(table, protocol, [0], kind="column").federations(0.5)[0]
    algorithm = protocol.algorithm("fedavg", metric, np.zeros(1))
    classifier = FairClassifier(method="fedavg", rounds=ROUNDS, lr=LR)

    def simulate(_: int) -> None:
        fedgft.simulate([federation], "logistic", algorithm, settings, seeds=[0], lr=LR)

    def sweep(_: int) -> None:
        Study(table, protocol, [0], kind="column").sweep("fedavg", metric, [Point(0.5)])

    def fit(_: int) -> None:
        classifier.fit(x, y, sensitive_features=groups, clients=owner)

    fair = FairClassifier("sp", 0.02)

    def sweep_by_default(_: int) -> None:
        chosen = replace(base, target=(0.02,))
        study = Study(table, chosen, [0], kind="column")
        study.sweep("fedgft-control", metric, [Point(0.5)])

    def fit_by_default(_: int) -> None:
        fair.fit(x, y, sensitive_features=groups, clients=owner)

    runs = (simulate, sweep, fit, sweep_by_default, fit_by_default)
    in_turns(*runs, repeats=1)
    seconds, _ = in_turns(*runs, repeats=REPEATS)
    engine, study, whole, default, whole_default = 1000 * np.median(seconds, axis=1)
    return [
        "## Overhead of `fit` (W1)",
        "",
        "| what | ms | ratio to the row above |",
        "|---|---:|---:|",
        f"| `simulate` alone, 20 rounds of FedAvg | {engine:.0f} | |",
        f"| partition, standardize, `simulate` | {study:.0f} | {study / engine:.2f} |",
        f"| `FairClassifier(method='fedavg', rounds=20, lr=...)` | {whole:.0f} "
        f"| {whole / study:.2f} |",
        f"| the same study with a target; rate chosen, 50 rounds | {default:.0f} | |",
        f"| `FairClassifier('sp', 0.02)` | {whole_default:.0f} | {whole_default / default:.2f} |",
        "",
        f"Median of {REPEATS}, in turns. `fit` also reads and checks its arguments and counts the "
        "sums of `audit_`.",
        "",
    ]


def make_people(rows: int) -> pd.DataFrame:
    """Twenty columns: 15 numbers, an age with missing values, a count, and three texts."""
    rng = np.random.default_rng(0)
    columns = {f"x{i}": rng.normal(size=rows) for i in range(15)}
    columns["count"] = rng.integers(0, 50, rows)
    columns["age"] = np.where(rng.random(rows) < 0.02, np.nan, rng.integers(18, 90, rows))
    columns["city"] = rng.choice(["Bonn", "Lyon", "Oslo", "Rome"], rows)
    columns["sex"] = rng.choice(["f", "m"], rows)
    columns["job"] = rng.choice([f"job {i}" for i in range(12)], rows)
    return pd.DataFrame(columns)


class PeakMemory:
    """The most memory of this process between `__enter__` and `__exit__`, beyond its start."""

    def __enter__(self) -> "PeakMemory":
        self.process = psutil.Process()
        self.start = self.peak = self.process.memory_info().rss
        self.running = True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.thread.join()

    @property
    def extra(self) -> int:
        return self.peak - self.start

    def _watch(self) -> None:
        while self.running:
            self.peak = max(self.peak, self.process.memory_info().rss)
            time.sleep(0.005)


def measure_large() -> list[str]:
    """One million rows of 20 columns, ten clients, a target, 50 rounds."""
    frame = make_people(ROWS)
    rng = np.random.default_rng(1)
    score = frame["x0"] + frame["x1"] + (frame["sex"] == "m") + rng.normal(size=ROWS)
    y = (score > 0.5).astype(int).to_numpy()
    site = rng.choice([f"site {i}" for i in range(10)], ROWS)
    classifier = FairClassifier("sp", 0.02, lr=0.02, rounds=50)
    few = slice(2000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fedgft.TargetMissedWarning)
        classifier.fit(frame[few], y[few], sensitive_features=frame["sex"][few], clients=site[few])
    own = frame.memory_usage(deep=True).sum()
    with PeakMemory() as memory:
        started = time.perf_counter()
        classifier.fit(frame, y, sensitive_features=frame["sex"], clients=site)
        seconds = time.perf_counter() - started
    started = time.perf_counter()
    classifier.predict(frame)
    predicted = time.perf_counter() - started
    return [
        "## One million rows",
        "",
        f"A pandas table of {ROWS:,} rows and {frame.shape[1]} columns ({own / 2**20:.0f} MB), ten "
        f"clients, target 2 points, 50 rounds: `fit` takes {seconds:.1f} s and at its peak "
        f"{memory.extra / 2**20:.0f} MB beyond the table ({memory.extra / own:.2f} times its "
        f"size). `predict` takes {predicted:.1f} s.",
        "",
    ]


def compare_with_train() -> list[str]:
    """The models of `FairClassifier` and of `fedgft train`, with the same options, on Adult."""
    lines = [
        "## Equal to `fedgft train`",
        "",
        "Adult, race, ten clients, alpha 0.5, 30% of the rows held out. Gaps of decisions in "
        "points, means over the seeds.",
        "",
        "| metric | target | seeds | equal, bit for bit | gap, clients' rows | gap, held out |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "adult.csv"
        frame = prepared_frame("adult")
        frame.write_csv(table)
        label, group = "income", "race"
        y = frame[label].to_numpy()
        for metric in ("sp", "eop"):
            for target in (0.0, 0.02):
                out = Path(folder) / f"{metric}-{target}"
                command = [sys.executable, "-m", "fedgft", "train", "--data", str(table)]
                command += ["--label", label, "--group", group, "--clients", "10", "--quiet"]
                command += ["--metric", metric, "--target", str(target), "--seeds", str(SEEDS)]
                command += ["--alpha", "0.5", "--all-models", "--out", str(out), "--keep-group"]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                gaps = []
                equal = 0
                for seed in range(SEEDS):
                    classifier = FairClassifier(metric, target, test_share=0.3, random_state=seed)
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", fedgft.TargetMissedWarning)
                        classifier.fit(
                            frame.drop(label), y, sensitive_features=frame[group], clients=10
                        )
                    other = load_model(out / f"model-{seed}.safetensors")
                    own = classifier.model_
                    pairs = [(own.tensors[n], other.tensors[n]) for n in other.tensors]
                    pairs += [(own.mean, other.mean), (own.spread, other.spread)]
                    equal += all(np.array_equal(a, b) for a, b in pairs)
                    gaps.append((classifier.training_["gap"], classifier.training_["gap_test"]))
                clients, test = 100 * np.mean(gaps, axis=0)
                cells = (metric, f"{100 * target:g}", SEEDS, equal, f"{clients:.2f}", f"{test:.2f}")
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, ""]


PARTS = {"overhead": measure_overhead, "large": measure_large, "equal": compare_with_train}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    lines = ["# FairClassifier", "", "Made by `python benchmarks/classifier.py`.", ""]
    for name in given.only:
        lines += PARTS[name]()
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    given.out.mkdir(parents=True, exist_ok=True)
    with atomic_write(given.out / "classifier.md") as part:
        part.write(text.encode())


if __name__ == "__main__":
    main()
