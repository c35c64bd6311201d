"""A reader: what runs in a process of its own, what it is asked for, and the memory that both sides share.

It takes requests one after the other, puts arrays into shared slots, and writes there what it does and since
when. It imports what reading needs and nothing else, so it is there within 0.3 s; HDF5 only where it is read,
since a supervisor imports this, too.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ups_store.errors import MissingExtraError, SourceError, StoreError
from ups_store.format.metadata import dtype_name, dtype_of
from ups_store.sources.contents import (
    EVERYTHING,
    FileState,
    Selection,
    SourceInfo,
    changed,
    file_state,
    outer_state,
)
from ups_store.sources.tasks import Task
from ups_store.sources.values import ValueRange, holding, largest_finite
from ups_store.system import files

if TYPE_CHECKING:
    from ups_store.sources.source import Source
    from ups_store.sources.stores import StoreSource

MAX_MESSAGE_BYTES = 200_000  # what a Unix socket takes at once by default
_PICKLED_BYTES = 50_000  # of a message, at most what arrays take beside their bytes
MAX_SAMPLES = 8192  # of one request: two numbers each, in a message of at most `MAX_MESSAGE_BYTES`
ALIGN = 64  # an array starts on a cache line
STACK_SIGNAL = signal.SIGUSR1  # makes a reader write its stacks to stderr, also from inside a C call
_MAX_OPEN = 8  # files that are kept open
_TRANSIENT = (errno.EIO, errno.ESTALE)  # a disk or a server that may be back in a moment
_PR_SET_PDEATHSIG = 1

DigestKind = Literal["full", "sampled"]
Place = Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]  # gives room for an array by name


class Request(Protocol):
    """Something that a reader does; sent to it by pickle. All but `run` is for messages.

    `path` is the file, or another source, `subject` what of it is concerned, such as "samples 4..7", and
    `first_sample` is numbered as in the file.
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


def describe_request(
    path: Path, task: Task | None = None, selection: Selection = EVERYTHING, follow: Path | None = None
) -> Call:
    """Ask what a file holds, see `open_source`; it stays open for the samples that will be asked for."""
    return Call(_describe_source, (path, task, selection, follow), path, "the structure")


def _describe_source(
    reader: Reader, path: Path, task: Task | None, selection: Selection, follow: Path | None
) -> SourceInfo:
    with reader.opened(path, task=task, selection=selection, follow=follow) as source:
        return source.info


def digest_request(path: Path, kind: DigestKind, size: int) -> Call:
    """Ask for the digest of a file of so many bytes, blake3 in hexadecimal digits, see `digest`."""
    return Call(_take_digest, (path, kind, size), path, "the digest")


def _take_digest(reader: Reader, path: Path, kind: DigestKind, size: int) -> str:
    from ups_store.sources import digest  # HDF5

    reader.doing("digesting")
    if kind == "full":
        return digest.full_digest(path, reader.progressed)
    return digest.sampled_digest(path, size, reader.progressed)


@dataclass(frozen=True, eq=False)
class ReadRequest:
    """Read samples of one file in the dtypes of a store."""

    path: Path
    task: Task | None  # what the file is meant to be
    selection: Selection
    samples: npt.NDArray[np.int64]  # what the caller calls them, shape (B,), at most `MAX_SAMPLES`
    indices: npt.NDArray[np.int64]  # their numbers in the file, shape (B,)
    dtypes: Mapping[str, str]  # name of the dtype that each array is cast to
    check_finite: bool = False  # whether NaN and Inf are an error
    with_ranges: bool = True  # whether to find the range of values of each array, as `check_finite` does, too
    follow: Path | None = None  # folder below which other files may lie; None: there may be none
    state: FileState | None = None  # of the file, and those, as it has to be; by default as it is when opened

    def __post_init__(self) -> None:
        assert 0 < len(self.indices) == len(self.samples) <= MAX_SAMPLES, len(self.indices)

    @property
    def subject(self) -> str:
        """The samples, by their numbers in the file."""
        first, last = self.indices[0], self.indices[-1]
        return f"sample {first}" if len(self.indices) == 1 else f"samples {first}..{last}"

    @property
    def first_sample(self) -> int:
        """First sample, numbered as in the file."""
        return int(self.indices[0])

    def run(self, reader: Reader) -> dict[str, ValueRange]:
        """Read, cast and check."""
        with reader.opened(
            self.path, task=self.task, selection=self.selection, follow=self.follow, state=self.state
        ) as source:
            arrays = {
                name: reader.place(name, (len(self.indices), *array.shape), dtype_of(self.dtypes[name]))
                for name, array in source.info.arrays.items()
            }
            losses = source.read_into(arrays, self.indices.tolist(), note=reader.reading)
            if not (self.with_ranges or self.check_finite):
                return {}
            reader.doing("checking")
            ranges = {}
            for name, values in arrays.items():
                num_zero, num_inf = losses[name].num_zero, losses[name].num_inf
                counts = {"num_underflow": num_zero, "num_overflow": num_inf}
                ranges[name] = replace(ValueRange.of(values), num_flat=losses[name].num_flat, **counts)
            for name, values in arrays.items() if self.check_finite else ():
                if not ranges[name].is_finite:
                    raise self._not_finite(name, values, source)
        return ranges

    def _not_finite(self, name: str, cast: npt.NDArray[Any], source: Source | StoreSource) -> SourceError:
        """Return the error about the first sample of the batch that isn't finite."""
        bad = ~np.isfinite(cast).reshape(len(cast), -1)
        row = int(np.flatnonzero(bad.any(axis=1))[0])
        sample = int(self.indices[row])
        stored = ValueRange.of(source.read([sample])[name])
        counts, others = f"{int(bad[row].sum())} of {bad.shape[1]} values", ""
        if len(bad) > 1:
            num_bad = int(bad.any(axis=1).sum())
            others = f", the first of {num_bad} such samples among the {len(bad)} read together"
        others += ", numbered as in the file" if others else ", sample numbered as in the file"
        problem, facts = f"{counts} are not finite{others}", dict[str, Any]()
        hint = "mend the source, or data.on_nan=keep"
        if stored.is_finite:
            problem = f"the cast to {cast.dtype} made {counts} infinite{others}"
            facts["expected"] = f"values within {largest_finite(cast.dtype):.6g}"
            facts["found"] = f"{stored.minimum:.6g} to {stored.maximum:.6g}"
            hint = f"cache.dtype={holding(stored.minimum, stored.maximum)} holds them"
        elif source.info.decoded:
            hint = f"{' and '.join(source.info.decoded)} may say that there is none: {hint}"
        where: dict[str, Any] = {"path": self.path, "array": name, "sample": sample}
        return SourceError(problem, kind="not_finite", hint=hint, **where, **facts)


@dataclass(frozen=True)
class Activity:
    """What a reader does; written by the reader alone, and there even if it is stopped.

    Times are by `time.monotonic`, which is one clock for all processes of a machine. HDF5 reads and decodes
    in one call, so "reading" is both.
    """

    request_id: int  # the request that it works on, or did last; -1 before the first
    progressed_s: float  # when it began the request, or last said that it got on with it
    since_s: float  # since when it does what it does
    doing: str  # "starting", "idle", "beginning", "opening", "reading", "checking", or what a request says
    num_done: int = 0  # how much of the request, in a unit of the request's
    dataset: str = ""  # HDF5 path of what it reads; "" where no dataset is concerned

    @property
    def activity(self) -> str:
        """Say what is done, and with what, such as "reading dataset 'tensor'"."""
        return f"{self.doing} dataset {self.dataset!r}" if self.dataset else self.doing


_STATUS = struct.Struct("<q2d24s160sq")  # id of the request, progressed_s, since_s, doing, dataset, num_done


class Placed(NamedTuple):
    """An array in a slot: its dtype by name, and where it starts, in bytes from the start of the slot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """Return where it ends, likewise."""
        return self.offset + math.prod(self.shape) * dtype_of(self.dtype).itemsize


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
        """Create memory and its descriptor, which the caller closes; slots get at least `slot_nbytes`."""
        slot_nbytes = _round_up(max(1, slot_nbytes), mmap.PAGESIZE)
        fd = os.memfd_create("ups_store slots")
        try:
            os.posix_fallocate(fd, 0, mmap.PAGESIZE + num_slots * slot_nbytes)
            memory = cls(fd, num_slots=num_slots, slot_nbytes=slot_nbytes)
        except (OSError, MemoryError) as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # `mmap` keeps a descriptor of its own
            problem = f"no memory for {num_slots} slots of {slot_nbytes} bytes ({error})"
            raise StoreError(problem, kind="no_memory", hint="lower reading.num_workers") from error
        memory.write_status(Activity(-1, 0.0, 0.0, "starting"))
        return memory, fd

    def read_status(self) -> Activity:
        """Read the status as it is now."""
        record = self._map[: _STATUS.size]
        # The reader may be writing it: two equal looks are one whole record.
        while (again := self._map[: _STATUS.size]) != record:
            record = again
        request_id, progressed_s, since_s, doing, dataset, num_done = _STATUS.unpack(record)
        doing, dataset = (text.rstrip(b"\0").decode("utf-8", "replace") for text in (doing, dataset))
        return Activity(request_id, progressed_s, since_s, doing, num_done, dataset)

    def write_status(self, status: Activity) -> None:
        """Change the status; `doing` is cut to 24 bytes, `dataset` to its last 160."""
        texts = status.doing.encode()[:24], status.dataset.encode()[-160:]
        record = (status.request_id, status.progressed_s, status.since_s, *texts, status.num_done)
        self._map[: _STATUS.size] = _STATUS.pack(*record)

    def view(self, slot: int, placed: Placed) -> npt.NDArray[Any]:
        """View an array in a slot; valid until the slot is used again."""
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


class Reader:
    """Where requests run: keeps files open, provides room for arrays, and says what is being done."""

    def __init__(self, report: Callable[[Activity], None] = lambda status: None) -> None:
        self.status = Activity(-1, 0.0, 0.0, "starting")
        self._report = report
        self._sources: OrderedDict[Any, tuple[Source | StoreSource, FileState]] = OrderedDict()
        self._place: Place

    def answer(self, request_id: int, load: Callable[[], Request], memory: SlotMemory, slot: int) -> Answer:
        """Run a request whose arrays go into a slot; whatever it raises is in the answer."""
        arrays: list[Placed] = []

        def place(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            start = _round_up(arrays[-1].end, ALIGN) if arrays else 0
            arrays.append(Placed(name, dtype_name(dtype), shape, start))
            end = arrays[-1].end
            assert end <= memory.slot_nbytes, f"{end} bytes, slot of {memory.slot_nbytes}"
            return memory.view(slot, arrays[-1])

        now = time.monotonic()
        self._tell(Activity(request_id, now, now, "starting"))  # until all of it is imported
        request: Request | None = None
        try:
            request = load()
            value = self.run(request, request_id=request_id, place=place)
            return Answer(request_id, tuple(arrays), value)
        except Exception as error:
            return Answer(request_id, error=_as_store_error(error, request), is_transient=is_transient(error))
        finally:
            self.doing("idle")

    def run(self, request: Request, *, request_id: int, place: Place) -> object:
        """Run a request whose arrays go where `place` says."""
        self._place = place
        now = time.monotonic()
        self._tell(Activity(request_id, now, now, "beginning"))
        return request.run(self)

    def doing(self, doing: str) -> None:
        """Say what is being done from now on, such as "reading"."""
        self._tell(replace(self.status, since_s=time.monotonic(), doing=doing, dataset=""))

    def reading(self, dataset: str) -> None:
        """Say that a dataset is read from now on, or still is and gets on: the deadline starts again."""
        now = time.monotonic()
        self._tell(replace(self.status, progressed_s=now, since_s=now, doing="reading", dataset=dataset))

    def progressed(self, num: int = 0) -> None:
        """Say that a long request gets on, by `num` of its own units: its deadline starts again."""
        num_done = self.status.num_done + num
        self._tell(replace(self.status, progressed_s=time.monotonic(), num_done=num_done))

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
    ) -> Iterator[Source | StoreSource]:
        """Give a source, which is opened unless it still is, for the duration of a block."""
        key = (path, task.name if task else None, selection, follow)
        if key not in self._sources:
            from ups_store.sources.source import open_source  # HDF5, which other requests don't need

            self.doing("opening")
            state_now = file_state(path)
            note = self.reading  # there may be thousands of files
            options: dict[str, Any] = {"follow": follow, "is_mapped": True, "note": note}
            self._sources[key] = open_source(path, task=task, selection=selection, **options), state_now
            if len(self._sources) > _MAX_OPEN:
                self._sources.popitem(last=False)[1][0].close()
        self._sources.move_to_end(key)
        source, opened_state = self._sources[key]

        def changed_file() -> Path | None:
            # HDF5 reads zeros where an open file was cut off.
            return path if file_state(path) != opened_state else source.changed_file()

        # A reader may be younger than a change.
        if state not in (None, opened_state + outer_state(source.info.outer)):
            self.close()
            raise changed(path)
        try:
            yield source
        except BaseException:
            other = changed_file()
            self.close()
            if other is not None:
                raise changed(other) from None
            raise
        if (other := changed_file()) is not None:
            self.close()
            raise changed(other)

    def close(self) -> None:
        """Close all files."""
        for source, _ in self._sources.values():
            source.close()
        self._sources.clear()

    def _tell(self, status: Activity) -> None:
        self.status = status
        self._report(status)


def is_transient(error: BaseException | None) -> bool:
    """Tell whether an error goes back to one of the system that may not come again."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        error = error.__cause__ or error.__context__
    return False


def _as_store_error(error: Exception, request: Request | None) -> StoreError:
    """Return the error itself, or that of a defect of ours, which is reported by the process that asked."""
    if isinstance(error, StoreError):
        return error
    subject = request.subject if request else "a request"
    facts: dict[str, Any] = {}
    if request:
        facts = {"path": request.path, "sample": request.first_sample}
    if isinstance(error, MemoryError):
        hint = "lower reading.num_workers, or raise the limit on memory"
        return SourceError(f"out of memory while reading {subject}", kind="no_memory", hint=hint, **facts)
    problem = f"unexpected {type(error).__name__} while reading {subject}: {error}"
    hint = "run it with -vv and report what it prints"
    defect = StoreError(problem, kind="reader_failed", hint=hint, **facts)
    defect.add_note("".join(traceback.format_exception(error)))
    return defect


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
    """Run requests; arguments: process id of the supervisor, descriptors of socket and memory, slots.

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
    reader = Reader(memory.write_status)
    reader.doing("idle")
    with socket.socket(fileno=channel_fd) as channel:
        while message := channel.recv(MAX_MESSAGE_BYTES):
            request_id, slot, pickled = pickle.loads(message)
            send_answer(channel, reader.answer(request_id, partial(pickle.loads, pickled), memory, slot))
    reader.close()
