"""A reader process as its supervisor sees it: start, requests and answers, status, stack, end.

Nothing here waits for a reader without a limit: one may be stopped, or in an uninterruptible sleep in which
even SIGKILL does nothing until a disk or server answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ups_store.errors import StoreError
from ups_store.sources.requests import MAX_MESSAGE_BYTES, STACK_SIGNAL, Done, Failed
from ups_store.sources.slots import Activity, SlotMemory
from ups_store.sources.source_files import USUAL_SLOT_NBYTES, USUAL_SLOTS

if TYPE_CHECKING:
    from ups_store.sources.reader import Request

TERMINATE_S = 0.5  # from SIGTERM to SIGKILL
KILL_S = 1.0  # from SIGKILL until a process is given up
_STACK_S = 1.0  # for writing a stack, which takes milliseconds unless the machine is busy
_LOOK_S = 0.01
_STDERR = 2
_LOG_BYTES = 16 << 10  # of the end of what a reader wrote to stderr
# No thread per core for linear algebra. And batches are read into memory that was used before: fresh pages
# take nearly as long as a contiguous read itself (32 MiB is the most that glibc takes).
_READER_DEFAULTS = {
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
_left_behind: list[ReaderHandle] = []  # to be reaped once they end
_spare: list[ReaderHandle] = []
_PROGRAM = "from ups_store.sources.reader_process import main; main()"
STOPPED = "stopped"
_STATES = {
    "D": "in uninterruptible sleep (disk or network mount)",
    "R": "running",
    "S": "sleeping",
    "T": STOPPED,
    "Z": "ended",
}


class ReaderHandle:
    """One reader process, its memory, and the socket to it; `stop_readers` ends it.

    A plain `Popen` rather than `multiprocessing`: that would import the caller's main module in the reader,
    and keep a process of its own.
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
        given = [_beyond_streams(theirs.detach()), _beyond_streams(memory_fd)]
        try:
            self._process = self._start(*given)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in given:
                os.close(fd)

    def _start(self, channel_fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
        memory = self.memory
        arguments = (os.getpid(), channel_fd, memory_fd, memory.num_slots, memory.slot_nbytes)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *map(str, arguments)],
            env=_environment(),
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
        """What the reader does, by its own account."""
        return self.memory.read_status()

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def fileno(self) -> int:
        """Descriptor that becomes readable when there are answers, or when the reader has ended."""
        return self._socket.fileno()

    def send(self, request: Request, *, request_id: int, slot: int) -> bool:
        """Send a request; False if there are so many unread ones that it has to be sent later."""
        message = pickle.dumps((request_id, slot, request))
        assert len(message) < MAX_MESSAGE_BYTES, f"{request.subject}: a request of {len(message)} bytes"
        try:
            self._socket.send(message)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True  # the reader has ended, as `receive` will say
        return True

    def receive(self) -> Iterable[Done | Failed | None]:
        """The answers that are there; None, as the last one, if the reader has ended."""
        while True:
            try:
                message = self._socket.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:  # said once, before its last answers, if it left a request unread
                continue
            yield pickle.loads(message) if message else None
            if not message:
                return

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        self._process.send_signal(number)

    def how_it_ended(self) -> str:
        """Signal or exit status, such as "killed by SIGKILL"; waits a moment, as the socket closes first."""
        try:
            status = self._process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if status >= 0:
            return f"ended with exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal
            return f"killed by signal {-status}"

    def process_state(self) -> str:
        """What the system says about the process, such as "stopped"."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return _STATES["Z"]
        letter = stat.rpartition(")")[2].split()[0]  # the name in brackets may hold anything
        return _STATES.get(letter.upper(), letter)

    def log_size(self) -> int:
        """Bytes of all that the reader wrote to stderr; 0 once closed."""
        with self._log_lock:
            return os.fstat(self._log_fd).st_size if self._log_fd >= 0 else 0

    def log(self, start: int = 0) -> str:
        """What the reader wrote to stderr from a byte on, its end if that is long: stacks, last words."""
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


def _beyond_streams(fd: int) -> int:
    """The descriptor, moved if it has the number of a standard stream, which the reader's own would take.

    That happens where this process was started with closed streams.
    """
    if fd > _STDERR:
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
    os.close(fd)
    return moved


def start_spare() -> None:
    """Start a reader with the usual slots that no pool has asked for yet; it ends with this process."""
    with contextlib.suppress(StoreError, OSError):  # a pool that needs one says why
        _spare.append(ReaderHandle(num_slots=USUAL_SLOTS, slot_nbytes=USUAL_SLOT_NBYTES))


def new_reader(*, num_slots: int, slot_nbytes: int) -> ReaderHandle:
    """Start a reader, or take the spare one if it has such slots.

    Raises:
        StoreError: Kind "no_memory", if there is none for the slots.
    """
    if _spare and (num_slots, slot_nbytes) == (USUAL_SLOTS, USUAL_SLOT_NBYTES):
        return _spare.pop()
    return ReaderHandle(num_slots=num_slots, slot_nbytes=slot_nbytes)


def _environment() -> dict[str, str]:
    """Ours, with all places that modules come from here."""
    places = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return _READER_DEFAULTS | os.environ | {"PYTHONPATH": places}


def stacks_of(readers: Sequence[ReaderHandle]) -> list[str]:
    """The Python stacks of readers, innermost frame first; "" for one that doesn't answer within 1 s."""
    able = [reader for reader in readers if _can_tell(reader)]
    starts = {reader: reader.log_size() for reader in able}
    for reader in able:
        reader.signal(STACK_SIGNAL)
    deadline_s = time.monotonic() + _STACK_S
    while any(r.log_size() == starts[r] for r in able) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    time.sleep(_LOOK_S)  # for one that is halfway through
    stacks = {reader: reader.log(start) for reader, start in starts.items()}
    return [stacks.get(reader, "") for reader in readers]


def _can_tell(reader: ReaderHandle) -> bool:
    # Before the handler is there the signal would kill.
    return reader.status.doing != "starting" and reader.process_state() in (_STATES["R"], _STATES["S"])


def stop_readers(readers: Sequence[ReaderHandle]) -> list[ReaderHandle]:
    """End processes and close what belongs to them, within 1.5 s.

    Returns:
        Those that even SIGKILL didn't end by then, which are left behind.
    """
    alive = list(readers)
    for number, wait_s in ((signal.SIGTERM, TERMINATE_S), (signal.SIGKILL, KILL_S)):
        for reader in alive:
            reader.signal(number)
        alive = _alive_after(wait_s, alive)
    for reader in readers:
        reader.close()
    _left_behind[:] = [reader for reader in {*_left_behind, *alive} if reader.is_alive]
    return alive


def _alive_after(wait_s: float, readers: Sequence[ReaderHandle]) -> list[ReaderHandle]:
    deadline_s = time.monotonic() + wait_s
    alive = [reader for reader in readers if reader.is_alive]
    while alive and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
        alive = [reader for reader in alive if reader.is_alive]
    return alive
