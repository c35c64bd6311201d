"""Threads for copies and reads, which need no interpreter lock; one pool for the process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

MAX_THREADS = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


def for_each(work: Callable[[Item], object], items: Sequence[Item], *, num_threads: int) -> None:
    """Call `work` for every item, in up to `num_threads` threads, the calling one included.

    Nothing runs any more when this returns or raises, an interrupt included: what `work` uses can be closed.
    Where no other thread can be had, as when Python ends, the calling one does all. `work` must not call this
    function itself. The first error of `work` is raised; other threads finish their share before.
    """
    num_threads = min(num_threads, len(items), MAX_THREADS)
    if num_threads <= 1:
        for item in items:
            work(item)
        return
    first_share, *shares = (_Share(work, items[first::num_threads]) for first in range(num_threads))
    try:
        with contextlib.suppress(RuntimeError):  # no thread more
            for share in shares:
                _pool().submit(share.run)
        first_share.run()
        if first_share.error is None:
            for share in shares:
                share.run()  # unless a thread has begun with it
    finally:
        _end_all(shares)
    for share in (first_share, *shares):
        if share.error is not None:
            raise share.error


class _Share(Generic[Item]):
    """Items that one thread works on, whichever begins first; `error` is what `work` raised.

    Not futures: an interrupt amid `submit` would lose the future of work that is done all the same.
    """

    def __init__(self, work: Callable[[Item], object], items: Sequence[Item]) -> None:
        self._work, self._items = work, items
        self._taken: dict[str, int] = {}
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Work on the items, unless another thread has begun or none should."""
        if not self._is_taken_by_me():
            return
        try:
            for item in self._items:
                self._work(item)
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    def end(self) -> None:
        """Have no thread begin any more, and wait for another thread that has."""
        if not self._is_taken_by_me():
            self._wait()

    def _wait(self) -> None:
        try:
            self._ended.wait()
        except BaseException:  # an interrupt, perhaps one more
            self._wait()
            raise

    def _is_taken_by_me(self) -> bool:
        # One operation: an interrupt right after a lock was acquired would leave its holder unknown.
        me = threading.get_ident()
        return self._taken.setdefault("by", me) == me


def _end_all(shares: Sequence[_Share[Item]]) -> None:
    if shares:
        try:
            shares[0].end()
        finally:
            _end_all(shares[1:])


def in_order(
    pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], *, ahead: int
) -> Iterator[Result]:
    """Call `work` for every item by a pool's threads, so many ahead of the caller; results in their order.

    Items are taken when their turn comes, so that they may be an endless stream. Where the caller stops, or a
    call fails, those that haven't begun never do.
    """
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def parts_of(num_items: int, num_parts: int) -> list[slice]:
    """Cut `num_items` in order into parts of nearly the same size, none empty."""
    num_parts = max(1, min(num_parts, num_items))
    edges = [num_items * part // num_parts for part in range(num_parts + 1)]
    return [slice(first, end) for first, end in itertools.pairwise(edges)]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="ups_store")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads
