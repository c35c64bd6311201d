"""`Ahead`: results that threads work out while earlier ones are in use, in the order of the jobs."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from ups_store.errors import StoreClosedError

Job = TypeVar("Job")
Result = TypeVar("Result")


class Ahead(Iterator[Result], Generic[Job, Result]):
    """The results of jobs, at most `depth` of them begun before they are asked for.

    Every thread takes the next job, so several results are worked out at the same time. An error is raised
    where its result would have come, and no job is begun after it. `close` ends the threads; so does dropping
    this object, or the end of the program.

    Args:
        jobs: Used by one thread at a time.
        work: Makes the result of a job; called by several threads at a time.
        depth: Number of results that may lie ready or be in the making.
        num_threads: Number of threads.
        setup: Called in each thread before anything else.
        name: Of the threads.
    """

    def __init__(
        self,
        jobs: Iterator[Job],
        work: Callable[[Job], Result],
        *,
        depth: int,
        num_threads: int = 1,
        setup: Callable[[], None] = lambda: None,
        name: str,
    ) -> None:
        self._desk: _Desk[Job, Result] = _Desk(jobs, depth)
        # Threads must not refer to this object: then dropping it ends them.
        run = (self._desk, work, setup)
        threads = [
            threading.Thread(target=_run, args=run, name=name, daemon=True) for _ in range(num_threads)
        ]
        self._finalizer = weakref.finalize(self, _end, self._desk, threads)
        for thread in threads:
            thread.start()

    def __next__(self) -> Result:
        return self._desk.get()

    def close(self) -> None:
        """End the threads and drop what lies ready; closing twice is allowed."""
        self._finalizer()


@dataclass(eq=False)
class _Slot(Generic[Result]):
    """Where a result will lie; filled with it or with an error."""

    result: Result | None = None
    error: BaseException | None = None
    is_filled: bool = False


class _Desk(Generic[Job, Result]):
    """Jobs that are handed out, and results that are handed in, in the same order."""

    def __init__(self, jobs: Iterator[Job], depth: int) -> None:
        self._jobs, self._depth = jobs, depth
        self._slots: deque[_Slot[Result]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_jobs = True

    def take(self) -> tuple[Job, _Slot[Result]] | None:
        """The next job, once there is room for its result; None if no more is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_wanted or len(self._slots) < self._depth)
            if not self._is_wanted:
                return None
            try:
                job = next(self._jobs)
            except BaseException as error:  # StopIteration too: raised by `get`, it is the ordinary end
                self.fail(error)
                return None
            self._slots.append(_Slot())
            return job, self._slots[-1]

    def put(self, slot: _Slot[Result], result: Result | None, error: BaseException | None = None) -> None:
        """Hand in the result of a job, or its error: then no more jobs are handed out."""
        with self._changed:
            slot.result, slot.error, slot.is_filled = result, error, True
            self._has_jobs = self._has_jobs and error is None
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Have an error follow the results of the jobs that were taken."""
        with self._changed:
            self._slots.append(_Slot())
            self.put(self._slots[-1], None, error)

    def get(self) -> Result:
        """The next result, or its error."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._slots and self._slots[0].is_filled))
            if self._is_closed:
                raise StoreClosedError(
                    "the iterator was closed", hint="a loader has one iterator at a time: the newest"
                )
            if self._slots[0].error is not None:
                raise self._slots[0].error  # again and again
            self._changed.notify_all()
            return self._slots.popleft().result  # type: ignore[return-value]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._slots.clear()
            self._changed.notify_all()

    @property
    def _is_wanted(self) -> bool:
        return self._has_jobs and not self._is_closed


def _run(desk: _Desk[Job, Result], work: Callable[[Job], Result], setup: Callable[[], None]) -> None:
    try:
        setup()
    except BaseException as error:
        desk.fail(error)
    while (taken := desk.take()) is not None:
        job, slot = taken
        try:
            desk.put(slot, work(job))
        except BaseException as error:
            desk.put(slot, None, error)
        del job, slot, taken  # while this thread waits, the result is the loop's alone


def _end(desk: _Desk[Job, Result], threads: list[threading.Thread]) -> None:
    desk.close()
    for thread in threads:
        if thread is not threading.current_thread():  # which may be the one that drops the last reference
            thread.join()  # also at exit: a thread that is inside torch then would take the process down
