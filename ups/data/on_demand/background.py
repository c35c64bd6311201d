"""A build in the background: a thread of this process makes the trajectories that training waits for.

Reading, encoding and committing are those of `ups_store.build`; here is only which samples come when, how
others learn that they are there, and how the thread ends.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ups.data.on_demand.order import in_turns
from ups.data.stores import shown_place
from ups.data.windows import Items
from ups.errors import UpsError
from ups.log import logger
from ups_store.build import QuietWatcher, Readers, ReadingConfig

_POLL_S = 0.1  # other processes commit too, and don't say so
_END_S = 30.0  # for the batch that is being read or encoded
_NOTE_S = 5.0  # between two lines about one store


class TaskBuild(Protocol):
    """What is made for one task: a `ups_store.build.Build`, or what keeps nothing.

    Attributes:
        title: Task and split, for people.
        num_samples: N.
    """

    title: str
    num_samples: int

    def use(self, readers: Readers, watcher: Progress) -> None:
        """Get ready, in the build's thread."""

    def fill(self, samples: Items) -> None:
        """Read, encode and commit samples."""

    def check_complete(self) -> None:
        """Fail if samples were skipped."""

    def finish(self) -> Any:
        """Called once all are made; returns the store, if there is one."""

    def num_there(self) -> int:
        """How many samples are there."""

    def close(self) -> None:
        """Let go of what the job holds, finished or not."""


class BuildEndedError(UpsError):
    """A background build was closed while somebody waited for it."""

    kind = "build_ended"


class BackgroundBuild:
    """Makes stretches of samples in a thread, those of several tasks in turns.

    Args:
        jobs: By task.
        stretches: Per task the samples in the order in which they are made; all of this process's share.
        reading: How sources are read.
        ahead: Stretches that are made before somebody waits for one that comes later; None for all.
        finished: Called in the thread once all jobs are, while others go on; given what it has to call now
            and then, which ends the thread when this is closed.
    """

    def __init__(
        self,
        jobs: Mapping[str, TaskBuild],
        stretches: Mapping[str, Sequence[Items]],
        *,
        reading: ReadingConfig,
        ahead: int | None = None,
        finished: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._state = _State()
        self._turns = {turn: number for number, turn in enumerate(in_turns(stretches))}
        self._ahead = ahead
        work = _Work(dict(jobs), stretches, list(self._turns), reading, self._state, finished)
        self._state.allowed = len(self._turns) if ahead is None else ahead
        self._thread = threading.Thread(target=work.run, name="ups-on-demand", daemon=True)
        # The thread refers to the work only. So it ends with this object, and before the interpreter does.
        self._finalizer = weakref.finalize(self, _end, self._state, self._thread)
        self._thread.start()

    def wait_until(self, is_ready: Callable[[], bool], *, task: str, stretch: int = 0) -> None:
        """Wait until what was asked for is there.

        Args:
            is_ready: Whether it is.
            task: Whose samples are waited for.
            stretch: Number of the task's last stretch that is needed.
        Raises:
            BaseException: Whatever the build failed with, also when all that is asked for is there.
            BuildEndedError: If it was closed.
        """
        if self._ahead is not None:
            self._state.allow(self._turns[task, stretch] + 1 + self._ahead)
        self._wait(is_ready)

    def wait_finished(self) -> None:
        """Wait until every job is finished; raises as `wait_until`."""
        self._wait(lambda: self._state.is_done)

    @property
    def is_done(self) -> bool:
        """Whether every job is finished."""
        return self._state.is_done

    def close(self) -> None:
        """End the thread, after the batch that it is at; what is committed stays. May be called twice."""
        self._finalizer()

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        while True:
            self._state.check()
            if is_ready():
                return
            self._state.sleep(_POLL_S)


class _Ended(BaseException):
    """Unwinds the thread; nothing on the way takes it for an error of its own."""


class _State:
    """What the thread and those that wait for it share."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.failure: BaseException | None = None
        self.is_done = self.is_ending = False
        self.allowed = 0

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.is_ending and not self.is_done:
            raise BuildEndedError("the build in the background was closed")

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)

    def allow(self, number: int) -> None:
        if number > self.allowed:
            self.allowed = number
            self.wake()

    def check_not_ending(self) -> None:
        if self.is_ending:
            raise _Ended


class _Work:
    """What the thread does."""

    def __init__(
        self,
        jobs: Mapping[str, TaskBuild],
        stretches: Mapping[str, Sequence[Items]],
        turns: Sequence[tuple[str, int]],
        reading: ReadingConfig,
        state: _State,
        finished: Callable[[Callable[[], None]], None] | None,
    ) -> None:
        self._jobs, self._stretches, self._turns = jobs, stretches, turns
        self._reading, self._state = reading, state
        self._finished = finished

    def run(self) -> None:
        try:
            with Readers(self._reading, note=logger.info) as readers:
                self._make_all(readers)
            self._state.is_done = True
            self._state.wake()
            if self._finished is not None:
                self._finished(self._state.check_not_ending)
        except _Ended:
            pass
        except BaseException as error:
            self._state.failure = error
        finally:
            for job in self._jobs.values():
                job.close()
            self._state.wake()

    def _make_all(self, readers: Readers) -> None:
        for job in self._jobs.values():
            job.use(readers, Progress(job, self._state))
        for number, (task, stretch) in enumerate(self._turns):
            while number >= self._state.allowed:
                self._state.check_not_ending()
                self._state.sleep(_POLL_S)
            self._jobs[task].fill(self._stretches[task][stretch])
            self._jobs[task].check_complete()
            self._state.wake()
        for job in self._jobs.values():
            if (store := job.finish()) is not None:
                logger.info(f"{job.title}: all {job.num_samples} encoded, {shown_place(store)}")


class Progress(QuietWatcher):
    """A watcher that passes on what matters while a model is trained.

    Args:
        job: Whose progress.
        state: Woken at every commit; and what ends the thread at the next batch.
    """

    def __init__(self, job: TaskBuild, state: _State) -> None:
        super().__init__(logger.info)
        self._job, self._state = job, state
        self._noted_s = time.monotonic()

    def advance(self, num: int) -> None:
        """Samples were committed; called in the thread that commits."""
        self._state.wake()
        if time.monotonic() > self._noted_s + _NOTE_S:
            self._noted_s = time.monotonic()
            logger.info(f"{self._job.title}: encoded {self._job.num_there()} of {self._job.num_samples}")

    def waits(self, what: str) -> None:
        """Another part of a batch begins: here the thread can end."""
        self._state.check_not_ending()


def _end(state: _State, thread: threading.Thread) -> None:
    state.is_ending = True
    state.wake()
    if thread is not threading.current_thread():
        thread.join(_END_S)
