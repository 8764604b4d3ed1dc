"""Images as rows: a folder of them, and a table that says what they show.

The features are the pixels alone, as bytes; label, group, client and split are read as in any
table.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedgft.data import roles as reading
from fedgft.data.columns import as_text, column_of
from fedgft.data.dataset import Dataset
from fedgft.data.fetching import Progress, cache_folder, silent
from fedgft.data.pixels import ABSENT, Album, load_pixels
from fedgft.data.roles import Roles, check_roles, group_columns
from fedgft.data.table import read_frame
from fedgft.errors import FedgftError
from fedgft.files import expanded

if TYPE_CHECKING:
    import polars as pl

IMAGE = ("image", "filename", "file", "path", "image_id")  # columns that may hold the names
ESCAPES = r"^[/\\]|^[A-Za-z]:|(^|[/\\])\.\.([/\\]|$)|\x00"  # names that lead out of the folder
SIZES = range(8, 1025)


def load_images(
    folder: str | Path,
    table: str | Path,
    *,
    label: str,
    group: str | Sequence[str],
    client: str | None = None,
    split: str | None = None,
    positive: str | None = None,
    image: str | None = None,
    size: int = 64,
    crop: int | None = None,
    skip_bad: bool = False,
    cache: str | Path | None = None,
    on_progress: Progress = silent,
) -> Dataset:
    """The images that a CSV or Parquet table names, relative to the folder, in its column `image`.

    The central square of `crop` pixels (the largest, if None) becomes `size` x `size`.
    """
    roles, source = Roles(label, group, client, split, positive), str(table)
    frame = read_frame(table)
    check_roles(frame, roles, source=source)
    names = names_of(frame, _image_column(frame, roles, image, source=source), source=source)
    album = album_of(folder, names, size=size, crop=crop, cache=cache)
    data = assembled(frame, album, roles, source=source, skip_bad=skip_bad, on_progress=on_progress)
    notes = [f"{source}: {reading.class_note(data.classes, roles)}", *data.notes]
    if twice := len(names) - len(set(names)):
        notes.append(f"{source}: {twice} row(s) name an image that another row names too")
    return replace(data, name=Path(table).stem, notes=tuple(notes))


def checked_folder(folder: str | Path) -> Path:
    home = expanded(folder)
    if not home.is_dir():
        raise FedgftError(f"{folder}: no such folder")
    return home


def album_of(
    folder: str | Path,
    names: tuple[str, ...],
    *,
    size: int,
    crop: int | None,
    cache: str | Path | None,
) -> Album:
    if size not in SIZES:
        raise FedgftError(f"--size {size}: must be from {SIZES[0]} to {SIZES[-1]} pixels")
    if crop is not None and crop < 1:
        raise FedgftError(f"--crop {crop}: must be at least 1 pixel")
    place = cache_folder() / "images" if cache is None else expanded(cache)
    return Album(checked_folder(folder), names, size, crop, place)


def _image_column(frame: "pl.DataFrame", roles: Roles, image: str | None, *, source: str) -> str:
    """The one asked for, or the first with a usual name; it plays no other part."""
    group = group_columns(roles.group, frame.columns)
    taken = {roles.label, *group, roles.client, roles.split} - {None}
    if image in taken:
        raise FedgftError(f"{source}: column '{image}' (--image) has another part already")
    usual = [name for name in IMAGE if name in frame.columns and name not in taken]
    if image is None and not usual:
        raise FedgftError(
            f"{source}: no column is called {', '.join(IMAGE[:-1])} or {IMAGE[-1]}: --image must "
            "name the one that holds the images' file names"
        )
    return usual[0] if image is None else image


def names_of(frame: "pl.DataFrame", column: str, *, source: str) -> tuple[str, ...]:
    """File names that stay below the folder."""
    names = as_text(column_of(frame, column, source=source, option="--image"))
    absent = names.null_count() + int((names == "").sum())
    if absent:
        raise FedgftError(f"{source}: image column '{column}' lacks {absent} file name(s)")
    outside = names.filter(names.str.contains(ESCAPES))
    if len(outside):
        raise FedgftError(
            f"{source}: image column '{column}' leads out of the folder with {outside[0]!r}: "
            "names must be relative to it, without '..'"
        )
    return tuple(names.to_list())


def assembled(
    frame: "pl.DataFrame",
    album: Album,
    roles: Roles,
    *,
    source: str,
    skip_bad: bool,
    on_progress: Progress,
) -> Dataset:
    """The table is read first, and missing files are counted: decoding may take an hour."""
    data = _described(frame, roles, source=source)
    if not skip_bad:
        _refuse(album, {i: ABSENT for i, mark in enumerate(album.marks) if mark is None})
    images, bad = load_pixels(album, on_progress)
    if not skip_bad:
        _refuse(album, bad)
    if bad:
        kept = np.ones(len(frame), bool)
        kept[list(bad)] = False
        _check_left(data, kept, source=f"{source}: {_first(album, bad)}")
        data = _described(frame.filter(kept), roles, source=source)
    note = f"{source}: {_sentence(album, bad)}"
    return replace(data, features=images.transpose(0, 3, 1, 2), notes=(note, *data.notes))


def _described(frame: "pl.DataFrame", roles: Roles, *, source: str) -> Dataset:
    """All that the table says of the images; their pixels are still to come."""
    check_roles(frame, roles, source=source)
    labels, classes = reading.labels_of(frame, roles, source=source)
    groups, group_names, notes = reading.groups_of(frame, roles, source=source)
    clients, client_names = reading.clients_of(frame, roles, source=source)
    return Dataset(
        name=source,
        features=np.empty((len(labels), 3, 0, 0), np.uint8),
        labels=labels,
        groups=groups,
        columns=("red", "green", "blue"),
        classes=classes,
        group_names=group_names,
        clients=clients,
        client_names=client_names,
        test=reading.test_of(frame, roles, source=source),
        notes=tuple(notes),
    )


def _first(album: Album, bad: dict[int, str]) -> str:
    total, place = len(album.names), min(bad)
    which = f"'{album.names[place]}' ({bad[place]})"
    return f"{len(bad)} of {total} images cannot be used, the first: {which}"


def _refuse(album: Album, bad: dict[int, str]) -> None:
    if bad:
        raise FedgftError(
            f"{album.folder}: {_first(album, bad)}; mend them, or leave them out (--skip-bad)"
        )


def _check_left(data: Dataset, kept: np.ndarray, *, source: str) -> None:
    """A class or a group must not vanish with the bad images unnoticed."""
    if not kept.any():
        raise FedgftError(f"{source}; none is left")
    parts = [("class", data.classes, data.labels), ("group", data.group_names, data.groups)]
    if data.test is not None:
        parts.append(("split", ("train", "test"), data.test.astype(np.int64)))
    for part, names, codes in parts:
        left = set(codes[kept].tolist())
        lost = [name for code, name in enumerate(names) if code not in left]
        if lost:
            raise FedgftError(f"{source}; without them {part} '{lost[0]}' has no image left")


def _sentence(album: Album, bad: dict[int, str]) -> str:
    cut = f"central {album.crop} x {album.crop} pixels" if album.crop else "largest central square"
    out = f"{_first(album, bad)}; they are left out; " if bad else ""
    return (
        f"{out}{len(album.names) - len(bad)} images, of each the {cut}, resized to "
        f"{album.size} x {album.size} (cache entry {album.key[:8]})"
    )
