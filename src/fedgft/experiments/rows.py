"""Results as rows: per combination, per round, per client. All rates are fractions."""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fedgft.data.dataset import Dataset
from fedgft.experiments.study import Result, Study
from fedgft.federated.control import NEAR
from fedgft.metrics import Metric, NotEstimableWarning, Tally
from fedgft.metrics.decisions import (
    balanced_accuracy,
    collapsed,
    condition_names,
    constant_accuracy,
    selection_rates,
)
from fedgft.metrics.intervals import FEW, floor, gap_interval
from fedgft.theory import analyse


def row(study: Study, result: Result) -> dict[str, Any]:
    """What `fedgft compare` prints: accuracy on the protocol's test rows, both kinds of gap on both
    kinds of rows, and for the held-out decisions the interval and the statistical floor."""
    history, metric = result.history, result.metric
    federation, test = history.federation, history.test
    assert federation is not None  # studies evaluate on both
    decisions = test[-1].statistics(metric, "hard")
    cell = study.cell(result)
    out: dict[str, Any] = {
        "data": study.dataset.name,
        "alpha": study.concentration(result.alpha),
        "method": result.method,
        "metric": metric.name,
        "protocol": study.protocol.name,
        "seeds": len(study.seeds),
        **_told(cell, "accuracy", test[-1].accuracy()),
        **_told(cell, "accuracy_federation", federation[-1].accuracy()),
        **_told(cell, "gap_soft", federation[-1].gap(metric, "soft")),
        **_told(cell, "gap_hard", federation[-1].gap(metric, "hard")),
        **_told(cell, "gap_soft_test", test[-1].gap(metric, "soft")),
        **_told(cell, "gap_hard_test", test[-1].gap(metric, "hard")),
        **interval(metric, test[-1]),
        "floor": mean_of(floor(metric, decisions)),
        **behind(study.dataset, metric, federation[-1], test[-1]),
        **_apart(cell, result),
        "seconds": history.seconds,
        "lr": mean_of(result.lr),
        "strength": mean_of(result.strength) if result.method in study.protocol.strengths else None,
        "rounds": _trained_for(result.rounds),
        **_target(study, result),
        "base": study.protocol.base,
        "executor": history.executor,
    }
    return out


def choices(study: Study, results: Sequence[Result]) -> list[str]:
    """What the replicates chose on their inner splits, in words; nothing where nothing was open."""
    said: dict[str, None] = {}  # an ordered set: methods share the learning rate
    for result in results:
        alpha = study.concentration(result.alpha)
        where = "" if alpha is None else f"alpha {alpha:g}: "
        if "lr" in result.chosen:
            said[where + "learning rate " + _counts(result.lr)] = None
        if "strength" in result.chosen:
            name = f"{study.protocol.strengths[result.method]} of {result.method}"
            said[f"{where}{name}, {result.metric.name}: {_counts(result.strength)}"] = None
    return list(said)


def round_rows(study: Study, result: Result) -> list[dict[str, Any]]:
    """One row per replicate and measured round."""
    history, metric, out = result.history, result.metric, []
    stretch = result.stretch
    assert history.federation is not None
    gaps = {
        name: tally.gap(metric, kind)
        for name, tally, kind in (
            ("gap_soft", history.federation, "soft"),
            ("gap_hard", history.federation, "hard"),
            ("gap_soft_test", history.test, "soft"),
            ("gap_hard_test", history.test, "hard"),
        )
    }
    accuracy = history.test.accuracy()
    for e, after in enumerate(history.rounds.tolist()):
        for i, seed in enumerate(study.seeds):
            out.append(
                {"data": study.dataset.name, "alpha": study.concentration(result.alpha),
                 "method": result.method, "metric": metric.name,
                 "protocol": study.protocol.name, "seed": seed,
                 "round": after * int(stretch[i]), "accuracy": number(accuracy[e, i]),
                 **{name: number(gap[e, i]) for name, gap in gaps.items()}}
            )  # fmt: skip
    return out


def client_rows(
    study: Study, result: Result, *, replicate: int = 0, plain: Result | None = None
) -> list[dict[str, Any]]:
    """Every client's rows, accuracy and gap before and after.

    After is under the final model of the replicate; before is under FedAvg's final model of the
    same replicate, where `plain` has it, and otherwise under the model that training started from.
    """
    history, metric = result.history, result.metric
    start = history.before if plain is None else plain.history.after
    assert start is not None and history.after is not None
    before, after = start[replicate], history.after[replicate]
    names = study.dataset.client_names if study.kind == "column" else ()
    keys = result.federations[replicate].keys
    analysis = analyse(metric, after, "hard")
    # They add up to the gap: positive where a client widens it, whichever group is ahead.
    side = -1.0 if analysis.signed_gap < 0 else 1.0
    contribution = side * analysis.weights * analysis.contributions
    measured = {
        "accuracy_before": before.accuracy(),
        "accuracy_after": after.accuracy(),
        "gap_hard_before": before.gap(metric, "hard"),
        "gap_hard_after": after.gap(metric, "hard"),
        "contribution": contribution,
    }
    # Each column is taken once, not once a client: there may be a million of them.
    columns = [map(number, values.tolist()) for values in measured.values()]
    rows = map(int, after.rows().tolist())
    return [
        {"client": names[key] if names else str(key), "rows": count,
         **dict(zip(measured, values, strict=True))}
        for key, count, values in zip(keys.tolist(), rows, zip(*columns, strict=True), strict=True)
    ]  # fmt: skip


def _apart(cell: str, result: Result) -> dict[str, float | None]:
    """DH and TV between the groups, averaged over replicates: how unlike the clients are.

    DH is None where it is infinite (a client lacks a group; TV is finite there) and where the
    metric is not proper; TV is defined for any.
    """
    after, metric = result.history.after, result.metric
    if after is None:
        return {"heterogeneity": None, "total_variation": None}
    each = [analyse(metric, after[i], "soft") for i in range(len(after.count))]
    variation = number(float(np.mean([found.total_variation for found in each])))
    if not metric.proper(after.count.shape[-2]):
        return {"heterogeneity": None, "total_variation": variation}
    infinite = sum(math.isinf(found.heterogeneity) for found in each)
    if infinite:
        warnings.warn(
            f"{cell}: heterogeneity is infinite in {infinite} of {len(each)} replicates: "
            "a client has no row of a group",
            NotEstimableWarning, stacklevel=3,
        )  # fmt: skip
    return {
        "heterogeneity": number(float(np.mean([found.heterogeneity for found in each]))),
        "total_variation": variation,
    }


def interval(metric: Metric, tally: Tally) -> dict[str, Any]:
    """The 95% interval of the gap of decisions, averaged over the replicates, and the fewest rows
    that any of its rates is made of. None where every replicate has fewer than ten."""
    decisions = tally.statistics(metric, "hard")
    low, high = gap_interval(metric, decisions, fewest=FEW)
    return {
        "gap_hard_test_low": mean_of(low),
        "gap_hard_test_high": mean_of(high),
        "fewest_rows": number(float(decisions[..., 1, :, :].min())),
    }


def behind(data: Dataset, metric: Metric, federation: Tally, test: Tally) -> dict[str, Any]:
    """What stands behind accuracy and gap. Tallies are (replicate, ...).

    `accuracy_constant`: of always predicting the most frequent class. `selection_rates`: by group,
    the share of its rows that is given the positive class (of more than two classes: each class).
    `collapsed`: replicates that give nearly everybody the same class, on the clients' rows.
    `widest`: the groups behind the gap of decisions, the one with the higher rate first.
    """
    out: dict[str, Any] = {"accuracy_constant": mean_of(constant_accuracy(test))}
    out |= mean_sd("balanced_accuracy", balanced_accuracy(test))
    for name, tally in (("", test), ("_federation", federation)):
        out["selection_rates" + name] = _selected(data, tally)
        out["widest" + name] = _widest(data, metric, tally)
    return out | {"collapsed": int(collapsed(federation).sum())}


def _selected(data: Dataset, tally: Tally) -> dict[str, Any]:
    rates = selection_rates(tally)
    out: dict[str, Any] = {}
    for g, group in enumerate(data.group_names):
        each = {name: mean_of(rates[:, g, c]) for c, name in enumerate(data.classes)}
        out[group] = each[data.classes[1]] if len(data.classes) == 2 else each
    return out


def _widest(data: Dataset, metric: Metric, tally: Tally) -> dict[str, Any] | None:
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


@dataclass(frozen=True)
class Pick:
    """The replicate whose model is handed over, and why."""

    replicate: int
    why: Literal["met", "nearest", "first"]
    met: int  # replicates that met the target; 0 without one
    collapsed: bool


def pick(study: Study, result: Result) -> Pick:
    """Of the replicates that met the target on their clients' rows the most accurate one there; if
    none did, the one whose gap is nearest to it. Collapsed models only where there are no others.
    Without a target the first replicate that did not diverge."""
    federation = result.history.federation
    assert federation is not None
    last = federation[-1]
    accuracy, lost = last.accuracy(), collapsed(last)
    finite = np.isfinite(accuracy)
    if result.method != "fedgft-control":
        at = int(np.argmax(finite))
        return Pick(at, "first", 0, bool(lost[at]))
    gap = last.gap(result.metric, study.protocol.control)
    met = (gap <= result.strength + NEAR) & ~lost
    if met.any():
        at = int(np.argmax(np.where(met, accuracy, -np.inf)))
        return Pick(at, "met", int(met.sum()), False)
    order = np.where(np.isfinite(gap), gap, np.inf) + np.where(lost, 1.0, 0.0)
    at = int(np.argmin(order))
    return Pick(at, "nearest", 0, bool(lost[at]))


def _target(study: Study, result: Result) -> dict[str, Any]:
    """What was asked for, and how many replicates have it on the federation's rows (to 0.3 points,
    the resolution of decisions on a few thousand rows). Some of these models may have collapsed."""
    if result.method != "fedgft-control":
        return {
            "target": None,
            "target_of": None,
            "reached": None,
            "reached_collapsed": None,
            "missed_because": None,
        }
    federation, kind = result.history.federation, study.protocol.control
    assert federation is not None
    within = federation[-1].gap(result.metric, kind) <= result.strength + NEAR
    of = {"hard": "decisions", "soft": "scores"}[kind]
    return {
        "target": mean_of(result.strength),
        "target_of": of,
        "reached": int(within.sum()),
        "reached_collapsed": int((within & collapsed(federation[-1])).sum()),
        "missed_because": _reason(result, within),
    }


def _reason(result: Result, within: np.ndarray) -> str | None:
    """What happened in the first replicate that missed its target, in words."""
    missed, control = np.flatnonzero(~within), result.history.control
    return control.reason(int(missed[0])) if len(missed) and control is not None else None


def _told(cell: str, name: str, values: np.ndarray) -> dict[str, float | None]:
    known = values[np.isfinite(values)]
    lost = len(values) - len(known)
    if lost:
        what = "training diverged" if name.startswith("accuracy") else f"{name} is not estimable"
        text = f"{cell}: {what} in {lost} of {len(values)} replicates"
        warnings.warn(text, NotEstimableWarning, stacklevel=3)
    return mean_sd(name, values)


def mean_sd(name: str, values: np.ndarray) -> dict[str, float | None]:
    """Two fields of a row, over the replicates that have a value."""
    known = values[np.isfinite(values)]
    spread = float(known.std(ddof=1)) if len(known) > 1 else None
    return {name: mean_of(values), f"{name}_sd": spread}


def mean_of(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def number(value: Any) -> float | None:
    """JSON has no NaN and no infinity: not estimable is null."""
    return float(value) if math.isfinite(value) else None


def _trained_for(rounds: np.ndarray) -> dict[str, int]:
    """How many replicates were trained for how many rounds: {"50": 18, "100": 2}."""
    each, times = np.unique(rounds, return_counts=True)
    return {str(n): int(count) for n, count in zip(each.tolist(), times, strict=True)}


def _counts(values: np.ndarray) -> str:
    each, times = np.unique(values, return_counts=True)
    if len(each) == 1:
        return f"{each[0]:g}"
    return ", ".join(f"{v:g} ({n} of {len(values)})" for v, n in zip(each, times, strict=True))
