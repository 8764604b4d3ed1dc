"""Figures of the benchmark: accuracy against gap, one figure per track and metric."""

import math
from collections.abc import Sequence
from typing import Any

from fedgft.bench.entrants import LEAGUE_TITLES, LEAGUES, REFERENCE, list_entrants
from fedgft.bench.scoreboard import Score
from fedgft.metrics import get_metric
from fedgft.study.figures import (
    DARK,
    NOISE_FLOOR,
    STYLES,
    TARGET,
    clean_axis,
    make_panels,
    set_heading,
    set_title,
)

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h", "p", "*")
MORE_COLORS = (  # of methods without a style; 7 colors and 12 markers make 84 pairs
    *("#8c8c00", "#a05195", "#b04a4a", "#1b7837", "#00868b", "#6a51a3", "#8b4513"),
)
LEGEND_COLUMNS = 4
MAX_GAP = 1.15  # right end of a panel, in units of the gap of FedAvg
MAX_LOSS = 0.2  # of accuracy, that a panel shows
INTERVAL = {"lw": 1.1, "alpha": 0.8, "zorder": 2}


def plot_column(scores: Sequence[Score], *, title: str, target: float) -> Any:
    """Draw one panel per league: accuracy upwards, the gap to the right, on test rows.

    A thin line joins what a method reaches at the targets; the marker, with 95% intervals over the
    replicates, is the one at `target`.

    Parameters
    ----------
    scores
        Those of one track and metric, at all targets.
    title
        The name of the track.
    target
        The target of the markers.
    """
    known = [score for score in scores if score.accuracy is not None and score.gap is not None]
    plain = next((score for score in known if score.method == REFERENCE), None)
    leagues = [name for name in LEAGUES if any(score.league == name for score in known)]
    methods = list(dict.fromkeys(score.method for score in known))
    rows = -(-len(methods) // LEGEND_COLUMNS)
    figure, axes = make_panels(
        1.2 + 4.6 * max(1, len(leagues)),
        4.4 + 0.21 * rows,
        1,
        max(1, len(leagues)),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    styles = _choose_styles(methods)
    for axis, league in zip(axes[0], leagues, strict=False):
        for method in methods:
            mine = [s for s in known if s.method == method]
            if mine[0].league == league or method == REFERENCE:
                _draw_method(axis, mine, target, *styles[method])
        _draw_lines(axis, known, target)
        set_title(axis, LEAGUE_TITLES[league])
        axis.set_xlabel("gap of decisions on test rows, points")
        clean_axis(axis)
    _set_limits(axes[0, 0], known, plain, target)
    axes[0, 0].set_ylabel("accuracy on test rows, %")
    entries = {}
    for axis in axes[0]:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    names = [score.label for score in known if score.target == target]
    last = [name for name in entries if name not in names]
    entries = {name: entries[name] for name in (*dict.fromkeys(names), *last)}
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=LEGEND_COLUMNS,
        frameon=False,
        fontsize=8.5,
    )
    name = get_metric(known[0].metric).title if known else ""
    set_heading(figure, f"{title}: {name}. Markers: target of {100 * target:g} points")
    return figure


def _choose_styles(methods: Sequence[str]) -> dict[str, tuple[str, Any, str]]:
    """Return color, dashes and marker of each method, which are the same in all figures.

    A method whose color in other figures is taken, or that has none, gets the next one.
    """
    found: dict[str, tuple[str, Any, str]] = {}
    taken: set[str] = set()
    for place, method in enumerate(dict.fromkeys([*list_entrants(), *methods])):
        color, dashes = STYLES.get(method, ("", (0, (3, 1))))
        if not color or color in taken:
            color = MORE_COLORS[place % len(MORE_COLORS)]
        taken.add(color)
        found[method] = (color, dashes, MARKERS[place % len(MARKERS)])
    return found


def _draw_method(
    axis: Any, scores: Sequence[Score], target: float, color: str, dashes: Any, marker: str
) -> None:
    """Draw what a method reaches at the targets; the marker is at one of them."""
    curve = sorted(scores, key=lambda score: score.target)
    places = [(_percent(score.gap), _percent(score.accuracy)) for score in curve]
    axis.plot(*zip(*places, strict=True), color=color, ls=dashes, lw=1.1, alpha=0.7, zorder=1)
    for score, (x, y) in zip(curve, places, strict=True):
        if score.target != target:
            continue
        if score.gap_low is not None and score.accuracy_low is not None:
            ends = [_percent(score.gap_low), _percent(score.gap_high)]
            axis.plot(ends, [y, y], color=color, **INTERVAL)
            ends = [_percent(score.accuracy_low), _percent(score.accuracy_high)]
            axis.plot([x, x], ends, color=color, **INTERVAL)
        filled = {"mfc": color if score.keeps else "white"}
        look = {"ms": 7, "mec": color, "ls": "none", "zorder": 3, "label": score.label}
        axis.plot(x, y, marker, color=color, **look, **filled)


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value


def _draw_lines(axis: Any, known: Sequence[Score], target: float) -> None:
    """Draw the target, the noise floor, and how to read a marker."""
    axis.axvline(100 * target, **TARGET)
    floors = [s.floor for s in known if s.target == target and s.floor is not None]
    if floors:
        axis.axvline(100 * sum(floors) / len(floors), **NOISE_FLOOR)
    axis.plot([], [], "o", ms=7, color=DARK, mfc="white", label="hollow: misses the target")


def _set_limits(axis: Any, known: Sequence[Score], plain: Score | None, target: float) -> None:
    """Show all markers with their intervals, unless they are far worse than FedAvg."""
    if plain is None or plain.gap is None or plain.accuracy is None:
        axis.set_xlim(left=0)
        return
    axis.set_xlim(0, 100 * max(MAX_GAP * plain.gap, 1.5 * target))
    least = plain.accuracy - MAX_LOSS
    at = [s for s in known if s.target == target and s.accuracy is not None]
    limits = [end for s in at for end in (s.accuracy_low, s.accuracy, s.accuracy_high)]
    shown = [end for end in limits if end is not None and end >= least]
    low = min(shown, default=plain.accuracy)
    high = max(shown, default=plain.accuracy)
    margin = 0.04 * (high - low) + 0.002
    axis.set_ylim(100 * (low - margin), 100 * (high + margin))
