"""The pages of the benchmark: Markdown, figures, one HTML page, and all scores as JSON.

Everything is made from the cells of a folder, which never change: pages can be made again at any
time, and equal cells give equal pages.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedgft.bench.bench_figures import plot_column
from fedgft.bench.bench_runner import read_cells, read_manifest
from fedgft.bench.cell_training import ALL_METRICS, Cell
from fedgft.bench.entrants import LEAGUE_TITLES, LEAGUES, REFERENCE, TARGETS, list_entrants
from fedgft.bench.scoreboard import Score, score_cells
from fedgft.errors import FedgftError
from fedgft.formatting import (
    DASH,
    SIGNS,
    Table,
    escape_markdown,
    format_count,
    format_interval,
    format_points,
    render,
)
from fedgft.metrics import get_metric
from fedgft.store import atomic_write, open_folder
from fedgft.study.figures import save_figure

HEADLINE = 0.02  # the target of overviews and markers
OWN = "fedgft-control"  # the method whose place is listed cell by cell
STANDING = (
    *("track", "metric", "target", "place", "accuracy / gap"),
    *("first", "its accuracy / gap", "accuracy behind"),
)
SCORES = "scores.json"
OVERVIEW = (
    "method",
    "cells",
    "keeps",
    "first or tied",
    "mean rank",
    "accuracy lost",
    "gap",
    "unseen site",
    "hypervolume",
)
HEADER = (
    "method",
    "league",
    "rank",
    "accuracy",
    "gap",
    "floor",
    "keeps",
    "kept in",
    "largest local gap",
    "unseen site",
    "hypervolume",
    "kB sent",
    "s per run",
)
LEAD = (
    "Test rows chose nothing: each replicate chose its strength on inner rows of its sites. All "
    "gaps are of decisions, in points. A method keeps a target if its mean gap is no larger, up to "
    "sampling error and the noise floor; those that do are ranked by accuracy."
)


@dataclass(frozen=True)
class Board:
    """What stands on the pages of a folder: all scores, the overview, notes, and the files."""

    scores: list[Score]
    overview: list[Table]
    notes: list[str]
    paths: list[Path]


def write_board(folder: Path) -> Board:
    """Make all pages of a folder from its cells.

    Parameters
    ----------
    folder
        A folder that `run_bench` or `merge_folders` has written.
    """
    about = read_manifest(folder)
    cells = read_cells(folder, about)
    if not cells:
        raise FedgftError(f"{folder}: has no finished cells; run the benchmark first", kind="file")
    scores = score_cells(cells, about["metrics"])
    notes = list_notes(about, cells)
    with open_folder(folder):
        paths = [_write(folder / SCORES, _dump_scores(about, scores))]
        figures = _write_figures(folder, about, scores)
        paths += figures.values()
        overview = [tabulate_overview(scores, league) for league in LEAGUES]
        overview = [table for table in overview if len(table.rows) > 1]
        front = [*overview, *tabulate_standing(scores)]
        sections = []
        for track, title in _list_tracks(about, scores):
            tables = tabulate_track(scores, track)
            mine = [figures[track, m] for m in about["metrics"][track] if (track, m) in figures]
            sections.append({"track": track, "title": title, "tables": tables, "figures": mine})
            paths.append(_write(folder / f"{track}.md", _track_page(title, tables, mine)))
        paths.append(_write(folder / "README.md", _front_page(about, front, sections, notes)))
        page = render(
            "bench.html",
            lead=LEAD,
            about=_describe(about),
            overview=front,
            sections=sections,
            notes=notes,
            picture=_embed,
        )
        paths.append(_write(folder / "index.html", page))
    return Board(scores, overview, notes, paths)


def list_notes(about: dict[str, Any], cells: Sequence[Cell]) -> list[str]:
    """Return sentences about what is missing: tracks, cells not run yet, cells not offered."""
    notes = [f"{track}: left out here: {reason}" for track, reason in about["skipped"].items()]
    entrants = list_entrants()
    done = {(cell.track, cell.metric, cell.method) for cell in cells}
    missing = []
    for track, metrics in about["metrics"].items():
        for method in about["methods"]:
            strength = method not in entrants or entrants[method].has_strength
            names = metrics if strength else [ALL_METRICS]
            missing += [(track, name, method) for name in names]
    missing = [cell for cell in missing if cell not in done]
    if missing:
        track, metric, method = missing[0]
        first = ", ".join((track, method) if metric == ALL_METRICS else (track, metric, method))
        number = f"{format_count(len(missing), 'cell')} {'is' if len(missing) == 1 else 'are'}"
        notes.append(f"{number} not run yet, the first: {first}; run or merge the other cells")
    for cell in cells:
        if cell.reason:
            notes.append(f"{cell.track}, {cell.metric}, {cell.label}: not offered: {cell.reason}")
    return notes


def tabulate_overview(scores: Sequence[Score], league: str) -> Table:
    """Return one line per method of a league, over all tracks and metrics, at the main target.

    FedAvg stands in both leagues, to compare with.
    """
    at = [score for score in scores if score.target == HEADLINE]
    plain = {(s.track, s.metric): s.accuracy for s in at if s.method == REFERENCE}
    lines = []
    for method in dict.fromkeys(s.method for s in at):
        mine = [s for s in at if s.method == method and s.accuracy is not None]
        if not mine or (mine[0].league != league and method != REFERENCE):
            continue
        kept = sum(s.keeps for s in mine)
        tied = sum(s.is_tied for s in mine) if mine[0].league == league else 0
        ranks = [s.rank for s in mine if s.rank is not None and s.league == league]
        pairs = [(plain.get((s.track, s.metric)), s.accuracy) for s in mine]
        lost = [a - b for a, b in pairs if a is not None and b is not None]
        numbers = [[getattr(s, name) for s in mine] for name in ("gap", "unseen_gap")]
        cells = (
            mine[0].label,
            str(len(mine)),
            str(kept),
            str(tied) if mine[0].league == league else DASH,
            f"{fmean(ranks):.1f}" if ranks else DASH,
            format_points(fmean(lost), sign="") if lost else DASH,
            *(format_points(_mean(each)) for each in numbers),
            _format(_mean([s.hypervolume for s in mine]), 2),
        )
        lines.append(((-kept, -tied, fmean(lost) if lost else 1.0), cells))
    lines.sort(key=lambda line: line[0])
    rows = tuple(cells for _, cells in lines)
    title = f"{LEAGUE_TITLES[league].capitalize()} league, target {100 * HEADLINE:g} points"
    return Table(title, OVERVIEW, rows, stubs=1)


def tabulate_standing(scores: Sequence[Score]) -> list[Table]:
    """Return where our own method stands in each cell of its league, beside the first method.

    Empty if it took no part.
    """
    rows = []
    for own in (s for s in scores if s.method == OWN and s.target in (0.0, HEADLINE)):
        if own.reason:
            continue
        same = (own.track, own.metric, own.target, own.league)
        column = [s for s in scores if (s.track, s.metric, s.target, s.league) == same]
        first = next((s for s in column if s.rank == 1), None)
        place = "first" if own.rank == 1 else "tied with the first" if own.is_tied else "behind"
        behind = None
        if first and own.accuracy is not None and first.accuracy is not None:
            behind = first.accuracy - own.accuracy
        if own.rank is None:
            place = "misses the target"
        rows.append(
            (
                *(own.track, own.metric, f"{100 * own.target:g}", place),
                f"{format_points(own.accuracy)} / {format_points(own.gap)}",
                first.label if first else DASH,
                f"{format_points(first.accuracy)} / {format_points(first.gap)}" if first else DASH,
                format_points(behind),
            )
        )
    if not rows:
        return []
    label = next(s.label for s in scores if s.method == OWN)
    title = f"{label} in the group-blind league, by cell"
    return [Table(title, STANDING, tuple(rows), stubs=4)]


def tabulate_track(scores: Sequence[Score], track: str) -> list[Table]:
    """Return the tables of a track, one per metric and target, with the main target first."""
    mine = [score for score in scores if score.track == track]
    targets = sorted(TARGETS, key=lambda target: (target != HEADLINE, target))
    tables = []
    for metric in dict.fromkeys(score.metric for score in mine):
        for target in targets:
            column = [s for s in mine if (s.metric, s.target) == (metric, target)]
            title = f"{get_metric(metric).title}, target {100 * target:g} points"
            rows = tuple(_list_cells(score) for score in column if not score.reason)
            tables.append(Table(title, HEADER, rows, stubs=2))
    return tables


def _list_cells(score: Score) -> tuple[str, ...]:
    """Return one line of the table of a track."""
    rank = DASH if score.rank is None else str(score.rank)
    if score.rank is not None and score.rank > 1 and score.is_tied:
        rank = f"{score.rank} (tied)"
    share = None if score.kept_share is None else 100 * score.kept_share
    return (
        score.label,
        LEAGUE_TITLES[score.league],
        rank,
        _format_mean(score.accuracy, score.accuracy_low, score.accuracy_high),
        _format_mean(score.gap, score.gap_low, score.gap_high),
        format_points(score.floor),
        SIGNS[score.keeps],
        DASH if share is None else f"{share:.0f}%",
        format_points(score.local_gap),
        format_points(score.unseen_gap),
        _format(score.hypervolume, 2),
        DASH if score.bytes_sent is None else f"{score.bytes_sent / 1000:,.0f}",
        _format(score.seconds, 2),
    )


def _format_mean(value: float | None, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return format_points(value)
    return f"{format_points(value)} ({format_interval(low, high)})"


def _format(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _list_tracks(about: dict[str, Any], scores: Sequence[Score]) -> list[tuple[str, str]]:
    """Return name and title of the tracks that have scores."""
    found = {score.track for score in scores}
    return [(name, title) for name, title in about["titles"].items() if name in found]


def _write_figures(
    folder: Path, about: dict[str, Any], scores: Sequence[Score]
) -> dict[tuple[str, str], Path]:
    """Write one SVG file per track and metric."""
    paths = {}
    for track, title in _list_tracks(about, scores):
        for metric in about["metrics"][track]:
            mine = [s for s in scores if (s.track, s.metric) == (track, metric)]
            figure = plot_column(mine, title=title, target=HEADLINE)
            paths[track, metric] = save_figure(
                figure, folder, f"{track}-{metric}", endings=("svg",)
            )[0]
    return paths


def _describe(about: dict[str, Any]) -> str:
    """Return with what the cells were made, in one sentence."""
    seeds = "the seeds of each track" if about["seeds"] is None else f"{about['seeds']} seeds"
    rounds = about["settings"]["rounds"]
    return f"fedgft {about['version']}, {seeds}, {rounds} rounds, code {about['code'][:12]}."


def _front_page(
    about: dict[str, Any],
    overview: Sequence[Table],
    sections: Sequence[dict[str, Any]],
    notes: Sequence[str],
) -> str:
    lines = ["# The benchmark", "", LEAD, "", _describe(about), ""]
    lines += [table.markdown() for table in overview]
    lines += ["## Tracks", ""]
    lines += [f"- [{escape_markdown(s['title'])}]({s['track']}.md)" for s in sections]
    if notes:
        lines += ["", "## Notes", "", *(f"- {escape_markdown(note)}" for note in notes)]
    return "\n".join(lines) + "\n"


def _track_page(title: str, tables: Sequence[Table], figures: Sequence[Path]) -> str:
    lines = [f"# {escape_markdown(title)}", "", LEAD, ""]
    lines += [f"![accuracy against gap]({path.name})\n" for path in figures]
    lines += [table.markdown() for table in tables]
    return "\n".join(lines).rstrip() + "\n"


def _dump_scores(about: dict[str, Any], scores: Sequence[Score]) -> str:
    return json.dumps({"about": about, "scores": [asdict(s) for s in scores]}, indent=1) + "\n"


def _embed(path: Path) -> str:
    """Return a figure as an address, so that the page needs no other file."""
    return "data:image/svg+xml;base64," + b64encode(path.read_bytes()).decode("ascii")


def _write(path: Path, text: str) -> Path:
    with atomic_write(path) as part:
        part.write(text.encode())
    return path
