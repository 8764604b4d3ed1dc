"""What all figures share: Vega-Lite, data and a grammar, no code. Names are data, never code.

Colours that must work on light and dark paper are the page's own (`currentColor`).
"""

from typing import Any

Spec = dict[str, Any]
INK, ACCENT, STRONG, CALM, GREY = "currentColor", "#0072b2", "#d55e00", "#009e73", "#7f7f7f"
PALETTE = [ACCENT, STRONG, CALM, "#cc79a7", "#e69f00", "#56b4e9", "#8c8c00", GREY, "#a05195",
           "#b04a4a"]  # fmt: skip


def chart(**more: Any) -> Spec:
    return {
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"}, "config": CONFIG, **more,
    }  # fmt: skip


CONFIG: Spec = {
    "background": None,
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {"labelColor": INK, "titleColor": INK, "domainColor": INK, "tickColor": INK,
             "gridColor": INK, "gridOpacity": 0.12, "labelLimit": 150, "labelFontSize": 12,
             "titleFontSize": 12, "titleFontWeight": "normal", "tickCount": 8},
    "legend": {"labelColor": INK, "titleColor": INK, "labelLimit": 160, "orient": "bottom",
               "columns": 3, "title": None},
    "text": {"color": INK, "fontSize": 12},
    "range": {"category": PALETTE},
}  # fmt: skip


def number(field: str, title: str, form: str = ".1f") -> Spec:
    """A line of a tooltip."""
    return {"field": field, "type": "quantitative", "title": title, "format": form}


def word(field: str) -> Spec:
    return {"field": field, "type": "nominal", "title": field}
