"""Files are written whole or not at all, into folders that can be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedgft.errors import FedgftError


def expanded(path: str | Path) -> Path:
    """With ~ written out."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise FedgftError(f"{path}: {error}") from None


@contextmanager
def open_folder(path: str | Path) -> Iterator[Path]:
    """Make the folder and see that it can be written, before any work is done for it.

    If that work fails, a folder that was made for it and holds nothing is taken away again.
    """
    folder = Path(path)
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".fedgft-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise FedgftError(f"--out {path}: cannot write there ({error.strerror})") from error
    try:
        yield folder
    except BaseException:
        if new and not any(folder.iterdir()):
            folder.rmdir()
        raise


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write to that becomes `path` at the end, or vanishes if anything goes wrong."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        raise FedgftError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        part.unlink(missing_ok=True)
