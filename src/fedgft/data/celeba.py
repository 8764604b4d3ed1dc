"""CelebA as its authors publish it, turned into a table of images.

Each attribute asked for becomes a column of words, "Smiling" or "not Smiling"; from there on it
is read like any user's folder of images.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedgft.data.columns import suggestion
from fedgft.data.dataset import Dataset
from fedgft.data.fetching import Progress, silent
from fedgft.data.images import album_of, assembled, checked_folder, names_of
from fedgft.data.roles import Roles, group_columns
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import polars as pl

IMAGES = "img_align_celeba"
ATTRIBUTES = "list_attr_celeba.txt"
PARTITION = "list_eval_partition.txt"
IDENTITY = "identity_CelebA.txt"
PLACES = ("", "Anno", "Eval", "Img")  # all in one folder, or in those of the archive
VALID = {"drop": None, "train": "train", "test": "test"}


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
    on_progress: Progress = silent,
) -> Dataset:
    """CelebA in its official layout; label and groups are any of its attributes.

    The client may be the "identity". The official test part is the test set; `valid` says where
    the validation part goes: "drop", "train" or "test". Pixels are as in `load_images`.
    """
    if client not in (None, "identity"):
        raise FedgftError(f"--client {client}: the one client column of CelebA is 'identity'")
    if valid not in VALID:
        raise FedgftError(f"--valid {valid}: must be one of {', '.join(VALID)}")
    home = checked_folder(folder)
    frame, notes = _celeba_frame(home, label=label, group=group, client=client, valid=valid)
    names = names_of(frame, "image", source=ATTRIBUTES)
    album = album_of(_official(home, IMAGES), names, size=size, crop=crop, cache=cache)
    roles = Roles(label, group, client, "partition", positive=label)
    data = assembled(
        frame, album, roles, source="celeba", skip_bad=skip_bad, on_progress=on_progress
    )
    return replace(_absence_first(data), notes=(*notes, *data.notes))


def _celeba_frame(
    home: Path, *, label: str, group: str | Sequence[str], client: str | None, valid: str
) -> tuple["pl.DataFrame", list[str]]:
    """Names, the attributes asked for in words, train or test, and who it is."""
    import polars as pl

    chosen, signs = _attributes(_official(home, ATTRIBUTES), label, group)
    parts = _values(_official(home, PARTITION), r"[012]", what="part, 0, 1 or 2")
    for line, image in enumerate(parts, 1):
        if image not in signs:
            where = f"{_official(home, PARTITION)}: line {line}"
            raise FedgftError(f"{where} names '{image}', which {ATTRIBUTES} does not list")
    _check_all(_official(home, PARTITION), parts, signs)
    words = {"0": "train", "1": VALID[valid], "2": "test"}
    columns: dict[str, list] = {"image": list(signs), **_in_words(chosen, signs)}
    columns["partition"] = [words[parts[image]] for image in signs]
    if client:
        people = _values(_official(home, IDENTITY), r"\d{1,18}", what="number of a person")
        _check_all(_official(home, IDENTITY), people, signs)
        columns["identity"] = [int(people[image]) for image in signs]
    fate = "are left out" if valid == "drop" else f"count as {valid}"
    middle = list(parts.values()).count("1")
    notes = [f"celeba: the {middle} images of the official validation part {fate}"]
    frame = pl.DataFrame(columns).drop_nulls("partition")
    if frame.height == 0:
        raise FedgftError(f"{home}: {ATTRIBUTES} and {PARTITION} leave no image at all")
    return frame, notes


def _in_words(chosen: Sequence[str], signs: dict[str, list[str]]) -> dict[str, list[str]]:
    return {
        name: [name if each[place] == "1" else f"not {name}" for each in signs.values()]
        for place, name in enumerate(chosen)
    }


def _absence_first(data: Dataset) -> Dataset:
    """Groups in the order not Male, Male; the order of the alphabet puts capitals first."""
    names = data.group_names
    order = sorted(
        range(len(names)), key=lambda g: [part[:4] != "not " for part in names[g].split(" & ")]
    )
    rank = np.argsort([*order, len(order)])
    rank[-1] = -1  # not recorded: stays so
    return replace(data, groups=rank[data.groups], group_names=tuple(names[g] for g in order))


def _official(home: Path, name: str) -> Path:
    """A file of the official layout, or its folder of images."""
    for place in PLACES:
        if (home / place / name).exists():
            return home / place / name
    raise FedgftError(
        f"{home}: no {name} there; the folder must hold CelebA as its authors give it to you: "
        f"{IMAGES}/, {ATTRIBUTES} and {PARTITION} (for --client identity, {IDENTITY} too)"
    )


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8-sig", errors="replace").rstrip().splitlines()
    except OSError as error:
        raise FedgftError(f"{file}: cannot be read ({error.strerror})") from None


def _attributes(
    file: Path, label: str, group: str | Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """The attributes asked for, and their signs for each image."""
    lines = _lines(file)
    head, body = lines[:2], lines[2:]
    if len(head) < 2 or head[0].strip() != str(len(body)):
        said = head[0].strip()[:40] if head else ""
        raise FedgftError(
            f"{file}: line 1 must hold the number of images, {len(body)}, not '{said}'"
        )
    known = head[1].split()
    repeated = [name for name, count in Counter(known).items() if count > 1]
    if repeated:
        raise FedgftError(f"{file}: line 2 names attribute '{repeated[0]}' more than once")
    asked = {"--label": [label], "--group": group_columns(group, known)}
    chosen = [(option, name) for option, names in asked.items() for name in names]
    for option, name in chosen:
        if name not in known:
            raise FedgftError(f"{file}: no attribute '{name}' ({option}){suggestion(name, known)}")
    names = list(dict.fromkeys(name for _, name in chosen))
    return names, _signs(file, body, known, names)


def _signs(
    file: Path, body: Sequence[str], known: Sequence[str], chosen: Sequence[str]
) -> dict[str, list[str]]:
    places, signs = [known.index(name) + 1 for name in chosen], {}
    for number, line in enumerate(body, 3):
        image, *values = cells = line.split() or [""]
        if len(values) != len(known):
            raise FedgftError(f"{file}: line {number} has {len(values)} values, not {len(known)}")
        wrong = set(values) - {"1", "-1"}
        if wrong:
            raise FedgftError(f"{file}: line {number} has a '{min(wrong)}', not 1 or -1")
        if image in signs:
            raise FedgftError(f"{file}: line {number} names '{image}' a second time")
        signs[image] = [cells[place] for place in places]
    return signs


def _values(file: Path, pattern: str, *, what: str) -> dict[str, str]:
    """The value after each name, in the order of the lines."""
    found: dict[str, str] = {}
    for number, line in enumerate(_lines(file), 1):
        cells = line.split()
        if len(cells) != 2 or not re.fullmatch(pattern, cells[1]):
            raise FedgftError(
                f"{file}: line {number} must hold a file name and a {what}, not '{line[:60]}'"
            )
        if cells[0] in found:
            raise FedgftError(f"{file}: line {number} names '{cells[0]}' a second time")
        found[cells[0]] = cells[1]
    return found


def _check_all(file: Path, found: dict[str, str], images: dict[str, list[str]]) -> None:
    for number, image in enumerate(images, 3):
        if image not in found:
            raise FedgftError(
                f"{file}: no line for '{image}', which is on line {number} of {ATTRIBUTES}"
            )
