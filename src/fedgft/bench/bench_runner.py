"""Runs of the benchmark: which cells there are, which are finished, and how shards are merged.

A folder holds `bench.json`, which says with which code, settings and seeds its cells were made, and
`cells/`, one checksummed file per finished cell. A cell is named by a hash over everything that its
numbers depend on. An interrupted run therefore resumes, and another version of the code starts
anew; its cells lie beside the old ones, and the board shows those of `bench.json` only.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from fedgft.bench.cell_training import (
    ALL_METRICS,
    SETTINGS,
    Base,
    Cell,
    OpenTrack,
    count_work,
    run_cell,
    train_base,
)
from fedgft.bench.entrants import Entrant
from fedgft.bench.tracks import Track
from fedgft.data.encode import suggest_name
from fedgft.engine import Settings
from fedgft.errors import FedgftError
from fedgft.store import atomic_write, file_error, load_checksummed, open_folder
from fedgft.study.cache import HASHED_SOURCES, ResultCache, code_hash, data_hash, libraries
from fedgft.study.protocol import RATES

FORMAT = "fedgft-bench-1"
MANIFEST = "bench.json"
CELLS = "cells"
BASE = "base"
SOURCES = (  # all code that makes the numbers of a cell
    *(name for name in HASHED_SOURCES if not name.startswith("paper/")),
    "rules",
    "study/post_processing.py",
    "bench/scores.py",
    "bench/choices.py",
    "bench/cell_training.py",
)
SAME = {  # what shards have in common, with the words for it
    "format": "format",
    "code": "version of the code",
    "libraries": "versions of NumPy or Numba",
    "settings": "settings",
    "rates": "learning rates",
    "seeds": "number of seeds",
}
OnProgress = Callable[[str, int], None]  # description, run-rounds since the last call


@dataclass(frozen=True)
class CellName:
    """One cell of a run."""

    track: Track
    metric: str
    entrant: Entrant

    def __str__(self) -> str:
        return f"{self.track.name}, {self.metric}, {self.entrant.name}"


@dataclass(frozen=True)
class BenchPlan:
    """What a run computes.

    Parameters
    ----------
    tracks, entrants
        The tracks, and the methods and rules.
    metrics
        Names of metrics; None: those of each track.
    seeds
        Number of replicates; None: that of each track.
    shard
        (i, n): every n-th cell, beginning with the i-th; (1, 1): all of them.
    settings
        Settings of the simulator.
    """

    tracks: tuple[Track, ...]
    entrants: tuple[Entrant, ...]
    metrics: tuple[str, ...] | None = None
    seeds: int | None = None
    shard: tuple[int, int] = (1, 1)
    settings: Settings = field(default_factory=lambda: SETTINGS)

    def __post_init__(self) -> None:
        known = [name for track in self.tracks for name in track.metrics]
        for name in self.metrics or ():
            if name not in known:
                text = f"'{name}' is not scored here{suggest_name(name, sorted(set(known)))}"
                raise FedgftError(text, field="metrics")
        most = min((track.seeds for track in self.tracks), default=1)
        if self.seeds is not None and not 1 <= self.seeds <= most:
            text = f"must lie between 1 and {most}, the seeds of the tracks, not {self.seeds}"
            raise FedgftError(text, field="seeds")
        part, parts = self.shard
        if not 1 <= part <= parts:
            text = f"must be i/n with i from 1 to n, such as 1/4, not {part}/{parts}"
            raise FedgftError(text, field="shard")

    @property
    def cells(self) -> list[CellName]:
        """All cells of the plan, of all shards."""
        found = []
        for track in self.tracks:
            metrics = [m for m in track.metrics if self.metrics is None or m in self.metrics]
            for entrant in self.entrants:
                names = metrics if entrant.has_strength else [ALL_METRICS]
                found += [CellName(track, metric, entrant) for metric in names]
        return found

    @property
    def own_cells(self) -> list[CellName]:
        """The cells of the shard."""
        part, parts = self.shard
        return self.cells[part - 1 :: parts]

    def count_seeds(self, track: Track) -> int:
        """Return the number of replicates on a track."""
        return track.seeds if self.seeds is None else self.seeds

    def count_work(self, cell: CellName) -> int:
        """Return the run-rounds of a cell."""
        seeds = self.count_seeds(cell.track)
        return count_work(seeds, cell.track.clients, cell.entrant, self.settings.rounds)

    def describe(self) -> dict[str, Any]:
        """Return what `bench.json` says: how cells are made, and which cells there are to be."""
        tracks = {track.name: track.version for track in self.tracks}
        metrics = {
            t.name: [m for m in t.metrics if m in (self.metrics or t.metrics)] for t in self.tracks
        }
        return {
            "format": FORMAT,
            "version": version("fedgft"),
            "code": code_hash(SOURCES),
            "libraries": libraries(),
            "settings": json.loads(json.dumps(asdict(self.settings))),
            "rates": list(RATES),
            "seeds": self.seeds,
            "tracks": tracks,
            "titles": {track.name: track.title for track in self.tracks},
            "metrics": metrics,
            "methods": [entrant.name for entrant in self.entrants],
            "skipped": {},
        }


def check_track(track: Track) -> None:
    """Raise a `FedgftError` if the methods of the library cannot be run on a track here."""
    if track.load().images:
        text = f"{track.name}: the methods here train linear models on tables, not on images"
        raise FedgftError(f"{text}; `fedgft bench score` takes decisions", kind="unsupported")


def run_bench(
    plan: BenchPlan,
    folder: Path,
    on_progress: OnProgress,
    *,
    skipped: Mapping[str, str] | None = None,
) -> list[str]:
    """Run the cells of a plan that are not finished yet; return their names.

    Parameters
    ----------
    plan
        What to run.
    folder
        Where the cells are. An interrupted run resumes.
    on_progress
        Called with a description and the number of run-rounds since the last call.
    skipped
        Tracks that were left out, and why; the pages say it.
    """
    done = []
    for track in plan.tracks:
        check_track(track)
    with open_folder(folder):
        about = _add_earlier(plan.describe() | {"skipped": dict(skipped or {})}, folder)
        _write_manifest(folder, about)
        cache = ResultCache(folder / CELLS)
        for track, cells in groupby(plan.own_cells, key=lambda cell: cell.track):
            done += _run_track(plan, track, list(cells), cache, about, on_progress)
    return done


def _run_track(
    plan: BenchPlan,
    track: Track,
    cells: Sequence[CellName],
    cache: ResultCache,
    about: dict[str, Any],
    on_progress: OnProgress,
) -> list[str]:
    """Run the cells of one track."""
    keys = {cell: _make_key(track, about, plan.count_seeds(track), cell) for cell in cells}
    missing = [cell for cell in cells if cache.get(keys[cell]) is None]
    for cell in cells:
        if cell not in missing:
            on_progress(str(cell), plan.count_work(cell))
    if not missing:
        return []
    found = OpenTrack.load(track, plan.count_seeds(track), plan.settings)
    key = _make_key(track, about, plan.count_seeds(track), None)
    record = cache.get(key)
    if record is None:
        track.check()
        base = train_base(found, lambda amount: on_progress(f"{track.name}, FedAvg", 0))
        cache.put(key, {"run": identify(about), "base": base.to_json()})
    else:
        base = Base.from_json(record["base"])
    for cell in missing:
        started = time.perf_counter()
        told = 0

        def tell(amount: int, cell: CellName = cell) -> None:
            nonlocal told
            told += amount
            on_progress(str(cell), amount)

        result = run_cell(found, base, cell.entrant, cell.metric, tell)
        on_progress(str(cell), max(0, plan.count_work(cell) - told))
        wall = time.perf_counter() - started
        value = {"run": identify(about), "cell": result.to_json(), "wall": wall}
        cache.put(keys[cell], value)
    return [str(cell) for cell in missing]


def _make_key(track: Track, about: dict[str, Any], seeds: int, cell: CellName | None) -> str:
    """Return the name of a cell's file; None: of what the cells of the track share."""
    names = (BASE,) if cell is None else (cell.metric, cell.entrant.name)
    entrant = None if cell is None else asdict(cell.entrant)
    same = {name: about[name] for name in SAME}
    parts = [same, track.name, track.version, data_hash(track.load()), seeds, names, entrant]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return ".".join((f"{track.name}-{track.version}", *names, digest[:16]))


def identify(about: dict[str, Any]) -> str:
    """Return a hash of what all cells of a board have in common."""
    same = {name: about[name] for name in SAME}
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def _add_earlier(about: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add the tracks, metrics and methods of an earlier run of the same kind in the folder."""
    if not (folder / MANIFEST).exists():
        return about
    earlier = read_manifest(folder)
    return join_manifests(earlier, about) if identify(earlier) == identify(about) else about


def join_manifests(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return a description with the tracks, metrics and methods of both."""
    metrics = {
        name: list(
            dict.fromkeys([*first["metrics"].get(name, ()), *second["metrics"].get(name, ())])
        )
        for name in {**first["tracks"], **second["tracks"]}
    }
    methods = list(dict.fromkeys([*first["methods"], *second["methods"]]))
    joined = {name: {**first[name], **second[name]} for name in ("tracks", "titles", "skipped")}
    joined["skipped"] = {n: why for n, why in joined["skipped"].items() if n not in metrics}
    return {**second, **joined, "metrics": metrics, "methods": methods}


def _write_manifest(folder: Path, about: dict[str, Any]) -> None:
    with atomic_write(folder / MANIFEST) as part:
        part.write((json.dumps(about, indent=2) + "\n").encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read what a folder of the benchmark says about its cells."""
    path = folder / MANIFEST
    try:
        about = json.loads(path.read_text("utf-8"))
        if about["format"] != FORMAT:
            raise file_error(path, f"has the format {about['format']!s:.40}, not {FORMAT}")
        identify(about)
        for name in ("tracks", "titles", "metrics", "methods", "skipped"):
            about[name]
    except FedgftError:
        raise
    except FileNotFoundError:
        text = "is not there: name a folder that `fedgft bench` has written"
        raise file_error(path, text) from None
    except OSError as error:
        raise file_error(path, f"cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        text = "is damaged; delete it and run the benchmark again, which keeps finished cells"
        raise file_error(path, text) from error
    return about


def read_cells(folder: Path, about: dict[str, Any]) -> list[Cell]:
    """Return the finished cells that belong to a description, in the order of their names."""
    return [
        Cell.from_json(value["cell"])
        for _, value in _read_records(folder, about)
        if "cell" in value
    ]


def _read_records(folder: Path, about: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and the content of every file that belongs to a description."""
    wanted = identify(about)
    for path in sorted((folder / CELLS).glob("*.json")):
        try:
            value = load_checksummed(path.read_text("utf-8"), path.stem)
        except (OSError, ValueError) as error:
            text = f"is damaged ({error}); delete it and run the benchmark again"
            raise file_error(path, text) from error
        if value.get("run") == wanted:
            yield path.stem, value


def merge_folders(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Copy the cells of several folders into one; return its description.

    Parameters
    ----------
    folders
        Folders of shards, which must have been made by the same code with the same settings.
    out
        The folder to write.

    Raises
    ------
    FedgftError
        The folders do not belong together, or two of them hold different results for a cell.
    """
    about = read_manifest(folders[0])
    for folder in folders[1:]:
        other = read_manifest(folder)
        _check_same(folders[0], about, folder, other)
        about = join_manifests(about, other)
    records: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for key, value in _read_records(folder, about):
            if _results(records.setdefault(key, value)) != _results(value):
                text = f"{folder}: its cell {key} has other results than that of another folder"
                raise FedgftError(f"{text}; leave one of them out", kind="conflict")
    with open_folder(out):
        cache = ResultCache(out / CELLS)
        for key, value in records.items():
            cache.put(key, value)
        _write_manifest(out, about)
    return about


def _results(value: dict[str, Any]) -> Any:
    """Return the part of a record that does not depend on the clock."""
    found = value.get("cell") or value.get("base") or {}
    return {name: each for name, each in found.items() if name != "seconds"}


def _check_same(first: Path, about: dict[str, Any], second: Path, other: dict[str, Any]) -> None:
    """Raise a `FedgftError` unless the cells of two folders can stand on one board."""
    for name, words in SAME.items():
        if about[name] != other[name]:
            text = f"{second}: its {words} differs from that of {first}"
            raise FedgftError(f"{text}; run both shards with the same", kind="conflict")
    for track, number in other["tracks"].items():
        if about["tracks"].get(track, number) != number:
            text = f"{second}: has version {number} of the track {track}, and {first} version"
            raise FedgftError(f"{text} {about['tracks'][track]}", kind="conflict")
