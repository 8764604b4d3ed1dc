"""The tables and charts of an audit, made from its summary.

``templates/charts.json`` defines how the charts look. Each chart in it is a Vega-Lite specification
without data that any Vega-Lite editor can open. The data come from the summary of the audit and
from the histograms. Names of groups and sites appear only in the data, never in code. Colors that
must be visible on a light and on a dark background are the text color of the page
(``currentColor``).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np

from fedgft.auditing.conditional import list_strata_tables
from fedgft.auditing.findings import (
    MAX_SITES,
    describe_contributions,
    estimable_metrics,
    explain_site,
    leading_metric,
    rank_sites,
    split_contribution,
)
from fedgft.auditing.next_site_report import list_next_site_tables
from fedgft.auditing.rates import View
from fedgft.auditing.score_samples import sample_scores
from fedgft.auditing.score_tables import list_score_tables
from fedgft.auditing.summary import (
    GapInterval,
    GapSummary,
    GroupRate,
    Number,
    ReferenceComparison,
    Summary,
    ViewSummary,
    estimable_gap,
    gap_interval,
    views_of,
)
from fedgft.auditing.thresholds import Curves, compute_curves, find_exact_edges
from fedgft.auditing.verdicts import format_tolerance, judge_gap, name_all, name_group, rate_name
from fedgft.formatting import (
    DASH,
    MAX_NAMES,
    Figure,
    Table,
    format_interval,
    format_percent,
    format_points,
    group_colors,
)
from fedgft.metrics import CATALOG, get_metric

MAX_SITES_ON_TERMINAL = 10
SHORT_GAP_COLUMNS = (  # of the tables on a terminal, where the verdicts are sentences
    "metric",
    "farthest apart",
    "gap",
    "95% interval",
    "average within sites",
)
SHORT_SITE_COLUMNS = ("site", "rows", "gap at the site", "adds to the overall gap")
MAX_GROUPS_ON_TERMINAL = 6  # with more groups, the terminal shows one rate
WITHIN_NOTE = (
    "Average within sites: the weighted average of the gaps inside the sites (Mantel-Haenszel), "
    "first group minus second."
)
TV_NOTE = (
    "TV (a fraction) and DH (a ratio minus 1): how differently the two groups are spread over the "
    "sites (0: equally). Bound (a fraction): with α the largest gap at a site, the overall gap is "
    "at most α(1 − TV) + TV; of a metric with several conditions, the largest of their bounds."
)
Spec = dict[str, Any]

MAX_BARS = 12  # sites in the waterfall chart
MAX_CURVES = 10  # groups in a figure of curves
MAX_BANDS = 4  # groups in a figure of cumulative curves with bands
MAX_STEPS = 200  # points of a cumulative curve
MAX_CLASSES = 6  # classes with figures of curves
MAX_SELECTED = 4  # groups in the threshold explorer
GAP_COLORS = {"sp": "currentColor", "eop": "currentColor", "fpr": "#7f7f7f", "acc": "#7f7f7f"}
TITLES = {
    "forest": "The gap at every site",
    "waterfall": "How the sites add up to the gap",
    "rates": "Every group",
    "thresholds": "Threshold explorer",
    "roc": "ROC curves",
    "calibration": "Calibration",
    "cumulative": "Score distributions",
}
CAPTIONS = {
    "forest": "Every site's own view of the gap between the two groups that are farthest apart "
    "overall, with 95% intervals. The red row is all sites together; its interval is that of the "
    "table of gaps. Dashed: the tolerance.",
    "next": " The blue row “another site” is what to expect at a site that did not take part: "
    "the average of the sites, and where the gap of such a site would be in 95 of 100 cases.",
    "waterfall": "What each site adds to the overall gap (red) or takes from it (green), measured "
    "from the overall rate of the two groups: a site where both have that rate adds nothing. The "
    "bars end at the gap itself. Amounts are rounded: their sum can be off by 0.1. The table of "
    "sites explains them in words.",
    "rates": "The rate of every group over all sites, with its 95% interval.",
    "thresholds": "What if the threshold were another one, the same for all groups? Move the "
    "slider: the dashed line follows it.",
    "roc": "By group, exact at the dots; between two dots the curve may lie anywhere in the box "
    "they span.",
    "calibration": "By group: of people with such a score, how many are positive. Bars are 95% "
    "intervals.",
    "cumulative": "By group: the share of people with a score below the threshold. The largest "
    "vertical distance of two curves is the largest gap at any threshold; the area between them is "
    "the Wasserstein distance.",
}


def list_tables(summary: Summary, *, short: bool = False) -> Iterator[Table]:
    """Yield the tables of the report, or a `short` selection for a terminal.

    The numbers of a table have one unit: points, percent, or none (ratios and fractions). The
    report begins with the view by all attributes together and has the rates of every view. The
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
            yield choose_columns(_gap_table(summary, view, title), SHORT_GAP_COLUMNS)
        if summary["given"] is not None:
            yield from list_strata_tables(summary["given"], short=True)
        yield _shorten_rates(summary, _rate_table(summary, groups))
        yield choose_columns(_site_table(summary, MAX_SITES_ON_TERMINAL), SHORT_SITE_COLUMNS)
        yield from _threshold_tables(summary)
        return
    for title, view in {groups: summary, **summary["attributes"]}.items():
        yield _gap_table(summary, view, title)
        yield _rate_table(view, title)
    if summary["given"] is not None:
        yield from list_strata_tables(summary["given"])
    yield from _reference_tables(summary)
    yield _site_table(summary, MAX_SITES)
    yield from _place_tables(summary)
    yield from list_next_site_tables(summary)
    yield from _threshold_tables(summary)
    yield from (_ratio_table(view, title) for title, view in views_of(summary).items())
    if len(summary["sites"]) > 1:
        yield _spread_table(summary, groups)
    yield from list_score_tables(summary)


def choose_columns(table: Table, names: Sequence[str]) -> Table:
    """Return the table with these columns only."""
    kept = [table.header.index(name) for name in names]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    stubs = sum(i < table.stubs for i in kept)
    return replace(table, header=tuple(names), rows=rows, stubs=stubs)


def _shorten_rates(summary: Summary, table: Table) -> Table:
    """Return the table of rates for a terminal: of many groups, the first rate alone."""
    groups = len(summary["metrics"]["acc"]["groups"])
    if groups <= MAX_GROUPS_ON_TERMINAL or not table.rows:
        return table
    rows = tuple(row for row in table.rows if row[0] == table.rows[0][0])
    return replace(table, rows=rows, notes=("The other rates are in the report.",))


def _gap_table(summary: Summary, view: ViewSummary, title: str) -> Table:
    """Return the table of the gaps of one view, in points, with one row per metric."""
    header = ("metric", "verdict", "farthest apart", "gap", "95% interval", "tolerance")
    header += ("average within sites",)
    rows = tuple(_gap_row(name, summary, view) for name in view["metrics"])
    notes = (WITHIN_NOTE,) if len(summary["sites"]) > 1 else ()
    if any("*" in row[3] for row in rows):
        notes += ("*: among the groups that have a rate; over all groups it is not estimable.",)
    return Table(f"Gaps by {title}, points", header, rows, 3, notes)


def _gap_row(name: str, summary: Summary, view: ViewSummary) -> tuple[str, ...]:
    """Return the cells of one metric; a star marks a gap that covers only some of the groups."""
    found = view["metrics"][name]
    numbers = estimable_gap(found)
    gap = "not estimable"
    interval = DASH
    if numbers is not None:
        gap = format_points(numbers["gap"]) + ("*" if found["gap"] is None else "")
        interval = format_interval(numbers["low"], numbers["high"])
    tolerance = summary["tolerance"][name]
    return (
        CATALOG[name].title,
        judge_gap(found, tolerance),
        " / ".join(found["pair"] or (DASH,)),
        gap,
        interval,
        f"{100 * tolerance:.4g}",
        _format_gap_cell(view["within"][name]),
    )


def _rate_table(view: ViewSummary, title: str) -> Table:
    """Return the table of the rates of one view, in percent: a row per rate and group.

    A metric with several conditions has no single rate and is left out. With more than two classes
    all metrics have several conditions; then the table shows the rates under the condition of the
    gap.
    """
    metrics = view["metrics"]
    single = [name for name, found in metrics.items() if "conditions" not in found]
    rows = []
    for name in single or metrics:
        condition = "" if name in single else f" ({metrics[name]['condition']})"
        for group, rate in metrics[name]["groups"].items():
            rows.append((rate_name(name) + condition, group, *_rate_cells(rate)))
    header = ("rate", "group", "%", "95% interval", "rows")
    notes = ("Rows: those that the rate is taken of, such as those with a positive outcome.",)
    return Table(f"Rates by {title}, percent", header, tuple(rows), 2, notes)


def _rate_cells(found: GroupRate) -> tuple[str, str, str]:
    """Return a rate in percent, its interval, and the number of its rows."""
    rate = format_points(found["rate"], unknown="not estimable")
    limits = format_interval(found["low"], found["high"])
    few = "too few rows" if found["low"] is None and found["rate"] is not None else limits
    return rate, few, f"{found['n']:,.0f}"


def _ratio_table(view: ViewSummary, title: str) -> Table:
    """Return the table of the smallest ratios of rates in one view."""
    rows = []
    for name, found in view["metrics"].items():
        numbers = estimable_gap(found)
        cells = (DASH, DASH) if numbers is None else _ratio_cells(numbers)
        rows.append((CATALOG[name].title, " / ".join(found["pair"] or (DASH,)), *cells))
    header = ("metric", "farthest apart", "ratio", "95% interval")
    notes = ("The lower rate divided by the higher one. The 80% rule asks for 0.80 or more.",)
    return Table(f"Ratios by {title}", header, tuple(rows), 2, notes)


def _ratio_cells(found: GapSummary | ReferenceComparison) -> tuple[str, str]:
    """Return a ratio and its interval."""
    ratio = DASH if found["ratio"] is None else f"{found['ratio']:.2f}"
    return ratio, format_interval(found["ratio_low"], found["ratio_high"], scale=1, digits=2)


def _spread_table(view: ViewSummary, title: str) -> Table:
    """Return the table that says how differently the groups are spread over the sites.

    The heterogeneity DH of a proper metric is infinite if no site has both groups. A metric that is
    not proper has no DH.
    """
    rows = []
    for name in view["metrics"]:
        tv = view["tv"][name]
        heterogeneity = view["heterogeneity"][name]
        infinite = heterogeneity is None and tv is not None and CATALOG[name].proper()
        cells = (tv, view["bound"][name])
        dh = "∞" if infinite else _format_short(heterogeneity)
        rows.append((CATALOG[name].title, *map(_format_short, cells), dh))
    header = ("metric", "TV", "bound", "DH")
    return Table(f"Spread over the sites by {title}", header, tuple(rows), 1, (TV_NOTE,))


def _reference_tables(summary: Summary) -> Iterator[Table]:
    """Yield two tables for each view with a reference group: differences and ratios."""
    for title, view in views_of(summary).items():
        found = [
            (CATALOG[name].title, group, each)
            for name, metric in view["metrics"].items()
            for group, each in metric.get("against_reference", {}).items()
        ]
        if not found:
            continue
        reference = next(iter(view["metrics"].values())).get("reference")
        caption = f"{title}: every group against {reference}"
        notes = ("Each interval holds for itself.",)
        rows = tuple(
            (
                metric,
                group,
                format_points(each["difference"]),
                format_interval(each["low"], each["high"]),
            )
            for metric, group, each in found
        )
        header = ("metric", "group", "difference", "95% interval")
        yield Table(f"{caption}, points", header, rows, 2, notes)
        rows = tuple((metric, group, *_ratio_cells(each)) for metric, group, each in found)
        header = ("metric", "group", "ratio", "95% interval")
        yield Table(f"{caption}, ratios", header, rows, 2, notes)


def _site_table(summary: Summary, max_sites: int) -> Table:
    """Return the table of the sites with the largest contributions to the leading metric's gap.

    The notes below the table say in words how the sites add up to the gap.
    """
    metric = leading_metric(summary)
    sites = rank_sites(summary, metric)
    rows = []
    for name in sites[:max_sites]:
        site = summary["sites"][name]
        added = format_points(site["contribution"][metric])
        parts = split_contribution(site, metric)
        shown = (DASH, DASH) if parts is None else map(format_points, parts)
        local = _format_gap_cell(site["local"][metric])
        rows.append((name, f"{site['n']:,.0f}", local, added, *shown))
    header = ("site", "rows", "gap at the site", "adds to the overall gap")
    header += ("by its own gap", "by its mix of groups")
    pair = " minus ".join(map(name_group, summary["metrics"][metric]["pair"] or ()))
    notes = [
        f"{CATALOG[metric].title.capitalize()}, {pair or DASH}. Rows: those with a recorded group.",
        *describe_contributions(summary, metric),
        *(explain_site(summary, metric, name) for name in sites[:MAX_NAMES] if len(sites) > 1),
    ]
    if not max_sites < MAX_SITES:
        notes.append("Numbers are rounded; sums and differences can be off by 0.1.")
    if len(sites) > max_sites:
        notes.append(f"The {max_sites} that move the gap most, of {len(sites):,} sites.")
    return Table("Sites, points", header, tuple(rows), 1, tuple(filter(None, notes)))


def _place_tables(summary: Summary) -> Iterator[Table]:
    """Yield two tables of several sites: where the groups are, and the largest gap at each site.

    The largest gap at a site may be between two other groups than the largest gap overall.
    """
    metric = leading_metric(summary)
    pair = summary["metrics"][metric]["pair"]
    sites = rank_sites(summary, metric)[:MAX_SITES]
    if len(summary["sites"]) < 2 or pair is None:
        return
    rate = rate_name(metric)
    header = ("site", *(f"of {name_all(g)}" for g in pair))
    header += tuple(f"{rate} of {name_group(g)}" for g in pair)
    rows = []
    for name in sites:
        site = summary["sites"][name]
        numbers = (*site["pair_shares"][metric], *site["pair_rates"][metric])
        rows.append((name, *(format_points(x, unknown="no rows") for x in numbers)))
    yield Table("Where the groups are, percent", header, tuple(rows), 1)
    known = estimable_metrics(summary)
    groups = summary["metrics"][metric]["groups"]
    rows = []
    for name in sites:
        gaps = (summary["sites"][name]["gap"][n] for n in known)
        rows.append((name, *(format_points(gap, unknown="not estimable") for gap in gaps)))
    header = ("site", *(CATALOG[n].title for n in known))
    notes = ("Between any two groups of the site.",) if len(groups) > 2 else ()
    yield Table("Largest gap at each site, points", header, tuple(rows), 1, notes)


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


def _format_gap_cell(found: GapInterval) -> str:
    """Return ``12.3 (9.8 to 15.4)``, in points."""
    if found["gap"] is None:
        return "not estimable"
    limits = format_interval(found["low"], found["high"])
    return f"{format_points(found['gap'])} ({'no interval' if limits == DASH else limits})"


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
        caption = _write_caption(kind, view, summary)
        heading = TITLES[kind] + title
        described = {"description": f"{heading}. {caption}"} | spec  # for screen readers
        return Figure(kind + number, heading, caption, described)

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
        groups = view.groups
        threshold = summary["threshold"]
        roc = draw_roc(curves, groups=groups, threshold=threshold)
        figures.append(figure("roc", roc, number, title))
        calibration = draw_calibration(curves, groups=groups)
        figures.append(figure("calibration", calibration, number, title))
        figures.append(figure("cumulative", draw_cumulative(view, s), number, title))
    return figures


def _write_caption(kind: str, view: View, summary: Summary) -> str:
    """Return the caption of a figure; it says so if the figure omits sites, groups or classes."""
    sites = len(summary["sites"])
    classes = len(view.spec.classes)
    caption = CAPTIONS[kind]
    if kind == "forest" and any(_next_site_rows(m, summary) for m in summary["metrics"]):
        caption += CAPTIONS["next"]
    of_curves = kind in ("roc", "calibration", "cumulative")
    if summary["threshold"] is not None and kind == "thresholds":
        caption += " The solid line is the threshold of the decisions in this audit."
    if summary["threshold"] is not None and kind == "roc":
        caption += " The large dots are the threshold of the decisions in this audit."
    if kind == "cumulative" and len(view.groups) <= MAX_BANDS and not view.noise.any():
        caption += " The band of a group contains its whole true curve with 95%."
    if kind in ("thresholds", "calibration"):
        caption += f" {_describe_exactness(kind, view)}"
    if kind == "forest" and sites > MAX_SITES:
        caption += f" Shown: the {MAX_SITES} that move the gap most, of {sites:,} sites."
    if of_curves and len(view.groups) > MAX_CURVES:
        caption += f" The {MAX_CURVES} largest of {len(view.groups)} groups."
    if of_curves and classes > MAX_CLASSES:
        caption += f" There is a figure for the first {MAX_CLASSES} of {classes} classes."
    if (of_curves or kind == "thresholds") and view.noise.any():
        caption = caption.replace("exact", "as exact as the noise on the counts lets them be")
    return caption


def _describe_exactness(kind: str, view: View) -> str:
    """Return where the values of a figure are exact: a site may have merged ranges of scores."""
    bins = view.spec.bins
    edges = np.flatnonzero(find_exact_edges(view))
    if kind == "calibration":
        known = f"Scores are known to ± {0.5 / bins:g}"
        merged = len(edges) <= bins
        return f"{known}, and less exactly where ranges with few people were merged." * merged or (
            f"{known}."
        )
    if len(edges) > bins:
        return f"Values are exact at every step of the slider, {1 / bins:g}."
    return (
        "Values are exact where no site merged ranges of scores because few people were in them; "
        f"elsewhere they are interpolated, over steps of up to {np.diff(edges).max() / bins:.2g}."
    )


def fill_chart(kind: str, rows: list[Spec]) -> Spec:
    """Return a chart of templates/charts.json with `rows` as its data."""
    charts = json.loads(files("fedgft").joinpath("templates/charts.json").read_text("utf-8"))
    return charts[kind] | {"config": charts["config"], "data": {"values": rows}}


def _fill_chart_by_metric(kind: str, rows: list[Spec], summary: Summary) -> Spec:
    """Return a chart with one horizontal line per name and a menu of metrics.

    The title of the chart names the chosen metric, so that a printed page says it, too.

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
    spec = fill_chart(kind, rows)
    known = [name for name in CATALOG if summary["metrics"][name]["pair"]] or list(CATALOG)
    menu = spec["params"][0]
    menu["value"] = leading_metric(summary)
    menu["bind"]["options"] = known
    titles = {n: rate_name(n) if kind == "rates" else CATALOG[n].title for n in known}
    by_metric = {
        "metric_title": {n: titles[n].capitalize() for n in known},
        "tolerance": {n: 100 * summary["tolerance"][n] for n in known},
    }
    menu["bind"]["labels"] = [titles[name] for name in known]
    for param in spec["params"][1:]:
        param["expr"] = f"{json.dumps(by_metric[param['name']])}[metric]"
    names = list(dict.fromkeys(row["name"] for row in rows))
    spec["height"] = 24 * max(1, len(names))
    for layer in spec["layer"]:
        if "y" in layer["encoding"]:
            layer["encoding"]["y"]["sort"] = names
    return spec


def _color_groups(spec: Spec, field: str, groups: Iterable[str]) -> Spec:
    """Give the groups of a chart their colors; `field` holds the group in the data."""
    colors = group_colors(groups)
    scale = {"domain": list(colors), "range": list(colors.values())}
    for layer in spec["layer"]:
        color = layer["encoding"].get("color")
        if color is not None and color.get("field") == field:
            color["scale"] = scale
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
        numbers = estimable_gap(found)  # with the limits of the table of gaps, for all pairs
        limits = (None, None) if numbers is None else (numbers["low"], numbers["high"])
        total = gap_interval(found["signed_gap"], *limits)
        n = sum(found["groups"][group]["n"] for group in found["pair"])
        rows.append(_interval_row(metric, total_name, n, "all", total))
        rows += _next_site_rows(metric, summary)
    return _fill_chart_by_metric("forest", rows, summary)


def _next_site_rows(metric: str, summary: Summary) -> list[Spec]:
    """Return the row of the forest chart for a site that did not take part, if it is estimable."""
    found = summary.get("next_site", {}).get("gaps", {}).get(metric)
    if found is None or found["low"] is None:
        return []
    name = _total_name("another site", summary)
    numbers = gap_interval(found["mean"], found["low"], found["high"])
    return [_interval_row(metric, name, 0, "next", numbers)]


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
        row["label"] = format_points(amount / 100, sign="+")  # never -0.0
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
    spec = _fill_chart_by_metric("rates", rows, summary)
    return _color_groups(spec, "name", summary["metrics"]["acc"]["groups"])


def draw_thresholds(summary: Summary, sweep: Mapping[str, Any]) -> Spec:
    """Draw rates and gaps over all thresholds, and as bars at the threshold of a slider.

    The slider starts at the threshold of the measurement, or at 0.5 if it had none. `sweep` is the
    key of that name in the summary.
    """
    colors = group_colors(sweep["selected"])
    series = [("accuracy", "percent", "currentColor", sweep["accuracy"])]
    for group, rates in list(sweep["selected"].items())[:MAX_SELECTED]:
        title = f"selection rate of {name_group(group[:40])}"
        series.append((title, "percent", colors[group], rates))
    for name, color in GAP_COLORS.items():
        title = f"gap in {rate_name(name)}"
        series.append((title, "points", color, sweep["gaps"][name]))
    rows = [
        {
            "threshold": round(threshold, 6),
            "what": what,
            "unit": unit,
            "label": f"{what}, {unit}",
            "value": 100 * value,
        }
        for what, unit, _, values in series
        for threshold, value in zip(sweep["thresholds"], values, strict=True)
        if value is not None
    ]
    spec = fill_chart("thresholds", rows)
    step = 1 / len(sweep["thresholds"])
    now = 0.5 if summary["threshold"] is None else summary["threshold"]
    slider, half_step, in_use, in_use_name, tolerance = spec["params"]
    limits = {summary["tolerance"][name] for name in GAP_COLORS}
    if len(limits) == 1:
        limit = limits.pop()
        tolerance["value"] = 100 * limit
        spec["vconcat"][1]["title"] = f"Gaps (level line: the tolerance, {format_tolerance(limit)})"
    else:  # no single line is true of all gaps
        spec["vconcat"][1]["layer"].pop()
    slider["value"] = min(round(now / step) * step, 1 - step)
    slider["bind"] |= {"max": 1 - step, "step": step}
    half_step["value"] = step / 2
    in_use["value"] = now
    in_use_name["value"] = f"decided at {now:g}"
    for part, unit in zip(spec["vconcat"], ("percent", "points", None), strict=True):
        shown = {what: color for what, of, color, _ in series if unit in (of, None)}
        _color_series(part, shown)
        if summary["threshold"] is None and unit is not None:
            del part["layer"][1:3]  # no threshold is in use: the data contain the decisions
    return spec


def _color_series(part: Spec, colors: Mapping[str, str]) -> None:
    """Give the series of one part of the threshold explorer their colors and dashes."""
    dashes = [[], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [1, 3], [10, 2]]
    styles = {
        "color": {"domain": list(colors), "range": list(colors.values())},
        "strokeDash": {
            "domain": list(colors),
            "range": [dashes[i % len(dashes)] for i in range(len(colors))],
        },
    }
    for layer in part["layer"]:
        for channel, scale in styles.items():
            if channel in layer["encoding"]:
                layer["encoding"][channel]["scale"] = scale


def _largest_groups(curves: list[Curves]) -> list[Curves]:
    """Return the curves of the groups with the most rows, in their original order."""
    sizes = sorted((c.positives + c.negatives for c in curves), reverse=True)
    smallest = sizes[min(MAX_CURVES, len(sizes)) - 1]
    return [c for c in curves if c.positives + c.negatives >= smallest][:MAX_CURVES]


def draw_roc(curves: list[Curves], *, groups: Iterable[str], threshold: float | None) -> Spec:
    """Draw ROC curves by group; a group without positives or without negatives has no curve.

    Parameters
    ----------
    curves
        The curves to draw.
    groups
        All groups of the audit: colors go by group.
    threshold
        The threshold of the decisions, which is marked on every curve; None: there is none.
    """
    rows = []
    for c in curves:
        if not c.positives or not c.negatives:
            continue
        distance = np.abs(c.thresholds - (-1.0 if threshold is None else threshold))
        nearest = int(distance.argmin())
        known = threshold is not None and distance[nearest] <= 0.5 / (len(c.thresholds) - 1)
        columns = (c.fpr, c.tpr, c.thresholds, c.exact)
        for i, (f, t, at, exact) in enumerate(zip(*columns, strict=True)):
            point = {"group": c.group, "fpr": float(f), "tpr": float(t), "threshold": float(at)}
            point |= {"order": i, "exact": bool(exact), "in_use": known and i == nearest}
            rows.append(point)
    return _color_groups(fill_chart("roc", rows), "group", groups)


def draw_calibration(curves: list[Curves], *, groups: Iterable[str]) -> Spec:
    """Draw the share of positives by score and group, with intervals where there are any.

    The colors go by group, of all `groups` of the audit.
    """
    rows = [{"group": c.group, **p} for c in curves for p in c.calibration]
    return _color_groups(fill_chart("calibration", rows), "group", groups)


def draw_cumulative(view: View, score: int = 0) -> Spec:
    """Draw the share of people below every threshold, by group, with bands.

    The bands are those of Dvoretzky, Kiefer, Wolfowitz and Massart; they include where the people
    of merged bins may be. There are none of more than 4 groups, with noise on the counts, or with
    too few rows.

    Parameters
    ----------
    view
        The groups, with histograms.
    score
        The position of the class among the classes with scores.
    """
    samples = sample_scores(view, score)
    bins = samples.counts.shape[-1]
    edges = np.unique(np.linspace(0, bins, min(bins, MAX_STEPS) + 1).round().astype(int))
    rows = []
    for g in samples.largest(MAX_CURVES):
        if not samples.estimable[g]:
            continue
        value, most, least = samples.below[:, g, edges]
        row: Spec = {"group": samples.groups[g], "low": None, "high": None}
        known = samples.enough[g] and len(view.groups) <= MAX_BANDS and not samples.is_noisy
        half = math.sqrt(math.log(2 / 0.05) / 2 / samples.effective[g]) if known else 0.0
        for i, edge in enumerate(edges):
            point = row | {"threshold": float(edge / bins), "share": float(np.clip(value[i], 0, 1))}
            if known:
                point["low"] = max(float(least[i]) - half, 0.0)
                point["high"] = min(float(most[i]) + half, 1.0)
            rows.append(point)
    return _color_groups(fill_chart("cumulative", rows), "group", view.groups)
