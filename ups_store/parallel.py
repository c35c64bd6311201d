"""Threads for copies and reads, which need no interpreter lock; one pool for the process."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

MAX_THREADS = 16

Item = TypeVar("Item")


def for_each(work: Callable[[Item], object], items: Sequence[Item], *, num_threads: int) -> None:
    """Call `work` for every item, in up to `num_threads` threads, the calling one included.

    Nothing runs any more when this returns or raises, an interrupt included: what `work` uses can be closed.
    `work` must not call this function itself.

    Raises:
        Exception: The first one that `work` raised; other threads finish their share.
    """
    num_threads = min(num_threads, len(items), MAX_THREADS)
    if num_threads <= 1:
        _work_on(work, items)
        return
    pool = _pool()
    shares: list[Future[None]] = []
    try:
        shares.extend(pool.submit(_work_on, work, items[i::num_threads]) for i in range(1, num_threads))
        _work_on(work, items[::num_threads])
    finally:
        _wait_for(shares)
    for share in shares:
        share.result()


def _wait_for(shares: Sequence[Future[None]]) -> None:
    from concurrent.futures import wait

    try:
        wait(shares)
    except BaseException:  # one more interrupt
        _wait_for(shares)
        raise


def parts_of(num_items: int, num_parts: int) -> list[slice]:
    """`num_items` in order, in parts of nearly the same size, none empty."""
    num_parts = max(1, min(num_parts, num_items))
    edges = [num_items * part // num_parts for part in range(num_parts + 1)]
    return [slice(first, end) for first, end in itertools.pairwise(edges)]


def _work_on(work: Callable[[Item], object], items: Sequence[Item]) -> None:
    for item in items:
        work(item)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="ups_store")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
