"""Whether private statistics are what they say: measured, and attacked.

python hardening/privacy.py [--pairs 1000] [--draws 20000] [--out results]

1. How far one row more or less moves the counts of training rows that a deployed site releases:
   over neighboring tables, with the split of this version and with that of version 0.1.
2. How well releases of two neighboring tables can be told apart, as a lower bound on epsilon
   (95% confidence), beside the accounted epsilon; and the same with planted faults.
3. The attacks on secure sums: what the server gets.
4. What noise costs with and without secure sums.
5. What a site's file shows of single people, and what that costs the audit.

Writes OUT/privacy.md; exits with 1 if a row moves a count by more than one, if a release shows more
than its account, if a planted fault is not found, or if an attack gets through. Needs the `test`
extra and Adult in the cache. About ten minutes on two cores.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.serverapp import strategy as flower

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedgft.auditing import SiteSums, audit, measure, merge
from fedgft.data import prepared_frame
from fedgft.data.table import read_frame
from fedgft.errors import FedgftError
from fedgft.flower import Budget, FedGFT
from fedgft.flower.client import client_site
from fedgft.flower.client_app import _choose_test_rows, _data_file
from fedgft.flower.messages import make_request
from fedgft.flower.secure_sums import SecureCohort, SecureSum
from fedgft.privacy.noise import Noise, draw_discrete_gaussian, honest_clients
from fedgft.store import atomic_write
from fedgft.sums import Sums
from in_process_grid import app_of, biased, grid_of, options, start_of, train_config
from neighboring_tables import (
    by_row,
    by_shuffle,
    epsilon_lower_bound,
    likelihood_ratio,
    sensitivity,
)

Rows = list[list[str]]
ROWS = 1987  # of a site, as in the review that found the fault


def table(head: list[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# 1. Sensitivity


def measured_sensitivity(pairs: int) -> tuple[Rows, bool]:
    rows = []
    right = True
    for title, split in (
        ("version 0.1: a shuffle of all rows", by_shuffle),
        ("now: a keyed hash of each row", by_row),
    ):
        moved = np.array(sensitivity(pairs, rows=ROWS, seed=1, split=split))
        rows.append(
            [
                title,
                f"made, {ROWS:,} rows",
                f"{pairs:,}",
                f"{moved.mean():.2f}",
                f"{moved.max():.2f}",
            ]
        )
        right &= split is by_shuffle or moved.max() <= 1
    moved = adult_sensitivity(100)
    rows.append(
        [
            "now, from the CSV on",
            "Adult, 1,987 rows",
            "100",
            f"{moved.mean():.2f}",
            f"{moved.max():.2f}",
        ]
    )
    return rows, right and moved.max() <= 1


def adult_sensitivity(pairs: int) -> np.ndarray:
    """Through the code of a deployed site: the file is read, and its rows are held out."""
    people = prepared_frame("adult")
    rng = np.random.default_rng(0)
    labels, groups = (sorted(people[name].unique()) for name in ("income", "sex"))

    def counts(context: Context) -> np.ndarray:
        frame = read_frame(_data_file(context))
        kept = frame.filter(~_choose_test_rows(frame, _data_file(context), context))
        found = dict(kept.group_by("income", "sex").len().rows_by_key(["income", "sex"]))
        return np.array([[found.get((y, a), [(0,)])[0][0] for a in groups] for y in labels])

    moved = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = {"data": str(folder / "site.csv"), "state": str(folder / "state")}
        config = {"label": "income", "group": "sex", "split": "", "test-share": 0.3}
        context = Context(
            run_id=1, node_id=1, node_config=told, state=RecordDict(), run_config=config
        )
        for number in range(pairs):
            drawn = people[rng.permutation(people.height)[: ROWS + 1].tolist()]
            place = int(rng.integers(0, ROWS + 1))
            less = pl.concat([drawn[:place], drawn[place + 1 :]])
            tables = []
            for one in (drawn, less) if number % 2 else (less, drawn):
                one.write_csv(folder / "site.csv")
                tables.append(counts(context))
            moved.append(float(np.linalg.norm(tables[0] - tables[1])))
    return np.array(moved)


# 2. Epsilon


def shown(budget: Budget, draws: int, *, apart: float = 1.0, smaller: float = 1.0) -> float:
    """Of two tables whose counts are so far apart, by noise that is so many times smaller."""
    noise = budget.noise("soft")
    assert noise is not None
    planted = Noise(noise.kind, noise.count / smaller, noise.value / smaller)
    found = []
    for rows in (400.0, 400.0 + apart):
        count = np.full((draws, 1, 1), rows)
        score = np.stack((0 * count, count), -1)
        sent = planted.add(Sums(count, score, score), None)
        both = np.stack((sent.count, sent.score[..., 1]), -1)[:, 0, 0]
        deviation = np.array([noise.count, noise.value])
        found.append(likelihood_ratio(both, np.ones(2), deviation))
    return epsilon_lower_bound(*found, budget.delta, sure=0.95)


def shown_secretly(budget: Budget, draws: int, clients: int, *, keeping: int) -> float:
    """Of a secure sum, when only so many clients keep their share of the noise to themselves."""
    noise = budget.noise("soft")
    assert noise is not None
    share = noise.share(clients)
    unit = 2**20
    found = []
    for rows in (400.0, 401.0):
        total = np.full((draws, 2), rows * unit)
        for _ in range(keeping):
            for column, deviation in enumerate((share.count, share.value)):
                total[:, column] += draw_discrete_gaussian(draws, deviation * unit)
        each = np.array([noise.count * 2**0.5, noise.value])
        found.append(likelihood_ratio(total / unit, np.ones(2), each))
    return epsilon_lower_bound(*found, budget.delta, sure=0.95)


def measured_epsilon(draws: int) -> tuple[Rows, bool]:
    rows = []
    right = True
    # 2.5% of honest lower bounds are above the true epsilon, which is below the account
    for epsilon, delta in ((0.5, 0.01), (1.0, 0.01), (1.0, 1e-6), (3.0, 0.01)):
        budget = Budget(epsilon, delta)
        found = shown(budget, draws)
        rows.append(["as shipped", f"{epsilon:g}", f"{delta:g}", f"{found:.2f}", "no more"])
        right &= found <= epsilon
    budget = Budget(1.0, 0.01)
    for title, how in (
        ("noise a third as large", {"smaller": 3.0}),
        ("the split of version 0.1 (12 rows apart)", {"apart": 12.0}),
    ):
        found = shown(budget, draws, **how)
        rows.append([f"planted fault: {title}", "1", "0.01", f"{found:.2f}", "more: found"])
        right &= found > 1.0
    for keeping in (10, honest_clients(10), 1):
        found = shown_secretly(budget, draws // 2, 10, keeping=keeping)
        title = f"secure sum of 10 sites, {10 - keeping} of which give their noise away"
        verdict = "no more" if keeping >= honest_clients(10) else "more: beyond what is promised"
        rows.append([title, "1", "0.01", f"{found:.2f}", verdict])
        right &= (found <= 1.0) == (keeping >= honest_clients(10))
    return rows, right


# 3. Attacks


def ask(grid, arrays, nodes, cohort=None):
    request = make_request(None, None, statistics="received", privacy={"secure": 1.0})
    one = SecureSum(grid, arrays, request, ConfigRecord(), 60.0)
    return one.ask(nodes, cohort or SecureCohort())


def attacks() -> tuple[Rows, bool]:
    made = biased(clients=4)
    arrays = start_of(made)
    near = ArrayRecord({n: Array(a.numpy() + np.float32(1e-4)) for n, a in arrays.items()})

    def missing(grid) -> None:
        _, cohort = ask(grid, arrays, list(grid.apps))
        grid.gone = {103}
        ask(grid, near, list(grid.apps), cohort)

    def twice(grid) -> None:
        ask(grid, arrays, list(grid.apps))
        ask(grid, arrays, [100, 101, 102])

    def next_run(grid) -> None:
        ask(grid, arrays, list(grid.apps))
        grid.new_run()
        ask(grid, arrays, [100, 101, 102])

    def two_models(grid) -> None:
        def other(node, message):
            if message.content["config"].get("fedgft.secure.stage") == "masked" and node > 100:
                message.content["arrays"] = near
            return False

        grid.lose = other
        ask(grid, arrays, list(grid.apps))

    def forged(grid) -> None:
        def edit(node, message):
            config = message.content["config"]
            if config.get("fedgft.secure.stage") == "masked" and node == 100:
                members = json.loads(config["fedgft.secure.cohort"])
                members[1]["mask"] = members[2]["mask"]
                told = {**config, "fedgft.secure.cohort": json.dumps(members)}
                message.content["config"] = ConfigRecord(told)
            return False

        grid.lose = edit
        ask(grid, arrays, list(grid.apps))

    def many_rows(grid) -> None:
        liar = client_site(made, 0, "logistic")
        tally = liar.tally
        liar.tally = lambda rows: tally(rows).map(lambda t: t + 1e11)
        grid.apps[100] = app_of(liar)
        ask(grid, arrays, list(grid.apps))

    rows = []
    right = True
    for title, before, attack in (
        ("a site misses a round: total of 4 less total of 3", "its exact counts", missing),
        ("one model, asked of 4 sites and then of 3", "its exact decisions", twice),
        ("the same in the next run", "its exact counts *", next_run),
        ("a known model for all sites but one", "its exact decisions *", two_models),
        ("a key of another client handed on", "its sums, with enough of them *", forged),
        ("one client adds 1e11 rows", "gap 97.5, accuracy 35", many_rows),
    ):
        try:
            attack(grid_of(made))
            said = "**got through**"
            right = False
        except FedgftError as error:
            said = str(error).split("; ")[0]
        rows.append([title, before, said.split(" (/")[0]])
    return rows, right


# 4. Cost of noise


def costs() -> Rows:
    rows = []
    for clients in (4, 10):
        made = biased(clients=clients, rows=20_000)
        row = [str(clients)]
        for secure in (False, True):
            budget = Budget(1.0, 1e-6, releases=4)
            ours = FedGFT(
                flower.FedAvg(**options()), lam=5.0, channel="query", secure=secure, budget=budget
            )
            ours.start(grid_of(made), start_of(made), 3, train_config=train_config())
            last = ours.history[-1]
            row += [f"{100 * last['gap_error']:.1f}", f"{last['epsilon']:.2f}"]
        rows.append(row)
    return rows


# 5. The site's file


def site_files() -> Rows:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    people = prepared_frame("adult")
    texts = ["workclass", "marital-status", "occupation", "relationship", "native-country"]
    features = people.drop("income", "race", "sex").to_dummies(texts).to_numpy()
    train = np.zeros(people.height, bool)
    train[np.random.default_rng(0).permutation(people.height)[: people.height // 2]] = True
    x = StandardScaler().fit(features[train]).transform(features)
    y = (people["income"] == ">50K").to_numpy().astype(int)
    score = LogisticRegression(max_iter=1000).fit(x[train], y[train]).predict_proba(x)[:, 1]
    exact = {}
    for name in people["occupation"].unique():
        mine = ~train & (people["occupation"] == name).to_numpy()
        sex = {"sex": people["sex"].to_numpy()[mine]}
        exact[name] = measure(
            y[mine], score[mine], site=name, classes=[0, 1], sensitive_features=sex
        )
    rows = []
    for title, least in (
        ("version 0.1: every bin", 1),
        ("`--min-bin 3`", 3),
        ("now: five people and more", 5),
        ("`--min-bin 10`", 10),
    ):
        files = [sums.to_json(min_bin=least) for sums in exact.values()]
        told = [json.loads(text)["reveals"] for text in files]
        made = audit(
            merge(SiteSums.from_json(text, source="file") for text in files), adjust_to={"sp": 0.02}
        ).to_dict()
        area = made["auc"]["1"] if "auc" in made else made["scores"]["auc"]["1"]
        few = sum(t["score_counts_below_5"] for t in told)
        every = sum(t["score_counts"] for t in told)
        found = made["adjusted"][0]
        rows.append(
            [
                title,
                f"{few:,} of {every:,}",
                *(f"{area[g]['auc']:.3f} ± {area[g]['bin_error']:.3f}" for g in ("Male", "Female")),
                f"{100 * made['metrics']['sp']['gap']:.2f}",
                f"{100 * found['gap']:.2f}, accuracy {100 * found['accuracy']:.2f}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    moved, right_1 = measured_sensitivity(args.pairs)
    epsilon, right_2 = measured_epsilon(args.draws)
    attacked, right_3 = attacks()
    page = [
        "# Privacy, measured and attacked\n",
        "Made by `python hardening/privacy.py`; tests/test_row_split.py, "
        "tests/test_privacy_loss.py and tests/test_secure_sums.py run shorter versions.\n",
        "## One row more or less\n",
        "How far the counts of training rows by label and group move (Euclidean length). The noise "
        "of the account is for 1.\n",
        table(["split", "tables", "pairs", "mean", "most"], moved),
        "## What releases show\n",
        f"A lower bound on epsilon (95% confidence) from {args.draws:,} releases of each of two "
        "neighboring tables, by the likelihood ratio of count and scores together. It must not "
        "exceed the account.\n",
        table(["releases", "accounted epsilon", "delta", "shown, at least", "verdict"], epsilon),
        "## Attacks on secure sums\n",
        "What a curious server or a lying client tries. What version 0.1 gave was tried by a "
        "review; * by reading its code.\n",
        table(["attack", "version 0.1 gave", "now"], attacked),
        "## Noise with and without secure sums\n",
        "Standard error that the noise puts on the gap, points; epsilon 1, delta 1e-6, four "
        "releases, 20,000 rows.\n",
        table(
            ["sites", "each site its own noise", "epsilon", "shares in a secure sum", "epsilon"],
            costs(),
        ),
        "## What a site's file shows\n",
        "Adult, a site for every occupation, a logistic model that does not see sex (half of the "
        "people are measured). Numbers about scores that are of fewer than five people; areas "
        "under the curve with what the file leaves open; the gap of statistical parity; and what "
        "the search for thresholds by group (at most 2 points) says it reaches.\n",
        table(["file", "of few", "AUC men", "AUC women", "gap", "adjusted gap"], site_files()),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    with atomic_write(args.out / "privacy.md") as part:
        part.write("\n".join(page).encode())
    print("\n".join(page))
    if not (right_1 and right_2 and right_3):
        sys.exit(1)


if __name__ == "__main__":
    main()
