"""What a build waits for, told when it doesn't get on."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ups_store.console import format_nbytes
from ups_store.system import files
from ups_store.system.memory import available_bytes

if TYPE_CHECKING:
    from ups_store.sources.pool import ReaderPool, ReaderStatus  # h5py: not for --help

_MAX_LOOK_S = 0.5
_SHARED = Path("/dev/shm")  # slots are memory without a name, which its size doesn't limit


class StallWatcher:
    """A watcher that says what everything waits for, each time nothing was done for so long.

    A thread of its own looks, so it tells of a commit that hangs, too. It can't tell of a read in the
    build's own process (`--num-workers 0`), as HDF5 holds Python's lock meanwhile.

    Args:
        after_s: How long.
        folder: Where the stores go, whose free space is told.
        say: Given the diagnosis, lines of text; called by the thread.
    """

    def __init__(self, after_s: float, *, folder: Path, say: Callable[[str], None]) -> None:
        self._after_s = after_s
        self._folder = folder
        self._say = say
        self._moved_s = time.monotonic()
        self._stage = "start"
        self._done, self._total = 0, 0
        self._waits_for = "sources to be found and opened"
        self._pool: ReaderPool | None = None
        self._watched = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="stall watcher", daemon=True)

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Another stage is progress."""
        self._stage, self._done, self._total = name, 0, total
        self._moved_s = time.monotonic()

    def advance(self, num: int) -> None:
        """This is progress."""
        self._done += num
        self._moved_s = time.monotonic()

    def note(self, message: str) -> None:
        """Not progress: a reader that is replaced says so."""

    def watch(self, pool: ReaderPool) -> None:
        """Readers that the diagnosis tells of."""
        self._pool = pool

    def waits(self, what: str) -> None:
        """What is waited for from now on."""
        self._waits_for = what
        self._moved_s = time.monotonic()

    def _look(self) -> None:
        told_s = 0.0
        while not self._ended.wait(min(_MAX_LOOK_S, self._after_s / 4)):
            if time.monotonic() - max(self._moved_s, told_s) >= self._after_s:
                self._say(self.diagnosis())
                told_s = time.monotonic()

    def diagnosis(self) -> str:
        """All that can be seen from here, as lines."""
        still_s = time.monotonic() - self._moved_s
        how_far = f"{self._done} of {self._total}" if self._total else "nothing"
        lines = [
            f"no progress for {still_s:.1f} s: {self._stage} ({how_far} done) waits for {self._waits_for}"
        ]
        if self._pool:
            stacks = self._pool.stacks()
            for reader in self._pool.status().readers:
                lines += [describe_reader(reader), *_indented(stacks.get(reader.pid, ""))]
        lines += ["the build itself", *_indented(_stack_of(self._watched))]
        return "\n".join([*lines, self._resources()])

    def _resources(self) -> str:
        memory = format_nbytes(available_bytes())
        disk = format_nbytes(files.free_bytes(self._folder)) if self._folder.is_dir() else "no folder yet"
        shared = format_nbytes(files.free_bytes(_SHARED)) if _SHARED.is_dir() else "none"
        return f"free memory {memory}, free disk in {self._folder} {disk}, /dev/shm {shared} (not used)"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()  # not joined: the look at a disk that hangs may never end


def describe_reader(reader: ReaderStatus) -> str:
    """What a reader does, such as "reader 71: reading for 3.1 s: samples 4..7 of a.hdf5"."""
    text = f"reader {reader.pid}: {reader.doing} for {time.monotonic() - reader.since_s:.1f} s"
    if reader.request is None:
        return text
    dataset = f"dataset {reader.dataset!r} of " if reader.dataset else ""
    return f"{text}: {reader.request.subject} of {dataset}{reader.request.path}"


def _stack_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame else ""


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]
