"""Results as rows: per cell, per round, per client. Rates are fractions; None: not estimable."""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedgft.algorithms import METHODS
from fedgft.algorithms.controller import TARGET_TOLERANCE
from fedgft.data.dataset import Dataset
from fedgft.metrics import Metric, NotEstimableWarning
from fedgft.metrics.decisions import (
    balanced_accuracy,
    condition_names,
    constant_accuracy,
    is_collapsed,
    selection_rates,
)
from fedgft.metrics.intervals import FEW, floor, gap_interval
from fedgft.study.study import Result, Study
from fedgft.sums import Sums
from fedgft.theory import analyze

Row = dict[str, Any]
GAP_OF = {"hard": "decisions", "soft": "scores"}


def row(study: Study, result: Result) -> Row:
    """One cell as a row, as `fedgft compare` prints it.

    Accuracy on the test rows, gaps of scores and of decisions on the clients' and on the test rows,
    the interval and the noise floor of the held-out decisions, and how the cell was trained.
    """
    history = result.history
    metric = result.metric
    assert history.federation is not None  # studies evaluate on both
    federation = history.federation[-1]
    test = history.test[-1]
    cell = study.describe(result)
    return {
        "data": study.dataset.name,
        "alpha": study.concentration(result.alpha),
        "method": result.method,
        "metric": metric.name,
        "protocol": study.protocol.name,
        "seeds": len(study.seeds),
        **_mean_sd_or_warn(cell, "accuracy", test.accuracy()),
        **_mean_sd_or_warn(cell, "accuracy_federation", federation.accuracy()),
        **_mean_sd_or_warn(cell, "gap_soft", federation.gap(metric, "soft")),
        **_mean_sd_or_warn(cell, "gap_hard", federation.gap(metric, "hard")),
        **_mean_sd_or_warn(cell, "gap_soft_test", test.gap(metric, "soft")),
        **_mean_sd_or_warn(cell, "gap_hard_test", test.gap(metric, "hard")),
        **decision_columns(study.dataset, metric, federation, test),
        **_heterogeneity(cell, result),
        "seconds": history.seconds,
        "lr": mean_of(result.lr),
        "strength": mean_of(result.strength) if METHODS[result.method].strength else None,
        "rounds": {str(n): int(times) for n, times in _count_values(result.rounds)},
        **_target_columns(study, result),
        "base": study.protocol.base,
        "executor": history.executor,
    }


def choices(study: Study, results: Sequence[Result]) -> list[str]:
    """What the replicates chose on their inner splits, in words; empty if there was no choice."""
    texts: dict[str, None] = {}  # an ordered set: methods share the learning rate
    for result in results:
        alpha = study.concentration(result.alpha)
        where = "" if alpha is None else f"alpha {alpha:g}: "
        if "lr" in result.chosen:
            texts[f"{where}learning rate {_describe_values(result.lr)}"] = None
        if "strength" in result.chosen:
            name = f"{METHODS[result.method].strength} of {result.method}, {result.metric.name}"
            texts[f"{where}{name}: {_describe_values(result.strength)}"] = None
    return list(texts)


def round_rows(study: Study, result: Result) -> list[Row]:
    """One row per measured round and replicate."""
    history = result.history
    metric = result.metric
    assert history.federation is not None
    values = {
        "accuracy": history.test.accuracy(),
        "gap_soft": history.federation.gap(metric, "soft"),
        "gap_hard": history.federation.gap(metric, "hard"),
        "gap_soft_test": history.test.gap(metric, "soft"),
        "gap_hard_test": history.test.gap(metric, "hard"),
    }
    return [
        {
            "data": study.dataset.name,
            "alpha": study.concentration(result.alpha),
            "method": result.method,
            "metric": metric.name,
            "protocol": study.protocol.name,
            "seed": seed,
            "round": after * int(result.stretch[i]),
            **{name: number(value[e, i]) for name, value in values.items()},
        }
        for e, after in enumerate(history.rounds.tolist())
        for i, seed in enumerate(study.seeds)
    ]


def client_rows(
    study: Study, result: Result, *, replicate: int = 0, plain: Result | None = None
) -> list[Row]:
    """Every client's rows, accuracy and gap of decisions before and after, in one replicate.

    After: under the replicate's final model. Before: under FedAvg's final model of the same
    replicate, if `plain` is given, and otherwise under the model that training started from.
    The contributions add up to the gap: positive where a client widens it.
    """
    metric = result.metric
    start = result.history.before if plain is None else plain.history.after
    assert start is not None and result.history.after is not None
    before = start[replicate]
    after = result.history.after[replicate]
    names = study.dataset.client_names if study.kind == "column" else ()
    keys = result.federations[replicate].keys
    analysis = analyze(metric, after, "hard")
    side = -1.0 if analysis.signed_gap < 0 else 1.0
    columns = {
        "accuracy_before": before.accuracy(),
        "accuracy_after": after.accuracy(),
        "gap_hard_before": before.gap(metric, "hard"),
        "gap_hard_after": after.gap(metric, "hard"),
        "contribution": side * analysis.weights * analysis.contributions,
    }
    # Columns are converted as a whole: there may be a million clients.
    values = zip(*(map(number, column.tolist()) for column in columns.values()), strict=True)
    rows = map(int, after.rows().tolist())
    return [
        {
            "client": names[key] if names else str(key),
            "rows": count,
            **dict(zip(columns, each, strict=True)),
        }
        for key, count, each in zip(keys.tolist(), rows, values, strict=True)
    ]


def decision_columns(data: Dataset, metric: Metric, federation: Sums, test: Sums) -> Row:
    """What stands behind accuracy and gap of decisions. Tallies are (replicate, ...).

    `gap_hard_test_low` and `_high`: the 95% interval, averaged over replicates; None where every
    replicate has fewer than ten rows in some group. `fewest_rows`: the fewest rows behind a rate.
    `floor`: the gap that a fair model would show by chance. `accuracy_constant`: of always
    predicting the most frequent class. `selection_rates`: by group, the share of its rows that is
    given the positive class (of more than two classes: each class). `collapsed`: replicates that
    give nearly all rows the same class, on the clients' rows. `widest`: the groups behind the gap,
    the one with the higher rate first.
    """
    decisions = test.statistics(metric, "hard")
    low, high = gap_interval(metric, decisions, fewest=FEW)
    columns: Row = {
        "gap_hard_test_low": mean_of(low),
        "gap_hard_test_high": mean_of(high),
        "fewest_rows": number(float(decisions[..., 1, :, :].min())),
        "floor": mean_of(floor(metric, decisions)),
        "accuracy_constant": mean_of(constant_accuracy(test)),
        **mean_sd("balanced_accuracy", balanced_accuracy(test)),
    }
    for suffix, tally in (("", test), ("_federation", federation)):
        columns["selection_rates" + suffix] = _selection_rates(data, tally)
        columns["widest" + suffix] = _widest_groups(data, metric, tally)
    return columns | {"collapsed": int(is_collapsed(federation).sum())}


def _selection_rates(data: Dataset, tally: Sums) -> Row:
    rates = selection_rates(tally)
    by_group: Row = {}
    for g, group in enumerate(data.group_names):
        each = {name: mean_of(rates[:, g, c]) for c, name in enumerate(data.classes)}
        by_group[group] = each[data.classes[1]] if len(data.classes) == 2 else each
    return by_group


def _widest_groups(data: Dataset, metric: Metric, tally: Sums) -> Row | None:
    """The condition and the pair that are widest apart in most replicates; None: not estimable."""
    decisions = tally.statistics(metric, "hard")
    known = decisions[np.isfinite(metric.readout(decisions))]
    if not len(known):
        return None
    pair = metric.worst(known)
    each = zip(pair.condition.tolist(), pair.high.tolist(), pair.low.tolist(), strict=True)
    (condition, high, low), times = Counter(each).most_common(1)[0]
    return {
        "high": data.group_names[high],
        "low": data.group_names[low],
        "condition": condition_names(metric, data.classes)[condition],
        "replicates": times,
    }


def _heterogeneity(cell: str, result: Result) -> dict[str, float | None]:
    """DH and TV between the groups, averaged over replicates: how different the clients are.

    DH is None where it is infinite (a client lacks a group; TV is finite there) and where the
    metric is not proper; TV is defined for any.
    """
    after = result.history.after
    metric = result.metric
    if after is None:
        return {"heterogeneity": None, "total_variation": None}
    each = [analyze(metric, after[i], "soft") for i in range(len(after.count))]
    variation = number(float(np.mean([found.total_variation for found in each])))
    if not metric.proper(after.count.shape[-2]):
        return {"heterogeneity": None, "total_variation": variation}
    infinite = sum(math.isinf(found.heterogeneity) for found in each)
    if infinite:
        warnings.warn(
            f"{cell}: heterogeneity is infinite in {infinite} of {len(each)} replicates: "
            "a client has no row of a group",
            NotEstimableWarning,
            stacklevel=3,
        )
    return {
        "heterogeneity": number(float(np.mean([found.heterogeneity for found in each]))),
        "total_variation": variation,
    }


@dataclass(frozen=True)
class Choice:
    """The replicate whose model is saved, and why; `met`: replicates that met the target."""

    replicate: int
    why: Literal["met", "nearest", "first"]
    met: int
    collapsed: bool

    @property
    def reason(self) -> str:
        """Why this replicate, in words."""
        if self.why == "met":
            return f"the most accurate of the {self.met} that met the target on their clients' rows"
        if self.why == "nearest":
            return "none met the target on its clients' rows, and this one is nearest to it"
        return "the first that did not diverge, since there is no target to choose by"


def choose_replicate(study: Study, result: Result) -> Choice:
    """The replicate whose model is saved.

    Of those that met the target on their clients' rows, the most accurate one there; if none did,
    the one whose gap is nearest to it, and a collapsed one only if all have collapsed. Without a
    target, the first replicate that did not diverge.
    """
    assert result.history.federation is not None
    last = result.history.federation[-1]
    accuracy = last.accuracy()
    lost = is_collapsed(last)
    if result.method != "fedgft-control":
        at = int(np.argmax(np.isfinite(accuracy)))
        return Choice(at, "first", 0, bool(lost[at]))
    gap = last.gap(result.metric, study.protocol.control)
    met = (gap <= result.strength + TARGET_TOLERANCE) & ~lost
    if met.any():
        at = int(np.argmax(np.where(met, accuracy, -np.inf)))
        return Choice(at, "met", int(met.sum()), False)
    order = np.where(np.isfinite(gap), gap, np.inf) + np.where(lost, 1.0, 0.0)
    at = int(np.argmin(order))
    return Choice(at, "nearest", 0, bool(lost[at]))


def describe_training(study: Study, result: Result, replicate: int) -> Row:
    """How one replicate was trained, and its accuracy and gap on the clients' and the test rows.

    Gaps are of decisions, or of scores where the target is one for scores.
    """
    history = result.history
    metric = result.metric
    assert history.federation is not None
    own = history.federation[-1][replicate]
    test = history.test[-1][replicate]
    has_target = result.method == "fedgft-control"
    kind = study.protocol.control if has_target else "hard"
    gap = float(own.gap(metric, kind))
    target = float(result.strength[replicate]) if has_target else None
    return {
        "seed": int(study.seeds[replicate]),
        "rounds": int(result.rounds[replicate]),
        "lr": float(result.lr[replicate]),
        "target": target,
        "gap_of": GAP_OF[kind],
        "gap": number(gap),
        "gap_test": number(test.gap(metric, kind)),
        "reached": None if target is None else bool(gap <= target + TARGET_TOLERANCE),
        "collapsed": bool(is_collapsed(own)),
        "accuracy": number(own.accuracy()),
        "accuracy_test": number(test.accuracy()),
    }


def _target_columns(study: Study, result: Result) -> Row:
    """The target and how many replicates reached it on the clients' rows, collapsed ones included.

    A gap within 0.3 points of the target has reached it, the resolution of decisions on a few
    thousand rows.
    """
    names = ("target", "target_of", "reached", "reached_collapsed", "missed_because")
    if result.method != "fedgft-control":
        return dict.fromkeys(names)
    kind = study.protocol.control
    history = result.history
    assert history.federation is not None
    last = history.federation[-1]
    within = last.gap(result.metric, kind) <= result.strength + TARGET_TOLERANCE
    missed = np.flatnonzero(~within)
    reason = None
    if len(missed) and history.control is not None:
        reason = history.control.reason(int(missed[0]))
    values = (
        mean_of(result.strength),
        GAP_OF[kind],
        int(within.sum()),
        int((within & is_collapsed(last)).sum()),
        reason,
    )
    return dict(zip(names, values, strict=True))


def _mean_sd_or_warn(cell: str, name: str, values: np.ndarray) -> dict[str, float | None]:
    """`mean_sd`, with a warning where some replicates have no value."""
    missing = int((~np.isfinite(values)).sum())
    if missing:
        what = "training diverged" if name.startswith("accuracy") else f"{name} is not estimable"
        text = f"{cell}: {what} in {missing} of {len(values)} replicates"
        warnings.warn(text, NotEstimableWarning, stacklevel=3)
    return mean_sd(name, values)


def mean_sd(name: str, values: np.ndarray) -> dict[str, float | None]:
    """Two fields of a row, mean and standard deviation over the replicates that have a value."""
    known = values[np.isfinite(values)]
    spread = float(known.std(ddof=1)) if len(known) > 1 else None
    return {name: mean_of(values), f"{name}_sd": spread}


def mean_of(values: np.ndarray) -> float | None:
    """The mean of the finite values; None if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def number(value: Any) -> float | None:
    """The value as JSON can hold it: None instead of NaN and infinity."""
    return float(value) if math.isfinite(value) else None


def _count_values(values: np.ndarray) -> list[tuple[Any, int]]:
    each, times = np.unique(values, return_counts=True)
    return list(zip(each.tolist(), times.tolist(), strict=True))


def _describe_values(values: np.ndarray) -> str:
    counts = _count_values(values)
    if len(counts) == 1:
        return f"{counts[0][0]:g}"
    return ", ".join(f"{value:g} ({times} of {len(values)})" for value, times in counts)
