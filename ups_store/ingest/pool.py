"""Reader processes with deadlines: a read that hangs, crashes or is killed ends in an error, not in waiting.

One thread supervises. It keeps every reader busy with a bounded number of requests, hands out the results in
the order of the requests, and replaces a reader that is late or dead. Deadlines are on the monotonic clock.
"""

from __future__ import annotations

import itertools
import select
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ups_store.errors import SourceError
from ups_store.ingest.info import SourceInfo
from ups_store.ingest.lane import Job, Lane, Patience, replace_late, stop_lanes
from ups_store.ingest.read_request import DescribeRequest, ReadRequest, Request
from ups_store.ingest.reader_handle import stacks_of
from ups_store.ingest.reader_process import Reader

__all__ = ["Batch", "Patience", "PoolStatus", "ReaderPool", "ReaderStatus", "Skipped"]

_TURN_S = 0.5  # the longest wait: what a reader says about itself may bring a deadline forward

Batch = tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]


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
        doing: "starting", "idle", "opening", "reading", "converting", ...
        since_s: Since when, on the clock of `time.monotonic`.
        request: With what; None if it has nothing to do.
        num_waiting: Requests in its queue, this one included.
    """

    pid: int
    doing: str
    since_s: float
    request: Request | None
    num_waiting: int


@dataclass(frozen=True, eq=False)
class PoolStatus:
    """What a pool does.

    Attributes:
        readers: The readers that run.
        num_ready: Results that wait for the caller.
        nbytes: Bytes of arrays received so far.
    """

    readers: tuple[ReaderStatus, ...]
    num_ready: int
    nbytes: int


class ReaderPool:
    """Reader processes, started when there is something to read, ended by `close` or the end of a `with`.

    For one thread, which has to live as long as the pool; `status` and `stacks` are for any.

    Args:
        num_workers: How many processes. 0: read in this one, without deadlines, for debugging.
        slot_nbytes: Size of a slot: of the largest batch, see `slots.batch_nbytes`.
        num_slots: Slots of each reader; with 2 it reads one batch while the caller works with another. Memory
            is bounded by `num_workers * num_slots * slot_nbytes` and what reading one batch takes.
        patience: Deadlines and retries.
        on_error: Whether `read` raises what is wrong with a source, or gives `Skipped` instead.
        note: Told about every reader that is replaced.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        slot_nbytes: int,
        num_slots: int = 2,
        patience: Patience | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        note: Callable[[str], None] = lambda message: None,
    ) -> None:
        patience = patience or Patience()
        self._lanes = [
            Lane(num_slots=num_slots, slot_nbytes=slot_nbytes, patience=patience, note=note)
            for _ in range(num_workers)
        ]
        self._on_error = on_error
        self._ids = itertools.count()
        self._jobs: deque[Job] = deque()  # those that the caller hasn't done with, in order
        self._nbytes = 0

    def read(self, requests: Iterable[ReadRequest]) -> Iterator[Batch | Skipped]:
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
                yield job.request.samples, job.arrays
            elif self._on_error == "skip" and isinstance(job.error, SourceError):
                yield Skipped(job.request.samples, job.error)
            else:
                raise job.error

    def describe(self, requests: Iterable[DescribeRequest]) -> Iterator[SourceInfo]:
        """Open files and say what they hold, in order; raises as `read` does, also where that skips."""
        for job in self._run(requests):
            if job.error is not None:
                raise job.error
            yield job.value

    def status(self) -> PoolStatus:
        """What the readers do at this moment."""
        return PoolStatus(
            readers=tuple(status for lane in self._lanes if (status := _status(lane))),
            num_ready=sum(job.is_settled for job in self._jobs.copy()),
            nbytes=self._nbytes,
        )

    def stacks(self) -> dict[int, str]:
        """The Python stacks of the readers by process id, "" for one that can't tell; takes at most 1 s."""
        readers = [reader for lane in self._lanes if (reader := lane.reader)]
        return {reader.pid: stack for reader, stack in zip(readers, stacks_of(readers), strict=True)}

    def close(self) -> None:
        """End all readers, within 1.5 s; a second call does nothing."""
        stop_lanes(self._lanes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, requests: Iterable[Request]) -> Iterator[Job]:
        """Settled jobs in the order of the requests."""
        if not self._lanes:
            yield from self._run_here(requests)
            return
        assert not self._jobs, "the pool is reading already"
        unseen = iter(requests)
        try:
            while self._hand_out(unseen):
                while not self._jobs[0].is_settled:
                    self._take_turn()
                yield self._jobs[0]
                _release(self._jobs.popleft())
        finally:
            self._abort()

    def _run_here(self, requests: Iterable[Request]) -> Iterator[Job]:
        reader = Reader()
        try:
            for request in requests:
                job = Job(next(self._ids), request)
                try:
                    job.value = reader.run(request, request_id=job.id, place=job.place)
                except SourceError as error:
                    job.error = error
                yield job
        finally:
            reader.close()

    def _hand_out(self, unseen: Iterator[Request]) -> bool:
        """Give the lanes as many jobs as they have room for, the emptiest first; whether there is any job."""
        while (lane := min(self._lanes, key=lambda lane: lane.num_taken)).has_room:
            request = next(unseen, None)
            if request is None:
                break
            self._jobs.append(Job(next(self._ids), request))
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
            self._nbytes += lane.receive()
        replace_late(self._lanes)

    def _abort(self) -> None:
        """Forget what was asked for; readers that work on it are ended."""
        stop_lanes([lane for lane in self._lanes if lane.queue])
        for lane in self._lanes:
            lane.queue.clear()
        while self._jobs:
            _release(self._jobs.popleft())


def _release(job: Job) -> None:
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
    )
