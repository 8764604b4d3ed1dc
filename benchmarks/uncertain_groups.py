"""What randomized groups cost in training: Adult by sex, with and without corrected prices.

python benchmarks/uncertain_groups.py [--quick] [--out results/uncertain_groups.md]

The controller is trained three times per replicate: with the true groups, with groups that went
through randomized response and prices that are corrected for it, and with the same groups taken as
they are. All three are judged by the true groups of the held-out rows.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

import fedgft
from fedgft.data.dataset import Dataset
from fedgft.engine import Settings, predict_proba
from fedgft.sums import Sums

TARGET = 0.02
EPSILONS = (1.0, 2.0)
HEADING = """# Groups that were randomized

Adult by sex, 10 clients (alpha 0.5), {rounds} rounds, target {target:.1f} points for the gap of
statistical parity, {seeds} replicates (mean±sd). Held-out gaps are those of the true groups, in
points. `python benchmarks/uncertain_groups.py` writes this page.

| groups | epsilon | prices | accuracy | true held-out gap | gap that the server saw |
|---|---:|---|---:|---:|---:|
"""


def randomize(data: Dataset, epsilon: float, seed: int) -> Dataset:
    """The data set after its groups went through randomized response, taken as they are."""
    rng = np.random.default_rng([seed, 0xE9])
    k = len(data.group_names)
    keep = rng.random(len(data)) < np.exp(epsilon) / (np.exp(epsilon) + k - 1)
    other = (data.groups + rng.integers(1, k, len(data))) % k
    return replace(data, groups=np.where(keep, data.groups, other))


def train(data: Dataset, truth: Dataset, method: str, seed: int, rounds: int) -> np.ndarray:
    """Accuracy and true gap on held-out rows, and the gap that the server saw at the end."""
    dealt = fedgft.partition(truth, clients=10, seed=seed)  # the same clients for all
    federation = fedgft.standardize(replace(dealt, dataset=data))
    strength = {} if method == "fedavg" else {"target": TARGET}
    history = fedgft.simulate(
        federation, "logistic", method, Settings(rounds=rounds), metric="sp", seeds=seed, **strength
    )
    rows = federation.test
    probs = predict_proba(federation, "logistic", history.params[0], rows)
    sums = Sums.of(probs, truth.labels[rows], truth.groups[rows], num_groups=len(truth.group_names))
    seen = history.federation[-1].gap("sp", "hard")[0]
    return np.array([sums.accuracy(), sums.gap("sp", "hard"), seen])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 replicates, 30 rounds")
    parser.add_argument("--out", type=Path, default=Path("results/uncertain_groups.md"))
    args = parser.parse_args()
    seeds, rounds = (2, 30) if args.quick else (10, 50)
    truth = fedgft.load("adult", group="sex").standardized()
    lines = []

    def add(groups: str, epsilon: str, prices: str, method: str, make) -> None:
        found = np.array([train(make(s), truth, method, s, rounds) for s in range(seeds)])
        mean, sd = found.mean(0), found.std(0, ddof=1)
        cells = [f"{100 * m:.1f}±{100 * s:.1f}" for m, s in zip(mean, sd, strict=True)]
        lines.append(f"| {groups} | {epsilon} | {prices} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)

    add("true", "", "none (FedAvg)", "fedavg", lambda s: truth)
    add("true", "", "as they are", "fedgft-control", lambda s: truth)
    for epsilon in EPSILONS:
        text = f"{epsilon:g}"

        def noisy(seed: int, epsilon: float = epsilon) -> Dataset:
            return randomize(truth, epsilon, seed)

        def corrected(seed: int, epsilon: float = epsilon) -> Dataset:
            return replace(randomize(truth, epsilon, seed), randomized=epsilon)

        add("randomized", text, "as they are", "fedgft-control", noisy)
        add("randomized", text, "corrected", "fedgft-control", corrected)
    heading = HEADING.format(rounds=rounds, target=100 * TARGET, seeds=seeds)
    args.out.write_text(heading + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
