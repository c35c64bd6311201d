"""A reader: what runs in a process of its own, and the memory that it shares with the one that asks.

It takes requests one after the other, puts arrays into shared slots, and writes there what it does and since
when. It imports what reading needs and nothing else, so it is there within 0.3 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import math
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ups_store.errors import MissingExtraError, SourceError, StoreError
from ups_store.format.metadata import dtype_name, dtype_of
from ups_store.sources.file_state import FileState, changed, file_state, outer_state
from ups_store.system import files

if TYPE_CHECKING:
    from ups_store.sources.contents import Selection
    from ups_store.sources.source import Source
    from ups_store.sources.tasks import Task

MAX_MESSAGE_BYTES = 200_000  # what a Unix socket takes at once by default
_PICKLED_BYTES = 50_000  # of a message, at most what arrays take beside their bytes
ALIGN = 64  # an array starts on a cache line
STACK_SIGNAL = signal.SIGUSR1  # makes a reader write its stacks to stderr, also from inside a C call
_MAX_OPEN = 8  # files that are kept open
_TRANSIENT = (errno.EIO, errno.ESTALE)  # a disk or a server that may be back in a moment
_PR_SET_PDEATHSIG = 1


class Request(Protocol):
    """Something that a reader does; sent to it by pickle.

    Attributes:
        path: The file, or another source, for messages.
        subject: What of it is concerned, likewise, such as "samples 4..7".
        first_sample: First sample concerned, likewise, numbered as in the file.
    """

    @property
    def path(self) -> Path | str: ...  # noqa: D102
    @property
    def subject(self) -> str: ...  # noqa: D102
    @property
    def first_sample(self) -> int | None: ...  # noqa: D102

    def run(self, reader: Reader) -> object:
        """Do it; arrays go where `reader.place` says, anything else is returned and pickled."""
        ...


@dataclass(frozen=True, eq=False)
class Call:
    """The request to call `function(reader, *arguments)`, of a module's top level.

    To import it counts as a start of the reader, not as the call's time.
    """

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    path: Path | str
    subject: str
    first_sample: ClassVar[None] = None

    def run(self, reader: Reader) -> object:
        """Call it."""
        return self.function(reader, *self.arguments)


@dataclass(frozen=True)
class Activity:
    """What a reader does; written by the reader alone, and there even if it is stopped.

    Attributes:
        request_id: The request that it works on, or did last; -1 before the first.
        progressed_s: When it began the request, or last said that it got on with it, by `time.monotonic`,
            which is one clock for all processes of a machine.
        since_s: Since when it does what it does, likewise.
        doing: "starting", "idle", "beginning", "opening", "reading", "checking", "digesting", or what else a
            request says. HDF5 reads and decodes in one call, so "reading" is both.
        num_done: How much of the request it has done, in a unit of the request's.
        dataset: HDF5 path of what it reads; "" where no dataset is concerned.
    """

    request_id: int
    progressed_s: float
    since_s: float
    doing: str
    num_done: int = 0
    dataset: str = ""

    @property
    def activity(self) -> str:
        """What is done, and with what, such as "reading dataset 'tensor'"."""
        return f"{self.doing} dataset {self.dataset!r}" if self.dataset else self.doing


_STATUS = struct.Struct("<q2d24s160sq")  # id of the request, progressed_s, since_s, doing, dataset, num_done


class Placed(NamedTuple):
    """An array in a slot: its dtype by name, and where it starts, in bytes from the start of the slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SlotMemory:
    """Memory that a process shares with its supervisor: a status record, then slots that arrays go into.

    It is a memfd, not a file: it has no name, so nothing of it stays behind however the two processes end,
    and the size of /dev/shm doesn't limit it. Its pages are allocated at the start, so that lack of memory is
    an error then and not a SIGBUS later. Arrays that view it keep it mapped, whoever closes its descriptor.
    """

    def __init__(self, fd: int, *, num_slots: int, slot_nbytes: int) -> None:
        self.num_slots = num_slots
        self.slot_nbytes = slot_nbytes
        self._map = mmap.mmap(fd, mmap.PAGESIZE + num_slots * slot_nbytes)

    @classmethod
    def create(cls, *, num_slots: int, slot_nbytes: int) -> tuple[SlotMemory, int]:
        """New memory and its descriptor, which the caller closes; slots get at least `slot_nbytes` bytes."""
        slot_nbytes = _round_up(max(1, slot_nbytes), mmap.PAGESIZE)
        fd = os.memfd_create("ups_store slots")
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE + num_slots * slot_nbytes)
            memory = cls(fd, num_slots=num_slots, slot_nbytes=slot_nbytes)
        except (OSError, MemoryError) as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # `mmap` keeps a descriptor of its own
            raise StoreError(
                f"no memory for {num_slots} slots of {slot_nbytes} bytes ({error})",
                kind="no_memory",
                hint="lower reading.num_workers",
            ) from error
        memory.write_status(Activity(-1, 0.0, 0.0, "starting"))
        return memory, fd

    def read_status(self) -> Activity:
        """The status as it is now."""
        record = self._map[: _STATUS.size]
        # The reader may be writing it: two equal looks are one whole record.
        while (again := self._map[: _STATUS.size]) != record:
            record = again
        request_id, progressed_s, since_s, doing, dataset, num_done = _STATUS.unpack(record)
        doing, dataset = (text.rstrip(b"\0").decode("utf-8", "replace") for text in (doing, dataset))
        return Activity(request_id, progressed_s, since_s, doing, num_done, dataset)

    def write_status(self, status: Activity) -> None:
        """Change the status; `doing` is cut to 24 bytes, `dataset` to its last 160."""
        self._map[: _STATUS.size] = _STATUS.pack(
            status.request_id,
            status.progressed_s,
            status.since_s,
            status.doing.encode()[:24],
            status.dataset.encode()[-160:],
            status.num_done,
        )

    def view(self, slot: int, placed: Placed) -> npt.NDArray[Any]:
        """An array in a slot; a view that is valid until the slot is used again."""
        start = mmap.PAGESIZE + slot * self.slot_nbytes + placed.offset
        return np.ndarray(placed.shape, dtype_of(placed.dtype), buffer=self._map, offset=start)


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class Answer(NamedTuple):
    """What came of a request: its value and the arrays that it placed, or its error."""

    request_id: int
    placed: tuple[Placed, ...] = ()
    value: object = None
    error: StoreError | None = None
    is_transient: bool = False  # another attempt may succeed


_SourceKey = tuple[Path, str | None, "Selection", Path | None]


class Reader:
    """Where requests run: keeps files open, provides room for arrays, and says what is being done."""

    def __init__(self, report: Callable[[Activity], None] = lambda status: None) -> None:
        self.status = Activity(-1, 0.0, 0.0, "starting")
        self._report = report
        self._sources: OrderedDict[_SourceKey, tuple[Source, FileState]] = OrderedDict()
        self._place: Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]

    def answer(self, request_id: int, load: Callable[[], Request], memory: SlotMemory, slot: int) -> Answer:
        """Run a request whose arrays go into a slot; whatever it raises is in the answer."""
        placed: list[Placed] = []

        def place(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            start = _round_up(_end_of(placed[-1]), ALIGN) if placed else 0
            placed.append(Placed(name, dtype_name(dtype), shape, start))
            end = _end_of(placed[-1])
            assert end <= memory.slot_nbytes, f"{end} bytes, slot of {memory.slot_nbytes}"
            return memory.view(slot, placed[-1])

        now = time.monotonic()
        self._tell(Activity(request_id, now, now, "starting"))  # until all of it is imported
        request: Request | None = None
        try:
            request = load()
            value = self.run(request, request_id=request_id, place=place)
            return Answer(request_id, tuple(placed), value)
        except StoreError as error:
            return Answer(request_id, error=error, is_transient=is_transient(error))
        except MemoryError:
            return Answer(request_id, error=_out_of_memory(request))
        except Exception as error:  # a defect of ours: reported by the process that asked
            wrapped = _unexpected(request, error)
            return Answer(request_id, error=wrapped, is_transient=is_transient(error))
        finally:
            self.doing("idle")

    def run(
        self,
        request: Request,
        *,
        request_id: int,
        place: Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]],
    ) -> object:
        """Run a request whose arrays go where `place` says."""
        self._place = place
        now = time.monotonic()
        self._tell(Activity(request_id, now, now, "beginning"))
        return request.run(self)

    def doing(self, what: str) -> None:
        """Say what is being done from now on, such as "reading"."""
        self._tell(replace(self.status, since_s=time.monotonic(), doing=what, dataset=""))

    def reading(self, dataset: str) -> None:
        """Say that a dataset is read from now on, or still is and gets on: the deadline starts again."""
        now = time.monotonic()
        self._tell(replace(self.status, progressed_s=now, since_s=now, doing="reading", dataset=dataset))

    def progressed(self, num: int = 0) -> None:
        """Say that a long request gets on, by `num` of its own units: its deadline starts again."""
        status = self.status
        self._tell(replace(status, progressed_s=time.monotonic(), num_done=status.num_done + num))

    def place(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Give room for an array of the result, to be filled by the request."""
        return self._place(name, shape, dtype)

    @contextmanager
    def opened(
        self,
        path: Path,
        *,
        task: Task | None,
        selection: Selection,
        follow: Path | None = None,
        state: FileState | None = None,
    ) -> Iterator[Source]:
        """A source, which is opened unless it still is, for the duration of a block."""
        # HDF5 reads zeros where an open file was cut off, and a reader may be younger than a change.
        source, opened_state = self._source((path, task.name if task else None, selection, follow), task)
        if state not in (None, opened_state + outer_state(source.info.outer)):
            self.close()
            raise changed(path)

        def check_unchanged() -> None:
            where = path if file_state(path) != opened_state else source.changed_file()
            if where is not None:
                self.close()
                raise changed(where) from None

        try:
            yield source
        except BaseException:
            check_unchanged()
            self.close()
            raise
        check_unchanged()

    def _source(self, key: _SourceKey, task: Task | None) -> tuple[Source, FileState]:
        if key not in self._sources:
            from ups_store.sources.source import open_source  # HDF5, which other requests don't need

            self.doing("opening")
            path, _, selection, follow = key
            state = file_state(path)
            note = self.reading  # there may be thousands of files
            source = open_source(
                path, task=task, selection=selection, follow=follow, is_mapped=True, note=note
            )
            self._sources[key] = source, state
            if len(self._sources) > _MAX_OPEN:
                self._sources.popitem(last=False)[1][0].close()
        self._sources.move_to_end(key)
        return self._sources[key]

    def close(self) -> None:
        """Close all files."""
        for source, _ in self._sources.values():
            source.close()
        self._sources.clear()

    def _tell(self, status: Activity) -> None:
        self.status = status
        self._report(status)


def _end_of(placed: Placed) -> int:
    return placed.offset + math.prod(placed.shape) * dtype_of(placed.dtype).itemsize


def is_transient(error: BaseException | None) -> bool:
    """Whether an error goes back to one of the system that may not come again."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        error = error.__cause__ or error.__context__
    return False


def _out_of_memory(request: Request | None) -> SourceError:
    return SourceError(
        f"out of memory while reading {request.subject if request else 'a request'}",
        kind="no_memory",
        path=request.path if request else None,
        sample=request.first_sample if request else None,
        hint="lower reading.num_workers, or raise the limit on memory",
    )


def _unexpected(request: Request | None, error: Exception) -> StoreError:
    subject = request.subject if request else "a request"
    wrapped = StoreError(
        f"unexpected {type(error).__name__} while reading {subject}: {error}",
        kind="reader_failed",
        path=request.path if request else None,
        sample=request.first_sample if request else None,
        hint="run it with -vv and report what it prints",
    )
    wrapped.add_note("".join(traceback.format_exception(error)))
    return wrapped


def serve(channel: socket.socket, memory: SlotMemory) -> None:
    """Run requests until the supervisor closes its end."""
    reader = Reader(memory.write_status)
    reader.doing("idle")
    while message := channel.recv(MAX_MESSAGE_BYTES):
        request_id, slot, pickled = pickle.loads(message)
        send_answer(channel, reader.answer(request_id, partial(pickle.loads, pickled), memory, slot))
    reader.close()


def send_answer(channel: socket.socket, answer: Answer) -> None:
    """Send an answer; one that is longer than a message in memory of its own, not copied before."""
    arrays: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(answer, protocol=5, buffer_callback=arrays.append)
    if len(pickled) + sum(array.raw().nbytes for array in arrays) < MAX_MESSAGE_BYTES - _PICKLED_BYTES:
        channel.send(pickle.dumps(answer, protocol=5))
        return
    with open(files.create_anonymous("ups_store answer"), "w+b") as file:
        pickle.dump(answer, file, protocol=5)
        file.flush()
        socket.send_fds(channel, [b"\0"], [file.fileno()])


def main() -> None:
    """Serve; arguments: process id of the supervisor, descriptors of socket and memory, slots, their size.

    The process ends when the supervisor closes the socket between them, and is killed when it ends.
    """
    supervisor, channel_fd, memory_fd, num_slots, slot_nbytes = map(int, sys.argv[1:])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a hung read wouldn't notice
    if os.getppid() != supervisor:  # it ended before that call
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's business
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its log says what ended it, not by a file "core"
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # virtual datasets have thousands
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)

    with contextlib.suppress(MissingExtraError):  # while it starts, which has a deadline of its own
        import ups_store.sources.source  # noqa: F401
    memory = SlotMemory(memory_fd, num_slots=num_slots, slot_nbytes=slot_nbytes)
    os.close(memory_fd)
    with socket.socket(fileno=channel_fd) as channel:
        serve(channel, memory)
