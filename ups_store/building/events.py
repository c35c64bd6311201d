"""The watchers of one run of the command: the terminal, the stall watcher, and a log for programs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ups_store.building.config import BuildConfig
from ups_store.building.progress import StageRates, Watcher
from ups_store.building.watch import ConsoleWatcher, StallWatcher
from ups_store.console import console, interruptible
from ups_store.errors import ConfigError, StoreError
from ups_store.launch import log_origin
from ups_store.printable import json_text, without_secrets
from ups_store.system import files
from ups_store.system.files import make_folder
from ups_store.system.stalls import listening_to_stalls

if TYPE_CHECKING:
    from ups_store.sources.readers import ReaderPool  # h5py: not for --help


_PROGRESS_S = 1.0  # the most often that progress is logged

_FIRST_BYTES = 4096  # more than a line "start" has; a store or source may be one line of many GB


class EventLog(Watcher):
    """A watcher that appends events to a file, one JSON object a line.

    Every line has "time_s" (seconds since 1970), what `log_origin` gives ("rank", "host", "pid", "run"), and
    "event": "start", "stage" (name, total, unit), "progress"
    (name, done, total, waits_for, per_second by stage, readers, num_ready), "note" and "stalled" (message),
    "error" (kind, message), "end".

    Args:
        path: The file, which is made or continued.
        origin: What lines say otherwise of where they are from, such as the "run" that started this one.

    Raises:
        ConfigError: If it can't be written, or a file is there that is neither empty nor an event log.
    """

    def __init__(self, path: Path, *, origin: Mapping[str, Any] | None = None) -> None:
        make_folder(path.parent, hint="check --log-json")
        try:
            _check_event_log(path)
            # Unbuffered: a line that finds no room isn't written at the end again.
            self._file = open(path, "ab", buffering=0, opener=_opened)  # noqa: SIM115
        except OSError as error:
            raise _unwritable(path, error) from error
        self._path, self._origin = path, {**log_origin(), **(origin or {})}
        self._lock = threading.Lock()  # the stall watcher writes from its own thread
        self._stage: dict[str, Any] = {}
        self._waits_for = ""
        self._pool: ReaderPool | None = None
        self._logged_s = 0.0
        self._rates = StageRates()

    def write(self, event: str, **details: Any) -> None:
        """Write one event.

        Raises:
            DiskFullError: If the file system has no room for it.
            ConfigError: If it is a pipe that no process reads any more.
        """
        text = json_text({"time_s": round(time.time(), 3), "event": event, **self._origin, **details})
        line = f"{without_secrets(text)}\n".encode()
        with self._lock, files.disk_full_as_error(self._path, len(line)):
            try:
                self._file.write(line)
            except BrokenPipeError as error:  # else the command would take it for its own stdout
                raise _unwritable(self._path, error) from error

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Log a stage."""
        self._rates.begin()
        self._stage = {"name": name, "done": 0, "total": total}
        self.write("stage", name=name, total=total, unit=unit)

    def advance(self, num: int) -> None:
        """Log progress, once a second and at the end of a stage."""
        self._stage["done"] += num
        self._rates.advance(num)
        is_due = time.monotonic() - self._logged_s >= _PROGRESS_S
        if is_due or self._stage["done"] == self._stage["total"]:
            self._logged_s = time.monotonic()
            rates = {stage: round(rate, 3) for stage, rate in self._rates.per_second().items()}
            details = {"waits_for": self._waits_for, "per_second": rates, **self._queue()}
            self.write("progress", **self._stage, **details)

    def _queue(self) -> dict[str, Any]:
        """What the readers do, and how many results wait for the build."""
        now, status = time.monotonic(), self._pool.status() if self._pool else None
        readers = status.readers if status else ()
        shown = [
            {"pid": r.pid, "doing": r.doing, "dataset": r.dataset, "for_s": round(now - r.since_s, 3)}
            for r in readers
        ]
        return {"readers": shown, "num_ready": status.num_ready if status else 0}

    def note(self, message: str) -> None:
        """Log a note."""
        self.write("note", message=message)

    def watch(self, pool: ReaderPool) -> None:
        """Readers that progress describes."""
        self._pool = pool

    def waits(self, what: str) -> None:
        """What is waited for, to be logged with progress."""
        self._rates.waits(what)
        self._waits_for = what

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

    def end(self, error: BaseException | None) -> None:
        """Log how it ends."""
        if error is None:
            self.write("end", is_done=True)
            return
        named = error.kind if isinstance(error, StoreError) else type(error).__name__
        with contextlib.suppress(OSError, ConfigError):  # the first error is the one to report
            self.write("error", kind=named, message=str(error))
            self.write("end", is_done=False)


def _opened(path: str, flags: int) -> int:
    """Open for appending; a pipe without a reader is an error (ENXIO) instead of a wait for one."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(fd, True)
    return fd


def _unwritable(path: Path, error: OSError) -> ConfigError:
    reason, hint = (error.strerror or str(error)).lower(), "check --log-json"
    if path.is_fifo():
        reason, hint = "no process reads the pipe", f"begin that first, such as `cat {path.name} &`"
    return ConfigError(f"can't be written ({reason})", path=path, kind="log", hint=hint)


def _check_event_log(path: Path) -> None:
    if not path.is_file():  # a pipe or terminal takes anything; a folder is refused by `open`
        return
    with path.open("rb") as file:
        first = file.readline(_FIRST_BYTES)
    if first and not _is_start(first):
        raise ConfigError(
            "it isn't an event log, so nothing is appended", path=path, hint="give --log-json another name"
        )


def _is_start(line: bytes) -> bool:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # other text, other bytes, a thousand brackets
        return False
    return isinstance(event, dict) and event.get("event") == "start" and "time_s" in event


class Watchers(Watcher):
    """Several watchers as one."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def stage(self, name: str, total: int, *, unit: str) -> None:
        """Pass it on to all of them."""
        for watcher in self._watchers:
            watcher.stage(name, total, unit=unit)

    def advance(self, num: int) -> None:
        """Pass it on to all of them."""
        for watcher in self._watchers:
            watcher.advance(num)

    def note(self, message: str) -> None:
        """Pass it on to all of them."""
        for watcher in self._watchers:
            watcher.note(message)

    def watch(self, pool: ReaderPool) -> None:
        """Pass it on to all of them."""
        for watcher in self._watchers:
            watcher.watch(pool)

    def waits(self, what: str) -> None:
        """Pass it on to all of them."""
        for watcher in self._watchers:
            watcher.waits(what)


class _Warnings(logging.Handler):
    """Notes the warnings of others, such as an encoder's, beside everything else."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(f"{record.name}: {record.getMessage()}")


@contextmanager
def _noting_warnings(note: Callable[[str], None]) -> Iterator[None]:
    handler = _Warnings(note)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def watching(config: BuildConfig, *, log_json: Path | None = None) -> Iterator[Watchers]:
    """All watchers, inside a block that Ctrl-C, SIGTERM and SIGUSR1 end by `BuildInterruptedError`."""
    with ExitStack() as stack:
        log = stack.enter_context(EventLog(log_json)) if log_json else None
        if log:
            stack.enter_context(listening_to_stalls(log.end))
        stack.enter_context(interruptible())
        shown = stack.enter_context(ConsoleWatcher(console))

        def note(diagnosis: str) -> None:
            shown.note(diagnosis)
            if log:
                log.write("stalled", message=diagnosis)

        stall = StallWatcher(config.reading.stall_warning_s, folder=config.cache.dir, note=note)
        stack.enter_context(stall)
        watchers = Watchers([shown, stall, *([log] if log else [])])
        stack.enter_context(_noting_warnings(watchers.note))
        yield watchers
