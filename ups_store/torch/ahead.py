"""`Ahead`: an iterator whose next items a thread makes while the current one is in use."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ups_store.errors import StoreClosedError

T = TypeVar("T")


class Ahead(Iterator[T]):
    """The items of an iterator, at most `depth` of them made before they are asked for.

    An error of the iterator is raised where its item would have come. `close` ends the thread; so does
    dropping this object, or the end of the program.

    Args:
        items: Iterator that is used by the thread only.
        depth: Number of items that may lie ready.
        setup: Called in the thread before anything else.
        name: Of the thread.
    """

    def __init__(
        self, items: Iterator[T], *, depth: int, setup: Callable[[], None] = lambda: None, name: str
    ) -> None:
        self._handover: _Handover[T] = _Handover(depth)
        # The thread must not refer to this object: then dropping it ends the thread.
        arguments = (items, self._handover, setup)
        self._thread = threading.Thread(target=_run, args=arguments, name=name, daemon=True)
        self._finalizer = weakref.finalize(self, _end, self._handover, self._thread)
        self._thread.start()

    def __next__(self) -> T:
        return self._handover.get()

    def close(self) -> None:
        """End the thread and drop what lies ready; closing twice is allowed."""
        self._finalizer()


class _Handover(Generic[T]):
    """A queue of a few items between two threads that either of them can close."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._end: BaseException | None = None

    def wait_for_room(self) -> bool:
        """Wait until an item may be made; False if none is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._depth)
            return not self._is_closed

    def put(self, item: T) -> None:
        with self._changed:
            if not self._is_closed:
                self._ready.append(item)
                self._changed.notify_all()

    def finish(self, end: BaseException) -> None:
        """Have `get` raise `end` once everything ready was taken."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def get(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._end or self._is_closed)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._end is None:
                raise StoreClosedError(
                    "the iterator was closed", hint="a loader has one iterator at a time: the newest"
                )
            raise self._end

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()


def _end(handover: _Handover[T], thread: threading.Thread) -> None:
    handover.close()
    if thread is not threading.current_thread():  # which may be the one that drops the last reference
        thread.join()  # also at exit: a thread that is inside torch then would take the process down


def _run(items: Iterator[T], handover: _Handover[T], setup: Callable[[], None]) -> None:
    try:
        setup()
        while handover.wait_for_room():
            handover.put(next(items))
    except BaseException as end:  # StopIteration too: it is the ordinary end
        handover.finish(end)
