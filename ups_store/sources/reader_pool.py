"""Reader processes with deadlines: a read that hangs, crashes or is killed ends in an error, not in waiting.

`ReaderPool` is used by one thread, which keeps every process busy with a bounded number of requests and hands
out the results in their order. A request is called in a process, `request.run(reader)`, and fills arrays in
memory that both share. Each process writes there what it does and since when: by that, on the monotonic
clock, it is late or not. A process that is late or dead is replaced, and only the request that it worked on
counts as failed; its error says what was done and for how long, with the process's stack as a note.

From top to bottom: the pool, a worker of it, its process; `reader` has what runs there. Nothing here imports
HDF5, which a supervisor doesn't need.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import mmap
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from ups_store.errors import ReadTimeoutError, SourceError
from ups_store.sources.reader_process import (
    MAX_MESSAGE_BYTES,
    STACK_SIGNAL,
    Activity,
    Answer,
    ReadRequest,
    Request,
    SlotMemory,
)
from ups_store.sources.source_files import USUAL_SLOTS
from ups_store.system.files import Progress

_PROGRAM = "from ups_store.sources.reader_process import main; main()"
_TURN_S = 0.5  # the longest wait: what a reader says about itself may bring a deadline forward
_TERMINATE_S = 0.5  # from SIGTERM to SIGKILL
_KILL_S = 1.0  # from SIGKILL until a process is given up
_STACK_S = 1.0  # for writing a stack, which takes milliseconds unless the machine is busy
_LOOK_S = 0.01
_LOG_BYTES = 16 << 10  # of the end of what a reader wrote to stderr

# No thread per core for linear algebra. And batches are read into memory that was used before: fresh pages
# take nearly as long as a contiguous read itself (32 MiB is the most that glibc takes).
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
_STOPPED = "stopped"
_STATES = {
    "D": "in uninterruptible sleep (disk or network mount)",
    "R": "running",
    "S": "sleeping",
    "T": _STOPPED,
    "Z": "ended",
}
_LATE_HINTS = {
    "starting": "check the load of the machine, and the file system of its Python packages",
    "opening": "check the disk or network mount, or raise reading.open_timeout_s",
}
_FRAME = re.compile(r'File "(?:.*/)?(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_NOTHING_TO_DO = math.inf, math.inf

_Error = TypeVar("_Error", bound=SourceError)


@dataclass(frozen=True)
class Patience:
    """How long readers may take, and how often one is replaced."""

    timeout_s: float = 300.0  # for one request, from when it is begun, or since it last said that it got on
    open_timeout_s: float = 60.0  # for opening a file
    # For the start of a reader, which takes 0.3 s, or many on a busy machine; one that is stopped meanwhile
    # has `open_timeout_s`.
    start_timeout_s: float = 60.0
    retries: int = 2  # of a request whose reader was late or died, or reported EIO or ESTALE
    backoff_s: float = 0.5  # before the first of these; it doubles each time


class ReadBatch(NamedTuple):
    """Samples that were read, as the caller calls them, shape (B,)."""

    samples: npt.NDArray[np.int64]
    arrays: dict[str, npt.NDArray[Any]]  # shape (B, ...); views of a slot, valid until the next batch
    ranges: Any  # of values, by array


@dataclass(frozen=True, eq=False)
class Skipped:
    """Samples that could not be read, as the caller calls them, shape (B,), and why."""

    samples: npt.NDArray[np.int64]
    error: SourceError


@dataclass(frozen=True, eq=False)
class ReaderStatus:
    """What one reader does; see `Activity`."""

    pid: int
    doing: str
    since_s: float
    request: Request | None
    num_waiting: int  # requests in its queue, this one included
    num_done: int = 0
    dataset: str = ""


@dataclass(frozen=True, eq=False)
class PoolStatus:
    """The readers of a pool that run, and how many results wait for the caller."""

    readers: tuple[ReaderStatus, ...]
    num_ready: int


@dataclass(eq=False)
class _Job:
    """A request on its way, or done."""

    id: int  # growing in the order of the requests
    request: Request
    worker: _Worker
    next_s: float  # when it became the next one of its worker
    num_failed: int = 0  # times that its process was late or died
    process: ReaderProcess | None = None  # where it was sent to, whose memory the arrays lie in
    slot: int = -1
    is_settled: bool = False  # there is a result, or an error
    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    value: Any = None
    error: Exception | None = None


class ReaderPool:
    """Reader processes, started when there is something to do, ended by `close` or the end of a `with`.

    For one thread, which has to live as long as the pool; `status` and `stacks` are for any. A slot holds the
    largest batch, each array rounded up to `ALIGN`; with 2 a reader fills one while the caller works with
    another. Memory is bounded by `num_workers * num_slots * slot_nbytes` and what reading one batch takes.
    `on_error` says whether `read` raises what is wrong with a source, or gives `Skipped` instead; `note` is
    given a sentence for every reader that is replaced.
    """

    process_class: ClassVar[type[ReaderProcess]]  # tests put one in its place that starts no process

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
        self.num_slots = 0
        self.patience = patience or Patience()
        self.note = note
        self._on_error = on_error
        self._workers: list[_Worker] = []
        self._ids = itertools.count()
        self._jobs: deque[_Job] = deque()  # those that the caller hasn't done with, in order
        self.resize(num_workers, slot_nbytes=slot_nbytes, num_slots=num_slots)

    @property
    def num_workers(self) -> int:
        """Count the reader processes that there are, or will be once there is work for them."""
        return len(self._workers)

    def resize(self, num_workers: int, *, slot_nbytes: int, num_slots: int = USUAL_SLOTS) -> None:
        """Have so many readers with slots of at least this size; not while the pool reads."""
        assert not self._jobs, "the pool is reading"
        fits = slot_nbytes <= self.slot_nbytes and num_slots == self.num_slots
        kept = self._workers[:num_workers] if fits else []
        _stop([worker for worker in self._workers if worker not in kept])
        if not fits:
            self.slot_nbytes, self.num_slots = slot_nbytes, num_slots
        self._workers = kept + [_Worker(self) for _ in range(num_workers - len(kept))]

    def read(self, requests: Iterable[ReadRequest]) -> Iterator[ReadBatch | Skipped]:
        """Read batches; requests are taken one by one, at most `num_workers * num_slots` ahead of the caller.

        Gives, in the order of the requests, their `samples` and the arrays, shape (B, ...), which are views
        of a slot: valid until the next item is asked for. Or `Skipped`, if errors of sources aren't raised. A
        request that was late each time is a `ReadTimeoutError`, whose notes hold the reader's stack.
        """
        for job in self._run(requests):
            samples = job.request.samples  # type: ignore[attr-defined]
            if job.error is None:
                yield ReadBatch(samples, job.arrays, job.value)
            elif self._on_error == "skip" and isinstance(job.error, SourceError):
                yield Skipped(samples, job.error)
            else:
                raise job.error

    def ask(self, request: Request, *, progress: Progress = lambda num: None) -> Any:
        """Run one request and return its result; raises as `read` does, also where that skips.

        `progress` is called with how much more was done, as the request says by `Reader.progressed`.
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
        requests: Iterable[Request],
        *,
        report: Callable[[int, int], None] = lambda index, num_done: None,
        raises: bool = True,
    ) -> Iterator[Any]:
        """Run requests side by side; gives their results in order, raises as `ask` does, or gives the errors.

        `report` is called with the number of a request and how much of it is done, in its own unit.
        """
        first = next(self._ids) + 1

        def count(status: Activity) -> None:
            if status.request_id >= first:
                report(status.request_id - first, status.num_done)

        for job in self._run(requests, count):
            if job.error is not None and raises:
                raise job.error
            yield job.value if job.error is None else job.error

    def status(self) -> PoolStatus:
        """Tell what the readers do at this moment."""
        readers = []
        for worker in self._workers:
            process, jobs = worker.process, worker.queue.copy()
            if process is None:
                continue
            status = process.status
            request = next((job.request for job in jobs if job.id == status.request_id), None)
            since_s = status.since_s or process.started_s
            facts = (process.pid, status.doing, since_s, request, len(jobs), status.num_done, status.dataset)
            readers.append(ReaderStatus(*facts))
        return PoolStatus(tuple(readers), sum(job.is_settled for job in self._jobs.copy()))

    def stacks(self) -> dict[int, str]:
        """Give the Python stacks of the readers by process id, "" for one that doesn't answer within 1 s."""
        processes = [process for worker in self._workers if (process := worker.process)]
        return {process.pid: stack for process, stack in _stacks_of(processes).items()}

    def close(self) -> None:
        """End all readers, within 1.5 s; a second call does nothing."""
        _stop(self._workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(
        self, requests: Iterable[Request], report: Callable[[Activity], None] = lambda status: None
    ) -> Iterator[_Job]:
        """Settled jobs in the order of the requests; `report` hears how those go that readers work on."""
        assert not self._jobs, "the pool is reading already"
        unseen = iter(requests)
        try:
            while self._hand_out(unseen):
                while not self._jobs[0].is_settled:
                    self._take_turn()
                    for worker in self._workers:
                        if worker.process:
                            report(worker.process.status)
                yield self._jobs[0]
                self._release_first()
        finally:  # what wasn't done is forgotten, with the readers that work on it
            _stop([worker for worker in self._workers if worker.queue])
            for worker in self._workers:
                worker.queue.clear()
            while self._jobs:
                self._release_first()

    def _hand_out(self, unseen: Iterator[Request]) -> bool:
        """Give the workers as many jobs as they have slots for, the emptiest first; False without any job."""
        while (worker := min(self._workers, key=lambda worker: worker.num_taken)).num_taken < self.num_slots:
            request = next(unseen, None)
            if request is None:
                break
            self._jobs.append(_Job(next(self._ids), request, worker, time.monotonic()))
            worker.queue.append(self._jobs[-1])
            worker.num_taken += 1
        return bool(self._jobs)

    def _take_turn(self) -> None:
        """Send what can be sent, wait until something happens, and deal with it."""
        poll, until_s = select.poll(), time.monotonic() + _TURN_S
        for worker in self._workers:
            worker.feed()
            if worker.process:
                poll.register(worker.process, select.POLLIN)
                until_s = min(until_s, worker.deadline()[0])
            elif worker.queue:
                until_s = min(until_s, worker.restart_s)
        poll.poll(max(0.0, until_s - time.monotonic()) * 1000)
        for worker in self._workers:
            worker.receive()
        late = {worker.process: worker for worker in self._workers if worker.process and worker.is_late}
        if late:  # all at once
            stacks = _stacks_of(list(late))
            # Some may have got on while their stacks were asked for.
            errors = {w: w.late_error(stacks[process]) for process, w in late.items() if w.is_late}
            _stop(list(errors))
            for worker, error in errors.items():
                worker.blame(error)

    def _release_first(self) -> None:
        job = self._jobs.popleft()
        job.worker.num_taken -= 1
        if job.process is not None:
            job.process.free_slots.append(job.slot)


class _Worker:
    """One of a pool's readers: its jobs in order, and its process, which may be replaced."""

    def __init__(self, pool: ReaderPool) -> None:
        self.pool = pool
        self.process: ReaderProcess | None = None
        self.queue: deque[_Job] = deque()  # jobs that aren't settled
        self.num_taken = 0  # those, and jobs whose result the caller hasn't done with
        self.restart_s = 0.0

    def feed(self) -> None:
        """Start a process if there is work for one, and send it all that can be sent."""
        pool = self.pool
        if self.process is None and self.queue and time.monotonic() >= self.restart_s:
            self.process = pool.process_class(num_slots=pool.num_slots, slot_nbytes=pool.slot_nbytes)
        process = self.process
        if process is None:
            return
        for job in self.queue:
            if job.process is None:
                slot = process.free_slots[-1]
                if not process.send(job.request, request_id=job.id, slot=slot):
                    return
                job.process, job.slot = process, process.free_slots.pop()

    def receive(self) -> None:
        """Take the answers that are there."""
        process = self.process
        for answer in process.receive() if process else ():
            assert process is not None
            if answer is None or answer.is_transient:
                error = answer.error if answer else self._died_error(process) if self.queue else None
                _stop([self])  # with the process go the files that it has open
                if error:
                    self.blame(error)
                return
            job = self.queue[0]
            assert job.id == answer.request_id, f"answer {answer.request_id}, expected {job.id}"
            job.arrays = {placed.name: process.memory.view(job.slot, placed) for placed in answer.placed}
            job.value, job.error = answer.value, answer.error
            self._finish_next()

    @property
    def is_late(self) -> bool:
        """Tell whether the time of the process is up."""
        return self.deadline()[0] <= time.monotonic()

    def deadline(self) -> tuple[float, float]:
        """Tell when the time of the process is up, and how much it had; inf if it has nothing to do."""
        if not self.queue or self.process is None:
            return _NOTHING_TO_DO
        job, status, patience = self.queue[0], self.process.status, self.pool.patience
        if status.request_id > job.id:
            return _NOTHING_TO_DO  # it has answered, and that is about to be received
        if status.doing == "starting":
            most_s = patience.start_timeout_s
            if self.process.state() == _STOPPED:  # then it isn't the machine that is busy
                most_s = min(most_s, patience.open_timeout_s)
            return max(self.process.started_s, status.since_s) + most_s, most_s
        if status.request_id != job.id:
            begun_s = max(job.next_s, status.since_s)
        elif status.doing == "idle":  # it has done it, and the answer is on the way
            begun_s = status.since_s
        else:
            begun_s = status.progressed_s
        deadline = begun_s + patience.timeout_s, patience.timeout_s
        if status.doing == "opening":
            return min(deadline, (status.since_s + patience.open_timeout_s, patience.open_timeout_s))
        return deadline

    def blame(self, error: Exception) -> None:
        """Count a failure of the next job: it is tried again after a pause, or has failed for good."""
        job, patience = self.queue[0], self.pool.patience
        job.num_failed += 1
        if job.num_failed > patience.retries:
            job.error = error
            self._finish_next()
            return
        pause_s = patience.backoff_s * 2 ** (job.num_failed - 1)
        self.restart_s = time.monotonic() + pause_s
        self.pool.note(f"{error}; trying again in {pause_s:g} s")

    def _finish_next(self) -> None:
        self.queue.popleft().is_settled = True
        if self.queue:
            self.queue[0].next_s = time.monotonic()

    def late_error(self, stack: str) -> ReadTimeoutError:
        """Return the error for a process whose time is up; called while it is there."""
        assert self.process is not None
        process, status, state = self.process, self.process.status, self.process.state()
        doing_s = time.monotonic() - (status.since_s or process.started_s)
        frame = _FRAME.search(stack)
        where = f" in {frame['function']} ({frame['file']}:{frame['line']})" if frame else ""
        hint = _LATE_HINTS.get(status.doing, "check the disk or network mount, or raise reading.timeout_s")
        if state == _STOPPED:
            hint = "find out what stops processes (SIGSTOP, a debugger, a frozen container), and run it again"
        error = ReadTimeoutError(
            f"reader {process.pid} was late with {self._attempt()}",
            expected=f"at most {self.deadline()[1]:g} s",
            found=f"{status.activity} for {doing_s:.1f} s{where}, process {state}",
            hint=hint,
        )
        return self._with_facts(error, status, stack)

    def _died_error(self, process: ReaderProcess) -> SourceError:
        """Return the error for a process that ended by itself, or was killed by another."""
        end, status = process.how_it_ended(), process.status
        hint = "check the file and the HDF5 filters that it needs; -vv shows what the reader said"
        if "SIGKILL" in end:
            hint = "if the system ran out of memory, lower reading.num_workers"
        if "SIGBUS" in end:
            hint = "the file was cut, or its disk failed, while it was read: check both, and run it again"
        problem = f"reader {process.pid} was lost with {self._attempt()}"
        error = SourceError(problem, kind="reader_died", found=f"{end} while {status.activity}", hint=hint)
        return self._with_facts(error, status, process.log())

    def _attempt(self) -> str:
        job = self.queue[0]
        return f"{job.request.subject} (attempt {job.num_failed + 1} of {self.pool.patience.retries + 1})"

    def _with_facts(self, error: _Error, status: Activity, log: str) -> _Error:
        request = self.queue[0].request
        error.path, error.sample = str(request.path), request.first_sample
        error.dataset = status.dataset or None
        if log.strip():
            error.add_note(f"the reader's stderr:\n{log.rstrip()}")
        return error


class ReaderProcess:
    """One process, the memory that it shares, and the socket to it; a pool starts and ends it.

    A plain `Popen` rather than `multiprocessing`: that would import the caller's main module in the reader,
    and keep a process of its own. Nothing here waits for it without a limit: it may be stopped, or in an
    uninterruptible sleep in which even SIGKILL does nothing until a disk or server answers.
    """

    def __init__(self, *, num_slots: int, slot_nbytes: int) -> None:
        self.memory, memory_fd = SlotMemory.create(num_slots=num_slots, slot_nbytes=slot_nbytes)
        self.free_slots = list(range(num_slots))
        self.started_s = time.monotonic()
        self._log_fd = os.memfd_create("ups_store reader log")
        self._log_lock = threading.Lock()  # another thread may look at stacks while this one closes
        # Packets: one message each, so that a reader that is stopped halfway doesn't leave half a message.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        descriptors = [_beyond_streams(theirs.detach()), _beyond_streams(memory_fd)]
        try:
            self._process = self.start(*descriptors)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in descriptors:
                os.close(fd)

    def start(self, channel_fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
        """Start the process."""
        memory = self.memory
        arguments = (os.getpid(), channel_fd, memory_fd, memory.num_slots, memory.slot_nbytes)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *map(str, arguments)],
            env=_ENVIRONMENT | os.environ | {"PYTHONPATH": paths},
            pass_fds=(channel_fd, memory_fd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log_fd,
            process_group=0,  # Ctrl-C and Ctrl-Z go to the supervisor only
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def status(self) -> Activity:
        """Return what the reader does, by its own account."""
        return self.memory.read_status()

    @property
    def is_alive(self) -> bool:
        """Tell whether the process is there."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """Give the descriptor that is readable when there are answers, or when the reader has ended."""
        return self._socket.fileno()

    def send(self, request: Request, *, request_id: int, slot: int) -> bool:
        """Send a request; False if there are so many unread ones that it has to be sent later."""
        message = pickle.dumps((request_id, slot, pickle.dumps(request)))
        assert len(message) < MAX_MESSAGE_BYTES, f"{request.subject}: a request of {len(message)} bytes"
        try:
            self._socket.send(message)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True  # the reader has ended, as `receive` will say
        return True

    def receive(self) -> Iterator[Answer | None]:
        """Give the answers that are there; None, as the last one, if the reader has ended."""
        while True:
            try:
                flags = socket.MSG_CMSG_CLOEXEC
                message, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1, flags)
            except BlockingIOError:
                return
            except ConnectionResetError:  # said once, before its last answers, if it left a request unread
                continue
            if fds:  # of memory with an answer that is longer than a message
                with (
                    open(fds[0], "rb") as file,
                    mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory,
                ):
                    answer = pickle.loads(memory)
                yield answer
                continue
            yield pickle.loads(message) if message else None
            if not message:
                return

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    def how_it_ended(self) -> str:
        """Name the signal or exit status: "killed by SIGKILL"; waits a moment, as the socket closes first."""
        try:
            status = self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if status >= 0:
            return f"ended with exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal
            return f"killed by signal {-status}"

    def state(self) -> str:
        """Tell what the system says about the process, such as "stopped"."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return _STATES["Z"]
        letter = stat.rpartition(")")[2].split()[0]  # the name in brackets may hold anything
        return _STATES.get(letter.upper(), letter)

    def log_size(self) -> int:
        """Count the bytes of all that the reader wrote to stderr; 0 once closed."""
        with self._log_lock:
            return os.fstat(self._log_fd).st_size if self._log_fd >= 0 else 0

    def log(self, start: int = 0) -> str:
        """Give what the reader wrote to stderr from a byte on, its end if that is long: stacks, errors."""
        start = max(start, self.log_size() - _LOG_BYTES)
        with self._log_lock:
            log = os.pread(self._log_fd, _LOG_BYTES, start) if self._log_fd >= 0 else b""
        return log.decode("utf-8", "replace")

    def close(self) -> None:
        """Close descriptors; arrays in the memory stay valid."""
        self._socket.close()
        with self._log_lock:
            if self._log_fd >= 0:
                os.close(self._log_fd)
            self._log_fd = -1


ReaderPool.process_class = ReaderProcess
_left_behind: list[ReaderProcess] = []  # to be reaped once they end


def _beyond_streams(fd: int) -> int:
    """Move a descriptor if it has the number of a standard stream, which the reader's own would take.

    That happens where this process was started with closed streams.
    """
    if fd > 2:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def _stacks_of(processes: Sequence[ReaderProcess]) -> dict[ReaderProcess, str]:
    """Give the Python stacks of readers, innermost frame first; "" for one that doesn't answer within 1 s."""
    awake = (_STATES["R"], _STATES["S"])
    # Before the handler is there the signal would kill.
    able = [p for p in processes if p.status.doing != "starting" and p.state() in awake]
    starts = {process: process.log_size() for process in able}
    for process in able:
        process.signal(STACK_SIGNAL)
    deadline_s = time.monotonic() + _STACK_S
    while any(process.log_size() == starts[process] for process in able) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    time.sleep(_LOOK_S)  # for one that is halfway through
    return {process: process.log(starts[process]) if process in starts else "" for process in processes}


def _stop(workers: Sequence[_Worker]) -> None:
    """End the processes of workers, all at once, within 1.5 s; their jobs stay, for the next process."""
    processes = {worker.process: worker for worker in workers if worker.process}
    alive = list(processes)
    for number, wait_s in ((signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _KILL_S)):
        for process in alive:
            process.signal(number)
        deadline_s = time.monotonic() + wait_s
        alive = [process for process in alive if process.is_alive]
        while alive and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
            alive = [process for process in alive if process.is_alive]
    for process, worker in processes.items():
        process.close()
        worker.process = None
        for job in worker.queue:
            job.process = None
    _left_behind[:] = [process for process in {*_left_behind, *alive} if process.is_alive]
    for process in alive:  # last, as it may raise
        state = process.state()
        processes[process].pool.note(f"reader {process.pid} can't be killed, process {state}: left behind")
