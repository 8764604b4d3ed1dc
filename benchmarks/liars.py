"""One client that lies about its people: how unfair the model becomes, with and without limits.

    python benchmarks/liars.py --out results [--only lies|honest] [--seeds 20]

Adult between ten clients, FedGFT with target 0, channel query, 20 rounds, through the real Flower
strategy in one process; clients train in NumPy, which is faster than a torch model a message. One
client lies in its sums from the first round on and trains as the others do. The truth is measured
on all clients' real rows, the liar's included. Writes liars.md.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the in-process engine

import fedgft  # noqa: E402
from fedgft.algorithms import Cohort, fedgft_control  # noqa: E402
from fedgft.data.generated import synthetic  # noqa: E402
from fedgft.engine import Settings, predict_proba, simulate  # noqa: E402
from fedgft.engine.plan import derive_seeds, draw_batches, learning_rate  # noqa: E402
from fedgft.flower import FedGFT, MeasuredStrategy  # noqa: E402
from fedgft.flower.client import first_arrays, flatten_arrays  # noqa: E402
from fedgft.flower.messages import pack_sums, read_price, read_request  # noqa: E402
from fedgft.metrics import get_metric  # noqa: E402
from fedgft.metrics.robust_aggregation import SiteLimits, limit_sites, size_limit  # noqa: E402
from fedgft.sums import CategoryNames, Sums, stack  # noqa: E402
from in_process_grid import InProcessGrid, options  # noqa: E402

SP = get_metric("sp")
ROUNDS = 20
CLIENTS = 10
LR = 0.01
BATCH = 256
Lie = Callable[[Sums], tuple[Sums, float]]  # a site's true sums -> those it sends, and its rows


class NumpySite:
    """A client of a logistic model: one epoch of Adam a round, and sums of the model it is sent."""

    def __init__(self, made: Any, client: int, lie: Lie | None = None) -> None:
        data = made.dataset
        rows = made.client(client)
        self.x = made.scale_rows(rows).astype(np.float32)
        self.y = data.labels[rows]
        self.a = data.groups[rows]
        self.names = CategoryNames.of(data.classes, data.group_names)
        self.name = f"site-{client}"
        self.key = int(made.keys[client])
        self.lie = lie

    def __call__(self, message: Message, context: Any) -> Message:
        arrays = message.content["arrays"]
        weight, bias = (arrays[name].numpy() for name in ("weight", "bias"))
        if message.metadata.message_type.startswith("query"):
            sums = self.tally(weight, bias)
            sums = sums if self.lie is None else self.lie(sums)[0]
            record = pack_sums(sums, self.names, site=self.name)
            return Message(RecordDict({"fedgft": record}), reply_to=message)
        request = read_request(message)
        price = read_price(request, self.names, site=self.name).astype(np.float32)
        weight, bias = self.fit(weight, bias, price, message.content["config"])
        rows = float(len(self.y)) if self.lie is None else self.lie(self.tally(weight, bias))[1]
        content = RecordDict(
            {
                "arrays": ArrayRecord({"weight": Array(weight), "bias": Array(bias)}),
                "metrics": MetricRecord({"num-examples": rows}),
            }
        )
        return Message(content, reply_to=message)

    def tally(self, weight: np.ndarray, bias: np.ndarray) -> Sums:
        probs = _softmax((self.x @ weight.T + bias).astype(np.float64))
        return Sums.of(probs, self.y, self.a, num_groups=len(self.names.groups))

    def fit(self, weight: Any, bias: Any, price: np.ndarray, config: Any) -> Any:
        """One epoch of Adam on cross-entropy and the server's prices."""
        theta = np.concatenate((weight, bias[:, None]), 1)
        first = np.zeros_like(theta)
        second = np.zeros_like(theta)
        number = int(config["server-round"])
        lr = float(learning_rate(np.float64(LR), "cosine", round=number - 1, rounds=ROUNDS))
        seed = derive_seeds(derive_seeds(int(config["seed"]), self.key), number, 0)
        drawn = draw_batches(np.arange(len(self.y)), seed=int(seed), batch_size=BATCH)
        for step, at in enumerate(drawn, 1):
            x = self.x[at]
            y = self.y[at]
            probs = _softmax(x @ theta[:, :-1].T + theta[:, -1])
            dear = price[y, self.a[at]]
            slope = probs * (1 + dear - (dear * probs).sum(1, keepdims=True))
            slope[np.arange(len(y)), y] -= 1.0
            slope = slope / len(y)
            gradient = np.concatenate((slope.T @ x, slope.sum(0)[:, None]), 1)
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            change = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
            theta = (theta - lr * change).astype(np.float32)
        return theta[:, :-1].copy(), theta[:, -1].copy()


class DirectGrid(InProcessGrid):
    """The in-process engine without copies of messages: these sites change none."""

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        return [
            self.apps[m.metadata.dst_node_id](m, self.contexts[m.metadata.dst_node_id])
            for m in messages
        ]


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def federation(data: Any, alpha: float, seed: int = 0) -> Any:
    return fedgft.standardize(fedgft.partition(data, clients=CLIENTS, alpha=alpha, seed=seed))


def run(
    made: Any,
    *,
    limits: SiteLimits | None,
    seed: int = 0,
    liar: int = -1,
    lie: Lie | None = None,
    steer: bool = True,
    counts: Any = None,
) -> dict[str, Any]:
    """One run; gaps and accuracy of the model that is handed over, and what the server reports."""
    sites = [NumpySite(made, k, lie if k == liar else None) for k in range(made.num_clients)]
    data = made.dataset
    start = first_arrays("logistic", features=data.features.shape[1], classes=2, seed=seed)
    how = {"channel": "query", "limits": limits, "counts": counts}
    inner = flower.FedAvg(**options())
    strategy = FedGFT(inner, SP, target=0.0, **how) if steer else MeasuredStrategy(inner, SP, **how)
    heard = _Warnings()
    log = logging.getLogger("flwr")
    log.addHandler(heard)
    told = ConfigRecord({"seed": seed})
    try:
        result = strategy.start(DirectGrid(sites), start, ROUNDS, train_config=told)
    finally:
        log.removeHandler(heard)
    params = flatten_arrays(result.arrays)
    truth, unseen = (_sums(made, params, rows) for rows in (made.rows, made.test))
    row = strategy.measured or {}
    return {
        "gap": 100 * float(truth.gap(SP, "hard")),
        "accuracy": 100 * float(truth.accuracy()),
        "gap_unseen": 100 * float(unseen.gap(SP, "hard")),
        "accuracy_unseen": 100 * float(unseen.accuracy()),
        "reported": 100 * (row.get("gap_hard") or float("nan")),
        "touched": heard.texts,
        "row": row,
        "params": params,
    }


class _Warnings(logging.Handler):
    """What the strategy warns of; a limit that acts is always named."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("fedgft: "):
            self.texts.append(record.getMessage())


def _sums(made: Any, params: np.ndarray, rows: np.ndarray) -> Sums:
    data = made.dataset
    probs = predict_proba(made, "logistic", params, rows)
    return Sums.of(probs, data.labels[rows], data.groups[rows], num_groups=len(data.group_names))


# Lies: a site's true sums -> the sums that it sends, and the rows that it says it trains on


def _filled(count: np.ndarray, accepted: int) -> Sums:
    """Everybody of the group `accepted` is accepted and of every other group refused."""
    table = np.zeros((*count.shape, 2))
    table[..., 0] = count
    table[:, accepted] = table[:, accepted, ::-1]
    return Sums(count, table, table)


def _with(count: np.ndarray, accepted: int) -> tuple[Sums, float]:
    return _filled(count, accepted), float(count.sum())


def reversed_rates(true: Sums) -> tuple[Sums, float]:
    return _with(true.count, MINORITY)


def all_minority_true_labels(true: Sums) -> tuple[Sums, float]:
    count = np.zeros_like(true.count)
    count[:, MINORITY] = true.count.sum(1)
    return _with(count, MINORITY)


def all_minority_label_1(true: Sums) -> tuple[Sums, float]:
    return _with(_cell(true, {(1, MINORITY): 1.0}), MINORITY)


def many_rows(true: Sums) -> tuple[Sums, float]:
    return _with(np.round(true.count * 1e11 / true.rows()), MINORITY)


def many_examples(true: Sums) -> tuple[Sums, float]:
    return true, 1e12


def _cell(true: Sums, shares: dict[tuple[int, int], float], times: float = 1.0) -> np.ndarray:
    count = np.zeros_like(true.count)
    for cell, share in shares.items():
        count[cell] = round(float(true.rows()) * times * share)
    return count


class Stale:
    """Its sums of the first model, for ever."""

    def __init__(self) -> None:
        self.kept: Sums | None = None

    def __call__(self, true: Sums) -> tuple[Sums, float]:
        self.kept = true if self.kept is None else self.kept
        return self.kept, float(true.rows())


class Changing:
    """Honest until the fifth question, then "all my rows are minority, all accepted"."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, true: Sums) -> tuple[Sums, float]:
        self.asked += 1
        return (true, float(true.rows())) if self.asked < 10 else all_minority_true_labels(true)


def impossible(true: Sums) -> tuple[Sums, float]:
    return true.map(lambda table: table * float("nan")), float(true.rows())


MINORITY = 0
LIES: dict[str, Callable[[], Lie]] = {
    "not a number": lambda: impossible,
    "its sums of the first model, for ever": Stale,
    "honest at first, then all minority, all accepted": Changing,
    "true counts: minority all accepted, majority refused": lambda: reversed_rates,
    "all its rows are minority, all accepted": lambda: all_minority_true_labels,
    "all its rows are minority with label 1, all accepted": lambda: all_minority_label_1,
    "1e11 rows": lambda: many_rows,
    "num-examples 1e12": lambda: many_examples,
}


class Adaptive:
    """Knows the limits and all other sites' sums: declares the counts, and says that everybody of
    one group is accepted and nobody of the other, that move what is believed the farthest from the
    truth, of some hundred tried. Rates beyond the limits are cut to them: these are the worst
    accepted ones. With `agreed` counts it has the rates alone."""

    def __init__(
        self,
        made: Any,
        liar: int,
        params: np.ndarray,
        limits: SiteLimits | None,
        agreed: bool = False,
    ) -> None:
        sites = [NumpySite(made, k) for k in range(made.num_clients)]
        width = made.dataset.features.shape[1]
        weight = params[: 2 * width].reshape(2, width)
        bias = params[2 * width :]
        self.sums = [site.tally(weight, bias) for site in sites]
        self.liar = liar
        self.limits = limits
        self.agreed = agreed
        self.count, self.accepted, self.shift = self._worst()

    def __call__(self, true: Sums) -> tuple[Sums, float]:
        return _with(self.count, self.accepted)

    def _worst(self) -> tuple[np.ndarray, int, float]:
        own = self.sums[self.liar]
        true = _difference(sum(self.sums[1:], start=self.sums[0]))
        found = (own.count, 0, 0.0)
        for accepted in (0, 1):
            for count in self._counts(accepted):
                lie = _filled(count, accepted)
                moved = _difference(self._believed(lie)) - true
                if abs(moved) > abs(found[2]):
                    found = (count, accepted, moved)
        return found

    def _counts(self, accepted: int) -> list[np.ndarray]:
        own = self.sums[self.liar]
        if self.agreed:
            return [own.count]
        out = [own.count]
        rows = [float(t.rows()) for k, t in enumerate(self.sums) if k != self.liar]
        most = 1e9 if self.limits is None else size_limit([*rows, 1e12], self.limits)
        for times in (1.0, most / float(own.rows())):
            for part in (0.0, 0.25, 0.5, 0.75, 1.0):
                lie = _cell(own, {(1, accepted): part, (0, 1 - accepted): 1 - part}, times)
                for honest in (0.0, 0.5, 0.8):
                    out.append(np.round(honest * own.count * times + (1 - honest) * lie))
        return out

    def _believed(self, lie: Sums) -> Sums:
        tallies = [lie if k == self.liar else t for k, t in enumerate(self.sums)]
        if self.limits is not None:
            agreed = [self.agreed] * len(tallies)
            held = limit_sites(
                tallies, SP, ("hard", "soft"), self.limits, agreed=agreed, leverage=False
            )
            tallies = held.sums
        return sum(tallies[1:], start=tallies[0])


def _difference(total: Sums) -> float:
    rates = SP.rates(total.statistics(SP, "hard"))[0]
    return float(rates[0] - rates[1])


# The page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", choices=("lies", "honest"), default=None)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="the gravest lies only")
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    for handler in logging.getLogger("flwr").handlers:
        handler.setLevel(logging.ERROR)
    parts = {"lies": lambda: lies(args.quick), "honest": lambda: honest(args.seeds)}
    lines = ["# One client that lies", "", "Made by `python benchmarks/liars.py`.", ""]
    for name, part in parts.items():
        if args.only in (None, name):
            began = time.perf_counter()
            made = part()
            made.append(f"\n({time.perf_counter() - began:.0f} s)")
            print("\n".join(made), flush=True)
            lines += [*made, ""]
    if args.out is not None:
        (args.out / "liars.md").write_text("\n".join(lines), "utf-8")


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    form = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    return [form(header), form(["---"] * len(header)), *map(form, rows)]


STRICT = SiteLimits(influence_most=0.06)
WAYS: dict[str, SiteLimits | None] = {
    "no limits": None,
    "limits": SiteLimits(),
    "limits, 6 points at most": STRICT,
    "limits, counts agreed on": SiteLimits(),
}
ADAPTIVE = "adaptive: knows the limits and all sites' sums"
GRAVE = [
    "true counts: minority all accepted, majority refused",
    "all its rows are minority, all accepted",
    ADAPTIVE,
]


def lies(quick: bool) -> list[str]:
    """The true gap after 20 rounds, by lie, liar and defense."""
    data = fedgft.load("adult")
    out = [
        "## What one liar of ten does",
        "",
        "Adult, ten clients, target 0, channel query, 20 rounds, seed 0. True gap of decisions on "
        "all clients' rows (and the gap that the server reports), in points; accuracy where it "
        "falls by more than a point.",
        "",
    ]
    for alpha, liars in ((100.0, (0,)), (0.5, (3, 0, 6) if quick else (0, 6, 8, 3))):
        made = federation(data, alpha)
        shares = made.sizes / made.sizes.sum()
        free = run(made, limits=None, steer=False)
        fair = run(made, limits=SiteLimits())
        out += [
            f"### alpha {alpha:g}",
            "",
            f"FedAvg: {free['gap']:.1f} (accuracy {free['accuracy']:.1f}). Honest, with limits: "
            f"{fair['gap']:.1f} (accuracy {fair['accuracy']:.1f}).",
            "",
        ]
        worst = dict.fromkeys(WAYS, 0.0)
        for liar in liars:
            rows = []
            names = GRAVE if quick or alpha < 100 else [*LIES, ADAPTIVE]
            for name in names[1:] if quick else names:
                rows.append([name, *_cells(made, liar, name, fair, worst)])
                print(alpha, liar, rows[-1], file=sys.stderr, flush=True)
            leverage = 100 * fair["row"]["leverage"][f"site-{liar}"]
            out += [
                f"The liar has {shares[liar]:.1%} of the rows; at the end of an honest run its "
                f"leverage is {leverage:.1f} points.",
                "",
                *table(["lie", *WAYS], rows),
                "",
            ]
        said = ", ".join(f"{way}: {gap:.1f}" for way, gap in worst.items())
        out += [f"Worst of alpha {alpha:g}: {said}; honest: {fair['gap']:.1f}.", ""]
    return out


def _cells(
    made: Any, liar: int, name: str, fair: dict[str, Any], worst: dict[str, float]
) -> list[str]:
    cells = []
    for way, limits in WAYS.items():
        agreed = way == "limits, counts agreed on"
        if (agreed and name != ADAPTIVE) or (limits is STRICT and name != ADAPTIVE):
            cells.append("")
            continue
        if name == ADAPTIVE:
            lie: Lie = Adaptive(made, liar, fair["params"], limits, agreed=agreed)
        else:
            lie = LIES[name]()
        counts = _counts(made) if agreed else None
        found = run(made, limits=limits, liar=liar, lie=lie, counts=counts)
        worst[way] = max(worst[way], found["gap"])
        cell = f"{found['gap']:.1f} ({found['reported']:.1f})"
        if found["accuracy"] < fair["accuracy"] - 1:
            cell += f", accuracy {found['accuracy']:.1f}"
        cells.append(cell)
    return cells


def _counts(made: Any) -> dict[str, np.ndarray]:
    """Every site's true rows by label and group."""
    data = made.dataset
    out = {}
    for k in range(made.num_clients):
        rows = made.client(k)
        count = np.zeros((2, len(data.group_names) + 1))
        np.add.at(count, (data.labels[rows], data.groups[rows]), 1.0)
        out[f"site-{k}"] = count
    return out


class Limited:
    """The simulator's controller, fed with every site's sums within the limits."""

    def __init__(self, inner: Any, limits: SiteLimits) -> None:
        self.inner = inner
        self.limits = limits
        self.metric = inner.metric
        self.touched: set[int] = set()  # runs
        self.last: Any = None

    def update(self, state: Any, cohort: Any, received: Sums) -> Any:
        return self.inner.update(state, *self._held(cohort, received))

    def excess(self, cohort: Any, received: Sums) -> Any:
        return self.inner.excess(*self._held(cohort, received))

    def _held(self, cohort: Any, received: Sums) -> tuple[Cohort, Sums]:
        """One unit a run, which stands for all of its sites."""
        if self.last is not None and self.last[0] is received:  # asked twice a round
            return self.last[1]
        runs = len(cohort.bounds) - 1
        totals = []
        for r in range(runs):
            sites = [received[i] for i in range(cohort.bounds[r], cohort.bounds[r + 1])]
            held = limit_sites(sites, SP, ("hard", "soft"), self.limits, leverage=False)
            if any(held.why):
                self.touched.add(r)
            totals.append(sum(held.sums[1:], start=held.sums[0]))
        one = np.arange(runs)
        whole = Cohort(one, np.zeros(runs, int), np.ones(runs), np.arange(runs + 1), full=True)
        self.last = received, (whole, stack(totals))
        return self.last[1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def honest(seeds: int) -> list[str]:
    """What the limits cost where everybody is honest; in the simulator, all seeds at once."""
    rows = []
    sets = {
        "Adult": fedgft.load("adult"),
        "COMPAS": fedgft.load("compas"),
        "synthetic": synthetic(rows=6000, gap=0.4),
    }
    for alpha in (0.5, 100.0):
        for name, data in sets.items():
            rows.append(_honest_row(name, data, alpha, seeds))
            print(rows[-1], file=sys.stderr, flush=True)
    header = ["data", "alpha"]
    for way in ("limits", "6 points at most"):
        header += [f"{way}: touched", "gap", "accuracy", "gap, held-out rows"]
    said = (
        f"Ten honest clients, {seeds} seeds, target 0, 20 rounds, in the simulator with the same "
        "limits on the sums; means on the clients' rows without limits and the change that the "
        "limits make, in points; touched: federations where a limit acted in any round."
    )
    return ["## What the limits cost honest federations", "", said, "", *table(header, rows)]


def _honest_row(name: str, data: Any, alpha: float, seeds: int) -> list[str]:
    made = [federation(data, alpha, seed) for seed in range(seeds)]
    free, _ = _simulated(made, None)
    cells = [name, f"{alpha:g}"]
    for limits in (SiteLimits(), STRICT):
        held, touched = _simulated(made, limits)
        cells.append(f"{touched} of {seeds}")
        for key in ("gap", "accuracy"):
            cells.append(f"{free[key].mean():.2f} {(held[key] - free[key]).mean():+.2f}")
        cells.append(f"{(held['gap_unseen'] - free['gap_unseen']).mean():+.2f}")
    return cells


def _simulated(made: list[Any], limits: SiteLimits | None) -> tuple[dict[str, np.ndarray], int]:
    method = fedgft_control(SP, 0.0)
    watched = None
    if limits is not None:
        watched = Limited(method.objective.penalties[0], limits)
        method = replace(method, objective=replace(method.objective, penalties=(watched,)))
    batch = min(BATCH, max(16, int(made[0].offsets[-1]) // CLIENTS // 13))  # steps as on Adult
    settings = Settings(rounds=ROUNDS, batch_size=batch, schedule="cosine", eval_every=0, threads=1)
    seeds = list(range(len(made)))
    done = simulate(made, "logistic", method, settings, seeds=seeds, lr=LR)
    found: dict[str, list[float]] = {"gap": [], "accuracy": [], "gap_unseen": []}
    for one, params in zip(made, done.params, strict=True):
        seen, unseen = (_sums(one, params, rows) for rows in (one.rows, one.test))
        found["gap"].append(100 * float(seen.gap(SP, "hard")))
        found["accuracy"].append(100 * float(seen.accuracy()))
        found["gap_unseen"].append(100 * float(unseen.gap(SP, "hard")))
    touched = 0 if watched is None else len(watched.touched)
    return {key: np.array(values) for key, values in found.items()}, touched


if __name__ == "__main__":
    main()
