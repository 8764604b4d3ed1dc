"""Where a target puts the bytes that a reader wants to find in a file."""

import atexit
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from fedgft.errors import FedgftError


@cache
def folder() -> Path:
    """One a process, in memory where the system has such a place."""
    memory = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(
        prefix="fedgft-fuzz-", dir=memory if memory.is_dir() else None
    )
    atexit.register(made.cleanup)
    return Path(made.name)


def file(name: str, data: bytes) -> Path:
    path = folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def each(*readers: Callable[[], object]) -> None:
    """All of them, though one may refuse: several parts of the library read the same file."""
    refused = None
    for read in readers:
        try:
            read()
        except FedgftError as error:
            refused = error
    if refused is not None:
        raise refused
