"""One maker at a time of what several processes want, and the line on stderr that says how far it is."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from ups_store.errors import BuildLockedError, FormatError
from ups_store.format.build_tail import BUILDER_LOCK
from ups_store.printable import one_line
from ups_store.read.recovery import building_path
from ups_store.system import files, locks

SILENT_S = 600.0  # without a sign of life, until a maker is given up
_BEAT_S = 5.0  # between signs of life
_LOOK_S = 0.1
_MAX_NAME_BYTES = 300  # of a process and its machine
_SHOWN_EVERY_S = 0.2
_ERASE = "\r\x1b[K"


class MakerTurn:
    """The right to make a store, held in a context; waits for the process that has it.

    Whoever has it holds a lock on `.NAME.making` and writes that file's time every few seconds. In a folder
    that can't be written to, or without locks, nothing is waited for.
    """

    def __init__(self, target: Path, *, is_shown: bool | None = None) -> None:
        self._target, self._path = target, _turn_path(target)
        self._is_shown, self.fd = is_shown, -1
        self._signs: list[Any] = []
        self._since_s = time.monotonic()
        self._has_ended = threading.Event()
        self._beating: threading.Thread | None = None

    def __enter__(self) -> Self:
        try:
            with ProgressLine(self._target.name, is_wanted=self._is_shown) as line:
                while not self._take():
                    line.say("waiting for another process, which makes it")
                    self.wait()
            if self.fd >= 0:
                locks.close_on_fork(self)

                def beat() -> None:
                    while not self._has_ended.wait(_BEAT_S):
                        with contextlib.suppress(OSError):  # the others wait shorter, no more
                            files.touch(self.fd)

                self._beating = threading.Thread(target=beat, name="ups_store turn", daemon=True)
                self._beating.start()
        except BaseException:  # no `__exit__` follows, and this process would wait for its own lock
            self._end()
            raise
        return self

    def _take(self) -> bool:
        """Take the lock; also true where there can be none."""
        try:
            fd = files.open_or_create(self._path)
        except (OSError, FormatError):
            return True
        try:
            is_ours = locks.try_lock(fd, BUILDER_LOCK)
            if is_ours and files.is_file_at(fd, self._path):  # else the maker before ended this moment
                files.truncate(fd, 0)
                files.write_at(fd, 0, f"process {os.getpid()} of {socket.gethostname()}".encode())
                self.fd, fd = fd, -1
                return True
            return False
        except OSError:  # a file system without locks
            return True
        finally:
            if fd >= 0:
                files.close(fd)

    def wait(self) -> None:
        """Wait a moment for the process that makes the store, with or without this lock."""
        signs = [files.last_write(path) for path in (self._path, building_path(self._target))]
        if self.fd >= 0:
            signs[0] = None  # that is our own
        if signs != self._signs:
            self._signs, self._since_s = signs, time.monotonic()
        if time.monotonic() - self._since_s > SILENT_S:
            maker = None
            if self.fd < 0:
                with contextlib.suppress(OSError), files.opened(self._path) as fd:
                    maker = files.read_at(fd, 0, _MAX_NAME_BYTES).decode("utf-8", "replace") or None
            problem = f"another process makes it, and hasn't got on for {SILENT_S:g} s"
            hint = "it may be stopped: end it, and run again"
            raise BuildLockedError(problem, path=self._target, found=maker, hint=hint)
        time.sleep(_LOOK_S)

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        self._has_ended.set()
        if self._beating is not None and self._beating.ident is not None:  # it was started
            self._beating.join()  # before the number of its descriptor is another file's
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # in a folder of others it may be theirs
                files.remove(self._path)
            files.close(self.fd)
            self.fd = -1


def _turn_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.making")


def remove_turn(target: Path) -> None:
    """Remove what a killed maker left of its turn, as far as that is possible."""
    path = _turn_path(target)
    with contextlib.suppress(OSError, FormatError), files.opened(path, writable=True) as fd:
        if locks.try_lock(fd, BUILDER_LOCK) and files.is_file_at(fd, path):
            files.remove(path)


class ProgressLine:
    """Counts samples and bytes in a line on stderr, which goes away at the end; by default on a terminal."""

    def __init__(self, name: str, *, total: int | None = None, is_wanted: bool | None = None) -> None:
        self._name, self._total = one_line(name), total
        self._shows = sys.stderr.isatty() if is_wanted is None and sys.stderr else bool(is_wanted)
        self._began = self._last = time.monotonic()
        self._first = self._samples = self._nbytes = 0

    def begin_at(self, num_samples: int) -> None:
        """Note that so many samples were there already: they don't count for the rate."""
        self._first = self._samples = num_samples

    def advance(self, num_samples: int, nbytes: int) -> None:
        """Note that so many more were taken."""
        self._samples += num_samples
        self._nbytes += nbytes
        if self._shows and time.monotonic() - self._last >= _SHOWN_EVERY_S:
            rate = (self._samples - self._first) / max(1e-9, time.monotonic() - self._began)
            of = "" if self._total is None else f" of {self._total:,}"
            line = f"{self._name}: {self._samples:,}{of} samples, {self._nbytes / 1e6:,.0f} MB, {rate:,.0f}/s"
            if self._total is not None and rate > 0:
                left_s = round((self._total - self._samples) / rate)
                line += f", {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"
            self._last = time.monotonic()
            self._write(line)

    def say(self, doing: str) -> None:
        """Show something else, such as what happens at the end."""
        self._write(f"{self._name}: {one_line(doing)}")

    def _write(self, line: str) -> None:
        if self._shows:
            sys.stderr.write(f"{_ERASE}{line}")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._write("")
