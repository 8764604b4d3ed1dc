"""Divide work between threads; compiled functions release the GIL."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

SERIAL_WORK = 2**17  # additions below which threads cost more than they save


def share_work(
    call: Callable[[int, int], Any], load: np.ndarray, threads: int, *, least: int = SERIAL_WORK
) -> None:
    """Call `call(begin, end)` in threads, on consecutive items with about equal total load.

    A total load below `least` is not shared.
    """
    if not len(load):
        return
    total = np.cumsum(load)
    if threads == 1 or len(load) == 1 or total[-1] < least:
        call(0, len(load))
        return
    cuts = np.searchsorted(total, total[-1] * np.arange(1, threads) / threads)
    edges = [0, *cuts.tolist(), len(load)]
    shares = [(begin, end) for begin, end in pairwise(edges) if end > begin]
    run_threads(lambda share: call(*share), shares, threads)


def run_threads(call: Callable[[Any], Any], items: list[Any], threads: int) -> list[Any]:
    """Return `call(item)` of each item; this thread does the first, a pool the others."""
    if len(items) < 2:
        return [call(item) for item in items]
    pending = [_thread_pool(threads).submit(call, item) for item in items[1:]]
    return [call(items[0]), *(future.result() for future in pending)]


@lru_cache
def _thread_pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="fedgft")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_thread_pool.cache_clear)
