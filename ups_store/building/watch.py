"""How a build shows itself: bars on a terminal, lines elsewhere, and a diagnosis when it doesn't get on."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ups_store.building.progress import StageRates, Watcher
from ups_store.console import format_nbytes
from ups_store.errors import needs
from ups_store.system import files
from ups_store.system.memory import available_bytes
from ups_store.system.stalls import LookingThread

with needs("hdf5"):
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

if TYPE_CHECKING:
    from ups_store.sources.readers import ReaderPool, ReaderStatus  # h5py: not for --help


_MAX_SHOWN = 4  # readers in one line


class _RateColumn(ProgressColumn):
    """Samples or bytes per second."""

    def render(self, task: Task) -> Text:
        if task.fields["unit"] == "bytes":
            return TransferSpeedColumn().render(task)
        return Text(f"{task.speed or 0:,.0f} {task.fields['unit']}/s", style="progress.data.speed")


class _CountColumn(ProgressColumn):
    """How much of how much."""

    def render(self, task: Task) -> Text:
        column = DownloadColumn() if task.fields["unit"] == "bytes" else MofNCompleteColumn()
        return column.render(task)


class _StateColumn(ProgressColumn):
    """What the stage that isn't done waits for."""

    def __init__(self, state: Callable[[], str]) -> None:
        super().__init__()
        self._state = state

    def render(self, task: Task) -> Text:
        return Text("" if task.finished else self._state())


class ConsoleWatcher(Watcher):
    """Shows stages as progress bars with rate and time left, and notes as lines, on stderr.

    Args:
        console: Where to; bars are left out if it isn't a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description:<28}", markup=False),
            BarColumn(bar_width=30),
            _CountColumn(),
            _RateColumn(),
            TimeRemainingColumn(),
            _StateColumn(self.state),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task: TaskID | None = None
        self._pool: ReaderPool | None = None
        self._waits_for = ""
        self._rates = StageRates()

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Show a new bar; a finished one stays."""
        self._rates.begin()
        self._task = self._progress.add_task(name, total=total, unit=unit)

    def advance(self, num: int) -> None:
        """Move the bar."""
        self._rates.advance(num)
        if self._task is not None:
            self._progress.advance(self._task, num)

    def note(self, message: str) -> None:
        """Print a line above the bars."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def watch(self, pool: ReaderPool) -> None:
        """Show what these readers do."""
        self._pool = pool

    def waits(self, what: str) -> None:
        """Show what everything waits for."""
        self._rates.waits(what)
        self._waits_for = what

    def state(self) -> str:
        """What everything waits for, what the readers do, and how fast each stage is.

        Such as "waits for commit (reading 0.3 s, idle 0.1 s; 1 ready); read 900/s, commit 310/s".
        """
        waits = f"waits for {self._waits_for}" if self._waits_for else ""
        per_second = self._rates.per_second()
        rates = ", ".join(f"{stage} {rate:,.0f}/s" for stage, rate in per_second.items())
        rates = rates if len(per_second) > 1 else ""  # of a single one, the bar has it
        return "; ".join(part for part in (f"{waits}{self._queue()}", rates) if part)

    def _queue(self) -> str:
        status = self._pool.status() if self._pool else None
        if status is None or not status.readers or not self._waits_for:
            return ""
        now = time.monotonic()
        longest_first = sorted(status.readers, key=lambda reader: reader.since_s)
        shown = [f"{reader.doing} {now - reader.since_s:.1f} s" for reader in longest_first[:_MAX_SHOWN]]
        if len(longest_first) > _MAX_SHOWN:
            shown.append(f"{len(longest_first) - _MAX_SHOWN} more")
        return f" ({', '.join(shown)}; {status.num_ready} ready)"

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


_MAX_LOOK_S = 0.5

_SHARED = Path("/dev/shm")  # slots are memory without a name, which its size doesn't limit


class StallWatcher(Watcher, LookingThread):
    """A watcher that says what everything waits for, each time nothing was done for so long.

    A thread of its own looks, so it sees a commit that hangs, too.

    Args:
        after_s: How long.
        folder: Where the stores go, whose free space is named.
        note: Given the diagnosis, lines of text; called by the thread.
    """

    def __init__(self, after_s: float, *, folder: Path, note: Callable[[str], None]) -> None:
        # Not waited for: the look at a disk that hangs may never end.
        super().__init__("stall watcher", every_s=min(_MAX_LOOK_S, after_s / 4), is_waited_for=False)
        self._after_s, self._noted_s = after_s, 0.0
        self._folder = folder
        self._note = note
        self._moved_s = time.monotonic()
        self._stage = "start"
        self._done, self._total = 0, 0
        self._waits_for = "sources to be found and opened"
        self._pool: ReaderPool | None = None
        self._watched = threading.get_ident()

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Another stage is progress."""
        self._stage, self._done, self._total = name, 0, total
        self._moved_s = time.monotonic()

    def advance(self, num: int) -> None:
        """This is progress."""
        self._done += num
        self._moved_s = time.monotonic()

    def watch(self, pool: ReaderPool) -> None:
        """Readers that the diagnosis describes."""
        self._pool = pool

    def waits(self, what: str) -> None:
        """What is waited for from now on."""
        self._waits_for = what
        self._moved_s = time.monotonic()

    def _look(self) -> bool:
        if time.monotonic() - max(self._moved_s, self._noted_s) >= self._after_s:
            self._note(self.diagnosis())
            self._noted_s = time.monotonic()
        return True

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
