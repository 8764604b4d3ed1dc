"""Load a folder of images together with a table that describes them.

The features are the pixels alone, as bytes; label, group, client and split are read as in any
table. CelebA, as its authors publish it, is turned into such a table: each requested
attribute becomes a column of words, "Smiling" or "not Smiling".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.data.dataset import Dataset
from fedgft.data.encode import as_text, data_error, get_column, suggest_name
from fedgft.data.image_cache import NO_SUCH_FILE, ImageCache
from fedgft.data.remote_files import Progress, get_cache_folder, ignore_progress
from fedgft.data.table import (
    Roles,
    check_roles,
    describe_classes,
    read_frame,
    read_roles,
    split_group_columns,
)
from fedgft.errors import FedgftError, LazyModule
from fedgft.formatting import format_count
from fedgft.store import expand_user, file_error

if TYPE_CHECKING:
    import polars as pl
else:
    pl = LazyModule("polars")

IMAGE_COLUMNS = ("image", "filename", "file", "path", "image_id")  # usual names of the column
ESCAPES = r"^[/\\]|^[A-Za-z]:|(^|[/\\])\.\.([/\\]|$)|\x00"  # names that lead out of the folder
SIZES = range(8, 1025)

CELEBA_IMAGES = "img_align_celeba"
CELEBA_ATTRIBUTES = "list_attr_celeba.txt"
CELEBA_PARTITION = "list_eval_partition.txt"
CELEBA_IDENTITY = "identity_CelebA.txt"
CELEBA_FOLDERS = ("", "Anno", "Eval", "Img")  # all files in one folder, or as in the archive
VALID = {"drop": None, "train": "train", "test": "test"}


@dataclass(frozen=True)
class ImageOptions:
    """How images are read.

    Parameters
    ----------
    size
        Pixels per side of the squares that models receive.
    crop
        Pixels per side of the central square that is cut out first; None: the largest.
    skip_bad
        Leave out images that are missing or damaged, instead of raising an error.
    cache
        Folder for decoded images; None: the user's cache folder.
    on_progress
        Called while images are decoded.
    """

    size: int = 64
    crop: int | None = None
    skip_bad: bool = False
    cache: str | Path | None = None
    on_progress: Progress = ignore_progress

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise FedgftError(f"`size` {self.size}: must be from {SIZES[0]} to {SIZES[-1]} pixels")
        if self.crop is not None and self.crop < 1:
            raise FedgftError(f"`crop` {self.crop}: must be at least 1 pixel")

    def open_cache(self, folder: Path, names: tuple[str, ...]) -> ImageCache:
        """Return the cache entry of these images."""
        place = get_cache_folder() / "images" if self.cache is None else expand_user(self.cache)
        return ImageCache(folder, names, self.size, self.crop, place)


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
    on_progress: Progress = ignore_progress,
) -> Dataset:
    """Read the images that a table names.

    Parameters
    ----------
    folder
        The folder of the images; file names in the table are relative to it.
    table
        CSV or Parquet.
    label, group, client, split, positive
        See `Roles`.
    image
        The column of file names; default: the first of `IMAGE_COLUMNS` that the table has.
    size, crop, skip_bad, cache, on_progress
        See `ImageOptions`.
    """
    options = ImageOptions(size, crop, skip_bad, cache, on_progress)
    roles = Roles(label, group, client, split, positive)
    source = str(table)
    frame = read_frame(table)
    check_roles(frame, roles, source=source)
    column = _find_image_column(frame, roles, image, source=source)
    names = _read_names(frame, column, source=source)
    images = options.open_cache(_check_folder(folder), names)
    data = _assemble(frame, roles, options, images=images, source=source)
    notes = [f"{source}: {describe_classes(data.classes, roles)}", *data.notes]
    if repeated := len(names) - len(set(names)):
        notes.append(f"{source}: rows that name the same image as another row: {repeated}")
    return replace(data, name=Path(table).stem, notes=tuple(notes))


def load_celeba(
    folder: str | Path,
    *,
    label: str = "Smiling",
    group: str | Sequence[str] = "Male",
    client: str | None = None,
    valid: str = "drop",
    size: int = 64,
    crop: int | None = None,
    skip_bad: bool = False,
    cache: str | Path | None = None,
    on_progress: Progress = ignore_progress,
) -> Dataset:
    """Read CelebA in its official layout; the official test part is the test set.

    Parameters
    ----------
    folder
        The files as the authors of CelebA publish them.
    label, group
        Any of the attributes of CelebA.
    client
        None, or "identity": one client per person.
    valid
        What becomes of the official validation part: "drop", "train" or "test".
    size, crop, skip_bad, cache, on_progress
        See `ImageOptions`.
    """
    if client not in (None, "identity"):
        raise FedgftError(f"`client` {client}: the one client column of CelebA is 'identity'")
    if valid not in VALID:
        raise FedgftError(f"`valid` {valid}: must be one of {', '.join(VALID)}")
    home = _check_folder(folder)
    frame, notes = _read_celeba(home, label=label, group=group, client=client, valid=valid)
    names = _read_names(frame, "image", source=CELEBA_ATTRIBUTES)
    options = ImageOptions(size, crop, skip_bad, cache, on_progress)
    images = options.open_cache(_find_official(home, CELEBA_IMAGES), names)
    roles = Roles(label, group, client, "partition", positive=label)
    data = _assemble(frame, roles, options, images=images, source="celeba")
    return replace(_put_absence_first(data), notes=(*notes, *data.notes))


def _check_folder(folder: str | Path) -> Path:
    home = expand_user(folder)
    if not home.is_dir():
        raise file_error(folder, "no such folder")
    return home


def _find_image_column(frame: pl.DataFrame, roles: Roles, image: str | None, *, source: str) -> str:
    """Return the column `image`, or the first column with a usual name and no other role."""
    group = split_group_columns(roles.group, frame.columns)
    taken = {roles.label, *group, roles.client, roles.split} - {None}
    if image in taken:
        raise FedgftError(f"{source}: column '{image}' (`image`) has another role already")
    if image is not None:
        return image
    usual = [name for name in IMAGE_COLUMNS if name in frame.columns and name not in taken]
    if not usual:
        names = f"{', '.join(IMAGE_COLUMNS[:-1])} or {IMAGE_COLUMNS[-1]}"
        remedy = "`image` must name the one that holds the images' file names"
        raise FedgftError(f"{source}: no column is called {names}: {remedy}")
    return usual[0]


def _read_names(frame: pl.DataFrame, column: str, *, source: str) -> tuple[str, ...]:
    """Return the file names; refuse names that lead out of the folder."""
    names = as_text(get_column(frame, column, source=source, option="`image`"))
    if absent := names.null_count() + int((names == "").sum()):
        raise data_error(
            source, f"image column '{column}' lacks {format_count(absent, 'file name')}"
        )
    outside = names.filter(names.str.contains(ESCAPES))
    if len(outside):
        problem = f"image column '{column}' leads out of the folder with {outside[0]!r}"
        raise data_error(source, f"{problem}: names must be relative to it, without '..'")
    return tuple(names.to_list())


def _assemble(
    frame: pl.DataFrame, roles: Roles, options: ImageOptions, *, images: ImageCache, source: str
) -> Dataset:
    """Read the table and check for missing files first, because decoding images takes long."""
    data = _read_without_pixels(frame, roles, source=source)
    missing = {i: NO_SUCH_FILE for i, mark in enumerate(images.marks) if mark is None}
    _refuse_bad(images, missing, options)
    pixels, bad = images.load(options.on_progress)
    _refuse_bad(images, bad, options)
    crop = images.crop
    cut = f"central {crop} x {crop} pixels" if crop else "largest central square"
    size = f"resized to {images.size} x {images.size} (cache entry {images.key[:8]})"
    note = f"{len(images.names) - len(bad)} images, of each the {cut}, {size}"
    if bad:
        good = np.ones(len(frame), bool)
        good[list(bad)] = False
        summary = _describe_bad(images, bad)
        _check_remaining(data, good, source=f"{source}: {summary}")
        data = _read_without_pixels(frame.filter(good), roles, source=source)
        note = f"{summary}; they are left out; {note}"
    notes = (f"{source}: {note}", *data.notes)
    return replace(data, features=pixels.transpose(0, 3, 1, 2), notes=notes)


def _read_without_pixels(frame: pl.DataFrame, roles: Roles, *, source: str) -> Dataset:
    known = read_roles(frame, roles, source=source)
    empty = np.empty((len(frame), 3, 0, 0), np.uint8)
    return Dataset(features=empty, columns=("red", "green", "blue"), **known)


def _describe_bad(images: ImageCache, bad: dict[int, str]) -> str:
    first = f"'{images.names[min(bad)]}' ({bad[min(bad)]})"
    return f"{len(bad)} of {len(images.names)} images cannot be used, the first: {first}"


def _refuse_bad(images: ImageCache, bad: dict[int, str], options: ImageOptions) -> None:
    if bad and not options.skip_bad:
        remedy = "mend them, or leave them out (`skip_bad`)"
        raise data_error(images.folder, f"{_describe_bad(images, bad)}; {remedy}")


def _check_remaining(data: Dataset, good: np.ndarray, *, source: str) -> None:
    """Refuse to drop bad images if a class, group or part of the split would vanish with them."""
    if not good.any():
        raise FedgftError(f"{source}; none is left", kind="data")
    parts = [("class", data.classes, data.labels), ("group", data.group_names, data.groups)]
    if data.test is not None:
        parts.append(("split", ("train", "test"), data.test.astype(np.int64)))
    for part, names, codes in parts:
        lost = np.setdiff1d(np.arange(len(names)), codes[good])
        if len(lost):
            text = f"{source}; without them {part} '{names[lost[0]]}' has no image left"
            raise FedgftError(text, kind="data")


def _read_celeba(
    home: Path, *, label: str, group: str | Sequence[str], client: str | None, valid: str
) -> tuple[pl.DataFrame, list[str]]:
    """Return a table (file name, attributes in words, train or test, person), and notes."""
    columns: dict[str, list[Any]] = {}
    columns |= _read_attributes(_find_official(home, CELEBA_ATTRIBUTES), label, group)
    place = _find_official(home, CELEBA_PARTITION)
    parts = _read_values(place, "[012]", what="a part, 0, 1 or 2")
    known = set(columns["image"])
    for number, image in enumerate(parts, 1):
        if image not in known:
            problem = f"line {number} names '{image}', which {CELEBA_ATTRIBUTES} does not list"
            raise data_error(place, problem)
    words = {"0": "train", "1": VALID[valid], "2": "test"}
    columns["partition"] = [words[part] for part in _align(place, parts, columns["image"])]
    if client:
        place = _find_official(home, CELEBA_IDENTITY)
        persons = _read_values(place, r"\d{1,18}", what="the number of a person")
        columns["identity"] = list(map(int, _align(place, persons, columns["image"])))
    fate = "are left out" if valid == "drop" else f"count as {valid}"
    count = sum(values == ["1"] for values in parts.values())
    notes = [f"celeba: the {count} images of the official validation part {fate}"]
    frame = pl.DataFrame(columns).drop_nulls("partition")
    if frame.height == 0:
        raise data_error(home, f"{CELEBA_ATTRIBUTES} and {CELEBA_PARTITION} leave no image at all")
    return frame, notes


def _put_absence_first(data: Dataset) -> Dataset:
    """Put "not Male" before "Male"; alphabetical order would put capitals first."""
    names = data.group_names
    present = [[not part.startswith("not ") for part in name.split(" & ")] for name in names]
    order = sorted(range(len(names)), key=present.__getitem__)
    rank = np.argsort([*order, len(order)])
    rank[-1] = -1  # a group that is not recorded stays so
    return replace(data, groups=rank[data.groups], group_names=tuple(names[g] for g in order))


def _find_official(home: Path, name: str) -> Path:
    """Return a file of the official layout, or its folder of images."""
    for folder in CELEBA_FOLDERS:
        if (home / folder / name).exists():
            return home / folder / name
    files = f"{CELEBA_IMAGES}/, {CELEBA_ATTRIBUTES} and {CELEBA_PARTITION}"
    files += f" (for `client` identity, {CELEBA_IDENTITY} too)"
    layout = f"the folder must hold CelebA as its authors give it to you: {files}"
    raise file_error(home, f"no {name} there; {layout}")


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8-sig", errors="replace").rstrip().splitlines()
    except OSError as error:
        raise file_error(file, f"cannot be read ({error.strerror})") from None


def _read_attributes(file: Path, label: str, group: str | Sequence[str]) -> dict[str, list[str]]:
    """Return the file names as column "image", and one column of words per requested attribute."""
    lines = _read_lines(file)
    body = lines[2:]
    if len(lines) < 2 or lines[0].strip() != str(len(body)):
        found = lines[0].strip()[:40] if lines else ""
        raise data_error(file, f"line 1 must hold the number of images, {len(body)}, not '{found}'")
    known = lines[1].split()
    repeated = [name for name, count in Counter(known).items() if count > 1]
    if repeated:
        raise data_error(file, f"line 2 names attribute '{repeated[0]}' more than once")
    asked = {name: "group" for name in split_group_columns(group, known)} | {label: "label"}
    for name, option in asked.items():
        if name not in known:
            hint = suggest_name(name, known)
            raise FedgftError(f"{file}: no attribute '{name}' (`{option}`){hint}")
    what = f"{len(known)} values, each 1 or -1"
    rows = _read_values(file, "-?1", what=what, width=len(known), start=3)
    columns = {"image": list(rows)}
    for name in asked:
        place = known.index(name)
        columns[name] = [name if row[place] == "1" else f"not {name}" for row in rows.values()]
    return columns


def _read_values(
    file: Path, pattern: str, *, what: str, width: int = 1, start: int = 1
) -> dict[str, list[str]]:
    """Return the values after each file name, in the order of the lines.

    Parameters
    ----------
    file
        From line number `start` on, each line holds a file name and `width` values.
    pattern, what
        The form of a value, and what error messages call the values.
    """
    form = re.compile(rf"\s*(\S+)((?:\s+{pattern}){{{width}}})\s*")
    found: dict[str, list[str]] = {}
    for number, line in enumerate(_read_lines(file)[start - 1 :], start):
        cells = form.fullmatch(line)
        if cells is None:
            problem = f"must hold a file name and {what}, not '{line[:60]}'"
            raise data_error(file, f"line {number} {problem}")
        if cells[1] in found:
            raise data_error(file, f"line {number} names '{cells[1]}' a second time")
        found[cells[1]] = cells[2].split()
    return found


def _align(file: Path, found: dict[str, list[str]], images: Sequence[str]) -> list[str]:
    """Return the value of each image, in the order of `images`."""
    for number, image in enumerate(images, 3):
        if image not in found:
            problem = f"no line for '{image}', which is on line {number} of {CELEBA_ATTRIBUTES}"
            raise data_error(file, problem)
    return [found[image][0] for image in images]
