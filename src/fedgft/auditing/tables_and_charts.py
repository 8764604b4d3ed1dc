"""The tables and charts of an audit, made from its summary.

``templates/charts.json`` defines how the charts look. Each chart in it is a Vega-Lite specification
without data that any Vega-Lite editor can open. The data come from the summary of the audit and
from the histograms. Names of groups and sites appear only in the data, never in code. Colors that
must be visible on a light and on a dark background are the text color of the page
(``currentColor``).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np

from fedgft.auditing.findings import (
    MAX_SITES,
    describe_contributions,
    estimable_metrics,
    leading_metric,
    rank_sites,
)
from fedgft.auditing.rates import View
from fedgft.auditing.summary import (
    GapInterval,
    GapSummary,
    GroupRate,
    MetricSummary,
    Number,
    ReferenceComparison,
    Summary,
    ViewSummary,
    estimable_gap,
    gap_interval,
    views_of,
)
from fedgft.auditing.thresholds import Curves, compute_curves
from fedgft.formatting import DASH, Figure, Table, format_interval, format_percent, format_points
from fedgft.metrics import CATALOG, get_metric

MAX_SITES_ON_TERMINAL = 10
SHORT_GAP_COLUMNS = 5  # of the tables on a terminal: metric, groups, gap, interval, within sites
SHORT_RATE_COLUMNS = 5  # group, rows and three rates
SHORT_SITE_COLUMNS = 4  # site, rows, gap at the site, what it adds to the overall gap
MAX_GROUPS_AS_COLUMNS = 3  # in the table of rates on a terminal
COLUMNS_NOTE = (
    "Gaps in percentage points. Average within sites: the weighted average of the gaps inside the "
    "sites (Mantel-Haenszel). TV and DH: how differently the groups are spread over the sites. "
    "Bound: with α the largest local gap, the gap is at most α(1 − TV) + TV."
)
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


def list_tables(summary: Summary, *, short: bool = False) -> Iterator[Table]:
    """Yield the tables of the report, or a `short` selection for a terminal.

    The report begins with the view by all attributes together and has the rates of every view. The
    terminal shows the gaps of every view, but rates only by all attributes together, and only the
    sites with the largest contributions; its tables have the columns that matter most.

    Parameters
    ----------
    summary
        The results of the audit.
    short
        Whether the tables are for a terminal.
    """
    groups = summary["groups"]
    if short:
        for title, view in views_of(summary).items():
            yield _first_columns(_gap_table(view, title), SHORT_GAP_COLUMNS)
        yield _shorten_rates(_rate_table(summary, groups))
    else:
        gaps = _gap_table(summary, groups)
        yield replace(gaps, notes=(COLUMNS_NOTE, *gaps.notes))
        yield _rate_table(summary, groups)
        for title, view in summary["attributes"].items():
            yield _gap_table(view, title)
            yield _rate_table(view, title)
    yield from _reference_tables(summary)
    sites = _site_table(summary, MAX_SITES_ON_TERMINAL if short else MAX_SITES)
    yield _first_columns(sites, SHORT_SITE_COLUMNS) if short else sites
    yield from _threshold_tables(summary)
    if not short:
        yield from _area_tables(summary)


def _first_columns(table: Table, count: int) -> Table:
    """Return the table with its first columns only: they are in the order of importance."""
    rows = tuple(row[:count] for row in table.rows)
    return replace(table, header=table.header[:count], rows=rows)


def _shorten_rates(table: Table) -> Table:
    """Return the table of rates for a terminal.

    Few groups become columns, with a line per rate. Of many groups, the first rates are shown.
    """
    if len(table.rows) > MAX_GROUPS_AS_COLUMNS:
        return _first_columns(table, SHORT_RATE_COLUMNS)
    names = (f"{group} ({rows} rows)" for group, rows, *_ in table.rows)
    rates = zip(*(row[2:] for row in table.rows), strict=True)
    rows = tuple((name, *cells) for name, cells in zip(table.header[2:], rates, strict=True))
    return replace(table, header=("rate", *names), rows=rows)


def _gap_table(view: ViewSummary, title: str) -> Table:
    """Return the table of the gaps of one view, in points, with one row per metric.

    `COLUMNS_NOTE` explains the columns "within sites", TV, bound and DH.
    """
    interval = "95% interval"
    header = ("metric", "farthest apart", "gap", interval, "average within sites")
    header += ("ratio", interval, "TV", "bound", "DH")
    rows = tuple(_gap_row(name, found, view) for name, found in view["metrics"].items())
    notes = ()
    if any("*" in row[2] for row in rows):
        notes = ("*: among the groups that have a rate; over all groups it is not estimable.",)
    return Table(f"Gaps by {title}", header, rows, 2, notes)


def _gap_row(name: str, found: MetricSummary, view: ViewSummary) -> tuple[str, ...]:
    """Return the cells of one metric; a star marks a gap that covers only some of the groups.

    The heterogeneity DH of a proper metric is infinite if no site has both groups. A metric that is
    not proper has no DH.
    """
    numbers = estimable_gap(found)
    gap = "not estimable"
    interval, ratio, ratio_interval = DASH, DASH, DASH
    if numbers is not None:
        gap = format_points(numbers["gap"]) + ("*" if found["gap"] is None else "")
        interval, ratio, ratio_interval = _interval_cells(numbers)
    heterogeneity = view["heterogeneity"][name]
    infinite = heterogeneity is None and view["tv"][name] is not None and CATALOG[name].proper()
    return (
        CATALOG[name].title,
        " / ".join(found["pair"] or (DASH,)),
        gap,
        interval,
        _format_gap_cell(view["within"][name]),
        ratio,
        ratio_interval,
        _format_short(view["tv"][name]),
        format_points(view["bound"][name]),
        "∞" if infinite else _format_short(heterogeneity),
    )


def _rate_table(view: ViewSummary, title: str) -> Table:
    """Return the table of the rates of one view, in percent: a row per group, a column per metric.

    A metric with several conditions has no single rate and is left out. With more than two classes
    all metrics have several conditions; then the table shows the rates under the condition of the
    gap.
    """
    metrics = view["metrics"]
    single = [name for name, found in metrics.items() if "conditions" not in found]
    shown_metrics = single or list(metrics)
    rows = []
    for group, accuracy in metrics["acc"]["groups"].items():
        cells = (_format_rate_cell(metrics[name]["groups"][group]) for name in shown_metrics)
        rows.append((group, f"{accuracy['n']:,.0f}", *cells))
    header = ("group", "rows", *(CATALOG[name].title for name in shown_metrics))
    return Table(f"Rates by {title}, per cent", header, tuple(rows), 1)


def _reference_tables(summary: Summary) -> Iterator[Table]:
    """Yield a table for each view with a reference group, which compares every group with it."""
    header = ("metric", "group", "difference", "95% interval", "ratio", "95% interval")
    for title, view in views_of(summary).items():
        rows = [
            (CATALOG[name].title, group, format_points(each["difference"]), *_interval_cells(each))
            for name, found in view["metrics"].items()
            for group, each in found.get("against_reference", {}).items()
        ]
        if rows:
            reference = next(iter(view["metrics"].values())).get("reference")
            caption = f"{title}: every group against {reference}"
            yield Table(caption, header, tuple(rows), 2, ("Each interval holds for itself.",))


def _site_table(summary: Summary, max_sites: int) -> Table:
    """Return the table of the sites with the largest contributions to the leading metric's gap.

    The notes below the table name the sites that cause the gap.
    """
    metric = leading_metric(summary)
    known = estimable_metrics(summary)
    sites = rank_sites(summary, metric)
    rows = []
    for name in sites[:max_sites]:
        site = summary["sites"][name]
        local = site["local"][metric]
        largest = (format_points(site["gap"][n], unknown="not estimable") for n in known)
        added = format_points(site["contribution"][metric])
        rows.append((name, f"{site['n']:,.0f}", _format_gap_cell(local), added, *largest))
    header = ("site", "rows", f"local gap, {CATALOG[metric].title}", "adds to the global gap")
    header += tuple(f"own gap, {CATALOG[n].title}" for n in known)
    pair = " minus ".join(summary["metrics"][metric]["pair"] or ())
    notes = [
        f"Rows: those with a recorded group. Local gap: {pair or DASH}, points. A site's own "
        "gap is the largest between the groups it has.",
        *describe_contributions(summary, metric),
    ]
    if len(sites) > max_sites:
        notes.append(f"The {max_sites} that move the gap most, of {len(sites):,} sites.")
    return Table("Sites", header, tuple(rows), 1, tuple(notes))


def _threshold_tables(summary: Summary) -> Iterator[Table]:
    """Yield a table of thresholds by group for each metric that the user asked to adjust."""
    for found in summary["adjusted"]:
        asked = f"gap at most {format_points(found['tolerance'])} points"
        met = asked if found["feasible"] else f"the smallest gap there is (asked: {asked})"
        notes = [
            f"Gap {format_points(found['gap_before'])} → {format_points(found['gap'])} points, "
            f"accuracy {format_percent(found['accuracy_before'])} → "
            f"{format_percent(found['accuracy'])}."
        ]
        if found["reason"]:
            notes.append(f"Not met: {found['reason']}.")
        yield Table(
            f"Thresholds by group for {get_metric(found['metric']).title}: {met}",
            ("group", "threshold"),
            tuple((g, "above 1" if t > 1 else f"{t:g}") for g, t in found["thresholds"].items()),
            1,
            tuple(notes),
        )


def _area_tables(summary: Summary) -> Iterator[Table]:
    """Yield the table of areas under the ROC curves, if there are scores."""
    rows = []
    for name, groups in (summary["auc"] or {}).items():
        for group, area in groups.items():
            known = area["auc"] is not None
            text = f"{area['auc']:.3f} ± {area['bin_error']:.3f}" if known else DASH
            rows.append((group, name, text))
    if rows:
        notes = ("±: what the width of the bins leaves open, not sampling.",)
        yield Table("Area under the ROC curve", ("group", "class", "area"), tuple(rows), 2, notes)


def _format_rate_cell(found: GroupRate) -> str:
    """Return ``12.3 (9.8 to 15.4)``, in percent, or the number of rows instead of the interval."""
    if found["rate"] is None:
        return f"not estimable (n={found['n']:,.0f})"
    if found["low"] is None:
        return f"{format_points(found['rate'])} (n={found['n']:,.0f}: too few for an interval)"
    return f"{format_points(found['rate'])} ({format_interval(found['low'], found['high'])})"


def _format_gap_cell(found: GapInterval) -> str:
    """Return ``12.3 (9.8 to 15.4)``, in points."""
    if found["gap"] is None:
        return "not estimable"
    limits = format_interval(found["low"], found["high"])
    return f"{format_points(found['gap'])} ({'no interval' if limits == DASH else limits})"


def _interval_cells(found: GapSummary | ReferenceComparison) -> tuple[str, str, str]:
    """Return three cells: the interval of a gap or difference, the ratio, and its interval."""
    ratio = DASH if found["ratio"] is None else f"{found['ratio']:.2f}"
    ratios = format_interval(found["ratio_low"], found["ratio_high"], scale=1, digits=2)
    return format_interval(found["low"], found["high"]), ratio, ratios


def _format_short(value: Number) -> str:
    """Return a number with three significant digits, without conversion to points."""
    return DASH if value is None else f"{value:.3g}"


# Charts


def draw_figures(summary: Summary, view: View) -> list[Figure]:
    """Return every figure for which there is data.

    Parameters
    ----------
    summary
        The results of the audit.
    view
        The view by all attributes together. The figures of scores use its histograms.
    """

    def figure(kind: str, spec: Spec, number: str = "", title: str = "") -> Figure:
        caption = _write_caption(kind, view, len(summary["sites"]))
        return Figure(kind + number, TITLES[kind] + title, caption, spec)

    figures = [
        figure("forest", draw_forest(summary)),
        figure("waterfall", draw_waterfall(summary)),
        figure("rates", draw_rates(summary)),
    ]
    if summary["sweep"] is not None:
        figures.append(figure("thresholds", draw_thresholds(summary, summary["sweep"])))
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
    """Return the caption of a figure; it says so if the figure omits sites, groups or classes."""
    step = 1 / view.spec.bins
    classes = len(view.spec.classes)
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
    """Return a chart of templates/charts.json with `rows` as its data."""
    charts = json.loads(files("fedgft").joinpath("templates/charts.json").read_text("utf-8"))
    return charts[kind] | {"config": charts["config"], "data": {"values": rows}}


def _fill_chart_by_metric(kind: str, rows: list[Spec], summary: Summary) -> Spec:
    """Return a chart with one horizontal line per name and a menu of metrics.

    Parameters
    ----------
    kind
        The name of the chart in templates/charts.json.
    rows
        The data of all metrics. Each row has a ``metric`` and a ``name``; the chart shows the names
        in the order in which they first occur.
    summary
        The results of the audit. The menu offers the metrics that have a gap.
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
    """Return a data row of a chart with intervals; its numbers are in percentage points."""
    row: Spec = {"metric": metric, "name": name, "n": n, "kind": kind}
    for key in ("gap", "low", "high"):
        row[key] = None if (value := numbers[key]) is None else 100 * value
    return row


def _total_name(label: str, summary: Summary) -> str:
    """Return a name for the row of the total that differs from all names of sites."""
    return label if label not in summary["sites"] else f"({label})"


def draw_forest(summary: Summary) -> Spec:
    """Draw the local gap at each site and the gap over all sites, with intervals, in points.

    The chart shows the sites with the largest contributions to the gap of the leading metric. A
    metric without a pair of groups has no rows.
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
        total = gap_interval(found["signed_gap"], found["signed_low"], found["signed_high"])
        n = sum(found["groups"][group]["n"] for group in found["pair"])
        rows.append(_interval_row(metric, total_name, n, "all", total))
    return _fill_chart_by_metric("forest", rows, summary)


def draw_waterfall(summary: Summary) -> Spec:
    """Draw each site's contribution to the gap, in points.

    Each bar begins where the previous bar ends.
    """
    rows = []
    for metric, found in summary["metrics"].items():
        if found["pair"]:
            rows += _waterfall_rows(metric, summary, found["signed_gap"] or 0.0)
    return _fill_chart_by_metric("waterfall", rows, summary)


def _waterfall_rows(metric: str, summary: Summary, total: float) -> list[Spec]:
    """Return the bars of the waterfall chart for one metric.

    The sites with the largest contributions come first, then all other sites as one bar, then the
    gap itself.
    """
    ranked = rank_sites(summary, metric)
    first = ranked[:MAX_BARS]
    steps = [(site, summary["sites"][site]["contribution"][metric] or 0.0) for site in first]
    if len(ranked) > MAX_BARS:
        rest = total - sum(amount for _, amount in steps)
        steps.append((f"{len(ranked) - MAX_BARS:,} other sites", rest))
    ends = np.cumsum([amount for _, amount in steps]).tolist()
    bars = [
        (site, start, end, amount, "site")
        for (site, amount), start, end in zip(steps, [0.0, *ends], ends, strict=False)
    ]
    bars.append((_total_name("the gap", summary), 0.0, total, total, "all"))
    rows = []
    for name, *numbers, kind in bars:
        start, end, amount = (round(100 * x, 9) + 0.0 for x in numbers)  # no -0.0
        row = {"metric": metric, "name": name, "start": start, "end": end}
        rows.append(row | {"right": max(start, end), "amount": amount, "kind": kind})
    return rows


def draw_rates(summary: Summary) -> Spec:
    """Draw the rate of every group with its interval, in percent."""
    rows = []
    for metric, found in summary["metrics"].items():
        for group, rate in found["groups"].items():
            numbers = gap_interval(rate["rate"], rate["low"], rate["high"])
            row = _interval_row(metric, group, rate["n"], "group", numbers)
            unknown = f"  not estimable (n={rate['n']:,.0f})"
            rows.append(row | {"note": "" if rate["rate"] is not None else unknown})
    return _fill_chart_by_metric("rates", rows, summary)


def draw_thresholds(summary: Summary, sweep: Mapping[str, Any]) -> Spec:
    """Draw accuracy and gaps over all thresholds, and as bars at the threshold of a slider.

    The slider starts at the threshold of the measurement, or at 0.5 if it had none. `sweep` is the
    key of that name in the summary.
    """
    series = {"accuracy": sweep["accuracy"]}
    for name in ("sp", "eop", "fpr", "acc"):
        series[f"gap: {CATALOG[name].title}"] = sweep["gaps"][name]
    for group, rates in list(sweep["selected"].items())[:MAX_SELECTED]:
        series[f"positive: {group[:40]}"] = rates
    rows = [
        {"threshold": round(threshold, 6), "what": what, "value": 100 * value}
        for what, values in series.items()
        for threshold, value in zip(sweep["thresholds"], values, strict=True)
        if value is not None
    ]
    spec = _fill_chart("thresholds", rows)
    step = 1 / len(sweep["thresholds"])
    now = 0.5 if summary["threshold"] is None else summary["threshold"]
    slider, half_step = spec["params"]
    slider["value"] = min(round(now / step) * step, 1 - step)
    slider["bind"] |= {"max": 1 - step, "step": step}
    half_step["value"] = step / 2
    return spec


def _largest_groups(curves: list[Curves]) -> list[Curves]:
    """Return the curves of the groups with the most rows, in their original order."""
    sizes = sorted((c.positives + c.negatives for c in curves), reverse=True)
    smallest = sizes[min(MAX_CURVES, len(sizes)) - 1]
    return [c for c in curves if c.positives + c.negatives >= smallest][:MAX_CURVES]


def draw_roc(curves: list[Curves]) -> Spec:
    """Draw ROC curves by group; a group without positives or without negatives has no curve."""
    rows = [
        {"group": c.group, "fpr": float(f), "tpr": float(t), "threshold": float(at), "order": i}
        for c in curves
        if c.positives and c.negatives
        for i, (f, t, at) in enumerate(zip(c.fpr, c.tpr, c.thresholds, strict=True))
    ]
    return _fill_chart("roc", rows)


def draw_calibration(curves: list[Curves]) -> Spec:
    """Draw the share of positives by score and group, with intervals where there are any."""
    return _fill_chart(
        "calibration", [{"group": c.group, **p} for c in curves for p in c.calibration]
    )
