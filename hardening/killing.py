"""What is killed by kills.py, and how its files are looked at."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fedgft.auditing import measure, write_sums
from fedgft.data.generated import synthetic
from fedgft.errors import FedgftError
from fedgft.study.cache import Checkpoints

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from synthetic_images import write_celeba_folder

TIMED = {"seconds", "digest", "stamp", "files"}  # what differs between two equal runs


@dataclass(frozen=True)
class Case:
    name: str
    command: Callable[[Path], list[str]]  # given a folder, whose `out` is for the results
    earlier: tuple[str, ...]  # options of another run, whose outputs are written over
    kills: int
    continues: bool = False  # from where it was killed
    usual: tuple[str, ...] = ()  # options instead of those


def cases(place: Path) -> list[Case]:
    """Fifty kills altogether. The inputs are made here."""
    write_celeba_folder(place / "faces", 120, 16)
    _table(place / "table.csv")
    _predictions(place / "site.csv")
    _sites(place / "sites")
    faces = [
        "train",
        "--data",
        "celeba",
        "--images",
        str(place / "faces"),
        "--size",
        "8",
        "--train-rows",
        "40",
        "--test-rows",
        "24",
        "--clients",
        "3",
        "--alpha",
        "5",
        "--batch-size",
        "20",
        "--seeds",
        "1",
        "--rounds",
        "3",
        "--method",
        "fedgft",
    ]
    table = [
        "train",
        "--data",
        str(place / "table.csv"),
        "--label",
        "ok",
        "--group",
        "sex",
        "--rounds",
        "30",
        "--seeds",
        "4",
    ]
    paper = ["reproduce", "penalty", "--data", "compas", "--protocol", "heldout"]
    site = ["measure", str(place / "site.csv"), "--label", "y", "--group", "sex", "--score", "p"]
    into = lambda folder: ["--out", str(folder / "out")]  # noqa: E731
    return [
        Case(
            "train, images",
            lambda f: [*faces, "--cache", str(f / "cache"), *into(f)],
            ("--seed", "7"),
            8,
            continues=True,
        ),
        Case("train, a table", lambda f: [*table, *into(f)], ("--seed", "7"), 10),
        Case(
            "train, a table with checkpoints",
            lambda f: [*table, "--checkpoint-every", "1", *into(f)],
            ("--seed", "7"),
            8,
            continues=True,
        ),
        Case(
            "reproduce",
            lambda f: [*paper, *into(f)],
            ("--seeds", "2"),
            12,
            continues=True,
            usual=("--seeds", "3"),
        ),
        Case(
            "audit",
            lambda f: ["audit", str(place / "sites"), *into(f)],
            ("--reference-groups", "m"),
            6,
        ),
        Case(
            "measure",
            lambda f: [*site, "--out", str(f / "out" / "site.json")],
            ("--threshold", "0.6"),
            6,
        ),
    ]


def _table(path: Path) -> None:
    data = synthetic(rows=4000, seed=1)
    columns = {f"x{i}": data.features[:, i] for i in range(4)}
    groups = [("f", "m")[g] for g in data.groups]
    pl.DataFrame({**columns, "sex": groups, "ok": data.labels}).write_csv(path)


def _predictions(path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = 3_000_000
    pl.DataFrame(
        {
            "y": rng.integers(0, 2, rows),
            "sex": rng.choice(["f", "m"], rows),
            "p": rng.random(rows).round(4),
        }
    ).write_csv(path)


def _sites(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for k in range(1500):
        y = rng.integers(0, 2, 200)
        score = rng.random(200)
        sums = measure(
            y, score, sensitive_features={"sex": rng.choice(["f", "m"], 200)}, site=f"site-{k}"
        )
        write_sums(sums, folder / f"{k}.json")


def _paths(out: Path) -> list[Path]:
    """Without what vanishes while we look: a run may be at work there."""
    found = []
    for folder, _, names in os.walk(out):
        found += [Path(folder) / name for name in names]
    return found


def _hidden(path: Path, out: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(out).parts)


def visible(out: Path) -> dict[str, int]:
    """Files that a user sees, and when each was written."""
    return {
        str(p.relative_to(out)): os.stat(p).st_mtime_ns
        for p in _paths(out)
        if not _hidden(p, out) and p.exists()
    }


def leftovers(out: Path) -> list[str]:
    """Hidden files; the lock of a folder that is kept is none."""
    return [str(p.relative_to(out)) for p in _paths(out) if _hidden(p, out) and p.name != ".lock"]


def contents(out: Path) -> dict[str, Any]:
    """Of every result what it says; checkpoints are none."""
    names = [n for n in sorted(visible(out)) if not n.startswith("checkpoints/")]
    return {name: _content(out / name) for name in names}


def _content(path: Path) -> Any:
    try:
        if path.suffix == ".parquet":
            frame = pl.read_parquet(path)
            return str(frame.schema), frame.drop("seconds", strict=False).write_ndjson()
        if path.suffix == ".json":
            return json.dumps(_untimed(json.loads(path.read_text("utf-8"))))
        return path.read_bytes()
    except (ValueError, pl.exceptions.PolarsError) as error:
        return f"half a file: {error}"


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if k not in TIMED}
    return [_untimed(v) for v in value] if isinstance(value, list) else value


def sound(out: Path, calm: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """Every visible file is one of two whole ones, every checkpoint passes its checksum, what is
    hidden is meant to be, and nothing of the earlier run is lost: only a section's own JSON goes
    while its tables and figures are replaced, since it vouches for them."""
    found = contents(out)
    good = all(c in (calm.get(n), earlier.get(n)) for n, c in found.items())
    lost = [n for n in earlier if n not in found]
    named = all(any(part.endswith(".part") for part in Path(n).parts) for n in leftovers(out))
    kept = Checkpoints(out / "checkpoints")
    try:
        for path in kept.found():
            kept.get(path.stem)
    except FedgftError as error:
        print(error, file=sys.stderr)
        good = False
    return good and named and set(lost) <= {"penalty.json"}
