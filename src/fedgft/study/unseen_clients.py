"""Leave one client out: train without a client, and judge the model on that client's rows.

Test rows come from the same clients as the training rows, so they say how a model does at clients
that took part. A client that joins later is another matter. Here each client in turn is that
client: all its rows, training and test rows, are taken away, the others train as they do in
`compare_methods`, and the model is judged on the rows that were taken away. Whatever a replicate
chooses or computes, such as learning rate, strength, mean and spread of the features, or a decision
rule, comes from the other clients alone.

The trainings of all clients and replicates are the runs of one batch, as replicates are. A client
without whom a group lacks the rows that a metric needs cannot be left out. A gap on the rows of a
client is estimable if two groups or more have at least 10 rows of the metric's event there; it is
the largest gap between such groups.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from fedgft.algorithms.controller import TargetMissedWarning
from fedgft.algorithms.registry import METHOD_LABELS
from fedgft.data.dataset import Federation
from fedgft.errors import FedgftError
from fedgft.formatting import DASH, Table, format_interval, format_points
from fedgft.metrics import Metric
from fedgft.metrics.intervals import FEW, floor
from fedgft.study.post_processing import RULE_METHODS, apply_rules, check_rules
from fedgft.study.protocol import empty_groups
from fedgft.study.results import Row, cell_columns, mean_of, number
from fedgft.study.study import Study
from fedgft.sums import Sums

MAX_CLIENTS = 100  # clients that are left out in turn: each takes a training of its own
NAMES = ("accuracy", "gap", "floor")


def measure_unseen_clients(
    study: Study, methods: Sequence[str], metrics: Sequence[Metric], alphas: Sequence[float]
) -> list[Row]:
    """Leave each client out in turn; return one row per cell, replicate and client.

    Parameters
    ----------
    study
        The replicates; each is trained once per client and cell.
    methods, metrics, alphas
        The cells, as for `compare_methods`.

    Returns
    -------
    list of rows
        The columns of the cell, `seed`, `client`, `rows` (of the client), `accuracy` and `gap` on
        them, `floor` (the noise floor of the gap), and `trained`: False where the other clients
        lack rows of a group. A number is None where it is not estimable.
    """
    for metric in metrics:
        check_rules(study, metric, methods)
    rows: list[Row] = []
    for alpha in alphas:
        others = _leave_out(study, metrics, alpha)
        for metric, method in product(metrics, methods):
            rows += _measure_cell(others, alpha, method, metric)
    return rows


class _LeftOutClient(NamedTuple):
    """A client: its name, its number of rows, and the position of its pair.

    The position is None where the other clients cannot be trained.
    """

    name: str
    rows: int
    pair: int | None


@dataclass(frozen=True, eq=False)
class _WithoutClient(Study):
    """A study whose replicates are pairs of a replicate and a client that is left out.

    Parameters
    ----------
    left_out
        (pair,): the federations, in which the client holds no rows and the test rows are its rows.
    every
        (replicate, client): the clients.
    replicates
        (replicate,): their seeds.
    """

    left_out: Sequence[Federation] = ()
    every: Sequence[Sequence["_LeftOutClient"]] = ()
    replicates: Sequence[int] = ()

    def deal(self, alpha: float) -> list[Federation]:
        """The federation of each pair, before its features are scaled."""
        return list(self.left_out)


def leave_out(federation: Federation, client: int) -> Federation:
    """Return the federation without a client; the test rows are all rows of that client.

    Parameters
    ----------
    federation
        The clients. Its features must not be scaled yet: the scale is that of the other clients.
    client
        The position of the client.
    """
    if federation.mean is not None and not federation.dataset.images:
        raise FedgftError("`federation` must not be standardized before a client is left out")
    own = federation.client(client)
    clients = federation.dataset.clients
    sizes = np.delete(federation.sizes, client)
    mine = np.zeros(len(federation.rows), bool)
    mine[federation.offsets[client] : federation.offsets[client + 1]] = True
    remaining = federation.rows[~mine]
    if _has_named_clients(federation) and clients is not None:
        name = int(federation.keys[client])
        own = np.union1d(own, federation.test[clients[federation.test] == name])
    return replace(
        federation,
        rows=remaining,
        offsets=np.concatenate(([0], np.cumsum(sizes))),
        test=np.sort(own),
        keys=np.delete(federation.keys, client),
    )


def _has_named_clients(federation: Federation) -> bool:
    """Whether the clients are those of the client column, and not simulated."""
    clients = federation.dataset.clients
    if clients is None or len(federation.dataset.client_names) != federation.num_clients:
        return False
    owner = np.repeat(federation.keys.astype(np.int64), federation.sizes)
    return bool((clients[federation.rows] == owner).all())


def check_number_of_clients(study: Study) -> int:
    """Return the number of clients; raise a `FedgftError` if they cannot be left out in turn."""
    named = study.kind == "column"
    clients = len(study.dataset.client_names) if named else study.clients
    if not 2 <= clients <= MAX_CLIENTS:
        text = f"needs 2 to {MAX_CLIENTS} clients, there {'is' if clients == 1 else 'are'}"
        raise FedgftError(f"{text} {clients:,}", field="leave_one_client_out", kind="data")
    study.protocol.settings.check_cohort(clients - 1)
    return clients


def _leave_out(study: Study, metrics: Sequence[Metric], alpha: float) -> _WithoutClient:
    """Return the study of all pairs of a replicate and a client that is left out."""
    clients = check_number_of_clients(study)
    dealt = study.deal(alpha)
    names = study.dataset.client_names if study.kind == "column" else ()
    left_out: list[Federation] = []
    seeds: list[int] = []
    every: list[list[_LeftOutClient]] = []
    for federation, seed in zip(dealt, study.seeds, strict=True):
        every.append([])
        for k, key in enumerate(federation.keys.tolist()):
            part = leave_out(federation, k)
            trains = len(part.rows) > 0 and not any(empty_groups(part, m) for m in metrics)
            pair = len(left_out) if trains else None
            name = names[key] if names else str(key)
            every[-1].append(_LeftOutClient(name, len(part.test), pair))
            left_out += [part] * trains
            seeds += [seed] * trains
    if not left_out:
        text = "without any one client, a group has no rows to train on"
        raise FedgftError(text, field="leave_one_client_out", kind="data")
    # Clients are measured once, when training ends.
    settings = replace(study.protocol.settings, eval_every=0)
    return _WithoutClient(
        dataset=study.dataset,
        protocol=replace(study.protocol, settings=settings),
        seeds=seeds,
        clients=clients - 1,
        kind=study.kind,
        model=study.model,
        init=study.init,
        on_progress=study.on_progress,
        checkpoints=study.checkpoints,
        left_out=left_out,
        every=every,
        replicates=study.seeds,
    )


def _measure_cell(others: _WithoutClient, alpha: float, method: str, metric: Metric) -> list[Row]:
    """Train one cell without each client; return one row per replicate and client."""
    is_rule = method in RULE_METHODS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TargetMissedWarning)
        result = others.run(alpha, "fedavg" if is_rule else method, metric)
    sums = result.test_sums
    if is_rule:
        ((_, sums),) = apply_rules(others, result, method, metric, [others.protocol.target[0]])
    accuracy = sums.accuracy()
    gaps, floors = measure_gaps(metric, sums)
    cell = cell_columns(others, alpha, method, metric)
    rows = []
    for seed, line in zip(others.replicates, others.every, strict=True):
        for client in line:
            at = client.pair
            values = (math.nan,) * 3 if at is None else (accuracy[at], gaps[at], floors[at])
            about = {"seed": seed, "client": client.name, "rows": client.rows}
            numbers = dict(zip(NAMES, map(number, values), strict=True))
            rows.append({**cell, **about, **numbers, "trained": at is not None})
    return rows


def measure_gaps(metric: Metric, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
    """Return the gaps of decisions (run,) between groups with enough rows, and the noise floors.

    A rate counts if it is taken of at least `FEW` rows. Both are NaN unless there are two such
    rates under every condition.
    """
    statistics = np.asarray(sums.statistics(metric, "hard"))
    enough = statistics[:, 1] >= FEW  # (run, v, g)
    rates = np.where(enough, metric.rates(statistics), np.nan)
    known = (enough.sum(-1) >= 2).all(-1)
    gaps = np.full(len(rates), np.nan)
    floors = np.full(len(rates), np.nan)
    for run in np.flatnonzero(known & np.isfinite(sums.accuracy())):
        gaps[run] = np.max(np.nanmax(rates[run], -1) - np.nanmin(rates[run], -1))
        groups = enough[run].all(0)
        if groups.sum() >= 2:
            floors[run] = floor(metric, statistics[run][..., groups])
    return gaps, floors


def summarize_unseen_clients(rows: Sequence[Row]) -> dict[tuple, Row]:
    """Return, for each cell, the columns that describe clients that did not take part.

    `unseen_accuracy` and `unseen_gap` are means over the clients, of accuracy and of the gap at a
    client, with the 95% interval over clients (Student's t); `unseen_gap_largest` is the largest
    gap at a client, and `unseen_floor` the mean noise floor: the mean gap at such clients of a
    perfectly fair model. All are computed in each replicate and averaged. `unseen_clients` is the
    number of clients, `unseen_not_estimable` the mean number of those whose gap is not estimable,
    and `unseen_not_trained` of those without whom no model can be trained.

    Returns
    -------
    dict
        The columns by (alpha, method, metric).
    """
    cells: dict[tuple, dict[int, list[Row]]] = {}
    for row in rows:
        cell = (row["alpha"], row["method"], row["metric"])
        cells.setdefault(cell, {}).setdefault(row["seed"], []).append(row)
    return {cell: _summarize_cell(list(found.values())) for cell, found in cells.items()}


def _summarize_cell(replicates: list[list[Row]]) -> Row:
    """Return the columns of one cell."""
    columns: dict[str, list[float]] = {}
    for rows in replicates:
        values = {n: np.array([math.nan if r[n] is None else r[n] for r in rows]) for n in NAMES}
        gap = values["gap"][np.isfinite(values["gap"])]
        found = {
            **_mean_over_clients("unseen_accuracy", values["accuracy"]),
            **_mean_over_clients("unseen_gap", gap),
            "unseen_gap_largest": gap.max() if len(gap) else math.nan,
            "unseen_floor": mean_of(values["floor"]),
            "unseen_clients": len(rows),
            "unseen_not_estimable": len(rows) - len(gap),
            "unseen_not_trained": sum(not row["trained"] for row in rows),
        }
        for name, value in found.items():
            columns.setdefault(name, []).append(math.nan if value is None else float(value))
    return {name: mean_of(np.array(each)) for name, each in columns.items()}


def _mean_over_clients(name: str, values: np.ndarray) -> dict[str, float]:
    """Return the mean of the known values and its 95% limits over clients."""
    known = values[np.isfinite(values)]
    mean = float(known.mean()) if len(known) else math.nan
    half = math.nan
    if len(known) > 1:
        from scipy.special import stdtrit  # here: only this comparison needs it

        half = float(stdtrit(len(known) - 1, 0.975) * known.std(ddof=1) / math.sqrt(len(known)))
    return {name: mean, f"{name}_low": max(mean - half, 0.0), f"{name}_high": min(mean + half, 1.0)}


def make_unseen_table(rows: Sequence[Row]) -> Table:
    """Return the table of clients that did not take part, in points, one row per cell.

    `rows` are those of `compare_methods` with the columns of `summarize_unseen_clients`.
    """
    several = len({(row["metric"], row["alpha"]) for row in rows}) > 1
    lines = []
    for row in rows:
        where = f" ({row['metric']}" + ("" if row["alpha"] is None else f", α={row['alpha']:g}")
        lines.append(
            (
                METHOD_LABELS[row["method"]] + (f"{where})" if several else ""),
                format_points(row["unseen_accuracy"]),
                format_interval(row["unseen_accuracy_low"], row["unseen_accuracy_high"]),
                format_points(row["unseen_gap"], unknown="not estimable"),
                format_interval(row["unseen_gap_low"], row["unseen_gap_high"]),
                format_points(row["unseen_floor"]),
                format_points(row["unseen_gap_largest"]),
                _count(row["unseen_not_estimable"]),
            )
        )
    header = ("method", "accuracy", "95% interval", "mean gap", "95% interval", "noise floor")
    header += ("largest gap", "not estimable")
    first = rows[0]
    notes = [
        "Each client in turn was left out of the training, and its rows judge the model. Intervals "
        "are over clients."
    ]
    if any(row["unseen_not_estimable"] for row in rows):
        notes.append(
            f"Not estimable: clients where fewer than two groups have {FEW} rows to take a rate of."
        )
    if first["unseen_not_trained"]:
        count = _count(first["unseen_not_trained"])
        notes.append(f"Without {count} of them, a group has no rows to train on.")
    clients = _count(first["unseen_clients"])
    title = f"at a client that did not take part, mean of {clients} clients, points"
    return Table(title, header, tuple(lines), 1, tuple(notes))


def _count(number: float | None) -> str:
    """Return a mean number of clients, with a decimal only if it is not a whole number."""
    return DASH if number is None else f"{number:.1f}".removesuffix(".0")
