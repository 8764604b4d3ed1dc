"""What `load.py` runs: how each case's files are made, and what is then done with them.

Making and doing are processes of their own: `python benchmarks/loads.py make CASE SIZE` writes into
the folder it is started in, `python benchmarks/loads.py work CASE SIZE` prints seconds as JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Seconds = dict[str, tuple[float, float]]  # of the clock, and of the processors
COHORT = 1000
ROWS_EACH = 4
ROUNDS = 12
PIECE = 1_000_000
PARTS = 100  # files of a folder
TRAIN = [
    "--label",
    "y",
    "--group",
    "sex",
    "--client",
    "c",
    "--cohort",
    str(COHORT),
    "--method",
    "fedgft",
    "--lam",
    "1",
    "--lr",
    "0.01",
    "--rounds",
    "5",
    "--seeds",
    "1",
    "--eval-every",
    "0",
    "--out",
    "trained",
]
MEASURE = ["--label", "y", "--group", "race", "--group", "sex", "--score", "p", "--out", "big.json"]
SYNTHETIC = [
    "compare",
    "--data",
    "synthetic",
    "--methods",
    "fedavg",
    "fedgft",
    "--lam",
    "1",
    "--lr",
    "0.01",
    "--rounds",
    "10",
    "--out",
    "compared",
]


# The files of a case; each returns what the command is called with, or nothing


def train_parquet(size: int) -> list[str]:
    _people(size).write_parquet("people.parquet")
    return ["train", "--data", "people.parquet", *TRAIN]


def train_csv(size: int) -> list[str]:
    _people(size).write_csv("people.csv")
    return ["train", "--data", "people.csv", *TRAIN]


def sites(size: int) -> list[str]:
    from audit import site_files

    site_files(Path("sites"), size)
    return ["audit", "sites", "--out", "report"]


def bins(size: int) -> list[str]:
    """A hundred sites with 5 classes, 12 groups and `size` bins: files of many numbers."""
    from fedgft.auditing import measure, write_sums

    Path("sites").mkdir()
    rng = np.random.default_rng(0)
    for k in range(100):
        scores = rng.dirichlet(np.ones(5), 2000)
        groups = {
            "region": rng.integers(6, size=2000).astype(str),
            "sex": rng.choice(["F", "M"], 2000),
        }
        found = measure(
            rng.integers(5, size=2000).astype(str),
            scores,
            sensitive_features=groups,
            classes=list("01234"),
            bins=size,
            site=f"site {k}",
        )
        write_sums(found, Path("sites") / f"{k}.json")
    return ["audit", "sites", "--out", "report"]


def measure_parquet(size: int) -> list[str]:
    import polars as pl

    measure_csv(size)
    pl.scan_csv("big.csv").sink_parquet("big.parquet", row_group_size=PIECE)
    return ["measure", "big.parquet", *MEASURE]


def measure_csv(size: int) -> list[str]:
    """Written in pieces: nobody has fifty million rows in memory here."""
    with open("big.csv", "wb") as file:
        for number, piece in enumerate(_pieces(size)):
            piece.write_csv(file, include_header=number == 0)
    return ["measure", "big.csv", *MEASURE]


def measure_folder(size: int) -> list[str]:
    """Parquet, a file per hundredth of the rows, in folders that state the bank."""
    for number, piece in enumerate(_pieces(size, size // PARTS)):
        folder = Path("scored", f"bank=b{number % 10}")
        folder.mkdir(parents=True, exist_ok=True)
        piece.write_parquet(folder / f"part-{number}.parquet")
    return ["measure", "scored", *MEASURE, "--group", "bank"]


def measure_csv_folder(size: int) -> list[str]:
    Path("scored").mkdir()
    for number, piece in enumerate(_pieces(size, size // PARTS)):
        piece.write_csv(Path("scored", f"part-{number}.csv"))
    return ["measure", "scored", *MEASURE]


def measure_join(size: int) -> list[str]:
    """Predictions as in `measure_folder`; the groups of one person in ten rows in another table."""
    import polars as pl

    people = size // 10
    rng = np.random.default_rng(1)
    Path("scored").mkdir()
    for number, piece in enumerate(_pieces(size, size // PARTS)):
        key = pl.Series("id", rng.integers(people, size=len(piece)))
        frame = piece.drop("race", "sex").with_columns(key)
        frame.write_parquet(Path("scored", f"part-{number}.parquet"))
    groups = {
        "id": rng.permutation(people),
        "race": rng.choice(["White", "Black", "Asian"], people),
        "sex": rng.choice(["M", "F"], people),
    }
    pl.DataFrame(groups).write_parquet("people.parquet")
    return ["measure", "scored", *MEASURE, "--join", "people.parquet", "--key", "id"]


def predict(size: int) -> list[str]:
    """A model first; what is measured is its use."""
    import subprocess

    _people(2000).write_parquet("few.parquet")
    asked = [sys.executable, "-m", "fedgft", "train", "--data", "few.parquet", *TRAIN]
    subprocess.run(asked, check=True, capture_output=True)
    _people(size // ROWS_EACH).write_parquet("people.parquet")
    return ["predict", "trained/model.safetensors", "people.parquet", "--out", "scored.parquet"]


def compare(size: int) -> list[str]:
    return [*SYNTHETIC, "--seeds", str(size)]


# The work of cases that have no command


def rounds(size: int, *, fair: bool) -> Seconds:
    from workload import federation

    from fedgft.algorithms import fedavg, fedgft
    from fedgft.data.dataset import Dataset
    from fedgft.engine import Settings, simulate
    from fedgft.metrics import get_metric

    rng = np.random.default_rng(7)
    held = ROWS_EACH * size
    test = 1000
    width = 20
    features = rng.standard_normal((held + test, width), dtype=np.float32)
    label, group = rng.integers(2, size=(2, held + test))
    data = Dataset("load", features, label, group, tuple(f"x{i}" for i in range(width)))
    made = federation(data, np.arange(held).reshape(size, ROWS_EACH), held)
    algorithm = fedgft(get_metric("sp"), lam=1.0) if fair else fedavg()
    settings = Settings(
        schedule="constant",
        state="reset",
        rounds=ROUNDS,
        cohort=COHORT,
        eval_every=0,
        eval_on="test",
        threads=2,
    )
    clock = []
    began = _now()
    simulate(
        [made],
        "logistic",
        algorithm,
        settings,
        seeds=[0],
        on_round=lambda done, total: clock.append(_now()),
    )
    # the first round compiles, the last one is measured as well
    wall, processor = np.median(np.diff(clock, axis=0)[:-1], axis=0).tolist()
    return {"a round": (wall, processor), "all of it": _since(began)}


def partitioned(size: int, *, kind: str) -> Seconds:
    """`size` clients of ten rows on average."""
    from fedgft.data.dataset import Dataset
    from fedgft.data.partition import partition as cut

    rng = np.random.default_rng(0)
    rows = 10 * size
    label, group = rng.integers(2, size=(2, rows))
    features = np.zeros((rows, 1), np.float32)
    data = Dataset("load", features, label, group, ("x",))
    began = _now()
    cut(data, kind, clients=size, alpha=0.5, seed=0)
    return {"": _since(began)}


def server(size: int) -> Seconds:
    """A server's side of one round with so many sites' replies, all of them good."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    from fedgft.flower import FedGFT
    from fedgft.flower.messages import RECORD, pack_sums
    from fedgft.sums import CategoryNames, Sums

    # who sends
    TaskIdentity.run_id = 1
    TaskIdentity.node_id = 1
    TaskIdentity.task_id = 1

    rng = np.random.default_rng(0)
    names = CategoryNames.of(("0", "1"), ("a", "b"))
    sent = ArrayRecord({"weight": _array(rng, (2, 20)), "bias": _array(rng, (2,))})

    def reply(node: int) -> Message:
        tally = Sums.of(rng.dirichlet((1, 1), 50), *rng.integers(2, size=(2, 50)), num_groups=2)
        content = RecordDict(
            {
                "arrays": sent,
                "metrics": MetricRecord({"num-examples": 50}),
                RECORD: pack_sums(tally, names, site=f"site {node}"),
            }
        )
        asked = Message(RecordDict(), dst_node_id=node, message_type="train")
        return Message(content, reply_to=asked)

    strategy = FedGFT(FedAvg(), "sp", lam=1.0, channel="train")
    strategy.sent = sent
    strategy.asked = size
    replies = [reply(100 + i) for i in range(size)]
    began = _now()
    strategy.aggregate_train(1, replies)
    seconds = _since(began)
    assert strategy.history[-1]["clients"] == size
    return {"": seconds}


def _array(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    from flwr.app import Array

    return Array(rng.standard_normal(shape).astype(np.float32))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    wall, processor = _now()
    return wall - began[0], processor - began[1]


# Tables


def _people(clients: int) -> Any:
    """Four rows a client, a client's name in each of them."""
    import polars as pl

    rng = np.random.default_rng(0)
    rows = ROWS_EACH * clients
    group = rng.integers(2, size=rows)
    x = rng.standard_normal((rows, 6)).round(4)
    label = rng.random(rows) < 1 / (1 + np.exp(0.5 - x[:, 0] - x[:, 1] - group))
    client = pl.Series("c", np.repeat(np.arange(clients), ROWS_EACH)).cast(pl.String)
    return pl.DataFrame(
        [
            pl.Series("y", label.astype(np.int8)),
            ("p" + client).alias("c"),
            pl.Series("sex", group).replace_strict({0: "F", 1: "M"}),
            *(pl.Series(f"x{i}", x[:, i]) for i in range(6)),
        ]
    )


def _pieces(rows: int, each: int = PIECE) -> Any:
    import polars as pl

    rng = np.random.default_rng(0)
    for start in range(0, rows, each):
        n = min(each, rows - start)
        yield pl.DataFrame(
            {
                "y": rng.integers(0, 2, n),
                "race": rng.choice(["White", "Black", "Asian"], n),
                "sex": rng.choice(["M", "F"], n),
                "p": rng.random(n).round(6),
            }
        )


MAKE: dict[str, Callable[[int], list[str]]] = {
    f.__name__: f
    for f in (
        *(train_parquet, train_csv, sites, bins, measure_parquet, measure_csv, measure_folder),
        *(measure_csv_folder, measure_join, predict, compare),
    )
}
WORK: dict[str, Callable[[int], Seconds]] = {
    "fedavg": lambda size: rounds(size, fair=False),
    "fedgft": lambda size: rounds(size, fair=True),
    "dirichlet": lambda size: partitioned(size, kind="dirichlet"),
    "pure": lambda size: partitioned(size, kind="pure"),
    "server": server,
}

if __name__ == "__main__":
    what, case, size = sys.argv[1:]
    print(json.dumps({"make": MAKE, "work": WORK}[what][case](int(size))))
