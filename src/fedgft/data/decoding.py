"""One image file as a small square of bytes, and the threads that do many of them."""

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from fedgft.errors import FedgftError

if TYPE_CHECKING:
    from PIL import Image

LARGE, MOST, ONE_AT_A_TIME = 1 << 24, 1 << 26, Lock()  # pixels
BOMB = "more pixels than are safe to decode"
GAP = 3  # quick reductions stop at this many times the wanted size; a good filter does the rest
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")  # others may start programs
ORIENTATION = 0x0112  # the EXIF tag; what undoes its values 2 to 8, in Pillow's words:
TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270",
         "TRANSVERSE", "ROTATE_90")  # fmt: skip


@contextmanager
def decoders() -> Iterator[ThreadPoolExecutor]:
    """Threads, since Pillow decodes outside Python's lock; what it only warns of is settled here,
    as filters of warnings belong to the whole process."""
    try:
        from PIL import Image
    except ImportError:
        raise FedgftError("images need Pillow: pip install 'fedgft[images]'") from None
    Image.init()  # all formats, before the threads ask for them
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with warnings.catch_warnings(), ThreadPoolExecutor(cores) as pool:
        warnings.filterwarnings("ignore", module=r"PIL\b")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield pool


def decode(path: Path, *, size: int, crop: int | None) -> np.ndarray | str:
    """The central square, (size, size, 3), or why the image is bad.

    What may be different next time (no permission, no memory) is an error: nothing to remember.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path, formats=FORMATS) as image, _turn(image):
            if image.width * image.height > MOST and image.format != "JPEG":  # it is drafted
                return BOMB
            return _square(image, path, size=size, crop=crop)
    except (FedgftError, MemoryError):
        raise
    except UnidentifiedImageError:
        return "not an image"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return BOMB
    except Exception as error:  # a damaged file can lead a decoder to any of them
        if isinstance(error, OSError) and error.errno is not None:
            raise FedgftError(f"{path}: cannot be read ({error.strerror})") from None
        return f"damaged: {error}"


def _turn(image: "Image.Image") -> AbstractContextManager[Any]:
    """Large ones wait for each other: ten kilobytes may unfold to hundreds of megabytes, and there
    is a thread for every core."""
    return ONE_AT_A_TIME if image.width * image.height > LARGE else nullcontext()


def _square(image: "Image.Image", path: Path, *, size: int, crop: int | None) -> np.ndarray:
    """Exactly central, be it half a pixel: so it may be turned last, when it is small."""
    from PIL import Image

    width, height = image.size
    side = crop or min(width, height)
    if side > min(width, height):
        raise FedgftError(f"{path}: {width} x {height} pixels are too few for --crop {crop}")
    wanted = (-(-width * GAP * size // side), -(-height * GAP * size // side))
    drafted = image.draft(None, wanted)  # a large JPEG is decoded at half its size, or less
    scale = width / drafted[1][2] if drafted else 1.0
    image.load()
    left, top = (width - side) / 2 / scale, (height - side) / 2 / scale
    box = (left, top, left + side / scale, top + side / scale)
    small = _rgb(image).resize((size, size), Image.Resampling.BICUBIC, box, reducing_gap=GAP)
    turn = 1
    with suppress(Exception):  # a damaged tag harms no pixel
        turn = image.getexif().get(ORIENTATION, 1)
    if turn in range(2, 9):
        small = small.transpose(Image.Transpose[TURNS[turn - 2]])
    return np.asarray(small)


def _rgb(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if image.mode.startswith("I"):  # sixteen bits, all above 255 would be white
        levels = np.asarray(image)
        if levels.min() < 0 or levels.max() > 0xFFFF:
            raise ValueError("32 bits a pixel")
        image = Image.fromarray((levels >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("pixels are fractions")
    if image.has_transparency_data and image.mode != "RGBA":
        image = image.convert("RGBA")  # palettes have it in ways that only this step knows
    return image if image.mode == "RGB" else image.convert("RGB")  # it would copy, else
