"""Results as rows: per cell, per round, per client. Rates are fractions; None: not estimable."""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedgft.algorithms import METHODS
from fedgft.algorithms.controller import ControlReport
from fedgft.algorithms.local_control import largest_local_gap
from fedgft.algorithms.registry import METHOD_LABELS
from fedgft.data.dataset import Dataset
from fedgft.engine import predict_proba
from fedgft.formatting import format_points
from fedgft.metrics import MappedMetric, Metric, NotEstimableWarning
from fedgft.metrics.catalog import at_one_threshold
from fedgft.metrics.functions import (
    balanced_accuracy,
    constant_accuracy,
    is_collapsed,
    selection_rates,
)
from fedgft.metrics.intervals import FEW, floor, gap_interval
from fedgft.metrics.metric import Statistics
from fedgft.metrics.score_gaps import largest_gap_over_thresholds
from fedgft.settings import TARGET_TOLERANCE
from fedgft.study.study import Result, Study
from fedgft.sums import Sums
from fedgft.theory import analyze

Row = dict[str, Any]
GAP_OF = {"hard": "decisions", "soft": "scores"}
CURVES = ("accuracy", "gap_soft", "gap_hard", "gap_soft_test", "gap_hard_test")
REASONS = {
    "met": "the most accurate of the {met} that met the target on their clients' rows",
    "nearest": "none met the target on its clients' rows, and this one is nearest to it",
    "first": "the first that did not diverge, since there is no target to choose by",
}
"Why the model of a replicate is saved, in words."
ONLY_ONE = "the only one that met the target on its clients' rows"


def row(study: Study, result: Result) -> Row:
    """One cell as a row, as `fedgft compare` prints it.

    The row holds accuracy on the test rows, gaps of scores and of decisions on the clients' and on
    the test rows, the interval and the noise floor of the held-out decisions, and how the cell was
    trained.
    """
    metric = result.metric
    cell = study.describe(result)
    values = measure(metric, result.client_sums, result.test_sums)
    if study.protocol.local_target is not None:
        values["local_gap"] = measure_local_gaps(study, result)
    if metric.every_threshold:
        values["gap_all_test"] = measure_gaps_over_thresholds(study, result)
    for name, each in values.items():
        missing = int((~np.isfinite(each)).sum())
        if missing:
            text = "training diverged" if "accuracy" in name else f"{name} is not estimable"
            _warn(f"{cell}: {text} in {missing} of {len(each)} replicates")
    return {
        **cell_columns(study, result.alpha, result.method, metric),
        "seeds": len(study.seeds),
        **mean_sd(values),
        **decision_columns(
            study.dataset,
            metric,
            result.client_sums,
            result.test_sums,
            counts=result.history.count_decisions(metric),
        ),
        **marginal_columns(metric, result.client_sums, result.test_sums),
        **({"randomized": study.dataset.randomized} if metric.is_estimate else {}),
        **_heterogeneity(cell, result),
        "seconds": result.history.seconds,
        "lr": mean_of(result.lr),
        "strength": mean_of(result.strength) if METHODS[result.method].strength else None,
        "rounds": {str(n): times for n, times in _count_values(result.rounds).items()},
        **_target_columns(study, result),
        **_local_target_columns(study, result),
        "base": study.protocol.base,
        "executor": result.history.executor,
    }


def marginal_columns(metric: Metric, clients: Sums, test: Sums) -> Row:
    """For a metric within strata: gaps of decisions beside it; for others, no columns.

    `gap_marginal` and `gap_marginal_test`: the gap over all rows of each group. `gap_pooled_test`:
    the mean of the signed differences within strata, weighted as by Mantel and Haenszel, of the two
    groups that it is largest for; in it, differences of opposite sign cancel. `gap_largest_test`:
    the largest gap within one stratum.
    """
    if not isinstance(metric, MappedMetric) or not metric.within or metric.base is None:
        return {}
    pooled, largest = metric.summarize(test.statistics(metric, "hard"))
    values = {
        "gap_marginal": clients.gap(metric.base, "hard"),
        "gap_marginal_test": test.gap(metric.base, "hard"),
        "gap_pooled_test": pooled,
        "gap_largest_test": largest,
    }
    return {name: mean_of(each) for name, each in values.items()}


def cell_columns(study: Study, alpha: float, method: str, metric: Metric) -> Row:
    """The first columns of every table: which cell it is."""
    return {
        "data": study.dataset.name,
        "alpha": study.concentration(alpha),
        "method": method,
        "metric": metric.name,
        "protocol": study.protocol.name,
    }


def measure(metric: Metric, clients: Sums, test: Sums) -> dict[str, np.ndarray]:
    """Accuracy and gaps by column, from sums over the clients' and over the test rows.

    Gaps are of scores (soft) and of decisions (hard). The arrays have the leading axes of the sums.
    """
    return {
        "accuracy": test.accuracy(),
        "accuracy_federation": clients.accuracy(),
        "gap_soft": clients.gap(metric, "soft"),
        "gap_hard": clients.gap(metric, "hard"),
        "gap_soft_test": test.gap(metric, "soft"),
        "gap_hard_test": test.gap(metric, "hard"),
    }


def measure_local_gaps(study: Study, result: Result) -> np.ndarray:
    """(replicate,): the largest gap on a client's own training rows; NaN if none is estimable.

    Gaps are of decisions, or of scores if the targets apply to scores.
    """
    after = result.history.after
    assert after is not None  # studies evaluate on both kinds of rows
    return largest_local_gap(result.metric, after, study.protocol.control)


def measure_gaps_over_thresholds(study: Study, result: Result) -> np.ndarray:
    """(replicate,): the largest gap on the test rows over all thresholds of the scores."""
    gaps = []
    for i, federation in enumerate(result.federations):
        data = federation.dataset
        rows = federation.test
        if result.metric.name.startswith("eop"):
            rows = rows[data.labels[rows] == 1]
        scores = predict_proba(federation, study.model, result.history.params[i], rows)[:, 1]
        groups = data.groups[rows]
        count = len(data.group_names)
        gaps.append(largest_gap_over_thresholds(scores, groups, num_groups=count))
    return np.array(gaps)


def measure_rounds(result: Result) -> dict[str, np.ndarray]:
    """The columns `CURVES`, each (measured round, replicate)."""
    history = result.history
    assert history.federation is not None
    values = measure(result.metric, history.federation, history.test)
    return {name: values[name] for name in CURVES}


def choices(study: Study, results: Sequence[Result]) -> list[str]:
    """Texts that say what the replicates chose on inner splits; empty if there was no choice."""
    texts: dict[str, None] = {}  # an ordered set: methods share the learning rate
    for result in results:
        alpha = study.concentration(result.alpha)
        where = "" if alpha is None else f"alpha {alpha:g}: "
        if "lr" in result.chosen:
            texts[f"{where}learning rate {_describe_values(result.lr)}"] = None
        if "depth" in result.chosen:
            texts[f"{where}depth of trees {_describe_values(result.depth)}"] = None
        if "strength" in result.chosen:
            name = f"{METHODS[result.method].strength} of {result.method}, {result.metric.name}"
            texts[f"{where}{name}: {_describe_values(result.strength)}"] = None
    return list(texts)


def label_methods(methods: Sequence[str]) -> dict[str, str]:
    """The name of each method in sentences and figures.

    The controller is called FedGFT, unless the published FedGFT stands beside it.
    """
    names = {method: METHOD_LABELS.get(method, method) for method in methods}
    if "fedgft-control" in names and "fedgft" not in names:
        names["fedgft-control"] = METHOD_LABELS["fedgft"]
    return names


def state_finding(fedavg: Row, row: Row, *, methods: Sequence[str] = ()) -> str:
    """One sentence: what a method does to FedAvg's gap on test rows, and what it costs.

    Parameters
    ----------
    fedavg, row
        The rows of FedAvg and of the method, of the same cell.
    methods
        The methods that are shown beside them, see `label_methods`.

    Returns
    -------
    Such as "FedGFT cuts the gap from 18.5 to 1.7 points for 0.6 points of accuracy".
    """
    name = label_methods([*methods, row["method"]])[row["method"]]
    before = fedavg["gap_hard_test"]
    after = row["gap_hard_test"]
    if before is None or after is None:
        return f"{name}: the gap is not estimable"
    if row["method"] == "fedavg":
        return f"{name}: gap {format_points(after)} points"
    gaps = f"from {format_points(before)} to {format_points(after)} points"
    verb = "cuts" if after < before else "does not cut"
    if format_points(before) == format_points(after):
        return f"{name} leaves the gap at {format_points(after)} points"
    if verb == "does not cut":
        return f"{name} does not cut the gap: {gaps}"
    return f"{name} cuts the gap {gaps} {_describe_cost(fedavg, row)}".rstrip()


def _describe_cost(fedavg: Row, row: Row) -> str:
    """What the method costs in accuracy on test rows; empty where that is not known."""
    if fedavg["accuracy"] is None or row["accuracy"] is None:
        return ""
    before, after = (round(100 * each["accuracy"], 1) for each in (fedavg, row))  # as shown
    loss = (before - after) / 100
    size = format_points(abs(loss))
    if size == "0.0":
        return "at the same accuracy"
    return f"for {size} points of accuracy" if loss > 0 else f"and gains {size} points of accuracy"


def round_rows(study: Study, result: Result) -> list[Row]:
    """One row per measured round and replicate.

    `round` counts the replicate's own rounds: a replicate that was trained for more rounds than
    others has measurements that are farther apart.
    """
    cell = cell_columns(study, result.alpha, result.method, result.metric)
    curves = measure_rounds(result)
    return [
        {
            **cell,
            "seed": seed,
            "round": after * int(result.stretch[i]),
            **{name: number(values[e, i]) for name, values in curves.items()},
        }
        for e, after in enumerate(result.history.rounds.tolist())
        for i, seed in enumerate(study.seeds)
    ]


def client_rows(
    study: Study, result: Result, *, replicate: int = 0, fedavg: Result | None = None
) -> list[Row]:
    """One row per client of one replicate: its size, accuracy and gap, beside those with FedAvg.

    Gaps are of decisions. The contributions of all clients add up to the gap; a client that widens
    the gap has a positive one.

    Parameters
    ----------
    study, result
        The replicates, and a method that was trained on them.
    replicate
        The position of the replicate.
    fedavg
        FedAvg on the same replicates. None: the columns of FedAvg are None.
    """
    metric = result.metric
    assert result.history.after is not None
    after = result.history.after[replicate]
    names = study.dataset.client_names if study.kind == "column" else ()
    analysis = analyze(at_one_threshold(metric), after, "hard")
    side = -1.0 if analysis.signed_gap < 0 else 1.0
    plain = after.map(lambda array: np.full_like(array, np.nan))
    if fedavg is not None:
        assert fedavg.history.after is not None
        plain = fedavg.history.after[replicate]
    columns = {
        "accuracy_fedavg": plain.accuracy(),
        "accuracy": after.accuracy(),
        "gap_hard_fedavg": plain.gap(metric, "hard"),
        "gap_hard": after.gap(metric, "hard"),
        "contribution": side * analysis.weights * analysis.contributions,
    }
    # Columns are converted as a whole: there may be a million clients.
    keys = result.federations[replicate].keys.tolist()
    table: dict[str, Any] = {
        "client": [names[key] if names else str(key) for key in keys],
        "rows": result.federations[replicate].sizes.tolist(),
        **{name: map(number, column.tolist()) for name, column in columns.items()},
    }
    return [dict(zip(table, line, strict=True)) for line in zip(*table.values(), strict=True)]


def decision_columns(
    data: Dataset, metric: Metric, federation: Sums, test: Sums, *, counts: Statistics | None = None
) -> Row:
    """The numbers behind accuracy and gap of decisions. Sums are (replicate, ...).

    `counts`: what intervals and the noise floor are computed from, see `History.count_decisions`;
    None: the sums over the test rows.

    `gap_hard_test_low` and `_high`: the 95% interval, averaged over replicates; None where every
    replicate has fewer than ten rows in some group. `fewest_rows`: the fewest rows behind a rate.
    `floor`: the noise floor, the mean gap that a perfectly fair model would show.
    `accuracy_constant`: of always predicting the most frequent class. `selection_rates`: by group,
    the share of its rows that is given the positive class (of more than two classes: each class).
    `collapsed`: replicates that give nearly all rows the same class, on the clients' rows.
    `widest`: the groups behind the gap, the one with the higher rate first.
    """
    decisions = test.statistics(metric, "hard") if counts is None else counts
    low, high = gap_interval(metric, decisions, fewest=FEW)
    columns: Row = {
        "gap_hard_test_low": mean_of(low),
        "gap_hard_test_high": mean_of(high),
        "fewest_rows": number(float(decisions[..., 1, :, :].min())),
        "floor": mean_of(floor(metric, decisions)),
        "accuracy_constant": mean_of(constant_accuracy(test)),
        **mean_sd({"balanced_accuracy": balanced_accuracy(test)}),
    }
    for suffix, sums in (("", test), ("_federation", federation)):
        columns["selection_rates" + suffix] = _selection_rates(data, sums)
        columns["widest" + suffix] = _widest_groups(data, metric, sums)
    return columns | {"collapsed": int(is_collapsed(federation).sum())}


def _selection_rates(data: Dataset, sums: Sums) -> Row:
    """By group: the share given the positive one of two classes, or else the share by class."""
    rates = selection_rates(sums.by_group())
    by_group: Row = {}
    for g, group in enumerate(data.group_names):
        each = {name: mean_of(rates[:, g, c]) for c, name in enumerate(data.classes)}
        by_group[group] = each[data.classes[1]] if len(data.classes) == 2 else each
    return by_group


def _widest_groups(data: Dataset, metric: Metric, sums: Sums) -> Row | None:
    """The condition and pair of groups that most often have the widest gap; None: not estimable."""
    decisions = sums.statistics(metric, "hard")
    known = decisions[np.isfinite(metric.readout(decisions))]
    if not len(known):
        return None
    pair = metric.worst(known)
    each = zip(pair.condition.tolist(), pair.high.tolist(), pair.low.tolist(), strict=True)
    (condition, high, low), times = Counter(each).most_common(1)[0]
    return {
        "high": data.group_names[high],
        "low": data.group_names[low],
        "condition": metric.condition_names(data.classes)[condition],
        "replicates": times,
    }


def _heterogeneity(cell: str, result: Result) -> dict[str, float | None]:
    """DH and TV between the groups, averaged over replicates: how different the clients are.

    DH is None where it is infinite (a client lacks a group; TV is finite there) and where the
    metric is not proper; TV is defined for any.
    """
    after = result.history.after
    metric = result.metric
    if after is None or metric.is_estimate:  # a client's own estimates may be negative
        return {"heterogeneity": None, "total_variation": None}
    each = [analyze(at_one_threshold(metric), after[i], "soft") for i in range(len(after.count))]
    variation = number(np.mean([found.total_variation for found in each]))
    if not metric.proper(after.count.shape[-2]):
        return {"heterogeneity": None, "total_variation": variation}
    values = [found.heterogeneity for found in each]
    if infinite := sum(map(math.isinf, values)):
        text = f"{cell}: heterogeneity is infinite in {infinite} of {len(each)} replicates"
        _warn(f"{text}: a client has no row of a group")
    return {"heterogeneity": number(np.mean(values)), "total_variation": variation}


@dataclass(frozen=True)
class Choice:
    """The replicate whose model is saved, and why; `met`: replicates that met the target."""

    replicate: int
    why: Literal["met", "nearest", "first"]
    met: int
    collapsed: bool

    @property
    def reason(self) -> str:
        """A text that says why this replicate was chosen."""
        if self.why == "met" and self.met == 1:
            return ONLY_ONE
        return REASONS[self.why].format(met=self.met)


def choose_replicate(study: Study, result: Result) -> Choice:
    """The replicate whose model is saved.

    It is the most accurate of the replicates that met the target, both measured on the clients'
    rows. If none met it, it is the replicate whose gap is nearest to the target; a collapsed one is
    chosen only if all have collapsed. Without a target, it is the first that did not diverge.
    """
    accuracy = result.client_sums.accuracy()
    lost = is_collapsed(result.client_sums)
    if not result.has_target:
        at = int(np.argmax(np.isfinite(accuracy)))
        return Choice(at, "first", 0, bool(lost[at]))
    gap, within = _compare_with_target(study, result)
    gap = gap + _local_excess(study, result)
    met = within & ~lost
    if met.any():
        at = int(np.argmax(np.where(met, accuracy, -np.inf)))
        return Choice(at, "met", int(met.sum()), False)
    at = int(np.argmin(np.where(np.isfinite(gap), gap, np.inf) + np.where(lost, 1.0, 0.0)))
    return Choice(at, "nearest", 0, bool(lost[at]))


def _compare_with_target(study: Study, result: Result) -> tuple[np.ndarray, np.ndarray]:
    """(replicate,) each: the gap on the clients' rows, and whether it is within the target.

    A gap counts as within the target if it exceeds it by at most 0.3 points, the resolution of
    decisions on a few thousand rows. With a local target, the largest local gap must be within
    that one, too.
    """
    gap = result.client_sums.gap(result.metric, study.protocol.control)
    return gap, (gap <= result.strength + TARGET_TOLERANCE) & (_local_excess(study, result) <= 0)


def _local_excess(study: Study, result: Result) -> np.ndarray:
    """(replicate,): how far the largest local gap is above its target; 0 where it is within."""
    target = study.protocol.local_target
    if target is None:
        return np.zeros(len(result.strength))
    return np.fmax(measure_local_gaps(study, result) - target - TARGET_TOLERANCE, 0.0)


def describe_training(study: Study, result: Result, replicate: int) -> Row:
    """How one replicate was trained, and its accuracy and gap on the clients' and the test rows.

    Gaps are those of decisions, or of scores if the target applies to scores. Only a gap of
    decisions has an interval, `gap_test_low` to `gap_test_high`. `out_of_fold`: the clients' rows
    were decided by models that have not seen them.
    """
    sums = result.client_sums[replicate]
    test = result.test_sums[replicate]
    kind = study.protocol.control if result.has_target else "hard"
    gap = float(sums.gap(result.metric, kind))
    target = float(result.strength[replicate]) if result.has_target else None
    low = high = None
    if kind == "hard":
        counts = result.history.count_decisions(result.metric, replicate)
        low, high = (number(end) for end in gap_interval(result.metric, counts, fewest=FEW))
    local: Row = {}
    is_reached = target is not None and gap <= target + TARGET_TOLERANCE
    if study.protocol.local_target is not None and result.has_target:
        local_gap = number(measure_local_gaps(study, result)[replicate])
        local = {"local_target": study.protocol.local_target, "local_gap": local_gap}
        is_reached &= bool(_local_excess(study, result)[replicate] <= 0)
    return {
        "seed": int(study.seeds[replicate]),
        "rounds": int(result.rounds[replicate]),
        "lr": float(result.lr[replicate]),
        "target": target,
        **local,
        "gap_of": GAP_OF[kind],
        "gap": number(gap),
        "gap_test": number(test.gap(result.metric, kind)),
        "gap_test_low": low,
        "gap_test_high": high,
        "reached": None if target is None else bool(is_reached),
        "collapsed": bool(is_collapsed(sums)),
        "accuracy": number(sums.accuracy()),
        "accuracy_test": number(test.accuracy()),
        "out_of_fold": study.is_out_of_fold,
    }


def _target_columns(study: Study, result: Result) -> Row:
    """The target and how many replicates reached it on the clients' rows, collapsed ones included.

    All are None for a method without a target.
    """
    if not result.has_target:
        names = ("target", "target_of", "reached", "reached_collapsed", "missed_because")
        return dict.fromkeys(names)
    _, within = _compare_with_target(study, result)
    missed = np.flatnonzero(~within)
    control = result.history.control if len(missed) else None
    return {
        "target": mean_of(result.strength),
        "target_of": GAP_OF[study.protocol.control],
        "reached": int(within.sum()),
        "reached_collapsed": int((within & is_collapsed(result.client_sums)).sum()),
        "missed_because": None if control is None else _explain_miss(study, control, missed),
    }


def _local_target_columns(study: Study, result: Result) -> Row:
    """The local target of a method that has one, None for others; no column without one."""
    target = study.protocol.local_target
    return {} if target is None else {"local_target": target if result.has_target else None}


def _explain_miss(study: Study, control: ControlReport, missed: np.ndarray) -> str:
    """Why the first of the replicates that missed the target has missed it."""
    first = int(missed[0])
    text = control.reason(first, remedy=False)
    if len(study.seeds) == 1:
        return text
    return f"In the replicate of seed {study.seeds[first]}, {text[0].lower()}{text[1:]}"


def _warn(text: str) -> None:
    warnings.warn(text, NotEstimableWarning, stacklevel=4)


def mean_sd(columns: dict[str, np.ndarray]) -> dict[str, float | None]:
    """Two fields per column: mean and standard deviation over the replicates that have a value."""
    fields: dict[str, float | None] = {}
    for name, values in columns.items():
        known = values[np.isfinite(values)]
        fields[name] = mean_of(values)
        fields[f"{name}_sd"] = float(known.std(ddof=1)) if len(known) > 1 else None
    return fields


def mean_of(values: np.ndarray) -> float | None:
    """The mean of the finite values; None if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def number(value: Any) -> float | None:
    """The value as a number that JSON can represent; None for NaN and infinity."""
    return float(value) if math.isfinite(value) else None


def _count_values(values: np.ndarray) -> dict[Any, int]:
    """How often each value occurs, the smallest value first."""
    return dict(sorted(Counter(values.tolist()).items()))


def _describe_values(values: np.ndarray) -> str:
    counts = _count_values(values)
    if len(counts) == 1:
        return f"{values[0]:g}"
    return ", ".join(f"{value:g} ({times} of {len(values)})" for value, times in counts.items())
