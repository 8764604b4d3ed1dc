"""Files are written whole or not at all, into folders that can be written, by one run at a time;
and what anybody may have written is read with one error alone, ValueError."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgft.arguments import path_of
from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import numpy as np

STAGE = ".fedgft.part"
ENDINGS = ("safetensors", "json", "md", "html", "parquet", "svg", "png")  # of the files we write

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None

DEEPEST = 64  # lists in lists in lists: several times what any file of ours has


def expanded(path: str | Path) -> Path:
    """With ~ written out."""
    path_of("path", path)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise FedgftError(f"{path}: {error}") from None


def make_folder(path: str | Path, option: str = "--out") -> Path:
    """Make the folder and see that it can be written, before any work is done for it."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".fedgft-probe.part"
        probe.touch()
        probe.unlink(missing_ok=True)  # another run may have probed meanwhile
    except OSError as error:
        raise FedgftError(f"{option} {path}: cannot write there ({error.strerror})") from error
    return folder


@contextmanager
def open_folder(path: str | Path, option: str = "--out") -> Iterator[Path]:
    """A folder that can be written, and that no other run writes to meanwhile.

    If the work fails, folders that were made for it and hold nothing are taken away again.
    """
    try:
        new = [place for place in (Path(path), *Path(path).parents) if not place.exists()]
    except OSError as error:  # its name is too long
        raise FedgftError(f"{option} {path}: cannot write there ({error.strerror})") from error
    folder = make_folder(path, option)
    with _held(folder):
        try:
            yield folder
        except BaseException:
            for place in new:
                with suppress(OSError):  # it holds something
                    place.rmdir()
            raise


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The lock is on the folder itself, so that it needs no file and nothing is left of it."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, folder)
        yield
    finally:
        os.close(handle)


def lock(handle: int, folder: Path) -> None:
    """Of the operating system: it ends with the process, however that ends."""
    if fcntl is None:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # else: no locks on this disk
            raise FedgftError(
                f"--out {folder}: another run is writing there; wait for it, or name another folder"
            ) from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else writes to the folder meanwhile, nor to the one it is in; what a killed run left
    half-written there goes.

    The lock is the operating system's, so it ends with the process however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        lock(file.fileno(), folder.parent)
        for place in (folder, folder.parent, folder.parent / "figures"):
            for ending in ENDINGS:
                for part in place.glob(f".*.{ending}.part"):
                    part.unlink(missing_ok=True)
        yield


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A place for files that belong together: they move into the folder when all are written.

    If anything goes wrong before, what the folder held is as it was. Whoever stages holds the
    folder (`open_folder`).
    """
    stage = folder / STAGE
    try:
        shutil.rmtree(stage, ignore_errors=True)  # of a run that was killed
        stage.mkdir()
        yield stage
        for path in sorted(stage.iterdir()):
            os.replace(path, folder / path.name)
    except OSError as error:
        reason = error.strerror or error
        raise FedgftError(f"--out {folder}: cannot be written ({reason})") from error
    except FedgftError as error:  # of a file, whose place is nobody's business
        raise FedgftError(str(error).replace(str(stage), str(folder))) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write to that becomes `path` at the end, or vanishes if anything goes wrong."""
    part = path.with_name(f".{path.name}.part")
    try:
        with _own(part):
            try:
                yield part
                os.replace(part, path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise FedgftError(f"{path}: cannot be written ({error.strerror or error})") from error


@contextmanager
def _own(part: Path) -> Iterator[None]:
    """Of two that write the same file, the second waits until the first one's is in its place.

    The name is always the same, so what a killed run left is written over by the next.
    """
    if fcntl is None:
        yield
        return
    while True:
        handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:  # no locks on this disk
                yield
                return
            if _is(part, handle):  # else: what we waited for has become the file itself
                yield
                return
        finally:
            os.close(handle)


def _is(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def parsed(text: str | bytes) -> Any:
    """JSON, no deeper than whoever walks it can follow."""
    try:
        level = [found := json.loads(text)]
    except RecursionError:
        level = found = None
    for _ in range(DEEPEST):
        if not level:
            break
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    if level is None or level:
        raise ValueError("nested too deeply")
    return found


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, "np.ndarray"]]:
    """The header's text and the tensors of a safetensors file, which can hold nothing else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(str(error) or type(error).__name__) from None  # a type numpy lacks, too


def proper(value: Any) -> str:
    """A text that can be written: JSON also knows halves of characters."""
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]} is no text")
    value.encode("utf-8")  # UnicodeEncodeError is a ValueError
    return value
