"""Files are written whole or not at all, into folders that can be written, by one run at a time;
and what anybody may have written is read with one error alone, ValueError.

Nothing is written through a symbolic link. An output folder that is a link is refused, and so is an
output file that a command was given by name, before any work is done for it. Any other link is
replaced by the file, and what it points to stays as it is. Links among the parents of a path are
followed.
Files with sums, checkpoints, histories and keys are private: their owner alone can read them.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import numpy as np

STAGE = ".fedgft.part"
ENDINGS = ("safetensors", "json", "md", "html", "parquet", "svg", "png")  # of the files we write

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has neither
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # for the other end of a pipe
BINARY = getattr(os, "O_BINARY", 0)
PRIVATE, PUBLIC, FOLDER = 0o600, 0o666, 0o700  # PUBLIC: as far as the user's umask allows
DEEPEST = 64  # lists in lists in lists: several times what any file of ours has


def expanded(path: str | Path) -> Path:
    """With ~ written out."""
    from fedgft.arguments import path_of  # it brings NumPy, which `fedgft --help` does without

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
        _probe(folder / ".fedgft-probe.part")
    except OSError as error:
        raise FedgftError(f"{option} {path}: cannot write there ({error.strerror})") from error
    return folder


def _probe(path: Path) -> None:
    path.unlink(missing_ok=True)  # of a run that was killed
    with suppress(FileExistsError):  # another run probes at this moment
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, PRIVATE))
    path.unlink(missing_ok=True)


def refuse_link(path: Path, option: str = "") -> None:
    """Raise FedgftError where the path itself, not one of its parents, is a symbolic link."""
    if os.path.islink(path):
        where = f"{option} {path}".lstrip()
        raise FedgftError(
            f"{where}: is a symbolic link, and nothing is written through links; name what it "
            "points to"
        )


def private_folder(path: Path) -> Path:
    """Make a folder that its owner alone can look into, or narrow the permissions of one.

    Raises FedgftError where it is a symbolic link.
    """
    refuse_link(path)
    path.mkdir(mode=FOLDER, parents=True, exist_ok=True)
    with suppress(PermissionError):  # another user's: files in it are private all the same
        path.chmod(FOLDER)
    return path


def open_private(path: Path, mode: Literal["wb", "ab"]) -> BinaryIO:
    """Open a file for "wb" or "ab" that its owner alone can read, and that is no symbolic link."""

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | NO_LINK | NO_WAIT, PRIVATE)
        if hasattr(os, "fchmod"):
            os.fchmod(handle, PRIVATE)  # it may have been there
        return handle

    refuse_link(path)
    return open(path, mode, opener=opener)


@contextmanager
def open_folder(path: str | Path, option: str = "--out") -> Iterator[Path]:
    """A folder that can be written, and that no other run writes to meanwhile.

    If the work fails, folders that were made for it and hold nothing are taken away again.
    """
    refuse_link(Path(path), option)
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
    handle = os.open(folder, os.O_RDONLY | NO_LINK)
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
    private_folder(folder)
    with open_private(folder / ".lock", "wb") as file:
        lock(file.fileno(), folder.parent)
        for place in (folder, folder.parent, folder.parent / "figures"):
            for ending in () if place.is_symlink() else ENDINGS:
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
        if stage.is_symlink():
            stage.unlink()
        shutil.rmtree(stage, ignore_errors=True)  # of a run that was killed
        stage.mkdir(FOLDER)
        yield stage
        made = sorted(stage.iterdir())
        for path in made:
            _check_target(folder / path.name)
        for path in made:
            os.replace(path, folder / path.name)
    except OSError as error:
        reason = error.strerror or error
        raise FedgftError(f"--out {folder}: cannot be written ({reason})") from error
    except FedgftError as error:  # of a file, whose place is nobody's business
        raise FedgftError(str(error).replace(str(stage), str(folder))) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


class Part:
    """A file that is being written, held by its handle: its name could come to mean another."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def write_bytes(self, content: bytes) -> None:
        self.file.write(content)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.file.write(text.encode(encoding))


@contextmanager
def whole(path: Path, *, private: bool = False) -> Iterator[Part]:
    """A file to write that becomes `path` at the end, or vanishes if anything goes wrong.

    It is made anew under a temporary name, so that a `private` one can be read by its owner alone
    whatever was there before; others have the permissions that the user's umask gives. A symbolic
    link at `path` is replaced, not followed; a folder, a device or a pipe is refused.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        _check_target(path)
        with _own(part, PRIVATE if private else PUBLIC) as file:
            handle = file.fileno()
            try:
                yield Part(file)
                file.flush()
                if not _is(part, handle):
                    raise OSError(errno.ESTALE, f"its temporary file {part.name} was replaced")
                if fcntl is None:
                    file.close()  # Windows moves no open file
                os.replace(part, path)
            except BaseException:
                if fcntl is None:
                    _close(file)
                if fcntl is None or _is(part, handle):
                    part.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise FedgftError(f"{path}: cannot be written ({error.strerror or error})") from error


def _check_target(path: Path) -> None:
    """Refuse to put a file in the place of a device, a pipe or a folder."""
    with suppress(FileNotFoundError):
        found = os.lstat(path).st_mode
        if not (stat.S_ISREG(found) or stat.S_ISLNK(found)):
            kind = "a folder" if stat.S_ISDIR(found) else "no regular file"
            raise FedgftError(f"{path}: cannot be written (it is {kind})")


@contextmanager
def _own(part: Path, mode: int) -> Iterator[BinaryIO]:
    """A new file of that name. Of two that write the same file, the second waits until the first
    one's is in its place.

    The name is always the same, so what a killed run left is removed by the next.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK | BINARY
    while True:
        try:
            handle = os.open(part, flags, mode)
        except FileExistsError:
            _wait_and_remove(part)
            continue
        file = os.fdopen(handle, "wb")
        try:
            _lock_and_wait(handle)
            if _is(part, handle):  # else: another run took it for one that was left
                yield file
                return
        finally:
            _close(file)


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # what could not be written was an error already
        file.close()


def _wait_and_remove(part: Path) -> None:
    """Of another run that writes it at this moment, or that was killed; nothing of it is read."""
    try:
        found = os.lstat(part)
        if stat.S_ISLNK(found.st_mode) or fcntl is None:
            part.unlink(missing_ok=True)
            return
        if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"{part.name} there is another user's; remove it")
        if not stat.S_ISREG(found.st_mode):
            raise FileExistsError(errno.EEXIST, f"{part.name} there is no regular file; remove it")
        handle = os.open(part, os.O_RDWR | NO_LINK | NO_WAIT | BINARY)
    except FileNotFoundError:
        return
    try:
        _lock_and_wait(handle)
        if _is(part, handle):
            part.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _lock_and_wait(handle: int) -> None:
    if fcntl is not None:
        with suppress(OSError):  # no locks on this disk
            fcntl.flock(handle, fcntl.LOCK_EX)


def _is(path: Path, handle: int) -> bool:
    """Whether the name still means the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except OSError:
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
