"""`Ahead`: results that threads work out while earlier ones are in use, in the order of the jobs.

`Inline` has the same face without threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ups_store.errors import StoreClosedError

Job = TypeVar("Job")
Result = TypeVar("Result")

OnWait = Callable[[], None]

POLL_S = 0.2  # between two calls of `on_wait`


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
        self._finalizer = weakref.finalize(self, _end, self._desk, threads, os.getpid())
        for thread in threads:
            thread.start()

    def __next__(self) -> Result:
        return self.get()

    def get(self, on_wait: OnWait | None = None) -> Result:
        """The next result.

        Args:
            on_wait: Called now and then while it is waited for; what it raises ends the wait.
        """
        return self._desk.get(on_wait)

    def stop(self) -> None:
        """Drop what lies ready and have no more made; threads end after their work, as `close` awaits."""
        self._desk.close()

    def leave(self) -> None:
        """The same, and never wait for the threads: their work may not end."""
        self._desk.close()
        self._finalizer.detach()

    def close(self) -> None:
        """End the threads and drop what lies ready; closing twice is allowed."""
        self._finalizer()


class Inline(Iterator[Result], Generic[Job, Result]):
    """The results of jobs, each worked out by the thread that asks for it, when it does.

    Args:
        jobs: One after the other.
        work: Makes the result of a job.
    """

    def __init__(self, jobs: Iterator[Job], work: Callable[[Job], Result]) -> None:
        self._jobs, self._work = jobs, work
        self._is_closed = False

    def __next__(self) -> Result:
        return self.get()

    def get(self, on_wait: OnWait | None = None) -> Result:
        """The next result; nothing is waited for."""
        if self._is_closed:
            raise _closed()
        return self._work(next(self._jobs))

    def stop(self) -> None:
        """As `close`."""
        self.close()

    def close(self) -> None:
        """Have the next `get` fail."""
        self._is_closed = True


def _closed() -> StoreClosedError:
    return StoreClosedError("the iterator was closed", hint="a loader has one iterator at a time: the newest")


class _Slot(Generic[Result]):
    """Where a result will lie; filled with it or with an error."""

    __slots__ = ("_filled", "error", "result")

    def __init__(self) -> None:
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._filled = threading.Lock()
        self._filled.acquire()

    def fill(self, result: Result | None, error: BaseException | None = None) -> None:
        self.result, self.error = result, error
        self._filled.release()

    def wait(self, on_wait: OnWait | None) -> None:
        if on_wait is None:
            self._filled.acquire()
            return
        while not self._filled.acquire(timeout=POLL_S):
            on_wait()


class _Desk(Generic[Job, Result]):
    """Jobs that are handed out, and results that are handed in, in the same order.

    Made of locks and queues that the interpreter has in C: after a copy the caches are cold, and a
    `threading.Condition` then takes longer than everything else between two batches.
    """

    def __init__(self, jobs: Iterator[Job], depth: int) -> None:
        self._jobs = jobs
        self._slots: SimpleQueue[_Slot[Result]] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()  # an entry for every result that may be begun
        for _ in range(depth):
            self._room.put(None)
        self._taking = threading.Lock()  # never for `close`: garbage collection may call it amid `take`
        self._has_jobs = True
        self._is_closed = False
        self._last: BaseException | None = None

    def take(self) -> tuple[Job, _Slot[Result]] | None:
        """The next job, once there is room for its result; None if no more is wanted."""
        self._room.get()
        with self._taking:
            if self._has_jobs and not self._is_closed:
                slot: _Slot[Result] = _Slot()
                try:
                    job = next(self._jobs)
                except BaseException as error:  # StopIteration too: raised by `get`, it is the ordinary end
                    self.put(slot, None, error)
                self._slots.put(slot)
                if self._has_jobs:
                    return job, slot
            self._room.put(None)  # for the next thread, which ends too
            return None

    def put(self, slot: _Slot[Result], result: Result | None, error: BaseException | None = None) -> None:
        """Hand in the result of a job, or its error: then no more jobs are handed out."""
        if error is not None:
            self._has_jobs = False
        slot.fill(result, error)

    def fail(self, error: BaseException) -> None:
        """Have an error follow the results of the jobs that were taken."""
        with self._taking:
            self._put_error(error)

    def _put_error(self, error: BaseException) -> None:
        slot: _Slot[Result] = _Slot()
        self.put(slot, None, error)
        self._slots.put(slot)

    def get(self, on_wait: OnWait | None) -> Result:
        """The next result, or its error."""
        if self._last is not None:
            raise self._last  # again and again
        slot = self._slots.get() if on_wait is None else self._next_slot(on_wait)
        slot.wait(on_wait)
        if not self._is_closed:
            self._last = slot.error
        if self._last is not None:
            raise self._last
        self._room.put(None)
        return slot.result  # type: ignore[return-value]

    def _next_slot(self, on_wait: OnWait) -> _Slot[Result]:
        while True:
            try:
                return self._slots.get(timeout=POLL_S)
            except Empty:  # no thread has begun with it: the jobs may be what hangs
                on_wait()

    def close(self) -> None:
        self._last = _closed()
        self._is_closed = True
        with contextlib.suppress(Empty):
            while True:
                self._slots.get_nowait()
        self._room.put(None)
        self._put_error(self._last)  # for whoever waits for a result


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


def _end(desk: _Desk[Job, Result], threads: list[threading.Thread], pid: int) -> None:
    if pid != os.getpid():
        return  # a forked child has none of the threads, and perhaps locks that one of them held
    desk.close()
    if threading.current_thread() in threads:  # it dropped the last reference; the others end as it does
        return
    for thread in threads:
        thread.join()  # also at exit: a thread that is inside torch then would take the process down
