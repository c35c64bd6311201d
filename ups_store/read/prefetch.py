"""`Prefetch`: results that threads work out while earlier ones are in use, in the order of the jobs.

Deadlines of what is waited for: a read that hangs, in a page fault or at an unreachable server, ends as an
error. A thread that hangs can't be ended. It is left behind, with its buffers, and doesn't keep the program
from ending: the threads of a `ThreadPoolExecutor` would. It has to have let go of the interpreter's lock, as
copies of batches do: else nothing runs that could look at the time.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from ups_store.errors import BatchTimeoutError, StoreClosedError
from ups_store.read.items import Where
from ups_store.read.order import expect

Job = TypeVar("Job")
Result = TypeVar("Result")

OnWait = Callable[[], None]
Outcome = tuple[Any, BaseException | None]  # a result, or the error in its place

POLL_S = 0.2  # between two calls of `on_wait`
_SHOWN = 4  # samples in a message


class Prefetch(Generic[Job, Result]):
    """The results of jobs, at most `depth` of them begun before they are asked for.

    Every thread takes the next job, so several results are worked out at the same time. An error is raised
    where its result would have come, and no job is begun after it. `close` ends the threads; so does dropping
    this object, or the end of the program.
    """

    def __init__(
        self,
        jobs: Iterator[Job],
        work: Callable[[Job], Result],
        *,
        depth: int = 1,
        num_threads: int = 1,
        setup: Callable[[], None] = lambda: None,
        name: str = "ups_store loader",
    ) -> None:
        self._depth = depth if num_threads else 0
        self._num_begun = 0
        shared = self._shared = _Shared(jobs, work)
        # Threads must not refer to this object: then dropping it ends them.
        self.threads = [
            threading.Thread(target=shared.run, args=(setup,), name=name, daemon=True)
            for _ in range(num_threads)
        ]
        self._finalizer = weakref.finalize(self, _end, shared, self.threads, os.getpid())
        for thread in self.threads:
            thread.start()

    def get(self, on_wait: OnWait | None = None, *, ahead: bool = True) -> Result:
        """Give the next result."""
        shared = self._shared
        if shared.last is None:
            if ahead:
                self._begin()
            if self._num_begun:
                result, error = _taken(_taken(shared.begun, on_wait), on_wait)
                self._num_begun -= 1
            else:
                result, error = shared.outcome(*shared.next_job())
            if shared.last is None:  # it may have been closed meanwhile
                if error is None:
                    if ahead:
                        self._begin()  # so that threads work while this result is in use
                    return result  # type: ignore[no-any-return]
                shared.last = error
        raise shared.last  # again and again

    def _begin(self) -> None:
        while self._num_begun < self._depth:
            self._shared.wanted.put(True)
            self._num_begun += 1

    def stop(self) -> None:
        """Drop what lies ready and have no more made; threads end after their work, as `close` awaits."""
        self._shared.close(len(self.threads))

    def leave(self) -> None:
        """Do the same, and never wait for the threads: their work may not end."""
        self.stop()
        self._finalizer.detach()

    def close(self) -> None:
        """End the threads and drop what lies ready; closing twice is allowed."""
        self._finalizer()


class _Shared(Generic[Job, Result]):
    """What the threads have in common with who asks for results.

    Made of locks and queues that the interpreter has in C: after a copy the caches are cold, and a
    `threading.Condition`, as in futures, then takes longer than everything else between two batches.
    """

    def __init__(self, jobs: Iterator[Job], work: Callable[[Job], Result]) -> None:
        self._jobs, self._work = jobs, work
        self.wanted: SimpleQueue[bool] = SimpleQueue()  # True for each result that may be begun
        self.begun: SimpleQueue[SimpleQueue[Outcome]] = SimpleQueue()  # in the order of the jobs
        self._taking = threading.Lock()  # never for `close`: garbage collection may call it amid `run`
        self._is_over = False
        self.last: BaseException | None = None

    def run(self, setup: Callable[[], None]) -> None:
        failure: BaseException | None = None
        try:
            setup()
        except BaseException as refusal:
            failure = refusal
        while self.wanted.get():
            result: SimpleQueue[Outcome] = SimpleQueue()
            with self._taking:
                if self._is_over:
                    continue
                self.begun.put(result)
                job, error = (None, failure) if failure is not None else self.next_job()
            result.put(self.outcome(job, error))
            del job, error, result  # while this thread waits, the result is the loop's alone

    def next_job(self) -> Outcome:
        """Take the next job, or the error in its place; StopIteration too is an end that `get` raises."""
        try:
            return next(self._jobs), None
        except BaseException as error:
            self._is_over = True
            return None, error

    def outcome(self, job: Any, error: BaseException | None) -> Outcome:
        if error is None:
            try:
                return self._work(job), None
            except BaseException as failure:
                error = failure
        self._is_over = True
        return None, error

    def close(self, num_threads: int) -> None:
        self._is_over = True
        hint = "a loader has one iterator at a time: the newest"
        self.last = StoreClosedError("the iterator was closed", hint=hint)
        with contextlib.suppress(Empty):
            while True:
                self.begun.get_nowait()
        for _ in range(num_threads):
            self.wanted.put(False)
        closed: SimpleQueue[Outcome] = SimpleQueue()
        closed.put((None, self.last))
        self.begun.put(closed)  # for whoever waits for a result


def _taken(queue: SimpleQueue[Any], on_wait: OnWait | None) -> Any:
    if on_wait is None:
        return queue.get()
    while True:
        try:
            return queue.get(timeout=POLL_S)
        except Empty:
            on_wait()


def _end(shared: _Shared[Any, Any], threads: list[threading.Thread], pid: int) -> None:
    if pid != os.getpid():
        return  # a forked child has none of the threads, and perhaps locks that one of them held
    shared.close(len(threads))
    if threading.current_thread() in threads:  # it dropped the last reference; the others end as it does
        return
    for thread in threads:
        thread.join()  # also at exit: a thread that is inside torch then would take the process down


def check_timeout(timeout: object) -> None:
    """Refuse what is no time that a batch could be waited for."""
    is_time = isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < math.inf
    expect("timeout", timeout is None or is_time, "a number of seconds above 0, or None", timeout)


def deadline(timeout_s: float, error: Callable[[], BatchTimeoutError], also: OnWait | None = None) -> OnWait:
    """Make an `on_wait` that raises an error once the time is over, and calls another before."""
    end_s = time.monotonic() + timeout_s

    def look() -> None:
        if also is not None:
            also()
        if time.monotonic() > end_s:
            raise error()

    return look


def in_time(work: Callable[[], Result], timeout_s: float, where: Callable[[], Where]) -> Result:
    """Call a function in a thread of its own, which is left behind when it is late."""
    made: Prefetch[None, Result] = Prefetch(iter([None]), lambda _: work(), name="ups_store dataset")
    thread = made.threads[0].ident
    try:
        return made.get(deadline(timeout_s, lambda: late(where(), timeout_s=timeout_s, thread=thread)))
    finally:
        made.leave()


def late(where: Where, *, timeout_s: float, thread: int | None) -> BatchTimeoutError:
    """Make the error of a batch that hasn't come."""
    path, samples = where
    frame = None if thread is None else sys._current_frames().get(thread)
    actual, stack = "nothing is being read", ""
    if frame is not None:
        calls = traceback.extract_stack(frame)
        stack = "".join(calls.format())
        more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
        file, line = os.path.basename(calls[-1].filename), calls[-1].lineno
        actual = f"samples {', '.join(map(str, samples[:_SHOWN]))}{more}, in {calls[-1].name} ({file}:{line})"
    error = BatchTimeoutError(
        f"a batch hasn't come for {timeout_s:g} s",
        path=path,
        sample=samples[0] if samples else None,
        found=actual,
        hint="look whether its disk or server answers; "
        "`load_state_dict`, or the same command, goes on from there",
    )
    error.samples, error.stack = tuple(samples), stack
    if stack:
        error.add_note(f"What makes the batch:\n{stack}")
    return error
