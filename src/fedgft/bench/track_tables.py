"""What a participant needs of a track: rows, their parts per seed, counts for a datasheet.

`describe_rows` and `build_table` are the two tables that `fedgft bench rows` writes. With them, any
program in any language can train on the training rows and submit decisions on the test rows.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.bench.scores import FEWEST_LOCAL, count_outcome
from fedgft.bench.tracks import INNER, PARTS, TEST, TRAIN, Track
from fedgft.data.table import write_table
from fedgft.errors import LazyModule
from fedgft.metrics import get_metric
from fedgft.store import atomic_write, make_folder

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

README = """# The rows of {name}, version {version}

`{table}`: {rows:,} rows in the order of their number, `row`.
`label` is {label}; `group` names the group, all other columns are features, not scaled.
`{parts}`: for each `seed`, the `site` of a row and its `part`: train, inner or test.
Train per seed on `train` rows, choose settings on `inner` rows, and decide about `test` rows.
Labels of test rows are there for your own analysis: do not train or choose with them.
Submit a CSV or Parquet file with the columns track, version, seed, row and either score (the
probability of label 1; decisions are score >= 0.5) or decision (0 or 1): every test row, every
seed, once. Check and score it with: fedgft bench score FILE
"""


def describe_rows(track: Track) -> "pl.DataFrame":
    """Return site and part of each row for each seed: the columns seed, row, site and part."""
    tables = []
    for seed in range(track.seeds):
        split = track.split(seed)
        names = np.array(_list_sites(track))
        parts = np.array(PARTS)
        columns = {
            "seed": np.full(len(split.owner), seed, np.int16),
            "row": np.arange(len(split.owner), dtype=np.int32),
            "site": names[split.owner],
            "part": parts[split.parts],
        }
        tables.append(pl.DataFrame(columns))
    return pl.concat(tables)


def _list_sites(track: Track) -> tuple[str, ...]:
    """Return the names of the sites; sites to which rows are dealt have numbers."""
    if track.kind == "column":
        return track.load().client_names
    return tuple(str(k) for k in range(track.clients))


def build_table(track: Track) -> "pl.DataFrame":
    """Return the rows of a track: the columns row, those of the features, label and group.

    Images have no columns of features: their pixels stay where they are.
    """
    data = track.load()
    columns: dict[str, Any] = {"row": np.arange(len(data), dtype=np.int32)}
    if not data.images:
        columns |= {name: data.features[:, i] for i, name in enumerate(data.columns)}
    names = np.array([*data.group_names, None], dtype=object)
    columns |= {"label": data.labels.astype(np.int8)}
    columns["group"] = pl.Series(names[data.groups].tolist(), dtype=pl.String)
    return pl.DataFrame(columns)


def write_rows(track: Track, folder: Path, *, csv: bool = False) -> list[Path]:
    """Write the two tables and a text that explains them; return the files.

    Parameters
    ----------
    track
        The track.
    folder
        Where to write; it is made if needed.
    csv
        Whether the tables are CSV files instead of Parquet.
    """
    track.check()
    make_folder(folder)
    ending = "csv" if csv else "parquet"
    table = folder / f"{track.name}-table.{ending}"
    parts = folder / f"{track.name}-rows.{ending}"
    write_table(build_table(track), table)
    write_table(describe_rows(track), parts)
    data = track.load()
    names = {"table": table.name, "parts": parts.name, "label": track.sheet.label}
    text = README.format(name=track.name, version=track.version, rows=len(data), **names)
    readme = folder / f"{track.name}-README.md"
    with atomic_write(readme) as file:
        file.write(text.encode())
    return [table, parts, readme]


def count_track(track: Track) -> dict[str, Any]:
    """Return the counts of a datasheet: rows by group and label, sizes of parts and sites.

    Ranges are [smallest, largest] over all seeds and, for `site_rows`, all sites. The
    floors are the gaps on the test rows that chance alone produces (means over seeds) if every
    group gets positive decisions at the rate of positive labels.
    """
    data = track.load()
    groups = []
    for g, name in enumerate(data.group_names):
        mine = data.labels[data.groups == g]
        groups.append({"name": name, "rows": len(mine), "positive": float(mine.mean())})
    splits = [track.split(seed) for seed in range(track.seeds)]
    parts = np.array([np.bincount(split.parts, minlength=3) for split in splits])
    sizes = np.array([np.bincount(s.owner, minlength=s.num_sites) for s in splits])
    usable = [_count_usable_sites(track, seed) for seed in range(track.seeds)]
    share = float(data.labels.mean())
    return {
        "rows": len(data),
        "features": 0 if data.images else len(data.columns),
        "positive": share,
        "constant_accuracy": max(share, 1 - share),
        "groups": groups,
        "unknown_groups": int((data.groups < 0).sum()),
        "sites": splits[0].num_sites,
        **{f"{PARTS[p]}_rows": _range(parts[:, p]) for p in (TRAIN, INNER, TEST)},
        "site_rows": _range(sizes),
        "sites_with_local_gap": _range(np.array(usable)),
        "floors": _measure_floors(track, share),
    }


def _count_usable_sites(track: Track, seed: int) -> int:
    """Return how many sites have enough test rows of every group for a gap of their own."""
    split = track.split(seed)
    data = split.federation.dataset
    rows = split.federation.test[data.groups[split.federation.test] >= 0]
    shape = (split.num_sites, len(data.group_names))
    cells = np.ravel_multi_index((split.owner[rows], data.groups[rows]), shape)
    counts = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
    return int((counts >= FEWEST_LOCAL).all(1).sum())


def _measure_floors(track: Track, share: float) -> dict[str, float]:
    """Return the noise floor of each metric for decisions at the same rate in every group."""
    found: dict[str, list[float]] = {name: [] for name in track.metrics}
    for seed in range(track.seeds):
        split = track.split(seed)
        outcome = count_outcome(split, np.full(len(split.owner), share))
        for name, values in found.items():
            values.append(float(outcome.floor(get_metric(name), "test")))
    return {name: float(np.mean(values)) for name, values in found.items()}


def _range(values: np.ndarray) -> list[int]:
    return [int(values.min()), int(values.max())]
