"""How reliably FedGFT reaches a target, over training settings, sizes and numbers of groups.

python benchmarks/control.py [--only grid small groups loop flower] [--out results]

`grid`: Adult and COMPAS, logistic and MLP, {constant, cosine} x {10, 20, 50 rounds} x {SGD, Adam} x
{1, 5 epochs} x {batch 64, 256} x targets {0, 0.02}. `small`: four sites with 900 training rows in
all, 20 draws. `groups`: race x sex x age bands on Adult, beside Fairlearn's ExponentiatedGradient
on pooled rows. `loop`: a PyTorch loop with `Penalty` and a constant rate. `flower`: an own Flower
app, settings A (cosine) and B (constant), four strategies, two channels.

Each part appends its rows to OUT/control-LABEL.jsonl and is not run again while they stand there;
`--page` writes OUT/control.md from the rows labeled `before` and `after`. Rows labeled `before`
were made by this file with the sources of commit a2e8751 first on the path.
"""

import argparse
import itertools
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedgft.algorithms import fedavg, fedgft_control
from fedgft.data import load
from fedgft.data.dataset import Dataset, Federation, standardize
from fedgft.data.partition import partition
from fedgft.engine import Settings, simulate
from fedgft.metrics import get_metric
from fedgft.optimizers import Optimizer

ROOT = Path(__file__).parents[1]
ONE_POINT = 0.01
RATES = {"sgd": 0.1, "adam": 0.02}
TARGETS = (0.0, 0.02)
DRAWS = ((0.5, 0), (0.5, 1), (100.0, 2), (100.0, 3))  # Dirichlet's alpha and the seed
GRID = list(
    itertools.product(("constant", "cosine"), (10, 20, 50), ("sgd", "adam"), (1, 5), (64, 256))
)
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--label", choices=("before", "after"), default="after")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if not args.page:
        run(args)
    write_page(args.out)


def run(args: argparse.Namespace) -> None:
    """Appends the rows of the parts that have none yet."""
    path = args.out / f"control-{args.label}.jsonl"
    done = {(row["part"], row["case"]) for row in read(path)}
    for part in args.only:
        for case, make in PARTS[part](args.device):
            if (part, case) in done:
                continue
            began = time.perf_counter()
            row = {"part": part, "case": case, **make()}
            row["seconds"] = round(time.perf_counter() - began, 1)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def read(path: Path) -> list[Row]:
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )


# The parts: each yields names of cases and functions that run them


def grid(device: str) -> Iterator[tuple[str, Any]]:
    """One case per setting; each trains both targets on four federations."""
    for data, model, metric in (
        ("compas", "logistic", "sp"),
        ("adult", "logistic", "sp"),
        ("compas", "logistic", "eop"),
        ("adult", "logistic", "eop"),
        ("compas", "mlp", "sp"),
        ("adult", "mlp", "sp"),
    ):
        for setting in GRID:
            name = f"{data}, {model}, {metric}: " + ", ".join(map(str, setting))
            yield name, lambda d=data, o=model, m=metric, s=setting: one_setting(d, o, m, s, device)


def one_setting(data: str, model: str, metric: str, setting: Any, device: str) -> Row:
    schedule, rounds, optimizer, epochs, batch = setting
    settings = Settings(
        rounds=rounds,
        epochs=epochs,
        batch_size=batch,
        schedule=schedule,
        optimizer=Optimizer(optimizer),
        state="shared" if optimizer == "adam" else "reset",
        device=device,
    )
    made = [federation(data, alpha, seed) for alpha, seed in DRAWS]
    targets = np.repeat(TARGETS, len(made))
    return trained(
        made * len(TARGETS),
        model,
        metric,
        targets,
        settings,
        seeds=[seed for _, seed in DRAWS] * len(TARGETS),
        lr=RATES[optimizer],
    )


def trained(
    made: list[Federation],
    model: str,
    metric: str,
    targets: np.ndarray,
    settings: Settings,
    *,
    seeds: list[int],
    lr: float,
) -> Row:
    """Gaps of decisions on the clients' rows, and whether each miss was said."""
    chosen = get_metric(metric)
    history = simulate(made, model, fedgft_control(chosen, targets), settings, seeds=seeds, lr=lr)
    assert history.federation is not None
    gap = history.federation[-1].gap(chosen, "hard")
    missed = ~(gap <= targets + ONE_POINT)
    control = getattr(history, "control", None)
    warned = missed & (False if control is None else ~control.reached)
    return {
        "gaps": points(gap),
        "targets": points(targets),
        "accuracy": points(history.test[-1].accuracy()),
        "missed": int(missed.sum()),
        "warned": int(warned.sum()),
    }


def points(values: np.ndarray) -> list[float]:
    return [round(100 * float(value), 2) for value in values]


KNOWN: dict[Any, Any] = {}


def dataset(name: str) -> Dataset:
    if name not in KNOWN:
        KNOWN[name] = replace(load(name), test=None)
    return KNOWN[name]


def federation(name: str, alpha: float, seed: int) -> Federation:
    key = (name, alpha, seed)
    if key not in KNOWN:
        KNOWN[key] = standardize(partition(dataset(name), clients=10, alpha=alpha, seed=seed))
    return KNOWN[key]


def small(device: str) -> Iterator[tuple[str, Any]]:
    """Four sites, 900 training rows in all, 20 draws of rows and sites."""
    settings = Settings(rounds=50, state="shared", schedule="cosine")
    for data, metric, target in itertools.product(("compas", "adult"), ("sp", "eop"), TARGETS):
        yield (
            f"{data}, {metric}, target {target:g}",
            lambda d=data, m=metric, t=target: few_rows(d, m, t, settings),
        )


def few_rows(data: str, metric: str, target: float, settings: Settings) -> Row:
    rows = []
    for seed in range(20):
        made = standardize(
            partition(draw(dataset(data), 1286, seed), clients=4, alpha=5.0, seed=seed)
        )
        row = trained(
            [made], "logistic", metric, np.array([target]), settings, seeds=[seed], lr=0.02
        )
        plain = simulate([made], "logistic", fedavg(), settings, seeds=[seed], lr=0.02)
        row["fedavg"] = points(plain.federation[-1].gap(get_metric(metric), "hard"))
        row["fedavg_accuracy"] = points(plain.test[-1].accuracy())
        rows.append(row)
    lists = [name for name, value in rows[0].items() if isinstance(value, list)]
    joined: Row = {name: [row[name][0] for row in rows] for name in lists}
    return joined | {name: sum(row[name] for row in rows) for name in ("missed", "warned")}


def draw(data: Dataset, rows: int, seed: int) -> Dataset:
    """Some rows at random."""
    kept = np.sort(np.random.default_rng(seed).choice(len(data.labels), rows, replace=False))
    arrays = {f.name: getattr(data, f.name) for f in fields(data)}
    cut = {
        name: value[kept]
        for name, value in arrays.items()
        if isinstance(value, np.ndarray) and len(value) == len(data.labels)
    }
    return replace(data, **cut)


def groups(device: str) -> Iterator[tuple[str, Any]]:
    """Race x sex x age bands on Adult: 12 and 18 groups, 47 clients, and the pooled reference."""
    settings = Settings(rounds=50, state="shared", schedule="cosine")
    for bands, metric, lr in itertools.product((3, 5), ("sp", "eop"), (0.02, 0.005)):
        yield (
            f"{4 * bands} groups, {metric}, rate {lr:g}",
            lambda b=bands, m=metric, r=lr: many_groups(b, m, r, settings),
        )
    for bands, metric in itertools.product((3, 5), ("sp", "eop")):
        yield (
            f"{4 * bands} groups, {metric}, ExponentiatedGradient on pooled rows",
            lambda b=bands, m=metric: pooled_reference(b, m),
        )


def banded(bands: int) -> Dataset:
    """Adult with race x sex x age band as its groups."""
    if ("bands", bands) not in KNOWN:
        data = replace(load("adult", group="race,sex"), test=None)
        age = data.features[:, data.columns.index("age")]
        edges = {3: (30, 45), 5: (25, 35, 45, 60)}[bands]
        band = np.searchsorted(edges, age, side="right")
        names = tuple(f"{g}, age band {b + 1}" for g in data.group_names for b in range(bands))
        shown = (band[:, None] == np.arange(bands)).astype(data.features.dtype)
        KNOWN["bands", bands] = replace(
            data,
            features=np.hstack((data.features, shown)),
            columns=(*data.columns, *(f"age band {b + 1}" for b in range(bands))),
            groups=(data.groups * bands + band).astype(data.groups.dtype),
            group_names=names,
            encoder=None,
        )
    return KNOWN["bands", bands]


def many_groups(bands: int, metric: str, lr: float, settings: Settings) -> Row:
    data = banded(bands)
    seeds = [0, 1, 2]
    made = [standardize(partition(data, clients=47, alpha=5.0, seed=seed)) for seed in seeds]
    row = trained(made, "logistic", metric, np.zeros(3), settings, seeds=seeds, lr=lr)
    plain = simulate(made, "logistic", fedavg(), settings, seeds=seeds, lr=lr)
    assert plain.federation is not None
    return row | {
        "fedavg": points(plain.federation[-1].gap(get_metric(metric), "hard")),
        "fedavg_accuracy": points(plain.test[-1].accuracy()),
        "smallest": int(np.bincount(data.groups).min()),
    }


def pooled_reference(bands: int, metric: str) -> Row:
    """Fairlearn's ExponentiatedGradient on the pooled training rows of one federation."""
    from fairlearn.reductions import (
        DemographicParity,
        ExponentiatedGradient,
        TruePositiveRateParity,
    )
    from sklearn.linear_model import LogisticRegression

    from fedgft.sums import Sums

    made = standardize(partition(banded(bands), clients=47, alpha=5.0, seed=0))
    data = made.dataset
    rows = made.rows
    test = made.test
    bound = {"sp": DemographicParity, "eop": TruePositiveRateParity}[metric](difference_bound=0.002)
    fit = ExponentiatedGradient(LogisticRegression(max_iter=300), bound, max_iter=15)
    fit.fit(made.scale_rows(rows), data.labels[rows], sensitive_features=data.groups[rows])
    found = {}
    for name, at in (("train", rows), ("test", test)):
        positive = np.clip(fit._pmf_predict(made.scale_rows(at))[:, 1], 0.0, 1.0)
        count = Sums.of(
            np.stack((1 - positive, positive), 1),
            data.labels[at],
            data.groups[at],
            num_groups=len(data.group_names),
        )
        right = np.where(data.labels[at] == 1, positive, 1 - positive).mean()
        found[name] = float(count.gap(get_metric(metric), "soft")), float(right)
    return {
        "gaps": points(np.array([found["train"][0]])),
        "targets": [0.0],
        "accuracy": points(np.array([found["test"][1]])),
        "missed": 0,
        "warned": 0,
    }


def loop(device: str) -> Iterator[tuple[str, Any]]:
    """A plain PyTorch loop with a constant rate: three sites, two and three groups."""
    for groups_, seed in itertools.product((2, 3), range(5)):
        yield f"{groups_} groups, seed {seed}", lambda g=groups_, s=seed: own_loop(g, s)


def own_loop(num_groups: int, seed: int) -> Row:
    import torch
    from torch import nn

    from fedgft import Penalty

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    x, y, a = loans(3000, seed, num_groups)
    model = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    damps = hasattr(Penalty, "damp")
    more = {"rounds": 50} if damps else {}
    penalty = Penalty("sp", target=0.02, groups=num_groups, **more)
    gaps = []
    if damps:
        penalty.damp(model)
    for _ in range(50):
        gaps.append(penalty.update(penalty.statistics(model(x), y, a)))
        for at in torch.randperm(len(y)).split(256):
            optimizer.zero_grad()
            logits = model(x[at])
            loss = nn.functional.cross_entropy(logits, y[at]) + penalty(logits, y[at], a[at])
            loss.backward()
            optimizer.step()
        if damps:
            penalty.damp(model)
    gaps.append(penalty.update(penalty.statistics(model(x), y, a)))
    missed = gaps[-1] > 0.02 + ONE_POINT
    report = getattr(penalty, "report", None)
    warned = missed and report is not None and not report.reached[0]
    return {
        "gaps": points(np.array(gaps[-1:])),
        "targets": [2.0],
        "late": points(np.array([min(gaps[-15:]), max(gaps[-15:])])),
        "accuracy": points(np.array([float((model(x).argmax(1) == y).float().mean())])),
        "missed": int(missed),
        "warned": int(warned),
    }


def loans(rows: int, seed: int, num_groups: int = 2) -> Any:
    """Made loan applications: features, repaid or not, group; one group is worse off."""
    import torch

    rng = np.random.default_rng(seed)
    group = rng.integers(0, num_groups, rows)
    income = rng.normal(2.3 + 0.9 * group, 1.0)
    debt = rng.normal(1.0, 0.5, rows)
    years = rng.exponential(4.0, rows)
    logit = 1.2 * (income - 3.0) - 1.0 * debt + 0.08 * years + 0.3
    repaid = rng.random(rows) < 1 / (1 + np.exp(-logit))
    table = np.stack((income - 3, debt - 1, years / 4 - 1, group - 0.5), 1)
    return (
        torch.tensor(table, dtype=torch.float32),
        torch.tensor(repaid.astype(np.int64)),
        torch.tensor(group),
    )


def flower(device: str) -> Iterator[tuple[str, Any]]:
    """The own app of a Flower user: a torch model, three sites, four strategies, two channels."""
    for setting, strategy, method in itertools.product(
        ("A: cosine, batch 256, 1 epoch", "B: constant, batch 64, 2 epochs"),
        ("FedAvg", "FedAdam", "FedMedian", "FedTrimmedAvg"),
        ("as it is", "train", "query"),
    ):
        yield (
            f"{setting}; {strategy}; {method}",
            lambda s=setting, n=strategy, m=method: own_app(s[0], n, m),
        )


def own_app(setting: str, name: str, method: str) -> Row:
    import logging

    import torch
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.serverapp import strategy as strategies

    sys.path.insert(0, str(ROOT / "tests"))  # the in-process engine
    from fedgft.flower import FedGFT, MeasuredStrategy
    from in_process_grid import InProcessGrid, app_of, options

    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rounds = 20
    tables = [loans(rows, seed) for seed, rows in enumerate((1500, 1000, 700))]
    sites = [torch_site(f"site {i}", table, setting, rounds) for i, table in enumerate(tables)]
    inner = getattr(strategies, name)(**options(**({"eta": 0.03} if name == "FedAdam" else {})))
    if method == "as it is":
        strategy = MeasuredStrategy(inner, "sp", channel="query")
    else:
        strategy = FedGFT(inner, "sp", target=0.02, channel=method)
    start = ArrayRecord(torch_model().state_dict())
    result = strategy.start(
        InProcessGrid([app_of(site) for site in sites]),
        start,
        rounds,
        train_config=ConfigRecord({}),
    )
    model = torch_model()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    x, y, a = (torch.cat(columns) for columns in zip(*tables, strict=True))
    chosen = model(x).argmax(1)
    gap = abs(float(chosen[a == 0].float().mean() - chosen[a == 1].float().mean()))
    late = [row["gap_hard"] for row in strategy.history[rounds // 2 :]]
    missed = gap > 0.02 + ONE_POINT and method != "as it is"
    return {
        "gaps": points(np.array([gap])),
        "targets": [2.0],
        "late": points(np.array([min(late), max(late)])),
        "accuracy": points(np.array([float((chosen == y).float().mean())])),
        "missed": int(missed),
        "warned": int(
            missed and strategy.measured is not None and strategy.measured.get("reached") is False
        ),
    }


def torch_model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))


def torch_site(name: str, table: Any, setting: str, rounds: int) -> Any:
    """A site with a training loop of its own: Adam, rate 0.01."""
    import torch

    from fedgft.flower import Site

    x, y, a = table
    batch, epochs = {"A": (256, 1), "B": (64, 2)}[setting]

    def train(model: Any, penalty: Any, config: Any) -> None:
        round_ = int(config.get("server-round", 1)) - 1
        cosine = 0.05 + 0.95 * (1 + np.cos(np.pi * round_ / rounds)) / 2
        rate = 0.01 * (cosine if setting == "A" else 1.0)
        optimizer = torch.optim.Adam(model.parameters(), rate)
        for _ in range(epochs):
            for at in torch.randperm(len(y)).split(batch):
                optimizer.zero_grad()
                logits = model(x[at])
                loss = torch.nn.functional.cross_entropy(logits, y[at])
                (loss + penalty(logits, y[at], a[at])).backward()
                optimizer.step()

    return Site(torch_model(), (x, y, a), name=name, train=train)


PARTS = {"grid": grid, "small": small, "groups": groups, "loop": loop, "flower": flower}


# The page


def write_page(out: Path) -> None:
    """OUT/control.md, from the rows that were kept."""
    rows = {label: read(out / f"control-{label}.jsonl") for label in ("before", "after")}
    lines = [
        "# How reliably a target is reached",
        "",
        "Made by `python benchmarks/control.py`; `before` is the controller of version 0.1 (commit "
        "a2e8751). Gaps of decisions on the clients' training rows, in points. A run reaches its "
        "target here if its gap is at most one point above it. The grid and the small federations "
        "were measured before the floor under the controller's trust, the last change to it; the "
        "grid ran on a machine without numba, its networks on a GPU.",
        "",
        *grid_table(rows),
        *case_table("small", "Four sites, 900 training rows in all, 20 draws", rows),
        *case_table("groups", "Many groups: race x sex x age bands on Adult, 47 clients", rows),
        *case_table("loop", "A PyTorch loop of your own with `Penalty` and a constant rate", rows),
        *case_table("flower", "A Flower app of your own, target 2 points, 20 rounds", rows),
    ]
    (out / "control.md").write_text("\n".join(lines).rstrip() + "\n", "utf-8")


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def grid_table(rows: dict[str, list[Row]]) -> list[str]:
    """Share of runs that reached their target, by data set, model, schedule and rounds."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for label, kept in rows.items():
        for row in kept:
            if row["part"] == "grid":
                head, setting = row["case"].split(": ")
                schedule, rounds = setting.split(", ")[:2]
                for key in ((head, f"{schedule}, {rounds} rounds"), (head, "all")):
                    found.setdefault(key, {}).setdefault(label, []).append(row)
    cells = []
    for (head, setting), both in found.items():
        cells.append([head, setting, *(share(both.get(label, [])) for label in rows)])
    cells.sort(key=lambda cell: (cell[0], cell[1] != "all"))
    total = {label: [r for r in kept if r["part"] == "grid"] for label, kept in rows.items()}
    cells.insert(0, ["everything", "all", *(share(kept) for kept in total.values())])
    after = total["after"]
    silent = sum(row["missed"] - row["warned"] for row in after)
    said = (
        "{constant, cosine} x {10, 20, 50 rounds} x {SGD, Adam} x {1, 5 epochs} x {batch 64, 256} "
        "x targets {0, 2 points}, four federations each (alpha 0.5 and 100). Share of runs that "
        f"reached the target. Of the misses after, {silent} went without a warning."
    )
    header = ["data, model, metric", "setting", "before", "after"]
    return ["## Training settings", "", said, "", *table(header, cells), ""]


def share(rows: list[Row]) -> str:
    runs = sum(len(row["gaps"]) for row in rows)
    return f"{1 - sum(row['missed'] for row in rows) / runs:.1%} of {runs}" if runs else "-"


def case_table(part: str, title: str, rows: dict[str, list[Row]]) -> list[str]:
    """One line per case: how many runs reached the target, gap and accuracy, before and after."""
    cases = dict.fromkeys(r["case"] for kept in rows.values() for r in kept if r["part"] == part)
    if not cases:
        return []
    lines = []
    for case in cases:
        cells = [case]
        for kept in rows.values():
            row = next((r for r in kept if (r["part"], r["case"]) == (part, case)), None)
            cells += shown(row)
        both = [r for kept in rows.values() for r in kept if (r["part"], r["case"]) == (part, case)]
        plain = [r for r in both if "fedavg" in r]
        means = [f"{np.mean(r['fedavg']):.1f}, {np.mean(r['fedavg_accuracy']):.1f}" for r in plain]
        cells.append(means[-1] if means else "")
        lines.append(cells)
    header = ["case"]
    for label in rows:
        header += [f"reached, {label}", f"gap, {label}", f"accuracy, {label}"]
    return [f"## {title}", "", *table([*header, "FedAvg: gap, accuracy"], lines), ""]


def shown(row: Row | None) -> list[str]:
    if row is None:
        return ["-", "-", "-"]
    runs = len(row["gaps"])
    gaps = np.array(row["gaps"])
    late = f" (late rounds {row['late'][0]:.1f} to {row['late'][1]:.1f})" if "late" in row else ""
    most = f", at most {gaps.max():.1f}" if runs > 1 else ""
    plain = row["case"].endswith("as it is")  # it has no target
    return [
        "-" if plain else f"{runs - row['missed']} of {runs}",
        f"{gaps.mean():.1f}{most}{late}",
        f"{np.mean(row['accuracy']):.1f}",
    ]


if __name__ == "__main__":
    main()
