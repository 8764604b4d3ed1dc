"""Full disks, read-only folders, clocks that jump, simultaneous runs.

Each gives one line and exit code 2, and earlier files stay.
"""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedgft.cli import main
from fedgft.data import remote_files as fetching
from fedgft.data.image_cache import ImageCache
from fedgft.errors import FedgftError
from synthetic_images import write_celeba_folder
from test_cli import QUICK, run, table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning"),
]

SYNTHETIC = ("--data", "synthetic", *QUICK)


def mount(*arguments: object) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A disk of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "none", place)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A table, a model of it, its sums and pictures."""
    place = tmp_path_factory.mktemp("inputs")
    file = table(place / "t.csv")
    model = place / "model.safetensors"
    for given in (
        [
            "train",
            "--data",
            file,
            "--label",
            "ok",
            "--group",
            "sex",
            *QUICK,
            "--method",
            "fedavg",
            "--out",
            place,
        ],
        ["predict", model, file, "-o", place / "p.csv"],
        ["measure", place / "p.csv", *COLUMNS, "-o", place / "north.json"],
    ):
        main([str(a) for a in given])
    write_celeba_folder(place / "faces", 120, 32)
    return place


COLUMNS = ("--label", "ok", "--group", "sex", "--score", "score", "--name", "north")

# Each with something to change between an earlier run and the next; OUT is the place to write to.
COMMANDS = {
    "train": (("train", *SYNTHETIC, "--method", "fedavg", "--out", "OUT"), ("--seed", "1")),
    "compare": (("compare", *SYNTHETIC, "--methods", "fedavg", "--out", "OUT"), ("--seed", "1")),
    "measure": (("measure", "IN/p.csv", *COLUMNS, "-o", "OUT/n.json"), ("--threshold", "0.6")),
    "audit": (("audit", "IN/north.json", "--out", "OUT"), ()),
    "csv": (("predict", "IN/model.safetensors", "IN/t.csv", "-o", "OUT/x.csv"), ()),
    "parquet": (("predict", "IN/model.safetensors", "IN/t.csv", "-o", "OUT/x.parquet"), ()),
    "data": (("data", "get", "compas", "-o", "OUT/x.csv"), ()),
    "reproduce": (("reproduce", "simpson", "--out", "OUT"), ()),
}


def command(name: str, inputs: Path, out: Path, *more: str) -> list[str]:
    given = (*COMMANDS[name][0], *more)
    return [a.replace("IN/", f"{inputs}/").replace("OUT", str(out)) for a in given]


def fill(disk: Path, *, room: int) -> Path:
    """Up to the last byte, but for some pages."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            file.truncate(file.tell() - 4096 * room)
    return filler


def held(folder: Path) -> dict[str, bytes]:
    """Every file; the lock that a folder of cells keeps says nothing."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in (".lock", "filler")
    }


def one_line(err: str) -> str:
    """The error, after notes."""
    said = [line for line in err.splitlines() if not line.startswith("note:")]
    assert len(said) == 1 and said[0].startswith("fedgft: "), err
    return said[0]


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("train", 0),
        ("train", 2),
        ("compare", 2),
        ("measure", 0),
        ("audit", 2),
        ("csv", 0),
        ("parquet", 0),
        ("data", 2),
    ],
)
def test_a_full_disk(name, room, disk, inputs, capsys, request):
    if name == "data":
        request.getfixturevalue("compas")
    earlier = COMMANDS[name][1]
    out = disk / "out"
    out.mkdir()
    if name == "audit":
        (out / "report.md").write_text("<!-- fedgft audit --> of last year")
    elif earlier:
        assert run(capsys, *command(name, inputs, out, *earlier))[0] == 0
    fill(disk, room=room)
    before = held(out)
    more = ["--overwrite"] if name in ("train", "compare", "measure", "audit") else []
    code, _, err = run(capsys, *command(name, inputs, out), *more)
    assert code == 2
    assert "No space left on device" in one_line(err) and str(out) in err and ".part" not in err
    assert held(out) == before


def test_checkpoints_on_a_full_disk_are_kept(disk, capsys):
    """A snapshot that did not fit harms neither the last one nor the way on from it."""
    train = ("train", *SYNTHETIC, "--method", "fedavg", "--checkpoint-every", "1", "--rounds")
    usual = [a for a in train if a != "--rounds" and a != "3"]
    filler = fill(disk, room=0)
    code, _, err = run(capsys, *usual, "--rounds", 4, "--out", disk / "out")
    assert code == 2 and "No space left on device" in one_line(err)
    filler.unlink()
    assert not held(disk)
    assert run(capsys, *usual, "--rounds", 4, "--out", disk / "out")[0] == 0


def test_reproduce_goes_on_when_there_is_room_again(disk, tmp_path, capsys, inputs):
    assert run(capsys, *command("reproduce", inputs, tmp_path / "calm"))[0] == 0
    for room in (0, 3):
        filler = fill(disk, room=room)
        code, _, err = run(capsys, *command("reproduce", inputs, disk / "out"))
        assert code == 2 and "No space left on device" in one_line(err)
        assert held(disk / "out").items() <= held(tmp_path / "calm").items()
        filler.unlink()
    assert run(capsys, *command("reproduce", inputs, disk / "out"))[0] == 0
    assert held(disk / "out") == held(tmp_path / "calm")


def test_caches_on_a_full_disk(disk, inputs, tmp_path, monkeypatch, capsys):
    filler = fill(disk, room=0)
    pictures = (
        "train",
        "--data",
        "celeba",
        "--images",
        inputs / "faces",
        "--cache",
        disk,
        "--size",
        16,
        "--out",
        tmp_path / "out",
    )
    code, _, err = run(capsys, *pictures)
    assert code == 2 and "No space left" in one_line(err) and "--cache" in err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(disk / "cache"))
    content = (inputs / "t.csv").read_bytes()
    file = fetching.RemoteFile(
        "t.csv", fetching.hashlib.sha256(content).hexdigest(), (inputs / "t.csv").as_uri(), "none"
    )
    with pytest.raises(FedgftError, match=r"cache folder cannot be written \(No space left"):
        fetching.obtain([file])
    assert not list((disk / "cache").iterdir())
    filler.unlink()
    ((path,), _) = fetching.obtain([file])
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in ("data", "audit")])
def test_a_disk_that_cannot_be_written(name, disk, inputs, capsys):
    out = disk / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    mount("-o", "remount,ro", disk)
    code, _, err = run(capsys, *command(name, inputs, out))
    assert code == 2
    assert "Read-only" in one_line(err) and str(out) in err
    assert held(out) == {"mine.txt": b"mine"}


@pytest.mark.parametrize("name", [n for n in COMMANDS if n not in ("data", "audit")])
def test_a_file_in_place_of_the_folder(name, tmp_path, inputs, capsys):
    (tmp_path / "out").write_text("mine")
    code, _, err = run(capsys, *command(name, inputs, tmp_path / "out"))
    assert code == 2 and str(tmp_path / "out") in one_line(err)
    assert (tmp_path / "out").read_text() == "mine"


def test_unused_new_folders_are_removed(tmp_path, capsys):
    assert run(capsys, "train", "--data", "none.csv", "--out", tmp_path / "a" / "b")[0] == 2
    assert not (tmp_path / "a").exists()


# --- the clock


def test_results_do_not_depend_on_the_clock(tmp_path, capsys, monkeypatch):
    train = ("train", *SYNTHETIC, "--checkpoint-every", "1", "--out")
    assert run(capsys, *train, tmp_path / "calm")[0] == 0
    moments = iter(np.random.default_rng(0).permutation(100_000))
    years = 365.25 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: (next(moments) % 130) * years)  # 1970 to 2100
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
    assert run(capsys, *train, tmp_path / "jumping")[0] == 0
    timed = (
        "rows.parquet",
        "report/audit.json",
        "report/report.html",
        "report/report.md",
    )  # a date
    one, two = (held(tmp_path / name) for name in ("calm", "jumping"))
    assert one.keys() == two.keys()
    assert all(one[name] == two[name] for name in one if name not in timed)
    one, two = (pl.read_parquet(tmp_path / n / "rows.parquet") for n in ("calm", "jumping"))
    assert one.drop("seconds").equals(two.drop("seconds"))


@pytest.mark.parametrize("year", [1970, 2100])
def test_files_with_dates_in_the_past_or_future(year, inputs, tmp_path):
    """Pictures, or a cache of them, from before the clock was right or from the future."""
    at = (year - 1970) * 365.25 * 24 * 3600
    folder = inputs / "faces" / "img_align_celeba"
    names = ("000001.jpg", "000002.jpg")
    album = lambda: ImageCache(folder, names, 16, None, tmp_path)  # noqa: E731
    calm, _ = album().load(fetching.ignore_progress)
    for file in tmp_path.iterdir():
        os.utime(file, (at, at))
    again, _ = album().load(fetching.ignore_progress)
    np.testing.assert_array_equal(again, calm)
    for name in names:
        os.utime(folder / name, (at, at))
    anew, _ = album().load(fetching.ignore_progress)
    np.testing.assert_array_equal(anew, calm)
