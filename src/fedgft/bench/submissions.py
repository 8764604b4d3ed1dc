"""Submissions from outside: decisions on the test rows of a track, made by any method.

A submission is a CSV or Parquet file with the columns `track`, `version`, `seed`, `row` (the number
of the row in the track's table), and either `score` (the probability of the positive class; from
0.5 on the decision is positive) or `decision` (0 or 1). It holds every test row of every seed once,
and no other rows. In a Parquet file, the version may be in the metadata instead.

A file that breaks a rule is refused as a whole: nothing is guessed and nothing is left out.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fedgft.bench.scoreboard import mean_interval
from fedgft.bench.scores import Outcome, OutcomeCounter, stack_outcomes
from fedgft.bench.tracks import PARTS, TEST, TRACKS, Track
from fedgft.data.encode import data_error, suggest_name
from fedgft.data.table import read_frame
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import format_count
from fedgft.metrics import get_metric
from fedgft.store import expand_user, file_error
from fedgft.validation import check_integer, format_value

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

KEYS = ("track", "seed", "row")
VALUES = ("score", "decision")
VERSION = "version"
THRESHOLD = 0.5  # scores from here on are positive decisions
PART_NAMES = {"train": "a training row", "inner": "an inner row", "test": "a test row"}


@dataclass(frozen=True, eq=False)
class Submission:
    """A submission that passed all checks.

    Parameters
    ----------
    path
        The file.
    seeds
        Number of seeds: those from 0 to `seeds` - 1, or all of a track if it has fewer.
    decisions
        For each track, (seeds, n): 0 or 1 on test rows, NaN on all others.
    """

    path: Path
    seeds: int | None
    decisions: dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class TrackScore:
    """The numbers of one submission on one track; arrays are (seeds,).

    Parameters
    ----------
    track
        The track.
    outcome
        Counts on the test rows, and at each site, with a leading axis of seeds. The counts of
        training and inner rows are NaN, because a submission does not cover them.
    """

    track: Track
    outcome: Outcome

    def summarize(self) -> dict[str, Any]:
        """Return the numbers as plain values: means over seeds, with their 95% intervals.

        Each metric has the gap, the noise floor, and the largest gap of one site. None: a seed has
        no value (a group without rows), or there is one seed only, which has no interval.
        """
        accuracy = np.asarray(self.outcome.accuracy("test"), dtype=float)
        found: dict[str, Any] = {
            "track": self.track.name,
            "version": self.track.version,
            "seeds": len(accuracy),
            "seeds_of_track": self.track.seeds,
            **_name_ends("accuracy", accuracy),
            "metrics": {},
        }
        for name in self.track.metrics:
            metric = get_metric(name)
            gap = np.asarray(self.outcome.gap(metric, "test"), dtype=float)
            found["metrics"][name] = {
                **_name_ends("gap", gap),
                "floor": mean_interval(np.asarray(self.outcome.floor(metric, "test")))[0],
                "local_gap": _mean(self.outcome.local_gap(metric)),
            }
        return found


def read_submission(path: str | Path, *, seeds: int | None = None) -> Submission:
    """Read a submission and check all of it.

    Parameters
    ----------
    path
        A CSV or Parquet file.
    seeds
        How many seeds the file must hold, from 0 on; None (default): all of each track. With fewer
        seeds the scores are preliminary.

    Raises
    ------
    FedgftError
        The file breaks a rule; the message names the column and the row.
    """
    file = expand_user(path)
    if seeds is not None:
        check_integer("seeds", seeds, least=1)
    if file.is_dir():
        raise file_error(path, "is a folder; name a .csv or .parquet file")
    table = _Table(str(path), read_frame(file))
    value = table.check_columns()
    tracks = table.texts("track")
    decisions = {}
    for name in dict.fromkeys(tracks):
        mine = np.flatnonzero(np.array(tracks) == name)
        track = table.find_track(name, int(mine[0]))
        _check_version(table, track, mine)
        decisions[name] = _read_track(table, track, mine, value, seeds)
    return Submission(file, seeds, decisions)


def score_submission(submission: Submission) -> list[TrackScore]:
    """Return the numbers of a submission, per track in the order of the file."""
    if not isinstance(submission, Submission):
        text = f"must be what `read_submission` returns, not {format_value(submission)}"
        raise FedgftError(text, field="submission")
    found = []
    for name, decisions in submission.decisions.items():
        track = TRACKS[name]
        outcomes = []
        for seed, row in enumerate(decisions):
            made = OutcomeCounter.of(track.split(seed)).count(np.nan_to_num(row))
            unknown = {"train": made.train * np.nan, "inner": made.inner * np.nan}
            outcomes.append(replace(made, **unknown))
        found.append(TrackScore(track, stack_outcomes(outcomes)))
    return found


@dataclass(frozen=True, eq=False)
class _Table:
    """The rows of a submission; errors name the file, the column and the row."""

    source: str
    frame: "pl.DataFrame"

    def fail(self, problem: str, place: int | None = None) -> NoReturn:
        """Raise a `FedgftError`; `place` is the row of the file, counted from 0."""
        where = "" if place is None else f"{self._name_place(place)}: "
        raise data_error(self.source, f"{where}{problem}")

    def _name_place(self, place: int) -> str:
        if self.source.lower().endswith(".csv"):
            return f"line {place + 2:,}"  # after the header
        return f"row {place + 1:,} of the table"

    def check_columns(self) -> str:
        """Check that the columns are there; return the one with the values."""
        names = self.frame.columns
        given = [name for name in VALUES if name in names]
        if len(given) > 1:
            self.fail("has both columns 'score' and 'decision'; keep one of them")
        for name in (*KEYS, *([VERSION] if self._read_metadata() is None else [])):
            if name not in names:
                self.fail(f"no column '{name}'{suggest_name(name, names)}")
        if not given:
            self.fail(f"no column 'score' or 'decision'{suggest_name('score', names)}")
        return given[0]

    def _read_metadata(self) -> str | None:
        """Return the version in the metadata of a Parquet file, as text."""
        if not self.source.lower().endswith(".parquet") or VERSION in self.frame.columns:
            return None
        return pl.read_parquet_metadata(expand_user(self.source)).get(VERSION)

    def texts(self, name: str) -> list[str]:
        """Return a column of texts."""
        column = self.frame[name]
        if column.dtype not in (pl.String, pl.Categorical, pl.Enum):
            self.fail(f"column '{name}' must hold texts, not {format_value(column[0])}")
        self._refuse_null(name)
        return column.cast(pl.String).to_list()

    def integers(self, name: str) -> np.ndarray:
        """Return a column of whole numbers, (n,) int64."""
        numbers = self.numbers(name)
        wrong = np.flatnonzero((numbers != np.round(numbers)) | (np.abs(numbers) > 2**52))
        if len(wrong):
            value = format_value(self.frame[name][int(wrong[0])])
            self.fail(f"column '{name}' holds {value}, no whole number", int(wrong[0]))
        return numbers.astype(np.int64)

    def numbers(self, name: str) -> np.ndarray:
        """Return a column of finite numbers, (n,) float64."""
        column = self.frame[name]
        self._refuse_null(name)
        if not (column.dtype.is_numeric() or column.dtype == pl.Boolean):
            wrong = self._find_text(column)
            self.fail(f"column '{name}' holds {format_value(column[wrong])}, no number", wrong)
        numbers = column.cast(pl.Float64).to_numpy()
        lost = np.flatnonzero(~np.isfinite(numbers))
        if len(lost):
            self.fail(f"column '{name}' holds {numbers[lost[0]]}, no number", int(lost[0]))
        return numbers

    @staticmethod
    def _find_text(column: "pl.Series") -> int:
        """Return the first row that holds no number."""
        if column.dtype != pl.String:
            return 0
        lost = column.cast(pl.Float64, strict=False).is_null().arg_true()
        return int(lost[0]) if len(lost) else 0

    def _refuse_null(self, name: str) -> None:
        missing = self.frame[name].is_null().arg_true()
        if len(missing):
            self.fail(f"column '{name}' has no value", int(missing[0]))

    def find_track(self, name: str, place: int) -> Track:
        """Return a track by its name."""
        if name not in TRACKS:
            self.fail(f"no track {format_value(name)}{suggest_name(name, list(TRACKS))}", place)
        return TRACKS[name]

    def versions(self) -> np.ndarray:
        """Return the version that each row names, (n,)."""
        text = self._read_metadata()
        if text is None:
            return self.integers(VERSION)
        if not text.isdecimal():
            self.fail(f"the metadata hold version {format_value(text)}, no whole number")
        return np.full(self.frame.height, int(text))


def _check_version(table: _Table, track: Track, mine: np.ndarray) -> None:
    """Refuse rows for another version of the track than this one."""
    versions = table.versions()[mine]
    text = f"{track.name} has version {track.version} here; predict its rows"

    def describe(i: int) -> str:
        return f"version {versions[i]}: {text}"

    _refuse(table, mine, versions != track.version, describe)


def _read_track(
    table: _Table, track: Track, mine: np.ndarray, value: str, seeds: int | None
) -> np.ndarray:
    """Return the decisions on one track, (seeds, n), NaN except on test rows.

    Parameters
    ----------
    table
        The submission.
    track, mine
        A track, and the rows of the file that are about it.
    value
        The column with scores or decisions.
    seeds
        How many seeds there must be; None: all.
    """
    track.check()
    count = track.seeds if seeds is None else min(seeds, track.seeds)
    data = track.load()
    seed = table.integers("seed")[mine]
    row = table.integers("row")[mine]
    known = f"the file must hold seeds 0 to {count - 1}"
    _refuse(table, mine, (seed < 0) | (seed >= count), lambda i: f"seed {seed[i]}: {known}")
    text = f"{track.name} has rows 0 to {len(data) - 1}"
    _refuse(table, mine, (row < 0) | (row >= len(data)), lambda i: f"row {row[i]}: {text}")
    decided = _read_decisions(table, mine, value)
    _check_seeds(table, track, seed, count)
    found = np.full((count, len(data)), np.nan)
    for s in range(count):
        here = np.flatnonzero(seed == s)
        parts = track.split(s).parts
        _check_rows(table, track, s, mine[here], row[here], parts)
        found[s, row[here]] = decided[here]
    return found


def _check_seeds(table: _Table, track: Track, given: np.ndarray, count: int) -> None:
    """Require all seeds from 0 to `count` - 1."""
    missing = np.setdiff1d(np.arange(count), given)
    if not len(missing):
        return
    first = int(missing[0])
    text = f"{track.name}, seed {first}: no rows; the seed is missing"
    if first and len(missing) == count - first:  # only the last ones
        text += f"; for a preliminary score, set `seeds` to {first}"
    table.fail(text)


def _check_rows(
    table: _Table, track: Track, seed: int, places: np.ndarray, rows: np.ndarray, parts: np.ndarray
) -> None:
    """Require each test row of one seed once, and no other rows."""
    what = f"{track.name}, seed {seed}"
    other = parts[rows] != TEST

    def describe(i: int) -> str:
        part = PART_NAMES[PARTS[parts[rows[i]]]]
        return f"{what}: row {rows[i]} is {part}; submit test rows only"

    _refuse(table, places, other, describe)
    order = np.argsort(rows, kind="stable")
    double = np.zeros(len(rows), bool)
    double[order[1:]] = rows[order][1:] == rows[order][:-1]
    _refuse(table, places, double, lambda i: f"{what}: row {rows[i]} is there more than once")
    missing = np.setdiff1d(np.flatnonzero(parts == TEST), rows)
    if len(missing):
        lost = f"{format_count(len(missing), 'test row')} missing, row {missing[0]} first"
        table.fail(f"{what}: {lost}")


def _refuse(table: _Table, places: np.ndarray, wrong: np.ndarray, describe: Any) -> None:
    """Raise a `FedgftError` about the first of the rows that are wrong."""
    found = np.flatnonzero(wrong)
    if len(found):
        table.fail(describe(int(found[0])), int(places[found[0]]))


def _read_decisions(table: _Table, mine: np.ndarray, value: str) -> np.ndarray:
    """Return the decisions of some rows of the file, (n,): 0.0 or 1.0."""
    numbers = table.numbers(value)[mine]
    if value == "decision":
        wrong = (numbers != 0) & (numbers != 1)
        _refuse(table, mine, wrong, lambda i: f"decision {numbers[i]:g} is neither 0 nor 1")
        return numbers
    wrong = (numbers < 0) | (numbers > 1)
    _refuse(table, mine, wrong, lambda i: f"score {numbers[i]:g} is no probability, from 0 to 1")
    return (numbers >= THRESHOLD).astype(float)


def _name_ends(name: str, values: np.ndarray) -> dict[str, float | None]:
    """Return the mean over seeds and its 95% interval, by name."""
    ends = mean_interval(values)
    return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))


def _mean(values: Any) -> float | None:
    """Return the mean of the numbers that are estimable, or None without any."""
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    return float(known.mean()) if len(known) else None
