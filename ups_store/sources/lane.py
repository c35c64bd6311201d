"""The place of one reader in a pool: its requests in order, and the reader process, which may be replaced.

What a late or dead reader had not done, its successor does; only the request that it was working on counts as
failed. Its error says where the reader was, what it did, for how long, and what may help; the stack and
whatever else the reader wrote to stderr go with it as a note (PEP 678).
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ups_store.errors import ReadTimeoutError, SourceError
from ups_store.sources.reader_handle import STOPPED, ReaderHandle, new_reader, stacks_of, stop_readers
from ups_store.sources.requests import Done, Failed

if TYPE_CHECKING:
    from ups_store.sources.reader import Request

Note = Callable[[str], None]

_FRAME = re.compile(r'File "(?:.*/)?(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_HINTS = {
    "starting": "check the load of the machine, and the file system of its Python packages",
    "opening": "check the disk or network mount, or raise reading.open_timeout_s",
}


@dataclass(frozen=True)
class Patience:
    """How long readers may take, and how often one is replaced.

    Attributes:
        timeout_s: For one request, from when it is begun, or since it last said that it got on.
        open_timeout_s: For opening a file.
        start_timeout_s: For the start of a reader, which takes 0.3 s, or many on a busy machine; one that is
            stopped meanwhile has `open_timeout_s`.
        retries: How often a request is tried again after its reader was late or died, or the system reported
            EIO or ESTALE.
        backoff_s: Pause before the first of these; it doubles each time.
    """

    timeout_s: float = 300.0
    open_timeout_s: float = 60.0
    start_timeout_s: float = 60.0
    retries: int = 2
    backoff_s: float = 0.5


@dataclass(eq=False)
class ReadJob:
    """A request on its way.

    Attributes:
        id: Number, growing in the order of the requests.
        request: The request.
        lane: Where it was put.
        next_s: When it became the next one of its reader.
        num_failed: How often its reader was late or died.
        reader: Reader that it was sent to, whose memory the arrays lie in.
        slot: Slot there.
        is_settled: Whether there is a result, or an error.
    """

    id: int
    request: Request
    lane: Lane | None = None
    next_s: float = 0.0
    num_failed: int = 0
    reader: ReaderHandle | None = None
    slot: int = -1
    is_settled: bool = False
    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    value: Any = None
    error: Exception | None = None


class Lane:
    """See the module.

    Args:
        num_slots: Slots of the reader.
        slot_nbytes: Size of one.
        patience: Deadlines and retries.
        note: Given a sentence when a request is tried again.

    Attributes:
        reader: The reader, while there is one.
        queue: Jobs that aren't settled, in order.
        num_taken: Those, and jobs whose result the caller hasn't done with.
    """

    def __init__(self, *, num_slots: int, slot_nbytes: int, patience: Patience, note: Note) -> None:
        self.reader: ReaderHandle | None = None
        self.queue: deque[ReadJob] = deque()
        self.num_taken = 0
        self._num_slots = num_slots
        self._slot_nbytes = slot_nbytes
        self._patience = patience
        self._note = note
        self._restart_s = 0.0

    @property
    def has_room(self) -> bool:
        """Whether another job would have a slot."""
        return self.num_taken < self._num_slots

    def add(self, job: ReadJob) -> None:
        """Queue a job."""
        job.lane, job.next_s = self, time.monotonic()
        self.queue.append(job)
        self.num_taken += 1

    def release(self, job: ReadJob) -> None:
        """The caller has done with a job: its slot is free."""
        self.num_taken -= 1
        if job.reader is not None:
            job.reader.free_slots.append(job.slot)

    def feed(self) -> None:
        """Start a reader if there is work for one, and send it all that can be sent."""
        if self.reader is None and self.queue and time.monotonic() >= self._restart_s:
            self.reader = new_reader(num_slots=self._num_slots, slot_nbytes=self._slot_nbytes)
        for job in self.queue if self.reader else ():
            if job.reader is None and not self._send(job):
                return

    def _send(self, job: ReadJob) -> bool:
        assert self.reader is not None
        slot = self.reader.free_slots[-1]
        is_sent = self.reader.send(job.request, request_id=job.id, slot=slot)
        if is_sent:
            job.reader, job.slot = self.reader, self.reader.free_slots.pop()
        return is_sent

    def receive(self) -> None:
        """Take the answers that are there."""
        for answer in self.reader.receive() if self.reader else ():
            if answer is None:
                self._replace_lost()
            elif isinstance(answer, Failed) and answer.is_transient:
                stop_lanes([self])  # with the reader go the files that it has open
                self.blame(answer.error)
                break
            else:
                self._settle(answer)

    def _settle(self, answer: Done | Failed) -> None:
        job = self.queue[0]
        assert job.id == answer.request_id, f"answer {answer.request_id}, expected {job.id}"
        assert job.reader is not None
        if isinstance(answer, Failed):
            job.error = answer.error
        else:
            memory = job.reader.memory
            job.arrays = {placed.name: memory.view(job.slot, placed) for placed in answer.placed}
            job.value = answer.value
        self._finish_next()

    def _finish_next(self) -> None:
        self.queue.popleft().is_settled = True
        if self.queue:
            self.queue[0].next_s = time.monotonic()

    def _replace_lost(self) -> None:
        assert self.reader is not None
        error = died(self.queue[0].request, self.reader, attempt=self._attempt()) if self.queue else None
        stop_lanes([self])
        if error:
            self.blame(error)

    def wait_s(self) -> float:
        """How long nothing has to be done here, unless the reader answers; inf without work."""
        if not self.queue:
            return float("inf")
        return self.left_s() if self.reader else self._restart_s - time.monotonic()

    def left_s(self) -> float:
        """Time that is left to the reader; inf if it has nothing to do."""
        if not self.queue or self.reader is None:
            return float("inf")
        if self.reader.status.request_id > self.queue[0].id:
            return float("inf")  # it has answered, and that is about to be received
        return self._limit()[0] - time.monotonic()

    def _limit(self) -> tuple[float, float]:
        """When the time of the reader is up, and how much it had."""
        assert self.reader is not None
        job, status, patience = self.queue[0], self.reader.status, self._patience
        if status.doing == "starting":
            most_s = patience.start_timeout_s
            if self.reader.process_state() == STOPPED:  # then it isn't the machine that is busy
                most_s = min(most_s, patience.open_timeout_s)
            return self.reader.started_s + most_s, most_s
        if status.request_id != job.id:
            begun_s = max(job.next_s, status.since_s)
        elif status.doing == "idle":  # it has done it, and the answer is on the way
            begun_s = status.since_s
        else:
            begun_s = status.progressed_s
        limit = begun_s + patience.timeout_s, patience.timeout_s
        if status.doing == "opening":
            return min(limit, (status.since_s + patience.open_timeout_s, patience.open_timeout_s))
        return limit

    def late_error(self, stack: str) -> ReadTimeoutError:
        """The error for a reader whose time is up."""
        assert self.reader is not None
        return timed_out(
            self.queue[0].request,
            self.reader,
            attempt=self._attempt(),
            stack=stack,
            timeout_s=self._limit()[1],
        )

    def _attempt(self) -> str:
        return f"attempt {self.queue[0].num_failed + 1} of {self._patience.retries + 1}"

    def blame(self, error: Exception) -> None:
        """Count a failure of the next job: it is tried again after a pause, or has failed for good."""
        job = self.queue[0]
        job.num_failed += 1
        if job.num_failed > self._patience.retries:
            job.error = error
            self._finish_next()
            return
        pause_s = self._patience.backoff_s * 2 ** (job.num_failed - 1)
        self._restart_s = time.monotonic() + pause_s
        self._note(f"{error}; trying again in {pause_s:g} s")

    def forget_reader(self, *, is_left_behind: bool) -> None:
        """There is no reader any more; the jobs stay, to be sent to the next one."""
        if is_left_behind and self.reader:
            state = self.reader.process_state()
            self._note(f"reader {self.reader.pid} can't be killed, process {state}: left behind")
        self.reader = None
        for job in self.queue:
            job.reader = None


def replace_late(lanes: Sequence[Lane]) -> None:
    """End readers whose time is up, all at once; their requests are tried again or have failed."""
    late = [lane for lane in lanes if lane.left_s() <= 0]
    if late:
        stacks = stacks_of([lane.reader for lane in late if lane.reader])
        # Some may have got on while their stacks were asked for.
        errors = {
            lane: lane.late_error(stack)
            for lane, stack in zip(late, stacks, strict=True)
            if lane.left_s() <= 0
        }
        stop_lanes(list(errors))
        for lane, error in errors.items():
            lane.blame(error)


def stop_lanes(lanes: Sequence[Lane]) -> None:
    """End the readers of lanes, all at once."""
    readers = {lane.reader: lane for lane in lanes if lane.reader}
    left_behind = stop_readers(list(readers))
    for reader, lane in readers.items():
        lane.forget_reader(is_left_behind=reader in left_behind)


def timed_out(
    request: Request, reader: ReaderHandle, *, attempt: str, stack: str, timeout_s: float
) -> ReadTimeoutError:
    """The error for a reader that passed a deadline; call it while the process is there."""
    status = reader.status
    doing_s = time.monotonic() - (status.since_s or reader.started_s)
    frame = _FRAME.search(stack)
    where = f" in {frame['function']} ({frame['file']}:{frame['line']})" if frame else ""
    state = reader.process_state()
    hint = _HINTS.get(status.doing, "check the disk or network mount, or raise reading.timeout_s")
    if state == STOPPED:
        hint = "find out what stops processes (SIGSTOP, a debugger, a frozen container), and run it again"
    error = ReadTimeoutError(
        f"reader {reader.pid} was late with {request.subject} ({attempt})",
        path=request.path,
        sample=request.first_sample,
        expected=f"at most {timeout_s:g} s",
        found=f"{status.activity} for {doing_s:.1f} s{where}, process {state}",
        hint=hint,
    )
    error.dataset = status.dataset or None
    _add_log(error, stack)
    return error


def died(request: Request, reader: ReaderHandle, *, attempt: str) -> SourceError:
    """The error for a reader that ended by itself, or was killed by another."""
    how, status = reader.how_it_ended(), reader.status
    hint = "check the file and the HDF5 filters that it needs; -vv shows what the reader said"
    if "SIGKILL" in how:
        hint = "if the system ran out of memory, lower reading.num_workers"
    if "SIGBUS" in how:
        hint = "the file was cut, or its disk failed, while it was read: check both, and run it again"
    error = SourceError(
        f"reader {reader.pid} was lost with {request.subject} ({attempt})",
        kind="reader_died",
        path=request.path,
        sample=request.first_sample,
        found=f"{how} while {status.activity}",
        hint=hint,
    )
    error.dataset = status.dataset or None
    _add_log(error, reader.log())
    return error


def _add_log(error: SourceError, log: str) -> None:
    if log.strip():
        error.add_note(f"the reader's stderr:\n{log.rstrip()}")
