"""The figures of an audit: Vega-Lite charts, filled with the rows to draw.

How the charts look is in ``templates/charts.json``, plain Vega-Lite without data; each can be tried
out in any Vega-Lite editor. The rows come from the summary of the audit and from histograms. Names
of groups and sites are data, never code. Colors that must work on light and dark paper are the
page's own (``currentColor``).
"""

import json
from importlib.resources import files
from typing import Any

import numpy as np

from fedgft.audit.findings import MAX_SITES, leading_metric, rank_sites
from fedgft.audit.rates import View
from fedgft.audit.summary import GapInterval, Summary
from fedgft.audit.thresholds import Curves, compute_curves, sweep_thresholds
from fedgft.formatting import Figure
from fedgft.metrics import CATALOG

Spec = dict[str, Any]

MAX_BARS = 12  # sites in the waterfall chart
MAX_CURVES = 10  # groups in a figure of curves
MAX_CLASSES = 6  # classes with figures of curves
MAX_SELECTED = 4  # groups in the threshold explorer
TITLES = {
    "forest": "The gap at every site",
    "waterfall": "Who drives the gap",
    "rates": "Every group",
    "thresholds": "Threshold explorer",
    "roc": "ROC curves",
    "calibration": "Calibration",
}
CAPTIONS = {
    "forest": "Every site's own view of the gap between the two groups that are farthest apart "
    "overall, with 95% intervals. The last row is all sites together.",
    "waterfall": "What each site adds to the global gap or takes from it, measured from the "
    "overall rate of the two groups: a site where both have that rate adds nothing. The bars end "
    "at the gap itself.",
    "rates": "The rate of every group over all sites, with its 95% interval.",
    "thresholds": "What if the threshold were another one, the same for all groups? Move the "
    "slider. Values are exact at the edges of the histogram's bins, every {step:g}.",
    "roc": "By group, exact at the dots; between two dots the curve may lie anywhere in the box "
    "they span.",
    "calibration": "By group: of people with such a score, how many are positive. Scores are known "
    "to ± {half:g}; bars are 95% intervals.",
}


def draw_figures(summary: Summary, view: View) -> list[Figure]:
    """Every figure that there is data for.

    Parameters
    ----------
    summary
        The results of the audit.
    view
        The groups by all attributes together, with histograms for the figures of scores.
    """

    def figure(kind: str, spec: Spec, number: str = "", title: str = "") -> Figure:
        caption = _write_caption(kind, view, len(summary["sites"]))
        return Figure(kind + number, TITLES[kind] + title, caption, spec)

    figures = [
        figure("forest", draw_forest(summary)),
        figure("waterfall", draw_waterfall(summary)),
        figure("rates", draw_rates(summary)),
    ]
    explorer = draw_thresholds(view)
    if explorer is not None:
        figures.append(figure("thresholds", explorer))
    if not view.has_histograms:
        return figures
    for s, name in enumerate(view.scored_classes[:MAX_CLASSES]):
        number = str(s or "")
        title = "" if len(view.scored_classes) == 1 else f", {name} against the rest"
        curves = _largest_groups(compute_curves(view, s))
        figures.append(figure("roc", draw_roc(curves), number, title))
        figures.append(figure("calibration", draw_calibration(curves), number, title))
    return figures


def _write_caption(kind: str, view: View, sites: int) -> str:
    """The caption; a figure that shows some of many says so."""
    step = 1 / view.question.bins
    classes = len(view.question.classes)
    caption = CAPTIONS[kind].format(step=step, half=step / 2)
    of_curves = kind in ("roc", "calibration")
    if kind == "forest" and sites > MAX_SITES:
        caption += f" Shown: the {MAX_SITES} that move the gap most, of {sites:,} sites."
    if of_curves and len(view.groups) > MAX_CURVES:
        caption += f" The {MAX_CURVES} largest of {len(view.groups)} groups."
    if of_curves and classes > MAX_CLASSES:
        caption += f" There is a figure for the first {MAX_CLASSES} of {classes} classes."
    if (of_curves or kind == "thresholds") and view.noise.any():
        caption = caption.replace("exact", "as exact as the noise on the counts lets them be")
    return caption


def _fill_chart(kind: str, rows: list[Spec]) -> Spec:
    """A chart of templates/charts.json with its data."""
    charts = json.loads(files("fedgft").joinpath("templates/charts.json").read_text("utf-8"))
    return charts[kind] | {"config": charts["config"], "data": {"values": rows}}


def _fill_chart_by_metric(kind: str, rows: list[Spec], summary: Summary) -> Spec:
    """A chart with one line per name and a menu of metrics.

    Parameters
    ----------
    kind
        The name of the chart in templates/charts.json.
    rows
        The data of all metrics: ``metric`` and ``name`` in each row, names in their order.
    summary
        Says which metrics have a gap and are in the menu.
    """
    spec = _fill_chart(kind, rows)
    known = [name for name in CATALOG if summary["metrics"][name]["pair"]] or list(CATALOG)
    (menu,) = spec["params"]
    menu["value"] = leading_metric(summary)
    menu["bind"] |= {"options": known, "labels": [CATALOG[name].title for name in known]}
    names = list(dict.fromkeys(row["name"] for row in rows))
    spec["height"] = 24 * max(1, len(names))
    for layer in spec["layer"]:
        if "y" in layer["encoding"]:
            layer["encoding"]["y"]["sort"] = names
    return spec


def _interval_row(metric: str, name: str, n: float, kind: str, numbers: GapInterval) -> Spec:
    """A row of a chart with intervals: numbers in percentage points."""
    row: Spec = {"metric": metric, "name": name, "n": n, "kind": kind}
    for key in ("gap", "low", "high"):
        row[key] = None if (value := numbers[key]) is None else 100 * value
    return row


def _total_name(label: str, summary: Summary) -> str:
    """The name of a row that is no site, different from all names of sites."""
    return label if label not in summary["sites"] else f"({label})"


def draw_forest(summary: Summary) -> Spec:
    """The local gap at each site and the gap over all sites, with intervals, in points.

    The sites are those that move the gap of the leading metric most; metrics without a pair of
    groups have no rows.
    """
    sites = rank_sites(summary, leading_metric(summary))[:MAX_SITES]
    total_name = _total_name("all sites", summary)
    rows = []
    for metric, found in summary["metrics"].items():
        if not found["pair"]:
            continue
        for name in sites:
            site = summary["sites"][name]
            rows.append(_interval_row(metric, name, site["n"], "site", site["local"][metric]))
        total: GapInterval = {
            "gap": found["signed_gap"],
            "low": found["signed_low"],
            "high": found["signed_high"],
        }
        n = sum(found["groups"][group]["n"] for group in found["pair"])
        rows.append(_interval_row(metric, total_name, n, "all", total))
    return _fill_chart_by_metric("forest", rows, summary)


def draw_waterfall(summary: Summary) -> Spec:
    """What each site adds to the gap, in points: bars that begin where the last one ended."""
    rows = []
    for metric, found in summary["metrics"].items():
        if found["pair"]:
            rows += _waterfall_rows(metric, summary, found["signed_gap"] or 0.0)
    return _fill_chart_by_metric("waterfall", rows, summary)


def _waterfall_rows(metric: str, summary: Summary, total: float) -> list[Spec]:
    """The sites that matter most first, all others as one step, and the gap itself."""
    ranked = rank_sites(summary, metric)
    first = ranked[:MAX_BARS]
    steps = [(site, summary["sites"][site]["contribution"][metric] or 0.0) for site in first]
    if len(ranked) > MAX_BARS:
        rest = total - sum(amount for _, amount in steps)
        steps.append((f"{len(ranked) - MAX_BARS:,} other sites", rest))
    at = 0.0
    bars = []
    for site, amount in steps:
        bars.append((site, at, at + amount, amount, "site"))
        at += amount
    bars.append((_total_name("the gap", summary), 0.0, total, total, "all"))
    rows = []
    for name, *numbers, kind in bars:
        start, end, amount = (round(100 * x, 9) + 0.0 for x in numbers)  # no -0.0
        row = {"metric": metric, "name": name, "start": start, "end": end}
        rows.append(row | {"right": max(start, end), "amount": amount, "kind": kind})
    return rows


def draw_rates(summary: Summary) -> Spec:
    """The rate of every group with its interval, in per cent."""
    rows = []
    for metric, found in summary["metrics"].items():
        for group, rate in found["groups"].items():
            numbers: GapInterval = {"gap": rate["rate"], "low": rate["low"], "high": rate["high"]}
            row = _interval_row(metric, group, rate["n"], "group", numbers)
            unknown = f"  not estimable (n={rate['n']:,.0f})"
            rows.append(row | {"note": "" if rate["rate"] is not None else unknown})
    return _fill_chart_by_metric("rates", rows, summary)


def draw_thresholds(view: View) -> Spec | None:
    """Accuracy and gaps over all thresholds, and as bars at the threshold of a slider.

    The slider starts at the threshold that was measured, or at 0.5. None if the view has no
    histograms, or more than two classes.
    """
    sweep = sweep_thresholds(view)
    if sweep is None:
        return None
    series = {"accuracy": sweep.accuracy}
    for name in ("sp", "eop", "fpr", "acc"):
        if not np.isnan(sweep.gaps[name]).all():
            series[f"gap: {CATALOG[name].title}"] = sweep.gaps[name]
    for group, rates in list(zip(view.groups, sweep.selected.T, strict=True))[:MAX_SELECTED]:
        series[f"positive: {group[:40]}"] = rates
    rows = [
        {"threshold": round(float(t), 6), "what": what, "value": 100 * float(value)}
        for what, values in series.items()
        for t, value in zip(sweep.thresholds, values, strict=True)
        if np.isfinite(value)
    ]
    spec = _fill_chart("thresholds", rows)
    step = 1 / len(sweep.thresholds)
    now = 0.5 if view.question.threshold is None else view.question.threshold
    slider, half_step = spec["params"]
    slider["value"] = min(round(now / step) * step, 1 - step)
    slider["bind"] |= {"max": 1 - step, "step": step}
    half_step["value"] = step / 2
    return spec


def _largest_groups(curves: list[Curves]) -> list[Curves]:
    """The curves of the groups with most rows, in their own order."""
    sizes = sorted((c.positives + c.negatives for c in curves), reverse=True)
    smallest = sizes[min(MAX_CURVES, len(sizes)) - 1]
    return [c for c in curves if c.positives + c.negatives >= smallest][:MAX_CURVES]


def draw_roc(curves: list[Curves]) -> Spec:
    """ROC curves by group; groups without positives or without negatives have none."""
    rows = [
        {"group": c.group, "fpr": float(f), "tpr": float(t), "threshold": float(at), "order": i}
        for c in curves
        if c.positives and c.negatives
        for i, (f, t, at) in enumerate(zip(c.fpr, c.tpr, c.thresholds, strict=True))
    ]
    return _fill_chart("roc", rows)


def draw_calibration(curves: list[Curves]) -> Spec:
    """The share of positives by score and group, with intervals where they are claimed."""
    return _fill_chart(
        "calibration", [{"group": c.group, **p} for c in curves for p in c.calibration]
    )
