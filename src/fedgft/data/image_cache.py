"""Images decoded once, into one file of pixels that is mapped into memory.

In the cache folder, ``KEY.pixels`` holds the good images one after another. ``KEY.journal`` holds
one JSON line per block of images: the number of file names, the number of good images, the
checksum, and the bad images with the reasons. Each block is written before its journal line, in the
order of the names, so an interrupted decode continues after the last complete block. Blocks that do
not match the journal are decoded again.
"""

import hashlib
import json
import os
import stat
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fedgft.data.remote_files import Progress
from fedgft.errors import FedgftError, import_extra
from fedgft.store import file_error, lock_file, open_private_file, parse_json

if TYPE_CHECKING:
    from PIL import Image

VERSION = 1  # version of the pixels and of the file format; part of the key
BLOCK_IMAGES = 512  # images per block, which is one line of the journal
MAX_BLOCK_BYTES = 1 << 25  # a block of large images has fewer images, to stay below this size
NO_SUCH_FILE = "no such file"
CORRUPT_LINE = (ValueError, LookupError, TypeError, AttributeError)  # raised for a corrupt line
LARGE_IMAGE = 1 << 24  # pixels; larger images are decoded one at a time: 10 kB can expand to 100 MB
MAX_PIXELS = 1 << 26
LARGE_IMAGE_LOCK = Lock()
TOO_LARGE = "more pixels than are safe to decode"
GAP = 3  # fast downscaling stops at this multiple of the final size; bicubic does the rest
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # other decoders may run programs
ORIENTATION = 0x0112  # the EXIF tag
TURNS = (0, 3, 1, 5, 4, 6, 2)  # the `Image.Transpose` values that undo orientations 2 to 8


@contextmanager
def open_decoders() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of one thread per core: Pillow releases Python's lock while it decodes.

    Pillow's warnings are configured here, because warning filters belong to the whole process.
    """
    import_extra("PIL", "reading images")
    from PIL import Image

    Image.init()  # all formats, before the threads ask for them
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with warnings.catch_warnings(), ThreadPoolExecutor(cores) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\b")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield pool


def decode(path: Path, *, size: int, crop: int | None) -> np.ndarray | str:
    """Decode the central square of an image.

    Parameters
    ----------
    path
        The file.
    size
        Pixels per side of the result.
    crop
        Pixels per side of the square that is cut out; None: the largest.

    Returns
    -------
    pixels
        (size, size, 3) uint8, or the reason why the image is bad. Temporary
        problems (no permission, no memory) are raised as errors instead and are not cached.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path, formats=FORMATS) as image:
            pixels = image.width * image.height
            if pixels > MAX_PIXELS and image.format != "JPEG":
                return TOO_LARGE  # a JPEG is decoded at a reduced size
            with LARGE_IMAGE_LOCK if pixels > LARGE_IMAGE else nullcontext():
                return _cut_square(image, path, size=size, crop=crop)
    except (FedgftError, MemoryError):
        raise
    except UnidentifiedImageError:
        return "not an image"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return TOO_LARGE
    except Exception as error:  # a damaged file can make a decoder raise any exception
        if isinstance(error, OSError) and error.errno is not None:
            raise file_error(path, f"cannot be read ({error.strerror})") from None
        return f"damaged: {error}"


def _cut_square(image: "Image.Image", path: Path, *, size: int, crop: int | None) -> np.ndarray:
    """Cut out and resize the square.

    The square is exactly central, so it can be rotated last, when it is small.
    """
    from PIL import Image

    width, height = image.size
    side = crop or min(width, height)
    if side > min(width, height):
        raise FedgftError(f"{path}: {width} x {height} pixels are too few for `crop` {crop}")
    wanted = (-(-width * GAP * size // side), -(-height * GAP * size // side))
    drafted = image.draft(None, wanted)  # a large JPEG is decoded at half its size, or less
    scale = width / drafted[1][2] if drafted else 1.0
    image.load()
    left = (width - side) / 2 / scale
    top = (height - side) / 2 / scale
    box = (left, top, left + side / scale, top + side / scale)
    small = _to_rgb(image).resize((size, size), Image.Resampling.BICUBIC, box, reducing_gap=GAP)
    orientation = 1
    with suppress(Exception):  # a damaged tag does not affect the pixels
        orientation = image.getexif().get(ORIENTATION, 1)
    if orientation in range(2, 9):
        small = small.transpose(Image.Transpose(TURNS[orientation - 2]))
    return np.asarray(small)


def _to_rgb(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if image.mode.startswith("I"):  # sixteen bits: a plain conversion makes all above 255 white
        levels = np.asarray(image)
        if levels.min() < 0 or levels.max() > 0xFFFF:
            raise ValueError("32 bits a pixel")
        image = Image.fromarray((levels >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("pixels are fractions")
    if image.has_transparency_data and image.mode != "RGBA":
        image = image.convert("RGBA")  # handles all ways of storing transparency
    return image if image.mode == "RGB" else image.convert("RGB")


@dataclass(frozen=True)
class Block:
    """A line of the journal.

    Parameters
    ----------
    names
        How many images it covers.
    rows
        How many of them are good: their pixels are in the file.
    crc
        CRC-32 of the pixels and of `bad`.
    bad
        Position among all names, and reason, of each bad image.
    """

    names: int
    rows: int
    crc: int
    bad: dict[str, str]

    @classmethod
    def parse(cls, line: bytes, start: int) -> "Block":
        """Parse the journal line of the block that begins at the name with the index `start`.

        Any other line raises one of the errors in `CORRUPT_LINE`.
        """
        found = parse_json(line)
        bad = {str(position): str(reason) for position, reason in found["bad"].items()}
        block = cls(found["names"], found["rows"], found["crc"], bad)
        numbers = (block.names, block.rows, block.crc)
        if not all(type(n) is int and n >= 0 for n in numbers) or block.names > BLOCK_IMAGES:
            raise ValueError("it does not hold numbers of images")
        places = set(map(int, bad)) & set(range(start, start + block.names))
        if len(places) < len(bad) or block.rows + len(bad) != block.names:
            raise ValueError("it covers other images")
        return block


def _compute_crc(pixels: bytes, bad: dict[str, str]) -> int:
    return zlib.crc32(json.dumps(bad).encode(), zlib.crc32(pixels))


@dataclass(frozen=True)
class ImageCache:
    """Images below a folder, decoded to one size, and their files in the cache.

    Parameters
    ----------
    folder, names
        The images, relative to the folder.
    size, crop
        See `decode`.
    cache
        The folder of the cache.
    """

    folder: Path
    names: tuple[str, ...]
    size: int
    crop: int | None
    cache: Path

    @cached_property
    def marks(self) -> list[tuple[int, int] | None]:
        """Size and modification time of each file; None where there is no regular file."""
        return [_stat_file(f"{self.folder}/{name}") for name in self.names]

    @cached_property
    def key(self) -> str:
        """Hash of everything that the pixels depend on, and of the folder.

        Name, size and time may not identify a file: some archives give all files the same time,
        and uncompressed formats give all files the same size.
        """
        parts = [VERSION, self.size, self.crop, str(self.folder.resolve())]
        digest = hashlib.sha256(json.dumps(parts).encode())
        for name, mark in zip(self.names, self.marks, strict=True):
            digest.update(f"{name}\0{mark}\n".encode())
        return digest.hexdigest()[:32]

    def load(self, on_progress: Progress) -> tuple[np.ndarray, dict[int, str]]:
        """Return the pixels, decoding what the cache lacks.

        Returns
        -------
        pixels, bad
            (good images, size, size, 3) uint8, mapped copy-on-write: writing to it leaves the
            cache as it is. The positions of the bad images with the reasons.
        """
        blocks = self._find_finished()
        if blocks is None:
            with self._lock(on_progress):
                blocks = self._find_finished() or self._decode_all(on_progress)
        bad = {int(place): reason for block in blocks for place, reason in block.bad.items()}
        shape = (len(self.names) - len(bad), self.size, self.size, 3)
        if shape[0] == 0:  # an empty file cannot be mapped
            return np.empty(shape, np.uint8), bad
        return np.memmap(self.path("pixels"), np.uint8, "c", shape=shape), bad

    def path(self, suffix: str) -> Path:
        """Return the path of a cache file; the suffix is pixels, part, journal or lock."""
        return self.cache / f"{self.key}.{suffix}"

    @property
    def _row_bytes(self) -> int:
        return 3 * self.size * self.size

    def _decode(self, position: int) -> np.ndarray | str:
        if self.marks[position] is None:
            return NO_SUCH_FILE
        return decode(self.folder / self.names[position], size=self.size, crop=self.crop)

    def _find_finished(self) -> list[Block] | None:
        """Return the blocks of a complete cache, or None.

        If the file was modified after it was written, all checksums are verified; otherwise only
        the first one is.
        """
        try:
            lines = self.path("journal").read_bytes().splitlines()
            blocks = self._parse_journal(lines)
            written = parse_json(lines[-1])["finished"]
            with self.path("pixels").open("rb") as stream:
                found = os.fstat(stream.fileno())
                checked = blocks[:1] if found.st_mtime_ns == written else blocks
                covered = sum(block.names for block in blocks) == len(self.names)
                complete = covered and found.st_size == self._count_bytes(blocks)
                intact = complete and self._verify(checked, stream) == checked
            return blocks if intact else None
        except (OSError, *CORRUPT_LINE):
            return None

    def _count_bytes(self, blocks: Sequence[Block]) -> int:
        return sum(block.rows for block in blocks) * self._row_bytes

    def _parse_journal(self, lines: list[bytes]) -> list[Block]:
        """Return the blocks before the first line that does not hold a valid block."""
        blocks: list[Block] = []
        names = 0
        with suppress(*CORRUPT_LINE):
            if parse_json(lines[0])["key"] == self.key:
                for line in lines[1:]:
                    blocks.append(Block.parse(line, names))
                    names += blocks[-1].names
        return blocks

    def _verify(self, blocks: list[Block], stream: BinaryIO) -> list[Block]:
        """Return the leading blocks whose pixels are in the file as they were written."""
        for position, block in enumerate(blocks):
            length = block.rows * self._row_bytes
            pixels = stream.read(length)
            if len(pixels) != length or _compute_crc(pixels, block.bad) != block.crc:
                return blocks[:position]
        return blocks

    @contextmanager
    def _lock(self, on_progress: Progress) -> Iterator[None]:
        """Hold the lock of these images; a second process waits for the first.

        A file-system error inside the ``with`` block is raised with advice on the cache folder.
        """
        try:
            with ExitStack() as stack:
                self.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
                try:
                    stack.enter_context(lock_file(self.path("lock"), timeout=0))
                except TimeoutError:
                    on_progress("waiting: another process decodes these images", 0, None)
                    stack.enter_context(lock_file(self.path("lock")))
                yield
        except OSError as error:
            problem = f"the cache folder cannot be written ({error.strerror or error})"
            size = f"the images need {len(self.names) * self._row_bytes / 1e6:,.0f} MB there"
            text = f"{problem}; {size}, or name another folder (`cache`)"
            raise file_error(self.cache, text) from error

    def _decode_all(self, on_progress: Progress) -> list[Block]:
        """Decode everything that an earlier process has not finished."""
        total = len(self.names)
        step = max(1, min(BLOCK_IMAGES, MAX_BLOCK_BYTES // self._row_bytes))
        self.path("pixels").unlink(missing_ok=True)  # it is damaged
        with (
            open_private_file(self.path("journal"), "a+b") as journal,
            open_private_file(self.path("part"), "a+b") as part,
            open_decoders() as pool,
        ):
            blocks = self._resume(journal, part)
            for start in range(sum(block.names for block in blocks), total, step):
                on_progress("decoding images", start, total)
                positions = range(start, min(start + step, total))
                decoded = dict(zip(positions, pool.map(self._decode, positions), strict=True))
                blocks.append(_append_block(journal, part, decoded))
            os.fsync(part.fileno())
            # Write the line before renaming the file: if the process is killed in between, the
            # next process finds complete blocks.
            _append_lines(journal, {"finished": os.fstat(part.fileno()).st_mtime_ns})
        os.replace(self.path("part"), self.path("pixels"))
        on_progress("decoding images", total, total)
        return blocks

    def _resume(self, journal: BinaryIO, part: BinaryIO) -> list[Block]:
        """Return the intact blocks of both files and cut the files off after them."""
        journal.seek(0)
        part.seek(0)
        blocks = self._verify(self._parse_journal(journal.read().splitlines()), part)
        part.truncate(self._count_bytes(blocks))
        journal.truncate(0)
        _append_lines(journal, {"key": self.key}, *(asdict(block) for block in blocks))
        return blocks


def _stat_file(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _append_block(journal: BinaryIO, part: BinaryIO, decoded: dict[int, np.ndarray | str]) -> Block:
    good = b"".join(each.tobytes() for each in decoded.values() if not isinstance(each, str))
    bad = {str(place): each for place, each in decoded.items() if isinstance(each, str)}
    block = Block(len(decoded), len(decoded) - len(bad), _compute_crc(good, bad), bad)
    part.write(good)
    part.flush()
    _append_lines(journal, asdict(block))
    return block


def _append_lines(journal: BinaryIO, *lines: dict[str, Any]) -> None:
    journal.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    journal.flush()
