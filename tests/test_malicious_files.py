"""Malicious files: paths that lead out of a folder, pickles with code, numbers that fill memory."""

import hashlib
import io
import json
import os
import pickle
import re
import resource
import struct
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedgft.data import load_table
from fedgft.data import remote_files as fetching
from fedgft.data.image_cache import LARGE_IMAGE_LOCK, decode, open_decoders
from fedgft.errors import FedgftError
from fedgft.resnet import read_weights
from fuzzing import SEEDS, messages, targets
from test_resnet import Trap

pytestmark = pytest.mark.slow

TARGETS = targets()


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_an_archive_writes_nothing_but_the_file_asked_for(tmp_path, monkeypatch) -> None:
    """Paths that lead out, absolute ones and links are members like others: they are not read."""
    right = b"the right bytes\n"
    link = zipfile.ZipInfo("toy/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "evil.whl", "w") as archive:
        for name in (
            "../up.txt",
            "toy/../../up.txt",
            str(tmp_path / "absolute.txt"),
            "toy/toy.txt",
        ):
            archive.writestr(name, right)
        archive.writestr(link, str(tmp_path / "elsewhere"))
        archive.writestr("toy/link/through.txt", right)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(tmp_path / "cache"))
    monkeypatch.delenv(fetching.VARIABLE, raising=False)
    monkeypatch.setattr(fetching, "pip_download", lambda *_: tmp_path / "evil.whl")
    digest = hashlib.sha256(right).hexdigest()
    nowhere = (tmp_path / "nowhere").as_uri()
    fetching.obtain([fetching.RemoteFile("toy.txt", digest, nowhere, "toy/toy.txt")])
    assert tree(tmp_path) == {"evil.whl", "cache/toy.txt"}


def test_an_old_archive_of_weights_is_not_unpacked(tmp_path) -> None:
    """Torch once saved tar files, and unpacks them somewhere."""
    with tarfile.open(tmp_path / "w.pth", "w") as archive:
        for name in ("../up.txt", str(tmp_path / "absolute.txt"), "storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"\x80\x02N."))
    with pytest.raises(FedgftError, match="neither"):
        read_weights(tmp_path / "w.pth")
    assert tree(tmp_path) == {"w.pth"}


@pytest.mark.parametrize("name", TARGETS)
def test_a_pickle_in_the_place_of_any_file_is_not_run(tmp_path, name: str) -> None:
    trap = Trap(str(tmp_path / "sprung"))
    buffer = io.BytesIO()
    torch.save({"weight": trap}, buffer)
    array = io.BytesIO()
    np.save(array, np.array([trap], dtype=object), allow_pickle=True)
    for data in (pickle.dumps(trap), buffer.getvalue(), array.getvalue()):
        TARGETS[name].accepts(data)
    assert not os.path.exists(tmp_path / "sprung")


def test_a_pickle_in_a_message_is_not_run(tmp_path) -> None:
    trap = Trap(str(tmp_path / "sprung"))
    array = io.BytesIO()
    np.save(array, np.array([trap], dtype=object), allow_pickle=True)
    for data in (array.getvalue(), pickle.dumps(trap)):
        found = json.loads(messages.packed(messages.honest()))
        found["arrays"]["of"]["weight"]["hex"] = data.hex()
        messages.reply(json.dumps(found).encode())  # the others go on without it
        asked = json.loads((SEEDS / "server-request/train.json").read_text())
        asked["arrays"] = found["arrays"]
        with pytest.raises(FedgftError, match="cannot be read"):
            messages.request(json.dumps(asked).encode())
    assert not os.path.exists(tmp_path / "sprung")


def status(key: str) -> float:
    """Of this process, in megabytes."""
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def peak(run) -> float:
    """How much more memory than before it took at most, in megabytes."""
    before = status("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not tell the peak of memory")
    old, _ = resource.getrlimit(resource.RLIMIT_AS)
    most = int(status("VmSize")) * 2**20 + 3 * 2**30  # a failure shall not take the machine along
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    try:
        run()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (old, resource.RLIM_INFINITY))
    return status("VmHWM") - before


def site_of(**change) -> bytes:
    """A few hundred bytes that declare as much as they can."""
    found = json.loads((SEEDS / "site-file/good-plain.json").read_text())
    return json.dumps(found | change).encode()


def many_classes() -> bytes:
    """One row in each of a few groups, and room for millions."""
    classes = [str(i) for i in range(20)]
    groups = [f"g{i}" for i in range(3)]
    scores = {name: {"first_bin": 0, "histogram": [1]} for name in classes}
    cell = {"label": "0", "decision": "0", "count": 1, "scores": scores}
    return site_of(
        classes=classes,
        threshold=None,
        bins=300,
        cells=[{"group": [g], **cell} for g in groups],
        rows={"counted": 3, "label_missing": 0, "prediction_missing": 0},
    )


def header(shape: list[int]) -> bytes:
    told = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(told)) + told + bytes(4)


def picture(width: int, height: int) -> bytes:
    """A PNG that claims to be so large."""
    part = lambda kind, data: (  # noqa: E731
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    )
    told = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = part(b"IHDR", told) + part(b"IDAT", zlib.compress(bytes(1000))) + part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def large_picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("P", (8000, 10_000)).save(buffer, "PNG")
    return buffer.getvalue()


def wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy/toy.txt", bytes(8 * fetching.MAX_FILE_BYTES))
    return buffer.getvalue()


def weights(*, compressed: bool) -> bytes:
    """A state dict with its one tensor compressed; or one with a class that torch would make, of
    two gigabytes, to no purpose."""
    buffer = io.BytesIO()
    out = io.BytesIO()
    torch.save({"fc.weight": torch.zeros(2**25)}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            how = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
            content = old.read(name)
            if not compressed:
                long = b"c__builtin__\nbytearray\nJ\x00\x00\x00\x70\x85R."
                content = b"\x80\x02" + long if name.endswith("data.pkl") else content[:64]
            new.writestr(name, content, how)
    return out.getvalue()


def reply() -> bytes:
    """Of an array that its own header calls 32 gigabytes large."""
    array = io.BytesIO()
    told = {"descr": "<f4", "fortran_order": False, "shape": (2**33,)}
    np.lib.format.write_array_header_1_0(array, told)
    found = json.loads(messages.packed(messages.honest()))
    found["arrays"]["of"]["weight"]["hex"] = (array.getvalue() + bytes(64)).hex()
    return json.dumps(found).encode()


BOMBS = {
    "a site's bins": ("site-file", lambda: site_of(bins=10_000)),
    "a site's classes": ("site-file", lambda: site_of(classes=[str(i) for i in range(5000)])),
    "a site's many classes": ("site-file", many_classes, 500),
    "a site's cells": ("site-file", lambda: site_of(cells=[{}] * 10_000)),
    "a header of 2^60 bytes": ("model", lambda: struct.pack("<Q", 2**60) + b"{}"),
    "a tensor of 2^40 numbers": ("model", lambda: header([2**40])),
    "weights of 2^40 numbers": ("weights-safetensors", lambda: header([2**20, 2**20])),
    "compressed weights": ("weights-torch", lambda: weights(compressed=True)),
    "another class in weights": ("weights-torch", lambda: weights(compressed=False)),
    "a checkpoint of 2^40 numbers": ("checkpoint", lambda: header([2**40])),
    "an image of 10^10 pixels": ("image", lambda: picture(10**5, 10**5)),
    "an image of 80 million pixels": ("image", large_picture),
    "a journal of 10^7 images": (
        "image-journal",
        lambda: b'{"key": "THE-KEY"}\n{"names": 10000000, "rows": 10000000, "crc": 1, "bad": {}}\n',
    ),
    "an archive's member": ("data-wheel", wheel),
    "a message's array": ("client-reply", reply),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_few_bytes_do_not_ask_for_gigabytes(what: str) -> None:
    name, make, *most = BOMBS[what]
    data = make()
    assert len(data) < 200_000
    TARGETS[name].read(TARGETS[name].seeds("good")[0].read_bytes())  # loads what there is to load
    assert peak(lambda: TARGETS[name].accepts(data)) < (most or [64])[0]


def test_a_table_whose_every_value_is_a_feature(tmp_path) -> None:
    """Half a megabyte would become a hundred."""
    path = tmp_path / "rows.csv"
    names = ",".join(f"x{i}" for i in range(25))
    rows = [f"{i % 2},{'fm'[i % 2]}," + ",".join([f"v{i // 2}"] * 25) for i in range(1000)]
    path.write_text("\n".join([f"y,g,{names}", *rows]))
    with pytest.raises(FedgftError, match="12,500 different values together"):
        load_table(path, label="y", group="g")


def test_large_pictures_are_decoded_one_at_a_time(tmp_path) -> None:
    """A few kilobytes unfold to 20 million pixels, 80 MB each; there is a thread for every core."""
    Image.new("P", (5000, 4000)).save(tmp_path / "large.png")
    Image.new("P", (50, 40)).save(tmp_path / "small.png")
    assert (tmp_path / "large.png").stat().st_size < 10_000
    look = lambda name: decode(tmp_path / name, size=8, crop=None)  # noqa: E731
    with open_decoders() as pool, ThreadPoolExecutor(1) as other:
        with LARGE_IMAGE_LOCK:  # as if another thread had one in hand
            waiting = other.submit(look, "large.png")
            assert pool.submit(look, "small.png").result().shape == (8, 8, 3)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=1)
        assert waiting.result().shape == (8, 8, 3)
