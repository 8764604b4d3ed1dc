"""Numba where it is installed, plain Python where it is not."""

from collections.abc import Callable
from typing import Any

try:
    import numba
except ImportError:  # every caller has a slower way that gives the same numbers
    numba = None

AVAILABLE = numba is not None

# error_model: no branch for a division by zero, which would keep loops from vectorising.
GAP = 256  # numbers between two vectors of a kernel; see `kernels._apart`
OPTIONS: Any = {"nogil": True, "fastmath": True, "boundscheck": False, "error_model": "numpy"}


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, release the GIL, keep the machine code on disk.

    From a read-only install numba keeps it in the user's cache folder; where that cannot be
    written either, the kernel is compiled once a process instead.
    """
    if numba is None:
        return function
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:
        return numba.njit(**OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """For a piece of a kernel: it becomes part of whatever calls it.

    Compiled on its own it would exist twice, by itself and within its caller's file on disk, and
    optimised differently: the first process, which compiles, would round otherwise than the next.
    """
    return function if numba is None else numba.njit(inline="always", **OPTIONS)(function)
