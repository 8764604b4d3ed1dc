"""Figures of scores: the threshold explorer, ROC and calibration by group."""

import numpy as np

from fedgft.audit.curves import Curves, curves, sweep
from fedgft.audit.grammar import INK, Spec, chart, number, word
from fedgft.audit.views import View
from fedgft.metrics import CATALOG

MOST_GROUPS, FEW_GROUPS = 10, 4


def thresholds(seen: View, at: float | None) -> Spec | None:
    """Accuracy and gaps over all thresholds, and as bars at the one the slider stands on."""
    found = sweep(seen)
    if found is None:
        return None
    step = 1 / len(found.thresholds)
    metrics = [n for n in ("sp", "eop", "fpr", "acc") if not np.isnan(found.gaps[n]).all()]
    series = {"accuracy": found.accuracy}
    series |= {f"gap: {CATALOG[n].title}": found.gaps[n] for n in metrics}
    groups = list(zip(seen.names, found.selected.T, strict=True))[:FEW_GROUPS]
    series |= {f"positive: {name[:40]}": rates for name, rates in groups}
    rows = [
        {"threshold": round(float(t), 6), "what": what, "value": 100 * float(value)}
        for what, values in series.items()
        for t, value in zip(found.thresholds, values, strict=True)
        if np.isfinite(value)
    ]
    slider = {"input": "range", "min": 0, "max": 1 - step, "step": step, "name": "Threshold: "}
    start = round((0.5 if at is None else at) / step) * step  # where there is something to show
    here = [{"filter": f"abs(datum.threshold - threshold) < {step / 2}"}]
    spec = chart(
        params=[{"name": "threshold", "value": min(start, 1 - step), "bind": slider}],
        data={"values": rows},
        vconcat=[_lines(here), _bars(here)],
    )
    del spec["width"], spec["autosize"]  # of charts put together, each has its own
    return spec


COLOUR: Spec = {"field": "what", "type": "nominal", "sort": None, "legend": None}
VALUE: Spec = {"field": "value", "type": "quantitative", "title": "per cent or points"}


def _lines(here: list[Spec]) -> Spec:
    x = {"field": "threshold", "type": "quantitative", "title": "threshold"}
    encoding = {"x": x, "y": VALUE, "color": COLOUR}
    return {"width": 520, "height": 220, "layer": [
        {"mark": {"type": "line"}, "encoding": encoding},
        {"mark": {"type": "rule", "color": INK, "strokeDash": [4, 4]}, "data": {"values": [{}]},
         "transform": [{"calculate": "threshold", "as": "threshold"}], "encoding": {"x": x}},
        {"mark": {"type": "point", "filled": True, "size": 60}, "transform": here,
         "encoding": encoding},
    ]}  # fmt: skip


def _bars(here: list[Spec]) -> Spec:
    y = {"field": "what", "type": "nominal", "sort": None, "title": None}
    x = VALUE | {"scale": {"domain": [0, 100]}, "title": "at this threshold"}
    text = {"field": "value", "type": "quantitative", "format": ".1f"}
    return {"width": 520, "height": {"step": 24}, "transform": here, "layer": [
        {"mark": {"type": "bar", "height": 12}, "encoding": {"x": x, "y": y, "color": COLOUR}},
        {"mark": {"type": "text", "align": "left", "dx": 4, "aria": True},
         "encoding": {"x": x, "y": y, "text": text}},
    ]}  # fmt: skip


GROUP: Spec = {"field": "group", "type": "nominal", "sort": None}
UNIT: Spec = {"scale": {"domain": [0, 1]}}


def _largest(seen: View, score: int) -> list[Curves]:
    """The curves of the groups with most rows, in their own order."""
    found = curves(seen, score)
    rows = sorted((c.positives + c.negatives for c in found), reverse=True)
    least = rows[min(MOST_GROUPS, len(rows)) - 1]
    return [c for c in found if c.positives + c.negatives >= least][:MOST_GROUPS]


def roc(seen: View, score: int = 0) -> Spec:
    rows = [
        {"group": c.group, "fpr": float(f), "tpr": float(t), "threshold": float(at), "order": i}
        for c in _largest(seen, score)
        if c.positives and c.negatives
        for i, (f, t, at) in enumerate(zip(c.fpr, c.tpr, c.thresholds, strict=True))
    ]
    encoding = {
        "x": {"field": "fpr", "type": "quantitative", "title": "false-positive rate"},
        "y": {"field": "tpr", "type": "quantitative", "title": "true-positive rate"},
        "order": {"field": "order"},
        "color": GROUP,
        "tooltip": [word("group"), number("threshold", "threshold", ".3f"),
                    number("fpr", "false-positive rate", ".3f"),
                    number("tpr", "true-positive rate", ".3f")],
    }  # fmt: skip
    line = {"type": "line", "point": {"size": 12}, "strokeWidth": 1.5}
    layer = [_diagonal(), {"mark": line, "encoding": encoding}]
    return chart(height=300, data={"values": rows}, layer=layer)


def calibration(seen: View, score: int = 0) -> Spec:
    rows = [{"group": c.group, **p} for c in _largest(seen, score) for p in c.calibration]
    x = {"field": "score", "type": "quantitative", "title": "score", **UNIT}
    y = {"field": "rate", "type": "quantitative", "title": "share that is positive", **UNIT}
    tooltip = [word("group"), number("score", "score", ".3f"), number("rate", "share", ".3f"),
               number("n", "rows", ",.0f")]  # fmt: skip
    both = {"x": x, "y": y, "color": GROUP}
    return chart(height=300, data={"values": rows}, layer=[
        _diagonal(),
        {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": both},
        {"mark": {"type": "rule", "opacity": 0.6},
         "transform": [{"filter": "isValid(datum.low)"}],
         "encoding": both | {"y": y | {"field": "low"}, "y2": {"field": "high"}}},
        {"mark": {"type": "point", "filled": True, "size": 40},
         "encoding": both | {"tooltip": tooltip}},
    ])  # fmt: skip


def _diagonal() -> Spec:
    return {"mark": {"type": "line", "color": INK, "opacity": 0.4, "strokeDash": [4, 4]},
            "data": {"values": [{"a": 0, "b": 0}, {"a": 1, "b": 1}]},
            "encoding": {"x": {"field": "a", "type": "quantitative"},
                         "y": {"field": "b", "type": "quantitative"}}}  # fmt: skip
