"""Targets: users' tables, images with their lists and their cache, the archive of public data."""

import os
import warnings
from functools import cache, partial
from pathlib import Path

from fedgft.auditing import measure_file
from fedgft.data import load_table
from fedgft.data import remote_files as fetching
from fedgft.data.image_cache import ImageCache, decode, open_decoders
from fedgft.data.images import load_celeba, load_images
from fedgft.data.schema import describe_table
from fedgft.data.table import read_frame
from fuzzing import Target
from fuzzing.temporary_files import each, file, folder

SQUARE = b"P6 8 8 255\n" + bytes(range(192))  # the smallest image there is
NAMES = ("a.ppm", "b.ppm", "c.ppm")
SIZE = 8


def table(ending: str, data: bytes) -> None:
    """As training, an audit, a site that describes it, and images read it."""
    path = file(f"table{ending}", data)
    each(
        lambda: load_table(path, label="y", group="g", client="c", split="s"),
        lambda: measure_file(path, label="y", group="g", score="p"),
        lambda: measure_file(path, label="y", group=("g", "c"), decision="d"),
        lambda: describe_table(read_frame(path), label="y", group="g", min_rows=1, source="site"),
        lambda: load_images(
            album().folder,
            path,
            label="y",
            group="g",
            size=SIZE,
            image="i",
            cache=folder() / "images",
            skip_bad=True,
        ),
    )


@cache
def album() -> ImageCache:
    home = folder() / "img_align_celeba"
    for name in NAMES:
        file(f"img_align_celeba/{name}", SQUARE)
        os.utime(home / name, ns=(0, 0))
    return ImageCache(home, NAMES, SIZE, None, folder() / "cache")


def image(data: bytes) -> None:
    path = file("image", data)
    with open_decoders():
        decode(path, size=SIZE, crop=None)


def lists(data: bytes) -> None:
    """The same text in the place of each of the three lists, the two others being good."""
    home = album().folder.parent
    good = {
        "list_attr_celeba.txt": b"3\nSmiling Male\na.ppm 1 -1\nb.ppm -1 1\nc.ppm 1 1\n",
        "list_eval_partition.txt": b"a.ppm 0\nb.ppm 0\nc.ppm 2\n",
        "identity_CelebA.txt": b"a.ppm 1\nb.ppm 2\nc.ppm 2\n",
    }
    readers = []
    for which in good:

        def read(which: str = which) -> None:
            for name, text in good.items():
                file(name, data if name == which else text)
            load_celeba(home, client="identity", valid="train", size=SIZE, cache=home / "images")

        readers.append(read)
    if data in good.values():
        readers = [readers[list(good.values()).index(data)]]
    each(*readers)


def journal(data: bytes) -> None:
    """Beside good pixels, as the journal of a finished cache and as that of a killed decode. It is
    our own file: what is wrong with it is mended without a word."""
    made = album()
    data = data.replace(b"THE-KEY", made.key.encode())
    for ending in ("pixels", "part"):
        for other in made.cache.glob("*"):
            other.unlink()
        made.cache.mkdir(exist_ok=True)
        made.path("journal").write_bytes(data)
        made.path(ending).write_bytes(bytes(range(192)) * len(NAMES))
        images, bad = made.load(lambda *_: None)
        images = images.copy()
        if not bad and images.tobytes() != bytes(range(192)) * len(NAMES):
            raise AssertionError("other pixels than those of the images")


def wheel(data: bytes) -> None:
    """Only a file whose digest is right is kept; here none is."""
    wanted = fetching.RemoteFile("toy.txt", "0" * 64, "", "toy/toy.txt")
    path = file("toy.whl", data)
    try:
        fetching.read_wheel(path, [wanted])
    except fetching.SourceFailed:  # the next source is tried
        return
    outside = [p for p in Path(folder()).rglob("escaped*")]
    if outside:
        raise AssertionError(f"{outside} was written")


TARGETS = [
    Target("table-csv", partial(table, ".csv"), "text"),
    Target("table-parquet", partial(table, ".parquet")),
    Target("image", image),
    Target("image-lists", lists, "text"),
    Target("image-journal", journal, "lines"),
    Target("data-wheel", wheel),
]
warnings.filterwarnings("ignore", module="PIL")
