"""Where a submission would stand on a board: its rank at each target, if it keeps the target.

The rules are those of the board (`fedgft.bench.scoreboard`). A submission is one method for all
targets: nothing is chosen for it, so a higher target does not change its numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedgft.bench.bench_runner import MANIFEST, read_cells, read_manifest
from fedgft.bench.entrants import TARGETS, League
from fedgft.bench.scoreboard import Score, keeps_target, score_cells
from fedgft.bench.submissions import TrackScore
from fedgft.metrics import get_metric
from fedgft.store import file_error


@dataclass(frozen=True)
class Standing:
    """The place of a submission for one track, metric and target.

    Parameters
    ----------
    track, metric, target
        Which one it is.
    keeps
        Whether the submission keeps the target.
    rank
        One more than the number of methods that keep the target and are more accurate; None if the
        submission does not keep it.
    kept_by
        Number of methods of the league that keep the target.
    best
        The most accurate of them; empty if there is none.
    best_accuracy
        Its accuracy, or None.
    """

    track: str
    metric: str
    target: float
    keeps: bool
    rank: int | None
    kept_by: int
    best: str
    best_accuracy: float | None


def read_board(folder: Path, scores: Sequence[TrackScore]) -> list[Score]:
    """Return the scores of a board for the tracks of a submission.

    Parameters
    ----------
    folder
        A folder that `fedgft bench` has written.
    scores
        The scored tracks. Each must be on the board, in the same version.
    """
    about = read_manifest(folder)
    for each in scores:
        track = each.track
        known = about["tracks"].get(track.name)
        if known is None:
            listed = ", ".join(about["tracks"]) or "none"
            raise file_error(folder / MANIFEST, f"has no track {track.name}; its tracks: {listed}")
        if known != track.version:
            text = f"has version {known} of {track.name}, and this is version {track.version}"
            raise file_error(folder / MANIFEST, text)
    names = {each.track.name for each in scores}
    metrics = {name: found for name, found in about["metrics"].items() if name in names}
    return score_cells(read_cells(folder, about), metrics)


def find_standings(
    scores: Sequence[TrackScore], board: Sequence[Score], league: League
) -> list[Standing]:
    """Return the place of a submission for each track, metric and target of a board.

    Parameters
    ----------
    scores
        The scored tracks of the submission.
    board
        The scores of the methods.
    league
        The league of the submission: "blind" if its decisions do not use the group.
    """
    found = []
    for each in scores:
        for name in each.track.metrics:
            for target in TARGETS:
                keys = (each.track.name, name, target, league)
                rivals = [s for s in board if (s.track, s.metric, s.target, s.league) == keys]
                if rivals:
                    found.append(_find_standing(each, name, target, rivals))
    return found


def _find_standing(
    score: TrackScore, name: str, target: float, rivals: Sequence[Score]
) -> Standing:
    """Return the place among the methods of a league."""
    metric = get_metric(name)
    gap = np.asarray(score.outcome.gap(metric, "test"), dtype=float)
    noise = float(np.mean(score.outcome.floor(metric, "test")))
    keeps = keeps_target(gap, noise, target)
    accuracy = float(np.mean(score.outcome.accuracy("test")))
    kept = [(r.accuracy, r.label) for r in rivals if r.keeps and r.accuracy is not None]
    rank = 1 + sum(rival > accuracy for rival, _ in kept) if keeps else None
    best_accuracy, best = max(kept, default=(None, ""))
    return Standing(score.track.name, name, target, keeps, rank, len(kept), best, best_accuracy)
