"""A reader process: takes requests from its supervisor, runs them, and puts the arrays into shared slots.

The process imports what reading needs and nothing else, so it is there within 0.3 s. It ends when the
supervisor closes the socket between them, and is killed when the supervisor ends.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ups_store.errors import SourceError, StoreError
from ups_store.sources.contents import Selection
from ups_store.sources.requests import MAX_MESSAGE_BYTES, STACK_SIGNAL, Done, Failed, Request
from ups_store.sources.slots import SlotFiller, SlotMemory, Status
from ups_store.sources.source import Source, open_source
from ups_store.sources.source_files import FileState, changed, file_state
from ups_store.sources.tasks import Task

_MAX_OPEN = 8  # files that are kept open
_TRANSIENT = (errno.EIO, errno.ESTALE)  # a disk or a server that may be back in a moment
_PR_SET_PDEATHSIG = 1

Place = Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]
_SourceKey = tuple[Path, str | None, Selection]


class Reader:
    """Where requests run: keeps files open, provides room for arrays, and says what is being done.

    Args:
        memory: Memory to report the status in.
        told: Called with the status, where there is no memory.

    Attributes:
        status: What is being done.
    """

    def __init__(
        self, memory: SlotMemory | None = None, *, told: Callable[[Status], None] = lambda status: None
    ) -> None:
        self.status = Status(-1, 0.0, 0.0, "starting")
        self._is_expendable = memory is not None  # a process of its own, with a supervisor
        self._told = memory.write_status if memory else told
        self._sources: OrderedDict[_SourceKey, tuple[Source, FileState]] = OrderedDict()
        self._place: Place

    def run(self, request: Request, *, request_id: int, place: Place) -> object:
        """Run a request whose arrays go where `place` says."""
        self._place = place
        now = time.monotonic()
        self._tell(Status(request_id, now, now, "beginning"))
        try:
            return request.run(self)
        finally:
            self.doing("idle")

    def doing(self, what: str) -> None:
        """Say what is being done from now on, such as "reading"."""
        self._tell(replace(self.status, since_s=time.monotonic(), doing=what, dataset=""))

    def reading(self, dataset: str) -> None:
        """Say that a dataset is read from now on, or still is and gets on: the deadline starts anew."""
        now = time.monotonic()
        self._tell(replace(self.status, progressed_s=now, since_s=now, doing="reading", dataset=dataset))

    def progressed(self, num: int = 0) -> None:
        """Say that a long request gets on, by `num` of its own units: its deadline starts anew."""
        status = self.status
        self._tell(replace(status, progressed_s=time.monotonic(), num_done=status.num_done + num))

    def place(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Room for an array of the result, to be filled by the request."""
        return self._place(name, shape, dtype)

    @contextmanager
    def opened(
        self, path: Path, *, task: Task | None, selection: Selection, state: FileState | None = None
    ) -> Iterator[Source]:
        """A source, which is opened unless it still is, for the duration of a block.

        Raises:
            SourceError: As `open_source`; kind "source_changed", if the path isn't the file that was opened,
                as it was then, or as `state` says: HDF5 reads zeros where an open file was cut off, and a
                reader may be younger than a change.
        """
        source, found = self._source((path, task.name if task else None, selection), task)
        if state not in (None, found):
            self.close()
            raise changed(path)
        try:
            yield source
        except BaseException:
            self.close()
            if file_state(path) != found:
                raise changed(path) from None
            raise
        if file_state(path) != found:
            self.close()
            raise changed(path)

    def _source(self, key: _SourceKey, task: Task | None) -> tuple[Source, FileState]:
        if key not in self._sources:
            self.doing("opening")
            state = file_state(key[0])
            source = open_source(key[0], task=task, selection=key[2], is_mapped=self._is_expendable)
            self._sources[key] = source, state
            if len(self._sources) > _MAX_OPEN:
                oldest, _ = self._sources.popitem(last=False)[1]
                oldest.close()
        self._sources.move_to_end(key)
        return self._sources[key]

    def close(self) -> None:
        """Close all files."""
        for source, _ in self._sources.values():
            source.close()
        self._sources.clear()

    def _tell(self, status: Status) -> None:
        self.status = status
        self._told(status)


def serve(channel: socket.socket, memory: SlotMemory) -> None:
    """Run requests until the supervisor closes its end."""
    reader = Reader(memory)
    reader.doing("idle")
    while message := channel.recv(MAX_MESSAGE_BYTES):
        request_id, slot, request = pickle.loads(message)
        answer = pickle.dumps(_answer(reader, request, request_id, SlotFiller(memory, slot)))
        assert len(answer) < MAX_MESSAGE_BYTES, f"{request.subject}: a result of {len(answer)} bytes"
        channel.send(answer)
    reader.close()


def _answer(reader: Reader, request: Request, request_id: int, filler: SlotFiller) -> Done | Failed:
    try:
        value = reader.run(request, request_id=request_id, place=filler.place)
        return Done(request_id, tuple(filler.placed), value)
    except StoreError as error:
        return Failed(request_id, error, is_transient(error))
    except MemoryError:
        return Failed(request_id, _out_of_memory(request), is_transient=False)
    except Exception as error:  # a defect of ours: told by whoever asked, as there is nobody to tell here
        return Failed(request_id, _unexpected(request, error), is_transient(error))


def is_transient(error: BaseException | None) -> bool:
    """Whether an error goes back to one of the system that may not come again."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _TRANSIENT:
            return True
        error = error.__cause__ or error.__context__
    return False


def _out_of_memory(request: Request) -> SourceError:
    return SourceError(
        f"out of memory while reading {request.subject}",
        kind="no_memory",
        path=request.path,
        sample=request.first_sample,
        hint="lower --num-workers, or raise the limit on memory",
    )


def _unexpected(request: Request, error: Exception) -> StoreError:
    wrapped = StoreError(
        f"unexpected {type(error).__name__} while reading {request.subject}: {error}",
        kind="reader_failed",
        path=request.path,
        sample=request.first_sample,
        hint="run it with --num-workers 0 -vv and report what it prints",
    )
    wrapped.add_note("".join(traceback.format_exception(error)))
    return wrapped


def main() -> None:
    """Serve; arguments: process id of the supervisor, descriptors of socket and memory, slots, their size."""
    supervisor, channel_fd, memory_fd, num_slots, slot_nbytes = map(int, sys.argv[1:])
    _end_with(supervisor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's business
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what ends it is told by its log, not by a file "core"
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)
    import ups_store.sources.requests  # noqa: F401  # now, as later it would take time of the first one

    memory = SlotMemory(memory_fd, num_slots=num_slots, slot_nbytes=slot_nbytes)
    os.close(memory_fd)
    with socket.socket(fileno=channel_fd) as channel:
        serve(channel, memory)


def _end_with(supervisor: int) -> None:
    """Have this process killed when the thread that started it ends, which a hung read would not notice."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it ended before that call
        os._exit(1)
