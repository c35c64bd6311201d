"""Reader processes with deadlines: a read that hangs, crashes or is killed ends in an error, not in waiting.

One thread supervises. It keeps every reader busy with a bounded number of requests, hands out the results in
the order of the requests, and replaces a reader that is late or dead. Deadlines are on the monotonic clock.
"""

from __future__ import annotations

import itertools
import select
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ups_store.errors import SourceError
from ups_store.sources.contents import SourceInfo
from ups_store.sources.lane import Lane, Note, Patience, ReadJob, replace_late, stop_lanes
from ups_store.sources.reader_handle import stacks_of
from ups_store.sources.requests import DescribeRequest, ReadRequest, described
from ups_store.sources.slots import Activity
from ups_store.sources.source_files import USUAL_SLOTS
from ups_store.system.progress import Progress

if TYPE_CHECKING:
    from ups_store.sources.reader import Request

__all__ = ["Patience", "PoolStatus", "ReadBatch", "ReaderPool", "ReaderStatus", "Skipped"]

_TURN_S = 0.5  # the longest wait: what a reader says about itself may bring a deadline forward


class ReadBatch(NamedTuple):
    """Samples that were read.

    Attributes:
        samples: What the caller calls them, shape (B,).
        arrays: Their arrays by name, shape (B, ...); views of a slot, valid until the next batch.
        ranges: What the request returned: of a `ReadRequest` the range of values of each array.
    """

    samples: npt.NDArray[np.int64]
    arrays: dict[str, npt.NDArray[Any]]
    ranges: Any


@dataclass(frozen=True, eq=False)
class Skipped:
    """Samples that could not be read, as the caller calls them, shape (B,), and why."""

    samples: npt.NDArray[np.int64]
    error: SourceError


@dataclass(frozen=True, eq=False)
class ReaderStatus:
    """What one reader does.

    Attributes:
        pid: Its process id.
        doing: "starting", "idle", "opening", "reading" (decoding too), "checking", "digesting", ...
        since_s: Since when, on the clock of `time.monotonic`.
        request: With what; None if it has nothing to do.
        num_waiting: Requests in its queue, this one included.
        num_done: How much of the request it has done, in the request's own unit.
        dataset: HDF5 path of what it reads; "" where no dataset is concerned.
    """

    pid: int
    doing: str
    since_s: float
    request: Request | None
    num_waiting: int
    num_done: int = 0
    dataset: str = ""


@dataclass(frozen=True, eq=False)
class PoolStatus:
    """What a pool does.

    Attributes:
        readers: The readers that run.
        num_ready: Results that wait for the caller.
    """

    readers: tuple[ReaderStatus, ...]
    num_ready: int


class ReaderPool:
    """Reader processes, started when there is something to read, ended by `close` or the end of a `with`.

    For one thread, which has to live as long as the pool; `status` and `stacks` are for any.

    Args:
        num_workers: How many processes, at least one: a read that hangs is given up with its process.
        slot_nbytes: Size of a slot: of the largest batch, each array rounded up to `slots.ALIGN`.
        num_slots: Slots of each reader; with 2 it reads one batch while the caller works with another. Memory
            is bounded by `num_workers * num_slots * slot_nbytes` and what reading one batch takes.
        patience: Deadlines and retries.
        on_error: Whether `read` raises what is wrong with a source, or gives `Skipped` instead.
        note: Given a sentence for every reader that is replaced.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        slot_nbytes: int,
        num_slots: int = USUAL_SLOTS,
        patience: Patience | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        note: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.slot_nbytes = 0
        self._num_slots = 0
        self._lanes: list[Lane] = []
        self._patience = patience or Patience()
        self._note: Note = note
        self._on_error = on_error
        self._ids = itertools.count()
        self._jobs: deque[ReadJob] = deque()  # those that the caller hasn't done with, in order
        self.resize(num_workers, slot_nbytes=slot_nbytes, num_slots=num_slots)

    @property
    def num_workers(self) -> int:
        """How many reader processes there are, or will be once there is work for them."""
        return len(self._lanes)

    def resize(self, num_workers: int, *, slot_nbytes: int, num_slots: int = USUAL_SLOTS) -> None:
        """Have so many readers with slots of at least this size; not while the pool reads."""
        assert not self._jobs, "the pool is reading"
        fits = slot_nbytes <= self.slot_nbytes and num_slots == self._num_slots
        kept = self._lanes[:num_workers] if fits else []
        stop_lanes([lane for lane in self._lanes if lane not in kept])
        if not fits:
            self.slot_nbytes, self._num_slots = slot_nbytes, num_slots
        self._lanes = kept + [self._new_lane() for _ in range(num_workers - len(kept))]

    def _new_lane(self) -> Lane:
        return Lane(
            num_slots=self._num_slots,
            slot_nbytes=self.slot_nbytes,
            patience=self._patience,
            note=self._note,
        )

    def read(self, requests: Iterable[ReadRequest]) -> Iterator[ReadBatch | Skipped]:
        """Read batches of samples.

        Args:
            requests: What to read; taken one by one, at most `num_workers * num_slots` ahead of the caller.

        Yields:
            In the order of the requests, their `samples` and the arrays, shape (B, ...), which are views of a
            slot: valid until the next item is asked for. Or `Skipped`.

        Raises:
            ReadTimeoutError: If a request was late each time it was tried; its notes hold the reader's stack.
            SourceError: As `ReadRequest.run`; kind "reader_died", if the reader was lost each time.
            StoreError: Kind "no_memory", if there is none for the slots.
        """
        for job in self._run(requests):
            assert isinstance(job.request, ReadRequest)
            if job.error is None:
                yield ReadBatch(job.request.samples, job.arrays, job.value)
            elif self._on_error == "skip" and isinstance(job.error, SourceError):
                yield Skipped(job.request.samples, job.error)
            else:
                raise job.error

    def describe(self, requests: Iterable[DescribeRequest]) -> Iterator[SourceInfo]:
        """Open files and say what they hold, in order; raises as `read` does, also where that skips."""
        for job in self._run(requests):
            if job.error is not None:
                raise job.error
            yield described(job.value, job.arrays)

    def ask(self, request: Request, *, progress: Progress = lambda num: None) -> Any:
        """Run one request and return its result; raises as `read` does, also where that skips.

        Args:
            request: What to do.
            progress: Called with how much more was done, as the request says by `Reader.progressed`.
        """
        counted = 0

        def count(index: int, num_done: int) -> None:
            nonlocal counted
            if num_done > counted:  # less if it is tried again
                progress(num_done - counted)
                counted = num_done

        (result,) = self.ask_each([request], report=count)
        return result

    def ask_each(
        self,
        requests: Sequence[Request],
        *,
        report: Callable[[int, int], None] = lambda index, num_done: None,
    ) -> Iterator[Any]:
        """Run requests side by side; their results in order, raises as `ask` does.

        Args:
            requests: What to do.
            report: Called with the number of a request and how much of it is done, in its own unit.
        """
        first = next(self._ids) + 1

        def count(status: Activity) -> None:
            if status.request_id >= first:
                report(status.request_id - first, status.num_done)

        for job in self._run(requests, count):
            if job.error is not None:
                raise job.error
            yield job.value

    def try_each(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Run requests side by side; in order their results, or, of those that failed, the exceptions."""
        for job in self._run(requests):
            yield job.value if job.error is None else job.error

    def status(self) -> PoolStatus:
        """What the readers do at this moment."""
        return PoolStatus(
            readers=tuple(status for lane in self._lanes if (status := _status(lane))),
            num_ready=sum(job.is_settled for job in self._jobs.copy()),
        )

    def stacks(self) -> dict[int, str]:
        """The Python stacks of the readers by process id, "" for one that doesn't answer within 1 s."""
        readers = [reader for lane in self._lanes if (reader := lane.reader)]
        return {reader.pid: stack for reader, stack in zip(readers, stacks_of(readers), strict=True)}

    def close(self) -> None:
        """End all readers, within 1.5 s; a second call does nothing."""
        stop_lanes(self._lanes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(
        self, requests: Iterable[Request], report: Callable[[Activity], None] = lambda status: None
    ) -> Iterator[ReadJob]:
        """Settled jobs in the order of the requests; `report` hears how those go that readers work on."""
        assert not self._jobs, "the pool is reading already"
        unseen = iter(requests)
        try:
            while self._hand_out(unseen):
                while not self._jobs[0].is_settled:
                    self._take_turn()
                    for lane in self._lanes:
                        if lane.reader:
                            report(lane.reader.status)
                yield self._jobs[0]
                self._release_first()
        finally:
            self._abort()

    def _hand_out(self, unseen: Iterator[Request]) -> bool:
        """Give the lanes as many jobs as they have room for, the emptiest first; whether there is any job."""
        while (lane := min(self._lanes, key=lambda lane: lane.num_taken)).has_room:
            request = next(unseen, None)
            if request is None:
                break
            self._jobs.append(ReadJob(next(self._ids), request))
            lane.add(self._jobs[-1])
        return bool(self._jobs)

    def _take_turn(self) -> None:
        """Send what can be sent, wait until something happens, and deal with it."""
        for lane in self._lanes:
            lane.feed()
        poll = select.poll()
        for lane in self._lanes:
            if lane.reader:
                poll.register(lane.reader, select.POLLIN)
        wait_s = min(_TURN_S, *(lane.wait_s() for lane in self._lanes))
        poll.poll(max(0.0, wait_s) * 1000)
        for lane in self._lanes:
            lane.receive()
        replace_late(self._lanes)

    def _abort(self) -> None:
        """Forget what was asked for; readers that work on it are ended."""
        stop_lanes([lane for lane in self._lanes if lane.queue])
        for lane in self._lanes:
            lane.queue.clear()
        while self._jobs:
            self._release_first()

    def _release_first(self) -> None:
        job = self._jobs.popleft()
        assert job.lane is not None
        job.lane.release(job)


def _status(lane: Lane) -> ReaderStatus | None:
    reader = lane.reader
    if reader is None:
        return None
    status, jobs = reader.status, lane.queue.copy()
    return ReaderStatus(
        pid=reader.pid,
        doing=status.doing,
        since_s=status.since_s or reader.started_s,
        request=next((job.request for job in jobs if job.id == status.request_id), None),
        num_waiting=len(jobs),
        num_done=status.num_done,
        dataset=status.dataset,
    )
