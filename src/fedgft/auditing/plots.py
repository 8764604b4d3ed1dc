"""Figures of an audit, drawn by matplotlib without its global state.

A filled mark is a value with its 95% interval, and a hollow mark is a value without one: there are
too few rows. A square is a gap between those groups that have a rate.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedgft.auditing.audit_results import Estimate, Rate
from fedgft.auditing.findings import rank_sites
from fedgft.auditing.summary import estimable_gap
from fedgft.formatting import group_colors, printable

if TYPE_CHECKING:
    from fedgft.auditing.report import Audit

RED = "#b04a4a"  # the gap over all sites, as in the report; no group among the first nine has it
DARK = "#4d4d4d"
BY_CHANCE = {"color": "#808080", "lw": 1.5, "ls": (0, (2, 1))}
DOT = {"color": DARK, "marker": "o", "ms": 7, "mec": DARK, "mew": 1.6}
LEGEND: dict[str, dict[str, Any]] = {
    "value and 95% interval": DOT | {"lw": 2},
    "among the groups that have a rate": DOT | {"marker": "s", "lw": 2},
    "too few rows for an interval": DOT | {"mfc": "white", "lw": 0},
    "no upper limit": DOT | {"marker": "$\\rightarrow$", "ms": 12, "mew": 0.6, "lw": 0},
    "noise floor": BY_CHANCE,
}
"The marks of the figures by what they mean."
GRID = {"color": "#e6e6e6", "lw": 0.8}
MAX_LINES = 30  # groups or sites in a panel
MAX_NAME = 26  # most characters of the name of a group or a site
MAX_PAIRED = 20  # the same where two names stand side by side
LINE_HEIGHT = 0.32  # inches for a group or a site


class NotebookFigure(Figure):
    """A figure that every notebook shows, without matplotlib's inline backend."""

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png", dpi=80)
        return picture.getvalue()


def plot_gaps(audit: "Audit") -> Figure:
    """Return a figure of the gaps of all metrics, with intervals and noise floors."""
    gaps = list(audit.gaps.values())
    figure = NotebookFigure(figsize=(8, 1.7 + 0.55 * len(gaps)), layout="constrained")
    axis = figure.subplots()
    labels = []
    shown = []
    for place, gap in enumerate(gaps):
        pair = "" if gap.pair is None else f"\n{_join_pair(gap.pair, '/')}"
        labels.append(gap.title + pair)
        estimate = gap.among_estimable or Estimate(gap.value, gap.low, gap.high)
        marker = "o" if gap.among_estimable is None else "s"
        _draw_estimate(axis, place, estimate, DARK, marker=marker)
        shown += _list_marks(estimate, marker)
        if gap.noise_floor is not None:
            floor = 100 * gap.noise_floor
            axis.vlines(floor, place - 0.32, place + 0.32, **BY_CHANCE)
            shown.append("noise floor")
    _label_lines(axis, labels)
    axis.set_xlabel("largest gap between two groups, points")
    axis.set_xlim(left=0)
    rows = audit.summary["rows"]["counted"]
    sites = len(audit.sites)
    about = f"{rows:,.0f} rows of {sites:,} site{'s' * (sites != 1)}"
    _set_title(figure, f"Gaps by {_cut(audit.summary['groups'], 40)}\n{about}")
    _add_legend(figure, shown)
    return figure


def plot_metric(audit: "Audit", metric: str) -> Figure:
    """Return a figure of the rates of all groups and, if there are several sites, of their gaps."""
    gap = audit.gaps[metric]
    groups = _choose_groups(audit.rates[metric], gap.pair or ())
    sites = rank_sites(audit.summary, metric)[:MAX_LINES] if len(audit.sites) > 1 else []
    lines = max(len(groups), len(sites) + 1)
    figure = NotebookFigure(
        figsize=(12 if sites else 7, 2 + LINE_HEIGHT * lines), layout="constrained"
    )
    axes = figure.subplots(1, 2 if sites else 1, squeeze=False)[0]
    shown = _draw_rates(axes[0], audit, metric, groups)
    title = f"{gap.title.capitalize()} by {_cut(audit.summary['groups'], 40)}"
    title += f"\n{_cut(gap.condition, 40)}"
    if sites:
        shown += _draw_sites(axes[1], audit, metric, sites)
        if gap.pair is not None:
            title += f"; gaps of sites: {_join_pair(gap.pair, 'minus')}"
    for axis in axes:
        axis.set_ylim(lines - 0.4, -0.6)
    _set_title(figure, title)
    _add_legend(figure, shown)
    return figure


def _draw_rates(axis: Any, audit: "Audit", metric: str, groups: Sequence[str]) -> list[str]:
    """Draw the rates of these groups; return the kinds of marks that occur."""
    rates = audit.rates[metric]
    marks = []
    colors = group_colors(rates)
    for place, group in enumerate(groups):
        estimate = Estimate(rates[group].value, rates[group].low, rates[group].high)
        _draw_estimate(axis, place, estimate, colors[group])
        marks += _list_marks(estimate, "o")
    _label_lines(axis, [f"{_cut(group)}\u2002n={rates[group].rows:,.0f}" for group in groups])
    some = "" if len(groups) == len(rates) else f" ({len(groups)} of {len(rates):,} groups)"
    axis.set_xlabel(f"rate, %{some}")
    axis.set_xlim(left=0)
    return marks


def _choose_groups(rates: Mapping[str, Rate], pair: Sequence[str]) -> list[str]:
    """Return the groups to show, in their order: the pair of the gap, and those with most rows."""
    ranked = sorted(rates, key=lambda group: (group not in pair, -rates[group].rows))
    chosen = set(ranked[:MAX_LINES])
    return [group for group in rates if group in chosen]


def _draw_sites(axis: Any, audit: "Audit", metric: str, sites: Sequence[str]) -> list[str]:
    """Draw the gap at these sites and over all sites; return the kinds of marks that occur."""
    marks = []
    for place, name in enumerate(sites):
        estimate = audit.sites[name].gaps[metric].local
        _draw_estimate(axis, place, estimate, DARK)
        marks += _list_marks(estimate, "o")
    found = audit.summary["metrics"][metric]
    numbers = estimable_gap(found)
    limits = (None, None) if numbers is None else (numbers["low"], numbers["high"])
    total = Estimate(found.get("signed_gap"), *limits)
    _draw_estimate(axis, len(sites), total, RED, marker="D")
    _label_lines(axis, [*map(_cut, sites), "all sites"])
    axis.axvline(0, color=DARK, lw=0.8)
    some = f" ({len(sites)} of {len(audit.sites):,} sites)" * (len(sites) < len(audit.sites))
    axis.set_xlabel(f"gap, points{some}")
    return marks


def _list_marks(estimate: Estimate, marker: str) -> list[str]:
    """Return the keys of `LEGEND` that explain how an estimate is drawn."""
    if estimate.value is None:
        return []
    if estimate.low is None:
        return ["too few rows for an interval"]
    marks = ["value and 95% interval" if marker == "o" else "among the groups that have a rate"]
    return marks + ["no upper limit"] * (estimate.high is None)


def _draw_estimate(
    axis: Any, place: int, estimate: Estimate, color: str, *, marker: str = "o"
) -> None:
    """Draw a value as a mark, with a line from the lower to the upper limit.

    Parameters
    ----------
    axis, place
        The panel, and the position of the line in it.
    estimate
        A fraction, which is drawn in points. If it is None, the line says "not estimable". If only
        the upper limit is None, the line ends in an arrow.
    color, marker
        How the mark looks. It is hollow if there is no interval.
    """
    if estimate.value is None:
        text = {"color": DARK, "fontsize": 9, "va": "center"}
        axis.text(0.01, place, "not estimable", transform=axis.get_yaxis_transform(), **text)
        return
    value = 100 * estimate.value
    if estimate.low is not None:
        high = value if estimate.high is None else 100 * estimate.high
        axis.hlines(place, 100 * estimate.low, high, color=color, lw=2)
        if estimate.high is None:
            look = {"arrowstyle": "<-", "color": color, "lw": 2}  # its head is at the offset
            where = {"xytext": (26, 0), "textcoords": "offset points"}
            axis.annotate("", (value, place), arrowprops=look, **where)
    face = "white" if estimate.low is None else color
    axis.plot(value, place, marker, ms=7, mfc=face, mec=color, mew=1.6, zorder=3, clip_on=False)


def _label_lines(axis: Any, labels: Sequence[str]) -> None:
    """Name the lines of a panel, the first at the top; draw a light grid and no box."""
    axis.set_yticks(range(len(labels)), labels, fontsize=9, parse_math=False)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0, pad=8)
    axis.margins(x=0.08)
    axis.grid(axis="x", **GRID)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _set_title(figure: Figure, title: str) -> None:
    """Put a title at the left above all panels. A $ in it does not start a formula."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, parse_math=False)


def _add_legend(figure: Figure, marks: Sequence[str]) -> None:
    """Explain the marks that occur below all panels; `marks` are keys of `LEGEND`."""
    shown = [text for text in LEGEND if text in marks]
    handles = [Line2D([], [], **LEGEND[text]) for text in shown]
    figure.legend(handles, shown, loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _join_pair(pair: tuple[str, str], word: str) -> str:
    """Return both names, short enough to stand side by side, with a word between them."""
    return f" {word} ".join(_cut(group, MAX_PAIRED) for group in pair)


def _cut(name: str, most: int = MAX_NAME) -> str:
    """Return a name in one short line."""
    text = printable(" ".join(name.split()))
    return text if len(text) <= most else f"{text[: most - 1]}…"
