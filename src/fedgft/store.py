"""Files on disk: atomic writes, locks, private modes, checksums, and parsers of untrusted files.

- A file is replaced in one step (`atomic_write`), several files together (`stage_files`).
- A folder has one writer at a time (`open_folder`, `exclusive_lock`). Locks belong to the
  operating system: they end with the process, however it ends.
- Nothing is written through a symbolic link. Output folders that are links, and output files that
  the user names, are refused before any work is done; other links are replaced by the new file,
  and their targets stay as they are. Links among the parents of a path are followed.
- Files with sums, checkpoints, histories and keys have mode 0600, their folders 0700.
- `parse_json` and `read_tensors` raise only ValueError (FileNotFoundError for a missing file),
  whatever the file holds. Nothing is unpickled.
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from fedgft.errors import FedgftError

if TYPE_CHECKING:
    import numpy as np

STAGE_NAME = ".fedgft.part"
LOCK_NAME = ".lock"
WRITTEN_SUFFIXES = ("safetensors", "json", "md", "html", "parquet", "svg", "png")
LOCK_TIMEOUT = 300.0  # seconds that `atomic_write` waits for another process that writes the file
MAX_JSON_DEPTH = 64  # several times the depth of any file that fedgft writes

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows lacks this flag and the next
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # do not wait for the other end of a pipe
BINARY = getattr(os, "O_BINARY", 0)
PRIVATE_MODE = 0o600
PUBLIC_MODE = 0o666  # the user's umask narrows it
FOLDER_MODE = 0o700


def file_error(path: object, problem: str) -> FedgftError:
    """Return an error about a file; its text is ``PATH: PROBLEM``."""
    return FedgftError(f"{path}: {problem}", kind="file")


def expand_user(path: str | Path) -> Path:
    """Return the path with a leading ``~`` replaced by the home folder."""
    if not isinstance(path, str | os.PathLike):
        raise FedgftError(f"path must be the name of a file, not {str(path)[:60]}", field="path")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise file_error(path, str(error)) from None


def make_folder(path: str | Path, option: str = "`out`") -> Path:
    """Create a folder if needed and check that files can be created in it.

    Parameters
    ----------
    path
        The folder. Its parents are created too.
    option
        The setting that named it, for the error message.
    """
    if Path(path).is_file():
        raise file_error(f"{option} {path}", "is a file; name a folder")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise file_error(f"{option} {path}", f"cannot write there ({error.strerror})") from error
    return Path(path)


def refuse_link(path: Path, option: str = "") -> None:
    """Raise FedgftError if the path itself, not one of its parents, is a symbolic link."""
    if os.path.islink(path):
        problem = "is a symbolic link, and nothing is written through links"
        raise file_error(f"{option} {path}".lstrip(), f"{problem}; name what it points to")


def make_private_folder(path: Path) -> Path:
    """Create a folder with mode 0700, or narrow the mode of an existing one; refuse a link."""
    refuse_link(path)
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    with suppress(PermissionError):  # it belongs to another user: the files in it stay private
        path.chmod(FOLDER_MODE)
    return path


def open_private_file(path: Path, mode: Literal["wb", "ab", "a+b"]) -> BinaryIO:
    """Open a file with mode 0600 for writing, appending or both; refuse a symbolic link."""

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | NO_LINK | NO_WAIT, PRIVATE_MODE)
        if hasattr(os, "fchmod"):
            os.fchmod(handle, PRIVATE_MODE)  # the file may have existed with another mode
        return handle

    refuse_link(path)
    return open(path, mode, opener=opener)


@contextmanager
def lock_file(path: Path, *, timeout: float = -1) -> Iterator[None]:
    """Hold an exclusive lock on a file; remove the file at the end.

    On a file system without locks, the block runs without a lock.

    Raises
    ------
    TimeoutError
        Another process, or another lock of this one, holds it for longer than `timeout` seconds.
    """
    from filelock import FileLock  # the command line starts faster without it

    lock = FileLock(path, timeout=timeout, mode=PRIVATE_MODE, poll_interval=0.01)
    try:
        lock.acquire()
    except TimeoutError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    try:
        yield
    finally:
        with suppress(OSError):  # Windows cannot remove an open file
            path.unlink(missing_ok=True)  # before the release: the next process makes a new file
        lock.release()


@contextmanager
def _lock_folder(folder: Path, output: Path, option: str = "`out`") -> Iterator[None]:
    """Hold the lock of a folder.

    The error message names the folder `output` and the setting `option`.
    """
    lock = folder / LOCK_NAME
    refuse_link(lock)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(lock, timeout=0))
        except TimeoutError:
            text = "another run is writing there; wait for it, or name another folder"
            raise FedgftError(f"{option} {output}: {text}", kind="conflict") from None
        yield


@contextmanager
def open_folder(path: str | Path, option: str = "`out`") -> Iterator[Path]:
    """Create and lock an output folder, and yield it.

    If the block fails, folders that were created for it and are empty are removed again.

    Parameters
    ----------
    path
        The folder. A symbolic link is refused.
    option
        The setting that named it, for error messages.
    """
    refuse_link(Path(path), option)
    try:
        created = [place for place in (Path(path), *Path(path).parents) if not place.exists()]
    except OSError as error:  # the name is too long
        raise file_error(f"{option} {path}", f"cannot write there ({error.strerror})") from error
    folder = make_folder(path, option)
    try:
        with _lock_folder(folder, folder, option):
            yield folder
    except BaseException:
        for place in created:
            with suppress(OSError):  # the folder is not empty
                place.rmdir()
        raise


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Lock a private folder of cells or checkpoints inside an output folder.

    Temporary files that a killed run left in it, in its parent, or in the parent's ``figures`` are
    removed.
    """
    make_private_folder(folder)
    with _lock_folder(folder, folder.parent):
        places = (folder, folder.parent, folder.parent / "figures")
        for place, suffix in product(places, WRITTEN_SUFFIXES):
            for leftover in () if place.is_symlink() else place.glob(f".*.{suffix}.part"):
                leftover.unlink(missing_ok=True)
        yield


@contextmanager
def stage_files(folder: Path, option: str = "`out`") -> Iterator[Path]:
    """Yield a temporary folder whose files move into `folder` together at the end.

    If the block fails, `folder` stays as it was. The caller holds its lock (`open_folder`).
    `option` is the setting that named the folder, for error messages.
    """
    stage = folder / STAGE_NAME
    try:
        if stage.is_symlink():
            stage.unlink()
        shutil.rmtree(stage, ignore_errors=True)  # a killed run may have left it
        stage.mkdir(FOLDER_MODE)
        yield stage
        files = sorted(stage.iterdir())
        for path in files:
            _check_replaceable(folder / path.name)
        for path in files:
            os.replace(path, folder / path.name)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise file_error(f"{option} {folder}", problem) from error
    except FedgftError as error:  # users know the folder, not the stage
        text = error.message.replace(str(stage), str(folder))
        raise FedgftError(text, field=error.field, kind=error.kind) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def atomic_write(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` at the end, or is removed if the block fails.

    Write through this handle and not by name: another process could replace the named file.

    A symbolic link at `path` is replaced, not followed; a folder, device or pipe is refused. Of two
    processes that write the same file, the second waits for the first.

    Parameters
    ----------
    path
        The file. Its folder must exist.
    private
        Whether the file has mode 0600 from the first byte on, whatever the mode of an existing
        file. Other files get the mode that the user's umask gives.
    """
    part = path.with_name(f".{path.name}.part")
    mode = PRIVATE_MODE if private else PUBLIC_MODE
    try:
        _check_replaceable(path)
        with lock_file(path.with_name(f".{path.name}.lock"), timeout=LOCK_TIMEOUT):
            part.unlink(missing_ok=True)  # a killed run may have left it
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK | BINARY
            file = os.fdopen(os.open(part, flags, mode), "wb")
            try:
                yield file
                file.flush()
                if not os.path.samestat(os.lstat(part), os.fstat(file.fileno())):
                    raise OSError(errno.ESTALE, f"its temporary file {part.name} was replaced")
                file.close()  # Windows cannot move an open file
                os.replace(part, path)
            except BaseException:
                with suppress(OSError):  # on a full disk, closing fails once more
                    file.close()
                part.unlink(missing_ok=True)
                raise
    except OSError as error:
        reason = "another process writes it" if isinstance(error, TimeoutError) else error.strerror
        raise file_error(path, f"cannot be written ({reason or error})") from error


def _check_replaceable(path: Path) -> None:
    """Refuse to replace a folder, a device or a pipe by a file."""
    with suppress(FileNotFoundError):
        found = os.lstat(path).st_mode
        if not (stat.S_ISREG(found) or stat.S_ISLNK(found)):
            kind = "a folder" if stat.S_ISDIR(found) else "no regular file"
            raise file_error(path, f"cannot be written (it is {kind})")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from an untrusted source.

    Raises
    ------
    ValueError
        The text is not JSON, or lists and objects are nested deeper than `MAX_JSON_DEPTH`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        parents = (each for each in level if isinstance(each, dict | list))
        children = (each.values() if isinstance(each, dict) else each for each in parents)
        level = list(chain.from_iterable(children))
    if level:
        raise ValueError("nested too deeply")
    return value


def read_text_file(path: str | Path, *, what: str, most: int) -> bytes:
    """Return the content of a file from an untrusted source, which is text in UTF-8.

    Parameters
    ----------
    path
        The file.
    what
        What the file should be, for errors, such as "a decision rule".
    most
        The largest number of bytes.
    """
    file = expand_user(path)
    try:
        if file.exists() and not file.is_file():
            raise file_error(path, "not a file")
        if file.stat().st_size > most:
            raise file_error(path, f"too large for {what}")
        content = file.read_bytes()
        content.decode("utf-8")
        return content
    except FileNotFoundError:
        problem = "no such file"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        problem = f"not {what} (not text)"
    raise file_error(path, problem) from None


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, "np.ndarray"]]:
    """Read a safetensors file, a format that can hold nothing but numbers and text.

    Returns
    -------
    header, tensors
        The texts of the header by key, and the tensors by name.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file is damaged, unreadable, or holds a type that NumPy lacks.
    """
    from safetensors import SafetensorError, safe_open  # the command line starts faster without it

    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, tensors
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def require_encodable(value: Any) -> str:
    """Return the value if it is a text that UTF-8 can encode; raise ValueError otherwise.

    JSON can hold lone surrogates, which cannot be encoded.
    """
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]} is no text")
    value.encode("utf-8")  # UnicodeEncodeError is a ValueError
    return value


def dump_checksummed(value: dict[str, Any], key: str) -> str:
    """Return `value` as JSON, together with a key and the SHA-256 of `value`."""
    return json.dumps({"key": key, "digest": _digest(value), **value})


def load_checksummed(text: str, key: str) -> dict[str, Any]:
    """Return what `dump_checksummed` wrote under this key; raise ValueError for any other text."""
    try:
        value = json.loads(text)
        if value.pop("key") != key:
            raise ValueError("written for another key")
        if value.pop("digest") != _digest(value):
            raise ValueError("damaged")
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a checksummed file") from error
    return value


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, allow_nan=False).encode()).hexdigest()
