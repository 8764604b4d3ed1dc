"""The figures of an audit. Those of one metric have a menu with all of them."""

from dataclasses import dataclass, replace
from typing import Any

from fedgft.audit.grammar import ACCENT, CALM, GREY, INK, STRONG, Spec, chart, number, word
from fedgft.audit.score_charts import MOST_GROUPS, calibration, roc, thresholds
from fedgft.audit.summary import Audit
from fedgft.audit.tabulated import FEW_SITES_SHOWN, largest_sites
from fedgft.audit.verdict import leading
from fedgft.metrics import CATALOG

Plain = dict[str, Any]
MOST_BARS, MOST_CLASSES = 12, 6
ALL = "datum.kind === 'all'"
UNKNOWN = "  not estimable: a group has no rows here"
FIGURES = {  # title, caption
    "forest": (
        "The gap at every site",
        "Every site's own view of the gap between the two groups that are farthest apart overall, "
        "with 95% intervals. The last row is all sites together.",
    ),
    "waterfall": (
        "Who drives the gap",
        "What each site adds to the global gap or takes from it, measured from the overall rate of "
        "the two groups: a site where both have that rate adds nothing. The bars end at the gap "
        "itself.",
    ),
    "rates": (
        "Every group",
        "The rate of every group over all sites, with its 95% interval.",
    ),
    "thresholds": (
        "Threshold explorer",
        "What if the threshold were another one, the same for all groups? Move the slider. Values "
        "are exact at the edges of the histogram's bins, every {step:g}.",
    ),
    "roc": (
        "ROC curves",
        "By group, exact at the dots; between two dots the curve may lie anywhere in the box they "
        "span.",
    ),
    "calibration": (
        "Calibration",
        "By group: of people with such a score, how many are positive. Scores are known to "
        "± {half:g}; bars are 95% intervals.",
    ),
}


@dataclass(frozen=True)
class Figure:
    """A Vega-Lite specification, and the words around it."""

    name: str
    title: str
    caption: str
    spec: Spec


def charts(audit: Audit) -> list[Figure]:
    """Every figure there is something to show in."""
    summary, seen = audit.to_dict(), audit.view
    found: dict[str, Spec | None] = {
        "forest": forest(summary),
        "waterfall": waterfall(summary),
        "rates": rates(summary),
        "thresholds": thresholds(seen, audit.pooled.question.threshold),
    }
    made = [_figure(key, spec, audit) for key, spec in found.items() if spec is not None]
    if not seen.complete:
        return made
    classes = [1] if len(seen.classes) == 2 else list(range(len(seen.classes)))
    for s, c in enumerate(classes[:MOST_CLASSES]):
        end = "" if len(classes) == 1 else f", {seen.classes[c]} against the rest"
        for key, draw in (("roc", roc), ("calibration", calibration)):
            figure = _figure(key, draw(seen, s), audit)
            made.append(replace(figure, name=f"{key}{s or ''}", title=figure.title + end))
    return made


def _figure(key: str, spec: Spec, audit: Audit) -> Figure:
    title, caption = FIGURES[key]
    step = 1 / audit.pooled.question.bins
    caption = caption.format(step=step, half=step / 2)
    caption += _left_out(key, audit)
    if key in ("thresholds", "roc", "calibration") and audit.view.noise.any():
        caption = caption.replace("exact", "as exact as the noise on the counts lets them be")
    return Figure(key, title, caption, spec)


def _left_out(key: str, audit: Audit) -> str:
    """A figure that shows some of many says so."""
    sites, seen, said = len(audit.pooled.sites), audit.view, ""
    if key == "forest" and sites > FEW_SITES_SHOWN:
        said += f" Shown: the {FEW_SITES_SHOWN} that move the gap most, of {sites:,} sites."
    if key in ("roc", "calibration") and len(seen.names) > MOST_GROUPS:
        said += f" The {MOST_GROUPS} largest of {len(seen.names)} groups."
    if key in ("roc", "calibration") and len(seen.classes) > MOST_CLASSES:
        said += f" There is a figure for the first {MOST_CLASSES} of {len(seen.classes)} classes."
    return said


def _menu(summary: Plain) -> tuple[list[Spec], list[Spec]]:
    """A menu of metrics, and the filter that follows it."""
    names = [name for name in CATALOG if summary["metrics"][name]["pair"]] or list(CATALOG)
    params = [{
        "name": "metric", "value": leading(summary),
        "bind": {"input": "select", "options": names, "name": "Metric: ",
                 "labels": [CATALOG[name].title for name in names]},
    }]  # fmt: skip
    return params, [{"filter": "datum.metric === metric"}]


def _height(rows: list[Plain]) -> int:
    return 24 * max(1, len({row["name"] for row in rows}))


def _by_name(rows: list[Plain]) -> Spec:
    """In the order of the rows, whatever each layer leaves out."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    return {"field": "name", "type": "nominal", "sort": names, "title": None}


def _total(label: str, summary: Plain) -> str:
    """A row that is no site, told apart from a site that is called the same."""
    return label if label not in summary["sites"] else f"({label})"


def forest(summary: Plain) -> Spec:
    rows = []
    for key, found in summary["metrics"].items():
        if not found["pair"]:
            continue
        for site in largest_sites(summary, leading(summary)):
            local, n = summary["sites"][site]["local"][key], summary["sites"][site]["n"]
            rows.append(_row(key, site, (local["gap"], local["low"], local["high"]), n, "site"))
        ends = (found["signed_gap"], found["signed_low"], found["signed_high"])
        n = sum(found["groups"][g]["n"] for g in found["pair"])
        rows.append(_row(key, _total("all sites", summary), ends, n, "all"))
    params, filters = _menu(summary)
    return chart(height=_height(rows), params=params, data={"values": rows}, transform=filters,
                 layer=_forest_layers(_by_name(rows)))  # fmt: skip


def _forest_layers(y: Spec) -> list[Spec]:
    colour = {"condition": {"test": ALL, "value": STRONG}, "value": ACCENT}
    x = {"field": "gap", "type": "quantitative", "title": "gap, percentage points"}
    return [
        {"mark": {"type": "rule", "color": INK, "opacity": 0.5},
         "data": {"values": [{}]}, "transform": [], "encoding": {"x": {"datum": 0}}},
        {"mark": {"type": "rule", "strokeWidth": 2},
         "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
         "encoding": {"y": y, "x": x | {"field": "low"}, "x2": {"field": "high"},
                      "color": colour}},
        {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
         "transform": [{"filter": "isValid(datum.gap)"}],
         "encoding": {"y": y, "x": x, "color": colour, "tooltip": TOOLTIP}},
        {"mark": {"type": "text", "align": "left", "fontStyle": "italic", "opacity": 0.8},
         "transform": [{"filter": "!isValid(datum.gap)"}],
         "encoding": {"y": y, "x": {"datum": 0}, "text": {"value": UNKNOWN}}},
    ]  # fmt: skip


TOOLTIP = [word("name"), number("gap", "value"), number("low", "95% from"), number("high", "to"),
           number("n", "rows", ",.0f")]  # fmt: skip


Ends = tuple[float | None, float | None, float | None]


def _row(metric: str, name: str, ends: Ends, n: float, kind: str) -> Plain:
    gap, low, high = (None if x is None else 100 * x for x in ends)
    return {"metric": metric, "name": name, "gap": gap, "low": low, "high": high, "n": n,
            "kind": kind}  # fmt: skip


def waterfall(summary: Plain) -> Spec:
    rows = []
    for key, found in summary["metrics"].items():
        if found["pair"]:
            rows += _steps(key, summary, found["signed_gap"])
    params, filters = _menu(summary)
    y = _by_name(rows)
    down = {"test": "datum.amount < 0", "value": CALM}
    colour = {"condition": [{"test": ALL, "value": GREY}, down], "value": STRONG}
    return chart(
        height=_height(rows), params=params, data={"values": rows}, transform=filters,
        layer=[
            {"mark": {"type": "bar", "height": 14},
             "encoding": {"y": y, "x": {"field": "start", "type": "quantitative",
                                        "title": "percentage points"},
                          "x2": {"field": "end"}, "color": colour,
                          "tooltip": [word("name"), number("amount", "adds, points", "+.2f")]}},
            {"mark": {"type": "text", "align": "left", "dx": 4},
             "encoding": {"y": y, "x": {"field": "right", "type": "quantitative"},
                          "text": {"field": "amount", "type": "quantitative", "format": "+.1f"}}},
        ],
    )  # fmt: skip


def _steps(name: str, summary: Plain, total: float) -> list[Plain]:
    """From nothing to the gap, the sites that matter most first, all others as one step."""
    first = largest_sites(summary, name, MOST_BARS)
    steps = [(site, summary["sites"][site]["contribution"][name] or 0.0) for site in first]
    rest = len(summary["sites"]) - len(first)
    if rest:
        steps.append((f"{rest:,} other sites", total - sum(amount for _, amount in steps)))
    at, out = 0.0, []
    for site, amount in steps:
        out.append(_step(name, site, at, at + amount, amount, "site"))
        at += amount
    return [*out, _step(name, _total("the gap", summary), 0.0, total, total, "all")]


def _step(metric: str, site: str, start: float, end: float, amount: float, kind: str) -> Plain:
    start, end, amount = (round(100 * x, 9) + 0.0 for x in (start, end, amount))  # no -0.0
    return {"metric": metric, "name": site, "start": start, "end": end, "right": max(start, end),
            "amount": amount, "kind": kind}  # fmt: skip


def rates(summary: Plain) -> Spec:
    rows = [
        _row(key, group, (r["rate"], r["low"], r["high"]), r["n"], "group")
        | {"said": "" if r["rate"] is not None else f"  not estimable (n={r['n']:,.0f})"}
        for key, found in summary["metrics"].items()
        for group, r in found["groups"].items()
    ]
    params, filters = _menu(summary)
    y = _by_name(rows)
    x = {"field": "gap", "type": "quantitative", "title": "rate, per cent",
         "scale": {"domain": [0, 100]}}  # fmt: skip
    return chart(
        height=_height(rows), params=params, data={"values": rows}, transform=filters,
        layer=[
            {"mark": {"type": "bar", "height": 12, "color": ACCENT, "opacity": 0.45},
             "encoding": {"y": y, "x": x, "tooltip": TOOLTIP}},
            {"mark": {"type": "rule", "color": INK, "strokeWidth": 1.5},
             "transform": [{"filter": "isValid(datum.low)"}],
             "encoding": {"y": y, "x": x | {"field": "low"}, "x2": {"field": "high"}}},
            {"mark": {"type": "text", "align": "left", "fontStyle": "italic"},
             "encoding": {"y": y, "x": {"datum": 0}, "text": {"field": "said"}}},
        ],
    )  # fmt: skip
