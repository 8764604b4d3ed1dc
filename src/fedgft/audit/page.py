"""The report: one HTML file that needs no network and no other file.

Text is escaped by the template. The page's own policy allows the one script it brings and no
other, no connection, and no code made from text: even a name that escaped would run nothing.
"""

import base64
import hashlib
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from fedgft.audit.charts import Figure, charts
from fedgft.audit.tabulated import tables
from fedgft.audit.text import MARK, about
from fedgft.audit.verdict import verdict
from fedgft.layout import SIGNS, Table, render

if TYPE_CHECKING:
    from fedgft.audit.summary import Audit

# Draws every specification in the page; `ast` has Vega read expressions instead of running them.
START = """
for (const holder of document.querySelectorAll("[data-chart]")) {
  const spec = JSON.parse(document.getElementById(holder.dataset.chart).textContent);
  vegaEmbed(holder, spec, {actions: false, renderer: "svg", ast: true, mode: "vega-lite"})
    .then(() => { holder.dataset.drawn = "yes"; });
}
"""
LEGEND = (
    "no gap beyond chance, which does not prove there is none",
    "a gap beyond chance",
    "cannot be said",
)


def html(audit: "Audit") -> str:
    summary = audit.to_dict()
    return page(
        title="Fairness audit",
        lead=about(summary),
        said=verdict(summary),
        warnings=summary["warnings"],
        figures=charts(audit),
        tables=list(tables(summary)),
        foot=f"Intervals: {summary['interval']}; 95% throughout.",
    )


def page(
    *,
    title: str,
    lead: str,
    said: list[tuple[bool | None, str]],
    warnings: list[str],
    figures: list[Figure],
    tables: list[Table],
    foot: str,
    legend: tuple[str, str, str] = LEGEND,
    mark: str = MARK,
) -> str:
    script = _script() if figures else ""
    return render(
        "audit.html", title=title, lead=lead, said=said, signs=SIGNS, warnings=warnings,
        figures=figures, tables=tables, foot=foot, legend=legend, mark=mark, script=script,
        allowed=_digest(script), version=version("fedgft"),
    )  # fmt: skip


@cache  # a second and more, and always the same
def _script() -> str:
    """Vega, Vega-Lite, Vega-Embed and the lines above, as the package that brings them makes it."""
    from vl_convert import javascript_bundle

    return javascript_bundle(START).replace("</script", "<\\/script")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
