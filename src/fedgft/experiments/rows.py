"""Results as rows: one a combination, one a round, one a client. All rates are fractions."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedgft.experiments.study import Result, Study
from fedgft.metrics import NotEstimableWarning
from fedgft.metrics.intervals import floor, gap_interval
from fedgft.theory import analyse

NEAR = 0.003  # a target is said to be reached; a pick (`picking.SLACK`) aims a little closer


def row(study: Study, result: Result) -> dict[str, Any]:
    """What `fedgft compare` prints: accuracy on the protocol's test rows, both kinds of gap on both
    kinds of rows, and for the held-out decisions the interval and the statistical floor."""
    history, metric = result.history, result.metric
    federation, test = history.federation, history.test
    assert federation is not None  # studies evaluate on both
    decisions = test[-1].statistics(metric, "hard")
    low, high = gap_interval(metric, decisions)
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
        "gap_hard_test_low": mean_of(low),
        "gap_hard_test_high": mean_of(high),
        "floor": mean_of(floor(metric, decisions)),
        **_apart(cell, result),
        "seconds": history.seconds,
        "lr": mean_of(result.lr),
        "strength": mean_of(result.strength) if result.method in study.protocol.strengths else None,
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
    """One row a replicate and measured round."""
    history, metric, out = result.history, result.metric, []
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
                 "round": after, "accuracy": _number(accuracy[e, i]),
                 **{name: _number(gap[e, i]) for name, gap in gaps.items()}}
            )  # fmt: skip
    return out


def client_rows(study: Study, result: Result, *, replicate: int = 0) -> list[dict[str, Any]]:
    """Every client's rows, accuracy and gap under the starting and under the final model."""
    history, metric = result.history, result.metric
    assert history.before is not None and history.after is not None
    before, after = history.before[replicate], history.after[replicate]
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
    columns = [map(_number, values.tolist()) for values in measured.values()]
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
    variation = _number(float(np.mean([found.total_variation for found in each])))
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
        "heterogeneity": _number(float(np.mean([found.heterogeneity for found in each]))),
        "total_variation": variation,
    }


def _target(study: Study, result: Result) -> dict[str, Any]:
    """What was asked for, and how many replicates have it on the federation's rows (to 0.3 points,
    the resolution of decisions on a few thousand rows)."""
    if result.method != "fedgft-control":
        return {"target": None, "target_of": None, "reached": None}
    federation, kind = result.history.federation, study.protocol.control
    assert federation is not None
    within = federation[-1].gap(result.metric, kind) <= result.strength + NEAR
    of = {"hard": "decisions", "soft": "scores"}[kind]
    return {"target": mean_of(result.strength), "target_of": of, "reached": int(within.sum())}


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


def _number(value: float) -> float | None:
    """JSON has no NaN and no infinity: not estimable is null."""
    return float(value) if math.isfinite(value) else None


def _counts(values: np.ndarray) -> str:
    each, times = np.unique(values, return_counts=True)
    if len(each) == 1:
        return f"{each[0]:g}"
    return ", ".join(f"{v:g} ({n} of {len(values)})" for v, n in zip(each, times, strict=True))
