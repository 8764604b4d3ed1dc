"""Compiles functions with numba where it is installed; without it they stay plain Python."""

from collections.abc import Callable
from typing import Any

try:
    import numba
except ImportError:  # every caller then uses a slower version with the same results
    numba = None

NUMBA_AVAILABLE = numba is not None
# error_model: a branch for division by zero would prevent vectorization.
NUMBA_OPTIONS: Any = {"nogil": True, "fastmath": True, "boundscheck": False, "error_model": "numpy"}
EXACT_OPTIONS: Any = NUMBA_OPTIONS | {"fastmath": False}


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with numba, release the GIL and cache the machine code on disk.

    If the installation is read-only, numba caches in the user's folder; if that fails too, the
    function is compiled once per process. Without numba, the function is returned unchanged.
    """
    return _compile(function, NUMBA_OPTIONS)


def exact_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile like `jit`, but never reorder floating-point operations.

    Every caller then rounds in the same way, whether the function is called or compiled into it.
    """
    return _compile(function, EXACT_OPTIONS)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of a kernel into each of its callers.

    If it were compiled separately, it would exist twice with different optimizations: on its own
    and inside the cached caller. The process that compiles it would then round differently from
    later processes, which load the cached caller.
    """
    return function if numba is None else numba.njit(inline="always", **NUMBA_OPTIONS)(function)


def _compile(function: Callable[..., Any], options: Any) -> Callable[..., Any]:
    if numba is None:
        return function
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)
