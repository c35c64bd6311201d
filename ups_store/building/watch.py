"""How a build shows itself: bars and lines on stderr, a log for programs, a diagnosis when it stalls."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ups_store.building.config import BuildConfig
from ups_store.building.progress import Watcher
from ups_store.console import console, format_nbytes, interruptible
from ups_store.errors import ConfigError, StoreError, needs
from ups_store.launch import log_origin
from ups_store.printable import json_text, without_secrets
from ups_store.system import files
from ups_store.system.files import make_folder
from ups_store.system.memory import available_bytes
from ups_store.system.stalls import LookingThread, listening_to_stalls

with needs("hdf5"):
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

if TYPE_CHECKING:
    from ups_store.sources.reader_pool import PoolStatus  # h5py: not for --help

_MAX_SHOWN = 4  # readers in one line
_MAX_LOOK_S = 0.5  # from one look for a stall to the next
_PROGRESS_S = 1.0  # the most often that progress is logged
_FIRST_BYTES = 4096  # more than a line "start" has; a store or source may be one line of many GB
_SHARED = Path("/dev/shm")  # slots are memory without a name, which its size doesn't limit


@contextlib.contextmanager
def watching(config: BuildConfig, *, log_json: Path | None = None) -> Iterator[BuildWatcher]:
    """Make a command's watcher; Ctrl-C, SIGTERM and SIGUSR1 end the block by `BuildInterruptedError`."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(EventLog(log_json)) if log_json else None
        if log:
            stack.enter_context(listening_to_stalls(log.end))
        stack.enter_context(interruptible())
        stall_s, folder = config.reading.stall_warning_s, config.cache.dir
        watcher = stack.enter_context(BuildWatcher(console, log=log, stall_s=stall_s, folder=folder))
        # Warnings of others, such as an encoder's, are notes beside everything else.
        handler = logging.Handler(logging.WARNING)
        warn: Any = lambda record: watcher.note(f"{record.name}: {record.getMessage()}")  # noqa: E731
        handler.emit = warn  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        stack.callback(logging.getLogger().removeHandler, handler)
        yield watcher


class _Column(ProgressColumn):
    """Shows what a function says of a bar."""

    def __init__(self, text_of: Callable[[Task], str], style: str = "") -> None:
        super().__init__()
        self._text_of, self._style = text_of, style

    def render(self, task: Task) -> Text:
        return Text(self._text_of(task), style=self._style)


class BuildWatcher(Watcher, LookingThread):
    """Shows how a build goes, for as long as a block lasts.

    On a console stages are bars with rate and time left, and notes lines; a log gets all of it as events.
    Each time nothing was done for `stall_s`, both get a diagnosis, with the free room of the stores' folder:
    a thread of its own looks, so it sees a commit that hangs, too.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        log: EventLog | None = None,
        stall_s: float | None = None,
        folder: Path = Path(),
    ) -> None:
        Watcher.__init__(self)
        # Not waited for: the look at a disk that hangs may never end.
        every_s = None if stall_s is None else min(_MAX_LOOK_S, stall_s / 4)
        LookingThread.__init__(self, "stall watcher", every_s=every_s, is_waited_for=False)
        self._console, self._log, self._stall_s, self._folder = console, log, stall_s or 0.0, folder
        self._task: TaskID | None = None
        self._moved_s, self._diagnosed_s, self._logged_s = time.monotonic(), 0.0, 0.0
        self._watched = threading.get_ident()

        def amount(task: Task) -> str:
            if task.fields["unit"] == "bytes":
                return f"{format_nbytes(int(task.completed))}/{format_nbytes(int(task.total or 0))}"
            return f"{task.completed:.0f}/{task.total:.0f}"

        def rate(task: Task) -> str:
            if task.fields["unit"] == "bytes":
                return f"{format_nbytes(int(task.speed or 0))}/s"
            return f"{task.speed or 0:,.0f} {task.fields['unit']}/s"

        self._bars = Progress(
            TextColumn("{task.description:<28}", markup=False),
            BarColumn(bar_width=30),
            _Column(amount, "progress.download"),
            _Column(rate, "progress.data.speed"),
            TimeRemainingColumn(),
            _Column(lambda task: "" if task.finished else self.state()),
            console=console,
            disable=console is None or not console.is_terminal,
        )

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Show a new bar; a finished one stays."""
        super().stage(name, total, unit=unit)
        self._moved_s = time.monotonic()
        self._task = self._bars.add_task(name, total=total, unit=unit)
        if self._log:
            self._log.write("stage", name=name, total=total, unit=unit)

    def advance(self, num: int) -> None:
        """Move the bar; log it once a second, and at the end of a stage."""
        super().advance(num)
        self._moved_s = now = time.monotonic()
        if self._task is not None:
            self._bars.advance(self._task, num)
        if not self._log or (now - self._logged_s < _PROGRESS_S and self.done != self.total):
            return
        self._logged_s, status = now, self._status()
        readers = status.readers if status else ()
        self._log.write(
            "progress",
            name=self.name,
            done=self.done,
            total=self.total,
            waits_for=self.waits_for,
            per_second={stage: round(rate, 3) for stage, rate in self.per_second().items()},
            readers=[
                {"pid": r.pid, "doing": r.doing, "dataset": r.dataset, "for_s": round(now - r.since_s, 3)}
                for r in readers
            ],
            num_ready=status.num_ready if status else 0,
        )

    def note(self, message: str) -> None:
        """Print a line above the bars."""
        self._tell(message, "note")

    def waits(self, stage: str) -> None:
        """Count waiting for something else as progress."""
        super().waits(stage)
        self._moved_s = time.monotonic()

    def state(self) -> str:
        """Say what everything waits for, what the readers do, and how fast each stage is.

        Such as "waits for commit (reading 0.3 s, idle 0.1 s; 1 ready); read 900/s, commit 310/s".
        """
        waits, status = f"waits for {self.waits_for}" if self.waits_for else "", self._status()
        if waits and status is not None and status.readers:
            now = time.monotonic()
            longest_first = sorted(status.readers, key=lambda reader: reader.since_s)
            doing = [f"{reader.doing} {now - reader.since_s:.1f} s" for reader in longest_first[:_MAX_SHOWN]]
            if len(longest_first) > _MAX_SHOWN:
                doing.append(f"{len(longest_first) - _MAX_SHOWN} more")
            waits += f" ({', '.join(doing)}; {status.num_ready} ready)"
        per_second = self.per_second()
        rates = ", ".join(f"{stage} {rate:,.0f}/s" for stage, rate in per_second.items())
        return "; ".join(filter(None, (waits, rates if len(per_second) > 1 else "")))  # one: the bar has it

    def diagnosis(self) -> str:
        """Say all that can be seen from here, as lines."""
        still_s, how_far = time.monotonic() - self._moved_s, f"{self.done} of {self.total}"
        waits_for = self.waits_for or "sources to be found and opened"
        doing = f"{self.name} ({how_far if self.total else 'nothing'} done)"
        lines = [f"no progress for {still_s:.1f} s: {doing} waits for {waits_for}"]
        stacks = self.pool.stacks() if self.pool else {}  # asked for, which takes up to a second
        status, now = self._status(), time.monotonic()
        for reader in status.readers if status else ():
            line = f"reader {reader.pid}: {reader.doing} for {now - reader.since_s:.1f} s"
            if reader.request is not None:
                dataset = f"dataset {reader.dataset!r} of " if reader.dataset else ""
                line += f": {reader.request.subject} of {dataset}{reader.request.path}"
            lines += [line, *_indented(stacks.get(reader.pid, ""))]
        frame = sys._current_frames().get(self._watched)
        lines += ["the build itself", *_indented("".join(traceback.format_stack(frame)) if frame else "")]
        memory = format_nbytes(available_bytes())
        disk = format_nbytes(files.free_bytes(self._folder)) if self._folder.is_dir() else "no folder yet"
        shared = format_nbytes(files.free_bytes(_SHARED)) if _SHARED.is_dir() else "none"
        free = f"free memory {memory}, free disk in {self._folder} {disk}, /dev/shm {shared} (not used)"
        return "\n".join([*lines, free])

    def _status(self) -> PoolStatus | None:
        return self.pool.status() if self.pool else None

    def _tell(self, message: str, event: str) -> None:
        if self._console is not None:
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)
        if self._log:
            self._log.write(event, message=message)

    def _look(self) -> bool:
        if time.monotonic() - max(self._moved_s, self._diagnosed_s) >= self._stall_s:
            self._tell(self.diagnosis(), "stalled")
            self._diagnosed_s = time.monotonic()
        return True

    def __enter__(self) -> Self:
        self._bars.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._bars.stop()


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


class EventLog:
    """Events of a build in a file, one JSON object a line, appended.

    Every line has "time_s" (seconds since 1970), what `log_origin` gives ("rank", "host", "pid", "run"), and
    "event": "start", "stage" (name, total, unit), "progress" (name, done, total, waits_for, per_second by
    stage, readers, num_ready), "note" and "stalled" (message), "error" (kind, message), "end".
    """

    def __init__(self, path: Path, *, origin: Mapping[str, Any] | None = None) -> None:
        make_folder(path.parent, hint="check --log-json")

        def opened(name: str, flags: int) -> int:
            """Open for appending; a pipe without a reader is an error (ENXIO) instead of a wait for one."""
            fd = os.open(name, flags | os.O_NONBLOCK)
            os.set_blocking(fd, True)
            return fd

        try:
            first = b""
            if path.is_file():  # a pipe or terminal takes anything; a folder is refused by `open`
                with path.open("rb") as file:
                    first = file.readline(_FIRST_BYTES)
            event: Any = None
            with contextlib.suppress(ValueError, RecursionError):  # other text, bytes, a thousand brackets
                event = json.loads(first)
            is_log = isinstance(event, dict) and event.get("event") == "start" and "time_s" in event
            if first and not is_log:
                problem = "it isn't an event log, so nothing is appended"
                hint = "give --log-json another name"
                raise ConfigError(problem, path=path, hint=hint)
            # Unbuffered: a line that finds no room isn't written at the end again.
            self._file = open(path, "ab", buffering=0, opener=opened)  # noqa: SIM115
        except OSError as error:
            raise _unwritable(path, error) from error
        self._path, self._origin = path, {**log_origin(), **(origin or {})}
        self._lock = threading.Lock()  # a watcher writes from the thread that looks for stalls, too

    def write(self, event: str, **details: Any) -> None:
        """Write one event."""
        text = json_text({"time_s": round(time.time(), 3), "event": event, **self._origin, **details})
        line = f"{without_secrets(text)}\n".encode()
        with self._lock, files.disk_full_as_error(self._path, len(line)):
            try:
                self._file.write(line)
            except BrokenPipeError as error:  # else the command would take it for its own stdout
                raise _unwritable(self._path, error) from error

    def end(self, error: BaseException | None) -> None:
        """Log how it ends."""
        if error is None:
            self.write("end", is_done=True)
            return
        kind = error.kind if isinstance(error, StoreError) else type(error).__name__
        with contextlib.suppress(OSError, ConfigError):  # the first error is the one to report
            self.write("error", kind=kind, message=str(error))
            self.write("end", is_done=False)

    def __enter__(self) -> Self:
        try:
            self.write("start")
        except BaseException:
            self._file.close()  # what wasn't entered isn't left either
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end(error)
        finally:
            with self._lock:
                self._file.close()


def _unwritable(path: Path, error: OSError) -> ConfigError:
    reason, hint = (error.strerror or str(error)).lower(), "check --log-json"
    if path.is_fifo():
        reason, hint = "no process reads the pipe", f"begin that first, such as `cat {path.name} &`"
    return ConfigError(f"can't be written ({reason})", path=path, kind="log", hint=hint)
