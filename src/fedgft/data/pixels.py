"""Images as rows of bytes: each is decoded once, into a cache file that is mapped, never loaded.

`KEY.pixels` holds the good images one after another. `KEY.journal` has a JSON line for each block
of them: how many names it covers, how many rows it has, its checksum, the bad images and why. A
block is written before its line, in the order of the names, so a decode that was killed goes on
after the last whole block. What does not match its journal is decoded anew, never trusted.
"""

import errno
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedgft.data.decoding import decode, decoders
from fedgft.data.fetching import Progress
from fedgft.errors import FedgftError
from fedgft.files import NO_LINK, parsed

VERSION = 1  # of the pixels and of the files: another number, another key
BLOCK = 512  # images a line of the journal,
MOST = 1 << 25  # or fewer, where they would be more bytes than this
ABSENT = "no such file"
TORN = (ValueError, LookupError, TypeError, AttributeError)  # what a line that is none leads to


@dataclass(frozen=True)
class Block:
    """A line of the journal."""

    names: int
    rows: int
    crc: int
    bad: dict[str, str]  # place among all names, and reason

    @classmethod
    def of(cls, line: bytes, start: int) -> "Block":
        """From a line; ValueError where it is none, or not that of the names from `start` on."""
        found = parsed(line)
        numbers = [found[name] for name in ("names", "rows", "crc")]
        names, rows, crc = numbers
        bad = {str(place): str(why) for place, why in found["bad"].items()}
        places = range(start, start + names)
        known = [int(place) for place in bad]
        if not all(type(n) is int and n >= 0 for n in numbers) or names > BLOCK:
            raise ValueError("no numbers of images")
        if rows + len(bad) != names or len(set(known)) < len(known) or set(known) - set(places):
            raise ValueError("other images")
        return cls(names, rows, crc, bad)

    def fits(self, pixels: bytes, row: int) -> bool:
        return len(pixels) == self.rows * row and checksum(pixels, self.bad) == self.crc


@dataclass(frozen=True)
class Album:
    """Images below a folder, the size they shall have, and the folder of the cache."""

    folder: Path
    names: tuple[str, ...]
    size: int
    crop: int | None
    cache: Path

    @cached_property
    def marks(self) -> list[tuple[int, int] | None]:
        """Size and time of change of each file, None where there is none."""
        return [_mark(f"{self.folder}/{name}") for name in self.names]

    @cached_property
    def key(self) -> str:
        """With the folder: some archives set all times alike, and plain formats all sizes."""
        about = [VERSION, self.size, self.crop, str(self.folder.resolve())]
        digest = hashlib.sha256(json.dumps(about).encode())
        for name, mark in zip(self.names, self.marks, strict=True):
            digest.update(f"{name}\0{mark}\n".encode())
        return digest.hexdigest()[:32]

    @property
    def row(self) -> int:
        return 3 * self.size * self.size

    def path(self, ending: str) -> Path:
        return self.cache / f"{self.key}.{ending}"

    def decode(self, place: int) -> np.ndarray | str:
        if self.marks[place] is None:
            return ABSENT
        return decode(self.folder / self.names[place], size=self.size, crop=self.crop)


def checksum(pixels: bytes, bad: dict[str, str]) -> int:
    return zlib.crc32(json.dumps(bad).encode(), zlib.crc32(pixels))


def load_pixels(album: Album, on_progress: Progress) -> tuple[np.ndarray, dict[int, str]]:
    """The good images, (kept, size, size, 3), and the places of the others with the reasons."""
    blocks = _finished(album)
    if blocks is None:
        with _alone(album, on_progress) as journal:
            blocks = _finished(album) or _decode_all(album, journal, on_progress)
    bad = {int(place): why for block in blocks for place, why in block.bad.items()}
    shape = (len(album.names) - len(bad), album.size, album.size, 3)
    if shape[0] == 0:  # an empty file cannot be mapped
        return np.empty(shape, np.uint8), bad
    # Copy on write: whoever writes does so in memory, and the cache stays as it is.
    return np.memmap(album.path("pixels"), np.uint8, "c", shape=shape), bad


def _mark(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode):
            return found.st_size, found.st_mtime_ns
    return None


def _finished(album: Album) -> list[Block] | None:
    """The blocks of a whole and sound cache; if its file was touched since, all sums are checked,
    otherwise the first."""
    try:
        lines = album.path("journal").read_bytes().splitlines()
        blocks, written = _lines(album, lines), parsed(lines[-1])["finished"]
        with album.path("pixels").open("rb") as stream:
            found = os.fstat(stream.fileno())
            looked = blocks[:1] if found.st_mtime_ns == written else blocks
            size = sum(block.rows for block in blocks) * album.row
            whole = sum(block.names for block in blocks) == len(album.names)
            sound = whole and found.st_size == size and _sound(album, looked, stream) == looked
            return blocks if sound else None
    except (OSError, *TORN):
        return None


def _lines(album: Album, lines: list[bytes]) -> list[Block]:
    """The blocks of a journal, up to the first line that is torn or something else."""
    blocks, names = [], 0
    with suppress(*TORN):
        if parsed(lines[0])["key"] == album.key:
            for line in lines[1:]:
                blocks.append(Block.of(line, names))
                names += blocks[-1].names
    return blocks


def _sound(album: Album, blocks: list[Block], stream: BinaryIO) -> list[Block]:
    """The blocks from the first on that are in the file as they were written."""
    for place, block in enumerate(blocks):
        if not block.fits(stream.read(block.rows * album.row), album.row):
            return blocks[:place]
    return blocks


@contextmanager
def _alone(album: Album, on_progress: Progress) -> Iterator[BinaryIO]:
    """The journal, which no other process writes to meanwhile: the second one waits.

    The lock is the operating system's, so it ends with the process however that ends.
    """
    with _writing(album):
        album.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        journal = _opened(album.path("journal"))
    with _writing(album), journal:  # closing writes too, what a full disk did not take before
        with suppress(ImportError):  # no such locks on this system
            import fcntl

            try:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # else: none on this disk
                    on_progress("waiting: another process decodes these images", 0, None)
                    fcntl.flock(journal, fcntl.LOCK_EX)
        yield journal


def _opened(path: Path) -> BinaryIO:
    """For reading and appending, by nobody but its owner: the originals may be private."""
    return open(path, "a+b", opener=lambda name, flags: os.open(name, flags | NO_LINK, 0o600))


@contextmanager
def _writing(album: Album) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        need = len(album.names) * album.row / 1e6
        raise FedgftError(
            f"{album.cache}: the cache folder cannot be written ({error.strerror or error}); the "
            f"images need {need:,.0f} MB there, or name another folder (--cache)"
        ) from error


def _decode_all(album: Album, journal: BinaryIO, on_progress: Progress) -> list[Block]:
    """What an earlier process finished is kept, the rest decoded."""
    with _writing(album):
        album.path("pixels").unlink(missing_ok=True)  # it is damaged
        part = _opened(album.path("part"))
    with _writing(album), part, decoders() as pool:
        blocks = _resumed(album, journal, part)
        done, total = sum(block.names for block in blocks), len(album.names)
        step = max(1, min(BLOCK, MOST // album.row))
        for start in range(done, total, step):
            on_progress("decoding images", start, total)
            places = range(start, min(start + step, total))
            decoded = dict(zip(places, pool.map(album.decode, places), strict=True))
            blocks.append(_appended(album, journal, part, decoded))
        with _writing(album):
            os.fsync(part.fileno())
            # The line first: if it is all that gets written, the next process finds whole blocks.
            _write(journal, {"finished": os.fstat(part.fileno()).st_mtime_ns})
            os.replace(album.path("part"), album.path("pixels"))
    on_progress("decoding images", total, total)
    return blocks


def _resumed(album: Album, journal: BinaryIO, part: BinaryIO) -> list[Block]:
    """The sound blocks of both files, which end there from now on."""
    with _writing(album):
        journal.seek(0)
        part.seek(0)
        blocks = _sound(album, _lines(album, journal.read().splitlines()), part)
        part.truncate(sum(block.rows for block in blocks) * album.row)
        journal.truncate(0)
        _write(journal, {"key": album.key}, *(asdict(block) for block in blocks))
    return blocks


def _appended(
    album: Album, journal: BinaryIO, part: BinaryIO, decoded: dict[int, np.ndarray | str]
) -> Block:
    good = b"".join(each.tobytes() for each in decoded.values() if not isinstance(each, str))
    bad = {str(place): each for place, each in decoded.items() if isinstance(each, str)}
    block = Block(len(decoded), len(decoded) - len(bad), checksum(good, bad), bad)
    with _writing(album):
        part.write(good)
        part.flush()
        _write(journal, asdict(block))
    return block


def _write(journal: BinaryIO, *lines: dict[str, Any]) -> None:
    journal.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    journal.flush()
